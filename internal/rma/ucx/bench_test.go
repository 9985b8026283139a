//go:build ucx && cgo

package ucx

import (
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/internal/rma"
	"github.com/terrace-kv/terrace/internal/rma/rmatest"
)

// BenchmarkGet has gets of blocks from another process, 16 under way, and in turn
// with them as many bytes by memmove and by one TCP connection within this one.
func BenchmarkGet(b *testing.B) {
	const under = 16
	for _, transports := range []string{"tcp", "tcp,sm"} {
		for _, n := range []int{64 << 10, 1 << 20} {
			b.Run(fmt.Sprintf("%s/%dKiB", transports, n>>10), func(b *testing.B) {
				const size = 64 << 20
				f, p, _ := served(b, transports, size)
				dst, src := rmatest.Memory(b, under*n, 2), rmatest.Memory(b, under*n, 3)
				out, in := tcp(b)
				var gets, moves, streams time.Duration
				for i := 0; b.Loop(); i++ {
					began := time.Now()
					var hs [under]rma.Handle
					for j := range hs {
						var err error
						if hs[j], err = p.Post(dst[j*n:][:n], uint64((i*under+j)*n%size)); err != nil {
							b.Fatal(err)
						}
					}
					for _, h := range hs {
						if err := over(b, h); err != nil {
							b.Fatal(err)
						}
					}
					gets += time.Since(began)
					began = time.Now()
					copy(dst, src)
					moves += time.Since(began)
					began = time.Now()
					sent := make(chan error, 1)
					go func() {
						_, err := out.Write(src)
						sent <- err
					}()
					if _, err := io.ReadFull(in, dst); err != nil {
						b.Fatal(err)
					}
					if err := <-sent; err != nil {
						b.Fatal(err)
					}
					streams += time.Since(began)
				}
				b.ReportMetric(float64(b.N)*under*float64(n)/gets.Seconds()/(1<<30), "GiB/s")
				b.ReportMetric(moves.Seconds()/gets.Seconds(), "of-memmove")
				b.ReportMetric(streams.Seconds()/gets.Seconds(), "of-tcp")
				end(b, f, p)
			})
		}
	}
}

func tcp(b *testing.B) (out, in net.Conn) {
	b.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	if out, err = net.Dial("tcp", l.Addr().String()); err != nil {
		b.Fatal(err)
	}
	if in, err = l.Accept(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { out.Close(); in.Close() })
	return out, in
}
