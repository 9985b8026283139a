package core

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
)

const (
	benchBlocks = 100_000 // in the primary
	benchBatch  = 256
)

// bench is a core with benchBlocks resident blocks, in batches that are far
// from each other in memory.
type bench struct {
	b    *testing.B
	c    *Core
	sid  SessionID
	now  Time
	n    int // requests so far
	keys []block.Key
	fx   []Effect

	spent       time.Duration // on what is measured
	runs, timed int
	allocs      uint64 // of the first runs, which are not timed
	mem         runtime.MemStats

	grants   []Grant
	fills    []Fill
	statuses []FillStatus
}

func benchKey(n, group int) block.Key {
	var h [32]byte
	x := uint64(n)*0x9e3779b97f4a7c15 + uint64(group)
	for i := 0; i < 32; i += 8 {
		x ^= x >> 31
		x *= 0xbf58476d1ce4e5b9
		binary.BigEndian.PutUint64(h[i:], x)
	}
	k, _ := block.NewKey(h[:], uint32(group))
	return k
}

func benchKeys(lo, hi, group int) []block.Key {
	out := make([]block.Key, 0, hi-lo)
	for i := lo; i < hi; i++ {
		out = append(out, benchKey(i, group))
	}
	return out
}

func newBench(b *testing.B, slots int, groups []block.Group, known func(NamespaceID, []block.Key, []tier.Presence)) *bench {
	o := Options{Size: int64(slots) * PageSize, Salt: 7, InflightPercent: 100}
	if known != nil {
		o.Tiers = []TierFacts{{Name: "fs", Medium: tier.MediumStorage, Locality: tier.LocalityLocal, Known: known}}
	}
	c, err := New(o)
	if err != nil {
		b.Fatal(err)
	}
	ns, err := c.OpenNamespace(groups)
	if err != nil {
		b.Fatal(err)
	}
	m := &bench{b: b, c: c, now: 1, keys: benchKeys(0, benchBlocks, 0)}
	if m.sid, err = c.OpenSession(ns); err != nil {
		b.Fatal(err)
	}
	m.fillPrimary()
	return m
}

func (m *bench) fillPrimary() {
	id := m.request()
	for lo := 0; lo < benchBlocks; lo += benchBatch {
		m.store(id, m.keys[lo:min(lo+benchBatch, benchBlocks)])
	}
	m.finish(id)
}

func (m *bench) request() string {
	m.n++
	id := fmt.Sprint(m.n)
	m.must(m.c.NewRequest(m.now, m.sid, id, Params{StoreTiers: []TierFilter{}, MaxLoadTokens: -1, MaxOffloadTokens: -1}))
	return id
}

func (m *bench) finish(id string) {
	m.must(m.c.Finish(m.now, m.sid, id))
	m.fx = m.c.TakeEffects(m.fx[:0])
}

func (m *bench) must(err error) {
	if err != nil {
		m.b.Helper()
		m.b.Fatal(err)
	}
}

func (m *bench) store(id string, keys []block.Key) {
	var err error
	m.grants, err = m.c.Reserve(m.now, m.sid, id, 0, 0, keys, m.grants[:0])
	m.must(err)
	m.fills = m.fills[:0]
	for _, g := range m.grants {
		m.fills = append(m.fills, Fill{Slot: g.Slot, Gen: g.Gen, Sum: 1, HasSum: true})
	}
	m.statuses, err = m.c.Commit(m.now, m.sid, id, m.fills, m.statuses[:0])
	m.must(err)
}

// batch is the i-th batch of resident keys; successive ones are far apart.
func (m *bench) batch(i int) []block.Key {
	n := i * 37 % (benchBlocks / benchBatch)
	return m.keys[n*benchBatch : (n+1)*benchBatch]
}

const countedRuns = 10

// measured runs what counts; the rest of an iteration is left out. Counting
// allocations would disturb the clock, so the first runs serve for that.
func (m *bench) measured(f func()) {
	if m.runs++; m.runs <= countedRuns {
		runtime.ReadMemStats(&m.mem)
		before := m.mem.Mallocs
		f()
		runtime.ReadMemStats(&m.mem)
		m.allocs += m.mem.Mallocs - before
		return
	}
	begun := time.Now()
	f()
	m.spent += time.Since(begun)
	m.timed++
}

func (m *bench) report(keys int) {
	m.b.ReportMetric(float64(m.spent.Nanoseconds())/float64(m.timed*keys), "ns/key")
	m.b.ReportMetric(float64(m.allocs)/float64(min(m.runs, countedRuns)*keys), "allocs/key")
	m.b.ReportMetric(0, "ns/op") // iterations contain what is not measured
	if err := m.c.CheckInvariants(); err != nil {
		m.b.Fatal(err)
	}
}

