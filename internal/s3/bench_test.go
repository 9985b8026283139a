package s3

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	minio "github.com/minio/minio-go/v7/pkg/signer"
)

// serveRaw is a server that does nothing but move bytes: GET answers with as
// many as it was told, PUT reads what comes. It ends with its stdin.
func serveRaw(size string) {
	var n int
	fmt.Sscan(size, &n)
	data := make([]byte, n)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		os.Exit(1)
	}
	fmt.Println(l.Addr())
	var get, put = fmt.Appendf(nil, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n", n), []byte("HTTP/1.1 200 OK\r\nETag: \"1\"\r\nContent-Length: 0\r\n\r\n")
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				r := bufio.NewReaderSize(conn, 4<<10)
				sink := make([]byte, 1<<20)
				for {
					var body int
					first, err := r.ReadSlice('\n')
					isPut := bytes.HasPrefix(first, []byte("PUT"))
					for err == nil {
						var l []byte
						if l, err = r.ReadSlice('\n'); len(l) <= 2 {
							break
						}
						if v, ok := bytes.CutPrefix(l, []byte("Content-Length: ")); ok {
							fmt.Sscan(string(v), &body)
						}
					}
					for body > 0 && err == nil {
						var n int
						n, err = r.Read(sink[:min(len(sink), body)])
						body -= n
					}
					if err != nil {
						return
					}
					if isPut {
						_, _ = conn.Write(put)
					} else {
						_, _ = conn.Write(get)
						_, _ = conn.Write(data)
					}
				}
			}()
		}
	}()
	_, _ = io.Copy(io.Discard, os.Stdin)
}

func startRaw(b testing.TB, size int) (addr string) {
	cmd := self(context.Background(), fmt.Sprintf("%s=%d", benchServer, size))
	stdin, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { stdin.Close(); _ = cmd.Wait() })
	addr, err = bufio.NewReader(out).ReadString('\n')
	if err != nil {
		b.Fatal(err)
	}
	return strings.TrimSpace(addr)
}

func cpu() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// parallel runs f with 16 workers, each with a buffer of its own, and reports
// the CPU of this process.
func parallel(b *testing.B, size int, f func(buf []byte) error) {
	b.SetBytes(int64(size))
	b.SetParallelism(8)
	b.ReportAllocs()
	var failed atomic.Value
	start := cpu()
	b.RunParallel(func(pb *testing.PB) {
		buf := make([]byte, size)
		for pb.Next() {
			if err := f(buf); err != nil {
				failed.Store(err)
				return
			}
		}
	})
	b.ReportMetric(float64(cpu()-start)/1e6/(float64(b.N)*float64(size)/(1<<30)), "cpu-ms/GiB")
	if err := failed.Load(); err != nil {
		b.Fatal(err)
	}
}

// bare is what net/http does with the same requests, signed once.
func bare(addr string, key string) (client *http.Client, header http.Header, url string) {
	client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64, MaxConnsPerHost: 64, DisableCompression: true}}
	url = "http://" + addr + "/" + bucket + "/" + key
	req, _ := http.NewRequest(http.MethodPut, url, nil)
	req.Header.Set("X-Amz-Content-Sha256", payloadUnset)
	minio.SignV4(*req, "access", secret, "", "us-east-1")
	return client, req.Header, url
}

// BenchmarkMove compares the client with net/http alone.
func BenchmarkMove(b *testing.B) {
	for _, size := range []int{1 << 20, 8 << 20} {
		b.Run(fmt.Sprintf("%dMiB", size>>20), func(b *testing.B) {
			addr := startRaw(b, size)
			o := options(nil)
			o.Endpoint = addr
			c := open(b, o)
			client, header, url := bare(addr, "k")
			defer client.CloseIdleConnections()
			ctx := context.Background()
			b.Run("put/s3", func(b *testing.B) {
				parallel(b, size, func(buf []byte) error {
					_, err := c.Put(ctx, "k", NewBody(buf[:256], buf[256:]), PutOptions{Checksum: Checksum{ChecksumCRC64NVME, 1}, IfNoneMatch: true})
					return err
				})
			})
			b.Run("put/bare", func(b *testing.B) {
				parallel(b, size, func(buf []byte) error {
					req, _ := http.NewRequest(http.MethodPut, url, bytes.NewReader(buf))
					req.Header = header
					resp, err := client.Do(req)
					if err == nil {
						_, err = io.Copy(io.Discard, resp.Body)
						resp.Body.Close()
					}
					return err
				})
			})
			b.Run("get/s3", func(b *testing.B) {
				parallel(b, size, func(buf []byte) error {
					_, err := c.Get(ctx, "k", buf[:256], buf[256:])
					return err
				})
			})
			b.Run("get/bare", func(b *testing.B) {
				parallel(b, size, func(buf []byte) error {
					req, _ := http.NewRequest(http.MethodGet, url, nil)
					req.Header = header
					resp, err := client.Do(req)
					if err == nil {
						_, err = io.ReadFull(resp.Body, buf)
						resp.Body.Close()
					}
					return err
				})
			})
		})
	}
}

func BenchmarkBuild(b *testing.B) {
	c := open(b, options(nil))
	v, _ := c.creds.get(context.Background())
	body := NewBody(make([]byte, 1))
	r := &request{op: "PUT", method: http.MethodPut, key: "prefix/" + strings.Repeat("0123456789abcdef", 4) + "/b/" + strings.Repeat("0123456789abcdef", 4) + "01234567", body: body, header: http.Header{"Content-Type": {"application/octet-stream"}, "X-Amz-Checksum-Crc64nvme": {"AAAAAAAAAAA="}, "If-None-Match": {"*"}}}
	b.ReportAllocs()
	for b.Loop() {
		c.build(context.Background(), r, v)
	}
}

// BenchmarkSign signs the header of a GET.
func BenchmarkSign(b *testing.B) {
	req := unsigned(http.MethodGet, "store.test:9000", "/bucket/prefix/"+strings.Repeat("0123456789abcdef", 4)+"/b/"+strings.Repeat("0123456789abcdef", 4)+"01234567", "", "User-Agent", userAgent)
	b.Run("own", func(b *testing.B) {
		b.ReportAllocs()
		s := newSigner("us-east-1", "s3")
		for b.Loop() {
			s.sign(req, "access", secret, time.Now())
		}
	})
	b.Run("minio", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			minio.SignV4(*req, "access", secret, "", "us-east-1")
		}
	})
}
