package peer

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/terrace-kv/terrace/internal/lifecycle"
	"github.com/terrace-kv/terrace/internal/rma"
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
	// any more. If the block arrived all the same, Arrived comes first. An index
	// that is revoked again before it was answered is answered once.
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

	// Fabric, if set, moves blocks to and from peers that have one of the same
	// name. The Net closes it, also when OpenNet fails. Region is the memory of all
	// slots, and Offset where in it a slot begins.
	Fabric rma.Fabric
	Region []byte
	Offset func(slot uint64) uint64

	// Trouble is told, once a session, of what keeps blocks from the fabric. They
	// go over TCP then. It is called with no lock held. Optional.
	Trouble func(addr string, err error)

	// Refused is told of accepted connections that were refused before they
	// were part of a session, and of a listener in trouble (addr is its own).
	// It is called with no lock held. Optional.
	Refused func(addr string, err error)

	DialTimeout     time.Duration // of a connection, TLS included; default 2 s
	GreetTimeout    time.Duration // from accept to Hello or token, and from Expect to the last data connection; default 5 s
	ProgressTimeout time.Duration // a write, or a block half read, that does not get on for so long ends the session; default 30 s
	FlushTimeout    time.Duration // of control frames at the end of a session; a quarter of it to hear why the peer ended it; default 1 s

	GreetingMax       int // accepted connections that have not shown what they are, beyond which the oldest of the host with the most is closed; default 256
	SessionsMax       int // beyond which none is accepted, those that are being closed included; default 1024
	ControlQueueBytes int // of one session's frames to be sent; default 16 MiB
}

// NetStats counts what a Net has done and has. All but the ints only grow.
type NetStats struct {
	Sessions, Greeting, Goroutines int

	Refused              uint64 // connections
	BlocksIn, BytesIn    uint64 // that arrived in slots
	BlocksOut, BytesOut  uint64
	StrayIn, StrayBytes  uint64 // that nobody waited for, or any more
	BadSums              uint64
	Detaches, Violations uint64 // slots taken back in mid-payload; sessions ended for what the peer sent

	// Of blocks that went over a fabric, which are in the numbers above as well.
	Posted           int    // gets that are not released
	Gets, GetsFailed uint64 // blocks that were got; and that could not be, and were asked for over TCP
	Offers           uint64 // blocks that were offered
}

// Net is the Transport over TCP, and a fabric if there is one. A session is one control connection and some
// data connections, all dialed by the same side, and blocks go both ways on them.
// If one connection is lost, all are closed.
//
// Goroutines: one accepts; one greets each accepted connection, until it has
// shown what it is; one a dial. A session has its owner, which answers what is
// answered at once, ends the session and waits for the others: a reader and a
// writer of the control connection, a receiver and a sender of each data
// connection, and getters while blocks are on offer. Close waits for all of them.
//
// Bounds: GreetingMax and SessionsMax of accepted connections, ControlQueueBytes of frames to be
// sent, one frame of ControlMax while it is read, scratchBytes a data connection,
// gettersMax gets, and offersMax offers each way, of a session.
// Sessions, grants and blocks to be sent are as many as the machine wants.
type Net struct {
	o    NetOptions
	sink Sink
	ln   net.Listener // nil if it does not listen
	gate *lifecycle.Gate
	wg   sync.WaitGroup // only starts; the gate counts and waits, since it can stop waiting
	ctx  context.Context
	stop context.CancelFunc
	n    netCounters

	description []byte     // what data connections begin with; nil without a fabric
	closing     sync.Mutex // guards the following
	region      rma.Region // nil when released
	fabricOver  bool

	mu struct {
		sync.Mutex
		last     ConnID
		sessions map[ConnID]*tcpSession
		tokens   map[[tokenBytes]byte]*tcpSession // that were accepted
		greeting map[net.Conn]uint64              // in the order in which they came
		arrived  uint64
		closed   bool
	}
}

type netCounters struct {
	refused, blocksIn, bytesIn, blocksOut, bytesOut, strayIn, strayBytes, badSums, detaches, violations atomic.Uint64

	gets, getsFailed, offers atomic.Uint64
	posted                   atomic.Int64
}

