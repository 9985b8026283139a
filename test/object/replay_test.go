package object

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/terrace-kv/terrace"
	"github.com/terrace-kv/terrace/internal/fault"
	"github.com/terrace-kv/terrace/internal/replay"
)

const conversationTrace = "mooncake_fast25_conversation.blk512.jsonl.gz"

// replayed is what a replay gave, and what its node said in the end.
type replayed struct {
	replay.Result
	status terrace.Status
}

// replayThrough runs the replay command against a node with one tier.
func (s *store) replayThrough(open func() terrace.Tier, args ...string) replayed {
	s.t.Helper()
	var out replayed
	deps := replay.Deps{
		DefaultSocket: func() (string, error) { return "", errors.New("there is no default here") },
		StartNode: func(ctx context.Context, o replay.NodeOptions) (string, func(context.Context) error, error) {
			socket := filepath.Join(o.Dir, "s")
			n, err := terrace.Open(ctx, terrace.Options{Socket: socket, PrimarySize: o.PrimaryBytes, Policy: o.Policy, Tiers: []terrace.Tier{open()}, Logger: s.logger()})
			if err != nil {
				return "", nil, err
			}
			return socket, func(ctx context.Context) error {
				// Engines are gone, so nothing may be left of them.
				eventually(s.t, waitMax, "empty tables", func() error {
					if out.status = n.Status(); out.status.Tables != (terrace.Status{}).Tables {
						return fmt.Errorf("%+v", out.status.Tables)
					}
					return nil
				})
				return errors.Join(n.CheckInvariants(), n.Close(ctx))
			}, nil
		},
	}
	cmd := replay.Command(deps)
	var stdout, stderr bytes.Buffer
	cmd.SetArgs(append(args, "--json"))
	cmd.SetOut(&stdout)
	cmd.SetErr(&stderr)
	if err := cmd.ExecuteContext(s.t.Context()); err != nil {
		s.t.Errorf("replay %v: %v\n%s", args, err, tail(stderr.String(), 4<<10))
	}
	if err := json.Unmarshal(stdout.Bytes(), &out.Result); err != nil {
		s.t.Fatalf("replay %v: %v: %s", args, err, stdout.Bytes())
	}
	if out.Corrupt != 0 {
		s.t.Errorf("replay %v: %d corrupt blocks", args, out.Corrupt)
	}
	return out
}

// Real conversations through a primary of a twentieth of what they store:
// blocks come back from the bucket as they do from a folder, and with faults on
// the wire still no byte is wrong, and every request ends.
func TestReplay(t *testing.T) {
	s := versity(t, false)
	blockBytes := int64(sized(4<<10, 64<<10))
	args := []string{"--block-bytes", fmt.Sprint(blockBytes)}
	if dir := os.Getenv("TERRACE_TESTDATA"); dir != "" && raceOr(1, 2) == 2 {
		args = append(args, filepath.Join(dir, conversationTrace), "--requests", fmt.Sprint(sized(200, 1000)))
	} else { // without the trace, or the time for it
		args = append(args, "--synthetic", "--conversations", fmt.Sprint(raceOr(8, 100)))
	}
	all := s.replayThrough(nil, append(args, "--dry", "--sweep-blocks", "100000000")...)
	// The largest prompts must fit, or what is found depends on timing.
	args = append(args, "--primary", fmt.Sprint(max(all.StoredBlocks/20, 400)*blockBytes), "--fs", "none")

	fs := s.replayThrough(func() terrace.Tier { return s.fs(0) }, args...)
	obj := s.replayThrough(func() terrace.Tier { return terrace.Tier{Tier: s.tier(nil)} }, args...)
	f := &obj.status.Tiers[0]
	t.Logf("%d requests: %d of %d blocks are hits through the bucket in %.1f s, %d of them promoted; through a folder %d in %.1f s; lookups p99 %.0f µs and %.0f µs",
		obj.Requests, obj.PrefixHits, obj.References, obj.DurationSeconds, f.Hits, fs.PrefixHits, fs.DurationSeconds, obj.status.Lookups.P99us, fs.status.Lookups.P99us)
	if obj.PrefixHits != fs.PrefixHits || obj.PrefixHits != all.PrefixHits || obj.StoredBlocks != fs.StoredBlocks {
		t.Errorf("hits %d, of a folder %d, without bounds %d; stored %d and %d", obj.PrefixHits, fs.PrefixHits, all.PrefixHits, obj.StoredBlocks, fs.StoredBlocks)
	}
	if f.Hits == 0 || total(f.Failures)+total(f.Dropped) > 0 {
		t.Errorf("%+v", f)
	}

	// The same with faults, in a place of its own in the bucket.
	clean := s.o
	for seed := range uint64(sized(1, 2)) {
		s.o = clean
		var set *fault.Set
		var requests, failed int64
		bad := s.replayThrough(func() terrace.Tier {
			set = s.proxy(faultMix(100*seed + 1))
			set.Toggle(false)
			tr := s.tier(prefix(fmt.Sprint("faults-", seed)))
			set.Toggle(true)
			return terrace.Tier{Tier: counted{tr, func() { c := tr.Requests(); requests, failed = c.Put+c.Get+c.Head+c.Delete+c.List+c.Other, c.Failed }}}
		}, args...)
		f := &bad.status.Tiers[0]
		t.Logf("with faults (seed %d): %d requests, %d of %d blocks are hits in %.1f s, lookups p99 %.0f µs; %d faults in %d HTTP requests, of which %d failed; failures %v, dropped %v, corrupt %d, set aside %d",
			seed, bad.Requests, bad.PrefixHits, bad.References, bad.DurationSeconds, bad.status.Lookups.P99us, set.Injected(), requests, failed, f.Failures, f.Dropped, f.Corrupt, f.SetAside)
		if bad.Requests != obj.Requests || bad.References != obj.References {
			t.Errorf("%d requests with %d blocks ended, want %d with %d", bad.Requests, bad.References, obj.Requests, obj.References)
		}
		if bad.PrefixHits > all.PrefixHits || bad.PrefixHits < all.PrefixHits/2 {
			t.Errorf("%d hits, %d without faults", bad.PrefixHits, all.PrefixHits)
		}
		if set.Injected() == 0 || failed == 0 {
			t.Errorf("%d faults, %d failed requests", set.Injected(), failed)
		}
		// A copy is read once more before it is set aside. That hits another
		// fault once in a hundred times.
		if f.SetAside > 2+f.Corrupt/10 {
			t.Errorf("%d copies of %d were set aside that were only damaged on their way", f.SetAside, f.Corrupt)
		}
		if p99 := bad.status.Lookups.P99us; soak && p99 >= 1000 {
			t.Errorf("lookups p99 is %.0f µs, want less than 1 ms", p99)
		}
	}
}
