package core

import (
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/core/policy"
	"github.com/terrace-kv/terrace/internal/invariants"
	"github.com/terrace-kv/terrace/tier"
)

// metaFailure is a relation that does not hold.
type metaFailure struct{ relation, text string }

func (f *metaFailure) String() string { return f.relation + ": " + f.text }

// metaBug breaks the core on purpose.
type metaBug uint8

const (
	metaHonest     metaBug = iota
	metaEarly              // a quarantined slot is freed before its I/O is over
	metaVisible            // what is reserved is a Hit before its commit
	metaUnpinned           // a lease has no pin
	metaUnfound            // what a tier has is not found if its key is of one kind
	metaSurvivor           // a reset forgets one block to forget
	metaLeak               // an unpin leaves a pin
	metaFIFO               // uses do not make a block younger
	metaSalted             // which block is oldest depends on the salt
	metaUnstorable         // blocks of three pages are dropped at their commit now and then
	metaBugEnd
)

var metaBugs = [metaBugEnd]struct {
	name, relation string
	seed           uint64 // to try first
}{
	{"honest", "", 0}, {"early", "bytes", 11}, {"visible", "bytes", 1}, {"unpinned", "pinned", 8}, {"unfound", "found", 1}, {"survivor", "committed", 1},
	{"leak", "idle", 7}, {"fifo", "larger-lru", 1}, {"salted", "same", 10}, {"unstorable", "agree", 1},
}

// metaDid counts what runs did: one that hardly does anything passes as well.
type metaDid struct {
	ops, leases, stored, promoted, evicted, taken, refused, expired, late, failed, resets, restarts int64
}

func (d *metaDid) add(o metaDid) {
	d.ops += o.ops
	d.leases += o.leases
	d.stored += o.stored
	d.promoted += o.promoted
	d.evicted += o.evicted
	d.taken += o.taken
	d.refused += o.refused
	d.expired += o.expired
	d.late += o.late
	d.failed += o.failed
	d.resets += o.resets
	d.restarts += o.restarts
}

// count adds what the core has done since its start.
func (m *metaRun) count() {
	s := m.c.Stats()
	m.did.add(metaDid{stored: s.Committed, evicted: s.Evicted, taken: s.ExtentsTaken, refused: s.Refused, expired: s.Expired, resets: s.Resets})
	for _, t := range s.Tiers {
		m.did.promoted += t.Blocks[Promotion]
		m.did.late += t.Late
		for _, n := range t.Failures {
			m.did.failed += n
		}
	}
}

func (b metaBug) String() string { return metaBugs[b].name }

// metaSaid is what was answered to an operation.
type metaSaid struct {
	text   string
	at     Time
	looked bool // a lookup, answered with so many tokens
	tokens int64
	atoms  []bool // for each block by itself: was it a Hit
}

// metaRun is a core under one configuration with all around it: the region's
// bytes, tiers that keep bytes, engines, and time. All is decided by the
// operations and the configuration.
type metaRun struct {
	cfg    metaConfig
	bug    metaBug
	all    bool // check all invariants after each operation
	c      *Core
	now    Time
	at     int // operation
	said   []metaSaid
	failed *metaFailure
	did    metaDid

	shapes   [metaSpaces][]block.Group
	mem      []uint64 // the region, a number a page
	tiers    []*metaTier
	sessions []*metaSession
	jobs     []*metaJob
	sums     []metaSum
	waits    map[WaitID]metaWait
	drawn    map[metaDraw]uint64
	fx       []Effect
	seq      int

	committed map[simKey]bool // since the primary was last emptied
	below     map[simKey]bool // some tier has had it
	acked     map[simKey]bool // some tier has said that it has it
	filling   map[simKey]int  // reserved, or without a checksum yet
	named     map[metaName]simKey
}

// metaName is how the core names a block to an engine.
type metaName struct {
	slot Slot
	gen  uint32
}

// names checks that a name stands for one block only, however often its slot is
// used: a late call about an old block must not mean a new one.
func (m *metaRun) names(s Slot, gen uint32, k simKey, granted bool) {
	n := metaName{s, gen}
	if was, ok := m.named[n]; ok && (granted || was != k) {
		m.fail("answers", "slot %d generation %d stands for %s and stood for %s", s, gen, name(k), name(was))
	}
	m.named[n] = k
}

type metaTier struct {
	has    map[simKey]metaCopy
	belief map[simKey]tier.Presence
}

// metaCopy is a block as a tier has it: the bytes of its pages, and the
// checksum that it was given.
type metaCopy struct {
	pages []uint64
	sum   uint64
}

type metaSession struct {
	name  string
	id    SessionID
	ns    int
	dead  bool
	reqs  []*metaReq // not finished
	fills []metaFill
}

type metaReq struct {
	s      *metaSession
	id     string
	p      Params
	leases []metaLease
	open   bool // its last lookup was not final: the bound of the next counts from there
}

type metaLease struct {
	Lease
	k     simKey
	wiped bool // a reset has forgotten it: the bytes stay, no lookup finds it
}

type metaFill struct {
	id   string
	k    simKey
	slot Slot
	gen  uint32
}

type metaWait struct {
	op      int // whose answer it is
	flush   bool
	q       *metaReq
	keys    [][]block.Key
	patient bool // the wait is long enough for whatever a healthy tier does, and nobody else is waited for
}

// metaJob is a call of a tier that is under way; each block has its own end.
type metaJob struct {
	StartJob
	ends   []metaEnd
	hung   bool
	cancel bool
}

type metaEnd struct {
	at    Time
	seq   int
	index int
}

type metaSum struct {
	at  Time
	seq int
	e   ComputeSum
}

// metaDraw is what a random choice is about. Each choice depends on the seed, on
// this and on how often it was made before, so that taking an operation away
// changes no fault of other blocks.
type metaDraw struct {
	what string
	tier int
	k    simKey
}

func (m *metaRun) draw(what string, t int, k simKey) uint64 {
	d := metaDraw{what, t, k}
	m.drawn[d]++
	h := uint64(m.cfg.seed)*0x9e3779b97f4a7c15 ^ m.drawn[d]*0xd6e8feb86659fd93 ^ uint64(t)<<56
	for _, b := range []byte(what) {
		h = (h ^ uint64(b)) * 0x100000001b3
	}
	h ^= content(k, 0)
	h ^= h >> 32
	h *= 0x9e3779b97f4a7c15
	return h ^ h>>29
}

