package sessions

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"time"

	"github.com/minio/crc64nvme"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/arena"
	"github.com/terrace-kv/terrace/internal/content"
	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/internal/wire"
)

// patience is for what should happen at once.
const patience = 45 * time.Second

const (
	small = 4096    // bytes of a block
	big   = 4 << 20 // the same, where its checksum is to take a while
)

func spec(blockBytes uint64) block.Spec {
	return block.Spec{Model: "sessions", DType: "bytes", Layout: "content", HashAlgorithm: "sha256", HashLength: block.HashSize,
		Groups: []block.Group{{Kind: block.KindFull, TokensPerBlock: 16, BlockBytes: blockBytes}}}
}

func keys(lo, hi int) (out []block.Key) {
	for i := lo; i < hi; i++ {
		var h [block.HashSize]byte
		binary.BigEndian.PutUint64(h[:], uint64(i))
		k, err := block.NewKey(h[:], 0)
		if err != nil {
			panic(err)
		}
		out = append(out, k)
	}
	return out
}

// What is where before the victim comes: the other engine has stored it.
var (
	seeds = keys(0, 2) // in the primary and in the tier
	below = keys(2, 4) // in the tier only
	// theirs is in the primary, and pinned by the other engine alone.
	theirs = keys(4, 5)
)

// Keys of the victim's own begin here, the other engine's at 10000.
const (
	first      = 100
	firstOther = 10000
)

// victim is an engine that writes frames as it likes. It is used by one
// goroutine, which may be another process's.
type victim struct {
	c     *net.UnixConn
	r     *wire.Reader
	file  *os.File // of the region
	mem   *arena.Mapping
	block uint64
	token wire.Token
	call  uint32
	other map[uint32]wire.Frame // answers to calls that were not waited for
	over  bool                  // the connection has ended

	waiting uint32 // a call that is answered when the tier's calls return; 0 is none

	next    int         // of its keys
	fills   []core.Fill // reserved, and neither committed nor aborted
	leases  []core.Lease
	spoiled int // of fills: a reset has dropped them
	worker  *victim

	said []string
}

func dial(path string, blockBytes uint64) (*victim, error) {
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	v := &victim{c: c, block: blockBytes, other: map[uint32]wire.Frame{}, next: first}
	v.r = wire.NewReader(v)
	v.r.Max = wire.FrameMax
	return v, c.SetDeadline(time.Now().Add(patience))
}

// Read keeps the descriptor that comes with the greeting.
func (v *victim) Read(b []byte) (int, error) {
	n, f, err := arena.RecvFD(v.c, b)
	if f != nil {
		v.file = f
	}
	return n, err
}

// close ends the process's part: connection and region.
func (v *victim) close() {
	v.c.Close()
	if v.mem != nil {
		v.mem.Close()
	}
	if v.file != nil {
		v.file.Close()
	}
	if v.worker != nil {
		v.worker.close()
	}
}

func (v *victim) say(words ...string) { v.said = append(v.said, words...) }

// do makes a call and says how it was answered: "ok", the name of an error, or
// "end" when there was no answer. After an end it does nothing.
func (v *victim) do(t wire.Type, m, reply wire.Message) string {
	if v.over {
		return ""
	}
	return v.wait(v.send(t, m), reply)
}

func (v *victim) send(t wire.Type, m wire.Message) uint32 {
	v.call++
	_, _ = v.c.Write(wire.AppendFrame(nil, t, v.call, m)) // an error shows in the answer
	return v.call
}

func (v *victim) wait(call uint32, reply wire.Message) string {
	f, ok := v.other[call]
	for !ok {
		var err error
		if f, err = v.r.Read(); err != nil {
			v.over = true
			if errors.Is(err, os.ErrDeadlineExceeded) {
				return "silence"
			}
			return "end"
		}
		if ok = f.Call == call; !ok {
			f.Body = bytes.Clone(f.Body)
			v.other[f.Call] = f
		}
	}
	m := reply
	var e wire.Error
	if f.Type == wire.TypeError {
		m = &e
	}
	if err := m.Decode(f.Body); err != nil {
		return "unreadable: " + err.Error()
	}
	switch {
	case m != wire.Message(&e):
		return "ok"
	case e.Code.Ends():
		return e.Code.String() + " " + v.end()
	}
	return e.Code.String()
}

// end reads until the connection ends, and says the errors that it meets.
func (v *victim) end() string {
	v.over = true
	said := ""
	for {
		f, err := v.r.Read()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return said + "silence"
		}
		if err != nil {
			return said + "end" // a reset too: the node did not read all that was written
		}
		var e wire.Error
		if f.Type == wire.TypeError && e.Decode(f.Body) == nil {
			said += e.Code.String() + " "
		}
	}
}

// anything is the body of a reply that nobody reads.
type anything struct{}

func (anything) Append(b []byte) []byte { return b }
func (anything) Decode([]byte) error    { return nil }

