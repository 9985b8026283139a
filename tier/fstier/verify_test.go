package fstier

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/minio/crc64nvme"
	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/blockhead"
	"github.com/terrace-kv/terrace/internal/vfs"
	"github.com/terrace-kv/terrace/tier/tiertest"
)

// verify checks a root and gives what it finds as "kind name", sorted, with
// namespaces and keys left out.
func verify(tb testing.TB, o VerifyOptions) (r VerifyReport, found []Finding) {
	tb.Helper()
	o.Found = func(f Finding) { found = append(found, f) }
	r, err := Verify(tb.Context(), o)
	if err != nil {
		tb.Fatal(err)
	}
	slices.SortFunc(found, func(a, b Finding) int { return strings.Compare(a.Path, b.Path) })
	return r, found
}

// filled is a closed root with blocks of two groups, one of which is not a
// multiple of the padding and one longer than a worker reads at once.
func filled(tb testing.TB, capacity int64) (root string, ns *block.Namespace, paths []string) {
	tb.Helper()
	root = tb.TempDir()
	o := opts(tb, root, nil)
	o.Capacity = capacity
	t := open(tb, o)
	<-t.ScanDone()
	ns = verifySpaceOf(tb)
	for _, g := range []struct{ group, n int }{{0, 12}, {1, 2}} {
		items := blocks(tb, ns, 100*g.group, g.n, uint32(g.group))
		write(tb, t, ns, items)
		for i := range items {
			paths = append(paths, t.blockPath(ns, items[i].Key))
		}
	}
	if err := t.KeepName(tb.Context(), "its name", ns); err != nil {
		tb.Fatal(err)
	}
	closeTier(tb, t)
	return root, ns, paths
}

func verifySpaceOf(tb testing.TB) *block.Namespace {
	ns, err := block.NewNamespace(block.Spec{Model: "verify", DType: "bytes", Layout: "content-v1", HashAlgorithm: "sha256", HashLength: block.HashSize,
		Groups: []block.Group{{Kind: block.KindFull, TokensPerBlock: 16, BlockBytes: 5000}, {Kind: block.KindFull, TokensPerBlock: 16, BlockBytes: 2*verifyChunk + 77}}})
	if err != nil {
		tb.Fatal(err)
	}
	return ns
}

// overwrite changes bytes of a file in place.
func overwrite(tb testing.TB, path string, off int64, b ...byte) {
	tb.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteAt(b, off)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		tb.Fatal(err)
	}
}

func TestVerifyClean(t *testing.T) {
	for name, hook := range modes {
		t.Run(name, func(t *testing.T) {
			root, _, paths := filled(t, 0)
			o := VerifyOptions{Root: root}
			under, err := vfs.OpenRoot(root)
			if err != nil {
				t.Fatal(err)
			}
			o.FS = &vfs.Faulty{FS: under, Hook: func(c vfs.Call) vfs.Fault {
				switch c.Op {
				case vfs.OpLink, vfs.OpRename, vfs.OpRemove, vfs.OpMkdir, vfs.OpWrite, vfs.OpSync, vfs.OpLock:
					t.Errorf("%s %s: nothing may change", c.Op, c.Name)
				case vfs.OpOpen:
					if c.Flags&(unix.O_WRONLY|unix.O_RDWR|unix.O_CREAT|unix.O_TRUNC) != 0 {
						t.Errorf("%s is opened to be written", c.Name)
					}
				}
				return hook(c)
			}}
			told := 0
			o.ProgressEvery = time.Nanosecond
			o.Progress = func(r VerifyReport) {
				if told++; r.Done < 0 || r.Done > 1 || r.Good > int64(len(paths)) {
					t.Errorf("progress: %+v", r)
				}
			}
			r, found := verify(t, o)
			if len(found) > 0 || r.Good != int64(len(paths)) || r.Problems != 0 || r.Namespaces != 1 || r.InUse != "" || r.Done != 1 || r.Vanished != 0 {
				t.Errorf("%+v, %v", r, found)
			}
			if sum := du(t, root); r.UsedBytes != sum || r.BoundBytes != sum {
				t.Errorf("files take %d bytes, it says %d, and the usage file %d", sum, r.UsedBytes, r.BoundBytes)
			}
			if want := int64(12*5000 + 2*(2*verifyChunk+77)); r.CheckedBytes != want {
				t.Errorf("%d bytes were checked, want %d", r.CheckedBytes, want)
			}
		})
	}
}

