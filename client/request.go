package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/internal/wire"
)

// Values of the protocol.
type (
	// Verdict is the answer to a lookup for one key.
	Verdict = core.Verdict
	// GrantStatus is the answer to a reserve for one key.
	GrantStatus = core.GrantStatus
	// FillStatus is the answer to a commit, abort or unpin for one item.
	FillStatus = core.FillStatus
	// Params are the parameters of a request.
	Params = core.Params
	// TierFilter is an entry of Params.LoadTiers or StoreTiers.
	TierFilter = core.TierFilter
	// Flushed is the outcome of Request.Flush.
	Flushed = core.Flushed
	// GroupAnswer is a lookup's answer for one KV group.
	GroupAnswer = core.GroupAnswer
)

// Verdicts. Those from MissAbsent on are all a Miss, and say why.
const (
	Hit             = core.Hit
	HitPending      = core.HitPending
	Retry           = core.Retry
	MissAbsent      = core.MissAbsent
	MissFiltered    = core.MissFiltered
	MissFailed      = core.MissFailed
	MissWaited      = core.MissWaited
	MissNoRoom      = core.MissNoRoom
	MissUnavailable = core.MissUnavailable
	MissCapped      = core.MissCapped
	MissUnusable    = core.MissUnusable
	MissDraining    = core.MissDraining
)

// Statuses of grants and fills.
const (
	Granted      = core.Granted
	GrantPresent = core.GrantPresent
	GrantFilling = core.GrantFilling
	GrantCapped  = core.GrantCapped
	FillOK       = core.FillOK
	FillStale    = core.FillStale
	FillDropped  = core.FillDropped
)

// NoLimits are the parameters of an ordinary request.
func NoLimits() Params { return core.NoLimits() }

// Request is one of the engine's inference requests. It belongs to the session
// that it was made in, and all its calls fail when that is lost. Methods may
// be called from any goroutine.
type Request struct {
	c  *Client
	s  *session
	id string
}

// NewRequest begins a request. ErrConflict: the id is in use and not finished.
func (c *Client) NewRequest(ctx context.Context, id string, p Params) (*Request, error) {
	s, err := c.session()
	if err != nil {
		return nil, err
	}
	r := &Request{c: c, s: s, id: id}
	if err := r.do(ctx, wire.TypeNewRequest, &wire.NewRequest{Request: id, Params: p}, wire.Empty{}); err != nil {
		return nil, err
	}
	return r, nil
}

// ID is the engine's own.
func (r *Request) ID() string { return r.id }

// Epoch is that of the session that the request belongs to.
func (r *Request) Epoch() string { return r.s.region.info.Epoch }

func (r *Request) do(ctx context.Context, t wire.Type, m, reply wire.Message) error {
	return r.s.do(ctx, r.c.opts.CallTimeout, t, m, reply)
}

// LookupOptions say how a lookup behaves.
type LookupOptions struct {
	// Peek answers from what is known now: it pins nothing and starts nothing.
	Peek bool
	// Wait, if above 0, lets the node hold its answer back until the verdicts
	// are final or this much time has passed. Rounded up to milliseconds.
	Wait time.Duration
}

// Answer is the outcome of a lookup. It may be used for another.
type Answer struct {
	Tokens int64 // length of the prefix that all groups can serve; pending blocks count until Final
	Final  bool  // nothing that Tokens needs is HitPending or Retry
	Groups []GroupAnswer

	epoch string
	reply wire.LookupReply
}

// Lease is the lease on the key at index i of the group's list; false when
// that block is not ready, or not needed for Tokens, or not pinned because it was a peek.
func (a *Answer) Lease(group, i int) (Lease, bool) {
	if group < 0 || group >= len(a.Groups) {
		return Lease{}, false
	}
	g := &a.Groups[group]
	if i -= g.First; i < 0 || i >= len(g.Leases) || g.Leases[i] == (core.Lease{}) {
		return Lease{}, false
	}
	return lease(a.epoch, uint32(group), g.Leases[i]), true
}

