package sweep

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"path"
	"runtime"
	"runtime/metrics"
	"slices"
	"sort"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/vfs"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/fstier"
)

var manyFiles = flag.Int("files", map[bool]int{true: 5000, false: 1_000_000}[raceEnabled], "files of TestManyFiles")

// TestManyFiles opens the tier on more files than fit into memory with their
// bytes, which the file system makes up: it is open at once, indexes each, and
// holds up nobody meanwhile. It tells what an index entry costs, and how long
// lookups and the collector's pauses take while the index grows. Run it with
// -files 10000000 and -v: 64 bytes and a millisecond are the targets, on a machine
// that does nothing else. What fails the test is what no other load explains.
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
	begin, pauses := time.Now(), gcPauses()
	tr = open(many)
	opened := time.Since(begin)
	asked := ask(tr, ns, many)
	took, pause := time.Since(begin), longest(pauses, gcPauses())
	if len(asked) == 0 {
		t.Fatal("no lookup while the scan ran")
	}
	after := heap()
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
	t.Logf("meanwhile %d lookups of %d keys: %s; longest pause of the collector %v", len(asked), promptKeys, quantiles(asked), pause)
	if p99 := asked[len(asked)*99/100]; p99 > stallMax { // sorted by quantiles
		t.Errorf("one lookup in a hundred took %v or more", p99)
	}
	if per := float64(after-before) / float64(*manyFiles); per > bytesMax && *manyFiles >= 1_000_000 {
		t.Errorf("the index has %.1f bytes a file", per)
	}
	if err := tr.Close(context.Background()); err != nil {
		t.Error(err)
	}
}

// stallMax is far above what lookups take, for a machine with other things to do:
// there the longest of a run, and the longest pause, are the scheduler's.
const (
	stallMax = 250 * time.Millisecond
	bytesMax = 64 // of a file in the index
)

// promptKeys is the keys of a lookup that is timed.
const promptKeys = 200

// ask looks up prompts until the scan is over, some of whose blocks it has
// found and some not, and says how long each took.
func ask(tr *fstier.Tier, ns *block.Namespace, many *vfs.Many) (took []time.Duration) {
	keys, out := make([]block.Key, promptKeys), make([]tier.Presence, promptKeys)
	for n := 0; ; n++ {
		select {
		case <-tr.ScanDone():
			return took
		case <-time.After(200 * time.Microsecond):
		}
		for i := range keys {
			keys[i], _ = block.ParseKey(path.Base(many.Name((n*7919 + i*(many.Files/promptKeys)) % many.Files)))
		}
		begin := time.Now()
		tr.Known(ns, keys, out)
		took = append(took, time.Since(begin))
	}
}

// quantiles sorts durations and says what they are like.
func quantiles(d []time.Duration) string {
	slices.Sort(d)
	over := len(d) - sort.Search(len(d), func(i int) bool { return d[i] > time.Millisecond })
	return fmt.Sprintf("p50 %v, p99 %v, max %v, %d over 1 ms", d[len(d)/2], d[len(d)*99/100], d[len(d)-1], over)
}

// gcPauses counts the pauses for the collector since the process began, by
// their length.
func gcPauses() *metrics.Float64Histogram {
	s := []metrics.Sample{{Name: "/sched/pauses/total/gc:seconds"}}
	metrics.Read(s)
	return s[0].Value.Float64Histogram()
}

// longest is a bound of the longest pause between two readings.
func longest(before, after *metrics.Float64Histogram) time.Duration {
	for i := len(after.Counts) - 1; i >= 0; i-- {
		if after.Counts[i] > before.Counts[i] {
			return time.Duration(after.Buckets[i+1] * float64(time.Second))
		}
	}
	return 0
}

// heap is the bytes of live objects.
func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
