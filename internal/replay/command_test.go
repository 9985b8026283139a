package replay

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/node"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// harness runs the command against a fake node.
type harness struct {
	deps    Deps
	node    *fakeNode // the one that is used
	started []NodeOptions
	stopped int
}

// newHarness has a running node of so many bytes, or with 0 none, so that the
// command starts one.
func newHarness(t *testing.T, running int64, blockBytes int) *harness {
	h := &harness{}
	if running > 0 {
		h.node = newFakeNode(running, blockBytes)
	}
	h.deps = Deps{
		DefaultSocket: func() (string, error) { return "default.sock", nil },
		StartNode: func(_ context.Context, o NodeOptions) (string, func(context.Context) error, error) {
			h.started = append(h.started, o)
			if st, err := os.Stat(o.Dir); err != nil || !st.IsDir() {
				t.Errorf("directory of the node: %v", err)
			}
			h.node = newFakeNode(o.PrimaryBytes, blockBytes)
			return filepath.Join(o.Dir, "engine.sock"), func(context.Context) error { h.stopped++; return nil }, nil
		},
		dial: func(ctx context.Context, socket string, ns *block.Namespace, name string) (engine, error) {
			if h.node == nil {
				return nil, &fs.PathError{Op: "connect", Path: socket, Err: syscall.ECONNREFUSED}
			}
			return h.node.dial(ctx, socket, ns, name)
		},
	}
	return h
}

func (h *harness) run(ctx context.Context, args ...string) (stdout, stderr string, err error) {
	var out, errs bytes.Buffer
	cmd := Command(h.deps)
	cmd.SetArgs(args)
	cmd.SetOut(&out)
	cmd.SetErr(&errs)
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	err = cmd.ExecuteContext(ctx)
	return out.String(), errs.String(), err
}

func (h *harness) json(t *testing.T, args ...string) (*Result, string, error) {
	t.Helper()
	out, stderr, err := h.run(t.Context(), append(args, "--json")...)
	var r Result
	d := json.NewDecoder(strings.NewReader(out))
	if derr := d.Decode(&r); derr != nil {
		t.Fatalf("standard output %q: %v (command: %v)", out, derr, err)
	}
	if _, derr := d.Token(); derr != io.EOF {
		t.Fatalf("more than one value on standard output: %q", out)
	}
	return &r, stderr, err
}

// idle fails when the node still holds anything for the engines.
func (h *harness) idle(t *testing.T) {
	t.Helper()
	s := h.node.core.Stats()
	if s.Requests+s.Pins+s.Reservations+s.Jobs+s.Waits+s.Sessions != 0 || h.node.engines != 0 {
		t.Errorf("the node is not idle: %+v, %d engines", s, h.node.engines)
	}
}

