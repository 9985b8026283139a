package sessions

import (
	"encoding/json"
	"errors"

	"slices"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/internal/node"
	"github.com/terrace-kv/terrace/internal/wire"
	"github.com/terrace-kv/terrace/tier/memtier"
)

// state is a row of the table.
type state struct {
	name string
	is   string

	big    bool                // blocks are big
	probed bool                // the tier must be probed
	hold   []memtier.Op        // calls of the tier that do not return while the state lasts
	mod    func(o *options)    // of the node
	before func(r *rig) error  // what another engine does first
	enter  func(*victim) error // by frames alone, because it may be another process's; nil for no greeting
	after  func(r *rig) error  // waits until the state shows, or makes it
}

func (s *state) blockBytes() uint64 {
	if s.big {
		return big
	}
	return small
}

// enterBy greets, so that there is a finished request "old", and enters.
func (s *state) enterBy(v *victim) error {
	if s.enter == nil {
		return nil
	}
	return errors.Join(must(v.greet(), "ok"), must(v.request("old", core.NoLimits()), "ok"), must(v.finish("old"), "ok"), s.enter(v))
}

func stateIndex(name string) int {
	return slices.IndexFunc(states, func(s state) bool { return s.name == name })
}

// request makes "r" and what follows it.
func request(then ...func(*victim) error) func(*victim) error {
	return func(v *victim) error {
		err := must(v.request("r", core.NoLimits()), "ok")
		for _, f := range then {
			err = errors.Join(err, f(v))
		}
		return err
	}
}

func reserve2(v *victim) error { return must(v.reserve(2), "granted,granted") }

func store2(v *victim) error {
	fills := func() []core.Fill { f := v.fills; v.fills = nil; return f }
	return errors.Join(must(v.reserve(2), "granted,granted"), must(v.commit(fills()), "ok,ok"))
}

func look2(v *victim) error { return must(v.lookup(seeds), "hit,hit") }

// waitBelow begins a lookup of blocks below that is not answered.
func waitBelow(v *victim) error {
	v.waiting = v.send(wire.TypeLookup, &wire.Lookup{Request: "r", WaitMS: 60_000, Keys: [][]block.Key{below}})
	return must(v.do(wire.TypePing, wire.Empty{}, wire.Empty{}), "ok") // calls are made in order
}

func flush(v *victim) error {
	v.waiting = v.send(wire.TypeFlush, &wire.Flush{Request: "r", WaitMS: 60_000})
	return must(v.do(wire.TypePing, wire.Empty{}, wire.Empty{}), "ok")
}

func reset(v *victim) error {
	v.waiting, v.spoiled = v.send(wire.TypeReset, &wire.Reset{WaitMS: 60_000}), len(v.fills)
	return must(v.do(wire.TypePing, wire.Empty{}, wire.Empty{}), "ok")
}

func finish(v *victim) error { return must(v.finish("r"), "ok") }

// sum commits big blocks without checksums, until they are seen to be pending:
// whoever is late to look finds them done.
func sum(v *victim) error {
	const all = "granted,granted,granted,granted,granted,granted"
	for range 20 {
		if err := must(v.reserve(6), all); err != nil {
			return err
		}
		// The node is asked in the same breath.
		commit, look := v.call+1, v.call+2
		frames := wire.AppendFrame(nil, wire.TypeCommit, commit, &wire.Commit{Request: "r", Fills: v.fills})
		frames = wire.AppendFrame(frames, wire.TypeStatus, look, wire.Empty{})
		v.call, v.fills = look, nil
		_, _ = v.c.Write(frames) // an error shows in the answer
		var done wire.FillReply
		var reply wire.StatusReply
		var st node.Status
		err := errors.Join(must(v.wait(commit, &done), "ok"), must(v.wait(look, &reply), "ok"))
		if err == nil {
			err = json.Unmarshal(reply.JSON, &st)
		}
		if err != nil || st.Tables.Reservations > 0 {
			return err
		}
	}
	return errors.New("24 MiB have always been summed at once")
}

