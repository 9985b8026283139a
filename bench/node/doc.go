// Package node holds a running node against the tier under it and the medium
// under that. It has no code of its own.
//
// The node is a process of its own with 16 workers for its tier; the benchmark
// is the engine, over the socket and the shared memory. By turns it runs the
// node, a loop over a tier of its own, and a loop over the raw calls, with the
// same sizes, files and concurrency.
package node
