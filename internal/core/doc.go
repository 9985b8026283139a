// Package core decides: verdicts, pins, jobs, requests, promotion, cascade and
// eviction. Calls and completions come in, replies and effects go out.
//
// It does no I/O, reads no clock, starts no goroutine, takes no lock, and
// iterates nothing in map order where the order shows. So it can be driven by
// a simulator for millions of steps and replayed from a seed. Its owner
// (internal/node) serialises the calls and performs the effects in order.
//
// Every call is legal in every state. A call that is refused with an error has
// changed nothing. What only a bug can cause and what would serve wrong bytes
// panics.
//
// Bounds: requests, pins, fills and jobs live as long as what they belong to
// and are counted in Stats; facts about keys (probe results, failed reads) are
// a bounded table that forgets by age and then the oldest first.
package core
