package vfs

import (
	"cmp"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Limits of Mem.
const (
	pageSize   = 4096
	sectorSize = 512
	nameMax    = 255
	changesMax = 4096 // changes of names that are not on the medium
)

// Mem is an FS in memory, for tests. It has directories, regular files with
// holes, O_TMPFILE and Link, direct I/O that wants aligned offsets and lengths,
// locks, and a capacity. It has no symbolic links and no permissions, and its
// clock is a count of what happens. Close does nothing, so that one tree can
// be opened again and again; OpenFiles tells what was left open.
//
// # What a power cut does
//
// CrashClone is what the medium holds afterwards. The model is harsher than
// any one file system and no harsher than POSIX:
//
//   - What a file held when it was last synced is there, as long as it was not
//     written since.
//   - Of what was written since, each page of 4 KiB is kept, lost or torn: some
//     of its sectors of 512 bytes are new, the rest old. A lost page of a hole
//     is zeros. The file's size is the old one, the new one or in between, at
//     the end of a page.
//   - A name that was made, removed, linked or renamed is so for certain when
//     its directory has been synced since; the file's own sync is not enough.
//     Before that each change is kept or lost, whatever became of others; now
//     and then the oldest are kept and the rest is lost, as with a journal. A
//     rename is kept or lost as a whole. What was in a directory whose name is
//     lost is lost.
//   - No more than changesMax changes of names are pending: the oldest half is
//     written back then.
//   - Locks and open files are gone, and so are files without a name.
//
// Flush makes a random part of what is pending last, as write-back does, so
// that the medium may hold states which are neither the last synced nor the
// newest.
type Mem struct {
	capacity int64 // bytes, 0 is unbounded

	mu      sync.Mutex // guards all below and the inodes
	root    *inode
	used    int64 // bytes in pages of files that have a name or are open
	clock   int64
	inos    uint64
	opens   int
	dirty   map[*inode]struct{} // files with bytes that are not on the medium
	changes []change            // of names that are not on the medium, oldest first
}

type page [pageSize]byte

// content is what a file holds. A nil page is a hole.
type content struct {
	pages []*page
	size  int64
}

func (c *content) page(i int) *page {
	if i < len(c.pages) {
		return c.pages[i]
	}
	return nil
}

// charge is what the pages cost, in bytes.
func (c *content) charge() (n int64) {
	for _, p := range c.pages {
		if p != nil {
			n += pageSize
		}
	}
	return n
}

// inode is a file, or a directory, whose names are not nil. What medium holds
// is never written to: a page that both hold is copied first.
type inode struct {
	ino    uint64
	mode   uint32
	mtime  int64
	links  int
	opens  int
	tmp    bool // O_TMPFILE, and never linked: then it may be
	locked *memFile

	now, medium content
	names       map[string]*inode
	onMedium    map[string]*inode
}

// entry is what a change makes of one name: a file, or nil for none.
type entry struct {
	dir  *inode
	name string
	in   *inode
}

type place struct {
	dir  *inode
	name string
}

// change is one atomic change of names: one entry, or the two of a rename.
type change []entry

// NewMem makes an empty tree. The capacity is in bytes of file pages; 0 is no
// bound.
func NewMem(capacity int64) *Mem {
	m := &Mem{capacity: capacity, dirty: map[*inode]struct{}{}}
	m.root = m.newInode(unix.S_IFDIR | 0o700)
	m.root.links = 1
	return m
}

// tick is the time of a change: a microsecond each from 2000 on.
func (m *Mem) tick() int64 {
	m.clock += 1000
	return 946684800e9 + m.clock
}

func (m *Mem) newInode(mode uint32) *inode {
	m.inos++
	in := &inode{ino: m.inos, mode: mode, mtime: m.tick()}
	if mode&unix.S_IFMT == unix.S_IFDIR {
		in.names, in.onMedium = map[string]*inode{}, map[string]*inode{}
	}
	return in
}

// find walks to a name. The directory is nil for the root; in is nil if there
// is none of that name in dir.
func (m *Mem) find(path string) (dir *inode, base string, in *inode, err error) {
	in = m.root
	for part := range strings.SplitSeq(path, "/") {
		switch {
		case part == "" || part == ".":
			continue
		case in == nil:
			return nil, "", nil, unix.ENOENT
		case in.names == nil:
			return nil, "", nil, unix.ENOTDIR
		case part == "..":
			return nil, "", nil, unix.EINVAL
		case len(part) > nameMax:
			return nil, "", nil, unix.ENAMETOOLONG
		}
		dir, base, in = in, part, in.names[part]
	}
	return dir, base, in, nil
}

// set changes names now, and notes that the medium does not know.
func (m *Mem) set(c ...entry) {
	var lost []*inode
	for _, e := range c {
		if old := e.dir.names[e.name]; old != nil {
			old.links--
			lost = append(lost, old)
		}
		if e.in == nil {
			delete(e.dir.names, e.name)
		} else {
			e.dir.names[e.name] = e.in
			e.in.links++
		}
		e.dir.mtime = m.tick()
	}
	for _, in := range lost { // not before a rename has named it again
		m.release(in)
	}
	if m.changes = append(m.changes, c); len(m.changes) > changesMax {
		half := len(m.changes) / 2
		m.apply(m.choose(func(i int) bool { return i < half }))
	}
}

// release gives back what a file without a name and an opener holds.
func (m *Mem) release(in *inode) {
	if in.links == 0 && in.opens == 0 && in.names == nil {
		m.used -= in.now.charge()
		delete(m.dirty, in)
	}
}

// Open is in FS.
func (m *Mem) Open(name string, flags int, perm uint32) (File, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f, err := m.openLocked(name, flags, perm)
	if err != nil {
		return nil, pathErr("open", name, err)
	}
	f.in.opens++
	m.opens++
	return f, nil
}

func (m *Mem) openLocked(name string, flags int, perm uint32) (*memFile, error) {
	dir, base, in, err := m.find(name)
	if err != nil {
		return nil, err
	}
	f := &memFile{m: m, in: in, name: name, flags: flags}
	writes := flags&unix.O_ACCMODE != unix.O_RDONLY
	switch {
	case flags&unix.O_TMPFILE == unix.O_TMPFILE:
		switch {
		case in == nil:
			return nil, unix.ENOENT
		case in.names == nil:
			return nil, unix.ENOTDIR
		case !writes:
			return nil, unix.EINVAL
		}
		f.in = m.newInode(unix.S_IFREG | perm&0o7777)
		f.in.tmp = true
		return f, nil
	case in == nil && flags&unix.O_CREAT == 0:
		return nil, unix.ENOENT
	case in == nil:
		f.in = m.newInode(unix.S_IFREG | perm&0o7777)
		m.set(entry{dir, base, f.in})
		return f, nil
	case flags&unix.O_CREAT != 0 && flags&unix.O_EXCL != 0:
		return nil, unix.EEXIST
	case in.names != nil && (writes || flags&unix.O_CREAT != 0):
		return nil, unix.EISDIR
	case in.names == nil && flags&unix.O_DIRECTORY != 0:
		return nil, unix.ENOTDIR
	}
	if flags&unix.O_TRUNC != 0 && writes {
		m.used -= in.now.charge()
		in.now = content{}
		m.dirty[in] = struct{}{}
	}
	return f, nil
}

// Link is in FS.
func (m *Mem) Link(f File, name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	mf := f.(*memFile)
	dir, base, old, err := m.find(name)
	switch {
	case err != nil:
	case mf.closed:
		err = unix.ENOENT // as /proc has it
	case dir == nil || old != nil:
		err = unix.EEXIST
	case mf.in.links == 0 && !mf.in.tmp:
		err = unix.ENOENT
	default:
		mf.in.tmp = false
		m.set(entry{dir, base, mf.in})
	}
	return pathErr("link", name, err)
}

// Rename is in FS. A directory replaces nothing.
func (m *Mem) Rename(from, to string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	fromDir, fromBase, in, err := m.find(from)
	toDir, toBase, old, toErr := m.find(to)
	if err == nil {
		err = toErr
	}
	if err == nil && in == nil {
		err = unix.ENOENT
	}
	switch {
	case err != nil || in == old:
	case fromDir == nil || toDir == nil:
		err = unix.EBUSY
	case old != nil && in.names != nil:
		err = unix.ENOTEMPTY
	case old != nil && old.names != nil:
		err = unix.EISDIR
	default:
		m.set(entry{fromDir, fromBase, nil}, entry{toDir, toBase, in})
	}
	return pathErr("rename", to, err)
}

// Remove is in FS.
func (m *Mem) Remove(name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	dir, base, in, err := m.find(name)
	switch {
	case err != nil:
	case in == nil:
		err = unix.ENOENT
	case in.names != nil:
		err = unix.EISDIR
	default:
		m.set(entry{dir, base, nil})
	}
	return pathErr("remove", name, err)
}

// Mkdir is in FS.
func (m *Mem) Mkdir(name string, perm uint32) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	dir, base, in, err := m.find(name)
	if err == nil && in != nil {
		err = unix.EEXIST
	}
	if err == nil {
		m.set(entry{dir, base, m.newInode(unix.S_IFDIR | perm&0o7777)})
	}
	return pathErr("mkdir", name, err)
}

