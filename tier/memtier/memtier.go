package memtier

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
)

// Op is a kind of call, for hooks and counters.
type Op uint8

const (
	OpContains Op = iota
	OpRead
	OpWrite
	OpDelete
	OpOpenNamespace // the key is zero
	OpSetAside
	opCount
)

var opNames = [opCount]string{"contains", "read", "write", "delete", "open_namespace", "set_aside"}

func (o Op) String() string { return opNames[o] }

// Fault is what happens to one key of one call. The zero Fault is none.
type Fault struct {
	// Wait is waited for first, if not nil. The end of the call's ctx ends the
	// wait and cancels the key, unless Hang is set: then only the channel does,
	// as with a file call that the kernel does not give back.
	Wait <-chan struct{}
	Hang bool

	Err     error // fails the key, which is otherwise untouched
	Corrupt bool  // a Read gives, or a Write keeps, a block with one bit flipped
	Short   bool  // a Read fills half the buffer and fails with CauseShort
	Lie     bool  // a Contains says the opposite
}

// Hook decides the fate of a key. It is called outside the tier's lock, from
// many goroutines, after the call has been counted.
type Hook func(ctx context.Context, op Op, ns *block.Namespace, key block.Key) Fault

// Options of a Tier.
type Options struct {
	Info     tier.Info // Name and Type default to "mem", medium to cpu, locality to local
	Capacity int64     // bytes of blocks; the least recently used go first. 0 is unbounded
	Hook     Hook      // may be nil; SetHook changes it
}

// Tier keeps blocks in a map. Without an index that others may see, it must be
// probed; Indexed is the same tier with one. It is safe for concurrent use.
type Tier struct {
	info     tier.Info
	capacity int64

	mu     sync.Mutex
	hook   Hook
	blocks map[id]*list.Element // of *entry
	lru    list.List            // front is the most recently used
	used   int64
	stats  tier.Stats
	calls  [opCount]int64
	keys   [opCount]int64
	spaces map[block.Fingerprint]*block.Namespace

	// Calls under way. idle is closed when closed is set and n is 0.
	n      int
	closed bool
	idle   chan struct{}
}

// Indexed is a Tier that answers from its index, as a Knower.
type Indexed struct{ *Tier }

type id struct {
	ns  block.Fingerprint
	key block.Key
}

type entry struct {
	id   id
	data []byte
	sum  uint64
}

var (
	_ tier.Tier            = (*Tier)(nil)
	_ tier.NamespaceOpener = (*Tier)(nil)
	_ tier.Toucher         = (*Tier)(nil)
	_ tier.SetAsider       = (*Tier)(nil)
	_ tier.Statser         = (*Tier)(nil)
	_ tier.Knower          = (*Indexed)(nil)
)

// New makes a tier that has to be probed.
func New(o Options) *Tier {
	if o.Info.Name == "" {
		o.Info.Name = "mem"
	}
	if o.Info.Type == "" {
		o.Info.Type = "mem"
	}
	if o.Info.Medium == "" {
		o.Info.Medium = tier.MediumCPU
	}
	if o.Info.Locality == "" {
		o.Info.Locality = tier.LocalityLocal
	}
	return &Tier{
		info: o.Info, capacity: o.Capacity, hook: o.Hook,
		blocks: map[id]*list.Element{}, spaces: map[block.Fingerprint]*block.Namespace{},
		idle: make(chan struct{}),
	}
}

// NewIndexed makes a tier that knows what it has.
func NewIndexed(o Options) *Indexed {
	o.Info.Authoritative = true
	return &Indexed{New(o)}
}

// SetHook changes the hook for calls that come later.
func (t *Tier) SetHook(h Hook) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.hook = h
}

// Calls is the number of calls of a kind so far, ErrClosed ones left out.
func (t *Tier) Calls(op Op) int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.calls[op]
}

// Keys is the number of keys in those calls.
func (t *Tier) Keys(op Op) int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.keys[op]
}

// Info is in tier.Tier.
func (t *Tier) Info() tier.Info { return t.info }

// Stats is in tier.Statser.
func (t *Tier) Stats() tier.Stats {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.stats
	s.Mode, s.Where = "memory", "memory"
	s.Blocks, s.UsedBytes, s.CapacityBytes = int64(len(t.blocks)), t.used, t.capacity
	s.ScanDone = true
	return s
}

// enter admits a call and counts it.
func (t *Tier) enter(op Op, keys int) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return tier.ErrClosed
	}
	t.n++
	t.calls[op]++
	t.keys[op] += int64(keys)
	return nil
}

