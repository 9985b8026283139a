package node

import (
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/internal/peer"
	"github.com/terrace-kv/terrace/internal/rma"
	"github.com/terrace-kv/terrace/internal/rma/fakerma"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/memtier"
)

// withPeers lets a node speak to others, on a loopback port of its own.
func withPeers(name string) func(*Options) { return withFabric(name, nil) }

// fabrics are what else tests run over: networks, which open a fabric for each node.
var fabrics = map[string]func(t *testing.T) func() rma.Fabric{"fake": fakeNetwork}

// withFabric lets blocks go over a fabric as well, if it is not nil.
func withFabric(name string, fabric rma.Fabric) func(*Options) {
	return func(o *Options) {
		o.Peers = &PeerOptions{Machine: peer.Options{Node: name, Advertise: "127.0.0.1:0", QuotaBytes: 1 << 30}, Mode: "tcp",
			Open: func(sink peer.Sink, no peer.NetOptions) (peer.Transport, string, error) {
				no.Listen, no.Fabric = "127.0.0.1:0", fabric
				n, err := peer.OpenNet(no, sink)
				if err != nil {
					return nil, "", err
				}
				return n, n.Addr(), nil
			}}
	}
}

// overWires runs a test with peers over TCP, and over fabrics.
func overWires(t *testing.T, test func(t *testing.T, with func(name string) func(*Options))) {
	t.Run("tcp", func(t *testing.T) { test(t, withPeers) })
	for name, network := range fabrics {
		t.Run(name, func(t *testing.T) {
			open := network(t)
			test(t, func(node string) func(*Options) { return withFabric(node, open()) })
		})
	}
}

func fakeNetwork(t *testing.T) func() rma.Fabric {
	network := fakerma.New()
	var opened []*fakerma.Fabric
	t.Cleanup(func() { // after the nodes are closed
		for _, f := range opened {
			if peers, gets, closed := f.Left(); peers != 0 || gets != 0 || !closed {
				t.Errorf("%d peers and %d gets are left, fabric closed %v", peers, gets, closed)
			}
		}
	})
	return func() rma.Fabric {
		f := network.Open("fake")
		f.Plan = func(uint64, int) fakerma.Fault { return fakerma.Fault{Twice: true, Refuse: 1} }
		opened = append(opened, f)
		return f
	}
}

// from are the parameters of a request that loads from another node.
func from(n *Node, role core.PeerRole, id string) core.Params {
	p := core.NoLimits()
	host, port, _ := net.SplitHostPort(n.Status().Peers.Advertise)
	p.Peer, p.PeerHost, p.PeerRequestID = role, host, id
	p.PeerPort, _ = strconv.Atoi(port)
	return p
}

func (e *eng) requestWith(id string, p core.Params) {
	e.t.Helper()
	if err := e.s.NewRequest(id, p); err != nil {
		e.t.Fatal(err)
	}
}

// quiet waits until nothing of peers is left, and checks the node.
func quiet(t testing.TB, nodes ...*Node) {
	t.Helper()
	for _, n := range nodes {
		until := time.Now().Add(20 * time.Second)
		for {
			p, x := n.Status().Peers, n.Status().Tables
			left := p.Sources + p.Rounds + p.Serves + p.Parked + p.Aborts + p.Quarantined + p.Supplies + p.Handovers + x.Jobs + x.Quarantined + x.Pins
			if left == 0 && p.PinnedBytes == 0 {
				break
			}
			if time.Now().After(until) {
				t.Fatalf("%s is not quiet: %+v %+v", p.NodeID, p, x)
			}
			time.Sleep(time.Millisecond)
		}
		idle(t, n)
	}
}

func TestPull(t *testing.T) { overWires(t, testPull) }

