package transfer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/minio/crc64nvme"
	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
)

func TestReadWriteProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, r := newTestLane(t, &fakeTier{}, Options{BatchItems: 4})
		defer mustClose(t, l)
		rd, wr := newJob(1, Read, 10, time.Minute), newJob(2, Write, 10, time.Minute)
		rd.Items[4].Err = errors.New("of an earlier use")
		must(t, l.Submit(rd))
		must(t, l.Submit(wr))
		must(t, l.SubmitProbe(newProbe(3, time.Minute)))
		synctest.Wait()
		for id, j := range map[JobID]*Job{1: rd, 2: wr} {
			for i, res := range r.ended(id, 10) {
				if res.Err != nil || res.Sum != crc64nvme.Checksum(j.Items[i].Buf) {
					t.Errorf("job %d item %d: %v, sum %x", id, i, res.Err, res.Sum)
				}
				want := make([]byte, testBlock)
				content(j.Items[i].Key, want)
				if !bytes.Equal(want, j.Items[i].Buf) {
					t.Errorf("job %d item %d: wrong bytes", id, i)
				}
			}
		}
		if p := r.probe(3); len(p) != 1 || p[0].err != nil || !slices.Equal(p[0].found, []bool{true, true}) {
			t.Errorf("probe: %+v", p)
		}
		s := l.Stats()
		if s.Read.Done != 10 || s.Read.DoneBytes != 10*testBlock || s.Write.Done != 10 || s.Probe.Done != 1 || s.Read.Calls != 3 {
			t.Errorf("stats: %+v", s)
		}
		checkIdle(t, l)
	})
}

func TestInvalidAndDuplicate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate()
		l, r := newTestLane(t, g, Options{})
		defer mustClose(t, l)
		for _, j := range []*Job{
			{ID: 1, NS: testNS, Deadline: time.Now().Add(time.Hour)},
			{ID: 1, Items: make([]tier.Item, 1), Deadline: time.Now().Add(time.Hour)},
			{ID: 1, NS: testNS, Items: make([]tier.Item, 1)},
			{ID: 1, NS: testNS, Items: make([]tier.Item, 1), Dir: 2},
		} {
			if err := l.Submit(j); !errors.Is(err, ErrInvalid) {
				t.Errorf("%+v: %v", j, err)
			}
		}
		if err := l.SubmitProbe(&Probe{ID: 1, NS: testNS}); !errors.Is(err, ErrInvalid) {
			t.Error(err)
		}
		must(t, l.Submit(newJob(5, Read, 1, time.Minute)))
		if err := l.SubmitProbe(newProbe(5, time.Minute)); !errors.Is(err, ErrDuplicate) {
			t.Error(err)
		}
		close(g.letRead)
		synctest.Wait()
		r.ended(5, 1)
		r.forget(5)
		must(t, l.Submit(newJob(5, Read, 1, time.Minute))) // free again
		synctest.Wait()
		r.ended(5, 1)
		if len(r.probe(5)) != 0 {
			t.Errorf("reports: %v %v", r.jobs, r.probes)
		}
	})
}

// Chunks of one job run side by side and are reported when each is over.
func TestChunksReportedAsKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeTier{}
		f.read = func(_ context.Context, items []tier.Item) {
			if len(items) > 2 {
				t.Errorf("%d items in a call", len(items))
			}
			if items[0].Key == testKey(1, 0) {
				time.Sleep(time.Second)
			}
			for i := range items {
				fill(&items[i])
			}
		}
		f.info.BatchItems = 2
		l, r := newTestLane(t, f, Options{ReadParallel: 2, Breaker: calm})
		defer mustClose(t, l)
		must(t, l.Submit(newJob(1, Read, 6, time.Minute)))
		synctest.Wait()
		if n := r.reported(1); n != 4 {
			t.Errorf("%d items reported while the first call runs, want 4", n)
		}
		pause(2 * time.Second)
		r.ended(1, 6)
	})
}

func TestBatchBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var sizes []int
		f := &fakeTier{read: func(_ context.Context, items []tier.Item) {
			mu.Lock()
			defer mu.Unlock()
			sizes = append(sizes, len(items))
			for i := range items {
				fill(&items[i])
			}
		}}
		for _, c := range []struct {
			bytes int64
			want  []int
		}{{3 * testBlock, []int{1, 3, 3}}, {testBlock / 2, []int{1, 1, 1, 1, 1, 1, 1}}} {
			sizes = nil
			l, r := newTestLane(t, f, Options{BatchBytes: c.bytes})
			must(t, l.Submit(newJob(1, Read, 7, time.Minute)))
			synctest.Wait()
			r.ended(1, 7)
			slices.Sort(sizes)
			if !slices.Equal(sizes, c.want) {
				t.Errorf("BatchBytes %d: calls of %v, want %v", c.bytes, sizes, c.want)
			}
			mustClose(t, l)
		}
	})
}

// A job of many items does not delay a job of one.
func TestFairBetweenJobs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeTier{read: func(_ context.Context, items []tier.Item) {
			time.Sleep(time.Millisecond)
			for i := range items {
				fill(&items[i])
			}
		}}
		l, r := newTestLane(t, f, Options{ReadParallel: 1, BatchItems: 1})
		defer mustClose(t, l)
		start := time.Now()
		must(t, l.Submit(newJob(1, Read, 1000, time.Minute)))
		synctest.Wait()
		must(t, l.Submit(newJob(2, Read, 1, time.Minute)))
		must(t, l.Submit(newJob(3, Read, 1, time.Minute)))
		pause(2 * time.Second)
		r.ended(1, 1000)
		r.ended(2, 1)
		r.ended(3, 1)
		for id := JobID(2); id <= 3; id++ {
			if d := r.reports(id)[0].at.Sub(start); d > 5*time.Millisecond {
				t.Errorf("job %d ended after %v", id, d)
			}
		}
	})
}

// gate is a tier whose calls wait to be let go, and which counts them.
type gate struct {
	fakeTier
	reads, writes     atomic.Int32
	letRead, letWrite chan struct{}
}

func newGate() *gate {
	g := &gate{letRead: make(chan struct{}), letWrite: make(chan struct{})}
	g.read = func(_ context.Context, items []tier.Item) {
		g.reads.Add(1)
		<-g.letRead
		for i := range items {
			fill(&items[i])
		}
	}
	g.write = func(context.Context, []tier.Item) {
		g.writes.Add(1)
		<-g.letWrite
	}
	return g
}

func TestLoadsBeforeStores(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate()
		l, _ := newTestLane(t, g, Options{ReadParallel: 2, WriteParallel: 2, BatchItems: 1, Breaker: calm})
		defer mustClose(t, l)
		must(t, l.Submit(newJob(1, Write, 6, time.Hour)))
		synctest.Wait()
		if g.writes.Load() != 2 {
			t.Fatalf("%d writes run, want WriteParallel", g.writes.Load())
		}
		must(t, l.Submit(newJob(2, Read, 6, time.Hour)))
		synctest.Wait()
		if g.reads.Load() != 1 {
			t.Fatalf("%d reads run beside two writes and three workers, want 1", g.reads.Load())
		}
		// The worker that a write gives back goes to the next read.
		g.letWrite <- struct{}{}
		synctest.Wait()
		if g.reads.Load() != 2 || g.writes.Load() != 2 {
			t.Fatalf("%d reads and %d writes begun, want 2 and 2", g.reads.Load(), g.writes.Load())
		}
		// Reads at their limit: the last worker is for writes.
		g.letWrite <- struct{}{}
		synctest.Wait()
		if g.reads.Load() != 2 || g.writes.Load() != 3 {
			t.Fatalf("%d reads and %d writes begun, want 2 and 3", g.reads.Load(), g.writes.Load())
		}
		close(g.letRead)
		synctest.Wait()
		if g.reads.Load() != 6 {
			t.Fatalf("%d reads begun, want all", g.reads.Load())
		}
		close(g.letWrite)
	})
}

