package peer

import (
	"fmt"
	"slices"
	"time"

	"github.com/terrace-kv/terrace/block"
)

// serve is a round as its producer has it.
//
// INVARIANT(peer-serve-ends): a serve has a timer that ends it, or blocks that are
// being sent, or an answer of the core that is due; and it pins nothing when it
// has ended.
type serve struct {
	id    ServeID
	s     *session // nil: lost
	key   roundKey
	kvID  string
	ns    *block.Namespace
	state serveState
	keys  []served
	await bool
	until Time
	timer timer // of what state waits for
	poll  timer // the core is asked again then

	asking  []uint32 // indexes that the core is asked for; nil: none are
	again   bool     // there was news of the supply while the core was asked
	park    bool     // nobody here has heard of kvID yet
	supply  *supply
	open    int // keys of a fetch that are not settled
	sending int // blocks that were given to be sent and may still be read
	ended   bool
	ack     bool // an AbortAck is owed
	told    bool // ServeEnd was told
	asked   bool // the core knows of it
}

type serveState uint8

const (
	serveLooking  serveState = iota // a Lookup: the core is asked
	serveAnswered                   // its Fetch is due
	serveFetching
)

type served struct {
	key     block.Key
	bytes   int64
	lease   Lease
	have    bool // lease is pinned for the serve
	charged bool // to the session's quota
	sent    bool // given to be sent
	settled bool // sent or failed
	absent  bool // the core does not have it, as far as it said
	pending bool // and will know more soon: it is asked again by poll
}

// supply is a hand-over that a producer of this node prepares.
type supply struct {
	ns      block.Fingerprint
	id      string
	seqs    []uint64 // of its requests, the newest last
	final   bool     // the newest will store no more
	fetched bool     // it has been fetched: to be released when it is final
	serves  []*serve // that await it
}

type supplyKey struct {
	ns block.Fingerprint
	id string
}

// admit checks what a Lookup or Fetch says before anything is done about it.
func (m *Machine) admit(s *session, id string, k roundKey, ns block.Fingerprint, keys []block.Key) (code Code, ok bool) {
	switch {
	case len(id) == 0 || len(id) > IDBytesMax || len(keys) == 0 || len(keys) > KeysMax || k.round == 0:
		m.violation(s, fmt.Sprintf("a round %d of %d keys for an id of %d bytes", k.round, len(keys), len(id)))
		return 0, false
	case m.draining:
		return CodeDraining, true
	case m.ours[ns] == nil || !s.shown[ns]:
		return CodeNamespace, true
	case len(s.serves) >= RoundsMax:
		return CodeBusy, true
	}
	seen := make(map[block.Key]struct{}, len(keys))
	for i := range keys {
		if m.ours[ns].BlockBytes(keys[i].Group()) == 0 {
			m.violation(s, fmt.Sprintf("key %d is of group %d, which the namespace does not have", i, keys[i].Group()))
			return 0, false
		}
		seen[keys[i]] = struct{}{}
	}
	if len(seen) != len(keys) { // it has one pin, which the first to be sent would give back
		m.violation(s, "a key stands twice in a round")
		return 0, false
	}
	return CodeOK, true
}

func (m *Machine) newServe(s *session, k roundKey, id string, ns block.Fingerprint, keys []block.Key) *serve {
	m.lastID++
	v := &serve{id: ServeID(m.lastID), s: s, key: k, kvID: id, ns: m.ours[ns], keys: make([]served, len(keys))}
	for i := range keys {
		v.keys[i] = served{key: keys[i], bytes: int64(v.ns.BlockBytes(keys[i].Group()))}
	}
	v.timer.fire = func() { m.serveDue(v) }
	v.poll.fire = func() { m.askAgain(v, true) }
	s.serves[k] = v
	m.serves[v.id] = v
	m.armIdle(s)
	return v
}

