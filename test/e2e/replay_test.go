package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

const conversationTrace = "mooncake_fast25_conversation.blk512.jsonl.gz"

// hitsEverywhere checks that each tier had hits, and that they are all there is.
func hitsEverywhere(t *testing.T, r *replayed) {
	t.Helper()
	if len(r.Tiers) != 2 {
		t.Fatalf("tiers: %+v", r.Tiers)
	}
	sum := int64(0)
	for _, x := range r.Tiers {
		if x.Hits <= 0 {
			t.Errorf("no hits from %s", x.Name)
		}
		if x.Failures > 0 {
			t.Errorf("%d failures of %s", x.Failures, x.Name)
		}
		sum += x.Hits
	}
	// A block may be promoted and evicted before its request reads it, so the
	// parts may be more than the whole.
	if sum < r.PrefixHits || r.LoadedBlocks != r.PrefixHits {
		t.Errorf("%d prefix hits, %d loaded, of the tiers %d", r.PrefixHits, r.LoadedBlocks, sum)
	}
}

// TestReplayAlone is what the README promises of a fresh machine: a node is
// started, hits come from both tiers, and nothing is left behind.
func TestReplayAlone(t *testing.T) {
	t.Parallel()
	dir, env := home(t)
	// Without flags it takes half a minute; a smaller primary needs fewer
	// conversations for the same.
	args := []string{"--synthetic", "--primary", "16MiB"}
	if soak {
		args = []string{"--synthetic"}
	}
	r := replay(t, env, args...)
	if !r.OwnNode {
		t.Errorf("it used a node at %s", r.Node)
	}
	hitsEverywhere(t, &r)
	for _, sub := range []string{"tmp", "run", ".cache"} {
		if left, _ := filepath.Glob(filepath.Join(dir, sub, "*")); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	}
	if s := sharedMemory(t); s != "" {
		t.Errorf("left in /dev/shm: %s", s)
	}
}

// TestReplayUsesRunningNode: with a node on the default socket, replay
// without flags is an engine of that one.
func TestReplayUsesRunningNode(t *testing.T) {
	t.Parallel()
	at := place(t)
	n := serve(t, at, "--fs-capacity", "1GiB")
	before := n.status()
	r := replay(t, at.env, "--synthetic")
	if r.OwnNode || r.Node != n.socket {
		t.Errorf("own node %v, %q, want the one at %q", r.OwnNode, r.Node, n.socket)
	}
	hitsEverywhere(t, &r)
	after := n.idle()
	if n := after.Lookups.Calls - before.Lookups.Calls; n < r.Requests {
		t.Errorf("the node counts %d lookups, replay made %d requests", n, r.Requests)
	}
	if n := after.Stores.Committed - before.Stores.Committed; n != r.StoredBlocks {
		t.Errorf("the node counts %d commits, replay stored %d", n, r.StoredBlocks)
	}
	if f := fsOf(after); f.Hits != r.Tiers[1].Hits || f.Blocks != r.Tiers[1].Blocks || f.WrittenBlocks != r.StoredBlocks {
		t.Errorf("tier in the status: %+v, in the result: %+v", f, r.Tiers[1])
	}
	n.exact()

	// A second run finds what the first one stored.
	again := replay(t, at.env, "--synthetic", "--requests", "40")
	if again.PrefixHits != again.References || again.StoredBlocks != 0 {
		t.Errorf("second run: %d hits of %d, %d stored", again.PrefixHits, again.References, again.StoredBlocks)
	}
}

// TestReplayConversations replays the trace of real conversations through a
// primary of a twentieth of the working set.
func TestReplayConversations(t *testing.T) {
	t.Parallel()
	path := trace(t, conversationTrace)
	_, env := home(t)
	for _, engines := range []int{1, 4} {
		t.Run(fmt.Sprint(engines), func(t *testing.T) {
			requests := often(400, 2000)
			common := []string{path, "--requests", strconv.Itoa(requests), "--block-bytes", "64KiB"}
			unbounded := replay(t, env, append(common, "--dry", "--sweep-blocks", "100000000")...)
			primary := unbounded.StoredBlocks * blockBytes / 20 &^ 4095
			root := filepath.Join(t.TempDir(), "fs")
			r := replay(t, env, append(common, "--engines", strconv.Itoa(engines), "--primary", strconv.FormatInt(primary, 10), "--fs", root+",unbounded")...)
			if r.Requests != int64(requests) || r.References != unbounded.References || r.Dropped != 0 {
				t.Errorf("%+v, want all %d references of %d requests", r, unbounded.References, requests)
			}
			// Four engines at once may be refused room in a primary that hardly
			// holds two of their stores, and so find less. So may one, under the
			// race detector, where the primary is smaller than the largest prompt.
			alone := engines == 1 && !raceEnabled
			if r.PrefixHits != unbounded.PrefixHits && alone || r.PrefixHits > unbounded.PrefixHits {
				t.Errorf("%d prefix hits, without bounds there are %d; verdicts %v", r.PrefixHits, unbounded.PrefixHits, r.Verdicts)
			}
			if r.StoredBlocks != unbounded.StoredBlocks && alone || r.StoredBlocks > unbounded.StoredBlocks {
				t.Errorf("%d blocks were stored, %d refusals; %d are distinct", r.StoredBlocks, r.Refusals, unbounded.StoredBlocks)
			}
			if alone {
				hitsEverywhere(t, &r)
			}
			if sum := du(t, root); sum != r.Tiers[1].UsedBytes {
				t.Errorf("reported are %d bytes, the files take %d", r.Tiers[1].UsedBytes, sum)
			}
			files := int64(len(blockFiles(t, root)))
			if files != r.Tiers[1].Blocks || files != r.StoredBlocks && engines == 1 || files > r.StoredBlocks {
				t.Errorf("%d files, the tier says %d, %d were stored", files, r.Tiers[1].Blocks, r.StoredBlocks)
			}
			t.Logf("%d engines: %d requests, %d of %d are hits, %.1f s", engines, r.Requests, r.PrefixHits, r.References, r.Duration)
			_ = os.RemoveAll(root) // it may be gigabytes
		})
	}
}

// TestReplayInterrupted: a signal ends a replay in order. It says what it did,
// and its node leaves nothing behind.
func TestReplayInterrupted(t *testing.T) {
	t.Parallel()
	dir, env := home(t)
	p := launch(t, "replay", terraceCommand(t, env, "replay", "--synthetic", "--conversations", "2000", "--primary", "16MiB", "--json"))
	eventually(t, bound(), "block files", func() error {
		// One may be the self-test's of the tier, before the replay begins.
		if files, _ := filepath.Glob(filepath.Join(dir, "tmp", "*", "fs", "*", "*", "*")); len(files) < 2 {
			return errors.New("none yet")
		}
		return nil
	})
	p.signal(syscall.SIGINT)
	if code := p.exit(bound()); code != 130 {
		t.Errorf("exit code %d, want 130", code)
	}
	var r replayed
	if err := json.Unmarshal([]byte(p.stdout.String()), &r); err != nil || r.Requests == 0 || r.Corrupt != 0 || !strings.Contains(p.stdout.String(), `"interrupted":true`) {
		t.Errorf("%v: %s", err, p.stdout.String())
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "tmp", "*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}
