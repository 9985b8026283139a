package peer

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/invariants"
)

// A fetch that closes a lookup was taken for admitted, and its keys were not
// looked at: a group that no namespace has would have ended the process.
func TestFetchThatClosesALookupIsChecked(t *testing.T) {
	b := newBox(t, Options{LookupsPerSec: 1 << 20})
	c := b.accept("p")
	b.hear(c, b.lookupOf(1, 1, 1))
	b.served(one(t, of[Serve](b.take())).ID, pinned(1))
	for i := range RoundsMax - 1 {
		b.m.Received(b.now, c, b.fetchOf(2, uint32(i+1), false, 7))
	}
	b.take()
	f := b.fetchOf(1, 1, false, 1)
	bad, _ := block.NewKey(make([]byte, 32), 99)
	f.Keys = append(f.Keys, bad)
	b.hear(c, f)
	fx := b.take()
	if s := of[Serve](fx); len(s) != 0 {
		t.Errorf("the core is asked for a group that the namespace does not have: %v", s)
	}
	if b.m.Stats().Violations != 1 {
		t.Error("it is no violation")
	}
	b.empty()
}

// An abort was acknowledged once the core had answered, which may take longer
// than the consumer waits; it then ended the session.
func TestAbortWhileTheCoreIsAsked(t *testing.T) {
	for _, lookup := range []bool{false, true} {
		b := newBox(t, Options{})
		c := b.accept("p")
		if lookup {
			b.hear(c, b.lookupOf(1, 1, 1, 2))
		} else {
			b.hear(c, b.fetchOf(1, 1, false, 1, 2))
		}
		id := one(t, of[Serve](b.take())).ID
		b.hear(c, &Abort{Nonce: 1, Round: 1})
		fx := b.take()
		one(t, sends[*AbortAck](fx))
		if e := one(t, of[ServeEnd](fx)); e.ID != id {
			t.Errorf("serve %d ended", e.ID)
		}
		b.m.Served(b.now, id, []Found{pinned(1), absent}) // late, and of nobody
		if fx := b.take(); len(fx) != 0 {
			t.Errorf("a late answer of the core has effects: %v", fx)
		}
		b.empty()
	}
}

// Pins of a dead peer stayed until the core had answered.
func TestPeerIsLostWhileTheCoreIsAsked(t *testing.T) {
	b := newBox(t, Options{})
	c := b.accept("p")
	b.hear(c, b.fetchOf(1, 1, false, 1, 2))
	b.hear(c, b.lookupOf(2, 1, 3))
	b.take()
	b.lose(c)
	if n := len(of[ServeEnd](b.take())); n != 2 || b.m.Stats().Serves != 0 {
		t.Errorf("%d serves have ended, %d are left", n, b.m.Stats().Serves)
	}
	b.empty()
}

// What was pinned and queued when a supply ended was taken back, and the
// consumer heard of it at its own deadline.
func TestSupplyEndsWhileItIsSent(t *testing.T) {
	b := newBox(t, Options{})
	c := b.accept("p")
	b.supply("kv", 1, SupplyOpen)
	b.hear(c, b.fetchOf(1, 1, true, 1, 2, 3))
	id := one(t, of[Serve](b.take())).ID
	b.served(id, pinned(1), pinned(2), absent)
	b.take()
	b.supply("kv", 1, SupplyFinal)
	fx := b.take()
	if s := of[Serve](fx); len(s) == 1 {
		b.served(id, absent)
		fx = append(fx, b.take()...)
	}
	if f := one(t, sends[*Failed](fx)); f.Code != CodeAbsent || !slices.Equal(f.Indexes, []uint32{2}) {
		t.Errorf("of a final supply is told %+v", f)
	}
	b.supply("kv", 1, SupplyEnded)
	if u := of[Unsend](b.take()); len(u) != 0 {
		t.Error("what is pinned is taken back")
	}
	b.sent(id, 0, true)
	b.sent(id, 1, true)
	one(t, of[ServeEnd](b.take()))
	b.hear(c, b.fetchOf(2, 1, true, 1))
	if f := one(t, sends[*Failed](b.take())); f.Code != CodeEnded {
		t.Errorf("a late fetch fails with %v", f.Code)
	}
	b.empty()
}

func TestSupplyEndsBeforeAllIsFound(t *testing.T) {
	b := newBox(t, Options{})
	c := b.accept("p")
	b.supply("kv", 1, SupplyOpen)
	b.hear(c, b.fetchOf(1, 1, true, 1, 2))
	id := one(t, of[Serve](b.take())).ID
	b.served(id, absent, absent)
	b.hear(c, b.fetchOf(1, 2, true, 3, 4)) // the core is asked as the supply ends
	other := one(t, of[Serve](b.take())).ID
	b.supply("kv", 1, SupplyEnded)
	if f := one(t, sends[*Failed](b.take())); f.Round != 1 || f.Code != CodeEnded || len(f.Indexes) != 2 {
		t.Errorf("told %+v", f)
	}
	b.served(other, pinned(3), absent)
	fx := b.take()
	if f := one(t, sends[*Failed](fx)); f.Round != 2 || f.Code != CodeEnded || !slices.Equal(f.Indexes, []uint32{1}) {
		t.Errorf("told %+v", f)
	}
	b.sent(other, 0, true)
	one(t, of[ServeEnd](b.take()))
	b.empty()
}

// Each key of an accepted fetch is answered, also those that were queued when
// its time was over.
func TestWhatWasNotSentInTimeIsTold(t *testing.T) {
	b := newBox(t, Options{})
	c := b.accept("p")
	b.hear(c, b.fetchOf(1, 1, false, 1, 2, 3))
	id := one(t, of[Serve](b.take())).ID
	b.served(id, pinned(1), pinned(2), pinned(3))
	b.sent(id, 0, true)
	b.take()
	b.live(21 * time.Second)
	one(t, of[Unsend](b.take()))
	b.sent(id, 2, false)
	b.sent(id, 1, true) // was being written
	if f := one(t, sends[*Failed](b.take())); f.Code != CodeTimeout || !slices.Equal(f.Indexes, []uint32{2}) {
		t.Errorf("told %+v", f)
	}
	b.empty()
}

