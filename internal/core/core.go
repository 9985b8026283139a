package core

import (
	"fmt"
	"math/bits"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/core/policy"
	"github.com/terrace-kv/terrace/internal/keymap"
	"github.com/terrace-kv/terrace/tier"
)

// TiersMax bounds the secondary tiers of one core.
const TiersMax = 16

// ProbeKeysMax bounds the keys of one probe of the bound tier.
const ProbeKeysMax = 4096

// ReserveKeysMax bounds the keys of one reserve call.
const ReserveKeysMax = 256

// TierFacts is what the core knows of a secondary tier.
type TierFacts struct {
	Name     string
	Medium   string
	Locality string
	// Known answers from memory, for keys of one namespace. nil: nothing is
	// known without a probe.
	Known func(ns NamespaceID, keys []block.Key, out []tier.Presence)
	// Bound: what the tier has depends on the request; only one with a Peer
	// sees it, what is learned of it is that request's own, and nothing is ever
	// written to it. At most one tier is bound.
	Bound bool
	// Bounds of its jobs; 0: those of the options. AssumeTimeout is that of
	// promotions for requests with PeerAssume, whose blocks may not exist yet; 0:
	// PromoteTimeout.
	ProbeTimeout, PromoteTimeout, AssumeTimeout time.Duration
	// Credit: blocks in unfinished promotions and cascades, at most.
	ReadBlocksMax, WriteBlocksMax int
}

// Options configure a core. Zero values get the defaults.
type Options struct {
	Size        int64 // bytes of the region; a multiple of PageSize
	ExtentBytes int64 // power of two of pages; default Size/64 within 16 MiB to 1 GiB
	Tiers       []TierFacts
	NewPolicy   func(policy.Nodes) policy.Policy // default LRU

	// ReservePercent of a class that stores and promotions each keep from the
	// other. Default 10; negative means none.
	ReservePercent int
	// OverduePercent of the region that one tier's overdue jobs may hold
	// before the tier counts as down, and one session's expired reservations
	// before it gets no new ones. Default 10.
	OverduePercent int
	// InflightPercent of the region that the unfinished jobs of one tier may
	// hold, so that one which hangs cannot take the primary with it; cascades
	// get half of that, and what is stored beyond it waits its turn unpinned.
	// Default 50.
	InflightPercent int

	LookupTimeout       time.Duration // default 10 s
	ProbeTimeout        time.Duration // default 2 s
	PromoteTimeout      time.Duration // default 10 s
	CascadeTimeout      time.Duration // default 60 s
	ReservationTimeout  time.Duration // default 60 s
	DistrustFor         time.Duration // default 10 s
	UnboundStoreTimeout time.Duration // default 60 s
	FactFor             time.Duration // how long a probe's answer holds; default 2 s

	FactsMax    int // remembered facts about keys; default 65536
	RequestsMax int // unfinished requests a session; default 65536

	ReportReleases bool   // emit ReleasedSlots
	Salt           uint64 // of the index; does not change what is answered
}

// WithDefaults returns the options with every zero value replaced.
func (o Options) WithDefaults() Options {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&o.LookupTimeout, 10*time.Second)
	def(&o.ProbeTimeout, 2*time.Second)
	def(&o.PromoteTimeout, 10*time.Second)
	def(&o.CascadeTimeout, 60*time.Second)
	def(&o.ReservationTimeout, 60*time.Second)
	def(&o.DistrustFor, 10*time.Second)
	def(&o.UnboundStoreTimeout, 60*time.Second)
	def(&o.FactFor, 2*time.Second)
	num := func(n *int, v int) {
		if *n == 0 {
			*n = v
		}
	}
	num(&o.ReservePercent, 10)
	o.ReservePercent = max(0, o.ReservePercent)
	num(&o.OverduePercent, 10)
	num(&o.InflightPercent, 50)
	num(&o.FactsMax, 65536)
	num(&o.RequestsMax, 65536)
	if o.NewPolicy == nil {
		o.NewPolicy = func(n policy.Nodes) policy.Policy { return policy.New("lru", n) }
	}
	if o.ExtentBytes == 0 {
		o.ExtentBytes = DefaultExtentBytes(o.Size)
	}
	for i := range o.Tiers {
		num(&o.Tiers[i].ReadBlocksMax, 4096)
		num(&o.Tiers[i].WriteBlocksMax, 4096)
		def(&o.Tiers[i].ProbeTimeout, o.ProbeTimeout)
		def(&o.Tiers[i].PromoteTimeout, o.PromoteTimeout)
		def(&o.Tiers[i].AssumeTimeout, o.Tiers[i].PromoteTimeout)
	}
	return o
}

