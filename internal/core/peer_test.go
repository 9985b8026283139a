package core

import (
	"fmt"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
)

// newPeerRig has one tier that knows its keys, and behind it the bound one.
func newPeerRig(t *testing.T, blocks int, mod func(*Options)) *rig {
	return newRig(t, blocks, 1, func(o *Options) {
		o.Tiers = append(o.Tiers, TierFacts{Name: "peers", Medium: tier.MediumCPU, Locality: tier.LocalityRemote, Bound: true, PromoteTimeout: time.Minute})
		if mod != nil {
			mod(o)
		}
	})
}

func (r *rig) bound(id string, role PeerRole) uint64 {
	r.t.Helper()
	p := NoLimits()
	p.Peer, p.KVRequestID, p.StoreTiers = role, "kv-"+id, []TierFilter{} // what it loads is not written
	r.must(nil, r.c.NewRequest(r.now, r.sid, id, p))
	return r.c.RequestSeq(r.sid, id)
}

const long = Time(time.Hour)

// Only a request with a peer sees the bound tier; what one has learned there is
// not another's; and nothing is written to it.
func TestBoundTierBelongsToTheRequest(t *testing.T) {
	r := newPeerRig(t, 20, nil)
	r.request("none")
	a, _ := r.lookup("none", keyRange(0, 3), r.now+long)
	r.want("without a peer", []any{a.Final, a.Tokens, len(r.jobs(ProbeJob))}, []any{true, int64(0), 0})
	r.store("none", keyRange(10, 12))
	for _, j := range r.jobs(Cascade) {
		r.want("tier of a cascade", j.Tier, 0)
		r.results(j, Done, 0)
	}

	seqs := []uint64{r.bound("a", PeerProbe), r.bound("b", PeerProbe)}
	_, wa := r.lookup("a", keyRange(0, 3), r.now+long)
	_, wb := r.lookup("b", keyRange(0, 3), r.now+long)
	probes := r.jobs(ProbeJob)
	r.want("probes", []any{len(probes), probes[0].Tier, probes[0].Source, probes[1].Source}, []any{2, 1, seqs[0], seqs[1]})
	r.c.ProbeResult(r.now, probes[0].ID, []bool{true, true, false}, true)
	r.check()
	p := r.jobs(Promotion)
	r.want("promotion", []any{len(p), p[0].Tier, p[0].Source, len(p[0].Blocks), p[0].Deadline}, []any{1, 1, seqs[0], 2, r.now + Time(time.Minute)})
	r.c.ProbeResult(r.now, probes[1].ID, []bool{false, false, false}, true)
	r.check()
	r.want("b hears of a's blocks, since they come", r.c.Stats().Waits, 2)
	r.results(p[0], Done, 0)
	r.want("a", r.answer(wa).Tokens, int64(32))
	r.want("b", r.answer(wb).Tokens, int64(32))
	for _, id := range []string{"none", "a", "b"} {
		r.finish(id)
	}
	r.run(Done)
	r.want("sources closed", len(effects[CloseSource](r)), 2)
	r.tick(time.Minute)
	r.idle()
}

// What was pulled is written to the tiers that the request may store to, and to no
// other; a request with a cap on stores has nothing of it written.
func TestPulledBlocksCascade(t *testing.T) {
	for name, x := range map[string]struct {
		mod  func(p *Params)
		want int
	}{
		"all":   {func(*Params) {}, 3},
		"local": {func(p *Params) { p.StoreTiers = []TierFilter{{Locality: tier.LocalityLocal}} }, 3},
		"none":  {func(p *Params) { p.StoreTiers = []TierFilter{} }, 0},
		"cap":   {func(p *Params) { p.MaxOffloadTokens = 16 }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			r := newPeerRig(t, 20, nil)
			p := NoLimits()
			p.Peer, p.KVRequestID = PeerAssume, "kv"
			x.mod(&p)
			r.must(nil, r.c.NewRequest(r.now, r.sid, "a", p))
			_, w := r.lookup("a", keyRange(0, 4), r.now+long)
			j := r.jobs(Promotion)[0]
			r.c.JobResults(r.now, j.ID, []JobResult{r.result(j, 0, Done, 0), r.result(j, 1, Done, 0), r.result(j, 3, Failed, tier.CauseNetwork), r.result(j, 2, Done, 0)})
			r.check()
			r.want("loaded", r.answer(w).Tokens, int64(48))
			written := 0
			for _, c := range r.jobs(Cascade) {
				r.want("tier of a cascade", c.Tier, 0)
				written += len(c.Blocks)
				r.results(c, Done, 0)
			}
			r.want("written", written, x.want)
			_, done, out, err := r.c.Flush(r.now, r.sid, "a", r.now+long)
			r.must(nil, err)
			r.want("flushed", []any{done, out}, []any{true, Flushed{Done: true, Cascaded: x.want}})
			r.finish("a")
			r.tick(time.Minute)
			r.idle()
		})
	}
}

