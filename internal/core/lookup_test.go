package core

import (
	"slices"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
)

// Two window groups of different block sizes: the promotions for one evict
// blocks beyond the run and take the room of the other, so that the run is cut
// and reaches back to the blocks just evicted. They are no Hit any more.
func TestLookupCutAcrossClassesForgetsWhatItEvicted(t *testing.T) {
	r := newRig(t, 4, 1, func(o *Options) { o.ExtentBytes, o.ReservePercent = 2*PageSize, -1 })
	ns := r.must(r.c.OpenNamespace([]block.Group{
		{Kind: block.KindWindow, WindowBlocks: 2, TokensPerBlock: 1, BlockBytes: PageSize},
		{Kind: block.KindWindow, WindowBlocks: 1, TokensPerBlock: 1, BlockBytes: 2 * PageSize},
	})).(NamespaceID)
	r.sid = r.must(r.c.OpenSession(ns)).(SessionID)
	small, large := []block.Key{key(0, 0), key(1, 0), key(2, 0), key(3, 0)}, []block.Key{key(0, 1), key(1, 1), key(2, 1), key(3, 1)}
	r.request("a")
	r.storeIn("a", 0, small[:2])
	r.storeIn("a", 1, large[2:3])
	r.run(Done)
	r.must(r.c.Pin(r.now, r.sid, "a", large[2:3], nil))
	for _, k := range []block.Key{small[2], small[3], large[3]} {
		r.have[0][k] = true
	}
	r.request("b")
	var a Answer
	r.must(r.c.Lookup(r.now, r.sid, "b", [][]block.Key{small, large}, LookupOptions{}, &a))
	r.check()
	for g := range a.Groups {
		for i, l := range a.Groups[g].Leases {
			n := a.Groups[g].First + i
			k := [][]block.Key{small, large}[g][n]
			if e := r.c.lookAt(l.Slot); l.Gen != 0 && (e == nil || e.key != k || e.gen != l.Gen || e.state != slotResident) {
				t.Errorf("group %d key %d is %v with a lease on a slot of another block", g, n, a.Groups[g].Verdicts[n])
			}
		}
	}
}

// A key that stands twice in a prompt is pinned once. That one of its places
// turns out to be beyond the run does not take the pin from the other.
func TestLookupKeyTwiceKeepsItsPin(t *testing.T) {
	r := newRig(t, 4, 1, func(o *Options) { o.ReservePercent = -1 })
	ns := r.must(r.c.OpenNamespace([]block.Group{
		{Kind: block.KindFull, TokensPerBlock: 1, BlockBytes: PageSize},
		{Kind: block.KindWindow, WindowBlocks: 1, TokensPerBlock: 1, BlockBytes: PageSize},
	})).(NamespaceID)
	r.sid = r.must(r.c.OpenSession(ns)).(SessionID)
	r.request("a")
	r.storeIn("a", 0, []block.Key{key(0, 0)})
	r.storeIn("a", 1, []block.Key{key(0, 1)})
	r.run(Done)
	for i := 1; i < 4; i++ {
		r.have[0][key(i, 0)] = true
	}
	r.request("b")
	// The window's last block is the same as its first; there is room for two
	// of the three blocks of group 0, so that the run is cut to one token.
	keys := [][]block.Key{{key(0, 0), key(1, 0), key(2, 0), key(3, 0)}, {key(0, 1), key(9, 1), key(9, 1), key(0, 1)}}
	var a Answer
	r.must(r.c.Lookup(r.now, r.sid, "b", keys, LookupOptions{}, &a))
	r.check()
	if a.Tokens != 1 || !a.Final {
		t.Fatalf("%+v", a)
	}
	q := r.c.sessions[r.sid].requests["b"]
	if l := a.Groups[1].Leases[0]; l.Gen == 0 || r.c.findPin(q, l.Slot) == 0 {
		t.Fatalf("lease %+v without a pin", l)
	}
}

