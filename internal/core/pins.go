package core

import (
	"cmp"
	"slices"

	"github.com/terrace-kv/terrace/block"
)

// pinRecord is one request's pin on one block.
type pinRecord struct {
	slot       Slot
	told       bool  // the engine knows of it, or it is kept for a hand-over
	from       uint8 // tier that it was promoted from for this request, + 1, until an answer has counted it
	prev, next uint32
	seq        uint64 // of the request
	since      Time
}

func pinHash(seq uint64, s Slot) uint64 {
	h := (seq ^ uint64(s)<<32) * 0x9e3779b97f4a7c15
	h ^= h >> 29
	return h * 0xbf58476d1ce4e5b9
}

func (c *Core) findPin(q *request, s Slot) uint32 {
	h, _ := c.pinIndex.Find(pinHash(q.seq, s), func(h uint32) bool {
		p := c.pins.At(h)
		return p.seq == q.seq && p.slot == s
	})
	return h
}

// pinFor pins a block for a request that does not pin it yet, and returns the
// record. fresh says that there was none.
func (c *Core) pinFor(q *request, s Slot, e *slot, from uint8, told bool) (h uint32, fresh bool) {
	if e.pins > 0 {
		if h = c.findPin(q, s); h != 0 {
			if told {
				c.tellPin(q, h)
			}
			return h, false
		}
	}
	h = c.pins.Alloc()
	*c.pins.At(h) = pinRecord{slot: s, from: from, told: told, seq: q.seq, since: c.now}
	c.linkPin(q, h, 0)
	q.npins++
	if !told {
		q.soft++
	}
	if from > 0 {
		q.promoted++
	}
	c.pinIndex.Insert(pinHash(q.seq, s), h)
	c.pin(s, e)
	return h, true
}

// linkPin puts a pin into the request's list before another, 0 for last.
func (c *Core) linkPin(q *request, h, before uint32) {
	p := c.pins.At(h)
	p.next = before
	if before != 0 {
		b := c.pins.At(before)
		p.prev, b.prev = b.prev, h
	} else {
		p.prev, q.pinTail = q.pinTail, h
	}
	if p.prev != 0 {
		c.pins.At(p.prev).next = h
	} else {
		q.pinHead = h
	}
}

func (c *Core) unlinkPin(q *request, p *pinRecord) {
	if p.prev != 0 {
		c.pins.At(p.prev).next = p.next
	} else {
		q.pinHead = p.next
	}
	if p.next != 0 {
		c.pins.At(p.next).prev = p.prev
	} else {
		q.pinTail = p.prev
	}
}

// keepStored pins a block that the request has stored, for its hand-over. A
// prompt is stored tail first, so it goes before those stored earlier: the list
// is in prefix order.
func (c *Core) keepStored(q *request, s Slot, e *slot) {
	h, fresh := c.pinFor(q, s, e, 0, true)
	if fresh && q.pinStored != 0 {
		c.unlinkPin(q, c.pins.At(h))
		c.linkPin(q, h, q.pinStored)
	}
	q.pinStored = h
}

func (c *Core) dropPin(q *request, h uint32) {
	p := c.pins.At(h)
	if q.pinStored == h {
		q.pinStored = p.next
	}
	c.unlinkPin(q, p)
	q.npins--
	if !p.told {
		q.soft--
	}
	if p.from > 0 {
		q.promoted--
	}
	s := p.slot
	c.pinIndex.Delete(pinHash(q.seq, s), h)
	c.pins.Free(h)
	c.unpin(s, c.at(s))
}

// unpinAll gives back every pin of a request, from the last to the first, and
// records each as a use: so a prompt's root ends up youngest.
func (c *Core) unpinAll(q *request) {
	for q.pinTail != 0 {
		s := c.pins.At(q.pinTail).slot
		c.use(s, c.at(s))
		c.dropPin(q, q.pinTail)
	}
}

