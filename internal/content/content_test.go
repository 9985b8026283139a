package content

import (
	"bytes"
	"testing"

	"github.com/terrace-kv/terrace/block"
)

func TestFillCheck(t *testing.T) {
	var fp block.Fingerprint
	var key block.Key
	for _, n := range []int{0, 1, 7, 8, 31, 32, 33, 100, 4096, 5000} {
		buf := make([]byte, n)
		Fill(fp, key, buf)
		if off := Check(fp, key, buf); off != -1 {
			t.Errorf("length %d: wrong at %d after Fill", n, off)
		}
		for i := range buf {
			buf[i] ^= 0x10
			if off := Check(fp, key, buf); off != i {
				t.Errorf("length %d: byte %d flipped, Check says %d", n, i, off)
			}
			buf[i] ^= 0x10
		}
	}
}

// A longer block starts with a shorter one's bytes, so that a cut shows as a
// cut and not as something foreign.
func TestFillPrefix(t *testing.T) {
	var fp block.Fingerprint
	var key block.Key
	long, short := make([]byte, 1000), make([]byte, 77)
	Fill(fp, key, long)
	Fill(fp, key, short)
	if !bytes.Equal(long[:77], short) {
		t.Error("content depends on the length")
	}
}

// Each byte of namespace and key, and the offset, changes the content.
func TestFillDepends(t *testing.T) {
	var fp block.Fingerprint
	var key block.Key
	buf := make([]byte, 64)
	Fill(fp, key, buf)
	if Check(fp, key, buf[8:]) == -1 {
		t.Error("content does not depend on the offset")
	}
	for i := range fp {
		f := fp
		f[i] = 1
		if Check(f, key, buf) != 0 {
			t.Errorf("content does not depend on byte %d of the fingerprint", i)
		}
	}
	for i := range key {
		k := key
		k[i] = 1
		if off := Check(fp, k, buf); off < 0 || off > 1 {
			t.Errorf("content does not depend on byte %d of the key", i)
		}
	}
}

func BenchmarkFill(b *testing.B) {
	buf := make([]byte, 1<<20)
	b.SetBytes(1 << 20)
	for b.Loop() {
		Fill(block.Fingerprint{}, block.Key{}, buf)
	}
}

func BenchmarkCheck(b *testing.B) {
	buf := make([]byte, 1<<20)
	Fill(block.Fingerprint{}, block.Key{}, buf)
	b.SetBytes(1 << 20)
	for b.Loop() {
		if Check(block.Fingerprint{}, block.Key{}, buf) != -1 {
			b.Fatal("wrong")
		}
	}
}
