package node

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/minio/crc64nvme"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/client"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/tiertest"
)

const (
	workers = 16
	primary = 1 << 30 // bytes
	rounds  = 8       // of each side
	perTurn = 256 << 20
	waitMax = time.Minute
)

func spec(size int) block.Spec {
	return block.Spec{Model: "bench", DType: "bytes", Layout: "bench", HashAlgorithm: "sha256", HashLength: block.HashSize,
		Groups: []block.Group{{Kind: block.KindFull, TokensPerBlock: 16, BlockBytes: uint64(size)}}}
}

func key(i int) block.Key {
	var hash [block.HashSize]byte
	binary.BigEndian.PutUint64(hash[:], uint64(i)*0x9e3779b97f4a7c15)
	binary.BigEndian.PutUint64(hash[8:], uint64(i))
	k, err := block.NewKey(hash[:], 0)
	if err != nil {
		panic(err)
	}
	return k
}

func keys(lo, n int) []block.Key {
	out := make([]block.Key, n)
	for i := range out {
		out[i] = key(lo + i)
	}
	return out
}

// side is one of what is compared: it moves the blocks lo to lo+n.
type side struct {
	name  string
	move  func(lo, n int)
	cpu   func() time.Duration
	took  time.Duration
	spent time.Duration
}

func (s *side) turn(lo, n int) {
	cpu, begin := s.cpu(), time.Now()
	s.move(lo, n)
	s.took += time.Since(begin)
	s.spent += s.cpu() - cpu
}

// bench has the three sides. All blocks have the same bytes, so that a slot of
// the primary holds what its next block is to have: the engine's own work is
// left out, and a slot that does not is found by the node's checksum.
type bench struct {
	*testing.B
	size   int
	bytes  []byte
	sum    uint64
	node   *child
	engine *client.Client
	n      int // requests so far

	tier *tierLoop
	raw  *rawLoop
}

func open(b *testing.B, size int) *bench {
	x := &bench{B: b, size: size, bytes: tiertest.Buffer(b, size)}
	r := rand.New(rand.NewPCG(1, 2))
	for i := 0; i < size; i += 8 {
		binary.LittleEndian.PutUint64(x.bytes[i:], r.Uint64())
	}
	x.sum = crc64nvme.Checksum(x.bytes)
	root := benchDir(b)
	x.node = startNode(b, root+"/node", primary)
	var err error
	if x.engine, err = client.Dial(b.Context(), client.Options{Socket: x.node.socket, Spec: spec(size)}); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = x.engine.Close() })

	ns, err := block.NewNamespace(spec(size))
	if err != nil {
		b.Fatal(err)
	}
	t, err := openTier(root+"/tier", slog.New(slog.DiscardHandler))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := t.Close(context.Background()); err != nil {
			b.Error(err)
		}
	})
	if err := t.OpenNamespace(b.Context(), ns); err != nil {
		b.Fatal(err)
	}
	x.tier = &tierLoop{b: x, tier: t, ns: ns}
	x.raw = &rawLoop{b: x, raw: openRaw(b, root+"/raw")}
	for w := range workers {
		x.tier.bufs[w], x.raw.bufs[w], x.raw.hdrs[w] = tiertest.Buffer(b, size), tiertest.Buffer(b, size), tiertest.Buffer(b, headerSize)
		copy(x.tier.bufs[w], x.bytes)
		copy(x.raw.bufs[w], x.bytes)
	}
	x.store(-primary/size, primary/size, true) // every slot
	return x
}

// request runs f as one request.
func (x *bench) request(f func(r *client.Request) error) {
	x.Helper()
	x.n++
	r, err := x.engine.NewRequest(x.Context(), fmt.Sprint(x.n), client.NoLimits())
	if err != nil {
		x.Fatal(err)
	}
	if err := f(r); err != nil {
		x.Fatal(err)
	}
	if err := r.Finish(x.Context()); err != nil {
		x.Fatal(err)
	}
}

// store stores blocks through the node and waits until all are in the tier.
func (x *bench) store(lo, n int, fill bool) {
	x.Helper()
	x.request(func(r *client.Request) error {
		got, err := r.Store(x.Context(), 0, 0, keys(lo, n), func(_ int, dst []byte) (uint64, error) {
			if fill {
				copy(dst, x.bytes)
			}
			return x.sum, nil
		})
		if err != nil || got.Stored != n {
			return fmt.Errorf("%+v of %d stored: %w", got, n, err)
		}
		f, err := r.Flush(x.Context(), waitMax)
		if err == nil && f.Cascaded != n {
			err = fmt.Errorf("%+v of %d", f, n)
		}
		return err
	})
}

// load has the node read blocks into the primary.
func (x *bench) load(lo, n int) {
	x.Helper()
	x.request(func(r *client.Request) error {
		a, err := r.Lookup(x.Context(), [][]block.Key{keys(lo, n)}, client.LookupOptions{Wait: waitMax})
		if err == nil && (!a.Final || a.Tokens != int64(16*n)) {
			err = fmt.Errorf("%d tokens of %d blocks, final: %v", a.Tokens, n, a.Final)
		}
		return err
	})
}

// reset empties the primary.
func (x *bench) reset() {
	x.Helper()
	if done, err := x.engine.Reset(x.Context(), waitMax); err != nil || !done {
		x.Fatal(done, err)
	}
}

