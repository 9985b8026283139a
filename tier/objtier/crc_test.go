package objtier

import (
	"math/rand/v2"
	"testing"

	"github.com/minio/crc64nvme"
)

func TestCombine(t *testing.T) {
	for _, n := range []int{0, 1, 7, 255, 4096, 10_000, 1 << 20} {
		b := make([]byte, headSize+n)
		for i := range b {
			b[i] = byte(rand.Uint32())
		}
		s := newShift(int64(n))
		got := s.combine(crc64nvme.Checksum(b[:headSize]), crc64nvme.Checksum(b[headSize:]))
		if want := crc64nvme.Checksum(b); got != want {
			t.Errorf("%d bytes: %016x, want %016x", n, got, want)
		}
	}
}

func BenchmarkCombine(b *testing.B) {
	s := newShift(1 << 20)
	for b.Loop() {
		s.combine(0x0123456789abcdef, 0xfedcba9876543210)
	}
}
