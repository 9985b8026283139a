package sweep

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/terrace-kv/terrace"
	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/client"
	"github.com/terrace-kv/terrace/internal/vfs"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/fstier"
)

var realFiles = flag.Int("realfiles", 1_000_000, "files of TestManyRealFiles")

// TestManyRealFiles starts a node on a million files that are really there: it
// is ready at once, says how far its scan is, and serves meanwhile. The files
// have a block's name and size and no bytes. They take a minute to make and
// another to remove, so the test needs TERRACE_SOAK.
func TestManyRealFiles(t *testing.T) {
	if os.Getenv("TERRACE_SOAK") == "" {
		t.Skip("set TERRACE_SOAK to make and scan a million files")
	}
	root, log := t.TempDir(), slog.New(slog.DiscardHandler)
	start := func() (*terrace.Node, *remote) {
		tr, err := fstier.Open(t.Context(), fstier.Options{Root: root, MinFree: -1, Logger: log})
		if err != nil {
			t.Fatal(err)
		}
		socket := filepath.Join(t.TempDir(), "s")
		n, err := terrace.Open(t.Context(), terrace.Options{Socket: socket, PrimarySize: 64 << 20, Admin: "127.0.0.1:0",
			Tiers: []terrace.Tier{{Tier: tr}}, Logger: log})
		if err != nil {
			t.Fatal(err)
		}
		return n, greetOver(t, socket, tier.Align)
	}
	stop := func(n *terrace.Node, e *remote) {
		e.close()
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if err := n.Close(ctx); err != nil {
			t.Error(err)
		}
	}
	real := sweepKeys(0, 1000) // blocks that can be read
	n, e := start()
	e.store(real, true)
	stop(n, e)
	many := &vfs.Many{Dir: filepath.Join(root, namespace(t, tier.Align).Fingerprint().String()), Files: *realFiles}
	begin := time.Now()
	makeFiles(t, many, 2*tier.Align)
	t.Logf("%d files made in %v", many.Files, time.Since(begin).Round(time.Second))

	begin = time.Now()
	n, e = start()
	defer func() { stop(n, e) }()
	get(t, n.AdminURL()+"/readyz", nil)
	ready := time.Since(begin)
	var s terrace.Status
	var took, waited []time.Duration
	var progress []int64
	for i := 0; ; i++ {
		if i%50 == 0 {
			get(t, n.AdminURL()+"/v1/status", &s)
			progress = append(progress, s.Tiers[0].ScanBlocks)
			if s.Tiers[0].ScanDone {
				break
			}
			e.request(func(r *client.Request) error {
				keys, asked := real[i%len(real):][:20], time.Now()
				a, err := r.Lookup(t.Context(), [][]block.Key{keys}, client.LookupOptions{Wait: 10 * time.Second})
				if waited = append(waited, time.Since(asked)); err == nil && a.Tokens != int64(16*len(keys)) {
					err = fmt.Errorf("%d tokens of %d blocks that are there", a.Tokens, len(keys))
				}
				return err
			})
		}
		keys := make([]block.Key, promptKeys) // found by the scan or not yet
		for k := range keys {
			keys[k], _ = block.ParseKey(filepath.Base(many.Name((i*7919 + k*(many.Files/promptKeys)) % many.Files)))
		}
		e.request(func(r *client.Request) error {
			asked := time.Now()
			_, err := r.Lookup(t.Context(), [][]block.Key{keys}, client.LookupOptions{Peek: true})
			took = append(took, time.Since(asked))
			return err
		})
		time.Sleep(200 * time.Microsecond)
	}
	scanned := time.Since(begin)
	if got, want := s.Tiers[0].Blocks, int64(many.Files+len(real)); got != want {
		t.Errorf("%d blocks are indexed, want %d", got, want)
	}
	slices.Sort(progress)
	if steps := len(slices.Compact(slices.Clone(progress))); steps < 3 {
		t.Errorf("status has shown %v blocks scanned, so no progress", progress)
	}
	t.Logf("ready after %v, scanned after %v, told %d times how far it was", ready.Round(100*time.Microsecond), scanned.Round(time.Millisecond), len(progress))
	t.Logf("meanwhile %d lookups of %d keys: %s", len(took), promptKeys, quantiles(took))
	t.Logf("and %d of 20 blocks, until they were in the primary: %s", len(waited), quantiles(waited))
	if ready > time.Second {
		t.Errorf("ready after %v", ready)
	}
	if most := slices.Max(took); most > stallMax {
		t.Errorf("a lookup took %v", most)
	}
}

// makeFiles makes files of the names and the size, and no bytes.
func makeFiles(t *testing.T, many *vfs.Many, size int64) {
	t.Helper()
	for i := range 256 {
		if err := os.MkdirAll(filepath.Dir(many.Name(i)), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	var wg sync.WaitGroup
	var next atomic.Int64
	for range 4 {
		wg.Go(func() {
			for !t.Failed() {
				// Directory by directory, which file systems are quickest at.
				each := (many.Files + 255) / 256
				at := int(next.Add(1)) - 1
				if at >= 256*each {
					return
				}
				i := at%each*256 + at/each
				if i >= many.Files {
					continue
				}
				f, err := os.OpenFile(many.Name(i), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
				if err == nil {
					err = f.Truncate(size)
					_ = f.Close()
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

// get fetches a page, which has to be there, and decodes it into v if given.
func get(t *testing.T, url string, v any) {
	t.Helper()
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 10 * time.Second}
	resp, err := c.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, body)
	}
	if err == nil && v != nil {
		err = json.Unmarshal(body, v)
	}
	if err != nil {
		t.Fatal(url, err)
	}
}
