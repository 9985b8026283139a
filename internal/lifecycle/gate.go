package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// Errors of Enter and Ready, each for the state that refuses.
var (
	ErrNotReady = errors.New("not ready yet")
	ErrDraining = errors.New("draining: nothing new is started")
	ErrClosed   = errors.New("closed")
)

// State is where in its life a thing is. States only grow.
type State uint8

const (
	Opening State = iota
	Ready
	Draining
	Closed
)

func (s State) String() string { return [...]string{"opening", "ready", "draining", "closed"}[s] }

// Gate admits work while its state is Ready, and lets a drain wait for what was
// admitted. All methods may be called by anybody at any time.
type Gate struct {
	leave func() // made once, so that Enter allocates nothing

	mu struct {
		sync.Mutex
		state  State
		inside int
		idle   chan struct{} // closed when inside falls to 0 in Draining or Closed; nil until somebody waits
	}
	draining, closed chan struct{} // closed when the state is reached
}

// NewGate returns a gate in state Opening.
func NewGate() *Gate {
	g := &Gate{draining: make(chan struct{}), closed: make(chan struct{})}
	g.leave = g.exit
	return g
}

// Enter admits one piece of work, or says by the error why not. leave ends it:
// it is called exactly once for each Enter that was admitted, in any state.
// leave is nil when err is not. Enter does not allocate.
func (g *Gate) Enter() (leave func(), err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := refusal[g.mu.state]; err != nil {
		return nil, err
	}
	g.mu.inside++
	return g.leave, nil
}

var refusal = [...]error{Opening: ErrNotReady, Ready: nil, Draining: ErrDraining, Closed: ErrClosed}

func (g *Gate) exit() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.mu.inside--
	if g.mu.inside < 0 {
		// Only a leave too many can do this, and a drain that counts wrong
		// would give memory back under work that still runs.
		panic("lifecycle: left more often than entered")
	}
	if g.mu.inside == 0 && g.mu.idle != nil {
		close(g.mu.idle)
		g.mu.idle = nil
	}
}

// Ready opens the gate. After a Drain or Close it changes nothing and says so.
func (g *Gate) Ready() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.mu.state <= Ready {
		g.mu.state = Ready
		return nil
	}
	return refusal[g.mu.state]
}

// Drain shuts the gate and waits until all that was admitted has left, or ctx
// has ended: then the error tells how much is still inside, and the gate stays
// shut. It may be called again, and by several at once.
func (g *Gate) Drain(ctx context.Context) error {
	g.mu.Lock()
	g.advance(Draining)
	if g.mu.inside == 0 {
		g.mu.Unlock()
		return nil
	}
	if g.mu.idle == nil {
		g.mu.idle = make(chan struct{})
	}
	idle := g.mu.idle
	g.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		if n := g.Inside(); n > 0 {
			return fmt.Errorf("drain ended with %d operations still running: %w", n, context.Cause(ctx))
		}
		return nil
	}
}

// Close ends the gate at once. It waits for nothing: a Drain, before or after,
// does that. It may be called again.
func (g *Gate) Close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.advance(Draining)
	g.advance(Closed)
}

// advance moves to a later state and tells those who listen. g.mu is held.
func (g *Gate) advance(to State) {
	if g.mu.state >= to {
		return
	}
	g.mu.state = to
	switch to {
	case Draining:
		close(g.draining)
	case Closed:
		close(g.closed)
	}
}

// State is the state now.
func (g *Gate) State() State {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.mu.state
}

// Inside is how much admitted work has not left.
func (g *Gate) Inside() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.mu.inside
}

// Draining is closed when the gate begins to drain, or is closed.
func (g *Gate) Draining() <-chan struct{} { return g.draining }

// Closed is closed when the gate is.
func (g *Gate) Closed() <-chan struct{} { return g.closed }
