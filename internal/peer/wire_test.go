package peer

import (
	"bytes"
	"encoding/binary"
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

	"github.com/minio/crc64nvme"
	"github.com/terrace-kv/terrace/block"
	"github.com/tinylib/msgp/msgp"
)

var rewrite = flag.Bool("rewrite", false, "write the golden transcripts anew")

// wireFields names the fields of each message for people; a number splits a
// binary field into its records.
var wireFields = [typeEnd]string{
	typeHello:      "version node boot advertise token window",
	typeWelcome:    "version node boot advertise",
	typeNamespaces: "specs",
	typeLookup:     "id nonce round ns wait_ms keys:36",
	typeAnswer:     "nonce round code found:1",
	typeFetch:      "id nonce round ns await wait_ms keys:36",
	typeFailed:     "nonce round code indexes:4",
	typeAbort:      "nonce round",
	typeAbortAck:   "nonce round",
	typeFinished:   "id nonce ns complete",
	typePing:       "n",
	typePong:       "n",
	typeBye:        "code text",
}

// said is one thing that goes over a connection in a transcript.
type said struct {
	by   string // consumer or producer
	what any    // a Message, a DataHead, a token or raw bytes of a body
}

type transcript struct {
	about string
	said  []said
}

func wireKey(n byte, group uint32) (k block.Key) {
	for i := range block.HashSize {
		k[i] = n
	}
	binary.BigEndian.PutUint32(k[block.HashSize:], group)
	return k
}

const (
	wireNonce = 0x0123456789abcdef
	wireID    = "chat-7f3a"
)

func transcripts() map[string]transcript {
	token := [tokenBytes]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
	hello := &Hello{Version: 1, Node: "node-a", Boot: "b7e1f4a02c9d4e55", Advertise: "10.0.0.1:7101", Token: token, Window: 2}
	welcome := &Welcome{Version: 1, Node: "node-b", Boot: "03c6a1d2f18b7e90", Advertise: "[fd00::2]:7101"}
	var fp block.Fingerprint
	for i := range fp {
		fp[i] = 0xf0 | byte(i&15)
	}
	keys := []block.Key{wireKey(0xa1, 0), wireKey(0xa2, 0), wireKey(0xa3, 0)}
	sums := []uint64{0x1111111111111111, 0x2222222222222222, 0x3333333333333333}
	lookup := &Lookup{ID: wireID, Nonce: wireNonce, Round: 1, NS: fp, WaitMS: 2000, Keys: keys}
	fetch := &Fetch{ID: wireID, Nonce: wireNonce, Round: 1, NS: fp, WaitMS: 30000, Keys: keys[:2]}
	await := &Fetch{ID: wireID, Nonce: wireNonce, Round: 2, NS: fp, Await: true, WaitMS: 60000, Keys: keys}
	data := func(round, i uint32) DataHead {
		return DataHead{Nonce: wireNonce, Round: round, Index: i, Length: 65536, Sum: sums[i]}
	}
	offer := func(i uint32) DataHead {
		h := data(2, i)
		h.Kind, h.At = DataOffer, 0x10000*uint64(i+16)
		return h
	}
	taken := func(i uint32, outcome uint64) DataHead {
		return DataHead{Kind: DataTaken, Nonce: wireNonce, Round: 2, Index: i, Length: 65536, At: outcome}
	}
	const c, p = "consumer", "producer"
	return map[string]transcript{
		"greeting": {"A node dials another one: greetings, namespaces both ways, and the head of each data connection.", []said{
			{c, hello}, {p, welcome}, {c, token}, {c, token},
			{c, &Namespaces{Specs: [][]byte{[]byte(`{"model":"m"}`), []byte(`{"model":"n"}`)}}}, {p, &Namespaces{}}}},
		"version": {"A node of another version is refused. Of its hello only the version is read.", []said{
			{c, raw(msgp.AppendString(msgp.AppendUint32(msgp.AppendUint8(msgp.AppendArrayHeader(nil, 3), typeHello), 2), "?"))},
			{p, &Bye{Code: CodeVersion, Text: "this node speaks version 1, the other one 2"}}}},
		"pull": {"Two of three blocks are there, and are fetched. A block goes on any data connection.", []said{
			{c, lookup}, {p, &Answer{Nonce: wireNonce, Round: 1, Found: []byte{0b011}}}, {c, fetch}, {p, data(1, 1)}, {p, data(1, 0)},
			{c, &Finished{ID: wireID, Nonce: wireNonce, NS: fp, Complete: true}}}},
		"get": {"Both have a fabric: each describes its memory first. Blocks are offered, and got; the third one cannot be got, so it is sent.", []said{
			{c, token}, {c, described{"ucx", "worker and key of one"}}, {p, described{"ucx", "worker and key of the other"}}, {c, await},
			{p, offer(0)}, {p, offer(1)}, {p, offer(2)}, {c, taken(1, takenArrived)}, {c, taken(0, takenArrived)}, {c, taken(2, takenCannot)}, {p, data(2, 2)}}},
		"unknown_namespace": {"Nothing is known of the keys, and why.", []said{
			{c, lookup}, {p, &Answer{Nonce: wireNonce, Round: 1, Code: CodeNamespace}}}},
		"hand_over": {"A fetch of what a prefiller still computes. Two blocks come, then the supply is final.", []said{
			{c, await}, {p, data(2, 0)}, {p, data(2, 1)}, {p, &Failed{Nonce: wireNonce, Round: 2, Code: CodeAbsent, Indexes: []uint32{2}}},
			{c, &Finished{ID: wireID, Nonce: wireNonce, NS: fp}}}},
		"ended": {"A fetch that comes too late: all keys are refused in one.", []said{
			{c, await}, {p, &Failed{Nonce: wireNonce, Round: 2, Code: CodeEnded}}}},
		"abort": {"The consumer wants the blocks no more.", []said{
			{c, await}, {c, &Abort{Nonce: wireNonce, Round: 2}}, {p, &AbortAck{Nonce: wireNonce, Round: 2}}}},
		"ping": {"Is anybody there?", []said{{c, &Ping{N: 300}}, {p, &Pong{N: 300}}}},
		"malformed": {"A lookup whose keys are 35 bytes. The session ends.", []said{
			{c, raw(slices.Concat(func() []byte {
				b := appendFrame(nil, lookup)[4:]
				return b[:len(b)-3*block.KeySize-2]
			}(), []byte{0xc4, 35}, make([]byte, 35)))},
			{p, &Bye{Code: CodeProtocol, Text: "lookup.keys: 35 bytes, not a multiple of 36"}}}},
	}
}

