package objtier

import (
	"math/rand/v2"
	"sync"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/keymap"
	"github.com/terrace-kv/terrace/tier"
)

const (
	moment     = 100 * time.Microsecond // unit of marks
	spacesMax  = 1 << 16                // namespaces; of more than that nothing is kept
	chunkKeys  = 256                    // keys worked on before the lock is given back
	absentPart = 4                      // absent keys take a quarter of the index at most

	asOfBits = 40 // of a mark in a record: it comes round after 3.5 years
	asOfMask = 1<<asOfBits - 1
)

// mark is a moment in the order of what happens to a presence: see there.
type mark uint64

// standing is what is known of a key.
type standing uint8

const (
	standsUnknown standing = iota // nothing, but since when
	standsPresent
	standsAbsent
)

// source is whose knowledge it is.
type source uint8

const (
	byNode    source = iota // this node did it: newest by definition
	byAnswer                // a request was answered; a present key may leave for it
	byListing               // so, and it takes free room only
)

// record is one key. It holds no pointers and has 52 bytes, so that with its
// slot in the table a key costs 62 to 72, and 68 with IndexKeysDefault of them.
type record struct {
	hash       [block.HashSize]byte
	space      uint16
	asOfHigh   uint8
	what       uint8  // group<<2 | standing
	asOfLow    uint32 // when it was known to be so
	used       uint32 // when this node last used the block, in seconds; 0: never
	prev, next uint32 // in its list; 0 ends it
}

const _ uint = 1<<6 - block.GroupsMax // a group fits in what

func (r *record) standing() standing { return standing(r.what & 3) }
func (r *record) group() uint8       { return r.what >> 2 }

// presence knows, of a bounded number of keys, which are in the bucket, which
// are not, and since when that was known. It does no I/O.
//
// Order. Answers come late: what a HEAD or a listing tells was true at some
// moment after its request was sent, while this node went on storing and
// removing. So whoever asks takes a mark before the request, and hands it in
// with the answer:
//
//	newer-knowledge-wins: an answer changes a key only if all that is known of
//	the key is older than the answer's mark.
//
// What this node does itself (put, gone, drop) is known as of the moment when it
// was told here, after the store had confirmed it, and later than every mark
// taken so far. That holds also for keys that had to leave the index: answers
// whose mark is not newer than the newest knowledge that left change no key that
// is not in it. So while only this node writes, no key is Present that is not
// there and none Absent that is; what other nodes do makes knowledge wrong, for
// as long as presentFor and absentFor say.
//
// Room. Two lists: held has the present keys by use; others has absent ones, and
// those of which it is only known since when nothing is known, by age. What is
// over in others goes first, then the least recently used present key. others
// has a quarter of the room at most, so that a prompt nobody has seen does not
// drive out what is there. A listing takes free room only.
//
// known and touch are called under the core's lock. The presence's own lock is
// held for chunkKeys keys at most, except by known, which looks at its keys at
// one moment.
type presence struct {
	keys      int // records at most
	othersMax int
	presentN  mark // presentFor and absentFor
	absentN   mark
	now       func() time.Time
	base      time.Time
	salt      uint64

	mu struct {
		sync.Mutex
		table  *keymap.Table
		slab   keymap.Slab[record]
		held   recordList
		others recordList
		clock  mark // never goes back
		left   mark // of the newest knowledge that left the index
		ids    map[block.Fingerprint]uint16
		spaces [][]groupCount // by id, then by group
	}
}

// recordList is a doubly linked list of records by handle.
type recordList struct {
	front, back uint32
	n           int
}

// groupCount is what is present of one group of a namespace. All its blocks are
// equally long.
type groupCount struct{ blocks, bytes int64 }

// sized is a key that was found, and how long its object is.
type sized struct {
	key   block.Key
	bytes int64
}

// newPresence makes a presence of at most keys keys, at least one. A duration
// below moment means that such knowledge is never good for an answer.
func newPresence(keys int, presentFor, absentFor time.Duration, now func() time.Time) *presence {
	p := &presence{keys: max(1, keys), othersMax: max(1, keys/absentPart), presentN: mark(presentFor / moment), absentN: mark(absentFor / moment),
		now: now, base: now(), salt: rand.Uint64()}
	p.mu.table = keymap.NewTable()
	p.mu.clock = 1
	p.mu.ids = map[block.Fingerprint]uint16{}
	return p
}

