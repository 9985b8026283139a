// Package enginetest has a small Backend for tests of the server and of
// clients: a primary without tiers, eviction or deadlines, over a real region,
// with knobs for what a test wants to happen.
package enginetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/minio/crc64nvme"
	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/arena"
	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/internal/engine"
	"github.com/terrace-kv/terrace/tier"
)

// Spec is a namespace of one full-attention group with blocks of 4000 bytes.
func Spec() block.Spec {
	return block.Spec{Model: "test", DType: "bfloat16", Layout: "canonical.v1", HashAlgorithm: "sha256", HashLength: 32,
		Groups: []block.Group{{Kind: block.KindFull, TokensPerBlock: 16, BlockBytes: 4000}}}
}

// Key is the key of group 0 whose hash repeats n.
func Key(n int) block.Key {
	hash := make([]byte, block.HashSize)
	for i := range hash {
		hash[i] = byte(n >> (8 * (i % 4)))
	}
	k, err := block.NewKey(hash, 0)
	if err != nil {
		panic(err)
	}
	return k
}

// Keys are n keys from the first on.
func Keys(first, n int) []block.Key {
	out := make([]block.Key, n)
	for i := range out {
		out[i] = Key(first + i)
	}
	return out
}

// Backend is the double. Its fields may be set before it is used.
type Backend struct {
	arena *arena.Arena

	// Hold keeps waiting lookups, flushes and resets until Release.
	Hold bool
	// Void makes their lookups end overtaken.
	Void bool
	// Open, if set, runs in OpenSession; its error is returned.
	Open func(ctx context.Context, h engine.Hello) error
	// Reserving, if set, runs in Reserve, outside the lock.
	Reserving func()

	mu struct {
		sync.Mutex
		next    uint64
		boot    string
		open    map[*session]struct{}
		closed  []uint64
		names   map[string]block.Spec
		blocks  map[block.Fingerprint]map[block.Key]*entry
		gen     uint32
		free    []core.Slot
		held    []func()
		firsts  []int
		leases  []*arena.Lease
		aborted int
	}
	changed chan struct{} // signalled after each Close of a session
}

type entry struct {
	lease core.Lease
	ready bool
	owner *session
	pins  int
}

// New makes a backend over a region of slots × stride bytes; blocks have at
// most a stride's length.
func New(t testing.TB, slots int, stride int) *Backend {
	t.Helper()
	a, err := arena.Open(context.Background(), arena.Options{Size: int64(slots * stride), Name: "enginetest"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	b := &Backend{arena: a, changed: make(chan struct{}, 1024)}
	b.mu.boot = fmt.Sprintf("boot%d", time.Now().UnixNano())
	b.mu.open, b.mu.names = map[*session]struct{}{}, map[string]block.Spec{}
	b.mu.blocks = map[block.Fingerprint]map[block.Key]*entry{}
	for i := slots - 1; i >= 0; i-- {
		b.mu.free = append(b.mu.free, core.Slot(i*stride/core.PageSize))
	}
	return b
}

// OpenSession is engine.Backend's.
func (b *Backend) OpenSession(ctx context.Context, h engine.Hello) (engine.Session, error) {
	if b.Open != nil {
		if err := b.Open(ctx, h); err != nil {
			return nil, err
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if h.Name != "" {
		if old, ok := b.mu.names[h.Name]; ok {
			if diff := block.Diff(old, h.NS.Spec()); diff != nil {
				return nil, fmt.Errorf("namespace %q: %w: differs in %v", h.Name, tier.ErrNamespaceMismatch, diff)
			}
		}
		b.mu.names[h.Name] = h.NS.Spec()
	}
	fp := h.NS.Fingerprint()
	if b.mu.blocks[fp] == nil {
		b.mu.blocks[fp] = map[block.Key]*entry{}
	}
	b.mu.next++
	s := &session{b: b, id: b.mu.next, ns: h.NS, blocks: b.mu.blocks[fp], requests: map[string]*request{}}
	b.mu.open[s] = struct{}{}
	return s, nil
}

// Status is engine.Backend's.
func (b *Backend) Status() []byte { return []byte(`{"state":"ready"}`) }

// Release answers what Hold keeps, and says how many it were.
func (b *Backend) Release() int {
	b.mu.Lock()
	held := b.mu.held
	b.mu.held = nil
	b.mu.Unlock()
	for _, f := range held {
		f()
	}
	return len(held)
}

// Held counts what Hold keeps.
func (b *Backend) Held() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.mu.held)
}

// Sessions counts the open ones, and says which have been closed.
func (b *Backend) Sessions() (open int, closed []uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.mu.open), slices.Clone(b.mu.closed)
}

// Changed has one element for each Close of a session.
func (b *Backend) Changed() <-chan struct{} { return b.changed }

// Pins counts pins, and Filling slots that are reserved.
func (b *Backend) Pins() (pins, filling int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, blocks := range b.mu.blocks {
		for _, e := range blocks {
			pins += e.pins
			if !e.ready {
				filling++
			}
		}
	}
	return pins, filling
}

// Aborted counts aborted slots.
func (b *Backend) Aborted() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.aborted
}

