package core

import (
	"cmp"
	"slices"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
)

// tierState is what the core tracks of a secondary tier.
type tierState struct {
	facts           TierFacts
	readUp, writeUp bool  // what its breakers say
	reading         int   // blocks in promotions that are not quiet
	writing         int   // blocks in cascades that are not quiet
	inflight        int64 // bytes of both
	overdueBytes    int64
	probes          []block.Key // to be asked for when the lookup under way ends
	waiting         []waitingBlock
	timer           timer // of the first that waits
	stats           TierCounters
}

// up says whether work of a kind may be given to the tier. A tier that holds
// too much of the primary past its deadlines is down until it lets go.
func (t *tierState) up(k JobKind, overdueMax int64) bool {
	if t.overdueBytes > 0 && t.overdueBytes >= overdueMax {
		return false
	}
	if k == Cascade {
		return t.writeUp
	}
	return t.readUp
}

func (c *Core) overdueMax() int64 { return c.opt.Size * int64(c.opt.OverduePercent) / 100 }

// fits says whether a tier may be given one more block of so many bytes when
// so many are in flight already. One block it may always have. Cascades get
// half of what promotions get, so that stores never keep loads out.
func (c *Core) fits(k JobKind, inflight, bytes int64) bool {
	most := c.opt.Size * int64(c.opt.InflightPercent) / 100
	if k == Cascade {
		most /= 2
	}
	return inflight == 0 || inflight+bytes <= most
}

// job is asynchronous work. It ends once, when each of its keys has an
// outcome; it leaves the table when all its buffers are quiet as well.
//
// INVARIANT(job-settles): a job that has left the table holds no slot or pin.
type job struct {
	id      JobID
	kind    JobKind
	tier    int
	ns      NamespaceID
	since   Time
	blocks  []jobBlock
	open    int  // blocks without an outcome
	loud    int  // blocks whose buffer may still be touched
	overdue bool // its deadline settled some outcome
	src     uint64
	asker   *request // whose source src is, or nil
	timer   timer
	reset   *reset
	dropped bool // whose request is over

	keys []block.Key // of a probe
}

type jobBlock struct {
	slot    Slot
	q       *request // of a cascade: whose store it is
	settled bool
	quiet   bool
}

func (c *Core) newJob(k JobKind, t int, ns NamespaceID, within time.Duration) *job {
	j := &job{id: JobID(c.nextID()), kind: k, tier: t, ns: ns, since: c.now}
	j.timer = timer{kind: timerJob, job: j, at: c.now + Time(within)}
	return j
}

// ask makes a job on the bound tier that of a request's source.
func (c *Core) ask(j *job, q *request) {
	if j.src = c.source(j.tier, q); j.src != 0 {
		j.asker = q
	}
}

func (j *job) add(s Slot, q *request) {
	j.blocks = append(j.blocks, jobBlock{slot: s, q: q})
	j.open++
	j.loud++
}

// startJob enters a job into the table and asks for it to be run.
func (c *Core) startJob(j *job) {
	c.jobs[j.id] = j
	if j.asker != nil {
		j.asker.asked = append(j.asker.asked, j)
	}
	c.timers.arm(&j.timer, j.timer.at)
	blocks := make([]JobBlock, 0, len(j.blocks)+len(j.keys))
	for i := range j.blocks {
		e := c.at(j.blocks[i].slot)
		blocks = append(blocks, JobBlock{Key: e.key, Slot: j.blocks[i].slot, Sum: e.sum})
	}
	for i := range j.keys {
		blocks = append(blocks, JobBlock{Key: j.keys[i]})
	}
	c.tiers[j.tier].stats.Jobs[j.kind]++
	c.emit(StartJob{ID: j.id, Kind: j.kind, Tier: j.tier, NS: j.ns, Blocks: blocks, Deadline: j.timer.at, Source: j.src})
}

func (c *Core) sortedJobs() []*job {
	out := make([]*job, 0, len(c.jobs))
	for _, j := range c.jobs {
		out = append(out, j)
	}
	slices.SortFunc(out, func(a, b *job) int { return cmp.Compare(a.id, b.id) })
	return out
}

// cascade sees to it that newly stored blocks are written to every tier that
// the request allows.
func (c *Core) cascade(q *request, ready []Slot) {
	for t := range c.tiers {
		if q.store>>t&1 == 0 {
			continue
		}
		for i := len(ready) - 1; i >= 0; i-- { // roots are last: they are worth most
			c.await(t, ready[i], q)
		}
		c.pump(t)
	}
}

