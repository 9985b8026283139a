package peer

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	mrand "math/rand/v2"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/minio/crc64nvme"
	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/content"
	"github.com/terrace-kv/terrace/internal/rma/fakerma"
	"go.uber.org/goleak"
)

// netEvent is one call of the sink.
type netEvent struct {
	what  string // its name, or "Refused"
	conn  ConnID
	addr  string
	err   error
	msg   Message
	block blockID
	serve ServeID
	ok    bool
	sum   uint64
}

func (e netEvent) String() string {
	return fmt.Sprintf("%s conn %d %q %v %T block %v serve %d ok %v", e.what, e.conn, e.addr, e.err, e.msg, e.block, e.serve, e.ok)
}

const netStride = 64 << 10

// netEnd is a Net with a sink that greets as the machine does, notes what it
// hears, and checks what Sink promises of the order.
type netEnd struct {
	*Net
	t     *testing.T
	mem   []byte
	taken func(slot uint64) // called when the memory of a slot is asked for; may block

	mu     sync.Mutex
	cond   *sync.Cond
	events []netEvent
	open   map[ConnID]bool // Connected, and not Lost
	quiet  map[blockID]bool
	up     map[ConnID]bool
	conns  int // data connections that it dials
	mute   bool
	on     func(netEvent) // instead of noting it; called with mu held
}

func newNetEnd(t *testing.T, o NetOptions, slots int) *netEnd {
	t.Helper()
	e := &netEnd{t: t, mem: make([]byte, slots*netStride), open: map[ConnID]bool{}, up: map[ConnID]bool{}, quiet: map[blockID]bool{}, conns: 2}
	e.cond = sync.NewCond(&e.mu)
	o.Memory = func(slot uint64, n int) []byte {
		if e.taken != nil {
			e.taken(slot)
		}
		return e.slot(slot)[:n]
	}
	o.Refused = func(addr string, err error) { e.note(netEvent{what: "Refused", addr: addr, err: err}) }
	o.Trouble = func(addr string, err error) { e.note(netEvent{what: "Trouble", addr: addr, err: err}) }
	o.Region, o.Offset = e.mem, func(slot uint64) uint64 { return slot * netStride }
	var err error
	e.mu.Lock() // until Net is set
	e.Net, err = OpenNet(o, e)
	e.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := e.Close(ctx); err != nil {
			t.Error(err)
		}
		if s := e.Stats(); s.Goroutines != 0 || s.Sessions != 0 || s.Greeting != 0 || s.Posted != 0 {
			t.Errorf("after Close: %+v", s)
		}
		if f, ok := o.Fabric.(*fakerma.Fabric); ok {
			if peers, gets, closed := f.Left(); peers != 0 || gets != 0 || !closed {
				t.Errorf("after Close: %d peers and %d gets are left, fabric closed %v", peers, gets, closed)
			}
		}
		e.mu.Lock()
		defer e.mu.Unlock()
		if len(e.open) > 0 {
			t.Errorf("never lost: %v", e.open)
		}
	})
	return e
}

func listening() NetOptions { return NetOptions{Listen: "127.0.0.1:0"} }

// netWires are the ways that blocks go between two ends.
var netWires = []string{"tcp", "tls", "gets", "gets and tls"}

// wired are two ends on a wire.
func wired(t *testing.T, wire string, slots int) (a, b *netEnd) {
	t.Helper()
	o := listening()
	if strings.HasSuffix(wire, "tls") {
		o.TLS = newTestCA(t).config(t, "127.0.0.1")
	}
	p := o
	if strings.HasPrefix(wire, "gets") {
		n := fakerma.New()
		f := n.Open("fake")
		f.Busy = 2
		o.Fabric, p.Fabric = f, n.Open("fake")
	}
	return newNetEnd(t, o, slots), newNetEnd(t, p, slots)
}

// overFabric checks that most of n blocks went over the fabric, if there is one.
func (e *netEnd) overFabric(n int) {
	e.t.Helper()
	s := e.Stats()
	if want := e.o.Fabric != nil; want != (int(s.Gets) > n/2) || !want && s.Offers > 0 {
		e.t.Errorf("of %d blocks %d went over the fabric: %+v", n, s.Gets, s)
	}
}

// leaks checks at the end of the test, after what it opens, that no goroutine
// is left.
func leaks(t *testing.T) {
	before := goleak.IgnoreCurrent()
	t.Cleanup(func() { goleak.VerifyNone(t, before) })
}

func (e *netEnd) slot(i uint64) []byte { return e.mem[i*netStride : (i+1)*netStride] }

func (e *netEnd) note(ev netEvent) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.noteLocked(ev)
}

func (e *netEnd) noteLocked(ev netEvent) {
	if e.on != nil {
		e.on(ev)
	} else {
		e.events = append(e.events, ev)
	}
	e.cond.Broadcast()
}

// of notes an event of a connection, which must be open.
func (e *netEnd) of(ev netEvent) {
	if !e.open[ev.conn] {
		e.t.Errorf("not of an open connection: %v", ev)
	}
	e.noteLocked(ev)
}

func (e *netEnd) Connected(conn ConnID, addr string, dialed bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.open[conn] {
		e.t.Errorf("connection %d again", conn)
	}
	e.open[conn] = true
	e.of(netEvent{what: "Connected", conn: conn, addr: addr, ok: dialed})
	if dialed && !e.mute {
		e.Do(Send{Conn: conn, Msg: &Hello{Version: Version, Node: "n", Boot: "b", Token: testToken(conn), Window: uint32(e.conns)}})
	}
}

func (e *netEnd) DialFailed(addr string, err error) {
	e.note(netEvent{what: "DialFailed", addr: addr, err: err})
}

func (e *netEnd) Received(conn ConnID, msg Message) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.of(netEvent{what: "Received", conn: conn, msg: msg})
	switch m := msg.(type) {
	case *Hello:
		e.Do(Send{Conn: conn, Msg: &Welcome{Version: Version, Node: "n", Boot: "b"}})
		e.Do(Expect{Conn: conn, N: int(m.Window), Token: m.Token})
		e.up[conn] = true
	case *Welcome:
		e.Do(DialData{Conn: conn, N: e.conns, Token: testToken(conn)})
		e.up[conn] = true
	case *Ping:
		e.Do(Send{Conn: conn, Msg: &Pong{N: m.N}})
	}
}

func (e *netEnd) Lost(conn ConnID, why error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.of(netEvent{what: "Lost", conn: conn, err: why})
	delete(e.open, conn)
	if why == nil {
		e.t.Error("lost without a reason")
	}
	// Nothing may touch a slot any more: under the race detector this shows who does.
	if len(e.open) == 0 {
		copy(e.mem, slices.Clone(e.mem))
	}
}

func (e *netEnd) Arrived(conn ConnID, nonce uint64, round, index uint32, ok bool, sum uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.of(netEvent{what: "Arrived", conn: conn, block: blockID{nonce, round, index}, ok: ok, sum: sum})
}

func (e *netEnd) Detached(conn ConnID, nonce uint64, round, index uint32) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.of(netEvent{what: "Detached", conn: conn, block: blockID{nonce, round, index}})
}

func (e *netEnd) Sent(serve ServeID, index uint32, ok bool) {
	e.note(netEvent{what: "Sent", serve: serve, block: blockID{index: index}, ok: ok})
}

// wait takes the first event of a name, from all that came or will come within
// ten seconds.
func (e *netEnd) wait(what string) netEvent {
	e.t.Helper()
	return e.waitFor(what, func(netEvent) bool { return true })
}

