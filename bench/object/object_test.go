package object

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/minio/crc64nvme"
	"github.com/minio/minio-go/v7/pkg/signer"
	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/s3"
	"github.com/terrace-kv/terrace/test/object/s3server"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/objtier"
	"github.com/terrace-kv/terrace/tier/tiertest"
)

const (
	workers   = 16
	rounds    = 6 // of each side
	perTurn   = 256 << 20
	headBytes = 256 // before a block's bytes in its object
	bucket    = "bench"
)

// server is what the sides speak to.
type server struct {
	s3.Options
	empty func() // removes all blocks, if that is worth it
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

// bench has both sides. All blocks have the same bytes.
type bench struct {
	*testing.B
	at   server
	size int
	sum  uint64
	ns   *block.Namespace
	tier *objtier.Tier
	bufs [workers][]byte // with the blocks' bytes, whatever was read into them
	head [workers][]byte

	bare *http.Transport
}

func open(b *testing.B, at server, size int) *bench {
	x := &bench{B: b, at: at, size: size}
	r := rand.New(rand.NewPCG(1, 2))
	for w := range workers {
		x.bufs[w], x.head[w] = tiertest.Buffer(b, size), make([]byte, headBytes)
		if w > 0 {
			copy(x.bufs[w], x.bufs[0])
			continue
		}
		for i := 0; i < size; i += 8 {
			binary.LittleEndian.PutUint64(x.bufs[0][i:], r.Uint64())
		}
	}
	x.sum = crc64nvme.Checksum(x.bufs[0])
	var err error
	x.ns, err = block.NewNamespace(block.Spec{Model: "bench", DType: "bytes", Layout: "bench", HashAlgorithm: "sha256", HashLength: block.HashSize,
		Groups: []block.Group{{Kind: block.KindFull, TokensPerBlock: 16, BlockBytes: uint64(size)}}})
	if err != nil {
		b.Fatal(err)
	}
	x.tier, err = objtier.Open(b.Context(), objtier.Options{S3: at.Options, Prefix: "tier", Workers: workers, Checksum: s3.ChecksumCRC64NVME, ListPerSecond: -1, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := x.tier.Close(context.Background()); err != nil {
			b.Error(err)
		}
	})
	if err := x.tier.OpenNamespace(b.Context(), x.ns); err != nil {
		b.Fatal(err)
	}
	x.bare = &http.Transport{MaxIdleConnsPerHost: 64, MaxConnsPerHost: 64, DisableCompression: true}
	b.Cleanup(x.bare.CloseIdleConnections)
	return x
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
			x.Fatal(err)
		}
	}
}

func (x *bench) tierPut(lo, n int) {
	x.parallel(lo, n, func(w, i int) error {
		it := []tier.Item{{Key: key(i), Buf: x.bufs[w], Sum: x.sum}}
		x.tier.Write(x.Context(), x.ns, it)
		return it[0].Err
	})
}

func (x *bench) tierGet(lo, n int) {
	x.parallel(lo, n, func(w, i int) error {
		it := []tier.Item{{Key: key(i), Buf: x.bufs[w]}}
		x.tier.Read(x.Context(), x.ns, it)
		if it[0].Err == nil && it[0].Sum != x.sum {
			return fmt.Errorf("the sum is %#x, want %#x", it[0].Sum, x.sum)
		}
		return it[0].Err
	})
}

// sign makes the bare client's requests for lo to lo+n: the same as the
// tier's, but for the prefix.
func (x *bench) sign(method string, lo, n int) []*http.Request {
	// The head is not what the tier writes, so the sum is of what is sent.
	sum := crc64nvme.New()
	_, _ = sum.Write(x.head[0])
	_, _ = sum.Write(x.bufs[0])
	value := base64.StdEncoding.EncodeToString(sum.Sum(nil))
	out := make([]*http.Request, n)
	for i := range out {
		r, err := http.NewRequest(method, fmt.Sprintf("%s://%s/%s/bare/%s/b/%s", x.at.Scheme, x.at.Endpoint, bucket, x.ns.Fingerprint(), key(lo+i)), nil)
		if err != nil {
			x.Fatal(err)
		}
		r.Header.Set("X-Amz-Content-Sha256", "UNSIGNED-PAYLOAD")
		if method == http.MethodPut {
			r.Header.Set("If-None-Match", "*")
			r.Header.Set("X-Amz-Checksum-Crc64nvme", value)
		}
		out[i] = signer.SignV4(*r, x.at.AccessKey, x.at.SecretKey, "", x.at.Region)
	}
	return out
}

