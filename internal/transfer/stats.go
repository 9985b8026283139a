package transfer

import (
	"time"

	"github.com/terrace-kv/terrace/tier"
)

// causes is at least the number of tier.Cause values; init checks it.
const causes = 24

func init() {
	if len(tier.Causes()) > causes {
		panic("transfer: causes is smaller than the number of tier causes")
	}
}

// Stats is a lane's account of itself. Counters count since the start.
type Stats struct {
	Tier   string
	Read   QueueStats
	Write  QueueStats
	Probe  QueueStats // its State is that of reads
	Closed bool

	UnknownCancels uint64 // Cancel of an id that the lane does not hold
	SinkPanics     uint64
	SetAside       uint64 // corrupt copies that the tier was asked to set aside
	SetAsideFailed uint64
}

// QueueStats is what a lane holds and did of one kind. An item of a probe is
// the probe.
type QueueStats struct {
	State    State
	Openings uint64 // times the breaker opened

	// Held now.
	Jobs         int
	Items        int           // accepted and not yet reported
	Bytes        int64         // of those
	QueuedItems  int           // of those, never begun
	RetryItems   int           // of those, waiting to be tried again
	Running      int           // calls, the overdue included
	RunningBytes int64         // in calls inside their deadline
	Overdue      int           // calls past their deadline
	OverdueBytes int64         // in those
	OldestJob    time.Duration // age of the oldest job held

	// Outcomes of items.
	Done, NotFound, Failed, Cancelled uint64
	DoneBytes                         uint64
	Causes                            map[tier.Cause]uint64 // of Failed; has every cause
	Expired                           uint64                // of Failed: the deadline passed before they began

	Calls    uint64
	CallTime time.Duration // the sum over calls
	Retries  uint64        // items tried again
	Panics   uint64        // calls that panicked

	RefusedFull, RefusedOpen, RefusedClosed, RefusedOther uint64 // submits
}

// Stats tells what the lane holds and did. It does no I/O.
func (l *Lane) Stats() Stats {
	now := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	s := Stats{Tier: l.name, Closed: l.closed, UnknownCancels: l.unknown, SinkPanics: l.sinkPanic,
		SetAside: l.setAside, SetAsideFailed: l.asideErr}
	out := [kinds]*QueueStats{&s.Read, &s.Write, &s.Probe}
	for k, o := range out {
		q := &l.q[k]
		n := &q.n
		*o = QueueStats{State: q.br.state, Openings: q.br.openings,
			Jobs: q.jobs, Items: q.items, Bytes: q.bytes, Running: q.running, RunningBytes: q.inflight,
			Overdue: q.overdue, OverdueBytes: q.late,
			Done: n.done, NotFound: n.notFound, Failed: n.failed, Cancelled: n.cancelled, DoneBytes: n.doneBytes,
			Causes: make(map[tier.Cause]uint64), Expired: n.expired, Calls: n.calls, CallTime: n.callTime,
			Retries: n.retries, Panics: n.panics, RefusedFull: n.refusedFull, RefusedOpen: n.refusedOpen,
			RefusedClosed: n.refusedClosed, RefusedOther: n.refusedOther}
		for _, c := range tier.Causes() {
			o.Causes[c] = n.causes[c]
		}
	}
	for _, j := range l.jobs {
		o := out[j.q.kind]
		o.QueuedItems += j.units - j.next
		for _, ch := range j.retries {
			o.RetryItems += len(ch.index)
		}
		o.OldestJob = max(o.OldestJob, now.Sub(j.accepted))
	}
	return s
}