// [HIT, HIT, MISS, PENDING] is two hits, now: only what is pending inside the
// usable run holds an answer back (B145).
func TestPendingBeyondAMissHoldsNothingBack(t *testing.T) {
	r := newRig(t, 8, 0, nil)
	r.request("a")
	r.store("a", keyRange(0, 2))
	r.reserve("a", keyRange(3, 4))
	r.request("b")
	a, w := r.lookup("b", keyRange(0, 4), r.now+Time(time.Hour))
	r.want("answer", []any{w, a.Final, a.Tokens, a.Groups[0].Verdicts}, []any{WaitID(0), true, int64(32), []Verdict{Hit, Hit, MissAbsent, MissUnusable}})
	r.want("leases", len(a.Groups[0].Leases), 2)
}

// The run that will be used is promoted, not every key that was looked at: not
// what is behind a Miss, nor beyond the cap, nor before a window.
func TestOnlyTheUsableRunIsPromoted(t *testing.T) {
	promoted := func(r *rig) (n int) {
		for _, j := range r.jobs(Promotion) {
			n += len(j.Blocks)
		}
		return n
	}
	r := newRig(t, 40, 1, nil)
	for i := range 20 {
		r.have[0][key(i, 0)] = i != 5
	}
	r.request("a")
	a, _ := r.lookup("a", keyRange(0, 20), 0)
	r.want("behind a miss", []any{promoted(r), a.Tokens, a.Groups[0].Verdicts[5], a.Groups[0].Verdicts[6]}, []any{5, int64(80), MissAbsent, MissUnusable})

	p := NoLimits()
	p.MaxLoadTokens = 16*13 + 3
	r.must(nil, r.c.NewRequest(r.now, r.sid, "b", p))
	a, _ = r.lookup("b", keyRange(6, 20), 0)
	r.want("beyond the cap", []any{promoted(r), a.Tokens, a.Groups[0].Verdicts[12], a.Groups[0].Verdicts[13]}, []any{13, int64(16 * 13), HitPending, MissCapped})

	p.MaxLoadTokens = 0
	r.must(nil, r.c.NewRequest(r.now, r.sid, "c", p))
	a, _ = r.lookup("c", keyRange(0, 2), 0)
	r.want("cap of 0", []any{promoted(r), a.Tokens, a.Final, a.Groups[0].Verdicts[0]}, []any{0, int64(0), true, MissCapped})

	// A list of another group that is longer than the run is not capped.
	r.request("d")
	a, _ = r.lookup("d", nil, 0)
	r.want("no keys", []any{a.Tokens, a.Final, len(a.Groups[0].Verdicts)}, []any{int64(0), true, 0})
}

// Groups of different block lengths: the answer is a prefix that all of them can
// serve, the window group with the last run of W blocks before its end, or with
// one that reaches back to the root.
func TestLookupAcrossGroups(t *testing.T) {
	for _, c := range []struct {
		name         string
		window       uint32
		full, win    []int // blocks that are there
		nfull, nwin  int
		tokens       int64
		first        int
		winVerdict   []Verdict
		finalVerdict Verdict
	}{
		{"all", 2, []int{0, 1, 2, 3}, []int{0, 1}, 4, 2, 64, 0, []Verdict{Hit, Hit}, Hit},
		{"window in the middle", 1, []int{0, 1, 2, 3}, []int{0}, 4, 2, 32, 0, []Verdict{Hit, MissAbsent}, MissUnusable},
		{"only the last of the window group", 1, []int{0, 1, 2, 3}, []int{1}, 4, 2, 64, 1, []Verdict{VerdictNone, Hit}, Hit},
		{"window longer than the list", 9, []int{0, 1, 2, 3}, []int{0, 1}, 4, 2, 64, 0, []Verdict{Hit, Hit}, Hit},
		{"window longer than the list, root missing", 9, []int{0, 1, 2, 3}, []int{1}, 4, 2, 0, 0, []Verdict{MissAbsent, MissUnusable}, MissUnusable},
		{"full group ends between two blocks of the other", 1, []int{0, 1, 2}, []int{0, 1}, 4, 2, 32, 0, []Verdict{Hit, MissUnusable}, MissAbsent},
		{"a list is empty", 1, []int{0, 1}, nil, 4, 0, 0, 0, nil, MissUnusable},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, 20, 0, nil)
			ns := r.must(r.c.OpenNamespace([]block.Group{
				{Kind: block.KindFull, TokensPerBlock: 16, BlockBytes: PageSize},
				{Kind: block.KindWindow, WindowBlocks: c.window, TokensPerBlock: 32, BlockBytes: PageSize},
			})).(NamespaceID)
			r.sid = r.must(r.c.OpenSession(ns)).(SessionID)
			r.request("a")
			for g, list := range [][]int{c.full, c.win} {
				for _, i := range list {
					r.storeIn("a", uint32(g), []block.Key{key(i, g)})
				}
			}
			keys := make([][]block.Key, 2)
			for i := range c.nfull {
				keys[0] = append(keys[0], key(i, 0))
			}
			for i := range c.nwin {
				keys[1] = append(keys[1], key(i, 1))
			}
			r.request("b")
			var a Answer
			r.must(r.c.Lookup(r.now, r.sid, "b", keys, LookupOptions{}, &a))
			r.want("tokens", a.Tokens, c.tokens)
			r.want("first of the window group", a.Groups[1].First, c.first)
			if !slices.Equal(a.Groups[1].Verdicts, c.winVerdict) {
				t.Errorf("verdicts of the window group: %v", a.Groups[1].Verdicts)
			}
			r.want("verdict of the last full block", a.Groups[0].Verdicts[c.nfull-1], c.finalVerdict)
			r.check()
		})
	}
}