// Hung calls of one direction leave the other at work, for any parallelism.
func TestNoStarvation(t *testing.T) {
	for _, par := range [][2]int{{1, 1}, {1, 4}, {4, 1}, {3, 3}} {
		synctest.Test(t, func(t *testing.T) {
			g := newGate()
			l, r := newTestLane(t, g, Options{ReadParallel: par[0], WriteParallel: par[1], BatchItems: 1, Breaker: calm})
			defer mustClose(t, l)
			// Reads hang, in the queue and in all their places.
			must(t, l.Submit(newJob(1, Read, 50, time.Hour)))
			synctest.Wait()
			must(t, l.Submit(newJob(2, Write, 20, time.Hour)))
			for range 20 {
				g.letWrite <- struct{}{} // deadlocks, and fails, if no write runs
			}
			synctest.Wait()
			r.ended(2, 20)
			close(g.letRead)
			synctest.Wait()
			r.ended(1, 50)
			// Writes hang.
			must(t, l.Submit(newJob(3, Write, 50, time.Hour)))
			synctest.Wait()
			must(t, l.Submit(newJob(4, Read, 20, time.Hour)))
			synctest.Wait()
			r.ended(4, 20)
			if n := int(g.writes.Load()) - 20; n != par[1] {
				t.Errorf("%d writes run, want %d", n, par[1])
			}
			close(g.letWrite)
		})
	}
}

func TestProbesAndReadsApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate()
		let := make(chan struct{})
		hang := false
		g.contains = func(_ context.Context, _ []block.Key, found []bool) error {
			if hang {
				<-let
			}
			return nil
		}
		l, r := newTestLane(t, g, Options{ReadParallel: 2, WriteParallel: 1, ProbeParallel: 2, BatchItems: 1, Breaker: calm})
		defer mustClose(t, l)
		must(t, l.Submit(newJob(1, Read, 9, time.Hour)))
		must(t, l.Submit(newJob(2, Write, 9, time.Hour)))
		synctest.Wait()
		must(t, l.SubmitProbe(newProbe(3, time.Hour)))
		synctest.Wait()
		if p := r.probe(3); len(p) != 1 || p[0].err != nil || p[0].found[0] {
			t.Errorf("probe behind hung reads: %+v", p)
		}
		close(g.letRead)
		close(g.letWrite)
		synctest.Wait()
		hang = true
		for id := JobID(10); id < 20; id++ {
			must(t, l.SubmitProbe(newProbe(id, time.Hour)))
		}
		synctest.Wait()
		must(t, l.Submit(newJob(4, Read, 9, time.Hour)))
		synctest.Wait()
		r.ended(4, 9)
		close(let)
	})
}

func TestQueueFullOwnsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate()
		pause := make(chan struct{})
		g.contains = func(context.Context, []block.Key, []bool) error { <-pause; return nil }
		l, r := newTestLane(t, g, Options{ReadParallel: 1, ProbeParallel: 1, QueueItems: 10, QueueBytes: 8 * testBlock, QueueProbes: 2, Breaker: calm})
		must(t, l.Submit(newJob(1, Read, 6, time.Hour)))
		for id, n := range map[JobID]int{2: 5, 3: 3} { // too many items; too many bytes
			if err := l.Submit(newJob(id, Read, n, time.Hour)); err != ErrQueueFull {
				t.Errorf("job of %d: %v", n, err)
			}
		}
		must(t, l.Submit(newJob(4, Read, 2, time.Hour)))
		must(t, l.Submit(newJob(5, Write, 20, time.Hour))) // alone in its direction
		if err := l.Submit(newJob(6, Write, 1, time.Hour)); err != ErrQueueFull {
			t.Error(err)
		}
		must(t, l.SubmitProbe(newProbe(7, time.Hour)))
		must(t, l.SubmitProbe(newProbe(8, time.Hour)))
		if err := l.SubmitProbe(newProbe(9, time.Hour)); err != ErrQueueFull {
			t.Error(err)
		}
		s := l.Stats()
		if s.Read.RefusedFull != 2 || s.Write.RefusedFull != 1 || s.Probe.RefusedFull != 1 || s.Read.Items != 8 || s.Read.Bytes != 8*testBlock {
			t.Errorf("stats: %+v", s)
		}
		close(g.letRead)
		close(g.letWrite)
		close(pause)
		synctest.Wait()
		must(t, l.Submit(newJob(2, Read, 5, time.Hour))) // room again
		mustClose(t, l)
		for _, id := range []JobID{3, 6, 9} {
			if len(r.reports(id))+len(r.probe(id)) > 0 {
				t.Errorf("refused job %d was reported", id)
			}
		}
		r.ended(2, 5)
		if err := l.Submit(newJob(30, Read, 1, time.Hour)); err != ErrClosed {
			t.Error(err)
		}
	})
}

func TestInflightBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate()
		l, _ := newTestLane(t, g, Options{ReadParallel: 8, BatchItems: 2, InflightBytes: 5 * testBlock, Breaker: calm})
		defer mustClose(t, l)
		must(t, l.Submit(newJob(1, Read, 40, time.Hour)))
		must(t, l.Submit(newJob(2, Write, 1, time.Hour)))
		synctest.Wait()
		if s := l.Stats().Read; s.RunningBytes != 5*testBlock || s.Running != 3 {
			t.Errorf("%d bytes in %d calls run, want 320 in 3", s.RunningBytes, s.Running)
		}
		if g.writes.Load() != 1 {
			t.Error("the cap of reads stopped writes")
		}
		close(g.letRead)
		close(g.letWrite)
		synctest.Wait()
		checkIdle(t, l)
	})
	synctest.Test(t, func(t *testing.T) { // smaller than a block: one at a time
		l, r := newTestLane(t, &fakeTier{}, Options{InflightBytes: 1})
		defer mustClose(t, l)
		must(t, l.Submit(newJob(1, Read, 5, time.Hour)))
		synctest.Wait()
		r.ended(1, 5)
	})
}

