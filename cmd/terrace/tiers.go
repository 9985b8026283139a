package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/terrace-kv/terrace"
	"github.com/terrace-kv/terrace/internal/config"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/fstier"
)

// tierOpenTimeout bounds the opening of one tier, whose medium may hang.
const tierOpenTimeout = 30 * time.Second

// tierType is all there is to know of a type of tier: what can be set, and how
// it is opened.
type tierType struct {
	settings func() any
	open     func(ctx context.Context, c *config.Tier, log *slog.Logger) (tier.Tier, error)
	info     func(c *config.Tier) (info tier.Info, where string) // without opening it
}

var tierTypes = map[string]tierType{
	"fs":     {settings: newFSSettings, open: openFS, info: fsInfo},
	"object": {settings: newObjectSettings, open: openObject, info: objectInfo},
}

func configTypes() config.Types {
	types := config.Types{}
	for name, t := range tierTypes {
		types[name] = config.Type{Settings: t.settings}
	}
	return types
}

type fsSettings struct {
	Root     string      `yaml:"root" folder:"own" doc:"folder of the block files; one node uses it at a time, unless it is shared; default: terrace/fs in the user's cache folder"`
	Shared   bool        `yaml:"shared" doc:"several nodes use the folder, on several hosts too; all of them must say so"`
	NodeID   string      `yaml:"node_id" doc:"name of this node in a shared folder, by which it knows its own files after a restart; each node needs another; default: the name of the host"`
	Capacity config.Size `yaml:"capacity" zero:"unbounded" min:"64KiB" doc:"room that the files may take, as the file system counts it; in a shared folder, those of this node"`
	MinFree  config.Size `yaml:"min_free" zero:"none" min:"1" doc:"free space of the file system that is left to others"`
	Sync     string      `yaml:"sync" enum:"none|data" doc:"none: blocks survive the death of the process; data: also a power cut, and writing is slower"`
}

func newFSSettings() any {
	s := &fsSettings{Capacity: 10 << 30, MinFree: fstier.MinFreeDefault, Sync: fstier.SyncNone}
	if cache, err := os.UserCacheDir(); err == nil {
		s.Root = filepath.Join(cache, "terrace", "fs")
	}
	return s
}

func (s *fsSettings) Validate(report config.Report) {
	switch {
	case s.Root == "":
		report("root", "is empty, and without HOME and XDG_CACHE_HOME there is no default; give a folder")
	case strings.HasPrefix(s.Root, "~"):
		report("root", "begins with ~, which only a shell expands; write the whole path")
	}
	if s.NodeID != "" && !s.Shared {
		report("node_id", "is for folders that are shared; set shared: true, or leave it out")
	}
}

func openFS(ctx context.Context, c *config.Tier, log *slog.Logger) (tier.Tier, error) {
	s := c.Settings.(*fsSettings)
	o := fstier.Options{Root: s.Root, Shared: s.Shared, NodeID: s.NodeID, Name: c.Name, Capacity: int64(s.Capacity), MinFree: int64(s.MinFree), Sync: s.Sync, Logger: log}
	if s.MinFree == 0 {
		o.MinFree = -1 // none; its 0 is the default
	}
	t, err := fstier.Open(ctx, o)
	if err != nil {
		return nil, err // not t: a nil *Tier is no nil tier.Tier
	}
	return t, nil
}

func fsInfo(c *config.Tier) (tier.Info, string) {
	return tier.Info{Name: c.Name, Type: c.Type, Medium: tier.MediumStorage, Locality: tier.LocalityLocal}, c.Settings.(*fsSettings).Root
}

// openTiers opens all tiers side by side. One that is not required and cannot
// be opened is replaced by one that has nothing and says why, so that status
// and metrics show it, and joins as soon as it can. On an error nothing stays
// open.
func openTiers(ctx context.Context, c *config.Config, log *slog.Logger) ([]terrace.Tier, error) {
	out, errs := make([]terrace.Tier, len(c.Tiers)), make([]error, len(c.Tiers))
	var wg sync.WaitGroup
	for i := range c.Tiers {
		t := &c.Tiers[i]
		out[i].Lane = laneOptions(&t.Lane)
		wg.Go(func() {
			bounded, cancel := context.WithTimeout(ctx, tierOpenTimeout)
			defer cancel()
			opened, err := openTier(bounded, t, log)
			switch {
			case err == nil:
				out[i].Tier = opened
			case t.Required || ctx.Err() != nil:
				errs[i] = fmt.Errorf("tiers.%d: %w", i, err)
			default:
				log.Warn("a tier cannot be opened; the node serves without it and goes on trying", "tier", t.Name, "err", err)
				out[i].Tier = joinLate(t, err, lateBase, log)
			}
		})
	}
	wg.Wait()
	err := errors.Join(errs...)
	if err != nil {
		err = errors.Join(err, closeTiers(ctx, out))
	}
	return out, err
}

func closeTiers(ctx context.Context, tiers []terrace.Tier) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), tierOpenTimeout)
	defer cancel()
	var errs []error
	for _, t := range tiers {
		if t.Tier != nil {
			errs = append(errs, t.Tier.Close(ctx))
		}
	}
	return errors.Join(errs...)
}

func laneOptions(l *config.Lane) terrace.Lane {
	o := terrace.Lane{ReadParallel: l.ReadParallel, WriteParallel: l.WriteParallel, QueueItems: l.QueueItems,
		QueueBytes: int64(l.QueueBytes), InflightBytes: int64(l.InflightBytes)}
	o.Retry.Attempts, o.Retry.Base, o.Retry.Max = l.Retry.Attempts, l.Retry.Base, l.Retry.Max
	b := &l.Breaker
	o.Breaker.Window, o.Breaker.LatencyMax = b.Window, b.LatencyMax
	o.Breaker.BrownShare, o.Breaker.OpenShare = b.BrownShare, b.OpenShare
	o.Breaker.OpenBase, o.Breaker.OpenMax = b.OpenBase, b.OpenMax
	return o
}
