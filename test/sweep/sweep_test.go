package sweep

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/internal/fault"
	"github.com/terrace-kv/terrace/internal/node"
	"github.com/terrace-kv/terrace/internal/transfer"
	"github.com/terrace-kv/terrace/internal/vfs"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/fstier"
)

var (
	sweepRules  = flag.String("rules", "", "faults of the one run to replay; none runs the sweep")
	sweepConfig = flag.String("config", "plain", "of the run to replay: plain, or synced")
)

const (
	sweepBytes = 6000 // of a block: 8 KiB in the primary, 12 KiB in the tier
	secondary  = 20   // blocks that fit into the tier
)

func sweepKeys(lo, hi int) (keys []block.Key) {
	for i := lo; i < hi; i++ {
		var h [block.HashSize]byte
		binary.BigEndian.PutUint64(h[:], uint64(i)*0x9e3779b97f4a7c15)
		k, err := block.NewKey(h[:], 0)
		if err != nil {
			panic(err)
		}
		keys = append(keys, k)
	}
	return keys
}

// actions are what goes wrong, and with which calls it can.
var actions = []struct{ do, on string }{
	{"error(EIO)", "always"},
	{"late(EIO)", "always"},
	{"error(ENOSPC)", "always"},
	{"error(EMFILE)", "always"},
	{"error(EACCES)", "always"},
	{"short(512)", "op(read)"},
	{"short(4096)", "op(write)"},
	{"torn(4096)", "op(write)"},
	{"torn(4096) error(EIO)", "op(write)"},
	// A namespace's description with a wrong bit keeps the namespace from use
	// until somebody moves it away: docs/storage-format.md says so.
	{"flip", `and(op(read), not(key("*/namespace.json")))`},
	{"flip", `and(op(write), not(key("tmp/1")))`},
	{"delay(90s)", "always"}, // longer than any deadline
}

// quiet lists errors that need not come up anywhere, by action, op and path
// with its hex digits as N.
var quiet = []struct{ match, why string }{
	{`^\S+ (write|sync) LOCK$`, "who has the root is told to people only"},
	{`^\S+ \w+ tmp/probe$|^\S+ (open|close) tmp$`, "what a probe finds not to work is not used"},
	{`^\S+ close (N/N/N|N/namespace.json|usage|N|N/N|tmp)$`, "of a file that was only read, or has been synced"},
	{`^\S+ (rename|lstat|open|stat) tmp/(\d+|N)$`, "an evicted block's file cannot be taken over, so it is removed"},
	{`^late\(EIO\) rename (N/N/N|N/namespace.json|N/name)$`, "it is seen to be done"},
	{`^error\(ENOSPC\) \w+ (N/N|N/N/N|tmp/(\d+|N))$`, "the oldest block is evicted, and the write is tried once more"},
	{`^\S+ space \.$`, "Open asks only to warn of a floor that is too high"},
}

// TestSweep runs one scenario over and over: store, cascade, restart, evict,
// promote, load. In the n-th run the n-th call of the file system goes wrong,
// until a run has fewer calls than that. After each:
//
//   - every block that was loaded had the right bytes; the others were Misses;
//   - the node's tables are empty, and its invariants hold;
//   - it stores and loads on as if nothing had been, through the tier;
//   - no file is open, no temporary one left, and used bytes are what the
//     files are charged: at once, and after a restart;
//   - the error came up where somebody sees it, but for those that quiet lists.
//
// Every call is failed with EIO; with the others, and under the race detector,
// some are left out, unless TERRACE_SOAK is set.
func TestSweep(t *testing.T) {
	if *sweepRules != "" {
		synctest.Test(t, func(t *testing.T) { sweepOnce(t, *sweepConfig, *sweepRules) })
		return
	}
	for _, config := range []string{"plain", "synced"} {
		for i, a := range actions {
			if config == "synced" && i > 1 {
				continue
			}
			t.Run(config+"/"+a.do+" "+a.on, func(t *testing.T) {
				t.Parallel()
				n, step := 0, 1
				switch {
				case os.Getenv("TERRACE_SOAK") != "":
				case raceEnabled:
					step = 11
				case i > 1 || config != "plain":
					step = 3
				}
				for injected := int64(1); injected > 0 && !t.Failed(); n += step {
					rules := fmt.Sprintf("%s when and(%s, index(%d))", a.do, a.on, n)
					synctest.Test(t, func(t *testing.T) { injected = sweepOnce(t, config, rules) })
				}
				t.Logf("calls 0 to %d, every %d.", n, step)
			})
		}
	}
}

