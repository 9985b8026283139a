package fstier

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/vfs"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/tiertest"
)

// Whatever an engine calls its model or tenant, files stay below the root, and
// each name has its own (B091, B092).
func TestHostileNamesStayBelowTheRoot(t *testing.T) {
	outside := t.TempDir()
	root := filepath.Join(outside, "a", "root")
	if err := os.MkdirAll(root, 0o700); err != nil {
		t.Fatal(err)
	}
	names := []string{"../../x", "..", ".", "/", "/etc/x", "a/b", "a%2Fb", "a\x00b", "a\nb", "%", "%25", "ünï", "u\u0308", "\xff",
		"tmp", "quarantine", "lock", strings.Repeat("x", 1000), strings.Repeat("../", 300)}
	tr := open(t, quiet(opts(t, root, nil)))
	var spaces []*block.Namespace
	for i, name := range names {
		spec := tiertest.Namespace(t, "m").Spec()
		spec.Salt = &names[i]
		if i%2 == 0 {
			spec.Model = name
		}
		ns, err := block.NewNamespace(spec)
		if err != nil {
			t.Logf("%.20q is refused: %v", name, err)
			continue
		}
		spaces = append(spaces, ns)
		write(t, tr, ns, blocks(t, ns, 0, 2, 0))
	}
	if len(spaces) < 12 {
		t.Errorf("only %d names were tried", len(spaces))
	}
	closeTier(t, tr)
	dirs, err := filepath.Glob(filepath.Join(root, strings.Repeat("?", 64)))
	if err != nil || len(dirs) != len(spaces) {
		t.Errorf("%d namespaces have %d directories, %v", len(spaces), len(dirs), err)
	}
	if err := filepath.WalkDir(outside, func(path string, d fs.DirEntry, err error) error {
		if !d.IsDir() && !strings.HasPrefix(path, root+"/") {
			t.Errorf("a file outside: %s", path)
		}
		return err
	}); err != nil {
		t.Error(err)
	}
	tr = openClosing(t, quiet(opts(t, root, nil)))
	for _, ns := range spaces {
		readable(t, tr, ns, blocks(t, ns, 0, 2, 0)) // checked to be this namespace's bytes
	}
	wantExact(t, tr)
}

// A block is deleted, and all else evicted, while it is being written.
// Afterwards its file and its bytes are both there or both not (B114).
func TestRemovedWhileWritten(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	for mode, base := range modes {
		t.Run(mode, func(t *testing.T) {
			gate, writing := make(chan struct{}), make(chan struct{})
			var once sync.Once
			var armed atomic.Bool
			var over atomic.Int32
			o := quiet(opts(t, t.TempDir(), func(c vfs.Call) vfs.Fault {
				f := base(c)
				if armed.Load() && c.Op == vfs.OpWrite && c.Name != nameUsage {
					once.Do(func() { close(writing); f = vfs.Fault{Wait: gate} })
				}
				return f
			}))
			o.Capacity = CapacityMin // six blocks
			tr := openClosing(t, o)
			write(t, tr, ns, blocks(t, ns, 400, 1, 1)) // makes the namespace's directory
			armed.Store(true)
			it := blocks(t, ns, 0, 1, 1)
			var wg sync.WaitGroup
			wg.Go(func() { tr.Write(context.Background(), ns, it) })
			select {
			case <-writing:
			case <-time.After(10 * time.Second):
				t.Fatal("nothing is written")
			}
			wg.Go(func() {
				if err := tr.Delete(context.Background(), ns, []block.Key{it[0].Key}); err != nil {
					t.Error(err)
				}
			})
			for i := range 3 { // fewer at once than there is room for; together four times that
				other := blocks(t, ns, 500+8*i, 8, 1)
				wg.Go(func() {
					for j := range other {
						tr.Write(context.Background(), ns, other[j:j+1])
						over.Add(1)
					}
				})
			}
			for end := time.Now().Add(10 * time.Second); tr.Stats().Evicted < 3; time.Sleep(time.Millisecond) {
				if time.Now().After(end) {
					t.Errorf("%d of 24 writes are over beside the one that is held: %+v", over.Load(), tr.Stats())
					break
				}
			}
			if s := tr.Stats(); s.UsedBytes > s.CapacityBytes {
				t.Errorf("%+v", s)
			}
			close(gate)
			wg.Wait()
			if it[0].Err != nil {
				t.Errorf("write: %v", it[0].Err)
			}
			_, err := os.Lstat(tr.blockPath(ns, it[0].Key))
			if there := known(tr, ns, it[0].Key) == tier.Present; there != (err == nil) {
				t.Errorf("the index has it: %v; its file: %v", there, err)
			}
			if left, _ := filepath.Glob(tr.o.Root + "/tmp/*"); len(left) != 0 {
				t.Errorf("temporary files are left: %v", left)
			}
			wantExact(t, tr)
		})
	}
}

