package fstier

import (
	"math/rand/v2"
	"runtime"
	"sort"
	"testing"
)

// A lookup that waits for the lock gets it before the scan takes it once more.
func TestScanLocksAfterLookups(t *testing.T) {
	tr := openClosing(t, quiet(opts(t, t.TempDir(), nil)))
	<-tr.ScanDone()
	tr.lookups.Add(1)
	taken := make(chan struct{})
	go func() {
		tr.lockAfterLookups()
		defer tr.mu.Unlock()
		close(taken)
	}()
	for range 10_000 {
		runtime.Gosched()
	}
	select {
	case <-taken:
		t.Error("the scan took the lock while a lookup waited for it")
	default:
	}
	tr.lookups.Add(-1)
	<-taken
}

func TestScannedListSorts(t *testing.T) {
	var l scannedList
	r := rand.New(rand.NewPCG(1, 2))
	const n = 3*scannedChunk + 1
	for i := range n {
		l.add(scanned{r.Int64N(n), uint32(i)})
	}
	sort.Sort(&l)
	seen := make([]bool, n)
	for i := range n {
		s := l.at(i)
		if i > 0 && s.mtime > l.at(i-1).mtime {
			t.Fatalf("place %d is younger than the one before", i)
		}
		if seen[s.handle] {
			t.Fatalf("handle %d twice", s.handle)
		}
		seen[s.handle] = true
	}
}
