package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/terrace-kv/terrace"
	nodes "github.com/terrace-kv/terrace/internal/node"
)

// output collects what a process writes, while others read it.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

// process is one that the test has started and ends.
type process struct {
	t              *testing.T
	name           string
	cmd            *exec.Cmd
	stdout, stderr output
	done           chan struct{} // closed when it has been waited for
}

// launch starts a program. At the end of the test it is killed if it still
// runs, and whatever it says of a bug of ours fails the test.
func launch(t *testing.T, name string, cmd *exec.Cmd) *process {
	t.Helper()
	p := &process{t: t, name: name, cmd: cmd, done: make(chan struct{})}
	if cmd.Stdout == nil {
		cmd.Stdout = &p.stdout
	}
	cmd.Stderr = &p.stderr
	cmd.WaitDelay = 10 * time.Second
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	// No thread of a test ends before the test does, so this means: with us.
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.done)
		_ = cmd.Wait() // ProcessState tells
	}()
	t.Cleanup(func() {
		p.kill()
		log := p.stderr.String()
		for _, bad := range []string{"DATA RACE", "panic:", "fatal error:", "invariant"} {
			if strings.Contains(log, bad) {
				t.Errorf("%s says %q", name, bad)
			}
		}
		if t.Failed() {
			if len(log) > 16<<10 {
				log = log[:8<<10] + "\n…\n" + log[len(log)-8<<10:]
			}
			t.Logf("stderr of %s:\n%s", name, log)
		}
	})
	return p
}

// terraceCommand is a command line of the binary, in an empty folder.
func terraceCommand(t *testing.T, env []string, args ...string) *exec.Cmd {
	cmd := exec.Command(terracePath, args...)
	cmd.Env, cmd.Dir = env, t.TempDir()
	return cmd
}

func (p *process) pid() int { return p.cmd.Process.Pid }

func (p *process) running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

func (p *process) signal(s os.Signal) {
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.t.Errorf("signal %v to %s: %v", s, p.name, err)
	}
}

// kill ends the process as nothing else does, and waits for its end.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	<-p.done
}

// exit waits for the process and gives its exit code; -1 for a signal.
func (p *process) exit(within time.Duration) int {
	p.t.Helper()
	select {
	case <-p.done:
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(within):
		p.t.Fatalf("%s still runs after %v", p.name, within)
		return 0
	}
}

// run runs a command line of the binary to its end.
func run(t *testing.T, env []string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	p := launch(t, "terrace "+strings.Join(args, " "), terraceCommand(t, env, args...))
	code = p.exit(5 * time.Minute)
	return code, p.stdout.String(), p.stderr.String()
}

// replayed is what the tests read of what replay --json prints.
type replayed struct {
	Node           string
	OwnNode        bool `json:"own_node"`
	Requests       int64
	References     int64
	PrefixHits     int64   `json:"prefix_hits"`
	PrefixHitRatio float64 `json:"prefix_hit_ratio"`
	StoredBlocks   int64   `json:"stored_blocks"`
	LoadedBlocks   int64   `json:"loaded_blocks"`
	Refusals       int64
	Dropped        int64
	Corrupt        int64
	Tiers          []struct {
		Name       string
		Hits       int64
		ReadBytes  int64 `json:"read_bytes"`
		WriteBytes int64 `json:"write_bytes"`
		Failures   int64
		Blocks     int64
		UsedBytes  int64 `json:"used_bytes"`
	}
	Duration float64 `json:"duration_seconds"`
	Verdicts map[string]int64
}

// replay runs terrace replay, which must end well and print one object.
func replay(t *testing.T, env []string, args ...string) (r replayed) {
	t.Helper()
	code, out, errs := run(t, env, append([]string{"replay", "--json"}, args...)...)
	if code != 0 {
		t.Fatalf("replay %v: exit code %d\n%s", args, code, errs)
	}
	d := json.NewDecoder(strings.NewReader(out))
	if err := d.Decode(&r); err != nil || d.More() {
		t.Fatalf("replay %v prints other than one object (%v): %q", args, err, out)
	}
	if r.Corrupt != 0 {
		t.Errorf("replay %v: %d corrupt blocks\n%s", args, r.Corrupt, errs)
	}
	return r
}

