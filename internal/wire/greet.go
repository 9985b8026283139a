package wire

import (
	"fmt"

	"github.com/terrace-kv/terrace/block"
	"github.com/tinylib/msgp/msgp"
)

// Token lets a worker attach to its engine's session.
type Token [TokenSize]byte

// Versions are the first three fields of a hello and of an attach, in every
// version of the protocol: the magic, and the lowest and highest version that
// the client speaks.
type Versions struct {
	Min, Max uint32
}

func (v *Versions) append(b []byte) []byte {
	b = msgp.AppendString(b, Magic)
	b = msgp.AppendUint32(b, v.Min)
	return msgp.AppendUint32(b, v.Max)
}

func (v *Versions) read(d *decoder) {
	*v = Versions{}
	if string(d.str("magic", len(Magic), len(Magic))) != Magic {
		d.malformed("magic", "not %q", Magic)
	}
	v.Min = uint32(d.uint("version_min", 1<<32-1))
	v.Max = uint32(d.uint("version_max", 1<<32-1))
}

// Negotiate reads the versions of a hello or attach and picks the highest
// common one. It looks at nothing else, so that a newer client hears about
// versions whatever its hello has become.
func Negotiate(body []byte) (version uint32, err error) {
	d := open("hello", body, 3)
	d.exact = false
	var v Versions
	v.read(&d)
	if err := d.close(); err != nil {
		return 0, err
	}
	version = min(v.Max, VersionMax)
	if version < v.Min || version < VersionMin {
		return 0, &Error{Code: CodeVersion, Field: "hello.version", Message: fmt.Sprintf(
			"client speaks protocol versions %d to %d, node %d to %d; upgrade the older of the two", v.Min, v.Max, VersionMin, VersionMax)}
	}
	return version, nil
}

// Hello opens a session: magic, version_min, version_max, engine, name,
// expect, namespace.
//
// The namespace is an array of its own and, unlike all other fields, strict: a
// field that this version does not know must be nil, because it could change
// what bytes mean.
type Hello struct {
	Versions
	Engine string             // what the engine calls itself
	Name   string             // what the operator calls the namespace; empty: nothing
	Expect *block.Fingerprint // what an earlier session had; nil: nothing
	Spec   block.Spec
}

const specFields = 12

// Append encodes.
func (m *Hello) Append(b []byte) []byte {
	b = msgp.AppendArrayHeader(b, 7)
	b = m.Versions.append(b)
	b = msgp.AppendString(b, m.Engine)
	b = msgp.AppendString(b, m.Name)
	if m.Expect == nil {
		b = msgp.AppendNil(b)
	} else {
		b = msgp.AppendBytes(b, m.Expect[:])
	}
	s := &m.Spec
	b = msgp.AppendArrayHeader(b, specFields)
	b = msgp.AppendString(b, s.Model)
	b = appendOptional(b, s.Revision)
	b = msgp.AppendString(b, s.DType)
	b = msgp.AppendString(b, s.Layout)
	b = msgp.AppendBytesHeader(b, uint32(len(s.Groups)*groupSize))
	for _, g := range s.Groups {
		b = append(b, kindCode(g.Kind))
		b = be.AppendUint32(b, g.TokensPerBlock)
		b = be.AppendUint32(b, g.WindowBlocks)
		b = be.AppendUint64(b, g.BlockBytes)
	}
	if r := s.Ranks; r == nil {
		b = msgp.AppendNil(b)
	} else {
		b = msgp.AppendBytesHeader(b, ranksSize)
		for _, v := range []uint32{r.TensorParallel, r.PipelineParallel, r.ContextParallel, r.Rank} {
			b = be.AppendUint32(b, v)
		}
	}
	b = appendOptional(b, s.Adapter)
	b = msgp.AppendString(b, s.HashAlgorithm)
	b = msgp.AppendUint32(b, s.HashLength)
	b = appendOptional(b, s.HashSeed)
	b = appendOptional(b, s.Salt)
	return appendOptional(b, s.Epoch)
}

