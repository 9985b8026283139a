package peer

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/invariants"
)

var greetSeeds = flag.Int("peer.greetseeds", 100, "orders of events to try for each way to greet")

// lan is machines and a network of which nothing is known but that each
// direction of a connection keeps its order. The producer has every block.
type lan struct {
	rng   *rand.Rand
	nodes map[string]*lanNode // by address
	all   []*lanNode
	ns    *block.Namespace
	now   Time
	next  ConnID
	todo  []*lanQueue
	log   []string
}

type lanNode struct {
	w       *lan
	name    string
	m       *Machine
	conns   map[ConnID]*lanConn
	audit   *auditor
	results map[JobID]Code // CodeOK: all came
}

type lanConn struct {
	n     *lanNode
	id    ConnID
	other *lanConn
	in    *lanQueue
	mute  bool // what is sent from here gets lost
	ended bool
}

// lanQueue is things that happen one after the other.
type lanQueue struct {
	list []func()
	once bool
}

func (w *lan) queue(do func()) *lanQueue {
	q := &lanQueue{once: true}
	w.todo = append(w.todo, q)
	q.list = append(q.list, do)
	return q
}

func newLan(seed uint64, names ...string) *lan {
	w := &lan{rng: rand.New(rand.NewPCG(seed, 1)), nodes: map[string]*lanNode{}, ns: testSpec(nil), now: 1}
	for _, name := range names {
		n := &lanNode{w: w, name: name}
		w.all = append(w.all, n)
		n.boot("1")
		for _, port := range []string{":1", ":2", ":3"} {
			w.nodes[name+port] = n
		}
	}
	return w
}

// boot starts a node. Its connections are gone, and nobody has been told.
func (n *lanNode) boot(run string) {
	for _, c := range n.conns {
		c.ended, c.mute, c.other.mute = true, true, true
	}
	n.m = New(Options{Node: n.name, Boot: run, Advertise: n.name + ":1"}, [32]byte{n.name[0], run[0]})
	n.conns, n.audit, n.results = map[ConnID]*lanConn{}, newAuditor(), map[JobID]Code{}
	n.m.SetNamespaces(n.w.now, []*block.Namespace{n.w.ns})
	n.pump()
}

func (w *lan) trace(format string, args ...any) {
	w.log = append(w.log, fmt.Sprintf("%6.3fs ", float64(w.now)/1e9)+fmt.Sprintf(format, args...))
}

func (w *lan) conn(n *lanNode) *lanConn {
	w.next++
	c := &lanConn{n: n, id: w.next, in: &lanQueue{}}
	n.conns[c.id] = c
	return c
}

func (n *lanNode) pump() {
	for {
		fx := n.m.TakeEffects(nil)
		if len(fx) == 0 {
			break
		}
		for _, e := range fx {
			n.audit.effect(e)
			n.effect(e)
		}
	}
	if err := n.m.CheckInvariants(); err != nil {
		n.audit.fail("%s: %v", n.name, err)
	}
}

