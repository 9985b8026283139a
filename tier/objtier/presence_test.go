package objtier

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/invariants"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/tiertest"
)

// handClock is a clock that tests turn.
type handClock struct {
	mu  sync.Mutex
	now time.Time
}

func newHandClock() *handClock { return &handClock{now: time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)} }

func (c *handClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *handClock) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

var fpA, fpB = block.Fingerprint{1}, block.Fingerprint{2}

func (p *presence) one(fp block.Fingerprint, key block.Key) tier.Presence {
	var out [1]tier.Presence
	p.known(fp, []block.Key{key}, out[:])
	return out[0]
}

func wantKnown(t *testing.T, p *presence, fp block.Fingerprint, key block.Key, want tier.Presence) {
	t.Helper()
	if got := p.one(fp, key); got != want {
		t.Errorf("key %s is %d, want %d", key, got, want)
	}
}

func TestPresenceAges(t *testing.T) {
	c := newHandClock()
	p := newPresence(100, 10*time.Minute, 10*time.Second, c.Now)
	a, b := tiertest.Key(1, 0), tiertest.Key(2, 3)
	wantKnown(t, p, fpA, a, tier.Unknown)
	p.put(fpA, a, 1000)
	p.gone(fpA, b)
	wantKnown(t, p, fpA, a, tier.Present)
	wantKnown(t, p, fpB, a, tier.Unknown) // of another namespace
	wantKnown(t, p, fpA, tiertest.Key(1, 1), tier.Unknown)
	wantKnown(t, p, fpA, tiertest.Key(1, 256), tier.Unknown) // no such group; group 0 in one byte
	c.add(10*time.Second - time.Millisecond)
	wantKnown(t, p, fpA, b, tier.Absent)
	c.add(time.Millisecond)
	wantKnown(t, p, fpA, b, tier.Unknown)
	c.add(10*time.Minute - 10*time.Second - time.Millisecond)
	wantKnown(t, p, fpA, a, tier.Present)
	c.add(-time.Hour) // a clock that goes back changes nothing
	wantKnown(t, p, fpA, a, tier.Present)
	c.add(time.Hour + time.Millisecond)
	wantKnown(t, p, fpA, a, tier.Unknown)
	p.seen(fpA, a, 1000, p.mark())
	wantKnown(t, p, fpA, a, tier.Present)
	if blocks, bytes := p.size(); blocks != 1 || bytes != 1000 {
		t.Errorf("%d blocks, %d bytes; want 1, 1000", blocks, bytes)
	}
	p.drop(fpA, a)
	wantKnown(t, p, fpA, a, tier.Unknown)
	if blocks, bytes := p.size(); blocks != 0 || bytes != 0 {
		t.Errorf("%d blocks, %d bytes; want none", blocks, bytes)
	}
	// How old knowledge is counts from its request, not from its answer.
	then := p.mark()
	c.add(9 * time.Second)
	p.goneSince(fpA, b, then)
	wantKnown(t, p, fpA, b, tier.Absent)
	c.add(time.Second + 10*moment) // marks were taken faster than time went
	wantKnown(t, p, fpA, b, tier.Unknown)
}

