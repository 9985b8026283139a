package core

// timer is one deadline, embedded by value in what it belongs to. Deadlines
// sit in a heap with their position, so that one that is no longer needed
// leaves it at once and an idle core has none.
type timer struct {
	at   Time
	seq  uint64 // order of arming, so that equal deadlines fire in one order
	pos  int32  // 1-based position in the heap, 0 when not armed
	kind timerKind

	job  *job
	req  *request
	resv *reservation
	tier int
}

type timerKind uint8

const (
	timerJob      timerKind = iota // the job's outcome is due
	timerLookup                    // the request's pending lookup is due
	timerWait                      // the waiting call's own deadline
	timerFlush                     // the earliest flush of the request is due
	timerResv                      // the reservation expires
	timerHandover                  // the hand-over expires
	timerWaiting                   // what waits first for a tier's credit is due
	timerReset                     // the reset's answer is due
)

type timers struct {
	heap []*timer
	seq  uint64
}

func (h *timers) arm(t *timer, at Time) {
	h.disarm(t)
	h.seq++
	t.at, t.seq = at, h.seq
	h.heap = append(h.heap, t)
	t.pos = int32(len(h.heap))
	h.up(len(h.heap) - 1)
}

func (h *timers) disarm(t *timer) {
	if t.pos == 0 {
		return
	}
	i, last := int(t.pos)-1, len(h.heap)-1
	h.swap(i, last)
	h.heap[last] = nil
	h.heap = h.heap[:last]
	t.pos = 0
	if i < last {
		h.down(i)
		h.up(i)
	}
}

// due returns the next timer at or before now and disarms it, nil if none is.
func (h *timers) due(now Time) *timer {
	if len(h.heap) == 0 || h.heap[0].at > now {
		return nil
	}
	t := h.heap[0]
	h.disarm(t)
	return t
}

// next is the earliest deadline, 0 if there is none.
func (h *timers) next() Time {
	if len(h.heap) == 0 {
		return 0
	}
	return h.heap[0].at
}

func (h *timers) less(i, j int) bool {
	a, b := h.heap[i], h.heap[j]
	return a.at < b.at || a.at == b.at && a.seq < b.seq
}

func (h *timers) swap(i, j int) {
	h.heap[i], h.heap[j] = h.heap[j], h.heap[i]
	h.heap[i].pos, h.heap[j].pos = int32(i+1), int32(j+1)
}

func (h *timers) up(i int) {
	for i > 0 {
		p := (i - 1) / 2
		if !h.less(i, p) {
			return
		}
		h.swap(i, p)
		i = p
	}
}

func (h *timers) down(i int) {
	for {
		l := 2*i + 1
		if l >= len(h.heap) {
			return
		}
		if r := l + 1; r < len(h.heap) && h.less(r, l) {
			l = r
		}
		if !h.less(l, i) {
			return
		}
		h.swap(i, l)
		i = l
	}
}
