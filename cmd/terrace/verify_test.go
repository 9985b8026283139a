package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/terrace-kv/terrace/internal/node"
	"github.com/terrace-kv/terrace/tier/fstier"
)

// verified is what verify --json prints of a folder.
type verified struct {
	Findings []fstier.Finding
	Error    string
	Report   fstier.VerifyReport
}

func verifyJSON(t *testing.T, want int, args ...string) (v verified, stderr string) {
	t.Helper()
	code, out, stderr := runHere(nil, append([]string{"verify", "--json"}, args...)...)
	d := json.NewDecoder(strings.NewReader(out))
	if err := d.Decode(&v); err != nil || d.More() || code != want {
		t.Fatalf("verify %v: exit code %d, want %d; %v\n%s%s", args, code, want, err, out, stderr)
	}
	return v, stderr
}

// TestVerify: a folder that a node fills, then that it has left, then one that
// is damaged.
func TestVerify(t *testing.T) {
	root := filepath.Join(t.TempDir(), "fs")
	p, block := start(t, "serve", "--primary", "64MiB", "--admin", ":0", "--fs-root", root)
	store(t, socketOf(t, block))
	addr := adminOf(t, block)
	if v, _ := verifyJSON(t, 0, root); !strings.Contains(v.Report.InUse, fmt.Sprintf("pid %d on ", p.Process.Pid)) || len(v.Findings) > 0 {
		t.Errorf("under a node: %+v", v)
	}
	if code, out, errs := runHere(nil, "verify", root); code != 0 || !strings.Contains(out, "in use by pid ") || !strings.Contains(out, "all is well") {
		t.Errorf("under a node: %d %s %s", code, out, errs)
	}

	// The node itself.
	code, out, errs := runHere(nil, "verify", "--admin", addr)
	if code != 0 || !strings.Contains(out, "all is well") || !strings.Contains(out, "calls waited") || !strings.Contains(out, "tier fs ") {
		t.Errorf("a node: %d %s %s", code, out, errs)
	}
	var r node.VerifyReport
	code, out, errs = runHere(nil, "verify", "--json", "--pause", "20s", "--admin", addr)
	if err := json.Unmarshal([]byte(out), &r); err != nil || code != 0 || !r.OK || r.Primary.CapacityBytes != 64<<20 || len(r.Tiers) != 1 || r.Tiers[0].Name != "fs" {
		t.Errorf("a node: %d %s %s %v", code, out, errs, err)
	}
	if code, _, errs := runHere(nil, "verify", "--pause", "2m", "--admin", addr); code != exitUsage || !strings.Contains(errs, "--pause") {
		t.Errorf("a long pause: %d %s", code, errs)
	}
	_ = p.Process.Signal(syscall.SIGTERM)
	if code := p.ends(t); code != exitOK {
		t.Errorf("exit code %d\n%s", code, p.stderr)
	}
	if code, _, errs := runHere(nil, "verify", "--admin", addr); code != exitUsage || !strings.Contains(errs, "no node answers") {
		t.Errorf("no node: %d %s", code, errs)
	}

	v, _ := verifyJSON(t, 0, root, "--workers", "3")
	if n := v.Report.Good; n < 5 || v.Report.InUse != "" || v.Report.UsedBytes != v.Report.BoundBytes || v.Findings == nil {
		t.Errorf("left in order: %+v", v)
	}
	files, err := filepath.Glob(filepath.Join(root, strings.Repeat("?", 64), "??", strings.Repeat("?", 72)))
	if err != nil || int64(len(files)) != v.Report.Good {
		t.Fatalf("%d files, %d good: %v", len(files), v.Report.Good, err)
	}
	for _, path := range files[:3] {
		if err := os.Truncate(path, 100); err != nil {
			t.Fatal(err)
		}
	}
	v, errs = verifyJSON(t, 1, root)
	if len(v.Findings) != 3 || v.Report.Bad != 3 || v.Report.Good != int64(len(files)-3) || v.Findings[0].Do == "" || !strings.Contains(errs, "3 problems in "+root) {
		t.Errorf("three damaged files: %+v %s", v, errs)
	}
	code, out, errs = runHere(nil, "verify", root)
	if code != 1 || strings.Count(out, "bad "+root) != 3 || strings.Count(out, "do: remove it") != 3 || !strings.Contains(out, "3 problems") {
		t.Errorf("three damaged files: %d %s %s", code, out, errs)
	}
}

