package client

import (
	"errors"
	"fmt"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/wire"
)

// Options of Dial. Only Spec must be given.
type Options struct {
	// Socket of the node. Default: $TERRACE_SOCKET, or where a node of this
	// user listens when not told otherwise.
	Socket string

	// Spec is the namespace: all that gives blocks their meaning.
	Spec block.Spec

	// NamespaceName is what the operator calls the namespace. A node refuses
	// a name that is in use for another namespace, and says how they differ,
	// which catches an engine that was started with the wrong dtype. Optional.
	NamespaceName string

	// Engine is what the engine calls itself, for status and logs. Optional.
	Engine string

	// VerifyOnLoad makes ReadInto compare each block with its checksum, in the
	// pass that copies it.
	VerifyOnLoad bool

	// CallTimeout bounds a call whose context has no deadline, beyond the time
	// that it asks the node to wait. Default 10 s.
	CallTimeout time.Duration

	// ReconnectMin and ReconnectMax are the first and the longest pause
	// between attempts to connect again; the pause doubles, give or take half.
	// Default 50 ms and 2 s.
	ReconnectMin, ReconnectMax time.Duration

	// OnState, if given, is told when the session is lost, each time that an
	// attempt to connect fails, and when there is a new one. It is called by
	// the goroutine that connects, and holds it up; it must not call Close.
	OnState func(State)
}

// State is what OnState is told.
type State struct {
	Epoch string // of the session that there is now; empty: none
	Err   error  // why there is none
}

// EnsureDefaults fills what was left empty.
func (o *Options) EnsureDefaults() {
	for _, d := range []struct {
		field *time.Duration
		value time.Duration
	}{{&o.CallTimeout, 10 * time.Second}, {&o.ReconnectMin, 50 * time.Millisecond}, {&o.ReconnectMax, 2 * time.Second}} {
		if *d.field == 0 {
			*d.field = d.value
		}
	}
	o.ReconnectMax = max(o.ReconnectMax, o.ReconnectMin)
}

// Validate reports every fault at once.
func (o *Options) Validate() error {
	errs := []error{o.Spec.Validate()}
	for _, s := range []struct{ name, v string }{{"NamespaceName", o.NamespaceName}, {"Engine", o.Engine}} {
		if len(s.v) > wire.NameMax {
			errs = append(errs, fmt.Errorf("client: %s has %d bytes, at most %d are allowed", s.name, len(s.v), wire.NameMax))
		}
	}
	for _, d := range []struct {
		name string
		v    time.Duration
	}{{"CallTimeout", o.CallTimeout}, {"ReconnectMin", o.ReconnectMin}, {"ReconnectMax", o.ReconnectMax}} {
		if d.v < 0 {
			errs = append(errs, fmt.Errorf("client: %s is %v, want a time above 0", d.name, d.v))
		}
	}
	return errors.Join(errs...)
}