func (e *netEnd) waitFor(what string, is func(netEvent) bool) netEvent {
	e.t.Helper()
	late := time.AfterFunc(10*time.Second, func() { e.mu.Lock(); defer e.mu.Unlock(); e.cond.Broadcast() })
	defer late.Stop()
	begin := time.Now()
	e.mu.Lock()
	defer e.mu.Unlock()
	for {
		for i, ev := range e.events {
			if ev.what == what && is(ev) {
				e.events = slices.Delete(e.events, i, i+1)
				return ev
			}
		}
		if time.Since(begin) > 9*time.Second {
			e.t.Fatalf("no %s; there are %v", what, e.events)
		}
		e.cond.Wait()
	}
}

// until waits for a condition that events bring about.
func (e *netEnd) until(what string, is func() bool) {
	e.t.Helper()
	late := time.AfterFunc(20*time.Second, func() { e.mu.Lock(); defer e.mu.Unlock(); e.cond.Broadcast() })
	defer late.Stop()
	begin := time.Now()
	e.mu.Lock()
	defer e.mu.Unlock()
	for !is() {
		if time.Since(begin) > 19*time.Second {
			e.t.Fatalf("not %s", what)
		}
		e.cond.Wait()
	}
}

// none checks that there is no event of a name.
func (e *netEnd) none(what string) {
	e.t.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, ev := range e.events {
		if ev.what == what {
			e.t.Errorf("unexpected %v", ev)
		}
	}
}

func testToken(conn ConnID) (t [tokenBytes]byte) {
	copy(t[:], "token of a test")
	t[15] = byte(conn)
	return t
}

// join connects a to b and waits until both are up.
func join(t *testing.T, a, b *netEnd) (ca, cb ConnID) {
	t.Helper()
	a.Do(Dial{b.Addr()})
	ca = a.waitFor("Received", func(e netEvent) bool { _, ok := e.msg.(*Welcome); return ok }).conn
	a.wait("Connected")
	cb = b.waitFor("Received", func(e netEvent) bool { _, ok := e.msg.(*Hello); return ok }).conn
	b.wait("Connected")
	return ca, cb
}

// stale is what a slot has before it is granted again.
var stale = bytes.Repeat([]byte{0xcc}, netStride)

var netFP = block.Fingerprint{1, 2, 3}

func netKey(i uint32) block.Key { return wireKey(byte(i), i) }

func netSum(i uint32, n int) uint64 {
	b := make([]byte, n)
	content.Fill(netFP, netKey(i), b)
	return crc64nvme.Checksum(b)
}

// TestNetBothWays moves blocks both ways at once, through few slots, and checks
// each.
func TestNetBothWays(t *testing.T) {
	for _, wire := range netWires {
		t.Run(wire, func(t *testing.T) {
			leaks(t)
			const slots, total = 16, 700
			a, b := wired(t, wire, 2*slots)
			ca, cb := join(t, a, b)
			sizes := []int{1, 4096, 4095, 100, 5000, 8192, 64, 12288, 20000, 65536}
			// Each end is a consumer in its lower slots and a producer in its upper ones.
			type side struct {
				e        *netEnd
				conn     ConnID
				peer     *side
				granted  uint32
				arrived  int
				sent     int
				inFlight map[blockID]uint64
			}
			x, y := &side{e: a, conn: ca}, &side{e: b, conn: cb}
			x.peer, y.peer = y, x
			length := func(i uint32) int { return sizes[i%uint32(len(sizes))] }
			id := func(i uint32) blockID { return blockID{uint64(i / 100), i / 10, i % KeysMax} }
			var sums [slots][10]uint64
			for i := range uint64(slots) {
				for _, e := range []*netEnd{a, b} {
					content.Fill(netFP, netKey(uint32(i)), e.slot(slots+i))
				}
				for j, n := range sizes {
					sums[i][j] = netSum(uint32(i), n)
				}
			}
			// pull grants the next block into a slot, and has the other side send it. It
			// is called under s.e.mu; Do of the peer needs no lock of the peer's.
			pull := func(s *side, slot uint64) {
				i := s.granted
				s.granted++
				k := id(i)
				s.inFlight[k] = slot
				copy(s.e.slot(slot), stale)
				s.e.Do(Grant{Conn: s.conn, Nonce: k.nonce, Round: k.round, Index: k.index, Slot: slot, Length: length(i)})
				from := uint64(slots) + slot
				s.peer.e.Do(Transmit{Conn: s.peer.conn, ID: ServeID(1 + i%5), Blocks: []DataBlock{{
					Head:  DataHead{Nonce: k.nonce, Round: k.round, Index: k.index, Length: uint64(length(i)), Sum: sums[slot][int(i)%len(sizes)]},
					Lease: Lease{Slot: from}}}})
			}
			for _, s := range []*side{x, y} {
				s.inFlight = map[blockID]uint64{}
				s.e.mu.Lock()
				s.e.on = func(ev netEvent) {
					switch ev.what {
					case "Sent":
						if !ev.ok {
							t.Errorf("not sent: %v", ev)
						}
						s.sent++
					case "Arrived":
						slot, ok := s.inFlight[ev.block]
						if !ok || !ev.ok {
							t.Errorf("unexpected: %v", ev)
							return
						}
						delete(s.inFlight, ev.block)
						i := ev.block.round*10 + ev.block.index%10
						n := length(i)
						got := s.e.slot(slot)
						if at := content.Check(netFP, netKey(uint32(slot)), got[:n]); at >= 0 || ev.sum != crc64nvme.Checksum(got[:n]) {
							t.Errorf("block %d: wrong at %d", i, at)
						}
						page := (n + pageBytes - 1) &^ (pageBytes - 1)
						if !bytes.Equal(got[n:page], make([]byte, page-n)) || !bytes.Equal(got[page:], stale[page:]) {
							t.Errorf("block %d of %d bytes: what follows is not zero to the page, and untouched after it", i, n)
						}
						if s.arrived++; s.granted < total {
							pull(s, slot)
						}
					default:
						t.Errorf("unexpected: %v", ev)
					}
				}
				s.e.mu.Unlock()
			}
			for _, s := range []*side{x, y} {
				s.e.mu.Lock()
				for slot := range uint64(slots) {
					pull(s, slot)
				}
				s.e.mu.Unlock()
			}
			for _, s := range []*side{x, y} {
				s.e.until("all there", func() bool { return s.arrived == total && s.sent == total })
				if st := s.e.Stats(); st.BlocksIn != total || st.BlocksOut != total || st.StrayIn+st.BadSums+st.Violations+st.Detaches != 0 || st.BytesIn != st.BytesOut {
					t.Errorf("%+v", st)
				}
				s.e.overFabric(total)
				s.e.mu.Lock()
				s.e.on = nil
				s.e.mu.Unlock()
			}
			a.Do(CloseConn{Conn: ca, Text: "done"})
			a.wait("Lost")
			b.wait("Lost")
		})
	}
}

// testPeer speaks the protocol by hand with a Net that it has dialed.
type testPeer struct {
	t    *testing.T
	addr string
	cfg  *tls.Config
	net.Conn
	in *frameReader
}

func (p *testPeer) dial() net.Conn {
	p.t.Helper()
	c, err := net.Dial("tcp", p.addr)
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(15 * time.Second))
	if p.cfg != nil {
		return tls.Client(c, p.cfg)
	}
	return c
}