// A consumer that is preempted in mid-load has not got what it came for: its
// next attempt must find the hand-over.
func TestCancelledFetchIsNotComplete(t *testing.T) {
	for _, c := range []struct {
		what string
		role Role
		end  func(b *box, conn ConnID, f *Fetch)
		want bool
	}{
		{"all came", RoleAssume, func(b *box, conn ConnID, f *Fetch) { b.m.Arrived(b.now, conn, f.Nonce, f.Round, 1, true, 2) }, true},
		{"all came to one who only looked", RoleProbe, func(b *box, conn ConnID, f *Fetch) { b.m.Arrived(b.now, conn, f.Nonce, f.Round, 1, true, 2) }, false},
		{"cancelled", RoleAssume, func(b *box, conn ConnID, f *Fetch) { b.m.Cancel(b.now, 1) }, false},
		{"finished in mid-load", RoleAssume, func(*box, ConnID, *Fetch) {}, false},
		{"failed", RoleAssume, func(b *box, conn ConnID, f *Fetch) {
			b.hear(conn, &Failed{Nonce: f.Nonce, Round: f.Round, Code: CodeAbsent, Indexes: []uint32{1}})
		}, false},
		{"corrupt", RoleAssume, func(b *box, conn ConnID, f *Fetch) { b.m.Arrived(b.now, conn, f.Nonce, f.Round, 1, false, 2) }, false},
	} {
		b := newBox(t, Options{})
		b.source(1, "p:1", c.role)
		b.submit(1, 1, 1, 2)
		conn := b.dial("p:1", "p")
		f := one(t, sends[*Fetch](b.take()))
		b.m.Arrived(b.now, conn, f.Nonce, f.Round, 0, true, 1)
		c.end(b, conn, f)
		b.m.CloseSource(b.now, 1)
		if got := one(t, sends[*Finished](b.take())).Complete; got != c.want {
			t.Errorf("%s: complete is %v", c.what, got)
		}
		b.empty()
	}
}

// Only who has fetched a hand-over can give it up, and not while another still
// fetches it.
func TestHandOverIsGivenUpByItsFetcher(t *testing.T) {
	b := newBox(t, Options{})
	c, other := b.accept("p"), b.accept("q")
	fin := func(conn ConnID, nonce uint64) int {
		b.hear(conn, &Finished{ID: "kv", Nonce: nonce, NS: b.ns.Fingerprint(), Complete: true})
		return len(of[ReleaseSupply](b.take()))
	}
	b.supply("kv", 1, SupplyOpen)
	b.supply("kv", 1, SupplyFinal)
	if fin(other, 99) != 0 {
		t.Error("one who never asked for it has given it up")
	}
	b.hear(c, b.fetchOf(1, 1, true, 1))
	b.hear(other, b.fetchOf(2, 1, true, 1))
	s := of[Serve](b.take())
	b.served(s[0].ID, pinned(1))
	b.served(s[1].ID, pinned(1))
	b.sent(s[0].ID, 0, true)
	if fin(c, 1) != 0 {
		t.Error("it is given up while another fetches it")
	}
	b.sent(s[1].ID, 0, true)
	if e := one(t, of[ReleaseSupply](b.take())); e.Seq != 1 {
		t.Errorf("%d is given up", e.Seq)
	}
	b.supply("kv", 1, SupplyEnded)
	b.empty()
}

// What the core says it does not have may be there by the time it says so: it is
// asked once more, and no more than that.
func TestNewsWhileTheCoreIsAsked(t *testing.T) {
	b := newBox(t, Options{})
	c := b.accept("p")
	b.supply("kv", 1, SupplyOpen)
	b.hear(c, b.fetchOf(1, 1, true, 1, 2))
	id := one(t, of[Serve](b.take())).ID
	b.supply("kv", 1, SupplyMore)
	b.supply("kv", 1, SupplyMore)
	if len(of[Serve](b.take())) != 0 {
		t.Error("the core is asked while it is asked")
	}
	b.served(id, absent, absent)
	one(t, of[Serve](b.take()))
	b.served(id, absent, pinned(2))
	if len(of[Serve](b.take())) != 0 {
		t.Error("the core is asked again and again")
	}
	b.supply("kv", 1, SupplyMore)
	if e := one(t, of[Serve](b.take())); len(e.Keys) != 1 {
		t.Errorf("%d keys are asked for", len(e.Keys))
	}
	b.supply("kv", 1, SupplyEnded)
	b.empty()
}

// Of several requests under one id the newest counts, also after it is gone.
func TestSupplyIsFinalByItsNewest(t *testing.T) {
	b := newBox(t, Options{})
	c := b.accept("p")
	b.supply("kv", 1, SupplyOpen)
	b.supply("kv", 2, SupplyOpen)
	b.supply("kv", 2, SupplyFinal)
	b.supply("kv", 2, SupplyEnded)
	b.hear(c, b.fetchOf(1, 1, true, 1))
	id := one(t, of[Serve](b.take())).ID
	b.served(id, absent)
	if f := sends[*Failed](b.take()); len(f) != 0 {
		t.Errorf("request 1 still stores, and the fetch is told %+v", f[0])
	}
	b.supply("kv", 1, SupplyMore)
	b.served(one(t, of[Serve](b.take())).ID, pinned(1))
	b.sent(id, 0, true)
	b.supply("kv", 1, SupplyFinal)
	b.supply("kv", 1, SupplyEnded)
	b.empty()
}

// A node that was stopped for a while finds its timers due and its peers' frames
// unread: nobody is dead for that.
func TestOwnStopIsNoDeath(t *testing.T) {
	b := newBox(t, Options{})
	c := b.accept("p")
	b.live(10 * time.Second)
	b.now += Time(20 * time.Second)
	b.m.Tick(b.now)
	b.look()
	if b.m.Stats().Deaths != 0 {
		t.Error("the peer was taken for dead because this node had stopped")
	}
	b.hear(c, &Pong{})
	b.live(20 * time.Second)
	b.take()
	b.pass(7 * time.Second) // not a sign of it now
	if b.m.Stats().Deaths != 1 {
		t.Error("the peer is silent and not dead")
	}
	b.empty()
}

