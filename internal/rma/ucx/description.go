package ucx

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/terrace-kv/terrace/internal/rma"
)

// A description is, big-endian,
//
//	offset size
//	     0    4  magic "TRUX"
//	     4    4  version
//	     8    4  CRC-32C of all that follows
//	    12    8  bytes of the region
//	    20       address of the worker
//
// UCX does not bound what it reads of addresses: the checksum keeps damage from
// it, not malice.
const (
	magic       = "TRUX"
	version     = 1
	headBytes   = 20
	summedAfter = 12
)

var errDescription = errors.New("not a description of memory for UCX")

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// description is what a peer's region is reached with.
type description struct {
	size   uint64 // bytes
	worker []byte // address of the worker that serves it
}

// pack fails if d is longer than rma.DescriptionMax.
func (d description) pack() ([]byte, error) {
	n := headBytes + len(d.worker)
	if n > rma.DescriptionMax {
		return nil, fmt.Errorf("describe memory: %d bytes, at most %d", n, rma.DescriptionMax)
	}
	b := append(make([]byte, 0, n), magic...)
	b = binary.BigEndian.AppendUint32(b, version)
	b = append(b, 0, 0, 0, 0)
	b = binary.BigEndian.AppendUint64(b, d.size)
	b = append(b, d.worker...)
	binary.BigEndian.PutUint32(b[8:], crc32.Checksum(b[summedAfter:], castagnoli))
	return b, nil
}

// parseDescription gives parts of b, which must stay as it is.
func parseDescription(b []byte) (d description, err error) {
	if len(b) < headBytes || len(b) > rma.DescriptionMax || string(b[:4]) != magic {
		return d, errDescription
	}
	if v := binary.BigEndian.Uint32(b[4:]); v != version {
		return d, fmt.Errorf("%w: version %d, want %d", errDescription, v, version)
	}
	if crc32.Checksum(b[summedAfter:], castagnoli) != binary.BigEndian.Uint32(b[8:]) {
		return d, fmt.Errorf("%w: its checksum is wrong", errDescription)
	}
	d.size, d.worker = binary.BigEndian.Uint64(b[12:]), b[headBytes:]
	if d.size == 0 || len(d.worker) == 0 {
		return description{}, fmt.Errorf("%w: %d bytes at an address of %d", errDescription, d.size, len(d.worker))
	}
	return d, nil
}
