package node

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/minio/crc64nvme"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/arena"
	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/internal/invariants"
	"github.com/terrace-kv/terrace/internal/lifecycle"
	"github.com/terrace-kv/terrace/internal/metrics"
	"github.com/terrace-kv/terrace/internal/peer"
	"github.com/terrace-kv/terrace/internal/transfer"
	"github.com/terrace-kv/terrace/tier"
)

const (
	namespacesMax = 4096
	touchQueue    = 256
	summers       = 2
	closeGrace    = 5 * time.Second // for lanes and tiers once the drain bound has passed

	// loopBound is how long a turn of a loop may take. None waits for anything
	// but the core's lock and memory: the longest is the sum of a large block
	// whose memory nobody has touched.
	loopBound = 30 * time.Second
)

// TierSpec is a secondary tier and how to drive it. The node owns the tier
// from a successful Open on, and closes it.
type TierSpec struct {
	Tier tier.Tier
	Lane transfer.Options
}

// Options configure a node. Zero values get defaults.
type Options struct {
	Core     core.Options // Size is required; Tiers is filled in by Open
	Tiers    []TierSpec   // in lookup order
	Peers    *PeerOptions // nil: the node speaks to no other
	Populate bool         // touch the region's memory ahead of use
	Version  string
	Socket   string // told in Status
	Logger   *slog.Logger
	Metrics  *metrics.Set // what the node observes: of Tiers, and then of PeersTier if there are peers; made by Open if nil

	loopBound time.Duration // for tests
}

// Node is a primary with its tiers.
type Node struct {
	opt    Options
	log    *slog.Logger
	boot   string
	start  time.Time
	gate   *lifecycle.Gate
	arena  *arena.Arena
	set    *metrics.Set
	tiers  []*tierHandle
	peers  *peers          // nil: none
	ctx    context.Context // ended by Close
	cancel context.CancelFunc
	wg     sync.WaitGroup

	watch *lifecycle.Watch
	pulse time.Duration // the ticker takes a turn so often at least

	wake     chan struct{} // the ticker's
	reap     chan struct{}
	touches  chan *touchBatch
	touchers sync.Pool

	mu         sync.Mutex // guards all below and the core
	core       *core.Core
	fx         []core.Effect
	alarm      core.Time // what the ticker sleeps for
	spaces     []*space  // by core.NamespaceID
	byPrint    map[block.Fingerprint]*space
	byName     map[string]*space
	sessions   map[core.SessionID]*Session
	lookups    map[core.WaitID]func(*core.Answer)
	flushes    map[core.WaitID]func(core.Flushed)
	resets     map[core.WaitID]func(bool)
	sums       []core.ComputeSum
	sumsReady  *sync.Cond
	changed    chan struct{} // closed at each change while somebody drains
	closed     bool
	closeError error
	closeDone  chan struct{}
	dying      []*Session // whose engines may still write
	reaping    int        // of them, those that the reaper has taken out to look at
}

// space is a namespace that an engine has opened.
type space struct {
	id      core.NamespaceID
	ns      *block.Namespace
	name    string
	strides []int64
}

type tierHandle struct {
	tier  tier.Tier
	info  tier.Info
	lane  *transfer.Lane
	known tier.Knower
	touch tier.Toucher
	last  atomic.Pointer[string] // last error

	panics atomic.Int64 // of its code, in calls that the node makes itself

	states [2]transfer.State // by transfer.Dir, guarded by Node.mu
}