// Engines can name any address.
func TestAddressesAreBounded(t *testing.T) {
	b := newBox(t, Options{})
	const n = 5000
	for i := range n {
		seq := uint64(i + 1)
		_ = b.m.OpenSource(b.now, Source{Seq: seq, Addr: fmt.Sprintf("h%d:1", i), ID: "kv", Role: RoleAssume, NS: b.ns.Fingerprint()})
		b.m.Submit(b.now, JobID(seq), seq, []Item{{Key: simKey(1), Length: 4096}}, b.now+Time(time.Minute))
	}
	b.look()
	s := b.m.Stats()
	if s.Links > 1024 || len(of[Dial](b.fx)) > 1024 || s.Rounds > 1024 {
		t.Errorf("%d addresses, %d dials, %d rounds wait", s.Links, len(of[Dial](b.fx)), s.Rounds)
	}
	reports := of[Report](b.take())
	if len(reports) != n-s.Rounds {
		t.Errorf("%d are refused, %d wait", len(reports), s.Rounds)
	}
	for i := range n {
		b.m.CloseSource(b.now, uint64(i+1))
		if i < 1024 {
			b.m.DialFailed(b.now, fmt.Sprintf("h%d:1", i), "no")
		}
	}
	b.source(n+1, "new:1", RoleAssume) // takes the place of one that is only remembered
	b.submit(n+1, n+1, 1)
	one(t, of[Dial](b.take()))
	b.m.CloseSource(b.now, n+1)
	b.m.DialFailed(b.now, "new:1", "no")
	b.empty()
}

// Requests that come one after the other find a peer that fails down for longer
// each time.
func TestBackOffOutlivesRequests(t *testing.T) {
	b := newBox(t, Options{})
	dials := 0
	for i := range 200 { // one each 100 ms
		seq := uint64(i + 1)
		b.source(seq, "p:1", RoleAssume)
		b.submit(JobID(seq), seq, 1)
		if n := len(of[Dial](b.take())); n > 0 {
			dials += n
			b.m.DialFailed(b.now, "p:1", "refused")
		}
		b.m.CloseSource(b.now, seq)
		b.pass(100 * time.Millisecond)
	}
	if dials < 4 || dials > 10 {
		t.Errorf("%d dials in 20 s", dials)
	}
	for _, down := range []bool{true, false} { // why is told for as long as it is the last that was heard
		i := b.m.Peers(b.now)[0]
		if (i.State == "down") != down || i.Why != "dial: refused" {
			t.Errorf("%+v", i)
		}
		b.now = b.m.links["p:1"].down
	}
	b.empty()
}

// What ends one request must not cost what all others have.
func TestCloseSourceLooksAtItsOwn(t *testing.T) {
	cost := func(others int) time.Duration {
		b := newBox(t, Options{})
		b.accept("p")
		open := func(seq uint64) {
			_ = b.m.OpenSource(b.now, Source{Seq: seq, Addr: "p:1", ID: "kv", Role: RoleAssume, NS: b.ns.Fingerprint()})
			b.m.Submit(b.now, JobID(seq), seq, []Item{{Key: simKey(1), Length: 4096}}, b.now+Time(time.Minute))
			b.m.TakeEffects(nil)
		}
		for i := range others {
			open(uint64(i + 1))
		}
		var took []time.Duration
		for i := range 50 {
			seq := uint64(others + i + 1)
			open(seq)
			began := time.Now()
			b.m.CloseSource(b.now, seq)
			took = append(took, time.Since(began))
			b.m.TakeEffects(nil)
		}
		return slices.Min(took) // which other work on the machine does not change
	}
	if few, many := cost(10), cost(20_000); many > 20*few+20*time.Microsecond {
		t.Errorf("%v with 10 sources of others, %v with 20,000", few, many)
	}
}

// A block sent must not cost what all other fetches of the peer have.
func TestSentLooksAtItsOwn(t *testing.T) {
	cost := func(fetches int) time.Duration {
		b := newBox(t, Options{QuotaBytes: 64 * 4096})
		c := b.accept("p")
		for i := range fetches {
			b.m.Received(b.now, c, b.fetchOf(uint64(i+1), 1, false, upTo(KeysMax)...))
		}
		var took []time.Duration
		for len(took) < 1000 {
			fx := b.m.TakeEffects(nil)
			if len(fx) == 0 {
				t.Fatal("nothing is asked or sent any more")
			}
			for _, e := range fx {
				switch e := e.(type) {
				case Serve:
					found := make([]Found, len(e.Keys))
					for i := range found {
						found[i] = pinned(uint64(i))
					}
					b.m.Served(b.now, e.ID, found)
				case Transmit:
					for _, x := range e.Blocks {
						began := time.Now()
						b.m.Sent(b.now, e.ID, x.Head.Index, true)
						took = append(took, time.Since(began))
					}
				}
			}
		}
		if err := b.m.CheckInvariants(); err != nil {
			t.Error(err)
		}
		return slices.Min(took) // which other work on the machine does not change
	}
	if few, many := cost(1), cost(128); many > 20*few+20*time.Microsecond {
		t.Errorf("%v with one fetch, %v with 128", few, many)
	}
}

// All peers together cannot pin the primary.
func TestPeersTogetherAreBounded(t *testing.T) {
	b := newBox(t, Options{QuotaBytes: 4 * 4096})
	var conns []ConnID
	for i := range 6 {
		c := b.accept(fmt.Sprint("p", i))
		conns = append(conns, c)
		b.hear(c, b.fetchOf(1, 1, false, 1, 2, 3, 4, 5, 6))
		for _, s := range of[Serve](b.take()) {
			found := make([]Found, len(s.Keys))
			for i := range found {
				found[i] = pinned(uint64(i))
			}
			b.served(s.ID, found...)
		}
	}
	if p := b.m.Stats().Pinned; p > 8*4096 {
		t.Errorf("six peers have %d bytes pinned", p)
	}
	// All get all of it in the end.
	got := map[ConnID]int{}
	for n := 0; n < 1000; n++ {
		fx := b.take()
		for _, e := range of[Serve](fx) {
			found := make([]Found, len(e.Keys))
			for i := range found {
				found[i] = pinned(uint64(i))
			}
			b.served(e.ID, found...)
		}
		for _, v := range b.m.serves {
			for i := range v.keys {
				if x := b.audit.serve(v.id).sending; x != nil {
					if _, ok := x[uint32(i)]; ok {
						got[v.s.conn]++
						b.sent(v.id, uint32(i), true)
						break
					}
				}
			}
		}
	}
	for _, c := range conns {
		if got[c] != 6 {
			t.Errorf("connection %d got %d blocks", c, got[c])
		}
	}
	b.empty()
}

// A node that tells of its namespaces again and again has them parsed again and
// again.
func TestNamespacesAreNotParsedForEver(t *testing.T) {
	b := newBox(t, Options{})
	c := b.accept("p")
	for i := range 100_000 {
		ns := testSpec(func(s *block.Spec) { s.Model = fmt.Sprint("m", i) })
		b.m.Received(b.now, c, &Namespaces{Specs: [][]byte{ns.JSON()}})
		if b.m.Stats().Violations > 0 {
			break
		}
		if i > 2000 {
			t.Fatal("no end of it")
		}
	}
	b.empty()
}

