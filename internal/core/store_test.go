package core

import (
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
)

// Keys that are present or being filled are filtered from a store (B203).
func TestReserveFiltersWhatIsThere(t *testing.T) {
	r := newRig(t, 8, 0, nil)
	r.request("a")
	r.store("a", keyRange(0, 2))
	r.reserve("a", keyRange(2, 3))
	r.request("b")
	g := r.reserve("b", keyRange(0, 5))
	r.want("statuses", []GrantStatus{g[0].Status, g[1].Status, g[2].Status, g[3].Status, g[4].Status},
		[]GrantStatus{GrantPresent, GrantPresent, GrantFilling, Granted, Granted})
}

// A reserve that cannot be placed is refused whole and changes nothing, for
// every number of free slots short (B022), and at once when all is pinned (B021,
// B121).
func TestReserveIsAllOrNothing(t *testing.T) {
	for pinned := range 9 {
		r := newRig(t, 8, 0, nil)
		r.request("a")
		r.store("a", keyRange(0, 8))
		if pinned > 0 {
			r.must(r.c.Pin(r.now, r.sid, "a", keyRange(0, pinned), nil))
		}
		before := r.c.Stats()
		for n := 1; n <= 9; n++ {
			g, err := r.c.Reserve(r.now, r.sid, "a", 0, 0, keyRange(100, 100+n), nil)
			r.check()
			switch {
			case n > 8:
				r.wantErr("too many for the region", err, ErrTooLarge)
			case n > 8-pinned:
				r.wantErr("too many for now", err, ErrNoRoom)
			default:
				r.wantErr("a reserve that fits", err, nil)
				r.abort("a", fillsOf(g, keyRange(100, 100+n))...)
				r.store("a", keyRange(0, 8))
				before = r.c.Stats()
				continue
			}
			after := r.c.Stats()
			after.Refused = before.Refused
			r.want("stats after a refusal", after, before)
			r.want("grants", len(g), 0)
		}
	}
}

// Keys of a call are never its victims (B129).
func TestReserveNeverEvictsItsOwnKeys(t *testing.T) {
	r := newRig(t, 4, 0, nil)
	r.request("a")
	r.store("a", keyRange(0, 4))
	oldest := key(3, 0) // commits run from the last key to the first
	g := r.reserve("a", []block.Key{oldest, key(10, 0), key(11, 0)})
	r.want("status", g[0].Status, GrantPresent)
	r.want("verdict", r.verdicts("a", []block.Key{oldest})[0], Hit)
	_, err := r.c.Reserve(r.now, r.sid, "a", 0, 0, []block.Key{oldest, key(20, 0), key(21, 0), key(22, 0)}, nil)
	r.wantErr("room for all but the key itself", err, ErrNoRoom)
}

// A prompt longer than the primary is stored in several calls, tail first: only
// the call's own keys are protected, and the root ends up youngest.
func TestStorePromptLargerThanThePrimary(t *testing.T) {
	r := newRig(t, 8, 0, nil)
	r.request("a")
	for lo := 20; lo >= 0; lo -= 4 {
		r.want("stored", r.store("a", keyRange(lo, lo+4)), 4)
	}
	r.finish("a")
	r.request("b")
	a, _ := r.lookup("b", keyRange(0, 24), 0)
	r.want("tokens", a.Tokens, int64(8*16))
}

// A block is no Hit before its commit (B071, B074), and an abort leaves nothing
// visible.
func TestFillIsInvisibleUntilCommit(t *testing.T) {
	r := newRig(t, 8, 0, nil)
	r.request("a")
	g := r.reserve("a", keyRange(0, 2))
	r.want("verdicts while filling", r.verdicts("a", keyRange(0, 2)), []Verdict{HitPending, HitPending})
	f := fillsOf(g, keyRange(0, 2))
	r.want("commit", r.commit("a", f[0]), []FillStatus{FillOK})
	r.want("abort", r.abort("a", f[1]), []FillStatus{FillOK})
	r.want("verdicts", r.verdicts("a", keyRange(0, 2)), []Verdict{Hit, MissAbsent})
	r.want("second commit and abort", append(r.commit("a", f...), r.abort("a", f...)...), []FillStatus{FillStale, FillStale, FillStale, FillStale})
}

