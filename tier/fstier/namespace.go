package fstier

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/vfs"
	"github.com/terrace-kv/terrace/tier"
)

// namespaceBytesMax bounds what is read of a namespace.json.
const namespaceBytesMax = 1 << 20

// namespace is a directory of blocks. Fields below mu are guarded by the
// tier's mu, the others do not change.
type namespace struct {
	id  uint16
	fp  block.Fingerprint
	dir string // 64 hex digits

	lasting [256]atomic.Bool // the shard's own name survives a power cut

	// mu
	spec   *block.Namespace // what namespace.json says, or nil
	bad    error            // why it says nothing that can be used
	unread bool             // the file system failed to tell; it is asked again
	ready  bool             // stored, and compared with an engine's namespace
	name   string           // what the operator calls it, or ""
	bytes  int64
	blocks int64

	specBytes, nameBytes int64 // what the two files are charged
}

// file is the name of a block's file.
func (n *namespace) file(key block.Key) string {
	name := make([]byte, 0, len(n.dir)+4+2*block.KeySize)
	name = append(append(name, n.dir...), '/')
	name = append(hex.AppendEncode(name, key[:1]), '/')
	return string(hex.AppendEncode(name, key[:]))
}

// shard is the directory of a block's file.
func (n *namespace) shard(first byte) string { return n.dir + "/" + hex.EncodeToString([]byte{first}) }

// parseFingerprint reads a namespace directory's name.
func parseFingerprint(name string) (fp block.Fingerprint, ok bool) {
	if len(name) != 2*len(fp) || strings.ToLower(name) != name {
		return fp, false
	}
	_, err := hex.Decode(fp[:], []byte(name))
	return fp, err == nil
}

// loadNamespaces finds the namespaces of a root, and says whether there is
// nothing at all that would need a scan.
func (t *Tier) loadNamespaces() (empty bool, err error) {
	empty = true
	var dirs []string
	inside := func(name string) error {
		return t.fs.ReadDir(name, func(base string) error {
			if strings.HasSuffix(base, probeSuffix) && t.fs.Remove(name+"/"+base) == nil {
				return nil // a dead run's, which no bound counts
			}
			empty = false
			return nil
		})
	}
	err = t.fs.ReadDir(".", func(name string) error {
		switch name {
		case nameLock, nameUsage:
			return nil
		case nameNodes:
			if t.o.Shared {
				return inside(t.place.tmp)
			}
		case nameTmp, nameQuarantine:
			return inside(name)
		}
		empty = false
		if _, ok := parseFingerprint(name); ok {
			dirs = append(dirs, name)
		}
		return nil
	})
	if err != nil {
		return false, err
	}
	slices.Sort(dirs)
	for _, dir := range dirs {
		st, err := t.fs.Lstat(dir)
		if err != nil && !gone(err) {
			return false, err // or its blocks would be foreign for the whole run
		}
		if err != nil || !st.Dir() {
			continue // the scan will count it as foreign
		}
		fp, _ := parseFingerprint(dir)
		t.mu.Lock()
		n, err := t.newNamespaceLocked(fp)
		t.mu.Unlock()
		if err != nil {
			return false, err
		}
		_ = t.readSpec(n) // asked again before it is used
		b, charged, err := t.readSmall(dir+"/"+nameName, tier.NameBytesMax)
		charged = t.charged(charged)
		t.mu.Lock()
		n.nameBytes = charged
		t.mu.account.found(charged)
		if other := t.namedLocked(string(b)); err == nil && other != nil {
			err = fmt.Errorf("%q is the name of %s already", b, t.path(other.dir))
		}
		if err == nil {
			n.name = string(b)
		}
		t.mu.Unlock()
		if err != nil && !errors.Is(err, unix.ENOENT) {
			t.log.Warn("the name of a namespace cannot be used: remove the file, or write the name into it", "path", t.path(dir, nameName), "error", err)
		}
	}
	return empty, nil
}

// readSpec learns what is stored of a namespace. It fails if the file system
// does, which is no word on the description: that may pass.
func (t *Tier) readSpec(n *namespace) error {
	b, charged, err := t.readSmall(n.dir+"/"+nameNamespace, namespaceBytesMax)
	charged = t.charged(charged)
	var spec *block.Namespace
	if err == nil {
		spec, err = block.ParseNamespace(b)
	}
	var errno unix.Errno
	unread := errors.As(err, &errno) && !gone(err) && !errIs(err, unix.ELOOP, unix.ENXIO)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.account.found(charged - n.specBytes)
	n.spec, n.specBytes, n.bad, n.unread = spec, charged, nil, unread
	switch {
	case unread:
		t.log.Warn("the description of a namespace cannot be read", "path", t.path(n.dir, nameNamespace), "error", err)
		return err
	case err != nil && !errors.Is(err, unix.ENOENT):
		n.bad = err
		t.log.Warn("a namespace cannot be used until its description is mended and the node restarted; others are served", "path", t.path(n.dir, nameNamespace), "error", err)
	}
	return nil
}

