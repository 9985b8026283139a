// Package transfer executes the core's jobs over lanes. A lane drives one
// secondary tier (or one peer): it cuts jobs into tier calls, runs them on a
// bounded number of workers, retries, verifies checksums, watches the tier's
// health, and reports each item once, when its buffer is quiet.
//
// It decides nothing that the core decides. The job table, the deadlines and
// the outcomes are the core's; a job that the core has already failed is
// still reported here when its last call is over, and that report is the
// quiet signal that lets its slots change owner.
//
//	INVARIANT(transfer-one-report): each item of an accepted job, and each
//	accepted probe, is reported exactly once; the report that carries last is
//	the job's last. A refused job is never reported.
//	INVARIANT(transfer-quiet): an item is reported only when no tier call has
//	its buffer and none will be given it.
//
// # Goroutines
//
// Per lane, all started by NewLane and waited for by Close:
//
//   - max(ReadParallel, WriteParallel) + 1 workers share reads and writes;
//   - ProbeParallel workers run probes, so that a probe never waits behind a
//     read, nor a read behind a probe;
//   - one keeper owns the timers (deadlines, retries, breakers) and reports
//     what has ended without a worker: cancelled, expired, failed at once.
//
// A worker whose call hangs stays in it, and Close names the call when it
// stops waiting. Submit, SubmitProbe, Cancel, State and Stats never wait for
// I/O nor for the sink; the sink is called with no lock held and may call them.
//
// # Who goes first
//
// A free worker takes a read if one is waiting and fewer than ReadParallel
// run; otherwise a write if fewer than WriteParallel run. Both limits are
// below the number of workers. So loads go before stores, hung writes leave
// reads a worker, and however many reads wait or hang, one worker is left that
// takes only writes. Within a direction jobs take turns, one call each, so a
// job of a thousand blocks does not delay a job of one. Calls of one job run
// side by side.
//
// # Bounds
//
// Held items and bytes per direction, from Submit to the report, in whatever
// state (QueueItems, QueueBytes); held probes (QueueProbes); items and bytes a
// call (BatchItems, BatchBytes); bytes in calls inside their deadline, per
// direction (InflightBytes); attempts an item (Retry.Attempts). What exceeds a
// queue bound is refused at once and counted. Bytes held by calls that outlived
// their deadline are capped per lane (OverdueBytesMax): above it the lane is
// down until enough of them have returned. A call that outlives its deadline
// keeps its worker; when all places of a direction hang, that direction is open
// until one is free again.
//
// # Health
//
// Each direction has a breaker; probes count with reads.
//
//	closed ──share or latency──► brown-out (few calls at once)
//	   ▲  ◄──a quiet window─────────┘ │
//	   │ trials succeed               │ share or streak, hung places
//	half-open (one call at a time) ◄──┴─► open (all refused, queue failed)
//
// The keeper moves open to half-open by itself after a delay that doubles when
// the trial fails, because the core sends nothing while it is told open.
package transfer
