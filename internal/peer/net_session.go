package peer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// tcpSession is a control connection and its data connections.
type tcpSession struct {
	n      *Net
	id     ConnID
	addr   string
	dialed bool
	raw    net.Conn // of the control connection; conn is the same, or TLS on it
	conn   net.Conn
	in     *frameReader
	hello  *Hello // of the other side, if it dialed
	token  [tokenBytes]byte

	ctx    context.Context // of dials; ends with the session
	cancel context.CancelFunc
	wg     sync.WaitGroup // all but run

	wake     chan struct{} // there are answers
	expected chan struct{} // closed when data connections may join
	ending   chan struct{} // closed when why is set
	flushed  chan struct{} // closed when the writer is done
	heard    chan struct{} // closed when the reader is done

	toWrite, toSend sync.Cond // of mu

	getting context.Context // of gets; ends when the other side's region is let go
	over    context.CancelFunc
	meeting sync.Mutex // guards met: the description that the other side has sent, or nil
	met     []byte

	mu tcpSessionState
}

type tcpSessionState struct {
	sync.Mutex
	why       error // the first cause of the end
	viaData   bool  // why was found on a data connection
	finishing bool  // the writer ends when it has nothing to write
	closed    bool  // the connections are closed: nothing is started any more

	out     []byte // frames to be written
	writing int    // bytes that are being written
	bye     bool   // the last frame is a Bye

	want    int // data connections that may still join
	data    []*dataConn
	grants  map[blockID]*grant
	answers []answer
	queues  map[ServeID]*sendQueue
	turn    []*sendQueue // those with blocks, the next one first
	gets    netGets
}

// answer is a call of the sink that follows from a call of Do.
type answer struct {
	sent  bool // Sent(serve, block.index, false), else Detached(block)
	serve ServeID
	block blockID
}

// run owns the session.
func (s *tcpSession) run() {
	if !s.start(s.write) {
		close(s.flushed)
	}
	s.n.sink.Connected(s.id, s.addr, s.dialed)
	if s.hello != nil {
		s.n.sink.Received(s.id, s.hello)
	}
	if !s.start(s.read) {
		close(s.heard)
	}
	s.answerUntilEnd()
	s.finish()
	s.wg.Wait()
	s.n.forget(s)
	s.n.sink.Lost(s.id, s.mu.why)
}

// start runs f on a goroutine of the session, unless it is over.
func (s *tcpSession) start(f func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.startLocked(f)
}

func (s *tcpSession) startLocked(f func()) bool {
	return !s.mu.closed && s.n.start(&s.wg, f)
}

func (s *tcpSession) answerUntilEnd() {
	expected := s.expected
	var late, offers <-chan time.Time
	if s.n.o.Fabric != nil {
		t := time.NewTicker(s.n.o.ProgressTimeout / 4)
		defer t.Stop()
		offers = t.C
	}
	for {
		select {
		case <-s.ending:
			return
		case <-expected:
			expected, late = nil, time.After(s.n.o.GreetTimeout)
		case <-late:
			s.mu.Lock()
			want := s.mu.want
			s.mu.Unlock()
			if want > 0 {
				s.end(fmt.Errorf("%d data connections did not come within %v", want, s.n.o.GreetTimeout))
			}
		case <-offers:
			s.checkOffers()
		case <-s.wake:
			s.mu.Lock()
			answers := s.mu.answers
			s.mu.answers = nil
			s.mu.Unlock()
			for _, a := range answers {
				if a.sent {
					s.n.sink.Sent(a.serve, a.block.index, false)
				} else {
					s.n.sink.Detached(s.id, a.block.nonce, a.block.round, a.block.index)
				}
			}
		}
	}
}

