package objtier

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// A store that says SlowDown is asked by fewer at once, one step a second, and
// by more again as it answers.
func TestThrottleFollowsTheStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		th := newThrottle(32, 0, time.Now)
		one := func(slow bool) {
			if err := th.enter(t.Context(), forLoads); err != nil {
				t.Fatal(err)
			}
			th.leave(slow, slow)
		}
		time.Sleep(time.Hour)
		for range 10 { // one reason to slow down, however many hear it
			one(true)
		}
		if n, cuts := th.state(); n != 22 || cuts != 1 {
			t.Errorf("%d at once after %d cuts", n, cuts)
		}
		for range 20 {
			time.Sleep(cutEvery)
			one(true)
		}
		if n, _ := th.state(); n != 1 {
			t.Errorf("%d at once after a long time of SlowDown, want 1", n)
		}
		for range 2000 {
			one(false)
		}
		if n, _ := th.state(); n != 32 {
			t.Errorf("%d at once after recovery, want 32", n)
		}
	})
}

// Of all that wait, loads go first; who gives up leaves no hole.
func TestThrottleOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		th := newThrottle(1, 0, time.Now)
		if err := th.enter(t.Context(), forStores); err != nil {
			t.Fatal(err)
		}
		var mu sync.Mutex
		var order []int
		var wg sync.WaitGroup
		wait := func(ctx context.Context, p int) {
			wg.Go(func() {
				if err := th.enter(ctx, p); err != nil {
					return
				}
				mu.Lock()
				order = append(order, p)
				mu.Unlock()
				th.leave(false, false)
			})
			synctest.Wait()
		}
		short, cancel := context.WithCancel(t.Context())
		wait(t.Context(), forStores)
		wait(short, forLoads)
		wait(t.Context(), forProbes)
		wait(t.Context(), forLoads)
		cancel()
		synctest.Wait()
		th.leave(false, false)
		wg.Wait()
		if len(order) != 3 || order[0] != forLoads || order[1] != forProbes || order[2] != forStores {
			t.Errorf("order %v", order)
		}
		if th.mu.running != 0 {
			t.Errorf("%d places are lost", th.mu.running)
		}
	})
}

func TestThrottlePace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		th := newThrottle(8, 10, time.Now)
		start := time.Now()
		var wg sync.WaitGroup
		for range 21 {
			wg.Go(func() {
				if err := th.enter(t.Context(), forLoads); err != nil {
					t.Error(err)
				}
				th.leave(false, false)
			})
		}
		wg.Wait()
		if took := time.Since(start); took != 2*time.Second {
			t.Errorf("21 requests at 10 a second took %v, want 2s", took)
		}
		for range 3 {
			_ = th.enter(t.Context(), forLoads)
			th.leave(false, false)
		}
		short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if err := th.enter(short, forLoads); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("no turn before the deadline: %v", err)
		}
		if th.mu.running != 0 {
			t.Errorf("%d places are lost", th.mu.running)
		}
	})
}

// What may be repeated is bounded by what succeeds, so that a store that fails
// gets few requests more for it.
func TestRetryBudget(t *testing.T) {
	th := newThrottle(8, 0, time.Now)
	fail := func() bool {
		if err := th.enter(t.Context(), forLoads); err != nil {
			t.Fatal(err)
		}
		return th.leave(false, true)
	}
	n := 0
	for fail() {
		n++
	}
	if n != retryMax {
		t.Errorf("%d repetitions in a row, want %d", n, retryMax)
	}
	for range 8 {
		_ = th.enter(t.Context(), forLoads)
		th.leave(false, false)
	}
	for i, want := range []bool{true, true, false} {
		if fail() != want {
			t.Errorf("eight successes are worth two repetitions: failure %d", i)
		}
	}
}
