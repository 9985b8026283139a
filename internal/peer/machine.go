package peer

import (
	"cmp"
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

	SessionsMax   int           // default 256
	ParkedMax     int           // fetches of one session that wait for an id nobody has heard of; default 256
	EndedMax      int           // ids whose supply has ended that are remembered; default 65536
	EndedFor      time.Duration // default 10 min
	QuotaBytes    int64         // that one peer's serves may pin; default 1 GiB
	LookupsPerSec int           // of one session; default 1000
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
		Code Code
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
	// Served answers, by Until at the latest, before the same ID is asked again.
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
	// ServeEnd gives back all pins of a serve. Nothing of it is being sent.
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
	links    map[string]*link // by address
	spaces   []*block.Namespace
	ours     map[block.Fingerprint]*block.Namespace

	sources map[uint64]*source
	rounds  map[JobID]*round
	noted   []*round // with results to be told

	serves   map[ServeID]*serve
	supplies map[supplyKey]*supply
	ended    endedIDs
	failing  []failing
	freed    []*session // with room in their quota since the last settle

	timers  timers
	effects []Effect
	stats   Stats
}

// New makes a machine. secret makes nonces and tokens: a token admits a data
// connection to a session.
func New(o Options, secret [32]byte) *Machine {
	o.ensureDefaults()
	return &Machine{o: o, secret: secret, sessions: map[ConnID]*session{}, links: map[string]*link{}, ours: map[block.Fingerprint]*block.Namespace{},
		sources: map[uint64]*source{}, rounds: map[JobID]*round{}, serves: map[ServeID]*serve{}, supplies: map[supplyKey]*supply{},
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
	num(&o.ParkedMax, 256)
	num(&o.EndedMax, 65536)
	num(&o.LookupsPerSec, 1000)
	if o.QuotaBytes == 0 {
		o.QuotaBytes = 1 << 30
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
	for i := 0; i < len(m.freed); i++ {
		s := m.freed[i]
		s.freed = false
		if s.state != sessionUp {
			continue
		}
		for _, k := range sortedKeys(s.serves) {
			if v := s.serves[k]; v != nil && v.state == serveFetching {
				m.ask(v)
				m.proceed(v)
			}
		}
	}
	clear(m.freed)
	m.freed = m.freed[:0]
	m.tellFailing()
	for i := 0; i < len(m.noted); i++ {
		r := m.noted[i]
		r.noted = false
		out := r.out
		r.out = nil
		m.emit(Report{Job: r.job, Results: out, Last: r.left == 0})
		if r.left == 0 {
			m.endRound(r)
		}
	}
	clear(m.noted)
	m.noted = m.noted[:0]
}

func (m *Machine) sortedRounds() []*round {
	out := make([]*round, 0, len(m.rounds))
	for _, r := range m.rounds {
		out = append(out, r)
	}
	slices.SortFunc(out, func(a, b *round) int { return cmp.Compare(a.job, b.job) })
	return out
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
		waiting := l.waiting
		l.waiting = nil
		for _, r := range waiting {
			m.failRound(r, CodeDraining)
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
		s.Pinned += x.pinned
	}
	return s
}

// CheckInvariants walks the tables and reports a contradiction.
func (m *Machine) CheckInvariants() error {
	up := map[string]ConnID{}
	for conn, s := range m.sessions {
		if s.state == sessionUp {
			if o, ok := up[s.node]; ok {
				return fmt.Errorf("peer-one-session: connections %d and %d to %s", o, conn, s.node)
			}
			up[s.node] = conn
		}
		var pinned int64
		parked := 0
		for k, v := range s.serves {
			if m.serves[v.id] != v || v.s != s || v.key != k {
				return fmt.Errorf("serve %d is in a session and not in the table", v.id)
			}
			if v.park {
				parked++
			}
			for i := range v.keys {
				if v.keys[i].charged {
					pinned += v.keys[i].bytes
				}
			}
		}
		if pinned != s.pinned || parked != s.parked || pinned < 0 {
			return fmt.Errorf("session %d: pinned %d, counted %d; parked %d, counted %d", conn, pinned, s.pinned, parked, s.parked)
		}
		for k, r := range s.rounds {
			if m.rounds[r.job] != r || r.s != s || r.key() != k {
				return fmt.Errorf("round %d of job %d is in a session and not in the table", k.round, r.job)
			}
		}
	}
	for id, v := range m.serves {
		sending := 0
		for i := range v.keys {
			if v.keys[i].sent && v.keys[i].have {
				sending++
			}
		}
		if v.s != nil && sending != v.sending {
			return fmt.Errorf("serve %d: %d blocks being sent, counted %d", id, sending, v.sending)
		}
		if v.timer.pos == 0 && v.sending == 0 && v.asking == nil {
			return fmt.Errorf("peer-serve-ends: nothing ends serve %d", id)
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
		if r.s == nil && r.src.link.s == nil && !r.src.link.dialing && r.src.link.timer.pos == 0 {
			return fmt.Errorf("nothing ends the wait of job %d", job)
		}
	}
	sources := map[*link]int{}
	for _, s := range m.sources {
		sources[s.link]++
	}
	for addr, l := range m.links {
		if sources[l] != l.sources {
			return fmt.Errorf("link %s has %d sources, counted %d", addr, sources[l], l.sources)
		}
	}
	return nil
}
