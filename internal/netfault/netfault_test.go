package netfault

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// network has a node that tells of each connection its first byte, in the order
// in which they come, and sends all that it hears back.
func network(t *testing.T, f Faults, seed uint64) (*Proxy, <-chan byte) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p, err := Listen("127.0.0.1:0", f, seed)
	if err != nil {
		t.Fatal(err)
	}
	p.Set(func(s *State) { s.To = ln.Addr().String() })
	heard := make(chan byte, 1000)
	p.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			first := []byte{0}
			if _, err := c.Read(first); err == nil {
				heard <- first[0]
			}
			p.wg.Go(func() {
				defer c.Close()
				if _, err := c.Write(first); err == nil {
					_, _ = io.Copy(c, c)
				}
			})
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		p.Close()
	})
	return p, heard
}

func dial(t *testing.T, p *Proxy) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", p.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	return c
}

// echo sends bytes, and returns what comes back until the end or a short quiet.
func echo(t *testing.T, c net.Conn, send []byte, quiet time.Duration) (got []byte, err error) {
	t.Helper()
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		_, _ = c.Write(send)
	}()
	got = make([]byte, 0, len(send))
	for buf := make([]byte, 1<<16); len(got) < len(send) && err == nil; {
		n := 0
		_ = c.SetReadDeadline(time.Now().Add(quiet))
		n, err = c.Read(buf)
		got = append(got, buf[:n]...)
	}
	_ = c.SetDeadline(time.Now())
	<-sent
	return got, err
}

func TestPassesAll(t *testing.T) {
	p, _ := network(t, Faults{Delay: 2 * time.Millisecond}, 1)
	send := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	if got, err := echo(t, dial(t, p), send, 10*time.Second); err != nil || !bytes.Equal(got, send) {
		t.Errorf("%d of %d bytes: %v", len(got), len(send), err)
	}
	if c := p.Counts(); c.Connections != 1 || c.Delayed == 0 || c.Cut+c.Corrupt+c.Stalled+c.Refused+c.Muted+c.Swapped != 0 {
		t.Errorf("%+v", c)
	}
}

// The same seed does the same to the same bytes.
func TestSeed(t *testing.T) {
	send := make([]byte, 1<<20)
	run := func(f Faults, seed uint64) (out [8][]byte, c Counts) {
		p, _ := network(t, f, seed)
		for i := range out {
			out[i], _ = echo(t, dial(t, p), send, 10*time.Second)
		}
		return out, p.Counts()
	}
	f := Faults{Corrupt: 2e-5}
	a, ca := run(f, 7)
	b, cb := run(f, 7)
	other, _ := run(f, 8)
	wrong, same := 0, true
	for i := range a {
		if !bytes.Equal(a[i], b[i]) || len(a[i]) != len(send) {
			t.Errorf("connection %d differs, %d and %d bytes", i, len(a[i]), len(b[i]))
		}
		same = same && bytes.Equal(a[i], other[i])
		wrong += len(a[i]) - bytes.Count(a[i], []byte{0})
	}
	if ca != cb || int64(wrong) > ca.Corrupt || int64(wrong) < ca.Corrupt-2 || wrong < 200 || wrong > 600 || same {
		t.Errorf("%d wrong bytes; %+v, %+v; another seed is the same: %v", wrong, ca, cb, same)
	}
	for n := range uint64(1000) {
		x, y := newFate(All, 7, n), newFate(All, 7, n)
		x.ways[0].begin()
		y.ways[0].begin()
		if x.refuse != y.refuse || x.ways[0].reset != y.ways[0].reset || x.ways[0].stall != y.ways[0].stall {
			t.Fatalf("the fate of connection %d differs", n)
		}
	}
}

// over says that a connection has ended, whichever call heard of the reset.
func over(err error) bool { return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, io.EOF) }

