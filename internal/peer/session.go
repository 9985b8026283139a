package peer

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"github.com/terrace-kv/terrace/block"
)

// sessionState is where in its life a session is.
type sessionState uint8

const (
	sessionDialed   sessionState = iota // Hello sent, its Welcome is due
	sessionAccepted                     // connected, its Hello is due
	sessionUp
	sessionClosing // nothing more is sent; Lost is due
)

// session is one control connection, with what both roles have on it.
//
// INVARIANT(peer-one-session): two nodes have at most one session that is up.
type session struct {
	conn      ConnID
	dialed    bool
	addr      string // dialed: where
	state     sessionState
	since     Time
	node      string // who the other side is; "" before its Hello or Welcome
	boot      string
	advertise string
	token     [tokenBytes]byte

	spaces []*block.Namespace // that the other side has shown
	shown  map[block.Fingerprint]bool

	rounds map[roundKey]*round // consumer
	aborts map[roundKey]*timer // consumer: an AbortAck is due
	serves map[roundKey]*serve // producer
	parked int                 // producer: serves that wait for an id nobody has heard of
	pinned int64               // producer: bytes that serves pin, or ask for

	heard   Time
	pings   uint64
	ping    timer
	greet   timer
	idle    timer
	tokens  float64 // lookups that are allowed now
	refill  Time
	closing string // why
	freed   bool   // is in m.freed

	blocksIn, bytesIn, blocksOut, bytesOut int64
}

type roundKey struct {
	nonce uint64
	round uint32
}

// link is what a node knows of an address that its engines want blocks from.
type link struct {
	addr    string
	s       *session // up or dialed, or nil
	dialing bool     // Dial was asked for
	waiting []*round // not sent yet
	sources int
	down    Time // not dialed before
	delay   time.Duration
	timer   timer // bound of the waiting rounds
	why     string
}

func (s *session) name() string {
	switch where := cmp.Or(s.addr, s.advertise, fmt.Sprint("connection ", uint64(s.conn))); {
	case s.node == "":
		return where
	default:
		return s.node + " at " + where
	}
}

// Connected tells of a new control connection: dialed for a Dial of addr, or
// accepted, with addr empty.
func (m *Machine) Connected(now Time, conn ConnID, addr string) {
	m.now = now
	if _, ok := m.sessions[conn]; ok {
		return
	}
	s := &session{conn: conn, dialed: addr != "", addr: addr, since: now, heard: now, refill: now, tokens: float64(m.o.LookupsPerSec),
		shown: map[block.Fingerprint]bool{}, rounds: map[roundKey]*round{}, aborts: map[roundKey]*timer{}, serves: map[roundKey]*serve{}}
	s.ping.fire = func() { m.pingDue(s) }
	s.greet.fire = func() { m.closeSession(s, CodeTimeout, "no greeting in time") }
	s.idle.fire = func() { m.idleDue(s) }
	m.sessions[conn] = s
	m.timers.arm(&s.greet, now+Time(m.o.ConnectTimeout))
	if !s.dialed {
		s.state = sessionAccepted
		if len(m.sessions) > m.o.SessionsMax {
			m.closeSession(s, CodeBusy, fmt.Sprintf("%d sessions", len(m.sessions)-1))
		}
		return
	}
	l := m.links[addr]
	if l == nil || !l.dialing || m.draining {
		m.closeSession(s, CodeIdle, "nobody needs it any more")
		return
	}
	l.dialing, l.s = false, s
	binary.BigEndian.PutUint64(s.token[:], m.draw())
	binary.BigEndian.PutUint64(s.token[8:], m.draw())
	m.send(s, &Hello{Version: Version, Node: m.o.Node, Boot: m.o.Boot, Advertise: m.o.Advertise, Token: s.token, Window: uint32(m.o.DataConns)})
}

// DialFailed tells that a Dial came to nothing.
func (m *Machine) DialFailed(now Time, addr, why string) {
	m.now = now
	if l := m.links[addr]; l != nil && l.dialing {
		l.dialing = false
		m.linkDown(l, "dial: "+why)
	}
	m.settle()
}

