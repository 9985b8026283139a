package node

import (
	"context"
	"encoding/binary"
	"errors"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/content"
	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/memtier"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const blockBytes = 6000 // not a multiple of a page, so that padding is in play

func space1(t testing.TB, model string) *block.Namespace {
	ns, err := block.NewNamespace(block.Spec{Model: model, DType: "bytes", Layout: "content", HashAlgorithm: "sha256", HashLength: 32,
		Groups: []block.Group{{Kind: block.KindFull, TokensPerBlock: 16, BlockBytes: blockBytes}}})
	if err != nil {
		t.Fatal(err)
	}
	return ns
}

func keys(lo, hi int) []block.Key {
	var out []block.Key
	for i := lo; i < hi; i++ {
		var h [32]byte
		binary.BigEndian.PutUint64(h[:], uint64(i))
		k, _ := block.NewKey(h[:], 0)
		out = append(out, k)
	}
	return out
}

// eng is an engine in the node's own process.
type eng struct {
	t  testing.TB
	n  *Node
	s  *Session
	ns *block.Namespace
}

func openNode(t testing.TB, blocks int, tiers []tier.Tier, mod func(*Options)) *Node {
	t.Helper()
	o := Options{Core: core.Options{Size: int64(blocks) * 8192, ExtentBytes: 1 << 20}}
	for _, x := range tiers {
		o.Tiers = append(o.Tiers, TierSpec{Tier: x})
	}
	if mod != nil {
		mod(&o)
	}
	n, err := Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := n.Close(ctx); err != nil && !t.Failed() {
			t.Errorf("close: %v", err)
		}
	})
	return n
}

func greet(t testing.TB, n *Node, ns *block.Namespace) *eng {
	t.Helper()
	s, err := n.OpenSession(t.Context(), Greeting{NS: ns})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return &eng{t, n, s, ns}
}

func (e *eng) request(id string) {
	e.t.Helper()
	if err := e.s.NewRequest(id, core.NoLimits()); err != nil {
		e.t.Fatal(err)
	}
}

func (e *eng) store(id string, ks []block.Key, sum bool) int {
	e.t.Helper()
	return e.storeFrom(id, 0, ks, sum)
}

// storeAt stores blocks of which the first is not the request's first.
func (e *eng) storeAt(id string, first int, ks []block.Key) int {
	e.t.Helper()
	return e.storeFrom(id, first, ks, true)
}

func (e *eng) storeFrom(id string, first int, ks []block.Key, sum bool) int {
	e.t.Helper()
	g, err := e.s.Reserve(id, 0, first, ks, nil)
	if err != nil {
		e.t.Fatal(err)
	}
	var fills []core.Fill
	for i := range g {
		if g[i].Status != core.Granted {
			continue
		}
		b := e.n.arena.Bytes(g[i].Slot.Offset(), blockBytes)
		content.Fill(e.ns.Fingerprint(), ks[i], b)
		f := core.Fill{Slot: g[i].Slot, Gen: g[i].Gen}
		if sum {
			f.Sum, f.HasSum = Checksum(b), true
		}
		fills = append(fills, f)
	}
	st, err := e.s.Commit(id, fills, nil)
	if err != nil {
		e.t.Fatal(err)
	}
	for _, x := range st {
		if x != core.FillOK {
			e.t.Fatalf("commit: %v", st)
		}
	}
	return len(fills)
}

func (e *eng) flush(id string) core.Flushed {
	e.t.Helper()
	c := make(chan core.Flushed, 1)
	if err := e.s.Flush(id, 10*time.Second, func(f core.Flushed) { c <- f }); err != nil {
		e.t.Fatal(err)
	}
	return <-c
}

