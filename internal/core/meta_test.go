package core

import (
	"cmp"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/core/policy"
)

// The metamorphic test runs one list of operations over the core under many
// configurations and compares what they answer. The model test knows what each
// answer must be and so has to know the core's rules; this one knows only how
// answers of different configurations must relate, and a few things that hold
// in all of them. The relations are in the table metaRelations.
//
// Operations name sessions, requests, chains of keys and stretches of them, and
// nothing that a core returns, so a list means the same everywhere, and a list
// from which some are taken is a list. An operation on what does not exist is
// skipped, or is a call that must be refused. metarun_test.go performs them.

var (
	metaSeedFlag = flag.Uint64("core.meta.seed", 0, "run the metamorphic test with this seed only")
	metaOpsFlag  = flag.String("core.meta.ops", "", "replay this file of operations (or operations with ; between them)")
	metaLongFlag = flag.Duration("core.meta.long", 0, "run the metamorphic test with fresh seeds for so long")
	metaDump     = flag.Bool("core.meta.dump", false, "print the operations of -core.meta.seed, or what those of -core.meta.ops are answered")
)

// --- operations ---

// metaOp is one operation: `store s0/a group=1 chain=2 first=3 count=4`.
type metaOp struct {
	verb string
	who  string // a session, s0; a request of one, s0/a; or a namespace, n0
	args []metaArg
}

type metaArg struct {
	name string
	n    int
}

// metaVerbs lists the operations: whose they are (n a namespace, s a session, q a
// request) and what they take. What is not said is 0.
var metaVerbs = map[string]struct{ who, args string }{
	"space":   {"n", "shape"},                                           // the groups of a namespace, before all else
	"open":    {"s", "ns"},                                              // a session on a namespace
	"close":   {"s", ""},                                                // it dies; its workers may go on writing
	"quiet":   {"s", ""},                                                // its workers are gone
	"new":     {"q", "remote noload nostore lastonly maxload maxstore"}, // a request; the caps are in tokens, plus 1
	"lookup":  {"q", "chain tokens wait peek"},                          // of a prompt
	"store":   {"q", "group chain first count"},                         // reserve blocks and begin to write them
	"commit":  {"q", "nosum"},                                           // what the request has reserved, written to the end
	"abort":   {"q", ""},                                                // the same, given back
	"pin":     {"q", "group chain first count"},                         // what is committed of these
	"unpin":   {"q", ""},                                                // all leases that it has
	"touch":   {"s", "group chain first count"},                         // recency only
	"finish":  {"q", ""},                                                // no more calls
	"flush":   {"q", "wait"},                                            // until its stores are over
	"reset":   {"", "wait"},                                             // of the primary
	"restart": {"", ""},                                                 // an empty primary over the same tiers
	"sleep":   {"", "for"},                                              // time passes
	"rest":    {"", ""},                                                 // until nothing is under way
}

func (o metaOp) get(name string) int {
	for _, a := range o.args {
		if a.name == name {
			return a.n
		}
	}
	return 0
}

func (o metaOp) String() string {
	s := o.verb
	if o.who != "" {
		s += " " + o.who
	}
	for _, a := range o.args {
		s += fmt.Sprintf(" %s=%d", a.name, a.n)
	}
	return s
}

func parseMetaOp(line string) (o metaOp, err error) {
	f := strings.Fields(line)
	if len(f) == 0 {
		return o, fmt.Errorf("an empty operation")
	}
	spec, ok := metaVerbs[f[0]]
	if !ok {
		return o, fmt.Errorf("unknown operation %q", line)
	}
	o.verb, f = f[0], f[1:]
	if spec.who != "" {
		if len(f) == 0 || (spec.who == "q") != strings.Contains(f[0], "/") || f[0][0] == 'n' != (spec.who == "n") {
			return o, fmt.Errorf("%q does not say whose it is", line)
		}
		o.who, f = f[0], f[1:]
	}
	for _, s := range f {
		name, val, _ := strings.Cut(s, "=")
		n, err := strconv.Atoi(val)
		if err != nil || n < 0 || n > 1<<30 || !slices.Contains(strings.Fields(spec.args), name) {
			return o, fmt.Errorf("%q: %q is not one of %q with a number", line, s, spec.args)
		}
		o.args = append(o.args, metaArg{name, n})
	}
	return o, nil
}

const (
	metaTokens = 24 // of the longest prompt
	metaChains = 3
	metaSpaces = 2
)

// metaShapes are the groups that a namespace can have. What the blocks take is
// the configuration's to say.
var metaShapes = [][]block.Group{
	{{Kind: block.KindFull, TokensPerBlock: 2}},
	{{Kind: block.KindFull, TokensPerBlock: 1}, {Kind: block.KindWindow, TokensPerBlock: 2, WindowBlocks: 3}},
	{{Kind: block.KindWindow, TokensPerBlock: 1, WindowBlocks: 4}},
	{{Kind: block.KindFull, TokensPerBlock: 2}, {Kind: block.KindFull, TokensPerBlock: 1}},
	{{Kind: block.KindFull, TokensPerBlock: 2}, {Kind: block.KindWindow, TokensPerBlock: 1, WindowBlocks: 2}, {Kind: block.KindWindow, TokensPerBlock: 2, WindowBlocks: 5}},
}