// linkDown fails all that waits for a peer, and keeps it from being dialed for a
// while: each failure in a row doubles that.
func (m *Machine) linkDown(l *link, why string) {
	l.s, l.why = nil, why
	l.delay = min(max(2*l.delay, m.o.DownBase), m.o.DownMax)
	l.down = m.now + Time(l.delay)
	m.timers.disarm(&l.timer)
	m.note(l.addr, true, "peer is down: "+why)
	waiting := l.waiting
	l.waiting = nil
	for _, r := range waiting {
		m.failRound(r, CodeUnreachable)
	}
	m.forgetLink(l)
}

// forgetLink drops an address that nobody uses and nothing is to be remembered
// of.
func (m *Machine) forgetLink(l *link) {
	if l.sources == 0 && l.s == nil && !l.dialing && len(l.waiting) == 0 && l.down <= m.now {
		m.timers.disarm(&l.timer)
		delete(m.links, l.addr)
	} else if l.sources == 0 && l.s == nil && !l.dialing && l.timer.pos == 0 {
		m.timers.arm(&l.timer, l.down) // to be forgotten then
	}
}

func (m *Machine) linkDue(l *link) {
	if len(l.waiting) > 0 {
		l.dialing = false // what comes of it is nobody's
		if l.s != nil && l.s.state == sessionDialed {
			m.closeSession(l.s, CodeTimeout, "no greeting in time")
		}
		m.linkDown(l, fmt.Sprintf("no session after %v", m.o.ConnectTimeout))
		return
	}
	m.forgetLink(l)
}

// session is the one that is up with whoever is behind an address.
func (m *Machine) session(l *link) *session {
	if l.s != nil && l.s.state == sessionUp {
		return l.s
	}
	for _, s := range m.sorted() {
		if s.state == sessionUp && (s.advertise == l.addr || s.addr == l.addr) {
			l.s = s
			return s
		}
	}
	return nil
}

// sorted lists the sessions in the order of their connections.
func (m *Machine) sorted() []*session {
	out := make([]*session, 0, len(m.sessions))
	for _, s := range m.sessions {
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b *session) int { return cmp.Compare(a.conn, b.conn) })
	return out
}

// Received takes a control frame.
func (m *Machine) Received(now Time, conn ConnID, msg Message) {
	m.now = now
	s := m.sessions[conn]
	if s == nil || s.state == sessionClosing {
		return
	}
	s.heard = now
	switch x := msg.(type) {
	case *Hello:
		m.hello(s, x)
	case *Welcome:
		m.welcome(s, x)
	case *Bye:
		m.bye(s, x)
	default:
		if s.state != sessionUp {
			m.violation(s, fmt.Sprintf("%T before the greeting", msg))
			break
		}
		switch x := msg.(type) {
		case *Namespaces:
			m.namespaces(s, x)
		case *Ping:
			m.send(s, &Pong{N: x.N})
		case *Pong:
		case *Answer:
			m.answer(s, x)
		case *Failed:
			m.failed(s, x)
		case *AbortAck:
			m.abortAck(s, x)
		case *Lookup:
			m.lookup(s, x)
		case *Fetch:
			m.fetch(s, x)
		case *Abort:
			m.abort(s, x)
		case *Finished:
			m.finished(s, x)
		}
	}
	m.settle()
}

// violation ends a session that broke the protocol.
func (m *Machine) violation(s *session, what string) {
	m.stats.Violations++
	m.note(s.name(), true, "broke the protocol: "+what)
	m.closeSession(s, CodeProtocol, what)
}

func (m *Machine) hello(s *session, h *Hello) {
	if s.state != sessionAccepted {
		m.violation(s, "a second greeting")
		return
	}
	s.node, s.boot, s.advertise, s.token = h.Node, h.Boot, h.Advertise, h.Token
	switch {
	case h.Version != Version:
		m.closeSession(s, CodeVersion, fmt.Sprintf("this node speaks version %d, the other one %d", Version, h.Version))
		return
	case h.Node == m.o.Node:
		m.closeSession(s, CodeSelf, "a node has dialed itself; give every node a node id of its own")
		return
	case m.draining:
		m.closeSession(s, CodeDraining, "this node is stopping")
		return
	case h.Window == 0 || h.Window > DataConnsMax:
		m.violation(s, fmt.Sprintf("%d data connections", h.Window))
		return
	}
	// Both may have dialed at once: the connection of the smaller node id stays.
	// A session that has been up for a while is not of that moment: the other side
	// has lost it, or is another run.
	for _, o := range m.sorted() {
		if o == s || o.state == sessionClosing {
			continue
		}
		same := o.node == h.Node || o.node == "" && o.dialed && o.addr == h.Advertise
		if !same {
			continue
		}
		fresh := o.state == sessionDialed || o.boot == h.Boot && m.now-o.since < Time(m.o.ConnectTimeout)
		if fresh && o.dialed && m.o.Node < h.Node {
			m.closeSession(s, CodeDuplicate, "this node's own connection stays")
			return
		}
		why := "replaced by a newer connection"
		if o.boot != "" && o.boot != h.Boot {
			why = "the peer was started again"
		}
		m.closeSession(o, CodeDuplicate, why)
	}
	m.send(s, &Welcome{Version: Version, Node: m.o.Node, Boot: m.o.Boot, Advertise: m.o.Advertise})
	m.emit(Expect{Conn: s.conn, N: int(h.Window), Token: h.Token})
	m.up(s)
}

