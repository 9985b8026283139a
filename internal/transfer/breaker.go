package transfer

import "time"

// breaker is the health of one direction. It is a plain state machine under
// the lane's lock: it gets the time and the outcomes, and the lane acts on the
// changes.
type breaker struct {
	dir   Dir
	opt   BreakerOptions
	state State
	told  State // what the sink knows

	// Two halves of the window, the newer first. Two are enough to forget by
	// time; a ring of outcomes would remember failures of yesterday.
	half   [2]tally
	rolled time.Time // when half[0] began

	streak    int           // bad calls in a row
	good      int           // good trials in half-open
	epoch     uint64        // grows with each opening; outcomes of older calls say nothing
	delay     time.Duration // the last time open, before jitter
	recovered time.Time     // when half-open last became closed
	t         timer         // open: half-open then. Brown-out: look again then
	openings  uint64
}

type tally struct {
	calls, bad int
	took       time.Duration
}

// sum forgets what left the window and adds up the rest.
func (b *breaker) sum(now time.Time) tally {
	switch d := now.Sub(b.rolled); {
	case d >= b.opt.Window:
		b.half, b.rolled = [2]tally{}, now
	case d >= b.opt.Window/2:
		b.half, b.rolled = [2]tally{1: b.half[0]}, b.rolled.Add(b.opt.Window/2)
	}
	x, y := b.half[0], b.half[1]
	return tally{x.calls + y.calls, x.bad + y.bad, x.took + y.took}
}

// brown says whether calls are bad or slow enough for brown-out.
func (b *breaker) brown(t tally) bool {
	return t.calls > 0 && (float64(t.bad) >= b.opt.BrownShare*float64(t.calls) || t.took/time.Duration(t.calls) > b.opt.LatencyMax)
}

// record takes the outcome of a call that began in epoch and returns the state
// that follows. One that is down is as bad as many.
func (b *breaker) record(now time.Time, epoch uint64, bad, down bool, took time.Duration) State {
	if epoch != b.epoch {
		return b.state
	}
	switch b.state {
	case StateHalfOpen:
		if bad {
			return StateOpen
		}
		if b.good++; b.good >= b.opt.Trials {
			return StateClosed
		}
	case StateClosed, StateBrownOut:
		t := b.sum(now)
		n := &b.half[0]
		n.calls++
		n.took += took
		t.calls++
		t.took += took
		b.streak++
		if bad {
			n.bad++
			t.bad++
		} else {
			b.streak = 0
		}
		enough := t.calls >= b.opt.MinCalls
		switch {
		case down, b.streak >= b.opt.MinCalls, enough && float64(t.bad) >= b.opt.OpenShare*float64(t.calls):
			return StateOpen
		case enough && b.brown(t):
			return StateBrownOut
		}
	}
	return b.state
}

// enter changes the state and returns when to look again, or the zero time.
func (b *breaker) enter(s State, now time.Time) (again time.Time) {
	if s == StateOpen {
		// A recovery that did not outlast the last time open was none.
		if b.state == StateHalfOpen || now.Sub(b.recovered) < b.delay {
			b.delay = min(2*b.delay, b.opt.OpenMax)
		} else {
			b.delay = min(b.opt.OpenBase, b.opt.OpenMax)
		}
		b.epoch++
		b.openings++
		again = now.Add(jitter(b.delay))
	}
	if s == StateBrownOut {
		again = now.Add(b.opt.Window)
	}
	if s == StateClosed && b.state == StateHalfOpen {
		b.recovered = now
	}
	if b.state != StateBrownOut && s != StateBrownOut || s == StateOpen {
		// A brown-out keeps the window: it must not hide what leads to open.
		b.half, b.rolled, b.streak, b.good = [2]tally{}, now, 0, 0
	}
	b.state = s
	return again
}

// limit is how many calls inside their deadline may run at once.
func (b *breaker) limit(parallel int) int {
	switch b.state {
	case StateBrownOut:
		return min(parallel, b.opt.BrownParallel)
	case StateOpen:
		return 0
	case StateHalfOpen:
		return 1
	}
	return parallel
}