// The id of a request whose load has failed is used again: the peer is asked
// afresh at once.
func TestFailedPeerLoadIsForgottenWithItsRequest(t *testing.T) {
	r := newPeerRig(t, 20, nil)
	for range 3 {
		r.bound("a", PeerAssume)
		_, w := r.lookup("a", keyRange(0, 2), r.now+long)
		p := r.jobs(Promotion)
		r.want("asked for", len(p), 1)
		r.c.JobResults(r.now, p[0].ID, []JobResult{r.result(p[0], 0, Done, 0), r.result(p[0], 1, Failed, tier.CauseNetwork)})
		r.check()
		r.want("the part that came", r.answer(w).Tokens, int64(16))
		r.want("the same request", r.verdicts("a", keyRange(0, 2)), []Verdict{Hit, MissFailed})
		r.finish("a")
		r.must(r.c.Reset(r.now, r.now+long))
		r.check()
	}
	r.tick(time.Minute)
	r.idle()
}

// A request that ends in mid-load leaves nothing: its job is cancelled, its slots
// are quarantined until the transfer lets go, its source is closed once. Who else
// wanted the blocks asks for himself.
func TestFinishedPeerRequestLeavesNothing(t *testing.T) {
	for name, end := range map[string]func(r *rig){
		"finish":          func(r *rig) { r.finish("a") },
		"end of session":  func(r *rig) { r.must(r.c.CloseSession(r.now, r.sid)); r.check() },
		"finish in probe": nil,
	} {
		t.Run(name, func(t *testing.T) {
			r := newPeerRig(t, 20, nil)
			if end == nil {
				r.bound("a", PeerProbe)
				_, w := r.lookup("a", keyRange(0, 2), r.now+long)
				probe := r.jobs(ProbeJob)[0]
				r.finish("a")
				r.want("void", r.answer(w).Void, true)
				r.want("cancelled", effects[CancelJob](r), []CancelJob{{ID: probe.ID, Tier: 1}})
				r.want("closed", len(effects[CloseSource](r)), 1)
				r.c.ProbeResult(r.now, probe.ID, []bool{true, true}, true)
				r.want("late answer", r.c.Stats().ForeignResults, int64(1))
				r.tick(time.Minute)
				r.idle()
				return
			}
			other := r.must(r.c.OpenSession(r.ns)).(SessionID)
			seq := r.bound("a", PeerAssume)
			r.lookup("a", keyRange(0, 2), r.now+long)
			p := r.jobs(Promotion)[0]
			params := NoLimits()
			params.Peer, params.StoreTiers = PeerAssume, []TierFilter{}
			r.must(nil, r.c.NewRequest(r.now, other, "o", params))
			r.must(r.c.Lookup(r.now, other, "o", [][]block.Key{keyRange(0, 2)}, LookupOptions{WaitUntil: r.now + long}, &Answer{}))
			r.check()
			end(r)
			r.want("cancelled", effects[CancelJob](r), []CancelJob{{ID: p.ID, Tier: 1}})
			r.want("closed", effects[CloseSource](r), []CloseSource{{Tier: 1, Seq: seq}})
			again := r.jobs(Promotion)
			r.want("the other asks for itself", []any{len(again), again[0].Source}, []any{1, r.c.RequestSeq(other, "o")})
			s := r.c.Stats()
			r.want("quarantined", s.Quarantined, int64(2*PageSize))
			r.results(p, Failed, tier.CauseNetwork) // only the news that its buffers are quiet
			r.want("quiet", r.c.Stats().Quarantined, int64(0))
			r.results(again[0], Done, 0)
			r.must(nil, r.c.Finish(r.now, other, "o"))
			r.check()
			r.tick(time.Minute)
			s = r.c.Stats()
			r.want("left", []int{s.Requests, s.Pins, s.Jobs, s.Facts, s.Fills, s.Waits}, []int{0, 0, 0, 0, 0, 0})
		})
	}
}

// A prefiller's blocks may take longer than any other load; other tiers are not
// asked meanwhile.
func TestPrefillerIsWaitedFor(t *testing.T) {
	r := newPeerRig(t, 20, func(o *Options) {
		o.Tiers[0].Known = nil // as one that must be asked
		o.LookupTimeout = time.Second
	})
	r.bound("a", PeerAssume)
	_, w := r.lookup("a", keyRange(0, 2), r.now+long)
	r.want("probes", len(r.jobs(ProbeJob)), 0)
	p := r.jobs(Promotion)[0]
	r.tick(50 * time.Second)
	r.want("answered early", r.answered(w), false)
	r.results(p, Done, 0)
	r.want("tokens", r.answer(w).Tokens, int64(32))
	r.finish("a")
	r.tick(time.Minute)
	r.idle()
}