// Calls that say what they were answered.

func (v *victim) greet() string {
	var reply wire.HelloReply
	s := v.do(wire.TypeHello, &wire.Hello{Versions: wire.Versions{Min: 1, Max: 1}, Engine: "victim", Spec: spec(v.block)}, &reply)
	if s == "ok" {
		v.token = reply.Token
		var err error
		if v.mem, err = arena.Map(v.file, int64(reply.RegionBytes)); err != nil {
			return err.Error()
		}
	}
	return s
}

func (v *victim) request(id string, p core.Params) string {
	return v.do(wire.TypeNewRequest, &wire.NewRequest{Request: id, Params: p}, wire.Empty{})
}

func (v *victim) finish(id string) string {
	return v.do(wire.TypeFinish, &wire.Finish{Request: id}, wire.Empty{})
}

var statusNames = map[core.FillStatus]string{core.FillOK: "ok", core.FillStale: "stale", core.FillDropped: "dropped"}

func (v *victim) statuses(t wire.Type, m wire.Message) string {
	var reply wire.FillReply
	if s := v.do(t, m, &reply); s != "ok" {
		return s
	}
	var out []string
	for _, st := range reply.Statuses {
		out = append(out, statusNames[st])
	}
	return list(out)
}

func list(words []string) string {
	if len(words) == 0 {
		return "none"
	}
	return strings.Join(words, ",")
}

func (v *victim) commit(fills []core.Fill) string {
	return v.statuses(wire.TypeCommit, &wire.Commit{Request: "r", Fills: fills})
}

func (v *victim) abort(fills []core.Fill) string {
	return v.statuses(wire.TypeAbort, &wire.Abort{Request: "r", Fills: fills})
}

func (v *victim) unpin(leases []core.Lease) string {
	return v.statuses(wire.TypeUnpin, &wire.Unpin{Request: "r", Leases: leases})
}

var grantNames = map[core.GrantStatus]string{core.Granted: "granted", core.GrantPresent: "present", core.GrantFilling: "filling", core.GrantCapped: "capped"}

// reserve takes slots for n new keys.
func (v *victim) reserve(n int) string {
	var reply wire.ReserveReply
	ks := keys(v.next, v.next+n)
	v.next += n
	if s := v.do(wire.TypeReserve, &wire.Reserve{Request: "r", Keys: ks}, &reply); s != "ok" {
		return s
	}
	var out []string
	for i, g := range reply.Grants {
		out = append(out, grantNames[g.Status])
		if g.Status == core.Granted {
			b, err := v.mem.Bytes(g.Slot.Offset(), int64(v.block))
			if err != nil {
				return err.Error()
			}
			f := core.Fill{Slot: g.Slot, Gen: g.Gen}
			if v.block == small { // big ones are to be touched by the node first
				content.Fill(block.Fingerprint{}, ks[i], b)
				f.Sum, f.HasSum = crc64nvme.Checksum(b), true
			}
			v.fills = append(v.fills, f)
		}
	}
	return list(out)
}

// lookup says the verdicts, in groups of reasons.
func (v *victim) lookup(ks []block.Key) string {
	var reply wire.LookupReply
	if s := v.do(wire.TypeLookup, &wire.Lookup{Request: "r", Keys: [][]block.Key{ks}}, &reply); s != "ok" {
		return s
	}
	var out []string
	for _, w := range reply.Groups[0].Verdicts {
		out = append(out, w.String())
	}
	for _, l := range reply.Groups[0].Leases {
		if l.Gen != 0 {
			v.leases = append(v.leases, l)
		}
	}
	return list(out)
}

func (v *victim) pin(ks []block.Key) string {
	var reply wire.PinReply
	if s := v.do(wire.TypePin, &wire.Keys{Request: "r", Keys: ks}, &reply); s != "ok" {
		return s
	}
	var out []string
	for _, l := range reply.Leases {
		if l.Gen == 0 {
			out = append(out, "no")
			continue
		}
		v.leases = append(v.leases, l)
		out = append(out, "pinned")
	}
	return list(out)
}

func (v *victim) reset(wait time.Duration) string {
	var reply wire.ResetReply
	s := v.do(wire.TypeReset, &wire.Reset{WaitMS: uint32(wait.Milliseconds())}, &reply)
	if s == "ok" && !reply.Done {
		return "not_done"
	}
	return s
}

// must is for calls on the way to a state, which have to work.
func must(got, want string) error {
	if got != want {
		return fmt.Errorf("on the way: %q, want %q", got, want)
	}
	return nil
}

// enter brings the victim into a state and, in a process of its own, waits to
// be killed there.
func enterMain(path, name string) {
	err := func() error {
		s := states[stateIndex(name)]
		v, err := dial(path, s.blockBytes())
		if err == nil {
			err = s.enterBy(v)
		}
		return err
	}()
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("ready")
	io.Copy(io.Discard, os.Stdin)
}
