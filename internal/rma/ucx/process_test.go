//go:build ucx && cgo

package ucx

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/internal/rma"
	"github.com/terrace-kv/terrace/internal/rma/rmatest"
)

// A test binary that has this in its environment is another node: it serves, or
// it loads from the node whose description it reads.
const role = "UCX_TEST_ROLE" // role, transports, bytes of the region

func TestMain(m *testing.M) {
	what, ok := os.LookupEnv(role)
	if !ok {
		os.Exit(m.Run())
	}
	f := strings.Fields(what)
	if err := play(f[0], f[1], f[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func play(what, transports, size string) error {
	f, err := Open(Options{Transports: transports})
	if err != nil {
		return err
	}
	n, err := strconv.Atoi(size)
	if err != nil {
		return err
	}
	in := bufio.NewReader(os.Stdin)
	switch what {
	case "serve":
		var t testing.T
		r, err := f.Register(rmatest.Memory(&t, n, 1))
		if err != nil {
			return err
		}
		fmt.Printf("%x\n", r.Description())
		if _, err := in.ReadByte(); err != io.EOF {
			return err
		}
		if err := r.Release(); err != nil {
			return err
		}
		return f.Close()
	default:
		line, err := in.ReadString('\n')
		if err != nil {
			return err
		}
		d, err := hex.DecodeString(strings.TrimSpace(line))
		if err != nil {
			return err
		}
		p, err := f.Connect(d)
		if err != nil {
			return err
		}
		go func() {
			in.ReadByte() // the end of the test
			os.Exit(1)
		}()
		dst := make([]byte, n)
		var under []rma.Handle
		for i := 0; ; i++ {
			h, err := p.Post(dst, 0)
			if err != nil {
				return err
			}
			if under = append(under, h); len(under) < 16 {
				continue
			}
			if done, err := under[0].Poll(context.Background()); !done || err != nil {
				return fmt.Errorf("get %d: %t, %v", i, done, err)
			}
			if err := under[0].Release(); err != nil {
				return err
			}
			if under = under[1:]; i == 16 {
				fmt.Println("loading")
			}
		}
	}
}

type child struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

// start begins another node; the test kills it if it is still there at the end.
func start(t testing.TB, what, transports string, size int) *child {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := &child{cmd: exec.Command(exe)}
	c.cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %s %d", role, what, transports, size))
	c.cmd.Stderr = os.Stderr
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	c.out = bufio.NewReader(out)
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.kill)
	return c
}

func (c *child) kill() {
	c.cmd.Process.Kill()
	c.cmd.Wait()
}

// line is the next of the child's output.
func (c *child) line(t testing.TB) string {
	t.Helper()
	line, err := c.out.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(line)
}

// served is a fabric with a connection to another process that serves n bytes.
func served(t testing.TB, transports string, n int) (rma.Fabric, rma.Peer, *child) {
	t.Helper()
	c := start(t, "serve", transports, n)
	d, err := hex.DecodeString(c.line(t))
	if err != nil {
		t.Fatal(err)
	}
	f := open(t, transports)
	p, err := f.Connect(d)
	if err != nil {
		t.Fatal(err)
	}
	return f, p, c
}

func end(t testing.TB, f rma.Fabric, p rma.Peer) {
	t.Helper()
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}

const soon = 20 * time.Second

// over waits for h, and releases it.
func over(t testing.TB, h rma.Handle) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	done, err := h.Poll(ctx)
	if !done {
		t.Fatalf("a get is not over after %v: %v", soon, err)
	}
	if err := h.Release(); err != nil {
		t.Error(err)
	}
	return err
}

func TestRandomGets(t *testing.T) {
	for _, transports := range []string{"tcp", "tcp,sm"} {
		t.Run(transports, func(t *testing.T) {
			const size, under = 8 << 20, 16
			want := rmatest.Memory(t, size, 1) // as the child's
			mem := rmatest.Memory(t, under*100_000, 2)
			f, p, c := served(t, transports, size)
			type posted struct {
				h   rma.Handle
				dst []byte
				off int
			}
			var ring [under]posted
			r := rand.New(rand.NewPCG(1, 1))
			for i := range 10_000 + under {
				x := &ring[i%under]
				if x.h != nil {
					if err := over(t, x.h); err != nil || !bytes.Equal(x.dst, want[x.off:x.off+len(x.dst)]) {
						t.Fatalf("get %d, %d bytes from %d: %v", i-under, len(x.dst), x.off, err)
					}
				}
				if i >= 10_000 {
					x.h = nil
					continue
				}
				n := 1 + r.IntN(20_000)
				if i%50 == 0 {
					n = 100_000
				}
				x.off, x.dst = r.IntN(size-n+1), mem[i%under*100_000:][:n]
				clear(x.dst)
				var err error
				if x.h, err = p.Post(x.dst, uint64(x.off)); err != nil {
					t.Fatal(err)
				}
			}
			end(t, f, p)
			c.in.Close()
			if err := c.cmd.Wait(); err != nil {
				t.Errorf("the other node: %v", err)
			}
		})
	}
}

// TestTargetEnds: a target that is killed or stopped in mid-load; in either case
// all gets are over soon, at the latest after Close.
func TestTargetEnds(t *testing.T) {
	for _, transports := range []string{"tcp", "tcp,sm"} {
		for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
			t.Run(transports+" "+sig.String(), func(t *testing.T) {
				f, p, c := served(t, transports, 1<<20)
				dst := rmatest.Memory(t, 64<<20, 2)
				for i := range 4 {
					h, err := p.Post(dst[:4096], uint64(i))
					if err != nil {
						t.Fatal(err)
					}
					if err := over(t, h); err != nil {
						t.Fatal(err)
					}
				}
				if sig == syscall.SIGSTOP {
					c.cmd.Process.Signal(sig) // what is posted from here on stays under way
				}
				var hs []rma.Handle
				for i := range 64 {
					h, err := p.Post(dst[i<<20:][:1<<20], 0)
					if err != nil {
						t.Fatal(err)
					}
					hs = append(hs, h)
				}
				c.cmd.Process.Signal(sig)
				if sig == syscall.SIGSTOP {
					if err := hs[63].Release(); err == nil {
						t.Error("a get from a stopped node was released")
					}
					ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
					if done, err := hs[63].Poll(ctx); done || err != nil {
						t.Errorf("a get from a stopped node: %t, %v", done, err)
					}
					cancel()
				}
				if err := p.Close(); err != nil {
					t.Error(err)
				}
				failed := 0
				for _, h := range hs {
					if over(t, h) != nil {
						failed++
					}
				}
				if failed == 0 {
					t.Error("all gets from an ended node went well")
				}
				// Nothing writes what was released.
				clear(dst)
				c.cmd.Process.Signal(syscall.SIGCONT)
				q, mine := connected(t, f)
				h, err := q.Post(mine, 0)
				if err != nil {
					t.Fatal(err)
				}
				if err := over(t, h); err != nil {
					t.Error(err)
				}
				if i := slices.IndexFunc(dst, func(b byte) bool { return b != 0 }); i >= 0 {
					t.Errorf("byte %d was written after its release", i)
				}
				q.Close()
				end(t, f, p)
			})
		}
	}
}

