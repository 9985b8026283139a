package fstier

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/blockhead"
	"github.com/terrace-kv/terrace/internal/vfs"
	"github.com/terrace-kv/terrace/tier"
)

// Names under the root.
const (
	nameLock       = "LOCK"
	nameUsage      = "usage"
	nameTmp        = "tmp"
	nameQuarantine = "quarantine"
	nameNamespace  = "namespace.json" // in a namespace's directory
	nameName       = "name"           // beside it
	probeSuffix    = "probe"          // of a name in tmp
)

// stripe covers the keys that hash to it. readers counts the reads that may
// have one of their files open.
type stripe struct {
	sync.Mutex
	readers atomic.Int64
}

const stripes = 1024

// Tier is a directory of block files. It is safe for concurrent use.
type Tier struct {
	o        Options
	log      *slog.Logger
	info     tier.Info
	headers  headerPool
	complain limiter // one log line a second about broken copies
	fullOnce sync.Once

	// What belongs to the root that is open. It changes only while no call is
	// under way and none is admitted: see root.go.
	root    openedRoot
	fs      vfs.FS
	names   *names   // is fs
	writer  [16]byte // in every header and temporary name since the root was opened
	tmpName string   // prefix of the temporary files since then
	place   place

	directFlag int  // O_DIRECT, where it works here
	tmpfile    bool // O_TMPFILE and linkat work here
	linkNamed  bool // linkat works here for files that have a name

	lockFile vfs.File
	usage    usageFile

	stop      context.CancelFunc // of the keeper
	over      chan struct{}      // closed when the keeper has ended
	wake      chan struct{}      // tells the keeper that the root was found to be lost
	scanOnce  sync.Once
	firstScan chan struct{} // closed when the first scan is done, or with Close

	namespaceMu sync.Mutex // held while a namespace is stored or named
	stripe      [stripes]stripe
	quarantine  quarantine
	lookups     atomic.Int32 // calls of Known that wait for mu

	mu struct {
		sync.Mutex
		closed bool
		lost   error         // why there is no root, or nil
		calls  int           // under way
		idle   chan struct{} // if not nil: to be closed when calls is 0
		mode   string

		index      index
		misses     misses // of a shared root
		account    account
		free       freeSpace
		namespaces map[block.Fingerprint]*namespace
		byID       []*namespace

		tmpSeq     uint64
		strays     []stray // at most straysMax
		evicted    int64
		setAside   int64
		scanBlocks int64
		scanError  string
		foreign    struct{ files, bytes int64 }
	}
}

var (
	_ tier.Tier            = (*Tier)(nil)
	_ tier.Knower          = (*Tier)(nil)
	_ tier.Toucher         = (*Tier)(nil)
	_ tier.NamespaceOpener = (*Tier)(nil)
	_ tier.NameKeeper      = (*Tier)(nil)
	_ tier.SetAsider       = (*Tier)(nil)
	_ tier.Statser         = (*Tier)(nil)
)

// Open takes the directory for this node and starts the scan of what is in it.
// It does not wait for the scan: see Stats.ScanDone. On an error there is
// nothing to close.
func Open(ctx context.Context, o Options) (*Tier, error) {
	watched := o.FS == nil
	if err := errors.Join(o.Validate(), ctx.Err()); err != nil {
		if o.FS != nil {
			_ = o.FS.Close()
		}
		return nil, err
	}
	o.ensureDefaults()
	o.Root = filepath.Clean(o.Root)
	if watched {
		under, err := openRoot(o.Root)
		if err != nil {
			return nil, err
		}
		o.FS = under
	}
	t := &Tier{o: o, log: o.Logger.With("tier", o.Name), over: make(chan struct{}), wake: make(chan struct{}, 1), firstScan: make(chan struct{})}
	t.info = tier.Info{
		Name: o.Name, Type: "fs", Medium: tier.MediumStorage, Locality: tier.LocalityLocal,
		ReadParallel: o.Workers, WriteParallel: o.Workers, BatchItems: batchItems, Authoritative: !o.Shared,
	}
	t.complain.now = o.Now
	t.root.watched = watched
	empty, err := t.takeRoot(o.wrap(o.FS))
	if err != nil {
		t.headers.close()
		return nil, err
	}
	keep, stop := context.WithCancel(context.Background())
	t.stop = stop
	scan := t.begin(keep, empty)
	go func() {
		defer close(t.over)
		t.keep(keep, scan)
	}()
	return t, nil
}

