package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
	nodes "github.com/terrace-kv/terrace/internal/node"
	"github.com/terrace-kv/terrace/tier/fstier"
)

// perRoot is how many kills one root has to stand.
const perRoot = 10

// TestNodeKilled: a node is killed in the middle of its engines' load, again
// and again, and started in the same place. Each time, before the next start,
// all that is in the root is right; and after it every store that a flush has
// acknowledged is found and right unless it was evicted, nothing half-done is
// visible, nothing of the dead node is left, and the count of bytes is exact.
//
// Roots change between one with room for everything and one in which each store
// evicts, where a kill comes between an evicted block's two lives.
func TestNodeKilled(t *testing.T) {
	t.Parallel()
	rng := random(t)
	total := kills{}
	for left, tight := often(5, 200), false; left > 0 && !t.Failed(); tight = !tight {
		rounds := min(left, often(3, perRoot))
		total.add(killAgain(t, rng, rounds, tight))
		left -= rounds
	}
	t.Logf("%d kills: %d blocks were acknowledged and looked for, %d of them had been evicted; %d blocks were verified without a node, and %d files of dead writers were removed",
		total.kills, total.acked, total.evicted, total.verified, total.temporary)
}

// kills counts what TestNodeKilled has seen.
type kills struct{ kills, acked, evicted, verified, temporary int }

func (k *kills) add(o kills) {
	k.kills += o.kills
	k.acked += o.acked
	k.evicted += o.evicted
	k.verified += o.verified
	k.temporary += o.temporary
}

const tightCapacity = 32 << 20

// killAgain kills one node after the other in one root.
func killAgain(t *testing.T, rng *rand.Rand, rounds int, tight bool) (seen kills) {
	at := place(t)
	args := []string{"--primary", "8MiB"}
	if tight {
		args = append(args, "--fs-capacity", fmt.Sprint(tightCapacity))
	}
	acked := acknowledged{}
	for round := range rounds + 1 {
		n := serve(t, at, args...)
		if round > 0 {
			seen.evicted += checkAfterKill(t, n, acked, tight)
		}
		if round == rounds || t.Failed() {
			n.kill()
			break
		}
		var engines []*engine
		var loads []Load
		for i := range 2 {
			load := Load{Prefix: fmt.Sprint("round ", round, " engine ", i), Seed: rng.Uint64(), Conversations: 1000, Turn: 24, Parallel: 2, Flush: true}
			e := n.engine(fmt.Sprint("recorder ", i))
			e.start(load)
			engines, loads = append(engines, e), append(loads, load)
		}
		beside := launch(t, "replay", terraceCommand(t, at.env, "replay", "--synthetic", "--conversations", "1000", "--json", "--quiet", "--block-bytes", "32KiB",
			"--seed", fmt.Sprint(rng.Uint64()), "--socket", n.socket))
		ops, delay := rng.IntN(30), time.Duration(rng.IntN(4000))*time.Microsecond
		engines[0].after(ops)
		dead := make(chan struct{})
		time.AfterFunc(delay, func() { n.kill(); close(dead) }) // between two answers, not at one
		<-dead
		fresh := 0
		for i, e := range engines {
			r := e.ended()
			if r.Lost == 0 {
				t.Errorf("round %d: engine %s has not noticed", round, e.args.Name)
			}
			eventually(t, bound(), "unmapped region", func() error {
				if regionMapped(e.pid()) {
					return fmt.Errorf("the engine still has the region of the dead node")
				}
				return nil
			})
			e.kill()
			for c, blocks := range r.Acked {
				fresh += acked.add(loads[i].prompt(c, 0)[1].Name, blocks)
			}
		}
		if code := beside.exit(bound()); code != 1 {
			t.Errorf("round %d: replay beside it ends with %d, want 1: %s", round, code, beside.stderr.String())
		}
		if fresh == 0 && ops > 5 {
			t.Errorf("round %d: nothing was acknowledged in %d requests", round, ops)
		}
		if _, err := os.Lstat(n.socket); err != nil {
			t.Fatalf("a killed node leaves its socket, for the next to take over: %v", err)
		}
		v := verifyRoot(t, at)
		seen.add(kills{kills: 1, acked: fresh, verified: int(v.Good), temporary: int(v.Temporary)})
		t.Logf("round %d, tight %v: killed %v after %d requests; %d blocks were acknowledged, %d of %d bytes are used by %d blocks", round, tight, delay, ops, fresh, v.UsedBytes, v.BoundBytes, v.Good)
	}
	return seen
}