// answerLocked leaves it to run: Do's caller may hold the lock that the sink
// takes.
func (s *tcpSession) answerLocked(a answer) {
	s.mu.answers = append(s.mu.answers, a)
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// end begins the end. The first cause counts.
func (s *tcpSession) end(why error) { s.endAs(why, false) }

func (s *tcpSession) endAs(why error, viaData bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.endLocked(why, viaData)
}

func (s *tcpSession) endLocked(why error, viaData bool) {
	if s.mu.why == nil {
		s.mu.why, s.mu.viaData = why, viaData
		close(s.ending)
	}
}

// finish lets the writer write what was queued, tells the peer what it did
// wrong, and closes all connections.
func (s *tcpSession) finish() {
	s.mu.Lock()
	var bad *ProtocolError
	if errors.As(s.mu.why, &bad) {
		s.n.n.violations.Add(1)
		s.queueLocked(&Bye{Code: bad.Code, Text: bad.Error()})
	}
	s.mu.finishing = true
	viaData := s.mu.viaData
	_ = s.raw.SetWriteDeadline(time.Now().Add(s.n.o.FlushTimeout))
	s.toWrite.Broadcast()
	s.mu.Unlock()
	<-s.flushed
	if viaData { // listen for a Bye, which may have been sent before, but on another connection
		select {
		case <-s.heard:
		case <-time.After(s.n.o.FlushTimeout / 4):
		}
	}
	s.mu.Lock()
	s.mu.closed = true
	data, region := s.mu.data, s.mu.gets.peer
	s.toSend.Broadcast()
	s.mu.Unlock()
	s.cancel()
	// The connection below TLS, since a TLS connection would wait to say goodbye.
	_ = s.raw.Close()
	for _, d := range data {
		_ = d.raw.Close()
	}
	if region != nil {
		_ = region.Close() // gets end, and what they wrote is quiet when they are released
	}
	s.over()
}

// Control frames of a session are read as fast as so many units a second; a frame
// is one and each 512 bytes of it one more. Who sends more waits in his connection,
// since each frame takes the lock that all engines and peers share.
const (
	paceUnits = 20_000
	paceBurst = time.Second
)

// pace waits until a frame of so many bytes is due. free is where the last call
// has left it.
func (s *tcpSession) pace(free time.Time, size int) time.Time {
	now := time.Now()
	if first := now.Add(-paceBurst); free.Before(first) {
		free = first
	}
	free = free.Add(time.Duration(1+size/512) * time.Second / paceUnits)
	if wait := free.Sub(now); wait > 0 {
		select {
		case <-s.ending:
		case <-time.After(wait):
		}
	}
	return free
}

// read takes control frames.
func (s *tcpSession) read() {
	defer close(s.heard)
	var free time.Time
	for greeted := !s.dialed; ; greeted = true {
		msg, err := s.in.next()
		if errors.Is(err, io.EOF) && !greeted {
			s.end(errors.New("control connection: closed by the peer before its greeting; it may want TLS, or be no terrace node"))
			return
		}
		if err != nil {
			s.end(endReason("control connection", err, s.n.o.ProgressTimeout))
			return
		}
		if w, ok := msg.(*Welcome); ok && w.Version == Version {
			if err := s.n.greeted(s.conn, "welcome", w.Node, w.Advertise); err != nil {
				s.end(err)
				return
			}
		}
		s.in.max = ControlMax
		free = s.pace(free, s.in.size)
		s.n.sink.Received(s.id, msg)
		if bye, ok := msg.(*Bye); ok {
			s.end(fmt.Errorf("the peer ended the session: %s (code %d)", bye.Text, bye.Code))
			return
		}
	}
}

// send queues a frame.
func (s *tcpSession) send(m Message) {
	s.mu.Lock()
	full := !s.queueLocked(m)
	s.mu.Unlock()
	if full {
		s.end(fmt.Errorf("control connection: more than %d bytes are queued; the peer does not read them", s.n.o.ControlQueueBytes))
	}
}

func (s *tcpSession) queueLocked(m Message) bool {
	if s.mu.bye || s.mu.finishing {
		return true // nothing follows a Bye
	}
	before := len(s.mu.out)
	s.mu.out = appendFrame(s.mu.out, m)
	if len(s.mu.out)+s.mu.writing > s.n.o.ControlQueueBytes {
		s.mu.out = s.mu.out[:before]
		return false
	}
	_, s.mu.bye = m.(*Bye)
	s.toWrite.Signal()
	return true
}

// writePiece is how much of a frame or block is written at a time: so much must
// be written within ProgressTimeout.
const writePiece = 4 << 20

// write writes control frames.
func (s *tcpSession) write() {
	defer close(s.flushed)
	var spare []byte
	var by time.Time
	for {
		s.mu.Lock()
		for len(s.mu.out) == 0 && !s.mu.finishing {
			s.toWrite.Wait()
		}
		buf := s.mu.out
		s.mu.out, s.mu.writing = spare[:0], len(buf)
		s.mu.Unlock()
		if len(buf) == 0 {
			return
		}
		for b := buf; len(b) > 0; {
			s.mu.Lock()
			if !s.mu.finishing { // then there is a bound for all that is left
				by = extend(by, s.n.o.ProgressTimeout, s.raw.SetWriteDeadline)
			}
			s.mu.Unlock()
			n, err := s.conn.Write(b[:min(len(b), writePiece)])
			if b = b[n:]; err != nil {
				s.end(endReason("control connection: write", err, s.n.o.ProgressTimeout))
				return
			}
		}
		if spare = nil; cap(buf) <= keptBytes {
			spare = buf
		}
	}
}

// extend moves a deadline on when a quarter of it has passed, and says where
// it is. To set it for each call would cost more than the call of a small block.
func extend(by time.Time, patience time.Duration, set func(time.Time) error) time.Time {
	if now := time.Now(); by.Sub(now) < patience*3/4 {
		by = now.Add(patience)
		_ = set(by)
	}
	return by
}

// expect lets data connections join.
func (s *tcpSession) expect(conns int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.expected:
	default:
		s.mu.want = conns
		close(s.expected)
	}
}

// dialData makes data connections, to where the control connection was dialed.
func (s *tcpSession) dialData(conns int, token [tokenBytes]byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.want = conns
	for range conns {
		s.startLocked(func() {
			raw, conn, err := s.n.connect(s.ctx, s.addr)
			if err == nil {
				_ = raw.SetWriteDeadline(time.Now().Add(s.n.o.DialTimeout))
				if _, err = conn.Write(appendTokenHead(nil, token)); err != nil {
					_ = raw.Close()
				}
			}
			if err != nil {
				s.end(fmt.Errorf("data connection: %w", err))
				return
			}
			_ = raw.SetWriteDeadline(time.Time{})
			if !s.add(raw, conn) {
				_ = raw.Close()
			}
		})
	}
}

// add takes a data connection, unless none is wanted.
func (s *tcpSession) add(raw, conn net.Conn) bool {
	d := &dataConn{s: s, raw: raw, conn: conn}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed || s.mu.want == 0 {
		return false
	}
	s.mu.want--
	s.mu.data = append(s.mu.data, d) // finish closes it, whatever has been started
	s.startLocked(d.receive)
	s.startLocked(d.send)
	return true
}
