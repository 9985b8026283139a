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
	sessionWelcomed                     // what the peer says next tells whether it has taken it
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

	attempts map[uint64][]*serve // producer: serves by nonce
	parked   int                 // producer: serves that wait for an id nobody has heard of
	keys     int                 // producer: of all serves
	pinned   int64               // producer: bytes that serves pin, or ask for
	hungry   []*serve            // producer: serves that wait for room, the next first
	eager    bool                // is in m.eager
	starved  bool                // is in m.starved
	asked    bucket              // producer: rounds
	learned  bucket              // namespaces that were shown

	sources int // consumer: open ones, of links that are bound to this
	garbage int // consumer: payloads in a row with bytes that were wrong

	heard   Time
	unheard int  // pings since then
	partly  int  // loads in a row that came in part only, and not in time
	doubted Time // when the peer greeted again
	pings   uint64
	ping    timer
	greet   timer
	idle    timer
	closing string // why

	blocksIn, bytesIn, blocksOut, bytesOut int64
}

type roundKey struct {
	nonce uint64
	round uint32
}

// bucket bounds how often something happens.
type bucket struct {
	spent float64
	at    Time
}

// take is one time, of at most so many at once and so many a second.
func (b *bucket) take(now Time, burst, perSecond float64) bool {
	b.spent = max(0, b.spent-perSecond*time.Duration(now-b.at).Seconds())
	b.at = now
	if b.spent+1 > burst {
		return false
	}
	b.spent++
	return true
}

// link is what a node knows of an address that its engines want blocks from.
//
// It is kept while it has sources, a session or an attempt at one, and after
// failures for as long again as it was not dialed, so that those who come one
// after the other find what the last one has learned.
type link struct {
	addr    string
	node    string   // who was behind it
	s       *session // up, being greeted or ending, or nil
	dialing bool     // Dial was asked for
	waiting []*round // not sent yet
	sources int
	late    int  // rounds in a row that had no answer in time
	down    Time // not asked before
	delay   time.Duration
	timer   timer // bound of the waiting rounds, else of what is remembered
	again   timer // then it is dialed again
	why     string
}

const (
	lateMax    = 3                      // rounds without an answer, then a peer is not asked for a while
	garbageMax = 8                      // payloads in a row that are wrong, then a session is ended
	dialPause  = 100 * time.Millisecond // before a peer is dialed that has just said there is another connection
)

// stopped is why a session ends whose peer has said so: the ordinary course.
const stopped = "the peer has stopped in order"

// leadsTo says that a link's address is where a session's peer is.
func (l *link) leadsTo(s *session) bool {
	return s.addr == l.addr || s.advertise == l.addr || l.node != "" && l.node == s.node
}

func (s *session) name() string {
	where := cmp.Or(s.addr, s.advertise, fmt.Sprint("connection ", uint64(s.conn)))
	if s.node == "" {
		return where
	}
	return s.node + " at " + where
}

