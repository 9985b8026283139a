package peer

import (
	"fmt"
	"slices"
	"strings"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
)

// source is a Source that is open.
type source struct {
	Source
	nonce    uint64
	link     *link    // nil: there were too many
	last     uint32   // number of its newest round
	answered uint32   // round whose lookup was answered and that no fetch has closed; 0: none
	rounds   []*round // that are not over, the oldest first
	sent     bool     // something of it was said to the peer
	got, bad int      // blocks that came, and that did not
}

// round is a lookup or a fetch as its consumer has it.
//
// INVARIANT(peer-answer-once): each item of a round is reported once, when it has
// its outcome and nothing can write its slot.
type round struct {
	src   *source
	num   uint32
	job   JobID
	items []item      // of a fetch
	keys  []block.Key // of a lookup
	since Time
	until Time
	s     *session // that it was sent on; nil: it was not, or is over
	left  int      // items that are not reported
	over  bool     // a lookup that is answered or given up
	moves int      // it was sent so often before, on connections that gave way to others
	known bool     // why the peer has no such namespace was noted
	out   []Result // to be reported by settle
	noted bool     // is in m.noted
}

type item struct {
	Item
	code    Code // its outcome, if settled
	sum     uint64
	settled bool
	quiet   bool // nothing can write the slot
	told    bool
	revoked bool
	garbage bool // what came did not match its checksum
}

func (r *round) key() roundKey { return roundKey{r.src.nonce, r.num} }

// OpenSource begins a request's view of a producer. It sends nothing: the first
// question does. It fails for what can never work.
func (m *Machine) OpenSource(now Time, src Source) error {
	m.now = now
	switch {
	case m.sources[src.Seq] != nil:
		return fmt.Errorf("peer: source %d is open already", src.Seq)
	case len(src.ID) == 0 || len(src.ID) > IDBytesMax:
		return fmt.Errorf("peer: kv_request_id has %d bytes, want 1 to %d", len(src.ID), IDBytesMax)
	case src.Role != RoleProbe && src.Role != RoleAssume:
		return fmt.Errorf("peer: role %d is none", src.Role)
	case src.Addr == m.o.Advertise:
		return fmt.Errorf("peer: remote_host and remote_port are this node's own (%s)", src.Addr)
	}
	l := m.links[src.Addr]
	if l == nil {
		l = m.newLink(src.Addr)
	}
	m.sources[src.Seq] = &source{Source: src, nonce: m.nonce(), link: l}
	if l != nil {
		m.count(l, 1)
	}
	return nil
}

// count keeps the number of a link's sources, with it and with its session.
func (m *Machine) count(l *link, n int) {
	l.sources += n
	if l.s != nil {
		l.s.sources += n
		m.armIdle(l.s)
	}
	m.forgetLink(l)
}

// CloseSource ends a request's view: the request has finished. Jobs of it should
// have been cancelled; those that were not are now. It may be called for a source
// that is not open.
func (m *Machine) CloseSource(now Time, seq uint64) {
	m.now = now
	src := m.sources[seq]
	if src == nil {
		return
	}
	for _, r := range slices.Clone(src.rounds) {
		m.cancel(r)
	}
	delete(m.sources, seq)
	if l := src.link; l != nil {
		if s := m.session(l); s != nil && src.sent {
			complete := src.Role == RoleAssume && src.got > 0 && src.bad == 0
			m.send(s, &Finished{ID: src.ID, Nonce: src.nonce, NS: src.NS, Complete: complete})
		}
		m.count(l, -1)
	}
	m.settle()
}

// Probe asks a source which of the keys its producer has; ReportProbe answers.
func (m *Machine) Probe(now Time, job JobID, seq uint64, keys []block.Key, until Time) {
	m.now = now
	src := m.sources[seq]
	if src == nil || m.rounds[job] != nil || len(keys) == 0 || len(keys) > KeysMax {
		m.emit(ReportProbe{Job: job, Code: CodeFailed})
		return
	}
	r := &round{src: src, job: job, keys: keys, until: until}
	m.begin(r)
	m.settle()
}

