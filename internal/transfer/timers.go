package transfer

import (
	"container/heap"
	"math/rand/v2"
	"time"
)

// timer is an entry of a lane's timer heap. It is part of what it wakes, so
// that arming allocates nothing, and it is taken out when that ends, so that
// the heap is never larger than what the lane holds.
type timer struct {
	when time.Time
	pos  int // 1 + index in the heap; 0 means not armed

	job *job     // its deadline has come
	ch  *chunk   // its retry is due
	br  *breaker // look at it again
}

type timers []*timer

func (h timers) Len() int           { return len(h) }
func (h timers) Less(i, k int) bool { return h[i].when.Before(h[k].when) }
func (h timers) Swap(i, k int) {
	h[i], h[k] = h[k], h[i]
	h[i].pos, h[k].pos = i+1, k+1
}

func (h *timers) Push(x any) {
	t := x.(*timer)
	*h = append(*h, t)
	t.pos = len(*h)
}

func (h *timers) Pop() any {
	n := len(*h) - 1
	t := (*h)[n]
	(*h)[n] = nil
	*h = (*h)[:n]
	t.pos = 0
	return t
}

// arm sets a timer, armed or not, and tells whether it is now the first.
func (h *timers) arm(t *timer, when time.Time) bool {
	t.when = when
	if t.pos > 0 {
		heap.Fix(h, t.pos-1)
	} else {
		heap.Push(h, t)
	}
	return t.pos == 1
}

func (h *timers) disarm(t *timer) {
	if t.pos > 0 {
		heap.Remove(h, t.pos-1)
	}
}

// due takes out a timer whose time has come, or returns nil.
func (h *timers) due(now time.Time) *timer {
	if len(*h) == 0 || (*h)[0].when.After(now) {
		return nil
	}
	return heap.Pop(h).(*timer)
}

// backoff doubles base n times, at most to limit.
func backoff(base, limit time.Duration, n int) time.Duration {
	d := base
	for ; n > 0 && d < limit; n-- {
		d *= 2
	}
	return min(d, limit)
}

// jitter is a random time between half of d and d, so that what failed
// together is not tried again together.
func jitter(d time.Duration) time.Duration {
	half := d / 2
	return half + rand.N(d-half+1)
}
