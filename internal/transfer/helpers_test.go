package transfer

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/minio/crc64nvme"
	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const testBlock = 64

var testNS = func() *block.Namespace {
	ns, err := block.NewNamespace(block.Spec{Model: "m", DType: "d", Layout: "l", HashAlgorithm: "h", HashLength: 32,
		Groups: []block.Group{{Kind: block.KindFull, TokensPerBlock: 1, BlockBytes: testBlock}}})
	if err != nil {
		panic(err)
	}
	return ns
}()

func testKey(job JobID, i int) (k block.Key) {
	binary.BigEndian.PutUint64(k[:], uint64(job))
	binary.BigEndian.PutUint64(k[8:], uint64(i))
	return k
}

// content is what the fake tier has under a key.
func content(k block.Key, buf []byte) {
	for i := range buf {
		buf[i] = k[i%16] + byte(i)
	}
}

// fakeTier does what its fields say; without them everything succeeds.
type fakeTier struct {
	info     tier.Info
	read     func(ctx context.Context, items []tier.Item)
	write    func(ctx context.Context, items []tier.Item)
	contains func(ctx context.Context, keys []block.Key, found []bool) error
}

func fill(it *tier.Item) {
	content(it.Key, it.Buf)
	it.Sum = crc64nvme.Checksum(it.Buf)
}

func (f *fakeTier) Info() tier.Info { f.info.Name = "fake"; return f.info }

func (f *fakeTier) Read(ctx context.Context, _ *block.Namespace, items []tier.Item) {
	if f.read != nil {
		f.read(ctx, items)
		return
	}
	for i := range items {
		fill(&items[i])
	}
}

func (f *fakeTier) Write(ctx context.Context, _ *block.Namespace, items []tier.Item) {
	if f.write != nil {
		f.write(ctx, items)
	}
}

func (f *fakeTier) Contains(ctx context.Context, _ *block.Namespace, keys []block.Key, found []bool) error {
	if f.contains != nil {
		return f.contains(ctx, keys, found)
	}
	for i := range found {
		found[i] = true
	}
	return nil
}

func (f *fakeTier) Delete(context.Context, *block.Namespace, []block.Key) error { return nil }
func (f *fakeTier) Close(context.Context) error                                 { return nil }

// asideTier can set copies aside.
type asideTier struct {
	fakeTier
	aside func(ctx context.Context, key block.Key, why string) error
}

func (f *asideTier) SetAside(ctx context.Context, _ *block.Namespace, key block.Key, why string) error {
	return f.aside(ctx, key, why)
}

type report struct {
	at      time.Time
	results []Result
	last    bool
}

type probeReport struct {
	at    time.Time
	found []bool
	err   error
}

// recorder is a sink that remembers and checks the promises of Sink.
type recorder struct {
	t  *testing.T
	on func(id JobID, results []Result, last bool) // outside mu

	mu     sync.Mutex
	jobs   map[JobID][]report
	probes map[JobID][]probeReport
	health []string // "read open"
	calls  map[JobID]bool
}

func newRecorder(t *testing.T) *recorder {
	return &recorder{t: t, jobs: map[JobID][]report{}, probes: map[JobID][]probeReport{}, calls: map[JobID]bool{}}
}

func (r *recorder) JobResults(_ int, id JobID, results []Result, last bool) {
	r.mu.Lock()
	if r.calls[id] {
		r.t.Errorf("job %d: overlapping reports", id)
	}
	r.calls[id] = true
	if n := len(r.jobs[id]); n > 0 && r.jobs[id][n-1].last {
		r.t.Errorf("job %d: a report after the last", id)
	}
	r.jobs[id] = append(r.jobs[id], report{time.Now(), append([]Result(nil), results...), last})
	r.mu.Unlock()
	defer func() { // also when on panics
		r.mu.Lock()
		delete(r.calls, id)
		r.mu.Unlock()
	}()
	if r.on != nil {
		r.on(id, results, last)
	}
}

func (r *recorder) ProbeResult(_ int, id JobID, found []bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.probes[id] = append(r.probes[id], probeReport{time.Now(), found, err})
}

