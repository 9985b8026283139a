package objtier

import "math/bits"

// crc64Poly is the polynomial of CRC64-NVME, reflected.
const crc64Poly = 0x9a6c9329ac4bc9b5

// shift is the effect of n zero bytes on a CRC64-NVME register: a linear map
// over GF(2), one column a bit. It makes the checksum of two pieces from theirs.
type shift [64]uint64

// newShift makes the map for n bytes by squaring, in about 64·log n steps.
func newShift(n int64) shift {
	var power shift // one zero bit
	power[0] = crc64Poly
	for i := 1; i < 64; i++ {
		power[i] = 1 << (i - 1)
	}
	var out shift
	for i := range out {
		out[i] = 1 << i
	}
	for n *= 8; n > 0; n >>= 1 {
		if n&1 != 0 {
			out = power.after(&out)
		}
		power = power.after(&power)
	}
	return out
}

// apply is the map of x.
func (s *shift) apply(x uint64) (y uint64) {
	for ; x != 0; x &= x - 1 {
		y ^= s[bits.TrailingZeros64(x)]
	}
	return y
}

// after is s of o.
func (s *shift) after(o *shift) (out shift) {
	for i := range out {
		out[i] = s.apply(o[i])
	}
	return out
}

// combine is the CRC64-NVME of two pieces, the second of the shift's length,
// from those of each.
func (s *shift) combine(first, second uint64) uint64 { return s.apply(first) ^ second }