// sweepOnce runs the scenario under rules and says how often they did
// something.
func sweepOnce(t *testing.T, config, rules string) int64 {
	set := fault.MustParse(rules)
	s := &scenario{t: t, config: config, set: set, mem: vfs.NewMem(0), ns: namespace(t, sweepBytes), blocks: 16}
	err := s.run()
	for _, h := range set.Unsurfaced() {
		what := fmt.Sprintf("%s %s %s", strings.Fields(rules)[0], h.Op.Kind, hexes.ReplaceAllString(h.Op.Key, "N"))
		if !slices.ContainsFunc(quiet, func(q struct{ match, why string }) bool { return regexp.MustCompile(q.match).MatchString(what) }) {
			err = errors.Join(err, fmt.Errorf("nobody heard of an error: %s", what))
		}
	}
	if err != nil {
		t.Errorf("%v\nhits: %v\nreplay with: go test ./test/sweep -run TestSweep -config %s -rules '%s'", err, set.Hits(), config, rules)
	}
	return set.Injected()
}

var hexes = regexp.MustCompile(`\b([0-9a-f]{2}|[0-9a-f]{64,})\b`)

// temporaryName makes the names of temporary files the same in every run.
var temporaryName = regexp.MustCompile(`^tmp/[0-9a-f]{32}-`)

// scenario is one run.
type scenario struct {
	t      *testing.T
	config string
	set    *fault.Set
	mem    *vfs.Mem
	ns     *block.Namespace
	blocks int64 // that fit into the primary
	loose  bool  // what cannot be removed may be left and be overestimated, until a restart
}

// open opens the tier, under the rules, and waits for its scan.
func (s *scenario) open() (*fstier.Tier, error) {
	o := fstier.Options{Root: "/mem", MinFree: -1, Logger: slog.New(surface{s}), Capacity: 3*4096 + secondary*3*4096}
	o.FS = s.mem
	if s.config == "synced" {
		o.Sync = fstier.SyncData
		o.FS = &vfs.Faulty{FS: s.mem, Hook: func(c vfs.Call) vfs.Fault {
			if c.Op == vfs.OpOpen && c.Flags&unix.O_TMPFILE == unix.O_TMPFILE {
				return vfs.Fault{Err: unix.EOPNOTSUPP}
			}
			return vfs.Fault{}
		}}
	}
	o.FS = fault.FS(o.FS, s.set, func(path string) string { return temporaryName.ReplaceAllString(path, "tmp/") })
	tr, err := fstier.Open(context.Background(), o)
	if err == nil {
		<-tr.ScanDone()
	}
	return tr, err
}

// life runs f with a node from its start to its end.
func (s *scenario) life(f func(e *engine) error) error {
	tr, err := s.open()
	if err != nil {
		s.set.Surfaced(err)
		if n := s.mem.OpenFiles(); n != 0 {
			return fmt.Errorf("%d files are open after a failed Open", n)
		}
		s.set.Toggle(false)
		if tr, err = s.open(); err != nil {
			return fmt.Errorf("open after the fault: %w", err)
		}
	}
	// One call at a time, so that the n-th call is the same in each run.
	n, err := node.Open(context.Background(), node.Options{Logger: slog.New(surface{s}),
		Core:  core.Options{Size: s.blocks * 8192, ExtentBytes: 1 << 20},
		Tiers: []node.TierSpec{{Tier: tr, Lane: transfer.Options{ReadParallel: 1, WriteParallel: 1, LogEvery: time.Nanosecond}}}})
	if err != nil {
		return errors.Join(err, tr.Close(context.Background()))
	}
	e, err := greet(context.Background(), n, s.ns)
	if err == nil {
		err = errors.Join(f(e), e.close())
	}
	if err == nil {
		err = s.exact(tr.Stats())
	}
	// It may say what went wrong, but everything is given back.
	if cerr := n.Close(context.Background()); cerr != nil && !s.set.Surfaced(cerr) && err == nil {
		err = fmt.Errorf("close: %w", cerr)
	}
	if n := s.mem.OpenFiles(); n != 0 && err == nil {
		err = fmt.Errorf("%d files are open after Close", n)
	}
	return err
}