// bytesOf reads parts of memory, one after the other.
type bytesOf struct{ parts [2][]byte }

func (b *bytesOf) Read(p []byte) (n int, err error) {
	for i := range b.parts {
		c := copy(p[n:], b.parts[i])
		b.parts[i] = b.parts[i][c:]
		n += c
	}
	if n == 0 {
		return 0, io.EOF
	}
	return n, nil
}

// WriteTo gives whole parts, which is what a bare client does best.
func (b *bytesOf) WriteTo(w io.Writer) (n int64, err error) {
	for i := range b.parts {
		c, err := w.Write(b.parts[i])
		if n += int64(c); err != nil {
			return n, err
		}
	}
	return n, nil
}

func (b *bytesOf) Close() error { return nil }

func (x *bench) barePut(rs []*http.Request) {
	x.parallel(0, len(rs), func(w, i int) error {
		r := rs[i]
		r.Body, r.ContentLength = &bytesOf{[2][]byte{x.head[0], x.bufs[w]}}, int64(headBytes+x.size)
		resp, err := x.bare.RoundTrip(r)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != http.StatusOK {
			return fmt.Errorf("put: %s, %w", resp.Status, err)
		}
		return nil
	})
}

func (x *bench) bareGet(rs []*http.Request) {
	x.parallel(0, len(rs), func(w, i int) error {
		resp, err := x.bare.RoundTrip(rs[i])
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK || resp.ContentLength != int64(headBytes+x.size) {
			return fmt.Errorf("get: %s, %d bytes", resp.Status, resp.ContentLength)
		}
		for _, p := range [][]byte{x.head[w], x.bufs[w]} {
			if _, err := io.ReadFull(resp.Body, p); err != nil {
				return err
			}
		}
		_, err = io.Copy(io.Discard, resp.Body)
		return err
	})
}

// spent is what turns of a side cost.
type spent struct {
	took, cpu      time.Duration
	bytes, mallocs uint64
}

