package peer

import (
	"fmt"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/internal/invariants"
)

// Two nodes, real cores and machines, on a network in which nothing goes wrong by
// itself: a consumer and a producer.
func newPair(t *testing.T, o Options) (w *sim, a, b *simNode) {
	w = newSim(t, 1, 2)
	w.calm = true
	for _, n := range w.nodes {
		o.Node, o.Boot, o.Advertise = n.name, fmt.Sprint(n.run), n.name+":1"
		o.ensureDefaults()
		n.b.M.o, n.b.M.ended.most, n.b.M.ended.keep = o, o.EndedMax, Time(o.EndedFor)
	}
	return w, w.nodes[0], w.nodes[1]
}

func (w *sim) pass(d time.Duration) { w.advance(w.now + Time(d)) }

// ask begins a request for blocks of a chain, bound to a peer.
func (n *simNode) ask(id, kv string, role core.PeerRole, addr string, chain, blocks int) *simRequest {
	r := &simRequest{id: id, kv: kv, leases: map[block.Key]core.Lease{}}
	for i := range blocks {
		r.keys = append(r.keys, simKey(chain*100+i))
	}
	p := core.NoLimits()
	p.Peer, p.StoreTiers = role, []core.TierFilter{}
	n.begin(r, p, addr)
	n.pump()
	return r
}

// handOver begins a request whose blocks are for somebody else.
func (n *simNode) handOver(id, kv string, chain, blocks int) *simRequest {
	r := &simRequest{id: id, kv: kv, leases: map[block.Key]core.Lease{}}
	for i := range blocks {
		r.keys = append(r.keys, simKey(chain*100+i))
	}
	p := core.NoLimits()
	p.RemoteDecoder, p.KVRequestID, p.StoreTiers = true, kv, []core.TierFilter{}
	n.begin(r, p, "")
	n.pump()
	return r
}

// fill stores a chain's blocks.
func (n *simNode) fill(chain, blocks int) {
	r := n.ask(fmt.Sprint("fill", chain), "fill", core.PeerNone, "", chain, blocks)
	n.store(r, blocks)
	n.pump()
	n.finish(r)
	n.pump()
}

// want looks a request up, and waits.
func (n *simNode) want(r *simRequest, within time.Duration) {
	n.lookup(r, core.Time(n.w.now+Time(within)))
	n.pump()
}

func (n *simNode) end(r *simRequest) {
	n.finish(r)
	n.pump()
}

// idle sees that a node has nothing of any request any more. What it knows of
// peers may stay.
func (n *simNode) idle(t *testing.T) {
	t.Helper()
	s, p := n.c.Stats(), n.b.M.Stats()
	if s.Pins+s.Requests+s.Handovers+s.Jobs+s.Waits+s.Fills+s.QuietSlots+s.Facts != 0 || s.Free+s.Evictable+s.Remainder != s.Capacity {
		t.Errorf("%s: the core is not idle: %+v", n.name, s)
	}
	if p.Sources+p.Rounds+p.Serves+p.Supplies+p.Parked+p.Aborts != 0 || p.Pinned != 0 || n.b.M.Quarantined() != 0 {
		t.Errorf("%s: the machine is not idle: %+v", n.name, p)
	}
	if len(n.b.serves)+len(n.b.waits)+len(n.b.sessions)+len(n.busy) != 0 {
		t.Errorf("%s: %d serves, %d waits, %d sessions, %d granted slots", n.name, len(n.b.serves), len(n.b.waits), len(n.b.sessions), len(n.busy))
	}
	if what := n.audit.rest(); what != "" {
		t.Errorf("%s: %s", n.name, what)
	}
}

