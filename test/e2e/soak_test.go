package e2e

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/terrace-kv/terrace"
	"github.com/terrace-kv/terrace/internal/fault"
	"github.com/terrace-kv/terrace/internal/vfs"
	"github.com/terrace-kv/terrace/tier/fstier"
)

var (
	soakFor   = flag.Duration("soak.for", 30*time.Minute, "length of TestSoak with TERRACE_SOAK=1")
	soakRules = flag.String("soak.rules", "", "faults of its file calls; default: one call in a hundred fails with EIO")
)

// faultyArgs are given to a node whose file calls fail.
type faultyArgs struct {
	Socket, Root      string
	Primary, Capacity int64
	Rules             string
}

const faultyEnv = "E2E_FAULTY"

// faultyMain is a node as terrace serve runs it, but for a file system between
// it and its tier that fails calls by rules. They begin with SIGUSR2 and end
// with SIGUSR1.
func faultyMain() {
	var a faultyArgs
	if err := json.Unmarshal([]byte(os.Getenv(faultyEnv)), &a); err != nil {
		fatal(err)
	}
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2)
	set, err := fault.Parse(a.Rules)
	if err != nil {
		fatal(err)
	}
	set.Toggle(false)
	if err := os.MkdirAll(a.Root, 0o700); err != nil {
		fatal(err)
	}
	under, err := vfs.OpenRoot(a.Root)
	if err != nil {
		fatal(err)
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	// A Set remembers each key that it was asked about. Folders are few.
	folder := func(path string) string { return filepath.Dir(path) }
	ctx := context.Background()
	fs, err := fstier.Open(ctx, fstier.Options{Root: a.Root, Capacity: a.Capacity, MinFree: -1, Logger: log, FS: fault.FS(under, set, folder)})
	if err != nil {
		fatal(err)
	}
	n, err := terrace.Open(ctx, terrace.Options{Socket: a.Socket, PrimarySize: a.Primary, Populate: true, Tiers: []terrace.Tier{{Tier: fs}}, Admin: "127.0.0.1:0", Logger: log})
	if err != nil {
		fatal(err)
	}
	fmt.Printf("a node whose file calls fail by %s  admin     %s\nready at once\n", set, n.AdminURL())
	for s := range signals {
		set.Toggle(s == syscall.SIGUSR2)
		if s == syscall.SIGUSR2 {
			continue
		}
		log.Info("no more faults", "injected", set.Injected())
		if s == syscall.SIGTERM {
			break
		}
	}
	bounded, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	if err := n.Close(bounded); err != nil {
		fatal(err)
	}
	os.Exit(0)
}

// serveFaulty starts one.
func serveFaulty(t *testing.T, at nodeAt, a faultyArgs) *node {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(at.socket), 0o700); err != nil {
		t.Fatal(err)
	}
	a.Socket, a.Root = at.socket, at.root
	text, err := json.Marshal(a)
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(slices.Clone(at.env), roleEnv+"=faulty", faultyEnv+"="+string(text))
	return serveAs(t, at, cmd)
}

// sample is the node at one moment of the soak.
type sample struct {
	At         float64 `json:"at_seconds"`
	Heap       int64   `json:"heap_bytes"` // after a collection
	RSS        int64   `json:"rss_bytes"`  // the shared memory included
	Goroutines int64   `json:"goroutines"`
	FDs        int64   `json:"descriptors"`

	lookups, written, promoted, failed int64
	line                               string
}