func (m *metaRun) chance(percent int, what string, t int, k simKey) bool {
	return percent > 0 && m.draw(what, t, k)%100 < uint64(percent)
}

// runMeta performs operations under a configuration.
func runMeta(ops []metaOp, cfg metaConfig, bug metaBug, all bool) (m *metaRun) {
	m = &metaRun{cfg: cfg, bug: bug, all: all, now: 1, said: make([]metaSaid, len(ops)), waits: map[WaitID]metaWait{}, drawn: map[metaDraw]uint64{},
		below: map[simKey]bool{}, acked: map[simKey]bool{}}
	defer func() {
		if e := recover(); e != nil {
			f, ok := e.(*metaFailure)
			if !ok {
				f = &metaFailure{"panic", fmt.Sprintf("%v\n%s", e, debug.Stack())}
			}
			op := "the end"
			if m.at < len(ops) {
				op = fmt.Sprintf("operation %d (%s)", m.at, ops[m.at])
			}
			m.failed = &metaFailure{f.relation, fmt.Sprintf("%s, at %s, time %d", f.text, op, m.now)}
		}
	}()
	for i := range m.shapes {
		m.shapes[i] = metaShapes[0]
	}
	for range cfg.tiers {
		m.tiers = append(m.tiers, &metaTier{has: map[simKey]metaCopy{}, belief: map[simKey]tier.Presence{}})
	}
	for len(ops) > 0 && m.at < len(ops) && ops[m.at].verb == "space" {
		if n := int(ops[m.at].who[1] - '0'); n < metaSpaces {
			m.shapes[n] = metaShapes[ops[m.at].get("shape")%len(metaShapes)]
		}
		m.at++
	}
	m.start()
	for ; m.at < len(ops); m.at++ {
		m.advance(m.now + 1)
		m.peekAround()
		if cfg.atoms == 1 {
			m.doAtoms(ops[m.at])
		} else {
			m.do(ops[m.at])
		}
		if cfg.quiet == 1 {
			m.rest()
		}
		m.check()
	}
	m.end()
	m.count()
	m.did.ops = int64(len(ops))
	return m
}

func (m *metaRun) fail(relation, format string, a ...any) {
	panic(&metaFailure{relation, fmt.Sprintf(format, a...)})
}

// say notes the answer to the operation under way.
func (m *metaRun) say(format string, a ...any) {
	m.said[m.at].text, m.said[m.at].at = fmt.Sprintf(format, a...), m.now
}

// dump is the operations with their answers and when these came.
func (m *metaRun) dump(ops []metaOp) string {
	var out strings.Builder
	for i, s := range m.said[:len(ops)] {
		fmt.Fprintf(&out, "%4d %v → %s @%d", i, ops[i], s.text, s.at)
		for _, hit := range s.atoms {
			fmt.Fprint(&out, " ", btoi(hit))
		}
		fmt.Fprintln(&out)
	}
	if m.failed != nil {
		fmt.Fprintln(&out, m.failed)
	}
	return out.String()
}

// start makes a core, with an empty primary.
func (m *metaRun) start() {
	cfg, pt := m.cfg, func(n Time) int64 { return int64(n) * int64(m.cfg.patience) }
	o := Options{
		Size: int64(cfg.pages) * PageSize, ExtentBytes: int64(cfg.extent) * PageSize, ReservePercent: cfg.reserve,
		OverduePercent: cfg.overdue, InflightPercent: cfg.inflight, FactsMax: cfg.facts, ReportReleases: true, Salt: uint64(cfg.salt),
		NewPolicy: func(n policy.Nodes) policy.Policy { return m.policy(policy.New(cfg.policy, n)) },
	}
	for i, d := range []*int64{(*int64)(&o.LookupTimeout), (*int64)(&o.ProbeTimeout), (*int64)(&o.PromoteTimeout), (*int64)(&o.CascadeTimeout),
		(*int64)(&o.ReservationTimeout), (*int64)(&o.DistrustFor), (*int64)(&o.UnboundStoreTimeout), (*int64)(&o.FactFor)} {
		*d = pt([]Time{400, 100, 200, 300, 300, 250, 500, 80}[i])
	}
	if cfg.quiet == 1 {
		// Lookups that wait for a reservation end by their own bound, in every
		// configuration after as many of them.
		o.ReservationTimeout *= 1 << 20
	}
	for i, mode := range cfg.tiers {
		f := TierFacts{Name: string(mode), Medium: "other", ReadBlocksMax: cfg.readCredit, WriteBlocksMax: cfg.writeCredit}
		if i == len(cfg.tiers)-1 {
			f.Medium = "last"
		}
		if mode != 'p' {
			f.Known = func(ns NamespaceID, keys []block.Key, out []tier.Presence) { m.known(i, mode, ns, keys, out) }
		}
		o.Tiers = append(o.Tiers, f)
	}
	var err error
	if m.c, err = New(o); err != nil {
		m.fail("answers", "%v", err)
	}
	m.mem = make([]uint64, cfg.pages)
	m.sessions, m.jobs, m.sums = nil, nil, nil
	clear(m.waits)
	m.committed, m.filling, m.named = map[simKey]bool{}, map[simKey]int{}, map[metaName]simKey{}
	for n := range m.shapes {
		groups := slices.Clone(m.shapes[n])
		for g := range groups {
			groups[g].BlockBytes = uint64(m.pages(n, g)) * PageSize
		}
		if id, err := m.c.OpenNamespace(groups); err != nil || int(id) != n+1 {
			m.fail("answers", "namespace %d: %v", id, err)
		}
	}
}

// pages of a block in a group of a namespace.
func (m *metaRun) pages(ns, g int) int { return int(m.cfg.mix[(ns+g)%3] - '0') }

func (m *metaRun) key(ns int, k block.Key) simKey { return simKey{NamespaceID(ns + 1), k} }