// BenchmarkLookupHit looks up prompts of 256 blocks that are all in the primary;
// each lookup pins them for its request.
func BenchmarkLookupHit(b *testing.B) {
	m := newBench(b, benchBlocks+benchBlocks/2, oneGroup, nil)
	var a Answer
	keys, i := make([][]block.Key, 1), 0
	for b.Loop() {
		id := m.request()
		keys[0] = m.batch(i)
		m.measured(func() {
			if _, err := m.c.Lookup(m.now, m.sid, id, keys, LookupOptions{}, &a); err != nil || !a.Final || a.Tokens != 16*benchBatch {
				b.Fatal(err, a.Tokens)
			}
		})
		m.finish(id)
		i++
	}
	m.report(benchBatch)
}

// BenchmarkLookupMiss looks up 256 blocks that are nowhere, with one secondary
// that knows what it has. The group has a window, so that every key is judged: a
// full-attention group stops at the first Miss.
func BenchmarkLookupMiss(b *testing.B) {
	m := newBench(b, benchBlocks+benchBlocks/2, []block.Group{{Kind: block.KindWindow, WindowBlocks: 1, TokensPerBlock: 16, BlockBytes: PageSize}},
		func(_ NamespaceID, keys []block.Key, out []tier.Presence) {
			for i := range keys {
				out[i] = tier.Absent
			}
		})
	absent := benchKeys(1<<24, 1<<24+benchBlocks, 0)
	var a Answer
	keys, i := make([][]block.Key, 1), 0
	id := m.request()
	for b.Loop() {
		n := i * 37 % (benchBlocks / benchBatch)
		keys[0] = absent[n*benchBatch : (n+1)*benchBatch]
		m.measured(func() {
			if _, err := m.c.Lookup(m.now, m.sid, id, keys, LookupOptions{}, &a); err != nil || a.Tokens != 0 {
				b.Fatal(err, a.Tokens)
			}
		})
		i++
	}
	m.report(benchBatch)
}

// BenchmarkReserveCommit stores 256 blocks at a time into free slots.
func BenchmarkReserveCommit(b *testing.B) { benchStore(b, 2*benchBlocks) }

// BenchmarkReserveCommitEvict does so with a primary that is full.
func BenchmarkReserveCommitEvict(b *testing.B) { benchStore(b, benchBlocks) }

func benchStore(b *testing.B, slots int) {
	m := newBench(b, slots, oneGroup, nil)
	fresh := benchKeys(1<<25, 1<<25+1<<20, 0)
	i, at, free := 0, 0, slots-benchBlocks
	for b.Loop() {
		if slots > benchBlocks && free < benchBatch {
			if _, err := m.c.Reset(m.now, m.now); err != nil {
				b.Fatal(err)
			}
			m.fillPrimary()
			free = slots - benchBlocks
		}
		if at+benchBatch > len(fresh) {
			at = 0
		}
		keys := fresh[at : at+benchBatch]
		at, free = at+benchBatch, free-benchBatch
		id := m.request()
		m.measured(func() { m.store(id, keys) })
		if len(m.statuses) != benchBatch {
			b.Fatal(len(m.statuses))
		}
		m.finish(id)
		i++
	}
	m.report(benchBatch)
}

// BenchmarkPinUnpin pins and unpins 256 blocks at a time.
func BenchmarkPinUnpin(b *testing.B) {
	m := newBench(b, benchBlocks+benchBlocks/2, oneGroup, nil)
	var leases []Lease
	id := m.request()
	i := 0
	for b.Loop() {
		keys := m.batch(i)
		m.measured(func() {
			var err error
			if leases, err = m.c.Pin(m.now, m.sid, id, keys, leases[:0]); err != nil {
				b.Fatal(err)
			}
			if m.statuses, err = m.c.Unpin(m.now, m.sid, id, leases, m.statuses[:0]); err != nil {
				b.Fatal(err)
			}
		})
		i++
	}
	m.report(benchBatch)
}

// BenchmarkStartPromotions starts 1000 reads in a step, evicting as many blocks.
func BenchmarkStartPromotions(b *testing.B) {
	const batch = 1000
	m := newBench(b, benchBlocks, oneGroup, func(_ NamespaceID, keys []block.Key, out []tier.Presence) {
		for i := range keys {
			out[i] = tier.Present
		}
	})
	below := benchKeys(1<<26, 1<<26+1<<20, 0)
	var a Answer
	keys, i := make([][]block.Key, 1), 0
	var results []JobResult
	for b.Loop() {
		id := m.request()
		at := i * batch % (len(below) - batch)
		keys[0] = below[at : at+batch]
		m.measured(func() {
			if _, err := m.c.Lookup(m.now, m.sid, id, keys, LookupOptions{}, &a); err != nil {
				b.Fatal(err)
			}
			m.fx = m.c.TakeEffects(m.fx[:0])
		})
		j, ok := m.fx[0].(StartJob)
		if !ok || len(j.Blocks) != batch {
			b.Fatalf("%d effects", len(m.fx))
		}
		results = results[:0]
		for n := range j.Blocks {
			results = append(results, JobResult{Index: n})
		}
		m.c.JobResults(m.now, j.ID, results)
		m.finish(id)
		i++
	}
	m.report(batch)
	b.ReportMetric(float64(m.spent.Microseconds())/float64(m.timed), "us/step")
}