func (t *Tier) leave() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.n--; t.n == 0 && t.closed {
		close(t.idle)
	}
}

// fault asks the hook about one key, and waits if that says so.
func (t *Tier) fault(ctx context.Context, op Op, ns *block.Namespace, key block.Key) (Fault, error) {
	t.mu.Lock()
	hook := t.hook
	t.mu.Unlock()
	var f Fault
	if ctx.Err() == nil && hook != nil {
		f = hook(ctx, op, ns, key)
	}
	if f.Wait != nil {
		done := ctx.Done()
		if f.Hang {
			done = nil
		}
		select {
		case <-f.Wait:
		case <-done:
		}
	}
	if err := ctx.Err(); err != nil {
		cause := tier.CauseOther
		if errors.Is(err, context.DeadlineExceeded) {
			cause = tier.CauseTimeout
		}
		return f, t.fail(op, key, tier.ClassCancelled, cause, err)
	}
	return f, f.Err
}

func (t *Tier) fail(op Op, key block.Key, class tier.Class, cause tier.Cause, err error) error {
	return &tier.Error{Op: op.String(), Tier: t.info.Name, Key: key, Class: class, Cause: cause, Err: err}
}

// checkItem refuses a buffer that is not a block of the namespace.
func (t *Tier) checkItem(op Op, ns *block.Namespace, it *tier.Item) error {
	if want := ns.BlockBytes(it.Key.Group()); want == 0 || len(it.Buf) != want {
		return t.fail(op, it.Key, tier.ClassPermanent, tier.CauseOther,
			fmt.Errorf("buffer has %d bytes, a block of group %d has %d", len(it.Buf), it.Key.Group(), want))
	}
	return nil
}

// OpenNamespace is in tier.NamespaceOpener.
func (t *Tier) OpenNamespace(ctx context.Context, ns *block.Namespace) error {
	if err := t.enter(OpOpenNamespace, 0); err != nil {
		return err
	}
	defer t.leave()
	if _, err := t.fault(ctx, OpOpenNamespace, ns, block.Key{}); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.spaces[ns.Fingerprint()] = ns
	return nil
}

// Namespaces is the number of namespaces opened so far.
func (t *Tier) Namespaces() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.spaces)
}

// Contains is in tier.Tier.
func (t *Tier) Contains(ctx context.Context, ns *block.Namespace, keys []block.Key, found []bool) error {
	if err := t.enter(OpContains, len(keys)); err != nil {
		return err
	}
	defer t.leave()
	for i, key := range keys {
		f, err := t.fault(ctx, OpContains, ns, key)
		if err != nil {
			return err
		}
		t.mu.Lock()
		_, ok := t.blocks[id{ns.Fingerprint(), key}]
		t.mu.Unlock()
		found[i] = ok != f.Lie
	}
	return nil
}

// Known is in tier.Knower.
func (t *Indexed) Known(ns *block.Namespace, keys []block.Key, out []tier.Presence) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i, key := range keys {
		out[i] = tier.Absent
		if _, ok := t.blocks[id{ns.Fingerprint(), key}]; ok {
			out[i] = tier.Present
		}
	}
}

// Touch is in tier.Toucher.
func (t *Tier) Touch(ns *block.Namespace, keys []block.Key) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, key := range keys {
		if el, ok := t.blocks[id{ns.Fingerprint(), key}]; ok {
			t.lru.MoveToFront(el)
		}
	}
}

// Read is in tier.Tier.
func (t *Tier) Read(ctx context.Context, ns *block.Namespace, items []tier.Item) {
	if err := t.enter(OpRead, len(items)); err != nil {
		failAll(items, err)
		return
	}
	defer t.leave()
	for i := range items {
		it := &items[i]
		it.Err = t.read(ctx, ns, it)
	}
}

func (t *Tier) read(ctx context.Context, ns *block.Namespace, it *tier.Item) error {
	if err := t.checkItem(OpRead, ns, it); err != nil {
		return err
	}
	f, err := t.fault(ctx, OpRead, ns, it.Key)
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	el, ok := t.blocks[id{ns.Fingerprint(), it.Key}]
	if !ok {
		return tier.ErrNotFound
	}
	t.lru.MoveToFront(el)
	e := el.Value.(*entry)
	if f.Short {
		copy(it.Buf, e.data[:len(e.data)/2])
		return t.fail(OpRead, it.Key, tier.ClassCorrupt, tier.CauseShort,
			fmt.Errorf("%d bytes of %d", len(e.data)/2, len(e.data)))
	}
	copy(it.Buf, e.data)
	clear(it.Buf[len(it.Buf):min(cap(it.Buf), padded(len(it.Buf)))])
	it.Sum = e.sum
	if f.Corrupt {
		it.Buf[len(it.Buf)/2] ^= 1
	}
	return nil
}