func (m *metaRun) known(t int, mode rune, ns NamespaceID, keys []block.Key, out []tier.Presence) {
	for i := range keys {
		k := simKey{ns, keys[i]}
		_, has := m.tiers[t].has[k]
		switch {
		case m.bug == metaUnfound && content(k, 0)%16 > 8:
			out[i] = tier.Absent
		case mode == 's':
			out[i] = m.tiers[t].belief[k]
		case has:
			out[i] = tier.Present
		default:
			out[i] = tier.Absent
		}
	}
}

// brokenPolicy is for two of the bugs.
type brokenPolicy struct {
	policy.Policy
	ignore func(id uint32) bool
}

func (p brokenPolicy) Use(id uint32) {
	if !p.ignore(id) {
		p.Policy.Use(id)
	}
}

func (m *metaRun) policy(p policy.Policy) policy.Policy {
	switch m.bug {
	case metaFIFO:
		return brokenPolicy{p, func(uint32) bool { return true }}
	case metaSalted:
		return brokenPolicy{p, func(id uint32) bool { return (id*0x9e3779b1>>16+uint32(m.cfg.salt))%4 == 0 }}
	}
	return p
}

// --- bytes ---

func (m *metaRun) stride(k simKey) int { return m.pages(int(k.ns)-1, int(k.key.Group())) }

func (m *metaRun) at0(s Slot, k simKey) []uint64 { return m.mem[int(s) : int(s)+m.stride(k)] }

func (m *metaRun) scribble(s Slot, k simKey) {
	for i := range m.at0(s, k) {
		m.seq++
		m.mem[int(s)+i] = uint64(m.seq) << 1 // even: no right content
	}
}

func (m *metaRun) write(s Slot, k simKey) {
	for i := range m.at0(s, k) {
		m.mem[int(s)+i] = content(k, uint32(i))
	}
}

func metaSumOf(pages []uint64) (sum uint64) {
	for _, p := range pages {
		sum = (sum ^ p) * 0x9e3779b97f4a7c15
	}
	return sum
}

// wantBytes checks that a slot has the bytes of a key, and only those of it.
func (m *metaRun) wantBytes(what string, s Slot, sum uint64, k simKey) {
	pages := m.at0(s, k)
	for i := range pages {
		if pages[i] != content(k, uint32(i)) {
			m.fail("bytes", "%s of %s: page %d of slot %d has other bytes", what, name(k), i, s)
		}
	}
	if sum != metaSumOf(pages) {
		m.fail("bytes", "%s of %s in slot %d with another checksum", what, name(k), s)
	}
}

func name(k simKey) string { return fmt.Sprintf("%x/%d of n%d", k.key[:8], k.key.Group(), k.ns-1) }

// --- time ---

// next is the earliest end of something outside the core.
func (m *metaRun) next() (at Time, run func()) {
	seq := 0
	earlier := func(t Time, n int) bool {
		if run == nil || t < at || t == at && n < seq {
			at, seq = t, n
			return true
		}
		return false
	}
	for _, j := range m.jobs {
		for _, e := range j.ends {
			if earlier(e.at, e.seq) {
				run = func() { m.endBlocks(j, e.at) }
			}
		}
	}
	for i, s := range m.sums {
		if earlier(s.at, s.seq) {
			run = func() {
				m.sums = slices.Delete(m.sums, i, i+1)
				m.endSum(s.e)
			}
		}
	}
	return at, run
}

// advance lets time pass, with all that is due in its order.
func (m *metaRun) advance(to Time) {
	for {
		at, run := m.next()
		due := m.c.NextDeadline()
		switch {
		case run != nil && at <= to && (due == 0 || at <= due):
			m.now = max(m.now, at)
			run()
		case due != 0 && due <= to:
			m.now = max(m.now, due)
			m.c.Tick(m.now)
			m.perform()
		default:
			m.now = max(m.now, to)
			return
		}
	}
}

// rest lets time pass until nothing is under way.
func (m *metaRun) rest() {
	for n := 0; len(m.jobs) > 0 || len(m.sums) > 0 || len(m.waits) > 0; n++ {
		if n > 20000 {
			m.fail("rest", "%d jobs, %d sums and %d waits do not end", len(m.jobs), len(m.sums), len(m.waits))
		}
		at, run := m.next()
		if due := m.c.NextDeadline(); run == nil || due != 0 && due < at {
			at = due
		}
		if at == 0 {
			m.fail("rest", "%d waits and nothing is due", len(m.waits))
		}
		m.advance(at)
	}
}

// --- effects ---

// perform does what the core wants done since the last call.
func (m *metaRun) perform() {
	m.sabotage()
	m.fx = m.c.TakeEffects(m.fx[:0])
	for _, e := range m.fx {
		switch e := e.(type) {
		case ReleasedSlots:
			for _, s := range e.Slots {
				m.mem[s] = 0xCCCC
			}
		case StartJob:
			m.startJob(e)
		case CancelJob:
			for _, j := range m.jobs {
				if j.ID == e.ID && !j.hung {
					j.cancel = true
					for i := range j.ends {
						j.ends[i].at = min(j.ends[i].at, m.now+1)
					}
				}
			}
		case ComputeSum:
			m.seq++
			k := simKey{e.NS, e.Key}
			m.sums = append(m.sums, metaSum{m.now + 1 + Time(m.draw("sum", 0, k)%uint64(m.cfg.delay)), m.seq, e})
			m.filling[k]++
		case AnswerLookup:
			w := m.waits[e.Wait]
			delete(m.waits, e.Wait)
			m.answered(w, e.Answer)
		case AnswerFlush:
			w := m.waits[e.Wait]
			delete(m.waits, e.Wait)
			m.said[w.op].text, m.said[w.op].at = fmt.Sprintf("done=%v", e.Flushed.Done), m.now
		case AnswerReset:
			delete(m.waits, e.Wait)
		}
	}
}

