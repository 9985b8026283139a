package core

import "github.com/terrace-kv/terrace/tier"

// Causes of a cascade that was not started.
const (
	DropDown    = iota // the tier is down
	DropFull           // too many wait for its credit
	DropEvicted        // evicted, or forgotten, before its turn
	DropLate           // its turn did not come in time
	dropEnd
)

// DropCauses names them, for labels.
var DropCauses = [dropEnd]string{"tier_down", "queue_full", "evicted", "timeout"}

// Counters count since the start. Lookups and hits are those of engines: requests
// that serve a peer (NoPeers) are not counted.
type Counters struct {
	Lookups             int64
	Verdicts            [verdictEnd]int64 // of final answers
	PrimaryHits         int64             // keys of final answers that needed no promotion
	Reserved            int64
	Committed           int64
	Aborted             int64
	Refused             int64 // reserve calls without room
	Expired             int64 // reservations past their deadline, in blocks
	Evicted             int64
	ExtentsTaken        int64
	PromotionsShortened int64 // runs cut for lack of room or credit
	CorruptPrimary      int64 // blocks whose bytes no longer matched their checksum
	ForeignResults      int64 // results of unknown jobs, or twice
	LateSums            int64
	Resets              int64
	HandoversExpired    int64
}

// TierCounters are what the core counts of a tier. Jobs, Blocks and Bytes are
// by JobKind.
type TierCounters struct {
	Hits          int64 // keys of final answers that were promoted from it
	Jobs          [3]int64
	Blocks        [3]int64 // done
	Bytes         [3]int64 // done, without padding
	Failures      [32]int64
	Corrupt       int64
	Dropped       [dropEnd]int64
	Late          int64 // results after the deadline had settled the outcome
	ProbeFailures int64
}

const _ = uint(32 - tier.CauseUnavailable)

// Stats is a snapshot.
type Stats struct {
	Counters
	Tiers []TierCounters

	// The region now, in bytes. The seven add up to Capacity.
	Capacity, Free, Evictable, Pinned, Filling, Quarantined, Remainder int64

	Blocks       int64 // committed
	Sessions     int
	Requests     int
	Handovers    int
	Pins         int
	Reservations int
	Jobs         int
	Waits        int
	Facts        int
	Fills        int
	Timers       int
	QuietSlots   int // quarantined or doomed
	Reading      []int
	Writing      []int
	Waiting      []int // stored blocks that wait for the tier's credit
	OverdueBytes []int64
}

// Stats counts; it walks the extents, not the slots.
func (c *Core) Stats() Stats {
	s := Stats{
		Counters: c.stats, Capacity: c.opt.Size, Sessions: len(c.sessions), Requests: c.requests, Handovers: c.handovers,
		Pins: c.pins.Len(), Reservations: c.nfills - c.promoting(), Jobs: len(c.jobs), Waits: c.waits,
		Facts: len(c.facts), Fills: c.nfills, Timers: len(c.timers.heap), QuietSlots: c.quiet,
	}
	for i := range c.tiers {
		s.Tiers = append(s.Tiers, c.tiers[i].stats)
		s.Reading = append(s.Reading, c.tiers[i].reading)
		s.Writing = append(s.Writing, c.tiers[i].writing)
		s.Waiting = append(s.Waiting, len(c.tiers[i].waiting))
		s.OverdueBytes = append(s.OverdueBytes, c.tiers[i].overdueBytes)
	}
	for x := range c.extents {
		e := &c.extents[x]
		if e.class < 0 {
			s.Free += int64(e.pages) * PageSize
			continue
		}
		s.Remainder += (int64(e.pages) - int64(len(e.slots))*int64(c.classes[e.class].stride)) * PageSize
	}
	quiet := int64(0)
	for i := range c.classes {
		k := &c.classes[i]
		b := int64(k.stride) * PageSize
		filling := k.filling[useStore] + k.filling[usePromote]
		s.Free += int64(k.free) * b
		s.Evictable += int64(k.evictable) * b
		s.Filling += int64(filling) * b
		busy := int64(k.slots - k.free - k.evictable - filling)
		quiet += int64(k.quiet) * b
		s.Pinned += (busy - int64(k.quiet)) * b
		s.Blocks += int64(k.slots-k.free-filling) - int64(k.quiet)
	}
	s.Quarantined = quiet
	return s
}

// NamespaceBlocks is how many blocks of a namespace the index has.
func (c *Core) NamespaceBlocks(ns NamespaceID) int64 { return c.ns[ns].blocks }

// SessionCount is what one session holds.
type SessionCount struct{ Requests, Pins, Reservations int }

// SessionCounts tells what each session that is not closed holds.
func (c *Core) SessionCounts() map[SessionID]SessionCount {
	out := make(map[SessionID]SessionCount, len(c.sessions))
	for id, s := range c.sessions {
		if s.dead {
			continue
		}
		var n SessionCount
		for _, q := range s.all() {
			n.Requests++
			n.Pins += q.npins
			n.Reservations += q.fills
		}
		out[id] = n
	}
	return out
}
