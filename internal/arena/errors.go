package arena

import (
	"errors"
	"fmt"
)

// Open.

// LimitError says that the region would not fit into the memory that this
// process may use.
type LimitError struct {
	Size  int64  // bytes asked for
	Limit string // what stands in the way, with its figures
	Free  int64  // bytes that it leaves
	Most  int64  // the largest size that would fit; 0 if none does
	Keep  int64  // bytes that the node itself needs beside a region of that size
	Hint  string // what to change other than the size
}

func (e *LimitError) Error() string {
	change := fmt.Sprintf("set primary.size to at most %d (%s), or %s", e.Most, human(e.Most), e.Hint)
	if e.Most <= 0 {
		change = "no size fits: " + e.Hint
	}
	return fmt.Sprintf("primary.size: %d bytes (%s) do not fit: %s, so %s are free, of which the node itself needs %s; %s",
		e.Size, human(e.Size), e.Limit, human(e.Free), human(e.Keep), change)
}

// Use.
var (
	// ErrClosed: the arena or mapping has been closed.
	ErrClosed = errors.New("arena is closed")

	// ErrPopulateUnsupported: the kernel (before 5.14) cannot populate without
	// writing. Nothing is lost but time: pages are taken on first use.
	ErrPopulateUnsupported = errors.New("the kernel cannot populate the region ahead (Linux 5.14 can); pages are taken on first use")
)

// Leases.
var (
	// ErrHeld: some process can still write through this lease.
	ErrHeld = errors.New("a process still holds the region through this lease")

	// ErrLeases: LeasesMax leases are in use.
	ErrLeases = errors.New("too many attaches hold the region; end engines or workers that are no longer needed")
)

// Descriptors that arrive in a message.
var (
	// ErrDescriptors: a message carried more than one descriptor.
	ErrDescriptors = errors.New("message carries more than one descriptor")

	// ErrNotRegion: a descriptor that is not a sealed region of the right size.
	ErrNotRegion = errors.New("descriptor is not a sealed shared-memory region")
)
