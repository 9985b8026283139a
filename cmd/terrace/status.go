package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/terrace-kv/terrace"
	"github.com/terrace-kv/terrace/internal/admin"
	"github.com/terrace-kv/terrace/internal/config"
)

const (
	statusTimeout  = 5 * time.Second
	statusBytesMax = 16 << 20
)

func statusCommand(e env) *cobra.Command {
	var asJSON bool
	var watch time.Duration
	cmd := &cobra.Command{
		Use: "status", Short: "Show what a node is doing", Args: cobra.NoArgs,
		Long: "Ask a node's admin server, at the address that serve would use with the same file,\nenvironment and flags, what the node is doing. The exit code is 1 when it does not answer.",
	}
	s := addSettings(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the whole status as one JSON object")
	cmd.Flags().DurationVar(&watch, "watch", 0, "show it again and again, after this time, until a signal")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		addr, err := s.adminAddr(e)
		if err != nil {
			return err
		}
		var signals <-chan os.Signal
		if watch > 0 {
			signals = e.signals()
		}
		for {
			st, raw, err := fetchStatus(cmd.Context(), addr)
			if err != nil {
				return &failure{exitFailure, err}
			}
			if watch > 0 && !asJSON {
				fmt.Fprint(e.out, "\x1b[H\x1b[2J") // top left, and clear
			}
			if asJSON {
				_, err = e.out.Write(raw)
			} else {
				err = writeStatus(e.out, st)
			}
			if err != nil || watch <= 0 {
				return err
			}
			select {
			case <-time.After(watch):
			case <-signals:
				return nil
			}
		}
	}
	return cmd
}

func fetchStatus(ctx context.Context, addr string) (*terrace.Status, []byte, error) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/v1/status", nil)
	if err != nil {
		return nil, nil, err
	}
	code, raw, err := fetch(ctx, req, statusTimeout)
	if err != nil {
		return nil, nil, err
	}
	var st terrace.Status
	if code != http.StatusOK {
		err = fmt.Errorf("%d %s", code, http.StatusText(code))
	}
	if err == nil {
		err = json.Unmarshal(raw, &st)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("%s/v1/status does not answer as a node does: %w", addr, err)
	}
	return &st, raw, nil
}

// adminAddr is where the node's admin server is, by the settings.
func (s *settings) adminAddr(e env) (string, error) {
	c, err := s.load(e)
	if err != nil {
		return "", err
	}
	addr, _, err := config.ParseListen(c.Admin.Listen)
	if err != nil {
		return "", err
	}
	if strings.HasSuffix(addr, ":0") {
		return "", &failure{exitUsage, errors.New("admin.listen has port 0, so nobody knows where the node is: give the address that serve printed with --admin")}
	}
	return addr, nil
}

// fetch makes a call of a node's admin server. Its error says who does not
// answer within the time that ctx has.
func fetch(ctx context.Context, req *http.Request, within time.Duration) (code int, body []byte, err error) {
	// A proxy of the environment is not for a node's own address.
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return 0, nil, noAnswer(ctx, req.URL.Host, within, err)
	}
	defer resp.Body.Close()
	body, err = io.ReadAll(io.LimitReader(resp.Body, statusBytesMax))
	if err != nil {
		return 0, nil, noAnswer(ctx, req.URL.Host, within, err)
	}
	return resp.StatusCode, body, nil
}

// noAnswer tells a node that hangs from one that is not there.
func noAnswer(ctx context.Context, addr string, within time.Duration, err error) error {
	who := admin.Holder(addr)
	switch {
	case ctx.Err() != nil && who != "":
		return fmt.Errorf("a node is there, but does not answer within %s: %s is held%s; it is stopped, overloaded or stuck: see what that process does, and its log", within, addr, who)
	case ctx.Err() != nil:
		return fmt.Errorf("%s does not answer within %s: the node there is stopped, overloaded or stuck, or the way to it is; see its log", addr, within)
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("no node answers: %w; start one with 'terrace serve', or give its address with --admin", err)
	}
	return fmt.Errorf("no answer of a node: %w; its address is given with --admin", err)
}