func TestNodeWithoutNameIsRefused(t *testing.T) {
	b := newBox(t, Options{})
	b.source(1, "p:1", RoleProbe)
	b.probe(1, 1, 1)
	b.take()
	mine := b.connected("p:1")
	c := b.connected("")
	b.hear(c, &Hello{Version: Version, Boot: "1", Advertise: "x:1", Window: 2})
	if b.m.sessions[mine].state != sessionDialed {
		t.Error("a greeting without a name has ended another session")
	}
	if b.m.sessions[c].state != sessionClosing {
		t.Error("it is welcome")
	}
	b.m.CloseSource(b.now, 1)
	b.empty()
}

func TestExplainOnce(t *testing.T) {
	b := newBox(t, Options{})
	b.source(1, "p:1", RoleAssume)
	b.submit(1, 1, 1, 2)
	c := b.connected("p:1")
	b.hear(c, &Welcome{Version: Version, Node: "p", Boot: "1", Advertise: "p:1"})
	seeds := testSpec(func(s *block.Spec) { other := "other"; s.HashSeed = &other })
	long := testSpec(func(s *block.Spec) { s.Model = "n"; s.Groups[0].BlockBytes = 8192 })
	b.hear(c, &Namespaces{Specs: [][]byte{long.JSON(), seeds.JSON()}})
	f := one(t, sends[*Fetch](b.take()))
	for range 100 {
		b.hear(c, &Failed{Nonce: f.Nonce, Round: f.Round, Code: CodeNamespace, Indexes: []uint32{0}})
	}
	n := of[Note](b.take())
	if len(n) != 1 || !strings.Contains(n[0].Text, "hash_seed") {
		t.Errorf("%d notes: %v", len(n), n)
	}
	b.m.CloseSource(b.now, 1)
	b.empty()
}

// A peer that lives, and whose blocks do not come, is not asked for a while.
func TestPeerThatAnswersNothingIsNotAsked(t *testing.T) {
	b := newBox(t, Options{})
	b.source(1, "p:1", RoleProbe)
	b.submit(1, 1, 1)
	c := b.dial("p:1", "p")
	for job := JobID(1); job < 10; job++ {
		if job > 1 {
			b.submit(job, 1, 1)
		}
		f := sends[*Fetch](b.take())
		if len(f) == 0 {
			if job != lateMax+1 {
				t.Errorf("it is asked %d times", job-1)
			}
			break
		}
		if job > lateMax {
			t.Fatal("it is asked again and again")
		}
		b.live(30 * time.Second)
		b.m.Cancel(b.now, job)
		b.look()
		if n := of[Note](b.fx); len(n) == 0 || n[0].Text != "1 of 1 blocks did not come in time" || n[0].Peer != "p at p:1" {
			t.Errorf("of a late block is said: %v", n)
		}
		b.hear(c, &AbortAck{Nonce: f[0].Nonce, Round: f[0].Round})
		b.m.Detached(b.now, c, f[0].Nonce, f[0].Round, 0)
		b.look()
	}
	b.live(time.Second)
	b.submit(100, 1, 1) // it is tried again
	f := one(t, sends[*Fetch](b.take()))
	b.m.Arrived(b.now, c, f.Nonce, f.Round, 0, true, 1)
	b.submit(101, 1, 1)
	one(t, sends[*Fetch](b.take()))
	b.m.CloseSource(b.now, 1)
	b.empty()
}

// A session of which one connection is half-open, so that its pings come and some
// of its blocks never do, is ended.
func TestHalfOpenDataConnection(t *testing.T) {
	for _, whole := range []bool{false, true} { // one load in between that is whole
		b := newBox(t, Options{})
		b.source(1, "p:1", RoleProbe)
		b.submit(1, 1, 1, 2)
		c := b.dial("p:1", "p")
		for job := JobID(1); job <= lateMax; job++ {
			if b.m.sessions[c].state == sessionClosing {
				t.Fatalf("it is ended after %d loads", job-1)
			}
			if job > 1 {
				b.submit(job, 1, 1, 2)
			}
			f := one(t, sends[*Fetch](b.take()))
			b.m.Arrived(b.now, c, f.Nonce, f.Round, 0, true, 1)
			if whole && job == 2 {
				b.m.Arrived(b.now, c, f.Nonce, f.Round, 1, true, 1)
				continue
			}
			b.live(30 * time.Second)
			b.m.Cancel(b.now, job)
			b.hear(c, &AbortAck{Nonce: f.Nonce, Round: f.Round})
			b.m.Detached(b.now, c, f.Nonce, f.Round, 1)
		}
		if ended := b.m.sessions[c].state == sessionClosing; ended == whole {
			t.Errorf("it is ended: %v, a load between was whole: %v", ended, whole)
		}
		b.m.Lost(b.now, c, "")
		b.m.CloseSource(b.now, 1)
		b.empty()
	}
}

// Garbage in payloads has an end as well.
func TestPeerThatSendsGarbageIsLeft(t *testing.T) {
	b := newBox(t, Options{})
	b.source(1, "p:1", RoleProbe)
	b.submit(1, 1, upTo(64)...)
	c := b.dial("p:1", "p")
	f := one(t, sends[*Fetch](b.take()))
	for i := range 64 {
		b.m.Arrived(b.now, c, f.Nonce, f.Round, uint32(i), false, 1)
		b.look()
		if b.m.sessions[c].state == sessionClosing {
			if i < 3 {
				t.Errorf("left after %d", i+1)
			}
			break
		}
	}
	if b.m.sessions[c].state != sessionClosing {
		t.Error("64 blocks of garbage, and the session goes on")
	}
	b.m.CloseSource(b.now, 1)
	b.empty()
}

// In a drain no hand-over can begin: who waits for one hears so.
func TestDrainRefusesWhatIsParked(t *testing.T) {
	b := newBox(t, Options{})
	c := b.accept("p")
	b.hear(c, b.fetchOf(1, 1, true, 1))
	b.served(one(t, of[Serve](b.take())).ID, absent)
	b.m.Drain(b.now)
	if f := one(t, sends[*Failed](b.take())); f.Code != CodeDraining {
		t.Errorf("code %v", f.Code)
	}
	b.hear(c, b.fetchOf(1, 2, true, 1))
	if f := one(t, sends[*Failed](b.take())); f.Code != CodeDraining {
		t.Errorf("code %v", f.Code)
	}
	b.empty()
}

