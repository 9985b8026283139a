package core

import (
	"fmt"

	"github.com/terrace-kv/terrace/block"
)

type fillKind uint8

const (
	fillStore   fillKind = iota // reserved by an engine
	fillSum                     // committed; the node computes its checksum
	fillPromote                 // a job reads into it
)

// fill is a slot that is being filled. It ends by a commit, an abort or the
// end of its job or session; until then its slot has it as holder.
//
// INVARIANT(fill-single-writer): a slot has at most one fill, and a fill one
// writer; nobody sees its block before it has ended well.
type fill struct {
	slot    Slot
	kind    fillKind
	dropped bool // forgotten by reset or deadline: a commit is answered FillDropped
	expired bool // by its deadline; counted in session.overdueBytes
	q       *request
	resv    *reservation
	job     *job
	idx     int // in job.blocks

	wanted     []interest
	prev, next uint32 // fills of q
}

// reservation is what one reserve call was granted; its fills expire together.
type reservation struct {
	live  int
	timer timer
}

func (c *Core) newFill(f fill) uint32 {
	var h uint32
	if n := len(c.fillFree); n > 0 {
		h = c.fillFree[n-1]
		c.fillFree = c.fillFree[:n-1]
		f.wanted = c.fills[h].wanted[:0]
		c.fills[h] = f
	} else {
		h = uint32(len(c.fills))
		c.fills = append(c.fills, f)
	}
	c.nfills++
	if q := f.q; q != nil {
		c.fills[h].next = q.fillHead
		if q.fillHead != 0 {
			c.fills[q.fillHead].prev = h
		}
		q.fillHead = h
		q.fills++
	}
	return h
}

// forgetFill frees the record of a fill that has ended.
func (c *Core) forgetFill(h uint32) {
	f := &c.fills[h]
	if q := f.q; q != nil {
		if f.prev != 0 {
			c.fills[f.prev].next = f.next
		} else {
			q.fillHead = f.next
		}
		if f.next != 0 {
			c.fills[f.next].prev = f.prev
		}
		q.fills--
		c.closeResv(f)
		if f.expired {
			q.s.overdueBytes -= c.bytesOf(f.slot)
		}
		if q.fills == 0 {
			c.finalise(q)
			c.answerFlushes(q, false)
		}
	}
	wanted := f.wanted
	clear(wanted)
	*f = fill{wanted: wanted[:0]}
	c.fillFree = append(c.fillFree, h)
	c.nfills--
}

// closeResv takes a fill out of its reservation, which then no longer bounds it.
func (c *Core) closeResv(f *fill) {
	if f.resv == nil {
		return
	}
	if f.resv.live--; f.resv.live == 0 {
		c.timers.disarm(&f.resv.timer)
	}
	f.resv = nil
}

// dropFill forgets the key of a fill: its outcome is known to be nothing. The
// slot is quarantined until whoever writes it has let go. Whoever wants the
// block hears at once.
func (c *Core) dropFill(h uint32) {
	f := &c.fills[h]
	if f.dropped {
		return
	}
	f.dropped = true
	e := c.at(f.slot)
	c.unindex(f.slot, e)
	use := useStore
	if f.kind == fillPromote {
		use = usePromote
	}
	c.classOf(f.slot).filling[use]--
	e.state = slotQuarantined
	c.quarantine(f.slot)
	c.notify(f.wanted, false, f.slot, 0)
	clear(f.wanted) // keeps no finished request alive
	f.wanted = f.wanted[:0]
}

// notify tells those who want a block or a verdict how it ended. A block that
// has become readable is pinned for each of them in this same step.
func (c *Core) notify(wanted []interest, ready bool, s Slot, from uint8) {
	for _, w := range wanted {
		q := w.q
		if w.epoch == q.epoch {
			if ready {
				c.pinFor(q, s, c.at(s), from, false)
			}
			if q.pending--; q.pending == 0 || !ready {
				c.markDirty(q)
			}
		}
		if w.keep {
			q.keeping--
			if ready && q.params.RemoteDecoder && q.state != reqGone {
				c.pinFor(q, s, c.at(s), 0, true)
				c.supply(q)
			}
			if q.keeping == 0 && q.state == reqHandover {
				c.finalSupply(q)
			}
		}
	}
}

func (c *Core) markDirty(q *request) {
	if !q.dirty && q.wait != nil {
		q.dirty = true
		c.rejudge = append(c.rejudge, q)
	}
}

