package core

import (
	"flag"
	"fmt"
	"os"
	"regexp"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/internal/invariants"
)

var (
	seedFlag  = flag.Uint64("core.seed", 0, "run the model test with this seed only")
	opsFlag   = flag.Int("core.ops", 0, "operations of a run of the model test (default 4000)")
	stepsFlag = flag.String("core.steps", "", "do only these steps of -core.seed, with commas between them")
	longFlag  = flag.Duration("core.long", 0, "run the model test with fresh seeds for so long")
)

const opsPerSeed = 4000

// runModel does the numbered steps of a seed. It returns how it failed, nil if
// it did not, with the world as it then was.
func runModel(seed uint64, steps []int, loud bool, every int, mod func(*modelOptions)) (w *world, bad any) {
	defer func() {
		if e := recover(); e != nil {
			bad = e
			if _, ok := e.(failure); !ok {
				bad = fmt.Sprintf("panic: %v\n%s", e, debug.Stack())
			}
		}
	}()
	w = newWorld(seed, loud, mod)
	w.every = every
	for _, n := range steps {
		w.step(n)
	}
	w.quiesce()
	return w, nil
}

// upTo is the steps 1 to n.
func upTo(n int) []int {
	steps := make([]int, n)
	for i := range steps {
		steps[i] = i + 1
	}
	return steps
}

// modelKind is a failure without its numbers and keys.
func modelKind(bad any) string {
	first, _, _ := strings.Cut(fmt.Sprint(bad), "\n")
	return regexp.MustCompile(`[0-9a-f]{8,}|[0-9]+`).ReplaceAllString(first, "")
}

// reduceModel takes steps away from a run that fails, as long as it fails in
// the same way.
func reduceModel(seed uint64, steps []int, bad any, mod func(*modelOptions), every int) []int {
	kind := modelKind(bad)
	return reduce(steps, time.Now().Add(30*time.Second), func(s []int) bool {
		_, bad := runModel(seed, s, false, every, mod)
		return bad != nil && modelKind(bad) == kind
	})
}

// checkEvery is after how many operations all invariants are checked.
func checkEvery() int {
	if invariants.Enabled {
		return 1
	}
	return 64
}

// model runs a seed, and once more with a log if it fails.
func model(t *testing.T, seed uint64, steps []int) *world {
	t.Helper()
	w, bad := runModel(seed, steps, false, checkEvery(), nil)
	if bad == nil {
		return w
	}
	// Every operation is checked from here on: the first that contradicts
	// itself may be earlier. Steps after it are none of the failure.
	if w, bad = runModel(seed, steps, false, 1, nil); w != nil {
		steps = slices.DeleteFunc(slices.Clone(steps), func(n int) bool { return n > w.op })
	}
	began, of := time.Now(), len(steps)
	steps = reduceModel(seed, steps, bad, nil, 1)
	w, bad = runModel(seed, steps, true, 1, nil)
	tail := ""
	if w != nil {
		lines := w.log
		if path := os.Getenv("CORE_LOG"); path != "" {
			if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")), 0o600); err != nil {
				t.Log(err)
			}
		}
		tail = strings.Join(lines[max(0, len(lines)-60):], "\n")
	}
	list := strings.Trim(strings.Join(strings.Fields(fmt.Sprint(steps)), ","), "[]")
	t.Fatalf("seed %d: %v\n\nreduced from %d to %d steps in %v; the last of them:\n%s\n\nreplay: go test ./internal/core -run 'TestModel$' -core.seed=%d -core.steps=%s",
		seed, bad, of, len(steps), time.Since(began).Round(time.Millisecond), tail, seed, list)
	return nil
}

