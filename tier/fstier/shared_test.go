package fstier

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/vfs"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/tiertest"
)

var sharedSeed = flag.Uint64("shared.seed", 0, "seed of TestSharedRandom; 0 takes fixed ones")

// sharedBy are options of one of the nodes that share a root.
func sharedBy(tb testing.TB, root, id string, hook func(vfs.Call) vfs.Fault) Options {
	o := quiet(opts(tb, root, hook))
	o.Shared, o.NodeID = true, id
	return o
}

// ownBytes is what the files of a number under a root are charged.
func ownBytes(tb testing.TB, root vfs.FS, number uint16) (bytes int64) {
	tb.Helper()
	p := placeOf(number)
	err := vfs.Walk(root, func(name string, st vfs.Info) {
		_, second, _ := strings.Cut(path.Base(name), "-")
		_, err := block.ParseKey(path.Base(name))
		switch {
		case strings.HasSuffix(name, probeSuffix): // nobody counts what is left of them
		case name == p.lock, strings.HasPrefix(name, path.Dir(p.usage)+"/"),
			strings.HasPrefix(name, nameQuarantine) && strings.HasPrefix(second, p.tag),
			err == nil && st.Size%headerSize == int64(number):
			bytes += st.Bytes
		}
	})
	if err != nil {
		tb.Fatal(err)
	}
	return bytes
}

// wantOwn wants that a node counts just what is its own.
func wantOwn(tb testing.TB, t *Tier) {
	tb.Helper()
	root, err := vfs.OpenRoot(t.o.Root)
	if err != nil {
		tb.Fatal(err)
	}
	defer func() { _ = root.Close() }()
	wantOwnIn(tb, t, root)
}

func wantOwnIn(tb testing.TB, t *Tier, root vfs.FS) {
	tb.Helper()
	if got, want := t.Stats().UsedBytes, ownBytes(tb, root, t.place.number); got != want {
		tb.Errorf("node %s uses %d bytes, its files have %d", t.o.NodeID, got, want)
	}
	checkIndex(tb, t)
	if _, whole, err := t.CheckInvariants(time.Hour); err != nil || !whole {
		tb.Error(whole, err)
	}
}

func TestSharedConformance(t *testing.T) {
	for _, name := range []string{"direct_tmpfile", "rename"} {
		hook := modes[name]
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tiertest.Run(t, tiertest.Factory{Durable: true, Open: func(tb testing.TB, store string) tier.Tier {
				tr := open(tb, sharedBy(tb, store, "a", hook))
				if tr.Info().Authoritative {
					tb.Error("others may add blocks, and nobody is to ask for them")
				}
				tb.Cleanup(func() {
					if !tb.Failed() && tr.Stats().ScanDone {
						wantOwn(tb, tr)
					}
				})
				return tr
			}})
		})
	}
}

