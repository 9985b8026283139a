package core

import (
	"fmt"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
)

// Lookup judges the keys of a prompt, one list per KV group of the namespace,
// each in prefix order, and answers with the longest prefix that all groups
// serve. It pins what is readable of that prefix, probes what is not known,
// and starts promotions of what is found below: for the run that will be used
// and no more, each block read once for all who want it.
//
// With WaitUntil later than now and verdicts that are not final, it returns a
// WaitID and the answer comes as AnswerLookup; out is then meaningless.
func (c *Core) Lookup(now Time, sid SessionID, name string, keys [][]block.Key, o LookupOptions, out *Answer) (WaitID, error) {
	q, err := c.active(sid, name)
	if err != nil {
		return 0, err
	}
	n := &c.ns[q.s.ns]
	if len(keys) != len(n.groups) {
		return 0, fmt.Errorf("%w: %d lists of keys, the namespace has %d groups", ErrInvalid, len(keys), len(n.groups))
	}
	for g := range keys {
		for i := range keys[g] {
			if keys[g][i].Group() != uint32(g) {
				return 0, fmt.Errorf("%w: keys[%d][%d] names group %d", ErrInvalid, g, i, keys[g][i].Group())
			}
		}
	}
	c.now = now
	if !q.params.NoPeers {
		c.stats.Lookups++
	}
	out.each = o.Each
	if o.Peek {
		c.judge(q, keys, true, false, out)
		return 0, nil
	}
	c.voidWait(q)
	c.judge(q, keys, false, q.overdue, out)
	if out.Final {
		c.conclude(q, out)
		return 0, nil
	}
	if q.lookupTimer.pos == 0 {
		c.timers.arm(&q.lookupTimer, now+Time(c.lookupTimeout(q)))
	}
	if o.WaitUntil <= now {
		c.tell(q, out, false) // the engine may load these already
		return 0, nil
	}
	w := &waitingLookup{id: WaitID(c.nextID()), keys: make([][]block.Key, len(keys)), each: o.Each}
	for g := range keys {
		w.keys[g] = append([]block.Key(nil), keys[g]...)
	}
	w.timer = timer{kind: timerWait, req: q}
	q.wait = w
	c.waits++
	c.timers.arm(&w.timer, min(o.WaitUntil, q.lookupTimer.at))
	return w.id, nil
}

// lookupTimeout is at least what the bound tier has for a request's blocks: to
// give them up earlier would waste what is on its way.
func (c *Core) lookupTimeout(q *request) time.Duration {
	d := c.opt.LookupTimeout
	for t := range c.tiers {
		switch f := &c.tiers[t].facts; {
		case f.Bound && q.params.Peer == PeerProbe:
			d = max(d, f.ProbeTimeout+f.PromoteTimeout)
		case f.Bound && q.params.Peer == PeerAssume:
			d = max(d, f.AssumeTimeout)
		}
	}
	return d
}

// voidWait answers a waiting lookup that nobody will use.
func (c *Core) voidWait(q *request) {
	if q.wait != nil {
		c.endWait(q, &Answer{Void: true})
	}
}

func (c *Core) endWait(q *request, a *Answer) {
	c.emit(AnswerLookup{Wait: q.wait.id, Answer: a})
	c.timers.disarm(&q.wait.timer)
	q.wait = nil
	c.waits--
}

// answerWait judges a waiting lookup again and answers it if it is final, as
// it always is when overdue.
func (c *Core) answerWait(q *request, overdue bool) {
	a := &Answer{each: q.wait.each}
	c.judge(q, q.wait.keys, false, overdue, a)
	if a.Final {
		c.conclude(q, a)
		c.endWait(q, a)
	}
}

// lookupOverdue ends the wait that began with the first answer that was not
// final, whether the engine waits or polls.
func (c *Core) lookupOverdue(q *request) {
	if q.wait != nil {
		c.answerWait(q, true)
		return
	}
	q.overdue = true
	q.epoch++
	q.pending = 0
	c.dropSoft(q)
}

