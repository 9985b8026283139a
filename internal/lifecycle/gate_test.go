package lifecycle

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// TestEveryCallInEveryState is the table of the package comment.
func TestEveryCallInEveryState(t *testing.T) {
	to := map[State]func(*Gate){
		Opening:  func(*Gate) {},
		Ready:    func(g *Gate) { _ = g.Ready() },
		Draining: func(g *Gate) { _ = g.Drain(t.Context()) },
		Closed:   func(g *Gate) { g.Close() },
	}
	for state, enter := range map[State]error{Opening: ErrNotReady, Ready: nil, Draining: ErrDraining, Closed: ErrClosed} {
		g := NewGate()
		to[state](g)
		if g.State() != state {
			t.Fatalf("state %v, want %v", g.State(), state)
		}
		leave, err := g.Enter()
		if !errors.Is(err, enter) || (leave != nil) != (err == nil) {
			t.Errorf("%v: Enter: %v, want %v", state, err, enter)
		}
		if leave != nil {
			leave()
		}
		ready := enter
		if state == Opening {
			ready = nil
		}
		if err := g.Ready(); !errors.Is(err, ready) {
			t.Errorf("%v: Ready: %v, want %v", state, err, ready)
		}
		if err := g.Drain(t.Context()); err != nil {
			t.Errorf("%v: Drain: %v", state, err)
		}
		g.Close()
		g.Close()
		if err := g.Drain(t.Context()); err != nil {
			t.Errorf("%v: Drain after Close: %v", state, err)
		}
		<-g.Draining()
		<-g.Closed()
	}
}

func TestDrainWaitsForWhatWasAdmitted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewGate()
		_ = g.Ready()
		leave1, _ := g.Enter()
		leave2, _ := g.Enter()
		start := time.Now()
		var wg sync.WaitGroup
		for range 3 { // several may wait
			wg.Go(func() {
				if err := g.Drain(t.Context()); err != nil {
					t.Errorf("drain: %v", err)
				}
				if d := time.Since(start); d != 5*time.Second {
					t.Errorf("drain took %v, want 5s", d)
				}
			})
		}
		synctest.Wait()
		if _, err := g.Enter(); !errors.Is(err, ErrDraining) {
			t.Fatalf("enter while draining: %v", err)
		}
		time.Sleep(2 * time.Second)
		leave1()
		time.Sleep(3 * time.Second)
		leave2()
		wg.Wait()
	})
}

func TestDrainIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewGate()
		_ = g.Ready()
		leave, _ := g.Enter()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := g.Drain(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("drain: %v", err)
		}
		g.Close()
		if g.Inside() != 1 {
			t.Fatalf("inside: %d", g.Inside())
		}
		// A leave after Close is counted, and a second drain sees it.
		time.AfterFunc(time.Hour, leave)
		if err := g.Drain(t.Context()); err != nil || g.Inside() != 0 {
			t.Fatalf("drain after close: %v, inside %d", err, g.Inside())
		}
	})
}

func TestLeaveTooManyPanics(t *testing.T) {
	g := NewGate()
	_ = g.Ready()
	leave, _ := g.Enter()
	leave()
	defer func() {
		if recover() == nil {
			t.Fatal("no panic")
		}
	}()
	leave()
}

func TestConcurrentEnterAndDrain(t *testing.T) {
	g := NewGate()
	_ = g.Ready()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for {
				leave, err := g.Enter()
				if err != nil {
					return
				}
				leave()
			}
		})
	}
	if err := g.Drain(t.Context()); err != nil || g.Inside() != 0 {
		t.Fatalf("drain: %v, inside %d", err, g.Inside())
	}
	wg.Wait()
}

func TestEnterDoesNotAllocate(t *testing.T) {
	g := NewGate()
	_ = g.Ready()
	if n := testing.AllocsPerRun(100, func() {
		leave, _ := g.Enter()
		leave()
	}); n != 0 {
		t.Fatalf("%v allocations", n)
	}
}

func BenchmarkEnterLeave(b *testing.B) {
	g := NewGate()
	_ = g.Ready()
	b.ReportAllocs()
	for b.Loop() {
		leave, _ := g.Enter()
		leave()
	}
}