func lease(epoch string, group uint32, l core.Lease) Lease {
	return Lease{Epoch: epoch, Group: group, Slot: uint32(l.Slot), Gen: l.Gen, Sum: l.Sum}
}

// Lookup asks how much of a prompt is known, and pins what is ready. keys has
// one list for each group of the namespace, in prefix order.
func (r *Request) Lookup(ctx context.Context, keys [][]block.Key, o LookupOptions) (*Answer, error) {
	a := new(Answer)
	return a, r.LookupInto(ctx, keys, o, a)
}

// LookupInto is Lookup in memory that a has from an earlier one.
func (r *Request) LookupInto(ctx context.Context, keys [][]block.Key, o LookupOptions, a *Answer) error {
	wait, err := millis(o.Wait)
	if err != nil {
		return err
	}
	c := calls.Get().(*call)
	c.lookup = wire.Lookup{Request: r.id, Peek: o.Peek, WaitMS: wait, Keys: keys}
	a.Tokens, a.Final, a.Groups, a.epoch = 0, false, nil, r.Epoch()
	err = r.s.start(ctx, c, wire.TypeLookup, &c.lookup, &a.reply)
	if err == nil {
		err = r.s.wait(ctx, c, r.c.opts.CallTimeout+o.Wait)
	}
	c.put()
	if err == nil {
		a.Tokens, a.Final, a.Groups = a.reply.Tokens, a.reply.Final, a.reply.Groups
	}
	return err
}

// Reserve takes slots for keys of a group, of which the first is at index
// first of the request's list: all or none, at most 256. It answers one grant
// a key. Store does it all; use this to let workers write.
//
// When ctx ends before the node has answered, the slots are aborted once it does.
func (r *Request) Reserve(ctx context.Context, group uint32, first int, keys []block.Key) ([]Grant, error) {
	if first < 0 || first >= 1<<31 {
		return nil, fmt.Errorf("%w: first key at index %d", ErrInvalid, first)
	}
	if len(keys) > wire.ReserveKeysMax {
		return nil, fmt.Errorf("%w: %d keys in a reserve, at most %d are allowed", ErrInvalid, len(keys), wire.ReserveKeysMax)
	}
	c := calls.Get().(*call)
	reply := new(wire.ReserveReply)
	if err := r.s.start(ctx, c, wire.TypeReserve, &wire.Reserve{Request: r.id, Group: group, First: uint32(first), Keys: keys}, reply); err != nil {
		c.put()
		return nil, err
	}
	done, err := c.await(ctx, r.c.opts.CallTimeout)
	if !done {
		r.orphan(c, group, reply)
		return nil, err
	}
	c.put()
	if err != nil {
		return nil, err
	}
	if len(reply.Grants) != len(keys) {
		err := fmt.Errorf("%w: %d grants for %d keys", ErrMalformed, len(reply.Grants), len(keys))
		r.s.fail(err)
		return nil, err
	}
	out := r.grants(group, reply)
	r.s.region.granted(out)
	return out, nil
}

func (r *Request) grants(group uint32, reply *wire.ReserveReply) []Grant {
	out := make([]Grant, len(reply.Grants))
	for i, g := range reply.Grants {
		if out[i].Status = g.Status; g.Status == Granted {
			out[i] = Grant{Status: g.Status, Epoch: r.Epoch(), Group: group, Slot: uint32(g.Slot), Gen: g.Gen}
		}
	}
	return out
}

// orphan waits for the answer to a reserve that nobody wants any more, and
// gives its slots back.
func (r *Request) orphan(c *call, group uint32, reply *wire.ReserveReply) {
	s := r.s
	s.mu.Lock()
	keep := s.mu.err == nil && s.mu.orphans < orphansMax
	if keep {
		s.mu.orphans++
		s.orphans.Go(func() {
			<-c.done // at the latest when the session is lost
			if c.err == nil {
				_, _ = r.Abort(context.Background(), r.grants(group, reply))
			}
			c.put()
			s.mu.Lock()
			s.mu.orphans--
			s.mu.Unlock()
		})
	}
	s.mu.Unlock()
	if !keep {
		_ = s.abandon(c, nil) // the session is lost, or the reservation will expire
	}
}