// Ordered tiers: the first that has it wins; one that fails hands on to the next.
func TestFirstTierThatHasItWins(t *testing.T) {
	r := newRig(t, 8, 3, nil)
	k := key(0, 0)
	r.have[1][k], r.have[2][k] = true, true
	r.request("a")
	_, w := r.lookup("a", []block.Key{k}, r.now+Time(time.Hour))
	j := r.jobs(Promotion)
	r.want("tier", []int{len(j), j[0].Tier}, []int{1, 1})
	r.results(j[0], Failed, tier.CauseChecksum)
	j = r.jobs(Promotion)
	r.want("tier", []int{len(j), j[0].Tier}, []int{1, 2})
	r.results(j[0], Done, 0)
	r.want("tokens", r.answer(w).Tokens, int64(16))
	s := r.c.Stats()
	r.want("hits by tier", []int64{s.PrimaryHits, s.Tiers[0].Hits, s.Tiers[1].Hits, s.Tiers[2].Hits}, []int64{0, 0, 0, 1})
	r.finish("a")
	r.idle()
}

// A request's filter says which tiers it loads from; what only others have is a
// Miss that says so.
func TestLoadFilter(t *testing.T) {
	r := newRig(t, 8, 2, func(o *Options) { o.Tiers[0].Medium, o.Tiers[0].Locality = tier.MediumCPU, tier.LocalityRemote })
	r.have[0][key(0, 0)] = true
	for _, c := range []struct {
		filter []TierFilter
		want   Verdict
	}{
		{nil, HitPending},
		{[]TierFilter{}, MissFiltered},
		{[]TierFilter{{Medium: tier.MediumStorage}}, MissFiltered},
		{[]TierFilter{{Medium: tier.MediumStorage}, {Locality: tier.LocalityRemote}}, HitPending},
		{[]TierFilter{{Medium: tier.MediumCPU, Locality: tier.LocalityLocal}}, MissFiltered},
		{[]TierFilter{{}}, HitPending},
	} {
		r.must(nil, r.c.NewRequest(r.now, r.sid, "a", Params{LoadTiers: c.filter, MaxLoadTokens: -1}))
		r.want("verdict", r.verdicts("a", keyRange(0, 1))[0], c.want)
		r.finish("a")
	}
}

// A failed load makes the key a Miss on that tier until it is probed afresh, also
// when transfer gave it up as cancelled: no request loops (B013).
func TestFailedOrCancelledLoadIsNotTriedAgainAtOnce(t *testing.T) {
	for _, o := range []Outcome{Failed, Cancelled} {
		r := newRig(t, 8, 1, nil)
		r.have[0][key(0, 0)] = true
		r.request("a")
		_, w := r.lookup("a", keyRange(0, 1), r.now+Time(time.Hour))
		r.results(r.jobs(Promotion)[0], o, tier.CauseIO)
		r.want("read again", len(r.jobs(Promotion)), 0)
		r.want("verdict", r.answer(w).Groups[0].Verdicts, []Verdict{MissFailed})
		r.finish("a")
		r.idle()
	}
}