// settle judges again for those whose lookups something has changed.
func (c *Core) settle() {
	for i := 0; i < len(c.rejudge); i++ {
		q := c.rejudge[i]
		q.dirty = false
		if q.wait != nil {
			c.answerWait(q, false)
		}
	}
	clear(c.rejudge)
	c.rejudge = c.rejudge[:0]
	for _, q := range c.supplied {
		if q.supplied = false; c.supplies[q.seq] == q {
			c.emitSupply(q, SupplyMore)
		}
	}
	clear(c.supplied)
	c.supplied = c.supplied[:0]
}

// conclude accounts for a final answer: the engine now knows of its pins, and
// what was pinned for it on the way and is not part of the answer is given back.
func (c *Core) conclude(q *request, a *Answer) {
	c.timers.disarm(&q.lookupTimer)
	q.overdue = false
	q.epoch++
	q.pending = 0
	if !q.params.NoPeers { // those count engines' keys
		for g := range a.Groups {
			for _, v := range a.Groups[g].Verdicts {
				c.stats.Verdicts[v]++
			}
		}
	}
	c.tell(q, a, true)
	c.dropSoft(q)
}

// tell notes that the engine hears of the leases of an answer. A final one
// counts which tier each was served from, unless it is a peer that asked.
func (c *Core) tell(q *request, a *Answer, final bool) {
	counts := final && !q.params.NoPeers
	for _, f := range c.scratch.fresh {
		c.tellPin(q, f.pin)
	}
	ordered := q.promoted == 0
	for g := range a.Groups {
		leases := a.Groups[g].Leases
		if counts {
			c.stats.PrimaryHits += int64(len(leases))
		}
		for i := 0; counts && a.each && i < len(leases); i++ {
			if leases[i].Gen == 0 {
				c.stats.PrimaryHits--
			}
		}
		if ordered && q.soft == 0 {
			continue
		}
		for _, l := range leases {
			if l.Gen == 0 {
				continue
			}
			h := c.findPin(q, l.Slot)
			c.tellPin(q, h)
			if !final || ordered {
				continue
			}
			// Pins were taken as reads came in. The list must be in prefix
			// order again, because in its order blocks will age.
			p := c.pins.At(h)
			c.unlinkPin(q, p)
			c.linkPin(q, h, 0)
			if p.from > 0 {
				if counts {
					c.tiers[p.from-1].stats.Hits++
					c.stats.PrimaryHits--
				}
				p.from = 0
				q.promoted--
			}
		}
	}
}

// dropSoft gives back pins that no answer has told the engine of.
func (c *Core) dropSoft(q *request) {
	for h := q.pinTail; h != 0 && q.soft > 0; {
		prev := c.pins.At(h).prev
		if !c.pins.At(h).told {
			c.dropPin(q, h)
		}
		h = prev
	}
}

// freshPin is a pin that the lookup under way has taken.
type freshPin struct {
	pin  uint32
	g, i int
}

// judge fills in an answer. overdue makes a Miss of all that is not readable
// now; peek changes nothing.
//
// A mark says more of a verdict: t+1 for a block that tier t has (HitPending)
// or may have (Retry) and for which nothing is under way yet, -t-1 for one that
// tier t is being asked for (Retry).
func (c *Core) judge(q *request, keys [][]block.Key, peek, overdue bool, out *Answer) {
	n := &c.ns[q.s.ns]
	j := &judgement{each: out.each, c: c, q: q, n: n, keys: keys, peek: peek, overdue: overdue, out: out}
	j.prepare()
	tokens := j.fit(j.limit())
	c.scratch.fresh = c.scratch.fresh[:0]
	if !peek {
		if !overdue && q.pending > 0 {
			q.epoch++
			q.pending = 0
		}
		for {
			j.pinHits(tokens)
			if j.probe(tokens) || j.promote(tokens) {
				break
			}
			tokens = j.fit(tokens)
		}
		j.unpinBeyond(tokens)
	}
	j.finish(tokens)
}