// Open makes the region and starts the node. On an error the tiers are still
// the caller's.
func Open(ctx context.Context, o Options) (_ *Node, err error) {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.loopBound == 0 {
		o.loopBound = loopBound
	}
	var id [8]byte
	if _, err := rand.Read(id[:]); err != nil {
		return nil, fmt.Errorf("make a boot id: %w", err)
	}
	n := &Node{
		opt: o, log: o.Logger, boot: hex.EncodeToString(id[:]), start: time.Now(), gate: lifecycle.NewGate(),
		wake: make(chan struct{}, 1), reap: make(chan struct{}, 1), touches: make(chan *touchBatch, touchQueue),
		spaces: make([]*space, 1), byPrint: map[block.Fingerprint]*space{}, byName: map[string]*space{},
		sessions: map[core.SessionID]*Session{}, lookups: map[core.WaitID]func(*core.Answer){},
		flushes: map[core.WaitID]func(core.Flushed){}, resets: map[core.WaitID]func(bool){},
		closeDone: make(chan struct{}), watch: lifecycle.NewWatch(o.Logger), pulse: o.loopBound / 6,
	}
	n.touchers.New = func() any { return &touchBatch{} }
	n.sumsReady = sync.NewCond(&n.mu)
	var names []string
	for i, s := range o.Tiers {
		h := &tierHandle{tier: s.Tier, info: s.Tier.Info()}
		h.known, _ = s.Tier.(tier.Knower)
		h.touch, _ = s.Tier.(tier.Toucher)
		for _, other := range names {
			if other == h.info.Name {
				return nil, fmt.Errorf("tiers[%d].name is %q, which another tier has: give each its own", i, h.info.Name)
			}
		}
		names = append(names, h.info.Name)
		n.tiers = append(n.tiers, h)
	}
	if o.Peers != nil {
		if slices.Contains(names, PeersTier) {
			return nil, errPeerName
		}
		names = append(names, PeersTier)
	}
	if n.set = o.Metrics; n.set == nil {
		n.set = metrics.NewSet(names...)
	}
	co := o.Core
	co.Salt = binary.LittleEndian.Uint64(id[:])
	co.ReportReleases = invariants.Enabled
	co.Tiers = nil
	for i, h := range n.tiers {
		f := core.TierFacts{Name: h.info.Name, Medium: h.info.Medium, Locality: h.info.Locality,
			ReadBlocksMax: o.Tiers[i].Lane.QueueItems, WriteBlocksMax: o.Tiers[i].Lane.QueueItems}
		if h.known != nil {
			f.Known = func(ns core.NamespaceID, keys []block.Key, out []tier.Presence) {
				if n.guard(i, "known", func() error { h.known.Known(n.spaces[ns].ns, keys, out); return nil }) != nil {
					clear(out) // Unknown
				}
			}
		}
		co.Tiers = append(co.Tiers, f)
	}
	if o.Peers != nil {
		co.Tiers = append(co.Tiers, o.Peers.facts())
	}
	if n.core, err = core.New(co); err != nil {
		return nil, err
	}
	if n.arena, err = arena.Open(ctx, arena.Options{Size: co.Size}); err != nil {
		return nil, err
	}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	if o.Peers != nil {
		var secret [32]byte
		if _, err = rand.Read(secret[:]); err == nil {
			err = n.openPeers(*o.Peers, secret)
		}
		if err != nil {
			n.cancel()
			return nil, errors.Join(err, n.arena.Close())
		}
		n.loop("peer-log", n.peers.logger)
	}
	for i, h := range n.tiers {
		lo := o.Tiers[i].Lane
		lo.Logger = n.log
		if lo.OverdueBytesMax == 0 {
			lo.OverdueBytesMax = co.Size / 100 * int64(co.WithDefaults().OverduePercent)
		}
		lo.OnCall = func(d transfer.Dir, took time.Duration) {
			if d == transfer.Read {
				n.set.Tier(i).Read.Observe(took)
			} else {
				n.set.Tier(i).Write.Observe(took)
			}
		}
		h.lane = transfer.NewLane(i, h.tier, lo, n)
	}
	n.loop("ticker", n.ticker)
	for i := range summers {
		n.loop(fmt.Sprintf("summer-%d", i+1), n.summer)
	}
	n.loop("reaper", n.reaper)
	n.loop("toucher", n.toucher)
	if o.Populate {
		n.wg.Go(n.populator) // no loop: it ends when it has done its work
	}
	if err := n.gate.Ready(); err != nil {
		return nil, err
	}
	return n, nil
}

