package e2e

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/client"
	nodes "github.com/terrace-kv/terrace/internal/node"
)

// own is a prompt that shares nothing with others.
func own(name string, blocks int) Prompt { return Prompt{{Name: name, Count: blocks}} }

// session finds an engine's entry in the status, or nil.
func session(st *nodes.Status, name string) *nodes.SessionStatus {
	for i := range st.Sessions {
		if st.Sessions[i].Engine == name {
			return &st.Sessions[i]
		}
	}
	return nil
}

// gone waits until nothing of an engine's session is left but, perhaps, its
// quarantined slots.
func (n *node) gone(name string, id uint64) {
	n.t.Helper()
	eventually(n.t, bound(), "end of session "+name, func() error {
		if s := session(n.status(), name); s != nil {
			return fmt.Errorf("it is still there: %+v", *s)
		}
		for _, p := range n.pins() {
			if strings.HasPrefix(p.Owner, fmt.Sprintf("session %d ", id)) {
				return fmt.Errorf("a pin is left: %+v", p)
			}
		}
		return nil
	})
}

// quiet waits until no slot is in quarantine.
func (n *node) quiet() {
	n.t.Helper()
	eventually(n.t, bound(), "end of quarantine", func() error {
		if st := n.status(); st.Tables.Quarantined != 0 || st.Primary.QuarantinedBytes != 0 {
			return fmt.Errorf("%d slots, %d bytes", st.Tables.Quarantined, st.Primary.QuarantinedBytes)
		}
		return nil
	})
}

// TestEnginesShare: two engines at once read what the other has stored, from
// the primary and from below.
func TestEnginesShare(t *testing.T) {
	t.Parallel()
	n := serve(t, place(t), "--primary", "32MiB")
	a, b := n.engine("a"), n.engine("b")
	a.store("1", own("from a", 40))
	b.store("1", own("from b", 40))
	for range 2 { // from the primary, then from the tier
		if got := b.do(Ask{ID: "2", Prompt: own("from a", 40), LoadOnly: true}); got.Hits != 40 {
			t.Errorf("b finds %d of a's 40 blocks: %v", got.Hits, got.Verdicts)
		}
		if got := a.do(Ask{ID: "2", Prompt: own("from b", 40), LoadOnly: true}); got.Hits != 40 {
			t.Errorf("a finds %d of b's 40 blocks: %v", got.Hits, got.Verdicts)
		}
		a.reset()
	}
	if f := fsOf(n.status()); f.Hits != 80 {
		t.Errorf("%d blocks were promoted, want 80", f.Hits)
	}

	load := Load{Prefix: "both", Conversations: 40, Turn: 30, Parallel: 2, Ops: often(60, 3000), Flush: true}
	load.Seed = 1
	a.start(load)
	load.Seed = 2
	b.start(load)
	for _, r := range []*Report{a.ended(), b.ended()} {
		if r.Hits == 0 || r.Stored == 0 || r.Lost > 0 {
			t.Errorf("a load without hits or stores: %+v", r)
		}
	}
	a.goodbye()
	b.goodbye()
	n.idle()
	n.exact()
	if blocks := checkRoot(t, n); int64(blocks) != fsOf(n.status()).Blocks {
		t.Errorf("%d files, the tier says %d", blocks, fsOf(n.status()).Blocks)
	}
}