// A load from a peer that has the blocks was given up after core.lookup_timeout,
// in the middle of its own bound.
func TestSourceIsWaitedFor(t *testing.T) {
	for _, x := range []struct {
		name   string
		answer Time // of the probe
		load   time.Duration
		tokens int64
	}{
		{"in time", Time(3 * time.Second), 55 * time.Second, 32},
		{"too late", Time(3 * time.Second), 61 * time.Second, 0},
		{"no answer to the probe", 0, 4 * time.Second, 0},
	} {
		t.Run(x.name, func(t *testing.T) {
			r := newPeerRig(t, 20, func(o *Options) {
				o.LookupTimeout, o.Tiers[1].ProbeTimeout = time.Second, 4*time.Second
			})
			r.bound("a", PeerProbe)
			r.request("b") // without a peer it waits no longer than any
			_, w := r.lookup("a", keyRange(0, 2), r.now+long)
			var p StartJob
			if x.answer > 0 {
				r.tick(time.Duration(x.answer))
				r.c.ProbeResult(r.now, r.jobs(ProbeJob)[0].ID, []bool{true, true}, true)
				r.check()
				p = r.jobs(Promotion)[0]
				_, b := r.lookup("b", keyRange(0, 2), r.now+long)
				r.tick(time.Second)
				r.want("b", r.answer(b).Groups[0].Verdicts, []Verdict{MissWaited, MissWaited})
				r.tick(x.load - time.Second)
			} else {
				r.tick(x.load)
			}
			if x.tokens > 0 {
				r.want("answered early", r.answered(w), false)
				r.results(p, Done, 0)
			}
			r.want("tokens", r.answer(w).Tokens, x.tokens)
			r.finish("a")
			r.finish("b")
			if x.answer > 0 && x.tokens == 0 {
				r.results(p, Failed, tier.CauseNetwork)
			}
			r.tick(time.Minute)
			r.idle()
		})
	}
}

// The end of a request with a source took as long as there were jobs of others.
func TestFinishDoesNotLookAtJobsOfOthers(t *testing.T) {
	finish := func(others int) (least time.Duration) {
		r := newPeerRig(t, 8, nil)
		load := func(id string) {
			r.bound(id, PeerProbe)
			r.must(r.c.Lookup(r.now, r.sid, id, [][]block.Key{keyRange(0, 2)}, LookupOptions{WaitUntil: r.now + long}, &Answer{}))
		}
		for i := range others {
			load(fmt.Sprint("other ", i))
		}
		for range 50 {
			load("a")
			began := time.Now()
			r.must(nil, r.c.Finish(r.now, r.sid, "a"))
			if took := time.Since(began); least == 0 || took < least {
				least = took
			}
			r.fx = r.c.TakeEffects(r.fx[:0])
			r.want("cancelled", len(effects[CancelJob](r)), 1)
		}
		r.want("jobs", len(r.c.jobs), others)
		r.check()
		return least
	}
	if few, many := finish(10), finish(10_000); many > 20*few+20*time.Microsecond {
		t.Errorf("%v with 10 jobs of others, %v with 10,000", few, many)
	}
}

// Each judges keys by themselves: what is there is pinned behind what is not,
// and groups may be empty.
func TestLookupEach(t *testing.T) {
	r := newPeerRig(t, 20, nil)
	r.have[0][key(5, 0)] = true
	r.request("s")
	r.store("s", keyRange(2, 4))
	r.run(Done)
	filling := r.reserve("s", keyRange(7, 8))
	p := NoLimits()
	p.Peer, p.NoPeers = PeerAssume, true // which wins
	r.must(nil, r.c.NewRequest(r.now, r.sid, "e", p))
	each := func(keys []block.Key, wait Time) (*Answer, WaitID) {
		a := &Answer{}
		w := r.must(r.c.Lookup(r.now, r.sid, "e", [][]block.Key{keys}, LookupOptions{Each: true, WaitUntil: wait}, a)).(WaitID)
		r.check()
		return a, w
	}
	a, _ := each(keyRange(0, 8), 0)
	r.want("verdicts", a.Groups[0].Verdicts, []Verdict{MissAbsent, MissAbsent, Hit, Hit, MissAbsent, HitPending, MissAbsent, HitPending})
	r.want("final, tokens, leases", []any{a.Final, a.Tokens, len(a.Groups[0].Leases), a.Groups[0].Leases[2].Sum, a.Groups[0].Leases[0].Gen}, []any{false, int64(0), 8, sumOf(key(2, 0)), uint32(0)})
	_, w := each(keyRange(0, 8), r.now+long)
	r.results(r.jobs(Promotion)[0], Done, 0)
	r.want("waits for what is filled", r.answered(w), false)
	r.commit("s", fillsOf(filling, keyRange(7, 8))...)
	b := r.answer(w)
	r.want("then", b.Groups[0].Verdicts, []Verdict{MissAbsent, MissAbsent, Hit, Hit, MissAbsent, Hit, MissAbsent, Hit})
	r.want("pins", r.c.Stats().Pins, 4)
	s := r.c.Stats()
	r.want("counted as an engine's", []int64{s.Lookups, s.PrimaryHits, s.Tiers[0].Hits, s.Verdicts[Hit], s.Verdicts[MissAbsent]}, []int64{0, 0, 0, 0, 0})
	r.want("read for it", s.Tiers[0].Blocks[Promotion], int64(1))
	a, _ = each(nil, 0)
	r.want("nothing", []any{a.Final, len(a.Groups[0].Leases)}, []any{true, 0})
	r.finish("e")
	r.finish("s")
	r.run(Done)
	r.tick(time.Minute)
	r.idle()
}