// namedLocked is the namespace that has a name, or nil.
func (t *Tier) namedLocked(name string) *namespace {
	for _, n := range t.mu.byID {
		if name != "" && n.name == name {
			return n
		}
	}
	return nil
}

func (t *Tier) newNamespaceLocked(fp block.Fingerprint) (*namespace, error) {
	if len(t.mu.byID) > math.MaxUint16 {
		return nil, fmt.Errorf("root holds %d namespaces, and no more are possible: remove the directories of those that are no longer used", len(t.mu.byID))
	}
	n := &namespace{id: uint16(len(t.mu.byID)), fp: fp, dir: fp.String()}
	t.mu.byID = append(t.mu.byID, n)
	t.mu.namespaces[fp] = n
	return n, nil
}

// readSmall reads a file of at most so many bytes, and says how many bytes it
// is charged.
func (t *Tier) readSmall(name string, most int64) (b []byte, charged int64, err error) {
	f, err := t.fs.Open(name, unix.O_RDONLY|unix.O_NONBLOCK, 0)
	var st vfs.Info
	if err == nil {
		defer func() { _ = f.Close() }()
		st, err = f.Stat()
	}
	if err != nil {
		if gone(err) {
			return nil, 0, err
		}
		if st, serr := t.fs.Lstat(name); serr == nil && st.Regular() {
			charged = st.Bytes
		}
		return nil, charged, err
	}
	if !st.Regular() {
		return nil, 0, errors.New("not a regular file")
	}
	if st.Size > most {
		return nil, st.Bytes, fmt.Errorf("%d bytes, at most %d are read", st.Size, most)
	}
	b = make([]byte, st.Size)
	m, err := vfs.ReadFull(f, [][]byte{b}, 0)
	if err == nil && m < len(b) {
		err = io.ErrUnexpectedEOF
	}
	return b, st.Bytes, err
}

func (t *Tier) path(names ...string) string {
	return strings.Join(append([]string{t.o.Root}, names...), "/")
}