// Success is per key: what was read of a job is readable, the rest is not (B070).
func TestPromotionSucceedsPerKey(t *testing.T) {
	r := newRig(t, 20, 1, nil)
	for i := range 8 {
		r.have[0][key(i, 0)] = true
	}
	r.request("a")
	_, w := r.lookup("a", keyRange(0, 8), r.now+Time(time.Hour))
	j := r.jobs(Promotion)[0]
	var res []JobResult
	for i := range j.Blocks {
		o := Done
		if i == 3 {
			o = Failed
		}
		res = append(res, r.result(j, i, o, tier.CauseShort))
	}
	r.c.JobResults(r.now, j.ID, res)
	r.check()
	a := r.answer(w)
	r.want("answer", []any{a.Tokens, a.Groups[0].Verdicts[3]}, []any{int64(48), MissFailed})
	r.want("pins are those of the answer", r.c.Stats().Pins, 3)
	r.finish("a")
	r.idle()
}

// At most one probe per key and tier is in flight, whoever asks and whatever
// becomes of who asked first (B057); its answer is for all (B139), and a request
// that is over hears nothing of it (B055).
func TestProbeOncePerKeyAndTier(t *testing.T) {
	r := newRig(t, 20, 1, func(o *Options) { o.Tiers[0].Known = nil })
	r.request("a")
	r.lookup("a", keyRange(0, 4), r.now+Time(time.Hour))
	r.finish("a")
	r.request("a")
	_, w := r.lookup("a", keyRange(0, 6), r.now+Time(time.Hour))
	j := r.jobs(ProbeJob)
	r.want("probes", []int{len(j), len(j[0].Blocks), len(j[1].Blocks)}, []int{2, 4, 2})
	r.c.ProbeResult(r.now, j[0].ID, []bool{true, true, true, false}, true)
	r.check()
	p := r.jobs(Promotion)
	r.want("the run is known, the other probe no longer matters", len(p[0].Blocks), 3)
	r.c.ProbeResult(r.now, j[1].ID, []bool{true, true}, true)
	r.check()
	r.want("promoted behind the miss", len(r.jobs(Promotion)), 0)
	r.results(p[0], Done, 0)
	r.want("tokens", r.answer(w).Tokens, int64(48))
	r.c.ProbeResult(r.now, j[0].ID, []bool{true, true, true, true}, true)
	r.want("foreign", r.c.Stats().ForeignResults, int64(1))
	r.finish("a")
	r.tick(time.Minute)
	r.idle()
}

// A request waits for the tier that it may load from, not for another that is
// being asked the same for somebody else.
func TestProbeOfAnotherTierIsNotWaitedFor(t *testing.T) {
	r := newRig(t, 20, 2, func(o *Options) {
		o.Tiers[0].Known, o.Tiers[1].Known = nil, nil
		o.Tiers[0].Locality, o.Tiers[1].Locality = tier.LocalityRemote, tier.LocalityLocal
	})
	r.request("a")
	r.lookup("a", keyRange(0, 1), r.now+Time(time.Hour))
	r.must(nil, r.c.NewRequest(r.now, r.sid, "b", Params{LoadTiers: []TierFilter{{Locality: tier.LocalityLocal}}, MaxLoadTokens: -1}))
	_, w := r.lookup("b", keyRange(0, 1), r.now+Time(time.Hour))
	j := r.jobs(ProbeJob)
	r.want("tiers asked", []int{len(j), j[0].Tier, j[1].Tier}, []int{2, 0, 1})
	r.c.ProbeResult(r.now, j[1].ID, []bool{false}, true)
	r.check()
	r.want("answered as soon as its tier has", r.answer(w).Groups[0].Verdicts, []Verdict{MissAbsent})
}