// Submit asks a source for blocks. Each item is told in a Report, once.
func (m *Machine) Submit(now Time, job JobID, seq uint64, items []Item, until Time) {
	m.now = now
	src := m.sources[seq]
	r := &round{src: src, job: job, since: now, until: until, items: make([]item, len(items)), left: len(items)}
	for i := range items {
		r.items[i] = item{Item: items[i], quiet: true}
	}
	if src == nil || m.rounds[job] != nil || len(items) == 0 || len(items) > KeysMax {
		out := make([]Result, len(items))
		for i := range out {
			out[i] = result(i, CodeFailed, 0)
		}
		m.emit(Report{Job: job, Results: out, Last: true})
		return
	}
	m.begin(r)
	m.settle()
}

// begin enters a round and sends it, or has it wait for a session.
func (m *Machine) begin(r *round) {
	src, l := r.src, r.src.link
	m.rounds[r.job] = r
	src.rounds = append(src.rounds, r)
	if r.items != nil && src.answered != 0 {
		r.num, src.answered = src.answered, 0 // closes it
	} else {
		src.last++
		r.num = src.last
		if r.items == nil && src.answered != 0 { // an older answer is void for what follows
			if s := m.session(l); s != nil { // l is not nil, for it was answered
				m.giveUp(s, roundKey{src.nonce, src.answered})
			}
			src.answered = 0
		}
	}
	switch {
	case m.draining:
		m.failRound(r, CodeDraining)
	case l == nil:
		m.failRound(r, CodeBusy)
	case m.now < l.down:
		m.stats.FastFails++
		m.failRound(r, CodeUnreachable)
	case m.session(l) != nil:
		m.transmit(r, m.session(l))
	case len(l.waiting) >= RoundsMax:
		m.failRound(r, CodeBusy)
	default:
		m.await(r)
		if l.again.pos == 0 {
			m.dialAgain(l)
		}
	}
}

// await has a round wait for a session.
func (m *Machine) await(r *round) {
	l := r.src.link
	l.waiting = append(l.waiting, r)
	if len(l.waiting) == 1 {
		m.timers.arm(&l.timer, m.now+Time(m.o.ConnectTimeout))
	}
}

// flush sends what waited for a session, or dials for it.
func (m *Machine) flush(l *link) {
	s := m.session(l)
	if s == nil {
		m.dialAgain(l)
		m.forgetLink(l)
		return
	}
	m.timers.disarm(&l.timer)
	m.timers.disarm(&l.again)
	waiting := l.waiting
	l.waiting = nil
	for _, r := range waiting {
		m.transmit(r, s)
	}
}

// transmit sends a round.
func (m *Machine) transmit(r *round, s *session) {
	wait := uint32(max(0, min(r.until-m.now, 1<<40)) / 1e6)
	src := r.src
	r.s, src.sent = s, true
	s.rounds[r.key()] = r
	m.armIdle(s)
	if r.items == nil {
		m.send(s, &Lookup{ID: src.ID, Nonce: src.nonce, Round: r.num, NS: src.NS, WaitMS: wait, Keys: r.keys})
		return
	}
	f := &Fetch{ID: src.ID, Nonce: src.nonce, Round: r.num, NS: src.NS, Await: src.Role == RoleAssume, WaitMS: wait}
	for i := range r.items {
		it := &r.items[i]
		if !it.settled { // else it has come on another connection
			it.quiet = false
			m.emit(Grant{Conn: s.conn, Nonce: src.nonce, Round: r.num, Index: uint32(i), Slot: it.Slot, Length: it.Length})
		}
		f.Keys = append(f.Keys, it.Key)
	}
	m.send(s, f)
}

// Cancel ends a job early. What it has of slots is reported when it is quiet; a
// probe is reported no more.
func (m *Machine) Cancel(now Time, job JobID) {
	m.now = now
	if r := m.rounds[job]; r != nil {
		m.cancel(r)
	}
	m.settle()
}

