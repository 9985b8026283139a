package wire

import (
	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/core"
	"github.com/tinylib/msgp/msgp"
)

// NewRequest is request, load_tiers, store_tiers, max_load_tokens,
// max_offload_tokens, remote_decoder, kv_request_id, peer_role, peer_host,
// peer_port, peer_request_id. A tier filter is nil, or an array of medium and
// locality by turns. Clients of before there were peers leave out what follows
// remote_decoder.
type NewRequest struct {
	Request string
	Params  core.Params
}

// Append encodes.
func (m *NewRequest) Append(b []byte) []byte {
	b = msgp.AppendArrayHeader(b, requestFields)
	b = msgp.AppendString(b, m.Request)
	b = appendFilters(b, m.Params.LoadTiers)
	b = appendFilters(b, m.Params.StoreTiers)
	b = msgp.AppendInt64(b, m.Params.MaxLoadTokens)
	b = msgp.AppendInt64(b, m.Params.MaxOffloadTokens)
	b = msgp.AppendBool(b, m.Params.RemoteDecoder)
	b = msgp.AppendString(b, m.Params.KVRequestID)
	b = msgp.AppendUint8(b, uint8(m.Params.Peer))
	b = msgp.AppendString(b, m.Params.PeerHost)
	b = msgp.AppendUint32(b, uint32(m.Params.PeerPort))
	return msgp.AppendString(b, m.Params.PeerRequestID)
}

// Fields of a NewRequest, and of one without peers.
const requestFields, requestFieldsOld = 11, 6

// Decode overwrites m.
func (m *NewRequest) Decode(b []byte) error {
	d := open("new_request", b, requestFieldsOld)
	m.Request = d.id(m.Request)
	m.Params = core.Params{LoadTiers: d.filters("load_tiers"), StoreTiers: d.filters("store_tiers"),
		MaxLoadTokens: d.int("max_load_tokens"), MaxOffloadTokens: d.int("max_offload_tokens"),
		RemoteDecoder: d.bool("remote_decoder")}
	if d.fields == requestFieldsOld || d.err != nil {
		return d.close()
	}
	if d.fields < requestFields {
		d.malformed("", "%d fields, want %d", d.fields, requestFields)
	}
	d.exact = d.fields == requestFields
	p := &m.Params
	p.KVRequestID = string(d.str("kv_request_id", 0, KVRequestIDMax))
	p.Peer = core.PeerRole(d.uint("peer_role", uint64(core.PeerAssume)))
	p.PeerHost = string(d.str("peer_host", 0, PeerHostMax))
	p.PeerPort = int(d.uint("peer_port", 65535))
	p.PeerRequestID = string(d.str("peer_request_id", 0, KVRequestIDMax))
	return d.close()
}

// Lookup is request, peek, wait_ms, counts (a uint32 for each group: how many
// keys it has) and keys, group after group.
type Lookup struct {
	Request string
	Peek    bool
	WaitMS  uint32
	Keys    [][]block.Key // one list a group, in prefix order

	all []block.Key // what Decode cuts Keys from
}

// Append encodes.
func (m *Lookup) Append(b []byte) []byte {
	b = msgp.AppendArrayHeader(b, 5)
	b = msgp.AppendString(b, m.Request)
	b = msgp.AppendBool(b, m.Peek)
	b = msgp.AppendUint32(b, m.WaitMS)
	b = msgp.AppendBytesHeader(b, uint32(4*len(m.Keys)))
	n := 0
	for _, keys := range m.Keys {
		b = be.AppendUint32(b, uint32(len(keys)))
		n += len(keys)
	}
	b = msgp.AppendBytesHeader(b, uint32(n*block.KeySize))
	for _, keys := range m.Keys {
		for i := range keys {
			b = append(b, keys[i][:]...)
		}
	}
	return b
}

// Decode overwrites m; Keys is cut from memory that the next Decode reuses.
func (m *Lookup) Decode(b []byte) error {
	d := open("lookup", b, 5)
	m.Request = d.id(m.Request)
	m.Peek = d.bool("peek")
	m.WaitMS = uint32(d.uint("wait_ms", WaitMSMax))
	counts := d.records("counts", 4, block.GroupsMax)
	m.all = d.keys("keys", LookupKeysMax, m.all)
	m.Keys = sized(m.Keys, len(counts)/4)
	rest := m.all
	for i := range m.Keys {
		n := be.Uint32(counts[4*i:])
		if uint64(n) > uint64(len(rest)) {
			d.malformed("counts", "more keys than there are")
			n = 0
		}
		m.Keys[i], rest = rest[:n:n], rest[n:]
	}
	if len(rest) > 0 {
		d.malformed("counts", "%d keys belong to no group", len(rest))
	}
	return d.close()
}

