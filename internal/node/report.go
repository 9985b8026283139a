package node

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/internal/transfer"
	"github.com/terrace-kv/terrace/tier"
)

// Status is the node's account of itself. It walks no table of blocks.
func (n *Node) Status() Status {
	s := Status{
		Version: n.opt.Version, BootID: n.boot, PID: pid(), UptimeSeconds: time.Since(n.start).Seconds(),
		State: n.gate.State().String(), Socket: n.opt.Socket, Loops: []LoopStatus{}, Sessions: []SessionStatus{}, Namespaces: []NamespaceStatus{},
	}
	n.mu.Lock()
	c := n.core.Stats()
	pinList := n.core.SessionCounts()
	for id, ss := range n.sessions {
		k := pinList[id]
		s.Sessions = append(s.Sessions, SessionStatus{ID: uint64(id), PID: ss.hello.PID, Engine: ss.hello.Engine,
			Namespace: ss.space.ns.Fingerprint().String(), Since: ss.since, Requests: k.Requests, Pins: k.Pins, Reservations: k.Reservations})
	}
	for _, sp := range n.spaces[1:] {
		s.Namespaces = append(s.Namespaces, NamespaceStatus{Fingerprint: sp.ns.Fingerprint().String(), Name: sp.name,
			Model: sp.ns.Spec().Model, Blocks: n.core.NamespaceBlocks(sp.id)})
	}
	states := make([][2]transfer.State, len(n.tiers))
	for i, h := range n.tiers {
		states[i] = h.states
	}
	if n.peers != nil {
		s.Peers = n.peers.status(&c)
	}
	n.mu.Unlock()
	slices.SortFunc(s.Sessions, func(a, b SessionStatus) int { return cmp.Compare(a.ID, b.ID) })

	if s.State != "ready" {
		s.Missing = append(s.Missing, "node is "+s.State)
	}
	for _, l := range n.watch.Check() {
		s.Loops = append(s.Loops, LoopStatus{Name: l.Name, Turns: l.Turns, BusySeconds: l.Busy.Seconds(), Down: l.Down})
		if l.Down != "" {
			s.Missing = append(s.Missing, "loop "+l.Name+" "+l.Down)
		}
	}
	s.Ready = len(s.Missing) == 0
	s.Primary = n.primaryStatus(&c)
	s.Tables = TableStatus{Sessions: c.Sessions, Requests: c.Requests + c.Handovers, Pins: c.Pins, Reservations: c.Reservations,
		Jobs: c.Jobs, Waits: c.Waits, Quarantined: c.QuietSlots}
	s.Lookups = LookupStatus{Calls: c.Lookups, Verdicts: map[string]int64{},
		P50us: micros(n.set.Lookup.Quantile(0.5)), P99us: micros(n.set.Lookup.Quantile(0.99))}
	for _, v := range core.Verdicts() {
		s.Lookups.Verdicts[v.String()] = c.Verdicts[v]
	}
	s.Stores = StoreStatus{Reserved: c.Reserved, Committed: c.Committed, Aborted: c.Aborted, Refused: c.Refused, Expired: c.Expired}
	for i, h := range n.tiers {
		t, l := c.Tiers[i], h.lane.Stats()
		ts := TierStatus{
			Name: h.info.Name, Type: h.info.Type, ReadHealth: states[i][transfer.Read].String(), WriteHealth: states[i][transfer.Write].String(),
			Hits: t.Hits, ReadBytes: t.Bytes[core.Promotion], WriteBytes: t.Bytes[core.Cascade], WrittenBlocks: t.Blocks[core.Cascade],
			Corrupt: t.Corrupt, Late: t.Late, Panics: h.panics.Load() + int64(l.Read.Panics+l.Write.Panics+l.Probe.Panics), QueuedReads: l.Read.QueuedItems, QueuedWrites: l.Write.QueuedItems + c.Waiting[i],
			Failures: map[string]int64{}, Dropped: map[string]int64{}, ScanDone: true,
		}
		for _, cause := range tier.Causes() {
			ts.Failures[cause.String()] = t.Failures[cause]
		}
		for d, name := range core.DropCauses {
			ts.Dropped[name] = t.Dropped[d]
		}
		if st, ok := h.tier.(tier.Statser); ok {
			x := st.Stats()
			ts.Where, ts.Mode, ts.Blocks, ts.UsedBytes, ts.CapacityBytes = x.Where, x.Mode, x.Blocks, x.UsedBytes, x.CapacityBytes
			ts.Evicted, ts.SetAside, ts.ScanDone, ts.ScanBlocks, ts.ScanError = x.Evicted, x.SetAside, x.ScanDone, x.ScanBlocks, x.ScanError
		}
		if e := h.last.Load(); e != nil {
			ts.LastError = *e
		}
		s.Tiers = append(s.Tiers, ts)
	}
	if n.peers != nil {
		s.Tiers = append(s.Tiers, n.peers.tierStatus(&c, s.Peers))
	}
	return s
}

func (n *Node) primaryStatus(c *core.Stats) PrimaryStatus {
	return PrimaryStatus{
		CapacityBytes: c.Capacity, PopulatedBytes: n.arena.Populated(), FreeBytes: c.Free, EvictableBytes: c.Evictable,
		PinnedBytes: c.Pinned, FillingBytes: c.Filling, QuarantinedBytes: c.Quarantined, RemainderBytes: c.Remainder,
		Blocks: c.Blocks, Evicted: c.Evicted, ExtentsTaken: c.ExtentsTaken, Hits: c.PrimaryHits,
	}
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// StatusJSON is Status as JSON.
func (n *Node) StatusJSON() []byte {
	b, err := json.Marshal(n.Status())
	if err != nil {
		return []byte("{}") // no value of a Status fails to encode
	}
	return b
}

// Pins lists who keeps blocks from eviction, the oldest first.
func (n *Node) Pins(limit int) []Pin {
	n.mu.Lock()
	list, now := n.core.PinList(limit), n.now()
	serving := map[core.SessionID]bool{}
	if n.peers != nil {
		serving = n.peers.bridge.Sessions()
	}
	engines := make(map[core.SessionID]string, len(n.sessions))
	for id, s := range n.sessions {
		engines[id] = fmt.Sprintf(" (engine %q, pid %d)", s.hello.Engine, s.hello.PID)
	}
	n.mu.Unlock()
	out := make([]Pin, 0, len(list))
	for _, p := range list {
		owner := fmt.Sprintf("session %d%s request %q", p.Session, engines[p.Session], p.Request)
		switch {
		case p.Job != 0 && p.Tier == len(n.tiers):
			owner = fmt.Sprintf("job %d %s %s", p.Job, p.Kind, PeersTier)
		case p.Job != 0:
			owner = fmt.Sprintf("job %d %s %s", p.Job, p.Kind, n.tiers[p.Tier].info.Name)
		case serving[p.Session]:
			owner = fmt.Sprintf("round %s of a peer", p.Request)
		}
		out = append(out, Pin{Owner: owner, Slot: uint32(p.Slot), Generation: p.Gen, Key: p.Key.String(),
			AgeSeconds: time.Duration(now - p.Since).Seconds(), Overdue: p.Overdue})
	}
	slices.SortStableFunc(out, func(a, b Pin) int { return cmp.Compare(b.AgeSeconds, a.AgeSeconds) })
	return out
}

// CheckInvariants walks the tables of core and peers; for tests.
func (n *Node) CheckInvariants() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return errors.Join(n.core.CheckInvariants(), n.peers.check())
}
