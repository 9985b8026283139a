package objtier

import (
	"context"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/s3"
)

// Transport moves blocks between slots of the primary and objects. It is a seam
// of handles, as transports of accelerators have them: what was posted goes on
// until its handle has been released, whatever became of the caller. The tier
// keeps a slot in its call until then.
//
// Methods may be called from many goroutines.
type Transport interface {
	// Post starts a transfer. On an error nothing was started and nothing is
	// owned; otherwise op and its buffers belong to the transfer until Release
	// of the handle has succeeded.
	Post(ctx context.Context, op *Op) (Handle, error)
}

// Handle is one transfer that was posted. Its methods are called from one
// goroutine, in the order Poll…, Release….
type Handle interface {
	// Poll waits until the transfer is over or ctx has ended, and tells its
	// state. An error says that the state could not be learned: the transfer
	// counts as failed, and may still be under way. Once Done, always Done.
	Poll(ctx context.Context) (Status, error)

	// Release ends the transfer, also one that is under way, and gives back all
	// that it holds. After nil nothing reads or writes the op's buffers any
	// more. After an error everything is as before, and Release is called
	// again. It does not wait for the network.
	Release() error
}

// Status is how a transfer stands.
type Status struct {
	Done bool
	Err  error // why it failed, when Done; an *s3.Error if the store said so
}

// Op is one transfer. The object is Head followed by Buf.
type Op struct {
	Put  bool   // else get
	Key  string // of the object
	Head []byte // the block's header: sent, or filled
	Buf  []byte // the slot: sent, or filled

	// Of a put.
	Checksum  s3.Checksum
	Exclusive bool // if the object is there already, fail with s3.KindPrecondition

	Block block.Key // whose block it is
}
