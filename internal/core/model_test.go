package core

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
)

// The model test drives a core with random operations from a seed and checks
// every answer and effect against a small model of its own.
//
// Bytes are simulated: mem holds a number for each page of the region, which
// for a right block follows from its namespace and key. Whoever may touch a
// slot (an engine between grant and commit, a read or write until it is
// reported quiet, a checksum, a lease) has a claim on its pages. A slot handed
// out while a claim stands, or a lease on other bytes than its key's, fails the
// run: rules 3 and 5 in two assertions.

// modelOptions are drawn from the seed. Features are switched off at random, so
// that no frequent one hides what another does (swarm testing).
type modelOptions struct {
	core   Options
	spaces [][]block.Group
	tiers  []simMode

	chains, maxTokens int
	names, sessions   int

	faults, cancels, stray, corrupt bool // of transfers
	deaths, resets, drains          bool
	remote, filters, caps           bool // of requests
	sums, peeks, waits, aborts      bool
	jumps                           bool // time passes deadlines
	twice                           bool // a key stands twice in one call
	sabotage                        sabotage
}

// sabotage breaks the core on purpose: the model has to notice.
type sabotage uint8

const (
	honest          sabotage = iota
	releaseEarly             // a quarantined slot is freed before its I/O is over
	unpinBehind              // a lease loses its pin
	commitUnwritten          // a reserved block becomes visible before its commit
	loseJob                  // a job is forgotten
	leakPin                  // a block keeps a pin of nobody's
	sabotageEnd
)

// simMode is how a simulated tier answers Known.
type simMode uint8

const (
	modeKnown simMode = iota // at once and rightly
	modeProbe                // not at all
	modeStale                // what it once knew, or Unknown
	modeCount
)

type simKey struct {
	ns  NamespaceID
	key block.Key
}

type simTier struct {
	mode             simMode
	has              map[simKey]bool
	belief           map[simKey]tier.Presence
	reading, writing int // blocks handed out and not quiet
	waiting          []simWaiting
	inflight         int64 // pages of both
}

// simWaiting is a stored block that waits for the tier's credit.
type simWaiting struct {
	q     *simReq
	slot  Slot
	gen   uint32
	until Time
}

type simSpace struct {
	id     NamespaceID
	groups []block.Group
	stride []uint32
	keys   [][][]block.Key // by group, chain, index
}

type simSession struct {
	id    SessionID
	sp    *simSpace
	cur   []*simReq // latest generation of each unfinished id
	old   []*simReq // finishing ones whose id was taken again
	fills []*simFill
	dead  bool
	quiet bool // no process of it can write
}

type simState uint8

const (
	simActive simState = iota
	simFinishing
	simGone
)

type simReq struct {
	s      *simSession
	name   string
	q      *request
	p      Params
	allow  int // tiers that it may store to
	chain  int
	tokens int
	state  simState

	leases      []simLease
	outstanding int // fills not given back, and sums
	committed   int
	cascades    int // without an outcome
	waiting     int // of these, for credit
	hand        Time
	bound       Time // of the lookup that is not final
	overdue     bool
	wait        WaitID
	kept        []simKey // blocks that others fill and that it keeps for its hand-over
}

type simLease struct {
	slot Slot
	gen  uint32
}

type simFill struct {
	q        *simReq
	g        int
	key      block.Key
	slot     Slot
	gen      uint32
	deadline Time
	dropped  bool
	late     bool // by its deadline
}

type simSum struct {
	fill *simFill
	e    ComputeSum
}

type simJob struct {
	StartJob
	core     *job
	stride   []uint32
	reported []bool
	left     int
	settled  bool // the core has given all of it an outcome
	canceled bool
	inReset  bool
	q        []*simReq // of a cascade, by block
}

type waitKind uint8

const (
	waitLookup waitKind = iota
	waitFlush
	waitReset
)

type simWait struct {
	id    WaitID
	kind  waitKind
	q     *simReq
	bound Time
	keys  [][]block.Key
}

type claim struct {
	readers int32
	writer  int32
}

const (
	writerEngine = 1 + iota
	writerJob
)

// failure is how a check of the model ends the run.
type failure string

type world struct {
	o     modelOptions
	seed  uint64
	pcg   *rand.PCG
	r     *rand.Rand
	c     *Core
	now   Time
	op    int // number of the step; see runModel
	log   []string
	loud  bool // keep the log
	every int  // how often to check all invariants

	mem    []uint64
	claims []claim
	gens   []uint32 // last generation handed out at a page

	spaces   []*simSpace
	tiers    []*simTier
	sessions []*simSession
	reqs     []*simReq // not gone
	byCore   map[*request]*simReq
	gone     []*simReq // some of their stores may still wait for a tier's credit
	jobs     []*simJob
	ended    []JobID // the last few
	probing  map[factKey]bool
	failed   map[factKey]Time
	promos   map[simKey]bool // promotions without an outcome
	sums     []*simSum
	waits    map[WaitID]*simWait
	resetID  WaitID
	resets   int // jobs that the reset waits for
	draining bool
	finished map[string]int // RequestFinished that are due
	fx       []Effect
	view     []slotView
	hash     uint64 // of all that was answered
	hits     int64  // leases given
	broken   bool   // the sabotage has happened
	started  []Slot // promotions begun by this operation
	answer   Answer
	peek     Answer
}

type slotView struct {
	s Slot
	e *slot
}

// content is what page i of the right block for a key holds.
func content(k simKey, i uint32) uint64 {
	h := uint64(k.ns)*0x9e3779b97f4a7c15 + uint64(i)*0xd6e8feb86659fd93
	for j := 0; j < block.KeySize; j += 4 {
		h = (h ^ uint64(binary.LittleEndian.Uint32(k.key[j:]))) * 0xff51afd7ed558ccd
		h ^= h >> 33
	}
	return h | 1
}

func drawOptions(r *rand.Rand) modelOptions {
	flip := func() bool { return r.IntN(2) == 0 }
	pick := func(v ...int) int { return v[r.IntN(len(v))] }
	o := modelOptions{
		chains: pick(1, 1, 2, 3, 5), maxTokens: pick(4, 12, 24, 48), names: 2 + r.IntN(5), sessions: 1 + r.IntN(3),
		faults: flip(), cancels: flip(), stray: flip(), corrupt: r.IntN(4) == 0, deaths: flip(), resets: flip(), drains: r.IntN(6) == 0,
		remote: flip(), filters: flip(), caps: flip(), sums: flip(), peeks: flip(), waits: r.IntN(4) > 0, aborts: flip(), jumps: flip(),
		twice: r.IntN(4) == 0,
	}
	pages := int64(pick(2, 3, 5, 8, 16, 24, 32, 48, 64, 64, 64))
	extent := int64(pick(1, 2, 2, 4, 4, 8, 16, 64))
	o.core = Options{
		Size: pages * PageSize, ExtentBytes: extent * PageSize,
		ReservePercent: pick(-1, 10, 30), OverduePercent: pick(1, 10, 50, 100), InflightPercent: pick(20, 50, 100, 100),
		LookupTimeout: 400, ProbeTimeout: 100, PromoteTimeout: 200, CascadeTimeout: 300, ReservationTimeout: 300,
		DistrustFor: 250, UnboundStoreTimeout: 500, FactFor: 80,
		FactsMax: pick(4, 16, 4096, 4096, 4096), RequestsMax: pick(2, 4, 64), ReportReleases: true, Salt: r.Uint64(),
	}
	// Several groups with windows and blocks of several sizes, which take
	// extents from each other.
	hybrid := r.IntN(3) == 0
	fits := min(pages, extent)
	for range 1 + r.IntN(2) {
		var groups []block.Group
		n := pick(1, 1, 2, 3)
		if hybrid {
			n = pick(2, 2, 3)
		}
		for range n {
			g := block.Group{Kind: block.KindFull, TokensPerBlock: uint32(pick(1, 2, 2, 3, 4)), BlockBytes: uint64(1+r.Int64N(min(3, fits)))*PageSize - uint64(r.IntN(3)*100)}
			if r.IntN(3) == 0 || hybrid && len(groups) != 1 {
				g.Kind, g.WindowBlocks = block.KindWindow, uint32(1+r.IntN(5))
			}
			if hybrid {
				g.TokensPerBlock = uint32(pick(1, 1, 2))
			}
			groups = append(groups, g)
		}
		o.spaces = append(o.spaces, groups)
	}
	for i := range r.IntN(4) {
		o.tiers = append(o.tiers, simMode(r.IntN(int(modeCount))))
		o.core.Tiers = append(o.core.Tiers, TierFacts{
			Name: string(rune('a' + i)), Medium: []string{tier.MediumCPU, tier.MediumStorage}[r.IntN(2)],
			Locality: []string{tier.LocalityLocal, tier.LocalityRemote}[r.IntN(2)], ReadBlocksMax: pick(1, 3, 100), WriteBlocksMax: pick(1, 3, 100),
		})
	}
	return o
}

