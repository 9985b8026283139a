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
	simSeeds = flag.Int("peer.seeds", 50, "seeds to try")
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
	other *block.Namespace // differs in its hash seed
	steps int
	log   []string

	faults   int           // one of so many of the network's and of processes happens; 0: none
	calm     bool          // nothing fails, and everything takes a millisecond
	hold     bool          // no block is sent
	detach   time.Duration // until a revoked slot is quiet; 0: soon
	sabotage sabotage      // what the nodes do wrong
	broken   bool          // it was done
	blind    bool          // the tables are not checked
	pumps    int
	cover    map[string]int // what was reached
}

// sabotage is a fault of a machine that the simulation must find.
type sabotage int

const (
	honest          sabotage = iota
	serveNeverEnds           // the core's request of a serve is not finished
	quietTooEarly            // a revoked slot is taken for quiet while a payload goes into it
	unpinTooEarly            // a block is given back when it begins to be sent
	jobNeverEnds             // the last report of a job is lost
	keyNeverTold             // a key that failed is not told to have
	sourceForgotten          // a request's end is not told to its producer
	sabotageEnd
)

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

	fetches map[roundKey]*simFetch // that came in here
	serves  map[ServeID]roundKey
}

// simFetch is what a producer owes.
type simFetch struct {
	answered []bool
	over     bool // the consumer does not want it any more
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
	spec *block.Namespace
	ns   core.NamespaceID

	audit  *auditor
	states map[any]string // of rounds and serves, when last looked at
	drains Time           // began
	slots  map[JobID][]core.Slot
	mem    map[core.Slot]block.Key
	busy   map[core.Slot]int // grants of peers to the slot that are not quiet
	disk   map[block.Key]bool

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
	other := testSpec(func(s *block.Spec) { seed := "x"; s.HashSeed = &seed })
	w := &sim{t: t, seed: seed, rng: rand.New(rand.NewPCG(seed, 7)), now: 1, conns: map[[2]any]*simConn{}, spec: ns, other: other, cover: map[string]int{},
		faults: []int{0, 1, 4, 10, 30}[seed%5]}
	for i := range nodes {
		n := &simNode{w: w, name: fmt.Sprintf("n%d", i)}
		w.nodes = append(w.nodes, n)
		n.start()
	}
	return w
}