// openRoot makes and opens the root, and says in words what is wrong with it.
func openRoot(root string) (vfs.FS, error) {
	if err := os.MkdirAll(root, 0o700); err != nil {
		st, serr := os.Lstat(root)
		switch {
		case serr == nil && st.Mode()&os.ModeSymlink != 0:
			return nil, fmt.Errorf("fs tier: root %s is a symbolic link that leads to no directory: set root to a directory", root)
		case serr == nil && !st.IsDir():
			return nil, fmt.Errorf("fs tier: root %s is not a directory (%s): set root to a directory", root, st.Mode().Type())
		}
		return nil, fmt.Errorf("fs tier: make root: %w: make it, or set root to a directory that this user may write", err)
	}
	if st, err := os.Lstat(root); err == nil && st.Mode()&os.ModeSymlink != 0 {
		target, _ := os.Readlink(root)
		return nil, fmt.Errorf("fs tier: root %s is a symbolic link: set root to where it leads (%s)", root, target)
	}
	f, err := vfs.OpenRoot(root)
	if err != nil {
		return nil, fmt.Errorf("fs tier: open root: %w: this user needs read and write permission on it", err)
	}
	return f, nil
}

// openErr wraps an error of Open.
func (t *Tier) openErr(doing string, err error) error {
	hint := hintFor(err)
	if hint != "" {
		hint = " (" + hint + ")"
	}
	return fmt.Errorf("fs tier %s: %s root %s: %w%s", t.o.Name, doing, t.o.Root, err, hint)
}

// takeLock makes the root this node's own.
func (t *Tier) takeLock() error {
	for {
		f, err := t.fs.Open(t.place.lock, unix.O_RDWR|unix.O_CREAT|unix.O_NONBLOCK, 0o600)
		if errors.Is(err, unix.EISDIR) && !t.o.Shared {
			return fmt.Errorf("fs tier %s: root %s is shared by several nodes (%s is a directory): set shared: true, or give this one another root", t.o.Name, t.o.Root, nameLock)
		}
		if err != nil {
			return t.openErr("open lock file of", err)
		}
		err = f.Lock()
		holder := ""
		if err != nil || t.o.Shared {
			buf := make([]byte, 256)
			n, rerr := vfs.ReadFull(f, [][]byte{buf}, 0)
			if err == nil && rerr != nil {
				_ = f.Close()
				return t.openErr("read "+t.place.lock+" in", rerr)
			}
			holder = strings.Join(strings.Fields(string(buf[:n])), " ")
		}
		if err != nil {
			_ = f.Close()
			if errors.Is(err, unix.EAGAIN) && t.o.Shared {
				return fmt.Errorf("fs tier %s: node_id %q is in use in root %s by another node (%s): give each node that shares a root a node_id of its own", t.o.Name, t.o.NodeID, t.o.Root, holder)
			}
			if errors.Is(err, unix.EAGAIN) {
				return fmt.Errorf("fs tier %s: root %s is in use by another node (%s): stop that one, or give this one another root", t.o.Name, t.o.Root, holder)
			}
			return t.openErr("lock", err)
		}
		// The name may lead to another file by now, whose lock someone else has.
		st, err := f.Stat()
		if err != nil {
			_ = f.Close()
			return t.openErr("stat lock file of", err)
		}
		at, err := t.fs.Lstat(t.place.lock)
		if err != nil && !errors.Is(err, unix.ENOENT) {
			_ = f.Close()
			return t.openErr("look at lock file of", err)
		}
		if err != nil || at.Ino != st.Ino {
			_ = f.Close()
			continue
		}
		if id, _, _ := strings.Cut(holder, " "); t.o.Shared && id != "" && id != t.o.NodeID {
			_ = f.Close()
			return fmt.Errorf("fs tier %s: root %s: %s was taken by node %s just now: start again", t.o.Name, t.o.Root, t.place.lock, id)
		}
		// Who has it is for people only; a full disk must not keep us out.
		_ = vfs.WriteAll(f, [][]byte{[]byte(t.who())}, 0)
		_ = f.Sync()
		st, err = f.Stat()
		if err != nil {
			_ = f.Close()
			return t.openErr("stat lock file of", err)
		}
		t.found(st.Bytes)
		t.lockFile = f
		t.root.lockIno = st.Ino
		return nil
	}
}

// makeDir makes a directory, or finds it made.
func (t *Tier) makeDir(name string) error {
	err := t.fs.Mkdir(name, 0o700)
	if !errors.Is(err, unix.EEXIST) {
		return err
	}
	st, err := t.fs.Lstat(name)
	if err == nil && !st.Dir() {
		err = fmt.Errorf("%w: %s: remove it", unix.ENOTDIR, t.path(name))
	}
	return err
}

