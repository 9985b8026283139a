package keymap

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Distributions of hashes: even, and three that an adversary would choose.
var hashes = map[string]func(r *rand.Rand) uint64{
	"even":      func(r *rand.Rand) uint64 { return r.Uint64() },
	"few":       func(r *rand.Rand) uint64 { return r.Uint64() & 0xff00000000000000 },
	"one":       func(r *rand.Rand) uint64 { return 7 << 40 },
	"one_half":  func(r *rand.Rand) uint64 { return 1<<63 | r.Uint64()>>33<<32 | r.Uint64()&1<<62 },
	"same_top":  func(r *rand.Rand) uint64 { return 0xabcd<<48 | r.Uint64()>>16 },
	"same_low":  func(r *rand.Rand) uint64 { return r.Uint64()&0xffff000000000000 | 1<<32 },
	"collision": func(r *rand.Rand) uint64 { return (r.Uint64() % 5000) * 0x9e3779b97f4a7c15 },
}

// check walks the whole structure.
func (t *Table) check(tb testing.TB) {
	tb.Helper()
	if len(t.dir) != 1<<t.depth {
		tb.Fatalf("directory has %d entries at depth %d", len(t.dir), t.depth)
	}
	n, segs := 0, 0
	for i := 0; i < len(t.dir); {
		head := t.dir[i]
		run := 1 << (t.depth - head.depth)
		for j := range run {
			if t.dir[i+j] != head {
				tb.Fatalf("directory entry %d is not its run's segment", i+j)
			}
		}
		for s := head; ; s = t.chained[s.next] {
			segs++
			count := 0
			for k, v := range s.slots {
				if v == 0 {
					continue
				}
				count++
				tag := uint32(v >> 32)
				if t.seg(tag) != head {
					tb.Fatalf("tag %x is in a segment where it is not looked for", tag)
				}
				for p := home(tag); p != uint32(k); p = (p + 1) % segSlots {
					if s.slots[p] == 0 {
						tb.Fatalf("empty slot between home and place of tag %x", tag)
					}
				}
			}
			if count != int(s.n) || count > segFill {
				tb.Fatalf("segment holds %d entries, says %d", count, s.n)
			}
			n += count
			if s.next == 0 {
				break
			}
		}
		i += run
	}
	if n != t.n || segs != t.segs {
		tb.Fatalf("%d entries in %d segments, table says %d in %d", n, segs, t.n, t.segs)
	}
}

func TestTableAgainstMap(t *testing.T) {
	for name, next := range hashes {
		ops := 150_000
		if name == "even" {
			ops = 1_000_000
		}
		if name == "one" || name == "few" {
			ops = 15_000 // linear by nature
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			seed := time.Now().UnixNano()
			t.Logf("seed %d", seed)
			r := rand.New(rand.NewPCG(uint64(seed), 1))
			table := NewTable()
			model := map[uint32]uint64{} // handle to hash
			var live []uint32            // handles, for a random choice
			fresh := uint32(0)
			find := func(h uint64, handle uint32) bool {
				got, ok := table.Find(h, func(g uint32) bool { return g == handle })
				if ok && got != handle {
					t.Fatalf("find of %d gave %d", handle, got)
				}
				return ok
			}
			grow := true // phases of growth and decay, so that both edges are met
			for op := range ops {
				if op%(ops/8) == 0 {
					grow = !grow || op == 0
				}
				x := r.IntN(10)
				switch {
				case len(live) == 0 || x < 3 || (grow && x < 7):
					fresh++
					h := next(r)
					table.Insert(h, fresh)
					model[fresh] = h
					live = append(live, fresh)
				case x < 8:
					i := r.IntN(len(live))
					g := live[i]
					if !table.Delete(model[g], g) {
						t.Fatalf("op %d: delete of %d: not there", op, g)
					}
					if table.Delete(model[g], g) || find(model[g], g) {
						t.Fatalf("op %d: %d is there after delete", op, g)
					}
					delete(model, g)
					live[i] = live[len(live)-1]
					live = live[:len(live)-1]
				default:
					g := live[r.IntN(len(live))]
					if !find(model[g], g) {
						t.Fatalf("op %d: %d is lost", op, g)
					}
					if find(next(r), fresh+1) || table.Delete(next(r), fresh+1) {
						t.Fatalf("op %d: found what was never inserted", op)
					}
				}
				if table.Len() != len(model) {
					t.Fatalf("op %d: Len is %d, want %d", op, table.Len(), len(model))
				}
			}
			table.check(t)
			for g, h := range model {
				if !find(h, g) {
					t.Fatalf("%d is lost at the end", g)
				}
			}
			if per := float64(table.Bytes()) / float64(fresh); fresh > 10_000 && per > 40 {
				t.Errorf("%.1f bytes an entry", per)
			}
			for _, g := range live {
				table.Delete(model[g], g)
			}
			table.check(t)
			if table.Len() != 0 {
				t.Errorf("Len is %d after all are deleted", table.Len())
			}
		})
	}
}

// What an entry takes does not depend on how many there are.
func TestTableSizeIsSteady(t *testing.T) {
	table, r := NewTable(), rand.New(rand.NewPCG(1, 1))
	for i := range uint32(400_000) {
		table.Insert(r.Uint64(), i+1)
		if n := table.Len(); n > 50_000 && n%5000 == 0 {
			if per := float64(table.Bytes()) / float64(n); per > 15.5 {
				t.Errorf("%.1f bytes an entry at %d", per, n)
			}
		}
	}
}