func TestCancel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var heed atomic.Bool
		heed.Store(true)
		f := &fakeTier{read: func(ctx context.Context, items []tier.Item) {
			<-ctx.Done()
			if !heed.Load() {
				time.Sleep(time.Minute)
			}
			for i := range items {
				if items[i].Err = ctx.Err(); i == 0 {
					items[i].Err = nil
					fill(&items[i])
				}
			}
		}}
		l, r := newTestLane(t, f, Options{ReadParallel: 1, BatchItems: 3, Breaker: calm})
		defer mustClose(t, l)
		must(t, l.Submit(newJob(1, Read, 5, time.Hour))) // 3 run, 2 queued
		must(t, l.Submit(newJob(2, Read, 4, time.Hour))) // all queued
		synctest.Wait()

		// Nothing is reported inside Cancel: hold what the sink needs.
		r.mu.Lock()
		l.Cancel(2)
		l.Cancel(99)
		r.mu.Unlock()
		synctest.Wait()
		for i, res := range r.ended(2, 4) {
			if res.Err != ErrCancelled || tier.ClassOf(res.Err) != tier.ClassCancelled {
				t.Errorf("item %d: %v", i, res.Err)
			}
		}
		l.Cancel(1)
		synctest.Wait()
		for i, res := range r.ended(1, 5) {
			if want := map[bool]error{true: nil, false: ErrCancelled}[i == 0]; res.Err != want {
				t.Errorf("item %d: %v, want %v", i, res.Err, want)
			}
		}
		l.Cancel(1)
		l.Cancel(2)
		if n := l.Stats().UnknownCancels; n != 3 {
			t.Errorf("%d unknown cancels, want 3", n)
		}

		// A call that ignores its context is reported when it returns.
		heed.Store(false)
		start := time.Now()
		must(t, l.Submit(newJob(3, Read, 4, time.Hour)))
		synctest.Wait()
		l.Cancel(3)
		l.Cancel(3)
		synctest.Wait()
		if n := r.reported(3); n != 1 {
			t.Errorf("%d items reported, want only the queued one", n)
		}
		pause(2 * time.Minute)
		r.ended(3, 4)
		if d := r.reports(3)[1].at.Sub(start); d != time.Minute {
			t.Errorf("reported after %v", d)
		}
		if s := l.Stats().Read; s.Failed != 0 || s.Cancelled != 4+4+3 || s.Done != 2 {
			t.Errorf("stats %+v", s)
		}
	})
}

func TestCancelProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeTier{contains: func(ctx context.Context, _ []block.Key, _ []bool) error { <-ctx.Done(); return ctx.Err() }}
		l, r := newTestLane(t, f, Options{ProbeParallel: 1, Breaker: calm})
		defer mustClose(t, l)
		must(t, l.SubmitProbe(newProbe(1, time.Hour)))
		must(t, l.SubmitProbe(newProbe(2, time.Hour)))
		must(t, l.SubmitProbe(newProbe(3, time.Second)))
		synctest.Wait()
		l.Cancel(2)
		l.Cancel(1)
		pause(2 * time.Second)
		for id := JobID(1); id <= 2; id++ {
			if p := r.probe(id); len(p) != 1 || p[0].err != ErrCancelled || p[0].found != nil {
				t.Errorf("probe %d: %+v", id, p)
			}
		}
		if p := r.probe(3); len(p) != 1 {
			t.Errorf("probe 3: %+v", p)
		} else {
			wantErr(t, p[0].err, tier.ClassRetryable, tier.CauseTimeout)
		}
	})
}

// A hung call keeps its place; what waits for it fails at its deadline, and its
// own report comes when it returns. With all places hung the direction opens.
func TestHungCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate()
		l, r := newTestLane(t, g, Options{ReadParallel: 2, BatchItems: 1})
		defer mustClose(t, l)
		start := time.Now()
		must(t, l.Submit(newJob(1, Read, 3, time.Second)))
		synctest.Wait()
		must(t, l.Submit(newJob(2, Read, 2, 1500*time.Millisecond)))
		pause(1100 * time.Millisecond)
		synctest.Wait()
		if n := r.reported(1); n != 1 {
			t.Errorf("%d items reported at the deadline, want the queued one", n)
		} else {
			wantErr(t, r.reports(1)[0].results[0].Err, tier.ClassRetryable, tier.CauseTimeout)
		}
		if s := l.Stats().Read; s.Overdue != 2 || s.OverdueBytes != 2*testBlock || s.RunningBytes != 0 || s.Expired != 1 {
			t.Errorf("stats %+v", s)
		}
		if l.State(Read) != StateClosed || len(r.reports(2)) != 0 {
			t.Errorf("within the grace: %v", l.State(Read))
		}
		pause(200 * time.Millisecond) // past the grace
		synctest.Wait()
		if l.State(Read) != StateOpen || l.State(Write) != StateClosed {
			t.Errorf("read %v, write %v", l.State(Read), l.State(Write))
		}
		for _, res := range r.ended(2, 2) {
			wantErr(t, res.Err, tier.ClassPermanent, tier.CauseUnavailable)
		}
		if err := l.Submit(newJob(3, Read, 1, time.Hour)); err != ErrOpen {
			t.Error(err)
		}
		if err := l.SubmitProbe(newProbe(3, time.Hour)); err != ErrOpen {
			t.Error(err)
		}
		pause(time.Minute)
		if l.State(Read) != StateOpen {
			t.Errorf("no place is free and the state is %v", l.State(Read))
		}
		g.letRead <- struct{}{}
		pause(2 * time.Second) // a place is free
		if l.State(Read) != StateHalfOpen {
			t.Errorf("a place is free and the state is %v", l.State(Read))
		}
		// The trial uses the free place, though one still hangs.
		must(t, l.Submit(newJob(4, Read, 1, time.Hour)))
		synctest.Wait()
		if g.reads.Load() != 3 {
			t.Errorf("%d reads begun", g.reads.Load())
		}
		close(g.letRead)
		synctest.Wait()
		for i, res := range r.ended(1, 3)[:2] {
			if res.Err != nil {
				t.Errorf("item %d, late but done: %v", i, res.Err)
			}
		}
		if d := r.reports(1)[1].at.Sub(start); d < time.Minute {
			t.Errorf("a hung call was reported after %v", d)
		}
		r.ended(4, 1)
		if s := l.Stats().Read; s.RefusedOpen != 1 || s.Causes[tier.CauseUnavailable] != 2 || s.Causes[tier.CauseTimeout] != 1 {
			t.Errorf("stats %+v", s)
		}
	})
}

// A call that heeds its context and is one of few is late, not hung.
// A call that does not come back is in the log, with what an operator needs;
// one that does after its deadline is not, and many are one line.
func TestHungCallIsLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log lockedBuffer
		back := make(chan struct{})
		f := &fakeTier{write: func(context.Context, []tier.Item) { <-back }}
		l, _ := newTestLane(t, f, Options{WriteParallel: 8, LogEvery: time.Minute, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		defer mustClose(t, l)
		for id := JobID(1); id <= 3; id++ {
			must(t, l.Submit(newJob(id, Write, 1, time.Second)))
		}
		pause(time.Second + hungGrace/2)
		if strings.Contains(log.String(), "has not returned") {
			t.Errorf("late is not hung: %s", log.String())
		}
		pause(hungGrace)
		if n := strings.Count(log.String(), "has not returned"); n != 1 {
			t.Errorf("%d lines: %s", n, log.String())
		}
		for _, part := range []string{"level=WARN", "call has not returned; its slots stay quarantined", "tier=fake", "op=write", "key=", "age=1.25s"} {
			if !strings.Contains(log.String(), part) {
				t.Errorf("%q is not in %q", part, log.String())
			}
		}
		close(back)
	})
}