// TestModel does a million random operations, from fixed seeds and a few fresh
// ones. In builds with invariants every one of them is followed by a check of
// all tables.
func TestModel(t *testing.T) {
	ops := opsPerSeed
	if *opsFlag > 0 {
		ops = *opsFlag
	}
	if *seedFlag != 0 {
		steps := upTo(ops)
		if *stepsFlag != "" {
			steps = nil
			for _, s := range strings.Split(*stepsFlag, ",") {
				n, err := strconv.Atoi(s)
				if err != nil {
					t.Fatal(err)
				}
				steps = append(steps, n)
			}
		}
		model(t, *seedFlag, steps)
		return
	}
	fresh := uint64(time.Now().UnixNano())
	if *longFlag > 0 {
		for end, n := time.Now().Add(*longFlag), uint64(0); time.Now().Before(end); n++ {
			model(t, fresh+n, upTo(ops))
		}
		return
	}
	seeds := 600
	switch {
	case testing.Short():
		seeds = 10
	case raceEnabled:
		seeds = 30
	}
	var total, leases, late, below, promoted int64
	var jobs [3]int64
	var sum Counters
	for n := range seeds {
		seed := uint64(n + 1)
		if n%10 == 9 {
			seed = fresh + uint64(n)
		}
		w := model(t, seed, upTo(ops))
		leases += w.hits
		total += int64(ops)
		s := w.c.stats
		sum.Lookups += s.Lookups
		sum.Committed += s.Committed
		sum.Refused += s.Refused
		sum.Expired += s.Expired
		sum.Evicted += s.Evicted
		sum.ExtentsTaken += s.ExtentsTaken
		sum.PromotionsShortened += s.PromotionsShortened
		sum.PrimaryHits += s.PrimaryHits
		sum.CorruptPrimary += s.CorruptPrimary
		sum.Resets += s.Resets
		sum.HandoversExpired += s.HandoversExpired
		for i := range s.Verdicts {
			sum.Verdicts[i] += s.Verdicts[i]
		}
		for _, ts := range w.c.Stats().Tiers {
			for k, n := range ts.Jobs {
				jobs[k] += n
			}
			late += ts.Late
			below += ts.Hits
			promoted += ts.Blocks[Promotion]
		}
	}
	t.Logf("%d operations, %d leases, jobs %v, blocks promoted %d, late results %d, hits from below %d\n%+v", total, leases, jobs, promoted, late, below, sum)
	// A model that hardly does anything would pass as well.
	for v, n := range sum.Verdicts {
		if (v == int(Hit) || Verdict(v).Miss()) && v < int(verdictEnd) && n == 0 && seeds >= 500 {
			t.Errorf("verdict %v was never given", Verdict(v))
		}
	}
}

// TestModelReplays runs seeds twice: all that is answered must be the same, or
// a failure could not be replayed.
func TestModelReplays(t *testing.T) {
	for seed := uint64(1); seed <= 5; seed++ {
		a, bad := runModel(seed, upTo(2000), false, 1000, nil)
		if bad != nil {
			t.Fatal(bad)
		}
		b, bad := runModel(seed, upTo(2000), false, 1000, nil)
		if bad != nil {
			t.Fatal(bad)
		}
		if a.hash != b.hash {
			t.Errorf("seed %d: two runs differ", seed)
		}
	}
}

// TestModelReduces shows that a failure of thousands of steps is reduced to the
// few that it takes.
func TestModelReduces(t *testing.T) {
	for _, sab := range []sabotage{unpinBehind, commitUnwritten} {
		mod := func(o *modelOptions) { o.sabotage = sab }
		for seed := uint64(1); ; seed++ {
			w, bad := runModel(seed, upTo(1000), false, 1<<30, mod)
			if w == nil || !w.broken || bad == nil {
				if seed == 60 {
					t.Fatal("no seed notices")
				}
				continue
			}
			steps := reduceModel(seed, upTo(w.op), bad, mod, 1<<30)
			_, small := runModel(seed, steps, false, 1<<30, mod)
			if small == nil || len(steps) >= 20 {
				t.Errorf("sabotage %d, seed %d: %d steps are reduced to %v, which fail with %v", sab, seed, w.op, steps, small)
			}
			t.Logf("sabotage %d, seed %d: %v\nreduced from %d to %d steps: %v", sab, seed, bad, w.op, len(steps), small)
			break
		}
	}
}

// TestModelCanary breaks the core on purpose in each of some ways: a model that
// does not notice proves nothing. The checks of the core's own tables are off,
// so that only what an engine or a tier could see counts, but for a leaked pin.
func TestModelCanary(t *testing.T) {
	for sab := honest + 1; sab < sabotageEnd; sab++ {
		t.Run(fmt.Sprint(sab), func(t *testing.T) {
			broken, noticed := 0, 0
			for seed := uint64(1); seed <= 60 && noticed < 5; seed++ {
				w, bad := runModel(seed, upTo(2000), false, 1<<30, func(o *modelOptions) {
					o.sabotage, o.jumps, o.waits = sab, true, true
				})
				if w != nil && w.broken {
					broken++
					if bad != nil {
						noticed++
					}
				} else if bad != nil {
					t.Fatalf("seed %d fails without sabotage: %v", seed, bad)
				}
			}
			if broken < 3 || noticed*2 < broken {
				t.Fatalf("broken in %d runs, noticed in %d", broken, noticed)
			}
		})
	}
}
