// Package e2e tests Terrace from outside: the built binary as processes of
// their own, engines as other processes, real sockets, files and signals.
//
// TestMain builds the binary once, with the race detector when the tests have
// it. The test binary is also the other roles, told by the environment: an
// engine that the test drives call by call (engine_test.go), a worker of such an
// engine, and a shell around a node that needs a mount or a limit of its own.
//
// Everything is below t.TempDir() and on loopback. Each wait has a bound; a
// test waits for a condition, never for time to pass. Processes are ended by
// the handle of whoever started them, and each of them ends by itself when the
// test does, because it holds the reading end of a pipe of the test's.
//
// TERRACE_SOAK=1 makes the runs longer; TERRACE_TESTDATA is the folder of traces.
// Random choices come from a seed, which is printed and can be set with -seed.
package e2e
