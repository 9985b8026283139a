package client_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/client"
	"github.com/terrace-kv/terrace/internal/engine/enginetest"
)

const benchKeys = 200

// benchNode starts a node in a process of its own, as in life, and gives its
// socket.
func benchNode(b *testing.B) string {
	b.Helper()
	path := filepath.Join(b.TempDir(), "s")
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), "TERRACE_TEST_CHILD=node", "TERRACE_TEST_SOCKET="+path)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
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
	b.Cleanup(func() {
		in.Close() // the child ends with its input
		if err := cmd.Wait(); err != nil {
			b.Error(err)
		}
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "ready\n" {
		b.Fatalf("%q, %v", line, err)
	}
	return path
}

func nodeChild() {
	t := &childTB{}
	b := enginetest.New(t, 4096, 4096)
	if err := b.Add(enginetest.Spec(), enginetest.Keys(0, 8*benchKeys), func(int, []byte) uint64 { return 0 }); err != nil {
		panic(err)
	}
	s := serve(t, os.Getenv("TERRACE_TEST_SOCKET"), b)
	fmt.Println("ready")
	io.Copy(io.Discard, os.Stdin)
	if err := s.Close(); err != nil {
		panic(err)
	}
	t.cleanup()
}

func benchEngine(b *testing.B, path string) (*client.Request, func()) {
	b.Helper()
	ctx := context.Background()
	c, err := client.Dial(ctx, client.Options{Socket: path, Spec: enginetest.Spec()})
	if err != nil {
		b.Fatal(err)
	}
	r, err := c.NewRequest(ctx, "r", client.NoLimits())
	if err != nil {
		b.Fatal(err)
	}
	return r, func() { c.Close() }
}

func lookup(b *testing.B, r *client.Request, keys [][]block.Key, a *client.Answer) {
	if err := r.LookupInto(context.Background(), keys, client.LookupOptions{}, a); err != nil {
		b.Error(err)
	}
	if a.Tokens != 16*benchKeys {
		b.Errorf("%d tokens", a.Tokens)
	}
}

// BenchmarkLookup is one engine that looks up 200 ready keys at a time, with
// the node in a process of its own.
func BenchmarkLookup(b *testing.B) {
	r, done := benchEngine(b, benchNode(b))
	defer done()
	keys := [][]block.Key{enginetest.Keys(0, benchKeys)}
	var a client.Answer
	times := make([]time.Duration, 0, 1<<20)
	lookup(b, r, keys, &a)
	b.ReportAllocs()
	for b.Loop() {
		began := time.Now()
		lookup(b, r, keys, &a)
		times = append(times, time.Since(began))
	}
	slices.Sort(times)
	b.ReportMetric(float64(times[len(times)/2].Nanoseconds())/1e3, "p50-µs")
	b.ReportMetric(float64(times[len(times)*99/100].Nanoseconds())/1e3, "p99-µs")
}

// BenchmarkLookupEngines is several engines at once, sharing this process but
// not their sessions.
func BenchmarkLookupEngines(b *testing.B) {
	for _, n := range []int{2, 8} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			path := benchNode(b)
			var wg sync.WaitGroup
			engines := make([]*client.Request, n)
			for i := range engines {
				r, done := benchEngine(b, path)
				defer done()
				engines[i] = r
			}
			b.ResetTimer()
			for i, r := range engines {
				wg.Go(func() {
					keys := [][]block.Key{enginetest.Keys(i%8*benchKeys, benchKeys)}
					var a client.Answer
					for range b.N {
						lookup(b, r, keys, &a)
					}
				})
			}
			wg.Wait()
			b.ReportMetric(float64(n*benchKeys*b.N)/b.Elapsed().Seconds()/1e6, "Mkeys/s")
		})
	}
}

// BenchmarkEcho is what the frames of such a lookup cost without us: a write
// and a read of their sizes, each way.
func BenchmarkEcho(b *testing.B) {
	path := filepath.Join(b.TempDir(), "s")
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), "TERRACE_TEST_CHILD=echo", "TERRACE_TEST_SOCKET="+path)
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || !strings.HasPrefix(line, "ready") {
		b.Fatalf("%q, %v", line, err)
	}
	c := dialUnix(b, path)
	call, reply := make([]byte, 7230), make([]byte, 5030)
	var times []time.Duration
	for b.Loop() {
		began := time.Now()
		if _, err := c.Write(call); err != nil {
			b.Fatal(err)
		}
		if _, err := io.ReadFull(c, reply); err != nil {
			b.Fatal(err)
		}
		times = append(times, time.Since(began))
	}
	slices.Sort(times)
	b.ReportMetric(float64(times[len(times)/2].Nanoseconds())/1e3, "p50-µs")
	c.Close()
	if err := cmd.Wait(); err != nil {
		b.Error(err)
	}
}
