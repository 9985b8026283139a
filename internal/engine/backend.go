package engine

import (
	"context"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/arena"
	"github.com/terrace-kv/terrace/internal/core"
)

// Backend is what the server needs of the node. Its methods are called from
// many goroutines at once.
type Backend interface {
	// OpenSession greets an engine. It may do I/O (tiers open the namespace)
	// and is bounded by ctx. Errors: core's sentinels, or one that matches
	// tier.ErrNamespaceMismatch and names the differing fields, when a tier or
	// the namespace's name holds something else.
	OpenSession(ctx context.Context, hello Hello) (Session, error)

	// Status is the node's account of itself as JSON, at most
	// wire.FrameMax - 1 KiB.
	Status() []byte
}

// Hello is what an engine says of itself.
type Hello struct {
	NS     *block.Namespace
	Name   string // what the operator calls the namespace; may be empty
	Engine string // what the engine calls itself; may be empty
	PID    int    // as the kernel says; 0 when it is in a namespace that cannot be seen
	UID    int
}

// Facts of a session, fixed for its life.
type Facts struct {
	ID          uint64
	Epoch       string  // boot id and session number, never used again: at most wire.NameMax bytes
	RegionBytes int64   // what the descriptor maps
	Strides     []int64 // one a group: bytes from a slot to the next, a multiple of 4096
}

// Session is one engine's lease on the node. The server calls its methods from
// the goroutine that reads the engine's connection, one at a time, but for
// Attach, which workers' connections call at any time, also after Close.
//
// No method waits for I/O. Slices given are the server's again as soon as the
// method has returned; out is appended to and returned, so that nothing is
// allocated in the long run. Errors match core's sentinels.
//
// later is called at most once, by any goroutine, possibly under the node's
// lock and possibly before the method has returned: it only appends to a queue
// that has room. After Close it may or may not be called, and is ignored.
type Session interface {
	Facts() Facts

	// Attach opens a description of the region for one more process of this
	// engine. The server passes the lease's File on and then calls HandOver,
	// whether passing worked or not; Release is the node's, which asks Held.
	// After Close: core.ErrNoSession.
	Attach() (*arena.Lease, error)

	NewRequest(id string, p core.Params) error

	// Lookup judges keys, one list a group in prefix order; len(keys) is at
	// most the namespace's groups, and missing ones are empty lists. Either it
	// fills out and answers false, or, only with wait above 0, it answers true
	// and gives the verdicts to later, whose Answer is the callee's for good. A
	// Void one tells the engine that the lookup was overtaken.
	Lookup(id string, keys [][]block.Key, peek bool, wait time.Duration, out *core.Answer, later func(*core.Answer)) (pending bool, err error)

	// Reserve takes slots for keys, of which the first is at index first of
	// the request's list for the group. All or nothing.
	Reserve(id string, group uint32, first int, keys []block.Key, out []core.Grant) ([]core.Grant, error)

	// Commit and Abort answer one status a fill, in order.
	Commit(id string, fills []core.Fill, out []core.FillStatus) ([]core.FillStatus, error)
	Abort(id string, fills []core.Fill, out []core.FillStatus) ([]core.FillStatus, error)

	// Pin answers one lease a key, in order; a zero one where the key is not
	// a Hit. Unpin answers one status a lease and looks at Slot and Gen only.
	Pin(id string, keys []block.Key, out []core.Lease) ([]core.Lease, error)
	Unpin(id string, leases []core.Lease, out []core.FillStatus) ([]core.FillStatus, error)

	Touch(id string, keys []block.Key) error
	Finish(id string) error

	// Flush and Reset are answered through later, at the latest when wait is
	// over. On an error later is not called.
	Flush(id string, wait time.Duration, later func(core.Flushed)) error
	Reset(wait time.Duration, later func(done bool)) error

	// Close gives everything back. It is called exactly once, after the last
	// call of any other method but Attach, and never waits for the engine.
	Close()
}
