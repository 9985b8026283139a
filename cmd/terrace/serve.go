package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/terrace-kv/terrace"
	"github.com/terrace-kv/terrace/internal/admin"
	"github.com/terrace-kv/terrace/internal/config"
)

func serveCommand(e env) *cobra.Command {
	cmd := &cobra.Command{
		Use: "serve", Short: "Run a node", Args: cobra.NoArgs,
		Long: `Run a node until SIGTERM or SIGINT. Without any setting it has 1GiB of shared memory, a
filesystem tier of 10GiB in the user's cache folder, and an admin server on 127.0.0.1:9180.

Flags go over TERRACE_* variables, those over the file. 'terrace config print' shows the outcome;
docs/operations.md lists all settings.

A signal drains: nothing new is started, and what is under way ends within drain_timeout. A second
signal ends the process at once, with exit code 130, but for the same one within a second, as
timeout(1) and terminals send it twice. If the bound passes first, or something is left
behind, it is named, and the exit code is 3.`,
	}
	s := addSettings(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, err := s.load(e)
		if err != nil {
			return err
		}
		return serve(cmd.Context(), e, c)
	}
	return cmd
}

func newLogger(w io.Writer, c config.Log) *slog.Logger {
	var level slog.Level
	if err := level.UnmarshalText([]byte(c.Level)); err != nil {
		panic(err) // Load has checked it
	}
	o := &slog.HandlerOptions{Level: level}
	if c.Format == "json" {
		return slog.New(slog.NewJSONHandler(w, o))
	}
	return slog.New(slog.NewTextHandler(w, o))
}

// serve runs a node until a signal, and drains it.
func serve(parent context.Context, e env, c *config.Config) error {
	log := newLogger(e.err, c.Log)
	ctx, stop := context.WithCancelCause(parent)
	defer stop(nil)
	watchSignals(e, log, c.DrainTimeout, stop)

	began := time.Now()
	tiers, err := openTiers(ctx, c, log)
	if err != nil {
		return startFailure(ctx, err)
	}
	o := options(c)
	o.Tiers, o.Logger = tiers, log
	if p := &c.Peers; p.Listen != "" && p.Transport != "tcp" {
		log.Warn("peers: blocks go by "+p.Transport+", past TLS and certificates; whoever reaches its ports can read all blocks, and end this process", "tls", p.TLS != (config.PeerTLS{}))
	}
	node, err := terrace.Open(ctx, o)
	if err != nil {
		return startFailure(ctx, errors.Join(err, closeTiers(ctx, tiers)))
	}
	printStart(e.out, c, node, time.Since(began))

	<-ctx.Done()
	drainBegan := time.Now()
	drain, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), c.DrainTimeout, errors.New("drain_timeout passed"))
	defer cancel()
	if err := node.Close(drain); err != nil {
		return &failure{exitLeft, fmt.Errorf("stopped after %s with work left: %w", time.Since(drainBegan).Round(time.Millisecond), err)}
	}
	log.Info("stopped", "took", time.Since(drainBegan).Round(time.Millisecond))
	return nil
}

func startFailure(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		err = fmt.Errorf("%w before it was ready: %w", context.Cause(ctx), err)
	}
	return &failure{exitFailure, err}
}

// sameSignalFor is how long the first signal, sent again, counts as one:
// timeout(1) signals its child and then the group that the child is in.
const sameSignalFor = 100 * time.Millisecond

// watchSignals calls stop at the first signal and ends the process at the
// second.
func watchSignals(e env, log *slog.Logger, bound time.Duration, stop context.CancelCauseFunc) {
	signals := e.signals()
	watch := func() {
		first := <-signals
		log.Info("stopping; a second signal ends at once", "signal", first, "drain_timeout", bound)
		began := time.Now()
		stop(fmt.Errorf("%s", first))
		second := <-signals
		for second == first && time.Since(began) < sameSignalFor {
			second = <-signals
		}
		log.Warn("ended without a drain", "signal", second)
		e.exit(exitSignaled)
	}
	// Nobody waits for it: it must outlive a Close that hangs, to end it.
	go watch()
}

// printStart says once what runs, where.
func printStart(w io.Writer, c *config.Config, node *terrace.Node, took time.Duration) {
	st := node.Status()
	mode := "0600"
	if c.SocketGroup != "" {
		mode = "0660, group " + c.SocketGroup
	}
	fmt.Fprintf(w, "%s\n", build())
	row := func(name, format string, args ...any) {
		fmt.Fprintf(w, "  %-9s %s\n", name, fmt.Sprintf(format, args...))
	}
	row("socket", "%s (%s)", st.Socket, mode)
	row("primary", "%s of shared memory, policy %s", c.Primary.Size, c.Primary.Policy)
	for _, t := range st.Tiers {
		if st.Peers != nil && t.Name == st.Peers.Tier {
			continue // has a row of its own
		}
		capacity := "unbounded"
		if t.CapacityBytes > 0 {
			capacity = config.Size(t.CapacityBytes).String()
		}
		if t.Mode == admin.ModeNotOpen {
			row("tier "+t.Name, "%s NOT OPEN: %s", t.Where, t.ScanError)
			continue
		}
		row("tier "+t.Name, "%s, %s, %s", t.Where, capacity, t.Mode)
	}
	if len(c.Tiers) == 0 {
		row("tiers", "none")
	}
	if p := st.Peers; p != nil {
		row("peers", "%s as %s, advertised as %s, %s", p.Listen, p.NodeID, p.Advertise, p.Mode)
	}
	row("admin", "%s", node.AdminURL())
	fmt.Fprintf(w, "ready after %s, pid %d\n", took.Round(time.Millisecond), os.Getpid())
}
