package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/client"
	"github.com/terrace-kv/terrace/internal/arena"
	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/internal/engine"
	"github.com/terrace-kv/terrace/internal/engine/enginetest"
	"github.com/terrace-kv/terrace/internal/wire"
)

const (
	testSlots = 1024
	blockSize = 4000
	patience  = 10 * time.Second // for what should happen at once
)

// node is a server that can die and come back.
type node struct {
	*engine.Server
	b    *enginetest.Backend
	path string
}

func startNode(t *testing.T, prepare ...func(*enginetest.Backend)) *node {
	t.Helper()
	n := &node{path: filepath.Join(t.TempDir(), "s")}
	n.b = enginetest.New(t, testSlots, 4096)
	for _, p := range prepare {
		p(n.b)
	}
	n.Server = serve(t, n.path, n.b)
	t.Cleanup(func() { n.Close() })
	return n
}

// restart is a node that has died, and another that has begun.
func (n *node) restart(t *testing.T) {
	t.Helper()
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	n.b = enginetest.New(t, testSlots, 4096)
	s := serve(t, n.path, n.b)
	t.Cleanup(func() { s.Close() }) // before the region of its backend
	n.Server = s
}

func dial(t *testing.T, n *node, change ...func(*client.Options)) *client.Client {
	t.Helper()
	o := client.Options{Socket: n.path, Spec: enginetest.Spec(), ReconnectMin: time.Millisecond, ReconnectMax: 10 * time.Millisecond, VerifyOnLoad: true}
	for _, f := range change {
		f(&o)
	}
	c, err := client.Dial(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func request(t *testing.T, c *client.Client, id string) *client.Request {
	t.Helper()
	r, err := c.NewRequest(t.Context(), id, client.NoLimits())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// bytesOf are what a block must hold.
func bytesOf(k block.Key) []byte {
	r := rand.NewChaCha8([32]byte(k[:32]))
	b := make([]byte, blockSize)
	r.Read(b)
	return b
}

func fill(keys []block.Key) func(int, []byte) (uint64, error) {
	return func(i int, dst []byte) (uint64, error) { return client.CopySum(dst, bytesOf(keys[i])), nil }
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); {
		if time.Now().After(deadline) {
			t.Fatal("never: ", what)
		}
		time.Sleep(time.Millisecond)
	}
}

// TestShare: what one engine stores, another reads, byte for byte.
func TestShare(t *testing.T) {
	ctx := t.Context()
	n := startNode(t)
	a, b := dial(t, n), dial(t, n)
	ra, rb := request(t, a, "r"), request(t, b, "r")
	keys := enginetest.Keys(0, 700)
	stored, err := ra.Store(ctx, 0, 0, keys, fill(keys))
	if err != nil || stored != (client.Stored{Stored: 700}) {
		t.Fatalf("%+v, %v", stored, err)
	}
	if got := n.b.Reserved(); !slices.Equal(got, []int{444, 188, 0}) {
		t.Errorf("reserved from %v, want the tail first", got)
	}
	more := enginetest.Keys(500, 300)
	if stored, err = rb.Store(ctx, 0, 500, more, fill(more)); err != nil || stored != (client.Stored{Stored: 100, Present: 200}) {
		t.Fatalf("%+v, %v", stored, err)
	}
	ans, err := rb.Lookup(ctx, [][]block.Key{enginetest.Keys(0, 801)}, client.LookupOptions{})
	if err != nil || ans.Tokens != 800*16 || !ans.Final || ans.Groups[0].Verdicts[800] != client.MissAbsent {
		t.Fatalf("%d tokens, final %v, %v", ans.Tokens, ans.Final, err)
	}
	dst := make([]byte, blockSize)
	for i, k := range enginetest.Keys(0, 800) {
		l, ok := ans.Lease(0, i)
		if !ok {
			t.Fatalf("no lease for key %d", i)
		}
		if err := b.ReadInto(l, dst); err != nil || !bytes.Equal(dst, bytesOf(k)) {
			t.Fatalf("key %d: wrong bytes, %v", i, err)
		}
	}
	for _, i := range [][2]int{{0, -1}, {0, 800}, {1, 0}, {-1, 0}} {
		if l, ok := ans.Lease(i[0], i[1]); ok || l.Valid() {
			t.Errorf("a lease %+v for group %d key %d", l, i[0], i[1])
		}
	}
	peek, err := ra.Lookup(ctx, [][]block.Key{keys[:3]}, client.LookupOptions{Peek: true})
	if err != nil || peek.Tokens != 48 {
		t.Fatalf("%+v, %v", peek, err)
	}
	if _, ok := peek.Lease(0, 0); ok {
		t.Error("a peek gave a lease")
	}
	// All the rest of the calls.
	pins, err := ra.Pin(ctx, []block.Key{keys[0], enginetest.Key(9999)})
	if err != nil || !pins[0].Valid() || pins[1].Valid() {
		t.Fatalf("%+v, %v", pins, err)
	}
	if err := a.Verify(pins[0]); err != nil {
		t.Error(err)
	}
	if err := a.View(pins[1], nil); err == nil {
		t.Error("a view of a lease that is none")
	}
	st, err := ra.Unpin(ctx, pins[:1])
	if err != nil || st[0] != client.FillOK {
		t.Errorf("%v, %v", st, err)
	}
	if err := ra.Touch(ctx, keys[:5]); err != nil {
		t.Error(err)
	}
	if fl, err := ra.Flush(ctx, time.Second); err != nil || !fl.Done {
		t.Errorf("%+v, %v", fl, err)
	}
	if err := ra.Finish(ctx); err != nil {
		t.Error(err)
	}
	if err := ra.Finish(ctx); !errors.Is(err, client.ErrFinished) {
		t.Errorf("a second finish: %v", err)
	}
	if err := rb.Finish(ctx); err != nil {
		t.Error(err)
	}
	if done, err := a.Reset(ctx, time.Second); err != nil || !done {
		t.Errorf("%v, %v", done, err)
	}
	if s, err := a.Status(ctx); err != nil || string(s) != `{"state":"ready"}` {
		t.Errorf("%s, %v", s, err)
	}
	if err := a.Ping(ctx); err != nil {
		t.Error(err)
	}
	info, err := a.Info()
	if err != nil || info.Node != "test" || info.RegionBytes != testSlots*4096 || info.Groups[0] != (client.GroupInfo{BlockBytes: blockSize, Stride: 4096}) || info.Epoch != ra.Epoch() {
		t.Errorf("%+v, %v", info, err)
	}
	if pins, filling := n.b.Pins(); pins != 0 || filling != 0 {
		t.Errorf("%d pins, %d reservations", pins, filling)
	}
}

// TestStoreFails: what was not committed is given back.
func TestStoreFails(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	n := startNode(t)
	c := dial(t, n)
	r := request(t, c, "r")
	keys := enginetest.Keys(0, 300)
	sorry := errors.New("the GPU is gone")
	stored, err := r.Store(ctx, 0, 0, keys, func(i int, dst []byte) (uint64, error) {
		if i == 10 {
			return 0, sorry
		}
		return fill(keys)(i, dst)
	})
	if !errors.Is(err, sorry) || stored.Stored != 256 {
		t.Errorf("%+v, %v", stored, err)
	}
	if _, filling := n.b.Pins(); filling != 0 || n.b.Aborted() != 44 {
		t.Errorf("%d slots are not given back, %d aborted", filling, n.b.Aborted())
	}
	stored, err = r.Store(ctx, 0, 0, keys[:20], func(i int, dst []byte) (uint64, error) {
		if i == 5 {
			cancel()
		}
		return fill(keys)(i, dst)
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("%+v, %v", stored, err)
	}
	if _, filling := n.b.Pins(); filling != 0 {
		t.Errorf("%d slots are not given back", filling)
	}
	big := enginetest.Keys(10_000, 2*testSlots)
	if stored, err = r.Store(t.Context(), 0, 0, big, fill(big)); !errors.Is(err, client.ErrNoRoom) || stored.Stored == 0 {
		t.Errorf("%+v, %v", stored, err)
	}
	if _, err := r.Reserve(t.Context(), 0, 0, big[:257]); !errors.Is(err, client.ErrInvalid) {
		t.Errorf("257 keys: %v", err)
	}
	if _, err := r.Reserve(t.Context(), 0, -1, big[:1]); !errors.Is(err, client.ErrInvalid) {
		t.Errorf("a negative index: %v", err)
	}
}

// TestVerify: bytes that are not what was stored are never used unnoticed.
func TestVerify(t *testing.T) {
	ctx := t.Context()
	n := startNode(t)
	c := dial(t, n)
	careless := dial(t, n, func(o *client.Options) { o.VerifyOnLoad = false })
	r := request(t, c, "r")
	keys := enginetest.Keys(0, 2)
	if _, err := r.Store(ctx, 0, 0, keys, fill(keys)); err != nil {
		t.Fatal(err)
	}
	if err := n.b.Corrupt(enginetest.Spec(), keys[1]); err != nil {
		t.Fatal(err)
	}
	l, err := r.Pin(ctx, keys)
	if err != nil {
		t.Fatal(err)
	}
	dst := make([]byte, blockSize)
	if err := c.ReadInto(l[0], dst); err != nil {
		t.Error(err)
	}
	if err := c.ReadInto(l[1], dst); !errors.Is(err, client.ErrCorrupt) {
		t.Errorf("a flipped bit: %v", err)
	}
	if err := c.Verify(l[1]); !errors.Is(err, client.ErrCorrupt) {
		t.Errorf("a flipped bit: %v", err)
	}
	if err := c.ReadInto(l[0], dst[1:]); !errors.Is(err, client.ErrSize) {
		t.Errorf("a short buffer: %v", err)
	}
	l2, err := request(t, careless, "r").Pin(ctx, keys)
	if err != nil {
		t.Fatal(err)
	}
	if err := careless.ReadInto(l2[1], dst); err != nil {
		t.Error(err)
	}
	// A commit without a sum gets the node's.
	g, err := r.Reserve(ctx, 0, 0, enginetest.Keys(50, 1))
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Write(g[0], func(b []byte) error { copy(b, bytesOf(enginetest.Key(50))); return nil }); err != nil {
		t.Fatal(err)
	}
	if st, err := r.Commit(ctx, []client.Fill{g[0].FillUnsummed()}); err != nil || st[0] != client.FillOK {
		t.Fatalf("%v, %v", st, err)
	}
	if l, err = r.Pin(ctx, enginetest.Keys(50, 1)); err != nil {
		t.Fatal(err)
	}
	if err := c.ReadInto(l[0], dst); err != nil {
		t.Error(err)
	}
}

func TestCopySum(t *testing.T) {
	for _, n := range []int{0, 1, 4000, 16 << 10, 16<<10 + 1, 1 << 20} {
		src, dst := make([]byte, n), make([]byte, n)
		rand.NewChaCha8([32]byte{1}).Read(src)
		if got := client.CopySum(dst, src); got != client.Sum(src) || !bytes.Equal(src, dst) {
			t.Errorf("%d bytes: %x", n, got)
		}
	}
}

// TestDeadline: a call ends with its context, and the session goes on.
func TestDeadline(t *testing.T) {
	n := startNode(t, func(b *enginetest.Backend) { b.Hold = true })
	c := dial(t, n, func(o *client.Options) { o.CallTimeout = 30 * time.Millisecond })
	r := request(t, c, "r")
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	keys := [][]block.Key{enginetest.Keys(0, 3)}
	began := time.Now()
	if _, err := r.Lookup(ctx, keys, client.LookupOptions{Wait: time.Minute}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
	if d := time.Since(began); d > patience/2 {
		t.Errorf("it took %v", d)
	}
	if _, err := r.Lookup(ctx, keys, client.LookupOptions{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a context that is over: %v", err)
	}
	// Without a deadline, CallTimeout beyond the wait.
	if _, err := r.Flush(context.Background(), time.Millisecond); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "flush") {
		t.Errorf("%v", err)
	}
	cancelled, stop := context.WithCancel(t.Context())
	time.AfterFunc(5*time.Millisecond, stop)
	if _, err := r.Lookup(cancelled, keys, client.LookupOptions{Wait: 5 * time.Second}); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	n.b.Release() // late replies go nowhere
	if err := c.Ping(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := r.Lookup(t.Context(), keys, client.LookupOptions{Wait: time.Hour}); !errors.Is(err, client.ErrInvalid) {
		t.Errorf("an hour: %v", err)
	}
}

// TestGivenUpReserve: slots that come after the caller has gone are aborted.
func TestGivenUpReserve(t *testing.T) {
	enter, leave := make(chan struct{}, 100), make(chan struct{})
	n := startNode(t, func(b *enginetest.Backend) { b.Reserving = func() { enter <- struct{}{}; <-leave } })
	c := dial(t, n)
	r := request(t, c, "r")
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for i := range 3 {
		wg.Go(func() {
			if _, err := r.Reserve(ctx, 0, 0, enginetest.Keys(10*i, 4)); !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		})
	}
	<-enter
	cancel()
	wg.Wait()
	close(leave)
	until(t, "they are aborted", func() bool {
		_, filling := n.b.Pins()
		return filling == 0 && n.b.Aborted() > 0 && n.b.Aborted()%4 == 0
	})
	if err := c.Ping(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestReconnect: the client comes back by itself, with a new epoch; what is of
// the old one is refused; nothing hangs.
func TestReconnect(t *testing.T) {
	ctx := t.Context()
	n := startNode(t, func(b *enginetest.Backend) { b.Hold = true })
	states := make(chan client.State, 1000)
	c := dial(t, n, func(o *client.Options) { o.OnState = func(s client.State) { states <- s } })
	r := request(t, c, "r")
	keys := enginetest.Keys(0, 2)
	if _, err := r.Store(ctx, 0, 0, keys, fill(keys)); err != nil {
		t.Fatal(err)
	}
	leases, err := r.Pin(ctx, keys)
	if err != nil {
		t.Fatal(err)
	}
	grants, err := r.Reserve(ctx, 0, 0, enginetest.Keys(5, 1))
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 5 { // calls that wait when the node dies
		wg.Go(func() {
			if _, err := r.Lookup(ctx, [][]block.Key{keys}, client.LookupOptions{Wait: time.Minute}); !errors.Is(err, client.ErrSessionLost) {
				t.Errorf("a pending call: %v", err)
			}
		})
	}
	until(t, "they wait", func() bool { return n.b.Held() == 5 })
	old := r.Epoch()
	n.Close()
	wg.Wait()
	if s := <-states; s.Epoch != "" || !errors.Is(s.Err, client.ErrSessionLost) {
		t.Errorf("state %+v", s)
	}
	began := time.Now()
	for name, err := range map[string]error{
		"ping":    c.Ping(ctx),
		"request": func() error { _, err := c.NewRequest(ctx, "x", client.NoLimits()); return err }(),
		"old":     r.Touch(ctx, keys),
		"view":    c.View(leases[0], func([]byte) error { return nil }),
		"info":    func() error { _, err := c.Info(); return err }(),
	} {
		if !errors.Is(err, client.ErrSessionLost) {
			t.Errorf("%s without a node: %v", name, err)
		}
	}
	if d := time.Since(began); d > patience/2 {
		t.Errorf("that took %v", d)
	}
	if s := <-states; s.Epoch != "" || !strings.Contains(s.Err.Error(), "terrace serve") {
		t.Errorf("state %+v", s)
	}
	n.restart(t)
	if err := c.WaitReady(ctx); err != nil {
		t.Fatal(err)
	}
	until(t, "OnState tells the epoch", func() bool {
		s := <-states
		return s.Epoch != "" && s.Epoch != old && s.Err == nil
	})
	r2 := request(t, c, "r")
	for name, err := range map[string]error{
		"view":   c.View(leases[0], func([]byte) error { return nil }),
		"write":  c.Write(grants[0], func([]byte) error { return nil }),
		"commit": func() error { _, err := r2.Commit(ctx, []client.Fill{grants[0].Fill(1)}); return err }(),
		"abort":  func() error { _, err := r2.Abort(ctx, grants); return err }(),
		"unpin":  func() error { _, err := r2.Unpin(ctx, leases); return err }(),
	} {
		if !errors.Is(err, client.ErrStale) {
			t.Errorf("%s of an old epoch: %v", name, err)
		}
	}
	if err := r.Touch(ctx, keys); !errors.Is(err, client.ErrSessionLost) {
		t.Errorf("a request of an old epoch: %v", err)
	}
	if _, err := r2.Store(ctx, 0, 0, keys, fill(keys)); err != nil {
		t.Error(err)
	}
}

// TestViewOutlivesSession: a view that runs when the session is lost keeps its
// memory, and the client greets again only after it.
func TestViewOutlivesSession(t *testing.T) {
	ctx := t.Context()
	n := startNode(t)
	c := dial(t, n)
	r := request(t, c, "r")
	keys := enginetest.Keys(0, 1)
	if _, err := r.Store(ctx, 0, 0, keys, fill(keys)); err != nil {
		t.Fatal(err)
	}
	leases, err := r.Pin(ctx, keys)
	if err != nil {
		t.Fatal(err)
	}
	err = c.View(leases[0], func(b []byte) error {
		n.restart(t)
		until(t, "the session is lost", func() bool {
			return errors.Is(c.View(leases[0], func([]byte) error { return nil }), client.ErrSessionLost)
		})
		for range 20 { // it would have come back many times
			time.Sleep(time.Millisecond)
			if _, err := c.Info(); err == nil {
				t.Fatal("it has greeted while the old region is mapped")
			}
		}
		if !bytes.Equal(b, bytesOf(keys[0])) {
			t.Error("the bytes have changed")
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	if err := c.WaitReady(ctx); err != nil {
		t.Error(err)
	}
}

// TestClose in every state, and with everything under way.
func TestClose(t *testing.T) {
	n := startNode(t, func(b *enginetest.Backend) { b.Hold = true })
	c := dial(t, n)
	r := request(t, c, "r")
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := r.Lookup(t.Context(), [][]block.Key{enginetest.Keys(0, 1)}, client.LookupOptions{Wait: time.Minute}); !errors.Is(err, client.ErrSessionLost) {
			t.Errorf("a pending call: %v", err)
		}
	})
	until(t, "it waits", func() bool { return n.b.Held() == 1 })
	for range 2 {
		wg.Go(func() { c.Close() })
	}
	wg.Wait()
	if open, _ := n.b.Sessions(); open != 0 {
		t.Errorf("%d sessions are open after Close", open)
	}
	if a := n.b.Attached(); a != 0 {
		t.Errorf("%d regions are mapped after Close", a)
	}
	if err := c.Ping(t.Context()); !errors.Is(err, client.ErrClosed) {
		t.Errorf("a call after Close: %v", err)
	}
	if err := c.WaitReady(t.Context()); !errors.Is(err, client.ErrClosed) {
		t.Errorf("WaitReady after Close: %v", err)
	}
	// While it looks for a node that is not there.
	c2 := dial(t, n)
	n.Close()
	until(t, "the session is lost", func() bool { return errors.Is(c2.Ping(t.Context()), client.ErrSessionLost) })
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
	defer cancel()
	if err := c2.WaitReady(ctx); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, client.ErrSessionLost) {
		t.Errorf("%v", err)
	}
	c2.Close()
}

// TestChurn loses sessions over and over under load: nothing leaks and nothing
// hangs.
func TestChurn(t *testing.T) {
	n := startNode(t)
	c := dial(t, n)
	before := descriptors(t)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for j := 0; ; j++ {
				select {
				case <-stop:
					return
				default:
				}
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				err := c.WaitReady(ctx)
				if err == nil {
					err = churn(ctx, c, fmt.Sprint(i, "-", j), enginetest.Keys(i*20, 20))
				}
				cancel()
				if err != nil && !errors.Is(err, client.ErrSessionLost) && !errors.Is(err, client.ErrStale) {
					t.Error(err)
					return
				}
			}
		})
	}
	for range 15 {
		until(t, "there is a session", func() bool { return c.Ping(t.Context()) == nil })
		n.restart(t)
	}
	close(stop)
	wg.Wait()
	until(t, "it is back", func() bool { return c.Ping(t.Context()) == nil })
	until(t, "as many descriptors as before", func() bool {
		n.b.Attached()
		// Each dead backend has a region, closed at the end of the test.
		return descriptors(t) <= before+15
	})
}

func churn(ctx context.Context, c *client.Client, id string, keys []block.Key) error {
	r, err := c.NewRequest(ctx, id, client.NoLimits())
	if err != nil {
		return err
	}
	if _, err := r.Store(ctx, 0, 0, keys, fill(keys)); err != nil {
		return err
	}
	a, err := r.Lookup(ctx, [][]block.Key{keys}, client.LookupOptions{})
	if err != nil {
		return err
	}
	dst := make([]byte, blockSize)
	for i, k := range keys {
		l, ok := a.Lease(0, i)
		if !ok {
			continue
		}
		if err := c.ReadInto(l, dst); err != nil {
			return err
		}
		if !bytes.Equal(dst, bytesOf(k)) {
			return fmt.Errorf("key %d has wrong bytes", i)
		}
	}
	return r.Finish(ctx)
}

func descriptors(t *testing.T) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d)
}

// TestDialErrors say what to do.
func TestDialErrors(t *testing.T) {
	dir := t.TempDir()
	dead := filepath.Join(dir, "dead")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: dead, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	n := startNode(t)
	dial(t, n, func(o *client.Options) { o.NamespaceName = "chat" })
	for _, c := range []struct {
		name   string
		change func(*client.Options)
		err    error
		text   string
	}{
		{"no node", func(o *client.Options) { o.Socket = filepath.Join(dir, "none") }, fs.ErrNotExist, "is `terrace serve` running"},
		{"dead node", func(o *client.Options) { o.Socket = dead }, syscall.ECONNREFUSED, "has died"},
		{"another dtype", func(o *client.Options) { o.NamespaceName, o.Spec.DType = "chat", "float8_e4m3" }, client.ErrNamespace, "[dtype]"},
		{"no model", func(o *client.Options) { o.Spec.Model = "" }, nil, "model is empty"},
		{"long name", func(o *client.Options) { o.Engine = strings.Repeat("x", 257) }, nil, "Engine has 257 bytes"},
		{"negative time", func(o *client.Options) { o.CallTimeout = -1 }, nil, "CallTimeout"},
	} {
		o := client.Options{Socket: n.path, Spec: enginetest.Spec()}
		c.change(&o)
		_, err := client.Dial(t.Context(), o)
		if err == nil || c.err != nil && !errors.Is(err, c.err) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v, want %q", c.name, err, c.text)
		}
	}
	// The default is where the environment says.
	t.Setenv("TERRACE_SOCKET", n.path)
	c, err := client.Dial(t.Context(), client.Options{Spec: enginetest.Spec()})
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}

// TestBadNode: a client that meets a node which says nonsense gets an error,
// whatever it is.
func TestBadNode(t *testing.T) {
	good := wire.HelloReply{Region: wire.Region{Version: 1, Session: 1, Epoch: "e-1", RegionBytes: 4096 * 4,
		Groups: []wire.Geometry{{Stride: 4096, BlockBytes: blockSize}}}, Limits: wire.Limits{FrameMax: wire.FrameMax}}
	change := func(f func(*wire.HelloReply)) *wire.HelloReply {
		h := good
		f(&h)
		return &h
	}
	frame := func(m wire.Message) []byte { return wire.AppendFrame(nil, wire.TypeHello|wire.ReplyBit, 1, m) }
	for name, b := range map[string]struct {
		reply []byte
		fd    bool
		err   error
	}{
		"nothing":         {nil, false, nil},
		"garbage":         {[]byte("HTTP/1.1 400 Bad Request\r\n\r\n"), false, client.ErrMalformed},
		"no descriptor":   {frame(&good), false, client.ErrMalformed},
		"other type":      {wire.AppendFrame(nil, wire.TypePing|wire.ReplyBit, 1, wire.Empty{}), true, client.ErrMalformed},
		"cut":             {frame(&good)[:40], true, nil},
		"other size":      {frame(change(func(h *wire.HelloReply) { h.RegionBytes *= 2 })), true, arena.ErrNotRegion},
		"no size":         {frame(change(func(h *wire.HelloReply) { h.RegionBytes = 0 })), true, nil},
		"no groups":       {frame(change(func(h *wire.HelloReply) { h.Groups = nil })), true, client.ErrMalformed},
		"other block":     {frame(change(func(h *wire.HelloReply) { h.Groups = []wire.Geometry{{Stride: 4096, BlockBytes: 4096}} })), true, client.ErrMalformed},
		"small stride":    {frame(change(func(h *wire.HelloReply) { h.Groups = []wire.Geometry{{Stride: 2048, BlockBytes: blockSize}} })), true, client.ErrMalformed},
		"no epoch":        {frame(change(func(h *wire.HelloReply) { h.Epoch = "" })), true, client.ErrMalformed},
		"refusal":         {wire.AppendFrame(nil, wire.TypeError, 1, &wire.Error{Code: wire.CodeForbidden, Message: "no"}), false, client.ErrForbidden},
		"refusal of none": {wire.AppendFrame(nil, wire.TypeError, 0, &wire.Error{Code: wire.CodeTooMany, Message: "full"}), false, client.ErrTooMany},
	} {
		t.Run(name, func(t *testing.T) {
			before := descriptors(t)
			path, done := badNode(t, func(c *net.UnixConn) {
				c.Read(make([]byte, 4096))
				sendMaybe(t, c, b.reply, b.fd)
			})
			_, err := client.Dial(t.Context(), client.Options{Socket: path, Spec: enginetest.Spec()})
			if err == nil || b.err != nil && !errors.Is(err, b.err) {
				t.Errorf("%v, want %v", err, b.err)
			}
			done()
			if after := descriptors(t); after > before {
				t.Errorf("%d descriptors, %d before", after, before)
			}
		})
	}
	t.Run("silence", func(t *testing.T) {
		path, done := badNode(t, func(c *net.UnixConn) { c.Read(make([]byte, 4096)); c.Read(make([]byte, 1)) })
		defer done()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		if _, err := client.Dial(ctx, client.Options{Socket: path, Spec: enginetest.Spec()}); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v", err)
		}
	})

	// After a good greeting: each reply to a call is nonsense.
	grant := wire.ReserveReply{Grants: slices.Repeat([]core.Grant{{Status: client.Granted, Slot: 1 << 30, Gen: 1}}, 2)}
	for name, b := range map[string]struct {
		t    wire.Type
		m    wire.Message
		call func(ctx context.Context, c *client.Client, r *client.Request) error
		err  error
		live bool // the session survives
	}{
		"outside the region": {wire.TypePin | wire.ReplyBit, &wire.PinReply{Leases: []core.Lease{{Slot: 1 << 30, Gen: 1}}}, func(ctx context.Context, c *client.Client, r *client.Request) error {
			l, err := r.Pin(ctx, enginetest.Keys(0, 1))
			if err != nil {
				return fmt.Errorf("pin: %w", err)
			}
			return c.View(l[0], func([]byte) error { return nil })
		}, nil, true},
		"a grant outside": {wire.TypeReserve | wire.ReplyBit, &grant, func(ctx context.Context, c *client.Client, r *client.Request) error {
			g, err := r.Reserve(ctx, 0, 0, enginetest.Keys(0, 2))
			if err != nil {
				return fmt.Errorf("reserve: %w", err)
			}
			return c.Write(g[0], func([]byte) error { return nil })
		}, nil, true},
		"grants": {wire.TypeReserve | wire.ReplyBit, &grant, func(ctx context.Context, _ *client.Client, r *client.Request) error {
			_, err := r.Reserve(ctx, 0, 0, enginetest.Keys(0, 3))
			return err
		}, client.ErrMalformed, false},
		"leases": {wire.TypePin | wire.ReplyBit, &wire.PinReply{}, func(ctx context.Context, _ *client.Client, r *client.Request) error {
			_, err := r.Pin(ctx, enginetest.Keys(0, 3))
			return err
		}, client.ErrMalformed, false},
		"statuses": {wire.TypeCommit | wire.ReplyBit, &wire.FillReply{}, func(ctx context.Context, _ *client.Client, r *client.Request) error {
			_, err := r.Commit(ctx, make([]client.Fill, 1))
			return err
		}, client.ErrStale, true},
		"type": {wire.TypePing | wire.ReplyBit, wire.Empty{}, func(ctx context.Context, _ *client.Client, r *client.Request) error { return r.Finish(ctx) }, client.ErrMalformed, false},
		"body": {wire.TypeFlush | wire.ReplyBit, wire.Empty{}, func(ctx context.Context, _ *client.Client, r *client.Request) error {
			_, err := r.Flush(ctx, 0)
			return err
		}, client.ErrMalformed, false},
		"an end":  {wire.TypeError, &wire.Error{Code: wire.CodeSlowReader, Message: "slow"}, func(ctx context.Context, _ *client.Client, r *client.Request) error { return r.Finish(ctx) }, client.ErrSlowReader, false},
		"unknown": {wire.TypeError, &wire.Error{Code: 50, Message: "of the future"}, func(ctx context.Context, _ *client.Client, r *client.Request) error { return r.Finish(ctx) }, client.ErrInternal, true},
	} {
		t.Run(name, func(t *testing.T) {
			path, done := badNode(t, func(c *net.UnixConn) {
				r := wire.NewReader(c)
				if _, err := r.Read(); err != nil {
					return
				}
				sendMaybe(t, c, frame(&good), true)
				for {
					f, err := r.Read()
					if err != nil {
						return
					}
					switch f.Type {
					case wire.TypeNewRequest, wire.TypePing:
						c.Write(wire.AppendFrame(nil, f.Type|wire.ReplyBit, f.Call, wire.Empty{}))
					case wire.TypeGoodbye:
						return
					default:
						c.Write(wire.AppendFrame(nil, wire.TypePing|wire.ReplyBit, 12345, wire.Empty{})) // nobody's
						c.Write(wire.AppendFrame(nil, b.t, f.Call, b.m))
					}
				}
			})
			defer done()
			c, err := client.Dial(t.Context(), client.Options{Socket: path, Spec: enginetest.Spec(), ReconnectMin: time.Hour, ReconnectMax: time.Hour})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			r := request(t, c, "r")
			if err := b.call(t.Context(), c, r); err == nil || b.err != nil && !errors.Is(err, b.err) {
				t.Errorf("%v, want %v", err, b.err)
			}
			if b.live {
				if err := c.Ping(t.Context()); err != nil {
					t.Errorf("the session is gone: %v", err)
				}
			} else {
				until(t, "the session is gone", func() bool { return errors.Is(c.Ping(t.Context()), client.ErrSessionLost) })
			}
		})
	}
}

// badNode listens and lets f speak, with each connection in turn.
func badNode(t *testing.T, f func(c *net.UnixConn)) (path string, done func()) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.AcceptUnix()
			if err != nil {
				return
			}
			f(c)
			c.Close()
		}
	})
	return path, func() { l.Close(); wg.Wait() }
}

func sendMaybe(t *testing.T, c *net.UnixConn, b []byte, fd bool) {
	if !fd {
		c.Write(b)
		return
	}
	a, err := arena.Open(context.Background(), arena.Options{Size: 4096 * 4})
	if err != nil {
		t.Error(err)
		return
	}
	defer a.Close()
	l, err := a.NewLease()
	if err != nil {
		t.Error(err)
		return
	}
	if err := arena.SendFD(c, b, l.File()); err != nil {
		t.Error(err)
	}
}

// TestConcurrent uses one client from many goroutines, under the race
// detector.
func TestConcurrent(t *testing.T) {
	n := startNode(t)
	c := dial(t, n)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for j := range 20 {
				if err := churn(t.Context(), c, fmt.Sprint(i, "-", j), enginetest.Keys(i*10, 30)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}