func (m *metaRun) startJob(e StartJob) {
	j := &metaJob{StartJob: e}
	first := simKey{e.NS, e.Blocks[0].Key}
	what := e.Kind.String()
	if m.chance(m.cfg.down, "down", e.Tier, first) {
		m.seq++
		m.jobs = append(m.jobs, &metaJob{StartJob: StartJob{Tier: e.Tier, Kind: metaUp}, ends: []metaEnd{{at: m.now + 1, seq: m.seq, index: 0}, {at: m.now + 150, seq: m.seq + 1, index: 1}}, hung: true})
		m.seq++
	}
	j.hung = m.chance(m.cfg.hang, "hang", e.Tier, first)
	together := m.draw("together", e.Tier, first)%2 == 0
	at := m.now + 1 + Time(m.draw(what, e.Tier, first)%uint64(m.cfg.delay))
	if j.hung {
		at = e.Deadline + 100*Time(1+m.draw("hung", e.Tier, first)%8)
	}
	for i, b := range e.Blocks {
		k := simKey{e.NS, b.Key}
		if !together && !j.hung && e.Kind != ProbeJob {
			at = m.now + 1 + Time(m.draw(what, e.Tier, k)%uint64(m.cfg.delay))
		}
		m.seq++
		j.ends = append(j.ends, metaEnd{at, m.seq, i})
		switch e.Kind {
		case Promotion:
			m.scribble(b.Slot, k)
		case Cascade:
			m.wantBytes("cascade", b.Slot, b.Sum, k)
		}
	}
	m.jobs = append(m.jobs, j)
}

// metaUp is the kind of a pseudo job: a tier that goes down and comes back.
const metaUp JobKind = 100

// endBlocks ends the blocks of a job whose time it is.
func (m *metaRun) endBlocks(j *metaJob, at Time) {
	var over []int
	j.ends = slices.DeleteFunc(j.ends, func(e metaEnd) bool {
		if e.at <= at {
			over = append(over, e.index)
		}
		return e.at <= at
	})
	if len(j.ends) == 0 {
		m.jobs = remove(m.jobs, j)
	}
	t := m.tiers[j.Tier]
	switch j.Kind {
	case metaUp:
		m.c.TierHealth(m.now, j.Tier, over[0] == 1, over[0] == 1)
		m.perform()
		return
	case ProbeJob:
		found := make([]bool, len(j.Blocks))
		for i, b := range j.Blocks {
			_, found[i] = t.has[simKey{j.NS, b.Key}]
		}
		m.c.ProbeResult(m.now, j.ID, found, !j.cancel && !m.chance(m.cfg.faults, "probe fails", j.Tier, simKey{j.NS, j.Blocks[0].Key}))
		m.perform()
		return
	}
	var res []JobResult
	for _, i := range over {
		b := j.Blocks[i]
		k := simKey{j.NS, b.Key}
		r := JobResult{Index: i}
		cp, has := t.has[k]
		switch {
		case j.cancel && m.chance(70, "cancelled", j.Tier, k):
			r.Outcome, r.Class = Cancelled, tier.ClassCancelled
		case m.chance(m.cfg.faults, j.Kind.String()+" fails", j.Tier, k):
			r.Outcome, r.Class, r.Cause = Failed, tier.ClassRetryable, tier.CauseIO
		case j.Kind == Promotion && !has:
			r.Outcome, r.Class = Failed, tier.ClassNotFound
		case j.Kind == Promotion && metaSumOf(cp.pages) != cp.sum: // transfer compares them
			r.Outcome, r.Class = Failed, tier.ClassCorrupt
		}
		switch {
		case j.Kind == Promotion && r.Outcome == Done:
			copy(m.at0(b.Slot, k), cp.pages)
			r.Sum = cp.sum
		case j.Kind == Promotion:
			m.scribble(b.Slot, k)
		default:
			m.wantBytes("write", b.Slot, b.Sum, k)
			if r.Outcome == Done {
				m.keep(j.Tier, k, b)
			}
		}
		res = append(res, r)
	}
	m.c.JobResults(m.now, j.ID, res)
	m.perform()
	if m.chance(m.cfg.stray, "stray", j.Tier, simKey{j.NS, j.Blocks[0].Key}) {
		m.c.JobResults(m.now, j.ID, res)
		m.perform()
	}
}

// keep is a write that a tier says is done.
func (m *metaRun) keep(t int, k simKey, b JobBlock) {
	to := m.tiers[t]
	m.below[k], m.acked[k] = true, true
	to.belief[k] = tier.Present
	if m.chance(m.cfg.lose, "lose", t, k) {
		delete(to.has, k)
		return
	}
	cp := metaCopy{slices.Clone(m.at0(b.Slot, k)), b.Sum}
	if m.chance(m.cfg.torn, "torn", t, k) {
		cp.pages[len(cp.pages)-1] ^= 2
	}
	to.has[k] = cp
}

func (m *metaRun) endSum(e ComputeSum) {
	k := simKey{e.NS, e.Key}
	m.filling[k]--
	m.c.SumDone(m.now, e.Slot, e.Gen, metaSumOf(m.at0(e.Slot, k)))
	m.perform()
}

// --- operations ---

func (m *metaRun) session(name string) *metaSession {
	for _, s := range m.sessions {
		if s.name == name && !s.dead {
			return s
		}
	}
	return nil
}

func (s *metaSession) request(id string) *metaReq {
	for _, q := range s.reqs {
		if q.id == id {
			return q
		}
	}
	return nil
}

// stretch is the keys that an operation names.
func (m *metaRun) stretch(ns int, o metaOp) (g, first int, keys []block.Key) {
	groups := m.shapes[ns]
	g = o.get("group") % len(groups)
	keys = metaKeys(groups, g, o.get("chain")%metaChains)
	first = min(o.get("first"), len(keys))
	return g, first, keys[first:min(len(keys), first+o.get("count"))]
}

func (m *metaRun) prompt(ns int, o metaOp) (keys [][]block.Key) {
	for g := range m.shapes[ns] {
		all := metaKeys(m.shapes[ns], g, o.get("chain")%metaChains)
		keys = append(keys, all[:min(len(all), o.get("tokens")/int(m.shapes[ns][g].TokensPerBlock))])
	}
	return keys
}

// want checks that a call is refused exactly when there is no request for it.
func (m *metaRun) want(q *metaReq, err error) bool {
	if (q != nil) != (err == nil) {
		m.fail("answers", "request is there: %v; the call's error is %v", q != nil, err)
	}
	if err != nil {
		m.say("refused")
	}
	return err == nil
}

