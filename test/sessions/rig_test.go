package sessions

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/client"
	"github.com/terrace-kv/terrace/internal/content"
	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/internal/engine"
	"github.com/terrace-kv/terrace/internal/node"
	"github.com/terrace-kv/terrace/internal/transfer"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/memtier"
)

// rig is a node for one cell, with an engine that behaves.
type rig struct {
	t      *testing.T
	state  *state
	n      *node.Node
	server *engine.Server
	tier   *memtier.Tier
	path   string
	log    *logBuffer

	gate    chan struct{} // closed: the tier's calls return
	holding atomic.Int64  // calls that wait for it

	other   *client.Client // the engine that behaves
	req     *client.Request
	ns      *block.Namespace
	next    int          // of its keys
	lease   client.Lease // of a seed
	grant   client.Grant // made by foreignFill
	grantOf block.Key
	drained bool
	emptied bool // while it drains: nothing comes back
	late    bool // the grant's time is over
}

type logBuffer struct {
	sync.Mutex
	bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.Lock()
	defer l.Unlock()
	return l.Buffer.Write(p)
}

func (l *logBuffer) String() string { l.Lock(); defer l.Unlock(); return l.Buffer.String() }

// backend shows the node to the server, as the root package does.
type backend struct{ *node.Node }

func (b backend) OpenSession(ctx context.Context, h engine.Hello) (engine.Session, error) {
	s, err := b.Node.OpenSession(ctx, node.Greeting{NS: h.NS, Name: h.Name, Engine: h.Engine, PID: h.PID, UID: h.UID})
	if err != nil {
		return nil, err
	}
	return session{s}, nil
}

func (b backend) Status() []byte { return b.StatusJSON() }

type session struct{ *node.Session }

func (s session) Facts() engine.Facts {
	return engine.Facts{ID: s.ID(), Epoch: s.Epoch(), RegionBytes: s.RegionBytes(), Strides: s.Strides()}
}

func (r *rig) check(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

// open starts a node and brings it and the other engine to where the victim
// finds them.
func open(t *testing.T, s *state, a *action) *rig {
	o := options{reservation: time.Minute, greet: patience, write: patience, credit: 64}
	for _, mod := range []func(*options){s.mod, a.mod} {
		if mod != nil {
			mod(&o)
		}
	}
	r := &rig{t: t, state: s, gate: make(chan struct{}), log: new(logBuffer), path: filepath.Join(t.TempDir(), "s"), next: firstOther}
	info := tier.Info{Name: "mem"}
	var lower tier.Tier
	if s.probed {
		r.tier = memtier.New(memtier.Options{Info: info})
		lower = r.tier
	} else {
		x := memtier.NewIndexed(memtier.Options{Info: info})
		r.tier, lower = x.Tier, x
	}
	log := slog.New(slog.NewTextHandler(r.log, nil))
	c := core.Options{Size: 64 * small, ExtentBytes: 64 * small, ReservationTimeout: o.reservation,
		PromoteTimeout: time.Minute, ProbeTimeout: time.Minute, LookupTimeout: time.Minute, FactFor: time.Minute}
	if s.big {
		c.Size, c.ExtentBytes = 20*big, big
	}
	var err error
	r.n, err = node.Open(t.Context(), node.Options{Core: c, Logger: log,
		Tiers: []node.TierSpec{{Tier: lower, Lane: transfer.Options{QueueItems: o.credit}}}})
	r.check(err)
	l, err := engine.Listen(r.path, "")
	r.check(err)
	r.server = engine.Serve(l, backend{r.n}, engine.Options{Logger: log, GreetTimeout: o.greet, WriteTimeout: o.write})

	// The other engine needs the victim's namespace, for the blocks that the
	// victim is to find, but does not like to write big blocks.
	r.ns, err = block.NewNamespace(spec(small))
	r.check(err)
	r.other, err = client.Dial(t.Context(), client.Options{Socket: r.path, Spec: spec(small), Engine: "other", VerifyOnLoad: true})
	r.check(err)
	r.req = r.begin("other")
	r.store(r.req, slices.Concat(seeds, below, theirs))
	r.flush(r.req, 5)
	r.resetAll()
	r.load(r.req, seeds)
	r.lease = r.load(r.req, theirs)[0]
	if s.before == nil {
		r.holdCalls()
	} else {
		r.check(s.before(r))
	}
	return r
}

func (r *rig) holdCalls() {
	hold := r.state.hold
	r.tier.SetHook(func(_ context.Context, op memtier.Op, _ *block.Namespace, _ block.Key) memtier.Fault {
		if !slices.Contains(hold, op) {
			return memtier.Fault{}
		}
		r.holding.Add(1)
		return memtier.Fault{Wait: r.gate, Hang: true}
	})
}

// takeCredit has the other engine's blocks written for as long as calls are
// held.
func (r *rig) takeCredit() error {
	r.holdCalls()
	q := r.begin("credit")
	r.store(q, r.fresh(2))
	r.check(q.Finish(r.t.Context()))
	return r.held()
}

// until polls what has no signal.
func until(what string, ok func() bool) error {
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			return errors.New("never: " + what)
		}
	}
	return nil
}

