package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/terrace-kv/terrace"
	"github.com/terrace-kv/terrace/internal/config"
	"github.com/terrace-kv/terrace/internal/wire"
)

// settingFlags are the flags of settings that people change by hand; --set
// reaches the others.
var settingFlags = []struct{ flag, path, help string }{
	{"socket", "socket", "unix socket for engines"},
	{"socket-group", "socket_group", "group that may connect as well"},
	{"primary", "primary.size", "shared memory for blocks, such as 4GiB"},
	{"fs-root", "tiers.fs.root", "folder of the filesystem tier"},
	{"fs-capacity", "tiers.fs.capacity", "room it may take, such as 100GiB, or unbounded"},
	{"peers-listen", "peers.listen", "address for other nodes; empty: none are spoken to"},
	{"peers-advertise", "peers.advertise", "where other nodes reach this one"},
	{"admin", "admin.listen", "address of the admin HTTP server; port 0 takes a free one"},
	{"drain-timeout", "drain_timeout", "how long a stop waits for work that is under way"},
	{"log-level", "log.level", "debug, info, warn or error"},
	{"log-format", "log.format", "text or json"},
}

// settings are a command's flags about the configuration.
type settings struct {
	cmd  *cobra.Command
	file string
	noFS bool
	set  []string
}

// addSettings gives the command the flags.
func addSettings(cmd *cobra.Command) *settings {
	s := &settings{cmd: cmd}
	f := cmd.Flags()
	f.StringVar(&s.file, "config", "", "YAML file of settings (or TERRACE_CONFIG)")
	for _, sf := range settingFlags {
		f.String(sf.flag, "", fmt.Sprintf("%s (%s)", sf.help, sf.path))
	}
	f.BoolVar(&s.noFS, "no-fs", false, "no filesystem tier")
	f.StringArrayVar(&s.set, "set", nil, "any setting, as `path=value`; may be repeated")
	cmd.MarkFlagsMutuallyExclusive("no-fs", "fs-root")
	cmd.MarkFlagsMutuallyExclusive("no-fs", "fs-capacity")
	return s
}

func baseInput(vars []string) config.Input {
	in := config.Input{Types: configTypes(), DefaultTiers: []string{"fs"}, Env: vars}
	in.Socket, in.SocketErr = wire.DefaultSocket()
	return in
}

// load merges all sources. Its error is a failure.
func (s *settings) load(e env) (*config.Config, error) {
	in := baseInput(e.vars)
	in.File = s.file
	var faults config.Faults
	for _, text := range s.set {
		path, value, ok := strings.Cut(text, "=")
		if !ok {
			faults = append(faults, config.Fault{Field: text, Source: "--set", Problem: "has no =; write a setting's path and its value, such as primary.size=4GiB"})
			continue
		}
		in.Flags = append(in.Flags, config.Assignment{Path: path, Value: value, Source: "--set"})
	}
	if s.noFS {
		in.Flags = append(in.Flags, config.Assignment{Path: "tiers.fs", Value: "none", Source: "--no-fs"})
	}
	for _, sf := range settingFlags {
		if f := s.cmd.Flags().Lookup(sf.flag); f.Changed {
			in.Flags = append(in.Flags, config.Assignment{Path: sf.path, Value: f.Value.String(), Source: config.Source("--" + sf.flag)})
		}
	}
	c, err := config.Load(in)
	var more config.Faults
	if errors.As(err, &more) {
		err = append(faults, more...)
	} else if err == nil && len(faults) > 0 {
		err = faults
	}
	if err != nil {
		return nil, &failure{exitUsage, err}
	}
	return c, nil
}

// options are a node's options but for tiers and logger.
func options(c *config.Config) terrace.Options {
	admin, _, err := config.ParseListen(c.Admin.Listen)
	if err != nil {
		panic(err) // Load has checked it
	}
	o := terrace.Options{
		Socket: c.Socket, SocketGroup: c.SocketGroup, PrimarySize: int64(c.Primary.Size), ExtentBytes: int64(c.Primary.Extent),
		Policy: c.Primary.Policy, Populate: c.Primary.Populate == "background", Admin: admin, Version: build().Version,
		Bounds: terrace.Bounds{
			LookupTimeout: c.Core.LookupTimeout, ProbeTimeout: c.Core.ProbeTimeout, PromoteTimeout: c.Core.PromoteTimeout,
			CascadeTimeout: c.Core.CascadeTimeout, ReservationTimeout: c.Core.ReservationTimeout, DistrustFor: c.Core.DistrustFor,
			UnboundStoreTimeout: c.Core.UnboundStoreTimeout, FactFor: c.Core.FactFor,
			ReservePercent: c.Core.ReservePercent, OverduePercent: c.Core.OverduePercent,
			RequestsMax: c.Limits.Requests, FactsMax: c.Limits.Facts,
		},
		Limits: terrace.Limits{SessionsMax: c.Limits.Sessions, WorkersMax: c.Limits.Workers, RequestsMax: c.Limits.Requests, WaitsMax: c.Limits.Waits},
	}
	if p := &c.Peers; p.Listen != "" {
		listen, _, err := config.ParseListen(p.Listen)
		quota, total, qerr := p.QuotaBytes(c.Primary.Size)
		if err = errors.Join(err, qerr); err != nil {
			panic(err) // Load has checked it
		}
		t := &p.Timeouts
		o.Peers = &terrace.Peers{Listen: listen, Advertise: p.AdvertiseAddr(), NodeID: p.NodeID, Transport: p.Transport, LoadTimeout: t.Load, PrefillTimeout: t.Prefill,
			TLS: terrace.PeerTLS{Cert: p.TLS.Cert, Key: p.TLS.Key, CA: p.TLS.CA, ServerName: p.TLS.ServerName},
			Bounds: terrace.PeerBounds{DataConns: p.DataConnections, QuotaBytes: quota, PinnedMax: total, LookupsPerSec: p.LookupsPerSec, SessionsMax: p.Sessions,
				LinksMax: p.Addresses, ParkedMax: p.Parked, ConnectTimeout: t.Connect, LookupTimeout: t.Lookup, AbortTimeout: t.Abort, HitTimeout: t.Hit,
				ParkTimeout: t.Park, IdleTimeout: t.Idle, PingEvery: t.Heartbeat, PingMisses: t.Misses}}
	}
	if o.Bounds.ReservePercent == 0 {
		o.Bounds.ReservePercent = -1 // none; its 0 is the default
	}
	return o
}
