package engine

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/terrace-kv/terrace/internal/lifecycle"
	"github.com/terrace-kv/terrace/internal/wire"
)

// Options of a Server. The zero value is usable; what is not above 0 gets the
// default.
type Options struct {
	// Node is the node's version, told in the reply to hello.
	Node string

	// SessionsMax bounds the engines connected at a time. Default 256.
	SessionsMax int

	// WorkersMax bounds the attached workers of one session. Default 64.
	WorkersMax int

	// UngreetedMax bounds the connections that have not yet greeted; more are
	// turned away. Default 64.
	UngreetedMax int

	// RequestsMax bounds the unfinished requests of a session. Default 65536.
	RequestsMax int

	// WaitsMax bounds the calls of a session that wait for their answer.
	// Default 1024.
	WaitsMax int

	// WaitKeysMax bounds the keys of a session's waiting lookups, which the
	// node keeps. Default 1048576.
	WaitKeysMax int

	// GreetTimeout is how long a connection may take to send its hello.
	// Default 5 s.
	GreetTimeout time.Duration

	// OpenTimeout is how long the node may take to open a session, which asks
	// the tiers. Default 10 s.
	OpenTimeout time.Duration

	// WriteTimeout is how long a client may leave its replies unread when the
	// socket is full; then its session ends. Default 5 s.
	WriteTimeout time.Duration

	// Logger; default slog.Default.
	Logger *slog.Logger

	// Watch is told of the loop that accepts; may be nil.
	Watch *lifecycle.Watch

	// OnLookup, if given, is told of each lookup that did not wait: from frame
	// read to reply written. It is called by many goroutines.
	OnLookup func(time.Duration)
}

