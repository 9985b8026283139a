package core

import (
	"fmt"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
)

// A second request of an unfinished id is refused, and the first goes on (B064).
func TestUnfinishedIDIsAConflict(t *testing.T) {
	r := newRig(t, 8, 0, nil)
	r.request("a")
	g := r.reserve("a", keyRange(0, 1))
	r.wantErr("again", r.c.NewRequest(r.now, r.sid, "a", NoLimits()), ErrConflict)
	r.want("commit", r.commit("a", fillsOf(g, keyRange(0, 1))...), []FillStatus{FillOK})
	// Ids are scoped to the session.
	other := r.must(r.c.OpenSession(r.ns)).(SessionID)
	r.must(nil, r.c.NewRequest(r.now, other, "a", NoLimits()))
}

// An id may be used again while jobs and stores of an older generation run; they
// neither block nor change the new one (B060, B055).
func TestIDReuseWithWorkInFlight(t *testing.T) {
	r := newRig(t, 20, 1, nil)
	r.have[0][key(50, 0)] = true
	r.request("a")
	r.store("a", keyRange(0, 2))
	cascade := r.jobs(Cascade)[0]
	_, w := r.lookup("a", keyRange(50, 51), r.now+Time(time.Hour))
	read := r.jobs(Promotion)[0]
	g := r.reserve("a", keyRange(10, 12))
	r.finish("a")
	r.want("its lookup is void", r.answer(w).Void, true)

	r.request("a")
	g2 := r.reserve("a", keyRange(20, 21))
	_, w2 := r.lookup("a", keyRange(50, 52), r.now+Time(time.Hour))
	r.results(read, Done, 0)
	r.want("the new one shares the read", r.answer(w2).Tokens, int64(16))
	r.results(cascade, Done, 0)
	// Commits by the id reach the older generation's fills too.
	r.want("old fills", r.commit("a", fillsOf(g, keyRange(10, 12))...), []FillStatus{FillOK, FillOK})
	r.want("one end is told", len(effects[RequestFinished](r)), 1)
	r.want("new fills", r.commit("a", fillsOf(g2, keyRange(20, 21))...), []FillStatus{FillOK})
	r.finish("a")
	r.want("the other end is told", len(effects[RequestFinished](r)), 1)
	r.run(Done)
	r.idle()
}

// Fills of an older generation can be given back also when the newer one that
// took its id is gone already.
func TestOlderGenerationOutlivesTheNewer(t *testing.T) {
	r := newRig(t, 20, 0, nil)
	r.request("a")
	g1 := r.reserve("a", keyRange(0, 1))
	r.finish("a")
	r.request("a")
	g2 := r.reserve("a", keyRange(1, 2))
	r.finish("a")
	r.request("a")
	r.finish("a")
	r.wantErr("a finishing id takes no lookups", func() error {
		_, err := r.c.Lookup(r.now, r.sid, "a", [][]block.Key{nil}, LookupOptions{}, &Answer{})
		return err
	}(), ErrFinished)
	r.want("oldest", r.abort("a", fillsOf(g1, keyRange(0, 1))...), []FillStatus{FillOK})
	r.want("middle", r.commit("a", fillsOf(g2, keyRange(1, 2))...), []FillStatus{FillOK})
	r.idle()
}

// The number of a session's requests and hand-overs is bounded.
func TestRequestsAreBounded(t *testing.T) {
	r := newRig(t, 8, 0, func(o *Options) { o.RequestsMax = 3 })
	r.request("s")
	r.store("s", keyRange(0, 1))
	r.finish("s")
	for i := range 3 {
		id := fmt.Sprint(i)
		r.must(nil, r.c.NewRequest(r.now, r.sid, id, Params{RemoteDecoder: true, MaxLoadTokens: -1, MaxOffloadTokens: -1}))
		r.lookup(id, keyRange(0, 1), 0)
		if i < 2 {
			r.finish(id)
		}
	}
	r.wantErr("one more", r.c.NewRequest(r.now, r.sid, "x", NoLimits()), ErrTooMany)
	r.tick(time.Minute)
	r.request("x")
	r.finish("x")
	r.finish("2")
	r.tick(time.Minute)
	r.idle()
}

