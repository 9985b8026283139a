package engine_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/arena"
	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/internal/engine"
	"github.com/terrace-kv/terrace/internal/engine/enginetest"
	"github.com/terrace-kv/terrace/internal/wire"
	"github.com/terrace-kv/terrace/tier"
)

// TestCalls goes through the life of a request, over the wire.
func TestCalls(t *testing.T) {
	var lookups []time.Duration
	f := start(t, engine.Options{Node: "1.2.3", OnLookup: func(d time.Duration) { lookups = append(lookups, d) }})
	c, h := f.greet(t)
	ns, err := block.NewNamespace(enginetest.Spec())
	if err != nil {
		t.Fatal(err)
	}
	want := wire.Limits{FrameMax: wire.FrameMax, LookupKeysMax: wire.LookupKeysMax, ReserveKeysMax: wire.ReserveKeysMax,
		FillsMax: wire.FillsMax, RequestsMax: 65536, WaitsMax: 1024}
	if h.Version != 1 || h.Session != 1 || h.Epoch == "" || h.Fingerprint != ns.Fingerprint() || h.RegionBytes != testRegion || h.Node != "1.2.3" ||
		!slices.Equal(h.Groups, []wire.Geometry{{Stride: 4096, BlockBytes: 4000}}) || h.Token == (wire.Token{}) || h.Limits != want {
		t.Errorf("hello answers %+v", h)
	}

	var e wire.Empty
	keys := enginetest.Keys(0, 3)
	c.ok(wire.TypeNewRequest, &wire.NewRequest{Request: "r"}, e)
	var grants wire.ReserveReply
	c.ok(wire.TypeReserve, &wire.Reserve{Request: "r", Keys: keys}, &grants)
	if len(grants.Grants) != 3 || grants.Grants[0].Status != core.Granted {
		t.Fatalf("grants %+v", grants)
	}
	fill := func(i int) core.Fill { return core.Fill{Slot: grants.Grants[i].Slot, Gen: grants.Grants[i].Gen} }
	summed := fill(0)
	summed.Sum, summed.HasSum = 7, true
	var statuses wire.FillReply
	c.ok(wire.TypeCommit, &wire.Commit{Request: "r", Fills: []core.Fill{summed, fill(1), {Slot: 1 << 20, Gen: 1}}}, &statuses)
	if !slices.Equal(statuses.Statuses, []core.FillStatus{core.FillOK, core.FillOK, core.FillStale}) {
		t.Errorf("commit answers %v", statuses.Statuses)
	}
	c.ok(wire.TypeAbort, &wire.Abort{Request: "r", Fills: []core.Fill{fill(2), fill(1)}}, &statuses)
	if !slices.Equal(statuses.Statuses, []core.FillStatus{core.FillOK, core.FillStale}) {
		t.Errorf("abort answers %v", statuses.Statuses)
	}
	var answer wire.LookupReply
	c.ok(wire.TypeLookup, &wire.Lookup{Request: "r", Keys: [][]block.Key{keys}}, &answer)
	if answer.Tokens != 32 || !answer.Final || len(answer.Groups) != 1 || answer.Groups[0].Leases[0] != (core.Lease{Slot: summed.Slot, Gen: summed.Gen, Sum: 7}) ||
		!slices.Equal(answer.Groups[0].Verdicts, []core.Verdict{core.Hit, core.Hit, core.MissAbsent}) {
		t.Errorf("lookup answers %+v", answer)
	}
	leases := answer.Groups[0].Leases
	c.ok(wire.TypeUnpin, &wire.Unpin{Request: "r", Leases: leases}, &statuses)
	c.ok(wire.TypeUnpin, &wire.Unpin{Request: "r", Leases: leases[:1]}, &statuses)
	if !slices.Equal(statuses.Statuses, []core.FillStatus{core.FillStale}) {
		t.Errorf("a second unpin answers %v", statuses.Statuses)
	}
	var pinned wire.PinReply
	c.ok(wire.TypePin, &wire.Keys{Request: "r", Keys: keys}, &pinned)
	if !slices.Equal(pinned.Leases, []core.Lease{leases[0], leases[1], {}}) {
		t.Errorf("pin answers %+v", pinned)
	}
	c.ok(wire.TypeTouch, &wire.Keys{Request: "r", Keys: keys}, e)
	var flushed wire.FlushReply
	c.ok(wire.TypeFlush, &wire.Flush{Request: "r", WaitMS: 10}, &flushed)
	if !flushed.Done {
		t.Errorf("flush answers %+v", flushed)
	}
	c.ok(wire.TypeFinish, &wire.Finish{Request: "r"}, e)
	if pins, _ := f.b.Pins(); pins != 0 {
		t.Errorf("%d pins after finish", pins)
	}
	for name, c2 := range map[string]struct {
		err error
		t   wire.Type
		m   wire.Message
	}{
		"finish twice":   {core.ErrFinished, wire.TypeFinish, &wire.Finish{Request: "r"}},
		"store after":    {core.ErrFinished, wire.TypeReserve, &wire.Reserve{Request: "r", Keys: keys}},
		"never was":      {core.ErrNoRequest, wire.TypePin, &wire.Keys{Request: "x"}},
		"more than room": {core.ErrNoRequest, wire.TypeCommit, &wire.Commit{Request: "x"}},
	} {
		if err := c.call(c2.t, c2.m, &wire.Empty{}); !errors.Is(err, c2.err) {
			t.Errorf("%s: %v, want %v", name, err, c2.err)
		}
	}
	var reset wire.ResetReply
	c.ok(wire.TypeReset, &wire.Reset{WaitMS: 10}, &reset)
	var status wire.StatusReply
	c.ok(wire.TypeStatus, e, &status)
	if !reset.Done || string(status.JSON) != `{"state":"ready"}` {
		t.Errorf("reset %v, status %s", reset.Done, status.JSON)
	}
	c.ok(wire.TypeNewRequest, &wire.NewRequest{Request: "r"}, e) // the id of a finished one
	if err := c.call(wire.TypeNewRequest, &wire.NewRequest{Request: "r"}, e); !errors.Is(err, core.ErrConflict) {
		t.Errorf("an id in use: %v", err)
	}
	if len(lookups) != 1 {
		t.Errorf("%d lookups observed, want 1", len(lookups))
	}
	st := f.Stats()
	if st.Sessions != 1 || st.Ungreeted != 0 || st.Calls["lookup"] != 1 || st.Calls["unpin"] != 2 || st.Errors["finished"] != 2 || st.Errors["no_room"] != 0 {
		t.Errorf("stats %+v", st)
	}
	c.ok(wire.TypeGoodbye, e, e)
	c.eof()
	f.ended(t)
	until(t, "no session in the stats", func() bool { return f.Stats().Sessions == 0 })
}