// newTestPeer opens a session with e, with data connections of its own.
func newTestPeer(t *testing.T, e *netEnd, cfg *tls.Config, conns int) (p *testPeer, conn ConnID, data []net.Conn) {
	t.Helper()
	p = &testPeer{t: t, addr: e.Addr(), cfg: cfg}
	p.Conn = p.dial()
	p.in = newFrameReader(p.Conn)
	token := [tokenBytes]byte{byte(mrand.Uint32()), byte(mrand.Uint32()), byte(mrand.Uint32()), byte(mrand.Uint32())}
	p.say(&Hello{Version: Version, Node: "p", Boot: "b", Token: token, Window: uint32(max(1, conns))})
	if _, ok := p.hear().(*Welcome); !ok {
		t.Fatal("no welcome")
	}
	conn = e.waitFor("Received", func(e netEvent) bool { h, ok := e.msg.(*Hello); return ok && h.Token == token }).conn
	e.waitFor("Connected", func(e netEvent) bool { return e.conn == conn })
	for range conns {
		d := p.dial()
		p.write(d, appendTokenHead(nil, token))
		data = append(data, d)
	}
	return p, conn, data
}

func (p *testPeer) write(c net.Conn, b []byte) {
	p.t.Helper()
	if _, err := c.Write(b); err != nil {
		p.t.Fatal(err)
	}
}

func (p *testPeer) say(m Message) {
	p.t.Helper()
	p.write(p.Conn, appendFrame(nil, m))
}

func (p *testPeer) hear() Message {
	p.t.Helper()
	m, err := p.in.next()
	if err != nil {
		p.t.Fatal(err)
	}
	return m
}

// bye reads until the other side's last word and the end.
func (p *testPeer) bye() *Bye {
	p.t.Helper()
	for {
		if b, ok := p.hear().(*Bye); ok {
			if _, err := p.in.next(); err == nil {
				p.t.Error("something follows a Bye")
			}
			return b
		}
	}
}

// frame is a block as it goes over a data connection.
func frame(k blockID, i uint32, n int) []byte {
	b := make([]byte, dataHeadBytes+n)
	content.Fill(netFP, netKey(i), b[dataHeadBytes:])
	h := DataHead{Nonce: k.nonce, Round: k.round, Index: k.index, Length: uint64(n), Sum: crc64nvme.Checksum(b[dataHeadBytes:])}
	h.put(b[:dataHeadBytes])
	return b
}

