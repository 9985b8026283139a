package sweep

import (
	"context"
	"flag"
	"log/slog"
	"path"
	"runtime"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/vfs"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/fstier"
)

var manyFiles = flag.Int("files", map[bool]int{true: 5000, false: 100_000}[raceEnabled], "files of TestManyFiles")

// TestManyFiles opens the tier on more files than fit into memory with their
// bytes, which the file system makes up: it is open at once, indexes each, and
// tells what an index entry costs. Run it with -files 10000000.
func TestManyFiles(t *testing.T) {
	ns := namespace(t, sweepBytes)
	mem := vfs.NewMem(0)
	many := &vfs.Many{FS: mem, Dir: ns.Fingerprint().String(), Files: *manyFiles, Size: 4096 + 8192}
	open := func(fs vfs.FS) *fstier.Tier {
		tr, err := fstier.Open(context.Background(), fstier.Options{Root: "/mem", FS: fs, MinFree: -1, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		return tr
	}
	tr := open(mem)
	one := []tier.Item{filled(ns, sweepKeys(1, 2)[0])}
	if tr.Write(context.Background(), ns, one); one[0].Err != nil {
		t.Fatal(one[0].Err)
	}
	if err := tr.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	before := heap()
	begin := time.Now()
	tr = open(many)
	opened := time.Since(begin)
	<-tr.ScanDone()
	took, after := time.Since(begin), heap()
	s := tr.Stats()
	if s.Blocks != int64(*manyFiles)+1 || s.UsedBytes != 3*4096+s.Blocks*many.Size {
		t.Errorf("%d blocks of %d files are indexed, %d bytes used", s.Blocks, *manyFiles, s.UsedBytes)
	}
	for i := range 1000 {
		key, err := block.ParseKey(path.Base(many.Name(i * (*manyFiles / 1000))))
		if err != nil {
			t.Fatal(err)
		}
		var out [1]tier.Presence
		if tr.Known(ns, []block.Key{key}, out[:]); out[0] != tier.Present {
			t.Fatalf("file %d is %v", i, out[0])
		}
	}
	t.Logf("%d files: open after %v, indexed after %v, %.1f bytes a file", *manyFiles, opened, took, float64(after-before)/float64(*manyFiles))
	if err := tr.Close(context.Background()); err != nil {
		t.Error(err)
	}
}

// heap is the bytes of live objects.
func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
