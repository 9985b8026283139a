package client_test

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/terrace-kv/terrace/client"
)

func TestParseTransferParams(t *testing.T) {
	none := client.NoLimits()
	with := func(mod func(p *client.Params)) client.Params {
		p := none
		mod(&p)
		return p
	}
	for _, x := range []struct {
		text     string
		want     client.Params
		warnings string // begin of each, by commas
		err      string
	}{
		{text: `null`, want: none},
		{text: `{"other": {"a": 1}, "remote_decoder": null}`, want: none},
		{text: `{"remote_decoder": {"kv_request_id": "x", "remote_engine_id": 7}}`, want: with(func(p *client.Params) { p.RemoteDecoder, p.KVRequestID = true, "x" })},
		{text: `{"remote_prefiller": {"kv_request_id": "x", "remote_host": "10.0.0.1", "remote_port": 7301}}`, want: with(func(p *client.Params) {
			p.Peer, p.PeerRequestID, p.PeerHost, p.PeerPort = client.PeerAssume, "x", "10.0.0.1", 7301
		})},
		{text: `{"remote_kv_source": {"kv_request_id": "y", "remote_host": "[fd00::1]", "remote_port": 1}, "remote_decoder": {"kv_request_id": "x"}}`, want: with(func(p *client.Params) {
			p.RemoteDecoder, p.KVRequestID, p.Peer, p.PeerRequestID, p.PeerHost, p.PeerPort = true, "x", client.PeerProbe, "y", "fd00::1", 1
		})},
		{text: `{"remote_kv_source": {"kv_request_id": "y", "remote_host": "fd00::1", "remote_port": 65535}}`, want: with(func(p *client.Params) {
			p.Peer, p.PeerRequestID, p.PeerHost, p.PeerPort = client.PeerProbe, "y", "fd00::1", 65535
		})},

		{text: `{"remote_decoder": {"kv_request_id": "x"}, "remote_prefiller": {"kv_request_id": "x", "remote_host": "h", "remote_port": 1}}`, err: "remote_prefiller and remote_decoder cannot be combined"},
		{text: `{"remote_kv_source": {"kv_request_id": "x", "remote_host": "h", "remote_port": 1}, "remote_prefiller": {"kv_request_id": "x", "remote_host": "h", "remote_port": 1}}`, err: "remote_prefiller and remote_kv_source cannot be combined"},
		{text: `{"remote_decoder": true}`, err: "remote_decoder is true, want an object"},
		{text: `{"remote_decoder": {}}`, err: "remote_decoder.kv_request_id is missing"},
		{text: `{"remote_decoder": {"kv_request_id": 5}}`, err: "remote_decoder.kv_request_id is 5, want a string"},
		{text: `{"remote_decoder": {"kv_request_id": ""}}`, err: "remote_decoder.kv_request_id has 0 bytes"},
		{text: `{"remote_decoder": {"kv_request_id": "` + strings.Repeat("x", 257) + `"}}`, err: "remote_decoder.kv_request_id has 257 bytes"},
		{text: `{"remote_prefiller": {"kv_request_id": "x", "remote_port": 1}}`, err: "remote_prefiller.remote_host is missing"},
		{text: `{"remote_prefiller": {"kv_request_id": "x", "remote_host": "h:1", "remote_port": 1}}`, err: `remote_prefiller.remote_host is "h:1"`},
		{text: `{"remote_prefiller": {"kv_request_id": "x", "remote_host": "[h]", "remote_port": 1}}`, err: `remote_prefiller.remote_host is "[h]"`},
		{text: `{"remote_prefiller": {"kv_request_id": "x", "remote_host": "h"}}`, err: "remote_prefiller.remote_port is missing"},
		{text: `{"remote_prefiller": {"kv_request_id": "x", "remote_host": "h", "remote_port": "1"}}`, err: `remote_prefiller.remote_port is "1"`},
		{text: `{"remote_kv_source": {"kv_request_id": "x", "remote_host": "h", "remote_port": 0}}`, err: "remote_kv_source.remote_port is 0"},
		{text: `{"remote_kv_source": {"kv_request_id": "x", "remote_host": "h", "remote_port": 1.5}}`, err: "remote_kv_source.remote_port is 1.5"},
		{text: `{"remote_kv_source": {"kv_request_id": "x", "remote_host": "h", "remote_port": true}}`, err: "remote_kv_source.remote_port is true"},

		{text: `{"kv_load_tiers": []}`, want: with(func(p *client.Params) { p.LoadTiers = []client.TierFilter{} })},
		{text: `{"kv_store_tiers": [{"medium": "CPU"}, {"locality": "Remote", "medium": "storage"}, {"medium": "cpu"}, {}]}`, want: with(func(p *client.Params) {
			p.StoreTiers = []client.TierFilter{{Medium: "cpu"}, {Medium: "storage", Locality: "remote"}, {}}
		})},
		{text: `{"kv_load_tiers": [{"medium": "tape"}, 7, {"locality": "local"}]}`, warnings: "kv_load_tiers[0],kv_load_tiers[1]", want: with(func(p *client.Params) {
			p.LoadTiers = []client.TierFilter{{Locality: "local"}}
		})},
		{text: `{"kv_load_tiers": [{"medium": 1}]}`, warnings: "kv_load_tiers[0],kv_load_tiers has no valid entry", want: none},
		{text: `{"kv_store_tiers": "cpu"}`, warnings: "kv_store_tiers", want: none},
		{text: `{"max_load_tokens": 0, "max_offload_tokens": 4096}`, want: with(func(p *client.Params) { p.MaxLoadTokens, p.MaxOffloadTokens = 0, 4096 })},
		{text: `{"max_load_tokens": true}`, warnings: "max_load_tokens is true", want: none},
		{text: `{"max_load_tokens": -1}`, warnings: "max_load_tokens is -1", want: none},
		{text: `{"max_offload_tokens": 1.5}`, warnings: "max_offload_tokens is 1.5", want: none},
		{text: `{"max_offload_tokens": 1e300}`, warnings: "max_offload_tokens is 1e+300", want: none},
		{text: `{"max_offload_tokens": "5"}`, warnings: "max_offload_tokens", want: none},
	} {
		for _, numbers := range []bool{false, true} {
			d := json.NewDecoder(strings.NewReader(x.text))
			if numbers {
				d.UseNumber()
			}
			var m map[string]any
			if err := d.Decode(&m); err != nil {
				t.Fatalf("%s: %v", x.text, err)
			}
			got, warnings, err := client.ParseTransferParams(m)
			if x.err != "" {
				if !errors.Is(err, client.ErrInvalid) || !strings.Contains(err.Error(), x.err) || !reflect.DeepEqual(got, none) {
					t.Errorf("%s: %v, %+v; want ErrInvalid with %q", x.text, err, got, x.err)
				}
				continue
			}
			if err != nil || !reflect.DeepEqual(got, x.want) {
				t.Errorf("%s: %v\n%+v, want\n%+v", x.text, err, got, x.want)
			}
			var want []string
			if x.warnings != "" {
				want = strings.Split(x.warnings, ",")
			}
			for i, w := range want {
				if len(warnings) != len(want) || !numbers && !strings.HasPrefix(warnings[i], w) {
					t.Errorf("%s: warnings %q, want %q", x.text, warnings, want)
					break
				}
			}
			if len(want) == 0 && len(warnings) > 0 {
				t.Errorf("%s: warnings %q", x.text, warnings)
			}
		}
	}
}
