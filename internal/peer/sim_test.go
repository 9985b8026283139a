package peer

import (
	"container/heap"
	"encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/internal/invariants"
	"github.com/terrace-kv/terrace/tier"
)

var (
	simSeed  = flag.Uint64("peer.seed", 0, "replay this seed of the simulation")
	simSteps = flag.Int("peer.steps", 2000, "steps of a seed")
	simSeeds = flag.Int("peer.seeds", 60, "seeds to try")
	simLog   = flag.Bool("peer.log", false, "print every step of the seed")
)

// sim is nodes, engines and a network on one goroutine under one seed. The nodes
// are real cores and real machines; memory is a map from slots to the key whose
// content they hold, so that a wrong, foreign or torn block shows.
type sim struct {
	t     *testing.T
	seed  uint64
	rng   *rand.Rand
	now   Time
	queue simQueue
	seq   uint64
	nodes []*simNode
	conns map[[2]any]*simConn // by node and ConnID
	next  ConnID
	spec  *block.Namespace
	steps int
	log   []string
}

type simEvent struct {
	at  Time
	seq uint64
	do  func()
}

type simQueue []simEvent

func (q simQueue) Len() int { return len(q) }
func (q simQueue) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].seq < q[j].seq
}
func (q simQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *simQueue) Push(x any)   { *q = append(*q, x.(simEvent)) }
func (q *simQueue) Pop() any {
	x := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return x
}

// simConn is one end of a session's connections.
type simConn struct {
	n      *simNode
	id     ConnID
	other  *simConn
	dead   bool // closed at this end, or the node is gone
	mute   bool // what is sent from here gets lost
	last   [2]Time
	grants map[simGrant]core.Slot
	inside map[simGrant]bool // a payload is going into the slot
	sendq  []simBlock
	busy   bool
}

type simGrant struct {
	nonce        uint64
	round, index uint32
}

type simBlock struct {
	id ServeID
	b  DataBlock
}

type simNode struct {
	w    *sim
	name string
	run  int
	down bool
	c    *core.Core
	b    *Bridge
	ns   core.NamespaceID
	mem  map[core.Slot]block.Key
	busy map[core.Slot]int // grants of peers to the slot that are not quiet
	disk map[block.Key]bool

	sid      core.SessionID
	requests map[string]*simRequest
	waits    map[core.WaitID]*simRequest
	nextReq  int
}

type simRequest struct {
	id     string
	kv     string
	keys   []block.Key
	role   core.PeerRole
	leases map[block.Key]core.Lease
	stored int // from the end
	decode bool
}

func simKey(i int) block.Key {
	var h [32]byte
	binary.BigEndian.PutUint64(h[:], uint64(i)*0x9e3779b97f4a7c15|1)
	binary.BigEndian.PutUint64(h[8:], uint64(i))
	k, _ := block.NewKey(h[:], 0)
	return k
}

func simSum(k block.Key) uint64 { return binary.BigEndian.Uint64(k[:]) ^ 0x5555 }

func newSim(t *testing.T, seed uint64, nodes int) *sim {
	ns, err := block.NewNamespace(block.Spec{Model: "m", DType: "b", Layout: "l", HashAlgorithm: "sha256", HashLength: 32,
		Groups: []block.Group{{Kind: block.KindFull, TokensPerBlock: 16, BlockBytes: core.PageSize}}})
	if err != nil {
		t.Fatal(err)
	}
	w := &sim{t: t, seed: seed, rng: rand.New(rand.NewPCG(seed, 7)), now: 1, conns: map[[2]any]*simConn{}, spec: ns}
	for i := range nodes {
		n := &simNode{w: w, name: fmt.Sprintf("n%d", i)}
		w.nodes = append(w.nodes, n)
		n.start()
	}
	return w
}

func (w *sim) fail(format string, args ...any) {
	w.t.Helper()
	tail := w.log
	if len(tail) > 60 {
		tail = tail[len(tail)-60:]
	}
	w.t.Fatalf("seed %d, step %d: %s\nreplay: go test ./internal/peer -run 'TestSim$' -peer.seed=%d -peer.log\n%s",
		w.seed, w.steps, fmt.Sprintf(format, args...), w.seed, strings.Join(tail, "\n"))
}