func TestFates(t *testing.T) {
	const patience = 10 * time.Second
	send := make([]byte, 16*span)
	for _, x := range []struct {
		name  string
		f     Faults
		quiet time.Duration // how long to wait for what may never come
		check func(got []byte, err error, c Counts) bool
	}{
		{"refuse", Faults{Refuse: 1}, patience, func(got []byte, err error, c Counts) bool {
			return len(got) == 0 && over(err) && c.Refused == 1
		}},
		{"mute", Faults{Mute: 1}, 500 * time.Millisecond, func(got []byte, err error, c Counts) bool {
			return len(got) == 0 && errors.Is(err, os.ErrDeadlineExceeded) && c.Muted == 1
		}},
		{"cut", Faults{Cut: 1}, patience, func(got []byte, err error, c Counts) bool {
			return len(got) < len(send) && over(err) && c.Cut == 1
		}},
		{"cut in some span", Faults{Cut: 0.5}, patience, func(got []byte, err error, c Counts) bool { return over(err) && c.Cut == 1 }},
		{"stall", Faults{Stall: 1}, 500 * time.Millisecond, func(got []byte, err error, c Counts) bool {
			return len(got) < len(send) && errors.Is(err, os.ErrDeadlineExceeded) && c.Stalled == 1
		}},
	} {
		t.Run(x.name, func(t *testing.T) {
			p, _ := network(t, x.f, 1)
			var got []byte
			c, err := net.Dial("tcp", p.Addr()) // the reset may be faster
			if err == nil {
				defer c.Close()
				got, err = echo(t, c, send, x.quiet)
			}
			if !x.check(got, err, p.Counts()) {
				t.Errorf("%d bytes, %v, %+v", len(got), err, p.Counts())
			}
		})
	}
}

// A held connection comes behind the next one, or alone after a while.
func TestSwap(t *testing.T) {
	p, heard := network(t, Faults{}, 1)
	seed := uint64(0)
	for ; !newFate(Faults{Swap: 0.5}, seed, 0).swap || newFate(Faults{Swap: 0.5}, seed, 1).swap || !newFate(Faults{Swap: 0.5}, seed, 2).swap; seed++ {
	}
	q, err := Listen("127.0.0.1:0", Faults{Swap: 0.5}, seed)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(q.Close)
	q.Set(func(s *State) { s.To = p.state.To })
	for _, name := range []byte{1, 2, 3} {
		if _, err := dial(t, q).Write([]byte{name}); err != nil {
			t.Fatal(err)
		}
	}
	for _, want := range []byte{2, 1, 3} {
		if got := <-heard; got != want {
			t.Errorf("connection %d came, want %d", got, want)
		}
	}
	if c := q.Counts(); c.Swapped != 1 {
		t.Errorf("%+v", c)
	}
}

// What is told: nothing passes, an end neither, until it may; or all is cut.
func TestState(t *testing.T) {
	p, heard := network(t, Faults{}, 1)
	c := dial(t, p)
	one := []byte{1}
	p.Set(func(s *State) { s.Stop[Away] = true })
	_, _ = c.Write(one)
	<-heard
	_ = c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if n, err := c.Read(one); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%d, %v", n, err)
	}
	p.Set(func(s *State) { s.Stop[Away] = false })
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	if n, err := c.Read(one); n != 1 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	p.Cut()
	if _, err := c.Read(one); !over(err) {
		t.Errorf("%v", err)
	}
	p.Set(func(s *State) { s.Mute = true })
	m := dial(t, p)
	_ = m.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if _, err := m.Read(one); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%v", err)
	}
	p.Set(func(s *State) { s.Down = true })
	if c, err := net.Dial("tcp", p.Addr()); err == nil {
		if _, err := c.Read(one); !over(err) {
			t.Errorf("it is not down: %v", err)
		}
		_ = c.Close()
	}
	_ = m.Close()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		p.mu.Lock()
		n := len(p.pairs)
		p.mu.Unlock()
		if n == 0 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%d connections are left", n)
		}
	}
}

func TestParse(t *testing.T) {
	for text, want := range map[string]Faults{
		"cut=0.01,delay=5ms,corrupt=1e-07,stall=0.005": {Cut: 0.01, Delay: 5 * time.Millisecond, Corrupt: 1e-7, Stall: 0.005},
		"all": All,
	} {
		f, err := Parse(text)
		if err != nil || f != want {
			t.Errorf("%q: %+v, %v", text, f, err)
		}
		if g, err := Parse(f.String()); err != nil || g != f {
			t.Errorf("%q: %+v, %v", f, g, err)
		}
	}
	if f, err := Parse("all,swap=0"); err != nil || f.Swap != 0 || f.Cut != All.Cut {
		t.Errorf("%+v, %v", f, err)
	}
	for _, text := range []string{"", "cut", "cut=2", "cut=NaN", "cut=-1", "delay=5", "delay=-1s", "delay=1h", "all=1", "cut=0.1,", "loss=0.1"} {
		if f, err := Parse(text); err == nil {
			t.Errorf("%q: %+v", text, f)
		}
	}
}
