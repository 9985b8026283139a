package peer

import "github.com/terrace-kv/terrace/block"

// Version of the protocol. A node that hears another one refuses it and says
// which it speaks.
const Version = 1

// Limits that both sides keep to. Who goes beyond them loses the session.
const (
	KeysMax       = 4096 // keys of one lookup or fetch
	IDBytesMax    = 256  // a KV request id
	NameBytesMax  = 256  // a node id, a boot id, an address
	SpecsMax      = 64   // namespaces of one node that a peer is told of
	SpecBytesMax  = 64 << 10
	ControlMax    = 8 << 20 // bytes of a control frame
	TextBytesMax  = 1024
	RoundsMax     = 1024    // serves that one session may have open
	RoundKeysMax  = 1 << 19 // keys of all of them, 150 bytes each
	DataConnsMax  = 16
	tokenBytes    = 16
	dataHeadBytes = 64
)

// Code says why something was refused or failed. The values are part of the
// protocol.
type Code uint8

const (
	CodeOK          Code = 0
	CodeAbsent      Code = 1  // the producer does not have the block
	CodeEnded       Code = 2  // the hand-over has been fetched, has expired, or was given up
	CodeNamespace   Code = 3  // the producer knows no such namespace, or the session has not shown it
	CodeNoRoom      Code = 4  // found below, and no room to read it into
	CodeQuota       Code = 5  // more than one peer may have pinned
	CodeBusy        Code = 6  // too many rounds, or too many parked
	CodeDraining    Code = 7  // the producer is stopping
	CodeTimeout     Code = 8  // the bound of the round has passed
	CodeFailed      Code = 9  // reading it from below, or sending it, failed
	_               Code = 10 // reserved: nobody has ever sent it
	CodeProtocol    Code = 11 // the other side broke the protocol
	CodeVersion     Code = 12 // no common version
	CodeDuplicate   Code = 13 // the other connection of these two nodes stays
	CodeSelf        Code = 14 // a node has dialed itself
	CodeIdle        Code = 15 // nothing was said for too long
	CodeUnreachable Code = 16 // never sent: the peer is down
	codeEnd         Code = 17
)

// Message is a control frame.
type Message interface{ message() }

// Hello begins a connection, from the side that dialed. Welcome answers it, or a
// Bye does.
type Hello struct {
	Version   uint32
	Node      string           // who this is, for ever
	Boot      string           // which run of it
	Advertise string           // where it can be dialed
	Token     [tokenBytes]byte // of the session: data connections show it
	Window    uint32           // data connections that will follow
}

// Welcome is Hello from the side that was dialed.
type Welcome struct {
	Version    uint32
	Node, Boot string
	Advertise  string
}

// Namespaces replaces the list of namespaces whose blocks a node may ask for and
// be asked for: their descriptions, as block.Namespace.JSON has them.
type Namespaces struct{ Specs [][]byte }

// Lookup asks which of the keys the producer has, in its primary or below.
type Lookup struct {
	ID     string // KV request id
	Nonce  uint64 // of the attempt
	Round  uint32
	NS     block.Fingerprint
	WaitMS uint32
	Keys   []block.Key
}

// Answer answers a Lookup. What it says is there stays so until the Fetch of the
// round, or a bound of the producer's.
type Answer struct {
	Nonce uint64
	Round uint32
	Code  Code   // CodeOK, or why nothing is known
	Found []byte // one bit a key, the first the lowest of the first byte
}

// Fetch asks for blocks and closes the round of a Lookup that had its number.
// Each key is answered, by a data frame or in a Failed.
type Fetch struct {
	ID     string
	Nonce  uint64
	Round  uint32
	NS     block.Fingerprint
	Await  bool   // what is not there yet is to be sent when it is
	WaitMS uint32 // the bound of all answers
	Keys   []block.Key
}

// Failed settles keys of a Fetch: Indexes of them, or all that are open if there
// are none.
type Failed struct {
	Nonce   uint64
	Round   uint32
	Code    Code
	Indexes []uint32
}

// Abort ends a round. AbortAck says that nothing of it will be sent any more.
type (
	Abort struct {
		Nonce uint64
		Round uint32
	}
	AbortAck struct {
		Nonce uint64
		Round uint32
	}
)

// Finished says that an attempt needs nothing more: all of its rounds are over.
// Complete says that it has had all blocks it came for, so that the producer may
// give up what it kept for it.
type Finished struct {
	ID       string
	Nonce    uint64
	NS       block.Fingerprint
	Complete bool
}

// Ping and Pong show that a node lives.
type (
	Ping struct{ N uint64 }
	Pong struct{ N uint64 }
)

// Bye ends a session. Nothing follows it.
type Bye struct {
	Code Code
	Text string
}

func (*Hello) message()      {}
func (*Welcome) message()    {}
func (*Namespaces) message() {}
func (*Lookup) message()     {}
func (*Answer) message()     {}
func (*Fetch) message()      {}
func (*Failed) message()     {}
func (*Abort) message()      {}
func (*AbortAck) message()   {}
func (*Finished) message()   {}
func (*Ping) message()       {}
func (*Pong) message()       {}
func (*Bye) message()        {}

// DataHead stands before each block on a data connection, or says something of
// one that goes another way.
//
//	offset size
//	     0    4  magic "TRPD"
//	     4    4  kind
//	     8    8  nonce
//	    16    4  round
//	    20    4  index of the key in its Fetch
//	    24    8  length of the block in bytes, or of the description that follows
//	    32    8  CRC64-NVME of the block or description
//	    40    8  where the block lies, or what became of it; else 0
//	    48    8  0
//	    56    8  CRC64-NVME of bytes 0 to 55
//
// All numbers are big-endian.
type DataHead struct {
	Kind   DataKind
	Nonce  uint64
	Round  uint32
	Index  uint32
	Length uint64
	Sum    uint64
	At     uint64 // of an offer, in the region described; of a taken, an outcome
}

// DataKind says what a DataHead is. The values are part of the protocol.
type DataKind uint32

const (
	DataBytes       DataKind = 0 // the block follows
	DataOffer       DataKind = 1 // nothing follows: the block lies at At, to be got by the fabric
	DataTaken       DataKind = 2 // the consumer's answer to an offer, with its nonce, round, index and length
	DataDescription DataKind = 3 // a fabric's name and description follow: the first head of a side that has one
	dataKindEnd     DataKind = 4
)

// What became of an offer. The values are part of the protocol.
const (
	takenArrived  = 0 // it was got
	takenUnwanted = 1 // nobody waits for it, or any more
	takenCannot   = 2 // it cannot be got: send its bytes, and offer no more
	takenEnd      = 3
)