// fail ends the run.
func (w *sim) fail(format string, args ...any) {
	w.t.Helper()
	if w.sabotage != honest {
		panic(found(fmt.Sprintf(format, args...)))
	}
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
	pages := int64(48)
	if n.w.seed%3 == 0 && !n.w.calm {
		pages = 16
	}
	o := core.Options{Size: pages * core.PageSize, ExtentBytes: 1 << 24,
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
	n.spec, n.drains = n.w.spec, 0
	if n.run > 1 && !n.w.calm && n.w.rng.IntN(10) == 0 {
		n.spec = n.w.other // somebody has set another seed
	}
	if n.ns, err = n.c.OpenNamespace(n.spec.Spec().Groups); err != nil {
		n.w.fail("%v", err)
	}
	var secret [32]byte
	secret[0], secret[1] = byte(n.w.seed), n.name[1]
	m := New(Options{Node: n.name, Boot: fmt.Sprint(n.run), Advertise: n.name + ":1", QuotaBytes: 6 * core.PageSize, PinnedMax: 9 * core.PageSize,
		ParkedMax: 2, ParkTimeout: 8 * time.Second, EndedMax: 4, LookupsPerSec: 3}, secret)
	n.b = NewBridge(m, n.c, 1, func(fp block.Fingerprint) (core.NamespaceID, bool) { return n.ns, fp == n.spec.Fingerprint() },
		func(core.NamespaceID) *block.Namespace { return n.spec })
	n.audit, n.states, n.slots = newAuditor(), map[any]string{}, map[JobID][]core.Slot{}
	n.audit.blind = true // what the core answers goes past it
	n.b.hook = n.effect
	n.mem, n.busy = map[core.Slot]block.Key{}, map[core.Slot]int{}
	if n.disk == nil {
		n.disk = map[block.Key]bool{}
	}
	n.requests, n.waits = map[string]*simRequest{}, map[core.WaitID]*simRequest{}
	m.SetNamespaces(n.w.now, []*block.Namespace{n.spec})
	n.open()
}

// effect sees the machine's effects before they are carried out, and carries some
// out wrongly if there is sabotage.
func (n *simNode) effect(e Effect) bool {
	w := n.w
	if n.audit.effect(e); n.audit.bad != "" {
		w.fail("%s: %s", n.name, n.audit.bad)
	}
	conn := func(id ConnID) *simConn { return w.conns[[2]any{n.name, id}] }
	switch e := e.(type) {
	case Serve:
		v := n.b.M.serves[e.ID]
		if c := conn(v.s.conn); c != nil {
			c.serves[e.ID] = v.key
		}
	case ServeEnd:
		for _, c := range w.conns {
			k, ok := c.serves[e.ID]
			if c.n != n || !ok {
				continue
			}
			delete(c.serves, e.ID)
			if f := c.fetches[k]; f != nil && !f.over && n.b.M.sessions[c.id].state == sessionUp {
				for i, done := range f.answered {
					if !done {
						w.fail("%s: serve %d has ended, and block %d of round %d was not answered", n.name, e.ID, i, k.round)
					}
				}
			}
		}
		if w.sabotage == serveNeverEnds {
			w.broken = true
			return false
		}
	case Revoke:
		if w.sabotage == quietTooEarly {
			for _, i := range e.Indexes {
				if c := conn(e.Conn); c != nil {
					_, granted := c.grants[simGrant{e.Nonce, e.Round, i}]
					w.broken = w.broken || granted
				}
				n.b.M.Detached(w.now, e.Conn, e.Nonce, e.Round, i)
			}
		}
	case Transmit:
		if x := n.b.serves[e.ID]; x != nil && w.sabotage == unpinTooEarly {
			w.broken = true
			for _, b := range e.Blocks {
				_, _ = n.c.Unpin(core.Time(w.now), x.s.id, x.name, []core.Lease{{Slot: core.Slot(b.Lease.Slot), Gen: b.Lease.Gen}}, nil)
			}
		}
	case Report:
		for _, r := range e.Results {
			if s := n.slots[e.Job][r.Index]; n.busy[s] > 0 {
				w.fail("%s: slot %d is told to be quiet, and a peer's payload may still go into it", n.name, s)
			}
		}
		if e.Last {
			delete(n.slots, e.Job)
		}
		if e.Last && w.sabotage == jobNeverEnds {
			w.broken = true
			return false
		}
	case Send:
		switch m := e.Msg.(type) {
		case *Failed:
			w.cover["failed "+m.Code.String()]++
			if c := conn(e.Conn); c != nil {
				if w.sabotage == keyNeverTold && len(m.Indexes) > 0 {
					w.broken = true
					m.Indexes = m.Indexes[:len(m.Indexes)-1]
				}
				c.answered(roundKey{m.Nonce, m.Round}, m.Indexes...)
				if len(m.Indexes) == 0 {
					return w.sabotage != keyNeverTold // it would fail all of them
				}
			}
		case *Answer:
			w.cover["answer "+m.Code.String()]++
		case *Finished:
			w.cover[fmt.Sprint("finished ", m.Complete)]++
			if w.sabotage == sourceForgotten {
				w.broken = true
				return false
			}
		case *Abort:
			if w.sabotage == sourceForgotten {
				return false
			}
		case *Bye:
			w.cover["bye "+m.Code.String()]++
		}
	}
	return true
}

// answered notes that a producer has answered for blocks of a fetch.
func (c *simConn) answered(k roundKey, list ...uint32) {
	if f := c.fetches[k]; f != nil {
		for _, i := range list {
			f.answered[i] = true
		}
	}
}

// look notes the states of rounds and serves, and what they were before.
func (n *simNode) look() {
	now := map[any]string{}
	for id, v := range n.b.M.serves {
		s := [...]string{"looking", "answered", "fetching"}[v.state]
		switch {
		case v.ended:
			s = "ended"
		case v.park:
			s = "parked"
		case v.supply != nil:
			s = "awaiting"
		}
		if v.hungry {
			s += " hungry"
		}
		now[id] = "serve " + s
	}
	for job, r := range n.b.M.rounds {
		s := "looking"
		switch {
		case r.s == nil:
			s = "waiting"
		case r.items != nil && r.left == len(r.items) && n.b.M.open(r):
			s = "fetching"
		case r.items != nil && n.b.M.open(r):
			s = "fetching some"
		case r.items != nil:
			s = "settled"
		}
		if r.s != nil && r.s.state == sessionClosing {
			s += " closing"
		}
		now[job] = "round " + s
	}
	for conn, s := range n.b.M.sessions {
		now[conn] = "session " + [...]string{"dialed", "accepted", "welcomed", "up", "closing"}[s.state]
	}
	for id, s := range now {
		if o := n.states[id]; o != s {
			n.w.cover[o+" → "+s]++
		}
	}
	for id, o := range n.states {
		if now[id] == "" {
			n.w.cover[o+" → gone"]++
		}
	}
	n.states = now
}

// found is how a run under sabotage ends when it was noticed.
type found string

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
			if j, ok := e.(core.StartJob); ok && j.Tier == 1 && j.Kind == core.Promotion {
				for _, x := range j.Blocks {
					n.slots[JobID(j.ID)] = append(n.slots[JobID(j.ID)], x.Slot)
				}
			}
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
	w := n.w
	if !w.calm {
		n.look()
	}
	sending := 0
	for _, c := range w.conns {
		if c.n == n {
			sending += len(c.sendq)
			if c.busy {
				sending++
			}
		}
	}
	if sending > 0 {
		if pins := n.c.Stats().Pins; pins < sending {
			w.fail("%s: %d blocks are to be sent, and %d are pinned", n.name, sending, pins)
		}
	}
	every := 6
	if invariants.Enabled || w.calm {
		every = 40
	}
	if w.pumps++; w.blind || w.pumps%every != 0 {
		return
	}
	if err := n.c.CheckInvariants(); err != nil {
		w.fail("%s: core: %v", n.name, err)
	}
	if err := n.b.M.CheckInvariants(); err != nil {
		w.fail("%s: machine: %v", n.name, err)
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
				case !w.calm && w.rng.IntN(20) == 0:
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
				if (o.name+":1" == e.Addr || o.name+":2" == e.Addr) && !o.down {
					to = o
				}
			}
			if to == nil || !w.calm && w.rng.IntN(10) == 0 {
				n.b.M.DialFailed(w.now, e.Addr, "connection refused")
				n.pump()
				return
			}
			a, b := w.conn(n), w.conn(to)
			a.other, b.other = b, a
			n.b.M.Connected(w.now, a.id, e.Addr)
			to.b.M.Connected(w.now, b.id, "")
			n.pump()
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
				o.received(msg)
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
			w.after(max(w.detach, w.delay()/4), func() {
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

// received takes a frame, and notes what it asks for.
func (c *simConn) received(msg Message) {
	n := c.n
	up := n.b.M.sessions[c.id] != nil && n.b.M.sessions[c.id].state == sessionUp
	switch m := msg.(type) {
	case *Fetch:
		if up {
			c.fetches[roundKey{m.Nonce, m.Round}] = &simFetch{answered: make([]bool, len(m.Keys))}
		}
	case *Abort:
		if f := c.fetches[roundKey{m.Nonce, m.Round}]; f != nil {
			f.over = true
		}
	case *Finished:
		for k := range c.fetches {
			if k.nonce == m.Nonce {
				delete(c.fetches, k)
			}
		}
	}
	n.b.M.Received(n.w.now, c.id, msg)
	n.pump()
}

func (n *simNode) keyOf(id ServeID, index uint32) block.Key { return n.b.M.serves[id].keys[index].key }

// pumpData sends the next block, if none is being sent.
func (c *simConn) pumpData() {
	w, n := c.n.w, c.n
	if c.busy || len(c.sendq) == 0 || c.dead || w.hold {
		return
	}
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
		c.answered(roundKey{x.b.Head.Nonce, x.b.Head.Round}, x.b.Head.Index)
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
		ok := w.calm || w.rng.IntN(50) != 0
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
	c := &simConn{n: n, id: w.next, grants: map[simGrant]core.Slot{}, inside: map[simGrant]bool{},
		fetches: map[roundKey]*simFetch{}, serves: map[ServeID]roundKey{}}
	w.conns[[2]any{n.name, c.id}] = c
	return c
}

func (w *sim) delay() time.Duration {
	if w.calm {
		return time.Millisecond
	}
	if w.rng.IntN(40) == 0 {
		return time.Duration(w.rng.IntN(2000)) * time.Millisecond
	}
	return time.Duration(w.rng.IntN(20)) * time.Millisecond
}

// step does one thing that engines, operators or fate may do.
func (w *sim) step() {
	quiet := w.faults == 0 || w.rng.IntN(w.faults) != 0
	n := w.nodes[w.rng.IntN(len(w.nodes))]
	if n.down {
		if w.rng.IntN(20) == 0 {
			w.trace("%s starts", n.name)
			n.start()
		}
		return
	}
	now := core.Time(w.now)
	if n.drains != 0 {
		switch since := w.now - n.drains; {
		case since > Time(3*time.Second):
			w.trace("%s has drained", n.name)
			n.b.M.Close(w.now)
			n.pump()
			n.kill()
			return
		case w.rng.IntN(3) > 0:
			return // engines leave it
		}
	}
	var some *simRequest
	ids := sortedNames(n.requests)
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
		n.lookup(some, wait)
	case x < 68 && some != nil && some.stored < len(some.keys):
		n.store(some, 1+w.rng.IntN(4))
	case x < 82 && some != nil:
		n.finish(some)
	case x < 84 && n.drains == 0:
		w.trace("%s: engine dies", n.name)
		sid := n.sid
		_, _ = n.c.CloseSession(now, sid)
		_ = n.c.SessionQuiet(now, sid)
		n.requests, n.waits = map[string]*simRequest{}, map[core.WaitID]*simRequest{}
		n.open()
	case x < 86:
		w.trace("%s: reset", n.name)
		_, _ = n.c.Reset(now, now+core.Time(time.Minute))
	case x < 87 && n.drains == 0 && w.faults > 0 && w.rng.IntN(8) == 0:
		w.trace("%s drains", n.name)
		n.drains = w.now
		n.c.Drain()
		n.b.M.Drain(w.now)
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
		n.kill()
	}
	n.pump()
}

// kill ends a node's process. The others hear of it when its system says so, or
// if that is silent too, when they find out.
func (n *simNode) kill() {
	w := n.w
	n.down = true
	n.run++
	silent := !w.calm && w.rng.IntN(3) == 0
	for _, c := range w.all() {
		if c.n == n {
			c.dead, c.mute, c.other.mute = true, true, true
			delete(w.conns, [2]any{n.name, c.id})
			if o := c.other; !silent {
				w.after(w.delay(), func() { o.close("reset by peer") })
			}
		}
	}
}

func (n *simNode) lookup(r *simRequest, wait core.Time) {
	w := n.w
	a := &core.Answer{}
	id, err := n.c.Lookup(core.Time(w.now), n.sid, r.id, [][]block.Key{r.keys}, core.LookupOptions{WaitUntil: wait}, a)
	w.trace("%s lookup %s: wait %d, %v", n.name, r.id, id, err)
	if err != nil {
		w.fail("lookup: %v", err)
	}
	if id != 0 {
		n.waits[id] = r
	} else {
		n.answered(r, a)
	}
}

// store stores some more blocks of a request, the tail first.
func (n *simNode) store(r *simRequest, count int) {
	w, now := n.w, core.Time(n.w.now)
	lo := max(0, len(r.keys)-r.stored-count)
	keys := r.keys[lo : len(r.keys)-r.stored]
	g, err := n.c.Reserve(now, n.sid, r.id, 0, lo, keys, nil)
	if err != nil {
		return
	}
	r.stored = len(r.keys) - lo
	var fills []core.Fill
	for i := range g {
		if g[i].Status == core.Granted {
			n.write(g[i].Slot, keys[i])
			fills = append(fills, core.Fill{Slot: g[i].Slot, Gen: g[i].Gen, Sum: simSum(keys[i]), HasSum: true})
		}
	}
	w.trace("%s stores %d of %s", n.name, len(fills), r.id)
	if _, err := n.c.Commit(now, n.sid, r.id, fills, nil); err != nil {
		w.fail("commit: %v", err)
	}
}

// all lists the ends of connections that are not closed, in order.
func (w *sim) all() (out []*simConn) {
	for _, c := range w.conns {
		if !c.dead {
			out = append(out, c)
		}
	}
	slices.SortFunc(out, func(a, b *simConn) int { return int(a.id) - int(b.id) })
	return out
}

func (w *sim) someConn() *simConn {
	if all := w.all(); len(all) > 0 {
		return all[w.rng.IntN(len(all))]
	}
	return nil
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
	if w.rng.IntN(4) > 0 {
		p.StoreTiers = []core.TierFilter{} // else soon everybody has everything on disk
	}
	p.KVRequestID = r.kv
	r.role = p.Peer
	to := w.nodes[w.rng.IntN(len(w.nodes))]
	for to == n {
		to = w.nodes[w.rng.IntN(len(w.nodes))]
	}
	n.begin(r, p, fmt.Sprint(to.name, ":", 1+w.rng.IntN(4)/3))
}

// begin begins a request, which may be bound to a peer.
func (n *simNode) begin(r *simRequest, p core.Params, addr string) {
	w := n.w
	if err := n.c.NewRequest(core.Time(w.now), n.sid, r.id, p); err != nil {
		if n.drains == 0 {
			w.fail("new request: %v", err)
		}
		return
	}
	n.requests[r.id] = r
	w.trace("%s new %s (%s) peer %d decoder %v keys %d", n.name, r.id, r.kv, p.Peer, p.RemoteDecoder, len(r.keys))
	if p.Peer != core.PeerNone {
		src := Source{Seq: n.c.RequestSeq(n.sid, r.id), Addr: addr, ID: r.kv, Role: Role(p.Peer), NS: n.spec.Fingerprint()}
		if err := n.b.M.OpenSource(w.now, src); err != nil {
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
		if n.drains != 0 && !n.down {
			n.kill()
		}
		if n.down {
			n.start()
		}
		for _, id := range sortedNames(n.requests) {
			n.finish(n.requests[id])
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
		if w.faults == 0 && n.b.M.Stats().Deaths > 0 {
			w.fail("%s: a peer was taken for dead, and nothing was done to it", n.name)
		}
		if len(n.busy) != 0 {
			w.fail("%s: %d slots are still granted to peers", n.name, len(n.busy))
		}
		if what := n.audit.rest(); what != "" {
			w.fail("%s: %s", n.name, what)
		}
	}
}

func sortedNames(in map[string]*simRequest) []string {
	out := make([]string, 0, len(in))
	for id := range in {
		out = append(out, id)
	}
	slices.Sort(out)
	return out
}

// run is one seed.
func (w *sim) run(steps int) {
	for w.steps = range steps {
		w.step()
		pause := Time(w.rng.IntN(60)) * 1e6
		if w.rng.IntN(150) == 0 {
			pause = Time(w.rng.IntN(14)) * 1e9 // engines have other things to do
		}
		w.advance(w.now + pause)
	}
	w.rest()
}

func TestSim(t *testing.T) {
	if invariants.Enabled && *simSeeds > 12 {
		*simSeeds = 12 // each step takes several times as long
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
	cover := map[string]int{}
	for _, seed := range seeds {
		w := newSim(t, seed, 2+int(seed%2))
		w.run(*simSteps)
		for what, n := range w.cover {
			cover[what] += n
		}
		for _, n := range w.nodes {
			s := n.b.M.Stats()
			total.Blocks += s.Blocks
			total.SentBlocks += s.SentBlocks
			total.Lookups += s.Lookups
			total.Fetches += s.Fetches
			total.Deaths += s.Deaths
			total.Violations += s.Violations
			total.HitsExpired += s.HitsExpired
			total.Corrupt += s.Corrupt
			total.FastFails += s.FastFails
			total.Strays += s.Strays
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
	if *simSeed == 0 && len(seeds) >= 20 {
		checkCover(t, cover, total)
	}
}

// reached is what the seeds must reach, or they are not worth their time: steps
// in the life of rounds, serves and sessions, and what nodes say of failures.
const reached = `
→ round fetching | → round looking | → round waiting
round waiting → gone | round waiting → round fetching | round waiting → round looking
round looking → gone | round looking → round looking closing | round looking closing → round looking
round fetching → gone | round fetching → round fetching some | round fetching → round settled | round fetching → round fetching closing
round fetching some → gone | round fetching some → round settled | round settled → gone
→ serve looking | → serve answered | → serve fetching | → serve parked | → serve awaiting | → serve parked hungry | → serve awaiting hungry
serve looking → gone | serve looking → serve answered | serve answered → gone | serve answered → serve fetching
serve fetching → gone | serve fetching → serve ended | serve ended → gone
serve parked → gone | serve parked → serve awaiting | serve parked → serve ended | serve parked hungry → serve parked
serve awaiting → gone | serve awaiting → serve ended | serve awaiting hungry → serve awaiting
→ session accepted | → session dialed | session dialed → session welcomed | session dialed → session closing | session dialed → gone
session accepted → session up | session accepted → session closing | session welcomed → session up | session welcomed → session closing
session up → session closing | session up → gone | session closing → gone
answer ok | answer busy | answer draining | answer namespace | answer quota
failed absent | failed busy | failed draining | failed ended | failed namespace
bye draining | bye duplicate | bye idle | bye timeout
finished false | finished true
`

// unreached are codes that the simulation has no way to, and where they are
// tested.
var unreached = map[Code]string{
	CodeOK:       "no failure",
	CodeNoRoom:   "rare here; TestProducerTable",
	CodeTimeout:  "the consumer is the first to give up; TestProducerTable, TestWhatWasNotSentInTimeIsTold",
	CodeFailed:   "the core takes every request here; TestBridgeTellsWhy",
	10:           "reserved",
	CodeProtocol: "nobody breaks it here; the tables, and TestHostileProducer and TestHostileConsumer",
	CodeVersion:  "TestRefusedGreetings",
	CodeSelf:     "TestRefusedGreetings",
}

func checkCover(t *testing.T, cover map[string]int, total Stats) {
	for line := range strings.Lines(reached) {
		for _, what := range strings.Split(strings.TrimSpace(line), " | ") {
			if what != "" && cover[what] == 0 && cover[" "+what] == 0 {
				t.Errorf("not reached: %s", what)
			}
		}
	}
	for code := range codeEnd {
		said := false
		for _, what := range []string{"answer ", "failed ", "bye "} {
			said = said || cover[what+code.String()] > 0
		}
		if said = said || total.Failures[code] > 0; !said && unreached[code] == "" {
			t.Errorf("nobody says %v", code)
		}
	}
	if total.HitsExpired == 0 || total.Corrupt == 0 || total.FastFails == 0 || total.Deaths == 0 || total.Strays == 0 {
		t.Errorf("not reached: %+v", total)
	}
	names := make([]string, 0, len(cover))
	for what := range cover {
		names = append(names, what)
	}
	slices.Sort(names)
	var out strings.Builder
	for _, what := range names {
		fmt.Fprintf(&out, "\n%6d %s", cover[what], what)
	}
	t.Log(out.String())
}

// TestSimCanary breaks the nodes on purpose in each of some ways: a simulation
// that does not notice proves nothing. The checks of the machine's own tables are
// off, so that only what engines, cores and peers could see counts.
func TestSimCanary(t *testing.T) {
	if invariants.Enabled {
		t.Skip("the simulation is broken on purpose in builds without checks only: with them a core panics first")
	}
	for sab := honest + 1; sab < sabotageEnd; sab++ {
		t.Run(fmt.Sprint(int(sab)), func(t *testing.T) {
			broken, noticed := 0, 0
			why := map[string]int{}
			for seed := uint64(1); seed <= 30 && noticed < 4; seed++ {
				w := newSim(t, seed, 2+int(seed%2))
				w.sabotage, w.blind = sab, true
				if sab == sourceForgotten {
					w.faults = 0 // it shows where nobody dies
				}
				bad := func() (bad found) {
					defer func() {
						if p := recover(); p != nil {
							var ok bool
							if bad, ok = p.(found); !ok {
								bad = found(fmt.Sprint(p)) // a core that finds itself broken panics
							}
						}
					}()
					w.run(1000)
					return ""
				}()
				if w.broken {
					broken++
				}
				if bad != "" {
					if !w.broken {
						t.Fatalf("seed %d fails without sabotage: %s", seed, bad)
					}
					noticed++
					why[string(bad[:min(len(bad), 90)])]++
				}
			}
			t.Logf("broken in %d runs, noticed in %d: %v", broken, noticed, why)
			if broken < 3 || noticed*2 < broken {
				t.Errorf("broken in %d runs, noticed in %d", broken, noticed)
			}
		})
	}
}
