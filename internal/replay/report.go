package replay

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/terrace-kv/terrace/internal/netfault"
)

// Result is what a replay did. Its JSON form is what --json prints;
// docs/replay.md explains each field. Fields are only ever added.
type Result struct {
	Trace         string  `json:"trace"`
	Format        string  `json:"format"`
	Mode          string  `json:"mode"` // bytes or dry
	Seed          *uint64 `json:"seed,omitempty"`
	Conversations int     `json:"conversations,omitempty"`
	Node          string  `json:"node,omitempty"`  // the socket that was used
	OwnNode       bool    `json:"own_node"`        // replay started it
	Nodes         int     `json:"nodes,omitempty"` // that the trace was split over
	Engines       int     `json:"engines"`
	BlockBytes    int64   `json:"block_bytes"`
	Policy        string  `json:"policy,omitempty"`
	PrimaryBytes  int64   `json:"primary_bytes"`
	Interrupted   bool    `json:"interrupted"`
	Error         string  `json:"error,omitempty"` // why the run did not end well; absent for an interrupt
	Shared        bool    `json:"shared"`          // other engines used the node meanwhile: their work is in Evictions and Tiers
	TiersKnown    bool    `json:"tiers_known"`     // false: the node went away in mid-run; Tiers is empty, and Evictions and rates are 0

	Requests       int64   `json:"requests"`
	References     int64   `json:"references"`
	PrefixHits     int64   `json:"prefix_hits"`
	PrefixHitRatio float64 `json:"prefix_hit_ratio"`
	LoadedBlocks   int64   `json:"loaded_blocks"`
	StoredBlocks   int64   `json:"stored_blocks"`
	Corrupt        int64   `json:"corrupt"`
	Refusals       int64   `json:"refusals"`
	Dropped        int64   `json:"dropped"` // fills that the node answered as dropped or stale
	Evictions      int64   `json:"evictions"`

	DurationSeconds       float64          `json:"duration_seconds"`
	PromoteBytesPerSecond float64          `json:"promote_bytes_per_second"`
	CascadeBytesPerSecond float64          `json:"cascade_bytes_per_second"`
	Tiers                 []TierResult     `json:"tiers"` // the primary first
	Latency               Latency          `json:"latency"`
	Verdicts              map[string]int64 `json:"verdicts,omitempty"`
	PeerFaults            *PeerFaults      `json:"peer_faults,omitempty"`
	Curves                []Point          `json:"curves,omitempty"`
}

// Values of Result.Mode.
const (
	ModeBytes = "bytes"
	ModeDry   = "dry"
)

// TierResult is one tier's part. For the primary, reads are of its hits and
// writes what engines stored; for a secondary, promotions and cascades.
type TierResult struct {
	Name       string `json:"name"`
	Hits       int64  `json:"hits"` // blocks
	ReadBytes  int64  `json:"read_bytes"`
	WriteBytes int64  `json:"write_bytes"`
	Failures   int64  `json:"failures"`
	Dropped    int64  `json:"dropped"`    // stored blocks that were never written to it
	Blocks     int64  `json:"blocks"`     // at the end
	UsedBytes  int64  `json:"used_bytes"` // at the end
}

// PeerFaults are what --peer-faults asked for and what of it happened.
type PeerFaults struct {
	Faults string `json:"faults"`
	Seed   uint64 `json:"seed"`
	netfault.Counts
}

// Latency is in microseconds. Lookup is one call that does not wait. Ready is
// from the start of that call to the moment at which all blocks of the usable
// prefix are readable, over the requests that have one.
type Latency struct {
	LookupP50us float64 `json:"lookup_p50_us"`
	LookupP99us float64 `json:"lookup_p99_us"`
	ReadyP50us  float64 `json:"ready_p50_us"`
	ReadyP99us  float64 `json:"ready_p99_us"`
}

// Point is one point of a hit-ratio curve.
type Point struct {
	Policy         string `json:"policy"`
	CapacityBlocks int64  `json:"capacity_blocks"`
	References     int64  `json:"references"`
	PrefixHits     int64  `json:"prefix_hits"`
	Refusals       int64  `json:"refusals"` // store calls refused, as when a request is larger than the capacity
	Complete       bool   `json:"complete"` // false: interrupted after References
}

func (p *Point) ratio() float64 { return ratio(p.PrefixHits, p.References) }

func ratio(n, of int64) float64 {
	if of == 0 {
		return 0
	}
	return float64(n) / float64(of)
}

// writeJSON prints the result as one object on one line.
func (r *Result) writeJSON(w io.Writer) error {
	if err := json.NewEncoder(w).Encode(r); err != nil {
		return fmt.Errorf("print result: %w", err)
	}
	return nil
}