// LookupReply is tokens, final, groups (for each group three uint32: how many
// verdicts, first, how many leases), verdicts, leases.
type LookupReply struct{ core.Answer }

// Append encodes.
func (m *LookupReply) Append(b []byte) []byte {
	b = msgp.AppendArrayHeader(b, 5)
	b = msgp.AppendUint64(b, uint64(m.Tokens))
	b = msgp.AppendBool(b, m.Final)
	b = msgp.AppendBytesHeader(b, uint32(judgedSize*len(m.Groups)))
	verdicts, leases := 0, 0
	for i := range m.Groups {
		g := &m.Groups[i]
		b = be.AppendUint32(b, uint32(len(g.Verdicts)))
		b = be.AppendUint32(b, uint32(g.First))
		b = be.AppendUint32(b, uint32(len(g.Leases)))
		verdicts += len(g.Verdicts)
		leases += len(g.Leases)
	}
	b = msgp.AppendBytesHeader(b, uint32(verdicts))
	for i := range m.Groups {
		for _, v := range m.Groups[i].Verdicts {
			b = append(b, byte(v))
		}
	}
	b = msgp.AppendBytesHeader(b, uint32(leases*leaseSize))
	for i := range m.Groups {
		b = appendLeaseRecords(b, m.Groups[i].Leases)
	}
	return b
}

// Decode overwrites m, in the memory that it has.
func (m *LookupReply) Decode(b []byte) error {
	d := open("lookup_reply", b, 5)
	m.Tokens = int64(d.uint("tokens", 1<<62))
	m.Final = d.bool("final")
	groups := d.records("groups", judgedSize, block.GroupsMax)
	verdicts := d.records("verdicts", 1, LookupKeysMax)
	leases := d.records("leases", leaseSize, LookupKeysMax)
	m.Groups = sized(m.Groups, len(groups)/judgedSize)
	for i := range m.Groups {
		g, r := &m.Groups[i], groups[i*judgedSize:]
		judged, first, leased := be.Uint32(r), be.Uint32(r[4:]), be.Uint32(r[8:])
		if uint64(judged) > uint64(len(verdicts)) || uint64(leased) > uint64(len(leases)/leaseSize) ||
			uint64(first)+uint64(leased) > uint64(judged) {
			d.malformed("groups", "more than there is")
			judged, first, leased = 0, 0, 0
		}
		g.First = int(first)
		g.Verdicts = sized(g.Verdicts, int(judged))
		for j := range g.Verdicts {
			g.Verdicts[j] = core.Verdict(verdicts[j])
		}
		g.Leases = d.cutLeases(leases, int(leased), g.Leases)
		verdicts, leases = verdicts[judged:], leases[int(leased)*leaseSize:]
	}
	if len(verdicts) > 0 || len(leases) > 0 {
		d.malformed("groups", "%d verdicts and %d leases belong to no group", len(verdicts), len(leases)/leaseSize)
	}
	return d.close()
}

// Reserve is request, group, first, keys.
type Reserve struct {
	Request string
	Group   uint32
	First   uint32 // index of the first key in the request's list for the group
	Keys    []block.Key
}

// Append encodes.
func (m *Reserve) Append(b []byte) []byte {
	b = msgp.AppendArrayHeader(b, 4)
	b = msgp.AppendString(b, m.Request)
	b = msgp.AppendUint32(b, m.Group)
	b = msgp.AppendUint32(b, m.First)
	return appendKeys(b, m.Keys)
}

// Decode overwrites m, in the memory that it has.
func (m *Reserve) Decode(b []byte) error {
	d := open("reserve", b, 4)
	m.Request = d.id(m.Request)
	m.Group = uint32(d.uint("group", block.GroupsMax-1))
	m.First = uint32(d.uint("first", 1<<31-1))
	m.Keys = d.keys("keys", ReserveKeysMax, m.Keys)
	return d.close()
}

// ReserveReply is grants, one a key.
type ReserveReply struct{ Grants []core.Grant }

// Append encodes.
func (m *ReserveReply) Append(b []byte) []byte {
	b = msgp.AppendArrayHeader(b, 1)
	b = msgp.AppendBytesHeader(b, uint32(len(m.Grants)*grantSize))
	for i := range m.Grants {
		g := &m.Grants[i]
		b = append(b, byte(g.Status))
		b = be.AppendUint32(b, uint32(g.Slot))
		b = be.AppendUint32(b, g.Gen)
		b = be.AppendUint64(b, uint64(g.Slot.Offset()))
	}
	return b
}

