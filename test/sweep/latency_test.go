package sweep

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/terrace-kv/terrace"
	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/client"
	"github.com/terrace-kv/terrace/internal/fault"
	"github.com/terrace-kv/terrace/internal/vfs"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/fstier"
)

// TestLookupLatency times lookups of an engine, over the socket, while every
// file call of the tier takes 5 s, while 10^4 stores are queued behind that, and
// while these are written at full speed. The target is a p99 below a
// millisecond; what fails the test is a lookup that has waited for the tier.
// Run it with -v for the figures.
func TestLookupLatency(t *testing.T) {
	const (
		prompts = 5      // of promptKeys blocks: as many in the primary and below, only below, and nowhere
		queued  = 10_000 // blocks
		phase   = time.Second
		waitMax = 2 * time.Second
	)
	set := fault.MustParse("delay(5s)")
	set.Toggle(false)
	root := t.TempDir()
	under, err := vfs.OpenRoot(root)
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	tr, err := fstier.Open(t.Context(), fstier.Options{Root: root, FS: fault.FS(under, set, nil), MinFree: -1, Logger: log})
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(t.TempDir(), "s")
	n, err := terrace.Open(t.Context(), terrace.Options{Socket: socket, PrimarySize: 128 << 20, Populate: true, Tiers: []terrace.Tier{{Tier: tr}}, Logger: log})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		set.Toggle(false) // what sleeps wakes up within 5 s
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if err := n.Close(ctx); err != nil {
			t.Error(err)
		}
	}()
	e := greetOver(t, socket, tier.Align)
	defer e.close()

	e.store(sweepKeys(0, prompts*promptKeys), true)
	if done, err := e.c.Reset(t.Context(), waitMax); err != nil || !done {
		t.Fatal(done, err)
	}
	e.store(sweepKeys(prompts*promptKeys, 2*prompts*promptKeys), true)

	lookups := func(while string) {
		begin, i := time.Now(), 0
		var took []time.Duration
		for time.Since(begin) < phase {
			took = append(took, e.lookup(sweepKeys(i%(3*prompts)*promptKeys, (i%(3*prompts)+1)*promptKeys)))
			i += 7
			time.Sleep(500 * time.Microsecond) // a load, not a flood
		}
		t.Logf("%s: %d lookups of %d keys: %s", while, len(took), promptKeys, quantiles(took))
		if most := slices.Max(took); most > waitMax {
			t.Errorf("%s: a lookup took %v", while, most)
		}
	}
	set.Toggle(true)
	lookups("each file call takes 5 s")
	e.store(sweepKeys(1_000_000, 1_000_000+queued), false)
	if got := n.Status().Tiers[0].QueuedWrites; got < queued*9/10 {
		t.Errorf("only %d writes are queued", got)
	}
	lookups("and 10^4 stores are queued")
	set.Toggle(false)
	lookups("and are written")
	s := n.Status().Lookups
	t.Logf("in the node, all of these: p50 %.0f µs, p99 %.0f µs", s.P50us, s.P99us)
	if b, err := json.Marshal(s.Verdicts); err == nil {
		t.Logf("verdicts: %s", b)
	}
}

// remote is an engine that speaks to its node over the socket.
type remote struct {
	t *testing.T
	c *client.Client
	n int // requests
}

func greetOver(t *testing.T, socket string, blockBytes uint64) *remote {
	t.Helper()
	c, err := client.Dial(t.Context(), client.Options{Socket: socket, Spec: namespace(t, blockBytes).Spec()})
	if err != nil {
		t.Fatal(err)
	}
	return &remote{t: t, c: c}
}

func (e *remote) close() {
	if err := e.c.Close(); err != nil {
		e.t.Error(err)
	}
}

func (e *remote) request(f func(r *client.Request) error) {
	e.t.Helper()
	e.n++
	r, err := e.c.NewRequest(e.t.Context(), fmt.Sprint(e.n), client.NoLimits())
	if err != nil {
		e.t.Fatal(err)
	}
	if err := f(r); err != nil {
		e.t.Fatal(err)
	}
	if err := r.Finish(e.t.Context()); err != nil {
		e.t.Fatal(err)
	}
}

// store stores blocks, with flush also in the tier.
func (e *remote) store(keys []block.Key, flush bool) {
	e.t.Helper()
	e.request(func(r *client.Request) error {
		got, err := r.Store(e.t.Context(), 0, 0, keys, func(i int, dst []byte) (uint64, error) {
			copy(dst, keys[i][:])
			return client.Sum(dst), nil
		})
		if err != nil || got.Stored != len(keys) {
			return fmt.Errorf("%+v of %d stored: %w", got, len(keys), err)
		}
		if !flush {
			return nil
		}
		f, err := r.Flush(e.t.Context(), time.Minute)
		if err == nil && f.Cascaded != len(keys) {
			err = fmt.Errorf("%+v of %d", f, len(keys))
		}
		return err
	})
}

// lookup says how long one call takes that waits for nothing.
func (e *remote) lookup(keys []block.Key) (took time.Duration) {
	e.t.Helper()
	e.request(func(r *client.Request) error {
		var a client.Answer
		begin := time.Now()
		err := r.LookupInto(e.t.Context(), [][]block.Key{keys}, client.LookupOptions{}, &a)
		took = time.Since(begin)
		return err
	})
	return took
}
