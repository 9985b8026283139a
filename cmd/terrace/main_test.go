package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/terrace-kv/terrace"
	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/config"
	"github.com/terrace-kv/terrace/internal/rma/ucx"
	"github.com/terrace-kv/terrace/tier"
)

var rewrite = flag.Bool("rewrite", false, "write golden files anew")

// asTerrace makes the test binary be terrace, so that tests can start it as a
// process of its own. Not with TERRACE_: those are settings.
const asTerrace = "RUN_AS_TERRACE"

func TestMain(m *testing.M) {
	if os.Getenv(asTerrace) != "" {
		tierTypes["hang"] = tierType{
			settings: func() any { return &struct{}{} },
			open: func(_ context.Context, c *config.Tier, _ *slog.Logger) (tier.Tier, error) {
				over := make(chan struct{})
				close(over)
				return &hangingTier{&lateTier{info: tier.Info{Name: c.Name, Type: c.Type, Medium: tier.MediumStorage, Locality: tier.LocalityLocal},
					why: errors.New("none"), stop: func() {}, over: over}}, nil
			},
		}
		main()
	}
	os.Exit(m.Run())
}

// hangingTier has writes that never end, as those of a mount that dies after the
// start.
type hangingTier struct{ *lateTier }

func (h *hangingTier) Write(ctx context.Context, ns *block.Namespace, items []tier.Item) {
	if ns.Spec().Model == selfTestModel {
		h.lateTier.Write(ctx, ns, items)
		return
	}
	select {}
}

// runHere runs a command line in this process.
func runHere(vars []string, args ...string) (code int, stdout, stderr string) {
	var out, err bytes.Buffer
	code = run(args, env{out: &out, err: &err, vars: vars, exit: func(int) {}, signals: func() <-chan os.Signal { return nil }})
	return code, out.String(), err.String()
}

