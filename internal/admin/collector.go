package admin

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/internal/node"
	"github.com/terrace-kv/terrace/internal/peer"
	"github.com/terrace-kv/terrace/tier"
)

// ModeNotOpen is the mode of a stand-in for a tier that could not be opened. It
// never fails in a way that a breaker would see, because it is never asked.
const ModeNotOpen = "not open"

// collector turns the node's status into metrics at each scrape.
type collector struct{ status func() node.Status }

// metric is one name, declared once.
type metric struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
}

var descs []*prometheus.Desc

func declare(kind prometheus.ValueType, name, help string, labels []string) metric {
	m := metric{prometheus.NewDesc("terrace_"+name, help, labels, nil), kind}
	descs = append(descs, m.desc)
	return m
}

func gauge(name, help string, labels ...string) metric {
	return declare(prometheus.GaugeValue, name, help, labels)
}

func counter(name, help string, labels ...string) metric {
	return declare(prometheus.CounterValue, name, help, labels)
}

var (
	buildInfo   = gauge("build_info", "1, with the version of the node.", "version")
	nodeUptime  = gauge("node_uptime_seconds", "Time since the node was opened.")
	nodeReady   = gauge("node_ready", "1 while engines are served.")
	nodeState   = gauge("node_state", "1 for the state that the node is in.", "state")
	nodeMissing = gauge("node_missing_parts", "Number of things that readiness waits for.")
	nodeNames   = gauge("node_namespaces", "Namespaces that engines have opened.")

	primaryCapacity  = gauge("primary_capacity_bytes", "Size of the shared memory for blocks.")
	primaryPopulated = gauge("primary_populated_bytes", "Part of it that has been touched ahead of use.")
	primaryBytes     = gauge("primary_bytes", "Shared memory by what it is used for; sums to the capacity.", "use")
	primaryBlocks    = gauge("primary_blocks", "Committed blocks in the primary.")
	primaryEvicted   = counter("primary_evicted_blocks_total", "Blocks evicted from the primary.")
	primaryExtents   = counter("primary_extents_taken_total", "Extents that one size class took from another.")
	primaryHits      = counter("primary_hit_blocks_total", "Blocks answered Hit without a promotion.")

	loopUp    = gauge("loop_up", "0 while the loop is down: it has ended, or hangs.", "loop")
	loopTurns = counter("loop_turns_total", "Turns that the loop has begun.", "loop")
	loopBusy  = gauge("loop_busy_seconds", "How long the loop's turn has taken by now; 0 at rest.", "loop")

	tableEntries = gauge("table_entries", "Entries of the node's tables; all are 0 when it is idle and no engine is connected.", "table")

	lookupCalls = counter("lookup_calls_total", "Lookups of engines answered.")
	lookupKeys  = counter("lookup_keys_total", "Keys judged in lookups.", "verdict")

	storeReserved  = counter("store_reserved_blocks_total", "Slots granted to engines to store a block.")
	storeCommitted = counter("store_committed_blocks_total", "Blocks committed.")
	storeAborted   = counter("store_aborted_blocks_total", "Reservations that engines gave back.")
	storeExpired   = counter("store_expired_blocks_total", "Reservations that were neither committed nor aborted in time.")
	storeRefused   = counter("store_refused_calls_total", "Reserve calls refused for lack of room.")

	tierUp        = gauge("tier_up", "0 while the tier is not used in this direction because it fails.", "tier", "direction")
	tierHealth    = gauge("tier_health", "1 for the health that the tier has in this direction.", "tier", "direction", "health")
	tierHits      = counter("tier_promoted_blocks_total", "Blocks of engines' lookups that were read from the tier into the primary.", "tier")
	tierReadB     = counter("tier_read_bytes_total", "Bytes read from the tier, for engines and for peers.", "tier")
	tierWriteB    = counter("tier_write_bytes_total", "Bytes written to the tier.", "tier")
	tierWritten   = counter("tier_written_blocks_total", "Blocks written to the tier.", "tier")
	tierFailures  = counter("tier_failed_blocks_total", "Blocks whose read or write failed.", "tier", "cause")
	tierCorrupt   = counter("tier_corrupt_blocks_total", "Copies whose bytes were not what had been stored. Any is an alarm.", "tier")
	tierDropped   = counter("tier_dropped_blocks_total", "Writes to the tier that were not begun.", "tier", "cause")
	tierLate      = counter("tier_late_results_total", "Results that came after their job had ended.", "tier")
	tierPanics    = counter("tier_panics_total", "Calls that ended in a panic of the tier's code. Any is a bug of the tier.", "tier")
	tierQueued    = gauge("tier_queued_blocks", "Blocks that wait for the tier.", "tier", "direction")
	tierBlocks    = gauge("tier_blocks", "Blocks that the tier has.", "tier")
	tierUsed      = gauge("tier_used_bytes", "Room that the tier takes, as its medium counts it.", "tier")
	tierCapacity  = gauge("tier_capacity_bytes", "Room that it may take; 0 when it is unbounded.", "tier")
	tierEvicted   = counter("tier_evicted_blocks_total", "Blocks evicted from the tier.", "tier")
	tierSetAside  = counter("tier_set_aside_blocks_total", "Corrupt copies set aside for inspection.", "tier")
	tierScanDone  = gauge("tier_scan_done", "1 when the tier knows all that it has.", "tier")
	tierScanFound = gauge("tier_scan_blocks", "Blocks that the scan has found so far.", "tier")
	tierScanBad   = gauge("tier_scan_failed", "1 when the scan could not go on.", "tier")

	peerSessions    = gauge("peer_sessions", "Other nodes that this one is connected with.")
	peerEntries     = gauge("peer_entries", "Entries of the tables about peers; all but sessions and ended_ids are 0 when no request has a peer.", "table")
	peerPinned      = gauge("peer_pinned_bytes", "Memory that is pinned to be sent to peers.")
	peerBlocks      = counter("peer_blocks_total", "Blocks loaded from peers (in), and sent to them (out).", "direction")
	peerBytes       = counter("peer_bytes_total", "Bytes of those.", "direction")
	peerGets        = counter("peer_gets_total", "Blocks loaded from peers over the fabric, not over TCP.")
	peerGetsFailed  = counter("peer_gets_failed_total", "Gets that failed; their blocks were asked for over TCP.")
	peerOffers      = counter("peer_offers_total", "Blocks that peers were let get over the fabric.")
	peerGetsPosted  = gauge("peer_gets_posted", "Gets whose memory the fabric has not released.")
	peerLookups     = counter("peer_lookups_total", "Lookups of peers that were taken.")
	peerFetches     = counter("peer_fetches_total", "Fetches of peers that were taken.")
	peerFailures    = counter("peer_failures_total", "Blocks and probes of ours that a peer did not answer with what was asked for, by why.", "code")
	peerRefused     = counter("peer_refused_total", "Blocks and rounds of peers that were refused or failed, by why.", "code")
	peerViolations  = counter("peer_violations_total", "Sessions ended because the peer broke the protocol. Any is a bug, or somebody else.")
	peerDeaths      = counter("peer_deaths_total", "Sessions ended because the peer fell silent.")
	peerCorrupt     = counter("peer_corrupt_blocks_total", "Blocks that came with other bytes than their checksum. Any is an alarm.")
	peerStrays      = counter("peer_strays_total", "Frames about what was over already.")
	peerFastFails   = counter("peer_fast_fails_total", "Rounds not tried, because the peer is down.")
	peerHitsExpired = counter("peer_hits_expired_total", "Lookups of peers that found something which was not fetched in time.")
	peerHandExpired = counter("peer_handovers_expired_total", "Hand-overs whose blocks nobody fetched in time.")
)