// known tells what is known of keys. It allocates nothing.
func (p *presence) known(fp block.Fingerprint, keys []block.Key, out []tier.Presence) {
	p.mu.Lock()
	defer p.mu.Unlock()
	id, ok := p.mu.ids[fp]
	if !ok {
		clear(out[:len(keys)])
		return
	}
	now := p.clockLocked()
	for i := range keys {
		out[i] = tier.Unknown
		if h := p.findLocked(id, &keys[i]); h != 0 {
			r := p.mu.slab.At(h)
			switch age := now - r.asOf(now); {
			case r.standing() == standsPresent && age < p.presentN:
				out[i] = tier.Present
			case r.standing() == standsAbsent && age < p.absentN:
				out[i] = tier.Absent
			}
		}
	}
}

// mark is taken before a request, for what its answer will tell.
func (p *presence) mark() mark {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.clock = p.clockLocked() + 1
	return p.mu.clock
}

// put tells that this node has stored a block, or read it, and uses it.
func (p *presence) put(fp block.Fingerprint, key block.Key, bytes int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if h := p.learnLocked(fp, &key, standsPresent, bytes, 0, byNode); h != 0 {
		p.mu.slab.At(h).used = p.secondsLocked()
		p.frontLocked(h)
	}
}

// seen tells that a request of then found the block.
func (p *presence) seen(fp block.Fingerprint, key block.Key, bytes int64, then mark) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if h := p.learnLocked(fp, &key, standsPresent, bytes, then, byAnswer); h != 0 {
		p.frontLocked(h)
	}
}

// listed tells that a listing of then found blocks. They take free room only,
// and are the first to go: nobody has asked for them. full says that some did
// not fit.
func (p *presence) listed(fp block.Fingerprint, found []sized, then mark) (full bool) {
	for len(found) > 0 {
		n := min(len(found), chunkKeys)
		p.mu.Lock()
		for i := range found[:n] {
			if p.learnLocked(fp, &found[i].key, standsPresent, found[i].bytes, then, byListing) == 0 && p.mu.slab.Len() >= p.keys {
				full = true
			}
		}
		p.mu.Unlock()
		found = found[n:]
	}
	return full
}

// gone tells that the block is not there now.
func (p *presence) gone(fp block.Fingerprint, key block.Key) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.learnLocked(fp, &key, standsAbsent, 0, 0, byNode)
}

// goneSince tells that a request of then did not find the block.
func (p *presence) goneSince(fp block.Fingerprint, key block.Key, then mark) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.learnLocked(fp, &key, standsAbsent, 0, then, byAnswer)
}

// removed tells that this node has removed blocks by a request of then. Of one
// that was stored meanwhile nobody can say which came first.
func (p *presence) removed(fp block.Fingerprint, keys []block.Key, then mark) {
	for len(keys) > 0 {
		n := min(len(keys), chunkKeys)
		p.mu.Lock()
		for i := range keys[:n] {
			newest := p.mu.left
			if id, ok := p.mu.ids[fp]; ok {
				if h := p.findLocked(id, &keys[i]); h != 0 {
					newest = p.mu.slab.At(h).asOf(p.clockLocked())
				}
			}
			stands := standsAbsent
			if newest >= then {
				stands = standsUnknown
			}
			p.learnLocked(fp, &keys[i], stands, 0, 0, byNode)
		}
		p.mu.Unlock()
		keys = keys[n:]
	}
}

// drop forgets what was known of the block. It is not the same as never having
// known: what was asked before now does not count.
func (p *presence) drop(fp block.Fingerprint, key block.Key) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.learnLocked(fp, &key, standsUnknown, 0, 0, byNode)
}

// touch tells that this node used blocks, the last one last.
func (p *presence) touch(fp block.Fingerprint, keys []block.Key) {
	for len(keys) > 0 {
		n := min(len(keys), chunkKeys)
		p.touchSome(fp, keys[:n])
		keys = keys[n:]
	}
}

