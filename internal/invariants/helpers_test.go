package invariants

import "testing"

func TestCloseChecker(t *testing.T) {
	panics := func(f func()) (p bool) {
		defer func() { p = recover() != nil }()
		f()
		return
	}
	var c CloseChecker
	if panics(func() { c.AssertOpen("x"); c.Close("x") }) {
		t.Fatal("the first close panicked")
	}
	if got := panics(func() { c.Close("x") }); got != Enabled {
		t.Fatalf("second close panicked: %v, want %v", got, Enabled)
	}
	if got := panics(func() { c.AssertOpen("x") }); got != Enabled {
		t.Fatalf("use after close panicked: %v, want %v", got, Enabled)
	}
}

func TestPoison(t *testing.T) {
	b := []byte{1, 2, 3}
	Poison(b)
	if (b[0] == PoisonByte && b[2] == PoisonByte) != Enabled {
		t.Fatalf("poisoned: %v, enabled: %v", b, Enabled)
	}
}
