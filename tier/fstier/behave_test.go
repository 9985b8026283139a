package fstier

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/minio/crc64nvme"
	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/vfs"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/tiertest"
)

// crash ends a tier as the death of its process would: nothing is written, all
// descriptors close.
func (t *Tier) crash() {
	t.mu.Lock()
	t.mu.closed = true
	t.mu.Unlock()
	t.stop()
	<-t.over
	_ = t.usage.file.Close()
	_ = t.lockFile.Close()
	_ = t.fs.Close()
}

// path of a block's file.
func (t *Tier) blockPath(ns *block.Namespace, key block.Key) string {
	return filepath.Join(t.o.Root, (&namespace{dir: ns.Fingerprint().String()}).file(key))
}

func TestOpenErrors(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	link := filepath.Join(dir, "link")
	dangling := filepath.Join(dir, "dangling")
	target := filepath.Join(dir, "target")
	for _, err := range []error{os.WriteFile(file, nil, 0o600), os.Mkdir(target, 0o700), os.Symlink(target, link), os.Symlink(dir+"/none", dangling)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		name string
		o    Options
		want []string
	}{
		{"no root", Options{}, []string{"root is empty"}},
		{"all at once", Options{Capacity: 5, Sync: "often", Workers: -1}, []string{"root", "capacity is 5", `sync is "often"`, "workers is -1"}},
		{"regular file", Options{Root: file}, []string{file, "not a directory"}},
		{"below a regular file", Options{Root: file + "/x"}, []string{file, "not a directory"}},
		{"symbolic link", Options{Root: link}, []string{link, "symbolic link", target}},
		{"link with a slash", Options{Root: link + "/"}, []string{link, "symbolic link"}},
		{"dangling link", Options{Root: dangling}, []string{dangling, "symbolic link"}},
	} {
		tr, err := Open(t.Context(), tt.o)
		if err == nil {
			closeTier(t, tr)
			t.Errorf("%s: opened", tt.name)
			continue
		}
		for _, w := range tt.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: error %q does not say %q", tt.name, err, w)
			}
		}
	}
	for _, tt := range []struct {
		errno unix.Errno
		hint  string
	}{{unix.EACCES, "owner and mode"}, {unix.EROFS, "read-only"}, {unix.EMFILE, "limit on open files"}} {
		for _, at := range []string{nameLock, nameUsage, nameTmp} {
			root := t.TempDir()
			o := opts(t, root, func(c vfs.Call) vfs.Fault {
				if c.Name == at && (c.Op == vfs.OpOpen || c.Op == vfs.OpMkdir) {
					return vfs.Fault{Err: tt.errno}
				}
				return vfs.Fault{}
			})
			_, err := Open(t.Context(), o)
			if !errors.Is(err, tt.errno) || !strings.Contains(err.Error(), root) || !strings.Contains(err.Error(), tt.hint) {
				t.Errorf("%v at %s: %v", tt.errno, at, err)
			}
		}
	}
}

func TestRootIsOwned(t *testing.T) {
	root := t.TempDir()
	a := open(t, opts(t, root, nil))
	_, err := Open(t.Context(), opts(t, root, nil))
	want := fmt.Sprintf("pid %d", os.Getpid())
	if err == nil || !strings.Contains(err.Error(), root) || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "stop that one") {
		t.Errorf("second node: %v; want root, %q and what to do", err, want)
	}
	closeTier(t, a)
	// Between the opening of the lock file and its locking, others have put a
	// new one in its place: only a lock on that one keeps others out.
	var swapped sync.Once
	b := open(t, opts(t, root, func(c vfs.Call) vfs.Fault {
		if c.Op == vfs.OpLock {
			swapped.Do(func() {
				if err := errors.Join(os.Remove(root+"/"+nameLock), os.WriteFile(root+"/"+nameLock, nil, 0o600)); err != nil {
					t.Error(err)
				}
			})
		}
		return vfs.Fault{}
	}))
	if c, err := Open(t.Context(), opts(t, root, nil)); err == nil {
		closeTier(t, c)
		t.Error("two nodes have the root")
	}
	closeTier(t, b)
	for name, mode := range map[string]os.FileMode{nameLock: 0o600, nameUsage: 0o600, nameTmp: 0o700 | os.ModeDir, nameQuarantine: 0o700 | os.ModeDir} {
		if st, err := os.Lstat(filepath.Join(root, name)); err != nil || st.Mode() != mode {
			t.Errorf("%s: %v, %v; want mode %v", name, st, err, mode)
		}
	}
	sub := filepath.Join(root, "a", "b")
	openClosing(t, opts(t, sub, nil))
	if st, err := os.Stat(sub); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("made root has mode %v, %v", st.Mode(), err)
	}
}

func TestNamespaceStored(t *testing.T) {
	root := t.TempDir()
	ns, other := tiertest.Namespace(t, "a"), tiertest.Namespace(t, "b")
	tr := open(t, opts(t, root, nil))
	write(t, tr, ns, blocks(t, ns, 0, 3, 0)) // opens it
	closeTier(t, tr)
	path := filepath.Join(root, ns.Fingerprint().String(), nameNamespace)
	if b, err := os.ReadFile(path); err != nil || !bytes.Equal(b, ns.JSON()) {
		t.Errorf("stored namespace: %q, %v", b, err)
	}
	if st, err := os.Stat(path); err != nil || st.Mode() != 0o600 {
		t.Errorf("mode of %s: %v", path, st.Mode())
	}
	reopened := func(content []byte) (*Tier, error) {
		t.Helper()
		if content == nil {
			_ = os.Remove(path)
		} else if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		tr := open(t, quiet(opts(t, root, nil)))
		<-tr.ScanDone()
		err := tr.OpenNamespace(t.Context(), ns)
		wantExact(t, tr)
		closeTier(t, tr)
		return tr, err
	}
	tr, err := reopened(ns.JSON())
	if got := tr.Namespaces(); err != nil || len(got) != 1 || got[0].Fingerprint != ns.Fingerprint() || got[0].Namespace == nil || got[0].Blocks != 3 {
		t.Errorf("reopened: %+v, %v", got, err)
	}
	_, err = reopened(other.JSON())
	if !errors.Is(err, tier.ErrNamespaceMismatch) || !strings.Contains(err.Error(), "model") || !strings.Contains(err.Error(), path) {
		t.Errorf("another namespace's description: %v; want a mismatch that names model", err)
	}
	for _, junk := range []string{"", "{", "[]", `{"model":1}`, `{"colour":"red"}`, "\x00\xff"} {
		tr, err = reopened([]byte(junk))
		if err == nil || errors.Is(err, tier.ErrNamespaceMismatch) || !strings.Contains(err.Error(), path) {
			t.Errorf("junk %q: %v; want an error with the path", junk, err)
		}
		if got := tr.Namespaces(); len(got) != 1 || got[0].Namespace != nil {
			t.Errorf("junk %q is listed as %+v", junk, got)
		}
	}
	if _, err = reopened(nil); err != nil {
		t.Errorf("a missing description is not written anew: %v", err)
	}
	tr = openClosing(t, opts(t, root, nil))
	readable(t, tr, ns, blocks(t, ns, 0, 3, 0))
}