// writeTable prints the result for people.
func (r *Result) writeTable(w io.Writer) error {
	var b strings.Builder
	section := func(fill func(row func(cells ...string))) {
		tw := tabwriter.NewWriter(&b, 0, 0, 3, ' ', tabwriter.AlignRight|tabwriter.TabIndent)
		fill(func(cells ...string) { fmt.Fprintln(tw, strings.Join(cells, "\t")+"\t") })
		_ = tw.Flush() // a Builder takes all
	}
	state := ""
	switch {
	case r.Interrupted:
		state = "  (interrupted: this is what was done)"
	case r.Error != "":
		state = "  (failed: this is what was done)"
	}
	fmt.Fprintf(&b, "\n%s%s\n", r.describe(), state)
	section(func(row func(...string)) {
		row("requests", commas(r.Requests))
		row("block references", commas(r.References))
		row("prefix hits", commas(r.PrefixHits), percent(r.PrefixHitRatio))
		row("stored blocks", commas(r.StoredBlocks))
		if r.TiersKnown {
			row("evictions", commas(r.Evictions))
		}
		row("refused stores", commas(r.Refusals))
		if r.Mode != ModeDry {
			row("corrupt blocks", commas(r.Corrupt))
		}
	})
	if !r.TiersKnown {
		b.WriteString("\ntiers and evictions: not known, because the node went away in mid-run\n")
	}
	if len(r.Tiers) > 0 {
		b.WriteByte('\n')
		section(func(row func(...string)) {
			row("tier", "hits", "read", "written", "failures", "dropped", "blocks now", "bytes now")
			for _, t := range r.Tiers {
				row(t.Name, commas(t.Hits), humanBytes(t.ReadBytes), humanBytes(t.WriteBytes), commas(t.Failures), commas(t.Dropped), commas(t.Blocks), humanBytes(t.UsedBytes))
			}
		})
	}
	if f := r.PeerFaults; f != nil {
		fmt.Fprintf(&b, "\nfaults between nodes: of %s %s refused, %s mute, %s swapped, %s cut, %s half-open; %s, %s delayed (%s; seed %d)\n",
			plural(f.Connections, "connection"), commas(f.Refused), commas(f.Muted), commas(f.Swapped), commas(f.Cut), commas(f.Stalled),
			plural(f.Corrupt, "wrong byte"), plural(f.Delayed, "piece"), f.Faults, f.Seed)
	}
	if r.Shared {
		b.WriteString("\nOther engines used the node meanwhile: evictions and the numbers of tiers include their work.\n")
	}
	if r.Mode != ModeDry {
		b.WriteByte('\n')
		section(func(row func(...string)) {
			row("latency", "p50", "p99")
			row("lookup", humanUS(r.Latency.LookupP50us), humanUS(r.Latency.LookupP99us))
			row("ready to read", humanUS(r.Latency.ReadyP50us), humanUS(r.Latency.ReadyP99us))
		})
	}
	if r.Mode != ModeDry && r.TiersKnown {
		fmt.Fprintf(&b, "\npromoted %s/s, cascaded %s/s, averaged over %s\n",
			humanBytes(int64(r.PromoteBytesPerSecond)), humanBytes(int64(r.CascadeBytesPerSecond)), humanSeconds(r.DurationSeconds))
	}
	if r.Corrupt > 0 {
		fmt.Fprintf(&b, "\n%s CORRUPT: their bytes were not those stored under their keys. This must never happen; keep the node's log and the tier's root.\n", plural(r.Corrupt, "BLOCK"))
	}
	_, err := io.WriteString(w, b.String())
	if err != nil {
		return fmt.Errorf("print result: %w", err)
	}
	return nil
}

func (r *Result) describe() string {
	s := fmt.Sprintf("%s (%s), ", r.Trace, r.Format)
	if r.Mode == ModeDry {
		return s + fmt.Sprintf("dry run, policy %s, primary %s = %s blocks of %s", r.Policy,
			humanBytes(r.PrimaryBytes), commas(r.PrimaryBytes/max(1, r.BlockBytes)), humanBytes(r.BlockBytes))
	}
	node := "the running node"
	switch {
	case r.Nodes > 1:
		node = plural(int64(r.Nodes), "node") + " of its own"
	case r.OwnNode:
		node = "a node of its own"
	}
	return s + fmt.Sprintf("%s on %s, primary %s, blocks of %s", plural(int64(r.Engines), "engine"), node, humanBytes(r.PrimaryBytes), humanBytes(r.BlockBytes))
}