// Without a checksum a block is HitPending until the node has computed it.
func TestCommitWithoutSumIsPendingUntilComputed(t *testing.T) {
	r := newRig(t, 8, 1, nil)
	r.request("a")
	g := r.reserve("a", keyRange(0, 1))
	r.commit("a", Fill{Slot: g[0].Slot, Gen: g[0].Gen})
	sums := effects[ComputeSum](r)
	r.want("sums asked for", len(sums), 1)
	r.want("verdict", r.verdicts("a", keyRange(0, 1))[0], HitPending)
	r.want("an abort comes too late", r.abort("a", Fill{Slot: g[0].Slot, Gen: g[0].Gen}), []FillStatus{FillStale})
	r.finish("a")
	r.want("tiers hear of the end", len(effects[RequestFinished](r)), 0)
	r.c.SumDone(r.now, g[0].Slot, g[0].Gen, 7)
	r.c.SumDone(r.now, g[0].Slot, g[0].Gen, 8)
	r.check()
	r.want("late sums", r.c.Stats().LateSums, int64(1))
	j := r.jobs(Cascade)
	r.want("cascaded with the sum", j[0].Blocks[0].Sum, uint64(7))
	r.want("tiers hear of the end", len(effects[RequestFinished](r)), 1)
	r.results(j[0], Done, 0)
	r.idle()
}

// Unfinished reservations expire: the key is free again (B202), a commit that
// comes too late is answered as dropped and publishes nothing (B067), and the
// slot changes owner only after the writer has said that it is done.
func TestReservationExpires(t *testing.T) {
	r := newRig(t, 4, 0, func(o *Options) { o.OverduePercent = 100 })
	r.request("a")
	g := r.reserve("a", keyRange(0, 2))
	r.request("b")
	_, w := r.lookup("b", keyRange(0, 2), r.now+Time(time.Hour))
	if w == 0 {
		t.Fatal("the lookup does not wait")
	}
	r.tick(9 * time.Second)
	r.tick(2 * time.Second)
	r.want("tokens after the lookup's bound", r.answer(w).Tokens, int64(0))
	r.tick(48 * time.Second)
	_, w = r.lookup("b", keyRange(0, 2), r.now+Time(time.Hour))
	r.tick(2 * time.Second)
	r.want("who waits hears of the expiry", r.answer(w).Groups[0].Verdicts[0], MissAbsent)
	r.want("quarantined", r.c.Stats().QuietSlots, 2)
	g2 := r.reserve("b", keyRange(0, 2))
	if g2[0].Status != Granted || g2[0].Slot == g[0].Slot || g2[0].Slot == g[1].Slot {
		t.Fatalf("%v after %v", g2, g)
	}
	r.want("late commit", r.commit("a", fillsOf(g, keyRange(0, 2))...), []FillStatus{FillDropped, FillDropped})
	r.want("the new owner's fill is untouched", r.verdicts("b", keyRange(0, 2)), []Verdict{HitPending, HitPending})
	r.want("new commit", r.commit("b", fillsOf(g2, keyRange(0, 2))...), []FillStatus{FillOK, FillOK})
	r.finish("a")
	r.finish("b")
	r.idle()
}

// What a session keeps past its deadlines is bounded, so that an engine which
// never gives back starves itself and not the others.
func TestExpiredReservationsAreBoundedPerSession(t *testing.T) {
	r := newRig(t, 20, 0, func(o *Options) { o.OverduePercent = 10 })
	r.request("a")
	g := r.reserve("a", keyRange(0, 2))
	r.tick(61 * time.Second)
	_, err := r.c.Reserve(r.now, r.sid, "a", 0, 0, keyRange(10, 11), nil)
	r.wantErr("more for the session", err, ErrNoRoom)
	other := r.must(r.c.OpenSession(r.ns)).(SessionID)
	r.must(nil, r.c.NewRequest(r.now, other, "a", NoLimits()))
	r.must(r.c.Reserve(r.now, other, "a", 0, 0, keyRange(10, 11), nil))
	r.abort("a", fillsOf(g, keyRange(0, 2))...)
	r.reserve("a", keyRange(20, 22))
}

// Reserve, expire, reserve, commit with the old token: refused (B067), also when
// the same slot was granted again.
func TestStaleCommitIsRefused(t *testing.T) {
	r := newRig(t, 1, 0, nil)
	r.request("a")
	old := r.reserve("a", keyRange(0, 1))
	r.abort("a", fillsOf(old, keyRange(0, 1))...)
	g := r.reserve("a", keyRange(0, 1))
	r.want("same slot", g[0].Slot, old[0].Slot)
	r.want("stale", r.commit("a", fillsOf(old, keyRange(0, 1))...), []FillStatus{FillStale})
	r.want("pending", r.verdicts("a", keyRange(0, 1))[0], HitPending)
	r.request("b")
	r.want("another request's", r.commit("b", fillsOf(g, keyRange(0, 1))...), []FillStatus{FillStale})
	r.want("not a slot", r.commit("a", Fill{Slot: 1 << 30, Gen: 1}, Fill{Slot: 5}), []FillStatus{FillStale, FillStale})
}