// loop starts a goroutine that Close waits for, and that is watched until then.
// If it panics, that is a bug in the node and ends the process.
func (n *Node) loop(name string, f func(l *lifecycle.Loop)) {
	l := n.watch.Loop(name, n.opt.loopBound)
	n.wg.Go(func() {
		f(l)
		n.mu.Lock()
		asked := n.closed
		n.mu.Unlock()
		l.End(asked)
	})
}

// Watch is the watch of the node's loops. Whoever has a loop that the node
// cannot do without adds it.
func (n *Node) Watch() *lifecycle.Watch { return n.watch }

// Loops tells the state of the loops. It waits for nothing, not even for a
// node that is stuck.
func (n *Node) Loops() []lifecycle.LoopState { return n.watch.Check() }

// guard makes a call of a tier's code that no lane makes. A panic there is an
// error of that call and ends nothing else.
func (n *Node) guard(t int, op string, call func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			h := n.tiers[t]
			err = &tier.Error{Op: op, Tier: h.info.Name, Class: tier.ClassPermanent, Err: fmt.Errorf("the tier panicked: %v", r), Hint: "this is a bug; its stack is in the log"}
			n.noteError(t, err)
			if c := h.panics.Add(1); c&(c-1) == 0 { // ever more rarely
				n.log.Error("a tier panicked", "tier", h.info.Name, "call", op, "panic", r, "times", c, "stack", string(debug.Stack()))
			}
		}
	}()
	return call()
}

// now is the core's clock: nanoseconds since the start, from 1 on.
func (n *Node) now() core.Time { return core.Time(time.Since(n.start)) + 1 }

func (n *Node) wall(t core.Time) time.Time { return n.start.Add(time.Duration(t - 1)) }

// perform does what the core has decided, until nothing is left to do. n.mu is
// held.
func (n *Node) perform() {
	for {
		if n.peers != nil {
			n.peers.settle(n.now())
		}
		n.fx = n.core.TakeEffects(n.fx[:0])
		if len(n.fx) == 0 {
			break
		}
		var refused []core.StartJob
		for _, e := range n.fx {
			if n.peers != nil && n.peers.bridge.Perform(n.now(), e) {
				continue
			}
			switch e := e.(type) {
			case core.StartJob:
				if err := n.startJob(&e); err != nil {
					n.noteError(e.Tier, err)
					refused = append(refused, e)
				}
			case core.CancelJob:
				n.tiers[e.Tier].lane.Cancel(transfer.JobID(e.ID))
			case core.ComputeSum:
				n.sums = append(n.sums, e)
				n.sumsReady.Signal()
			case core.AnswerLookup:
				if f := n.lookups[e.Wait]; f != nil {
					delete(n.lookups, e.Wait)
					f(e.Answer)
				}
			case core.AnswerFlush:
				if f := n.flushes[e.Wait]; f != nil {
					delete(n.flushes, e.Wait)
					f(e.Flushed)
				}
			case core.AnswerReset:
				if f := n.resets[e.Wait]; f != nil {
					delete(n.resets, e.Wait)
					f(e.Done)
				}
			case core.ReleasedSlots:
				// Poisoning is for builds with invariants; see core.Options.
				for _, s := range e.Slots {
					n.arena.Poison(s.Offset(), core.PageSize)
				}
			case core.RequestFinished:
				// No tier of a lane's binds to requests. Peers hear of CloseSource.
			}
		}
		clear(n.fx)
		for _, j := range refused {
			n.refuse(&j)
		}
	}
	if n.changed != nil {
		close(n.changed)
		n.changed = nil
	}
	for _, next := range []core.Time{n.core.NextDeadline(), n.peers.next()} {
		if next != 0 && (n.alarm == 0 || next < n.alarm) {
			n.alarm = next
			poke(n.wake)
		}
	}
}

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// startJob hands a job to its lane. n.mu is held; nothing here waits.
func (n *Node) startJob(e *core.StartJob) error {
	h, sp := n.tiers[e.Tier], n.spaces[e.NS]
	if e.Kind == core.ProbeJob {
		p := &transfer.Probe{ID: transfer.JobID(e.ID), NS: sp.ns, Deadline: n.wall(e.Deadline)}
		for i := range e.Blocks {
			p.Keys = append(p.Keys, e.Blocks[i].Key)
		}
		return h.lane.SubmitProbe(p)
	}
	j := &transfer.Job{ID: transfer.JobID(e.ID), Dir: transfer.Read, NS: sp.ns, Deadline: n.wall(e.Deadline),
		Items: make([]tier.Item, len(e.Blocks))}
	if e.Kind == core.Cascade {
		j.Dir = transfer.Write
	}
	for i := range e.Blocks {
		b := &e.Blocks[i]
		g := b.Key.Group()
		length, stride := sp.ns.BlockBytes(g), int(sp.strides[g])
		if e.Kind == core.Cascade && length < stride {
			n.arena.ZeroPad(b.Slot.Offset(), length, stride)
		}
		j.Items[i] = tier.Item{Key: b.Key, Buf: n.arena.Block(b.Slot.Offset(), length, stride), Sum: b.Sum}
	}
	return h.lane.Submit(j)
}

