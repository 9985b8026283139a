package peer

import (
	"fmt"
	"slices"
	"time"

	"github.com/terrace-kv/terrace/block"
)

// serve is a round as its producer has it.
//
//	looking ──the core──► answered ──Fetch──► fetching ──each key settled──► gone
//	   └──────────────────────┴──abort, finish, time, loss: ended, until nothing of it is read──┘
//
// INVARIANT(peer-serve-ends): a serve has a timer that ends it, or blocks that are
// being sent, or an answer of the core that is due; and it pins nothing when it
// has ended.
type serve struct {
	id    ServeID
	s     *session
	key   roundKey
	kvID  string
	ns    *block.Namespace
	state serveState
	keys  []served
	await bool // what the core does not have may still come
	until Time
	timer timer // of what state waits for
	poll  timer // the core is asked again then

	// Indexes of keys by state. A key is in one of the lists at most.
	todo   []uint32 // keyTodo, in the order in which the core is to be asked
	asking []uint32 // keyAsked: an answer of the core is due
	absent []uint32 // keyAbsent
	early  []uint32 // keyEarly
	failed []failure

	need    int64 // bytes of todo
	left    int   // keys that are not keyDone
	sending int   // keys that are keySending
	again   bool  // there was news of the supply while the core was asked
	hungry  bool  // is in s.hungry
	park    bool  // nobody here has heard of kvID yet
	supply  *supply
	missing Code // what a key fails with that the core does not have, and will not
	ended   bool
	why     Code // ended, and what was queued to be sent is told to have failed with it
	ack     bool // an AbortAck is owed
	known   bool // to the core
}

type serveState uint8

const (
	serveLooking  serveState = iota // a Lookup: the core is asked
	serveAnswered                   // its Fetch is due
	serveFetching
)

type served struct {
	key   block.Key
	bytes int64
	lease Lease
	state keyState
}

// keyState is where a key of a serve is. From keyAsked to keySending it counts
// for the peer's quota.
type keyState uint8

const (
	keyTodo    keyState = iota // the core is to be asked
	keyAsked                   // it is being asked
	keyAbsent                  // it does not have it
	keyEarly                   // it is about to know more: poll asks again
	keyPinned                  // found by a lookup
	keySending                 // given to be sent
	keyDone                    // sent, failed, or given back
)

func (s keyState) charged() bool { return s == keyAsked || s == keyPinned || s == keySending }
func (s keyState) leased() bool  { return s == keyPinned || s == keySending }

// failure is a key that is to be told to have failed.
type failure struct {
	i    uint32
	code Code
}

// supply is a hand-over that a producer of this node prepares.
type supply struct {
	key     supplyKey
	seqs    []supplySeq // its requests, the newest last
	takers  []uint64    // nonces of the newest attempts to fetch it, at most takersMax
	fetched bool        // one of them has had all it came for: to be released when it is final
	serves  []*serve    // that await it
}

const takersMax = 16

type supplySeq struct {
	seq   uint64
	final bool // it will store no more
}

type supplyKey struct {
	ns block.Fingerprint
	id string
}

// final says that no more will come: the newest request counts.
func (p *supply) final() bool { return p.seqs[len(p.seqs)-1].final }

// admit checks what a Lookup or Fetch says before anything is done about it.
func (m *Machine) admit(s *session, id string, k roundKey, ns block.Fingerprint, keys []block.Key) (code Code, ok bool) {
	if len(id) == 0 || len(id) > IDBytesMax || len(keys) == 0 || len(keys) > KeysMax || k.round == 0 {
		m.violation(s, fmt.Sprintf("a round %d of %d keys for an id of %d bytes", k.round, len(keys), len(id)))
		return 0, false
	}
	ours := m.ours[ns]
	switch {
	case m.draining:
		return CodeDraining, true
	case ours == nil || !s.shown[ns]:
		return CodeNamespace, true
	case len(s.serves) >= RoundsMax, s.keys+len(keys) > RoundKeysMax:
		return CodeBusy, true
	}
	return CodeOK, m.checkKeys(s, ours, keys)
}