func TestSyntheticOnOwnNode(t *testing.T) {
	for _, engines := range []int{1, 4} {
		h := newHarness(t, 0, 4096)
		r, stderr, err := h.json(t, "--synthetic", "--block-bytes", "4KiB", "--primary", "3MiB", "--engines", fmt.Sprint(engines))
		if err != nil {
			t.Fatal(err)
		}
		if r.Corrupt != 0 || r.Refusals != 0 || r.Dropped != 0 || len(r.Tiers) != 2 || r.Tiers[0].Name != "primary" || r.Tiers[0].Hits == 0 || r.Tiers[1].Hits == 0 || r.Evictions == 0 {
			t.Errorf("%d engines: %+v", engines, r)
		}
		if r.Seed == nil || *r.Seed != 1 || !r.OwnNode || r.Interrupted || !strings.Contains(stderr, "seed 1") || !strings.Contains(stderr, "starting a node") {
			t.Errorf("%+v, %s", r, stderr)
		}
		size, _ := Measure(Synthetic(1, r.Conversations))
		if r.Requests != int64(size.Requests) || r.References != size.References {
			t.Errorf("%d requests, %d references, want %+v", r.Requests, r.References, size)
		}
		if sum := r.Tiers[0].Hits + r.Tiers[1].Hits; sum < r.PrefixHits || engines == 1 && sum != r.PrefixHits {
			t.Errorf("hits by tier add up to %d, %d prefix hits", sum, r.PrefixHits)
		}
		// With an unbounded tier below, one engine finds all that was ever stored.
		if tr := loadSynthetic(t, 1, r.Conversations); engines == 1 && r.PrefixHits != r.References-int64(len(tr.keys)) {
			t.Errorf("%d prefix hits, an unbounded cache has %d", r.PrefixHits, r.References-int64(len(tr.keys)))
		}
		// Two engines may store a block each, when it was evicted between.
		if below := int64(len(h.node.below)); below > r.StoredBlocks || engines == 1 && below != r.StoredBlocks ||
			below != int64(len(loadSynthetic(t, 1, r.Conversations).keys)) {
			t.Errorf("%d blocks below, %d stored", below, r.StoredBlocks)
		}
		if r.Shared || r.Tiers[0].ReadBytes != r.Tiers[0].Hits*4096 {
			t.Errorf("hits and bytes of the primary are not about the same: %+v", r)
		}
		if r.PrefixHits != r.LoadedBlocks || r.Latency.LookupP50us <= 0 || r.Latency.ReadyP99us < r.Latency.ReadyP50us {
			t.Errorf("%+v, %d blocks below", r, len(h.node.below))
		}
		h.idle(t)
		if h.stopped != 1 || h.started[0].FSBytes != defaultFS || !strings.HasPrefix(h.started[0].FSRoot, h.started[0].Dir) {
			t.Errorf("started %+v, stopped %d times", h.started, h.stopped)
		}
		if _, err := os.Stat(h.started[0].Dir); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("directory of the node is left behind: %v", err)
		}
	}
}

func TestRunningNode(t *testing.T) {
	h := newHarness(t, 3<<20, 4096)
	r, stderr, err := h.json(t, "--synthetic", "--block-bytes", "4KiB", "--requests", "100")
	if err != nil {
		t.Fatal(err)
	}
	if r.OwnNode || r.Requests != 100 || r.Node != "default.sock" || !strings.Contains(stderr, "using the node") {
		t.Errorf("%+v, %s", r, stderr)
	}
	// A second run finds what the first one stored.
	again, _, err := h.json(t, "--synthetic", "--block-bytes", "4KiB", "--requests", "100")
	if err != nil || again.PrefixHits != again.References || again.StoredBlocks != 0 {
		t.Errorf("second run: %+v, %v", again, err)
	}
	// What the flags ask for wins over a node that runs.
	if r, _, err = h.json(t, "--synthetic", "--block-bytes", "4KiB", "--requests", "3", "--primary", "8MiB", "--fs", "none"); err != nil || !r.OwnNode || len(h.started) != 1 || h.started[0].FSRoot != "" {
		t.Errorf("%+v, %v, %+v", r, err, h.started)
	}
	// A node that answers but refuses is not replaced.
	h.node.fail = errors.New("namespace mismatch")
	if _, _, err = h.run(t.Context(), "--synthetic"); err == nil || !strings.Contains(err.Error(), "namespace mismatch") || len(h.started) != 1 {
		t.Errorf("error %v, %d started", err, len(h.started))
	}
	h = newHarness(t, 0, 4096)
	if _, _, err = h.run(t.Context(), "--synthetic", "--socket", "x.sock"); !errors.Is(err, syscall.ECONNREFUSED) || len(h.started) != 0 {
		t.Errorf("--socket without a node: error %v, %d started", err, len(h.started))
	}
}

// TestCorrupt: one wrong bit in one block must be found, named and make the
// command fail.
func TestCorrupt(t *testing.T) {
	h := newHarness(t, 3<<20, 4096)
	var bad block.Key
	h.node.damage = func(k block.Key, b []byte) {
		if bad == (block.Key{}) {
			bad = k
			b[4095] ^= 0x80
		}
	}
	r, stderr, err := h.json(t, "--synthetic", "--block-bytes", "4KiB")
	if !errors.Is(err, ErrCorrupt) || r.Corrupt == 0 {
		t.Errorf("error %v, %d corrupt", err, r.Corrupt)
	}
	if !strings.Contains(stderr, bad.String()) || !strings.Contains(stderr, "first wrong byte at 4095") {
		t.Errorf("standard error does not name block and byte:\n%s", stderr)
	}
}