// OpenNet listens, if it is told to, and is ready. sink is called from then on.
func OpenNet(o NetOptions, sink Sink) (_ *Net, err error) {
	o.DialTimeout = cmp.Or(o.DialTimeout, 2*time.Second)
	o.GreetTimeout = cmp.Or(o.GreetTimeout, 5*time.Second)
	o.ProgressTimeout = cmp.Or(o.ProgressTimeout, 30*time.Second)
	o.FlushTimeout = cmp.Or(o.FlushTimeout, time.Second)
	o.GreetingMax = cmp.Or(o.GreetingMax, 256)
	o.SessionsMax = cmp.Or(o.SessionsMax, 1024)
	o.ControlQueueBytes = cmp.Or(o.ControlQueueBytes, 16<<20)
	n := &Net{o: o, sink: sink, gate: lifecycle.NewGate()}
	n.ctx, n.stop = context.WithCancel(context.Background())
	n.mu.sessions, n.mu.tokens, n.mu.greeting = map[ConnID]*tcpSession{}, map[[tokenBytes]byte]*tcpSession{}, map[net.Conn]uint64{}
	_ = n.gate.Ready()
	if o.Fabric != nil {
		defer func() {
			if err != nil {
				n.stop()
				gone, cancel := context.WithCancel(context.Background())
				cancel()
				err = errors.Join(err, n.closeFabric(gone))
			}
		}()
		if err := n.register(); err != nil {
			return nil, err
		}
	}
	if o.Listen == "" {
		return n, nil
	}
	ln, err := net.Listen("tcp", o.Listen)
	if err != nil {
		n.stop()
		return nil, fmt.Errorf("listen for peers on %q: %w", o.Listen, err)
	}
	n.ln = ln
	n.start(&n.wg, n.accept)
	return n, nil
}

// Addr is where it listens, with the port that was chosen, or empty.
func (n *Net) Addr() string {
	if n.ln == nil {
		return ""
	}
	return n.ln.Addr().String()
}

// Do carries out Dial, DialData, Expect, Send, CloseConn, Grant, Revoke,
// Transmit and Unsend. It may be called by anybody, under any lock of the
// caller's.
func (n *Net) Do(e Effect) bool {
	switch e := e.(type) {
	case Dial:
		n.start(&n.wg, func() { n.dial(e.Addr) })
	case DialData:
		n.with(e.Conn, func(s *tcpSession) { s.dialData(e.N, e.Token) })
	case Expect:
		n.with(e.Conn, func(s *tcpSession) { s.expect(e.N) })
	case Send:
		n.with(e.Conn, func(s *tcpSession) { s.send(e.Msg) })
	case CloseConn:
		n.with(e.Conn, func(s *tcpSession) { s.end(errors.New("closed by this node: " + e.Text)) })
	case Grant:
		n.with(e.Conn, func(s *tcpSession) { s.grant(e) })
	case Revoke:
		n.with(e.Conn, func(s *tcpSession) { s.revoke(e) })
	case Transmit:
		n.with(e.Conn, func(s *tcpSession) { s.transmit(e) })
	case Unsend:
		n.with(e.Conn, func(s *tcpSession) { s.unsend(e.ID) })
	default:
		return false
	}
	return true
}

func (n *Net) with(conn ConnID, f func(*tcpSession)) {
	n.mu.Lock()
	s := n.mu.sessions[conn]
	n.mu.Unlock()
	if s != nil {
		f(s)
	}
}

// Stats may be called at any time.
func (n *Net) Stats() NetStats {
	n.mu.Lock()
	out := NetStats{Sessions: len(n.mu.sessions), Greeting: len(n.mu.greeting)}
	n.mu.Unlock()
	out.Goroutines = n.gate.Inside()
	c := &n.n
	out.Refused, out.BlocksIn, out.BytesIn = c.refused.Load(), c.blocksIn.Load(), c.bytesIn.Load()
	out.BlocksOut, out.BytesOut = c.blocksOut.Load(), c.bytesOut.Load()
	out.StrayIn, out.StrayBytes, out.BadSums = c.strayIn.Load(), c.strayBytes.Load(), c.badSums.Load()
	out.Detaches, out.Violations = c.detaches.Load(), c.violations.Load()
	out.Posted, out.Gets, out.GetsFailed, out.Offers = int(c.posted.Load()), c.gets.Load(), c.getsFailed.Load(), c.offers.Load()
	return out
}

var errNetClosed = errors.New("this node closes its connections")

// Close stops accepting and dialing, ends all sessions and waits for all
// goroutines. The caller holds no lock that the sink takes. It may be called
// again.
func (n *Net) Close(ctx context.Context) error {
	n.mu.Lock()
	n.mu.closed = true
	sessions := make([]*tcpSession, 0, len(n.mu.sessions))
	for _, s := range n.mu.sessions {
		sessions = append(sessions, s)
	}
	for c := range n.mu.greeting {
		_ = c.Close()
	}
	n.mu.Unlock()
	n.stop()
	if n.ln != nil {
		_ = n.ln.Close()
	}
	for _, s := range sessions {
		s.end(errNetClosed)
	}
	if err := n.gate.Drain(ctx); err != nil {
		if held := n.n.posted.Load(); held > 0 {
			err = fmt.Errorf("%w; %s has not released %d gets, whose slots it may still write", err, n.o.Fabric.Name(), held)
		}
		return fmt.Errorf("close connections to peers: %w", err)
	}
	n.gate.Close()
	return n.closeFabric(ctx)
}

