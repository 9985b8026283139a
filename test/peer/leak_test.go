package peer

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/client"
	"github.com/terrace-kv/terrace/internal/netfault"
)

// pair is a producer behind a proxy, and a consumer.
type pair struct {
	t    *testing.T
	net  *netfault.Proxy
	a, b *node
	ks   []block.Key
}

func newPair(t *testing.T, args ...string) *pair {
	p := &pair{t: t, net: newProxy(t), ks: keys("pair", 100)}
	p.a = behind(t, p.net, "a", "127.0.0.1", args...)
	p.b = start(t, "b", "127.0.0.2", spec(small), args...)
	p.a.has(p.ks)
	return p
}

// loading has the consumer begin to load, over a slow network, and returns in
// the middle of it.
func (p *pair) loading() *client.Request {
	p.t.Helper()
	p.net.Set(func(s *netfault.State) { s.Pause[netfault.Away] = 5 * time.Millisecond })
	r := p.b.request("victim", from(p.a, source, "kv-victim"))
	before := p.b.status().Peers.BlocksIn
	p.look(r)
	eventually(p.t, bound(), "the middle of a load", func() error {
		p.look(r)
		if s := p.b.status().Peers; s.BlocksIn == before || s.Rounds == 0 {
			return fmt.Errorf("%d blocks, %d rounds", s.BlocksIn-before, s.Rounds)
		}
		return nil
	})
	return r
}

// look asks, and does not wait for the answer.
func (p *pair) look(r *client.Request) {
	p.t.Helper()
	if _, err := r.Lookup(context.Background(), [][]block.Key{p.ks}, client.LookupOptions{}); err != nil {
		p.t.Fatal(err)
	}
}

// nothing checks that nothing is left, and that the same id is as good as new.
func (p *pair) nothing() {
	p.t.Helper()
	p.net.Set(func(s *netfault.State) { s.Stop, s.Pause = [2]bool{}, [2]time.Duration{} })
	empty(p.t, p.a, p.b)
	p.forget()
	asked := p.a.status().Peers.Lookups
	eventually(p.t, bound(), "the id used again", func() error {
		r := p.b.request("victim", from(p.a, source, "kv-victim"))
		got, took := p.b.load(r, p.ks)
		p.b.finish(r)
		if got != len(p.ks) {
			return fmt.Errorf("%d of %d blocks after %v; %+v", got, len(p.ks), took, p.b.status().Peers.Peers)
		}
		return nil
	})
	if n := p.a.status().Peers.Lookups; n == asked {
		p.t.Error("the peer was not probed afresh")
	}
	empty(p.t, p.a, p.b)
	p.forget()
}

// forget has the consumer lose what it has loaded.
func (p *pair) forget() {
	p.t.Helper()
	if done, err := p.b.c.Reset(context.Background(), bound()); err != nil || !done {
		p.t.Fatalf("reset: %v, %v", done, err)
	}
}

