package transfer

import (
	"context"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
)

// job is what a lane holds of a Job or a Probe. A probe is a job of one unit
// without a buffer. All fields but the first group are guarded by Lane.mu.
type job struct {
	q        *queue
	id       JobID
	ns       *block.Namespace
	items    []tier.Item // empty for a probe
	keys     []block.Key // of a probe
	deadline time.Time
	accepted time.Time

	ctx    context.Context // of its calls; made when the first begins
	cancel context.CancelFunc

	// A unit is in one place: not begun (next and above), in a retry, in a
	// running call, in out, or with the sink.
	units   int
	next    int
	retries []*chunk // waiting for their time (timer armed) or due
	out     []Result // to be reported
	left    int      // units not yet given to the sink
	found   []bool   // answer of a probe

	cancelled  bool
	expired    bool // the deadline has been dealt with
	noted      bool // in Lane.notes
	delivering bool // a goroutine is reporting it: others leave out to that one
	t          timer

	prev, after *job // neighbours in the queue's ring
	inRing      bool
}

// size is the bytes of a unit.
func (j *job) size(i int) int64 {
	if len(j.items) == 0 {
		return 0
	}
	return int64(len(j.items[i].Buf))
}

// dueRetry is the position of a retry that may run, or -1.
func (j *job) dueRetry() int {
	for i, ch := range j.retries {
		if ch.t.pos == 0 {
			return i
		}
	}
	return -1
}

func (j *job) runnable() bool { return j.next < j.units || j.dueRetry() >= 0 }

// takeRetry removes and returns a retry.
func (j *job) takeRetry(i int) *chunk {
	ch := j.retries[i]
	n := len(j.retries) - 1
	copy(j.retries[i:], j.retries[i+1:])
	j.retries[n] = nil
	j.retries = j.retries[:n]
	return ch
}

// chunk is one tier call's share of a job. Between calls it is pooled.
type chunk struct {
	job     *job
	index   []int32     // units
	items   []tier.Item // what the tier is given: a copy, so that it can change nothing but the bytes
	bytes   int64
	attempt int   // calls so far
	t       timer // of a retry that waits

	epoch   uint64 // of the breaker when it began
	began   time.Time
	took    time.Duration // of the tier call
	called  bool          // the tier was asked
	panics  bool          // and panicked: its goroutines may have the slices still
	overdue bool          // outlived the deadline; counted as a failure then
	asideBy time.Time     // when setting corrupt copies aside must end
}

// add makes a unit part of the chunk.
func (ch *chunk) add(i int) {
	ch.index = append(ch.index, int32(i))
	ch.items = append(ch.items, tier.Item{})
	ch.bytes += ch.job.size(i)
}

// prepare sets the items as the job gave them, also before a retry.
func (ch *chunk) prepare() {
	ch.took, ch.called, ch.asideBy = 0, false, time.Time{}
	for k, i := range ch.index {
		if len(ch.job.items) == 0 {
			ch.items[k] = tier.Item{}
			continue
		}
		ch.items[k] = ch.job.items[i]
		ch.items[k].Err = nil
		if ch.job.q.kind == kindRead {
			ch.items[k].Sum = 0
		}
	}
}

// keep makes the k-th unit the n-th, for those that stay.
func (ch *chunk) keep(n, k int) {
	ch.index[n], ch.items[n] = ch.index[k], ch.items[k]
}

// shorten leaves the first n units.
func (ch *chunk) shorten(n int) {
	clear(ch.items[n:])
	ch.index, ch.items = ch.index[:n], ch.items[:n]
	ch.bytes = 0
	for _, i := range ch.index {
		ch.bytes += ch.job.size(int(i))
	}
}

func (ch *chunk) swap(a, b int) {
	ch.index[a], ch.index[b] = ch.index[b], ch.index[a]
	ch.items[a], ch.items[b] = ch.items[b], ch.items[a]
}

// key names the chunk in logs and in Close.
func (ch *chunk) key() block.Key {
	if j := ch.job; len(j.items) > 0 {
		return j.items[ch.index[0]].Key
	} else if len(j.keys) > 0 {
		return j.keys[0]
	}
	return block.Key{}
}

// queue is what a lane holds of one kind. Guarded by Lane.mu.
type queue struct {
	kind     kind
	parallel int
	br       *breaker

	first, last *job // the ring: jobs with something to run, each call moves its job to the end

	jobs     int   // held
	items    int   // held
	bytes    int64 // held
	running  int   // calls
	inflight int64 // bytes in calls inside their deadline
	overdue  int   // calls past their deadline
	late     int64 // bytes in those

	n counters
}

type counters struct {
	done, doneBytes, notFound, failed, cancelled, expired uint64
	calls, retries, panics                                uint64
	callTime                                              time.Duration
	refusedFull, refusedOpen, refusedClosed, refusedOther uint64
	causes                                                [causes]uint64
}

func (q *queue) push(j *job) {
	if j.inRing {
		return
	}
	j.inRing, j.prev, j.after = true, q.last, nil
	if q.last != nil {
		q.last.after = j
	} else {
		q.first = j
	}
	q.last = j
}

func (q *queue) remove(j *job) {
	if !j.inRing {
		return
	}
	if j.prev != nil {
		j.prev.after = j.after
	} else {
		q.first = j.after
	}
	if j.after != nil {
		j.after.prev = j.prev
	} else {
		q.last = j.prev
	}
	j.inRing, j.prev, j.after = false, nil, nil
}

// keyOf is the key of the k-th unit.
func (ch *chunk) keyOf(k int) block.Key {
	if j := ch.job; len(j.items) > 0 {
		return j.items[ch.index[k]].Key
	}
	return ch.key()
}