// TestInterrupt: the table of what was done, and nothing left at the node.
func TestInterrupt(t *testing.T) {
	h := newHarness(t, 3<<20, 4096)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var once sync.Once
	h.node.damage = func(block.Key, []byte) { once.Do(cancel) } // at the first promotion
	out, _, err := h.run(ctx, "--synthetic", "--block-bytes", "4KiB", "--engines", "2")
	if !errors.Is(err, ErrInterrupted) || !strings.Contains(out, "interrupted") || !strings.Contains(out, "corrupt blocks") {
		t.Errorf("error %v:\n%s", err, out)
	}
	h.idle(t)
	if h.node.calls["new"] != h.node.calls["finish"] {
		t.Errorf("%d requests begun, %d finished", h.node.calls["new"], h.node.calls["finish"])
	}
}

// TestNodeDies: the table still comes, and the error says what happened.
func TestNodeDies(t *testing.T) {
	h := newHarness(t, 3<<20, 4096)
	h.node.damage = func(block.Key, []byte) { h.node.fail = io.ErrUnexpectedEOF }
	r, _, err := h.json(t, "--synthetic", "--block-bytes", "4KiB", "--engines", "3")
	if !errors.Is(err, io.ErrUnexpectedEOF) || r.Requests == 0 {
		t.Errorf("error %v, %+v", err, r)
	}
	if r.TiersKnown || len(r.Tiers) != 0 || r.Evictions != 0 || r.Error != err.Error() || r.Interrupted {
		t.Errorf("what only the node knows is told all the same, or the error is not: %+v", r)
	}
	h = newHarness(t, 3<<20, 4096)
	h.node.damage = func(block.Key, []byte) { h.node.fail = io.ErrUnexpectedEOF }
	out, _, _ := h.run(t.Context(), "--synthetic", "--block-bytes", "4KiB")
	if !strings.Contains(out, "(failed: this is") || !strings.Contains(out, "tiers and evictions: not known, because the node went away") || strings.Contains(out, "bytes now") || strings.Contains(out, "promoted") {
		t.Errorf("the table is\n%s", out)
	}
}

// TestNodeStartedAnew: its counters begin anew, so differences mean nothing.
func TestNodeStartedAnew(t *testing.T) {
	h := newHarness(t, 3<<20, 4096)
	h.node.damage = func(block.Key, []byte) { h.node.status.BootID = "another" }
	r, _, err := h.json(t, "--synthetic", "--block-bytes", "4KiB")
	if err == nil || r.TiersKnown || len(r.Tiers) != 0 || !strings.Contains(r.Error, "started anew") {
		t.Errorf("error %v, %+v", err, r)
	}
}

// TestSharedNode: the work of other engines is in the node's counters, and that
// is told; without others it is not.
func TestSharedNode(t *testing.T) {
	for name, other := range map[string]func(*node.Status){
		"nobody": nil, "lookups": func(s *node.Status) { s.Lookups.Calls += 5000 }, "stores": func(s *node.Status) { s.Stores.Committed += 50000 },
	} {
		h := newHarness(t, 3<<20, 4096)
		var once sync.Once
		h.node.damage = func(block.Key, []byte) {
			if other != nil {
				once.Do(func() { other(&h.node.others) })
			}
		}
		out, _, err := h.run(t.Context(), "--synthetic", "--block-bytes", "4KiB")
		if told := strings.Contains(out, "Other engines used the node meanwhile"); err != nil || told != (other != nil) {
			t.Errorf("%s: error %v, in the table %v", name, err, told)
		}
		once = sync.Once{}
		h.node = newFakeNode(3<<20, 4096)
		h.node.damage = func(block.Key, []byte) {
			if other != nil {
				once.Do(func() { other(&h.node.others) })
			}
		}
		if r, _, err := h.json(t, "--synthetic", "--block-bytes", "4KiB"); err != nil || r.Shared != (other != nil) || !r.TiersKnown || r.Error != "" {
			t.Errorf("%s: error %v, shared %v", name, err, r.Shared)
		}
	}
}

type closedPipe struct{}

func (closedPipe) Write([]byte) (int, error) { return 0, syscall.EPIPE }

