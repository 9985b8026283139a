package tiertest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/minio/crc64nvme"
	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/content"
	"github.com/terrace-kv/terrace/tier"
)

// waitMax bounds every wait for a tier.
const waitMax = 20 * time.Second

// Factory says how to open the tier under test.
type Factory struct {
	// Open opens the tier with the store of this name, which is an empty
	// directory when the test begins. A tier that keeps nothing outside the
	// process ignores it. Open fails tb when it cannot. The suite closes the tier.
	Open func(tb testing.TB, store string) tier.Tier

	// Durable says that a later Open of a store finds what was written.
	Durable bool
}

// Groups of the suite's namespaces: one block that needs padding, one that is
// exactly one unit of alignment, one that is larger than most buffers.
var groups = []block.Group{
	{Kind: block.KindFull, TokensPerBlock: 16, BlockBytes: 10_000},
	{Kind: block.KindFull, TokensPerBlock: 16, BlockBytes: tier.Align},
	{Kind: block.KindWindow, TokensPerBlock: 16, WindowBlocks: 4, BlockBytes: 64<<10 + 1},
	{Kind: block.KindFull, TokensPerBlock: 16, BlockBytes: 64 << 10},
	{Kind: block.KindFull, TokensPerBlock: 16, BlockBytes: 1 << 20},
}

// Namespace makes a namespace for tests, which differs by model.
func Namespace(tb testing.TB, model string) *block.Namespace {
	tb.Helper()
	ns, err := block.NewNamespace(block.Spec{
		Model: model, DType: "bfloat16", Layout: "test", Groups: groups,
		HashAlgorithm: "sha256", HashLength: block.HashSize,
	})
	if err != nil {
		tb.Fatal(err)
	}
	return ns
}

// Key makes the i-th key of a group.
func Key(i int, group uint32) block.Key {
	var hash [block.HashSize]byte
	binary.BigEndian.PutUint64(hash[:], uint64(i)*0x9e3779b97f4a7c15) // spread, as hashes are
	binary.BigEndian.PutUint64(hash[8:], uint64(i))
	k, err := block.NewKey(hash[:], group)
	if err != nil {
		panic(err)
	}
	return k
}

// Buffer makes a buffer of n bytes as a tier gets it: aligned, and with room
// for padding. It lives until the test ends.
func Buffer(tb testing.TB, n int) []byte {
	tb.Helper()
	b, err := unix.Mmap(-1, 0, max(padded(n), tier.Align), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE|unix.MAP_POPULATE)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = unix.Munmap(b) })
	return b[:n]
}

func padded(n int) int { return (n + tier.Align - 1) &^ (tier.Align - 1) }

// poison makes a buffer hold what no block does, padding too.
func poison(buf []byte, with byte) {
	b := buf[:cap(buf)]
	for i := range b {
		b[i] = with
	}
}

func poisoned(buf []byte, with byte) bool {
	return bytes.Count(buf[:cap(buf)], []byte{with}) == cap(buf)
}

// Fill makes an item hold its block's content, sum and zero padding.
func Fill(ns *block.Namespace, it *tier.Item) {
	content.Fill(ns.Fingerprint(), it.Key, it.Buf)
	clear(it.Buf[len(it.Buf):cap(it.Buf)])
	it.Sum = crc64nvme.Checksum(it.Buf)
	it.Err = nil
}

// Check says what is wrong with an item that was read, or nil.
func Check(ns *block.Namespace, it *tier.Item) error {
	if it.Err != nil {
		return it.Err
	}
	if off := content.Check(ns.Fingerprint(), it.Key, it.Buf); off >= 0 {
		return fmt.Errorf("block %s is wrong at byte %d of %d", it.Key, off, len(it.Buf))
	}
	if sum := crc64nvme.Checksum(it.Buf); sum != it.Sum {
		return fmt.Errorf("block %s: sum is %#x, bytes have %#x", it.Key, it.Sum, sum)
	}
	pad := it.Buf[len(it.Buf):padded(len(it.Buf))]
	if !poisoned(slices.Clip(pad), 0) {
		return fmt.Errorf("block %s: padding is not zero", it.Key)
	}
	return nil
}

