package peer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/terrace-kv/terrace"
	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/client"
	"github.com/terrace-kv/terrace/internal/content"
	"github.com/terrace-kv/terrace/internal/netfault"
	nodes "github.com/terrace-kv/terrace/internal/node"
)

var (
	terracePath string // built by TestMain
	buildFlags  []string
	soak        = os.Getenv("TERRACE_SOAK") != ""
)

func TestMain(m *testing.M) {
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if !given { // these tests wait more than they work
		_ = flag.Set("test.parallel", "6")
	}
	os.Exit(build(m))
}

func build(m *testing.M) int {
	dir, err := os.MkdirTemp("", "terrace-peer-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	terracePath = filepath.Join(dir, "terrace")
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	args := append([]string{"build", "-o", terracePath}, buildFlags...)
	if raceEnabled {
		args = append(args, "-race")
	}
	cmd := exec.CommandContext(ctx, "go", append(args, "./cmd/terrace")...)
	cmd.Dir = filepath.Join("..", "..")
	if out, err := cmd.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "go build: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}

// bound is how long something may take that is over soon on an idle machine.
func bound() time.Duration {
	if raceEnabled {
		return 60 * time.Second
	}
	return 30 * time.Second
}

func eventually(t testing.TB, within time.Duration, what string, try func() error) {
	t.Helper()
	for end := time.Now().Add(within); ; time.Sleep(2 * time.Millisecond) {
		err := try()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: not within %v: %v", what, within, err)
		}
	}
}

const tokens = 16 // of a block

// spec is the namespace of most tests.
func spec(blockBytes int) block.Spec {
	return block.Spec{Model: "m", DType: "bytes", Layout: "content", HashAlgorithm: "sha256", HashLength: 32,
		Groups: []block.Group{{Kind: block.KindFull, TokensPerBlock: tokens, BlockBytes: uint64(blockBytes)}}}
}

// keys are n blocks of a prompt.
func keys(prompt string, n int) []block.Key {
	out := make([]block.Key, n)
	for i := range out {
		h := sha256.Sum256(binary.BigEndian.AppendUint64([]byte(prompt), uint64(i)))
		out[i], _ = block.NewKey(h[:], 0)
	}
	return out
}

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

// node is a terrace serve with one engine.
type node struct {
	t              testing.TB
	name           string
	cmd            *exec.Cmd
	stdout, stderr output
	done           chan struct{}
	admin          string
	peers          string // where it listens for others
	advertised     string
	socket         string

	netns string // it is in this network namespace; "" is the test's

	c  *client.Client
	fp block.Fingerprint
}

var (
	adminLine = regexp.MustCompile(`(?m)^  admin +http://(\S+)$`)
	peersLine = regexp.MustCompile(`(?m)^  peers +(\S+) as (\S+), advertised as (\S+), (tcp|tls)( and ucx)?$`)
)

// start runs a node on a loopback address, and connects its engine.
func start(t testing.TB, name, host string, sp block.Spec, args ...string) *node {
	t.Helper()
	return startIn(t, "", name, host, sp, args...)
}

// startIn runs it in a network namespace.
func startIn(t testing.TB, netns, name, host string, sp block.Spec, args ...string) *node {
	t.Helper()
	dir, err := os.MkdirTemp("", "tp")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	n := &node{t: t, name: name, done: make(chan struct{}), socket: filepath.Join(dir, "s"), netns: netns}
	all := append([]string{"serve", "--socket", n.socket, "--admin", "127.0.0.1:0", "--primary", "64MiB", "--no-fs", "--set", "primary.populate=off",
		"--peers-listen", host + ":0", "--set", "peers.node_id=" + name}, args...)
	n.cmd = exec.Command(terracePath, all...)
	if netns != "" { // ip becomes the node, so its pid is the node's
		n.cmd = exec.Command("ip", append([]string{"netns", "exec", netns, terracePath}, all...)...)
	}
	n.cmd.Env, n.cmd.Dir = []string{"HOME=" + dir, "PATH=" + os.Getenv("PATH")}, dir
	n.cmd.Stdout, n.cmd.Stderr = &n.stdout, &n.stderr
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := n.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(n.done)
		_ = n.cmd.Wait()
	}()
	t.Cleanup(n.end)
	eventually(t, bound(), "start of "+name, func() error {
		select {
		case <-n.done:
			t.Fatalf("%s ended at its start:\n%s", name, n.stderr.String())
		default:
		}
		if out := n.stdout.String(); !strings.Contains(out, "\nready ") {
			return fmt.Errorf("so far %q", out)
		}
		return nil
	})
	out := n.stdout.String()
	p := peersLine.FindStringSubmatch(out)
	if p == nil || p[2] != name {
		t.Fatalf("%s: no row about peers in\n%s", name, out)
	}
	n.admin, n.peers, n.advertised = adminLine.FindStringSubmatch(out)[1], p[1], p[3]
	ns, err := block.NewNamespace(sp)
	if err != nil {
		t.Fatal(err)
	}
	n.fp = ns.Fingerprint()
	if n.c, err = client.Dial(t.Context(), client.Options{Socket: n.socket, Spec: sp, Engine: "engine-" + name}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.c.Close() })
	return n
}