// TestEngineKilled: an engine is killed while it holds leases and has half
// written what it reserved. Others do not notice, but for those who waited for its blocks:
// they are told to compute them.
func TestEngineKilled(t *testing.T) {
	t.Parallel()
	n := serve(t, place(t), "--primary", "32MiB")
	other := n.engine("other")
	other.start(Load{Prefix: "other", Seed: 1, Conversations: 30, Turn: 20, Parallel: 2, Flush: true})
	waiter := n.engine("waiter")
	for round := range often(4, 30) {
		victim := n.engine("victim")
		stored, half := own(fmt.Sprint("stored ", round), 20), own(fmt.Sprint("half ", round), 24)
		victim.store("1", stored)
		var held Answer
		victim.must("Hold", Ask{ID: "held", Prompt: stored}, &held)
		var granted int
		victim.must("Half", Ask{ID: "half", Prompt: half}, &granted)
		if held.Hits != 20 || granted != 24 {
			t.Fatalf("%d blocks held, %d granted", held.Hits, granted)
		}
		// And it has a load of its own.
		victim.start(Load{Prefix: "other", Seed: uint64(round), Conversations: 30, Turn: 20, Parallel: 3})
		s := session(n.status(), "victim")
		if s == nil || s.Pins < 20 || s.Reservations < 24 {
			t.Fatalf("status of the victim: %+v", s)
		}
		mine := 0
		for _, p := range n.pins() {
			if strings.HasPrefix(p.Owner, fmt.Sprintf("session %d ", s.ID)) && strings.HasSuffix(p.Owner, `request "held"`) {
				mine++
			}
		}
		if mine != 20 {
			t.Errorf("/v1/pins has %d pins of the victim's request, want 20", mine)
		}
		waiting := waiter.rpc.Go("Engine.Do", Ask{ID: "waits", Prompt: half, Wait: 9 * time.Second, LoadOnly: true}, new(Answer), nil)
		eventually(t, bound(), "waiting lookup", func() error {
			if w := session(n.status(), "waiter"); w == nil || w.Requests == 0 {
				return fmt.Errorf("%+v", w)
			}
			return nil
		})

		killed := time.Now()
		victim.kill()
		n.gone("victim", s.ID)
		if err := waiter.wait(waiting, bound()); err != nil {
			t.Errorf("the waiting lookup: %v", err)
		}
		took := time.Since(killed)
		if got := waiting.Reply.(*Answer); got.Hits != 0 {
			t.Errorf("%d half-written blocks are hits", got.Hits)
		}
		n.quiet()
		t.Logf("round %d: its leases and waits were over %v after the kill, its slots were quiet after %v", round, took, time.Since(killed))
		// Whole or not at all: what was stored is found, what was half is not.
		if got := waiter.do(Ask{ID: "stored", Prompt: stored, LoadOnly: true}); got.Hits != 20 {
			t.Errorf("%d of the victim's 20 blocks are left: %v", got.Hits, got.Verdicts)
		}
		if got := waiter.store("half", half); got.Hits != 0 || got.Stored.Stored != 24 {
			t.Errorf("the half-written prompt: %d hits, stored %+v", got.Hits, got.Stored)
		}
	}
	other.after(20)
	r := other.finish()
	if r.Lost > 0 {
		t.Errorf("the other engine has lost its session")
	}
	// On an idle machine it is some tens of milliseconds.
	if limit := bound() / 6; r.LongestMS > int(limit.Milliseconds()) {
		t.Errorf("the other engine's longest request took %d ms, want at most %v", r.LongestMS, limit)
	}
	other.goodbye()
	waiter.goodbye()
	n.idle()
	n.exact()
	checkRoot(t, n)
}

// regionMapped tells whether a process has a memfd mapped.
func regionMapped(pid int) bool {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	return err == nil && strings.Contains(string(maps), "/memfd:")
}