// Reserve takes slots for the keys that are neither present nor being filled,
// all of them or none: a refused call changes nothing. keys are consecutive
// blocks of the prompt in prefix order, the first of them the first-th of its
// group. No key of the call is a victim of the call.
func (c *Core) Reserve(now Time, sid SessionID, name string, group uint32, first int, keys []block.Key, out []Grant) ([]Grant, error) {
	q, err := c.active(sid, name)
	if err != nil {
		return out, err
	}
	if c.draining {
		return out, ErrDraining
	}
	n := &c.ns[q.s.ns]
	switch {
	case int64(group) >= int64(len(n.groups)):
		return out, fmt.Errorf("%w: group is %d, the namespace has %d", ErrInvalid, group, len(n.groups))
	case len(keys) > ReserveKeysMax:
		return out, fmt.Errorf("%w: %d keys in one reserve, at most %d are allowed", ErrTooMany, len(keys), ReserveKeysMax)
	case first < 0 || first > 1<<30:
		return out, fmt.Errorf("%w: first is %d", ErrInvalid, first)
	}
	for i := range keys {
		if keys[i].Group() != group {
			return out, fmt.Errorf("%w: keys[%d] names group %d, the call is for group %d", ErrInvalid, i, keys[i].Group(), group)
		}
	}
	c.now = now
	gf := &n.groups[group]
	k := &c.classes[gf.class]

	stored := len(keys) // keys within max_offload_tokens
	if m := q.params.MaxOffloadTokens; m >= 0 {
		stored = int(max(0, min(int64(stored), m/gf.tpb-int64(first))))
	}
	need := 0
	protect := c.scratch.protect[:0]
	for i := range keys[:stored] {
		if s, e, ok := c.find(q.s.ns, &keys[i]); !ok {
			need++
		} else if e.state == slotResident {
			c.pin(s, e)
			protect = append(protect, s)
		}
	}
	c.scratch.protect = protect
	overdue := q.s.overdueBytes > 0 && q.s.overdueBytes >= c.overdueMax()
	if need > 0 && overdue || need > c.admit(k, useStore) {
		for _, s := range protect {
			c.unpin(s, c.at(s))
		}
		c.stats.Refused++
		if need > c.largest(k) {
			return out, fmt.Errorf("%w: %d blocks of %d KiB", ErrTooLarge, need, k.stride*PageSize/1024)
		}
		if overdue {
			return out, fmt.Errorf("%w: the session keeps %d bytes in expired reservations; commit or abort them", ErrNoRoom, q.s.overdueBytes)
		}
		return out, ErrNoRoom
	}

	var r *reservation
	for i := range keys {
		if i >= stored {
			out = append(out, Grant{Status: GrantCapped})
			continue
		}
		if s, e, ok := c.find(q.s.ns, &keys[i]); ok {
			if e.state == slotResident {
				out = append(out, Grant{Status: GrantPresent})
				if q.params.RemoteDecoder {
					c.pinFor(q, s, e, 0, true)
				}
			} else {
				out = append(out, Grant{Status: GrantFilling})
				if f := &c.fills[e.holder]; q.params.RemoteDecoder && f.q != q {
					f.wanted = addKeep(f.wanted, q)
				}
			}
			continue
		}
		s, e, ok := c.take(gf.class, useStore)
		if !ok {
			panic("core: an admitted reserve found no slot")
		}
		if r == nil {
			r = &reservation{}
			r.timer = timer{kind: timerResv, resv: r, req: q}
		}
		r.live++
		c.fillSlot(s, e, q.s.ns, &keys[i], fill{slot: s, kind: fillStore, q: q, resv: r})
		out = append(out, Grant{Status: Granted, Slot: s, Gen: e.gen})
		c.stats.Reserved++
	}
	for i := len(protect) - 1; i >= 0; i-- {
		c.use(protect[i], c.at(protect[i]))
		c.unpin(protect[i], c.at(protect[i]))
	}
	if r != nil {
		c.timers.arm(&r.timer, now+Time(c.opt.ReservationTimeout))
	}
	return out, nil
}

// fillSlot gives a slot just taken its key and its fill.
func (c *Core) fillSlot(s Slot, e *slot, ns NamespaceID, key *block.Key, f fill) uint32 {
	e.key, e.ns = *key, ns
	h := c.newFill(f)
	e.holder = h
	c.index.Insert(c.hash(ns, key), id(s))
	c.ns[ns].blocks++
	return h
}

// owned is the fill that an engine names for one of its request ids, 0 if
// there is none. It may belong to an earlier generation of the id.
func (c *Core) owned(q *request, f Fill) uint32 {
	e := c.lookAt(f.Slot)
	if e == nil || e.gen != f.Gen || e.holder == 0 || e.state != slotFilling && e.state != slotQuarantined {
		return 0
	}
	if r := &c.fills[e.holder]; r.kind == fillStore && r.q.s == q.s && r.q.id == q.id {
		return e.holder
	}
	return 0
}

