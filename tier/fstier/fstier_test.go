package fstier

import (
	"context"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/vfs"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/tiertest"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv("FSTIER_TEST_WRITER"); dir != "" {
		writerMain(dir)
		return
	}
	goleak.VerifyTestMain(m)
}

// Modes of the tier that the machine's file system can show.
var modes = map[string]func(vfs.Call) vfs.Fault{
	"direct_tmpfile": func(vfs.Call) vfs.Fault { return vfs.Fault{} },
	"buffered": func(c vfs.Call) vfs.Fault {
		if c.Op == vfs.OpOpen && c.Flags&unix.O_DIRECT != 0 {
			return vfs.Fault{Err: unix.EINVAL}
		}
		return vfs.Fault{}
	},
	"rename": func(c vfs.Call) vfs.Fault {
		if c.Op == vfs.OpOpen && c.Flags&unix.O_TMPFILE == unix.O_TMPFILE {
			return vfs.Fault{Err: unix.EOPNOTSUPP}
		}
		return vfs.Fault{}
	},
}

// opts are options for a test: no floor, a quiet log, and a hook.
func opts(tb testing.TB, root string, hook func(vfs.Call) vfs.Fault) Options {
	tb.Helper()
	o := Options{Root: root, MinFree: -1, Logger: slog.New(slog.NewTextHandler(testLog{tb}, nil))}
	if hook != nil {
		under, err := vfs.OpenRoot(root)
		if err != nil {
			tb.Fatal(err)
		}
		o.FS = &vfs.Faulty{FS: under, Hook: hook}
	}
	return o
}

type testLog struct{ testing.TB }

func (l testLog) Write(b []byte) (int, error) {
	l.Log(strings.TrimSpace(string(b)))
	return len(b), nil
}

func open(tb testing.TB, o Options) *Tier {
	tb.Helper()
	t, err := Open(context.Background(), o)
	if err != nil {
		tb.Fatal(err)
	}
	return t
}

// openClosing opens a tier that the end of the test closes, and waits for the
// scan.
func openClosing(tb testing.TB, o Options) *Tier {
	tb.Helper()
	t := open(tb, o)
	tb.Cleanup(func() { closeTier(tb, t) })
	<-t.ScanDone()
	return t
}

func closeTier(tb testing.TB, t *Tier) {
	tb.Helper()
	if err := t.Close(context.Background()); err != nil && err != tier.ErrClosed {
		tb.Errorf("close: %v", err)
	}
}

// du is the sum of st_blocks*512 of the regular files under a root.
func du(tb testing.TB, root string) int64 {
	tb.Helper()
	var sum int64
	err := filepath.WalkDir(root, func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			if os.IsNotExist(err) {
				return nil
			}
			return err
		}
		if !d.Type().IsRegular() {
			return nil
		}
		info, err := d.Info()
		if err != nil {
			return nil // removed meanwhile
		}
		sum += info.Sys().(*syscall.Stat_t).Blocks * 512
		return nil
	})
	if err != nil {
		tb.Fatal(err)
	}
	return sum
}

// wantExact wants that the tier's count is what the walk gives, and that the
// index and its lists are whole.
func wantExact(tb testing.TB, t *Tier) {
	tb.Helper()
	if got, want := t.Stats().UsedBytes, du(tb, t.o.Root); got != want {
		tb.Errorf("used bytes are %d, the files have %d", got, want)
	}
	checkIndex(tb, t)
}

func checkIndex(tb testing.TB, t *Tier) {
	tb.Helper()
	t.mu.Lock()
	defer t.mu.Unlock()
	x := &t.mu.index
	var listed int64
	n := 0
	foreigns := 0
	for i, l := range []list{x.young, x.old, x.foreign} {
		prev := uint32(0)
		for h := l.front; h != 0; h = x.at(h).next {
			e := x.at(h)
			key := e.key()
			if e.prev != prev || e.flags&flagBusy != 0 || (e.flags&flagOld != 0) != (i == 1) || (e.flags&flagForeign != 0) != (i == 2) || x.find(e.ns, &key) != h {
				tb.Fatalf("list %d: entry %d %+v is not where it belongs", i, h, *e)
			}
			prev = h
			n++
			if i == 2 {
				foreigns++
			} else {
				listed += e.bytes()
			}
		}
		if l.back != prev {
			tb.Fatalf("list %d ends in %d, not %d", i, l.back, prev)
		}
	}
	if foreigns != x.foreigns {
		tb.Errorf("%d entries are other nodes', counted are %d", foreigns, x.foreigns)
	}
	if n != x.table.Len() || n != x.slab.Len() || listed != x.listed {
		tb.Errorf("%d entries of %d bytes are listed; table has %d, slab %d, counted are %d", n, listed, x.table.Len(), x.slab.Len(), x.listed)
	}
	if in := t.mu.account.inflight; in != 0 {
		tb.Errorf("%d bytes are reserved and nothing is under way", in)
	}
}

// blocks makes filled items of a group.
func blocks(tb testing.TB, ns *block.Namespace, first, n int, group uint32) []tier.Item {
	tb.Helper()
	items := make([]tier.Item, n)
	for i := range items {
		items[i] = tier.Item{Key: tiertest.Key(first+i, group), Buf: tiertest.Buffer(tb, ns.BlockBytes(group))}
		tiertest.Fill(ns, &items[i])
	}
	return items
}

// write stores blocks one call each and wants success.
func write(tb testing.TB, t *Tier, ns *block.Namespace, items []tier.Item) {
	tb.Helper()
	for i := range items {
		tiertest.Fill(ns, &items[i])
		t.Write(context.Background(), ns, items[i:i+1])
		if items[i].Err != nil {
			tb.Fatalf("write of item %d: %v", i, items[i].Err)
		}
	}
}

// readable wants that all items read back right.
func readable(tb testing.TB, t *Tier, ns *block.Namespace, items []tier.Item) {
	tb.Helper()
	for i := range items {
		clear(items[i].Buf)
	}
	t.Read(context.Background(), ns, items)
	for i := range items {
		if err := tiertest.Check(ns, &items[i]); err != nil {
			tb.Errorf("read of item %d: %v", i, err)
		}
	}
}

func known(t *Tier, ns *block.Namespace, key block.Key) tier.Presence {
	out := make([]tier.Presence, 1)
	t.Known(ns, []block.Key{key}, out)
	return out[0]
}

func TestConformance(t *testing.T) {
	for name, hook := range modes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			last := map[string]*Tier{}
			tiertest.Run(t, tiertest.Factory{Durable: true, Open: func(tb testing.TB, store string) tier.Tier {
				o := opts(tb, store, hook)
				o.Logger = slog.New(slog.DiscardHandler)
				tr := open(tb, o)
				want := map[string]string{"direct_tmpfile": "O_DIRECT, O_TMPFILE", "buffered": "buffered, O_TMPFILE", "rename": "O_DIRECT, rename"}[name]
				if m := tr.Stats().Mode; !strings.HasPrefix(m, want) {
					tb.Logf("mode is %q, meant is %q", m, want)
				}
				last[store] = tr
				tb.Cleanup(func() {
					if tb.Failed() || last[store] != tr {
						return
					}
					if got, want := tr.Stats().UsedBytes, du(tb, store); tr.Stats().ScanDone && got != want {
						tb.Errorf("used bytes are %d, the files have %d", got, want)
					}
				})
				return tr
			}})
		})
	}
}
