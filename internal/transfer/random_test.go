package transfer

import (
	"bytes"
	"context"
	"flag"
	"log/slog"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
)

var (
	seedFlag  = flag.Uint64("transfer.seed", 0, "run TestRandom with this seed only")
	seedsFlag = flag.Int("transfer.seeds", 120, "how many seeds TestRandom runs, half of them fresh")
)

// TestRandom drives a lane with random jobs, faults, cancels and a Close at a
// random time, and checks the promises of the package: each item exactly once,
// last is last, no report while a call has the buffer, no byte written after
// the report, done means the right bytes, refused means nothing, and at the end
// nothing is held.
func TestRandom(t *testing.T) {
	if *seedFlag != 0 {
		randomRun(t, *seedFlag)
		return
	}
	fresh := uint64(time.Now().UnixNano())
	seed := uint64(0)
	defer func() {
		if r := recover(); r != nil || t.Failed() {
			t.Logf("replay with -run TestRandom -transfer.seed %d", seed)
			if r != nil {
				panic(r)
			}
		}
	}()
	for i := range uint64(*seedsFlag) {
		seed = 1 + i/2
		if i%2 == 1 {
			seed = fresh + i
		}
		if randomRun(t, seed); t.Failed() {
			return
		}
	}
}

// chaos is a tier that does anything the contract allows, and some that it
// does not.
type chaos struct {
	fakeTier
	t *testing.T

	mu    sync.Mutex
	rng   *rand.Rand
	inUse map[*byte]int // buffers in calls
	calls int
	fault float64 // share of items with one; 0.. per seed
	hang  float64 // share of calls that hang
}

func (c *chaos) roll(f func(r *rand.Rand)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f(c.rng)
}

func (c *chaos) hold(items []tier.Item, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range items {
		p := &items[i].Buf[0]
		if c.inUse[p] += n; c.inUse[p] == 0 {
			delete(c.inUse, p)
		} else if c.inUse[p] != 1 {
			c.t.Errorf("a buffer is in %d calls at once", c.inUse[p])
		}
	}
}

// wait passes a random time, hangs, or heeds the context.
func (c *chaos) wait(ctx context.Context) (ended bool) {
	var d time.Duration
	var heed bool
	c.roll(func(r *rand.Rand) {
		c.calls++
		heed = r.Float64() < 0.5
		d = time.Duration(r.Int64N(int64(20 * time.Millisecond)))
		if r.Float64() < c.hang {
			d, heed = time.Duration(r.Int64N(int64(20*time.Second))), r.Float64() < 0.2
		}
	})
	if !heed {
		time.Sleep(d)
		return false
	}
	select {
	case <-time.After(d):
		return false
	case <-ctx.Done():
		return true
	}
}

func (c *chaos) do(ctx context.Context, items []tier.Item, read bool) {
	c.hold(items, 1)
	defer c.hold(items, -1)
	ended := c.wait(ctx)
	for i := range items {
		it := &items[i]
		var f float64
		kind := 0
		c.roll(func(r *rand.Rand) { f, kind = r.Float64(), r.IntN(9) })
		if read {
			fill(it)
		}
		switch {
		case ended:
			it.Err = ctx.Err()
		case f >= c.fault:
		case kind == 0:
			panic("chaos")
		case kind == 1:
			it.Err = tier.ErrNotFound
		case kind == 2:
			it.Err = fail(tier.ClassPermanent, tier.CauseIO)
		case kind == 3 && read:
			it.Buf[7]++
		case kind == 4 && read:
			it.Sum = 0
		case kind == 5:
			it.Err = fail(tier.ClassPermanent, tier.CauseNoSpace)
		default:
			it.Err = fail(tier.ClassRetryable, tier.CauseIO)
		}
	}
}

// tracked is an accepted job as the test knows it.
type tracked struct {
	job  *Job
	seen []bool
	last bool
}

type chaosSink struct {
	*chaos

	mu     sync.Mutex
	jobs   map[JobID]*tracked
	probes map[JobID]int
	told   [dirs]State
}

