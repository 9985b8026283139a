package invariants

import (
	"fmt"
	"sync/atomic"
)

// CloseChecker finds a second Close of something that must be closed once. It
// is embedded by value; its zero value is ready. It does nothing unless
// Enabled.
type CloseChecker struct{ closed atomic.Bool }

// Close notes the close of the named thing, and panics if there was one before.
func (c *CloseChecker) Close(what string) {
	if Enabled && c.closed.Swap(true) {
		panic(fmt.Sprintf("invariants: %s closed twice", what))
	}
}

// AssertOpen panics if the named thing was closed.
func (c *CloseChecker) AssertOpen(what string) {
	if Enabled && c.closed.Load() {
		panic(fmt.Sprintf("invariants: %s used after its close", what))
	}
}

// PoisonByte is what a freed slot is filled with, so that a stale lease reads
// something that no checksum accepts.
const PoisonByte = 0xCC

// Poison fills b with PoisonByte. It does nothing unless Enabled.
func Poison(b []byte) {
	if !Enabled {
		return
	}
	for i := range b {
		b[i] = PoisonByte
	}
}