func (m *Machine) lookup(s *session, l *Lookup) {
	k := roundKey{l.Nonce, l.Round}
	code, ok := m.admit(s, l.ID, k, l.NS, l.Keys)
	if !ok {
		return
	}
	if s.serves[k] != nil {
		m.violation(s, fmt.Sprintf("round %d was begun twice", l.Round))
		return
	}
	if code == CodeOK && !m.mayLookup(s) {
		code = CodeBusy
	}
	if code != CodeOK {
		m.stats.Refused[code]++
		m.send(s, &Answer{Nonce: l.Nonce, Round: l.Round, Code: code})
		return
	}
	m.stats.Lookups++
	v := m.newServe(s, k, l.ID, l.NS, l.Keys)
	v.until = m.now + Time(min(time.Duration(l.WaitMS)*time.Millisecond, m.o.LookupTimeout))
	m.ask(v)
	if v.asking == nil { // nothing fits into its quota
		m.stats.Refused[CodeQuota]++
		m.send(s, &Answer{Nonce: l.Nonce, Round: l.Round, Code: CodeQuota})
		m.endServe(v)
	}
}

// mayLookup bounds the lookups of a session in time.
func (m *Machine) mayLookup(s *session) bool {
	rate := float64(m.o.LookupsPerSec)
	s.tokens = min(rate, s.tokens+rate*time.Duration(m.now-s.refill).Seconds())
	s.refill = m.now
	if s.tokens < 1 {
		return false
	}
	s.tokens--
	return true
}

func (m *Machine) fetch(s *session, f *Fetch) {
	k := roundKey{f.Nonce, f.Round}
	code, ok := m.admit(s, f.ID, k, f.NS, f.Keys)
	if !ok {
		return
	}
	v := s.serves[k]
	var before map[block.Key]served
	if v != nil {
		if v.state != serveAnswered || v.ended || v.kvID != f.ID || v.ns.Fingerprint() != f.NS {
			m.violation(s, fmt.Sprintf("a second fetch of round %d, or one of something else", f.Round))
			return
		}
		// What the lookup has found is pinned for this: it is sent without asking.
		before = make(map[block.Key]served, len(v.keys))
		for i := range v.keys {
			if v.keys[i].have {
				before[v.keys[i].key] = v.keys[i]
			}
		}
		code = CodeOK // it was admitted as a lookup
	}
	await := f.Await
	var sup *supply
	if await && code == CodeOK {
		sk := supplyKey{f.NS, f.ID}
		switch sup = m.supplies[sk]; {
		case sup != nil:
		case m.ended.has(sk, m.now):
			code = CodeEnded
		case s.parked >= m.o.ParkedMax:
			code = CodeBusy
		}
	}
	if code != CodeOK {
		m.stats.Refused[code]++
		m.send(s, &Failed{Nonce: f.Nonce, Round: f.Round, Code: code})
		if v != nil {
			m.endServe(v)
		}
		return
	}
	m.stats.Fetches++
	if v == nil {
		v = m.newServe(s, k, f.ID, f.NS, f.Keys)
	} else {
		keys := make([]served, len(f.Keys))
		for i := range f.Keys {
			keys[i] = served{key: f.Keys[i], bytes: int64(v.ns.BlockBytes(f.Keys[i].Group()))}
			if b, ok := before[f.Keys[i]]; ok {
				keys[i] = b
				delete(before, f.Keys[i])
			}
		}
		for i := range v.keys { // found, and not wanted
			if b, ok := before[v.keys[i].key]; ok {
				m.giveBack(v, &b)
				delete(before, v.keys[i].key)
			}
		}
		v.keys = keys
	}
	v.state, v.await, v.supply, v.open = serveFetching, await, sup, len(v.keys)
	v.until = m.now + Time(min(time.Duration(f.WaitMS)*time.Millisecond, time.Hour))
	m.timers.arm(&v.timer, v.until)
	if sup != nil {
		sup.serves = append(sup.serves, v)
	} else if await {
		v.park = true
		s.parked++
		m.timers.arm(&v.timer, min(v.until, m.now+Time(m.o.ParkTimeout)))
	}
	m.dispatch(v)
	m.ask(v)
	m.proceed(v)
}