// start runs f on a goroutine of wg, unless Close has begun.
func (n *Net) start(wg *sync.WaitGroup, f func()) bool {
	leave, err := n.gate.Enter()
	if err != nil {
		return false
	}
	wg.Go(func() {
		defer leave()
		f()
	})
	return true
}

func (n *Net) refuse(addr string, err error) {
	n.n.refused.Add(1)
	var bad *ProtocolError
	if errors.As(err, &bad) {
		n.n.violations.Add(1)
	}
	if n.o.Refused != nil {
		n.o.Refused(addr, err)
	}
}

// acceptPause is how long a listener in trouble (no descriptors, mostly) rests.
const acceptPause = 50 * time.Millisecond

func (n *Net) accept() {
	for {
		c, err := n.ln.Accept()
		if n.ctx.Err() != nil {
			if err == nil {
				_ = c.Close()
			}
			return
		}
		if err != nil {
			if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) {
				err = fmt.Errorf("%w; allow more (ulimit -n)", err)
			}
			n.refuse(n.Addr(), fmt.Errorf("accept: %w", err))
			select {
			case <-n.ctx.Done():
			case <-time.After(acceptPause):
			}
			continue
		}
		addr := c.RemoteAddr().String()
		n.mu.Lock()
		closed := n.mu.closed
		if !closed {
			if len(n.mu.greeting) >= n.o.GreetingMax {
				n.oustLocked()
			}
			n.mu.arrived++
			n.mu.greeting[c] = n.mu.arrived // Close closes it
		}
		n.mu.Unlock()
		if closed || !n.start(&n.wg, func() { n.greet(c, addr) }) {
			_ = c.Close()
			return
		}
	}
}

// oustLocked closes the oldest of the host that has the most connections which
// have not greeted: who holds many of them keeps nobody else out, and himself
// only those that are slower than he is.
func (n *Net) oustLocked() {
	host := func(c net.Conn) netip.Addr { return c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr() }
	count := map[netip.Addr]int{}
	for c := range n.mu.greeting {
		count[host(c)]++
	}
	var oust net.Conn
	for c, at := range n.mu.greeting {
		if oust == nil || count[host(c)] > count[host(oust)] || count[host(c)] == count[host(oust)] && at < n.mu.greeting[oust] {
			oust = c
		}
	}
	delete(n.mu.greeting, oust)
	_ = oust.Close() // greet says why
}

// greet finds out what an accepted connection is, and hands it on.
func (n *Net) greet(raw net.Conn, addr string) {
	defer func() {
		n.mu.Lock()
		delete(n.mu.greeting, raw)
		n.mu.Unlock()
	}()
	until := time.Now().Add(n.o.GreetTimeout)
	_ = raw.SetDeadline(until)
	err := n.welcome(raw, addr, until)
	if err == nil {
		return
	}
	_ = raw.Close()
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		err = fmt.Errorf("no greeting after %v: %w", n.o.GreetTimeout, err)
	case errors.Is(err, net.ErrClosed):
		err = fmt.Errorf("%d connections have not greeted yet, and this was the oldest of the host with the most", n.o.GreetingMax)
	}
	if n.ctx.Err() == nil {
		n.refuse(addr, err)
	}
}

func (n *Net) welcome(raw net.Conn, addr string, until time.Time) error {
	conn := raw
	if n.o.TLS != nil {
		c := tls.Server(raw, n.o.TLS)
		if err := c.HandshakeContext(n.ctx); err != nil {
			return fmt.Errorf("tls: %w", err)
		}
		conn = c
	}
	var head [tokenHeadBytes]byte
	if _, err := io.ReadFull(conn, head[:4]); err != nil {
		return err
	}
	if string(head[:4]) == tokenMagic {
		// No byte more: blocks may follow.
		if _, err := io.ReadFull(conn, head[4:]); err != nil {
			return err
		}
		token, err := decodeTokenHead(head[:])
		if err != nil {
			return err
		}
		return n.join(raw, conn, token, until)
	}
	r := newFrameReader(conn)
	r.end = copy(r.buf, head[:4])
	msg, err := r.next()
	hello, ok := msg.(*Hello)
	if err == nil && !ok {
		err = violated("frame.type", "the first message is %T, not a Hello", msg)
	}
	if err == nil && hello.Version == Version {
		err = n.greeted(conn, "hello", hello.Node, hello.Advertise)
	}
	var bad *ProtocolError
	if errors.As(err, &bad) {
		_, _ = conn.Write(appendFrame(nil, &Bye{Code: bad.Code, Text: bad.Error()}))
	}
	if err != nil {
		return err
	}
	_ = raw.SetDeadline(time.Time{})
	r.max = ControlMax
	return n.begin(&tcpSession{raw: raw, conn: conn, in: r, addr: addr, hello: hello})
}

