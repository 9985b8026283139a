package block

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"sort"
	"strings"
)

// Limits on what a namespace may say.
const (
	GroupsMax     = 64
	BlockBytesMax = 1 << 30
	fieldBytesMax = 4096
)

// Kinds of KV group.
const (
	KindFull   = "full"   // full attention: the longest prefix counts
	KindWindow = "window" // sliding window: the last run of WindowBlocks counts
)

// Group describes one KV cache group of a model.
type Group struct {
	Kind           string `json:"kind"`                    // KindFull or KindWindow
	TokensPerBlock uint32 `json:"tokens_per_block"`        // > 0
	WindowBlocks   uint32 `json:"window_blocks,omitempty"` // > 0 for KindWindow, else 0
	BlockBytes     uint64 `json:"block_bytes"`             // length of one block, > 0
}

// Ranks says which part of a sharded model the bytes belong to. It is absent
// from a Spec whose layout is canonical, that is, independent of sharding.
type Ranks struct {
	TensorParallel   uint32 `json:"tensor_parallel"`
	PipelineParallel uint32 `json:"pipeline_parallel"`
	ContextParallel  uint32 `json:"context_parallel"`
	Rank             uint32 `json:"rank"`
}

// Spec lists everything that gives the bytes of a block their meaning. A nil
// pointer means absent, and absent is not the same as empty.
type Spec struct {
	Model         string  `json:"model"`
	Revision      *string `json:"revision,omitempty"`
	DType         string  `json:"dtype"`
	Layout        string  `json:"layout"`
	Groups        []Group `json:"groups"`
	Ranks         *Ranks  `json:"ranks,omitempty"`
	Adapter       *string `json:"adapter,omitempty"`
	HashAlgorithm string  `json:"hash_algorithm"`
	HashLength    uint32  `json:"hash_length"` // bytes of a block hash before padding
	HashSeed      *string `json:"hash_seed,omitempty"`
	Salt          *string `json:"salt,omitempty"`
	Epoch         *string `json:"epoch,omitempty"` // changed by the engine when weights change in place
}

// field is one typed value of a Spec. Tags are part of the format: never
// reuse or renumber one.
type field struct {
	tag   uint16
	name  string
	value []byte
}

// fields returns the present fields in tag order.
func (s *Spec) fields() []field {
	var out []field
	add := func(tag uint16, name string, v []byte) { out = append(out, field{tag, name, v}) }
	str := func(tag uint16, name, v string) { add(tag, name, []byte(v)) }
	opt := func(tag uint16, name string, v *string) {
		if v != nil {
			str(tag, name, *v)
		}
	}
	str(1, "model", s.Model)
	opt(2, "revision", s.Revision)
	str(3, "dtype", s.DType)
	str(4, "layout", s.Layout)
	groups := binary.BigEndian.AppendUint32(nil, uint32(len(s.Groups)))
	for _, g := range s.Groups {
		groups = binary.BigEndian.AppendUint32(groups, uint32(len(g.Kind)))
		groups = append(groups, g.Kind...)
		groups = binary.BigEndian.AppendUint32(groups, g.TokensPerBlock)
		groups = binary.BigEndian.AppendUint32(groups, g.WindowBlocks)
		groups = binary.BigEndian.AppendUint64(groups, g.BlockBytes)
	}
	add(5, "groups", groups)
	if r := s.Ranks; r != nil {
		var b []byte
		for _, v := range []uint32{r.TensorParallel, r.PipelineParallel, r.ContextParallel, r.Rank} {
			b = binary.BigEndian.AppendUint32(b, v)
		}
		add(6, "ranks", b)
	}
	opt(7, "adapter", s.Adapter)
	str(8, "hash_algorithm", s.HashAlgorithm)
	add(9, "hash_length", binary.BigEndian.AppendUint32(nil, s.HashLength))
	opt(10, "hash_seed", s.HashSeed)
	opt(11, "salt", s.Salt)
	opt(12, "epoch", s.Epoch)
	sort.Slice(out, func(i, j int) bool { return out[i].tag < out[j].tag })
	return out
}

// Validate reports every fault of the Spec at once, each by field name.
func (s *Spec) Validate() error {
	var errs []error
	bad := func(format string, a ...any) { errs = append(errs, fmt.Errorf("namespace: "+format, a...)) }
	for _, f := range []struct{ name, v string }{
		{"model", s.Model}, {"dtype", s.DType}, {"layout", s.Layout}, {"hash_algorithm", s.HashAlgorithm},
	} {
		if f.v == "" {
			bad("%s is empty; it must be given, because equal block sizes do not make bytes compatible", f.name)
		}
	}
	for _, f := range s.fields() {
		if len(f.value) > fieldBytesMax {
			bad("%s has %d bytes, at most %d are allowed", f.name, len(f.value), fieldBytesMax)
		}
	}
	if s.HashLength < HashSizeMin || s.HashLength > HashSize {
		bad("hash_length is %d, want %d to %d bytes", s.HashLength, HashSizeMin, HashSize)
	}
	if len(s.Groups) == 0 || len(s.Groups) > GroupsMax {
		bad("groups has %d entries, want 1 to %d", len(s.Groups), GroupsMax)
	}
	for i, g := range s.Groups {
		switch {
		case g.Kind == KindFull && g.WindowBlocks != 0:
			bad("groups[%d].window_blocks is %d for kind %q, want 0", i, g.WindowBlocks, g.Kind)
		case g.Kind == KindWindow && g.WindowBlocks == 0:
			bad("groups[%d].window_blocks is 0 for kind %q, want at least 1", i, g.Kind)
		case g.Kind != KindFull && g.Kind != KindWindow:
			bad("groups[%d].kind is %q, want %q or %q", i, g.Kind, KindFull, KindWindow)
		}
		if g.TokensPerBlock == 0 {
			bad("groups[%d].tokens_per_block is 0, want at least 1", i)
		}
		if g.BlockBytes == 0 || g.BlockBytes > BlockBytesMax {
			bad("groups[%d].block_bytes is %d, want 1 to %d", i, g.BlockBytes, BlockBytesMax)
		}
	}
	if r := s.Ranks; r != nil {
		if n := uint64(r.TensorParallel) * uint64(r.PipelineParallel) * uint64(r.ContextParallel); n == 0 || uint64(r.Rank) >= n {
			bad("ranks.rank is %d of %d ranks; absent ranks mean a canonical layout", r.Rank, n)
		}
	}
	return errors.Join(errs...)
}

