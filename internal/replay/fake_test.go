package replay

import (
	"context"
	"encoding/json"
	"sync"
	"time"

	"github.com/terrace-kv/terrace/block"
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
					slot := f.region[b.Slot.Offset():][:f.length]
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
func (f *fakeNode) enter(name string) (leave func(), err error) {
	f.mu.Lock()
	f.calls[name]++
	if len(f.status.Tiers) == 0 {
		f.status.Tiers = []node.TierStatus{{Name: "fs", Failures: map[string]int64{}}}
	}
	return func() {
		f.perform()
		f.mu.Unlock()
	}, f.fail
}

func (e *fakeEngine) NewRequest(_ context.Context, id string) error {
	leave, err := e.enter("new")
	defer leave()
	if err != nil {
		return err
	}
	return e.core.NewRequest(e.now(), e.sid, id, core.NoLimits())
}

func (e *fakeEngine) Lookup(ctx context.Context, id string, keys []block.Key, wait time.Duration, out *core.Answer) error {
	leave, err := e.enter("lookup")
	var ch chan *core.Answer
	if err == nil {
		var w core.WaitID
		now := e.now()
		w, err = e.core.Lookup(now, e.sid, id, [][]block.Key{keys}, core.LookupOptions{WaitUntil: now + core.Time(wait)}, out)
		if w != 0 {
			ch = make(chan *core.Answer, 1)
			e.waits[w] = ch
		}
	}
	leave()
	if ch != nil {
		select {
		case a := <-ch:
			*out = *a
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return err
}

func (e *fakeEngine) Reserve(_ context.Context, id string, first int, keys []block.Key, out []core.Grant) ([]core.Grant, error) {
	leave, err := e.enter("reserve")
	defer leave()
	if err != nil {
		return out, err
	}
	return e.core.Reserve(e.now(), e.sid, id, 0, first, keys, out)
}

func (e *fakeEngine) Commit(_ context.Context, id string, fills []core.Fill, out []core.FillStatus) ([]core.FillStatus, error) {
	leave, err := e.enter("commit")
	defer leave()
	if err != nil {
		return out, err
	}
	return e.core.Commit(e.now(), e.sid, id, fills, out)
}

func (e *fakeEngine) Finish(_ context.Context, id string) error {
	leave, err := e.enter("finish")
	defer leave()
	if err != nil {
		return err
	}
	return e.core.Finish(e.now(), e.sid, id)
}

func (e *fakeEngine) Flush(_ context.Context, id string, wait time.Duration) (core.Flushed, error) {
	leave, err := e.enter("flush")
	defer leave()
	if err != nil {
		return core.Flushed{}, err
	}
	_, _, f, err := e.core.Flush(e.now(), e.sid, id, e.now()+core.Time(wait))
	return f, err
}

func (e *fakeEngine) Status(context.Context) ([]byte, error) {
	leave, err := e.enter("status")
	defer leave()
	if err != nil {
		return nil, err
	}
	s := e.core.Stats()
	e.status.Primary = node.PrimaryStatus{CapacityBytes: s.Capacity, FreeBytes: s.Free, RemainderBytes: s.Remainder, Blocks: s.Blocks, Evicted: s.Evicted}
	e.status.Tiers[0].Blocks = int64(len(e.below))
	return json.Marshal(e.status)
}

func (e *fakeEngine) Block(s core.Slot) []byte { return e.region[s.Offset():][:e.length] }

func (e *fakeEngine) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.engines--
	_, err := e.core.CloseSession(e.now(), e.sid)
	return err
}