// metaKeys are the keys of a chain in one group. Chains share what lies before
// their fork.
func metaKeys(groups []block.Group, g, chain int) (keys []block.Key) {
	tpb := int(groups[g].TokensPerBlock)
	fork := metaTokens * chain / (metaChains + 1)
	for i := range metaTokens / tpb {
		of := chain
		if (i+1)*tpb <= fork {
			of = 0
		}
		keys = append(keys, key(of*1000+i, g))
	}
	return keys
}

// genMeta makes the operations of a seed: engines that do what engines do, many
// requests at a time, and now and then something else. What the seed switches
// off does not hide what the rest does.
func genMeta(seed uint64, n int) (ops []metaOp) {
	r := rand.New(rand.NewPCG(seed, 0x3e7a))
	chance := func(percent int) bool { return r.IntN(100) < percent }
	flip := func() bool { return r.IntN(2) == 0 }
	add := func(verb, who string, args ...any) {
		o := metaOp{verb: verb, who: who}
		for i := 0; i < len(args); i += 2 {
			if v := args[i+1].(int); v != 0 {
				o.args = append(o.args, metaArg{args[i].(string), v})
			}
		}
		ops = append(ops, o)
	}
	resets, restarts, deaths, remote, caps, filters := r.IntN(3) == 0, r.IntN(3) == 0, flip(), flip(), flip(), flip()
	nosum, waits, aborts, pins, peeks, odd := flip(), r.IntN(4) > 0, flip(), flip(), flip(), flip()
	calm := r.IntN(200) // how fast time passes
	prompt := 1 + r.IntN(metaTokens)
	atOnce := 1 + r.IntN(5)

	var shapes [metaSpaces]int
	for i := range shapes {
		shapes[i] = r.IntN(len(metaShapes))
		add("space", fmt.Sprint("n", i), "shape", shapes[i])
	}
	type engine struct {
		name string
		ns   int
		dead bool
	}
	type running struct {
		e             *engine
		who           string
		chain, tokens int
		todo          []func()
	}
	var engines []*engine
	for i := range 1 + r.IntN(3) {
		engines = append(engines, &engine{name: fmt.Sprint("s", i), dead: true})
	}
	var live []*running
	stretch := func(q *running) (g, first, count int) {
		g = r.IntN(len(metaShapes[shapes[q.e.ns]]))
		n := max(1, q.tokens/int(metaShapes[shapes[q.e.ns]][g].TokensPerBlock))
		first = r.IntN(n)
		return g, first, 1 + r.IntN(n-first)
	}
	begin := func(e *engine) {
		q := &running{e: e, who: e.name + "/" + string(rune('a'+r.IntN(6))), chain: r.IntN(1 + r.IntN(metaChains)), tokens: 1 + r.IntN(prompt)}
		if slices.ContainsFunc(live, func(o *running) bool { return o.who == q.who }) && !chance(10) {
			return
		}
		lookup := func() {
			wait := 0
			if waits && chance(70) {
				wait = 1 + r.IntN(500)
			}
			add("lookup", q.who, "chain", q.chain, "tokens", q.tokens, "wait", wait, "peek", btoi(peeks && chance(20)))
		}
		flag := func(on bool, percent int) int { return btoi(on && chance(percent)) }
		add("new", q.who, "remote", flag(remote, 20), "noload", flag(filters, 15), "nostore", flag(filters, 15), "lastonly", flag(filters, 30),
			"maxload", flag(caps, 20)*(1+r.IntN(metaTokens)), "maxstore", flag(caps, 20)*(1+r.IntN(metaTokens)))
		q.todo = append(q.todo, lookup)
		if chance(30) {
			q.todo = append(q.todo, lookup)
		}
		if chance(75) { // it computes what is missing, and stores it from the last block to the first
			groups := metaShapes[shapes[e.ns]]
			for g := range groups {
				if chance(15) {
					continue
				}
				for end := q.tokens / int(groups[g].TokensPerBlock); end > 0; {
					first := max(0, end-1-r.IntN(8))
					count := end - first
					end = first
					q.todo = append(q.todo, func() { add("store", q.who, "group", g, "chain", q.chain, "first", first, "count", count) })
					if chance(70) {
						q.todo = append(q.todo, func() {
							if aborts && chance(10) {
								add("abort", q.who)
							} else if chance(95) {
								add("commit", q.who, "nosum", flag(nosum, 40))
							}
						})
					}
				}
			}
			q.todo = append(q.todo, func() { add("commit", q.who, "nosum", flag(nosum, 40)) })
		}
		if pins && chance(50) {
			q.todo = append(q.todo, func() {
				g, first, count := stretch(q)
				add("pin", q.who, "group", g, "chain", q.chain, "first", first, "count", count)
			})
		}
		if pins && chance(40) {
			q.todo = append(q.todo, func() { add("unpin", q.who) })
		}
		if chance(15) {
			q.todo = append(q.todo, func() { add("flush", q.who, "wait", 1+r.IntN(400)) })
		}
		if chance(30) {
			q.todo = append(q.todo, lookup)
		}
		if odd && chance(20) { // what comes after the end is refused, or gives back
			q.todo = append(q.todo, func() { add("finish", q.who) })
			r.Shuffle(len(q.todo), func(i, j int) { q.todo[i], q.todo[j] = q.todo[j], q.todo[i] })
		}
		q.todo = append(q.todo, func() { add("finish", q.who) })
		live = append(live, q)
	}
	for len(ops) < n {
		e := engines[r.IntN(len(engines))]
		switch {
		case chance(calm / 10):
			add("sleep", "", "for", 1+r.IntN(1+2*calm))
		case e.dead:
			if chance(60) {
				e.ns, e.dead = r.IntN(metaSpaces), false
				add("quiet", e.name)
				add("open", e.name, "ns", e.ns)
			} else {
				add("quiet", e.name)
			}
		case r.IntN(1000) < 15 && deaths:
			add("close", e.name)
			e.dead = true
			live = slices.DeleteFunc(live, func(q *running) bool { return q.e == e && (!odd || chance(70)) })
		case r.IntN(1000) < 15 && resets:
			add("reset", "", "wait", 1+r.IntN(400))
		case r.IntN(1000) < 15 && restarts:
			add("restart", "")
			for _, e := range engines {
				e.dead = true
			}
			live = nil
		case r.IntN(1000) < 10:
			add("rest", "")
		case chance(2):
			g := r.IntN(len(metaShapes[shapes[e.ns]]))
			add("touch", e.name, "group", g, "chain", r.IntN(metaChains), "first", r.IntN(metaTokens/2), "count", 1+r.IntN(6))
		case len(live) < atOnce && flip() || len(live) == 0:
			begin(e)
		default:
			i := r.IntN(len(live))
			q := live[i]
			q.todo[0]()
			if q.todo = q.todo[1:]; len(q.todo) == 0 {
				live = slices.Delete(live, i, i+1)
			}
		}
	}
	return ops
}

