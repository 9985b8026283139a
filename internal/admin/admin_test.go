package admin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"reflect"
	"regexp"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"
	"go.uber.org/goleak"

	"github.com/terrace-kv/terrace/internal/lifecycle"
	"github.com/terrace-kv/terrace/internal/metrics"
	"github.com/terrace-kv/terrace/internal/node"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type fakeNode struct {
	status atomic.Pointer[node.Status]
	pins   []node.Pin
	loops  atomic.Pointer[[]lifecycle.LoopState]
	verify func(time.Duration) node.VerifyReport
}

func (f *fakeNode) Status() node.Status       { return *f.status.Load() }
func (f *fakeNode) Pins(limit int) []node.Pin { return f.pins[:min(limit, len(f.pins))] }

func (f *fakeNode) Loops() []lifecycle.LoopState {
	if p := f.loops.Load(); p != nil {
		return *p
	}
	return nil
}

func (f *fakeNode) Verify(pause time.Duration) node.VerifyReport { return f.verify(pause) }

func fake(st node.Status) *fakeNode {
	f := &fakeNode{}
	f.status.Store(&st)
	return f
}

func open(t *testing.T, n Node) *Server {
	t.Helper()
	s, err := Open(Options{Listen: "127.0.0.1:0", Set: metrics.NewSet("fs"), Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	if n != nil {
		s.Attach(n)
	}
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		if err := s.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return s
}

func do(t *testing.T, method, url, host string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Host = host
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

func get(t *testing.T, s *Server, path string) (int, string) {
	t.Helper()
	return do(t, "GET", s.URL()+path, "")
}

func TestHealthAndReadiness(t *testing.T) {
	n := fake(node.Status{})
	s := open(t, nil)
	if code, body := get(t, s, "/readyz"); code != 503 || !strings.Contains(body, "node: opening") {
		t.Errorf("before Attach: %d %s", code, body)
	}
	s.Attach(n)
	for _, x := range []struct {
		st              node.Status
		health, ready   int
		healthz, readyz string
	}{
		{node.Status{State: "opening", Missing: []string{"tier fs: scanning"}}, 200, 503, "ok", `"tier fs: scanning"`},
		{node.Status{State: "ready", Ready: true}, 200, 200, "ok", `"missing": []`},
		{node.Status{State: "draining", Missing: []string{"draining"}}, 200, 503, "ok", `"state": "draining"`},
		{node.Status{State: "closed"}, 503, 503, "closed", `"ready": false`},
	} {
		n.status.Store(&x.st)
		if code, body := get(t, s, "/healthz"); code != x.health || !strings.Contains(body, x.healthz) {
			t.Errorf("%s: healthz %d %q", x.st.State, code, body)
		}
		if code, body := get(t, s, "/readyz"); code != x.ready || !strings.Contains(body, x.readyz) {
			t.Errorf("%s: readyz %d %q", x.st.State, code, body)
		}
	}
}

// A loop that is down makes the node unhealthy and unready, and is named, without
// a question to the node, which may not answer (B138).
func TestLoopsThatAreDown(t *testing.T) {
	n := fake(node.Status{State: "ready", Ready: true})
	s := open(t, n)
	n.loops.Store(&[]lifecycle.LoopState{{Name: "reaper"}, {Name: "ticker", Down: "has ended"}})
	n.status.Store(nil) // whoever asks, panics
	for _, page := range []string{"/healthz", "/readyz"} {
		if code, body := get(t, s, page); code != 503 || !strings.Contains(body, "loop ticker has ended") || !strings.Contains(body, "stuck") || strings.Contains(body, "reaper") {
			t.Errorf("%s: %d %s", page, code, body)
		}
	}
	n.loops.Store(&[]lifecycle.LoopState{{Name: "reaper"}, {Name: "ticker"}})
	n.status.Store(&node.Status{State: "ready", Ready: true})
	for _, page := range []string{"/healthz", "/readyz"} {
		if code, body := get(t, s, page); code != 200 {
			t.Errorf("%s: %d %s", page, code, body)
		}
	}
}

// A page that panics ends the process: net/http would recover, and the node's
// lock that it holds would stay taken.
func TestPageThatPanicsEndsTheProcess(t *testing.T) {
	const env = "ADMIN_TEST_PANIC"
	if os.Getenv(env) != "" {
		n := fake(node.Status{})
		n.status.Store(nil)
		resp, err := http.Get(open(t, n).URL() + "/v1/status")
		fmt.Println("the node lives on", resp, err)
		os.Exit(0)
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestPageThatPanicsEndsTheProcess$")
	cmd.Env = append(os.Environ(), env+"=1")
	out, _ := cmd.CombinedOutput()
	if code := cmd.ProcessState.ExitCode(); code != 2 || !bytes.Contains(out, []byte("panic: admin server: /v1/status: ")) {
		t.Fatalf("exit code %d\n%s", code, out)
	}
}

func TestStatusAndPins(t *testing.T) {
	n := fake(node.Status{Version: "v1", State: "ready", Primary: node.PrimaryStatus{CapacityBytes: 7}})
	for i := range 1500 {
		n.pins = append(n.pins, node.Pin{Owner: fmt.Sprintf("session 1 request r%d", i), AgeSeconds: 1.5})
	}
	s := open(t, n)
	code, body := get(t, s, "/v1/status")
	var st node.Status
	if err := json.Unmarshal([]byte(body), &st); err != nil || code != 200 || st.Version != "v1" || st.Primary.CapacityBytes != 7 {
		t.Errorf("status: %d %v %s", code, err, body)
	}
	for query, want := range map[string]string{
		"": "200 1000 true", "?limit=2": "200 2 true", "?limit=1500": "200 1500 false", "?limit=10000": "200 1500 false",
		"?limit=0": "400 0 false", "?limit=x": "400 0 false", "?limit=10001": "400 0 false",
	} {
		code, body := get(t, s, "/v1/pins"+query)
		var got struct {
			Pins []node.Pin
			More bool
		}
		if err := json.Unmarshal([]byte(body), &got); err != nil || fmt.Sprint(code, len(got.Pins), got.More) != want {
			t.Errorf("pins%s: %d, %d pins, more %v, %v; want %s", query, code, len(got.Pins), got.More, err, want)
		}
	}
	n.pins = nil
	if _, body := get(t, s, "/v1/pins"); !strings.Contains(body, `"pins": []`) {
		t.Errorf("no pins: %s", body)
	}
}

// TestVerify: one check at a time, only when asked by POST, and with a bound.
func TestVerify(t *testing.T) {
	n := fake(node.Status{State: "ready"})
	began, goOn := make(chan time.Duration), make(chan struct{})
	n.verify = func(pause time.Duration) node.VerifyReport {
		began <- pause
		<-goOn
		return node.VerifyReport{Problems: []string{"capacity: for the test"}}
	}
	s := open(t, nil)
	url := s.URL() + "/v1/verify"
	if code, body := do(t, "POST", url, ""); code != 503 || !strings.Contains(body, "opening") {
		t.Errorf("before Attach: %d %s", code, body)
	}
	s.Attach(n)
	if code, _ := get(t, s, "/v1/verify"); code != http.StatusMethodNotAllowed {
		t.Errorf("GET: %d", code)
	}
	for _, pause := range []string{"0s", "-1s", "2m", "x"} {
		if code, body := do(t, "POST", url+"?pause="+pause, ""); code != 400 || !strings.Contains(body, pause) {
			t.Errorf("pause %s: %d %s", pause, code, body)
		}
	}
	req, err := http.NewRequestWithContext(t.Context(), "POST", url, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Origin", "http://example.org")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusForbidden {
		t.Errorf("from a web page: %s", resp.Status)
	}

	for query, want := range map[string]time.Duration{"": time.Second, "?pause=20s": 20 * time.Second} {
		over := make(chan string)
		go func() {
			code, body := do(t, "POST", url+query, "")
			over <- fmt.Sprint(code, body)
		}()
		if got := <-began; got != want {
			t.Errorf("%q: pause %v, want %v", query, got, want)
		}
		if code, body := do(t, "POST", url, ""); code != http.StatusConflict {
			t.Errorf("a second one: %d %s", code, body)
		}
		goOn <- struct{}{}
		if answer := <-over; !strings.HasPrefix(answer, "200") || !strings.Contains(answer, `"ok": false`) || !strings.Contains(answer, "capacity: for the test") {
			t.Errorf("the answer: %s", answer)
		}
	}
}

func TestOnlyReading(t *testing.T) {
	s := open(t, fake(node.Status{State: "ready"}))
	for _, path := range []string{"/healthz", "/readyz", "/v1/status", "/v1/pins", "/metrics", "/debug/pprof/symbol"} {
		if code, _ := do(t, "POST", s.URL()+path, ""); code != http.StatusMethodNotAllowed {
			t.Errorf("POST %s: %d", path, code)
		}
	}
	if code, _ := get(t, s, "/nothing"); code != 404 {
		t.Errorf("unknown page: %d", code)
	}
	if code, body := get(t, s, "/debug/pprof/goroutine?debug=1"); code != 200 || !strings.Contains(body, "goroutine profile") {
		t.Errorf("pprof: %d", code)
	}
}

func TestForeignHostIsRefused(t *testing.T) {
	s := open(t, fake(node.Status{State: "ready"}))
	for host, want := range map[string]int{"localhost": 200, "localhost:9180": 200, "127.0.0.1:1": 200, "[::1]:1": 200, "[::1]": 200, "evil.example": 421, "evil.example:80": 421} {
		if code, _ := do(t, "GET", s.URL()+"/v1/status", host); code != want {
			t.Errorf("host %s: %d, want %d", host, code, want)
		}
	}
}

func TestTakenPort(t *testing.T) {
	s := open(t, nil)
	addr := strings.TrimPrefix(s.URL(), "http://")
	_, err := Open(Options{Listen: addr, Logger: slog.New(slog.DiscardHandler)})
	if !errors.Is(err, syscall.EADDRINUSE) {
		t.Fatalf("error %v", err)
	}
	for _, want := range []string{"admin.listen", addr, fmt.Sprintf("by pid %d (", os.Getpid()), "another port"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q lacks %q", err, want)
		}
	}
	if _, err := Open(Options{Listen: "192.0.2.1:0", Logger: slog.New(slog.DiscardHandler)}); err == nil || !strings.Contains(err.Error(), "admin.listen: cannot listen on 192.0.2.1:0") {
		t.Errorf("foreign address: %v", err)
	}
}

func TestConnectionsAndHeadersAreBounded(t *testing.T) {
	s := open(t, fake(node.Status{State: "ready"}))
	addr := strings.TrimPrefix(s.URL(), "http://")
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: localhost\r\nX: %s\r\n\r\n", bytes.Repeat([]byte("x"), 2*headerBytesMax))
	answer, _ := io.ReadAll(c)
	c.Close()
	if !bytes.Contains(answer, []byte("431")) {
		t.Errorf("large header: %.100s", answer)
	}
	var held []net.Conn
	for range connectionsMax + 1 {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, c)
	}
	last := held[connectionsMax]
	_ = last.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := last.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the connection too many was not closed: %v", err)
	}
	for _, c := range held {
		c.Close()
	}
	for { // the server sees the closes in its own time
		resp, err := http.Get(s.URL() + "/healthz")
		if err == nil {
			resp.Body.Close()
			break
		}
		runtime.Gosched()
	}
}

// gather scrapes a status.
func gather(t *testing.T, st node.Status) []*dto.MetricFamily {
	t.Helper()
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(&collector{func() node.Status { return st }}, metrics.NewSet("fs"))
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	return families
}

// TestEveryStatusFieldIsExported gives each number, word and flag of a status a
// value of its own and looks for it among the metrics.
func TestEveryStatusFieldIsExported(t *testing.T) {
	elsewhere := map[string]string{ // what is no metric, and why
		".PID": "the process collector's", ".Lookups.P50us": "a histogram", ".Lookups.P99us": "a histogram",
		".BootID": "no enum", ".Socket": "no enum", ".Missing": "counted", ".Sessions": "counted in tables", ".Namespaces": "counted",
		".Tiers[].Type": "said by status", ".Tiers[].Where": "no enum", ".Tiers[].Mode": "no enum", ".Tiers[].LastError": "no enum",
		".Peers.Peers": "counted; peers are no enum",
	}
	want := map[string]float64{}
	next := 1000.0
	var fill func(path string, v reflect.Value)
	fill = func(path string, v reflect.Value) {
		if _, skip := elsewhere[path]; skip {
			return
		}
		switch v.Kind() {
		case reflect.Pointer:
			v.Set(reflect.New(v.Type().Elem()))
			fill(path, v.Elem())
		case reflect.Struct:
			for i := range v.NumField() {
				fill(path+"."+v.Type().Field(i).Name, v.Field(i))
			}
		case reflect.Slice:
			v.Set(reflect.MakeSlice(v.Type(), 1, 1))
			fill(path+"[]", v.Index(0))
		case reflect.Map:
			next++
			want[path], _ = next, v
			v.Set(reflect.MakeMap(v.Type()))
			v.SetMapIndex(reflect.ValueOf("new_word"), reflect.ValueOf(int64(next)))
		case reflect.Int, reflect.Int64:
			next++
			want[path] = next
			v.SetInt(int64(next))
		case reflect.Float64:
			next++
			want[path] = next
			v.SetFloat(next)
		case reflect.Bool, reflect.String: // looked at below
		default:
			t.Fatalf("%s: no rule for %v", path, v.Type())
		}
	}
	var st node.Status
	fill("", reflect.ValueOf(&st).Elem())
	st.Tiers[0].Name = "fs"
	have := map[float64]int{}
	for _, f := range gather(t, st) {
		for _, m := range f.Metric {
			have[m.GetGauge().GetValue()+m.GetCounter().GetValue()]++
		}
	}
	for path, v := range want {
		if have[v] != 1 {
			t.Errorf("%s is in %d metrics, want 1", path, have[v])
		}
	}

	value := func(st node.Status, name, labels string) float64 {
		for _, f := range gather(t, st) {
			for _, m := range f.Metric {
				var ls []string
				for _, l := range m.Label {
					ls = append(ls, l.GetValue())
				}
				if f.GetName() == name && strings.Join(ls, ",") == labels {
					return m.GetGauge().GetValue() + m.GetCounter().GetValue()
				}
			}
		}
		t.Errorf("no %s{%s}", name, labels)
		return -1
	}
	st = node.Status{Version: "v9", Peers: &node.PeersStatus{}, State: "draining", Ready: true, Missing: []string{"a", "b"}, Tiers: []node.TierStatus{
		{Name: "fs", ReadHealth: "open", WriteHealth: "brown_out", ScanDone: true, ScanError: "x"},
		{Name: "gone", ReadHealth: "closed", WriteHealth: "closed", Mode: ModeNotOpen}}}
	for _, x := range []struct {
		name, labels string
		want         float64
	}{
		{"terrace_build_info", "v9", 1}, {"terrace_node_state", "draining", 1}, {"terrace_node_state", "ready", 0},
		{"terrace_node_ready", "", 1}, {"terrace_node_missing_parts", "", 2},
		{"terrace_tier_up", "read,fs", 0}, {"terrace_tier_up", "write,fs", 1}, {"terrace_tier_health", "write,brown_out,fs", 1}, {"terrace_tier_health", "write,closed,fs", 0},
		{"terrace_tier_up", "read,gone", 0}, {"terrace_tier_up", "write,gone", 0},
		{"terrace_tier_scan_done", "fs", 1}, {"terrace_tier_scan_failed", "fs", 1},
		{"terrace_peer_failures_total", "unreachable", 0}, {"terrace_peer_refused_total", "quota", 0}, {"terrace_peer_sessions", "", 0},
		{"terrace_lookup_keys_total", "miss_absent", 0}, {"terrace_tier_failed_blocks_total", "no_space,fs", 0}, {"terrace_tier_dropped_blocks_total", "queue_full,fs", 0},
	} {
		if got := value(st, x.name, x.labels); got != x.want {
			t.Errorf("%s{%s} = %v, want %v", x.name, x.labels, got, x.want)
		}
	}
}

func TestNames(t *testing.T) {
	families := gather(t, node.Status{Tiers: []node.TierStatus{{Name: "fs"}}, Peers: &node.PeersStatus{}})
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	if err != nil || len(problems) > 0 {
		t.Errorf("promlint: %v %v", problems, err)
	}
	good := regexp.MustCompile(`^terrace_(build|node|primary|table|lookup|store|tier|peer)_[a-z_]+$`)
	for _, f := range families {
		if !good.MatchString(f.GetName()) || (f.GetType() == dto.MetricType_COUNTER) != strings.HasSuffix(f.GetName(), "_total") {
			t.Errorf("name %s of a %v", f.GetName(), f.GetType())
		}
	}
}

func TestMetricsPage(t *testing.T) {
	s := open(t, fake(node.Status{State: "ready", Primary: node.PrimaryStatus{CapacityBytes: 42}}))
	code, body := get(t, s, "/metrics")
	for _, want := range []string{"terrace_primary_capacity_bytes 42\n", "terrace_lookup_duration_seconds_count 0", "go_goroutines ", "process_cpu_seconds_total "} {
		if code != 200 || !strings.Contains(body, want) {
			t.Errorf("%d, lacks %q", code, want)
		}
	}
}

// TestDocumented: each metric is in the table of what to do about it.
func TestDocumented(t *testing.T) {
	doc, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range gather(t, node.Status{Tiers: []node.TierStatus{{Name: "fs"}}, Peers: &node.PeersStatus{}}) {
		if !bytes.Contains(doc, []byte("`"+f.GetName()+"`")) {
			t.Errorf("docs/operations.md does not mention %s", f.GetName())
		}
	}
}
