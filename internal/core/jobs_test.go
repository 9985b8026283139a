package core

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
)

// Late, duplicate and unknown completions are counted and ignored (B006).
func TestStrayResultsAreCountedAndIgnored(t *testing.T) {
	r := newRig(t, 8, 1, nil)
	r.request("a")
	r.store("a", keyRange(0, 2))
	j := r.jobs(Cascade)[0]
	r.c.JobResults(r.now, 12345, []JobResult{{}, {Index: 1}})
	r.c.JobResults(r.now, j.ID, []JobResult{{Index: 2}, {Index: -1}})
	r.c.JobResults(r.now, j.ID, []JobResult{r.result(j, 0, Done, 0), r.result(j, 0, Failed, tier.CauseIO)})
	r.c.JobResults(r.now, j.ID, []JobResult{r.result(j, 1, Done, 0)})
	r.c.JobResults(r.now, j.ID, []JobResult{r.result(j, 1, Done, 0)})
	r.check()
	s := r.c.Stats()
	r.want("foreign", s.ForeignResults, int64(6))
	r.want("done", s.Tiers[0].Blocks[Cascade], int64(2))
	r.finish("a")
	r.idle()
}

// A request that finishes while its load is in flight: the slots come back with
// the result, exactly once (B004), and nobody is pinned for it.
func TestFinishWhileLoading(t *testing.T) {
	r := newRig(t, 8, 1, nil)
	r.have[0][key(0, 0)] = true
	r.request("a")
	_, w := r.lookup("a", keyRange(0, 1), r.now+Time(time.Hour))
	r.finish("a")
	r.want("void", r.answer(w).Void, true)
	j := r.jobs(Promotion)[0]
	r.results(j, Done, 0)
	r.want("pins", r.c.Stats().Pins, 0)
	r.request("b")
	a, _ := r.lookup("b", keyRange(0, 1), 0)
	r.want("the block is there for others", a.Tokens, int64(16))
	r.finish("b")
	r.idle()
}

// Credits return to zero after any mix of success, failure, cancel and deadline
// (B050).
func TestCreditsComeBack(t *testing.T) {
	r := newRig(t, 200, 2, func(o *Options) { o.OverduePercent = 100 })
	for i := range 1000 {
		r.have[i%2][key(i, 0)] = true
	}
	for i := range 100 {
		id := string(rune('a' + i%20))
		r.request(id)
		r.lookup(id, keyRange(10*i, 10*i+10), 0)
		r.store(id, keyRange(10000+i, 10003+i))
		jobs := append(r.jobs(Promotion), r.jobs(Cascade)...)
		if i%4 == 3 {
			r.tick(2 * time.Minute)
		}
		for _, j := range jobs {
			r.results(j, Outcome(i%3), tier.CauseIO)
		}
		r.finish(id)
		r.run(Cancelled)
	}
	r.tick(2 * time.Minute)
	r.idle()
}

// A load that times out fails at once, and its slots change owner only when its
// I/O is over: a peer that writes late writes into nobody's block (B026, B032).
func TestLateWriterWritesIntoNobodysBlock(t *testing.T) {
	r := newRig(t, 4, 1, func(o *Options) { o.OverduePercent, o.ReservePercent = 100, -1 })
	r.have[0][key(0, 0)], r.have[0][key(1, 0)] = true, true
	r.request("a")
	_, w := r.lookup("a", keyRange(0, 2), r.now+Time(time.Hour))
	j := r.jobs(Promotion)[0]
	r.tick(10 * time.Second)
	r.want("verdict", r.answer(w).Groups[0].Verdicts[0], MissFailed)
	r.want("asked to end", effects[CancelJob](r), []CancelJob{{j.ID, 0}})
	g := r.reserve("a", keyRange(10, 12))
	for _, gr := range g {
		for _, b := range j.Blocks {
			if gr.Slot == b.Slot {
				t.Fatalf("slot %d is granted while it may be written", b.Slot)
			}
		}
	}
	_, err := r.c.Reserve(r.now, r.sid, "a", 0, 0, keyRange(20, 21), nil)
	r.wantErr("more", err, ErrNoRoom)
	r.results(j, Done, 0) // it says that all went well; that is too late
	r.want("verdicts", r.verdicts("a", keyRange(0, 2)), []Verdict{MissFailed, MissFailed})
	r.want("late", r.c.Stats().Tiers[0].Late, int64(2))
	r.reserve("a", keyRange(20, 22))
}

