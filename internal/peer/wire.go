package peer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"

	"github.com/minio/crc64nvme"
	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/rma"
	"github.com/tinylib/msgp/msgp"
)

// A control frame is
//
//	| length uint32 | body |
//
// big-endian, where length counts the body: one msgpack array of the type and
// the message's fields in their order. A field that is missing is an error, one
// too many is ignored, so that fields can be added at the end. Keys, indexes and
// namespaces' fingerprints are binary, keys and indexes as fixed-width records in
// one field.
//
// A data connection begins, from the side that dialed, with a token head:
//
//	offset size
//	     0    4  magic "TRPT"
//	     4    4  version
//	     8   16  the session's token
//
// So the first four bytes of a connection say what it is: no first frame is as
// long as the magic would be.
const (
	dataMagic  = "TRPD"
	tokenMagic = "TRPT"

	tokenHeadBytes = 8 + tokenBytes
	greetFrameMax  = 4 << 10 // bytes of the first frame of each side
)

const (
	_ uint = ControlMax - SpecsMax*(SpecBytesMax+5) - 64
	_ uint = greetFrameMax - 3*(NameBytesMax+3) - tokenBytes - 64
	_ uint = greetFrameMax - TextBytesMax - 64
)

// pageBytes is the alignment of slots. What of a slot's last page is not of the
// block is zero.
const pageBytes = 4096

// Types of control frames. Numbers are part of the protocol, and for typeHello,
// typeWelcome and typeBye, with the version and code that they begin with, of all
// versions to come.
const (
	typeHello      = 1
	typeWelcome    = 2
	typeNamespaces = 3
	typeLookup     = 4
	typeAnswer     = 5
	typeFetch      = 6
	typeFailed     = 7
	typeAbort      = 8
	typeAbortAck   = 9
	typeFinished   = 10
	typePing       = 11
	typePong       = 12
	typeBye        = 13
	typeEnd        = 14
)

var typeNames = [typeEnd]string{typeHello: "hello", typeWelcome: "welcome", typeNamespaces: "namespaces", typeLookup: "lookup",
	typeAnswer: "answer", typeFetch: "fetch", typeFailed: "failed", typeAbort: "abort", typeAbortAck: "abort_ack",
	typeFinished: "finished", typePing: "ping", typePong: "pong", typeBye: "bye"}

// ProtocolError says what of a message no correct peer sends. It ends the
// session.
type ProtocolError struct {
	Code  Code   // CodeProtocol or CodeVersion
	Field string // such as lookup.keys
	Text  string
}

func (e *ProtocolError) Error() string { return e.Field + ": " + e.Text }

func violated(field, format string, a ...any) *ProtocolError {
	return &ProtocolError{Code: CodeProtocol, Field: field, Text: fmt.Sprintf(format, a...)}
}

var be = binary.BigEndian

// appendFrame appends a message as a whole frame.
func appendFrame(b []byte, m Message) []byte {
	at := len(b)
	b = append(b, 0, 0, 0, 0)
	begin := func(fields uint32, typ uint64) {
		b = msgp.AppendArrayHeader(b, 1+fields)
		b = msgp.AppendUint64(b, typ)
	}
	u := func(v uint64) { b = msgp.AppendUint64(b, v) }
	s := func(v string) { b = msgp.AppendString(b, v) }
	bin := func(v []byte) { b = msgp.AppendBytes(b, v) }
	keys := func(keys []block.Key) {
		b = msgp.AppendBytesHeader(b, uint32(len(keys)*block.KeySize))
		for i := range keys {
			b = append(b, keys[i][:]...)
		}
	}
	switch m := m.(type) {
	case *Hello:
		begin(6, typeHello)
		u(uint64(m.Version))
		s(m.Node)
		s(m.Boot)
		s(m.Advertise)
		bin(m.Token[:])
		u(uint64(m.Window))
	case *Welcome:
		begin(4, typeWelcome)
		u(uint64(m.Version))
		s(m.Node)
		s(m.Boot)
		s(m.Advertise)
	case *Namespaces:
		begin(1, typeNamespaces)
		b = msgp.AppendArrayHeader(b, uint32(len(m.Specs)))
		for _, spec := range m.Specs {
			bin(spec)
		}
	case *Lookup:
		begin(6, typeLookup)
		s(m.ID)
		u(m.Nonce)
		u(uint64(m.Round))
		bin(m.NS[:])
		u(uint64(m.WaitMS))
		keys(m.Keys)
	case *Answer:
		begin(4, typeAnswer)
		u(m.Nonce)
		u(uint64(m.Round))
		u(uint64(m.Code))
		bin(m.Found)
	case *Fetch:
		begin(7, typeFetch)
		s(m.ID)
		u(m.Nonce)
		u(uint64(m.Round))
		bin(m.NS[:])
		b = msgp.AppendBool(b, m.Await)
		u(uint64(m.WaitMS))
		keys(m.Keys)
	case *Failed:
		begin(4, typeFailed)
		u(m.Nonce)
		u(uint64(m.Round))
		u(uint64(m.Code))
		b = msgp.AppendBytesHeader(b, uint32(4*len(m.Indexes)))
		for _, i := range m.Indexes {
			b = be.AppendUint32(b, i)
		}
	case *Abort:
		begin(2, typeAbort)
		u(m.Nonce)
		u(uint64(m.Round))
	case *AbortAck:
		begin(2, typeAbortAck)
		u(m.Nonce)
		u(uint64(m.Round))
	case *Finished:
		begin(4, typeFinished)
		s(m.ID)
		u(m.Nonce)
		bin(m.NS[:])
		b = msgp.AppendBool(b, m.Complete)
	case *Ping:
		begin(1, typePing)
		u(m.N)
	case *Pong:
		begin(1, typePong)
		u(m.N)
	case *Bye:
		begin(2, typeBye)
		u(uint64(m.Code))
		s(fit(m.Text, TextBytesMax)) // it may quote anything
	default:
		panic(fmt.Sprintf("peer: no frame for %T", m)) // a type was added to messages.go only
	}
	be.PutUint32(b[at:], uint32(len(b)-at-4))
	return b
}

