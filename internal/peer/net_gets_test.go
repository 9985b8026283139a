package peer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	mrand "math/rand/v2"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/minio/crc64nvme"
	"github.com/terrace-kv/terrace/internal/content"
	"github.com/terrace-kv/terrace/internal/rma/fakerma"
)

const getBytes = 60000

// getPair are two ends of one session over a fabric that fails as plan says. a
// has blocks, b gets them.
type getPair struct {
	t      *testing.T
	a, b   *netEnd
	ca, cb ConnID
	fabric *fakerma.Fabric // b's
	sums   []uint64
}

func newGetPair(t *testing.T, slots int, plan func(off uint64, n int) fakerma.Fault) *getPair {
	leaks(t)
	a, b := wired(t, "gets", slots)
	p := &getPair{t: t, a: a, b: b, fabric: b.o.Fabric.(*fakerma.Fabric)}
	p.fabric.Plan = plan
	for i := range uint64(slots) {
		content.Fill(netFP, netKey(uint32(i)), a.slot(i)[:getBytes])
		p.sums = append(p.sums, netSum(uint32(i), getBytes))
		copy(b.slot(i), stale)
	}
	p.ca, p.cb = join(t, a, b)
	matched(t, a, p.ca)
	matched(t, b, p.cb)
	return p
}

// matched waits until an end knows of the other's fabric.
func matched(t *testing.T, e *netEnd, conn ConnID) {
	t.Helper()
	for begin := time.Now(); ; time.Sleep(time.Millisecond) {
		if e.Wire(conn) == "fake" {
			return
		}
		if time.Since(begin) > 10*time.Second {
			t.Fatal("the other side's fabric did not show")
		}
	}
}

func getID(i uint32) blockID { return blockID{7, 1, i} }

func (p *getPair) grant(i uint32) {
	p.b.Do(Grant{Conn: p.cb, Nonce: 7, Round: 1, Index: i, Slot: uint64(i), Length: getBytes})
}

func (p *getPair) block(i uint32) DataBlock {
	return DataBlock{Head: DataHead{Nonce: 7, Round: 1, Index: i, Length: getBytes, Sum: p.sums[i]}, Lease: Lease{Slot: uint64(i)}}
}

func (p *getPair) transmit(i ...uint32) {
	var blocks []DataBlock
	for _, i := range i {
		blocks = append(blocks, p.block(i))
	}
	p.a.Do(Transmit{Conn: p.ca, ID: 9, Blocks: blocks})
}

func (p *getPair) revoke(i uint32) {
	p.b.Do(Revoke{Conn: p.cb, Nonce: 7, Round: 1, Indexes: []uint32{i}})
}

// arrived waits for a block, whole and once.
func (p *getPair) arrived(i uint32) {
	p.t.Helper()
	if ev := p.b.wait("Arrived"); ev.block != getID(i) || !ev.ok || ev.sum != p.sums[i] {
		p.t.Fatal(ev)
	}
	got := p.b.slot(uint64(i))
	page := (getBytes + pageBytes - 1) &^ (pageBytes - 1)
	if at := content.Check(netFP, netKey(i), got[:getBytes]); at >= 0 || !bytes.Equal(got[getBytes:page], make([]byte, page-getBytes)) || !bytes.Equal(got[page:], stale[page:]) {
		p.t.Errorf("block %d is wrong at %d, or what follows it", i, at)
	}
	if ev := p.a.wait("Sent"); ev.serve != 9 || !ev.ok || ev.block.index != i {
		p.t.Error(ev)
	}
}

func (p *getPair) posted(n int) {
	p.t.Helper()
	for begin := time.Now(); p.fabric.Posts() < n; time.Sleep(time.Millisecond) {
		if time.Since(begin) > 10*time.Second {
			p.t.Fatalf("%d gets were posted, want %d", p.fabric.Posts(), n)
		}
	}
}

// rest lets what would be wrong happen.
func rest() { time.Sleep(20 * time.Millisecond) }