// An unpin without a holder is refused and reported, never clamped (B008 of the
// leading invariants, B047): twice, another's, stale, made up.
func TestUnpinWithoutHolderIsRefused(t *testing.T) {
	r := newRig(t, 2, 0, nil)
	r.request("a")
	r.store("a", keyRange(0, 1))
	l := r.must(r.c.Pin(r.now, r.sid, "a", keyRange(0, 1), nil)).([]Lease)[0]
	// A request holds at most one pin on a block.
	again := r.must(r.c.Pin(r.now, r.sid, "a", keyRange(0, 1), nil)).([]Lease)[0]
	r.want("the same lease", again, l)
	r.want("pins", r.c.Stats().Pins, 1)
	r.request("b")
	unpin := func(id string, l ...Lease) []FillStatus {
		st := r.must(r.c.Unpin(r.now, r.sid, id, l, nil)).([]FillStatus)
		r.check()
		return st
	}
	r.want("another's", unpin("b", l), []FillStatus{FillStale})
	r.want("wrong generation", unpin("a", Lease{Slot: l.Slot, Gen: l.Gen + 1}), []FillStatus{FillStale})
	r.want("no slot", unpin("a", Lease{Slot: 1 << 31, Gen: 1}, Lease{}), []FillStatus{FillStale, FillStale})
	r.want("twice in one call", unpin("a", l, l), []FillStatus{FillStale, FillOK})
	r.want("twice", unpin("a", l), []FillStatus{FillStale})
	r.finish("a")
	r.finish("b")
	r.idle()
}

// A hit pins: what a lookup has found cannot be evicted before the request lets
// go (B079, B048), and a key that is not committed cannot be pinned.
func TestHitCannotBeEvicted(t *testing.T) {
	r := newRig(t, 4, 0, nil)
	r.request("a")
	r.store("a", keyRange(0, 2))
	r.finish("a")
	r.request("b")
	a, _ := r.lookup("b", keyRange(0, 2), 0)
	r.request("c")
	for i := range 20 {
		r.store("c", keyRange(100+2*i, 102+2*i))
	}
	for i, l := range a.Groups[0].Leases {
		e := r.c.lookAt(l.Slot)
		if e.key != key(i, 0) || e.gen != l.Gen || e.state != slotResident {
			t.Fatalf("block %d moved", i)
		}
	}
	g := r.reserve("c", keyRange(500, 501))
	r.want("a block that is being filled", r.must(r.c.Pin(r.now, r.sid, "c", keyRange(500, 501), nil)), []Lease{{}})
	r.abort("c", fillsOf(g, keyRange(500, 501))...)
	r.finish("b")
	r.want("evictable again", r.store("c", keyRange(200, 204)), 4)
	r.finish("c")
	r.idle()
}

// A lease past its deadline is shown as overdue and not revoked (B035).
func TestOverdueLeaseIsShownNotRevoked(t *testing.T) {
	r := newRig(t, 4, 1, nil)
	r.request("a")
	r.store("a", keyRange(0, 1))
	r.lookup("a", keyRange(0, 1), 0)
	r.tick(2 * time.Minute)
	p := r.c.PinList(10)
	if len(p) != 2 || !p[0].Overdue || p[0].Request != "a" || p[0].Key != key(0, 0) || p[1].Job == 0 || p[1].Kind != Cascade || !p[1].Overdue {
		t.Fatalf("%+v", p)
	}
	r.want("limit", len(r.c.PinList(1)), 1)
	r.want("still pinned", r.c.Stats().Pins, 1)
	r.run(Done)
	r.finish("a")
	r.want("idle", len(r.c.PinList(10)), 0)
	r.idle()
}