// node is a terrace serve.
type node struct {
	*process
	socket, root string
	addr         string // of the admin server
	began        time.Time
}

// nodeAt says where a node is, so that the next one can be in the same place.
type nodeAt struct {
	home, socket, root string
	env                []string
}

func place(t *testing.T) nodeAt {
	dir, env := home(t)
	return nodeAt{home: dir, env: env, socket: filepath.Join(dir, "run", "terrace", "engine.sock"), root: filepath.Join(dir, "fs")}
}

// serve starts a node and waits for the end of its start block. Sizes are
// small unless args say otherwise. At the end of the test it must stop in
// order, unless it has been ended by then.
func serve(t *testing.T, at nodeAt, args ...string) *node {
	t.Helper()
	return serveAs(t, at, terraceCommand(t, at.env, serveArgs(at, args)...))
}

func serveArgs(at nodeAt, args []string) []string {
	all := []string{"serve", "--admin", "127.0.0.1:0", "--primary", "16MiB"}
	if !slices.Contains(args, "--no-fs") {
		all = append(all, "--fs-root", at.root, "--fs-capacity", "unbounded", "--set", "tiers.fs.min_free=none", "--set", "tiers.fs.required=true")
	}
	return append(all, args...)
}

var adminLine = regexp.MustCompile(`(?m)^  admin +http://(\S+)$`)

func serveAs(t *testing.T, at nodeAt, cmd *exec.Cmd) *node {
	t.Helper()
	n := &node{process: launch(t, "node", cmd), socket: at.socket, root: at.root, began: time.Now()}
	t.Cleanup(func() {
		if !n.running() {
			return
		}
		if !t.Failed() {
			n.stops(0)
		}
	})
	n.ready()
	return n
}

// ready waits for the start block.
func (n *node) ready() {
	n.t.Helper()
	eventually(n.t, bound(), "start block", func() error {
		block := n.stdout.String()
		if !n.running() {
			n.t.Fatalf("the node ended at its start with %d:\n%s", n.cmd.ProcessState.ExitCode(), n.stderr.String())
		}
		if !strings.Contains(block, "\nready ") {
			return fmt.Errorf("so far %q", block)
		}
		n.addr = adminLine.FindStringSubmatch(block)[1]
		return nil
	})
}

// stops sends SIGTERM and checks how the node ends.
func (n *node) stops(code int) {
	n.t.Helper()
	n.signal(syscall.SIGTERM)
	if got := n.exit(bound()); got != code {
		n.t.Errorf("the node ends with %d, want %d", got, code)
	}
	if _, err := os.Lstat(n.socket); !os.IsNotExist(err) {
		n.t.Errorf("the socket is left: %v", err)
	}
}

var web = http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, Proxy: nil}}

func (n *node) get(path string) ([]byte, error) {
	resp, err := web.Get("http://" + n.addr + path)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", path, resp.Status)
	}
	return b, err
}

func (n *node) page(path string) string {
	n.t.Helper()
	b, err := n.get(path)
	if err != nil {
		n.t.Fatal(err)
	}
	return string(b)
}

func (n *node) status() *terrace.Status {
	n.t.Helper()
	var st terrace.Status
	if err := json.Unmarshal([]byte(n.page("/v1/status")), &st); err != nil {
		n.t.Fatal(err)
	}
	return &st
}

func (n *node) pins() []terrace.Pin {
	n.t.Helper()
	var answer struct{ Pins []terrace.Pin }
	if err := json.Unmarshal([]byte(n.page("/v1/pins?limit=10000")), &answer); err != nil {
		n.t.Fatal(err)
	}
	return answer.Pins
}

