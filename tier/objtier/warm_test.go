package objtier

import (
	"context"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/s3"
	"github.com/terrace-kv/terrace/internal/s3/s3test"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/tiertest"
)

var noLog = slog.New(slog.DiscardHandler)

// lists makes small pages, and notes when they were asked for.
type lists struct {
	list lister
	mu   sync.Mutex
	at   []time.Time
}

func (l *lists) List(ctx context.Context, o s3.ListOptions) (s3.Page, error) {
	l.mu.Lock()
	l.at = append(l.at, time.Now())
	l.mu.Unlock()
	o.Max = 100
	return l.list.List(ctx, o)
}

func (l *lists) times() []time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.at)
}

func TestWarmFillsTheIndex(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, c := testStore(t)
		l := newLayout("p")
		ns, other := smallNamespace(t, "m"), smallNamespace(t, "other")
		p := newPresence(1_000, time.Hour, time.Hour, time.Now)
		keys := keysFrom(0, 350)
		for _, key := range keys {
			setBlock(s, l, ns, key)
		}
		setBlock(s, l, other, keys[7])
		dir := l.dir(ns.Fingerprint())
		for _, foreign := range []string{dir + "readme", dir + strings.ToUpper(keys[1].String()), dir + keys[0].String() + "/x", "p/" + ns.Fingerprint().String() + "/name"} {
			s.Set(testBucket, foreign, []byte("x"))
		}
		s.Set(testBucket, l.block(ns.Fingerprint(), keysFrom(500, 1)[0]), make([]byte, 30))
		count := &lists{list: c}
		w := newWarmer(count, p, l, 10, noLog)
		defer w.close()
		w.start(ns)
		w.start(ns)
		if done, _, _ := w.progress(); done {
			t.Error("the listing is over before it began")
		}
		time.Sleep(time.Minute)
		if done, blocks, err := w.progress(); !done || blocks != 350 || err != "" || w.full() {
			t.Errorf("done %v, %d blocks, error %q, full %v", done, blocks, err, w.full())
		}
		if w.mu.foreign != 3 || w.mu.unusable != 1 {
			t.Errorf("%d foreign, %d unusable objects; want 3, 1", w.mu.foreign, w.mu.unusable)
		}
		out := make([]tier.Presence, len(keys))
		p.known(ns.Fingerprint(), keys, out)
		if i := slices.IndexFunc(out, func(x tier.Presence) bool { return x != tier.Present }); i >= 0 {
			t.Errorf("key %d is %d", i, out[i])
		}
		if at := count.times(); len(at) != 4 || at[3].Sub(at[0]) < 300*time.Millisecond {
			t.Errorf("requests came at %v", at)
		}
		wantKnown(t, p, other.Fingerprint(), keys[7], tier.Unknown)
		w.start(other) // a namespace that is opened later
		time.Sleep(time.Second)
		wantKnown(t, p, other.Fingerprint(), keys[7], tier.Present)
		wantKnown(t, p, other.Fingerprint(), keys[8], tier.Unknown) // not Absent: others may store
	})
}

func TestWarmStopsAtTheBound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, c := testStore(t)
		l, ns := newLayout(""), smallNamespace(t, "m")
		for _, key := range keysFrom(0, 500) {
			setBlock(s, l, ns, key)
		}
		p := newPresence(150, time.Hour, time.Hour, time.Now)
		used := keysFrom(9000, 3)
		for _, key := range used {
			p.put(ns.Fingerprint(), key, 100)
		}
		count := &lists{list: c}
		w := newWarmer(count, p, l, 10, noLog)
		defer w.close()
		w.start(ns)
		time.Sleep(time.Minute)
		if done, blocks, err := w.progress(); !done || !w.full() || blocks != 200 || err != "" || len(count.times()) != 2 {
			t.Errorf("done %v, full %v, %d blocks by %d requests, error %q", done, w.full(), blocks, len(count.times()), err)
		}
		for _, key := range used {
			wantKnown(t, p, ns.Fingerprint(), key, tier.Present)
		}
		if blocks, _ := p.size(); blocks != 150 {
			t.Errorf("%d blocks in an index of 150", blocks)
		}
	})
}