func newWorld(seed uint64, loud bool, mod func(*modelOptions)) *world {
	pcg := rand.NewPCG(seed, 0x7e88ace)
	r := rand.New(pcg)
	w := &world{seed: seed, pcg: pcg, r: r, o: drawOptions(r), loud: loud, every: 1, now: 1, byCore: map[*request]*simReq{}, probing: map[factKey]bool{},
		failed: map[factKey]Time{}, promos: map[simKey]bool{}, waits: map[WaitID]*simWait{}, finished: map[string]int{}}
	if mod != nil {
		mod(&w.o)
	}
	for i := range w.o.tiers {
		st := &simTier{mode: w.o.tiers[i], has: map[simKey]bool{}, belief: map[simKey]tier.Presence{}}
		w.tiers = append(w.tiers, st)
		if st.mode != modeProbe {
			w.o.core.Tiers[i].Known = st.known
		}
	}
	var err error
	if w.c, err = New(w.o.core); err != nil {
		w.fail("new: %v", err)
	}
	w.o.core = w.c.opt
	pages := w.o.core.Size / PageSize
	w.mem, w.claims, w.gens = make([]uint64, pages), make([]claim, pages), make([]uint32, pages)
	for _, groups := range w.o.spaces {
		id, err := w.c.OpenNamespace(groups)
		if err != nil {
			w.fail("open namespace: %v", err)
		}
		sp := &simSpace{id: id, groups: groups, keys: make([][][]block.Key, len(groups))}
		for g := range groups {
			sp.stride = append(sp.stride, uint32(StridePages(groups[g].BlockBytes)))
			sp.keys[g] = make([][]block.Key, w.o.chains)
			for ch := range w.o.chains {
				tpb := int(groups[g].TokensPerBlock)
				for i := range w.o.maxTokens/tpb + 2 {
					of := ch // chains share what lies before their fork
					if fork := w.o.maxTokens * ch / (w.o.chains + 1); (i+1)*tpb <= fork {
						of = 0
					}
					sp.keys[g][ch] = append(sp.keys[g][ch], key(of*1000+i, g))
				}
			}
		}
		w.spaces = append(w.spaces, sp)
	}
	if w.chance(75) { // a node starts over tiers that have much already
		for _, st := range w.tiers {
			for _, sp := range w.spaces {
				for g := range sp.keys {
					for _, chain := range sp.keys[g] {
						for i := range chain {
							if k := (simKey{sp.id, chain[i]}); w.chance(90) {
								st.has[k], st.belief[k] = true, tier.Present
							}
						}
					}
				}
			}
		}
	}
	return w
}

func (t *simTier) known(ns NamespaceID, keys []block.Key, out []tier.Presence) {
	for i := range keys {
		k := simKey{ns, keys[i]}
		switch {
		case t.mode == modeStale:
			out[i] = t.belief[k]
		case t.has[k]:
			out[i] = tier.Present
		default:
			out[i] = tier.Absent
		}
	}
}

func (w *world) fail(format string, a ...any) { panic(failure(fmt.Sprintf(format, a...))) }

func (w *world) note(format string, a ...any) {
	if w.loud {
		w.log = append(w.log, fmt.Sprintf("%6d t=%d ", w.op, w.now)+fmt.Sprintf(format, a...))
	}
}

func (w *world) mix(v ...uint64) {
	for _, x := range v {
		w.hash = (w.hash ^ x) * 0x9e3779b97f4a7c15
		w.hash ^= w.hash >> 29
	}
}

func (w *world) chance(percent int) bool { return w.r.IntN(100) < percent }

func oneOf[T any](w *world, list []T) (v T, ok bool) {
	if len(list) == 0 {
		return v, false
	}
	return list[w.r.IntN(len(list))], true
}

// --- memory and claims ---

func (w *world) strideOf(sp *simSpace, k *block.Key) uint32 { return sp.stride[k.Group()] }

func (w *world) space(ns NamespaceID) *simSpace { return w.spaces[ns-1] }

func (w *world) fill(s Slot, stride uint32, f func(i uint32) uint64) {
	for i := range stride {
		w.mem[uint32(s)+i] = f(i)
	}
}

func (w *world) garbage(s Slot, stride uint32) {
	w.fill(s, stride, func(uint32) uint64 { return w.r.Uint64() &^ 1 })
}

func (w *world) write(s Slot, k simKey) {
	w.fill(s, w.strideOf(w.space(k.ns), &k.key), func(i uint32) uint64 { return content(k, i) })
}

func (w *world) wantContent(what string, s Slot, k simKey) {
	for i := range w.strideOf(w.space(k.ns), &k.key) {
		if w.mem[uint32(s)+i] != content(k, i) {
			w.fail("bytes-match-key: %s of %s in slot %d: page %d has other bytes", what, k.key, s, i)
		}
	}
}

// handOut checks that a slot which changes owner is touched by nobody.
func (w *world) handOut(s Slot, stride uint32, writer int32) {
	for i := range stride {
		c := &w.claims[uint32(s)+i]
		if c.readers != 0 || c.writer != 0 {
			w.fail("slot %d changes owner while its page %d has %d readers and writer %d", s, i, c.readers, c.writer)
		}
		c.writer = writer
	}
	w.garbage(s, stride)
}

// generation checks that a slot that is handed out is a new one by its name.
func (w *world) generation(s Slot, gen uint32) {
	if gen <= w.gens[s] {
		w.fail("generation-grows: slot %d is handed out as generation %d after %d", s, gen, w.gens[s])
	}
	w.gens[s] = gen
}

func (w *world) endWrite(s Slot, stride uint32, writer int32) {
	for i := range stride {
		c := &w.claims[uint32(s)+i]
		if c.writer != writer {
			w.fail("slot %d page %d has writer %d, want %d", s, i, c.writer, writer)
		}
		c.writer = 0
	}
}

func (w *world) readers(s Slot, stride uint32, by int32) {
	for i := range stride {
		c := &w.claims[uint32(s)+i]
		if c.writer != 0 && by > 0 {
			w.fail("slot %d page %d is read while writer %d may write it", s, i, c.writer)
		}
		c.readers += by
	}
}

// lease registers what the engine may read from now on.
func (w *world) lease(q *simReq, k simKey, s Slot, gen uint32) {
	w.wantContent("lease", s, k)
	w.hits++
	for _, l := range q.leases {
		if l.slot == s {
			if l.gen != gen {
				w.fail("generation-grows: slot %d is leased as generation %d and %d", s, l.gen, gen)
			}
			return
		}
	}
	w.readers(s, w.strideOf(q.s.sp, &k.key), 1)
	q.leases = append(q.leases, simLease{s, gen})
}

func (w *world) endLease(q *simReq, i int) {
	l := q.leases[i]
	w.readers(l.slot, w.c.classOf(l.slot).stride, -1)
	q.leases = slices.Delete(q.leases, i, i+1)
}

func (w *world) endLeases(q *simReq) {
	for len(q.leases) > 0 {
		l := q.leases[len(q.leases)-1]
		if e := w.c.lookAt(l.slot); e == nil || e.gen != l.gen || w.c.findPin(q.q, l.slot) == 0 {
			w.fail("slot %d is leased to request %q and not pinned", l.slot, q.name)
		}
		w.endLease(q, len(q.leases)-1)
	}
}

// --- the life of requests ---

func (s *simSession) find(name string) *simReq {
	for _, q := range s.cur {
		if q.name == name {
			return q
		}
	}
	for i := len(s.old) - 1; i >= 0; i-- { // the newest that is not gone
		if s.old[i].name == name {
			return s.old[i]
		}
	}
	return nil
}

func remove[T comparable](list []T, v T) []T {
	if i := slices.Index(list, v); i >= 0 {
		return slices.Delete(list, i, i+1)
	}
	return list
}

// settleReq lets a finishing request go when the core must have.
func (w *world) settleReq(q *simReq) {
	if q.state != simFinishing || q.outstanding > 0 {
		return
	}
	q.state = simGone
	q.s.cur, q.s.old = remove(q.s.cur, q), remove(q.s.old, q)
	w.over(q)
	if q.hand == 0 {
		w.dropReq(q)
	}
}

// over notes that tiers are to hear of a request's end: it is finalised and
// none of its stores waits to be submitted.
func (w *world) over(q *simReq) {
	if q.state == simGone && q.waiting == 0 {
		w.finished[fmt.Sprint(q.s.id, q.name)]++
	}
}

// await notes that stored blocks are to be written to the tiers that the request
// allows, in the order given.
func (w *world) await(q *simReq, fills []*simFill) {
	for t := range w.tiers {
		if !naiveMatch(q.p.StoreTiers, w.o.core.Tiers[t]) {
			continue
		}
		for _, f := range fills {
			w.tiers[t].waiting = append(w.tiers[t].waiting, simWaiting{q, f.slot, f.gen, w.now + Time(w.o.core.CascadeTimeout)})
			q.cascades++
			q.waiting++
		}
	}
}

// syncWaiting compares what waits for each tier: some of the first may have been
// submitted, or dropped for a reason.
func (w *world) syncWaiting() {
	for t, st := range w.tiers {
		var started []Slot
		for _, e := range w.fx {
			if j, ok := e.(StartJob); ok && j.Kind == Cascade && j.Tier == t {
				for _, b := range j.Blocks {
					started = append(started, b.Slot)
				}
			}
		}
		ts := &w.c.tiers[t]
		n := len(st.waiting) - len(ts.waiting)
		if n < 0 {
			w.fail("%d blocks wait for tier %d, want at most %d", len(ts.waiting), t, len(st.waiting))
		}
		for i, b := range st.waiting[n:] {
			if c := ts.waiting[i]; c.slot != b.slot || c.gen != b.gen || c.until != b.until {
				w.fail("block %d that waits for tier %d is in slot %d, want %d", i, t, c.slot, b.slot)
			}
		}
		for _, b := range st.waiting[:n] {
			if b.q.waiting--; b.q.waiting == 0 {
				w.over(b.q)
			}
			if len(started) > 0 && started[0] == b.slot && w.c.at(b.slot).gen == b.gen {
				started = started[1:]
				continue
			}
			b.q.cascades--
			e := w.c.lookAt(b.slot)
			there := e != nil && e.gen == b.gen && e.state == slotResident
			if up := ts.up(Cascade, w.c.overdueMax()); there && up && b.until > w.now {
				w.fail("the cascade of slot %d to tier %d was dropped for no reason", b.slot, t)
			}
		}
		if len(started) > 0 {
			w.fail("a cascade to tier %d of slot %d, which did not wait for it, or not in this order", t, started[0])
		}
		st.waiting = append(st.waiting[:0], st.waiting[n:]...)
	}
}

func (w *world) dropReq(q *simReq) {
	w.endLeases(q)
	q.hand, q.kept = 0, nil
	if q.state == simGone {
		w.reqs = remove(w.reqs, q)
		w.gone = append(w.gone, q)
	}
}

