package objtier

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/invariants"
	"github.com/terrace-kv/terrace/internal/s3"
	"github.com/terrace-kv/terrace/internal/s3/s3test"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/tiertest"
)

// keeperBench is a store, and nodes that keep its capacity, in a bubble.
type keeperBench struct {
	t     *testing.T
	s     *s3test.Server
	c     *s3.Client
	l     layout
	skew  time.Duration // of the store's clock
	fault atomic.Pointer[func(*http.Request) *s3test.Fault]
}

func newKeeperBench(t *testing.T, skew time.Duration) *keeperBench {
	b := &keeperBench{t: t, l: newLayout("p"), skew: skew}
	b.s, b.c = testStore(t)
	b.s.Now = func() time.Time { return time.Now().Add(skew) }
	b.s.Fault = func(r *http.Request) *s3test.Fault {
		if f := b.fault.Load(); f != nil {
			return (*f)(r)
		}
		return nil
	}
	return b
}

// onRequest sets the store's faults from now on.
func (b *keeperBench) onRequest(f func(*http.Request) *s3test.Fault) { b.fault.Store(&f) }

// node is another one, whose index has room for 10,000 keys.
func (b *keeperBench) node(holder string, capacity int64) *keeper {
	return newKeeper(keeperOptions{bucket: b.c, presence: newPresence(10_000, time.Hour, time.Hour, time.Now), layout: b.l,
		capacity: capacity, every: 5 * time.Minute, perSecond: 1000, holder: holder, log: noLog, now: time.Now})
}

// fill stores blocks, one each step, the first one first.
func (b *keeperBench) fill(ns *block.Namespace, keys []block.Key, step time.Duration) {
	for _, key := range keys {
		setBlock(b.s, b.l, ns, key)
		time.Sleep(step)
	}
}

// left tells which of keys are there.
func (b *keeperBench) left(ns *block.Namespace, keys []block.Key) []bool {
	objects := b.s.Objects(testBucket)
	out := make([]bool, len(keys))
	for i, key := range keys {
		_, out[i] = objects[b.l.block(ns.Fingerprint(), key)]
	}
	return out
}

func (b *keeperBench) turn(k *keeper) {
	b.t.Helper()
	if err := k.turn(b.t.Context()); err != nil {
		b.t.Fatal(err)
	}
}

func count(left []bool) (n int) {
	for _, ok := range left {
		if ok {
			n++
		}
	}
	return n
}