// Commit makes written slots visible as blocks. It answers a status for each.
func (r *Request) Commit(ctx context.Context, fills []Fill) ([]FillStatus, error) {
	m := wire.Commit{Request: r.id, Fills: make([]core.Fill, len(fills))}
	for i, f := range fills {
		if err := r.owns(f.Grant.Epoch); err != nil {
			return nil, err
		}
		m.Fills[i] = core.Fill{Slot: core.Slot(f.Grant.Slot), Gen: f.Grant.Gen, Sum: f.Sum, HasSum: f.HasSum}
	}
	r.s.region.endGrants(m.Fills)
	return r.statuses(ctx, wire.TypeCommit, &m, len(fills))
}

// Abort gives granted slots back unused; other grants are skipped. It answers
// a status for each of the granted.
func (r *Request) Abort(ctx context.Context, grants []Grant) ([]FillStatus, error) {
	m := wire.Abort{Request: r.id}
	for _, g := range grants {
		if g.Status != Granted {
			continue
		}
		if err := r.owns(g.Epoch); err != nil {
			return nil, err
		}
		m.Fills = append(m.Fills, core.Fill{Slot: core.Slot(g.Slot), Gen: g.Gen})
	}
	if len(m.Fills) == 0 {
		return nil, nil
	}
	r.s.region.endGrants(m.Fills)
	return r.statuses(ctx, wire.TypeAbort, &m, len(m.Fills))
}

// Pin leases blocks beyond those that Lookup has leased; the Lease of a key
// that is no Hit is not Valid.
func (r *Request) Pin(ctx context.Context, keys []block.Key) ([]Lease, error) {
	var reply wire.PinReply
	if err := r.do(ctx, wire.TypePin, &wire.Keys{Request: r.id, Keys: keys}, &reply); err != nil {
		return nil, err
	}
	if len(reply.Leases) != len(keys) {
		err := fmt.Errorf("%w: %d leases for %d keys", ErrMalformed, len(reply.Leases), len(keys))
		r.s.fail(err)
		return nil, err
	}
	out := make([]Lease, len(keys))
	for i, l := range reply.Leases {
		if l != (core.Lease{}) {
			out[i] = lease(r.Epoch(), keys[i].Group(), l)
		}
	}
	return out, nil
}

// Unpin ends leases, of Lookup or Pin. It answers a status for each.
func (r *Request) Unpin(ctx context.Context, leases []Lease) ([]FillStatus, error) {
	m := wire.Unpin{Request: r.id, Leases: make([]core.Lease, len(leases))}
	for i, l := range leases {
		if err := r.owns(l.Epoch); err != nil {
			return nil, err
		}
		m.Leases[i] = core.Lease{Slot: core.Slot(l.Slot), Gen: l.Gen}
	}
	return r.statuses(ctx, wire.TypeUnpin, &m, len(leases))
}

// owns refuses what is of another session: there, the same slot and generation
// are something else.
func (r *Request) owns(epoch string) error {
	if epoch != r.Epoch() {
		return fmt.Errorf("%w: %q, the request's is %q", ErrStale, epoch, r.Epoch())
	}
	return nil
}

func (r *Request) statuses(ctx context.Context, t wire.Type, m wire.Message, n int) ([]FillStatus, error) {
	var reply wire.FillReply
	if err := r.do(ctx, t, m, &reply); err != nil {
		return nil, err
	}
	if len(reply.Statuses) != n {
		err := fmt.Errorf("%w: %d statuses for %d items", ErrMalformed, len(reply.Statuses), n)
		r.s.fail(err)
		return nil, err
	}
	return reply.Statuses, nil
}