func testPull(t *testing.T, with func(name string) func(*Options)) {
	below := memtier.NewIndexed(memtier.Options{})
	a, b := openNode(t, 128, []tier.Tier{below}, with("a")), openNode(t, 128, nil, with("b"))
	ns := space1(t, "m")
	ea, eb := greet(t, a, ns), greet(t, b, ns)
	ea.request("s")
	ea.store("s", keys(0, 100), true)
	ea.flush("s")
	ea.finish("s")
	ea.request("more") // pushes some of them out of the primary
	ea.store("more", keys(1000, 1060), true)
	ea.flush("more")
	ea.finish("more")
	eb.requestWith("r", from(a, core.PeerProbe, "kv1"))
	if got := eb.load("r", keys(0, 100)); got != 100 {
		t.Fatalf("pulled %d of 100 blocks", got)
	}
	eb.finish("r")
	quiet(t, a, b)
	// What was pulled is there for everybody.
	eb.request("again")
	if got := eb.load("again", keys(0, 100)); got != 100 {
		t.Fatalf("%d of 100 blocks stayed", got)
	}
	eb.finish("again")
	// And back, on the same session: a request of a node may go to one that pulls from it.
	eb.request("own")
	eb.store("own", keys(5000, 5020), true)
	eb.finish("own")
	ea.requestWith("r", from(b, core.PeerProbe, "kv2"))
	if got := ea.load("r", keys(5000, 5020)); got != 20 {
		t.Fatalf("pulled %d of 20 blocks", got)
	}
	ea.finish("r")
	quiet(t, a, b)
	sa, sb := a.Status(), b.Status()
	if sa.Peers.Sessions != 1 || sb.Peers.Sessions != 1 || len(sb.Peers.Peers) != 1 {
		t.Errorf("%d and %d sessions, want one", sa.Peers.Sessions, sb.Peers.Sessions)
	}
	if p := sb.Peers; p.BlocksIn != 100 || p.BytesIn != 100*blockBytes || p.BlocksOut != 20 || p.Peers[0].BlocksIn != 100 || p.Peers[0].NodeID != "a" {
		t.Errorf("%+v", p)
	}
	_, wire, _ := strings.Cut(t.Name(), "/")
	if p := sb.Peers; p.Peers[0].Wire != wire || sa.Peers.Peers[0].Wire != wire ||
		(sa.Peers.Gets == 20) != (wire != "tcp") || p.Offers != sa.Peers.Gets || p.Gets != sa.Peers.Offers || p.GetsPosted != 0 || p.GetsFailed != 0 {
		t.Errorf("blocks went over %s, and that is told as %+v", wire, p)
	}
	if x := sb.Tiers[0]; x.Name != PeersTier || x.Hits != 100 {
		t.Errorf("%+v", x)
	}
	if x := sa.Tiers[0]; x.ReadBytes == 0 || x.Hits != 0 || sa.Peers.BlocksOut != 100 {
		t.Errorf("nothing was promoted for a peer, or counted as for an engine: %+v", x)
	}
	if n, m := b.set.Tier(0).Read.Count(), a.set.Tier(1).Read.Count(); n == 0 || m != 1 || b.set.Tier(0).Read.Quantile(1) > time.Minute {
		t.Errorf("%d and %d loads from peers were timed, want some, and one", n, m)
	}
	count := func(s Status) (keys int64) {
		for _, n := range s.Lookups.Verdicts {
			keys += n
		}
		return keys
	}
	if la, lb := count(sa), count(sb); la != 20 || lb != 200 {
		t.Errorf("%d and %d keys in lookups, want those of engines: 20 and 200", la, lb)
	}
}

func TestHandover(t *testing.T) { overWires(t, testHandover) }

func testHandover(t *testing.T, with func(name string) func(*Options)) {
	a, b := openNode(t, 128, nil, with("a")), openNode(t, 128, nil, with("b"))
	ns := space1(t, "m")
	prefill, decode := greet(t, a, ns), greet(t, b, ns)
	for _, order := range []string{"fetch first", "store first", "interleaved"} {
		t.Run(order, func(t *testing.T) {
			id, base := "kv-"+order, map[string]int{"fetch first": 0, "store first": 100, "interleaved": 200}[order]
			ks := keys(base, base+40)
			p := core.NoLimits()
			p.RemoteDecoder, p.KVRequestID = true, id
			store := func() {
				prefill.requestWith("p", p)
				for i := 3; i >= 0; i-- {
					prefill.storeAt("p", i*10, ks[i*10:i*10+10])
				}
				prefill.finish("p")
			}
			if order == "store first" {
				store()
			}
			decode.requestWith("d", from(a, core.PeerAssume, id))
			got := make(chan *core.Answer, 1)
			out := &core.Answer{}
			pending, err := decode.s.Lookup("d", [][]block.Key{ks}, false, 20*time.Second, out, func(a *core.Answer) { got <- a })
			if err != nil {
				t.Fatal(err)
			}
			if order != "store first" {
				store()
			}
			if pending {
				out = <-got
			}
			if !out.Final || out.Tokens != 40*16 {
				t.Fatalf("%d tokens, final %v, verdicts %v", out.Tokens, out.Final, out.Groups[0].Verdicts)
			}
			if n := decode.load("d", ks); n != 40 {
				t.Fatalf("%d blocks", n)
			}
			decode.finish("d")
			quiet(t, a, b) // the hand-over was fetched, so it is over long before its bound
		})
	}
}