// refuse settles a job that its lane did not take. n.mu is held.
func (n *Node) refuse(e *core.StartJob) {
	if e.Kind == core.ProbeJob {
		n.core.ProbeResult(n.now(), e.ID, nil, false)
		return
	}
	res := make([]core.JobResult, len(e.Blocks))
	for i := range res {
		res[i] = core.JobResult{Index: i, Outcome: core.Failed, Class: tier.ClassRetryable, Cause: tier.CauseUnavailable}
	}
	n.core.JobResults(n.now(), e.ID, res)
}

// JobResults implements transfer.Sink.
func (n *Node) JobResults(lane int, id transfer.JobID, results []transfer.Result, last bool) {
	defer lifecycle.FailStop("node: results of a tier") // lanes recover
	res := make([]core.JobResult, len(results))
	for i, r := range results {
		res[i] = core.JobResult{Index: r.Index, Sum: r.Sum}
		if r.Err != nil {
			res[i].Outcome, res[i].Class, res[i].Cause = core.Failed, tier.ClassOf(r.Err), tier.CauseOf(r.Err)
			switch res[i].Class {
			case tier.ClassCancelled:
				if res[i].Cause != tier.CauseTimeout {
					res[i].Outcome = core.Cancelled
				}
			case tier.ClassNotFound:
			default:
				n.noteError(lane, r.Err)
			}
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.core.JobResults(n.now(), core.JobID(id), res)
	n.perform()
}

// ProbeResult implements transfer.Sink.
func (n *Node) ProbeResult(lane int, id transfer.JobID, found []bool, err error) {
	defer lifecycle.FailStop("node: results of a tier") // lanes recover
	if err != nil {
		n.noteError(lane, err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.core.ProbeResult(n.now(), core.JobID(id), found, err == nil)
	n.perform()
}

// Health implements transfer.Sink.
func (n *Node) Health(lane int, dir transfer.Dir, s transfer.State) {
	defer lifecycle.FailStop("node: results of a tier") // lanes recover
	n.mu.Lock()
	defer n.mu.Unlock()
	h := n.tiers[lane]
	h.states[dir] = s
	n.core.TierHealth(n.now(), lane, h.states[transfer.Read] != transfer.StateOpen, h.states[transfer.Write] != transfer.StateOpen)
	n.perform()
}

// noteError keeps a tier's last error for the status. That its lane is open is
// none: it hides why.
func (n *Node) noteError(t int, err error) {
	if errors.Is(err, transfer.ErrOpen) {
		return
	}
	s := time.Now().UTC().Format(time.RFC3339) + " " + err.Error()
	n.tiers[t].last.Store(&s)
}

// ticker calls Tick at the core's deadlines.
// ticker also takes a turn when there is nothing to do: so it notices a lock
// that nobody gives back, and sees to it that the log tells of other loops.
func (n *Node) ticker(l *lifecycle.Loop) {
	wait := n.pulse
	t := time.NewTimer(wait)
	defer t.Stop()
	for {
		l.Rest(wait)
		select {
		case <-n.ctx.Done():
			return
		case <-n.wake:
		case <-t.C:
		}
		l.Work()
		n.watch.Check()
		n.mu.Lock()
		if n.alarm != 0 && n.alarm <= n.now() {
			n.core.Tick(n.now())
			if n.peers != nil {
				n.peers.bridge.M.Tick(peer.Time(n.now()))
			}
			n.alarm = 0
			n.perform()
		}
		wait = n.pulse
		if n.alarm != 0 {
			wait = min(wait, max(0, time.Duration(n.alarm-n.now())))
		}
		n.mu.Unlock()
		t.Reset(wait)
	}
}

// summer computes the checksums of blocks that were committed without one.
func (n *Node) summer(l *lifecycle.Loop) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for {
		for len(n.sums) == 0 && !n.closed {
			l.Rest(0)
			n.sumsReady.Wait()
		}
		l.Work()
		if len(n.sums) == 0 {
			return
		}
		e := n.sums[0]
		if n.sums = n.sums[1:]; len(n.sums) == 0 {
			n.sums = nil
		}
		length := n.spaces[e.NS].ns.BlockBytes(e.Key.Group())
		n.mu.Unlock()
		sum := Checksum(n.arena.Bytes(e.Slot.Offset(), int64(length)))
		n.mu.Lock()
		n.core.SumDone(n.now(), e.Slot, e.Gen, sum)
		n.perform()
	}
}

// Checksum is the checksum that a block carries on every tier: CRC64-NVME.
func Checksum(b []byte) uint64 { return crc64nvme.Checksum(b) }

// touchBatch is the run of one lookup, to be told to tiers.
type touchBatch struct {
	ns   *block.Namespace
	keys []block.Key
}

func (n *Node) toucher(l *lifecycle.Loop) {
	for {
		l.Rest(0)
		select {
		case <-n.ctx.Done():
			return
		case b := <-n.touches:
			l.Work()
			for i, h := range n.tiers {
				if h.touch != nil {
					_ = n.guard(i, "touch", func() error { h.touch.Touch(b.ns, b.keys); return nil }) // noted there
				}
			}
			b.keys = b.keys[:0]
			n.touchers.Put(b)
		}
	}
}

// used tells the tiers of blocks that were served from the primary, so that
// what is hot above does not look cold below.
func (n *Node) used(ns *block.Namespace, keys [][]block.Key, a *core.Answer) {
	if len(n.tiers) == 0 {
		return
	}
	b := n.touchers.Get().(*touchBatch)
	b.ns = ns
	for g := range a.Groups {
		first := a.Groups[g].First
		for i := len(a.Groups[g].Leases) - 1; i >= 0; i-- { // roots last, so that they stay youngest
			b.keys = append(b.keys, keys[g][first+i])
		}
	}
	select {
	case n.touches <- b:
	default:
		b.keys = b.keys[:0]
		n.touchers.Put(b)
	}
}

// reaper asks the locks of ended sessions until no process of theirs can write
// any more, and only then gives their slots back.
func (n *Node) reaper(l *lifecycle.Loop) {
	const soon, late = 10 * time.Millisecond, time.Second
	wait, left := soon, 0
	t := time.NewTimer(time.Hour)
	defer t.Stop()
	for {
		if left > 0 {
			l.Rest(wait)
		} else {
			l.Rest(0)
		}
		select {
		case <-n.ctx.Done():
			return
		case <-n.reap:
			wait = soon
		case <-t.C:
			wait = min(2*wait, late)
		}
		l.Work()
		n.mu.Lock()
		dying := n.dying
		n.dying, n.reaping = nil, len(dying)
		n.mu.Unlock()
		var still []*Session
		for _, s := range dying {
			if !s.settle() {
				still = append(still, s)
			}
		}
		n.mu.Lock()
		n.dying, n.reaping = append(n.dying, still...), 0
		left = len(n.dying)
		n.mu.Unlock()
		if left > 0 {
			t.Reset(wait)
		}
	}
}

func (n *Node) populator() {
	begin := time.Now()
	told := begin
	tell := func(done, total int64) {
		if time.Since(told) >= 5*time.Second {
			told = time.Now()
			n.log.Info("primary: populating memory", "done_bytes", done, "total_bytes", total)
		}
	}
	if err := n.arena.Populate(n.ctx, 0, tell); err != nil {
		if n.ctx.Err() == nil {
			n.log.Warn("primary: memory is touched on first use instead of ahead", "err", err)
		}
		return
	}
	n.log.Info("primary: all memory populated", "bytes", n.arena.Size(), "took", time.Since(begin).Round(time.Millisecond))
}

// BootID is unique to this run of the node.
func (n *Node) BootID() string { return n.boot }

// Metrics is what the node observes.
func (n *Node) Metrics() *metrics.Set { return n.set }

// pending says what a drain still waits for, "" for nothing.
func (n *Node) pending(p core.Pending) string {
	var w []string
	if p.Jobs+p.Waiting > 0 {
		w = append(w, fmt.Sprintf("%d jobs, %d blocks to be written after them", p.Jobs, p.Waiting))
		for _, h := range n.tiers {
			if s := h.lane.Stats(); s.Read.Items+s.Write.Items > 0 {
				w = append(w, fmt.Sprintf("tier %s: %d blocks to read, %d to write", h.info.Name, s.Read.Items, s.Write.Items))
			}
		}
	}
	return strings.Join(w, "; ")
}

// Close drains the node: what is under way is finished until ctx ends, then
// cancelled. Sessions should have been closed before. It says what was left
// behind. Later calls wait for the first and return the same.
func (n *Node) Close(ctx context.Context) error {
	n.mu.Lock()
	if n.closed {
		n.mu.Unlock()
		<-n.closeDone
		return n.closeError
	}
	n.closed = true
	n.mu.Unlock()
	n.closeError = n.close(ctx)
	close(n.closeDone)
	return n.closeError
}

// Drain makes the node start nothing new and waits until its jobs are over. It
// says what is left when ctx ends first. Sessions may go on: what they ask for
// is answered from memory.
func (n *Node) Drain(ctx context.Context) error {
	n.mu.Lock()
	n.core.Drain()
	if n.peers != nil {
		n.peers.bridge.M.Drain(peer.Time(n.now()))
	}
	n.perform()
	n.mu.Unlock()
	at, now := context.WithCancel(ctx)
	now()
	_ = n.gate.Drain(at) // refuse new sessions; greetings under way are bounded by their callers
	if n.peers != nil {
		n.peers.drain(ctx)
	}
	if what := n.waitIdle(ctx); what != "" {
		return fmt.Errorf("drain bound passed with %s", what)
	}
	return nil
}

func (n *Node) close(ctx context.Context) error {
	defer n.gate.Close()
	var errs []error
	if err := n.Drain(ctx); err != nil {
		errs = append(errs, err)
	}
	n.mu.Lock()
	n.sumsReady.Broadcast()
	n.mu.Unlock()
	clean := true
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeGrace)
	defer cancel()
	if n.peers != nil {
		if err := n.peers.close(grace); err != nil {
			errs = append(errs, err)
			clean = false
		}
	}
	laneCtx := ctx
	if ctx.Err() == nil {
		laneCtx = grace
	} else {
		var c context.CancelFunc
		laneCtx, c = context.WithTimeout(context.WithoutCancel(ctx), closeGrace/2)
		defer c()
	}
	var wg sync.WaitGroup
	results := make([]error, 2*len(n.tiers))
	for i, h := range n.tiers {
		wg.Go(func() {
			if results[2*i] = h.lane.Close(laneCtx); results[2*i] != nil {
				results[2*i] = fmt.Errorf("tier %s: %w", h.info.Name, results[2*i])
			}
			if results[2*i+1] = h.tier.Close(grace); results[2*i+1] != nil {
				results[2*i+1] = fmt.Errorf("close tier %s: %w", h.info.Name, results[2*i+1])
			}
		})
	}
	n.tellUntil(wg.Wait)
	for i, err := range results {
		if err != nil {
			errs = append(errs, err)
			clean = clean && i%2 == 1
		}
	}
	n.waitLeases(grace)
	if invariants.Enabled {
		if err := n.CheckInvariants(); err != nil {
			panic(fmt.Sprintf("node: invariants at close: %v", err))
		}
	}
	n.cancel()
	n.wg.Wait()
	n.mu.Lock()
	busy := len(n.sessions) + len(n.dying)
	n.mu.Unlock()
	if clean && busy == 0 {
		if err := n.arena.Close(); err != nil {
			errs = append(errs, err)
		}
	}
	if busy > 0 {
		n.log.Info("the shared memory stays mapped until the process ends: engines may still be in it", "sessions", busy)
	}
	return errors.Join(errs...)
}

// tellUntil runs f and tells once a second which tiers still have calls under
// way.
func (n *Node) tellUntil(f func()) {
	over := make(chan struct{})
	n.wg.Go(func() {
		t := time.NewTicker(time.Second)
		defer t.Stop()
		for {
			select {
			case <-over:
				return
			case <-t.C:
			}
			for _, h := range n.tiers {
				if s := h.lane.Stats(); s.Read.Running+s.Write.Running+s.Probe.Running > 0 {
					n.log.Info("closing a tier: its calls have not returned", "tier", h.info.Name,
						"reads", s.Read.Running, "writes", s.Write.Running, "probes", s.Probe.Running)
				}
			}
		}
	})
	f()
	close(over)
}

// waitIdle waits for jobs to end.
func (n *Node) waitIdle(ctx context.Context) string {
	return n.wait(ctx, func() string {
		if p := n.core.Pending(); p.Jobs+p.Waiting > 0 {
			return n.pending(p)
		}
		return ""
	})
}

// wait waits until pending says nothing any more, tells once a second what it
// waits for, and returns that when ctx ends first. pending is called with n.mu
// held.
func (n *Node) wait(ctx context.Context, pending func() string) string {
	tell := time.NewTicker(time.Second)
	defer tell.Stop()
	for {
		n.mu.Lock()
		what := pending()
		if n.changed == nil {
			n.changed = make(chan struct{})
		}
		changed := n.changed
		n.mu.Unlock()
		if what == "" {
			return ""
		}
		select {
		case <-changed:
		case <-tell.C:
			n.log.Info("draining", "waiting_for", what)
		case <-ctx.Done():
			return what
		}
	}
}

// waitLeases gives engines a moment to let go of the region.
func (n *Node) waitLeases(ctx context.Context) {
	t := time.NewTicker(5 * time.Millisecond)
	defer t.Stop()
	for range 200 {
		n.mu.Lock()
		left := len(n.dying) + n.reaping
		n.mu.Unlock()
		if left == 0 {
			return
		}
		select {
		case <-t.C:
			poke(n.reap)
		case <-ctx.Done():
			return
		}
	}
}

func pid() int { return os.Getpid() }
