package core

import (
	"fmt"
	"math/bits"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/core/policy"
)

// slotState says where a slot is at home.
//
// INVARIANT(slot-one-home): a slot is on the free list of its extent, or
// filling, or resident, or quarantined, or doomed. Only filling and resident
// slots are in the index.
type slotState uint8

const (
	slotFree        slotState = iota
	slotFilling               // taken by a fill; its key is in the index, invisible as a Hit
	slotResident              // committed: immutable until evicted
	slotQuarantined           // the outcome is known, the last I/O that could touch it is not over
	slotDoomed                // was resident when a reset or a bad checksum forgot it; freed by its last pin
)

// slot is what the core keeps for each slot. It has no pointers.
//
// INVARIANT(generation-grows): gen is larger each time the slot is taken, also
// when its extent has served another class between, so a lease or a fill of an
// earlier use never names a later one.
type slot struct {
	key  block.Key
	ns   NamespaceID
	gen  uint32 // counts the reuses; a lease or fill names it
	pins uint32 // requests and jobs that keep it; free only at 0
	used uint64 // clock of the last use, to compare classes
	sum  uint64
	// holder is the fill's handle while one exists, also when quarantined; on
	// the free list it is the next free slot + 1.
	holder uint32
	safe   uint16 // bit t: tier t is known to have it
	state  slotState
	node   policy.Node
}

// class is all slots of one stride. Each has its own policy.
type class struct {
	stride    uint32 // pages
	policy    policy.Policy
	freeExts  []uint32 // extents that may have free slots; stale entries are dropped when met
	slots     int      // in its extents
	free      int
	evictable int // resident, no pins
	idle      int // extents without a busy slot
	filling   [2]int
	quiet     int // quarantined or doomed
}

// Kinds of use that each keep a reserve.
const (
	useStore = iota
	usePromote
)

// extent is a stretch of the region that holds slots of one class at a time.
type extent struct {
	slots  []slot
	inv    uint64 // 2^64 / stride, rounded up; 0 for stride 1
	class  int    // -1: unassigned
	pages  uint32
	free   uint32 // first free slot in it + 1
	nfree  int
	busy   int  // slots neither free nor evictable
	listed bool // in class.freeExts
	used   uint64
	gen    uint32 // generations of its next slots start here
}

func id(s Slot) uint32   { return uint32(s) + 1 }
func unid(i uint32) Slot { return Slot(i - 1) }

// Node and Busy show the slot table to the policies.
func (c *Core) Node(i uint32) *policy.Node { return &c.at(unid(i)).node }

// Busy says that a slot is pinned.
func (c *Core) Busy(i uint32) bool { return c.at(unid(i)).pins > 0 }

// at is the entry of a slot that is known to exist.
func (c *Core) at(s Slot) *slot {
	e := &c.extents[uint32(s)>>c.extShift]
	return &e.slots[e.index(uint32(s)&c.extMask)]
}

// index is the number of the slot that a page of the extent lies in. It divides
// by multiplying: each block that is looked at is divided for several times.
func (e *extent) index(page uint32) uint32 {
	if e.inv == 0 {
		return page
	}
	i, _ := bits.Mul64(e.inv, uint64(page))
	return uint32(i)
}

// lookAt is at for a slot that somebody outside has named, nil if there is none.
func (c *Core) lookAt(s Slot) *slot {
	x := uint32(s) >> c.extShift
	if int64(x) >= int64(len(c.extents)) || c.extents[x].class < 0 {
		return nil
	}
	e := &c.extents[x]
	off := uint32(s) & c.extMask
	i := e.index(off)
	if i*c.classes[e.class].stride != off || i >= uint32(len(e.slots)) {
		return nil
	}
	return &e.slots[i]
}

// bytesOf is what a slot takes of the region.
func (c *Core) bytesOf(s Slot) int64 { return int64(c.classOf(s).stride) * PageSize }

func (c *Core) extentOf(s Slot) *extent { return &c.extents[uint32(s)>>c.extShift] }
func (c *Core) classOf(s Slot) *class   { return &c.classes[c.extentOf(s).class] }

// hash names a key of a namespace in the index and to the policies.
func (c *Core) hash(ns NamespaceID, key *block.Key) uint64 { return key.Mix(c.salt ^ uint64(ns)) }

// find is the slot that the index has for a key.
func (c *Core) find(ns NamespaceID, key *block.Key) (Slot, *slot, bool) {
	var hit *slot
	h, ok := c.index.Find(c.hash(ns, key), func(h uint32) bool {
		hit = c.at(unid(h))
		return hit.ns == ns && hit.key == *key
	})
	return unid(h), hit, ok
}

func (c *Core) unindex(s Slot, e *slot) {
	if !c.index.Delete(c.hash(e.ns, &e.key), id(s)) {
		panic(fmt.Sprintf("core: slot %d is not in the index under its key %s", s, e.key))
	}
	c.ns[e.ns].blocks--
}