// A request says what is wrong with the peer that it names, and leaves nothing.
func TestPeerParams(t *testing.T) {
	alone, a := openNode(t, 64, nil, nil), openNode(t, 64, nil, withPeers("a"))
	ns := space1(t, "m")
	ealone, ea := greet(t, alone, ns), greet(t, a, ns)
	good := from(a, core.PeerProbe, "kv")
	good.PeerHost = "127.0.0.2"
	for i, x := range []struct {
		e     *eng
		mod   func(p *core.Params)
		field string
	}{
		{ealone, func(*core.Params) {}, "remote_kv_source names a peer, but this node has none: set peers.listen"},
		{ealone, func(p *core.Params) { p.Peer = core.PeerAssume }, "remote_prefiller"},
		{ealone, func(p *core.Params) { *p = core.Params{RemoteDecoder: true, KVRequestID: "x"} }, "remote_decoder"},
		{ea, func(p *core.Params) { p.PeerHost = "" }, "remote_kv_source.remote_host"},
		{ea, func(p *core.Params) { p.PeerHost = "a/b" }, "remote_kv_source.remote_host"},
		{ea, func(p *core.Params) { p.PeerPort = 0 }, "remote_kv_source.remote_port"},
		{ea, func(p *core.Params) { p.PeerPort = 1 << 16 }, "remote_kv_source.remote_port"},
		{ea, func(p *core.Params) { p.PeerRequestID = "" }, "remote_kv_source.kv_request_id"},
		{ea, func(p *core.Params) { p.PeerRequestID = strings.Repeat("x", 257) }, "remote_kv_source.kv_request_id"},
		{ea, func(p *core.Params) { p.RemoteDecoder, p.KVRequestID = true, strings.Repeat("x", 257) }, "remote_decoder.kv_request_id"},
		{ea, func(p *core.Params) { p.RemoteDecoder, p.KVRequestID, p.Peer = true, "x", core.PeerAssume }, "remote_prefiller and remote_decoder cannot be combined"},
		{ea, func(p *core.Params) { p.PeerHost = "127.0.0.1" }, "this node's own"},
	} {
		p := good
		x.mod(&p)
		err := x.e.s.NewRequest(fmt.Sprint("r", i), p)
		if !errors.Is(err, core.ErrInvalid) || !strings.Contains(err.Error(), x.field) {
			t.Errorf("%d: %v, want ErrInvalid that names %q", i, err, x.field)
		}
	}
	quiet(t, a)
	for _, host := range []string{"127.0.0.2", "::1", "[::1]", "some.name"} {
		good.PeerHost = host
		ea.requestWith(host, good)
	}
	if n := a.Status().Peers.Sources; n != 4 {
		t.Errorf("%d sources", n)
	}
	for _, host := range []string{"127.0.0.2", "::1", "[::1]", "some.name"} {
		ea.finish(host)
	}
	quiet(t, a)
}

// A peer that is not there costs a lookup what its bound says, and the next
// request nothing.
func TestPeerAway(t *testing.T) { overWires(t, testPeerAway) }

func testPeerAway(t *testing.T, with func(name string) func(*Options)) {
	a, b := openNode(t, 64, nil, with("a")), openNode(t, 64, nil, func(o *Options) {
		with("b")(o)
		o.Peers.Machine.DownBase, o.Peers.Machine.DownMax = time.Minute, time.Minute
	})
	ns := space1(t, "m")
	eb := greet(t, b, ns)
	p := from(a, core.PeerProbe, "kv")
	_ = a.Close(t.Context())
	eb.requestWith("r", p)
	if got := eb.load("r", keys(0, 10)); got != 0 {
		t.Fatalf("%d blocks of nobody", got)
	}
	eb.finish("r")
	p.Peer = core.PeerAssume
	eb.requestWith("q", p)
	if got := eb.load("q", keys(0, 10)); got != 0 {
		t.Fatalf("%d blocks of nobody", got)
	}
	eb.finish("q")
	quiet(t, b)
	if s := b.Status().Peers; s.FastFails == 0 || s.Peers[0].State != "down" || s.LastError == "" {
		t.Errorf("%+v", s)
	}
	if n := b.set.Tier(0).Read.Count(); n != 0 {
		t.Errorf("%d loads were timed, and none was tried", n)
	}
}