// --- configurations ---

// metaConfig is all that one run has and another has not. metaFields has its
// text and its plain values.
type metaConfig struct {
	policy, tiers, mix string

	pages, extent, reserve, overdue, inflight, readCredit, writeCredit, facts int
	seed, delay, faults, hang, lose, torn, down, stray                        int
	patience, quiet, atoms, salt, peeks, noReset                              int
}

type metaField struct {
	name  string
	of    func(*metaConfig) any // *int or *string
	plain any
}

// metaFields lists the fields of a configuration. A configuration is written as
// what is not plain: `pages=16 tiers=kp delay=20`.
var metaFields = []metaField{
	{"policy", func(c *metaConfig) any { return &c.policy }, "lru"},
	{"tiers", func(c *metaConfig) any { return &c.tiers }, ""},        // a letter each: k knows, p must be probed, s knows only what it was told
	{"mix", func(c *metaConfig) any { return &c.mix }, "111"},         // pages of a block in each group, one place further in the second namespace
	{"pages", func(c *metaConfig) any { return &c.pages }, metaRoomy}, // of the primary
	{"extent", func(c *metaConfig) any { return &c.extent }, 64},      // pages
	{"reserve", func(c *metaConfig) any { return &c.reserve }, 10},    // percent; likewise the next two
	{"overdue", func(c *metaConfig) any { return &c.overdue }, 10},
	{"inflight", func(c *metaConfig) any { return &c.inflight }, 100},
	{"read", func(c *metaConfig) any { return &c.readCredit }, 4096}, // blocks at a time
	{"write", func(c *metaConfig) any { return &c.writeCredit }, 4096},
	{"facts", func(c *metaConfig) any { return &c.facts }, 4096},
	{"seed", func(c *metaConfig) any { return &c.seed }, 0},         // of delays and faults, which are drawn by key
	{"delay", func(c *metaConfig) any { return &c.delay }, 1},       // of a tier's call, at most
	{"faults", func(c *metaConfig) any { return &c.faults }, 0},     // percent of blocks whose job fails; likewise:
	{"hang", func(c *metaConfig) any { return &c.hang }, 0},         // jobs that end long after their deadline
	{"lose", func(c *metaConfig) any { return &c.lose }, 0},         // written blocks that somebody deletes
	{"torn", func(c *metaConfig) any { return &c.torn }, 0},         // written blocks that come back otherwise
	{"down", func(c *metaConfig) any { return &c.down }, 0},         // jobs after which the tier is down for a while
	{"stray", func(c *metaConfig) any { return &c.stray }, 0},       // jobs whose results come twice
	{"patience", func(c *metaConfig) any { return &c.patience }, 1}, // multiplies every bound in time
	{"quiet", func(c *metaConfig) any { return &c.quiet }, 0},       // 1: rest after each operation, and lookups wait
	{"atoms", func(c *metaConfig) any { return &c.atoms }, 0},       // 1: each block of an operation is a request of its own
	{"salt", func(c *metaConfig) any { return &c.salt }, 0},         // of the index
	{"peeks", func(c *metaConfig) any { return &c.peeks }, 0},       // 1: a peek before each operation
	{"noreset", func(c *metaConfig) any { return &c.noReset }, 0},   // 1: no resets
}