// TestRefusedCalls: what is wrong with a call, but not with its frame, is
// answered, and the session goes on.
func TestRefusedCalls(t *testing.T) {
	f := start(t, engine.Options{RequestsMax: 3})
	c, _ := f.greet(t)
	e := wire.Empty{}
	c.ok(wire.TypeNewRequest, &wire.NewRequest{Request: "r"}, e)
	wrong, err := block.NewKey(make([]byte, 32), 1)
	if err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string]struct {
		t   wire.Type
		m   wire.Message
		err error
	}{
		"second hello":         {wire.TypeHello, hello(), core.ErrInvalid},
		"attach":               {wire.TypeAttach, &wire.Attach{Versions: wire.Versions{Min: 1, Max: 1}}, core.ErrInvalid},
		"unknown call":         {99, e, wire.ErrUnsupported},
		"long id":              {wire.TypeFinish, &wire.Finish{Request: strings.Repeat("x", 257)}, core.ErrInvalid},
		"no id":                {wire.TypeFinish, &wire.Finish{}, core.ErrInvalid},
		"too many keys":        {wire.TypeReserve, &wire.Reserve{Request: "r", Keys: enginetest.Keys(0, 257)}, core.ErrInvalid},
		"group of a lookup":    {wire.TypeLookup, &wire.Lookup{Request: "r", Keys: [][]block.Key{{wrong}}}, core.ErrInvalid},
		"groups of a lookup":   {wire.TypeLookup, &wire.Lookup{Request: "r", Keys: [][]block.Key{nil, nil}}, core.ErrInvalid},
		"group of a reserve":   {wire.TypeReserve, &wire.Reserve{Request: "r", Group: 1, Keys: []block.Key{wrong}}, core.ErrInvalid},
		"another group's keys": {wire.TypeReserve, &wire.Reserve{Request: "r", Group: 1, Keys: enginetest.Keys(0, 1)}, core.ErrInvalid},
		"group of a pin":       {wire.TypePin, &wire.Keys{Request: "r", Keys: []block.Key{wrong}}, core.ErrInvalid},
		"group of a touch":     {wire.TypeTouch, &wire.Keys{Request: "r", Keys: []block.Key{wrong}}, core.ErrInvalid},
		"long wait":            {wire.TypeReset, &wire.Reset{WaitMS: wire.WaitMSMax + 1}, core.ErrInvalid},
	} {
		if err := c.call(b.t, b.m, e); !errors.Is(err, b.err) {
			t.Errorf("%s: %v, want %v", name, err, b.err)
		}
	}
	// Requests are bounded, and finishing one makes room.
	c.ok(wire.TypeNewRequest, &wire.NewRequest{Request: "r2"}, e)
	c.ok(wire.TypeNewRequest, &wire.NewRequest{Request: "r3"}, e)
	if err := c.call(wire.TypeNewRequest, &wire.NewRequest{Request: "r4"}, e); !errors.Is(err, core.ErrTooMany) {
		t.Errorf("a fourth request: %v", err)
	}
	c.ok(wire.TypeFinish, &wire.Finish{Request: "r2"}, e)
	c.ok(wire.TypeNewRequest, &wire.NewRequest{Request: "r4"}, e)
	if _, closed := f.b.Sessions(); len(closed) != 0 {
		t.Errorf("sessions %v have ended", closed)
	}
}