// The order of the type comment, with a clock that stands still: so fast is
// what happens within one of its steps.
func TestPresenceNewerKnowledgeWins(t *testing.T) {
	a := tiertest.Key(1, 0)
	for _, step := range []time.Duration{0, moment, time.Second} {
		c := newHandClock()
		p := newPresence(100, time.Hour, time.Hour, func() time.Time { c.add(step); return c.Now() })

		then := p.mark() // a listing without the block is under way, and a HEAD
		p.put(fpA, a, 10)
		p.goneSince(fpA, a, then)
		wantKnown(t, p, fpA, a, tier.Present)

		then = p.mark() // a listing with it
		p.gone(fpA, a)
		p.listed(fpA, []sized{{a, 10}}, then)
		p.seen(fpA, a, 10, then)
		wantKnown(t, p, fpA, a, tier.Absent)

		p.listed(fpA, []sized{{a, 10}}, p.mark()) // another node stored it
		wantKnown(t, p, fpA, a, tier.Present)
		p.goneSince(fpA, a, p.mark()) // and another removed it
		wantKnown(t, p, fpA, a, tier.Absent)

		then = p.mark()
		p.drop(fpA, a) // a store of it failed in a way that says nothing
		p.goneSince(fpA, a, then)
		wantKnown(t, p, fpA, a, tier.Unknown)

		then = p.mark() // a removal, and a store beside it
		p.put(fpA, a, 10)
		p.removed(fpA, []block.Key{a}, then)
		wantKnown(t, p, fpA, a, tier.Unknown)
		p.put(fpA, a, 10)
		p.removed(fpA, []block.Key{a}, p.mark())
		wantKnown(t, p, fpA, a, tier.Absent)
	}
}

// While only this node writes, what is known is true, whatever the order of
// answers, and also with an index that is far too small.
func TestPresenceIsTrueWithOneWriter(t *testing.T) {
	type answer struct {
		then  mark
		key   int
		found bool
		list  []sized
	}
	seeds := uint64(30)
	if invariants.Enabled { // slow
		seeds = 5
	}
	for seed := range seeds {
		rnd := rand.New(rand.NewPCG(seed, 4))
		c := newHandClock()
		keys := []int{4, 40, 1000}[rnd.IntN(3)]
		p := newPresence(keys, time.Hour, time.Hour, c.Now)
		truth := map[int]bool{}
		var flying []answer
		var marks []mark
		list := func() (out []sized) {
			for k, ok := range truth {
				if ok {
					out = append(out, sized{tiertest.Key(k, 0), 1})
				}
			}
			return out
		}
		for op := range 1000 {
			k := rnd.IntN(50)
			key := tiertest.Key(k, 0)
			c.add(time.Duration(rnd.IntN(3)) * moment / 2)
			switch rnd.IntN(9) {
			case 0:
				truth[k] = true
				p.put(fpA, key, 1)
			case 1:
				truth[k] = false
				p.gone(fpA, key)
			case 2:
				then := p.mark()
				truth[k] = false
				p.removed(fpA, []block.Key{key}, then)
			case 3:
				p.drop(fpA, key)
			case 4:
				p.touch(fpA, []block.Key{key})
			case 5: // a request is sent
				if len(marks) < 8 {
					marks = append(marks, p.mark())
				}
			case 6: // the store works on one
				if i := len(marks); i > 0 {
					i = rnd.IntN(i)
					a := answer{then: marks[i], key: k, found: truth[k]}
					if rnd.IntN(4) == 0 {
						a.list = list()
					}
					flying = append(flying, a)
					marks = append(marks[:i], marks[i+1:]...)
				}
			case 7, 8: // its answer arrives
				if i := len(flying); i > 0 {
					i = rnd.IntN(i)
					switch a := flying[i]; {
					case a.list != nil:
						p.listed(fpA, a.list, a.then)
					case a.found:
						p.seen(fpA, tiertest.Key(a.key, 0), 1, a.then)
					default:
						p.goneSince(fpA, tiertest.Key(a.key, 0), a.then)
					}
					flying = append(flying[:i], flying[i+1:]...)
				}
			}
			for k := range 50 {
				want := tier.Absent
				if truth[k] {
					want = tier.Present
				}
				if got := p.one(fpA, tiertest.Key(k, 0)); got != tier.Unknown && got != want {
					t.Fatalf("seed %d op %d: key %d is %d, in truth %d", seed, op, k, got, want)
				}
			}
			if op%20 != 0 {
				continue
			}
			if err := p.check(); err != nil {
				t.Fatalf("seed %d op %d: %v", seed, op, err)
			}
		}
	}
}

