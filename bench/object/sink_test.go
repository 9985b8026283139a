package object

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/terrace-kv/terrace/internal/s3"
)

const sinkEnv = "TERRACE_BENCH_SINK"

func TestMain(m *testing.M) {
	if os.Getenv(sinkEnv) != "" {
		sinkMain()
		return
	}
	os.Exit(m.Run())
}

// object of a sink: of a large one only the head is kept, and the rest reads as
// zeros.
type object struct {
	head []byte
	size int64
}

const keptWhole = 64 << 10

// sink is a store that only moves bytes: it checks no signature and no
// checksum.
type sink struct {
	mu      sync.Mutex
	objects map[string]object
	bufs    sync.Pool
}

var zeros = make([]byte, 1<<20)

func (s *sink) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	o, there := s.objects[r.URL.Path]
	s.mu.Unlock()
	switch {
	case r.Method == http.MethodPut && r.Header.Get("If-None-Match") != "" && there:
		_, _ = io.Copy(io.Discard, r.Body)
		w.WriteHeader(http.StatusPreconditionFailed)
	case r.Method == http.MethodPut:
		o = object{size: r.ContentLength, head: make([]byte, min(r.ContentLength, keptWhole))}
		if r.ContentLength > keptWhole {
			o.head = o.head[:headBytes]
		}
		if _, err := io.ReadFull(r.Body, o.head); err != nil {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		buf := s.bufs.Get().(*[]byte)
		for err := error(nil); err == nil; {
			_, err = r.Body.Read(*buf)
		}
		s.bufs.Put(buf)
		s.mu.Lock()
		s.objects[r.URL.Path] = o
		s.mu.Unlock()
	case r.Method == http.MethodDelete:
		s.mu.Lock()
		delete(s.objects, r.URL.Path)
		s.mu.Unlock()
		w.WriteHeader(http.StatusNoContent)
	case strings.Contains(r.URL.RawQuery, "list-type"):
		w.Header().Set("Content-Type", "application/xml")
		_, _ = io.WriteString(w, `<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>`)
	case !there:
		w.WriteHeader(http.StatusNotFound)
		if r.Method == http.MethodGet {
			_, _ = io.WriteString(w, `<Error><Code>NoSuchKey</Code></Error>`)
		}
	default:
		w.Header().Set("Content-Length", strconv.FormatInt(o.size, 10))
		if r.Method == http.MethodHead {
			return
		}
		_, _ = w.Write(o.head)
		for left := o.size - int64(len(o.head)); left > 0; left -= int64(len(zeros)) {
			if _, err := w.Write(zeros[:min(left, int64(len(zeros)))]); err != nil {
				return
			}
		}
	}
}

// sinkMain is a sink until its input ends. It says where it listens.
func sinkMain() {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Fprintln(os.Stderr, "sink:", err)
		os.Exit(1)
	}
	s := &sink{objects: map[string]object{}, bufs: sync.Pool{New: func() any { b := make([]byte, 256<<10); return &b }}}
	go func() { _ = http.Serve(l, s) }()
	fmt.Println(l.Addr())
	_, _ = io.Copy(io.Discard, os.Stdin)
}

func startSink(b *testing.B) server {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), sinkEnv+"=1")
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
		_ = in.Close()
		if err := cmd.Wait(); err != nil {
			b.Error(err)
		}
	})
	addr, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		b.Fatal(err)
	}
	return server{Options: s3.Options{Bucket: bucket, Endpoint: strings.TrimSpace(addr), Scheme: "http", Region: "us-east-1", AccessKey: "access", SecretKey: "secret"}, empty: func() {}}
}
