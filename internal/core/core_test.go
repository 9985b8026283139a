package core

import (
	"encoding/binary"
	"errors"
	"reflect"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
)

func key(n, group int) block.Key {
	var h [32]byte
	binary.BigEndian.PutUint64(h[:], uint64(n))
	h[31] = 1
	k, _ := block.NewKey(h[:], uint32(group))
	return k
}

func keyRange(lo, hi int) []block.Key {
	var out []block.Key
	for i := lo; i < hi; i++ {
		out = append(out, key(i, 0))
	}
	return out
}

var oneGroup = []block.Group{{Kind: block.KindFull, TokensPerBlock: 16, BlockBytes: PageSize}}

// rig is a core with one session on one namespace and, below it, tiers that
// are maps and whose jobs end when the test says so.
type rig struct {
	t    *testing.T
	c    *Core
	now  Time
	sid  SessionID
	ns   NamespaceID
	fx   []Effect
	have []map[block.Key]bool
}

func newRig(t *testing.T, blocks, tiers int, mod func(*Options)) *rig {
	r := &rig{t: t, now: 1}
	o := Options{Size: int64(blocks) * PageSize, ExtentBytes: 1 << 24, InflightPercent: 100}
	for i := range tiers {
		r.have = append(r.have, map[block.Key]bool{})
		o.Tiers = append(o.Tiers, TierFacts{Name: "t", Medium: tier.MediumStorage, Known: func(_ NamespaceID, keys []block.Key, out []tier.Presence) {
			for j := range keys {
				out[j] = tier.Absent
				if r.have[i][keys[j]] {
					out[j] = tier.Present
				}
			}
		}})
	}
	if mod != nil {
		mod(&o)
	}
	var err error
	if r.c, err = New(o); err != nil {
		t.Fatal(err)
	}
	r.ns = r.must(r.c.OpenNamespace(oneGroup)).(NamespaceID)
	r.sid = r.must(r.c.OpenSession(r.ns)).(SessionID)
	return r
}

func (r *rig) must(v any, err error) any {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
	return v
}

func (r *rig) check() {
	r.t.Helper()
	if err := r.c.CheckInvariants(); err != nil {
		r.t.Fatal(err)
	}
	r.fx = r.c.TakeEffects(r.fx)
}

func (r *rig) request(id string) {
	r.t.Helper()
	r.must(nil, r.c.NewRequest(r.now, r.sid, id, NoLimits()))
}

// store reserves and commits keys, and returns how many were granted.
func (r *rig) store(id string, keys []block.Key) int { r.t.Helper(); return r.storeIn(id, 0, keys) }

func (r *rig) storeIn(id string, group uint32, keys []block.Key) int {
	r.t.Helper()
	g := r.must(r.c.Reserve(r.now, r.sid, id, group, 0, keys, nil)).([]Grant)
	var f []Fill
	for i := range g {
		if g[i].Status == Granted {
			f = append(f, Fill{Slot: g[i].Slot, Gen: g[i].Gen, Sum: binary.BigEndian.Uint64(keys[i][:]), HasSum: true})
		}
	}
	for _, st := range r.must(r.c.Commit(r.now, r.sid, id, f, nil)).([]FillStatus) {
		if st != FillOK {
			r.t.Fatalf("commit: %d", st)
		}
	}
	r.check()
	return len(f)
}

func (r *rig) lookup(id string, keys []block.Key, wait Time) (*Answer, WaitID) {
	r.t.Helper()
	a := &Answer{}
	w := r.must(r.c.Lookup(r.now, r.sid, id, [][]block.Key{keys}, LookupOptions{WaitUntil: wait}, a)).(WaitID)
	r.check()
	return a, w
}

// run performs the jobs asked for so far.
func (r *rig) run(o Outcome) (jobs int) {
	r.t.Helper()
	fx := r.fx
	r.fx = nil
	for len(fx) > 0 {
		e := fx[0]
		fx = fx[1:]
		j, ok := e.(StartJob)
		if !ok {
			r.fx = append(r.fx, e)
			continue
		}
		jobs++
		var res []JobResult
		for i, b := range j.Blocks {
			res = append(res, JobResult{Index: i, Outcome: o, Class: tier.ClassRetryable, Cause: tier.CauseIO, Sum: binary.BigEndian.Uint64(b.Key[:])})
			if j.Kind == Cascade && o == Done {
				r.have[j.Tier][b.Key] = true
			}
		}
		kept := r.fx
		r.fx = nil
		r.c.JobResults(r.now, j.ID, res)
		r.check()
		fx = append(fx, r.fx...) // what it set off is performed too
		r.fx = kept
	}
	return jobs
}