// env is one test's tier and namespaces.
type env struct {
	*testing.T
	f     Factory
	store string
	tier  tier.Tier
	ns    *block.Namespace
	other *block.Namespace // same groups, another model
	ctx   context.Context

	closed bool
}

// Run runs the suite, each part on a tier of its own.
func Run(t *testing.T, f Factory) {
	for _, tt := range []struct {
		name string
		run  func(*env)
	}{
		{"Info", testInfo},
		{"ByteEquality", testByteEquality},
		{"Absence", testAbsence},
		{"WrongLength", testWrongLength},
		{"WrongNamespace", testWrongNamespace},
		{"WriteTwice", testWriteTwice},
		{"DuplicateKeys", testDuplicateKeys},
		{"EmptyCalls", testEmptyCalls},
		{"CancelledContext", testCancelledContext},
		{"CancelUnderLoad", testCancelUnderLoad},
		{"ConcurrentSameKey", testConcurrentSameKey},
		{"QuietOnReturn", testQuietOnReturn},
		{"DeleteUnderRead", testDeleteUnderRead},
		{"KnownAgrees", testKnownAgrees},
		{"SetAside", testSetAside},
		{"OpenNamespace", testOpenNamespace},
		{"CloseUnderLoad", testCloseUnderLoad},
		{"AfterClose", testAfterClose},
		{"Reopen", testReopen},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), waitMax)
			defer cancel()
			e := &env{T: t, f: f, store: t.TempDir(), ctx: ctx,
				ns: Namespace(t, "model-a"), other: Namespace(t, "model-b")}
			e.open()
			tt.run(e)
			if !e.closed {
				e.close()
			}
		})
	}
}

func (e *env) open() {
	e.Helper()
	e.tier = e.f.Open(e.T, e.store)
	e.closed = false
	if o, ok := e.tier.(tier.NamespaceOpener); ok {
		for _, ns := range []*block.Namespace{e.ns, e.other} {
			if err := o.OpenNamespace(e.ctx, ns); err != nil {
				e.Fatalf("open namespace: %v", err)
			}
		}
	}
}

func (e *env) close() {
	e.Helper()
	e.closed = true
	if err := e.tier.Close(e.ctx); err != nil {
		e.Fatalf("close: %v", err)
	}
}

// items makes n items of a group with keys from first on, filled for writing.
func (e *env) items(first, n int, group uint32) []tier.Item {
	items := make([]tier.Item, n)
	for i := range items {
		items[i] = tier.Item{Key: Key(first+i, group), Buf: Buffer(e, e.ns.BlockBytes(group))}
		Fill(e.ns, &items[i])
	}
	return items
}

func keysOf(items []tier.Item) []block.Key {
	keys := make([]block.Key, len(items))
	for i := range items {
		keys[i] = items[i].Key
	}
	return keys
}

// write stores items, fails the test if one fails, and poisons the buffers.
func (e *env) write(items []tier.Item) {
	e.Helper()
	e.tier.Write(e.ctx, e.ns, items)
	for i := range items {
		if items[i].Err != nil {
			e.Fatalf("write of item %d: %v", i, items[i].Err)
		}
		poison(items[i].Buf, 0xcc)
	}
}

// readable reads each item into a poisoned buffer and wants its content.
func (e *env) readable(items []tier.Item) {
	e.Helper()
	for i := range items {
		poison(items[i].Buf, 0xdd)
		items[i].Sum = 0
		items[i].Err = errors.New("the tier did not set Err")
	}
	e.tier.Read(e.ctx, e.ns, items)
	for i := range items {
		if err := Check(e.ns, &items[i]); err != nil {
			e.Fatalf("read of item %d: %v", i, err)
		}
	}
}