func (m *Machine) cancel(r *round) {
	s, partly := r.s, false
	if s != nil && s.state == sessionUp && m.open(r) {
		m.giveUp(s, r.key())
		if l := r.src.link; m.now >= r.until && (r.items == nil || r.src.Role == RoleProbe) { // what is assumed may have taken long to compute
			m.note(s.name(), true, r.lateText())
			partly = r.arrived()
			if l.late++; l.late >= lateMax {
				m.pause(l, fmt.Sprintf("no answer to %d rounds in time", l.late))
			}
		}
	}
	if r.items == nil {
		r.over = true // reported no more
		m.endRound(r)
		return
	}
	for i := range r.items {
		m.settleItem(r, i, CodeOK, 0, true)
	}
	m.revoke(r, nil)
	if partly {
		if s.partly++; s.partly >= lateMax {
			m.closeSession(s, CodeTimeout, fmt.Sprintf("%d loads in a row came in part only: one of the connections may be half-open", s.partly))
		}
	}
}

// lateText says what of a round has not come in time.
func (r *round) lateText() string {
	if r.items == nil {
		return fmt.Sprintf("did not say in time which of %d blocks it has", len(r.keys))
	}
	missing := 0
	for i := range r.items {
		if !r.items[i].settled {
			missing++
		}
	}
	return fmt.Sprintf("%d of %d blocks did not come in time", missing, len(r.items))
}

// arrived says that some blocks of a round have.
func (r *round) arrived() bool {
	for i := range r.items {
		if it := &r.items[i]; it.settled && it.code == CodeOK {
			return true
		}
	}
	return false
}

// open says whether the producer still owes an answer.
func (m *Machine) open(r *round) bool {
	if r.items == nil {
		return !r.over
	}
	for i := range r.items {
		if !r.items[i].settled {
			return true
		}
	}
	return false
}

// giveUp aborts a round, and bounds the wait for the answer. Who answers pings and
// no aborts is of no use.
func (m *Machine) giveUp(s *session, k roundKey) {
	m.send(s, &Abort{Nonce: k.nonce, Round: k.round})
	if s.aborts[k] != nil {
		return
	}
	t := &timer{fire: func() {
		m.stats.Deaths++
		m.note(s.name(), true, fmt.Sprintf("does not answer an abort for %v", m.o.AbortTimeout))
		m.closeSession(s, CodeTimeout, fmt.Sprintf("no answer to an abort for %v", m.o.AbortTimeout))
	}}
	s.aborts[k] = t
	m.timers.arm(t, m.now+Time(m.o.AbortTimeout))
}

func (m *Machine) abortAck(s *session, a *AbortAck) {
	k := roundKey{a.Nonce, a.Round}
	if t := s.aborts[k]; t != nil {
		m.timers.disarm(t)
		delete(s.aborts, k)
	}
	// Of what was not aborted it says nothing.
}

// failRound settles everything of a round that is open.
func (m *Machine) failRound(r *round, code Code) {
	if r.items == nil {
		if !r.over {
			r.over = true
			m.emit(ReportProbe{Job: r.job, Code: code})
		}
		m.endRound(r)
		return
	}
	for i := range r.items {
		m.settleItem(r, i, code, 0, false)
	}
	m.revoke(r, nil)
}

// settleItem gives an item its outcome, if it has none. cancelled is one of its
// own: nobody is to be blamed.
func (m *Machine) settleItem(r *round, i int, code Code, sum uint64, cancelled bool) {
	it := &r.items[i]
	if it.settled {
		return
	}
	it.settled, it.code, it.sum = true, code, sum
	switch {
	case cancelled:
		it.code = codeEnd
		r.src.bad++ // it has not got it
	case code == CodeOK:
		r.src.got++
	default:
		r.src.bad++
		m.stats.Failures[code]++
	}
	m.tellItem(r, i)
}

// tellItem reports an item that is settled and quiet.
func (m *Machine) tellItem(r *round, i int) {
	it := &r.items[i]
	if !it.settled || !it.quiet || it.told {
		return
	}
	it.told = true
	res := result(i, it.code, it.sum)
	if it.garbage {
		res.Class, res.Cause = tier.ClassCorrupt, tier.CauseChecksum
	}
	r.out = append(r.out, res)
	r.left--
	if !r.noted {
		r.noted = true
		m.noted = append(m.noted, r)
	}
}

