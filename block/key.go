package block

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/bits"
)

// Sizes of keys, in bytes.
const (
	HashSize    = 32           // a block hash as stored; shorter ones are zero-padded
	HashSizeMin = 16           // truncation below 128 bits is refused
	KeySize     = HashSize + 4 // hash and group index
)

// Key names one block within a namespace: a 32-byte block hash followed by the
// KV group index as big-endian uint32. Equal keys mean equal bytes only within
// one namespace.
type Key [KeySize]byte

// NewKey builds a key from a block hash of HashSizeMin to HashSize bytes. A
// shorter hash is zero-padded; the namespace carries the hash length, so that
// padded and full hashes never meet.
func NewKey(hash []byte, group uint32) (Key, error) {
	var k Key
	if len(hash) < HashSizeMin || len(hash) > HashSize {
		return k, fmt.Errorf("block hash has %d bytes, want %d to %d", len(hash), HashSizeMin, HashSize)
	}
	copy(k[:], hash)
	binary.BigEndian.PutUint32(k[HashSize:], group)
	return k, nil
}

// Group is the KV group index of the key.
func (k *Key) Group() uint32 { return binary.BigEndian.Uint32(k[HashSize:]) }

// String is the key as 72 lower-case hex digits, which is also its file name.
func (k Key) String() string { return hex.EncodeToString(k[:]) }

// ParseKey reads what String wrote. Upper-case digits are refused, so that one
// key has one name.
func ParseKey(s string) (Key, error) {
	var k Key
	if len(s) != 2*KeySize {
		return k, fmt.Errorf("block key has %d characters, want %d", len(s), 2*KeySize)
	}
	for i := range len(s) {
		if c := s[i]; c >= 'A' && c <= 'F' {
			return k, fmt.Errorf("block key %q has upper-case digits", s)
		}
	}
	if _, err := hex.Decode(k[:], []byte(s)); err != nil {
		return k, fmt.Errorf("block key %q: %w", s, err)
	}
	return k, nil
}

// Mix folds the key and a salt into 64 bits for hash tables. It is not a
// cryptographic hash and its value is not stable between versions.
func (k *Key) Mix(salt uint64) uint64 {
	const c0, c1, c2 = 0x9e3779b97f4a7c15, 0xbf58476d1ce4e5b9, 0x94d049bb133111eb
	a := binary.LittleEndian.Uint64(k[0:]) ^ c0
	b := binary.LittleEndian.Uint64(k[8:]) ^ salt
	hi, lo := bits.Mul64(a, b^c1)
	h := hi ^ lo
	a = binary.LittleEndian.Uint64(k[16:]) ^ c1
	b = binary.LittleEndian.Uint64(k[24:]) ^ h
	hi, lo = bits.Mul64(a, b^c2)
	h ^= hi ^ lo
	hi, lo = bits.Mul64(h^uint64(binary.LittleEndian.Uint32(k[32:])), c2)
	return hi ^ lo
}