func (n *node) sample(began time.Time) sample {
	n.t.Helper()
	s := sample{At: time.Since(began).Seconds(), Goroutines: int64(n.goroutines()), FDs: int64(descriptors(n.t, n.pid()))}
	page := n.page("/debug/pprof/heap?gc=1&debug=1")
	_, text, _ := strings.Cut(page, "# HeapAlloc = ")
	if _, err := fmt.Sscan(text, &s.Heap); err != nil {
		n.t.Fatalf("no HeapAlloc in the heap profile: %v", err)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", n.pid()))
	if err != nil {
		n.t.Fatal(err)
	}
	_, text, _ = strings.Cut(string(status), "VmRSS:")
	if _, err := fmt.Sscan(text, &s.RSS); err != nil {
		n.t.Fatal(err)
	}
	s.RSS <<= 10
	st := n.status()
	f := fsOf(st)
	s.lookups, s.written, s.promoted = st.Lookups.Calls, f.WrittenBlocks, f.Hits
	for _, c := range f.Failures {
		s.failed += c
	}
	s.line = fmt.Sprintf("%7.1f %9.2f %9.1f %11d %12d %10d %9d %9d %9d %9.1f", s.At, float64(s.Heap)/(1<<20), float64(s.RSS)/(1<<20), s.Goroutines, s.FDs,
		s.lookups, s.written, s.promoted, s.failed, float64(f.UsedBytes)/(1<<20))
	return s
}

// flat says whether a measure has stopped growing: the median of the last
// quarter is at most a tenth and a constant above that of the second. The
// first quarter is the warm-up.
type flat struct {
	Name   string  `json:"name"`
	Second int64   `json:"second_quarter"`
	Last   int64   `json:"last_quarter"`
	Most   int64   `json:"most_allowed"`
	Slope  float64 `json:"slope_per_hour"` // of a line through all behind the warm-up
	OK     bool    `json:"ok"`
}

func flatness(name string, samples []sample, slack int64, of func(*sample) int64) flat {
	quarter := func(i int) []sample { return samples[i*len(samples)/4 : (i+1)*len(samples)/4] }
	median := func(part []sample) int64 {
		var v []int64
		for i := range part {
			v = append(v, of(&part[i]))
		}
		slices.Sort(v)
		return v[len(v)/2]
	}
	f := flat{Name: name, Second: median(quarter(1)), Last: median(quarter(3))}
	f.Most = f.Second + f.Second/10 + slack
	f.OK = f.Last <= f.Most
	var n, x, y, xx, xy float64
	for _, s := range samples[len(samples)/4:] {
		v := float64(of(&s))
		n, x, y, xx, xy = n+1, x+s.At, y+v, xx+s.At*s.At, xy+s.At*v
	}
	if d := n*xx - x*x; d > 0 {
		f.Slope = (n*xy - x*y) / d * 3600
	}
	return f
}

// TestFlatness: the measure of the soak tells growth from noise.
func TestFlatness(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for name, x := range map[string]struct {
		value func(i int) int64
		ok    bool
	}{
		"steady":          {func(int) int64 { return 20 << 20 }, true},
		"noise":           {func(int) int64 { return 20<<20 + rng.Int64N(8<<20) }, true},
		"a warm-up":       {func(i int) int64 { return int64(min(i, 40)) << 20 }, true},
		"a leak":          {func(i int) int64 { return 20<<20 + int64(i)<<17 }, false},
		"a leak in noise": {func(i int) int64 { return 20<<20 + int64(i)<<17 + rng.Int64N(8<<20) }, false},
		"less and less":   {func(i int) int64 { return int64(400-i) << 20 }, true},
	} {
		var samples []sample
		for i := range 200 {
			samples = append(samples, sample{At: float64(i), Heap: x.value(i)})
		}
		if f := flatness("heap", samples, 4<<20, func(s *sample) int64 { return s.Heap }); f.OK != x.ok {
			t.Errorf("%s: %+v", name, f)
		}
	}
}

// temporaryMax is how many files a run may leave that a failing call kept it
// from removing: there are some that no write has come to yet, and no more of
// them with time.
const temporaryMax = 64

// phantomMax is how many bytes may be counted that are not there: where two
// calls in a row fail to tell whether a file is, it is taken to be.
const phantomMax = 4 * (blockBytes + 4096)

// samplesMin is how many samples tell anything.
const samplesMin = 8

// soakResult is the line of JSON that a soak prints.
type soakResult struct {
	Seconds    float64 `json:"seconds"`
	Rules      string  `json:"rules"`
	Injected   int64   `json:"injected"`
	Lives      int     `json:"engines"`
	Kills      int     `json:"killed"`
	Requests   int     `json:"requests"`
	Hits       int     `json:"hit_blocks"`
	Stored     int     `json:"stored_blocks"`
	Refused    int     `json:"refused"`
	Corrupt    int     `json:"corrupt"`
	Samples    int     `json:"samples"`
	Flat       []flat  `json:"flat"`
	Idle       float64 `json:"idle_after_seconds"` // pins, quarantine and tables empty, and the primary adds up
	IdleHeap   int64   `json:"idle_heap_bytes"`
	IdleFDs    int64   `json:"idle_descriptors"`
	IdleGo     int64   `json:"idle_goroutines"`
	UsedBytes  int64   `json:"used_bytes"`
	FileBytes  int64   `json:"file_bytes"`
	GoodBlocks int64   `json:"verified_blocks"`
	Temporary  int64   `json:"temporary_files"` // which a failing removal has left
}

// soakShape is what differs between a soak and the few seconds of CI.
type soakShape struct {
	primary, capacity int64
	conversations     int
	length, every     time.Duration // of the run, of sampling
	life, lifeMore    time.Duration // an engine's life: so long, and up to so much more
	heap, rss, counts int64         // slack of flat
}

// TestSoak: a node at full speed, one file call in a hundred of which fails and
// one in ten of whose engines is killed, takes no more memory, goroutines and
// descriptors with time, serves no wrong byte, and is at rest within a minute of its
// engines' end.
func TestSoak(t *testing.T) {
	x := soakShape{primary: 16 << 20, capacity: 48 << 20, conversations: 50, length: 5 * time.Second, every: 200 * time.Millisecond, life: 500 * time.Millisecond, lifeMore: time.Second, heap: 16 << 20, rss: 128 << 20, counts: 40}
	if soak {
		x = soakShape{primary: 64 << 20, capacity: 160 << 20, conversations: 150, length: *soakFor, every: 5 * time.Second, life: time.Second, lifeMore: 5 * time.Second, heap: 4 << 20, rss: 24 << 20, counts: 16}
	} else {
		t.Parallel()
	}
	rng := random(t)
	at := place(t)
	const engines = 3
	a := faultyArgs{Primary: x.primary, Capacity: x.capacity, Rules: *soakRules}
	if a.Rules == "" {
		a.Rules = fmt.Sprintf("error(EIO) when randomly(0.01, %d)", rng.Uint32())
	}
	n := serveFaulty(t, at, a)
	// What is made once is made before anything fails. And a breaker that has
	// seen few calls opens at the first that fail, which would be the soak of a
	// closed door.
	first := n.engine("first")
	first.store("first", own("first", 100))
	first.goodbye()
	n.idle()
	idle := n.sample(time.Now())
	n.signal(syscall.SIGUSR2)
	r := soakResult{Rules: a.Rules}

	// More blocks than the tier has room for, which has more than the primary:
	// all of it evicts all the time.
	load := Load{Prefix: "soak", Conversations: x.conversations, Turn: 24, Parallel: 3, Reconnect: true}
	type life struct {
		*engine
		until  time.Time
		killed bool
	}
	start := func() *life {
		l := &life{engine: n.engine(fmt.Sprint("engine ", r.Lives)), killed: r.Lives%10 == 4}
		r.Lives++
		mine := load
		mine.Seed = rng.Uint64()
		l.start(mine)
		l.until = time.Now().Add(x.life + time.Duration(rng.Int64N(int64(x.lifeMore))))
		return l
	}
	end := func(l *life) {
		if l.killed {
			// It leaves a reservation, half written, beside what its load has.
			var granted int
			if err := l.call("Half", Ask{ID: "half", Prompt: own(fmt.Sprint("half ", r.Lives), 3)}, &granted); err != nil && !failedWith(err, "no_room") {
				t.Errorf("reserve: %v", err)
			}
		}
		rep := l.progress()
		if l.killed {
			r.Kills++
			l.kill()
		} else {
			l.after(1) // so that it has begun, or there is nothing yet to stop
			l.must("Stop", None{}, &None{})
			if err := l.wait(l.load, time.Minute); err != nil {
				t.Errorf("%s: %v", l.args.Name, err)
			} else {
				rep = *l.load.Reply.(*Report)
			}
			l.must("Close", None{}, &None{})
		}
		l.release()
		r.Requests += rep.Ops
		r.Hits += rep.Hits
		r.Stored += rep.Stored
		r.Refused += rep.Refused
		r.Corrupt += rep.Corrupt
		if rep.Corrupt > 0 || len(rep.Errors) > 0 || rep.Lost > 0 {
			t.Errorf("%s: %d corrupt blocks %v, %d sessions lost, errors %v", l.args.Name, rep.Corrupt, rep.Broken, rep.Lost, rep.Errors)
		}
	}
	t.Log("seconds  heap MiB   RSS MiB  goroutines  descriptors    lookups   written  promoted    failed  used MiB")
	var lives []*life
	for range engines {
		lives = append(lives, start())
	}
	began := time.Now()
	var samples []sample
	tick := time.NewTicker(min(x.every, 100*time.Millisecond))
	defer tick.Stop()
	over := func() bool { // on a busy machine a short run may need longer
		took := time.Since(began)
		return t.Failed() || took > x.length && (len(samples) >= samplesMin && r.Kills > 0 || took > x.length+2*bound())
	}
	for next, shown := began.Add(x.every), -1; !over(); <-tick.C {
		for i, l := range lives {
			if time.Now().After(l.until) {
				end(l)
				lives[i] = start()
			}
		}
		if time.Now().After(next) {
			next = time.Now().Add(x.every)
			s := n.sample(began)
			samples = append(samples, s)
			if part := int(20 * s.At / x.length.Seconds()); part != shown {
				shown = part
				t.Log(s.line)
			}
		}
	}
	for _, l := range lives {
		end(l)
	}
	ended := time.Now()
	r.Seconds = ended.Sub(began).Seconds()

	// At rest, with the faults still there.
	eventually(t, time.Minute, "rest", func() error { return notIdle(n.status()) })
	r.Idle = time.Since(ended).Seconds()
	if pins := n.pins(); len(pins) > 0 {
		t.Errorf("at rest, with pins: %v", pins)
	}
	n.signal(syscall.SIGUSR1)
	eventually(t, bound(), "end of faults", func() error {
		_, text, found := strings.Cut(n.stderr.String(), "injected=")
		if !found {
			return fmt.Errorf("the log does not say so")
		}
		_, err := fmt.Sscan(text, &r.Injected)
		return err
	})
	n.verify()
	last := n.sample(began)
	r.IdleHeap, r.IdleFDs, r.IdleGo = last.Heap, last.FDs, last.Goroutines
	if last.FDs > idle.FDs+2 || last.Goroutines > idle.Goroutines+4 {
		t.Errorf("at rest there are %d descriptors and %d goroutines, before the load %d and %d", last.FDs, last.Goroutines, idle.FDs, idle.Goroutines)
	}
	f := fsOf(n.status())
	r.UsedBytes, r.FileBytes = f.UsedBytes, du(t, n.root)
	if f.Corrupt > 0 || f.SetAside > 0 || f.UsedBytes > a.Capacity || f.UsedBytes < r.FileBytes {
		t.Errorf("%d corrupt, %d set aside; %d bytes are used of %d, the files have %d", f.Corrupt, f.SetAside, f.UsedBytes, a.Capacity, r.FileBytes)
	}
	n.stops(0)
	v := verifyRoot(t, at)
	r.GoodBlocks, r.Temporary = v.Good, v.Temporary
	if over := f.UsedBytes - r.FileBytes; over > phantomMax {
		t.Errorf("%d bytes are counted as used and are not there", over)
	}
	if v.Good != f.Blocks {
		t.Errorf("the tier's index has %d blocks, its root %d", f.Blocks, v.Good)
	}
	if r.Temporary > temporaryMax {
		t.Errorf("%d temporary files are left: what failed writes could not remove was not removed later", r.Temporary)
	}

	r.Samples = len(samples)
	if len(samples) < samplesMin {
		t.Fatalf("%d samples are too few", len(samples))
	}
	r.Flat = []flat{
		flatness("heap_bytes", samples, x.heap, func(s *sample) int64 { return s.Heap }),
		flatness("rss_bytes", samples, x.rss, func(s *sample) int64 { return s.RSS }),
		flatness("goroutines", samples, x.counts, func(s *sample) int64 { return s.Goroutines }),
		flatness("descriptors", samples, x.counts, func(s *sample) int64 { return s.FDs }),
	}
	for _, f := range r.Flat {
		t.Logf("%-12s second quarter %d, last quarter %d, at most %d; %+.0f an hour", f.Name, f.Second, f.Last, f.Most, f.Slope)
		if !f.OK {
			t.Errorf("%s grow: from %d in the second quarter to %d in the last, at most %d are allowed", f.Name, f.Second, f.Last, f.Most)
		}
	}
	if r.Kills == 0 || r.Injected == 0 || r.Hits == 0 || r.Stored == 0 || soak && (last.promoted == 0 || f.Evicted == 0) {
		t.Errorf("not much of a soak: %+v, %d promoted, %d evicted", r, last.promoted, f.Evicted)
	}
	line, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Printf("SOAK %s\n", line)
}