// TestWorkerOutlivesEngine: slots that a dead engine's worker can still write
// are nobody else's until it is gone, or has let go of them.
func TestWorkerOutlivesEngine(t *testing.T) {
	t.Parallel()
	for _, attach := range []bool{false, true} {
		t.Run(fmt.Sprintf("attach=%v", attach), func(t *testing.T) {
			t.Parallel()
			n := serve(t, place(t), "--primary", "8MiB", "--set", "primary.extent=1MiB", "--set", "core.reserve_percent=0")
			victim := n.engine("victim")
			var granted, pid int
			victim.must("Half", Ask{ID: "half", Prompt: own("half", 8)}, &granted)
			victim.must("Worker", WorkerOf{ID: "half", Attach: attach}, &pid)
			worker, err := os.FindProcess(pid) // a handle, while it is certain whose number this is
			if err != nil {
				t.Fatal(err)
			}
			defer worker.Kill()
			if !regionMapped(pid) {
				t.Fatal("the worker has no region")
			}
			id := session(n.status(), "victim").ID
			victim.kill()
			n.gone("victim", id)

			if attach {
				// The node ends the worker's connection; its library lets go,
				// though the process lives on.
				n.quiet()
				if regionMapped(pid) {
					t.Error("the worker still has the region")
				}
				if err := worker.Signal(sigZero); err != nil {
					t.Errorf("the worker has ended: %v", err)
				}
			} else {
				// Nobody tells this one, and it goes on writing. Others use up
				// the primary again and again, and the slots are never theirs.
				other := n.engine("other")
				for i := range 8 {
					fill := own(fmt.Sprint("fill ", i), 60)
					other.store(fmt.Sprint(i), fill)
					if got := other.do(Ask{ID: "again", Prompt: fill, LoadOnly: true}); got.Hits != 60 {
						t.Errorf("round %d: %d of 60 blocks are hits: %v", i, got.Hits, got.Verdicts)
					}
					if st := n.status(); st.Tables.Quarantined != 8 || st.Primary.QuarantinedBytes != 8*blockBytes {
						t.Fatalf("%d slots are in quarantine, want 8", st.Tables.Quarantined)
					}
				}
				if err := other.call("Half", Ask{ID: "too many", Prompt: own("all", 121)}, &granted); !failedWith(err, "no_room") {
					t.Errorf("121 slots of 128, 8 of them in quarantine: %v", err)
				}
				other.must("Half", Ask{ID: "all", Prompt: own("all", 120)}, &granted)
				other.goodbye()
				if err := worker.Kill(); err != nil {
					t.Fatal(err)
				}
				n.quiet()
			}
			after := n.engine("after")
			if got := after.store("1", own("half", 8)); got.Stored.Stored != 8 {
				t.Errorf("the half-written blocks, stored anew: %+v", got.Stored)
			}
			after.goodbye()
			n.idle()
			checkRoot(t, n)
		})
	}
}

// TestPrimaryExhausted: an engine that pins all of the primary takes nothing
// but room from others, who are refused at once.
func TestPrimaryExhausted(t *testing.T) {
	t.Parallel()
	n := serve(t, place(t), "--primary", "8MiB", "--no-fs") // without a tier nothing is kept back
	hog, other := n.engine("hog"), n.engine("other")
	all := own("all", 128)
	hog.do(Ask{ID: "store", Prompt: all})
	var held Answer
	hog.must("Hold", Ask{ID: "held", Prompt: all}, &held)
	if held.Hits != 128 {
		t.Fatalf("%d of 128 blocks are pinned: %v", held.Hits, held.Verdicts)
	}
	begin := time.Now()
	const tries = 20
	for i := range tries {
		var granted int
		if err := other.call("Half", Ask{ID: fmt.Sprint("try ", i), Prompt: own("new", 1)}, &granted); !failedWith(err, "no_room") {
			t.Errorf("a reserve in a primary full of pins: %v", err)
		}
	}
	// It is an answer, not a wait.
	if took := time.Since(begin) / tries; took > bound()/60 {
		t.Errorf("a refusal takes %v", took)
	} else {
		t.Logf("a refusal takes %v", took)
	}
	if st := n.status(); st.Stores.Refused != tries || st.Primary.PinnedBytes != 8<<20 {
		t.Errorf("status: %d refused, %d bytes pinned", st.Stores.Refused, st.Primary.PinnedBytes)
	}
	// What is pinned can be read by all.
	if got := other.do(Ask{ID: "read", Prompt: all, LoadOnly: true}); got.Hits != 128 {
		t.Errorf("%d of 128 pinned blocks are hits for another engine", got.Hits)
	}
	hog.must("Finish", "held", &None{})
	if got := other.do(Ask{ID: "now", Prompt: own("new", 64)}); got.Stored.Stored != 64 {
		t.Errorf("after the pins: %+v", got.Stored)
	}

	// Pins of an engine that dies go as well.
	hog.must("Hold", Ask{ID: "held", Prompt: own("new", 64)}, &held)
	hog.kill()
	eventually(t, bound(), "room after the kill", func() error {
		var granted int
		return other.call("Half", Ask{ID: fmt.Sprint("after ", time.Now().UnixNano()), Prompt: own("last", 128)}, &granted)
	})
	other.goodbye()
	n.idle()
}

