package wire

import (
	"encoding/binary"
	"fmt"
	"unicode/utf8"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/core"
	"github.com/tinylib/msgp/msgp"
)

var be = binary.BigEndian

// decoder reads the positional fields of one body. The first fault sticks:
// what is read after it is zero.
type decoder struct {
	message string
	b       []byte // what is left
	fields  uint32 // of the array
	exact   bool   // no fields beyond those that are known
	err     *Error
}

// open reads the array's header and checks that it has n fields at least.
func open(message string, b []byte, n uint32) decoder {
	d := decoder{message: message}
	got, rest, err := msgp.ReadArrayHeaderBytes(b)
	switch {
	case err != nil:
		d.malformed("", "body is not an array: %v", err)
	case got < n:
		d.malformed("", "%d fields, want %d", got, n)
	}
	d.b, d.fields, d.exact = rest, got, got == n
	return d
}

func (d *decoder) fail(code Code, field, format string, a ...any) {
	if d.err == nil {
		if field != "" {
			field = d.message + "." + field
		} else {
			field = d.message
		}
		d.err = &Error{Code: code, Field: field, Message: fmt.Sprintf(format, a...)}
	}
	d.b = nil
}

// malformed is what no correct client sends: it ends the session.
func (d *decoder) malformed(field, format string, a ...any) {
	d.fail(CodeMalformed, field, format, a...)
}

// close is the verdict on the body as a whole.
func (d *decoder) close() error {
	if d.err == nil && d.exact && len(d.b) > 0 {
		d.malformed("", "%d bytes after the last field", len(d.b))
	}
	if d.err == nil {
		return nil // not a nil *Error in an error
	}
	return d.err
}

// next takes over what a read of msgp has left, unless it failed.
func (d *decoder) next(field string, rest []byte, err error) bool {
	if d.err != nil {
		return false
	}
	if err != nil {
		d.malformed(field, "%v", err)
		return false
	}
	d.b = rest
	return true
}

func (d *decoder) uint(field string, most uint64) uint64 {
	if d.err != nil {
		return 0
	}
	v, rest, err := msgp.ReadUint64Bytes(d.b)
	if !d.next(field, rest, err) {
		return 0
	}
	if v > most {
		d.fail(CodeInvalid, field, "%d, at most %d is allowed", v, most)
		return 0
	}
	return v
}

func (d *decoder) int(field string) int64 {
	if d.err != nil {
		return 0
	}
	v, rest, err := msgp.ReadInt64Bytes(d.b)
	if !d.next(field, rest, err) {
		return 0
	}
	return v
}

func (d *decoder) bool(field string) bool {
	if d.err != nil {
		return false
	}
	v, rest, err := msgp.ReadBoolBytes(d.b)
	return d.next(field, rest, err) && v
}

// null reads a nil if there is one.
func (d *decoder) null() bool {
	if d.err != nil || len(d.b) == 0 || d.b[0] != 0xc0 {
		return false
	}
	d.b = d.b[1:]
	return true
}

// str is a view of a string of least to most bytes.
func (d *decoder) str(field string, least, most int) []byte {
	if d.err != nil {
		return nil
	}
	v, rest, err := msgp.ReadStringZC(d.b)
	if !d.next(field, rest, err) {
		return nil
	}
	switch {
	case len(v) < least || len(v) > most:
		d.fail(CodeInvalid, field, "%d bytes, %d to %d are allowed", len(v), least, most)
		return nil
	case !utf8.Valid(v):
		d.fail(CodeInvalid, field, "not UTF-8")
		return nil
	}
	return v
}

// optional is a string or nil.
func (d *decoder) optional(field string) *string {
	if d.null() {
		return nil
	}
	s := string(d.str(field, 0, SpecStringMax))
	return &s
}

// id is a request id. The old value is kept when it is the same, as it mostly
// is, so that nothing is allocated.
func (d *decoder) id(old string) string {
	v := d.str("request", 1, RequestIDMax)
	if string(v) == old {
		return old
	}
	return string(v)
}