// fit makes text of anybody's fit to be sent.
func fit(s string, n int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// decodeFrame reads the body of a frame. What it returns owns nothing of the
// body. It allocates at most a small multiple of it.
//
// Of a Hello or Welcome of another version only the version is read, so that it
// can be refused by name.
func decodeFrame(b []byte) (Message, error) {
	d := &decoder{message: "frame"}
	n, rest, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		d.fail("", "body is not an array: %v", err)
		return nil, d.err
	}
	d.b, d.fields = rest, n
	typ := d.uint("type", typeEnd-1)
	if d.err == nil && typ == 0 {
		d.fail("type", "0, at least 1 is wanted")
	}
	if d.err != nil {
		return nil, d.err
	}
	d.message = typeNames[typ]
	var m Message
	switch typ {
	case typeHello:
		x := &Hello{Version: d.u32("version")}
		m = x
		if d.err == nil && x.Version != Version {
			return m, nil
		}
		x.Node = d.str("node", 1, NameBytesMax)
		x.Boot = d.str("boot", 1, NameBytesMax)
		x.Advertise = d.str("advertise", 0, NameBytesMax)
		copy(x.Token[:], d.bin("token", tokenBytes, tokenBytes))
		x.Window = uint32(d.uint("window", DataConnsMax))
	case typeWelcome:
		x := &Welcome{Version: d.u32("version")}
		m = x
		if d.err == nil && x.Version != Version {
			return m, nil
		}
		x.Node = d.str("node", 1, NameBytesMax)
		x.Boot = d.str("boot", 1, NameBytesMax)
		x.Advertise = d.str("advertise", 0, NameBytesMax)
	case typeNamespaces:
		m = &Namespaces{Specs: d.specs("specs")}
	case typeLookup:
		m = &Lookup{ID: d.str("id", 1, IDBytesMax), Nonce: d.u64("nonce"), Round: d.u32("round"), NS: d.fingerprint("ns"),
			WaitMS: d.u32("wait_ms"), Keys: d.keys("keys")}
	case typeAnswer:
		m = &Answer{Nonce: d.u64("nonce"), Round: d.u32("round"), Code: d.code("code"), Found: clone(d.bin("found", 0, KeysMax/8))}
	case typeFetch:
		m = &Fetch{ID: d.str("id", 1, IDBytesMax), Nonce: d.u64("nonce"), Round: d.u32("round"), NS: d.fingerprint("ns"),
			Await: d.bool("await"), WaitMS: d.u32("wait_ms"), Keys: d.keys("keys")}
	case typeFailed:
		m = &Failed{Nonce: d.u64("nonce"), Round: d.u32("round"), Code: d.failure("code"), Indexes: d.indexes("indexes")}
	case typeAbort:
		m = &Abort{Nonce: d.u64("nonce"), Round: d.u32("round")}
	case typeAbortAck:
		m = &AbortAck{Nonce: d.u64("nonce"), Round: d.u32("round")}
	case typeFinished:
		m = &Finished{ID: d.str("id", 1, IDBytesMax), Nonce: d.u64("nonce"), NS: d.fingerprint("ns"), Complete: d.bool("complete")}
	case typePing:
		m = &Ping{N: d.u64("n")}
	case typePong:
		m = &Pong{N: d.u64("n")}
	case typeBye:
		// Any code: the peer may be of a version that has more of them.
		m = &Bye{Code: Code(d.uint("code", 1<<8-1)), Text: d.str("text", 0, TextBytesMax)}
	}
	if d.err == nil && d.fields == 0 && len(d.b) > 0 {
		d.fail("", "%d bytes after the last field", len(d.b))
	}
	if d.err != nil {
		return nil, d.err
	}
	return m, nil
}

