// Package arena is the memory of the primary tier: one shared region that the
// node and its engines map, and the locks that tell who may still write to it.
//
// It owns bytes and session locks, and decides nothing. Which place is free,
// who reserved it and how often it was reused is the core's business, which
// names a place by byte offset and length.
//
// # The region
//
// The region is a memfd, so no name in a file system can outlive the node. It
// is sealed against shrinking and growing, so no holder of the descriptor can
// make another's access fault, and its size never changes. Pages are taken on
// first use, or before it by Populate; they are charged to the cgroup of the
// process that touches them first, which is a reason to populate.
//
// A view given out by Bytes or Block is plain memory with an exact capacity.
// It dies with the arena: Close must not be called while any view is in use.
//
// # Who may still write
//
// Each attach of an engine process gets a Lease: an open file description of
// the region that nobody else has, with an OFD lock on one byte offset that
// nobody else has. The kernel drops an OFD lock when the last reference to its
// description is gone, and both a descriptor and a mapping are references, also
// those that a fork has copied. So after the node has closed its own copy
// (HandOver), the lock is held exactly as long as some process can still write
// through this attach, whatever became of the process that asked for it. A
// descriptor that is still under way in a socket counts too.
//
// What this does not see: a process that opens the descriptor anew through
// /proc gets a description without a lock (the region's mode allows it to the
// node's own user only). Devices that were given the pages, by GPU or RDMA
// registrations or io_uring buffers, hold no reference either; the kernel stops
// them while the process exits. An engine is trusted with both, as it is
// trusted not to write outside its reservations.
//
// # Goroutines and bounds
//
// The package starts no goroutine. Populate runs on its caller's, which has to
// end it before Close. There are at most LeasesMax leases at a time. No call
// waits for another process; Populate takes the time of one step between
// looks at its context.
package arena