// A tier whose overdue jobs hold too much is down until it lets go: it is asked
// for nothing, and nothing is written to it.
func TestOverdueTierGoesDownAndComesBack(t *testing.T) {
	r := newRig(t, 40, 2, func(o *Options) { o.OverduePercent = 10; o.PromoteTimeout, o.CascadeTimeout = time.Second, time.Second })
	for i := range 20 {
		r.have[0][key(i, 0)] = true
	}
	r.request("a")
	r.lookup("a", keyRange(0, 3), 0)
	first := r.jobs(Promotion)[0]
	r.tick(time.Second)
	r.want("3 of 4 slots", r.verdicts("a", keyRange(10, 11))[0], HitPending)
	r.lookup("a", keyRange(10, 11), 0)
	second := r.jobs(Promotion)[0]
	r.tick(time.Second)
	r.want("4 of 4 slots", r.verdicts("a", keyRange(11, 12))[0], MissUnavailable)
	r.store("a", keyRange(100, 101))
	c := r.jobs(Cascade)
	r.want("written only to the other tier", []int{len(c), c[0].Tier}, []int{1, 1})
	s := r.c.Stats()
	r.want("overdue bytes and drops", []int64{s.OverdueBytes[0], s.Tiers[0].Dropped[DropDown]}, []int64{4 * PageSize, 1})
	r.results(second, Failed, tier.CauseTimeout)
	r.want("back", r.verdicts("a", keyRange(11, 12))[0], HitPending)
	r.results(first, Failed, tier.CauseTimeout)
	r.results(c[0], Done, 0)
	r.finish("a")
	r.idle()
}

// A cascade past its deadline counts as failed; the block stays, and stays where
// it is until the write is over.
func TestOverdueCascade(t *testing.T) {
	r := newRig(t, 2, 1, func(o *Options) { o.OverduePercent = 100 })
	r.request("a")
	r.store("a", keyRange(0, 1))
	j := r.jobs(Cascade)[0]
	if _, done, _, _ := r.c.Flush(r.now, r.sid, "a", r.now+Time(time.Hour)); done {
		t.Fatal("nothing is pending")
	}
	r.tick(time.Minute)
	fl := effects[AnswerFlush](r)
	r.want("flushed", fl[0].Flushed, Flushed{Done: true, Failed: 1})
	_, err := r.c.Reserve(r.now, r.sid, "a", 0, 0, keyRange(5, 7), nil)
	r.wantErr("its slot", err, ErrNoRoom)
	r.want("verdict", r.verdicts("a", keyRange(0, 1))[0], Hit)
	r.results(j, Done, 0)
	r.finish("a")
	r.idle()
}

// A reset empties the primary at once and leaves the secondaries; memory under
// I/O is reused when that is over, and then the reset is done (B192). No request
// is left waiting for a job that no longer exists (B018).
func TestResetWithJobsInFlight(t *testing.T) {
	r := newRig(t, 40, 2, func(o *Options) { o.ReservePercent = -1 })
	r.request("a")
	r.store("a", keyRange(0, 4))
	writes := r.jobs(Cascade)
	r.want("writes", len(writes), 2)
	r.lookup("a", keyRange(0, 2), 0) // leases stand through the reset
	for i := 10; i < 14; i++ {
		r.have[1][key(i, 0)] = true
	}
	r.request("b")
	_, w := r.lookup("b", keyRange(10, 14), r.now+Time(time.Hour))
	read := r.jobs(Promotion)[0]
	r.request("c")
	_, wc := r.lookup("c", keyRange(20, 21), 0)
	r.want("nothing to wait for", wc, WaitID(0))
	g := r.reserve("c", keyRange(20, 22))
	_, wc = r.lookup("c", keyRange(20, 22), r.now+Time(time.Hour))

	id := r.must(r.c.Reset(r.now, r.now+Time(time.Hour))).(WaitID)
	r.check()
	_, err := r.c.Reset(r.now, r.now)
	r.wantErr("another", err, ErrStillPending)
	r.want("reads are told to end", effects[CancelJob](r), []CancelJob{{read.ID, 1}})
	r.want("a hit nowhere", r.verdicts("a", keyRange(0, 4)), []Verdict{MissAbsent, MissAbsent, MissAbsent, MissAbsent})
	r.want("who waited for a store hears", r.answer(wc).Groups[0].Verdicts[0], MissAbsent)
	again := r.jobs(Promotion)[0]
	r.want("who waited for a read reads afresh", len(again.Blocks), 4)
	for _, b := range again.Blocks {
		for _, o := range append(append([]JobBlock{}, read.Blocks...), writes[0].Blocks...) {
			if b.Slot == o.Slot {
				t.Fatalf("slot %d is used again while I/O may touch it", b.Slot)
			}
		}
	}
	r.results(again, Done, 0)
	r.want("served", r.answer(w).Tokens, int64(64))
	r.results(read, Done, 0)
	r.results(writes[0], Done, 0)
	r.want("not done yet", len(effects[AnswerReset](r)), 0)
	r.results(writes[1], Done, 0)
	r.want("done", effects[AnswerReset](r), []AnswerReset{{id, true}})
	r.want("fills", r.commit("c", fillsOf(g, keyRange(20, 22))...), []FillStatus{FillDropped, FillDropped})
	r.want("leased blocks keep their slots", r.c.Stats().QuietSlots, 2)
	for _, q := range []string{"a", "b", "c"} {
		r.finish(q)
	}
	r.want("the secondary has what was written", r.have[0][key(0, 0)], true)
	r.idle()
}

