package transfer

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/minio/crc64nvme"
	"github.com/terrace-kv/terrace/tier"
)

// setAsideTimeout bounds the wait for a tier to set the corrupt copies of a call
// aside. The report waits for it, so that nobody finds the same copy again.
const setAsideTimeout = 5 * time.Second

var (
	errSourceSum = errors.New("bytes in the primary do not match their checksum")
	errReadSum   = errors.New("bytes do not match their checksum")
)

func (l *Lane) worker(p *place, pool int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		ch := l.takeLocked(pool)
		if ch == nil {
			// Reports of what expired in takeLocked, before the wait.
			if l.deliverLocked() {
				continue
			}
			if l.closed {
				return
			}
			l.work[pool].Wait()
			continue
		}
		l.beginLocked(p, ch)
		l.mu.Unlock()
		l.run(p, ch)
		l.mu.Lock()
		p.ch = nil
		l.finishLocked(ch)
		l.deliverLocked()
	}
}

// takeLocked is the next call for a worker of the pool, or nil.
func (l *Lane) takeLocked(pool int) *chunk {
	if pool == poolProbe {
		return l.cutLocked(&l.q[kindProbe])
	}
	if ch := l.cutLocked(&l.q[kindRead]); ch != nil {
		return ch
	}
	return l.cutLocked(&l.q[kindWrite])
}

// cutLocked takes a chunk from the job whose turn it is, or returns nil if
// nothing of the queue may run.
func (l *Lane) cutLocked(q *queue) *chunk {
	for q.first != nil {
		j := q.first
		if !time.Now().Before(j.deadline) {
			l.expireLocked(j)
			l.wakeKeeper() // to report it: this worker may be long
			continue
		}
		if q.running >= q.parallel || q.br.state != StateClosed && l.currentLocked(q) >= q.br.limit(q.parallel) {
			return nil
		}
		room := l.opt.InflightBytes - q.inflight
		if q.inflight == 0 { // one call always runs
			room = max(room, j.size(min(j.next, j.units-1)))
		}
		var ch *chunk
		if i := j.dueRetry(); i >= 0 {
			if q.inflight > 0 && j.retries[i].bytes > room {
				return nil
			}
			ch = j.takeRetry(i)
		} else {
			if j.size(j.next) > room {
				return nil
			}
			ch = l.newLocked(j)
			for j.next < j.units && len(ch.index) < l.opt.BatchItems {
				n := ch.bytes + j.size(j.next)
				if len(ch.index) > 0 && (n > l.opt.BatchBytes || n > room) {
					break
				}
				ch.add(j.next)
				j.next++
			}
		}
		q.remove(j)
		if j.runnable() {
			q.push(j)
		}
		return ch
	}
	return nil
}

// currentLocked counts the calls that the breaker's limit is about: inside their
// deadline and begun since it last opened. A call of before that is still out
// must not keep the trial waiting.
func (l *Lane) currentLocked(q *queue) (n int) {
	for _, p := range l.places {
		if ch := p.ch; ch != nil && ch.job.q == q && !ch.overdue && ch.epoch == q.br.epoch {
			n++
		}
	}
	return n
}

// beginLocked makes the chunk a running call. It wakes another worker, which
// looks for more and so on: a submit needs to wake one only.
func (l *Lane) beginLocked(p *place, ch *chunk) {
	j := ch.job
	q := j.q
	if j.ctx == nil {
		j.ctx, j.cancel = context.WithDeadline(l.base, j.deadline)
	}
	q.running++
	q.inflight += ch.bytes
	ch.began, ch.epoch, ch.overdue = time.Now(), q.br.epoch, false
	ch.attempt++
	*p = place{ch: ch, op: q.kind.String(), key: ch.key(), since: ch.began}
	for k := range l.q {
		if next := &l.q[k]; next.first != nil && next.pool() == q.pool() {
			l.work[q.pool()].Signal()
			break
		}
	}
}

// run makes the tier call and checks the bytes on either side of it. No lock
// is held. Afterwards each item has its outcome, and its buffer is quiet.
func (l *Lane) run(p *place, ch *chunk) {
	ch.prepare()
	switch ch.job.q.kind {
	case kindRead:
		l.call(ch, ch.items)
		for k := range ch.items {
			l.checkRead(p, ch, k)
		}
	case kindWrite:
		good := 0
		for k := range ch.items {
			if l.checkSource(ch, k) {
				ch.swap(good, k)
				good++
			}
		}
		if good > 0 {
			l.call(ch, ch.items[:good:good])
		}
	case kindProbe:
		l.call(ch, ch.items)
	}
	for k := range ch.items {
		if ch.items[k].Err != nil {
			l.examine(ch, k)
		}
	}
}