// probe finds out by doing whether O_DIRECT and O_TMPFILE work here, and how
// many bytes the file system charges for a small block.
func (t *Tier) probe() {
	hdr, data, back := t.headers.get(), t.headers.get(), t.headers.get()
	defer func() {
		t.headers.put(hdr)
		t.headers.put(data)
		t.headers.put(back)
	}()
	name := t.tmpName + probeSuffix
	try := func(flag int) (charged int64, err error) {
		for i := range data {
			data[i] = byte(i) ^ t.writer[0]
		}
		(&blockhead.Header{Length: headerSize}).Encode(hdr)
		f, err := t.fs.Open(name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|flag, 0o600)
		if err != nil {
			return 0, err
		}
		defer func() {
			_ = f.Close()
			_ = t.fs.Remove(name)
		}()
		if err := vfs.WriteAll(f, [][]byte{hdr, data}, 0); err != nil {
			return 0, err
		}
		if t.o.Shared {
			if err := f.Truncate(fileSize(headerSize) + int64(t.place.number)); err != nil {
				return 0, err
			}
			second := t.tmpName + "2" + probeSuffix
			t.linkNamed = t.fs.Link(f, second) == nil
			_ = t.fs.Remove(second)
		}
		if n, err := vfs.ReadFull(f, [][]byte{back}, headerSize); err != nil || n != headerSize || string(back) != string(data) {
			return 0, fmt.Errorf("read back %d bytes: %w", n, err)
		}
		st, err := f.Stat()
		return st.Bytes, err
	}
	io := "O_DIRECT"
	t.directFlag = unix.O_DIRECT
	charged, err := try(unix.O_DIRECT)
	if err != nil {
		io, t.directFlag = "buffered", 0
		t.log.Info("no direct I/O here; buffered I/O is used", "root", t.o.Root, "why", err)
		charged, _ = try(0)
	}
	publish := "rename"
	if f, err := t.fs.Open(t.place.tmp, unix.O_WRONLY|unix.O_TMPFILE, 0o600); err == nil {
		if err := t.fs.Link(f, name); err == nil {
			_ = t.fs.Remove(name)
			publish, t.tmpfile = "O_TMPFILE", true
		}
		_ = f.Close()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.account.learn(charged - fileSize(headerSize))
	t.mu.mode = io + ", " + publish + ", sync " + t.o.Sync
	if t.o.Shared {
		t.mu.mode += fmt.Sprintf(", shared as %s (%d)", t.o.NodeID, t.place.number)
	}
}

// enter admits a call. Without a root it gives an error of cause unavailable.
func (t *Tier) enter(op string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return tier.ErrClosed
	}
	if t.mu.lost != nil {
		return t.unavailable(op, block.Key{}, t.mu.lost)
	}
	t.mu.calls++
	return nil
}

func (t *Tier) leave() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.calls--; t.mu.calls == 0 && t.mu.idle != nil {
		close(t.mu.idle)
		t.mu.idle = nil
	}
}

// quiet is closed when no call is under way. It is for when none is admitted.
func (t *Tier) quiet() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.idle == nil {
		idle := make(chan struct{})
		if t.mu.calls == 0 {
			close(idle)
			return idle
		}
		t.mu.idle = idle
	}
	return t.mu.idle
}

// Close is in tier.Tier. When ctx ends before the calls do, it says so and
// leaves descriptors and the lock to the end of the process, since the calls
// still use them.
func (t *Tier) Close(ctx context.Context) error {
	t.mu.Lock()
	if t.mu.closed {
		t.mu.Unlock()
		return tier.ErrClosed
	}
	t.mu.closed = true
	t.mu.Unlock()
	t.stop()
	for _, over := range []<-chan struct{}{t.over, t.quiet()} {
		select {
		case <-over:
			continue
		default: // what is over is not late
		}
		select {
		case <-over:
		case <-ctx.Done():
			t.mu.Lock()
			defer t.mu.Unlock()
			return fmt.Errorf("close fs tier %s: %d calls on %s are still under way: %w", t.o.Name, t.mu.calls, t.o.Root, ctx.Err())
		}
	}
	defer t.headers.close()
	switch {
	case !t.root.open:
		return nil
	case t.lostRoot() != nil:
		t.dropRoot()
		return nil
	}
	err := t.closeUsage(ctx)
	return errors.Join(err, t.lockFile.Close(), t.fs.Close())
}

