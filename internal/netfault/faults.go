package netfault

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"
)

// Faults say what befalls connections at random. The zero value is nothing.
type Faults struct {
	Refuse  float64       // share of connections that are reset at once
	Mute    float64       // share that are accepted and never answered
	Swap    float64       // share that are held until the next one has passed, or for swapMax
	Cut     float64       // share of spans, of either way, in which the connection is reset
	Stall   float64       // and from which on nothing passes any more, and it stays open
	Corrupt float64       // share of bytes with a wrong bit
	Delay   time.Duration // of bytes, at most; each piece has another, and order stays
}

// Bytes of a way are in spans. Where in a span it happens, the first byte is as
// likely as the last megabyte.
const (
	span      = 4 << 20
	swapMax   = 100 * time.Millisecond
	delayMax  = time.Minute
	parseHelp = `want "all", or some of refuse, mute, swap, cut, stall and corrupt with a probability, and delay with a duration, such as "cut=0.1,corrupt=1e-6,delay=2ms"`
)

// All is the default set: some of each.
var All = Faults{Refuse: 0.05, Mute: 0.02, Swap: 0.2, Cut: 0.05, Stall: 0.02, Corrupt: 1e-7, Delay: time.Millisecond}

func (f *Faults) shares() map[string]*float64 {
	return map[string]*float64{"refuse": &f.Refuse, "mute": &f.Mute, "swap": &f.Swap, "cut": &f.Cut, "stall": &f.Stall, "corrupt": &f.Corrupt}
}

// Parse reads what String writes, and "all". Later items win, so "all,delay=0s"
// is all but delays.
func Parse(text string) (f Faults, err error) {
	for item := range strings.SplitSeq(text, ",") {
		name, value, _ := strings.Cut(item, "=")
		share := f.shares()[name]
		switch {
		case item == "all":
			f = All
		case name == "delay":
			if f.Delay, err = time.ParseDuration(value); err != nil || f.Delay < 0 || f.Delay > delayMax {
				return f, fmt.Errorf("%q: want a duration from 0s to %v", item, delayMax)
			}
		case share != nil:
			if *share, err = strconv.ParseFloat(value, 64); err != nil || !(*share >= 0 && *share <= 1) {
				return f, fmt.Errorf("%q: want a probability from 0 to 1", item)
			}
		default:
			return f, fmt.Errorf("%q: %w", item, errors.New(parseHelp))
		}
	}
	return f, nil
}

func (f Faults) String() string {
	var out []string
	for _, name := range []string{"refuse", "mute", "swap", "cut", "stall", "corrupt"} {
		if p := *f.shares()[name]; p > 0 {
			out = append(out, name+"="+strconv.FormatFloat(p, 'g', -1, 64))
		}
	}
	if f.Delay > 0 {
		out = append(out, "delay="+f.Delay.String())
	}
	return strings.Join(out, ",")
}

// Counts are injections so far: connections, but for Corrupt (bytes).
type Counts struct {
	Connections int64 `json:"connections"` // in all
	Refused     int64 `json:"refused"`
	Muted       int64 `json:"muted"`
	Swapped     int64 `json:"swapped"`
	Cut         int64 `json:"cut"`
	Stalled     int64 `json:"stalled"`
	Corrupt     int64 `json:"corrupt_bytes"`
	Delayed     int64 `json:"delayed"` // pieces of bytes
}

// Add adds those of another proxy.
func (c *Counts) Add(o Counts) {
	c.Connections, c.Refused, c.Muted, c.Swapped = c.Connections+o.Connections, c.Refused+o.Refused, c.Muted+o.Muted, c.Swapped+o.Swapped
	c.Cut, c.Stalled, c.Corrupt, c.Delayed = c.Cut+o.Cut, c.Stalled+o.Stalled, c.Corrupt+o.Corrupt, c.Delayed+o.Delayed
}

// fate is what is to become of a connection.
type fate struct {
	refuse, mute, swap bool
	ways               [2]*wayFate
}

// wayFate is that of the bytes of one way. Its dice are its own, so that what
// the other way carries does not change them. The reader of the way uses delays,
// its writer the rest.
type wayFate struct {
	Faults
	rng, delays        *rand.Rand
	left, reset, stall int64   // bytes: of the span, and to what happens in it
	wrong              float64 // bytes to the next wrong one
}

func newFate(f Faults, seed uint64, n uint64) *fate {
	rng := rand.New(rand.NewPCG(seed, n))
	roll := func(p float64) bool { return rng.Float64() < p }
	x := &fate{refuse: roll(f.Refuse), mute: roll(f.Mute), swap: roll(f.Swap)}
	for way := range x.ways {
		w := &wayFate{Faults: f, rng: rand.New(rand.NewPCG(rng.Uint64(), 1)), delays: rand.New(rand.NewPCG(rng.Uint64(), 2))}
		w.wrong = w.gap()
		x.ways[way] = w
	}
	return x
}

// begin begins a span.
func (w *wayFate) begin() {
	after := func(p float64) int64 {
		hit, at := w.rng.Float64() < p, int64(math.Exp2(w.rng.Float64()*math.Log2(span)))
		if !hit {
			return math.MaxInt64
		}
		return at
	}
	w.left, w.reset, w.stall = span, after(w.Cut), after(w.Stall)
}

func (w *wayFate) gap() float64 {
	if w.Corrupt <= 0 {
		return math.Inf(1)
	}
	return w.rng.ExpFloat64() / w.Corrupt
}

// cut says how much of what comes next may pass at once, and what becomes of the
// connection then.
func (w *wayFate) cut(b []byte) (n int, reset, stall bool) {
	if w.left == 0 {
		w.begin()
	}
	m := min(int64(len(b)), w.left, w.reset, w.stall)
	w.left, w.reset, w.stall = w.left-m, w.reset-m, w.stall-m
	return int(m), w.reset == 0, w.stall == 0
}

// touch damages bytes that pass, and says how many.
func (w *wayFate) touch(b []byte) (wrong int64) {
	for ; w.wrong < float64(len(b)); w.wrong += 1 + w.gap() {
		b[int(w.wrong)] ^= 1 << w.rng.IntN(8)
		wrong++
	}
	w.wrong -= float64(len(b))
	return wrong
}

// late is how long a piece is delayed.
func (w *wayFate) late() time.Duration { return time.Duration(w.delays.Int64N(int64(w.Delay) + 1)) }