func attach(v *victim) error {
	w, err := dial(v.c.RemoteAddr().String(), v.block)
	if err != nil {
		return err
	}
	v.worker = w
	return must(w.do(wire.TypeAttach, &wire.Attach{Versions: wire.Versions{Min: 1, Max: 1}, Token: v.token}, &wire.AttachReply{}), "ok")
}

var states = []state{
	{name: "connected", is: "before its greeting"},
	{name: "greeted", is: "greeted, no request unfinished", enter: func(*victim) error { return nil }},
	{name: "new", is: "a request is new", enter: request()},
	{name: "answered", is: "a lookup was answered with two pins", enter: request(look2)},
	{name: "promoting", is: "a lookup waits for a promotion", hold: []memtier.Op{memtier.OpRead}, enter: request(waitBelow), after: (*rig).held},
	{name: "probing", is: "a lookup waits for a probe", probed: true, hold: []memtier.Op{memtier.OpContains}, enter: request(waitBelow), after: (*rig).held},
	{name: "reserved", is: "two slots are being filled", enter: request(reserve2)},
	{name: "expired", is: "two slots were reserved, and their time is over", mod: expireSoon, enter: request(reserve2), after: (*rig).expired},
	{name: "summing", is: "six blocks are committed, their sums are being computed", big: true, enter: func(v *victim) error {
		p := core.NoLimits()
		p.StoreTiers = []core.TierFilter{} // no writes
		return errors.Join(must(v.request("r", p), "ok"), sum(v))
	}},
	{name: "cascading", is: "two blocks are being written to the tier", hold: []memtier.Op{memtier.OpWrite}, enter: request(store2), after: (*rig).held},
	{name: "crediting", is: "two blocks wait for the tier's credit, which another engine's writes have", hold: []memtier.Op{memtier.OpWrite},
		mod: func(o *options) { o.credit = 2 }, before: (*rig).takeCredit, enter: request(store2)},
	{name: "flushing", is: "a flush waits for a write to the tier", hold: []memtier.Op{memtier.OpWrite}, enter: request(store2, flush), after: (*rig).held},
	{name: "resetting", is: "a reset waits for a write to the tier, and for no slot that is being filled", hold: []memtier.Op{memtier.OpWrite},
		enter: request(store2, reserve2, reset), after: (*rig).held},
	{name: "finishing", is: "the request is finished; two slots of it are being filled and two blocks written", hold: []memtier.Op{memtier.OpWrite},
		enter: request(store2, reserve2, finish), after: (*rig).held},
	{name: "finished", is: "the request is finished and gone", enter: request(look2, store2, finish)},
	{name: "handover", is: "the request is finished and keeps four blocks for a decoder", enter: func(v *victim) error {
		p := core.NoLimits()
		p.RemoteDecoder = true
		return errors.Join(must(v.request("r", p), "ok"), look2(v), store2(v), finish(v))
	}},
	{name: "attached", is: "a worker is attached, and two slots are being filled", enter: request(reserve2, attach)},
	{name: "draining", is: "the node drains; the request has two pins and two slots", enter: request(look2, reserve2), after: (*rig).drain},
}

// options of a rig.
type options struct {
	reservation, greet, write time.Duration
	credit                    int
}

// soon is a bound that cells wait for. It is longer than any way to a state.
const soon = 900 * time.Millisecond

func expireSoon(o *options) { o.reservation = soon }

// action is a column of the table.
type action struct {
	name string
	is   string
	mod  func(o *options)
	do   func(r *rig, v *victim, want string)
}