// A probe that fails or does not answer is a Miss that says so, and holds for a
// while; a malformed answer is none.
func TestProbeThatFailsIsAMiss(t *testing.T) {
	r := newRig(t, 20, 1, func(o *Options) { o.Tiers[0].Known = nil })
	r.request("a")
	_, w := r.lookup("a", keyRange(0, 2), r.now+Time(time.Hour))
	j := r.jobs(ProbeJob)[0]
	r.c.ProbeResult(r.now, j.ID, []bool{true}, true)
	r.c.ProbeResult(r.now, 99999, []bool{true}, true)
	r.c.JobResults(r.now, j.ID, []JobResult{{}})
	r.want("foreign", r.c.Stats().ForeignResults, int64(3))
	r.tick(2 * time.Second)
	r.want("verdict", r.answer(w).Groups[0].Verdicts, []Verdict{MissUnavailable, MissUnavailable})
	r.want("cancelled", effects[CancelJob](r), []CancelJob{{j.ID, 0}})
	r.lookup("a", keyRange(0, 2), 0)
	r.want("asked again at once", len(r.jobs(ProbeJob)), 0)
	r.tick(2 * time.Second)
	r.lookup("a", keyRange(0, 2), 0)
	r.want("asked again later", len(r.jobs(ProbeJob)), 1)
}

// Every wait of a lookup ends by its bound, whether the engine waits or polls
// (B015, B024), and any call after that is safe, in every order.
func TestLookupWaitIsBounded(t *testing.T) {
	r := newRig(t, 20, 1, func(o *Options) { o.PromoteTimeout = time.Hour })
	r.have[0][key(0, 0)] = true
	r.request("a")
	_, w := r.lookup("a", keyRange(0, 1), r.now+Time(3*time.Second))
	r.tick(3 * time.Second)
	r.want("at the caller's bound", r.answer(w).Groups[0].Verdicts, []Verdict{MissWaited})

	r.finish("a")
	r.request("a")
	_, w = r.lookup("a", keyRange(0, 1), r.now+Time(time.Hour))
	for range 3 { // another call does not start the clock again
		r.tick(3 * time.Second)
		_, w2 := r.lookup("a", keyRange(0, 1), r.now+Time(time.Hour))
		if !r.answer(w).Void {
			t.Fatal("a lookup that was overtaken is not void")
		}
		w = w2
	}
	r.tick(time.Second)
	r.want("at the core's bound", r.answer(w).Groups[0].Verdicts, []Verdict{MissWaited})
}

func TestPolledLookupIsBounded(t *testing.T) {
	r := newRig(t, 20, 0, nil)
	r.request("s")
	r.reserve("s", keyRange(0, 2))
	r.request("a")
	a, _ := r.lookup("a", keyRange(0, 2), 0)
	r.want("pending", a.Final, false)
	r.tick(9 * time.Second)
	a, _ = r.lookup("a", keyRange(0, 2), 0)
	r.want("pending", a.Final, false)
	r.tick(time.Second)
	a, _ = r.lookup("a", keyRange(0, 2), 0)
	r.want("over", []any{a.Final, a.Groups[0].Verdicts}, []any{true, []Verdict{MissWaited, MissWaited}})
	a, _ = r.lookup("a", keyRange(0, 2), 0)
	r.want("a new wait", a.Final, false)
	r.wantErr("unpin", func() error { _, err := r.c.Unpin(r.now, r.sid, "a", nil, nil); return err }(), nil)
	r.finish("a")
	r.wantErr("lookup", func() error { _, err := r.c.Lookup(r.now, r.sid, "a", nil, LookupOptions{}, a); return err }(), ErrNoRequest)
	r.tick(time.Hour)
	r.check()
}

