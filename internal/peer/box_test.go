package peer

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
)

// auditor sees all effects of a machine and the answers to them, and knows what
// must hold between them whatever happens: that is the machine's contract with
// the core, the transport and the bridge.
type auditor struct {
	bad     string
	blind   bool                   // it is not told what the core has, nor what is sent
	told    map[JobID]map[int]bool // items that were reported
	ended   map[JobID]bool         // jobs that are over
	grants  map[ConnID]map[blockID]bool
	closing map[ConnID]bool // a Bye was sent, or CloseConn
	lost    map[ConnID]bool
	asked   map[ServeID]bool // a Serve is unanswered
	serves  map[ServeID]*auditedServe
}

type auditedServe struct {
	over    bool
	leases  map[Lease]int // pins
	sending map[uint32]ConnID
}

func newAuditor() *auditor {
	return &auditor{told: map[JobID]map[int]bool{}, ended: map[JobID]bool{}, grants: map[ConnID]map[blockID]bool{}, closing: map[ConnID]bool{},
		lost: map[ConnID]bool{}, asked: map[ServeID]bool{}, serves: map[ServeID]*auditedServe{}}
}

func (a *auditor) fail(format string, args ...any) {
	if a.bad == "" {
		a.bad = fmt.Sprintf(format, args...)
	}
}

func (a *auditor) serve(id ServeID) *auditedServe {
	if a.serves[id] == nil {
		a.serves[id] = &auditedServe{leases: map[Lease]int{}, sending: map[uint32]ConnID{}}
	}
	return a.serves[id]
}

// effect takes note of an effect.
func (a *auditor) effect(e Effect) {
	switch e := e.(type) {
	case Send:
		if a.closing[e.Conn] {
			a.fail("%T is sent on a session that has ended", e.Msg)
		}
		if _, ok := e.Msg.(*Bye); ok {
			a.closing[e.Conn] = true
		}
	case CloseConn:
		a.closing[e.Conn] = true
	case Grant:
		id := blockID{e.Nonce, e.Round, e.Index}
		if a.grants[e.Conn] == nil {
			a.grants[e.Conn] = map[blockID]bool{}
		}
		if a.grants[e.Conn][id] {
			a.fail("block %v was granted twice", id)
		}
		a.grants[e.Conn][id] = true
	case Report:
		if a.ended[e.Job] {
			a.fail("job %d is reported after its end", e.Job)
		}
		if a.told[e.Job] == nil {
			a.told[e.Job] = map[int]bool{}
		}
		for _, r := range e.Results {
			if a.told[e.Job][r.Index] {
				a.fail("item %d of job %d is told twice", r.Index, e.Job)
			}
			a.told[e.Job][r.Index] = true
		}
		if e.Last {
			a.ended[e.Job] = true
			delete(a.told, e.Job)
		}
	case ReportProbe:
		if a.ended[e.Job] {
			a.fail("probe %d is answered twice", e.Job)
		}
		a.ended[e.Job] = true
	case Serve:
		v := a.serve(e.ID)
		if v.over || a.asked[e.ID] && !a.blind {
			a.fail("serve %d is asked for after its end, or before it was answered", e.ID)
		}
		a.asked[e.ID] = true
	case Transmit:
		v := a.serve(e.ID)
		if a.blind {
			if v.over {
				a.fail("serve %d sends after its end", e.ID)
			}
			break
		}
		for _, b := range e.Blocks {
			if v.over || v.leases[b.Lease] == 0 {
				a.fail("serve %d sends what it has not pinned", e.ID)
			}
			if _, ok := v.sending[b.Head.Index]; ok {
				a.fail("serve %d sends block %d twice", e.ID, b.Head.Index)
			}
			v.sending[b.Head.Index] = e.Conn
		}
	case Release:
		v := a.serve(e.ID)
		if a.blind {
			if v.over {
				a.fail("serve %d releases a lease after its end", e.ID)
			}
			break
		}
		if v.leases[e.Lease] == 0 {
			a.fail("serve %d releases a lease that it has not", e.ID)
		}
		if v.leases[e.Lease]--; v.leases[e.Lease] == 0 {
			delete(v.leases, e.Lease)
		}
	case ServeEnd:
		v := a.serve(e.ID)
		if v.over {
			a.fail("serve %d ends twice", e.ID)
		}
		for i, c := range v.sending {
			if !a.lost[c] {
				a.fail("serve %d ends while block %d is being sent", e.ID, i)
			}
		}
		v.over = true
		clear(v.leases)
		delete(a.asked, e.ID)
	}
}