// TestMalformed: what no client sends ends the session, with an error frame,
// and the node serves on.
func TestMalformed(t *testing.T) {
	f := start(t, engine.Options{})
	other, _ := f.greet(t)
	frame := func(typ wire.Type, body ...byte) []byte {
		b := []byte{0, 0, 0, byte(5 + len(body)), byte(typ), 0, 0, 0, 9}
		return append(b, body...)
	}
	for name, b := range map[string][]byte{
		"a GiB":           {0x40, 0, 0, 0, byte(wire.TypePing), 0, 0, 0, 9},
		"no room for id":  {0, 0, 0, 4, byte(wire.TypePing), 0, 0, 0},
		"body is no list": frame(wire.TypePing, 0xc0),
		"no body":         frame(wire.TypeFinish),
		"field missing":   frame(wire.TypeFinish, 0x90),
		"not a string":    frame(wire.TypeFinish, 0x91, 0x01),
		"half a key":      frame(wire.TypePin, 0x92, 0xa1, 'r', 0xc4, 1, 0),
		"field cut":       frame(wire.TypePin, 0x92, 0xa1, 'r', 0xc6, 0xff, 0xff, 0xff, 0xff),
		"deep nesting":    frame(wire.TypeNewRequest, append([]byte{0x96, 0xa1, 'r'}, slices.Repeat([]byte{0x91}, 100)...)...),
		"a reply":         frame(wire.TypePing|wire.ReplyBit, 0x90),
		"an error":        wire.AppendFrame(nil, wire.TypeError, 1, &wire.Error{Code: 1}),
	} {
		t.Run(name, func(t *testing.T) {
			c, _ := f.greet(t)
			c.write(b)
			fr := c.read()
			var e wire.Error
			if err := e.Decode(fr.Body); err != nil || fr.Type != wire.TypeError || e.Code != wire.CodeMalformed {
				t.Errorf("%v: %+v, %v", fr.Type, e, err)
			}
			c.eof()
			f.ended(t)
		})
	}
	other.ok(wire.TypePing, wire.Empty{}, wire.Empty{})
	// A session's last line is written after its connection has ended.
	told := func() bool {
		log := f.log.String()
		return strings.Contains(log, fmt.Sprintf("pid=%d", os.Getpid())) && strings.Contains(log, "multiple of 36")
	}
	for end := time.Now().Add(5 * time.Second); !told(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("the log does not tell:\n%s", f.log.String())
		}
	}
}