type judgement struct {
	each          bool
	c             *Core
	q             *request
	n             *namespace
	keys          [][]block.Key
	peek, overdue bool
	out           *Answer
	marks         [][]int8
	slots         [][]Slot // where the primary has what is Hit or HitPending without a mark
	good          []int    // so many keys of a group from its first on are no Miss
	below         bool     // some mark is set
	cuts          int
}

// cutsMax bounds how often a run is shortened for lack of room before the
// lookup makes do with what is in the primary.
const cutsMax = 8

// cut makes a Miss of a key that there is no room for.
func (j *judgement) cut(g, i int, why Verdict) {
	j.out.Groups[g].Verdicts[i], j.marks[g][i] = why, 0
	j.good[g] = min(j.good[g], i)
}

// shorten cuts a run that cannot be promoted as a whole.
func (j *judgement) shorten(g, i int, why Verdict) {
	j.cut(g, i, why)
	j.c.stats.PromotionsShortened++
	if j.cuts++; j.cuts < cutsMax {
		return
	}
	for g := range j.keys {
		for i, t := range j.marks[g] {
			if t > 0 && j.out.Groups[g].Verdicts[i] == HitPending {
				j.cut(g, i, why)
			}
		}
	}
}

// prepare sizes the answer and the marks; neither allocates when they have
// been used for as long a prompt before.
func (j *judgement) prepare() {
	j.out.Void = false
	for len(j.out.Groups) < len(j.keys) {
		j.out.Groups = append(j.out.Groups, GroupAnswer{})
	}
	j.out.Groups = j.out.Groups[:len(j.keys)]
	m := &j.c.scratch.marks
	for len(*m) < len(j.keys) {
		*m = append(*m, nil)
	}
	j.marks = (*m)[:len(j.keys)]
	sl := &j.c.scratch.slots
	for len(*sl) < len(j.keys) {
		*sl = append(*sl, nil)
	}
	j.slots = (*sl)[:len(j.keys)]
	j.good = j.c.scratch.good[:0]
	for range j.keys {
		j.good = append(j.good, 0)
	}
	j.c.scratch.good = j.good
	for g := range j.keys {
		n := len(j.keys[g])
		a := &j.out.Groups[g]
		if cap(a.Verdicts) < n {
			a.Verdicts = make([]Verdict, n)
		}
		a.Verdicts = a.Verdicts[:n]
		clear(a.Verdicts)
		if cap(j.marks[g]) < n {
			j.marks[g] = make([]int8, n, n+n/2)
		}
		j.marks[g] = j.marks[g][:n]
		clear(j.marks[g])
		if cap(j.slots[g]) < n {
			j.slots[g] = make([]Slot, n, n+n/2)
		}
		j.slots[g] = j.slots[g][:n]
		a.First, a.Leases = 0, a.Leases[:0]
	}
}

// limit is the longest prefix that the lists and the request's cap allow.
func (j *judgement) limit() int64 {
	limit := int64(-1)
	for g := range j.keys {
		if t := int64(len(j.keys[g])) * j.n.groups[g].tpb; limit < 0 || t < limit {
			limit = t
		}
	}
	if m := j.q.params.MaxLoadTokens; m >= 0 {
		limit = min(limit, m)
	}
	return limit
}

// fit is the longest prefix of at most limit tokens that every group can serve
// with what is not a Miss. It looks at no more keys than it needs.
func (j *judgement) fit(limit int64) int64 {
	if j.each {
		for g := range j.keys {
			for i := range j.keys[g] {
				if j.out.Groups[g].Verdicts[i] == VerdictNone {
					j.look(g, i, min(len(j.keys[g]), i+lookChunk))
				}
			}
		}
		return 0
	}
	for again := true; again; {
		again = false
		for g := range j.keys {
			gf := &j.n.groups[g]
			end := int(limit / gf.tpb)
			if gf.window == 0 {
				end = j.prefixEnd(g, end)
			} else {
				end = j.windowEnd(g, end, gf.window)
			}
			if t := int64(end) * gf.tpb; t < limit {
				limit = t
				again = len(j.keys) > 1
			}
		}
	}
	return limit
}