// Ten thousand objects in two namespaces: the larger one is brought below its
// capacity by what was used longest ago, and nothing else is touched.
func TestCapacityIsKept(t *testing.T) {
	for _, skew := range []time.Duration{0, 3 * time.Hour, -3 * time.Hour} {
		t.Run(skew.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newKeeperBench(t, skew)
				n := 6000
				if skew != 0 || invariants.Enabled { // slow
					n = 600
				}
				ns, small := smallNamespace(t, "m"), smallNamespace(t, "small")
				keys, others := keysFrom(0, n), keysFrom(0, 2*n/3)
				foreign := map[string]bool{"x": true, "p/y": true, "p/namespace.json": true}
				for _, name := range []string{"namespace.json", "name", "b/readme", "b/" + strings.Repeat("0", 71), "x/" + keys[0].String(), keys[0].String()} {
					foreign[b.l.at(ns.Fingerprint().String(), name)] = true
				}
				for key := range foreign {
					b.s.Set(testBucket, key, make([]byte, 5000))
				}
				b.fill(ns, keys, time.Minute)
				b.fill(small, others, 0)
				time.Sleep(2 * time.Minute)

				const each = headSize + (100+40)/2
				capacity := int64(n) * each * 2 / 3
				k := b.node("one", capacity)
				used := append(keysFrom(0, 4), keysFrom(n-100, 4)...)
				k.o.presence.listed(ns.Fingerprint(), []sized{{keys[0], headSize + 100}, {keys[1], headSize + 40}}, k.o.presence.mark())
				for _, key := range used {
					k.o.presence.put(ns.Fingerprint(), key, objectBytes(ns, key)) // used now, though stored long ago
				}
				b.turn(k)

				var bytes int64
				left := b.left(ns, keys)
				youngestGone, oldestLeft := -1, -1
				for i, ok := range left {
					switch {
					case ok:
						bytes += objectBytes(ns, keys[i])
						if oldestLeft < 0 && i >= 4 {
							oldestLeft = i
						}
					default:
						youngestGone = i
					}
				}
				if bytes > capacity || bytes < capacity*94/100 {
					t.Errorf("%d bytes are left, want at most %d and not much less", bytes, capacity)
				}
				if !left[0] || !left[3] {
					t.Error("blocks that were used lately are gone")
				}
				// Ages are told apart to half a percent.
				if ageGone, ageLeft := n-youngestGone, n-oldestLeft; float64(ageGone) < float64(ageLeft)*0.99 {
					t.Errorf("a block of age %d is gone, one of age %d is left", ageGone, ageLeft)
				}
				if n := count(b.left(small, others)); n != len(others) {
					t.Errorf("%d of %d blocks are left of the namespace below its capacity", n, len(others))
				}
				objects := b.s.Objects(testBucket)
				for key := range foreign {
					if _, ok := objects[key]; !ok {
						t.Errorf("%s is gone", key)
					}
				}
				if got := int64(n - count(left)); k.evicted() != got {
					t.Errorf("%d blocks counted as evicted, %d are gone", k.evicted(), got)
				}
				for _, key := range others {
					bytes += objectBytes(small, key)
				}
				if all, _ := k.state(); all != bytes {
					t.Errorf("the pass says that %d bytes are left, there are %d", all, bytes)
				}
				for i, ok := range left[:n/2] {
					want := tier.Absent
					if ok {
						want = tier.Present
					}
					wantKnown(t, k.o.presence, ns.Fingerprint(), keys[i], want)
				}
				wantKnown(t, k.o.presence, ns.Fingerprint(), keys[n-1], tier.Present) // by the way

				before := b.s.Counts()
				b.turn(k)
				if after := b.s.Counts(); after["MULTI"] != before["MULTI"] || after["LIST"]-before["LIST"] > (n+999)/1000+(len(others)+999)/1000+4 {
					t.Errorf("a pass with nothing to do made %d removals and %d listings", after["MULTI"]-before["MULTI"], after["LIST"]-before["LIST"])
				}
			})
		})
	}
}

// Blocks that were just stored stay, whatever the clocks say.
func TestCapacitySparesTheYoung(t *testing.T) {
	for _, skew := range []time.Duration{0, 3 * time.Hour, -3 * time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			b := newKeeperBench(t, skew)
			ns, keys := smallNamespace(t, "m"), keysFrom(0, 100)
			b.fill(ns, keys[:50], time.Second)
			time.Sleep(10 * time.Minute)
			b.fill(ns, keys[50:], 0)
			time.Sleep(55 * time.Second)
			k := b.node("one", 1000)
			b.turn(k)
			if left := b.left(ns, keys); count(left[:50]) != 0 || count(left[50:]) != 50 {
				t.Errorf("skew %v: %d old and %d young blocks are left, want 0 and 50", skew, count(left[:50]), count(left[50:]))
			}
			time.Sleep(time.Minute)
			b.turn(k)
			if n := count(b.left(ns, keys)); n > 3 {
				t.Errorf("skew %v: %d blocks are left when they are older", skew, n)
			}
		})
	}
}

