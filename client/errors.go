package client

import (
	"errors"
	"fmt"
	"io/fs"
	"syscall"

	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/internal/wire"
	"github.com/terrace-kv/terrace/tier"
)

// Errors of the client itself.
var (
	// ErrSessionLost: the node has gone, or has ended the session. The client
	// is connecting anew; requests and leases of the session are void.
	ErrSessionLost = errors.New("the session with the node is lost")

	// ErrStale: a lease, grant or fill of another session.
	ErrStale = errors.New("of an earlier session")

	// ErrClosed: Close has been called.
	ErrClosed = errors.New("client is closed")

	// ErrCorrupt: a block's bytes do not match its checksum. Do not use them;
	// compute the block.
	ErrCorrupt = errors.New("block does not match its checksum")

	// ErrSize: a buffer is not as long as a block of its group.
	ErrSize = errors.New("buffer has the wrong length")
)

// What the node refuses calls with. A refused call has changed nothing.
var (
	ErrInvalid      = core.ErrInvalid
	ErrNoSession    = core.ErrNoSession
	ErrNoRequest    = core.ErrNoRequest
	ErrConflict     = core.ErrConflict
	ErrFinished     = core.ErrFinished
	ErrDraining     = core.ErrDraining
	ErrNoRoom       = core.ErrNoRoom
	ErrTooLarge     = core.ErrTooLarge
	ErrNotReady     = core.ErrNotReady
	ErrTooMany      = core.ErrTooMany
	ErrStillPending = core.ErrStillPending
	ErrInternal     = wire.ErrInternal
	ErrUnsupported  = wire.ErrUnsupported
	ErrOvertaken    = wire.ErrOvertaken // a waiting lookup, by another lookup of its request or by Finish
)

// What the node ends a session, or refuses one, with.
var (
	ErrMalformed  = wire.ErrMalformed
	ErrVersion    = wire.ErrVersion
	ErrNamespace  = tier.ErrNamespaceMismatch
	ErrForbidden  = wire.ErrForbidden
	ErrSlowReader = wire.ErrSlowReader
)

// Error is what the node says about a call. It matches the sentinel of its
// code with errors.Is; Code has a stable number and name.
type Error = wire.Error

// dialError says what to do.
func dialError(path string, err error) error {
	hint := ""
	switch {
	case errors.Is(err, fs.ErrNotExist):
		hint = "no socket there; is `terrace serve` running, and with this socket?"
	case errors.Is(err, syscall.ECONNREFUSED):
		hint = "nobody answers; `terrace serve` has died or is starting"
	case errors.Is(err, fs.ErrPermission):
		hint = "run engine and node as one user, or set the node's socket_group to a group of both"
	default:
		return fmt.Errorf("connect to node at %s: %w", path, err)
	}
	return fmt.Errorf("connect to node at %s: %w: %s", path, err, hint)
}
