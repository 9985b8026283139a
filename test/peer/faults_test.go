package peer

import (
	"fmt"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/internal/netfault"
)

// Timeouts of the nodes of TestFaults, and what follows from them: a request to a
// peer connects, asks and loads, and each has its bound.
const (
	faultConnect, faultLookup, faultLoad, faultAbort = time.Second, time.Second, 2 * time.Second, time.Second
	faultBound                                       = faultConnect + faultLookup + faultLoad
)

var faultArgs = []string{"--set", "peers.timeouts.heartbeat=200ms", "--set", "peers.timeouts.connect=1s", "--set", "peers.timeouts.lookup=1s",
	"--set", "peers.timeouts.load=2s", "--set", "peers.timeouts.abort=1s", "--set", "peers.timeouts.hit=1s"}

// slack is what a busy machine may add to a bound.
func slack() time.Duration { return bound() / 10 }

// TestFaults: whatever is wrong with a peer or the network in front of it, what is
// asked of it ends within its bound, another peer serves as ever, the log says
// who and why, and nothing is left.
func TestFaults(t *testing.T) {
	t.Parallel()
	b, c := start(t, "b", "127.0.0.2", spec(small), faultArgs...), start(t, "c", "127.0.0.3", spec(small), faultArgs...)
	laps := 0
	// others is how long loads from the healthy peer take: the median, until all of
	// what is waited for is over.
	others := func(t *testing.T, waits ...<-chan later) (time.Duration, []later) {
		var took []time.Duration
		var over []later
		for len(took) < 9 || len(over) < len(waits) {
			ks := keys(fmt.Sprint("lap-", laps), 4)
			laps++
			c.has(ks)
			r := b.request("lap", from(c, source, "kv-lap"))
			got, d := b.load(r, ks)
			b.finish(r)
			if got != 4 {
				t.Fatalf("%d of 4 blocks of the healthy peer", got)
			}
			took = append(took, d)
			time.Sleep(5 * time.Millisecond) // an engine that is not busy
			if len(over) < len(waits) {
				select {
				case x := <-waits[len(over)]:
					over = append(over, x)
				default:
				}
			}
		}
		slices.Sort(took)
		return took[len(took)/2], over
	}

	const silent = "is dead: nothing heard for|does not answer an abort for" // what was on its way comes first
	none := netfault.Faults{}
	slow := func(s *netfault.State) { s.Pause = [2]time.Duration{time.Millisecond, time.Millisecond} }
	for i, x := range []struct {
		name   string
		faults netfault.Faults
		middle func(p *pair)                // in the middle of a load
		before func(p *pair)                // or before there was any connection
		reads  bool                         // the peer asks, and the consumer is the healthy one
		served bool                         // all the same
		why    string                       // in the log of who asks, in a line that has the peer's address; "" if there is nothing to tell
		dice   func(c netfault.Counts) bool // what must have happened
	}{
		{"killed", none, func(p *pair) { p.a.kill() }, nil, false, false, "peer is down: ", nil},
		{"stopped", none, func(p *pair) { p.a.signal(syscall.SIGSTOP) }, nil, false, false, silent, nil},
		{"half-open", none, func(p *pair) { p.net.Set(func(s *netfault.State) { s.Stop = [2]bool{true, true} }) }, nil, false, false, silent, nil},
		{"mute away", none, func(p *pair) { p.net.Set(func(s *netfault.State) { s.Stop[netfault.Away] = true }) }, nil, false, false, silent, nil},
		{"cut", none, func(p *pair) { p.net.Cut() }, nil, false, false, "connection reset by peer", nil},
		{"refused", none, nil, func(p *pair) { p.net.Set(func(s *netfault.State) { s.Down = true }) }, false, false, "peer is down: ", nil},
		{"accepted, not answered", none, nil, func(p *pair) { p.net.Set(func(s *netfault.State) { s.Mute = true }) }, false, false, "no session after 1s", func(c netfault.Counts) bool { return c.Muted > 0 }},
		{"lost connections", netfault.Faults{Refuse: 0.3, Cut: 0.9}, nil, func(p *pair) {}, false, false, "peer is down: ", func(c netfault.Counts) bool { return c.Refused+c.Cut > 0 }},
		{"late", netfault.Faults{Delay: 30 * time.Millisecond}, nil, func(p *pair) {}, false, true, "", func(c netfault.Counts) bool { return c.Delayed > 100 }},
		{"connections in another order", netfault.Faults{Swap: 1}, nil, func(p *pair) {}, false, true, "", func(c netfault.Counts) bool { return c.Swapped > 0 }},
		{"slow network", none, nil, func(p *pair) { p.net.Set(slow) }, false, true, "", nil},
		{"slow reader", none, nil, func(p *pair) {
			r := p.b.request("first", from(p.a, source, "kv-first")) // b dials, so that the session is through the slow network
			if got, _ := p.b.load(r, p.ks[:1]); got != 1 {
				p.t.Error("nothing works")
			}
			p.b.finish(r)
			p.net.Set(func(s *netfault.State) { s.Pause[netfault.Towards] = 100 * time.Millisecond })
		}, true, false, "blocks did not come in time", nil},
		{"wrong bits", netfault.Faults{Corrupt: 2e-6}, nil, func(p *pair) {}, false, false, "do not match their checksum", func(c netfault.Counts) bool { return c.Corrupt > 0 }},
		{"garbage", netfault.Faults{Corrupt: 0.3}, nil, func(p *pair) {}, false, false, "peer is down: ", func(c netfault.Counts) bool { return c.Corrupt > 0 }},
	} {
		t.Run(x.name, func(t *testing.T) {
			b.t, c.t = t, t
			net, err := netfault.Listen("127.0.0.9:0", x.faults, uint64(i))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(net.Close)
			p := &pair{t: t, net: net, b: b, ks: keys(x.name, 100)}
			p.a = behind(t, net, fmt.Sprintf("a%d", i), "127.0.0.1", faultArgs...)
			a := p.a
			a.has(p.ks)
			base, _ := others(t)
			if x.before != nil {
				x.before(p)
			}
			who, of, ks := b, a, p.ks
			if x.reads {
				who, of, ks = a, b, keys("read", 100)
				b.has(ks)
			}
			r := who.request("middle", from(of, source, "kv"))
			if x.middle != nil {
				b.finish(r)
				r = p.loading()
				x.middle(p)
			}
			s := who.request("after", from(of, source, "kv-after"))
			during, over := others(t, who.start(r, ks), who.start(s, ks[90:]))
			for i, want := range []int{100, 10} {
				o := over[i]
				if o.err != nil || o.took > faultBound+slack() || x.served && o.got != want {
					t.Errorf("request %d: %d of %d blocks after %v, %v; the bound is %v", i, o.got, want, o.took, o.err, faultBound)
				}
			}
			who.finish(r)
			who.finish(s)
			if x.why != "" {
				who.says(of.advertised, x.why)
			}
			if c := net.Counts(); x.dice != nil && !x.dice(c) {
				t.Errorf("it was not as it should be: %+v", c)
			}
			net.Set(func(s *netfault.State) { *s = netfault.State{To: s.To} })
			if x.name == "stopped" {
				a.signal(syscall.SIGCONT)
			}
			left := []*node{a, b, c}
			if x.name == "killed" {
				left = left[1:]
			}
			empty(t, left...)
			again, _ := others(t)
			if worst := 2*max(base, again) + 20*time.Millisecond; during > worst {
				t.Errorf("loads from another peer took %v, without the fault %v and %v", during, base, again)
			}
			t.Logf("requests ended after %v and %v; another peer's took %v, without the fault %v and %v; %+v",
				over[0].took, over[1].took, during, base, again, net.Counts())
		})
	}
	b.t, c.t = t, t
}
