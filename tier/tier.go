package tier

import (
	"context"

	"github.com/terrace-kv/terrace/block"
)

// Align is the alignment of slots in the primary, in bytes. Buffers given to a
// tier start on it, and their padding reaches to the next multiple of it, so
// that a tier may use direct I/O.
const Align = 4096

// Tier is where blocks live below the primary.
//
// Calls come from internal/transfer only, from many goroutines at once, and
// block until they are over: when Read or Write returns, no I/O of that call
// can touch the buffers any more, whatever the outcome and also when ctx has
// ended. The memory safety of the whole node rests on this.
//
// A context that ends asks a call to end soon; the call still returns only
// when its buffers are quiet. Calls are refused with ErrClosed after Close.
type Tier interface {
	// Info tells facts that never change after Open.
	Info() Info

	// Contains sets found[i] for each keys[i] that a Read would now serve.
	// len(found) is len(keys). On an error the content of found is undefined.
	Contains(ctx context.Context, ns *block.Namespace, keys []block.Key, found []bool) error

	// Read fills each item's Buf and Sum, or sets its Err: ErrNotFound, or an
	// *Error. A read is never partial: with Err set, Buf holds garbage. The
	// tier checks its own header (length, key, namespace); comparing Sum with
	// the bytes is the caller's part.
	Read(ctx context.Context, ns *block.Namespace, items []Item)

	// Write stores each item's Buf under its Key with its Sum, or sets its
	// Err. Writing a key that is there already is a success and may keep the
	// old copy. A failed write leaves nothing visible.
	Write(ctx context.Context, ns *block.Namespace, items []Item)

	// Delete forgets keys. A key that is not there is no error.
	Delete(ctx context.Context, ns *block.Namespace, keys []block.Key) error

	// Close waits, bounded by ctx, for calls under way and gives everything
	// back. It is called once.
	Close(ctx context.Context) error
}

// Item is one block of a Read or Write.
type Item struct {
	Key block.Key

	// Buf is the block: len(Buf) is its exact length (the namespace's
	// block_bytes for the key's group). It starts on a multiple of Align, and
	// cap(Buf) is at least len rounded up to Align. The bytes between are
	// padding: zero before a Write, and a Read leaves them zero.
	// The tier may use Buf only until the call returns.
	Buf []byte

	// Sum is the CRC64-NVME of Buf. Given to Write, set by Read.
	Sum uint64

	// Err is the item's outcome: nil when done.
	Err error
}

// Info is what a tier says of itself.
type Info struct {
	Name     string // unique within a node, such as "fs"
	Type     string // the kind of tier, such as "fs"
	Medium   string // MediumCPU or MediumStorage, for per-request filters
	Locality string // LocalityLocal or LocalityRemote, for per-request filters

	// How a lane should drive it. 0 means the lane's default.
	ReadParallel  int // concurrent Read calls
	WriteParallel int // concurrent Write calls
	BatchItems    int // items per call at most

	// Authoritative says that Known never answers Unknown for long, so that
	// no probe is needed for what it does not know.
	Authoritative bool
}

// Media and localities as engines name them (vLLM's kv_load_tiers).
const (
	MediumCPU      = "cpu"
	MediumStorage  = "storage"
	LocalityLocal  = "local"
	LocalityRemote = "remote"
)

// Presence is what a tier knows of a key without any I/O.
type Presence uint8

const (
	Unknown Presence = iota // a Contains call would tell
	Present                 // a Read is expected to succeed
	Absent                  // a Read would answer ErrNotFound
)

// Knower is implemented by a tier that keeps an index in memory. Known is
// called under the core's lock, on every lookup: it does no I/O, never waits
// for any, and takes well under a microsecond a key. len(out) is len(keys).
type Knower interface {
	Known(ns *block.Namespace, keys []block.Key, out []Presence)
}

// Toucher is implemented by a tier that evicts by recency. Touch tells that
// the keys were used though they were served from above, in the order of use.
// It does no I/O and never waits.
type Toucher interface {
	Touch(ns *block.Namespace, keys []block.Key)
}

// NamespaceOpener is implemented by a tier that keeps namespaces in clear. It
// is called before the first use of a namespace, may do I/O, and is repeated
// by each session that greets with it. It compares with what is stored and
// need not store anything: the first write does. An error that matches
// ErrNamespaceMismatch names the differing field.
type NamespaceOpener interface {
	OpenNamespace(ctx context.Context, ns *block.Namespace) error
}

// NameKeeper is implemented by a tier that remembers what operators call
// namespaces, so that a name stands for the same namespace after a restart.
type NameKeeper interface {
	// Names tells which names the tier keeps, each with its namespace, as far
	// as that can be read. It does no I/O once the tier is open. The map is the
	// caller's; no namespace in it is nil.
	Names(ctx context.Context) (map[string]*block.Namespace, error)

	// KeepName remembers a name of 1 to NameBytesMax bytes, any bytes. A
	// namespace has one name: the last one counts. A name that is kept for
	// another namespace is refused with an error that matches
	// ErrNamespaceMismatch and says how to give it free. It does I/O when the
	// name is new, and may be called for each session that greets.
	KeepName(ctx context.Context, name string, ns *block.Namespace) error
}

// NameBytesMax is the length of a namespace's name at most, in bytes.
const NameBytesMax = 256

// SetAsider is implemented by a tier that can keep a corrupt copy for
// inspection. After SetAside the key is absent, whatever the error; only a tier
// whose bytes come over a network may look again first, and keep a copy that
// proves right in its place.
type SetAsider interface {
	SetAside(ctx context.Context, ns *block.Namespace, key block.Key, why string) error
}

// Statser is implemented by a tier that can tell its size. It does no I/O.
type Statser interface {
	Stats() Stats
}

// Stats is a tier's own account of itself.
type Stats struct {
	Mode          string // how it works, in a few words, such as "O_DIRECT, O_TMPFILE"
	Where         string // path or address, for an operator
	Blocks        int64  // blocks it would serve
	UsedBytes     int64  // as the medium counts it
	CapacityBytes int64  // 0 means unbounded
	Evicted       int64  // blocks evicted since the start
	SetAside      int64  // corrupt copies set aside since the start
	ScanDone      bool   // the index is complete
	ScanBlocks    int64  // blocks found by the scan so far
	ScanError     string // why the scan could not go on, if it could not
}