// load looks up, waits, and checks every byte; it returns the blocks read.
func (e *eng) load(id string, ks []block.Key) int {
	e.t.Helper()
	a := &core.Answer{}
	c := make(chan *core.Answer, 1)
	pending, err := e.s.Lookup(id, [][]block.Key{ks}, false, 20*time.Second, a, func(a *core.Answer) { c <- a })
	if err != nil {
		e.t.Fatal(err)
	}
	if pending {
		a = <-c
	}
	if !a.Final {
		e.t.Fatalf("not final: %+v", a)
	}
	for i, l := range a.Groups[0].Leases {
		b := e.n.arena.Bytes(l.Slot.Offset(), blockBytes)
		if at := content.Check(e.ns.Fingerprint(), ks[i], b); at >= 0 {
			e.t.Fatalf("block %d is wrong at byte %d", i, at)
		}
		if Checksum(b) != l.Sum {
			e.t.Fatalf("block %d: wrong sum", i)
		}
	}
	return len(a.Groups[0].Leases)
}

func (e *eng) finish(id string) {
	e.t.Helper()
	if err := e.s.Finish(id); err != nil {
		e.t.Fatal(err)
	}
}

// idle checks that the node is as it should be when nothing is going on.
func idle(t testing.TB, n *Node) {
	t.Helper()
	if err := n.CheckInvariants(); err != nil {
		t.Fatal(err)
	}
	s := n.Status()
	if x := s.Tables; x.Requests+x.Pins+x.Reservations+x.Jobs+x.Waits+x.Quarantined != 0 {
		t.Fatalf("tables: %+v", x)
	}
	p := s.Primary
	if p.FreeBytes+p.EvictableBytes+p.RemainderBytes != p.CapacityBytes {
		t.Fatalf("primary: %+v", p)
	}
}

func TestBytesSurviveEvictionAndPromotion(t *testing.T) {
	for _, indexed := range []bool{true, false} {
		for _, sum := range []bool{true, false} {
			var m tier.Tier = memtier.New(memtier.Options{})
			if indexed {
				m = memtier.NewIndexed(memtier.Options{})
			}
			n := openNode(t, 64, []tier.Tier{m}, nil)
			a, b := greet(t, n, space1(t, "m")), greet(t, n, space1(t, "m"))
			for r := range 10 {
				ks := keys(r*40, r*40+40)
				a.request("a")
				if got := a.load("a", ks); got != 0 {
					t.Fatalf("%d blocks of nothing", got)
				}
				a.store("a", ks, sum)
				if f := a.flush("a"); !f.Done || f.Cascaded != 40 {
					t.Fatalf("%+v", f)
				}
				a.finish("a")
			}
			for r := range 10 {
				b.request("b")
				if got := b.load("b", keys(r*40, r*40+40)); got != 40 {
					t.Fatalf("read %d of 40", got)
				}
				b.finish("b")
			}
			idle(t, n)
			if n.set.Tier(0).Read.Count() == 0 || n.set.Tier(0).Write.Count() == 0 {
				t.Error("tier calls were not observed")
			}
			if s := n.Status(); s.Tiers[0].Hits == 0 || s.Tiers[0].Hits+s.Primary.Hits != 400 {
				t.Fatalf("%d + %d hits", s.Tiers[0].Hits, s.Primary.Hits)
			}
		}
	}
}

func TestHungReadFailsInTimeAndFreesLater(t *testing.T) {
	m := memtier.NewIndexed(memtier.Options{})
	n := openNode(t, 64, []tier.Tier{m}, func(o *Options) { o.Core.PromoteTimeout = 50 * time.Millisecond })
	e := greet(t, n, space1(t, "m"))
	e.request("a")
	e.store("a", keys(0, 40), true)
	e.flush("a")
	e.finish("a")
	e.request("b") // evicts some
	e.store("b", keys(100, 140), true)
	e.flush("b")
	e.finish("b")
	release := make(chan struct{})
	m.SetHook(func(_ context.Context, op memtier.Op, _ *block.Namespace, _ block.Key) memtier.Fault {
		if op == memtier.OpRead {
			return memtier.Fault{Wait: release, Hang: true}
		}
		return memtier.Fault{}
	})
	e.request("c")
	if got := e.load("c", keys(0, 40)); got == 40 {
		t.Fatal("hung reads were hits")
	}
	if s := n.Status(); s.Tables.Quarantined == 0 || s.Tables.Jobs == 0 {
		t.Fatalf("slots are free while a read can still touch them: %+v", s.Tables)
	}
	e.finish("c")
	close(release)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if what := n.waitIdle(ctx); what != "" {
		t.Fatal(what)
	}
	idle(t, n)
	if s := n.Status(); s.Tiers[0].Late == 0 {
		t.Fatal("late results were not counted")
	}
}