// Tails go before heads, however the reads of a prompt came in (B132).
func TestRootsEndUpYoungest(t *testing.T) {
	evictionOrder := func(r *rig, n int) (order []int) {
		p := r.c.classes[0].policy
		for id := p.Oldest(); id != 0; id = p.Newer(id) {
			for i := range n {
				if r.c.at(unid(id)).key == key(i, 0) {
					order = append(order, i)
				}
			}
		}
		return order
	}
	t.Run("stored", func(t *testing.T) {
		r := newRig(t, 8, 0, nil)
		r.request("a")
		r.store("a", keyRange(3, 6))
		r.store("a", keyRange(0, 3))
		r.finish("a")
		r.want("order", evictionOrder(r, 6), []int{5, 4, 3, 2, 1, 0})
	})
	t.Run("read in any order", func(t *testing.T) {
		r := newRig(t, 8, 2, func(o *Options) { o.ReservePercent = -1 })
		r.request("s")
		r.store("s", keyRange(2, 3))
		effects[StartJob](r)
		for i := range 6 {
			r.have[i%2][key(i, 0)] = true
		}
		r.request("a")
		_, w := r.lookup("a", keyRange(0, 6), r.now+Time(time.Hour))
		j := r.jobs(Promotion)
		for _, jb := range []StartJob{j[1], j[0]} {
			for i := len(jb.Blocks) - 1; i >= 0; i-- {
				r.c.JobResults(r.now, jb.ID, []JobResult{r.result(jb, i, Done, 0)})
			}
		}
		r.check()
		r.want("tokens", r.answer(w).Tokens, int64(96))
		r.finish("a")
		r.want("order", evictionOrder(r, 6), []int{5, 4, 3, 1, 0}) // 2 is pinned by a write
	})
	t.Run("kept for a hand-over", func(t *testing.T) {
		r := newRig(t, 8, 0, nil)
		r.request("s")
		r.store("s", keyRange(0, 2))
		r.finish("s")
		r.must(nil, r.c.NewRequest(r.now, r.sid, "a", Params{RemoteDecoder: true, MaxLoadTokens: -1, MaxOffloadTokens: -1}))
		r.lookup("a", keyRange(0, 6), 0)
		r.store("a", keyRange(4, 6))
		r.store("a", keyRange(2, 4))
		r.finish("a")
		r.tick(time.Minute)
		r.want("order", evictionOrder(r, 6), []int{5, 4, 3, 2, 1, 0})
	})
}

// One request is one access: the order of two requests' blocks is that of their
// ends, not of how often they looked.
func TestOneRequestIsOneAccess(t *testing.T) {
	r := newRig(t, 4, 0, nil)
	r.request("s")
	r.store("s", keyRange(0, 4))
	r.request("a")
	r.request("b")
	r.lookup("b", keyRange(2, 3), 0)
	for range 100 {
		r.lookup("a", keyRange(0, 1), 0)
	}
	r.finish("a")
	r.finish("b")
	r.want("stored", r.store("s", keyRange(10, 13)), 3)
	r.want("the one that ended last stays", r.verdicts("s", []block.Key{key(2, 0)})[0], Hit)
}

// A remote_decoder request keeps all its blocks, hits included, pinned for the
// hand-over: those it found, those it stored, those that were there already and
// those that others were filling. The bound gives them back.
func TestHandOverKeepsAllBlocks(t *testing.T) {
	r := newRig(t, 20, 1, nil)
	r.have[0][key(9, 0)] = true
	r.request("s")
	r.store("s", keyRange(0, 3))
	r.run(Done)
	others := r.reserve("s", keyRange(6, 7))
	r.must(nil, r.c.NewRequest(r.now, r.sid, "a", Params{RemoteDecoder: true, MaxLoadTokens: -1, MaxOffloadTokens: -1}))
	r.lookup("a", keyRange(0, 2), 0)                      // hits
	g := r.reserve("a", keyRange(2, 8))                   // 2 is there, 6 is somebody's
	_, w := r.lookup("a", keyRange(9, 10), r.now+Time(1)) // never answered in time
	r.tick(time.Second)
	r.want("waited", r.answer(w).Tokens, int64(0))
	r.commit("a", fillsOf(g, keyRange(2, 8))...)
	r.run(Done)
	r.finish("a")
	r.want("told", len(effects[RequestFinished](r)), 1)
	r.finish("s")
	r.commit("s", fillsOf(others, keyRange(6, 7))...)
	r.run(Done)
	s := r.c.Stats()
	r.want("pins and hand-overs", []int{s.Pins, s.Handovers, s.Requests}, []int{8, 1, 0})
	r.tick(58 * time.Second)
	r.want("pins before the bound", r.c.Stats().Pins, 8)
	r.tick(2 * time.Second)
	r.want("expired", r.c.Stats().HandoversExpired, int64(1))
	r.idle()
}