// TestReaderGone: a table that nobody reads is an error, but what was started
// is stopped and removed all the same.
func TestReaderGone(t *testing.T) {
	h := newHarness(t, 0, 4096)
	cmd := Command(h.deps)
	cmd.SetArgs([]string{"--synthetic", "--block-bytes", "4KiB", "--requests", "3", "--quiet"})
	cmd.SetOut(closedPipe{})
	cmd.SilenceErrors = true
	err := cmd.ExecuteContext(t.Context())
	if !errors.Is(err, syscall.EPIPE) || h.stopped != 1 {
		t.Errorf("error %v, node stopped %d times", err, h.stopped)
	}
	if _, err := os.Stat(h.started[0].Dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("directory of the node is left behind: %v", err)
	}
}

// TestRefusals: a primary that is too small for a prompt costs hits, not the run.
func TestRefusals(t *testing.T) {
	h := newHarness(t, 40*4096, 4096)
	r, _, err := h.json(t, "--synthetic", "--block-bytes", "4KiB", "--conversations", "24")
	if err != nil || r.Refusals == 0 || r.Corrupt != 0 {
		t.Errorf("error %v, %+v", err, r)
	}
	h.idle(t)
}

// TestSpeed: arrival times are kept, and nothing waits for cascades.
func TestSpeed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.jsonl")
	trace := ""
	for i := range 5 {
		trace += fmt.Sprintf(`{"timestamp":%d,"input_length":512,"output_length":1,"hash_ids":[%d]}`+"\n", 5000+i*1000, i)
	}
	if err := os.WriteFile(path, []byte(trace), 0o600); err != nil {
		t.Fatal(err)
	}
	h := newHarness(t, 1<<20, 4096)
	r, _, err := h.json(t, path, "--block-bytes", "4KiB", "--speed", "40", "--engines", "2")
	if err != nil || r.DurationSeconds < 0.1 || r.DurationSeconds > 2 || r.Requests != 5 || h.node.calls["flush"] != 0 {
		t.Errorf("error %v, %d flushes, %+v", err, h.node.calls["flush"], r)
	}
}

func TestPipe(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Skipf("no named pipes here: %v", err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			t.Error(err)
			return
		}
		defer f.Close()
		z := gzip.NewWriter(f)
		io.WriteString(z, `{"t":0,"in":128,"b":[[1,2]]}`+"\n"+`{"t":0,"in":256,"b":[[1,4]]}`+"\n")
		z.Close()
	})
	h := newHarness(t, 1<<20, 4096)
	r, _, err := h.json(t, path, "--block-bytes", "4KiB")
	wg.Wait()
	if err != nil || r.Requests != 2 || r.PrefixHits != 2 || r.StoredBlocks != 4 || r.Format != "kvt1" {
		t.Errorf("error %v, %+v", err, r)
	}
}

func TestDryCommand(t *testing.T) {
	h := newHarness(t, 0, 4096)
	r, _, err := h.json(t, "--synthetic", "--dry", "--primary", "64MiB")
	if err != nil || r.Mode != ModeDry || len(r.Curves) != 1 || r.Curves[0].CapacityBlocks != 1024 || r.PrefixHits == 0 || len(r.Tiers) != 1 {
		t.Errorf("error %v, %+v", err, r)
	}
	if tr := loadSynthetic(t, 1, r.Conversations); r.PrefixHits != tr.model(1024).hits {
		t.Errorf("%d prefix hits, model %d", r.PrefixHits, tr.model(1024).hits)
	}
	r, _, err = h.json(t, "--synthetic", "--dry", "--primary", "64MiB", "--fs", "unbounded")
	if err != nil || len(r.Tiers) != 2 || r.Tiers[0].Hits == 0 || r.Tiers[1].Hits == 0 || r.Tiers[0].Hits+r.Tiers[1].Hits != r.PrefixHits {
		t.Errorf("error %v, %+v", err, r)
	}
	r, _, err = h.json(t, "--synthetic", "--dry", "--sweep-blocks", "300,600,1200")
	if err != nil || len(r.Curves) != 3 || r.Curves[2].CapacityBlocks != 1200 || r.Curves[2].References != r.References {
		t.Errorf("error %v, %+v", err, r)
	}
	r, _, err = h.json(t, "--synthetic", "--dry", "--sweep", "32MiB,64MiB", "--block-bytes", "1MiB")
	if err != nil || len(r.Curves) != 2 || r.Curves[0].CapacityBlocks != 32 {
		t.Errorf("error %v, %+v", err, r)
	}
	out, _, err := h.run(t.Context(), "--synthetic", "--dry", "--sweep", "32MiB,64MiB")
	if err != nil || !strings.Contains(out, "hit ratio") || !strings.Contains(out, "1,024") {
		t.Errorf("error %v:\n%s", err, out)
	}
	if len(h.started) != 0 {
		t.Error("a dry run started a node")
	}
}

