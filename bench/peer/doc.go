// Package peer holds what goes on between nodes against bare TCP. It has no
// code of its own.
//
// Net is the transport by itself, in this process. In Fetch each node is a
// process of its own and the benchmark is the engine; the two ends of the raw
// transfer are processes too, that write from and read into shared memory of
// the same size, over as many connections. In Others a node loads from one
// that is well, while another one is not.
package peer