// waitingBlock is a stored block that is to be written to a tier as soon as
// the tier has credit. It is not pinned: memory is not held up by what is slow,
// and what is evicted before its turn is dropped and counted.
type waitingBlock struct {
	slot  Slot
	gen   uint32
	q     *request // whose store it is
	until Time
}

func (c *Core) await(t int, s Slot, q *request) {
	ts := &c.tiers[t]
	if len(ts.waiting) >= waitingMax {
		ts.stats.Dropped[DropFull]++
		q.failed++
		return
	}
	ts.waiting = append(ts.waiting, waitingBlock{s, c.at(s).gen, q, c.now + Time(c.opt.CascadeTimeout)})
	q.cascades++
	q.waiting++
}

// waitingMax bounds the blocks that wait for a tier's credit.
const waitingMax = 1 << 18

// pump starts cascades of what waits for a tier, as far as its credit goes, and
// drops what cannot be written any more.
func (c *Core) pump(t int) {
	ts := &c.tiers[t]
	if len(ts.waiting) == 0 {
		return
	}
	up := ts.up(Cascade, c.overdueMax())
	var j *job
	var over []*request // nothing of theirs waits any more
	for len(ts.waiting) > 0 {
		w := ts.waiting[0]
		e := c.lookAt(w.slot)
		why := -1
		switch {
		case e == nil || e.gen != w.gen || e.state != slotResident:
			why = DropEvicted
		case !up:
			why = DropDown
		case w.until <= c.now:
			why = DropLate
		}
		if why < 0 && (ts.writing >= ts.facts.WriteBlocksMax || !c.fits(Cascade, ts.inflight, c.bytesOf(w.slot))) {
			break
		}
		ts.waiting = ts.waiting[1:]
		if w.q.waiting--; w.q.waiting == 0 && w.q.final() {
			over = append(over, w.q)
		}
		if why >= 0 {
			ts.stats.Dropped[why]++
			w.q.failed++
			w.q.cascades--
			c.answerFlushes(w.q, false)
			continue
		}
		if j != nil && (j.ns != e.ns || len(j.blocks) == ReserveKeysMax) {
			c.startJob(j)
			j = nil
		}
		if j == nil {
			j = c.newJob(Cascade, t, e.ns, c.opt.CascadeTimeout)
		}
		c.pin(w.slot, e)
		j.add(w.slot, w.q)
		ts.writing++
		ts.inflight += c.bytesOf(w.slot)
	}
	if j != nil {
		c.startJob(j)
	}
	for _, q := range over {
		c.tellFinished(q)
	}
	if len(ts.waiting) == 0 {
		ts.waiting = nil
		c.timers.disarm(&ts.timer)
	} else if at := ts.waiting[0].until; ts.timer.pos == 0 || ts.timer.at != at {
		c.timers.arm(&ts.timer, at)
	}
}

// JobResult is how one block of a job came out, reported when its buffer is
// quiet. Outcome is Done only if every byte is in place.
type JobResult struct {
	Index   int
	Outcome Outcome
	Class   tier.Class // when not Done
	Cause   tier.Cause
	Sum     uint64 // of a promotion that is Done
}

// JobResults settles outcomes that are open and notes that buffers are quiet.
// What is late, twice or foreign is counted and otherwise ignored.
func (c *Core) JobResults(now Time, id JobID, results []JobResult) {
	c.now = now
	j := c.jobs[id]
	if j == nil || j.kind == ProbeJob {
		c.stats.ForeignResults += int64(len(results))
		return
	}
	for _, r := range results {
		if r.Index < 0 || r.Index >= len(j.blocks) || j.blocks[r.Index].quiet {
			c.stats.ForeignResults++
			continue
		}
		if r.Outcome != Done && r.Cause == tier.CauseSource && j.kind == Cascade {
			c.corrupt(j.blocks[r.Index].slot) // true however late
		}
		if j.blocks[r.Index].settled {
			c.tiers[j.tier].stats.Late++
		} else {
			c.settleBlock(j, r)
		}
		c.quietBlock(j, r.Index)
	}
	c.settle() // loads before stores: they get the credit that came back
	c.pump(j.tier)
	if q := j.asker; q != nil {
		for t := range c.tiers {
			if q.store>>t&1 != 0 {
				c.pump(t)
			}
		}
	}
}

// cascadePulled has what came from the bound tier written as a store of its
// request is, for nobody else here has it below. Where in the prompt a block is
// is not known here, so with a cap on stores none is.
func (c *Core) cascadePulled(j *job, s Slot) {
	q := j.asker
	if q == nil || q.params.MaxOffloadTokens >= 0 {
		return
	}
	for t := range c.tiers {
		if q.store>>t&1 != 0 {
			c.await(t, s, q)
		}
	}
}