func (r *rig) held() error {
	return until("the tier is asked", func() bool { return r.holding.Load() > 0 })
}

func (r *rig) expired() error {
	return until("the reservation expires", func() bool { return r.n.Status().Stores.Expired >= 2 })
}

// waitExpired waits until the last of so many slots of the victim is given up,
// and of the other engine's.
func (r *rig) waitExpired(n int) {
	if r.grant.Gen != 0 {
		n++
	}
	r.check(until("the reservations expire", func() bool { return r.n.Status().Stores.Expired >= int64(n) }))
}

// drain makes the node drain, and does not wait for it.
func (r *rig) drain() error {
	r.foreignFill() // later is too late
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_ = r.n.Drain(ctx)
	r.drained = true
	return nil
}

func (r *rig) begin(id string) *client.Request {
	r.t.Helper()
	q, err := r.other.NewRequest(r.t.Context(), id, client.NoLimits())
	r.check(err)
	return q
}

func (r *rig) fresh(n int) []block.Key {
	r.next += n
	return keys(r.next-n, r.next)
}

func (r *rig) store(q *client.Request, ks []block.Key) {
	r.t.Helper()
	stored, err := q.Store(r.t.Context(), 0, 0, ks, func(i int, dst []byte) (uint64, error) {
		content.Fill(r.ns.Fingerprint(), ks[i], dst)
		return client.Sum(dst), nil
	})
	r.check(err)
	if stored.Stored != len(ks) {
		r.t.Fatalf("of %d blocks of the other engine: %+v", len(ks), stored)
	}
}

func (r *rig) flush(q *client.Request, blocks int) {
	r.t.Helper()
	f, err := q.Flush(r.t.Context(), patience)
	r.check(err)
	if !f.Done || f.Cascaded != blocks || f.Failed > 0 {
		r.t.Fatalf("flush of %d blocks of the other engine: %+v", blocks, f)
	}
}

// resetAll empties the primary. The victim's reset may still be under way.
func (r *rig) resetAll() {
	r.t.Helper()
	r.check(until("the primary is reset", func() bool {
		done, err := r.other.Reset(r.t.Context(), patience)
		return err == nil && done
	}))
}

// load looks blocks up, waits for them, and checks every byte.
func (r *rig) load(q *client.Request, ks []block.Key) []client.Lease {
	r.t.Helper()
	a, err := q.Lookup(r.t.Context(), [][]block.Key{ks}, client.LookupOptions{Wait: patience})
	r.check(err)
	var out []client.Lease
	buf := make([]byte, small)
	for i := range ks {
		l, ok := a.Lease(0, i)
		if !ok {
			r.t.Fatalf("block %d of the other engine is %v", i, a.Groups[0].Verdicts)
		}
		r.check(r.other.ReadInto(l, buf))
		if at := content.Check(r.ns.Fingerprint(), ks[i], buf); at >= 0 {
			r.t.Fatalf("block %d of the other engine is wrong at byte %d", i, at)
		}
		out = append(out, l)
	}
	return out
}

// served checks that the other engine is served from memory, whatever the
// tier does. While the node drains that is what it has already.
func (r *rig) served() {
	r.t.Helper()
	if r.drained {
		if !r.emptied {
			r.load(r.req, seeds)
		}
		return
	}
	q := r.begin("served")
	ks := r.fresh(2)
	r.store(q, ks)
	r.load(q, ks)
	r.check(q.Finish(r.t.Context()))
}

// recovered checks that the other engine is served through the tier.
func (r *rig) recovered() {
	r.t.Helper()
	q := r.begin("recovered")
	ks := r.fresh(2)
	r.store(q, ks)
	r.flush(q, 2)
	r.resetAll()
	r.load(q, ks)
	r.check(q.Finish(r.t.Context()))
}

