package fstier

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

func sampleHeader() header {
	h := header{key: tiertest.Key(7, 3), length: 65536, sum: 0x0123456789abcdef}
	for i := range h.fp {
		h.fp[i] = byte(i)
	}
	for i := range h.writer {
		h.writer[i] = byte(0xf0 + i)
	}
	return h
}

// The bytes on disk are a promise; docs/storage-format.md has them too.
func TestHeaderGolden(t *testing.T) {
	b := make([]byte, headerSize)
	h := sampleHeader()
	h.encode(b)
	want := "5445525241434542" + "0001" + "0000" + "00001000" + "0000000000010000" + "0123456789abcdef" +
		"000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f" +
		"538454127b096493" + "0000000000000007" + "00000000000000000000000000000000" + "00000003" + "00000000" +
		"f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"
	if got := hex.EncodeToString(b[:120]); got != want {
		t.Errorf("header is\n%s, want\n%s", got, want)
	}
	if !bytes.Equal(b[120:headerSumAt], make([]byte, headerSumAt-120)) {
		t.Error("the rest is not zero")
	}
	if got := binary.BigEndian.Uint64(b[headerSumAt:]); got != crc64nvme.Checksum(b[:headerSumAt]) || got != 0xb2c9a8979bc4983f {
		t.Errorf("checksum is %#x", got)
	}
}

func TestHeaderDecode(t *testing.T) {
	b := make([]byte, headerSize)
	h := sampleHeader()
	h.encode(b)
	var got header
	if err := got.decode(b); err != nil || got != h {
		t.Fatalf("round trip: %+v, %v", got, err)
	}
	for i := range b { // a wrong byte anywhere is found
		b[i] ^= 0x20
		if err := got.decode(b); err == nil {
			t.Errorf("byte %d is wrong and nobody noticed", i)
		}
		b[i] ^= 0x20
	}
	for n := range headerSize {
		if got.decode(b[:n]) == nil {
			t.Fatalf("%d bytes are a header", n)
		}
	}
	sign := func() { binary.BigEndian.PutUint64(b[headerSumAt:], crc64nvme.Checksum(b[:headerSumAt])) }
	for _, tt := range []struct {
		at   int
		val  byte
		want error
	}{{9, 2, errHeaderVersion}, {10, 0x80, errHeaderVersion}, {12, 1, errHeaderField}, {16, 0xff, errHeaderField}} {
		h.encode(b)
		b[tt.at] = tt.val
		sign()
		if err := got.decode(b); !errors.Is(err, tt.want) {
			t.Errorf("byte %d is %#x: %v, want %v", tt.at, tt.val, err, tt.want)
		}
	}
	h.encode(b)
	if err := got.decode(b); err != nil {
		t.Fatal(err)
	}
	if err := got.check(h.fp, h.key, 65536); err != nil {
		t.Error(err)
	}
	if got.check(block.Fingerprint{}, h.key, 65536) == nil || got.check(h.fp, tiertest.Key(8, 3), 65536) == nil || got.check(h.fp, h.key, 65537) == nil {
		t.Error("a header of another block passes")
	}
}

func FuzzHeader(f *testing.F) {
	b := make([]byte, headerSize)
	h := sampleHeader()
	h.encode(b)
	f.Add(b, false)
	f.Add(b[:100], true)
	f.Add([]byte(headerMagic), true)
	f.Fuzz(func(t *testing.T, b []byte, sign bool) {
		if sign && len(b) >= headerSize {
			b = bytes.Clone(b)
			copy(b, headerMagic)
			binary.BigEndian.PutUint64(b[headerSumAt:], crc64nvme.Checksum(b[:headerSumAt]))
		}
		var h header
		if h.decode(b) != nil {
			return
		}
		if h.length <= 0 || h.length > block.BlockBytesMax {
			t.Errorf("length %d passed", h.length)
		}
		again := make([]byte, headerSize)
		h.encode(again)
		var h2 header
		if err := h2.decode(again); err != nil || h2 != h {
			t.Errorf("%+v does not survive: %+v, %v", h, h2, err)
		}
	})
}

func FuzzUsage(f *testing.F) {
	f.Add(encodeUsage(1<<30, usageClean, [16]byte{1}, [16]byte{2}))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		if bound, ok := decodeUsage(b, [16]byte{1}); bound < 0 || (ok && len(b) < usageSize) {
			t.Errorf("bound %d, %v", bound, ok)
		}
	})
}

func TestUsageDecode(t *testing.T) {
	boot, other := [16]byte{1}, [16]byte{2}
	for _, tt := range []struct {
		name  string
		b     []byte
		boot  [16]byte
		bound int64
		ok    bool
	}{
		{"this boot", encodeUsage(77, 0, boot, other), boot, 77, true},
		{"another boot", encodeUsage(77, 0, boot, other), other, 77, false},
		{"another boot, closed in order", encodeUsage(77, usageClean, boot, other), other, 77, true},
		{"unknown flag", encodeUsage(77, 4, boot, other), boot, 0, false},
		{"negative", encodeUsage(-1, 0, boot, other), boot, 0, false},
		{"short", encodeUsage(77, 0, boot, other)[:63], boot, 0, false},
	} {
		if bound, ok := decodeUsage(tt.b, tt.boot); ok != tt.ok || (ok && bound != tt.bound) {
			t.Errorf("%s: %d, %v", tt.name, bound, ok)
		}
	}
	b := encodeUsage(77, 0, boot, other)
	for i := range b {
		b[i] ^= 1
		if _, ok := decodeUsage(b, boot); ok {
			t.Errorf("byte %d is wrong and nobody noticed", i)
		}
		b[i] ^= 1
	}
}
