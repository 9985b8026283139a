package client

import (
	"encoding/json"
	"fmt"
	"math"
	"net/netip"
	"strings"
	"unicode/utf8"

	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/internal/wire"
	"github.com/terrace-kv/terrace/tier"
)

// PeerRole is what a request wants of another node.
type PeerRole = core.PeerRole

// Peer roles.
const (
	PeerNone   = core.PeerNone   // nothing
	PeerProbe  = core.PeerProbe  // remote_kv_source: ask what it has, and load that
	PeerAssume = core.PeerAssume // remote_prefiller: it has every block, or will have
)

// ParseTransferParams reads a request's kv_transfer_params, as decoded from JSON;
// nil is none.
//
//	remote_decoder    {kv_request_id}
//	remote_kv_source  {kv_request_id, remote_host, remote_port}
//	remote_prefiller  {kv_request_id, remote_host, remote_port}
//	kv_load_tiers, kv_store_tiers           [{medium, locality}, …]
//	max_offload_tokens, max_load_tokens     int
//
// What is wrong with a role is an error, which matches ErrInvalid and names the
// field: a request that misses its hand-over should say so. Of the roles,
// remote_decoder and remote_kv_source may be combined, and no others. What is
// wrong with a filter or a cap is a warning, and that filter or cap is as if it
// were not there. Fields that are not in this list are other systems'. A nil is
// taken for a field that is not there.
func ParseTransferParams(m map[string]any) (p Params, warnings []string, err error) {
	p = NoLimits()
	warn := func(field, format string, a ...any) {
		warnings = append(warnings, field+" "+fmt.Sprintf(format, a...))
	}
	if m["remote_prefiller"] != nil {
		for _, other := range []string{"remote_decoder", "remote_kv_source"} {
			if m[other] != nil {
				return NoLimits(), nil, fmt.Errorf("%w: remote_prefiller and %s cannot be combined", ErrInvalid, other)
			}
		}
	}
	if f := m["remote_decoder"]; f != nil {
		r := role{name: "remote_decoder"}
		p.RemoteDecoder, p.KVRequestID = true, r.id(f)
		if r.err != nil {
			return NoLimits(), nil, r.err
		}
	}
	for as, name := range map[PeerRole]string{PeerProbe: "remote_kv_source", PeerAssume: "remote_prefiller"} {
		f := m[name]
		if f == nil {
			continue
		}
		r := role{name: name}
		p.Peer, p.PeerRequestID, p.PeerHost, p.PeerPort = as, r.id(f), r.host(f), r.port(f)
		if r.err != nil {
			return NoLimits(), nil, r.err
		}
	}
	p.LoadTiers = tierFilters(m["kv_load_tiers"], "kv_load_tiers", warn)
	p.StoreTiers = tierFilters(m["kv_store_tiers"], "kv_store_tiers", warn)
	limit := func(name string, to *int64) {
		f := m[name]
		if f == nil {
			return
		}
		if n, ok := whole(f); !ok || n < 0 {
			warn(name, "is %s, want a whole number of at least 0: ignored", shown(f))
		} else {
			*to = n
		}
	}
	limit("max_offload_tokens", &p.MaxOffloadTokens)
	limit("max_load_tokens", &p.MaxLoadTokens)
	return p, warnings, nil
}

// role reads one role's fields. The first fault sticks.
type role struct {
	name string
	err  error
}

func (r *role) fail(field, format string, a ...any) {
	if r.err == nil {
		if field != "" {
			field = "." + field
		}
		r.err = fmt.Errorf("%w: %s%s %s", ErrInvalid, r.name, field, fmt.Sprintf(format, a...))
	}
}

func (r *role) field(v any, field string) any {
	m, ok := v.(map[string]any)
	if !ok {
		r.fail("", "is %s, want an object", shown(v))
		return nil
	}
	f := m[field]
	if f == nil {
		r.fail(field, "is missing")
	}
	return f
}