// described is a description of a fabric, with its head.
type described struct{ name, description string }

// raw is a body that no message has.
type raw []byte

func (x said) bytes() []byte {
	switch x := x.what.(type) {
	case Message:
		return appendFrame(nil, x)
	case DataHead:
		b := make([]byte, dataHeadBytes)
		x.put(b)
		return b
	case described:
		return appendDescription(nil, x.name, []byte(x.description))
	case [tokenBytes]byte:
		return appendTokenHead(nil, x)
	case raw:
		return append(be.AppendUint32(nil, uint32(len(x))), x...)
	}
	panic("what is that?")
}

// TestWireGolden checks each transcript in both directions.
func TestWireGolden(t *testing.T) {
	seen := map[string]bool{}
	names := map[string]bool{}
	for name, tr := range transcripts() {
		names[name+".txt"] = true
		path := filepath.Join("testdata", name+".txt")
		if *rewrite {
			if err := os.WriteFile(path, renderTranscript(tr), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if want := renderTranscript(tr); !bytes.Equal(text, want) {
			t.Errorf("%s: encoding has changed (-rewrite to accept):\n%s\nwant\n%s", path, want, text)
		}
		golden := parseTranscript(t, path, text)
		if len(golden) != len(tr.said) {
			t.Fatalf("%s: %d frames, want %d", path, len(golden), len(tr.said))
		}
		for i, x := range tr.said {
			switch want := x.what.(type) {
			case Message:
				got, err := newFrameReader(iotest.OneByteReader(bytes.NewReader(golden[i]))).next()
				if err != nil || !reflect.DeepEqual(got, want) {
					t.Errorf("%s: %d decodes to\n%+v, %v\nwant\n%+v", path, i, got, err, want)
				}
				seen[fmt.Sprintf("%T", want)] = true
			case DataHead:
				if got, err := decodeDataHead(golden[i]); err != nil || got != want {
					t.Errorf("%s: %d decodes to\n%+v, %v\nwant\n%+v", path, i, got, err, want)
				}
			case described:
				h, err := decodeDataHead(golden[i][:dataHeadBytes])
				if err != nil || h.Kind != DataDescription {
					t.Fatalf("%s: %d decodes to\n%+v, %v", path, i, h, err)
				}
				if name, d, err := decodeDescription(&h, golden[i][dataHeadBytes:]); err != nil || name != want.name || string(d) != want.description {
					t.Errorf("%s: %d decodes to %q, %q, %v", path, i, name, d, err)
				}
			case [tokenBytes]byte:
				if got, err := decodeTokenHead(golden[i]); err != nil || got != want {
					t.Errorf("%s: %d decodes to\n%+v, %v\nwant\n%+v", path, i, got, err, want)
				}
			case raw:
				got, err := decodeFrame(golden[i][4:])
				if bye := tr.said[i+1].what.(*Bye); bye.Code == CodeVersion {
					if h, ok := got.(*Hello); err != nil || !ok || *h != (Hello{Version: 2}) {
						t.Errorf("%s: decodes to %+v, %v", path, got, err)
					}
				} else if err == nil || err.Error() != bye.Text {
					t.Errorf("%s: decodes to error %v", path, err)
				}
			}
		}
	}
	for typ := 1; typ < typeEnd; typ++ {
		if m := zeroMessage(typ); !seen[fmt.Sprintf("%T", m)] {
			t.Errorf("no transcript has a %T", m)
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

// renderTranscript writes it as hex with a comment on each field.
func renderTranscript(tr transcript) []byte {
	var w bytes.Buffer
	fmt.Fprintf(&w, "# %s\n", tr.about)
	line := func(b []byte, format string, a ...any) {
		fmt.Fprintf(&w, "  %-50s # %s\n", hex.EncodeToString(b), fmt.Sprintf(format, a...))
	}
	for _, x := range tr.said {
		b := x.bytes()
		switch h := x.what.(type) {
		case DataHead:
			renderHead(&w, line, x.by, b, h)
			continue
		case described:
			head, _ := decodeDataHead(b[:dataHeadBytes])
			renderHead(&w, line, x.by, b[:dataHeadBytes], head)
			b = b[dataHeadBytes:]
			line(b[:1], "fabric's name: %d bytes", b[0])
			line(b[1:1+b[0]], "%q", h.name)
			line(b[1+b[0]:], "description, as the fabric has it: %d bytes", len(h.description))
			continue
		case [tokenBytes]byte:
			fmt.Fprintf(&w, "\n%s: token\n", x.by)
			line(b[:4], "magic %q", b[:4])
			line(b[4:8], "version %d", be.Uint32(b[4:]))
			line(b[8:], "token")
			continue
		}
		n, rest, _ := msgp.ReadArrayHeaderBytes(b[4:])
		typ, fields, _ := msgp.ReadUint8Bytes(rest)
		fmt.Fprintf(&w, "\n%s: %s\n", x.by, typeNames[typ])
		line(b[:4], "length %d", be.Uint32(b))
		line(b[4:len(b)-len(rest)], "array of %d", n)
		line(rest[:len(rest)-len(fields)], "type %d (%s)", typ, typeNames[typ])
		names := strings.Fields(wireFields[typ])
		for i := range int(n) - 1 {
			fields = renderWireField(line, names[i], fields)
		}
	}
	return w.Bytes()
}

func renderHead(w io.Writer, line func([]byte, string, ...any), by string, b []byte, h DataHead) {
	kind := map[DataKind]string{DataBytes: "data", DataOffer: "offer", DataTaken: "taken", DataDescription: "description"}[h.Kind]
	fmt.Fprintf(w, "\n%s: %s\n", by, kind)
	line(b[:4], "magic %q", b[:4])
	line(b[4:8], "kind %d (%s)", h.Kind, kind)
	line(b[8:16], "nonce")
	line(b[16:20], "round %d", h.Round)
	line(b[20:24], "index %d", h.Index)
	line(b[24:32], "length %d%s", h.Length, map[DataKind]string{DataBytes: ": so many bytes follow the head", DataDescription: ": so many bytes follow the head"}[h.Kind])
	line(b[32:40], "%s", map[bool]string{true: "zero", false: "sum of the " + map[bool]string{true: "description", false: "block"}[h.Kind == DataDescription]}[h.Kind == DataTaken])
	switch h.Kind {
	case DataOffer:
		line(b[40:48], "at %#x of the producer's region", h.At)
	case DataTaken:
		line(b[40:48], "outcome %d: %s", h.At, []string{"arrived", "unwanted", "cannot"}[h.At])
	default:
		line(b[40:48], "zero")
	}
	line(b[48:56], "zero")
	line(b[56:], "sum of the above")
}

func renderWireField(line func([]byte, string, ...any), name string, b []byte) []byte {
	name, size, _ := strings.Cut(name, ":")
	record := 0
	fmt.Sscan(size, &record)
	rest, err := msgp.Skip(b)
	if err != nil {
		panic(err)
	}
	value := b[:len(b)-len(rest)]
	switch msgp.NextType(b) {
	case msgp.BinType:
		v, _, _ := msgp.ReadBytesZC(b)
		if name == "token" || name == "ns" {
			line(value, "%s: %d bytes", name, len(v))
			break
		}
		line(value[:len(value)-len(v)], "%s: %d bytes", name, len(v))
		if record == 0 {
			record = max(1, len(v))
		}
		for r := range slices.Chunk(v, record) {
			switch {
			case name == "keys" && len(r) == block.KeySize:
				line(r, "  hash %x…, group %d", r[:2], be.Uint32(r[block.HashSize:]))
			case name == "indexes":
				line(r, "  %d", be.Uint32(r))
			case name == "found":
				line(r, "  bits %08b", r[0])
			case name == "specs":
				line(r, "  %s", r)
			default:
				line(r, "  %d bytes", len(r))
			}
		}
	case msgp.ArrayType:
		n, in, _ := msgp.ReadArrayHeaderBytes(b)
		line(b[:len(b)-len(in)], "%s: array of %d", name, n)
		for range n {
			in = renderWireField(line, name, in)
		}
	default:
		v, _, err := msgp.ReadIntfBytes(b)
		if err != nil {
			panic(err)
		}
		switch x := v.(type) {
		case string:
			v = fmt.Sprintf("%q", x)
		case uint64:
			if name == "nonce" {
				v = fmt.Sprintf("%#x", x)
			}
		}
		line(value, "%s: %v", name, v)
	}
	return rest
}

// parseTranscript is what somebody in another language does with one.
func parseTranscript(t *testing.T, path string, text []byte) (out [][]byte) {
	t.Helper()
	for i, line := range strings.Split(string(text), "\n") {
		digits, _, _ := strings.Cut(line, "#")
		switch digits = strings.TrimSpace(digits); {
		case strings.Contains(digits, ": "):
			out = append(out, nil)
		case digits != "":
			b, err := hex.DecodeString(digits)
			if err != nil || len(out) == 0 {
				t.Fatalf("%s:%d: %q: %v", path, i+1, digits, err)
			}
			out[len(out)-1] = append(out[len(out)-1], b...)
		}
	}
	return out
}

func zeroMessage(typ int) Message {
	return [typeEnd]Message{nil, &Hello{}, &Welcome{}, &Namespaces{}, &Lookup{}, &Answer{}, &Fetch{}, &Failed{}, &Abort{}, &AbortAck{},
		&Finished{}, &Ping{}, &Pong{}, &Bye{}}[typ]
}

// randomMessage has values inside the limits, and often at them.
func randomMessage(typ int, r *rand.Rand) Message {
	size := func(least, most int) int {
		switch r.IntN(4) {
		case 0:
			return least
		case 1:
			return most
		}
		return least + r.IntN(most-least+1)
	}
	u64 := func() uint64 { return r.Uint64() >> r.IntN(64) }
	u32 := func() uint32 { return uint32(u64() >> 32) }
	bin := func(least, most int) []byte {
		n := size(least, most)
		if n == 0 {
			return nil
		}
		b := make([]byte, n)
		for i := 0; i < n; i += 1 + n>>8 {
			b[i] = byte(r.Uint32())
		}
		return b
	}
	text := func(least, most int) string { return strings.Repeat("ü", size(least, most)/2) + "x"[:least&1] }
	keys := func() []block.Key {
		n := size(0, KeysMax)
		if n == 0 {
			return nil
		}
		out := make([]block.Key, n)
		for i := range out {
			be.PutUint64(out[i][r.IntN(28):], r.Uint64())
		}
		return out
	}
	var fp block.Fingerprint
	copy(fp[:], bin(32, 32))
	code := Code(r.IntN(int(codeEnd)))
	switch typ {
	case typeHello:
		return &Hello{Version: Version, Node: text(1, 255), Boot: text(1, 255), Advertise: text(0, 256),
			Token: [tokenBytes]byte(bin(16, 16)), Window: uint32(size(0, DataConnsMax))}
	case typeWelcome:
		return &Welcome{Version: Version, Node: text(1, 255), Boot: text(1, 255), Advertise: text(0, 256)}
	case typeNamespaces:
		m := &Namespaces{}
		for range size(0, SpecsMax) {
			m.Specs = append(m.Specs, bin(1, SpecBytesMax))
		}
		return m
	case typeLookup:
		return &Lookup{ID: text(1, 255), Nonce: u64(), Round: u32(), NS: fp, WaitMS: u32(), Keys: keys()}
	case typeAnswer:
		return &Answer{Nonce: u64(), Round: u32(), Code: code, Found: bin(0, KeysMax/8)}
	case typeFetch:
		return &Fetch{ID: text(1, 255), Nonce: u64(), Round: u32(), NS: fp, Await: r.IntN(2) == 0, WaitMS: u32(), Keys: keys()}
	case typeFailed:
		m := &Failed{Nonce: u64(), Round: u32(), Code: max(1, code)}
		for range size(0, KeysMax) {
			m.Indexes = append(m.Indexes, uint32(r.IntN(KeysMax)))
		}
		return m
	case typeAbort:
		return &Abort{Nonce: u64(), Round: u32()}
	case typeAbortAck:
		return &AbortAck{Nonce: u64(), Round: u32()}
	case typeFinished:
		return &Finished{ID: text(1, 255), Nonce: u64(), NS: fp, Complete: r.IntN(2) == 0}
	case typePing:
		return &Ping{N: u64()}
	case typePong:
		return &Pong{N: u64()}
	}
	return &Bye{Code: Code(r.Uint32()), Text: text(0, TextBytesMax)}
}

// TestWireRoundTrip also cuts each body short, which must never pass or panic.
func TestWireRoundTrip(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	for typ := 1; typ < typeEnd; typ++ {
		for range 4 {
			m := randomMessage(typ, r)
			b := appendFrame([]byte("before"), m)[6:]
			if int(be.Uint32(b)) != len(b)-4 || len(b) > 4+ControlMax {
				t.Fatalf("%T: length %d of %d bytes", m, be.Uint32(b), len(b))
			}
			got, err := decodeFrame(b[4:])
			if err != nil || !reflect.DeepEqual(got, m) {
				t.Fatalf("%T: %v\n%+v\nwant\n%+v", m, err, got, m)
			}
			for range 20 {
				cut := b[4 : 4+r.IntN(len(b)-4)]
				if got, err := decodeFrame(cut); err == nil {
					t.Fatalf("%T cut to %d of %d bytes decodes to %+v", m, len(cut), len(b)-4, got)
				}
			}
		}
	}
}

// TestWireLimits goes one beyond each limit, and a type wrong in each field. The
// error names the field.
func TestWireLimits(t *testing.T) {
	var fp [32]byte
	keys := make([]block.Key, KeysMax+1)
	arr := func(fields ...any) []byte {
		b := msgp.AppendArrayHeader(nil, uint32(len(fields)))
		for _, f := range fields {
			switch f := f.(type) {
			case []byte:
				b = msgp.AppendBytes(b, f)
			case raw:
				b = append(b, f...)
			case string:
				b = msgp.AppendString(b, f)
			case bool:
				b = msgp.AppendBool(b, f)
			case int:
				b = msgp.AppendInt(b, f)
			case uint64:
				b = msgp.AppendUint64(b, f)
			}
		}
		return b
	}
	long := strings.Repeat("x", 257)
	token := fp[:tokenBytes]
	for _, x := range []struct {
		body  []byte
		field string
	}{
		{nil, "frame"}, {[]byte{0xc0}, "frame"}, {arr(), "frame.type"}, {arr(0), "frame.type"}, {arr(14), "frame.type"}, {arr(-1), "frame.type"}, {arr("x"), "frame.type"},
		{arr(1), "hello.version"}, {arr(1, uint64(1<<32)), "hello.version"}, {arr(1, 1), "hello.node"}, {arr(1, 1, "", "b", "", token, 1), "hello.node"},
		{arr(1, 1, long, "b", "", token, 1), "hello.node"}, {arr(1, 1, "n\xff", "b", "", token, 1), "hello.node"}, {arr(1, 1, "n", "", "", token, 1), "hello.boot"},
		{arr(1, 1, "n", "b", long, token, 1), "hello.advertise"}, {arr(1, 1, "n", "b", "", fp[:15], 1), "hello.token"}, {arr(1, 1, "n", "b", "", fp[:17], 1), "hello.token"},
		{arr(1, 1, "n", "b", "", token, DataConnsMax+1), "hello.window"}, {arr(2, 1, "n", "b"), "welcome.advertise"}, {arr(2, 1, "n", 7, ""), "welcome.boot"},
		{arr(3), "namespaces.specs"}, {arr(3, raw(msgp.AppendArrayHeader(nil, SpecsMax+1))), "namespaces.specs"}, {arr(3, raw(arr([]byte("")))), "namespaces.specs"},
		{arr(3, raw(arr(make([]byte, SpecBytesMax+1)))), "namespaces.specs"}, {arr(3, raw(msgp.AppendArrayHeader(nil, 1<<31))), "namespaces.specs"},
		{arr(4, "", 1, 1, fp[:], 1, []byte{}), "lookup.id"}, {arr(4, long, 1, 1, fp[:], 1, []byte{}), "lookup.id"}, {arr(4, "i", -1, 1, fp[:], 1, []byte{}), "lookup.nonce"},
		{arr(4, "i", 1, uint64(1<<32), fp[:], 1, []byte{}), "lookup.round"}, {arr(4, "i", 1, 1, fp[:31], 1, []byte{}), "lookup.ns"}, {arr(4, "i", 1, 1, fp[:], "1", []byte{}), "lookup.wait_ms"},
		{appendFrame(nil, &Lookup{ID: "i", Keys: keys})[4:], "lookup.keys"}, {arr(4, "i", 1, 1, fp[:], 1, make([]byte, 37)), "lookup.keys"},
		{arr(5, 1, 1, int(codeEnd), []byte{}), "answer.code"}, {arr(5, 1, 1, 0, make([]byte, KeysMax/8+1)), "answer.found"},
		{appendFrame(nil, &Fetch{ID: "i", Keys: keys})[4:], "fetch.keys"}, {arr(6, "i", 1, 1, fp[:], 1, 1, []byte{}), "fetch.await"},
		{arr(7, 1, 1, 0, []byte{}), "failed.code"}, {arr(7, 1, 1, 1, make([]byte, 4*KeysMax+4)), "failed.indexes"}, {arr(7, 1, 1, 1, []byte{0, 0, 0x10, 0}), "failed.indexes"},
		{arr(7, 1, 1, 1, []byte{0}), "failed.indexes"}, {arr(8, 1), "abort.round"}, {arr(9, "x", 1), "abort_ack.nonce"}, {arr(10, "i", 1, fp[:], "x"), "finished.complete"},
		{arr(11), "ping.n"}, {arr(12, true), "pong.n"}, {arr(13, 256, ""), "bye.code"}, {arr(13, 1, strings.Repeat("x", TextBytesMax+1)), "bye.text"},
		{append(arr(11, 1), 0), "ping"}, // bytes after the last field
	} {
		_, err := decodeFrame(x.body)
		var bad *ProtocolError
		if !errors.As(err, &bad) || bad.Field != x.field || bad.Code != CodeProtocol {
			t.Errorf("%.40x…: error %v, want one of %s", x.body, err, x.field)
		}
	}
	for _, ok := range [][]byte{
		appendFrame(nil, &Lookup{ID: strings.Repeat("x", 256), Keys: keys[1:]})[4:],
		arr(11, 1, "a field of the future", 2), arr(13, 255, ""), arr(1, 2, nil, "what this is, version 1 cannot know"),
	} {
		if _, err := decodeFrame(ok); err != nil {
			t.Errorf("%.40x…: %v", ok, err)
		}
	}
	if m, _ := decodeFrame(appendFrame(nil, &Bye{Text: "\xff" + strings.Repeat("ü", TextBytesMax)})[4:]); !strings.HasPrefix(m.(*Bye).Text, "\uFFFDüü") {
		t.Errorf("a text that is too long and no UTF-8 comes as %+v", m)
	}
}

func TestDataHeadLimits(t *testing.T) {
	good := DataHead{Nonce: 1<<64 - 1, Round: 1<<32 - 1, Index: KeysMax - 1, Length: block.BlockBytesMax, Sum: 1<<64 - 1}
	b := make([]byte, dataHeadBytes)
	good.put(b)
	if got, err := decodeDataHead(b); err != nil || got != good {
		t.Fatalf("%+v, %v", got, err)
	}
	for i := range 8 * dataHeadBytes { // no bit may flip
		b[i/8] ^= 1 << (i % 8)
		if _, err := decodeDataHead(b); err == nil {
			t.Errorf("bit %d is not missed", i)
		}
		b[i/8] ^= 1 << (i % 8)
	}
	for field, change := range map[string]func(){
		"data.magic":    func() { b[0] = 'X' },
		"data.kind":     func() { b[7] = byte(dataKindEnd) },
		"data.reserved": func() { b[55] = 1 },
		"data.at":       func() { b[7] = byte(DataOffer); be.PutUint64(b[40:], 1<<63-block.BlockBytesMax) },
		"data.outcome":  func() { b[7] = byte(DataTaken); b[47] = takenEnd },
		"data.index":    func() { be.PutUint32(b[20:], KeysMax) },
		"data.length":   func() { be.PutUint64(b[24:], block.BlockBytesMax+1) },
	} {
		good.put(b)
		change()
		be.PutUint64(b[56:], crc64nvme.Checksum(b[:56]))
		var bad *ProtocolError
		if _, err := decodeDataHead(b); !errors.As(err, &bad) || bad.Field != field {
			t.Errorf("%s: %v", field, err)
		}
	}
	for _, h := range []DataHead{{Length: 1, At: 1}, {Kind: DataDescription, Length: 1, At: 1}, {Kind: DataDescription, Length: 1, Nonce: 1},
		{Kind: DataDescription, Length: 1, Round: 1}, {Kind: DataDescription, Length: 1, Index: 1}, {Kind: DataDescription, Length: descriptionMax + 1},
		{Kind: DataDescription}, {Kind: DataOffer, Length: 1, At: 1<<63 - 1}, {Kind: DataOffer, Length: 1, At: 1<<64 - 1}} {
		h.put(b)
		if got, err := decodeDataHead(b); err == nil {
			t.Errorf("%+v is taken", got)
		}
	}
	for _, h := range []DataHead{{Kind: DataDescription, Length: descriptionMax}, {Kind: DataOffer, Length: 1, At: 1<<63 - 2}, {Kind: DataTaken, Length: 1, At: takenEnd - 1}} {
		h.put(b)
		if got, err := decodeDataHead(b); err != nil || got != h {
			t.Errorf("%+v: %v", h, err)
		}
	}
	good.Length = 0
	good.put(b)
	if _, err := decodeDataHead(b); err == nil {
		t.Error("a block of no bytes")
	}
}

// TestFrameReader: lengths are refused before anything is allocated, memory is
// taken as bytes arrive, and given back.
func TestFrameReader(t *testing.T) {
	head := func(n uint32) []byte { return be.AppendUint32(nil, n) }
	for _, x := range []struct {
		in   []byte
		want string
	}{
		{head(0), "frame.length: 0 bytes, 2 to 4096 are allowed"}, {head(greetFrameMax + 1), "frame.length: 4097 bytes, 2 to 4096 are allowed"},
		{head(1<<32 - 1), "frame.length: 4294967295 bytes, 2 to 4096 are allowed"}, {nil, "EOF"}, {[]byte{0}, "unexpected EOF"}, {head(9), "unexpected EOF"},
		{[]byte{0x16, 3, 1, 2, 0, 1}, "frame.length: the other side speaks TLS, this one does not"}, {[]byte("GET / HTTP"), "frame.length: 1195725856 bytes, 2 to 4096 are allowed"},
	} {
		if _, err := newFrameReader(bytes.NewReader(x.in)).read(); err == nil || err.Error() != x.want {
			t.Errorf("%x: %v, want %s", x.in, err, x.want)
		}
	}

	small, large := appendFrame(nil, &Ping{N: 1}), appendFrame(nil, &Namespaces{Specs: [][]byte{make([]byte, SpecBytesMax), make([]byte, SpecBytesMax)}})
	in := slices.Concat(small, large, small, large, small)
	for name, src := range map[string]io.Reader{"one": iotest.OneByteReader(bytes.NewReader(in)), "half": iotest.HalfReader(bytes.NewReader(in)), "eof": iotest.DataErrReader(bytes.NewReader(in))} {
		r := newFrameReader(src)
		r.max = ControlMax
		for i := range 5 {
			m, err := r.next()
			if _, isPing := m.(*Ping); err != nil || isPing != (i%2 == 0) {
				t.Fatalf("%s: frame %d: %T, %v", name, i, m, err)
			}
		}
		if _, err := r.read(); err != io.EOF {
			t.Errorf("%s: %v at the end", name, err)
		}
		if len(r.buf) > keptBytes {
			t.Errorf("%s: keeps %d bytes", name, len(r.buf))
		}
	}

	// Somebody claims 8 MiB and sends 10 kB.
	r := newFrameReader(io.MultiReader(bytes.NewReader(head(ControlMax)), bytes.NewReader(make([]byte, 10_000))))
	r.max = ControlMax
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, err := r.read()
	runtime.ReadMemStats(&after)
	if got := after.TotalAlloc - before.TotalAlloc; err == nil || got > 64<<10 {
		t.Errorf("a length alone took %d bytes (%v)", got, err)
	}
}

func FuzzDecodeFrame(f *testing.F) {
	for _, tr := range transcripts() {
		for _, x := range tr.said {
			switch x.what.(type) {
			case DataHead, described:
			default:
				f.Add(x.bytes()[4:])
			}
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		in := slices.Clone(b)
		m, err := decodeFrame(b)
		if !bytes.Equal(in, b) {
			t.Fatal("the body was changed")
		}
		if err != nil {
			var bad *ProtocolError
			if m != nil || !errors.As(err, &bad) || bad.Field == "" {
				t.Fatalf("%v, %v", m, err)
			}
			return
		}
		clear(b) // it owns nothing of the body
		if h, ok := m.(*Hello); ok && h.Version != Version {
			return
		}
		if w, ok := m.(*Welcome); ok && w.Version != Version {
			return
		}
		again := appendFrame(nil, m)[4:]
		m2, err := decodeFrame(again)
		if err != nil || !reflect.DeepEqual(m, m2) {
			t.Fatalf("%+v\nencodes to what decodes to\n%+v, %v", m, m2, err)
		}
	})
}

func FuzzDataHead(f *testing.F) {
	for _, h := range []DataHead{{Nonce: 1, Round: 2, Index: 3, Length: 4, Sum: 5}, {Kind: DataOffer, Nonce: 1, Round: 2, Index: 3, Length: 4, Sum: 5, At: 6},
		{Kind: DataTaken, Nonce: 1, Round: 2, Index: 3, Length: 4, At: takenCannot}} {
		b := make([]byte, dataHeadBytes)
		h.put(b)
		f.Add(b, true)
	}
	f.Add(appendDescription(nil, "ucx", []byte("worker and key")), true)
	f.Fuzz(func(t *testing.T, b []byte, fix bool) {
		if len(b) < dataHeadBytes {
			return
		}
		head, rest := b[:dataHeadBytes], b[dataHeadBytes:]
		if fix {
			be.PutUint64(head[56:], crc64nvme.Checksum(head[:56]))
		}
		h, err := decodeDataHead(head)
		if err != nil {
			return
		}
		most := uint64(block.BlockBytesMax)
		if h.Kind == DataDescription {
			most = descriptionMax
		}
		again := make([]byte, dataHeadBytes)
		if h.put(again); !bytes.Equal(head, again) || h.Length == 0 || h.Length > most || h.Index >= KeysMax || h.Kind >= dataKindEnd {
			t.Fatalf("%x decodes to %+v, which is %x", b, h, again)
		}
		if h.Kind != DataDescription || uint64(len(rest)) != h.Length {
			return
		}
		if name, d, err := decodeDescription(&h, rest); err == nil && !bytes.Equal(appendDescription(nil, name, d), b) {
			t.Fatalf("%x decodes to %q and %x, which is another one", b, name, d)
		}
	})
}

// Codes are numbers of the protocol: one that is given up stays free, and each
// other has a name.
func TestCodeNames(t *testing.T) {
	want := []string{"ok", "absent", "ended", "namespace", "no_room", "quota", "busy", "draining", "timeout", "failed", "code_10", "protocol", "version", "duplicate", "self", "idle", "unreachable", "code_17"}
	for i, name := range want {
		if got := Code(i).String(); got != name {
			t.Errorf("%d is %q, want %q", i, got, name)
		}
	}
}
