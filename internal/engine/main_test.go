package engine_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/internal/arena"
	"github.com/terrace-kv/terrace/internal/engine"
	"github.com/terrace-kv/terrace/internal/engine/enginetest"
	"github.com/terrace-kv/terrace/internal/wire"
	"go.uber.org/goleak"
)

// TestMain lets the test binary be an engine or a node that is killed.
func TestMain(m *testing.M) {
	path := os.Getenv("TERRACE_TEST_SOCKET")
	switch os.Getenv("TERRACE_TEST_CHILD") {
	case "":
		goleak.VerifyTestMain(m)
	case "engine": // greets, maps, and waits for its end
		c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			panic(err)
		}
		if _, err := c.Write(wire.AppendFrame(nil, wire.TypeHello, 1, hello())); err != nil {
			panic(err)
		}
		_, f, err := arena.RecvFD(c, make([]byte, 4096))
		if err != nil {
			panic(err)
		}
		if _, err := arena.Map(f, testRegion); err != nil {
			panic(err)
		}
		c.Write(wire.AppendFrame(nil, wire.TypeNewRequest, 2, &wire.NewRequest{Request: "r"}))
		fmt.Println("ready")
		io.Copy(io.Discard, os.Stdin)
	case "listen":
		if _, err := engine.Listen(path, ""); err != nil {
			panic(err)
		}
		fmt.Println("ready")
		io.Copy(io.Discard, os.Stdin)
	}
}

// child starts the test binary as something else and waits until it is ready.
func child(t *testing.T, what, path string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), "TERRACE_TEST_CHILD="+what, "TERRACE_TEST_SOCKET="+path)
	cmd.Stderr = os.Stderr
	if _, err := cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 6)
	if _, err := io.ReadFull(out, line); err != nil || string(line) != "ready\n" {
		t.Fatalf("child says %q, %v", line, err)
	}
	return cmd
}

// kill is kill -9.
func kill(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	cmd.Wait()
}

const (
	testSlots  = 1024
	testRegion = testSlots * 4096
	patience   = 10 * time.Second // for what should happen at once
)

// logBuffer is a log that tests look into.
type logBuffer struct {
	sync.Mutex
	bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.Lock()
	defer l.Unlock()
	return l.Buffer.Write(p)
}
func (l *logBuffer) String() string { l.Lock(); defer l.Unlock(); return l.Buffer.String() }

// fixture is a server with its backend.
type fixture struct {
	*engine.Server
	b    *enginetest.Backend
	path string
	log  *logBuffer
}

func start(t *testing.T, o engine.Options, prepare ...func(*enginetest.Backend)) *fixture {
	t.Helper()
	f := &fixture{b: enginetest.New(t, testSlots, 4096), path: filepath.Join(t.TempDir(), "s"), log: new(logBuffer)}
	for _, p := range prepare {
		p(f.b)
	}
	l, err := engine.Listen(f.path, "")
	if err != nil {
		t.Fatal(err)
	}
	o.Logger = slog.New(slog.NewTextHandler(f.log, nil))
	f.Server = engine.Serve(l, f.b, o)
	t.Cleanup(func() {
		if err := f.Server.Close(); err != nil {
			t.Error(err)
		}
		if open, _ := f.b.Sessions(); open != 0 {
			t.Errorf("%d sessions are open after Close", open)
		}
	})
	return f
}

// ended waits until a session has been closed.
func (f *fixture) ended(t *testing.T) {
	t.Helper()
	select {
	case <-f.b.Changed():
	case <-time.After(patience):
		t.Fatal("no session has ended")
	}
}

// until polls what has no signal.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); {
		if time.Now().After(deadline) {
			t.Fatal("never: ", what)
		}
		time.Sleep(time.Millisecond)
	}
}

// raw is a client that can do everything wrong.
type raw struct {
	t    *testing.T
	c    *net.UnixConn
	r    *wire.Reader
	next uint32
}

func hello() *wire.Hello {
	return &wire.Hello{Versions: wire.Versions{Min: 1, Max: 1}, Engine: "raw", Spec: enginetest.Spec()}
}

func (f *fixture) dial(t *testing.T) *raw {
	t.Helper()
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: f.path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	r := wire.NewReader(c)
	r.Max = wire.FrameMax
	return &raw{t: t, c: c, r: r, next: 100}
}

// greet opens a session.
func (f *fixture) greet(t *testing.T) (*raw, *wire.HelloReply) {
	t.Helper()
	c := f.dial(t)
	var reply wire.HelloReply
	c.ok(wire.TypeHello, hello(), &reply)
	return c, &reply
}

// write sends bytes. A connection that the node has ended is no failure: the
// test looks at what it says.
func (c *raw) write(b []byte) { _, _ = c.c.Write(b) }

func (c *raw) send(t wire.Type, m wire.Message) uint32 {
	c.next++
	c.write(wire.AppendFrame(nil, t, c.next, m))
	return c.next
}

func (c *raw) read() wire.Frame {
	c.t.Helper()
	f, err := c.r.Read()
	if err != nil {
		c.t.Fatalf("read: %v", err)
	}
	return f
}

// call makes a call and returns what it was refused with.
func (c *raw) call(t wire.Type, m, reply wire.Message) error {
	c.t.Helper()
	id := c.send(t, m)
	return c.reply(id, t, reply)
}

func (c *raw) reply(id uint32, t wire.Type, reply wire.Message) error {
	c.t.Helper()
	f := c.read()
	switch {
	case f.Call != id:
		c.t.Fatalf("%v for call %d, want %d", f.Type, f.Call, id)
	case f.Type == wire.TypeError:
		var e wire.Error
		if err := e.Decode(f.Body); err != nil {
			c.t.Fatal(err)
		}
		return &e
	case f.Type != t|wire.ReplyBit:
		c.t.Fatalf("%v in reply to %v", f.Type, t)
	}
	if err := reply.Decode(f.Body); err != nil {
		c.t.Fatal(err)
	}
	return nil
}

func (c *raw) ok(t wire.Type, m, reply wire.Message) {
	c.t.Helper()
	if err := c.call(t, m, reply); err != nil {
		c.t.Fatalf("%v: %v", t, err)
	}
}

// eof checks that the node has ended the connection, with what we wrote read
// or not.
func (c *raw) eof() {
	c.t.Helper()
	if f, err := c.r.Read(); !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
		c.t.Fatalf("%v, %v, want the end", f.Type, err)
	}
}