// absent wants that no key of items is there, whoever is asked.
func (e *env) absent(ns *block.Namespace, items []tier.Item) {
	e.Helper()
	for i := range items {
		items[i].Err = nil
	}
	e.tier.Read(e.ctx, ns, items)
	for i := range items {
		if tier.ClassOf(items[i].Err) != tier.ClassNotFound {
			e.Fatalf("read of absent item %d: %v, want ErrNotFound", i, items[i].Err)
		}
	}
	for i, found := range e.contains(ns, keysOf(items)) {
		if found {
			e.Fatalf("absent item %d is contained", i)
		}
	}
}

// absentOrRight fails the test if a block can be read and is wrong.
func (e *env) absentOrRight(items []tier.Item) {
	e.Helper()
	e.tier.Read(e.ctx, e.ns, items)
	for i := range items {
		if err := Check(e.ns, &items[i]); err != nil && tier.ClassOf(err) != tier.ClassNotFound {
			e.Fatalf("item %d: %v", i, err)
		}
	}
}

func (e *env) contains(ns *block.Namespace, keys []block.Key) []bool {
	e.Helper()
	found := make([]bool, len(keys))
	if err := e.tier.Contains(e.ctx, ns, keys, found); err != nil {
		e.Fatalf("contains: %v", err)
	}
	return found
}

func testInfo(e *env) {
	info := e.tier.Info()
	if info.Name == "" || info.Type == "" {
		e.Errorf("info %+v: name or type is empty", info)
	}
	if info.Medium != tier.MediumCPU && info.Medium != tier.MediumStorage {
		e.Errorf("medium %q is not one that engines filter by", info.Medium)
	}
	if info.Locality != tier.LocalityLocal && info.Locality != tier.LocalityRemote {
		e.Errorf("locality %q is not one that engines filter by", info.Locality)
	}
}

func testByteEquality(e *env) {
	var all []tier.Item
	for g := range groups {
		items := e.items(0, 5, uint32(g))
		e.write(items)
		all = append(all, items...)
	}
	slices.Reverse(all)
	e.readable(all)
	for i, found := range e.contains(e.ns, keysOf(all)) {
		if !found {
			e.Errorf("item %d was written and is not contained", i)
		}
	}
}

func testAbsence(e *env) {
	items := e.items(0, 6, 0)
	e.absent(e.ns, items)
	for i := range items {
		Fill(e.ns, &items[i])
	}
	e.write(items[:3])
	e.absent(e.ns, items[3:])
	e.readable(items[:3])
	// One call may meet both.
	e.tier.Read(e.ctx, e.ns, items)
	for i := range items {
		if want := i >= 3; errors.Is(items[i].Err, tier.ErrNotFound) != want || (!want && items[i].Err != nil) {
			e.Errorf("item %d of a mixed read: %v", i, items[i].Err)
		}
	}
	if err := e.tier.Delete(e.ctx, e.ns, keysOf(items)); err != nil {
		e.Errorf("delete: %v", err)
	}
	e.absent(e.ns, items)
	if err := e.tier.Delete(e.ctx, e.ns, keysOf(items)); err != nil {
		e.Errorf("delete of absent keys: %v", err)
	}
	for i := range items {
		Fill(e.ns, &items[i])
	}
	e.write(items) // deleting is not for ever
	e.readable(items)
}

func testWrongLength(e *env) {
	for _, n := range []int{0, 1, 9_999, 10_001, 12_288, 64 << 10} {
		bad := e.items(1, 1, 0)[0]
		bad.Buf = Buffer(e, n)
		Fill(e.ns, &bad)
		good := e.items(2, 1, 0)[0]
		items := []tier.Item{bad, good}
		e.tier.Write(e.ctx, e.ns, items)
		if items[0].Err == nil || items[1].Err != nil {
			e.Fatalf("write of %d bytes and of a whole block: %v, %v; want an error for the first only", n, items[0].Err, items[1].Err)
		}
		e.absent(e.ns, e.items(1, 1, 0))
		whole := e.items(3, 1, 0)
		e.write(whole)
		short := tier.Item{Key: whole[0].Key, Buf: Buffer(e, n)}
		items = []tier.Item{short}
		e.tier.Read(e.ctx, e.ns, items)
		if items[0].Err == nil {
			e.Errorf("read into %d bytes: done, want an error", n)
		}
		e.readable(whole) // a caller's fault does not cost the copy
	}
	none := tier.Item{Key: Key(1, uint32(len(groups))), Buf: Buffer(e, 4096)}
	items := []tier.Item{none}
	if e.tier.Write(e.ctx, e.ns, items); items[0].Err == nil {
		e.Error("write in a group that the namespace does not have: done, want an error")
	}
}