// Who may open a root, and how the others are told.
func TestSharedOrAlone(t *testing.T) {
	shared, alone := t.TempDir(), t.TempDir()
	a := openClosing(t, sharedBy(t, shared, "a", nil))
	b := openClosing(t, sharedBy(t, shared, "b", nil))
	c := open(t, opts(t, alone, nil))
	refused := func(o Options, want ...string) {
		t.Helper()
		tr, err := Open(t.Context(), o)
		if err == nil {
			closeTier(t, tr)
			t.Errorf("opened; want an error with %q", want)
			return
		}
		for _, w := range want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("error %q does not say %q", err, w)
			}
		}
	}
	pid := fmt.Sprintf("pid %d", os.Getpid())
	refused(sharedBy(t, shared, "a", nil), shared, `node_id "a" is in use`, pid)
	refused(opts(t, shared, nil), shared, "shared by several nodes", "set shared: true")
	refused(sharedBy(t, alone, "a", nil), alone, "belongs to one node alone", pid, "empty root")
	closeTier(t, c)
	refused(sharedBy(t, alone, "a", nil), alone, "belongs to one node alone")
	o := opts(t, alone, nil)
	o.NodeID = "a"
	refused(o, "node_id", "set shared: true")
	refused(sharedBy(t, shared, "a b", nil), `node_id is "a b"`)
	refused(sharedBy(t, shared, strings.Repeat("x", 65), nil), "node_id")
	openClosing(t, opts(t, alone, nil)) // nothing of the refused is left in its way

	// A number is a node's for good; the next that comes has another.
	if a.place.number != 1 || b.place.number != 2 {
		t.Errorf("numbers %d and %d", a.place.number, b.place.number)
	}
	closeTier(t, a)
	closeTier(t, b)
	for _, x := range []struct {
		id   string
		want uint16
	}{{"b", 2}, {"c", 3}, {"a", 1}} {
		if tr := openClosing(t, sharedBy(t, shared, x.id, nil)); tr.place.number != x.want {
			t.Errorf("%s has number %d, want %d", x.id, tr.place.number, x.want)
		}
	}
	if host, err := os.Hostname(); err == nil && nodeID.MatchString(host) {
		tr := openClosing(t, sharedBy(t, shared, "", nil))
		if tr.o.NodeID != host || !strings.HasSuffix(tr.Stats().Mode, "shared as "+host+" (4)") {
			t.Errorf("a node without an id is %q; %s", tr.o.NodeID, tr.Stats().Mode)
		}
	}
}

// settableClock is one that tests set.
type settableClock struct{ ns atomic.Int64 }

func (c *settableClock) now() time.Time { return time.Unix(1_700_000_000, c.ns.Load()) }

func (c *settableClock) add(d time.Duration) { c.ns.Add(int64(d)) }

