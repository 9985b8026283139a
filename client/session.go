package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/arena"
	"github.com/terrace-kv/terrace/internal/wire"
)

const (
	// greetTimeout bounds connect and hello when the context does not.
	greetTimeout = 15 * time.Second

	// writeTimeout is how long the node may leave calls unread when the socket
	// is full. It reads whatever else it does, so this means that it hangs.
	writeTimeout = 5 * time.Second

	// orphansMax bounds the reserves that were given up and wait to be
	// aborted. What goes beyond expires in the node.
	orphansMax = 64

	keptBytes = 128 << 10 // larger buffers are not kept
)

// session is one connection to the node, from hello to its loss.
type session struct {
	conn   *net.UnixConn
	hello  wire.HelloReply
	region *Region
	file   *os.File // the region's descriptor, for workers to inherit

	writing chan struct{} // a lock that one can stop waiting for

	mu struct {
		sync.Mutex
		next    uint32
		pending map[uint32]*call
		err     error // why the session is lost; nil: it is not
		orphans int
	}

	reader  sync.WaitGroup
	lost    chan struct{}  // closed when the reader has ended and every call is answered
	orphans sync.WaitGroup // see Request.orphan
	late    atomic.Int64   // replies that nobody waited for any more
}

// call is one under way. It is answered exactly once: by whoever takes it out
// of pending.
type call struct {
	id    uint32
	t     wire.Type
	reply wire.Message // decoded by the reader
	err   error
	done  chan struct{} // has room for the one answer

	buf    []byte
	lookup wire.Lookup
	timer  *time.Timer
}

var calls = sync.Pool{New: func() any {
	t := time.NewTimer(time.Hour)
	t.Stop()
	return &call{done: make(chan struct{}, 1), timer: t}
}}

// fdReader takes the descriptor that comes with a reply to hello or attach.
type fdReader struct {
	conn *net.UnixConn
	file *os.File
}

func (r *fdReader) Read(b []byte) (int, error) {
	n, f, err := arena.RecvFD(r.conn, b)
	if f != nil {
		if r.file != nil {
			f.Close()
			return n, errors.New("the node sent a second descriptor")
		}
		r.file = f
	}
	return n, err
}

// greet connects, sends the first call and decodes its reply. On success the
// caller owns connection and descriptor; the reader has what came after.
func greet(ctx context.Context, path string, t wire.Type, m, reply wire.Message) (_ *net.UnixConn, _ *wire.Reader, _ *os.File, err error) {
	ctx, cancel := context.WithTimeout(ctx, greetTimeout)
	defer cancel()
	var d net.Dialer
	nc, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, nil, nil, dialError(path, err)
	}
	conn := nc.(*net.UnixConn)
	src := &fdReader{conn: conn}
	defer func() {
		if err == nil {
			return
		}
		conn.Close()
		if src.file != nil {
			src.file.Close()
		}
		if cerr := ctx.Err(); cerr != nil && errors.Is(err, os.ErrDeadlineExceeded) {
			err = cerr
		}
		err = fmt.Errorf("greet node at %s: %w", path, err)
	}()
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	r := wire.NewReader(src)
	_, werr := conn.Write(wire.AppendFrame(nil, t, 1, m))
	f, err := r.Read() // also after a failed write: the node may have said why it hung up
	switch {
	case err == io.EOF:
		err = errors.New("it closed the connection; it is shutting down, or has too many")
	case err == nil && f.Type == wire.TypeError:
		var e wire.Error
		if err = e.Decode(f.Body); err == nil {
			err = &e
		}
	case err == nil && f.Type != t|wire.ReplyBit:
		err = fmt.Errorf("%w: %v in reply to %v", ErrMalformed, f.Type, t)
	case err == nil:
		err = reply.Decode(f.Body)
	}
	if err == nil && src.file == nil {
		err = fmt.Errorf("%w: no descriptor came with the reply", ErrMalformed)
	}
	if err == nil {
		err = werr
	}
	if err == nil && !stop() { // too late: the connection has its deadline
		err = ctx.Err()
	}
	if err != nil {
		return nil, nil, nil, err
	}
	r.SetSource(conn)
	r.Max = wire.FrameMax
	return conn, r, src.file, nil
}