// One of two nodes evicts. When it ends the other one goes on at once; when it
// dies, after its lease.
func TestCapacityOneAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newKeeperBench(t, time.Hour)
		ns := smallNamespace(t, "m")
		nodes := []*keeper{b.node("one", 2000), b.node("two", 2000)}
		for _, k := range nodes {
			k.start()
		}
		more := 0
		// work stores blocks for a while and tells which node evicts.
		work := func(d time.Duration) (who []int) {
			t.Helper()
			before := []int64{nodes[0].evicted(), nodes[1].evicted()}
			for range 20 {
				b.fill(ns, keysFrom(more, 10), d/200)
				more += 10
			}
			for i, k := range nodes {
				if k.evicted() > before[i] {
					who = append(who, i)
				}
			}
			return who
		}
		first := work(time.Hour)
		if len(first) != 1 {
			t.Fatalf("nodes %v evict, want one", first)
		}
		for range 3 {
			if who := work(time.Hour); fmt.Sprint(who) != fmt.Sprint(first) {
				t.Errorf("nodes %v evict, want %v", who, first)
			}
		}
		one := first[0]
		nodes[one].close(t.Context())
		if who := work(12 * time.Minute); fmt.Sprint(who) != fmt.Sprint([]int{1 - one}) {
			t.Errorf("nodes %v evict after node %d has ended", who, one)
		}
		nodes[one] = b.node("three", 2000)
		nodes[one].start()
		if who := work(time.Hour); fmt.Sprint(who) != fmt.Sprint([]int{1 - one}) {
			t.Errorf("nodes %v evict after node %d has started", who, one)
		}
		nodes[1-one].stop() // without giving the lease back
		nodes[1-one].loops.Wait()
		ttl := nodes[0].lease.ttl
		if who := work(ttl - 6*time.Minute); len(who) != 0 {
			t.Errorf("nodes %v evict while another holds the lease", who)
		}
		if who := work(20 * time.Minute); fmt.Sprint(who) != fmt.Sprint([]int{one}) {
			t.Errorf("nodes %v evict after the holder has died, want %d", who, one)
		}
		nodes[one].close(t.Context())
		var doc leaseDoc
		if err := json.Unmarshal(b.s.Objects(testBucket)["p/lease.json"].Data, &doc); err != nil || doc.Holder != "" || doc.Version != 1 {
			t.Errorf("the lease that was given back is %+v, error %v", doc, err)
		}
	})
}

// Two nodes that find no lease, or an old one, at the same moment.
func TestLeaseRace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newKeeperBench(t, 0)
		for round := range 3 {
			nodes := make([]*keeper, 4)
			held := make([]bool, len(nodes))
			for i := range nodes {
				nodes[i] = b.node(fmt.Sprintf("%d-%d", round, i), 1)
				if round > 0 { // see the old one for its whole time
					if h, err := nodes[i].lease.take(t.Context()); h || err != nil {
						t.Fatal(h, err)
					}
				}
			}
			if round > 0 {
				time.Sleep(nodes[0].lease.ttl)
			}
			// Their writes arrive together, after all of them have read.
			arrived := make(chan struct{}, len(nodes))
			all := make(chan struct{})
			b.onRequest(func(r *http.Request) *s3test.Fault {
				if r.Method == http.MethodPut {
					arrived <- struct{}{}
					return &s3test.Fault{Until: all}
				}
				return nil
			})
			var wg sync.WaitGroup
			for i, k := range nodes {
				wg.Go(func() {
					var err error
					if held[i], err = k.lease.take(t.Context()); err != nil {
						t.Error(err)
					}
				})
			}
			for range nodes {
				<-arrived
			}
			close(all)
			wg.Wait()
			b.onRequest(func(*http.Request) *s3test.Fault { return nil })
			if n := count(held); n != 1 {
				t.Errorf("round %d: %d nodes hold the lease", round, n)
			}
		}
	})
}

// The lease is taken away in the middle: the pass ends before the next removal.
func TestLeaseLostDuringEviction(t *testing.T) {
	for _, gone := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			b := newKeeperBench(t, 0)
			ns, keys := smallNamespace(t, "m"), keysFrom(0, 1100)
			b.fill(ns, keys, 0)
			time.Sleep(time.Hour)
			k := b.node("one", 1000)
			b.onRequest(func(r *http.Request) *s3test.Fault {
				if r.Method == http.MethodPost {
					lost := []byte(`{"version":1,"holder":"two","ttl_seconds":60}`)
					if gone {
						lost = nil
					}
					b.s.Set(testBucket, "p/lease.json", lost)
				}
				return nil
			})
			if err := k.turn(t.Context()); !errors.Is(err, errLeaseLost) {
				t.Errorf("the pass ends with %v", err)
			}
			if n := b.s.Counts()["MULTI"]; n != 1 || k.evicted() != 1000 {
				t.Errorf("%d removals, %d blocks evicted; want one of 1000", n, k.evicted())
			}
			if !gone {
				k.lease.release(t.Context())
				if o := b.s.Objects(testBucket)["p/lease.json"]; !strings.Contains(string(o.Data), "two") {
					t.Error("another's lease was given back")
				}
			}
		})
	}
}

