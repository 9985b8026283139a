package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// frozen stops the node, calls fn while nothing of it moves, and lets it go on.
func (n *node) frozen(fn func()) {
	n.t.Helper()
	n.signal(syscall.SIGSTOP)
	defer n.signal(syscall.SIGCONT)
	eventually(n.t, bound(), "stopped node", func() error {
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", n.pid()))
		if err != nil || len(tasks) == 0 {
			n.t.Fatalf("tasks %v, %v", tasks, err)
		}
		for _, path := range tasks {
			b, err := os.ReadFile(path)
			if err != nil {
				continue // the thread has ended
			}
			_, rest, _ := strings.Cut(string(b), ") ")
			if !strings.HasPrefix(rest, "T") {
				return fmt.Errorf("%s: %.1s", path, rest)
			}
		}
		return nil
	})
	fn()
}

// taken is the room that a frozen node's tier takes: the regular files of the
// root, and those that are written and have no name yet.
func (n *node) taken() (bytes int64) {
	n.t.Helper()
	bytes = du(n.t, n.root)
	var root syscall.Stat_t
	if err := syscall.Stat(n.root, &root); err != nil {
		n.t.Fatal(err)
	}
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", n.pid()))
	if err != nil {
		n.t.Fatal(err)
	}
	for _, fd := range list {
		var st syscall.Stat_t
		if syscall.Stat(fmt.Sprintf("/proc/%d/fd/%s", n.pid(), fd.Name()), &st) != nil ||
			st.Dev != root.Dev || st.Mode&syscall.S_IFMT != syscall.S_IFREG || st.Nlink != 0 {
			continue
		}
		info, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%s", n.pid(), fd.Name()))
		if err != nil {
			n.t.Fatal(err)
		}
		var flags int
		if _, err := fmt.Sscanf(string(info[strings.Index(string(info), "flags:"):]), "flags:\t%o", &flags); err != nil {
			n.t.Fatal(err)
		}
		// One that is only read was evicted while it was being read. It is no
		// file of the root any more, and its room is free in a moment.
		if flags&syscall.O_ACCMODE != syscall.O_RDONLY {
			bytes += st.Blocks * 512
		}
	}
	return bytes
}

// TestCapacity: at no moment do the tier's files take more than they may:
// under a load of many times as much, through a kill, and in the restart.
func TestCapacity(t *testing.T) {
	t.Parallel()
	const capacity = 8 << 20
	at := place(t)
	looks := often(60, 2000)
	peak, evicted := int64(0), int64(0)
	for round := range 3 {
		n := serve(t, at, "--primary", "16MiB", "--fs-capacity", fmt.Sprint(capacity))
		// At once, also while the scan runs.
		a, b := n.engine("a"), n.engine("b")
		a.start(Load{Prefix: fmt.Sprint(round), Seed: 1, Conversations: 300, Turn: 20, Parallel: 2, Flush: true})
		b.start(Load{Prefix: fmt.Sprint(round), Seed: 2, Conversations: 300, Turn: 20, Parallel: 2})
		check := func(when string) {
			n.frozen(func() {
				sum := n.taken()
				peak = max(peak, sum)
				if sum > capacity {
					t.Errorf("round %d, %s: the files take %d bytes, %d are allowed", round, when, sum, capacity)
				}
			})
		}
		for i := range looks / 3 {
			check("under load")
			if i%4 == 0 {
				a.after(1)
			}
		}
		eventually(t, bound(), "evictions", func() error {
			if f := fsOf(n.status()); f.Evicted < 200 {
				return fmt.Errorf("%d blocks were evicted, %d used of %d", f.Evicted, f.UsedBytes, f.CapacityBytes)
			}
			return nil
		})
		if v := n.metric(`terrace_tier_evicted_blocks_total{tier="fs"}`); v < 200 {
			t.Errorf("the metric of evictions says %v", v)
		}
		if round == 1 {
			n.kill()
			if sum := du(t, at.root); sum > capacity {
				t.Errorf("a killed node leaves %d bytes, %d are allowed", sum, capacity)
			}
			a.ended()
			b.ended()
			a.kill()
			b.kill()
			continue
		}
		if r := a.finish(); r.Refused > 0 {
			t.Errorf("%d stores were refused: a full tier is no reason", r.Refused)
		}
		b.finish()
		a.goodbye()
		b.goodbye()
		st := fsOf(n.idle())
		evicted += st.Evicted
		for cause, count := range positive(st.Failures) {
			t.Errorf("%d failures for %s: %s", count, cause, st.LastError)
		}
		n.exact()
		checkRoot(t, n)
		check("idle")
		n.stops(0)
	}
	if peak < capacity*9/10 {
		t.Errorf("the files took %d bytes at most, so %d was not put to the test", peak, capacity)
	}
	t.Logf("the files took %d bytes at most, of %d; %d blocks were evicted", peak, capacity, evicted)
}
