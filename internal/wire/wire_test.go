package wire

import (
	"bytes"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/tier"
	"github.com/tinylib/msgp/msgp"
)

var rewrite = flag.Bool("rewrite", false, "write the golden transcripts and the examples in docs/protocol.md anew")

func newMessage(t Type) Message {
	switch t {
	case TypeHello:
		return new(Hello)
	case TypeHello | ReplyBit:
		return new(HelloReply)
	case TypeAttach:
		return new(Attach)
	case TypeAttach | ReplyBit:
		return new(AttachReply)
	case TypeNewRequest:
		return new(NewRequest)
	case TypeLookup:
		return new(Lookup)
	case TypeLookup | ReplyBit:
		return new(LookupReply)
	case TypeReserve:
		return new(Reserve)
	case TypeReserve | ReplyBit:
		return new(ReserveReply)
	case TypeCommit:
		return new(Commit)
	case TypeAbort:
		return new(Abort)
	case TypeCommit | ReplyBit, TypeAbort | ReplyBit, TypeUnpin | ReplyBit:
		return new(FillReply)
	case TypePin, TypeTouch:
		return new(Keys)
	case TypePin | ReplyBit:
		return new(PinReply)
	case TypeUnpin:
		return new(Unpin)
	case TypeFinish:
		return new(Finish)
	case TypeFlush:
		return new(Flush)
	case TypeFlush | ReplyBit:
		return new(FlushReply)
	case TypeReset:
		return new(Reset)
	case TypeReset | ReplyBit:
		return new(ResetReply)
	case TypeStatus | ReplyBit:
		return new(StatusReply)
	case TypeError:
		return new(Error)
	case TypeStatus, TypePing, TypeGoodbye, TypeNewRequest | ReplyBit, TypeTouch | ReplyBit, TypeFinish | ReplyBit,
		TypePing | ReplyBit, TypeGoodbye | ReplyBit:
		return new(Empty)
	}
	return nil
}

func allTypes() []Type {
	var out []Type
	for t := range 256 {
		if newMessage(Type(t)) != nil {
			out = append(out, Type(t))
		}
	}
	return out
}

// fields names the fields of each body for people; a number splits a binary
// field into its records.
var fields = map[Type]string{
	TypeHello:                 "magic version_min version_max engine name expect namespace[model revision dtype layout groups:17 ranks:4 adapter hash_algorithm hash_length hash_seed salt epoch]",
	TypeHello | ReplyBit:      "version session epoch fingerprint region_bytes groups:16 node token frame_max lookup_keys_max reserve_keys_max fills_max requests_max waits_max",
	TypeAttach:                "magic version_min version_max token",
	TypeAttach | ReplyBit:     "version session epoch fingerprint region_bytes groups:16",
	TypeNewRequest:            "request load_tiers[medium locality] store_tiers[medium locality] max_load_tokens max_offload_tokens remote_decoder kv_request_id peer_role peer_host peer_port peer_request_id",
	TypeNewRequest | ReplyBit: "",
	TypeLookup:                "request peek wait_ms counts:4 keys:36",
	TypeLookup | ReplyBit:     "tokens final groups:12 verdicts:1 leases:24",
	TypeReserve:               "request group first keys:36",
	TypeReserve | ReplyBit:    "grants:17",
	TypeCommit:                "request fills:17",
	TypeCommit | ReplyBit:     "statuses:1",
	TypeAbort:                 "request refs:8",
	TypeAbort | ReplyBit:      "statuses:1",
	TypePin:                   "request keys:36",
	TypePin | ReplyBit:        "leases:24",
	TypeUnpin:                 "request refs:8",
	TypeUnpin | ReplyBit:      "statuses:1",
	TypeTouch:                 "request keys:36",
	TypeFinish:                "request",
	TypeFlush:                 "request wait_ms",
	TypeFlush | ReplyBit:      "done cascaded failed",
	TypeReset:                 "wait_ms",
	TypeReset | ReplyBit:      "done",
	TypeStatus | ReplyBit:     "json",
	TypeError:                 "code name message field",
}

func testKey(n byte, group uint32) block.Key {
	var hash [block.HashSize]byte
	for i := range hash {
		hash[i] = n
	}
	k, err := block.NewKey(hash[:], group)
	if err != nil {
		panic(err)
	}
	return k
}

func ptr[T any](v T) *T { return &v }

// frame is one of a transcript.
type frame struct {
	t Type
	m Message
}

