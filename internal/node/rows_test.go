package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/content"
	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/memtier"
)

// No call of an engine waits for a tier. In the bubble time passes only when
// everybody waits, so with a tier that takes five seconds a call the clock must
// stand still through thousands of them (B141, B151).
func TestCallsNeverWaitForATier(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := memtier.New(memtier.Options{})
		m.SetHook(func(context.Context, memtier.Op, *block.Namespace, block.Key) memtier.Fault {
			over := make(chan struct{})
			time.AfterFunc(5*time.Second, func() { close(over) })
			return memtier.Fault{Wait: over, Hang: true}
		})
		n := openNode(t, 64, []tier.Tier{m}, nil)
		e := greet(t, n, space1(t, "m"))
		time.Sleep(time.Second) // all goroutines are at their places
		begin := time.Now()
		stored := 0
		for i := range 2000 {
			id := fmt.Sprint(i)
			e.request(id)
			for _, wait := range []time.Duration{0, time.Second} {
				_, err := e.s.Lookup(id, [][]block.Key{keys(3*i, 3*i+3)}, false, wait, &core.Answer{}, func(*core.Answer) {})
				if err != nil {
					t.Fatal(err)
				}
			}
			g, err := e.s.Reserve(id, 0, 0, keys(3*i, 3*i+2), nil)
			if err != nil && !errors.Is(err, core.ErrNoRoom) {
				t.Fatal(err)
			}
			var fills []core.Fill
			for j := range g {
				if g[j].Status == core.Granted {
					b := n.arena.Bytes(g[j].Slot.Offset(), blockBytes)
					content.Fill(e.ns.Fingerprint(), keys(3*i, 3*i+2)[j], b)
					fills = append(fills, core.Fill{Slot: g[j].Slot, Gen: g[j].Gen, Sum: Checksum(b), HasSum: true})
				}
			}
			if _, err := e.s.Commit(id, fills, nil); err != nil {
				t.Fatal(err)
			}
			stored += len(fills)
			if err := e.s.Flush(id, time.Second, func(core.Flushed) {}); err != nil {
				t.Fatal(err)
			}
			e.finish(id)
		}
		if took := time.Since(begin); took != 0 {
			t.Errorf("calls waited for %v in all", took)
		}
		if stored < 1000 || m.Calls(memtier.OpContains)+m.Calls(memtier.OpWrite) == 0 {
			t.Errorf("%d blocks stored, %d probes and %d writes begun", stored, m.Calls(memtier.OpContains), m.Calls(memtier.OpWrite))
		}
		time.Sleep(time.Hour)
		idle(t, n)
	})
}

// What one namespace has stored is a Hit in no other that differs in a single
// field, neither in the primary nor below (B080 to B089).
func TestOtherNamespacesNeverHit(t *testing.T) {
	m := memtier.NewIndexed(memtier.Options{})
	n := openNode(t, 64, []tier.Tier{m}, nil)
	x := "x"
	base := space1(t, "m").Spec()
	variants := map[string]func(s *block.Spec){
		"model":    func(s *block.Spec) { s.Model = "other" },
		"revision": func(s *block.Spec) { s.Revision = &x },
		"dtype":    func(s *block.Spec) { s.DType = "fp8" },
		"layout":   func(s *block.Spec) { s.Layout = "HND" },
		"length":   func(s *block.Spec) { s.Groups[0].BlockBytes-- },
		"ranks": func(s *block.Spec) {
			s.Ranks = &block.Ranks{TensorParallel: 2, PipelineParallel: 1, ContextParallel: 1}
		},
		"adapter": func(s *block.Spec) { s.Adapter = &x },
		"salt":    func(s *block.Spec) { s.Salt = &x },
		"seed":    func(s *block.Spec) { s.HashSeed = &x },
	}
	a := greet(t, n, space1(t, "m"))
	a.request("a")
	a.store("a", keys(0, 10), true)
	if f := a.flush("a"); f.Cascaded != 10 {
		t.Fatalf("%+v", f)
	}
	a.finish("a")
	for _, reset := range []bool{false, true} {
		if reset {
			forget(a)
		}
		for _, name := range slices.Sorted(maps.Keys(variants)) {
			s := base
			s.Groups = slices.Clone(base.Groups)
			variants[name](&s)
			ns, err := block.NewNamespace(s)
			if err != nil {
				t.Fatal(err)
			}
			b := greet(t, n, ns)
			b.request("b")
			if got := b.load("b", keys(0, 10)); got != 0 {
				t.Errorf("another %s, reset %v: %d hits", name, reset, got)
			}
			b.finish("b")
		}
	}
	a.request("a")
	if got := a.load("a", keys(0, 10)); got != 10 {
		t.Errorf("its own: %d hits", got)
	}
	a.finish("a")
	idle(t, n)
}

// forget resets the primary and waits for it.
func forget(e *eng) {
	e.t.Helper()
	c := make(chan bool, 1)
	if err := e.s.Reset(10*time.Second, func(done bool) { c <- done }); err != nil {
		e.t.Fatal(err)
	}
	if !<-c {
		e.t.Fatal("the reset has not ended")
	}
}