func (r *role) text(v any, field string, most int) string {
	f := r.field(v, field)
	s, ok := f.(string)
	switch {
	case r.err != nil:
	case !ok:
		r.fail(field, "is %s, want a string", shown(f))
	case len(s) == 0 || len(s) > most:
		r.fail(field, "has %d bytes, want 1 to %d", len(s), most)
	case !utf8.ValidString(s):
		r.fail(field, "is not UTF-8")
	}
	return s
}

func (r *role) id(v any) string { return r.text(v, "kv_request_id", wire.KVRequestIDMax) }

// host is a name or an address. IPv6 may have its brackets.
func (r *role) host(v any) string {
	s := r.text(v, "remote_host", wire.PeerHostMax)
	host := s
	if inner, ok := strings.CutPrefix(s, "["); ok && strings.HasSuffix(inner, "]") {
		host = strings.TrimSuffix(inner, "]")
		if ip, err := netip.ParseAddr(host); err != nil || !ip.Is6() {
			r.fail("remote_host", "is %q: only an IPv6 address has brackets", s)
		}
	}
	if _, err := netip.ParseAddr(host); err != nil && strings.ContainsAny(host, "[]:/ \t\r\n\x00") {
		r.fail("remote_host", "is %q, want a name or an address without a port", s)
	}
	return host
}

func (r *role) port(v any) int {
	f := r.field(v, "remote_port")
	n, ok := whole(f)
	if r.err == nil && (!ok || n < 1 || n > 65535) {
		r.fail("remote_port", "is %s, want 1 to 65535", shown(f))
	}
	return int(n)
}

// whole is a number of any type that decoders of JSON make.
func whole(v any) (int64, bool) {
	switch n := v.(type) {
	case int:
		return int64(n), true
	case int32:
		return int64(n), true
	case int64:
		return n, true
	case uint32:
		return int64(n), true
	case uint64:
		return int64(n), n <= math.MaxInt64
	case float64:
		return int64(n), n == math.Trunc(n) && math.Abs(n) < 1<<53
	case json.Number:
		i, err := n.Int64()
		return i, err == nil
	}
	return 0, false
}

// tierFilters reads kv_load_tiers or kv_store_tiers. An entry that is invalid is
// left out, and if all are, so is the filter.
func tierFilters(v any, name string, warn func(field, format string, a ...any)) []TierFilter {
	if v == nil {
		return nil
	}
	list, ok := v.([]any)
	if maps, is := v.([]map[string]any); is {
		for _, m := range maps {
			list = append(list, m)
		}
		ok = true
	}
	if !ok {
		warn(name, "is %s, want a list: ignored", shown(v))
		return nil
	}
	out := []TierFilter{}
	seen := map[TierFilter]bool{}
	for i, e := range list {
		var f TierFilter
		m, ok := e.(map[string]any)
		if ok {
			f.Medium, ok = oneOf(m["medium"], tier.MediumCPU, tier.MediumStorage)
		}
		if ok {
			f.Locality, ok = oneOf(m["locality"], tier.LocalityLocal, tier.LocalityRemote)
		}
		if !ok {
			warn(fmt.Sprintf("%s[%d]", name, i), "is %s, want {\"medium\": \"cpu\"|\"storage\", \"locality\": \"local\"|\"remote\"}: left out", shown(e))
			continue
		}
		if !seen[f] {
			seen[f] = true
			out = append(out, f)
		}
	}
	if len(out) == 0 && len(list) > 0 {
		warn(name, "has no valid entry: ignored")
		return nil
	}
	return out
}

func oneOf(v any, words ...string) (string, bool) {
	if v == nil {
		return "", true
	}
	s, ok := v.(string)
	for _, w := range words {
		if ok && strings.EqualFold(s, w) {
			return w, true
		}
	}
	return "", false
}

// shown is a value for a message.
func shown(v any) string {
	if v == nil {
		return "missing"
	}
	s := fmt.Sprint(v)
	if t, ok := v.(string); ok {
		s = fmt.Sprintf("%q", t)
	}
	if len(s) > 100 {
		s = strings.ToValidUTF8(s[:100], "") + "…"
	}
	return s
}
