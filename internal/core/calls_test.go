package core

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
)

// callTable has what each call answers in each state (rule 7): a row a state, a
// column a call. A call that is made twice has two answers. The words are those
// of codes below, and besides
//
//	wait      the answer comes later
//	ign       ignored and counted
//	0, 1, …   slots quarantined by the end of the session
//	-         nothing that the call could name
const callTable = `
           new  look wait peek resv  comm        forn  abort       pin  unpin     ufor  touch fin       flush reset late tick close
no_session sess sess sess sess sess  sess,sess   sess  sess,sess   sess sess,sess sess  sess  sess,sess sess  wait  ign  ok   sess,sess
greeted    ok   none none none none  none,none   none  none,none   none none,none none  ok    none,none none  wait  ign  ok   0,sess
active     conf hit  wait hit  ok    -           stale -           ok   -         stale ok    ok,none   done  wait  ign  ok   0,sess
looked_up  conf hit  wait hit  ok    -           stale -           ok   ok,stale  stale ok    ok,none   done  wait  ign  ok   0,sess
promoting  conf hit  wait hit  ok    -           stale -           ok   -         stale ok    ok,none   done  wait  ign  ok   0,sess
polling    conf hit  wait hit  ok    -           stale -           ok   -         stale ok    ok,none   done  wait  ign  ok   0,sess
probing    conf hit  wait hit  ok    -           stale -           ok   -         stale ok    ok,none   done  wait  ign  ok   0,sess
reserved   conf hit  wait hit  ok    ok,stale    stale ok,stale    ok   -         stale ok    ok,fin    wait  wait  ign  ok   2,sess
expired    conf hit  wait hit  ok    drop,stale  stale drop,stale  ok   -         stale ok    ok,fin    wait  wait  ign  ok   2,sess
summing    conf hit  wait hit  ok    stale,stale stale stale,stale ok   -         stale ok    ok,fin    wait  wait  ign  ok   0,sess
cascading  conf hit  wait hit  ok    stale,stale stale stale,stale ok   -         stale ok    ok,none   wait  wait  ign  ok   0,sess
crediting  conf hit  wait hit  ok    stale,stale stale stale,stale ok   -         stale ok    ok,none   wait  wait  ign  ok   0,sess
flushing   conf hit  wait hit  ok    ok,stale    stale ok,stale    ok   -         stale ok    ok,fin    wait  wait  ign  ok   2,sess
resetting  conf pend wait pend ok    drop,stale  stale drop,stale  no   ok,stale  stale ok    ok,fin    wait  still ign  ok   2,sess
finishing  ok   fin  fin  fin  fin   ok,none     stale ok,none     fin  -         stale ok    fin,fin   wait  wait  ign  ok   2,sess
finished   ok   none none none none  none,none   none  none,none   none none,none none  ok    none,none none  wait  ign  ok   0,sess
handover   ok   none none none none  none,none   none  none,none   none none,none none  ok    none,none none  wait  ign  ok   0,sess
draining   conf hit  miss hit  drain ok,stale    stale ok,stale    ok   ok,stale  stale ok    ok,fin    wait  wait  ign  ok   2,sess
`

// callRig is a rig in some state, and what the engine has then.
type callRig struct {
	*rig
	fills  []Fill
	leases []Lease

	other  SessionID // has request "o"
	lease  Lease     // of its own block
	theirs Fill
}

// Keys 0 and 1 are in the primary and in tier 0, 2 and 3 in the tier only; 4 is
// the other session's, which fills 5.
func (r *callRig) grant() {
	ks := keyRange(10, 12)
	r.fills = fillsOf(r.reserve("a", ks), ks)
}

func (r *callRig) stored() { r.grant(); r.commit("a", r.fills...) }

func (r *callRig) look() {
	a, _ := r.lookup("a", keyRange(0, 2), 0)
	r.leases = a.Groups[0].Leases
}

