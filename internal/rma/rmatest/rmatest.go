// Package rmatest tests that a fabric does what package rma asks for.
package rmatest

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/internal/rma"
)

const (
	regionBytes = 3<<20 + 4096
	soon        = 20 * time.Second // for what takes milliseconds on a quiet machine
)

// Run tests the fabrics that open makes, which reach each other. It counts
// goroutines, so that nothing else may run beside it.
func Run(t *testing.T, open func(t *testing.T) rma.Fabric) {
	for _, x := range []struct {
		name string
		test func(t *testing.T, open func(t *testing.T) rma.Fabric)
	}{
		{"Get", testGet}, {"Range", testRange}, {"Garbage", testGarbage}, {"PollEnds", testPollEnds},
		{"Release", testRelease}, {"PeerClose", testPeerClose}, {"Again", testAgain}, {"Gone", testGone},
		{"BothWays", testBothWays}, {"NothingLeft", testNothingLeft},
	} {
		t.Run(x.name, func(t *testing.T) { x.test(t, open) })
	}
}

// Memory is n bytes that are mapped as a node's are, and random.
func Memory(t testing.TB, n int, seed uint64) []byte {
	t.Helper()
	mem, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(mem) })
	_, _ = rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)}).Read(mem)
	return mem
}

// node is a fabric with a region.
type node struct {
	rma.Fabric
	mem    []byte
	region rma.Region
}

func newNode(t *testing.T, open func(t *testing.T) rma.Fabric, seed uint64) *node {
	t.Helper()
	n := &node{Fabric: open(t), mem: Memory(t, regionBytes, seed)}
	var err error
	if n.region, err = n.Register(n.mem); err != nil {
		t.Fatal(err)
	}
	if l := len(n.region.Description()); l == 0 || l > rma.DescriptionMax {
		t.Fatalf("a description of %d bytes", l)
	}
	if name := n.Name(); name == "" || len(name) > 64 {
		t.Fatalf("named %q", name)
	}
	return n
}

