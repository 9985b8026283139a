package engine

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/internal/lifecycle"
)

// nobody is a backend that no engine asks.
type nobody struct{}

func (nobody) OpenSession(context.Context, Hello) (Session, error) {
	return nil, errors.New("not asked for")
}
func (nobody) Status() []byte { return nil }

// Accepting that ends though nobody has asked for it is reported; that it ends
// with the server is not (B138).
func TestAcceptingThatEndsIsReported(t *testing.T) {
	w := lifecycle.NewWatch(slog.New(slog.NewTextHandler(io.Discard, nil)))
	var l *Listener
	serve := func() *Server {
		var err error
		if l, err = Listen(filepath.Join(t.TempDir(), "s"), ""); err != nil {
			t.Fatal(err)
		}
		return Serve(l, nobody{}, Options{Watch: w, Logger: slog.New(slog.DiscardHandler)})
	}
	until := func(what string, ok func([]lifecycle.LoopState) bool) {
		t.Helper()
		for deadline := time.Now().Add(10 * time.Second); !ok(w.Check()); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("never: %s: %+v", what, w.Check())
			}
		}
	}
	s := serve()
	until("it accepts", func(x []lifecycle.LoopState) bool { return len(x) == 1 && x[0].Name == "accept" && x[0].Down == "" })
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	until("it has ended as asked", func(x []lifecycle.LoopState) bool { return len(x) == 0 })

	s = serve()
	_ = l.unix.Close()
	until("it is down", func(x []lifecycle.LoopState) bool { return len(x) == 1 && x[0].Down != "" })
	_ = s.Close() // the socket is closed already
}