// metaRoomy is more pages than all blocks there are can take, those that a
// reset has forgotten and somebody has still pinned included.
const metaRoomy = 8192

func plainMeta() (c metaConfig) {
	for _, f := range metaFields {
		f.reset(&c)
	}
	return c
}

func (f *metaField) reset(c *metaConfig) {
	switch p := f.of(c).(type) {
	case *int:
		*p = f.plain.(int)
	case *string:
		*p = f.plain.(string)
	}
}

func (f *metaField) text(c *metaConfig) string {
	switch p := f.of(c).(type) {
	case *int:
		return strconv.Itoa(*p)
	case *string:
		return *p
	}
	panic("a field of another type")
}

func (f *metaField) isPlain(c *metaConfig) bool { return f.text(c) == fmt.Sprint(f.plain) }

func (c metaConfig) String() string {
	var out []string
	for _, f := range metaFields {
		if !f.isPlain(&c) {
			out = append(out, f.name+"="+f.text(&c))
		}
	}
	if len(out) == 0 {
		return "plain"
	}
	return strings.Join(out, " ")
}

// parseMetaConfig reads what String wrote, over a configuration that is plain.
func parseMetaConfig(s string) (metaConfig, error) {
	c := plainMeta()
	for _, w := range strings.Fields(s) {
		if w == "plain" {
			continue
		}
		name, val, _ := strings.Cut(w, "=")
		i := slices.IndexFunc(metaFields, func(f metaField) bool { return f.name == name })
		if i < 0 {
			return c, fmt.Errorf("unknown setting %q", w)
		}
		switch p := metaFields[i].of(&c).(type) {
		case *string:
			*p = val
		case *int:
			n, err := strconv.Atoi(val)
			if err != nil {
				return c, fmt.Errorf("setting %q: %w", w, err)
			}
			*p = n
		}
	}
	if len(c.mix) != 3 || strings.Trim(c.mix, "123") != "" || strings.Trim(c.tiers, "kps") != "" || !slices.Contains(policy.Names(), c.policy) ||
		c.extent < 4 || c.pages < c.extent || c.delay < 1 || c.patience < 1 {
		return c, fmt.Errorf("configuration %q is none", s)
	}
	return c, nil
}

func mustMeta(s string) metaConfig {
	c, err := parseMetaConfig(s)
	if err != nil {
		panic(err)
	}
	return c
}

// drawMeta draws a configuration, with features switched off at random.
func drawMeta(r *rand.Rand) metaConfig {
	c := plainMeta()
	pick := func(v ...int) int { return v[r.IntN(len(v))] }
	some := func(p int) int { return pick(0, 0, p) }
	c.policy = policy.Names()[r.IntN(len(policy.Names()))]
	c.tiers = []string{"", "k", "p", "s", "kp", "pk", "ks", "pp", "kps"}[r.IntN(9)]
	c.mix = []string{"111", "222", "123", "131", "212", "321"}[r.IntN(6)]
	c.pages, c.extent = pick(8, 12, 16, 24, 32, 64, 128), pick(4, 4, 8)
	c.reserve, c.overdue, c.inflight = pick(-1, 10, 30), pick(1, 10, 50, 100), pick(20, 50, 100)
	c.readCredit, c.writeCredit, c.facts = pick(1, 3, 100), pick(1, 3, 100), pick(4, 16, 4096)
	c.seed, c.delay = 1+r.IntN(1000), pick(1, 5, 30, 100, 250)
	if r.IntN(3) > 0 {
		c.faults, c.hang, c.lose, c.torn, c.down, c.stray = some(15), some(20), some(10), some(5), some(3), some(10)
	}
	return c
}

// --- relations ---

// metaCheck is something that must hold of the operations: of one run, or
// between two.
type metaCheck struct {
	relation string
	configs  []metaConfig
}

const metaAlone = "alone"

// metaRelation compares two runs of the same operations. valid says between
// which configurations it holds: the reducer must not leave them.
type metaRelation struct {
	valid func(a, b metaConfig) bool
	holds func(ops []metaOp, a, b *metaRun) error
}

// calm is a configuration with room for everything, no faults and quiet queues.
// Nothing is evicted, nothing runs into a bound.
func (c metaConfig) calm() bool {
	return c.pages == metaRoomy && c.quiet == 1 && c.patience >= 1000 && c.delay <= 100 && c.healthy() && c.atoms == 0 &&
		c.inflight == 100 && c.readCredit == 4096 && c.writeCredit >= 1
}

// healthy says that no tier of it fails, loses or is late, and that the core
// remembers more answers of tiers than one lookup needs. (With fewer, it asks
// for them again until the lookup's time is up.)
func (c metaConfig) healthy() bool {
	return c.faults+c.hang+c.lose+c.torn+c.down == 0 && c.delay <= 50*c.patience && c.facts >= 1024
}