func (w *sim) trace(format string, args ...any) {
	line := fmt.Sprintf("%6.3fs ", float64(w.now)/1e9) + fmt.Sprintf(format, args...)
	w.log = append(w.log, line)
	if len(w.log) > 4000 {
		w.log = w.log[2000:]
	}
	if *simLog {
		w.t.Log(line)
	}
}

func (w *sim) after(d time.Duration, do func()) {
	w.seq++
	heap.Push(&w.queue, simEvent{w.now + Time(d), w.seq, do})
}

// start makes a node's core and machine, as a process does that has nothing in
// memory; its disk is what it was.
func (n *simNode) start() {
	n.run++
	n.down = false
	o := core.Options{Size: 48 * core.PageSize, ExtentBytes: 1 << 24,
		Tiers: []core.TierFacts{
			{Name: "disk", Medium: tier.MediumStorage, Known: func(_ core.NamespaceID, keys []block.Key, out []tier.Presence) {
				for i := range keys {
					out[i] = tier.Absent
					if n.disk[keys[i]] {
						out[i] = tier.Present
					}
				}
			}},
			{Name: "peers", Medium: tier.MediumCPU, Locality: tier.LocalityRemote, Bound: true, PromoteTimeout: 20 * time.Second},
		}}
	var err error
	if n.c, err = core.New(o); err != nil {
		n.w.fail("%v", err)
	}
	if n.ns, err = n.c.OpenNamespace(n.w.spec.Spec().Groups); err != nil {
		n.w.fail("%v", err)
	}
	var secret [32]byte
	secret[0], secret[1] = byte(n.w.seed), n.name[1]
	m := New(Options{Node: n.name, Boot: fmt.Sprint(n.run), Advertise: n.name + ":1", QuotaBytes: 10 * core.PageSize, ParkedMax: 4, EndedMax: 8}, secret)
	n.b = NewBridge(m, n.c, 1, func(fp block.Fingerprint) (core.NamespaceID, bool) { return n.ns, fp == n.w.spec.Fingerprint() },
		func(core.NamespaceID) *block.Namespace { return n.w.spec })
	n.mem, n.busy = map[core.Slot]block.Key{}, map[core.Slot]int{}
	if n.disk == nil {
		n.disk = map[block.Key]bool{}
	}
	n.requests, n.waits = map[string]*simRequest{}, map[core.WaitID]*simRequest{}
	m.SetNamespaces(n.w.now, []*block.Namespace{n.w.spec})
	n.open()
}

func (n *simNode) open() {
	var err error
	if n.sid, err = n.c.OpenSession(n.ns); err != nil {
		n.w.fail("%v", err)
	}
}

// pump performs effects until there are none.
func (n *simNode) pump() {
	if n.down {
		return
	}
	now := core.Time(n.w.now)
	for {
		fx := n.c.TakeEffects(nil)
		for _, e := range fx {
			if n.b.Perform(now, e) {
				continue
			}
			n.perform(e)
		}
		net := n.b.Settle(now, nil)
		for _, e := range net {
			n.network(e)
		}
		if len(fx)+len(net) == 0 {
			break
		}
	}
	if err := n.c.CheckInvariants(); err != nil {
		n.w.fail("%s: core: %v", n.name, err)
	}
	if err := n.b.M.CheckInvariants(); err != nil {
		n.w.fail("%s: machine: %v", n.name, err)
	}
}

func (n *simNode) perform(e core.Effect) {
	w, run := n.w, n.run
	switch e := e.(type) {
	case core.StartJob:
		w.after(time.Duration(w.rng.IntN(50))*time.Millisecond, func() {
			if n.run != run {
				return
			}
			var res []core.JobResult
			for i, x := range e.Blocks {
				r := core.JobResult{Index: i, Outcome: core.Failed, Class: tier.ClassRetryable, Cause: tier.CauseIO}
				switch {
				case w.rng.IntN(20) == 0:
				case e.Kind == core.Cascade:
					n.content(x.Slot, x.Key, "cascade")
					n.disk[x.Key] = true
					r.Outcome = core.Done
				case n.disk[x.Key]:
					n.write(x.Slot, x.Key)
					r.Outcome, r.Sum = core.Done, simSum(x.Key)
				default:
					r.Class = tier.ClassNotFound
				}
				res = append(res, r)
			}
			n.c.JobResults(core.Time(w.now), e.ID, res)
		})
	case core.AnswerLookup:
		if r := n.waits[e.Wait]; r != nil {
			delete(n.waits, e.Wait)
			n.answered(r, e.Answer)
		}
	}
}

