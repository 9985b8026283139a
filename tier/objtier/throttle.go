package objtier

import (
	"context"
	"sync"
	"time"
)

// throttle bounds what the tier asks of its store: how many requests are under
// way, which falls when the store says SlowDown and rises again as it answers;
// how many there are a second, if the operator says so; and how many of them
// may be repetitions. So a store that throttles makes the tier slow, and never
// gets more requests for failing.
type throttle struct {
	now     func() time.Time
	perSec  float64
	slotMax float64

	mu struct {
		sync.Mutex
		slots   float64 // requests under way at most, at least 1
		running int
		wait    [priorities][]chan struct{} // who is next, the first first
		cut     time.Time                   // when slots were last lowered
		next    time.Time                   // when the next request may go, with perSec
		retry   float64                     // failures that may be told to be retryable
		cuts    int64
	}
}

// Priorities, the first first.
const (
	forLoads = iota
	forProbes
	forStores
	priorities
)

const (
	cutEvery  = time.Second // one reason to slow down lowers the bound once
	cutTo     = 0.7
	retryMax  = 100  // failures in a row that may be repeated
	retryEach = 0.25 // of each success: so repetitions are at most a quarter
)

func newThrottle(slots int, perSec float64, now func() time.Time) *throttle {
	t := &throttle{now: now, perSec: perSec, slotMax: float64(slots)}
	t.mu.slots, t.mu.retry = t.slotMax, retryMax
	return t
}

// enter waits for a place. Who gets nil calls leave.
func (t *throttle) enter(ctx context.Context, priority int) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	t.mu.Lock()
	if t.mu.running < t.slots() && len(t.mu.wait[priority]) == 0 {
		t.mu.running++
		return t.paced(ctx) // unlocks
	}
	ch := make(chan struct{})
	t.mu.wait[priority] = append(t.mu.wait[priority], ch)
	t.mu.Unlock()
	select {
	case <-ch: // running counts us
		t.mu.Lock()
		return t.paced(ctx)
	case <-ctx.Done():
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for i, c := range t.mu.wait[priority] {
		if c == ch {
			t.mu.wait[priority] = append(t.mu.wait[priority][:i], t.mu.wait[priority][i+1:]...)
			return ctx.Err()
		}
	}
	t.leaveLocked() // it was our turn in the same moment
	return ctx.Err()
}

func (t *throttle) slots() int { return int(t.mu.slots) }

// paced waits for the turn that perSec gives, with a place taken. It is called
// with the lock held and unlocks it.
func (t *throttle) paced(ctx context.Context) error {
	if t.perSec == 0 {
		t.mu.Unlock()
		return nil
	}
	now := t.now()
	at := t.mu.next
	if at.Before(now) {
		at = now
	}
	deadline, bounded := ctx.Deadline()
	if bounded && at.After(deadline) { // others may use the turn
		t.leaveLocked()
		t.mu.Unlock()
		return context.DeadlineExceeded
	}
	t.mu.next = at.Add(time.Duration(float64(time.Second) / t.perSec))
	t.mu.Unlock()
	if at.Equal(now) {
		return nil
	}
	timer := time.NewTimer(at.Sub(now))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		t.mu.Lock()
		defer t.mu.Unlock()
		t.leaveLocked()
		return ctx.Err()
	}
}

// leave gives the place back and learns from the answer. It says whether the
// caller may call a failure retryable.
func (t *throttle) leave(slowDown, failed bool) (retry bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch now := t.now(); {
	case slowDown && now.Sub(t.mu.cut) >= cutEvery:
		t.mu.slots, t.mu.cut = max(1, t.mu.slots*cutTo), now
		t.mu.cuts++
	case !failed:
		t.mu.slots = min(t.slotMax, t.mu.slots+1/t.mu.slots)
		t.mu.retry = min(retryMax, t.mu.retry+retryEach)
	}
	if failed && t.mu.retry >= 1 {
		t.mu.retry--
		retry = true
	}
	t.leaveLocked()
	return retry
}

// leaveLocked frees a place and wakes as many as there is room for.
func (t *throttle) leaveLocked() {
	t.mu.running--
	for p := range t.mu.wait {
		for len(t.mu.wait[p]) > 0 && t.mu.running < t.slots() {
			close(t.mu.wait[p][0])
			t.mu.wait[p] = t.mu.wait[p][1:]
			t.mu.running++
		}
	}
}

// state tells the bound on requests under way, and how often it was lowered.
func (t *throttle) state() (slots int, cuts int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.slots(), t.mu.cuts
}