func (s *chaosSink) JobResults(_ int, id JobID, results []Result, last bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	tr := s.jobs[id]
	if tr == nil {
		s.t.Errorf("job %d was reported and never accepted", id)
		return
	}
	if tr.last {
		s.t.Errorf("job %d: a report after the last", id)
	}
	tr.last = last
	for _, res := range results {
		if tr.seen[res.Index] {
			s.t.Errorf("job %d: item %d was reported twice", id, res.Index)
		}
		tr.seen[res.Index] = true
		it := &tr.job.Items[res.Index]
		s.chaos.mu.Lock()
		if n := s.inUse[&it.Buf[0]]; n != 0 {
			s.t.Errorf("job %d: item %d was reported with its buffer in a call", id, res.Index)
		}
		s.chaos.mu.Unlock()
		if res.Err == nil {
			want := make([]byte, testBlock)
			if content(it.Key, want); !bytes.Equal(it.Buf, want) {
				s.t.Errorf("job %d: item %d is done with wrong bytes", id, res.Index)
			}
		}
		for i := range it.Buf {
			it.Buf[i] = 0xcc // the slot has a new owner
		}
	}
	if last {
		for i, ok := range tr.seen {
			if !ok {
				s.t.Errorf("job %d: the last report came before item %d", id, i)
			}
		}
	}
}

func (s *chaosSink) ProbeResult(_ int, id JobID, found []bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n, ok := s.probes[id]; !ok || n != 0 {
		s.t.Errorf("probe %d: reported %d times before, accepted: %v", id, n, ok)
	}
	s.probes[id]++
	if err == nil && (len(found) != 2 || !found[0]) || err != nil && found != nil {
		s.t.Errorf("probe %d: %v %v", id, found, err)
	}
}

func (s *chaosSink) Health(_ int, d Dir, st State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.told[d] == st {
		s.t.Errorf("told twice that %s is %s", d, st)
	}
	s.told[d] = st
}