// write puts a block's content into a slot; nobody else may be writing it.
func (n *simNode) write(s core.Slot, k block.Key) {
	if n.busy[s] > 0 {
		n.w.fail("%s: slot %d is written while a peer's payload may still go into it", n.name, s)
	}
	n.mem[s] = k
}

// content checks that a slot holds a block.
func (n *simNode) content(s core.Slot, k block.Key, what string) {
	if n.mem[s] != k {
		n.w.fail("%s: %s: slot %d holds %v, want %v", n.name, what, s, n.mem[s], k)
	}
}

func (n *simNode) answered(r *simRequest, a *core.Answer) {
	if a.Void || n.requests[r.id] != r {
		return
	}
	for i, l := range a.Groups[0].Leases {
		if l.Gen == 0 {
			continue
		}
		k := r.keys[a.Groups[0].First+i]
		n.content(l.Slot, k, "lease")
		if l.Sum != simSum(k) {
			n.w.fail("%s: lease of %x has sum %x", n.name, k[:12], l.Sum)
		}
		r.leases[k] = l
	}
}

// network carries out what the machine wants of the network.
func (n *simNode) network(e Effect) {
	w, run := n.w, n.run
	conn := func(id ConnID) *simConn { return w.conns[[2]any{n.name, id}] }
	switch e := e.(type) {
	case Dial:
		w.after(w.delay(), func() {
			if n.run != run || n.down {
				return
			}
			var to *simNode
			for _, o := range w.nodes {
				if o.name+":1" == e.Addr && !o.down {
					to = o
				}
			}
			if to == nil || w.rng.IntN(10) == 0 {
				n.b.M.DialFailed(w.now, e.Addr, "connection refused")
				return
			}
			a, b := w.conn(n), w.conn(to)
			a.other, b.other = b, a
			n.b.M.Connected(w.now, a.id, e.Addr)
			to.b.M.Connected(w.now, b.id, "")
			to.pump()
		})
	case Send:
		c := conn(e.Conn)
		if c == nil || c.dead {
			return
		}
		w.trace("%s → %s %T%+v", n.name, c.other.n.name, e.Msg, e.Msg)
		if c.mute {
			return
		}
		msg, o := e.Msg, c.other
		c.last[0] = max(c.last[0], w.now+Time(w.delay()))
		w.after(time.Duration(c.last[0]-w.now), func() {
			if !o.dead {
				o.n.b.M.Received(w.now, o.id, msg)
				o.n.pump()
			}
		})
	case CloseConn:
		if c := conn(e.Conn); c != nil {
			w.trace("%s closes %d: %s", n.name, e.Conn, e.Text)
			w.after(2*w.delay(), func() { c.close("closed here") })
			if o := c.other; !c.mute {
				w.after(3*w.delay(), func() { o.close("closed by the other side") })
			}
		}
	case Grant:
		c := conn(e.Conn)
		if c == nil || c.dead {
			return
		}
		g := simGrant{e.Nonce, e.Round, e.Index}
		n.busy[core.Slot(e.Slot)]++
		c.grants[g] = core.Slot(e.Slot)
	case Revoke:
		c := conn(e.Conn)
		for _, i := range e.Indexes {
			g := simGrant{e.Nonce, e.Round, i}
			w.after(w.delay()/4, func() {
				if c == nil || c.dead {
					return
				}
				c.release(g)
				n.b.M.Detached(w.now, c.id, g.nonce, g.round, g.index)
				n.pump()
			})
		}
	case Transmit:
		c := conn(e.Conn)
		for _, x := range e.Blocks {
			n.content(core.Slot(x.Lease.Slot), n.keyOf(e.ID, x.Head.Index), "transmit")
			if c != nil && !c.dead {
				c.sendq = append(c.sendq, simBlock{e.ID, x})
			}
		}
		if c != nil {
			c.pumpData()
		}
	case Unsend:
		c := conn(e.Conn)
		if c == nil || c.dead {
			return
		}
		var drop []simBlock
		c.sendq = slices.DeleteFunc(c.sendq, func(x simBlock) bool {
			if x.id == e.ID {
				drop = append(drop, x)
			}
			return x.id == e.ID
		})
		for _, x := range drop {
			w.after(0, func() {
				if !c.dead {
					n.b.M.Sent(w.now, x.id, x.b.Head.Index, false)
					n.pump()
				}
			})
		}
	}
}

