package replay

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/client"
	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/internal/node"
	"github.com/terrace-kv/terrace/tier"
)

// fakeNode is a node in this process: the real core, a slice for a region and
// a map for a tier, whose jobs end in the call that starts them. It checks no
// sums, so that the driver alone can find a wrong byte.
type fakeNode struct {
	mu      sync.Mutex
	core    *core.Core
	ns      core.NamespaceID
	region  []byte
	length  int
	below   map[block.Key][]byte
	waits   map[core.WaitID]chan *core.Answer
	damage  func(k block.Key, b []byte) // what the tier does to a block that it reads
	fail    error                       // of every call, once set
	engines int
	calls   map[string]int
	status  node.Status
	others  node.Status // what other engines are said to have done
}

func newFakeNode(primaryBytes int64, blockBytes int) *fakeNode {
	f := &fakeNode{
		region: make([]byte, primaryBytes), length: blockBytes, below: map[block.Key][]byte{},
		waits: map[core.WaitID]chan *core.Answer{}, calls: map[string]int{},
	}
	var err error
	f.core, err = core.New(core.Options{Size: primaryBytes, Tiers: []core.TierFacts{{Name: "fs", Known: f.known}}})
	if err != nil {
		panic(err)
	}
	return f
}

func (f *fakeNode) known(_ core.NamespaceID, keys []block.Key, out []tier.Presence) {
	for i := range keys {
		out[i] = tier.Absent
		if f.below[keys[i]] != nil {
			out[i] = tier.Present
		}
	}
}

// dial is a dialFunc.
func (f *fakeNode) dial(_ context.Context, _ string, ns *block.Namespace, _ string) (engine, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fail != nil {
		return nil, f.fail
	}
	if f.ns == 0 {
		id, err := f.core.OpenNamespace(ns.Spec().Groups)
		if err != nil {
			return nil, err
		}
		f.ns = id
	}
	sid, err := f.core.OpenSession(f.ns)
	f.engines++
	return &fakeEngine{f, sid}, err
}

func (f *fakeNode) now() core.Time { return core.Time(time.Now().UnixNano()) }

// perform ends what the core has started.
func (f *fakeNode) perform() {
	for {
		fx := f.core.TakeEffects(nil)
		if len(fx) == 0 {
			return
		}
		for _, e := range fx {
			switch e := e.(type) {
			case core.AnswerLookup:
				f.waits[e.Wait] <- e.Answer
				delete(f.waits, e.Wait)
			case core.StartJob:
				var results []core.JobResult
				for i, b := range e.Blocks {
					slot := f.block(b.Slot)
					r := core.JobResult{Index: i, Outcome: core.Done, Sum: b.Sum}
					if e.Kind == core.Cascade {
						f.below[b.Key] = append([]byte(nil), slot...)
						f.status.Tiers[0].WriteBytes += int64(f.length)
					} else {
						copy(slot, f.below[b.Key])
						if f.damage != nil {
							f.damage(b.Key, slot)
						}
						f.status.Tiers[0].ReadBytes += int64(f.length)
						f.status.Tiers[0].Hits++
					}
					results = append(results, r)
				}
				f.core.JobResults(f.now(), e.ID, results)
			}
		}
	}
}

type fakeEngine struct {
	*fakeNode
	sid core.SessionID
}

// enter locks the node for one call; the caller runs the returned function.
func (f *fakeNode) enter(ctx context.Context, name string) (leave func(), err error) {
	f.mu.Lock()
	f.calls[name]++
	if len(f.status.Tiers) == 0 {
		f.status.Tiers = []node.TierStatus{{Name: "fs", Failures: map[string]int64{}}}
	}
	return func() {
		f.perform()
		f.mu.Unlock()
	}, errors.Join(f.fail, ctx.Err())
}

func (e *fakeEngine) NewRequest(ctx context.Context, id string, p client.Params) (request, error) {
	leave, err := e.enter(ctx, "new")
	defer leave()
	if err != nil {
		return nil, err
	}
	return &fakeRequest{e, id}, e.core.NewRequest(e.now(), e.sid, id, p)
}

type fakeRequest struct {
	*fakeEngine
	id string
}

func (q *fakeRequest) LookupInto(ctx context.Context, keys [][]block.Key, o client.LookupOptions, out *client.Answer) error {
	leave, err := q.enter(ctx, "lookup")
	var (
		ch chan *core.Answer
		a  = new(core.Answer)
	)
	if err == nil {
		var w core.WaitID
		now := q.now()
		w, err = q.core.Lookup(now, q.sid, q.id, keys, core.LookupOptions{WaitUntil: now + core.Time(o.Wait)}, a)
		if w != 0 {
			ch = make(chan *core.Answer, 1)
			q.waits[w] = ch
		}
	}
	leave()
	if ch != nil {
		select {
		case a = <-ch:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	*out = client.Answer{Tokens: a.Tokens, Final: a.Final, Groups: a.Groups}
	return err
}

func (q *fakeRequest) Store(ctx context.Context, group uint32, first int, keys []block.Key, fill func(int, []byte) (uint64, error)) (client.Stored, error) {
	leave, err := q.enter(ctx, "store")
	defer leave()
	if err != nil {
		return client.Stored{}, err
	}
	grants, err := q.core.Reserve(q.now(), q.sid, q.id, group, first, keys, nil)
	if err != nil {
		return client.Stored{}, err
	}
	var fills []core.Fill
	for i, g := range grants {
		if g.Status == core.Granted {
			sum, err := fill(i, q.block(g.Slot))
			if err != nil {
				panic(err)
			}
			fills = append(fills, core.Fill{Slot: g.Slot, Gen: g.Gen, Sum: sum, HasSum: true})
		}
	}
	statuses, err := q.core.Commit(q.now(), q.sid, q.id, fills, nil)
	return client.Stored{Stored: len(statuses)}, err
}

func (q *fakeRequest) Finish(ctx context.Context) error {
	leave, err := q.enter(ctx, "finish")
	defer leave()
	if err != nil {
		return err
	}
	return q.core.Finish(q.now(), q.sid, q.id)
}

func (q *fakeRequest) Flush(ctx context.Context, wait time.Duration) (client.Flushed, error) {
	leave, err := q.enter(ctx, "flush")
	defer leave()
	if err != nil {
		return core.Flushed{}, err
	}
	_, _, f, err := q.core.Flush(q.now(), q.sid, q.id, q.now()+core.Time(wait))
	return f, err
}

func (e *fakeEngine) Status(ctx context.Context) ([]byte, error) {
	leave, err := e.enter(ctx, "status")
	defer leave()
	if err != nil {
		return nil, err
	}
	s := e.core.Stats()
	e.status.Primary = node.PrimaryStatus{CapacityBytes: s.Capacity, FreeBytes: s.Free, RemainderBytes: s.Remainder, Blocks: s.Blocks, Evicted: s.Evicted}
	e.status.Lookups.Calls, e.status.Stores.Committed = s.Lookups+e.others.Lookups.Calls, s.Committed+e.others.Stores.Committed
	e.status.Tiers[0].Blocks = int64(len(e.below))
	return json.Marshal(e.status)
}

func (f *fakeNode) block(s core.Slot) []byte { return f.region[s.Offset():][:f.length] }

func (e *fakeEngine) View(l client.Lease, fn func([]byte) error) error {
	return fn(e.block(core.Slot(l.Slot)))
}

func (e *fakeEngine) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.engines--
	_, err := e.core.CloseSession(e.now(), e.sid)
	return err
}