// home makes defaults the same everywhere.
func home(t *testing.T) {
	t.Helper()
	t.Setenv("XDG_CACHE_HOME", "/home/u/.cache")
	t.Setenv("XDG_RUNTIME_DIR", "/run/user/7")
	t.Setenv("TERRACE_SOCKET", "")
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *rewrite {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil || got != string(want) {
		t.Errorf("%s differs (%v); -rewrite makes it anew if this is right:\n%s", path, err, got)
	}
}

// TestCommandLines: what people see, and with which exit code.
func TestCommandLines(t *testing.T) {
	home(t)
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	good := write("good.yaml", "primary: {size: 2GiB}\ntiers:\n- {type: fs, root: /nvme, capacity: unbounded, min_free: none}\n")
	bad := write("bad.yaml", "primary: {sise: 2GiB}\nadmin: {listen: '0.0.0.0:1'}\ntiers: [{type: fs, root: ~/x}, {type: s3}]\n")
	for _, x := range []struct {
		name string
		code int
		vars []string
		args []string
	}{
		{"help", 0, nil, []string{"--help"}},
		{"serve-help", 0, nil, []string{"help", "serve"}},
		{"serve-help", 0, nil, []string{"serve", "--help"}},
		{"verify-help", 0, nil, []string{"verify", "--help"}},
		{"status-help", 0, nil, []string{"status", "--help"}},
		{"unknown-command", 2, nil, []string{"serv"}},
		{"unknown-flag", 2, nil, []string{"serve", "--primry", "1GiB"}},
		{"unknown-flags", 2, nil, []string{"serve", "--primry", "4GiB", "--admn", ":0", "--no-fs", "--nothing-like-it=3", "-x"}},
		{"bad-flag-values", 2, nil, []string{"replay", "--synthetic", "--block-bytes", "64k", "--seed", "-1", "--enginse", "3", "--primary"}},
		{"unknown-subcommand", 2, nil, []string{"config", "chekc"}},
		{"unlike-any-command", 2, nil, []string{"frobnicate"}},
		{"help-of-nothing", 2, nil, []string{"help", "servee"}},
		{"help-of-config-nothing", 2, nil, []string{"help", "config", "prnt"}},
		{"all-set-faults", 2, nil, []string{"config", "print", "--set", "nonsense", "--primary", "x", "--set", "foo.bar=1"}},
		{"config-check-good", 0, []string{"TERRACE_NOT_LOOKED_AT=1"}, []string{"config", "check", good}},
		{"config-check-bad", 2, nil, []string{"config", "check", bad}},
		{"config-check-nothing", 2, nil, []string{"config", "check"}},
		{"config-print-default", 0, nil, []string{"config", "print"}},
		{"config-print-all-sources", 0, []string{"TERRACE_LOG_LEVEL=debug", "TERRACE_TIERS_FS_SYNC=data"}, []string{"config", "print", "--config", good, "--admin", ":0", "--set", "core.lookup_timeout=3s"}},
		{"config-print-no-fs", 0, nil, []string{"config", "print", "--no-fs"}},
		{"serve-faults", 2, []string{"TERRACE_DRAIN_TIMEOUT=10", "TERRACE_TYPO=1"}, []string{"serve", "--primary", "1GBB", "--fs-root", "~/cache"}},
		{"serve-set-without-value", 2, nil, []string{"serve", "--set", "primary.size"}},
		{"no-fs-and-fs-root", 2, nil, []string{"serve", "--no-fs", "--fs-root", "/x"}},
		{"status-port-0", 2, nil, []string{"status", "--admin", ":0"}},
		{"replay-nothing", 2, nil, []string{"replay"}},
	} {
		t.Run(x.name, func(t *testing.T) {
			code, out, err := runHere(x.vars, x.args...)
			if code != x.code {
				t.Errorf("exit code %d, want %d", code, x.code)
			}
			golden(t, x.name+".txt", strings.ReplaceAll(fmt.Sprintf("%s--- stderr, exit code %d\n%s", out, code, err), dir, "DIR"))
		})
	}
}

func TestVersion(t *testing.T) {
	code, out, _ := runHere(nil, "version", "--json")
	var b buildInfo
	if err := json.Unmarshal([]byte(out), &b); err != nil || code != 0 || b.Version == "" || b.Platform == "" || b.Go == "" {
		t.Errorf("%d %s %v", code, out, err)
	}
	if _, out, _ := runHere(nil, "version"); !strings.HasPrefix(out, "terrace ") {
		t.Error(out)
	}
}

func TestStatusForPeople(t *testing.T) {
	var st terrace.Status
	text, err := os.ReadFile("testdata/status.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &st); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := writeStatus(&out, &st); err != nil {
		t.Fatal(err)
	}
	golden(t, "status.txt", out.String())

	if err := json.Unmarshal([]byte(`{"peers": {"peers": [{"node_id": "a\u001b[2J\nb", "why": "\r\u0007"}]}}`), &st); err != nil {
		t.Fatal(err)
	}
	st.Tiers[0].LastError = "x\x1b[31m\ny"
	out.Reset()
	if err := writeStatus(&out, &st); err != nil {
		t.Fatal(err)
	}
	if strings.ContainsAny(out.String(), "\x1b\r\x07") || strings.Contains(out.String(), "\nb") || strings.Contains(out.String(), "\ny") {
		t.Errorf("what others say reaches the terminal: %q", out.String())
	}
}

// TestSettingsAreDocumented keeps the table in docs/operations.md.
func TestSettingsAreDocumented(t *testing.T) {
	home(t)
	in := baseInput(nil)
	in.Socket = "see below"
	var table strings.Builder
	table.WriteString("\n| setting | default | allowed | what it is |\n|---|---|---|---|\n")
	for _, s := range config.Reference(in) {
		value := s.Default
		switch {
		case s.Path == "socket":
			value = "`$XDG_RUNTIME_DIR/terrace/engine.sock`, for root `/run/terrace/engine.sock`, else in a folder of the user's under the temp folder"
		case s.Path == "tiers.fs.root":
			value = "`terrace/fs` in the user's cache folder"
		case value != "":
			value = "`" + value + "`"
		}
		fmt.Fprintf(&table, "| `%s` | %s | %s | %s |\n", s.Path, value, strings.ReplaceAll(s.Allowed, "|", ", "), s.Doc)
	}
	const path, begin, end = "../../docs/operations.md", "<!-- settings: written by `make golden` -->\n", "<!-- end of settings -->"
	doc, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok1 := strings.Cut(string(doc), begin)
	_, after, ok2 := strings.Cut(rest, end)
	if !ok1 || !ok2 {
		t.Fatalf("%s has lost its markers", path)
	}
	want := before + begin + table.String() + "\n" + end + after
	if *rewrite {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if want != string(doc) {
		t.Errorf("the settings in %s are not those of the code; make golden writes them", path)
	}
}

// process is a terrace of its own.
type process struct {
	*exec.Cmd
	lines  chan string // of standard output, up to the end of the start block
	stderr *bytes.Buffer
	done   chan error
}

// start runs terrace with a home of its own, and waits for the line that ends
// the start block.
func start(t *testing.T, args ...string) (p *process, block string) {
	t.Helper()
	p = launch(t, args...)
	for {
		select {
		case line, ok := <-p.lines:
			block += line + "\n"
			if strings.HasPrefix(line, "ready ") {
				return p, block
			}
			if !ok {
				t.Fatalf("it ended at its start: %v\n%s", <-p.done, p.stderr)
			}
		case <-time.After(30 * time.Second):
			t.Fatalf("no start block: %q", block)
		}
	}
}

func launch(t *testing.T, args ...string) *process {
	t.Helper()
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = []string{asTerrace + "=1", "HOME=" + dir, "XDG_RUNTIME_DIR=" + dir, "PATH=" + os.Getenv("PATH"), "TMPDIR=" + dir}
	p := &process{Cmd: cmd, lines: make(chan string, 64), stderr: &bytes.Buffer{}, done: make(chan error, 1)}
	cmd.Stderr = p.stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		for s := bufio.NewScanner(out); s.Scan(); {
			p.lines <- s.Text()
		}
		close(p.lines)
		p.done <- cmd.Wait()
	}()
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return p
}

// ends waits for the end and returns the exit code.
func (p *process) ends(t *testing.T) int {
	t.Helper()
	select {
	case err := <-p.done:
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		return p.ProcessState.ExitCode()
	case <-time.After(30 * time.Second):
		t.Fatal("it does not end")
		return -1
	}
}

func adminOf(t *testing.T, block string) string {
	t.Helper()
	m := regexp.MustCompile(`admin +http://(\S+)`).FindStringSubmatch(block)
	if m == nil {
		t.Fatalf("no admin address in %q", block)
	}
	return m[1]
}

// TestServe: defaults but for the sizes, what the start block says is true, and
// SIGTERM ends it with 0 and nothing left behind.
func TestServe(t *testing.T) {
	p, block := start(t, "serve", "--primary", "64MiB", "--admin", ":0")
	addr := adminOf(t, block)
	st, _, err := fetchStatus(t.Context(), addr)
	if err != nil {
		t.Fatal(err)
	}
	if !st.Ready || st.Primary.CapacityBytes != 64<<20 || st.PID != p.Process.Pid || len(st.Tiers) != 1 || st.Tiers[0].CapacityBytes != 10<<30 {
		t.Errorf("status %+v", st)
	}
	for _, want := range []string{st.Socket, st.Tiers[0].Where, "64MiB", "10GiB"} {
		if want == "" || !strings.Contains(block, want) {
			t.Errorf("the start block lacks %q:\n%s", want, block)
		}
	}
	for _, path := range []string{"/healthz", "/readyz", "/metrics", "/v1/pins"} {
		resp, err := http.Get("http://" + addr + path)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if resp.StatusCode != 200 {
			t.Errorf("%s: %s", path, resp.Status)
		}
	}
	if code, out, errs := runHere(nil, "status", "--admin", addr); code != 0 || !strings.Contains(out, "ready for ") {
		t.Errorf("status: %d %s %s", code, out, errs)
	}
	if code, out, _ := runHere(nil, "status", "--json", "--admin", addr); code != 0 || !json.Valid([]byte(out)) {
		t.Errorf("status --json: %d %s", code, out)
	}
	if err := p.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code := p.ends(t); code != exitOK {
		t.Errorf("exit code %d\n%s", code, p.stderr)
	}
	if _, err := os.Lstat(st.Socket); !os.IsNotExist(err) {
		t.Errorf("the socket is left: %v", err)
	}
	if code, _, errs := runHere(nil, "status", "--admin", addr); code != exitFailure || !strings.Contains(errs, "no node answers") {
		t.Errorf("status of no node: %d %s", code, errs)
	}
}

// TestStatusOfAStoppedNode: a node that does not answer is not one that should
// be started, and is named.
func TestStatusOfAStoppedNode(t *testing.T) {
	p, block := start(t, "serve", "--primary", "16MiB", "--admin", ":0", "--no-fs")
	_ = p.Process.Signal(syscall.SIGSTOP)
	defer func() {
		_ = p.Process.Signal(syscall.SIGCONT)
		_ = p.Process.Signal(syscall.SIGTERM)
		p.ends(t)
	}()
	stopped := func() bool { // each of its threads is
		tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", p.Process.Pid))
		for _, task := range tasks {
			if b, err := os.ReadFile(task); err == nil && !strings.Contains(string(b), ") T ") {
				return false
			}
		}
		return true
	}
	for end := time.Now().Add(5 * time.Second); !stopped(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the node does not stop")
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond) // less than the command waits
	defer cancel()
	_, _, err := fetchStatus(ctx, adminOf(t, block))
	if text := fmt.Sprint(err); strings.Contains(text, "start one") || !strings.Contains(text, "does not answer within") || !strings.Contains(text, fmt.Sprintf("by pid %d (", p.Process.Pid)) {
		t.Error(text)
	}
}

func TestServeWithoutItsTier(t *testing.T) {
	file := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(file, "fs") // nobody can make it, root included
	p, block := start(t, "serve", "--primary", "16MiB", "--admin", ":0", "--fs-root", root)
	if !strings.Contains(block, "NOT OPEN") || !strings.Contains(block, root) {
		t.Errorf("start block:\n%s", block)
	}
	st, _, err := fetchStatus(t.Context(), adminOf(t, block))
	if err != nil || !st.Ready || len(st.Tiers) != 1 || !strings.Contains(st.Tiers[0].ScanError, file) {
		t.Errorf("status %+v, %v", st, err)
	}
	_ = p.Process.Signal(syscall.SIGINT)
	if code := p.ends(t); code != exitOK {
		t.Errorf("exit code %d\n%s", code, p.stderr)
	}

	p = launch(t, "serve", "--primary", "16MiB", "--admin", ":0", "--fs-root", root, "--set", "tiers.fs.required=true")
	if code := p.ends(t); code != exitFailure || !strings.Contains(p.stderr.String(), file) {
		t.Errorf("required: exit code %d\n%s", code, p.stderr)
	}
}

func TestServeWithoutTiers(t *testing.T) {
	p, block := start(t, "serve", "--primary", "16MiB", "--admin", ":0", "--no-fs")
	if !strings.Contains(block, "tiers     none") {
		t.Errorf("start block:\n%s", block)
	}
	_ = p.Process.Signal(syscall.SIGTERM)
	if code := p.ends(t); code != exitOK {
		t.Errorf("exit code %d\n%s", code, p.stderr)
	}
}

// TestServeByUCX: a build without UCX says what it lacks; one with it says what
// that means, and what it does.
func TestServeByUCX(t *testing.T) {
	args := []string{"serve", "--primary", "16MiB", "--admin", ":0", "--no-fs", "--peers-listen", "127.0.0.1:0", "--set", "peers.transport=ucx"}
	f, err := ucx.Open(ucx.Options{})
	if err != nil {
		p := launch(t, args...)
		if code := p.ends(t); code != exitFailure || !strings.Contains(p.stderr.String(), err.Error()) {
			t.Errorf("exit code %d, want 1 and %q\n%s", code, err, p.stderr)
		}
		return
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	p, block := start(t, args...)
	if !strings.Contains(block, "tcp and ucx") {
		t.Errorf("start block:\n%s", block)
	}
	_ = p.Process.Signal(syscall.SIGTERM)
	if code := p.ends(t); code != exitOK || !strings.Contains(p.stderr.String(), "past TLS and certificates") {
		t.Errorf("exit code %d\n%s", code, p.stderr)
	}
}

func TestServeTakenPortAndSocket(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	p := launch(t, "serve", "--primary", "16MiB", "--admin", l.Addr().String())
	if code := p.ends(t); code != exitFailure || !strings.Contains(p.stderr.String(), "admin.listen") || !strings.Contains(p.stderr.String(), fmt.Sprintf("by pid %d", os.Getpid())) {
		t.Errorf("taken port: exit code %d\n%s", code, p.stderr)
	}
	socket := filepath.Join(t.TempDir(), "s")
	first, _ := start(t, "serve", "--primary", "16MiB", "--admin", ":0", "--socket", socket)
	p = launch(t, "serve", "--primary", "16MiB", "--admin", ":0", "--socket", socket)
	if code := p.ends(t); code != exitFailure || !strings.Contains(p.stderr.String(), socket) {
		t.Errorf("taken socket: exit code %d\n%s", code, p.stderr)
	}
	_ = first.Process.Signal(syscall.SIGTERM)
	if code := first.ends(t); code != exitOK {
		t.Errorf("exit code %d\n%s", code, first.stderr)
	}
}

func TestSecondSignalEnds(t *testing.T) {
	signals := make(chan os.Signal)
	exited := make(chan int)
	e := env{out: io.Discard, err: io.Discard, exit: func(code int) { exited <- code }, signals: func() <-chan os.Signal { return signals }}
	ctx, stop := context.WithCancelCause(t.Context())
	watchSignals(e, newLogger(io.Discard, config.Log{Level: "info"}), time.Second, stop)
	signals <- syscall.SIGTERM
	<-ctx.Done()
	signals <- syscall.SIGINT
	if code := <-exited; code != exitSignaled {
		t.Errorf("exit code %d", code)
	}
}

// TestSameSignalTwiceIsOne: timeout(1) sends a signal to its child and to the
// child's group, and that is one order to stop.
func TestSameSignalTwiceIsOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		signals := make(chan os.Signal)
		exited := make(chan int, 1)
		e := env{out: io.Discard, err: io.Discard, exit: func(code int) { exited <- code }, signals: func() <-chan os.Signal { return signals }}
		ctx, stop := context.WithCancelCause(t.Context())
		watchSignals(e, newLogger(io.Discard, config.Log{Level: "info"}), time.Second, stop)
		signals <- syscall.SIGTERM
		<-ctx.Done()
		for range 2 {
			time.Sleep(sameSignalFor * 2 / 5)
			signals <- syscall.SIGTERM
			synctest.Wait()
			if len(exited) != 0 {
				t.Fatal("the same signal at once ended the drain")
			}
		}
		time.Sleep(sameSignalFor * 3 / 10)
		signals <- syscall.SIGTERM
		if code := <-exited; code != exitSignaled {
			t.Errorf("exit code %d", code)
		}
	})
}

