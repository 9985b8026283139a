// Package ucx moves memory between nodes over UCX: RDMA where there is such
// hardware, else TCP and shared memory. It is built with -tags ucx and cgo, needs
// libucx-dev, and links libucp; other builds have an Open that says so.
//
// A get is an active message that asks for it, and one with the bytes, which UCX
// moves as it can: from about 8 KiB on by a rendezvous, in which the asking node
// reads by RDMA. It is not UCX's own get: over TCP that is emulated, a node may so
// read and write all memory of another, and a reader that dies in mid-load ends
// the process that it reads from, of all versions (an answer that fails goes back
// into a queue that must be empty: openucx/ucx, uct_pending_queue_dispatch and
// ucp_progress_get_reply). Here a node answers for its region only, and its
// worker's goroutine must run for that.
//
// It is for networks in which every host is trusted. UCX does not check who
// connects, and messages that were made to harm can end the process. What is
// moved is neither encrypted nor authenticated, whatever TLS there is between the
// nodes' sessions. UCX before 1.14, as in Debian 12, aborts if a peer dies within
// the milliseconds of its first contact (openucx/ucx pull request 8175); its workers
// are left to the end of the process.
package ucx

// Name is that of the fabric.
const Name = "ucx"

// Options of Open.
type Options struct {
	// Transports are the names of UCX's transports to choose from, as in UCX_TLS:
	// "tcp,sm". Empty leaves the choice to UCX, which looks at UCX_TLS and its
	// other variables. One for messages that tells of dead peers must be among
	// them: tcp, or one of RDMA; not sm alone.
	Transports string
}