func (m *metaRun) do(o metaOp) {
	sname, id, _ := strings.Cut(o.who, "/")
	s := m.session(sname)
	var q *metaReq
	if s == nil && o.who != "" && o.verb != "open" && o.verb != "quiet" {
		m.say("no session")
		return
	}
	if s != nil {
		q = s.request(id)
	}
	switch o.verb {
	case "open":
		if s != nil {
			return
		}
		ns := o.get("ns") % metaSpaces
		sid, err := m.c.OpenSession(NamespaceID(ns + 1))
		if err != nil {
			m.fail("answers", "open: %v", err)
		}
		m.sessions = append(m.sessions, &metaSession{name: sname, id: sid, ns: ns})
	case "close":
		m.close(s)
	case "quiet":
		for i, d := range m.sessions {
			if d.name == sname && d.dead {
				m.quiet(i)
				break
			}
		}
	case "new":
		limit := func(name string) int64 { return int64(o.get(name)) - 1 }
		p := Params{MaxLoadTokens: limit("maxload"), MaxOffloadTokens: limit("maxstore"), RemoteDecoder: o.get("remote") > 0}
		if o.get("noload") > 0 {
			p.LoadTiers = []TierFilter{}
		}
		if o.get("nostore") > 0 {
			p.StoreTiers = []TierFilter{}
		}
		if o.get("lastonly") > 0 && p.StoreTiers == nil {
			p.StoreTiers = []TierFilter{{Medium: "last"}}
		}
		err := m.c.NewRequest(m.now, s.id, id, p)
		m.perform()
		if q != nil {
			if !errors.Is(err, ErrConflict) {
				m.fail("answers", "a second request %s: %v", o.who, err)
			}
			m.say("conflict")
			return
		}
		if err != nil {
			m.fail("answers", "new request: %v", err)
		}
		s.reqs = append(s.reqs, &metaReq{s: s, id: id, p: p})
	case "lookup":
		m.lookup(s, q, o, id)
	case "store":
		g, first, keys := m.stretch(s.ns, o)
		grants, err := m.c.Reserve(m.now, s.id, id, uint32(g), first, keys, nil)
		if errors.Is(err, ErrNoRoom) || errors.Is(err, ErrTooLarge) {
			m.say("no room")
			m.perform()
			return
		}
		if !m.want(q, err) {
			return
		}
		n := [GrantCapped + 1]int{}
		for i, gr := range grants {
			n[gr.Status]++
			if gr.Status == Granted {
				k := m.key(s.ns, keys[i])
				m.names(gr.Slot, gr.Gen, k, true)
				m.scribble(gr.Slot, k)
				m.filling[k]++
				m.hurry()
				s.fills = append(s.fills, metaFill{id, k, gr.Slot, gr.Gen})
				if m.bug == metaVisible && i == 1 && !m.c.fills[m.c.at(gr.Slot).holder].dropped {
					m.c.commitFill(m.c.at(gr.Slot).holder, 1)
				}
			}
		}
		m.say("granted %d, present %d, filling %d, capped %d", n[Granted], n[GrantPresent], n[GrantFilling], n[GrantCapped])
		m.perform()
	case "commit", "abort":
		m.giveBack(s, q, id, o.verb == "abort", o.get("nosum") > 0)
	case "pin":
		_, _, keys := m.stretch(s.ns, o)
		leases, err := m.c.Pin(m.now, s.id, id, keys, nil)
		if !m.want(q, err) {
			return
		}
		text := "leases"
		for i, l := range leases {
			text += fmt.Sprint(" ", btoi(l.Gen != 0))
			k := m.key(s.ns, keys[i])
			if l.Gen != 0 {
				m.lease(q, l, k)
			} else if m.pinned(k) {
				m.fail("pinned", "%s is pinned, and a pin of it finds nothing", name(k))
			}
		}
		m.say("%s", text)
		m.perform()
	case "unpin":
		if q == nil {
			return
		}
		leases := make([]Lease, 0, len(q.leases))
		for _, l := range q.leases {
			leases = append(leases, l.Lease)
		}
		q.leases = nil
		out, err := m.c.Unpin(m.now, s.id, id, leases, nil)
		if err != nil || slices.ContainsFunc(out, func(st FillStatus) bool { return st != FillOK }) {
			m.fail("pinned", "leases that were given are given back: %v %v", out, err)
		}
		if m.bug == metaLeak && len(leases) > 2 {
			if e := m.c.at(leases[2].Slot); e.state == slotResident {
				m.c.pin(leases[2].Slot, e)
			}
		}
		m.say("%d", len(leases))
		m.perform()
	case "touch":
		_, _, keys := m.stretch(s.ns, o)
		if err := m.c.Touch(m.now, s.id, keys); err != nil {
			m.fail("answers", "touch: %v", err)
		}
		m.perform()
	case "finish":
		m.finish(s, q, id)
	case "flush":
		wid, done, f, err := m.c.Flush(m.now, s.id, id, m.now+Time(o.get("wait")))
		if err != nil {
			if q != nil {
				m.fail("answers", "flush: %v", err)
			}
			return
		}
		m.say("done=%v", f.Done)
		if !done {
			m.waits[wid] = metaWait{op: m.at, flush: true}
		}
		m.perform()
	case "reset":
		if m.cfg.noReset == 0 {
			m.reset(Time(o.get("wait")))
		}
	case "restart":
		m.restart()
	case "sleep":
		m.advance(m.now + Time(o.get("for")))
	case "rest":
		m.rest()
	}
}