// TestNetRevoke takes slots back in each state of a grant. One of them is in
// the middle of a payload whose sender has stopped.
func TestNetRevoke(t *testing.T) {
	for _, secure := range []bool{false, true} {
		t.Run(fmt.Sprintf("tls=%v", secure), func(t *testing.T) {
			leaks(t)
			o := listening()
			var cfg *tls.Config
			if secure {
				cfg = newTestCA(t).config(t, "127.0.0.1")
				cfg.ServerName = "127.0.0.1"
				o.TLS = cfg
			}
			e := newNetEnd(t, o, 4)
			taken := make(chan uint64, 10)
			e.taken = func(slot uint64) { taken <- slot }
			p, conn, data := newTestPeer(t, e, cfg, 1)
			const n = 60000
			grant := func(i uint32, slot uint64) {
				e.Do(Grant{Conn: conn, Nonce: 7, Round: 1, Index: i, Slot: slot, Length: n})
			}
			revoke := func(i ...uint32) { e.Do(Revoke{Conn: conn, Nonce: 7, Round: 1, Indexes: i}) }
			detached := func(i uint32) {
				t.Helper()
				if ev := e.wait("Detached"); ev.block != (blockID{7, 1, i}) || ev.conn != conn {
					t.Fatalf("%v, want block %d", ev, i)
				}
			}
			grant(0, 0)
			revoke(0, 9) // granted, and never granted
			detached(0)
			detached(9)

			grant(1, 1)
			f := frame(blockID{7, 1, 1}, 1, n)
			p.write(data[0], f[:n/2])
			if slot := <-taken; slot != 1 {
				t.Fatal(slot)
			}
			begin := time.Now()
			revoke(1)
			detached(1)
			if d := time.Since(begin); d > 2*time.Second {
				t.Errorf("detached after %v", d)
			}
			copy(e.slot(1), stale) // somebody else's now
			p.write(data[0], f[n/2:])
			p.write(data[0], frame(blockID{7, 1, 0}, 0, n)) // late: revoked before
			grant(2, 2)
			p.write(data[0], frame(blockID{7, 1, 2}, 2, n))
			if ev := e.wait("Arrived"); ev.block.index != 2 || !ev.ok {
				t.Fatal(ev)
			}
			if !bytes.Equal(e.slot(1), stale) {
				t.Error("the slot was written after Detached")
			}
			if at := content.Check(netFP, netKey(2), e.slot(2)[:n]); at >= 0 {
				t.Errorf("block 2 is wrong at %d: the stream was not followed", at)
			}
			revoke(2) // has arrived
			detached(2)
			p.say(&Ping{N: 1})
			if _, ok := p.hear().(*Pong); !ok {
				t.Error("no pong")
			}
			e.none("Detached")
			if s := e.Stats(); s.BlocksIn != 1 || s.Detaches != 1 || s.StrayIn != 2 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// TestNetArrivedThenDetached: a revoke while the sink is being told comes after.
func TestNetArrivedThenDetached(t *testing.T) {
	leaks(t)
	e := newNetEnd(t, listening(), 1)
	p, conn, data := newTestPeer(t, e, nil, 1)
	var got []string
	e.mu.Lock()
	e.on = func(ev netEvent) {
		if ev.what == "Received" {
			return
		}
		if got = append(got, ev.what); ev.what == "Arrived" {
			for range 2 { // one answer is for both
				e.Do(Revoke{Conn: conn, Nonce: 1, Round: 1, Indexes: []uint32{1}})
			}
		}
	}
	e.mu.Unlock()
	e.Do(Grant{Conn: conn, Nonce: 1, Round: 1, Index: 1, Length: 100})
	p.write(data[0], frame(blockID{1, 1, 1}, 1, 100))
	p.write(data[0], frame(blockID{1, 1, 7}, 7, 100)) // a stray one, to be sure that the first is done with
	e.until("both", func() bool { return len(got) >= 2 })
	p.say(&Ping{N: 1})
	p.hear()
	if !slices.Equal(got, []string{"Arrived", "Detached"}) {
		t.Error(got)
	}
	e.mu.Lock()
	e.on = nil
	e.mu.Unlock()
}

// TestNetRevokeStorm grants and revokes at random under a sender that never
// stops. Whoever gets a slot back scribbles on it at once, so that a receiver
// that is still in it is seen by the race detector, and by the content.
func TestNetRevokeStorm(t *testing.T) {
	for _, wire := range []string{"tcp", "gets"} {
		t.Run(wire, func(t *testing.T) { netRevokeStorm(t, wire) })
	}
}

func netRevokeStorm(t *testing.T, wire string) {
	leaks(t)
	const slots, total, n = 16, 1000, 30000
	a, b := wired(t, wire, slots)
	if f, ok := b.o.Fabric.(*fakerma.Fabric); ok {
		f.Plan = func(off uint64, _ int) fakerma.Fault {
			return fakerma.Fault{Refuse: mrand.IntN(4), Twice: mrand.IntN(2) == 0}
		}
	}
	ca, cb := join(t, a, b)
	seed := mrand.Uint64()
	t.Logf("seed %d", seed)
	r := mrand.New(mrand.NewPCG(seed, 1))
	for i := range uint64(slots) {
		content.Fill(netFP, netKey(uint32(i)), a.slot(i)[:n])
	}
	var sums [slots]uint64
	for i := range sums {
		sums[i] = netSum(uint32(i), n)
	}
	var next uint32
	slotOf, revoked, ended := map[uint32]uint64{}, map[uint32]bool{}, map[uint32]string{}
	arrived, detached := 0, 0
	pull := func(slot uint64) {
		i := next
		next++
		slotOf[i] = slot
		copy(b.slot(slot), stale)
		b.Do(Grant{Conn: cb, Nonce: 1, Round: i / KeysMax, Index: i % KeysMax, Slot: slot, Length: n})
		a.Do(Transmit{Conn: ca, ID: ServeID(i%3 + 1), Blocks: []DataBlock{{Head: DataHead{Nonce: 1, Round: i / KeysMax, Index: i % KeysMax, Length: n, Sum: sums[slot]}, Lease: Lease{Slot: slot}}}})
		if r.IntN(2) == 0 { // one of those on the way, be it this one
			j := i - uint32(r.IntN(int(min(i+1, slots))))
			if _, live := slotOf[j]; live && !revoked[j] {
				revoked[j] = true
				b.Do(Revoke{Conn: cb, Nonce: 1, Round: j / KeysMax, Indexes: []uint32{j % KeysMax}})
			}
		}
	}
	a.mu.Lock()
	a.on = func(netEvent) {}
	a.mu.Unlock()
	b.mu.Lock()
	b.on = func(ev netEvent) {
		i := ev.block.round*KeysMax + ev.block.index
		slot, live := slotOf[i]
		switch {
		case ev.what == "Arrived" && live && ev.ok && ended[i] == "":
			arrived++
			if at := content.Check(netFP, netKey(uint32(slot)), b.slot(slot)[:n]); at >= 0 {
				t.Errorf("block %d is wrong at %d", i, at)
			}
			if ended[i] = "arrived"; revoked[i] {
				return // Detached follows
			}
		case ev.what == "Detached" && live && revoked[i]:
			detached++
		default:
			t.Errorf("unexpected %v (%q)", ev, ended[i])
			return
		}
		delete(slotOf, i)
		if next < total {
			pull(slot)
		}
	}
	for i := range uint64(slots) {
		pull(i)
	}
	b.mu.Unlock()
	b.until("all over", func() bool { return next == total && len(slotOf) == 0 })
	b.mu.Lock()
	t.Logf("%d arrived, %d detached, %d of them in mid-payload", arrived, detached, b.Stats().Detaches)
	if arrived == 0 || detached == 0 || len(b.events) > 0 {
		t.Error("that was no storm")
	}
	b.on = nil
	b.mu.Unlock()
	b.overFabric(total / 2) // some were never sent
	s := b.sessions()[cb]
	b.Do(CloseConn{Conn: cb, Text: "done"})
	b.wait("Lost")
	if len(s.mu.grants) > 0 {
		t.Errorf("%d grants are left", len(s.mu.grants))
	}
}

func (e *netEnd) sessions() map[ConnID]*tcpSession {
	e.Net.mu.Lock()
	defer e.Net.mu.Unlock()
	return e.Net.mu.sessions
}

// TestNetSumsAndLengths: a block with wrong bytes arrives as such; one of wrong
// length ends the session; what nobody waits for is read and counted.
func TestNetSumsAndLengths(t *testing.T) {
	leaks(t)
	e := newNetEnd(t, listening(), 1)
	p, conn, data := newTestPeer(t, e, nil, 2)
	p.write(data[1], frame(blockID{5, 5, 5}, 5, 300_000)) // longer than a slot, so not in any
	e.Do(Grant{Conn: conn, Nonce: 1, Round: 1, Index: 1, Length: 5000})
	f := frame(blockID{1, 1, 1}, 1, 5000)
	f[dataHeadBytes+17] ^= 1
	p.write(data[1], f)
	if ev := e.wait("Arrived"); ev.ok || ev.sum != crc64nvme.Checksum(f[dataHeadBytes:]) {
		t.Error(ev)
	}
	if s := e.Stats(); s.BadSums != 1 || s.StrayIn != 1 || s.StrayBytes != 300_000 {
		t.Errorf("%+v", s)
	}
	e.Do(Grant{Conn: conn, Nonce: 1, Round: 1, Index: 2, Length: 5000})
	p.write(data[0], frame(blockID{1, 1, 2}, 2, 4999))
	if b := p.bye(); b.Code != CodeProtocol || b.Text != "data.length: 4999 bytes, the block has 5000" {
		t.Errorf("%+v", b)
	}
	if ev := e.wait("Lost"); !strings.Contains(ev.err.Error(), "data.length: 4999 bytes") {
		t.Error(ev)
	}
}

// TestNetGarbage: what is no protocol ends its connection or session with a
// reason, and nobody else's.
func TestNetGarbage(t *testing.T) {
	leaks(t)
	o := listening()
	o.GreetTimeout = 300 * time.Millisecond
	e := newNetEnd(t, o, 4)
	bystander, _, _ := newTestPeer(t, e, nil, 2)
	p := &testPeer{t: t, addr: e.Addr()}
	ping := appendFrame(nil, &Ping{N: 1})
	for _, x := range []struct {
		send []byte
		want string
	}{
		{[]byte("GET / HTTP/1.1\r\n\r\n"), "frame.length: 1195725856 bytes"},
		{[]byte{0x16, 3, 1, 0, 200, 1, 0, 0}, "speaks TLS"},
		{[]byte{0, 0, 0, 3, 0xc1, 0xc1, 0xc1}, "not an array"},
		{appendFrame(nil, &Ping{N: 1}), "first message is *peer.Ping"},
		{appendTokenHead(nil, [16]byte{9}), "no session expects"},
		{[]byte("TRPT\x00\x00\x00\x02................"), "token.version: 2"},
		{[]byte("TRPT\x00\x00"), "no greeting after 300ms"},
		{ping[:3], "no greeting after 300ms"},
		{nil, "no greeting after 300ms"},
	} {
		c := p.dial()
		p.write(c, x.send)
		if ev := e.wait("Refused"); !strings.Contains(ev.err.Error(), x.want) || ev.addr != c.LocalAddr().String() {
			t.Errorf("%q: %v, want %s", x.send, ev, x.want)
		}
		if _, err := io.Copy(io.Discard, c); err != nil && !strings.Contains(err.Error(), "reset") {
			t.Errorf("%q: %v", x.send, err)
		}
	}
	e.none("Connected") // none of them was a session

	for _, x := range []struct {
		control, data []byte
		want          string
	}{
		{control: []byte{0xff, 0xff, 0xff, 0xff}, want: "frame.length"},
		{control: appendFrame(nil, &Lookup{ID: "", Keys: nil}), want: "lookup.id"},
		{control: []byte{0, 0, 0, 2, 0x91, 0x60}, want: "frame.type"},
		{data: make([]byte, dataHeadBytes), want: "data.magic"},
		{data: append(frame(blockID{1, 1, 1}, 1, 10), frame(blockID{1, 1, 2}, 2, 10)[1:]...), want: "data.magic"},
		{data: func() []byte { b := frame(blockID{1, 1, 1}, 1, 10); b[25] = 1; return b }(), want: "data.head_sum"},
	} {
		p, conn, data := newTestPeer(t, e, nil, 2)
		p.write(p.Conn, x.control)
		p.write(data[0], x.data)
		if b := p.bye(); b.Code != CodeProtocol || !strings.Contains(b.Text, x.want) {
			t.Errorf("%+v, want %s", b, x.want)
		}
		ev := e.wait("Lost")
		var bad *ProtocolError
		if ev.conn != conn || !errors.As(ev.err, &bad) || !strings.HasPrefix(bad.Field, x.want) {
			t.Errorf("%v, want %s", ev, x.want)
		}
	}
	bystander.say(&Ping{N: 1})
	if m, ok := bystander.hear().(*Pong); !ok || m.N != 1 {
		t.Error("the bystander's session has suffered")
	}
	if v := e.Stats().Violations; v != 11 {
		t.Errorf("%d violations, want 11", v)
	}
}

// TestNetTokens: only as many data connections join as were announced, and a
// token belongs to one session.
func TestNetTokens(t *testing.T) {
	leaks(t)
	e := newNetEnd(t, listening(), 4)
	p, conn, _ := newTestPeer(t, e, nil, 2)
	token := e.sessions()[conn].token
	extra := p.dial()
	p.write(extra, appendTokenHead(nil, token))
	if ev := e.wait("Refused"); !strings.Contains(ev.err.Error(), "no session expects") {
		t.Error(ev)
	}
	thief := p.dial()
	p.write(thief, appendFrame(nil, &Hello{Version: Version, Node: "x", Boot: "x", Token: token, Window: 1}))
	if ev := e.wait("Refused"); !strings.Contains(ev.err.Error(), "another session's") {
		t.Error(ev)
	}
	// The session of another version has a token that nobody knows, and two may be open.
	for range 2 {
		old := p.dial()
		p.write(old, appendFrame(nil, &Hello{Version: 9, Node: "x", Boot: "x"}))
		e.waitFor("Received", func(ev netEvent) bool { h, ok := ev.msg.(*Hello); return ok && h.Version == 9 })
	}
	p.Close()
	e.waitFor("Lost", func(ev netEvent) bool { return ev.conn == conn })
	p.write(p.dial(), appendTokenHead(nil, token))
	if ev := e.wait("Refused"); !strings.Contains(ev.err.Error(), "no session expects") {
		t.Error(ev)
	}
}

// TestNetSilence: what was announced and does not come, or stops in the middle,
// ends the session in time; a session that has nothing to say stays.
func TestNetSilence(t *testing.T) {
	leaks(t)
	o := listening()
	o.GreetTimeout, o.ProgressTimeout = time.Second, 400*time.Millisecond
	e := newNetEnd(t, o, 4)
	_, conn, _ := newTestPeer(t, e, nil, 0)
	idle, idleConn, idleData := newTestPeer(t, e, nil, 1)
	if ev := e.wait("Lost"); ev.conn != conn || !strings.Contains(ev.err.Error(), "1 data connections did not come within 1s") {
		t.Error(ev)
	}
	for _, x := range []struct {
		name  string
		n     int
		grant bool
	}{{"in a head", 10, false}, {"in a payload", dataHeadBytes + 10, true}, {"in a payload that nobody wants", dataHeadBytes + 10, false}} {
		p, conn, data := newTestPeer(t, e, nil, 1)
		if x.grant {
			e.Do(Grant{Conn: conn, Nonce: 1, Round: 1, Index: 1, Length: 1000})
		}
		p.write(data[0], frame(blockID{1, 1, 1}, 1, 1000)[:x.n])
		if ev := e.wait("Lost"); ev.conn != conn || !errors.Is(ev.err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: %v", x.name, ev)
		}
	}
	e.Do(Grant{Conn: idleConn, Nonce: 1, Round: 1, Index: 1, Length: 1000})
	idle.write(idleData[0], frame(blockID{1, 1, 1}, 1, 1000))
	if ev := e.wait("Arrived"); !ev.ok {
		t.Error(ev)
	}
}

// TestNetGreetingsAreBounded: who says nothing cannot keep many places.
func TestNetGreetingsAreBounded(t *testing.T) {
	leaks(t)
	o := listening()
	o.GreetingMax, o.GreetTimeout, o.SessionsMax = 3, time.Minute, 1
	e := newNetEnd(t, o, 1)
	p := &testPeer{t: t, addr: e.Addr()}
	var silent []net.Conn
	for range 3 {
		silent = append(silent, p.dial())
	}
	// One more takes the place of the oldest one of the host with the most.
	other, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}).DialContext(t.Context(), "tcp", p.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	for i := range 4 {
		if ev := e.wait("Refused"); !strings.Contains(ev.err.Error(), "3 connections have not greeted") {
			t.Error(ev)
		}
		if _, err := silent[i].Read(make([]byte, 1)); err == nil {
			t.Error("one too many is not closed")
		}
		silent = append(silent, p.dial())
	}
	e.wait("Refused")
	newTestPeer(t, e, nil, 0) // who greets is served
	e.wait("Refused")
	if s := e.Stats(); s.Greeting != 2 || s.Sessions != 1 {
		t.Errorf("%+v", s)
	}
	_ = other.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if _, err := other.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("that of the other host: %v", err)
	}
	p.write(p.dial(), appendFrame(nil, &Hello{Version: Version, Node: "x", Boot: "x", Token: [16]byte{1}, Window: 1}))
	if ev := e.wait("Refused"); !strings.Contains(ev.err.Error(), "there are 1 sessions") {
		t.Error(ev)
	}
}

// TestNetSlowReader: a peer that reads no blocks, or no frames, loses its
// session and delays nobody else's.
func TestNetSlowReader(t *testing.T) {
	leaks(t)
	o := listening()
	o.ProgressTimeout, o.ControlQueueBytes = time.Second, 1<<20
	e := newNetEnd(t, o, 8)
	_, slow, _ := newTestPeer(t, e, nil, 1)
	good, conn, data := newTestPeer(t, e, nil, 1)
	var many []DataBlock
	for i := range 1000 {
		many = append(many, DataBlock{Head: DataHead{Index: uint32(i), Length: netStride}})
	}
	e.Do(Transmit{Conn: slow, ID: 1, Blocks: many})
	got := make([]byte, dataHeadBytes+netStride)
	for i := range 100 {
		e.Do(Transmit{Conn: conn, ID: 2, Blocks: many[i : i+1]})
		if _, err := io.ReadFull(data[0], got); err != nil {
			t.Fatal(err)
		}
	}
	good.say(&Ping{N: 1})
	good.hear()
	e.none("Lost")
	if ev := e.wait("Lost"); ev.conn != slow || !strings.Contains(ev.err.Error(), "data connection: write: no progress for 1s") {
		t.Error(ev)
	}

	_, deaf, _ := newTestPeer(t, e, nil, 1)
	for range 100 { // more than the kernel takes
		e.Do(Send{Conn: deaf, Msg: &Namespaces{Specs: [][]byte{make([]byte, 60000), make([]byte, 60000)}}})
	}
	if ev := e.wait("Lost"); ev.conn != deaf || !strings.Contains(ev.err.Error(), "more than 1048576 bytes are queued") {
		t.Error(ev)
	}
}

// TestNetTurns: serves of a session take turns, and what is taken back is not
// sent.
func TestNetTurns(t *testing.T) {
	leaks(t)
	e := newNetEnd(t, listening(), 1)
	gate := make(chan struct{})
	e.taken = func(uint64) { <-gate } // holds the sender at its first block
	_, conn, data := newTestPeer(t, e, nil, 1)
	blocks := func(round uint32, n int) (out []DataBlock) {
		for i := range n {
			out = append(out, DataBlock{Head: DataHead{Round: round, Index: uint32(i), Length: 100}})
		}
		return out
	}
	e.Do(Transmit{Conn: conn, ID: 1, Blocks: blocks(1, 6)})
	e.Do(Transmit{Conn: conn, ID: 2, Blocks: blocks(2, 3)})
	e.Do(Transmit{Conn: conn, ID: 3, Blocks: blocks(3, 50)})
	e.Do(Unsend{Conn: conn, ID: 3})
	e.Do(Unsend{Conn: conn, ID: 4})
	for i := range 50 {
		if ev := e.wait("Sent"); ev.serve != 3 || ev.ok || ev.block.index != uint32(i) {
			t.Fatal(ev)
		}
	}
	e.Do(Transmit{Conn: conn, ID: 1, Blocks: blocks(1, 7)[6:]})
	close(gate)
	var order []string
	b := make([]byte, dataHeadBytes+100)
	for range 10 {
		if _, err := io.ReadFull(data[0], b); err != nil {
			t.Fatal(err)
		}
		h, err := decodeDataHead(b[:dataHeadBytes])
		if err != nil {
			t.Fatal(err)
		}
		order = append(order, fmt.Sprintf("%d.%d", h.Round, h.Index))
	}
	if got := strings.Join(order, " "); got != "1.0 2.0 1.1 2.1 1.2 2.2 1.3 1.4 1.5 1.6" && got != "1.0 1.1 2.0 1.2 2.1 1.3 2.2 1.4 1.5 1.6" {
		t.Error(got)
	}
	for range 10 {
		if ev := e.wait("Sent"); !ev.ok {
			t.Error(ev)
		}
	}
}

// TestNetCloseConn: what was queued is written, the peer hears why, and each
// side loses the connection once.
func TestNetCloseConn(t *testing.T) {
	leaks(t)
	for _, wire := range netWires {
		a, b := wired(t, wire, 2)
		ca, cb := join(t, a, b)
		b.Do(Grant{Conn: cb, Nonce: 1, Round: 1, Index: 1, Length: 1000})
		for i := range 1000 {
			a.Do(Send{Conn: ca, Msg: &Pong{N: uint64(i)}})
		}
		a.Do(Send{Conn: ca, Msg: &Bye{Code: CodeDraining, Text: "this node is stopping"}})
		a.Do(CloseConn{Conn: ca, Text: "this node is stopping"})
		a.Do(Send{Conn: ca, Msg: &Ping{}})
		a.Do(CloseConn{Conn: ca, Text: "again"})
		if ev := a.wait("Lost"); ev.err.Error() != "closed by this node: this node is stopping" {
			t.Error(ev)
		}
		b.wait("Lost")
		for i := range 1000 {
			if ev := b.wait("Received"); ev.msg.(*Pong).N != uint64(i) {
				t.Fatal(ev)
			}
		}
		if ev := b.wait("Received"); *ev.msg.(*Bye) != (Bye{CodeDraining, "this node is stopping"}) {
			t.Error(ev)
		}
		b.none("Received")
		// What is asked of a connection that is gone is nothing.
		for _, e := range []Effect{Send{Conn: ca, Msg: &Ping{}}, Grant{Conn: ca}, Revoke{Conn: ca, Indexes: []uint32{1}}, Transmit{Conn: ca}, Unsend{Conn: ca},
			DialData{Conn: ca, N: 1}, Expect{Conn: ca}, CloseConn{Conn: ca}} {
			if !a.Do(e) {
				t.Errorf("%T is not the transport's", e)
			}
		}
		if a.Do(Report{}) || a.Do(Note{}) || a.Do(Serve{}) {
			t.Error("an effect of the core is the transport's")
		}
		a.none("Detached")
		a.none("Lost")
	}
}

// TestNetLostComesLast: not before a receiver and a sender that are held in a
// slot have let go of it.
func TestNetLostComesLast(t *testing.T) {
	leaks(t)
	for slot, work := range map[uint64]string{1: "receiver", 2: "sender"} {
		e := newNetEnd(t, listening(), 3)
		taken, release := make(chan struct{}), make(chan struct{})
		e.taken = func(uint64) { close(taken); <-release }
		p, conn, data := newTestPeer(t, e, nil, 1)
		if work == "receiver" {
			e.Do(Grant{Conn: conn, Nonce: 1, Round: 1, Index: 1, Slot: slot, Length: 1000})
			p.write(data[0], frame(blockID{1, 1, 1}, 1, 1000))
		} else {
			e.Do(Transmit{Conn: conn, ID: 1, Blocks: []DataBlock{{Head: DataHead{Length: 1000}, Lease: Lease{Slot: slot}}}})
		}
		<-taken
		s := e.sessions()[conn]
		p.Close()
		<-s.ctx.Done() // the connections are closed right after that
		lost := make(chan netEvent)
		go func() { lost <- e.wait("Lost") }()
		select {
		case ev := <-lost:
			t.Errorf("%v, and the %s is still in the slot", ev, work)
			close(release)
		case <-time.After(50 * time.Millisecond):
			close(release)
			<-lost
		}
	}
}

// TestNetSameBlockTwice: the second of two that are the same goes nowhere, even
// while the first one is still on its way.
func TestNetSameBlockTwice(t *testing.T) {
	leaks(t)
	e := newNetEnd(t, listening(), 2)
	taken := make(chan struct{}, 2)
	e.taken = func(uint64) { taken <- struct{}{} }
	p, conn, data := newTestPeer(t, e, nil, 2)
	e.Do(Grant{Conn: conn, Nonce: 1, Round: 1, Index: 1, Length: 9000})
	f := frame(blockID{1, 1, 1}, 1, 9000)
	p.write(data[0], f[:5000])
	<-taken
	p.write(data[1], f)
	e.Do(Grant{Conn: conn, Nonce: 1, Round: 1, Index: 2, Slot: 1, Length: 10})
	p.write(data[1], frame(blockID{1, 1, 2}, 2, 10))
	if ev := e.wait("Arrived"); ev.block.index != 2 {
		t.Fatal(ev)
	}
	p.write(data[0], f[5000:])
	if ev := e.wait("Arrived"); ev.block.index != 1 || !ev.ok {
		t.Fatal(ev)
	}
	if s := e.Stats(); s.StrayIn != 1 {
		t.Errorf("%+v", s)
	}
}

// TestNetLastWords: a Bye that comes after the end of a data connection is heard.
func TestNetLastWords(t *testing.T) {
	leaks(t)
	o := listening()
	o.FlushTimeout = 20 * time.Second
	e := newNetEnd(t, o, 1)
	p, conn, data := newTestPeer(t, e, nil, 2)
	s := e.sessions()[conn]
	data[1].Close()
	<-s.ending
	p.say(&Bye{Code: CodeDraining, Text: "x"})
	if ev := e.wait("Received"); ev.msg.(*Bye).Code != CodeDraining {
		t.Error(ev)
	}
	if ev := e.wait("Lost"); !strings.Contains(ev.err.Error(), "data connection: closed by the peer") {
		t.Error(ev)
	}
}

// TestNetLostWithWorkUnderWay: the peer vanishes in mid-payload both ways. Lost
// scribbles on the slots.
func TestNetLostWithWorkUnderWay(t *testing.T) {
	leaks(t)
	e := newNetEnd(t, listening(), 4)
	taken := make(chan uint64, 1000)
	e.taken = func(slot uint64) { taken <- slot }
	p, conn, data := newTestPeer(t, e, nil, 2)
	for i := range uint32(2) {
		e.Do(Grant{Conn: conn, Nonce: 1, Round: 1, Index: i, Slot: uint64(i), Length: netStride})
		p.write(data[i], frame(blockID{1, 1, i}, i, netStride)[:1000])
		<-taken
	}
	var many []DataBlock
	for i := range 400 {
		many = append(many, DataBlock{Head: DataHead{Index: uint32(i), Length: netStride}, Lease: Lease{Slot: 2}})
	}
	e.Do(Transmit{Conn: conn, ID: 1, Blocks: many})
	<-taken
	_ = data[0].(*net.TCPConn).SetLinger(0)
	data[0].Close()
	ev := e.wait("Lost")
	if ev.conn != conn || !strings.Contains(ev.err.Error(), "data connection") {
		t.Error(ev)
	}
	e.none("Arrived")
	e.none("Detached")
}

// TestNetDialFailed: errors name the address as it was given.
func TestNetDialFailed(t *testing.T) {
	leaks(t)
	e := newNetEnd(t, NetOptions{}, 1)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := ln.Addr().String()
	ln.Close()
	for addr, want := range map[string]string{closed: "connection refused", "no-port": "missing port", "[::1": "missing ']'", "::1:7": "too many colons"} {
		e.Do(Dial{addr})
		if ev := e.wait("DialFailed"); ev.addr != addr || !strings.Contains(ev.err.Error(), want) || !strings.Contains(ev.err.Error(), addr) {
			t.Errorf("%s: %v", addr, ev)
		}
	}
	if e.Addr() != "" {
		t.Error("it listens")
	}
	if _, err := OpenNet(NetOptions{Listen: "300.0.0.1:7"}, e); err == nil || !strings.Contains(err.Error(), "300.0.0.1:7") {
		t.Error(err)
	}

	// Nobody answers data connections: the session ends.
	ln, err = net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	e.Do(Dial{ln.Addr().String()})
	c, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	ln.Close()
	_, _ = c.Write(appendFrame(nil, &Welcome{Version: Version, Node: "x", Boot: "x"}))
	if ev := e.wait("Lost"); !strings.Contains(ev.err.Error(), "data connection: dial tcp "+ln.Addr().String()) {
		t.Error(ev)
	}
	c.Close()
}

func TestNetIPv6(t *testing.T) {
	leaks(t)
	if ln, err := net.Listen("tcp", "[::1]:0"); err != nil {
		t.Skipf("this machine has no IPv6 loopback: %v", err)
	} else {
		ln.Close()
	}
	a, b := newNetEnd(t, NetOptions{}, 1), newNetEnd(t, NetOptions{Listen: "[::1]:0"}, 1)
	if !strings.HasPrefix(b.Addr(), "[::1]:") {
		t.Error(b.Addr())
	}
	a.Do(Dial{b.Addr()})
	if ev := a.wait("Connected"); ev.addr != b.Addr() || !ev.ok {
		t.Error(ev)
	}
	if ev := b.wait("Connected"); !strings.HasPrefix(ev.addr, "[::1]:") || ev.ok {
		t.Error(ev)
	}
}

// TestNetClose in each state of a connection: nothing is left, and Lost has
// come.
func TestNetClose(t *testing.T) {
	leaks(t)
	e := newNetEnd(t, listening(), 4)
	p := &testPeer{t: t, addr: e.Addr()}
	p.dial()
	half := p.dial()
	p.write(half, []byte("TRPT"))
	newTestPeer(t, e, nil, 0)
	_, conn, _ := newTestPeer(t, e, nil, 2)
	e.Do(Transmit{Conn: conn, ID: 1, Blocks: slices.Repeat([]DataBlock{{Head: DataHead{Length: netStride}}}, 500)})
	e.wait("Sent")
	black, err := net.Listen("tcp", "127.0.0.1:0") // accepts, and says nothing
	if err != nil {
		t.Fatal(err)
	}
	defer black.Close()
	e.Do(Dial{black.Addr().String()})
	e.wait("Connected")
	done, cancel := context.WithCancel(t.Context())
	cancel()
	if err := e.Close(done); err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if err := e.Close(t.Context()); err != nil {
		t.Error(err)
	}
	for range 3 {
		e.wait("Lost")
	}
	e.Do(Dial{e.Addr()})
	if _, err := net.Dial("tcp", e.Addr()); err == nil {
		t.Error("it still listens")
	}
}

// testCA signs certificates.
type testCA struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	dir  string
	file string
}

func newTestCA(t testing.TB) *testCA {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	x := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, x, x, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	x, err = x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	ca := &testCA{cert: x, key: key, dir: t.TempDir()}
	ca.file = ca.write(t, "ca.pem", "CERTIFICATE", der)
	return ca
}

func (ca *testCA) write(t testing.TB, name, typ string, der []byte) string {
	t.Helper()
	path := filepath.Join(ca.dir, name)
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: typ, Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// files has a new certificate for a name or address, and for nodes if any are named.
func (ca *testCA) files(t testing.TB, name string, nodes ...string) TLSFiles {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	x := &x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "of a test"}, NotAfter: time.Now().Add(time.Hour)}
	if ip := net.ParseIP(name); ip != nil {
		x.IPAddresses = []net.IP{ip}
	} else {
		x.DNSNames = []string{name}
	}
	for _, node := range nodes {
		x.URIs = append(x.URIs, &url.URL{Scheme: "terrace", Host: "node", Path: "/" + node})
	}
	der, err := x509.CreateCertificate(rand.Reader, x, ca.cert, &key.PublicKey, ca.key)
	if err != nil {
		t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return TLSFiles{Cert: ca.write(t, name+".pem", "CERTIFICATE", der), Key: ca.write(t, name+".key", "PRIVATE KEY", pkcs8), CA: ca.file}
}

func (ca *testCA) config(t testing.TB, name string, nodes ...string) *tls.Config {
	t.Helper()
	cfg, err := ca.files(t, name, nodes...).Config()
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

func TestNetTLS(t *testing.T) {
	leaks(t)
	ours, theirs := newTestCA(t), newTestCA(t)
	named := ours.files(t, "terrace")
	named.ServerName = "terrace"
	byName, err := named.Config()
	if err != nil {
		t.Fatal(err)
	}
	noCert := ours.config(t, "127.0.0.1")
	noCert.Certificates = nil
	ip := ours.config(t, "127.0.0.1")
	stranger := theirs.config(t, "127.0.0.1")
	trusting := theirs.config(t, "127.0.0.1") // takes our server, has a certificate of another CA
	trusting.RootCAs = ip.RootCAs
	for _, x := range []struct {
		name           string
		client, server *tls.Config
		dial, lost     string // what the client is told; both empty if it works
		refused        string // what the server tells
	}{
		{name: "right", client: ip, server: ip},
		{name: "by name", client: byName, server: byName},
		{name: "certificate for somebody else", client: ip, server: byName, dial: "doesn't contain any IP SANs", refused: "bad certificate"},
		{name: "another CA", client: stranger, server: ip, dial: "certificate signed by unknown authority", refused: "bad certificate"},
		{name: "client of another CA", client: trusting, server: ip, lost: "unknown certificate authority", refused: "certificate signed by unknown authority"},
		{name: "client without certificate", client: noCert, server: ip, lost: "certificate required", refused: "didn't provide a certificate"},
		{name: "plain to TLS", server: ip, lost: "may want TLS", refused: "does not look like a TLS handshake"},
		{name: "TLS to plain", client: ip, dial: "may not speak TLS", refused: "other side speaks TLS"},
	} {
		t.Run(x.name, func(t *testing.T) {
			a := newNetEnd(t, NetOptions{TLS: x.client}, 1)
			b := newNetEnd(t, NetOptions{TLS: x.server, Listen: "127.0.0.1:0"}, 1)
			if x.refused == "" {
				ca, _ := join(t, a, b)
				a.Do(Send{Conn: ca, Msg: &Ping{N: 5}})
				a.waitFor("Received", func(e netEvent) bool { m, ok := e.msg.(*Pong); return ok && m.N == 5 })
				return
			}
			a.Do(Dial{b.Addr()})
			if ev := b.wait("Refused"); !strings.Contains(ev.err.Error(), x.refused) {
				t.Error(ev)
			}
			if x.dial != "" {
				if ev := a.wait("DialFailed"); !strings.Contains(ev.err.Error(), x.dial) || !strings.Contains(ev.err.Error(), b.Addr()) {
					t.Error(ev)
				}
			} else if ev := a.wait("Lost"); !strings.Contains(ev.err.Error(), x.lost) {
				t.Error(ev)
			}
			b.none("Connected")
		})
	}
	good := ours.files(t, "127.0.0.1")
	for _, f := range []TLSFiles{{Cert: good.Cert, Key: good.Key, CA: good.Key}, {Cert: good.Cert, Key: good.Key, CA: "/nowhere"}, {Cert: "/nowhere", Key: good.Key, CA: good.CA}, {Cert: good.Cert, Key: named.Key, CA: good.CA}} {
		if _, err := f.Config(); err == nil {
			t.Errorf("%+v is taken", f)
		}
	}
}

// TestNetIdentity: with TLS a node is who its certificate says it is, whoever has
// dialed.
func TestNetIdentity(t *testing.T) {
	leaks(t)
	ca := newTestCA(t)
	const server = "terrace"
	for _, x := range []struct {
		name            string
		cert            string
		nodes           []string // that the certificate is for
		node, advertise string   // that the peer says
		serverName      string
		want            string // what is wrong with that
	}{
		{name: "its own address", cert: "127.0.0.1", node: "p", advertise: "127.0.0.1:7301"},
		{name: "no address", cert: "127.0.0.1", node: "p"},
		{name: "another's address", cert: "127.0.0.1", node: "p", advertise: "10.0.0.7:7301", want: `advertise: node "p" says it is at 10.0.0.7:7301; the certificate of "CN=of a test" is not for that`},
		{name: "another's name", cert: "127.0.0.1", node: "p", advertise: "node-7:7301", want: "advertise: node"},
		{name: "another's without a port", cert: "127.0.0.1", node: "p", advertise: "10.0.0.7", want: `advertise: "10.0.0.7" is not host:port`},
		{name: "one name for all", cert: server, node: "p", advertise: "10.0.0.7:7301", serverName: server},
		{name: "one name for all others", cert: "127.0.0.1", node: "p", advertise: "127.0.0.1:7301", serverName: server, want: "advertise: node"},
		{name: "its own id", cert: "127.0.0.1", nodes: []string{"10.0.0.7:7301", "p 1/%?#"}, node: "p 1/%?#", advertise: "127.0.0.1:1"},
		{name: "another's id", cert: "127.0.0.1", nodes: []string{"p"}, node: "q", advertise: "127.0.0.1:1", want: `node: it says it is "q"; the certificate of "CN=of a test" is another node's: [terrace://node/p]`},
		{name: "a longer id", cert: "127.0.0.1", nodes: []string{"p"}, node: "p/p", want: "node: it says"},
	} {
		t.Run(x.name, func(t *testing.T) {
			theirs := ca.config(t, x.cert, x.nodes...)
			theirs.ServerName = "127.0.0.1" // of ours, which is dialed
			ours := ca.config(t, "127.0.0.1")
			ours.ServerName = x.serverName
			e := newNetEnd(t, NetOptions{Listen: "127.0.0.1:0", TLS: ours}, 1)

			p := &testPeer{t: t, addr: e.Addr(), cfg: theirs}
			p.Conn = p.dial()
			p.in = newFrameReader(p.Conn)
			p.say(&Hello{Version: Version, Node: x.node, Boot: "b", Advertise: x.advertise, Token: testToken(1), Window: 1})
			if x.want == "" {
				if _, ok := p.hear().(*Welcome); !ok {
					t.Error("no welcome")
				}
			} else {
				if b := p.bye(); b.Code != CodeProtocol || !strings.Contains(b.Text, "hello."+x.want) {
					t.Errorf("%+v", b)
				}
				if ev := e.wait("Refused"); !strings.Contains(ev.err.Error(), "hello."+x.want) || ev.addr != p.LocalAddr().String() {
					t.Error(ev)
				}
				e.none("Connected")
			}

			if x.cert != "127.0.0.1" || x.serverName != "" {
				return // it is dialed by another name
			}
			ln, err := tls.Listen("tcp", "127.0.0.1:0", theirs)
			if err != nil {
				t.Fatal(err)
			}
			defer ln.Close()
			e.Do(Dial{ln.Addr().String()})
			c, err := ln.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(15 * time.Second))
			q := &testPeer{t: t, Conn: c, in: newFrameReader(c)}
			q.hear()
			before := e.Stats().Violations
			q.say(&Welcome{Version: Version, Node: x.node, Boot: "b", Advertise: x.advertise})
			welcome := func(e netEvent) bool { _, ok := e.msg.(*Welcome); return ok }
			if x.want == "" {
				e.waitFor("Received", welcome)
				return
			}
			if b := q.bye(); b.Code != CodeProtocol || !strings.Contains(b.Text, "welcome."+x.want) {
				t.Errorf("%+v", b)
			}
			ev := e.waitFor("Lost", func(ev netEvent) bool { return strings.Contains(ev.err.Error(), "welcome."+x.want) })
			if bad := (*ProtocolError)(nil); !errors.As(ev.err, &bad) || e.Stats().Violations != before+1 {
				t.Error(ev, "is not counted")
			}
			e.none("Received")
		})
	}
}

// TestNetFloodIsPaced: whoever sends frames without end is read only as fast as
// the lock that they take can bear, and nobody else waits for him.
func TestNetFloodIsPaced(t *testing.T) {
	leaks(t)
	for name, x := range map[string]struct {
		frame []byte
		n     int
	}{
		"small": {appendFrame(nil, &Ping{N: 1}), paceUnits + paceUnits/4},
		"large": {appendFrame(nil, &Namespaces{Specs: [][]byte{make([]byte, 63<<10)}}), paceUnits/128 + paceUnits/512},
	} {
		e := newNetEnd(t, listening(), 1)
		p, conn, _ := newTestPeer(t, e, nil, 0)
		calm, calmConn, _ := newTestPeer(t, e, nil, 0)
		e.mu.Lock()
		e.events = nil
		e.mu.Unlock()
		begin := time.Now()
		done := make(chan struct{})
		go func() {
			defer close(done)
			for range x.n - 1 {
				_, _ = p.Write(x.frame)
			}
			_, _ = p.Write(appendFrame(nil, &Pong{N: 7}))
		}()
		e.waitFor("Received", func(ev netEvent) bool { return ev.conn == conn })
		calm.say(&Ping{N: 3})
		e.waitFor("Received", func(ev netEvent) bool { return ev.conn == calmConn })
		early := time.Since(begin)
		e.waitFor("Received", func(ev netEvent) bool { _, ok := ev.msg.(*Pong); return ok && ev.conn == conn })
		if took := time.Since(begin); took < 200*time.Millisecond || early > took {
			t.Errorf("%s: %d frames in %v, the other session's after %v", name, x.n, took, early)
		}
		<-done
	}
}
