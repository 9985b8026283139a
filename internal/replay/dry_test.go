package replay

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/internal/invariants"
)

// TestGoldenLRU is the promise of a dry run: within half a point of the golden
// ratio at each capacity that the largest request fits into.
func TestGoldenLRU(t *testing.T) {
	golden := goldenTraces(t)
	for name, file := range map[string]string{
		"mooncake_fast25_conversation": conversationFile,
		"mooncake_fast25_synthetic":    syntheticFile,
		"weka_claude_code_178":         wekaFile,
	} {
		if invariants.Enabled && file == wekaFile {
			t.Logf("%s is left to the run without race detector and invariants, where it takes seconds", file)
			continue
		}
		tr, g := loadFile(t, file), golden[name]
		for i, c := range g.Capacities {
			if c.Blocks < tr.size.Largest || invariants.Enabled && i > 0 {
				continue
			}
			t.Run(fmt.Sprintf("%s/%d", name, c.Blocks), func(t *testing.T) {
				t.Parallel()
				start := time.Now()
				p, _, err := dry(t.Context(), tr, dryOptions{policy: "lru", capacity: int64(c.Blocks)}, new(atomic.Int64))
				if err != nil {
					t.Fatal(err)
				}
				want := ratio(c.LRU, g.References)
				t.Logf("%.3f %%, golden %.3f %%, %s", 100*p.ratio(), 100*want, time.Since(start).Round(time.Millisecond))
				if math.Abs(p.ratio()-want) > 0.005 || p.References != g.References || p.Refusals != 0 {
					t.Errorf("%d of %d, %d refusals, want %d of %d", p.PrefixHits, p.References, p.Refusals, c.LRU, g.References)
				}
			})
		}
	}
}

func loadSynthetic(t testing.TB, seed uint64, conversations int) *trace {
	tr, err := load(Synthetic(seed, conversations))
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

// TestDryAgainstModel compares the core with the plain model, on traces of
// which nothing is known beforehand. Where neither pins nor refusals matter the
// two agree to the last hit, so an order of references that is wrong shows.
func TestDryAgainstModel(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 6 {
		tr := loadSynthetic(t, rng.Uint64(), 40+rng.IntN(40))
		capacity := tr.size.Largest*4 + rng.IntN(len(tr.keys)/2)
		p, c, err := dry(t.Context(), tr, dryOptions{policy: "lru", capacity: int64(capacity)}, new(atomic.Int64))
		if err != nil {
			t.Fatal(err)
		}
		if want := tr.model(capacity).hits; p.PrefixHits != want {
			t.Errorf("%d blocks for %d distinct: %d hits, model %d", capacity, len(tr.keys), p.PrefixHits, want)
		}
		if c.blocks != int64(min(capacity, len(tr.keys))) || c.stored-c.evicted != c.blocks {
			t.Errorf("%d blocks: %d resident, %d stored, %d evicted", capacity, c.blocks, c.stored, c.evicted)
		}
	}
}

func TestDryTooSmall(t *testing.T) {
	tr := loadSynthetic(t, 1, 24)
	p, c, err := dry(t.Context(), tr, dryOptions{policy: "lru", capacity: 20}, new(atomic.Int64))
	if err != nil {
		t.Fatal(err)
	}
	if p.Refusals == 0 || c.requests != int64(tr.size.Requests) || p.References != tr.size.References {
		t.Errorf("a primary of 20 blocks: %+v, %+v", p, c)
	}
}

// TestDrySecondary: with a tier below that holds everything, the hits are
// those of an unbounded cache; with a bounded one they lie between.
func TestDrySecondary(t *testing.T) {
	tr := loadSynthetic(t, 5, 60)
	capacity := int64(tr.size.Largest * 3)
	hits := func(below int64) int64 {
		p, c, err := dry(t.Context(), tr, dryOptions{policy: "lru", capacity: capacity, below: below}, new(atomic.Int64))
		if err != nil {
			t.Fatal(err)
		}
		if n := int64(len(c.secondary.at)); below > 0 && (n > below || c.secondary.evicted == 0) {
			t.Errorf("capacity %d below: %d blocks, %d evicted", below, n, c.secondary.evicted)
		}
		if below != 0 && (c.promoted == 0 || c.cascaded == 0) {
			t.Errorf("below %d: promoted %d, cascaded %d", below, c.promoted, c.cascaded)
		}
		return p.PrefixHits
	}
	none, some, all := hits(0), hits(int64(len(tr.keys)/2)), hits(-1)
	if want := tr.size.References - int64(len(tr.keys)); all != want {
		t.Errorf("unbounded below: %d hits, want %d", all, want)
	}
	if none >= some || some >= all {
		t.Errorf("hits %d without, %d with half, %d with all: want them to grow", none, some, all)
	}
}

func TestSweep(t *testing.T) {
	tr := loadSynthetic(t, 6, 30)
	var options []dryOptions
	for i := range 5 {
		options = append(options, dryOptions{policy: "lru", capacity: int64(tr.size.Largest * (1 + 2*i))})
	}
	points, counts, err := sweep(t.Context(), tr, options, new(atomic.Int64))
	if err != nil {
		t.Fatal(err)
	}
	for i := range points {
		if points[i].CapacityBlocks != options[i].capacity || counts[i].requests != int64(tr.size.Requests) {
			t.Errorf("point %d is %+v", i, points[i])
		}
		if i > 0 && points[i].PrefixHits < points[i-1].PrefixHits {
			t.Errorf("a larger LRU hits less: %+v", points)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, counts, err = sweep(ctx, tr, options, new(atomic.Int64)); !errors.Is(err, context.Canceled) || counts[0].requests != checkEvery {
		t.Errorf("interrupted: %v after %d requests", err, counts[0].requests)
	}
}
