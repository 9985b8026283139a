package transfer

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
)

// hungGrace is how long after a deadline a call may take to come back before
// it counts as hung, not merely late: a call that heeds its context returns at
// the deadline, not before it.
const hungGrace = 250 * time.Millisecond

// Lane executes jobs on one tier. All methods are safe for concurrent use, in
// any state, and also from the sink.
type Lane struct {
	index int
	tier  tier.Tier
	name  string
	opt   Options
	sink  Sink
	warn  warner

	base context.Context // of all tier calls; ended when Close stops waiting
	stop context.CancelFunc
	kick chan struct{} // wakes the keeper
	done chan struct{} // closed by the last goroutine

	mu        sync.Mutex // guards all below; held for bookkeeping only
	work      [2]*sync.Cond
	closed    bool
	stopped   bool // base has ended
	alive     int  // goroutines
	jobs      map[JobID]*job
	q         [kinds]queue
	br        [dirs]breaker
	timers    timers
	places    []*place
	notes     []*job // with something to report
	hung      []hung // to be logged by the keeper
	telling   bool   // a goroutine is calling Health
	freeCh    []*chunk
	freeOut   [][]Result
	unknown   uint64
	sinkPanic uint64
	setAside  uint64
	asideErr  uint64
}

// place is a worker and what it does.
type place struct {
	ch    *chunk // nil when idle
	op    string
	key   block.Key
	since time.Time
}

// NewLane returns a lane over t and starts its goroutines; Close ends them.
// The tier stays the caller's, who closes it after the lane.
func NewLane(index int, t tier.Tier, opt Options, sink Sink) *Lane {
	info := t.Info()
	opt = opt.withDefaults(info)
	l := &Lane{index: index, tier: t, name: info.Name, opt: opt, sink: sink,
		kick: make(chan struct{}, 1), done: make(chan struct{}), jobs: map[JobID]*job{}}
	l.warn = warner{log: opt.Logger, every: opt.LogEvery, tier: info.Name, last: map[warning]*warned{}}
	l.base, l.stop = context.WithCancel(context.Background())
	now := time.Now()
	for d := range l.br {
		b := &l.br[d]
		b.dir, b.opt, b.rolled = Dir(d), opt.Breaker, now
		b.t.br = b
	}
	parallel := [kinds]int{opt.ReadParallel, opt.WriteParallel, opt.ProbeParallel}
	for k := range l.q {
		l.q[k].kind, l.q[k].parallel, l.q[k].br = kind(k), parallel[k], &l.br[Read]
	}
	l.q[kindWrite].br = &l.br[Write]
	for pool, workers := range [2]int{max(opt.ReadParallel, opt.WriteParallel) + 1, opt.ProbeParallel} {
		l.work[pool] = sync.NewCond(&l.mu)
		for range workers {
			p := &place{}
			l.places = append(l.places, p)
			l.start(func() { l.worker(p, pool) })
		}
	}
	l.start(l.keeper)
	return l
}

// start runs f as a goroutine that Close waits for. NewLane only.
func (l *Lane) start(f func()) {
	l.mu.Lock()
	l.alive++
	l.mu.Unlock()
	go func() {
		defer func() {
			l.mu.Lock()
			defer l.mu.Unlock()
			if l.alive--; l.alive == 0 {
				l.stop()
				close(l.done)
			}
		}()
		f()
	}()
}

// pools of workers.
const (
	poolData = iota
	poolProbe
)

func (q *queue) pool() int {
	if q.kind == kindProbe {
		return poolProbe
	}
	return poolData
}

// Submit gives a job to the lane. It never blocks. On an error the caller
// keeps everything and no report will come: ErrQueueFull, ErrOpen, ErrClosed,
// ErrDuplicate or ErrInvalid.
func (l *Lane) Submit(j *Job) error {
	if j.Dir >= dirs {
		return fmt.Errorf("%w: direction %d", ErrInvalid, j.Dir)
	}
	return l.accept(&job{q: &l.q[j.Dir], id: j.ID, ns: j.NS, items: j.Items, units: len(j.Items), deadline: j.Deadline})
}

// SubmitProbe gives a probe to the lane, as Submit does a job.
func (l *Lane) SubmitProbe(p *Probe) error {
	n := 0
	if len(p.Keys) > 0 {
		n = 1
	}
	return l.accept(&job{q: &l.q[kindProbe], id: p.ID, ns: p.NS, keys: p.Keys, units: n, deadline: p.Deadline})
}