// store makes a node store a few blocks.
func store(t *testing.T, socket string) {
	t.Helper()
	code, out, errs := runHere(nil, "replay", "--synthetic", "--requests", "2", "--socket", socket, "--wait-cascade=false", "--json", "--quiet")
	if code != 0 {
		t.Fatalf("replay: %d %s %s", code, out, errs)
	}
}

func socketOf(t *testing.T, block string) string {
	t.Helper()
	m := regexp.MustCompile(`socket +(\S+)`).FindStringSubmatch(block)
	if m == nil {
		t.Fatalf("no socket in %q", block)
	}
	return m[1]
}

// TestDrainIsBounded: a tier that hangs holds up the end no longer than it may,
// and is named.
func TestDrainIsBounded(t *testing.T) {
	p, block := start(t, "serve", "--primary", "64MiB", "--admin", ":0", "--no-fs", "--set", "tiers.hang.name=dead-mount", "--drain-timeout", "300ms")
	store(t, socketOf(t, block))
	_ = p.Process.Signal(syscall.SIGTERM)
	if code := p.ends(t); code != exitLeft || !strings.Contains(p.stderr.String(), "dead-mount") {
		t.Errorf("exit code %d\n%s", code, p.stderr)
	}
}

func TestSecondSignalCutsTheDrain(t *testing.T) {
	p, block := start(t, "serve", "--primary", "64MiB", "--admin", ":0", "--no-fs", "--set", "tiers.hang.name=dead-mount", "--drain-timeout", "1h")
	store(t, socketOf(t, block))
	addr := adminOf(t, block)
	_ = p.Process.Signal(syscall.SIGTERM)
	for { // the drain can be watched
		st, _, err := fetchStatus(t.Context(), addr)
		if err != nil {
			t.Fatal(err)
		}
		if st.State == "draining" && !st.Ready {
			break
		}
	}
	_ = p.Process.Signal(syscall.SIGINT)
	if code := p.ends(t); code != exitSignaled {
		t.Errorf("exit code %d\n%s", code, p.stderr)
	}
}