func (n *lanNode) effect(e Effect) {
	w, m := n.w, n.m
	c := func(id ConnID) *lanConn { return n.conns[id] }
	switch e := e.(type) {
	case Dial:
		w.trace("%s dials %s", n.name, e.Addr)
		w.queue(func() {
			to := w.nodes[e.Addr]
			if n.m != m {
				return
			}
			if to == nil {
				n.m.DialFailed(w.now, e.Addr, "refused")
				n.pump()
				return
			}
			a, b := w.conn(n), w.conn(to)
			a.other, b.other = b, a
			b.in.list = append(b.in.list, func() { to.m.Connected(w.now, b.id, "") })
			n.m.Connected(w.now, a.id, e.Addr)
			n.pump()
		})
	case Send:
		w.trace("%s on %d: %T%+v", n.name, e.Conn, e.Msg, e.Msg)
		if x := c(e.Conn); x != nil && !x.mute {
			x.other.hear(e.Msg)
		}
	case CloseConn:
		w.trace("%s closes %d: %s", n.name, e.Conn, e.Text)
		if x := c(e.Conn); x != nil {
			if !x.mute {
				x.other.end()
			}
			w.queue(func() { x.gone() })
		}
	case Serve:
		found := make([]Found, len(e.Keys))
		for i := range found {
			found[i] = pinned(uint64(i))
		}
		w.queue(func() {
			if n.m == m {
				n.audit.served(e.ID, found)
				n.m.Served(w.now, e.ID, found)
				n.pump()
			}
		})
	case Transmit:
		x := c(e.Conn)
		for _, b := range e.Blocks {
			w.queue(func() {
				if x == nil || x.ended || n.m != m {
					return
				}
				n.audit.sent(e.ID, b.Head.Index)
				n.m.Sent(w.now, e.ID, b.Head.Index, true)
				n.pump()
				if !x.mute && !x.other.ended {
					o := x.other
					o.n.m.Arrived(w.now, o.id, b.Head.Nonce, b.Head.Round, b.Head.Index, true, b.Head.Sum)
					o.n.pump()
				}
			})
		}
	case Revoke:
		x := c(e.Conn)
		w.queue(func() {
			if x != nil && !x.ended && n.m == m {
				for _, i := range e.Indexes {
					n.m.Detached(w.now, e.Conn, e.Nonce, e.Round, i)
				}
				n.pump()
			}
		})
	case Unsend:
		n.audit.fail("a serve is cut short")
	case Report:
		for _, r := range e.Results {
			if r.Code != CodeOK {
				n.results[e.Job] = r.Code
			}
		}
		if _, bad := n.results[e.Job]; e.Last && !bad {
			n.results[e.Job] = CodeOK
		}
		w.trace("%s: job %d %v", n.name, e.Job, e.Results)
	}
}

func (c *lanConn) hear(msg Message) {
	c.in.list = append(c.in.list, func() {
		if !c.ended {
			c.n.m.Received(c.n.w.now, c.id, msg)
			c.n.pump()
		}
	})
}

// end closes a connection from the other side.
func (c *lanConn) end() { c.in.list = append(c.in.list, c.gone) }

func (c *lanConn) gone() {
	if c.ended {
		return
	}
	c.ended = true
	delete(c.n.conns, c.id)
	if !c.mute && !c.other.ended {
		c.other.end()
	}
	c.n.audit.gone(c.id)
	c.n.m.Lost(c.n.w.now, c.id, "closed")
	c.n.pump()
}

// settle lets what is under way happen in any order, and time pass, for a while.
func (w *lan) settle(d time.Duration) string {
	for end := w.now + Time(d); ; {
		for w.step() {
		}
		next := end
		for _, n := range w.all {
			if t := n.m.NextDeadline(); t != 0 {
				next = min(next, max(t, w.now))
			}
		}
		w.now = max(w.now, next)
		for _, n := range w.all {
			n.m.Tick(w.now)
			n.pump()
			if n.audit.bad != "" {
				return n.audit.bad
			}
		}
		if w.now >= end {
			return ""
		}
	}
}

// step does one of the things that can happen next.
func (w *lan) step() bool {
	var live []*lanQueue
	for _, q := range w.todo {
		if len(q.list) > 0 {
			live = append(live, q)
		}
	}
	for _, n := range w.all {
		for id := ConnID(1); id <= w.next; id++ {
			if c := n.conns[id]; c != nil && len(c.in.list) > 0 {
				live = append(live, c.in)
			}
		}
	}
	w.todo = w.todo[:0]
	for _, q := range live {
		if q.once {
			w.todo = append(w.todo, q)
		}
	}
	if len(live) == 0 {
		return false
	}
	q := live[w.rng.IntN(len(live))]
	do := q.list[0]
	q.list = q.list[1:]
	do()
	w.now += Time(w.rng.IntN(1000)) * 1000
	return true
}