// classFor finds or makes the class of a stride, in pages.
func (c *Core) classFor(stride uint32) int {
	for i := range c.classes {
		if c.classes[i].stride == stride {
			return i
		}
	}
	c.classes = append(c.classes, class{stride: stride, policy: c.opt.NewPolicy(c)})
	return len(c.classes) - 1
}

// largest is how many slots one use of the class could take if all of the
// region were idle.
func (c *Core) largest(k *class) int {
	n := 0
	for i := range c.extents {
		n += int(c.extents[i].pages / k.stride)
	}
	return n - c.reserve(n)
}

// reserve is how many of n slots a use leaves to the other. Without a
// secondary there are no promotions to leave any to.
func (c *Core) reserve(n int) int {
	if len(c.tiers) == 0 {
		return 0
	}
	return n * c.opt.ReservePercent / 100
}

// room is how many slots the class can have without touching a busy one:
// free, evictable, in unassigned extents, and in extents that it may take.
// reach adds those that are busy with its own blocks.
func (c *Core) room(k *class) (room, reach int) {
	room = k.free + k.evictable
	reach = k.slots
	if c.unassigned == 0 && len(c.classes) == 1 {
		return room, reach
	}
	for i := range c.extents {
		e := &c.extents[i]
		if e.class < 0 || &c.classes[e.class] != k && e.busy == 0 {
			room += int(e.pages / k.stride)
			reach += int(e.pages / k.stride)
		}
	}
	return room, reach
}

// admit says how many slots a use may take now. The other use keeps a reserve,
// less what it is filling already, so that neither starves the other.
func (c *Core) admit(k *class, use int) int {
	room, reach := c.room(k)
	return max(0, room-max(0, c.reserve(reach)-k.filling[1-use]))
}

// take makes a free slot of the class filling, evicting if it must. It fails
// only when admit would have answered 0.
func (c *Core) take(ki, use int) (Slot, *slot, bool) {
	for {
		k := &c.classes[ki]
		for n := len(k.freeExts); n > 0; n = len(k.freeExts) {
			x := k.freeExts[n-1]
			e := &c.extents[x]
			if e.class == ki && e.nfree > 0 {
				s := Slot(x<<c.extShift + (e.free-1)*k.stride)
				sl := &e.slots[e.free-1]
				e.free = sl.holder
				e.nfree--
				k.free--
				*sl = slot{state: slotFilling, gen: sl.gen + 1}
				c.setBusy(e, 1)
				k.filling[use]++
				return s, sl, true
			}
			if e.class == ki {
				e.listed = false
			}
			k.freeExts = k.freeExts[:n-1]
		}
		if c.unassigned > 0 {
			for x := range c.extents {
				if c.extents[x].class < 0 && c.extents[x].pages >= k.stride {
					c.assign(uint32(x), ki)
					break
				}
			}
			if k.free > 0 {
				continue
			}
		}
		victim := k.policy.Oldest()
		if x, ok := c.oldestIdleExtent(ki); ok && (victim == 0 || c.extents[x].used < c.at(unid(victim)).used) {
			c.stripExtent(x)
			c.assign(x, ki)
			c.stats.ExtentsTaken++
			continue
		}
		if victim == 0 {
			return 0, nil, false
		}
		c.evict(c.preferSafe(k, victim))
	}
}

// preferSafe looks a few blocks past the victim for one that a secondary has,
// because losing it costs a read and not a prefill.
func (c *Core) preferSafe(k *class, victim uint32) Slot {
	const near = 8 // how close in age counts as close
	if len(c.tiers) == 0 {
		return unid(victim)
	}
	v := victim
	for range near {
		if v == 0 {
			break
		}
		if c.at(unid(v)).safe != 0 {
			return unid(v)
		}
		v = k.policy.Newer(v)
	}
	return unid(victim)
}

// evict makes room.
//
// INVARIANT(pinned-immutable): a slot with pins is not evicted, and not handed
// out to be written, before the last of them is given back.
func (c *Core) evict(s Slot) {
	e := c.at(s)
	if e.state != slotResident || e.pins != 0 {
		panic(fmt.Sprintf("core: evicting slot %d in state %d with %d pins", s, e.state, e.pins))
	}
	c.stats.Evicted++
	c.classOf(s).evictable--
	c.setBusy(c.extentOf(s), 1)
	c.classOf(s).policy.Remove(id(s), c.hash(e.ns, &e.key), true)
	c.unindex(s, e)
	c.release(s, e)
}

// release puts a slot on its extent's free list. It is busy until then.
//
// INVARIANT(quiet-before-free): this is the only way to the free list, and
// nobody comes here while an engine, a job or a checksum may touch the slot.
func (c *Core) release(s Slot, e *slot) {
	if e.pins != 0 || e.state == slotFree {
		panic(fmt.Sprintf("core: freeing slot %d in state %d with %d pins", s, e.state, e.pins))
	}
	x := c.extentOf(s)
	k := &c.classes[x.class]
	*e = slot{gen: e.gen, holder: x.free}
	x.free = x.index(uint32(s)&c.extMask) + 1
	x.nfree++
	k.free++
	c.setBusy(x, -1)
	if !x.listed {
		x.listed = true
		k.freeExts = append(k.freeExts, uint32(s)>>c.extShift)
	}
	if c.opt.ReportReleases {
		c.released = append(c.released, s)
	}
}