// A store after the finish is an error and changes nothing; what was reserved
// before may still be committed (B058).
func TestStoreAfterFinish(t *testing.T) {
	r := newRig(t, 8, 1, nil)
	r.request("a")
	g := r.reserve("a", keyRange(0, 1))
	r.finish("a")
	_, err := r.c.Reserve(r.now, r.sid, "a", 0, 0, keyRange(1, 2), nil)
	r.wantErr("reserve", err, ErrFinished)
	_, err = r.c.Lookup(r.now, r.sid, "a", [][]block.Key{keyRange(0, 1)}, LookupOptions{}, &Answer{})
	r.wantErr("lookup", err, ErrFinished)
	_, err = r.c.Pin(r.now, r.sid, "a", keyRange(0, 1), nil)
	r.wantErr("pin", err, ErrFinished)
	r.wantErr("finish", r.c.Finish(r.now, r.sid, "a"), ErrFinished)
	r.want("commit", r.commit("a", fillsOf(g, keyRange(0, 1))...), []FillStatus{FillOK})
	// The cascade was submitted first, so tiers hear of the end after the last store.
	var order []string
	for _, e := range r.fx {
		switch e.(type) {
		case StartJob:
			order = append(order, "cascade")
		case RequestFinished:
			order = append(order, "finished")
		}
	}
	r.want("order", order, []string{"cascade", "finished"})
	_, err = r.c.Commit(r.now, r.sid, "a", nil, nil)
	r.wantErr("commit after the end", err, ErrNoRequest)
	r.wantErr("finish after the end", r.c.Finish(r.now, r.sid, "a"), ErrNoRequest)
	r.run(Done)
	r.idle()
}

// Refused stores are offered again, and blocks evicted in mid-request can be
// stored again (B061, B063): the core keeps no cursor.
func TestEvictedBlockIsStoredAgain(t *testing.T) {
	r := newRig(t, 4, 0, nil)
	r.request("a")
	r.store("a", keyRange(0, 4))
	r.request("b")
	r.store("b", keyRange(10, 12))
	r.want("stored again", r.store("a", keyRange(0, 4)), 2)
}

// MaxOffloadTokens caps the prefix that is stored, in whole blocks.
func TestOffloadCap(t *testing.T) {
	for _, c := range []struct {
		cap   int64
		first int
		want  []GrantStatus
	}{
		{-1, 0, []GrantStatus{Granted, Granted}},
		{0, 0, []GrantStatus{GrantCapped, GrantCapped}},
		{15, 0, []GrantStatus{GrantCapped, GrantCapped}},
		{31, 0, []GrantStatus{Granted, GrantCapped}},
		{31, 1, []GrantStatus{GrantCapped, GrantCapped}},
		{64, 3, []GrantStatus{Granted, GrantCapped}},
		{1 << 62, 1 << 30, []GrantStatus{Granted, Granted}},
	} {
		r := newRig(t, 4, 0, nil)
		p := NoLimits()
		p.MaxOffloadTokens = c.cap
		r.must(nil, r.c.NewRequest(r.now, r.sid, "a", p))
		g := r.must(r.c.Reserve(r.now, r.sid, "a", 0, c.first, keyRange(0, 2), nil)).([]Grant)
		r.want("statuses", []GrantStatus{g[0].Status, g[1].Status}, c.want)
	}
}

// A block that one tier of three reports twice waits for the others all the
// same: each tier's write is a job of its own (B010).
func TestCascadeFansOutAndCountsDistinctTiers(t *testing.T) {
	r := newRig(t, 8, 3, nil)
	r.request("a")
	r.store("a", keyRange(0, 1))
	id, done, _, err := r.c.Flush(r.now, r.sid, "a", r.now+Time(time.Hour))
	if done || err != nil {
		t.Fatal(done, err)
	}
	j := r.jobs(Cascade)
	r.want("jobs", len(j), 3)
	r.results(j[0], Done, 0)
	r.results(j[0], Done, 0) // again
	r.results(j[1], Failed, tier.CauseNoSpace)
	r.want("foreign", r.c.Stats().ForeignResults, int64(1))
	r.want("flush answers", len(effects[AnswerFlush](r)), 0)
	r.want("pins", r.c.at(j[2].Blocks[0].Slot).pins, uint32(1))
	r.results(j[2], Done, 0)
	r.want("flush answers", effects[AnswerFlush](r), []AnswerFlush{{id, Flushed{Done: true, Cascaded: 2, Failed: 1}}})
	if s := r.c.Stats(); s.Tiers[1].Failures[tier.CauseNoSpace] != 1 {
		t.Fatalf("%+v", s)
	}
	r.finish("a")
	r.idle()
}