// acknowledged has the blocks that must be there: by name, their numbers.
type acknowledged map[string]map[int]bool

func (a acknowledged) add(name string, blocks []int) (fresh int) {
	if a[name] == nil {
		a[name] = map[int]bool{}
	}
	for _, i := range blocks {
		if !a[name][i] {
			a[name][i] = true
			fresh++
		}
	}
	return fresh
}

// verifyRoot has terrace verify check a root that no node uses: nothing may be
// wrong with it.
func verifyRoot(t *testing.T, at nodeAt) fstier.VerifyReport {
	t.Helper()
	code, out, errs := run(t, at.env, "verify", "--json", at.root)
	var v struct {
		Findings []fstier.Finding
		Report   fstier.VerifyReport
	}
	if err := json.Unmarshal([]byte(out), &v); err != nil {
		t.Fatalf("verify: exit code %d, %v\n%s%s", code, err, out, errs)
	}
	r := &v.Report
	if code != 0 || len(v.Findings) > 0 || r.InUse != "" || r.Vanished > 0 {
		t.Errorf("verify: exit code %d, findings %+v, %+v", code, v.Findings, *r)
	}
	if sum := du(t, at.root); r.UsedBytes != sum || r.BoundBytes < sum {
		t.Errorf("verify counts %d bytes, the usage file says %d at most; the files have %d", r.UsedBytes, r.BoundBytes, sum)
	}
	return *r
}

// checkAfterKill looks for all that was acknowledged, and counts what has been
// evicted.
func checkAfterKill(t *testing.T, n *node, acked acknowledged, tight bool) (evicted int) {
	t.Helper()
	n.scanned()
	n.exact()
	for _, dir := range []string{"tmp", "quarantine"} {
		if left, _ := filepath.Glob(filepath.Join(n.root, dir, "*")); len(left) > 0 {
			t.Errorf("left in %s: %v", dir, left)
		}
	}
	if s := sharedMemory(t); s != "" {
		t.Errorf("left in /dev/shm: %s", s)
	}
	pid, err := os.ReadFile(n.socket + ".lock")
	if err != nil || strings.TrimSpace(string(pid)) != fmt.Sprint(n.pid()) {
		t.Errorf("the socket's lock says %q, %v", pid, err)
	}
	before := n.status()
	if err := notIdle(before); err != nil || before.Primary.Blocks != 0 {
		t.Errorf("a new node has %d blocks, %v", before.Primary.Blocks, err)
	}
	files := len(blockFiles(t, n.root))
	f := fsOf(before)
	if f.Blocks != int64(files) || f.SetAside != 0 || f.Corrupt != 0 {
		t.Errorf("%d files, in the status %+v", files, f)
	}
	if tight && f.UsedBytes > tightCapacity {
		t.Errorf("%d bytes are used of %d", f.UsedBytes, tightCapacity)
	}

	engine := n.engine("after")
	ns, err := block.NewNamespace(spec(blockBytes))
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(n.root, ns.Fingerprint().String())
	for _, name := range slices.Sorted(maps.Keys(acked)) {
		var p Prompt
		for _, i := range slices.Sorted(maps.Keys(acked[name])) {
			key := Prompt{{name, i, 1}}.keys()[0].String()
			if _, err := os.Lstat(filepath.Join(dir, key[:2], key)); err != nil && tight {
				evicted++
				delete(acked[name], i)
				continue
			}
			p = append(p, Span{name, i, 1})
		}
		for len(p) > 0 {
			part := p[:min(64, len(p))]
			p = p[len(part):]
			if got := engine.do(Ask{ID: name, Prompt: part, LoadOnly: true}); got.Hits != len(part) {
				t.Errorf("%s: %d of %d acknowledged blocks are hits: %v", name, got.Hits, len(part), got.Verdicts)
			}
		}
	}
	// What is evicted is evicted for room: where blocks are missing, there is
	// no more room than the writes under way had taken.
	if room := tightCapacity - f.UsedBytes; evicted > 0 && room > tightCapacity/4 {
		t.Errorf("%d acknowledged blocks are missing, and %d of %d bytes are free", evicted, room, tightCapacity)
	}
	engine.goodbye()
	if got := checkRoot(t, n); got != files {
		t.Errorf("%d files, %d were checked", files, got)
	}
	if f := fsOf(n.idle()); f.Corrupt != 0 || f.SetAside != 0 {
		t.Errorf("broken copies: %+v", f)
	}
	n.exact()
	n.verify()
	return evicted
}