// foreignFill is a slot that the other engine fills.
func (r *rig) foreignFill() core.Fill {
	r.t.Helper()
	if r.grant.Gen == 0 {
		r.grantOf = r.fresh(1)[0]
		g, err := r.req.Reserve(r.t.Context(), 0, 0, []block.Key{r.grantOf})
		r.check(err)
		r.grant = g[0]
	}
	return core.Fill{Slot: core.Slot(r.grant.Slot), Gen: r.grant.Gen, HasSum: true}
}

// foreignLease is a pin of the other engine's.
func (r *rig) foreignLease() core.Lease {
	return core.Lease{Slot: core.Slot(r.lease.Slot), Gen: r.lease.Gen}
}

// own checks that what the victim has spoken of is still the other engine's.
func (r *rig) own() {
	r.t.Helper()
	if r.grant.Gen != 0 {
		var sum uint64
		r.check(r.other.Write(r.grant, func(b []byte) error {
			content.Fill(r.ns.Fingerprint(), r.grantOf, b)
			sum = client.Sum(b)
			return nil
		}))
		st, err := r.req.Commit(r.t.Context(), []client.Fill{r.grant.Fill(sum)})
		r.check(err)
		if r.late || r.emptied {
			if st[0] != client.FillDropped {
				r.t.Fatalf("the other engine's late commit: %v", st)
			}
		} else if st[0] != client.FillOK {
			r.t.Fatalf("the other engine's commit: %v", st)
		}
	}
	st, err := r.req.Unpin(r.t.Context(), []client.Lease{r.lease})
	r.check(err)
	if st[0] != client.FillOK {
		r.t.Fatalf("the other engine's unpin: %v", st)
	}
}

// left waits until the victim's session has gone and says what is left of it:
// what is wanted first, or else what it is after a while. Of the other engine
// nothing counts.
func (r *rig) left(want string) (got string) {
	_ = until("", func() bool {
		s := r.n.Status()
		x := s.Tables
		mine := 1 // the other's request
		got = fmt.Sprintf("gone, jobs %d, quarantined %d", x.Jobs-r.jobsBefore(), x.Quarantined)
		if len(s.Sessions) > 1 || x.Requests > mine || x.Waits > 0 || x.Reservations > r.fillsBefore() || r.server.Stats().Ungreeted > 0 {
			got = fmt.Sprintf("not gone: %+v", x)
		}
		return strings.HasPrefix(want, got)
	})
	return got
}

// jobsBefore are those of the other engine's blocks.
func (r *rig) jobsBefore() int {
	if r.state.before != nil {
		return 1
	}
	return 0
}

func (r *rig) fillsBefore() int {
	if r.grant.Gen != 0 {
		return 1
	}
	return 0
}

// complained waits for a line of the log.
func (r *rig) complained(text string) bool {
	return until(text, func() bool { return strings.Contains(r.log.String(), text) }) == nil
}

// end gives everything back and checks that nothing is left.
func (r *rig) end() {
	r.t.Helper()
	r.check(r.other.Close())
	err := until("all tables are empty", func() bool {
		s := r.n.Status()
		p := s.Primary
		x := r.server.Stats()
		return s.Tables == node.TableStatus{} && p.FreeBytes+p.EvictableBytes+p.RemainderBytes == p.CapacityBytes &&
			x.Sessions+x.Workers+x.Ungreeted == 0
	})
	if err != nil {
		r.t.Fatalf("%v: %+v\n%+v\n%+v", err, r.n.Status().Tables, r.n.Status().Primary, r.server.Stats())
	}
	r.check(r.n.CheckInvariants())
}

func (r *rig) close() {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if r.other != nil {
		_ = r.other.Close()
	}
	if r.server != nil {
		if err := r.server.Close(); err != nil {
			r.t.Error(err)
		}
	}
	if r.n != nil {
		if err := r.n.Close(ctx); err != nil {
			r.t.Error(err)
		}
	}
}

// child is the victim as a process of its own.
func (r *rig) child() *exec.Cmd {
	r.t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), stateEnv+"="+r.state.name, socketEnv+"="+r.path)
	cmd.Stderr = os.Stderr
	_, err := cmd.StdinPipe() // its end, should we die first, ends the child
	r.check(err)
	out, err := cmd.StdoutPipe()
	r.check(err)
	r.check(cmd.Start())
	r.t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		r.t.Fatalf("the victim says %q, %v", line, err)
	}
	return cmd
}
