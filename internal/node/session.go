package node

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/arena"
	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/internal/peer"
	"github.com/terrace-kv/terrace/tier"
)

// Greeting is what an engine says of itself.
type Greeting struct {
	NS     *block.Namespace
	Name   string // what the operator calls the namespace; may be empty
	Engine string // what the engine calls itself; may be empty
	PID    int    // 0 when unknown
	UID    int
}

// Session is one engine's lease on the node. Its methods never wait for I/O,
// may be called by many goroutines, and after Close answer core.ErrNoSession.
type Session struct {
	n     *Node
	id    core.SessionID
	space *space
	hello Greeting
	since time.Time

	mu     sync.Mutex
	leases []*arena.Lease
	closed bool
	done   bool // the core has forgotten it
}

// OpenSession greets an engine. Tiers open the namespace first, which may take
// until ctx ends; one that finds another namespace stored, or a name that
// stands for another, refuses the engine with an error that matches
// tier.ErrNamespaceMismatch and names the fields.
func (n *Node) OpenSession(ctx context.Context, g Greeting) (*Session, error) {
	leave, err := n.gate.Enter()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", core.ErrDraining, err)
	}
	defer leave()
	n.mu.Lock()
	err = n.nameFreeLocked(g.NS, g.Name)
	n.mu.Unlock()
	if err != nil {
		return nil, err
	}
	for i, h := range n.tiers {
		var err error
		if op, ok := h.tier.(tier.NamespaceOpener); ok {
			err = n.guard(i, "open_namespace", func() error { return op.OpenNamespace(ctx, g.NS) })
		}
		if k, ok := h.tier.(tier.NameKeeper); ok && err == nil && g.Name != "" {
			err = n.guard(i, "keep_name", func() error { return k.KeepName(ctx, g.Name, g.NS) })
		}
		switch {
		case errors.Is(err, tier.ErrNamespaceMismatch):
			return nil, err
		case err != nil:
			// The tier degrades alone: its writes will fail and say why.
			n.log.Warn("tier cannot open a namespace", "tier", h.info.Name, "namespace", g.NS.Fingerprint(), "err", err)
			n.noteError(i, err)
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	sp, err := n.spaceLocked(g.NS, g.Name)
	if err != nil {
		return nil, err
	}
	id, err := n.core.OpenSession(sp.id)
	if err != nil {
		return nil, err
	}
	s := &Session{n: n, id: id, space: sp, hello: g, since: time.Now()}
	n.sessions[id] = s
	n.perform() // peers may be told of the namespace
	return s, nil
}

// nameFreeLocked refuses a name that stands for another namespace in this run;
// tiers that keep names know of earlier ones.
func (n *Node) nameFreeLocked(ns *block.Namespace, name string) error {
	if other := n.byName[name]; other != nil && other.ns.Fingerprint() != ns.Fingerprint() {
		return fmt.Errorf("%w: the name %q stands for namespace %s here; this engine's differs in %s: mend the engine's settings, or give it another name",
			tier.ErrNamespaceMismatch, name, other.ns.Fingerprint(), strings.Join(block.Diff(other.ns.Spec(), ns.Spec()), ", "))
	}
	return nil
}

// spaceLocked finds or registers a namespace.
func (n *Node) spaceLocked(ns *block.Namespace, name string) (*space, error) {
	if err := n.nameFreeLocked(ns, name); err != nil {
		return nil, err
	}
	sp := n.byPrint[ns.Fingerprint()]
	if sp == nil {
		if len(n.spaces) > namespacesMax {
			return nil, fmt.Errorf("%w: the node has %d namespaces", core.ErrTooMany, namespacesMax)
		}
		id, err := n.core.OpenNamespace(ns.Spec().Groups)
		if err != nil {
			return nil, err
		}
		sp = &space{id: id, ns: ns}
		for _, g := range ns.Spec().Groups {
			sp.strides = append(sp.strides, int64(core.StridePages(g.BlockBytes))*core.PageSize)
		}
		n.spaces = append(n.spaces, sp)
		n.byPrint[ns.Fingerprint()] = sp
		if n.peers != nil {
			n.peers.showSpaces()
		}
	}
	if name != "" {
		delete(n.byName, sp.name) // a namespace has one name: the last
		n.byName[name] = sp
		sp.name = name
	}
	return sp, nil
}

// ID names the session in logs and status.
func (s *Session) ID() uint64 { return uint64(s.id) }

// Epoch names the session for all time.
func (s *Session) Epoch() string { return fmt.Sprintf("%s-%d", s.n.boot, s.id) }

// RegionBytes is the size of the shared region.
func (s *Session) RegionBytes() int64 { return s.n.arena.Size() }

// Strides is the distance between slots, one a group, in bytes.
func (s *Session) Strides() []int64 { return s.space.strides }

// Attach opens a description of the region for one more process of the engine.
// The caller passes the lease's File on and then calls HandOver.
func (s *Session) Attach() (*arena.Lease, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, core.ErrNoSession
	}
	l, err := s.n.arena.NewLease()
	if err != nil {
		return nil, err
	}
	s.leases = append(s.leases, l)
	return l, nil
}