// Fetches without a lookup ask the core as lookups do.
func TestFetchesAreBoundedInTime(t *testing.T) {
	b := newBox(t, Options{LookupsPerSec: 10})
	c := b.accept("p")
	ask := func(from, n int) (served int) {
		for i := range n {
			b.hear(c, b.fetchOf(uint64(from+i), 1, false, 1))
			for _, e := range of[Serve](b.take()) {
				served++
				b.served(e.ID, absent)
			}
		}
		b.take()
		return served
	}
	if n := ask(1, 100); n != 10 {
		t.Errorf("%d of 100 at once", n)
	}
	b.live(500 * time.Millisecond)
	if n := ask(1000, 100); n != 5 {
		t.Errorf("%d of 100 half a second later", n)
	}
	if b.m.Stats().Refused[CodeBusy] != 185 {
		t.Errorf("%d refused", b.m.Stats().Refused[CodeBusy])
	}
	b.empty()
}

// A connection that is there when another has taken its place is not greeted.
func TestDialThatNobodyNeeds(t *testing.T) {
	b := newBox(t, Options{})
	b.source(1, "p:1", RoleProbe)
	b.probe(1, 1, 1)
	b.accept("p")
	c := b.connected("p:1")
	fx := b.take()
	if len(of[Send](fx)) > 0 || len(of[CloseConn](fx)) != 1 || b.m.sessions[c].state != sessionClosing {
		t.Errorf("%v", fx)
	}
	b.lose(c)
	if s := b.m.Stats(); s.Rounds != 1 || s.Sessions != 1 {
		t.Errorf("%+v", s)
	}
	b.m.CloseSource(b.now, 1)
	b.empty()
}

// Nobody is dead for not having answered on a connection that has ended.
func TestAbortsEndWithTheirSession(t *testing.T) {
	b := newBox(t, Options{})
	b.source(1, "p:1", RoleProbe)
	b.submit(1, 1, 1)
	c := b.dial("p:1", "p")
	b.m.Cancel(b.now, 1)
	b.m.Close(b.now)
	b.lose(c)
	b.pass(10 * time.Second)
	if s := b.m.Stats(); s.Deaths != 0 || s.Timers > 1 {
		t.Errorf("%+v", s)
	}
	b.m.CloseSource(b.now, 1)
	b.empty()
}

func TestAttemptsAtASupplyAreBounded(t *testing.T) {
	b := newBox(t, Options{})
	c := b.accept("p")
	b.supply("kv", 1, SupplyOpen)
	for nonce := range uint64(100) {
		b.hear(c, b.fetchOf(nonce, 1, true, 1))
		b.hear(c, &Finished{ID: "kv", Nonce: nonce, NS: b.ns.Fingerprint()})
	}
	if n := len(b.m.supplies[supplyKey{b.ns.Fingerprint(), "kv"}].takers); n != takersMax {
		t.Errorf("%d attempts are remembered", n)
	}
	b.supply("kv", 1, SupplyEnded)
	b.empty()
}

// A session that was idle is begun again at once, whoever asks while it ends.
func TestIdleIsNoFailure(t *testing.T) {
	b := newBox(t, Options{})
	b.source(1, "p:1", RoleProbe)
	b.probe(1, 1, 1)
	c := b.dial("p:1", "p")
	b.take()
	b.hear(c, &Bye{Code: CodeIdle})
	b.submit(2, 1, 1)
	if len(of[Dial](b.take())) != 0 {
		t.Error("it is dialed while it ends")
	}
	b.lose(c)
	fx := b.take()
	one(t, of[Dial](fx))
	if n := of[Note](fx); len(n) != 0 {
		t.Errorf("%v", n)
	}
	b.m.DialFailed(b.now, "p:1", "no")
	b.m.CloseSource(b.now, 1)
	b.empty()
}

func TestRoundsOfAPeerAreBounded(t *testing.T) {
	b := newBox(t, Options{LookupsPerSec: 1 << 20, ParkedMax: 3})
	c := b.accept("p")
	busy := func(from, n int, await bool) (refused int) {
		for i := range n {
			b.m.Received(b.now, c, b.fetchOf(uint64(from+i), 1, await, 1))
		}
		for _, f := range sends[*Failed](b.take()) {
			if f.Code == CodeBusy {
				refused++
			}
		}
		return refused
	}
	if n := busy(1, 10, true); n != 7 {
		t.Errorf("%d of 10 for an id that nobody has heard of are refused", n)
	}
	if n := busy(100, RoundsMax, false); n != 3 {
		t.Errorf("%d are refused", n)
	}
	b.hear(c, b.lookupOf(5000, 1, 1))
	if a := one(t, sends[*Answer](b.take())); a.Code != CodeBusy {
		t.Errorf("a lookup is answered %v", a.Code)
	}
	b.empty()
}

// Fetches of 4096 keys each, far fewer than RoundsMax, took 600 MB for one peer.
func TestKeysOfAPeerAreBounded(t *testing.T) {
	b := newBox(t, Options{LookupsPerSec: 1 << 20, ParkedMax: 1 << 20})
	c := b.accept("p")
	many := make([]int, KeysMax)
	for i := range many {
		many[i] = i
	}
	const fit = RoundKeysMax / KeysMax
	busy := func() (n int) {
		for _, f := range sends[*Failed](b.take()) {
			if f.Code == CodeBusy {
				n++
			}
		}
		return n
	}
	b.hear(c, b.lookupOf(5000, 1, 1))
	b.served(one(t, of[Serve](b.take())).ID, pinned(1))
	b.take()
	for i := range fit + 2 {
		b.m.Received(b.now, c, b.fetchOf(uint64(1+i), 1, true, many...))
	}
	if n := busy(); n != 3 {
		t.Errorf("%d of %d are refused, want 3", n, fit+2)
	}
	b.m.Received(b.now, c, b.fetchOf(7000, 1, true, 1))
	b.m.Received(b.now, c, b.fetchOf(5000, 1, false, many...)) // closes the lookup, with far more
	if n := busy(); n != 1 {
		t.Error("what closes a lookup may have any number")
	}
	for i := range fit {
		b.hear(c, &Abort{Nonce: uint64(1 + i), Round: 1})
	}
	b.take()
	b.hear(c, b.lookupOf(6000, 1, many...))
	if len(of[Serve](b.take())) != 1 {
		t.Error("there is no room again")
	}
	b.hear(c, &Abort{Nonce: 6000, Round: 1})
	b.hear(c, &Abort{Nonce: 7000, Round: 1})
	b.empty()
}