// corrupt forgets a block whose bytes are not what was committed: nobody may
// have them.
func (c *Core) corrupt(s Slot) {
	if e := c.at(s); e.state == slotResident {
		c.stats.CorruptPrimary++
		c.doom(s, e)
	}
}

// settleBlock gives one block of a job its outcome.
func (c *Core) settleBlock(j *job, r JobResult) {
	b := &j.blocks[r.Index]
	b.settled = true
	ts := &c.tiers[j.tier]
	s, e := b.slot, c.at(b.slot)
	bytes := c.ns[e.ns].groups[e.key.Group()].bytes
	if r.Outcome == Failed && r.Class != tier.ClassNotFound {
		ts.stats.Failures[r.Cause]++
		if r.Class == tier.ClassCorrupt {
			ts.stats.Corrupt++
		}
	}
	switch {
	case j.kind == Promotion && r.Outcome == Done:
		h := e.holder
		c.classOf(s).filling[usePromote]--
		c.settleResident(s, e, r.Sum)
		e.safe |= 1 << j.tier
		ts.stats.Blocks[j.kind]++
		ts.stats.Bytes[j.kind] += bytes
		c.notify(c.fills[h].wanted, true, s, uint8(j.tier+1))
		c.forgetFill(h)
		c.cascadePulled(j, s)
	case j.kind == Promotion:
		h, key := e.holder, e.key
		if r.Outcome == Failed || j.reset == nil && !j.dropped {
			// Also when transfer gave up without a reason: who wants the block
			// would have it read again at once, and again.
			c.distrust(j, &key)
		}
		c.dropFill(h)
		c.forgetFill(h)
		e.holder = 0
	case r.Outcome == Done:
		e.safe |= 1 << j.tier
		ts.stats.Blocks[j.kind]++
		ts.stats.Bytes[j.kind] += bytes
		b.q.cascaded++
		c.believe(j.tier, j.ns, &e.key)
	default:
		b.q.failed++
	}
	if j.kind == Cascade {
		b.q.cascades--
		c.answerFlushes(b.q, false)
	}
	if j.open--; j.open == 0 {
		c.timers.disarm(&j.timer)
	}
}

// quietBlock gives back what the job held for one block.
func (c *Core) quietBlock(j *job, i int) {
	b := &j.blocks[i]
	b.quiet = true
	ts := &c.tiers[j.tier]
	s, e := b.slot, c.at(b.slot)
	ts.inflight -= c.bytesOf(s)
	if j.overdue {
		ts.overdueBytes -= c.bytesOf(s)
	}
	if j.kind == Cascade {
		ts.writing--
		c.unpin(s, e)
	} else {
		ts.reading--
		if e.state == slotQuarantined {
			c.unquarantine(s)
			c.release(s, e)
		}
	}
	if j.loud--; j.loud == 0 {
		c.endJob(j)
	}
}

func (c *Core) endJob(j *job) {
	c.timers.disarm(&j.timer)
	delete(c.jobs, j.id)
	if q := j.asker; q != nil {
		if i := slices.Index(q.asked, j); i >= 0 {
			q.asked = slices.Delete(q.asked, i, i+1)
		}
	}
	if r := j.reset; r != nil {
		if r.jobs--; r.jobs == 0 {
			c.endReset(true)
		}
	}
}

// failJob settles all open blocks of a job. Its slots stay what they are to
// the job until they are quiet.
func (c *Core) failJob(j *job, o Outcome) {
	r := JobResult{Outcome: o, Class: tier.ClassPermanent, Cause: tier.CauseTimeout}
	if o == Cancelled {
		r.Class, r.Cause = tier.ClassCancelled, tier.CauseOther
	}
	for i := range j.blocks {
		if !j.blocks[i].settled {
			r.Index = i
			c.settleBlock(j, r)
		}
	}
}

// jobOverdue settles a job at its deadline and asks for it to end.
func (c *Core) jobOverdue(j *job) {
	c.emit(CancelJob{ID: j.id, Tier: j.tier})
	if j.kind == ProbeJob {
		c.endProbe(j, nil, false)
		return
	}
	j.overdue = true
	for i := range j.blocks {
		if !j.blocks[i].quiet {
			c.tiers[j.tier].overdueBytes += c.bytesOf(j.blocks[i].slot)
		}
	}
	c.failJob(j, Failed)
	c.pump(j.tier)
}
