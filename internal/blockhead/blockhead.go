// Package blockhead is the header that stands before a block on every medium
// that keeps blocks: it says whose bytes follow, so that a block describes
// itself. It does no I/O and starts nothing.
package blockhead

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/minio/crc64nvme"

	"github.com/terrace-kv/terrace/block"
)

// A header has as many bytes as its medium wants, at least MinSize; a reader
// refuses any other length than its own. All numbers are big-endian. With n
// for the length:
//
//	offset size
//	     0    8  magic "TERRACEB"
//	     8    2  version, 1
//	    10    2  flags, 0; a reader refuses bits that it does not know
//	    12    4  header length n
//	    16    8  block length in bytes
//	    24    8  CRC64-NVME of the block
//	    32   32  namespace fingerprint
//	    64   36  block key
//	   100    4  0
//	   104   16  writer: the id of the node's run that wrote it
//	   120  ...  0
//	   n-8    8  CRC64-NVME of bytes 0 to n-9
//
// Magic, version, header length and the header's checksum stay where they are
// in every version.
const (
	Magic   = "TERRACEB"
	Version = 1
	MinSize = 128 // of a header, in bytes
)

// Header says what block follows it.
type Header struct {
	NS     block.Fingerprint
	Key    block.Key
	Length int64    // of the block, in bytes
	Sum    uint64   // CRC64-NVME of the block
	Writer [16]byte // the run that wrote it
}

// Reasons why a header is refused.
var (
	ErrMagic   = errors.New("not a block of ours")
	ErrVersion = errors.New("written by another version")
	ErrSum     = errors.New("header does not match its checksum")
	ErrField   = errors.New("header contradicts its place")
)

// Encode fills b, which has the header's whole length, MinSize or more.
func (h *Header) Encode(b []byte) {
	_ = b[MinSize-1]
	clear(b)
	copy(b, Magic)
	binary.BigEndian.PutUint16(b[8:], Version)
	binary.BigEndian.PutUint32(b[12:], uint32(len(b)))
	binary.BigEndian.PutUint64(b[16:], uint64(h.Length))
	binary.BigEndian.PutUint64(b[24:], h.Sum)
	copy(b[32:], h.NS[:])
	copy(b[64:], h.Key[:])
	copy(b[104:], h.Writer[:])
	binary.BigEndian.PutUint64(b[len(b)-8:], crc64nvme.Checksum(b[:len(b)-8]))
}

// Decode reads a header of len(b) bytes; b may hold anything of any length.
func (h *Header) Decode(b []byte) error {
	if len(b) < MinSize || string(b[:8]) != Magic {
		return ErrMagic
	}
	if binary.BigEndian.Uint64(b[len(b)-8:]) != crc64nvme.Checksum(b[:len(b)-8]) {
		return ErrSum
	}
	if v := binary.BigEndian.Uint16(b[8:]); v != Version {
		return fmt.Errorf("%w: header version %d, this one reads %d", ErrVersion, v, Version)
	}
	if f := binary.BigEndian.Uint16(b[10:]); f != 0 {
		return fmt.Errorf("%w: header flags %#x are not known", ErrVersion, f)
	}
	h.Length = int64(binary.BigEndian.Uint64(b[16:]))
	if n := binary.BigEndian.Uint32(b[12:]); int64(n) != int64(len(b)) || h.Length <= 0 || h.Length > block.BlockBytesMax {
		return fmt.Errorf("%w: header length %d, block length %d", ErrField, n, h.Length)
	}
	h.Sum = binary.BigEndian.Uint64(b[24:])
	copy(h.NS[:], b[32:])
	copy(h.Key[:], b[64:])
	copy(h.Writer[:], b[104:])
	return nil
}

// Check says how a header differs from what the block's place promises.
func (h *Header) Check(ns block.Fingerprint, key block.Key, length int) error {
	switch {
	case h.NS != ns:
		return fmt.Errorf("%w: namespace %s", ErrField, h.NS)
	case h.Key != key:
		return fmt.Errorf("%w: key %s", ErrField, h.Key)
	case h.Length != int64(length):
		return fmt.Errorf("%w: block length %d, want %d", ErrField, h.Length, length)
	}
	return nil
}
