package e2e

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// member is a node that shares its root with others.
type member struct {
	*node
	at       nodeAt
	id       string
	number   int64
	capacity int64
	engine   *engine
}

// start runs the node, again or for the first time.
func (m *member) start(t *testing.T) {
	t.Helper()
	m.node = serve(t, m.at, "--primary", "8MiB", "--fs-capacity", fmt.Sprint(m.capacity), "--set", "core.distrust_for=500ms",
		"--set", "tiers.fs.shared=true", "--set", "tiers.fs.node_id="+m.id)
	_, mode, ok := strings.Cut(fsOf(m.status()).Mode, "shared as "+m.id+" (")
	number, err := strconv.ParseInt(strings.TrimSuffix(mode, ")"), 10, 64)
	if !ok || err != nil || m.number != 0 && number != m.number {
		t.Fatalf("the mode of node %s is %q; it had number %d", m.id, fsOf(m.status()).Mode, m.number)
	}
	m.number = number
}

// own is the room that the node's files take.
func (m *member) own() (bytes int64) {
	t := m.t
	t.Helper()
	own := []string{fmt.Sprintf("LOCK/%04x", m.number), fmt.Sprintf("nodes/%04x/", m.number)}
	err := walk(m.root, func(path string, st *syscall.Stat_t) {
		rel, _ := filepath.Rel(m.root, path)
		switch {
		case st.Mode&syscall.S_IFMT != syscall.S_IFREG:
		case rel == own[0], strings.HasPrefix(rel, own[1]), len(filepath.Base(rel)) == 72 && st.Size%4096 == m.number:
			bytes += st.Blocks * 512
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return bytes
}

// counts checks that an idle node counts what is its own.
func (m *member) counts() {
	m.t.Helper()
	m.idle()
	m.scanned()
	if used, own := fsOf(m.status()).UsedBytes, m.own(); used != own {
		m.t.Errorf("node %s says that it uses %d bytes, its files take %d", m.id, used, own)
	}
}

// TestSharedRoot: three nodes on one root, each under load and with less room
// than it wants. Each keeps to its own capacity and evicts its own; one is
// killed and finds its own again; what one stores another serves; and all that
// is there is right.
func TestSharedRoot(t *testing.T) {
	t.Parallel()
	root := filepath.Join(t.TempDir(), "shared")
	var all []*member
	for i, id := range []string{"a", "b", "c"} {
		m := &member{at: place(t), id: id, capacity: int64(3+i) << 20}
		m.at.root = root
		m.start(t)
		all = append(all, m)
	}
	// Who does not share, and who has another's name, is refused.
	alone := place(t)
	for _, x := range []struct{ want, args string }{
		{"shared by several nodes", "tiers.fs.shared=false"}, {`node_id "b" is in use`, "tiers.fs.shared=true,tiers.fs.node_id=b"},
	} {
		at := alone
		at.root = root
		var args []string
		for _, set := range strings.Split(x.args, ",") {
			args = append(args, "--set", set)
		}
		p := launch(t, "refused", terraceCommand(t, at.env, serveArgs(at, args)...))
		if code := p.exit(bound()); code != 1 || !strings.Contains(p.stderr.String(), x.want) {
			t.Errorf("%s: exit code %d: %s", x.args, code, p.stderr.String())
		}
	}

	load := func(i int) {
		m := all[i]
		m.engine = m.node.engine("engine of " + m.id)
		m.engine.start(Load{Prefix: "all", Seed: uint64(i), Conversations: 100, Turn: 12, Parallel: 2, Flush: true})
	}
	for i := range all {
		load(i)
	}
	check := func(m *member) {
		m.frozen(func() {
			if own := m.own(); own > m.capacity {
				t.Errorf("the files of node %s take %d bytes, %d are allowed", m.id, own, m.capacity)
			}
		})
	}
	for range often(6, 200) {
		for _, m := range all {
			m.engine.after(2)
			check(m)
		}
	}
	b := all[1]
	b.kill()
	b.engine.ended()
	b.engine.kill()
	left := b.own()
	if left > b.capacity || left < b.capacity/2 {
		t.Errorf("the killed node leaves %d bytes, %d are allowed", left, b.capacity)
	}
	all[0].engine.after(5) // the others go on, and do not touch what was its
	all[2].engine.after(5)
	if own := b.own(); own != left {
		t.Errorf("the killed node had %d bytes, and has %d", left, own)
	}
	b.start(t)
	load(1)
	for _, m := range all {
		eventually(t, bound(), "evictions", func() error {
			if f := fsOf(m.status()); f.Evicted < 20 {
				return fmt.Errorf("node %s evicted %d blocks", m.id, f.Evicted)
			}
			return nil
		})
		check(m)
	}
	for _, m := range all {
		if r := m.engine.finish(); r.Refused > 0 {
			t.Errorf("%d stores were refused", r.Refused)
		}
	}

	// What one stores another has as soon as it is asked, or, if it was asked
	// before, in two seconds.
	p := own("from a", 10)
	if got := all[2].engine.do(Ask{ID: "early", Prompt: p, LoadOnly: true}); got.Hits != 0 {
		t.Errorf("%d hits of what nobody has stored", got.Hits)
	}
	all[0].engine.store("p", p)
	if got := all[1].engine.do(Ask{ID: "at once", Prompt: p, LoadOnly: true}); got.Hits != 10 {
		t.Errorf("%d of 10 blocks that another node has stored are hits: %v", got.Hits, got.Verdicts)
	}
	stored := time.Now()
	eventually(t, bound(), "hits after a miss", func() error {
		if got := all[2].engine.do(Ask{ID: "late", Prompt: p, LoadOnly: true}); got.Hits != 10 {
			return fmt.Errorf("%d of 10: %v", got.Hits, got.Verdicts)
		}
		return nil
	})
	t.Logf("another node had the blocks %v after they were stored, having missed them before", time.Since(stored))
	for _, m := range all {
		m.engine.goodbye()
		st := fsOf(m.idle())
		for cause, count := range positive(st.Failures) {
			t.Errorf("node %s: %d failures for %s: %s", m.id, count, cause, st.LastError)
		}
		if st.Corrupt != 0 || st.SetAside != 0 {
			t.Errorf("node %s: %+v", m.id, st)
		}
		m.counts()
		m.stops(0)
	}
	for _, m := range all {
		m.start(t)
		m.scanned()
	}
	files := len(blockFiles(t, root))
	for _, m := range all {
		if n := checkRoot(t, m.node); n != files {
			t.Errorf("%d files were checked, there are %d", n, files)
		}
		m.counts()
	}
}
