package core

import (
	"fmt"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
)

// Time is a point in time in nanoseconds. The core only compares and adds; the
// node gives it a monotonic clock, a simulator whatever it likes.
type Time int64

// Identifiers. None is ever used again within one core, but for Slot, whose
// reuse its generation counts. Zero is none of them.
type (
	SessionID   uint64
	JobID       uint64
	WaitID      uint64
	NamespaceID uint32
)

// PageSize is the unit of Slot, in bytes.
const PageSize = tier.Align

// Slot is a block-sized place in the primary, named by the page at which it
// starts, so that Offset needs no table.
type Slot uint32

// Offset is where the slot starts in the region, in bytes.
func (s Slot) Offset() int64 { return int64(s) * PageSize }

// Verdict is the answer to a lookup for one key. Values of MissAbsent and
// above are all a Miss; which one says why. The values are part of the engine
// protocol.
type Verdict uint8

const (
	VerdictNone Verdict = 0 // not judged: beyond what the call could use
	Hit         Verdict = 1 // committed in the primary now, and pinned unless the call was a peek
	HitPending  Verdict = 2 // found, not yet readable
	Retry       Verdict = 3 // not yet known

	MissAbsent      Verdict = 16 // no tier has it
	MissFiltered    Verdict = 17 // only tiers that the request may not load from have it
	MissFailed      Verdict = 18 // a load of it has failed; it is probed afresh later
	MissWaited      Verdict = 19 // found or not yet known, but the wait for it is over
	MissNoRoom      Verdict = 20 // found below, but the primary has no room to promote it
	MissUnavailable Verdict = 21 // a tier that may have it is down or saturated
	MissCapped      Verdict = 22 // beyond max_load_tokens
	MissUnusable    Verdict = 23 // behind a Miss, so no prefix can use it
	MissDraining    Verdict = 24 // the node is draining or resetting and starts nothing
	verdictEnd      Verdict = 25
)

// Miss says whether the verdict is a Miss, whatever its reason.
func (v Verdict) Miss() bool { return v >= MissAbsent }

var verdictNames = map[Verdict]string{
	VerdictNone: "none", Hit: "hit", HitPending: "hit_pending", Retry: "retry",
	MissAbsent: "miss_absent", MissFiltered: "miss_filtered", MissFailed: "miss_failed", MissWaited: "miss_waited",
	MissNoRoom: "miss_no_room", MissUnavailable: "miss_unavailable", MissCapped: "miss_capped",
	MissUnusable: "miss_unusable", MissDraining: "miss_draining",
}

func (v Verdict) String() string {
	if s, ok := verdictNames[v]; ok {
		return s
	}
	return fmt.Sprintf("verdict_%d", uint8(v))
}

// Verdicts lists every verdict but VerdictNone, for counters created at zero.
func Verdicts() []Verdict {
	out := []Verdict{Hit, HitPending, Retry}
	for v := MissAbsent; v < verdictEnd; v++ {
		out = append(out, v)
	}
	return out
}

// Lease names a pinned, committed block: where it is, and that it is still the
// same one. A zero Lease is none. Sum is the block's CRC64-NVME.
type Lease struct {
	Slot Slot
	Gen  uint32
	Sum  uint64
}

// GrantStatus is the answer to a reserve for one key. The values are part of
// the engine protocol.
type GrantStatus uint8

const (
	Granted      GrantStatus = 1 // write into the slot, then commit or abort
	GrantPresent GrantStatus = 2 // committed already: nothing to do
	GrantFilling GrantStatus = 3 // somebody else is filling it: nothing to do
	GrantCapped  GrantStatus = 4 // beyond max_offload_tokens: not stored
)

// Grant is the outcome of a reserve for one key. Slot and Gen are set when
// Status is Granted; the session then owns the slot until commit or abort.
type Grant struct {
	Status GrantStatus
	Slot   Slot
	Gen    uint32
}

// Fill names a granted slot in a commit or abort.
type Fill struct {
	Slot   Slot
	Gen    uint32
	Sum    uint64 // CRC64-NVME of the block, when HasSum
	HasSum bool   // without it the node computes the sum, and the block is HitPending until then
}

// FillStatus is the answer to a commit, abort or unpin for one item. The values
// are part of the engine protocol.
type FillStatus uint8

const (
	FillOK      FillStatus = 1 // done
	FillStale   FillStatus = 2 // no such reservation or pin of this request: nothing changed
	FillDropped FillStatus = 3 // the reservation had expired or was reset: the slot was given back, nothing is visible
)

// TierFilter is one entry of kv_load_tiers or kv_store_tiers. An empty field
// matches everything.
type TierFilter struct {
	Medium   string
	Locality string
}

// Params are the parameters of a request. Start from NoLimits: in the zero
// value both caps are 0, so nothing is loaded or stored.
type Params struct {
	LoadTiers  []TierFilter // nil: all secondaries; empty but not nil: none
	StoreTiers []TierFilter

	// MaxLoadTokens and MaxOffloadTokens cap the prefix that is loaded and
	// stored, in tokens. Negative means no cap; 0 turns loading or storing off.
	MaxLoadTokens    int64
	MaxOffloadTokens int64

	// RemoteDecoder keeps all blocks of the request, hits included, pinned
	// after its finish, until UnboundStoreTimeout has passed.
	RemoteDecoder bool

	// KVRequestID is the name, between nodes, of the hand-over that RemoteDecoder
	// prepares. Without one nobody can fetch it.
	KVRequestID string

	// Peer says that the request may load from the bound tier, and what it may
	// take for granted there. NoPeers forbids it, for requests that serve a peer:
	// so that requests do not go round in circles. Their lookups are in no counter.
	Peer    PeerRole
	NoPeers bool

	// PeerHost and PeerPort say where that node is, and PeerRequestID what it
	// knows the request by. The core passes over them.
	PeerHost      string
	PeerPort      int
	PeerRequestID string
}