// newProxy is a network in front of a node.
func newProxy(t testing.TB) *netfault.Proxy {
	t.Helper()
	p, err := netfault.Listen("127.0.0.9:0", netfault.Faults{}, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// behind runs a node that is reached through a proxy only.
func behind(t testing.TB, p *netfault.Proxy, name, host string, args ...string) *node {
	t.Helper()
	n := start(t, name, host, spec(small), append([]string{"--peers-advertise", p.Addr()}, args...)...)
	p.Set(func(s *netfault.State) { s.To = n.peers })
	return n
}

// end stops the node, which must drain in order unless it was killed.
func (n *node) end() {
	if n.c != nil {
		_ = n.c.Close()
	}
	select {
	case <-n.done: // it was killed
	default:
		_ = n.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-n.done:
			if code := n.cmd.ProcessState.ExitCode(); code != 0 && !n.t.Failed() {
				n.t.Errorf("%s ends with %d", n.name, code)
			}
		case <-time.After(bound()):
			n.t.Errorf("%s does not stop", n.name)
			n.kill()
		}
	}
	log := n.stderr.String()
	for _, bad := range []string{"DATA RACE", "panic:", "fatal error:", "invariant"} {
		if strings.Contains(log, bad) {
			n.t.Errorf("%s says %q", n.name, bad)
		}
	}
	if n.t.Failed() {
		n.t.Logf("stderr of %s:\n%s", n.name, log)
	}
}

// says waits until one line of the log has who and matches why.
func (n *node) says(who, why string) {
	n.t.Helper()
	re := regexp.MustCompile(why)
	eventually(n.t, bound(), fmt.Sprintf("log of %s with %q and %q", n.name, who, why), func() error {
		log := n.stderr.String()
		for line := range strings.Lines(log) {
			if strings.Contains(line, who) && re.MatchString(line) {
				return nil
			}
		}
		return errors.New(log)
	})
}

func (n *node) kill() {
	_ = n.cmd.Process.Kill()
	<-n.done
}

func (n *node) signal(s os.Signal) {
	if err := n.cmd.Process.Signal(s); err != nil {
		n.t.Errorf("signal %v to %s: %v", s, n.name, err)
	}
}

var web = http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}

func (n *node) page(method, path string) []byte {
	n.t.Helper()
	req, err := http.NewRequest(method, "http://"+n.admin+path, nil)
	if err != nil {
		n.t.Fatal(err)
	}
	resp, err := web.Do(req)
	if err != nil {
		n.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		n.t.Fatalf("%s: %s, %v", path, resp.Status, err)
	}
	return b
}

func (n *node) status() *terrace.Status {
	n.t.Helper()
	var st terrace.Status
	var text []byte
	if n.netns == "" {
		text = n.page("GET", "/v1/status")
	} else { // its admin server cannot be reached from here
		var err error
		if text, err = n.c.Status(context.Background()); err != nil {
			n.t.Fatal(err)
		}
	}
	if err := json.Unmarshal(text, &st); err != nil {
		n.t.Fatal(err)
	}
	return &st
}

// empty waits until nothing of any request is left on the nodes, and has them
// check themselves.
func empty(t testing.TB, all ...*node) {
	t.Helper()
	for _, n := range all {
		eventually(t, bound(), n.name+" empty", func() error {
			st := n.status()
			p, x, m := st.Peers, st.Tables, st.Primary
			if k := (nodes.TableStatus{Sessions: x.Sessions}); x != k || x.Sessions > 1 {
				return fmt.Errorf("tables: %+v", x)
			}
			if m.PinnedBytes+m.FillingBytes+m.QuarantinedBytes != 0 || m.FreeBytes+m.EvictableBytes+m.RemainderBytes != m.CapacityBytes {
				return fmt.Errorf("primary: %+v", m)
			}
			if p.Sources+p.Rounds+p.Serves+p.Supplies+p.Parked+p.Aborts+p.Handovers+p.Quarantined != 0 || p.PinnedBytes != 0 {
				return fmt.Errorf("peers: %+v", *p)
			}
			return nil
		})
		if n.netns != "" {
			continue
		}
		var v nodes.VerifyReport
		if err := json.Unmarshal(n.page("POST", "/v1/verify?pause=10s"), &v); err != nil || !v.OK {
			t.Errorf("%s: verify: %v, %+v", n.name, err, v)
		}
	}
}