// A tier that is down fails one store, not the service: its drops are counted,
// and the block stays.
func TestCascadeToATierThatIsDownIsDropped(t *testing.T) {
	r := newRig(t, 20, 2, nil)
	r.c.TierHealth(r.now, 1, true, false)
	r.request("a")
	r.store("a", keyRange(0, 5))
	r.want("jobs", r.run(Done), 1)
	r.want("dropped", r.c.Stats().Tiers[1].Dropped[DropDown], int64(5))
	_, done, f, _ := r.c.Flush(r.now, r.sid, "a", r.now+1)
	r.want("flush", []any{done, f}, []any{true, Flushed{Done: true, Cascaded: 5, Failed: 5}})
	r.want("verdicts", r.verdicts("a", keyRange(0, 5)), []Verdict{Hit, Hit, Hit, Hit, Hit})
	r.finish("a")
	r.idle()
}

// What exceeds a tier's credit waits for its turn, roots first, and is not lost.
func TestStoresWaitForATiersCredit(t *testing.T) {
	r := newRig(t, 100, 1, func(o *Options) { o.Tiers[0].WriteBlocksMax = 3 })
	r.request("a")
	r.store("a", keyRange(0, 8))
	id, done, _, _ := r.c.Flush(r.now, r.sid, "a", r.now+1e9)
	r.want("flushed at once", done, false)
	for _, want := range [][]block.Key{keyRange(0, 3), keyRange(3, 6), keyRange(6, 8)} {
		j := r.jobs(Cascade)
		r.want("jobs", len(j), 1)
		var got []block.Key
		for _, b := range j[0].Blocks {
			got = append(got, b.Key)
		}
		r.want("blocks written", got, want)
		r.want("flush answers", len(effects[AnswerFlush](r)), 0)
		r.results(j[0], Done, 0)
	}
	r.want("flush answers", effects[AnswerFlush](r), []AnswerFlush{{id, Flushed{Done: true, Cascaded: 8}}})
	r.finish("a")
	r.idle()
}

// A tier that hangs does not pin the whole primary: what its unfinished jobs may
// hold is bounded in bytes (B148), stores go on, and what waited in vain is
// dropped: evicted before its turn, past its time, or with its tier down.
func TestHungTierLeavesRoomForStores(t *testing.T) {
	r := newRig(t, 40, 1, func(o *Options) { o.InflightPercent = 100; o.OverduePercent = 100 })
	r.request("a")
	for lo := 0; lo < 200; lo += 10 {
		r.store("a", keyRange(lo, lo+10))
	}
	s := r.c.Stats()
	r.want("blocks pinned by writes", s.Writing[0], 20)
	r.want("blocks that wait", s.Waiting[0], 20)
	held := r.jobs(Cascade)
	r.tick(61 * time.Second)
	s = r.c.Stats()
	r.want("blocks that wait", s.Waiting[0], 0)
	if d := s.Tiers[0].Dropped; d[DropEvicted] != 160 || d[DropLate] != 20 {
		t.Fatalf("dropped: %v", d)
	}
	r.store("a", keyRange(200, 205))
	r.c.TierHealth(r.now, 0, true, false)
	r.want("dropped with the tier down", r.c.Stats().Tiers[0].Dropped[DropDown], int64(5))
	for _, j := range held {
		for i := range j.Blocks {
			r.c.JobResults(r.now, j.ID, []JobResult{{Index: i}})
		}
	}
	r.check()
	_, done, f, _ := r.c.Flush(r.now, r.sid, "a", r.now+1)
	r.want("flush", []any{done, f}, []any{true, Flushed{Done: true, Failed: 205}})
	r.finish("a")
	r.idle()
}

