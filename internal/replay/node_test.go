package replay

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/terrace-kv/terrace"
	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/client"
	"github.com/terrace-kv/terrace/internal/fault"
	"github.com/terrace-kv/terrace/internal/node"
	"github.com/terrace-kv/terrace/internal/vfs"
	"github.com/terrace-kv/terrace/internal/wire"
	"github.com/terrace-kv/terrace/tier/fstier"
)

var peerSeed = flag.Uint64("replay.seed", 0, "seed of TestPeerFaults; 0 takes a fresh one")

// realDeps starts real nodes: shared memory, sockets and files.
func realDeps(t *testing.T) Deps { return faultyDeps(t, nil) }

// faultyDeps has file calls of the nodes' tiers fail, once they have been opened.
func faultyDeps(t *testing.T, rules *fault.Set) Deps {
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir()) // nobody serves there
	t.Setenv("TERRACE_SOCKET", "")
	t.Setenv("TMPDIR", t.TempDir())
	return Deps{DefaultSocket: wire.DefaultSocket, StartNode: func(ctx context.Context, o NodeOptions) (string, func(context.Context) error, error) {
		log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
		opt := terrace.Options{Socket: filepath.Join(o.Dir, "engine.sock"), PrimarySize: o.PrimaryBytes, Policy: o.Policy, Logger: log}
		if o.Peers {
			d := o.PeerTimeout // 0 is the default
			opt.Peers = &terrace.Peers{Listen: "127.0.0.1:0", Advertise: o.Advertise, LoadTimeout: d,
				Bounds: terrace.PeerBounds{ConnectTimeout: d / 2, LookupTimeout: d / 2, AbortTimeout: d / 2, HitTimeout: d / 2, ParkTimeout: d, PingEvery: d / 10}}
		}
		if o.FSRoot != "" {
			fo := fstier.Options{Root: o.FSRoot, Capacity: o.FSBytes, Logger: log}
			if rules != nil {
				if err := os.MkdirAll(o.FSRoot, 0o700); err != nil {
					return "", nil, err
				}
				root, err := vfs.OpenRoot(o.FSRoot)
				if err != nil {
					return "", nil, err
				}
				rules.Toggle(false)
				defer rules.Toggle(true)
				fo.FS = fault.FS(root, rules, nil)
			}
			files, err := fstier.Open(ctx, fo)
			if err != nil {
				return "", nil, err
			}
			opt.Tiers = []terrace.Tier{{Tier: files}}
		}
		n, err := terrace.Open(ctx, opt)
		if err != nil {
			for _, files := range opt.Tiers {
				err = errors.Join(err, files.Tier.Close(ctx))
			}
			return "", nil, err
		}
		return opt.Socket, func(ctx context.Context) error {
			if idle(t, n); rules != nil {
				rules.Toggle(false)
			}
			return n.Close(ctx)
		}, nil
	}}
}

// idle fails when a node has anything left of a request. What peers had of it is
// waited for.
func idle(t *testing.T, n *terrace.Node) {
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		s := n.Status()
		s.Tables.Sessions = 0 // one that has ended is listed until its memory is known to be unmapped
		p := s.Peers
		if p == nil {
			p, end = &node.PeersStatus{}, time.Time{}
		}
		if s.Tables == (node.TableStatus{}) && p.Sources+p.Rounds+p.Serves+p.Supplies+p.Parked+p.Aborts+p.Handovers+p.Quarantined == 0 && p.PinnedBytes+s.Primary.PinnedBytes == 0 {
			return
		}
		if time.Now().After(end) {
			t.Errorf("left after the last engine: %+v, %d bytes pinned, %+v", s.Tables, s.Primary.PinnedBytes, *p)
			return
		}
	}
}

// TestNodeConversation is the promise, on a shorter stretch of the
// trace and smaller blocks: with a primary of 5 % of the working set and room
// below, the hits are those of an unbounded cache, nothing is corrupt, and the
// files take what the tier says.
func TestNodeConversation(t *testing.T) {
	file := testdata(t, conversationFile)
	const requests, blockBytes = 150, 4096
	s, err := OpenFile(file)
	if err != nil {
		t.Fatal(err)
	}
	tr, err := load(Limit(s, requests))
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
	unbounded := tr.model(len(tr.keys)).hits
	primary := max(len(tr.keys)/20, tr.size.Largest*3/2) * blockBytes
	for _, engines := range []int{1, 4} {
		root := filepath.Join(t.TempDir(), "root")
		h := &harness{deps: realDeps(t)}
		r, _, err := h.json(t, file, "--requests", fmt.Sprint(requests), "--block-bytes", fmt.Sprint(blockBytes),
			"--primary", fmt.Sprint(primary), "--fs", root+",unbounded", "--engines", fmt.Sprint(engines))
		if err != nil {
			t.Fatal(err)
		}
		if r.Corrupt != 0 || r.Dropped != 0 || r.Shared || r.Requests != requests || r.References != tr.size.References {
			t.Errorf("%d engines: %+v", engines, r)
		}
		if engines == 1 && (r.PrefixHits != unbounded || r.StoredBlocks != int64(len(tr.keys)) || r.Refusals != 0) {
			t.Errorf("%d prefix hits, %d stored, %d refused; an unbounded cache has %d and %d", r.PrefixHits, r.StoredBlocks, r.Refusals, unbounded, len(tr.keys))
		}
		used := int64(0)
		err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.Type().IsRegular() {
				var info fs.FileInfo
				if info, err = d.Info(); err == nil {
					used += info.Sys().(*syscall.Stat_t).Blocks * 512
				}
			}
			return err
		})
		if err != nil || used != r.Tiers[1].UsedBytes {
			t.Errorf("files take %d bytes, the tier says %d (%v)", used, r.Tiers[1].UsedBytes, err)
		}
		if left, err := os.ReadDir(os.TempDir()); err != nil || len(left) != 0 {
			t.Errorf("left in the temporary directory: %v, %v", left, err)
		}
	}
}