// Info is in tier.Tier.
func (t *Tier) Info() tier.Info { return t.info }

// Stats is in tier.Statser.
func (t *Tier) Stats() tier.Stats {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.lost != nil {
		return tier.Stats{Mode: modeLost, Where: t.o.Root, CapacityBytes: t.o.Capacity, Evicted: t.mu.evicted, SetAside: t.mu.setAside, ScanError: t.mu.lost.Error()}
	}
	return tier.Stats{
		Mode: t.mu.mode, Where: t.o.Root,
		Blocks:    int64(t.mu.index.table.Len()),
		UsedBytes: t.mu.account.used(), CapacityBytes: t.o.Capacity,
		Evicted: t.mu.evicted, SetAside: t.mu.setAside,
		ScanDone: t.mu.account.scanned, ScanBlocks: t.mu.scanBlocks, ScanError: t.mu.scanError,
	}
}

// Foreign tells the files under the root that the scan could not place, which
// count as used and are otherwise left alone.
func (t *Tier) Foreign() (files, bytes int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.foreign.files, t.mu.foreign.bytes
}

// ScanDone is closed when the first scan is done, or with Close.
func (t *Tier) ScanDone() <-chan struct{} { return t.firstScan }

// spaceLocked is a namespace that is there, or nil. In a shared root it may
// have come since the start.
func (t *Tier) spaceLocked(fp block.Fingerprint) *namespace {
	n := t.mu.namespaces[fp]
	if n == nil && t.o.Shared && t.mu.lost == nil {
		n, _ = t.newNamespaceLocked(fp) // with too many it is as if it were not there
	}
	return n
}

// findLocked returns a namespace, or nil, and a block's handle, or 0.
func (t *Tier) findLocked(fp block.Fingerprint, key *block.Key) (*namespace, uint32) {
	n := t.spaceLocked(fp)
	if n == nil {
		return nil, 0
	}
	return n, t.mu.index.find(n.id, key)
}

// presenceLocked is what the index says of a key and its handle in a namespace.
func (t *Tier) presenceLocked(n *namespace, h uint32, key *block.Key) tier.Presence {
	switch {
	case t.mu.lost != nil:
		return tier.Absent
	case h != 0 && t.mu.index.at(h).usable():
		return tier.Present
	case h != 0 || n == nil:
		return tier.Absent
	case t.o.Shared:
		if m := &t.mu.misses; m.has(t.mu.index.hash(n.id, key), m.since(t.o.Now())) {
			return tier.Absent
		}
	case t.mu.account.scanned:
		return tier.Absent
	}
	return tier.Unknown
}

// Known is in tier.Knower. It answers Unknown only until the scan is done, but
// in a shared root for all that is not indexed and was not missed just now.
func (t *Tier) Known(ns *block.Namespace, keys []block.Key, out []tier.Presence) {
	t.lookups.Add(1)
	t.mu.Lock()
	t.lookups.Add(-1)
	defer t.mu.Unlock()
	n := t.spaceLocked(ns.Fingerprint())
	for i := range keys {
		var h uint32
		if n != nil {
			h = t.mu.index.find(n.id, &keys[i])
		}
		out[i] = t.presenceLocked(n, h, &keys[i])
	}
}

// lockAfterLookups takes mu for the scan, which does so several times for each
// file. A Mutex lets those who run take it again and again while somebody has
// been woken for it, for up to a millisecond, and that is too long for a lookup.
func (t *Tier) lockAfterLookups() {
	for t.lookups.Load() > 0 {
		runtime.Gosched()
	}
	t.mu.Lock()
}

// Touch is in tier.Toucher.
func (t *Tier) Touch(ns *block.Namespace, keys []block.Key) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.mu.namespaces[ns.Fingerprint()]
	if n == nil {
		return
	}
	for i := range keys {
		if h := t.mu.index.find(n.id, &keys[i]); h != 0 {
			t.mu.index.touch(h)
		}
	}
}