// A late store starts the clock of the hand-over again, and one that is later
// than the bound finds no hand-over.
func TestHandOverClock(t *testing.T) {
	r := newRig(t, 20, 0, func(o *Options) { o.ReservationTimeout = time.Hour })
	keep := Params{RemoteDecoder: true, MaxLoadTokens: -1, MaxOffloadTokens: -1}
	r.must(nil, r.c.NewRequest(r.now, r.sid, "a", keep))
	g := r.reserve("a", keyRange(0, 2))
	f := fillsOf(g, keyRange(0, 2))
	r.commit("a", f[1])
	r.finish("a")
	r.tick(50 * time.Second)
	r.want("the request is not over before its last store", len(effects[RequestFinished](r)), 0)
	r.commit("a", f[0])
	r.tick(50 * time.Second)
	r.want("pins after the clock was started again", r.c.Stats().Pins, 2)
	r.tick(10 * time.Second)
	r.idle()

	r.must(nil, r.c.NewRequest(r.now, r.sid, "a", keep))
	g = r.reserve("a", keyRange(4, 6))
	f = fillsOf(g, keyRange(4, 6))
	r.commit("a", f[1])
	r.finish("a")
	r.tick(61 * time.Second)
	r.want("given back at the bound", r.c.Stats().Pins, 0)
	r.want("the store itself is fine", r.commit("a", f[0]), []FillStatus{FillOK})
	r.idle()
}

// A pin that a lookup under way holds softly becomes the hand-over's when a store
// finds the block present.
func TestHandOverKeepsWhatALookupHeldSoftly(t *testing.T) {
	r := newRig(t, 20, 1, nil)
	r.have[0][key(0, 0)], r.have[0][key(1, 0)] = true, true
	r.must(nil, r.c.NewRequest(r.now, r.sid, "a", Params{RemoteDecoder: true, MaxLoadTokens: -1, MaxOffloadTokens: -1}))
	r.lookup("a", keyRange(0, 2), r.now+Time(time.Hour))
	j := r.jobs(Promotion)[0]
	r.c.JobResults(r.now, j.ID, []JobResult{r.result(j, 1, Done, 0)})
	r.want("present", r.reserve("a", keyRange(1, 2))[0].Status, GrantPresent)
	r.c.JobResults(r.now, j.ID, []JobResult{r.result(j, 0, Failed, tier.CauseIO)})
	r.check()
	r.want("pins", r.c.Stats().Pins, 1)
}

