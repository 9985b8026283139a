package core

import (
	"cmp"
	"slices"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
)

// The model's own answers to what a lookup and a reserve must say: scans and
// brute force over the slot table, without the core's indexes and counters.

// scan lists the slots that hold a key, as the slot table has them.
func (w *world) scan() {
	w.view = w.view[:0]
	for x := range w.c.extents {
		e := &w.c.extents[x]
		for i := range e.slots {
			if st := e.slots[i].state; st == slotFilling || st == slotResident {
				w.view = append(w.view, slotView{Slot(uint32(x)<<w.c.extShift + uint32(i)*w.c.classes[e.class].stride), &e.slots[i]})
			}
		}
	}
}

func (w *world) lookIn(k simKey) (Slot, *slot) {
	for _, v := range w.view {
		if v.e.key == k.key && v.e.ns == k.ns {
			return v.s, v.e
		}
	}
	return 0, nil
}

func (w *world) naive(k simKey) (Slot, *slot) {
	w.scan()
	return w.lookIn(k)
}

// naiveRoom is how many slots of a class a use may take now, and the most that
// it could ever take at once. keys in pinned are not to be evicted.
func (w *world) naiveRoom(class, use int, pinned map[Slot]bool) (room, largest int) {
	stride := w.c.classes[class].stride
	reach, other, potential := 0, 0, 0
	for x := range w.c.extents {
		e := &w.c.extents[x]
		potential += int(e.pages / stride)
		if e.class == class {
			reach += len(e.slots)
			for i := range e.slots {
				switch sl := &e.slots[i]; sl.state {
				case slotFree:
					room++
				case slotResident:
					if sl.pins == 0 && !pinned[Slot(uint32(x)<<w.c.extShift+uint32(i)*stride)] {
						room++
					}
				case slotFilling:
					kind := useStore
					if w.c.fills[sl.holder].kind == fillPromote {
						kind = usePromote
					}
					if kind != use {
						other++
					}
				}
			}
			continue
		}
		idle := true
		for i := range e.slots {
			sl := &e.slots[i]
			idle = idle && (sl.state == slotFree || sl.state == slotResident && sl.pins == 0)
		}
		if idle {
			room += int(e.pages / stride)
			reach += int(e.pages / stride)
		}
	}
	if len(w.tiers) > 0 {
		room -= max(0, reach*w.o.core.ReservePercent/100-other)
		potential -= potential * w.o.core.ReservePercent / 100
	}
	return max(0, room), potential
}

// expected is what a lookup has to find for one key.
type expected struct {
	g, i int
	v    Verdict
	tier int // that it is to be read from or asked, -1: none
}

func (w *world) expectKey(q *simReq, k simKey, overdue bool) (Verdict, int) {
	if _, e := w.lookIn(k); e != nil {
		switch {
		case e.state == slotResident:
			return Hit, -1
		case overdue:
			return MissWaited, -1
		}
		return HitPending, -1
	}
	v := MissAbsent
	for t, st := range w.tiers {
		var out [1]tier.Presence
		if st.mode != modeProbe {
			st.known(k.ns, []block.Key{k.key}, out[:])
		}
		p := out[0]
		var state factState = 255
		if f := w.c.facts[factKey{uint8(t), k.ns, 0, k.key}]; f != nil && (f.state == factProbing || f.until > w.now) {
			state = f.state
			if p == tier.Unknown && state == factPresent {
				p = tier.Present
			}
			if p == tier.Unknown && state == factAbsent {
				p = tier.Absent
			}
		}
		ts := &w.c.tiers[t]
		down := !ts.readUp || ts.overdueBytes > 0 && ts.overdueBytes >= w.o.core.Size*int64(w.o.core.OverduePercent)/100
		switch {
		case p == tier.Absent:
		case !naiveMatch(q.p.LoadTiers, w.o.core.Tiers[t]):
			if p == tier.Present {
				v = MissFiltered
			}
		case state == factDistrust:
			v = MissFailed
		case state == factUnknown && p == tier.Unknown:
			v = MissUnavailable
		case down:
			v = MissUnavailable
		case overdue:
			v = MissWaited
		case w.draining:
			v = MissDraining
		case p == tier.Present:
			return HitPending, t
		default:
			return Retry, t
		}
	}
	return v, -1
}

