package peer

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/tier"
)

// Bridge joins a Machine to a core: what the core wants of the bound tier becomes
// questions to peers, and what peers want becomes requests to the core, like an
// engine's. It is as pure as both, and whoever owns the core's lock owns it.
//
// A serve is a request of the core in a session of the bridge's, one for each
// namespace that is being served; it loads from every tier but the bound one,
// stores nothing, and its pins are what the serve may send.
type Bridge struct {
	M *Machine
	// Loaded is told how long each fetch took, whatever its outcome, from its
	// Submit to the last of its blocks; not of those that failed at once, since
	// the peer is down. Optional.
	Loaded func(took time.Duration)

	core *core.Core
	tier int // the bound one
	// Spaces finds a namespace by its fingerprint, and by the core's id.
	byPrint func(block.Fingerprint) (core.NamespaceID, bool)
	byID    func(core.NamespaceID) *block.Namespace

	sessions map[core.NamespaceID]*bridgeSession
	serves   map[ServeID]*bridged
	waits    map[core.WaitID]*bridged
	buf      []Effect
	hook     func(Effect) bool // tests see effects, and keep those from being carried out for which it is false
}

type bridgeSession struct {
	id core.SessionID
	n  int // serves
}

// bridged is a serve in the core.
type bridged struct {
	id   ServeID
	ns   core.NamespaceID
	s    *bridgeSession
	name string
	at   [][2]int // of each key asked for: its group, and its place in that list
	keys []block.Key
	wait core.WaitID
}

// NewBridge joins a machine to the core whose tier of that index is bound.
func NewBridge(m *Machine, c *core.Core, boundTier int, byPrint func(block.Fingerprint) (core.NamespaceID, bool), byID func(core.NamespaceID) *block.Namespace) *Bridge {
	return &Bridge{M: m, core: c, tier: boundTier, byPrint: byPrint, byID: byID,
		sessions: map[core.NamespaceID]*bridgeSession{}, serves: map[ServeID]*bridged{}, waits: map[core.WaitID]*bridged{}}
}

// Sessions are those of the core that serve peers.
func (b *Bridge) Sessions() map[core.SessionID]bool {
	out := map[core.SessionID]bool{}
	for _, s := range b.sessions {
		out[s.id] = true
	}
	return out
}

// Perform takes an effect of the core, and says whether it was one for peers.
// Settle is due afterwards.
func (b *Bridge) Perform(now core.Time, e core.Effect) bool {
	t := Time(now)
	switch e := e.(type) {
	case core.StartJob:
		if e.Tier != b.tier {
			return false
		}
		ns := b.byID(e.NS)
		if e.Kind == core.ProbeJob {
			keys := make([]block.Key, len(e.Blocks))
			for i := range keys {
				keys[i] = e.Blocks[i].Key
			}
			b.M.Probe(t, JobID(e.ID), e.Source, keys, Time(e.Deadline))
			return true
		}
		items := make([]Item, len(e.Blocks))
		for i, x := range e.Blocks {
			items[i] = Item{Key: x.Key, Slot: uint64(x.Slot), Length: ns.BlockBytes(x.Key.Group())}
		}
		b.M.Submit(t, JobID(e.ID), e.Source, items, Time(e.Deadline))
	case core.CancelJob:
		if e.Tier != b.tier {
			return false
		}
		b.M.Cancel(t, JobID(e.ID))
	case core.CloseSource:
		b.M.CloseSource(t, e.Seq)
	case core.Supply:
		b.M.Supply(t, b.byID(e.NS).Fingerprint(), e.ID, e.Seq, SupplyState(e.State))
	case core.AnswerLookup:
		x := b.waits[e.Wait]
		if x == nil {
			return false
		}
		delete(b.waits, e.Wait)
		x.wait = 0
		b.served(now, x, e.Answer)
	default:
		return false
	}
	return true
}

// Settle carries out what the machine wants of the core, and appends what it
// wants of the network to net. The core's effects are due afterwards: the owner
// performs them, and settles again, until there are none of either.
func (b *Bridge) Settle(now core.Time, net []Effect) []Effect {
	for {
		b.buf = b.M.TakeEffects(b.buf[:0])
		if len(b.buf) == 0 {
			return net
		}
		for _, e := range b.buf {
			if b.hook != nil && !b.hook(e) {
				continue
			}
			switch e := e.(type) {
			case Report:
				b.report(now, e)
			case ReportProbe:
				b.core.ProbeResult(now, core.JobID(e.Job), e.Found, e.Code == CodeOK)
			case Serve:
				b.serve(now, e)
			case Release:
				if x := b.serves[e.ID]; x != nil {
					_, _ = b.core.Unpin(now, x.s.id, x.name, []core.Lease{{Slot: core.Slot(e.Lease.Slot), Gen: e.Lease.Gen}}, nil)
				}
			case ServeEnd:
				b.end(now, e.ID)
			case ReleaseSupply:
				b.core.ReleaseHandover(now, e.Seq)
			default:
				net = append(net, e)
			}
		}
	}
}