// TestVerifyFinds damages one thing each, in a root that is otherwise right.
func TestVerifyFinds(t *testing.T) {
	otherKey := tiertest.Key(5000, 0)
	reheader := func(t *testing.T, path string, change func(h *blockhead.Header, raw []byte)) {
		raw, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var h blockhead.Header
		if err := h.Decode(raw[:headerSize]); err != nil {
			t.Fatal(err)
		}
		change(&h, raw)
		h.Encode(raw[:headerSize])
		if err := os.WriteFile(path, raw, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, x := range map[string]struct {
		do   func(t *testing.T, root, path string, ns *block.Namespace) // path is a block of group 0
		kind string
		what string
		good int // blocks less
	}{
		"magic":      {func(t *testing.T, _, p string, _ *block.Namespace) { overwrite(t, p, 0, 'X') }, FindBad, "not a block", 1},
		"header sum": {func(t *testing.T, _, p string, _ *block.Namespace) { overwrite(t, p, 2000, 1) }, FindBad, "header does not match its checksum", 1},
		"block byte": {func(t *testing.T, _, p string, _ *block.Namespace) { overwrite(t, p, headerSize+4999, 0xA5, 0) }, FindBad, "block does not match its checksum", 1},
		"padding":    {func(t *testing.T, _, p string, _ *block.Namespace) { overwrite(t, p, headerSize+8191, 1) }, FindBad, "padding behind the block has a byte that is not 0, at 12287", 1},
		"checksum in it": {func(t *testing.T, _, p string, _ *block.Namespace) {
			reheader(t, p, func(h *blockhead.Header, _ []byte) { h.Sum++ })
		}, FindBad, "block does not match its checksum", 1},
		"key in it": {func(t *testing.T, _, p string, _ *block.Namespace) {
			reheader(t, p, func(h *blockhead.Header, _ []byte) { h.Key = otherKey })
		}, FindBad, "contradicts its place", 1},
		"namespace in it": {func(t *testing.T, _, p string, _ *block.Namespace) {
			reheader(t, p, func(h *blockhead.Header, _ []byte) { h.NS[0]++ })
		}, FindBad, "contradicts its place", 1},
		"length in it": {func(t *testing.T, _, p string, _ *block.Namespace) {
			reheader(t, p, func(h *blockhead.Header, _ []byte) { h.Length-- })
		}, FindBad, "block length 4999, want 5000", 1},
		"version": {func(t *testing.T, _, p string, _ *block.Namespace) {
			raw := make([]byte, headerSize)
			f, err := os.Open(p)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			_, _ = f.ReadAt(raw, 0)
			raw[9] = 2
			sign(raw)
			overwrite(t, p, 0, raw...)
		}, FindForeign, "another version", 1},
		"short":     {func(t *testing.T, _, p string, _ *block.Namespace) { _ = os.Truncate(p, 2*headerSize) }, FindBad, "it has 8192 bytes", 1},
		"empty":     {func(t *testing.T, _, p string, _ *block.Namespace) { _ = os.Truncate(p, 0) }, FindBad, "it has 0 bytes", 1},
		"long":      {func(t *testing.T, _, p string, _ *block.Namespace) { _ = os.Truncate(p, 1<<20) }, FindBad, "it has 1048576 bytes", 1},
		"directory": {func(t *testing.T, _, p string, _ *block.Namespace) { _ = os.Remove(p); _ = os.Mkdir(p, 0o700) }, FindBad, "no regular file", 1},
		"link":      {func(t *testing.T, _, p string, _ *block.Namespace) { _ = os.Remove(p); _ = os.Symlink("/dev/zero", p) }, FindBad, "no regular file", 1},
		"pipe":      {func(t *testing.T, _, p string, _ *block.Namespace) { _ = os.Remove(p); _ = unix.Mkfifo(p, 0o600) }, FindBad, "no regular file", 1},
		"wrong folder": {func(t *testing.T, _, p string, _ *block.Namespace) {
			to := filepath.Join(filepath.Dir(filepath.Dir(p)), "00")
			_ = os.Mkdir(to, 0o700)
			_ = os.Rename(p, filepath.Join(to, filepath.Base(p)))
		}, FindBad, "in the folder of other keys", 1},
		"another's name": {func(t *testing.T, _, p string, _ *block.Namespace) {
			to := filepath.Join(filepath.Dir(filepath.Dir(p)), otherKey.String()[:2])
			_ = os.Mkdir(to, 0o700)
			_ = os.Rename(p, filepath.Join(to, otherKey.String()))
		}, FindBad, "contradicts its place", 1},
		"unknown group": {func(t *testing.T, _, p string, _ *block.Namespace) {
			_ = os.Rename(p, p[:len(p)-1]+"7")
		}, FindForeign, "group 7", 1},
		"description": {func(t *testing.T, root, _ string, ns *block.Namespace) {
			overwrite(t, filepath.Join(root, ns.Fingerprint().String(), nameNamespace), 0, 'X')
		}, FindNamespace, "not the description of a namespace", 0},
		"another's description": {func(t *testing.T, root, _ string, ns *block.Namespace) {
			s := ns.Spec()
			s.Model = "another"
			o, _ := block.NewNamespace(s)
			_ = os.WriteFile(filepath.Join(root, ns.Fingerprint().String(), nameNamespace), o.JSON(), 0o600)
		}, FindNamespace, "the folder is another's", 0},
		"no description": {func(t *testing.T, root, _ string, ns *block.Namespace) {
			_ = os.Remove(filepath.Join(root, ns.Fingerprint().String(), nameNamespace))
		}, FindNamespace, "14 blocks were checked by their headers alone", 0},
		"empty name": {func(t *testing.T, root, _ string, ns *block.Namespace) {
			_ = os.Truncate(filepath.Join(root, ns.Fingerprint().String(), nameName), 0)
		}, FindNamespace, "name is empty", 0},
		"name twice": {func(t *testing.T, root, _ string, ns *block.Namespace) {
			dir := filepath.Join(root, strings.Repeat("f", 64))
			_ = os.Mkdir(dir, 0o700)
			_ = os.WriteFile(filepath.Join(dir, nameName), []byte("its name"), 0o600)
			_ = os.Remove(filepath.Join(root, nameUsage)) // or those bytes would be another finding
		}, FindNamespace, `"its name" is the name of`, 0},
		"usage file": {func(t *testing.T, root, _ string, _ *block.Namespace) {
			overwrite(t, filepath.Join(root, nameUsage), 20, 1)
		}, FindBooks, "damaged", 0},
		"more than booked": {func(t *testing.T, root, _ string, ns *block.Namespace) {
			if err := os.WriteFile(filepath.Join(root, nameTmp, "stray"), make([]byte, 1<<16), 0o600); err != nil {
				t.Fatal(err)
			}
		}, FindBooks, "it says that they take at most", 0},
		"a file of others": {func(t *testing.T, root, _ string, _ *block.Namespace) {
			_ = os.WriteFile(filepath.Join(root, "README"), nil, 0o600)
		}, FindForeign, "none of the tier's", 0},
		"a folder of others": {func(t *testing.T, root, _ string, ns *block.Namespace) {
			dir := filepath.Join(root, ns.Fingerprint().String(), "zz", "deep")
			_ = os.MkdirAll(dir, 0o700)
			_ = os.WriteFile(filepath.Join(dir, "a"), nil, 0o600)
			_ = os.WriteFile(filepath.Join(dir, "b"), nil, 0o600)
		}, FindForeign, "a folder of 2 files", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			root, ns, paths := filled(t, 0)
			x.do(t, root, paths[3], ns)
			r, found := verify(t, VerifyOptions{Root: root, Workers: 2})
			if len(found) != 1 || found[0].Kind != x.kind || !strings.Contains(found[0].What, x.what) || found[0].Do == "" || !strings.HasPrefix(found[0].Path, root+"/") {
				t.Errorf("found %+v, want one of kind %s with %q", found, x.kind, x.what)
			}
			if r.Good != int64(len(paths)-x.good) {
				t.Errorf("%d blocks are good, want %d less than %d", r.Good, x.good, len(paths))
			}
			if want := x.kind != FindForeign; (r.Problems == 1) != want || (r.Bad == 1) != (x.kind == FindBad) {
				t.Errorf("%+v", r)
			}
			if sum := du(t, root); r.UsedBytes != sum {
				t.Errorf("files take %d bytes, it counts %d", sum, r.UsedBytes)
			}
		})
	}
}

// sign makes a header's checksum right.
func sign(raw []byte) {
	sum := crc64nvme.Checksum(raw[:headerSize-8])
	for i := range 8 {
		raw[headerSize-8+i] = byte(sum >> (56 - 8*i))
	}
}

// TestVerifyCounts: what is neither good nor wrong is counted.
func TestVerifyCounts(t *testing.T) {
	root, ns, paths := filled(t, 0)
	o := opts(t, root, nil)
	tr := open(t, o)
	<-tr.ScanDone()
	if err := tr.SetAside(t.Context(), ns, tiertest.Key(0, 0), "for the test"); err != nil {
		t.Fatal(err)
	}
	tr.crash()
	for i := range 3 {
		if err := os.WriteFile(filepath.Join(root, nameTmp, fmt.Sprint("dead-", i)), []byte("half"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r, found := verify(t, VerifyOptions{Root: root})
	if len(found) > 0 || r.Temporary != 3 || r.Quarantined != 1 || r.Good != int64(len(paths)-1) || r.Problems != 0 {
		t.Errorf("%+v, %v", r, found)
	}
	if r.BoundBytes < r.UsedBytes {
		t.Errorf("after a crash the bound is %d of %d bytes", r.BoundBytes, r.UsedBytes)
	}
	b, err := json.Marshal(r)
	if err != nil || !strings.Contains(string(b), `"quarantined":1`) {
		t.Errorf("%s, %v", b, err)
	}
}

// TestVerifyUnreadable: what the medium does not give is told from what is
// wrong, and nothing stops at it.
func TestVerifyUnreadable(t *testing.T) {
	root, ns, paths := filled(t, 0)
	for _, x := range []struct {
		name string
		op   vfs.Op
		at   string
		good int
	}{
		{"open", vfs.OpOpen, paths[3], len(paths) - 1},
		{"stat", vfs.OpStat, paths[3], len(paths) - 1},
		{"read", vfs.OpRead, paths[3], len(paths) - 1},
		{"later read", vfs.OpRead, paths[12], len(paths) - 1},
		{"shard", vfs.OpReadDir, filepath.Dir(paths[12]), -1},
		{"description", vfs.OpOpen, filepath.Join(root, ns.Fingerprint().String(), nameNamespace), len(paths)},
	} {
		t.Run(x.name, func(t *testing.T) {
			under, err := vfs.OpenRoot(root)
			if err != nil {
				t.Fatal(err)
			}
			r, found := verify(t, VerifyOptions{Root: root, FS: &vfs.Faulty{FS: under, Hook: func(c vfs.Call) vfs.Fault {
				if c.Op == x.op && filepath.Join(root, c.Name) == x.at && (x.name != "later read" || c.Off > 0) {
					return vfs.Fault{Err: unix.EIO}
				}
				return vfs.Fault{}
			}}})
			if len(found) != 1 || found[0].Kind != FindUnreadable || found[0].Path != x.at || r.Unreadable != 1 || r.Problems != 1 || r.Bad != 0 {
				t.Errorf("%+v, %+v", r, found)
			}
			if x.good >= 0 && r.Good != int64(x.good) {
				t.Errorf("%d good, want %d", r.Good, x.good)
			}
		})
	}
}

// TestVerifyNotARoot: the error says what to give instead.
func TestVerifyNotARoot(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{dir, file, filepath.Join(dir, "none"), ""} {
		if _, err := Verify(t.Context(), VerifyOptions{Root: path}); err == nil || !strings.Contains(err.Error(), "tiers.fs.root") {
			t.Errorf("%q: %v", path, err)
		}
	}
	root, _, paths := filled(t, 0)
	link := filepath.Join(dir, "link")
	if err := os.Symlink(root, link); err != nil {
		t.Fatal(err)
	}
	if r, err := Verify(t.Context(), VerifyOptions{Root: link}); err != nil || r.Good != int64(len(paths)) || r.Root != root {
		t.Errorf("through a link: %+v, %v", r, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Verify(ctx, VerifyOptions{Root: root}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// TestVerifyInUse: under a running tier that evicts, writes over and removes,
// nothing is found, and the owner is named.
func TestVerifyInUse(t *testing.T) {
	root := t.TempDir()
	o := opts(t, root, nil)
	o.Capacity = 1 << 20
	tr := openClosing(t, o)
	ns := verifySpaceOf(t)
	stop, over := make(chan struct{}), make(chan error, 1)
	started := make(chan struct{})
	go func() {
		for i := 0; ; i++ {
			if i == 400 {
				close(started)
			}
			select {
			case <-stop:
				over <- nil
				return
			default:
			}
			items := blocks(t, ns, i%1000, 1, 0)
			tiertest.Fill(ns, &items[0])
			tr.Write(context.Background(), ns, items)
			if items[0].Err != nil {
				over <- items[0].Err
				return
			}
		}
	}()
	select {
	case <-started:
	case err := <-over:
		t.Fatal(err)
	}
	vanished := int64(0)
	for range 15 {
		r, found := verify(t, VerifyOptions{Root: root, Workers: 4})
		if len(found) > 0 || r.Problems > 0 || !strings.Contains(r.InUse, fmt.Sprintf("pid %d on ", os.Getpid())) {
			t.Errorf("%+v, %+v", r, found)
		}
		vanished += r.Vanished
		if _, whole, err := tr.CheckInvariants(time.Hour); err != nil || !whole {
			t.Errorf("invariants: %v %v", whole, err)
		}
	}
	close(stop)
	if err := <-over; err != nil {
		t.Error(err)
	}
	t.Logf("%d files vanished", vanished)
}

func TestCheckInvariants(t *testing.T) {
	root := t.TempDir()
	tr := openClosing(t, opts(t, root, nil))
	ns := verifySpaceOf(t)
	write(t, tr, ns, blocks(t, ns, 0, 20, 0))
	if _, whole, err := tr.CheckInvariants(time.Hour); err != nil || !whole {
		t.Fatalf("%v, %v", whole, err)
	}
	if _, whole, err := tr.CheckInvariants(time.Nanosecond); err != nil || whole {
		t.Errorf("without time: %v, %v", whole, err)
	}
	for name, damage := range map[string]func() (undo func()){
		"a block lost": func() func() { tr.mu.byID[0].blocks--; return func() { tr.mu.byID[0].blocks++ } },
		"bytes lost":   func() func() { tr.mu.account.known -= 1 << 20; return func() { tr.mu.account.known += 1 << 20 } },
		"bytes listed": func() func() { tr.mu.index.listed -= 512; return func() { tr.mu.index.listed += 512 } },
		"a list cut": func() func() {
			e := tr.mu.index.at(tr.mu.index.young.front)
			n := e.next
			e.next = 0
			return func() { e.next = n }
		},
		"a list in ring": func() func() {
			e := tr.mu.index.at(tr.mu.index.young.back)
			e.next = tr.mu.index.young.front
			return func() { e.next = 0 }
		},
	} {
		tr.mu.Lock()
		undo := damage()
		tr.mu.Unlock()
		if _, _, err := tr.CheckInvariants(time.Hour); err == nil {
			t.Errorf("%s: nothing is found", name)
		}
		tr.mu.Lock()
		undo()
		tr.mu.Unlock()
	}
}

// TestVerifyChangingFile: a file that is written over while it is read, as an
// evicted one is, is looked at again.
func TestVerifyChangingFile(t *testing.T) {
	root, _, paths := filled(t, 0)
	good, err := os.ReadFile(paths[3])
	if err != nil {
		t.Fatal(err)
	}
	for name, x := range map[string]struct {
		changes  int
		good     int
		vanished int64
	}{"once": {1, len(paths), 0}, "always": {100, len(paths) - 1, 1}} {
		under, err := vfs.OpenRoot(root)
		if err != nil {
			t.Fatal(err)
		}
		left := x.changes
		r, found := verify(t, VerifyOptions{Root: root, Workers: 1, FS: &vfs.Faulty{FS: under, Hook: func(c vfs.Call) vfs.Fault {
			if c.Op == vfs.OpRead && filepath.Join(root, c.Name) == paths[3] && left > 0 {
				left--
				moved := filepath.Join(t.TempDir(), "moved") // so that the number of its inode is not used again
				if err := errors.Join(os.Rename(paths[3], moved), os.WriteFile(paths[3], good, 0o600)); err != nil {
					t.Error(err)
				}
				overwrite(t, moved, headerSize, 0xA5, 0x5A)
			}
			return vfs.Fault{}
		}}})
		if len(found) > 0 || r.Good != int64(x.good) || r.Vanished != x.vanished {
			t.Errorf("%s: %+v, %+v", name, r, found)
		}
	}
}

// TestVerifyShared: a root of several nodes has their own files elsewhere, and
// the lengths of block files say whose they are.
func TestVerifyShared(t *testing.T) {
	share := func(t *testing.T) (root string, paths []string) {
		root, _, paths = filled(t, 0)
		in := func(name string) string { return filepath.Join(root, name) }
		lock, err := os.ReadFile(in(nameLock))
		err = errors.Join(err, os.Remove(in(nameLock)), os.Mkdir(in(nameLock), 0o700), os.WriteFile(in("LOCK/0001"), lock, 0o600), os.WriteFile(in("LOCK/0002"), lock, 0o600),
			os.MkdirAll(in("nodes/0001"), 0o700), os.MkdirAll(in("nodes/0002/tmp"), 0o700), os.Rename(in(nameTmp), in("nodes/0001/tmp")), os.Rename(in(nameUsage), in("nodes/0001/usage")),
			os.WriteFile(in("nodes/0002/tmp/dead-1"), nil, 0o600))
		if err != nil {
			t.Fatal(err)
		}
		for i, p := range paths {
			st, err := os.Stat(p)
			if err == nil {
				err = os.Truncate(p, st.Size()+int64(1+i%2))
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		return root, paths
	}
	root, paths := share(t)
	r, found := verify(t, VerifyOptions{Root: root})
	if len(found) > 0 || r.Good != int64(len(paths)) || r.Temporary != 1 || r.UsedBytes != du(t, root) || r.BoundBytes == 0 || r.InUse != "" {
		t.Errorf("%+v, %+v", r, found)
	}
	held, err := vfs.OpenRoot(root)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	f, err := held.Open("LOCK/0002", unix.O_RDWR, 0)
	if err == nil {
		defer f.Close()
		err = f.Lock()
	}
	if err != nil {
		t.Fatal(err)
	}
	if r, _ := verify(t, VerifyOptions{Root: root}); !strings.Contains(r.InUse, "pid ") {
		t.Errorf("in use: %+v", r)
	}

	for name, x := range map[string]struct {
		do   func(root, path string) error
		kind string
		what string
	}{
		"no owner":   {func(_, p string) error { return os.Truncate(p, 3*headerSize) }, FindBad, "of none of the nodes"},
		"a byte":     {func(_, p string) error { overwrite(t, p, headerSize+10, 0xA5, 0x5A); return nil }, FindBad, "does not match its checksum"},
		"short":      {func(_, p string) error { return os.Truncate(p, 2*headerSize+1) }, FindBad, "it has 8192 bytes"},
		"a stranger": {func(root, _ string) error { return os.WriteFile(filepath.Join(root, "nodes", "x"), nil, 0o600) }, FindForeign, "none of the tier's"},
		"books": {func(root, _ string) error {
			b, err := os.ReadFile(filepath.Join(root, "nodes/0001/usage"))
			if err == nil {
				clear(b[16:24])
				b[22] = 1 // 256 bytes
				sum := crc64nvme.Checksum(b[:56])
				for i := range 8 {
					b[56+i] = byte(sum >> (56 - 8*i))
				}
				err = os.WriteFile(filepath.Join(root, "nodes/0001/usage"), b, 0o600)
			}
			return err
		}, FindBooks, "it says that they take at most 256"},
	} {
		root, paths := share(t)
		if err := x.do(root, paths[3]); err != nil {
			t.Fatal(err)
		}
		if _, found := verify(t, VerifyOptions{Root: root}); len(found) != 1 || found[0].Kind != x.kind || !strings.Contains(found[0].What, x.what) {
			t.Errorf("%s: %+v", name, found)
		}
	}
}
