package keymap

const (
	segSlots = 1023 // with the 8-byte head a segment is exactly 8 KiB, an allocation size without waste
	segFill  = 832  // entries at which a segment splits; above 81 % linear probing gets long

	// A doubling of the directory needs this many entries a pointer. Even
	// hashes double at about 700, so that only hashes that are far from even
	// are refused, and those chain instead of growing the directory for ever.
	dirEntriesMin = 64
)

// Table maps 64-bit hashes to handles by extendible hashing: a place that the
// hash has selects a segment through a directory, the segment is open
// addressed. Only the upper 32 bits of a hash, the tag, are used and kept, so
// a split needs no help from the owner. Several handles may have one hash.
//
// An insert does at most two splits (about 5 µs each) and rarely doubles the
// directory (8 bytes a segment). Hashes are expected to be even, such as
// block.Key.Mix with a random salt gives; when they are not, segments that
// cannot split chain, and lookups among them become linear.
//
// A Table is made by NewTable.
type Table struct {
	dir   []*segment // 1<<depth of them; a segment of depth d appears 1<<(depth-d) times in a row
	depth uint8
	n     int
	segs  int

	// Chained segments, by segment.next. Element 0 is unused. The link is an
	// index and not a pointer so that segments stay pointer-free.
	chained     []*segment
	chainedFree []uint32
}

// segment is 8 KiB. A slot is tag<<32 | handle; 0 is empty, because no handle
// is 0.
type segment struct {
	next  uint32 // of the chain, or 0
	n     uint16
	depth uint8 // top bits of their place that all entries share
	_     uint8
	slots [segSlots]uint64
}

// NewTable makes an empty table.
func NewTable() *Table {
	return &Table{dir: []*segment{new(segment)}, segs: 1, chained: make([]*segment, 1)}
}

// home is where probing for a tag starts. The product spreads whatever bits
// the segment selection has left.
func home(tag uint32) uint32 {
	return uint32(uint64(tag*0x9e3779b1) * segSlots >> 32)
}

// place is where in the directory a tag belongs, as a fraction of 2^32. It is
// close to log2(1+tag), so that equal parts of the directory get from 0.7 to 1.5
// times the average of even tags, each as often as any other. Were they equal, all
// segments would split at much the same time, and an entry would take anything
// from 10 to 20 bytes by how long ago that was; so it is always about 14.
func place(tag uint32) uint32 {
	t := uint64(tag)
	const bend = 0x58106250 // 0.344: log2(1+x) is about x + 0.344·x·(1-x)
	return uint32(t + t*(1<<32-1-t)>>32*bend>>32)
}

func (t *Table) seg(tag uint32) *segment { return t.dir[place(tag)>>(32-t.depth)] }

// Find returns the handle under hash h for which eq is true. It calls eq for
// each handle whose hash agrees with h in the upper 32 bits. It allocates
// nothing, and eq does not escape.
func (t *Table) Find(h uint64, eq func(handle uint32) bool) (uint32, bool) {
	tag := uint32(h >> 32)
	s := t.seg(tag)
	for {
		for i := home(tag); ; {
			v := s.slots[i]
			if v == 0 {
				break
			}
			if uint32(v>>32) == tag && eq(uint32(v)) {
				return uint32(v), true
			}
			if i++; i == segSlots {
				i = 0
			}
		}
		if s.next == 0 {
			return 0, false
		}
		s = t.chained[s.next]
	}
}

// Insert adds a handle, which must not be 0, under hash h. It does not look
// for equals: the owner has called Find.
func (t *Table) Insert(h uint64, handle uint32) {
	if handle == 0 {
		panic("keymap: insert of handle 0")
	}
	tag := uint32(h >> 32)
	t.n++
	s := t.seg(tag)
	for range 2 {
		if s.n < segFill {
			break
		}
		if s.next != 0 || !t.split(tag, s) {
			break
		}
		s = t.seg(tag)
	}
	if s.n >= segFill {
		s = t.chain(s)
	}
	s.put(tag, handle)
}