// With room for a part only, the rest of the keys are misses of their own.
func TestLookupEachWithoutRoom(t *testing.T) {
	r := newPeerRig(t, 4, func(o *Options) { o.ReservePercent = -1 })
	for i := range 8 {
		r.have[0][key(i, 0)] = true
	}
	r.request("e")
	a := &Answer{}
	r.must(r.c.Lookup(r.now, r.sid, "e", [][]block.Key{keyRange(0, 8)}, LookupOptions{Each: true}, a))
	r.check()
	pending, room := 0, 0
	for _, v := range a.Groups[0].Verdicts {
		switch v {
		case HitPending:
			pending++
		case MissNoRoom:
			room++
		}
	}
	r.want("pending, without room", []int{pending, room}, []int{4, 4})
	r.run(Done)
	r.finish("e")
	r.tick(time.Minute)
	r.idle()
}

// A hand-over tells of its life in order, each end once.
func TestSupplyIsTold(t *testing.T) {
	params := NoLimits()
	params.RemoteDecoder, params.KVRequestID = true, "kv"
	states := func(r *rig) (out []SupplyState) {
		for _, s := range effects[Supply](r) {
			r.want("of", []any{s.NS, s.ID}, []any{r.ns, "kv"})
			out = append(out, s.State)
		}
		return out
	}
	for _, tt := range []struct {
		name string
		do   func(r *rig, seq uint64)
		want []SupplyState
	}{
		{"fetched", func(r *rig, seq uint64) {
			r.want("before its finish", r.c.ReleaseHandover(r.now, seq), false)
			r.finish("a")
			r.want("release", r.c.ReleaseHandover(r.now, seq), true)
			r.want("twice", r.c.ReleaseHandover(r.now, seq), false)
			r.check()
		}, []SupplyState{SupplyOpen, SupplyMore, SupplyMore, SupplyFinal, SupplyEnded}},
		{"expired", func(r *rig, _ uint64) { r.finish("a"); r.tick(time.Hour) }, []SupplyState{SupplyOpen, SupplyMore, SupplyMore, SupplyFinal, SupplyEnded}},
		{"engine gone", func(r *rig, _ uint64) { r.must(r.c.CloseSession(r.now, r.sid)); r.check() }, []SupplyState{SupplyOpen, SupplyMore, SupplyMore, SupplyFinal, SupplyEnded}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newPeerRig(t, 20, nil)
			r.must(nil, r.c.NewRequest(r.now, r.sid, "a", params))
			r.check()
			seq := r.c.RequestSeq(r.sid, "a")
			r.store("a", keyRange(2, 4))
			r.store("a", keyRange(0, 2))
			r.run(Done)
			tt.do(r, seq)
			r.want("told", states(r), tt.want)
			r.run(Done)
			r.want("supplies", len(r.c.supplies), 0)
		})
	}
	t.Run("nothing stored", func(t *testing.T) {
		r := newPeerRig(t, 20, nil)
		r.must(nil, r.c.NewRequest(r.now, r.sid, "a", params))
		r.finish("a")
		r.want("told", states(r), []SupplyState{SupplyOpen, SupplyFinal, SupplyEnded})
		r.idle()
	})
}

// answered says whether a waiting lookup has its answer, which it leaves there.
func (r *rig) answered(w WaitID) bool {
	for _, e := range r.fx {
		if a, ok := e.(AnswerLookup); ok && a.Wait == w {
			return true
		}
	}
	return false
}
