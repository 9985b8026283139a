package node

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/lifecycle"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/memtier"
)

// oddTier does what a tier must not do in calls that the node makes itself.
type oddTier struct {
	*memtier.Indexed
	touch, known, open func()
}

func (o *oddTier) Touch(*block.Namespace, []block.Key) { o.touch() }

func (o *oddTier) Known(ns *block.Namespace, keys []block.Key, out []tier.Presence) {
	o.known()
	o.Indexed.Known(ns, keys, out)
}

func (o *oddTier) OpenNamespace(ctx context.Context, ns *block.Namespace) error {
	o.open()
	return o.Indexed.OpenNamespace(ctx, ns)
}

func odd() *oddTier {
	nothing := func() {}
	return &oddTier{memtier.NewIndexed(memtier.Options{}), nothing, nothing, nothing}
}

type syncBuffer struct {
	mu sync.Mutex
	bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Buffer.Write(p)
}

func (b *syncBuffer) String() string { b.mu.Lock(); defer b.mu.Unlock(); return b.Buffer.String() }

// down waits until exactly these loops are down.
func down(t *testing.T, n *Node, want ...string) {
	t.Helper()
	var got []string
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		got = nil
		for _, l := range n.Loops() {
			if l.Down != "" {
				got = append(got, l.Name)
			}
		}
		if slices.Equal(got, want) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("down are %q, want %q", got, want)
		}
	}
}

// A loop that hangs makes the node not ready and is named, and it is ready
// again when the loop goes on (B138).
func TestStuckLoopIsReported(t *testing.T) {
	x, goOn := odd(), make(chan struct{})
	x.touch = func() { <-goOn }
	log := &syncBuffer{}
	n := openNode(t, 64, []tier.Tier{x}, func(o *Options) {
		o.loopBound, o.Logger = 50*time.Millisecond, slog.New(slog.NewTextHandler(log, nil))
	})
	down(t, n)
	e := greet(t, n, space1(t, "m"))
	e.request("a")
	e.store("a", keys(0, 2), true)
	e.load("a", keys(0, 2)) // tells the toucher
	down(t, n, "toucher")
	s := n.Status()
	if s.Ready || s.State != "ready" || len(s.Missing) != 1 || !strings.Contains(s.Missing[0], "loop toucher is in one turn for longer than 50ms") {
		t.Errorf("ready %v, missing %q", s.Ready, s.Missing)
	}
	// Everybody else is served.
	e.request("b")
	e.store("b", keys(2, 4), true)
	if e.load("b", keys(2, 4)) != 2 {
		t.Error("not served")
	}
	close(goOn)
	down(t, n)
	if s := n.Status(); !s.Ready || s.Missing != nil {
		t.Errorf("ready %v, missing %q", s.Ready, s.Missing)
	}
	if text := log.String(); strings.Count(text, "level=ERROR") != 1 || !strings.Contains(text, "loop=toucher") || !strings.Contains(text, "goes on") {
		t.Errorf("log: %s", text)
	}
}

// A lock that nobody gives back is noticed though nothing is due, and told
// without that lock.
func TestLockThatIsHeldIsReported(t *testing.T) {
	n := openNode(t, 64, nil, func(o *Options) { o.loopBound = 50 * time.Millisecond })
	n.mu.Lock()
	down(t, n, "ticker")
	n.mu.Unlock()
	down(t, n)
}

// A loop that ends by itself is told for good; that all end with the node is
// told of none.
func TestEndedLoopIsReported(t *testing.T) {
	log := &syncBuffer{}
	n := openNode(t, 64, nil, func(o *Options) { o.Logger = slog.New(slog.NewTextHandler(log, nil)) })
	n.loop("short", func(l *lifecycle.Loop) { l.Work() })
	down(t, n, "short")
	if s := n.Status(); s.Ready || len(s.Missing) != 1 || !strings.Contains(s.Missing[0], "loop short has ended") {
		t.Errorf("ready %v, missing %q", s.Ready, s.Missing)
	}
	before := log.String()
	if !strings.Contains(before, "loop=short") {
		t.Errorf("log: %s", before)
	}
	if err := n.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if rest := log.String()[len(before):]; strings.Contains(rest, "loop") {
		t.Errorf("log: %s", rest)
	}
}

// Code of a tier that panics where no lane makes the call fails that call, is
// counted, and ends no loop.
func TestPanicsOfATierOutsideItsLane(t *testing.T) {
	x := odd()
	log := &syncBuffer{}
	n := openNode(t, 64, []tier.Tier{x}, func(o *Options) { o.Logger = slog.New(slog.NewTextHandler(log, nil)) })
	x.open = func() { panic("open") }
	e := greet(t, n, space1(t, "m"))
	e.request("a")
	e.store("a", keys(0, 2), true)
	if f := e.flush("a"); f.Cascaded != 2 {
		t.Errorf("flush: %+v", f)
	}
	x.known = func() { panic("known") }
	e.request("b")
	if e.load("b", keys(5, 7)) != 0 { // asked by a probe instead
		t.Error("found")
	}
	x.touch = func() { panic("touch") }
	touched := make(chan struct{}, 1)
	e.load("a", keys(0, 2))
	for deadline := time.Now().Add(20 * time.Second); !strings.Contains(log.String(), "call=touch"); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the toucher was not told")
		}
	}
	x.touch = func() {
		select {
		case touched <- struct{}{}:
		default:
		}
	}
	e.load("a", keys(0, 2))
	<-touched // it lives
	down(t, n)
	s := n.Status().Tiers[0]
	if s.Panics < 3 || !strings.Contains(s.LastError, "the tier panicked: touch") {
		t.Errorf("%d panics, last error %q", s.Panics, s.LastError)
	}
	for _, call := range []string{"open_namespace", "known", "touch"} {
		if !strings.Contains(log.String(), "call="+call) {
			t.Errorf("no line for %s", call)
		}
	}
}

// A panic in the core ends the process, although the lane that brings the
// result recovers panics: a broken table must not serve bytes.
func TestPanicInTheCoreEndsTheProcess(t *testing.T) {
	const env = "NODE_TEST_PANIC"
	if os.Getenv(env) != "" {
		m := memtier.NewIndexed(memtier.Options{})
		hold := make(chan struct{})
		m.SetHook(func(_ context.Context, op memtier.Op, _ *block.Namespace, _ block.Key) memtier.Fault {
			if op != memtier.OpWrite {
				return memtier.Fault{}
			}
			return memtier.Fault{Wait: hold}
		})
		n := openNode(t, 64, []tier.Tier{m}, nil)
		e := greet(t, n, space1(t, "m"))
		e.request("a")
		e.store("a", keys(0, 2), true)
		n.mu.Lock()
		n.core = nil
		n.mu.Unlock()
		close(hold)
		time.Sleep(20 * time.Second)
		fmt.Println("the node lives on")
		os.Exit(0)
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestPanicInTheCoreEndsTheProcess$")
	cmd.Env = append(os.Environ(), env+"=1")
	out, _ := cmd.CombinedOutput()
	if code := cmd.ProcessState.ExitCode(); code != 2 || !bytes.Contains(out, []byte("panic: node: results of a tier: ")) || !bytes.Contains(out, []byte("JobResults")) {
		t.Fatalf("exit code %d\n%s", code, out)
	}
}