// verify has the node check itself.
func (n *node) verify() {
	n.t.Helper()
	resp, err := web.Post("http://"+n.addr+"/v1/verify?pause=20s", "", nil)
	if err != nil {
		n.t.Fatal(err)
	}
	defer resp.Body.Close()
	var r nodes.VerifyReport
	if err := json.NewDecoder(resp.Body).Decode(&r); err != nil || resp.StatusCode != 200 || !r.OK || len(r.Skipped) > 0 || len(r.Tiers) != 1 {
		n.t.Errorf("the node's check of itself: %s, %v, %+v", resp.Status, err, r)
	}
}

// slowly makes the tier write one block at a time, to the disk.
var slowly = []string{"--primary", "128MiB", "--set", "tiers.fs.sync=data", "--set", "tiers.fs.lane.write_parallel=1", "--set", "tiers.fs.lane.inflight_bytes=1MiB"}

// backlog gives the node more to write than it can in a moment.
func backlog(n *node, e *engine) (blocks int) {
	n.t.Helper()
	for i := range 4 {
		blocks += e.do(Ask{ID: fmt.Sprint("backlog ", i), Prompt: own(fmt.Sprint("backlog ", i), 30)}).Stored.Stored
	}
	return blocks
}

func bigEngine(n *node) *engine { return n.engineOf(engineArgs{Name: "big", BlockBytes: 256 << 10}) }

// TestStopUnderLoad: SIGTERM drains. What was stored is written, engines hear
// of the end, and the exit code is 0.
func TestStopUnderLoad(t *testing.T) {
	t.Parallel()
	at := place(t)
	n := serve(t, at, slowly...)
	busy, big := n.engine("busy"), bigEngine(n)
	busy.start(Load{Prefix: "busy", Conversations: 50, Turn: 10, Parallel: 2})
	stored := backlog(n, big)
	busy.after(1)
	began := time.Now()
	n.signal(syscall.SIGTERM)
	// While it drains it is watched: alive, and not ready.
	eventually(t, bound(), "drain", func() error {
		if !n.running() {
			return nil // too fast to be seen
		}
		if !strings.Contains(n.stderr.String(), "stopping; a second signal ends at once") {
			return fmt.Errorf("the log says nothing of the signal")
		}
		resp, err := web.Get("http://" + n.addr + "/readyz")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != 503 {
			return fmt.Errorf("readyz: %s", resp.Status)
		}
		return nil
	})
	if code := n.exit(bound()); code != 0 {
		t.Errorf("exit code %d", code)
	}
	took := time.Since(began)
	t.Logf("drained in %v", took)
	if r := busy.ended(); r.Lost == 0 {
		t.Error("the engine has not noticed")
	}
	// Once a second it says what it waits for; on a fast disk it never comes to that.
	if log := n.stderr.String(); took > 3*time.Second && (!strings.Contains(log, "waiting_for") || !strings.Contains(log, "to write")) {
		t.Error("the log does not say what the drain waited for")
	}
	for _, left := range []string{n.socket, n.socket + ".lock"} {
		if _, err := os.Lstat(left); !os.IsNotExist(err) {
			t.Errorf("%s is left: %v", left, err)
		}
	}

	n = serve(t, at, "--primary", "32MiB")
	n.scanned()
	n.exact()
	e := bigEngine(n)
	for i := range 4 {
		if got := e.do(Ask{ID: fmt.Sprint(i), Prompt: own(fmt.Sprint("backlog ", i), 30), LoadOnly: true}); got.Hits != 30 {
			t.Errorf("%d of 30 blocks that were stored before the stop are hits (%d in all): %v", got.Hits, stored, got.Verdicts)
		}
	}
	e.goodbye()
	checkRoot(t, n)
}