func testWrongNamespace(e *env) {
	items := e.items(0, 3, 0)
	e.write(items)
	e.absent(e.other, items)
	// The same key in two namespaces is two blocks.
	twin := make([]tier.Item, len(items))
	for i := range twin {
		twin[i] = tier.Item{Key: items[i].Key, Buf: Buffer(e, len(items[i].Buf))}
		Fill(e.other, &twin[i])
	}
	e.tier.Write(e.ctx, e.other, twin)
	e.readable(items)
	e.tier.Read(e.ctx, e.other, twin)
	for i := range twin {
		if err := Check(e.other, &twin[i]); err != nil {
			e.Errorf("same key in another namespace: %v", err)
		}
	}
	if err := e.tier.Delete(e.ctx, e.other, keysOf(twin)); err != nil {
		e.Errorf("delete: %v", err)
	}
	e.absent(e.other, twin)
	e.readable(items)
}

func testWriteTwice(e *env) {
	items := e.items(0, 4, 0)
	e.write(items)
	for i := range items {
		Fill(e.ns, &items[i])
	}
	e.write(items)
	e.readable(items)
}

func testDuplicateKeys(e *env) {
	a, b := e.items(7, 1, 0)[0], e.items(7, 1, 0)[0]
	items := []tier.Item{a, b, a}
	items[2].Buf = Buffer(e, len(a.Buf))
	Fill(e.ns, &items[2])
	e.write(items)
	e.readable(items)
	key := items[0].Key
	if found := e.contains(e.ns, []block.Key{key, key}); !found[0] || !found[1] {
		e.Errorf("contains of one key twice: %v", found)
	}
	if err := e.tier.Delete(e.ctx, e.ns, []block.Key{key, key}); err != nil {
		e.Errorf("delete of one key twice: %v", err)
	}
	e.absent(e.ns, items)
}

func testEmptyCalls(e *env) {
	e.tier.Read(e.ctx, e.ns, nil)
	e.tier.Write(e.ctx, e.ns, nil)
	if err := e.tier.Contains(e.ctx, e.ns, nil, nil); err != nil {
		e.Errorf("contains of nothing: %v", err)
	}
	if err := e.tier.Delete(e.ctx, e.ns, nil); err != nil {
		e.Errorf("delete of nothing: %v", err)
	}
	if k, ok := e.tier.(tier.Knower); ok {
		k.Known(e.ns, nil, nil)
	}
	if k, ok := e.tier.(tier.Toucher); ok {
		k.Touch(e.ns, nil)
		k.Touch(e.ns, []block.Key{Key(1, 0)})
	}
}

// outcome fails the test unless an item is done or cancelled.
func (e *env) outcome(op string, err error) {
	e.Helper()
	if c := tier.ClassOf(err); c != tier.ClassNone && c != tier.ClassCancelled {
		e.Errorf("%s under a cancelled context: %v is %v, want done or cancelled", op, err, c)
	}
}

