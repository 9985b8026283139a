package fstier

import "testing"

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