// check walks the whole structure.
func (p *presence) check() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	n, present := 0, int64(0)
	for i, l := range []*recordList{&p.mu.held, &p.mu.others} {
		in, before := 0, uint32(0)
		for h := l.front; h != 0; h = p.mu.slab.At(h).next {
			r := p.mu.slab.At(h)
			if (r.standing() == standsPresent) != (i == 0) || r.prev != before {
				return fmt.Errorf("record %d is in the wrong list, or badly linked", h)
			}
			before = h
			in++
			if i == 0 {
				present++
			}
		}
		if in != l.n || l.back != before {
			return fmt.Errorf("list %d has %d records and says %d", i, in, l.n)
		}
		n += in
	}
	var blocks int64
	for _, groups := range p.mu.spaces {
		for _, g := range groups {
			blocks += g.blocks
		}
	}
	switch {
	case n != p.mu.slab.Len() || n != p.mu.table.Len() || n > p.keys || p.mu.others.n > max(p.othersMax, p.keys):
		return fmt.Errorf("%d records in lists, %d taken, %d in the table, bound %d", n, p.mu.slab.Len(), p.mu.table.Len(), p.keys)
	case blocks != present:
		return fmt.Errorf("%d present blocks counted, there are %d", blocks, present)
	}
	return nil
}

func TestPresenceRoom(t *testing.T) {
	c := newHandClock()
	p := newPresence(100, time.Hour, 10*time.Second, c.Now)
	key := func(i int) block.Key { return tiertest.Key(i, 0) }
	var page []sized
	for i := range 80 {
		page = append(page, sized{key(i), 5})
	}
	for i := 100; i < 120; i++ {
		p.put(fpA, key(i), 5)
	}
	if p.listed(fpA, page, p.mark()) {
		t.Error("80 keys do not fit into 100")
	}
	// No listing takes the place of what is there.
	c.add(time.Second)
	if !p.listed(fpA, []sized{{key(200), 5}}, p.mark()) {
		t.Error("a listing does not say that the index is full")
	}
	wantKnown(t, p, fpA, key(200), tier.Unknown)
	// Keys that nobody has asked for go first, then by use.
	p.touch(fpA, []block.Key{key(0), key(100)})
	for i := 300; i < 398; i++ {
		if i == 300+79 {
			wantKnown(t, p, fpA, key(101), tier.Present)
			wantKnown(t, p, fpA, key(79), tier.Unknown)
		}
		p.put(fpA, key(i), 5)
	}
	for i := range 120 {
		want := tier.Unknown
		if i == 0 || i == 100 {
			want = tier.Present
		}
		wantKnown(t, p, fpA, key(i), want)
	}
	// A long prompt that is nowhere takes a quarter, for a while.
	for i := 1000; i < 2000; i++ {
		p.goneSince(fpA, key(i), p.mark())
	}
	if blocks, _ := p.size(); blocks != 75 {
		t.Errorf("%d present keys are left, want 75", blocks)
	}
	wantKnown(t, p, fpA, key(1999), tier.Absent)
	wantKnown(t, p, fpA, key(1974), tier.Unknown)
	c.add(11 * time.Second)
	page = page[:25]
	if p.listed(fpA, page, p.mark()) {
		t.Error("what is over keeps its room")
	}
	if blocks, bytes := p.size(); blocks != 100 || bytes != 500 {
		t.Errorf("%d present keys, %d bytes; want 100, 500", blocks, bytes)
	}
	if err := p.check(); err != nil {
		t.Error(err)
	}
}

