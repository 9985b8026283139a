package netfault

import (
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Directions of a connection.
const (
	Towards = 0 // the node behind the proxy
	Away    = 1
)

// State is what a network is told to do; the zero value passes everything.
type State struct {
	To    string           // host:port of the node behind it
	Down  bool             // new connections are reset
	Mute  bool             // new connections are accepted and never answered
	Stop  [2]bool          // nothing passes, ends of connections neither, and all stay open
	Pause [2]time.Duration // after each piece of pieceBytes, at most
}

const (
	pieceBytes = 16 << 10
	pieces     = 16 // of one way that are on their way
)

// Proxy is one. Its methods may be called by anybody.
//
// Goroutines: one accepts, one connects each connection, two pass each way.
// Close waits for all of them.
type Proxy struct {
	ln     net.Listener
	faults Faults
	seed   uint64
	wg     sync.WaitGroup
	ctx    context.Context
	stop   context.CancelFunc

	mu      sync.Mutex
	state   State
	changed chan struct{} // closed by the next Set
	pairs   map[*pair]struct{}
	counts  Counts
}

// pair is one connection on both sides of the proxy.
type pair struct {
	p       *Proxy
	in, out net.Conn // out is nil until it is connected, and for one that is mute
	ended   chan struct{}
	over    bool // ended is closed; under p.mu, as stalled
	stalled bool
	held    bool // it waits for the next one
	eofs    atomic.Int32
}

// Listen begins to accept on an address. Connections are reset until Set has
// said where to pass them.
func Listen(addr string, f Faults, seed uint64) (*Proxy, error) {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("listen for a bad network: %w", err)
	}
	p := &Proxy{ln: ln, faults: f, seed: seed, changed: make(chan struct{}), pairs: map[*pair]struct{}{}}
	p.ctx, p.stop = context.WithCancel(context.Background())
	p.wg.Go(p.accept)
	return p, nil
}

// Addr is where it listens.
func (p *Proxy) Addr() string { return p.ln.Addr().String() }

// Set changes what it does.
func (p *Proxy) Set(f func(s *State)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f(&p.state)
	close(p.changed)
	p.changed = make(chan struct{})
}

// Cut resets all connections.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for x := range p.pairs {
		x.endLocked(true)
	}
}

// Counts may be called at any time.
func (p *Proxy) Counts() Counts {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.counts
}

// Close resets all connections and waits. It is called once.
func (p *Proxy) Close() {
	p.stop()
	_ = p.ln.Close()
	p.Cut()
	p.wg.Wait()
}

func (p *Proxy) accept() {
	var last *pair // the one that was held last
	var next chan struct{}
	for n := uint64(0); ; n++ {
		in, err := p.ln.Accept()
		if err != nil {
			return // it is closed
		}
		f := newFate(p.faults, p.seed, n)
		x := &pair{p: p, in: in, ended: make(chan struct{})}
		p.mu.Lock()
		p.counts.Connections++
		p.pairs[x] = struct{}{}
		s := &p.state
		mute := s.Mute || f.mute
		switch {
		case p.ctx.Err() != nil || s.Down || s.To == "":
			x.endLocked(true)
		case f.refuse:
			p.counts.Refused++
			x.endLocked(true)
		case mute:
			p.counts.Muted++
		}
		over, to := x.over, s.To
		behind := last != nil && last.held
		x.held = f.swap && !behind
		p.mu.Unlock()
		switch {
		case over:
		case mute:
			p.wg.Go(x.ignore)
		default:
			var wait, release chan struct{}
			if behind {
				last, release = nil, next
			} else if f.swap {
				wait = make(chan struct{})
				last, next = x, wait
			}
			p.wg.Go(func() { x.connect(f, to, wait, release) })
		}
	}
}