// A write of the lease whose answer is lost does not lose the lease.
func TestLeaseAnswerLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newKeeperBench(t, 0)
		k := b.node("one", 1)
		for _, over := range []bool{true, false} { // when it is taken, and when it is renewed
			var lost atomic.Bool
			b.onRequest(func(r *http.Request) *s3test.Fault {
				if r.Method == http.MethodPut && !lost.Swap(true) {
					return &s3test.Fault{Done: true, Reset: true}
				}
				return nil
			})
			if over {
				if held, err := k.lease.take(t.Context()); held || err == nil {
					t.Errorf("held is %v, error %v, of a write without an answer", held, err)
				}
				if held, err := k.lease.take(t.Context()); !held || err != nil {
					t.Errorf("held is %v, error %v; want that it is known as ours", held, err)
				}
				continue
			}
			until := k.lease.until
			time.Sleep(time.Until(k.lease.renewAt))
			if err := k.lease.keep(t.Context()); err != nil || k.lease.until != until {
				t.Errorf("error %v; good until %v, want %v as before", err, k.lease.until, until)
			}
			if err := k.lease.check(t.Context()); err != nil {
				t.Errorf("it is ours, and lost: %v", err)
			}
			time.Sleep(time.Until(k.lease.renewAt))
			if err := k.lease.keep(t.Context()); err != nil || !k.lease.until.After(until) {
				t.Errorf("error %v; good until %v, want later than %v", err, k.lease.until, until)
			}
		}
		// A holder whose store does not answer gives up before another may begin.
		b.onRequest(func(*http.Request) *s3test.Fault { return &s3test.Fault{Reset: true} })
		start := time.Now()
		var err error
		for err == nil {
			time.Sleep(time.Second)
			err = k.lease.keep(t.Context())
		}
		if d := time.Since(start); !errors.Is(err, errLeaseLost) || d > k.lease.ttl*9/10 {
			t.Errorf("given up after %v with %v; others may begin after %v", d, err, k.lease.ttl)
		}
	})
}

// What is in the place of the lease and is none stays, and nothing is evicted.
func TestLeaseForeign(t *testing.T) {
	for _, doc := range []string{"hello", `{"version":2,"holder":"x","ttl_seconds":1}`} {
		synctest.Test(t, func(t *testing.T) {
			b := newKeeperBench(t, 0)
			ns, keys := smallNamespace(t, "m"), keysFrom(0, 100)
			b.fill(ns, keys, 0)
			b.s.Set(testBucket, "p/lease.json", []byte(doc))
			k := b.node("one", 1000)
			for range 3 {
				time.Sleep(time.Hour)
				if err := k.turn(t.Context()); err == nil || !strings.Contains(err.Error(), "p/lease.json") {
					t.Errorf("the error is %v", err)
				}
			}
			if o := b.s.Objects(testBucket)["p/lease.json"]; string(o.Data) != doc || count(b.left(ns, keys)) != 100 {
				t.Error("something was changed")
			}
		})
	}
}