func (m *metaRun) lookup(s *metaSession, q *metaReq, o metaOp, id string) {
	keys := m.prompt(s.ns, o)
	opt := LookupOptions{Peek: o.get("peek") > 0}
	if n := o.get("wait"); n > 0 {
		opt.WaitUntil = m.now + Time(n)
	}
	if m.cfg.quiet == 1 && !opt.Peek {
		opt.WaitUntil = m.now + Time(100*m.cfg.patience) // longer than any tier takes
	}
	a := &Answer{}
	wid, err := m.c.Lookup(m.now, s.id, id, keys, opt, a)
	if !m.want(q, err) {
		return
	}
	w := metaWait{op: m.at, q: q, keys: keys, patient: !q.open && opt.WaitUntil-m.now >= Time(20*m.cfg.delay+60)}
	for g := range keys {
		for _, k := range keys[g] {
			w.patient = w.patient && m.filling[m.key(s.ns, k)] == 0
		}
	}
	m.said[m.at].text = "waits"
	if wid != 0 {
		q.open = true
		m.waits[wid] = w
		m.perform()
		return
	}
	if opt.Peek {
		for g := range keys {
			for i, v := range a.Groups[g].Verdicts {
				m.verdict(w, m.key(s.ns, keys[g][i]), v, false)
			}
		}
		if m.cfg.quiet == 0 { // else what it shows of a tier depends on the tier
			m.say("peek %s", metaAnswer(a))
		}
		m.perform()
		return
	}
	m.answered(w, a)
	if m.bug == metaUnpinned && len(q.leases) > 1 {
		if h := m.c.findPin(q.q(m), q.leases[1].Slot); h != 0 {
			m.c.dropPin(q.q(m), h)
		}
	}
	m.perform()
}

// hurry notes that whoever waits now may have to wait for an engine as well.
func (m *metaRun) hurry() {
	for id, w := range m.waits {
		w.patient = false
		m.waits[id] = w
	}
}

// q is the core's own record, for the bugs.
func (q *metaReq) q(m *metaRun) *request { return m.c.sessions[q.s.id].requests[q.id] }

func metaAnswer(a *Answer) string {
	text := fmt.Sprintf("%d tokens", a.Tokens)
	if !a.Final {
		text += ", not final"
	}
	for g := range a.Groups {
		text += fmt.Sprintf(", %d+%d", a.Groups[g].First, len(a.Groups[g].Leases))
	}
	return text
}

// answered checks what a lookup is told, and notes its leases.
func (m *metaRun) answered(w metaWait, a *Answer) {
	said := &m.said[w.op]
	said.at = m.now
	if a.Void {
		said.text = "void"
		return
	}
	said.text, said.looked, said.tokens = metaAnswer(a), a.Final, a.Tokens
	w.q.open = !a.Final
	ns := w.q.s.ns
	for g := range w.keys {
		ga := &a.Groups[g]
		for i, v := range ga.Verdicts {
			k := m.key(ns, w.keys[g][i])
			m.verdict(w, k, v, true)
			if at := i - ga.First; v == Hit {
				if at < 0 || at >= len(ga.Leases) || ga.Leases[at].Gen == 0 {
					m.fail("answers", "a Hit of %s without a lease", name(k))
				}
				m.lease(w.q, ga.Leases[at], k)
			}
		}
	}
}

// verdict checks an answer for one key.
func (m *metaRun) verdict(w metaWait, k simKey, v Verdict, final bool) {
	switch v {
	case Hit:
		if !m.committed[k] && !m.below[k] {
			m.fail("committed", "a Hit of %s, which was never committed, or not since the primary was emptied", name(k))
		}
		return
	case HitPending:
		if m.filling[k] <= 0 && !m.below[k] {
			m.fail("committed", "%s is pending, and nobody fills it nor has it", name(k))
		}
		return
	case VerdictNone, Retry, MissUnusable, MissCapped:
		return
	}
	if m.pinned(k) {
		m.fail("pinned", "%s is pinned and %v", name(k), v)
	}
	// What is found below may find no room (or not within the tier's share of
	// it), or the wait for it may have been too short.
	if !final || !m.cfg.healthy() || !m.acked[k] || w.q.p.LoadTiers != nil || v == MissNoRoom || v == MissUnavailable || v == MissWaited && !w.patient {
		return
	}
	m.fail("found", "a tier that loses nothing has said that it has %s, which is %v", name(k), v)
}

// pinned says that some request has a lease on a block, given since the primary
// was last emptied.
func (m *metaRun) pinned(k simKey) bool {
	for _, s := range m.sessions {
		for _, q := range s.reqs {
			for i := range q.leases {
				if q.leases[i].k == k && !q.leases[i].wiped {
					return true
				}
			}
		}
	}
	return false
}

func (m *metaRun) lease(q *metaReq, l Lease, k simKey) {
	m.wantBytes("lease", l.Slot, l.Sum, k)
	m.names(l.Slot, l.Gen, k, false)
	if !m.committed[k] && !m.below[k] {
		m.fail("committed", "a lease on %s, which was never committed, or not since the primary was emptied", name(k))
	}
	for _, o := range q.leases {
		if o.Slot == l.Slot && o.Gen == l.Gen {
			return
		}
	}
	m.did.leases++
	q.leases = append(q.leases, metaLease{Lease: l, k: k})
}

func (m *metaRun) giveBack(s *metaSession, q *metaReq, id string, abort, nosum bool) {
	var mine []metaFill
	s.fills = slices.DeleteFunc(s.fills, func(f metaFill) bool {
		if f.id == id {
			mine = append(mine, f)
		}
		return f.id == id
	})
	if q == nil && len(mine) == 0 {
		return // whether a finished request is gone is a matter of time
	}
	fills := make([]Fill, 0, len(mine))
	for _, f := range mine {
		fl := Fill{Slot: f.slot, Gen: f.gen, HasSum: !nosum}
		if !abort {
			m.write(f.slot, f.k)
			fl.Sum = metaSumOf(m.at0(f.slot, f.k))
		}
		m.filling[f.k]--
		fills = append(fills, fl)
	}
	give := m.c.Commit
	if abort {
		give = m.c.Abort
	}
	out, err := give(m.now, s.id, id, fills, nil)
	if err != nil {
		m.fail("answers", "commit or abort: %v", err)
	}
	n := [FillDropped + 1]int{}
	for i, st := range out {
		n[st]++
		if st == FillOK && !abort {
			m.committed[mine[i].k] = true
		}
	}
	if n[FillStale] > 0 && m.bug == metaHonest {
		m.fail("answers", "%d slots that were granted are given back as stale", n[FillStale])
	}
	m.say("%d, dropped %d", n[FillOK], n[FillDropped])
	m.perform()
	if m.bug == metaUnstorable && !abort {
		for _, f := range mine {
			if e := m.c.lookAt(f.slot); m.stride(f.k) == 3 && e != nil && e.gen == f.gen && e.state == slotResident && e.pins == 0 && content(f.k, 0)%16 > 8 {
				m.c.doom(f.slot, e)
			}
		}
	}
}

