package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestNodeKilled: a node is killed in the middle of a load, again and again,
// and started in the same place. Each time every store that a flush has acknowledged is found
// and right, nothing half-done is visible, nothing of the dead node is left,
// and the count of bytes is exact.
func TestNodeKilled(t *testing.T) {
	t.Parallel()
	at := place(t)
	rng := random(t)
	rounds := often(4, 40)
	acked := map[string][]int{} // blocks that must be there, by name
	total := 0
	for round := range rounds + 1 {
		n := serve(t, at, "--primary", "8MiB")
		if round > 0 {
			checkAfterKill(t, n, acked)
		}
		if round == rounds || t.Failed() {
			break
		}
		engine := n.engine("recorder")
		load := Load{Prefix: fmt.Sprint("round ", round), Seed: rng.Uint64(), Conversations: 1000, Turn: 24, Parallel: 3, Flush: true}
		engine.start(load)
		beside := launch(t, "replay", terraceCommand(t, at.env, "replay", "--synthetic", "--conversations", "1000", "--json", "--quiet", "--block-bytes", "32KiB",
			"--seed", fmt.Sprint(rng.Uint64()), "--socket", n.socket))
		ops, delay := 5+rng.IntN(30), time.Duration(rng.IntN(4000))*time.Microsecond
		engine.after(ops)
		dead := make(chan struct{})
		time.AfterFunc(delay, func() { n.kill(); close(dead) }) // between two answers, not at one
		<-dead
		r := engine.ended()
		if r.Lost == 0 {
			t.Errorf("round %d: the engine has not noticed", round)
		}
		if code := beside.exit(bound()); code != 1 {
			t.Errorf("round %d: replay beside it ends with %d, want 1: %s", round, code, beside.stderr.String())
		}
		eventually(t, bound(), "unmapped region", func() error {
			if regionMapped(engine.pid()) {
				return fmt.Errorf("the engine still has the region of the dead node")
			}
			return nil
		})
		engine.kill()
		fresh := 0
		for c, blocks := range r.Acked {
			name := load.prompt(c, 0)[1].Name
			acked[name] = append(acked[name], blocks...)
			fresh += len(blocks)
		}
		if fresh == 0 {
			t.Errorf("round %d: nothing was acknowledged in %d requests", round, r.Ops)
		}
		total += fresh
		if _, err := os.Lstat(n.socket); err != nil {
			t.Fatalf("a killed node leaves its socket, for the next to take over: %v", err)
		}
		t.Logf("round %d: killed %v after %d requests; %d blocks were acknowledged", round, delay, r.Ops, fresh)
	}
	t.Logf("%d blocks were acknowledged and found", total)
}

func checkAfterKill(t *testing.T, n *node, acked map[string][]int) {
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
	if f := fsOf(before); f.Blocks != int64(files) || f.SetAside != 0 || f.Corrupt != 0 {
		t.Errorf("%d files, in the status %+v", files, f)
	}

	engine := n.engine("after")
	for name, blocks := range acked {
		for len(blocks) > 0 {
			part := blocks[:min(64, len(blocks))]
			blocks = blocks[len(part):]
			var p Prompt
			for _, i := range part {
				p = append(p, Span{name, i, 1})
			}
			if got := engine.do(Ask{ID: name, Prompt: p, LoadOnly: true}); got.Hits != len(part) {
				t.Errorf("%s: %d of %d acknowledged blocks are hits: %v", name, got.Hits, len(part), got.Verdicts)
			}
		}
	}
	engine.goodbye()
	if got := checkRoot(t, n); got != files {
		t.Errorf("%d files, %d were checked", files, got)
	}
	if f := fsOf(n.idle()); f.Corrupt != 0 || f.SetAside != 0 {
		t.Errorf("broken copies: %+v", f)
	}
	n.exact()
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