// A session that dies in any state gives everything back (B039, B041, B053, B045):
// pins and requests at once, slots once nobody can write them, work in flight
// when it ends.
func TestSessionDeathInEveryState(t *testing.T) {
	keep := Params{RemoteDecoder: true, MaxLoadTokens: -1, MaxOffloadTokens: -1}
	for _, c := range []struct {
		name  string
		do    func(r *rig)
		quiet int // slots that the engine could still write
	}{
		{"nothing", func(*rig) {}, 0},
		{"active", func(r *rig) { r.request("a") }, 0},
		{"looked up", func(r *rig) {
			r.request("a")
			r.store("a", keyRange(0, 2))
			r.lookup("a", keyRange(0, 2), 0)
		}, 0},
		{"waiting for a read", func(r *rig) {
			r.have[0][key(0, 0)] = true
			r.request("a")
			r.lookup("a", keyRange(0, 2), r.now+Time(time.Hour))
		}, 0},
		{"waiting for a probe", func(r *rig) {
			r.c.tiers[0].facts.Known = nil
			r.request("a")
			r.lookup("a", keyRange(0, 2), r.now+Time(time.Hour))
		}, 0},
		{"polling", func(r *rig) {
			r.have[0][key(0, 0)] = true
			r.request("a")
			r.lookup("a", keyRange(0, 2), 0)
		}, 0},
		{"reserved", func(r *rig) { r.request("a"); r.reserve("a", keyRange(0, 3)) }, 3},
		{"waiting for its own reservation", func(r *rig) {
			r.request("a")
			r.reserve("a", keyRange(0, 3))
			r.request("b")
			r.lookup("b", keyRange(0, 3), r.now+Time(time.Hour))
		}, 3},
		{"reservation expired", func(r *rig) { r.request("a"); r.reserve("a", keyRange(0, 3)); r.tick(2 * time.Minute) }, 3},
		{"committed without sums", func(r *rig) {
			r.request("a")
			g := r.reserve("a", keyRange(0, 2))
			r.commit("a", Fill{Slot: g[0].Slot, Gen: g[0].Gen})
		}, 1},
		{"finishing", func(r *rig) { r.request("a"); r.reserve("a", keyRange(0, 3)); r.finish("a") }, 3},
		{"three generations", func(r *rig) {
			for i := range 3 {
				r.request("a")
				r.reserve("a", keyRange(i, i+1))
				r.finish("a")
			}
		}, 3},
		{"flushing", func(r *rig) {
			r.request("a")
			r.store("a", keyRange(0, 2))
			if _, _, _, err := r.c.Flush(r.now, r.sid, "a", r.now+Time(time.Hour)); err != nil {
				r.t.Fatal(err)
			}
			r.reserve("a", keyRange(2, 3))
		}, 1},
		{"hand-over", func(r *rig) {
			r.must(nil, r.c.NewRequest(r.now, r.sid, "a", keep))
			r.store("a", keyRange(0, 2))
			r.finish("a")
		}, 0},
		{"hand-over not yet final", func(r *rig) {
			r.must(nil, r.c.NewRequest(r.now, r.sid, "a", keep))
			r.store("a", keyRange(0, 2))
			r.reserve("a", keyRange(2, 3))
			r.finish("a")
		}, 1},
		{"reset under way", func(r *rig) {
			r.request("a")
			r.store("a", keyRange(0, 2))
			r.lookup("a", keyRange(0, 2), 0)
			r.reserve("a", keyRange(2, 3))
			r.must(r.c.Reset(r.now, r.now+Time(time.Hour)))
		}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, 20, 1, nil)
			c.do(r)
			r.check()
			n, err := r.c.CloseSession(r.now, r.sid)
			r.want("close", []any{n, err}, []any{c.quiet, nil})
			r.check()
			_, err = r.c.CloseSession(r.now, r.sid)
			r.wantErr("close again", err, ErrNoSession)
			for what, err := range map[string]error{
				"new request": r.c.NewRequest(r.now, r.sid, "a", NoLimits()),
				"finish":      r.c.Finish(r.now, r.sid, "a"),
				"touch":       r.c.Touch(r.now, r.sid, nil),
			} {
				r.wantErr(what, err, ErrNoSession)
			}
			s := r.c.Stats()
			r.want("pins and hand-overs", []int{s.Pins, s.Handovers}, []int{0, 0})
			for _, a := range effects[AnswerLookup](r) {
				if !a.Answer.Void {
					t.Errorf("lookup %d is answered to a dead session", a.Wait)
				}
			}
			// Its slots go to nobody else until its processes are gone.
			other := r.must(r.c.OpenSession(r.ns)).(SessionID)
			r.must(nil, r.c.NewRequest(r.now, other, "x", NoLimits()))
			for i := 0; ; i++ {
				if _, err := r.c.Reserve(r.now, other, "x", 0, 0, keyRange(100+i, 101+i), nil); err != nil {
					break
				}
			}
			if r.c.Stats().QuietSlots < c.quiet {
				t.Fatal("a quarantined slot was given away")
			}
			for _, e := range effects[ComputeSum](r) {
				r.c.SumDone(r.now, e.Slot, e.Gen, 1)
			}
			r.check()
			if c.quiet > 0 {
				r.must(nil, r.c.SessionQuiet(r.now, r.sid))
			}
			for r.run(Done) > 0 {
			}
			for _, j := range r.jobs(ProbeJob) {
				r.c.ProbeResult(r.now, j.ID, nil, false)
			}
			for _, e := range effects[StartJob](r) {
				t.Fatalf("job %d is left", e.ID)
			}
			m, err := r.c.CloseSession(r.now, other)
			if err != nil || m > 0 && r.c.SessionQuiet(r.now, other) != nil {
				t.Fatal(err)
			}
			r.wantErr("quiet again", r.c.SessionQuiet(r.now, r.sid), ErrNoSession)
			r.tick(time.Hour)
			r.want("sessions", r.c.Stats().Sessions, 0)
			r.idle()
		})
	}
}