func (m *Machine) checkKeys(s *session, ns *block.Namespace, keys []block.Key) bool {
	seen := make(map[block.Key]struct{}, len(keys))
	for i := range keys {
		if ns.BlockBytes(keys[i].Group()) == 0 {
			m.violation(s, fmt.Sprintf("key %d is of group %d, which the namespace does not have", i, keys[i].Group()))
			return false
		}
		seen[keys[i]] = struct{}{}
	}
	if len(seen) != len(keys) { // it has one pin, which the first to be sent would give back
		m.violation(s, "a key stands twice in a round")
		return false
	}
	return true
}

func (m *Machine) newServe(s *session, k roundKey, id string, ns block.Fingerprint, keys []block.Key) *serve {
	m.lastID++
	v := &serve{id: ServeID(m.lastID), s: s, key: k, kvID: id, ns: m.ours[ns], missing: CodeAbsent}
	v.timer.fire = func() { m.serveDue(v) }
	v.poll.fire = func() { m.askAgain(v, true) }
	v.setKeys(keys)
	s.serves[k] = v
	s.attempts[k.nonce] = append(s.attempts[k.nonce], v)
	m.serves[v.id] = v
	m.armIdle(s)
	return v
}

// setKeys makes keys those of the serve, all of them to be asked for.
func (v *serve) setKeys(keys []block.Key) {
	v.s.keys += len(keys) - len(v.keys)
	v.keys, v.todo, v.absent, v.early, v.need, v.left = make([]served, len(keys)), nil, nil, nil, 0, len(keys)
	for i := range keys {
		v.keys[i] = served{key: keys[i], bytes: int64(v.ns.BlockBytes(keys[i].Group()))}
		v.toDo(uint32(i))
	}
}

func (v *serve) toDo(i uint32) {
	v.keys[i].state = keyTodo
	v.todo = append(v.todo, i)
	v.need += v.keys[i].bytes
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
	if code == CodeOK && !s.asked.take(m.now, float64(m.o.LookupsPerSec), float64(m.o.LookupsPerSec)) {
		code = CodeBusy
	}
	if code == CodeOK {
		v := m.newServe(s, k, l.ID, l.NS, l.Keys)
		v.until = m.now + Time(min(time.Duration(l.WaitMS)*time.Millisecond, m.o.LookupTimeout))
		if m.ask(v); v.asking != nil {
			m.stats.Lookups++
			m.timers.arm(&v.timer, v.until+Time(pollEvery)) // the core answers before
			return
		}
		m.refuseLookup(v, CodeQuota) // nothing fits into it
		return
	}
	m.stats.Refused[code]++
	m.send(s, &Answer{Nonce: l.Nonce, Round: l.Round, Code: code})
}

func (m *Machine) refuseLookup(v *serve, code Code) {
	m.stats.Refused[code]++
	m.send(v.s, &Answer{Nonce: v.key.nonce, Round: v.key.round, Code: code})
	m.endServe(v)
}

