// Package peer tests nodes that load from each other: the built binary as
// processes of their own on loopback addresses, engines in the test's process,
// and a network that can be slowed, stopped and cut (internal/netfault). Where
// root may, they also run in network namespaces of their own (netns_test.go).
//
// TestMain builds the binary once, with the race detector when the tests have
// it. Each wait has a bound; a test waits for a condition, never for time to
// pass, but for faults that last a time. Processes are ended by the handle of
// whoever started them, and end with the test. Every block is compared with
// what package content says it must be.
//
// TERRACE_SOAK=1 makes the runs longer.
package peer