func (n *simNode) keyOf(id ServeID, index uint32) block.Key { return n.b.M.serves[id].keys[index].key }

// pumpData sends the next block, if none is being sent.
func (c *simConn) pumpData() {
	if c.busy || len(c.sendq) == 0 || c.dead {
		return
	}
	w, n := c.n.w, c.n
	x := c.sendq[0]
	c.sendq = c.sendq[1:]
	c.busy = true
	key := n.keyOf(x.id, x.b.Head.Index)
	w.after(w.delay()/2, func() {
		if c.dead {
			return
		}
		n.content(core.Slot(x.b.Lease.Slot), key, "send") // pinned to the last byte
		c.busy = false
		n.b.M.Sent(w.now, x.id, x.b.Head.Index, true)
		n.pump()
		if !c.mute {
			o := c.other
			c.last[1] = max(c.last[1], w.now+Time(w.delay()))
			w.after(time.Duration(c.last[1]-w.now), func() { o.payload(x.b.Head, key) })
		}
		c.pumpData()
	})
}

// payload is a block that arrives: its bytes go into the slot for a while.
func (c *simConn) payload(h DataHead, key block.Key) {
	if c.dead {
		return
	}
	w, n := c.n.w, c.n
	g := simGrant{h.Nonce, h.Round, h.Index}
	if _, ok := c.grants[g]; !ok || c.inside[g] {
		return // to scratch
	}
	c.inside[g] = true
	w.after(w.delay()/2, func() {
		if c.dead || !c.inside[g] {
			return // detached meanwhile
		}
		delete(c.inside, g)
		s := c.grants[g]
		c.release(g)
		ok := w.rng.IntN(50) != 0
		if ok {
			n.mem[s] = key
		} else {
			n.mem[s] = block.Key{}
		}
		n.b.M.Arrived(w.now, c.id, h.Nonce, h.Round, h.Index, ok && h.Sum == simSum(key), h.Sum)
		n.pump()
	})
}

// release ends a grant: nothing will write its slot any more.
func (c *simConn) release(g simGrant) {
	if s, ok := c.grants[g]; ok {
		if c.inside[g] {
			c.n.mem[s] = block.Key{} // torn
			delete(c.inside, g)
		}
		if c.n.busy[s]--; c.n.busy[s] == 0 {
			delete(c.n.busy, s)
		}
		delete(c.grants, g)
	}
}

func (c *simConn) close(why string) {
	if c.dead {
		return
	}
	for g := range c.grants {
		c.release(g)
	}
	c.dead = true
	delete(c.n.w.conns, [2]any{c.n.name, c.id})
	if !c.n.down {
		c.n.b.M.Lost(c.n.w.now, c.id, why)
		c.n.pump()
	}
}

func (w *sim) conn(n *simNode) *simConn {
	w.next++
	c := &simConn{n: n, id: w.next, grants: map[simGrant]core.Slot{}, inside: map[simGrant]bool{}}
	w.conns[[2]any{n.name, c.id}] = c
	return c
}

func (w *sim) delay() time.Duration {
	if w.rng.IntN(40) == 0 {
		return time.Duration(w.rng.IntN(3000)) * time.Millisecond
	}
	return time.Duration(w.rng.IntN(20)) * time.Millisecond
}