// A request that ends while its load is under way leaves nothing, on either side,
// and the same id used again asks the peer afresh.
func TestFinishedRequestLeavesNothing(t *testing.T) {
	const blocks = 5
	for _, role := range []core.PeerRole{core.PeerProbe, core.PeerAssume} {
		for _, c := range []struct {
			what string
			do   func(w *sim, a, b *simNode, r *simRequest)
		}{
			{"in mid-load", func(w *sim, a, b *simNode, r *simRequest) { a.end(r) }},
			{"before it is sent", func(w *sim, a, b *simNode, r *simRequest) {
				a.end(r)
				r = a.ask("r", "kv", role, "n1:1", 1, blocks)
				a.want(r, time.Second)
				a.end(r)
			}},
			{"the slots are not quiet for long", func(w *sim, a, b *simNode, r *simRequest) {
				w.detach = 4 * time.Second
				a.end(r)
				w.pass(time.Second)
				if q := a.b.M.Quarantined(); q != blocks || a.c.Stats().QuietSlots != blocks {
					t.Errorf("%d blocks are not quiet, and the core has %d", q, a.c.Stats().QuietSlots)
				}
			}},
			{"its outcome is there already", func(w *sim, a, b *simNode, r *simRequest) {
				w.hold = false
				for _, c := range w.all() {
					c.pumpData()
				}
				for a.b.M.Stats().Blocks < blocks {
					w.pass(time.Millisecond)
				}
				a.end(r)
			}},
			{"some of it is there", func(w *sim, a, b *simNode, r *simRequest) {
				w.hold = false
				for _, c := range w.all() {
					c.pumpData()
				}
				for a.b.M.Stats().Blocks < 2 {
					w.pass(time.Millisecond / 4)
				}
				a.end(r)
			}},
			{"the session ends before the abort is answered", func(w *sim, a, b *simNode, r *simRequest) {
				a.end(r)
				for _, c := range w.all() {
					c.close("reset")
				}
			}},
			{"the session is silent before the abort is answered", func(w *sim, a, b *simNode, r *simRequest) {
				for _, c := range w.all() {
					c.mute = true
				}
				a.end(r)
			}},
			{"the blocks come after it", func(w *sim, a, b *simNode, r *simRequest) {
				w.detach = 100 * time.Millisecond
				a.end(r)
				w.hold = false
				for _, c := range w.all() {
					c.pumpData()
				}
			}},
			{"its peer is killed", func(w *sim, a, b *simNode, r *simRequest) {
				b.kill()
				w.pass(time.Second)
				if s := a.b.M.Stats(); s.Rounds != 0 {
					t.Errorf("%d rounds wait for a dead peer", s.Rounds)
				}
				a.end(r)
				b.start()
				b.fill(1, blocks)
			}},
			{"its peer is killed, and nobody is told", func(w *sim, a, b *simNode, r *simRequest) {
				for _, c := range w.all() {
					c.mute = true
				}
				b.kill()
				w.pass(6 * time.Second)
				if s := a.b.M.Stats(); s.Rounds != 0 {
					t.Errorf("%d rounds wait for a dead peer", s.Rounds)
				}
				a.end(r)
				b.start()
				b.fill(1, blocks)
			}},
			{"its engine is killed", func(w *sim, a, b *simNode, r *simRequest) {
				_, _ = a.c.CloseSession(core.Time(w.now), a.sid)
				_ = a.c.SessionQuiet(core.Time(w.now), a.sid)
				a.requests, a.waits = map[string]*simRequest{}, map[core.WaitID]*simRequest{}
				a.open()
				a.pump()
			}},
			{"everything is reset here", func(w *sim, a, b *simNode, r *simRequest) {
				_, _ = a.c.Reset(core.Time(w.now), core.Time(w.now)+core.Time(time.Minute))
				a.pump()
				a.end(r)
			}},
			{"everything is reset there", func(w *sim, a, b *simNode, r *simRequest) {
				_, _ = b.c.Reset(core.Time(w.now), core.Time(w.now)+core.Time(time.Minute))
				b.pump()
				a.end(r)
				b.fill(1, blocks)
			}},
		} {
			t.Run(fmt.Sprint(role, " ", c.what), func(t *testing.T) {
				w, a, b := newPair(t, Options{})
				b.fill(1, blocks)
				w.hold = true
				r := a.ask("r", "kv", role, "n1:1", 1, blocks)
				a.want(r, 8*time.Second)
				w.pass(20 * time.Millisecond)
				if role == core.PeerProbe { // the probe has been answered
					w.pass(20 * time.Millisecond)
				}
				if s, p := a.b.M.Stats(), b.b.M.Stats(); s.Rounds != 1 || p.Pinned != blocks*core.PageSize {
					t.Fatalf("%d rounds are under way, %d bytes pinned", s.Rounds, p.Pinned)
				}
				c.do(w, a, b, r)
				w.hold = false
				for _, c := range w.all() {
					c.pumpData()
				}
				w.pass(15 * time.Second)
				a.idle(t)
				b.idle(t)
				w.detach = 0

				_, _ = a.c.Reset(core.Time(w.now), core.Time(w.now)+core.Time(time.Minute)) // what came is not there any more
				a.pump()
				before := b.b.M.Stats()
				r = a.ask("r", "kv", role, "n1:1", 1, blocks)
				a.want(r, 8*time.Second)
				w.pass(time.Second)
				if len(r.leases) != blocks {
					t.Errorf("used again, the id has found %d blocks", len(r.leases))
				}
				if now := b.b.M.Stats(); now.Lookups+now.Fetches == before.Lookups+before.Fetches {
					t.Error("used again, the id has asked nobody")
				}
				a.end(r)
				w.pass(15 * time.Second)
				a.idle(t)
				b.idle(t)
			})
		}
	}
}

