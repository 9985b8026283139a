package core

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/terrace-kv/terrace/block"
)

type reqState uint8

const (
	reqActive    reqState = iota // takes calls
	reqFinishing                 // finished; stores of it are pending
	reqHandover                  // finalised; its blocks wait to be fetched
	reqGone
)

// request is one generation of an engine's request id.
type request struct {
	s      *session
	id     string
	seq    uint64 // unique in the core: a late reference to an earlier generation never meets a later one
	params Params
	state  reqState
	load   uint16 // bit t: may load from tier t
	store  uint16 // bit t: may store to tier t

	// Neighbours among the generations of its id, or in session.keep.
	older, newer *request

	// Pins, oldest first. INVARIANT(pins-are-a-set): at most one a block.
	pinHead, pinTail uint32
	npins            int
	soft             int    // pins that no answer has told the engine of yet
	promoted         int    // pins whose tier no answer has counted yet
	pinStored        uint32 // the first of those that it has stored, for a hand-over

	// Reservations and blocks being summed.
	fillHead uint32
	fills    int

	// Cascades of blocks that it stored.
	cascades         int // without an outcome
	waiting          int // of these, for a tier's credit
	cascaded, failed int
	flushes          []flushWait
	flushTimer       timer

	// A lookup that is not final.
	pending     int    // fills and probes that it waits for
	epoch       uint64 // interest registered under another epoch is void
	overdue     bool   // the next lookup takes what is pending for a Miss
	lookupTimer timer
	wait        *waitingLookup
	dirty       bool // in core.rejudge

	asked []*job // on the bound tier, by its source; each is in core.jobs

	handover timer
	keeping  int // blocks that others fill and that it is to keep

	supplied  bool // in core.supplied
	toldFinal bool // SupplyFinal has been told
}

// waitingLookup is a call that is held back.
//
// INVARIANT(wait-ends): whatever waits (lookup, flush, reset, probe, job,
// reservation, hand-over, block without credit) has a timer that ends it.
type waitingLookup struct {
	id    WaitID
	each  bool
	keys  [][]block.Key // a copy
	timer timer
}

type flushWait struct {
	id    WaitID
	until Time
}

// interest is a request that wants to hear of a fill or a probe. Lists of them
// are in the order of the requests' seq, one entry a request.
type interest struct {
	q     *request
	epoch uint64 // of its lookup; 0: none
	keep  bool   // it is to keep the block for its hand-over
}

// interestOf is the request's entry in a list, made if it has none.
func interestOf(list []interest, q *request) ([]interest, *interest) {
	i, ok := slices.BinarySearchFunc(list, q.seq, func(w interest, seq uint64) int { return cmp.Compare(w.q.seq, seq) })
	if !ok {
		list = slices.Insert(list, i, interest{q: q})
	}
	return list, &list[i]
}

// addInterest registers a lookup for what ends later.
func addInterest(list []interest, q *request) []interest {
	list, w := interestOf(list, q)
	if w.epoch != q.epoch {
		w.epoch = q.epoch
		q.pending++
	}
	return list
}

// addKeep registers a request for its hand-over.
func addKeep(list []interest, q *request) []interest {
	list, w := interestOf(list, q)
	if !w.keep {
		w.keep = true
		q.keeping++
	}
	return list
}

// NewRequest starts a request. An id that is unfinished is a conflict; one
// that is finished starts a new generation, which late results of the old one
// cannot reach.
func (c *Core) NewRequest(now Time, sid SessionID, name string, p Params) error {
	s, err := c.session(sid)
	if err != nil {
		return err
	}
	old := s.requests[name]
	if old != nil && old.state == reqActive {
		return fmt.Errorf("%w: %q", ErrConflict, name)
	}
	if c.draining {
		return ErrDraining
	}
	if p.NoPeers {
		p.Peer = PeerNone
	}
	if n := s.unfinished + s.kept; n >= c.opt.RequestsMax {
		return fmt.Errorf("%w: session has %d unfinished requests and hand-overs", ErrTooMany, n)
	}
	c.now = now
	q := &request{s: s, id: name, seq: c.nextID(), params: p, epoch: 1}
	for t := range c.tiers {
		f := &c.tiers[t].facts
		if matches(p.LoadTiers, f) {
			q.load |= 1 << t
		}
		if matches(p.StoreTiers, f) && !f.Bound {
			q.store |= 1 << t
		}
	}
	q.lookupTimer = timer{kind: timerLookup, req: q}
	q.flushTimer = timer{kind: timerFlush, req: q}
	q.handover = timer{kind: timerHandover, req: q}
	s.requests[name] = link(old, q)
	s.unfinished++
	c.requests++
	if p.RemoteDecoder && p.KVRequestID != "" {
		c.supplies[q.seq] = q
		c.emitSupply(q, SupplyOpen)
	}
	return nil
}