// Two engines store the same keys at once. Each key is written by exactly one
// of them, and the other is told that it is there or on its way (B203).
func TestTwoStoreTheSameKeys(t *testing.T) {
	const blocks = 10_000
	n := openNode(t, blocks+1000, nil, nil)
	ks := keys(0, blocks)
	var granted [2][blocks]bool
	var wg sync.WaitGroup
	for i := range 2 {
		e := greet(t, n, space1(t, "m"))
		e.request("a")
		wg.Go(func() {
			for k := range ks {
				g, err := e.s.Reserve("a", 0, 0, ks[k:k+1], nil)
				if err != nil {
					t.Error(err)
					return
				}
				switch g[0].Status {
				case core.Granted:
					granted[i][k] = true
					st, err := e.s.Commit("a", []core.Fill{{Slot: g[0].Slot, Gen: g[0].Gen, Sum: 1, HasSum: true}}, nil)
					if err != nil || st[0] != core.FillOK {
						t.Errorf("commit: %v, %v", st, err)
					}
				case core.GrantPresent, core.GrantFilling:
				default:
					t.Errorf("key %d: %v", k, g[0].Status)
				}
			}
		})
	}
	wg.Wait()
	for k := range ks {
		if granted[0][k] == granted[1][k] {
			t.Fatalf("key %d was granted to both or to none", k)
		}
	}
	if s := n.Status(); s.Stores.Committed != blocks || s.Primary.Blocks != blocks {
		t.Errorf("stores %+v, %d blocks", s.Stores, s.Primary.Blocks)
	}
}

// ending is a tier that notes its end, and may fail at it.
type ending struct {
	*memtier.Indexed
	err    error
	closed bool
}

func (x *ending) Close(ctx context.Context) error {
	x.closed = true
	return errors.Join(x.Indexed.Close(ctx), x.err)
}

// One tier hangs and another fails at its end. All are asked to end, what went
// wrong is named, and the region stays mapped for the call that hangs (B190).
func TestEachTierIsAskedToEnd(t *testing.T) { synctest.Test(t, testEachTierIsAskedToEnd) }

func testEachTierIsAskedToEnd(t *testing.T) {
	var tiers []*ending
	o := Options{Core: core.Options{Size: 64 * 8192}}
	for _, name := range []string{"first", "second", "third"} {
		x := &ending{Indexed: memtier.NewIndexed(memtier.Options{Info: tier.Info{Name: name}})}
		tiers = append(tiers, x)
		o.Tiers = append(o.Tiers, TierSpec{Tier: x})
	}
	tiers[1].err = errors.New("the second is stuck")
	release, writing := make(chan struct{}), make(chan struct{}, 100)
	tiers[0].SetHook(func(_ context.Context, op memtier.Op, _ *block.Namespace, _ block.Key) memtier.Fault {
		if op == memtier.OpWrite {
			writing <- struct{}{}
			return memtier.Fault{Wait: release, Hang: true}
		}
		return memtier.Fault{}
	})
	n, err := Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	s, err := n.OpenSession(t.Context(), Greeting{NS: space1(t, "m")})
	if err != nil {
		t.Fatal(err)
	}
	e := &eng{t, n, s, s.space.ns}
	e.request("a")
	e.store("a", keys(0, 2), true)
	<-writing
	s.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	err = n.Close(ctx)
	for _, want := range []string{"tier first", "the second is stuck", "close tier second"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the error lacks %q: %v", want, err)
		}
	}
	if err != nil && strings.Contains(err.Error(), "third") {
		t.Errorf("the third had nothing wrong: %v", err)
	}
	for _, x := range tiers {
		if !x.closed {
			t.Errorf("tier %s was not asked to end", x.Info().Name)
		}
	}
	if st := n.arena.Stats(); st.AllocatedBytes == 0 {
		t.Error("the region is unmapped under a call")
	}
	close(release)
}

// One store and one load through a tier move each counter by exactly what was
// moved, and a second load from the primary moves those of the primary (B215).
func TestCountersSayWhatMoved(t *testing.T) {
	n := openNode(t, 64, []tier.Tier{memtier.NewIndexed(memtier.Options{})}, nil)
	e := greet(t, n, space1(t, "m"))
	want := func(what string, committed, written, below, primary, hits, absent int64) {
		t.Helper()
		s := n.Status()
		x := s.Tiers[0]
		got := []int64{s.Stores.Reserved, s.Stores.Committed, x.WrittenBlocks, x.WriteBytes, x.Hits, x.ReadBytes, s.Primary.Hits, s.Lookups.Verdicts["hit"], s.Lookups.Verdicts["miss_absent"]}
		if want := []int64{committed, committed, written, written * blockBytes, below, below * blockBytes, primary, hits, absent}; !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	e.request("a")
	want("at first", 0, 0, 0, 0, 0, 0)
	if got := e.load("a", keys(0, 1)); got != 0 {
		t.Fatal(got)
	}
	want("after a miss", 0, 0, 0, 0, 0, 1)
	e.store("a", keys(0, 4), true)
	e.flush("a")
	e.finish("a")
	want("after a store", 4, 4, 0, 0, 0, 1)
	forget(e)
	for i, primary := range []int64{0, 4} {
		id := fmt.Sprint(i)
		e.request(id)
		if got := e.load(id, keys(0, 4)); got != 4 {
			t.Fatal(got)
		}
		e.finish(id)
		want("after load "+id, 4, 4, 4, primary, 4+primary, 1)
	}
}

// The region takes what was asked for, within 5 % (B118).
func TestRegionTakesWhatWasAsked(t *testing.T) {
	const size = 64 << 20
	before := shared(t)
	n := openNode(t, size/8192, nil, func(o *Options) { o.Populate = true })
	for end := time.Now().Add(20 * time.Second); n.Status().Primary.PopulatedBytes < size; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d bytes are populated", n.Status().Primary.PopulatedBytes)
		}
	}
	if took := shared(t) - before; took < size || took > size*105/100 {
		t.Errorf("a region of %d bytes takes %d", int64(size), took)
	}
}

// shared is the shared memory that this process has touched, in bytes.
func shared(t *testing.T) (bytes int64) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "RssShmem:")
	if _, err := fmt.Sscan(rest, &bytes); err != nil {
		t.Skip("the kernel does not tell shared memory apart")
	}
	return bytes << 10
}