func TestCloseNamesWhatHangs(t *testing.T) {
	m := memtier.NewIndexed(memtier.Options{})
	n, err := Open(t.Context(), Options{Core: core.Options{Size: 64 * 8192}, Tiers: []TierSpec{{Tier: m}}})
	if err != nil {
		t.Fatal(err)
	}
	release := make(chan struct{})
	m.SetHook(func(_ context.Context, op memtier.Op, _ *block.Namespace, _ block.Key) memtier.Fault {
		if op == memtier.OpWrite {
			return memtier.Fault{Wait: release, Hang: true}
		}
		return memtier.Fault{}
	})
	s, err := n.OpenSession(t.Context(), Greeting{NS: space1(t, "m")})
	if err != nil {
		t.Fatal(err)
	}
	e := &eng{t, n, s, s.space.ns}
	e.request("a")
	e.store("a", keys(0, 4), true)
	s.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	begin := time.Now()
	err = n.Close(ctx)
	if err == nil || !strings.Contains(err.Error(), "mem") || !strings.Contains(err.Error(), "write") {
		t.Fatalf("error does not say what hangs: %v", err)
	}
	if took := time.Since(begin); took > 15*time.Second {
		t.Fatalf("close took %v", took)
	}
	if again := n.Close(ctx); again == nil || again.Error() != err.Error() {
		t.Fatalf("second close: %v", again)
	}
	close(release)
}

func TestNameStandsForOneNamespace(t *testing.T) {
	n := openNode(t, 8, nil, nil)
	a, err := n.OpenSession(t.Context(), Greeting{NS: space1(t, "m"), Name: "prod"})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	spec := space1(t, "m").Spec()
	spec.DType = "fp8"
	other, err := block.NewNamespace(spec)
	if err != nil {
		t.Fatal(err)
	}
	if _, err = n.OpenSession(t.Context(), Greeting{NS: other, Name: "prod"}); !errors.Is(err, tier.ErrNamespaceMismatch) || !strings.Contains(err.Error(), "dtype") {
		t.Fatalf("%v", err)
	}
	b, err := n.OpenSession(t.Context(), Greeting{NS: other})
	if err != nil {
		t.Fatal(err)
	}
	b.Close()
}

func TestSessionEndFreesSlotsOnlyWhenNobodyMaps(t *testing.T) {
	n := openNode(t, 8, nil, nil)
	s, err := n.OpenSession(t.Context(), Greeting{NS: space1(t, "m")})
	if err != nil {
		t.Fatal(err)
	}
	l, err := s.Attach() // its own descriptor stands for the engine's
	if err != nil {
		t.Fatal(err)
	}
	e := &eng{t, n, s, s.space.ns}
	e.request("a")
	if _, err := s.Reserve("a", 0, 0, keys(0, 4), nil); err != nil {
		t.Fatal(err)
	}
	s.Close()
	if _, err := s.Attach(); !errors.Is(err, core.ErrNoSession) {
		t.Fatalf("attach after close: %v", err)
	}
	if s.settle() {
		t.Fatal("settled while the descriptor is open")
	}
	if st := n.Status(); st.Tables.Quarantined != 4 {
		t.Fatalf("%+v", st.Tables)
	}
	if err := l.HandOver(); err != nil { // nobody got it, so the lock goes
		t.Fatal(err)
	}
	deadline := time.Now().Add(5 * time.Second)
	for n.Status().Tables.Quarantined != 0 {
		if time.Now().After(deadline) {
			t.Fatal("slots are still quarantined")
		}
		poke(n.reap)
		time.Sleep(time.Millisecond)
	}
	idle(t, n)
}
