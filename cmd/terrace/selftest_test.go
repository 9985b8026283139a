package main

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/admin"
	"github.com/terrace-kv/terrace/internal/config"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/memtier"
)

// closing is a tier that tells of its Close, and can be odd.
type closing struct {
	tier.Tier
	closed    int
	otherKeys bool // reads what nobody has stored, as with a key codec of its own
	otherSum  bool
}

func (c *closing) Close(ctx context.Context) error { c.closed++; return c.Tier.Close(ctx) }

func (c *closing) Read(ctx context.Context, ns *block.Namespace, items []tier.Item) {
	if c.otherKeys {
		items[0].Key[5] ^= 1
	}
	c.Tier.Read(ctx, ns, items)
	if c.otherSum {
		items[0].Sum++
	}
}

// forgetful never knows what it has.
type forgetful struct{ *memtier.Indexed }

func (forgetful) Known(_ *block.Namespace, _ []block.Key, out []tier.Presence) {
	for i := range out {
		out[i] = tier.Absent
	}
}

func faulty(op memtier.Op, f memtier.Fault) *memtier.Tier {
	return memtier.New(memtier.Options{Hook: func(_ context.Context, o memtier.Op, _ *block.Namespace, _ block.Key) memtier.Fault {
		if o == op {
			return f
		}
		return memtier.Fault{}
	}})
}

// A tier that stores and does not serve is told at its start, with one message,
// and closed; one that is sound keeps nothing of the test (B104).
func TestSelfTest(t *testing.T) {
	bad := errors.New("bad medium")
	good := memtier.New(memtier.Options{})
	passing := &tier.Error{Op: "read", Tier: "x", Class: tier.ClassRetryable, Err: bad}
	reads := 0
	for name, x := range map[string]struct {
		t    tier.Tier
		want string // of the error, or of the log after "log: "
	}{
		"sound":                    {good, ""},
		"sound, with an index":     {memtier.NewIndexed(memtier.Options{}), ""},
		"other keys in reads":      {&closing{Tier: memtier.New(memtier.Options{}), otherKeys: true}, "read the block that was just stored: block not found"},
		"index without it":         {forgetful{memtier.NewIndexed(memtier.Options{})}, "not in the index"},
		"probe without it":         {faulty(memtier.OpContains, memtier.Fault{Lie: true}), "is not found"},
		"probe fails":              {faulty(memtier.OpContains, memtier.Fault{Err: bad}), "ask for the block that was just stored: bad medium"},
		"read fails":               {faulty(memtier.OpRead, memtier.Fault{Err: bad}), "bad medium"},
		"reads other bytes":        {faulty(memtier.OpRead, memtier.Fault{Corrupt: true}), "other bytes"},
		"stores other bytes":       {faulty(memtier.OpWrite, memtier.Fault{Corrupt: true}), "other bytes"},
		"another checksum":         {&closing{Tier: memtier.New(memtier.Options{}), otherSum: true}, "another checksum"},
		"namespace cannot be open": {faulty(memtier.OpOpenNamespace, memtier.Fault{Err: bad}), "open a namespace: bad medium"},
		"reads at the third try": {memtier.New(memtier.Options{Hook: func(_ context.Context, o memtier.Op, _ *block.Namespace, _ block.Key) memtier.Fault {
			if o == memtier.OpRead {
				if reads++; reads < 3 {
					return memtier.Fault{Err: passing}
				}
			}
			return memtier.Fault{}
		}}), ""},
		"panics":        {&closing{}, "the tier panicked"},
		"takes nothing": {memtier.New(memtier.Options{Capacity: 100}), "log: did not take the block of its self-test"},
		"keeps it":      {faulty(memtier.OpDelete, memtier.Fault{Err: bad}), "log: stays in the tier"},
	} {
		t.Run(name, func(t *testing.T) {
			var log bytes.Buffer
			if c, ok := x.t.(*closing); ok && c.Tier == nil {
				c.Tier = panicking{memtier.New(memtier.Options{})}
			}
			under := &closing{Tier: x.t}
			var given tier.Tier = under
			if _, ok := x.t.(tier.Knower); ok {
				given = struct {
					*closing
					tier.Knower
				}{under, x.t.(tier.Knower)}
			}
			if o, ok := x.t.(tier.NamespaceOpener); ok && name == "namespace cannot be open" {
				given = struct {
					*closing
					tier.NamespaceOpener
				}{under, o}
			}
			err := selfTest(t.Context(), "x", given, slog.New(slog.NewTextHandler(&log, nil)))
			told, inLog := strings.CutPrefix(x.want, "log: ")
			switch {
			case x.want == "" || inLog:
				if err != nil || under.closed != 0 || inLog != strings.Contains(log.String(), "level=WARN") || !strings.Contains(log.String(), told) {
					t.Errorf("error %v, closed %d times, log %s", err, under.closed, log.String())
				}
			case err == nil || !strings.Contains(err.Error(), told) || strings.Contains(err.Error(), "\n") || under.closed != 1:
				t.Errorf("error %v, want one with %q; closed %d times", err, told, under.closed)
			}
		})
	}
	if s := good.Stats(); s.Blocks != 0 || s.UsedBytes != 0 {
		t.Errorf("left behind: %+v", s)
	}
}