// ask asks the core for keys that it has not been asked for, or whose absence may
// be over, as many as the peer's quota allows.
func (m *Machine) ask(v *serve) {
	if v.asking != nil || v.ended {
		return
	}
	e := Serve{ID: v.id, NS: v.ns.Fingerprint(), Until: v.until}
	if v.await {
		e.Until = min(v.until, m.now+Time(pollEvery)) // what is there is to be sent soon
	}
	for i := range v.keys {
		k := &v.keys[i]
		if k.have || k.sent || k.settled || k.absent {
			continue
		}
		if v.s.pinned+k.bytes > m.o.QuotaBytes && v.s.pinned > 0 {
			break // settle asks again when there is room
		}
		v.s.pinned += k.bytes
		k.charged = true
		v.asking = append(v.asking, uint32(i))
		e.Keys = append(e.Keys, k.key)
	}
	if v.asking != nil {
		v.asked = true
		m.emit(e)
	}
}

// Served answers a Serve, one Found a key of it.
func (m *Machine) Served(now Time, id ServeID, found []Found) {
	m.now = now
	v := m.serves[id]
	if v == nil || len(found) != len(v.asking) {
		m.stats.Strays++
		return
	}
	asked, pending := v.asking, false
	v.asking = nil
	for n, i := range asked {
		k := &v.keys[i]
		if found[n].Code == CodeOK {
			k.lease, k.have = found[n].Lease, true
			continue
		}
		k.absent, k.pending = !v.again, found[n].Pending
		m.uncharge(v, k)
		if k.pending || v.again {
			pending = pending || k.pending
			continue
		}
		if v.state == serveFetching && found[n].Code != CodeAbsent && !v.ended {
			m.failKey(v, i, found[n].Code)
		}
	}
	switch {
	case v.ended || v.s == nil:
		m.endServe(v)
	case v.state == serveLooking:
		bits, any := make([]byte, (len(v.keys)+7)/8), false
		for i := range v.keys {
			if v.keys[i].have {
				bits[i/8] |= 1 << (i % 8)
				any = true
			}
		}
		m.send(v.s, &Answer{Nonce: v.key.nonce, Round: v.key.round, Found: bits})
		v.state = serveAnswered
		if !any {
			m.endServe(v)
		} else {
			m.timers.arm(&v.timer, m.now+Time(m.o.HitTimeout))
		}
	default:
		v.again = false
		if pending && v.poll.pos == 0 { // it is on its way here: nobody will bring news of it
			m.timers.arm(&v.poll, m.now+Time(pollEvery))
		}
		m.dispatch(v)
		m.ask(v) // what the quota held back, or there was news of
		m.proceed(v)
	}
	m.settle()
}

// pollEvery is how often a producer looks at blocks that its own tiers are about
// to have.
const pollEvery = 100 * time.Millisecond

// dispatch sends what is pinned.
func (m *Machine) dispatch(v *serve) {
	t := Transmit{Conn: v.s.conn, ID: v.id}
	for i := range v.keys {
		k := &v.keys[i]
		if !k.have || k.sent || k.settled {
			continue
		}
		k.sent = true
		v.sending++
		t.Blocks = append(t.Blocks, DataBlock{Lease: k.lease,
			Head: DataHead{Nonce: v.key.nonce, Round: v.key.round, Index: uint32(i), Length: uint64(k.bytes), Sum: k.lease.Sum}})
	}
	if len(t.Blocks) > 0 {
		m.emit(t)
	}
}

// Sent tells that a block of a serve is not read any more. ok says that it was
// sent.
func (m *Machine) Sent(now Time, id ServeID, index uint32, ok bool) {
	m.now = now
	v := m.serves[id]
	if v == nil || int(index) >= len(v.keys) || !v.keys[index].sent || !v.keys[index].have {
		m.stats.Strays++
		return
	}
	k := &v.keys[index]
	v.sending--
	m.giveBack(v, k)
	if ok {
		m.stats.SentBlocks++
		m.stats.SentBytes += k.bytes
		if v.s != nil {
			v.s.blocksOut++
			v.s.bytesOut += k.bytes
		}
	}
	if !k.settled {
		k.settled = true
		v.open--
	}
	if v.ended {
		m.endServe(v)
	} else {
		m.ask(v) // there is room in the quota again
		m.proceed(v)
	}
	m.settle()
}

// giveBack ends the pin on one key, and what it counts for.
func (m *Machine) giveBack(v *serve, k *served) {
	if k.have {
		k.have = false
		m.emit(Release{ID: v.id, Lease: k.lease})
	}
	m.uncharge(v, k)
}

