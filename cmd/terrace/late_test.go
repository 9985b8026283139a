package main

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/admin"
	"github.com/terrace-kv/terrace/internal/config"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/tiertest"
)

// A tier that cannot be opened at the start joins when it can, with the
// namespaces of engines that are there by then.
func TestTierJoinsLate(t *testing.T) {
	file := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s := newFSSettings().(*fsSettings)
	s.Root = filepath.Join(file, "fs")
	c := &config.Tier{Type: "fs", Name: "disk", Settings: s}
	_, err := openFS(t.Context(), c, slog.New(slog.DiscardHandler))
	if err == nil {
		t.Fatal("a file has a folder in it")
	}
	m := joinLate(c, err, time.Millisecond, slog.New(slog.DiscardHandler))
	defer func() {
		if err := m.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	ns := tiertest.Namespace(t, "m")
	items := []tier.Item{{Key: tiertest.Key(1, 1), Buf: tiertest.Buffer(t, ns.BlockBytes(1))}}
	tiertest.Fill(ns, &items[0])
	if err := m.OpenNamespace(t.Context(), ns); err != nil {
		t.Error(err)
	}
	m.Write(t.Context(), ns, items)
	if tier.CauseOf(items[0].Err) != tier.CauseUnavailable || m.Stats().Mode != admin.ModeNotOpen {
		t.Fatalf("write without a tier: %v, mode %q", items[0].Err, m.Stats().Mode)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	<-m.over
	tiertest.Fill(ns, &items[0])
	if m.Write(t.Context(), ns, items); items[0].Err != nil {
		t.Fatal(items[0].Err)
	}
	known := make([]tier.Presence, 1)
	m.Known(ns, []block.Key{items[0].Key}, known)
	if m.Read(t.Context(), ns, items); known[0] != tier.Present || tiertest.Check(ns, &items[0]) != nil {
		t.Errorf("known %v, read %v", known, items[0].Err)
	}
}