func (l *Lane) accept(j *job) error {
	var bytes int64
	for i := range j.items {
		bytes += j.size(i)
	}
	j.accepted = time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	q := j.q
	itemsMax := l.opt.QueueItems
	if q.kind == kindProbe {
		itemsMax = l.opt.QueueProbes
	}
	switch {
	case l.closed:
		q.n.refusedClosed++
		return ErrClosed
	case j.ns == nil || j.units == 0 || j.deadline.IsZero():
		q.n.refusedOther++
		return fmt.Errorf("%w (%s job %d)", ErrInvalid, q.kind, j.id)
	case l.jobs[j.id] != nil:
		q.n.refusedOther++
		return fmt.Errorf("%w: %d", ErrDuplicate, j.id)
	case q.br.state == StateOpen:
		q.n.refusedOpen++
		return ErrOpen
	case q.items > 0 && (q.items+j.units > itemsMax || q.bytes+bytes > l.opt.QueueBytes):
		q.n.refusedFull++
		return ErrQueueFull
	}
	j.left, j.t.job = j.units, j
	q.jobs++
	q.items += j.units
	q.bytes += bytes
	l.jobs[j.id] = j
	q.push(j)
	l.arm(&j.t, j.deadline)
	l.work[q.pool()].Signal()
	return nil
}

// Cancel ends a job or probe: what has not begun is reported by the lane's
// goroutines with ErrCancelled; the contexts of running calls end, and their
// items are reported when they return, done if they are done. An unknown id is
// counted and ignored.
func (l *Lane) Cancel(id JobID) {
	l.mu.Lock()
	j := l.jobs[id]
	if j == nil {
		l.unknown++
		l.mu.Unlock()
		return
	}
	end := l.cancelLocked(j)
	l.mu.Unlock()
	end()
}

// cancelLocked marks the job cancelled and returns what ends its calls. That
// runs outside the lock, because a context may call others.
func (l *Lane) cancelLocked(j *job) (end func()) {
	j.cancelled = true
	l.dropLocked(j, ErrCancelled)
	l.wakeKeeper()
	if j.cancel == nil {
		return func() {}
	}
	return j.cancel
}

// dropLocked reports all of a job that is not in a running call. What was
// tried before keeps the error of its last attempt, unless it was cancelled.
func (l *Lane) dropLocked(j *job, err error) {
	j.q.remove(j)
	for ; j.next < j.units; j.next++ {
		l.reportLocked(j, j.next, 0, err)
	}
	for _, ch := range j.retries {
		l.timers.disarm(&ch.t)
		for k, i := range ch.index {
			last := ch.items[k].Err
			if err == ErrCancelled {
				last = err
			}
			l.reportLocked(j, int(i), 0, last)
		}
		l.freeLocked(ch)
	}
	clear(j.retries)
	j.retries = j.retries[:0]
}

// expireLocked reports what of a job has not begun at its deadline.
func (l *Lane) expireLocked(j *job) {
	if j.next < j.units {
		j.q.n.expired += uint64(j.units - j.next)
		l.dropLocked(j, &tier.Error{Op: j.q.kind.String(), Tier: l.name, Class: tier.ClassRetryable, Cause: tier.CauseTimeout,
			Err:  fmt.Errorf("the deadline passed in the queue: %w", context.DeadlineExceeded),
			Hint: "the tier is slower than what it is asked for"})
		return
	}
	l.dropLocked(j, context.DeadlineExceeded) // retries only, which have an error of their own
}

// overdueLocked counts a call that outlived its job's deadline as a failure.
// Its buffers stay where they are.
func (l *Lane) overdueLocked(ch *chunk, now time.Time) {
	q := ch.job.q
	ch.overdue = true
	q.overdue++
	q.inflight -= ch.bytes
	q.late += ch.bytes
	l.work[q.pool()].Signal() // it no longer counts against the limits
	l.setStateLocked(q.br, q.br.record(now, ch.epoch, true, false, now.Sub(ch.began)), now)
}

// hungLocked says whether a direction cannot work: all places of it hang, or
// the lane holds too many bytes past their deadline.
func (l *Lane) hungLocked(b *breaker) bool {
	late := int64(0)
	for k := range l.q {
		q := &l.q[k]
		late += q.late
		if q.br == b && q.overdue >= q.parallel {
			return true
		}
	}
	return l.opt.OverdueBytesMax > 0 && late > l.opt.OverdueBytesMax
}

// setStateLocked changes a breaker's state and does what follows from it.
// Goroutines of the lane only: they tell the sink afterwards.
func (l *Lane) setStateLocked(b *breaker, s State, now time.Time) {
	if s == b.state {
		return
	}
	l.timers.disarm(&b.t)
	if again := b.enter(s, now); !again.IsZero() {
		l.arm(&b.t, again)
	}
	if s == StateOpen {
		for _, j := range l.jobs {
			if j.q.br == b {
				l.dropLocked(j, &tier.Error{Op: j.q.kind.String(), Tier: l.name, Class: tier.ClassPermanent,
					Cause: tier.CauseUnavailable, Err: ErrOpen})
			}
		}
	}
	// Limits have changed.
	for _, c := range l.work {
		c.Signal()
	}
}

