package replay

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/internal/core/policy"
	"github.com/terrace-kv/terrace/tier"
)

// dryOptions say what a dry run pretends to have.
type dryOptions struct {
	policy   string
	capacity int64 // of the primary, in blocks
	below    int64 // of one secondary, in blocks; 0: none, negative: unbounded
}

// dryCounts is what a dry run counts beyond its Point.
type dryCounts struct {
	requests  int64
	stored    int64
	evicted   int64
	blocks    int64 // in the primary at the end
	secondary factTier
	promoted  int64
	cascaded  int64
}

// checkEvery is after how many requests a dry run looks at its context and
// tells its progress.
const checkEvery = 64

// dryRun is the core alone, driven by one engine that takes no time. Slots are
// one page whatever the block's real size, so that capacity counts blocks
// exactly. Jobs end in the step that starts them.
type dryRun struct {
	core    *core.Core
	session core.SessionID
	now     core.Time
	below   *factTier
	counts  dryCounts

	keys     []block.Key
	answer   core.Answer
	grants   []core.Grant
	fills    []core.Fill
	statuses []core.FillStatus
	effects  []core.Effect
	results  []core.JobResult
}

// dry replays t against the core with no bytes. When ctx ends it returns what
// was counted until then and ctx's error.
func dry(ctx context.Context, t *trace, o dryOptions, done *atomic.Int64) (Point, dryCounts, error) {
	p := Point{Policy: o.policy, CapacityBlocks: o.capacity}
	d := &dryRun{}
	opt := core.Options{
		Size:      o.capacity * core.PageSize,
		NewPolicy: func(n policy.Nodes) policy.Policy { return policy.New(o.policy, n) },
		// A replay must not depend on a random salt.
		Salt: 1,
		// Jobs end at once here: no run is to be cut for what is in flight.
		InflightPercent: 100,
	}
	if o.below != 0 {
		d.below = newFactTier(o.below)
		opt.Tiers = []core.TierFacts{{
			Name: "fs", Medium: tier.MediumStorage, Locality: tier.LocalityLocal, Known: d.below.known,
			// Jobs end at once, so these never bind but for one huge request.
			ReadBlocksMax: blocksMax, WriteBlocksMax: blocksMax,
		}}
	}
	var err error
	if d.core, err = core.New(opt); err != nil {
		return p, d.counts, fmt.Errorf("capacity of %d blocks: %w", o.capacity, err)
	}
	tokens := int64(t.info.TokensPerBlock)
	ns, err := d.core.OpenNamespace([]block.Group{{Kind: block.KindFull, TokensPerBlock: uint32(tokens), BlockBytes: core.PageSize}})
	if err != nil {
		return p, d.counts, err
	}
	if d.session, err = d.core.OpenSession(ns); err != nil {
		return p, d.counts, err
	}
	for i := range t.ends {
		if i%checkEvery == 0 && i > 0 {
			done.Add(checkEvery)
			if err = ctx.Err(); err != nil {
				break
			}
		}
		d.keys = t.appendRequest(d.keys[:0], i)
		if err = d.request(tokens, &p); err != nil {
			return p, d.counts, fmt.Errorf("request %d: %w", i+1, err)
		}
		p.References += int64(len(d.keys))
		d.counts.requests++
	}
	stats := d.core.Stats()
	d.counts.evicted, d.counts.blocks = stats.Evicted, stats.Blocks
	d.counts.stored = stats.Committed
	if d.below != nil {
		d.counts.secondary = *d.below
	}
	return p, d.counts, err
}

