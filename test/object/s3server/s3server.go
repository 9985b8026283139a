package s3server

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Bounds.
const (
	startTimeout = 30 * time.Second
	stopTimeout  = 20 * time.Second
	startTries   = 5 // with another port each
	outputMax    = 64 << 10
)

// Options of a Server.
type Options struct {
	Dir    string // of its own; required
	TLS    bool
	Region string // default us-east-1
	Binary string // default: what Build makes
}

// Server is a server and how to reach it. Its methods are called by one
// goroutine at a time.
type Server struct {
	Endpoint             string // host and port
	Scheme               string
	Region               string
	AccessKey, SecretKey string
	CAFile               string // PEM; empty without TLS
	Data                 string // folder; buckets are folders in it, objects are files

	binary, cert, key string
	roots             *x509.CertPool
	client            *http.Client
	proc              *process // nil: it does not run
}

// Build makes the server's program, if it is not up to date, and says where it
// is. It does so once in a process.
func Build() (string, error) { return build() }

var build = sync.OnceValues(func() (string, error) {
	_, here, _, _ := runtime.Caller(0)
	tools := filepath.Join(filepath.Dir(here), "../../../tools")
	bin := filepath.Join(tools, "bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return "", err
	}
	// Of tests that start side by side one builds, the others wait for it.
	lock, err := os.Create(filepath.Join(bin, ".versitygw.lock"))
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return "", err
	}
	out := filepath.Join(bin, "versitygw")
	cmd := exec.Command("go", "build", "-C", filepath.Join(tools, "s3server"), "-ldflags=-s -w", "-o", out, "github.com/versity/versitygw/cmd/versitygw")
	if text, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building the S3 server: %w\n%s", err, text)
	}
	return out, nil
})

// Start starts a server for a test. At the test's end it is stopped; what it
// said is in the test's log if that failed.
func Start(tb testing.TB, o Options) *Server {
	tb.Helper()
	if o.Dir == "" {
		o.Dir = tb.TempDir()
	}
	s, err := Open(tb.Context(), o)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if p := s.proc; p != nil && tb.Failed() {
			tb.Logf("the S3 server said:\n%s", p.out.String())
		}
		s.Kill()
	})
	return s
}

// Open starts a server on a free port of the loopback interface and returns
// when it answers. The caller ends it with Kill or Stop. ctx bounds the start.
func Open(ctx context.Context, o Options) (_ *Server, err error) {
	s := &Server{Scheme: "http", Region: o.Region, AccessKey: "terrace-test", binary: o.Binary}
	if s.Region == "" {
		s.Region = "us-east-1"
	}
	secret := make([]byte, 20)
	_, _ = rand.Read(secret) // never fails
	s.SecretKey = "secret-" + hex.EncodeToString(secret)
	if s.Data, err = filepath.Abs(filepath.Join(o.Dir, "data")); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(s.Data, 0o700); err != nil {
		return nil, err
	}
	transport := &http.Transport{DisableKeepAlives: true}
	if o.TLS {
		s.Scheme = "https"
		if s.CAFile, s.cert, s.key, err = certificates(o.Dir); err != nil {
			return nil, err
		}
		pem, err := os.ReadFile(s.CAFile)
		if err != nil {
			return nil, err
		}
		s.roots = x509.NewCertPool()
		s.roots.AppendCertsFromPEM(pem)
		transport.TLSClientConfig = &tls.Config{RootCAs: s.roots}
	}
	s.client = &http.Client{Transport: transport, Timeout: time.Second}
	if s.binary == "" {
		if s.binary, err = Build(); err != nil {
			return nil, err
		}
	}
	// Whoever takes the port in between costs one try.
	for range startTries {
		if s.Endpoint, err = FreePort(); err != nil {
			return nil, err
		}
		if err = s.Restart(ctx); err == nil {
			return s, nil
		}
	}
	return nil, err
}

// FreePort is an address of the loopback interface where nobody listens.
func FreePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

// URL is where the server is.
func (s *Server) URL() string { return s.Scheme + "://" + s.Endpoint }

// Roots has the authority of the server's certificate; nil without TLS.
func (s *Server) Roots() *x509.CertPool { return s.roots }

// MakeBucket makes a bucket.
func (s *Server) MakeBucket(name string) error { return os.Mkdir(filepath.Join(s.Data, name), 0o700) }

// PID is the process's, 0 if there is none.
func (s *Server) PID() int {
	if s.proc == nil {
		return 0
	}
	return s.proc.cmd.Process.Pid
}

// Kill ends the server as nothing else does, and waits for its end.
func (s *Server) Kill() {
	if s.proc != nil {
		_ = s.proc.cmd.Process.Kill() // it may have ended
		<-s.proc.done
		s.proc = nil
	}
}

// Stop ends the server as an operator would.
func (s *Server) Stop() error {
	p := s.proc
	if p == nil {
		return nil
	}
	defer s.Kill()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-p.done:
		return nil
	case <-time.After(stopTimeout):
		return fmt.Errorf("the S3 server, process %d, still runs %v after a SIGTERM; killed", p.cmd.Process.Pid, stopTimeout)
	}
}

// Restart starts the server, which does not run, in the same place as before,
// and returns when it answers.
func (s *Server) Restart(ctx context.Context) error {
	s.Kill()
	args := []string{"--port", s.Endpoint, "--region", s.Region, "--keep-alive", "--quiet"}
	if s.cert != "" {
		args = append(args, "--cert", s.cert, "--key", s.key)
	}
	p := &process{cmd: exec.Command(s.binary, append(args, "posix", s.Data)...), done: make(chan struct{})}
	p.cmd.Dir = s.Data
	p.cmd.Env = []string{"ROOT_ACCESS_KEY_ID=" + s.AccessKey, "ROOT_SECRET_ACCESS_KEY=" + s.SecretKey, "HOME=" + s.Data}
	p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.out
	// Threads of ours end with us only, so this means: with us.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		return err
	}
	go func() {
		defer close(p.done)
		_ = p.cmd.Wait() // the output tells
	}()
	s.proc = p
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if s.answers(ctx) {
			return nil
		}
		select {
		case <-tick.C:
			continue
		case <-p.done:
		case <-ctx.Done():
		}
		s.Kill()
		return fmt.Errorf("the S3 server does not answer on %s: %s", s.Endpoint, p.out.String())
	}
}

// answers tells whether somebody speaks HTTP there, whatever is said.
func (s *Server) answers(ctx context.Context) bool {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, s.URL(), nil)
	if err != nil {
		return false
	}
	resp, err := s.client.Do(r)
	if err != nil {
		return false
	}
	_ = resp.Body.Close()
	return resp.Header.Get("Server") == "VERSITYGW"
}

// process is a run of the program.
type process struct {
	cmd  *exec.Cmd
	out  output
	done chan struct{} // closed when it has been waited for
}

// output keeps the first outputMax bytes.
type output struct {
	mu sync.Mutex
	b  []byte
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.b = append(o.b, b[:min(len(b), outputMax-len(o.b))]...)
	return len(b), nil
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return string(o.b)
}