// metaRelations are those between two runs. What holds in each run alone is in
// metarun_test.go: bytes returned are those stored; hits are a subset of what
// was committed; a pinned key never misses; a reset and a restart invent no key;
// what a healthy tier has acknowledged is found; idle is zero.
var metaRelations = map[string]metaRelation{
	// With room for everything, no faults and quiet queues, verdicts agree in
	// every configuration that has a secondary, and in every one that has none:
	// the primary has all that was committed, or finds it below.
	"agree": {
		func(a, b metaConfig) bool { return a.calm() && b.calm() && (a.tiers == "") == (b.tiers == "") },
		func(ops []metaOp, a, b *metaRun) error { return sameAnswers(ops, a, b, len(ops)) },
	},
	// A secondary shows only when the primary has been emptied, and then it only
	// adds. (A longer prefix of one group never shortens that of another.)
	"tiers-add": {
		func(a, b metaConfig) bool { return a.calm() && b.calm() && a.tiers == "" && b.tiers != "" },
		func(ops []metaOp, a, b *metaRun) error {
			wiped := slices.IndexFunc(ops, func(o metaOp) bool { return o.verb == "reset" || o.verb == "restart" })
			if wiped < 0 {
				wiped = len(ops)
			}
			if err := sameAnswers(ops, a, b, wiped); err != nil {
				return err
			}
			for i := wiped; i < len(ops); i++ {
				if a.said[i].looked && a.said[i].tokens > b.said[i].tokens {
					return fmt.Errorf("operation %d (%s) finds %d tokens without a secondary, %d with", i, ops[i], a.said[i].tokens, b.said[i].tokens)
				}
			}
			return nil
		},
	},
	// A larger LRU hits whatever a smaller one hits. That is true of one size
	// class, without secondaries (whose copies make victims, and promotions
	// insert what only one of the two missed), and of references to one block at
	// a time with nothing pinned between them: each moves its block to the young
	// end of both, or stores it in the one or both that lack it, so that the
	// smaller stays the younger part of the larger. It is not true of a prefix of
	// several blocks, which ends sooner in the smaller and then leaves alone what
	// the larger touches.
	"larger-lru": {
		func(a, b metaConfig) bool {
			one := func(c metaConfig) bool {
				return c.atoms == 1 && c.tiers == "" && c.policy == "lru" && strings.Trim(c.mix, c.mix[:1]) == ""
			}
			return one(a) && one(b) && a.mix == b.mix && a.pages/a.extent*(a.extent/int(a.mix[0]-'0')) <= b.pages/b.extent*(b.extent/int(b.mix[0]-'0'))
		},
		func(ops []metaOp, a, b *metaRun) error {
			for i := range ops {
				for j, hit := range a.said[i].atoms {
					if hit && !b.said[i].atoms[j] {
						return fmt.Errorf("operation %d (%s): block %d of it is a Hit in the smaller primary and a Miss in the larger", i, ops[i], j)
					}
				}
			}
			return nil
		},
	},
	// Peeks and the salt of the index change nothing (a policy may count by hash,
	// and then the salt shows when two collide; LRU does not); nor does the size of extents
	// when all blocks have one size. Here everything must be the same, the times
	// of answers included, also with faults and without room. (A reset goes by
	// slot numbers, which extents change: who is told first may differ.)
	"same": {
		func(a, b metaConfig) bool {
			a.peeks = b.peeks
			if a.policy == "lru" {
				a.salt = b.salt
			}
			if a.mix == "111" && a.pages%a.extent == 0 && b.pages%b.extent == 0 && a.noReset == 1 {
				a.extent = b.extent
			}
			return a == b
		},
		func(ops []metaOp, a, b *metaRun) error {
			for i := range ops {
				if a.said[i].text != b.said[i].text || a.said[i].at != b.said[i].at {
					return fmt.Errorf("operation %d (%s): %s at %d in one, %s at %d in the other", i, ops[i], a.said[i].text, a.said[i].at, b.said[i].text, b.said[i].at)
				}
			}
			return nil
		},
	},
}

func sameAnswers(ops []metaOp, a, b *metaRun, n int) error {
	for i := range n {
		if a.said[i].text != b.said[i].text {
			return fmt.Errorf("operation %d (%s): %s in one, %s in the other", i, ops[i], a.said[i].text, b.said[i].text)
		}
	}
	return nil
}

