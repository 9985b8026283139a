package fault

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/tier"
)

// Seams.
const (
	SeamFile = "file"
	SeamTier = "tier"
	SeamConn = "conn"
	SeamHTTP = "http"
)

// hitsMax bounds how many injections a Set remembers.
const hitsMax = 4096

// Op is one call at a seam.
type Op struct {
	Seam  string
	Kind  string // what the seam calls its calls: "open", "read", …
	Key   string // a path, a block key in hex, a connection's name
	Off   int64  // in a file or stream, bytes; 0 where it means nothing
	Write bool   // it changes something
}

func (o Op) String() string {
	s := o.Seam + " " + o.Kind
	if o.Key != "" {
		s += fmt.Sprintf(" %q", o.Key)
	}
	if o.Off != 0 {
		s += fmt.Sprintf(" at %d", o.Off)
	}
	return s
}

// Fault is what becomes of a call; see the package's table. The zero Fault is
// none.
type Fault struct {
	Delay      time.Duration
	Hang       <-chan struct{} // waited for, if not nil, also when the call's context has ended
	Err        error           // an *Injected, or nil
	Late       bool            // with Err: the call is made first
	Short      int             // if above 0
	Torn       bool
	Keep       int // bytes that a torn call keeps
	Flip       bool
	Disconnect bool

	// Of HTTP alone.
	Status int             // of the answer, if not 0
	Code   string          // of its error document
	Lie    bool            // the answer is said to have Length bytes
	Length int64           // with Lie
	Stall  <-chan struct{} // waited for in the answer's body, if not nil
	After  int             // bytes that pass before, with Stall
	Linger <-chan struct{} // until then the request's body is read, if not nil
}

// wait delays and hangs. It says why the delay was cut short, if it was.
func (f *Fault) wait(ctx context.Context) error {
	if f.Delay > 0 {
		t := time.NewTimer(f.Delay)
		defer t.Stop()
		select {
		case <-t.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if f.Hang != nil {
		<-f.Hang
	}
	return nil
}

// Injected is an error that a rule made. It unwraps to what the rule says.
type Injected struct {
	N   int64 // which injection of its Set, from 1
	Op  Op
	Err error
}

func (e *Injected) Error() string { return fmt.Sprintf("%v (injected, no. %d)", e.Err, e.N) }

func (e *Injected) Unwrap() error { return e.Err }

// Hit is an injection that happened.
type Hit struct {
	N    int64
	Rule int // from 0
	Op   Op
	Err  error // an *Injected, or nil if the call was not failed

	surfaced bool
}

func (h Hit) String() string { return fmt.Sprintf("no. %d, rule %d: %s", h.N, h.Rule, h.Op) }

// Set is a list of rules and what became of them. It is safe for concurrent
// use.
type Set struct {
	rules []rule
	ctx   context.Context // ended by Release
	stop  context.CancelFunc

	mu   sync.Mutex // guards all below, and what the predicates count
	off  bool
	n    int64
	hits []Hit // the last hitsMax
}

// String is text that Parse makes an equal, unused Set of.
func (s *Set) String() string {
	var b strings.Builder
	for i := range s.rules {
		b.WriteString(s.rules[i].String())
		b.WriteByte('\n')
	}
	return b.String()
}

// Check asks the rules about a call, which is then theirs to decide.
func (s *Set) Check(op Op) Fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.off {
		return Fault{}
	}
	for i := range s.rules {
		r := &s.rules[i]
		if !r.when.match(&op) {
			continue
		}
		s.n++
		var f Fault
		for _, a := range r.do {
			a.apply(&f, &op, s.ctx.Done())
		}
		if f.Disconnect && f.Err == nil {
			f.Err = disconnected(op.Seam)
		}
		if f.Err != nil {
			f.Err = &Injected{s.n, op, f.Err}
		}
		if len(s.hits) == hitsMax {
			s.hits = append(s.hits[:0], s.hits[hitsMax/2:]...)
		}
		s.hits = append(s.hits, Hit{N: s.n, Rule: i, Op: op, Err: f.Err})
		return f
	}
	return Fault{}
}

// disconnected is how a seam says that the other side has gone.
func disconnected(seam string) error {
	switch seam {
	case SeamFile:
		return unix.ENODEV
	case SeamTier:
		return &tier.Error{Op: "call", Class: tier.ClassRetryable, Cause: tier.CauseUnavailable, Err: unix.ECONNRESET}
	}
	return unix.ECONNRESET
}

// Toggle turns the rules on, as they are at first, or off: then nothing is
// failed and nothing counted.
func (s *Set) Toggle(on bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.off = !on
}

// Release ends all hangs, those to come too.
func (s *Set) Release() { s.stop() }

// Injected is the number of injections so far.
func (s *Set) Injected() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.n
}

// Hits lists the injections so far, the last few thousand if there are more.
func (s *Set) Hits() []Hit {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Hit(nil), s.hits...)
}

// Surfaced notes that err came to where somebody sees it: every injected error
// in its tree is surfaced. It says whether there was one.
func (s *Set) Surfaced(err error) bool {
	switch e := err.(type) { //nolint:errorlint // it walks the tree itself
	case *Injected:
		s.mu.Lock()
		defer s.mu.Unlock()
		for i := range s.hits {
			if s.hits[i].Err == error(e) {
				s.hits[i].surfaced = true
				return true
			}
		}
	case interface{ Unwrap() error }:
		return s.Surfaced(e.Unwrap())
	case interface{ Unwrap() []error }:
		found := false
		for _, sub := range e.Unwrap() {
			found = s.Surfaced(sub) || found
		}
		return found
	}
	return false
}

// Unsurfaced lists the injected errors that Surfaced was not told of.
func (s *Set) Unsurfaced() []Hit {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []Hit
	for _, h := range s.hits {
		if h.Err != nil && !h.surfaced {
			out = append(out, h)
		}
	}
	return out
}
