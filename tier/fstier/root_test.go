package fstier

import (
	"context"
	"errors"
	"fmt"
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

// watchful are options of a tier that looks after its root all the time.
func watchful(root string) Options {
	return quiet(Options{Root: root, MinFree: -1, watch: time.Millisecond})
}

// until waits for what another goroutine brings about.
func until(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

func (t *Tier) isLost() bool { return t.Stats().Mode == modeLost }

// wantGone wants what a tier answers that has no root.
func wantGone(t *testing.T, tr *Tier, ns *block.Namespace, items []tier.Item) {
	t.Helper()
	for i := range items {
		if p := known(tr, ns, items[i].Key); p != tier.Absent {
			t.Errorf("Known says %v", p)
		}
	}
	tr.Read(t.Context(), ns, items)
	found := []bool{true}
	if err := tr.Contains(t.Context(), ns, keysOf(items[:1]), found); err != nil || found[0] || !errors.Is(items[0].Err, tier.ErrNotFound) {
		t.Errorf("probe: %v, %v; read: %v", found, err, items[0].Err)
	}
	for i := range items {
		tiertest.Fill(ns, &items[i])
	}
	tr.Write(t.Context(), ns, items)
	var te *tier.Error
	if err := items[0].Err; !errors.As(err, &te) || te.Cause != tier.CauseUnavailable || te.Class != tier.ClassPermanent || !te.Down || !strings.Contains(err.Error(), tr.o.Root) {
		t.Errorf("write: %v", err)
	}
	for name, err := range map[string]error{
		"delete":    tr.Delete(t.Context(), ns, keysOf(items)),
		"set aside": tr.SetAside(t.Context(), ns, items[0].Key, "test"),
		"keep name": tr.KeepName(t.Context(), "n", ns),
	} {
		if tier.CauseOf(err) != tier.CauseUnavailable {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := tr.OpenNamespace(t.Context(), ns); err != nil {
		t.Errorf("an engine is not greeted: %v", err)
	}
	tr.Touch(ns, keysOf(items))
	if s := tr.Stats(); s.Blocks != 0 || s.UsedBytes != 0 || s.ScanDone || !strings.Contains(s.ScanError, tr.o.Root) {
		t.Errorf("%+v", s)
	}
}

func mount(t *testing.T, source, target, kind string, flags uintptr) {
	t.Helper()
	options := map[bool]string{true: "size=16m,mode=0700"}[kind == "tmpfs"]
	if err := unix.Mount(source, target, kind, flags, options); err != nil {
		t.Skipf("cannot mount here: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(target, unix.MNT_DETACH) })
}

// files counts the regular files below a directory.
func files(t *testing.T, dir string) (n int) {
	t.Helper()
	err := filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			n++
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	return n
}

// The root goes in every way that it can, and comes again. While it is away
// there are misses and failed stores, and nothing is written where its path
// leads; then it is used again, without a restart.
func TestRootGoesAndComes(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	must := func(t *testing.T, errs ...error) {
		t.Helper()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
	}
	for name, x := range map[string]struct {
		before   func(t *testing.T, root string)
		goes     func(t *testing.T, root string)
		comes    func(t *testing.T, root string) // nil: it is there again at once
		kept     bool                            // with its blocks
		impostor bool                            // another directory has its path while it is away
	}{
		"removed": {
			goes: func(t *testing.T, root string) {
				// The node may take a root that has lost its lock and is not yet gone.
				until(t, "it is removed", func() bool { return os.RemoveAll(root) == nil })
			},
			comes: func(t *testing.T, root string) { must(t, os.Mkdir(root, 0o700)) },
		},
		"moved": {
			goes:  func(t *testing.T, root string) { must(t, os.Rename(root, root+".away")) },
			comes: func(t *testing.T, root string) { must(t, os.Rename(root+".away", root)) },
			kept:  true,
		},
		"replaced by a file": {
			goes: func(t *testing.T, root string) {
				must(t, os.Rename(root, root+".away"), os.WriteFile(root, nil, 0o600))
			},
			comes: func(t *testing.T, root string) {
				must(t, os.Remove(root), os.Rename(root+".away", root))
			},
			kept: true,
		},
		"replaced by a link": {
			goes: func(t *testing.T, root string) {
				must(t, os.Rename(root, root+".away"), os.Symlink(root+".away", root))
			},
			comes: func(t *testing.T, root string) {
				must(t, os.Remove(root), os.Rename(root+".away", root))
			},
			kept: true,
		},
		"replaced by a directory": {
			goes: func(t *testing.T, root string) { must(t, os.Rename(root, root+".away"), os.Mkdir(root, 0o700)) },
		},
		"emptied": {
			goes: func(t *testing.T, root string) {
				all, err := filepath.Glob(root + "/*")
				must(t, err)
				for _, path := range all {
					if filepath.Base(path) != nameLock {
						must(t, os.RemoveAll(path))
					}
				}
				must(t, os.Remove(root+"/"+nameLock)) // the last, as this is what is noticed
			},
		},
		"with another's lock file": {
			goes: func(t *testing.T, root string) {
				must(t, os.WriteFile(root+"/new", []byte("who"), 0o600), os.Rename(root+"/new", root+"/"+nameLock))
			},
			kept: true,
		},
		"without its lock": {
			goes: func(t *testing.T, root string) { must(t, os.Remove(root+"/"+nameLock)) },
			kept: true,
		},
		"unmounted, another mounted": {
			before:   func(t *testing.T, root string) { mount(t, "tmpfs", root, "tmpfs", 0) },
			goes:     func(t *testing.T, root string) { must(t, unix.Unmount(root, unix.MNT_DETACH)) },
			comes:    func(t *testing.T, root string) { mount(t, "tmpfs", root, "tmpfs", 0) },
			impostor: true,
		},
		"unmounted, mounted again": {
			before: func(t *testing.T, root string) {
				must(t, os.Mkdir(root+".disk", 0o700))
				mount(t, root+".disk", root, "", unix.MS_BIND)
			},
			goes:     func(t *testing.T, root string) { must(t, unix.Unmount(root, unix.MNT_DETACH)) },
			comes:    func(t *testing.T, root string) { mount(t, root+".disk", root, "", unix.MS_BIND) },
			kept:     true,
			impostor: true,
		},
		"disk of it unmounted": {
			before: func(t *testing.T, root string) {
				mount(t, "tmpfs", filepath.Dir(root), "tmpfs", 0)
				must(t, os.Mkdir(root, 0o700))
			},
			goes: func(t *testing.T, root string) {
				// And somebody makes the path, as start scripts do.
				must(t, unix.Unmount(filepath.Dir(root), unix.MNT_DETACH), os.MkdirAll(root, 0o700))
			},
			comes: func(t *testing.T, root string) {
				mount(t, "tmpfs", filepath.Dir(root), "tmpfs", 0)
				must(t, os.Mkdir(root, 0o700))
			},
			impostor: true,
		},
		"mounted over": {
			goes: func(t *testing.T, root string) { mount(t, "tmpfs", root, "tmpfs", 0) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			root := filepath.Join(t.TempDir(), "disk", "root")
			must(t, os.MkdirAll(root, 0o700))
			if x.before != nil {
				x.before(t, root)
			}
			tr := openClosing(t, watchful(root))
			items := blocks(t, ns, 0, 5, 0)
			write(t, tr, ns, items)
			if err := tr.SetAside(t.Context(), ns, items[4].Key, "test"); err != nil {
				t.Fatal(err)
			}
			before := tr.mark()
			x.goes(t, root)
			if x.comes != nil {
				until(t, "the loss is noticed", tr.isLost)
				wantGone(t, tr, ns, blocks(t, ns, 0, 3, 0))
				if x.impostor {
					if n := files(t, root); n > 0 {
						t.Errorf("%d files were written where the root is not", n)
					}
				}
				x.comes(t, root)
			}
			until(t, "the root is used again", func() bool { return tr.mark() != before && tr.Stats().ScanDone })
			if s := tr.Stats(); s.SetAside != 1 || (s.Blocks == 4) != x.kept {
				t.Errorf("%+v", s)
			}
			wantExact(t, tr)
			if x.kept {
				readable(t, tr, ns, items[:4])
			} else {
				r := blocks(t, ns, 0, 1, 0)
				if tr.Read(t.Context(), ns, r); !errors.Is(r[0].Err, tier.ErrNotFound) {
					t.Errorf("read of an empty root: %v", r[0].Err)
				}
			}
			more := blocks(t, ns, 100, 5, 0)
			write(t, tr, ns, more)
			readable(t, tr, ns, more)
			wantExact(t, tr)
			if err := tr.Delete(t.Context(), ns, keysOf(more)); err != nil {
				t.Error(err)
			}
			if _, err := Open(t.Context(), watchful(root)); err == nil || !strings.Contains(err.Error(), "in use") {
				t.Errorf("another node may use it as well: %v", err)
			}
		})
	}
}

// mark differs for each root that was taken.
func (t *Tier) mark() [16]byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.lost != nil {
		return [16]byte{}
	}
	return t.writer
}

// A call that is under way on the root that went ends by its descriptor, and
// no other root is taken before.
func TestRootGoesUnderACall(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	root := filepath.Join(t.TempDir(), "root")
	gate, reading := make(chan struct{}), make(chan struct{})
	var hang atomic.Bool
	var opened atomic.Int64
	o := watchful(root)
	o.wrap = func(under vfs.FS) vfs.FS {
		opened.Add(1)
		return &vfs.Faulty{FS: under, Hook: func(c vfs.Call) vfs.Fault {
			if c.Op == vfs.OpRead && hang.CompareAndSwap(true, false) {
				close(reading)
				return vfs.Fault{Wait: gate}
			}
			return vfs.Fault{}
		}}
	}
	tr := openClosing(t, o)
	items := blocks(t, ns, 0, 2, 0)
	write(t, tr, ns, items)
	clear(items[0].Buf)
	hang.Store(true)
	done := make(chan struct{})
	go func() {
		defer close(done)
		tr.Read(context.Background(), ns, items[:1])
	}()
	<-reading
	if err := errors.Join(os.Rename(root, root+".away"), os.Mkdir(root, 0o700)); err != nil {
		t.Fatal(err)
	}
	until(t, "the loss is noticed", tr.isLost)
	wantGone(t, tr, ns, blocks(t, ns, 0, 1, 0))
	if left, _ := filepath.Glob(root + "/*"); len(left) > 0 || opened.Load() != 1 {
		t.Errorf("%d roots were opened; in the new one are %v", opened.Load(), left)
	}
	close(gate)
	<-done
	if err := tiertest.Check(ns, &items[0]); err != nil {
		t.Errorf("the read that was under way: %v", err)
	}
	until(t, "the new root is used", func() bool { return !tr.isLost() })
	write(t, tr, ns, items)
	wantExact(t, tr)
	if opened.Load() != 2 {
		t.Errorf("%d roots were opened", opened.Load())
	}
}

// A root that another node has by now is that one's until it stops.
func TestLostRootOfAnother(t *testing.T) {
	root := filepath.Join(t.TempDir(), "root")
	tr := openClosing(t, watchful(root))
	if err := os.Rename(root, root+".away"); err != nil {
		t.Fatal(err)
	}
	until(t, "the loss is noticed", tr.isLost)
	if err := os.Mkdir(root+".new", 0o700); err != nil {
		t.Fatal(err)
	}
	o := open(t, quiet(opts(t, root+".new", modes["buffered"]))) // which does not mind being moved
	if err := os.Rename(root+".new", root); err != nil {
		t.Fatal(err)
	}
	until(t, "it is said who has it", func() bool { return strings.Contains(tr.Stats().ScanError, "in use by another node (pid") })
	closeTier(t, o)
	until(t, "the root is used", func() bool { return !tr.isLost() })
	write(t, tr, tiertest.Namespace(t, "a"), blocks(t, tiertest.Namespace(t, "a"), 0, 2, 0))
	wantExact(t, tr)
}

// A tier whose root is away closes, noticed or not.
func TestCloseWithoutRoot(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	for _, noticed := range []bool{true, false} {
		root := filepath.Join(t.TempDir(), "root")
		o := watchful(root)
		if !noticed {
			o.watch = time.Hour
		}
		tr := open(t, o)
		write(t, tr, ns, blocks(t, ns, 0, 2, 0))
		until(t, "it is removed", func() bool { return os.RemoveAll(root) == nil })
		if noticed {
			until(t, "the loss is noticed", tr.isLost)
		} else { // by the call itself
			wantGone(t, tr, ns, blocks(t, ns, 10, 1, 0))
		}
		if err := tr.Close(t.Context()); err != nil {
			t.Errorf("close: %v", err)
		}
		if _, err := os.Lstat(root); err == nil {
			t.Error("the node has made its root again")
		}
	}
}

// Under load the root is moved, replaced and emptied, again and again: right
// bytes, a miss, or a failure that says so; and in the end it works and counts
// right.
func TestRootGoesUnderLoad(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	root := filepath.Join(t.TempDir(), "root")
	o := watchful(root)
	o.Capacity = 256 << 10
	tr := openClosing(t, o)
	var stop atomic.Bool
	var hits atomic.Int64
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop.Store(true)
	for w := range 4 {
		it := blocks(t, ns, 0, 2, uint32(w%2))
		wg.Go(func() {
			for i := 0; !stop.Load(); i++ {
				for j := range it {
					it[j].Key = tiertest.Key((i+j)%40, uint32(w%2))
					tiertest.Fill(ns, &it[j])
				}
				tr.Write(context.Background(), ns, it)
				tr.Read(context.Background(), ns, it)
				for j := range it {
					switch c := tier.ClassOf(it[j].Err); {
					case it[j].Err == nil:
						hits.Add(1)
						if err := tiertest.Check(ns, &it[j]); err != nil {
							t.Error(err)
						}
					case c == tier.ClassCorrupt:
						t.Errorf("read: %v", it[j].Err)
					}
				}
				tr.Stats()
				known(tr, ns, it[0].Key)
			}
		})
	}
	for i := range 12 {
		before, had := tr.mark(), hits.Load()
		until(t, "reads hit", func() bool { return hits.Load() > had+20 })
		var err error
		switch i % 4 {
		case 0:
			err = errors.Join(os.Rename(root, root+".away"), os.Mkdir(root, 0o700))
		case 1:
			err = errors.Join(os.Rename(root, fmt.Sprint(root, i)), os.Rename(root+".away", root))
		case 2:
			err = os.Remove(root + "/" + nameLock)
		case 3:
			err = errors.Join(os.Rename(root, fmt.Sprint(root, i)), os.Mkdir(root, 0o700))
		}
		if err != nil {
			t.Fatal(err)
		}
		until(t, "another root", func() bool { m := tr.mark(); return m != [16]byte{} && m != before && tr.Stats().ScanDone })
	}
	stop.Store(true)
	wg.Wait()
	wantExact(t, tr)
	if s := tr.Stats(); s.SetAside != 0 {
		t.Errorf("%+v", s)
	}
}

// What somebody removes of the tier's own directories, the next write makes,
// in each mode.
func TestOwnDirectoriesAreMadeAgain(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	for mode, hook := range modes {
		t.Run(mode, func(t *testing.T) {
			o := quiet(opts(t, t.TempDir(), hook))
			o.Capacity = CapacityMin
			tr := openClosing(t, o)
			write(t, tr, ns, blocks(t, ns, 0, 10, 1)) // more than there is room for
			if err := os.RemoveAll(tr.o.Root + "/" + nameTmp); err != nil {
				t.Fatal(err)
			}
			write(t, tr, ns, blocks(t, ns, 20, 10, 1))
			if err := os.RemoveAll(tr.o.Root + "/" + nameQuarantine); err != nil {
				t.Fatal(err)
			}
			write(t, tr, ns, blocks(t, ns, 40, 10, 1))
			if err := tr.SetAside(t.Context(), ns, tiertest.Key(49, 1), "test"); err != nil {
				t.Error(err)
			}
			wantExact(t, tr)
		})
	}
}
