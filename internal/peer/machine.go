package peer

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
)

// Time is a point in time in nanoseconds, of a monotonic clock.
type Time int64

// Identifiers. ConnID names a control connection, and is its owner's to choose;
// JobID is the core's; ServeID is the machine's.
type (
	ConnID  uint64
	JobID   uint64
	ServeID uint64
)

// Role is what a source may take for granted.
type Role uint8

const (
	RoleProbe  Role = iota + 1 // remote_kv_source: ask, then fetch what is there
	RoleAssume                 // remote_prefiller: everything is there, or will be
)

// Source is one request's view of one producer.
type Source struct {
	Seq  uint64 // the request's, in the core
	Addr string // host:port
	ID   string // KV request id
	Role Role
	NS   block.Fingerprint
}

// Options of a Machine. Zero values get defaults.
type Options struct {
	Node      string // required: who this is
	Boot      string // required: which run of it
	Advertise string // where others dial it

	DataConns      int           // data connections of a session that this node dials; default 2
	ConnectTimeout time.Duration // from the need of a session to its Welcome; default 2 s
	LookupTimeout  time.Duration // of a Lookup, at the producer too; default 2 s
	AbortTimeout   time.Duration // from Abort to AbortAck; then the session is ended; default 5 s
	HitTimeout     time.Duration // from Answer to Fetch; then its pins are given back; default 10 s
	ParkTimeout    time.Duration // for a KV request id that nobody here has heard of; default 30 s
	IdleTimeout    time.Duration // a session without a round or a source is ended; default 5 min
	PingEvery      time.Duration // default 1 s
	PingMisses     int           // pings without any frame of the peer: it is dead; default 5
	DownBase       time.Duration // a peer that failed is not dialed for so long; default 250 ms, doubling
	DownMax        time.Duration // to this; default 30 s

	SessionsMax   int           // that peers have dialed; default 256
	LinksMax      int           // addresses that engines name; default 1024
	ParkedMax     int           // fetches of one session that wait for an id nobody has heard of; default 256
	EndedMax      int           // ids whose supply has ended that are remembered; default 65536
	EndedFor      time.Duration // default 10 min
	QuotaBytes    int64         // that one peer's serves may pin; default 1 GiB, in a node a quarter of its primary
	PinnedMax     int64         // that those of all peers may pin; default twice QuotaBytes
	LookupsPerSec int           // lookups, and fetches without one, of one session; default 1000
}

// Item is one block of a fetch: a slot of ours that is to hold it.
type Item struct {
	Key    block.Key
	Slot   uint64 // the caller's name for it
	Length int
}

// Result is one item's outcome, given when its slot is quiet.
type Result struct {
	Index int
	Sum   uint64 // when Code is CodeOK
	Code  Code
	Class tier.Class
	Cause tier.Cause
}

// Lease is a block that a serve may send: where it is, and its checksum.
type Lease struct {
	Slot   uint64
	Gen    uint32
	Sum    uint64
	Length int
}

// Found is what the core says of one key of a serve.
type Found struct {
	Lease   Lease // set when Code is CodeOK
	Code    Code
	Pending bool // with CodeAbsent: it will be there, or not, later than Until
}

// SupplyState is a step in the life of a supply: open, more, final, ended.
type SupplyState uint8

const (
	SupplyOpen SupplyState = iota
	SupplyMore
	SupplyFinal
	SupplyEnded
)

// Effect is something the machine wants done, in the order given.
type Effect interface{ effect() }

// Effects on connections.
type (
	// Dial asks for a control connection; Connected or DialFailed answers.
	Dial struct{ Addr string }
	// DialData asks for so many data connections of a session, which show Token.
	DialData struct {
		Conn  ConnID
		N     int
		Token [tokenBytes]byte
	}
	// Expect lets data connections that show Token join an accepted session.
	Expect struct {
		Conn  ConnID
		N     int
		Token [tokenBytes]byte
	}
	// Send sends a control frame.
	Send struct {
		Conn ConnID
		Msg  Message
	}
	// CloseConn ends a session's connections, after what was sent; Lost follows.
	CloseConn struct {
		Conn ConnID
		Text string
	}
)