// TestFinishedRequestLeavesNothing: whatever becomes of a load whose request has
// finished, no table has an entry afterwards, on either side, and the same id
// is served as if it had never been used.
func TestFinishedRequestLeavesNothing(t *testing.T) {
	t.Parallel()
	p := newPair(t, "--set", "peers.timeouts.abort=1s", "--set", "peers.timeouts.load=2s", "--set", "core.lookup_timeout=3s")
	a, b := p.a, p.b
	step := func(name string, f func(t *testing.T)) {
		t.Run(name, func(t *testing.T) {
			p.t, p.a.t, p.b.t = t, t, t
			f(t)
			p.nothing()
		})
	}
	defer func() { p.t, p.a.t, p.b.t = t, t, t }()
	step("in flight", func(t *testing.T) {
		b.finish(p.loading())
	})
	step("cancellation fails at once", func(t *testing.T) {
		r := p.loading()
		p.net.Cut()
		b.finish(r)
	})
	step("and so does the peer right after it", func(t *testing.T) {
		b.finish(p.loading())
		p.net.Cut()
	})
	step("outcome buffered", func(t *testing.T) {
		r := b.request("victim", from(a, source, "kv-victim"))
		eventually(t, bound(), "all blocks", func() error {
			p.look(r)
			if s := b.status(); s.Tables.Jobs > 0 || s.Peers.BlocksIn == 0 {
				return errors.New("they are loading")
			}
			return nil
		})
		b.finish(r)
	})
	step("session over before the answer to the abort", func(t *testing.T) {
		r := p.loading()
		p.net.Set(func(s *netfault.State) { s.Stop = [2]bool{true, true} })
		b.finish(r)
		eventually(t, bound(), "abort", func() error {
			if s := b.status().Peers; s.Aborts != 1 {
				return fmt.Errorf("%+v", *s)
			}
			return nil
		})
		p.net.Cut()
	})
	step("no answer to the abort", func(t *testing.T) {
		r := p.loading()
		p.net.Set(func(s *netfault.State) { s.Stop = [2]bool{true, true} })
		b.finish(r)
		eventually(t, bound(), "end of the session", func() error {
			if s := b.status().Peers; s.Aborts != 0 {
				return errors.New("it is waited for")
			}
			return nil
		})
		p.net.Set(func(s *netfault.State) { s.Stop = [2]bool{} })
	})
	step("late blocks", func(t *testing.T) {
		r := p.loading()
		p.net.Set(func(s *netfault.State) { s.Stop[netfault.Away] = true })
		b.finish(r)
		p.net.Set(func(s *netfault.State) { s.Stop[netfault.Away] = false }) // they come now
	})
	step("load timed out", func(t *testing.T) {
		r := p.loading()
		p.net.Set(func(s *netfault.State) { s.Stop[netfault.Away] = true })
		if got, took := b.load(r, p.ks); got == len(p.ks) || took > 10*time.Second {
			t.Errorf("%d blocks after %v", got, took)
		}
		p.net.Set(func(s *netfault.State) { s.Stop[netfault.Away] = false })
		b.finish(r)
	})
	step("engine gone", func(t *testing.T) {
		p.loading()
		_ = b.c.Close()
		c, err := client.Dial(t.Context(), client.Options{Socket: b.socket, Spec: spec(small)})
		if err != nil {
			t.Fatal(err)
		}
		b.c = c
	})
	step("many aborts", func(t *testing.T) {
		n := 10_000
		if raceEnabled {
			n = 1000
		}
		seed := rand.Uint64()
		rng := rand.New(rand.NewPCG(seed, 1))
		t.Logf("seed %d", seed)
		pre := a.request("p", decoder(a, "kv-many"))
		a.store(pre, 0, p.ks)
		for range n {
			role, id := source, "kv-many"
			switch rng.IntN(3) {
			case 0: // what is there is being sent
				role = prefiller
			case 1: // nobody has heard of it
				role, id = prefiller, "kv-unheard"
			}
			r := b.request("victim", from(a, role, id))
			for range 1 + rng.IntN(2) {
				p.look(r)
			}
			b.finish(r)
		}
		a.finish(pre)
		// One of them may have fetched it all, and then it is over. Otherwise this
		// one ends it, long before its bound.
		p.forget()
		d := b.request("d", from(a, prefiller, "kv-many"))
		if got, _ := b.load(d, p.ks); got != len(p.ks) && a.status().Peers.Refused["ended"] == 0 {
			t.Errorf("%d of %d blocks", got, len(p.ks))
		}
		b.finish(d)
	})
	step("producer's engine aborts", func(t *testing.T) {
		pre := a.request("p", decoder(a, "kv-gone"))
		d := b.request("d", from(a, prefiller, "kv-gone"))
		got := b.start(d, keys("gone", 20))
		b.busy()
		_ = a.c.Close()
		if x := within(t, got, 10*time.Second); x.got != 0 {
			t.Errorf("%d blocks", x.got)
		}
		_ = pre
		b.finish(d)
		c, err := client.Dial(t.Context(), client.Options{Socket: a.socket, Spec: spec(small)})
		if err != nil {
			t.Fatal(err)
		}
		a.c = c
	})
	if s := b.status().Peers; s.Violations+a.status().Peers.Violations != 0 || s.Corrupt != 0 {
		t.Errorf("%+v", *s)
	}
}

// A producer that is killed in mid-load and started again, in the same place, is
// another run of the same node.
func TestKilledInMidLoad(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	r := p.loading()
	p.a.kill()
	if got, took := p.b.load(r, p.ks); got == len(p.ks) || took > 5*time.Second {
		t.Errorf("%d blocks of a killed node after %v", got, took)
	}
	p.b.finish(r)
	empty(t, p.b)
	p.a = behind(t, p.net, "a", "127.0.0.1")
	p.a.has(p.ks)
	p.nothing()
}

// Who speaks no protocol is shown the door, and nobody else notices.
func TestGarbage(t *testing.T) {
	t.Parallel()
	a, b := start(t, "a", "127.0.0.1", spec(small)), start(t, "b", "127.0.0.2", spec(small))
	ks := keys("x", 50)
	a.has(ks)
	for i, text := range []string{"GET / HTTP/1.1\r\nHost: a\r\n\r\n", "\x00\x00\x00\x00", "\xff\xff\xff\xff\xff\xff", strings.Repeat("x", 1<<16), ""} {
		c, err := net.Dial("tcp", a.peers)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = c.Write([]byte(text))
		if text == "" { // half open: it stays, and costs nothing
			defer c.Close()
			continue
		}
		_ = c.SetReadDeadline(time.Now().Add(bound()))
		if _, err := readAll(c); err != nil && errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%d: not closed: %v", i, err)
		}
		_ = c.Close()
	}
	r := b.request("r", from(a, source, "kv"))
	if got, _ := b.load(r, ks); got != 50 {
		t.Errorf("%d of 50 blocks", got)
	}
	b.finish(r)
	empty(t, a, b)
	eventually(t, bound(), "log", func() error {
		if log := a.stderr.String(); !strings.Contains(log, "a connection was refused") || !strings.Contains(log, "127.0.0.1") {
			return errors.New(log)
		}
		return nil
	})
}

func readAll(c net.Conn) (n int, err error) {
	buf := make([]byte, 4096)
	for {
		m, err := c.Read(buf)
		n += m
		if err != nil {
			if e := net.Error(nil); errors.As(err, &e) && e.Timeout() {
				return n, context.DeadlineExceeded
			}
			return n, nil
		}
	}
}