// DefaultExtentBytes is the extent size for a region: 1/64 of it, as a power
// of two within 16 MiB to 1 GiB.
func DefaultExtentBytes(size int64) int64 {
	e := int64(16 << 20)
	for e < size/64 && e < 1<<30 {
		e *= 2
	}
	return e
}

func (o *Options) validate() error {
	switch {
	case o.Size <= 0 || o.Size%PageSize != 0 || o.Size/PageSize >= 1<<32-1:
		return fmt.Errorf("core: size is %d bytes, want a positive multiple of %d below 16 TiB", o.Size, PageSize)
	case o.ExtentBytes < PageSize || bits.OnesCount64(uint64(o.ExtentBytes)) != 1 || o.ExtentBytes > 1<<43:
		return fmt.Errorf("core: extent is %d bytes, want a power of two of at least %d", o.ExtentBytes, PageSize)
	case len(o.Tiers) > TiersMax:
		return fmt.Errorf("core: %d secondary tiers, at most %d are allowed", len(o.Tiers), TiersMax)
	}
	return nil
}

// Core is the state machine. It is not safe for concurrent use.
//
// INVARIANT(parts-add-up): free, evictable, pinned, filling, quarantined and
// remainder bytes add up to the region. INVARIANT(idle-is-zero): when requests
// are finished, sessions quiet and work is over, pinned, filling and quarantined
// bytes are zero and every table below is empty.
type Core struct {
	opt Options
	now Time

	// The region.
	extents    []extent
	extShift   uint
	extMask    uint32
	unassigned int
	classes    []class
	index      *keymap.Table // key → slot + 1; INVARIANT(key-unique)
	salt       uint64
	clock      uint64 // counts uses
	released   []Slot

	// Who uses it.
	ns       []namespace // by NamespaceID; 0 is none
	sessions map[SessionID]*session
	pins     keymap.Slab[pinRecord]
	pinIndex *keymap.Table // (request, slot) → pin record
	fills    []fill
	fillFree []uint32

	// Work under way.
	tiers     []tierState
	jobs      map[JobID]*job
	facts     map[factKey]*fact
	factAge   [2][]factAge // FIFO by expiry: probe answers, failed reads
	timers    timers
	rejudge   []*request
	supplied  []*request          // more of their hand-overs is readable since the last settle
	supplies  map[uint64]*request // hand-overs with a name that have not ended, by seq
	reset     *reset
	draining  bool
	lastID    uint64
	effects   []Effect
	stats     Counters
	requests  int
	waits     int
	nfills    int
	handovers int
	quiet     int // slots quarantined or doomed

	scratch struct {
		marks    [][]int8
		slots    [][]Slot
		good     []int
		room     []int
		presence []tier.Presence
		keys     []block.Key
		at       []int
		protect  []Slot
		fresh    []freshPin
	}
}

type namespace struct {
	groups []groupFacts
	tokens int64 // 0: not open
	blocks int64
}

type groupFacts struct {
	class  int
	tpb    int64
	window int   // 0: full attention
	bytes  int64 // of a block
}

// session is one engine's lease. It leaves the table when it is dead and
// nothing of it is left.
type session struct {
	id SessionID
	ns NamespaceID
	// requests has the newest unfinished generation of each id; older ones,
	// which are finishing, hang behind it.
	requests   map[string]*request
	unfinished int      // all generations
	keep       *request // list of requests whose blocks wait for a hand-over
	kept       int      // in keep
	// quiet waits for the engine's processes to let go of these slots.
	quiet        []Slot
	overdueBytes int64 // in expired reservations that it has not given back
	dead         bool
}

// settleSession forgets a dead session that holds nothing any more.
//
// INVARIANT(session-settles): a dead session holds no pin, and is in the table
// only for slots that its processes may still write and for checksums of what it
// had committed.
func (c *Core) settleSession(s *session) {
	if s.dead && len(s.quiet) == 0 && s.unfinished == 0 {
		delete(c.sessions, s.id)
	}
}

// New makes a core with an empty region.
func New(o Options) (*Core, error) {
	o = o.WithDefaults()
	if err := o.validate(); err != nil {
		return nil, err
	}
	c := &Core{
		opt:      o,
		extShift: uint(bits.TrailingZeros64(uint64(o.ExtentBytes / PageSize))),
		extMask:  uint32(o.ExtentBytes/PageSize - 1),
		index:    keymap.NewTable(),
		pinIndex: keymap.NewTable(),
		salt:     o.Salt,
		ns:       make([]namespace, 1),
		sessions: make(map[SessionID]*session),
		jobs:     make(map[JobID]*job),
		facts:    make(map[factKey]*fact),
		fills:    make([]fill, 1),
		tiers:    make([]tierState, len(o.Tiers)),
		supplies: make(map[uint64]*request),
	}
	for pages := o.Size / PageSize; pages > 0; {
		n := min(pages, o.ExtentBytes/PageSize)
		c.extents = append(c.extents, extent{class: -1, pages: uint32(n)})
		pages -= n
	}
	c.unassigned = len(c.extents)
	for i := range c.tiers {
		c.tiers[i] = tierState{facts: o.Tiers[i], readUp: true, writeUp: true, timer: timer{kind: timerWaiting, tier: i}}
	}
	return c, nil
}