// What a node stores, another finds, at the latest 2 s after it has missed it;
// until then a miss is believed without another look. What the owner gives up
// is a miss. Nobody is charged for what is another's.
func TestSharedServesWhatOthersStore(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	root := t.TempDir()
	var clock settableClock
	var looks atomic.Int64
	watched := func(id string) *Tier {
		o := sharedBy(t, root, id, func(c vfs.Call) vfs.Fault {
			if c.Op == vfs.OpLstat && strings.Count(c.Name, "/") == 2 && len(c.Name) > 100 {
				looks.Add(1)
			}
			return vfs.Fault{}
		})
		o.Now = clock.now
		return openClosing(t, o)
	}
	a, b := watched("a"), watched("b")
	items := blocks(t, ns, 0, 3, 0)
	found := make([]bool, 3)
	ask := func(tr *Tier, want bool) {
		t.Helper()
		if err := tr.Contains(t.Context(), ns, keysOf(items), found); err != nil || found[0] != want || found[1] != want || found[2] != want {
			t.Errorf("found %v, %v; want %v", found, err, want)
		}
	}
	missed := func(tr *Tier, i int, want tier.Presence) {
		t.Helper()
		if p := known(tr, ns, items[i].Key); p != want {
			t.Errorf("at %v Known says %v, want %v", time.Duration(clock.ns.Load()), p, want)
		}
	}
	missed(b, 0, tier.Unknown)
	looks.Store(0)
	ask(b, false)
	ask(b, false)
	if n := looks.Load(); n != 3 {
		t.Errorf("%d looks for 3 keys, asked for twice", n)
	}
	used := b.Stats().UsedBytes
	write(t, a, ns, items)
	clock.add(missAge - 1)
	missed(b, 0, tier.Absent)
	ask(b, false)
	clock.add(1)
	missed(b, 0, tier.Unknown)
	looks.Store(0)
	ask(b, true)
	missed(b, 0, tier.Present)
	ask(b, true)
	if n := looks.Load(); n != 3 {
		t.Errorf("%d looks", n)
	}
	readable(t, b, ns, items)
	write(t, b, ns, items) // is there
	if got := b.Stats(); got.UsedBytes != used || got.Blocks != 3 {
		t.Errorf("for another's blocks: %+v, before %d bytes were used", got, used)
	}

	// The owner evicts or loses them.
	if err := a.Delete(t.Context(), ns, keysOf(items[:1])); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(a.blockPath(ns, items[1].Key)); err != nil {
		t.Fatal(err)
	}
	r := blocks(t, ns, 0, 2, 0)
	for _, tr := range []*Tier{b, a} {
		tr.Read(t.Context(), ns, r)
		for i := range r {
			if !errors.Is(r[i].Err, tier.ErrNotFound) {
				t.Errorf("node %s reads %v", tr.o.NodeID, r[i].Err)
			}
			missed(tr, i, tier.Absent)
		}
		wantOwn(t, tr)
	}
	write(t, b, ns, r[:1]) // and now it is b's, at once
	missed(b, 0, tier.Present)
	clock.add(missAge)
	readable(t, a, ns, r[:1])
	wantOwn(t, a)
	wantOwn(t, b)

	// The clock is set back: a miss is not believed for a year.
	missed(a, 1, tier.Unknown)
	if err := a.Contains(t.Context(), ns, keysOf(r[1:]), make([]bool, 1)); err != nil {
		t.Fatal(err)
	}
	missed(a, 1, tier.Absent)
	clock.add(-365 * 24 * time.Hour)
	missed(a, 1, tier.Unknown)

	// An engine's namespace that another node has stored is compared with that.
	other := tiertest.Namespace(t, "b")
	write(t, a, other, blocks(t, other, 0, 1, 0))
	if err := os.WriteFile(filepath.Join(root, other.Fingerprint().String(), nameNamespace), ns.JSON(), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := b.OpenNamespace(t.Context(), other); !errors.Is(err, tier.ErrNamespaceMismatch) {
		t.Errorf("a namespace that is another's here: %v", err)
	}
}

// A full node gives up its own blocks, and no other's; and what is another's
// by now is not removed for its own.
func TestSharedEvictsItsOwn(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	for mode, hook := range modes {
		t.Run(mode, func(t *testing.T) {
			root := fastDir(t)
			a := openClosing(t, sharedBy(t, root, "a", hook))
			o := sharedBy(t, root, "b", hook)
			o.Capacity = CapacityMin
			b := openClosing(t, o)
			theirs := blocks(t, ns, 0, 20, 1)
			write(t, a, ns, theirs)
			readable(t, b, ns, theirs) // so that they are in its index
			for i := range 30 {
				write(t, b, ns, blocks(t, ns, 100+i, 1, 1))
				wantOwn(t, b)
				if s := b.Stats(); s.UsedBytes > s.CapacityBytes {
					t.Fatalf("%+v", s)
				}
			}
			readable(t, a, ns, theirs)
			if s := b.Stats(); s.Evicted < 20 {
				t.Errorf("%+v", s)
			}
			// The oldest of b's is a's now, as when b was slow and a stored it anew.
			mine := blocks(t, ns, 129, 1, 1)
			path := b.blockPath(ns, mine[0].Key)
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			write(t, a, ns, mine)
			for i := range 30 {
				write(t, b, ns, blocks(t, ns, 200+i, 1, 1))
			}
			readable(t, a, ns, mine)
			wantOwn(t, a)
			wantOwn(t, b)
			// And it learns that when it stores such a one.
			mine = blocks(t, ns, 229, 1, 1)
			if err := os.Remove(b.blockPath(ns, mine[0].Key)); err != nil {
				t.Fatal(err)
			}
			write(t, a, ns, mine)
			write(t, b, ns, mine)
			wantOwn(t, b)
		})
	}
}

// Nodes that store the same keys at the same moment leave one file each, which
// one of them is charged for.
func TestSharedRace(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	for mode, hook := range modes {
		t.Run(mode, func(t *testing.T) {
			root := fastDir(t)
			var all []*Tier
			for i := range 3 {
				all = append(all, openClosing(t, sharedBy(t, root, fmt.Sprint("n", i), hook)))
			}
			var wg sync.WaitGroup
			const n = 60
			for i := range all {
				for range 2 {
					items := blocks(t, ns, 0, n, 1)
					wg.Go(func() {
						for j := range items {
							all[i].Write(context.Background(), ns, items[j:j+1])
							if items[j].Err != nil {
								t.Errorf("write: %v", items[j].Err)
							}
						}
						all[i].Read(context.Background(), ns, items)
						for j := range items {
							if err := tiertest.Check(ns, &items[j]); err != nil {
								t.Error(err)
							}
						}
					})
				}
			}
			wg.Wait()
			sum := int64(0)
			for _, tr := range all {
				wantOwn(t, tr)
				tr.mu.Lock()
				sum += tr.mu.namespaces[ns.Fingerprint()].bytes
				tr.mu.Unlock()
				if s := tr.Stats(); s.Blocks != n || s.SetAside != 0 {
					t.Errorf("%+v", s)
				}
			}
			if sum != n*2*headerSize {
				t.Errorf("all together are charged %d bytes for %d blocks", sum, n)
			}
			if left, _ := filepath.Glob(root + "/nodes/*/tmp/*"); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
}

// While a node gives a block its name, another does so, and the call may fail:
// the other's copy stays, and only that one is charged.
func TestSharedRaceForAName(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	for mode, hook := range modes {
		for _, fault := range []vfs.Fault{{}, {Err: unix.EIO}} {
			t.Run(fmt.Sprint(mode, fault.Err), func(t *testing.T) {
				root := fastDir(t)
				a := openClosing(t, sharedBy(t, root, "a", hook))
				items := blocks(t, ns, 0, 1, 1)
				var raced atomic.Bool
				b := openClosing(t, sharedBy(t, root, "b", func(c vfs.Call) vfs.Fault {
					if (c.Op == vfs.OpLink || c.Op == vfs.OpRename) && strings.HasSuffix(c.Name, items[0].Key.String()) && raced.CompareAndSwap(false, true) {
						a.Write(context.Background(), ns, blocks(t, ns, 0, 1, 1))
						return fault
					}
					return hook(c)
				}))
				write(t, b, ns, blocks(t, ns, 1, 1, 1)) // makes what it needs
				write(t, b, ns, blocks(t, ns, 2, 1, 1))
				raced.Store(false)
				tiertest.Fill(ns, &items[0])
				b.Write(t.Context(), ns, items)
				if (items[0].Err == nil) != (fault.Err == nil) || !raced.Load() {
					t.Errorf("write: %v", items[0].Err)
				}
				readable(t, a, ns, items)
				wantOwn(t, a)
				wantOwn(t, b)
			})
		}
	}
}

// A node that died finds its own again, and no other's; and before its scan it
// knows how much that is at most. A new one may store at once.
func TestSharedRestart(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	root := t.TempDir()
	a := open(t, sharedBy(t, root, "a", nil))
	write(t, a, ns, blocks(t, ns, 0, 40, 1))
	b := open(t, sharedBy(t, root, "b", nil))
	write(t, b, ns, blocks(t, ns, 100, 10, 1)) // whatever its scan is at
	if err := os.WriteFile(filepath.Join(root, a.tmpName[:len(a.tmpName)-33]+"left"), make([]byte, 9000), 0o600); err != nil {
		t.Fatal(err)
	}
	a.crash()
	b.crash()
	for _, x := range []struct {
		id   string
		own  int
		want int64
	}{{"a", 0, 40}, {"b", 100, 9}, {"c", 200, 0}} {
		o := sharedBy(t, root, x.id, nil)
		under, err := vfs.OpenRoot(root)
		if err != nil {
			t.Fatal(err)
		}
		gate := make(chan struct{})
		o.FS = &vfs.Faulty{FS: under, Hook: func(c vfs.Call) vfs.Fault {
			if c.Op == vfs.OpReadDir && len(c.Name) == 64 {
				return vfs.Fault{Wait: gate}
			}
			return vfs.Fault{}
		}}
		tr := open(t, o)
		if s := tr.Stats(); s.ScanDone || s.UsedBytes < x.want*2*headerSize {
			t.Errorf("before its scan: %+v", s)
		}
		readable(t, tr, ns, blocks(t, ns, 0, 3, 1))
		readable(t, tr, ns, blocks(t, ns, 100, 3, 1))
		if x.id == "a" { // deletes one of b's that it has not come to
			before := tr.Stats().UsedBytes
			if err := tr.Delete(t.Context(), ns, []block.Key{tiertest.Key(109, 1)}); err != nil {
				t.Error(err)
			}
			if after := tr.Stats().UsedBytes; after != before {
				t.Errorf("deleting another's block changes %d bytes to %d", before, after)
			}
		}
		write(t, tr, ns, blocks(t, ns, x.own+50, 1, 1))
		close(gate)
		<-tr.ScanDone()
		wantOwn(t, tr)
		tr.mu.Lock()
		if n := tr.mu.namespaces[ns.Fingerprint()]; n.bytes != (x.want+1)*2*headerSize {
			t.Errorf("%s has %d bytes of blocks, want %d blocks", x.id, n.bytes, x.want+1)
		}
		tr.mu.Unlock()
		if left, _ := filepath.Glob(root + "/nodes/*/tmp/*"); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
		closeTier(t, tr)
	}
}

// Others' blocks take a bounded part of the index.
func TestSharedForeignAreBounded(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	tr := openClosing(t, sharedBy(t, t.TempDir(), "a", nil))
	write(t, tr, ns, blocks(t, ns, 0, 2, 1))
	tr.mu.Lock()
	n := tr.mu.namespaces[ns.Fingerprint()]
	for i := range foreignMax + 1000 {
		key := tiertest.Key(1000+i, 1)
		tr.addLocked(n, &key, 8192, flagForeign)
	}
	blocks, oldest, newest := tr.mu.index.table.Len(), tiertest.Key(1000, 1), tiertest.Key(1000+foreignMax+999, 1)
	if x := &tr.mu.index; x.find(n.id, &oldest) != 0 || x.find(n.id, &newest) == 0 {
		t.Error("it is not the oldest that was forgotten")
	}
	tr.mu.Unlock()
	if blocks != foreignMax+2 || known(tr, ns, tiertest.Key(0, 1)) != tier.Present {
		t.Errorf("%d blocks are indexed", blocks)
	}
	wantOwn(t, tr)
}

// A node whose root goes joins again under its number.
func TestSharedRootGoes(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	root := filepath.Join(t.TempDir(), "root")
	var all []*Tier
	for _, id := range []string{"a", "b"} {
		o := watchful(root)
		o.Shared, o.NodeID = true, id
		all = append(all, openClosing(t, o))
	}
	for i, tr := range all {
		write(t, tr, ns, blocks(t, ns, 10*i, 5, 1))
	}
	if err := os.Rename(root, root+".away"); err != nil {
		t.Fatal(err)
	}
	for _, tr := range all {
		until(t, "the loss is noticed", tr.isLost)
	}
	wantGone(t, all[0], ns, blocks(t, ns, 0, 2, 1))
	if err := os.Rename(root+".away", root); err != nil {
		t.Fatal(err)
	}
	for i, tr := range all {
		until(t, "it is there again", func() bool { return !tr.isLost() && tr.Stats().ScanDone })
		if tr.place.number != uint16(i+1) {
			t.Errorf("%s has number %d", tr.o.NodeID, tr.place.number)
		}
		readable(t, tr, ns, append(blocks(t, ns, 0, 5, 1), blocks(t, ns, 10, 5, 1)...))
		wantOwn(t, tr)
	}
}

// Three nodes on one root store, read, delete, evict and restart, and files are
// damaged, by a seed: right bytes or a miss, each node within its capacity
// at each step, and when each has looked, it counts just what is its own.
func TestSharedRandom(t *testing.T) {
	seeds := []uint64{1, 2, 3}
	if *sharedSeed != 0 {
		seeds = []uint64{*sharedSeed}
	}
	names := []string{"direct_tmpfile", "rename", "buffered"}
	for _, seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			defer func() {
				if t.Failed() {
					t.Logf("-shared.seed %d repeats this", seed)
				}
			}()
			r := rand.New(rand.NewPCG(seed, 0))
			ns := tiertest.Namespace(t, "a")
			root := fastDir(t)
			var clock settableClock
			hook := modes[names[r.IntN(len(names))]]
			opened := func(i int) *Tier {
				o := sharedBy(t, root, fmt.Sprint("n", i), hook)
				o.Capacity, o.Now = CapacityMin+int64(i)*(64<<10), clock.now
				tr := open(t, o)
				<-tr.ScanDone()
				return tr
			}
			nodes := []*Tier{opened(0), opened(1), opened(2)}
			const keys = 60
			key := func() (int, uint32) { i := r.IntN(keys); return i, uint32(i % 2) }
			hits := 0
			read := func(tr *Tier, i int, group uint32) {
				it := blocks(t, ns, i, 1, group)
				clear(it[0].Buf)
				tr.Read(t.Context(), ns, it)
				switch c := tier.ClassOf(it[0].Err); {
				case c == tier.ClassNone:
					if err := tiertest.Check(ns, &it[0]); err != nil {
						// As transfer does with what does not match its sum.
						if err := tr.SetAside(t.Context(), ns, it[0].Key, "test"); err != nil {
							t.Errorf("set aside: %v", err)
						}
						return
					}
					hits++
				case c != tier.ClassNotFound && c != tier.ClassCorrupt:
					t.Errorf("read: %v", it[0].Err)
				}
			}
			under, err := vfs.OpenRoot(root)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = under.Close() }()
			for step := range 600 {
				i, group := key()
				n := r.IntN(len(nodes))
				tr := nodes[n]
				file := tr.blockPath(ns, tiertest.Key(i, group))
				switch x := r.IntN(100); {
				case x < 40:
					it := blocks(t, ns, i, 1, group)
					if tr.Write(t.Context(), ns, it); it[0].Err != nil {
						t.Errorf("write: %v", it[0].Err)
					}
				case x < 75:
					read(tr, i, group)
				case x < 80:
					if err := tr.Delete(t.Context(), ns, []block.Key{tiertest.Key(i, group)}); err != nil {
						t.Errorf("delete: %v", err)
					}
				case x < 83:
					_ = os.Remove(file)
				case x < 85:
					_ = os.Truncate(file, int64(r.IntN(20000)))
				case x < 87:
					if f, err := os.OpenFile(file, os.O_RDWR, 0); err == nil {
						_, _ = f.WriteAt([]byte{byte(r.Uint32())}, int64(r.IntN(8192)))
						_ = f.Close()
					}
				case x < 89: // another key's, whoever's
					j, g := key()
					if b, err := os.ReadFile(file); err == nil && i != j {
						_ = os.WriteFile(tr.blockPath(ns, tiertest.Key(j, g)), b, 0o600)
					}
				case x < 90:
					if os.Remove(file) == nil {
						_ = os.Mkdir(file, 0o700)
					}
				case x < 94:
					clock.add(time.Duration(r.IntN(3000)) * time.Millisecond)
				case x < 97:
					tr.crash()
					nodes[n] = opened(n)
				default:
					closeTier(t, tr)
					nodes[n] = opened(n)
				}
				for _, tr := range nodes {
					if s := tr.Stats(); s.UsedBytes > s.CapacityBytes {
						t.Fatalf("step %d: %+v", step, s)
					}
				}
			}
			// Each looks at all: at the second time nobody finds anything to do.
			for range 2 {
				clock.add(missAge)
				for _, tr := range nodes {
					for i := range keys {
						read(tr, i, uint32(i%2))
					}
				}
			}
			for _, tr := range nodes {
				wantOwnIn(t, tr, under)
				closeTier(t, tr)
			}
			if hits < 100 {
				t.Errorf("%d hits", hits)
			}
			// And a start counts the same.
			for i := range nodes {
				tr := opened(i)
				wantOwnIn(t, tr, under)
				closeTier(t, tr)
			}
		})
	}
}

