// Package node drives the core: it owns the core's lock, the clock, the arena,
// the lanes and the goroutines, and performs the core's effects.
//
// # Goroutines
//
// All are started by Open and waited for by Close:
//
//   - the ticker sleeps until the core's next deadline, or 5 s, and calls Tick;
//   - summers compute checksums of blocks that were committed without one;
//   - the reaper asks the locks of ended sessions until no process holds them;
//   - the toucher tells tiers which blocks were used from the primary;
//   - the peer-log, with peers, writes to the log what is to be told of them;
//   - the populator, if asked for, touches the region once.
//
// With peers, their transport has goroutines of its own (internal/peer), which
// call back into the node as lanes do, and which Close waits for before the
// region is unmapped.
//
// Lanes have goroutines of their own (internal/transfer), which call back into
// the node. Engines' calls run on the caller's goroutine.
//
// All but the last are loops that lifecycle.Watch watches: one that has ended or
// takes longer than 30 s for a turn makes the node not ready, and is named. A panic in
// the core or in the node ends the process, wherever it happens; one in a
// tier's code is an error of that call.
//
// # Locks
//
// One mutex guards the core, and the machine that speaks to peers. Effects are performed while it is held, so that
// they happen in the order in which the core decided them; performing one is an
// append to a bounded queue and never waits. Order: node.mu, then a lane's or
// the transport's, then a tier's index.
//
// # Bounds
//
// Jobs: the core's credit per tier. Checksums: one per filling slot. Touches: a
// channel of 256 batches; when it is full a batch is dropped, which makes a
// tier's idea of recency less exact and nothing else. Notes about peers: 256, and so
// many lines a while as somebody can read; others are counted. Namespaces: 4096.
package node