// locked runs a call of the core and performs its effects.
func locked[T any](s *Session, f func(c *core.Core, now core.Time) (T, error)) (T, error) {
	n := s.n
	n.mu.Lock()
	defer n.mu.Unlock()
	v, err := f(n.core, n.now())
	n.perform()
	return v, err
}

// NewRequest starts a request. What is wrong with the peer that it names is told
// by field.
func (s *Session) NewRequest(id string, p core.Params) error {
	addr, err := s.n.sourceOf(&p)
	if err != nil {
		return err
	}
	_, err = locked(s, func(c *core.Core, now core.Time) (struct{}, error) {
		err := c.NewRequest(now, s.id, id, p)
		if err != nil || p.Peer == core.PeerNone {
			return struct{}{}, err
		}
		err = s.n.peers.bridge.M.OpenSource(peer.Time(now), peer.Source{Seq: c.RequestSeq(s.id, id), Addr: addr,
			ID: p.PeerRequestID, Role: peer.Role(p.Peer), NS: s.space.ns.Fingerprint()})
		if err != nil {
			err = fmt.Errorf("%w: %w", core.ErrInvalid, errors.Join(err, c.Finish(now, s.id, id)))
		}
		return struct{}{}, err
	})
	return err
}

// Lookup judges the keys of a prompt. With wait above 0 and verdicts that are
// not final it answers true and calls later once, under the node's lock.
func (s *Session) Lookup(id string, keys [][]block.Key, peek bool, wait time.Duration, out *core.Answer, later func(*core.Answer)) (bool, error) {
	n := s.n
	for len(keys) < len(s.space.strides) {
		keys = append(keys[:len(keys):len(keys)], nil)
	}
	begin := time.Now()
	n.mu.Lock()
	now := n.now()
	o := core.LookupOptions{Peek: peek}
	if wait > 0 && later != nil {
		o.WaitUntil = now + core.Time(wait)
	}
	w, err := n.core.Lookup(now, s.id, id, keys, o, out)
	if err == nil && w != 0 {
		n.lookups[w] = func(a *core.Answer) {
			n.set.Ready.Observe(time.Since(begin))
			later(a)
		}
	}
	n.perform()
	n.mu.Unlock()
	if err == nil && w == 0 && out.Final && !peek {
		n.used(s.space.ns, keys, out)
	}
	return err == nil && w != 0, err
}

// Reserve takes slots; see core.Core.Reserve.
func (s *Session) Reserve(id string, group uint32, first int, keys []block.Key, out []core.Grant) ([]core.Grant, error) {
	return locked(s, func(c *core.Core, now core.Time) ([]core.Grant, error) {
		return c.Reserve(now, s.id, id, group, first, keys, out)
	})
}

