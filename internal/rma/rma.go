// Package rma is the seam to fabrics on which a node reads another node's memory
// without that node's doing, as RDMA does: one-sided gets. internal/peer moves
// blocks over one in place of sending them through TCP; what the two nodes say to
// each other stays on their TCP session.
//
// It has handles, as such fabrics have them: what was posted goes on until its
// handle has been released, whatever became of the caller. Whoever posts keeps
// the memory until then (ADR 0007).
package rma

import "context"

// DescriptionMax bounds what a peer is sent to connect with, in bytes.
const DescriptionMax = 16 << 10

// Fabric is a node's end of one fabric. Its methods, and those of what it gives
// out, may be called from many goroutines, but for Handle's.
type Fabric interface {
	// Name is that of the fabric and its wire, such as "ucx": two nodes use it if
	// both have one of the same name. At most 64 bytes.
	Name() string

	// Register lets peers read mem, which stays as it is until Release of the
	// region has succeeded. It is called once, before Connect.
	Register(mem []byte) (Region, error)

	// Connect reaches the memory that a peer has registered; description comes
	// from that peer and is checked as anything from outside is. It does not wait
	// for the network: what cannot be reached shows when something is posted.
	Connect(description []byte) (Peer, error)

	// Close ends everything. It is called when all peers are closed, all handles
	// and the region released, and waits for the fabric's own goroutines.
	Close() error
}

// Region is memory that peers may read.
type Region interface {
	Description() []byte // at most DescriptionMax bytes
	// Release ends it. After an error everything is as before, and it may be
	// called again.
	Release() error
}

// Peer is another node's memory.
type Peer interface {
	// Post starts a get of len(dst) bytes, from off bytes after the begin of the
	// peer's region, into dst. On an error nothing was started and nothing is
	// owned; otherwise dst belongs to the transfer until Release of the handle
	// has succeeded. It does not wait for the network.
	Post(dst []byte, off uint64) (Handle, error)

	// Close ends the connection. Gets that are under way are soon over, failed
	// or not, whatever the peer does; their handles are still to be released.
	// Post fails from then on. It may be called again.
	Close() error
}

// Handle is one get that was posted. Its methods are called from one goroutine,
// in the order Poll…, Release….
type Handle interface {
	// Poll waits until the get is over or ctx has ended, and says whether it is
	// over and why it failed, if it did. That ctx has ended is no error. One with
	// done false says that the state could not be learned: the get counts as
	// failed, and may still be under way. Once done, always done.
	Poll(ctx context.Context) (done bool, err error)

	// Release gives back what the get holds. After nil nothing writes dst any
	// more. After an error, as of a get that is still under way, everything is as
	// before, and Release is called again. It does not wait for the network.
	Release() error
}