func (m *metaRun) finish(s *metaSession, q *metaReq, id string) {
	if q != nil {
		q.leases = nil
		s.reqs = remove(s.reqs, q)
	}
	err := m.c.Finish(m.now, s.id, id)
	if m.want(q, err) {
		m.perform()
	}
}

// close ends a session. What it has reserved, its workers may still write.
func (m *metaRun) close(s *metaSession) {
	s.reqs, s.dead = nil, true
	n, err := m.c.CloseSession(m.now, s.id)
	if err != nil || n != len(s.fills) && m.bug == metaHonest {
		m.fail("answers", "close of a session with %d reserved slots: %d, %v", len(s.fills), n, err)
	}
	for _, f := range s.fills {
		m.filling[f.k]--
	}
	m.perform()
}

// quiet ends the last worker of a dead session, which has written until now.
func (m *metaRun) quiet(i int) {
	s := m.sessions[i]
	for _, f := range s.fills {
		m.scribble(f.slot, f.k)
	}
	m.sessions = slices.Delete(m.sessions, i, i+1)
	if err := m.c.SessionQuiet(m.now, s.id); err != nil && len(s.fills) > 0 {
		m.fail("answers", "session quiet: %v", err)
	}
	m.perform()
}

func (m *metaRun) reset(wait Time) {
	var spared *slot
	if m.bug == metaSurvivor {
		for x := range m.c.extents {
			for i := range m.c.extents[x].slots {
				if e := &m.c.extents[x].slots[i]; e.state == slotResident && e.pins == 0 {
					spared = e
				}
			}
		}
		if spared != nil {
			spared.state = slotFree // Reset passes it by
		}
	}
	id, err := m.c.Reset(m.now, m.now+wait)
	if spared != nil {
		spared.state = slotResident
	}
	if errors.Is(err, ErrStillPending) {
		m.say("pending")
		return
	}
	if err != nil {
		m.fail("answers", "reset: %v", err)
	}
	clear(m.committed)
	m.hurry() // reads begin anew
	for _, s := range m.sessions {
		for _, q := range s.reqs {
			for i := range q.leases {
				q.leases[i].wiped = true
			}
		}
	}
	m.waits[id] = metaWait{op: m.at}
	m.perform()
}

// restart ends the process at this instant and starts the next one over the
// same tiers. Some of the writes under way have been done, and nobody was told.
func (m *metaRun) restart() {
	for _, j := range m.jobs {
		if j.Kind != Cascade {
			continue
		}
		for _, e := range j.ends {
			b := j.Blocks[e.index]
			k := simKey{j.NS, b.Key}
			if m.chance(50, "done before the end", j.Tier, k) {
				was := m.acked[k]
				m.keep(j.Tier, k, b)
				m.acked[k] = was
			}
		}
	}
	m.count()
	m.did.restarts++
	m.start()
}

// peekAround looks at something without pinning it: it must change nothing.
func (m *metaRun) peekAround() {
	if m.cfg.peeks == 0 {
		return
	}
	for _, s := range m.sessions {
		if len(s.reqs) == 0 || s.dead {
			continue
		}
		o := metaOp{args: []metaArg{{"chain", m.at}, {"tokens", metaTokens}}}
		if _, err := m.c.Lookup(m.now, s.id, s.reqs[0].id, m.prompt(s.ns, o), LookupOptions{Peek: true}, &Answer{}); err != nil {
			m.fail("answers", "peek: %v", err)
		}
	}
}

// --- one block at a time ---

// doAtoms does of an operation what can be done block by block, each a request
// of its own that is over before the next.
func (m *metaRun) doAtoms(o metaOp) {
	sname, _, _ := strings.Cut(o.who, "/")
	s := m.session(sname)
	one := func(k block.Key, f func()) {
		m.do(metaOp{verb: "new", who: sname + "/x"})
		f()
		m.finish(s, s.request("x"), "x")
	}
	switch {
	case o.verb == "open" || o.verb == "restart" || o.verb == "reset":
		m.do(o)
	case o.verb == "close" && s != nil:
		m.do(o)
		m.do(metaOp{verb: "quiet", who: sname})
	case s == nil:
	case o.verb == "lookup" || o.verb == "pin" || o.verb == "touch":
		var keys []block.Key
		if o.verb == "lookup" {
			keys = slices.Concat(m.prompt(s.ns, o)...)
		} else {
			_, _, keys = m.stretch(s.ns, o)
		}
		var hits []bool
		for _, k := range keys {
			one(k, func() {
				l, err := m.c.Pin(m.now, s.id, "x", []block.Key{k}, nil)
				if err != nil {
					m.fail("answers", "pin: %v", err)
				}
				if hits = append(hits, l[0].Gen != 0); l[0].Gen != 0 {
					m.lease(s.request("x"), l[0], m.key(s.ns, k))
				}
			})
		}
		m.said[m.at].atoms = hits
	case o.verb == "store":
		g, first, keys := m.stretch(s.ns, o)
		for i, k := range keys {
			one(k, func() {
				m.do(metaOp{verb: "store", who: sname + "/x", args: []metaArg{{"group", g}, {"chain", o.get("chain")}, {"first", first + i}, {"count", 1}}})
				m.do(metaOp{verb: "commit", who: sname + "/x"})
			})
		}
	}
}

// --- what holds at every moment ---

// check looks at all that is readable.
func (m *metaRun) check() {
	for _, s := range m.sessions {
		for _, q := range s.reqs {
			for _, l := range q.leases {
				m.wantBytes("pinned block", l.Slot, l.Sum, l.k)
				if _, e, ok := m.c.find(l.k.ns, &l.k.key); !l.wiped && (!ok || e.gen != l.Gen || e.state != slotResident) {
					m.fail("pinned", "%s is leased to %s/%s and no longer in the primary", name(l.k), s.name, q.id)
				}
			}
		}
	}
	for x := range m.c.extents {
		e := &m.c.extents[x]
		if e.class < 0 {
			continue
		}
		for i := range e.slots {
			if sl := &e.slots[i]; sl.state == slotResident {
				k := simKey{sl.ns, sl.key}
				m.wantBytes("block", Slot(uint32(x)<<m.c.extShift+uint32(i)*m.c.classes[e.class].stride), sl.sum, k)
				if !m.committed[k] && !m.below[k] {
					m.fail("committed", "%s is in the primary, and was never committed, or not since it was emptied", name(k))
				}
			}
		}
	}
	every := 16
	if invariants.Enabled {
		every = 4
	}
	if m.bug == metaHonest && (m.all || m.at%every == 0) {
		if err := m.c.CheckInvariants(); err != nil {
			m.fail("invariants", "%v", err)
		}
	}
}