// TestNodeSynthetic: what a newcomer runs, smaller: traffic, hits from both
// tiers, nothing corrupt, nothing left behind.
func TestNodeSynthetic(t *testing.T) {
	h := &harness{deps: realDeps(t)}
	r, _, err := h.json(t, "--synthetic", "--block-bytes", "5000", "--primary", "4MiB", "--engines", "2")
	if err != nil {
		t.Fatal(err)
	}
	if r.Corrupt != 0 || r.Shared || len(r.Tiers) != 2 || r.Tiers[0].Hits == 0 || r.Tiers[1].Hits == 0 || r.Evictions == 0 || r.Latency.ReadyP50us == 0 {
		t.Errorf("%+v", r)
	}
	if left, err := os.ReadDir(os.TempDir()); err != nil || len(left) != 0 {
		t.Errorf("left in the temporary directory: %v, %v", left, err)
	}
}

// TestPeers: a trace over three nodes has about the hits that one node of the
// same memory would have, because what a node lacks it loads from another.
func TestPeers(t *testing.T) {
	for _, below := range []string{"none", "unbounded"} {
		h := &harness{deps: realDeps(t)}
		args := []string{"--synthetic", "--conversations", "8", "--block-bytes", "4KiB", "--primary", "32MiB", "--fs", below}
		one, _, err := h.json(t, args...)
		if err != nil {
			t.Fatal(err)
		}
		three, _, err := h.json(t, append(args, "--peers", "3")...)
		if err != nil {
			t.Fatal(err)
		}
		var peers *TierResult
		for i := range three.Tiers {
			if three.Tiers[i].Name == "peers" {
				peers = &three.Tiers[i]
			}
		}
		if three.Corrupt != 0 || three.Nodes != 3 || three.Engines != 3 || !three.OwnNode || three.Shared || peers == nil || peers.Hits == 0 || peers.WriteBytes != 0 {
			t.Fatalf("%+v", three)
		}
		t.Logf("%s below: %d hits with one node, %d with three, %d of them from peers", below, one.PrefixHits, three.PrefixHits, peers.Hits)
		if three.PrefixHits < one.PrefixHits*9/10 {
			t.Errorf("%s below: %d hits with three nodes, %d with one", below, three.PrefixHits, one.PrefixHits)
		}
	}
}

// TestPeerFaults: whatever the network between three nodes does, blocks are right
// or not there, and nothing is left in the nodes' tables.
func TestPeerFaults(t *testing.T) {
	seed := rand.Uint64N(1 << 32)
	if *peerSeed != 0 {
		seed = *peerSeed
	}
	t.Logf("repeat with -replay.seed=%d", seed)
	rules := fault.MustParse(fmt.Sprintf(`
		error(EIO) when randomly(0.01, %d)
		flip when and(op(read), randomly(0.01, %[1]d))
		torn(4096) when and(op(write), randomly(0.01, %[1]d))
		delay(10ms) when randomly(0.005, %[1]d)`, seed))
	faults := "refuse=0.05,mute=0.02,swap=0.2,cut=0.2,stall=0.02,corrupt=5e-06,delay=200µs"
	h := &harness{deps: faultyDeps(t, rules)}
	r, _, err := h.json(t, "--synthetic", "--conversations", "16", "--block-bytes", "16KiB", "--primary", "16MiB", "--fs", "32MiB", "--wait-cascade=false",
		"--peers", "3", "--peer-faults", faults, "--seed", fmt.Sprint(seed))
	if err != nil {
		t.Fatal(err)
	}
	f := r.PeerFaults
	if r.Corrupt != 0 || f == nil || f.Seed != seed || f.Faults != faults || len(r.Tiers) != 3 {
		t.Fatalf("%+v, %+v", r, f)
	}
	peers := r.Tiers[slices.IndexFunc(r.Tiers, func(t TierResult) bool { return t.Name == "peers" })]
	if f.Connections == 0 || f.Refused+f.Muted+f.Cut+f.Stalled == 0 || f.Corrupt == 0 || f.Delayed == 0 || rules.Injected() == 0 || peers.Hits == 0 {
		t.Errorf("of the faults too few happened, or nothing else did: %+v, %d of files, %d hits of peers", f.Counts, rules.Injected(), peers.Hits)
	}
	t.Logf("%+v, %d of files; %+v, in %.1f s", f.Counts, rules.Injected(), r.Tiers, r.DurationSeconds)
}

func TestHint(t *testing.T) {
	d := &directory{addrs: []string{"127.0.0.1:1", "127.0.0.1:2", "[::1]:3"}, had: map[block.Key]uint16{}}
	ks := make([]block.Key, 10)
	for i := range ks {
		ks[i][0] = byte(i)
	}
	check := func(engine, port int) {
		t.Helper()
		if p := d.hint(engine, "r", ks); p.PeerPort != port || (p.Peer == client.PeerProbe) != (port > 0) {
			t.Errorf("engine %d: %+v, want port %d", engine, p, port)
		}
	}
	check(0, 0)
	d.has(0, ks[:3])
	check(0, 0)
	check(1, 1)
	d.has(5, ks[:6]) // the third node's second engine
	check(0, 3)
	check(1, 3)
	check(2, 0)
	d.has(1, ks[:6])
	d.has(0, ks[5:])
	check(0, 2)
	d.has(0, ks[3:5])
	check(0, 0)
}