func (b *Bridge) report(now core.Time, e Report) {
	if e.Last && e.Took > 0 && b.Loaded != nil {
		b.Loaded(time.Duration(e.Took))
	}
	res := make([]core.JobResult, len(e.Results))
	for i, r := range e.Results {
		res[i] = core.JobResult{Index: r.Index, Outcome: core.Failed, Class: r.Class, Cause: r.Cause, Sum: r.Sum}
		switch r.Class {
		case tier.ClassNone:
			res[i].Outcome = core.Done
		case tier.ClassCancelled:
			res[i].Outcome = core.Cancelled
		}
	}
	b.core.JobResults(now, core.JobID(e.Job), res)
}

// serve asks the core for keys.
func (b *Bridge) serve(now core.Time, e Serve) {
	x := b.serves[e.ID]
	if x == nil {
		var err error
		if x, err = b.begin(now, e); err != nil {
			code := CodeFailed
			switch {
			case errors.Is(err, core.ErrDraining):
				code = CodeDraining
			case errors.Is(err, core.ErrTooMany):
				code = CodeBusy
			}
			b.M.Served(Time(now), e.ID, slices.Repeat([]Found{{Code: code}}, len(e.Keys)))
			return
		}
	}
	ns := b.byID(x.ns)
	lists := make([][]block.Key, len(ns.Spec().Groups))
	x.keys, x.at = e.Keys, x.at[:0]
	for _, k := range e.Keys {
		g := int(k.Group())
		x.at = append(x.at, [2]int{g, len(lists[g])})
		lists[g] = append(lists[g], k)
	}
	a := &core.Answer{}
	wait, err := b.core.Lookup(now, x.s.id, x.name, lists, core.LookupOptions{Each: true, WaitUntil: core.Time(e.Until)}, a)
	switch {
	case err != nil:
		b.M.Served(Time(now), e.ID, slices.Repeat([]Found{{Code: CodeFailed}}, len(e.Keys)))
	case wait != 0:
		x.wait = wait
		b.waits[wait] = x
	default:
		b.served(now, x, a)
	}
}

// begin makes a serve a request of the core's.
func (b *Bridge) begin(now core.Time, e Serve) (*bridged, error) {
	id, ok := b.byPrint(e.NS)
	if !ok {
		return nil, fmt.Errorf("no namespace %s", e.NS)
	}
	s := b.sessions[id]
	if s == nil {
		sid, err := b.core.OpenSession(id)
		if err != nil {
			return nil, err
		}
		s = &bridgeSession{id: sid}
		b.sessions[id] = s
	}
	s.n++
	x := &bridged{id: e.ID, ns: id, s: s, name: strconv.FormatUint(uint64(e.ID), 10)}
	b.serves[e.ID] = x
	p := core.NoLimits()
	p.NoPeers, p.StoreTiers, p.MaxOffloadTokens = true, []core.TierFilter{}, 0
	if err := b.core.NewRequest(now, s.id, x.name, p); err != nil {
		b.end(now, e.ID)
		return nil, err
	}
	return x, nil
}

// served tells the machine what the core has found.
func (b *Bridge) served(now core.Time, x *bridged, a *core.Answer) {
	found := make([]Found, len(x.keys))
	ns := b.byID(x.ns)
	for i, at := range x.at {
		if a.Void {
			found[i].Code = CodeFailed
			continue
		}
		g := &a.Groups[at[0]]
		switch v := g.Verdicts[at[1]]; v {
		case core.Hit:
			l := g.Leases[at[1]]
			found[i].Lease = Lease{Slot: uint64(l.Slot), Gen: l.Gen, Sum: l.Sum, Length: ns.BlockBytes(x.keys[i].Group())}
		case core.HitPending, core.Retry, core.MissWaited:
			found[i] = Found{Code: CodeAbsent, Pending: true}
		case core.MissNoRoom:
			found[i].Code = CodeNoRoom
		case core.MissDraining:
			found[i].Code = CodeDraining
		default:
			found[i].Code = CodeAbsent
		}
	}
	b.M.Served(Time(now), x.id, found)
}

// end finishes a serve's request, and its session with the last.
func (b *Bridge) end(now core.Time, id ServeID) {
	x := b.serves[id]
	if x == nil {
		return
	}
	delete(b.serves, id)
	if x.wait != 0 {
		delete(b.waits, x.wait) // the core answers it void
	}
	_ = b.core.Finish(now, x.s.id, x.name)
	if x.s.n--; x.s.n == 0 {
		delete(b.sessions, x.ns)
		_, _ = b.core.CloseSession(now, x.s.id) // it has never written
	}
}
