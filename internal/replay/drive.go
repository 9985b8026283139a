package replay

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/minio/crc64nvme"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/content"
	"github.com/terrace-kv/terrace/internal/core"
)

// Bounds of the driver's waits. The node's own are shorter, so that its named
// ends are seen rather than these.
const (
	lookupWait = 20 * time.Second
	flushWait  = 90 * time.Second
	callSpare  = 10 * time.Second // beyond the wait that a call asks for
	stopGrace  = 5 * time.Second  // for requests under way when the run is interrupted

	faultsShown = 10 // corrupt blocks that are named
)

// engine is what the driver needs of one engine's session.
type engine interface {
	NewRequest(ctx context.Context, id string) error
	// Lookup judges keys of group 0; wait 0 answers at once. out is reused.
	Lookup(ctx context.Context, id string, keys []block.Key, wait time.Duration, out *core.Answer) error
	Reserve(ctx context.Context, id string, first int, keys []block.Key, out []core.Grant) ([]core.Grant, error)
	Commit(ctx context.Context, id string, fills []core.Fill, out []core.FillStatus) ([]core.FillStatus, error)
	Finish(ctx context.Context, id string) error
	Flush(ctx context.Context, id string, wait time.Duration) (core.Flushed, error)
	// Status is the node's account of itself, as JSON.
	Status(ctx context.Context) ([]byte, error)
	// Block is the bytes of a leased or granted slot, valid until finish.
	Block(s core.Slot) []byte
	Close() error
}

// driver is one run with bytes.
type driver struct {
	src         Source
	identity    [sha256.Size]byte // of the trace
	ns          *block.Namespace
	engines     []engine
	speed       float64
	waitCascade bool
	blockBytes  int
	tokens      int64
	fault       func(string) // told of what must not happen; any goroutine
	total       int64        // requests, 0 if not known; for progress

	mu struct {
		sync.Mutex
		next  int           // number of the next request
		first time.Duration // arrival of the first one
		err   error         // of the source; io.EOF at its end
	}
	start  time.Time    // set before run
	shown  atomic.Int64 // corrupt blocks named so far
	totals totals
}

// totals are counted by all engines.
type totals struct {
	requests, references, hits, primaryHits, loaded, stored, corrupt, refusals, dropped, unflushed atomic.Int64
}

// tally is what one engine counts alone.
type tally struct {
	lookup, ready histogram
	verdicts      [256]int64
}

// run replays until the source ends, ctx does, or something fails, and returns
// what was measured in any case. When ctx ends, requests under way get
// stopGrace to finish, so that what is reported was really done.
func (d *driver) run(ctx context.Context) (*tally, error) {
	hard, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	grace := context.AfterFunc(ctx, func() {
		t := time.NewTimer(stopGrace)
		defer t.Stop()
		select {
		case <-t.C:
			cancel(fmt.Errorf("requests under way did not end within %s of the interrupt", stopGrace))
		case <-hard.Done():
		}
	})
	defer grace()
	soft, stop := context.WithCancel(ctx)
	defer stop()

	tallies := make([]*tally, len(d.engines))
	errs := make([]error, len(d.engines))
	var wg sync.WaitGroup
	for i := range d.engines {
		tallies[i] = &tally{}
		wg.Go(func() {
			if errs[i] = d.work(soft, hard, i, tallies[i]); errs[i] != nil {
				stop() // the others finish what they have begun
			}
		})
	}
	wg.Wait()
	for _, t := range tallies[1:] {
		tallies[0].lookup.merge(&t.lookup)
		tallies[0].ready.merge(&t.ready)
		for v, n := range t.verdicts {
			tallies[0].verdicts[v] += n
		}
	}
	return tallies[0], errors.Join(errs...)
}

// deal gives the next request of the trace and its number.
func (d *driver) deal(req *Request) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.err != nil {
		return 0, io.EOF // the error itself is told once
	}
	if d.mu.err = d.src.Next(req); d.mu.err != nil {
		return 0, d.mu.err
	}
	if d.mu.next == 0 {
		d.mu.first = req.Time
	}
	d.mu.next++
	return d.mu.next, nil
}

// work is one engine: it takes requests in order until there are none.
func (d *driver) work(soft, hard context.Context, i int, t *tally) error {
	var (
		req Request
		w   = &worker{driver: d, engine: d.engines[i], tally: t}
	)
	for soft.Err() == nil {
		n, err := d.deal(&req)
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if d.speed > 0 && !d.await(soft, req.Time) {
			return nil
		}
		if err := w.request(hard, fmt.Sprintf("replay-%d", n), &req); err != nil {
			return fmt.Errorf("engine %d, request %d: %w", i, n, err)
		}
	}
	return nil
}

// await sleeps until a request is due, and says whether it came to that.
func (d *driver) await(ctx context.Context, due time.Duration) bool {
	d.mu.Lock()
	first := d.mu.first
	d.mu.Unlock()
	wait := time.Until(d.start.Add(time.Duration(float64(due-first) / d.speed)))
	if wait <= 0 {
		return true
	}
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// worker has the memory that one engine reuses from request to request.
type worker struct {
	*driver
	engine engine
	tally  *tally

	keys     []block.Key
	answer   core.Answer
	first    []core.Verdict // of the first answer
	grants   []core.Grant
	fills    []core.Fill
	statuses []core.FillStatus
}

// call runs one call of the protocol under a bound.
func call(ctx context.Context, wait time.Duration, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, wait+callSpare)
	defer cancel()
	return f(ctx)
}