func TestManyAbortsLeaveNothing(t *testing.T) {
	n := 10_000
	if invariants.Enabled {
		n = 1000
	}
	w, a, b := newPair(t, Options{LookupsPerSec: 1 << 30})
	b.fill(1, 8)
	w.hold = true
	under := 0
	for i := range n {
		r := a.ask("r", "kv", core.PeerRole(1+i%2), "n1:1", 1, 8)
		a.want(r, 8*time.Second)
		w.pass(time.Duration(2+i%5) * time.Millisecond)
		under += a.b.M.Stats().Rounds
		a.end(r)
	}
	if under < n/2 {
		t.Errorf("%d rounds were under way when their request ended", under)
	}
	w.hold = false
	w.pass(15 * time.Second)
	a.idle(t)
	b.idle(t)
	if s := a.b.M.Stats(); s.Timers > 20 || s.Deaths > 0 {
		t.Errorf("%+v", s)
	}
}

// The order of fetch and store does not matter, and the request is ready when the
// last block is.
func TestHandOverInEitherOrder(t *testing.T) {
	for _, early := range []bool{true, false} {
		w, a, b := newPair(t, Options{})
		const blocks = 16
		var r *simRequest
		fetch := func() {
			r = a.ask("d", "kv", core.PeerAssume, "n1:1", 2, blocks)
			a.want(r, 19*time.Second)
			w.pass(time.Second)
		}
		if early {
			fetch()
			if b.b.M.Stats().Parked != 1 {
				t.Errorf("a fetch that is early has not parked: %+v", b.b.M.Stats())
			}
		}
		p := b.handOver("p", "kv", 2, blocks)
		for range 4 {
			b.store(p, blocks/4)
			b.pump()
			w.pass(time.Second)
			if early && b.b.M.Stats().Parked != 0 {
				t.Error("it is still parked")
			}
		}
		b.end(p)
		if !early {
			fetch()
		}
		w.pass(50 * time.Millisecond)
		if len(r.leases) != blocks {
			t.Errorf("early %v: the last block is there, and the request has %d", early, len(r.leases))
		}
		a.end(r)
		w.pass(100 * time.Millisecond)
		if s := b.c.Stats(); s.Handovers != 0 || s.Pins != 0 {
			t.Errorf("early %v: fetched, and the producer keeps %d hand-overs, %d pins", early, s.Handovers, s.Pins)
		}
		w.pass(15 * time.Second)
		a.idle(t)
		b.idle(t)
	}
}

