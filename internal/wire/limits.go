package wire

import "github.com/terrace-kv/terrace/block"

// Magic opens a hello and an attach.
const Magic = "TERRACE"

// Protocol versions that this code speaks.
const (
	VersionMin = 1
	VersionMax = 1
)

// Limits of the protocol. What goes beyond is refused before anything is
// allocated for it.
const (
	FrameMax       = 8 << 20   // bytes of a frame after its length field
	GreetFrameMax  = 64 << 10  // the same, for hello, attach and their replies
	LookupKeysMax  = 128 << 10 // keys of a lookup, over all groups; also of a pin, unpin or touch
	ReserveKeysMax = 256       // keys of a reserve
	FillsMax       = 4096      // fills of a commit or abort
	RequestIDMax   = 256       // bytes of a request id, which has one at least
	KVRequestIDMax = 256       // bytes of what a hand-over is called between nodes
	PeerHostMax    = 253       // bytes of a name or address of a node
	NameMax        = 256       // bytes of an engine's, namespace's or node's name, an epoch, a version
	SpecStringMax  = 4096      // bytes of a string of the namespace
	FiltersMax     = 64        // entries of a tier filter
	FilterMax      = 64        // bytes of a medium or locality
	WaitMSMax      = 600_000   // milliseconds that a call may wait: ten minutes
	ErrorTextMax   = 4096      // bytes of an error's message; more is cut
)

// Sizes of records, in bytes.
const (
	TokenSize    = 16 // of an attach token
	leaseSize    = 24 // slot u32, gen u32, offset u64, sum u64
	grantSize    = 17 // status u8, slot u32, gen u32, offset u64
	fillSize     = 17 // slot u32, gen u32, has_sum u8, sum u64
	refSize      = 8  // slot u32, gen u32
	groupSize    = 17 // kind u8, tokens_per_block u32, window_blocks u32, block_bytes u64
	ranksSize    = 16 // tensor, pipeline, context parallel and rank, u32 each
	geometrySize = 16 // stride u64, block_bytes u64
	judgedSize   = 12 // keys u32, first u32, leases u32
)

// The largest reply, to a lookup of hits only, and the largest call fit.
const (
	_ uint = FrameMax - LookupKeysMax*(leaseSize+1) - block.GroupsMax*judgedSize - 64
	_ uint = FrameMax - LookupKeysMax*block.KeySize - block.GroupsMax*4 - RequestIDMax - 64
	_ uint = GreetFrameMax - 8*SpecStringMax - block.GroupsMax*groupSize - 1024
)