// run is two lives of a node, with the fault and then without, and what is
// left then.
func (s *scenario) run() error {
	if err := s.life(s.first); err != nil {
		return fmt.Errorf("in the first life: %w", err)
	}
	if err := s.life(s.second); err != nil {
		return fmt.Errorf("in the second life: %w", err)
	}
	tr, err := s.open()
	if err != nil {
		return fmt.Errorf("last open: %w", err)
	}
	return errors.Join(s.exact(tr.Stats()), tr.Close(context.Background()))
}

func (s *scenario) first(e *engine) error {
	for i := range 2 {
		if _, err := e.store(sweepKeys(8*i, 8*i+8), i%2 == 0); err != nil {
			return fmt.Errorf("store: %w", err)
		}
	}
	return s.settle(e)
}

func (s *scenario) second(e *engine) error {
	for _, lo := range []int{16, 24} {
		if _, err := e.store(sweepKeys(lo, lo+8), true); err != nil {
			return fmt.Errorf("store: %w", err)
		}
	}
	// The tier has evicted all up to 12, the primary all up to 16.
	for _, lo := range []int{12, 0, 16, 24} {
		if _, err := e.load(sweepKeys(lo, lo+8)); err != nil {
			return fmt.Errorf("load: %w", err)
		}
	}
	if err := s.settle(e); err != nil {
		return err
	}
	s.set.Toggle(false)
	return s.fresh(e)
}

// settle lets what is late end and what is distrusted be trusted again.
func (s *scenario) settle(e *engine) error {
	time.Sleep(5 * time.Minute)
	return e.idle()
}

// fresh wants that a healthy node stores and loads through its tier.
func (s *scenario) fresh(e *engine) error {
	keys := sweepKeys(100, 104)
	if c, err := e.store(keys, true); err != nil || c != len(keys) {
		return fmt.Errorf("a fresh store after the fault: %d of %d cascaded, %v; the tier says %q", c, len(keys), err, e.n.Status().Tiers[0].LastError)
	}
	if err := e.reset(); err != nil {
		return fmt.Errorf("reset after the fault: %w", err)
	}
	if got, err := e.load(keys); err != nil || got != len(keys) {
		return fmt.Errorf("load of what was stored after the fault: %d of %d, %v", got, len(keys), err)
	}
	return e.idle()
}

// exact wants that the tier's count is what its files are charged, within its
// capacity, and that nothing temporary or nameless is left.
func (s *scenario) exact(st tier.Stats) error {
	used, err := usedBytes(s.mem)
	wrong := st.UsedBytes != used
	if s.loose {
		wrong = st.UsedBytes < used
	}
	if err != nil || wrong || used > st.CapacityBytes || used != s.mem.UsedBytes() {
		return fmt.Errorf("used bytes are %d, files have %d of %d, nameless ones included %d (%v)", st.UsedBytes, used, st.CapacityBytes, s.mem.UsedBytes(), err)
	}
	if names, err := temporary(s.mem); err != nil || len(names) > 0 && !s.loose {
		return fmt.Errorf("temporary files are left: %v, %v", names, err)
	}
	return nil
}

// surface is a log that notes the errors in it.
type surface struct{ s *scenario }

func (h surface) Enabled(context.Context, slog.Level) bool { return true }
func (h surface) WithAttrs([]slog.Attr) slog.Handler       { return h }
func (h surface) WithGroup(string) slog.Handler            { return h }

func (h surface) Handle(_ context.Context, r slog.Record) error {
	line := r.Level.String() + " " + r.Message
	r.Attrs(func(a slog.Attr) bool {
		if err, ok := a.Value.Any().(error); ok {
			h.s.set.Surfaced(err)
		}
		line += fmt.Sprintf(" %s=%v", a.Key, a.Value)
		return true
	})
	if *sweepRules != "" {
		h.s.t.Log(line)
	}
	return nil
}