func (c *Core) nextID() uint64 {
	c.lastID++
	return c.lastID
}

func (c *Core) emit(e Effect) { c.effects = append(c.effects, e) }

// TakeEffects moves the effects since the last call to buf. The caller
// performs them in order before it lets another call in.
func (c *Core) TakeEffects(buf []Effect) []Effect {
	if len(c.released) > 0 {
		// First: what follows may already use such a slot again.
		buf = append(buf, ReleasedSlots{Slots: c.released})
		c.released = nil
	}
	buf = append(buf, c.effects...)
	clear(c.effects)
	c.effects = c.effects[:0]
	return buf
}

// NextDeadline is when Tick has something to do, 0 for never.
func (c *Core) NextDeadline() Time {
	next := c.timers.next()
	for i := range c.factAge {
		if len(c.factAge[i]) > 0 && (next == 0 || c.factAge[i][0].until < next) {
			next = c.factAge[i][0].until
		}
	}
	return next
}

// OpenNamespace registers what the groups of a namespace need. Each stride of
// the groups is a size class. It fails when a block could never fit.
func (c *Core) OpenNamespace(groups []block.Group) (NamespaceID, error) {
	if len(groups) == 0 || len(groups) > block.GroupsMax {
		return 0, fmt.Errorf("%w: namespace has %d groups, want 1 to %d", ErrInvalid, len(groups), block.GroupsMax)
	}
	for i, g := range groups {
		if n := StridePages(g.BlockBytes); n > uint64(c.extMask)+1 || n > uint64(c.opt.Size/PageSize) {
			return 0, fmt.Errorf("%w: groups[%d].block_bytes is %d, an extent of the primary has %d bytes: set primary.extent higher, or primary.size",
				ErrTooLarge, i, g.BlockBytes, min(c.opt.ExtentBytes, c.opt.Size))
		}
		if g.TokensPerBlock == 0 {
			return 0, fmt.Errorf("%w: groups[%d].tokens_per_block is 0", ErrInvalid, i)
		}
	}
	n := namespace{tokens: 1}
	for _, g := range groups {
		n.groups = append(n.groups, groupFacts{
			class:  c.classFor(uint32(StridePages(g.BlockBytes))),
			tpb:    int64(g.TokensPerBlock),
			window: int(g.WindowBlocks),
			bytes:  int64(g.BlockBytes),
		})
	}
	c.ns = append(c.ns, n)
	return NamespaceID(len(c.ns) - 1), nil
}

// StridePages is the distance between slots for blocks of n bytes, in pages.
func StridePages(n uint64) uint64 { return (n + PageSize - 1) / PageSize }

// OpenSession starts a lease for one engine.
func (c *Core) OpenSession(ns NamespaceID) (SessionID, error) {
	if ns == 0 || int(ns) >= len(c.ns) {
		return 0, ErrNotReady
	}
	if c.draining {
		return 0, ErrDraining
	}
	s := &session{id: SessionID(c.nextID()), ns: ns, requests: make(map[string]*request)}
	c.sessions[s.id] = s
	return s.id, nil
}

// CloseSession ends a lease: its requests are over and their pins given back.
// Slots that the engine could still write are quarantined until SessionQuiet.
// It tells how many.
func (c *Core) CloseSession(now Time, id SessionID) (quarantined int, err error) {
	s := c.sessions[id]
	if s == nil || s.dead {
		return 0, ErrNoSession
	}
	c.now = now
	s.dead = true
	for _, q := range s.all() {
		if q.state == reqHandover {
			c.endHandover(q)
			continue
		}
		c.endRequest(q)
		for h := q.fillHead; h != 0; {
			f := &c.fills[h]
			slot, next := f.slot, f.next
			if f.kind == fillStore { // what is committed is summed all the same
				c.dropFill(h)
				c.at(slot).holder = 0
				s.quiet = append(s.quiet, slot)
				c.forgetFill(h)
			}
			h = next
		}
	}
	c.settleSession(s)
	c.settle()
	return len(s.quiet), nil
}

