// Package client is what an engine links to use a node: a session with it,
// requests, and the blocks in shared memory.
//
//	c, err := client.Dial(ctx, client.Options{Spec: spec})
//	r, err := c.NewRequest(ctx, "req-1", client.NoLimits())
//	a, err := r.Lookup(ctx, keys, client.LookupOptions{Wait: time.Second})
//	// a.Tokens tokens need not be computed: load their blocks …
//	lease, ok := a.Lease(group, i)
//	err = c.ReadInto(lease, dst)
//	// … compute the rest, store it, and say that the request is over.
//	res, err := r.Store(ctx, group, first, newKeys, fill)
//	err = r.Finish(ctx)
//
// # Memory
//
// Blocks lie in memory that the node and other engines share. The bytes that a
// function given to View or Write gets are valid until it returns and no
// longer: afterwards the memory may be another block's, or gone. A lease keeps
// a block in place until Unpin, Finish or the end of the session. Who writes outside
// what Reserve has granted destroys other engines' blocks; the client checks
// each place against the region, but cannot check what is done in it.
//
// # Sessions end
//
// When the node goes away, all calls fail at once with ErrSessionLost, and all
// leases, grants and requests are void: they carry the session's epoch and are
// refused with ErrStale in another. The client waits until no View or Write
// runs any more, unmaps the region, and connects again, with growing pauses,
// until Close. Options.OnState tells. Blocks that were stored are found again
// by Lookup.
//
// # Processes
//
// The engine's scheduler has the Client. Its workers, in other processes, reach the blocks with
// AttachWorker and the client's Token, or map a descriptor that they have
// inherited with MapInherited. Leases and Grants are plain values: send them
// over in any encoding.
//
// # Goroutines and bounds
//
// A Client has two goroutines: one reads replies, one waits for the session's end and connects
// anew. A Worker has one. Close waits for them. A call is written by the
// goroutine that makes it; calls of many goroutines are answered in any order. A call
// without deadline gets Options.CallTimeout. When a Reserve is given up, a goroutine,
// one of at most 64, waits for its answer and aborts it.
package client