// TestDrainBound: what is not written by then is left, is named, and is whole
// or absent in the next start.
func TestDrainBound(t *testing.T) {
	t.Parallel()
	at := place(t)
	n := serve(t, at, append(slowly, "--drain-timeout", "1ms")...)
	backlog(n, bigEngine(n))
	n.signal(syscall.SIGTERM)
	if code := n.exit(bound()); code != 3 {
		t.Errorf("exit code %d, want 3", code)
	}
	if log := n.stderr.String(); !strings.Contains(log, "drain bound passed with") || !strings.Contains(log, "to write") {
		t.Error("the log does not name what was left")
	}
	n = serve(t, at, "--primary", "32MiB")
	n.scanned()
	n.exact()
	t.Logf("%d blocks were written", checkRoot(t, n))
	if f := fsOf(n.status()); f.SetAside != 0 || f.Corrupt != 0 {
		t.Errorf("broken copies: %+v", f)
	}
}

// TestSecondSignal ends the node whatever it waits for.
func TestSecondSignal(t *testing.T) {
	t.Parallel()
	at := place(t)
	n := serve(t, at, slowly...)
	big := bigEngine(n)
	backlog(n, big)
	for i := range 6 { // more of it, so that there is time for a second signal
		big.do(Ask{ID: fmt.Sprint("more ", i), Prompt: own(fmt.Sprint("more ", i), 30)})
	}
	n.signal(syscall.SIGTERM)
	eventually(t, bound(), "first signal", func() error {
		if !strings.Contains(n.stderr.String(), "stopping; a second signal ends at once") {
			return fmt.Errorf("not in the log")
		}
		return nil
	})
	began := time.Now()
	n.signal(syscall.SIGINT)
	code := n.exit(bound())
	log := n.stderr.String()
	switch {
	case code == 0 && time.Since(began) < 50*time.Millisecond:
		t.Skip("the drain was over before the second signal")
	case code != 130 || !strings.Contains(log, "ended without a drain"):
		t.Errorf("exit code %d, want 130", code)
	}
	t.Logf("ended %v after the second signal", time.Since(began))
	n = serve(t, at, "--primary", "32MiB")
	n.scanned()
	n.exact()
	checkRoot(t, n)
}

// TestEnginesComeBack: engines outlive a node that is killed, and go on with
// the next one, where they find what the first had written.
func TestEnginesComeBack(t *testing.T) {
	t.Parallel()
	at := place(t)
	n := serve(t, at)
	var engines []*engine
	for i := range 2 {
		e := n.engine(fmt.Sprint("engine ", i))
		e.start(Load{Prefix: "all", Seed: uint64(i), Conversations: 30, Turn: 12, Parallel: 2, Flush: true, Reconnect: true})
		engines = append(engines, e)
	}
	for range often(2, 20) {
		for _, e := range engines {
			e.after(10)
		}
		n.kill()
		n = serve(t, at)
		for _, e := range engines {
			e.after(10)
		}
	}
	if st := n.status(); len(st.Sessions) != 2 || fsOf(st).Hits == 0 {
		t.Errorf("sessions %+v, tier %+v", st.Sessions, fsOf(st))
	}
	for _, e := range engines {
		if r := e.finish(); r.Lost == 0 {
			t.Error("an engine has not noticed")
		}
		e.goodbye()
	}
	n.idle()
	n.scanned()
	n.exact()
	checkRoot(t, n)
}