func TestPresenceLastUse(t *testing.T) {
	c := newHandClock()
	p := newPresence(100, time.Hour, time.Hour, c.Now)
	keys := []block.Key{tiertest.Key(1, 0), tiertest.Key(2, 0), tiertest.Key(3, 0)}
	p.put(fpA, keys[0], 1)
	p.listed(fpA, []sized{{keys[1], 1}}, p.mark())
	c.add(40 * time.Second)
	ago := make([]time.Duration, 3)
	p.lastUse(fpA, keys, ago)
	if ago[0] != 40*time.Second || ago[1] != -1 || ago[2] != -1 {
		t.Errorf("last uses are %v", ago)
	}
	p.touch(fpA, keys)
	c.add(2 * time.Second)
	p.lastUse(fpA, keys, ago)
	if ago[0] != 2*time.Second || ago[1] != 2*time.Second || ago[2] != -1 {
		t.Errorf("last uses are %v", ago)
	}
	p.lastUse(fpB, keys, ago)
	if ago[0] != -1 {
		t.Errorf("another namespace's last use is %v", ago[0])
	}
}

// The bound that docs and options promise, after the index has been filled three
// times over in every way. Its size is a power of two, like the default, so that
// the load of the table is the same.
func TestPresenceMemory(t *testing.T) {
	if invariants.Enabled {
		t.Skip("sizes are the same without the checks, and this is slow with them")
	}
	const size = 1 << 17
	p := newPresence(size, time.Hour, time.Hour, time.Now)
	var key block.Key
	for i := range 3 * size {
		for b := range 8 {
			key[b] = byte(i >> (8 * b))
		}
		if i%4 == 0 {
			p.goneSince(fpB, key, p.mark())
		} else {
			p.put(fpA, key, 1)
		}
	}
	p.mu.Lock()
	n := p.mu.slab.Len()
	p.mu.Unlock()
	each := float64(p.memory()) / float64(n)
	t.Logf("%.1f bytes a key, %d keys", each, n)
	if n != size || each > 70 {
		t.Errorf("%d keys of %.1f bytes, want %d of at most 70", n, each, size)
	}
}

func TestPresenceDoesNotAllocate(t *testing.T) {
	p := newPresence(1000, time.Hour, time.Hour, time.Now)
	keys, out := make([]block.Key, 64), make([]tier.Presence, 64)
	for i := range keys {
		keys[i] = tiertest.Key(i, 0)
		p.put(fpA, keys[i], 1)
	}
	if n := testing.AllocsPerRun(100, func() { p.known(fpA, keys, out); p.touch(fpA, keys); p.mark() }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestPresenceConcurrent(t *testing.T) {
	p := newPresence(500, time.Hour, time.Millisecond, time.Now)
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(g), 1))
			out := make([]tier.Presence, 20)
			for range 2000 {
				keys := make([]block.Key, 20)
				page := make([]sized, 20)
				for i := range keys {
					keys[i] = tiertest.Key(rnd.IntN(1000), 0)
					page[i] = sized{keys[i], 1}
				}
				switch m := p.mark(); rnd.IntN(5) {
				case 0:
					p.listed(fpA, page, m)
				case 1:
					p.removed(fpA, keys, m)
				case 2:
					p.touch(fpA, keys)
				case 3:
					p.goneSince(fpA, keys[0], m)
				default:
					p.put(fpA, keys[0], 1)
				}
				p.known(fpA, keys, out)
			}
		})
	}
	wg.Wait()
	if err := p.check(); err != nil {
		t.Error(err)
	}
}

func BenchmarkKnown(b *testing.B) {
	for _, n := range []int{10_000, IndexKeysDefault} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			p := newPresence(n, time.Hour, time.Hour, time.Now)
			for i := range n {
				p.put(fpA, tiertest.Key(i, 0), 1)
			}
			rnd := rand.New(rand.NewPCG(1, 2))
			keys, out := make([]block.Key, 1<<16), make([]tier.Presence, 1<<16)
			for i := range keys {
				keys[i] = tiertest.Key(rnd.IntN(n), 0)
			}
			b.ReportMetric(float64(p.memory())/float64(n), "B/key")
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				p.known(fpA, keys[i:i+512], out)
				if i += 512; i == len(keys) {
					i = 0
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/512, "ns/key")
		})
	}
}