// revoke takes back the grants of items that are settled, all or those listed.
func (m *Machine) revoke(r *round, only []uint32) {
	if r.s == nil {
		return
	}
	var list []uint32
	add := func(i int) {
		if it := &r.items[i]; it.settled && !it.quiet && !it.revoked {
			it.revoked = true
			list = append(list, uint32(i))
		}
	}
	if only == nil {
		for i := range r.items {
			add(i)
		}
	}
	for _, i := range only {
		add(int(i))
	}
	if len(list) > 0 {
		m.emit(Revoke{Conn: r.s.conn, Nonce: r.src.nonce, Round: r.num, Indexes: list})
	}
}

// Arrived tells that the payload of a grant is in its slot, or was and is wrong.
func (m *Machine) Arrived(now Time, conn ConnID, nonce uint64, num, index uint32, ok bool, sum uint64) {
	m.now = now
	s := m.sessions[conn]
	if s == nil {
		return
	}
	s.heard, s.unheard = now, 0
	r := s.rounds[roundKey{nonce, num}]
	if r == nil || int(index) >= len(r.items) {
		m.stats.Strays++
		return
	}
	it := &r.items[index]
	it.quiet = true
	switch {
	case it.settled:
		m.tellItem(r, int(index))
	case ok:
		m.stats.Blocks++
		m.stats.Bytes += int64(it.Length)
		s.blocksIn++
		s.bytesIn += int64(it.Length)
		s.garbage = 0
		m.answered(r)
		m.settleItem(r, int(index), CodeOK, sum, false)
		if !m.open(r) {
			s.partly = 0
		}
	default:
		m.stats.Corrupt++
		m.note(s.name(), true, fmt.Sprintf("sent block %s with bytes that do not match their checksum", it.Key))
		it.garbage = true
		m.settleItem(r, int(index), CodeFailed, 0, false)
		if s.garbage++; s.garbage >= garbageMax && s.state == sessionUp {
			m.violation(s, fmt.Sprintf("%d blocks in a row did not match their checksums", s.garbage))
		}
	}
	m.settle()
}

// answered notes that a peer does what it is asked for.
func (m *Machine) answered(r *round) {
	if l := r.src.link; l.late > 0 || l.delay > 0 {
		l.why, l.late, l.delay, l.down = "", 0, 0, 0
	}
}

// Detached tells that nothing can write the slot of a revoked grant any more.
func (m *Machine) Detached(now Time, conn ConnID, nonce uint64, num, index uint32) {
	m.now = now
	s := m.sessions[conn]
	if s == nil {
		return
	}
	if r := s.rounds[roundKey{nonce, num}]; r != nil && int(index) < len(r.items) {
		r.items[index].quiet = true
		m.tellItem(r, int(index))
	}
	m.settle()
}

// movesMax bounds how often a round is sent again.
const movesMax = 4

// roundLost ends a round whose session is gone: its slots are quiet. If another
// session with that peer takes its place, what is missing is asked for there.
func (m *Machine) roundLost(r *round, again bool) {
	s := r.s
	r.s = nil
	delete(s.rounds, r.key())
	for i := range r.items {
		r.items[i].quiet = true
		m.tellItem(r, i)
	}
	l := r.src.link
	switch {
	case !again || r.moves >= movesMax || !m.open(r) || m.draining || m.now < l.down:
		m.failRound(r, CodeUnreachable)
	case m.session(l) != nil:
		r.moves++
		m.transmit(r, m.session(l))
	default:
		r.moves++
		m.await(r)
	}
}

// endRound forgets a round that is over.
func (m *Machine) endRound(r *round) {
	if m.rounds[r.job] != r {
		return
	}
	delete(m.rounds, r.job)
	is := func(o *round) bool { return o == r }
	r.src.rounds = slices.DeleteFunc(r.src.rounds, is)
	if s := r.s; s != nil {
		delete(s.rounds, r.key())
		m.armIdle(s)
	} else if l := r.src.link; l != nil {
		l.waiting = slices.DeleteFunc(l.waiting, is)
	}
}