func (p *presence) touchSome(fp block.Fingerprint, keys []block.Key) {
	p.mu.Lock()
	defer p.mu.Unlock()
	id, ok := p.mu.ids[fp]
	if !ok {
		return
	}
	now := p.secondsLocked()
	for i := range keys {
		if h := p.findLocked(id, &keys[i]); h != 0 && p.mu.slab.At(h).standing() == standsPresent {
			p.mu.slab.At(h).used = now
			p.frontLocked(h)
		}
	}
}

// lastUse sets ago[i] to how long ago this node used keys[i], or to -1 for a
// block that it has not used in this run, or long forgotten.
func (p *presence) lastUse(fp block.Fingerprint, keys []block.Key, ago []time.Duration) {
	for len(keys) > 0 {
		n := min(len(keys), chunkKeys)
		p.mu.Lock()
		id, ok := p.mu.ids[fp]
		now := p.secondsLocked()
		for i := range keys[:n] {
			ago[i] = -1
			if !ok {
				continue
			}
			if h := p.findLocked(id, &keys[i]); h != 0 {
				if used := p.mu.slab.At(h).used; used != 0 {
					ago[i] = time.Duration(now-min(used, now)) * time.Second
				}
			}
		}
		p.mu.Unlock()
		keys, ago = keys[n:], ago[n:]
	}
}

// blockBytes is how long the objects of a group are, or 0 if that is not known.
func (p *presence) blockBytes(fp block.Fingerprint, group uint32) int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if id, ok := p.mu.ids[fp]; ok && int(group) < len(p.mu.spaces[id]) {
		return p.mu.spaces[id][group].bytes
	}
	return 0
}

// size is what was present when it was last seen, as far as the index holds it.
func (p *presence) size() (blocks, bytes int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, groups := range p.mu.spaces {
		for _, g := range groups {
			blocks += g.blocks
			bytes += g.blocks * g.bytes
		}
	}
	return blocks, bytes
}

// memory is what the records and their table take, in bytes.
func (p *presence) memory() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.table.Bytes() + p.mu.slab.Bytes()
}

// learnLocked is the order of the type comment. It returns the key's record if
// the knowledge was taken. then is not used with byNode.
func (p *presence) learnLocked(fp block.Fingerprint, key *block.Key, stands standing, bytes int64, then mark, by source) uint32 {
	id, ok := p.spaceLocked(fp)
	if !ok || key.Group() >= block.GroupsMax {
		return 0
	}
	if by == byNode {
		then = p.clockLocked()
	}
	h := p.findLocked(id, key)
	if h == 0 {
		if by != byNode && then <= p.mu.left || !p.roomLocked(stands, by) {
			return 0
		}
		if h = p.mu.slab.Alloc(); h == 0 {
			return 0
		}
		r := p.mu.slab.At(h)
		copy(r.hash[:], key[:])
		r.space, r.what = id, uint8(key.Group())<<2|uint8(stands)
		r.setAsOf(then)
		p.mu.table.Insert(p.hash(id, key), h)
		p.countLocked(r, 1, bytes)
		p.linkLocked(h, by != byListing)
		return h
	}
	r := p.mu.slab.At(h)
	if by != byNode && then <= r.asOf(p.clockLocked()) {
		return 0
	}
	if r.standing() == stands {
		r.setAsOf(then)
		return h
	}
	p.unlinkLocked(h)
	p.countLocked(r, -1, 0)
	r.what = r.what&^3 | uint8(stands)
	r.setAsOf(then)
	p.countLocked(r, 1, bytes)
	p.linkLocked(h, by != byListing)
	return h
}

// roomLocked sees to it that one more record fits.
func (p *presence) roomLocked(stands standing, by source) bool {
	oldest := p.mu.others.back
	switch now := p.clockLocked(); {
	case oldest != 0 && now-p.mu.slab.At(oldest).asOf(now) >= p.absentN:
		p.removeLocked(oldest)
	case stands != standsPresent && p.mu.others.n >= p.othersMax:
		p.removeLocked(oldest)
	case p.mu.slab.Len() < p.keys:
	case by == byListing:
		return false
	case p.mu.held.back != 0:
		p.removeLocked(p.mu.held.back)
	default:
		p.removeLocked(oldest)
	}
	return true
}