func FuzzNamespaceFile(f *testing.F) {
	f.Add([]byte("{}"))
	f.Add([]byte(`{"model":"m","dtype":"d","layout":"l","groups":[{"kind":"full","tokens_per_block":1,"block_bytes":1}],"hash_algorithm":"h","hash_length":32}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		root := t.TempDir()
		ns := tiertest.Namespace(t, "a")
		dir := filepath.Join(root, ns.Fingerprint().String())
		if err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(filepath.Join(dir, nameNamespace), b, 0o600)); err != nil {
			t.Fatal(err)
		}
		tr := openClosing(t, quiet(opts(t, root, nil)))
		if err := tr.OpenNamespace(t.Context(), ns); err == nil {
			if got, perr := block.ParseNamespace(b); perr != nil || got.Fingerprint() != ns.Fingerprint() {
				t.Errorf("%q passed as the namespace", b)
			}
		}
		wantExact(t, tr)
	})
}

// What others do to a block's file costs that block and nothing else.
func TestTampering(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	rewrite := func(path string, change func(b []byte) []byte) error {
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(path, change(b), 0o600)
	}
	for _, tt := range []struct {
		name    string
		do      func(path, otherPath string) error
		class   tier.Class
		cause   tier.Cause
		kept    bool // it still reads
		aside   int64
		inexact bool // bytes that others made are not counted before the next scan
	}{
		{name: "removed", do: func(p, _ string) error { return os.Remove(p) }, class: tier.ClassNotFound},
		{name: "shard removed", do: func(p, _ string) error { return os.RemoveAll(filepath.Dir(p)) }, class: tier.ClassNotFound},
		{name: "truncated", do: func(p, _ string) error { return os.Truncate(p, 8192) }, class: tier.ClassCorrupt, cause: tier.CauseShort, aside: 1},
		{name: "cut in the header", do: func(p, _ string) error { return os.Truncate(p, 100) }, class: tier.ClassCorrupt, cause: tier.CauseShort, aside: 1},
		{name: "empty", do: func(p, _ string) error { return os.Truncate(p, 0) }, class: tier.ClassCorrupt, cause: tier.CauseShort, aside: 1},
		{name: "header flipped", do: func(p, _ string) error {
			return rewrite(p, func(b []byte) []byte { b[70] ^= 1; return b })
		}, class: tier.ClassCorrupt, cause: tier.CauseHeader, aside: 1},
		{name: "not ours", do: func(p, _ string) error {
			return rewrite(p, func(b []byte) []byte { return bytes.Repeat([]byte("x"), len(b)) })
		}, class: tier.ClassCorrupt, cause: tier.CauseHeader, aside: 1},
		{name: "another block's", do: func(p, o string) error {
			return errors.Join(os.Remove(p), os.Link(o, p))
		}, class: tier.ClassCorrupt, cause: tier.CauseHeader, aside: 1, inexact: true},
		{name: "newer version", do: func(p, _ string) error {
			return rewrite(p, func(b []byte) []byte {
				b[9] = 2
				binary.BigEndian.PutUint64(b[headerSize-8:], crc64nvme.Checksum(b[:headerSize-8]))
				return b
			})
		}, class: tier.ClassPermanent, cause: tier.CauseForeign},
		{name: "directory", do: func(p, _ string) error { return errors.Join(os.Remove(p), os.Mkdir(p, 0o700)) }, class: tier.ClassCorrupt, cause: tier.CauseForeign, aside: 1},
		{name: "symbolic link", do: func(p, o string) error { return errors.Join(os.Remove(p), os.Symlink(o, p)) }, class: tier.ClassCorrupt, cause: tier.CauseForeign, aside: 1},
		{name: "pipe", do: func(p, _ string) error { return errors.Join(os.Remove(p), unix.Mkfifo(p, 0o600)) }, class: tier.ClassCorrupt, cause: tier.CauseForeign, aside: 1},
		{name: "longer", do: func(p, _ string) error { return os.Truncate(p, 1<<20) }, kept: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			tr := openClosing(t, quiet(opts(t, t.TempDir(), nil)))
			items := blocks(t, ns, 0, 4, 0)
			write(t, tr, ns, items)
			key := items[1].Key
			if err := tt.do(tr.blockPath(ns, key), tr.blockPath(ns, items[2].Key)); err != nil {
				t.Fatal(err)
			}
			got := blocks(t, ns, 0, 4, 0)
			tr.Read(t.Context(), ns, got)
			if tt.kept {
				readable(t, tr, ns, items)
				return
			}
			if c := tier.ClassOf(got[1].Err); c != tt.class || (tt.cause != 0 && tier.CauseOf(got[1].Err) != tt.cause) {
				t.Errorf("read: %v is %v, %v; want %v, %v", got[1].Err, c, tier.CauseOf(got[1].Err), tt.class, tt.cause)
			}
			got[1] = got[3] // the others are unharmed
			for i := range got {
				if err := tiertest.Check(ns, &got[i]); err != nil {
					t.Errorf("neighbour %d: %v", i, err)
				}
			}
			if s := tr.Stats(); s.SetAside != tt.aside {
				t.Errorf("%d copies set aside, want %d", s.SetAside, tt.aside)
			}
			if p := known(tr, ns, key); p != tier.Absent {
				t.Errorf("afterwards Known says %v", p)
			}
			tr.Read(t.Context(), ns, got[1:2]) // some other key
			again := blocks(t, ns, 1, 1, 0)
			tr.Read(t.Context(), ns, again)
			if tier.ClassOf(again[0].Err) != tier.ClassNotFound {
				t.Errorf("second read: %v, want not found", again[0].Err)
			}
			if !tt.inexact {
				wantExact(t, tr)
			}
			tr.Write(t.Context(), ns, again)
			if again[0].Err != nil {
				t.Errorf("write anew: %v", again[0].Err)
			}
			readable(t, tr, ns, items)
			if !tt.inexact {
				wantExact(t, tr)
			}
		})
	}
}

// A flipped byte of the block is the caller's to find, who then sets it aside.
func TestFlippedBlock(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	tr := openClosing(t, opts(t, t.TempDir(), nil))
	items := blocks(t, ns, 0, 2, 0)
	write(t, tr, ns, items)
	path := tr.blockPath(ns, items[0].Key)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	b[headerSize+5000] ^= 1
	b[len(b)-1] = 7 // and the padding
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	tr.Read(t.Context(), ns, items)
	if items[0].Err != nil || crc64nvme.Checksum(items[0].Buf) == items[0].Sum {
		t.Errorf("read of a flipped block: %v, and the sum agrees", items[0].Err)
	}
	if pad := items[0].Buf[len(items[0].Buf):cap(items[0].Buf)]; !bytes.Equal(pad, make([]byte, len(pad))) {
		t.Error("padding is not zero after a read")
	}
	if err := tr.SetAside(t.Context(), ns, items[0].Key, "test"); err != nil {
		t.Error(err)
	}
	if known(tr, ns, items[0].Key) != tier.Absent || tr.Stats().SetAside != 1 {
		t.Error("the copy is not set aside")
	}
	if files, _, _ := tr.Quarantine(); files != 1 {
		t.Errorf("%d files in quarantine", files)
	}
	kept, _ := filepath.Glob(tr.o.Root + "/quarantine/*" + items[0].Key.String())
	if len(kept) != 1 {
		t.Errorf("kept for inspection: %v", kept)
	} else if c, err := os.ReadFile(kept[0]); err != nil || !bytes.Equal(b, c) {
		t.Errorf("the copy in quarantine is another: %v", err)
	}
	wantExact(t, tr)
}

func TestQuarantineBounds(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	root := t.TempDir()
	tr := open(t, quiet(opts(t, root, nil)))
	aside := func(first, n int) {
		for i := range n {
			it := blocks(t, ns, first+i, 1, 1)
			write(t, tr, ns, it)
			if err := tr.SetAside(t.Context(), ns, it[0].Key, "test"); err != nil {
				t.Fatal(err)
			}
		}
		wantExact(t, tr)
	}
	aside(0, quarantineFilesMax+6)
	if files, bytes, removed := tr.Quarantine(); files != quarantineFilesMax || bytes != quarantineFilesMax*8192 || removed != 6 {
		t.Errorf("%d files of %d bytes, %d removed", files, bytes, removed)
	}
	if left, _ := filepath.Glob(root + "/quarantine/*" + tiertest.Key(5, 1).String()); len(left) != 0 {
		t.Error("it is not the oldest that was removed")
	}
	closeTier(t, tr)
	o := quiet(opts(t, root, nil))
	o.Capacity = 4 << 20
	tr = openClosing(t, o) // the bound is 1 % now
	if files, bytes, _ := tr.Quarantine(); files != 5 || bytes > o.Capacity/100 {
		t.Errorf("with a capacity, %d files of %d bytes", files, bytes)
	}
	wantExact(t, tr)
	aside(1000, 3)
	if files, _, _ := tr.Quarantine(); files != 5 {
		t.Errorf("%d files", files)
	}
}

func TestSetAsideFails(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	var broken atomic.Bool
	tr := openClosing(t, quiet(opts(t, t.TempDir(), func(c vfs.Call) vfs.Fault {
		if broken.Load() && (c.Op == vfs.OpRename || c.Op == vfs.OpRemove) {
			return vfs.Fault{Err: unix.EACCES}
		}
		return vfs.Fault{}
	})))
	items := blocks(t, ns, 0, 2, 0)
	write(t, tr, ns, items)
	broken.Store(true)
	err := tr.SetAside(t.Context(), ns, items[0].Key, "test")
	if tier.CauseOf(err) != tier.CausePermission {
		t.Errorf("set aside: %v", err)
	}
	if known(tr, ns, items[0].Key) != tier.Absent {
		t.Error("the key is not absent")
	}
	wantExact(t, tr)
	if err := tr.Delete(t.Context(), ns, []block.Key{items[1].Key}); tier.CauseOf(err) != tier.CausePermission {
		t.Errorf("delete: %v", err)
	}
	readable(t, tr, ns, items[1:]) // what cannot be deleted is served on
	broken.Store(false)
	write(t, tr, ns, items)
	readable(t, tr, ns, items)
	wantExact(t, tr)
}

// Each fault of the file system is a clean failed key with its cause; the file
// is kept, nothing leaks, and the tier serves on.
func TestFaults(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	causes := map[unix.Errno]struct {
		class tier.Class
		cause tier.Cause
	}{
		unix.EIO:    {tier.ClassRetryable, tier.CauseIO},
		unix.EMFILE: {tier.ClassRetryable, tier.CauseDescriptors},
		unix.ENFILE: {tier.ClassRetryable, tier.CauseDescriptors},
		unix.EACCES: {tier.ClassPermanent, tier.CausePermission},
		unix.EROFS:  {tier.ClassPermanent, tier.CauseReadOnly},
		unix.ENOSPC: {tier.ClassPermanent, tier.CauseNoSpace},
		unix.EDQUOT: {tier.ClassPermanent, tier.CauseNoSpace},
		unix.EINVAL: {tier.ClassPermanent, tier.CauseOther},
	}
	for name, base := range modes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var fault atomic.Pointer[vfs.Fault]
			var op atomic.Value
			op.Store(vfs.Op(""))
			tr := openClosing(t, quiet(opts(t, t.TempDir(), func(c vfs.Call) vfs.Fault {
				if f := fault.Load(); f != nil && c.Op == op.Load().(vfs.Op) && strings.Contains(c.Name, "/") && !strings.HasPrefix(c.Name, nameQuarantine) {
					return *f
				}
				return base(c)
			})))
			items := blocks(t, ns, 0, 3, 0)
			write(t, tr, ns, items)
			fresh := 100
			for errno, want := range causes {
				for _, o := range []vfs.Op{vfs.OpOpen, vfs.OpRead, vfs.OpWrite, vfs.OpStat, vfs.OpLink, vfs.OpRename, vfs.OpClose} {
					op.Store(o)
					fault.Store(&vfs.Fault{Err: errno, After: o == vfs.OpLink || o == vfs.OpRename})
					r := []tier.Item{{Key: items[1].Key, Buf: tiertest.Buffer(t, len(items[1].Buf))}}
					tr.Read(t.Context(), ns, r)
					fresh++
					w := blocks(t, ns, fresh, 1, 0)
					tr.Write(t.Context(), ns, w)
					fault.Store(nil)
					if want.cause == tier.CauseNoSpace {
						write(t, tr, ns, items) // what was evicted for room
					}
					for _, err := range []error{r[0].Err, w[0].Err} {
						// Which call fails depends on the mode; how it fails must not.
						if err != nil && (tier.ClassOf(err) != want.class || tier.CauseOf(err) != want.cause) {
							t.Errorf("%s fails with %v: %v is %v, %v", o, errno, err, tier.ClassOf(err), tier.CauseOf(err))
						}
					}
					if (o == vfs.OpOpen || o == vfs.OpRead) && r[0].Err == nil && errno != unix.EINVAL {
						t.Errorf("%s fails with %v, and the read is done", o, errno)
					}
					if (o == vfs.OpOpen || o == vfs.OpWrite || o == vfs.OpStat) && w[0].Err == nil {
						t.Errorf("%s fails with %v, and the write is done", o, errno)
					}
					failed := w[0].Err != nil
					tr.Read(t.Context(), ns, w)
					if got := tier.ClassOf(w[0].Err); failed != (got == tier.ClassNotFound) || (!failed && tiertest.Check(ns, &w[0]) != nil) {
						t.Errorf("%s fails with %v: write failed: %v, and then read says %v", o, errno, failed, w[0].Err)
					}
					readable(t, tr, ns, items)
					wantExact(t, tr)
				}
			}
			if s := tr.Stats(); s.SetAside != 0 {
				t.Errorf("%d files were set aside for passing errors", s.SetAside)
			}
			// Short reads and writes are gone on with.
			for _, o := range []vfs.Op{vfs.OpRead, vfs.OpWrite} {
				op.Store(o)
				fault.Store(&vfs.Fault{Short: 4096})
				readable(t, tr, ns, items)
				w := blocks(t, ns, 1000, 2, 0)
				if o == vfs.OpWrite {
					write(t, tr, ns, w)
				}
				fault.Store(nil)
				if o == vfs.OpWrite {
					readable(t, tr, ns, w)
				}
			}
			wantExact(t, tr)
		})
	}
}

// fastDir is a directory in memory where that can be mounted, for tests that
// open a root hundreds of times.
func fastDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64m,mode=0700"); err == nil {
		t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	}
	return dir
}

// The n-th call of the file system fails, for each n until a run is clean.
// Afterwards a node without faults finds right bytes or nothing, and counts
// right.
func TestErrorSweep(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	for mode, faults := range map[string][]vfs.Fault{
		"direct_tmpfile": {{Err: unix.EIO}, {Err: unix.EIO, After: true}},
		"rename":         {{Err: unix.ENOSPC}, {Err: unix.EIO, After: true}},
	} {
		for _, fault := range faults {
			t.Run(fmt.Sprint(mode, "/", fault.Err, "/", fault.After), func(t *testing.T) {
				items := blocks(t, ns, 0, 9, 1) // the capacity is for six
				deleted, aside, last := items[6].Key, items[7].Key, len(items)-1
				root := fastDir(t)
				n, runs := int64(0), 0
				for hit := true; hit; n++ {
					runs++
					if n%10 == 0 { // the calls that make things from nothing, too
						root = fastDir(t)
					}
					var calls atomic.Int64
					hit = false
					o := quiet(opts(t, root, func(c vfs.Call) vfs.Fault {
						if calls.Add(1)-1 == n {
							hit = true
							return fault
						}
						return modes[mode](c)
					}))
					o.Capacity = CapacityMin
					o.scanRetry = time.Microsecond
					acked := false
					if tr, err := Open(t.Context(), o); err == nil {
						<-tr.ScanDone()
						for i := range items {
							tiertest.Fill(ns, &items[i])
							tr.Write(t.Context(), ns, items[i:i+1])
							acked = items[i].Err == nil
						}
						_ = tr.Delete(t.Context(), ns, []block.Key{deleted})
						tr.Read(t.Context(), ns, items)
						for i := range items {
							if items[i].Err == nil && tiertest.Check(ns, &items[i]) != nil {
								t.Errorf("call %d: wrong bytes", n)
							}
						}
						_ = tr.SetAside(t.Context(), ns, aside, "test")
						if n%2 == 0 {
							tr.crash()
						} else {
							_ = tr.Close(t.Context()) // may fail by the fault
						}
					}
					tr := open(t, quiet(opts(t, root, nil)))
					<-tr.ScanDone()
					wantExact(t, tr)
					tr.Read(t.Context(), ns, items)
					for i := range items {
						if items[i].Err == nil {
							if err := tiertest.Check(ns, &items[i]); err != nil {
								t.Errorf("call %d: %v", n, err)
							}
						} else if tier.ClassOf(items[i].Err) != tier.ClassNotFound {
							t.Errorf("call %d: read after restart: %v", n, items[i].Err)
						} else if acked && i == last {
							t.Errorf("call %d: the last block was written and is gone", n)
						}
					}
					if err := tr.Delete(t.Context(), ns, keysOf(items)); err != nil {
						t.Error(err)
					}
					closeTier(t, tr)
				}
				if runs < 50 {
					t.Errorf("only %d calls were failed", runs-1)
				}
			})
		}
	}
}

func keysOf(items []tier.Item) (keys []block.Key) {
	for i := range items {
		keys = append(keys, items[i].Key)
	}
	return keys
}

// 16 writers over a small root: neither the kernel's count nor a walk ever
// finds more than the capacity, nobody is refused, and the count is exact in
// the end.
func TestCapacityAtEveryMoment(t *testing.T) {
	const capacity = 2 << 20
	run := func(t *testing.T, root string, hook func(vfs.Call) vfs.Fault, readBack bool, watch func(tr *Tier)) {
		ns := tiertest.Namespace(t, "a")
		o := quiet(opts(t, root, hook))
		o.Capacity = capacity
		tr := openClosing(t, o)
		var wg sync.WaitGroup
		var done atomic.Bool
		for w := range 16 {
			items := blocks(t, ns, 0, 3, uint32(w%4))
			r := rand.New(rand.NewPCG(uint64(w), 1))
			wg.Go(func() {
				for range 12 {
					for i := range items {
						items[i].Key = tiertest.Key(r.IntN(2000), uint32(w%4))
						tiertest.Fill(ns, &items[i])
					}
					tr.Write(context.Background(), ns, items)
					for i := range items {
						if items[i].Err != nil {
							t.Errorf("write: %v", items[i].Err)
						}
					}
					if !readBack {
						continue
					}
					tr.Read(context.Background(), ns, items)
					for i := range items {
						if items[i].Err != nil && !errors.Is(items[i].Err, tier.ErrNotFound) {
							t.Errorf("read: %v", items[i].Err)
						} else if items[i].Err == nil && tiertest.Check(ns, &items[i]) != nil {
							t.Error("wrong bytes")
						}
					}
				}
			})
		}
		watched := make(chan struct{})
		go func() {
			defer close(watched)
			for !done.Load() {
				watch(tr)
			}
		}()
		wg.Wait()
		done.Store(true)
		<-watched
		if s := tr.Stats(); s.Evicted == 0 || s.UsedBytes < capacity*9/10 {
			t.Errorf("the room is not used: %+v", s)
		}
		wantExact(t, tr)
	}
	for name, hook := range modes {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			run(t, root, hook, true, func(tr *Tier) {
				// What was removed behind the walk may have made room for what
				// was written ahead of it.
				before := tr.Stats().Evicted
				sum := du(t, root)
				slack := (tr.Stats().Evicted - before) * (64<<10 + 2*headerSize)
				if sum-slack > capacity {
					t.Errorf("a walk found %d bytes, of which %d may have gone meanwhile; the capacity is %d", sum, slack, capacity)
				}
			})
		})
	}
	t.Run("kernel", func(t *testing.T) {
		root := t.TempDir()
		if err := unix.Mount("tmpfs", root, "tmpfs", 0, "size=64m,mode=0700"); err != nil {
			t.Skipf("cannot mount a tmpfs here: %v", err)
		}
		t.Cleanup(func() { _ = unix.Unmount(root, unix.MNT_DETACH) })
		most := int64(0)
		// No reads: a file that is open lives on when it is evicted.
		run(t, root, nil, false, func(*Tier) {
			var st unix.Statfs_t
			if err := unix.Statfs(root, &st); err != nil {
				t.Error(err)
			}
			most = max(most, int64(st.Blocks-st.Bfree)*st.Bsize)
		})
		if most > capacity || most < capacity/2 {
			t.Errorf("the kernel counted up to %d bytes, the capacity is %d", most, capacity)
		}
	})
}

func TestEviction(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	const size = 2 * headerSize // of a block of group 1 as a file
	var stuck atomic.Bool
	o := quiet(opts(t, t.TempDir(), func(c vfs.Call) vfs.Fault {
		if stuck.Load() && (c.Op == vfs.OpRemove || c.Op == vfs.OpRename) {
			return vfs.Fault{Err: unix.EACCES}
		}
		return vfs.Fault{}
	}))
	o.Capacity = 3*headerSize + 10*size // three small files and ten blocks
	if o.Capacity < CapacityMin {
		t.Fatal("test needs more")
	}
	tr := openClosing(t, o)
	write(t, tr, ns, blocks(t, ns, 0, 10, 1))
	if s := tr.Stats(); s.Blocks != 10 || s.UsedBytes != o.Capacity {
		t.Fatalf("10 blocks should fill it: %+v", s)
	}
	present := func(want ...int) {
		t.Helper()
		var got []int
		for i := range 40 {
			if known(tr, ns, tiertest.Key(i, 1)) == tier.Present {
				got = append(got, i)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("present are %v, want %v", got, want)
		}
	}
	tr.Touch(ns, []block.Key{tiertest.Key(0, 1)})
	readable(t, tr, ns, blocks(t, ns, 1, 1, 1))
	write(t, tr, ns, blocks(t, ns, 2, 1, 1)) // is there
	write(t, tr, ns, blocks(t, ns, 10, 3, 1))
	present(0, 1, 2, 6, 7, 8, 9, 10, 11, 12)

	// A call does not evict what it names, even if there is no other way.
	call := blocks(t, ns, 20, 11, 1)
	call = append(blocks(t, ns, 6, 1, 1), call...) // the oldest, and there
	tr.Write(t.Context(), ns, call)
	for i := range call {
		switch cause := tier.CauseOf(call[i].Err); {
		case i < 10 && call[i].Err != nil:
			t.Errorf("item %d: %v", i, call[i].Err)
		case i >= 10 && cause != tier.CauseCapacity:
			t.Errorf("item %d: %v, want a refusal for capacity", i, call[i].Err)
		}
	}
	present(6, 20, 21, 22, 23, 24, 25, 26, 27, 28)
	wantExact(t, tr)

	// Victims that cannot be removed stay, and fail the write in the end.
	stuck.Store(true)
	w := blocks(t, ns, 30, 1, 1)
	tr.Write(t.Context(), ns, w)
	if tier.CauseOf(w[0].Err) != tier.CausePermission {
		t.Errorf("write when nothing can be removed: %v", w[0].Err)
	}
	big := blocks(t, ns, 31, 1, 2) // needs nine of the ten
	tr.Write(t.Context(), ns, big)
	if tier.CauseOf(big[0].Err) != tier.CausePermission {
		t.Errorf("write of a large block when nothing can be removed: %v", big[0].Err)
	}
	stuck.Store(false)
	present(6, 20, 21, 22, 23, 24, 25, 26, 27, 28)
	wantExact(t, tr)
	write(t, tr, ns, w)
	wantExact(t, tr)

	// A victim that others removed makes room just as well.
	for i := range 40 {
		_ = os.Remove(tr.blockPath(ns, tiertest.Key(i, 1)))
	}
	write(t, tr, ns, blocks(t, ns, 30, 4, 1))
	wantRoom := tr.Stats().UsedBytes
	if wantRoom < du(t, tr.o.Root) || wantRoom > o.Capacity {
		t.Errorf("used %d, the files have %d", wantRoom, du(t, tr.o.Root))
	}
}

// smallFS says what is free, and charges a file more than its length if asked.
type smallFS struct {
	vfs.FS
	free, extra atomic.Int64
	asked       atomic.Int64
}

func (s *smallFS) Space() (vfs.Space, error) {
	s.asked.Add(1)
	sp, err := s.FS.Space()
	sp.Free = s.free.Load()
	return sp, err
}

// Remove frees the bytes of a block of group 1.
func (s *smallFS) Remove(name string) error {
	s.free.Add(2 * headerSize)
	return s.FS.Remove(name)
}

type dearFile struct {
	vfs.File
	fs *smallFS
}

func (s *smallFS) Open(name string, flags int, perm uint32) (vfs.File, error) {
	f, err := s.FS.Open(name, flags, perm)
	if err != nil {
		return nil, err
	}
	return &dearFile{f, s}, nil
}

func (s *smallFS) Link(f vfs.File, name string) error {
	s.free.Add(-2 * headerSize)
	return s.FS.Link(f.(*dearFile).File, name)
}

func (f *dearFile) Stat() (vfs.Info, error) {
	st, err := f.File.Stat()
	st.Bytes += f.fs.extra.Load()
	return st, err
}

func TestFloor(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	root := t.TempDir()
	under, err := vfs.OpenRoot(root)
	if err != nil {
		t.Fatal(err)
	}
	small := &smallFS{FS: under}
	small.free.Store(1 << 40)
	now := time.Unix(1_000_000_000, 0)
	o := quiet(Options{Root: root, FS: small, Now: func() time.Time { return now }})
	tr := openClosing(t, o) // the floor is MinFreeDefault
	write(t, tr, ns, blocks(t, ns, 0, 200, 1))
	if n := small.asked.Load(); n > 3 {
		t.Errorf("statfs was asked %d times for 200 writes within a second", n)
	}
	// Others have taken the space: what is stored stays, nothing is added.
	small.free.Store(MinFreeDefault - floorEvictMax - 1)
	now = now.Add(time.Minute)
	w := blocks(t, ns, 1000, 1, 1)
	tr.Write(t.Context(), ns, w)
	if tier.CauseOf(w[0].Err) != tier.CauseFloor || tier.ClassOf(w[0].Err) != tier.ClassPermanent {
		t.Errorf("write below the floor: %v", w[0].Err)
	}
	if s := tr.Stats(); s.Blocks != 200 || s.Evicted != 0 {
		t.Errorf("after the refusal: %+v", s)
	}
	// Just at the floor, the oldest makes room for the newest.
	small.free.Store(MinFreeDefault + 100)
	now = now.Add(time.Minute)
	write(t, tr, ns, w)
	if s := tr.Stats(); s.Blocks != 200 || s.Evicted != 1 || known(tr, ns, tiertest.Key(0, 1)) != tier.Absent {
		t.Errorf("at the floor: %+v", s)
	}
	wantExact(t, tr)
	// What was written since statfs was asked counts.
	small.free.Store(MinFreeDefault + 20*headerSize)
	now = now.Add(time.Minute)
	more := blocks(t, ns, 2000, 40, 1)
	write(t, tr, ns, more)
	if free := small.free.Load(); free < MinFreeDefault {
		t.Errorf("%d bytes are free, fewer than the floor", free)
	}
	readable(t, tr, ns, more)
}

// A file system that charges more than a file's length is found out.
func TestCharge(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	root := t.TempDir()
	under, err := vfs.OpenRoot(root)
	if err != nil {
		t.Fatal(err)
	}
	small := &smallFS{FS: under}
	small.free.Store(1 << 40)
	small.extra.Store(4096)
	tr := openClosing(t, quiet(Options{Root: root, FS: small, Capacity: 128 << 10}))
	for i := range 30 {
		write(t, tr, ns, blocks(t, ns, i, 1, 1))
		if s := tr.Stats(); s.UsedBytes > s.CapacityBytes {
			t.Fatalf("after %d writes: %+v", i, s)
		}
	}
	if s := tr.Stats(); s.Blocks != 8 { // beside three small files of 8 KiB each has 12
		t.Errorf("%+v", s)
	}
}

// pausedScan opens a root whose scan waits for the channel before the first
// shard.
func pausedScan(t *testing.T, o Options, root string) (*Tier, chan struct{}) {
	t.Helper()
	under, err := vfs.OpenRoot(root)
	if err != nil {
		t.Fatal(err)
	}
	gate := make(chan struct{})
	o.Root, o.MinFree = root, -1
	o.FS = &vfs.Faulty{FS: under, Hook: func(c vfs.Call) vfs.Fault {
		if c.Op == vfs.OpReadDir && len(c.Name) == 2*len(block.Fingerprint{}) {
			return vfs.Fault{Wait: gate}
		}
		return vfs.Fault{}
	}}
	return open(t, quiet(o)), gate
}

// While the scan runs the tier serves what is there, and admits writes against
// the bound that the dead run left.
func TestServeWhileScanning(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	root := t.TempDir()
	o := quiet(opts(t, root, nil))
	o.Capacity = 8 << 20
	tr := open(t, o)
	write(t, tr, ns, blocks(t, ns, 0, 40, 3))
	used := tr.Stats().UsedBytes
	tr.crash()

	tr, gate := pausedScan(t, Options{Capacity: 8 << 20}, root)
	s := tr.Stats()
	if s.ScanDone || s.UsedBytes < used || s.UsedBytes > s.CapacityBytes {
		t.Errorf("before the scan: %+v; the dead run used %d", s, used)
	}
	if p := known(tr, ns, tiertest.Key(1, 3)); p != tier.Unknown {
		t.Errorf("Known of what the scan has not seen: %v", p)
	}
	if p := known(tr, tiertest.Namespace(t, "b"), tiertest.Key(1, 3)); p != tier.Absent {
		t.Errorf("Known in a namespace that is not there: %v", p)
	}
	found := make([]bool, 2)
	if err := tr.Contains(t.Context(), ns, []block.Key{tiertest.Key(1, 3), tiertest.Key(99, 3)}, found); err != nil || !found[0] || found[1] {
		t.Errorf("probe: %v %v", found, err)
	}
	if p := known(tr, ns, tiertest.Key(1, 3)); p != tier.Present {
		t.Errorf("Known after a probe: %v", p)
	}
	readable(t, tr, ns, blocks(t, ns, 2, 3, 3))
	before := tr.Stats().UsedBytes
	if err := tr.Delete(t.Context(), ns, []block.Key{tiertest.Key(7, 3), tiertest.Key(98, 3)}); err != nil {
		t.Error(err)
	}
	if n := before - tr.Stats().UsedBytes; n != headerSize+64<<10 {
		t.Errorf("deleting what the scan has not seen gives back %d bytes", n)
	}
	write(t, tr, ns, blocks(t, ns, 5, 1, 3)) // there, and not yet seen
	write(t, tr, ns, blocks(t, ns, 100, 5, 3))
	for i := range 200 { // more than fits: refused, or room is made of what was found
		it := blocks(t, ns, 200+i, 1, 3)
		tr.Write(t.Context(), ns, it)
		if it[0].Err != nil && tier.CauseOf(it[0].Err) != tier.CauseScanning {
			t.Fatalf("write %d: %v", i, it[0].Err)
		}
		if i%20 != 0 {
			continue
		}
		if n := du(t, root); n > 8<<20 {
			t.Fatalf("%d bytes while scanning", n)
		}
	}
	close(gate)
	<-tr.ScanDone()
	wantExact(t, tr)
	if p := known(tr, ns, tiertest.Key(99, 3)); p != tier.Absent {
		t.Errorf("Known after the scan: %v", p)
	}
	if s := tr.Stats(); !s.ScanDone || s.ScanBlocks == 0 || s.ScanError != "" {
		t.Errorf("after the scan: %+v", s)
	}
	closeTier(t, tr)
}

// Without a bound that can be relied on nothing is written before the scan's
// end; everything else works.
func TestNoUsageFile(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	for name, spoil := range map[string]func(root string, o *Options) error{
		"removed": func(root string, _ *Options) error { return os.Remove(root + "/" + nameUsage) },
		"damaged": func(root string, _ *Options) error {
			return os.WriteFile(root+"/"+nameUsage, []byte("TERRACEU"), 0o600)
		},
		"another boot": func(_ string, o *Options) error {
			o.bootID = "another"
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			tr := open(t, quiet(opts(t, root, nil)))
			write(t, tr, ns, blocks(t, ns, 0, 3, 0))
			tr.crash()
			var o Options
			if err := spoil(root, &o); err != nil {
				t.Fatal(err)
			}
			tr, gate := pausedScan(t, o, root)
			w := blocks(t, ns, 50, 1, 0)
			tr.Write(t.Context(), ns, w)
			if tier.CauseOf(w[0].Err) != tier.CauseScanning || tier.ClassOf(w[0].Err) != tier.ClassRetryable {
				t.Errorf("write while scanning: %v", w[0].Err)
			}
			readable(t, tr, ns, blocks(t, ns, 0, 3, 0))
			close(gate)
			<-tr.ScanDone()
			write(t, tr, ns, w)
			wantExact(t, tr)
			closeTier(t, tr)
		})
	}
}

// The file's bound is never below what is used, whatever the order of writes
// and deletions, and after an orderly end it is exact.
func TestUsageBound(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	root := t.TempDir()
	o := quiet(opts(t, root, nil))
	o.Capacity = 3 << 20 // so the step is 1 MiB
	tr := open(t, o)
	stored := func() int64 {
		t.Helper()
		b, err := os.ReadFile(root + "/" + nameUsage)
		if err != nil {
			t.Fatal(err)
		}
		bound, ok := decodeUsage(b, tr.usage.boot)
		if !ok {
			t.Fatalf("usage file %x", b)
		}
		return bound
	}
	changes := map[int64]bool{}
	for i := range 90 {
		write(t, tr, ns, blocks(t, ns, i, 1, 3))
		if i%3 == 0 {
			if err := tr.Delete(t.Context(), ns, []block.Key{tiertest.Key(i/2, 3)}); err != nil {
				t.Fatal(err)
			}
		}
		b := stored()
		changes[b] = true
		if u := du(t, root); b < u || b > o.Capacity {
			t.Fatalf("after %d writes the bound is %d, used are %d", i, b, u)
		}
	}
	if len(changes) > 20 {
		t.Errorf("the bound was written %d times", len(changes))
	}
	closeTier(t, tr)
	if b, u := stored(), du(t, root); b != u {
		t.Errorf("after an orderly end the bound is %d, used are %d", b, u)
	}
	tr, gate := pausedScan(t, Options{bootID: "another"}, root)
	if s := tr.Stats(); s.UsedBytes < du(t, root) {
		t.Errorf("an orderly end is not believed after another boot: %+v", s)
	}
	close(gate)
	closeTier(t, tr)
}

func TestUsageFileFails(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	var broken atomic.Bool
	o := quiet(opts(t, t.TempDir(), func(c vfs.Call) vfs.Fault {
		if broken.Load() && c.Op == vfs.OpWrite && c.Name == nameUsage {
			return vfs.Fault{Err: unix.EROFS}
		}
		return vfs.Fault{}
	}))
	o.Capacity = 12 << 20
	tr := openClosing(t, o)
	broken.Store(true)
	refused := 0
	for i := range 40 {
		it := blocks(t, ns, i, 1, 3)
		tr.Write(t.Context(), ns, it)
		if it[0].Err != nil {
			refused++
			if tier.CauseOf(it[0].Err) != tier.CauseReadOnly {
				t.Errorf("write: %v", it[0].Err)
			}
		}
	}
	if refused == 0 || refused == 40 {
		t.Errorf("%d of 40 writes were refused, want those beyond the old bound", refused)
	}
	broken.Store(false)
	write(t, tr, ns, blocks(t, ns, 100, 40, 3))
	wantExact(t, tr)
}

// After a restart the oldest file goes first, and everything used since the
// start is younger than what was not.
func TestRestartOrder(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	root := t.TempDir()
	tr := open(t, quiet(opts(t, root, nil)))
	const n = 600
	write(t, tr, ns, blocks(t, ns, 0, n, 1))
	order := rand.Perm(n) // by age, oldest first
	for age, i := range order {
		at := time.Unix(1_500_000_000+int64(age), 0)
		if err := os.Chtimes(tr.blockPath(ns, tiertest.Key(i, 1)), at, at); err != nil {
			t.Fatal(err)
		}
	}
	used := tr.Stats().UsedBytes
	closeTier(t, tr)
	tr, gate := pausedScan(t, Options{Capacity: used}, root)
	readable(t, tr, ns, blocks(t, ns, order[0], 1, 1)) // before the scan knows it
	tr.Touch(ns, []block.Key{tiertest.Key(order[0], 1)})
	close(gate)
	<-tr.ScanDone()
	defer closeTier(t, tr)
	checkIndex(t, tr)
	tr.Touch(ns, []block.Key{tiertest.Key(order[1], 1), tiertest.Key(order[3], 1)})
	want := slices.Concat([]int{order[2]}, order[4:], []int{order[0], order[1], order[3]})
	var got []int
	index := map[block.Key]int{}
	for i := range n {
		index[tiertest.Key(i, 1)] = i
	}
	tr.mu.Lock()
	for _, back := range []uint32{tr.mu.index.old.back, tr.mu.index.young.back} {
		for h := back; h != 0; h = tr.mu.index.at(h).prev {
			got = append(got, index[tr.mu.index.at(h).key()])
		}
	}
	tr.mu.Unlock()
	if !slices.Equal(got, want) {
		t.Errorf("order of eviction is wrong:\n%v, want\n%v", got[:10], want[:10])
	}
	wantExact(t, tr)
}

// A root that is over a lowered capacity is brought below it.
func TestLoweredCapacity(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	root := t.TempDir()
	tr := open(t, quiet(opts(t, root, nil)))
	write(t, tr, ns, blocks(t, ns, 0, 100, 1))
	closeTier(t, tr)
	o := quiet(opts(t, root, nil))
	o.Capacity = 256 << 10
	tr = openClosing(t, o)
	if s := tr.Stats(); s.UsedBytes > o.Capacity || s.UsedBytes < o.Capacity*9/10 || s.Evicted == 0 {
		t.Errorf("%+v", s)
	}
	wantExact(t, tr)
}

// Files that are not ours count and are otherwise left alone; leftovers of
// dead runs go; what cannot be a block's file is no block.
func TestScanFinds(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	root := t.TempDir()
	tr := open(t, quiet(opts(t, root, nil)))
	write(t, tr, ns, blocks(t, ns, 0, 10, 0))
	closeTier(t, tr)
	dir := ns.Fingerprint().String()
	key := func(i int) string { return (&namespace{dir: dir}).file(tiertest.Key(i, 0)) }
	keep := []string{"notes.txt", dir + "/readme", dir + "/00/junk", "lost+found/a/b", nameQuarantine + "/sub/x",
		dir + "/ff/" + tiertest.Key(1, 0).String(),                                 // wrong shard
		dir + "/" + key(50)[len(dir)+1:len(dir)+4] + tiertest.Key(50, 63).String(), // no such group
		key(51) + "/inside",
		strings.Repeat("0", 64) + "/a1/x", // a namespace without a description
	}
	for _, name := range keep {
		path := filepath.Join(root, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, bytes.Repeat([]byte("x"), 5000), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	for _, err := range []error{
		os.WriteFile(root+"/tmp/0123-1", make([]byte, 9000), 0o600),
		os.WriteFile(root+"/tmp/other", nil, 0o600),
		os.Truncate(filepath.Join(root, key(1)), 8192),
		os.Truncate(filepath.Join(root, key(2)), 1<<20),
		os.MkdirAll(filepath.Dir(filepath.Join(root, key(60))), 0o700),
		os.Symlink("/etc/passwd", filepath.Join(root, key(60))),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	tr = openClosing(t, quiet(opts(t, root, nil)))
	wantExact(t, tr)
	if files, bytes := tr.Foreign(); files != int64(len(keep)) || bytes != int64(len(keep))*8192 {
		t.Errorf("%d foreign files of %d bytes, want %d", files, bytes, len(keep))
	}
	for _, name := range keep {
		if _, err := os.Lstat(filepath.Join(root, name)); err != nil {
			t.Errorf("a foreign file was removed: %v", err)
		}
	}
	if left, _ := filepath.Glob(root + "/tmp/*"); len(left) != 0 {
		t.Errorf("temporary files are left: %v", left)
	}
	s := tr.Stats()
	if s.Blocks != 8 || s.SetAside != 2 || s.ScanBlocks != 8 {
		t.Errorf("%+v; want 8 blocks, 2 set aside", s)
	}
	for _, i := range []int{1, 2, 51, 60} {
		if p := known(tr, ns, tiertest.Key(i, 0)); p != tier.Absent {
			t.Errorf("key %d: %v", i, p)
		}
	}
	items := blocks(t, ns, 0, 10, 0)
	readable(t, tr, ns, append(items[:1:1], items[3:]...))
	write(t, tr, ns, blocks(t, ns, 60, 1, 0)) // over the symbolic link
	if st, err := os.Stat("/etc/passwd"); err != nil || st.Size() == 0 {
		t.Error("a symbolic link was followed")
	}
	readable(t, tr, ns, blocks(t, ns, 60, 1, 0))
	wantExact(t, tr)
}

// A scan that fails is repeated; until it has worked nothing is taken for
// absent.
func TestScanRepeats(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	root := t.TempDir()
	tr := open(t, quiet(opts(t, root, nil)))
	write(t, tr, ns, blocks(t, ns, 0, 5, 0))
	if err := os.WriteFile(root+"/foreign", make([]byte, 100), 0o600); err != nil {
		t.Fatal(err)
	}
	closeTier(t, tr)
	failures := atomic.Int64{}
	failures.Store(3)
	o := quiet(opts(t, root, func(c vfs.Call) vfs.Fault {
		if c.Op == vfs.OpLstat && strings.HasSuffix(c.Name, tiertest.Key(3, 0).String()) && failures.Add(-1) >= 0 {
			return vfs.Fault{Err: unix.EIO}
		}
		return vfs.Fault{}
	}))
	o.scanRetry = time.Millisecond
	tr = openClosing(t, o)
	if s := tr.Stats(); !s.ScanDone || s.ScanError != "" || s.Blocks != 5 || failures.Load() > 0 {
		t.Errorf("%+v after %d failures", s, 3-failures.Load())
	}
	if files, _ := tr.Foreign(); files != 1 {
		t.Errorf("%d foreign files", files)
	}
	wantExact(t, tr)
	closeTier(t, tr)

	failed := make(chan struct{})
	o = opts(t, root, func(c vfs.Call) vfs.Fault {
		if c.Op == vfs.OpReadDir && strings.HasSuffix(c.Name, "/"+tiertest.Key(3, 0).String()[:2]) {
			return vfs.Fault{Err: unix.EIO}
		}
		return vfs.Fault{}
	})
	o.Logger = slog.New(slog.NewTextHandler(signal{failed}, &slog.HandlerOptions{Level: slog.LevelError}))
	o.scanRetry = time.Hour
	tr = open(t, o)
	<-failed
	if s := tr.Stats(); s.ScanDone || known(tr, ns, tiertest.Key(900, 0)) != tier.Unknown {
		t.Errorf("after a failed scan: %+v", s)
	}
	readable(t, tr, ns, blocks(t, ns, 0, 5, 0))
	write(t, tr, ns, blocks(t, ns, 10, 5, 0)) // against the bound
	closeTier(t, tr)                          // does not wait an hour
}

// signal closes a channel at the first line of a log.
type signal struct{ c chan struct{} }

func (s signal) Write(b []byte) (int, error) {
	close(s.c)
	return len(b), nil
}

// Close waits for a hung call no longer than it is told, and says so.
func TestCloseBounded(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	gate := make(chan struct{})
	reading := make(chan struct{})
	var hang atomic.Bool
	root := t.TempDir()
	tr := open(t, quiet(opts(t, root, func(c vfs.Call) vfs.Fault {
		if hang.Load() && c.Op == vfs.OpRead {
			close(reading)
			return vfs.Fault{Wait: gate}
		}
		return vfs.Fault{}
	})))
	items := blocks(t, ns, 0, 1, 0)
	write(t, tr, ns, items)
	hang.Store(true)
	done := make(chan struct{})
	go func() {
		defer close(done)
		tr.Read(context.Background(), ns, items)
	}()
	<-reading
	if known(tr, ns, items[0].Key) != tier.Present { // answers beside the hung read
		t.Error("Known is wrong")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := tr.Close(ctx)
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "1 calls") || !strings.Contains(err.Error(), root) {
		t.Errorf("close: %v", err)
	}
	late := blocks(t, ns, 1, 1, 0)
	tr.Read(t.Context(), ns, late)
	if !errors.Is(late[0].Err, tier.ErrClosed) {
		t.Errorf("read after close: %v", late[0].Err)
	}
	hang.Store(false)
	close(gate)
	<-done
	if err := tiertest.Check(ns, &items[0]); err != nil {
		t.Error(err)
	}
	_, err = Open(t.Context(), opts(t, root, nil))
	if err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("the lock is gone while calls were under way: %v", err)
	}
	tr.crash()
}

// A write that ends well means that the block is there, even if others removed
// the file behind the index's back.
func TestWriteOfVanished(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	tr := openClosing(t, quiet(opts(t, t.TempDir(), nil)))
	items := blocks(t, ns, 0, 3, 0)
	write(t, tr, ns, items)
	if err := errors.Join(os.Remove(tr.blockPath(ns, items[0].Key)), os.Truncate(tr.blockPath(ns, items[1].Key), 100)); err != nil {
		t.Fatal(err)
	}
	write(t, tr, ns, items)
	readable(t, tr, ns, items)
	wantExact(t, tr)
}

func TestIndexSize(t *testing.T) {
	x := newIndex()
	const n = 200_000
	for i := range n {
		k := tiertest.Key(i, 5)
		if x.add(3, &k, 12288, 0) == 0 {
			t.Fatal("full")
		}
	}
	if per := float64(x.table.Bytes()+x.slab.Bytes()) / n; per > 64 {
		t.Errorf("%.1f bytes a block, want at most 64", per)
	} else {
		t.Logf("%.1f bytes a block", per)
	}
	k := tiertest.Key(n-1, 5)
	h := x.find(3, &k)
	if e := x.at(h); h == 0 || e.key() != k || e.bytes() != 12288 {
		t.Errorf("found %d", h)
	}
	if x.find(2, &k) != 0 {
		t.Error("found in another namespace")
	}
}

// With SyncData the bytes are on the medium before the name is, and the name
// before the write is done.
func TestSyncData(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	for mode, hook := range modes {
		var mu sync.Mutex
		var ops []string
		o := quiet(opts(t, t.TempDir(), func(c vfs.Call) vfs.Fault {
			mu.Lock()
			defer mu.Unlock()
			switch c.Op {
			case vfs.OpWrite, vfs.OpSync, vfs.OpLink, vfs.OpRename:
				ops = append(ops, string(c.Op))
			}
			return hook(c)
		}))
		o.Sync = SyncData
		tr := openClosing(t, o)
		if err := tr.OpenNamespace(t.Context(), ns); err != nil {
			t.Fatal(err)
		}
		write(t, tr, ns, blocks(t, ns, 0, 1, 0))
		mu.Lock()
		ops = nil
		mu.Unlock()
		write(t, tr, ns, blocks(t, ns, 1, 1, 0))
		mu.Lock()
		got := strings.Join(ops, " ")
		mu.Unlock()
		// The name is given again when its directory has been made.
		name := map[bool]string{true: "link", false: "rename"}[tr.tmpfile]
		if want := "write sync " + name + " sync sync sync"; strings.Replace(got, name+" "+name, name, 1) != want {
			t.Errorf("%s: calls are %q, want %q", mode, got, want)
		}
	}
}

// At capacity a write takes over the file of the block that it evicts, but
// never one that a read has open or that has a second name.
func TestTakeOver(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	var hold atomic.Pointer[string]
	gate, reading := make(chan struct{}), make(chan struct{})
	root := t.TempDir()
	o := quiet(opts(t, root, func(c vfs.Call) vfs.Fault {
		if h := hold.Load(); h != nil && c.Op == vfs.OpRead && strings.HasSuffix(c.Name, *h) {
			hold.Store(nil)
			close(reading)
			return vfs.Fault{Wait: gate}
		}
		return vfs.Fault{}
	}))
	o.Capacity = 3*headerSize + 20*2*headerSize
	tr := openClosing(t, o)
	write(t, tr, ns, blocks(t, ns, 0, 20, 1))
	ino := func(i int) uint64 {
		t.Helper()
		var st unix.Stat_t
		if err := unix.Lstat(tr.blockPath(ns, tiertest.Key(i, 1)), &st); err != nil {
			t.Fatal(err)
		}
		return st.Ino
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Link(tr.blockPath(ns, tiertest.Key(1, 1)), link); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(link)
	if err != nil {
		t.Fatal(err)
	}
	first, third, fourth := ino(0), ino(2), ino(3)

	write(t, tr, ns, blocks(t, ns, 100, 1, 1))
	if ino(100) != first {
		t.Error("the victim's file was not taken over")
	}
	write(t, tr, ns, blocks(t, ns, 101, 1, 1)) // evicts 1
	if after, err := os.ReadFile(link); err != nil || !bytes.Equal(before, after) {
		t.Errorf("a file with another name was written over: %v", err)
	}

	// The read of 2 hangs with the file open; that makes 2 the youngest, so all
	// others go first, and 2 in the end.
	key := tiertest.Key(2, 1).String()
	hold.Store(&key)
	it := blocks(t, ns, 2, 1, 1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		tr.Read(context.Background(), ns, it)
	}()
	<-reading
	evictor := blocks(t, ns, 200, 20, 1)
	write(t, tr, ns, evictor)
	if known(tr, ns, tiertest.Key(2, 1)) != tier.Absent {
		t.Error("2 is not evicted")
	}
	if ino(200) != fourth {
		t.Error("the file of 3 was not taken over")
	}
	for i := range 20 {
		if ino(200+i) == third {
			t.Error("a file was taken over while it was read")
		}
	}
	close(gate)
	<-done
	if err := tiertest.Check(ns, &it[0]); err != nil {
		t.Errorf("the read that was under way: %v", err)
	}
	readable(t, tr, ns, evictor)
	wantExact(t, tr)
	if s := tr.Stats(); s.Blocks != 20 || s.SetAside != 0 {
		t.Errorf("%+v", s)
	}
}

// Reads beside writes that evict what is read give right bytes or nothing.
func TestReadUnderEviction(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	o := quiet(opts(t, t.TempDir(), nil))
	o.Capacity = CapacityMin // six blocks
	tr := openClosing(t, o)
	var wg sync.WaitGroup
	var stop atomic.Bool
	var latest atomic.Int64
	var hits atomic.Int64
	for r := range 4 {
		it := blocks(t, ns, 0, 1, 1)
		rnd := rand.New(rand.NewPCG(uint64(r), 9))
		wg.Go(func() {
			for !stop.Load() {
				it[0].Key = tiertest.Key(max(0, int(latest.Load())-rnd.IntN(7)), 1)
				tr.Read(context.Background(), ns, it)
				if errors.Is(it[0].Err, tier.ErrNotFound) {
					continue
				}
				hits.Add(1)
				if err := tiertest.Check(ns, &it[0]); err != nil {
					t.Errorf("read: %v", err)
				}
			}
		})
	}
	it := blocks(t, ns, 0, 1, 1)
	for i := range 3000 {
		it[0].Key = tiertest.Key(i, 1)
		tiertest.Fill(ns, &it[0])
		tr.Write(context.Background(), ns, it)
		if it[0].Err != nil {
			t.Errorf("write: %v", it[0].Err)
		}
		latest.Store(int64(i))
	}
	stop.Store(true)
	wg.Wait()
	if s := tr.Stats(); s.SetAside != 0 || hits.Load() == 0 {
		t.Errorf("%d hits, %+v", hits.Load(), s)
	}
	wantExact(t, tr)
}