// Three nodes under load at once, each with less room than it wants.
func TestSharedUnderLoad(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	root := fastDir(t)
	var nodes []*Tier
	for i := range 3 {
		o := sharedBy(t, root, fmt.Sprint("n", i), nil)
		o.Capacity = 128 << 10
		nodes = append(nodes, openClosing(t, o))
	}
	var wg sync.WaitGroup
	var hits atomic.Int64
	for w := range 6 {
		tr := nodes[w%3]
		it := blocks(t, ns, 0, 2, 1)
		r := rand.New(rand.NewPCG(uint64(w), 5))
		wg.Go(func() {
			for range 150 {
				for i := range it {
					it[i].Key = tiertest.Key(r.IntN(60), 1)
					tiertest.Fill(ns, &it[i])
				}
				tr.Write(context.Background(), ns, it)
				for i := range it {
					if it[i].Err != nil {
						t.Errorf("write: %v", it[i].Err)
					}
					it[i].Key = tiertest.Key(r.IntN(60), 1)
				}
				tr.Read(context.Background(), ns, it)
				for i := range it {
					if errors.Is(it[i].Err, tier.ErrNotFound) {
						continue
					}
					hits.Add(1)
					if err := tiertest.Check(ns, &it[i]); err != nil {
						t.Errorf("read: %v", err)
					}
				}
				if s := tr.Stats(); s.UsedBytes > s.CapacityBytes {
					t.Errorf("%+v", s)
				}
			}
		})
	}
	wg.Wait()
	var all int64
	for _, tr := range nodes {
		wantOwn(t, tr)
		s := tr.Stats()
		all += s.Evicted
		if s.SetAside != 0 {
			t.Errorf("%+v", s)
		}
	}
	if hits.Load() == 0 || all == 0 {
		t.Errorf("%d hits, %d evicted", hits.Load(), all)
	}
}