// Decode overwrites m. It does not judge the namespace: block.NewNamespace
// does.
func (m *Hello) Decode(b []byte) error {
	d := open("hello", b, 7)
	*m = Hello{}
	m.Versions.read(&d)
	m.Engine = string(d.str("engine", 0, NameMax))
	m.Name = string(d.str("name", 0, NameMax))
	if !d.null() {
		if v := d.exactly("expect", len(block.Fingerprint{})); v != nil {
			fp := block.Fingerprint(v)
			m.Expect = &fp
		}
	}
	m.readSpec(&d)
	return d.close()
}

func (m *Hello) readSpec(d *decoder) {
	if d.err != nil {
		return
	}
	n, rest, err := msgp.ReadArrayHeaderBytes(d.b)
	if !d.next("namespace", rest, err) {
		return
	}
	if n < specFields {
		d.malformed("namespace", "%d fields, want %d", n, specFields)
	}
	s := &m.Spec
	text := func(field string) string { return string(d.str(field, 0, SpecStringMax)) }
	s.Model = text("namespace.model")
	s.Revision = d.optional("namespace.revision")
	s.DType = text("namespace.dtype")
	s.Layout = text("namespace.layout")
	groups := d.records("namespace.groups", groupSize, block.GroupsMax)
	s.Groups = make([]block.Group, len(groups)/groupSize)
	for i := range s.Groups {
		r := groups[i*groupSize:]
		s.Groups[i] = block.Group{Kind: kindName(r[0]), TokensPerBlock: be.Uint32(r[1:]), WindowBlocks: be.Uint32(r[5:]), BlockBytes: be.Uint64(r[9:])}
	}
	if !d.null() {
		if r := d.exactly("namespace.ranks", ranksSize); r != nil {
			s.Ranks = &block.Ranks{TensorParallel: be.Uint32(r), PipelineParallel: be.Uint32(r[4:]),
				ContextParallel: be.Uint32(r[8:]), Rank: be.Uint32(r[12:])}
		}
	}
	s.Adapter = d.optional("namespace.adapter")
	s.HashAlgorithm = text("namespace.hash_algorithm")
	s.HashLength = uint32(d.uint("namespace.hash_length", 1<<32-1))
	s.HashSeed = d.optional("namespace.hash_seed")
	s.Salt = d.optional("namespace.salt")
	s.Epoch = d.optional("namespace.epoch")
	for i := uint32(specFields); i < n && d.err == nil; i++ {
		if !d.null() {
			d.fail(CodeNamespace, "namespace", "field %d is not known to this node, and it could change what the bytes mean; upgrade the node", i)
		}
	}
}

// Kinds of group on the wire. Others have no number and are refused by
// block.NewNamespace under the name that kindName gives them.
func kindCode(kind string) byte {
	switch kind {
	case block.KindFull:
		return 1
	case block.KindWindow:
		return 2
	}
	return 0
}

func kindName(code byte) string {
	switch code {
	case 1:
		return block.KindFull
	case 2:
		return block.KindWindow
	}
	return fmt.Sprintf("kind_%d", code)
}

// Geometry says where the blocks of a group lie: Stride bytes from one slot to
// the next, of which BlockBytes are the block.
type Geometry struct {
	Stride     uint64
	BlockBytes uint64
}

// Region is the part that the replies to hello and attach have in common:
// version, session, epoch, fingerprint, region_bytes, groups. The descriptor
// that it speaks of comes with the first byte of the reply.
type Region struct {
	Version     uint32
	Session     uint64
	Epoch       string // names the session among all of all nodes
	Fingerprint block.Fingerprint
	RegionBytes uint64
	Groups      []Geometry
}