func cpuTime() time.Duration {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func (s *spent) turn(move func()) {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	cpu, begin := cpuTime(), time.Now()
	move()
	s.took += time.Since(begin)
	s.cpu += cpuTime() - cpu
	runtime.ReadMemStats(&after)
	s.bytes += after.TotalAlloc - before.TotalAlloc
	s.mallocs += after.Mallocs - before.Mallocs
}

// report says what both sides did in as many blocks each.
func (x *bench) report(blocks int, t, bare *spent) {
	gib := float64(blocks) * float64(x.size) / (1 << 30)
	for name, s := range map[string]*spent{"tier": t, "bare": bare} {
		x.ReportMetric(1024*gib/s.took.Seconds(), name+"-MiB/s")
		x.ReportMetric(s.cpu.Seconds()/gib, name+"-cpu-s/GiB")
		x.ReportMetric(float64(s.bytes)/float64(blocks), name+"-B/block")
		x.ReportMetric(float64(s.mallocs)/float64(blocks), name+"-allocs/block")
	}
	x.ReportMetric(bare.took.Seconds()/t.took.Seconds(), "tier/bare")
	x.ReportMetric(t.cpu.Seconds()/bare.cpu.Seconds(), "cpu-tier/bare")
	x.ReportMetric(0, "ns/op")
	if t.bytes/uint64(blocks) > uint64(x.size)/4 {
		x.Errorf("%d bytes are allocated a block", t.bytes/uint64(blocks))
	}
}

// requests reports a kind of request per block.
func (x *bench) requests(name string, n int64, blocks int) {
	x.ReportMetric(float64(n)/float64(blocks), name)
}

// BenchmarkObject is run with -benchtime 1x.
func BenchmarkObject(b *testing.B) {
	for name, start := range map[string]func(b *testing.B) server{"versitygw": startVersity, "sink": startSink} {
		for _, size := range []int{1 << 20, 8 << 20} {
			b.Run(fmt.Sprintf("%s/%dMiB/put", name, size>>20), func(b *testing.B) { benchPut(open(b, start(b), size)) })
			b.Run(fmt.Sprintf("%s/%dMiB/get", name, size>>20), func(b *testing.B) { benchGet(open(b, start(b), size)) })
		}
	}
}

func benchPut(x *bench) {
	n := perTurn / x.size
	x.tierPut(-n, n) // connections, namespace.json
	x.barePut(x.sign(http.MethodPut, -n, n))
	var t, bare spent
	before := x.tier.Requests()
	for i := range rounds {
		x.at.empty()
		rs := x.sign(http.MethodPut, i*n, n)
		sides := []func(){func() { t.turn(func() { x.tierPut(i*n, n) }) }, func() { bare.turn(func() { x.barePut(rs) }) }}
		sides[i%2]()
		sides[1-i%2]()
	}
	after := x.tier.Requests()
	x.report(rounds*n, &t, &bare)
	x.requests("puts/stored", after.Put-before.Put, rounds*n)
	x.requests("others/stored", total(after)-total(before)-(after.Put-before.Put), rounds*n)

	// What is known needs no request.
	keys, known, found := make([]block.Key, n), make([]tier.Presence, n), make([]bool, n)
	for i := range keys {
		keys[i] = key((rounds-1)*n + i)
	}
	before = x.tier.Requests()
	x.tier.Known(x.ns, keys, known)
	if err := x.tier.Contains(x.Context(), x.ns, keys, found); err != nil {
		x.Fatal(err)
	}
	for i := range keys {
		if known[i] != tier.Present || !found[i] {
			x.Fatalf("block %d: %v, %v", i, known[i], found[i])
		}
	}
	x.requests("requests/known", total(x.tier.Requests())-total(before), n)
}

func benchGet(x *bench) {
	n := perTurn / x.size
	x.tierPut(0, n)
	x.barePut(x.sign(http.MethodPut, 0, n))
	x.tierGet(0, n)
	x.bareGet(x.sign(http.MethodGet, 0, n))
	var t, bare spent
	before := x.tier.Requests()
	for i := range rounds {
		rs := x.sign(http.MethodGet, 0, n)
		sides := []func(){func() { t.turn(func() { x.tierGet(0, n) }) }, func() { bare.turn(func() { x.bareGet(rs) }) }}
		sides[i%2]()
		sides[1-i%2]()
	}
	after := x.tier.Requests()
	x.report(rounds*n, &t, &bare)
	x.requests("gets/loaded", after.Get-before.Get, rounds*n)
	x.requests("others/loaded", total(after)-total(before)-(after.Get-before.Get), rounds*n)
}

func total(c s3.Counts) int64 { return c.Put + c.Get + c.Head + c.Delete + c.List + c.Other }

func startVersity(b *testing.B) server {
	s := s3server.Start(b, s3server.Options{})
	if err := s.MakeBucket(bucket); err != nil {
		b.Fatal(err)
	}
	return server{
		Options: s3.Options{Bucket: bucket, Endpoint: s.Endpoint, Scheme: s.Scheme, Region: s.Region, AccessKey: s.AccessKey, SecretKey: s.SecretKey},
		empty: func() {
			dirs, _ := filepath.Glob(filepath.Join(s.Data, bucket, "*", "*", "b"))
			for _, dir := range dirs {
				if err := os.RemoveAll(dir); err != nil {
					b.Fatal(err)
				}
			}
		},
	}
}