// A fetch for a hand-over that nobody here had begun in time was told that it had
// ended: it never began.
func TestParkedFetchTimesOut(t *testing.T) {
	b := newBox(t, Options{ParkTimeout: 3 * time.Second})
	c := b.accept("p")
	f := b.fetchOf(1, 1, true, 1)
	f.WaitMS = 60_000
	b.hear(c, f)
	b.served(one(t, of[Serve](b.take())).ID, absent)
	b.take()
	b.pass(3 * time.Second)
	if f := one(t, sends[*Failed](b.take())); f.Code != CodeTimeout {
		t.Errorf("it failed with %v", f.Code)
	}
	b.empty()
}

// Who says "duplicate" each time is not dialed as fast as it can say so.
func TestDuplicateIsDialedAgainInAWhile(t *testing.T) {
	b := newBox(t, Options{})
	b.source(1, "p:1", RoleProbe)
	b.probe(1, 1, 1)
	dials := 0
	for range 300 {
		for range of[Dial](b.take()) {
			dials++
			c := b.connected("p:1")
			b.hear(c, &Bye{Code: CodeDuplicate})
			b.lose(c)
		}
		b.pass(10 * time.Millisecond)
	}
	if dials < 2 || dials > 40 {
		t.Errorf("%d dials in 3 s", dials)
	}
	b.m.CloseSource(b.now, 1)
	b.empty()
}

// What was asked on a connection that gives way to another is asked there again.
func TestRoundsMoveToTheOtherConnection(t *testing.T) {
	b := newBox(t, Options{Node: "z"})
	b.source(1, "p:1", RoleAssume)
	b.submit(1, 1, 1, 2)
	b.probe(2, 1, 3)
	c := b.dial("p:1", "p")
	f := one(t, sends[*Fetch](b.take()))
	b.m.Arrived(b.now, c, f.Nonce, f.Round, 0, true, 1)
	b.hear(c, &Bye{Code: CodeDuplicate})
	b.lose(c)
	b.take()
	d := b.connected("")
	b.hear(d, hello("p", "1"))
	if g := one(t, of[Grant](b.take())); g.Index != 1 {
		t.Errorf("block %d is granted again", g.Index)
	}
	if s := b.m.Stats(); s.Rounds != 2 || s.Failures[CodeUnreachable] != 0 {
		t.Fatalf("%+v", s)
	}
	b.m.Arrived(b.now, d, f.Nonce, f.Round, 1, true, 2)
	if r := of[Report](b.take()); len(r) == 0 || !r[len(r)-1].Last {
		t.Errorf("reports %v", r)
	}
	b.m.CloseSource(b.now, 1)
	b.empty()
}

func TestLookupsAreBoundedInTime(t *testing.T) {
	b := newBox(t, Options{LookupsPerSec: 10})
	c := b.accept("p")
	got := 0
	for i := range 35 {
		b.hear(c, b.lookupOf(1, uint32(i+1), 1))
		fx := b.take()
		for _, e := range of[Serve](fx) {
			got++
			b.served(e.ID, absent)
		}
		if a := sends[*Answer](fx); len(a) == 1 && a[0].Code != CodeBusy && a[0].Code != CodeOK {
			t.Errorf("refused with %v", a[0].Code)
		}
		if i == 19 {
			b.live(time.Second)
		}
	}
	if got != 20 {
		t.Errorf("%d lookups of two seconds", got)
	}
	b.empty()
}

// A namespace that the peer has not shown, or that this node does not have, is
// one that nobody is told anything of; and the log says which field it is.
func TestWrongNamespace(t *testing.T) {
	for field, mod := range map[string]func(*block.Spec){
		"hash_seed":  func(s *block.Spec) { x := "0"; s.HashSeed = &x },
		"groups":     func(s *block.Spec) { s.Groups[0].BlockBytes = 8192 },
		"dtype":      func(s *block.Spec) { s.DType = "other" },
		"hash_bytes": func(s *block.Spec) { s.HashLength = 16 },
	} {
		theirs := testSpec(mod)

		b := newBox(t, Options{})
		c := b.connected("")
		b.hear(c, hello("p", "1"))
		b.hear(c, &Namespaces{Specs: [][]byte{theirs.JSON()}})
		b.take()
		for _, ns := range []*block.Namespace{b.ns, theirs} {
			l, f := b.lookupOf(1, 1, 1), b.fetchOf(1, 2, true, 1)
			l.NS, f.NS = ns.Fingerprint(), ns.Fingerprint()
			b.hear(c, l)
			b.hear(c, f)
			fx := b.take()
			if a, d := one(t, sends[*Answer](fx)), one(t, sends[*Failed](fx)); a.Code != CodeNamespace || d.Code != CodeNamespace || len(of[Serve](fx)) > 0 {
				t.Errorf("%s: answered %v and %v", field, a.Code, d.Code)
			}
		}
		b.hear(c, &Finished{ID: "kv", Nonce: 1, NS: b.ns.Fingerprint(), Complete: true})

		b.source(1, "p:1", RoleProbe)
		b.probe(1, 1, 1)
		l := one(t, sends[*Lookup](b.take()))
		b.hear(c, &Answer{Nonce: l.Nonce, Round: l.Round, Code: CodeNamespace})
		note := one(t, of[Note](b.fx)).Text
		if !strings.Contains(note, strings.ReplaceAll(field, "hash_bytes", "hash_length")) {
			t.Errorf("of another %s is said: %s", field, note)
		}
		b.m.CloseSource(b.now, 1)
		b.empty()
	}
}

func TestRefusedGreetings(t *testing.T) {
	for _, c := range []struct {
		what   string
		hello  func(h *Hello)
		before func(b *box)
		want   Code
	}{
		{"another version", func(h *Hello) { h.Version++ }, nil, CodeVersion},
		{"itself", func(h *Hello) { h.Node = "me" }, nil, CodeSelf},
		{"no name", func(h *Hello) { h.Node = "" }, nil, CodeProtocol},
		{"no run", func(h *Hello) { h.Boot = "" }, nil, CodeProtocol},
		{"no data connections", func(h *Hello) { h.Window = 0 }, nil, CodeProtocol},
		{"too many", func(h *Hello) { h.Window = DataConnsMax + 1 }, nil, CodeProtocol},
		{"a drain", func(*Hello) {}, func(b *box) { b.m.Drain(b.now) }, CodeDraining},
		{"two sessions already", func(*Hello) {}, func(b *box) { b.accept("q"); b.accept("r") }, CodeBusy},
		{"a session with it", func(*Hello) {}, func(b *box) { b.accept("p") }, CodeDuplicate},
	} {
		b := newBox(t, Options{SessionsMax: 2})
		if c.before != nil {
			c.before(b)
		}
		b.take()
		conn := b.connected("")
		h := hello("p", "1")
		c.hello(h)
		b.hear(conn, h)
		fx := b.take()
		if bye := one(t, sends[*Bye](fx)); bye.Code != c.want {
			t.Errorf("%s: refused with %v, want %v", c.what, bye.Code, c.want)
		}
		if len(of[Expect](fx)) > 0 {
			t.Errorf("%s: data connections are expected", c.what)
		}
		b.empty()

		b = newBox(t, Options{})
		b.source(1, "p:1", RoleProbe)
		b.probe(1, 1, 1)
		conn = b.connected("p:1")
		w := &Welcome{Version: h.Version, Node: h.Node, Boot: h.Boot, Advertise: h.Advertise}
		b.hear(conn, w)
		if refused := c.want == CodeVersion || c.want == CodeSelf || w.Node == "" || w.Boot == ""; refused != (b.m.sessions[conn].state == sessionClosing) {
			t.Errorf("%s: the welcome was taken, or another was not", c.what)
		}
		b.m.CloseSource(b.now, 1)
		b.empty()
	}
}

