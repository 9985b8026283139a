package fstier

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/internal/vfs"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/tiertest"
)

// TestStraysAreRemovedLater: files of failed writes whose removal fails too
// take room only until the medium works again, not until the next start.
func TestStraysAreRemovedLater(t *testing.T) {
	for name, mode := range modes {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			var broken atomic.Bool
			o := opts(t, root, func(c vfs.Call) vfs.Fault {
				tmp := strings.HasPrefix(c.Name, nameTmp+"/")
				if broken.Load() && (c.Op == vfs.OpWrite || tmp && c.Op == vfs.OpRemove) {
					return vfs.Fault{Err: unix.EIO}
				}
				return mode(c)
			})
			o.Capacity = 1 << 20
			tr := openClosing(t, o)
			ns := tiertest.Namespace(t, "strays")
			many := blocks(t, ns, 0, 400, 0)
			write(t, tr, ns, many) // evicts, so that writes take over what is evicted
			full := tr.Stats().Blocks
			broken.Store(true)
			failing := blocks(t, ns, 1000, 30, 0)
			for i := range failing {
				tr.Write(t.Context(), ns, failing[i:i+1])
				if failing[i].Err == nil {
					t.Fatal("a write has worked")
				}
			}
			left, _ := filepath.Glob(filepath.Join(root, nameTmp, "*"))
			if len(left) < 20 {
				t.Fatalf("%d files are left, which says nothing", len(left))
			}
			if used, sum := tr.Stats().UsedBytes, du(t, root); used < sum || used > o.Capacity {
				t.Errorf("%d bytes are used, the files have %d, the capacity is %d", used, sum, o.Capacity)
			}
			broken.Store(false)
			write(t, tr, ns, blocks(t, ns, 2000, 100, 0))
			if left, _ = filepath.Glob(filepath.Join(root, nameTmp, "*")); len(left) > 0 {
				t.Errorf("%d files are still left", len(left))
			}
			if now := tr.Stats().Blocks; now < full {
				t.Errorf("there is room for %d blocks, before it was %d", now, full)
			}
			wantExact(t, tr)
			if _, whole, err := tr.CheckInvariants(time.Hour); err != nil || !whole {
				t.Error(whole, err)
			}
		})
	}
}

// TestStraysAreBounded: what is remembered of them is, and a name that may be
// another's is not among them.
func TestStraysAreBounded(t *testing.T) {
	tr := openClosing(t, opts(t, t.TempDir(), nil))
	tr.mu.Lock()
	defer tr.mu.Unlock()
	for range 2 * straysMax {
		tr.keepStrayLocked(tr.tmpName+"x", 1)
	}
	if n := len(tr.mu.strays); n != straysMax {
		t.Errorf("%d are remembered", n)
	}
	tr.mu.strays = nil
	tr.keepStrayLocked("00ff/00/00ff", 1)
	if n := len(tr.mu.strays); n != 0 {
		t.Error("a block's name is remembered as a stray")
	}
}

// TestFailedLinkSparesTheFasterWrite: of two writes of one block the second
// fails to give its file the name. The first one's copy stays.
func TestFailedLinkSparesTheFasterWrite(t *testing.T) {
	root := t.TempDir()
	ns := tiertest.Namespace(t, "twice")
	items, again := blocks(t, ns, 0, 1, 0), blocks(t, ns, 0, 1, 0)
	var tr *Tier
	var step atomic.Int32
	tr = openClosing(t, opts(t, root, func(c vfs.Call) vfs.Fault {
		switch {
		case c.Op == vfs.OpWrite && strings.Contains(c.Name, "/") && !strings.HasPrefix(c.Name, nameTmp) && step.CompareAndSwap(1, 2):
			over := make(chan struct{})
			go func() {
				defer close(over)
				tr.Write(t.Context(), ns, again)
			}()
			<-over
			step.Store(3)
		case c.Op == vfs.OpLink && step.Load() == 3:
			return vfs.Fault{Err: unix.EIO}
		}
		return vfs.Fault{}
	}))
	if !tr.tmpfile {
		t.Skip("nameless files do not work here")
	}
	write(t, tr, ns, blocks(t, ns, 1, 1, 0)) // so that the namespace is stored
	step.Store(1)
	tr.Write(t.Context(), ns, items)
	if step.Load() != 3 || again[0].Err != nil || items[0].Err == nil {
		t.Fatalf("step %d; the first write ends with %v, the second with %v", step.Load(), again[0].Err, items[0].Err)
	}
	readable(t, tr, ns, again)
	wantExact(t, tr)
}