// Lstat is in FS.
func (m *Mem) Lstat(name string) (Info, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, _, in, err := m.find(name)
	if err == nil && in == nil {
		err = unix.ENOENT
	}
	if err != nil {
		return Info{}, pathErr("lstat", name, err)
	}
	return in.info(), nil
}

func (in *inode) info() Info {
	return Info{Mode: in.mode, Size: in.now.size, Bytes: in.now.charge(), Mtime: in.mtime, Ino: in.ino, Links: uint64(in.links)}
}

// ReadDir is in FS. The names are sorted, and those of one moment.
func (m *Mem) ReadDir(name string, fn func(base string) error) error {
	m.mu.Lock()
	_, _, in, err := m.find(name)
	var names []string
	switch {
	case err != nil:
	case in == nil:
		err = unix.ENOENT
	case in.names == nil:
		err = unix.ENOTDIR
	default:
		names = slices.Sorted(maps.Keys(in.names))
	}
	m.mu.Unlock()
	for _, n := range names {
		if err := fn(n); err != nil {
			return err
		}
	}
	return pathErr("open", name, err)
}

// Space is in FS.
func (m *Mem) Space() (Space, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	free := int64(1 << 40)
	if m.capacity > 0 {
		free = m.capacity - m.used
	}
	return Space{Free: max(free, 0), Block: pageSize}, nil
}