func TestFetchAfterExpiry(t *testing.T) {
	w, a, b := newPair(t, Options{})
	p := b.handOver("p", "kv", 2, 4)
	b.store(p, 4)
	b.pump()
	b.end(p)
	w.pass(59 * time.Second)
	if b.c.Stats().Handovers != 1 {
		t.Fatal("the hand-over has ended too early")
	}
	w.pass(2 * time.Second)
	if s := b.c.Stats(); s.Handovers != 0 || s.Pins != 0 {
		t.Fatalf("never fetched, and %d pins are kept", s.Pins)
	}
	r := a.ask("d", "kv", core.PeerAssume, "n1:1", 2, 4)
	a.want(r, 19*time.Second)
	w.pass(15 * time.Millisecond) // a connection, a greeting, and a round trip
	if len(a.waits) != 0 || a.b.M.Stats().Failures[CodeEnded] == 0 {
		t.Errorf("the request still waits: %+v", a.b.M.Stats())
	}
	a.end(r)
	w.pass(15 * time.Second)
	a.idle(t)
	b.idle(t)
}

// The producer finishes with half of what is asked for.
func TestFinalSupplyFailsTheRest(t *testing.T) {
	w, a, b := newPair(t, Options{})
	r := a.ask("d", "kv", core.PeerAssume, "n1:1", 2, 8)
	a.want(r, 19*time.Second)
	p := b.handOver("p", "kv", 2, 8)
	w.pass(time.Second)
	p.keys = p.keys[:4] // it is stopped early
	b.store(p, 4)
	b.pump()
	w.pass(time.Second)
	if len(a.waits) != 1 {
		t.Fatal("the request does not wait for the rest")
	}
	b.end(p)
	w.pass(20 * time.Millisecond)
	if len(a.waits) != 0 {
		t.Error("the producer has finished, and the request still waits")
	}
	a.want(r, time.Second)
	if len(r.leases) != 4 {
		t.Errorf("the request has %d blocks", len(r.leases))
	}
	a.end(r)
	w.pass(70 * time.Second)
	a.idle(t)
	b.idle(t)
}

// A consumer that was preempted in mid-load comes again under the same id.
func TestPreemptedConsumerIsServedAfresh(t *testing.T) {
	w, a, b := newPair(t, Options{})
	p := b.handOver("p", "kv", 2, 6)
	b.store(p, 6)
	b.pump()
	b.end(p)
	r := a.ask("d", "kv", core.PeerAssume, "n1:1", 2, 6)
	a.want(r, 19*time.Second)
	for a.b.M.Stats().Blocks < 3 {
		w.pass(time.Millisecond / 4)
	}
	a.end(r)
	w.pass(10 * time.Millisecond)
	_, _ = a.c.Reset(core.Time(w.now), core.Time(w.now)+core.Time(time.Minute))
	a.pump()
	if b.c.Stats().Handovers != 1 {
		t.Fatal("the hand-over was given up")
	}
	r = a.ask("d", "kv", core.PeerAssume, "n1:1", 2, 6)
	a.want(r, 19*time.Second)
	w.pass(100 * time.Millisecond)
	if len(r.leases) != 6 {
		t.Errorf("the second attempt has %d blocks", len(r.leases))
	}
	a.end(r)
	w.pass(100 * time.Millisecond)
	if b.c.Stats().Handovers != 0 {
		t.Error("it was fetched, and is kept")
	}
	w.pass(15 * time.Second)
	a.idle(t)
	b.idle(t)
}

func TestHitThatIsNeverFetched(t *testing.T) {
	w, a, b := newPair(t, Options{})
	b.fill(1, 4)
	r := a.ask("r", "kv", core.PeerProbe, "n1:1", 1, 4)
	a.want(r, 0) // asks, and nobody comes back for the answer
	w.pass(9 * time.Second)
	if p := b.b.M.Stats().Pinned; p != 4*core.PageSize {
		t.Fatalf("%d bytes are pinned", p)
	}
	w.pass(2 * time.Second)
	if s := b.b.M.Stats(); s.Pinned != 0 || s.HitsExpired != 1 || b.c.Stats().Pins != 0 {
		t.Errorf("%+v", s)
	}
	a.want(r, 0) // its wait was over: a Miss, once
	a.want(r, 8*time.Second)
	w.pass(time.Second)
	if len(r.leases) != 4 {
		t.Errorf("the request has %d blocks", len(r.leases))
	}
	a.end(r)
	w.pass(15 * time.Second)
	a.idle(t)
	b.idle(t)
}