// records is a view of a binary field of at most most records of size bytes.
func (d *decoder) records(field string, size, most int) []byte {
	if d.err != nil {
		return nil
	}
	v, rest, err := msgp.ReadBytesZC(d.b)
	if !d.next(field, rest, err) {
		return nil
	}
	switch {
	case len(v)%size != 0:
		d.malformed(field, "%d bytes, not a multiple of %d", len(v), size)
		return nil
	case len(v)/size > most:
		d.fail(CodeInvalid, field, "%d entries, at most %d are allowed", len(v)/size, most)
		return nil
	}
	return v
}

// exactly is a view of a binary field of n bytes.
func (d *decoder) exactly(field string, n int) []byte {
	v := d.records(field, 1, FrameMax)
	if d.err == nil && len(v) != n {
		d.malformed(field, "%d bytes, want %d", len(v), n)
	}
	if d.err != nil {
		return nil
	}
	return v
}

// sized is s with n elements, whatever they are, in its own memory if it has
// enough.
func sized[T any](s []T, n int) []T {
	if n <= cap(s) {
		return s[:n]
	}
	return make([]T, n)
}

func (d *decoder) keys(field string, most int, out []block.Key) []block.Key {
	v := d.records(field, block.KeySize, most)
	out = sized(out, len(v)/block.KeySize)
	for i := range out {
		out[i] = block.Key(v[i*block.KeySize:])
	}
	return out
}

func appendKeys(b []byte, keys []block.Key) []byte {
	b = msgp.AppendBytesHeader(b, uint32(len(keys)*block.KeySize))
	for i := range keys {
		b = append(b, keys[i][:]...)
	}
	return b
}

// cutLeases decodes the first n records of v into out.
func (d *decoder) cutLeases(v []byte, n int, out []core.Lease) []core.Lease {
	out = sized(out, n)
	for i := range out {
		r := v[i*leaseSize : (i+1)*leaseSize]
		out[i] = core.Lease{Slot: core.Slot(be.Uint32(r)), Gen: be.Uint32(r[4:]), Sum: be.Uint64(r[16:])}
		d.offset("leases", out[i].Slot, be.Uint64(r[8:]))
	}
	return out
}

// offset checks what is sent only so that a client needs no arithmetic.
func (d *decoder) offset(field string, s core.Slot, offset uint64) {
	if uint64(s.Offset()) != offset {
		d.malformed(field, "offset %d does not belong to slot %d", offset, s)
	}
}

func appendLeaseRecords(b []byte, leases []core.Lease) []byte {
	for i := range leases {
		l := &leases[i]
		b = be.AppendUint32(b, uint32(l.Slot))
		b = be.AppendUint32(b, l.Gen)
		b = be.AppendUint64(b, uint64(l.Slot.Offset()))
		b = be.AppendUint64(b, l.Sum)
	}
	return b
}

// filters is an array of strings, or nil. Its length is checked before room is
// made for it.
func (d *decoder) filters(field string) []core.TierFilter {
	if d.err != nil || d.null() {
		return nil
	}
	n, rest, err := msgp.ReadArrayHeaderBytes(d.b)
	if !d.next(field, rest, err) {
		return nil
	}
	if n%2 != 0 {
		d.malformed(field, "%d strings, want pairs of medium and locality", n)
		return nil
	}
	if n/2 > FiltersMax {
		d.fail(CodeInvalid, field, "%d entries, at most %d are allowed", n/2, FiltersMax)
		return nil
	}
	out := make([]core.TierFilter, n/2)
	for i := range out {
		out[i].Medium = string(d.str(field, 0, FilterMax))
		out[i].Locality = string(d.str(field, 0, FilterMax))
	}
	return out
}

func appendFilters(b []byte, filters []core.TierFilter) []byte {
	if filters == nil {
		return msgp.AppendNil(b)
	}
	b = msgp.AppendArrayHeader(b, uint32(2*len(filters)))
	for _, f := range filters {
		b = msgp.AppendString(msgp.AppendString(b, f.Medium), f.Locality)
	}
	return b
}

func appendOptional(b []byte, s *string) []byte {
	if s == nil {
		return msgp.AppendNil(b)
	}
	return msgp.AppendString(b, *s)
}
