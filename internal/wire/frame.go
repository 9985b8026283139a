package wire

import (
	"errors"
	"fmt"
	"io"

	"github.com/tinylib/msgp/msgp"
)

// Type is the type of a frame. A call's reply has the call's type and
// ReplyBit; TypeError can answer any call.
type Type uint8

// Types of calls. Numbers are part of the protocol.
const (
	TypeHello      Type = 1
	TypeAttach     Type = 2
	TypeNewRequest Type = 3
	TypeLookup     Type = 4
	TypeReserve    Type = 5
	TypeCommit     Type = 6
	TypeAbort      Type = 7
	TypePin        Type = 8
	TypeUnpin      Type = 9
	TypeTouch      Type = 10
	TypeFinish     Type = 11
	TypeFlush      Type = 12
	TypeReset      Type = 13
	TypeStatus     Type = 14
	TypePing       Type = 15
	TypeGoodbye    Type = 16

	ReplyBit  Type = 0x80
	TypeError Type = 0xff
)

var typeNames = [...]string{TypeHello: "hello", TypeAttach: "attach", TypeNewRequest: "new_request", TypeLookup: "lookup",
	TypeReserve: "reserve", TypeCommit: "commit", TypeAbort: "abort", TypePin: "pin", TypeUnpin: "unpin", TypeTouch: "touch",
	TypeFinish: "finish", TypeFlush: "flush", TypeReset: "reset", TypeStatus: "status", TypePing: "ping", TypeGoodbye: "goodbye"}

func (t Type) String() string {
	name := ""
	if call := t &^ ReplyBit; int(call) < len(typeNames) {
		name = typeNames[call]
	}
	switch {
	case t == TypeError:
		return "error"
	case name == "":
		return fmt.Sprintf("type_%d", uint8(t))
	case t&ReplyBit != 0:
		return name + "_reply"
	}
	return name
}

// Message is the body of a frame.
type Message interface {
	Append(b []byte) []byte // appends the encoded body
	Decode(b []byte) error  // overwrites the message; errors are *Error
}

// HeaderSize is what precedes the body: length, type and call id.
const HeaderSize = 9

const headRest = HeaderSize - 4 // what of the header the length counts

// AppendFrame appends a whole frame.
func AppendFrame(b []byte, t Type, call uint32, m Message) []byte {
	at := len(b)
	b = append(b, 0, 0, 0, 0, byte(t))
	b = be.AppendUint32(b, call)
	b = m.Append(b)
	be.PutUint32(b[at:], uint32(len(b)-at-4))
	return b
}

// Frame is one frame as read. Body is valid until the next Read.
type Frame struct {
	Type Type
	Call uint32
	Body []byte
}

// keptBytes is how large a buffer may stay between frames. Larger ones are
// rare and given to the collector.
const keptBytes = 128 << 10

// Reader takes frames off a stream. It reads as much as there is in one go,
// and grows its buffer only as bytes arrive, so that a length alone costs
// nothing.
type Reader struct {
	Max int // limit for the frames to come, FrameMax or GreetFrameMax

	src        io.Reader
	buf        []byte
	start, end int // the unread part of buf
}

// NewReader reads from src, with the limit for greetings.
func NewReader(src io.Reader) *Reader {
	return &Reader{Max: GreetFrameMax, src: src, buf: make([]byte, 16<<10)}
}

// SetSource changes where further bytes come from; what is buffered stays.
func (r *Reader) SetSource(src io.Reader) { r.src = src }

// Read returns the next frame. At a clean end of the stream the error is
// io.EOF, inside a frame io.ErrUnexpectedEOF; a length that cannot be is an
// *Error with CodeMalformed. After an error the reader is of no more use.
func (r *Reader) Read() (Frame, error) {
	if r.start == r.end {
		if r.start, r.end = 0, 0; len(r.buf) > keptBytes {
			r.buf = make([]byte, 16<<10)
		}
	}
	if err := r.fill(4); err != nil {
		if errors.Is(err, io.EOF) {
			if err = io.EOF; r.end > r.start {
				err = io.ErrUnexpectedEOF
			}
		}
		return Frame{}, err
	}
	n := be.Uint32(r.buf[r.start:])
	if n < headRest || uint64(n) > uint64(r.Max) {
		return Frame{}, &Error{Code: CodeMalformed, Field: "length",
			Message: fmt.Sprintf("frame of %d bytes, %d to %d are allowed", n, headRest, r.Max)}
	}
	size := 4 + int(n)
	if err := r.fill(size); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return Frame{}, err
	}
	f := r.buf[r.start : r.start+size : r.start+size]
	r.start += size
	return Frame{Type: Type(f[4]), Call: be.Uint32(f[5:]), Body: f[HeaderSize:]}, nil
}

// fill reads until n bytes are there.
func (r *Reader) fill(n int) error {
	for r.end-r.start < n {
		switch {
		case r.start > 0 && r.start+n > len(r.buf): // make room at the end
			r.end = copy(r.buf, r.buf[r.start:r.end])
			r.start = 0
		case r.end == len(r.buf): // as much again as has arrived
			grown := make([]byte, min(2*len(r.buf), 4+r.Max))
			r.end = copy(grown, r.buf[r.start:r.end])
			r.buf, r.start = grown, 0
		}
		got, err := r.src.Read(r.buf[r.end:])
		r.end += got
		if err != nil && r.end-r.start < n {
			return err
		}
	}
	return nil
}

// Empty is the body of calls and replies that say nothing.
type Empty struct{}

// Append encodes an empty array.
func (Empty) Append(b []byte) []byte { return msgp.AppendArrayHeader(b, 0) }

// Decode checks that there is an array.
func (Empty) Decode(b []byte) error {
	d := open("body", b, 0)
	return d.close()
}

// SetCall changes the call id of an encoded frame.
func SetCall(frame []byte, call uint32) { be.PutUint32(frame[5:], call) }
