package fstier

import (
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/tiertest"
)

func quiet(o Options) Options {
	o.Logger = slog.New(slog.DiscardHandler)
	return o
}

func Benchmark(b *testing.B) {
	tiertest.Bench(b, tiertest.Factory{Open: func(tb testing.TB, store string) tier.Tier {
		t := open(tb, quiet(opts(tb, store, nil)))
		<-t.ScanDone()
		return t
	}})
}

// raw is the loop that the tier is held against: the same calls with the same
// flags on as many directories, and nothing else.
type raw struct {
	dir    int
	direct int
}

func rawName(i int) string { return fmt.Sprintf("%02x/%d", i%256, i) }

func (r *raw) write(i int, hdr, buf []byte) error {
	fd, err := unix.Openat(r.dir, rawName(i)[:2], unix.O_WRONLY|unix.O_TMPFILE|unix.O_CLOEXEC|r.direct, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	if n, err := unix.Pwritev(fd, [][]byte{hdr, buf}, 0); err != nil || n != len(buf)+headerSize {
		return fmt.Errorf("wrote %d bytes: %w", n, err)
	}
	return unix.Linkat(unix.AT_FDCWD, "/proc/self/fd/"+strconv.Itoa(fd), r.dir, rawName(i), unix.AT_SYMLINK_FOLLOW)
}

func (r *raw) read(i int, hdr, buf []byte) error {
	fd, err := unix.Openat(r.dir, rawName(i), unix.O_RDONLY|unix.O_CLOEXEC|r.direct, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	if n, err := unix.Preadv(fd, [][]byte{hdr, buf}, 0); err != nil || n != len(buf)+headerSize {
		return fmt.Errorf("read %d bytes: %w", n, err)
	}
	return nil
}

// BenchmarkAgainstRaw runs the tier and the raw loop by turns, 16 workers
// each, and reports MB/s of both, their ratio, and the CPU time a call. Nothing is
// removed before the end: ext4 is slow at finding an inode where many were
// freed in the last minutes. Run it with -benchtime of a few thousand x.
func BenchmarkAgainstRaw(b *testing.B) {
	const workers, rounds, readFiles = 16, 20, 256
	ns := tiertest.Namespace(b, "bench")
	for _, group := range []uint32{3, 4} {
		size := ns.BlockBytes(group)
		for _, kind := range []string{"write", "read"} {
			b.Run(fmt.Sprintf("%s/%dKiB", kind, size>>10), func(b *testing.B) {
				root := b.TempDir()
				t := openClosing(b, quiet(opts(b, root+"/tier", nil)))
				if err := t.OpenNamespace(b.Context(), ns); err != nil {
					b.Fatal(err)
				}
				for i := range 256 {
					if err := os.MkdirAll(fmt.Sprintf("%s/raw/%02x", root, i), 0o700); err != nil {
						b.Fatal(err)
					}
				}
				dir, err := unix.Open(root+"/raw", unix.O_RDONLY|unix.O_DIRECTORY, 0)
				if err != nil {
					b.Fatal(err)
				}
				defer func() { _ = unix.Close(dir) }()
				r := &raw{dir, t.directFlag}
				var bufs, hdrs [workers][]byte
				for w := range workers {
					bufs[w], hdrs[w] = tiertest.Buffer(b, size), tiertest.Buffer(b, headerSize)
				}
				viaTier := func(w, i int) error {
					it := []tier.Item{{Key: tiertest.Key(i, group), Buf: bufs[w]}}
					if kind == "read" {
						it[0].Key = tiertest.Key(i%readFiles, group)
						t.Read(b.Context(), ns, it)
					} else {
						t.Write(b.Context(), ns, it)
					}
					return it[0].Err
				}
				viaRaw := func(w, i int) error {
					if kind == "read" {
						return r.read(i%readFiles, hdrs[w], bufs[w])
					}
					return r.write(i, hdrs[w], bufs[w])
				}
				cpu := func() time.Duration {
					var u unix.Rusage
					if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
						b.Error(err)
					}
					return time.Duration(u.Utime.Nano() + u.Stime.Nano())
				}
				run := func(from, n int, call func(w, i int) error) (took, spent time.Duration) {
					var next atomic.Int64
					next.Store(int64(from))
					n += from
					done := make(chan error, workers)
					start, startCPU := time.Now(), cpu()
					for w := range workers {
						go func() {
							for {
								i := int(next.Add(1)) - 1
								if i >= n {
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
							b.Error(err)
						}
					}
					return time.Since(start), cpu() - startCPU
				}
				if kind == "read" {
					for i := range readFiles {
						it := []tier.Item{{Key: tiertest.Key(i, group), Buf: bufs[0]}}
						tiertest.Fill(ns, &it[0])
						t.Write(b.Context(), ns, it)
						if err := r.write(i, hdrs[0], bufs[0]); err != nil || it[0].Err != nil {
							b.Fatal(err, it[0].Err)
						}
					}
				}
				warm := 4 * workers
				run(0, warm, viaTier)
				run(0, warm, viaRaw)
				per := max(b.N/rounds, 1)
				var tierTook, rawTook, tierCPU, rawCPU time.Duration
				turn := func(from int, call func(w, i int) error, took, spent *time.Duration) {
					d, c := run(from, per, call)
					*took += d
					*spent += c
				}
				for i := range rounds {
					if i%2 == 0 {
						turn(warm+i*per, viaTier, &tierTook, &tierCPU)
						turn(warm+i*per, viaRaw, &rawTook, &rawCPU)
					} else {
						turn(warm+i*per, viaRaw, &rawTook, &rawCPU)
						turn(warm+i*per, viaTier, &tierTook, &tierCPU)
					}
				}
				rate := func(d time.Duration) float64 { return float64(rounds*per) * float64(size) / d.Seconds() / 1e6 }
				b.ReportMetric(rate(tierTook), "tier-MB/s")
				b.ReportMetric(rate(rawTook), "raw-MB/s")
				b.ReportMetric(rate(tierTook)/rate(rawTook), "ratio")
				b.ReportMetric(float64(tierCPU.Microseconds())/float64(rounds*per), "tier-cpu-us/op")
				b.ReportMetric(float64(rawCPU.Microseconds())/float64(rounds*per), "raw-cpu-us/op")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

// BenchmarkAtCapacity writes to a full tier, so that each block evicts one.
func BenchmarkAtCapacity(b *testing.B) {
	const workers = 16
	ns := tiertest.Namespace(b, "bench")
	for _, group := range []uint32{3, 4} {
		size := ns.BlockBytes(group)
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			o := quiet(opts(b, b.TempDir(), nil))
			o.Capacity = 256 << 20
			t := openClosing(b, o)
			var next atomic.Int64
			run := func(n int64) {
				last := next.Load() + n
				done := make(chan error, workers)
				for range workers {
					buf := tiertest.Buffer(b, size)
					go func() {
						it := []tier.Item{{Buf: buf}}
						for i := next.Add(1); i <= last && it[0].Err == nil; i = next.Add(1) {
							it[0].Key = tiertest.Key(int(i), group)
							t.Write(b.Context(), ns, it)
						}
						done <- it[0].Err
					}()
				}
				for range workers {
					if err := <-done; err != nil {
						b.Error(err)
					}
				}
			}
			run(o.Capacity / int64(size))
			b.SetBytes(int64(size))
			b.ResetTimer()
			run(int64(b.N))
		})
	}
}