// TestNetGetFaults: whatever happens to a get, its block arrives once, with the
// right bytes; the operator hears why it went over TCP, once.
func TestNetGetFaults(t *testing.T) {
	boom := errors.New("boom")
	for name, x := range map[string]struct {
		fault fakerma.Fault
		why   string // empty: it goes over the fabric
	}{
		"none":          {},
		"twice":         {fault: fakerma.Fault{Twice: true}},
		"refused":       {fault: fakerma.Fault{Refuse: 5}},
		"late":          {fault: fakerma.Fault{Hold: after(50 * time.Millisecond)}},
		"released late": {fault: fakerma.Fault{Stuck: after(50 * time.Millisecond)}},
		"not posted":    {fault: fakerma.Fault{Post: boom}, why: "boom"},
		"failed":        {fault: fakerma.Fault{Failed: boom, Refuse: 2}, why: "boom"},
		"lost":          {fault: fakerma.Fault{Lost: boom, Hold: after(50 * time.Millisecond)}, why: "boom"},
		"wrong":         {fault: fakerma.Fault{Wrong: true, Refuse: 2}, why: "has checksum"},
	} {
		t.Run(name, func(t *testing.T) {
			p := newGetPair(t, 3, func(uint64, int) fakerma.Fault { return x.fault })
			for i := range uint32(3) {
				p.grant(i)
				p.transmit(i)
				p.arrived(i)
			}
			s := p.b.Stats()
			if s.BlocksIn != 3 || s.BytesIn != 3*getBytes || s.BadSums+s.StrayIn+s.Violations > 0 || p.a.Stats().BlocksOut != 3 {
				t.Errorf("%+v", s)
			}
			if x.why == "" {
				if s.Gets != 3 || s.GetsFailed != 0 || p.a.Wire(p.ca) != "fake" {
					t.Errorf("%+v", s)
				}
				p.b.none("Trouble")
			} else {
				if s.Gets != 0 || s.GetsFailed != 1 || p.fabric.Posts() > 1 || p.a.Stats().Offers != 1 || p.a.Wire(p.ca) != "tcp" {
					t.Errorf("%+v", s)
				}
				if ev := p.b.wait("Trouble"); !strings.Contains(ev.err.Error(), "get by fake: ") || !strings.Contains(ev.err.Error(), x.why) {
					t.Error(ev)
				}
				p.b.none("Trouble")
			}
			p.b.none("Arrived")
			p.b.none("Detached")
			p.a.none("Sent")
		})
	}
}

// TestNetGetsFailTogether: what was on offer when the first get failed comes over
// TCP as well, and that is told once.
func TestNetGetsFailTogether(t *testing.T) {
	until, n := make(chan struct{}), uint32(5)
	p := newGetPair(t, int(n), func(uint64, int) fakerma.Fault { return fakerma.Fault{Hold: until, Failed: errors.New("boom")} })
	for i := range n {
		p.grant(i)
		p.transmit(i)
	}
	p.posted(int(n))
	close(until)
	for range n {
		if ev := p.b.wait("Arrived"); !ev.ok {
			t.Error(ev)
		}
		p.a.wait("Sent")
	}
	p.b.wait("Trouble")
	for _, what := range []string{"Trouble", "Arrived"} {
		p.b.none(what)
	}
	if s := p.b.Stats(); s.GetsFailed != uint64(n) || s.BlocksIn != uint64(n) {
		t.Errorf("%+v", s)
	}
}

func after(d time.Duration) <-chan struct{} {
	c := make(chan struct{})
	time.AfterFunc(d, func() { close(c) })
	return c
}