func testCancelledContext(e *env) {
	items := e.items(0, 4, 0)
	e.write(items)
	ctx, cancel := context.WithCancel(e.ctx)
	cancel()
	for i := range items {
		poison(items[i].Buf, 0xdd)
	}
	e.tier.Read(ctx, e.ns, items)
	for i := range items {
		e.outcome("read", items[i].Err)
		if items[i].Err == nil {
			if err := Check(e.ns, &items[i]); err != nil {
				e.Error(err)
			}
		}
	}
	more := e.items(10, 4, 0)
	e.tier.Write(ctx, e.ns, more)
	for i := range more {
		e.outcome("write", more[i].Err)
		if more[i].Err == nil {
			e.readable(more[i : i+1])
		}
	}
	e.outcome("contains", e.tier.Contains(ctx, e.ns, keysOf(items), make([]bool, len(items))))
	e.outcome("delete", e.tier.Delete(ctx, e.ns, keysOf(more)))
	e.readable(items) // the tier serves on
}

// Calls that are cancelled at any moment end as done or cancelled, leave their
// buffers alone, and leave the tier whole.
func testCancelUnderLoad(e *env) {
	const workers, rounds = 4, 30
	var wg sync.WaitGroup
	for w := range workers {
		items := e.items(1000*w, 4, 3)
		fresh := e.items(1000*w+500, 4, 3)
		e.write(items)
		wg.Go(func() {
			for r := range rounds {
				ctx, cancel := context.WithCancel(e.ctx)
				go cancel() // whenever the scheduler likes
				e.tier.Read(ctx, e.ns, items)
				for i := range items {
					e.outcome("read", items[i].Err)
					if items[i].Err == nil {
						if err := Check(e.ns, &items[i]); err != nil {
							e.Error(err)
						}
					}
				}
				cancel()
				ctx, cancel = context.WithCancel(e.ctx)
				go cancel()
				for i := range fresh {
					fresh[i].Key = Key(1000*w+500+4*r+i, 3)
					Fill(e.ns, &fresh[i])
				}
				e.tier.Write(ctx, e.ns, fresh)
				cancel()
				var done []tier.Item
				for i := range fresh {
					e.outcome("write", fresh[i].Err)
					poison(fresh[i].Buf, 0xee)
					if fresh[i].Err == nil {
						done = append(done, fresh[i])
					}
				}
				e.tier.Read(e.ctx, e.ns, done)
				for i := range done {
					if err := Check(e.ns, &done[i]); err != nil {
						e.Errorf("written before the cancellation: %v", err)
					}
				}
			}
		})
	}
	wg.Wait()
}

func testConcurrentSameKey(e *env) {
	const workers, rounds = 8, 15
	for r := range rounds {
		var wg sync.WaitGroup
		for w := range workers {
			items := e.items(r*4, 4, 0)
			if w%2 == 1 {
				slices.Reverse(items)
			}
			wg.Go(func() {
				e.tier.Write(e.ctx, e.ns, items)
				for i := range items {
					if items[i].Err != nil {
						e.Errorf("write %d of a key that others write: %v", w, items[i].Err)
					}
					poison(items[i].Buf, 0xcc)
				}
				e.tier.Read(e.ctx, e.ns, items)
				for i := range items {
					if err := Check(e.ns, &items[i]); err != nil {
						e.Errorf("read after write: %v", err)
					}
				}
			})
		}
		wg.Wait()
	}
}

// When a call has returned, what happens to its buffers has no effect on the
// tier, and what happens in the tier has none on the buffers.
func testQuietOnReturn(e *env) {
	items := e.items(0, 8, 3)
	e.write(items) // poisons
	e.readable(items)
	for i := range items {
		poison(items[i].Buf, 0x77)
	}
	others := e.items(100, 8, 3)
	e.write(others)
	e.readable(others)
	ctx, cancel := context.WithCancel(e.ctx)
	cancel()
	cut := e.items(200, 8, 3)
	e.tier.Read(ctx, e.ns, cut)
	for i := range cut {
		poison(cut[i].Buf, 0x77)
	}
	e.close() // whatever the tier had still under way is over now
	for i := range items {
		if !poisoned(items[i].Buf, 0x77) || !poisoned(cut[i].Buf, 0x77) {
			e.Errorf("buffer %d changed after the call had returned", i)
		}
	}
}