// Reserved lists the first indexes of the reserves so far.
func (b *Backend) Reserved() []int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.mu.firsts)
}

// Corrupt flips a bit of a stored block.
func (b *Backend) Corrupt(spec block.Spec, k block.Key) error {
	ns, err := block.NewNamespace(spec)
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	e := b.mu.blocks[ns.Fingerprint()][k]
	b.arena.Bytes(e.lease.Slot.Offset(), 1)[0] ^= 1
	return nil
}

// Attached counts the attaches, of all sessions, whose processes can still
// write.
func (b *Backend) Attached() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.leases = slices.DeleteFunc(b.mu.leases, func(l *arena.Lease) bool { return l.Release() == nil })
	return len(b.mu.leases)
}

// Add puts blocks in as if they had been stored, filled by fill.
func (b *Backend) Add(spec block.Spec, keys []block.Key, fill func(i int, b []byte) (sum uint64)) error {
	ns, err := block.NewNamespace(spec)
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	fp := ns.Fingerprint()
	if b.mu.blocks[fp] == nil {
		b.mu.blocks[fp] = map[block.Key]*entry{}
	}
	for i, k := range keys {
		e, ok := b.takeLocked(nil)
		if !ok {
			return core.ErrNoRoom
		}
		e.lease.Sum = fill(i, b.arena.Bytes(e.lease.Slot.Offset(), int64(ns.BlockBytes(k.Group()))))
		e.ready = true
		b.mu.blocks[fp][k] = e
	}
	return nil
}

func (b *Backend) takeLocked(owner *session) (*entry, bool) {
	n := len(b.mu.free)
	if n == 0 {
		return nil, false
	}
	b.mu.gen++
	e := &entry{owner: owner, lease: core.Lease{Slot: b.mu.free[n-1], Gen: b.mu.gen}}
	b.mu.free = b.mu.free[:n-1]
	return e, true
}

// later runs f now, or at Release.
func (b *Backend) laterLocked(f func()) {
	if b.Hold {
		b.mu.held = append(b.mu.held, f)
		return
	}
	f()
}

type request struct {
	finished bool
	pins     map[*entry]struct{}
	fills    map[core.Slot]block.Key
}

type session struct {
	b        *Backend
	id       uint64
	ns       *block.Namespace
	blocks   map[block.Key]*entry
	requests map[string]*request
	closed   bool
}

func (s *session) Facts() engine.Facts {
	f := engine.Facts{ID: s.id, Epoch: fmt.Sprintf("%s-%d", s.b.mu.boot, s.id), RegionBytes: s.b.arena.Size()}
	for g := range s.ns.Spec().Groups {
		f.Strides = append(f.Strides, int64((s.ns.BlockBytes(uint32(g))+core.PageSize-1)/core.PageSize*core.PageSize))
	}
	return f
}