// transcripts are the golden files: a call and its reply each.
func transcripts() map[string]struct {
	about  string
	frames []frame
} {
	spec := block.Spec{Model: "example/model-8b", Revision: ptr("2f1c"), DType: "bfloat16", Layout: "canonical.v1",
		Groups: []block.Group{{Kind: block.KindFull, TokensPerBlock: 16, BlockBytes: 65536},
			{Kind: block.KindWindow, TokensPerBlock: 16, WindowBlocks: 64, BlockBytes: 20000}},
		HashAlgorithm: "sha256", HashLength: 32, HashSeed: ptr("0"), Salt: ptr("")}
	ranked := spec
	ranked.Revision, ranked.HashSeed, ranked.Salt = nil, nil, nil
	ranked.Ranks = &block.Ranks{TensorParallel: 4, PipelineParallel: 1, ContextParallel: 1, Rank: 3}
	ranked.Adapter, ranked.Epoch = ptr("sql-lora"), ptr("7")
	ns, err := block.NewNamespace(spec)
	if err != nil {
		panic(err)
	}
	fp := ns.Fingerprint()
	region := Region{Version: 1, Session: 3, Epoch: "b7e1f4a02c9d4e55-3", Fingerprint: fp, RegionBytes: 1 << 30,
		Groups: []Geometry{{Stride: 65536, BlockBytes: 65536}, {Stride: 20480, BlockBytes: 20000}}}
	token := Token{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
	lease := func(slot core.Slot) core.Lease {
		return core.Lease{Slot: slot, Gen: 5, Sum: 0x0123456789abcdef}
	}
	keys := []block.Key{testKey(0xa1, 0), testKey(0xa2, 0), testKey(0xa3, 0)}
	ok := []core.FillStatus{core.FillOK, core.FillStale}
	return map[string]struct {
		about  string
		frames []frame
	}{
		"hello": {"An engine opens a session. The reply's first byte carries a descriptor of the region.", []frame{
			{TypeHello, &Hello{Versions: Versions{1, 1}, Engine: "engine-0", Name: "chat", Spec: spec}},
			{TypeHello | ReplyBit, &HelloReply{Region: region, Node: "0.1.0", Token: token,
				Limits: Limits{FrameMax: FrameMax, LookupKeysMax: LookupKeysMax, ReserveKeysMax: ReserveKeysMax, FillsMax: FillsMax, RequestsMax: 65536, WaitsMax: 1024}}}}},
		"hello_again": {"An engine of another layout comes back, and expects the fingerprint that it had; the node refuses its name for the namespace.", []frame{
			{TypeHello, &Hello{Versions: Versions{1, 1}, Engine: "engine-0", Name: "chat", Expect: &fp, Spec: ranked}},
			{TypeError, &Error{Code: CodeNamespace, Message: "namespace \"chat\" is another one; differs in: revision, ranks, adapter, hash_seed, salt, epoch", Field: "hello.name"}}}},
		"hello_version": {"A client of the future; the node says which versions each of the two speaks.", []frame{
			{TypeHello, &Hello{Versions: Versions{2, 4}, Spec: spec}},
			{TypeError, &Error{Code: CodeVersion, Message: "client speaks protocol versions 2 to 4, node 1 to 1; upgrade the older of the two", Field: "hello.version"}}}},
		"attach": {"A worker attaches to its engine's session, on a connection of its own. The reply's first byte carries a descriptor that is this worker's alone.", []frame{
			{TypeAttach, &Attach{Versions: Versions{1, 1}, Token: token}},
			{TypeAttach | ReplyBit, &AttachReply{Region: region}}}},
		"new_request": {"A request that loads from local storage only, stores nowhere below the primary, and loads at most 4096 tokens.", []frame{
			{TypeNewRequest, &NewRequest{Request: "req-1", Params: core.Params{LoadTiers: []core.TierFilter{{Medium: "storage", Locality: "local"}},
				StoreTiers: []core.TierFilter{}, MaxLoadTokens: 4096, MaxOffloadTokens: -1}}},
			{TypeNewRequest | ReplyBit, &Empty{}}}},
		"new_request_peer": {"A request that pulls what a node has that it calls by an IPv6 address, and whose blocks a decoder will fetch.", []frame{
			{TypeNewRequest, &NewRequest{Request: "req-1", Params: core.Params{MaxLoadTokens: -1, MaxOffloadTokens: -1, RemoteDecoder: true, KVRequestID: "kv-17",
				Peer: core.PeerProbe, PeerHost: "fd00::7", PeerPort: 7301, PeerRequestID: "kv-16"}}},
			{TypeNewRequest | ReplyBit, &Empty{}}}},
		"new_request_peer_refused": {"One that names a node, at a node that has no peers.", []frame{
			{TypeNewRequest, &NewRequest{Request: "req-1", Params: core.Params{MaxLoadTokens: -1, MaxOffloadTokens: -1,
				Peer: core.PeerAssume, PeerHost: "10.0.0.2", PeerPort: 7301, PeerRequestID: "kv-17"}}},
			{TypeError, &Error{Code: CodeInvalid, Message: "invalid call: kv_transfer_params.remote_prefiller names a peer, but this node has none: set peers.listen"}}}},
		"lookup": {"Three keys of group 0 and one of group 1, to be answered at once. Two blocks are ready, and group 1 has nothing for a prefix of two.", []frame{
			{TypeLookup, &Lookup{Request: "req-1", Keys: [][]block.Key{keys, {testKey(0xa1, 1)}}}},
			{TypeLookup | ReplyBit, &LookupReply{core.Answer{Tokens: 32, Final: true, Groups: []core.GroupAnswer{
				{Verdicts: []core.Verdict{core.Hit, core.Hit, core.MissAbsent}, Leases: []core.Lease{lease(16), lease(32)}},
				{Verdicts: []core.Verdict{core.MissUnusable}}}}}}}},
		"lookup_wait": {"The node may take up to 250 ms to make the verdicts final. One block was still on its way then.", []frame{
			{TypeLookup, &Lookup{Request: "req-1", WaitMS: 250, Keys: [][]block.Key{keys[:2]}}},
			{TypeLookup | ReplyBit, &LookupReply{core.Answer{Tokens: 32, Groups: []core.GroupAnswer{
				{Verdicts: []core.Verdict{core.Hit, core.HitPending}, Leases: []core.Lease{lease(16), {}}}}}}}}},
		"lookup_overtaken": {"While the lookup waited, the request made another one, or ended.", []frame{
			{TypeLookup, &Lookup{Request: "req-1", WaitMS: 250, Keys: [][]block.Key{keys[:1]}}},
			{TypeError, &Error{Code: CodeOvertaken, Message: "lookup was overtaken by another call of its request"}}}},
		"reserve": {"Room for three blocks, the first of which is at index 40 of the request's list for group 0. One is there already, one is somebody else's to fill.", []frame{
			{TypeReserve, &Reserve{Request: "req-1", Group: 0, First: 40, Keys: keys}},
			{TypeReserve | ReplyBit, &ReserveReply{[]core.Grant{{Status: core.Granted, Slot: 48, Gen: 2}, {Status: core.GrantPresent}, {Status: core.GrantFilling}}}}}},
		"reserve_no_room": {"Refused as a whole: nothing has changed.", []frame{
			{TypeReserve, &Reserve{Request: "req-1", Group: 0, First: 0, Keys: keys[:1]}},
			{TypeError, &Error{Code: CodeNoRoom, Message: "no room in the primary"}}}},
		"commit": {"Two blocks become visible: one with its checksum, one without, which the node computes first. The second was not this request's.", []frame{
			{TypeCommit, &Commit{Request: "req-1", Fills: []core.Fill{{Slot: 48, Gen: 2, Sum: 0xfedcba9876543210, HasSum: true}, {Slot: 64, Gen: 1}}}},
			{TypeCommit | ReplyBit, &FillReply{ok}}}},
		"abort": {"Two slots are given back unfilled.", []frame{
			{TypeAbort, &Abort{Request: "req-1", Fills: []core.Fill{{Slot: 48, Gen: 2}, {Slot: 64, Gen: 1}}}},
			{TypeAbort | ReplyBit, &FillReply{ok}}}},
		"pin": {"Two keys, of which one is a Hit.", []frame{
			{TypePin, &Keys{Request: "req-1", Keys: keys[:2]}},
			{TypePin | ReplyBit, &PinReply{[]core.Lease{lease(16), {}}}}}},
		"unpin": {"A lease is given back, and one that is none.", []frame{
			{TypeUnpin, &Unpin{Request: "req-1", Leases: []core.Lease{{Slot: 16, Gen: 5}, {Slot: 96, Gen: 1}}}},
			{TypeUnpin | ReplyBit, &FillReply{ok}}}},
		"touch": {"Recency only. The first key becomes the youngest.", []frame{
			{TypeTouch, &Keys{Request: "req-1", Keys: keys[:1]}},
			{TypeTouch | ReplyBit, &Empty{}}}},
		"finish": {"The request makes no more calls.", []frame{
			{TypeFinish, &Finish{Request: "req-1"}},
			{TypeFinish | ReplyBit, &Empty{}}}},
		"finish_twice": {"What a call is refused with is an error frame.", []frame{
			{TypeFinish, &Finish{Request: "req-1"}},
			{TypeError, &Error{Code: CodeFinished, Message: "request is finished"}}}},
		"flush": {"Answered when nothing of the request's stores is pending, or after two seconds.", []frame{
			{TypeFlush, &Flush{Request: "req-1", WaitMS: 2000}},
			{TypeFlush | ReplyBit, &FlushReply{core.Flushed{Done: true, Cascaded: 300, Failed: 1}}}}},
		"reset": {"All blocks leave the primary. After a second some input or output was still in flight.", []frame{
			{TypeReset, &Reset{WaitMS: 1000}},
			{TypeReset | ReplyBit, &ResetReply{}}}},
		"status": {"The node's account of itself, as JSON.", []frame{
			{TypeStatus, &Empty{}},
			{TypeStatus | ReplyBit, &StatusReply{[]byte(`{"state":"ready"}`)}}}},
		"ping": {"Is anybody there?", []frame{
			{TypePing, &Empty{}},
			{TypePing | ReplyBit, &Empty{}}}},
		"goodbye": {"The session ends; the node closes the connection after its reply.", []frame{
			{TypeGoodbye, &Empty{}},
			{TypeGoodbye | ReplyBit, &Empty{}}}},
		"malformed": {"A pin whose keys are 35 bytes. The error ends the connection.", []frame{
			{TypePin, raw(msgp.AppendBytes(msgp.AppendString(msgp.AppendArrayHeader(nil, 2), "r"), make([]byte, 35)))},
			{TypeError, &Error{Code: CodeMalformed, Message: "35 bytes, not a multiple of 36", Field: "pin_touch.keys"}}}},
	}
}

// raw is a body that no message would encode.
type raw []byte

func (r raw) Append(b []byte) []byte { return append(b, r...) }
func (r raw) Decode(b []byte) error {
	if !bytes.Equal(r, b) {
		return errors.New("differs")
	}
	return nil
}

// TestGolden checks each transcript in both directions.
func TestGolden(t *testing.T) {
	seen := map[Type]bool{}
	names := map[string]bool{}
	for name, tr := range transcripts() {
		names[name+".txt"] = true
		path := filepath.Join("testdata", name+".txt")
		if *rewrite {
			if err := os.WriteFile(path, render(tr.about, tr.frames), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if want := render(tr.about, tr.frames); !bytes.Equal(text, want) {
			t.Errorf("%s: encoding has changed (-rewrite to accept):\n%s\nwant\n%s", path, want, text)
		}
		golden := parse(t, path, text)
		if len(golden) != len(tr.frames) {
			t.Fatalf("%s: %d frames, want %d", path, len(golden), len(tr.frames))
		}
		for i, f := range tr.frames {
			seen[f.t] = true
			r := NewReader(iotest.OneByteReader(bytes.NewReader(golden[i])))
			got, err := r.Read()
			if err != nil || got.Type != f.t || got.Call != 7 {
				t.Fatalf("%s: frame %d: type %v call %d: %v", path, i, got.Type, got.Call, err)
			}
			m := newMessage(f.t)
			err = m.Decode(got.Body)
			if _, bad := f.m.(raw); bad {
				if err == nil || err.Error() != tr.frames[1].m.(*Error).Error() {
					t.Errorf("%s: decoded to error %v", path, err)
				}
				continue
			}
			if err != nil {
				t.Fatalf("%s: frame %d: %v", path, i, err)
			}
			if !equal(m, f.m) {
				t.Errorf("%s: frame %d decodes to\n%+v\nwant\n%+v", path, i, m, f.m)
			}
			if again := AppendFrame(nil, f.t, 7, m); !bytes.Equal(again, golden[i]) {
				t.Errorf("%s: frame %d encodes to\n%x\nwant\n%x", path, i, again, golden[i])
			}
		}
	}
	for _, typ := range allTypes() {
		if !seen[typ] {
			t.Errorf("no transcript has a %v", typ)
		}
	}
	files, err := os.ReadDir("testdata")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if strings.HasSuffix(f.Name(), ".txt") && !names[f.Name()] {
			t.Errorf("testdata/%s belongs to no transcript", f.Name())
		}
	}
}

// equal compares what the messages say: nil and empty lists are the same, but
// for tier filters.
func equal(a, b Message) bool {
	norm := func(m Message) string {
		if l, ok := m.(*Lookup); ok {
			m = &Lookup{Request: l.Request, Peek: l.Peek, WaitMS: l.WaitMS, Keys: l.Keys}
		}
		s := fmt.Sprintf("%+v", m)
		if h, ok := m.(*Hello); ok {
			s = fmt.Sprintf("%v %q %q %v", h.Versions, h.Engine, h.Name, h.Expect)
			if d := block.Diff(h.Spec, h.Spec); d != nil {
				return ""
			}
		}
		if n, ok := m.(*NewRequest); ok {
			s += fmt.Sprint(n.Params.LoadTiers == nil, n.Params.StoreTiers == nil)
		}
		return s
	}
	if ha, ok := a.(*Hello); ok && block.Diff(ha.Spec, b.(*Hello).Spec) != nil {
		return false
	}
	return reflect.TypeOf(a) == reflect.TypeOf(b) && norm(a) == norm(b)
}

// render writes frames as hex with a comment on each field.
func render(about string, frames []frame) []byte {
	var w bytes.Buffer
	fmt.Fprintf(&w, "# %s\n", about)
	for _, f := range frames {
		b := AppendFrame(nil, f.t, 7, f.m)
		from := "client"
		if f.t&ReplyBit != 0 {
			from = "node"
		}
		fmt.Fprintf(&w, "\n%s: %v\n", from, f.t)
		line := func(b []byte, format string, a ...any) {
			fmt.Fprintf(&w, "  %-50s # %s\n", hex.EncodeToString(b), fmt.Sprintf(format, a...))
		}
		line(b[:4], "length %d", be.Uint32(b))
		line(b[4:5], "type %v", f.t)
		line(b[5:9], "call id %d", be.Uint32(b[5:]))
		body := b[9:]
		n, rest, err := msgp.ReadArrayHeaderBytes(body)
		if err != nil {
			panic(err)
		}
		line(body[:len(body)-len(rest)], "array of %d", n)
		names := fields[f.t]
		for range n {
			rest = renderField(line, &names, rest)
		}
		if len(rest) != 0 {
			panic("bytes after the last field")
		}
	}
	return w.Bytes()
}

func renderField(line func([]byte, string, ...any), names *string, b []byte) []byte {
	name, more, _ := strings.Cut(*names, " ")
	inner, nested := "", false
	if i := strings.IndexByte(name, '['); i >= 0 {
		inner, more, _ = strings.Cut((*names)[i+1:], "]")
		name, more, nested = name[:i], strings.TrimPrefix(more, " "), true
	}
	*names = more
	name, size, _ := strings.Cut(name, ":")
	record := 0
	fmt.Sscan(size, &record)

	rest, err := msgp.Skip(b)
	if err != nil {
		panic(err)
	}
	value := b[:len(b)-len(rest)]
	switch typ := msgp.NextType(b); {
	case typ == msgp.NilType:
		line(value, "%s: nil", name)
	case typ == msgp.BinType:
		v, _, _ := msgp.ReadBytesZC(b)
		head := value[:len(value)-len(v)]
		if record == 0 {
			record = max(len(v), 1)
		}
		line(head, "%s: %d bytes", name, len(v))
		for len(v) > 0 {
			n := min(record, len(v))
			line(v[:n], "  %s", describe(name, v[:n]))
			v = v[n:]
		}
	case typ == msgp.ArrayType && nested:
		n, b, _ := msgp.ReadArrayHeaderBytes(b)
		line(value[:len(value)-len(b)+len(rest)], "%s: array of %d", name, n)
		all := inner
		for range n {
			if inner == "" {
				inner = all
			}
			b = renderField(line, &inner, b)
		}
	default:
		v, _, err := msgp.ReadIntfBytes(b)
		if err != nil {
			panic(err)
		}
		if s, ok := v.(string); ok {
			v = fmt.Sprintf("%q", s)
		}
		line(value, "%s: %v", name, v)
	}
	return rest
}

// describe says in words what a record holds.
func describe(field string, r []byte) string {
	if field == "keys" && len(r) != block.KeySize {
		field = ""
	}
	switch field {
	case "keys":
		return fmt.Sprintf("hash %x…, group %d", r[:2], be.Uint32(r[32:]))
	case "counts":
		return fmt.Sprintf("%d keys", be.Uint32(r))
	case "leases":
		return fmt.Sprintf("slot %d, gen %d, offset %d, sum %016x", be.Uint32(r), be.Uint32(r[4:]), be.Uint64(r[8:]), be.Uint64(r[16:]))
	case "grants":
		return fmt.Sprintf("status %d, slot %d, gen %d, offset %d", r[0], be.Uint32(r[1:]), be.Uint32(r[5:]), be.Uint64(r[9:]))
	case "fills":
		return fmt.Sprintf("slot %d, gen %d, has_sum %d, sum %016x", be.Uint32(r), be.Uint32(r[4:]), r[8], be.Uint64(r[9:]))
	case "refs":
		return fmt.Sprintf("slot %d, gen %d", be.Uint32(r), be.Uint32(r[4:]))
	case "verdicts":
		return core.Verdict(r[0]).String()
	case "statuses":
		return map[byte]string{1: "ok", 2: "stale", 3: "dropped"}[r[0]]
	case "ranks":
		return fmt.Sprint(be.Uint32(r))
	case "groups":
		switch len(r) {
		case groupSize:
			return fmt.Sprintf("kind %d (%s), tokens_per_block %d, window_blocks %d, block_bytes %d", r[0], kindName(r[0]), be.Uint32(r[1:]), be.Uint32(r[5:]), be.Uint64(r[9:]))
		case judgedSize:
			return fmt.Sprintf("%d verdicts, first %d, %d leases", be.Uint32(r), be.Uint32(r[4:]), be.Uint32(r[8:]))
		case geometrySize:
			return fmt.Sprintf("stride %d, block_bytes %d", be.Uint64(r), be.Uint64(r[8:]))
		}
	case "json":
		return string(r)
	}
	return fmt.Sprintf("%d bytes", len(r))
}

// parse is what a client in another language does with a transcript.
func parse(t *testing.T, path string, text []byte) [][]byte {
	t.Helper()
	var frames [][]byte
	for i, line := range strings.Split(string(text), "\n") {
		digits, _, _ := strings.Cut(line, "#")
		switch digits = strings.TrimSpace(digits); {
		case strings.HasSuffix(digits, ":") || strings.Contains(digits, ": "):
			frames = append(frames, nil)
		case digits != "":
			b, err := hex.DecodeString(digits)
			if err != nil || len(frames) == 0 {
				t.Fatalf("%s:%d: %q: %v", path, i+1, digits, err)
			}
			frames[len(frames)-1] = append(frames[len(frames)-1], b...)
		}
	}
	return frames
}

// TestDocExamples keeps the examples of docs/protocol.md equal to the golden
// files: each stands between a marker and the end of its fence.
func TestDocExamples(t *testing.T) {
	const path = "../../docs/protocol.md"
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	doc := string(b)
	for name, tr := range transcripts() {
		marker := fmt.Sprintf("<!-- internal/wire/testdata/%s.txt -->\n```text\n", name)
		before, after, found := strings.Cut(doc, marker)
		if !found {
			t.Errorf("%s has no example %q", path, marker)
			continue
		}
		example, after, _ := strings.Cut(after, "```")
		want := string(render(tr.about, tr.frames))
		if example != want {
			if *rewrite {
				doc = before + marker + want + "```" + after
				continue
			}
			t.Errorf("%s: example %s differs from the golden file (-rewrite to take it over)", path, name)
		}
	}
	if *rewrite {
		if err := os.WriteFile(path, []byte(doc), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// randomMessage fills a message of the type with random values inside the
// limits.
func randomMessage(t Type, r *rand.Rand) Message {
	u32 := func() uint32 { return uint32(r.Uint64() >> (32 + r.IntN(32))) }
	u64 := func() uint64 { return r.Uint64() >> r.IntN(64) }
	text := func(least, most int) string {
		b := make([]byte, least+r.IntN(most-least+1))
		for i := range b {
			b[i] = byte(' ' + r.IntN(95))
		}
		return string(b)
	}
	opt := func() *string {
		if r.IntN(2) == 0 {
			return nil
		}
		return ptr(text(0, 40))
	}
	keys := func(n int) []block.Key {
		out := make([]block.Key, n)
		for i := range out {
			for j := range out[i] {
				out[i][j] = byte(r.Uint32())
			}
		}
		return out
	}
	leases := func(n int) []core.Lease {
		out := make([]core.Lease, n)
		for i := range out {
			out[i] = core.Lease{Slot: core.Slot(u32()), Gen: u32(), Sum: u64()}
		}
		return out
	}
	filters := func() []core.TierFilter {
		if r.IntN(3) == 0 {
			return nil
		}
		out := make([]core.TierFilter, r.IntN(3))
		for i := range out {
			out[i] = core.TierFilter{Medium: text(0, 9), Locality: text(0, 9)}
		}
		return out
	}
	region := func() Region {
		return Region{Version: u32(), Session: u64(), Epoch: text(0, 40), RegionBytes: u64() >> 2, Groups: []Geometry{{u64(), u64()}}}
	}
	id := text(1, RequestIDMax)
	switch m := newMessage(t).(type) {
	case *Hello:
		m.Versions, m.Engine, m.Name = Versions{u32(), u32()}, text(0, NameMax), text(0, NameMax)
		m.Spec = block.Spec{Model: text(0, 40), Revision: opt(), DType: text(0, 9), Layout: text(0, 9), Groups: []block.Group{{Kind: block.KindWindow,
			TokensPerBlock: u32(), WindowBlocks: u32(), BlockBytes: u64()}}, Adapter: opt(), HashAlgorithm: text(0, 9), HashLength: u32(), HashSeed: opt(), Salt: opt(), Epoch: opt()}
		if r.IntN(2) == 0 {
			m.Spec.Ranks = &block.Ranks{TensorParallel: u32(), Rank: u32()}
			m.Expect = &block.Fingerprint{1, 2}
		}
		return m
	case *HelloReply:
		m.Region, m.Node, m.Limits = region(), text(0, 9), Limits{u32(), u32(), u32(), u32(), u32(), u32()}
		return m
	case *Attach:
		m.Versions, m.Token = Versions{u32(), u32()}, Token{byte(u32())}
		return m
	case *AttachReply:
		m.Region = region()
		return m
	case *NewRequest:
		m.Request, m.Params = id, core.Params{LoadTiers: filters(), StoreTiers: filters(), MaxLoadTokens: int64(r.Uint64()), MaxOffloadTokens: -1, RemoteDecoder: r.IntN(2) == 0,
			KVRequestID: text(0, 9), Peer: core.PeerRole(r.IntN(3)), PeerHost: text(0, 9), PeerPort: r.IntN(65536), PeerRequestID: text(0, 9)}
		return m
	case *Lookup:
		m.Request, m.Peek, m.WaitMS = id, r.IntN(2) == 0, uint32(r.IntN(WaitMSMax+1))
		for range r.IntN(4) {
			m.Keys = append(m.Keys, keys(r.IntN(300)))
		}
		return m
	case *LookupReply:
		m.Tokens, m.Final = int64(u64()>>2), r.IntN(2) == 0
		for range r.IntN(4) {
			g := core.GroupAnswer{Verdicts: make([]core.Verdict, r.IntN(300))}
			for i := range g.Verdicts {
				g.Verdicts[i] = core.Verdict(r.IntN(256))
			}
			g.First = r.IntN(len(g.Verdicts) + 1)
			g.Leases = leases(r.IntN(len(g.Verdicts) - g.First + 1))
			m.Groups = append(m.Groups, g)
		}
		return m
	case *Reserve:
		m.Request, m.Group, m.First, m.Keys = id, uint32(r.IntN(block.GroupsMax)), u32()>>1, keys(r.IntN(ReserveKeysMax+1))
		return m
	case *ReserveReply:
		for range r.IntN(ReserveKeysMax + 1) {
			m.Grants = append(m.Grants, core.Grant{Status: core.GrantStatus(r.IntN(5)), Slot: core.Slot(u32()), Gen: u32()})
		}
		return m
	case *Commit:
		m.Request = id
		for range r.IntN(300) {
			f := core.Fill{Slot: core.Slot(u32()), Gen: u32(), HasSum: r.IntN(2) == 0}
			if f.HasSum {
				f.Sum = u64()
			}
			m.Fills = append(m.Fills, f)
		}
		return m
	case *Abort:
		m.Request = id
		for range r.IntN(300) {
			m.Fills = append(m.Fills, core.Fill{Slot: core.Slot(u32()), Gen: u32()})
		}
		return m
	case *FillReply:
		for range r.IntN(300) {
			m.Statuses = append(m.Statuses, core.FillStatus(r.IntN(256)))
		}
		return m
	case *Keys:
		m.Request, m.Keys = id, keys(r.IntN(300))
		return m
	case *PinReply:
		m.Leases = leases(r.IntN(300))
		return m
	case *Unpin:
		m.Request, m.Leases = id, leases(r.IntN(300))
		for i := range m.Leases {
			m.Leases[i].Sum = 0
		}
		return m
	case *Finish:
		m.Request = id
		return m
	case *Flush:
		m.Request, m.WaitMS = id, uint32(r.IntN(WaitMSMax+1))
		return m
	case *FlushReply:
		m.Flushed = core.Flushed{Done: r.IntN(2) == 0, Cascaded: int(u64() >> 2), Failed: int(u64() >> 2)}
		return m
	case *Reset:
		m.WaitMS = uint32(r.IntN(WaitMSMax + 1))
		return m
	case *ResetReply:
		m.Done = r.IntN(2) == 0
		return m
	case *StatusReply:
		m.JSON = []byte(text(0, 999))
		return m
	case *Error:
		*m = Error{Code: Code(u32()), Message: text(0, 99), Field: text(0, 99)}
		return m
	default:
		return m
	}
}

// TestRoundTrip decodes what was encoded, into messages that have been used
// before.
func TestRoundTrip(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	for _, typ := range allTypes() {
		used := newMessage(typ)
		for range 60 {
			m := randomMessage(typ, r)
			b := m.Append(nil)
			if err := used.Decode(b); err != nil {
				t.Fatalf("seed %d: %v: %v", seed, typ, err)
			}
			if !equal(used, m) {
				t.Fatalf("seed %d: %v decodes to\n%+v\nwant\n%+v", seed, typ, used, m)
			}
			if again := used.Append(nil); !bytes.Equal(again, b) {
				t.Fatalf("seed %d: %v encodes to\n%x\nwant\n%x", seed, typ, again, b)
			}
		}
	}
}

// TestFieldCount: a body one field short is refused, one with more is read as
// if they were not there.
func TestFieldCount(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, typ := range allTypes() {
		want := randomMessage(typ, r)
		b := want.Append(nil)
		n, rest, err := msgp.ReadArrayHeaderBytes(b)
		if err != nil {
			t.Fatal(err)
		}
		longer := append(msgp.AppendArrayHeader(nil, n+2), rest...)
		longer = msgp.AppendString(msgp.AppendMapHeader(longer, 0), "of the future")
		got := newMessage(typ)
		if err := got.Decode(longer); err != nil || !equal(got, want) {
			t.Errorf("%v with two more fields: %v, %+v", typ, err, got)
		}
		if err := newMessage(typ).Decode(append(b, 0xc0)); !errors.Is(err, ErrMalformed) {
			t.Errorf("%v with a byte after its array: %v", typ, err)
		}
		if n > 0 {
			shorter := append(msgp.AppendArrayHeader(nil, n-1), rest...)
			if err := newMessage(typ).Decode(shorter); !errors.Is(err, ErrMalformed) {
				t.Errorf("%v with a field less: %v", typ, err)
			}
		}
		for i := range b { // a body cut anywhere
			if err := newMessage(typ).Decode(b[:i]); err == nil {
				t.Errorf("%v cut to %d of %d bytes is accepted", typ, i, len(b))
			}
		}
	}
}

// TestRequestOfBefore: clients that know of no peers send six fields.
func TestRequestOfBefore(t *testing.T) {
	want := NewRequest{Request: "r", Params: core.Params{MaxLoadTokens: 5, MaxOffloadTokens: -1, RemoteDecoder: true}}
	b := msgp.AppendString(msgp.AppendArrayHeader(nil, 6), "r")
	b = msgp.AppendInt64(msgp.AppendInt64(append(b, 0xc0, 0xc0), 5), -1)
	b = msgp.AppendBool(b, true)
	got := NewRequest{Params: core.Params{Peer: core.PeerProbe, PeerPort: 7, KVRequestID: "old"}}
	if err := got.Decode(b); err != nil || !equal(&got, &want) {
		t.Errorf("%v, %+v", err, got)
	}
	if err := got.Decode(append(b, 0xc0)); !errors.Is(err, ErrMalformed) {
		t.Errorf("with a byte after its array: %v", err)
	}
}

// TestNamespaceStrict: a namespace field that this version does not know may
// not be ignored, unless it is nil.
func TestNamespaceStrict(t *testing.T) {
	m := Hello{Versions: Versions{1, 1}, Spec: block.Spec{Model: "m"}}
	b := m.Append(nil)
	short := m.Append(nil)
	at := bytes.LastIndexByte(b, 0x90|specFields)
	b[at]++
	short[at]--
	if err := new(Hello).Decode(append(b[:len(b):len(b)], 0xc0)); err != nil {
		t.Errorf("a nil field more: %v", err)
	}
	err := new(Hello).Decode(msgp.AppendString(b[:len(b):len(b)], "mxfp4"))
	if !errors.Is(err, tier.ErrNamespaceMismatch) {
		t.Errorf("a field more: %v", err)
	}
	if err := new(Hello).Decode(short[:len(short)-1]); !errors.Is(err, ErrMalformed) {
		t.Errorf("a field less: %v", err)
	}
}

// TestLimits goes one beyond each.
func TestLimits(t *testing.T) {
	bin := func(n uint32) []byte { return append(msgp.AppendBytesHeader(nil, n), make([]byte, n)...) }
	arr := func(n uint32, parts ...[]byte) []byte {
		return append(msgp.AppendArrayHeader(nil, n), bytes.Join(parts, nil)...)
	}
	str := func(n int) []byte { return msgp.AppendString(nil, strings.Repeat("x", n)) }
	num := func(n uint64) []byte { return msgp.AppendUint64(nil, n) }
	yes := msgp.AppendBool(nil, true)
	requestHead := slices.Concat(str(1), []byte{0xc0, 0xc0, 0xff, 0xff}, yes)
	for _, c := range []struct {
		t     Type
		body  []byte
		field string
		code  Code
	}{
		{TypeFinish, arr(1, str(RequestIDMax)), "", 0},
		{TypeFinish, arr(1, str(RequestIDMax+1)), "finish.request", CodeInvalid},
		{TypeFinish, arr(1, str(0)), "finish.request", CodeInvalid},
		{TypeFinish, arr(1, msgp.AppendString(nil, "\xff")), "finish.request", CodeInvalid},
		{TypeFinish, arr(1, msgp.AppendBytes(nil, []byte("x"))), "finish.request", CodeMalformed},
		{TypePin, arr(2, str(1), bin(LookupKeysMax*block.KeySize)), "", 0},
		{TypePin, arr(2, str(1), bin((LookupKeysMax+1)*block.KeySize)), "pin_touch.keys", CodeInvalid},
		{TypeReserve, arr(4, str(1), num(0), num(0), bin((ReserveKeysMax+1)*block.KeySize)), "reserve.keys", CodeInvalid},
		{TypeReserve, arr(4, str(1), num(block.GroupsMax), num(0), bin(0)), "reserve.group", CodeInvalid},
		{TypeReserve, arr(4, str(1), num(0), num(1<<31), bin(0)), "reserve.first", CodeInvalid},
		{TypeCommit, arr(2, str(1), bin((FillsMax+1)*fillSize)), "commit.fills", CodeInvalid},
		{TypeCommit, arr(2, str(1), msgp.AppendBytes(nil, append(make([]byte, 8), 2, 0, 0, 0, 0, 0, 0, 0, 0))), "commit.fills", CodeMalformed},
		{TypeCommit, arr(2, str(1), msgp.AppendBytes(nil, append(make([]byte, 8), 0, 0, 0, 0, 0, 0, 0, 0, 1))), "commit.fills", CodeMalformed},
		{TypeAbort, arr(2, str(1), bin((FillsMax+1)*refSize)), "abort.refs", CodeInvalid},
		{TypeUnpin, arr(2, str(1), bin((LookupKeysMax+1)*refSize)), "unpin.refs", CodeInvalid},
		{TypeUnpin, arr(2, str(1), bin(refSize+1)), "unpin.refs", CodeMalformed},
		{TypeFlush, arr(2, str(1), num(WaitMSMax+1)), "flush.wait_ms", CodeInvalid},
		{TypeReset, arr(1, num(WaitMSMax+1)), "reset.wait_ms", CodeInvalid},
		{TypeReset, arr(1, msgp.AppendInt64(nil, -1)), "reset.wait_ms", CodeMalformed},
		{TypeLookup, arr(5, str(1), yes, num(WaitMSMax+1), bin(0), bin(0)), "lookup.wait_ms", CodeInvalid},
		{TypeLookup, arr(5, str(1), yes, num(0), bin(4*(block.GroupsMax+1)), bin(0)), "lookup.counts", CodeInvalid},
		{TypeLookup, arr(5, str(1), yes, num(0), msgp.AppendBytes(nil, []byte{255, 255, 255, 255}), bin(36)), "lookup.counts", CodeMalformed},
		{TypeLookup, arr(5, str(1), yes, num(0), bin(4), bin(36)), "lookup.counts", CodeMalformed},
		{TypeLookup, arr(5, str(1), yes, num(0), bin(0), bin((LookupKeysMax+1)*block.KeySize)), "lookup.keys", CodeInvalid},
		{TypeNewRequest, arr(6, str(1), msgp.AppendArrayHeader(nil, 1<<31), make([]byte, 9)), "new_request.load_tiers", CodeInvalid},
		{TypeNewRequest, arr(6, str(1), msgp.AppendArrayHeader(nil, 1), str(1), make([]byte, 9)), "new_request.load_tiers", CodeMalformed},
		{TypeNewRequest, arr(11, requestHead, str(KVRequestIDMax+1)), "new_request.kv_request_id", CodeInvalid},
		{TypeNewRequest, arr(11, requestHead, str(1), num(3)), "new_request.peer_role", CodeInvalid},
		{TypeNewRequest, arr(11, requestHead, str(1), num(1), str(PeerHostMax+1)), "new_request.peer_host", CodeInvalid},
		{TypeNewRequest, arr(11, requestHead, str(1), num(1), str(1), num(65536)), "new_request.peer_port", CodeInvalid},
		{TypeNewRequest, arr(11, requestHead, str(1), num(1), str(1), num(1), str(KVRequestIDMax+1)), "new_request.peer_request_id", CodeInvalid},
		{TypeNewRequest, arr(8, requestHead, str(1), num(1)), "new_request", CodeMalformed},
		{TypeHello, arr(7, str(7), make([]byte, 7)), "hello.magic", CodeMalformed},
		{TypeAttach, arr(4, msgp.AppendString(nil, Magic), num(1), num(1), bin(15)), "attach.token", CodeMalformed},
		{TypeLookup | ReplyBit, arr(5, num(0), yes, bin(12), bin(1), bin(0)), "lookup_reply.groups", CodeMalformed},
		{TypeLookup | ReplyBit, arr(5, num(0), yes, msgp.AppendBytes(nil, []byte{0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1}), bin(1), bin(24)), "lookup_reply.groups", CodeMalformed},
		{TypePin | ReplyBit, arr(1, msgp.AppendBytes(nil, append(make([]byte, 15), 1, 0, 0, 0, 0, 0, 0, 0, 0))), "pin_reply.leases", CodeMalformed},
		{TypePing, nil, "body", CodeMalformed},
		{TypePing, []byte{0x80}, "body", CodeMalformed},
	} {
		err := newMessage(c.t).Decode(c.body)
		var e *Error
		if c.code == 0 {
			if err != nil {
				t.Errorf("%v at its limit: %v", c.t, err)
			}
			continue
		}
		if !errors.As(err, &e) || e.Code != c.code || e.Field != c.field {
			t.Errorf("%v: %#v, want code %v of field %s", c.t, err, c.code, c.field)
		}
	}
}

// TestDecodeAllocates at most a small multiple of what arrived, whatever the
// lengths inside say.
func TestDecodeAllocates(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	for _, typ := range allTypes() {
		for range 40 {
			b := randomMessage(typ, r).Append(nil)
			for range 1 + r.IntN(4) { // lengths are mostly near the front
				b[r.IntN(min(len(b), 64))] = byte(r.Uint32())
			}
			m := newMessage(typ)
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_ = m.Decode(b)
			runtime.ReadMemStats(&after)
			if got := after.TotalAlloc - before.TotalAlloc; got > uint64(8*len(b)+32<<10) {
				t.Fatalf("seed %d: %v of %d bytes allocates %d", seed, typ, len(b), got)
			}
		}
	}
}

func TestNoAllocationPerKey(t *testing.T) {
	call := &Lookup{Request: "req-1", Keys: [][]block.Key{make([]block.Key, 200)}}
	reply := &LookupReply{core.Answer{Groups: []core.GroupAnswer{{Verdicts: make([]core.Verdict, 200), Leases: make([]core.Lease, 200)}}}}
	var callGot Lookup
	var replyGot LookupReply
	buf := make([]byte, 0, 32<<10)
	got := testing.AllocsPerRun(100, func() {
		b := AppendFrame(buf, TypeLookup, 1, call)
		if err := callGot.Decode(b[HeaderSize:]); err != nil {
			t.Fatal(err)
		}
		b = AppendFrame(buf, TypeLookup|ReplyBit, 1, reply)
		if err := replyGot.Decode(b[HeaderSize:]); err != nil {
			t.Fatal(err)
		}
	})
	if got != 0 {
		t.Errorf("%v allocations for a lookup and its reply, want none", got)
	}
}

// TestReader feeds frames in pieces of every size.
func TestReader(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	var stream []byte
	var want []frame
	for i := range 60 {
		typ := allTypes()[r.IntN(len(allTypes()))]
		m := randomMessage(typ, r)
		if i == 30 { // larger than any buffer that is kept
			typ, m = TypePin, &Keys{Request: "r", Keys: make([]block.Key, 40_000)}
		}
		stream = AppendFrame(stream, typ, uint32(i), m)
		want = append(want, frame{typ, m})
	}
	for _, src := range []io.Reader{bytes.NewReader(stream), iotest.HalfReader(bytes.NewReader(stream)), iotest.DataErrReader(bytes.NewReader(stream)),
		pieces{bytes.NewReader(stream), r}} {
		rd := NewReader(src)
		rd.Max = FrameMax
		for i, w := range want {
			f, err := rd.Read()
			if err != nil || f.Type != w.t || f.Call != uint32(i) {
				t.Fatalf("frame %d: %+v, %v", i, f, err)
			}
			if !bytes.Equal(f.Body, w.m.Append(nil)) {
				t.Fatalf("frame %d: wrong body", i)
			}
		}
		if _, err := rd.Read(); err != io.EOF {
			t.Fatalf("after the last frame: %v", err)
		}
		if len(rd.buf) > keptBytes {
			t.Errorf("a buffer of %d bytes is kept", len(rd.buf))
		}
	}
}

type pieces struct {
	io.Reader
	r *rand.Rand
}

func (p pieces) Read(b []byte) (int, error) { return p.Reader.Read(b[:min(len(b), 1+p.r.IntN(5000))]) }

func TestReaderRefuses(t *testing.T) {
	for _, c := range []struct {
		name  string
		input []byte
		err   error
	}{
		{"nothing", nil, io.EOF},
		{"half a length", []byte{0, 0}, io.ErrUnexpectedEOF},
		{"half a frame", []byte{0, 0, 0, 9, 1, 2}, io.ErrUnexpectedEOF},
		{"a GiB", []byte{0x40, 0, 0, 0, 1, 0, 0, 0, 0}, ErrMalformed},
		{"less than a header", []byte{0, 0, 0, 4, 1, 0, 0, 0, 0}, ErrMalformed},
		{"one beyond", binaryBig(GreetFrameMax + 1), ErrMalformed},
		{"as large as can be, but only said so", binaryBig(GreetFrameMax), io.ErrUnexpectedEOF},
		{"the same, and some of it", append(binaryBig(GreetFrameMax), make([]byte, 17<<10)...), io.ErrUnexpectedEOF},
	} {
		r := NewReader(bytes.NewReader(c.input))
		if _, err := r.Read(); !errors.Is(err, c.err) {
			t.Errorf("%s: %v, want %v", c.name, err, c.err)
		}
		if len(r.buf) > max(16<<10, 2*len(c.input)) {
			t.Errorf("%s: a buffer of %d bytes for %d that came", c.name, len(r.buf), len(c.input))
		}
	}
}

func binaryBig(n uint32) []byte { return be.AppendUint32(nil, n) }

func TestErrors(t *testing.T) {
	seen := map[Code]bool{}
	for _, c := range codes {
		if seen[c.code] {
			t.Errorf("code %d twice", c.code)
		}
		seen[c.code] = true
		e := ErrorOf(fmt.Errorf("reserve: %w", c.err))
		if e.Code != c.code {
			t.Errorf("%v becomes code %v, want %v", c.err, e.Code, c.code)
		}
		var back Error
		if err := back.Decode(e.Append(nil)); err != nil || back != *e {
			t.Errorf("%v comes back as %+v, %v", e, back, err)
		}
		if !errors.Is(&back, c.err) {
			t.Errorf("%v does not match %v", &back, c.err)
		}
	}
	future := Error{Code: 999, Message: "of the future"}
	if !errors.Is(&future, ErrInternal) || future.Code.String() != "code_999" {
		t.Errorf("unknown code: %v, %v", future.Unwrap(), future.Code)
	}
	if e := ErrorOf(io.ErrNoProgress); e.Code != CodeInternal {
		t.Errorf("unknown error has code %v", e.Code)
	}
	long := Error{Code: CodeInvalid, Message: strings.Repeat("é", ErrorTextMax) + "\xff", Field: strings.Repeat("x", 999)}
	var back Error
	if err := back.Decode(long.Append(nil)); err != nil {
		t.Errorf("a long error cannot be read: %v", err)
	}
}

func TestNegotiate(t *testing.T) {
	for _, c := range []struct {
		min, max, want uint32
		err            error
	}{
		{1, 1, 1, nil},
		{0, 1, 1, nil},
		{1, 9, 1, nil},
		{2, 9, 0, ErrVersion},
		{0, 0, 0, ErrVersion},
		{9, 1, 0, ErrVersion},
	} {
		m := Attach{Versions: Versions{c.min, c.max}}
		got, err := Negotiate(m.Append(nil))
		if !errors.Is(err, c.err) || got != c.want {
			t.Errorf("%d to %d: version %d, %v", c.min, c.max, got, err)
		}
		if err != nil && !strings.Contains(err.Error(), fmt.Sprintf("%d to %d, node %d to %d", c.min, c.max, VersionMin, VersionMax)) {
			t.Errorf("error does not name both ranges: %v", err)
		}
	}
}

func TestDefaultSocket(t *testing.T) {
	temp := t.TempDir()
	env := func(kv ...string) func(string) string {
		return func(k string) string {
			for i := 0; i < len(kv); i += 2 {
				if kv[i] == k {
					return kv[i+1]
				}
			}
			return ""
		}
	}
	uid := os.Geteuid()
	other := uid + 1
	own := filepath.Join(temp, fmt.Sprintf("terrace-%d", other))
	for _, c := range []struct {
		env  func(string) string
		uid  int
		want string
	}{
		{env(SocketEnv, "/a/b", "XDG_RUNTIME_DIR", "/x"), other, "/a/b"},
		{env("XDG_RUNTIME_DIR", "/x"), 0, "/x/terrace/engine.sock"},
		{env("XDG_RUNTIME_DIR", "relative"), 0, "/run/terrace/engine.sock"},
		{env(), other, own + "/engine.sock"},
	} {
		if got, err := defaultSocket(c.env, temp, c.uid); got != c.want || err != nil {
			t.Errorf("%q, %v, want %q", got, err, c.want)
		}
	}
	// Now somebody else has made it: us.
	if err := os.Mkdir(own, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := defaultSocket(env(), temp, other); err == nil || !strings.Contains(err.Error(), own) {
		t.Errorf("a folder of user %d for user %d: %v", uid, other, err)
	}
	if uid == 0 {
		return // a default of its own
	}
	mine := filepath.Join(temp, fmt.Sprintf("terrace-%d", uid))
	if err := os.Mkdir(mine, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := defaultSocket(env(), temp, uid); err == nil {
		t.Error("a folder that others can enter is accepted")
	}
}

// FuzzDecode: no body makes a decoder panic, and what it accepts survives a
// round trip.
func FuzzDecode(f *testing.F) {
	for _, tr := range transcripts() {
		for _, fr := range tr.frames {
			f.Add(byte(fr.t), fr.m.Append(nil))
		}
	}
	f.Fuzz(func(t *testing.T, typ byte, body []byte) {
		m := newMessage(Type(typ))
		if m == nil {
			return
		}
		_, _ = Negotiate(body)
		if err := m.Decode(body); err != nil {
			if e := (*Error)(nil); !errors.As(err, &e) {
				t.Fatalf("error is a %T", err)
			}
			return
		}
		b := m.Append(nil)
		again := newMessage(Type(typ))
		if err := again.Decode(b); err != nil {
			t.Fatalf("%v: what was decoded does not decode: %v", Type(typ), err)
		}
		if c := again.Append(nil); !bytes.Equal(b, c) {
			t.Fatalf("%v encodes to %x, then to %x", Type(typ), b, c)
		}
	})
}

// FuzzReader: no stream makes the reader panic or hand out more than arrived.
func FuzzReader(f *testing.F) {
	f.Add(AppendFrame(nil, TypePing, 1, Empty{}), uint16(3))
	f.Add([]byte{0x40, 0, 0, 0}, uint16(1))
	f.Fuzz(func(t *testing.T, stream []byte, chunk uint16) {
		r := NewReader(iotest.DataErrReader(bytes.NewReader(stream)))
		r.Max = 1000 + int(chunk)
		total := 0
		for {
			fr, err := r.Read()
			if err != nil {
				return
			}
			if total += HeaderSize + len(fr.Body); total > len(stream) {
				t.Fatalf("%d bytes out of %d", total, len(stream))
			}
		}
	})
}

func BenchmarkLookup200(b *testing.B) {
	call := &Lookup{Request: "req-1", Keys: [][]block.Key{make([]block.Key, 200)}}
	reply := &LookupReply{core.Answer{Groups: []core.GroupAnswer{{Verdicts: make([]core.Verdict, 200), Leases: make([]core.Lease, 200)}}}}
	for _, c := range []struct {
		name  string
		m, to Message
	}{{"call", call, new(Lookup)}, {"reply", reply, new(LookupReply)}} {
		buf := c.m.Append(nil)
		b.Run(c.name+"/encode", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				buf = c.m.Append(buf[:0])
			}
		})
		b.Run(c.name+"/decode", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := c.to.Decode(buf); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