// expect judges every key of a lookup.
func (w *world) expect(q *simReq, keys [][]block.Key, overdue bool) []expected {
	w.scan()
	var out []expected
	for g := range keys {
		for i := range keys[g] {
			v, t := w.expectKey(q, simKey{q.s.sp.id, keys[g][i]}, overdue)
			out = append(out, expected{g, i, v, t})
		}
	}
	return out
}

// naiveRun is the stretch of a group that a prefix of so many tokens needs.
func naiveRun(g block.Group, tokens int64) (first, end int) {
	end = int(tokens) / int(g.TokensPerBlock)
	if g.Kind == block.KindWindow {
		first = max(0, end-int(g.WindowBlocks))
	}
	return first, end
}

// longest is the longest prefix for which every group has every block of its
// run, by trying all.
func (w *world) longest(q *simReq, keys [][]block.Key, has func(g, i int) bool) int64 {
	most := int64(w.o.maxTokens + 8)
	if m := q.p.MaxLoadTokens; m >= 0 {
		most = min(most, m)
	}
next:
	for t := most; t > 0; t-- {
		for g := range keys {
			gr := q.s.sp.groups[g]
			first, end := naiveRun(gr, t)
			if t%int64(gr.TokensPerBlock) != 0 || end > len(keys[g]) {
				continue next
			}
			for i := first; i < end; i++ {
				if !has(g, i) {
					continue next
				}
			}
		}
		return t
	}
	return 0
}

func at(keys [][]block.Key, list []expected, g, i int) expected {
	n := i
	for h := range g {
		n += len(keys[h])
	}
	return list[n]
}

func (w *world) naiveFit(q *simReq, keys [][]block.Key, list []expected) int64 {
	return w.longest(q, keys, func(g, i int) bool { return !at(keys, list, g, i).v.Miss() })
}

// hitTokens is the longest prefix that the primary alone serves.
func (w *world) hitTokens(q *simReq, keys [][]block.Key) int64 {
	w.scan()
	return w.longest(q, keys, func(g, i int) bool {
		_, e := w.lookIn(simKey{q.s.sp.id, keys[g][i]})
		return e != nil && e.state == slotResident
	})
}

// checkAnswer checks the form of an answer, and takes its leases.
func (w *world) checkAnswer(q *simReq, keys [][]block.Key, a *Answer, peek bool) {
	if a.Void || len(a.Groups) != len(keys) {
		w.fail("answer is void or has %d groups, want %d", len(a.Groups), len(keys))
	}
	if m := q.p.MaxLoadTokens; m >= 0 && a.Tokens > m {
		w.fail("answer of %d tokens, the cap is %d", a.Tokens, m)
	}
	final := true
	for g := range keys {
		gr, ans := q.s.sp.groups[g], a.Groups[g]
		first, end := naiveRun(gr, a.Tokens)
		if a.Tokens%int64(gr.TokensPerBlock) != 0 || end > len(keys[g]) {
			w.fail("group %d cannot serve %d tokens", g, a.Tokens)
		}
		if len(ans.Verdicts) != len(keys[g]) || ans.First != first || len(ans.Leases) != end-first {
			w.fail("group %d: %d verdicts, first %d, %d leases; want %d, %d, %d", g, len(ans.Verdicts), ans.First, len(ans.Leases), len(keys[g]), first, end-first)
		}
		for i, v := range ans.Verdicts {
			w.mix(uint64(v))
			k := simKey{q.s.sp.id, keys[g][i]}
			switch {
			case i < first:
				if v != VerdictNone {
					w.fail("group %d key %d: verdict %v before the run", g, i, v)
				}
				continue
			case i >= end:
				if !v.Miss() {
					w.fail("group %d key %d: verdict %v beyond the run", g, i, v)
				}
				if m, over := q.p.MaxLoadTokens, int64(i+1)*int64(gr.TokensPerBlock); v == MissCapped && (m < 0 || over <= m) {
					w.fail("group %d key %d: %v, but the cap is %d tokens", g, i, v, m)
				}
				continue
			}
			l := ans.Leases[i-first]
			w.mix(uint64(l.Slot), uint64(l.Gen))
			switch v {
			case Hit:
				if peek != (l == Lease{}) {
					w.fail("group %d key %d: hit with lease %v in a peek: %v", g, i, l, peek)
				}
				if !peek {
					if l.Sum != content(k, 0) {
						w.fail("group %d key %d: lease with another checksum", g, i)
					}
					w.lease(q, k, l.Slot, l.Gen)
					if w.c.findPin(q.q, l.Slot) == 0 {
						w.fail("group %d key %d: lease without a pin", g, i)
					}
				}
			case HitPending, Retry:
				final = false
				if (l != Lease{}) {
					w.fail("group %d key %d: %v with lease %v", g, i, v, l)
				}
			default:
				w.fail("group %d key %d: %v in the run", g, i, v)
			}
		}
	}
	if final != a.Final {
		w.fail("answer is final: %v, want %v", a.Final, final)
	}
}

