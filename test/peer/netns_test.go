package peer

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// network are hosts on one wire: network namespaces, each with an end of a
// virtual cable to a bridge in a namespace of its own.
type network struct {
	t    *testing.T
	name string
}

var networks atomic.Int32 // that there have been

func newNetwork(t *testing.T, hosts int) *network {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("network namespaces need root")
	}
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("network namespaces need ip (iproute2)")
	}
	w := &network{t, fmt.Sprintf("terrace-%d-%d-", os.Getpid(), networks.Add(1))}
	if out, err := w.run("netns", "add", w.name+"wire"); err != nil {
		t.Skipf("no network namespaces here: %s", out)
	}
	t.Cleanup(func() { _, _ = w.run("netns", "del", w.name+"wire") })
	if out, err := w.run("-n", w.name+"wire", "link", "add", "name", "wire0", "type", "bridge"); err != nil {
		t.Skipf("no bridges here: %s", out)
	}
	w.must("-n", w.name+"wire", "link", "set", "wire0", "up")
	for i := range hosts {
		h := w.host(i)
		w.must("netns", "add", h)
		t.Cleanup(func() { _, _ = w.run("netns", "del", h) })
		port := fmt.Sprint("port", i)
		if out, err := w.run("link", "add", "name", "eth0", "netns", h, "type", "veth", "peer", "name", port, "netns", w.name+"wire"); err != nil {
			t.Skipf("no virtual cables here: %s", out)
		}
		w.must("-n", w.name+"wire", "link", "set", port, "master", "wire0", "up")
		w.must("-n", h, "addr", "add", w.addr(i)+"/24", "dev", "eth0")
		w.must("-n", h, "link", "set", "eth0", "up")
		w.must("-n", h, "link", "set", "lo", "up")
	}
	return w
}

func (w *network) host(i int) string { return fmt.Sprint(w.name, i) }
func (w *network) addr(i int) string { return fmt.Sprint("10.77.0.", i+1) }

func (w *network) run(args ...string) (string, error) {
	out, err := exec.Command("ip", args...).CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

func (w *network) must(args ...string) {
	w.t.Helper()
	if out, err := w.run(args...); err != nil {
		w.t.Fatalf("ip %v: %v: %s", args, err, out)
	}
}

// plug connects a host to the wire, or takes the cable out.
func (w *network) plug(i int, state string) {
	w.t.Helper()
	w.must("-n", w.name+"wire", "link", "set", fmt.Sprint("port", i), state)
}

// up starts one node more, each at an address of its own.
type up func(name string, args ...string) *node

// everywhere runs a scenario with nodes on loopback addresses, and with nodes in
// network namespaces of their own.
func everywhere(t *testing.T, hosts int, scenario func(t *testing.T, up up)) {
	t.Parallel()
	t.Run("loopback", func(t *testing.T) {
		t.Parallel()
		i := 0
		scenario(t, func(name string, args ...string) *node {
			i++
			return start(t, name, fmt.Sprint("127.0.0.", i), spec(small), args...)
		})
	})
	t.Run("namespaces", func(t *testing.T) {
		t.Parallel()
		scenario(t, newNetwork(t, hosts).up())
	})
}

func (w *network) up() up {
	i := -1
	return func(name string, args ...string) *node {
		i++
		return startIn(w.t, w.host(i), name, w.addr(i), spec(small), append([]string{"--set", "peers.insecure=true"}, args...)...)
	}
}

// TestNetwork: nodes with addresses of their own load from each other; when the
// cable of one is out, what waits for it ends, others do not notice, and it is
// used again when the cable is back.
func TestNetwork(t *testing.T) {
	t.Parallel()
	w := newNetwork(t, 3)
	up, args := w.up(), []string{"--set", "peers.timeouts.heartbeat=200ms", "--set", "peers.timeouts.connect=1s"}
	a, b, c := up("a", args...), up("b", args...), up("c", args...)
	all := []*node{a, b, c}
	a.has(keys("a", 100))
	for _, n := range []*node{b, c} {
		r := n.request("r", from(a, source, "kv"))
		if got, _ := n.load(r, keys("a", 100)); got != 100 {
			t.Errorf("%s: %d of 100 blocks", n.name, got)
		}
		n.finish(r)
	}
	c.has(keys("c", 100))
	handOver(t, a, b, "kv-ab", 40, 2)
	empty(t, all...)

	d := b.request("d", from(a, prefiller, "kv-cut"))
	got := b.start(d, keys("cut", 20))
	b.busy()
	w.plug(0, "down")
	if x := within(t, got, 10*time.Second, b); x.got != 0 {
		t.Errorf("%d blocks through no cable", x.got)
	}
	b.finish(d)
	r := b.request("dead", from(a, source, "kv")) // fails fast, or when it cannot be dialed
	if got, took := b.load(r, keys("never", 10)); got != 0 || took > 5*time.Second {
		t.Errorf("%d blocks through no cable after %v", got, took)
	}
	b.finish(r)
	r = b.request("other", from(c, source, "kv"))
	if got, took := b.load(r, keys("c", 100)); got != 100 || took > 5*time.Second {
		t.Errorf("%d of 100 blocks of a peer that is there, after %v", got, took)
	}
	b.finish(r)
	empty(t, all...)
	b.says("a at "+a.peers, "is dead: nothing heard for")
	w.plug(0, "up")
	a.has(keys("later", 20))
	eventually(t, bound(), "the cable is back", func() error {
		r := b.request("back", from(a, source, "kv"))
		got, _ := b.load(r, keys("later", 20))
		b.finish(r)
		if got != 20 {
			return fmt.Errorf("%d of 20 blocks; %+v", got, b.status().Peers.Peers)
		}
		return nil
	})
	empty(t, all...)
	if s := b.status().Peers; s.Deaths == 0 {
		t.Errorf("%+v", *s)
	}
}