// request is the life of one prompt: lookup, load, store, finish.
func (w *worker) request(ctx context.Context, id string, req *Request) error {
	w.keys = appendKeys(w.keys[:0], &w.identity, req.Runs)
	if err := call(ctx, 0, func(ctx context.Context) error { return w.engine.NewRequest(ctx, id) }); err != nil {
		return fmt.Errorf("new request: %w", err)
	}
	hits := 0
	if len(w.keys) > 0 {
		var err error
		if hits, err = w.lookup(ctx, id); err != nil {
			return fmt.Errorf("lookup: %w", err)
		}
		w.load(id, hits)
		if err := w.store(ctx, id, hits); err != nil {
			return fmt.Errorf("store: %w", err)
		}
	}
	if w.waitCascade {
		var done core.Flushed
		err := call(ctx, flushWait, func(ctx context.Context) (err error) {
			done, err = w.engine.Flush(ctx, id, flushWait)
			return err
		})
		if err != nil {
			return fmt.Errorf("flush: %w", err)
		}
		if !done.Done {
			w.totals.unflushed.Add(1)
		}
	}
	if err := call(ctx, 0, func(ctx context.Context) error { return w.engine.Finish(ctx, id) }); err != nil {
		return fmt.Errorf("finish: %w", err)
	}
	w.totals.requests.Add(1)
	w.totals.references.Add(int64(req.Blocks))
	return nil
}

// lookup asks at once, as a scheduler would, and once more, waiting, when that
// answer is not final. It returns how many blocks of the prefix are readable.
func (w *worker) lookup(ctx context.Context, id string) (int, error) {
	start := time.Now()
	err := call(ctx, 0, func(ctx context.Context) error { return w.engine.Lookup(ctx, id, w.keys, 0, &w.answer) })
	w.tally.lookup.add(time.Since(start))
	if err != nil {
		return 0, err
	}
	g := &w.answer.Groups[0]
	w.first = append(w.first[:0], g.Verdicts...)
	if !w.answer.Final {
		err := call(ctx, lookupWait, func(ctx context.Context) error { return w.engine.Lookup(ctx, id, w.keys, lookupWait, &w.answer) })
		if err != nil {
			return 0, err
		}
	}
	g = &w.answer.Groups[0]
	for _, v := range g.Verdicts {
		w.tally.verdicts[v]++
	}
	// Only what is leased may be read, whatever the token count says.
	hits := 0
	for hits < len(g.Leases) && g.First == 0 && int64(hits) < w.answer.Tokens/w.tokens && g.Verdicts[hits] == core.Hit {
		if w.first[hits] == core.Hit {
			w.totals.primaryHits.Add(1)
		}
		hits++
	}
	if hits > 0 {
		w.tally.ready.add(time.Since(start))
	}
	w.totals.hits.Add(int64(hits))
	return hits, nil
}

// load reads and checks every byte of the blocks that were hits.
func (w *worker) load(id string, hits int) {
	leases := w.answer.Groups[0].Leases
	fp := w.ns.Fingerprint()
	for i := range hits {
		at := content.Check(fp, w.keys[i], w.engine.Block(leases[i].Slot)[:w.blockBytes])
		if at < 0 {
			continue
		}
		w.totals.corrupt.Add(1)
		if w.shown.Add(1) <= faultsShown {
			w.fault(fmt.Sprintf("corrupt block: request %s, block %d, key %s, slot %d generation %d: first wrong byte at %d of %d",
				id, i, w.keys[i], leases[i].Slot, leases[i].Gen, at, w.blockBytes))
		}
	}
	w.totals.loaded.Add(int64(hits))
}

// store stores the blocks from index from on, tail first, so that roots stay
// youngest. A call that is refused for lack of room is counted; the others go
// on.
func (w *worker) store(ctx context.Context, id string, from int) error {
	fp := w.ns.Fingerprint()
	for end := len(w.keys); end > from; {
		first := max(from, end-core.ReserveKeysMax)
		keys := w.keys[first:end]
		end = first
		err := call(ctx, 0, func(ctx context.Context) (err error) {
			w.grants, err = w.engine.Reserve(ctx, id, first, keys, w.grants[:0])
			return err
		})
		if refused(err) {
			w.totals.refusals.Add(1)
			continue
		}
		if err != nil {
			return fmt.Errorf("reserve: %w", err)
		}
		w.fills = w.fills[:0]
		for i, g := range w.grants {
			if g.Status != core.Granted {
				continue
			}
			buf := w.engine.Block(g.Slot)[:w.blockBytes]
			content.Fill(fp, keys[i], buf)
			w.fills = append(w.fills, core.Fill{Slot: g.Slot, Gen: g.Gen, Sum: crc64nvme.Checksum(buf), HasSum: true})
		}
		if len(w.fills) == 0 {
			continue
		}
		err = call(ctx, 0, func(ctx context.Context) (err error) {
			w.statuses, err = w.engine.Commit(ctx, id, w.fills, w.statuses[:0])
			return err
		})
		if err != nil {
			return fmt.Errorf("commit: %w", err)
		}
		for _, s := range w.statuses {
			if s == core.FillOK {
				w.totals.stored.Add(1)
			} else {
				w.totals.dropped.Add(1)
			}
		}
	}
	return nil
}

// refused says that a reserve found no room, which is an answer and no fault.
func refused(err error) bool {
	return errors.Is(err, core.ErrNoRoom) || errors.Is(err, core.ErrTooLarge)
}

// look is the driver's state for the progress line.
func (d *driver) look() snapshot {
	return snapshot{
		requests: d.totals.requests.Load(), total: d.total,
		references: d.totals.references.Load(), hits: d.totals.hits.Load(),
		bytes:   (d.totals.loaded.Load() + d.totals.stored.Load()) * int64(d.blockBytes),
		elapsed: time.Since(d.start),
	}
}