// A reset that cannot end in time says so; the primary is empty all the same.
func TestResetIsBounded(t *testing.T) {
	r := newRig(t, 8, 1, func(o *Options) { o.OverduePercent = 100 })
	r.request("a")
	r.store("a", keyRange(0, 2))
	j := r.jobs(Cascade)[0]
	id := r.must(r.c.Reset(r.now, r.now+Time(time.Second))).(WaitID)
	r.check()
	r.tick(time.Second)
	r.want("given up", effects[AnswerReset](r), []AnswerReset{{id, false}})
	id = r.must(r.c.Reset(r.now, r.now+Time(time.Second))).(WaitID)
	r.results(j, Failed, tier.CauseIO)
	r.want("done", effects[AnswerReset](r), []AnswerReset{{id, true}})
	id = r.must(r.c.Reset(r.now, r.now)).(WaitID)
	r.check()
	r.want("nothing to wait for", effects[AnswerReset](r), []AnswerReset{{id, true}})
	r.finish("a")
	r.idle()
}

// A block that is being summed when a reset comes is dropped, and its slot waits
// for the sum.
func TestResetWhileSumming(t *testing.T) {
	r := newRig(t, 8, 1, nil)
	r.request("a")
	g := r.reserve("a", keyRange(0, 1))
	r.commit("a", Fill{Slot: g[0].Slot, Gen: g[0].Gen})
	r.must(r.c.Reset(r.now, r.now))
	r.check()
	r.want("quarantined", r.c.Stats().QuietSlots, 1)
	r.c.SumDone(r.now, g[0].Slot, g[0].Gen, 5)
	r.check()
	r.want("verdict", r.verdicts("a", keyRange(0, 1))[0], MissAbsent)
	r.finish("a")
	r.idle()
}

// Released slots are told before anything that may use them again, so that
// poisoning them is safe.
func TestReleasedSlotsAreToldFirst(t *testing.T) {
	r := newRig(t, 2, 1, func(o *Options) { o.ReportReleases, o.ReservePercent = true, -1 })
	r.request("a")
	r.store("a", keyRange(0, 2))
	r.run(Done)
	r.fx = r.fx[:0]
	r.have[0][key(5, 0)] = true
	r.lookup("a", keyRange(5, 6), 0)
	if _, ok := r.fx[0].(ReleasedSlots); !ok || len(r.fx) != 2 {
		t.Fatalf("%T first of %d", r.fx[0], len(r.fx))
	}
	r.want("the slot is used at once", r.fx[0].(ReleasedSlots).Slots[0], r.fx[1].(StartJob).Blocks[0].Slot)
}

// No interest in a fill outlives it: lists hold no request that is gone (B042,
// B051).
func TestInterestIsForgotten(t *testing.T) {
	r := newRig(t, 8, 0, nil)
	r.request("s")
	g := r.reserve("s", keyRange(0, 1))
	for i := range 10 {
		id := string(rune('a' + i))
		r.request(id)
		r.lookup(id, keyRange(0, 1), 0)
	}
	r.abort("s", fillsOf(g, keyRange(0, 1))...)
	for h := range r.c.fills {
		w := r.c.fills[h].wanted
		for _, in := range w[:cap(w)] {
			if in.q != nil {
				t.Fatal("a list of interests still names a request")
			}
		}
	}
}