// Pin pins blocks that are committed, beyond those that lookups pinned. The
// lease of a key that is not committed is zero.
func (c *Core) Pin(now Time, sid SessionID, name string, keys []block.Key, out []Lease) ([]Lease, error) {
	q, err := c.active(sid, name)
	if err != nil {
		return out, err
	}
	c.now = now
	for i := range keys {
		var l Lease
		if s, e, ok := c.find(q.s.ns, &keys[i]); ok && e.state == slotResident {
			c.pinFor(q, s, e, 0, true)
			l = Lease{Slot: s, Gen: e.gen, Sum: e.sum}
		}
		out = append(out, l)
	}
	return out, nil
}

// tellPin marks a pin as known to the engine.
func (c *Core) tellPin(q *request, h uint32) {
	if p := c.pins.At(h); !p.told {
		p.told = true
		q.soft--
	}
}

// Unpin gives back pins of the request. A lease that is not its own, or stale,
// changes nothing and is answered FillStale.
func (c *Core) Unpin(now Time, sid SessionID, name string, leases []Lease, out []FillStatus) ([]FillStatus, error) {
	q, err := c.request(sid, name)
	if err != nil {
		return out, err
	}
	c.now = now
	base := len(out)
	for range leases {
		out = append(out, FillStale)
	}
	for i := len(leases) - 1; i >= 0; i-- { // last to first, as in unpinAll
		l := leases[i]
		e := c.lookAt(l.Slot)
		if e == nil || e.gen != l.Gen || e.pins == 0 {
			continue
		}
		if h := c.findPin(q, l.Slot); h != 0 {
			c.use(l.Slot, e)
			c.dropPin(q, h)
			out[base+i] = FillOK
		}
	}
	return out, nil
}

// Touch marks committed blocks as recently used, the first key youngest.
func (c *Core) Touch(now Time, sid SessionID, keys []block.Key) error {
	s, err := c.session(sid)
	if err != nil {
		return err
	}
	c.now = now
	for i := len(keys) - 1; i >= 0; i-- {
		if slot, e, ok := c.find(s.ns, &keys[i]); ok {
			c.use(slot, e)
		}
	}
	return nil
}

// PinInfo is one pin, for an operator.
type PinInfo struct {
	Session SessionID // 0: a job's
	Request string
	Job     JobID
	Kind    JobKind
	Tier    int
	Slot    Slot
	Gen     uint32
	Key     block.Key
	Since   Time
	Overdue bool
}

// PinList tells of at most limit pins: requests' first, then jobs'.
func (c *Core) PinList(limit int) []PinInfo {
	var out []PinInfo
	sids := make([]*session, 0, len(c.sessions))
	for _, s := range c.sessions {
		sids = append(sids, s)
	}
	slices.SortFunc(sids, func(a, b *session) int { return cmp.Compare(a.id, b.id) })
	for _, s := range sids {
		for _, q := range s.all() {
			for h := q.pinHead; h != 0; h = c.pins.At(h).next {
				if len(out) >= limit {
					return out
				}
				p := c.pins.At(h)
				e := c.at(p.slot)
				out = append(out, PinInfo{Session: s.id, Request: q.id, Slot: p.slot, Gen: e.gen, Key: e.key, Since: p.since,
					Overdue: q.state == reqActive && c.now-p.since > Time(c.opt.ReservationTimeout)})
			}
		}
	}
	for _, j := range c.sortedJobs() {
		if j.kind != Cascade {
			continue
		}
		for i := range j.blocks {
			b := &j.blocks[i]
			if b.quiet {
				continue
			}
			if len(out) >= limit {
				return out
			}
			e := c.at(b.slot)
			out = append(out, PinInfo{Job: j.id, Kind: j.kind, Tier: j.tier, Slot: b.slot, Gen: e.gen, Key: e.key, Since: j.since, Overdue: j.overdue})
		}
	}
	return out
}
