package engine

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/internal/wire"
)

// session is an engine that has greeted.
type session struct {
	conn    *conn
	backend Session
	hello   Hello
	facts   Facts
	version uint32
	groups  uint32
	token   wire.Token

	workers map[*conn]struct{} // guarded by the server's mu

	requests int    // unfinished; the reader's
	goodbye  uint32 // call to be answered when all is given back

	// Calls that are answered later. A call takes its place here before the
	// node hears of it and gives it back when its answer has left the queue,
	// so later always has room and the node's callback never waits.
	waits    atomic.Int32
	waitKeys atomic.Int64
	later    chan laterReply
	done     chan struct{} // closed when the session is over

	out []byte // the reader's reply, reused
	m   scratch
}

// scratch are the reader's messages, whose slices are reused from call to call.
type scratch struct {
	request  wire.NewRequest
	lookup   wire.Lookup
	answer   wire.LookupReply
	reserve  wire.Reserve
	grants   wire.ReserveReply
	commit   wire.Commit
	abort    wire.Abort
	statuses wire.FillReply
	keys     wire.Keys
	leases   wire.PinReply
	unpin    wire.Unpin
	finish   wire.Finish
	flush    wire.Flush
	reset    wire.Reset
	status   wire.StatusReply
}

// laterReply is an answer that the node gives after the call's own turn.
type laterReply struct {
	call uint32
	t    wire.Type
	m    wire.Message
	keys int64
}

// keptBytes is how large a frame may be without its scratch memory being given
// to the collector.
const keptBytes = 128 << 10

// greet reads the hello.
func (s *session) greet(body []byte) (err error) {
	if s.version, err = wire.Negotiate(body); err != nil {
		return err
	}
	var m wire.Hello
	if err := m.Decode(body); err != nil {
		return err
	}
	ns, err := block.NewNamespace(m.Spec)
	if err != nil {
		return &wire.Error{Code: wire.CodeInvalid, Field: "hello", Message: err.Error()}
	}
	if m.Expect != nil && *m.Expect != ns.Fingerprint() {
		return &wire.Error{Code: wire.CodeNamespace, Field: "hello.expect", Message: fmt.Sprintf(
			"the namespace has fingerprint %s, the engine expects %s; engine and node disagree on what its fields mean", ns.Fingerprint(), m.Expect)}
	}
	s.groups = uint32(len(m.Spec.Groups))
	s.hello = Hello{NS: ns, Name: m.Name, Engine: m.Engine, PID: s.conn.peer.pid, UID: s.conn.peer.uid}
	return nil
}

func (s *session) region() wire.Region {
	r := wire.Region{Version: s.version, Session: s.facts.ID, Epoch: s.facts.Epoch, Fingerprint: s.hello.NS.Fingerprint(),
		RegionBytes: uint64(s.facts.RegionBytes), Groups: make([]wire.Geometry, s.groups)}
	for i := range r.Groups {
		r.Groups[i] = wire.Geometry{Stride: uint64(s.facts.Strides[i]), BlockBytes: uint64(s.hello.NS.BlockBytes(uint32(i)))}
	}
	return r
}

// serve reads and answers calls until the connection ends, and says why.
func (s *session) serve(r *wire.Reader) error {
	srv := s.conn.srv
	for {
		f, err := r.Read()
		if err == nil {
			began := time.Now()
			srv.count(f.Type)
			var waits bool
			if waits, err = s.call(f); err == nil && f.Type == wire.TypeLookup && !waits && srv.opts.OnLookup != nil {
				srv.opts.OnLookup(time.Since(began))
			}
		}
		if err != nil {
			if e := (*wire.Error)(nil); errors.As(err, &e) {
				_ = s.conn.writeError(f.Call, e) // whether it arrives changes nothing
			}
			return err
		}
		if max(len(f.Body), cap(s.out)) > keptBytes {
			s.m, s.out = scratch{}, nil
		}
	}
}

// call carries out one call and answers it, unless it waits. An error ends the
// session.
func (s *session) call(f wire.Frame) (waits bool, err error) {
	if f.Type == wire.TypeGoodbye {
		if err := (wire.Empty{}).Decode(f.Body); err != nil {
			return false, err
		}
		s.goodbye = f.Call
		return false, errGoodbye
	}
	m, err := s.dispatch(f)
	switch {
	case err != nil:
		e := wire.ErrorOf(err)
		if e.Code.Ends() {
			return false, e
		}
		return false, s.conn.writeError(f.Call, e)
	case m == nil:
		return true, nil
	}
	s.out = wire.AppendFrame(s.out[:0], f.Type|wire.ReplyBit, f.Call, m)
	return false, s.conn.write(s.out)
}