// 50 requests of 10 blocks over a pool of 100: no block is read twice before its
// reader has used it or given up (B134), and requests that share a prefix share
// its reads (B139).
func TestDeepQueuePromotesNothingTwiceBeforeUse(t *testing.T) {
	r := newRig(t, 100, 1, nil)
	const requests, blocks, shared = 50, 10, 4
	keysOf := func(i int) (keys []block.Key) {
		for b := range blocks {
			n := 1000*(i+1) + b
			if b < shared {
				n = b
			}
			keys = append(keys, key(n, 0))
		}
		return keys
	}
	reads := map[block.Key]int{}
	type queued struct {
		id string
		w  WaitID
	}
	var queue []queued
	for i := range requests {
		id := string(rune('0' + i))
		r.request(id)
		for _, k := range keysOf(i) {
			r.have[0][k] = true
		}
		_, w := r.lookup(id, keysOf(i), r.now+Time(time.Second))
		queue = append(queue, queued{id, w})
	}
	for range 4 {
		for _, j := range r.jobs(Promotion) {
			for _, b := range j.Blocks {
				if reads[b.Key]++; reads[b.Key] > 1 {
					t.Fatalf("block %s is read twice", b.Key)
				}
			}
			r.results(j, Done, 0)
		}
	}
	served := 0
	for i, q := range queue {
		a := &Answer{}
		if q.w != 0 {
			a = r.answer(q.w)
		}
		// What it was promised is there when it comes to use it.
		for n, l := range a.Groups0().Leases {
			if e := r.c.lookAt(l.Slot); e == nil || e.gen != l.Gen || e.key != keysOf(i)[n] || e.pins == 0 {
				t.Fatalf("request %d lost block %d before its use", i, n)
			}
		}
		if a.Tokens == blocks*16 {
			served++
		}
	}
	if served < 10 {
		t.Errorf("%d requests were served in full", served)
	}
	for _, q := range queue {
		r.finish(q.id)
	}
	r.idle()
}

// Groups0 is the first group of an answer, empty if it has none.
func (a *Answer) Groups0() GroupAnswer {
	if len(a.Groups) == 0 {
		return GroupAnswer{}
	}
	return a.Groups[0]
}

// Promotions leave stores their reserve, and stores leave promotions theirs
// (B135); what is resident and not pinned may fill everything.
func TestStoresAndPromotionsKeepAReserve(t *testing.T) {
	r := newRig(t, 100, 1, nil)
	for i := range 200 {
		r.have[0][key(i, 0)] = true
	}
	r.request("a")
	a, _ := r.lookup("a", keyRange(0, 200), 0)
	r.want("promoted", []any{a.Tokens, a.Groups[0].Verdicts[90]}, []any{int64(90 * 16), MissNoRoom})
	r.want("a store is still admitted", len(fillsOf(r.reserve("a", keyRange(500, 510)), keyRange(500, 510))), 10)
	_, err := r.c.Reserve(r.now, r.sid, "a", 0, 0, keyRange(600, 601), nil)
	r.wantErr("beyond", err, ErrNoRoom)

	r = newRig(t, 100, 1, nil)
	r.request("a")
	r.reserve("a", keyRange(0, 90))
	_, err = r.c.Reserve(r.now, r.sid, "a", 0, 0, keyRange(600, 601), nil)
	r.wantErr("stores beyond", err, ErrNoRoom)
	for i := range 200 {
		r.have[0][key(1000+i, 0)] = true
	}
	a, _ = r.lookup("a", keyRange(1000, 1200), 0)
	r.want("promotions", a.Tokens, int64(10*16))

	r = newRig(t, 100, 1, nil)
	r.request("a")
	r.store("a", keyRange(0, 50))
	r.run(Done)
	r.store("a", keyRange(50, 100))
	r.run(Done)
	r.want("resident blocks fill everything", r.c.Stats().Blocks, int64(100))
	_, err = r.c.Reserve(r.now, r.sid, "a", 0, 0, keyRange(200, 291), nil)
	r.wantErr("more than stores can ever take", err, ErrTooLarge)
}

// A promotion that is refused is not promised (B077): the hit ends where room
// does.
func TestPromotionWithoutRoomIsAMiss(t *testing.T) {
	r := newRig(t, 10, 1, func(o *Options) { o.ReservePercent = -1; o.Tiers[0].ReadBlocksMax = 3 })
	for i := range 9 {
		r.have[0][key(i, 0)] = true
	}
	r.request("a")
	r.store("a", keyRange(100, 104))
	r.run(Done)
	r.must(r.c.Pin(r.now, r.sid, "a", keyRange(100, 104), nil))
	a, _ := r.lookup("a", keyRange(0, 9), 0)
	r.want("no credit", []any{a.Tokens, a.Groups[0].Verdicts[3]}, []any{int64(48), MissUnavailable})
	r.c.tiers[0].facts.ReadBlocksMax = 100
	a, _ = r.lookup("a", keyRange(0, 9), 0)
	r.want("no room", []any{a.Tokens, a.Groups[0].Verdicts[6]}, []any{int64(96), MissNoRoom})
}

