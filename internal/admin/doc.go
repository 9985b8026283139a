// Package admin serves people and monitors over HTTP, on loopback unless told
// otherwise: health, readiness, status, pins, metrics and profiles. All of it
// is read-only; what holds up the node is a POST.
//
//	/healthz       200 while the node can answer and its loops take their turns; 503 with those that do not
//	/readyz        200 when engines are served; 503 with what is missing
//	/v1/status     node.Status as JSON
//	/v1/pins       who keeps which block from eviction, and for how long
//	/v1/verify     POST: the node checks itself; calls wait for ?pause= at most, by default 1 s
//	/metrics       Prometheus
//	/debug/pprof/  profiles
//
// It is the first to open and the last to close, so that a start and a drain
// can be watched; before Attach every page says that the node is opening.
//
// Goroutines: one that accepts, waited for by Close; one a connection, of which
// there are 64 at most, ended by Close. Bounds: 16 KiB of header, 5 s to send
// it, 2 min to take an answer, 10,000 pins in one, one check
// at a time, which holds up the node for a minute at most.
package admin