// dispatch returns the reply, or nil when it comes later.
func (s *session) dispatch(f wire.Frame) (wire.Message, error) {
	m, b := &s.m, s.backend
	switch f.Type {
	case wire.TypeLookup:
		if err := m.lookup.Decode(f.Body); err != nil {
			return nil, err
		}
		return s.lookup(f.Call, &m.lookup)
	case wire.TypeNewRequest:
		if err := m.request.Decode(f.Body); err != nil {
			return nil, err
		}
		if most := s.conn.srv.opts.RequestsMax; s.requests >= most {
			return nil, fmt.Errorf("%w: %d requests are unfinished, which is the most (requests_max)", core.ErrTooMany, most)
		}
		if err := b.NewRequest(m.request.Request, m.request.Params); err != nil {
			return nil, err
		}
		s.requests++
		return wire.Empty{}, nil
	case wire.TypeReserve:
		if err := m.reserve.Decode(f.Body); err != nil {
			return nil, err
		}
		if err := s.check("reserve.keys", m.reserve.Keys, m.reserve.Group, m.reserve.Group); err != nil {
			return nil, err
		}
		out, err := b.Reserve(m.reserve.Request, m.reserve.Group, int(m.reserve.First), m.reserve.Keys, m.grants.Grants[:0])
		m.grants.Grants = out
		return &m.grants, err
	case wire.TypeCommit:
		if err := m.commit.Decode(f.Body); err != nil {
			return nil, err
		}
		out, err := b.Commit(m.commit.Request, m.commit.Fills, m.statuses.Statuses[:0])
		m.statuses.Statuses = out
		return &m.statuses, err
	case wire.TypeAbort:
		if err := m.abort.Decode(f.Body); err != nil {
			return nil, err
		}
		out, err := b.Abort(m.abort.Request, m.abort.Fills, m.statuses.Statuses[:0])
		m.statuses.Statuses = out
		return &m.statuses, err
	case wire.TypePin, wire.TypeTouch:
		if err := m.keys.Decode(f.Body); err != nil {
			return nil, err
		}
		if err := s.check(f.Type.String()+".keys", m.keys.Keys, 0, s.groups-1); err != nil {
			return nil, err
		}
		if f.Type == wire.TypeTouch {
			return wire.Empty{}, b.Touch(m.keys.Request, m.keys.Keys)
		}
		out, err := b.Pin(m.keys.Request, m.keys.Keys, m.leases.Leases[:0])
		m.leases.Leases = out
		return &m.leases, err
	case wire.TypeUnpin:
		if err := m.unpin.Decode(f.Body); err != nil {
			return nil, err
		}
		out, err := b.Unpin(m.unpin.Request, m.unpin.Leases, m.statuses.Statuses[:0])
		m.statuses.Statuses = out
		return &m.statuses, err
	case wire.TypeFinish:
		if err := m.finish.Decode(f.Body); err != nil {
			return nil, err
		}
		if err := b.Finish(m.finish.Request); err != nil {
			return nil, err
		}
		s.requests = max(s.requests-1, 0)
		return wire.Empty{}, nil
	case wire.TypeFlush:
		if err := m.flush.Decode(f.Body); err != nil {
			return nil, err
		}
		call := f.Call
		return s.wait(0, func() error {
			return b.Flush(m.flush.Request, ms(m.flush.WaitMS), func(o core.Flushed) {
				s.answer(laterReply{call: call, t: wire.TypeFlush, m: &wire.FlushReply{Flushed: o}})
			})
		})
	case wire.TypeReset:
		if err := m.reset.Decode(f.Body); err != nil {
			return nil, err
		}
		call := f.Call
		return s.wait(0, func() error {
			return b.Reset(ms(m.reset.WaitMS), func(done bool) {
				s.answer(laterReply{call: call, t: wire.TypeReset, m: &wire.ResetReply{Done: done}})
			})
		})
	case wire.TypeStatus:
		if err := (wire.Empty{}).Decode(f.Body); err != nil {
			return nil, err
		}
		m.status.JSON = s.conn.srv.backend.Status()
		if n := len(m.status.JSON); n > wire.FrameMax-1024 {
			return nil, fmt.Errorf("status has %d bytes, more than a frame can carry", n)
		}
		return &m.status, nil
	case wire.TypePing:
		return wire.Empty{}, wire.Empty{}.Decode(f.Body)
	case wire.TypeHello, wire.TypeAttach:
		return nil, fmt.Errorf("%w: this connection has greeted already; open another", core.ErrInvalid)
	}
	if f.Type&wire.ReplyBit != 0 {
		return nil, &wire.Error{Code: wire.CodeMalformed, Message: fmt.Sprintf("%s from a client", f.Type)}
	}
	return nil, &wire.Error{Code: wire.CodeUnsupported, Message: fmt.Sprintf("call type %d is not known to this node; upgrade it", f.Type)}
}