// Close is in FS and does nothing.
func (m *Mem) Close() error { return nil }

// OpenFiles is the number of files that are open.
func (m *Mem) OpenFiles() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.opens
}

// UsedBytes is what all files are charged, those without a name included.
func (m *Mem) UsedBytes() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.used
}

// memFile is an open file; what guards its Mem guards it.
type memFile struct {
	m      *Mem
	in     *inode
	name   string
	flags  int
	closed bool
}

// vec checks a read or write of bufs at off.
func (f *memFile) vec(bufs [][]byte, off int64, writes bool) error {
	mode := f.flags & unix.O_ACCMODE
	switch {
	case f.closed || (writes && mode == unix.O_RDONLY) || (!writes && mode == unix.O_WRONLY):
		return unix.EBADF
	case f.in.names != nil:
		return unix.EISDIR
	case off < 0:
		return unix.EINVAL
	}
	if f.flags&unix.O_DIRECT != 0 {
		all := off
		for _, b := range bufs {
			all |= int64(len(b))
		}
		if all%sectorSize != 0 {
			return unix.EINVAL
		}
	}
	return nil
}

func (f *memFile) ReadVec(bufs [][]byte, off int64) (n int, err error) {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	if err := f.vec(bufs, off, false); err != nil {
		return 0, pathErr("read", f.name, err)
	}
	c := &f.in.now
	for _, b := range bufs {
		b = b[:max(0, min(int64(len(b)), c.size-off))]
		for len(b) > 0 {
			at := off % pageSize
			k := min(len(b), int(pageSize-at))
			if p := c.page(int(off / pageSize)); p != nil {
				copy(b[:k], p[at:])
			} else {
				clear(b[:k])
			}
			b, off, n = b[k:], off+int64(k), n+k
		}
	}
	return n, nil
}

func (f *memFile) WriteVec(bufs [][]byte, off int64) (n int, err error) {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	if err := f.vec(bufs, off, true); err != nil {
		return 0, pathErr("write", f.name, err)
	}
	for _, b := range bufs {
		for len(b) > 0 {
			p := f.m.writable(f.in, int(off/pageSize))
			if p == nil && n == 0 {
				return 0, pathErr("write", f.name, unix.ENOSPC)
			}
			if p == nil {
				return n, nil
			}
			k := copy(p[off%pageSize:], b)
			b, off, n = b[k:], off+int64(k), n+k
			f.in.now.size = max(f.in.now.size, off)
			f.in.mtime = f.m.tick()
		}
	}
	return n, nil
}