// lookLocked is the breaker's timer.
func (l *Lane) lookLocked(b *breaker, now time.Time) {
	switch {
	case b.state == StateOpen && l.hungLocked(b):
		l.arm(&b.t, now.Add(jitter(b.delay))) // a trial would find no place
	case b.state == StateOpen:
		l.setStateLocked(b, StateHalfOpen, now)
	case b.state == StateBrownOut && b.brown(b.sum(now)):
		l.arm(&b.t, now.Add(b.opt.Window))
	case b.state == StateBrownOut:
		l.setStateLocked(b, StateClosed, now)
	}
}

func (l *Lane) arm(t *timer, when time.Time) {
	if l.timers.arm(t, when) {
		l.wakeKeeper()
	}
}

func (l *Lane) wakeKeeper() {
	select {
	case l.kick <- struct{}{}:
	default:
	}
}

// keeper serves the timers and reports what ended without a worker.
func (l *Lane) keeper() {
	sleep := time.NewTimer(time.Hour)
	defer sleep.Stop()
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		now := time.Now()
		for t := l.timers.due(now); t != nil; t = l.timers.due(now) {
			l.fireLocked(t, now)
		}
		for _, h := range l.hung {
			l.mu.Unlock()
			l.warn.hung(h)
			l.mu.Lock()
		}
		l.hung = l.hung[:0] // only the keeper adds to it
		l.deliverLocked()
		if l.closed && len(l.jobs) == 0 {
			return
		}
		wait := time.Hour
		if len(l.timers) > 0 {
			wait = time.Until(l.timers[0].when)
		}
		l.mu.Unlock()
		sleep.Reset(wait)
		select {
		case <-l.kick:
		case <-sleep.C:
		}
		l.mu.Lock()
	}
}

func (l *Lane) fireLocked(t *timer, now time.Time) {
	switch {
	case t.ch != nil: // a retry is due
		t.ch.job.q.push(t.ch.job)
		l.work[t.ch.job.q.pool()].Signal()
	case t.br != nil:
		l.lookLocked(t.br, now)
	case !t.job.expired:
		j := t.job
		j.expired = true
		l.expireLocked(j)
		for _, p := range l.places {
			if p.ch != nil && p.ch.job == j {
				l.overdueLocked(p.ch, now)
				l.arm(&j.t, j.deadline.Add(hungGrace))
			}
		}
	default: // calls of the job hang
		var h hung
		for _, p := range l.places {
			if p.ch == nil || p.ch.job != t.job {
				continue
			}
			if age := now.Sub(p.ch.began); age > h.age {
				h.op, h.key, h.age = p.op, p.key, age
			}
			h.calls++
		}
		if h.calls > 0 {
			l.hung = append(l.hung, h)
		}
		for d := range l.br {
			if b := &l.br[d]; b.state != StateOpen && l.hungLocked(b) {
				l.setStateLocked(b, StateOpen, now)
			}
		}
	}
}

// Close refuses new work, reports what is queued as cancelled, and waits for
// running calls and their reports. When ctx ends first, it ends the contexts
// of the calls and returns an error that names them; they still hold their
// buffers, and are reported to the sink when they return. Close may be called
// again, to wait for them.
func (l *Lane) Close(ctx context.Context) error {
	l.mu.Lock()
	if !l.closed {
		l.closed = true
		for _, j := range l.jobs {
			l.dropLocked(j, ErrCancelled)
		}
		for _, c := range l.work {
			c.Broadcast()
		}
		l.wakeKeeper()
	}
	l.mu.Unlock()
	select {
	case <-l.done:
		return nil
	case <-ctx.Done():
	}
	l.mu.Lock()
	if l.alive == 0 {
		l.mu.Unlock()
		return nil
	}
	l.stopped = true
	var calls []string
	for _, p := range l.places {
		if p.ch != nil {
			calls = append(calls, fmt.Sprintf("%s of block %s for %s", p.op, p.key, time.Since(p.since).Round(time.Millisecond)))
		}
	}
	l.mu.Unlock()
	l.stop()
	if len(calls) == 0 {
		calls = []string{"none, but a report to the sink"}
	}
	return fmt.Errorf("close transfer lane of tier %s: %w; calls left behind: %s",
		l.name, context.Cause(ctx), strings.Join(calls, ", "))
}

// State is the state of a direction's breaker.
func (l *Lane) State(d Dir) State {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.br[d].state
}