var hostileSeeds = flag.Int("peer.hostileseeds", 150, "runs against peers and transports that do anything")

// No peer, whatever it says, and no transport, however late it is, makes a
// machine panic, grow, tell twice or forget.
func TestAnythingFromAPeer(t *testing.T) {
	seeds, steps := *hostileSeeds, 400
	if invariants.Enabled {
		seeds = min(seeds, 30)
	}
	fresh := uint64(time.Now().UnixNano())
	t.Logf("fresh seed %d", fresh)
	var sum Stats
	for seed := range uint64(seeds) {
		if seed == 0 {
			seed = fresh
		}
		b := newBox(t, Options{QuotaBytes: 5 * 4096, PinnedMax: 8 * 4096, SessionsMax: 6, ParkedMax: 3, EndedMax: 4, LinksMax: 3, LookupsPerSec: 20, IdleTimeout: 10 * time.Second})
		h := &hostile{box: b, rng: rand.New(rand.NewPCG(seed, 3)), grants: map[ConnID][]Grant{}}
		for i := range steps {
			h.step()
			if p := b.m.Stats(); p.Pinned > 8*4096 || p.Links > 3 || p.Ended > 4 || h.live() > 6+4 {
				t.Fatalf("seed %d, step %d: %+v", seed, i, p)
			}
		}
		for seq := range uint64(12) {
			b.supply("a", seq, SupplyFinal)
			b.supply("a", seq, SupplyEnded)
			b.supply("b", seq, SupplyFinal)
			b.supply("b", seq, SupplyEnded)
			b.m.CloseSource(b.now, seq)
			b.look()
		}
		s := b.m.Stats()
		sum.Violations += s.Violations
		sum.Blocks += s.Blocks
		sum.SentBlocks += s.SentBlocks
		sum.Lookups += s.Lookups
		sum.Fetches += s.Fetches
		sum.Strays += s.Strays
		for _, addr := range []string{"p:1", "q:1", "r:1", "s:1"} {
			b.m.DialFailed(b.now, addr, "no")
		}
		b.empty()
	}
	t.Logf("%+v", sum)
	if n := int64(seeds) / 2; sum.Violations < n || sum.Blocks < n || sum.SentBlocks < n || sum.Lookups < n || sum.Fetches < n {
		t.Error("too tame, or too wild")
	}
}

type hostile struct {
	*box
	rng    *rand.Rand
	job    JobID
	grants map[ConnID][]Grant
	asked  []Serve
	out    []Transmit
}

// live counts sessions that are not ending.
func (h *hostile) live() (n int) {
	for _, s := range h.m.sessions {
		if s.state != sessionClosing {
			n++
		}
	}
	return n
}

func (h *hostile) pick(names ...string) string { return names[h.rng.IntN(len(names))] }

func (h *hostile) keys() []int {
	var out []int
	for range 1 + h.rng.IntN(6) {
		out = append(out, h.rng.IntN(30)) // twice the same at times
	}
	return out
}

// nonce is one of those that are in use, or about so.
func (h *hostile) nonce() uint64 {
	for seq := range uint64(11) {
		if s := h.m.sources[seq]; s != nil && h.rng.IntN(2) == 0 {
			return s.nonce
		}
	}
	return uint64(h.rng.IntN(3))
}

func (h *hostile) message() Message {
	round := uint32(h.rng.IntN(4))
	ns := h.ns.Fingerprint()
	if h.rng.IntN(30) == 0 {
		ns[0]++
	}
	code := Code(h.rng.IntN(int(codeEnd)))
	switch h.rng.IntN(26) {
	case 0:
		m := hello(h.pick("p", "q", "me", "z"), h.pick("1", "2"))
		m.Advertise = h.pick("p:1", "q:1", "me:1", "")
		return m
	case 1:
		return &Welcome{Version: Version, Node: h.pick("p", "q", "me"), Boot: h.pick("1", "2"), Advertise: h.pick("p:1", "q:1", "")}
	case 2, 3:
		return &Namespaces{Specs: [][]byte{h.ns.JSON()}}
	case 4:
		return &Namespaces{Specs: [][]byte{[]byte(h.pick("", "{}", "nonsense"))}}
	case 5, 6, 7, 8:
		return &Lookup{ID: h.pick("a", "b"), Nonce: h.nonce(), Round: round, NS: ns, WaitMS: uint32(h.rng.IntN(5000)), Keys: simKeys(h.keys()...)}
	case 9, 10, 11, 12, 13:
		return &Fetch{ID: h.pick("a", "b"), Nonce: h.nonce(), Round: round, NS: ns, Await: h.rng.IntN(2) == 0, WaitMS: uint32(h.rng.IntN(50000)), Keys: simKeys(h.keys()...)}
	case 14, 15:
		found := make([]byte, 2)
		found[0] = byte(h.rng.IntN(256))
		return &Answer{Nonce: h.nonce(), Round: round, Code: code * Code(h.rng.IntN(2)), Found: found[:1+h.rng.IntN(20)/19]}
	case 16, 17:
		var list []uint32
		for range h.rng.IntN(4) {
			list = append(list, uint32(h.rng.IntN(5)))
		}
		return &Failed{Nonce: h.nonce(), Round: round, Code: code, Indexes: list}
	case 18, 19:
		return &Abort{Nonce: h.nonce(), Round: round}
	case 20, 21:
		return &AbortAck{Nonce: h.nonce(), Round: round}
	case 22:
		return &Finished{ID: h.pick("a", "b"), Nonce: h.nonce(), NS: ns, Complete: h.rng.IntN(2) == 0}
	case 23:
		return &Bye{Code: code}
	}
	return &Pong{}
}

