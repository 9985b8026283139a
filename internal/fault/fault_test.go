package fault

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/tier"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// canonical rules print as they are written here.
var canonical = []string{
	"error(EIO)",
	"late(ENOSPC) when writes",
	"error(retryable, io) when and(seam(tier), op(read, write))",
	"delay(1m30s) hang short(1) torn(0) flip disconnect error(EMFILE) when always",
	`delay(2.5µs) when not(key("tmp/*"))`,
	`flip when key("a\"b\n*?")`,
	"short(4096) when off(0, 8192)",
	"hang when or(reads, index(7))",
	"disconnect when once(seam(conn))",
	"torn(512) error(EIO) when times(3, seam(file))",
	"error(not_found, other) when randomly(0.015625, 18446744073709551615)",
	"status(503, SlowDown) when seam(http)",
	"status(500) length(0) stall(100) linger when op(get, put)",
}

func TestPrintsWhatItParses(t *testing.T) {
	for _, text := range canonical {
		s, err := Parse(text)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if got, want := s.String(), strings.TrimSuffix(text, " when always")+"\n"; got != want {
			t.Errorf("prints as %q, want %q", got, want)
		}
	}
	all := strings.Join(canonical, "\n")
	s := MustParse("# a comment\n\n" + strings.Join(canonical, " ; ") + " # another\n;")
	if got, want := s.String(), MustParse(all).String(); got != want || strings.Count(got, "\n") != len(canonical) {
		t.Errorf("%d rules in a line print as\n%s", len(canonical), got)
	}
	s = MustParse("error(\n EIO # why\n) when and(\n reads,\n writes)\nflip")
	if got, want := s.String(), "error(EIO) when and(reads, writes)\nflip\n"; got != want {
		t.Errorf("over several lines: %q", got)
	}
}

