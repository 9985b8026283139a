package core

import (
	"fmt"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
)

// Two requests hold all of the primary and each needs one block more. Neither
// waits for the other: both are refused at once, and what one gives back is the
// other's (B019).
func TestOneOfTwoFinishesWhenBothNeedMore(t *testing.T) {
	r := newRig(t, 7, 1, func(o *Options) { o.ReservePercent = -1 })
	for i := range 7 {
		r.have[0][key(i, 0)] = true
	}
	r.request("a")
	r.request("b")
	r.lookup("a", keyRange(0, 4), r.now+Time(time.Hour))
	r.lookup("b", keyRange(4, 7), r.now+Time(time.Hour))
	r.run(Done)
	r.want("pins", r.c.Stats().Pins, 7)
	for _, id := range []string{"a", "b"} {
		_, err := r.c.Reserve(r.now, r.sid, id, 0, 0, keyRange(100, 101), nil)
		r.wantErr(id, err, ErrNoRoom)
	}
	r.want("waits", r.c.Stats().Waits, 0)
	r.finish("a")
	r.want("b goes on", r.store("b", keyRange(100, 101)), 1)
	r.finish("b")
	r.run(Done)
	r.idle()
}

// A lookup is answered when its own blocks are there, whatever another that
// was made at the same moment still waits for (B142).
func TestFastAnswerDoesNotWaitForASlowOne(t *testing.T) {
	r := newRig(t, 20, 2, nil)
	r.have[0][key(0, 0)], r.have[1][key(1, 0)] = true, true
	r.request("slow")
	r.request("fast")
	_, slow := r.lookup("slow", keyRange(0, 1), r.now+Time(time.Hour))
	_, fast := r.lookup("fast", keyRange(1, 2), r.now+Time(time.Hour))
	j := r.jobs(Promotion)
	r.want("tiers asked", []int{j[0].Tier, j[1].Tier}, []int{0, 1})
	r.results(j[1], Done, 0)
	a := effects[AnswerLookup](r)
	r.want("answers", []any{len(a), a[0].Wait, a[0].Answer.Tokens}, []any{1, fast, int64(16)})
	r.results(j[0], Done, 0)
	r.want("and later", r.answer(slow).Tokens, int64(16))
}

// What is pending at the caller's bound is a Miss; what is there before it is
// answered (B147).
func TestPendingTailIsCutAtTheBound(t *testing.T) {
	r := newRig(t, 20, 0, nil)
	r.request("s")
	r.store("s", keyRange(0, 3))
	r.reserve("s", keyRange(3, 4))
	r.request("a")
	_, w := r.lookup("a", keyRange(0, 4), r.now+Time(time.Millisecond))
	r.tick(time.Millisecond)
	a := r.answer(w)
	r.want("answer", []any{a.Final, a.Tokens, a.Groups[0].Verdicts}, []any{true, int64(48), []Verdict{Hit, Hit, Hit, MissWaited}})
	r.want("leases", len(a.Groups[0].Leases), 3)
}

// Ten thousand requests that end in the middle of their loads leave nothing in
// any table (B042).
func TestManyAbortsLeaveNothing(t *testing.T) {
	r := newRig(t, 40, 2, nil)
	for i := range 30 {
		r.have[i%2][key(i, 0)] = true
	}
	for i := range 10_000 {
		id := fmt.Sprint(i)
		r.must(nil, r.c.NewRequest(r.now, r.sid, id, NoLimits()))
		var a Answer
		lo := i % 26
		r.must(r.c.Lookup(r.now, r.sid, id, [][]block.Key{keyRange(lo, lo+4)}, LookupOptions{WaitUntil: r.now + Time(time.Hour)}, &a))
		r.must(nil, r.c.Finish(r.now, r.sid, id))
		if i%100 == 99 {
			r.check()
			for _, j := range r.jobs(Promotion) {
				r.results(j, Outcome(i/100%3), 0)
			}
			r.fx = r.fx[:0]
			r.must(r.c.Reset(r.now, r.now))
			r.tick(11 * time.Second) // failed reads are trusted again
		}
	}
	r.run(Failed)
	r.tick(time.Minute)
	r.idle()
	if n := len(r.c.sessions[r.sid].requests); n != 0 {
		t.Errorf("%d requests are left", n)
	}
}

// Blocks of at least 64 KiB and at most a twentieth of an extent use 95 % of
// the primary or more; what an extent's end leaves is counted (B119).
func TestRoomIsUsed(t *testing.T) {
	for _, size := range []uint64{64 << 10, 100_000, 256 << 10, 389_120, 800_000} {
		r := newRig(t, 1, 0, func(o *Options) { o.Size, o.ExtentBytes = 64<<20, 0 })
		ns := r.must(r.c.OpenNamespace([]block.Group{{Kind: block.KindFull, TokensPerBlock: 16, BlockBytes: size}})).(NamespaceID)
		r.sid = r.must(r.c.OpenSession(ns)).(SessionID)
		r.request("a")
		n := 0
		for _, err := r.c.Reserve(r.now, r.sid, "a", 0, 0, keyRange(n, n+1), nil); err == nil; _, err = r.c.Reserve(r.now, r.sid, "a", 0, 0, keyRange(n, n+1), nil) {
			n++
		}
		s := r.c.Stats()
		if used := int64(n) * int64(size); used < s.Capacity*95/100 {
			t.Errorf("%d blocks of %d bytes use %d of %d bytes", n, size, used, s.Capacity)
		}
		if rest := s.Capacity - int64(n)*int64(StridePages(size))*PageSize; s.Remainder != rest {
			t.Errorf("blocks of %d bytes: the remainder is %d, counted as %d", size, rest, s.Remainder)
		}
	}
}

// No id of a session or job is used twice, so that what comes late finds
// nobody (B097).
func TestIDsAreNotUsedAgain(t *testing.T) {
	r := newRig(t, 8, 1, nil)
	seen := map[uint64]bool{}
	take := func(id uint64) {
		t.Helper()
		if seen[id] {
			t.Fatalf("id %d is used again", id)
		}
		seen[id] = true
	}
	for i := range 500 {
		r.sid = r.must(r.c.OpenSession(r.ns)).(SessionID)
		take(uint64(r.sid))
		r.request("a")
		r.store("a", keyRange(i, i+2))
		for _, j := range r.jobs(Cascade) {
			take(uint64(j.ID))
			r.results(j, Done, 0)
		}
		r.must(r.c.CloseSession(r.now, r.sid))
	}
	if len(seen) < 1000 {
		t.Errorf("only %d ids", len(seen))
	}
}