// metaPlan lists what is checked of a seed.
func metaPlan(seed uint64) (plan []metaCheck) {
	alone := func(s string) { plan = append(plan, metaCheck{metaAlone, []metaConfig{mustMeta(s)}}) }
	pair := func(relation, a, b string) {
		plan = append(plan, metaCheck{relation, []metaConfig{mustMeta(a), mustMeta(b)}})
	}
	const (
		calm  = "quiet=1 patience=100000 "
		tiny  = "pages=16 extent=4 inflight=50 delay=20 "
		rough = "faults=10 hang=20 lose=10 torn=5 down=3 stray=10 "
	)
	// All that agree, and what tiers add.
	for _, p := range policy.Names() {
		for _, s := range []string{"mix=123 extent=16", "mix=222 tiers=k delay=50", "tiers=p delay=20", "mix=321 tiers=sk delay=100 write=1", "mix=132 extent=8 tiers=pp delay=7 reserve=30"} {
			plain := calm + "tiers=k"
			if !strings.Contains(s, "tiers") {
				plain = calm
			}
			pair("agree", plain, calm+"policy="+p+" "+s)
		}
	}
	pair("tiers-add", calm+"mix=212 extent=8", calm+"tiers=kp delay=20")
	// A larger LRU.
	sizes := []string{"pages=4 extent=4", "pages=6 extent=4", "pages=9 extent=4", "pages=16 extent=8", "pages=40 extent=4"}
	for i := 1; i < len(sizes); i++ {
		pair("larger-lru", "atoms=1 "+sizes[i-1], "atoms=1 "+sizes[i])
	}
	pair("larger-lru", "atoms=1 mix=222 pages=12 extent=4", "atoms=1 mix=222 pages=24 extent=8")
	// What must not matter.
	pair("same", tiny+rough+"tiers=pk", tiny+rough+"tiers=pk salt=7")
	pair("same", tiny+rough+"tiers=ks mix=123", tiny+rough+"tiers=ks mix=123 peeks=1")
	pair("same", tiny+rough+"tiers=pk noreset=1", tiny+rough+"tiers=pk noreset=1 extent=16")
	// What holds alone.
	for _, p := range policy.Names() {
		p = "policy=" + p + " "
		alone(p + tiny)
		alone(p + tiny + "mix=123")
		alone(p + tiny + "tiers=k")
		alone(p + tiny + "tiers=p mix=212")
		alone(p + tiny + rough + "tiers=k mix=123")
		alone(p + tiny + rough + "tiers=ps")
	}
	alone("pages=8 extent=4 tiers=k inflight=50")
	alone("pages=64 extent=8 tiers=sp mix=321 delay=250 hang=10") // slower than every bound
	alone("tiers=kp delay=30 " + rough)                           // roomy
	alone("tiers=p delay=30 read=3 write=1")
	r := rand.New(rand.NewPCG(seed, 0xc0f1))
	for range 8 {
		plan = append(plan, metaCheck{metaAlone, []metaConfig{drawMeta(r)}})
	}
	twin := drawMeta(r)
	other := twin
	if other.peeks = 1; other.policy == "lru" {
		other.salt = 1 + r.IntN(100)
	}
	return append(plan, metaCheck{"same", []metaConfig{twin, other}})
}

// metaRuns remembers the runs of one list of operations: configurations stand in
// several checks.
type metaRuns struct {
	ops  []metaOp
	bug  metaBug
	all  bool // check all invariants after each operation
	runs map[metaConfig]*metaRun
	did  metaDid
}

func (m *metaRuns) run(c metaConfig) *metaRun {
	r := m.runs[c]
	if r == nil {
		r = runMeta(m.ops, c, m.bug, m.all)
		m.runs[c] = r
		m.did.add(r.did)
	}
	return r
}

// check says how a check fails, nil if it does not.
func (m *metaRuns) check(k metaCheck) *metaFailure {
	for _, c := range k.configs {
		if r := m.run(c); r.failed != nil {
			return r.failed
		}
	}
	if k.relation == metaAlone {
		return nil
	}
	rel := metaRelations[k.relation]
	if !rel.valid(k.configs[0], k.configs[1]) {
		return nil
	}
	if err := rel.holds(m.ops, m.run(k.configs[0]), m.run(k.configs[1])); err != nil {
		return &metaFailure{k.relation, err.Error()}
	}
	return nil
}

func checkMeta(ops []metaOp, bug metaBug, k metaCheck) *metaFailure {
	return (&metaRuns{ops: ops, bug: bug, all: true, runs: map[metaConfig]*metaRun{}}).check(k)
}