// TestVerifyRefuses: what is not asked right is told apart from what is wrong.
func TestVerifyRefuses(t *testing.T) {
	dir := t.TempDir()
	for _, x := range []struct {
		args []string
		want string
	}{
		{[]string{dir}, "holds nothing of a filesystem tier"},
		{[]string{filepath.Join(dir, "none")}, "no such file"},
		{[]string{dir, "--admin", ":1", "--pause", "1s"}, "--admin, --pause is about a running node"},
		{[]string{dir, "--workers", "0"}, "--workers is 0"},
		{[]string{dir, dir}, "accepts at most 1 arg"},
		{[]string{"--admin", ":0"}, "port 0"},
	} {
		code, out, errs := runHere(nil, append([]string{"verify"}, x.args...)...)
		if code != exitUsage || !strings.Contains(errs, x.want) || out != "" {
			t.Errorf("%v: %d, %q, %q; want %q", x.args, code, out, errs, x.want)
		}
	}
}

// TestVerifySignal: a signal ends it early, and it says how far it came.
func TestVerifySignal(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "LOCK"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	// A folder without end, for a moment.
	deep := dir
	for range 30 {
		deep = filepath.Join(deep, "d")
		for i := range 60 {
			if err := os.MkdirAll(filepath.Join(deep, fmt.Sprint(i)), 0o700); err != nil {
				t.Fatal(err)
			}
		}
	}
	var out, errs bytes.Buffer
	code := 0
	for range 50 { // it may be through before the signal is seen, not each time
		signals := make(chan os.Signal, 1)
		signals <- syscall.SIGINT
		out.Reset()
		errs.Reset()
		code = run([]string{"verify", dir}, env{out: &out, err: &errs, exit: func(int) {}, signals: func() <-chan os.Signal { return signals }})
		if code != exitOK {
			break
		}
	}
	if code != exitSignaled || !strings.Contains(errs.String(), "interrupt before all was checked") {
		t.Errorf("%d %s %s", code, &out, &errs)
	}
}

// TestVerifyForPeople: what a check with all kinds of findings looks like.
func TestVerifyForPeople(t *testing.T) {
	var b bytes.Buffer
	p := findings{w: &b}
	p.found(fstier.Finding{Kind: fstier.FindBad, Path: "/nvme/ab/cd", What: "it ends after 5 bytes", Do: "remove it"})
	p.found(fstier.Finding{Kind: fstier.FindForeign, Path: "/nvme/README", What: "it is none of the tier's", Do: "nothing"})
	r := fstier.VerifyReport{Root: "/nvme", InUse: "pid 7 on host since yesterday", Namespaces: 2, Good: 1000, Bad: 1, Foreign: 1, Temporary: 4, Quarantined: 3, Vanished: 9,
		Problems: 1, CheckedBytes: 65536000, UsedBytes: 70 << 20, BoundBytes: 128 << 20, Done: 1, Took: 1234567890}
	p.end(&r, nil)
	fmt.Fprintf(&b, "\n-- progress\n%s\n", progressLine(&r))
	fmt.Fprint(&b, "\n-- a signal, and no node's bound\n")
	q := findings{w: &b}
	r.InUse, r.BoundBytes, r.Problems, r.Done = "", 0, 0, 0.25
	q.end(&r, io.EOF)
	fmt.Fprint(&b, "\n-- a node\n")
	n := node.VerifyReport{Problems: []string{"primary: capacity: …"}, Skipped: []string{"tier fs: a walk over 100 blocks …"}, PauseSeconds: 0.0123, Pins: 3,
		Primary: node.PrimaryStatus{CapacityBytes: 1 << 30, FreeBytes: 1 << 29, EvictableBytes: 1 << 28, Blocks: 77}, Tiers: []node.VerifiedTier{{Name: "fs", Blocks: 8, UsedBytes: 1 << 20, PauseSeconds: 0.5}}}
	if err := writeVerify(&b, &n); err != nil {
		t.Fatal(err)
	}
	golden(t, "verify.txt", b.String())
}