func (m *Machine) uncharge(v *serve, k *served) {
	if k.charged {
		k.charged = false
		if s := v.s; s != nil {
			if s.pinned -= k.bytes; !s.freed {
				s.freed = true
				m.freed = append(m.freed, s)
			}
		}
	}
}

// failKey settles one key of a fetch that will not be sent.
func (m *Machine) failKey(v *serve, i uint32, code Code) {
	k := &v.keys[i]
	if k.settled || k.sent {
		return
	}
	k.settled = true
	v.open--
	m.giveBack(v, k)
	m.failing = append(m.failing, failing{v, i, code})
}

// failing is a key that is to be told to have failed.
type failing struct {
	v    *serve
	i    uint32
	code Code
}

// proceed ends a fetch that is settled, and fails what will not come any more.
func (m *Machine) proceed(v *serve) {
	if v.state != serveFetching || v.ended {
		return
	}
	final := !v.await || v.supply != nil && v.supply.final
	if v.asking == nil && final {
		for i := range v.keys {
			if v.keys[i].absent && !v.keys[i].pending {
				m.failKey(v, uint32(i), CodeAbsent)
			}
		}
	}
	if v.open == 0 && v.sending == 0 && v.asking == nil {
		m.tellFailing()
		m.endServe(v)
	}
}

// tellFailing sends what has failed, one message for each round and code.
func (m *Machine) tellFailing() {
	list := m.failing
	m.failing = nil
	for len(list) > 0 {
		f := list[0]
		msg := &Failed{Nonce: f.v.key.nonce, Round: f.v.key.round, Code: f.code}
		var rest []failing
		for _, g := range list {
			if g.v == f.v && g.code == f.code {
				msg.Indexes = append(msg.Indexes, g.i)
			} else {
				rest = append(rest, g)
			}
		}
		if f.v.s != nil && !f.v.ack {
			m.send(f.v.s, msg)
		}
		m.stats.Refused[f.code] += int64(len(msg.Indexes))
		list = rest
	}
}

// serveDue is the end of what a serve has waited for.
func (m *Machine) serveDue(v *serve) {
	switch {
	case v.state == serveAnswered:
		m.stats.HitsExpired++
		m.endServe(v)
	case v.park && m.now < v.until:
		m.failOpen(v, CodeEnded)
	default:
		m.failOpen(v, CodeTimeout)
	}
}

// failOpen fails what is not being sent and ends the serve.
func (m *Machine) failOpen(v *serve, code Code) {
	for i := range v.keys {
		m.failKey(v, uint32(i), code)
	}
	m.tellFailing()
	m.endServe(v)
}

// endServe ends a serve as soon as nothing of it is being read or asked for.
func (m *Machine) endServe(v *serve) {
	if !v.ended {
		v.ended = true
		m.timers.disarm(&v.timer)
		m.timers.disarm(&v.poll)
		m.unawait(v)
		if v.sending > 0 && v.s != nil {
			m.emit(Unsend{Conn: v.s.conn, ID: v.id})
		}
	}
	if v.sending > 0 || v.asking != nil || v.told {
		return
	}
	v.told = true
	for i := range v.keys {
		m.uncharge(v, &v.keys[i])
		v.keys[i].have = false
	}
	if v.asked {
		m.emit(ServeEnd{ID: v.id})
	}
	delete(m.serves, v.id)
	if s := v.s; s != nil {
		delete(s.serves, v.key)
		if v.ack {
			m.send(s, &AbortAck{Nonce: v.key.nonce, Round: v.key.round})
		}
		m.armIdle(s)
	}
}

// unawait takes a serve out of what it waits for.
func (m *Machine) unawait(v *serve) {
	if v.park {
		v.park = false
		if v.s != nil {
			v.s.parked--
		}
	}
	if p := v.supply; p != nil {
		v.supply = nil
		p.serves = slices.DeleteFunc(p.serves, func(o *serve) bool { return o == v })
	}
}

// serveLost ends a serve whose session is gone: nothing of it is being read.
func (m *Machine) serveLost(v *serve) {
	m.unawait(v)
	v.s = nil
	v.sending = 0
	for i := range v.keys {
		v.keys[i].charged = false
	}
	m.endServe(v)
}