func testDeleteUnderRead(e *env) {
	items := e.items(0, 8, 3)
	keys := keysOf(items)
	e.write(items)
	var wg sync.WaitGroup
	var stop atomic.Bool
	for range 3 {
		mine := e.items(0, 8, 3)
		wg.Go(func() {
			for !stop.Load() {
				e.tier.Read(e.ctx, e.ns, mine)
				for i := range mine {
					if errors.Is(mine[i].Err, tier.ErrNotFound) {
						continue
					}
					if err := Check(e.ns, &mine[i]); err != nil {
						e.Errorf("read under delete: %v", err)
						stop.Store(true)
					}
				}
			}
		})
	}
	for range 40 {
		if err := e.tier.Delete(e.ctx, e.ns, keys); err != nil {
			e.Errorf("delete under read: %v", err)
		}
		for i := range items {
			Fill(e.ns, &items[i])
		}
		e.write(items)
	}
	if err := e.tier.Delete(e.ctx, e.ns, keys); err != nil {
		e.Errorf("delete: %v", err)
	}
	stop.Store(true)
	wg.Wait()
	e.absent(e.ns, items)
}

// known asks a Knower and wants that it does not contradict Contains.
func (e *env) known(k tier.Knower, keys []block.Key) []tier.Presence {
	e.Helper()
	out := make([]tier.Presence, len(keys))
	k.Known(e.ns, keys, out)
	for i, found := range e.contains(e.ns, keys) {
		if (out[i] == tier.Present && !found) || (out[i] == tier.Absent && found) {
			e.Errorf("key %d: Known says %v, Contains says %v", i, out[i], found)
		}
	}
	return out
}

func testKnownAgrees(e *env) {
	k, ok := e.tier.(tier.Knower)
	if !ok {
		e.Skip("the tier is not a Knower")
	}
	items := e.items(0, 6, 0)
	keys := keysOf(items)
	e.known(k, keys)
	e.write(items[:3])
	for i, p := range e.known(k, keys[:3]) {
		if p != tier.Present {
			e.Errorf("key %d is written, Known says %v", i, p)
		}
	}
	e.known(k, keys)
	if err := e.tier.Delete(e.ctx, e.ns, keys); err != nil {
		e.Fatal(err)
	}
	e.known(k, keys)
}

func testSetAside(e *env) {
	s, ok := e.tier.(tier.SetAsider)
	if !ok {
		e.Skip("the tier is not a SetAsider")
	}
	items := e.items(0, 3, 0)
	e.write(items)
	for range 2 { // the second time there is nothing to set aside
		if err := s.SetAside(e.ctx, e.ns, items[0].Key, "test"); err != nil {
			e.Errorf("set aside: %v", err)
		}
		if e.tier.Info().Locality == tier.LocalityRemote {
			e.absentOrRight(items[:1]) // it may have looked again, and this copy is right
		} else {
			e.absent(e.ns, items[:1])
		}
	}
	e.readable(items[1:])
	Fill(e.ns, &items[0])
	e.write(items[:1])
	e.readable(items)
}

func testOpenNamespace(e *env) {
	o, ok := e.tier.(tier.NamespaceOpener)
	if !ok {
		e.Skip("the tier is not a NamespaceOpener")
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for i := range 5 {
				if err := o.OpenNamespace(e.ctx, Namespace(e, fmt.Sprint("model-", i))); err != nil {
					e.Errorf("open namespace: %v", err)
				}
			}
		})
	}
	wg.Wait()
	items := e.items(0, 3, 0)
	e.write(items)
	if err := o.OpenNamespace(e.ctx, e.ns); err != nil {
		e.Errorf("open again: %v", err)
	}
	e.readable(items)
}