// The n-th file call of a node fails, for each n. Afterwards it and another
// find right bytes or nothing, and count right.
func TestSharedErrorSweep(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	for mode, faults := range map[string][]vfs.Fault{"direct_tmpfile": {{Err: unix.EIO, After: true}}, "rename": {{Err: unix.EIO}, {Err: unix.EIO, After: true}}} {
		hook := modes[mode]
		for _, fault := range faults {
			t.Run(fmt.Sprint(mode, "/", fault.After), func(t *testing.T) {
				items := blocks(t, ns, 0, 9, 1)
				runs := int64(0)
				for hit := true; hit; runs++ {
					mem := vfs.NewMem(0)
					on := func(id string, hook func(vfs.Call) vfs.Fault) (*Tier, error) {
						o := quiet(Options{Root: "/mem", MinFree: -1, Capacity: CapacityMin, Shared: true, NodeID: id, scanRetry: time.Microsecond})
						o.FS = &vfs.Faulty{FS: mem, Hook: hook}
						tr, err := Open(t.Context(), o)
						if err == nil {
							<-tr.ScanDone()
						}
						return tr, err
					}
					clean := func(id string) *Tier {
						tr, err := on(id, hook)
						if err != nil {
							t.Fatalf("call %d: %v", runs, err)
						}
						return tr
					}
					other := clean("other")
					write(t, other, ns, blocks(t, ns, 4, 2, 1))
					var calls atomic.Int64
					var which vfs.Call
					hit = false
					if tr, err := on("faulty", func(c vfs.Call) vfs.Fault {
						if calls.Add(1)-1 == runs {
							hit, which = true, c
							return fault
						}
						return hook(c)
					}); err == nil {
						for i := range items {
							tiertest.Fill(ns, &items[i])
							tr.Write(t.Context(), ns, items[i:i+1])
						}
						_ = tr.Delete(t.Context(), ns, keysOf(items[6:7]))
						tr.Read(t.Context(), ns, items)
						for i := range items {
							if items[i].Err == nil && tiertest.Check(ns, &items[i]) != nil {
								t.Errorf("call %d: wrong bytes", runs)
							}
						}
						_ = tr.SetAside(t.Context(), ns, items[7].Key, "test")
						if used, own := tr.Stats().UsedBytes, ownBytes(t, mem, tr.place.number); used < own {
							t.Errorf("call %d, %v: %d bytes are counted, the files have %d", runs, which, used, own)
						}
						if runs%2 == 0 {
							tr.crash()
						} else {
							_ = tr.Close(t.Context())
						}
					}
					for _, tr := range []*Tier{clean("faulty"), other} {
						for i := range items {
							it := blocks(t, ns, i, 1, 1)
							tr.Read(t.Context(), ns, it)
							if err := tiertest.Check(ns, &it[0]); err != nil && !errors.Is(err, tier.ErrNotFound) {
								t.Errorf("call %d: %v", runs, err)
							}
						}
						wantOwnIn(t, tr, mem)
						closeTier(t, tr)
					}
					if n := mem.OpenFiles(); n > 0 {
						t.Fatalf("call %d: %d files are left open", runs, n)
					}
				}
				if runs < 50 {
					t.Errorf("only %d calls were failed", runs-1)
				}
			})
		}
	}
}

