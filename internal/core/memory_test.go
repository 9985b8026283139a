package core

import (
	"reflect"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
)

// TestMemoryPerBlock fills a primary, with a secondary that has all of it too,
// and holds what the core takes for it against the number of blocks: slots,
// index, policy, and whatever requests, jobs and facts leave behind. The sizes
// are from one doubling of the index to the next, because what a block costs
// depends on how full the segments are.
func TestMemoryPerBlock(t *testing.T) {
	if n := reflect.TypeFor[slot]().Size(); n > 88 {
		t.Errorf("a slot's entry has %d bytes", n)
	}
	sizes := []int{120_000, 70_000, 80_000, 90_000, 100_000, 110_000, 130_000}
	if raceEnabled {
		sizes = sizes[:1]
	}
	for _, blocks := range sizes {
		before := liveHeap()
		c := filledCore(t, blocks)
		per := float64(liveHeap()-before) / float64(blocks)
		t.Logf("%d blocks: %.1f bytes a block", blocks, per)
		if s := c.Stats(); s.Blocks != int64(blocks) || s.Tiers[0].Blocks[Cascade] != int64(blocks) {
			t.Fatalf("%d of %d blocks are resident, %d written", s.Blocks, blocks, s.Tiers[0].Blocks[Cascade])
		}
		if per > 128 {
			t.Errorf("%.1f bytes a block", per)
		}
		before = liveHeap()
		lookUpAbsent(t, c, 100_000)
		if grown := liveHeap() - before; grown > 1<<20 {
			t.Errorf("100,000 keys that were looked up and are nowhere leave %d bytes behind", grown)
		}
		runtime.KeepAlive(c)
	}
}

// memoryTier knows what it has, and has nothing of what is looked up.
var memoryTier = TierFacts{Name: "fs", Medium: tier.MediumStorage, Locality: tier.LocalityLocal,
	Known: func(_ NamespaceID, keys []block.Key, out []tier.Presence) {
		for i := range keys {
			out[i] = tier.Absent
		}
	}}

// filledCore stores as many blocks as the region holds, in requests of 256, and
// does what it is asked for.
func filledCore(t *testing.T, blocks int) *Core {
	t.Helper()
	must := func(err error) {
		if err != nil {
			t.Helper()
			t.Fatal(err)
		}
	}
	c, err := New(Options{Size: int64(blocks) * PageSize, Tiers: []TierFacts{memoryTier}, ReservePercent: -1, InflightPercent: 100})
	must(err)
	ns, err := c.OpenNamespace(oneGroup)
	must(err)
	sid, err := c.OpenSession(ns)
	must(err)
	now := Time(1)
	for lo := 0; lo < blocks; lo += ReserveKeysMax {
		id := strconv.Itoa(lo)
		must(c.NewRequest(now, sid, id, NoLimits()))
		grants, err := c.Reserve(now, sid, id, 0, 0, benchKeys(lo, min(lo+ReserveKeysMax, blocks), 0), nil)
		must(err)
		var fills []Fill
		for _, g := range grants {
			fills = append(fills, Fill{Slot: g.Slot, Gen: g.Gen, Sum: 1, HasSum: true})
		}
		_, err = c.Commit(now, sid, id, fills, nil)
		must(err)
		must(c.Finish(now, sid, id))
		for _, e := range c.TakeEffects(nil) {
			if j, ok := e.(StartJob); ok {
				results := make([]JobResult, len(j.Blocks))
				for i := range results {
					results[i].Index = i
				}
				c.JobResults(now, j.ID, results)
			}
		}
		c.TakeEffects(nil)
		now += Time(time.Millisecond)
	}
	return c
}

// lookUpAbsent looks up keys that are nowhere.
func lookUpAbsent(t *testing.T, c *Core, n int) {
	t.Helper()
	sid, err := c.OpenSession(1)
	if err != nil {
		t.Fatal(err)
	}
	var a Answer
	for lo := 0; lo < n; lo += 1000 {
		id := strconv.Itoa(lo)
		if err := c.NewRequest(1<<40, sid, id, NoLimits()); err != nil {
			t.Fatal(err)
		}
		keys := [][]block.Key{benchKeys(1<<28+lo, 1<<28+lo+1000, 0)}
		if _, err := c.Lookup(1<<40, sid, id, keys, LookupOptions{}, &a); err != nil || a.Tokens != 0 {
			t.Fatal(a.Tokens, err)
		}
		if err := c.Finish(1<<40, sid, id); err != nil {
			t.Fatal(err)
		}
		c.TakeEffects(nil)
	}
}

// liveHeap is the bytes of live objects.
func liveHeap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
