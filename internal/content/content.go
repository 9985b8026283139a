// Package content makes block bytes that prove themselves: every byte is a
// function of namespace, key and offset, so that a wrong, torn, shifted or
// foreign byte shows wherever it turns up. Tests, the tier suite and replay
// share it. It has no goroutines and no state.
//
// It is not a cryptographic function: it finds accidents, not forgeries.
package content

import (
	"encoding/binary"
	"math/bits"

	"github.com/terrace-kv/terrace/block"
)

// gamma is the step of splitmix64; the others are its multiples modulo 2^64.
const (
	gamma  = 0x9e3779b97f4a7c15
	gamma2 = 0x3c6ef372fe94f82a
	gamma3 = 0xdaa66d2c7ddf743f
	gamma4 = 0x78dde6e5fd29f054
)

// seed folds all of fingerprint and key into 64 bits.
func seed(fp *block.Fingerprint, key *block.Key) uint64 {
	h := uint64(gamma)
	fold := func(w uint64) {
		hi, lo := bits.Mul64(h^w, 0xbf58476d1ce4e5b9)
		h = mix(hi ^ lo)
	}
	for i := 0; i < len(fp); i += 8 {
		fold(binary.LittleEndian.Uint64(fp[i:]))
	}
	for i := 0; i < block.HashSize; i += 8 {
		fold(binary.LittleEndian.Uint64(key[i:]))
	}
	fold(uint64(key.Group()))
	return h
}

// mix is the finaliser of splitmix64.
func mix(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// Fill writes the content of a block into buf, from offset 0.
func Fill(fp block.Fingerprint, key block.Key, buf []byte) {
	s := seed(&fp, &key)
	b := buf
	for len(b) >= 32 {
		binary.LittleEndian.PutUint64(b[0:8], mix(s))
		binary.LittleEndian.PutUint64(b[8:16], mix(s+gamma))
		binary.LittleEndian.PutUint64(b[16:24], mix(s+gamma2))
		binary.LittleEndian.PutUint64(b[24:32], mix(s+gamma3))
		s += gamma4
		b = b[32:]
	}
	tail(s, b)
}

// tail writes the last bytes.
func tail(s uint64, b []byte) {
	var w [8]byte
	for len(b) > 0 {
		binary.LittleEndian.PutUint64(w[:], mix(s))
		b = b[copy(b, w[:]):]
		s += gamma
	}
}

// Check returns the offset of the first byte of buf that is not the block's
// content, or -1.
func Check(fp block.Fingerprint, key block.Key, buf []byte) int {
	s := seed(&fp, &key)
	b := buf
	for len(b) >= 32 {
		x := binary.LittleEndian.Uint64(b[0:8]) ^ mix(s)
		x |= binary.LittleEndian.Uint64(b[8:16]) ^ mix(s+gamma)
		x |= binary.LittleEndian.Uint64(b[16:24]) ^ mix(s+gamma2)
		x |= binary.LittleEndian.Uint64(b[24:32]) ^ mix(s+gamma3)
		if x != 0 {
			break
		}
		s += gamma4
		b = b[32:]
	}
	var want [32]byte
	n := min(len(b), len(want))
	tail(s, want[:n])
	for i := range n {
		if b[i] != want[i] {
			return len(buf) - len(b) + i
		}
	}
	return -1
}
