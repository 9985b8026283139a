package tier

import (
	"context"
	"errors"
	"fmt"

	"github.com/terrace-kv/terrace/block"
)

// Sentinels. ErrNotFound is a Miss and never logged.
var (
	ErrNotFound          = errors.New("block not found")
	ErrClosed            = errors.New("tier is closed")
	ErrNamespaceMismatch = errors.New("namespace contradicts the stored one")
)

// Class decides what is done about an error.
type Class uint8

const (
	ClassNone      Class = iota // no error
	ClassNotFound               // a Miss
	ClassRetryable              // may pass: try again inside the attempt's budget
	ClassPermanent              // will not pass by trying again at once
	ClassCorrupt                // the copy is wrong: set it aside, count, alert
	ClassCancelled              // the caller ended it
)

var classNames = [...]string{"none", "not_found", "retryable", "permanent", "corrupt", "cancelled"}

func (c Class) String() string {
	if int(c) < len(classNames) {
		return classNames[c]
	}
	return fmt.Sprintf("class_%d", uint8(c))
}

// Cause is a bounded label for counters.
type Cause uint8

const (
	CauseOther       Cause = iota
	CauseNoSpace           // ENOSPC, quota
	CauseCapacity          // the tier's own limit, nothing evictable
	CauseFloor             // the free-space floor
	CausePermission        // EACCES, EPERM
	CauseReadOnly          // EROFS
	CauseIO                // EIO
	CauseDescriptors       // EMFILE, ENFILE
	CauseShort             // fewer bytes than the header or the file says
	CauseHeader            // bad magic, version, key, namespace or length in a header
	CauseChecksum          // bytes do not match their checksum
	CauseSource            // the primary's bytes do not match their checksum
	CauseTimeout           // a deadline passed
	CauseScanning          // the tier does not know its size yet
	CauseUnavailable       // the lane or tier is down
	CauseNamespace         // what is stored of one namespace is damaged or contradicts the engine's; others are served
	CauseForeign           // something that is no block file of this version is in one block's place; others are served
	CauseThrottled         // the store asks for fewer requests
	CauseNetwork           // refused, reset, no such host, a broken answer
	CauseCredentials       // none, unknown, expired, a wrong secret
	CauseConfig            // the store has no such bucket, or it is elsewhere
	causeCount
)

var causeNames = [causeCount]string{"other", "no_space", "capacity", "free_floor", "permission", "read_only", "io",
	"descriptors", "short", "header", "checksum", "source", "timeout", "scanning", "unavailable", "namespace", "foreign", "throttled", "network", "credentials", "config"}

func (c Cause) String() string {
	if c < causeCount {
		return causeNames[c]
	}
	return fmt.Sprintf("cause_%d", uint8(c))
}

// Causes lists every cause, for counters created at zero.
func Causes() []Cause {
	out := make([]Cause, causeCount)
	for i := range out {
		out[i] = Cause(i)
	}
	return out
}

// Error tells which tier failed at what, and what to do.
type Error struct {
	Op    string // "read", "write", "probe", …
	Tier  string // the tier's name
	Key   block.Key
	Class Class
	Cause Cause
	Err   error
	Hint  string // what an operator can do; may be empty

	// Down says that every other call would fail in the same way, such as for
	// want of a permission: the lane stops asking at once, not after some.
	Down bool
}

func (e *Error) Error() string {
	s := fmt.Sprintf("%s tier %s", e.Op, e.Tier)
	if e.Key != (block.Key{}) {
		s += fmt.Sprintf(" block %s", e.Key)
	}
	s += fmt.Sprintf(": %v", e.Err)
	if e.Hint != "" {
		s += " (" + e.Hint + ")"
	}
	return s
}

func (e *Error) Unwrap() error { return e.Err }

// ClassOf says what an error of a tier means. An error that nobody classified
// is permanent.
func ClassOf(err error) Class {
	if err == nil {
		return ClassNone // before te, which escapes
	}
	var te *Error
	switch {
	case errors.Is(err, ErrNotFound):
		return ClassNotFound
	case errors.As(err, &te):
		return te.Class
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return ClassCancelled
	}
	return ClassPermanent
}

// CauseOf is the counter label for an error.
func CauseOf(err error) Cause {
	var te *Error
	switch {
	case errors.As(err, &te):
		return te.Cause
	case errors.Is(err, context.DeadlineExceeded):
		return CauseTimeout
	case errors.Is(err, ErrClosed):
		return CauseUnavailable
	}
	return CauseOther
}