func (m *Machine) welcome(s *session, w *Welcome) {
	if s.state != sessionDialed {
		m.violation(s, "a welcome to no greeting")
		return
	}
	s.node, s.boot, s.advertise = w.Node, w.Boot, w.Advertise
	switch {
	case w.Version != Version:
		m.closeSession(s, CodeVersion, fmt.Sprintf("this node speaks version %d, the other one %d", Version, w.Version))
		return
	case w.Node == m.o.Node:
		m.closeSession(s, CodeSelf, "a node has dialed itself; give every node a node id of its own")
		return
	}
	for _, o := range m.sorted() {
		if o == s || o.state != sessionUp || o.node != w.Node {
			continue
		}
		if o.boot == w.Boot { // it has two addresses
			l := m.links[s.addr]
			if l != nil {
				l.s = o
			}
			m.closeSession(s, CodeDuplicate, "there is a session with this node already")
			if l != nil {
				l.s = o
				m.flush(l)
			}
			return
		}
		m.closeSession(o, CodeDuplicate, "the peer was started again")
	}
	m.emit(DialData{Conn: s.conn, N: m.o.DataConns, Token: s.token})
	m.up(s)
}

// up begins the work of a session.
func (m *Machine) up(s *session) {
	s.state, s.since = sessionUp, m.now
	m.timers.disarm(&s.greet)
	m.timers.arm(&s.ping, m.now+Time(m.o.PingEvery))
	m.send(s, m.shown())
	m.note(s.name(), false, "session is up")
	for _, l := range m.sortedLinks() {
		if m.session(l) == s {
			l.delay, l.down = 0, 0
			m.flush(l)
		}
	}
	m.armIdle(s)
}

// shown lists our namespaces, as many as a peer is told of.
func (m *Machine) shown() *Namespaces {
	n := &Namespaces{}
	for _, ns := range m.spaces {
		n.Specs = append(n.Specs, ns.JSON())
	}
	return n
}

// SetNamespaces replaces the namespaces of our engines. The newest come last, of
// which peers are told of SpecsMax.
func (m *Machine) SetNamespaces(now Time, list []*block.Namespace) {
	m.now = now
	list = slices.DeleteFunc(slices.Clone(list), func(ns *block.Namespace) bool { return len(ns.JSON()) > SpecBytesMax })
	m.spaces = list[max(0, len(list)-SpecsMax):]
	m.ours = map[block.Fingerprint]*block.Namespace{}
	for _, ns := range m.spaces {
		m.ours[ns.Fingerprint()] = ns
	}
	for _, s := range m.sorted() {
		if s.state == sessionUp {
			m.send(s, m.shown())
		}
	}
	m.settle()
}

func (m *Machine) namespaces(s *session, n *Namespaces) {
	if len(n.Specs) > SpecsMax {
		m.violation(s, fmt.Sprintf("%d namespaces", len(n.Specs)))
		return
	}
	s.spaces, s.shown = nil, map[block.Fingerprint]bool{}
	for _, spec := range n.Specs {
		ns, err := block.ParseNamespace(spec)
		if err != nil {
			m.violation(s, "a namespace that cannot be read: "+err.Error())
			return
		}
		s.spaces = append(s.spaces, ns)
		s.shown[ns.Fingerprint()] = true
	}
}