// OpenNamespace is in tier.NamespaceOpener. It compares the namespace with the
// stored one, if there is one, and makes nothing.
func (t *Tier) OpenNamespace(ctx context.Context, ns *block.Namespace) error {
	if err := t.enter(opOpenNamespace); err != nil {
		if t.lostRoot() != nil {
			return nil // there is nothing to compare with; the first write does it
		}
		return err
	}
	defer t.leave()
	if err := ctx.Err(); err != nil {
		return t.cancelled(opOpenNamespace, block.Key{}, err)
	}
	t.mu.Lock()
	n := t.spaceLocked(ns.Fingerprint())
	read := n != nil && n.spec == nil && t.o.Shared
	t.mu.Unlock()
	if n == nil {
		return nil
	}
	if read {
		_ = t.readSpec(n) // others may have stored it since; asked again before it is used
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.compareLocked(n, ns)
}

const opOpenNamespace = "open namespace"

// compareLocked says what is wrong with what is stored of a namespace. That is
// no fault of the tier: others are served.
func (t *Tier) compareLocked(n *namespace, ns *block.Namespace) error {
	where := t.path(n.dir, nameNamespace)
	e := &tier.Error{Op: opOpenNamespace, Tier: t.o.Name, Class: tier.ClassPermanent, Cause: tier.CauseNamespace}
	switch {
	case n.bad != nil:
		e.Err = fmt.Errorf("%s is not a namespace: %w", where, n.bad)
		e.Hint = "restart the node after moving that directory out of root"
	case n.spec != nil && n.spec.Fingerprint() != ns.Fingerprint():
		e.Err = fmt.Errorf("%w: %s differs in %s", tier.ErrNamespaceMismatch, where, strings.Join(block.Diff(n.spec.Spec(), ns.Spec()), ", "))
		e.Hint = "someone changed the file; restart the node after moving that directory out of root"
	default:
		return nil
	}
	return e
}

// storedNamespace is a namespace with its directory and description, which are
// made if they are missing: so the description is there before any block is.
func (t *Tier) storedNamespace(ctx context.Context, ns *block.Namespace) (*namespace, error) {
	t.mu.Lock()
	n := t.mu.namespaces[ns.Fingerprint()]
	ready := n != nil && n.ready
	t.mu.Unlock()
	if ready {
		return n, nil
	}
	t.namespaceMu.Lock()
	defer t.namespaceMu.Unlock()
	return t.storeNamespaceLocked(ctx, ns)
}

// storeNamespaceLocked is storedNamespace under namespaceMu.
func (t *Tier) storeNamespaceLocked(ctx context.Context, ns *block.Namespace) (*namespace, error) {
	if err := ctx.Err(); err != nil {
		return nil, t.cancelled(opOpenNamespace, block.Key{}, err)
	}
	t.mu.Lock()
	n, err := t.mu.namespaces[ns.Fingerprint()], error(nil)
	if n == nil {
		n, err = t.newNamespaceLocked(ns.Fingerprint())
	} else if n.unread || t.o.Shared && n.spec == nil {
		t.mu.Unlock()
		err = t.readSpec(n)
		t.mu.Lock()
	}
	if err == nil {
		err = t.compareLocked(n, ns)
	}
	missing := n != nil && n.spec == nil
	t.mu.Unlock()
	if err == nil && missing {
		if err = t.makeDir(n.dir); err == nil {
			err = t.writeSmall(ctx, opOpenNamespace, n.dir+"/"+nameNamespace, ns.JSON(), func(bytes int64) {
				n.specBytes = bytes
			})
		}
	}
	if err != nil {
		e := t.fail(opOpenNamespace, block.Key{}, err)
		if e.Cause == tier.CauseForeign {
			e.Cause = tier.CauseNamespace
		}
		return nil, e
	}
	t.mu.Lock()
	n.spec, n.ready = ns, true
	t.mu.Unlock()
	return n, nil
}

// remake stores a namespace again whose directory somebody removed under us.
func (t *Tier) remake(ctx context.Context, ns *block.Namespace, n *namespace) error {
	t.namespaceMu.Lock()
	defer t.namespaceMu.Unlock()
	if t.rootGone() {
		return t.fail("write", block.Key{}, unix.ENOENT) // and the keeper sees to it
	}
	if _, err := t.fs.Lstat(n.dir); err == nil || !gone(err) {
		return nil // another write was faster
	}
	t.log.Warn("the directory of a namespace was removed under the node and is made again", "path", t.path(n.dir))
	t.mu.Lock()
	name := n.name
	t.mu.account.add(-n.specBytes - n.nameBytes)
	n.spec, n.ready, n.name, n.specBytes, n.nameBytes = nil, false, "", 0, 0
	t.mu.Unlock()
	for i := range n.lasting {
		n.lasting[i].Store(false)
	}
	if _, err := t.storeNamespaceLocked(ctx, ns); err != nil {
		return err
	}
	if name == "" {
		return nil
	}
	return t.keepNameLocked(ctx, n, name)
}

// Names is in tier.NameKeeper.
func (t *Tier) Names(context.Context) (map[string]*block.Namespace, error) {
	if err := t.enter("list names"); err != nil {
		return nil, err
	}
	defer t.leave()
	t.mu.Lock()
	defer t.mu.Unlock()
	out := map[string]*block.Namespace{}
	for _, n := range t.mu.byID {
		if n.name != "" && n.spec != nil && n.spec.Fingerprint() == n.fp {
			out[n.name] = n.spec
		}
	}
	return out, nil
}

// KeepName is in tier.NameKeeper. The name is the content of a file beside the
// namespace's description, which is made if it is not there.
func (t *Tier) KeepName(ctx context.Context, name string, ns *block.Namespace) error {
	if err := t.enter(opKeepName); err != nil {
		return err
	}
	defer t.leave()
	if len(name) == 0 || len(name) > tier.NameBytesMax {
		return t.fail(opKeepName, block.Key{}, fmt.Errorf("the name has %d bytes, want 1 to %d", len(name), tier.NameBytesMax))
	}
	t.namespaceMu.Lock()
	defer t.namespaceMu.Unlock()
	t.mu.Lock()
	other := t.namedLocked(name)
	differ := ""
	if other != nil && other.spec != nil {
		differ = ", which differs in " + strings.Join(block.Diff(other.spec.Spec(), ns.Spec()), ", ")
	}
	t.mu.Unlock()
	if other != nil && other.fp == ns.Fingerprint() {
		return nil
	}
	if other != nil {
		return &tier.Error{Op: opKeepName, Tier: t.o.Name, Class: tier.ClassPermanent, Cause: tier.CauseNamespace,
			Err:  fmt.Errorf("%w: the name %q is kept for namespace %s%s", tier.ErrNamespaceMismatch, name, other.fp, differ),
			Hint: fmt.Sprintf("mend the engine's settings or give it another name; to give the name free, remove %s and restart the node", t.path(other.dir, nameName))}
	}
	n, err := t.storeNamespaceLocked(ctx, ns)
	if err != nil {
		return err
	}
	return t.keepNameLocked(ctx, n, name)
}

const opKeepName = "keep name"

// keepNameLocked stores a namespace's name, under namespaceMu.
func (t *Tier) keepNameLocked(ctx context.Context, n *namespace, name string) error {
	err := t.writeSmall(ctx, opKeepName, n.dir+"/"+nameName, []byte(name), func(bytes int64) {
		t.mu.account.add(-n.nameBytes) // of the file that was replaced
		n.name, n.nameBytes = name, bytes
	})
	if err == nil { // a name is to survive a power cut, whatever blocks are to
		err = errors.Join(syncDir(t.fs, n.dir), syncDir(t.fs, "."))
	}
	if err != nil {
		return t.fail(opKeepName, block.Key{}, err)
	}
	return nil
}

// writeSmall publishes a small file, in place of any other of that name. done
// learns under mu what it is charged.
func (t *Tier) writeSmall(ctx context.Context, op, name string, content []byte, done func(bytes int64)) error {
	return t.inSpace(func(full error) error { return t.tryWriteSmall(ctx, op, name, content, done, full) })
}

func (t *Tier) tryWriteSmall(ctx context.Context, op, name string, content []byte, done func(bytes int64), full error) error {
	r, err := t.reserve(ctx, op, block.Key{}, int64(len(content)), nil, nil, full)
	if err != nil {
		return err
	}
	defer r.settle(0)
	tmp := t.tmpFile()
	f, err := t.openTmp(tmp, 0)
	if err != nil {
		_ = t.fs.Remove(tmp) // it may have been made all the same
		return err
	}
	var st vfs.Info
	err = vfs.WriteAll(f, [][]byte{bytes.Clone(content)}, 0)
	if err == nil {
		err = f.Sync() // also makes the number of blocks final
	}
	if err == nil {
		st, err = f.Stat()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		if err = t.fs.Rename(tmp, name); err != nil {
			if at, lerr := t.fs.Lstat(name); lerr == nil && at.Dev == st.Dev && at.Ino == st.Ino {
				err = nil // done all the same
			}
		}
	}
	if err != nil {
		t.removeStray(tmp, r, r.bytes)
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	r.settleLocked(t.charged(st.Bytes))
	done(t.charged(st.Bytes))
	return nil
}

// tmpFile is a name in tmp that no other file has.
func (t *Tier) tmpFile() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.tmpSeq++
	return fmt.Sprintf("%s%d", t.tmpName, t.mu.tmpSeq)
}

// openTmp makes a file in tmp, and tmp if somebody removed it.
func (t *Tier) openTmp(name string, flag int) (vfs.File, error) {
	flag |= unix.O_WRONLY | unix.O_CREAT | unix.O_EXCL
	f, err := t.fs.Open(name, flag, 0o600)
	if errors.Is(err, unix.ENOENT) && !t.rootGone() && t.makeDir(t.place.tmp) == nil {
		f, err = t.fs.Open(name, flag, 0o600)
	}
	return f, err
}

// StoredNamespace is a namespace that the root holds.
type StoredNamespace struct {
	Fingerprint block.Fingerprint
	Namespace   *block.Namespace // nil if its description is missing or bad
	Blocks      int64            // as far as the scan has come
	Bytes       int64            // of those
}

// Namespaces lists what the root holds, in no order.
func (t *Tier) Namespaces() []StoredNamespace {
	t.mu.Lock()
	defer t.mu.Unlock()
	var out []StoredNamespace
	for _, n := range t.mu.byID {
		s := StoredNamespace{Fingerprint: n.fp, Namespace: n.spec, Blocks: n.blocks, Bytes: n.bytes}
		if n.spec != nil && n.spec.Fingerprint() != n.fp {
			s.Namespace = nil
		}
		out = append(out, s)
	}
	return out
}