// TestReplayStartsItsOwnNode: nothing runs, and all of it works.
func TestReplayStartsItsOwnNode(t *testing.T) {
	p := launch(t, "replay", "--synthetic", "--requests", "20", "--primary", "16MiB", "--json", "--quiet")
	var out string
	for line := range p.lines {
		out += line + "\n"
	}
	if code := p.ends(t); code != exitOK {
		t.Fatalf("exit code %d\n%s", code, p.stderr)
	}
	var res struct {
		Requests     int
		Corrupt      int
		StoredBlocks int64 `json:"stored_blocks"`
		OwnNode      bool  `json:"own_node"`
		Tiers        []struct {
			Name       string
			WriteBytes int64 `json:"write_bytes"`
		}
	}
	if err := json.Unmarshal([]byte(out), &res); err != nil || res.Requests != 20 || res.Corrupt != 0 || res.StoredBlocks == 0 || !res.OwnNode ||
		len(res.Tiers) != 2 || res.Tiers[1].Name != "fs" || res.Tiers[1].WriteBytes == 0 {
		t.Errorf("%v %s", err, out)
	}
}

func TestHuman(t *testing.T) {
	for n, want := range map[int64]string{0: "0 B", 999: "999 B", 1000: "0.98 KiB", 4096: "4.00 KiB", 1 << 30: "1.00 GiB", 10 << 30: "10.0 GiB", 999 << 30: "999 GiB", 5000 << 40: "5000 TiB"} {
		if got := human(n); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
}