// step does one thing that engines, operators or fate may do.
func (w *sim) step(quiet bool) {
	n := w.nodes[w.rng.IntN(len(w.nodes))]
	if n.down {
		if w.rng.IntN(20) == 0 {
			w.trace("%s starts", n.name)
			n.start()
		}
		return
	}
	now := core.Time(w.now)
	var some *simRequest
	ids := make([]string, 0, len(n.requests))
	for id := range n.requests {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	if len(ids) > 0 {
		some = n.requests[ids[w.rng.IntN(len(ids))]]
	}
	switch x := w.rng.IntN(100); {
	case x < 14 && len(ids) < 6:
		w.newRequest(n)
	case x < 45 && some != nil:
		wait := core.Time(0)
		if w.rng.IntN(3) > 0 {
			wait = now + core.Time(time.Duration(w.rng.IntN(8000))*time.Millisecond)
		}
		a := &core.Answer{}
		id, err := n.c.Lookup(now, n.sid, some.id, [][]block.Key{some.keys}, core.LookupOptions{WaitUntil: wait}, a)
		w.trace("%s lookup %s: wait %d, %v", n.name, some.id, id, err)
		if err != nil {
			w.fail("lookup: %v", err)
		}
		if id != 0 {
			n.waits[id] = some
		} else {
			n.answered(some, a)
		}
	case x < 68 && some != nil && some.stored < len(some.keys):
		lo := max(0, len(some.keys)-some.stored-1-w.rng.IntN(4))
		keys := some.keys[lo : len(some.keys)-some.stored]
		g, err := n.c.Reserve(now, n.sid, some.id, 0, lo, keys, nil)
		if err != nil {
			break
		}
		some.stored = len(some.keys) - lo
		var fills []core.Fill
		for i := range g {
			if g[i].Status == core.Granted {
				n.write(g[i].Slot, keys[i])
				fills = append(fills, core.Fill{Slot: g[i].Slot, Gen: g[i].Gen, Sum: simSum(keys[i]), HasSum: true})
			}
		}
		w.trace("%s stores %d of %s", n.name, len(fills), some.id)
		if _, err := n.c.Commit(now, n.sid, some.id, fills, nil); err != nil {
			w.fail("commit: %v", err)
		}
	case x < 82 && some != nil:
		n.finish(some)
	case x < 84:
		w.trace("%s: engine dies", n.name)
		sid := n.sid
		_, _ = n.c.CloseSession(now, sid)
		_ = n.c.SessionQuiet(now, sid)
		n.requests, n.waits = map[string]*simRequest{}, map[core.WaitID]*simRequest{}
		n.open()
	case x < 86:
		w.trace("%s: reset", n.name)
		_, _ = n.c.Reset(now, now+core.Time(time.Minute))
	case quiet:
	case x < 88:
		if c := w.someConn(); c != nil {
			w.trace("connection %d of %s breaks", c.id, c.n.name)
			o := c.other
			w.after(w.delay(), func() { c.close("reset") })
			w.after(w.delay(), func() { o.close("reset") })
		}
	case x < 89:
		if c := w.someConn(); c != nil {
			w.trace("connection %d of %s is mute", c.id, c.n.name)
			c.mute, c.other.mute = true, w.rng.IntN(2) == 0
		}
	case x < 90 && w.rng.IntN(4) == 0:
		w.trace("%s is killed", n.name)
		n.down = true
		n.run++
		for _, c := range w.conns {
			if c.n == n {
				c.dead = true
				o := c.other
				w.after(w.delay(), func() { o.close("reset by peer") })
			}
		}
	}
	n.pump()
}

func (w *sim) someConn() *simConn {
	var all []*simConn
	for _, c := range w.conns {
		if !c.dead {
			all = append(all, c)
		}
	}
	if len(all) == 0 {
		return nil
	}
	slices.SortFunc(all, func(a, b *simConn) int { return int(a.id) - int(b.id) })
	return all[w.rng.IntN(len(all))]
}

func (w *sim) newRequest(n *simNode) {
	n.nextReq++
	chain := w.rng.IntN(8)
	r := &simRequest{id: fmt.Sprint("r", n.nextReq), kv: fmt.Sprint("kv", chain), leases: map[block.Key]core.Lease{}}
	for i := range 1 + w.rng.IntN(12) {
		r.keys = append(r.keys, simKey(chain*100+i))
	}
	p := core.NoLimits()
	switch w.rng.IntN(5) {
	case 0:
	case 1:
		p.Peer = core.PeerProbe
	case 2:
		p.Peer = core.PeerAssume
	case 3:
		p.RemoteDecoder = true
	case 4:
		p.RemoteDecoder, p.Peer = true, core.PeerProbe
	}
	p.KVRequestID = r.kv
	r.role = p.Peer
	if err := n.c.NewRequest(core.Time(w.now), n.sid, r.id, p); err != nil {
		w.fail("new request: %v", err)
	}
	n.requests[r.id] = r
	w.trace("%s new %s (%s) peer %d decoder %v keys %d", n.name, r.id, r.kv, p.Peer, p.RemoteDecoder, len(r.keys))
	if p.Peer != core.PeerNone {
		to := w.nodes[w.rng.IntN(len(w.nodes))]
		for to == n {
			to = w.nodes[w.rng.IntN(len(w.nodes))]
		}
		if err := n.b.M.OpenSource(w.now, Source{Seq: n.c.RequestSeq(n.sid, r.id), Addr: to.name + ":1", ID: r.kv, Role: Role(p.Peer), NS: w.spec.Fingerprint()}); err != nil {
			w.fail("open source: %v", err)
		}
	}
}

func (n *simNode) finish(r *simRequest) {
	for k, l := range r.leases {
		n.content(l.Slot, k, "leased until the end")
	}
	n.w.trace("%s finishes %s", n.name, r.id)
	if err := n.c.Finish(core.Time(n.w.now), n.sid, r.id); err != nil {
		n.w.fail("finish: %v", err)
	}
	delete(n.requests, r.id)
	for id, x := range n.waits {
		if x == r {
			delete(n.waits, id)
		}
	}
}

// advance lets the world go on until a time.
func (w *sim) advance(until Time) {
	for {
		next := until
		for _, n := range w.nodes {
			if n.down {
				continue
			}
			for _, d := range []Time{Time(n.c.NextDeadline()), n.b.M.NextDeadline()} {
				if d != 0 {
					next = min(next, max(d, w.now))
				}
			}
		}
		if len(w.queue) > 0 {
			next = min(next, w.queue[0].at)
		}
		w.now = max(w.now, next)
		for len(w.queue) > 0 && w.queue[0].at <= w.now {
			heap.Pop(&w.queue).(simEvent).do()
		}
		for _, n := range w.nodes {
			if !n.down {
				n.c.Tick(core.Time(w.now))
				n.b.M.Tick(w.now)
				n.pump()
			}
		}
		if w.now >= until {
			return
		}
	}
}

// rest ends all requests and sees that nothing is left anywhere.
func (w *sim) rest() {
	for _, n := range w.nodes {
		if n.down {
			n.start()
		}
		for _, r := range n.requests {
			n.finish(r)
		}
		n.pump()
	}
	w.advance(w.now + Time(20*time.Minute))
	for _, n := range w.nodes {
		s, p := n.c.Stats(), n.b.M.Stats()
		if s.Free+s.Evictable+s.Remainder != s.Capacity || s.Pins+s.Requests+s.Handovers+s.Reservations+s.Jobs+s.Waits+s.Fills+s.QuietSlots+s.Facts != 0 || s.Sessions != 1 {
			w.fail("%s: the core is not idle: %+v", n.name, s)
		}
		if p.Sessions+p.Links+p.Sources+p.Rounds+p.Serves+p.Supplies+p.Parked+p.Aborts+p.Ended+p.Timers != 0 || p.Pinned != 0 {
			w.fail("%s: the machine is not idle: %+v", n.name, p)
		}
		if len(n.b.serves)+len(n.b.waits)+len(n.b.sessions) != 0 {
			w.fail("%s: the bridge is not idle: %d serves, %d waits, %d sessions", n.name, len(n.b.serves), len(n.b.waits), len(n.b.sessions))
		}
		if len(n.busy) != 0 {
			w.fail("%s: %d slots are still granted to peers", n.name, len(n.busy))
		}
	}
}

func TestSim(t *testing.T) {
	if invariants.Enabled && *simSeeds > 12 {
		*simSeeds = 12 // each step is checked several times as slowly
	}
	seeds := []uint64{*simSeed}
	if *simSeed == 0 {
		fresh := uint64(time.Now().UnixNano())
		t.Logf("fresh seed %d", fresh)
		seeds = []uint64{fresh}
		for i := range *simSeeds {
			seeds = append(seeds, uint64(i+1))
		}
	}
	var total Stats
	for _, seed := range seeds {
		w := newSim(t, seed, 2+int(seed%2))
		for w.steps = range *simSteps {
			w.step(seed%5 == 0)
			w.advance(w.now + Time(w.rng.IntN(60))*1e6)
		}
		w.rest()
		for _, n := range w.nodes {
			s := n.b.M.Stats()
			total.Blocks += s.Blocks
			total.SentBlocks += s.SentBlocks
			total.Lookups += s.Lookups
			total.Fetches += s.Fetches
			total.Deaths += s.Deaths
			total.Violations += s.Violations
			total.HitsExpired += s.HitsExpired
			for i := range s.Refused {
				total.Refused[i] += s.Refused[i]
				total.Failures[i] += s.Failures[i]
			}
		}
	}
	t.Logf("%+v", total)
	if total.Violations != 0 {
		t.Errorf("%d violations between nodes that keep to the protocol", total.Violations)
	}
	if total.Blocks == 0 || total.Deaths == 0 {
		t.Error("the simulation does not reach what it is for")
	}
}