// Contains is in tier.Tier. It does I/O, one lstat, only for keys of which
// Known says Unknown.
func (t *Tier) Contains(ctx context.Context, ns *block.Namespace, keys []block.Key, found []bool) error {
	if err := t.enter("probe"); err != nil {
		if t.lostRoot() == nil {
			return err
		}
		clear(found) // there is nothing, and a probe's failure would say no more
		return nil
	}
	defer t.leave()
	for i := range keys {
		t.mu.Lock()
		n, h := t.findLocked(ns.Fingerprint(), &keys[i])
		p := t.presenceLocked(n, h, &keys[i])
		t.mu.Unlock()
		if p == tier.Unknown {
			if err := ctx.Err(); err != nil {
				return t.cancelled("probe", keys[i], err)
			}
			var err error
			if p, err = t.adopt(n, keys[i], ns.BlockBytes(keys[i].Group())); err != nil {
				return t.fail("probe", keys[i], err)
			}
		}
		found[i] = p == tier.Present
	}
	return nil
}

// adopt looks for a block's file, which the index does not know yet.
func (t *Tier) adopt(n *namespace, key block.Key, length int) (tier.Presence, error) {
	mu := t.stripeOf(n, &key)
	mu.Lock()
	defer mu.Unlock()
	p, _, err := t.adoptLocked(n, key, length)
	return p, err
}

// adoptLocked is adopt under the key's stripe. It also gives the new entry's
// handle, or 0. With length 0 the block's length is not known.
func (t *Tier) adoptLocked(n *namespace, key block.Key, length int) (tier.Presence, finding, error) {
	t.lockAfterLookups()
	h := t.mu.index.find(n.id, &key)
	p := t.presenceLocked(n, h, &key)
	t.mu.Unlock()
	if h != 0 {
		return p, finding{}, nil
	}
	st, err := t.fs.Lstat(n.file(key))
	owner, ok := t.sized(st.Size, length)
	switch {
	case gone(err):
		t.missed(n, &key)
		return tier.Absent, finding{}, nil
	case err != nil:
		return tier.Unknown, finding{}, err
	case !st.Regular():
		return tier.Absent, finding{foreign: st.Dir()}, nil
	case key.Group() >= block.GroupsMax:
		return tier.Absent, finding{foreign: true}, nil
	case !ok:
		_ = t.setAsideLocked(n, key, fmt.Sprintf("file has %d bytes, a block of %d needs %d", st.Size, length, fileSize(length)), st.Ino)
		return tier.Absent, finding{}, nil
	}
	t.lockAfterLookups()
	defer t.mu.Unlock()
	if owner != t.place.number {
		if t.addLocked(n, &key, st.Bytes, flagForeign) == 0 {
			return tier.Absent, finding{}, nil
		}
		return tier.Present, finding{}, nil
	}
	if h = t.addLocked(n, &key, st.Bytes, flagOld); h == 0 {
		return tier.Absent, finding{foreign: true}, nil
	}
	t.mu.account.found(st.Bytes)
	return tier.Present, finding{handle: h, mtime: st.Mtime}, nil
}

// finding is what the scan wants to know of a file.
type finding struct {
	handle  uint32 // of the new entry
	mtime   int64
	foreign bool // the file is none of ours
}

// addLocked inserts a block and counts it for its namespace; its bytes, if they
// are this node's.
func (t *Tier) addLocked(n *namespace, key *block.Key, bytes int64, flags uint8) uint32 {
	x := &t.mu.index
	h := x.add(n.id, key, bytes, flags)
	switch {
	case h == 0:
		return 0
	case flags&flagForeign == 0:
		n.bytes += bytes
	case x.foreigns > foreignMax:
		old := x.foreign.back
		t.dropLocked(t.mu.byID[x.at(old).ns], old) // and found again when it is asked for
	}
	n.blocks++
	return h
}

// dropLocked forgets a block whose file is gone, or was never this node's.
func (t *Tier) dropLocked(n *namespace, h uint32) {
	foreign := t.mu.index.at(h).flags&flagForeign != 0
	bytes := t.mu.index.remove(h)
	n.blocks--
	if !foreign {
		n.bytes -= bytes
		t.mu.account.add(-bytes)
	}
}

// Delete is in tier.Tier. It goes on after a failure and returns the first.
func (t *Tier) Delete(ctx context.Context, ns *block.Namespace, keys []block.Key) error {
	if err := t.enter("delete"); err != nil {
		return err
	}
	defer t.leave()
	var first error
	for _, key := range keys {
		if err := ctx.Err(); err != nil {
			return t.cancelled("delete", key, err)
		}
		t.mu.Lock()
		n, h := t.findLocked(ns.Fingerprint(), &key)
		p := t.presenceLocked(n, h, &key)
		t.mu.Unlock()
		if n == nil || h == 0 && p == tier.Absent && !t.o.Shared {
			continue
		}
		if err := t.remove(n, key); err != nil && first == nil {
			first = t.fail("delete", key, err)
		}
	}
	return first
}