// hold keeps a request from being finalised before its cascades are submitted.
func (c *Core) hold(q *request) { q.fills++ }

func (c *Core) unhold(q *request) {
	if q.fills--; q.fills == 0 {
		c.finalise(q)
		c.answerFlushes(q, false)
	}
}

// Commit makes filled slots visible. From here on the engine must not write
// them. A fill without a checksum is HitPending until the node has computed
// it. It is legal after Finish, for what was reserved before.
func (c *Core) Commit(now Time, sid SessionID, name string, fills []Fill, out []FillStatus) ([]FillStatus, error) {
	named, err := c.request(sid, name)
	if err != nil {
		return out, err
	}
	c.now = now
	base := len(out)
	for range fills {
		out = append(out, FillStale)
	}
	var q *request // owner of ready
	var ready []Slot
	submit := func(next *request) {
		if q != nil {
			c.cascade(q, ready)
			if q.params.RemoteDecoder && q.state != reqActive {
				c.timers.arm(&q.handover, now+Time(c.opt.UnboundStoreTimeout))
			}
			c.unhold(q)
		}
		if q, ready = next, nil; q != nil {
			c.hold(q)
		}
	}
	for i := len(fills) - 1; i >= 0; i-- { // from the last, so that roots are youngest
		h := c.owned(named, fills[i])
		if h == 0 {
			continue
		}
		f := &c.fills[h]
		if f.q != q {
			submit(f.q)
		}
		s, e := f.slot, c.at(f.slot)
		if f.dropped {
			c.endDropped(h)
			out[base+i] = FillDropped
			continue
		}
		out[base+i] = FillOK
		c.stats.Committed++
		if !fills[i].HasSum {
			c.closeResv(f)
			f.kind = fillSum
			c.emit(ComputeSum{NS: e.ns, Key: e.key, Slot: s, Gen: e.gen})
			continue
		}
		c.commitFill(h, fills[i].Sum)
		if ready == nil {
			ready = make([]Slot, 0, i+1)
		}
		ready = append(ready, s)
	}
	submit(nil)
	c.settle()
	return out, nil
}

// commitFill makes one block resident and tells those who want it.
func (c *Core) commitFill(h uint32, sum uint64) {
	f := &c.fills[h]
	s, e := f.slot, c.at(f.slot)
	c.classOf(s).filling[useStore]--
	c.settleResident(s, e, sum)
	if f.q.params.RemoteDecoder {
		c.keepStored(f.q, s, e)
		c.supply(f.q)
	}
	c.notify(f.wanted, true, s, 0)
	c.forgetFill(h)
}

// endDropped frees the slot of a dropped fill whose writer has let go.
func (c *Core) endDropped(h uint32) {
	s := c.fills[h].slot
	c.forgetFill(h)
	c.unquarantine(s)
	c.release(s, c.at(s))
}

// Abort gives reserved slots back; the engine has stopped writing them.
func (c *Core) Abort(now Time, sid SessionID, name string, fills []Fill, out []FillStatus) ([]FillStatus, error) {
	q, err := c.request(sid, name)
	if err != nil {
		return out, err
	}
	c.now = now
	for _, fl := range fills {
		h := c.owned(q, fl)
		if h == 0 {
			out = append(out, FillStale)
			continue
		}
		st := FillOK
		if c.fills[h].dropped {
			st = FillDropped
		}
		c.dropFill(h)
		c.endDropped(h)
		c.stats.Aborted++
		out = append(out, st)
	}
	c.settle()
	return out, nil
}

// SumDone answers ComputeSum. An answer that nobody waits for is ignored.
func (c *Core) SumDone(now Time, s Slot, gen uint32, sum uint64) {
	c.now = now
	e := c.lookAt(s)
	if e == nil || e.gen != gen || e.holder == 0 || e.state != slotFilling && e.state != slotQuarantined || c.fills[e.holder].kind != fillSum {
		c.stats.LateSums++
		return
	}
	h := e.holder
	if c.fills[h].dropped {
		c.endDropped(h)
		return
	}
	q := c.fills[h].q
	c.hold(q)
	c.commitFill(h, sum)
	c.cascade(q, []Slot{s})
	c.unhold(q)
	c.settle()
}

func (c *Core) reservationOverdue(r *reservation) {
	q := r.timer.req
	for h := q.fillHead; h != 0; h = c.fills[h].next {
		if f := &c.fills[h]; f.resv == r && !f.dropped {
			c.dropFill(h)
			f.expired = true
			q.s.overdueBytes += c.bytesOf(f.slot)
			c.stats.Expired++
		}
	}
	// Its fills wait in quarantine for a commit, an abort or the session's end.
}
