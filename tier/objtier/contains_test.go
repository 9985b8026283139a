package objtier

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/s3"
	"github.com/terrace-kv/terrace/internal/s3/s3test"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/tiertest"
)

const testBucket = "blocks"

// testStore is a store with a bucket, and a client of it without sockets.
func testStore(t *testing.T) (*s3test.Server, *s3.Client) {
	t.Helper()
	s := s3test.New().MakeBucket(testBucket)
	c, err := s3.New(s3.Options{Bucket: testBucket, Endpoint: "store", Scheme: "http", AccessKey: s3test.AccessKey, SecretKey: "secret", RoundTripper: s.RoundTripper()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return s, c
}

// smallNamespace has blocks of 100 and 40 bytes in its two groups.
func smallNamespace(t testing.TB, model string) *block.Namespace {
	t.Helper()
	ns, err := block.NewNamespace(block.Spec{Model: model, DType: "bytes", Layout: "none", HashAlgorithm: "sha256", HashLength: 32,
		Groups: []block.Group{{Kind: block.KindFull, TokensPerBlock: 16, BlockBytes: 100}, {Kind: block.KindFull, TokensPerBlock: 16, BlockBytes: 40}}})
	if err != nil {
		t.Fatal(err)
	}
	return ns
}

// setBlock puts an object of a block's length into the bucket.
func setBlock(s *s3test.Server, l layout, ns *block.Namespace, key block.Key) {
	s.Set(testBucket, l.block(ns.Fingerprint(), key), make([]byte, objectBytes(ns, key)))
}

func keysFrom(first, n int) []block.Key {
	keys := make([]block.Key, n)
	for i := range keys {
		keys[i] = tiertest.Key(first+i, uint32(i%2))
	}
	return keys
}

func TestContainsAsksOnce(t *testing.T) {
	s, c := testStore(t)
	ns, l := smallNamespace(t, "m"), newLayout("p/q")
	p := newPresence(1000, time.Hour, time.Hour, time.Now)
	a := newAsker(c, p, l)
	keys := keysFrom(0, 100)
	for i, key := range keys {
		if i%3 == 0 {
			setBlock(s, l, ns, key)
		}
	}
	s.Set(testBucket, l.block(ns.Fingerprint(), keys[1]), make([]byte, headSize+99)) // of no block
	keys = append(keys, tiertest.Key(3, 2), tiertest.Key(0, 0))                      // no such group; twice the same
	found := make([]bool, len(keys))
	for range 2 {
		if err := a.contains(t.Context(), ns, keys, found); err != nil {
			t.Fatal(err)
		}
		for i, ok := range found {
			if want := i%3 == 0 && i < 100 || i == 101; ok != want {
				t.Errorf("key %d: found is %v, want %v", i, ok, want)
			}
		}
	}
	if n := s.Counts()["HEAD"]; n != 100 {
		t.Errorf("%d HEADs for 100 keys asked for twice", n)
	}
	if n := a.unusable.Load(); n != 1 {
		t.Errorf("%d unusable objects counted, want 1", n)
	}
	wantKnown(t, p, ns.Fingerprint(), keys[0], tier.Present)
	wantKnown(t, p, ns.Fingerprint(), keys[1], tier.Absent)
}

// A failure fails the call, ends the other requests and keeps what was learned.
func TestContainsFails(t *testing.T) {
	s, c := testStore(t)
	ns, l := smallNamespace(t, "m"), newLayout("")
	p := newPresence(1000, time.Hour, time.Hour, time.Now)
	a := newAsker(c, p, l)
	keys := keysFrom(0, 40)
	for _, key := range keys {
		setBlock(s, l, ns, key)
	}
	hang := make(chan struct{})
	answered := make(chan struct{})
	var n atomic.Int64
	s.Fault = func(r *http.Request) *s3test.Fault {
		switch {
		case strings.HasSuffix(r.URL.Path, keys[0].String()):
			return nil
		case strings.HasSuffix(r.URL.Path, keys[1].String()):
			return &s3test.Fault{Until: answered, Status: 403, Code: "AccessDenied"}
		}
		if n.Add(1) == headsMax-2 { // all that are let go at once are there but two
			for end := time.Now().Add(10 * time.Second); p.one(ns.Fingerprint(), keys[0]) != tier.Present && time.Now().Before(end); {
				time.Sleep(time.Millisecond)
			}
			close(answered)
		}
		return &s3test.Fault{Until: hang}
	}
	err := a.contains(t.Context(), ns, keys, make([]bool, len(keys)))
	if !hasKind(err, s3.KindPermission) {
		t.Errorf("the error is %v, want the store's refusal", err)
	}
	wantKnown(t, p, ns.Fingerprint(), keys[0], tier.Present)
	wantKnown(t, p, ns.Fingerprint(), keys[1], tier.Unknown)
	wantKnown(t, p, ns.Fingerprint(), keys[2], tier.Unknown)
	if n := s.Counts()["HEAD"]; n > headsMax+1 {
		t.Errorf("%d HEADs were sent, at most %d at once", n, headsMax)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := a.contains(ctx, ns, keys, make([]bool, len(keys))); !errors.Is(err, context.Canceled) {
		t.Errorf("the error is %v, want that the context ended", err)
	}
	if len(a.mu.flights) != 0 {
		t.Errorf("%d requests are still listed", len(a.mu.flights))
	}
}

// slowHead answers when it is told.
type slowHead struct {
	mu    sync.Mutex
	asked int
	go_   chan struct{}
}

func (h *slowHead) Head(ctx context.Context, key string) (s3.Object, error) {
	h.mu.Lock()
	h.asked++
	h.mu.Unlock()
	select {
	case <-h.go_:
		return s3.Object{Key: key, Size: headSize + 100}, nil
	case <-ctx.Done():
		return s3.Object{}, ctx.Err()
	}
}

// Calls for one key share a request, and go on when the call that made it ends.
func TestContainsShares(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ns, h := smallNamespace(t, "m"), &slowHead{go_: make(chan struct{})}
		a := newAsker(h, newPresence(10, time.Hour, time.Hour, time.Now), newLayout(""))
		keys := []block.Key{tiertest.Key(1, 0)}
		first, leave := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := a.contains(first, ns, keys, make([]bool, 1)); !errors.Is(err, context.Canceled) {
				t.Errorf("the call that was ended says %v", err)
			}
		})
		synctest.Wait()
		for range 5 {
			wg.Go(func() {
				found := make([]bool, 1)
				if err := a.contains(t.Context(), ns, keys, found); err != nil || !found[0] {
					t.Errorf("found is %v, error %v", found[0], err)
				}
			})
		}
		synctest.Wait()
		if h.asked != 1 {
			t.Errorf("%d requests, want 1 for all", h.asked)
		}
		leave()
		synctest.Wait()
		if h.asked != 2 {
			t.Errorf("%d requests, want 1 more after the first was ended", h.asked)
		}
		close(h.go_)
		wg.Wait()
		if len(a.mu.flights) != 0 || h.asked != 2 {
			t.Errorf("%d requests are listed, %d were made", len(a.mu.flights), h.asked)
		}
	})
}

func TestContainsIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ns, h := smallNamespace(t, "m"), &slowHead{go_: make(chan struct{})}
		a := newAsker(h, newPresence(100, time.Hour, time.Hour, time.Now), newLayout(""))
		var wg sync.WaitGroup
		wg.Go(func() { _ = a.contains(t.Context(), ns, keysFrom(0, 40), make([]bool, 40)) })
		synctest.Wait()
		if h.asked != headsMax {
			t.Errorf("%d requests at once, want %d", h.asked, headsMax)
		}
		close(h.go_)
		wg.Wait()
		if h.asked != 40 {
			t.Errorf("%d requests for 40 keys", h.asked)
		}
	})
}

// A HEAD that was sent before a store of this node was over says nothing.
func TestContainsRacesAStore(t *testing.T) {
	s, c := testStore(t)
	ns, l := smallNamespace(t, "m"), newLayout("")
	p := newPresence(10, time.Hour, time.Hour, time.Now)
	key := tiertest.Key(1, 0)
	s.Fault = func(*http.Request) *s3test.Fault {
		p.put(ns.Fingerprint(), key, headSize+100)
		return nil
	}
	found := make([]bool, 1)
	if err := newAsker(c, p, l).contains(t.Context(), ns, []block.Key{key}, found); err != nil || found[0] {
		t.Errorf("found is %v, error %v", found[0], err)
	}
	wantKnown(t, p, ns.Fingerprint(), key, tier.Present)
}

// brieflyDown fails each key's first requests in a way that may pass.
type brieflyDown struct {
	mu    sync.Mutex
	fails int
	asked map[string]int
}

func (h *brieflyDown) Head(_ context.Context, key string) (s3.Object, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.asked[key]++; h.asked[key] <= h.fails {
		return s3.Object{}, &tier.Error{Op: "probe", Class: tier.ClassRetryable, Err: errors.New("slow down")}
	}
	return s3.Object{Key: key, Size: headSize + 100}, nil
}

// A request that fails and may pass is made again, and the call is as if it had
// not failed; not for ever.
func TestContainsTriesAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ns := smallNamespace(t, "m")
		keys := make([]block.Key, 50)
		for i := range keys {
			keys[i] = tiertest.Key(i, 0)
		}
		for fails, want := range map[int]tier.Class{0: tier.ClassNone, askTries - 1: tier.ClassNone, askTries: tier.ClassRetryable} {
			h := &brieflyDown{fails: fails, asked: map[string]int{}}
			a := newAsker(h, newPresence(1000, time.Hour, time.Hour, time.Now), newLayout(""))
			found := make([]bool, len(keys))
			begin := time.Now()
			err := a.contains(t.Context(), ns, keys, found)
			if tier.ClassOf(err) != want {
				t.Errorf("%d failures each: %v", fails, err)
			}
			for key, n := range h.asked {
				if n > askTries {
					t.Errorf("%d failures each: %s was asked for %d times", fails, key, n)
				}
			}
			if err == nil && slices.Contains(found, false) {
				t.Errorf("%d failures each: found %v", fails, found)
			}
			if took := time.Since(begin); took > time.Second {
				t.Errorf("%d failures each: it took %v", fails, took)
			}
		}
	})
}