// A store that is down for an hour is not asked in a loop, and the listing goes
// on where it was.
func TestWarmStoreDownAndBack(t *testing.T) {
	for _, tt := range []struct {
		name  string
		fault s3test.Fault
	}{{"down", s3test.Fault{Reset: true}}, {"slow down", s3test.Fault{Status: 503, Code: "SlowDown"}},
		{"forgets tokens", s3test.Fault{Status: 400, Code: "InvalidArgument"}}} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, c := testStore(t)
				l, ns := newLayout(""), smallNamespace(t, "m")
				for _, key := range keysFrom(0, 250) {
					setBlock(s, l, ns, key)
				}
				var down atomic.Bool
				forgets := tt.fault.Status == 400
				served := 0
				s.Fault = func(r *http.Request) *s3test.Fault {
					if down.Load() || forgets && r.URL.Query().Has("continuation-token") {
						return &tt.fault
					}
					if served++; served == 1 {
						down.Store(!forgets)
					}
					return nil
				}
				p := newPresence(1_000, 10*time.Hour, time.Hour, time.Now)
				count := &lists{list: c}
				w := newWarmer(count, p, l, 100, noLog)
				defer w.close()
				w.start(ns)
				time.Sleep(time.Hour)
				if !forgets {
					done, blocks, err := w.progress()
					if done || blocks != 100 || err == "" {
						t.Errorf("while the store is down: done %v, %d blocks, error %q", done, blocks, err)
					}
					if n := len(count.times()); n < 60 || n > 140 {
						t.Errorf("%d requests in an hour of silence", n)
					}
				}
				down.Store(false)
				time.Sleep(2 * time.Minute)
				if done, blocks, err := w.progress(); !done || blocks != 250 || err != "" {
					t.Errorf("after it: done %v, %d blocks, error %q", done, blocks, err)
				}
				if served != 3 {
					t.Errorf("%d pages were read, want each of 3 once", served)
				}
			})
		})
	}
}

// A page that was asked for before a store or a removal of this node does not
// undo it.
func TestWarmRacesStores(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, c := testStore(t)
		l, ns := newLayout(""), smallNamespace(t, "m")
		keys := keysFrom(0, 10)
		for _, key := range keys {
			setBlock(s, l, ns, key)
		}
		answer := make(chan struct{})
		s.Fault = func(*http.Request) *s3test.Fault { return &s3test.Fault{Until: answer} }
		p := newPresence(100, time.Hour, time.Hour, time.Now)
		w := newWarmer(c, p, l, 10, noLog)
		defer w.close()
		w.start(ns)
		synctest.Wait() // the page is under way; the store will answer with what was there
		then := p.mark()
		p.removed(ns.Fingerprint(), []block.Key{keys[0]}, then)
		p.drop(ns.Fingerprint(), keys[1])
		close(answer)
		time.Sleep(time.Second)
		for i, want := range []tier.Presence{tier.Absent, tier.Unknown, tier.Present} {
			wantKnown(t, p, ns.Fingerprint(), keys[i], want)
		}
	})
}

func TestWarmCloseWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, c := testStore(t)
		ns := smallNamespace(t, "m")
		s.Fault = func(*http.Request) *s3test.Fault { return &s3test.Fault{Until: make(chan struct{})} }
		w := newWarmer(c, newPresence(10, time.Hour, time.Hour, time.Now), newLayout(""), 10, noLog)
		w.start(ns)
		synctest.Wait()
		w.close() // synctest fails if the loop lives on
		if _, _, err := w.progress(); err != "" {
			t.Errorf("being closed is an error: %s", err)
		}
		w.start(smallNamespace(t, "late"))
		off := newWarmer(c, newPresence(10, time.Hour, time.Hour, time.Now), newLayout(""), -1, noLog)
		off.start(ns)
		if done, _, _ := off.progress(); !done || s.Counts()["LIST"] != 1 {
			t.Error("a listing that is turned off has something to do")
		}
		off.close()
	})
}

// A tier that is opened again knows by listings what it has, without a HEAD.
func TestOpenWarms(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := s3test.New().MakeBucket("b")
		ns := tiertest.Namespace(t, "m")
		it := []tier.Item{{Key: tiertest.Key(1, 0), Buf: tiertest.Buffer(t, ns.BlockBytes(0))}}
		tiertest.Fill(ns, &it[0])
		for again := range 2 {
			tr, err := Open(t.Context(), options(server, "p"))
			if err != nil {
				t.Fatal(err)
			}
			if err := tr.OpenNamespace(t.Context(), ns); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Minute)
			out, found := []tier.Presence{tier.Absent}, []bool{false}
			heads := server.Counts()["HEAD"]
			tr.Known(ns, []block.Key{it[0].Key}, out)
			if err := tr.Contains(t.Context(), ns, []block.Key{it[0].Key}, found); err != nil {
				t.Fatal(err)
			}
			heads = server.Counts()["HEAD"] - heads
			if st := tr.Stats(); again == 0 && (out[0] != tier.Unknown || found[0] || heads != 1) || again == 1 && (out[0] != tier.Present || !found[0] || heads != 0 || !st.ScanDone || st.ScanBlocks != 1 || st.Blocks != 1) {
				t.Errorf("start %d: known is %d, contains %v by %d HEADs, stats %+v", again, out[0], found[0], heads, st)
			}
			if tr.Write(t.Context(), ns, it); it[0].Err != nil {
				t.Fatal(it[0].Err)
			}
			if err := tr.Close(t.Context()); err != nil {
				t.Error(err)
			}
		}
	})
}
