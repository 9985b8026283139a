package peer

import (
	"flag"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// The two tables below say what becomes of a round in each of its states when
// anything happens that can happen: one for who fetches, one for who is asked.
// A cell is what the machine does, in order, and where the round is then. The
// tests walk all cells, and after each cell they end everything and see that
// nothing is left.

var tableShow = flag.Bool("peer.table", false, "print the tables as they are")

// tableState brings a box into a state, tableEvent is what happens in it.
type (
	tableState struct {
		name string
		do   func(b *tableBox)
	}
	tableEvent struct {
		name string
		do   func(b *tableBox)
	}
)

// tableBox is a box with the names that states and events use.
type tableBox struct {
	*box
	conn  ConnID
	nonce uint64 // of source 1
	serve ServeID
}

// shown is effects in few words.
func shown(fx []Effect) string {
	var out []string
	add := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	for _, e := range fx {
		switch e := e.(type) {
		case Dial:
			add("dial")
		case Send:
			switch m := e.Msg.(type) {
			case *Ping, *Pong, *Namespaces:
			case *Hello:
				add("hello")
			case *Welcome:
				add("welcome")
			case *Lookup:
				add("lookup %d", m.Round)
			case *Answer:
				add("answer %d %v %b", m.Round, m.Code, m.Found)
			case *Fetch:
				add("fetch %d", m.Round)
			case *Failed:
				add("failed %d %v %v", m.Round, m.Code, m.Indexes)
			case *Abort:
				add("abort %d", m.Round)
			case *AbortAck:
				add("ack %d", m.Round)
			case *Finished:
				add("finished%s", map[bool]string{true: ", complete"}[m.Complete])
			case *Bye:
				add("bye %v", m.Code)
			}
		case CloseConn:
			add("close")
		case Grant:
			add("grant %d", e.Index)
		case Revoke:
			add("revoke %v", e.Indexes)
		case Report:
			s := fmt.Sprintf("job %d:", e.Job)
			for _, r := range e.Results {
				what := r.Code.String()
				if r.Class.String() == "cancelled" {
					what = "cancelled"
				}
				s += fmt.Sprintf(" %d %s", r.Index, what)
			}
			if e.Last {
				s += " over"
			}
			out = append(out, s)
		case ReportProbe:
			n := 0
			for _, f := range e.Found {
				if f {
					n++
				}
			}
			add("probe %d: %v %d", e.Job, e.Code, n)
		case Serve:
			add("ask %d", len(e.Keys))
		case Transmit:
			add("send %d", len(e.Blocks))
		case Unsend:
			add("unsend")
		case Release:
			add("unpin")
		case ServeEnd:
			add("end")
		case ReleaseSupply:
			add("give up supply")
		case DialData, Expect, Note:
		}
	}
	if len(out) == 0 {
		return "nothing"
	}
	return strings.Join(out, "; ")
}

// walk compares all cells with a table, and ends everything after each.
func walk(t *testing.T, table string, states []tableState, events []tableEvent, fresh func(t *testing.T) *tableBox, where func(b *tableBox) string, end func(b *tableBox)) {
	want := map[string]string{}
	state, cell := "", ""
	for line := range strings.Lines(table) {
		line = strings.TrimRight(line, "\n")
		switch {
		case line == "":
		case !strings.HasPrefix(line, "\t"):
			state = line
		case !strings.HasPrefix(line, "\t\t"):
			cell = line[1:]
		default:
			for _, name := range strings.Split(line[2:], " | ") {
				if want[state+" / "+name] != "" {
					t.Errorf("%s / %s stands twice", state, name)
				}
				want[state+" / "+name] = cell
			}
		}
	}
	var show strings.Builder
	for _, s := range states {
		fmt.Fprintf(&show, "%s\n", s.name)
		var order []string
		by := map[string][]string{}
		for _, e := range events {
			b := fresh(t)
			s.do(b)
			b.take()
			e.do(b)
			got := shown(b.take()) + " → " + where(b)
			if by[got] == nil {
				order = append(order, got)
			}
			by[got] = append(by[got], e.name)
			cell := s.name + " / " + e.name
			if w, ok := want[cell]; !ok {
				t.Errorf("%s is not in the table: %s", cell, got)
			} else if w != got && !*tableShow {
				t.Errorf("%s:\n got %s\nwant %s", cell, got, w)
			}
			delete(want, cell)
			end(b)
			b.empty()
		}
		for _, got := range order {
			fmt.Fprintf(&show, "\t%s\n\t\t%s\n", got, strings.Join(by[got], " | "))
		}
	}
	for cell := range want {
		t.Errorf("%s is in the table, and no state or event", cell)
	}
	if *tableShow {
		fmt.Println(show.String())
	}
	t.Logf("%d states, %d events, %d cells", len(states), len(events), len(states)*len(events))
}

func (b *tableBox) lookup1() {
	b.source(1, "p:1", RoleProbe)
	b.probe(1, 1, 1, 2)
	b.conn = b.dial("p:1", "p")
	b.nonce = sends[*Lookup](b.fx)[0].Nonce
}

func (b *tableBox) fetch1(role Role) {
	b.source(1, "p:1", role)
	b.submit(1, 1, 1, 2)
	b.conn = b.dial("p:1", "p")
	b.nonce = sends[*Fetch](b.fx)[0].Nonce
}

func (b *tableBox) arrived(i uint32, ok bool) {
	b.m.Arrived(b.now, b.conn, b.nonce, 1, i, ok, 7)
	b.look()
}

func (b *tableBox) detached(i uint32) {
	b.m.Detached(b.now, b.conn, b.nonce, 1, i)
	b.look()
}

var consumerStates = []tableState{
	{"no source", func(b *tableBox) { b.conn = b.accept("p") }},
	{"no round", func(b *tableBox) {
		b.conn = b.accept("p")
		b.source(1, "p:1", RoleProbe)
	}},
	{"waiting for a session", func(b *tableBox) {
		b.source(1, "p:1", RoleAssume)
		b.submit(1, 1, 1, 2)
	}},
	{"lookup waiting for a session", func(b *tableBox) {
		b.source(1, "p:1", RoleProbe)
		b.probe(1, 1, 1, 2)
	}},
	{"greeting", func(b *tableBox) {
		b.source(1, "p:1", RoleAssume)
		b.submit(1, 1, 1, 2)
		b.conn = b.connected("p:1")
	}},
	{"welcomed, not taken", func(b *tableBox) {
		b.source(1, "p:1", RoleAssume)
		b.submit(1, 1, 1, 2)
		b.conn = b.connected("p:1")
		b.hear(b.conn, &Welcome{Version: Version, Node: "p", Boot: "1", Advertise: "p:1"})
	}},
	{"looked up, unanswered", func(b *tableBox) { b.lookup1() }},
	{"answered", func(b *tableBox) {
		b.lookup1()
		b.hear(b.conn, &Answer{Nonce: b.nonce, Round: 1, Found: []byte{3}})
	}},
	{"fetching, nothing arrived", func(b *tableBox) { b.fetch1(RoleProbe) }},
	{"fetching, some arrived", func(b *tableBox) {
		b.fetch1(RoleAssume)
		b.arrived(0, true)
	}},
	{"fetching, some failed and not quiet", func(b *tableBox) {
		b.fetch1(RoleAssume)
		b.hear(b.conn, &Failed{Nonce: b.nonce, Round: 1, Code: CodeAbsent, Indexes: []uint32{0}})
	}},
	{"aborted, not acknowledged", func(b *tableBox) {
		b.fetch1(RoleAssume)
		b.m.Cancel(b.now, 1)
	}},
	{"aborted and quiet, not acknowledged", func(b *tableBox) {
		b.fetch1(RoleAssume)
		b.m.Cancel(b.now, 1)
		b.detached(0)
		b.detached(1)
	}},
	{"aborted and acknowledged, not quiet", func(b *tableBox) {
		b.fetch1(RoleAssume)
		b.m.Cancel(b.now, 1)
		b.hear(b.conn, &AbortAck{Nonce: b.nonce, Round: 1})
	}},
	{"session closing", func(b *tableBox) {
		b.fetch1(RoleAssume)
		b.hear(b.conn, &Welcome{Version: Version, Node: "p", Boot: "1"})
	}},
	{"session gives way to another", func(b *tableBox) {
		b.fetch1(RoleAssume)
		b.hear(b.conn, &Bye{Code: CodeDuplicate})
	}},
	{"peer down", func(b *tableBox) {
		b.source(1, "p:1", RoleAssume)
		b.submit(1, 1, 1, 2)
		b.m.DialFailed(b.now, "p:1", "no")
	}},
	{"draining while fetching", func(b *tableBox) {
		b.fetch1(RoleAssume)
		b.m.Drain(b.now)
	}},
}

// lively passes time in which the peer answers pings.
func lively(d time.Duration) func(b *tableBox) {
	return func(b *tableBox) { b.live(d) }
}

func heard(m func(b *tableBox) Message) func(b *tableBox) {
	return func(b *tableBox) { b.hear(b.conn, m(b)) }
}

var consumerEvents = []tableEvent{
	{"fetch", func(b *tableBox) { b.submit(2, 1, 3) }},
	{"fetch for the same job", func(b *tableBox) {
		if b.m.rounds[1] == nil { // else it would be reported under the other's name: a fault of the core's
			b.submit(4, 1, 1, 2)
		}
	}},
	{"lookup", func(b *tableBox) { b.probe(3, 1, 3) }},
	{"cancel", func(b *tableBox) { b.m.Cancel(b.now, 1) }},
	{"finish", func(b *tableBox) { b.m.CloseSource(b.now, 1) }},
	{"finish twice", func(b *tableBox) { b.m.CloseSource(b.now, 1); b.m.CloseSource(b.now, 1) }},
	{"id used again at once", func(b *tableBox) {
		b.m.CloseSource(b.now, 1)
		b.source(2, "p:1", RoleAssume)
		b.submit(5, 2, 1)
	}},
	{"drain", func(b *tableBox) { b.m.Drain(b.now) }},
	{"stop", func(b *tableBox) { b.m.Close(b.now) }},
	{"session lost", func(b *tableBox) {
		if b.conn != 0 {
			b.lose(b.conn)
		}
	}},
	{"bye", heard(func(b *tableBox) Message { return &Bye{Code: CodeDraining} })},
	{"bye, idle", heard(func(b *tableBox) Message { return &Bye{Code: CodeIdle} })},
	{"bye and lost, duplicate", func(b *tableBox) {
		b.hear(b.conn, &Bye{Code: CodeDuplicate})
		if b.conn != 0 {
			b.lose(b.conn)
		}
	}},
	{"peer connects", func(b *tableBox) {
		c := b.connected("")
		b.hear(c, hello("p", "1"))
	}},
	{"peer connects after a restart", func(b *tableBox) {
		c := b.connected("")
		b.hear(c, hello("p", "2"))
	}},
	{"dial fails", func(b *tableBox) { b.m.DialFailed(b.now, "p:1", "no") }},
	{"welcome", heard(func(b *tableBox) Message { return &Welcome{Version: Version, Node: "p", Boot: "1"} })},
	{"namespaces", heard(func(b *tableBox) Message { return &Namespaces{Specs: [][]byte{b.ns.JSON()}} })},
	{"answer, found", heard(func(b *tableBox) Message { return &Answer{Nonce: b.nonce, Round: 1, Found: []byte{1}} })},
	{"answer, none", heard(func(b *tableBox) Message { return &Answer{Nonce: b.nonce, Round: 1, Found: []byte{0}} })},
	{"answer, refused", heard(func(b *tableBox) Message { return &Answer{Nonce: b.nonce, Round: 1, Code: CodeBusy} })},
	{"answer of another size", heard(func(b *tableBox) Message { return &Answer{Nonce: b.nonce, Round: 1, Found: []byte{1, 1}} })},
	{"failed, one", heard(func(b *tableBox) Message {
		return &Failed{Nonce: b.nonce, Round: 1, Code: CodeAbsent, Indexes: []uint32{1, 1}}
	})},
	{"failed, all", heard(func(b *tableBox) Message { return &Failed{Nonce: b.nonce, Round: 1, Code: CodeTimeout} })},
	{"failed, one that is none", heard(func(b *tableBox) Message {
		return &Failed{Nonce: b.nonce, Round: 1, Code: CodeAbsent, Indexes: []uint32{2}}
	})},
	{"failed, of another round", heard(func(b *tableBox) Message { return &Failed{Nonce: b.nonce + 1, Round: 1, Code: CodeAbsent} })},
	{"acknowledged", heard(func(b *tableBox) Message { return &AbortAck{Nonce: b.nonce, Round: 1} })},
	{"arrived", func(b *tableBox) { b.arrived(1, true) }},
	{"arrived twice", func(b *tableBox) { b.arrived(1, true); b.arrived(1, true) }},
	{"arrived wrong", func(b *tableBox) { b.arrived(1, false) }},
	{"detached", func(b *tableBox) { b.detached(0) }},
	{"detached twice", func(b *tableBox) { b.detached(0); b.detached(0) }},
	{"all arrived", func(b *tableBox) { b.arrived(0, true); b.arrived(1, true) }},
	{"deadline", func(b *tableBox) {
		lively(30 * time.Second)(b)
		b.m.Cancel(b.now, 1)
	}},
	{"peer answers pings only", lively(6 * time.Second)},
	{"silence", func(b *tableBox) { b.pass(7 * time.Second) }},
}

func TestConsumerTable(t *testing.T) {
	fresh := func(t *testing.T) *tableBox { return &tableBox{box: newBox(t, Options{Node: "z"})} }
	where := func(b *tableBox) string {
		r := b.m.rounds[1]
		switch {
		case r == nil:
			return "gone"
		case r.s == nil:
			return "waiting"
		case r.items == nil:
			return "looking"
		}
		open, loud := 0, 0
		for i := range r.items {
			if !r.items[i].settled {
				open++
			}
			if !r.items[i].quiet {
				loud++
			}
		}
		return fmt.Sprintf("%d open, %d loud", open, loud)
	}
	end := func(b *tableBox) {
		b.m.CloseSource(b.now, 1)
		b.m.CloseSource(b.now, 2)
		for l := b.m.links["p:1"]; l != nil && l.dialing; { // a transport answers each dial
			b.m.DialFailed(b.now, "p:1", "no")
		}
		b.look()
	}
	walk(t, consumerTable, consumerStates, consumerEvents, fresh, where, end)
}

// askedFor answers what the core was asked last.
func (b *tableBox) askedFor(found ...Found) {
	if s := of[Serve](b.fx); len(s) > 0 {
		b.serve = s[len(s)-1].ID
	}
	b.served(b.serve, found...)
}

func (b *tableBox) in(await bool) {
	b.conn = b.accept("p")
	b.hear(b.conn, b.fetchOf(1, 1, await, 1, 2, 3))
}

var producerStates = []tableState{
	{"nothing", func(b *tableBox) { b.conn = b.accept("p") }},
	{"nothing, supply open", func(b *tableBox) {
		b.conn = b.accept("p")
		b.supply("kv", 1, SupplyOpen)
	}},
	{"nothing, supply ended", func(b *tableBox) {
		b.conn = b.accept("p")
		b.supply("kv", 1, SupplyOpen)
		b.supply("kv", 1, SupplyFinal)
		b.supply("kv", 1, SupplyEnded)
	}},
	{"looking", func(b *tableBox) {
		b.conn = b.accept("p")
		b.hear(b.conn, b.lookupOf(1, 1, 1, 2, 3))
	}},
	{"answered", func(b *tableBox) {
		b.conn = b.accept("p")
		b.hear(b.conn, b.lookupOf(1, 1, 1, 2, 3))
		b.askedFor(pinned(1), pinned(2), absent)
	}},
	{"fetching, core asked", func(b *tableBox) { b.in(false) }},
	{"fetching, core knows more soon", func(b *tableBox) {
		b.in(false)
		b.askedFor(pinned(1), Found{Code: CodeAbsent, Pending: true}, absent)
	}},
	{"fetching, waiting for room", func(b *tableBox) {
		b.conn = b.accept("p")
		b.hear(b.conn, b.fetchOf(1, 1, false, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10))
		b.askedFor(slices.Repeat([]Found{pinned(1)}, 8)...)
	}},
	{"parked, core asked", func(b *tableBox) { b.in(true) }},
	{"parked", func(b *tableBox) {
		b.in(true)
		b.askedFor(pinned(1), absent, absent)
		b.sent(b.serve, 0, true)
	}},
	{"awaiting a supply, core asked", func(b *tableBox) {
		b.supply("kv", 1, SupplyOpen)
		b.in(true)
	}},
	{"awaiting a supply", func(b *tableBox) {
		b.supply("kv", 1, SupplyOpen)
		b.in(true)
		b.askedFor(pinned(1), absent, absent)
	}},
	{"awaiting a supply that is final", func(b *tableBox) {
		b.supply("kv", 1, SupplyOpen)
		b.supply("kv", 1, SupplyFinal)
		b.in(true)
		b.askedFor(pinned(1), Found{Code: CodeAbsent, Pending: true}, absent)
	}},
	{"sending", func(b *tableBox) {
		b.in(false)
		b.askedFor(pinned(1), pinned(2), absent)
	}},
	{"aborted while sending", func(b *tableBox) {
		b.in(false)
		b.askedFor(pinned(1), pinned(2), absent)
		b.hear(b.conn, &Abort{Nonce: 1, Round: 1})
	}},
	{"out of time while sending", func(b *tableBox) {
		b.in(false)
		b.askedFor(pinned(1), pinned(2), absent)
		b.live(20 * time.Second)
	}},
	{"session closing", func(b *tableBox) {
		b.in(false)
		b.askedFor(pinned(1), pinned(2), absent)
		b.hear(b.conn, hello("p", "1"))
	}},
	{"fetching in a drain", func(b *tableBox) {
		b.in(false)
		b.m.Drain(b.now)
	}},
}

var producerEvents = []tableEvent{
	{"lookup of the round", heard(func(b *tableBox) Message { return b.lookupOf(1, 1, 1, 2) })},
	{"fetch of the round", heard(func(b *tableBox) Message { return b.fetchOf(1, 1, false, 1, 4) })},
	{"fetch of the round, of another id", heard(func(b *tableBox) Message {
		f := b.fetchOf(1, 1, false, 1, 4)
		f.ID = "other"
		return f
	})},
	{"fetch of the round, awaiting", heard(func(b *tableBox) Message { return b.fetchOf(1, 1, true, 1, 4) })},
	{"another round", heard(func(b *tableBox) Message { return b.fetchOf(1, 2, false, 5) })},
	{"another attempt under the id", heard(func(b *tableBox) Message { return b.fetchOf(2, 1, true, 5) })},
	{"abort", heard(func(b *tableBox) Message { return &Abort{Nonce: 1, Round: 1} })},
	{"abort of another round", heard(func(b *tableBox) Message { return &Abort{Nonce: 1, Round: 9} })},
	{"finished", heard(func(b *tableBox) Message { return &Finished{ID: "kv", Nonce: 1, NS: b.ns.Fingerprint()} })},
	{"finished, complete", heard(func(b *tableBox) Message {
		return &Finished{ID: "kv", Nonce: 1, NS: b.ns.Fingerprint(), Complete: true}
	})},
	{"finished, another attempt", heard(func(b *tableBox) Message {
		return &Finished{ID: "kv", Nonce: 2, NS: b.ns.Fingerprint(), Complete: true}
	})},
	{"supply opens", func(b *tableBox) { b.supply("kv", 2, SupplyOpen) }},
	{"supply has more", func(b *tableBox) { b.supply("kv", 1, SupplyMore) }},
	{"supply is final", func(b *tableBox) { b.supply("kv", 1, SupplyFinal) }},
	{"supply ends", func(b *tableBox) { b.supply("kv", 1, SupplyEnded) }},
	{"core has all", func(b *tableBox) { b.answer(pinned(7)) }},
	{"core has nothing", func(b *tableBox) { b.answer(absent) }},
	{"core knows more soon", func(b *tableBox) { b.answer(Found{Code: CodeAbsent, Pending: true}) }},
	{"core has no room", func(b *tableBox) { b.answer(Found{Code: CodeNoRoom}) }},
	{"core answers nonsense", func(b *tableBox) { b.m.Served(b.now, b.theServe(), make([]Found, 99)) }},
	{"sent", func(b *tableBox) { b.sent(b.theServe(), 0, true) }},
	{"sent twice", func(b *tableBox) { b.sent(b.theServe(), 0, true); b.sent(b.theServe(), 0, true) }},
	{"not sent", func(b *tableBox) { b.sent(b.theServe(), 0, false) }},
	{"all sent", func(b *tableBox) {
		id := b.theServe()
		for i := range uint32(3) {
			b.sent(id, i, true)
		}
	}},
	{"poll", lively(100 * time.Millisecond)},
	{"hits expire", lively(10 * time.Second)},
	{"deadline of the round", lively(20 * time.Second)},
	{"nothing for long", lively(31 * time.Second)},
	{"drain", func(b *tableBox) { b.m.Drain(b.now) }},
	{"stop", func(b *tableBox) { b.m.Close(b.now) }},
	{"session lost", func(b *tableBox) { b.lose(b.conn) }},
	{"bye", heard(func(b *tableBox) Message { return &Bye{Code: CodeIdle} })},
	{"peer connects after a restart", func(b *tableBox) { b.hear(b.connected(""), hello("p", "2")) }},
	{"silence", func(b *tableBox) { b.pass(7 * time.Second) }},
}

// theServe is that of round 1, or one that there is not.
func (b *tableBox) theServe() ServeID {
	if s := b.m.sessions[b.conn]; s != nil {
		if v := s.serves[roundKey{1, 1}]; v != nil {
			b.serve = v.id
		}
	}
	return b.serve
}

// answer answers each key that the core is asked for in the same way.
func (b *tableBox) answer(f Found) {
	if v := b.m.serves[b.theServe()]; v != nil && v.asking != nil {
		b.served(b.serve, slices.Repeat([]Found{f}, len(v.asking))...)
	} else {
		b.m.Served(b.now, b.serve, []Found{f}) // late, and of nobody
	}
}

func TestProducerTable(t *testing.T) {
	fresh := func(t *testing.T) *tableBox {
		b := &tableBox{box: newBox(t, Options{QuotaBytes: 8 * 4096})}
		b.serve = 1 << 40
		return b
	}
	where := func(b *tableBox) string {
		s := b.m.sessions[b.conn]
		if s == nil {
			return "gone"
		}
		v := s.serves[roundKey{1, 1}]
		if v == nil {
			return "gone"
		}
		out := [...]string{"looking", "answered", "fetching"}[v.state]
		switch {
		case v.ended:
			out = "ended"
		case v.park:
			out = "parked"
		case v.supply != nil:
			out = "awaiting"
		}
		return fmt.Sprintf("%s, asked %d, sending %d", out, len(v.asking), v.sending)
	}
	end := func(b *tableBox) {
		for seq := range uint64(3) {
			b.supply("kv", seq, SupplyFinal)
			b.supply("kv", seq, SupplyEnded)
		}
	}
	walk(t, producerTable, producerStates, producerEvents, fresh, where, end)
}

const consumerTable = `
no source
	job 2: 0 failed over → gone
		fetch
	job 4: 0 failed 1 failed over → gone
		fetch for the same job
	probe 3: failed 0 → gone
		lookup
	nothing → gone
		cancel | finish | finish twice | drain | dial fails | namespaces | answer, found | answer, none | answer, refused | answer of another size | failed, one | failed, all | failed, one that is none | failed, of another round | acknowledged | arrived | arrived twice | arrived wrong | detached | detached twice | all arrived | deadline | peer answers pings only
	grant 0; fetch 1 → gone
		id used again at once
	bye draining; close → gone
		stop
	close → gone
		session lost | bye | bye, idle | bye and lost, duplicate
	welcome; bye duplicate; close → gone
		peer connects
	bye duplicate; close; welcome → gone
		peer connects after a restart
	bye protocol; close → gone
		welcome
	bye timeout; close → gone
		silence
no round
	grant 0; fetch 1 → gone
		fetch | id used again at once
	grant 0; grant 1; fetch 1 → gone
		fetch for the same job
	lookup 1 → gone
		lookup
	nothing → gone
		cancel | finish | finish twice | drain | dial fails | namespaces | answer, found | answer, none | answer, refused | answer of another size | failed, one | failed, all | failed, one that is none | failed, of another round | acknowledged | arrived | arrived twice | arrived wrong | detached | detached twice | all arrived | deadline | peer answers pings only
	bye draining; close → gone
		stop
	close → gone
		session lost | bye | bye, idle | bye and lost, duplicate
	welcome; bye duplicate; close → gone
		peer connects
	bye duplicate; close; welcome → gone
		peer connects after a restart
	bye protocol; close → gone
		welcome
	bye timeout; close → gone
		silence
waiting for a session
	nothing → waiting
		fetch | fetch for the same job | lookup | session lost | bye | bye, idle | bye and lost, duplicate | welcome | namespaces | answer, found | answer, none | answer, refused | answer of another size | failed, one | failed, all | failed, one that is none | failed, of another round | acknowledged | arrived | arrived twice | arrived wrong | detached | detached twice | all arrived
	job 1: 0 cancelled 1 cancelled over → gone
		cancel | finish | finish twice | id used again at once
	job 1: 0 draining 1 draining over → gone
		drain | stop
	welcome; grant 0; grant 1; fetch 1 → 2 open, 2 loud
		peer connects | peer connects after a restart
	job 1: 0 unreachable 1 unreachable over → gone
		dial fails | deadline | peer answers pings only | silence
lookup waiting for a session
	nothing → waiting
		fetch | fetch for the same job | lookup | session lost | bye | bye, idle | bye and lost, duplicate | welcome | namespaces | answer, found | answer, none | answer, refused | answer of another size | failed, one | failed, all | failed, one that is none | failed, of another round | acknowledged | arrived | arrived twice | arrived wrong | detached | detached twice | all arrived
	nothing → gone
		cancel | finish | finish twice | id used again at once
	probe 1: draining 0 → gone
		drain | stop
	welcome; lookup 1 → looking
		peer connects | peer connects after a restart
	probe 1: unreachable 0 → gone
		dial fails | deadline | peer answers pings only | silence
greeting
	nothing → waiting
		fetch | fetch for the same job | lookup | dial fails | welcome | arrived | arrived twice | arrived wrong | detached | detached twice | all arrived
	job 1: 0 cancelled 1 cancelled over → gone
		cancel | finish | finish twice | id used again at once
	job 1: 0 draining 1 draining over → gone
		drain
	job 1: 0 draining 1 draining over; bye draining; close → gone
		stop
	close; job 1: 0 unreachable 1 unreachable over → gone
		session lost
	close → waiting
		bye | bye, idle | bye and lost, duplicate
	bye duplicate; close; welcome; grant 0; grant 1; fetch 1 → 2 open, 2 loud
		peer connects | peer connects after a restart
	bye protocol; close → waiting
		namespaces | answer, found | answer, none | answer, refused | answer of another size | failed, one | failed, all | failed, one that is none | failed, of another round | acknowledged
	bye protocol; close; job 1: 0 unreachable 1 unreachable over → gone
		deadline | peer answers pings only
	bye timeout; close; job 1: 0 unreachable 1 unreachable over → gone
		silence
welcomed, not taken
	nothing → waiting
		fetch | fetch for the same job | lookup | dial fails | arrived | arrived twice | arrived wrong | detached | detached twice | all arrived
	job 1: 0 cancelled 1 cancelled over → gone
		cancel | finish | finish twice | id used again at once
	job 1: 0 draining 1 draining over → gone
		drain
	job 1: 0 draining 1 draining over; bye draining; close → gone
		stop
	close; job 1: 0 unreachable 1 unreachable over → gone
		session lost
	close → waiting
		bye | bye, idle | bye and lost, duplicate
	welcome; grant 0; grant 1; fetch 1 → 2 open, 2 loud
		peer connects | peer connects after a restart
	bye protocol; close → waiting
		welcome | answer, found | answer, none | answer, refused | answer of another size | failed, one | failed, all | failed, one that is none | failed, of another round | acknowledged
	grant 0; grant 1; fetch 1 → 2 open, 2 loud
		namespaces
	bye protocol; close; job 1: 0 unreachable 1 unreachable over → gone
		deadline | peer answers pings only
	bye timeout; close; job 1: 0 unreachable 1 unreachable over → gone
		silence
looked up, unanswered
	grant 0; fetch 2 → looking
		fetch
	nothing → looking
		fetch for the same job | drain | dial fails | namespaces | failed, one | failed, all | failed, one that is none | failed, of another round | acknowledged | arrived | arrived twice | arrived wrong | detached | detached twice | all arrived | peer answers pings only
	lookup 2 → looking
		lookup
	abort 1 → gone
		cancel | deadline
	abort 1; finished → gone
		finish | finish twice
	abort 1; finished; grant 0; fetch 1 → gone
		id used again at once
	bye draining; close → looking
		stop
	close; probe 1: unreachable 0 → gone
		session lost
	close → looking
		bye | bye, idle
	close → waiting
		bye and lost, duplicate
	welcome; bye duplicate; close → looking
		peer connects
	bye duplicate; close; welcome → looking
		peer connects after a restart
	bye protocol; close → looking
		welcome | answer of another size
	probe 1: ok 1 → gone
		answer, found
	probe 1: ok 0 → gone
		answer, none
	probe 1: busy 0 → gone
		answer, refused
	bye timeout; close → looking
		silence
answered
	grant 0; fetch 1 → gone
		fetch
	grant 0; grant 1; fetch 1 → gone
		fetch for the same job
	abort 1; lookup 2 → gone
		lookup
	nothing → gone
		cancel | drain | dial fails | namespaces | answer, found | answer, none | answer, refused | answer of another size | failed, one | failed, all | failed, one that is none | failed, of another round | acknowledged | arrived | arrived twice | arrived wrong | detached | detached twice | all arrived | deadline | peer answers pings only
	finished → gone
		finish | finish twice
	finished; grant 0; fetch 1 → gone
		id used again at once
	bye draining; close → gone
		stop
	close → gone
		session lost | bye | bye, idle | bye and lost, duplicate
	welcome; bye duplicate; close → gone
		peer connects
	bye duplicate; close; welcome → gone
		peer connects after a restart
	bye protocol; close → gone
		welcome
	bye timeout; close → gone
		silence
fetching, nothing arrived
	grant 0; fetch 2 → 2 open, 2 loud
		fetch
	nothing → 2 open, 2 loud
		fetch for the same job | drain | dial fails | namespaces | answer, found | answer, none | answer, refused | answer of another size | failed, of another round | acknowledged | peer answers pings only
	lookup 2 → 2 open, 2 loud
		lookup
	abort 1; revoke [0 1] → 0 open, 2 loud
		cancel | deadline
	abort 1; revoke [0 1]; finished → 0 open, 2 loud
		finish | finish twice
	abort 1; revoke [0 1]; finished; grant 0; fetch 1 → 0 open, 2 loud
		id used again at once
	bye draining; close → 2 open, 2 loud
		stop
	close; job 1: 0 unreachable 1 unreachable over → gone
		session lost
	close → 2 open, 2 loud
		bye | bye, idle
	close → waiting
		bye and lost, duplicate
	welcome; bye duplicate; close → 2 open, 2 loud
		peer connects
	bye duplicate; close; welcome → 2 open, 2 loud
		peer connects after a restart
	bye protocol; close → 2 open, 2 loud
		welcome | failed, one that is none
	revoke [1] → 1 open, 2 loud
		failed, one
	revoke [0 1] → 0 open, 2 loud
		failed, all
	job 1: 1 ok → 1 open, 1 loud
		arrived | arrived twice
	job 1: 1 failed → 1 open, 1 loud
		arrived wrong
	nothing → 2 open, 1 loud
		detached | detached twice
	job 1: 0 ok; job 1: 1 ok over → gone
		all arrived
	bye timeout; close → 2 open, 2 loud
		silence
fetching, some arrived
	grant 0; fetch 2 → 1 open, 1 loud
		fetch
	nothing → 1 open, 1 loud
		fetch for the same job | drain | dial fails | namespaces | answer, found | answer, none | answer, refused | answer of another size | failed, of another round | acknowledged | detached | detached twice | peer answers pings only
	lookup 2 → 1 open, 1 loud
		lookup
	abort 1; revoke [1] → 0 open, 1 loud
		cancel | deadline
	abort 1; revoke [1]; finished → 0 open, 1 loud
		finish | finish twice
	abort 1; revoke [1]; finished; grant 0; fetch 1 → 0 open, 1 loud
		id used again at once
	bye draining; close → 1 open, 1 loud
		stop
	close; job 1: 1 unreachable over → gone
		session lost
	close → 1 open, 1 loud
		bye | bye, idle
	close → waiting
		bye and lost, duplicate
	welcome; bye duplicate; close → 1 open, 1 loud
		peer connects
	bye duplicate; close; welcome → 1 open, 1 loud
		peer connects after a restart
	bye protocol; close → 1 open, 1 loud
		welcome | failed, one that is none
	revoke [1] → 0 open, 1 loud
		failed, one | failed, all
	job 1: 1 ok over → gone
		arrived | arrived twice | all arrived
	job 1: 1 failed over → gone
		arrived wrong
	bye timeout; close → 1 open, 1 loud
		silence
fetching, some failed and not quiet
	grant 0; fetch 2 → 1 open, 2 loud
		fetch
	nothing → 1 open, 2 loud
		fetch for the same job | drain | dial fails | namespaces | answer, found | answer, none | answer, refused | answer of another size | failed, of another round | acknowledged | peer answers pings only
	lookup 2 → 1 open, 2 loud
		lookup
	abort 1; revoke [1] → 0 open, 2 loud
		cancel | deadline
	abort 1; revoke [1]; finished → 0 open, 2 loud
		finish | finish twice
	abort 1; revoke [1]; finished; grant 0; fetch 1 → 0 open, 2 loud
		id used again at once
	bye draining; close → 1 open, 2 loud
		stop
	close; job 1: 0 absent 1 unreachable over → gone
		session lost
	close → 1 open, 2 loud
		bye | bye, idle
	close; job 1: 0 absent → waiting
		bye and lost, duplicate
	welcome; bye duplicate; close → 1 open, 2 loud
		peer connects
	bye duplicate; close; welcome → 1 open, 2 loud
		peer connects after a restart
	bye protocol; close → 1 open, 2 loud
		welcome | failed, one that is none
	revoke [1] → 0 open, 2 loud
		failed, one | failed, all
	job 1: 1 ok → 0 open, 1 loud
		arrived | arrived twice
	job 1: 1 failed → 0 open, 1 loud
		arrived wrong
	job 1: 0 absent → 1 open, 1 loud
		detached | detached twice
	job 1: 0 absent; job 1: 1 ok over → gone
		all arrived
	bye timeout; close → 1 open, 2 loud
		silence
aborted, not acknowledged
	grant 0; fetch 2 → 0 open, 2 loud
		fetch
	nothing → 0 open, 2 loud
		fetch for the same job | cancel | drain | dial fails | namespaces | answer, found | answer, none | answer, refused | answer of another size | failed, one | failed, all | failed, of another round | acknowledged
	lookup 2 → 0 open, 2 loud
		lookup
	finished → 0 open, 2 loud
		finish | finish twice
	finished; grant 0; fetch 1 → 0 open, 2 loud
		id used again at once
	bye draining; close → 0 open, 2 loud
		stop
	close; job 1: 0 cancelled 1 cancelled over → gone
		session lost | bye and lost, duplicate
	close → 0 open, 2 loud
		bye | bye, idle
	welcome; bye duplicate; close → 0 open, 2 loud
		peer connects
	bye duplicate; close; welcome → 0 open, 2 loud
		peer connects after a restart
	bye protocol; close → 0 open, 2 loud
		welcome | failed, one that is none
	job 1: 1 cancelled → 0 open, 1 loud
		arrived | arrived twice | arrived wrong
	job 1: 0 cancelled → 0 open, 1 loud
		detached | detached twice
	job 1: 0 cancelled; job 1: 1 cancelled over → gone
		all arrived
	bye timeout; close → 0 open, 2 loud
		deadline | peer answers pings only | silence
aborted and quiet, not acknowledged
	grant 0; fetch 2 → gone
		fetch
	grant 0; grant 1; fetch 2 → gone
		fetch for the same job
	lookup 2 → gone
		lookup
	nothing → gone
		cancel | drain | dial fails | namespaces | answer, found | answer, none | answer, refused | answer of another size | failed, one | failed, all | failed, one that is none | failed, of another round | acknowledged | arrived | arrived twice | arrived wrong | detached | detached twice | all arrived
	finished → gone
		finish | finish twice
	finished; grant 0; fetch 1 → gone
		id used again at once
	bye draining; close → gone
		stop
	close → gone
		session lost | bye | bye, idle | bye and lost, duplicate
	welcome; bye duplicate; close → gone
		peer connects
	bye duplicate; close; welcome → gone
		peer connects after a restart
	bye protocol; close → gone
		welcome
	bye timeout; close → gone
		deadline | peer answers pings only | silence
aborted and acknowledged, not quiet
	grant 0; fetch 2 → 0 open, 2 loud
		fetch
	nothing → 0 open, 2 loud
		fetch for the same job | cancel | drain | dial fails | namespaces | answer, found | answer, none | answer, refused | answer of another size | failed, one | failed, all | failed, of another round | acknowledged | deadline | peer answers pings only
	lookup 2 → 0 open, 2 loud
		lookup
	finished → 0 open, 2 loud
		finish | finish twice
	finished; grant 0; fetch 1 → 0 open, 2 loud
		id used again at once
	bye draining; close → 0 open, 2 loud
		stop
	close; job 1: 0 cancelled 1 cancelled over → gone
		session lost | bye and lost, duplicate
	close → 0 open, 2 loud
		bye | bye, idle
	welcome; bye duplicate; close → 0 open, 2 loud
		peer connects
	bye duplicate; close; welcome → 0 open, 2 loud
		peer connects after a restart
	bye protocol; close → 0 open, 2 loud
		welcome | failed, one that is none
	job 1: 1 cancelled → 0 open, 1 loud
		arrived | arrived twice | arrived wrong
	job 1: 0 cancelled → 0 open, 1 loud
		detached | detached twice
	job 1: 0 cancelled; job 1: 1 cancelled over → gone
		all arrived
	bye timeout; close → 0 open, 2 loud
		silence
session closing
	nothing → 2 open, 2 loud
		fetch | fetch for the same job | lookup | drain | stop | bye | bye, idle | dial fails | welcome | namespaces | answer, found | answer, none | answer, refused | answer of another size | failed, one | failed, all | failed, one that is none | failed, of another round | acknowledged | peer answers pings only | silence
	revoke [0 1] → 0 open, 2 loud
		cancel | finish | finish twice | id used again at once | deadline
	job 1: 0 unreachable 1 unreachable over → gone
		session lost | bye and lost, duplicate
	welcome → 2 open, 2 loud
		peer connects | peer connects after a restart
	job 1: 1 ok → 1 open, 1 loud
		arrived | arrived twice
	job 1: 1 failed → 1 open, 1 loud
		arrived wrong
	nothing → 2 open, 1 loud
		detached | detached twice
	job 1: 0 ok; job 1: 1 ok over → gone
		all arrived
session gives way to another
	nothing → 2 open, 2 loud
		fetch | fetch for the same job | lookup | drain | stop | bye | bye, idle | dial fails | welcome | namespaces | answer, found | answer, none | answer, refused | answer of another size | failed, one | failed, all | failed, one that is none | failed, of another round | acknowledged | peer answers pings only | silence
	revoke [0 1] → 0 open, 2 loud
		cancel | finish | finish twice | id used again at once | deadline
	nothing → waiting
		session lost | bye and lost, duplicate
	welcome → 2 open, 2 loud
		peer connects | peer connects after a restart
	job 1: 1 ok → 1 open, 1 loud
		arrived | arrived twice
	job 1: 1 failed → 1 open, 1 loud
		arrived wrong
	nothing → 2 open, 1 loud
		detached | detached twice
	job 1: 0 ok; job 1: 1 ok over → gone
		all arrived
peer down
	job 2: 0 unreachable over → gone
		fetch
	job 4: 0 unreachable 1 unreachable over → gone
		fetch for the same job
	probe 3: unreachable 0 → gone
		lookup
	nothing → gone
		cancel | finish | finish twice | drain | stop | session lost | bye | bye, idle | bye and lost, duplicate | dial fails | welcome | namespaces | answer, found | answer, none | answer, refused | answer of another size | failed, one | failed, all | failed, one that is none | failed, of another round | acknowledged | arrived | arrived twice | arrived wrong | detached | detached twice | all arrived | deadline | peer answers pings only | silence
	job 5: 0 unreachable over → gone
		id used again at once
	welcome → gone
		peer connects | peer connects after a restart
draining while fetching
	job 2: 0 draining over → 2 open, 2 loud
		fetch
	nothing → 2 open, 2 loud
		fetch for the same job | drain | dial fails | namespaces | answer, found | answer, none | answer, refused | answer of another size | failed, of another round | acknowledged | peer answers pings only
	probe 3: draining 0 → 2 open, 2 loud
		lookup
	abort 1; revoke [0 1] → 0 open, 2 loud
		cancel | deadline
	abort 1; revoke [0 1]; finished → 0 open, 2 loud
		finish | finish twice
	abort 1; revoke [0 1]; finished; job 5: 0 draining over → 0 open, 2 loud
		id used again at once
	bye draining; close → 2 open, 2 loud
		stop | peer connects | peer connects after a restart
	close; job 1: 0 unreachable 1 unreachable over → gone
		session lost | bye and lost, duplicate
	close → 2 open, 2 loud
		bye | bye, idle
	bye protocol; close → 2 open, 2 loud
		welcome | failed, one that is none
	revoke [1] → 1 open, 2 loud
		failed, one
	revoke [0 1] → 0 open, 2 loud
		failed, all
	job 1: 1 ok → 1 open, 1 loud
		arrived | arrived twice
	job 1: 1 failed → 1 open, 1 loud
		arrived wrong
	nothing → 2 open, 1 loud
		detached | detached twice
	job 1: 0 ok; job 1: 1 ok over → gone
		all arrived
	bye timeout; close → 2 open, 2 loud
		silence
`

const producerTable = `
nothing
	ask 2 → looking, asked 2, sending 0
		lookup of the round
	ask 2 → fetching, asked 2, sending 0
		fetch of the round | fetch of the round, of another id
	ask 2 → parked, asked 2, sending 0
		fetch of the round, awaiting
	ask 1 → gone
		another round | another attempt under the id
	ack 1 → gone
		abort
	ack 9 → gone
		abort of another round
	nothing → gone
		finished | finished, complete | finished, another attempt | supply opens | supply has more | supply is final | supply ends | core has all | core has nothing | core knows more soon | core has no room | core answers nonsense | sent | sent twice | not sent | all sent | poll | hits expire | deadline of the round | nothing for long | drain
	bye draining; close → gone
		stop
	close → gone
		session lost | bye
	bye duplicate; close; welcome → gone
		peer connects after a restart
	bye timeout; close → gone
		silence
nothing, supply open
	ask 2 → looking, asked 2, sending 0
		lookup of the round
	ask 2 → fetching, asked 2, sending 0
		fetch of the round | fetch of the round, of another id
	ask 2 → awaiting, asked 2, sending 0
		fetch of the round, awaiting
	ask 1 → gone
		another round | another attempt under the id
	ack 1 → gone
		abort
	ack 9 → gone
		abort of another round
	nothing → gone
		finished | finished, complete | finished, another attempt | supply opens | supply has more | supply is final | supply ends | core has all | core has nothing | core knows more soon | core has no room | core answers nonsense | sent | sent twice | not sent | all sent | poll | hits expire | deadline of the round | nothing for long | drain
	bye draining; close → gone
		stop
	close → gone
		session lost | bye
	bye duplicate; close; welcome → gone
		peer connects after a restart
	bye timeout; close → gone
		silence
nothing, supply ended
	ask 2 → looking, asked 2, sending 0
		lookup of the round
	ask 2 → fetching, asked 2, sending 0
		fetch of the round | fetch of the round, of another id
	failed 1 ended [] → gone
		fetch of the round, awaiting | another attempt under the id
	ask 1 → gone
		another round
	ack 1 → gone
		abort
	ack 9 → gone
		abort of another round
	nothing → gone
		finished | finished, complete | finished, another attempt | supply opens | supply has more | supply is final | supply ends | core has all | core has nothing | core knows more soon | core has no room | core answers nonsense | sent | sent twice | not sent | all sent | poll | hits expire | deadline of the round | nothing for long | drain
	bye draining; close → gone
		stop
	close → gone
		session lost | bye
	bye duplicate; close; welcome → gone
		peer connects after a restart
	bye timeout; close → gone
		silence
looking
	bye protocol; close → looking, asked 3, sending 0
		lookup of the round | fetch of the round | fetch of the round, of another id | fetch of the round, awaiting
	ask 1 → looking, asked 3, sending 0
		another round | another attempt under the id
	end; ack 1 → gone
		abort
	ack 9 → looking, asked 3, sending 0
		abort of another round
	end → gone
		finished | finished, complete
	nothing → looking, asked 3, sending 0
		finished, another attempt | supply opens | supply has more | supply is final | supply ends | core answers nonsense | sent | sent twice | not sent | all sent | poll | drain
	answer 1 ok [111] → answered, asked 0, sending 0
		core has all
	answer 1 ok [0]; end → gone
		core has nothing | core knows more soon | core has no room
	answer 1 timeout []; end → gone
		hits expire | deadline of the round | nothing for long
	bye draining; close → looking, asked 3, sending 0
		stop
	close; end → gone
		session lost
	close → looking, asked 3, sending 0
		bye
	bye duplicate; close; welcome → looking, asked 3, sending 0
		peer connects after a restart
	answer 1 timeout []; end; bye timeout; close → gone
		silence
answered
	bye protocol; close → answered, asked 0, sending 0
		lookup of the round | fetch of the round, of another id
	unpin; send 1; ask 1 → fetching, asked 1, sending 1
		fetch of the round
	unpin; send 1; ask 1 → parked, asked 1, sending 1
		fetch of the round, awaiting
	ask 1 → answered, asked 0, sending 0
		another round | another attempt under the id
	end; ack 1 → gone
		abort
	ack 9 → answered, asked 0, sending 0
		abort of another round
	end → gone
		finished | finished, complete | hits expire | deadline of the round | nothing for long
	nothing → answered, asked 0, sending 0
		finished, another attempt | supply opens | supply has more | supply is final | supply ends | core has all | core has nothing | core knows more soon | core has no room | core answers nonsense | sent | sent twice | not sent | all sent | poll | drain
	bye draining; close → answered, asked 0, sending 0
		stop
	close; end → gone
		session lost
	close → answered, asked 0, sending 0
		bye
	bye duplicate; close; welcome → answered, asked 0, sending 0
		peer connects after a restart
	bye timeout; close → answered, asked 0, sending 0
		silence
fetching, core asked
	bye protocol; close → fetching, asked 3, sending 0
		lookup of the round | fetch of the round | fetch of the round, of another id | fetch of the round, awaiting
	ask 1 → fetching, asked 3, sending 0
		another round | another attempt under the id
	end; ack 1 → gone
		abort
	ack 9 → fetching, asked 3, sending 0
		abort of another round
	end → gone
		finished | finished, complete
	nothing → fetching, asked 3, sending 0
		finished, another attempt | supply opens | supply has more | supply is final | supply ends | core answers nonsense | sent | sent twice | not sent | all sent | poll | hits expire | drain
	send 3 → fetching, asked 0, sending 3
		core has all
	failed 1 absent [0 1 2]; end → gone
		core has nothing
	nothing → fetching, asked 0, sending 0
		core knows more soon
	failed 1 no_room [0 1 2]; end → gone
		core has no room
	failed 1 timeout [0 1 2]; end → gone
		deadline of the round | nothing for long
	bye draining; close → fetching, asked 3, sending 0
		stop
	close; end → gone
		session lost
	close → fetching, asked 3, sending 0
		bye
	bye duplicate; close; welcome → fetching, asked 3, sending 0
		peer connects after a restart
	bye timeout; close → fetching, asked 3, sending 0
		silence
fetching, core knows more soon
	bye protocol; close → fetching, asked 0, sending 1
		lookup of the round | fetch of the round | fetch of the round, of another id | fetch of the round, awaiting
	ask 1 → fetching, asked 0, sending 1
		another round | another attempt under the id
	unsend → ended, asked 0, sending 1
		abort | finished | finished, complete
	ack 9 → fetching, asked 0, sending 1
		abort of another round
	nothing → fetching, asked 0, sending 1
		finished, another attempt | supply opens | supply has more | supply is final | supply ends | core has all | core has nothing | core knows more soon | core has no room | core answers nonsense | drain
	unpin → fetching, asked 0, sending 0
		sent | sent twice | all sent
	unpin; failed 1 failed [0] → fetching, asked 0, sending 0
		not sent
	ask 1 → fetching, asked 1, sending 1
		poll | hits expire
	ask 1; unsend; failed 1 timeout [1] → ended, asked 0, sending 1
		deadline of the round | nothing for long
	bye draining; close → fetching, asked 0, sending 1
		stop
	close; end → gone
		session lost
	close → fetching, asked 0, sending 1
		bye
	bye duplicate; close; welcome → fetching, asked 0, sending 1
		peer connects after a restart
	ask 1; bye timeout; close → fetching, asked 1, sending 1
		silence
fetching, waiting for room
	bye protocol; close → fetching, asked 0, sending 8
		lookup of the round | fetch of the round | fetch of the round, of another id | fetch of the round, awaiting
	nothing → fetching, asked 0, sending 8
		another round | another attempt under the id | finished, another attempt | supply opens | supply has more | supply is final | supply ends | core has all | core has nothing | core knows more soon | core has no room | core answers nonsense | poll | hits expire | drain
	unsend → ended, asked 0, sending 8
		abort | finished | finished, complete
	ack 9 → fetching, asked 0, sending 8
		abort of another round
	unpin → fetching, asked 0, sending 7
		sent | sent twice
	unpin; failed 1 failed [0] → fetching, asked 0, sending 7
		not sent
	unpin; unpin; ask 2; unpin → fetching, asked 2, sending 5
		all sent
	unsend; failed 1 timeout [8 9] → ended, asked 0, sending 8
		deadline of the round | nothing for long
	bye draining; close → fetching, asked 0, sending 8
		stop
	close; end → gone
		session lost
	close → fetching, asked 0, sending 8
		bye
	bye duplicate; close; welcome → fetching, asked 0, sending 8
		peer connects after a restart
	bye timeout; close → fetching, asked 0, sending 8
		silence
parked, core asked
	bye protocol; close → parked, asked 3, sending 0
		lookup of the round | fetch of the round | fetch of the round, of another id | fetch of the round, awaiting
	ask 1 → parked, asked 3, sending 0
		another round | another attempt under the id
	end; ack 1 → gone
		abort
	ack 9 → parked, asked 3, sending 0
		abort of another round
	end → gone
		finished | finished, complete
	nothing → parked, asked 3, sending 0
		finished, another attempt | supply has more | supply is final | supply ends | core answers nonsense | sent | sent twice | not sent | all sent | poll | hits expire
	nothing → awaiting, asked 3, sending 0
		supply opens
	send 3 → parked, asked 0, sending 3
		core has all
	nothing → parked, asked 0, sending 0
		core has nothing | core knows more soon
	failed 1 no_room [0 1 2]; end → gone
		core has no room
	failed 1 timeout [0 1 2]; end → gone
		deadline of the round | nothing for long
	failed 1 draining [0 1 2]; end → gone
		drain
	failed 1 draining [0 1 2]; end; bye draining; close → gone
		stop
	close; end → gone
		session lost
	close → parked, asked 3, sending 0
		bye
	bye duplicate; close; welcome → parked, asked 3, sending 0
		peer connects after a restart
	bye timeout; close → parked, asked 3, sending 0
		silence
parked
	bye protocol; close → parked, asked 0, sending 0
		lookup of the round | fetch of the round | fetch of the round, of another id | fetch of the round, awaiting
	ask 1 → parked, asked 0, sending 0
		another round | another attempt under the id
	end; ack 1 → gone
		abort
	ack 9 → parked, asked 0, sending 0
		abort of another round
	end → gone
		finished | finished, complete
	nothing → parked, asked 0, sending 0
		finished, another attempt | supply has more | supply is final | supply ends | core has all | core has nothing | core knows more soon | core has no room | core answers nonsense | sent | sent twice | not sent | all sent | poll | hits expire
	nothing → awaiting, asked 0, sending 0
		supply opens
	failed 1 timeout [1 2]; end → gone
		deadline of the round | nothing for long
	failed 1 draining [1 2]; end → gone
		drain
	failed 1 draining [1 2]; end; bye draining; close → gone
		stop
	close; end → gone
		session lost
	close → parked, asked 0, sending 0
		bye
	bye duplicate; close; welcome → parked, asked 0, sending 0
		peer connects after a restart
	bye timeout; close → parked, asked 0, sending 0
		silence
awaiting a supply, core asked
	bye protocol; close → awaiting, asked 3, sending 0
		lookup of the round | fetch of the round | fetch of the round, of another id | fetch of the round, awaiting
	ask 1 → awaiting, asked 3, sending 0
		another round | another attempt under the id
	end; ack 1 → gone
		abort
	ack 9 → awaiting, asked 3, sending 0
		abort of another round
	end → gone
		finished | finished, complete
	nothing → awaiting, asked 3, sending 0
		finished, another attempt | supply opens | supply has more | supply is final | core answers nonsense | sent | sent twice | not sent | all sent | poll | hits expire | drain
	nothing → fetching, asked 3, sending 0
		supply ends
	send 3 → awaiting, asked 0, sending 3
		core has all
	nothing → awaiting, asked 0, sending 0
		core has nothing | core knows more soon
	failed 1 no_room [0 1 2]; end → gone
		core has no room
	failed 1 timeout [0 1 2]; end → gone
		deadline of the round | nothing for long
	bye draining; close → awaiting, asked 3, sending 0
		stop
	close; end → gone
		session lost
	close → awaiting, asked 3, sending 0
		bye
	bye duplicate; close; welcome → awaiting, asked 3, sending 0
		peer connects after a restart
	bye timeout; close → awaiting, asked 3, sending 0
		silence
awaiting a supply
	bye protocol; close → awaiting, asked 0, sending 1
		lookup of the round | fetch of the round | fetch of the round, of another id | fetch of the round, awaiting
	ask 1 → awaiting, asked 0, sending 1
		another round | another attempt under the id
	unsend → ended, asked 0, sending 1
		abort | finished | finished, complete
	ack 9 → awaiting, asked 0, sending 1
		abort of another round
	nothing → awaiting, asked 0, sending 1
		finished, another attempt | supply opens | core has all | core has nothing | core knows more soon | core has no room | core answers nonsense | poll | hits expire | drain
	ask 2 → awaiting, asked 2, sending 1
		supply has more | supply is final
	failed 1 ended [1 2] → fetching, asked 0, sending 1
		supply ends
	unpin → awaiting, asked 0, sending 0
		sent | sent twice | all sent
	unpin; failed 1 failed [0] → awaiting, asked 0, sending 0
		not sent
	unsend; failed 1 timeout [1 2] → ended, asked 0, sending 1
		deadline of the round | nothing for long
	bye draining; close → awaiting, asked 0, sending 1
		stop
	close; end → gone
		session lost
	close → awaiting, asked 0, sending 1
		bye
	bye duplicate; close; welcome → awaiting, asked 0, sending 1
		peer connects after a restart
	bye timeout; close → awaiting, asked 0, sending 1
		silence
awaiting a supply that is final
	bye protocol; close → awaiting, asked 0, sending 1
		lookup of the round | fetch of the round | fetch of the round, of another id | fetch of the round, awaiting
	ask 1 → awaiting, asked 0, sending 1
		another round | another attempt under the id
	unsend → ended, asked 0, sending 1
		abort | finished
	ack 9 → awaiting, asked 0, sending 1
		abort of another round
	unsend; give up supply → ended, asked 0, sending 1
		finished, complete
	nothing → awaiting, asked 0, sending 1
		finished, another attempt | supply opens | core has all | core has nothing | core knows more soon | core has no room | core answers nonsense | drain
	ask 1 → awaiting, asked 1, sending 1
		supply has more | supply is final | poll | hits expire
	failed 1 ended [1] → fetching, asked 0, sending 1
		supply ends
	unpin → awaiting, asked 0, sending 0
		sent | sent twice | all sent
	unpin; failed 1 failed [0] → awaiting, asked 0, sending 0
		not sent
	ask 1; unsend; failed 1 timeout [1] → ended, asked 0, sending 1
		deadline of the round | nothing for long
	bye draining; close → awaiting, asked 0, sending 1
		stop
	close; end → gone
		session lost
	close → awaiting, asked 0, sending 1
		bye
	bye duplicate; close; welcome → awaiting, asked 0, sending 1
		peer connects after a restart
	ask 1; bye timeout; close → awaiting, asked 1, sending 1
		silence
sending
	bye protocol; close → fetching, asked 0, sending 2
		lookup of the round | fetch of the round | fetch of the round, of another id | fetch of the round, awaiting
	ask 1 → fetching, asked 0, sending 2
		another round | another attempt under the id
	unsend → ended, asked 0, sending 2
		abort | finished | finished, complete | deadline of the round | nothing for long
	ack 9 → fetching, asked 0, sending 2
		abort of another round
	nothing → fetching, asked 0, sending 2
		finished, another attempt | supply opens | supply has more | supply is final | supply ends | core has all | core has nothing | core knows more soon | core has no room | core answers nonsense | poll | hits expire | drain
	unpin → fetching, asked 0, sending 1
		sent | sent twice
	unpin; failed 1 failed [0] → fetching, asked 0, sending 1
		not sent
	unpin; unpin; end → gone
		all sent
	bye draining; close → fetching, asked 0, sending 2
		stop
	close; end → gone
		session lost
	close → fetching, asked 0, sending 2
		bye
	bye duplicate; close; welcome → fetching, asked 0, sending 2
		peer connects after a restart
	bye timeout; close → fetching, asked 0, sending 2
		silence
aborted while sending
	bye protocol; close → ended, asked 0, sending 2
		lookup of the round | fetch of the round | fetch of the round, of another id | fetch of the round, awaiting
	ask 1 → ended, asked 0, sending 2
		another round | another attempt under the id
	nothing → ended, asked 0, sending 2
		abort | finished | finished, complete | finished, another attempt | supply opens | supply has more | supply is final | supply ends | core has all | core has nothing | core knows more soon | core has no room | core answers nonsense | poll | hits expire | deadline of the round | nothing for long | drain
	ack 9 → ended, asked 0, sending 2
		abort of another round
	unpin → ended, asked 0, sending 1
		sent | sent twice | not sent
	unpin; unpin; end; ack 1 → gone
		all sent
	bye draining; close → ended, asked 0, sending 2
		stop
	close; end → gone
		session lost
	close → ended, asked 0, sending 2
		bye
	bye duplicate; close; welcome → ended, asked 0, sending 2
		peer connects after a restart
	bye timeout; close → ended, asked 0, sending 2
		silence
out of time while sending
	bye protocol; close → ended, asked 0, sending 2
		lookup of the round | fetch of the round | fetch of the round, of another id | fetch of the round, awaiting
	ask 1 → ended, asked 0, sending 2
		another round | another attempt under the id
	nothing → ended, asked 0, sending 2
		abort | finished | finished, complete | finished, another attempt | supply opens | supply has more | supply is final | supply ends | core has all | core has nothing | core knows more soon | core has no room | core answers nonsense | poll | hits expire | deadline of the round | nothing for long | drain
	ack 9 → ended, asked 0, sending 2
		abort of another round
	unpin → ended, asked 0, sending 1
		sent | sent twice
	unpin; failed 1 timeout [0] → ended, asked 0, sending 1
		not sent
	unpin; unpin; end → gone
		all sent
	bye draining; close → ended, asked 0, sending 2
		stop
	close; end → gone
		session lost
	close → ended, asked 0, sending 2
		bye
	bye duplicate; close; welcome → ended, asked 0, sending 2
		peer connects after a restart
	bye timeout; close → ended, asked 0, sending 2
		silence
session closing
	nothing → fetching, asked 0, sending 2
		lookup of the round | fetch of the round | fetch of the round, of another id | fetch of the round, awaiting | another round | another attempt under the id | abort | abort of another round | finished | finished, complete | finished, another attempt | supply opens | supply has more | supply is final | supply ends | core has all | core has nothing | core knows more soon | core has no room | core answers nonsense | poll | hits expire | drain | stop | bye | silence
	unpin → fetching, asked 0, sending 1
		sent | sent twice | not sent
	unpin; unpin; end → gone
		all sent
	unsend → ended, asked 0, sending 2
		deadline of the round | nothing for long
	end → gone
		session lost
	welcome → fetching, asked 0, sending 2
		peer connects after a restart
fetching in a drain
	bye protocol; close → fetching, asked 3, sending 0
		lookup of the round | fetch of the round | fetch of the round, of another id | fetch of the round, awaiting
	failed 2 draining [] → fetching, asked 3, sending 0
		another round
	failed 1 draining [] → fetching, asked 3, sending 0
		another attempt under the id
	end; ack 1 → gone
		abort
	ack 9 → fetching, asked 3, sending 0
		abort of another round
	end → gone
		finished | finished, complete
	nothing → fetching, asked 3, sending 0
		finished, another attempt | supply opens | supply has more | supply is final | supply ends | core answers nonsense | sent | sent twice | not sent | all sent | poll | hits expire | drain
	send 3 → fetching, asked 0, sending 3
		core has all
	failed 1 absent [0 1 2]; end → gone
		core has nothing
	nothing → fetching, asked 0, sending 0
		core knows more soon
	failed 1 no_room [0 1 2]; end → gone
		core has no room
	failed 1 timeout [0 1 2]; end → gone
		deadline of the round | nothing for long
	bye draining; close → fetching, asked 3, sending 0
		stop | peer connects after a restart
	close; end → gone
		session lost
	close → fetching, asked 3, sending 0
		bye
	bye timeout; close → fetching, asked 3, sending 0
		silence
`