// Fingerprint identifies a namespace: SHA-256 over its encoded fields.
type Fingerprint [sha256.Size]byte

// String is the fingerprint as 64 lower-case hex digits, which is also the
// name of the namespace's directory on every tier.
func (f Fingerprint) String() string { return hex.EncodeToString(f[:]) }

// Namespace is a validated, immutable Spec with its fingerprint. Use one value
// by pointer; it is safe for concurrent use.
type Namespace struct {
	spec Spec
	fp   Fingerprint
	json []byte
}

// NewNamespace validates a deep copy of the Spec and folds it to a
// fingerprint. It is the only encoder of namespaces: every tier and protocol
// uses it.
func NewNamespace(s Spec) (*Namespace, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	j, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encode namespace: %w", err)
	}
	n := &Namespace{json: append(j, '\n'), fp: s.fingerprint()}
	// The copy must not share pointers or slices with the caller's.
	if err := json.Unmarshal(j, &n.spec); err != nil {
		return nil, fmt.Errorf("copy namespace: %w", err)
	}
	if n.spec.fingerprint() != n.fp {
		return nil, errors.New("namespace: a field is not valid UTF-8")
	}
	return n, nil
}

// ParseNamespace reads the JSON that JSON returned. Unknown fields are
// refused: what they mean could change what the bytes mean.
func ParseNamespace(b []byte) (*Namespace, error) {
	d := json.NewDecoder(strings.NewReader(string(b)))
	d.DisallowUnknownFields()
	var s Spec
	if err := d.Decode(&s); err != nil {
		return nil, fmt.Errorf("parse namespace: %w", err)
	}
	return NewNamespace(s)
}

// fingerprint hashes a domain string and then each present field as tag
// (uint16), length (uint32) and value, big-endian, in tag order.
func (s *Spec) fingerprint() Fingerprint {
	h := sha256.New()
	h.Write([]byte("terrace.namespace.v1\x00"))
	var head [6]byte
	for _, f := range s.fields() {
		binary.BigEndian.PutUint16(head[:], f.tag)
		binary.BigEndian.PutUint32(head[2:], uint32(len(f.value)))
		h.Write(head[:])
		h.Write(f.value)
	}
	return Fingerprint(h.Sum(nil))
}

// Fingerprint identifies the namespace.
func (n *Namespace) Fingerprint() Fingerprint { return n.fp }

// Spec returns the fields. The caller must not change what they point to.
func (n *Namespace) Spec() Spec { return n.spec }

// JSON is the namespace in clear, as kept in namespace.json. The caller must
// not change it.
func (n *Namespace) JSON() []byte { return n.json }

// BlockBytes is the length of a block of the group, or 0 for a group that the
// namespace does not have.
func (n *Namespace) BlockBytes(group uint32) int {
	if int64(group) >= int64(len(n.spec.Groups)) {
		return 0
	}
	return int(n.spec.Groups[group].BlockBytes)
}

// Diff names the fields in which two specs differ, in tag order, as Validate
// names them; of groups that are as many those of each group.
func Diff(a, b Spec) []string {
	fa, fb := map[string]string{}, map[string]string{}
	var names []string
	for _, f := range a.fields() {
		fa[f.name] = string(f.value)
		names = append(names, f.name)
	}
	for _, f := range b.fields() {
		fb[f.name] = string(f.value)
		if _, ok := fa[f.name]; !ok {
			names = append(names, f.name)
		}
	}
	var out []string
	for _, n := range names {
		va, oka := fa[n]
		vb, okb := fb[n]
		switch {
		case oka == okb && va == vb:
		case n == "groups" && len(a.Groups) == len(b.Groups):
			for i := range a.Groups {
				out = append(out, a.Groups[i].diff(fmt.Sprintf("groups[%d].", i), b.Groups[i])...)
			}
		default:
			out = append(out, n)
		}
	}
	return out
}

func (g Group) diff(prefix string, h Group) (out []string) {
	for _, f := range []struct {
		name    string
		differs bool
	}{
		{"kind", g.Kind != h.Kind}, {"tokens_per_block", g.TokensPerBlock != h.TokensPerBlock},
		{"window_blocks", g.WindowBlocks != h.WindowBlocks}, {"block_bytes", g.BlockBytes != h.BlockBytes},
	} {
		if f.differs {
			out = append(out, prefix+f.name)
		}
	}
	return out
}
