package object

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/terrace-kv/terrace"
	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/client"
	nodes "github.com/terrace-kv/terrace/internal/node"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/fstier"
	"github.com/terrace-kv/terrace/tier/objtier"
	"github.com/terrace-kv/terrace/tier/tiertest"
)

// load is traffic that goes on until it is stopped: prompts are stored, and
// looked up again later.
type load struct {
	n       *node
	stop    context.CancelFunc
	wg      sync.WaitGroup
	hits    atomic.Int64
	stored  atomic.Int64
	asked   atomic.Int64
	slowest atomic.Int64 // time of a request, ns
}

// traffic starts load of some engines' requests. Prompts of 8 blocks come from
// a pool of so many.
func (n *node) traffic(engines, prompts int) *load {
	l := &load{n: n}
	ctx, cancel := context.WithCancel(context.Background())
	l.stop = cancel
	for e := range engines {
		r := rand.New(rand.NewPCG(uint64(e), 1))
		l.wg.Go(func() {
			for ctx.Err() == nil {
				ks := keys(fmt.Sprint("load ", r.IntN(prompts)), 8)
				begin := time.Now()
				hits, err := n.get(context.Background(), ks, 2*time.Second)
				if err == nil && hits < len(ks) {
					var st client.Stored
					st, err = n.put(context.Background(), ks, false)
					if errors.Is(err, client.ErrNoRoom) {
						err = nil
					}
					l.stored.Add(int64(st.Stored))
				}
				if err != nil {
					n.t.Errorf("engine %d: %v", e, err)
					return
				}
				l.hits.Add(int64(hits))
				l.asked.Add(1)
				took := int64(time.Since(begin))
				for old := l.slowest.Load(); took > old && !l.slowest.CompareAndSwap(old, took); old = l.slowest.Load() {
				}
			}
		})
	}
	n.t.Cleanup(l.end)
	return l
}

func (l *load) end() {
	l.stop()
	l.wg.Wait()
}

// advance waits for so many more requests.
func (l *load) advance(requests int64) {
	l.n.t.Helper()
	to := l.asked.Load() + requests
	eventually(l.n.t, waitMax, "traffic", func() error {
		if at := l.asked.Load(); at < to {
			return fmt.Errorf("%d requests, want %d", at, to)
		}
		return nil
	})
}

// fs opens a filesystem tier that a node then owns.
func (s *store) fs(capacity int64) terrace.Tier {
	s.t.Helper()
	tr, err := fstier.Open(s.t.Context(), fstier.Options{Root: s.t.TempDir(), Capacity: capacity, MinFree: -1, Logger: s.logger()})
	if err != nil {
		s.t.Fatal(err)
	}
	return terrace.Tier{Tier: tr}
}