func TestLateIsNotHung(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeTier{read: func(ctx context.Context, items []tier.Item) {
			<-ctx.Done()
			for i := range items {
				items[i].Err = ctx.Err()
			}
		}}
		l, r := newTestLane(t, f, Options{ReadParallel: 1})
		defer mustClose(t, l)
		must(t, l.Submit(newJob(1, Read, 1, time.Second)))
		pause(10 * time.Second)
		wantErr(t, r.ended(1, 1)[0].Err, tier.ClassRetryable, tier.CauseTimeout)
		if l.State(Read) != StateClosed {
			t.Errorf("state is %v", l.State(Read))
		}
		if n := l.br[Read].streak; n != 1 {
			t.Errorf("the timeout counted %d times", n)
		}
	})
}

// Too many bytes past their deadline bring the whole lane down, until they are
// back.
func TestOverdueBytesMax(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate()
		l, r := newTestLane(t, g, Options{ReadParallel: 8, BatchItems: 4, OverdueBytesMax: 4 * testBlock, Breaker: calm})
		defer mustClose(t, l)
		must(t, l.Submit(newJob(1, Read, 4, time.Second)))
		pause(2 * time.Second)
		if l.State(Read) != StateClosed {
			t.Fatalf("at the cap: %v", l.State(Read))
		}
		must(t, l.Submit(newJob(2, Write, 1, time.Second)))
		pause(2 * time.Second)
		if l.State(Read) != StateOpen || l.State(Write) != StateOpen {
			t.Fatalf("above the cap: %v, %v", l.State(Read), l.State(Write))
		}
		pause(time.Hour)
		if l.State(Read) != StateOpen || l.State(Write) != StateOpen {
			t.Fatalf("above the cap: %v, %v", l.State(Read), l.State(Write))
		}
		close(g.letRead)
		pause(time.Hour)
		if l.State(Read) != StateHalfOpen || l.State(Write) != StateHalfOpen {
			t.Fatalf("below the cap: %v, %v", l.State(Read), l.State(Write))
		}
		close(g.letWrite)
		synctest.Wait()
		r.ended(1, 4)
		r.ended(2, 1)
	})
}

func TestChecksums(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var wrote []block.Key
		var aside []string
		f := &asideTier{}
		f.read = func(_ context.Context, items []tier.Item) {
			for i := range items {
				fill(&items[i])
			}
			items[1].Buf[3]++ // flipped
			items[2].Sum = 0  // neither done nor failed
			other := make([]byte, testBlock)
			items[3].Buf = other // good bytes, but not in the slot
			items[3].Sum = crc64nvme.Checksum(other)
			items[4].Err = tier.ErrNotFound
		}
		f.write = func(_ context.Context, items []tier.Item) {
			for i := range items {
				wrote = append(wrote, items[i].Key)
				items[i].Sum = 1 // must not reach the result
			}
		}
		f.aside = func(ctx context.Context, key block.Key, why string) error {
			if d, ok := ctx.Deadline(); !ok || time.Until(d) > setAsideTimeout || !strings.Contains(why, "checksum") {
				t.Errorf("set aside until %v because %q", d, why)
			}
			aside = append(aside, key.String())
			switch len(aside) {
			case 1:
				return errors.New("no room")
			case 2:
				panic("aside")
			}
			return nil
		}
		l, r := newTestLane(t, f, Options{Breaker: BreakerOptions{MinCalls: 1}})
		defer mustClose(t, l)
		must(t, l.Submit(newJob(1, Read, 6, time.Minute)))
		synctest.Wait()
		for i, res := range r.ended(1, 6) {
			switch i {
			case 1, 2, 3:
				wantErr(t, res.Err, tier.ClassCorrupt, tier.CauseChecksum)
				var te *tier.Error
				if errors.As(res.Err, &te); te.Key != testKey(1, i) || te.Tier != "fake" || te.Op != "read" {
					t.Errorf("error: %v", te)
				}
			case 4:
				wantErr(t, res.Err, tier.ClassNotFound, tier.CauseOther)
			default:
				if res.Err != nil {
					t.Errorf("item %d: %v", i, res.Err)
				}
			}
		}
		if want := []string{testKey(1, 1).String(), testKey(1, 2).String(), testKey(1, 3).String()}; !slices.Equal(aside, want) {
			t.Errorf("set aside %v", aside)
		}

		wr := newJob(2, Write, 4, time.Minute)
		wr.Items[0].Buf[0]++
		wr.Items[2].Sum++
		must(t, l.Submit(wr))
		bad := newJob(3, Write, 1, time.Minute)
		bad.Items[0].Sum++
		synctest.Wait()
		must(t, l.Submit(bad))
		synctest.Wait()
		res := r.ended(2, 4)
		wantErr(t, res[0].Err, tier.ClassCorrupt, tier.CauseSource)
		wantErr(t, res[2].Err, tier.ClassCorrupt, tier.CauseSource)
		if res[1].Err != nil || res[3].Err != nil || res[1].Sum != wr.Items[1].Sum {
			t.Errorf("results: %+v", res)
		}
		wantErr(t, r.ended(3, 1)[0].Err, tier.ClassCorrupt, tier.CauseSource)
		slices.SortFunc(wrote, func(a, b block.Key) int { return bytes.Compare(a[:], b[:]) })
		if !slices.Equal(wrote, []block.Key{testKey(2, 1), testKey(2, 3)}) {
			t.Errorf("wrote %v", wrote)
		}
		s := l.Stats()
		if s.SetAside != 3 || s.SetAsideFailed != 2 || s.Write.Calls != 1 || s.Read.Causes[tier.CauseChecksum] != 3 || s.Read.NotFound != 1 {
			t.Errorf("stats: %+v", s)
		}
		if l.State(Read) != StateClosed || l.State(Write) != StateClosed {
			t.Error("bad blocks counted against the tier")
		}
	})
}

// A panic fails the items of its call, and the worker lives on.
func TestPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		boom := true
		f := &fakeTier{}
		f.read = func(_ context.Context, items []tier.Item) {
			fill(&items[0])
			if boom {
				fill(&items[len(items)]) // out of range
			}
			fill(&items[1])
		}
		f.write = func(_ context.Context, items []tier.Item) {
			if boom {
				panic("write")
			}
		}
		f.contains = func(context.Context, []block.Key, []bool) error {
			if boom {
				panic(errors.New("probe"))
			}
			return nil
		}
		l, r := newTestLane(t, f, Options{ReadParallel: 1, WriteParallel: 1, ProbeParallel: 1, BatchItems: 2, Breaker: calm,
			Logger: slog.New(slog.NewTextHandler(&log, nil))})
		defer mustClose(t, l)
		for round := range 3 {
			id := JobID(round * 10)
			must(t, l.Submit(newJob(id, Read, 4, time.Minute)))
			must(t, l.Submit(newJob(id+1, Write, 4, time.Minute)))
			must(t, l.SubmitProbe(newProbe(id+2, time.Minute)))
			synctest.Wait()
			res := append(r.ended(id, 4), r.ended(id+1, 4)...)
			for _, res := range append(res, Result{Err: r.probe(id + 2)[0].err}) {
				if boom {
					wantErr(t, res.Err, tier.ClassPermanent, tier.CauseOther)
				} else if res.Err != nil {
					t.Error(res.Err)
				}
			}
			boom = round < 1
		}
		s := l.Stats()
		if s.Read.Panics != 4 || s.Write.Panics != 4 || s.Probe.Panics != 2 {
			t.Errorf("panics: %+v", s)
		}
		if l.br[Read].half[0].bad != 4+2 {
			t.Errorf("breaker counts %+v", l.br[Read].half)
		}
		if out := log.String(); !strings.Contains(out, "index out of range") || !strings.Contains(out, "lane_test.go") {
			t.Errorf("no stack in the log: %s", out)
		}
	})
}

