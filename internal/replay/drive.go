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

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/client"
	"github.com/terrace-kv/terrace/internal/content"
	"github.com/terrace-kv/terrace/internal/core"
)

// Bounds of the driver's waits. The node's own are shorter, so that its named
// ends are seen rather than these; a call takes as long as the client lets it.
const (
	lookupWait = 20 * time.Second
	flushWait  = 90 * time.Second
	stopGrace  = 5 * time.Second // for requests under way when the run is interrupted

	faultsShown = 10 // corrupt blocks that are named
)

// engine is what the driver needs of one engine's session; *client.Client, but
// for tests.
type engine interface {
	NewRequest(ctx context.Context, id string, p client.Params) (request, error)
	// View gives the bytes of a leased block.
	View(l client.Lease, fn func(b []byte) error) error
	// Status is the node's account of itself, as JSON.
	Status(ctx context.Context) ([]byte, error)
	Close() error
}

// request is one prompt under way; *client.Request, but for tests.
type request interface {
	LookupInto(ctx context.Context, keys [][]block.Key, o client.LookupOptions, a *client.Answer) error
	Store(ctx context.Context, group uint32, first int, keys []block.Key, fill func(i int, dst []byte) (uint64, error)) (client.Stored, error)
	Flush(ctx context.Context, wait time.Duration) (client.Flushed, error)
	Finish(ctx context.Context) error
}

// dialFunc greets the node at socket as an engine. Its error matches
// os.ErrNotExist or ECONNREFUSED where no node serves.
type dialFunc func(ctx context.Context, socket string, ns *block.Namespace, name string) (engine, error)

// linked is an engine that links package client.
type linked struct{ *client.Client }

func dial(ctx context.Context, socket string, ns *block.Namespace, name string) (engine, error) {
	c, err := client.Dial(ctx, client.Options{Socket: socket, Spec: ns.Spec(), Engine: name})
	if err != nil {
		return nil, err
	}
	return linked{c}, nil
}

func (l linked) NewRequest(ctx context.Context, id string, p client.Params) (request, error) {
	r, err := l.Client.NewRequest(ctx, id, p)
	if err != nil {
		return nil, err
	}
	return r, nil
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
	directory   *directory   // nil: there is one node

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
	requests, lookups, references, hits, primaryHits, loaded, stored, corrupt, refusals, dropped, unflushed atomic.Int64
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
		w   = &worker{driver: d, engine: d.engines[i], index: i, tally: t}
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
	index  int // of the engine
	tally  *tally

	keys   []block.Key
	answer client.Answer
	first  []client.Verdict // of the first answer
}

// request is the life of one prompt: lookup, load, store, finish.
func (w *worker) request(ctx context.Context, id string, req *Request) error {
	w.keys = appendKeys(w.keys[:0], &w.identity, req.Runs)
	q, err := w.engine.NewRequest(ctx, id, w.directory.hint(w.index, id, w.keys))
	if err != nil {
		return fmt.Errorf("new request: %w", err)
	}
	if len(w.keys) > 0 {
		hits, err := w.lookup(ctx, q)
		if err != nil {
			return fmt.Errorf("lookup: %w", err)
		}
		if err := w.load(id, hits); err != nil {
			return fmt.Errorf("load: %w", err)
		}
		if err := w.store(ctx, q, hits); err != nil {
			return fmt.Errorf("store: %w", err)
		}
	}
	if w.waitCascade {
		done, err := q.Flush(ctx, flushWait)
		if err != nil {
			return fmt.Errorf("flush: %w", err)
		}
		if !done.Done {
			w.totals.unflushed.Add(1)
		}
	}
	if err := q.Finish(ctx); err != nil {
		return fmt.Errorf("finish: %w", err)
	}
	w.directory.has(w.index, w.keys)
	w.totals.requests.Add(1)
	w.totals.references.Add(int64(req.Blocks))
	return nil
}

// lookup asks at once, as a scheduler would, and once more, waiting, when that
// answer is not final. It returns how many blocks of the prefix are readable.
func (w *worker) lookup(ctx context.Context, q request) (int, error) {
	start := time.Now()
	lists := [][]block.Key{w.keys}
	w.totals.lookups.Add(1)
	err := q.LookupInto(ctx, lists, client.LookupOptions{}, &w.answer)
	w.tally.lookup.add(time.Since(start))
	if err != nil {
		return 0, err
	}
	w.first = append(w.first[:0], w.answer.Groups[0].Verdicts...)
	if !w.answer.Final {
		w.totals.lookups.Add(1)
		if err := q.LookupInto(ctx, lists, client.LookupOptions{Wait: lookupWait}, &w.answer); err != nil {
			return 0, err
		}
	}
	for _, v := range w.answer.Groups[0].Verdicts {
		w.tally.verdicts[v]++
	}
	// Only what is leased may be read, whatever the token count says.
	hits := 0
	for ; int64(hits) < w.answer.Tokens/w.tokens; hits++ {
		if _, ok := w.answer.Lease(0, hits); !ok {
			break
		}
		if w.first[hits] == client.Hit {
			w.totals.primaryHits.Add(1)
		}
	}
	if hits > 0 {
		w.tally.ready.add(time.Since(start))
	}
	w.totals.hits.Add(int64(hits))
	return hits, nil
}

// load reads and checks every byte of the blocks that were hits.
func (w *worker) load(id string, hits int) error {
	fp := w.ns.Fingerprint()
	for i := range hits {
		lease, _ := w.answer.Lease(0, i)
		err := w.engine.View(lease, func(b []byte) error {
			at := content.Check(fp, w.keys[i], b)
			if at < 0 {
				return nil
			}
			w.totals.corrupt.Add(1)
			if w.shown.Add(1) <= faultsShown {
				w.fault(fmt.Sprintf("corrupt block: request %s, block %d, key %s, slot %d generation %d: first wrong byte at %d of %d",
					id, i, w.keys[i], lease.Slot, lease.Gen, at, len(b)))
			}
			return nil
		})
		if err != nil {
			return err
		}
		w.totals.loaded.Add(1)
	}
	return nil
}

// store stores the blocks from index from on in calls of what a reserve may
// carry, tail first, so that roots stay youngest. A call that is refused for
// lack of room is counted, and the others go on.
func (w *worker) store(ctx context.Context, q request, from int) error {
	fp := w.ns.Fingerprint()
	for end := len(w.keys); end > from; {
		first := max(from, end-core.ReserveKeysMax)
		keys := w.keys[first:end]
		done, err := q.Store(ctx, 0, first, keys, func(i int, dst []byte) (uint64, error) {
			content.Fill(fp, keys[i], dst)
			return client.Sum(dst), nil
		})
		w.totals.stored.Add(int64(done.Stored))
		w.totals.dropped.Add(int64(done.Dropped))
		switch {
		case refused(err):
			w.totals.refusals.Add(1)
		case err != nil:
			return err
		}
		end = first
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