var callStates = []struct {
	name string
	do   func(r *callRig)
}{
	{"no_session", func(r *callRig) {
		r.must(r.c.CloseSession(r.now, r.sid))
	}},
	{"greeted", func(*callRig) {}},
	{"active", func(r *callRig) { r.request("a") }},
	{"looked_up", func(r *callRig) { r.request("a"); r.look() }},
	{"promoting", func(r *callRig) { r.request("a"); r.lookup("a", keyRange(2, 4), r.now+Time(time.Hour)) }},
	{"polling", func(r *callRig) { r.request("a"); r.lookup("a", keyRange(2, 4), 0) }},
	{"probing", func(r *callRig) {
		r.c.tiers[0].facts.Known = nil
		r.request("a")
		r.lookup("a", keyRange(2, 4), r.now+Time(time.Hour))
	}},
	{"reserved", func(r *callRig) { r.request("a"); r.grant() }},
	{"expired", func(r *callRig) { r.request("a"); r.grant(); r.tick(2 * time.Minute) }},
	{"summing", func(r *callRig) {
		r.request("a")
		r.grant()
		for i := range r.fills {
			r.fills[i].HasSum = false
		}
		r.commit("a", r.fills...)
	}},
	{"cascading", func(r *callRig) { r.request("a"); r.stored() }},
	{"crediting", func(r *callRig) {
		sid := r.sid
		r.c.tiers[0].facts.WriteBlocksMax = 1
		r.sid = r.other
		r.store("o", keyRange(20, 21)) // has the credit
		r.sid = sid
		r.request("a")
		r.stored()
	}},
	{"flushing", func(r *callRig) {
		r.request("a")
		r.store("a", keyRange(20, 22))
		r.grant()
		r.waits(r.c.Flush(r.now, r.sid, "a", r.now+Time(time.Hour)))
	}},
	{"resetting", func(r *callRig) {
		r.request("a")
		r.store("a", keyRange(20, 22))
		r.grant()
		r.look()
		r.must(r.c.Reset(r.now, r.now+Time(time.Hour)))
	}},
	{"finishing", func(r *callRig) { r.request("a"); r.grant(); r.finish("a") }},
	{"finished", func(r *callRig) { r.request("a"); r.stored(); r.finish("a") }},
	{"handover", func(r *callRig) {
		r.must(nil, r.c.NewRequest(r.now, r.sid, "a", Params{RemoteDecoder: true, MaxLoadTokens: -1, MaxOffloadTokens: -1}))
		r.stored()
		r.finish("a")
	}},
	{"draining", func(r *callRig) { r.request("a"); r.look(); r.grant(); r.c.Drain() }},
}

func (r *callRig) waits(_ WaitID, done bool, _ Flushed, err error) {
	r.t.Helper()
	if r.must(nil, err); done {
		r.t.Fatal("nothing to wait for")
	}
}

var codes = []struct {
	err  error
	code string
}{{ErrNoSession, "sess"}, {ErrFinished, "fin"}, {ErrNoRequest, "none"}, {ErrConflict, "conf"}, {ErrDraining, "drain"}, {ErrStillPending, "still"}}

func code(err error, ok string) string {
	if err == nil {
		return ok
	}
	for _, c := range codes {
		if errors.Is(err, c.err) {
			return c.code
		}
	}
	return err.Error()
}

// same is the one answer that all items of a call have.
func same[T comparable](out []T, err error, names map[T]string) string {
	if err != nil {
		return code(err, "")
	}
	if len(out) == 0 {
		return "-"
	}
	for _, x := range out {
		if x != out[0] {
			return fmt.Sprint(out)
		}
	}
	return names[out[0]]
}

func statuses(out []FillStatus, err error) string {
	return same(out, err, map[FillStatus]string{FillOK: "ok", FillStale: "stale", FillDropped: "drop"})
}

// twice joins two answers; one word if both say that there is nothing.
func twice(f func() string) string {
	a, b := f(), f()
	if a == b && (a == "-" || a == "none" && b == "-") {
		return a
	}
	return a + "," + b
}