type panicHandler struct{ slog.Handler }

func (panicHandler) Enabled(context.Context, slog.Level) bool  { return true }
func (panicHandler) Handle(context.Context, slog.Record) error { panic("handler") }

// Errors in hooks change no outcome (B007).
func TestHooksChangeNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeTier{read: func(_ context.Context, items []tier.Item) {
			for i := range items {
				if fill(&items[i]); i == 0 {
					items[i].Err = fail(tier.ClassPermanent, tier.CauseIO)
				}
			}
		}}
		l, r := newTestLane(t, f, Options{BatchItems: 2, Breaker: calm, Logger: slog.New(panicHandler{})})
		defer mustClose(t, l)
		r.on = func(JobID, []Result, bool) { panic("sink") }
		must(t, l.Submit(newJob(1, Read, 6, time.Minute)))
		synctest.Wait()
		s := l.Stats()
		if s.SinkPanics == 0 || s.Read.Done != 3 || s.Read.Failed != 3 {
			t.Errorf("stats: %+v", s)
		}
	})
}

// The sink may call the lane, and finds the id and the room free at the last
// report.
func TestSinkMayCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, r := newTestLane(t, &fakeTier{}, Options{QueueItems: 1, ReadParallel: 1})
		defer mustClose(t, l)
		rounds := 0
		r.on = func(id JobID, results []Result, last bool) {
			l.Stats()
			l.State(Read)
			l.Cancel(id + 1)
			r.forget(id)
			if rounds++; rounds < 50 {
				must(t, l.Submit(newJob(id, Read, 1, time.Minute)))
			}
		}
		must(t, l.Submit(newJob(1, Read, 1, time.Minute)))
		synctest.Wait()
		if rounds != 50 {
			t.Errorf("%d rounds", rounds)
		}
	})
}

// A slow sink call for one job delays neither other jobs nor a cancel.
func TestReportsOfOneJobInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, r := newTestLane(t, &fakeTier{}, Options{BatchItems: 1, ReadParallel: 4})
		defer mustClose(t, l)
		r.on = func(id JobID, results []Result, last bool) {
			if id == 1 {
				time.Sleep(time.Second)
			}
		}
		must(t, l.Submit(newJob(1, Read, 20, time.Minute)))
		must(t, l.Submit(newJob(2, Read, 20, time.Minute)))
		synctest.Wait()
		r.ended(2, 20)
		pause(time.Minute)
		r.ended(1, 20) // the recorder checks order and overlap
	})
}

func TestRetry(t *testing.T) {
	opt := Options{ReadParallel: 1, Breaker: calm, Retry: RetryOptions{Attempts: 5, Base: 100 * time.Millisecond, Max: 300 * time.Millisecond}}
	var waits [5][]time.Duration
	for range 40 {
		synctest.Test(t, func(t *testing.T) {
			var calls []time.Time
			f := &fakeTier{}
			f.read = func(_ context.Context, items []tier.Item) {
				calls = append(calls, time.Now())
				for i := range items {
					if fill(&items[i]); items[i].Key == testKey(1, 2) {
						if len(calls) < 4 && items[i].Err != nil {
							t.Error("an old error was handed in")
						}
						items[i].Err = fail(tier.ClassRetryable, tier.CauseIO)
					}
				}
			}
			l, r := newTestLane(t, f, opt)
			defer mustClose(t, l)
			must(t, l.Submit(newJob(1, Read, 4, time.Minute)))
			synctest.Wait()
			if r.reported(1) != 3 {
				t.Fatalf("%d reported while one is retried", r.reported(1))
			}
			if s := l.Stats().Read; s.RetryItems != 1 || s.Items != 1 || s.Bytes != testBlock || s.Running != 0 {
				t.Fatalf("stats %+v", s)
			}
			pause(time.Minute - 1)
			wantErr(t, r.ended(1, 4)[2].Err, tier.ClassRetryable, tier.CauseIO)
			if len(calls) != 5 {
				t.Fatalf("%d calls, want Attempts", len(calls))
			}
			for i := range 4 {
				waits[i] = append(waits[i], calls[i+1].Sub(calls[i]))
			}
			if l.Stats().Read.Retries != 4 {
				t.Errorf("stats: %+v", l.Stats().Read)
			}
		})
	}
	for i, want := range []time.Duration{100, 200, 300, 300} {
		want *= time.Millisecond
		lo, hi := slices.Min(waits[i]), slices.Max(waits[i])
		if lo < want/2 || hi > want || hi-lo < want/8 {
			t.Errorf("retry %d waited %v to %v, want spread over %v to %v", i+1, lo, hi, want/2, want)
		}
	}
}

// While an item waits to be tried again its worker does other work, a cancel or
// Close ends the wait, and no retry begins that the deadline would not let be.
func TestRetryWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeTier{}
		var ok atomic.Bool
		f.read = func(_ context.Context, items []tier.Item) {
			for i := range items {
				if fill(&items[i]); items[i].Key[7] < 10 && !ok.Load() {
					items[i].Err = fail(tier.ClassRetryable, tier.CauseIO)
				}
			}
		}
		l, r := newTestLane(t, f, Options{ReadParallel: 1, QueueItems: 4, Breaker: calm, Retry: RetryOptions{Attempts: 9, Base: 10 * time.Second, Max: 10 * time.Second}})
		must(t, l.Submit(newJob(1, Read, 1, time.Hour)))
		must(t, l.Submit(newJob(2, Read, 1, 4*time.Second)))
		must(t, l.Submit(newJob(3, Read, 2, time.Hour)))
		synctest.Wait()
		wantErr(t, r.ended(2, 1)[0].Err, tier.ClassRetryable, tier.CauseIO) // a retry would come too late
		must(t, l.Submit(newJob(10, Read, 1, time.Hour)))
		synctest.Wait()
		if res := r.ended(10, 1); res[0].Err != nil {
			t.Error(res)
		}
		if err := l.Submit(newJob(11, Read, 2, time.Hour)); err != ErrQueueFull {
			t.Errorf("waiting retries are not held: %v", err)
		}
		l.Cancel(1)
		synctest.Wait()
		if res := r.ended(1, 1); res[0].Err != ErrCancelled {
			t.Error(res)
		}
		ok.Store(true)
		pause(11 * time.Second)
		if res := r.ended(3, 2); res[0].Err != nil || res[1].Err != nil {
			t.Error(res)
		}
		ok.Store(false)
		must(t, l.Submit(newJob(4, Read, 1, time.Hour)))
		synctest.Wait()
		start := time.Now()
		mustClose(t, l)
		if res := r.ended(4, 1); res[0].Err != ErrCancelled || time.Since(start) != 0 {
			t.Error(res, time.Since(start))
		}
	})
}

func TestRetryProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := 0
		f := &fakeTier{contains: func(_ context.Context, _ []block.Key, found []bool) error {
			if n++; n < 3 {
				return fail(tier.ClassRetryable, tier.CauseIO)
			}
			found[1] = true
			return nil
		}}
		l, r := newTestLane(t, f, Options{Breaker: calm})
		defer mustClose(t, l)
		must(t, l.SubmitProbe(newProbe(1, time.Minute)))
		pause(10 * time.Second)
		if p := r.probe(1); n != 3 || len(p) != 1 || p[0].err != nil || !slices.Equal(p[0].found, []bool{false, true}) {
			t.Errorf("%d calls: %+v", n, p)
		}
	})
}

// The walk closed → brown-out → open → half-open → open → half-open → closed,
// driven by calls, with the times between and what the sink is told.
func TestBreakerWalk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate()
		broken := false
		g.read = func(_ context.Context, items []tier.Item) {
			g.reads.Add(1)
			<-g.letRead
			for i := range items {
				if fill(&items[i]); broken {
					items[i].Err = fail(tier.ClassPermanent, tier.CauseIO)
				}
			}
		}
		l, r := newTestLane(t, g, Options{ReadParallel: 6, BatchItems: 1, Breaker: BreakerOptions{
			Window: 20 * time.Second, MinCalls: 10, BrownShare: 0.2, OpenShare: 0.5, LatencyMax: time.Hour,
			BrownParallel: 2, OpenBase: 8 * time.Second, OpenMax: time.Minute, Trials: 2}})
		defer mustClose(t, l)
		next := JobID(1)
		do := func(good, bad int) {
			for i := range good + bad {
				broken = i >= good
				must(t, l.Submit(newJob(next, Read, 1, time.Hour)))
				next++
				g.letRead <- struct{}{}
				synctest.Wait()
			}
		}
		want := func(s State) {
			t.Helper()
			if l.State(Read) != s {
				t.Fatalf("state is %v, want %v", l.State(Read), s)
			}
		}
		do(8, 1)
		want(StateClosed)
		do(0, 1) // 2 of 10
		want(StateBrownOut)

		// Few calls at once.
		broken = false
		must(t, l.Submit(newJob(next, Read, 9, time.Hour)))
		synctest.Wait()
		if s := l.Stats().Read; s.Running != 2 {
			t.Errorf("%d calls run in brown-out", s.Running)
		}
		for range 9 {
			g.letRead <- struct{}{}
		}
		synctest.Wait()
		r.ended(next, 9)
		next++
		want(StateBrownOut)
		pause(20 * time.Second)
		synctest.Wait()
		want(StateClosed) // by itself

		do(4, 3)
		pause(25 * time.Second)
		synctest.Wait()
		do(9, 1) // the old failures are forgotten
		want(StateClosed)
		do(0, 2) // 3 of 12
		want(StateBrownOut)

		// Open: the queue fails fast.
		broken = true
		must(t, l.Submit(newJob(next, Read, 30, time.Hour)))
		for range 6 { // 9 of 18
			want(StateBrownOut)
			g.letRead <- struct{}{}
			synctest.Wait()
		}
		want(StateOpen)
		opened := time.Now()
		if err := l.Submit(newJob(99, Read, 1, time.Hour)); err != ErrOpen {
			t.Fatal(err)
		}
		must(t, l.Submit(newJob(98, Write, 1, time.Hour))) // the other direction is well
		g.letWrite <- struct{}{}
		synctest.Wait()
		if n := r.reported(next); n != 29 { // one more was running beside the sixth
			t.Errorf("%d reported", n)
		}
		g.letRead <- struct{}{}
		synctest.Wait()
		unavailable := 0
		for _, res := range r.ended(next, 30) {
			if tier.CauseOf(res.Err) == tier.CauseUnavailable {
				unavailable++
			}
		}
		if unavailable != 23 {
			t.Errorf("%d failed fast", unavailable)
		}
		next++
		halfOpen := func(d time.Duration) {
			t.Helper()
			for l.State(Read) == StateOpen {
				time.Sleep(10 * time.Millisecond)
				synctest.Wait()
			}
			want(StateHalfOpen)
			if e := time.Since(opened); e < d/2 || e > d+20*time.Millisecond {
				t.Errorf("half-open after %v, want %v to %v", e, d/2, d)
			}
		}
		halfOpen(8 * time.Second)

		// One trial at a time, and it fails.
		g.reads.Store(0)
		must(t, l.Submit(newJob(next, Read, 3, time.Hour)))
		synctest.Wait()
		if g.reads.Load() != 1 {
			t.Errorf("%d trials at once", g.reads.Load())
		}
		g.letRead <- struct{}{}
		synctest.Wait()
		want(StateOpen)
		r.ended(next, 3)
		next++
		opened = time.Now()
		halfOpen(16 * time.Second)

		do(1, 0)
		want(StateHalfOpen)
		do(1, 0)
		want(StateClosed)

		// A relapse within the last time open goes on doubling; a later one does not.
		do(0, 10)
		want(StateOpen)
		opened = time.Now()
		halfOpen(32 * time.Second)
		do(2, 0)
		pause(time.Minute)
		do(0, 10)
		want(StateOpen)
		opened = time.Now()
		halfOpen(8 * time.Second)
		do(2, 0)

		r.mu.Lock()
		defer r.mu.Unlock()
		var got []string
		for _, h := range r.health {
			got = append(got, strings.TrimPrefix(h, "read "))
		}
		if w := "brown_out closed brown_out open half_open open half_open closed open half_open closed open half_open closed"; strings.Join(got, " ") != w {
			t.Errorf("the sink was told %v", got)
		}
	})
}

// What the breaker counts and what not.
func TestBreakerCounts(t *testing.T) {
	for _, c := range []struct {
		err  error
		open bool
	}{
		{fail(tier.ClassRetryable, tier.CauseIO), true},
		{fail(tier.ClassPermanent, tier.CauseIO), true},
		{fail(tier.ClassPermanent, tier.CausePermission), true},
		{fail(tier.ClassRetryable, tier.CauseTimeout), true},
		{context.DeadlineExceeded, true},
		{errors.New("unclassified"), true},
		{tier.ErrClosed, true},
		{tier.ErrNotFound, false},
		{fail(tier.ClassCorrupt, tier.CauseHeader), false},
		{fail(tier.ClassCancelled, tier.CauseOther), false},
		{context.Canceled, false},
		{fail(tier.ClassRetryable, tier.CauseNoSpace), false},
		{fail(tier.ClassPermanent, tier.CauseCapacity), false},
		{fail(tier.ClassRetryable, tier.CauseFloor), false},
		{fail(tier.ClassRetryable, tier.CauseScanning), false},
		{fail(tier.ClassPermanent, tier.CauseSource), false},
		{fmt.Errorf("open: %w", tier.ErrNamespaceMismatch), false},
		{fail(tier.ClassPermanent, tier.CauseNamespace), false},
		{fail(tier.ClassPermanent, tier.CauseForeign), false},
	} {
		synctest.Test(t, func(t *testing.T) {
			f := &fakeTier{}
			f.write = func(_ context.Context, items []tier.Item) { items[0].Err = c.err }
			f.contains = func(context.Context, []block.Key, []bool) error { return c.err }
			l, _ := newTestLane(t, f, Options{Breaker: BreakerOptions{MinCalls: 3}, Retry: RetryOptions{Attempts: 1}})
			defer mustClose(t, l)
			for id := JobID(1); id <= 3; id++ {
				must(t, l.Submit(newJob(id, Write, 1, time.Hour)))
				must(t, l.SubmitProbe(newProbe(id+10, time.Hour)))
				synctest.Wait()
			}
			if open := l.State(Write) == StateOpen; open != c.open {
				t.Errorf("%v: write state %v", c.err, l.State(Write))
			}
			if open := l.State(Read) == StateOpen; open != c.open {
				t.Errorf("%v: read state by probes %v", c.err, l.State(Read))
			}
		})
	}
}

