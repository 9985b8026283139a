package peer

import (
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// proxy is the network in front of a node: it stands where the node says that
// it can be reached.
type proxy struct {
	t    *testing.T
	ln   net.Listener
	wg   sync.WaitGroup
	mu   sync.Mutex
	cond *sync.Cond
	to   string
	all  map[net.Conn]struct{}
	down bool             // connections are refused
	stop [2]bool          // nothing passes: towards the node, and from it
	rate [2]time.Duration // pause after each piece, the same ways
	over bool
}

// Directions of a proxy.
const (
	towards = 0 // the node behind it
	away    = 1
)

func newProxy(t *testing.T, host string) *proxy {
	t.Helper()
	ln, err := net.Listen("tcp", host+":0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{t: t, ln: ln, all: map[net.Conn]struct{}{}}
	p.cond = sync.NewCond(&p.mu)
	p.wg.Go(p.accept)
	t.Cleanup(func() {
		p.mu.Lock()
		p.over = true
		p.mu.Unlock()
		_ = ln.Close()
		p.cut()
		p.wg.Wait()
	})
	return p
}

func (p *proxy) addr() string { return p.ln.Addr().String() }

func (p *proxy) accept() {
	for {
		in, err := p.ln.Accept()
		if err != nil {
			return
		}
		p.mu.Lock()
		to, down := p.to, p.down
		p.mu.Unlock()
		var out net.Conn
		if !down {
			out, err = net.Dial("tcp", to)
		}
		if down || err != nil {
			_ = in.Close()
			continue
		}
		p.mu.Lock()
		p.all[in], p.all[out] = struct{}{}, struct{}{}
		p.mu.Unlock()
		p.wg.Go(func() { p.pass(towards, in, out) })
		p.wg.Go(func() { p.pass(away, out, in) })
	}
}

func (p *proxy) pass(way int, from, to net.Conn) {
	defer to.Close()
	defer from.Close()
	buf := make([]byte, 16<<10)
	for {
		n, err := from.Read(buf)
		p.mu.Lock()
		for p.stop[way] && !p.over {
			p.cond.Wait()
		}
		pause := p.rate[way]
		_, known := p.all[from]
		p.mu.Unlock()
		if !known {
			return
		}
		time.Sleep(pause)
		if n > 0 {
			if _, e := to.Write(buf[:n]); e != nil {
				return
			}
		}
		if err == io.EOF || err != nil {
			return
		}
	}
}

// set changes the network.
func (p *proxy) set(f func(p *proxy)) {
	p.mu.Lock()
	f(p)
	p.mu.Unlock()
	p.cond.Broadcast()
}

// cut breaks all connections.
func (p *proxy) cut() {
	p.mu.Lock()
	for c := range p.all {
		if t, ok := c.(*net.TCPConn); ok {
			_ = t.SetLinger(0)
		}
		_ = c.Close()
	}
	clear(p.all)
	p.stop = [2]bool{}
	p.mu.Unlock()
	p.cond.Broadcast()
}
