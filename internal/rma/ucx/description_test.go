package ucx

import (
	"bytes"
	"testing"

	"github.com/terrace-kv/terrace/internal/rma"
)

func packed(t testing.TB, d description) []byte {
	t.Helper()
	b, err := d.pack()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestDescription(t *testing.T) {
	want := description{size: 1 << 40, worker: []byte("an address")}
	b := packed(t, want)
	if got, err := parseDescription(b); err != nil || got.size != want.size || !bytes.Equal(got.worker, want.worker) {
		t.Fatalf("%+v, %v", got, err)
	}
	for i := range 8 * len(b) {
		bad := bytes.Clone(b)
		bad[i/8] ^= 1 << (i % 8)
		if d, err := parseDescription(bad); err == nil {
			t.Errorf("with bit %d other: %+v", i, d)
		}
	}
	for _, d := range []description{{}, {size: 1}, {worker: []byte("x")}} {
		if _, err := parseDescription(packed(t, d)); err == nil {
			t.Errorf("%+v was taken", d)
		}
	}
	if _, err := (description{1, make([]byte, rma.DescriptionMax)}).pack(); err == nil {
		t.Error("a description that is too long was made")
	}
}

func FuzzDescription(f *testing.F) {
	f.Add(packed(f, description{1 << 30, []byte("an address")}))
	f.Add([]byte("TRUX"))
	f.Fuzz(func(t *testing.T, b []byte) {
		d, err := parseDescription(b)
		if err != nil {
			return
		}
		if again := packed(t, d); !bytes.Equal(again, b) {
			t.Errorf("%x parsed and packed is %x", b, again)
		}
	})
}
