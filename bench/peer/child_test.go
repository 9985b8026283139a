package peer

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/terrace-kv/terrace"
	"github.com/terrace-kv/terrace/client"
)

const childEnv = "TERRACE_BENCH_PEER"

// childArgs say what the child is: a node, or else an end of the raw transfer.
type childArgs struct {
	Node    string // its id
	Socket  string
	Primary int64

	Ping time.Duration // between signs of life; 0 is the default

	Raw  int    // bytes of memory
	Dial string // who sends, if it is not the sender itself
}

func TestMain(m *testing.M) {
	if args := os.Getenv(childEnv); args != "" {
		if err := childMain(args); err != nil {
			fmt.Fprintln(os.Stderr, "child:", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// childMain says where it listens, and is there until its input ends.
func childMain(args string) error {
	var a childArgs
	if err := json.Unmarshal([]byte(args), &a); err != nil {
		return err
	}
	in := bufio.NewReader(os.Stdin)
	switch {
	case a.Dial != "":
		return rawReceiver(a, in)
	case a.Raw > 0:
		return rawSender(a, in)
	}
	n, err := terrace.Open(context.Background(), terrace.Options{Socket: a.Socket, PrimarySize: a.Primary, Populate: true,
		Peers:  &terrace.Peers{Listen: "127.0.0.1:0", NodeID: a.Node, Bounds: terrace.PeerBounds{PingEvery: a.Ping}},
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))})
	if err != nil {
		return err
	}
	for n.Status().Primary.PopulatedBytes < a.Primary {
		time.Sleep(10 * time.Millisecond)
	}
	fmt.Println(n.Status().Peers.Advertise)
	_, _ = in.ReadString(0)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return n.Close(ctx)
}

// child is a process.
type child struct {
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Reader
	addr string // where it listens
}

func start(b *testing.B, a childArgs) *child {
	b.Helper()
	args, err := json.Marshal(a)
	if err != nil {
		b.Fatal(err)
	}
	c := &child{cmd: exec.Command(os.Args[0], "-test.run=^$")}
	c.cmd.Env = append(os.Environ(), childEnv+"="+string(args))
	c.cmd.Stderr, c.cmd.SysProcAttr = os.Stderr, &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		b.Fatal(err)
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		_ = c.cmd.Process.Signal(syscall.SIGCONT)
		_ = c.in.Close() // the child ends with its input
		if err := c.cmd.Wait(); err != nil {
			b.Error(err)
		}
	})
	c.out = bufio.NewReader(out)
	c.addr = c.line(b)
	return c
}

func (c *child) line(b *testing.B) string {
	b.Helper()
	line, err := c.out.ReadString('\n')
	if err != nil {
		b.Fatalf("the child is gone: %v", err)
	}
	return strings.TrimSpace(line)
}

// node is a child with an engine.
type node struct {
	*child
	engine *client.Client
	n      atomic.Int64 // requests so far
}

func startNode(b *testing.B, a childArgs) *node {
	b.Helper()
	a.Socket = filepath.Join(b.TempDir(), "s")
	n := &node{child: start(b, a)}
	var err error
	if n.engine, err = client.Dial(b.Context(), client.Options{Socket: a.Socket, Spec: spec}); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = n.engine.Close() })
	return n
}