// However the blocks of a hybrid prompt lie, a run is cut a bounded number of
// times: a lookup stays short.
func TestLookupCutsARunAFewTimesOnly(t *testing.T) {
	const n = 4000
	r := newRig(t, n+8, 1, func(o *Options) { o.ReservePercent = -1 })
	ns := r.must(r.c.OpenNamespace([]block.Group{
		{Kind: block.KindFull, TokensPerBlock: 1, BlockBytes: PageSize},
		{Kind: block.KindWindow, WindowBlocks: 8, TokensPerBlock: 1, BlockBytes: PageSize},
	})).(NamespaceID)
	r.sid = r.must(r.c.OpenSession(ns)).(SessionID)
	keys := make([][]block.Key, 2)
	for i := range n {
		keys[0], keys[1] = append(keys[0], key(i, 0)), append(keys[1], key(i, 1))
		r.have[0][key(i, 1)] = true
	}
	r.request("a")
	for lo := 0; lo < n; lo += 250 {
		r.must(r.c.Reserve(r.now, r.sid, "a", 0, lo, keys[0][lo:lo+250], nil))
	}
	r.check()
	r.request("x")
	r.reserve("x", keyRange(100000, 100003))
	r.request("b")
	var a Answer
	r.must(r.c.Lookup(r.now, r.sid, "b", keys, LookupOptions{}, &a))
	if s := r.c.Stats(); s.PromotionsShortened > cutsMax {
		t.Errorf("the run was cut %d times", s.PromotionsShortened)
	}
	r.check()
}

// Room in one class is gone when another has taken it: each promotion is
// admitted as it is made, so that stores of every class keep their reserve.
func TestPromotionsOfOneClassRespectTheReserveOfAnother(t *testing.T) {
	r := newRig(t, 40, 1, func(o *Options) { o.ExtentBytes, o.ReservePercent = 2*PageSize, 20 })
	ns := r.must(r.c.OpenNamespace([]block.Group{
		{Kind: block.KindFull, TokensPerBlock: 1, BlockBytes: PageSize},
		{Kind: block.KindFull, TokensPerBlock: 1, BlockBytes: 2 * PageSize},
	})).(NamespaceID)
	r.sid = r.must(r.c.OpenSession(ns)).(SessionID)
	keys := make([][]block.Key, 2)
	for i := range 40 {
		keys[0], keys[1] = append(keys[0], key(i, 0)), append(keys[1], key(i, 1))
		r.have[0][key(i, 0)], r.have[0][key(i, 1)] = true, true
	}
	r.request("a")
	var a Answer
	r.must(r.c.Lookup(r.now, r.sid, "a", keys, LookupOptions{}, &a))
	r.check()
	large := &r.c.classes[r.c.ns[ns].groups[1].class]
	if room := r.c.admit(large, useStore); room == 0 || a.Tokens == 0 {
		t.Errorf("after promotions of %d tokens a store has room for %d large blocks", a.Tokens, room)
	}
}

// Peek answers and starts, pins and touches nothing.
func TestPeekChangesNothing(t *testing.T) {
	r := newRig(t, 4, 2, func(o *Options) { o.Tiers[1].Known = nil })
	r.request("a")
	r.store("a", keyRange(0, 2))
	r.run(Done)
	r.have[0][key(2, 0)] = true
	r.want("verdicts", r.verdicts("a", keyRange(0, 4)), []Verdict{Hit, Hit, HitPending, Retry})
	r.check()
	s := r.c.Stats()
	r.want("pins and jobs", []int{s.Pins, s.Jobs, len(r.fx)}, []int{0, 0, 0})
}