// Many requests that want the same blocks are all served by one fill of each.
func TestManyWaitersForTheSameBlocks(t *testing.T) {
	r := newRig(t, 200, 0, nil)
	r.request("s")
	g := r.reserve("s", keyRange(0, 100))
	for i := range 2000 {
		id := string(rune(1000 + i))
		r.must(nil, r.c.NewRequest(r.now, r.sid, id, NoLimits()))
		var a Answer
		r.must(r.c.Lookup(r.now, r.sid, id, [][]block.Key{keyRange(0, 100)}, LookupOptions{}, &a))
	}
	r.commit("s", fillsOf(g, keyRange(0, 100))...)
	r.want("pins", r.c.Stats().Pins, 200000)
	r.must(r.c.CloseSession(r.now, r.sid))
	r.check()
	r.idle()
}

// A class takes the extent of another that was used longest ago, if nothing in
// it is pinned, and generations grow through it.
func TestExtentsMoveBetweenClasses(t *testing.T) {
	r := newRig(t, 8, 0, func(o *Options) { o.ExtentBytes = 4 * PageSize })
	ns := r.must(r.c.OpenNamespace([]block.Group{
		{Kind: block.KindFull, TokensPerBlock: 1, BlockBytes: PageSize},
		{Kind: block.KindFull, TokensPerBlock: 1, BlockBytes: 3*PageSize - 1},
	})).(NamespaceID)
	r.sid = r.must(r.c.OpenSession(ns)).(SessionID)
	r.request("a")
	r.want("stored", r.storeIn("a", 0, keyRange(0, 8)), 8)
	l := r.must(r.c.Pin(r.now, r.sid, "a", []block.Key{key(0, 0)}, nil)).([]Lease)[0]
	gens := map[Slot]uint32{}
	for x := range r.c.extents {
		for i := range r.c.extents[x].slots {
			gens[Slot(x*4+i)] = r.c.extents[x].slots[i].gen
		}
	}
	large := []block.Key{key(0, 1), key(1, 1)}
	_, err := r.c.Reserve(r.now, r.sid, "a", 1, 0, large, nil)
	r.wantErr("two extents, one of them pinned", err, ErrNoRoom)
	_, err = r.c.Reserve(r.now, r.sid, "a", 1, 0, []block.Key{key(0, 1), key(1, 1), key(2, 1)}, nil)
	r.wantErr("three large blocks", err, ErrTooLarge)
	g := r.must(r.c.Reserve(r.now, r.sid, "a", 1, 0, large[:1], nil)).([]Grant)
	r.check()
	if g[0].Slot/4 == l.Slot/4 || g[0].Gen <= gens[g[0].Slot] {
		t.Fatalf("granted %+v; pinned %+v; generations %v", g[0], l, gens)
	}
	s := r.c.Stats()
	r.want("remainder and extents taken", []int64{s.Remainder, s.ExtentsTaken}, []int64{PageSize, 1})
	r.abort("a", fillsOf(g, large)...)
	r.finish("a")
	r.request("b")
	r.want("and back", r.storeIn("b", 0, keyRange(100, 108)), 8)
	r.finish("b")
	r.idle()
}

// A block that is safe below is preferred as a victim over one that is nowhere
// else, when ages are close.
func TestEvictionPrefersBlocksThatAreSafeBelow(t *testing.T) {
	r := newRig(t, 8, 1, func(o *Options) { o.ReservePercent = -1 })
	r.must(nil, r.c.NewRequest(r.now, r.sid, "lonely", Params{StoreTiers: []TierFilter{}, MaxLoadTokens: -1, MaxOffloadTokens: -1}))
	r.store("lonely", keyRange(0, 4))
	r.request("safe")
	r.store("safe", keyRange(10, 14))
	r.run(Done)
	r.store("lonely", keyRange(20, 24))
	r.want("verdicts", r.verdicts("safe", keyRange(0, 4)), []Verdict{Hit, Hit, Hit, Hit})
	r.want("in the primary", r.verdicts("safe", keyRange(10, 14)), []Verdict{HitPending, HitPending, HitPending, HitPending})
}

// Dividing by multiplying is exact for every stride and page.
func TestExtentIndex(t *testing.T) {
	check := func(stride, page uint32) {
		e := extent{inv: ^uint64(0)/uint64(stride) + 1}
		if got := e.index(page); got != page/stride {
			t.Fatalf("page %d of stride %d is in slot %d, want %d", page, stride, got, page/stride)
		}
	}
	for stride := uint32(1); stride < 300; stride++ {
		for page := range uint32(2000) {
			check(stride, page)
		}
	}
	r := rand.New(rand.NewPCG(1, 2))
	for range 1_000_000 {
		stride, page := r.Uint32()>>r.IntN(31)|1, r.Uint32()
		check(stride, page)
		check(stride, page/stride*stride)
		check(stride, max(1, page/stride*stride)-1)
	}
}