// ready tells those that keep a block for their hand-over that it is readable.
func (w *world) ready(k simKey) {
	for _, q := range w.reqs {
		for i := 0; i < len(q.kept); i++ {
			if q.kept[i] != k {
				continue
			}
			q.kept = slices.Delete(q.kept, i, i+1)
			i--
			if q.state == simActive || q.hand > 0 {
				w.keep(q, k)
			}
		}
	}
}

// keep says that a remote_decoder request must have a pin on a block.
func (w *world) keep(q *simReq, k simKey) {
	s, e := w.naive(k)
	if e == nil || e.state != slotResident || w.c.findPin(q.q, s) == 0 {
		w.fail("request %q keeps its blocks for a hand-over, but not %s", q.name, k.key)
	}
	w.lease(q, k, s, e.gen)
}

func (w *world) dropKept(k simKey) {
	for _, q := range w.reqs {
		q.kept = slices.DeleteFunc(q.kept, func(o simKey) bool { return o == k })
	}
}

// --- effects ---

// take fetches the effects of a call. Slots that became free are told first:
// they may be taken again by what comes after.
func (w *world) take() {
	w.fx = w.c.TakeEffects(w.fx[:0])
	for i, e := range w.fx {
		rel, ok := e.(ReleasedSlots)
		if !ok {
			continue
		}
		if i != 0 {
			w.fail("released slots are told after effect %T, which may have begun to use them", w.fx[0])
		}
		for _, s := range rel.Slots {
			if c := w.claims[s]; c.readers != 0 || c.writer != 0 {
				w.fail("slot %d is free while it has %d readers and writer %d", s, c.readers, c.writer)
			}
			w.mem[s] = 0xCCCC
		}
	}
}

func (w *world) perform() {
	w.started = w.started[:0]
	w.syncWaiting()
	for _, e := range w.fx {
		switch e := e.(type) {
		case StartJob:
			w.startJob(e)
		case CancelJob:
			i := slices.IndexFunc(w.jobs, func(j *simJob) bool { return j.ID == e.ID })
			if i < 0 {
				w.fail("cancel of job %d, which is not under way", e.ID)
			}
			w.jobs[i].canceled = true
		case ComputeSum:
			for _, s := range w.sums {
				if s.fill.slot == e.Slot && s.fill.gen == e.Gen {
					s.e = e
				}
			}
		case AnswerLookup:
			wt := w.waits[e.Wait]
			if wt == nil || wt.kind != waitLookup {
				w.fail("answer to lookup %d, which nobody waits for", e.Wait)
			}
			delete(w.waits, e.Wait)
			w.note("answer to lookup %d: void=%v tokens=%d", e.Wait, e.Answer.Void, e.Answer.Tokens)
			w.mix(uint64(e.Wait), uint64(e.Answer.Tokens))
			wt.q.wait = 0
			if e.Answer.Void {
				continue
			}
			if !e.Answer.Final {
				w.fail("lookup %d waited and its answer is not final", e.Wait)
			}
			wt.q.bound = 0
			w.checkAnswer(wt.q, wt.keys, e.Answer, false)
			if n := w.hitTokens(wt.q, wt.keys); n > e.Answer.Tokens {
				w.fail("lookup %d is answered with %d tokens, %d are readable", e.Wait, e.Answer.Tokens, n)
			}
		case AnswerFlush:
			wt := w.waits[e.Wait]
			if wt == nil || wt.kind != waitFlush {
				w.fail("answer to flush %d, which nobody waits for", e.Wait)
			}
			delete(w.waits, e.Wait)
			w.checkFlushed(wt.q, e.Flushed, wt.bound)
		case AnswerReset:
			wt := w.waits[e.Wait]
			if wt == nil || wt.kind != waitReset {
				w.fail("answer to reset %d, which nobody waits for", e.Wait)
			}
			delete(w.waits, e.Wait)
			if e.Done != (w.resets == 0) || !e.Done && wt.bound > w.now {
				w.fail("reset answered done=%v with %d jobs still under way, bound %d", e.Done, w.resets, wt.bound)
			}
			w.resetID, w.resets = 0, 0
			for _, j := range w.jobs {
				j.inReset = false
			}
		case RequestFinished:
			k := fmt.Sprint(e.Session, e.Request)
			if w.finished[k]--; w.finished[k] < 0 {
				w.fail("request %q is told as finished while it has stores, or twice", e.Request)
			}
			if w.finished[k] == 0 {
				delete(w.finished, k)
			}
		case ReleasedSlots:
		default:
			w.fail("unknown effect %T", e)
		}
	}
	w.gone = slices.DeleteFunc(w.gone, func(q *simReq) bool {
		if q.waiting == 0 {
			delete(w.byCore, q.q)
		}
		return q.waiting == 0
	})
	if len(w.finished) > 0 {
		w.fail("tiers were not told of the end of %v", w.finished)
	}
}

func (w *world) startJob(e StartJob) {
	w.note("  start %v job %d on tier %d: %d blocks, until %d", e.Kind, e.ID, e.Tier, len(e.Blocks), e.Deadline)
	w.mix(uint64(e.ID), uint64(e.Kind), uint64(len(e.Blocks)), uint64(e.Deadline))
	if len(e.Blocks) == 0 || slices.Contains(w.ended, e.ID) || slices.ContainsFunc(w.jobs, func(j *simJob) bool { return j.ID == e.ID }) {
		w.fail("job %d of %d blocks: empty, or the id is used again", e.ID, len(e.Blocks))
	}
	if w.draining && e.Kind != Cascade {
		w.fail("%v job %d is started while draining", e.Kind, e.ID)
	}
	j := &simJob{StartJob: e, core: w.c.jobs[e.ID], reported: make([]bool, len(e.Blocks)), left: len(e.Blocks)}
	t := w.tiers[e.Tier]
	facts := w.o.core.Tiers[e.Tier]
	for i, b := range e.Blocks {
		k := simKey{e.NS, b.Key}
		fk := factKey{uint8(e.Tier), e.NS, 0, b.Key}
		stride := w.strideOf(w.space(e.NS), &b.Key)
		j.stride = append(j.stride, stride)
		w.mix(uint64(b.Slot), content(k, 0))
		switch e.Kind {
		case Promotion:
			w.handOut(b.Slot, stride, writerJob)
			w.generation(b.Slot, w.c.at(b.Slot).gen)
			w.started = append(w.started, b.Slot)
			if w.promos[k] {
				w.fail("block %s is promoted twice at once", b.Key)
			}
			w.promos[k] = true
			if until := w.failed[fk]; until > w.now && w.o.core.FactsMax > 1000 {
				w.fail("block %s is read from tier %d again before %d, though a read of it has failed", b.Key, e.Tier, until)
			}
			if t.reading++; t.reading > facts.ReadBlocksMax {
				w.fail("tier %d has %d blocks to read, its credit is %d", e.Tier, t.reading, facts.ReadBlocksMax)
			}
			t.inflight += int64(stride)
		case Cascade:
			w.wantContent("cascade", b.Slot, k)
			if b.Sum != content(k, 0) {
				w.fail("cascade of %s with another checksum", b.Key)
			}
			w.readers(b.Slot, stride, 1)
			q := w.byCore[j.core.blocks[i].q]
			if q == nil || !q.q.storesTo(e.Tier) {
				w.fail("cascade of %s to tier %d for nobody, or against its filter", b.Key, e.Tier)
			}
			j.q = append(j.q, q)
			if t.writing++; t.writing > facts.WriteBlocksMax {
				w.fail("tier %d has %d blocks to write, its credit is %d", e.Tier, t.writing, facts.WriteBlocksMax)
			}
			t.inflight += int64(stride)
		case ProbeJob:
			if w.probing[fk] {
				w.fail("key %s is probed twice at once on tier %d", b.Key, e.Tier)
			}
			w.probing[fk] = true
		}
	}
	// A tier may hold its share of the region, or one block.
	most := w.o.core.Size * int64(w.o.core.InflightPercent) / 100
	if e.Kind == Cascade {
		most /= 2
	}
	if n := t.inflight * PageSize; e.Kind != ProbeJob && n > int64(j.stride[0])*PageSize && n > most {
		w.fail("tier %d has %d bytes in flight, more than %d %% of the region", e.Tier, n, w.o.core.InflightPercent)
	}
	w.jobs = append(w.jobs, j)
}

func (q *request) storesTo(t int) bool { return q.store>>t&1 == 1 }

func (w *world) checkFlushed(q *simReq, f Flushed, bound Time) {
	if f.Done {
		if q.outstanding > 0 || q.cascades > 0 {
			w.fail("flush of %q is done with %d stores and %d cascades pending", q.name, q.outstanding, q.cascades)
		}
		if n := q.committed * q.allow; f.Cascaded+f.Failed != n {
			w.fail("flush of %q tells of %d writes and %d failures, %d were due", q.name, f.Cascaded, f.Failed, n)
		}
	} else if bound > w.now && !q.s.dead {
		w.fail("flush of %q is given up at %d, before its bound %d", q.name, w.now, bound)
	}
}

// --- operations ---

// operations with their weights of 1000.
var operations = []struct {
	weight int
	do     func(*world)
}{
	{130, (*world).doNewRequest},
	{160, (*world).doLookup},
	{90, (*world).doReserve},
	{110, (*world).doGiveBack},
	{30, (*world).doPin},
	{40, (*world).doUnpin},
	{10, (*world).doTouch},
	{110, (*world).doFinish},
	{20, (*world).doFlush},
	{150, (*world).doJob},
	{30, (*world).doSum},
	{50, (*world).doTick},
	{20, (*world).doTier},
	{10, (*world).doSessions},
	{2, (*world).doReset},
	{10, (*world).doStray},
	{10, (*world).doInvalid},
	{17, (*world).doScribble},
	{1, (*world).quiesce},
}