func (m *Machine) abort(s *session, a *Abort) {
	v := s.serves[roundKey{a.Nonce, a.Round}]
	if v == nil {
		m.send(s, &AbortAck{Nonce: a.Nonce, Round: a.Round})
		return
	}
	v.ack = true
	m.endServe(v)
}

func (m *Machine) finished(s *session, f *Finished) {
	for _, k := range sortedKeys(s.serves) {
		if v := s.serves[k]; k.nonce == f.Nonce {
			m.endServe(v)
		}
	}
	if p := m.supplies[supplyKey{f.NS, f.ID}]; p != nil && f.Complete && s.shown[f.NS] {
		p.fetched = true
		m.release(p)
	}
}

// release gives up what a supply keeps, once it is final.
func (m *Machine) release(p *supply) {
	if p.fetched && p.final {
		for _, seq := range p.seqs {
			m.emit(ReleaseSupply{Seq: seq})
		}
	}
}

// Supply tells how a hand-over of this node stands.
func (m *Machine) Supply(now Time, ns block.Fingerprint, id string, seq uint64, state SupplyState) {
	m.now = now
	k := supplyKey{ns, id}
	p := m.supplies[k]
	switch state {
	case SupplyOpen:
		if p == nil {
			p = &supply{ns: ns, id: id}
			m.supplies[k] = p
		}
		p.seqs = append(p.seqs, seq)
		p.final, p.fetched = false, false // served afresh
		m.ended.forget(k)
		for _, s := range m.sorted() {
			for _, rk := range sortedKeys(s.serves) {
				if v := s.serves[rk]; v.park && v.kvID == id && v.ns.Fingerprint() == ns {
					m.unawait(v)
					v.supply = p
					p.serves = append(p.serves, v)
					m.timers.arm(&v.timer, v.until)
				}
			}
		}
	case SupplyMore:
		if p != nil {
			m.news(p)
		}
	case SupplyFinal:
		if p != nil && p.seqs[len(p.seqs)-1] == seq {
			p.final = true
			m.news(p)
			m.release(p)
		}
	case SupplyEnded:
		if p == nil {
			break
		}
		p.seqs = slices.DeleteFunc(p.seqs, func(s uint64) bool { return s == seq })
		if len(p.seqs) > 0 {
			break
		}
		delete(m.supplies, k)
		m.ended.add(k, m.now)
		for _, v := range slices.Clone(p.serves) {
			if v.asking == nil {
				m.failOpen(v, CodeEnded)
			} else { // what is found of it is sent; the rest is absent
				m.unawait(v)
				v.await = false
			}
		}
	}
	m.settle()
}

// news has all that await a supply ask again.
func (m *Machine) news(p *supply) {
	for _, v := range slices.Clone(p.serves) {
		m.askAgain(v, false)
	}
}

// askAgain asks for what was absent: all of it, or what was pending.
func (m *Machine) askAgain(v *serve, pending bool) {
	v.again = v.again || !pending && v.asking != nil
	for i := range v.keys {
		if k := &v.keys[i]; k.pending || !pending {
			k.absent, k.pending = false, false
		}
	}
	m.ask(v)
	m.proceed(v)
}

// endedIDs remembers ids whose supply has ended, so that who comes late hears it
// at once: the newest EndedMax of them, for EndedFor.
type endedIDs struct {
	most  int
	keep  Time
	at    map[supplyKey]Time
	order []endedID
}

type endedID struct {
	k  supplyKey
	at Time
}

func (e *endedIDs) add(k supplyKey, now Time) {
	e.at[k] = now
	e.order = append(e.order, endedID{k, now})
	e.trim(now)
}

func (e *endedIDs) trim(now Time) {
	n := 0
	for n < len(e.order) && (len(e.order)-n > e.most || e.order[n].at+e.keep <= now) {
		if x := e.order[n]; e.at[x.k] == x.at {
			delete(e.at, x.k)
		}
		n++
	}
	if e.order = e.order[n:]; len(e.order) == 0 {
		e.order = nil
	}
}

func (e *endedIDs) has(k supplyKey, now Time) bool {
	e.trim(now)
	_, ok := e.at[k]
	return ok
}

func (e *endedIDs) forget(k supplyKey) { delete(e.at, k) }
