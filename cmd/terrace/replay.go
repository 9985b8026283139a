package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/terrace-kv/terrace"
	"github.com/terrace-kv/terrace/internal/config"
	"github.com/terrace-kv/terrace/internal/replay"
	"github.com/terrace-kv/terrace/internal/wire"
)

func replayCommand() *cobra.Command {
	cmd := replay.Command(replay.Deps{StartNode: startNode, DefaultSocket: wire.DefaultSocket})
	body := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		err := body(cmd, args)
		switch {
		case err == nil || !cmd.SilenceUsage || errors.Is(err, replay.ErrFlags): // it had not begun: flags or arguments
			return err
		case errors.Is(err, replay.ErrInterrupted):
			return &failure{exitSignaled, err}
		}
		return &failure{exitFailure, err}
	}
	return cmd
}

// startNode is a node for one replay, in this process.
func startNode(ctx context.Context, o replay.NodeOptions) (socket string, stop func(context.Context) error, err error) {
	log := newLogger(os.Stderr, config.Log{Level: slog.LevelWarn.String()})
	c, err := config.Load(config.Input{Types: configTypes(), Socket: filepath.Join(o.Dir, "engine.sock"), DefaultTiers: []string{"fs"}, Flags: []config.Assignment{
		{Path: "primary.policy", Value: o.Policy}, {Path: "tiers.fs.required", Value: "true"},
	}})
	if err != nil {
		return "", nil, err
	}
	c.Primary.Size = config.Size(o.PrimaryBytes)
	if o.FSRoot == "" {
		c.Tiers = nil
	} else {
		fs := c.Tiers[0].Settings.(*fsSettings)
		fs.Root, fs.Capacity = o.FSRoot, config.Size(o.FSBytes)
	}
	if o.Peers {
		c.Peers.Listen, c.Peers.Advertise = "127.0.0.1:0", o.Advertise
		if d := o.PeerTimeout; d > 0 {
			t := &c.Peers.Timeouts
			t.Load, t.Park, t.Connect, t.Lookup, t.Abort, t.Hit = d, d, d/2, d/2, d/2, d/2
			t.Heartbeat = d / 2 / time.Duration(t.Misses)
		}
	}
	tiers, err := openTiers(ctx, c, log)
	if err != nil {
		return "", nil, err
	}
	opt := options(c)
	opt.Tiers, opt.Logger, opt.Admin = tiers, log, ""
	node, err := terrace.Open(ctx, opt)
	if err != nil {
		return "", nil, errors.Join(err, closeTiers(ctx, tiers))
	}
	return c.Socket, node.Close, nil
}
