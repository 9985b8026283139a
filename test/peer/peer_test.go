package peer

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
)

const small = 64 << 10

// A node loads from another's primary and from what it has below.
func TestPull(t *testing.T) { everywhere(t, 2, pull) }

func pull(t *testing.T, up up) {
	a, b := up("a"), up("b")
	ks := keys("pull", 200)
	a.has(ks)
	r := b.request("r", from(a, source, "kv"))
	got, took := b.load(r, ks)
	if got != 200 {
		t.Errorf("%d of 200 blocks", got)
	}
	t.Logf("200 blocks of 64 KiB, session included, and every byte compared: %v", took)
	b.finish(r)
	// Part of a prompt, and one that the peer has never heard of.
	more := append(slices.Clone(ks[:50]), keys("unknown", 10)...)
	r = a.request("r", from(b, source, "kv2"))
	if got, _ := a.load(r, more); got != 50 {
		t.Errorf("%d blocks, want 50", got)
	}
	a.finish(r)
	r = b.request("r", from(a, source, "kv3"))
	if got, took := b.load(r, keys("nobody", 20)); got != 0 || took > 5*time.Second {
		t.Errorf("%d blocks of nothing after %v", got, took)
	}
	b.finish(r)
	empty(t, a, b)
	if p := b.status().Peers; p.BlocksIn != 200 || p.Sessions != 1 || p.Peers[0].NodeID != "a" || p.Violations != 0 {
		t.Errorf("%+v", *p)
	}
}

// What was pulled can be pulled on: from A by B, and from B by C.
func TestChain(t *testing.T) { everywhere(t, 3, chain) }

func chain(t *testing.T, up up) {
	a, b, c := up("a"), up("b"), up("c")
	ks := keys("chain", 100)
	a.has(ks)
	// C asks B before B has it: B does not ask A for C's sake.
	r := c.request("early", from(b, source, "kv0"))
	if got, _ := c.load(r, ks); got != 0 {
		t.Errorf("%d blocks went in a circle", got)
	}
	c.finish(r)
	r = b.request("r", from(a, source, "kv1"))
	if got, _ := b.load(r, ks); got != 100 {
		t.Errorf("%d of 100 blocks from A", got)
	}
	b.finish(r)
	r = c.request("r", from(b, source, "kv2"))
	if got, _ := c.load(r, ks); got != 100 {
		t.Errorf("%d of 100 blocks from B", got)
	}
	c.finish(r)
	empty(t, a, b, c)
}

// handOver has one node store a prompt in four batches, the last one first, and
// another one load it: before, after or meanwhile.
func handOver(t *testing.T, a, b *node, id string, n int, before int) {
	t.Helper()
	ks := keys(id, n)
	var got <-chan later
	d := b.request(id, from(a, prefiller, id))
	p := a.request(id, decoder(a, id))
	for i := range 4 {
		if i == before {
			got = b.start(d, ks)
			b.busy()
		}
		lo, hi := n*(3-i)/4, n*(4-i)/4
		a.store(p, lo, ks[lo:hi])
	}
	if before < 4 { // ready when the last block is, not when the request is finished
		if x := within(t, got, bound(), a, b); x.got != n {
			t.Errorf("%s: %d of %d blocks", id, x.got, n)
		}
		a.finish(p)
	} else {
		a.finish(p)
		if got, _ := b.load(d, ks); got != n {
			t.Errorf("%s: %d of %d blocks", id, got, n)
		}
	}
	b.finish(d)
}

func TestHandOver(t *testing.T) { everywhere(t, 2, handOvers) }

func handOvers(t *testing.T, up up) {
	// Only what was given up is kept so long; the rest is fetched.
	a, b := up("a", "--set", "core.unbound_store_timeout=5s"), up("b")
	for before := range 5 {
		handOver(t, a, b, fmt.Sprint("kv-", before), 80, before)
	}
	empty(t, a, b) // long before unbound_store_timeout
	// A warm prefix counts too: what the prefiller has already is handed over.
	ks := keys("warm", 60)
	a.has(ks[:40])
	p := a.request("p", decoder(a, "kv-warm"))
	if got, _ := a.load(p, ks); got != 40 {
		t.Fatalf("the prefiller has %d blocks of 40", got)
	}
	a.store(p, 40, ks[40:])
	a.finish(p)
	d := b.request("d", from(a, prefiller, "kv-warm"))
	if got, _ := b.load(d, ks); got != 60 {
		t.Errorf("%d of 60 blocks", got)
	}
	b.finish(d)
	// The prefiller gives up: what is there is served, the rest fails at once.
	ks = keys("aborted", 60)
	d = b.request("d", from(a, prefiller, "kv-aborted"))
	p = a.request("p", decoder(a, "kv-aborted"))
	got := b.start(d, ks)
	b.busy()
	a.store(p, 0, ks[:30])
	a.finish(p)
	if x := within(t, got, 10*time.Second); x.got != 30 {
		t.Errorf("%d blocks, want the 30 that were stored", x.got)
	}
	b.finish(d)
	// One that is over is refused in one round trip.
	r := b.request("late", from(a, prefiller, "kv-0"))
	if got, took := b.load(r, keys("never", 10)); got != 0 || took > 5*time.Second {
		t.Errorf("%d blocks of a hand-over that is over, after %v", got, took)
	}
	b.finish(r)
	empty(t, a, b)
	if p := a.status().Peers; p.Refused["ended"] == 0 {
		t.Errorf("%+v", p.Refused)
	}
}