// TestNetGetRevoked: a slot is quiet when its get is released, and not before,
// whether the get is late, its state is unknown, or the release is refused.
func TestNetGetRevoked(t *testing.T) {
	for _, name := range []string{"late", "state unknown", "release refused"} {
		t.Run(name, func(t *testing.T) {
			until := make(chan struct{})
			fault := map[string]fakerma.Fault{"late": {Hold: until}, "state unknown": {Hold: until, Lost: errors.New("boom")}, "release refused": {Stuck: until}}[name]
			p := newGetPair(t, 2, func(off uint64, _ int) fakerma.Fault {
				if off == 0 {
					return fault
				}
				return fakerma.Fault{}
			})
			p.grant(0)
			p.transmit(0)
			p.posted(1)
			p.revoke(0)
			p.revoke(0)
			p.a.Do(Unsend{Conn: p.ca, ID: 9})
			p.grant(1) // nobody waits for the one before
			p.transmit(1)
			p.arrived(1)
			rest()
			for _, what := range []string{"Arrived", "Detached", "Trouble"} {
				p.b.none(what)
			}
			p.a.none("Sent")
			if s := p.b.Stats(); s.Posted != 1 {
				t.Errorf("%+v", s)
			}
			close(until)
			if ev := p.b.wait("Detached"); ev.block != getID(0) {
				t.Error(ev)
			}
			copy(p.b.slot(0), stale) // it is somebody else's
			if ev := p.a.wait("Sent"); ev.block.index != 0 || !ev.ok {
				t.Error(ev)
			}
			if p.b.none("Arrived"); !bytes.Equal(p.b.slot(0), stale) {
				t.Error("the slot was written after Detached")
			}
			if s := p.b.Stats(); s.Detaches != 1 || s.Posted != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// TestNetGetSessionEnds in the middle of a get, at either side's wish: Lost comes
// when the get is released, and Close says what it leaves behind.
func TestNetGetSessionEnds(t *testing.T) {
	for _, byPeer := range []bool{false, true} {
		for _, name := range []string{"under way", "late", "state unknown", "release refused"} {
			t.Run(fmt.Sprintf("%s by peer %v", name, byPeer), func(t *testing.T) {
				until := make(chan struct{})
				fault := map[string]fakerma.Fault{"under way": {Stall: true}, "late": {Hold: until},
					"state unknown": {Hold: until, Lost: errors.New("boom")}, "release refused": {Stuck: until}}[name]
				p := newGetPair(t, 1, func(uint64, int) fakerma.Fault { return fault })
				p.grant(0)
				p.transmit(0)
				p.posted(1)
				if byPeer {
					p.a.Do(CloseConn{Conn: p.ca, Text: "done"})
				} else {
					p.b.Do(CloseConn{Conn: p.cb, Text: "done"})
				}
				p.a.wait("Lost") // the producer need not wait: its memory is read, not written
				p.a.none("Sent")
				if name == "under way" { // the end of the session ends it
					p.b.wait("Lost")
					p.b.none("Arrived")
					return
				}
				rest()
				for _, what := range []string{"Lost", "Arrived", "Detached"} {
					p.b.none(what)
				}
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
				defer cancel()
				if err := p.b.Close(ctx); err == nil || !strings.Contains(err.Error(), "fake has not released 1 gets") || !errors.Is(err, context.DeadlineExceeded) {
					t.Error(err)
				}
				close(until)
				p.b.wait("Lost")
				p.b.none("Detached")
				p.b.none("Trouble")
			})
		}
	}
}

// TestNetGetsAreBounded: so many at once, so many offers, first come first served.
func TestNetGetsAreBounded(t *testing.T) {
	const total = 100
	until, release := context.WithCancel(t.Context())
	defer release()
	p := newGetPair(t, total, func(uint64, int) fakerma.Fault { return fakerma.Fault{Hold: until.Done()} })
	for i := range uint32(total) {
		p.grant(i)
		p.transmit(i)
	}
	p.posted(gettersMax)
	rest()
	if s, n := p.a.Stats(), p.fabric.Posts(); s.Offers != offersMax || n != gettersMax {
		t.Errorf("%d offers, %d gets", s.Offers, n)
	}
	p.revoke(offersMax - 1) // offered, and not posted: at once
	p.revoke(total - 1)     // not offered
	for _, i := range []uint32{offersMax - 1, total - 1} {
		if ev := p.b.wait("Detached"); ev.block != getID(i) {
			t.Error(ev)
		}
	}
	if ev := p.a.wait("Sent"); ev.block.index != offersMax-1 {
		t.Error(ev)
	}
	for p.a.Stats().Offers == offersMax { // the answer has made room for one more
		time.Sleep(time.Millisecond)
	}
	p.a.Do(Unsend{Conn: p.ca, ID: 9})
	for i := range uint32(total - offersMax - 1) {
		if ev := p.a.wait("Sent"); ev.block.index != offersMax+1+i || ev.ok {
			t.Fatal(ev)
		}
	}
	release()
	for range offersMax {
		if ev := p.b.wait("Arrived"); !ev.ok || ev.block.index > offersMax || ev.block.index == offersMax-1 {
			t.Error(ev)
		}
		p.a.wait("Sent")
	}
	p.b.none("Arrived")
	if s := p.b.Stats(); s.Gets != offersMax {
		t.Errorf("%+v", s)
	}
}

// TestNetMixedFabrics: who has no fabric, or another one, is sent bytes.
func TestNetMixedFabrics(t *testing.T) {
	for _, x := range []struct{ a, b, trouble string }{{a: "fake"}, {b: "fake"}, {a: "fake", b: "other", trouble: `the peer's fabric is "fake", this node's "other"`}} {
		t.Run(fmt.Sprintf("%q and %q", x.a, x.b), func(t *testing.T) {
			leaks(t)
			network := fakerma.New()
			end := func(name string) *netEnd {
				o := listening()
				if name != "" {
					o.Fabric = network.Open(name)
				}
				return newNetEnd(t, o, 2)
			}
			a, b := end(x.a), end(x.b)
			ca, cb := join(t, a, b)
			for i := range uint32(2) {
				content.Fill(netFP, netKey(i), a.slot(uint64(i))[:getBytes])
				b.Do(Grant{Conn: cb, Nonce: 7, Round: 1, Index: i, Slot: uint64(i), Length: getBytes})
				a.Do(Transmit{Conn: ca, ID: 1, Blocks: []DataBlock{{Head: DataHead{Nonce: 7, Round: 1, Index: i, Length: getBytes, Sum: netSum(i, getBytes)}, Lease: Lease{Slot: uint64(i)}}}})
				if ev := b.wait("Arrived"); !ev.ok {
					t.Error(ev)
				}
				if ev := a.wait("Sent"); !ev.ok {
					t.Error(ev)
				}
			}
			if s := a.Stats(); s.Offers > 0 || b.Wire(cb) != "tcp" {
				t.Errorf("%+v", s)
			}
			if x.trouble == "" {
				b.none("Trouble")
			} else if ev := b.wait("Trouble"); !strings.Contains(ev.err.Error(), x.trouble) {
				t.Error(ev)
			}
		})
	}
}

// getPeer speaks of a fabric by hand.
type getPeer struct {
	*testPeer
	e           *netEnd
	conn        ConnID
	data        []net.Conn
	network     *fakerma.Network
	mem         []byte
	description []byte
}

func newGetPeer(t *testing.T, o NetOptions, slots, conns int) *getPeer {
	network := fakerma.New()
	theirs := network.Open("fake")
	x := &getPeer{network: network, mem: make([]byte, slots*netStride)}
	region, err := theirs.Register(x.mem)
	if err != nil {
		t.Fatal(err)
	}
	o.Listen, o.Fabric = "127.0.0.1:0", network.Open("fake")
	x.e = newNetEnd(t, o, slots)
	x.description = region.Description()
	x.again(t, conns)
	return x
}

// again opens another session.
func (x *getPeer) again(t *testing.T, conns int) {
	x.testPeer, x.conn, x.data = newTestPeer(t, x.e, nil, conns)
}

func (x *getPeer) describe() {
	x.t.Helper()
	for _, c := range x.data {
		x.write(c, appendDescription(nil, "fake", x.description))
		h, body := x.next(c)
		if name, _, err := decodeDescription(&h, body); h.Kind != DataDescription || name != "fake" || err != nil {
			x.t.Fatalf("%+v, %q, %v", h, name, err)
		}
	}
}

// next reads a head, and what follows it.
func (x *getPeer) next(c net.Conn) (DataHead, []byte) {
	x.t.Helper()
	b := make([]byte, dataHeadBytes)
	if _, err := io.ReadFull(c, b); err != nil {
		x.t.Fatal(err)
	}
	h, err := decodeDataHead(b)
	if err != nil {
		x.t.Fatal(err)
	}
	if h.Kind == DataOffer || h.Kind == DataTaken {
		return h, nil
	}
	b = make([]byte, h.Length)
	if _, err := io.ReadFull(c, b); err != nil {
		x.t.Fatal(err)
	}
	return h, b
}

func headBytes(h DataHead) []byte {
	b := make([]byte, dataHeadBytes)
	h.put(b)
	return b
}

// offered is a head that offers block i, which lies in slot i.
func (x *getPeer) offered(i uint32) DataHead {
	block := x.mem[uint64(i)*netStride:][:getBytes]
	content.Fill(netFP, netKey(i), block)
	return DataHead{Kind: DataOffer, Nonce: 7, Round: 1, Index: i, Length: getBytes, Sum: crc64nvme.Checksum(block), At: uint64(i) * netStride}
}

func (x *getPeer) grant(i uint32) {
	x.e.Do(Grant{Conn: x.conn, Nonce: 7, Round: 1, Index: i, Slot: uint64(i), Length: getBytes})
}

// TestNetOfferByHand: the bytes on the wire, and what an offer is answered.
func TestNetOfferByHand(t *testing.T) {
	leaks(t)
	x := newGetPeer(t, NetOptions{}, 4, 2)
	x.describe()
	taken := func(i uint32, outcome uint64) {
		t.Helper()
		if h, _ := x.next(x.data[0]); h != (DataHead{Kind: DataTaken, Nonce: 7, Round: 1, Index: i, Length: getBytes, At: outcome}) {
			t.Errorf("%+v, want outcome %d of block %d", h, outcome, i)
		}
	}
	x.data[1].Close() // answers come on the other one; but then the session is lost, so:
	x.e.wait("Lost")
	x.again(t, 1)
	x.describe()
	x.write(x.data[0], headBytes(x.offered(0))) // nobody waits
	taken(0, takenUnwanted)
	x.grant(1)
	x.write(x.data[0], headBytes(x.offered(1)))
	taken(1, takenArrived)
	if ev := x.e.wait("Arrived"); ev.block != getID(1) || !ev.ok {
		t.Error(ev)
	}
	x.write(x.data[0], headBytes(x.offered(1))) // has come
	taken(1, takenUnwanted)
	x.grant(2)
	far := x.offered(2)
	far.At = uint64(len(x.mem)) - getBytes + 1
	x.write(x.data[0], headBytes(far)) // beyond the region
	taken(2, takenCannot)
	x.e.wait("Trouble")
	x.write(x.data[0], frame(getID(2), 2, getBytes))
	if ev := x.e.wait("Arrived"); ev.block != getID(2) || !ev.ok {
		t.Error(ev)
	}
	x.grant(3)
	x.e.Do(Revoke{Conn: x.conn, Nonce: 7, Round: 1, Indexes: []uint32{3}})
	x.e.wait("Detached")
	x.write(x.data[0], headBytes(x.offered(3)))
	taken(3, takenUnwanted)
}

// TestNetRevokedOffers: while all gets hang, nothing is left of offers that were
// revoked, however many there are.
func TestNetRevokedOffers(t *testing.T) {
	leaks(t)
	const slots = 3 * gettersMax
	x := newGetPeer(t, NetOptions{}, slots, 1)
	x.e.o.Fabric.(*fakerma.Fabric).Plan = func(uint64, int) fakerma.Fault { return fakerma.Fault{Stall: true} }
	x.describe()
	for i := range uint32(slots) {
		x.grant(i)
		x.write(x.data[0], headBytes(x.offered(i)))
	}
	waiting := func() (n int) {
		x.e.with(x.conn, func(s *tcpSession) {
			s.mu.Lock()
			n = len(s.mu.gets.waiting)
			s.mu.Unlock()
		})
		return n
	}
	for until := time.Now().Add(10 * time.Second); waiting() < slots-gettersMax || x.e.Stats().Posted < gettersMax; time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatalf("%d offers wait", waiting())
		}
	}
	r := Revoke{Conn: x.conn, Nonce: 7, Round: 1}
	for i := range uint32(slots) {
		r.Indexes = append(r.Indexes, i)
	}
	x.e.Do(r)
	for range slots - gettersMax {
		x.e.wait("Detached")
		if h, _ := x.next(x.data[0]); h.Kind != DataTaken || h.At != takenUnwanted {
			t.Errorf("%+v", h)
		}
	}
	if n := waiting(); n != 0 {
		t.Errorf("%d offers that nobody wants any more wait to be got", n)
	}
}

// TestNetTakenByHand: what a producer does with the answers to its offers.
func TestNetTakenByHand(t *testing.T) {
	leaks(t)
	o := NetOptions{ProgressTimeout: time.Second}
	x := newGetPeer(t, o, 4, 1)
	x.describe()
	matched(t, x.e, x.conn)
	blocks := func(serve ServeID, from, to uint32) {
		t.Helper()
		var list []DataBlock
		for i := from; i < to; i++ {
			list = append(list, DataBlock{Head: DataHead{Nonce: 7, Round: 1, Index: i, Length: 1000, Sum: uint64(i)}, Lease: Lease{Slot: uint64(i)}})
		}
		x.e.Do(Transmit{Conn: x.conn, ID: serve, Blocks: list})
		for i := from; i < to; i++ {
			if h, _ := x.next(x.data[0]); h != (DataHead{Kind: DataOffer, Nonce: 7, Round: 1, Index: i, Length: 1000, Sum: uint64(i), At: uint64(i) * netStride}) {
				t.Errorf("%+v", h)
			}
		}
	}
	answer := func(i uint32, outcome uint64) {
		x.write(x.data[0], headBytes(DataHead{Kind: DataTaken, Nonce: 7, Round: 1, Index: i, Length: 1000, At: outcome}))
	}
	sent := func(i uint32, ok bool) {
		t.Helper()
		if ev := x.e.wait("Sent"); ev.block.index != i || ev.ok != ok {
			t.Errorf("%v, want block %d, ok %v", ev, i, ok)
		}
	}
	blocks(1, 0, 4)
	x.e.none("Sent")
	answer(1, takenArrived)
	sent(1, true)
	answer(0, takenUnwanted)
	sent(0, true)
	answer(2, takenCannot) // so its bytes come
	if h, b := x.next(x.data[0]); h.Kind != DataBytes || h.Index != 2 || len(b) != 1000 {
		t.Errorf("%+v", h)
	}
	sent(2, true)
	x.e.Do(Unsend{Conn: x.conn, ID: 1})
	x.e.none("Sent")
	answer(3, takenCannot) // and its do not
	sent(3, false)
	x.e.Do(Transmit{Conn: x.conn, ID: 2, Blocks: []DataBlock{{Head: DataHead{Nonce: 7, Round: 2, Length: 1000}}}})
	if h, _ := x.next(x.data[0]); h.Kind != DataBytes {
		t.Errorf("%+v: something is offered again", h)
	}
	sent(0, true)
	x.e.none("Trouble") // it is the peer's
	if s := x.e.Stats(); s.Offers != 4 || s.BlocksOut != 3 {
		t.Errorf("%+v", s)
	}
	x.Close()
	x.e.wait("Lost")

	x.again(t, 1) // who answers no offer loses the session
	x.describe()
	matched(t, x.e, x.conn)
	blocks(1, 0, 2)
	answer(1, takenArrived)
	if ev := x.e.wait("Lost"); !strings.Contains(ev.err.Error(), "1 blocks are on offer, and for 1s none was taken") {
		t.Error(ev)
	}
	sent(1, true)
	x.e.none("Sent")
}

// TestNetGetViolations: what no correct peer says about gets ends the session.
func TestNetGetViolations(t *testing.T) {
	leaks(t)
	x := newGetPeer(t, NetOptions{}, 4, 2)
	good := appendDescription(nil, "fake", x.description)
	sum := slices.Clone(good)
	sum[dataHeadBytes] ^= 1
	noName := appendDescription(nil, "", x.description)
	long := append([]byte{4}, "fake"...)
	long = append(long, make([]byte, descriptionMax-len(long))...)
	longHead := DataHead{Kind: DataDescription, Length: uint64(len(long)), Sum: crc64nvme.Checksum(long)}
	offer := x.offered(0)
	short := offer
	short.Length--
	taken := headBytes(DataHead{Kind: DataTaken, Nonce: 7, Round: 1, Index: 0, Length: getBytes})
	x.e.o.Fabric.(*fakerma.Fabric).Plan = func(uint64, int) fakerma.Fault { return fakerma.Fault{Stall: true} }
	for name, v := range map[string]struct {
		first, second []byte // on two connections, one after the other
		want          string
	}{
		"offer without description":     {first: headBytes(offer), want: "data.kind: an offer, and no description"},
		"offer on another connection":   {first: good, second: headBytes(offer), want: "data.kind: an offer, and no description"},
		"offer by another fabric":       {first: append(appendDescription(nil, "x", nil), headBytes(offer)...), want: "data.kind: an offer, and no description"},
		"offered twice":                 {first: slices.Concat(good, headBytes(offer), headBytes(offer)), want: "data.kind: a second offer of block 0 of round 1"},
		"offer of wrong length":         {first: slices.Concat(good, headBytes(short)), want: "data.length: 59999 bytes, the block has 60000"},
		"taken, and not offered":        {first: slices.Concat(good, taken), want: "data.taken: block 0 of round 1, of 60000 bytes, is not on offer"},
		"taken, and nothing described":  {first: taken, want: "data.taken"},
		"description twice":             {first: slices.Concat(good, good), want: "data.kind: a description that is not the first"},
		"description after a block":     {first: slices.Concat(frame(blockID{1, 1, 1}, 1, 10), good), want: "data.kind: a description that is not the first"},
		"another description":           {first: good, second: appendDescription(nil, "fake", []byte("12345678")), want: "data.description: another one"},
		"description of a wrong sum":    {first: sum, want: "description.sum"},
		"description of no fabric":      {first: noName, want: "description.name: 0 bytes"},
		"description that is too long":  {first: append(headBytes(longHead), long...), want: "description.length: 16444 bytes"},
		"name that is longer than both": {first: appendDescription(nil, strings.Repeat("x", 65), nil), want: "description.name: 65 bytes"},
	} {
		x.again(t, 2)
		x.grant(0)
		before := x.e.Stats().Violations
		x.write(x.data[0], v.first)
		if v.second != nil {
			matched(t, x.e, x.conn)
			x.write(x.data[1], v.second)
		}
		if b := x.bye(); b.Code != CodeProtocol || !strings.HasPrefix(b.Text, v.want) {
			t.Errorf("%s: %+v", name, b)
		}
		ev := x.e.waitFor("Lost", func(ev netEvent) bool { return ev.conn == x.conn })
		if !strings.Contains(ev.err.Error(), v.want) || x.e.Stats().Violations != before+1 {
			t.Errorf("%s: %v", name, ev)
		}
	}

	// A description that the fabric does not like is no violation: fabrics differ.
	x.again(t, 1)
	x.write(x.data[0], appendDescription(nil, "fake", []byte("no")))
	x.grant(0)
	x.write(x.data[0], headBytes(offer))
	x.next(x.data[0])
	if h, _ := x.next(x.data[0]); h.Kind != DataTaken || h.At != takenCannot {
		t.Errorf("%+v", h)
	}
	x.e.waitFor("Trouble", func(ev netEvent) bool { return strings.Contains(ev.err.Error(), "connect by fake") })

	// Who does not wait for answers to his offers loses the session.
	x.again(t, 1)
	x.write(x.data[0], good)
	for i := range uint32(offersMax + 1) {
		h := offer
		h.Index = i
		x.e.Do(Grant{Conn: x.conn, Nonce: 7, Round: 1, Index: i, Length: getBytes})
		x.write(x.data[0], headBytes(h))
	}
	if b := x.bye(); b.Code != CodeProtocol || b.Text != "data.offers: 64 wait for an answer, no more are allowed" {
		t.Errorf("%+v", b)
	}
	x.e.waitFor("Lost", func(ev netEvent) bool { return ev.conn == x.conn })
}

// TestNetAnyHeads: whatever heads come, in whatever order, each session ends or
// goes on, and nothing is left of it.
func TestNetAnyHeads(t *testing.T) {
	leaks(t)
	seed := mrand.Uint64()
	t.Logf("seed %d", seed)
	r := mrand.New(mrand.NewPCG(seed, 2))
	x := newGetPeer(t, NetOptions{}, 8, 0)
	x.e.o.Fabric.(*fakerma.Fabric).Plan = func(off uint64, n int) fakerma.Fault {
		boom := errors.New("boom")
		return []fakerma.Fault{{}, {}, {}, {Post: boom}, {Failed: boom}, {Lost: boom}, {Refuse: 2}, {Twice: true}, {Wrong: true}, {Stall: true}}[mrand.IntN(10)]
	}
	kinds := map[DataKind]int{}
	for range 60 {
		x.again(t, 2)
		for _, c := range x.data { // what is said to it is of no interest
			go io.Copy(io.Discard, c)
		}
		for i := range uint32(8) {
			x.grant(i)
		}
		x.e.Do(Transmit{Conn: x.conn, ID: 3, Blocks: []DataBlock{{Head: DataHead{Nonce: 7, Round: 9, Index: 1, Length: 100}}}})
		if r.IntN(4) > 0 {
			for _, c := range x.data {
				_, _ = c.Write(appendDescription(nil, "fake", x.description))
			}
		}
		for range r.IntN(40) {
			i := uint32(r.IntN(9))
			var b []byte
			h := DataHead{Nonce: 7, Round: 1, Index: i, Length: getBytes}
			switch r.IntN(60) {
			default:
				h = x.offered(i % 8)
				if r.IntN(4) == 0 {
					h.At = r.Uint64() >> r.IntN(64)
				}
			case 6:
				h.Kind, h.At = DataTaken, uint64(r.IntN(4))
			case 7:
				h = DataHead{Kind: DataTaken, Nonce: 7, Round: 9, Index: 1, Length: 100, At: uint64(r.IntN(3))}
			case 8, 12, 13, 14, 15:
				b = frame(getID(i), i, getBytes)
			case 9:
				b = appendDescription(nil, []string{"fake", "", "x"}[r.IntN(3)], x.description[:r.IntN(len(x.description)+1)])
			case 10:
				h.Kind, h.At, h.Length = DataKind(r.IntN(5)), uint64(r.IntN(3)), uint64(r.IntN(1<<20))
			case 11, 16, 17, 18, 19:
				x.e.Do(Revoke{Conn: x.conn, Nonce: 7, Round: 1, Indexes: []uint32{i}})
				continue
			}
			kinds[h.Kind]++
			if b == nil {
				b = headBytes(h)
			}
			if _, err := x.data[r.IntN(2)].Write(b); err != nil {
				break
			}
		}
		if r.IntN(2) == 0 {
			x.Conn.Close()
		} else {
			x.e.Do(CloseConn{Conn: x.conn, Text: "enough"})
		}
		x.e.waitFor("Lost", func(ev netEvent) bool { return ev.conn == x.conn })
	}
	s := x.e.Stats()
	t.Logf("%+v %v", s, kinds)
	if s.Gets == 0 || s.GetsFailed == 0 || s.Violations == 0 || s.Posted != 0 {
		t.Errorf("%+v", s)
	}
}