func randomRun(t *testing.T, seed uint64) {
	synctest.Test(t, func(t *testing.T) {
		rng := rand.New(rand.NewPCG(seed, 1))
		pick := func(v ...int) int { return v[rng.IntN(len(v))] }
		c := &chaos{t: t, rng: rand.New(rand.NewPCG(seed, 2)), inUse: map[*byte]int{}}
		c.fault = []float64{0, 0.02, 0.3}[rng.IntN(3)]
		c.hang = []float64{0, 0.01, 0.2}[rng.IntN(3)]
		c.read = func(ctx context.Context, items []tier.Item) { c.do(ctx, items, true) }
		c.write = func(ctx context.Context, items []tier.Item) { c.do(ctx, items, false) }
		c.contains = func(ctx context.Context, _ []block.Key, found []bool) error {
			if c.wait(ctx) {
				return ctx.Err()
			}
			found[0] = true
			var f float64
			c.roll(func(r *rand.Rand) { f = r.Float64() })
			switch {
			case f < c.fault/3:
				panic("chaos")
			case f < c.fault:
				return fail(tier.ClassRetryable, tier.CauseIO)
			}
			return nil
		}
		opt := Options{ReadParallel: pick(1, 2, 5), WriteParallel: pick(1, 2, 5), ProbeParallel: pick(1, 2),
			QueueItems: pick(5, 40, 1000), QueueProbes: pick(1, 10), QueueBytes: int64(pick(10, 1000)) * testBlock,
			BatchItems: pick(1, 3, 100), BatchBytes: int64(pick(1, 5, 100)) * testBlock,
			InflightBytes: int64(pick(1, 8, 1000)) * testBlock, OverdueBytesMax: int64(pick(0, 2, 20)) * testBlock,
			Retry: RetryOptions{Attempts: pick(1, 3)}}
		if rng.IntN(2) == 0 {
			opt.Breaker = calm
		}
		var tr tier.Tier = c
		if rng.IntN(2) == 0 {
			tr = &asideTier{fakeTier: c.fakeTier, aside: func(ctx context.Context, key block.Key, why string) error {
				c.wait(ctx)
				return nil
			}}
		}
		opt.Logger = slog.New(slog.DiscardHandler)
		s := &chaosSink{chaos: c, jobs: map[JobID]*tracked{}, probes: map[JobID]int{}}
		l := NewLane(7, tr, opt, s)

		const ops = 250
		closeAt := ops
		if rng.IntN(3) == 0 {
			closeAt = 1 + rng.IntN(ops-1)
		}
		closed := make(chan error, 1)
		refused := map[string]int{}
		for id := JobID(1); id <= ops; id++ {
			if rng.IntN(4) == 0 {
				time.Sleep(time.Duration(rng.Int64N(int64(100 * time.Millisecond))))
			}
			if int(id) == closeAt {
				ctx, cancel := context.WithTimeout(context.Background(), time.Duration(rng.IntN(3))*time.Second)
				defer cancel()
				go func() { closed <- l.Close(ctx) }()
			}
			timeout := time.Duration(rng.Int64N(int64(5*time.Second))) - 10*time.Millisecond
			var err error
			switch op := rng.IntN(10); {
			case op < 6:
				j := newJob(id, Dir(rng.IntN(2)), 1+rng.IntN(1+rng.IntN(30)), timeout)
				if j.Dir == Write && rng.IntN(10) == 0 {
					j.Items[rng.IntN(len(j.Items))].Sum++
				}
				// The sink may be called before Submit returns.
				s.mu.Lock()
				s.jobs[id] = &tracked{job: j, seen: make([]bool, len(j.Items))}
				s.mu.Unlock()
				if err = l.Submit(j); err != nil {
					s.mu.Lock()
					for i, seen := range s.jobs[id].seen {
						if seen {
							t.Errorf("job %d was refused and item %d reported", id, i)
						}
					}
					delete(s.jobs, id)
					s.mu.Unlock()
				}
			case op < 8:
				s.mu.Lock()
				s.probes[id] = 0
				s.mu.Unlock()
				if err = l.SubmitProbe(newProbe(id, timeout)); err != nil {
					s.mu.Lock()
					delete(s.probes, id)
					s.mu.Unlock()
				}
			default:
				l.Cancel(1 + JobID(rng.IntN(int(id))))
				l.Stats()
			}
			if err != nil {
				refused[err.Error()]++
			}
		}
		if closeAt == ops && rng.IntN(2) == 0 {
			time.Sleep(time.Minute) // by then all deadlines and hung calls are over
			synctest.Wait()
			if l.State(Read) != StateOpen && l.State(Write) != StateOpen {
				checkIdle(t, l)
			}
		}
		mustClose(t, l)
		if closeAt < ops {
			<-closed
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		for id, tr := range s.jobs {
			if !tr.last {
				t.Errorf("job %d: no last report", id)
			}
			for i := range tr.job.Items {
				if buf := tr.job.Items[i].Buf; tr.seen[i] && !bytes.Equal(buf, bytes.Repeat([]byte{0xcc}, testBlock)) {
					t.Errorf("job %d: item %d was written after its report", id, i)
				}
			}
		}
		for id, n := range s.probes {
			if n != 1 {
				t.Errorf("probe %d: %d reports", id, n)
			}
		}
		for d := range s.told {
			if s.told[d] != l.State(Dir(d)) {
				t.Errorf("%s is %s, the sink was told %s", Dir(d), l.State(Dir(d)), s.told[d])
			}
		}
		if testing.Verbose() {
			st := l.Stats()
			t.Logf("seed %d: %d calls, refused %v, read %d/%d/%d/%d write %d/%d/%d/%d retries %d panics %d openings %d", seed, c.calls, refused,
				st.Read.Done, st.Read.NotFound, st.Read.Failed, st.Read.Cancelled,
				st.Write.Done, st.Write.NotFound, st.Write.Failed, st.Write.Cancelled,
				st.Read.Retries+st.Write.Retries, st.Read.Panics+st.Write.Panics, st.Read.Openings+st.Write.Openings)
		}
	})
}