// Effects of the consumer.
type (
	// Grant lets the payload of one data frame of a session go into a slot.
	Grant struct {
		Conn   ConnID
		Nonce  uint64
		Round  uint32
		Index  uint32
		Slot   uint64
		Length int
	}
	// Revoke takes grants back: Detached answers for each once nothing can write
	// its slot any more.
	Revoke struct {
		Conn    ConnID
		Nonce   uint64
		Round   uint32
		Indexes []uint32
	}
	// Report tells the core how items of a job came out. After Last the job is over.
	Report struct {
		Job     JobID
		Results []Result
		Last    bool
		Took    Time // since the Submit; 0 if that failed at once
	}
	// ReportProbe answers a probe; with a Code that is not CodeOK it has failed.
	ReportProbe struct {
		Job   JobID
		Found []bool
		Code  Code
	}
)

// Effects of the producer.
type (
	// Serve asks the core for blocks: which it has, or gets from below, pinned.
	// Served answers, by Until at the latest, before the same ID is asked again;
	// not after ServeEnd.
	Serve struct {
		ID    ServeID
		NS    block.Fingerprint
		Keys  []block.Key
		Until Time
	}
	// Transmit sends blocks of a serve, in any order and as the session's turn
	// comes; Sent answers for each once its slot is not read any more.
	Transmit struct {
		Conn   ConnID
		ID     ServeID
		Blocks []DataBlock
	}
	// Unsend takes back what of a serve has not begun to be sent; Sent answers
	// for each all the same.
	Unsend struct {
		Conn ConnID
		ID   ServeID
	}
	// Release gives back one pin of a serve.
	Release struct {
		ID    ServeID
		Lease Lease
	}
	// ServeEnd gives back all pins of a serve, and takes back what the core was
	// asked. Nothing of it is being sent.
	ServeEnd struct{ ID ServeID }
	// ReleaseSupply gives up the hand-over of a request: it has been fetched.
	ReleaseSupply struct{ Seq uint64 }
)

// DataBlock is one block to be sent.
type DataBlock struct {
	Head  DataHead
	Lease Lease
}

// Note is for the log: what happened with which peer.
type Note struct {
	Peer string // node id and address, as far as known
	Bad  bool   // a violation or a death, not the ordinary course
	Text string
}

func (Dial) effect()          {}
func (DialData) effect()      {}
func (Expect) effect()        {}
func (Send) effect()          {}
func (CloseConn) effect()     {}
func (Grant) effect()         {}
func (Revoke) effect()        {}
func (Report) effect()        {}
func (ReportProbe) effect()   {}
func (Serve) effect()         {}
func (Transmit) effect()      {}
func (Unsend) effect()        {}
func (Release) effect()       {}
func (ServeEnd) effect()      {}
func (ReleaseSupply) effect() {}
func (Note) effect()          {}

// Stats counts since the start, but for the sizes of tables at the end.
type Stats struct {
	Blocks, Bytes         int64 // received
	SentBlocks, SentBytes int64
	Lookups, Fetches      int64          // of peers, admitted
	Refused               [codeEnd]int64 // of peers: rounds, or keys of a fetch
	Failures              [codeEnd]int64 // of ours: keys, or probes
	Violations            int64          // sessions ended for breaking the protocol
	Deaths                int64          // sessions whose peer fell silent
	Corrupt               int64          // payloads that did not match their checksum
	Strays                int64          // frames and news of what is over
	FastFails             int64          // rounds not tried, for the peer is down
	HitsExpired           int64          // answered lookups that nobody fetched

	Sessions, Links, Sources, Rounds, Serves, Supplies, Parked, Aborts, Ended, Timers int
	Pinned                                                                            int64 // bytes, by peers' quotas
}

// Machine decides for one node. It is not safe for concurrent use.
type Machine struct {
	o        Options
	now      Time
	draining bool
	secret   [32]byte // makes nonces and tokens
	lastID   uint64

	sessions map[ConnID]*session
	accepted int              // of them, that peers have dialed
	links    map[string]*link // by address
	spaces   []*block.Namespace
	ours     map[block.Fingerprint]*block.Namespace

	sources map[uint64]*source
	rounds  map[JobID]*round
	noted   []*round // with results to be told

	serves   map[ServeID]*serve
	supplies map[supplyKey]*supply
	parked   map[supplyKey][]*serve // that wait for a supply nobody has heard of
	ended    endedIDs
	pinned   int64      // bytes, of all sessions
	telling  []*serve   // with failures to be told
	eager    []*session // whose serves wait for room of their own, of which there is more now
	starved  []*session // whose serves wait for room that all peers share, the next first

	timers  timers
	effects []Effect
	stats   Stats
}