func (r *recorder) Health(_ int, d Dir, s State) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.health = append(r.health, fmt.Sprint(d, " ", s))
}

// ended returns the outcomes of a job of n items by index, once it is over, and
// checks that there is exactly one of each and one last.
func (r *recorder) ended(id JobID, n int) []Result {
	r.t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	out, seen := make([]Result, n), make([]int, n)
	lasts := 0
	for _, rep := range r.jobs[id] {
		for _, res := range rep.results {
			out[res.Index] = res
			seen[res.Index]++
		}
		if rep.last {
			lasts++
		}
	}
	for i, c := range seen {
		if c != 1 {
			r.t.Errorf("job %d: item %d was reported %d times", id, i, c)
		}
	}
	if lasts != 1 {
		r.t.Errorf("job %d: %d last reports", id, lasts)
	}
	return out
}

// reported counts the items of a job reported so far.
func (r *recorder) reported(id JobID) (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, rep := range r.jobs[id] {
		n += len(rep.results)
	}
	return n
}

func newJob(id JobID, d Dir, items int, timeout time.Duration) *Job {
	j := &Job{ID: id, Dir: d, NS: testNS, Deadline: time.Now().Add(timeout), Items: make([]tier.Item, items)}
	for i := range j.Items {
		it := &j.Items[i]
		it.Key, it.Buf = testKey(id, i), make([]byte, testBlock)
		if d == Write {
			fill(it)
		}
	}
	return j
}

func newProbe(id JobID, timeout time.Duration) *Probe {
	return &Probe{ID: id, NS: testNS, Keys: []block.Key{testKey(id, 0), testKey(id, 1)}, Deadline: time.Now().Add(timeout)}
}

// calm is a breaker that never moves, for tests of other things.
var calm = BreakerOptions{MinCalls: 1 << 30, LatencyMax: 1 << 60}

func newTestLane(t *testing.T, f tier.Tier, opt Options) (*Lane, *recorder) {
	if opt.Logger == nil {
		opt.Logger = slog.New(slog.DiscardHandler)
	}
	r := newRecorder(t)
	return NewLane(7, f, opt, r), r
}

func (r *recorder) reports(id JobID) []report {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.jobs[id])
}

func (r *recorder) probe(id JobID) []probeReport {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.probes[id])
}

// forget lets an id be used again.
func (r *recorder) forget(id JobID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.jobs, id)
	delete(r.calls, id)
}

// pause lets time pass in a bubble and what it wakes settle.
func pause(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// lockedBuffer is a log that is read while the lane runs.
type lockedBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lockedBuffer) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func mustClose(t *testing.T, l *Lane) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	must(t, l.Close(ctx))
	checkIdle(t, l)
}

// checkIdle is rule "idle is zero" for a lane.
func checkIdle(t *testing.T, l *Lane) {
	t.Helper()
	s := l.Stats()
	for k, q := range []QueueStats{s.Read, s.Write, s.Probe} {
		if q.Jobs != 0 || q.Items != 0 || q.Bytes != 0 || q.QueuedItems != 0 || q.RetryItems != 0 || q.Running != 0 ||
			q.RunningBytes != 0 || q.Overdue != 0 || q.OverdueBytes != 0 {
			t.Errorf("%s is not idle: %+v", kind(k), q)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, tm := range l.timers {
		if tm.br == nil {
			t.Errorf("a timer is armed: %+v", tm)
		}
	}
	if len(l.jobs) != 0 || len(l.notes) != 0 || l.q[0].first != nil || l.q[1].first != nil || l.q[2].first != nil {
		t.Errorf("tables are not empty: %d jobs, %d notes", len(l.jobs), len(l.notes))
	}
}

func wantErr(t *testing.T, err error, class tier.Class, cause tier.Cause) {
	t.Helper()
	if tier.ClassOf(err) != class || tier.CauseOf(err) != cause {
		t.Errorf("error %v is %v/%v, want %v/%v", err, tier.ClassOf(err), tier.CauseOf(err), class, cause)
	}
}

func fail(class tier.Class, cause tier.Cause) error {
	return &tier.Error{Op: "test", Tier: "fake", Class: class, Cause: cause, Err: fmt.Errorf("injected %v", cause)}
}