// want has a node's engine load two blocks.
func (n *lanNode) want(job JobID, addr string, role Role) {
	n.w.trace("%s wants job %d of %s", n.name, job, addr)
	seq := uint64(job)
	if err := n.m.OpenSource(n.w.now, Source{Seq: seq, Addr: addr, ID: "kv", Role: role, NS: n.w.ns.Fingerprint()}); err != nil {
		n.audit.fail("%v", err)
	}
	items := []Item{{Key: simKey(1), Slot: uint64(job) * 10, Length: 4096}, {Key: simKey(2), Slot: uint64(job)*10 + 1, Length: 4096}}
	n.m.Submit(n.w.now, job, seq, items, n.w.now+Time(30*time.Second))
	n.pump()
}

// joined says whether two nodes have one session and the same.
func joined(a, b *lanNode) string {
	up := func(n *lanNode) (out []*lanConn) {
		for id, s := range n.m.sessions {
			if s.state == sessionUp {
				out = append(out, n.conns[id])
			}
		}
		return out
	}
	x, y := up(a), up(b)
	if len(x) != 1 || len(y) != 1 || x[0].other != y[0] || len(a.m.sessions) != 1 || len(b.m.sessions) != 1 {
		return fmt.Sprintf("%d and %d sessions are up, of %d and %d", len(x), len(y), len(a.m.sessions), len(b.m.sessions))
	}
	return ""
}

