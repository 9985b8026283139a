package core

import (
	"fmt"
	"slices"
)

// CheckInvariants walks every table and reports the first contradiction. It is
// for tests and for builds with invariants: its cost grows with the primary.
func (c *Core) CheckInvariants() error {
	indexed := 0
	pins := map[Slot]uint32{} // by whoever holds them
	seen := map[uint32]bool{}
	npins := 0
	countPins := func(q *request) error {
		n, soft, promoted := 0, 0, 0
		for h := q.pinHead; h != 0; h = c.pins.At(h).next {
			p := c.pins.At(h)
			if seen[h] || p.seq != q.seq {
				return fmt.Errorf("pin record %d of request %q stands in two lists", h, q.id)
			}
			seen[h] = true
			pins[p.slot]++
			n++
			if !p.told {
				soft++
			}
			if p.from > 0 {
				promoted++
			}
			if c.findPin(q, p.slot) != h {
				return fmt.Errorf("pins-are-a-set: pin of request %q on slot %d is not found", q.id, p.slot)
			}
		}
		npins += n
		if n != q.npins || soft != q.soft || promoted != q.promoted {
			return fmt.Errorf("request %q counts %d pins (%d soft, %d promoted), has %d (%d, %d)", q.id, q.npins, q.soft, q.promoted, n, soft, promoted)
		}
		return nil
	}
	requests, waits, handovers := 0, 0, 0
	live := map[*request]bool{}
	quietSlots := map[Slot]bool{}
	for _, s := range c.sessions {
		unfinished, kept := 0, 0
		for _, q := range s.all() {
			switch q.state {
			case reqActive, reqFinishing:
				unfinished++
			case reqHandover:
				kept++
			default:
				return fmt.Errorf("request %q in state %d is still listed", q.id, q.state)
			}
			live[q] = true
		}
		if unfinished != s.unfinished || kept != s.kept {
			return fmt.Errorf("session %d counts %d requests and %d hand-overs, has %d and %d", s.id, s.unfinished, s.kept, unfinished, kept)
		}
		requests += unfinished
		handovers += kept
		for id, q := range s.requests {
			for old := q.older; old != nil; old = old.older {
				if old.id != id || old.state != reqFinishing || old.newer.older != old {
					return fmt.Errorf("generation of request %q in state %d hangs behind a newer one of %q", old.id, old.state, id)
				}
			}
		}
		for _, sl := range s.quiet {
			quietSlots[sl] = true
		}
		if s.dead && len(s.quiet) == 0 && s.unfinished == 0 {
			return fmt.Errorf("session-settles: session %d is dead and holds nothing, but is still there", s.id)
		}
		if s.dead && s.keep != nil {
			return fmt.Errorf("session-settles: dead session %d keeps request %q", s.id, s.keep.id)
		}
	}
	pending, keeping := map[*request]int{}, map[*request]int{}
	interested := func(list []interest) error {
		for i, w := range list {
			if i > 0 && list[i-1].q.seq >= w.q.seq {
				return fmt.Errorf("interest of request %q stands out of order", w.q.id)
			}
			if w.epoch == w.q.epoch {
				pending[w.q]++
			}
			if w.keep {
				keeping[w.q]++
			}
		}
		return nil
	}
	for i := range c.fills {
		if err := interested(c.fills[i].wanted); err != nil {
			return err
		}
	}
	for _, f := range c.facts {
		if err := interested(f.wanted); err != nil {
			return err
		}
		if len(f.wanted) > 0 && f.state != factProbing {
			return fmt.Errorf("a fact in state %d is waited for", f.state)
		}
	}
	expired := map[*session]int64{}
	for q := range live {
		if err := countPins(q); err != nil {
			return err
		}
		n := 0
		for h := q.fillHead; h != 0; h = c.fills[h].next {
			f := &c.fills[h]
			if f.q != q {
				return fmt.Errorf("fill %d in the list of request %q is another's", h, q.id)
			}
			if f.expired {
				expired[q.s] += c.bytesOf(f.slot)
			}
			if f.kind == fillStore && !f.dropped && f.resv.timer.pos == 0 {
				return fmt.Errorf("wait-ends: reservation of slot %d has no deadline", f.slot)
			}
			n++
		}
		if n != q.fills {
			return fmt.Errorf("request %q counts %d fills, has %d", q.id, q.fills, n)
		}
		if pending[q] != q.pending || keeping[q] != q.keeping {
			return fmt.Errorf("request %q counts %d interests and %d blocks to keep, has %d and %d", q.id, q.pending, q.keeping, pending[q], keeping[q])
		}
		if q.wait != nil {
			waits++
			if q.pending == 0 && !q.dirty {
				return fmt.Errorf("request %q waits for nothing", q.id)
			}
		}
		if q.pending > 0 && q.lookupTimer.pos == 0 || q.wait != nil && q.wait.timer.pos == 0 || len(q.flushes) > 0 && q.flushTimer.pos == 0 ||
			q.state != reqActive && q.params.RemoteDecoder && q.handover.pos == 0 {
			return fmt.Errorf("wait-ends: request %q waits without a deadline", q.id)
		}
		if q.state == reqFinishing && (n == 0 || q.wait != nil) {
			return fmt.Errorf("request %q is finished and was not finalised", q.id)
		}
	}
	for _, s := range c.sessions {
		if expired[s] != s.overdueBytes {
			return fmt.Errorf("session %d counts %d bytes of expired reservations, has %d", s.id, s.overdueBytes, expired[s])
		}
	}
	if c.reset != nil && c.reset.timer.pos == 0 {
		return fmt.Errorf("wait-ends: the reset has no deadline")
	}
	if npins != c.pins.Len() || npins != c.pinIndex.Len() {
		return fmt.Errorf("%d pins held, %d recorded, %d indexed", npins, c.pins.Len(), c.pinIndex.Len())
	}
	if requests != c.requests || handovers != c.handovers {
		return fmt.Errorf("%d requests and %d hand-overs, counted %d and %d", requests, handovers, c.requests, c.handovers)
	}
	if waits > c.waits {
		return fmt.Errorf("%d lookups wait, counted %d waits", waits, c.waits)
	}

	reading, writing := make([]int, len(c.tiers)), make([]int, len(c.tiers))
	overdue, inflight := make([]int64, len(c.tiers)), make([]int64, len(c.tiers))
	jobQuiet := map[Slot]bool{}
	for _, j := range c.jobs {
		if j.asker != nil && j.asker.params.Peer != PeerNone && (j.asker.seq != j.src || !slices.Contains(j.asker.asked, j)) {
			return fmt.Errorf("request %q does not know of its job %d", j.asker.id, j.id)
		}
		open, loud := 0, 0
		for i := range j.blocks {
			b := &j.blocks[i]
			if b.quiet {
				if !b.settled {
					return fmt.Errorf("job %d block %d is quiet without an outcome", j.id, i)
				}
				continue
			}
			loud++
			inflight[j.tier] += c.bytesOf(b.slot)
			e := c.at(b.slot)
			if !b.settled {
				open++
			}
			if j.overdue {
				overdue[j.tier] += c.bytesOf(b.slot)
			}
			if j.kind == Cascade {
				writing[j.tier]++
				pins[b.slot]++
				continue
			}
			reading[j.tier]++
			if b.settled {
				if e.state != slotQuarantined {
					return fmt.Errorf("job %d settled slot %d, which is in state %d before it is quiet", j.id, b.slot, e.state)
				}
				jobQuiet[b.slot] = true
			} else if e.state != slotFilling || c.fills[e.holder].job != j {
				return fmt.Errorf("job %d reads into slot %d, which is in state %d", j.id, b.slot, e.state)
			}
		}
		if open != j.open || loud != j.loud || loud == 0 && j.kind != ProbeJob {
			return fmt.Errorf("job-settles: job %d counts %d open and %d loud blocks, has %d and %d", j.id, j.open, j.loud, open, loud)
		}
		if open > 0 != (j.timer.pos > 0) && j.kind != ProbeJob {
			return fmt.Errorf("job %d has %d open blocks and timer at %d", j.id, open, j.timer.pos)
		}
	}
	for t := range c.tiers {
		ts := &c.tiers[t]
		if reading[t] != ts.reading || writing[t] != ts.writing || overdue[t] != ts.overdueBytes || inflight[t] != ts.inflight {
			return fmt.Errorf("tier %d counts %d reading, %d writing, %d bytes in flight, %d overdue; has %d, %d, %d, %d",
				t, ts.reading, ts.writing, ts.inflight, ts.overdueBytes, reading[t], writing[t], inflight[t], overdue[t])
		}
	}

	waiting := map[*request]int{}
	for t := range c.tiers {
		ts := &c.tiers[t]
		for _, w := range ts.waiting {
			waiting[w.q]++
		}
		if n := len(ts.waiting); n > 0 != (ts.timer.pos > 0) || n > 0 && ts.reading+ts.writing == 0 {
			return fmt.Errorf("tier %d: %d blocks wait for credit, timer at %d, %d in flight", t, n, ts.timer.pos, ts.reading+ts.writing)
		}
	}

	for q := range waiting {
		live[q] = true // or gone
	}
	for q := range live {
		if waiting[q] != q.waiting || q.waiting > q.cascades {
			return fmt.Errorf("request %q counts %d blocks that wait for credit and %d cascades, has %d", q.id, q.waiting, q.cascades, waiting[q])
		}
	}

	type count struct{ slots, free, evictable, fillStore, fillPromote, quiet, idle int }
	counts := make([]count, len(c.classes))
	unassigned := 0
	nfills := 0
	for x := range c.extents {
		e := &c.extents[x]
		if e.class < 0 {
			unassigned++
			continue
		}
		k, n := &c.classes[e.class], &counts[e.class]
		nfree, busy := 0, 0
		for i := range e.slots {
			sl := &e.slots[i]
			s := Slot(uint32(x)<<c.extShift + uint32(i)*k.stride)
			n.slots++
			if sl.pins != pins[s] {
				return fmt.Errorf("slot %d counts %d pins, %d are held", s, sl.pins, pins[s])
			}
			switch sl.state {
			case slotFree:
				nfree++
				n.free++
				if sl.pins != 0 {
					return fmt.Errorf("slot-one-home: free slot %d has pins", s)
				}
			case slotResident:
				if sl.pins == 0 {
					n.evictable++
				} else {
					busy++
				}
			case slotFilling:
				busy++
				nfills++
				f := &c.fills[sl.holder]
				if f.slot != s || f.dropped {
					return fmt.Errorf("slot-one-home: filling slot %d and its fill disagree", s)
				}
				if f.kind == fillPromote {
					n.fillPromote++
				} else {
					n.fillStore++
				}
			case slotQuarantined:
				busy++
				n.quiet++
				if sl.holder != 0 {
					nfills++
					if f := &c.fills[sl.holder]; f.slot != s || !f.dropped {
						return fmt.Errorf("quarantined slot %d and its fill disagree", s)
					}
				} else if !quietSlots[s] && !jobQuiet[s] {
					return fmt.Errorf("quarantined slot %d waits for nobody", s)
				}
			case slotDoomed:
				busy++
				n.quiet++
				if sl.pins == 0 {
					return fmt.Errorf("doomed slot %d has no pins and is not free", s)
				}
			}
			if sl.state == slotFilling || sl.state == slotResident {
				indexed++
				if got, _, ok := c.find(sl.ns, &sl.key); !ok || got != s {
					return fmt.Errorf("key-unique: the index has slot %d for the key of slot %d", got, s)
				}
			}
		}
		if nfree != e.nfree || busy != e.busy {
			return fmt.Errorf("extent %d counts %d free and %d busy slots, has %d and %d", x, e.nfree, e.busy, nfree, busy)
		}
		walked := 0
		for f := e.free; f != 0 && walked <= nfree; f = e.slots[f-1].holder {
			walked++
		}
		if walked != nfree {
			return fmt.Errorf("extent %d has %d free slots, its list %d", x, nfree, walked)
		}
		if busy == 0 {
			n.idle++
		}
	}
	if unassigned != c.unassigned || indexed != c.index.Len() || nfills != c.nfills {
		return fmt.Errorf("%d unassigned extents, %d indexed slots, %d fills; counted %d, %d, %d",
			unassigned, indexed, nfills, c.unassigned, c.index.Len(), c.nfills)
	}
	for i := range c.classes {
		k, n := &c.classes[i], counts[i]
		got := count{k.slots, k.free, k.evictable, k.filling[useStore], k.filling[usePromote], k.quiet, k.idle}
		if got != n {
			return fmt.Errorf("class %d counts %+v, has %+v", i, got, n)
		}
	}
	s := c.Stats()
	if sum := s.Free + s.Evictable + s.Pinned + s.Filling + s.Quarantined + s.Remainder; sum != s.Capacity {
		return fmt.Errorf("capacity: the parts add up to %d bytes of %d: %+v", sum, s.Capacity, s)
	}
	if len(c.rejudge) > 0 {
		return fmt.Errorf("%d requests are left to be judged again", len(c.rejudge))
	}
	return nil
}
