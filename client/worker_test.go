package client_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/client"
	"github.com/terrace-kv/terrace/internal/engine/enginetest"
)

// order is what a scheduler tells its worker to do, as JSON.
type order struct {
	Socket string
	Token  client.Token
	Info   *client.RegionInfo // set: map the inherited descriptor instead
	Lease  client.Lease
	Grant  client.Grant
}

// workerChild copies a leased block to a granted slot, tells its checksum, and
// waits for its end.
func workerChild() {
	var o order
	if err := json.NewDecoder(os.Stdin).Decode(&o); err != nil {
		panic(err)
	}
	var r *client.Region
	if o.Info != nil {
		f := os.NewFile(3, "inherited")
		var err error
		if r, err = client.MapInherited(f, *o.Info, true); err != nil {
			panic(err)
		}
		f.Close()
	} else {
		w, err := client.AttachWorker(context.Background(), o.Socket, o.Token, true)
		if err != nil {
			panic(err)
		}
		r = w.Region
	}
	b := make([]byte, r.Info().Groups[0].BlockBytes)
	if err := r.ReadInto(o.Lease, b); err != nil {
		panic(err)
	}
	if err := r.Write(o.Grant, func(dst []byte) error { copy(dst, b); return nil }); err != nil {
		panic(err)
	}
	fmt.Println(client.Sum(b))
	io.Copy(io.Discard, os.Stdin)
}

// startWorker starts a process that carries out the order, and gives the
// checksum that it tells.
func startWorker(t *testing.T, o order, files ...*os.File) (cmd *exec.Cmd, sum uint64, end func()) {
	t.Helper()
	cmd = exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), "TERRACE_TEST_CHILD=worker")
	cmd.Stderr = os.Stderr
	cmd.ExtraFiles = files
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := json.NewEncoder(in).Encode(o); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Fscan(out, &sum); err != nil {
		t.Fatal(err)
	}
	return cmd, sum, func() {
		in.Close()
		cmd.Wait()
	}
}

// TestWorkerProcess: workers in other processes, attached by token or by
// inheritance, read and write the same blocks. One that is killed disturbs
// nobody.
func TestWorkerProcess(t *testing.T) {
	ctx := t.Context()
	n := startNode(t)
	c := dial(t, n)
	r := request(t, c, "r")
	keys := enginetest.Keys(0, 3)
	if _, err := r.Store(ctx, 0, 0, keys[:1], fill(keys)); err != nil {
		t.Fatal(err)
	}
	leases, err := r.Pin(ctx, keys[:1])
	if err != nil {
		t.Fatal(err)
	}
	grants, err := r.Reserve(ctx, 0, 1, keys[1:])
	if err != nil {
		t.Fatal(err)
	}
	info, err := c.Info()
	if err != nil {
		t.Fatal(err)
	}
	if n.b.Attached() != 1 {
		t.Errorf("%d attaches, want the engine's", n.b.Attached())
	}
	worker, sum1, end1 := startWorker(t, order{Socket: n.path, Token: info.Token, Lease: leases[0], Grant: grants[0]})
	defer end1()
	if n.b.Attached() != 2 {
		t.Errorf("%d attaches, want engine and worker", n.b.Attached())
	}
	f, err := c.File()
	if err != nil {
		t.Fatal(err)
	}
	_, sum2, end2 := startWorker(t, order{Info: &info.RegionInfo, Lease: leases[0], Grant: grants[1]}, f)
	f.Close()
	st, err := r.Commit(ctx, []client.Fill{grants[0].Fill(sum1), grants[1].Fill(sum2)})
	if err != nil || st[0] != client.FillOK || st[1] != client.FillOK {
		t.Fatalf("%v, %v", st, err)
	}
	copies, err := r.Pin(ctx, keys[1:])
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, blockSize)
	for i, l := range copies {
		if err := c.ReadInto(l, b); err != nil || !bytes.Equal(b, bytesOf(keys[0])) {
			t.Errorf("worker %d wrote something else: %v", i, err)
		}
	}
	if err := worker.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	until(t, "the killed worker is gone", func() bool { return n.b.Attached() == 1 })
	if err := r.Finish(ctx); err != nil {
		t.Error(err)
	}
	// The inherited descriptor is the engine's own attach: it is quiet when
	// the last process has let it go.
	c.Close()
	if n.b.Attached() != 1 {
		t.Error("an engine counts as quiet while its worker maps the region")
	}
	end2()
	until(t, "nobody can write", func() bool { return n.b.Attached() == 0 })
}

// TestWorkerEnds with the session, and not before its views.
func TestWorkerEnds(t *testing.T) {
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
	info, err := c.Info()
	if err != nil {
		t.Fatal(err)
	}
	w, err := client.AttachWorker(ctx, n.path, info.Token, false)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	other, err := client.AttachWorker(ctx, n.path, info.Token, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Close(); err != nil {
		t.Error(err)
	}
	if err := other.View(leases[0], func([]byte) error { return nil }); !errors.Is(err, client.ErrSessionLost) {
		t.Errorf("a view after Close: %v", err)
	}
	stale := leases[0]
	stale.Epoch = "another-1"
	if err := w.View(stale, func([]byte) error { return nil }); !errors.Is(err, client.ErrStale) {
		t.Errorf("a lease of another session: %v", err)
	}
	err = w.View(leases[0], func(b []byte) error {
		c.Close()
		until(t, "no more views", func() bool {
			return errors.Is(w.View(leases[0], func([]byte) error { return nil }), client.ErrSessionLost)
		})
		select {
		case <-w.Done():
			t.Error("it is done beneath a view")
		case <-time.After(10 * time.Millisecond):
		}
		if !bytes.Equal(b, bytesOf(keys[0])) {
			t.Error("the bytes have changed")
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	<-w.Done()
	if _, err := client.AttachWorker(ctx, n.path, info.Token, false); !errors.Is(err, client.ErrForbidden) {
		t.Errorf("the token of a dead session: %v", err)
	}
}