// PeerRole is what a request wants of the node that it is bound to.
type PeerRole uint8

const (
	PeerNone   PeerRole = iota // nothing: it is bound to none
	PeerProbe                  // ask what it has, then load that (remote_kv_source)
	PeerAssume                 // it has every block, or will have (remote_prefiller)
)

// NoLimits are the parameters of an ordinary request.
func NoLimits() Params { return Params{MaxLoadTokens: -1, MaxOffloadTokens: -1} }

// LookupOptions say how a lookup behaves.
type LookupOptions struct {
	// Peek answers from what is known now: it pins nothing and starts nothing.
	Peek bool
	// WaitUntil, if later than now, holds the answer back until the verdicts
	// are final or this time has come.
	WaitUntil Time
	// Each judges every key by itself, not as part of a prefix: lists may be
	// empty, all that is found is pinned and promoted, and Tokens is 0. It is for
	// serving others, who know which blocks they want.
	Each bool
}

// GroupAnswer is a lookup's answer for one KV group.
type GroupAnswer struct {
	Verdicts []Verdict // one a key
	First    int       // the run that Answer.Tokens needs starts at this key (with Each, the first key),
	Leases   []Lease   // and has len(Leases) keys; a lease is zero while its key is not a Hit, and in a peek
}

// Answer is the outcome of a lookup. Its slices are the caller's to reuse.
type Answer struct {
	// Tokens is the length of the prefix that all groups can serve. It counts
	// pending blocks; when Final it counts readable ones only.
	Tokens int64
	Final  bool // nothing in the run is HitPending or Retry
	// Void: the wait was overtaken by another lookup of the request, by its
	// finish or by the end of the session. Nothing else is set.
	Void   bool
	Groups []GroupAnswer

	each bool
}

// Flushed is the outcome of waiting for a request's stores.
type Flushed struct {
	Done     bool // nothing is pending any more; false: the deadline came first
	Cascaded int  // blocks written, once for each tier
	Failed   int  // writes that failed, were cancelled or dropped
}

// Outcome is how one key of a job ended.
type Outcome uint8

const (
	Done Outcome = iota
	Failed
	Cancelled
)

func (o Outcome) String() string { return [...]string{"done", "failed", "cancelled"}[o] }

// JobKind tells reads from writes and probes.
type JobKind uint8

const (
	Promotion JobKind = iota // secondary to primary
	Cascade                  // primary to secondary
	ProbeJob                 // does the tier have these keys
)

func (k JobKind) String() string { return [...]string{"promotion", "cascade", "probe"}[k] }

// Effect is something the core wants done. The node performs effects in the
// order given, before it lets another call into the core.
type Effect interface{ effect() }

// StartJob asks for a transfer of Blocks, or for a probe.
type StartJob struct {
	ID       JobID
	Kind     JobKind
	Tier     int
	NS       NamespaceID
	Blocks   []JobBlock
	Deadline Time
	Source   uint64 // of the bound tier: RequestSeq of the request whose source to use
}

// JobBlock is one block of a job. Slot is meaningless in a probe.
type JobBlock struct {
	Key  block.Key
	Slot Slot
	Sum  uint64 // given for a cascade
}

// CancelJob asks that a job end soon. Its keys' outcomes are settled already;
// what still comes is the news that its buffers are quiet.
type CancelJob struct {
	ID   JobID
	Tier int
}

// ComputeSum asks for the checksum of a committed block; SumDone answers.
type ComputeSum struct {
	NS   NamespaceID
	Key  block.Key
	Slot Slot
	Gen  uint32
}

// AnswerLookup ends a waiting lookup.
type AnswerLookup struct {
	Wait   WaitID
	Answer *Answer
}

// AnswerFlush ends a wait for a request's stores.
type AnswerFlush struct {
	Wait    WaitID
	Flushed Flushed
}

// AnswerReset ends a reset.
type AnswerReset struct {
	Wait WaitID
	Done bool // false: the deadline came first; the primary is empty all the same
}

// RequestFinished tells tiers that no more work of the request will come.
type RequestFinished struct {
	Session SessionID
	Request string
}

// CloseSource tells the bound tier that a request needs its source no longer. The
// jobs that used it have been cancelled; no other will come.
type CloseSource struct {
	Tier int
	Seq  uint64
}

// Supply tells how a hand-over stands. For each Seq come SupplyOpen, then
// SupplyMore any number of times, then SupplyFinal, then SupplyEnded, once each.
type Supply struct {
	NS    NamespaceID
	ID    string // KVRequestID
	Seq   uint64 // of the request, for ReleaseHandover
	State SupplyState
}

// SupplyState is a step in the life of a hand-over.
type SupplyState uint8

const (
	SupplyOpen  SupplyState = iota // the request has begun
	SupplyMore                     // blocks of it have become readable
	SupplyFinal                    // no more will: it is finished, or its engine is gone
	SupplyEnded                    // its blocks are kept no longer: fetched, expired, or there were none
)

func (s SupplyState) String() string { return [...]string{"open", "more", "final", "ended"}[s] }

// ReleasedSlots tells of slots that have become free, for poisoning in builds
// with invariants. It is emitted only when Options.ReportReleases is set.
type ReleasedSlots struct{ Slots []Slot }

func (StartJob) effect()        {}
func (CancelJob) effect()       {}
func (ComputeSum) effect()      {}
func (AnswerLookup) effect()    {}
func (AnswerFlush) effect()     {}
func (AnswerReset) effect()     {}
func (RequestFinished) effect() {}
func (CloseSource) effect()     {}
func (Supply) effect()          {}
func (ReleasedSlots) effect()   {}