// TestPeerViolations: whoever breaks the protocol is counted and named, whether
// the machine or the transport sees it, and in a session or before.
func TestPeerViolations(t *testing.T) {
	n := openNode(t, 8, nil, withPeers("a"))
	count := func(want int64, text string) {
		t.Helper()
		for until := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
			if s := n.Status().Peers; s.Violations == want && strings.Contains(s.LastError, text) {
				return
			} else if time.Now().After(until) {
				t.Fatalf("%d violations, %q; want %d, %s", s.Violations, s.LastError, want, text)
			}
		}
	}
	c, err := net.Dial("tcp", n.Status().Peers.Advertise)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("GET / HTTP/1.1\r\n\r\n")); err != nil {
		t.Fatal(err)
	}
	count(1, "127.0.0.1: a connection was refused: frame.length")
	n.peers.Connected(1<<40, "127.0.0.1:1", false)
	n.peers.Received(1<<40, &peer.Hello{Version: peer.Version, Node: "b", Boot: "x", Advertise: "127.0.0.1:1", Window: 1})
	n.peers.Lost(1<<40, fmt.Errorf("data connection: %w", &peer.ProtocolError{Code: peer.CodeProtocol, Field: "data.magic", Text: "odd"}))
	count(2, "b at 127.0.0.1:1: broke the protocol: data.magic: odd")
	idle(t, n)
}

// A get that is not over keeps its slot, and nothing else, whoever has given up
// on it; one whose state is unknown, or that is not released, does too.
func TestPeerGetHangs(t *testing.T) {
	boom := errors.New("boom")
	for _, name := range []string{"late", "state unknown", "not released"} {
		t.Run(name, func(t *testing.T) {
			network, over := fakerma.New(), make(chan struct{})
			fa, fb := network.Open("fake"), network.Open("fake")
			var hang atomic.Bool
			fb.Plan = func(uint64, int) fakerma.Fault {
				if !hang.Swap(false) {
					return fakerma.Fault{}
				}
				return map[string]fakerma.Fault{"late": {Hold: over}, "state unknown": {Hold: over, Lost: boom}, "not released": {Stuck: over}}[name]
			}
			a := openNode(t, 64, nil, withFabric("a", fa))
			b := openNode(t, 64, nil, func(o *Options) {
				withFabric("b", fb)(o)
				o.Peers.LoadTimeout, o.Peers.Machine.AbortTimeout = 300*time.Millisecond, time.Minute
			})
			ns := space1(t, "m")
			ea, eb := greet(t, a, ns), greet(t, b, ns)
			ea.request("s")
			ea.store("s", keys(0, 2), true)
			ea.finish("s")
			eb.requestWith("first", from(a, core.PeerProbe, "kv0"))
			if got := eb.load("first", keys(1, 2)); got != 1 {
				t.Fatal("nothing comes")
			}
			eb.finish("first")
			quiet(t, a, b)
			for _, n := range []*Node{a, b} { // the first block may have come before
				for until := time.Now().Add(10 * time.Second); n.Status().Peers.Peers[0].Wire != "fake"; time.Sleep(time.Millisecond) {
					if time.Now().After(until) {
						t.Fatal("the fabric is of no use")
					}
				}
			}
			hang.Store(true)
			eb.requestWith("r", from(a, core.PeerProbe, "kv"))
			if got := eb.load("r", keys(0, 1)); got != 0 {
				t.Fatalf("%d blocks of a get that hangs", got)
			}
			eb.finish("r")
			sa, sb := a.Status(), b.Status()
			if sb.Tables.Quarantined != 1 || sb.Peers.GetsPosted != 1 || sa.Tables.Pins != 1 {
				t.Errorf("%d slots in quarantine, %d gets, %d pins at the other node; want one of each", sb.Tables.Quarantined, sb.Peers.GetsPosted, sa.Tables.Pins)
			}
			close(over)
			quiet(t, a, b)
			eb.requestWith("q", from(a, core.PeerProbe, "kv"))
			if got := eb.load("q", keys(0, 1)); got != 1 {
				t.Errorf("%d blocks after that, want 1", got)
			}
			eb.finish("q")
			quiet(t, a, b)
		})
	}
}

// Many sessions that come and go, or one peer that is told of all the time, leave
// room in the log for what is wrong with others.
func TestNoteBudget(t *testing.T) {
	var b noteBudget
	now := time.Unix(1, 0)
	took := func(n int, peers int, bad bool) (lines int) {
		for i := range n {
			if b.take(now, &peer.Note{Peer: fmt.Sprint("p", i%peers), Bad: bad}) {
				lines++
			}
		}
		return lines
	}
	for i, x := range []struct {
		n, peers int
		bad      bool
		want     int
	}{{20, 1, false, 5}, {100, 100, false, 45}, {20, 1, true, 5}, {100, 100, true, 45}} {
		if got := took(x.n, x.peers, x.bad); got != x.want {
			t.Errorf("%d: %d lines of %d, want %d", i, got, x.n, x.want)
		}
	}
	if b.held != 140 {
		t.Errorf("%d are left out", b.held)
	}
	if now = now.Add(11 * time.Second); took(1, 1, true) != 1 {
		t.Error("nothing is told after a while")
	}
}