// parallel calls each of lo to lo+n once, from all workers.
func (x *bench) parallel(lo, n int, call func(w, i int) error) {
	x.Helper()
	var next atomic.Int64
	next.Store(int64(lo))
	done := make(chan error, workers)
	for w := range workers {
		go func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= lo+n {
					done <- nil
					return
				}
				if err := call(w, i); err != nil {
					done <- err
					return
				}
			}
		}()
	}
	for range workers {
		if err := <-done; err != nil {
			x.Error(err)
		}
	}
}

type tierLoop struct {
	b    *bench
	tier tier.Tier
	ns   *block.Namespace
	bufs [workers][]byte
}

func (t *tierLoop) write(lo, n int) {
	t.b.parallel(lo, n, func(w, i int) error {
		it := []tier.Item{{Key: key(i), Buf: t.bufs[w], Sum: t.b.sum}}
		t.tier.Write(t.b.Context(), t.ns, it)
		return it[0].Err
	})
}

func (t *tierLoop) read(lo, n int) {
	t.b.parallel(lo, n, func(w, i int) error {
		it := []tier.Item{{Key: key(i), Buf: t.bufs[w]}}
		t.tier.Read(t.b.Context(), t.ns, it)
		return it[0].Err
	})
}

type rawLoop struct {
	b          *bench
	raw        *raw
	bufs, hdrs [workers][]byte
}

func (r *rawLoop) write(lo, n int) {
	r.b.parallel(lo, n, func(w, i int) error { return r.raw.write(i, r.hdrs[w], r.bufs[w]) })
}

func (r *rawLoop) read(lo, n int) {
	r.b.parallel(lo, n, func(w, i int) error { return r.raw.read(i, r.hdrs[w], r.bufs[w]) })
}

// benchDir is a new directory, removed at the end, or by who has set
// TERRACE_BENCH_DIR: ext4 spends a third of a write of 64 KiB on finding an
// inode where many were freed in the last five minutes.
func benchDir(b *testing.B) string {
	b.Helper()
	in := os.Getenv("TERRACE_BENCH_DIR")
	if in == "" {
		return b.TempDir()
	}
	dir, err := os.MkdirTemp(in, "node")
	if err != nil {
		b.Fatal(err)
	}
	return dir
}

// compare runs the sides by turns, each first in a third of the rounds, and
// reports MB/s, ratios, CPU time and what a checksum of as much costs.
func (x *bench) compare(n int, sides []*side, lo func(round int) int, before func()) {
	for i := range rounds {
		for k := range sides {
			if before != nil {
				before()
			}
			sides[(i+k)%len(sides)].turn(lo(i), n)
		}
	}
	total := float64(rounds) * float64(n) * float64(x.size) / 1e9 // GB
	for _, s := range sides {
		x.ReportMetric(1000*total/s.took.Seconds(), s.name+"-MB/s")
		x.ReportMetric(s.spent.Seconds()/total, s.name+"-cpu-s/GB")
	}
	x.ReportMetric(sides[1].took.Seconds()/sides[0].took.Seconds(), "node/tier")
	x.ReportMetric(sides[2].took.Seconds()/sides[1].took.Seconds(), "tier/raw")
	x.ReportMetric(x.checksum(), "sum-s/GB")
	x.ReportMetric(0, "ns/op")
}

// checksum is the CPU time in seconds of the checksum of a GB, of blocks that
// are not in any cache.
func (x *bench) checksum() float64 {
	b := tiertest.Buffer(x, 256<<20)
	for i := 0; i < len(b); i += x.size {
		copy(b[i:], x.bytes)
	}
	begin := cpuTime()
	for i := 0; i < len(b); i += x.size {
		if crc64nvme.Checksum(b[i:i+x.size]) != x.sum {
			x.Error("wrong sum")
		}
	}
	return (cpuTime() - begin).Seconds() * 1e9 / float64(len(b))
}

func (x *bench) sides(node, tier, raw func(lo, n int)) []*side {
	return []*side{
		{name: "node", move: node, cpu: func() time.Duration { return x.node.cpu(x.B) }},
		{name: "tier", move: tier, cpu: cpuTime},
		{name: "raw", move: raw, cpu: cpuTime},
	}
}

var sizes = []int{1 << 20, 64 << 10}

// BenchmarkCascade has blocks written to the tier: by a node that an engine
// stores them in, and directly. Run it with -benchtime 1x.
func BenchmarkCascade(b *testing.B) {
	for _, size := range sizes {
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			x := open(b, size)
			n := perTurn / size
			x.tier.write(-n, n)
			x.raw.write(0, n)
			x.compare(n, x.sides(func(lo, n int) { x.store(lo, n, false) }, x.tier.write, x.raw.write),
				func(round int) int { return (round + 1) * n }, nil)
		})
	}
}

// BenchmarkPromote has blocks read from the tier: by a node that an engine
// asks for them, and directly. Run it with -benchtime 1x.
func BenchmarkPromote(b *testing.B) {
	for _, size := range sizes {
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			x := open(b, size)
			n := perTurn / size
			x.store(0, n, false)
			x.tier.write(0, n)
			x.raw.write(0, n)
			x.reset()
			x.load(0, n)
			x.tier.read(0, n)
			x.raw.read(0, n)
			x.compare(n, x.sides(x.load, x.tier.read, x.raw.read), func(int) int { return 0 }, x.reset)
		})
	}
}
