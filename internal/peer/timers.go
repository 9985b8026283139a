package peer

import "container/heap"

// timer is one deadline, part of what it belongs to. Deadlines that are no longer
// needed leave the heap at once, so an idle machine has none.
type timer struct {
	at   Time
	seq  uint64
	pos  int // in the heap, plus one
	fire func()
}

type timers struct {
	list []*timer
	seq  uint64
}

func (h *timers) Len() int { return len(h.list) }
func (h *timers) Less(i, j int) bool {
	a, b := h.list[i], h.list[j]
	return a.at < b.at || a.at == b.at && a.seq < b.seq
}
func (h *timers) Swap(i, j int) {
	h.list[i], h.list[j] = h.list[j], h.list[i]
	h.list[i].pos, h.list[j].pos = i+1, j+1
}
func (h *timers) Push(x any) {
	t := x.(*timer)
	h.list = append(h.list, t)
	t.pos = len(h.list)
}
func (h *timers) Pop() any {
	t := h.list[len(h.list)-1]
	h.list[len(h.list)-1] = nil
	h.list = h.list[:len(h.list)-1]
	t.pos = 0
	return t
}

func (h *timers) arm(t *timer, at Time) {
	h.disarm(t)
	h.seq++
	t.at, t.seq = at, h.seq
	heap.Push(h, t)
}

func (h *timers) disarm(t *timer) {
	if t.pos > 0 {
		heap.Remove(h, t.pos-1)
	}
}

// next is when the first is due, 0 for never.
func (h *timers) next() Time {
	if len(h.list) == 0 {
		return 0
	}
	return h.list[0].at
}

// due takes the first that is due, or nil.
func (h *timers) due(now Time) *timer {
	if len(h.list) == 0 || h.list[0].at > now {
		return nil
	}
	return heap.Pop(h).(*timer)
}