var actions = []action{
	{name: "dies", is: "the connection is cut; the process lives and maps the region", do: func(r *rig, v *victim, want string) {
		v.c.Close()
		v.over = true
		v.say(r.left(want))
	}},
	{name: "killed", is: "its process is killed"}, // see walk
	{name: "leaves", is: "it says goodbye", do: func(_ *rig, v *victim, _ string) {
		s := v.do(wire.TypeGoodbye, wire.Empty{}, wire.Empty{})
		v.say(s)
		if s == "ok" {
			v.say(v.end())
		}
	}},
	{name: "hangs", is: "it neither reads nor writes while others go on", mod: func(o *options) { o.greet = 100 * time.Millisecond },
		do: func(r *rig, v *victim, want string) {
			r.served()
			if want == "end" {
				v.say(v.end())
				return
			}
			v.say(v.do(wire.TypePing, wire.Empty{}, wire.Empty{}))
		}},
	{name: "floods", is: "it makes calls and reads no answer", mod: func(o *options) { o.write = 100 * time.Millisecond },
		do: func(r *rig, v *victim, _ string) {
			frames := []byte(nil)
			for range 64 {
				frames = wire.AppendFrame(frames, wire.TypeStatus, 1<<20, wire.Empty{})
			}
			for {
				if _, err := v.c.Write(frames); err != nil {
					break
				}
			}
			s := v.end()
			if s == "end" && r.complained("slow reader") {
				s = "slow_reader end"
			}
			v.say(s)
		}},
	{name: "garbles", is: "it sends what is no frame", do: func(_ *rig, v *victim, _ string) {
		v.call = 0 // the node does not know which call it was
		_, _ = v.c.Write([]byte("\xff\xff\xff\xffGET / HTTP/1.1\r\n\r\n"))
		v.say(v.wait(0, wire.Empty{}))
	}},
	{name: "greets again", is: "it says hello a second time", do: func(_ *rig, v *victim, _ string) { v.say(v.greet()) }},
	{name: "reuses a finished id", is: "a new request has the id of one that is gone", do: func(_ *rig, v *victim, _ string) {
		v.say(v.request("old", core.NoLimits()))
	}},
	{name: "reuses its id", is: "a new request has the id of this one", do: func(_ *rig, v *victim, _ string) {
		v.say(v.request("r", core.NoLimits()))
	}},
	{name: "finishes twice", is: "it finishes the request twice", do: func(_ *rig, v *victim, _ string) {
		v.say(v.finish("r"), v.finish("r"))
	}},
	{name: "commits what it never reserved", is: "a slot that is not, and one that another engine fills", do: func(r *rig, v *victim, _ string) {
		v.say(v.commit([]core.Fill{{Slot: 1 << 30, Gen: 1, HasSum: true}, r.foreignFill()}))
	}},
	{name: "commits twice", is: "it reserves two more, and commits all twice", do: func(_ *rig, v *victim, _ string) {
		v.say(v.reserve(2), v.commit(v.fills), v.commit(v.fills))
	}},
	{name: "commits late", is: "it reserves two more, and commits when their time is over", mod: expireSoon, do: func(r *rig, v *victim, _ string) {
		v.say(v.reserve(2))
		r.waitExpired(len(v.fills) - v.spoiled)
		r.late = true
		v.say(v.commit(v.fills))
	}},
	{name: "aborts what is committed", is: "it reserves two more, commits all, and aborts all", do: func(_ *rig, v *victim, _ string) {
		v.say(v.reserve(2), v.commit(v.fills), v.abort(v.fills))
	}},
	{name: "unpins what it does not hold", is: "a slot that is not, and one that another engine pins", do: func(r *rig, v *victim, _ string) {
		v.say(v.unpin([]core.Lease{{Slot: 1 << 30, Gen: 1}, r.foreignLease()}))
	}},
	{name: "unpins twice", is: "it pins two, if it has no pins, and unpins them twice", do: func(_ *rig, v *victim, _ string) {
		if len(v.leases) == 0 {
			v.say(v.pin(seeds))
		}
		v.say(v.unpin(v.leases), v.unpin(v.leases))
	}},
	{name: "resets", is: "it resets the node, and then looks up, commits, unpins and finishes", do: func(r *rig, v *victim, _ string) {
		v.say(v.reset(50 * time.Millisecond)) // what is held is held for longer, and what is not takes as long on a loaded machine
		r.emptied = r.drained
		had := v.leases
		v.say(v.lookup(seeds), v.commit(v.fills), v.unpin(had), v.finish("r"))
	}},
}

func actionIndex(name string) int {
	return slices.IndexFunc(actions, func(a action) bool { return a.name == name })
}