// close is the end of a node that has no peers and no handles.
func (n *node) close(t *testing.T) {
	t.Helper()
	if err := n.region.Release(); err != nil {
		t.Error(err)
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
}

func connect(t *testing.T, f rma.Fabric, description []byte) rma.Peer {
	t.Helper()
	p, err := f.Connect(description)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func closePeer(t *testing.T, p rma.Peer) {
	t.Helper()
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

// pair is two nodes, with a connection from the first to the second.
func pair(t *testing.T, open func(t *testing.T) rma.Fabric) (from, to *node, p rma.Peer) {
	t.Helper()
	from, to = newNode(t, open, 1), newNode(t, open, 2)
	if from.Name() != to.Name() {
		t.Fatalf("fabrics named %q and %q", from.Name(), to.Name())
	}
	return from, to, connect(t, from, to.region.Description())
}

func ended(t *testing.T, from, to *node, p rma.Peer) {
	t.Helper()
	closePeer(t, p)
	from.close(t)
	to.close(t)
}

// wait polls h until it is over, and releases it.
func wait(h rma.Handle) error {
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	done, err := h.Poll(ctx)
	if !done {
		return fmt.Errorf("not over after %v: %w", soon, err)
	}
	if again, err2 := h.Poll(ctx); !again || (err == nil) != (err2 == nil) {
		return fmt.Errorf("over with %w, then %t with %w", err, again, err2)
	}
	if err2 := h.Release(); err2 != nil {
		return fmt.Errorf("release of what is over: %w", err2)
	}
	return err
}

func get(p rma.Peer, dst []byte, off int) error {
	h, err := p.Post(dst, uint64(off))
	if err != nil {
		return err
	}
	return wait(h)
}

// same says whether dst within its guards is want.
func same(guarded, want []byte) error {
	for i, b := range guarded {
		if inside := i >= guard && i < len(guarded)-guard; !inside && b != guardByte {
			return fmt.Errorf("byte %d before or after the destination was written", i-guard)
		}
	}
	if !bytes.Equal(guarded[guard:len(guarded)-guard], want) {
		return fmt.Errorf("other bytes than the peer's, of %d", len(want))
	}
	return nil
}

const (
	guard     = 64
	guardByte = 0xA5
)

func guarded(n int) (all, dst []byte) {
	all = bytes.Repeat([]byte{guardByte}, n+2*guard)
	return all, all[guard : guard+n : guard+n]
}

func testGet(t *testing.T, open func(t *testing.T) rma.Fabric) {
	from, to, p := pair(t, open)
	for _, n := range []int{1, 7, 64, 4095, 4096, 8192, 65536, 65537, 1 << 20, regionBytes} {
		for _, off := range []int{0, 1, regionBytes / 2, regionBytes - n - 1, regionBytes - n} {
			if off < 0 || off+n > regionBytes {
				continue
			}
			all, dst := guarded(n)
			if err := get(p, dst, off); err != nil {
				t.Fatalf("%d bytes from %d: %v", n, off, err)
			}
			if err := same(all, to.mem[off:off+n]); err != nil {
				t.Fatalf("%d bytes from %d: %v", n, off, err)
			}
		}
	}
	ended(t, from, to, p)
}

func testRange(t *testing.T, open func(t *testing.T) rma.Fabric) {
	from, to, p := pair(t, open)
	for _, x := range []struct {
		n   int
		off uint64
	}{
		{1, regionBytes}, {2, regionBytes - 1}, {regionBytes + 1, 0}, {regionBytes, 1}, {1, math.MaxUint64},
		{4096, math.MaxUint64 - 4095}, {4096, math.MaxUint64 - 100}, {1, 1 << 63}, {1, regionBytes + 4096},
	} {
		if _, err := p.Post(make([]byte, x.n), x.off); err == nil {
			t.Errorf("a get of %d bytes from %d was posted", x.n, x.off)
		}
	}
	ended(t, from, to, p)
}

func testGarbage(t *testing.T, open func(t *testing.T) rma.Fabric) {
	from, to, p := pair(t, open)
	good := to.region.Description()
	bad := [][]byte{nil, {}, {0}, make([]byte, len(good)), bytes.Repeat([]byte{0xFF}, len(good)), make([]byte, rma.DescriptionMax+1)}
	for n := range len(good) {
		bad = append(bad, good[:n])
	}
	r := rand.New(rand.NewPCG(1, 2))
	for range 100 {
		b := make([]byte, r.IntN(2*len(good)))
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		bad = append(bad, b)
	}
	for _, b := range bad {
		if _, err := from.Connect(b); err == nil {
			t.Fatalf("connected with % x", b)
		}
	}
	if !bytes.Equal(good, to.region.Description()) {
		t.Error("the description has changed")
	}
	ended(t, from, to, p)
}

// testPollEnds: an ended context ends Poll, without an error of its own, and
// nothing else.
func testPollEnds(t *testing.T, open func(t *testing.T) rma.Fabric) {
	from, to, p := pair(t, open)
	over, cancel := context.WithCancel(context.Background())
	cancel()
	for i := range 50 {
		all, dst := guarded(64 << 10)
		h, err := p.Post(dst, uint64(i))
		if err != nil {
			t.Fatal(err)
		}
		if done, err := h.Poll(over); err != nil {
			t.Fatalf("with an ended context: %t, %v", done, err)
		}
		if err := wait(h); err != nil {
			t.Fatal(err)
		}
		if done, err := h.Poll(over); !done || err != nil {
			t.Fatalf("of what is over with an ended context: %t, %v", done, err)
		}
		if err := same(all, to.mem[i:i+len(dst)]); err != nil {
			t.Fatal(err)
		}
	}
	ended(t, from, to, p)
}

// testRelease: a release that fails changes nothing, and after one that does not
// nothing is written.
func testRelease(t *testing.T, open func(t *testing.T) rma.Fabric) {
	from, to, p := pair(t, open)
	const n = 256 << 10
	var released [][]byte
	for i := range 50 {
		all, dst := guarded(n)
		h, err := p.Post(dst, uint64(i))
		if err != nil {
			t.Fatal(err)
		}
		if h.Release() != nil { // under way
			if err := wait(h); err != nil {
				t.Fatal(err)
			}
			if err := same(all, to.mem[i:i+n]); err != nil {
				t.Fatal(err)
			}
		}
		for j := range dst {
			dst[j] = guardByte
		}
		released = append(released, all)
	}
	if err := get(p, make([]byte, n), 0); err != nil {
		t.Fatal(err)
	}
	for i, all := range released {
		if err := same(all, bytes.Repeat([]byte{guardByte}, n)); err != nil {
			t.Fatalf("get %d after its release: %v", i, err)
		}
	}
	ended(t, from, to, p)
}

func testPeerClose(t *testing.T, open func(t *testing.T) rma.Fabric) {
	from, to, p := pair(t, open)
	other := connect(t, from, to.region.Description())
	type posted struct {
		h   rma.Handle
		dst []byte
	}
	var under []posted
	for range 64 {
		dst := make([]byte, 1<<20)
		h, err := p.Post(dst, 0)
		if err != nil {
			t.Fatal(err)
		}
		under = append(under, posted{h, dst})
	}
	closePeer(t, p)
	closePeer(t, p)
	if _, err := p.Post(make([]byte, 1), 0); err == nil {
		t.Error("posted to a closed peer")
	}
	failed := 0
	for _, x := range under {
		ctx, cancel := context.WithTimeout(context.Background(), soon)
		done, err := x.h.Poll(ctx)
		cancel()
		switch {
		case !done:
			t.Fatalf("not over after %v: %v", soon, err)
		case err != nil:
			failed++
		case !bytes.Equal(x.dst, to.mem[:len(x.dst)]):
			t.Error("a get ended well with other bytes than the peer's")
		}
		if err := x.h.Release(); err != nil {
			t.Error(err)
		}
	}
	t.Logf("%d of %d gets failed", failed, len(under))
	dst := make([]byte, 4096)
	if err := get(other, dst, 0); err != nil || !bytes.Equal(dst, to.mem[:len(dst)]) {
		t.Errorf("a get from another connection: %v", err)
	}
	ended(t, from, to, other)
}

// testAgain: connections come and go without a trace in others.
func testAgain(t *testing.T, open func(t *testing.T) rma.Fabric) {
	from, to, p := pair(t, open)
	back := connect(t, to, from.region.Description())
	for i := range 20 {
		again := connect(t, from, to.region.Description())
		for _, x := range []struct {
			p   rma.Peer
			mem []byte
		}{{again, to.mem}, {p, to.mem}, {back, from.mem}} {
			dst := make([]byte, 10_000)
			if err := get(x.p, dst, i); err != nil || !bytes.Equal(dst, x.mem[i:i+len(dst)]) {
				t.Fatalf("turn %d: %v", i, err)
			}
		}
		if i%2 == 1 {
			h, err := again.Post(make([]byte, 1<<20), 0)
			if err != nil {
				t.Fatal(err)
			}
			closePeer(t, again)
			_ = wait(h) // failed or not
		} else {
			closePeer(t, again)
		}
	}
	closePeer(t, back)
	ended(t, from, to, p)
}

// testGone: gets from a peer that has ended fail, at the latest with the
// connection's end.
func testGone(t *testing.T, open func(t *testing.T) rma.Fabric) {
	for _, used := range []bool{true, false} {
		from, to, p := pair(t, open)
		if used {
			if err := get(p, make([]byte, 4096), 0); err != nil {
				t.Fatal(err)
			}
		}
		to.close(t)
		h, err := p.Post(make([]byte, 4096), 0)
		if err == nil {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second/10)
			_, _ = h.Poll(ctx)
			cancel()
			closePeer(t, p)
			err = wait(h)
		}
		if err == nil {
			t.Error("a get from what is gone ended well")
		}
		closePeer(t, p)
		from.close(t)
	}
}

// testBothWays: gets of many goroutines, from each of two nodes to the other.
func testBothWays(t *testing.T, open func(t *testing.T) rma.Fabric) {
	from, to, p := pair(t, open)
	back := connect(t, to, from.region.Description())
	var all sync.WaitGroup
	for g := range 8 {
		all.Go(func() {
			p, mem := p, to.mem
			if g%2 == 1 {
				p, mem = back, from.mem
			}
			r := rand.New(rand.NewPCG(uint64(g), 0))
			for range 20 {
				var hs [4]rma.Handle
				var dsts [4][]byte
				var offs [4]int
				for i := range hs {
					dsts[i] = make([]byte, 1+r.IntN(200_000))
					offs[i] = r.IntN(regionBytes - len(dsts[i]) + 1)
					var err error
					if hs[i], err = p.Post(dsts[i], uint64(offs[i])); err != nil {
						t.Error(err)
						return
					}
				}
				for i, h := range hs {
					if err := wait(h); err != nil || !bytes.Equal(dsts[i], mem[offs[i]:offs[i]+len(dsts[i])]) {
						t.Errorf("%d bytes from %d: %v", len(dsts[i]), offs[i], err)
					}
				}
			}
		})
	}
	all.Wait()
	closePeer(t, back)
	ended(t, from, to, p)
}

func testNothingLeft(t *testing.T, open func(t *testing.T) rma.Fabric) {
	before := runtime.NumGoroutine()
	from, to, p := pair(t, open)
	if err := get(p, make([]byte, 100_000), 0); err != nil {
		t.Fatal(err)
	}
	ended(t, from, to, p)
	for deadline := time.Now().Add(soon); runtime.NumGoroutine() > before; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			stacks := make([]byte, 64<<10)
			t.Fatalf("%d goroutines, %d before:\n%s", runtime.NumGoroutine(), before, stacks[:runtime.Stack(stacks, true)])
		}
	}
}