// Decode overwrites m, in the memory that it has.
func (m *ReserveReply) Decode(b []byte) error {
	d := open("reserve_reply", b, 1)
	v := d.records("grants", grantSize, ReserveKeysMax)
	m.Grants = sized(m.Grants, len(v)/grantSize)
	for i := range m.Grants {
		r := v[i*grantSize:]
		m.Grants[i] = core.Grant{Status: core.GrantStatus(r[0]), Slot: core.Slot(be.Uint32(r[1:])), Gen: be.Uint32(r[5:])}
		d.offset("grants", m.Grants[i].Slot, be.Uint64(r[9:]))
	}
	return d.close()
}

// Commit is request, fills.
type Commit struct {
	Request string
	Fills   []core.Fill
}

// Append encodes.
func (m *Commit) Append(b []byte) []byte {
	b = msgp.AppendArrayHeader(b, 2)
	b = msgp.AppendString(b, m.Request)
	b = msgp.AppendBytesHeader(b, uint32(len(m.Fills)*fillSize))
	for i := range m.Fills {
		f := &m.Fills[i]
		b = be.AppendUint32(b, uint32(f.Slot))
		b = be.AppendUint32(b, f.Gen)
		if f.HasSum {
			b = be.AppendUint64(append(b, 1), f.Sum)
		} else {
			b = be.AppendUint64(append(b, 0), 0)
		}
	}
	return b
}

// Decode overwrites m, in the memory that it has.
func (m *Commit) Decode(b []byte) error {
	d := open("commit", b, 2)
	m.Request = d.id(m.Request)
	v := d.records("fills", fillSize, FillsMax)
	m.Fills = sized(m.Fills, len(v)/fillSize)
	for i := range m.Fills {
		r := v[i*fillSize:]
		f := core.Fill{Slot: core.Slot(be.Uint32(r)), Gen: be.Uint32(r[4:]), Sum: be.Uint64(r[9:])}
		switch {
		case r[8] == 1:
			f.HasSum = true
		case r[8] != 0 || f.Sum != 0:
			d.malformed("fills", "has_sum is %d and the sum %d in entry %d", r[8], f.Sum, i)
		}
		m.Fills[i] = f
	}
	return d.close()
}

// Abort is request, refs: of each fill its slot and generation.
type Abort struct {
	Request string
	Fills   []core.Fill
}

// Append encodes.
func (m *Abort) Append(b []byte) []byte {
	b = msgp.AppendArrayHeader(b, 2)
	b = msgp.AppendString(b, m.Request)
	b = msgp.AppendBytesHeader(b, uint32(len(m.Fills)*refSize))
	for i := range m.Fills {
		b = be.AppendUint32(b, uint32(m.Fills[i].Slot))
		b = be.AppendUint32(b, m.Fills[i].Gen)
	}
	return b
}

// Decode overwrites m, in the memory that it has.
func (m *Abort) Decode(b []byte) error {
	d := open("abort", b, 2)
	m.Request = d.id(m.Request)
	v := d.records("refs", refSize, FillsMax)
	m.Fills = sized(m.Fills, len(v)/refSize)
	for i := range m.Fills {
		r := v[i*refSize:]
		m.Fills[i] = core.Fill{Slot: core.Slot(be.Uint32(r)), Gen: be.Uint32(r[4:])}
	}
	return d.close()
}

// FillReply is statuses, one an item. It answers commit, abort and unpin.
type FillReply struct{ Statuses []core.FillStatus }

// Append encodes.
func (m *FillReply) Append(b []byte) []byte {
	b = msgp.AppendArrayHeader(b, 1)
	b = msgp.AppendBytesHeader(b, uint32(len(m.Statuses)))
	for _, s := range m.Statuses {
		b = append(b, byte(s))
	}
	return b
}

// Decode overwrites m, in the memory that it has.
func (m *FillReply) Decode(b []byte) error {
	d := open("fill_reply", b, 1)
	v := d.records("statuses", 1, LookupKeysMax)
	m.Statuses = sized(m.Statuses, len(v))
	for i := range v {
		m.Statuses[i] = core.FillStatus(v[i])
	}
	return d.close()
}

// Keys is request, keys: the body of pin and of touch.
type Keys struct {
	Request string
	Keys    []block.Key
}

// Append encodes.
func (m *Keys) Append(b []byte) []byte {
	b = msgp.AppendArrayHeader(b, 2)
	b = msgp.AppendString(b, m.Request)
	return appendKeys(b, m.Keys)
}

// Decode overwrites m, in the memory that it has.
func (m *Keys) Decode(b []byte) error {
	d := open("pin_touch", b, 2)
	m.Request = d.id(m.Request)
	m.Keys = d.keys("keys", LookupKeysMax, m.Keys)
	return d.close()
}

// PinReply is leases, one a key; a zero one where the key is not a Hit.
type PinReply struct{ Leases []core.Lease }

// Append encodes.
func (m *PinReply) Append(b []byte) []byte {
	b = msgp.AppendArrayHeader(b, 1)
	b = msgp.AppendBytesHeader(b, uint32(len(m.Leases)*leaseSize))
	return appendLeaseRecords(b, m.Leases)
}