// TestReservationExpires: what is reserved and not committed in time is
// nobody's, until the engine says that it writes no more.
func TestReservationExpires(t *testing.T) {
	t.Parallel()
	n := serve(t, place(t), "--set", "core.reservation_timeout=300ms")
	slow, other := n.engine("slow"), n.engine("other")
	var granted int
	slow.must("Half", Ask{ID: "half", Prompt: own("half", 10)}, &granted)
	eventually(t, bound(), "expiry", func() error {
		if st := n.status(); st.Stores.Expired != 10 || st.Tables.Quarantined != 10 {
			return fmt.Errorf("%+v, %+v", st.Stores, st.Tables)
		}
		return nil
	})
	if got := other.store("half", own("half", 10)); got.Stored.Stored != 10 {
		t.Errorf("somebody else stores them: %+v", got.Stored)
	}
	var statuses []client.FillStatus
	slow.must("Complete", "half", &statuses)
	for _, s := range statuses {
		if s != client.FillDropped {
			t.Fatalf("a commit that comes too late is answered %v", statuses)
		}
	}
	n.quiet()
	if got := slow.do(Ask{ID: "again", Prompt: own("half", 10), LoadOnly: true}); got.Hits != 10 {
		t.Errorf("%d of 10 are hits: %v", got.Hits, got.Verdicts)
	}
	slow.goodbye()
	other.goodbye()
	n.idle()
	checkRoot(t, n)
}

// TestEngineStopped: an engine that is stopped with calls under way holds up
// nobody, and goes on when it is continued.
func TestEngineStopped(t *testing.T) {
	t.Parallel()
	n := serve(t, place(t), "--primary", "32MiB")
	still, other := n.engine("still"), n.engine("other")
	// Not of the same prompts: who wants a block that somebody else is storing
	// waits for it, up to core.lookup_timeout.
	still.start(Load{Prefix: "still", Conversations: 30, Turn: 20, Parallel: 3, Flush: true})
	other.start(Load{Prefix: "other", Conversations: 30, Turn: 20, Parallel: 3, Flush: true})
	still.after(3)
	still.signal(syscall.SIGSTOP)
	other.after(30)
	still.signal(syscall.SIGCONT)
	still.after(3)
	other.finish()
	if r := still.finish(); r.Lost > 0 {
		t.Error("the stopped engine has lost its session")
	}
	still.goodbye()
	other.goodbye()
	n.idle()
	n.exact()
}

// TestTwoModels: blocks of two lengths, one of them no multiple of a page,
// take the primary from each other.
func TestTwoModels(t *testing.T) {
	t.Parallel()
	n := serve(t, place(t), "--primary", "16MiB", "--set", "primary.extent=1MiB")
	large := n.engineOf(engineArgs{Name: "large", BlockBytes: 200_001})
	small := n.engineOf(engineArgs{Name: "small", BlockBytes: 20_000})
	load := Load{Prefix: "all", Conversations: 100, Turn: 12, Parallel: 2, Flush: true}
	// By turns, so that one has what the other has left, then at once.
	for _, phase := range [][]*engine{{large}, {small}, {large}, {small, large}} {
		for _, e := range phase {
			e.start(load)
			load.Seed++
		}
		for _, e := range phase {
			e.after(often(60, 600))
		}
		for _, e := range phase {
			if r := e.finish(); r.Hits == 0 || r.Stored == 0 {
				t.Errorf("engine %s: %+v", e.args.Name, r)
			}
		}
		p := n.status().Primary
		t.Logf("%d extents were taken, %d blocks evicted", p.ExtentsTaken, p.Evicted)
	}
	if p := n.status().Primary; p.ExtentsTaken < 3 {
		t.Errorf("no model takes room from the other: %+v", p)
	}
	large.goodbye()
	small.goodbye()
	n.idle()
	n.exact()
	checkRoot(t, n)
}