// TestGreeting: what can go wrong before there is a session.
func TestGreeting(t *testing.T) {
	fp := block.Fingerprint{1}
	f := start(t, engine.Options{}, func(b *enginetest.Backend) {
		b.Open = func(_ context.Context, h engine.Hello) error {
			if h.Engine == "unlucky" {
				return errors.New("the disk is gone")
			}
			if h.PID != os.Getpid() || h.UID != os.Geteuid() {
				return fmt.Errorf("pid %d uid %d", h.PID, h.UID)
			}
			return nil
		}
	})
	named := hello()
	named.Name = "chat"
	c := f.dial(t)
	c.ok(wire.TypeHello, named, &wire.HelloReply{})

	change := func(change func(h *wire.Hello)) *wire.Hello {
		h := hello()
		change(h)
		return h
	}
	for name, b := range map[string]struct {
		bytes []byte
		err   error
		text  string
	}{
		"a call":       {wire.AppendFrame(nil, wire.TypePing, 1, wire.Empty{}), wire.ErrMalformed, "ping before hello"},
		"http":         {[]byte("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), wire.ErrMalformed, "frame of 1195725856 bytes"},
		"long hello":   {wire.AppendFrame(nil, wire.TypeHello, 1, change(func(h *wire.Hello) { h.Spec.Model = strings.Repeat("x", wire.GreetFrameMax) })), wire.ErrMalformed, "frame of"},
		"wrong magic":  {[]byte{0, 0, 0, 16, 1, 0, 0, 0, 1, 0x93, 0xa7, 'T', 'E', 'R', 'R', 'A', 'F', 'X', 1, 1}, wire.ErrMalformed, "TERRACE"},
		"new version":  {wire.AppendFrame(nil, wire.TypeHello, 1, change(func(h *wire.Hello) { h.Versions = wire.Versions{Min: 2, Max: 3} })), wire.ErrVersion, "2 to 3, node 1 to 1"},
		"no model":     {wire.AppendFrame(nil, wire.TypeHello, 1, change(func(h *wire.Hello) { h.Spec.Model = "" })), core.ErrInvalid, "model is empty"},
		"no groups":    {wire.AppendFrame(nil, wire.TypeHello, 1, change(func(h *wire.Hello) { h.Spec.Groups = nil })), core.ErrInvalid, "groups has 0"},
		"another name": {wire.AppendFrame(nil, wire.TypeHello, 1, change(func(h *wire.Hello) { h.Name, h.Spec.DType = "chat", "float8" })), tier.ErrNamespaceMismatch, "dtype"},
		"expectation":  {wire.AppendFrame(nil, wire.TypeHello, 1, change(func(h *wire.Hello) { h.Expect = &fp })), tier.ErrNamespaceMismatch, "0100000000"},
		"failure":      {wire.AppendFrame(nil, wire.TypeHello, 1, change(func(h *wire.Hello) { h.Engine = "unlucky" })), wire.ErrInternal, "the disk is gone"},
		"no token":     {wire.AppendFrame(nil, wire.TypeAttach, 1, &wire.Attach{Versions: wire.Versions{Min: 1, Max: 1}}), wire.ErrForbidden, "token"},
		"old attach":   {wire.AppendFrame(nil, wire.TypeAttach, 1, &wire.Attach{}), wire.ErrVersion, "0 to 0"},
	} {
		c := f.dial(t)
		c.write(b.bytes)
		fr := c.read()
		var e wire.Error
		if err := e.Decode(fr.Body); err != nil || fr.Type != wire.TypeError || !errors.Is(&e, b.err) || !strings.Contains(e.Error(), b.text) {
			t.Errorf("%s: %v: %v: %v, want %v with %q", name, fr.Type, &e, err, b.err, b.text)
		}
		c.eof()
	}
	if open, closed := f.b.Sessions(); open != 1 || len(closed) != 0 {
		t.Errorf("%d sessions open, %v closed", open, closed)
	}
}

// TestCut ends a connection after every byte of a dialogue.
func TestCut(t *testing.T) {
	f := start(t, engine.Options{})
	stream := wire.AppendFrame(nil, wire.TypeHello, 1, hello())
	greeted := len(stream)
	stream = wire.AppendFrame(stream, wire.TypeNewRequest, 2, &wire.NewRequest{Request: "r"})
	stream = wire.AppendFrame(stream, wire.TypeReserve, 3, &wire.Reserve{Request: "r", Keys: enginetest.Keys(0, 1)})
	for i := 0; i <= len(stream); i += 1 + i%7 {
		c := f.dial(t)
		c.write(stream[:i])
		if i < greeted {
			c.c.Close()
			continue
		}
		c.read() // the session is there
		c.c.Close()
		f.ended(t)
	}
	until(t, "nobody is connected", func() bool { st := f.Stats(); return st.Sessions == 0 && st.Ungreeted == 0 })
	if pins, filling := f.b.Pins(); pins != 0 || filling != 0 {
		t.Errorf("%d pins and %d reservations are left", pins, filling)
	}
}

// TestFlood pipelines calls without reading, then reads: every one is answered,
// in order.
func TestFlood(t *testing.T) {
	f := start(t, engine.Options{})
	c, _ := f.greet(t)
	c.ok(wire.TypeNewRequest, &wire.NewRequest{Request: "r"}, wire.Empty{})
	const n = 3000
	first := c.next + 1
	var wg sync.WaitGroup
	wg.Go(func() {
		var b []byte
		for i := range uint32(n) {
			b = wire.AppendFrame(b[:0], wire.TypeLookup, first+i, &wire.Lookup{Request: "r", Keys: [][]block.Key{enginetest.Keys(0, int(i%50))}})
			c.write(b)
		}
	})
	for i := range uint32(n) {
		fr := c.read()
		var a wire.LookupReply
		if err := a.Decode(fr.Body); err != nil || fr.Call != first+i || len(a.Groups[0].Verdicts) != int(i%50) {
			t.Fatalf("reply %d: call %d, %v", i, fr.Call, err)
		}
	}
	wg.Wait()
}

// TestSlowReader: a client that does not read holds up nobody else, and loses
// its session.
func TestSlowReader(t *testing.T) {
	f := start(t, engine.Options{WriteTimeout: 100 * time.Millisecond})
	slow, _ := f.greet(t)
	other, _ := f.greet(t)
	var wg sync.WaitGroup
	wg.Go(func() {
		b := slices.Repeat(wire.AppendFrame(nil, wire.TypeStatus, 1, wire.Empty{}), 1000)
		for {
			if _, err := slow.c.Write(b); err != nil {
				return
			}
		}
	})
	for ended := false; !ended; {
		select {
		case <-f.b.Changed():
			ended = true
		default:
			other.ok(wire.TypePing, wire.Empty{}, wire.Empty{})
		}
	}
	wg.Wait()
	other.ok(wire.TypePing, wire.Empty{}, wire.Empty{})
	until(t, "the log tells", func() bool { return strings.Contains(f.log.String(), "slow reader") })
}

// TestSlowReaderLater: answers that come later and are not read hold up neither
// the node's callbacks nor, beyond WriteTimeout, anything else.
func TestSlowReaderLater(t *testing.T) {
	f := start(t, engine.Options{WriteTimeout: patience / 2}, func(b *enginetest.Backend) { b.Hold = true })
	c, _ := f.greet(t)
	c.ok(wire.TypeNewRequest, &wire.NewRequest{Request: "r"}, wire.Empty{})
	const n = 500
	for range n {
		c.send(wire.TypeLookup, &wire.Lookup{Request: "r", WaitMS: 1000, Keys: [][]block.Key{enginetest.Keys(0, 2000)}})
	}
	until(t, "all wait", func() bool { return f.b.Held() == n })
	began := time.Now()
	if got := f.b.Release(); got != n { // 500 × 2000 verdicts: more than any socket takes
		t.Errorf("%d were held", got)
	}
	if d := time.Since(began); d > patience/4 {
		t.Errorf("callbacks took %v", d)
	}
	c.c.Close()
	f.ended(t)
}

// TestWaiting: a call that waits holds back no other, is answered by its id,
// and counts against bounds until then.
func TestWaiting(t *testing.T) {
	f := start(t, engine.Options{WaitsMax: 3, WaitKeysMax: 100}, func(b *enginetest.Backend) { b.Hold = true })
	c, _ := f.greet(t)
	e := wire.Empty{}
	c.ok(wire.TypeNewRequest, &wire.NewRequest{Request: "r"}, e)
	lookup := func(n int) *wire.Lookup {
		return &wire.Lookup{Request: "r", WaitMS: 1000, Keys: [][]block.Key{enginetest.Keys(0, n)}}
	}
	for round := range 3 {
		first := c.send(wire.TypeLookup, lookup(60))
		if err := c.call(wire.TypeLookup, lookup(41), e); !errors.Is(err, core.ErrTooMany) {
			t.Fatalf("more keys than may wait: %v", err)
		}
		second := c.send(wire.TypeFlush, &wire.Flush{Request: "r", WaitMS: 1000})
		third := c.send(wire.TypeReset, &wire.Reset{WaitMS: 1000})
		if err := c.call(wire.TypeFlush, &wire.Flush{Request: "r"}, e); !errors.Is(err, core.ErrTooMany) {
			t.Fatalf("a fourth wait: %v", err)
		}
		c.ok(wire.TypeLookup, &wire.Lookup{Request: "r", Keys: [][]block.Key{enginetest.Keys(0, 5)}}, &wire.LookupReply{})
		if got := f.b.Release(); got != 3 {
			t.Fatalf("round %d: %d calls were held", round, got)
		}
		for _, want := range []struct {
			id uint32
			t  wire.Type
			m  wire.Message
		}{{first, wire.TypeLookup, &wire.LookupReply{}}, {second, wire.TypeFlush, &wire.FlushReply{}}, {third, wire.TypeReset, &wire.ResetReply{}}} {
			if err := c.reply(want.id, want.t, want.m); err != nil {
				t.Fatal(err)
			}
		}
	}
	f.b.Void = true
	id := c.send(wire.TypeLookup, lookup(10))
	until(t, "it waits", func() bool { return f.b.Held() == 1 })
	f.b.Release()
	if err := c.reply(id, wire.TypeLookup, e); !errors.Is(err, wire.ErrOvertaken) {
		t.Fatalf("an overtaken lookup: %v", err)
	}
	// A refused one gives its place back at once.
	for range 5 {
		if err := c.call(wire.TypeFlush, &wire.Flush{Request: "none"}, e); !errors.Is(err, core.ErrNoRequest) {
			t.Fatalf("flush of no request: %v", err)
		}
		none := lookup(60)
		none.Request = "none"
		if err := c.call(wire.TypeLookup, none, e); !errors.Is(err, core.ErrNoRequest) {
			t.Fatalf("lookup of no request: %v", err)
		}
	}
	// An answer after the end goes nowhere.
	c.send(wire.TypeLookup, lookup(10))
	until(t, "it waits", func() bool { return f.b.Held() == 1 })
	c.c.Close()
	f.ended(t)
	f.b.Release()
}

// TestBounds on connections.
func TestBounds(t *testing.T) {
	f := start(t, engine.Options{SessionsMax: 2, UngreetedMax: 2, WorkersMax: 1, GreetTimeout: 300 * time.Millisecond})
	a, ha := f.greet(t)
	f.greet(t)
	refused := func(c *raw, err, want error) {
		t.Helper()
		if !errors.Is(err, want) {
			t.Errorf("%v, want %v", err, want)
		}
		c.eof()
	}
	c := f.dial(t)
	refused(c, c.call(wire.TypeHello, hello(), wire.Empty{}), core.ErrTooMany)

	attach := &wire.Attach{Versions: wire.Versions{Min: 1, Max: 1}, Token: ha.Token}
	w := f.dial(t)
	w.ok(wire.TypeAttach, attach, &wire.AttachReply{})
	c = f.dial(t)
	refused(c, c.call(wire.TypeAttach, attach, wire.Empty{}), core.ErrTooMany)
	if st := f.Stats(); st.Sessions != 2 || st.Workers != 1 {
		t.Errorf("stats %+v", st)
	}

	// Two who say nothing keep a third away, for as long as they may.
	began := time.Now()
	c1, c2 := f.dial(t), f.dial(t)
	until(t, "two have not greeted", func() bool { return f.Stats().Ungreeted == 2 })
	c3 := f.dial(t)
	fr := c3.read()
	var e wire.Error
	if err := e.Decode(fr.Body); err != nil || e.Code != wire.CodeTooMany {
		t.Errorf("a third: %v, %v", &e, err)
	}
	c3.eof()
	c1.write([]byte{0, 0}) // half a length is no greeting
	c1.eof()
	c2.eof()
	if d := time.Since(began); d < 200*time.Millisecond {
		t.Errorf("they were ended after %v", d)
	}
	until(t, "they are forgotten", func() bool { return f.Stats().Ungreeted == 0 })

	// Room comes back.
	a.c.Close()
	f.ended(t)
	until(t, "one session is left", func() bool { return f.Stats().Sessions == 1 })
	f.greet(t)
}

// TestAttach: a worker has the region for as long as the session lasts, and its
// end is nothing to the session.
func TestAttach(t *testing.T) {
	f := start(t, engine.Options{})
	c, h := f.greet(t)
	c.ok(wire.TypeNewRequest, &wire.NewRequest{Request: "r"}, wire.Empty{})
	attach := func(token wire.Token) (*raw, *arena.Mapping) {
		w := f.dial(t)
		w.send(wire.TypeAttach, &wire.Attach{Versions: wire.Versions{Min: 1, Max: 1}, Token: token})
		b := make([]byte, 4096)
		n, file, err := arena.RecvFD(w.c, b)
		if err != nil || file == nil {
			t.Fatalf("%d bytes, %v, %v", n, file, err)
		}
		var reply wire.AttachReply
		if err := reply.Decode(b[wire.HeaderSize:n]); err != nil {
			t.Fatal(err)
		}
		if reply.Epoch != h.Epoch || reply.Session != h.Session || !slices.Equal(reply.Groups, h.Groups) {
			t.Errorf("attach answers %+v, hello %+v", reply, h)
		}
		m, err := arena.Map(file, int64(reply.RegionBytes))
		if err != nil {
			t.Fatal(err)
		}
		file.Close()
		return w, m
	}
	w1, m1 := attach(h.Token)
	w2, m2 := attach(h.Token)
	b1, _ := m1.Bytes(4096, 8)
	b2, _ := m2.Bytes(4096, 8)
	copy(b1, "shared")
	if string(b2[:6]) != "shared" {
		t.Errorf("%q", b2)
	}
	w1.ok(wire.TypePing, wire.Empty{}, wire.Empty{})
	if err := w1.call(wire.TypeFinish, &wire.Finish{Request: "r"}, wire.Empty{}); !errors.Is(err, wire.ErrUnsupported) {
		t.Errorf("a call on an attached connection: %v", err)
	}
	// The raw client lets the descriptor of its own hello go; two are held.
	until(t, "two processes can write", func() bool { return f.b.Attached() == 2 })
	m1.Close()
	w1.ok(wire.TypeGoodbye, wire.Empty{}, wire.Empty{})
	w1.eof()
	until(t, "one worker is left", func() bool { return f.Stats().Workers == 1 && f.b.Attached() == 1 })
	c.ok(wire.TypeFinish, &wire.Finish{Request: "r"}, wire.Empty{})

	c.c.Close()
	f.ended(t)
	w2.eof() // this is how it learns
	if f.b.Attached() != 1 {
		t.Error("a mapped region counts as quiet")
	}
	m2.Close()
	until(t, "no attach is left", func() bool { return f.b.Attached() == 0 })
	late := f.dial(t)
	if err := late.call(wire.TypeAttach, &wire.Attach{Versions: wire.Versions{Min: 1, Max: 1}, Token: h.Token}, wire.Empty{}); !errors.Is(err, wire.ErrForbidden) {
		t.Errorf("the token of a dead session: %v", err)
	}
}

// TestKilled: nothing outlives an engine that is killed.
func TestKilled(t *testing.T) {
	f := start(t, engine.Options{})
	cmd := child(t, "engine", f.path)
	until(t, "it is attached", func() bool { return f.b.Attached() == 1 })
	kill(t, cmd)
	f.ended(t)
	until(t, "its region is quiet", func() bool { return f.b.Attached() == 0 })
	if pins, filling := f.b.Pins(); pins != 0 || filling != 0 {
		t.Errorf("%d pins and %d reservations are left", pins, filling)
	}
}

// TestClose ends sessions in every state: greeting, idle, waiting, flooding.
func TestClose(t *testing.T) {
	opening := make(chan struct{})
	f := start(t, engine.Options{}, func(b *enginetest.Backend) {
		b.Hold = true
		b.Open = func(ctx context.Context, h engine.Hello) error {
			if h.Engine != "slow" {
				return nil
			}
			close(opening)
			<-ctx.Done()
			return ctx.Err()
		}
	})
	f.dial(t)
	f.greet(t)
	c, h := f.greet(t)
	c.ok(wire.TypeNewRequest, &wire.NewRequest{Request: "r"}, wire.Empty{})
	c.send(wire.TypeFlush, &wire.Flush{Request: "r", WaitMS: 1000})
	until(t, "it waits", func() bool { return f.b.Held() == 1 })
	w := f.dial(t)
	w.ok(wire.TypeAttach, &wire.Attach{Versions: wire.Versions{Min: 1, Max: 1}, Token: h.Token}, &wire.AttachReply{})
	slow := hello()
	slow.Engine = "slow"
	f.dial(t).send(wire.TypeHello, slow)
	<-opening
	flood, _ := f.greet(t)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			if _, err := flood.c.Write(slices.Repeat(wire.AppendFrame(nil, wire.TypePing, 1, wire.Empty{}), 100)); err != nil {
				return
			}
		}
	})
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	wg.Wait()
	if open, closed := f.b.Sessions(); open != 0 || len(closed) != 3 {
		t.Errorf("%d sessions open, %v closed", open, closed)
	}
	for range len(f.b.Changed()) {
		<-f.b.Changed()
	}
	f.b.Release()
	if _, err := os.Lstat(f.path); err == nil {
		t.Error("the socket is left")
	}
	if err := f.Close(); err != nil {
		t.Errorf("a second Close: %v", err)
	}
}

