package peer

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/terrace-kv/terrace"
	"github.com/terrace-kv/terrace/client"
	nodes "github.com/terrace-kv/terrace/internal/node"
)

const (
	othersBlocks  = 32   // of a request
	othersPrompts = 40   // that the well node has, and the bad source
	ownPrompts    = 8    // that the node keeps for the taker, which has room for some
	ownPrompt     = 2000 // the first of these
	badPrompt     = 1000 // the first of the latter
	window        = time.Second
	windows       = 5                     // with the fault, and as many without
	pesterers     = 4                     // requests at a time that load from the bad peer, and that it makes
	pesterPause   = 20 * time.Millisecond // between those of each
	dialsPerSec   = 100                   // of a peer in a loop without a pause worth the name
	slowRate      = 1 << 20
	garbageRate   = 2 << 20 // bytes per second and connection
)

// trouble is a node that loads from one that is well. It also loads from a bad
// source, and a bad taker loads from it.
type trouble struct {
	*testing.B
	well, node    *node
	source, taker *node
	toSource      string // where the node reaches it
	toNode        string // where the taker reaches the node
	loads         int    // from the well one
	asked         atomic.Int64
}

// BenchmarkOthers measures the requests of a node to a peer that is well, one
// after the other, while another peer is not, and by turns without that.
func BenchmarkOthers(b *testing.B) {
	for _, f := range []struct {
		name  string
		proxy func(dst, src net.Conn) // between the node and the bad ones; nil: none
		begin func(x *trouble) (end func())
		seen  func(p *nodes.PeersStatus) bool // what the node must have noticed
	}{
		// They stop in mid-load, are found dead within the window, and are asked again and again.
		{"stopped", nil, func(x *trouble) func() {
			end := x.pester()
			time.Sleep(20 * time.Millisecond)
			x.signal(syscall.SIGSTOP)
			return func() {
				x.signal(syscall.SIGCONT)
				end()
			}
		}, func(p *nodes.PeersStatus) bool { return p.Deaths > 0 && p.FastFails > 0 }},
		// They read and send a mebibyte a second and connection.
		{"slow", func(dst, src net.Conn) { pump(dst, src, slowRate, false) }, (*trouble).pester,
			func(p *nodes.PeersStatus) bool { return p.BlocksOut > 0 && p.Deaths == 0 }},
		// Of what they say a byte is wrong in each 16 KiB, and somebody says nothing else.
		{"garbage", func(dst, src net.Conn) { pump(dst, src, garbageRate, true) }, func(x *trouble) func() {
			one, two := x.pester(), x.dials(func(c net.Conn) {
				junk := make([]byte, 1024)
				for i := range junk {
					junk[i] = byte(rand.Uint32())
				}
				_, _ = c.Write(junk)
			})
			return func() { one(); two() }
		}, func(p *nodes.PeersStatus) bool { return p.Corrupt > 0 && p.FastFails > 0 }},
		// Somebody connects and is gone again.
		{"dials", nil, func(x *trouble) func() { return x.dials(func(net.Conn) {}) }, nil},
	} {
		b.Run(f.name, func(b *testing.B) {
			const prompt = othersBlocks * blockBytes
			const size = othersPrompts * prompt
			x := &trouble{B: b}
			x.well = startNode(b, childArgs{Node: "well", Primary: size * 2})
			x.node = startNode(b, childArgs{Node: "node", Primary: size*3/4 + ownPrompts*prompt, Ping: window / 10})
			x.source = startNode(b, childArgs{Node: "source", Primary: size * 2})
			x.taker = startNode(b, childArgs{Node: "taker", Primary: (ownPrompts - 2) * prompt})
			for i := range othersPrompts {
				x.well.store(b, i, othersBlocks)
				x.source.store(b, badPrompt+i, othersBlocks)
			}
			for i := range ownPrompts {
				x.node.store(b, ownPrompt+i, othersBlocks)
				if _, _, err := x.node.lookup(b.Context(), client.NoLimits(), keys(ownPrompt+i, othersBlocks)); err != nil { // pinned from now on
					b.Fatal(err)
				}
			}
			if x.toSource, x.toNode = x.source.addr, x.node.addr; f.proxy != nil {
				x.toSource, x.toNode = x.proxy(x.toSource, f.proxy), x.proxy(x.toNode, f.proxy)
			}
			var without, with []time.Duration
			x.measure(nil)
			for range windows {
				x.measure(&without)
				end := f.begin(x)
				x.measure(&with)
				end()
			}
			p := x.status()
			ill := p.BlocksIn - int64(x.loads*othersBlocks) // from the bad source
			b.Logf("blocks in %d, out %d, corrupt %d; violations %d, deaths %d, fast failures %d", ill, p.BlocksOut, p.Corrupt, p.Violations, p.Deaths, p.FastFails)
			if ill < 0 || f.seen != nil && !f.seen(p) {
				b.Errorf("something was not as it should be: %+v", *p)
			}
			for _, q := range []struct {
				name string
				q    float64
			}{{"p50", 0.5}, {"p99", 0.99}} {
				a, w := quantile(without, q.q), quantile(with, q.q)
				b.ReportMetric(float64(a)/1e3, q.name+"-µs")
				b.ReportMetric(float64(w)/float64(a), q.name+"-ratio")
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}

// measure loads from the well node for a window.
func (x *trouble) measure(into *[]time.Duration) {
	for end := time.Now().Add(window); time.Now().Before(end); {
		x.loads++
		i := x.loads
		took := x.node.load(x.B, from(x.B, x.well.addr, client.PeerProbe, fmt.Sprint("kv-", i)), keys(i%othersPrompts, othersBlocks), false)
		if into != nil {
			*into = append(*into, took)
		}
	}
}

func (x *trouble) signal(s os.Signal) {
	_, _ = x.source.cmd.Process.Signal(s), x.taker.cmd.Process.Signal(s)
}

func (x *trouble) status() *nodes.PeersStatus {
	var s terrace.Status
	text, err := x.node.engine.Status(x.Context())
	if err == nil {
		err = json.Unmarshal(text, &s)
	}
	if err != nil {
		x.Fatal(err)
	}
	return s.Peers
}

// pester has the node load from the source, and the taker from it, until the
// end: of what they have the asker has the least recent no more.
func (x *trouble) pester() (end func()) {
	ctx, cancel := context.WithCancel(x.Context())
	var wg sync.WaitGroup
	loop := func(n *node, of string, first, prompts int) {
		for ctx.Err() == nil {
			i := int(x.asked.Add(1))
			r, _, err := n.lookup(ctx, from(x.B, of, client.PeerProbe, fmt.Sprint("bad-", i)), keys(first+i%prompts, othersBlocks))
			if r != nil {
				_ = r.Finish(x.Context())
			}
			if err == nil {
				time.Sleep(pesterPause)
			}
		}
	}
	for range pesterers {
		wg.Go(func() { loop(x.node, x.toSource, badPrompt, othersPrompts) })
		wg.Go(func() { loop(x.taker, x.toNode, ownPrompt, ownPrompts) })
	}
	return func() {
		cancel()
		wg.Wait()
	}
}

// dials connects to the node at a rate, says something, and is gone.
func (x *trouble) dials(say func(c net.Conn)) (end func()) {
	ctx, cancel := context.WithCancel(x.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		t := time.NewTicker(time.Second / dialsPerSec)
		defer t.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-t.C:
			}
			if c, err := net.Dial("tcp", x.node.addr); err == nil {
				say(c)
				_ = c.Close()
			}
		}
	})
	return func() {
		cancel()
		wg.Wait()
	}
}

// proxy is before an address until the benchmark ends.
func (x *trouble) proxy(to string, move func(dst, src net.Conn)) (addr string) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		x.Fatal(err)
	}
	x.Cleanup(func() { _ = ln.Close() })
	go func() { // ends with the listener; its connections with the nodes
		for {
			in, err := ln.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				_ = in.Close()
				continue
			}
			go move(in, out)
			go move(out, in)
		}
	}()
	return ln.Addr().String()
}

// pump copies so many bytes a second, with garbage one in each full buffer
// wrong: so what is said to be wrong is most often a block.
func pump(dst, src net.Conn, rate int, garbage bool) {
	defer dst.Close()
	defer src.Close()
	buf := make([]byte, 16<<10)
	for begin, n := time.Now(), 0; ; {
		k, err := src.Read(buf)
		if garbage && k == len(buf) {
			buf[k/2] ^= 0x10
		}
		if _, e := dst.Write(buf[:k]); e != nil || err != nil {
			return
		}
		n += k
		time.Sleep(time.Until(begin.Add(time.Duration(n) * time.Second / time.Duration(rate))))
	}
}
