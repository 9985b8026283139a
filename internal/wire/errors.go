package wire

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/tier"
	"github.com/tinylib/msgp/msgp"
)

// Code is the number of an error on the wire. Numbers and names are part of
// the protocol: never reuse or renumber one.
type Code uint16

// Codes. Those from CodeMalformed on end the connection.
const (
	CodeInternal     Code = 1
	CodeInvalid      Code = 2
	CodeNoSession    Code = 3
	CodeNoRequest    Code = 4
	CodeConflict     Code = 5
	CodeFinished     Code = 6
	CodeDraining     Code = 7
	CodeNoRoom       Code = 8
	CodeTooLarge     Code = 9
	CodeNotReady     Code = 10
	CodeTooMany      Code = 11
	CodeStillPending Code = 12
	CodeUnsupported  Code = 13
	CodeOvertaken    Code = 14

	CodeMalformed  Code = 64
	CodeVersion    Code = 65
	CodeNamespace  Code = 66
	CodeForbidden  Code = 67
	CodeSlowReader Code = 68
)

// Errors that only the protocol knows; the others are core's.
var (
	ErrInternal    = errors.New("the node failed at this call")
	ErrUnsupported = errors.New("call is not known to the node")
	ErrOvertaken   = errors.New("lookup was overtaken by another call of its request")
	ErrMalformed   = errors.New("malformed frame")
	ErrVersion     = errors.New("no common protocol version")
	ErrForbidden   = errors.New("not allowed")
	ErrSlowReader  = errors.New("replies were not read in time")
)

// codes has the stable name and the sentinel of each code, the more special
// sentinel first where an error may match two.
var codes = []struct {
	code Code
	name string
	err  error
}{
	{CodeInvalid, "invalid", core.ErrInvalid},
	{CodeNoSession, "no_session", core.ErrNoSession},
	{CodeFinished, "finished", core.ErrFinished},
	{CodeNoRequest, "no_request", core.ErrNoRequest},
	{CodeConflict, "conflict", core.ErrConflict},
	{CodeDraining, "draining", core.ErrDraining},
	{CodeNoRoom, "no_room", core.ErrNoRoom},
	{CodeTooLarge, "too_large", core.ErrTooLarge},
	{CodeNotReady, "not_ready", core.ErrNotReady},
	{CodeTooMany, "too_many", core.ErrTooMany},
	{CodeStillPending, "still_pending", core.ErrStillPending},
	{CodeUnsupported, "unsupported", ErrUnsupported},
	{CodeOvertaken, "overtaken", ErrOvertaken},
	{CodeMalformed, "malformed", ErrMalformed},
	{CodeVersion, "version", ErrVersion},
	{CodeNamespace, "namespace", tier.ErrNamespaceMismatch},
	{CodeForbidden, "forbidden", ErrForbidden},
	{CodeSlowReader, "slow_reader", ErrSlowReader},
	{CodeInternal, "internal", ErrInternal},
}

func (c Code) String() string {
	for i := range codes {
		if codes[i].code == c {
			return codes[i].name
		}
	}
	return fmt.Sprintf("code_%d", uint16(c))
}

// Ends says that an error of this code ends the connection.
func (c Code) Ends() bool { return c >= CodeMalformed }

// Error is an error frame, and what the Decode methods return. It matches the
// sentinel of its code: errors.Is(err, core.ErrNoRoom).
type Error struct {
	Code    Code
	Message string
	Field   string // what of the call is wrong; may be empty
}

func (e *Error) Error() string {
	if e.Field == "" {
		return e.Message
	}
	return e.Field + ": " + e.Message
}

// Unwrap is the sentinel of the code; a code of a newer node is ErrInternal.
func (e *Error) Unwrap() error {
	for i := range codes {
		if codes[i].code == e.Code {
			return codes[i].err
		}
	}
	return ErrInternal
}

// ErrorOf is the error frame for any error, as an *Error.
func ErrorOf(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	out := &Error{Code: CodeInternal, Message: err.Error()}
	for i := range codes {
		if errors.Is(err, codes[i].err) {
			out.Code = codes[i].code
			break
		}
	}
	return out
}

// Append encodes: code, name, message, field.
func (e *Error) Append(b []byte) []byte {
	b = msgp.AppendArrayHeader(b, 4)
	b = msgp.AppendUint64(b, uint64(e.Code))
	b = msgp.AppendString(b, e.Code.String())
	b = msgp.AppendString(b, clip(e.Message, ErrorTextMax))
	return msgp.AppendString(b, clip(e.Field, NameMax))
}

// clip makes text of anybody's fit to be sent.
func clip(s string, n int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// Decode overwrites e. The name is for people who read frames: the code counts.
func (e *Error) Decode(b []byte) error {
	d := open("error", b, 4)
	*e = Error{Code: Code(d.uint("code", 1<<16-1))}
	d.str("name", 0, NameMax)
	e.Message = string(d.str("message", 0, ErrorTextMax))
	e.Field = string(d.str("field", 0, NameMax))
	return d.close()
}

// Codes lists every code, for counters created at zero.
func Codes() []Code {
	out := make([]Code, len(codes))
	for i := range codes {
		out[i] = codes[i].code
	}
	return out
}