// remove removes a block's file and its entry, in any state.
func (t *Tier) remove(n *namespace, key block.Key) error {
	mu := t.stripeOf(n, &key)
	mu.Lock()
	defer mu.Unlock()
	var unknown int64 // bytes of a file that only the restart's bound counts
	t.mu.Lock()
	h := t.mu.index.find(n.id, &key)
	t.mu.Unlock()
	if h == 0 {
		st, err := t.fs.Lstat(n.file(key))
		if gone(err) || (err == nil && st.Dir()) {
			return nil
		}
		if err != nil {
			return err
		}
		if owner, _ := t.sized(st.Size, 0); owner == t.place.number {
			unknown = st.Bytes
		}
	}
	if err := t.fs.Remove(n.file(key)); err != nil && !gone(err) {
		return err
	}
	t.missed(n, &key)
	t.mu.Lock()
	defer t.mu.Unlock()
	if h != 0 {
		t.dropLocked(n, h)
	} else {
		t.mu.account.lost(unknown)
	}
	return nil
}

// gone says that there is no file of this name: nothing, or nothing that can
// be a block's file.
func gone(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.EISDIR)
}

func (t *Tier) stripeOf(n *namespace, key *block.Key) *stripe {
	return &t.stripe[key.Mix(uint64(n.id))%stripes]
}

// fail classifies an error of the file system.
func (t *Tier) fail(op string, key block.Key, err error) *tier.Error {
	var te *tier.Error
	if errors.As(err, &te) {
		return te
	}
	e := &tier.Error{Op: op, Tier: t.o.Name, Key: key, Class: tier.ClassPermanent, Cause: tier.CauseOther, Err: err, Hint: hintFor(err)}
	switch {
	case errIs(err, unix.ENOENT) && t.rootGone():
		why := fmt.Errorf("root %s was removed under the node: %w", t.o.Root, unix.ENOENT)
		t.lose(why)
		return t.unavailable(op, key, why)
	case errIs(err, unix.ENOSPC, unix.EDQUOT):
		e.Cause = tier.CauseNoSpace
	case errIs(err, unix.EACCES, unix.EPERM):
		e.Cause = tier.CausePermission
	case errIs(err, unix.EROFS):
		e.Cause = tier.CauseReadOnly
	case errIs(err, unix.EIO):
		e.Class, e.Cause = tier.ClassRetryable, tier.CauseIO
	case errIs(err, unix.EMFILE, unix.ENFILE):
		e.Class, e.Cause = tier.ClassRetryable, tier.CauseDescriptors
	case errIs(err, unix.EISDIR, unix.ENOTDIR, unix.ENXIO, unix.ELOOP, unix.ENODEV):
		// What such a call found is not what the tier makes: whose place it is
		// in fails, the tier works.
		e.Cause = tier.CauseForeign
	case errIs(err, unix.EAGAIN, unix.EBUSY, unix.ENOMEM, unix.ESTALE, unix.ETIMEDOUT, unix.ENOENT):
		e.Class = tier.ClassRetryable
	}
	return e
}

// rootGone says that the root itself was removed, not only files in it.
func (t *Tier) rootGone() bool {
	for _, name := range []string{t.place.lock, t.place.tmp} {
		if _, err := t.fs.Lstat(name); !gone(err) {
			return false
		}
	}
	return true
}

func errIs(err error, any ...unix.Errno) bool {
	for _, e := range any {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// hintFor is what an operator can do.
func hintFor(err error) string {
	switch {
	case errIs(err, unix.ENOSPC, unix.EDQUOT):
		return "free some space, or lower the tier's capacity"
	case errIs(err, unix.EACCES, unix.EPERM):
		return "check owner and mode of the files under root"
	case errIs(err, unix.EROFS):
		return "the file system is mounted read-only"
	case errIs(err, unix.EMFILE, unix.ENFILE):
		return "raise the limit on open files"
	case errIs(err, unix.EIO):
		return "check the disk"
	case errIs(err, unix.EISDIR, unix.ENOTDIR, unix.ENXIO, unix.ELOOP, unix.ENODEV):
		return "remove what others have put there"
	}
	return ""
}

func (t *Tier) cancelled(op string, key block.Key, err error) *tier.Error {
	e := &tier.Error{Op: op, Tier: t.o.Name, Key: key, Class: tier.ClassCancelled, Err: err}
	if errors.Is(err, context.DeadlineExceeded) {
		e.Cause = tier.CauseTimeout
	}
	return e
}
