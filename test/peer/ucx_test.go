//go:build ucx

package peer

import (
	"testing"
	"time"
)

func init() { buildFlags = append(buildFlags, "-tags", "ucx") }

func overUCX(t *testing.T, name, host string) *node {
	t.Helper()
	return start(t, name, host, spec(small), "--set", "peers.transport=ucx")
}

// Pulls and hand-overs over UCX; every byte is compared.
func TestUCX(t *testing.T) {
	t.Parallel()
	a, b := overUCX(t, "a", "127.0.0.1"), overUCX(t, "b", "127.0.0.2")
	ks := keys("pull", 200)
	a.has(ks)
	r := b.request("r", from(a, source, "kv"))
	if got, _ := b.load(r, ks); got != 200 {
		t.Errorf("%d of 200 blocks", got)
	}
	b.finish(r)
	// The first blocks of a session may come before the fabrics are described, and
	// so over TCP. From then on none does.
	all := []*node{a, b}
	var sent [2]int64
	for i, n := range all {
		p := n.status().Peers
		sent[i] = p.BlocksIn - p.Gets
	}
	handOver(t, a, b, "kv-late", 80, 2)
	handOver(t, b, a, "kv-back", 80, 0)
	empty(t, a, b)
	for i, n := range all {
		p := n.status().Peers
		if p.Gets < 80 || p.BlocksIn-p.Gets != sent[i] || p.GetsFailed != 0 || p.GetsPosted != 0 || p.Violations != 0 {
			t.Errorf("%s: %d sent before; %+v", n.name, sent[i], *p)
		}
	}
}

// A producer that is killed in mid-load ends the load, and leaves nothing; one
// whose consumer is killed serves the next.
func TestUCXKilled(t *testing.T) {
	t.Parallel()
	a, b, c := overUCX(t, "a", "127.0.0.1"), overUCX(t, "b", "127.0.0.2"), overUCX(t, "c", "127.0.0.3")
	ks := keys("x", 200)
	a.has(ks)
	r := c.request("r", from(a, source, "kv"))
	got := c.start(r, ks)
	c.busy()
	c.kill()
	<-got
	r = b.request("r", from(a, source, "kv"))
	if got, _ := b.load(r, ks); got != 200 {
		t.Fatalf("%d of 200 blocks after another consumer was killed", got)
	}
	b.finish(r)
	empty(t, a, b)
	more := keys("y", 200)
	a.has(more)
	r = b.request("mid", from(a, source, "kv"))
	got = b.start(r, more)
	b.busy()
	a.kill()
	within(t, got, 20*time.Second) // some, none or all
	b.finish(r)
	empty(t, b)
	if p := b.status().Peers; p.Gets == 0 || p.GetsPosted != 0 {
		t.Errorf("%+v", *p)
	}
}
