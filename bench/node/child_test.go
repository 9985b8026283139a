package node

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
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace"
	"github.com/terrace-kv/terrace/tier/fstier"
)

const childEnv = "TERRACE_BENCH_NODE"

// childArgs say what node the child is.
type childArgs struct {
	Socket, Root string
	PrimarySize  int64
}

func TestMain(m *testing.M) {
	if args := os.Getenv(childEnv); args != "" {
		if err := childMain(args); err != nil {
			fmt.Fprintln(os.Stderr, "node:", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// childMain is a node until its input ends. It says ready when all memory is
// touched, and then for each line how much CPU time it has spent, in µs.
func childMain(args string) error {
	var a childArgs
	if err := json.Unmarshal([]byte(args), &a); err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	t, err := openTier(a.Root, log)
	if err != nil {
		return err
	}
	n, err := terrace.Open(context.Background(), terrace.Options{Socket: a.Socket, PrimarySize: a.PrimarySize,
		Populate: true, Tiers: []terrace.Tier{{Tier: t}}, Logger: log})
	if err != nil {
		return err
	}
	for n.Status().Primary.PopulatedBytes < a.PrimarySize {
		time.Sleep(10 * time.Millisecond)
	}
	fmt.Println("ready")
	in := bufio.NewReader(os.Stdin)
	for {
		if _, err := in.ReadString('\n'); err != nil {
			break
		}
		fmt.Println(cpuTime().Microseconds())
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return n.Close(ctx)
}

func openTier(root string, log *slog.Logger) (*fstier.Tier, error) {
	t, err := fstier.Open(context.Background(), fstier.Options{Root: root, MinFree: -1, Workers: workers, Logger: log})
	if err == nil {
		<-t.ScanDone()
	}
	return t, err
}

// cpuTime is what this process has spent, all its threads and the kernel's
// work for them.
func cpuTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// child is a node in a process of its own.
type child struct {
	socket string
	in     io.WriteCloser
	out    *bufio.Reader
}

func startNode(b *testing.B, root string, primary int64) *child {
	b.Helper()
	c := &child{socket: filepath.Join(b.TempDir(), "s")}
	args, err := json.Marshal(childArgs{Socket: c.socket, Root: root, PrimarySize: primary})
	if err != nil {
		b.Fatal(err)
	}
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), childEnv+"="+string(args))
	cmd.Stderr = os.Stderr
	if c.in, err = cmd.StdinPipe(); err != nil {
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
		_ = c.in.Close() // the child ends with its input
		if err := cmd.Wait(); err != nil {
			b.Error(err)
		}
	})
	c.out = bufio.NewReader(out)
	if line := c.line(b); line != "ready" {
		b.Fatalf("the node says %q", line)
	}
	return c
}

func (c *child) line(b *testing.B) string {
	b.Helper()
	line, err := c.out.ReadString('\n')
	if err != nil {
		b.Fatalf("the node is gone: %v", err)
	}
	return strings.TrimSpace(line)
}

// cpu is the CPU time that the node has spent.
func (c *child) cpu(b *testing.B) time.Duration {
	b.Helper()
	if _, err := io.WriteString(c.in, "\n"); err != nil {
		b.Fatal(err)
	}
	us, err := strconv.ParseInt(c.line(b), 10, 64)
	if err != nil {
		b.Fatal(err)
	}
	return time.Duration(us) * time.Microsecond
}