// Decode overwrites m, in the memory that it has.
func (m *PinReply) Decode(b []byte) error {
	d := open("pin_reply", b, 1)
	v := d.records("leases", leaseSize, LookupKeysMax)
	m.Leases = d.cutLeases(v, len(v)/leaseSize, m.Leases)
	return d.close()
}

// Unpin is request, refs: of each lease its slot and generation.
type Unpin struct {
	Request string
	Leases  []core.Lease
}

// Append encodes.
func (m *Unpin) Append(b []byte) []byte {
	b = msgp.AppendArrayHeader(b, 2)
	b = msgp.AppendString(b, m.Request)
	b = msgp.AppendBytesHeader(b, uint32(len(m.Leases)*refSize))
	for i := range m.Leases {
		b = be.AppendUint32(b, uint32(m.Leases[i].Slot))
		b = be.AppendUint32(b, m.Leases[i].Gen)
	}
	return b
}

// Decode overwrites m, in the memory that it has.
func (m *Unpin) Decode(b []byte) error {
	d := open("unpin", b, 2)
	m.Request = d.id(m.Request)
	v := d.records("refs", refSize, LookupKeysMax)
	m.Leases = sized(m.Leases, len(v)/refSize)
	for i := range m.Leases {
		r := v[i*refSize:]
		m.Leases[i] = core.Lease{Slot: core.Slot(be.Uint32(r)), Gen: be.Uint32(r[4:])}
	}
	return d.close()
}

// Finish is request.
type Finish struct{ Request string }

// Append encodes.
func (m *Finish) Append(b []byte) []byte {
	return msgp.AppendString(msgp.AppendArrayHeader(b, 1), m.Request)
}

// Decode overwrites m.
func (m *Finish) Decode(b []byte) error {
	d := open("finish", b, 1)
	m.Request = d.id(m.Request)
	return d.close()
}

// Flush is request, wait_ms.
type Flush struct {
	Request string
	WaitMS  uint32
}

// Append encodes.
func (m *Flush) Append(b []byte) []byte {
	b = msgp.AppendString(msgp.AppendArrayHeader(b, 2), m.Request)
	return msgp.AppendUint32(b, m.WaitMS)
}

// Decode overwrites m.
func (m *Flush) Decode(b []byte) error {
	d := open("flush", b, 2)
	m.Request = d.id(m.Request)
	m.WaitMS = uint32(d.uint("wait_ms", WaitMSMax))
	return d.close()
}

// FlushReply is done, cascaded, failed.
type FlushReply struct{ core.Flushed }

// Append encodes.
func (m *FlushReply) Append(b []byte) []byte {
	b = msgp.AppendBool(msgp.AppendArrayHeader(b, 3), m.Done)
	return msgp.AppendUint64(msgp.AppendUint64(b, uint64(m.Cascaded)), uint64(m.Failed))
}

// Decode overwrites m.
func (m *FlushReply) Decode(b []byte) error {
	d := open("flush_reply", b, 3)
	m.Flushed = core.Flushed{Done: d.bool("done"), Cascaded: int(d.uint("cascaded", 1<<62)), Failed: int(d.uint("failed", 1<<62))}
	return d.close()
}

// Reset is wait_ms.
type Reset struct{ WaitMS uint32 }

// Append encodes.
func (m *Reset) Append(b []byte) []byte {
	return msgp.AppendUint32(msgp.AppendArrayHeader(b, 1), m.WaitMS)
}

// Decode overwrites m.
func (m *Reset) Decode(b []byte) error {
	d := open("reset", b, 1)
	m.WaitMS = uint32(d.uint("wait_ms", WaitMSMax))
	return d.close()
}

// ResetReply is done: false says that I/O is still in flight after wait_ms.
type ResetReply struct{ Done bool }

// Append encodes.
func (m *ResetReply) Append(b []byte) []byte {
	return msgp.AppendBool(msgp.AppendArrayHeader(b, 1), m.Done)
}

// Decode overwrites m.
func (m *ResetReply) Decode(b []byte) error {
	d := open("reset_reply", b, 1)
	m.Done = d.bool("done")
	return d.close()
}

// StatusReply is json: the node's account of itself.
type StatusReply struct{ JSON []byte }

// Append encodes.
func (m *StatusReply) Append(b []byte) []byte {
	return msgp.AppendBytes(msgp.AppendArrayHeader(b, 1), m.JSON)
}

// Decode overwrites m, in the memory that it has.
func (m *StatusReply) Decode(b []byte) error {
	d := open("status_reply", b, 1)
	m.JSON = append(m.JSON[:0], d.records("json", 1, FrameMax)...)
	return d.close()
}