// open makes a session. expect is the fingerprint of an earlier one, or nil.
func open(ctx context.Context, o *Options, expect *block.Fingerprint) (*session, error) {
	s := &session{writing: make(chan struct{}, 1), lost: make(chan struct{})}
	s.mu.pending = map[uint32]*call{}
	conn, r, file, err := greet(ctx, o.Socket, wire.TypeHello, &wire.Hello{Versions: wire.Versions{Min: wire.VersionMin, Max: wire.VersionMax},
		Engine: o.Engine, Name: o.NamespaceName, Expect: expect, Spec: o.Spec}, &s.hello)
	if err != nil {
		return nil, err
	}
	info, err := regionInfo(&s.hello.Region)
	if err == nil && len(info.Groups) != len(o.Spec.Groups) {
		err = fmt.Errorf("%w: the node speaks of %d groups, the namespace has %d", ErrMalformed, len(info.Groups), len(o.Spec.Groups))
	}
	for i := 0; err == nil && i < len(info.Groups); i++ {
		if g := info.Groups[i]; uint64(g.BlockBytes) != o.Spec.Groups[i].BlockBytes {
			err = fmt.Errorf("%w: the node has blocks of %d bytes in group %d, the namespace of %d", ErrMalformed, g.BlockBytes, i, o.Spec.Groups[i].BlockBytes)
		}
	}
	if err == nil && expect != nil && s.hello.Fingerprint != *expect {
		err = fmt.Errorf("%w: fingerprint %s, it was %s", ErrNamespace, s.hello.Fingerprint, *expect)
	}
	if err == nil {
		s.region, err = newRegion(file, info, o.VerifyOnLoad)
	}
	if err == nil {
		s.region.open = make(map[uint32]uint32)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("greet node at %s: %w", o.Socket, err), conn.Close(), file.Close())
	}
	s.conn, s.file = conn, file
	s.reader.Go(func() { s.read(r) })
	return s, nil
}

// fail ends the session; the reader answers what is pending. Only the first
// reason counts.
func (s *session) fail(reason error) {
	s.mu.Lock()
	if s.mu.err == nil {
		s.mu.err = fmt.Errorf("%w: %w", ErrSessionLost, reason)
	}
	s.mu.Unlock()
	s.conn.Close()
}

// reason is why the session is lost; nil: it is not.
func (s *session) reason() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.err
}

// read is the session's goroutine: it decodes each reply for the call that
// waits for it.
func (s *session) read(r *wire.Reader) {
	for {
		f, err := r.Read()
		if err != nil {
			if err == io.EOF {
				err = errors.New("the node closed the connection")
			}
			s.fail(err)
			break
		}
		s.mu.Lock()
		c := s.mu.pending[f.Call]
		delete(s.mu.pending, f.Call)
		s.mu.Unlock()
		var e *wire.Error
		if f.Type == wire.TypeError {
			e = new(wire.Error)
			if err := e.Decode(f.Body); err != nil {
				e = &wire.Error{Code: wire.CodeMalformed, Message: err.Error()}
			}
			if e.Code.Ends() {
				s.fail(e)
			}
		}
		if c == nil {
			s.late.Add(1)
			continue
		}
		switch {
		case e != nil:
			c.err = e
		case f.Type != c.t|wire.ReplyBit:
			c.err = fmt.Errorf("%w: %v in reply to %v", ErrMalformed, f.Type, c.t)
			s.fail(c.err)
		default:
			if c.err = c.reply.Decode(f.Body); c.err != nil {
				s.fail(c.err)
			}
		}
		c.done <- struct{}{}
	}
	s.mu.Lock()
	pending := s.mu.pending
	s.mu.pending = nil // nobody gets in: err is set
	err := s.mu.err
	s.mu.Unlock()
	for _, c := range pending {
		c.err = err
		c.done <- struct{}{}
	}
	s.region.end()
	close(s.lost)
}