// metric is the value of one series, such as
// terrace_tier_failed_blocks_total{cause="short",tier="fs"}.
func (n *node) metric(series string) float64 {
	n.t.Helper()
	for line := range strings.Lines(n.page("/metrics")) {
		if text, ok := strings.CutPrefix(line, series+" "); ok {
			var v float64
			if _, err := fmt.Sscan(text, &v); err != nil {
				n.t.Fatalf("%s: %q: %v", series, text, err)
			}
			return v
		}
	}
	n.t.Fatalf("no series %s", series)
	return 0
}

// fs is the filesystem tier in a status.
func fsOf(st *terrace.Status) *nodes.TierStatus { return &st.Tiers[0] }

// scanned waits until the tier knows all that it has.
func (n *node) scanned() {
	n.t.Helper()
	eventually(n.t, bound(), "scan", func() error {
		if f := fsOf(n.status()); !f.ScanDone {
			return fmt.Errorf("%d blocks so far, %s", f.ScanBlocks, f.ScanError)
		}
		return nil
	})
}

// idle waits until no engine is connected and every table is empty, and
// checks the books.
func (n *node) idle() *terrace.Status {
	n.t.Helper()
	var st *terrace.Status
	eventually(n.t, bound(), "idle node", func() error {
		st = n.status()
		if err := notIdle(st); err != nil {
			return fmt.Errorf("%w; pins %v", err, n.pins())
		}
		return nil
	})
	if pins := n.pins(); len(pins) > 0 {
		n.t.Errorf("idle, with pins: %v", pins)
	}
	return st
}

// settled waits until no job is under way: a lookup is answered when its
// first block has failed, whatever becomes of the others.
func (n *node) settled() {
	n.t.Helper()
	eventually(n.t, bound(), "end of jobs", func() error {
		if st := n.status(); st.Tables.Jobs != 0 {
			return fmt.Errorf("%+v", st.Tables)
		}
		return nil
	})
}

func notIdle(st *terrace.Status) error {
	if st.Tables != (nodes.TableStatus{}) {
		return fmt.Errorf("tables are not empty: %+v", st.Tables)
	}
	p := &st.Primary
	if p.PinnedBytes != 0 || p.FillingBytes != 0 || p.QuarantinedBytes != 0 || p.FreeBytes+p.EvictableBytes+p.RemainderBytes != p.CapacityBytes {
		return fmt.Errorf("the primary does not add up: %+v", *p)
	}
	for _, t := range st.Tiers {
		if t.QueuedReads != 0 || t.QueuedWrites != 0 {
			return fmt.Errorf("tier %s has %d reads and %d writes queued", t.Name, t.QueuedReads, t.QueuedWrites)
		}
	}
	return nil
}

// exact checks that the tier's bytes are those of the file system.
func (n *node) exact() {
	n.t.Helper()
	if used, sum := fsOf(n.status()).UsedBytes, du(n.t, n.root); used != sum {
		n.t.Errorf("the tier says that it uses %d bytes, its files take %d", used, sum)
	}
}

// descriptors counts what a process has open.
func descriptors(t *testing.T, pid int) int {
	t.Helper()
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// sharedMemory lists what is ours in /dev/shm: there must never be anything.
func sharedMemory(t *testing.T) string {
	t.Helper()
	list, err := os.ReadDir("/dev/shm")
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	var names []string
	for _, e := range list {
		if strings.Contains(e.Name(), "terrace") {
			names = append(names, e.Name())
		}
	}
	return strings.Join(names, " ")
}

func withTimeout(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// failedWith tells whether an engine's call failed with what named calls so.
func failedWith(err error, name string) bool {
	return err != nil && strings.HasPrefix(err.Error(), name+": ")
}

// sigZero asks whether a process is there.
const sigZero = syscall.Signal(0)