// Touch marks blocks as recently used, the first one as the youngest.
func (r *Request) Touch(ctx context.Context, keys []block.Key) error {
	return r.do(ctx, wire.TypeTouch, &wire.Keys{Request: r.id, Keys: keys}, wire.Empty{})
}

// Finish ends the request and all its leases. Its stores go on.
func (r *Request) Finish(ctx context.Context) error {
	return r.do(ctx, wire.TypeFinish, &wire.Finish{Request: r.id}, wire.Empty{})
}

// Flush waits up to wait until nothing of the request's stores is pending in
// any tier.
func (r *Request) Flush(ctx context.Context, wait time.Duration) (Flushed, error) {
	ms, err := millis(wait)
	if err != nil {
		return Flushed{}, err
	}
	var reply wire.FlushReply
	err = r.s.do(ctx, r.c.opts.CallTimeout+wait, wire.TypeFlush, &wire.Flush{Request: r.id, WaitMS: ms}, &reply)
	return reply.Flushed, err
}

// Stored counts what became of the keys of a Store.
type Stored struct {
	Stored  int // written and committed
	Present int // there already
	Filling int // being filled by somebody else
	Capped  int // beyond max_offload_tokens
	Dropped int // written too late: the reservation had expired, or was reset
}

// abortTimeout bounds giving slots back after an error.
const abortTimeout = 5 * time.Second

// Store stores blocks of one group, of which the first is at index first of
// the request's list. fill is called for each block that is not there yet,
// with its index in keys: it writes all of dst and returns the checksum of
// what it wrote; CopySum does both in one pass.
//
// Blocks go in several calls, the last ones first, so that the beginning of a
// prompt, which others may share, is evicted last. On an error what was
// committed before stays, what was not is given back. A call that finds no room
// is made smaller, down to a block, so a prompt that is larger than the primary
// is stored too. ErrNoRoom: there is none for one block now; the rest may be
// offered again later.
func (r *Request) Store(ctx context.Context, group uint32, first int, keys []block.Key, fill func(i int, dst []byte) (sum uint64, err error)) (Stored, error) {
	var out Stored
	fills := make([]Fill, 0, wire.ReserveKeysMax)
	most := wire.ReserveKeysMax
	for end := len(keys); end > 0; {
		begin := max(0, end-most)
		grants, err := r.Reserve(ctx, group, first+begin, keys[begin:end])
		if n := end - begin; n > 1 && (errors.Is(err, ErrNoRoom) || errors.Is(err, ErrTooLarge)) {
			most = n / 2
			continue
		}
		if err != nil {
			return out, err
		}
		fills = fills[:0]
		for i, g := range grants {
			switch g.Status {
			case Granted:
				var sum uint64
				err = r.s.region.Write(g, func(dst []byte) (err error) {
					sum, err = fill(begin+i, dst)
					return err
				})
				fills = append(fills, g.Fill(sum))
			case GrantPresent:
				out.Present++
			case GrantFilling:
				out.Filling++
			case GrantCapped:
				out.Capped++
			}
			if err == nil {
				err = ctx.Err()
			}
			if err != nil {
				break
			}
		}
		var statuses []FillStatus
		if err == nil && len(fills) > 0 {
			statuses, err = r.Commit(ctx, fills)
		}
		if err != nil {
			// Also what a commit that was given up may have taken: then the
			// abort finds nothing.
			actx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortTimeout)
			_, aerr := r.Abort(actx, grants)
			cancel()
			if aerr != nil && !errors.Is(err, ErrSessionLost) {
				err = errors.Join(err, fmt.Errorf("give slots back: %w", aerr))
			}
			return out, err
		}
		for _, st := range statuses {
			if st == FillOK {
				out.Stored++
			} else {
				out.Dropped++
			}
		}
		end = begin
	}
	return out, nil
}
