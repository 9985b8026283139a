package block

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strings"
	"testing"
)

func ptr(s string) *string { return &s }

func llama() Spec {
	return Spec{Model: "meta-llama/Llama-3.1-8B", DType: "bfloat16", Layout: "NHD", HashAlgorithm: "sha256", HashLength: 32,
		Groups: []Group{{Kind: KindFull, TokensPerBlock: 16, BlockBytes: 2 << 20}}}
}

func mustNamespace(t testing.TB, s Spec) *Namespace {
	t.Helper()
	n, err := NewNamespace(s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// The fingerprints are part of every format. If one changes here, nothing that
// was stored before is found again.
func TestFingerprintGolden(t *testing.T) {
	full := llama()
	full.Revision, full.Adapter, full.HashSeed, full.Salt, full.Epoch = ptr("0e9e39f"), ptr("sql-lora"), ptr("0"), ptr("tenant-7"), ptr("2")
	full.Ranks = &Ranks{TensorParallel: 4, PipelineParallel: 2, ContextParallel: 1, Rank: 5}
	full.Groups = append(full.Groups, Group{Kind: KindWindow, TokensPerBlock: 32, WindowBlocks: 128, BlockBytes: 65536})
	for _, c := range []struct {
		name, want string
		spec       Spec
	}{
		{"plain", "3f2c0f4767794fb7fb00d4b065202d98f2138191a07e2b1d4ef329aaa22d34fb", llama()},
		{"full", "7ff391ad0696f8ec3526fd8bc116356e3004fe02abd940c93407e9b7d8526896", full},
	} {
		n := mustNamespace(t, c.spec)
		if got := n.Fingerprint().String(); got != c.want {
			t.Errorf("%s: fingerprint is %s, was %s", c.name, got, c.want)
		}
		back, err := ParseNamespace(n.JSON())
		if err != nil || back.Fingerprint() != n.Fingerprint() || !reflect.DeepEqual(back.Spec(), c.spec) {
			t.Errorf("%s: namespace.json does not come back: %v", c.name, err)
		}
	}
}

// Rows B080 to B092: what differs in meaning differs in fingerprint, and Diff
// names it.
func TestEveryFieldCounts(t *testing.T) {
	mods := map[string]func(*Spec){
		"model":          func(s *Spec) { s.Model += "x" },
		"revision":       func(s *Spec) { s.Revision = ptr("x") },
		"dtype":          func(s *Spec) { s.DType = "fp8" },
		"layout":         func(s *Spec) { s.Layout = "HND" },
		"groups":         func(s *Spec) { s.Groups[0].BlockBytes++ },
		"ranks":          func(s *Spec) { s.Ranks = &Ranks{2, 1, 1, 1} },
		"adapter":        func(s *Spec) { s.Adapter = ptr("x") },
		"hash_algorithm": func(s *Spec) { s.HashAlgorithm = "xxh3" },
		"hash_length":    func(s *Spec) { s.HashLength = 16 },
		"hash_seed":      func(s *Spec) { s.HashSeed = ptr("x") },
		"salt":           func(s *Spec) { s.Salt = ptr("x") },
		"epoch":          func(s *Spec) { s.Epoch = ptr("x") },
	}
	if got, want := len(mods), reflect.TypeFor[Spec]().NumField(); got != want {
		t.Fatalf("%d of %d fields are tested", got, want)
	}
	seen := map[Fingerprint]string{mustNamespace(t, llama()).Fingerprint(): "none"}
	for name, mod := range mods {
		s := llama()
		mod(&s)
		n := mustNamespace(t, s)
		if other, ok := seen[n.Fingerprint()]; ok {
			t.Errorf("%s and %s have one fingerprint", name, other)
		}
		seen[n.Fingerprint()] = name
		want := name
		if name == "groups" {
			want = "groups[0].block_bytes"
		}
		if d := Diff(llama(), s); !reflect.DeepEqual(d, []string{want}) {
			t.Errorf("diff of %s: %v", name, d)
		}
	}
	for want, mod := range map[string]func(*Spec){
		"groups":                     func(s *Spec) { s.Groups = append(s.Groups, s.Groups[0]) },
		"groups[0].kind":             func(s *Spec) { s.Groups[0].Kind = KindWindow },
		"groups[0].window_blocks":    func(s *Spec) { s.Groups[0].WindowBlocks = 7 },
		"groups[0].tokens_per_block": func(s *Spec) { s.Groups[0].TokensPerBlock++ },
	} {
		s := llama()
		if mod(&s); !reflect.DeepEqual(Diff(llama(), s), []string{want}) {
			t.Errorf("diff of %s: %v", want, Diff(llama(), s))
		}
	}
}

func TestAbsentIsNotEmpty(t *testing.T) {
	a, b := llama(), llama()
	b.Salt = ptr("")
	if mustNamespace(t, a).Fingerprint() == mustNamespace(t, b).Fingerprint() {
		t.Error("an absent salt is an empty one")
	}
}

func TestNamespaceIsACopy(t *testing.T) {
	s := llama()
	s.Salt = ptr("a")
	n := mustNamespace(t, s)
	*s.Salt, s.Groups[0].BlockBytes = "b", 1
	if *n.Spec().Salt != "a" || n.BlockBytes(0) != 2<<20 || n.BlockBytes(7) != 0 {
		t.Error("the caller can change a namespace")
	}
}

func TestValidateReportsAllFaults(t *testing.T) {
	s := Spec{HashLength: 8, Groups: []Group{{Kind: "x"}, {Kind: KindFull, TokensPerBlock: 1, BlockBytes: 1, WindowBlocks: 1}}, Salt: ptr(strings.Repeat("x", 5000))}
	_, err := NewNamespace(s)
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{"model", "dtype", "layout", "hash_algorithm", "hash_length", "groups[0].kind", "groups[0].tokens_per_block",
		"groups[0].block_bytes", "groups[1].window_blocks", "salt"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%s is not named in: %v", want, err)
		}
	}
}

func TestKey(t *testing.T) {
	if _, err := NewKey(make([]byte, 15), 0); err == nil {
		t.Error("a hash of 120 bits was taken")
	}
	if _, err := NewKey(make([]byte, 33), 0); err == nil {
		t.Error("a hash of 264 bits was taken")
	}
	k, err := NewKey(bytes.Repeat([]byte{0xab}, 16), 0x01020304)
	if err != nil || k.Group() != 0x01020304 || k.String() != strings.Repeat("ab", 16)+strings.Repeat("00", 16)+"01020304" {
		t.Errorf("%v %v", k, err)
	}
}

func FuzzParseKey(f *testing.F) {
	f.Add(Key{1, 2, 3}.String())
	f.Add(strings.Repeat("A", 72))
	f.Fuzz(func(t *testing.T, s string) {
		if k, err := ParseKey(s); err == nil && k.String() != s {
			t.Errorf("%q names the key of %q", s, k)
		}
	})
}

func FuzzParseNamespace(f *testing.F) {
	b, _ := json.Marshal(llama())
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := ParseNamespace(b)
		if err != nil {
			return
		}
		back, err := ParseNamespace(n.JSON())
		if err != nil || back.Fingerprint() != n.Fingerprint() {
			t.Errorf("%q does not come back: %v", b, err)
		}
	})
}

func BenchmarkMix(b *testing.B) {
	k := Key{1, 2, 3}
	var x uint64
	for i := range b.N {
		x ^= k.Mix(uint64(i))
	}
	_ = x
}