// writable is a page of a file that may be written to, or nil if the medium is
// full.
func (m *Mem) writable(in *inode, i int) *page {
	for len(in.now.pages) <= i {
		in.now.pages = append(in.now.pages, nil)
	}
	p := in.now.pages[i]
	switch {
	case p == nil:
		if m.capacity > 0 && m.used+pageSize > m.capacity {
			return nil
		}
		m.used += pageSize
		p = &page{}
	case p == in.medium.page(i):
		q := *p
		p = &q
	}
	in.now.pages[i] = p
	m.dirty[in] = struct{}{}
	return p
}

func (f *memFile) Stat() (Info, error) {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	if f.closed {
		return Info{}, pathErr("stat", f.name, unix.EBADF)
	}
	return f.in.info(), nil
}

func (f *memFile) Truncate(size int64) error {
	m, in := f.m, f.in
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case f.closed:
		return pathErr("truncate", f.name, unix.EBADF)
	case in.names != nil || f.flags&unix.O_ACCMODE == unix.O_RDONLY || size < 0:
		return pathErr("truncate", f.name, unix.EINVAL)
	}
	if keep := (size + pageSize - 1) / pageSize; keep < int64(len(in.now.pages)) {
		cut := content{pages: in.now.pages[keep:]}
		m.used -= cut.charge()
		in.now.pages = slices.Clone(in.now.pages[:keep])
	}
	if tail := size % pageSize; tail != 0 && size < in.now.size && in.now.page(int(size/pageSize)) != nil {
		clear(m.writable(in, int(size/pageSize))[tail:]) // there is a page, so it needs no room
	}
	in.now.size, in.mtime = size, m.tick()
	m.dirty[in] = struct{}{}
	return nil
}

// Sync of a directory makes its names last, of a file its bytes.
func (f *memFile) Sync() error {
	m := f.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if f.closed {
		return pathErr("sync", f.name, unix.EBADF)
	}
	if f.in.names != nil {
		m.apply(m.choose(func(i int) bool {
			return slices.ContainsFunc(m.changes[i], func(e entry) bool { return e.dir == f.in })
		}))
		return nil
	}
	f.in.medium = content{slices.Clone(f.in.now.pages), f.in.now.size}
	delete(m.dirty, f.in)
	return nil
}

func (f *memFile) Lock() error {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	switch {
	case f.closed:
		return pathErr("lock", f.name, unix.EBADF)
	case f.in.locked != nil && f.in.locked != f:
		return pathErr("lock", f.name, unix.EAGAIN)
	}
	f.in.locked = f
	return nil
}

func (f *memFile) Close() error {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	if f.closed {
		return pathErr("close", f.name, unix.EBADF)
	}
	f.closed = true
	if f.in.locked == f {
		f.in.locked = nil
	}
	f.in.opens--
	f.m.opens--
	f.m.release(f.in)
	return nil
}

// choose takes from the pending changes those that keep says by index, as
// entries no two of which are for one name. What an older change does to a
// name that one of them changes is no longer pending.
func (m *Mem) choose(keep func(i int) bool) (taken []entry, pending []change) {
	settled := map[place]bool{}
	for i := len(m.changes) - 1; i >= 0; i-- {
		c := slices.DeleteFunc(slices.Clone(m.changes[i]), func(e entry) bool { return settled[place{e.dir, e.name}] })
		switch {
		case len(c) == 0:
		case !keep(i):
			pending = append(pending, c)
		default:
			for _, e := range c {
				settled[place{e.dir, e.name}] = true
			}
			taken = append(taken, c...)
		}
	}
	slices.Reverse(pending)
	return taken, pending
}

// apply writes entries to the medium.
func (m *Mem) apply(taken []entry, pending []change) {
	for _, e := range taken {
		if e.in == nil {
			delete(e.dir.onMedium, e.name)
		} else {
			e.dir.onMedium[e.name] = e.in
		}
	}
	m.changes = pending
}

// luck decides what becomes of what is pending.
type luck struct {
	seed   uint64
	names  float64 // the share that is kept
	pages  float64
	oldest bool // of names: the oldest, and no others
}

func newLuck(seed uint64) (luck, *rand.Rand) {
	r := rand.New(rand.NewPCG(seed, 0))
	share := func() float64 { return [...]float64{0, 0.1, 0.5, 0.9, 1}[r.IntN(5)] }
	return luck{seed: seed, names: share(), pages: share(), oldest: r.IntN(3) == 0}, r
}

