package main

import (
	"bytes"
	"context"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"
)

// output is what the demo prints, while others look.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
	on func(string)
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	n, err := o.b.Write(b)
	o.on(o.b.String())
	return n, err
}

// The demo has hits from the bucket, ends when it is interrupted, and leaves
// nothing behind.
func TestDemo(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute) // it may have to build the server
	defer cancel()
	out := &output{on: func(s string) {
		if strings.Count(s, "replay: using the node") == 2 {
			cancel() // in the middle of the second replay
		}
	}}
	t.Setenv("TMPDIR", t.TempDir())
	if err := run(ctx, out, 0, "--requests", "80", "--block-bytes", "128KiB"); err != nil {
		t.Errorf("%v", err)
	}
	text := out.b.String()
	t.Log(text)
	for _, want := range []string{`corrupt blocks +0\n`, `object +[1-9]`, `primary +[1-9]`, `/v1/status`} {
		if !regexp.MustCompile(want).MatchString(text) {
			t.Errorf("it does not say %s", want)
		}
	}
	if left, err := os.ReadDir(os.Getenv("TMPDIR")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}