const lookChunk = 32 // keys looked at together: enough to batch, few to waste

func (j *judgement) prefixEnd(g, n int) int {
	v := j.out.Groups[g].Verdicts
	for i := j.good[g]; i < n; i++ {
		if v[i] == VerdictNone {
			j.look(g, i, min(n, i+lookChunk))
		}
		if v[i].Miss() {
			return i
		}
		j.good[g] = i + 1
	}
	return n
}

// windowEnd is the end of the last run of w blocks, or of a run that reaches
// back to the root.
func (j *judgement) windowEnd(g, n, w int) int {
	v := j.out.Groups[g].Verdicts
	end := n
	for i := n - 1; i >= 0; i-- {
		if v[i] == VerdictNone {
			j.look(g, max(0, i+1-lookChunk), i+1)
		}
		if v[i].Miss() {
			end = i
		} else if end-i == w {
			return end
		}
	}
	return end
}

// run is the stretch of a group's keys that a prefix of so many tokens needs.
func (j *judgement) run(g int, tokens int64) (first, end int) {
	if j.each {
		return 0, len(j.keys[g])
	}
	gf := &j.n.groups[g]
	end = int(tokens / gf.tpb)
	if gf.window > 0 {
		first = max(0, end-gf.window)
	}
	return first, end
}

// look judges keys lo to hi of a group that have not been judged.
func (j *judgement) look(g, lo, hi int) {
	c := j.c
	v := j.out.Groups[g].Verdicts
	below := c.scratch.at[:0]
	for i := lo; i < hi; i++ {
		if v[i] != VerdictNone {
			continue
		}
		s, e, ok := c.find(j.q.s.ns, &j.keys[g][i])
		j.slots[g][i] = s
		switch {
		case !ok:
			below = append(below, i)
		case e.state == slotResident:
			v[i] = Hit
		case j.overdue:
			v[i] = MissWaited
		default:
			v[i] = HitPending
		}
	}
	c.scratch.at = below
	if len(below) > 0 {
		j.consult(g, below)
	}
}

// consult judges keys that the primary does not have: ordered tiers, the first
// that has it wins.
func (j *judgement) consult(g int, at []int) {
	c, v, marks := j.c, j.out.Groups[g].Verdicts, j.marks[g]
	for _, i := range at {
		v[i] = MissAbsent
	}
	if len(c.tiers) == 0 {
		return
	}
	keys, have := c.scratch.keys[:0], c.scratch.presence[:0]
	for _, i := range at {
		keys = append(keys, j.keys[g][i])
		have = append(have, tier.Unknown)
	}
	c.scratch.keys, c.scratch.presence = keys, have
	peer := j.q.params.Peer
	for t := range c.tiers {
		ts := &c.tiers[t]
		if ts.facts.Bound && peer == PeerNone {
			continue
		}
		if ts.facts.Known != nil {
			ts.facts.Known(j.q.s.ns, keys, have)
		} else {
			clear(have)
		}
		for k, i := range at {
			if marks[i] != 0 {
				continue // an earlier tier has it or may have it
			}
			p, under, why := have[k], false, VerdictNone
			if ts.facts.Bound && peer == PeerAssume {
				p = tier.Present
			}
			if len(c.facts) > 0 {
				p, under, why = c.factOf(t, j.q, &keys[k], p)
			}
			if peer == PeerAssume && p == tier.Unknown {
				continue // the peer has it, or will: nobody else is waited for
			}
			switch {
			case why != VerdictNone:
				v[i] = why
			case p == tier.Absent:
			case j.q.load>>t&1 == 0:
				if p == tier.Present {
					v[i] = MissFiltered
				}
			case !ts.up(Promotion, c.overdueMax()):
				v[i] = MissUnavailable
			case j.overdue:
				v[i] = MissWaited
			case c.draining:
				v[i] = MissDraining
			case j.cuts >= cutsMax:
				v[i] = MissNoRoom
			case p == tier.Present:
				v[i], marks[i] = HitPending, int8(t+1)
				j.below = true
			case under:
				v[i], marks[i] = Retry, -int8(t+1)
			default:
				v[i], marks[i] = Retry, int8(t+1)
			}
		}
	}
}