func TestTableFindDoesNotAllocate(t *testing.T) {
	table, r := NewTable(), rand.New(rand.NewPCG(1, 1))
	var last uint64
	for i := range uint32(10_000) {
		last = r.Uint64()
		table.Insert(last, i+1)
	}
	want := uint32(10_000)
	if n := testing.AllocsPerRun(100, func() {
		if _, ok := table.Find(last, func(h uint32) bool { return h == want }); !ok {
			t.Fatal("lost")
		}
	}); n != 0 {
		t.Errorf("Find allocates %v times", n)
	}
}

func TestTableConcurrentFind(t *testing.T) {
	table := NewTable()
	for i := range uint32(5000) {
		table.Insert(uint64(i)*0x9e3779b97f4a7c15, i+1)
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for i := range uint32(5000) {
				if _, ok := table.Find(uint64(i)*0x9e3779b97f4a7c15, func(h uint32) bool { return h == i+1 }); !ok {
					t.Errorf("%d is lost", i)
				}
			}
		})
	}
	wg.Wait()
}

func TestSegmentSize(t *testing.T) {
	if n := unsafe.Sizeof(segment{}); n != 8192 {
		t.Errorf("segment has %d bytes; anything but 8192 wastes an allocation class", n)
	}
}

func TestSlab(t *testing.T) {
	type entry struct{ a, b uint64 }
	var s Slab[entry]
	r := rand.New(rand.NewPCG(1, 1))
	model := map[uint32]uint64{}
	var live []uint32
	for op := range 200_000 {
		if r.IntN(10) < 6 || len(live) == 0 {
			h := s.Alloc()
			if h == 0 || *s.At(h) != (entry{}) {
				t.Fatalf("op %d: handle %d holds %v", op, h, *s.At(h))
			}
			if _, dup := model[h]; dup {
				t.Fatalf("op %d: handle %d given out twice", op, h)
			}
			*s.At(h) = entry{uint64(op), 1}
			model[h] = uint64(op)
			live = append(live, h)
			continue
		}
		i := r.IntN(len(live))
		h := live[i]
		if s.At(h).a != model[h] {
			t.Fatalf("op %d: handle %d holds %v", op, h, *s.At(h))
		}
		s.Free(h)
		delete(model, h)
		live = slices.Delete(live, i, i+1)
	}
	if s.Len() != len(model) {
		t.Errorf("Len is %d, want %d", s.Len(), len(model))
	}
	if most := 200_000 * (16 + 4); s.Bytes() > most || s.Bytes() < s.Len()*16 {
		t.Errorf("Bytes is %d", s.Bytes())
	}
}

// The entries of a real index are in a slab, and comparing costs a miss there.
type benchEntry struct {
	hash uint64
	_    [7]uint64
}

// benchFill also gives the worst insert in CPU time of the thread, because the
// wall clock also shows what else the machine does.
func benchFill(n int) (*Table, *Slab[benchEntry], time.Duration) {
	table, slab := NewTable(), new(Slab[benchEntry])
	r := rand.New(rand.NewPCG(1, 2))
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cpu := func() time.Duration {
		var ts unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts); err != nil {
			panic(err)
		}
		return time.Duration(ts.Nano())
	}
	var worst time.Duration
	for range n {
		h := r.Uint64()
		start := cpu()
		g := slab.Alloc()
		slab.At(g).hash = h
		table.Insert(h, g)
		worst = max(worst, cpu()-start)
	}
	return table, slab, worst
}

func BenchmarkTable(b *testing.B) {
	for _, n := range []int{100_000, 10_000_000} {
		table, slab, worst := benchFill(n)
		r := rand.New(rand.NewPCG(3, 3))
		pick := func() uint32 { return 1 + r.Uint32N(uint32(n)) }
		b.Run(fmt.Sprintf("find/%d", n), func(b *testing.B) {
			b.ReportAllocs()
			// The hashes are gathered first: fetching one is a miss of its own.
			keys := make([]uint64, 1<<16)
			for i := range keys {
				keys[i] = slab.At(pick()).hash
			}
			i := 0
			for b.Loop() {
				h := keys[i&(1<<16-1)]
				i++
				if _, ok := table.Find(h, func(g uint32) bool { return slab.At(g).hash == h }); !ok {
					b.Fatal("lost")
				}
			}
			b.ReportMetric(float64(table.Bytes())/float64(n), "table-B/entry")
			b.ReportMetric(float64(worst.Microseconds()), "worst-insert-us")
		})
		b.Run(fmt.Sprintf("miss/%d", n), func(b *testing.B) {
			for b.Loop() {
				h := r.Uint64()
				if _, ok := table.Find(h, func(g uint32) bool { return slab.At(g).hash == h }); ok {
					b.Fatal("found")
				}
			}
		})
		b.Run(fmt.Sprintf("delete+insert/%d", n), func(b *testing.B) {
			for b.Loop() {
				g := pick()
				h := slab.At(g).hash
				if !table.Delete(h, g) {
					b.Fatal("lost")
				}
				table.Insert(h, g)
			}
		})
	}
}
