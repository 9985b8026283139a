package fstier

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/tiertest"
)

// smallDisk is a directory on a file system of 2 MiB.
func smallDisk(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=2m"); err != nil {
		t.Skipf("cannot mount a small tmpfs here: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	return dir
}

// Real ENOSPC: without a capacity or floor the tier goes on, the oldest blocks
// go, and the count stays exact. Namespaces come and go as well.
func TestFullDiskEvictsTheLeastRecentlyUsed(t *testing.T) {
	for mode, hook := range modes {
		t.Run(mode, func(t *testing.T) {
			root := filepath.Join(smallDisk(t), "root")
			if err := os.Mkdir(root, 0o700); err != nil {
				t.Fatal(err)
			}
			a, b := tiertest.Namespace(t, "a"), tiertest.Namespace(t, "b")
			tr := open(t, quiet(opts(t, root, hook)))
			defer closeTier(t, tr)
			for i := range 400 {
				write(t, tr, a, blocks(t, a, i, 1, uint32(i%4)))
				wantExact(t, tr)
			}
			write(t, tr, b, blocks(t, b, 0, 1, 0))
			if s := tr.Stats(); s.Evicted == 0 || s.Blocks < 20 {
				t.Errorf("%+v", s)
			}
			for i := 390; i < 400; i++ {
				readable(t, tr, a, blocks(t, a, i, 1, uint32(i%4)))
			}
			if known(tr, a, tiertest.Key(0, 0)) != tier.Absent {
				t.Error("the oldest block is there yet")
			}
			var wg sync.WaitGroup
			for w := range 8 {
				wg.Go(func() {
					for i := range 20 {
						it := blocks(t, a, 1000+100*w+i, 1, 1)
						tr.Write(context.Background(), a, it)
						if err := it[0].Err; err != nil && tier.CauseOf(err) != tier.CauseNoSpace {
							t.Error(err)
						}
					}
				})
			}
			wg.Wait()
			wantExact(t, tr)
		})
	}
}

// Where others have all the space, there is nothing to evict, and that is said.
func TestFullDiskOfOthersIsNoSpace(t *testing.T) {
	dir := smallDisk(t)
	ns := tiertest.Namespace(t, "a")
	tr := openClosing(t, quiet(opts(t, filepath.Join(dir, "root"), nil)))
	write(t, tr, ns, blocks(t, ns, 0, 1, 3))
	if err := tr.Delete(t.Context(), ns, keysOf(blocks(t, ns, 0, 1, 3))); err != nil {
		t.Fatal(err)
	}
	_ = os.WriteFile(filepath.Join(dir, "others"), make([]byte, 4<<20), 0o600) // as much as there is
	w := blocks(t, ns, 1, 1, 3)
	tr.Write(t.Context(), ns, w)
	if tier.CauseOf(w[0].Err) != tier.CauseNoSpace || tier.ClassOf(w[0].Err) != tier.ClassPermanent {
		t.Errorf("%v is %v", w[0].Err, tier.CauseOf(w[0].Err))
	}
	wantExact(t, tr)
	if err := os.Remove(filepath.Join(dir, "others")); err != nil {
		t.Fatal(err)
	}
	write(t, tr, ns, w)
}

// A floor that will refuse writes is said at the start, with the figures.
func TestFloorAboveTheDiskIsWarnedOf(t *testing.T) {
	dir := smallDisk(t)
	for _, tt := range []struct {
		floor int64
		want  []string
	}{
		{-1, nil},
		{100 << 10, nil},
		{2<<20 - 4096, []string{"writes are refused until", "lower min_free", "setting=min_free", "min_free_bytes=2093056", "free_bytes=", "missing_bytes=", dir}},
		{1 << 30, []string{"more than the whole file system", "set min_free to less", "min_free_bytes=1073741824", "file_system_bytes=2097152", dir}},
	} {
		var log bytes.Buffer
		tr := open(t, Options{Root: filepath.Join(dir, "root"), MinFree: tt.floor, Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))})
		<-tr.ScanDone()
		closeTier(t, tr)
		if tt.want == nil && log.Len() > 0 {
			t.Errorf("floor %d: %s", tt.floor, log.String())
		}
		for _, w := range tt.want {
			if !strings.Contains(log.String(), w) {
				t.Errorf("floor %d: the log does not say %q: %s", tt.floor, w, log.String())
			}
		}
	}
}