// request is the life of one prompt. One id serves for all: each is finished
// before the next begins.
func (d *dryRun) request(tokens int64, p *Point) error {
	const id = "dry"
	d.now++
	if err := d.core.NewRequest(d.now, d.session, id, core.NoLimits()); err != nil {
		return err
	}
	hits := 0
	if len(d.keys) > 0 {
		lists := [1][]block.Key{d.keys}
		for again := true; again; {
			if _, err := d.core.Lookup(d.now, d.session, id, lists[:], core.LookupOptions{}, &d.answer); err != nil {
				return err
			}
			if again = !d.answer.Final; again && !d.perform() {
				return errors.New("a lookup is not final and waits for nothing")
			}
		}
		hits = int(d.answer.Tokens / tokens)
		p.PrefixHits += int64(hits)
	}
	most := core.ReserveKeysMax
	for end := len(d.keys); end > hits; {
		first := max(hits, end-most)
		keys := d.keys[first:end]
		var err error
		d.grants, err = d.core.Reserve(d.now, d.session, id, 0, first, keys, d.grants[:0])
		if refused(err) && len(keys) > 1 {
			most = len(keys) / 2 // as client.Request.Store does
			continue
		}
		end = first
		if refused(err) {
			p.Refusals++
			continue
		}
		if err != nil {
			return err
		}
		d.fills = d.fills[:0]
		for _, g := range d.grants {
			if g.Status == core.Granted {
				d.fills = append(d.fills, core.Fill{Slot: g.Slot, Gen: g.Gen, HasSum: true})
			}
		}
		if d.statuses, err = d.core.Commit(d.now, d.session, id, d.fills, d.statuses[:0]); err != nil {
			return err
		}
		d.perform()
	}
	if err := d.core.Finish(d.now, d.session, id); err != nil {
		return err
	}
	d.perform()
	return nil
}

// perform ends every job that was started, and says whether there was one.
func (d *dryRun) perform() bool {
	some := false
	for {
		d.effects = d.core.TakeEffects(d.effects[:0])
		if len(d.effects) == 0 {
			return some
		}
		for _, e := range d.effects {
			j, ok := e.(core.StartJob)
			if !ok {
				continue
			}
			some = true
			d.results = d.results[:0]
			for i := range j.Blocks {
				d.results = append(d.results, core.JobResult{Index: i, Outcome: core.Done})
				d.below.put(j.Blocks[i].Key)
			}
			if j.Kind == core.Promotion {
				d.counts.promoted += int64(len(j.Blocks))
			} else {
				d.counts.cascaded += int64(len(j.Blocks))
			}
			d.core.JobResults(d.now, j.ID, d.results)
		}
	}
}

// factTier knows which blocks a secondary of some capacity would have. It
// evicts what was used longest ago.
type factTier struct {
	capacity int64 // in blocks; negative: unbounded
	at       map[block.Key]uint32
	keys     []block.Key // by id, from 1
	nodes    []policy.Node
	order    policy.Policy
	evicted  int64
}

func newFactTier(capacity int64) *factTier {
	f := &factTier{capacity: capacity, at: map[block.Key]uint32{}, keys: make([]block.Key, 1), nodes: make([]policy.Node, 1)}
	f.order = policy.New("lru", f)
	return f
}

// Node and Busy show the table to the policy.
func (f *factTier) Node(id uint32) *policy.Node { return &f.nodes[id] }

// Busy is false: nothing here takes time.
func (f *factTier) Busy(uint32) bool { return false }

func (f *factTier) known(_ core.NamespaceID, keys []block.Key, out []tier.Presence) {
	for i := range keys {
		out[i] = tier.Absent
		if f.at[keys[i]] != 0 {
			out[i] = tier.Present
		}
	}
}

// put stores a block, or uses it again.
func (f *factTier) put(k block.Key) {
	if id := f.at[k]; id != 0 {
		f.order.Use(id)
		return
	}
	var id uint32
	if f.capacity >= 0 && int64(len(f.at)) >= f.capacity {
		id = f.order.Oldest()
		f.order.Remove(id, 0, true)
		delete(f.at, f.keys[id])
		f.evicted++
	} else {
		id = uint32(len(f.keys))
		f.keys, f.nodes = append(f.keys, block.Key{}), append(f.nodes, policy.Node{})
	}
	f.keys[id] = k
	f.at[k] = id
	f.order.Insert(id, k.Mix(0))
}

// sweep makes a dry run of each option, as many at once as there are
// processors. Points are in the order of the options. When ctx ends, the
// points that are whole so far are returned with ctx's error.
func sweep(ctx context.Context, t *trace, options []dryOptions, done *atomic.Int64) ([]Point, []dryCounts, error) {
	points, counts := make([]Point, len(options)), make([]dryCounts, len(options))
	errs := make([]error, len(options))
	var (
		wg   sync.WaitGroup
		next atomic.Int64
	)
	for range min(runtime.GOMAXPROCS(0), len(options)) {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < len(options); i = int(next.Add(1)) - 1 {
				points[i], counts[i], errs[i] = dry(ctx, t, options[i], done)
			}
		})
	}
	wg.Wait()
	return points, counts, errors.Join(errs...)
}