// The server dies, and later hangs, under load: the node serves on from its
// other tiers, and uses the bucket again soon after it can.
func TestServerDiesAndHangsUnderLoad(t *testing.T) {
	const blockBytes, openMax = 64 << 10, 400 * time.Millisecond
	s := versity(t, false)
	lane := terrace.Lane{ReadParallel: 8, WriteParallel: 8}
	lane.Breaker.OpenBase, lane.Breaker.OpenMax, lane.Breaker.Window = 100*time.Millisecond, openMax, time.Second
	lane.Retry.Base, lane.Retry.Max = 10*time.Millisecond, 50*time.Millisecond
	o := s.tier(func(o *objtier.Options) {
		o.S3.ConnectTimeout, o.S3.HeaderTimeout = time.Second, time.Second
		o.PresentFor = 2 * time.Second
	})
	// Less room in the primary than the prompts need, and less on disk.
	n := start(t, s, blockBytes, 8<<20, s.fs(16<<20), terrace.Tier{Tier: o, Lane: lane})
	l := n.traffic(3, 64)
	look := func() (obj, fs *nodes.TierStatus, st terrace.Status) {
		st = n.Status()
		return of(&st, "object"), of(&st, "fs"), st
	}
	used := func(what string, since time.Time) {
		before, _, _ := look()
		hits, written := before.Hits, before.WrittenBlocks
		for _, k := range []string{"write", "read"} {
			eventually(t, waitMax, what+", "+k, func() error {
				f, _, _ := look()
				if f.WriteHealth != "closed" || f.ReadHealth != "closed" || f.Hits == hits || f.WrittenBlocks == written {
					return fmt.Errorf("writes %s, reads %s, %d hits, %d written: %s", f.WriteHealth, f.ReadHealth, f.Hits-hits, f.WrittenBlocks-written, f.LastError)
				}
				return nil
			})
		}
		t.Logf("%s: in use %v later", what, time.Since(since).Round(time.Millisecond))
	}
	used("at first", time.Now())
	boot := n.Status().BootID
	for round := range sized(2, 10) {
		for _, how := range []string{"killed", "hung"} {
			begin := time.Now()
			if how == "killed" {
				s.versity.Kill()
			} else if err := syscall.Kill(s.versity.PID(), syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			eventually(t, waitMax, "an open breaker after it was "+how, func() error {
				if f, _, _ := look(); f.WriteHealth != "open" && f.ReadHealth != "open" {
					return fmt.Errorf("writes %s, reads %s", f.WriteHealth, f.ReadHealth)
				}
				return nil
			})
			opened := time.Since(begin)
			_, fs, st := look()
			fsHits, hits := fs.Hits, st.Primary.Hits
			l.advance(100)
			_, fs, st = look()
			if fs.Hits == fsHits || st.Primary.Hits == hits {
				t.Errorf("%s: other tiers had %d and %d hits meanwhile", how, fs.Hits-fsHits, st.Primary.Hits-hits)
			}
			if how == "killed" {
				if err := s.versity.Restart(t.Context()); err != nil {
					t.Fatal(err)
				}
			} else if err := syscall.Kill(s.versity.PID(), syscall.SIGCONT); err != nil {
				t.Fatal(err)
			}
			back := time.Now()
			used(fmt.Sprintf("round %d, %s; breaker open after %v; back", round, how, opened.Round(time.Millisecond)), back)
		}
	}
	l.end()
	st := n.idle()
	f := of(&st, "object")
	t.Logf("%d requests, %d blocks hit, %d stored, slowest request %v; lookups p50 %.0f µs, p99 %.0f µs; object tier: %d hits, failures %v, dropped %v",
		l.asked.Load(), l.hits.Load(), l.stored.Load(), time.Duration(l.slowest.Load()).Round(time.Millisecond), st.Lookups.P50us, st.Lookups.P99us, f.Hits, f.Failures, f.Dropped)
	if st.BootID != boot || f.Corrupt != 0 {
		t.Errorf("boot id %s, was %s; %d corrupt", st.BootID, boot, f.Corrupt)
	}
	if sum := total(f.Failures) + total(f.Dropped); sum == 0 {
		t.Error("nothing was counted")
	}
}

func total(m map[string]int64) (n int64) {
	for _, v := range m {
		n += v
	}
	return n
}

// resources are what a process holds.
type resources struct {
	goroutines, files int
	heap              uint64
}

func holds(t *testing.T) resources {
	t.Helper()
	runtime.GC()
	runtime.GC() // what the first one freed for pools and finalizers
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return resources{runtime.NumGoroutine(), len(fds), m.HeapAlloc}
}

// faultMix are the faults of a bad network and an overloaded store.
func faultMix(seed uint64) string {
	return fmt.Sprintf(`status(503, SlowDown) when randomly(0.05, %d)
disconnect when randomly(0.02, %d)
torn(700) when and(randomly(0.01, %d), key("*/b/*"))
flip when and(randomly(0.01, %d), key("*/b/*"))
delay(200ms) when and(randomly(0.005, %d), key("*/b/*"))
`, seed, seed+1, seed+2, seed+3, seed+4)
}

// Nothing is held any more after ten thousand calls, of which many fail.
func TestNoLeaks(t *testing.T) {
	total, workers := sized(raceOr(2000, 10_000), 50_000), 16
	s := fake(t, nil)
	// Faults are those of the mix, but delays are shorter, and most failures of
	// the store do not ask for fewer requests, which would be obeyed.
	set := s.proxy(`status(503, SlowDown) when randomly(0.005, 99)` + "\n" + strings.NewReplacer("200ms", "5ms", "503, SlowDown", "500").Replace(faultMix(7)))
	set.Toggle(false)
	ns := namespace(t, 8<<10)
	var classes [8]atomic.Int64
	run := func(ops int, faults bool) {
		tr := s.tier(nil)
		set.Toggle(faults)
		var wg sync.WaitGroup
		var left atomic.Int64
		left.Store(int64(ops))
		for w := range workers {
			wg.Go(func() {
				r := rand.New(rand.NewPCG(uint64(w), 2))
				it := []tier.Item{{Buf: tiertest.Buffer(t, ns.BlockBytes(0))}}
				for left.Add(-1) >= 0 {
					it[0].Key = keys("leak", 200)[r.IntN(200)]
					ctx, cancel := context.WithTimeout(context.Background(), time.Duration(1+r.IntN(400))*time.Millisecond)
					switch x := r.IntN(20); {
					case x < 8:
						tiertest.Fill(ns, &it[0])
						tr.Write(ctx, ns, it)
					case x < 16:
						tr.Read(ctx, ns, it)
						if it[0].Err == nil && tiertest.Check(ns, &it[0]) != nil {
							// A flipped bit is the lane's to find.
							it[0].Err = tr.SetAside(ctx, ns, it[0].Key, "test")
						}
					case x < 18:
						it[0].Err = tr.Contains(ctx, ns, []block.Key{it[0].Key}, make([]bool, 1))
					default:
						it[0].Err = tr.Delete(ctx, ns, []block.Key{it[0].Key})
					}
					cancel()
					classes[tier.ClassOf(it[0].Err)].Add(1)
				}
			})
		}
		wg.Wait()
		set.Toggle(false)
		ctx, cancel := context.WithTimeout(context.Background(), waitMax)
		defer cancel()
		if err := tr.Close(ctx); err != nil {
			t.Error(err)
		}
	}
	run(200, false) // fills pools and tables of this process
	var before resources
	settled := func() resources {
		var r resources
		eventually(t, waitMax, "connections to end", func() error {
			s.calm()
			r = holds(t)
			if before.files > 0 && (r.files > before.files || r.goroutines > before.goroutines) {
				return fmt.Errorf("%+v, before %+v", r, before)
			}
			return nil
		})
		return r
	}
	before = settled()
	begin := time.Now()
	run(total, true)
	took := time.Since(begin)
	after := settled()
	t.Logf("%d calls in %v with %d faults; before %+v, after %+v; outcomes by class %v", total, took.Round(time.Millisecond), set.Injected(), before, after, counts(classes[:]))
	if after.heap > before.heap+16<<20 {
		t.Errorf("the heap grew from %d to %d bytes", before.heap, after.heap)
	}
	if set.Injected() < int64(total)/50 {
		t.Errorf("%d faults are no test", set.Injected())
	}
}

func counts(a []atomic.Int64) (out []string) {
	for i := range a {
		if n := a[i].Load(); n > 0 {
			out = append(out, fmt.Sprintf("%s %d", tier.Class(i), n))
		}
	}
	return out
}