// New makes a machine. secret makes nonces and tokens: a token admits a data
// connection to a session.
func New(o Options, secret [32]byte) *Machine {
	o.ensureDefaults()
	return &Machine{o: o, secret: secret, sessions: map[ConnID]*session{}, links: map[string]*link{}, ours: map[block.Fingerprint]*block.Namespace{},
		sources: map[uint64]*source{}, rounds: map[JobID]*round{}, serves: map[ServeID]*serve{}, supplies: map[supplyKey]*supply{}, parked: map[supplyKey][]*serve{},
		ended: endedIDs{most: o.EndedMax, keep: Time(o.EndedFor), at: map[supplyKey]Time{}}}
}

func (o *Options) ensureDefaults() {
	dur := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	num := func(n *int, v int) {
		if *n == 0 {
			*n = v
		}
	}
	dur(&o.ConnectTimeout, 2*time.Second)
	dur(&o.LookupTimeout, 2*time.Second)
	dur(&o.AbortTimeout, 5*time.Second)
	dur(&o.HitTimeout, 10*time.Second)
	dur(&o.ParkTimeout, 30*time.Second)
	dur(&o.IdleTimeout, 5*time.Minute)
	dur(&o.PingEvery, time.Second)
	dur(&o.DownBase, 250*time.Millisecond)
	dur(&o.DownMax, 30*time.Second)
	dur(&o.EndedFor, 10*time.Minute)
	num(&o.DataConns, 2)
	num(&o.PingMisses, 5)
	num(&o.SessionsMax, 256)
	num(&o.LinksMax, 1024)
	num(&o.ParkedMax, 256)
	num(&o.EndedMax, 65536)
	num(&o.LookupsPerSec, 1000)
	if o.QuotaBytes == 0 {
		o.QuotaBytes = 1 << 30
	}
	if o.PinnedMax == 0 {
		o.PinnedMax = 2 * o.QuotaBytes
	}
}

func (m *Machine) emit(e Effect) { m.effects = append(m.effects, e) }

// send sends a control frame on a session that can still take one.
func (m *Machine) send(s *session, msg Message) {
	if s.state != sessionClosing {
		m.emit(Send{Conn: s.conn, Msg: msg})
	}
}

func (m *Machine) note(peer string, bad bool, text string) {
	m.emit(Note{Peer: peer, Bad: bad, Text: text})
}

// draw is the next number of a sequence that nobody can go on with who sees it.
func (m *Machine) draw() uint64 {
	m.lastID++
	sum := sha256.Sum256(binary.BigEndian.AppendUint64(m.secret[:len(m.secret):len(m.secret)], m.lastID))
	return binary.BigEndian.Uint64(sum[:])
}

func (m *Machine) nonce() uint64 {
	for {
		if n := m.draw(); n != 0 {
			return n
		}
	}
}

// settle tells what the call that ends has brought about.
func (m *Machine) settle() {
	m.feed()
	for i := 0; i < len(m.telling); i++ {
		if v := m.telling[i]; len(v.failed) > 0 {
			m.tellFailed(v)
		}
	}
	clear(m.telling)
	m.telling = m.telling[:0]
	for i := 0; i < len(m.noted); i++ {
		r := m.noted[i]
		r.noted = false
		out := r.out
		r.out = nil
		m.emit(Report{Job: r.job, Results: out, Last: r.left == 0, Took: m.now - r.since})
		if r.left == 0 {
			m.endRound(r)
		}
	}
	clear(m.noted)
	m.noted = m.noted[:0]
}

// TakeEffects moves the effects since the last call to buf. The caller performs
// them in order before it lets another call in.
func (m *Machine) TakeEffects(buf []Effect) []Effect {
	buf = append(buf, m.effects...)
	clear(m.effects)
	m.effects = m.effects[:0]
	return buf
}