func (s *session) Attach() (*arena.Lease, error) {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	if s.closed {
		return nil, core.ErrNoSession
	}
	l, err := s.b.arena.NewLease()
	if err == nil {
		s.b.mu.leases = append(s.b.mu.leases, l)
	}
	return l, err
}

func (s *session) request(id string) (*request, error) {
	r := s.requests[id]
	switch {
	case r == nil:
		return nil, fmt.Errorf("%w: %q", core.ErrNoRequest, id)
	case r.finished:
		return nil, fmt.Errorf("%w: %q", core.ErrFinished, id)
	}
	return r, nil
}

func (s *session) NewRequest(id string, p core.Params) error {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	if r := s.requests[id]; r != nil && !r.finished {
		return fmt.Errorf("%w: %q", core.ErrConflict, id)
	}
	s.requests[id] = &request{pins: map[*entry]struct{}{}, fills: map[core.Slot]block.Key{}}
	return nil
}

func (r *request) pin(e *entry) {
	if _, ok := r.pins[e]; !ok {
		r.pins[e] = struct{}{}
		e.pins++
	}
}

func (s *session) Lookup(id string, keys [][]block.Key, peek bool, wait time.Duration, out *core.Answer, later func(*core.Answer)) (bool, error) {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	r, err := s.request(id)
	if err != nil {
		return false, err
	}
	if wait > 0 && s.b.Hold {
		copied := make([][]block.Key, len(keys))
		for i := range keys {
			copied[i] = slices.Clone(keys[i])
		}
		s.b.laterLocked(func() {
			a := &core.Answer{Void: s.b.Void}
			if !a.Void {
				s.judge(r, copied, peek, a)
			}
			later(a)
		})
		return true, nil
	}
	s.judge(r, keys, peek, out)
	return false, nil
}

func (s *session) judge(r *request, keys [][]block.Key, peek bool, out *core.Answer) {
	out.Tokens, out.Final = 0, true
	if cap(out.Groups) < len(keys) {
		out.Groups = make([]core.GroupAnswer, len(keys))
	}
	out.Groups = out.Groups[:len(keys)]
	for g, list := range keys {
		a := &out.Groups[g]
		a.First, a.Verdicts, a.Leases = 0, a.Verdicts[:0], a.Leases[:0]
		run := true
		for _, k := range list {
			e := s.blocks[k]
			v := core.MissAbsent
			switch {
			case !run:
				v = core.MissUnusable
			case e == nil:
			case e.ready:
				v = core.Hit
				if !peek {
					r.pin(e)
				}
			default:
				v = core.HitPending
				out.Final = false
			}
			if run = run && !v.Miss(); run && g == 0 {
				out.Tokens += int64(s.ns.Spec().Groups[0].TokensPerBlock)
			}
			if a.Verdicts = append(a.Verdicts, v); run {
				var l core.Lease
				if v == core.Hit && !peek {
					l = e.lease
				}
				a.Leases = append(a.Leases, l)
			}
		}
	}
}

func (s *session) Reserve(id string, group uint32, first int, keys []block.Key, out []core.Grant) ([]core.Grant, error) {
	if s.b.Reserving != nil {
		s.b.Reserving()
	}
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	r, err := s.request(id)
	if err != nil {
		return out, err
	}
	s.b.mu.firsts = append(s.b.mu.firsts, first)
	need := 0
	for _, k := range keys {
		if s.blocks[k] == nil {
			need++
		}
	}
	if need > len(s.b.mu.free) {
		return out, fmt.Errorf("%w: %d slots wanted, %d free", core.ErrNoRoom, need, len(s.b.mu.free))
	}
	for _, k := range keys {
		switch e := s.blocks[k]; {
		case e == nil:
			e, _ = s.b.takeLocked(s)
			s.blocks[k] = e
			r.fills[e.lease.Slot] = k
			out = append(out, core.Grant{Status: core.Granted, Slot: e.lease.Slot, Gen: e.lease.Gen})
		case e.ready:
			out = append(out, core.Grant{Status: core.GrantPresent})
		default:
			out = append(out, core.Grant{Status: core.GrantFilling})
		}
	}
	return out, nil
}

