// Package lint holds house rules as tests: which package may import which, who
// may use unsafe, who may start goroutines and read clocks. It has no code.
//
// A new package gets a row in allowed, and docs/architecture.md one in its
// table.
package lint