// NextDeadline is when Tick has something to do, 0 for never.
func (m *Machine) NextDeadline() Time { return m.timers.next() }

// Tick ends what is due at now.
func (m *Machine) Tick(now Time) {
	m.now = now
	for t := m.timers.due(now); t != nil; t = m.timers.due(now) {
		t.fire()
	}
	m.ended.trim(now)
	m.settle()
}

// Drain makes the machine begin nothing new: rounds of ours and of peers are
// refused. What is under way goes on.
func (m *Machine) Drain(now Time) {
	m.now = now
	m.draining = true
	for _, l := range m.sortedLinks() {
		m.failWaiting(l, CodeDraining)
	}
	for _, s := range m.sorted() {
		for _, k := range sortedKeys(s.serves) {
			if v := s.serves[k]; v.park { // nobody will prepare anything any more
				m.failOpen(v, CodeDraining)
			}
		}
	}
	m.settle()
}

// Close ends all sessions. Lost comes for each.
func (m *Machine) Close(now Time) {
	m.Drain(now)
	for _, s := range m.sorted() {
		m.closeSession(s, CodeDraining, "this node is stopping")
	}
	m.settle()
}

// Stats is a snapshot.
func (m *Machine) Stats() Stats {
	s := m.stats
	s.Sessions, s.Links, s.Sources, s.Rounds = len(m.sessions), len(m.links), len(m.sources), len(m.rounds)
	s.Serves, s.Supplies, s.Ended, s.Timers = len(m.serves), len(m.supplies), len(m.ended.at), m.timers.Len()
	for _, x := range m.sessions {
		s.Parked += x.parked
		s.Aborts += len(x.aborts)
	}
	s.Pinned = m.pinned
	return s
}

// CheckInvariants walks the tables and reports a contradiction.
func (m *Machine) CheckInvariants() error {
	up := map[string]ConnID{}
	var all int64
	serves, rounds := 0, 0
	for conn, s := range m.sessions {
		if s.state == sessionUp {
			if o, ok := up[s.node]; ok {
				return fmt.Errorf("peer-one-session: connections %d and %d to %s", o, conn, s.node)
			}
			up[s.node] = conn
			if idle := len(s.rounds)+len(s.serves)+s.sources == 0; idle != (s.idle.pos != 0) || s.ping.pos == 0 {
				return fmt.Errorf("session %d: idle %v, and its timers say otherwise", conn, idle)
			}
		}
		pinned, parked, keys := int64(0), 0, 0
		for k, v := range s.serves {
			if m.serves[v.id] != v || v.s != s || v.key != k || !slices.Contains(s.attempts[k.nonce], v) {
				return fmt.Errorf("serve %d is in a session and not in the table", v.id)
			}
			if v.park {
				parked++
			}
			bytes, err := m.checkServe(v)
			if err != nil {
				return err
			}
			pinned += bytes
			keys += len(v.keys)
		}
		if pinned != s.pinned || parked != s.parked || keys != s.keys {
			return fmt.Errorf("session %d: pinned %d, counted %d; parked %d, counted %d; %d keys, counted %d", conn, pinned, s.pinned, parked, s.parked, keys, s.keys)
		}
		all += pinned
		serves += len(s.serves)
		for _, list := range s.attempts {
			parked -= len(list)
		}
		if len(s.serves)+parked-s.parked != 0 {
			return fmt.Errorf("session %d: %d serves, and not so many by attempt", conn, len(s.serves))
		}
		for _, v := range s.hungry {
			if !v.hungry || v.ended || m.serves[v.id] != v {
				return fmt.Errorf("serve %d is over, and in a queue for room", v.id)
			}
		}
		for k, r := range s.rounds {
			if m.rounds[r.job] != r || r.s != s || r.key() != k {
				return fmt.Errorf("round %d of job %d is in a session and not in the table", k.round, r.job)
			}
		}
		rounds += len(s.rounds)
	}
	if serves != len(m.serves) || all != m.pinned {
		return fmt.Errorf("%d serves, in sessions %d; %d bytes pinned, counted %d", len(m.serves), serves, all, m.pinned)
	}
	if len(m.telling)+len(m.noted)+len(m.eager) != 0 {
		return fmt.Errorf("a call has ended and has not settled")
	}
	for k, list := range m.parked {
		for _, v := range list {
			if !v.park || v.kvID != k.id {
				return fmt.Errorf("serve %d is listed as parked", v.id)
			}
		}
	}
	for k, p := range m.supplies {
		if len(p.seqs) == 0 || p.key != k {
			return fmt.Errorf("supply %q has no request", k.id)
		}
		for _, v := range p.serves {
			if m.serves[v.id] != v || v.supply != p {
				return fmt.Errorf("serve %d is listed by a supply", v.id)
			}
		}
	}
	for job, r := range m.rounds {
		left := 0
		for i := range r.items {
			if !r.items[i].told {
				left++
			}
		}
		if left != r.left || r.items != nil && left == 0 {
			return fmt.Errorf("peer-answer-once: job %d has %d items to tell, counted %d", job, left, r.left)
		}
		if r.s != nil {
			rounds--
			continue
		}
		if l := r.src.link; !slices.Contains(l.waiting, r) || l.timer.pos == 0 {
			return fmt.Errorf("nothing ends the wait of job %d", job)
		}
	}
	if rounds != 0 {
		return fmt.Errorf("sessions have %d rounds that are not in the table", rounds)
	}
	return m.checkLinks()
}