// SessionQuiet tells that no process of a closed session can write any more.
func (c *Core) SessionQuiet(now Time, id SessionID) error {
	s := c.sessions[id]
	if s == nil || !s.dead {
		return ErrNoSession
	}
	c.now = now
	for _, slot := range s.quiet {
		c.unquarantine(slot)
		c.release(slot, c.at(slot))
	}
	s.quiet = nil
	c.settleSession(s)
	return nil
}

func (c *Core) session(id SessionID) (*session, error) {
	if s := c.sessions[id]; s != nil && !s.dead {
		return s, nil
	}
	return nil, ErrNoSession
}

func (c *Core) request(id SessionID, name string) (*request, error) {
	s, err := c.session(id)
	if err != nil {
		return nil, err
	}
	q := s.requests[name]
	if q == nil {
		return nil, ErrNoRequest
	}
	return q, nil
}

func (c *Core) active(id SessionID, name string) (*request, error) {
	q, err := c.request(id, name)
	if err == nil && q.state != reqActive {
		return nil, ErrFinished
	}
	return q, err
}

// Drain makes the core start nothing new. What is under way ends as usual;
// Pending tells when all is over.
func (c *Core) Drain() { c.draining = true }

// Reset makes every block of the primary a Hit nowhere, at once, and leaves
// the secondaries alone. AnswerReset comes when all I/O that was under way is
// over, or at the deadline.
func (c *Core) Reset(now, until Time) (WaitID, error) {
	if c.reset != nil {
		return 0, ErrStillPending
	}
	c.now = now
	r := &reset{id: WaitID(c.nextID())}
	c.reset = r
	for _, j := range c.sortedJobs() {
		if j.kind == ProbeJob {
			continue
		}
		j.reset = r
		r.jobs++
		if j.kind == Promotion {
			c.failJob(j, Cancelled)
			c.emit(CancelJob{ID: j.id, Tier: j.tier})
		}
	}
	for x := range c.extents {
		e := &c.extents[x]
		for i := range e.slots {
			sl := &e.slots[i]
			s := Slot(uint32(x)<<c.extShift + uint32(i)*c.classes[e.class].stride)
			switch sl.state {
			case slotResident:
				c.doom(s, sl)
			case slotFilling:
				c.dropFill(sl.holder)
			}
		}
	}
	c.stats.Resets++
	for t := range c.tiers {
		c.pump(t) // what waited is forgotten
	}
	if r.jobs == 0 {
		c.endReset(true)
	} else {
		r.timer = timer{kind: timerReset}
		c.timers.arm(&r.timer, until)
	}
	c.settle()
	return r.id, nil
}

type reset struct {
	id    WaitID
	jobs  int // unfinished jobs that were under way when it began
	timer timer
}

func (c *Core) endReset(done bool) {
	r := c.reset
	c.reset = nil
	c.timers.disarm(&r.timer)
	for _, j := range c.jobs {
		j.reset = nil
	}
	c.emit(AnswerReset{Wait: r.id, Done: done})
}

// Tick ends what is due at now.
func (c *Core) Tick(now Time) {
	c.now = now
	for t := c.timers.due(now); t != nil; t = c.timers.due(now) {
		switch t.kind {
		case timerJob:
			c.jobOverdue(t.job)
		case timerLookup:
			c.lookupOverdue(t.req)
		case timerWait:
			c.answerWait(t.req, true)
		case timerFlush:
			c.flushOverdue(t.req)
		case timerResv:
			c.reservationOverdue(t.resv)
		case timerHandover:
			c.endHandover(t.req)
			c.stats.HandoversExpired++
		case timerWaiting:
			c.pump(t.tier)
		case timerReset:
			c.endReset(false)
		}
	}
	c.expireFacts()
	c.settle()
}

// TierHealth tells whether a tier's lane takes reads and writes.
func (c *Core) TierHealth(now Time, t int, read, write bool) {
	c.now = now
	c.tiers[t].readUp, c.tiers[t].writeUp = read, write
	c.pump(t)
}

// Pending counts what a drain waits for.
type Pending struct {
	Jobs         int
	Waiting      int // stored blocks that wait for a tier's credit
	Reservations int
	Waits        int
	Requests     int
	Quarantined  int
}

// Idle says that nothing is pending.
func (p Pending) Idle() bool { return p == Pending{} }

// Pending tells what is under way.
func (c *Core) Pending() Pending {
	waiting := 0
	for t := range c.tiers {
		waiting += len(c.tiers[t].waiting)
	}
	return Pending{Jobs: len(c.jobs), Waiting: waiting, Reservations: c.nfills - c.promoting(), Waits: c.waits, Requests: c.requests, Quarantined: c.quiet}
}

func (c *Core) promoting() int {
	n := 0
	for i := range c.classes {
		n += c.classes[i].filling[usePromote]
	}
	return n
}