// connected is one more connection of f, to a new node, and room for a get.
func connected(t *testing.T, f rma.Fabric) (rma.Peer, []byte) {
	t.Helper()
	c := start(t, "serve", "tcp", 1<<20)
	d, err := hex.DecodeString(c.line(t))
	if err != nil {
		t.Fatal(err)
	}
	p, err := f.Connect(d)
	if err != nil {
		t.Fatal(err)
	}
	return p, make([]byte, 4096)
}

// TestConsumersEnd: nodes that are killed in mid-load do not harm the one that
// they load from.
func TestConsumersEnd(t *testing.T) {
	for _, transports := range []string{"tcp", "tcp,sm"} {
		s := start(t, "serve", transports, 1<<20)
		d := s.line(t)
		for i := range 5 {
			l := start(t, "load", transports, 1<<20)
			fmt.Fprintln(l.in, d)
			if got := l.line(t); got != "loading" {
				t.Fatal(got)
			}
			time.Sleep(time.Duration(i) * time.Millisecond) // another moment each time
			l.kill()
		}
		s.in.Close()
		if err := s.cmd.Wait(); err != nil {
			t.Fatalf("with %s: %v", transports, err)
		}
	}
}

// TestNoThreads: threads end with their fabric.
func TestNoThreads(t *testing.T) {
	threads := func() int {
		all, err := os.ReadDir("/proc/self/task")
		if err != nil {
			t.Fatal(err)
		}
		return len(all)
	}
	cycle := func() {
		f, p, c := served(t, "tcp", 1<<20)
		h, err := p.Post(make([]byte, 1<<20), 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := over(t, h); err != nil {
			t.Fatal(err)
		}
		end(t, f, p)
		c.kill()
	}
	cycle()
	before := threads()
	for range 5 {
		cycle()
	}
	for deadline := time.Now().Add(soon); threads() > before+2; time.Sleep(time.Millisecond) { // Go's own come and go
		if time.Now().After(deadline) {
			t.Fatalf("%d threads, %d before", threads(), before)
		}
	}
}