func (r *callRig) judge(keys int, o LookupOptions) string {
	a := &Answer{}
	w, err := r.c.Lookup(r.now, r.sid, "a", [][]block.Key{keyRange(keys, keys+2)}, o, a)
	switch {
	case err != nil:
		return code(err, "")
	case w != 0:
		return "wait"
	}
	return same(a.Groups[0].Verdicts, nil, map[Verdict]string{Hit: "hit", HitPending: "pend", MissDraining: "miss", MissUnusable: "miss"})
}

var callKinds = []struct {
	name string
	do   func(r *callRig) string
}{
	{"new", func(r *callRig) string { return code(r.c.NewRequest(r.now, r.sid, "a", NoLimits()), "ok") }},
	{"look", func(r *callRig) string { return r.judge(0, LookupOptions{}) }},
	{"wait", func(r *callRig) string { return r.judge(2, LookupOptions{WaitUntil: r.now + Time(time.Hour)}) }},
	{"peek", func(r *callRig) string { return r.judge(0, LookupOptions{Peek: true}) }},
	{"resv", func(r *callRig) string {
		g, err := r.c.Reserve(r.now, r.sid, "a", 0, 0, keyRange(30, 32), nil)
		if err == nil && g[0].Status != Granted {
			return "not granted"
		}
		return code(err, "ok")
	}},
	{"comm", func(r *callRig) string {
		return twice(func() string { return statuses(r.c.Commit(r.now, r.sid, "a", r.fills, nil)) })
	}},
	{"forn", func(r *callRig) string {
		return statuses(r.c.Commit(r.now, r.sid, "a", []Fill{{Slot: 1 << 30, Gen: 1, HasSum: true}, r.theirs}, nil))
	}},
	{"abort", func(r *callRig) string {
		return twice(func() string { return statuses(r.c.Abort(r.now, r.sid, "a", r.fills, nil)) })
	}},
	{"pin", func(r *callRig) string {
		l, err := r.c.Pin(r.now, r.sid, "a", keyRange(0, 2), nil)
		if err == nil && l[0].Gen == 0 {
			return "no"
		}
		return code(err, "ok")
	}},
	{"unpin", func(r *callRig) string {
		return twice(func() string { return statuses(r.c.Unpin(r.now, r.sid, "a", r.leases, nil)) })
	}},
	{"ufor", func(r *callRig) string {
		return statuses(r.c.Unpin(r.now, r.sid, "a", []Lease{{Slot: 1 << 30, Gen: 1}, r.lease}, nil))
	}},
	{"touch", func(r *callRig) string { return code(r.c.Touch(r.now, r.sid, keyRange(0, 40)), "ok") }},
	{"fin", func(r *callRig) string {
		return twice(func() string { return code(r.c.Finish(r.now, r.sid, "a"), "ok") })
	}},
	{"flush", func(r *callRig) string {
		_, done, _, err := r.c.Flush(r.now, r.sid, "a", r.now+Time(time.Hour))
		if done {
			return "done"
		}
		return code(err, "wait")
	}},
	{"reset", func(r *callRig) string {
		_, err := r.c.Reset(r.now, r.now+Time(time.Hour))
		return code(err, "wait")
	}},
	{"late", func(r *callRig) string {
		before := r.c.Stats().ForeignResults
		r.c.JobResults(r.now, 1<<40, []JobResult{{}})
		r.c.ProbeResult(r.now, 1<<40, []bool{true}, true)
		r.c.SumDone(r.now, 1<<30, 1, 1)
		r.c.SumDone(r.now, r.theirs.Slot, r.theirs.Gen, 1)
		if s := r.c.Stats(); s.ForeignResults != before+2 || s.LateSums != 2 {
			return "not counted"
		}
		if err := r.c.SessionQuiet(r.now, 1<<40); !errors.Is(err, ErrNoSession) {
			return "quiet"
		}
		return "ign"
	}},
	{"tick", func(r *callRig) string {
		r.now += Time(2 * time.Hour)
		if r.c.Tick(r.now); r.c.Stats().Waits > 0 {
			return "waits"
		}
		return "ok"
	}},
	{"close", func(r *callRig) string {
		return twice(func() string {
			n, err := r.c.CloseSession(r.now, r.sid)
			return code(err, fmt.Sprint(n))
		})
	}},
}