// A store that fails for an hour ends passes, not the keeper.
func TestCapacityStoreDownAndBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newKeeperBench(t, 0)
		ns, keys := smallNamespace(t, "m"), keysFrom(0, 120)
		b.fill(ns, keys, 0)
		time.Sleep(time.Hour)
		k := b.node("one", 4_000)
		var requests atomic.Int64
		b.onRequest(func(r *http.Request) *s3test.Fault {
			requests.Add(1)
			if r.Method == http.MethodPost { // after the lease and the listings
				return &s3test.Fault{Status: 503, Code: "SlowDown"}
			}
			return nil
		})
		k.start()
		time.Sleep(time.Hour)
		if _, err := k.state(); err == "" || k.evicted() != 0 || count(b.left(ns, keys)) != 120 {
			t.Errorf("error %q, %d evicted", err, k.evicted())
		}
		if n := requests.Load(); n > 14*40 {
			t.Errorf("%d requests in an hour", n)
		}
		b.onRequest(func(*http.Request) *s3test.Fault { return &s3test.Fault{Reset: true} })
		time.Sleep(time.Hour)
		b.onRequest(func(*http.Request) *s3test.Fault { return nil })
		time.Sleep(20 * time.Minute)
		used, err := k.state()
		if err != "" || used > 4_000 || used < 3_500 || count(b.left(ns, keys)) > 15 {
			t.Errorf("afterwards: error %q, %d bytes used, %d blocks left", err, used, count(b.left(ns, keys)))
		}
		k.close(t.Context())
	})
}

// keepsSome is a store that refuses to remove some objects.
type keepsSome struct {
	bucket
	keep string
}

func (s keepsSome) DeleteMany(ctx context.Context, keys []string) (failed []string, err error) {
	var rest []string
	for _, key := range keys {
		if strings.HasSuffix(key, s.keep) {
			failed = append(failed, key)
		} else {
			rest = append(rest, key)
		}
	}
	if f, err := s.bucket.DeleteMany(ctx, rest); err != nil {
		return append(failed, f...), err
	}
	if failed != nil {
		err = &s3.Error{Op: "DELETE", Kind: s3.KindPermission}
	}
	return failed, err
}

// One object that must not be removed does not keep the others.
func TestCapacityLockedObject(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newKeeperBench(t, 0)
		ns, keys := smallNamespace(t, "m"), keysFrom(0, 300)
		b.fill(ns, keys, 0)
		time.Sleep(time.Hour)
		k := b.node("one", 10_000)
		k.o.bucket = keepsSome{b.c, keys[7].String()}
		b.turn(k)
		if left := b.left(ns, keys); !left[7] || count(left) > 40 || count(left) < 28 || k.evicted() != int64(300-count(left)) {
			t.Errorf("%d blocks are left, the locked one %v, %d evicted", count(left), left[7], k.evicted())
		}
		wantKnown(t, k.o.presence, ns.Fingerprint(), keys[7], tier.Unknown)
	})
}

// halfGuarded is a store that knows If-None-Match only.
type halfGuarded struct{ bucket }

func (s halfGuarded) Put(ctx context.Context, key string, body *s3.Body, o s3.PutOptions) (s3.Object, error) {
	o.IfMatch = ""
	return s.bucket.Put(ctx, key, body, o)
}

func TestGuardable(t *testing.T) {
	_, half := testStore(t)
	if ok, err := guardable(t.Context(), halfGuarded{half}, "p/probe/x"); ok || err != nil {
		t.Errorf("a store that ignores If-Match can guard: %v, error %v", ok, err)
	}
	for _, tt := range []struct {
		support s3test.Support
		want    bool
	}{{s3test.Verified, true}, {s3test.Ignored, false}, {s3test.Refused, false}} {
		s, c := testStore(t)
		s.Features.Conditional = tt.support
		if ok, err := guardable(t.Context(), c, "p/probe/x"); ok != tt.want || err != nil {
			t.Errorf("conditions %d: %v, %v", tt.support, ok, err)
		}
		if n := len(s.Objects(testBucket)); n != 0 {
			t.Errorf("%d objects are left", n)
		}
		s.Fault = func(*http.Request) *s3test.Fault { return &s3test.Fault{Status: 403, Code: "AccessDenied"} }
		if _, err := guardable(t.Context(), c, "p/probe/x"); !hasKind(err, s3.KindPermission) {
			t.Errorf("the error is %v", err)
		}
	}
}