// The clock is set back by a year: what is free is asked anew, so that the
// floor holds, and nothing is evicted or lost for it.
func TestClockSetBack(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	root := t.TempDir()
	under, err := vfs.OpenRoot(root)
	if err != nil {
		t.Fatal(err)
	}
	small := &smallFS{FS: under}
	small.free.Store(1 << 40)
	now := time.Unix(1_700_000_000, 0)
	tr := openClosing(t, quiet(Options{Root: root, FS: small, Now: func() time.Time { return now }}))
	items := blocks(t, ns, 0, 10, 1)
	write(t, tr, ns, items)
	now = now.AddDate(-1, 0, 0)
	small.free.Store(MinFreeDefault - floorEvictMax - 1) // others have taken it
	w := blocks(t, ns, 100, 1, 1)
	tr.Write(t.Context(), ns, w)
	if tier.CauseOf(w[0].Err) != tier.CauseFloor {
		t.Errorf("write below the floor: %v", w[0].Err)
	}
	readable(t, tr, ns, items)
	small.free.Store(1 << 40)
	now = now.AddDate(-1, 0, 0)
	write(t, tr, ns, w)
	readable(t, tr, ns, append(items, w...))
	if s := tr.Stats(); s.Evicted != 0 {
		t.Errorf("%+v", s)
	}
	wantExact(t, tr)
}

// A file system takes O_DIRECT at open and refuses the write. The probe writes,
// so the tier is buffered from the start, says so, and no store fails (B108,
// B110).
func TestDirectIOThatFailsAtTheWrite(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	var probed atomic.Bool
	var direct atomic.Int64
	tr := openClosing(t, quiet(opts(t, t.TempDir(), func(c vfs.Call) vfs.Fault {
		switch {
		case c.Op == vfs.OpOpen && c.Flags&unix.O_DIRECT != 0:
			direct.Add(1)
		case c.Op == vfs.OpWrite && strings.HasSuffix(c.Name, probeSuffix) && !probed.Swap(true):
			return vfs.Fault{Err: unix.EINVAL}
		}
		return vfs.Fault{}
	})))
	if m := tr.Stats().Mode; !strings.HasPrefix(m, "buffered") {
		t.Errorf("the mode is %q", m)
	}
	items := blocks(t, ns, 0, 5, 0)
	write(t, tr, ns, items)
	readable(t, tr, ns, items)
	if n := direct.Load(); n > 1 {
		t.Errorf("%d files were opened for direct I/O after it had failed", n-1)
	}
	wantExact(t, tr)
}

// Files that others add to a running node's root are no blocks until a start
// has found them: a miss, and the node serves on. A store of such a key keeps a
// right one and sets aside a wrong one, and the count stays that of the files
// that it knows.
func TestFilesThatOthersAdd(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	root, donor := t.TempDir(), t.TempDir()
	from := open(t, quiet(opts(t, donor, nil)))
	write(t, from, ns, blocks(t, ns, 0, 3, 0))
	closeTier(t, from)
	tr := open(t, quiet(opts(t, root, nil)))
	<-tr.ScanDone()
	write(t, tr, ns, blocks(t, ns, 10, 2, 0))
	for i, change := range []func(b []byte) []byte{
		func(b []byte) []byte { return b },
		func(b []byte) []byte { b[100] ^= 1; return b }, // in the header
		func(b []byte) []byte { return b[:9000] },
	} {
		path := tr.blockPath(ns, tiertest.Key(i, 0))
		b, err := os.ReadFile(from.blockPath(ns, tiertest.Key(i, 0)))
		if err == nil {
			err = os.MkdirAll(filepath.Dir(path), 0o700)
		}
		if err == nil {
			err = os.WriteFile(path, change(b), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(root+"/notes.txt", make([]byte, 5000), 0o600); err != nil {
		t.Fatal(err)
	}
	r := blocks(t, ns, 0, 3, 0)
	tr.Read(t.Context(), ns, r)
	for i := range r {
		if p := known(tr, ns, r[i].Key); p != tier.Absent || tier.ClassOf(r[i].Err) != tier.ClassNotFound {
			t.Errorf("file %d that somebody added: %v, %v", i, p, r[i].Err)
		}
	}
	readable(t, tr, ns, blocks(t, ns, 10, 2, 0))
	write(t, tr, ns, r)
	readable(t, tr, ns, r)
	if s := tr.Stats(); s.Blocks != 5 || s.SetAside != 2 || s.UsedBytes != du(t, root)-8192 {
		t.Errorf("%+v; the files have %d bytes", s, du(t, root))
	}
	closeTier(t, tr)
	tr = openClosing(t, quiet(opts(t, root, nil)))
	if files, bytes := tr.Foreign(); files != 1 || bytes != 8192 {
		t.Errorf("%d foreign files of %d bytes", files, bytes)
	}
	readable(t, tr, ns, r)
	wantExact(t, tr)
}