// pinHits pins what is readable of the run, before anything is evicted for the
// rest of it.
func (j *judgement) pinHits(tokens int64) {
	c := j.c
	for g := range j.keys {
		v := j.out.Groups[g].Verdicts
		first, end := j.run(g, tokens)
		for i := first; i < end; i++ {
			if v[i] != Hit {
				continue
			}
			s := j.slots[g][i]
			if h, fresh := c.pinFor(j.q, s, c.at(s), 0, false); fresh {
				c.scratch.fresh = append(c.scratch.fresh, freshPin{h, g, i})
			}
		}
	}
}

// unpinBeyond gives back pins of this lookup that the run turned out not to need.
func (j *judgement) unpinBeyond(tokens int64) {
	fresh := j.c.scratch.fresh
	kept := fresh[:0]
	for _, f := range fresh {
		if first, end := j.run(f.g, tokens); f.i < first || f.i >= end {
			j.c.dropPin(j.q, f.pin)
		} else {
			kept = append(kept, f)
		}
	}
	j.c.scratch.fresh = kept
	if len(kept) < len(fresh) {
		j.pinHits(tokens) // a key that stands twice was pinned for where it is not needed
	}
}

// probe asks for what is not known of the run, and says whether anything is.
// Promotions wait for the answers, because they decide how long the run is.
func (j *judgement) probe(tokens int64) bool {
	c, pending := j.c, false
	for g := range j.keys {
		v := j.out.Groups[g].Verdicts
		first, end := j.run(g, tokens)
		for i := first; i < end; i++ {
			if v[i] != Retry {
				continue
			}
			pending = true
			t := int(j.marks[g][i])
			if t > 0 {
				c.addProbe(t-1, j.q, &j.keys[g][i])
			}
			c.wantFact(j.q, max(t, -t)-1, &j.keys[g][i])
		}
	}
	if pending {
		c.startProbes(j.q)
		j.want(tokens)
	}
	return pending
}

// promote starts reads of what the run needs from below, as a whole, and says
// whether the run stands. If room or a tier's credit is short it starts
// nothing, makes a Miss of the first key that is too much, and says no.
func (j *judgement) promote(tokens int64) bool {
	c := j.c
	if !j.below {
		j.want(tokens)
		return true
	}
	room := c.scratch.room[:0]
	for range c.classes {
		room = append(room, -1)
	}
	c.scratch.room = room
	var credit [TiersMax]int
	var inflight [TiersMax]int64
	for t := range c.tiers {
		credit[t], inflight[t] = c.tiers[t].facts.ReadBlocksMax-c.tiers[t].reading, c.tiers[t].inflight
	}
	need := 0
	for g := range j.keys {
		v, ki := j.out.Groups[g].Verdicts, j.n.groups[g].class
		first, end := j.run(g, tokens)
		for i := first; i < end; i++ {
			t := j.marks[g][i]
			if t == 0 || v[i] != HitPending {
				continue
			}
			if room[ki] < 0 {
				room[ki] = c.admit(&c.classes[ki], usePromote)
			}
			if room[ki] == 0 {
				j.shorten(g, i, MissNoRoom)
				return false
			}
			bytes := int64(c.classes[ki].stride) * PageSize
			if credit[t-1] <= 0 || !c.fits(Promotion, inflight[t-1], bytes) {
				j.shorten(g, i, MissUnavailable)
				return false
			}
			room[ki]--
			credit[t-1]--
			inflight[t-1] += bytes
			need++
		}
	}
	stands := true
	if need > 0 {
		stands = j.startPromotions(tokens)
	}
	if stands {
		j.want(tokens)
	}
	return stands
}

