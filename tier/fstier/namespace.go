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
	ready  bool             // compared with an engine's namespace, or written
	bytes  int64
	blocks int64
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
	err = t.fs.ReadDir(".", func(name string) error {
		switch name {
		case nameLock, nameUsage:
			return nil
		case nameTmp, nameQuarantine:
			return t.fs.ReadDir(name, func(base string) error {
				if strings.HasSuffix(base, probeSuffix) && t.fs.Remove(name+"/"+base) == nil {
					return nil // a dead run's, which no bound counts
				}
				empty = false
				return nil
			})
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
		if st, err := t.fs.Lstat(dir); err != nil || !st.Dir() {
			continue // the scan will count it as foreign
		}
		fp, _ := parseFingerprint(dir)
		t.mu.Lock()
		n, err := t.newNamespaceLocked(fp)
		t.mu.Unlock()
		if err != nil {
			return false, err
		}
		spec, size, err := t.readSpec(n)
		if err != nil && !errors.Is(err, unix.ENOENT) {
			n.bad = err
			t.log.Warn("a namespace cannot be used until its description is mended", "path", t.path(dir, nameNamespace), "error", err)
		}
		n.spec = spec
		t.mu.account.found(size)
	}
	return empty, nil
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

// readSpec reads a namespace.json, and says how many bytes it is charged.
func (t *Tier) readSpec(n *namespace) (*block.Namespace, int64, error) {
	f, err := t.fs.Open(n.dir+"/"+nameNamespace, unix.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, 0, err
	}
	defer func() { _ = f.Close() }()
	st, err := f.Stat()
	if err != nil {
		return nil, 0, err
	}
	if !st.Regular() {
		return nil, 0, errors.New("not a regular file")
	}
	if st.Size > namespaceBytesMax {
		return nil, st.Bytes, fmt.Errorf("%d bytes, at most %d are read", st.Size, namespaceBytesMax)
	}
	b := make([]byte, st.Size)
	m, err := vfs.ReadFull(f, [][]byte{b}, 0)
	if err != nil {
		return nil, st.Bytes, err
	}
	if m < len(b) {
		return nil, st.Bytes, io.ErrUnexpectedEOF
	}
	spec, err := block.ParseNamespace(b)
	if err != nil {
		return nil, st.Bytes, err
	}
	return spec, st.Bytes, nil
}

func (t *Tier) path(names ...string) string {
	return strings.Join(append([]string{t.o.Root}, names...), "/")
}

// OpenNamespace is in tier.NamespaceOpener. It compares the namespace with the
// stored one, or stores it.
func (t *Tier) OpenNamespace(ctx context.Context, ns *block.Namespace) error {
	if err := t.enter(); err != nil {
		return err
	}
	defer t.leave()
	_, err := t.openNamespace(ctx, ns)
	return err
}

func (t *Tier) openNamespace(ctx context.Context, ns *block.Namespace) (*namespace, error) {
	t.mu.Lock()
	n := t.mu.namespaces[ns.Fingerprint()]
	ready := n != nil && n.ready
	t.mu.Unlock()
	if ready {
		return n, nil
	}
	const op = "open namespace"
	t.namespaceMu.Lock()
	defer t.namespaceMu.Unlock()
	if err := ctx.Err(); err != nil {
		return nil, t.cancelled(op, block.Key{}, err)
	}
	t.mu.Lock()
	n, err := t.mu.namespaces[ns.Fingerprint()], error(nil)
	if n == nil {
		n, err = t.newNamespaceLocked(ns.Fingerprint())
	}
	var spec *block.Namespace
	var bad error
	if n != nil {
		spec, bad = n.spec, n.bad
		ready = n.ready
	}
	t.mu.Unlock()
	if err != nil {
		return nil, t.fail(op, block.Key{}, err)
	}
	if ready {
		return n, nil
	}
	where := t.path(n.dir, nameNamespace)
	if bad != nil {
		return nil, &tier.Error{Op: op, Tier: t.o.Name, Class: tier.ClassPermanent,
			Err:  fmt.Errorf("%s is not a namespace: %w", where, bad),
			Hint: "restart the node after moving that directory out of root"}
	}
	if spec != nil && spec.Fingerprint() != ns.Fingerprint() {
		return nil, &tier.Error{Op: op, Tier: t.o.Name, Class: tier.ClassPermanent,
			Err: fmt.Errorf("%w: %s differs in %s", tier.ErrNamespaceMismatch, where,
				strings.Join(block.Diff(spec.Spec(), ns.Spec()), ", ")),
			Hint: "someone changed the file; restart the node after moving that directory out of root"}
	}
	if spec == nil { // so the description is there before any block is
		err := t.makeDir(n.dir)
		if err == nil {
			err = t.writeSpec(ctx, n, ns.JSON())
		}
		if err != nil {
			return nil, t.fail(op, block.Key{}, err)
		}
	}
	t.mu.Lock()
	n.spec, n.ready = ns, true
	t.mu.Unlock()
	return n, nil
}

// writeSpec publishes a namespace.json.
func (t *Tier) writeSpec(ctx context.Context, n *namespace, json []byte) error {
	r, err := t.reserve(ctx, "open namespace", block.Key{}, int64(len(json)), nil, nil)
	if err != nil {
		return err
	}
	used := int64(0)
	defer func() { r.settle(used) }()
	tmp := t.tmpFile()
	f, err := t.fs.Open(tmp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o600)
	if err != nil {
		_ = t.fs.Remove(tmp) // it may have been made all the same
		return err
	}
	var st vfs.Info
	err = vfs.WriteAll(f, [][]byte{bytes.Clone(json)}, 0)
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
		err = t.fs.Rename(tmp, n.dir+"/"+nameNamespace)
	}
	if err != nil {
		_ = t.fs.Remove(tmp)
		t.noSpace(err)
		return err
	}
	used = st.Bytes
	return nil
}

// tmpFile is a name in tmp that no other file has.
func (t *Tier) tmpFile() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.tmpSeq++
	return fmt.Sprintf("%s%d", t.tmpName, t.mu.tmpSeq)
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
