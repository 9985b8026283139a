package client_test

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"testing"

	"github.com/terrace-kv/terrace/internal/engine"
	"go.uber.org/goleak"
)

// TestMain lets the test binary be other processes, too.
func TestMain(m *testing.M) {
	switch os.Getenv("TERRACE_TEST_CHILD") {
	case "":
		goleak.VerifyTestMain(m)
	case "node":
		nodeChild()
	case "echo":
		echoChild()
	case "worker":
		workerChild()
	default:
		fmt.Fprintln(os.Stderr, "unknown child")
		os.Exit(2)
	}
}

// childTB lets helpers that want a testing.TB run in a child process.
type childTB struct {
	testing.TB
	cleanups []func()
}

func (t *childTB) Helper()                   {}
func (t *childTB) Cleanup(f func())          { t.cleanups = append(t.cleanups, f) }
func (t *childTB) Fatal(a ...any)            { panic(fmt.Sprint(a...)) }
func (t *childTB) Error(a ...any)            { panic(fmt.Sprint(a...)) }
func (t *childTB) Errorf(f string, a ...any) { panic(fmt.Sprintf(f, a...)) }
func (t *childTB) cleanup() {
	for i := len(t.cleanups) - 1; i >= 0; i-- {
		t.cleanups[i]()
	}
}

// serve starts a server at path that the caller closes.
func serve(t testing.TB, path string, b engine.Backend) *engine.Server {
	t.Helper()
	l, err := engine.Listen(path, "")
	if err != nil {
		t.Fatal(err)
	}
	return engine.Serve(l, b, engine.Options{Node: "test", Logger: slog.New(slog.DiscardHandler)})
}

func dialUnix(t testing.TB, path string) *net.UnixConn {
	t.Helper()
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func echoChild() {
	l, err := net.Listen("unix", os.Getenv("TERRACE_TEST_SOCKET"))
	if err != nil {
		panic(err)
	}
	fmt.Println("ready")
	c, err := l.Accept()
	if err != nil {
		panic(err)
	}
	call, reply := make([]byte, 7230), make([]byte, 5030)
	for {
		if _, err := io.ReadFull(c, call); err != nil {
			return
		}
		if _, err := c.Write(reply); err != nil {
			return
		}
	}
}