func (h *hostile) step() {
	conn := ConnID(1 + h.rng.IntN(int(h.next)+1))
	if len(h.conns) > 0 && h.rng.IntN(8) > 0 {
		conn = h.conns[h.rng.IntN(len(h.conns))]
	}
	addr := h.pick("p:1", "q:1", "r:1", "s:1")
	seq := uint64(1 + h.rng.IntN(10))
	h.job++
	switch x := h.rng.IntN(100); {
	case x < 8:
		c := h.connected("")
		h.hear(c, hello(h.pick("p", "q", "r"), h.pick("1", "1", "1", "2")))
		h.hear(c, &Namespaces{Specs: [][]byte{h.ns.JSON()}})
	case x < 14:
		c := h.connected(addr)
		if h.rng.IntN(3) > 0 {
			h.hear(c, &Welcome{Version: Version, Node: addr[:1], Boot: "1", Advertise: addr})
			h.hear(c, &Namespaces{Specs: [][]byte{h.ns.JSON()}})
		}
	case x < 16:
		h.m.DialFailed(h.now, addr, "no")
	case x < 50:
		h.hear(conn, h.message())
	case x < 54:
		if slices.Contains(h.conns, conn) {
			delete(h.grants, conn)
			h.out = slices.DeleteFunc(h.out, func(t Transmit) bool { return t.Conn == conn })
			h.lose(conn)
		}
	case x < 58:
		_ = h.m.OpenSource(h.now, Source{Seq: seq, Addr: addr, ID: h.pick("a", "b"), Role: Role(1 + h.rng.IntN(2)), NS: h.ns.Fingerprint()})
	case x < 64:
		h.submit(h.job, seq, h.keys()...)
	case x < 68:
		h.probe(h.job, seq, h.keys()...)
	case x < 70:
		h.m.Cancel(h.now, JobID(h.rng.IntN(int(h.job))))
	case x < 71:
		h.m.CloseSource(h.now, seq)
	case x < 77:
		h.supply(h.pick("a", "b"), seq, SupplyState(h.rng.IntN(4)))
	case x < 84 && len(h.asked) > 0:
		i := h.rng.IntN(len(h.asked))
		e := h.asked[i]
		h.asked = slices.Delete(h.asked, i, i+1)
		var found []Found
		for k := range e.Keys {
			f := pinned(uint64(e.ID)<<16 | uint64(k))
			if h.rng.IntN(3) == 0 {
				f = Found{Code: []Code{CodeAbsent, CodeAbsent, CodeNoRoom, CodeFailed}[h.rng.IntN(4)]}
				f.Pending = f.Code == CodeAbsent && h.rng.IntN(2) == 0
			}
			found = append(found, f)
		}
		if h.audit.asked[e.ID] {
			h.served(e.ID, found...)
		} else {
			h.m.Served(h.now, e.ID, found) // of a serve that has ended
		}
	case x < 90 && len(h.out) > 0:
		i := h.rng.IntN(len(h.out))
		t := h.out[i]
		h.out = slices.Delete(h.out, i, i+1)
		for _, b := range t.Blocks {
			h.sent(t.ID, b.Head.Index, h.rng.IntN(5) > 0)
		}
	case x < 96:
		// What was granted arrives, once; and things that were not do.
		list := h.grants[conn]
		if len(list) == 0 || h.rng.IntN(6) == 0 {
			h.m.Arrived(h.now, conn, h.nonce(), uint32(h.rng.IntN(4)), uint32(h.rng.IntN(5)), true, 1)
			break
		}
		i := h.rng.IntN(len(list))
		g := list[i]
		h.grants[conn] = slices.Delete(list, i, i+1)
		if h.rng.IntN(3) == 0 {
			h.m.Detached(h.now, conn, g.Nonce, g.Round, g.Index)
		} else {
			h.m.Arrived(h.now, conn, g.Nonce, g.Round, g.Index, h.rng.IntN(4) > 0, 1)
		}
	default:
		h.pass(time.Duration(h.rng.IntN(3000)) * time.Millisecond)
	}
	for _, e := range h.take() {
		switch e := e.(type) {
		case Serve:
			h.asked = append(h.asked, e)
		case Transmit:
			h.out = append(h.out, e)
		case Grant:
			h.grants[e.Conn] = append(h.grants[e.Conn], e)
		}
	}
}

// A peer that stops in order was told of as one that has died, at each restart.
func TestOrderlyStopIsNoWarning(t *testing.T) {
	for _, x := range []struct {
		name string
		end  func(b *box, c ConnID)
		want []bool // of the notes: whether they are warnings
	}{
		{"a stop", func(b *box, c ConnID) { b.hear(c, &Bye{Code: CodeDraining, Text: "this node is stopping"}) }, []bool{false}},
		{"idle", func(b *box, c ConnID) { b.hear(c, &Bye{Code: CodeIdle}) }, nil},
		{"duplicate", func(b *box, c ConnID) { b.hear(c, &Bye{Code: CodeDuplicate}) }, nil},
		{"a reason", func(b *box, c ConnID) { b.hear(c, &Bye{Code: CodeProtocol}) }, []bool{true}},
		{"none", func(b *box, c ConnID) {}, []bool{true}},
	} {
		b := newBox(t, Options{})
		b.source(1, "p:1", RoleProbe)
		b.submit(1, 1, 1)
		c := b.dial("p:1", "p")
		b.take()
		x.end(b, c)
		b.lose(c)
		var got []bool
		for _, n := range of[Note](b.take()) {
			if got = append(got, n.Bad); !n.Bad && (n.Text != "the peer has stopped in order: this node is stopping" || n.Peer != "p at p:1") {
				t.Errorf("%s: %+v", x.name, n)
			}
		}
		if !slices.Equal(got, x.want) {
			t.Errorf("%s: warnings %v, want %v", x.name, got, x.want)
		}
		if x.name == "a stop" { // what comes to it before it is back fails at once
			b.submit(2, 1, 1)
			if fx := b.take(); len(of[Dial](fx)) != 0 || len(of[Report](fx)) != 1 {
				t.Error(fx)
			}
			b.live(time.Second)
			b.submit(3, 1, 1)
			one(t, of[Dial](b.take()))
			b.m.DialFailed(b.now, "p:1", "refused")
			if n := one(t, of[Note](b.take())); !n.Bad {
				t.Error("a dial that fails is no warning")
			}
		}
	}
}