// Connected tells of a new control connection: dialed for a Dial of addr, or
// accepted, with addr empty.
func (m *Machine) Connected(now Time, conn ConnID, addr string) {
	m.now = now
	if _, ok := m.sessions[conn]; ok {
		return
	}
	s := &session{conn: conn, dialed: addr != "", addr: addr, since: now, heard: now, shown: map[block.Fingerprint]bool{},
		rounds: map[roundKey]*round{}, aborts: map[roundKey]*timer{}, serves: map[roundKey]*serve{}, attempts: map[uint64][]*serve{}}
	s.ping.fire = func() { m.pingDue(s) }
	s.greet.fire = func() { m.closeSession(s, CodeTimeout, "no greeting in time") }
	s.idle.fire = func() { m.idleDue(s) }
	m.sessions[conn] = s
	m.timers.arm(&s.greet, now+Time(m.o.ConnectTimeout))
	if !s.dialed {
		s.state = sessionAccepted
		if m.accepted++; m.accepted > m.o.SessionsMax {
			m.closeSession(s, CodeBusy, fmt.Sprintf("%d sessions", m.accepted-1))
		}
		return
	}
	l := m.links[addr]
	if l == nil || !l.dialing || m.draining || m.session(l) != nil {
		if l != nil && l.dialing {
			l.dialing = false
			m.forgetLink(l)
		}
		m.drop(s, "nobody needs it any more") // it has not been greeted: there is no word for it
		return
	}
	l.dialing = false
	m.bind(l, s)
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

// linkDown fails all that waits for a peer, and keeps it from being asked for a
// while: each failure in a row doubles that.
func (m *Machine) linkDown(l *link, why string) {
	m.bind(l, nil)
	m.pause(l, why)
	m.failWaiting(l, CodeUnreachable)
	m.forgetLink(l)
}

func (m *Machine) pause(l *link, why string) {
	l.why, l.late = why, 0
	l.delay = min(max(2*l.delay, m.o.DownBase), m.o.DownMax)
	l.down = m.now + Time(l.delay)
	if why != stopped {
		m.note(l.addr, true, "peer is down: "+why)
	}
}

func (m *Machine) failWaiting(l *link, code Code) {
	m.timers.disarm(&l.timer)
	m.timers.disarm(&l.again)
	waiting := l.waiting
	l.waiting = nil
	for _, r := range waiting {
		m.failRound(r, code)
	}
	m.forgetLink(l)
}

// newLink remembers an address, or is nil if there are too many. Those that
// nobody uses make room.
func (m *Machine) newLink(addr string) *link {
	if len(m.links) >= m.o.LinksMax {
		var idle *link
		for _, l := range m.links {
			if l.sources == 0 && !l.dialing && len(l.waiting) == 0 && (idle == nil || l.addr < idle.addr) {
				idle = l
			}
		}
		if idle == nil {
			m.note(addr, true, fmt.Sprintf("is not asked: there are %d addresses in use", len(m.links)))
			return nil
		}
		m.bind(idle, nil)
		m.dropLink(idle)
	}
	l := &link{addr: addr}
	l.timer.fire = func() { m.linkDue(l) }
	l.again.fire = func() { m.dialAgain(l) }
	m.links[addr] = l
	m.bind(l, m.find(l))
	return l
}

func (m *Machine) dropLink(l *link) {
	m.timers.disarm(&l.timer)
	m.timers.disarm(&l.again)
	delete(m.links, l.addr)
}

// forgetLink drops an address that nobody uses and nothing is to be remembered
// of.
func (m *Machine) forgetLink(l *link) {
	if l.sources > 0 || l.s != nil || l.dialing || len(l.waiting) > 0 || m.links[l.addr] != l {
		return
	}
	if until := l.down + Time(l.delay); until <= m.now {
		m.dropLink(l)
	} else {
		m.timers.arm(&l.timer, until)
	}
}

func (m *Machine) linkDue(l *link) {
	if len(l.waiting) == 0 {
		m.forgetLink(l)
		return
	}
	l.dialing = false // what comes of it is nobody's
	if l.s != nil && l.s.state == sessionDialed {
		m.closeSession(l.s, CodeTimeout, "no greeting in time")
	}
	m.linkDown(l, fmt.Sprintf("no session after %v", m.o.ConnectTimeout))
}

// bind makes a session that of a link.
func (m *Machine) bind(l *link, s *session) {
	o := l.s
	if o == s {
		return
	}
	l.s = s
	if o != nil {
		o.sources -= l.sources
		m.armIdle(o)
	}
	if s != nil {
		s.sources += l.sources
		m.armIdle(s)
	}
}

// session is the one that is up with whoever is behind an address.
func (m *Machine) session(l *link) *session {
	if l.s != nil && l.s.state == sessionUp {
		return l.s
	}
	return nil
}

// find looks for one.
func (m *Machine) find(l *link) (found *session) {
	for _, s := range m.sessions {
		if s.state == sessionUp && l.leadsTo(s) && (found == nil || s.conn < found.conn) {
			found = s
		}
	}
	return found
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
	s.heard, s.unheard = now, 0
	switch x := msg.(type) {
	case *Hello:
		m.hello(s, x)
	case *Welcome:
		m.welcome(s, x)
	case *Bye:
		m.bye(s, x)
	default:
		if _, ok := msg.(*Namespaces); ok && s.state == sessionWelcomed {
			if m.joined(s); s.state == sessionClosing {
				break
			}
		}
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

// Violated tells that what a session's peer sent, or who he is by his
// certificate, is against the protocol. Lost follows.
func (m *Machine) Violated(now Time, conn ConnID, what string) {
	m.now = now
	if s := m.sessions[conn]; s != nil && s.state != sessionClosing {
		m.violation(s, what)
	}
	m.settle()
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
	case h.Node == "" || h.Boot == "" || h.Window == 0 || h.Window > DataConnsMax:
		m.violation(s, fmt.Sprintf("a greeting of %q, run %q, with %d data connections", h.Node, h.Boot, h.Window))
		return
	}
	for _, o := range m.sorted() {
		switch {
		case o == s || o.state == sessionClosing:
		case o.state == sessionDialed && o.addr == h.Advertise:
			// Both have dialed at once: the connection of the smaller node id stays.
			if m.o.Node < h.Node {
				m.closeSession(s, CodeDuplicate, "this node's own connection stays")
				return
			}
			m.closeSession(o, CodeDuplicate, "the peer's own connection stays")
		case o.state != sessionUp || o.node != h.Node:
		case o.boot == h.Boot && m.lives(o):
			// It may have work, so it stays: the peer knows this node by two addresses.
			// The Welcome tells it so.
			m.welcomeBack(s)
			m.closeSession(s, CodeDuplicate, "there is a session with this node already")
			return
		default: // the peer was started again, or has lost it
			m.replace(o, s)
		}
	}
	m.welcomeBack(s)
	m.emit(Expect{Conn: s.conn, N: int(h.Window), Token: h.Token})
	m.up(s)
}

func (m *Machine) welcomeBack(s *session) {
	m.send(s, &Welcome{Version: Version, Node: m.o.Node, Boot: m.o.Boot, Advertise: m.o.Advertise})
}

// replace ends a session in favour of another.
func (m *Machine) replace(o, s *session) {
	why := "replaced by another connection"
	if o.boot != s.boot {
		why = "the peer was started again"
	}
	m.closeSession(o, CodeDuplicate, why)
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
	case w.Node == "" || w.Boot == "":
		m.violation(s, fmt.Sprintf("a welcome of %q, run %q", w.Node, w.Boot))
		return
	}
	l := m.links[s.addr]
	if l != nil {
		l.node = w.Node
	}
	// Whoever was dialed decides which of two sessions stays. What it says next
	// tells: a Bye, or what is said first on a session that is up.
	s.state = sessionWelcomed
	if o := m.upWith(s); o != nil && o.boot == s.boot && l != nil && l.s == s {
		m.bind(l, o)
		m.flush(l)
	}
}

// lives says that a session's peer has it too, as far as one can see at once. It
// is asked when that peer greets again: if it does not answer now, its next
// greeting is welcome.
func (m *Machine) lives(s *session) bool {
	doubted := s.doubted > 0 && s.heard <= s.doubted
	if m.now-s.heard > 2*Time(m.o.PingEvery) || doubted && m.now-s.doubted >= Time(m.o.PingEvery)/4 {
		return false
	}
	if !doubted {
		s.doubted = m.now
		s.pings++
		m.send(s, &Ping{N: s.pings})
	}
	return true
}

// upWith is the session that is up with the node that another one leads to.
func (m *Machine) upWith(s *session) *session {
	for _, o := range m.sorted() {
		if o != s && o.state == sessionUp && o.node == s.node {
			return o
		}
	}
	return nil
}

// joined begins a session that this node has dialed and the other one has taken.
func (m *Machine) joined(s *session) {
	if o := m.upWith(s); o != nil {
		// Each may have taken the other's: then that of the smaller node id stays.
		if o.boot == s.boot && !o.dialed && m.now-o.since < Time(m.o.ConnectTimeout) && o.node < m.o.Node {
			m.closeSession(s, CodeDuplicate, "the peer's own connection stays")
			return
		}
		m.replace(o, s)
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
		if m.session(l) == nil && l.leadsTo(s) {
			m.bind(l, s)
		}
		if l.s == s {
			l.node, l.why, l.delay, l.down, l.late = s.node, "", 0, 0, 0
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
	known := map[string]*block.Namespace{}
	for _, ns := range s.spaces {
		known[string(ns.JSON())] = ns
	}
	s.spaces, s.shown = nil, map[block.Fingerprint]bool{}
	for _, spec := range n.Specs {
		ns := known[string(spec)]
		if ns == nil { // to read them is work
			if !s.learned.take(m.now, 4*SpecsMax, SpecsMax/4) {
				m.violation(s, "new namespaces all the time")
				return
			}
			var err error
			if ns, err = block.ParseNamespace(spec); err != nil {
				m.violation(s, "a namespace that cannot be read: "+err.Error())
				return
			}
		}
		s.spaces = append(s.spaces, ns)
		s.shown[ns.Fingerprint()] = true
	}
}

func (m *Machine) bye(s *session, b *Bye) {
	switch b.Code {
	case CodeDuplicate: // its own connection stays, and is up or about to be
		s.closing = "duplicate"
	case CodeIdle:
		s.closing = "idle"
	case CodeDraining:
		s.closing = stopped
		m.note(s.name(), false, stopped+": "+b.Text)
	}
	m.drop(s, fmt.Sprintf("the peer ended the session: %s (code %d)", b.Text, b.Code))
	for _, l := range m.sortedLinks() {
		if l.s == s && m.find(l) != nil {
			m.bind(l, m.find(l))
			m.flush(l)
		}
	}
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
	m.drop(s, why)
	delete(m.sessions, conn)
	if !s.dialed {
		m.accepted--
	}
	if s.starved {
		m.starved = slices.DeleteFunc(m.starved, func(o *session) bool { return o == s })
	}
	for _, k := range sortedKeys(s.serves) {
		m.serveLost(s.serves[k])
	}
	for _, k := range sortedKeys(s.rounds) {
		m.roundLost(s.rounds[k], s.closing == "duplicate")
	}
	for _, l := range m.sortedLinks() {
		if l.s != s {
			continue
		}
		m.bind(l, m.find(l))
		switch {
		case l.s != nil || s.closing == "idle":
			m.flush(l)
		case s.closing == "duplicate":
			if m.timers.arm(&l.again, now+Time(dialPause)); len(l.waiting) == 0 {
				m.timers.disarm(&l.again)
				m.forgetLink(l)
			}
		default:
			m.linkDown(l, s.closing)
		}
	}
	m.settle()
}

// dialAgain dials if there is still need.
func (m *Machine) dialAgain(l *link) {
	if len(l.waiting) > 0 && !l.dialing && l.s == nil {
		l.dialing = true
		m.emit(Dial{Addr: l.addr})
	}
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

// pingDue asks for a sign of life, or gives up. Pings count and not time: after
// a stop of this node a peer's signs may be there, and not be read yet.
func (m *Machine) pingDue(s *session) {
	if s.unheard >= m.o.PingMisses {
		why := fmt.Sprintf("nothing heard for %v", time.Duration(m.now-s.heard))
		m.stats.Deaths++
		m.note(s.name(), true, "is dead: "+why)
		m.closeSession(s, CodeTimeout, why)
		return
	}
	s.pings++
	s.unheard++
	m.send(s, &Ping{N: s.pings})
	m.timers.arm(&s.ping, m.now+Time(m.o.PingEvery))
}

// armIdle ends a session after a while without work.
func (m *Machine) armIdle(s *session) {
	switch {
	case s.state != sessionUp:
	case len(s.rounds)+len(s.serves)+s.sources > 0:
		m.timers.disarm(&s.idle)
	case s.idle.pos == 0:
		m.timers.arm(&s.idle, m.now+Time(m.o.IdleTimeout))
	}
}

func (m *Machine) idleDue(s *session) {
	s.closing = "idle"
	m.closeSession(s, CodeIdle, fmt.Sprintf("nothing to do for %v", m.o.IdleTimeout))
}