// examine classifies and logs an error for the first time. An error that
// cannot be asked, such as a nil *tier.Error, must not harm the worker.
func (l *Lane) examine(ch *chunk, k int) {
	defer func() {
		if r := recover(); r != nil {
			ch.items[k].Err = &tier.Error{Op: ch.job.q.kind.String(), Tier: l.name, Key: ch.keyOf(k), Class: tier.ClassPermanent,
				Err: fmt.Errorf("the tier gave an unusable error: %v", r), Hint: "this is a bug of the tier"}
		}
	}()
	ch.items[k].Err = l.timeout(ch, k, ch.items[k].Err)
	l.warn.failed(ch.job.q.kind.String(), ch.keyOf(k), ch.items[k].Err)
}

// call asks the tier for items, which are some of the chunk's. A panic fails
// all of them; the call is over then.
func (l *Lane) call(ch *chunk, items []tier.Item) {
	j := ch.job
	ch.called = true
	start := time.Now()
	defer func() {
		ch.took = time.Since(start)
		r := recover()
		if r == nil {
			return
		}
		ch.panics = true
		stack := debug.Stack()
		l.warn.panicked(j.q.kind.String(), ch.key(), r, stack)
		// The tier may have changed what it was given.
		for k := range ch.items {
			if k < len(items) {
				ch.items[k].Err = &tier.Error{Op: j.q.kind.String(), Tier: l.name, Key: ch.keyOf(k), Class: tier.ClassPermanent,
					Err: fmt.Errorf("the tier panicked: %v", r), Hint: "this is a bug; its stack is in the log"}
			}
		}
	}()
	switch j.q.kind {
	case kindWrite:
		l.tier.Write(j.ctx, j.ns, items)
	case kindRead:
		l.tier.Read(j.ctx, j.ns, items)
	default:
		found := make([]bool, len(j.keys))
		if items[0].Err = l.tier.Contains(j.ctx, j.ns, j.keys, found); items[0].Err == nil {
			j.found = found
		}
	}
}

// checkSource says whether the primary's bytes are what was committed.
func (l *Lane) checkSource(ch *chunk, k int) bool {
	if l.opt.noChecksum {
		return true
	}
	it := &ch.job.items[ch.index[k]]
	sum := crc64nvme.Checksum(it.Buf)
	if sum == it.Sum {
		return true
	}
	ch.items[k].Err = &tier.Error{Op: "write", Tier: l.name, Key: it.Key, Class: tier.ClassCorrupt, Cause: tier.CauseSource,
		Err:  fmt.Errorf("%w: have %016x, want %016x", errSourceSum, sum, it.Sum),
		Hint: "a process that maps the primary wrote outside its reservations, or memory is bad"}
	return false
}

// checkRead compares the bytes that a tier read with its checksum, which also
// catches an item that was left neither done nor failed. The job's own buffer
// counts, whatever the tier made of its copy of the item.
func (l *Lane) checkRead(p *place, ch *chunk, k int) {
	it := &ch.items[k]
	if it.Err != nil || l.opt.noChecksum {
		return
	}
	own := &ch.job.items[ch.index[k]]
	sum := crc64nvme.Checksum(own.Buf)
	if sum == it.Sum {
		return
	}
	it.Err = &tier.Error{Op: "read", Tier: l.name, Key: own.Key, Class: tier.ClassCorrupt, Cause: tier.CauseChecksum,
		Err:  fmt.Errorf("%w: have %016x, want %016x", errReadSum, sum, it.Sum),
		Hint: "the copy is set aside if the tier can"}
	aside, ok := l.tier.(tier.SetAsider)
	if !ok {
		return
	}
	l.mu.Lock()
	p.op, p.key, p.since = "set_aside", own.Key, time.Now()
	l.mu.Unlock()
	if ch.asideBy.IsZero() {
		ch.asideBy = time.Now().Add(setAsideTimeout)
	}
	err := l.putAside(aside, ch, k, it.Err.Error())
	l.mu.Lock()
	if l.setAside++; err != nil {
		l.asideErr++
	}
	l.mu.Unlock()
	if err != nil {
		l.warn.failed("set_aside", own.Key, err)
	}
}