// wantClosed fails the test unless every kind of call answers ErrClosed.
func (e *env) wantClosed() {
	e.Helper()
	items := e.items(0, 2, 0)
	for name, call := range map[string]func(context.Context, *block.Namespace, []tier.Item){"read": e.tier.Read, "write": e.tier.Write} {
		call(e.ctx, e.ns, items)
		for i := range items {
			if !errors.Is(items[i].Err, tier.ErrClosed) {
				e.Errorf("%s after close: %v, want ErrClosed", name, items[i].Err)
			}
		}
	}
	if err := e.tier.Contains(e.ctx, e.ns, keysOf(items), make([]bool, 2)); !errors.Is(err, tier.ErrClosed) {
		e.Errorf("contains after close: %v, want ErrClosed", err)
	}
	if err := e.tier.Delete(e.ctx, e.ns, keysOf(items)); !errors.Is(err, tier.ErrClosed) {
		e.Errorf("delete after close: %v, want ErrClosed", err)
	}
	if o, ok := e.tier.(tier.NamespaceOpener); ok {
		if err := o.OpenNamespace(e.ctx, e.ns); !errors.Is(err, tier.ErrClosed) {
			e.Errorf("open namespace after close: %v, want ErrClosed", err)
		}
	}
	if s, ok := e.tier.(tier.SetAsider); ok {
		if err := s.SetAside(e.ctx, e.ns, items[0].Key, "test"); !errors.Is(err, tier.ErrClosed) {
			e.Errorf("set aside after close: %v, want ErrClosed", err)
		}
	}
	// These have no error to give; they must only be harmless.
	e.tier.Info()
	if k, ok := e.tier.(tier.Knower); ok {
		k.Known(e.ns, keysOf(items), make([]tier.Presence, 2))
	}
	if k, ok := e.tier.(tier.Toucher); ok {
		k.Touch(e.ns, keysOf(items))
	}
	if s, ok := e.tier.(tier.Statser); ok {
		s.Stats()
	}
}

func testAfterClose(e *env) {
	e.write(e.items(0, 2, 0))
	e.close()
	e.wantClosed()
}

func testCloseUnderLoad(e *env) {
	const workers = 6
	var wg sync.WaitGroup
	bufs := make([][]tier.Item, workers)
	started := make(chan struct{}, workers)
	for w := range workers {
		items := e.items(100*w, 4, 3)
		bufs[w] = items
		wg.Go(func() {
			for r := 0; ; r++ {
				for i := range items {
					items[i].Key = Key(1000*w+4*r+i, 3)
					Fill(e.ns, &items[i])
				}
				e.tier.Write(e.ctx, e.ns, items)
				if r == 0 {
					started <- struct{}{}
				}
				e.tier.Read(e.ctx, e.ns, items)
				for i := range items {
					if errors.Is(items[i].Err, tier.ErrClosed) {
						for j := range items {
							poison(items[j].Buf, 0x55)
						}
						return
					}
					if err := Check(e.ns, &items[i]); err != nil && !errors.Is(err, tier.ErrNotFound) {
						e.Errorf("under close: %v", err)
					}
				}
				if err := e.tier.Delete(e.ctx, e.ns, keysOf(items)); err != nil && !errors.Is(err, tier.ErrClosed) {
					e.Errorf("delete under close: %v", err)
				}
			}
		})
	}
	for range workers {
		<-started
	}
	e.close()
	wg.Wait()
	for w := range bufs {
		for i := range bufs[w] {
			if !poisoned(bufs[w][i].Buf, 0x55) {
				e.Errorf("worker %d: buffer %d changed after ErrClosed", w, i)
			}
		}
	}
	e.wantClosed()
}

func testReopen(e *env) {
	if !e.f.Durable {
		e.Skip("the tier is not durable")
	}
	var all []tier.Item
	for g := range groups {
		items := e.items(0, 4, uint32(g))
		e.write(items)
		all = append(all, items...)
	}
	gone := e.items(50, 2, 0)
	e.write(gone)
	if err := e.tier.Delete(e.ctx, e.ns, keysOf(gone)); err != nil {
		e.Fatal(err)
	}
	e.close()
	for range 2 {
		e.open()
		e.readable(all)
		e.absent(e.ns, gone)
		for i, found := range e.contains(e.ns, keysOf(all)) {
			if !found {
				e.Errorf("item %d was written and is not contained after reopening", i)
			}
		}
		e.close()
	}
}