// do makes one call and waits for its reply, at most until ctx has ended or,
// if it has no deadline, for timeout.
func (s *session) do(ctx context.Context, timeout time.Duration, t wire.Type, m, reply wire.Message) error {
	c := calls.Get().(*call)
	err := s.start(ctx, c, t, m, reply)
	if err == nil {
		err = s.wait(ctx, c, timeout)
	}
	c.put()
	return err
}

// put gives a call back that nobody knows of any more.
func (c *call) put() {
	c.reply, c.err = nil, nil
	if c.lookup = (wire.Lookup{}); cap(c.buf) <= keptBytes {
		calls.Put(c)
	}
}

// start writes the call. After an error nobody knows of it.
func (s *session) start(ctx context.Context, c *call, t wire.Type, m, reply wire.Message) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	c.t, c.reply = t, reply
	c.buf = wire.AppendFrame(c.buf[:0], t, 0, m)
	if len(c.buf)-4 > int(s.hello.Limits.FrameMax) {
		return fmt.Errorf("%w: %v has %d bytes, the node takes %d", ErrInvalid, t, len(c.buf)-4, s.hello.Limits.FrameMax)
	}
	s.mu.Lock()
	if s.mu.err != nil {
		s.mu.Unlock()
		return s.mu.err
	}
	for {
		if s.mu.next++; s.mu.next != 0 && s.mu.pending[s.mu.next] == nil {
			break
		}
	}
	c.id = s.mu.next
	s.mu.pending[c.id] = c
	s.mu.Unlock()
	wire.SetCall(c.buf, c.id)

	if err := s.write(ctx, c.buf); err != nil {
		return s.abandon(c, err)
	}
	return nil
}

// write sends one frame. An error leaves the session usable only if nothing
// has been written.
func (s *session) write(ctx context.Context, b []byte) error {
	select {
	case s.writing <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	case <-s.lost:
		return ErrSessionLost
	}
	defer func() { <-s.writing }()
	deadline := time.Now().Add(writeTimeout)
	d, ok := ctx.Deadline()
	if ok = ok && d.Before(deadline); ok {
		deadline = d
	}
	s.conn.SetWriteDeadline(deadline)
	n, err := s.conn.Write(b)
	if err == nil {
		return nil
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		if ok && n == 0 {
			return context.DeadlineExceeded // the frame is not begun: the session goes on
		}
		err = errors.New("the node does not read its calls")
	}
	if errors.Is(err, syscall.EPIPE) {
		return nil // the reader is about to hear why, and answers all calls
	}
	s.fail(err)
	return err
}

// abandon stops waiting for a call. If its answer came meanwhile that counts.
func (s *session) abandon(c *call, err error) error {
	s.mu.Lock()
	mine := s.mu.pending[c.id] == c
	if mine {
		delete(s.mu.pending, c.id)
	}
	if s.mu.err != nil {
		err = s.mu.err
	}
	s.mu.Unlock()
	if mine {
		return err
	}
	<-c.done
	return c.err
}

// wait for the reply.
func (s *session) wait(ctx context.Context, c *call, timeout time.Duration) error {
	done, err := c.await(ctx, timeout)
	if !done {
		err = s.abandon(c, err)
	}
	return err
}

// await tells whether the reply came, and its error or why it did not.
func (c *call) await(ctx context.Context, timeout time.Duration) (done bool, err error) {
	var late <-chan time.Time
	if _, ok := ctx.Deadline(); !ok {
		c.timer.Reset(timeout)
		defer c.timer.Stop()
		late = c.timer.C
	}
	select {
	case <-c.done:
		return true, c.err
	case <-ctx.Done():
		return false, ctx.Err()
	case <-late:
		return false, fmt.Errorf("%w: the node did not answer %v in %v", context.DeadlineExceeded, c.t, timeout)
	}
}