// TestFileLeftInPlaceIsCountedOnce: a write that fails when its file has the
// name, and cannot remove it, leaves it to the next write of the block.
func TestFileLeftInPlaceIsCountedOnce(t *testing.T) {
	for name, again := range map[string]bool{"written again": true, "evicted": false} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			ns := tiertest.Namespace(t, "left")
			var broken atomic.Bool
			o := opts(t, root, func(c vfs.Call) vfs.Fault {
				block := strings.HasPrefix(c.Name, ns.Fingerprint().String()+"/")
				if broken.Load() && block && (c.Op == vfs.OpClose || c.Op == vfs.OpRemove) {
					return vfs.Fault{Err: unix.EIO, After: c.Op == vfs.OpClose}
				}
				return vfs.Fault{}
			})
			o.Capacity = 1 << 20
			tr := openClosing(t, o)
			if !tr.tmpfile {
				t.Skip("nameless files do not work here")
			}
			write(t, tr, ns, blocks(t, ns, 1, 1, 0)) // so that the namespace is stored
			items := blocks(t, ns, 0, 1, 0)
			broken.Store(true)
			tr.Write(t.Context(), ns, items)
			broken.Store(false)
			path := tr.blockPath(ns, items[0].Key)
			if _, err := os.Lstat(path); err != nil || items[0].Err == nil || known(tr, ns, items[0].Key) != tier.Absent {
				t.Fatalf("the file: %v; the write ends with %v; the block is %v", err, items[0].Err, known(tr, ns, items[0].Key))
			}
			wantExact(t, tr)
			if again {
				write(t, tr, ns, items)
				readable(t, tr, ns, items)
			} else {
				write(t, tr, ns, blocks(t, ns, 100, 200, 0))
				if _, err := os.Lstat(path); !os.IsNotExist(err) {
					t.Errorf("it is not evicted: %v", err)
				}
			}
			wantExact(t, tr)
		})
	}
}

// TestSmallFilesLeaveNothingUncounted: of a name whose file cannot be written or
// put in place, and whose file in tmp cannot be removed, nothing was counted.
func TestSmallFilesLeaveNothingUncounted(t *testing.T) {
	for _, op := range []vfs.Op{vfs.OpWrite, vfs.OpSync, vfs.OpRename} {
		for _, late := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v, done all the same: %v", op, late), func(t *testing.T) {
				root := t.TempDir()
				var broken atomic.Bool
				tr := openClosing(t, opts(t, root, func(c vfs.Call) vfs.Fault {
					if broken.Load() && (c.Op == op || c.Op == vfs.OpRemove && strings.HasPrefix(c.Name, nameTmp+"/")) {
						return vfs.Fault{Err: unix.EIO, After: late && c.Op == op}
					}
					return vfs.Fault{}
				}))
				ns := tiertest.Namespace(t, "strays")
				write(t, tr, ns, blocks(t, ns, 0, 3, 0))
				broken.Store(true)
				if err := tr.KeepName(t.Context(), "a name", ns); (err == nil) != (late && op == vfs.OpRename) {
					t.Errorf("error %v", err)
				}
				if used, sum := tr.Stats().UsedBytes, du(t, root); used < sum {
					t.Errorf("%d bytes are used, the files have %d", used, sum)
				}
				broken.Store(false)
				if err := tr.KeepName(t.Context(), "a name", ns); err != nil {
					t.Error(err)
				}
				write(t, tr, ns, blocks(t, ns, 10, 3, 0))
				if left, _ := filepath.Glob(filepath.Join(root, nameTmp, "*")); len(left) > 0 {
					t.Errorf("%d files are left", len(left))
				}
				wantExact(t, tr)
			})
		}
	}
}