// writeStatus is the status for people.
func writeStatus(w io.Writer, s *terrace.Status) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(cells ...any) {
		for i, c := range cells {
			if i > 0 {
				fmt.Fprint(tw, "\t")
			}
			fmt.Fprint(tw, printable(c))
		}
		fmt.Fprintln(tw)
	}
	f := fmt.Sprintf
	up := time.Duration(s.UptimeSeconds * float64(time.Second)).Round(time.Second)
	row("node", f("%s for %s, pid %d, version %s, boot %s", s.State, up, s.PID, s.Version, s.BootID))
	for _, m := range s.Missing {
		row("", "waits for "+m)
	}
	row("socket", f("%s, %d engines", s.Socket, s.Tables.Sessions))
	p := &s.Primary
	row("primary", f("%s, %d blocks: %s evictable, %s pinned, %s filling, %s quarantined, %s free", human(p.CapacityBytes), p.Blocks,
		human(p.EvictableBytes), human(p.PinnedBytes), human(p.FillingBytes), human(p.QuarantinedBytes), human(p.FreeBytes)))
	row("", f("%d blocks hit, %d evicted, %d extents taken, %s populated", p.Hits, p.Evicted, p.ExtentsTaken, human(p.PopulatedBytes)))
	t := &s.Tables
	row("tables", f("%d requests, %d pins, %d reservations, %d jobs, %d waits, %d quarantined slots", t.Requests, t.Pins, t.Reservations, t.Jobs, t.Waits, t.Quarantined))
	row("lookups", f("%d calls, p50 %.0f µs, p99 %.0f µs: %s", s.Lookups.Calls, s.Lookups.P50us, s.Lookups.P99us, counts(s.Lookups.Verdicts)))
	st := &s.Stores
	row("stores", f("%d blocks committed, %d aborted, %d expired; %d calls refused", st.Committed, st.Aborted, st.Expired, st.Refused))
	if err := tw.Flush(); err != nil {
		return err
	}
	if len(s.Tiers) > 0 {
		fmt.Fprintln(w)
		row("TIER", "HEALTH (READ/WRITE)", "BLOCKS", "USED", "CAPACITY", "PROMOTED", "READ", "WRITTEN", "FAILED", "DROPPED", "CORRUPT")
		for _, t := range s.Tiers {
			capacity := "unbounded"
			if t.CapacityBytes > 0 {
				capacity = human(t.CapacityBytes)
			}
			row(t.Name, t.ReadHealth+"/"+t.WriteHealth, t.Blocks, human(t.UsedBytes), capacity, t.Hits, human(t.ReadBytes), human(t.WriteBytes),
				sum(t.Failures), sum(t.Dropped), t.Corrupt)
		}
		if err := tw.Flush(); err != nil {
			return err
		}
		for _, t := range s.Tiers {
			fmt.Fprintf(w, "%s: %s, %s", t.Name, t.Where, t.Mode)
			if !t.ScanDone && t.ScanError == "" {
				fmt.Fprintf(w, ", scan has found %d blocks", t.ScanBlocks)
			}
			fmt.Fprintln(w)
			for _, c := range []struct {
				what   string
				counts map[string]int64
			}{{"failed", t.Failures}, {"dropped", t.Dropped}} {
				if sum(c.counts) > 0 {
					fmt.Fprintf(w, "  %s: %s\n", c.what, counts(c.counts))
				}
			}
			for _, x := range []struct{ what, text string }{{"scan", t.ScanError}, {"last error", t.LastError}} {
				if x.text != "" {
					fmt.Fprintf(w, "  %s: %s\n", x.what, printable(x.text))
				}
			}
		}
	}
	if p := s.Peers; p != nil {
		fmt.Fprintln(w)
		row("PEER", "ADDRESS", "STATE", "WIRE", "SOURCES", "ROUNDS", "SERVES", "PINNED", "BLOCKS IN", "OUT", "BYTES IN", "OUT")
		for _, x := range p.Peers {
			state := x.State
			if x.Why != "" {
				state += ": " + x.Why
			}
			row(cmp.Or(x.NodeID, "-"), x.Address, state, cmp.Or(x.Wire, "-"), x.Sources, x.Rounds, x.Serves, human(x.PinnedBytes), x.BlocksIn, x.BlocksOut, human(x.BytesIn), human(x.BytesOut))
		}
		if err := tw.Flush(); err != nil {
			return err
		}
		fmt.Fprintf(w, "%s at %s, %s: %d blocks in, %d out; %d hand-overs wait, %d fetches parked\n", p.NodeID, p.Advertise, p.Mode, p.BlocksIn, p.BlocksOut, p.Handovers, p.Parked)
		if p.Gets+p.GetsFailed+p.Offers+int64(p.GetsPosted) > 0 {
			fmt.Fprintf(w, "  by fabric: %d blocks in, %d offered; %d failed and came over TCP, %d are not released\n", p.Gets, p.Offers, p.GetsFailed, p.GetsPosted)
		}
		for _, c := range []struct {
			what   string
			counts map[string]int64
		}{{"failed", p.Failures}, {"refused", p.Refused}} {
			if sum(c.counts) > 0 {
				fmt.Fprintf(w, "  %s: %s\n", c.what, counts(c.counts))
			}
		}
	}
	if len(s.Sessions) > 0 {
		fmt.Fprintln(w)
		row("SESSION", "ENGINE", "PID", "SINCE", "REQUESTS", "PINS", "RESERVATIONS", "NAMESPACE")
		for _, e := range s.Sessions {
			row(e.ID, e.Engine, e.PID, e.Since.UTC().Format(time.RFC3339), e.Requests, e.Pins, e.Reservations, e.Namespace[:min(12, len(e.Namespace))])
		}
	}
	return tw.Flush()
}