type panicking struct{ tier.Tier }

func (panicking) Write(context.Context, *block.Namespace, []tier.Item) { panic("here") }

// A call that hangs does not hold up the start longer than its bound.
func TestSelfTestThatHangs(t *testing.T) {
	goOn := make(chan struct{})
	x := faulty(memtier.OpRead, memtier.Fault{Wait: goOn, Hang: true})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	began := time.Now()
	err := selfTest(ctx, "x", x, slog.New(slog.DiscardHandler))
	if err == nil || !strings.Contains(err.Error(), "has not returned") || time.Since(began) > 20*time.Second {
		t.Errorf("error %v after %v", err, time.Since(began))
	}
	close(goOn)
	for x.Contains(t.Context(), nil, nil, nil) == nil { // until it is closed after all
		time.Sleep(time.Millisecond)
	}
}

// The filesystem tier passes in a moment. What stays is the folder of the
// test's namespace, with its description and no block.
func TestSelfTestOfFS(t *testing.T) {
	s := newFSSettings().(*fsSettings)
	s.Root, s.MinFree = filepath.Join(t.TempDir(), "fs"), 0
	c := &config.Tier{Type: "fs", Name: "disk", Settings: s}
	for range 2 {
		x, err := openTier(t.Context(), c, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if err := selfTest(t.Context(), "disk", x, slog.New(slog.DiscardHandler)); err != nil {
			t.Fatal(err)
		}
		t.Logf("took %v", time.Since(began))
		if n := x.(tier.Statser).Stats().Blocks; n != 0 {
			t.Errorf("%d blocks are left", n)
		}
		if err := x.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	var files []string
	_ = filepath.WalkDir(s.Root, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && len(filepath.Base(filepath.Dir(path))) == 64 {
			files = append(files, filepath.Base(path))
		}
		return err
	})
	if len(files) != 1 || files[0] != "namespace.json" {
		t.Errorf("left behind: %q", files)
	}
}

// A tier that fails its test is like one that cannot be opened: it stops the
// start where it is required, and joins later where it is not.
func TestTierThatFailsItsSelfTest(t *testing.T) {
	sick := true
	var opened []*closing
	tierTypes["sick"] = tierType{
		settings: newFSSettings,
		info:     func(c *config.Tier) (tier.Info, string) { return tier.Info{Name: c.Name}, "nowhere" },
		open: func(context.Context, *config.Tier, *slog.Logger) (tier.Tier, error) {
			x := &closing{Tier: memtier.New(memtier.Options{}), otherKeys: sick}
			opened = append(opened, x)
			return x, nil
		},
	}
	defer delete(tierTypes, "sick")
	c := &config.Config{Tiers: []config.Tier{{Type: "sick", Name: "x", Required: true}}}
	log := slog.New(slog.DiscardHandler)
	if _, err := openTiers(t.Context(), c, log); err == nil || !strings.Contains(err.Error(), "tiers.0: tier x: self-test: read the block") || opened[0].closed != 1 {
		t.Fatalf("required: %v", err)
	}
	c.Tiers[0].Required = false
	tiers, err := openTiers(t.Context(), c, log)
	if err != nil {
		t.Fatal(err)
	}
	if s := tiers[0].Tier.(tier.Statser).Stats(); s.Mode != admin.ModeNotOpen || !strings.Contains(s.ScanError, "self-test") {
		t.Errorf("status: %+v", s)
	}
	if err := closeTiers(t.Context(), tiers); err != nil {
		t.Error(err)
	}
	sick = false
	late := joinLate(&c.Tiers[0], errors.New("not yet"), time.Millisecond, log)
	<-late.over
	if late.tier() == nil {
		t.Error("has not joined")
	}
	if err := late.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