func (l *Lane) putAside(aside tier.SetAsider, ch *chunk, k int, why string) (err error) {
	defer func() {
		if r := recover(); r != nil {
			l.warn.panicked("set_aside", ch.keyOf(k), r, debug.Stack())
			err = fmt.Errorf("the tier panicked: %v", r)
		}
	}()
	ctx, cancel := context.WithDeadline(context.WithoutCancel(ch.job.ctx), ch.asideBy)
	defer cancel()
	return aside.SetAside(ctx, ch.job.ns, ch.keyOf(k), why)
}

// timeout makes an error of a deadline what it is: a tier that hands its
// context's error on would look like one whose caller gave up.
func (l *Lane) timeout(ch *chunk, k int, err error) error {
	if tier.ClassOf(err) != tier.ClassCancelled || !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return &tier.Error{Op: ch.job.q.kind.String(), Tier: l.name, Key: ch.keyOf(k), Class: tier.ClassRetryable,
		Cause: tier.CauseTimeout, Err: err}
}

// against says whether an error speaks against the tier's health. Refusals for
// want of room, and what is wrong with one block or one namespace, do not.
func against(err error) bool {
	switch tier.ClassOf(err) {
	case tier.ClassRetryable, tier.ClassPermanent:
	default:
		return false
	}
	switch tier.CauseOf(err) {
	case tier.CauseNoSpace, tier.CauseCapacity, tier.CauseFloor, tier.CauseScanning, tier.CauseSource,
		tier.CauseNamespace, tier.CauseForeign:
		return false
	}
	return !errors.Is(err, tier.ErrNamespaceMismatch)
}

// isDown says whether an error is everybody's.
func isDown(err error) bool {
	var te *tier.Error
	return errors.As(err, &te) && te.Down && against(err)
}

// finishLocked takes a call that is over back: health, results, retries.
func (l *Lane) finishLocked(ch *chunk) {
	j := ch.job
	q := j.q
	now := time.Now()
	q.running--
	if ch.overdue {
		q.overdue--
		q.late -= ch.bytes
	} else {
		q.inflight -= ch.bytes
	}
	cancelled := j.cancelled || l.stopped
	bad, down, telling := false, false, false
	for k := range ch.items {
		err := ch.items[k].Err
		if err == nil { // tier.ClassOf allocates
			telling = true
			continue
		}
		class := tier.ClassOf(err)
		if cancelled && (class == tier.ClassRetryable || class == tier.ClassCancelled) {
			ch.items[k].Err, class = ErrCancelled, tier.ClassCancelled
		}
		if class != tier.ClassCancelled {
			bad, down = bad || against(err), down || isDown(err)
			telling = true
		}
	}
	if ch.called {
		q.n.calls++
		q.n.callTime += ch.took
		if l.opt.OnCall != nil && q.kind != kindProbe {
			l.opt.OnCall(Dir(q.kind), ch.took)
		}
		if ch.panics {
			q.n.panics++
		}
		// What ended by cancelling says nothing; what was overdue was counted then.
		if telling && !ch.overdue {
			l.setStateLocked(q.br, q.br.record(now, ch.epoch, bad, down, ch.took), now)
		}
	}

	again := now.Add(jitter(backoff(l.opt.Retry.Base, l.opt.Retry.Max, ch.attempt-1)))
	retry := ch.attempt < l.opt.Retry.Attempts && !cancelled && !l.closed && q.br.state != StateOpen && again.Before(j.deadline)
	keep := 0
	for k, i := range ch.index {
		it := &ch.items[k]
		if retry && it.Err != nil && tier.ClassOf(it.Err) == tier.ClassRetryable {
			ch.keep(keep, k)
			keep++
			continue
		}
		sum := uint64(0)
		if it.Err == nil && q.kind != kindProbe {
			if sum = it.Sum; q.kind == kindWrite {
				sum = j.items[i].Sum // the copy's is the tier's to change
			}
		}
		l.reportLocked(j, int(i), sum, it.Err)
	}
	if keep == 0 {
		l.freeLocked(ch)
		return
	}
	q.n.retries += uint64(keep)
	ch.shorten(keep)
	j.retries = append(j.retries, ch)
	l.arm(&ch.t, again)
}

// reportLocked makes a unit's outcome ready for the sink. Each unit comes here
// once.
func (l *Lane) reportLocked(j *job, i int, sum uint64, err error) {
	n := &j.q.n
	class := tier.ClassNone
	if err != nil {
		class = tier.ClassOf(err)
	}
	switch class {
	case tier.ClassNone:
		n.done++
		n.doneBytes += uint64(j.size(i))
	case tier.ClassNotFound:
		n.notFound++
	case tier.ClassCancelled:
		n.cancelled++
	default:
		n.failed++
		if c := int(tier.CauseOf(err)); c < len(n.causes) {
			n.causes[c]++
		}
	}
	if j.out == nil {
		j.out = l.outLocked()
	}
	j.out = append(j.out, Result{Index: i, Sum: sum, Err: err})
	if !j.noted && !j.delivering {
		j.noted = true
		l.notes = append(l.notes, j)
	}
}