// reduceMeta shrinks what fails: first to the one configuration that fails by
// itself, then the operations, then what they and the configurations say, as
// long as the same relation fails.
func reduceMeta(ops []metaOp, bug metaBug, k metaCheck, f *metaFailure, within time.Duration) ([]metaOp, metaCheck, *metaFailure) {
	until := time.Now().Add(within)
	if g := checkMeta(ops, bug, k); g != nil {
		f = g // with all invariants checked it may contradict itself earlier
	}
	try := func(o []metaOp, c metaCheck) bool {
		if time.Now().After(until) {
			return false
		}
		g := checkMeta(o, bug, c)
		if g == nil || g.relation != f.relation {
			return false
		}
		ops, k, f = o, c, g
		return true
	}
	if k.relation != metaAlone {
		for _, c := range k.configs {
			if try(ops, metaCheck{metaAlone, []metaConfig{c}}) {
				break
			}
		}
	}
	shorter := func() {
		reduce(ops, until, func(o []metaOp) bool { return try(o, k) })
	}
	shorter()
	for again := true; again && time.Now().Before(until); {
		again = false
		for i := range metaFields {
			fld := &metaFields[i]
			next := metaCheck{k.relation, slices.Clone(k.configs)}
			for j := range next.configs {
				fld.reset(&next.configs[j])
			}
			if !slices.Equal(next.configs, k.configs) && try(ops, next) {
				again = true
			}
		}
		for i := 0; i+1 < len(ops); i++ {
			if ops[i].verb == "sleep" && ops[i+1].verb == "sleep" {
				o := slices.Delete(slices.Clone(ops), i, i+1)
				o[i].args = []metaArg{{"for", ops[i].get("for") + ops[i+1].get("for")}}
				if try(o, k) {
					again = true
					i--
				}
			}
		}
		for i := range ops {
			for j := len(ops[i].args) - 1; j >= 0; j-- {
				for _, to := range []int{0, ops[i].args[j].n / 2, ops[i].args[j].n - 1} {
					o := slices.Clone(ops)
					o[i].args = slices.Clone(o[i].args)
					if o[i].args[j].n = to; to == 0 {
						o[i].args = slices.Delete(o[i].args, j, j+1)
					}
					if to < ops[i].args[j].n && try(o, k) {
						again = true
						break
					}
				}
			}
		}
		if again {
			shorter()
		}
	}
	return ops, k, f
}

// metaText is a file of operations: the check, if it is one, and the list.
func metaText(k metaCheck, ops []metaOp) string {
	var out []string
	if k.relation != "" {
		out = append(out, "check "+k.relation)
	}
	for _, c := range k.configs {
		out = append(out, "config "+c.String())
	}
	for _, o := range ops {
		out = append(out, o.String())
	}
	return strings.Join(out, "\n") + "\n"
}

// parseMeta reads what metaText wrote. Empty lines and what follows a # are
// ignored. Without a check, all are made.
func parseMeta(text string) (k metaCheck, ops []metaOp, err error) {
	for n, line := range strings.FieldsFunc(text, func(r rune) bool { return r == '\n' || r == ';' }) {
		line, _, _ = strings.Cut(line, "#")
		verb, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		var c metaConfig
		var o metaOp
		switch verb {
		case "":
			continue
		case "check":
			k.relation = strings.TrimSpace(rest)
		case "config":
			if c, err = parseMetaConfig(rest); err == nil {
				k.configs = append(k.configs, c)
			}
		default:
			if o, err = parseMetaOp(line); err == nil {
				ops = append(ops, o)
			}
		}
		if err != nil {
			return k, ops, fmt.Errorf("line %d: %w", n+1, err)
		}
	}
	want := 2
	if k.relation == metaAlone {
		want = 1
	} else if k.relation == "" {
		want = 0
	} else if _, ok := metaRelations[k.relation]; !ok {
		return k, ops, fmt.Errorf("unknown relation %q", k.relation)
	}
	if len(k.configs) != want {
		return k, ops, fmt.Errorf("check %q has %d configurations, want %d", k.relation, len(k.configs), want)
	}
	return k, ops, nil
}

// --- the tests ---

const (
	metaOpsPerSeed   = 300
	metaReduceWithin = 30 * time.Second
)

// metaReport reduces a failure and tells it with what replays it.
func metaReport(t *testing.T, what string, ops []metaOp, bug metaBug, k metaCheck, f *metaFailure) {
	t.Helper()
	began := time.Now()
	small, sk, sf := reduceMeta(ops, bug, k, f, metaReduceWithin)
	text := metaText(sk, small)
	t.Fatalf("%s: %s fails: %v\nconfigurations: %v\n\nreduced from %d to %d operations in %v: %v\n\n%s\nreplay: go test ./internal/core -run 'TestMeta$' -core.meta.ops='%s'",
		what, k.relation, f, k.configs, len(ops), len(small), time.Since(began).Round(time.Millisecond), sf, text,
		strings.ReplaceAll(strings.TrimSpace(text), "\n", "; "))
}

func metaSeed(t *testing.T, seed uint64) metaDid {
	t.Helper()
	m := &metaRuns{ops: genMeta(seed, metaOpsPerSeed), runs: map[metaConfig]*metaRun{}}
	for _, k := range metaPlan(seed) {
		if f := m.check(k); f != nil {
			metaReport(t, fmt.Sprintf("seed %d (-core.meta.seed=%d)", seed, seed), m.ops, metaHonest, k, f)
		}
	}
	return m.did
}

