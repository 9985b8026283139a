package objtier

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/s3"
)

const (
	listTimeout = time.Minute // of one request; the client's own bounds are shorter but for a body that trickles
	retryFirst  = time.Second
	retryLast   = time.Minute
)

// lister reads one page of a listing.
type lister interface {
	List(ctx context.Context, o s3.ListOptions) (s3.Page, error)
}

// pages is a listing that goes on where it failed.
type pages struct {
	list lister
	o    s3.ListOptions
	last string // key of the last object
	over bool
}

// next reads a page. After an error it is called again for the same one: by its
// token, or from its last key on if it may be the token that was refused.
func (g *pages) next(ctx context.Context) (s3.Page, error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	page, err := g.list.List(ctx, g.o)
	if err != nil {
		if g.o.Token != "" && g.last != "" && hasKind(err, s3.KindOther) {
			g.o.Token, g.o.After = "", g.last
		}
		return s3.Page{}, err
	}
	if n := len(page.Objects); n > 0 {
		g.last = page.Objects[n-1].Key
	}
	g.o.Token = page.Next
	g.over = page.Next == ""
	return page, nil
}

// retries are waits that double from retryFirst to retryLast, each by chance
// between half of it and all of it, so that nodes do not come back together.
type retries struct{ wait time.Duration }

func (r *retries) next() time.Duration {
	r.wait = min(max(retryFirst, 2*r.wait), retryLast)
	return r.wait/2 + rand.N(r.wait/2)
}

// pause waits, and says whether ctx lives on.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// every is the time between requests at a rate.
func every(perSecond float64) time.Duration { return time.Duration(float64(time.Second) / perSecond) }

// warmer lists the blocks of namespaces, one namespace after the other, and
// tells the presence what is there. It stops when the presence is full: more
// would only drive out the first.
//
// A key that it has not met stays Unknown when it is through, for another node
// may store it, or have stored it behind the listing's back. The first lookup
// then costs a HEAD.
//
// It has one goroutine, from newWarmer to close, which waits for it.
type warmer struct {
	list     lister
	presence *presence
	layout   layout
	every    time.Duration // between requests; 0: there is no listing
	log      *slog.Logger

	wake  chan struct{} // of capacity 1
	stop  context.CancelFunc
	loops sync.WaitGroup

	mu struct {
		sync.Mutex
		queue    []*block.Namespace // to be listed; the first one is being listed
		begun    map[block.Fingerprint]struct{}
		blocks   int64
		foreign  int64 // objects that are no blocks
		unusable int64 // blocks of another length than the namespace says
		full     bool
		err      string
	}
}

// newWarmer makes a warmer of perSecond requests; a negative number is none.
func newWarmer(list lister, p *presence, l layout, perSecond float64, log *slog.Logger) *warmer {
	w := &warmer{list: list, presence: p, layout: l, log: log, wake: make(chan struct{}, 1)}
	w.mu.begun = map[block.Fingerprint]struct{}{}
	ctx, stop := context.WithCancel(context.Background())
	w.stop = stop
	if perSecond > 0 {
		w.every = every(perSecond)
		w.loops.Go(func() { w.loop(ctx) })
	}
	return w
}

// start lets a namespace be listed, unless it was before. It does not wait.
func (w *warmer) start(ns *block.Namespace) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, ok := w.mu.begun[ns.Fingerprint()]; ok || w.every == 0 || len(w.mu.begun) >= spacesMax {
		return
	}
	w.mu.begun[ns.Fingerprint()] = struct{}{}
	w.mu.queue = append(w.mu.queue, ns)
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// close ends the listing and waits for it.
func (w *warmer) close() {
	w.stop()
	w.loops.Wait()
}

// progress tells whether all that was to be listed has been, how many blocks
// were found, and why the listing does not go on at the moment.
func (w *warmer) progress() (done bool, blocks int64, err string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.mu.queue) == 0, w.mu.blocks, w.mu.err
}

// full says that the listing stopped because the index was full.
func (w *warmer) full() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.mu.full
}

func (w *warmer) loop(ctx context.Context) {
	for {
		w.mu.Lock()
		var ns *block.Namespace
		if len(w.mu.queue) > 0 {
			ns = w.mu.queue[0]
		}
		w.mu.Unlock()
		if ns == nil {
			select {
			case <-w.wake:
				continue
			case <-ctx.Done():
				return
			}
		}
		if !w.namespace(ctx, ns) {
			return
		}
		w.mu.Lock()
		w.mu.queue = w.mu.queue[1:]
		w.mu.Unlock()
		if !pause(ctx, w.every) {
			return
		}
	}
}

// namespace lists one namespace to its end, or until the index is full. It says
// whether ctx lives on.
func (w *warmer) namespace(ctx context.Context, ns *block.Namespace) bool {
	fp := ns.Fingerprint()
	all := pages{list: w.list, o: s3.ListOptions{Prefix: w.layout.dir(fp)}}
	var again retries
	for {
		then := w.presence.mark()
		page, err := all.next(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return false
			}
			if wait := again.next(); !w.failed(ctx, ns, err, wait) {
				return false
			}
			continue
		}
		again = retries{}
		found, foreign, unusable := w.layout.blocks(fp, page, func(key block.Key) int64 {
			if ns.BlockBytes(key.Group()) == 0 {
				return 0
			}
			return objectBytes(ns, key)
		})
		full := w.presence.listed(fp, found, then)
		w.mu.Lock()
		w.mu.err = ""
		w.mu.blocks += int64(len(found))
		w.mu.foreign += int64(foreign)
		w.mu.unusable += int64(unusable)
		if full && !w.mu.full {
			w.mu.full = true
			w.log.Warn("the index is full before all blocks of the bucket were listed; others are asked for one by one",
				"namespace", fp, "blocks", w.mu.blocks, "index_keys", w.presence.keys)
		} else if all.over && !full {
			w.log.Info("listed a namespace", "namespace", fp, "blocks_in_all", w.mu.blocks, "foreign_objects", w.mu.foreign, "of_wrong_length", w.mu.unusable)
		}
		w.mu.Unlock()
		if all.over || full {
			return true
		}
		if !pause(ctx, w.every) {
			return false
		}
	}
}

// failed tells of a page that could not be read and waits.
func (w *warmer) failed(ctx context.Context, ns *block.Namespace, err error, wait time.Duration) bool {
	w.mu.Lock()
	first := w.mu.err == ""
	w.mu.err = err.Error()
	w.mu.Unlock()
	if first {
		w.log.Warn("the blocks of a namespace cannot be listed; trying again", "namespace", ns.Fingerprint(), "err", err, "retry_after", wait)
	}
	return pause(ctx, wait)
}

// blocks sorts a page of a namespace's listing: blocks, objects that are none,
// and blocks of another length than want says, which is 0 for a group that
// there is not.
func (l layout) blocks(fp block.Fingerprint, page s3.Page, want func(block.Key) int64) (found []sized, foreign, unusable int) {
	found = make([]sized, 0, len(page.Objects))
	for _, o := range page.Objects {
		key, ok := l.parse(fp, o.Key)
		if !ok {
			foreign++
			continue
		}
		switch bytes := want(key); {
		case bytes == 0:
			foreign++
		case bytes != o.Size:
			unusable++
		default:
			found = append(found, sized{key, o.Size})
		}
	}
	return found, foreign, unusable
}