// reserve takes slots for keys of the one group.
func (r *rig) reserve(id string, keys []block.Key) []Grant {
	r.t.Helper()
	g := r.must(r.c.Reserve(r.now, r.sid, id, 0, 0, keys, nil)).([]Grant)
	r.check()
	return g
}

func fillsOf(g []Grant, keys []block.Key) (f []Fill) {
	for i := range g {
		if g[i].Status == Granted {
			f = append(f, Fill{Slot: g[i].Slot, Gen: g[i].Gen, Sum: sumOf(keys[i]), HasSum: true})
		}
	}
	return f
}

func sumOf(k block.Key) uint64 { return binary.BigEndian.Uint64(k[:]) }

func (r *rig) commit(id string, f ...Fill) []FillStatus {
	r.t.Helper()
	st := r.must(r.c.Commit(r.now, r.sid, id, f, nil)).([]FillStatus)
	r.check()
	return st
}

func (r *rig) abort(id string, f ...Fill) []FillStatus {
	r.t.Helper()
	st := r.must(r.c.Abort(r.now, r.sid, id, f, nil)).([]FillStatus)
	r.check()
	return st
}

func (r *rig) finish(id string) {
	r.t.Helper()
	r.must(nil, r.c.Finish(r.now, r.sid, id))
	r.check()
}

// tick lets time pass.
func (r *rig) tick(d time.Duration) {
	r.t.Helper()
	r.now += Time(d)
	r.c.Tick(r.now)
	r.check()
}

// verdicts peeks at keys.
func (r *rig) verdicts(id string, keys []block.Key) []Verdict {
	r.t.Helper()
	a := &Answer{}
	r.must(r.c.Lookup(r.now, r.sid, id, [][]block.Key{keys}, LookupOptions{Peek: true}, a))
	return a.Groups[0].Verdicts
}

// effects takes all effects of a type out of those collected.
func effects[T Effect](r *rig) (out []T) {
	rest := r.fx[:0]
	for _, e := range r.fx {
		if v, ok := e.(T); ok {
			out = append(out, v)
		} else {
			rest = append(rest, e)
		}
	}
	r.fx = rest
	return out
}

// jobs takes the jobs of a kind that were started.
func (r *rig) jobs(k JobKind) (out []StartJob) {
	var rest []Effect
	for _, j := range effects[StartJob](r) {
		if j.Kind == k {
			out = append(out, j)
		} else {
			rest = append(rest, j)
		}
	}
	r.fx = append(r.fx, rest...)
	return out
}

// results reports every block of a job.
func (r *rig) results(j StartJob, o Outcome, cause tier.Cause) {
	r.t.Helper()
	var res []JobResult
	for i := range j.Blocks {
		res = append(res, r.result(j, i, o, cause))
	}
	r.c.JobResults(r.now, j.ID, res)
	r.check()
}

func (r *rig) result(j StartJob, i int, o Outcome, cause tier.Cause) JobResult {
	res := JobResult{Index: i, Outcome: o, Sum: sumOf(j.Blocks[i].Key)}
	if o != Done {
		res.Class, res.Cause = tier.ClassPermanent, cause
	} else if j.Kind == Cascade {
		r.have[j.Tier][j.Blocks[i].Key] = true
	}
	return res
}

// idle checks that nothing is left: every table empty, all of the region free,
// evictable or remainder.
func (r *rig) idle() {
	r.t.Helper()
	r.check()
	s := r.c.Stats()
	if s.Free+s.Evictable+s.Remainder != s.Capacity || s.Pins+s.Requests+s.Handovers+s.Reservations+s.Jobs+s.Waits+s.Fills+s.Timers+s.QuietSlots != 0 {
		r.t.Fatalf("idle is not zero: %+v", s)
	}
	for t := range s.Tiers {
		if s.Reading[t]+s.Writing[t] != 0 || s.OverdueBytes[t] != 0 || r.c.tiers[t].inflight != 0 {
			r.t.Fatalf("tier %d is not idle: %+v", t, s)
		}
	}
}

func (r *rig) want(what string, got, want any) {
	r.t.Helper()
	if !reflect.DeepEqual(got, want) {
		r.t.Fatalf("%s: got %v, want %v", what, got, want)
	}
}

func (r *rig) wantErr(what string, got, want error) {
	r.t.Helper()
	if !errors.Is(got, want) {
		r.t.Fatalf("%s: got error %v, want %v", what, got, want)
	}
}

func (r *rig) answer(w WaitID) *Answer {
	r.t.Helper()
	for _, e := range r.fx {
		if a, ok := e.(AnswerLookup); ok && a.Wait == w {
			return a.Answer
		}
	}
	r.t.Fatal("no answer")
	return nil
}