// A peer has no more pinned than its quota, and gets all the same what it asks
// for.
func TestLargeFetchComesInPieces(t *testing.T) {
	w, a, b := newPair(t, Options{QuotaBytes: 4 * core.PageSize})
	b.fill(1, 30)
	r := a.ask("r", "kv", core.PeerAssume, "n1:1", 1, 30)
	a.want(r, 19*time.Second)
	most := int64(0)
	for range 400 {
		w.pass(time.Millisecond / 2)
		most = max(most, b.b.M.Stats().Pinned)
		if pins := int64(b.c.Stats().Pins); pins > 4 {
			t.Fatalf("%d blocks are pinned", pins)
		}
	}
	if len(r.leases) != 30 || most != 4*core.PageSize {
		t.Errorf("%d blocks came, %d bytes were pinned at once", len(r.leases), most)
	}
	a.end(r)
	w.pass(15 * time.Second)
	a.idle(t)
	b.idle(t)
}

// A producer promotes what its own tiers have, and does not ask its peers.
func TestProducerServesWhatLiesBelow(t *testing.T) {
	w, a, b := newPair(t, Options{})
	for i := range 4 {
		b.disk[simKey(100+i)] = true
	}
	for _, role := range []core.PeerRole{core.PeerProbe, core.PeerAssume} {
		r := a.ask("r", "kv", role, "n1:1", 1, 4)
		a.want(r, 8*time.Second)
		w.pass(time.Second)
		if len(r.leases) != 4 {
			t.Errorf("role %d: %d blocks came", role, len(r.leases))
		}
		if s := b.b.M.Stats(); s.Links != 0 || s.Sources != 0 {
			t.Error("the producer has asked others")
		}
		a.end(r)
		w.pass(15 * time.Second)
		_, _ = a.c.Reset(core.Time(w.now), core.Time(w.now)+core.Time(time.Minute))
		a.pump()
	}
	a.idle(t)
	b.idle(t)
}

// The core's refusals have their names on the wire.
func TestBridgeTellsWhy(t *testing.T) {
	for _, c := range []struct {
		what string
		do   func(b *simNode)
		want Code
	}{
		{"no such namespace in the core", func(b *simNode) {
			b.b.byPrint = func(block.Fingerprint) (core.NamespaceID, bool) { return 0, false }
		}, CodeFailed},
		{"the core drains", func(b *simNode) { b.c.Drain() }, CodeDraining},
		{"the machine drains", func(b *simNode) { b.b.M.Drain(b.w.now) }, CodeDraining},
	} {
		w, a, b := newPair(t, Options{})
		b.fill(1, 4)
		warm := a.ask("warm", "kv", core.PeerProbe, "n1:1", 9, 1)
		a.want(warm, time.Second)
		w.pass(time.Second)
		a.end(warm)
		c.do(b)
		r := a.ask("r", "kv", core.PeerAssume, "n1:1", 1, 4)
		a.want(r, 8*time.Second)
		w.pass(50 * time.Millisecond)
		if f := a.b.M.Stats().Failures; f[c.want] == 0 || len(a.waits) != 0 {
			t.Errorf("%s: failures by code are %v", c.what, f)
		}
		a.end(r)
		w.pass(15 * time.Second)
		a.idle(t)
	}
}

// Three in a row: what one has of the first, the third has of it.
func TestChain(t *testing.T) {
	w := newSim(t, 1, 3)
	w.calm = true
	for _, n := range w.nodes {
		n.b.M.o.LookupsPerSec = 1000
	}
	w.nodes[0].fill(1, 5)
	for i := 1; i < 3; i++ {
		n := w.nodes[i]
		r := n.ask("r", "kv", core.PeerProbe, w.nodes[i-1].name+":1", 1, 5)
		n.want(r, 8*time.Second)
		w.pass(time.Second)
		if len(r.leases) != 5 {
			t.Fatalf("%s has %d blocks", n.name, len(r.leases))
		}
		n.end(r)
	}
	w.pass(15 * time.Second)
	for _, n := range w.nodes {
		n.idle(t)
	}
	if s := w.nodes[0].b.M.Stats(); s.SentBlocks != 5 {
		t.Errorf("the first has sent %d blocks", s.SentBlocks)
	}
}