func (m *Machine) bye(s *session, b *Bye) {
	text := fmt.Sprintf("the peer ended the session: %s (code %d)", b.Text, b.Code)
	if b.Code == CodeDuplicate {
		// Its own connection stays, and comes up in a moment.
		if l := m.links[s.addr]; l != nil && l.s == s {
			l.s = nil
			if o := m.session(l); o != nil {
				m.flush(l)
			}
		}
		s.closing = "duplicate"
	}
	if b.Code == CodeIdle {
		s.closing = "idle"
	}
	m.drop(s, text)
}

// closeSession says Bye and ends a session. What it had is over when Lost comes.
func (m *Machine) closeSession(s *session, code Code, text string) {
	if s.state == sessionClosing {
		return
	}
	m.send(s, &Bye{Code: code, Text: clip(text, TextBytesMax)})
	if code == CodeDuplicate {
		s.closing = "duplicate"
	}
	m.drop(s, text)
}

func clip(s string, n int) string {
	if len(s) > n {
		return s[:n]
	}
	return s
}

// drop ends a session without a word.
func (m *Machine) drop(s *session, why string) {
	if s.state == sessionClosing {
		return
	}
	s.state = sessionClosing
	if s.closing == "" {
		s.closing = why
	}
	for _, t := range []*timer{&s.ping, &s.greet, &s.idle} {
		m.timers.disarm(t)
	}
	for _, k := range sortedKeys(s.aborts) {
		m.timers.disarm(s.aborts[k])
	}
	clear(s.aborts)
	m.emit(CloseConn{Conn: s.conn, Text: why})
}

// Lost tells that a session's connections are closed and nothing touches a slot
// of it any more. Whatever it had under way is over.
func (m *Machine) Lost(now Time, conn ConnID, why string) {
	m.now = now
	s := m.sessions[conn]
	if s == nil {
		return
	}
	was := s.state
	m.drop(s, why)
	delete(m.sessions, conn)
	for _, k := range sortedKeys(s.serves) {
		m.serveLost(s.serves[k])
	}
	for _, k := range sortedKeys(s.rounds) {
		m.roundLost(s.rounds[k])
	}
	for _, l := range m.sortedLinks() {
		if l.s != s {
			continue
		}
		l.s = nil
		switch {
		case s.closing == "duplicate" || was == sessionClosing && s.closing == "idle":
			m.flush(l)
		default:
			m.linkDown(l, s.closing)
		}
	}
	m.settle()
}

func sortedKeys[V any](in map[roundKey]V) []roundKey {
	out := make([]roundKey, 0, len(in))
	for k := range in {
		out = append(out, k)
	}
	slices.SortFunc(out, func(a, b roundKey) int { return cmp.Or(cmp.Compare(a.nonce, b.nonce), cmp.Compare(a.round, b.round)) })
	return out
}

func (m *Machine) sortedLinks() []*link {
	out := make([]*link, 0, len(m.links))
	for _, l := range m.links {
		out = append(out, l)
	}
	slices.SortFunc(out, func(a, b *link) int { return cmp.Compare(a.addr, b.addr) })
	return out
}

// pingDue asks for a sign of life, or gives up.
func (m *Machine) pingDue(s *session) {
	if silent := time.Duration(m.now - s.heard); silent >= m.o.PingEvery*time.Duration(m.o.PingMisses) {
		m.stats.Deaths++
		m.note(s.name(), true, fmt.Sprintf("is dead: nothing heard for %v", silent))
		m.closeSession(s, CodeTimeout, fmt.Sprintf("nothing heard for %v", silent))
		return
	}
	s.pings++
	m.send(s, &Ping{N: s.pings})
	m.timers.arm(&s.ping, m.now+Time(m.o.PingEvery))
}

// armIdle ends a session after a while without work.
func (m *Machine) armIdle(s *session) {
	if s.state != sessionUp {
		return
	}
	busy := len(s.rounds) > 0 || len(s.serves) > 0
	for _, l := range m.links {
		busy = busy || l.s == s && l.sources > 0
	}
	if busy {
		m.timers.disarm(&s.idle)
	} else if s.idle.pos == 0 {
		m.timers.arm(&s.idle, m.now+Time(m.o.IdleTimeout))
	}
}

func (m *Machine) idleDue(s *session) {
	s.closing = "idle"
	m.closeSession(s, CodeIdle, fmt.Sprintf("nothing to do for %v", m.o.IdleTimeout))
}
