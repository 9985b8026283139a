package client

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/wire"
	"golang.org/x/sys/unix"
)

// Token lets a worker process attach to its engine's session.
type Token = wire.Token

// Limits are what the node allows a session.
type Limits = wire.Limits

// Info is what the node said of a session.
type Info struct {
	RegionInfo
	Session     uint64
	Node        string // the node's version
	Fingerprint block.Fingerprint
	Token       Token
	Limits      Limits
}

// Client is an engine's connection to its node. All methods may be called
// from any goroutine.
type Client struct {
	opts   Options
	cancel context.CancelFunc
	wg     sync.WaitGroup
	closed chan struct{} // closed when Close has begun

	mu struct {
		sync.Mutex
		s       *session      // nil: there is none now
		err     error         // why there is none
		changed chan struct{} // closed when s is set
		closing bool
	}
}

// Dial connects and greets. It tries once; after that the Client keeps itself
// connected. The caller owns the Client, and closes it.
//
// Errors say what to do: is the node running, may this user use it, does the
// namespace contradict what the node has under its name.
func Dial(ctx context.Context, o Options) (*Client, error) {
	if o.Socket == "" {
		path, err := wire.DefaultSocket()
		if err != nil {
			return nil, err
		}
		o.Socket = path
	}
	if err := o.Validate(); err != nil {
		return nil, err
	}
	o.EnsureDefaults()
	o.Spec.Groups = append([]block.Group(nil), o.Spec.Groups...)
	s, err := open(ctx, &o, nil)
	if err != nil {
		return nil, err
	}
	c := &Client{opts: o, closed: make(chan struct{})}
	c.mu.s, c.mu.changed = s, make(chan struct{})
	ctx, c.cancel = context.WithCancel(context.Background())
	c.wg.Go(func() { c.keep(ctx, s) })
	return c, nil
}

// keep is the client's goroutine: it waits for the session's end, cleans up
// after it, and opens the next.
func (c *Client) keep(ctx context.Context, s *session) {
	expect := s.hello.Fingerprint
	pause := c.opts.ReconnectMin // before the next attempt
	for s != nil {
		opened := time.Now()
		<-s.lost
		err := s.reason()
		c.set(nil, err)
		s.reader.Wait()
		s.orphans.Wait()
		_ = s.region.Close() // fails only if it was closed before; waits for views: nothing of the old session may be mapped when we greet
		s.file.Close()

		// A session that was lost as soon as it was there gives no reason to
		// hurry: pauses go on growing.
		if time.Since(opened) >= c.opts.ReconnectMax {
			pause = 0
		}
		for s = nil; s == nil && ctx.Err() == nil; {
			if pause > 0 {
				select {
				case <-ctx.Done():
				case <-time.After(pause/2 + rand.N(pause)):
				}
			}
			pause = min(max(2*pause, c.opts.ReconnectMin), c.opts.ReconnectMax)
			if s, err = open(ctx, &c.opts, &expect); ctx.Err() == nil || s != nil {
				c.set(s, err)
			}
		}
	}
}

func (c *Client) set(s *session, err error) {
	c.mu.Lock()
	if err != nil && !errors.Is(err, ErrSessionLost) {
		err = fmt.Errorf("%w: %w", ErrSessionLost, err)
	}
	c.mu.s, c.mu.err = s, err
	state := State{Err: err}
	if s != nil {
		state.Epoch = s.region.info.Epoch
		close(c.mu.changed)
		c.mu.changed = make(chan struct{})
		if c.mu.closing { // it came too late for Close to see it
			s.fail(ErrClosed)
		}
	}
	closing := c.mu.closing
	c.mu.Unlock()
	if c.opts.OnState != nil && !closing {
		c.opts.OnState(state)
	}
}

// session is the one that there is now.
func (c *Client) session() (*session, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.mu.closing:
		return nil, ErrClosed
	case c.mu.s == nil:
		return nil, c.mu.err
	}
	return c.mu.s, nil
}

// WaitReady waits until there is a session.
func (c *Client) WaitReady(ctx context.Context) error {
	for {
		c.mu.Lock()
		s, err, changed := c.mu.s, c.mu.err, c.mu.changed
		c.mu.Unlock()
		if s != nil {
			if err = s.reason(); err == nil {
				return nil
			}
		}
		select {
		case <-changed:
		case <-c.closed:
			return ErrClosed
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ctx.Err(), err)
		}
	}
}