func TestFlagFaults(t *testing.T) {
	file := filepath.Join(t.TempDir(), "bad.jsonl")
	if err := os.WriteFile(file, []byte(`{"timestamp":0,"input_length":512,"hash_ids":[1]}`+"\n{"), 0o600); err != nil {
		t.Fatal(err)
	}
	for args, want := range map[string][]string{
		"":                            {"name a trace FILE"},
		"a b":                         {"at most 1"},
		"a --synthetic":               {"exclude each other"},
		"nowhere.jsonl":               {"no such file"},
		file:                          {"bad.jsonl:2:"},
		"a --seed 3 --engines 0":      {"--seed needs --synthetic", "--engines is 0"},
		"a --peer-faults cut=2":       {"--peer-faults needs --peers", "want a probability"},
		"a --dry --peer-faults all":   {"--peer-faults means nothing in a dry run"},
		"a --speed -1 --requests -1":  {"--speed is -1", "--requests is -1"},
		"a --speed NaN":               {"--speed is NaN"},
		"a --block-bytes 0":           {"--block-bytes is 0"},
		"a --block-bytes 64k":         {"is not a size"},
		"a --policy magic":            {`--policy "magic" is not known; there is lru`},
		"a --policy lru,lru":          {"only a dry run takes several"},
		"a --sweep 1GiB":              {"--sweep needs --dry"},
		"a --socket s --primary 1GiB": {"give one of the two"},
		"a --primary 10KiB --fs 1":    {"--primary 10KiB is not a multiple of 4KiB; write 12KiB", "--fs 1 has room for 1 bytes; give 64KiB or more"},
		"a --primary 16TiB":           {"--primary 16TiB is more than the 15TiB"},
		"a --primary 32KiB":           {"--block-bytes 64KiB is more than --primary, which is 32KiB"},
		"a --fs 1GiB --block-bytes 32MiB --engines 0": {"--block-bytes 32MiB is more than the 16MiB that a block can have", "--engines is 0"},
		"a --dry --socket s":                          {"--socket means nothing in a dry run"},
		"a --dry --sweep 1KiB":                        {"--sweep 1KiB is 0 blocks"},
		"a --dry --sweep x":                           {`--sweep: "x" is not a size`},
		"a --dry --fs ./x":                            {"names a directory"},
		"a --fs cache":                                {"write a directory with a slash, such as ./cache"},
		"a --fs ./x,./y":                              {"names two directories"},
		"a --fs 1GiB,unbounded":                       {"names two sizes"},
		"a --fs ./x,none":                             {`nor "none" alone`},
		"a --dry --block-bytes 0":                     {"--block-bytes is 0"},
		"--synthetic --conversations -1":              {"--conversations is -1"},
	} {
		h := newHarness(t, 0, 4096)
		_, _, err := h.run(t.Context(), strings.Fields(args)...)
		for _, w := range want {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("%q: error %v, want %q", args, err, w)
			}
		}
		if len(h.started) != 0 {
			t.Errorf("%q: a node was started", args)
		}
	}
}

// TestDefaultNodeTakesNoSuchBlock: flags may suit a node that runs and not the
// one that would be started in its place. That is told before anything is
// started.
func TestDefaultNodeTakesNoSuchBlock(t *testing.T) {
	h := newHarness(t, 0, 4096)
	out, _, err := h.run(t.Context(), "--synthetic", "--block-bytes", "32MiB")
	if !errors.Is(err, ErrFlags) || !strings.Contains(err.Error(), "--block-bytes 32MiB is more than the 16MiB") || len(h.started) != 0 || out != "" {
		t.Errorf("error %v, started %v, %q", err, h.started, out)
	}
}