// end ends everything: idle is zero, and what tiers have is found.
func (m *metaRun) end() {
	for _, s := range slices.Clone(m.sessions) {
		if s.dead {
			continue
		}
		if len(s.fills)%2 == 1 {
			m.close(s)
			continue
		}
		for len(s.reqs) > 0 {
			m.endReq(s, s.reqs[0])
		}
		for len(s.fills) > 0 {
			m.endFills(s, s.fills[0].id)
		}
	}
	m.rest()
	for len(m.sessions) > 0 {
		if s := m.sessions[0]; !s.dead {
			m.close(s)
		}
		m.quiet(0)
	}
	m.rest()
	m.advance(m.now + 5000*Time(m.cfg.patience))
	m.check()
	m.idle()
	m.findAll()
	m.idle()
}

func (m *metaRun) endReq(s *metaSession, q *metaReq) {
	q.leases = nil
	s.reqs = remove(s.reqs, q)
	if err := m.c.Finish(m.now, s.id, q.id); err != nil {
		m.fail("answers", "finish: %v", err)
	}
	m.perform()
}

func (m *metaRun) endFills(s *metaSession, id string) {
	var fills []Fill
	s.fills = slices.DeleteFunc(s.fills, func(f metaFill) bool {
		if f.id == id {
			fills = append(fills, Fill{Slot: f.slot, Gen: f.gen})
			m.filling[f.k]--
		}
		return f.id == id
	})
	if _, err := m.c.Abort(m.now, s.id, id, fills, nil); err != nil {
		m.fail("answers", "abort: %v", err)
	}
	m.perform()
}

func (m *metaRun) idle() {
	s := m.c.Stats()
	if s.Free+s.Evictable+s.Remainder != s.Capacity || s.Sessions+s.Requests+s.Handovers+s.Pins+s.Reservations+s.Jobs+s.Waits+s.Facts+s.Fills+s.Timers+s.QuietSlots != 0 ||
		m.c.Pending() != (Pending{}) || m.c.NextDeadline() != 0 {
		m.fail("idle", "idle is not zero: %+v", s)
	}
	for t := range s.Tiers {
		if s.Reading[t] != 0 || s.Writing[t] != 0 || s.Waiting[t] != 0 || s.OverdueBytes[t] != 0 {
			m.fail("idle", "idle is not zero on tier %d: %+v", t, s)
		}
	}
	if m.bug != metaHonest {
		return
	}
	if err := m.c.CheckInvariants(); err != nil {
		m.fail("invariants", "%v", err)
	}
}

// findAll looks, in an idle node, for all that a healthy secondary has
// acknowledged: two tokens at a time, which fit into any primary.
func (m *metaRun) findAll() {
	if len(m.tiers) == 0 || !m.cfg.healthy() || m.cfg.atoms == 1 {
		return
	}
	const tokens = 2 // a multiple of every group's
	for ns, groups := range m.shapes {
		sid, err := m.c.OpenSession(NamespaceID(ns + 1))
		if err != nil {
			m.fail("answers", "open: %v", err)
		}
		s := &metaSession{name: "end", id: sid, ns: ns}
		m.sessions = append(m.sessions, s)
		for chain := range metaChains {
			for from := 0; from < metaTokens; from += tokens {
				var keys [][]block.Key
				all, pages, blocks := true, 0, 0
				for g := range groups {
					tpb := int(groups[g].TokensPerBlock)
					list := metaKeys(groups, g, chain)[from/tpb : (from+tokens)/tpb]
					keys = append(keys, list)
					for _, k := range list {
						all = all && m.acked[m.key(ns, k)]
					}
					pages += len(list) * m.pages(ns, g)
					blocks += len(list)
				}
				if !all || m.cfg.pages/m.cfg.extent < 2*len(groups)+2 || pages*100 > m.cfg.pages*m.cfg.inflight || blocks > m.cfg.readCredit {
					continue
				}
				if err := m.c.NewRequest(m.now, sid, "end", NoLimits()); err != nil {
					m.fail("answers", "new request: %v", err)
				}
				q := &metaReq{s: s, id: "end", p: NoLimits()}
				s.reqs = append(s.reqs, q)
				a := &Answer{}
				wid, err := m.c.Lookup(m.now, sid, "end", keys, LookupOptions{WaitUntil: m.now + 300*Time(m.cfg.patience)}, a)
				if err != nil {
					m.fail("answers", "lookup: %v", err)
				}
				m.said = append(m.said, metaSaid{})
				w := metaWait{op: len(m.said) - 1, q: q, keys: keys, patient: true}
				if wid != 0 {
					m.waits[wid] = w
					m.perform()
					m.rest()
				} else {
					m.answered(w, a)
					m.perform()
				}
				if got := m.said[w.op].tokens; got != tokens {
					m.fail("found", "tokens %d to %d of chain %d of n%d are acknowledged below, and %d are found in an idle node", from, from+tokens, chain, ns, got)
				}
				m.said = m.said[:w.op]
				m.endReq(s, q)
			}
		}
		m.close(s)
		m.quiet(len(m.sessions) - 1)
	}
	m.rest()
	m.advance(m.now + 5000*Time(m.cfg.patience))
}

// sabotage does what some bugs do after a call.
func (m *metaRun) sabotage() {
	if m.bug != metaEarly {
		return
	}
	for x := range m.c.extents {
		e := &m.c.extents[x]
		for i := range e.slots {
			if sl := &e.slots[i]; sl.state == slotQuarantined && sl.holder == 0 {
				s := Slot(uint32(x)<<m.c.extShift + uint32(i)*m.c.classes[e.class].stride)
				m.c.unquarantine(s)
				m.c.release(s, sl)
			}
		}
	}
}