// chooseNames is choose by luck.
func (m *Mem) chooseNames(l luck, r *rand.Rand) ([]entry, []change) {
	if l.oldest {
		n := r.IntN(len(m.changes) + 1)
		return m.choose(func(i int) bool { return i < n })
	}
	return m.choose(func(int) bool { return r.Float64() < l.names })
}

// survive is what the medium holds of a file if the power is cut now. own says
// that its pages must not be shared with now. It depends on the luck and the
// inode only.
func (in *inode) survive(l luck, own bool) content {
	r := rand.New(rand.NewPCG(l.seed, in.ino))
	c := content{size: in.medium.size}
	if in.now.size != c.size {
		switch from, to := c.size/pageSize, in.now.size/pageSize; {
		case r.Float64() < l.pages:
			c.size = in.now.size
		case to > from:
			c.size = max(c.size, (from+r.Int64N(to-from+1))*pageSize)
		}
	}
	c.pages = make([]*page, (c.size+pageSize-1)/pageSize)
	for i := range c.pages {
		now, old := in.now.page(i), in.medium.page(i)
		c.pages[i] = old
		if now == old || now == nil {
			continue
		}
		if x := r.Float64(); x < l.pages {
			if c.pages[i] = now; own {
				q := *now
				c.pages[i] = &q
			}
		} else if r.IntN(4) == 0 {
			torn := &page{}
			if old != nil {
				*torn = *old
			}
			for s := 0; s < pageSize; s += sectorSize {
				if r.IntN(2) == 0 {
					copy(torn[s:s+sectorSize], now[s:])
				}
			}
			c.pages[i] = torn
		}
	}
	if tail := c.size % pageSize; tail != 0 && c.pages[len(c.pages)-1] != nil {
		q := *c.pages[len(c.pages)-1]
		clear(q[tail:])
		c.pages[len(c.pages)-1] = &q
	}
	return c
}

// Flush writes a random part of what is pending to the medium.
func (m *Mem) Flush(seed uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	l, r := newLuck(seed)
	m.apply(m.chooseNames(l, r))
	for in := range m.dirty {
		in.medium = in.survive(l, false)
	}
}

// CrashClone makes a copy as after a power cut, which shares nothing with m.
// The same seed after the same calls makes the same copy.
func (m *Mem) CrashClone(seed uint64) *Mem {
	m.mu.Lock()
	defer m.mu.Unlock()
	l, r := newLuck(seed)
	taken, _ := m.chooseNames(l, r)
	changed := map[*inode][]entry{} // by directory
	for _, e := range taken {
		changed[e.dir] = append(changed[e.dir], e)
	}
	out := NewMem(m.capacity)
	out.clock, out.inos = m.clock, m.inos
	copies := map[*inode]*inode{}
	var clone func(in *inode) *inode
	clone = func(in *inode) *inode {
		if c := copies[in]; c != nil {
			c.links++
			return c
		}
		c := &inode{ino: in.ino, mode: in.mode, mtime: in.mtime, links: 1}
		copies[in] = c
		if in.names == nil {
			c.medium = in.survive(l, true)
			c.now = content{slices.Clone(c.medium.pages), c.medium.size}
			out.used += c.now.charge()
			return c
		}
		names := maps.Clone(in.onMedium)
		for _, e := range changed[in] {
			if names[e.name] = e.in; e.in == nil {
				delete(names, e.name)
			}
		}
		c.names, c.onMedium = map[string]*inode{}, map[string]*inode{}
		for name, sub := range names {
			c.names[name] = clone(sub)
			c.onMedium[name] = c.names[name]
		}
		return c
	}
	out.root = clone(m.root)
	return out
}

// Walk calls fn for each regular file of a tree, in order of names.
func Walk(f FS, fn func(path string, st Info)) error {
	var dir func(path string) error
	dir = func(path string) error {
		var names []string
		err := f.ReadDir(path, func(n string) error { names = append(names, n); return nil })
		if err != nil {
			return err
		}
		slices.SortFunc(names, cmp.Compare[string])
		for _, n := range names {
			n = strings.TrimPrefix(path+"/"+n, "./")
			st, err := f.Lstat(n)
			switch {
			case err != nil:
				return err
			case st.Dir():
				if err := dir(n); err != nil {
					return err
				}
			case st.Regular():
				fn(n, st)
			}
		}
		return nil
	}
	return dir(".")
}