// Hits are counted for the tier that served them, once, however often the
// request asks (B216).
func TestHitsAreAttributedToTheTierThatServedThem(t *testing.T) {
	for _, polled := range []bool{false, true} {
		r := newRig(t, 20, 2, nil)
		r.request("s")
		r.store("s", keyRange(0, 2))
		effects[StartJob](r)
		r.have[0][key(2, 0)], r.have[1][key(3, 0)], r.have[1][key(4, 0)] = true, true, true
		r.request("a")
		wait := r.now + Time(time.Hour)
		if polled {
			wait = 0
		}
		r.lookup("a", keyRange(0, 6), wait)
		if polled {
			r.lookup("a", keyRange(0, 6), 0)
		}
		r.run(Done)
		if polled {
			r.lookup("a", keyRange(0, 6), 0)
		}
		s := r.c.Stats()
		r.want("hits", []int64{s.PrimaryHits, s.Tiers[0].Hits, s.Tiers[1].Hits, s.Verdicts[Hit], s.Verdicts[MissAbsent]}, []int64{2, 1, 2, 5, 1})
		r.lookup("a", keyRange(0, 6), 0)
		s = r.c.Stats()
		r.want("hits of a second lookup", []int64{s.PrimaryHits, s.Tiers[0].Hits, s.Tiers[1].Hits}, []int64{7, 1, 2})
	}
}

// What is remembered of keys is bounded in number and time.
func TestFactsAreBounded(t *testing.T) {
	r := newRig(t, 20, 1, func(o *Options) { o.Tiers[0].Known = nil; o.FactsMax = 100 })
	r.request("a")
	for i := range 50 {
		keys := keyRange(1000*i, 1000*i+20)
		r.lookup("a", keys, 0)
		for _, j := range r.jobs(ProbeJob) {
			r.c.ProbeResult(r.now, j.ID, make([]bool, len(j.Blocks)), true)
		}
		r.check()
		if s := r.c.Stats(); s.Facts > 120 {
			t.Fatalf("%d facts", s.Facts)
		}
	}
	r.finish("a")
	r.tick(time.Minute)
	r.want("facts", r.c.Stats().Facts, 0)
	r.want("nothing is due", r.c.NextDeadline(), Time(0))
	r.idle()
}

// Malformed calls are refused and change nothing.
func TestMalformedCalls(t *testing.T) {
	r := newRig(t, 4, 0, nil)
	r.request("a")
	before := r.c.Stats()
	look := func(keys ...[]block.Key) error {
		_, err := r.c.Lookup(r.now, r.sid, "a", keys, LookupOptions{}, &Answer{})
		return err
	}
	reserve := func(group uint32, first int, keys []block.Key) error {
		_, err := r.c.Reserve(r.now, r.sid, "a", group, first, keys, nil)
		return err
	}
	r.wantErr("no lists", look(), ErrInvalid)
	r.wantErr("two lists", look(nil, nil), ErrInvalid)
	r.wantErr("key of another group", look([]block.Key{key(1, 1)}), ErrInvalid)
	r.wantErr("unknown group", reserve(1, 0, nil), ErrInvalid)
	r.wantErr("huge group", reserve(1<<32-1, 0, nil), ErrInvalid)
	r.wantErr("negative first", reserve(0, -1, nil), ErrInvalid)
	r.wantErr("huge first", reserve(0, 1<<40, nil), ErrInvalid)
	r.wantErr("too many keys", reserve(0, 0, make([]block.Key, ReserveKeysMax+1)), ErrTooMany)
	r.wantErr("key of another group", reserve(0, 0, []block.Key{key(1, 1)}), ErrInvalid)
	r.wantErr("no session", r.c.NewRequest(r.now, 77, "a", NoLimits()), ErrNoSession)
	r.want("stats", r.c.Stats(), before)
	_, err := r.c.OpenNamespace([]block.Group{{Kind: block.KindFull, TokensPerBlock: 1, BlockBytes: 1 << 25}})
	r.wantErr("block larger than an extent", err, ErrTooLarge)
	_, err = r.c.OpenNamespace([]block.Group{{Kind: block.KindFull, BlockBytes: 1}})
	r.wantErr("no tokens", err, ErrInvalid)
	_, err = r.c.OpenNamespace(nil)
	r.wantErr("no groups", err, ErrInvalid)
	_, err = r.c.OpenSession(0)
	r.wantErr("no namespace", err, ErrNotReady)
}