// connect passes a connection on: when wait is closed or swapMax is over, if wait
// is not nil. Then it closes release, if that is not nil.
func (x *pair) connect(f *fate, to string, wait, release chan struct{}) {
	p := x.p
	if wait != nil {
		t := time.NewTimer(swapMax)
		select {
		case <-wait:
			p.count(func(c *Counts) { c.Swapped++ })
		case <-t.C:
		case <-x.ended:
		}
		t.Stop()
		p.mu.Lock()
		x.held = false
		p.mu.Unlock()
	}
	var d net.Dialer
	out, err := d.DialContext(p.ctx, "tcp", to)
	if release != nil {
		close(release)
	}
	p.mu.Lock()
	if err == nil && x.over {
		_ = out.Close()
	} else if err != nil {
		x.endLocked(true)
	}
	if x.out = out; !x.over {
		p.wg.Go(func() { x.pass(Towards, x.in, x.out, f.ways[Towards]) })
		p.wg.Go(func() { x.pass(Away, x.out, x.in, f.ways[Away]) })
	}
	p.mu.Unlock()
}

func (p *Proxy) count(f func(c *Counts)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f(&p.counts)
}

func (x *pair) stall() {
	x.p.mu.Lock()
	defer x.p.mu.Unlock()
	if !x.stalled {
		x.stalled = true
		x.p.counts.Stalled++
	}
}

func (x *pair) end(reset bool) {
	x.p.mu.Lock()
	defer x.p.mu.Unlock()
	x.endLocked(reset)
}

func (x *pair) endLocked(reset bool) {
	if x.over {
		return
	}
	x.over = true
	close(x.ended)
	delete(x.p.pairs, x)
	for _, c := range []net.Conn{x.in, x.out} {
		if t, ok := c.(*net.TCPConn); ok {
			if reset {
				_ = t.SetLinger(0)
			}
			_ = t.Close()
		}
	}
}

// ignore reads until the other side has had enough.
func (x *pair) ignore() {
	buf := make([]byte, pieceBytes)
	for {
		if _, err := x.in.Read(buf); err != nil {
			x.end(false)
			return
		}
	}
}

type piece struct {
	bytes []byte
	due   time.Time
}

// pass carries one way: what it reads here another goroutine writes when it is
// due.
func (x *pair) pass(way int, from, to net.Conn, f *wayFate) {
	queue := make(chan piece, pieces)
	x.p.wg.Go(func() { x.write(way, to, queue, f) })
	defer close(queue)
	for {
		buf := make([]byte, pieceBytes)
		n, err := from.Read(buf)
		if n > 0 {
			late := f.late()
			if late > 0 {
				x.p.count(func(c *Counts) { c.Delayed++ })
			}
			select {
			case queue <- piece{buf[:n], time.Now().Add(late)}:
			case <-x.ended:
				return
			}
		}
		if err != nil {
			if x.eofs.Add(1) == 2 { // nobody is there, whether or not that may pass
				x.end(false)
			}
			return
		}
	}
}

func (x *pair) write(way int, to net.Conn, queue <-chan piece, f *wayFate) {
	defer x.end(false)
	for q := range queue {
		if !x.sleep(time.Until(q.due)) {
			return
		}
		for b := q.bytes; len(b) > 0; {
			n, reset, stall := f.cut(b)
			wrong := f.touch(b[:n])
			pause, ok := x.open(way)
			if !ok {
				return
			}
			x.p.count(func(c *Counts) { c.Corrupt += wrong })
			if _, err := to.Write(b[:n]); err != nil || !x.sleep(pause) {
				return
			}
			b = b[n:]
			switch {
			case reset:
				x.p.count(func(c *Counts) { c.Cut++ })
				x.end(true)
				return
			case stall:
				x.stall()
			}
		}
	}
	x.open(way) // the end of a connection waits as well
}

// open waits while nothing may pass.
func (x *pair) open(way int) (pause time.Duration, ok bool) {
	for {
		x.p.mu.Lock()
		stop, pause, changed := x.stalled || x.p.state.Stop[way], x.p.state.Pause[way], x.p.changed
		x.p.mu.Unlock()
		if !stop {
			return pause, true
		}
		select {
		case <-changed:
		case <-x.ended:
			return 0, false
		}
	}
}

func (x *pair) sleep(d time.Duration) bool {
	if d <= 0 {
		return true
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-x.ended:
		return false
	}
}