// decoder reads the positional fields of one body. The first fault sticks: what
// is read after it is zero. Go evaluates the calls of a composite literal in
// their order, which is that of the fields.
type decoder struct {
	message string
	b       []byte // what is left
	fields  uint32 // that the array still has
	err     *ProtocolError
}

func (d *decoder) fail(field, format string, a ...any) {
	if d.err == nil {
		if field != "" {
			field = "." + field
		}
		d.err = violated(d.message+field, format, a...)
	}
	d.b = nil
}

// take begins a field.
func (d *decoder) take(field string) bool {
	if d.err == nil && d.fields == 0 {
		d.fail(field, "is missing")
	}
	if d.err != nil {
		return false
	}
	d.fields--
	return true
}

// next takes over what a read of msgp has left, unless it failed.
func (d *decoder) next(field string, rest []byte, err error) bool {
	if err != nil {
		d.fail(field, "%v", err)
		return false
	}
	d.b = rest
	return true
}

func (d *decoder) uint(field string, most uint64) uint64 {
	if !d.take(field) {
		return 0
	}
	v, rest, err := msgp.ReadUint64Bytes(d.b)
	if !d.next(field, rest, err) {
		return 0
	}
	if v > most {
		d.fail(field, "%d, at most %d is allowed", v, most)
		return 0
	}
	return v
}

func (d *decoder) u64(field string) uint64 { return d.uint(field, 1<<64-1) }
func (d *decoder) u32(field string) uint32 { return uint32(d.uint(field, 1<<32-1)) }
func (d *decoder) code(field string) Code  { return Code(d.uint(field, uint64(codeEnd)-1)) }

func (d *decoder) failure(field string) Code {
	c := d.code(field)
	if d.err == nil && c == CodeOK {
		d.fail(field, "0, which is no failure")
	}
	return c
}

func (d *decoder) bool(field string) bool {
	if !d.take(field) {
		return false
	}
	v, rest, err := msgp.ReadBoolBytes(d.b)
	return d.next(field, rest, err) && v
}

func (d *decoder) str(field string, least, most int) string {
	if !d.take(field) {
		return ""
	}
	v, rest, err := msgp.ReadStringZC(d.b)
	switch {
	case !d.next(field, rest, err):
	case len(v) < least || len(v) > most:
		d.fail(field, "%d bytes, %d to %d are allowed", len(v), least, most)
	case !utf8.Valid(v):
		d.fail(field, "not UTF-8")
	default:
		return string(v)
	}
	return ""
}

// bin is a view of a binary field.
func (d *decoder) bin(field string, least, most int) []byte {
	if !d.take(field) {
		return nil
	}
	return d.binary(field, least, most)
}

func (d *decoder) binary(field string, least, most int) []byte {
	v, rest, err := msgp.ReadBytesZC(d.b)
	if !d.next(field, rest, err) {
		return nil
	}
	if len(v) < least || len(v) > most {
		d.fail(field, "%d bytes, %d to %d are allowed", len(v), least, most)
		return nil
	}
	return v
}

// records is a view of a binary field of at most KeysMax records.
func (d *decoder) records(field string, size int) []byte {
	v := d.bin(field, 0, ControlMax)
	switch {
	case len(v)%size != 0:
		d.fail(field, "%d bytes, not a multiple of %d", len(v), size)
		return nil
	case len(v)/size > KeysMax:
		d.fail(field, "%d entries, at most %d are allowed", len(v)/size, KeysMax)
		return nil
	}
	return v
}

func (d *decoder) keys(field string) []block.Key {
	v := d.records(field, block.KeySize)
	if len(v) == 0 {
		return nil
	}
	out := make([]block.Key, len(v)/block.KeySize)
	for i := range out {
		out[i] = block.Key(v[i*block.KeySize:])
	}
	return out
}