func (a *auditor) served(id ServeID, found []Found) {
	delete(a.asked, id)
	for _, f := range found {
		if v := a.serve(id); f.Code == CodeOK && !v.over {
			v.leases[f.Lease]++
		}
	}
}

func (a *auditor) sent(id ServeID, index uint32) { delete(a.serve(id).sending, index) }

// gone tells that Lost was reported: nothing reads or writes for it.
func (a *auditor) gone(conn ConnID) {
	a.lost[conn] = true
	delete(a.grants, conn)
}

// rest says what should be over, and is not.
func (a *auditor) rest() string {
	for id, v := range a.serves {
		if (len(v.leases) > 0 || a.asked[id]) && !v.over {
			return fmt.Sprintf("serve %d has not ended", id)
		}
	}
	for job := range a.told {
		return fmt.Sprintf("job %d is not over", job)
	}
	return a.bad
}

// box is one machine, and a test that plays all others.
type box struct {
	t     *testing.T
	m     *Machine
	audit *auditor
	ns    *block.Namespace
	now   Time
	fx    []Effect // since the last take
	conns []ConnID // that are not lost
	next  ConnID
}

func testSpec(mod func(*block.Spec)) *block.Namespace {
	s := block.Spec{Model: "m", DType: "b", Layout: "l", HashAlgorithm: "sha256", HashLength: 32,
		Groups: []block.Group{{Kind: block.KindFull, TokensPerBlock: 16, BlockBytes: 4096}}}
	if mod != nil {
		mod(&s)
	}
	ns, err := block.NewNamespace(s)
	if err != nil {
		panic(err)
	}
	return ns
}

func newBox(t *testing.T, o Options) *box {
	if o.Node == "" {
		o.Node = "me"
	}
	o.Boot, o.Advertise = "1", "me:1"
	b := &box{t: t, m: New(o, [32]byte{1}), audit: newAuditor(), ns: testSpec(nil), now: 1}
	b.m.SetNamespaces(b.now, []*block.Namespace{b.ns})
	return b
}

// look takes effects over.
func (b *box) look() {
	b.t.Helper()
	for _, e := range b.m.TakeEffects(nil) {
		b.audit.effect(e)
		b.fx = append(b.fx, e)
	}
	if b.audit.bad != "" {
		b.t.Fatal(b.audit.bad)
	}
	if err := b.m.CheckInvariants(); err != nil {
		b.t.Fatal(err)
	}
}

// take returns the effects since the last take.
func (b *box) take() []Effect {
	b.t.Helper()
	b.look()
	out := b.fx
	b.fx = nil
	return out
}

func (b *box) hear(conn ConnID, m Message) {
	b.t.Helper()
	b.m.Received(b.now, conn, m)
	b.look()
}

func (b *box) lose(conn ConnID) {
	b.t.Helper()
	b.audit.gone(conn)
	b.conns = slices.DeleteFunc(b.conns, func(c ConnID) bool { return c == conn })
	b.m.Lost(b.now, conn, "gone")
	b.look()
}

func (b *box) pass(d time.Duration) {
	b.t.Helper()
	end := b.now + Time(d)
	for {
		next := b.m.NextDeadline()
		if next == 0 || next > end {
			break
		}
		b.now = max(b.now, next)
		b.m.Tick(b.now)
		b.look()
	}
	b.now = end
}

// live passes time in which sessions answer pings.
func (b *box) live(d time.Duration) {
	b.t.Helper()
	for end := b.now + Time(d); b.now < end; {
		for _, c := range b.conns {
			b.m.Received(b.now, c, &Pong{})
		}
		b.pass(min(time.Second, time.Duration(end-b.now)))
	}
}

func (b *box) connected(addr string) ConnID {
	b.t.Helper()
	b.next++
	b.conns = append(b.conns, b.next)
	b.m.Connected(b.now, b.next, addr)
	b.look()
	return b.next
}

func hello(node, boot string) *Hello {
	return &Hello{Version: Version, Node: node, Boot: boot, Advertise: node + ":1", Window: 2}
}

// accept brings a session up that a peer has dialed.
func (b *box) accept(node string) ConnID {
	b.t.Helper()
	c := b.connected("")
	b.hear(c, hello(node, "1"))
	b.hear(c, &Namespaces{Specs: [][]byte{b.ns.JSON()}})
	if n := len(sends[*Welcome](b.fx)); n == 0 {
		b.t.Fatalf("no welcome: %v", b.fx)
	}
	b.take()
	return c
}

