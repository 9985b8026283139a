// Package peer lets nodes load blocks from each other's primaries.
//
// All that is decided is decided by Machine, one a node: which peer is up, what
// was asked of it, what it may have of us, when a wait ends. It is a pure state
// machine, as internal/core is: calls with now in, effects out, no I/O, no
// clock, no goroutine, no lock. So two nodes and a network are simulated under
// one seed.
//
// Around it: messages.go has what nodes say to each other, wire.go how that
// looks in bytes, net.go the connections, peers.go the goroutines, the lock and
// the node.
//
// Words: the consumer pulls blocks, the producer has them; a node is both. A
// source is one request's view of one producer. A round is one question of a
// source: a lookup, the fetch that follows it, or a fetch without one. A serve
// is a round as the producer has it. A supply is a request of our engines whose
// blocks wait for somebody to fetch them (remote_decoder), under a name that
// both sides know, its KV request id.
package peer