// join gives a data connection to the session of its token. The session may
// not have been told yet to expect it.
func (n *Net) join(raw, conn net.Conn, token [tokenBytes]byte, until time.Time) error {
	unexpected := errors.New("no session expects a data connection with this token") // or not any more
	n.mu.Lock()
	s := n.mu.tokens[token]
	n.mu.Unlock()
	if s == nil {
		return unexpected
	}
	late := time.NewTimer(time.Until(until))
	defer late.Stop()
	select {
	case <-s.expected:
	case <-s.ending:
		return unexpected
	case <-late.C:
		return os.ErrDeadlineExceeded
	}
	_ = raw.SetDeadline(time.Time{})
	if !s.add(raw, conn) {
		return unexpected
	}
	return nil
}

// begin makes a session of a control connection.
func (n *Net) begin(s *tcpSession) error {
	s.n, s.dialed = n, s.hello == nil
	s.expected, s.ending, s.flushed, s.heard = make(chan struct{}), make(chan struct{}), make(chan struct{}), make(chan struct{})
	s.wake = make(chan struct{}, 1)
	s.mu.grants, s.mu.queues, s.mu.gets.offers = map[blockID]*grant{}, map[ServeID]*sendQueue{}, map[blockID]*offered{}
	s.toWrite.L, s.toSend.L = &s.mu, &s.mu
	n.mu.Lock()
	defer n.mu.Unlock()
	if s.hello != nil && s.hello.Version == Version {
		if n.mu.tokens[s.hello.Token] != nil {
			return violated("hello.token", "it is another session's")
		}
		s.token = s.hello.Token
	}
	if s.hello != nil && len(n.mu.sessions) >= n.o.SessionsMax {
		return fmt.Errorf("there are %d sessions", len(n.mu.sessions))
	}
	n.mu.last++
	s.id = n.mu.last
	s.ctx, s.cancel = context.WithCancel(n.ctx)
	s.getting, s.over = context.WithCancel(context.WithoutCancel(n.ctx)) // which Close ends before sessions
	if n.mu.closed || !n.start(&n.wg, s.run) {
		s.cancel()
		s.over()
		return errNetClosed
	}
	n.mu.sessions[s.id] = s
	if s.hello != nil && s.hello.Version == Version {
		n.mu.tokens[s.token] = s
	}
	return nil
}

// forget ends what begin began.
func (n *Net) forget(s *tcpSession) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.mu.sessions, s.id)
	if n.mu.tokens[s.token] == s {
		delete(n.mu.tokens, s.token)
	}
}

// dial makes a control connection.
func (n *Net) dial(addr string) {
	raw, conn, err := n.connect(n.ctx, addr)
	if err == nil {
		if err = n.begin(&tcpSession{raw: raw, conn: conn, in: newFrameReader(conn), addr: addr}); err != nil {
			_ = raw.Close()
		}
	}
	if err != nil {
		n.sink.DialFailed(addr, err)
	}
}

// connect opens a connection, with TLS if that is the way, and no deadline.
func (n *Net) connect(ctx context.Context, addr string) (raw, conn net.Conn, err error) {
	ctx, cancel := context.WithTimeout(ctx, n.o.DialTimeout)
	defer cancel()
	var d net.Dialer
	raw, err = d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, nil, err // it names the address
	}
	if n.o.TLS == nil {
		return raw, raw, nil
	}
	c, err := tlsClient(ctx, raw, n.o.TLS, addr)
	if err != nil {
		_ = raw.Close()
		return nil, nil, fmt.Errorf("dial %s: tls: %w", addr, err)
	}
	return raw, c, nil
}

// endReason says what an error of a connection means.
func endReason(what string, err error, patience time.Duration) error {
	switch {
	case errors.Is(err, io.EOF):
		return fmt.Errorf("%s: closed by the peer", what)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("%s: no progress for %v: %w", what, patience, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}
