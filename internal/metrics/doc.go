// Package metrics has the histograms that the node observes while it works.
// Counters and gauges are not kept twice: the node counts in its Status, and
// internal/admin, which serves both, declares how each field of it is called.
//
// Names are terrace_<subsystem>_<noun>_<unit>[_total]. Labels are enums whose
// values exist from the start; none is ever a key, a request or a path.
//
// Observing takes three atomic additions, never waits and never fails, so that
// no outcome depends on a metric. The package starts no goroutine; a histogram
// has a fixed size of 5 KiB.
package metrics