// Commit makes filled slots visible.
func (s *Session) Commit(id string, fills []core.Fill, out []core.FillStatus) ([]core.FillStatus, error) {
	return locked(s, func(c *core.Core, now core.Time) ([]core.FillStatus, error) {
		return c.Commit(now, s.id, id, fills, out)
	})
}

// Abort gives reserved slots back.
func (s *Session) Abort(id string, fills []core.Fill, out []core.FillStatus) ([]core.FillStatus, error) {
	return locked(s, func(c *core.Core, now core.Time) ([]core.FillStatus, error) {
		return c.Abort(now, s.id, id, fills, out)
	})
}

// Pin pins committed blocks.
func (s *Session) Pin(id string, keys []block.Key, out []core.Lease) ([]core.Lease, error) {
	return locked(s, func(c *core.Core, now core.Time) ([]core.Lease, error) {
		return c.Pin(now, s.id, id, keys, out)
	})
}

// Unpin gives pins back.
func (s *Session) Unpin(id string, leases []core.Lease, out []core.FillStatus) ([]core.FillStatus, error) {
	return locked(s, func(c *core.Core, now core.Time) ([]core.FillStatus, error) {
		return c.Unpin(now, s.id, id, leases, out)
	})
}

// Touch marks blocks as used, here and below.
func (s *Session) Touch(_ string, keys []block.Key) error {
	_, err := locked(s, func(c *core.Core, now core.Time) (struct{}, error) {
		return struct{}{}, c.Touch(now, s.id, keys)
	})
	return err
}

// Finish ends a request.
func (s *Session) Finish(id string) error {
	_, err := locked(s, func(c *core.Core, now core.Time) (struct{}, error) {
		return struct{}{}, c.Finish(now, s.id, id)
	})
	return err
}

// Flush calls later when nothing of the request's stores is pending, or when
// wait is over.
func (s *Session) Flush(id string, wait time.Duration, later func(core.Flushed)) error {
	n := s.n
	n.mu.Lock()
	defer n.mu.Unlock()
	now := n.now()
	w, done, f, err := n.core.Flush(now, s.id, id, now+core.Time(wait))
	if err != nil {
		return err
	}
	if done {
		later(f)
	} else {
		n.flushes[w] = later
	}
	n.perform()
	return nil
}

// Reset forgets the primary's blocks, and calls later when the I/O that was
// under way is over, or false when wait is.
func (s *Session) Reset(wait time.Duration, later func(done bool)) error {
	n := s.n
	n.mu.Lock()
	defer n.mu.Unlock()
	now := n.now()
	w, err := n.core.Reset(now, now+core.Time(max(wait, 1)))
	if err != nil {
		return err
	}
	n.resets[w] = later
	n.perform()
	return nil
}

// Close gives everything back: pins and requests now, slots that the engine
// could still write when no process of its holds the region any more.
func (s *Session) Close() {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return
	}
	s.closed = true
	s.mu.Unlock()
	n := s.n
	n.mu.Lock()
	defer n.mu.Unlock()
	quarantined, err := n.core.CloseSession(n.now(), s.id)
	s.done = err != nil || quarantined == 0
	delete(n.sessions, s.id)
	n.dying = append(n.dying, s)
	n.perform()
	poke(n.reap)
}

// settle gives back the leases that no process holds, and the session's slots
// when none is left. It says whether that is so. Only the reaper calls it.
func (s *Session) settle() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	var left []*arena.Lease
	for _, l := range s.leases {
		held, err := l.Held()
		if err != nil {
			s.n.log.Error("cannot ask whether an engine still maps the primary; its slots stay quarantined", "session", s.id, "err", err)
		}
		if err != nil || held || l.Release() != nil {
			left = append(left, l)
		}
	}
	s.leases = left
	if len(left) > 0 {
		return false
	}
	if !s.done {
		s.n.mu.Lock()
		defer s.n.mu.Unlock()
		if err := s.n.core.SessionQuiet(s.n.now(), s.id); err == nil {
			s.done = true
		}
		s.n.perform()
	}
	return true
}