// step does one operation and checks what can be checked at small cost. Its
// random choices depend on its number, so that a step which is left out leaves
// those after it as alike as can be.
func (w *world) step(n int) {
	w.op = n
	w.pcg.Seed(w.seed, uint64(n)*0x9e3779b97f4a7c15)
	w.now += Time(w.r.IntN(4))
	if w.o.sabotage != honest && !w.broken && w.op > 200 {
		w.doSabotage()
	}
	draw := w.r.IntN(1000)
	for _, o := range operations {
		if draw -= o.weight; draw < 0 {
			o.do(w)
			break
		}
	}
	for id, wt := range w.waits {
		if wt.kind == waitFlush && wt.q.outstanding == 0 && wt.q.cascades == 0 {
			w.fail("flush %d of %q is not answered, though nothing is pending", id, wt.q.name)
		}
	}
	if w.op%w.every == 0 {
		w.checkAll()
	}
}

func (w *world) checkAll() {
	if err := w.c.CheckInvariants(); err != nil {
		w.fail("%v", err)
	}
	p := w.c.Pending()
	if lookups := len(w.waits) - btoi(w.resetID != 0); p.Waits != lookups {
		w.fail("%d waits are counted, %d wait", p.Waits, lookups)
	}
	n, fills := 0, len(w.sums)
	for _, s := range w.sessions {
		n += len(s.cur) + len(s.old)
		if !s.dead {
			fills += len(s.fills)
		}
	}
	if p.Requests != n || p.Reservations != fills {
		w.fail("%d requests and %d reservations are counted, there are %d and %d", p.Requests, p.Reservations, n, fills)
	}
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// who picks a session, alive or dead, and a name: mostly of a request that takes
// calls.
func (w *world) who() (*simSession, string, bool) {
	if !slices.ContainsFunc(w.sessions, func(s *simSession) bool { return !s.dead }) {
		w.openSession()
	}
	if q, ok := oneOf(w, w.reqs); ok && q.state == simActive && w.chance(85) {
		return q.s, q.name, true
	}
	s, ok := oneOf(w, w.sessions)
	for n := 0; ok && s.dead && n < 3; n++ {
		s, ok = oneOf(w, w.sessions)
	}
	return s, string(rune('A' + w.r.IntN(w.o.names))), ok
}

// stranger picks any session and any name.
func (w *world) stranger() (*simSession, string, bool) {
	s, ok := oneOf(w, w.sessions)
	return s, string(rune('A' + w.r.IntN(w.o.names))), ok
}

// refusal is the error that a call for a request must get.
func (s *simSession) refusal(name string, active bool) error {
	if s.dead {
		return ErrNoSession
	}
	q := s.find(name)
	switch {
	case q == nil:
		return ErrNoRequest
	case active && q.state != simActive:
		return ErrFinished
	}
	return nil
}

// refused checks a call's error. A call that is refused has changed nothing.
func (w *world) refused(what string, before uint64, got, want error) bool {
	if !errors.Is(got, want) || want == nil && got != nil {
		w.fail("%s: got error %v, want %v", what, got, want)
	}
	if got != nil && (w.print() != before || len(w.c.effects) > 0) {
		w.fail("%s was refused with %v and has changed something", what, got)
	}
	return got != nil
}

// print sums up all that a refused call or a peek must leave alone.
func (w *world) print() uint64 {
	h := uint64(len(w.c.jobs)) + uint64(w.c.pins.Len())<<10 + uint64(w.c.waits)<<20 + uint64(w.c.requests)<<30 + uint64(w.c.nfills)<<40
	add := func(v uint64) { h = (h ^ v) * 0x9e3779b97f4a7c15; h ^= h >> 31 }
	add(uint64(len(w.c.timers.heap)))
	add(uint64(len(w.c.facts)))
	add(uint64(len(w.c.sessions)))
	for x := range w.c.extents {
		e := &w.c.extents[x]
		add(uint64(e.class))
		for i := range e.slots {
			s := &e.slots[i]
			add(uint64(s.gen)<<32 | uint64(s.state)<<24 | uint64(s.pins)<<8 | s.used)
			add(uint64(s.holder)<<32 | uint64(s.node.Prev)<<16 | uint64(s.node.Next)<<8 | uint64(s.node.Meta))
		}
	}
	return h
}

func (w *world) doNewRequest() {
	s, name, ok := w.stranger()
	if !ok {
		return
	}
	want := s.refusal(name, false)
	if errors.Is(want, ErrNoRequest) {
		want = nil
	}
	old := s.find(name)
	switch {
	case want != nil:
	case old != nil && old.state == simActive:
		want = ErrConflict
	case w.draining:
		want = ErrDraining
	case w.kept(s) >= w.o.core.RequestsMax:
		want = ErrTooMany
	}
	p := NoLimits()
	if w.o.remote {
		p.RemoteDecoder = w.chance(25)
	}
	if w.o.filters && w.chance(50) {
		p.LoadTiers = w.filter()
		p.StoreTiers = w.filter()
	}
	if w.o.caps && w.chance(50) {
		p.MaxLoadTokens = int64(w.r.IntN(w.o.maxTokens+8)) - 1
		p.MaxOffloadTokens = int64(w.r.IntN(w.o.maxTokens+8)) - 1
	}
	before := w.print()
	err := w.c.NewRequest(w.now, s.id, name, p)
	w.note("new request %d/%s %+v: %v", s.id, name, p, err)
	if w.refused("new request", before, err, want) {
		return
	}
	w.take()
	if old != nil && slices.Contains(s.cur, old) {
		s.cur = remove(s.cur, old)
		s.old = append(s.old, old)
	}
	q := &simReq{s: s, name: name, p: p, q: w.c.sessions[s.id].requests[name], chain: w.r.IntN(w.o.chains), tokens: 1 + w.r.IntN(w.o.maxTokens)}
	for t := range w.tiers {
		if naiveMatch(p.StoreTiers, w.o.core.Tiers[t]) {
			q.allow++
		}
	}
	s.cur = append(s.cur, q)
	w.reqs = append(w.reqs, q)
	w.byCore[q.q] = q
	w.perform()
}

// kept is how many requests of a session count against its bound.
func (w *world) kept(s *simSession) int {
	n := 0
	for _, q := range w.reqs {
		if q.s == s && (q.state != simGone || q.q.state == reqHandover) {
			n++
		}
	}
	return n
}

func (w *world) filter() []TierFilter {
	if w.chance(30) {
		return nil
	}
	out := []TierFilter{}
	for range w.r.IntN(3) {
		out = append(out, TierFilter{[]string{"", tier.MediumCPU, tier.MediumStorage}[w.r.IntN(3)], []string{"", tier.LocalityLocal, tier.LocalityRemote}[w.r.IntN(3)]})
	}
	return out
}

func naiveMatch(filter []TierFilter, f TierFacts) bool {
	if filter == nil {
		return true
	}
	for _, e := range filter {
		if (e.Medium == "" || e.Medium == f.Medium) && (e.Locality == "" || e.Locality == f.Locality) {
			return true
		}
	}
	return false
}

// prompt is the lists of keys that a request asks for.
func (w *world) prompt(q *simReq, chain, tokens int) [][]block.Key {
	var out [][]block.Key
	for g := range q.s.sp.groups {
		all := q.s.sp.keys[g][chain]
		n := min(len(all), tokens/int(q.s.sp.groups[g].TokensPerBlock))
		if w.chance(5) {
			n = w.r.IntN(n + 1)
		}
		list := all[:n]
		if w.o.twice && n > 1 && w.chance(20) {
			list = slices.Clone(list)
			list[w.r.IntN(n)] = list[w.r.IntN(n)]
		}
		out = append(out, list)
	}
	return out
}

func (w *world) doLookup() {
	s, name, ok := w.who()
	if !ok {
		return
	}
	q := s.find(name)
	want := s.refusal(name, true)
	ask := q
	if ask == nil {
		ask = &simReq{s: s}
	}
	if w.chance(10) {
		ask.chain = w.r.IntN(w.o.chains)
	}
	if w.chance(20) {
		ask.tokens = 1 + w.r.IntN(w.o.maxTokens)
	}
	keys := w.prompt(ask, ask.chain, ask.tokens)
	before := w.print()

	// A peek first: it says what the same lookup has to find.
	pw, err := w.c.Lookup(w.now, s.id, name, keys, LookupOptions{Peek: true, WaitUntil: w.now + 10}, &w.peek)
	if w.refused("peek", before, err, want) {
		return
	}
	if pw != 0 || w.print() != before || len(w.c.effects) > 0 {
		w.fail("a peek has changed something")
	}
	w.checkPeek(q, keys, &w.peek)
	if w.o.peeks && w.chance(30) {
		return
	}
	o := LookupOptions{}
	if w.o.waits && w.chance(60) {
		o.WaitUntil = w.now + Time(w.r.IntN(600)) - 50
	}
	overdue := q.overdue
	var expect []expected
	if overdue {
		expect = w.expect(q, keys, true)
	}
	void := q.wait
	id, err := w.c.Lookup(w.now, s.id, name, keys, o, &w.answer)
	w.note("lookup %d/%s chain %d %v until %d: wait=%d %s", s.id, name, ask.chain, lens(keys), o.WaitUntil, id, w.answer.text())
	if err != nil {
		w.fail("lookup: %v", err)
	}
	w.mix(uint64(id), uint64(w.answer.Tokens))
	w.take()
	a := &w.answer
	q.overdue = false
	switch {
	case id != 0:
		if o.WaitUntil <= w.now || overdue {
			w.fail("a lookup waits though its time is up")
		}
		if q.bound == 0 {
			q.bound = w.now + Time(w.o.core.LookupTimeout)
		}
		kept := make([][]block.Key, len(keys))
		for g := range keys {
			kept[g] = slices.Clone(keys[g])
		}
		w.waits[id] = &simWait{id, waitLookup, q, min(o.WaitUntil, q.bound), kept}
	case a.Final:
		q.bound = 0
		w.checkAnswer(q, keys, a, false)
	default:
		if overdue {
			w.fail("a lookup that is overdue is not final")
		}
		if q.bound == 0 {
			q.bound = w.now + Time(w.o.core.LookupTimeout)
		}
		w.checkAnswer(q, keys, a, false)
	}
	if overdue {
		if w.naiveFit(q, keys, expect) != a.Tokens {
			w.fail("an overdue lookup is answered with %d tokens, want %d", a.Tokens, w.naiveFit(q, keys, expect))
		}
	} else {
		w.checkAgainstPeek(q, keys, &w.peek, a)
	}
	w.perform()
	q.wait = id
	if void != 0 && w.waits[void] != nil {
		w.fail("lookup %d was overtaken and is not answered as void", void)
	}
}

func lens(keys [][]block.Key) (n []int) {
	for _, k := range keys {
		n = append(n, len(k))
	}
	return n
}

func (a *Answer) text() string {
	s := fmt.Sprintf("tokens=%d final=%v", a.Tokens, a.Final)
	for g := range a.Groups {
		s += fmt.Sprintf(" %v@%d", a.Groups[g].Verdicts, a.Groups[g].First)
	}
	return s
}

func (w *world) doReserve() {
	s, name, ok := w.who()
	if !ok {
		return
	}
	q := s.find(name)
	want := s.refusal(name, true)
	if want == nil && w.draining {
		want = ErrDraining
	}
	ask := q
	if ask == nil {
		ask = &simReq{s: s, tokens: 4}
	}
	g := w.r.IntN(len(s.sp.groups))
	tpb := int(s.sp.groups[g].TokensPerBlock)
	all := s.sp.keys[g][ask.chain]
	n := min(len(all), ask.tokens/tpb+1)
	first := w.r.IntN(n)
	keys := all[first : first+w.r.IntN(n-first+1)]
	if w.o.twice && len(keys) > 1 && w.chance(20) {
		keys = slices.Clone(keys)
		keys[len(keys)-1] = keys[0]
	}
	stored := len(keys)
	if q != nil && q.p.MaxOffloadTokens >= 0 {
		stored = max(0, min(stored, int(q.p.MaxOffloadTokens)/tpb-first))
	}
	w.scan()
	need, pinned := 0, map[Slot]bool{}
	type state struct {
		s     Slot
		state slotState
		gen   uint32
	}
	var was []state
	for i := range keys {
		st := state{}
		if sl, e := w.lookIn(simKey{s.sp.id, keys[i]}); e != nil {
			st = state{sl, e.state, e.gen}
			if e.state == slotResident && i < stored {
				pinned[sl] = true
			}
		} else if i < stored {
			need++
		}
		was = append(was, st)
	}
	if want == nil {
		room, largest := w.naiveRoom(w.c.ns[s.sp.id].groups[g].class, useStore, pinned)
		switch {
		case need > 0 && w.expired(s):
			want = ErrNoRoom
			if need > largest {
				want = ErrTooLarge
			}
		case need > largest:
			want = ErrTooLarge
		case need > room:
			want = ErrNoRoom
		}
	}
	before := w.print()
	grants, err := w.c.Reserve(w.now, s.id, name, uint32(g), first, keys, nil)
	w.note("reserve %d/%s group %d chain %d %d+%d: %v %v", s.id, name, g, ask.chain, first, len(keys), grants, err)
	if w.refused("reserve", before, err, want) {
		if len(grants) > 0 {
			w.fail("a refused reserve grants %v", grants)
		}
		return
	}
	w.take()
	if len(grants) != len(keys) {
		w.fail("%d grants for %d keys", len(grants), len(keys))
	}
	granted := map[block.Key]bool{}
	for i, gr := range grants {
		k := simKey{s.sp.id, keys[i]}
		w.mix(uint64(gr.Status), uint64(gr.Slot), uint64(gr.Gen))
		st := Granted
		switch {
		case i >= stored:
			st = GrantCapped
		case was[i].state == slotResident:
			st = GrantPresent
			if sl, e := w.naive(k); sl != was[i].s || e == nil || e.gen != was[i].gen || e.state != slotResident {
				w.fail("a key of the call was its victim: %s", k.key)
			}
		case was[i].state == slotFilling || granted[keys[i]]:
			st = GrantFilling
		}
		if gr.Status != st {
			w.fail("grant %d is %d, want %d", i, gr.Status, st)
		}
		if q.p.RemoteDecoder && st == GrantPresent {
			w.keep(q, k)
		}
		if q.p.RemoteDecoder && st == GrantFilling && !slices.ContainsFunc(q.s.fills, func(f *simFill) bool { return f.q == q && f.key == keys[i] && !f.dropped }) &&
			!slices.ContainsFunc(w.sums, func(f *simSum) bool { return f.fill.q == q && f.fill.key == keys[i] && !f.fill.dropped }) {
			q.kept = append(q.kept, k)
		}
		if st != Granted {
			continue
		}
		granted[keys[i]] = true
		w.handOut(gr.Slot, s.sp.stride[g], writerEngine)
		w.generation(gr.Slot, gr.Gen)
		f := &simFill{q: q, g: g, key: keys[i], slot: gr.Slot, gen: gr.Gen, deadline: w.now + Time(w.o.core.ReservationTimeout)}
		s.fills = append(s.fills, f)
		q.outstanding++
	}
	w.perform()
}

// expired says that a session keeps too much past its deadlines.
func (w *world) expired(s *simSession) bool {
	n := int64(0)
	for _, f := range s.fills {
		if f.late {
			n += int64(w.strideOf(s.sp, &f.key)) * PageSize
		}
	}
	return n > 0 && n >= w.o.core.Size*int64(w.o.core.OverduePercent)/100
}

// doGiveBack commits or aborts some fills, now and then of another request.
func (w *world) doGiveBack() {
	s, name, ok := w.who()
	if !ok {
		return
	}
	if f, ok := oneOf(w, s.fills); ok && w.chance(90) {
		name = f.q.name
	}
	abort := w.o.aborts && w.chance(30)
	var mine []*simFill
	for _, f := range s.fills {
		if f.q.name == name && w.chance(70) || w.chance(2) {
			mine = append(mine, f)
		}
	}
	if w.chance(50) {
		w.r.Shuffle(len(mine), func(i, j int) { mine[i], mine[j] = mine[j], mine[i] })
	}
	if s.dead {
		mine = nil
	}
	want := s.refusal(name, false)
	var fills []Fill
	for _, f := range mine {
		fl := Fill{Slot: f.slot, Gen: f.gen, HasSum: !w.o.sums || w.chance(60)}
		if fl.HasSum && want == nil {
			fl.Sum = content(simKey{s.sp.id, f.key}, 0)
		}
		fills = append(fills, fl)
	}
	twice := len(fills) > 0 && w.chance(5)
	if twice { // the same fill again: the second in the order of work is stale
		fills = append(fills, fills[0])
		mine = append(mine, mine[0])
	}
	if w.chance(5) { // what nobody was granted
		fills = append(fills, Fill{Slot: Slot(w.r.Uint32N(uint32(len(w.mem)) + 10)), Gen: w.r.Uint32N(8)})
		for _, f := range s.fills {
			if f.slot == fills[len(fills)-1].Slot && f.gen == fills[len(fills)-1].Gen {
				fills = fills[:len(fills)-1]
				break
			}
		}
	}
	wants := make([]FillStatus, len(fills))
	done := map[*simFill]bool{}
	visit := func(i int) {
		if i >= len(mine) {
			wants[i] = FillStale
			return
		}
		f := mine[i]
		switch {
		case f.q.name != name || done[f]:
			wants[i] = FillStale
		case f.dropped:
			wants[i], done[f] = FillDropped, true
		default:
			wants[i], done[f] = FillOK, true
		}
	}
	if abort {
		for i := range fills {
			visit(i)
		}
	} else {
		for i := len(fills) - 1; i >= 0; i-- {
			visit(i)
		}
	}
	if want == nil {
		for f := range done { // the engine's writes are over before it says so
			if !abort {
				w.write(f.slot, simKey{s.sp.id, f.key})
			}
			w.endWrite(f.slot, w.strideOf(s.sp, &f.key), writerEngine)
		}
	}
	before := w.print()
	var out []FillStatus
	var err error
	if abort {
		out, err = w.c.Abort(w.now, s.id, name, fills, nil)
	} else {
		out, err = w.c.Commit(w.now, s.id, name, fills, nil)
	}
	w.note("abort=%v %d/%s %v: %v %v", abort, s.id, name, fills, out, err)
	if w.refused("commit", before, err, want) {
		return
	}
	w.take()
	if !slices.Equal(out, wants) {
		w.fail("commit or abort of %v: got %v, want %v", fills, out, wants)
	}
	committed := map[*simReq]bool{}
	var owner *simReq
	var ready []*simFill // of one owner, in prefix order
	submit := func(next *simReq) {
		if owner != nil {
			w.await(owner, ready)
		}
		owner, ready = next, nil
	}
	for i := len(fills) - 1; i >= 0; i-- {
		if i >= len(mine) || !done[mine[i]] || out[i] == FillStale {
			continue
		}
		f := mine[i]
		if !abort && f.q != owner {
			submit(f.q)
		}
		k := simKey{s.sp.id, f.key}
		s.fills = remove(s.fills, f)
		if out[i] == FillDropped || abort {
			if out[i] == FillOK {
				w.dropKept(k)
			}
			f.q.outstanding--
			if !abort {
				committed[f.q] = true
			}
			continue
		}
		committed[f.q] = true
		if !fills[i].HasSum {
			w.readers(f.slot, w.strideOf(s.sp, &f.key), 1)
			w.sums = append(w.sums, &simSum{fill: f})
			continue
		}
		f.q.committed++
		f.q.outstanding--
		ready = slices.Insert(ready, 0, f)
		w.ready(k)
		if f.q.p.RemoteDecoder && (f.q.state == simActive || f.q.hand > 0) {
			w.keep(f.q, k)
		}
	}
	submit(nil)
	for q := range committed {
		if q.p.RemoteDecoder && q.state == simFinishing && q.hand > 0 {
			q.hand = w.now + Time(w.o.core.UnboundStoreTimeout)
		}
	}
	for f := range done {
		w.settleReq(f.q)
	}
	w.perform()
}

func (w *world) doSum() {
	if len(w.sums) == 0 {
		return
	}
	s := w.sums[w.r.IntN(len(w.sums))]
	f, k := s.fill, simKey{s.fill.q.s.sp.id, s.fill.key}
	if s.e.Gen != f.gen || s.e.Key != f.key || s.e.NS != k.ns {
		w.fail("nobody was asked for the checksum of slot %d", f.slot)
	}
	w.wantContent("sum", f.slot, k)
	w.readers(f.slot, w.strideOf(f.q.s.sp, &f.key), -1)
	w.sums = remove(w.sums, s)
	w.note("sum of slot %d gen %d", f.slot, f.gen)
	w.c.SumDone(w.now, f.slot, f.gen, content(k, 0))
	w.take()
	f.q.outstanding--
	if !f.dropped {
		f.q.committed++
		w.await(f.q, []*simFill{f})
		w.ready(k)
		if f.q.p.RemoteDecoder && (f.q.state == simActive || f.q.hand > 0) {
			w.keep(f.q, k)
		}
	}
	w.settleReq(f.q)
	w.perform()
}

func (w *world) doPin() {
	s, name, ok := w.who()
	if !ok {
		return
	}
	q := s.find(name)
	want := s.refusal(name, true)
	var keys []block.Key
	for range 1 + w.r.IntN(4) {
		g := w.r.IntN(len(s.sp.groups))
		k, _ := oneOf(w, s.sp.keys[g][w.r.IntN(w.o.chains)])
		keys = append(keys, k)
	}
	before := w.print()
	leases, err := w.c.Pin(w.now, s.id, name, keys, nil)
	w.note("pin %d/%s: %v %v", s.id, name, leases, err)
	if w.refused("pin", before, err, want) {
		return
	}
	w.take()
	w.scan()
	for i, l := range leases {
		k := simKey{s.sp.id, keys[i]}
		sl, e := w.lookIn(k)
		if (e != nil && e.state == slotResident) != (l.Gen != 0) {
			w.fail("pin of %s: lease %v", keys[i], l)
		}
		if l.Gen != 0 {
			if l.Slot != sl || l.Gen != e.gen || l.Sum != content(k, 0) {
				w.fail("pin of %s: lease %v, slot %d generation %d", keys[i], l, sl, e.gen)
			}
			w.lease(q, k, l.Slot, l.Gen)
		}
	}
	w.perform()
}

func (w *world) doUnpin() {
	s, name, ok := w.who()
	if !ok {
		return
	}
	q := s.find(name)
	want := s.refusal(name, false)
	var leases []Lease
	var wants []FillStatus
	if q != nil {
		for i := len(q.leases) - 1; i >= 0; i-- {
			if w.chance(40) {
				leases = append(leases, Lease{Slot: q.leases[i].slot, Gen: q.leases[i].gen})
				wants = append(wants, FillOK)
				if want == nil {
					w.endLease(q, i)
				}
			}
		}
	}
	if w.chance(30) { // what it does not hold: another's, one given back, a made-up one
		l := Lease{Slot: Slot(w.r.Uint32N(uint32(len(w.mem)) + 3)), Gen: w.r.Uint32N(6)}
		if o, ok := oneOf(w, w.reqs); ok && len(o.leases) > 0 && w.chance(60) {
			l = Lease{Slot: o.leases[0].slot, Gen: o.leases[0].gen}
		}
		mine := slices.ContainsFunc(leases, func(o Lease) bool { return o.Slot == l.Slot })
		if e := w.c.lookAt(l.Slot); e == nil || q == nil || w.c.findPin(q.q, l.Slot) == 0 || mine || e.gen != l.Gen {
			leases = append([]Lease{l}, leases...)
			wants = append([]FillStatus{FillStale}, wants...)
		}
	}
	before := w.print()
	out, err := w.c.Unpin(w.now, s.id, name, leases, nil)
	w.note("unpin %d/%s %v: %v %v", s.id, name, leases, out, err)
	if w.refused("unpin", before, err, want) {
		return
	}
	if !slices.Equal(out, wants) {
		w.fail("unpin of %v: got %v, want %v", leases, out, wants)
	}
	w.take()
	w.perform()
}

func (w *world) doTouch() {
	s, _, ok := w.who()
	if !ok {
		return
	}
	g := w.r.IntN(len(s.sp.groups))
	before := w.print()
	err := w.c.Touch(w.now, s.id, s.sp.keys[g][w.r.IntN(w.o.chains)])
	w.note("touch %d: %v", s.id, err)
	var want error
	if s.dead {
		want = ErrNoSession
	}
	if !w.refused("touch", before, err, want) {
		w.take()
		w.perform()
	}
}

func (w *world) doFinish() {
	s, name, ok := w.who()
	if ok {
		w.finish(s, name)
	}
}

func (w *world) finish(s *simSession, name string) {
	q := s.find(name)
	want := s.refusal(name, true)
	if want == nil && !q.p.RemoteDecoder {
		w.endLeases(q)
	}
	before := w.print()
	err := w.c.Finish(w.now, s.id, name)
	w.note("finish %d/%s: %v", s.id, name, err)
	if w.refused("finish", before, err, want) {
		return
	}
	w.take()
	q.state = simFinishing
	if q.p.RemoteDecoder {
		q.hand = w.now + Time(w.o.core.UnboundStoreTimeout)
	}
	wait := q.wait
	w.settleReq(q)
	w.perform()
	if wait != 0 && w.waits[wait] != nil {
		w.fail("request %q is finished and its lookup %d still waits", name, wait)
	}
}

func (w *world) doFlush() {
	s, name, ok := w.who()
	if !ok {
		return
	}
	q := s.find(name)
	before := w.print()
	until := w.now + Time(w.r.IntN(400)) - 40
	id, done, f, err := w.c.Flush(w.now, s.id, name, until)
	w.note("flush %d/%s until %d: %d %v %+v %v", s.id, name, until, id, done, f, err)
	if w.refused("flush", before, err, s.refusal(name, false)) {
		return
	}
	w.take()
	if (id == 0) != done || done != (until <= w.now || q.outstanding == 0 && q.cascades == 0) {
		w.fail("flush: wait %d, done %v, pending %d and %d", id, done, q.outstanding, q.cascades)
	}
	if done {
		w.checkFlushed(q, f, until)
	} else {
		w.waits[id] = &simWait{id: id, kind: waitFlush, q: q, bound: until}
	}
	w.perform()
}

func (w *world) doJob() {
	if len(w.jobs) == 0 {
		return
	}
	j := w.jobs[w.r.IntN(len(w.jobs))]
	if j.Kind == ProbeJob {
		w.report(j, nil)
		return
	}
	var at []int
	all := w.chance(40)
	for i := range j.Blocks {
		if !j.reported[i] && (all || w.chance(40)) {
			at = append(at, i)
		}
	}
	w.r.Shuffle(len(at), func(a, b int) { at[a], at[b] = at[b], at[a] })
	w.report(j, at)
}

// report ends a probe, or some blocks of a job: their I/O is over.
func (w *world) report(j *simJob, at []int) {
	t := w.tiers[j.Tier]
	before := w.c.stats.ForeignResults
	foreign := int64(0)
	if j.Kind == ProbeJob {
		found, ok := make([]bool, len(j.Blocks)), !w.o.faults || !w.chance(15)
		for i, b := range j.Blocks {
			found[i] = t.has[simKey{j.NS, b.Key}]
		}
		if ok && w.o.stray && w.chance(5) { // malformed: as if it had not come
			w.c.ProbeResult(w.now, j.ID, found[:len(found)-1], true)
			w.take()
			w.perform()
			foreign++
			if w.c.stats.ForeignResults != before+foreign {
				w.fail("a malformed probe result is not counted")
			}
		}
		w.note("probe %d on tier %d: %v ok=%v", j.ID, j.Tier, found, ok)
		if j.settled {
			foreign++
		} else {
			w.unprobe(j)
		}
		w.end(j)
		w.c.ProbeResult(w.now, j.ID, found, ok)
		w.take()
		if w.c.stats.ForeignResults != before+foreign {
			w.fail("probe result %d: %d results are counted as foreign, want %d", j.ID, w.c.stats.ForeignResults-before, foreign)
		}
		w.perform()
		return
	}
	type promised struct {
		q *simReq
		s Slot
	}
	var res []JobResult
	var done, gone []simKey
	var wanted []promised
	late, corrupt := int64(0), []JobBlock{}
	for _, i := range at {
		b := j.Blocks[i]
		k := simKey{j.NS, b.Key}
		fk := factKey{uint8(j.Tier), j.NS, 0, b.Key}
		r := JobResult{Index: i}
		bad := func(class tier.Class, cause tier.Cause) { r.Outcome, r.Class, r.Cause = Failed, class, cause }
		switch {
		case w.o.cancels && (j.canceled && w.chance(50) || w.chance(3)):
			r.Outcome, r.Class = Cancelled, tier.ClassCancelled
		case w.o.faults && w.chance(15):
			bad([]tier.Class{tier.ClassRetryable, tier.ClassPermanent, tier.ClassCorrupt}[w.r.IntN(3)], tier.Causes()[w.r.IntN(int(tier.CauseSource))])
		case j.Kind == Cascade && w.o.corrupt && w.chance(5):
			bad(tier.ClassPermanent, tier.CauseSource)
			corrupt = append(corrupt, b)
		case j.Kind == Promotion && !t.has[k]:
			bad(tier.ClassNotFound, tier.CauseOther)
		}
		if j.Kind == Promotion {
			if r.Outcome == Done {
				w.write(b.Slot, k)
				r.Sum = content(k, 0)
			} else {
				w.garbage(b.Slot, j.stride[i])
			}
			w.endWrite(b.Slot, j.stride[i], writerJob)
			t.reading--
			t.inflight -= int64(j.stride[i])
			if !j.settled {
				delete(w.promos, k)
				if r.Outcome == Done {
					done = append(done, k)
					for _, n := range w.c.fills[w.c.at(b.Slot).holder].wanted {
						if n.epoch == n.q.epoch {
							wanted = append(wanted, promised{w.byCore[n.q], b.Slot})
						}
					}
				} else {
					gone = append(gone, k)
					w.loadFailed(fk)
				}
			}
		} else {
			w.wantContent("write", b.Slot, k)
			w.readers(b.Slot, j.stride[i], -1)
			t.writing--
			t.inflight -= int64(j.stride[i])
			if r.Outcome == Done {
				t.has[k] = true
				t.belief[k] = tier.Present
			}
			if !j.settled {
				j.q[i].cascades--
				if r.Outcome == Done && !w.probing[fk] {
					delete(w.failed, fk)
				}
			}
		}
		if j.settled {
			late++
		}
		j.reported[i] = true
		j.left--
		res = append(res, r)
		if w.o.stray && w.chance(5) {
			res = append(res, r, JobResult{Index: -1}, JobResult{Index: len(j.Blocks)})
			foreign += 3
		}
	}
	w.note("job %d: %v", j.ID, res)
	if j.left == 0 {
		w.end(j)
		if j.inReset {
			w.resets--
		}
	}
	wasLate := w.c.tiers[j.Tier].stats.Late
	w.c.JobResults(w.now, j.ID, res)
	w.take()
	if n := w.c.stats.ForeignResults - before; n != foreign {
		w.fail("job %d: %d results are counted as foreign, want %d", j.ID, n, foreign)
	}
	if n := w.c.tiers[j.Tier].stats.Late - wasLate; n != late {
		w.fail("job %d: %d results are counted as late, want %d", j.ID, n, late)
	}
	for _, b := range corrupt {
		if e := w.c.at(b.Slot); e.state == slotResident && e.key == b.Key && !slices.Contains(done, simKey{j.NS, b.Key}) {
			w.fail("block %s does not match its checksum and is still there", b.Key)
		}
	}
	// A block is pinned for those who wait for it in the step that makes it
	// readable, until they have their answer: nothing is read twice before use.
	for _, p := range wanted {
		if !slices.ContainsFunc(w.fx, func(e Effect) bool { a, ok := e.(AnswerLookup); return ok && a.Wait == p.q.wait }) && w.c.findPin(p.q.q, p.s) == 0 {
			w.fail("slot %d was read for request %q and is not pinned for it", p.s, p.q.name)
		}
	}
	for _, k := range done {
		w.ready(k)
	}
	for _, k := range gone {
		w.dropKept(k)
	}
	w.perform()
}

func (w *world) end(j *simJob) {
	w.jobs = remove(w.jobs, j)
	if w.ended = append(w.ended, j.ID); len(w.ended) > 50 {
		w.ended = slices.Delete(w.ended, 0, 10)
	}
}

func (w *world) loadFailed(fk factKey) {
	if f := w.c.facts[fk]; f == nil || f.state != factProbing {
		w.failed[fk] = w.now + Time(w.o.core.DistrustFor)
	}
}

func (w *world) unprobe(j *simJob) {
	for _, b := range j.Blocks {
		delete(w.probing, factKey{uint8(j.Tier), j.NS, 0, b.Key})
	}
}

func (w *world) doTick() {
	w.now += Time(w.r.IntN(30))
	if w.o.jumps && w.chance(20) {
		w.now += Time(w.r.IntN(700))
	}
	w.tick()
}

func (w *world) tick() {
	for _, s := range w.sessions {
		for _, f := range s.fills {
			if !s.dead && !f.dropped && f.deadline <= w.now {
				f.dropped, f.late = true, true
				w.dropKept(simKey{s.sp.id, f.key})
			}
		}
	}
	for _, q := range slices.Clone(w.reqs) {
		if q.hand > 0 && q.hand <= w.now {
			w.dropReq(q)
		}
		if q.bound > 0 && q.bound <= w.now && q.wait == 0 {
			q.bound, q.overdue = 0, true
		}
	}
	for _, j := range w.jobs {
		if j.settled || j.Deadline > w.now {
			continue
		}
		j.settled = true
		if j.Kind == ProbeJob {
			w.unprobe(j)
			continue
		}
		for i, b := range j.Blocks {
			if j.reported[i] {
				continue
			}
			if j.Kind == Cascade {
				j.q[i].cascades--
				continue
			}
			delete(w.promos, simKey{j.NS, b.Key})
			w.dropKept(simKey{j.NS, b.Key})
			w.loadFailed(factKey{uint8(j.Tier), j.NS, 0, b.Key})
		}
	}
	w.note("tick")
	w.c.Tick(w.now)
	w.take()
	for _, q := range slices.Clone(w.reqs) {
		w.settleReq(q)
	}
	w.perform()
	next := w.c.NextDeadline()
	if next != 0 && next <= w.now {
		w.fail("after a tick at %d something is due at %d", w.now, next)
	}
	for id, wt := range w.waits {
		if wt.bound <= w.now || next == 0 || next > wt.bound {
			w.fail("wait %d (kind %d) has the bound %d; it is %d, the next deadline is %d", id, wt.kind, wt.bound, w.now, next)
		}
	}
	for _, j := range w.jobs {
		if j.Kind != ProbeJob && j.Deadline <= w.now && j.core.open > 0 {
			w.fail("job %d is past its deadline and has %d blocks without an outcome", j.ID, j.core.open)
		}
	}
}

// doTier changes what a tier has, knows or says of its health.
func (w *world) doTier() {
	if len(w.tiers) == 0 {
		return
	}
	i := w.r.IntN(len(w.tiers))
	t := w.tiers[i]
	if w.o.faults && w.chance(15) {
		read, write := w.chance(85), w.chance(85)
		w.note("tier %d health %v %v", i, read, write)
		w.c.TierHealth(w.now, i, read, write)
		w.take()
		w.perform()
		return
	}
	sp := w.spaces[w.r.IntN(len(w.spaces))]
	g := w.r.IntN(len(sp.groups))
	for _, kk := range sp.keys[g][w.r.IntN(w.o.chains)] {
		if k := (simKey{sp.id, kk}); w.chance(40) {
			switch w.r.IntN(8) {
			case 0:
				delete(t.has, k)
			case 1, 2, 3:
				t.has[k] = true // another node wrote it
			case 4:
				delete(t.belief, k)
			default:
				t.belief[k] = tier.Absent
				if t.has[k] {
					t.belief[k] = tier.Present
				}
			}
		}
	}
}

func (w *world) doSessions() {
	alive := 0
	for _, s := range w.sessions {
		alive += btoi(!s.dead)
	}
	s, ok := oneOf(w, w.sessions)
	switch {
	case alive < w.o.sessions:
		w.openSession()
	case ok && s.dead:
		w.quiet(s)
	case ok && w.o.deaths:
		w.kill(s)
	}
}

func (w *world) openSession() {
	sp := w.spaces[w.r.IntN(len(w.spaces))]
	id, err := w.c.OpenSession(sp.id)
	w.note("open session %d: %v", id, err)
	if w.draining {
		if !errors.Is(err, ErrDraining) {
			w.fail("a session opens while draining: %v", err)
		}
		return
	}
	if err != nil {
		w.fail("open session: %v", err)
	}
	w.sessions = append(w.sessions, &simSession{id: id, sp: sp})
}

func (w *world) kill(s *simSession) {
	var waiting []WaitID
	for _, q := range slices.Clone(w.reqs) {
		if q.s != s {
			continue
		}
		w.endLeases(q)
		if q.wait != 0 {
			waiting = append(waiting, q.wait)
		}
		if q.state == simGone {
			w.dropReq(q) // a hand-over
			continue
		}
		q.state, q.hand, q.kept = simFinishing, 0, nil
		for _, f := range s.fills {
			if f.q == q {
				q.outstanding--
			}
		}
		w.settleReq(q)
	}
	for _, f := range s.fills {
		if !f.dropped {
			w.dropKept(simKey{s.sp.id, f.key})
		}
	}
	s.dead = true
	n, err := w.c.CloseSession(w.now, s.id)
	w.note("close session %d: %d %v", s.id, n, err)
	if err != nil || n != len(s.fills) {
		w.fail("close of a session with %d fills: %d, %v", len(s.fills), n, err)
	}
	w.take()
	w.perform()
	for _, id := range waiting {
		if w.waits[id] != nil {
			w.fail("session %d is dead and its lookup %d still waits", s.id, id)
		}
	}
	if n == 0 {
		s.quiet = true
		w.forget(s)
	}
}

// quiet tells that the last process of a dead session is gone.
func (w *world) quiet(s *simSession) {
	if s.quiet {
		w.forget(s)
		return
	}
	for _, f := range s.fills {
		w.endWrite(f.slot, w.strideOf(s.sp, &f.key), writerEngine)
	}
	s.fills = nil
	w.note("session %d is quiet", s.id)
	if err := w.c.SessionQuiet(w.now, s.id); err != nil {
		w.fail("session quiet: %v", err)
	}
	w.take()
	w.perform()
	s.quiet = true
	w.forget(s)
}

// forget drops a dead session for good, now and then late, so that calls for
// one that no longer exists happen.
func (w *world) forget(s *simSession) {
	if len(s.cur)+len(s.old) == 0 && (w.chance(50) || len(w.sessions) > 6) {
		w.sessions = remove(w.sessions, s)
	}
}

func (w *world) doReset() {
	if !w.o.resets {
		return
	}
	until := w.now + Time(w.r.IntN(400))
	before := w.print()
	var want error
	if w.resetID != 0 {
		want = ErrStillPending
	} else {
		for _, j := range w.jobs {
			if j.Kind == ProbeJob {
				continue
			}
			j.inReset = true
			w.resets++
			if j.Kind == Cascade || j.settled {
				continue
			}
			j.settled = true
			for i, b := range j.Blocks {
				if !j.reported[i] {
					delete(w.promos, simKey{j.NS, b.Key})
					w.dropKept(simKey{j.NS, b.Key})
				}
			}
		}
		for _, s := range w.sessions {
			for _, f := range s.fills {
				f.dropped = true
				w.dropKept(simKey{s.sp.id, f.key})
			}
		}
		for _, s := range w.sums {
			s.fill.dropped = true
			w.dropKept(simKey{s.fill.q.s.sp.id, s.fill.key})
		}
	}
	id, err := w.c.Reset(w.now, until)
	w.note("reset until %d: %d %v, %d jobs", until, id, err, w.resets)
	if w.refused("reset", before, err, want) {
		return
	}
	w.take()
	w.resetID = id
	w.waits[id] = &simWait{id: id, kind: waitReset, bound: until}
	w.perform()
	w.scan()
	for _, v := range w.view {
		if !slices.Contains(w.started, v.s) {
			w.fail("after a reset slot %d still has block %s", v.s, v.e.key)
		}
	}
}

// doStray delivers results of jobs that are over or never were.
func (w *world) doStray() {
	if !w.o.stray {
		return
	}
	id := JobID(w.r.Uint64N(1 << 40))
	if old, ok := oneOf(w, w.ended); ok && w.chance(80) {
		id = old
	}
	if slices.ContainsFunc(w.jobs, func(j *simJob) bool { return j.ID == id }) {
		return
	}
	before, hash := w.c.stats, w.print()
	w.note("stray results of job %d", id)
	w.c.JobResults(w.now, id, []JobResult{{Index: 0}, {Index: 1, Outcome: Failed}})
	w.c.ProbeResult(w.now, id, []bool{true}, true)
	w.c.SumDone(w.now, Slot(w.r.Uint32N(1000)), w.r.Uint32(), 5)
	if w.print() != hash || w.c.stats.ForeignResults != before.ForeignResults+3 || w.c.stats.LateSums != before.LateSums+1 {
		w.fail("results of job %d, which is over, have changed something or are not counted", id)
	}
	w.take()
	w.perform()
}

func (w *world) doInvalid() {
	s, name, ok := w.who()
	if !ok || w.draining {
		return
	}
	before := w.print()
	var err, want error
	w.note("invalid call")
	k := s.sp.keys[0][0][:1]
	switch w.r.IntN(9) {
	case 0:
		_, err = w.c.Reserve(w.now, s.id, name, uint32(len(s.sp.groups)), 0, k, nil)
		want = ErrInvalid
	case 1:
		_, err = w.c.Reserve(w.now, s.id, name, 0, -1, k, nil)
		want = ErrInvalid
	case 2:
		_, err = w.c.Reserve(w.now, s.id, name, 0, 0, []block.Key{key(1, 63)}, nil)
		want = ErrInvalid
	case 3:
		_, err = w.c.Reserve(w.now, s.id, name, 0, 0, make([]block.Key, ReserveKeysMax+1), nil)
		want = ErrTooMany
	case 4:
		_, err = w.c.Lookup(w.now, s.id, name, make([][]block.Key, len(s.sp.groups)+1), LookupOptions{}, &Answer{})
		want = ErrInvalid
	case 5:
		bad := make([][]block.Key, len(s.sp.groups))
		bad[len(bad)-1] = []block.Key{key(1, 63)}
		_, err = w.c.Lookup(w.now, s.id, name, bad, LookupOptions{}, &Answer{})
		want = ErrInvalid
	case 6:
		_, err = w.c.Lookup(w.now, 1<<40, name, nil, LookupOptions{}, &Answer{})
		want = ErrNoSession
	case 7:
		_, err = w.c.OpenSession(99)
		want = ErrNotReady
	case 8:
		if s.dead {
			return
		}
		err = w.c.SessionQuiet(w.now, s.id) // it is not closed
		want = ErrNoSession
	}
	if !errors.Is(want, ErrNoSession) && !errors.Is(want, ErrNotReady) {
		if no := s.refusal(name, true); no != nil {
			want = no
		}
	}
	w.refused("invalid call", before, err, want)
}

// doScribble lets an engine write where it still may: before its commit, after
// its reservation has expired, and after its session has died.
func (w *world) doScribble() {
	if s, ok := oneOf(w, w.sessions); ok {
		for _, f := range s.fills {
			stride := w.strideOf(s.sp, &f.key)
			w.endWrite(f.slot, stride, writerEngine)
			w.handOut(f.slot, stride, writerEngine)
		}
	}
	if w.o.drains && !w.draining && w.op > 3000 && w.chance(3) {
		w.draining = true
		w.c.Drain()
		w.note("drain")
	}
}

// quiesce ends everything and checks that idle is zero.
func (w *world) quiesce() {
	w.note("quiesce")
	for _, s := range slices.Clone(w.sessions) {
		if s.dead {
			continue
		}
		for _, q := range slices.Clone(s.cur) {
			if q.state == simActive {
				w.finish(s, q.name)
			}
		}
		// Some engines give their fills back, others just go.
		if w.chance(50) {
			w.kill(s)
			continue
		}
		byName := map[string][]Fill{}
		var names []string
		for _, f := range s.fills {
			w.endWrite(f.slot, w.strideOf(s.sp, &f.key), writerEngine)
			if byName[f.q.name] == nil {
				names = append(names, f.q.name)
			}
			byName[f.q.name] = append(byName[f.q.name], Fill{Slot: f.slot, Gen: f.gen})
			if !f.dropped {
				w.dropKept(simKey{s.sp.id, f.key})
			}
			f.q.outstanding--
		}
		s.fills = nil
		for _, n := range names {
			if _, err := w.c.Abort(w.now, s.id, n, byName[n], nil); err != nil {
				w.fail("abort: %v", err)
			}
		}
		w.take()
		for _, q := range slices.Clone(w.reqs) {
			w.settleReq(q)
		}
		w.perform()
	}
	for n := 0; len(w.jobs) > 0 || len(w.sums) > 0; n++ {
		if n > 10000 {
			w.fail("work does not end")
		}
		if len(w.sums) > 0 {
			w.doSum()
		}
		if len(w.jobs) > 0 {
			j := w.jobs[w.r.IntN(len(w.jobs))]
			var at []int
			for i := range j.reported {
				if !j.reported[i] {
					at = append(at, i)
				}
			}
			w.report(j, at)
		}
	}
	for _, s := range slices.Clone(w.sessions) {
		if s.dead {
			w.quiet(s)
		}
	}
	w.now += 5000
	w.tick()
	w.checkAll()
	s := w.c.Stats()
	live := 0
	for _, o := range w.sessions {
		live += btoi(!o.dead)
	}
	if s.Free+s.Evictable+s.Remainder != s.Capacity || s.Pins != 0 || s.Requests != 0 || s.Handovers != 0 || s.Reservations != 0 || s.Jobs != 0 ||
		s.Waits != 0 || s.Facts != 0 || s.Fills != 0 || s.Timers != 0 || s.QuietSlots != 0 || s.Sessions != live || w.c.Pending().Waiting != 0 || w.c.NextDeadline() != 0 || len(w.waits) > 0 {
		w.fail("idle is not zero: %+v", s)
	}
	for t := range s.Tiers {
		if s.Reading[t] != 0 || s.Writing[t] != 0 || s.OverdueBytes[t] != 0 {
			w.fail("idle is not zero on tier %d: %+v", t, s)
		}
	}
	if len(w.reqs) > 0 || len(w.byCore) > 0 || len(w.gone) > 0 {
		w.fail("%d requests are left in the model", len(w.reqs))
	}
	for i, c := range w.claims {
		if c != (claim{}) {
			w.fail("page %d is left with %d readers and writer %d", i, c.readers, c.writer)
		}
	}
	// Every block that is visible has the right bytes.
	w.scan()
	for _, v := range w.view {
		k := simKey{v.e.ns, v.e.key}
		w.wantContent("resident block", v.s, k)
		if v.e.sum != content(k, 0) {
			w.fail("block %s has another checksum", v.e.key)
		}
	}
}

// doSabotage breaks the core if there is something to break.
func (w *world) doSabotage() {
	c := w.c
	for x := range c.extents {
		e := &c.extents[x]
		for i := range e.slots {
			sl := &e.slots[i]
			s := Slot(uint32(x)<<c.extShift + uint32(i)*c.classes[e.class].stride)
			switch {
			case w.o.sabotage == releaseEarly && sl.state == slotQuarantined && sl.holder == 0 && c.claimed(w, s):
				c.unquarantine(s)
				c.release(s, sl)
				w.broken = true
			case w.o.sabotage == unpinBehind && sl.state == slotResident && sl.pins == 1:
				for _, q := range w.reqs {
					if h := c.findPin(q.q, s); h != 0 && slices.ContainsFunc(q.leases, func(l simLease) bool { return l.slot == s }) {
						c.dropPin(q.q, h)
						w.broken = true
						return
					}
				}
			case w.o.sabotage == commitUnwritten && sl.state == slotFilling && c.fills[sl.holder].kind == fillStore && !c.fills[sl.holder].dropped:
				c.commitFill(sl.holder, 1)
				w.broken = true
			case w.o.sabotage == leakPin && sl.state == slotResident:
				c.pin(s, sl)
				w.broken = true
			}
			if w.broken {
				return
			}
		}
	}
	if w.o.sabotage == loseJob {
		for _, j := range w.jobs {
			if j.Kind != ProbeJob {
				delete(c.jobs, j.ID)
				w.broken = true
				return
			}
		}
	}
}

func (c *Core) claimed(w *world, s Slot) bool { return w.claims[s].writer != 0 }