// removeLocked takes a record out of the index.
func (p *presence) removeLocked(h uint32) {
	r := p.mu.slab.At(h)
	p.mu.left = max(p.mu.left, r.asOf(p.clockLocked()))
	p.unlinkLocked(h)
	p.countLocked(r, -1, 0)
	var key block.Key
	copy(key[:], r.hash[:])
	key[block.KeySize-1] = r.group()
	p.mu.table.Delete(p.hash(r.space, &key), h)
	p.mu.slab.Free(h)
}

func (p *presence) hash(id uint16, key *block.Key) uint64 {
	return key.Mix(p.salt + uint64(id)*0x9e3779b97f4a7c15)
}

// findLocked returns the handle of a key, or 0.
func (p *presence) findLocked(id uint16, key *block.Key) uint32 {
	if key.Group() >= block.GroupsMax {
		return 0
	}
	h, _ := p.mu.table.Find(p.hash(id, key), func(h uint32) bool {
		r := p.mu.slab.At(h)
		return r.space == id && r.group() == key[block.KeySize-1] && r.hash == [block.HashSize]byte(key[:block.HashSize])
	})
	return h
}

func (p *presence) spaceLocked(fp block.Fingerprint) (uint16, bool) {
	id, ok := p.mu.ids[fp]
	if !ok {
		if len(p.mu.spaces) >= spacesMax {
			return 0, false
		}
		id = uint16(len(p.mu.spaces))
		p.mu.ids[fp] = id
		p.mu.spaces = append(p.mu.spaces, nil)
	}
	return id, true
}

// countLocked counts a present record in or out. bytes is how long its object
// is; it counts with the first one.
func (p *presence) countLocked(r *record, by, bytes int64) {
	if r.standing() != standsPresent {
		return
	}
	groups := p.mu.spaces[r.space]
	for len(groups) <= int(r.group()) {
		groups = append(groups, groupCount{})
	}
	p.mu.spaces[r.space] = groups
	g := &groups[r.group()]
	if g.blocks == 0 {
		g.bytes = bytes
	}
	g.blocks += by
}

func (p *presence) listLocked(r *record) *recordList {
	if r.standing() == standsPresent {
		return &p.mu.held
	}
	return &p.mu.others
}

// linkLocked puts a record at the front or the back of the list it belongs to.
func (p *presence) linkLocked(h uint32, front bool) {
	r := p.mu.slab.At(h)
	l := p.listLocked(r)
	l.n++
	if front {
		r.prev, r.next = 0, l.front
	} else {
		r.prev, r.next = l.back, 0
	}
	if r.next != 0 {
		p.mu.slab.At(r.next).prev = h
	} else {
		l.back = h
	}
	if r.prev != 0 {
		p.mu.slab.At(r.prev).next = h
	} else {
		l.front = h
	}
}

func (p *presence) unlinkLocked(h uint32) {
	r := p.mu.slab.At(h)
	l := p.listLocked(r)
	l.n--
	if r.prev != 0 {
		p.mu.slab.At(r.prev).next = r.next
	} else {
		l.front = r.next
	}
	if r.next != 0 {
		p.mu.slab.At(r.next).prev = r.prev
	} else {
		l.back = r.prev
	}
}

func (p *presence) frontLocked(h uint32) {
	if p.listLocked(p.mu.slab.At(h)).front != h {
		p.unlinkLocked(h)
		p.linkLocked(h, true)
	}
}

// clockLocked is the moment now. It does not go back when the clock does, and is
// ahead of it when there are more marks than moments.
func (p *presence) clockLocked() mark {
	if d := p.now().Sub(p.base); d > 0 {
		p.mu.clock = max(p.mu.clock, mark(d/moment)+1)
	}
	return p.mu.clock
}

func (p *presence) secondsLocked() uint32 {
	return uint32(max(0, p.now().Sub(p.base))/time.Second) + 1
}

func (r *record) setAsOf(m mark) { r.asOfLow, r.asOfHigh = uint32(m), uint8(m>>32) }

// asOf is the moment as of which the record stands, which is not after now.
func (r *record) asOf(now mark) mark {
	return now - (now-(mark(r.asOfHigh)<<32|mark(r.asOfLow)))&asOfMask
}