// end lets everything come to its end, in the order in which a node does.
func (r *callRig) end() {
	r.t.Helper()
	r.check()
	r.c.tiers[0].facts.WriteBlocksMax = 64
	for range 3 { // what one sets off, the next ends
		for _, s := range effects[ComputeSum](r.rig) {
			r.c.SumDone(r.now, s.Slot, s.Gen, 1)
			r.check()
		}
		for _, j := range r.jobs(ProbeJob) {
			r.c.ProbeResult(r.now, j.ID, make([]bool, len(j.Blocks)), true)
			r.check()
		}
		r.run(Done)
		r.c.TierHealth(r.now, 0, true, true) // looks for what waits
		r.check()
	}
	for _, sid := range []SessionID{r.sid, r.other} {
		_, _ = r.c.CloseSession(r.now, sid) // perhaps again
		r.check()
	}
	r.run(Done)
	for _, sid := range []SessionID{r.sid, r.other} {
		_ = r.c.SessionQuiet(r.now, sid) // gone, if it had nothing
	}
	r.check()
	r.tick(time.Hour) // facts
	r.idle()
}

// TestEveryCallInEveryState walks the table. After each cell the core is whole,
// what the other session has is still its own, and all comes to rest.
func TestEveryCallInEveryState(t *testing.T) {
	lines := strings.Split(strings.TrimSpace(callTable), "\n")
	head := strings.Fields(lines[0])
	cells := map[string][]string{}
	for _, line := range lines[1:] {
		f := strings.Fields(line)
		cells[f[0]] = f[1:]
	}
	if len(head) != len(callKinds) || len(cells) != len(callStates) {
		t.Fatalf("the table has %d calls and %d states, there are %d and %d", len(head), len(cells), len(callKinds), len(callStates))
	}
	for _, s := range callStates {
		row := cells[s.name]
		if len(row) != len(head) {
			t.Errorf("%s: %d cells, want %d", s.name, len(row), len(head))
			continue
		}
		for i, k := range callKinds {
			if head[i] != k.name {
				t.Fatalf("column %d is %s, want %s", i, head[i], k.name)
			}
			t.Run(s.name+"/"+k.name, func(t *testing.T) {
				r := &callRig{rig: newRig(t, 30, 1, nil)}
				r.other = r.must(r.c.OpenSession(r.ns)).(SessionID)
				sid := r.sid
				r.sid = r.other
				r.request("o")
				r.store("o", keyRange(0, 5))
				r.run(Done)
				r.must(r.c.Reset(r.now, r.now)) // leaves the tier what it has
				r.store("o", keyRange(0, 2))
				r.store("o", keyRange(4, 5))
				r.run(Done)
				r.lease = r.must(r.c.Pin(r.now, r.other, "o", keyRange(4, 5), nil)).([]Lease)[0]
				r.theirs = fillsOf(r.reserve("o", keyRange(5, 6)), keyRange(5, 6))[0]
				r.sid = sid

				s.do(r)
				if got := k.do(r); got != row[i] {
					t.Errorf("%s in state %s is answered %s, want %s", k.name, s.name, got, row[i])
				}
				r.check()
				want := FillOK
				if s.name == "resetting" || s.name == "expired" || k.name == "reset" || k.name == "tick" {
					want = FillDropped
				}
				r.sid = r.other
				r.want("the other's commit", r.commit("o", r.theirs), []FillStatus{want})
				r.sid = sid
				r.want("the other's unpin", statuses(r.c.Unpin(r.now, r.other, "o", []Lease{r.lease}, nil)), "ok")
				r.end()
			})
		}
	}
}