// put places an entry; the segment has room.
func (s *segment) put(tag, handle uint32) {
	i := home(tag)
	for s.slots[i] != 0 {
		if i++; i == segSlots {
			i = 0
		}
	}
	s.slots[i] = uint64(tag)<<32 | uint64(handle)
	s.n++
}

// split divides the segment of a tag by one more bit, or says that the
// directory may not grow for it.
func (t *Table) split(tag uint32, s *segment) bool {
	if s.depth == t.depth {
		if t.depth == 32 || (t.depth > 2 && t.n < len(t.dir)*dirEntriesMin) {
			return false
		}
		dir := make([]*segment, 2*len(t.dir))
		for i, s := range t.dir {
			dir[2*i], dir[2*i+1] = s, s
		}
		t.dir = dir
		t.depth++
	}
	// The upper half goes to a new segment. The lower half is put afresh:
	// entries behind the ones that left could not be found otherwise.
	old := s.slots
	s.slots = [segSlots]uint64{}
	s.n = 0
	s.depth++
	up := &segment{depth: s.depth}
	t.segs++
	bit := uint32(1) << (32 - s.depth)
	for _, v := range old {
		if v == 0 {
			continue
		}
		if to := uint32(v >> 32); place(to)&bit != 0 {
			up.put(to, uint32(v))
		} else {
			s.put(to, uint32(v))
		}
	}
	n := 1 << (t.depth - s.depth) // directory entries of each half
	first := int(place(tag)>>(32-t.depth))&^(2*n-1) + n
	for i := range n {
		t.dir[first+i] = up
	}
	return true
}

// chain returns a segment with room behind s, which is full.
func (t *Table) chain(s *segment) *segment {
	if s.next != 0 {
		if c := t.chained[s.next]; c.n < segFill {
			return c
		}
	}
	c := &segment{next: s.next, depth: s.depth}
	t.segs++
	if k := len(t.chainedFree); k > 0 {
		s.next = t.chainedFree[k-1]
		t.chainedFree = t.chainedFree[:k-1]
		t.chained[s.next] = c
	} else {
		s.next = uint32(len(t.chained))
		t.chained = append(t.chained, c)
	}
	return c
}

// Delete removes a handle from under hash h and says whether it was there.
func (t *Table) Delete(h uint64, handle uint32) bool {
	tag := uint32(h >> 32)
	want := uint64(tag)<<32 | uint64(handle)
	var before *segment
	for s := t.seg(tag); handle != 0; {
		i := home(tag)
		for s.slots[i] != 0 && s.slots[i] != want {
			if i++; i == segSlots {
				i = 0
			}
		}
		if s.slots[i] == want {
			s.remove(i)
			t.n--
			if s.n == 0 && before != nil {
				id := before.next
				before.next = s.next
				t.chained[id] = nil
				t.chainedFree = append(t.chainedFree, id)
				t.segs--
			}
			return true
		}
		if s.next == 0 {
			return false
		}
		before, s = s, t.chained[s.next]
	}
	return false
}

// remove empties slot i and moves back what had to probe past it, so that no
// tombstones are needed.
func (s *segment) remove(i uint32) {
	s.n--
	for j := i; ; {
		if j++; j == segSlots {
			j = 0
		}
		v := s.slots[j]
		if v == 0 {
			break
		}
		// v may move to i if i is on its way, that is, cyclically in [home, j).
		if h := home(uint32(v >> 32)); distance(h, j) >= distance(i, j) {
			s.slots[i] = v
			i = j
		}
	}
	s.slots[i] = 0
}

// distance is the number of steps from slot i on to slot j.
func distance(i, j uint32) uint32 {
	if j >= i {
		return j - i
	}
	return j + segSlots - i
}

// Len is the number of entries.
func (t *Table) Len() int { return t.n }

// Bytes is the memory taken.
func (t *Table) Bytes() int { return t.segs*8*(segSlots+1) + 8*cap(t.dir) + 12*cap(t.chained) }