// startPromotions takes slots and emits one job a tier. Classes that take
// extents from each other can leave the last one short: its run is then cut.
func (j *judgement) startPromotions(tokens int64) bool {
	c := j.c
	var jobs [TiersMax]*job
	stands := true
	for g := range j.keys {
		v := j.out.Groups[g].Verdicts
		first, end := j.run(g, tokens)
		for i := first; i < end && stands; i++ {
			t := int(j.marks[g][i]) - 1
			if t < 0 || v[i] != HitPending {
				continue
			}
			key := &j.keys[g][i]
			if s, _, ok := c.find(j.q.s.ns, key); ok {
				j.marks[g][i], j.slots[g][i] = 0, s // the same key stands twice in the prompt
				continue
			}
			ki := j.n.groups[g].class
			if len(c.classes) > 1 && c.admit(&c.classes[ki], usePromote) == 0 {
				j.shorten(g, i, MissNoRoom)
				stands = false
				break
			}
			s, e, ok := c.take(ki, usePromote)
			if !ok {
				panic("core: an admitted promotion found no slot")
			}
			if jobs[t] == nil {
				within := c.tiers[t].facts.PromoteTimeout
				if c.tiers[t].facts.Bound && j.q.params.Peer == PeerAssume {
					within = c.tiers[t].facts.AssumeTimeout
				}
				jobs[t] = c.newJob(Promotion, t, j.q.s.ns, within)
				c.ask(jobs[t], j.q)
			}
			c.fillSlot(s, e, j.q.s.ns, key, fill{slot: s, kind: fillPromote, job: jobs[t], idx: len(jobs[t].blocks)})
			jobs[t].add(s, nil)
			c.tiers[t].reading++
			c.tiers[t].inflight += c.bytesOf(s)
			j.marks[g][i], j.slots[g][i] = 0, s
		}
	}
	for _, jb := range jobs {
		if jb != nil {
			c.startJob(jb)
		}
	}
	if !stands {
		j.lookAgain(tokens)
	}
	return stands
}

// lookAgain forgets the hits beyond the run: they are not pinned, and room for
// the run may have been made of them.
func (j *judgement) lookAgain(tokens int64) {
	for g := range j.keys {
		first, end := j.run(g, tokens)
		for i, v := range j.out.Groups[g].Verdicts {
			if v == Hit && (i < first || i >= end) {
				j.out.Groups[g].Verdicts[i] = VerdictNone
				j.good[g] = min(j.good[g], i)
			}
		}
	}
}

// want registers the request with every fill that the run waits for.
func (j *judgement) want(tokens int64) {
	c := j.c
	for g := range j.keys {
		v := j.out.Groups[g].Verdicts
		first, end := j.run(g, tokens)
		for i := first; i < end; i++ {
			if v[i] != HitPending || j.marks[g][i] != 0 {
				continue
			}
			f := &c.fills[c.at(j.slots[g][i]).holder]
			f.wanted = addInterest(f.wanted, j.q)
		}
	}
}

// finish writes the answer that the verdicts amount to.
//
// INVARIANT(hit-committed): each lease of an answer names a block that is
// committed and, unless the call was a peek, pinned for the request.
func (j *judgement) finish(tokens int64) {
	out := j.out
	out.Tokens, out.Final = tokens, true
	for g := range j.keys {
		a := &out.Groups[g]
		first, end := j.run(g, tokens)
		a.First = first
		for i := range first {
			a.Verdicts[i] = VerdictNone
		}
		for i := first; i < end; i++ {
			var l Lease
			switch a.Verdicts[i] {
			case Hit:
				if !j.peek {
					s := j.slots[g][i]
					e := j.c.at(s)
					l = Lease{Slot: s, Gen: e.gen, Sum: e.sum}
				}
			case HitPending, Retry:
				out.Final = false
			}
			a.Leases = append(a.Leases, l)
		}
		for i := end; i < len(a.Verdicts); i++ {
			if a.Verdicts[i].Miss() {
				continue
			}
			a.Verdicts[i] = MissUnusable
			if m := j.q.params.MaxLoadTokens; m >= 0 && int64(i+1)*j.n.groups[g].tpb > m {
				a.Verdicts[i] = MissCapped
			}
		}
	}
}