// writeCurves prints hit ratios as a table, and above it a plot of those that
// are complete.
func writeCurves(w io.Writer, points []Point, blockBytes int64) error {
	var b strings.Builder
	b.WriteByte('\n')
	var complete []Point
	for _, p := range points {
		if p.Complete {
			complete = append(complete, p)
		}
	}
	if len(complete) > 1 {
		b.WriteString(plotCurves(complete))
		b.WriteByte('\n')
	}
	if len(complete) < len(points) {
		fmt.Fprintf(&b, "interrupted: %d of %s are complete; the others are of a part of the trace and not to be compared\n\n", len(complete), plural(int64(len(points)), "point"))
	}
	tw := tabwriter.NewWriter(&b, 0, 0, 3, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "policy\tcapacity\tblocks\treferences\tprefix hits\thit ratio\trefused stores\t")
	for i := range points {
		p := &points[i]
		state := ""
		if !p.Complete {
			state = "  (interrupted)"
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", p.Policy, humanBytes(p.CapacityBlocks*blockBytes),
			commas(p.CapacityBlocks), commas(p.References), commas(p.PrefixHits), percent(p.ratio()), commas(p.Refusals), state)
	}
	_ = tw.Flush() // a Builder takes all
	if _, err := io.WriteString(w, b.String()); err != nil {
		return fmt.Errorf("print curves: %w", err)
	}
	return nil
}

// Size of the plot, in characters.
const (
	plotRows = 12
	plotCols = 64
)

// logFrom is the ratio of the largest to the smallest capacity above which the
// axis is logarithmic.
const logFrom = 16

// plotCurves draws hit ratio over capacity, one mark a policy.
func plotCurves(points []Point) string {
	const marks = "*o+x#@%&"
	lo, hi, top := int64(math.MaxInt64), int64(0), 0.0
	var policies []string
	mark := map[string]byte{}
	for i := range points {
		lo, hi = min(lo, points[i].CapacityBlocks), max(hi, points[i].CapacityBlocks)
		top = max(top, points[i].ratio())
		if _, ok := mark[points[i].Policy]; !ok {
			mark[points[i].Policy] = marks[len(policies)%len(marks)]
			policies = append(policies, points[i].Policy)
		}
	}
	scale, axis := func(blocks int64) float64 { return float64(blocks) }, ""
	if lo > 0 && float64(hi) > logFrom*float64(lo) {
		scale, axis = func(blocks int64) float64 { return math.Log(float64(blocks)) }, ", logarithmic"
	}
	// The axis ends at the next tenth above the best ratio.
	top = max(0.1, math.Ceil(top*10-1e-9)/10)
	grid := make([][]byte, plotRows+1)
	for i := range grid {
		grid[i] = []byte(strings.Repeat(" ", plotCols))
	}
	for i := range points {
		col := 0
		if hi > lo {
			col = int(math.Round((scale(points[i].CapacityBlocks) - scale(lo)) / (scale(hi) - scale(lo)) * (plotCols - 1)))
		}
		row := plotRows - int(math.Round(points[i].ratio()/top*plotRows))
		grid[row][col] = mark[points[i].Policy]
	}
	var b strings.Builder
	for i, line := range grid {
		label := ""
		if i%3 == 0 {
			label = fmt.Sprintf("%.1f %%", 100*top*float64(plotRows-i)/plotRows)
		}
		fmt.Fprintf(&b, "%9s |%s\n", label, strings.TrimRight(string(line), " "))
	}
	fmt.Fprintf(&b, "%9s +%s\n", "", strings.Repeat("-", plotCols))
	first, last := commas(lo), commas(hi)+" blocks"+axis
	fmt.Fprintf(&b, "%9s  %s%*s\n", "", first, plotCols-len(first), last)
	if len(policies) > 1 {
		for _, p := range policies {
			fmt.Fprintf(&b, "%9s  %c %s\n", "", mark[p], p)
		}
	}
	return b.String()
}

func percent(r float64) string { return fmt.Sprintf("%.1f %%", 100*r) }

func plural(n int64, word string) string {
	if n == 1 {
		return "1 " + word
	}
	if strings.ToUpper(word) == word {
		return commas(n) + " " + word + "S"
	}
	return commas(n) + " " + word + "s"
}

// commas is n with a comma at each thousand.
func commas(n int64) string {
	s := strconv.FormatInt(n, 10)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// humanBytes is n with three figures or so, in powers of 1024.
func humanBytes(n int64) string {
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	v, unit := float64(n), -1
	for v >= 1024 && unit < 4 {
		v /= 1024
		unit++
	}
	digits := 1
	if v == math.Trunc(v) || v >= 100 {
		digits = 0
	}
	return fmt.Sprintf("%.*f %ciB", digits, v, "KMGTP"[unit])
}

func humanUS(us float64) string {
	switch {
	case us == 0:
		return "-"
	case us < 1e3:
		return fmt.Sprintf("%.0f µs", us)
	case us < 1e6:
		return fmt.Sprintf("%.1f ms", us/1e3)
	}
	return fmt.Sprintf("%.1f s", us/1e6)
}

func humanSeconds(s float64) string {
	if s < 10 {
		return fmt.Sprintf("%.2f s", s)
	}
	return time.Duration(s * float64(time.Second)).Round(time.Second).String()
}