func (m *Region) append(b []byte) []byte {
	b = msgp.AppendUint32(b, m.Version)
	b = msgp.AppendUint64(b, m.Session)
	b = msgp.AppendString(b, m.Epoch)
	b = msgp.AppendBytes(b, m.Fingerprint[:])
	b = msgp.AppendUint64(b, m.RegionBytes)
	b = msgp.AppendBytesHeader(b, uint32(len(m.Groups)*geometrySize))
	for _, g := range m.Groups {
		b = be.AppendUint64(b, g.Stride)
		b = be.AppendUint64(b, g.BlockBytes)
	}
	return b
}

func (m *Region) read(d *decoder) {
	*m = Region{}
	m.Version = uint32(d.uint("version", 1<<32-1))
	m.Session = d.uint("session", 1<<64-1)
	m.Epoch = string(d.str("epoch", 0, NameMax))
	if v := d.exactly("fingerprint", len(m.Fingerprint)); v != nil {
		m.Fingerprint = block.Fingerprint(v)
	}
	m.RegionBytes = d.uint("region_bytes", 1<<62)
	v := d.records("groups", geometrySize, block.GroupsMax)
	m.Groups = make([]Geometry, len(v)/geometrySize)
	for i := range m.Groups {
		r := v[i*geometrySize:]
		m.Groups[i] = Geometry{Stride: be.Uint64(r), BlockBytes: be.Uint64(r[8:])}
	}
}

// HelloReply is Region, then node, token and the limits of this node:
// frame_max, lookup_keys_max, reserve_keys_max, fills_max, requests_max,
// waits_max.
type HelloReply struct {
	Region
	Node   string // the node's version, for people
	Token  Token
	Limits Limits
}

// Limits are what a node allows. A client keeps to them; what goes beyond is
// refused call by call.
type Limits struct {
	FrameMax       uint32
	LookupKeysMax  uint32
	ReserveKeysMax uint32
	FillsMax       uint32
	RequestsMax    uint32 // unfinished requests of a session
	WaitsMax       uint32 // calls of a session that wait to be answered
}

func (l *Limits) fields() [6]*uint32 {
	return [...]*uint32{&l.FrameMax, &l.LookupKeysMax, &l.ReserveKeysMax, &l.FillsMax, &l.RequestsMax, &l.WaitsMax}
}

// Append encodes.
func (m *HelloReply) Append(b []byte) []byte {
	b = msgp.AppendArrayHeader(b, 14)
	b = m.Region.append(b)
	b = msgp.AppendString(b, m.Node)
	b = msgp.AppendBytes(b, m.Token[:])
	for _, v := range m.Limits.fields() {
		b = msgp.AppendUint32(b, *v)
	}
	return b
}

// Decode overwrites m.
func (m *HelloReply) Decode(b []byte) error {
	d := open("hello_reply", b, 14)
	*m = HelloReply{}
	m.Region.read(&d)
	m.Node = string(d.str("node", 0, NameMax))
	if v := d.exactly("token", TokenSize); v != nil {
		m.Token = Token(v)
	}
	for _, v := range m.Limits.fields() {
		*v = uint32(d.uint("limits", 1<<32-1))
	}
	return d.close()
}

// Attach opens a worker's connection: magic, version_min, version_max, token.
type Attach struct {
	Versions
	Token Token
}

// Append encodes.
func (m *Attach) Append(b []byte) []byte {
	b = msgp.AppendArrayHeader(b, 4)
	b = m.Versions.append(b)
	return msgp.AppendBytes(b, m.Token[:])
}

// Decode overwrites m.
func (m *Attach) Decode(b []byte) error {
	d := open("attach", b, 4)
	*m = Attach{}
	m.Versions.read(&d)
	if v := d.exactly("token", TokenSize); v != nil {
		m.Token = Token(v)
	}
	return d.close()
}

// AttachReply is Region alone.
type AttachReply struct{ Region }

// Append encodes.
func (m *AttachReply) Append(b []byte) []byte {
	return m.Region.append(msgp.AppendArrayHeader(b, 6))
}

// Decode overwrites m.
func (m *AttachReply) Decode(b []byte) error {
	d := open("attach_reply", b, 6)
	m.Region.read(&d)
	return d.close()
}
