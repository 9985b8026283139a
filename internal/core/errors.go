package core

import "errors"

// What a call can be refused with. A refused call changes nothing.
var (
	ErrNoSession = errors.New("no such session")
	ErrNoRequest = errors.New("no such request")
	ErrConflict  = errors.New("request id is in use and not finished")
	// ErrFinished is ErrNoRequest as well: a finished request may be gone or not
	// yet, and nobody should have to tell the two apart.
	ErrFinished     = error(finished{})
	ErrDraining     = errors.New("node is draining")
	ErrNoRoom       = errors.New("no room in the primary")
	ErrTooLarge     = errors.New("more than the primary can ever hold at once")
	ErrInvalid      = errors.New("invalid call")
	ErrNotReady     = errors.New("namespace is not open")
	ErrTooMany      = errors.New("too many")
	ErrStillPending = errors.New("a reset is under way")
)

type finished struct{}

func (finished) Error() string        { return "request is finished" }
func (finished) Is(target error) bool { return target == ErrNoRequest }
