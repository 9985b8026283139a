package lifecycle

import (
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Watch knows the loops of a process: goroutines that live as long as their
// owner and take turns. A loop that dies or hangs may go unnoticed for days,
// because everything else goes on; so each tells when it works and when it
// rests, and Check says which of them is down:
//
//   - ended, and not because its owner did;
//   - in one turn for longer than its bound;
//   - at rest for longer than it wanted to, by more than its bound.
//
// A loop whose code panics is no case of these: that ends the process, see
// FailStop. All methods may be called by anybody at any time; those of a nil
// Loop do nothing.
type Watch struct {
	log   *slog.Logger
	epoch time.Time // makes a monotonic clock that fits into an integer

	mu    sync.Mutex
	loops []*Loop
}

// Loop is one watched loop. Its owner calls Work and Rest in turns.
type Loop struct {
	w     *Watch
	name  string
	bound time.Duration
	turns atomic.Int64
	// since is when the turn began, or below 0 when it is over. due is when it
	// is to begin again, if that is known. Both as Watch.clock says.
	since, due atomic.Int64
	ended      atomic.Bool
	down       bool // as Check has last told; guarded by Watch.mu
}

// LoopState is what Check says of a loop.
type LoopState struct {
	Name  string
	Turns int64         // begun so far
	Busy  time.Duration // how long the turn lasts by now; 0 at rest
	Down  string        // why the loop is down; empty when it is not
}

// NewWatch returns a watch of no loop. It logs when a loop goes down and when
// it comes back, as Check sees it.
func NewWatch(log *slog.Logger) *Watch { return &Watch{log: log, epoch: time.Now()} }

func (w *Watch) clock() int64 { return int64(time.Since(w.epoch)) + 1 }

// Loop adds a loop that is at rest. bound is how long a turn may take; name
// is unique and fixed, for metrics.
func (w *Watch) Loop(name string, bound time.Duration) *Loop {
	if w == nil {
		return nil
	}
	l := &Loop{w: w, name: name, bound: bound}
	l.since.Store(-1)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.loops = append(w.loops, l)
	return l
}

// Work says that a turn begins.
func (l *Loop) Work() {
	if l != nil {
		l.turns.Add(1)
		l.since.Store(l.w.clock())
	}
}

// Rest says that the turn is over, and when the next begins at the latest; 0
// is when something happens, and may be never.
func (l *Loop) Rest(within time.Duration) {
	if l != nil {
		due := int64(0)
		if within > 0 {
			due = l.w.clock() + int64(within)
		}
		l.due.Store(due)
		l.since.Store(-1)
	}
}

// End says that the loop has ended. As asked, by the end of its owner, it is
// forgotten; otherwise it stays and is down.
func (l *Loop) End(asked bool) {
	if l == nil {
		return
	}
	if !asked {
		l.ended.Store(true)
		l.w.Check()
		return
	}
	l.w.mu.Lock()
	defer l.w.mu.Unlock()
	l.w.loops = slices.DeleteFunc(l.w.loops, func(x *Loop) bool { return x == l })
}

func (l *Loop) state(now int64) LoopState {
	s := LoopState{Name: l.name, Turns: l.turns.Load()}
	since, due := l.since.Load(), l.due.Load()
	if since >= 0 {
		s.Busy = time.Duration(max(0, now-since))
	}
	switch late := time.Duration(now - due); {
	case l.ended.Load():
		s.Down = "has ended while the node runs"
	case s.Busy > l.bound:
		s.Down = fmt.Sprintf("is in one turn for longer than %v", l.bound)
	case since < 0 && due > 0 && late > l.bound:
		s.Down = fmt.Sprintf("should have woken up more than %v ago", l.bound)
	}
	return s
}

// Check tells the state of each loop, in the order in which they were added.
// It takes no lock but its own.
func (w *Watch) Check() []LoopState {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := w.clock()
	out := make([]LoopState, 0, len(w.loops))
	for _, l := range w.loops {
		s := l.state(now)
		if down := s.Down != ""; down != l.down {
			l.down = down
			if down {
				w.log.Error("a loop of the node "+s.Down+"; restart the node, and report this with a goroutine profile", "loop", l.name, "turns", s.Turns)
			} else {
				w.log.Warn("a loop of the node goes on", "loop", l.name)
			}
		}
		out = append(out, s)
	}
	return out
}

// FailStop is deferred where a panic must end the process though somebody
// further up recovers: a broken table must not serve bytes. It prints what the
// runtime would, and exits with its code.
func FailStop(what string) {
	if r := recover(); r != nil {
		fmt.Fprintf(os.Stderr, "panic: %s: %v\n\n%s", what, r, debug.Stack())
		os.Exit(2)
	}
}