// EnsureDefaults fills in the defaults.
func (o *Options) EnsureDefaults() {
	for _, d := range []struct {
		field *int
		value int
	}{{&o.SessionsMax, 256}, {&o.WorkersMax, 64}, {&o.UngreetedMax, 64}, {&o.RequestsMax, 1 << 16}, {&o.WaitsMax, 1024}, {&o.WaitKeysMax, 1 << 20}} {
		if *d.field <= 0 {
			*d.field = d.value
		}
	}
	for _, d := range []struct {
		field *time.Duration
		value time.Duration
	}{{&o.GreetTimeout, 5 * time.Second}, {&o.OpenTimeout, 10 * time.Second}, {&o.WriteTimeout, 5 * time.Second}} {
		if *d.field <= 0 {
			*d.field = d.value
		}
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
}

// Server turns frames of engines into calls of a Backend. Its methods may be
// called by anybody at any time.
type Server struct {
	backend  Backend
	opts     Options
	listener *Listener
	ctx      context.Context // ends with Close
	cancel   context.CancelFunc
	wg       sync.WaitGroup // every goroutine

	mu struct {
		sync.Mutex
		closed    bool
		conns     map[*conn]struct{}
		ungreeted int
		sessions  int // opening ones included
		tokens    map[wire.Token]*session
	}

	calls   [32]atomic.Int64 // by type
	errors  [128]atomic.Int64
	refused atomic.Int64
}

// Serve starts to accept engines on l, which the server owns from now on.
func Serve(l *Listener, b Backend, o Options) *Server {
	o.EnsureDefaults()
	s := &Server{backend: b, opts: o, listener: l}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.mu.conns = map[*conn]struct{}{}
	s.mu.tokens = map[wire.Token]*session{}
	s.wg.Go(s.accept)
	return s
}

// StopAccepting is the first step of a drain: nobody new gets in, sessions go
// on. The path stays locked against other nodes until Close.
func (s *Server) StopAccepting() error { return s.listener.stop() }

// Close ends every session, waits for all goroutines and removes the socket.
// Calls under way are answered to nobody.
func (s *Server) Close() error {
	s.mu.Lock()
	s.mu.closed = true
	conns := s.mu.conns
	s.mu.Unlock()
	s.cancel()
	err := s.listener.Close()
	s.mu.Lock()
	for c := range conns {
		c.fail(errServerClosed)
	}
	s.mu.Unlock()
	s.wg.Wait()
	return err
}

// Stats for metrics. Names are the protocol's.
type Stats struct {
	Sessions  int              // engines connected
	Workers   int              // attached connections
	Ungreeted int              // connections before their hello
	Refused   int64            // connections turned away before they could greet
	Calls     map[string]int64 // by type
	Errors    map[string]int64 // error frames, by code
}

// Stats counts.
func (s *Server) Stats() Stats {
	out := Stats{Calls: map[string]int64{}, Errors: map[string]int64{}, Refused: s.refused.Load()}
	for t := wire.TypeHello; t <= wire.TypeGoodbye; t++ {
		out.Calls[t.String()] = s.calls[t].Load()
	}
	for _, c := range wire.Codes() {
		out.Errors[c.String()] = s.errors[c].Load()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	out.Ungreeted = s.mu.ungreeted
	out.Sessions = len(s.mu.tokens)
	for _, sess := range s.mu.tokens {
		out.Workers += len(sess.workers)
	}
	return out
}

var (
	errServerClosed = errors.New("the node is shutting down")
	errGoodbye      = errors.New("goodbye")
)

// acceptPause is how long accepting rests when descriptors run out.
const acceptPause = 50 * time.Millisecond

// acceptBound is how long letting one in may take: no more than locks.
const acceptBound = 30 * time.Second

func (s *Server) accept() {
	loop := s.opts.Watch.Loop("accept", acceptBound)
	for {
		loop.Rest(0)
		uc, err := s.listener.unix.AcceptUnix()
		loop.Work()
		if err == nil {
			s.admit(uc)
			continue
		}
		if errors.Is(err, net.ErrClosed) {
			loop.End(s.listener.stopping.Load())
			return
		}
		s.opts.Logger.Warn("engine socket: accept failed", "path", s.listener.path, "err", err)
		select {
		case <-s.ctx.Done():
			return
		case <-time.After(acceptPause):
		}
	}
}

// admit gives the connection a goroutine, or turns it away.
func (s *Server) admit(uc *net.UnixConn) {
	c := &conn{srv: s, c: uc}
	var refusal error
	c.peer, refusal = identify(uc, s.listener.gid)
	s.mu.Lock()
	if refusal == nil && s.mu.ungreeted >= s.opts.UngreetedMax {
		refusal = &wire.Error{Code: wire.CodeTooMany, Message: fmt.Sprintf("%d connections have not yet greeted; try again", s.mu.ungreeted)}
	}
	if s.mu.closed {
		refusal = errServerClosed
	}
	if refusal == nil {
		s.mu.ungreeted++
		s.mu.conns[c] = struct{}{}
		s.wg.Go(c.run)
	}
	s.mu.Unlock()
	if refusal != nil {
		// A fresh socket has room for this, so it never waits.
		s.refused.Add(1)
		s.opts.Logger.Warn("engine connection turned away", "pid", c.peer.pid, "uid", c.peer.uid, "err", refusal)
		_ = c.writeError(0, wire.ErrorOf(refusal)) // whether it arrives changes nothing
		uc.Close()
	}
}

// conn is one connection, before and after it has greeted.
type conn struct {
	srv  *Server
	c    *net.UnixConn
	peer peer

	writing sync.Mutex // one frame at a time; never taken under another lock

	ended sync.Once
	cause error // why it ended; set once, before c is closed
}

// fail ends the connection: its goroutine sees the end and cleans up. Only the
// first cause counts. It never waits.
func (c *conn) fail(cause error) {
	c.ended.Do(func() {
		c.cause = cause
		c.c.Close()
	})
}

// run is the connection's goroutine, from accept to the end.
func (c *conn) run() {
	s := c.srv
	greeted := sync.OnceFunc(func() {
		s.mu.Lock()
		s.mu.ungreeted--
		s.mu.Unlock()
	})
	r := wire.NewReader(c.c)
	c.c.SetDeadline(time.Now().Add(s.opts.GreetTimeout))
	f, err := r.Read()
	if err == nil {
		greeted()
		s.count(f.Type)
		switch f.Type {
		case wire.TypeHello:
			err = c.serveEngine(r, f)
		case wire.TypeAttach:
			err = c.serveWorker(r, f)
		default:
			err = &wire.Error{Code: wire.CodeMalformed, Message: fmt.Sprintf("%s before hello", f.Type)}
		}
	}
	if e := (*wire.Error)(nil); errors.As(err, &e) {
		_ = c.writeError(f.Call, e) // whether it arrives changes nothing
		s.opts.Logger.Warn("engine connection refused", "pid", c.peer.pid, "uid", c.peer.uid, "err", err, "code", e.Code.String())
	}
	c.fail(err)
	greeted()
	s.mu.Lock()
	delete(s.mu.conns, c)
	s.mu.Unlock()
}

// serveEngine opens a session, serves it, and closes it. An error of its own
// is about the greeting.
func (c *conn) serveEngine(r *wire.Reader, f wire.Frame) error {
	s := c.srv
	sess, err := s.open(c, f)
	if err != nil {
		return err
	}
	log := s.opts.Logger.With("session", sess.facts.ID, "pid", c.peer.pid, "engine", sess.hello.Engine)
	log.Info("engine session opened", "uid", c.peer.uid, "epoch", sess.facts.Epoch, "namespace", sess.hello.NS.Fingerprint().String(), "name", sess.hello.Name)
	began := time.Now()
	var writer sync.WaitGroup
	writer.Go(sess.writeLater)

	err = c.welcome(f, sess)
	if e := (*wire.Error)(nil); errors.As(err, &e) {
		_ = c.writeError(f.Call, e) // whether it arrives changes nothing
	}
	if err == nil {
		r.Max = wire.FrameMax
		err = sess.serve(r)
	}
	if err != errGoodbye {
		c.fail(err)
	}
	close(sess.done)
	s.forget(sess)
	sess.backend.Close()
	if err == errGoodbye {
		// Said last, so that the engine knows that all is given back.
		_ = c.write(wire.AppendFrame(nil, wire.TypeGoodbye|wire.ReplyBit, sess.goodbye, wire.Empty{}))
		c.fail(err)
	}
	writer.Wait()

	level := slog.LevelInfo
	if e := (*wire.Error)(nil); errors.As(c.cause, &e) {
		level = slog.LevelWarn
	}
	log.Log(context.Background(), level, "engine session ended", "cause", c.cause, "after", time.Since(began))
	return nil
}

// open is a hello up to the session that it asks for.
func (s *Server) open(c *conn, f wire.Frame) (*session, error) {
	sess := &session{conn: c, done: make(chan struct{}), later: make(chan laterReply, s.opts.WaitsMax), workers: map[*conn]struct{}{}}
	if err := sess.greet(f.Body); err != nil {
		return nil, err
	}
	s.mu.Lock()
	if s.mu.sessions >= s.opts.SessionsMax {
		s.mu.Unlock()
		return nil, &wire.Error{Code: wire.CodeTooMany, Message: fmt.Sprintf("%d engines are connected, which is the most (sessions_max)", s.opts.SessionsMax)}
	}
	s.mu.sessions++
	s.mu.Unlock()

	ctx, cancel := context.WithTimeout(s.ctx, s.opts.OpenTimeout)
	defer cancel()
	var err error
	if sess.backend, err = s.backend.OpenSession(ctx, sess.hello); err != nil {
		s.mu.Lock()
		s.mu.sessions--
		s.mu.Unlock()
		return nil, wire.ErrorOf(err)
	}
	sess.facts = sess.backend.Facts()
	rand.Read(sess.token[:]) // never fails
	s.mu.Lock()
	s.mu.tokens[sess.token] = sess
	s.mu.Unlock()
	return sess, nil
}

// forget ends a session for the server, and its workers' connections: that is
// how they learn of it.
func (s *Server) forget(sess *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.mu.tokens, sess.token)
	s.mu.sessions--
	for w := range sess.workers {
		w.fail(fmt.Errorf("the engine's session %d has ended", sess.facts.ID))
	}
}

// serveWorker attaches a worker's process to a session. The connection says
// nothing more: its end means that the worker has gone, and nothing else.
func (c *conn) serveWorker(r *wire.Reader, f wire.Frame) error {
	s := c.srv
	sess, err := s.attach(c, f)
	if err != nil {
		return err
	}
	defer func() {
		s.mu.Lock()
		delete(sess.workers, c)
		s.mu.Unlock()
	}()
	if err := c.welcome(f, sess); err != nil {
		return err
	}
	for {
		if f, err = r.Read(); err != nil {
			return err
		}
		s.count(f.Type)
		if f.Type != wire.TypePing && f.Type != wire.TypeGoodbye {
			err = c.writeError(f.Call, &wire.Error{Code: wire.CodeUnsupported, Message: fmt.Sprintf("%s on an attached connection", f.Type)})
		} else if err = (wire.Empty{}).Decode(f.Body); err == nil {
			err = c.write(wire.AppendFrame(nil, f.Type|wire.ReplyBit, f.Call, wire.Empty{}))
			if f.Type == wire.TypeGoodbye {
				return errGoodbye
			}
		}
		if err != nil {
			return err
		}
	}
}

func (s *Server) attach(c *conn, f wire.Frame) (*session, error) {
	if _, err := wire.Negotiate(f.Body); err != nil {
		return nil, err
	}
	var m wire.Attach
	if err := m.Decode(f.Body); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	sess := s.mu.tokens[m.Token]
	switch {
	case sess == nil:
		return nil, &wire.Error{Code: wire.CodeForbidden, Field: "attach.token", Message: "no session has this token; it ends with its session"}
	case c.peer.uid != sess.conn.peer.uid && c.peer.uid != 0:
		return nil, &wire.Error{Code: wire.CodeForbidden, Message: fmt.Sprintf("user %d may not attach to a session of user %d", c.peer.uid, sess.conn.peer.uid)}
	case len(sess.workers) >= s.opts.WorkersMax:
		return nil, &wire.Error{Code: wire.CodeTooMany, Message: fmt.Sprintf("%d workers are attached, which is the most (workers_max)", s.opts.WorkersMax)}
	}
	sess.workers[c] = struct{}{}
	return sess, nil
}

// welcome answers a hello or attach, with a description of the region that is
// this process's alone.
func (c *conn) welcome(f wire.Frame, sess *session) error {
	lease, err := sess.backend.Attach()
	if err != nil {
		return wire.ErrorOf(fmt.Errorf("attach: %w", err))
	}
	var m wire.Message = &wire.AttachReply{Region: sess.region()}
	if f.Type == wire.TypeHello {
		m = &wire.HelloReply{Region: sess.region(), Node: c.srv.opts.Node, Token: sess.token, Limits: c.srv.limits()}
	}
	err = c.sendRegion(wire.AppendFrame(nil, f.Type|wire.ReplyBit, f.Call, m), lease)
	if err == nil {
		err = c.c.SetDeadline(time.Time{})
	}
	return err
}

func (s *Server) limits() wire.Limits {
	return wire.Limits{FrameMax: wire.FrameMax, LookupKeysMax: wire.LookupKeysMax, ReserveKeysMax: wire.ReserveKeysMax,
		FillsMax: wire.FillsMax, RequestsMax: uint32(s.opts.RequestsMax), WaitsMax: uint32(s.opts.WaitsMax)}
}

func (s *Server) count(t wire.Type) {
	if int(t) < len(s.calls) {
		s.calls[t].Add(1)
	}
}
