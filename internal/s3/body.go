package s3

import (
	"errors"
	"io"
	"os"
	"sync"
	"sync/atomic"
)

// bodyReadMax bounds what one Read copies, and so how long Revoke waits for it.
const bodyReadMax = 1 << 20

var errRevoked = errors.New("the body was revoked: its request is over")

// Body is the content of a Put: parts of memory that are read in order. An HTTP
// transport may go on reading a body after its request has ended; Revoke ends
// that. So memory that only a Body reads is quiet after its Revoke, whatever the
// transport does.
//
// Its methods may be called from many goroutines, those of one Reader from one.
type Body struct {
	parts [][]byte
	size  int64
	open  atomic.Int64

	// Read copies under the read lock, so that it never waits for another
	// Reader; Revoke takes the write lock, so that it waits for all of them.
	mu      sync.RWMutex
	revoked bool
}

// NewBody makes a body of parts, which stay the caller's.
func NewBody(parts ...[]byte) *Body {
	b := &Body{parts: parts}
	for _, p := range parts {
		b.size += int64(len(p))
	}
	return b
}

// Len is the number of bytes in all.
func (b *Body) Len() int64 { return b.size }

// Reader reads the body from its start. Each attempt of a transport gets one of
// its own. Its Close is counted: see Open.
func (b *Body) Reader() io.ReadCloser {
	b.open.Add(1)
	return &bodyReader{b: b}
}

// Revoke lets every Reader fail from now on, and returns when none is in the
// middle of a read: a copy of at most one buffer, and 1 MiB.
func (b *Body) Revoke() {
	b.mu.Lock()
	b.revoked = true
	b.mu.Unlock()
}

// Open tells how many Readers are not closed. A transport that has closed its
// Reader reads no more; one that has not may still try, and fails after Revoke.
func (b *Body) Open() int { return int(b.open.Load()) }

type bodyReader struct {
	b      *Body
	part   int // that is being read
	off    int // in it
	closed atomic.Bool
}

func (r *bodyReader) Read(p []byte) (n int, err error) {
	if r.closed.Load() {
		return 0, os.ErrClosed
	}
	if len(p) > bodyReadMax {
		p = p[:bodyReadMax]
	}
	b := r.b
	b.mu.RLock()
	defer b.mu.RUnlock()
	if b.revoked {
		return 0, errRevoked
	}
	for n < len(p) && r.part < len(b.parts) {
		c := copy(p[n:], b.parts[r.part][r.off:])
		n += c
		if r.off += c; r.off == len(b.parts[r.part]) {
			r.part, r.off = r.part+1, 0
		}
	}
	if n == 0 && len(p) > 0 {
		return 0, io.EOF
	}
	return n, nil
}

func (r *bodyReader) Close() error {
	if !r.closed.Swap(true) {
		r.b.open.Add(-1)
	}
	return nil
}