func TestStoreCascadeEvictPromote(t *testing.T) {
	r := newRig(t, 40, 1, nil)
	r.request("a")
	if n := r.store("a", keyRange(0, 30)); n != 30 {
		t.Fatal(n)
	}
	if r.run(Done) == 0 {
		t.Fatal("no cascade")
	}
	r.must(nil, r.c.Finish(r.now, r.sid, "a"))
	r.request("b")
	if n := r.store("b", keyRange(100, 130)); n != 30 {
		t.Fatal(n)
	}
	r.run(Done)
	r.must(nil, r.c.Finish(r.now, r.sid, "b"))
	r.check()
	r.request("c")
	a, w := r.lookup("c", keyRange(0, 30), r.now+1e9)
	if w == 0 {
		t.Fatalf("final at once: %+v", a)
	}
	r.run(Done)
	a = r.answer(w)
	if !a.Final || a.Tokens != 30*16 || len(a.Groups[0].Leases) != 30 {
		t.Fatalf("%+v", a)
	}
	for i, l := range a.Groups[0].Leases {
		if l.Sum != uint64(i) {
			t.Fatalf("lease %d: %+v", i, l)
		}
	}
	if s := r.c.Stats(); s.Pins != 30 || s.Tiers[0].Hits == 0 || s.Tiers[0].Hits+s.PrimaryHits != 30 {
		t.Fatalf("%+v", s)
	}
	r.must(nil, r.c.Finish(r.now, r.sid, "c"))
	r.check()
	if s := r.c.Stats(); s.Pins != 0 || s.Requests != 0 || s.Jobs != 0 || s.Timers != 0 || s.Free+s.Evictable+s.Remainder != s.Capacity {
		t.Fatalf("not idle: %+v", s)
	}
}

func TestFailedLoadIsAMissNextTime(t *testing.T) {
	r := newRig(t, 40, 1, nil)
	for i := range 10 {
		r.have[0][key(i, 0)] = true
	}
	r.request("a")
	_, w := r.lookup("a", keyRange(0, 10), r.now+1e9)
	r.run(Failed)
	if a := r.answer(w); a.Tokens != 0 || a.Groups[0].Verdicts[0] != MissFailed {
		t.Fatalf("%+v", a)
	}
	if a, _ := r.lookup("a", keyRange(0, 10), 0); !a.Final || a.Groups[0].Verdicts[0] != MissFailed {
		t.Fatalf("%+v", a)
	}
	r.now += Time(11e9)
	r.c.Tick(r.now)
	if a, _ := r.lookup("a", keyRange(0, 10), 0); a.Final || a.Groups[0].Verdicts[0] != HitPending {
		t.Fatalf("not tried afresh: %+v", a)
	}
}

func TestDeadlineFailsFirstAndFreesLater(t *testing.T) {
	r := newRig(t, 40, 1, func(o *Options) { o.PromoteTimeout = 1e9; o.OverduePercent = 100 })
	for i := range 10 {
		r.have[0][key(i, 0)] = true
	}
	r.request("a")
	_, w := r.lookup("a", keyRange(0, 10), r.now+5e9)
	held := r.fx
	r.now += 2e9
	r.c.Tick(r.now)
	r.check()
	if a := r.answer(w); a.Tokens != 0 {
		t.Fatalf("%+v", a)
	}
	if s := r.c.Stats(); s.QuietSlots != 10 || s.Quarantined != 10*PageSize {
		t.Fatalf("%+v", s)
	}
	r.fx = held
	r.run(Done) // the call returns at last
	if s := r.c.Stats(); s.QuietSlots != 0 || s.Tiers[0].Late != 10 || s.Jobs != 0 || s.Blocks != 0 {
		t.Fatalf("%+v", s)
	}
}

func TestSharedPromotionIsReadOnce(t *testing.T) {
	r := newRig(t, 100, 1, nil)
	for i := range 10 {
		r.have[0][key(i, 0)] = true
	}
	var waits []WaitID
	for i := range 50 {
		id := string(rune('A' + i))
		r.request(id)
		_, w := r.lookup(id, keyRange(0, 10), r.now+1e9)
		waits = append(waits, w)
	}
	if n := r.run(Done); n != 1 {
		t.Fatalf("%d reads", n)
	}
	for _, w := range waits {
		if a := r.answer(w); a.Tokens != 160 {
			t.Fatalf("%+v", a)
		}
	}
	if s := r.c.Stats(); s.Pins != 500 {
		t.Fatal(s.Pins)
	}
}
