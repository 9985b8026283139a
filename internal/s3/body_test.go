package s3

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"sync"
	"testing"
	"testing/iotest"
)

func TestBodyReads(t *testing.T) {
	parts := [][]byte{content(256), nil, content(5000), content(1)}
	b := NewBody(parts...)
	whole := slices.Concat(parts...)
	if b.Len() != int64(len(whole)) {
		t.Fatalf("length %d, want %d", b.Len(), len(whole))
	}
	for range 2 { // each from the start
		r := b.Reader()
		if err := iotest.TestReader(r, whole); err != nil {
			t.Fatal(err)
		}
		if b.Open() != 1 {
			t.Fatalf("%d open, want 1", b.Open())
		}
		r.Close()
		r.Close()
		if n, err := r.Read(make([]byte, 1)); n != 0 || err == nil {
			t.Fatal("read after close", n, err)
		}
		if b.Open() != 0 {
			t.Fatalf("%d open, want 0", b.Open())
		}
	}
	r := b.Reader()
	defer r.Close()
	if n, err := r.Read(make([]byte, 10)); n != 10 || err != nil {
		t.Fatal(n, err)
	}
	b.Revoke()
	if n, err := r.Read(make([]byte, 10)); n != 0 || err == nil || err == io.EOF {
		t.Fatal("read after revoke", n, err)
	}
	big := NewBody(make([]byte, 3*bodyReadMax)).Reader()
	if n, err := big.Read(make([]byte, 3*bodyReadMax)); n != bodyReadMax || err != nil {
		t.Fatalf("one read copied %d bytes (%v), want %d", n, err, bodyReadMax)
	}
}

// TestRevokedMemoryIsQuiet writes what was revoked: the race detector sees a
// read that is not over.
func TestRevokedMemoryIsQuiet(t *testing.T) {
	for range 200 {
		mem := make([]byte, 64<<10)
		b := NewBody(mem[:1000], mem[1000:])
		var wg sync.WaitGroup
		started := make(chan struct{}, 2)
		for range 2 {
			wg.Go(func() {
				r := b.Reader()
				defer r.Close()
				buf := make([]byte, 512)
				started <- struct{}{}
				for {
					if _, err := r.Read(buf); err != nil {
						return
					}
				}
			})
		}
		<-started
		b.Revoke()
		clear(mem)
		wg.Wait()
		if b.Open() != 0 {
			t.Fatal("readers are open")
		}
	}
}

// readsOn returns when its request's context ends, and goes on reading the body,
// as an HTTP transport may.
type readsOn struct {
	started chan struct{}
	more    chan struct{}
	wg      sync.WaitGroup
	err     error
}

func (t *readsOn) RoundTrip(r *http.Request) (*http.Response, error) {
	t.wg.Go(func() {
		defer r.Body.Close()
		buf := make([]byte, 16)
		_, _ = r.Body.Read(buf)
		close(t.started)
		<-t.more
		_, t.err = io.Copy(io.Discard, r.Body)
	})
	<-t.started
	<-r.Context().Done()
	return nil, r.Context().Err()
}

func TestPutReturnsWithQuietMemory(t *testing.T) {
	rt := &readsOn{started: make(chan struct{}), more: make(chan struct{})}
	c := open(t, options(rt))
	mem := content(100_000)
	body := NewBody(mem)
	ctx, cancel := context.WithCancel(context.Background())
	go func() { <-rt.started; cancel() }()
	_, err := c.Put(ctx, "k", body, PutOptions{})
	want(t, err, KindCancelled)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("%v does not wrap the context's error", err)
	}
	if body.Open() != 1 {
		t.Errorf("%d readers open, want the one of the transport", body.Open())
	}
	clear(mem) // the next owner of the slot
	close(rt.more)
	rt.wg.Wait()
	if rt.err == nil || bytes.Contains([]byte(rt.err.Error()), []byte("EOF")) {
		t.Errorf("the transport went on reading, and got %v", rt.err)
	}
	if body.Open() != 0 {
		t.Errorf("%d readers open after the transport closed its own", body.Open())
	}
}

func TestPutRevokesAlways(t *testing.T) {
	s := newServer()
	c := open(t, options(s.RoundTripper()))
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	for name, f := range map[string]func(b *Body) error{
		"done":    func(b *Body) error { _, err := c.Put(context.Background(), "k", b, PutOptions{}); return err },
		"bad key": func(b *Body) error { _, err := c.Put(context.Background(), "", b, PutOptions{}); return err },
		"bad checksum": func(b *Body) error {
			_, err := c.Put(context.Background(), "k", b, PutOptions{Checksum: Checksum{Algorithm: "x"}})
			return err
		},
		"gone": func(b *Body) error { _, err := c.Put(gone, "k", b, PutOptions{}); return err },
	} {
		b := NewBody([]byte("x"))
		err := f(b)
		if (err == nil) != (name == "done") {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := b.Reader().Read(make([]byte, 1)); err != errRevoked {
			t.Errorf("%s: the body is not revoked: %v", name, err)
		}
	}
	if got := c.Requests(); got.Put != 1 {
		t.Errorf("%d requests, want 1", got.Put)
	}
}