func (d *decoder) indexes(field string) []uint32 {
	v := d.records(field, 4)
	if len(v) == 0 {
		return nil
	}
	out := make([]uint32, len(v)/4)
	for i := range out {
		if out[i] = be.Uint32(v[4*i:]); out[i] >= KeysMax {
			d.fail(field, "index %d, at most %d is allowed", out[i], KeysMax-1)
			return nil
		}
	}
	return out
}

func (d *decoder) fingerprint(field string) (fp block.Fingerprint) {
	copy(fp[:], d.bin(field, len(fp), len(fp)))
	return fp
}

// specs is an array of binary fields, whose number is checked before room is
// made for them.
func (d *decoder) specs(field string) [][]byte {
	if !d.take(field) {
		return nil
	}
	n, rest, err := msgp.ReadArrayHeaderBytes(d.b)
	if !d.next(field, rest, err) || n == 0 {
		return nil
	}
	if n > SpecsMax {
		d.fail(field, "%d entries, at most %d are allowed", n, SpecsMax)
		return nil
	}
	out := make([][]byte, n)
	for i := range out {
		out[i] = clone(d.binary(field, 1, SpecBytesMax))
		if d.err != nil {
			return nil
		}
	}
	return out
}

func clone(b []byte) []byte { return append([]byte(nil), b...) }

// keptBytes is how large a buffer of a control connection may stay between
// frames. Larger ones are rare and given to the collector.
const keptBytes = 64 << 10

// frameReader takes control frames off a stream. It reads as much as there is
// in one go, and grows its buffer only as bytes arrive, so that a length alone
// costs nothing.
type frameReader struct {
	src        io.Reader
	max        int // bytes of the frames to come
	buf        []byte
	start, end int // the unread part of buf
	size       int // of the last frame
}

func newFrameReader(src io.Reader) *frameReader {
	return &frameReader{src: src, max: greetFrameMax, buf: make([]byte, greetFrameMax+4)}
}

// read returns the body of the next frame, valid until the next read. At a
// clean end of the stream the error is io.EOF, inside a frame
// io.ErrUnexpectedEOF; a length that cannot be is a *ProtocolError. After an
// error the reader is of no more use.
func (r *frameReader) read() ([]byte, error) {
	if r.start == r.end {
		if r.start, r.end = 0, 0; len(r.buf) > keptBytes {
			r.buf = make([]byte, keptBytes)
		}
	}
	if err := r.fill(4); err != nil {
		if r.start == r.end && errors.Is(err, io.ErrUnexpectedEOF) {
			err = io.EOF
		}
		return nil, err
	}
	head := r.buf[r.start : r.start+4]
	n := be.Uint32(head)
	switch {
	case n >= 2 && uint64(n) <= uint64(r.max):
	case head[0] == 0x16 && head[1] == 3:
		return nil, violated("frame.length", "the other side speaks TLS, this one does not")
	default:
		return nil, violated("frame.length", "%d bytes, 2 to %d are allowed", n, r.max)
	}
	size := 4 + int(n)
	if err := r.fill(size); err != nil {
		return nil, err
	}
	body := r.buf[r.start+4 : r.start+size : r.start+size]
	r.start += size
	r.size = size
	return body, nil
}

