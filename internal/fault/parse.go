package fault

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/tier"
)

// depthMax bounds how deep predicates nest.
const depthMax = 64

// SyntaxError says where a text is no set of rules.
type SyntaxError struct {
	Line, Column int // from 1; the column counts bytes
	Msg          string
}

func (e *SyntaxError) Error() string {
	return fmt.Sprintf("fault rules, line %d, column %d: %s", e.Line, e.Column, e.Msg)
}

// MustParse is Parse for rules that the program wrote.
func MustParse(text string) *Set {
	s, err := Parse(text)
	if err != nil {
		panic(err)
	}
	return s
}

// Parse makes a set of rules. Its error is a *SyntaxError.
func Parse(text string) (_ *Set, err error) {
	p := &parser{text: text}
	defer func() {
		switch r := recover().(type) {
		case nil:
		case *SyntaxError:
			err = r
		default:
			panic(r)
		}
	}()
	s := &Set{}
	s.ctx, s.stop = context.WithCancel(context.Background())
	p.next()
	for p.kind != 0 {
		if p.kind == ';' {
			p.next()
			continue
		}
		s.rules = append(s.rules, p.rule())
	}
	return s, nil
}

// parser looks one token ahead. It fails by panic with a *SyntaxError.
type parser struct {
	text  string
	pos   int // behind the token
	depth int // of parentheses, in which a newline is a space

	kind  byte // 'w' word, 'n' number, 's' string, 0 the end, or itself: ( ) , ; with newline as ;
	tok   string
	start int
}

func (p *parser) failAt(pos int, format string, args ...any) {
	before := p.text[:pos]
	panic(&SyntaxError{1 + strings.Count(before, "\n"), pos - strings.LastIndexByte(before, '\n'), fmt.Sprintf(format, args...)})
}

func (p *parser) fail(format string, args ...any) { p.failAt(p.start, format, args...) }

// what names the token, for errors.
func (p *parser) what() string {
	switch {
	case p.kind == 0:
		return "the end"
	case p.tok == "\n":
		return "the end of the line"
	}
	return strconv.Quote(p.tok)
}

func (p *parser) next() {
	for p.pos < len(p.text) {
		c := p.text[p.pos]
		if c == '#' {
			for p.pos < len(p.text) && p.text[p.pos] != '\n' {
				p.pos++
			}
			continue
		}
		if c != ' ' && c != '\t' && c != '\r' && (c != '\n' || p.depth == 0) {
			break
		}
		p.pos++
	}
	p.start = p.pos
	if p.pos == len(p.text) {
		p.kind, p.tok = 0, ""
		return
	}
	c := p.text[p.pos]
	switch {
	case strings.IndexByte("(),;\n", c) >= 0:
		p.pos++
		if p.kind = c; c == '\n' {
			p.kind = ';'
		}
	case c == '"':
		quoted, err := strconv.QuotedPrefix(p.text[p.pos:])
		if err != nil {
			p.fail("a string that does not end, or with an escape that Go does not know")
		}
		p.kind, p.pos = 's', p.pos+len(quoted)
	case wordByte(c):
		p.kind = 'w'
		if c >= '0' && c <= '9' {
			p.kind = 'n'
		}
		for p.pos < len(p.text) {
			r, n := utf8.DecodeRuneInString(p.text[p.pos:])
			// Of a duration a point and the prefix of micro are part, too.
			if r >= utf8.RuneSelf && r != 'µ' && r != 'μ' || r < utf8.RuneSelf && !wordByte(byte(r)) && (p.kind != 'n' || r != '.') {
				break
			}
			p.pos += n
		}
	default:
		r, _ := utf8.DecodeRuneInString(p.text[p.pos:])
		p.fail("unexpected %q", r)
	}
	p.tok = p.text[p.start:p.pos]
}

func wordByte(c byte) bool {
	return c == '_' || c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
}

// take takes a token of a kind and returns its text.
func (p *parser) take(kind byte, want string) string {
	if p.kind != kind {
		p.fail("want %s, not %s", want, p.what())
	}
	tok := p.tok
	switch kind {
	case '(':
		p.depth++
	case ')':
		p.depth--
	}
	p.next()
	return tok
}

func (p *parser) rule() rule {
	r := rule{when: always{}}
	had := map[string]bool{}
	for p.kind == 'w' && p.tok != "when" {
		start := p.start
		a := p.action()
		slot := a.name
		if slot == "late" {
			slot = "error"
		}
		if had[slot] {
			p.failAt(start, "%s: one rule has one %s", a.name, slot)
		}
		had[slot] = true
		r.do = append(r.do, a)
	}
	if len(r.do) == 0 {
		p.fail("want an action, not %s", p.what())
	}
	if p.kind == 'w' { // when
		p.next()
		r.when = p.pred()
	}
	if p.kind != ';' && p.kind != 0 {
		p.fail("want the end of the rule, not %s", p.what())
	}
	return r
}

