package core

import (
	"cmp"
	"slices"

	"github.com/terrace-kv/terrace/block"
)

// pinRecord is one request's pin on one block.
type pinRecord struct {
	slot       Slot
	told       bool  // an answer has told the engine of it
	from       uint8 // tier that it was promoted from for this request, + 1
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

// pinFor pins a block for a request that does not pin it yet. It returns the
// record, 0 if there was one.
func (c *Core) pinFor(q *request, s Slot, e *slot, from uint8, told bool) uint32 {
	if e.pins > 0 && c.findPin(q, s) != 0 {
		return 0
	}
	h := c.pins.Alloc()
	p := c.pins.At(h)
	*p = pinRecord{slot: s, from: from, told: told, seq: q.seq, since: c.now, prev: q.pinTail}
	if q.pinTail != 0 {
		c.pins.At(q.pinTail).next = h
	} else {
		q.pinHead = h
	}
	q.pinTail = h
	q.npins++
	if !told {
		q.soft++
	}
	c.pinIndex.Insert(pinHash(q.seq, s), h)
	c.pin(s, e)
	return h
}

func (c *Core) dropPin(q *request, h uint32) {
	p := c.pins.At(h)
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
	q.npins--
	if !p.told {
		q.soft--
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
			if h := c.pinFor(q, s, e, 0, true); h == 0 {
				c.tellPin(q, c.findPin(q, s))
			}
			l = Lease{Slot: s, Gen: e.gen, Sum: e.sum}
		}
		out = append(out, l)
	}
	return out, nil
}

// tellPin marks a pin as known to the engine, and says which tier served it.
func (c *Core) tellPin(q *request, h uint32) (from uint8) {
	p := c.pins.At(h)
	if p.told {
		return 0
	}
	p.told = true
	q.soft--
	return p.from
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
		for _, q := range append(sortedRequests(s), s.keep...) {
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
