package fstier

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/minio/crc64nvme"

	"github.com/terrace-kv/terrace/block"
)

// A block file is a header of headerSize bytes, the block, and zeros up to the
// next multiple of headerSize. All numbers are big-endian.
//
//	offset size
//	     0    8  magic "TERRACEB"
//	     8    2  version, 1
//	    10    2  flags, 0; a reader refuses bits that it does not know
//	    12    4  header length, 4096
//	    16    8  block length in bytes
//	    24    8  CRC64-NVME of the block
//	    32   32  namespace fingerprint
//	    64   36  block key
//	   100    4  0
//	   104   16  writer: the id of the node's run that wrote the file
//	   120 3968  0
//	  4088    8  CRC64-NVME of bytes 0 to 4087
//
// Magic, version, header length and the header's checksum stay where they are
// in every version.
const (
	headerSize    = 4096
	headerMagic   = "TERRACEB"
	headerVersion = 1
	headerSumAt   = headerSize - 8
)

type header struct {
	fp     block.Fingerprint
	key    block.Key
	length int64
	sum    uint64
	writer [16]byte
}

// Reasons why a header is refused.
var (
	errHeaderMagic   = errors.New("not a block file")
	errHeaderVersion = errors.New("written by another version")
	errHeaderSum     = errors.New("header does not match its checksum")
	errHeaderField   = errors.New("header contradicts the file's name")
)

// encode fills b, which has headerSize bytes.
func (h *header) encode(b []byte) {
	clear(b)
	copy(b, headerMagic)
	binary.BigEndian.PutUint16(b[8:], headerVersion)
	binary.BigEndian.PutUint32(b[12:], headerSize)
	binary.BigEndian.PutUint64(b[16:], uint64(h.length))
	binary.BigEndian.PutUint64(b[24:], h.sum)
	copy(b[32:], h.fp[:])
	copy(b[64:], h.key[:])
	copy(b[104:], h.writer[:])
	binary.BigEndian.PutUint64(b[headerSumAt:], crc64nvme.Checksum(b[:headerSumAt]))
}

// decode reads b, which may hold anything of any length.
func (h *header) decode(b []byte) error {
	if len(b) < headerSize || string(b[:8]) != headerMagic {
		return errHeaderMagic
	}
	if binary.BigEndian.Uint64(b[headerSumAt:]) != crc64nvme.Checksum(b[:headerSumAt]) {
		return errHeaderSum
	}
	if v := binary.BigEndian.Uint16(b[8:]); v != headerVersion {
		return fmt.Errorf("%w: header version %d, this one reads %d", errHeaderVersion, v, headerVersion)
	}
	if f := binary.BigEndian.Uint16(b[10:]); f != 0 {
		return fmt.Errorf("%w: header flags %#x are not known", errHeaderVersion, f)
	}
	h.length = int64(binary.BigEndian.Uint64(b[16:]))
	if n := binary.BigEndian.Uint32(b[12:]); n != headerSize || h.length <= 0 || h.length > block.BlockBytesMax {
		return fmt.Errorf("%w: header length %d, block length %d", errHeaderField, n, h.length)
	}
	h.sum = binary.BigEndian.Uint64(b[24:])
	copy(h.fp[:], b[32:])
	copy(h.key[:], b[64:])
	copy(h.writer[:], b[104:])
	return nil
}

// check says how a header differs from what the file's place promises.
func (h *header) check(fp block.Fingerprint, key block.Key, length int) error {
	switch {
	case h.fp != fp:
		return fmt.Errorf("%w: namespace %s", errHeaderField, h.fp)
	case h.key != key:
		return fmt.Errorf("%w: key %s", errHeaderField, h.key)
	case h.length != int64(length):
		return fmt.Errorf("%w: block length %d, want %d", errHeaderField, h.length, length)
	}
	return nil
}

// fileSize is the length of a block's file.
func fileSize(length int) int64 { return headerSize + padded(length) }

func padded(length int) int64 { return (int64(length) + headerSize - 1) &^ (headerSize - 1) }