// RequestSeq is what no other request of the core has: of the newest generation
// of an id, 0 if there is none.
func (c *Core) RequestSeq(sid SessionID, name string) uint64 {
	if q, err := c.request(sid, name); err == nil {
		return q.seq
	}
	return 0
}

func (c *Core) emitSupply(q *request, s SupplyState) {
	c.emit(Supply{NS: q.s.ns, ID: q.params.KVRequestID, Seq: q.seq, State: s})
}

// supply notes that more of a hand-over can be read.
func (c *Core) supply(q *request) {
	if !q.supplied && c.supplies[q.seq] == q {
		q.supplied = true
		c.supplied = append(c.supplied, q)
	}
}

// finalSupply tells once that no more of a hand-over will come.
func (c *Core) finalSupply(q *request) {
	if !q.toldFinal && c.supplies[q.seq] == q {
		q.toldFinal = true
		c.emitSupply(q, SupplyFinal)
	}
}

// endSupply tells that a hand-over's blocks are kept no longer.
func (c *Core) endSupply(q *request) {
	if c.supplies[q.seq] != q {
		return
	}
	c.finalSupply(q)
	c.emitSupply(q, SupplyEnded)
	delete(c.supplies, q.seq)
}

// ReleaseHandover ends the hand-over of a request that has finished: its blocks
// have been fetched. Of one that has not, or that has ended, it changes nothing
// and says no.
func (c *Core) ReleaseHandover(now Time, seq uint64) bool {
	q := c.supplies[seq]
	if q == nil || q.state != reqHandover {
		return false
	}
	c.now = now
	c.endHandover(q)
	c.settle()
	return true
}

// dropSource ends what the request has under way on the bound tier: nobody else
// has its source, and to wait for it any longer would hold slots for nothing.
func (c *Core) dropSource(q *request) {
	if q.params.Peer == PeerNone {
		return
	}
	q.params.Peer = PeerNone
	asked := q.asked
	q.asked = nil
	for _, j := range asked {
		if j.open == 0 && j.kind != ProbeJob {
			continue
		}
		j.dropped = true
		c.emit(CancelJob{ID: j.id, Tier: j.tier})
		if j.kind == ProbeJob {
			c.endProbe(j, nil, false)
		} else {
			c.failJob(j, Cancelled)
		}
	}
	for t := range c.tiers {
		if c.tiers[t].facts.Bound {
			c.emit(CloseSource{Tier: t, Seq: q.seq})
		}
	}
}

func matches(filter []TierFilter, f *TierFacts) bool {
	if filter == nil {
		return true
	}
	for _, e := range filter {
		if (e.Medium == "" || f.Medium == "" || e.Medium == f.Medium) &&
			(e.Locality == "" || f.Locality == "" || e.Locality == f.Locality) {
			return true
		}
	}
	return false
}

// Finish ends a request: a waiting lookup is void, its pins are given back
// (unless it is kept for a hand-over), and once its last store is submitted or
// given up, tiers hear of its end.
func (c *Core) Finish(now Time, sid SessionID, name string) error {
	q, err := c.active(sid, name)
	if err != nil {
		return err
	}
	c.now = now
	c.endCalls(q)
	if q.params.RemoteDecoder {
		q.state = reqFinishing
		c.timers.arm(&q.handover, now+Time(c.opt.UnboundStoreTimeout))
		c.finalise(q)
	} else {
		c.endRequest(q)
	}
	c.settle()
	return nil
}

// endCalls voids what the request still waits for.
func (c *Core) endCalls(q *request) {
	c.voidWait(q)
	q.epoch++
	q.pending = 0
	c.timers.disarm(&q.lookupTimer)
	c.dropSource(q)
}

// endRequest ends a request whose blocks nobody will fetch.
func (c *Core) endRequest(q *request) {
	c.endCalls(q)
	c.unpinAll(q)
	c.endSupply(q)
	q.params.RemoteDecoder = false
	q.state = reqFinishing
	c.finalise(q)
}

