package fault

import (
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/tier"
)

// rule is one line: what to do, and when.
type rule struct {
	do   []action
	when pred
}

func (r *rule) String() string {
	var parts []string
	for _, a := range r.do {
		parts = append(parts, a.String())
	}
	s := strings.Join(parts, " ")
	if _, ok := r.when.(always); !ok {
		s += " when " + r.when.String()
	}
	return s
}

// action is one action; which of the fields below name means something depends
// on name.
type action struct {
	name  string
	errno unix.Errno
	class tier.Class // if not ClassNone, with cause instead of errno
	cause tier.Cause
	delay time.Duration
	n     int
	code  string // of status
}

func (a action) String() string {
	switch a.name {
	case "error", "late":
		if a.class != tier.ClassNone {
			return fmt.Sprintf("%s(%s, %s)", a.name, a.class, a.cause)
		}
		return fmt.Sprintf("%s(%s)", a.name, unix.ErrnoName(a.errno))
	case "delay":
		return fmt.Sprintf("delay(%s)", a.delay)
	case "status":
		if a.code != "" {
			return fmt.Sprintf("status(%d, %s)", a.n, a.code)
		}
		fallthrough
	case "short", "torn", "length", "stall":
		return fmt.Sprintf("%s(%d)", a.name, a.n)
	}
	return a.name
}

// apply adds the action to a fault. released is closed by Set.Release.
func (a action) apply(f *Fault, op *Op, released <-chan struct{}) {
	switch a.name {
	case "error", "late":
		f.Late = a.name == "late"
		if f.Err = a.errno; a.class != tier.ClassNone {
			f.Err = &tier.Error{Op: op.Kind, Class: a.class, Cause: a.cause, Err: errOf[a.class]}
		}
	case "delay":
		f.Delay = a.delay
	case "hang":
		f.Hang = released
	case "short":
		f.Short = a.n
	case "torn":
		f.Torn, f.Keep = true, a.n
	case "flip":
		f.Flip = true
	case "disconnect":
		f.Disconnect = true
	case "status":
		f.Status, f.Code = a.n, a.code
	case "length":
		f.Lie, f.Length = true, int64(a.n)
	case "stall":
		f.Stall, f.After = released, a.n
	case "linger":
		f.Linger = released
	}
}

// errOf is what an injected error of a class wraps.
var errOf = map[tier.Class]error{
	tier.ClassNotFound:  tier.ErrNotFound,
	tier.ClassRetryable: errInjected,
	tier.ClassPermanent: errInjected,
	tier.ClassCorrupt:   errInjected,
	tier.ClassCancelled: errInjected,
}

var errInjected = errors.New("fault")

// classes, causes and errnos by name.
var (
	classes = map[string]tier.Class{}
	causes  = map[string]tier.Cause{}
	errnos  = map[string]unix.Errno{}
)

func init() {
	for c := range errOf {
		classes[c.String()] = c
	}
	for _, c := range tier.Causes() {
		causes[c.String()] = c
	}
	for e := unix.Errno(1); e < 256; e++ {
		if name := unix.ErrnoName(e); name != "" {
			errnos[name] = e
		}
	}
}

// pred is a predicate. match is called under the set's lock and may count.
type pred interface {
	match(op *Op) bool
	String() string
}

type (
	always struct{}
	writes bool // or, false, reads
	seam   string
	kinds  []string
	glob   string
	span   struct{ from, to int64 }
	nth    struct{ n, asked int64 }
	times  struct {
		n, left int64
		p       pred
	}
	all     []pred // and
	some    []pred // or
	negated struct{ p pred }
	dice    struct {
		p     float64
		seed  uint64
		asked map[dieKey]uint64 // how often
	}
)

// dieKey is what a die is seeded by; the offset is left out, since a short
// read would shift what follows it.
type dieKey struct{ seam, kind, key string }

func (always) match(*Op) bool { return true }
func (always) String() string { return "always" }

func (w writes) match(op *Op) bool { return op.Write == bool(w) }
func (w writes) String() string {
	if w {
		return "writes"
	}
	return "reads"
}

func (s seam) match(op *Op) bool { return op.Seam == string(s) }
func (s seam) String() string    { return "seam(" + string(s) + ")" }

func (k kinds) match(op *Op) bool { return slices.Contains(k, op.Kind) }
func (k kinds) String() string    { return "op(" + strings.Join(k, ", ") + ")" }

func (g glob) match(op *Op) bool { return matchGlob(string(g), op.Key) }
func (g glob) String() string    { return "key(" + strconv.Quote(string(g)) + ")" }

// matchGlob takes time in proportion to the product of the lengths at most.
func matchGlob(pattern, s string) bool {
	star, mark := -1, 0 // where to go on when a * takes one byte more
	p, i := 0, 0
	for i < len(s) {
		switch {
		case p < len(pattern) && pattern[p] == '*':
			star, mark = p, i
			p++
		case p < len(pattern) && (pattern[p] == '?' || pattern[p] == s[i]):
			p++
			i++
		case star >= 0:
			mark++
			p, i = star+1, mark
		default:
			return false
		}
	}
	return strings.Trim(pattern[p:], "*") == ""
}

func (s span) match(op *Op) bool { return s.from <= op.Off && op.Off < s.to }
func (s span) String() string    { return fmt.Sprintf("off(%d, %d)", s.from, s.to) }

func (x *nth) match(*Op) bool { x.asked++; return x.asked == x.n+1 }
func (x *nth) String() string { return fmt.Sprintf("index(%d)", x.n) }

func (t *times) match(op *Op) bool {
	if t.left == 0 || !t.p.match(op) {
		return false
	}
	t.left--
	return true
}

func (t *times) String() string {
	if t.n == 1 {
		return "once(" + t.p.String() + ")"
	}
	return fmt.Sprintf("times(%d, %s)", t.n, t.p)
}

func (a all) match(op *Op) bool {
	for _, p := range a {
		if !p.match(op) {
			return false
		}
	}
	return true
}

func (a all) String() string { return "and(" + join(a) + ")" }

func (o some) match(op *Op) bool {
	for _, p := range o {
		if p.match(op) {
			return true
		}
	}
	return false
}

func (o some) String() string { return "or(" + join(o) + ")" }

func join(list []pred) string {
	var parts []string
	for _, p := range list {
		parts = append(parts, p.String())
	}
	return strings.Join(parts, ", ")
}

func (n negated) match(op *Op) bool { return !n.p.match(op) }
func (n negated) String() string    { return "not(" + n.p.String() + ")" }

func (d *dice) match(op *Op) bool {
	k := dieKey{op.Seam, op.Kind, op.Key}
	n := d.asked[k]
	d.asked[k]++
	h := fnv.New64a()
	fmt.Fprintf(h, "%d %d %s %s %s", d.seed, n, k.seam, k.kind, k.key)
	z := h.Sum64() // whose high bits are poor; the rest is splitmix64's finaliser
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	z ^= z >> 31
	return float64(z>>11)/(1<<53) < d.p
}

func (d *dice) String() string {
	return fmt.Sprintf("randomly(%s, %d)", strconv.FormatFloat(d.p, 'f', -1, 64), d.seed)
}