// Close says goodbye and ends the session: when it returns, the node has given
// back all that this engine held, unless it does not answer, and nothing is
// mapped any more. It waits for View and Write functions that run, so it must not be
// called from one. A second call waits for the first.
func (c *Client) Close() error {
	c.mu.Lock()
	first, s := !c.mu.closing, c.mu.s
	if first {
		c.mu.closing = true
		close(c.closed)
	}
	c.mu.Unlock()
	if first {
		c.cancel() // first, so that nothing is opened after the goodbye
		if s != nil {
			_ = s.do(context.Background(), time.Second, wire.TypeGoodbye, wire.Empty{}, wire.Empty{})
			s.fail(ErrClosed)
		}
	}
	c.wg.Wait()
	return nil
}

// Info is what the node said of the session, or ErrSessionLost.
func (c *Client) Info() (Info, error) {
	s, err := c.session()
	if err != nil {
		return Info{}, err
	}
	h := &s.hello
	return Info{RegionInfo: s.region.info, Session: h.Session, Node: h.Node, Fingerprint: h.Fingerprint, Token: h.Token, Limits: h.Limits}, nil
}

// File is the session's descriptor of the region, for a child process to
// inherit and map with MapInherited. It is the caller's to close; while it is open, the
// node counts this engine as able to write.
func (c *Client) File() (*os.File, error) {
	s, err := c.session()
	if err != nil {
		return nil, err
	}
	if err := s.region.enter(); err != nil { // the file is not closed meanwhile
		return nil, err
	}
	defer s.region.leave()
	fd, err := unix.FcntlInt(s.file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate the region's descriptor: %w", err)
	}
	return os.NewFile(uintptr(fd), "terrace region"), nil
}

// View, Write, ReadInto and Verify reach blocks in the region of the session
// that there is now; see Region.

// View gives fn the bytes of a leased block to read; see Region.View.
func (c *Client) View(l Lease, fn func(b []byte) error) error {
	s, err := c.session()
	if err != nil {
		return err
	}
	return s.region.View(l, fn)
}

// Write gives fn the bytes of a granted slot to fill; see Region.Write.
func (c *Client) Write(g Grant, fn func(b []byte) error) error {
	s, err := c.session()
	if err != nil {
		return err
	}
	return s.region.Write(g, fn)
}

// ReadInto copies a leased block to dst; see Region.ReadInto.
func (c *Client) ReadInto(l Lease, dst []byte) error {
	s, err := c.session()
	if err != nil {
		return err
	}
	return s.region.ReadInto(l, dst)
}

// Verify compares a leased block with its checksum; see Region.Verify.
func (c *Client) Verify(l Lease) error {
	s, err := c.session()
	if err != nil {
		return err
	}
	return s.region.Verify(l)
}

// Reset drops every block from the primary: none is a Hit from here on. It
// waits up to wait until all I/O that was in flight is over, and says whether
// it is. Secondary tiers keep what they have.
func (c *Client) Reset(ctx context.Context, wait time.Duration) (done bool, err error) {
	s, err := c.session()
	if err != nil {
		return false, err
	}
	ms, err := millis(wait)
	if err != nil {
		return false, err
	}
	var out wire.ResetReply
	err = s.do(ctx, c.opts.CallTimeout+wait, wire.TypeReset, &wire.Reset{WaitMS: ms}, &out)
	return out.Done, err
}

// Status is the node's account of itself, as JSON.
func (c *Client) Status(ctx context.Context) ([]byte, error) {
	s, err := c.session()
	if err != nil {
		return nil, err
	}
	var out wire.StatusReply
	err = s.do(ctx, c.opts.CallTimeout, wire.TypeStatus, wire.Empty{}, &out)
	return out.JSON, err
}

// Ping asks whether the node answers.
func (c *Client) Ping(ctx context.Context) error {
	s, err := c.session()
	if err != nil {
		return err
	}
	return s.do(ctx, c.opts.CallTimeout, wire.TypePing, wire.Empty{}, wire.Empty{})
}

// millis rounds up, so that a short wait is not none.
func millis(d time.Duration) (uint32, error) {
	if d < 0 || d > wire.WaitMSMax*time.Millisecond {
		return 0, fmt.Errorf("%w: wait of %v, 0 to %v are allowed", ErrInvalid, d, wire.WaitMSMax*time.Millisecond)
	}
	return uint32((d + time.Millisecond - 1) / time.Millisecond), nil
}
