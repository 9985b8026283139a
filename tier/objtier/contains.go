package objtier

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/s3"
	"github.com/terrace-kv/terrace/tier"
)

// header asks for an object. It fails with tier.ErrNotFound, or s3.KindNotFound,
// if there is none.
type header interface {
	Head(ctx context.Context, key string) (s3.Object, error)
}

// asker finds out which blocks there are, with one HEAD for each that the
// presence does not know. It owns no goroutine between calls.
type asker struct {
	head     header
	presence *presence
	layout   layout
	unusable atomic.Int64 // objects that were found with another length than a block has

	mu struct {
		sync.Mutex
		flights map[flightKey]*flight // HEADs under way: at most headsMax a call
	}
}

type flightKey struct {
	fp  block.Fingerprint
	key block.Key
}

// flight is one HEAD, which several calls may wait for. found and err are
// written before over is closed.
type flight struct {
	over  chan struct{}
	found bool
	err   error
}

// A HEAD that fails in a way that may pass is made again by the call itself: one
// of the many keys of a call often fails where one request in twenty does, and
// the call would be a bad one, and all its keys unknown.
const (
	askTries = 3
	askPause = 20 * time.Millisecond // about, before the second; longer before later ones
)

// errLeft is the error of a flight whose own call has ended. Others ask again.
var errLeft = errors.New("the call that asked has ended")

func newAsker(head header, p *presence, l layout) *asker {
	a := &asker{head: head, presence: p, layout: l}
	a.mu.flights = map[flightKey]*flight{}
	return a
}

// contains is tier.Tier's Contains. At most headsMax requests are under way for
// one call, none when it has returned, and what they told is in the presence
// also if another one failed. The error is the first failure that did not pass,
// as the header gave it.
func (a *asker) contains(ctx context.Context, ns *block.Namespace, keys []block.Key, found []bool) error {
	have := make([]tier.Presence, len(keys))
	a.presence.known(ns.Fingerprint(), keys, have)
	var ask []int
	for i := range keys {
		exists := ns.BlockBytes(keys[i].Group()) > 0
		found[i] = exists && have[i] == tier.Present
		if exists && have[i] == tier.Unknown {
			ask = append(ask, i)
		}
	}
	if len(ask) == 0 {
		return nil
	}
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	var next, answered atomic.Int64
	var wg sync.WaitGroup
	for range min(headsMax, len(ask)) {
		wg.Go(func() {
			for n := next.Add(1) - 1; n < int64(len(ask)) && ctx.Err() == nil; n = next.Add(1) - 1 {
				i := ask[n]
				ok, err := a.one(ctx, ns, keys[i])
				for try := 1; try < askTries && tier.ClassOf(err) == tier.ClassRetryable && pause(ctx, askPause/2+rand.N(time.Duration(try)*askPause)); try++ {
					ok, err = a.one(ctx, ns, keys[i])
				}
				if err != nil {
					fail(err)
					return
				}
				found[i] = ok
				answered.Add(1)
			}
		})
	}
	wg.Wait()
	if answered.Load() == int64(len(ask)) {
		return nil // though ctx may have ended since
	}
	return context.Cause(ctx)
}

// one asks for one key, or waits for who does already.
func (a *asker) one(ctx context.Context, ns *block.Namespace, key block.Key) (bool, error) {
	id := flightKey{ns.Fingerprint(), key}
	var have [1]tier.Presence
	for {
		// Another call may have found out, or this one, of a key given twice.
		if a.presence.known(id.fp, []block.Key{key}, have[:]); have[0] != tier.Unknown {
			return have[0] == tier.Present, nil
		}
		a.mu.Lock()
		f, under := a.mu.flights[id]
		if !under {
			f = &flight{over: make(chan struct{})}
			a.mu.flights[id] = f
		}
		a.mu.Unlock()
		if !under {
			err := a.fly(ctx, ns, key, f)
			return f.found, err
		}
		select {
		case <-f.over:
			if f.err != errLeft {
				return f.found, f.err
			}
		case <-ctx.Done():
			return false, ctx.Err()
		}
	}
}

// fly makes the request of a flight. The error is the caller's own.
func (a *asker) fly(ctx context.Context, ns *block.Namespace, key block.Key, f *flight) error {
	fp := ns.Fingerprint()
	then := a.presence.mark()
	o, err := a.head.Head(ctx, a.layout.block(fp, key))
	switch {
	case notFound(err):
		err = nil
		a.presence.goneSince(fp, key, then)
	case err != nil:
	case o.Size == objectBytes(ns, key):
		f.found = true
		a.presence.seen(fp, key, o.Size, then)
	default:
		a.unusable.Add(1)
		a.presence.goneSince(fp, key, then)
	}
	if f.err = err; err != nil && ctx.Err() != nil {
		f.err = errLeft
	}
	a.mu.Lock()
	delete(a.mu.flights, flightKey{fp, key})
	a.mu.Unlock()
	close(f.over)
	return err
}

// objectBytes is how long the object of a block is.
func objectBytes(ns *block.Namespace, key block.Key) int64 {
	return headSize + int64(ns.BlockBytes(key.Group()))
}

// hasKind says whether the store's answer, or the lack of one, was of a kind.
func hasKind(err error, kind s3.Kind) bool {
	var e *s3.Error
	return errors.As(err, &e) && e.Kind == kind
}

func notFound(err error) bool {
	return errors.Is(err, tier.ErrNotFound) || hasKind(err, s3.KindNotFound)
}