// fill reads until n bytes are there.
func (r *frameReader) fill(n int) error {
	for r.end-r.start < n {
		switch {
		case r.start > 0 && r.start+n > len(r.buf): // make room at the end
			r.end = copy(r.buf, r.buf[r.start:r.end])
			r.start = 0
		case r.end == len(r.buf): // as much again as has arrived
			grown := make([]byte, min(2*len(r.buf), 4+r.max))
			r.end = copy(grown, r.buf[r.start:r.end])
			r.buf, r.start = grown, 0
		}
		got, err := r.src.Read(r.buf[r.end:])
		r.end += got
		if err != nil && r.end-r.start < n {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
	}
	return nil
}

// next is read and decodeFrame.
func (r *frameReader) next() (Message, error) {
	b, err := r.read()
	if err != nil {
		return nil, err
	}
	return decodeFrame(b)
}

// put writes a data head; b has dataHeadBytes.
func (h *DataHead) put(b []byte) {
	clear(b)
	copy(b, dataMagic)
	be.PutUint32(b[4:], uint32(h.Kind))
	be.PutUint64(b[8:], h.Nonce)
	be.PutUint32(b[16:], h.Round)
	be.PutUint32(b[20:], h.Index)
	be.PutUint64(b[24:], h.Length)
	be.PutUint64(b[32:], h.Sum)
	be.PutUint64(b[40:], h.At)
	be.PutUint64(b[56:], crc64nvme.Checksum(b[:56]))
}

// decodeDataHead reads what put wrote; b has dataHeadBytes.
func decodeDataHead(b []byte) (h DataHead, err error) {
	if string(b[:4]) != dataMagic {
		return h, violated("data.magic", "%q, want %q", b[:4], dataMagic)
	}
	if sum := crc64nvme.Checksum(b[:56]); sum != be.Uint64(b[56:]) {
		return h, violated("data.head_sum", "%016x, the bytes have %016x", be.Uint64(b[56:]), sum)
	}
	h = DataHead{Kind: DataKind(be.Uint32(b[4:])), Nonce: be.Uint64(b[8:]), Round: be.Uint32(b[16:]), Index: be.Uint32(b[20:]),
		Length: be.Uint64(b[24:]), Sum: be.Uint64(b[32:]), At: be.Uint64(b[40:])}
	most := uint64(block.BlockBytesMax)
	if h.Kind == DataDescription {
		most = descriptionMax
	}
	switch {
	case h.Kind >= dataKindEnd:
		return DataHead{}, violated("data.kind", "%d, at most %d is allowed", h.Kind, dataKindEnd-1)
	case be.Uint64(b[48:]) != 0, (h.Kind == DataBytes || h.Kind == DataDescription) && h.At != 0,
		h.Kind == DataDescription && (h.Nonce != 0 || h.Round != 0 || h.Index != 0):
		return DataHead{}, violated("data.reserved", "not zero")
	case h.Index >= KeysMax:
		return DataHead{}, violated("data.index", "%d, at most %d is allowed", h.Index, KeysMax-1)
	case h.Length == 0 || h.Length > most:
		return DataHead{}, violated("data.length", "%d bytes, 1 to %d are allowed", h.Length, most)
	case h.Kind == DataOffer && h.At > 1<<63-1-h.Length:
		return DataHead{}, violated("data.at", "%d, beyond all memory", h.At)
	case h.Kind == DataTaken && h.At >= takenEnd:
		return DataHead{}, violated("data.outcome", "%d, at most %d is allowed", h.At, takenEnd-1)
	}
	return h, nil
}

// descriptionMax bounds what follows a DataDescription: the length of the
// fabric's name in a byte, the name, the description.
const (
	fabricNameMax  = 64
	descriptionMax = 1 + fabricNameMax + rma.DescriptionMax
)

// appendDescription appends a DataDescription and what follows it.
func appendDescription(b []byte, name string, description []byte) []byte {
	at := len(b)
	b = append(b, make([]byte, dataHeadBytes)...)
	b = append(b, byte(len(name)))
	b = append(b, name...)
	b = append(b, description...)
	body := b[at+dataHeadBytes:]
	h := DataHead{Kind: DataDescription, Length: uint64(len(body)), Sum: crc64nvme.Checksum(body)}
	h.put(b[at : at+dataHeadBytes])
	return b
}

// decodeDescription reads what follows h. The description is part of b.
func decodeDescription(h *DataHead, b []byte) (name string, description []byte, err error) {
	if sum := crc64nvme.Checksum(b); sum != h.Sum {
		return "", nil, violated("description.sum", "%016x, the bytes have %016x", h.Sum, sum)
	}
	n := int(b[0])
	switch {
	case n == 0 || n > fabricNameMax || n > len(b)-1:
		return "", nil, violated("description.name", "%d bytes of %d, 1 to %d are allowed", n, len(b)-1, fabricNameMax)
	case len(b)-1-n > rma.DescriptionMax:
		return "", nil, violated("description.length", "%d bytes, at most %d are allowed", len(b)-1-n, rma.DescriptionMax)
	}
	return string(b[1 : 1+n]), b[1+n:], nil
}

// appendTokenHead appends what a data connection begins with.
func appendTokenHead(b []byte, token [tokenBytes]byte) []byte {
	b = append(b, tokenMagic...)
	b = be.AppendUint32(b, Version)
	return append(b, token[:]...)
}

// decodeTokenHead reads what appendTokenHead wrote; b has tokenHeadBytes and
// begins with the magic.
func decodeTokenHead(b []byte) (token [tokenBytes]byte, err error) {
	if v := be.Uint32(b[4:]); v != Version {
		return token, &ProtocolError{Code: CodeVersion, Field: "token.version", Text: fmt.Sprintf("%d, this node speaks %d", v, Version)}
	}
	return [tokenBytes]byte(b[8:]), nil
}