// TestMeta runs the operations of fixed seeds and a fresh one under every
// configuration of the plan.
func TestMeta(t *testing.T) {
	fresh := uint64(time.Now().UnixNano())
	switch {
	case *metaOpsFlag != "":
		metaReplay(t, *metaOpsFlag)
		return
	case *metaSeedFlag != 0:
		if *metaDump {
			t.Logf("\n%s", metaText(metaCheck{}, genMeta(*metaSeedFlag, metaOpsPerSeed)))
		}
		metaSeed(t, *metaSeedFlag)
		return
	case *metaLongFlag > 0:
		n, did := uint64(0), metaDid{}
		for end := time.Now().Add(*metaLongFlag); time.Now().Before(end); n++ {
			did.add(metaSeed(t, fresh+n))
		}
		t.Logf("%d seeds from %d: %+v", n, fresh, did)
		return
	}
	seeds := uint64(40)
	switch {
	case testing.Short():
		seeds = 2
	case raceEnabled:
		seeds = 3
	}
	var did metaDid
	for seed := range seeds {
		did.add(metaSeed(t, seed+1))
	}
	t.Logf("fresh seed %d", fresh)
	did.add(metaSeed(t, fresh))
	t.Logf("%d seeds: %+v", seeds+1, did)
	if !testing.Short() && min(did.leases, did.stored, did.promoted, did.evicted, did.taken, did.refused, did.expired, did.late, did.failed, did.resets, did.restarts) == 0 {
		t.Errorf("something never happens: %+v", did)
	}
}

func metaReplay(t *testing.T, text string) {
	if !strings.ContainsAny(text, "\n;") {
		b, err := os.ReadFile(text)
		if err != nil {
			t.Fatal(err)
		}
		text = string(b)
	}
	k, ops, err := parseMeta(text)
	if err != nil {
		t.Fatal(err)
	}
	plan := []metaCheck{k}
	if k.relation == "" {
		plan = metaPlan(cmp.Or(*metaSeedFlag, 1))
	} else if k.relation != metaAlone && !metaRelations[k.relation].valid(k.configs[0], k.configs[1]) {
		t.Fatalf("%s is not promised between %v", k.relation, k.configs)
	}
	m := &metaRuns{ops: ops, runs: map[metaConfig]*metaRun{}}
	for _, k := range plan {
		f := m.check(k)
		if *metaDump {
			for _, c := range k.configs {
				t.Logf("config %v\n%s", c, m.run(c).dump(ops))
			}
		}
		if f != nil {
			metaReport(t, "replay", ops, metaHonest, k, f)
		}
	}
}

// TestMetaText: what is printed is what is parsed, and a run can be repeated.
func TestMetaText(t *testing.T) {
	for seed := uint64(1); seed <= 20; seed++ {
		ops := genMeta(seed, 100)
		for _, k := range metaPlan(seed) {
			text := metaText(k, ops)
			gk, gops, err := parseMeta(text)
			if err != nil || metaText(gk, gops) != text {
				t.Fatalf("seed %d: %v; a text that is parsed and printed differs:\n%s", seed, err, text)
			}
			if k.relation != metaAlone && !metaRelations[k.relation].valid(k.configs[0], k.configs[1]) {
				t.Errorf("the plan compares what %s does not hold between: %v", k.relation, k.configs)
			}
		}
		c := drawMeta(rand.New(rand.NewPCG(seed, 1)))
		a, b := runMeta(ops, c, metaHonest, false), runMeta(ops, c, metaHonest, true)
		if a.dump(ops) != b.dump(ops) {
			t.Errorf("seed %d: two runs differ", seed)
		}
	}
	for _, bad := range []string{"lokup s0/a", "lookup s0", "open s0/a", "space s0", "sleep for=x", "sleep for", "sleep wait=1", "new s0/a maxload=-1", "config pages=3", "config a=1",
		"config mix=411", "config policy=none", "check agree\nconfig pages=16", "check none\nconfig plain\nconfig plain", "config plain"} {
		if _, _, err := parseMeta(bad); err == nil {
			t.Errorf("%q is taken for operations", bad)
		}
	}
}

// TestMetaCanary breaks the core in ways that one relation each must notice, and
// wants the reducer to show them in a few operations.
func TestMetaCanary(t *testing.T) {
	for bug := metaHonest + 1; bug < metaBugEnd; bug++ {
		t.Run(bug.String(), func(t *testing.T) {
			relation := metaBugs[bug].relation
			_, pair := metaRelations[relation]
			for n := range uint64(60) {
				seed := max(n, 1)
				if n == 0 { // one that is known to do
					seed = metaBugs[bug].seed
				}
				m := &metaRuns{ops: genMeta(seed, metaOpsPerSeed), bug: bug, runs: map[metaConfig]*metaRun{}}
				for _, k := range metaPlan(seed) {
					if (k.relation == relation) != pair || !pair && k.relation != metaAlone {
						continue
					}
					f := m.check(k)
					if f == nil || f.relation != relation {
						continue
					}
					small, sk, sf := reduceMeta(m.ops, bug, k, f, metaReduceWithin)
					if g := checkMeta(small, bug, sk); g == nil || g.relation != relation {
						t.Fatalf("seed %d: %v was reduced to what fails with %v", seed, f, g)
					}
					if g := checkMeta(small, metaHonest, sk); g != nil {
						t.Fatalf("seed %d: reduced to what fails without the bug: %v", seed, g)
					}
					if len(small) >= 20 {
						t.Fatalf("seed %d: %v is reduced to %d operations:\n%s", seed, f, len(small), metaText(sk, small))
					}
					t.Logf("seed %d: %v\n%d operations: %v\n%s", seed, f, len(small), sf, metaText(sk, small))
					return
				}
			}
			t.Fatal("no seed notices")
		})
	}
}