func (s *session) Commit(id string, fills []core.Fill, out []core.FillStatus) ([]core.FillStatus, error) {
	return s.settle(id, fills, out, func(k block.Key, e *entry, f core.Fill) {
		e.ready, e.lease.Sum = true, f.Sum
		if !f.HasSum {
			e.lease.Sum = crc64nvme.Checksum(s.b.arena.Bytes(e.lease.Slot.Offset(), int64(s.ns.BlockBytes(k.Group()))))
		}
	})
}

func (s *session) Abort(id string, fills []core.Fill, out []core.FillStatus) ([]core.FillStatus, error) {
	return s.settle(id, fills, out, func(k block.Key, e *entry, f core.Fill) {
		delete(s.blocks, k)
		s.b.mu.free = append(s.b.mu.free, e.lease.Slot)
		s.b.mu.aborted++
	})
}

func (s *session) settle(id string, fills []core.Fill, out []core.FillStatus, do func(block.Key, *entry, core.Fill)) ([]core.FillStatus, error) {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	r, err := s.request(id)
	if err != nil {
		return out, err
	}
	for _, f := range fills {
		k, ok := r.fills[f.Slot]
		if e := s.blocks[k]; ok && e != nil && e.lease.Gen == f.Gen && !e.ready {
			delete(r.fills, f.Slot)
			do(k, e, f)
			out = append(out, core.FillOK)
		} else {
			out = append(out, core.FillStale)
		}
	}
	return out, nil
}

func (s *session) Pin(id string, keys []block.Key, out []core.Lease) ([]core.Lease, error) {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	r, err := s.request(id)
	if err != nil {
		return out, err
	}
	for _, k := range keys {
		var l core.Lease
		if e := s.blocks[k]; e != nil && e.ready {
			r.pin(e)
			l = e.lease
		}
		out = append(out, l)
	}
	return out, nil
}

func (s *session) Unpin(id string, leases []core.Lease, out []core.FillStatus) ([]core.FillStatus, error) {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	r, err := s.request(id)
	if err != nil {
		return out, err
	}
	for _, l := range leases {
		st := core.FillStale
		for e := range r.pins {
			if e.lease.Slot == l.Slot && e.lease.Gen == l.Gen {
				delete(r.pins, e)
				e.pins--
				st = core.FillOK
			}
		}
		out = append(out, st)
	}
	return out, nil
}

func (s *session) Touch(id string, keys []block.Key) error {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	_, err := s.request(id)
	return err
}

func (s *session) end(r *request) {
	for e := range r.pins {
		e.pins--
	}
	for slot, k := range r.fills {
		delete(s.blocks, k)
		s.b.mu.free = append(s.b.mu.free, slot)
	}
	clear(r.pins)
	clear(r.fills)
	r.finished = true
}

func (s *session) Finish(id string) error {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	r, err := s.request(id)
	if err != nil {
		return err
	}
	s.end(r)
	return nil
}

func (s *session) Flush(id string, wait time.Duration, later func(core.Flushed)) error {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	if s.requests[id] == nil {
		return core.ErrNoRequest
	}
	s.b.laterLocked(func() { later(core.Flushed{Done: true}) })
	return nil
}

func (s *session) Reset(wait time.Duration, later func(bool)) error {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	for k, e := range s.blocks {
		if e.pins == 0 && e.ready {
			delete(s.blocks, k)
			s.b.mu.free = append(s.b.mu.free, e.lease.Slot)
		}
	}
	s.b.laterLocked(func() { later(true) })
	return nil
}

func (s *session) Close() {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	if s.closed {
		panic(errors.New("enginetest: session closed twice"))
	}
	s.closed = true
	for _, r := range s.requests {
		s.end(r)
	}
	delete(s.b.mu.open, s)
	s.b.mu.closed = append(s.b.mu.closed, s.id)
	select {
	case s.b.changed <- struct{}{}:
	default:
	}
}