func ms(n uint32) time.Duration { return time.Duration(n) * time.Millisecond }

func (s *session) lookup(call uint32, m *wire.Lookup) (wire.Message, error) {
	if len(m.Keys) > int(s.groups) {
		return nil, fmt.Errorf("%w: lookup.counts has %d groups, the namespace %d", core.ErrInvalid, len(m.Keys), s.groups)
	}
	n := 0
	for g, keys := range m.Keys {
		if err := s.check("lookup.keys", keys, uint32(g), uint32(g)); err != nil {
			return nil, err
		}
		n += len(keys)
	}
	if m.WaitMS == 0 {
		_, err := s.backend.Lookup(m.Request, m.Keys, m.Peek, 0, &s.m.answer.Answer, nil)
		return &s.m.answer, err
	}
	if err := s.takeWait(int64(n)); err != nil {
		return nil, err
	}
	pending, err := s.backend.Lookup(m.Request, m.Keys, m.Peek, ms(m.WaitMS), &s.m.answer.Answer, func(a *core.Answer) {
		r := laterReply{call: call, t: wire.TypeLookup, m: &wire.LookupReply{Answer: *a}, keys: int64(n)}
		if a.Void {
			r.t, r.m = wire.TypeError, wire.ErrorOf(wire.ErrOvertaken)
		}
		s.answer(r)
	})
	if err == nil && pending {
		return nil, nil
	}
	s.giveWait(int64(n))
	return &s.m.answer, err
}

// check says which key is of a group that it must not be of.
func (s *session) check(field string, keys []block.Key, least, most uint32) error {
	for i := range keys {
		if g := keys[i].Group(); g < least || g > most || g >= s.groups {
			return fmt.Errorf("%w: %s[%d] is of group %d, want %d to %d", core.ErrInvalid, field, i, g, least, min(most, s.groups-1))
		}
	}
	return nil
}

// wait makes a call that is answered later.
func (s *session) wait(keys int64, call func() error) (wire.Message, error) {
	if err := s.takeWait(keys); err != nil {
		return nil, err
	}
	if err := call(); err != nil {
		s.giveWait(keys)
		return nil, err
	}
	return nil, nil
}

func (s *session) takeWait(keys int64) error {
	o := &s.conn.srv.opts
	if n := s.waits.Add(1); n > int32(o.WaitsMax) {
		s.waits.Add(-1)
		return fmt.Errorf("%w: %d calls wait for their answers, which is the most (waits_max)", core.ErrTooMany, o.WaitsMax)
	}
	if n := s.waitKeys.Add(keys); n > int64(o.WaitKeysMax) {
		s.giveWait(keys)
		return fmt.Errorf("%w: waiting lookups would have %d keys, the most is %d (wait_keys_max)", core.ErrTooMany, n, o.WaitKeysMax)
	}
	return nil
}

func (s *session) giveWait(keys int64) {
	s.waitKeys.Add(-keys)
	s.waits.Add(-1)
}

// answer queues an answer of the node. It runs under the node's lock and never
// waits: the place in the queue was taken with the call. A second answer to
// one call, which the contract forbids, could find it full.
func (s *session) answer(r laterReply) {
	select {
	case s.later <- r:
	default:
		s.conn.fail(fmt.Errorf("%d answers for at most %d calls", len(s.later)+1, cap(s.later)))
	}
}

// writeLater writes those answers: the session's second goroutine.
func (s *session) writeLater() {
	var out []byte
	for {
		select {
		case <-s.done:
			return
		case r := <-s.later:
			// Before it is written: who has read the answer finds the place free.
			s.giveWait(r.keys)
			out = wire.AppendFrame(out[:0], r.t|wire.ReplyBit, r.call, r.m)
			if s.conn.write(out) != nil {
				return // the reader sees it too, and ends the session
			}
			if cap(out) > keptBytes {
				out = nil
			}
		}
	}
}
