package peer

import (
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
)

// Time is a point in time in nanoseconds, of a monotonic clock.
type Time int64

// Identifiers. ConnID names a control connection, and is its owner's to choose;
// JobID is the core's; ServeID is the machine's.
type (
	ConnID  uint64
	JobID   uint64
	ServeID uint64
)

// Role is what a source may take for granted.
type Role uint8

const (
	RoleProbe  Role = iota + 1 // remote_kv_source: ask, then fetch what is there
	RoleAssume                 // remote_prefiller: everything is there, or will be
)

// Source is one request's view of one producer.
type Source struct {
	Seq  uint64 // the request's, in the core
	Addr string // host:port
	ID   string // KV request id
	Role Role
	NS   block.Fingerprint
}

// Options of a Machine. Zero values get defaults.
type Options struct {
	Node      string // required: who this is
	Boot      string // required: which run of it
	Advertise string // where others dial it

	DataConns      int           // data connections of a session that this node dials; default 2
	ConnectTimeout time.Duration // from the need of a session to its Welcome; default 2 s
	LookupTimeout  time.Duration // of a Lookup, at the producer too; default 2 s
	AbortTimeout   time.Duration // from Abort to AbortAck; then the session is ended; default 5 s
	HitTimeout     time.Duration // from Answer to Fetch; then its pins are given back; default 10 s
	ParkTimeout    time.Duration // for a KV request id that nobody here has heard of; default 30 s
	IdleTimeout    time.Duration // a session without a round or a source is ended; default 5 min
	PingEvery      time.Duration // default 1 s
	PingMisses     int           // pings without any frame of the peer: it is dead; default 5
	DownBase       time.Duration // a peer that failed is not dialed for so long; default 250 ms, doubling
	DownMax        time.Duration // to this; default 30 s

	SessionsMax   int           // default 256
	ParkedMax     int           // fetches of one session that wait for an id nobody has heard of; default 256
	EndedMax      int           // ids whose supply has ended that are remembered; default 65536
	EndedFor      time.Duration // default 10 min
	QuotaBytes    int64         // that one peer's serves may pin; default 1 GiB
	LookupsPerSec int           // of one session; default 1000
}

// Namespace is one that this node's engines have opened.
type Namespace struct {
	NS   *block.Namespace
	Spec []byte
}

// Item is one block of a fetch: a slot of ours that is to hold it.
type Item struct {
	Key    block.Key
	Slot   uint64 // the caller's name for it
	Length int
}

// Result is one item's outcome, given when its slot is quiet.
type Result struct {
	Index int
	Sum   uint64 // when Code is CodeOK
	Code  Code
	Class tier.Class
	Cause tier.Cause
}

// Lease is a block that a serve may send: where it is, and its checksum.
type Lease struct {
	Slot   uint64
	Gen    uint32
	Sum    uint64
	Length int
}

// Found is what the core says of one key of a serve.
type Found struct {
	Lease Lease // set when Code is CodeOK
	Code  Code
}

// SupplyState is a step in the life of a supply: open, more, final, ended.
type SupplyState uint8

const (
	SupplyOpen SupplyState = iota
	SupplyMore
	SupplyFinal
	SupplyEnded
)

// Effect is something the machine wants done, in the order given.
type Effect interface{ effect() }

// Effects on connections.
type (
	// Dial asks for a control connection; Connected or DialFailed answers.
	Dial struct{ Addr string }
	// DialData asks for so many data connections of a session, which show Token.
	DialData struct {
		Conn  ConnID
		N     int
		Token [tokenBytes]byte
	}
	// Expect lets data connections that show Token join an accepted session.
	Expect struct {
		Conn  ConnID
		N     int
		Token [tokenBytes]byte
	}
	// Send sends a control frame.
	Send struct {
		Conn ConnID
		Msg  Message
	}
	// CloseConn ends a session's connections, after what was sent; Lost follows.
	CloseConn struct {
		Conn ConnID
		Code Code
		Text string
	}
)

// Effects of the consumer.
type (
	// Grant lets the payload of one data frame of a session go into a slot.
	Grant struct {
		Conn   ConnID
		Nonce  uint64
		Round  uint32
		Index  uint32
		Slot   uint64
		Length int
	}
	// Revoke takes grants back: Detached answers for each once nothing can write
	// its slot any more.
	Revoke struct {
		Conn    ConnID
		Nonce   uint64
		Round   uint32
		Indexes []uint32
	}
	// Report tells the core how items of a job came out. After Last the job is over.
	Report struct {
		Job     JobID
		Results []Result
		Last    bool
	}
	// ReportProbe answers a probe; with a Code that is not CodeOK it has failed.
	ReportProbe struct {
		Job   JobID
		Found []bool
		Code  Code
	}
)

// Effects of the producer.
type (
	// Serve asks the core for blocks: which it has, or gets from below, pinned.
	// Served answers, by Until at the latest, before the same ID is asked again.
	Serve struct {
		ID    ServeID
		NS    block.Fingerprint
		Keys  []block.Key
		Until Time
	}
	// Transmit sends blocks of a serve, in any order and as the session's turn
	// comes; Sent answers for each once its slot is not read any more.
	Transmit struct {
		Conn   ConnID
		ID     ServeID
		Blocks []DataBlock
	}
	// Unsend takes back what of a serve has not begun to be sent; Sent answers
	// for each all the same.
	Unsend struct {
		Conn ConnID
		ID   ServeID
	}
	// Release gives back one pin of a serve.
	Release struct {
		ID    ServeID
		Lease Lease
	}
	// ServeEnd gives back all pins of a serve. Nothing of it is being sent.
	ServeEnd struct{ ID ServeID }
	// ReleaseSupply gives up the hand-over of a request: it has been fetched.
	ReleaseSupply struct{ Seq uint64 }
)

// DataBlock is one block to be sent.
type DataBlock struct {
	Head  DataHead
	Lease Lease
}

// Note is for the log: what happened with which peer.
type Note struct {
	Peer string // node id and address, as far as known
	Bad  bool   // a violation or a death, not the ordinary course
	Text string
}

func (Dial) effect()          {}
func (DialData) effect()      {}
func (Expect) effect()        {}
func (Send) effect()          {}
func (CloseConn) effect()     {}
func (Grant) effect()         {}
func (Revoke) effect()        {}
func (Report) effect()        {}
func (ReportProbe) effect()   {}
func (Serve) effect()         {}
func (Transmit) effect()      {}
func (Unsend) effect()        {}
func (Release) effect()       {}
func (ServeEnd) effect()      {}
func (ReleaseSupply) effect() {}
func (Note) effect()          {}