func padded(n int) int { return (n + tier.Align - 1) &^ (tier.Align - 1) }

// Write is in tier.Tier. Of two writes of a key the first is kept.
func (t *Tier) Write(ctx context.Context, ns *block.Namespace, items []tier.Item) {
	if err := t.enter(OpWrite, len(items)); err != nil {
		failAll(items, err)
		return
	}
	defer t.leave()
	// Keys of the call that are there already become the youngest, and place
	// refuses to evict them.
	named := make(map[id]bool, len(items))
	t.mu.Lock()
	for i := range items {
		k := id{ns.Fingerprint(), items[i].Key}
		named[k] = true
		if el, ok := t.blocks[k]; ok {
			t.lru.MoveToFront(el)
		}
	}
	t.mu.Unlock()
	for i := range items {
		it := &items[i]
		it.Err = t.write(ctx, ns, it, named)
	}
}

func (t *Tier) write(ctx context.Context, ns *block.Namespace, it *tier.Item, named map[id]bool) error {
	if err := t.checkItem(OpWrite, ns, it); err != nil {
		return err
	}
	f, err := t.fault(ctx, OpWrite, ns, it.Key)
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	k := id{ns.Fingerprint(), it.Key}
	if _, ok := t.blocks[k]; ok {
		return nil
	}
	for t.capacity > 0 && t.used+int64(len(it.Buf)) > t.capacity {
		el := t.lru.Back()
		if el == nil || named[el.Value.(*entry).id] {
			return t.fail(OpWrite, it.Key, tier.ClassPermanent, tier.CauseCapacity,
				fmt.Errorf("%d of %d bytes used and nothing to evict", t.used, t.capacity))
		}
		t.dropLocked(el)
		t.stats.Evicted++
	}
	e := &entry{id: k, data: append([]byte(nil), it.Buf...), sum: it.Sum}
	if f.Corrupt {
		e.data[len(e.data)/2] ^= 1
	}
	t.blocks[k] = t.lru.PushFront(e)
	t.used += int64(len(e.data))
	return nil
}

func (t *Tier) dropLocked(el *list.Element) {
	e := t.lru.Remove(el).(*entry)
	delete(t.blocks, e.id)
	t.used -= int64(len(e.data))
}

// Delete is in tier.Tier.
func (t *Tier) Delete(ctx context.Context, ns *block.Namespace, keys []block.Key) error {
	if err := t.enter(OpDelete, len(keys)); err != nil {
		return err
	}
	defer t.leave()
	for _, key := range keys {
		if _, err := t.fault(ctx, OpDelete, ns, key); err != nil {
			return err
		}
		t.mu.Lock()
		if el, ok := t.blocks[id{ns.Fingerprint(), key}]; ok {
			t.dropLocked(el)
		}
		t.mu.Unlock()
	}
	return nil
}

// SetAside is in tier.SetAsider. The copy is dropped and counted.
func (t *Tier) SetAside(ctx context.Context, ns *block.Namespace, key block.Key, _ string) error {
	if err := t.enter(OpSetAside, 1); err != nil {
		return err
	}
	defer t.leave()
	_, err := t.fault(ctx, OpSetAside, ns, key)
	t.mu.Lock()
	defer t.mu.Unlock()
	if el, ok := t.blocks[id{ns.Fingerprint(), key}]; ok {
		t.dropLocked(el)
		t.stats.SetAside++
	}
	return err
}

// Close is in tier.Tier. Blocks are forgotten when it has waited for all calls.
func (t *Tier) Close(ctx context.Context) error {
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		return tier.ErrClosed
	}
	t.closed = true
	if t.n == 0 {
		close(t.idle)
	}
	t.mu.Unlock()
	select {
	case <-t.idle:
	case <-ctx.Done():
		select {
		case <-t.idle:
		default:
			t.mu.Lock()
			defer t.mu.Unlock()
			return fmt.Errorf("close tier %s: %d calls still under way: %w", t.info.Name, t.n, ctx.Err())
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	clear(t.blocks)
	t.lru.Init()
	t.used = 0
	return nil
}

func failAll(items []tier.Item, err error) {
	for i := range items {
		items[i].Err = err
	}
}
