package blockhead

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"testing"

	"github.com/minio/crc64nvme"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier/tiertest"
)

const headerSize = 4096

func sampleHeader() Header {
	h := Header{Key: tiertest.Key(7, 3), Length: 65536, Sum: 0x0123456789abcdef}
	for i := range h.NS {
		h.NS[i] = byte(i)
	}
	for i := range h.Writer {
		h.Writer[i] = byte(0xf0 + i)
	}
	return h
}

// The bytes on disk are a promise; docs/storage-format.md has them too.
func TestHeaderGolden(t *testing.T) {
	b := make([]byte, headerSize)
	h := sampleHeader()
	h.Encode(b)
	want := "5445525241434542" + "0001" + "0000" + "00001000" + "0000000000010000" + "0123456789abcdef" +
		"000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f" +
		"538454127b096493" + "0000000000000007" + "00000000000000000000000000000000" + "00000003" + "00000000" +
		"f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"
	if got := hex.EncodeToString(b[:120]); got != want {
		t.Errorf("header is\n%s, want\n%s", got, want)
	}
	if !bytes.Equal(b[120:headerSize-8], make([]byte, headerSize-8-120)) {
		t.Error("the rest is not zero")
	}
	if got := binary.BigEndian.Uint64(b[headerSize-8:]); got != crc64nvme.Checksum(b[:headerSize-8]) || got != 0xb2c9a8979bc4983f {
		t.Errorf("checksum is %#x", got)
	}
}

func TestHeaderDecode(t *testing.T) {
	b := make([]byte, headerSize)
	h := sampleHeader()
	h.Encode(b)
	var got Header
	if err := got.Decode(b); err != nil || got != h {
		t.Fatalf("round trip: %+v, %v", got, err)
	}
	for i := range b { // a wrong byte anywhere is found
		b[i] ^= 0x20
		if err := got.Decode(b); err == nil {
			t.Errorf("byte %d is wrong and nobody noticed", i)
		}
		b[i] ^= 0x20
	}
	for n := range headerSize {
		if got.Decode(b[:n]) == nil {
			t.Fatalf("%d bytes are a header", n)
		}
	}
	sign := func() { binary.BigEndian.PutUint64(b[headerSize-8:], crc64nvme.Checksum(b[:headerSize-8])) }
	for _, tt := range []struct {
		at   int
		val  byte
		want error
	}{{9, 2, ErrVersion}, {10, 0x80, ErrVersion}, {12, 1, ErrField}, {16, 0xff, ErrField}} {
		h.Encode(b)
		b[tt.at] = tt.val
		sign()
		if err := got.Decode(b); !errors.Is(err, tt.want) {
			t.Errorf("byte %d is %#x: %v, want %v", tt.at, tt.val, err, tt.want)
		}
	}
	h.Encode(b)
	if err := got.Decode(b); err != nil {
		t.Fatal(err)
	}
	if err := got.Check(h.NS, h.Key, 65536); err != nil {
		t.Error(err)
	}
	if got.Check(block.Fingerprint{}, h.Key, 65536) == nil || got.Check(h.NS, tiertest.Key(8, 3), 65536) == nil || got.Check(h.NS, h.Key, 65537) == nil {
		t.Error("a header of another block passes")
	}
}

func FuzzHeader(f *testing.F) {
	b := make([]byte, headerSize)
	h := sampleHeader()
	h.Encode(b)
	f.Add(b, false)
	f.Add(b[:100], true)
	f.Add([]byte(Magic), true)
	f.Fuzz(func(t *testing.T, b []byte, sign bool) {
		if sign && len(b) >= headerSize {
			b = bytes.Clone(b)
			copy(b, Magic)
			binary.BigEndian.PutUint64(b[headerSize-8:], crc64nvme.Checksum(b[:headerSize-8]))
		}
		var h Header
		if h.Decode(b) != nil {
			return
		}
		if h.Length <= 0 || h.Length > block.BlockBytesMax {
			t.Errorf("length %d passed", h.Length)
		}
		again := make([]byte, headerSize)
		h.Encode(again)
		var h2 Header
		if err := h2.Decode(again); err != nil || h2 != h {
			t.Errorf("%+v does not survive: %+v, %v", h, h2, err)
		}
	})
}