func (m *Machine) answer(s *session, a *Answer) {
	r := s.rounds[roundKey{a.Nonce, a.Round}]
	switch {
	case r == nil || r.items != nil || r.over:
		m.stats.Strays++ // of a round that was given up
		return
	case a.Code == CodeOK && len(a.Found) != (len(r.keys)+7)/8:
		m.violation(s, fmt.Sprintf("an answer of %d bytes for %d keys", len(a.Found), len(r.keys)))
		return
	}
	r.over = true
	m.answered(r)
	if a.Code != CodeOK {
		if a.Code >= codeEnd {
			a.Code = CodeFailed
		}
		m.explain(s, r, a.Code)
		m.stats.Failures[a.Code]++
		m.emit(ReportProbe{Job: r.job, Code: a.Code})
		m.endRound(r)
		return
	}
	found, any := make([]bool, len(r.keys)), false
	for i := range found {
		found[i] = a.Found[i/8]>>(i%8)&1 != 0
		any = any || found[i]
	}
	if r.src.last == r.num && any {
		r.src.answered = r.num
	} else if any {
		// Nobody will fetch it: a newer round has taken its place.
		m.giveUp(s, r.key())
	}
	m.emit(ReportProbe{Job: r.job, Found: found})
	m.endRound(r)
}

func (m *Machine) failed(s *session, f *Failed) {
	r := s.rounds[roundKey{f.Nonce, f.Round}]
	if r == nil || r.items == nil {
		m.stats.Strays++
		return
	}
	if f.Code == CodeOK || f.Code >= codeEnd || len(f.Indexes) > len(r.items) {
		m.violation(s, fmt.Sprintf("%d blocks failed with code %d", len(f.Indexes), f.Code))
		return
	}
	for _, i := range f.Indexes {
		if int(i) >= len(r.items) {
			m.violation(s, fmt.Sprintf("block %d of a fetch of %d failed", i, len(r.items)))
			return
		}
	}
	m.answered(r)
	m.explain(s, r, f.Code)
	if len(f.Indexes) == 0 {
		m.failRound(r, f.Code)
		return
	}
	for _, i := range f.Indexes {
		m.settleItem(r, int(i), f.Code, 0, false)
	}
	m.revoke(r, f.Indexes)
}

// explain tells an operator why a peer has no such namespace: most often one
// field of it is another there.
func (m *Machine) explain(s *session, r *round, code Code) {
	ours := m.ours[r.src.NS]
	if code != CodeNamespace || ours == nil || r.known {
		return
	}
	r.known = true
	text := fmt.Sprintf("has no namespace %s (model %q)", r.src.NS, ours.Spec().Model)
	for _, ns := range s.spaces {
		if ns.Spec().Model == ours.Spec().Model {
			text += fmt.Sprintf("; its namespace %s differs in %s", ns.Fingerprint(), strings.Join(block.Diff(ns.Spec(), ours.Spec()), ", "))
			break
		}
	}
	m.note(s.name(), true, text)
}

// result is an item's outcome for the core.
func result(i int, code Code, sum uint64) Result {
	r := Result{Index: i, Code: code, Sum: sum, Class: tier.ClassRetryable, Cause: tier.CauseUnavailable}
	switch code {
	case CodeOK:
		r.Class, r.Cause = tier.ClassNone, tier.CauseOther
	case CodeAbsent, CodeEnded:
		r.Class, r.Cause = tier.ClassNotFound, tier.CauseOther
	case CodeNamespace:
		r.Class, r.Cause = tier.ClassPermanent, tier.CauseNamespace
	case CodeNoRoom, CodeQuota, CodeBusy:
		r.Cause = tier.CauseCapacity
	case CodeTimeout:
		r.Cause = tier.CauseTimeout
	case CodeUnreachable:
		r.Cause = tier.CauseNetwork
	case codeEnd:
		r.Code, r.Class, r.Cause = CodeOK, tier.ClassCancelled, tier.CauseOther
	}
	return r
}