// deliverLocked gives the sink all that is ready, and tells whether there was
// anything. It lets go of the lock around each call. Health goes first: a core
// that learns of failed jobs should know that it need not send new ones.
func (l *Lane) deliverLocked() (did bool) {
	for {
		if b := l.untoldLocked(); b != nil {
			did, l.telling = true, true
			was, s := b.told, b.state
			b.told = s
			l.mu.Unlock()
			l.warn.health(b.dir, was, s)
			l.tellHealth(b.dir, s)
			l.mu.Lock()
			l.telling = false
			continue
		}
		n := len(l.notes)
		if n == 0 {
			return did
		}
		did = true
		j := l.notes[n-1]
		l.notes[n-1] = nil
		l.notes = l.notes[:n-1]
		j.noted, j.delivering = false, true
		for len(j.out) > 0 {
			l.deliverJobLocked(j)
		}
		j.delivering = false
	}
}

func (l *Lane) untoldLocked() *breaker {
	for d := range l.br {
		if b := &l.br[d]; !l.telling && b.told != b.state {
			return b
		}
	}
	return nil
}

// deliverJobLocked gives the sink what is ready of one job. Bounds are given
// back just before, so that the sink may submit.
func (l *Lane) deliverJobLocked(j *job) {
	q := j.q
	out := j.out
	j.out = nil
	if j.left -= len(out); j.left < 0 {
		panic(fmt.Sprintf("transfer: an item of %s job %d was reported twice", q.kind, j.id)) // INVARIANT(transfer-one-report)
	}
	q.items -= len(out)
	for i := range out {
		q.bytes -= j.size(out[i].Index)
	}
	last := j.left == 0
	if last {
		l.timers.disarm(&j.t)
		q.jobs--
		delete(l.jobs, j.id)
		if l.closed && len(l.jobs) == 0 {
			l.wakeKeeper()
		}
	}
	l.mu.Unlock()
	if last && j.cancel != nil {
		j.cancel()
	}
	if q.kind == kindProbe {
		l.tellProbe(j, out[0].Err)
	} else {
		l.tellJob(j.id, out, last)
	}
	l.mu.Lock()
	if len(l.freeOut) < len(l.places) {
		clear(out)
		l.freeOut = append(l.freeOut, out[:0])
	}
}

func (l *Lane) tellJob(id JobID, out []Result, last bool) {
	defer l.sinkPanicked()
	l.sink.JobResults(l.index, id, out, last)
}

func (l *Lane) tellProbe(j *job, err error) {
	defer l.sinkPanicked()
	found := j.found
	if err != nil {
		found = nil
	}
	l.sink.ProbeResult(l.index, j.id, found, err)
}

func (l *Lane) tellHealth(d Dir, s State) {
	defer l.sinkPanicked()
	l.sink.Health(l.index, d, s)
}

func (l *Lane) sinkPanicked() {
	if r := recover(); r != nil {
		l.warn.panicked("report", zeroKey, r, debug.Stack())
		l.mu.Lock()
		l.sinkPanic++
		l.mu.Unlock()
	}
}

// newLocked is an empty chunk, from the pool if there is one.
func (l *Lane) newLocked(j *job) *chunk {
	var ch *chunk
	if n := len(l.freeCh); n > 0 {
		ch = l.freeCh[n-1]
		l.freeCh[n-1] = nil
		l.freeCh = l.freeCh[:n-1]
	} else {
		ch = &chunk{}
		ch.t.ch = ch
	}
	ch.job = j
	return ch
}

// freeLocked takes a chunk back, unless a panicked tier may still know it.
func (l *Lane) freeLocked(ch *chunk) {
	if ch.panics || len(l.freeCh) >= len(l.places) {
		return
	}
	clear(ch.items)
	*ch = chunk{index: ch.index[:0], items: ch.items[:0]}
	ch.t.ch = ch
	l.freeCh = append(l.freeCh, ch)
}

// outLocked is an empty list of results, from the pool if there is one.
func (l *Lane) outLocked() []Result {
	n := len(l.freeOut)
	if n == 0 {
		return make([]Result, 0, 8)
	}
	out := l.freeOut[n-1]
	l.freeOut[n-1] = nil
	l.freeOut = l.freeOut[:n-1]
	return out
}