func (p *parser) action() action {
	start := p.start
	a := action{name: p.take('w', "an action")}
	switch a.name {
	case "hang", "flip", "disconnect", "linger":
		return a
	case "error", "late", "delay", "short", "torn", "status", "length", "stall":
	default:
		p.failAt(start, "no action %q: there are error, late, delay, hang, short, torn, flip, disconnect, status, length, stall and linger", a.name)
	}
	p.take('(', "(")
	switch a.name {
	case "error", "late":
		a.errno, a.class, a.cause = p.err()
	case "delay":
		start := p.start
		d, err := time.ParseDuration(p.take('n', "a duration"))
		if err != nil || d < 0 {
			p.failAt(start, "want a duration such as 5ms")
		}
		a.delay = d
	case "short":
		a.n = int(p.int(1, math.MaxInt32))
	case "torn", "length", "stall":
		a.n = int(p.int(0, math.MaxInt32))
	case "status":
		a.n = int(p.int(200, 599))
		if p.kind == ',' {
			p.next()
			a.code = p.take('w', "a code such as SlowDown")
		}
	}
	p.take(')', ")")
	return a
}

// err parses an errno, or a class and a cause.
func (p *parser) err() (unix.Errno, tier.Class, tier.Cause) {
	start := p.start
	name := p.take('w', "an errno or a class")
	if e, ok := errnos[name]; ok {
		return e, 0, 0
	}
	class, ok := classes[name]
	if !ok {
		p.failAt(start, "%q is neither an errno nor a class of tier errors", name)
	}
	p.take(',', "a comma and a cause")
	start = p.start
	name = p.take('w', "a cause")
	cause, ok := causes[name]
	if !ok {
		p.failAt(start, "%q is no cause of tier errors", name)
	}
	return 0, class, cause
}

func (p *parser) int(lo, hi int64) int64 {
	start := p.start
	n, err := strconv.ParseInt(p.take('n', "a number"), 10, 64)
	if err != nil || n < lo || n > hi {
		p.failAt(start, "want a number from %d to %d", lo, hi)
	}
	return n
}

func (p *parser) pred() pred {
	start := p.start
	if p.depth > depthMax {
		p.fail("predicates nest deeper than %d", depthMax)
	}
	name := p.take('w', "a predicate")
	switch name {
	case "always":
		return always{}
	case "reads", "writes":
		return writes(name == "writes")
	case "seam", "op", "key", "off", "index", "once", "times", "randomly", "and", "or", "not":
	default:
		p.failAt(start, "no predicate %q: there are always, reads, writes, seam, op, key, off, index, once, times, randomly, and, or and not", name)
	}
	p.take('(', "(")
	var out pred
	switch name {
	case "seam":
		start := p.start
		s := p.take('w', "a seam")
		if s != SeamFile && s != SeamTier && s != SeamConn && s != SeamHTTP {
			p.failAt(start, "no seam %q: there are file, tier, conn and http", s)
		}
		out = seam(s)
	case "op":
		k := kinds{p.take('w', "a kind of call")}
		for p.kind == ',' {
			p.next()
			k = append(k, p.take('w', "a kind of call"))
		}
		out = k
	case "key":
		s, _ := strconv.Unquote(p.take('s', "a string")) // QuotedPrefix has accepted it
		out = glob(s)
	case "off":
		from := p.int(0, math.MaxInt64)
		p.take(',', "a comma and the end of the range")
		out = span{from, p.int(from, math.MaxInt64)}
	case "index":
		out = &nth{n: p.int(0, math.MaxInt64-1)}
	case "once":
		out = &times{1, 1, p.pred()}
	case "times":
		n := p.int(1, math.MaxInt64)
		p.take(',', "a comma and a predicate")
		out = &times{n, n, p.pred()}
	case "randomly":
		d := &dice{asked: map[dieKey]uint64{}}
		start := p.start
		var err error
		if d.p, err = strconv.ParseFloat(p.take('n', "a probability"), 64); err != nil || !(d.p >= 0 && d.p <= 1) {
			p.failAt(start, "want a probability from 0 to 1")
		}
		p.take(',', "a comma and a seed")
		start = p.start
		if d.seed, err = strconv.ParseUint(p.take('n', "a seed"), 10, 64); err != nil {
			p.failAt(start, "want a seed from 0 to %d", uint64(math.MaxUint64))
		}
		out = d
	case "and", "or":
		list := []pred{p.pred()}
		for p.kind == ',' {
			p.next()
			list = append(list, p.pred())
		}
		if out = all(list); name == "or" {
			out = some(list)
		}
	case "not":
		out = negated{p.pred()}
	}
	p.take(')', ")")
	return out
}