func TestBrownOutByLatency(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeTier{write: func(context.Context, []tier.Item) { time.Sleep(300 * time.Millisecond) }}
		l, r := newTestLane(t, f, Options{Breaker: BreakerOptions{MinCalls: 3, LatencyMax: 200 * time.Millisecond}})
		defer mustClose(t, l)
		must(t, l.Submit(newJob(1, Write, 1, time.Hour)))
		pause(time.Second)
		for id := JobID(2); id <= 3; id++ {
			must(t, l.Submit(newJob(id, Write, 1, time.Hour)))
		}
		pause(time.Second)
		if l.State(Write) != StateBrownOut || l.State(Read) != StateClosed {
			t.Errorf("write %v, read %v", l.State(Write), l.State(Read))
		}
		if !slices.Equal(r.health, []string{"write brown_out"}) {
			t.Errorf("told %v", r.health)
		}
	})
}

// An error that is everybody's, such as a missing permission, opens at once.
func TestDownOpensAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeTier{write: func(_ context.Context, items []tier.Item) {
			items[0].Err = &tier.Error{Op: "write", Tier: "x", Class: tier.ClassPermanent, Cause: tier.CausePermission, Err: errors.New("no"), Down: true}
		}}
		l, r := newTestLane(t, f, Options{Breaker: BreakerOptions{MinCalls: 50}})
		defer mustClose(t, l)
		must(t, l.Submit(newJob(1, Write, 1, time.Hour)))
		synctest.Wait()
		if l.State(Write) != StateOpen || !slices.Equal(r.health, []string{"write open"}) {
			t.Errorf("write %v, told %v", l.State(Write), r.health)
		}
	})
}

// A trial that hangs fails at its deadline, and its late outcome says nothing
// about a later state.
func TestHungTrial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate()
		l, _ := newTestLane(t, g, Options{ReadParallel: 4, BatchItems: 1, Breaker: BreakerOptions{MinCalls: 2, Trials: 1, OpenBase: time.Second}})
		defer mustClose(t, l)
		must(t, l.Submit(newJob(1, Read, 2, time.Second)))
		pause(1010 * time.Millisecond)
		if l.State(Read) != StateOpen {
			t.Fatalf("two calls in a row timed out: %v", l.State(Read))
		}
		pause(time.Second)
		if l.State(Read) != StateHalfOpen {
			t.Fatal(l.State(Read))
		}
		must(t, l.Submit(newJob(2, Read, 2, time.Second)))
		pause(1010 * time.Millisecond)
		if l.State(Read) != StateOpen || g.reads.Load() != 3 {
			t.Fatalf("%v, %d reads", l.State(Read), g.reads.Load())
		}
		pause(2 * time.Second)
		if l.State(Read) != StateHalfOpen {
			t.Fatal(l.State(Read))
		}
		close(g.letRead) // all three succeed, late
		synctest.Wait()
		if l.State(Read) != StateHalfOpen {
			t.Errorf("calls of the past closed the breaker: %v", l.State(Read))
		}
		must(t, l.Submit(newJob(3, Read, 1, time.Second)))
		synctest.Wait()
		if l.State(Read) != StateClosed {
			t.Error(l.State(Read))
		}
	})
}

// No buffer is reported while the tier may touch it.
func TestQuietBeforeReport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeTier{read: func(ctx context.Context, items []tier.Item) {
			<-ctx.Done()
			for range 100 { // long after the deadline
				time.Sleep(time.Second)
				for i := range items {
					fill(&items[i])
				}
			}
		}}
		l, r := newTestLane(t, f, Options{ReadParallel: 3, BatchItems: 2})
		var poisoned [][]byte
		j := newJob(1, Read, 9, time.Second)
		r.on = func(_ JobID, results []Result, _ bool) {
			for _, res := range results {
				buf := j.Items[res.Index].Buf
				for i := range buf {
					buf[i] = 0xcc
				}
				poisoned = append(poisoned, buf)
			}
		}
		must(t, l.Submit(j))
		pause(2 * time.Second)
		l.Cancel(1)
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if l.Close(ctx) == nil {
			t.Error("Close did not tell of the calls")
		}
		mustClose(t, l)
		r.ended(1, 9)
		for _, buf := range poisoned {
			if !bytes.Equal(buf, bytes.Repeat([]byte{0xcc}, testBlock)) {
				t.Error("a buffer was written after its report")
			}
		}
	})
}

func TestCloseNamesHungCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate()
		l, r := newTestLane(t, g, Options{ReadParallel: 1, BatchItems: 1, Breaker: calm})
		must(t, l.Submit(newJob(1, Read, 2, time.Hour)))
		must(t, l.Submit(newJob(2, Write, 1, time.Hour)))
		pause(3 * time.Second)
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		go func() { time.Sleep(time.Second); g.letWrite <- struct{}{} }()
		err := l.Close(ctx)
		if d := ctx.Err(); d == nil || err == nil {
			t.Fatalf("Close returned early: %v", err)
		}
		for _, part := range []string{"fake", "read", testKey(1, 0).String(), "8s", "left behind"} {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%q is not in %q", part, err)
			}
		}
		if strings.Contains(err.Error(), "write") || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error: %v", err)
		}
		if res := r.ended(2, 1); res[0].Err != nil {
			t.Errorf("a running call that ended in time: %v", res)
		}
		if r.reported(1) != 1 || r.reports(1)[0].results[0].Err != ErrCancelled {
			t.Errorf("queued: %+v", r.reports(1))
		}
		if err := l.SubmitProbe(newProbe(9, time.Hour)); err != ErrClosed {
			t.Error(err)
		}
		l.Cancel(1)
		if s := l.Stats(); !s.Closed || s.Read.Running != 1 || s.Read.RefusedClosed+s.Probe.RefusedClosed != 1 {
			t.Errorf("stats %+v", s)
		}
		close(g.letRead)
		mustClose(t, l) // and again
		mustClose(t, l)
		r.ended(1, 2)
	})
}

// A straggler that heeds its context ends when Close stops waiting.
func TestCloseCancelsStragglers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeTier{read: func(ctx context.Context, items []tier.Item) { <-ctx.Done(); items[0].Err = ctx.Err() }}
		l, r := newTestLane(t, f, Options{})
		must(t, l.Submit(newJob(1, Read, 1, time.Hour)))
		synctest.Wait()
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if err := l.Close(ctx); err == nil {
			t.Error("no error")
		}
		start := time.Now()
		mustClose(t, l)
		if d := time.Since(start); d != 0 {
			t.Errorf("the call went on for %v", d)
		}
		if res := r.ended(1, 1); res[0].Err != ErrCancelled {
			t.Error(res)
		}
	})
}

func TestWarningsAreLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		err := fail(tier.ClassPermanent, tier.CauseNoSpace)
		f := &fakeTier{write: func(_ context.Context, items []tier.Item) { items[0].Err = err }}
		l, _ := newTestLane(t, f, Options{LogEvery: 10 * time.Second, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		defer mustClose(t, l)
		id := JobID(0)
		write := func(n int) {
			for range n {
				id++
				must(t, l.Submit(newJob(id, Write, 1, time.Hour)))
				synctest.Wait()
			}
		}
		write(50)
		if n := strings.Count(log.String(), "\n"); n != 1 {
			t.Errorf("%d lines: %s", n, log.String())
		}
		for _, part := range []string{"tier=fake", "op=write", "cause=no_space", "key=" + testKey(1, 0).String()} {
			if !strings.Contains(log.String(), part) {
				t.Errorf("%q is not in %q", part, log.String())
			}
		}
		for _, noise := range []string{"lane=", "suppressed=", "=<nil>"} {
			if strings.Contains(log.String(), noise) {
				t.Errorf("%q is in %q", noise, log.String())
			}
		}
		pause(11 * time.Second)
		log.Reset()
		write(1)
		if !strings.Contains(log.String(), "suppressed=49") {
			t.Errorf("log: %s", log.String())
		}
		log.Reset()
		pause(time.Minute)
		err = tier.ErrNotFound
		write(1)
		err = context.Canceled
		write(1)
		if log.Len() > 0 {
			t.Errorf("log: %s", log.String())
		}
	})
}

// The goroutines are those that the package says.
func TestGoroutines(t *testing.T) {
	before := runtime.NumGoroutine()
	l, _ := newTestLane(t, &fakeTier{}, Options{ReadParallel: 3, WriteParallel: 2, ProbeParallel: 2})
	if n := runtime.NumGoroutine() - before; n != 3+1+2+1 {
		t.Errorf("%d goroutines", n)
	}
	mustClose(t, l)
}

func TestOptions(t *testing.T) {
	var o Options
	must(t, o.Validate())
	d := o.withDefaults(tier.Info{ReadParallel: 3, BatchItems: 5})
	if d.ReadParallel != 3 || d.WriteParallel != 4 || d.BatchItems != 5 || d.BatchBytes != 1<<20 || d.Logger == nil {
		t.Errorf("defaults: %+v", d)
	}
	o = Options{ReadParallel: 2, BatchItems: 2}
	if d := o.withDefaults(tier.Info{ReadParallel: 3, BatchItems: 5}); d.ReadParallel != 2 || d.BatchItems != 2 {
		t.Errorf("what is set: %+v", d)
	}
	o = Options{QueueItems: -1, Retry: RetryOptions{Base: -1}, Breaker: BreakerOptions{OpenShare: 1.5}}
	err := o.Validate()
	for _, f := range []string{"QueueItems", "Retry.Base", "Breaker.OpenShare"} {
		if err == nil || !strings.Contains(err.Error(), f) {
			t.Errorf("%s is not in %v", f, err)
		}
	}
}

// Calls from before an opening say nothing about the states after it, even if
// they are inside their deadline.
func TestCallsOfThePast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, good := range []bool{true, false} {
			let := make(chan struct{})
			f := &fakeTier{read: func(_ context.Context, items []tier.Item) {
				if items[0].Key == testKey(1, 0) {
					<-let
					if fill(&items[0]); good {
						return
					}
				}
				items[0].Err = fail(tier.ClassPermanent, tier.CauseIO)
			}}
			l, r := newTestLane(t, f, Options{Breaker: BreakerOptions{MinCalls: 2, Trials: 1}})
			must(t, l.Submit(newJob(1, Read, 1, time.Hour)))
			must(t, l.Submit(newJob(2, Read, 1, time.Hour)))
			must(t, l.Submit(newJob(3, Read, 1, time.Hour)))
			pause(2 * time.Second)
			if l.State(Read) != StateHalfOpen {
				t.Fatal(l.State(Read))
			}
			must(t, l.Submit(newJob(4, Read, 1, time.Hour))) // the trial does not wait for it
			pause(3 * time.Second)
			if r.ended(4, 1); l.Stats().Read.Openings != 2 || l.State(Read) != StateHalfOpen {
				t.Errorf("%+v", l.Stats().Read)
			}
			close(let)
			synctest.Wait()
			if r.ended(1, 1); l.State(Read) != StateHalfOpen {
				t.Errorf("good %v: %v", good, l.State(Read))
			}
			mustClose(t, l)
		}
	})
}

// What fails while the lane closes is not tried again.
func TestCloseEndsRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeTier{write: func(_ context.Context, items []tier.Item) {
			time.Sleep(time.Second)
			items[0].Err = fail(tier.ClassRetryable, tier.CauseIO)
		}}
		l, r := newTestLane(t, f, Options{Breaker: calm})
		must(t, l.Submit(newJob(1, Write, 1, time.Hour)))
		synctest.Wait()
		start := time.Now()
		mustClose(t, l)
		wantErr(t, r.ended(1, 1)[0].Err, tier.ClassRetryable, tier.CauseIO)
		if d := time.Since(start); d != time.Second {
			t.Errorf("Close took %v", d)
		}
	})
}

// Errors that cannot be asked what they are fail their item only.
func TestUnusableErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeTier{read: func(_ context.Context, items []tier.Item) {
			for i := range items {
				fill(&items[i])
			}
			items[0].Err = (*tier.Error)(nil)
			items[1].Err = &tier.Error{Class: 99, Cause: 99, Err: errors.New("odd")}
			items[2].Err = &tier.Error{Class: tier.ClassPermanent} // nothing inside
		}}
		l, r := newTestLane(t, f, Options{Breaker: calm})
		defer mustClose(t, l)
		must(t, l.Submit(newJob(1, Read, 4, time.Hour)))
		synctest.Wait()
		for i, res := range r.ended(1, 4) {
			if (res.Err == nil) != (i == 3) {
				t.Errorf("item %d: %v", i, res.Err)
			}
		}
	})
}

// In brown-out a hung call does not use up what little is allowed.
func TestBrownOutWithHungCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		let := make(chan struct{})
		f := &fakeTier{write: func(_ context.Context, items []tier.Item) {
			if items[0].Key == testKey(3, 0) {
				<-let
			}
		}}
		l, r := newTestLane(t, f, Options{WriteParallel: 3, Breaker: BreakerOptions{MinCalls: 3, BrownShare: 0.3, OpenShare: 0.9, BrownParallel: 1}})
		defer mustClose(t, l)
		for id := JobID(1); id <= 3; id++ {
			must(t, l.Submit(newJob(id, Write, 1, time.Second)))
		}
		pause(2 * time.Second)
		if l.State(Write) != StateBrownOut {
			t.Fatal(l.State(Write))
		}
		must(t, l.Submit(newJob(4, Write, 1, time.Second)))
		synctest.Wait()
		if res := r.ended(4, 1); res[0].Err != nil {
			t.Error(res)
		}
		close(let)
	})
}