// checkPeek compares a peek with what the model expects, key by key.
func (w *world) checkPeek(q *simReq, keys [][]block.Key, a *Answer) {
	w.checkAnswer(q, keys, a, true)
	list := w.expect(q, keys, false)
	if n := w.naiveFit(q, keys, list); n != a.Tokens {
		w.fail("peek of chain %d %v: %s, want %d tokens of %v", q.chain, lens(keys), a.text(), n, list)
	}
	for _, x := range list {
		first, end := naiveRun(q.s.sp.groups[x.g], a.Tokens)
		if v := a.Groups[x.g].Verdicts[x.i]; x.i >= first && x.i < end && v != x.v {
			w.fail("group %d key %d: peek says %v, want %v", x.g, x.i, v, x.v)
		}
	}
}

// checkAgainstPeek compares a lookup with the peek just before it: the same,
// or less for lack of room or credit.
func (w *world) checkAgainstPeek(q *simReq, keys [][]block.Key, peek, a *Answer) {
	if a.Tokens > peek.Tokens {
		w.fail("lookup finds %d tokens, a peek %d", a.Tokens, peek.Tokens)
	}
	if a.Tokens < peek.Tokens {
		why := false
		for g := range a.Groups {
			why = why || slices.Contains(a.Groups[g].Verdicts, MissNoRoom) || slices.Contains(a.Groups[g].Verdicts, MissUnavailable)
		}
		if !why {
			w.fail("lookup finds %d tokens, a peek %d, and nothing says why: %s", a.Tokens, peek.Tokens, a.text())
		}
	}
	w.scan()
	pending := 0
	seen := map[simKey]bool{}
	for g := range keys {
		first, end := naiveRun(q.s.sp.groups[g], a.Tokens)
		for i := first; i < end; i++ {
			v, k := a.Groups[g].Verdicts[i], simKey{q.s.sp.id, keys[g][i]}
			if v == Hit || seen[k] {
				continue
			}
			seen[k] = true
			var wanted []interest
			if _, e := w.lookIn(k); e != nil && v == HitPending {
				wanted = w.c.fills[e.holder].wanted
			} else if v == Retry {
				_, t := w.expectKey(q, k, false)
				if f := w.c.facts[factKey{uint8(t), k.ns, 0, k.key}]; t >= 0 && f != nil && f.state == factProbing {
					wanted = f.wanted
				}
			}
			if !slices.IsSortedFunc(wanted, func(a, b interest) int { return cmp.Compare(a.q.seq, b.q.seq) }) {
				w.fail("those who want %s are out of order", k.key)
			}
			if slices.ContainsFunc(wanted, func(n interest) bool { return n.q == q.q && n.epoch == q.q.epoch }) {
				pending++
			} else if v == Retry || !retryIn(a) {
				w.fail("group %d key %d is %v, and the request will not hear of it", g, i, v)
			}
		}
	}
	if !a.Final && pending != q.q.pending || a.Final && q.q.pending != 0 {
		w.fail("the request waits for %d blocks and probes, %d are registered", pending, q.q.pending)
	}
	// Promotions leave stores their reserve.
	for _, e := range w.fx {
		if j, ok := e.(StartJob); ok && j.Kind == Promotion && len(w.c.classes) == 1 {
			k := &w.c.classes[0]
			room, reach := k.free+k.evictable, k.slots
			for x := range w.c.extents {
				if w.c.extents[x].class < 0 {
					room += int(w.c.extents[x].pages / k.stride)
					reach += int(w.c.extents[x].pages / k.stride)
				}
			}
			if keep := reach*w.o.core.ReservePercent/100 - k.filling[useStore]; room < keep {
				w.fail("promotions leave %d slots, %d are kept for stores", room, keep)
			}
		}
	}
}

func retryIn(a *Answer) bool {
	for g := range a.Groups {
		if slices.Contains(a.Groups[g].Verdicts, Retry) {
			return true
		}
	}
	return false
}
