package main

import (
	"reflect"
	"slices"
	"testing"

	"github.com/terrace-kv/terrace/internal/config"
)

// Bounds of peers are what the settings say, and which have none is said here.
func TestPeerBounds(t *testing.T) {
	c, err := config.Load(config.Input{Socket: "/s", Env: []string{"TERRACE_PEERS_LISTEN=:7301", "TERRACE_PEERS_QUOTA_TOTAL=300MiB", "TERRACE_PEERS_ADDRESSES=7"}})
	if err != nil {
		t.Fatal(err)
	}
	b := options(c).Peers.Bounds
	if b.PinnedMax != 300<<20 || b.LinksMax != 7 {
		t.Errorf("%d bytes, %d addresses", b.PinnedMax, b.LinksMax)
	}
	var none []string
	for v, i := reflect.ValueOf(b), 0; i < v.NumField(); i++ {
		if v.Field(i).IsZero() {
			none = append(none, v.Type().Field(i).Name)
		}
	}
	if want := []string{"Node", "Boot", "Advertise", "DownBase", "DownMax", "EndedMax", "EndedFor"}; !slices.Equal(none, want) {
		t.Errorf("no setting for %v, want %v", none, want)
	}
}
