package memtier_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/memtier"
	"github.com/terrace-kv/terrace/tier/tiertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestConformance(t *testing.T) {
	t.Run("probed", func(t *testing.T) {
		tiertest.Run(t, tiertest.Factory{Open: func(testing.TB, string) tier.Tier { return memtier.New(memtier.Options{}) }})
	})
	t.Run("indexed", func(t *testing.T) {
		tiertest.Run(t, tiertest.Factory{Open: func(testing.TB, string) tier.Tier { return memtier.NewIndexed(memtier.Options{}) }})
	})
}

func Benchmark(b *testing.B) {
	tiertest.Bench(b, tiertest.Factory{Open: func(testing.TB, string) tier.Tier { return memtier.NewIndexed(memtier.Options{}) }})
}

const size = 4096 // of a block of group 1

func item(tb testing.TB, ns *block.Namespace, i int) []tier.Item {
	it := tier.Item{Key: tiertest.Key(i, 1), Buf: tiertest.Buffer(tb, size)}
	tiertest.Fill(ns, &it)
	return []tier.Item{it}
}

func TestFaults(t *testing.T) {
	ns := tiertest.Namespace(t, "m")
	boom := errors.New("boom")
	var fault memtier.Fault
	m := memtier.New(memtier.Options{Hook: func(_ context.Context, op memtier.Op, _ *block.Namespace, key block.Key) memtier.Fault {
		if key == tiertest.Key(1, 1) && op != memtier.OpDelete {
			return fault
		}
		return memtier.Fault{}
	}})
	ctx := t.Context()
	one, two := item(t, ns, 1), item(t, ns, 2)
	m.Write(ctx, ns, one)
	m.Write(ctx, ns, two)

	fault = memtier.Fault{Err: boom}
	both := []tier.Item{one[0], two[0]}
	m.Read(ctx, ns, both)
	if !errors.Is(both[0].Err, boom) || both[1].Err != nil {
		t.Errorf("hook fails key 1: got %v and %v", both[0].Err, both[1].Err)
	}
	fault = memtier.Fault{Short: true}
	m.Read(ctx, ns, one)
	if tier.ClassOf(one[0].Err) != tier.ClassCorrupt || tier.CauseOf(one[0].Err) != tier.CauseShort {
		t.Errorf("short read: %v", one[0].Err)
	}
	fault = memtier.Fault{Corrupt: true}
	m.Read(ctx, ns, one)
	if one[0].Err != nil || tiertest.Check(ns, &one[0]) == nil {
		t.Errorf("corrupt read: %v, and the bytes are right", one[0].Err)
	}
	fault = memtier.Fault{Lie: true}
	found := []bool{true}
	if err := m.Contains(ctx, ns, []block.Key{one[0].Key}, found); err != nil || found[0] {
		t.Errorf("lying contains: %v %v", found, err)
	}
	fault = memtier.Fault{}
	m.SetHook(nil)
	m.Read(ctx, ns, one)
	if err := tiertest.Check(ns, &one[0]); err != nil {
		t.Errorf("after the faults: %v", err)
	}
	if n := m.Calls(memtier.OpRead); n != 4 {
		t.Errorf("%d reads counted, want 4", n)
	}
	if n := m.Keys(memtier.OpRead); n != 5 {
		t.Errorf("%d keys counted, want 5", n)
	}
}

// A wait ends with its channel or with the call's context; a hang only with
// its channel, and Close says what it waited for.
func TestWait(t *testing.T) {
	ns := tiertest.Namespace(t, "m")
	it := item(t, ns, 1)
	synctest.Test(t, func(t *testing.T) {
		var fault memtier.Fault
		m := memtier.New(memtier.Options{Hook: func(context.Context, memtier.Op, *block.Namespace, block.Key) memtier.Fault { return fault }})
		m.Write(t.Context(), ns, it)

		fault.Wait = make(chan struct{})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		m.Read(ctx, ns, it)
		if tier.ClassOf(it[0].Err) != tier.ClassCancelled || tier.CauseOf(it[0].Err) != tier.CauseTimeout {
			t.Errorf("read past its deadline: %v", it[0].Err)
		}

		gate := make(chan struct{})
		fault.Wait, fault.Hang = gate, true
		ctx, cancel = context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			m.Read(ctx, ns, it)
		}()
		synctest.Wait()
		cancel()
		synctest.Wait()
		select {
		case <-done:
			t.Error("a hung read returned with its context")
		default:
		}
		short, stop := context.WithTimeout(t.Context(), time.Second)
		defer stop()
		if err := m.Close(short); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("close over a hung read: %v", err)
		}
		close(gate)
		<-done
		if tier.ClassOf(it[0].Err) != tier.ClassCancelled {
			t.Errorf("hung read: %v", it[0].Err)
		}
	})
}

func TestCapacity(t *testing.T) {
	ns := tiertest.Namespace(t, "m")
	m := memtier.NewIndexed(memtier.Options{Capacity: 3 * size})
	present := func(i int) bool {
		out := make([]tier.Presence, 1)
		m.Known(ns, []block.Key{tiertest.Key(i, 1)}, out)
		return out[0] == tier.Present
	}
	for i := range 3 {
		m.Write(t.Context(), ns, item(t, ns, i))
	}
	m.Touch(ns, []block.Key{tiertest.Key(0, 1)})
	m.Write(t.Context(), ns, item(t, ns, 3))
	if !present(0) || present(1) || !present(2) || !present(3) {
		t.Error("the victim is not the least recently used")
	}
	var call []tier.Item
	for i := range 4 {
		call = append(call, item(t, ns, 10+i)...)
	}
	m.Write(t.Context(), ns, call)
	for i := range 3 {
		if call[i].Err != nil || !present(10+i) {
			t.Errorf("item %d: %v, or evicted by its own call", i, call[i].Err)
		}
	}
	if tier.CauseOf(call[3].Err) != tier.CauseCapacity {
		t.Errorf("item beyond capacity: %v", call[3].Err)
	}
	if s := m.Stats(); s.UsedBytes != 3*size || s.Blocks != 3 || s.Evicted != 4 {
		t.Errorf("stats: %+v", s)
	}
}