// TestStopAccepting is the first step of a drain.
func TestStopAccepting(t *testing.T) {
	f := start(t, engine.Options{})
	c, _ := f.greet(t)
	if err := f.StopAccepting(); err != nil {
		t.Fatal(err)
	}
	c.ok(wire.TypePing, wire.Empty{}, wire.Empty{})
	if _, err := net.Dial("unix", f.path); err == nil {
		t.Error("somebody new got in")
	}
	if _, err := engine.Listen(f.path, ""); !errors.Is(err, engine.ErrSocketInUse) {
		t.Errorf("the path was given up: %v", err)
	}
}

// TestGarbage throws random bytes and mutated dialogues at the server.
func TestGarbage(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	t.Logf("seed %d", seed)
	f := start(t, engine.Options{GreetTimeout: 20 * time.Millisecond})
	stream := wire.AppendFrame(nil, wire.TypeHello, 1, hello())
	greeting := len(stream)
	stream = wire.AppendFrame(stream, wire.TypeNewRequest, 2, &wire.NewRequest{Request: "r"})
	stream = wire.AppendFrame(stream, wire.TypeReserve, 3, &wire.Reserve{Request: "r", Keys: enginetest.Keys(0, 3)})
	stream = wire.AppendFrame(stream, wire.TypeLookup, 4, &wire.Lookup{Request: "r", WaitMS: 5, Keys: [][]block.Key{enginetest.Keys(0, 3)}})
	stream = wire.AppendFrame(stream, wire.TypeCommit, 5, &wire.Commit{Request: "r", Fills: []core.Fill{{Slot: 1, Gen: 1}}})
	stream = wire.AppendFrame(stream, wire.TypeFlush, 6, &wire.Flush{Request: "r"})
	for range 150 {
		b := slices.Clone(stream)
		for range 1 + r.IntN(6) {
			if r.IntN(4) == 0 {
				b[r.IntN(len(b))] = byte(r.Uint32())
			} else {
				b[greeting+r.IntN(len(b)-greeting)] = byte(r.Uint32())
			}
		}
		if r.IntN(10) == 0 {
			for i := range b {
				b[i] = byte(r.Uint32())
			}
		}
		c := f.dial(t)
		c.write(b[:1+r.IntN(len(b))])
		if r.IntN(2) == 0 {
			c.c.CloseWrite()
			for {
				if _, err := c.r.Read(); err != nil {
					break
				}
			}
		}
		c.c.Close()
	}
	until(t, "nobody is connected", func() bool { st := f.Stats(); return st.Sessions == 0 && st.Ungreeted == 0 })
	if pins, filling := f.b.Pins(); pins != 0 || filling != 0 {
		t.Errorf("seed %d: %d pins and %d reservations are left", seed, pins, filling)
	}
	c, _ := f.greet(t)
	c.ok(wire.TypePing, wire.Empty{}, wire.Empty{})
}