// A producer that nobody comes to gives back its pins.
func TestNeverFetched(t *testing.T) {
	t.Parallel()
	a := start(t, "a", "127.0.0.1", spec(small), "--set", "core.unbound_store_timeout=500ms")
	b := start(t, "b", "127.0.0.2", spec(small), "--set", "peers.timeouts.prefill=2s")
	ks := keys("never", 40)
	p := a.request("p", decoder(a, "kv"))
	a.store(p, 0, ks)
	a.finish(p)
	if st := a.status(); st.Tables.Pins != 40 && st.Peers.HandoversExpired == 0 {
		t.Errorf("%d pins of 40", st.Tables.Pins)
	}
	empty(t, a)
	if p := a.status().Peers; p.HandoversExpired != 1 {
		t.Errorf("%d hand-overs expired", p.HandoversExpired)
	}
	// And a consumer whose prefiller never comes ends within its bound.
	d := b.request("d", from(a, prefiller, "kv-nobody"))
	if got, took := b.load(d, ks[:10]); got != 10 && got != 0 || took > 10*time.Second {
		t.Errorf("%d blocks after %v", got, took)
	}
	b.finish(d)
	d = b.request("d", from(a, prefiller, "kv-nobody"))
	if got, took := b.load(d, keys("nothing", 10)); got != 0 || took < time.Second || took > 10*time.Second {
		t.Errorf("%d blocks after %v, want none after 2s", got, took)
	}
	b.finish(d)
	empty(t, a, b)
}

// Both nodes pull from each other and hand over to each other at once.
func TestBothAtOnce(t *testing.T) { everywhere(t, 2, bothAtOnce) }

func bothAtOnce(t *testing.T, up up) {
	a, b := up("a"), up("b")
	a.has(keys("of a", 100))
	b.has(keys("of b", 100))
	rounds := 5
	if soak {
		rounds = 200
	}
	for i := range rounds {
		ra, rb := a.request("r", from(b, source, fmt.Sprint("s", i))), b.request("r", from(a, source, fmt.Sprint("s", i)))
		ca, cb := a.start(ra, keys("of b", 100)), b.start(rb, keys("of a", 100))
		handOver(t, a, b, fmt.Sprint("kv-ab-", i), 40, i%5)
		handOver(t, b, a, fmt.Sprint("kv-ba-", i), 40, (i+2)%5)
		if x := within(t, ca, bound(), a, b); x.got != 100 {
			t.Errorf("A has %d of 100 blocks", x.got)
		}
		if x := within(t, cb, bound(), a, b); x.got != 100 {
			t.Errorf("B has %d of 100 blocks", x.got)
		}
		a.finish(ra)
		b.finish(rb)
	}
	empty(t, a, b)
	sa, sb := a.status().Peers, b.status().Peers
	if sa.Sessions != 1 || sb.Sessions != 1 {
		t.Errorf("%d and %d sessions", sa.Sessions, sb.Sessions)
	}
}

// An engine of other settings gets nothing, and the log says whose and which.
func TestOtherNamespace(t *testing.T) {
	t.Parallel()
	a := start(t, "a", "127.0.0.1", spec(small))
	ks := keys("ns", 10)
	a.has(ks)
	seed := "7"
	for i, x := range []struct {
		field string
		other func(s *block.Spec)
	}{
		{"hash_seed", func(s *block.Spec) { s.HashSeed = &seed }},
		{"groups[0].block_bytes", func(s *block.Spec) { s.Groups[0].BlockBytes *= 2 }},
		{"dtype", func(s *block.Spec) { s.DType = "other" }},
	} {
		sp := spec(small)
		x.other(&sp)
		n := start(t, fmt.Sprint("n", i), fmt.Sprint("127.0.0.", i+2), sp)
		r := n.request("r", from(a, source, "kv"))
		if got, took := n.load(r, ks); got != 0 || took > 5*time.Second {
			t.Errorf("%s: %d blocks after %v", x.field, got, took)
		}
		n.finish(r)
		empty(t, a, n)
		n.says("a at "+a.peers, "differs in "+regexp.QuoteMeta(x.field)+"\"")
		if p := n.status().Peers; p.Failures["namespace"] == 0 {
			t.Errorf("%s: %v", x.field, p.Failures)
		}
	}
	// One that a has nothing like: it says which.
	sp := spec(small)
	sp.Model = "unknown there"
	n := start(t, "stranger", "127.0.0.5", sp)
	r := n.request("r", from(a, source, "kv"))
	if got, took := n.load(r, ks); got != 0 || took > 5*time.Second {
		t.Errorf("%d blocks after %v", got, took)
	}
	n.finish(r)
	n.says("a at "+a.peers, "has no namespace.*unknown there")
	empty(t, a, n)
}