// What a dead session had committed is summed, cascaded and shared all the same.
func TestCommittedBlocksSurviveTheirSession(t *testing.T) {
	r := newRig(t, 8, 1, nil)
	r.request("a")
	g := r.reserve("a", keyRange(0, 1))
	r.commit("a", Fill{Slot: g[0].Slot, Gen: g[0].Gen})
	r.must(r.c.CloseSession(r.now, r.sid))
	r.check()
	r.c.SumDone(r.now, g[0].Slot, g[0].Gen, 0)
	r.check()
	r.want("cascades", r.run(Done), 1)
	r.sid = r.must(r.c.OpenSession(r.ns)).(SessionID)
	r.request("b")
	a, _ := r.lookup("b", keyRange(0, 1), 0)
	r.want("tokens", a.Tokens, int64(16))
	r.finish("b")
	r.idle()
}

// The end of a request is told once for each, after its last store, whatever the
// order.
func TestFinishIsForwardedAfterTheLastStore(t *testing.T) {
	r := newRig(t, 8, 1, nil)
	r.request("a")
	g := r.reserve("a", keyRange(0, 3))
	f := fillsOf(g, keyRange(0, 3))
	r.finish("a")
	r.commit("a", f[0])
	r.abort("a", f[1])
	r.want("told", len(effects[RequestFinished](r)), 0)
	r.tick(2 * time.Minute)
	r.want("told while the engine still writes", len(effects[RequestFinished](r)), 0)
	r.want("dropped", r.commit("a", f[2]), []FillStatus{FillDropped})
	r.want("told", effects[RequestFinished](r), []RequestFinished{{r.sid, "a"}})
	r.run(Done)
	r.idle()
}

// Draining starts nothing new and lets what is under way end.
func TestDrain(t *testing.T) {
	r := newRig(t, 8, 1, nil)
	r.have[0][key(5, 0)] = true
	r.request("a")
	r.store("a", keyRange(0, 1))
	g := r.reserve("a", keyRange(1, 2))
	r.c.Drain()
	r.wantErr("request", r.c.NewRequest(r.now, r.sid, "b", NoLimits()), ErrDraining)
	_, err := r.c.Reserve(r.now, r.sid, "a", 0, 0, keyRange(2, 3), nil)
	r.wantErr("reserve", err, ErrDraining)
	_, err = r.c.OpenSession(r.ns)
	r.wantErr("session", err, ErrDraining)
	a, _ := r.lookup("a", []block.Key{key(0, 0), key(5, 0)}, r.now+Time(time.Hour))
	r.want("from memory only", []any{a.Final, a.Tokens, a.Groups[0].Verdicts[1]}, []any{true, int64(16), MissDraining})
	r.want("pending", r.c.Pending(), Pending{Jobs: 1, Reservations: 1, Requests: 1})
	r.want("commit", r.commit("a", fillsOf(g, keyRange(1, 2))...), []FillStatus{FillOK})
	r.run(Done)
	r.finish("a")
	r.want("idle", r.c.Pending().Idle(), true)
	r.idle()
}

// Also what waits for a tier's credit is a store of the request: tiers hear of
// its end after the last of it is submitted or given up, once.
func TestFinishIsForwardedAfterWhatWaitsForCredit(t *testing.T) {
	r := newRig(t, 40, 1, func(o *Options) { o.Tiers[0].WriteBlocksMax = 1 })
	r.request("a")
	r.store("a", keyRange(0, 3))
	r.finish("a")
	r.wantErr("the request is over for its engine", r.c.Finish(r.now, r.sid, "a"), ErrNoRequest)
	for waiting := 2; waiting > 0; waiting-- {
		r.want("waiting", r.c.Stats().Waiting[0], waiting)
		r.want("told", len(effects[RequestFinished](r)), 0)
		r.results(r.jobs(Cascade)[0], Done, 0)
	}
	_, submitted := r.fx[0].(StartJob)
	r.want("told after the last is submitted", []any{len(r.fx), submitted, r.fx[1]}, []any{2, true, RequestFinished{r.sid, "a"}})
	r.run(Done)
	r.idle()
}