// finalise lets a finishing request go once no store of it is pending.
func (c *Core) finalise(q *request) {
	if q.state != reqFinishing || q.fills > 0 {
		return
	}
	c.answerFlushes(q, q.s.dead)
	if q.waiting == 0 {
		c.tellFinished(q)
	}
	s := q.s
	if newest := unlink(s.requests[q.id], q); newest != nil {
		s.requests[q.id] = newest
	} else {
		delete(s.requests, q.id)
	}
	s.unfinished--
	c.requests--
	if q.keeping == 0 {
		c.finalSupply(q)
	}
	if !q.params.RemoteDecoder || q.npins == 0 && q.keeping == 0 || s.dead {
		c.endSupply(q)
		c.unpinAll(q)
		c.timers.disarm(&q.handover)
		q.state = reqGone
		c.settleSession(s)
		return
	}
	q.state = reqHandover
	s.keep = link(s.keep, q)
	s.kept++
	c.handovers++
}

// final says that the request has been finalised.
func (q *request) final() bool { return q.state == reqHandover || q.state == reqGone }

// tellFinished tells tiers of the request's end: nothing of it will be written
// to them that has not been submitted.
func (c *Core) tellFinished(q *request) {
	c.emit(RequestFinished{Session: q.s.id, Request: q.id})
}

// endHandover gives back what a finished request kept for its fetcher.
func (c *Core) endHandover(q *request) {
	c.timers.disarm(&q.handover)
	c.endSupply(q)
	switch q.state {
	case reqFinishing: // the bound passed before its last store did
		q.params.RemoteDecoder = false
		c.unpinAll(q)
	case reqHandover:
		c.unpinAll(q)
		q.s.keep = unlink(q.s.keep, q)
		q.s.kept--
		q.state = reqGone
		c.handovers--
	}
}

// link puts a request before the newest of a list, and unlink takes it out.
// Both return the newest.
func link(newest, q *request) *request {
	if newest != nil {
		newest.newer = q
	}
	q.older = newest
	return q
}

func unlink(newest, q *request) *request {
	if q.older != nil {
		q.older.newer = q.newer
	}
	if q.newer != nil {
		q.newer.older = q.older
	} else {
		newest = q.older
	}
	q.older, q.newer = nil, nil
	return newest
}

// all lists the requests and hand-overs of a session, oldest first.
func (s *session) all() []*request {
	out := make([]*request, 0, s.unfinished+s.kept)
	for _, q := range s.requests {
		for ; q != nil; q = q.older {
			out = append(out, q)
		}
	}
	for q := s.keep; q != nil; q = q.older {
		out = append(out, q)
	}
	slices.SortFunc(out, func(a, b *request) int { return cmp.Compare(a.seq, b.seq) })
	return out
}

// Flush waits until nothing of the request's stores is pending: no
// reservation, no checksum, no cascade. done says that nothing is now.
func (c *Core) Flush(now Time, sid SessionID, name string, until Time) (id WaitID, done bool, out Flushed, err error) {
	q, err := c.request(sid, name)
	if err != nil {
		return 0, false, out, err
	}
	c.now = now
	if q.fills == 0 && q.cascades == 0 || until <= now {
		return 0, true, q.flushed(), nil
	}
	w := flushWait{id: WaitID(c.nextID()), until: until}
	q.flushes = append(q.flushes, w)
	c.waits++
	c.armFlush(q)
	return w.id, false, out, nil
}

func (q *request) flushed() Flushed {
	return Flushed{Done: q.fills == 0 && q.cascades == 0, Cascaded: q.cascaded, Failed: q.failed}
}

func (c *Core) armFlush(q *request) {
	if len(q.flushes) == 0 {
		c.timers.disarm(&q.flushTimer)
		return
	}
	first := q.flushes[0].until
	for _, w := range q.flushes {
		first = min(first, w.until)
	}
	c.timers.arm(&q.flushTimer, first)
}

// answerFlushes answers all waits of the request if its stores are over or it
// is itself.
func (c *Core) answerFlushes(q *request, end bool) {
	if len(q.flushes) == 0 || !end && (q.fills > 0 || q.cascades > 0) {
		return
	}
	for _, w := range q.flushes {
		c.emit(AnswerFlush{Wait: w.id, Flushed: q.flushed()})
		c.waits--
	}
	q.flushes = nil
	c.timers.disarm(&q.flushTimer)
}

func (c *Core) flushOverdue(q *request) {
	q.flushes = slices.DeleteFunc(q.flushes, func(w flushWait) bool {
		if w.until > c.now {
			return false
		}
		c.emit(AnswerFlush{Wait: w.id, Flushed: q.flushed()})
		c.waits--
		return true
	})
	c.armFlush(q)
}