func (m *Machine) checkServe(v *serve) (pinned int64, err error) {
	var count [keyDone + 1]int
	need := int64(0)
	for i := range v.keys {
		k := &v.keys[i]
		count[k.state]++
		if k.state.charged() {
			pinned += k.bytes
		}
		if k.state == keyTodo {
			need += k.bytes
		}
	}
	switch {
	case count[keySending] != v.sending || count[keyAsked] != len(v.asking) || count[keyTodo] != len(v.todo) ||
		count[keyAbsent] != len(v.absent) || count[keyEarly] != len(v.early):
		return 0, fmt.Errorf("serve %d has %v keys by state, and lists others", v.id, count)
	case !v.ended && (len(v.keys)-count[keyDone] != v.left || need != v.need):
		return 0, fmt.Errorf("serve %d: %d keys are left, counted %d; %d bytes to ask for, counted %d", v.id, len(v.keys)-count[keyDone], v.left, need, v.need)
	case !v.ended && v.state == serveFetching && len(v.todo) > 0 && v.asking == nil && !v.hungry:
		return 0, fmt.Errorf("serve %d is to ask, and does not wait for room", v.id)
	case v.hungry && !slices.Contains(v.s.hungry, v):
		return 0, fmt.Errorf("serve %d waits for room in no queue", v.id)
	case v.park && !slices.Contains(m.parked[supplyKey{v.ns.Fingerprint(), v.kvID}], v) || v.supply != nil && !slices.Contains(v.supply.serves, v):
		return 0, fmt.Errorf("serve %d awaits what does not know of it", v.id)
	case v.timer.pos == 0 && v.sending == 0 && v.asking == nil:
		return 0, fmt.Errorf("peer-serve-ends: nothing ends serve %d", v.id)
	}
	return pinned, nil
}

func (m *Machine) checkLinks() error {
	sources := map[*link]int{}
	for _, s := range m.sources {
		if s.link != nil {
			sources[s.link]++
		}
	}
	bySession := map[*session]int{}
	for addr, l := range m.links {
		if sources[l] != l.sources {
			return fmt.Errorf("link %s has %d sources, counted %d", addr, sources[l], l.sources)
		}
		for _, r := range l.waiting {
			if m.rounds[r.job] != r || r.s != nil {
				return fmt.Errorf("job %d waits for %s, and is over or sent", r.job, addr)
			}
		}
		if l.s != nil {
			if m.sessions[l.s.conn] != l.s {
				return fmt.Errorf("link %s has a session that is lost", addr)
			}
			bySession[l.s] += l.sources
		} else if l.sources == 0 && !l.dialing && len(l.waiting) == 0 && l.timer.pos == 0 {
			return fmt.Errorf("nothing ends the memory of %s", addr)
		}
	}
	for conn, s := range m.sessions {
		if s.sources != bySession[s] {
			return fmt.Errorf("session %d has %d sources, counted %d", conn, bySession[s], s.sources)
		}
	}
	return nil
}
