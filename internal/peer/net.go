package peer

import (
	"context"
	"crypto/tls"
	"time"
)

// Transport carries out the machine's effects on connections and memory. What
// comes of them a Sink is told.
//
// The consumer always pulls into its own slots, so a Grant is a transfer
// posted, Arrived or Detached its completion, and Revoke its release.
type Transport interface {
	// Do begins what an effect asks for and returns at once, without calling
	// the Sink. It is false for effects that are not a transport's: those of
	// the core, and Note. An effect on a connection that is no more is done: it
	// has been answered by Lost.
	Do(Effect) bool
	// Close ends all connections and waits for what runs, Lost of each
	// connection included, until ctx ends.
	Close(ctx context.Context) error
}

// Sink hears what happened, as Machine's events. It is called by many
// goroutines, never from inside Do, and with no lock held. Its calls for one
// connection may overlap each other, but Connected is over before the first and
// all others are over before Lost.
type Sink interface {
	// Connected tells of a control connection: one that Dial asked for, at the
	// address it gave, or one that was accepted, from addr. An accepted one has
	// sent its Hello, which is Received next.
	Connected(conn ConnID, addr string, dialed bool)
	// DialFailed answers a Dial.
	DialFailed(addr string, err error)
	// Received tells of a control frame, in the order in which they came. The
	// message is the sink's.
	Received(conn ConnID, msg Message)
	// Lost comes once for each Connected, after all else of the connection.
	// Nothing reads or writes a slot for this session any more: what of its
	// grants, revokes and transmits has not been answered is answered by this.
	Lost(conn ConnID, why error)
	// Arrived tells that a granted slot has its block, or, if ok is false,
	// something else: its bytes do not have the checksum that was sent with
	// them. sum is that of the bytes. The grant is used up; the slot is quiet.
	Arrived(conn ConnID, nonce uint64, round, index uint32, ok bool, sum uint64)
	// Detached answers each index of a Revoke, once: nothing can write the slot
	// any more. If the block arrived all the same, Arrived comes first.
	Detached(conn ConnID, nonce uint64, round, index uint32)
	// Sent answers each block of a Transmit, once: its slot is not read any
	// more. ok says that all of it was given to the connection; it is false for
	// what Unsend took back.
	Sent(serve ServeID, index uint32, ok bool)
}

// NetOptions of a Net. Zero values get defaults.
type NetOptions struct {
	Listen string      // host:port to accept on; empty for none
	TLS    *tls.Config // of both sides, as TLSFiles.Config makes it; nil for plain TCP

	// Memory is the memory of a slot, n bytes of it. For a Grant, n is the
	// length rounded up to pageBytes. It is called by many goroutines. Required.
	Memory func(slot uint64, n int) []byte

	// Refused is told of accepted connections that were refused before they
	// were part of a session, and of a listener in trouble (addr is its own).
	// It is called with no lock held. Optional.
	Refused func(addr string, err error)

	DialTimeout     time.Duration // of a connection, TLS included; default 2 s
	GreetTimeout    time.Duration // from accept to Hello or token, and from Expect to the last data connection; default 5 s
	ProgressTimeout time.Duration // a write, or a block half read, that does not get on for so long ends the session; default 30 s
	FlushTimeout    time.Duration // of control frames at the end of a session; default 1 s

	GreetingMax       int // accepted connections that have not shown what they are; default 256
	ControlQueueBytes int // of one session's frames to be sent; default 16 MiB
}

// TLSFiles name PEM files for mutual TLS 1.3 between nodes.
type TLSFiles struct {
	Cert, Key string // of this node
	CA        string // who signs the certificates of peers, and nobody else's
	// ServerName, if set, is the name that certificates of dialed peers must
	// have, in place of the host that was dialed.
	ServerName string
}

// NetStats counts what a Net has done and has. All but the first three only grow.
type NetStats struct {
	Sessions, Greeting, Goroutines int

	Refused              uint64 // connections
	BlocksIn, BytesIn    uint64 // that arrived in slots
	BlocksOut, BytesOut  uint64
	StrayIn, StrayBytes  uint64 // that nobody waited for, or any more
	BadSums              uint64
	Detaches, Violations uint64 // slots taken back in mid-payload; sessions ended for what the peer sent
}

// Net is the Transport over TCP: a session is one control connection and some
// data connections, all dialed by the same side. If one of them is lost, all
// are closed.
type Net struct{}

// OpenNet listens, if it is told to, and is ready. sink is called from then on.
func OpenNet(o NetOptions, sink Sink) (*Net, error) { panic("not yet") }

// Addr is where it listens, with the port that was chosen, or empty.
func (n *Net) Addr() string { panic("not yet") }

// Do carries out Dial, DialData, Expect, Send, CloseConn, Grant, Revoke,
// Transmit and Unsend. It may be called by anybody, under any lock of the
// caller's. Expect must be given before the Welcome is sent, since data
// connections come at once.
func (n *Net) Do(e Effect) bool { panic("not yet") }

// Stats may be called at any time.
func (n *Net) Stats() NetStats { panic("not yet") }

// Close stops accepting and dialing, ends all sessions and waits for all
// goroutines. The caller holds no lock that the sink takes. It may be called
// again.
func (n *Net) Close(ctx context.Context) error { panic("not yet") }

// Config reads the files. The config is for both sides.
func (f TLSFiles) Config() (*tls.Config, error) { panic("not yet") }

var _ Transport = (*Net)(nil)