func (m *Machine) fetch(s *session, f *Fetch) {
	k := roundKey{f.Nonce, f.Round}
	code, ok := m.admit(s, f.ID, k, f.NS, f.Keys)
	if !ok {
		return
	}
	v := s.serves[k]
	if v != nil {
		if v.state != serveAnswered || v.ended || v.kvID != f.ID || v.ns.Fingerprint() != f.NS {
			m.violation(s, fmt.Sprintf("a second fetch of round %d, or one of something else", f.Round))
			return
		}
		// The lookup was admitted, and so is what closes it, unless that is much more.
		if code != CodeOK && !m.checkKeys(s, v.ns, f.Keys) {
			return
		}
		if code = CodeOK; s.keys-len(v.keys)+len(f.Keys) > RoundKeysMax {
			code = CodeBusy
		}
	} else if code == CodeOK && !s.asked.take(m.now, float64(m.o.LookupsPerSec), float64(m.o.LookupsPerSec)) {
		code = CodeBusy
	}
	sk := supplyKey{f.NS, f.ID}
	sup := m.supplies[sk]
	if code == CodeOK && f.Await && sup == nil {
		switch {
		case m.ended.has(sk, m.now):
			code = CodeEnded
		case s.parked >= m.o.ParkedMax:
			code = CodeBusy
		case m.draining:
			code = CodeDraining
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
		m.keepFound(v, f.Keys)
	}
	v.state, v.await = serveFetching, f.Await
	v.until = m.now + Time(min(time.Duration(f.WaitMS)*time.Millisecond, time.Hour))
	m.timers.arm(&v.timer, v.until)
	switch {
	case !f.Await:
	case sup != nil:
		m.join(v, sup)
	default:
		v.park = true
		s.parked++
		m.parked[sk] = append(m.parked[sk], v)
		m.timers.arm(&v.timer, min(v.until, m.now+Time(m.o.ParkTimeout)))
	}
	all := make([]uint32, len(v.keys))
	for i := range all {
		all[i] = uint32(i)
	}
	m.dispatch(v, all)
	m.ask(v)
	m.proceed(v)
}

// keepFound makes a lookup's serve one of a fetch: what it has found is pinned
// for that, and sent without asking.
func (m *Machine) keepFound(v *serve, keys []block.Key) {
	old := v.keys
	found := map[block.Key]int{}
	for i := range old {
		if old[i].state == keyPinned {
			found[old[i].key] = i
		}
	}
	v.setKeys(keys)
	v.todo, v.need = nil, 0
	for i := range v.keys {
		if at, ok := found[keys[i]]; ok {
			v.keys[i] = old[at]
			old[at].state = keyDone
		} else {
			v.toDo(uint32(i))
		}
	}
	for i := range old { // found, and not wanted
		m.giveBack(v, &old[i])
	}
}

// join has a serve await a supply.
func (m *Machine) join(v *serve, p *supply) {
	v.supply = p
	p.serves = append(p.serves, v)
	p.fetched = false
	if !slices.Contains(p.takers, v.key.nonce) {
		p.takers = append(p.takers[max(0, len(p.takers)+1-takersMax):], v.key.nonce)
	}
}

// ask asks the core for keys, as many as the peer's quota and that of all peers
// allow. Of a fetch the rest waits for room.
func (m *Machine) ask(v *serve) {
	if v.asking != nil || v.ended || len(v.todo) == 0 {
		return
	}
	if own, all := m.room(v); !own || !all {
		m.wait(v)
		return
	}
	e := Serve{ID: v.id, NS: v.ns.Fingerprint(), Until: v.until}
	if v.await {
		e.Until = min(v.until, m.now+Time(pollEvery)) // what is there is to be sent soon
	}
	for len(v.todo) > 0 {
		i := v.todo[0]
		k := &v.keys[i]
		if len(v.asking) > 0 && (v.s.pinned+k.bytes > m.o.QuotaBytes || m.pinned+k.bytes > m.o.PinnedMax) {
			m.wait(v)
			break
		}
		v.todo = v.todo[1:]
		v.need -= k.bytes
		k.state = keyAsked
		v.s.pinned += k.bytes
		m.pinned += k.bytes
		v.asking = append(v.asking, i)
		e.Keys = append(e.Keys, k.key)
	}
	v.known = true
	m.emit(e)
}

// room says whether a serve may ask for something now, by the quota of its peer
// and of all. Room is given out in pieces, for a question about each block by
// itself would cost too much; but who has nothing may always ask for one block.
func (m *Machine) room(v *serve) (own, all bool) {
	next := v.keys[v.todo[0]].bytes
	piece := func(most int64) int64 { return max(next, min(v.need, most/4)) }
	own = v.s.pinned == 0 || v.s.pinned+piece(m.o.QuotaBytes) <= m.o.QuotaBytes
	all = m.pinned == 0 || m.pinned+piece(m.o.PinnedMax) <= m.o.PinnedMax
	return own, all
}

// wait puts a fetch into its session's queue for room.
func (m *Machine) wait(v *serve) {
	s := v.s
	if v.state != serveFetching {
		return
	}
	if !v.hungry {
		v.hungry = true
		s.hungry = append(s.hungry, v)
	}
	if own, _ := m.room(v); own {
		m.starve(s)
	}
}

// starve puts a session into the queue for what all peers share.
func (m *Machine) starve(s *session) {
	if !s.starved {
		s.starved = true
		m.starved = append(m.starved, s)
	}
}

// feed lets those ask who have waited for room, in turn.
func (m *Machine) feed() {
	for i := 0; i < len(m.eager); i++ {
		s := m.eager[i]
		s.eager = false
		m.feedSession(s)
	}
	clear(m.eager)
	m.eager = m.eager[:0]
	for len(m.starved) > 0 {
		s, before := m.starved[0], m.pinned
		m.starved = m.starved[1:]
		s.starved = false
		m.feedSession(s)
		if s.starved && m.pinned == before { // there is no room: it stays the first
			m.starved = slices.Insert(m.starved[:len(m.starved)-1], 0, s)
			return
		}
	}
	m.starved = nil
}

func (m *Machine) feedSession(s *session) {
	for len(s.hungry) > 0 && s.state == sessionUp {
		v := s.hungry[0]
		if !v.ended && len(v.todo) > 0 && v.asking == nil { // else Served asks
			own, all := m.room(v)
			if own && !all {
				m.starve(s)
			}
			if !own || !all {
				return
			}
		}
		s.hungry = s.hungry[1:]
		v.hungry = false
		m.ask(v)
	}
}

// Served answers a Serve, one Found a key of it.
func (m *Machine) Served(now Time, id ServeID, found []Found) {
	m.now = now
	v := m.serves[id]
	if v == nil || v.asking == nil || len(found) != len(v.asking) {
		m.stats.Strays++
		return
	}
	asked := v.asking
	v.asking = nil
	for n, i := range asked {
		k, f := &v.keys[i], &found[n]
		if f.Code == CodeOK {
			k.lease, k.state = f.Lease, keyPinned
			continue
		}
		m.move(v, k, keyAbsent)
		switch {
		case v.again: // it may be there by now
			v.toDo(i)
		case f.Pending:
			k.state = keyEarly
			v.early = append(v.early, i)
		case f.Code == CodeAbsent || v.state == serveLooking:
			v.absent = append(v.absent, i)
		default:
			m.failKey(v, i, f.Code)
		}
	}
	v.again = false
	if v.state == serveLooking {
		m.answerLookup(v)
	} else {
		m.dispatch(v, asked)
		m.ask(v) // what there was news of, or no room for
		m.proceed(v)
	}
	m.settle()
}

func (m *Machine) answerLookup(v *serve) {
	bits, any := make([]byte, (len(v.keys)+7)/8), false
	for i := range v.keys {
		if v.keys[i].state == keyPinned {
			bits[i/8] |= 1 << (i % 8)
			any = true
		}
	}
	m.send(v.s, &Answer{Nonce: v.key.nonce, Round: v.key.round, Found: bits})
	v.state = serveAnswered
	if any {
		m.timers.arm(&v.timer, m.now+Time(m.o.HitTimeout))
	} else {
		m.endServe(v)
	}
}

// pollEvery is how often a producer looks at blocks that its own tiers are about
// to have.
const pollEvery = 100 * time.Millisecond

// dispatch sends what is pinned of some keys.
func (m *Machine) dispatch(v *serve, list []uint32) {
	t := Transmit{Conn: v.s.conn, ID: v.id}
	for _, i := range list {
		k := &v.keys[i]
		if k.state != keyPinned {
			continue
		}
		k.state = keySending
		v.sending++
		t.Blocks = append(t.Blocks, DataBlock{Lease: k.lease,
			Head: DataHead{Nonce: v.key.nonce, Round: v.key.round, Index: i, Length: uint64(k.bytes), Sum: k.lease.Sum}})
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
	if v == nil || int(index) >= len(v.keys) || v.keys[index].state != keySending {
		m.stats.Strays++
		return
	}
	k := &v.keys[index]
	v.sending--
	v.left--
	m.giveBack(v, k)
	switch {
	case ok:
		m.stats.SentBlocks++
		m.stats.SentBytes += k.bytes
		v.s.blocksOut++
		v.s.bytesOut += k.bytes
	case !v.ended:
		m.tell(v, index, CodeFailed)
	case v.why != CodeOK:
		m.tell(v, index, v.why)
	}
	if v.ended {
		m.endServe(v)
	} else {
		m.proceed(v)
	}
	m.settle()
}

// giveBack ends the pin on one key, if it has one, and what it counts for.
func (m *Machine) giveBack(v *serve, k *served) {
	if k.state.leased() {
		m.emit(Release{ID: v.id, Lease: k.lease})
	}
	m.move(v, k, keyDone)
}

// move puts a key into a state that does not count for the quota.
func (m *Machine) move(v *serve, k *served, to keyState) {
	from := k.state
	k.state = to
	if !from.charged() {
		return
	}
	m.pinned -= k.bytes
	v.s.pinned -= k.bytes
	if s := v.s; !s.eager && len(s.hungry) > 0 {
		s.eager = true
		m.eager = append(m.eager, s)
	}
}

// failKey settles one key of a fetch that will not be sent.
func (m *Machine) failKey(v *serve, i uint32, code Code) {
	k := &v.keys[i]
	if k.state == keySending || k.state == keyDone {
		return
	}
	v.left--
	m.giveBack(v, k)
	m.tell(v, i, code)
}

// tell has the consumer told that a key failed, together with others.
func (m *Machine) tell(v *serve, i uint32, code Code) {
	m.stats.Refused[code]++
	if len(v.failed) == 0 {
		m.telling = append(m.telling, v)
	}
	v.failed = append(v.failed, failure{i, code})
}

// tellFailed sends what of a round has failed, one message a code.
func (m *Machine) tellFailed(v *serve) {
	var by [codeEnd][]uint32
	for _, f := range v.failed {
		by[f.code] = append(by[f.code], f.i)
	}
	v.failed = nil
	for code, list := range by {
		if len(list) > 0 && !v.ack {
			m.send(v.s, &Failed{Nonce: v.key.nonce, Round: v.key.round, Code: Code(code), Indexes: list})
		}
	}
}

// proceed fails what will not come any more, has the core asked again for what
// is about to, and ends a fetch that is settled.
func (m *Machine) proceed(v *serve) {
	if v.state != serveFetching || v.ended {
		return
	}
	if !v.await || v.supply != nil && v.supply.final() {
		for _, i := range v.absent {
			m.failKey(v, i, v.missing)
		}
		v.absent = nil
	}
	if len(v.early) > 0 && v.poll.pos == 0 { // nobody brings news of it
		m.timers.arm(&v.poll, m.now+Time(pollEvery))
	}
	if v.left == 0 {
		m.endServe(v)
	}
}

// serveDue is the end of what a serve has waited for.
func (m *Machine) serveDue(v *serve) {
	switch v.state {
	case serveAnswered:
		m.stats.HitsExpired++
		m.endServe(v)
	case serveLooking:
		m.refuseLookup(v, CodeTimeout)
	default:
		m.failOpen(v, CodeTimeout)
	}
}

// failOpen fails what is not being written yet and ends the serve.
func (m *Machine) failOpen(v *serve, code Code) {
	for i := range v.keys {
		m.failKey(v, uint32(i), code)
	}
	v.why = code
	m.endServe(v)
}

// endServe ends a serve as soon as nothing of it is being read. The core may
// still owe an answer: ServeEnd says that nobody wants it.
func (m *Machine) endServe(v *serve) {
	if !v.ended {
		v.ended = true
		m.timers.disarm(&v.timer)
		m.timers.disarm(&v.poll)
		m.unawait(v)
		for i := range v.keys {
			if k := &v.keys[i]; k.state != keySending {
				m.move(v, k, keyDone) // ServeEnd gives it back
			}
		}
		v.todo, v.asking, v.absent, v.early = nil, nil, nil, nil
		if v.hungry {
			v.hungry = false
			v.s.hungry = slices.DeleteFunc(v.s.hungry, func(o *serve) bool { return o == v })
		}
		if v.sending > 0 {
			m.emit(Unsend{Conn: v.s.conn, ID: v.id})
		}
	}
	if v.sending > 0 {
		return
	}
	m.tellFailed(v)
	if v.known {
		m.emit(ServeEnd{ID: v.id})
	}
	s := v.s
	delete(m.serves, v.id)
	delete(s.serves, v.key)
	s.keys -= len(v.keys)
	if list := s.attempts[v.key.nonce]; len(list) == 1 {
		delete(s.attempts, v.key.nonce)
	} else {
		s.attempts[v.key.nonce] = slices.DeleteFunc(list, func(o *serve) bool { return o == v })
	}
	if v.ack {
		m.send(s, &AbortAck{Nonce: v.key.nonce, Round: v.key.round})
	}
	m.armIdle(s)
}

// unawait takes a serve out of what it waits for.
func (m *Machine) unawait(v *serve) {
	if v.park {
		v.park = false
		v.s.parked--
		k := supplyKey{v.ns.Fingerprint(), v.kvID}
		if list := slices.DeleteFunc(m.parked[k], func(o *serve) bool { return o == v }); len(list) > 0 {
			m.parked[k] = list
		} else {
			delete(m.parked, k)
		}
	}
	if p := v.supply; p != nil {
		v.supply = nil
		p.serves = slices.DeleteFunc(p.serves, func(o *serve) bool { return o == v })
		m.release(p)
	}
}

// serveLost ends a serve whose session is gone: nothing of it is being read.
func (m *Machine) serveLost(v *serve) {
	for i := range v.keys {
		if k := &v.keys[i]; k.state == keySending {
			m.move(v, k, keyDone)
		}
	}
	v.sending = 0
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
	for _, v := range slices.Clone(s.attempts[f.Nonce]) {
		v.why = CodeOK // nobody is left to be told
		m.endServe(v)
	}
	if p := m.supplies[supplyKey{f.NS, f.ID}]; p != nil && f.Complete && slices.Contains(p.takers, f.Nonce) {
		p.fetched = true
		m.release(p)
	}
}

// release gives up what a supply keeps, once it is final and nobody is about to
// fetch it.
func (m *Machine) release(p *supply) {
	if p.fetched && len(p.serves) == 0 && len(p.seqs) > 0 && p.final() {
		for _, q := range p.seqs {
			m.emit(ReleaseSupply{Seq: q.seq})
		}
	}
}

// Supply tells how a hand-over of this node stands.
func (m *Machine) Supply(now Time, ns block.Fingerprint, id string, seq uint64, state SupplyState) {
	m.now = now
	k := supplyKey{ns, id}
	p := m.supplies[k]
	if p == nil && state == SupplyOpen {
		p = &supply{key: k}
		m.supplies[k] = p
	}
	if p != nil {
		m.supply(p, seq, state)
	}
	m.settle()
}

func (m *Machine) supply(p *supply, seq uint64, state SupplyState) {
	at := slices.IndexFunc(p.seqs, func(q supplySeq) bool { return q.seq == seq })
	switch {
	case state == SupplyOpen && at < 0:
		p.seqs = append(p.seqs, supplySeq{seq: seq})
		p.fetched = false // served afresh
		for _, v := range slices.Clone(m.parked[p.key]) {
			m.unawait(v)
			m.join(v, p)
			m.timers.arm(&v.timer, v.until)
		}
	case at < 0:
	case state == SupplyMore:
		m.news(p)
	case state == SupplyFinal:
		p.seqs[at].final = true
		m.news(p)
		m.release(p)
	case state == SupplyEnded:
		if p.seqs = slices.Delete(p.seqs, at, at+1); len(p.seqs) > 0 {
			m.news(p)
			m.release(p)
			break
		}
		delete(m.supplies, p.key)
		m.ended.add(p.key, m.now)
		for _, v := range slices.Clone(p.serves) {
			m.supplyGone(v)
		}
	}
}

// supplyGone fails what a serve has awaited. What is pinned is sent, and what the
// core is being asked for if it has it.
func (m *Machine) supplyGone(v *serve) {
	m.unawait(v)
	v.await, v.missing = false, CodeEnded
	for _, list := range [][]uint32{v.todo, v.absent, v.early} {
		for _, i := range list {
			m.failKey(v, i, CodeEnded)
		}
	}
	v.todo, v.absent, v.early, v.need, v.again = nil, nil, nil, 0, false
	m.timers.disarm(&v.poll)
	m.proceed(v)
}

// news has all that await a supply ask again.
func (m *Machine) news(p *supply) {
	for _, v := range slices.Clone(p.serves) {
		m.askAgain(v, false)
	}
}

// askAgain asks for what was early, and after news also for what was absent.
func (m *Machine) askAgain(v *serve, early bool) {
	list := v.early
	v.early = nil
	if !early {
		list = append(list, v.absent...)
		v.absent = nil
		v.again = v.asking != nil
	}
	slices.Sort(list) // in prefix order
	for _, i := range list {
		v.toDo(i)
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
