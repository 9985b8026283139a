// Package wire is the engine protocol as bytes: frames, messages, limits,
// errors and versions. docs/protocol.md says it in prose, byte by byte, with
// examples from testdata.
//
// A frame is
//
//	| length uint32 | type uint8 | call id uint32 | body |
//
// big-endian, where length counts what follows it. The body is one msgpack
// array of positional fields. A field that is missing is an error, one too many is
// ignored, so that fields can be added at the end; the namespace of a hello is
// the exception (see Hello).
//
// Each message has Append, which encodes it, and Decode, which overwrites it.
// Decode never panics, checks every length against a named limit before it
// allocates, allocates at most a small multiple of the body, and reuses the
// slices that the message has. What it returns owns nothing of the body. So a connection
// that keeps one message of each type allocates nothing per key.
//
// Keys, leases, grants and fills travel as fixed-width records in one binary
// field, verdicts and statuses as one byte each.
//
// The package starts no goroutine and does no I/O but through the reader and
// writer that it is given.
package wire