// A reset forgets what waits for a tier's credit.
func TestResetForgetsWhatWaits(t *testing.T) {
	r := newRig(t, 20, 1, func(o *Options) { o.Tiers[0].WriteBlocksMax = 1 })
	r.request("a")
	r.store("a", keyRange(0, 5))
	r.must(r.c.Reset(r.now, r.now+1e9))
	r.want("blocks that wait", r.c.Stats().Waiting[0], 0)
	r.run(Done)
	r.want("written", len(r.have[0]), 1)
	r.finish("a")
	r.idle()
}

// The source of a queued write cannot be evicted or reused (B029, B034, B038).
func TestCascadePinsItsSource(t *testing.T) {
	r := newRig(t, 4, 1, nil)
	r.request("a")
	r.store("a", keyRange(0, 2))
	j := r.jobs(Cascade)
	r.finish("a")
	r.request("b")
	_, err := r.c.Reserve(r.now, r.sid, "b", 0, 0, keyRange(10, 13), nil)
	r.wantErr("a reserve that would need the source", err, ErrNoRoom)
	for i := range 10 {
		g := r.reserve("b", keyRange(100*i, 100*i+2))
		for _, b := range j[0].Blocks {
			for _, gr := range g {
				if gr.Slot == b.Slot && gr.Status == Granted {
					t.Fatalf("slot %d is granted while it is written from", b.Slot)
				}
			}
		}
		r.abort("b", fillsOf(g, keyRange(100*i, 100*i+2))...)
	}
	r.results(j[0], Failed, tier.CauseIO)
	r.must(r.c.Reserve(r.now, r.sid, "b", 0, 0, keyRange(10, 13), nil))
}

// Bytes that no longer match their checksum are forgotten at once, also when the
// news comes after the deadline has settled the write, and a lease that stands
// keeps its slot.
func TestCorruptSourceDoomsTheBlock(t *testing.T) {
	for _, late := range []bool{false, true} {
		r := newRig(t, 8, 1, func(o *Options) { o.OverduePercent = 100 })
		r.request("a")
		r.store("a", keyRange(0, 2))
		j := r.jobs(Cascade)[0]
		r.must(r.c.Pin(r.now, r.sid, "a", keyRange(1, 2), nil))
		if late {
			r.tick(61 * time.Second)
		}
		r.results(j, Failed, tier.CauseSource)
		r.want("verdicts", r.verdicts("a", keyRange(0, 2)), []Verdict{MissAbsent, MissAbsent})
		s := r.c.Stats()
		r.want("counted", []any{s.CorruptPrimary, s.QuietSlots}, []any{int64(2), 1})
		r.want("stored afresh", r.store("a", keyRange(0, 2)), 2)
		r.run(Done)
		r.finish("a")
		r.idle()
	}
}

// A successful store clears a cached Miss of the key on that tier (B103).
func TestStoreClearsTheMiss(t *testing.T) {
	r := newRig(t, 8, 1, func(o *Options) { o.Tiers[0].Known = nil })
	r.request("a")
	r.lookup("a", keyRange(0, 1), 0)
	p := r.jobs(ProbeJob)[0]
	r.c.ProbeResult(r.now, p.ID, []bool{false}, true)
	r.want("verdict", r.verdicts("a", keyRange(0, 1))[0], MissAbsent)
	r.store("a", keyRange(0, 1))
	r.run(Done)
	if _, err := r.c.Reset(r.now, r.now); err != nil {
		t.Fatal(err)
	}
	r.want("not absent any more", r.verdicts("a", keyRange(0, 1))[0], Retry)
}

// Flush is answered when the last pending thing of the request's stores is over,
// or at its bound, and not after the session is gone.
func TestFlush(t *testing.T) {
	r := newRig(t, 8, 1, nil)
	r.request("a")
	_, done, f, err := r.c.Flush(r.now, r.sid, "a", r.now+1)
	r.want("nothing pending", []any{done, f, err}, []any{true, Flushed{Done: true}, nil})
	g := r.reserve("a", keyRange(0, 1))
	short, _, _, _ := r.c.Flush(r.now, r.sid, "a", r.now+Time(time.Second))
	long, _, _, _ := r.c.Flush(r.now, r.sid, "a", r.now+Time(time.Hour))
	r.tick(time.Second)
	r.want("at its bound", effects[AnswerFlush](r), []AnswerFlush{{short, Flushed{}}})
	r.commit("a", fillsOf(g, keyRange(0, 1))...)
	r.want("the cascade is pending", len(effects[AnswerFlush](r)), 0)
	r.finish("a")
	r.run(Done)
	r.want("after the finish", effects[AnswerFlush](r), []AnswerFlush{{long, Flushed{Done: true, Cascaded: 1}}})
	r.idle()
}