func TestSyntaxErrors(t *testing.T) {
	for text, want := range map[string]string{
		"explode":                      "line 1, column 1: no action",
		"flip\n flip when maybe":       "line 2, column 12: no predicate",
		"when reads":                   "column 1: want an action",
		"error":                        "column 6: want (, not the end",
		"error(EWHAT)":                 "column 7: \"EWHAT\" is neither",
		"error(retryable)":             "column 16: want a comma",
		"error(retryable, what)":       "column 18: \"what\" is no cause",
		"error(EIO) late(EIO)":         "column 12: late: one rule has one error",
		"delay(-5ms)":                  "column 7: unexpected '-'",
		"delay(5)":                     "column 7: want a duration",
		"short(0)":                     "column 7: want a number from 1",
		"torn(99999999999)":            "column 6: want a number",
		"flip flip":                    "column 6: flip: one rule has one flip",
		"flip when":                    "column 10: want a predicate, not the end",
		"flip when reads writes":       "column 17: want the end of the rule",
		"flip when\nreads":             "column 10: want a predicate, not the end of the line",
		"flip when key(a)":             "column 15: want a string",
		`flip when key("a`:             "column 15: a string that does not end",
		"flip when seam(disk)":         "column 16: no seam",
		"flip when off(5, 4)":          "column 18: want a number from 5",
		"flip when randomly(1.5, 1)":   "column 20: want a probability",
		"flip when randomly(NaN, 1)":   "column 20: want a probability, not",
		"flip when randomly(0.5, -1)":  "column 25: unexpected",
		"flip when and()":              "column 15: want a predicate",
		"flip when and(reads":          "column 20: want ), not the end",
		"flip when not(reads, writes)": "column 20: want )",
		"flip)":                        "column 5: want the end of the rule",
		"flip \xff":                    "column 6: unexpected",
		"flip when " + strings.Repeat("not(", 100): "predicates nest deeper",
	} {
		_, err := Parse(text)
		var se *SyntaxError
		if !errors.As(err, &se) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

// FuzzParse: no text makes it panic, an error points into the text, and what
// it accepts prints as text that means the same.
func FuzzParse(f *testing.F) {
	for _, text := range canonical {
		f.Add(text)
	}
	f.Add("flip\n#\nerror(retryable, io)when not(or(reads,index(3)));;")
	f.Fuzz(func(t *testing.T, text string) {
		s, err := Parse(text)
		if err != nil {
			var se *SyntaxError
			if !errors.As(err, &se) {
				t.Fatalf("%v is no SyntaxError", err)
			}
			if lines := strings.Split(text, "\n"); se.Line < 1 || se.Line > len(lines) || se.Column < 1 || se.Column > len(lines[se.Line-1])+1 {
				t.Fatalf("%v points beside the text", err)
			}
			return
		}
		again, err := Parse(s.String())
		if err != nil || again.String() != s.String() {
			t.Fatalf("%q prints as %q, which is %v", text, s, err)
		}
		for _, op := range []Op{{}, {Seam: SeamFile, Kind: "read", Key: "d/f", Off: 4096}, {Seam: SeamConn, Kind: "write", Write: true}} {
			s.Check(op)
		}
	})
}

func TestPredicates(t *testing.T) {
	ops := []Op{
		{Seam: SeamFile, Kind: "open", Key: "ab/cd"},
		{Seam: SeamFile, Kind: "write", Key: "tmp/1", Off: 4096, Write: true},
		{Seam: SeamTier, Kind: "read", Key: "00ff"},
		{Seam: SeamFile, Kind: "write", Key: "tmp/2", Write: true},
		{Seam: SeamConn, Kind: "read", Key: "engine", Off: 100},
	}
	for text, want := range map[string]string{
		"always":                        "01234",
		"reads":                         "024",
		"writes":                        "13",
		"seam(file)":                    "013",
		"op(read)":                      "24",
		"op(read, open)":                "024",
		`key("tmp/?")`:                  "13",
		`key("*")`:                      "01234",
		`key("*f*")`:                    "2",
		`key("a*c?")`:                   "0",
		`key("")`:                       "",
		"off(1, 4096)":                  "4",
		"off(4096, 4097)":               "1",
		"index(3)":                      "3",
		"and(writes, index(1))":         "3", // asked about writes only
		"and(index(1), writes)":         "1",
		"once(writes)":                  "1",
		"times(2, reads)":               "02",
		"not(times(2, reads))":          "134",
		"or(seam(tier), op(open))":      "02",
		"and(seam(file), not(writes))":  "0",
		"randomly(1, 3)":                "01234",
		"randomly(0, 3)":                "",
		"and(op(write), not(index(0)))": "3",
	} {
		s := MustParse("flip when " + text)
		got := ""
		for i, op := range ops {
			if s.Check(op).Flip {
				got += fmt.Sprint(i)
			}
		}
		if got != want || s.Injected() != int64(len(want)) {
			t.Errorf("%s holds for %q, want %q; %d are counted", text, got, want, s.Injected())
		}
	}
	// The first rule that holds decides.
	s := MustParse("error(EIO) when writes; flip")
	if f := s.Check(ops[1]); !errors.Is(f.Err, unix.EIO) || f.Flip {
		t.Errorf("a write: %+v", f)
	}
	if f := s.Check(ops[0]); f.Err != nil || !f.Flip {
		t.Errorf("an open: %+v", f)
	}
	if h := s.Hits(); len(h) != 2 || h[1].String() != `no. 2, rule 1: file open "ab/cd"` {
		t.Errorf("hits are %v", h)
	}
}

// What randomly decides for a key is the same whatever other keys are asked
// about meanwhile, from whichever goroutine; seeds and keys differ.
func TestRandomlyIsSeededPerKey(t *testing.T) {
	const ops = 2000
	run := func(seed int, key string, noise int) string {
		s := MustParse(fmt.Sprintf("flip when randomly(0.25, %d)", seed))
		var wg sync.WaitGroup
		for g := range noise {
			wg.Go(func() {
				for range ops {
					s.Check(Op{Seam: SeamFile, Kind: "read", Key: fmt.Sprint("noise", g)})
				}
			})
		}
		var b strings.Builder
		for range ops {
			fmt.Fprint(&b, s.Check(Op{Seam: SeamFile, Kind: "read", Key: key}).Flip)
		}
		wg.Wait()
		return b.String()
	}
	a := run(1, "a", 0)
	if n := strings.Count(a, "true"); n < ops/5 || n > ops*3/10 {
		t.Errorf("%d of %d with probability 0.25", n, ops)
	}
	if run(1, "a", 2) != a {
		t.Error("other goroutines change the choices")
	}
	if run(2, "a", 0) == a || run(1, "b", 0) == a {
		t.Error("another seed or key makes the same choices")
	}
}

func TestToggleAndSurfaced(t *testing.T) {
	s := MustParse("error(EIO) when index(1)")
	s.Toggle(false)
	for range 5 {
		if f := s.Check(Op{}); f != (Fault{}) {
			t.Fatalf("a set that is off says %+v", f)
		}
	}
	s.Toggle(true)
	s.Check(Op{})
	op := Op{Seam: SeamTier, Kind: "read", Key: "k", Off: 7}
	err := s.Check(op).Err
	if !errors.Is(err, unix.EIO) || err.Error() != "input/output error (injected, no. 1)" {
		t.Fatalf("the second op after it was turned on: %v", err)
	}
	lost := s.Unsurfaced()
	if len(lost) != 1 || lost[0].Op != op {
		t.Errorf("unsurfaced: %v", lost)
	}
	if s.Surfaced(unix.EIO) || s.Surfaced(nil) {
		t.Error("an error that nobody injected is surfaced")
	}
	if !s.Surfaced(fmt.Errorf("close: %w", errors.Join(unix.EBADF, &tier.Error{Err: err}))) {
		t.Error("an injected error is not found in a tree")
	}
	if lost := s.Unsurfaced(); len(lost) != 0 {
		t.Errorf("unsurfaced after it was: %v", lost)
	}
	// The memory of hits is bounded.
	s = MustParse("error(EIO)")
	for range 3 * hitsMax {
		s.Check(op)
	}
	if h := s.Hits(); len(h) > hitsMax || h[len(h)-1].N != 3*hitsMax || s.Injected() != 3*hitsMax {
		t.Errorf("%d hits are kept, the last is %v", len(h), h[len(h)-1])
	}
}

func TestErrorsByClass(t *testing.T) {
	for name, class := range classes {
		err := MustParse("error(" + name + ", timeout)").Check(Op{Kind: "read"}).Err
		if tier.ClassOf(err) != class || (class != tier.ClassNotFound && tier.CauseOf(err) != tier.CauseTimeout) {
			t.Errorf("%s: %v has class %v and cause %v", name, err, tier.ClassOf(err), tier.CauseOf(err))
		}
	}
	if err := MustParse("disconnect").Check(Op{Seam: SeamTier}).Err; tier.ClassOf(err) != tier.ClassRetryable {
		t.Errorf("disconnect of a tier: %v", err)
	}
	if f := MustParse("delay(1s)").Check(Op{}); f.Delay != time.Second || f.Err != nil {
		t.Errorf("delay: %+v", f)
	}
}