// dial brings up the session that the machine has asked for.
func (b *box) dial(addr, node string) ConnID {
	b.t.Helper()
	c := b.connected(addr)
	b.hear(c, &Welcome{Version: Version, Node: node, Boot: "1", Advertise: node + ":1"})
	b.hear(c, &Namespaces{Specs: [][]byte{b.ns.JSON()}})
	return c
}

func (b *box) source(seq uint64, addr string, role Role) {
	b.t.Helper()
	if err := b.m.OpenSource(b.now, Source{Seq: seq, Addr: addr, ID: "kv", Role: role, NS: b.ns.Fingerprint()}); err != nil {
		b.t.Fatal(err)
	}
	b.look()
}

func (b *box) submit(job JobID, seq uint64, keys ...int) {
	b.t.Helper()
	items := make([]Item, len(keys))
	for i, k := range keys {
		items[i] = Item{Key: simKey(k), Slot: uint64(job)*1000 + uint64(k), Length: 4096}
	}
	b.m.Submit(b.now, job, seq, items, b.now+Time(30*time.Second))
	b.look()
}

func (b *box) probe(job JobID, seq uint64, keys ...int) {
	b.t.Helper()
	b.m.Probe(b.now, job, seq, simKeys(keys...), b.now+Time(2*time.Second))
	b.look()
}

func (b *box) served(id ServeID, found ...Found) {
	b.t.Helper()
	b.audit.served(id, found)
	b.m.Served(b.now, id, found)
	b.look()
}

func (b *box) sent(id ServeID, index uint32, ok bool) {
	b.t.Helper()
	b.audit.sent(id, index)
	b.m.Sent(b.now, id, index, ok)
	b.look()
}

func (b *box) supply(id string, seq uint64, s SupplyState) {
	b.t.Helper()
	b.m.Supply(b.now, b.ns.Fingerprint(), id, seq, s)
	b.look()
}

// empty ends all sessions, lets all memories fade and sees that nothing is left.
func (b *box) empty() {
	b.t.Helper()
	for len(b.conns) > 0 {
		b.lose(b.conns[0])
	}
	b.pass(30 * time.Minute)
	b.m.Tick(b.now)
	b.look()
	s := b.m.Stats()
	if s.Sessions+s.Links+s.Sources+s.Rounds+s.Serves+s.Supplies+s.Parked+s.Aborts+s.Ended+s.Timers != 0 || s.Pinned != 0 {
		b.t.Fatalf("not empty: %+v", s)
	}
	if what := b.audit.rest(); what != "" {
		b.t.Fatal(what)
	}
}

// of picks the effects of a kind, sends the messages of one.
func of[T Effect](fx []Effect) (out []T) {
	for _, e := range fx {
		if x, ok := e.(T); ok {
			out = append(out, x)
		}
	}
	return out
}

func sends[T Message](fx []Effect) (out []T) {
	for _, e := range fx {
		if s, ok := e.(Send); ok {
			if x, ok := s.Msg.(T); ok {
				out = append(out, x)
			}
		}
	}
	return out
}

func simKeys(n ...int) (out []block.Key) {
	for _, i := range n {
		out = append(out, simKey(i))
	}
	return out
}

func upTo(n int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = i
	}
	return out
}

// pinned is what the core says of a block that it has.
func pinned(slot uint64) Found {
	return Found{Lease: Lease{Slot: slot, Gen: 1, Sum: slot, Length: 4096}}
}

var absent = Found{Code: CodeAbsent}

func (b *box) lookupOf(nonce uint64, round uint32, keys ...int) *Lookup {
	return &Lookup{ID: "kv", Nonce: nonce, Round: round, NS: b.ns.Fingerprint(), WaitMS: 2000, Keys: simKeys(keys...)}
}

func (b *box) fetchOf(nonce uint64, round uint32, await bool, keys ...int) *Fetch {
	return &Fetch{ID: "kv", Nonce: nonce, Round: round, NS: b.ns.Fingerprint(), Await: await, WaitMS: 20000, Keys: simKeys(keys...)}
}

// one is the only effect of a kind since the last take.
func one[T any](t *testing.T, list []T) T {
	t.Helper()
	if len(list) != 1 {
		t.Fatalf("%d of %T, want one: %+v", len(list), list, list)
	}
	return list[0]
}