// A node that is told to be alone needs no conditions.
func TestCapacityAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newKeeperBench(t, 0)
		b.s.Features.Conditional = s3test.Refused
		ns, keys := smallNamespace(t, "m"), keysFrom(0, 100)
		b.fill(ns, keys, 0)
		time.Sleep(time.Hour)
		k := b.node("one", 10_000)
		if err := k.turn(t.Context()); !hasKind(err, s3.KindUnsupported) || k.evicted() != 0 {
			t.Errorf("a guarded node evicts %d without conditions, error %v", k.evicted(), err)
		}
		k.lease.alone = true
		b.turn(k)
		if n := count(b.left(ns, keys)); n > 40 {
			t.Errorf("%d blocks are left", n)
		}
	})
}

func TestSweep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newKeeperBench(t, -time.Hour)
		fp := smallNamespace(t, "m").Fingerprint().String()
		run := strings.Repeat("ab", 16)
		stays := []string{"p/probe/readme", "p/quarantine/readme", "p/quarantine/" + fp + "/readme", "p/quarantine/readme/" + keysFrom(0, 1)[0].String()}
		for _, key := range append(stays, "p/probe/"+run, "p/probe/"+run+"-lease") {
			b.s.Set(testBucket, key, []byte("x"))
		}
		time.Sleep(2 * time.Hour)
		stays = append(stays, "p/probe/0"+run)
		b.s.Set(testBucket, "p/probe/0"+run, []byte("x")) // of a start at this moment
		aside := keysFrom(0, 200)
		for _, key := range aside {
			b.s.Set(testBucket, "p/quarantine/"+fp+"/"+key.String(), []byte("x"))
			time.Sleep(2 * time.Second)
		}
		for _, key := range aside[200-quarantineMax:] {
			stays = append(stays, "p/quarantine/"+fp+"/"+key.String())
		}
		b.turn(b.node("one", 1))
		objects := b.s.Objects(testBucket)
		for _, key := range stays {
			if _, ok := objects[key]; !ok {
				t.Errorf("%s is gone", key)
			}
		}
		if n := len(objects); n != len(stays)+1 { // and the lease
			t.Errorf("%d objects are left, want %d", n, len(stays)+1)
		}
	})
}

// A tier that shall keep a capacity says at its start that the store cannot
// have it guarded, and leaves nothing behind.
func TestOpenCapacity(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := s3test.New().MakeBucket("b")
		server.Features.Conditional = s3test.Ignored
		o := options(server, "p")
		o.Capacity = 20_000
		if _, err := Open(t.Context(), o); err == nil || !strings.Contains(err.Error(), "capacity_alone") {
			t.Fatalf("the error is %v", err)
		}
		if n := len(server.Objects("b")); n != 0 {
			t.Errorf("%d objects are left of a start that failed", n)
		}
		o.CapacityAlone = true
		for _, guarded := range []bool{false, true} {
			if guarded {
				server.Features.Conditional, o.CapacityAlone = s3test.Verified, false
			}
			tr, err := Open(t.Context(), o)
			if err != nil {
				t.Fatal(err)
			}
			ns := tiertest.Namespace(t, "m")
			length := ns.BlockBytes(0)
			o.Capacity = int64(10 * (headSize + length))
			tr.keeper.o.capacity = o.Capacity // before its first pass
			for i := range 30 {
				it := []tier.Item{{Key: tiertest.Key(i, 0), Buf: tiertest.Buffer(t, length)}}
				tiertest.Fill(ns, &it[0])
				if tr.Write(t.Context(), ns, it); it[0].Err != nil {
					t.Fatal(it[0].Err)
				}
			}
			time.Sleep(15 * time.Minute)
			if st := tr.Stats(); st.Evicted == 0 || st.Blocks > 10 || st.UsedBytes > o.Capacity {
				t.Errorf("guarded %v: %d evicted, %d blocks of %d bytes are left", guarded, st.Evicted, st.Blocks, st.UsedBytes)
			}
			if err := tr.Close(t.Context()); err != nil {
				t.Error(err)
			}
		}
	})
}