// A producer that dies takes no request with it.
func TestKilled(t *testing.T) {
	t.Parallel()
	a, b := start(t, "a", "127.0.0.1", spec(small)), start(t, "b", "127.0.0.2", spec(small))
	a.has(keys("x", 10))
	r := b.request("r", from(a, source, "kv"))
	if got, _ := b.load(r, keys("x", 10)); got != 10 {
		t.Fatal("nothing works")
	}
	b.finish(r)
	r = b.request("waits", from(a, prefiller, "kv-never"))
	got := b.start(r, keys("never", 40))
	b.busy()
	a.kill()
	if x := within(t, got, 5*time.Second); x.got != 0 {
		t.Errorf("%d blocks of a dead node", x.got)
	}
	b.finish(r)
	for i := range 3 { // and the next ones do not wait for it
		r = b.request(fmt.Sprint("next-", i), from(a, source, "kv"))
		if got, took := b.load(r, keys(fmt.Sprint("next-", i), 10)); got != 0 || took > 3*time.Second {
			t.Errorf("%d blocks of a dead node after %v", got, took)
		}
		b.finish(r)
	}
	b.says(a.peers, "peer is down: ")
	empty(t, b)
	if s := b.status().Peers; s.FastFails == 0 || len(s.Peers) > 0 && s.Peers[0].State != "down" && s.Peers[0].State != "idle" {
		t.Errorf("%+v", *s)
	}
}

// A producer that stops without a word is found dead, and used again when it
// goes on.
func TestStopped(t *testing.T) {
	t.Parallel()
	beat, stop := "1s", 20*time.Second
	if raceEnabled && !soak {
		beat, stop = "200ms", 3*time.Second
	}
	args := []string{"--set", "peers.timeouts.heartbeat=" + beat}
	a, b := start(t, "a", "127.0.0.1", spec(small), args...), start(t, "b", "127.0.0.2", spec(small), args...)
	ks := keys("x", 40)
	p := a.request("p", decoder(a, "kv"))
	d := b.request("d", from(a, prefiller, "kv"))
	got := b.start(d, ks)
	b.busy()
	a.store(p, 30, ks[30:])
	began := time.Now()
	a.signal(syscall.SIGSTOP)
	if x := within(t, got, stop); x.got != 0 {
		t.Errorf("%d blocks without a beginning", x.got)
	}
	b.finish(d)
	eventually(t, stop, "death", func() error {
		if s := b.status().Peers; s.Deaths == 0 {
			return fmt.Errorf("%+v", *s)
		}
		return nil
	})
	b.says("a at "+a.peers, "is dead: nothing heard for")
	r := b.request("r", from(a, source, "kv2"))
	if got, took := b.load(r, ks); got != 0 || took > 6*time.Second {
		t.Errorf("%d blocks of a stopped node after %v", got, took)
	}
	b.finish(r)
	time.Sleep(stop - time.Since(began))
	a.signal(syscall.SIGCONT)
	a.store(p, 0, ks[:30])
	a.finish(p)
	eventually(t, bound(), "peer used again", func() error {
		r := b.request("r", from(a, source, "kv3"))
		got, _ := b.load(r, ks)
		b.finish(r)
		if got != 40 {
			return fmt.Errorf("%d of 40 blocks; %+v", got, b.status().Peers.Peers)
		}
		return nil
	})
	// The hand-over that nobody could fetch is fetched by a second attempt.
	d = b.request("d", from(a, prefiller, "kv"))
	if got, _ := b.load(d, ks); got != 40 {
		t.Errorf("%d of 40 blocks", got)
	}
	b.finish(d)
	empty(t, b)
}

// A request that names its own node is refused, and says so.
func TestSelf(t *testing.T) {
	t.Parallel()
	a := start(t, "a", "127.0.0.1", spec(small))
	_, err := a.c.NewRequest(t.Context(), "self", from(a, source, "kv"))
	if err == nil || !contains(err.Error(), "remote_kv_source.remote_host", "this node's own") {
		t.Errorf("%v", err)
	}
	empty(t, a)
}

func contains(text string, parts ...string) bool {
	for _, p := range parts {
		if !strings.Contains(text, p) {
			return false
		}
	}
	return true
}
