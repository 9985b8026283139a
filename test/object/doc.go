// Package object tests the object tier on real parts: versitygw as a process,
// over http and https, and gofakes3 behind a proxy that breaks what passes. It
// is a module of its own, so that nobody inherits what it needs.
//
// With TERRACE_SOAK=1 the runs are as long as the promises of the tier; without
// it they are as long as a change can wait for.
package object
