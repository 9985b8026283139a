package replay

import (
	"fmt"
	"io"
	"sort"

	"github.com/terrace-kv/terrace/block"
)

// Limits of a trace that is held in memory as a whole.
const (
	runsMax = 1 << 26 // 8 bytes each
	keysMax = 1 << 25 // 36 bytes each
)

// trace is a whole trace in memory: runs for references, and each distinct
// block's key once, ordered by id. It is immutable, so that the points of a
// sweep share it.
type trace struct {
	info Info
	size Size
	keys []block.Key
	runs []keyRun
	ends []int // requests' ends in runs
}

// keyRun is a run of ids as a range of trace.keys.
type keyRun struct {
	at    uint32
	count uint32
}

// load reads s to its end.
func load(s Source) (*trace, error) {
	t := &trace{info: s.Info()}
	var (
		req  Request
		runs []Run
	)
	for {
		err := s.Next(&req)
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, err
		}
		if len(runs)+len(req.Runs) > runsMax {
			return nil, fmt.Errorf("%s: request %d is beyond what a dry run holds in memory (%d runs of ids): set --requests lower", t.info.Name, t.size.Requests+1, runsMax)
		}
		runs = append(runs, req.Runs...)
		t.ends = append(t.ends, len(runs))
		t.size.Requests++
		t.size.References += int64(req.Blocks)
		t.size.Largest = max(t.size.Largest, req.Blocks)
	}
	if t.size.Requests == 0 {
		return nil, fmt.Errorf("%s: the trace has no requests", t.info.Name)
	}

	// Merge the runs to spans of ids that are used: each run then lies in one
	// span, and so is a range of keys.
	sorted := append([]Run(nil), runs...)
	sortRuns(sorted)
	type span struct {
		first, end uint64
		at         int
	}
	var spans []span
	for _, r := range sorted {
		end := r.First + uint64(r.Count)
		if n := len(spans); n > 0 && r.First <= spans[n-1].end {
			spans[n-1].end = max(spans[n-1].end, end)
		} else {
			spans = append(spans, span{first: r.First, end: end})
		}
	}
	distinct := 0
	for i := range spans {
		spans[i].at = distinct
		distinct += int(min(spans[i].end-spans[i].first, keysMax+1))
		if distinct > keysMax {
			return nil, fmt.Errorf("%s: the trace has more than %d distinct blocks, beyond what a dry run holds in memory: set --requests lower", t.info.Name, keysMax)
		}
	}
	t.keys = make([]block.Key, 0, distinct)
	for _, s := range spans {
		for first := s.first; first < s.end; first += 1 << 30 {
			t.keys = appendKeys(t.keys, &t.info.Identity, []Run{{first, uint32(min(s.end-first, 1<<30))}})
		}
	}
	t.runs = make([]keyRun, len(runs))
	for i, r := range runs {
		s := &spans[sort.Search(len(spans), func(i int) bool { return spans[i].end > r.First })]
		t.runs[i] = keyRun{uint32(s.at + int(r.First-s.first)), r.Count}
	}
	return t, nil
}

// appendRequest appends the keys of request i.
func (t *trace) appendRequest(dst []block.Key, i int) []block.Key {
	from := 0
	if i > 0 {
		from = t.ends[i-1]
	}
	for _, r := range t.runs[from:t.ends[i]] {
		dst = append(dst, t.keys[r.at:r.at+r.count]...)
	}
	return dst
}