// setBusy counts a slot of the extent as busy or no longer so.
func (c *Core) setBusy(e *extent, by int) {
	if e.busy == 0 {
		c.classes[e.class].idle--
	}
	e.busy += by
	if e.busy == 0 {
		c.classes[e.class].idle++
	}
}

func (c *Core) assign(x uint32, ki int) {
	e, k := &c.extents[x], &c.classes[ki]
	n := e.pages / k.stride
	*e = extent{class: ki, inv: ^uint64(0)/uint64(k.stride) + 1, pages: e.pages, slots: make([]slot, n), nfree: int(n), used: c.clock, gen: e.gen, listed: n > 0}
	for i := range e.slots {
		e.slots[i] = slot{gen: e.gen, holder: uint32(i + 2)}
	}
	if n > 0 {
		e.slots[n-1].holder = 0
		e.free = 1
		k.freeExts = append(k.freeExts, x)
	}
	k.slots += int(n)
	k.free += int(n)
	k.idle++
	c.unassigned--
}

// oldestIdleExtent is the extent of another class that was used longest ago
// among those without a busy slot.
func (c *Core) oldestIdleExtent(ki int) (uint32, bool) {
	if len(c.classes) == 1 {
		return 0, false
	}
	idle := 0
	for i := range c.classes {
		if i != ki {
			idle += c.classes[i].idle
		}
	}
	if idle == 0 {
		return 0, false
	}
	best, ok := uint32(0), false
	for x := range c.extents {
		e := &c.extents[x]
		if e.class < 0 || e.class == ki || e.busy != 0 || e.pages < c.classes[ki].stride {
			continue
		}
		if !ok || e.used < c.extents[best].used {
			best, ok = uint32(x), true
		}
	}
	return best, ok
}

// stripExtent evicts all of an idle extent and unassigns it.
func (c *Core) stripExtent(x uint32) {
	e := &c.extents[x]
	k := &c.classes[e.class]
	for i := range e.slots {
		if e.slots[i].state == slotResident {
			c.evict(Slot(x<<c.extShift + uint32(i)*k.stride))
		}
		e.gen = max(e.gen, e.slots[i].gen)
	}
	k.slots -= len(e.slots)
	k.free -= len(e.slots)
	k.idle--
	*e = extent{class: -1, pages: e.pages, gen: e.gen}
	c.unassigned++
	// k.freeExts may still name it; take drops such entries when it meets them.
}

// pin and unpin count a user of a slot that is filling, resident or doomed.
func (c *Core) pin(s Slot, e *slot) {
	if e.pins == 0 && e.state == slotResident {
		x := c.extentOf(s)
		c.classes[x.class].evictable--
		c.setBusy(x, 1)
	}
	e.pins++
}

func (c *Core) unpin(s Slot, e *slot) {
	if e.pins == 0 {
		panic(fmt.Sprintf("core: slot %d has no pin to give back", s))
	}
	e.pins--
	if e.pins > 0 {
		return
	}
	switch e.state {
	case slotResident:
		x := c.extentOf(s)
		k := &c.classes[x.class]
		c.setBusy(x, -1)
		k.evictable++
		k.policy.Idle(id(s))
	case slotDoomed:
		c.unquarantine(s)
		c.release(s, e)
	}
}

// use records a reference to a resident block.
func (c *Core) use(s Slot, e *slot) {
	if e.state != slotResident {
		return
	}
	c.clock++
	e.used = c.clock
	x := c.extentOf(s)
	x.used = c.clock
	c.classes[x.class].policy.Use(id(s))
}

// quarantine and unquarantine count a slot whose block is forgotten and whose
// memory is not free.
func (c *Core) quarantine(s Slot) {
	c.classOf(s).quiet++
	c.quiet++
}

func (c *Core) unquarantine(s Slot) {
	c.classOf(s).quiet--
	c.quiet--
}

// settleResident turns a filling slot into a resident one.
func (c *Core) settleResident(s Slot, e *slot, sum uint64) {
	e.state, e.sum, e.holder = slotResident, sum, 0
	c.clock++
	e.used = c.clock
	x := c.extentOf(s)
	x.used = c.clock
	k := &c.classes[x.class]
	k.policy.Insert(id(s), c.hash(e.ns, &e.key))
	if e.pins == 0 {
		k.evictable++
		c.setBusy(x, -1)
	}
}

// doom forgets a resident block for truth: it is in no index any more, and
// free once nobody pins it.
func (c *Core) doom(s Slot, e *slot) {
	c.unindex(s, e)
	k := c.classOf(s)
	k.policy.Remove(id(s), c.hash(e.ns, &e.key), false)
	if e.pins == 0 {
		k.evictable--
		c.setBusy(c.extentOf(s), 1)
		c.release(s, e)
		return
	}
	e.state = slotDoomed
	c.quarantine(s)
}