// A power cut keeps what was acknowledged with sync: data, and whose it is;
// without it, what remains is whole or set aside.
func TestSharedPowerCut(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	for _, sync := range []string{SyncData, SyncNone} {
		for seed := range uint64(60) {
			mem := vfs.NewMem(0)
			on := func(mem *vfs.Mem, id string) *Tier {
				o := quiet(Options{Root: "/mem", MinFree: -1, Shared: true, NodeID: id, Sync: sync, FS: mem, bootID: fmt.Sprint(seed)})
				tr := open(t, o)
				<-tr.ScanDone()
				return tr
			}
			a, b := on(mem, "a"), on(mem, "b")
			items := blocks(t, ns, 0, 8, 1)
			write(t, a, ns, items[:5])
			write(t, b, ns, items[5:])
			cut := mem.CrashClone(seed)
			a.crash()
			b.crash()
			for _, id := range []string{"a", "b"} {
				tr := on(cut, id)
				if tr.place.number == 0 || sync == SyncData && tr.Stats().SetAside > 0 {
					t.Errorf("seed %d: %+v", seed, tr.Stats())
				}
				r := blocks(t, ns, 0, 8, 1)
				tr.Read(t.Context(), ns, r)
				for i := range r {
					if err := r[i].Err; err == nil {
						if tiertest.Check(ns, &r[i]) != nil {
							_ = tr.SetAside(t.Context(), ns, r[i].Key, "test")
						}
					} else if sync == SyncData || tier.ClassOf(err) != tier.ClassNotFound && tier.ClassOf(err) != tier.ClassCorrupt {
						t.Errorf("%s, seed %d: block %d: %v", sync, seed, i, err)
					}
				}
				wantOwnIn(t, tr, cut)
				closeTier(t, tr)
			}
		}
	}
}
