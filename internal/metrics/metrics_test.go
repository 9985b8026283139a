package metrics

import (
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

func TestBucketsCoverEveryDuration(t *testing.T) {
	next := time.Duration(0)
	for i := range bucketsMax {
		if bucketOf(next) != i || bucketOf(below(i)-1) != i {
			t.Fatalf("bucket %d: first %v is in %d, last %v in %d", i, next, bucketOf(next), below(i)-1, bucketOf(below(i)-1))
		}
		if width := below(i) - next; width > 1 && width*16 > next {
			t.Fatalf("bucket %d from %v is %v wide", i, next, width)
		}
		next = below(i)
	}
	if next != 1<<powers || bucketOf(-1) != 0 || bucketOf(1<<62) != bucketsMax-1 {
		t.Fatal("ends", next, bucketOf(-1), bucketOf(1<<62))
	}
}

func TestQuantile(t *testing.T) {
	var h Histogram
	if h.Quantile(0.5) != 0 {
		t.Fatal("empty histogram has a median")
	}
	rng := rand.New(rand.NewPCG(1, 2))
	var all []time.Duration
	for range 10000 {
		d := time.Duration(rng.ExpFloat64() * float64(time.Millisecond))
		all = append(all, d)
		h.Observe(d)
	}
	slices.Sort(all)
	for _, q := range []float64{0, 0.5, 0.9, 0.99, 1} {
		want := all[min(int(q*10000), 9999)]
		if got := h.Quantile(q); got < want || float64(got) > float64(want)*17/16 {
			t.Errorf("quantile %v: %v, want %v", q, got, want)
		}
	}
}

func TestSetExports(t *testing.T) {
	s := NewSet("fs")
	s.Lookup.Observe(2 * time.Microsecond)
	s.Lookup.Observe(time.Hour)
	s.Tier(0).Write.Observe(time.Second)
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(s)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	byName := map[string]*dto.Histogram{}
	for _, f := range families {
		byName[f.GetName()] = f.Metric[0].Histogram
	}
	if len(byName) != 4 || byName["terrace_tier_read_duration_seconds"].GetSampleCount() != 0 {
		t.Fatalf("families: %v", families)
	}
	l := byName["terrace_lookup_duration_seconds"]
	if l.GetSampleCount() != 2 || l.GetSampleSum() < 3600 {
		t.Errorf("lookup: %v", l)
	}
	for _, b := range l.Bucket {
		want := uint64(0)
		if b.GetUpperBound() > 2e-6 {
			want = 1
		}
		if b.GetCumulativeCount() != want {
			t.Errorf("le %v: %d, want %d", b.GetUpperBound(), b.GetCumulativeCount(), want)
		}
	}
	if w := byName["terrace_tier_write_duration_seconds"]; w.GetSampleCount() != 1 || w.GetSampleSum() != 1 {
		t.Errorf("write: %v", w)
	}
}

func TestObserveFromManyGoroutines(t *testing.T) {
	var h Histogram
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for i := range 1000 {
				h.Observe(time.Duration(i))
			}
		})
	}
	wg.Wait()
	if h.Count() != 4000 {
		t.Fatal(h.Count())
	}
	if n := testing.AllocsPerRun(100, func() { h.Observe(time.Millisecond) }); n != 0 {
		t.Fatalf("%v allocations", n)
	}
}

func BenchmarkObserve(b *testing.B) {
	var h Histogram
	b.ReportAllocs()
	for b.Loop() {
		h.Observe(12345)
	}
}