// TestGreetings has two nodes find each other in many orders of events: there is
// one session in the end, and every load has come.
func TestGreetings(t *testing.T) {
	type job struct {
		n    string
		addr string
	}
	begin := func(w *lan, jobs ...job) {
		for i, j := range jobs {
			n := w.nodes[j.n+":1"]
			w.queue(func() { n.want(JobID(i+1), j.addr, RoleAssume) })
		}
	}
	for _, c := range []struct {
		what string
		fail int // loads that may fail, of all seeds
		do   func(w *lan) string
	}{
		{"one dials", 0, func(w *lan) string {
			begin(w, job{"a", "b:1"})
			return w.settle(3 * time.Second)
		}},
		{"both dial at once", 0, func(w *lan) string {
			begin(w, job{"a", "b:1"}, job{"b", "a:1"}, job{"b", "a:1"})
			return w.settle(3 * time.Second)
		}},
		{"both dial, the smaller by another address", 0, func(w *lan) string {
			begin(w, job{"a", "b:2"}, job{"b", "a:1"})
			return w.settle(3 * time.Second)
		}},
		{"both dial, the larger by another address", 0, func(w *lan) string {
			begin(w, job{"a", "b:1"}, job{"b", "a:2"})
			return w.settle(3 * time.Second)
		}},
		{"both dial by other addresses", 0, func(w *lan) string {
			begin(w, job{"a", "b:2"}, job{"b", "a:2"})
			return w.settle(3 * time.Second)
		}},
		{"one dials three addresses", 0, func(w *lan) string {
			begin(w, job{"a", "b:1"}, job{"a", "b:2"}, job{"a", "b:3"})
			return w.settle(3 * time.Second)
		}},
		{"all at once", 0, func(w *lan) string {
			begin(w, job{"a", "b:1"}, job{"a", "b:2"}, job{"b", "a:3"}, job{"b", "a:1"}, job{"a", "b:3"})
			return w.settle(4 * time.Second)
		}},
		{"another address of a session that is old", 0, func(w *lan) string {
			begin(w, job{"a", "b:1"})
			if bad := w.settle(4 * time.Second); bad != "" {
				return bad
			}
			first := w.nodes["a:1"].m.sorted()[0].conn
			w.queue(func() { w.nodes["b:1"].want(9, "a:2", RoleAssume) })
			w.queue(func() { w.nodes["a:1"].want(10, "b:2", RoleAssume) })
			w.queue(func() { w.nodes["a:1"].want(11, "b:1", RoleAssume) })
			bad := w.settle(4 * time.Second)
			if s := w.nodes["a:1"].m.sorted(); bad == "" && (len(s) != 1 || s[0].conn != first) {
				return "the old session has not stayed"
			}
			return bad
		}},
		{"one was started again", 0, func(w *lan) string {
			begin(w, job{"a", "b:1"})
			if bad := w.settle(3 * time.Second); bad != "" {
				return bad
			}
			w.nodes["a:1"].boot("2")
			begin(w, job{"a", "b:1"})
			w.queue(func() { w.nodes["a:1"].want(5, "b:2", RoleAssume) })
			return w.settle(4 * time.Second)
		}},
		{"both were started again, unnoticed by each other", 0, func(w *lan) string {
			begin(w, job{"a", "b:1"}, job{"b", "a:1"})
			if bad := w.settle(3 * time.Second); bad != "" {
				return bad
			}
			w.nodes["a:1"].boot("2")
			w.nodes["b:1"].boot("2")
			begin(w, job{"a", "b:1"}, job{"b", "a:2"})
			return w.settle(4 * time.Second)
		}},
		{"one has lost its side", 0, func(w *lan) string {
			begin(w, job{"a", "b:1"})
			if bad := w.settle(3 * time.Second); bad != "" {
				return bad
			}
			for _, c := range w.nodes["a:1"].conns {
				c.mute, c.other.mute = true, true
				w.queue(c.gone)
			}
			bad := w.settle(300 * time.Millisecond) // it is not dialed for a moment
			w.queue(func() { w.nodes["a:1"].want(6, "b:1", RoleAssume) })
			if bad == "" {
				bad = w.settle(3 * time.Second)
			}
			w.queue(func() { w.nodes["a:1"].want(7, "b:1", RoleAssume) })
			if bad == "" {
				bad = w.settle(3 * time.Second)
			}
			if bad == "" && w.nodes["a:1"].results[7] != CodeOK {
				bad = "no load works afterwards"
			}
			return bad
		}},
		{"two of one name", 1 << 30, func(w *lan) string {
			// Both claim to be b: they take the session from each other, and nothing worse.
			w.nodes["c:1"].m.o.Node = "b"
			begin(w, job{"a", "b:1"}, job{"c", "a:1"})
			bad := w.settle(5 * time.Second)
			w.all, w.nodes["c:1"].m.o.Node = w.all[:2], "c"
			return bad
		}},
	} {
		t.Run(strings.ReplaceAll(c.what, " ", "-"), func(t *testing.T) {
			seeds := uint64(*greetSeeds)
			if invariants.Enabled {
				seeds = min(seeds, 25)
			}
			failed := 0
			for seed := range seeds {
				if seed == 0 {
					seed = uint64(time.Now().UnixNano())
				}
				w := newLan(seed, "a", "b", "c")
				a, b := w.nodes["a:1"], w.nodes["b:1"]
				bad := c.do(w)
				if bad == "" && c.what != "two of one name" {
					bad = joined(a, b)
				}
				for _, n := range w.all {
					for job, code := range n.results {
						if code != CodeOK {
							if failed++; failed > c.fail && bad == "" {
								bad = fmt.Sprintf("%s: job %d failed: %v", n.name, job, code)
							}
						}
					}
					if s := n.m.Stats(); s.Violations > 0 && bad == "" {
						bad = fmt.Sprintf("%s: %d violations", n.name, s.Violations)
					}
					if s := n.m.Stats(); s.Rounds > 0 && bad == "" {
						bad = fmt.Sprintf("%s: %d rounds are not over", n.name, s.Rounds)
					}
				}
				if bad != "" {
					t.Fatalf("seed %d: %s\n%s", seed, bad, strings.Join(w.log[:min(len(w.log), 120)], "\n"))
				}
			}
			if c.fail > 0 {
				t.Logf("%d loads failed", failed)
			}
		})
	}
}