// The values of the labels, so that every series is there from the start.
var (
	states     = []string{"opening", "ready", "draining", "closed"}
	healths    = []string{"closed", "brown_out", "open", "half_open"}
	verdictSet = names(core.Verdicts())
	causeSet   = names(tier.Causes())
	dropSet    = core.DropCauses[:]
	codeSet    = names(peer.Codes())
)

func names[T interface{ String() string }](values []T) (out []string) {
	for _, v := range values {
		out = append(out, v.String())
	}
	return out
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range descs {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	send := func(m metric, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(m.desc, m.kind, v, labels...)
	}
	num := func(m metric, v int64, labels ...string) { send(m, float64(v), labels...) }
	flag := func(m metric, v bool, labels ...string) {
		if v {
			send(m, 1, labels...)
		} else {
			send(m, 0, labels...)
		}
	}
	// Values that the node counts under no name of ours are kept, not lost.
	byName := func(m metric, all []string, counts map[string]int64, labels ...string) {
		seen := make(map[string]bool, len(all))
		for _, name := range all {
			seen[name] = true
			num(m, counts[name], append(labels, name)...)
		}
		for name, n := range counts {
			if !seen[name] {
				num(m, n, append(labels, name)...)
			}
		}
	}
	s := c.status()

	num(buildInfo, 1, s.Version)
	send(nodeUptime, s.UptimeSeconds)
	flag(nodeReady, s.Ready)
	for _, state := range states {
		flag(nodeState, s.State == state, state)
	}
	num(nodeMissing, int64(len(s.Missing)))
	num(nodeNames, int64(len(s.Namespaces)))

	p := s.Primary
	num(primaryCapacity, p.CapacityBytes)
	num(primaryPopulated, p.PopulatedBytes)
	num(primaryBytes, p.FreeBytes, "free")
	num(primaryBytes, p.EvictableBytes, "evictable")
	num(primaryBytes, p.PinnedBytes, "pinned")
	num(primaryBytes, p.FillingBytes, "filling")
	num(primaryBytes, p.QuarantinedBytes, "quarantined")
	num(primaryBytes, p.RemainderBytes, "remainder")
	num(primaryBlocks, p.Blocks)
	num(primaryEvicted, p.Evicted)
	num(primaryExtents, p.ExtentsTaken)
	num(primaryHits, p.Hits)

	for _, l := range s.Loops {
		flag(loopUp, l.Down == "", l.Name)
		num(loopTurns, l.Turns, l.Name)
		send(loopBusy, l.BusySeconds, l.Name)
	}

	t := s.Tables
	num(tableEntries, int64(t.Sessions), "sessions")
	num(tableEntries, int64(t.Requests), "requests")
	num(tableEntries, int64(t.Pins), "pins")
	num(tableEntries, int64(t.Reservations), "reservations")
	num(tableEntries, int64(t.Jobs), "jobs")
	num(tableEntries, int64(t.Waits), "waits")
	num(tableEntries, int64(t.Quarantined), "quarantined_slots")

	num(lookupCalls, s.Lookups.Calls)
	byName(lookupKeys, verdictSet, s.Lookups.Verdicts)

	num(storeReserved, s.Stores.Reserved)
	num(storeCommitted, s.Stores.Committed)
	num(storeAborted, s.Stores.Aborted)
	num(storeExpired, s.Stores.Expired)
	num(storeRefused, s.Stores.Refused)

	for _, t := range s.Tiers {
		for direction, health := range map[string]string{"read": t.ReadHealth, "write": t.WriteHealth} {
			flag(tierUp, health != "open" && t.Mode != ModeNotOpen, t.Name, direction)
			for _, h := range healths {
				flag(tierHealth, h == health, t.Name, direction, h)
			}
		}
		num(tierHits, t.Hits, t.Name)
		num(tierReadB, t.ReadBytes, t.Name)
		num(tierWriteB, t.WriteBytes, t.Name)
		num(tierWritten, t.WrittenBlocks, t.Name)
		byName(tierFailures, causeSet, t.Failures, t.Name)
		num(tierCorrupt, t.Corrupt, t.Name)
		byName(tierDropped, dropSet, t.Dropped, t.Name)
		num(tierLate, t.Late, t.Name)
		num(tierPanics, t.Panics, t.Name)
		num(tierQueued, int64(t.QueuedReads), t.Name, "read")
		num(tierQueued, int64(t.QueuedWrites), t.Name, "write")
		num(tierBlocks, t.Blocks, t.Name)
		num(tierUsed, t.UsedBytes, t.Name)
		num(tierCapacity, t.CapacityBytes, t.Name)
		num(tierEvicted, t.Evicted, t.Name)
		num(tierSetAside, t.SetAside, t.Name)
		flag(tierScanDone, t.ScanDone, t.Name)
		num(tierScanFound, t.ScanBlocks, t.Name)
		flag(tierScanBad, t.ScanError != "", t.Name)
	}

	if p := s.Peers; p != nil {
		num(peerSessions, int64(p.Sessions))
		for table, n := range map[string]int{"sources": p.Sources, "rounds": p.Rounds, "serves": p.Serves, "supplies": p.Supplies, "parked": p.Parked,
			"aborts": p.Aborts, "handovers": p.Handovers, "ended_ids": p.Ended, "quarantined_blocks": p.Quarantined} {
			num(peerEntries, int64(n), table)
		}
		num(peerPinned, p.PinnedBytes)
		num(peerBlocks, p.BlocksIn, "in")
		num(peerBlocks, p.BlocksOut, "out")
		num(peerBytes, p.BytesIn, "in")
		num(peerBytes, p.BytesOut, "out")
		num(peerGets, p.Gets)
		num(peerGetsFailed, p.GetsFailed)
		num(peerOffers, p.Offers)
		num(peerGetsPosted, int64(p.GetsPosted))
		num(peerLookups, p.Lookups)
		num(peerFetches, p.Fetches)
		byName(peerFailures, codeSet, p.Failures)
		byName(peerRefused, codeSet, p.Refused)
		num(peerViolations, p.Violations)
		num(peerDeaths, p.Deaths)
		num(peerCorrupt, p.Corrupt)
		num(peerStrays, p.Strays)
		num(peerFastFails, p.FastFails)
		num(peerHitsExpired, p.HitsExpired)
		num(peerHandExpired, p.HandoversExpired)
	}
}