// params are those of an orchestrator, as JSON.
func (n *node) params(text string) client.Params {
	n.t.Helper()
	var m map[string]any
	if err := json.Unmarshal([]byte(text), &m); err != nil {
		n.t.Fatalf("%s: %v", text, err)
	}
	p, warnings, err := client.ParseTransferParams(m)
	if err != nil || len(warnings) > 0 {
		n.t.Fatalf("%s: %v, %q", text, err, warnings)
	}
	return p
}

func plain(n *node) client.Params { return n.params(`{}`) }

func decoder(n *node, id string) client.Params {
	return n.params(fmt.Sprintf(`{"remote_decoder": {"kv_request_id": %q}}`, id))
}

// from is a role that loads from a node.
func from(n *node, role, id string) client.Params {
	host, port, _ := net.SplitHostPort(n.advertised)
	return n.params(fmt.Sprintf(`{%q: {"kv_request_id": %q, "remote_host": %q, "remote_port": %s}}`, role, id, host, port))
}

const (
	source    = "remote_kv_source"
	prefiller = "remote_prefiller"
)

func (n *node) request(id string, p client.Params) *client.Request {
	n.t.Helper()
	r, err := n.c.NewRequest(context.Background(), id, p)
	if err != nil {
		n.t.Fatalf("%s: new request: %v", n.name, err)
	}
	return r
}

func (n *node) store(r *client.Request, first int, ks []block.Key) {
	n.t.Helper()
	_, err := r.Store(context.Background(), 0, first, ks, func(i int, dst []byte) (uint64, error) {
		content.Fill(n.fp, ks[i], dst)
		return nodes.Checksum(dst), nil
	})
	if err != nil {
		n.t.Fatalf("%s: store: %v", n.name, err)
	}
}

func (n *node) finish(r *client.Request) {
	n.t.Helper()
	if err := r.Finish(context.Background()); err != nil {
		n.t.Fatalf("%s: finish: %v", n.name, err)
	}
}

// has stores a prompt for good.
func (n *node) has(ks []block.Key) {
	n.t.Helper()
	r := n.request("has", plain(n))
	n.store(r, 0, ks)
	n.finish(r)
}

// load looks up, waits for the answer, and compares every byte of what it says
// can be read. It returns how many blocks that is, and how long it took.
func (n *node) load(r *client.Request, ks []block.Key) (int, time.Duration) {
	n.t.Helper()
	began := time.Now()
	got, err := n.try(r, ks)
	if err != nil {
		n.t.Fatalf("%s: %v", n.name, err)
	}
	return got, time.Since(began)
}

func (n *node) try(r *client.Request, ks []block.Key) (int, error) {
	a, err := r.Lookup(context.Background(), [][]block.Key{ks}, client.LookupOptions{Wait: 90 * time.Second})
	if err != nil {
		return 0, err
	}
	if !a.Final {
		return 0, errors.New("the lookup is not final")
	}
	got := int(a.Tokens / tokens)
	for i := range got {
		l, ok := a.Lease(0, i)
		if !ok {
			return 0, fmt.Errorf("no lease for block %d of %d", i, got)
		}
		err := n.c.View(l, func(b []byte) error {
			if at := content.Check(n.fp, ks[i], b); at >= 0 {
				return fmt.Errorf("block %d is wrong at byte %d", i, at)
			}
			return nil
		})
		if err != nil {
			return 0, err
		}
	}
	return got, nil
}

// later is a load in the background.
type later struct {
	got  int
	took time.Duration
	err  error
}

func (n *node) start(r *client.Request, ks []block.Key) <-chan later {
	c := make(chan later, 1)
	began := time.Now()
	go func() {
		got, err := n.try(r, ks)
		c <- later{got, time.Since(began), err}
	}()
	return c
}

// within waits for a load in the background.
func within(t testing.TB, c <-chan later, d time.Duration, all ...*node) later {
	t.Helper()
	select {
	case x := <-c:
		if x.err != nil && !errors.Is(x.err, client.ErrSessionLost) {
			t.Fatal(x.err)
		}
		return x
	case <-time.After(d):
		for _, n := range all {
			st := n.status()
			t.Logf("%s: %+v\n%+v", n.name, st.Tables, *st.Peers)
		}
		t.Fatalf("a load is not over after %v", d)
		return later{}
	}
}

// busy waits until a node has begun to load from a peer.
func (n *node) busy() {
	n.t.Helper()
	eventually(n.t, bound(), n.name+" loading", func() error {
		if st := n.status(); st.Tables.Jobs == 0 || st.Peers.Rounds == 0 {
			return fmt.Errorf("%+v", st.Tables)
		}
		return nil
	})
}