// TestRequestsAreThere: the conversations are so many that the requests asked
// for are there, and where people say how many, what is missing is told.
func TestRequestsAreThere(t *testing.T) {
	h := newHarness(t, 0, 4096)
	r, stderr, err := h.json(t, "--synthetic", "--dry", "--requests", "1500", "--primary", "64MiB")
	if err != nil || r.Requests != 1500 || strings.Contains(stderr, "--requests") {
		t.Errorf("error %v, %d requests, %s", err, r.Requests, stderr)
	}
	r, stderr, err = h.json(t, "--synthetic", "--dry", "--requests", "1500", "--conversations", "30")
	if err != nil || r.Requests >= 1500 || r.Conversations != 30 || !strings.Contains(stderr, "all there is of the 1,500 that --requests asks for") {
		t.Errorf("error %v, %d requests, %s", err, r.Requests, stderr)
	}
}

// TestInterruptedSweep: points of a part of the trace are marked as such,
// wherever they are shown.
func TestInterruptedSweep(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	h := newHarness(t, 0, 4096)
	out, _, err := h.run(ctx, "--synthetic", "--dry", "--sweep-blocks", "300,600", "--quiet")
	if !errors.Is(err, ErrInterrupted) || !strings.Contains(out, "interrupted: 0 of 2 points are complete") || strings.Count(out, "(interrupted)") != 2 || strings.Contains(out, "+---") {
		t.Errorf("error %v\n%s", err, out)
	}
	out, _, err = h.run(ctx, "--synthetic", "--dry", "--sweep-blocks", "300,600", "--quiet", "--json")
	var r Result
	if jerr := json.Unmarshal([]byte(out), &r); jerr != nil || !errors.Is(err, ErrInterrupted) || !r.Interrupted || r.Curves[0].Complete || r.Curves[0].References == 0 {
		t.Errorf("error %v, %v\n%s", err, jerr, out)
	}
	if r, _, err := h.json(t, "--synthetic", "--dry", "--sweep-blocks", "300,600"); err != nil || !r.Curves[0].Complete || !r.Curves[1].Complete {
		t.Errorf("error %v, %+v", err, r.Curves)
	}
	// The plot is there though nobody sees a terminal.
	if out, _, err = h.run(t.Context(), "--synthetic", "--dry", "--sweep-blocks", "300,600"); err != nil || !strings.Contains(out, "+---") || strings.Contains(out, "interrupted") {
		t.Errorf("error %v\n%s", err, out)
	}
}

func TestParseFS(t *testing.T) {
	for text, want := range map[string]fsChoice{
		"":                 {bytes: defaultFS},
		"none":             {none: true, bytes: defaultFS},
		"unbounded":        {},
		"20GiB":            {bytes: 20 << 30},
		"/data":            {dir: "/data", bytes: defaultFS},
		"./x,unbounded":    {dir: "./x"},
		"1MiB,/data/cache": {dir: "/data/cache", bytes: 1 << 20},
	} {
		if got, err := parseFS(text); err != nil || got != want {
			t.Errorf("%q: %+v, %v, want %+v", text, got, err, want)
		}
	}
}

// TestHelp: the help has examples, and every example parses.
func TestHelp(t *testing.T) {
	h := newHarness(t, 0, 4096)
	out, _, err := h.run(t.Context(), "--help")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"--synthetic", "--sweep-blocks", "Examples:", "default 1GiB", "default 64KiB"} {
		if !strings.Contains(out, want) {
			t.Errorf("help has no %q:\n%s", want, out)
		}
	}
	for line := range strings.Lines(examples) {
		cmd := Command(h.deps)
		args := strings.Fields(line)[2:]
		if err := cmd.ParseFlags(args); err != nil {
			t.Errorf("%s: %v", line, err)
		}
		if _, err := newReplay(cmd, h.deps, options{blockBytes: defaultBlockBytes, primary: defaultPrimary, policy: []string{"lru"}, synthetic: strings.Contains(line, "--synthetic"), engines: 1, peers: 1, dry: strings.Contains(line, "--dry")}, cmd.Flags().Args()); err != nil {
			t.Errorf("%s: %v", line, err)
		}
	}
}
