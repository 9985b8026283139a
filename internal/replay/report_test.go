package replay

import (
	"bytes"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"sort"
	"strings"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/internal/netfault"
)

func TestHistogram(t *testing.T) {
	var a, b, empty histogram
	rng := rand.New(rand.NewPCG(1, 2))
	var all []float64
	for range 20000 {
		d := time.Duration(rng.ExpFloat64() * 1e6)
		all = append(all, float64(d)/1e3)
		if rng.IntN(2) == 0 {
			a.add(d)
		} else {
			b.add(d)
		}
	}
	a.merge(&b)
	sort.Float64s(all)
	for _, q := range []float64{0, 0.5, 0.99, 1} {
		want := all[int(q*float64(len(all)-1))]
		if got := a.us(q); got < want || got > want*1.035+0.001 {
			t.Errorf("quantile %g: %g µs, want %g or up to 3.2 %% more", q, got, want)
		}
	}
	if empty.us(0.5) != 0 {
		t.Error("an empty histogram has no median")
	}
	for _, d := range []time.Duration{-1, 0, 1, 31, 32, 63, 64, 1<<63 - 1} {
		a.add(d) // none may fall outside
	}
}

func TestHuman(t *testing.T) {
	for got, want := range map[string]string{
		commas(0): "0", commas(999): "999", commas(-1000): "-1,000", commas(1234567): "1,234,567",
		humanBytes(1023): "1023 B", humanBytes(65536): "64 KiB", humanBytes(3 << 29): "1.5 GiB", humanBytes(200<<20 + 1): "200 MiB",
		humanUS(0): "-", humanUS(43.2): "43 µs", humanUS(1500): "1.5 ms", humanUS(2e6): "2.0 s",
		plural(1, "engine"): "1 engine", plural(2, "BLOCK"): "2 BLOCKS",
		snapshot{requests: 50, total: 200, references: 1000, hits: 250, bytes: 1 << 30, elapsed: time.Second}.line(): " 25 % [######..................] 50/200 requests, hits 25.0 %, 1 GiB/s, 3s left",
		snapshot{requests: 50}.line(): "50 requests",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func testResult() *Result {
	return &Result{Trace: "t", Format: "mooncake", Mode: ModeBytes, Engines: 2, BlockBytes: 65536, PrimaryBytes: 1 << 30, OwnNode: true, TiersKnown: true,
		Requests: 1000, References: 2000, PrefixHits: 500, PrefixHitRatio: 0.25, DurationSeconds: 2,
		Tiers: []TierResult{{Name: "primary", Hits: 400}, {Name: "fs", Hits: 100, ReadBytes: 100 << 16}}}
}

// TestPeerFaultsAreTold: what was injected is in the table and in the JSON.
func TestPeerFaultsAreTold(t *testing.T) {
	r := testResult()
	r.PeerFaults = &PeerFaults{Faults: "cut=0.1", Seed: 7, Counts: netfault.Counts{Connections: 1200, Refused: 1, Muted: 2, Swapped: 3, Cut: 4, Stalled: 5, Corrupt: 6, Delayed: 7}}
	var table, text bytes.Buffer
	if err := errors.Join(r.writeTable(&table), r.writeJSON(&text)); err != nil {
		t.Fatal(err)
	}
	if want := "faults between nodes: of 1,200 connections 1 refused, 2 mute, 3 swapped, 4 cut, 5 half-open; 6 wrong bytes, 7 pieces delayed (cut=0.1; seed 7)"; !strings.Contains(table.String(), want) {
		t.Errorf("%s", table.String())
	}
	if want := `"peer_faults":{"faults":"cut=0.1","seed":7,"connections":1200,"refused":1,"muted":2,"swapped":3,"cut":4,"stalled":5,"corrupt_bytes":6,"delayed":7}`; !strings.Contains(text.String(), want) {
		t.Errorf("%s", text.String())
	}
}

// TestJSONShape: one object, on one line, with at least the promised fields,
// also when they are zero.
func TestJSONShape(t *testing.T) {
	var b bytes.Buffer
	r := testResult()
	if err := r.writeJSON(&b); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(b.String(), "\n"); n != 1 || !strings.HasSuffix(b.String(), "}\n") {
		t.Errorf("%d lines: %s", n, b.String())
	}
	var got map[string]any
	if err := json.Unmarshal(b.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	has := func(m map[string]any, names ...string) {
		t.Helper()
		for _, name := range names {
			if _, ok := m[name]; !ok {
				t.Errorf("no field %q in %v", name, m)
			}
		}
	}
	has(got, "requests", "references", "prefix_hits", "prefix_hit_ratio", "stored_blocks", "corrupt", "duration_seconds", "tiers", "latency")
	tiers := got["tiers"].([]any)
	if first := tiers[0].(map[string]any); first["name"] != "primary" {
		t.Errorf("first tier is %v, want the primary", first)
	}
	has(tiers[1].(map[string]any), "name", "hits", "read_bytes", "write_bytes", "failures")
	has(got["latency"].(map[string]any), "lookup_p50_us", "lookup_p99_us", "ready_p50_us", "ready_p99_us")
	r.Curves = []Point{{Policy: "lru", CapacityBlocks: 5}}
	b.Reset()
	if err := r.writeJSON(&b); err != nil {
		t.Fatal(err)
	}
	var curves struct{ Curves []map[string]any }
	if err := json.Unmarshal(b.Bytes(), &curves); err != nil {
		t.Fatal(err)
	}
	has(curves.Curves[0], "policy", "capacity_blocks", "references", "prefix_hits")
}

func TestTable(t *testing.T) {
	var b bytes.Buffer
	r := testResult()
	if err := r.writeTable(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"2 engines on a node of its own", "requests", "1,000", "25.0 %", "corrupt blocks", "primary", "fs", "6.2 MiB", "lookup", "ready to read", "evictions", "refused stores", "promoted", "cascaded"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
	r.Corrupt, r.Interrupted = 1, true
	b.Reset()
	if err := r.writeTable(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"1 BLOCK CORRUPT", "interrupted"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
}

func TestPlot(t *testing.T) {
	points := []Point{
		{"lru", 100, 1000, 100, 0, true}, {"lru", 1000, 1000, 300, 0, true}, {"lru", 10000, 1000, 600, 0, true},
		{"arc", 100, 1000, 200, 0, true}, {"arc", 10000, 1000, 600, 0, true},
	}
	got := plotCurves(points)
	if want := plotGolden[1:]; got != want {
		t.Errorf("plot is\n%s\nwant\n%s", got, want)
	}
	// Within a factor of 16 the axis is even.
	even := plotCurves([]Point{{"lru", 100, 1000, 100, 0, true}, {"lru", 850, 1000, 100, 0, true}, {"lru", 1600, 1000, 100, 0, true}})
	if want := "|*" + strings.Repeat(" ", 31) + "*" + strings.Repeat(" ", 30) + "*\n"; !strings.Contains(even, want) || strings.Contains(even, "logarithmic") {
		t.Errorf("plot is\n%s", even)
	}
	// No data may send a mark off the grid.
	for _, p := range [][]Point{{{}}, {{"lru", 1, 1, 1, 0, true}, {"lru", 1, 1, 0, 0, true}}, {{"lru", 5, 10, 10, 0, true}, {"lru", 1 << 40, 10, 0, 0, true}}} {
		plotCurves(p)
	}
	var b bytes.Buffer
	if err := writeCurves(&b, points, 1<<20); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(b.String(), got) || !strings.Contains(b.String(), "60.0 %") {
		t.Errorf("curves are\n%s", b.String())
	}
}

const plotGolden = `
   60.0 % |                                                               o
          |
          |
   45.0 % |
          |
          |
   30.0 % |                               *
          |
          |o
   15.0 % |
          |*
          |
    0.0 % |
          +----------------------------------------------------------------
           100                                   10,000 blocks, logarithmic
           * lru
           o arc
`
