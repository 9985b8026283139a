// Package lifecycle has the one state machine, and the gate in front of it,
// that everything long-lived embeds.
//
//	opening ──Ready──► ready ──Drain──► draining ──Close──► closed
//	   └───────────Drain, Close────────────┴──────────────────┘
//
// States only grow; every call is legal in every state:
//
//	call    opening      ready     draining     closed
//	Enter   ErrNotReady  admitted  ErrDraining  ErrClosed
//	leave   –            yes       yes          yes
//	Ready   yes          nothing   ErrDraining  ErrClosed
//	Drain   yes          yes       waits again  waits again
//	Close   yes          yes       yes          nothing
//
// What was admitted may finish in every state. Health is another axis, and not
// kept here.
//
// Watch is for the goroutines behind it that live as long: it notices one that
// has died or hangs.
//
// The package starts no goroutine. A gate holds one counter, no queue; a watch
// one entry a loop.
package lifecycle
