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
	"sync"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/internal/node"
	"github.com/terrace-kv/terrace/tier/fstier"
)

// How often progress is shown: on a terminal in place, elsewhere as lines.
const (
	verifyEveryTTY  = 200 * time.Millisecond
	verifyEveryLine = 5 * time.Second
)

func verifyCommand(e env) *cobra.Command {
	var asJSON bool
	var workers int
	var pause time.Duration
	cmd := &cobra.Command{
		Use: "verify [DIR]", Short: "Check the folder of a filesystem tier, or a running node", Args: cobra.MaximumNArgs(1),
		Long: `With DIR, check all that a filesystem tier keeps there: each namespace's description,
each block's header against its place, each block's bytes against their checksum, and the
usage file against the sum. Nothing is changed, and no node is needed. If one uses the
folder meanwhile, that is said; what it removes or writes over is no problem.

Without DIR, ask the running node at the address that serve would use to check its own
tables: what memory is used for, who holds what, and each tier's books. All its calls wait
meanwhile, at most about as long as --pause says; what would take longer is left out.

Exit codes: 0 nothing is wrong; 1 something is, and is listed; 2 it could not be checked;
130 a signal ended it before it was through.`,
	}
	s := addSettings(cmd)
	f := cmd.Flags()
	f.BoolVar(&asJSON, "json", false, "print one JSON object")
	f.IntVar(&workers, "workers", fstier.WorkersDefault, "blocks of DIR that are read side by side")
	f.DurationVar(&pause, "pause", time.Second, "how long a node may be held up, at most 1m")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return verifyNode(cmd.Context(), e, s, pause, asJSON)
		}
		var more []string
		f.Visit(func(f *pflag.Flag) {
			if f.Name != "json" && f.Name != "workers" {
				more = append(more, "--"+f.Name)
			}
		})
		if len(more) > 0 {
			return &failure{exitUsage, fmt.Errorf("%s is about a running node, which is checked without DIR: leave out one of them", strings.Join(more, ", "))}
		}
		if workers < 1 || workers > 1024 {
			return &failure{exitUsage, fmt.Errorf("--workers is %d; write a number from 1 to 1024", workers)}
		}
		return verifyDir(cmd.Context(), e, args[0], workers, asJSON)
	}
	return cmd
}

// verifyDir checks a folder and prints what it finds as it is found, so that
// any number of problems needs no memory.
func verifyDir(parent context.Context, e env, dir string, workers int, asJSON bool) error {
	ctx, stop := context.WithCancelCause(parent)
	signals := e.signals()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop(nil)
	wg.Go(func() {
		select {
		case sig := <-signals:
			stop(fmt.Errorf("%s", sig))
		case <-ctx.Done():
		}
	})

	terminal := isTerminal(e.err)
	erase := func() {
		if terminal {
			fmt.Fprint(e.err, "\r\x1b[K")
		}
	}
	out := findings{w: e.out, json: asJSON}
	o := fstier.VerifyOptions{Root: dir, Workers: workers, ProgressEvery: verifyEveryLine}
	if terminal {
		o.ProgressEvery = verifyEveryTTY
	}
	o.Found = func(f fstier.Finding) {
		erase()
		out.found(f)
	}
	o.Progress = func(r fstier.VerifyReport) {
		erase()
		fmt.Fprint(e.err, progressLine(&r))
		if !terminal {
			fmt.Fprintln(e.err)
		}
	}
	r, err := fstier.Verify(ctx, o)
	erase()
	out.end(&r, err)
	switch {
	case errors.Is(err, context.Canceled) && ctx.Err() != nil:
		return &failure{exitSignaled, fmt.Errorf("%w before all was checked", context.Cause(ctx))}
	case err != nil:
		return &failure{exitUsage, err}
	case out.err != nil:
		return &failure{exitUsage, fmt.Errorf("write the result: %w", out.err)}
	case r.Problems > 0:
		return &failure{exitFailure, fmt.Errorf("%d problems in %s", r.Problems, r.Root)}
	}
	return nil
}

// findings prints what is found, and at last the counts.
type findings struct {
	w    io.Writer
	json bool
	n    int
	err  error // the first of writing
}

func (p *findings) printf(format string, args ...any) {
	if _, err := fmt.Fprintf(p.w, format, args...); p.err == nil {
		p.err = err
	}
}

func (p *findings) found(f fstier.Finding) {
	p.n++
	if !p.json {
		p.printf("%s %s\n  %s\n  do: %s\n", f.Kind, f.Path, f.What, f.Do)
		return
	}
	p.printf("%s\n    %s", []string{"{\n  \"findings\": [", ","}[min(p.n-1, 1)], asLine(f))
}

func (p *findings) end(r *fstier.VerifyReport, err error) {
	if p.json {
		if p.n == 0 {
			p.printf("{\n  \"findings\": [")
		}
		failed := ""
		if err != nil {
			failed = err.Error()
		}
		p.printf("],\n  \"error\": %s,\n  \"report\": %s\n}\n", asLine(failed), asLine(r))
		return
	}
	if err != nil && r.Good+r.Problems == 0 {
		return // nothing was looked at
	}
	if p.n > 0 {
		p.printf("\n")
	}
	tw := tabwriter.NewWriter(p.w, 0, 0, 2, ' ', 0)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(tw, "%s\t%s\n", name, fmt.Sprintf(format, args...))
	}
	row("root", "%s", r.Root)
	if r.InUse != "" {
		row("", "in use by %s: it may have changed meanwhile, and what is being written is not counted as wrong", r.InUse)
	}
	row("blocks", "%d good (%s), %d bad", r.Good, human(r.CheckedBytes), r.Bad)
	row("namespaces", "%d", r.Namespaces)
	row("unreadable", "%d", r.Unreadable)
	row("others", "%d foreign, %d temporary, %d quarantined, %d vanished while they were looked at", r.Foreign, r.Temporary, r.Quarantined, r.Vanished)
	bound := "nothing is known of a bound"
	if r.BoundBytes > 0 {
		bound = "the usage file says at most " + human(r.BoundBytes)
	}
	row("used", "%s; %s", human(r.UsedBytes), bound)
	verdict := fmt.Sprintf("%d problems", r.Problems)
	switch {
	case err != nil:
		verdict += fmt.Sprintf(" so far: it was not checked to the end (%.0f %%)", 100*r.Done)
	case r.Problems == 0:
		verdict = "all is well"
	}
	row("verdict", "%s, after %s", verdict, r.Took.Round(time.Millisecond))
	if err := tw.Flush(); p.err == nil {
		p.err = err
	}
}

// asLine is a value as JSON in one line. No value here fails to encode.
func asLine(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(b)
}

// progressLine is how far a check has come, in less than 100 characters.
func progressLine(r *fstier.VerifyReport) string {
	s := fmt.Sprintf("%3.0f %%, %d blocks, %s", 100*r.Done, r.Good+r.Bad, human(r.CheckedBytes))
	if sec := r.Took.Seconds(); sec > 0 {
		s += fmt.Sprintf(", %s/s", human(int64(float64(r.CheckedBytes)/sec)))
	}
	if r.Problems > 0 {
		s += fmt.Sprintf(", %d problems", r.Problems)
	}
	return s
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// verifyNode asks a running node.
func verifyNode(ctx context.Context, e env, s *settings, pause time.Duration, asJSON bool) error {
	addr, err := s.adminAddr(e)
	if err != nil {
		return err
	}
	if pause <= 0 || pause > time.Minute {
		return &failure{exitUsage, fmt.Errorf("--pause is %s; write a time up to 1m", pause)}
	}
	r, raw, err := fetchVerify(ctx, addr, pause)
	if err != nil {
		return &failure{exitUsage, err}
	}
	if asJSON {
		_, err = e.out.Write(raw)
	} else {
		err = writeVerify(e.out, r)
	}
	if err != nil {
		return &failure{exitUsage, fmt.Errorf("write the result: %w", err)}
	}
	if !r.OK {
		return &failure{exitFailure, fmt.Errorf("%d problems in the node at %s: please report them with its log, and restart it", len(r.Problems), addr)}
	}
	return nil
}

func fetchVerify(parent context.Context, addr string, pause time.Duration) (*node.VerifyReport, []byte, error) {
	within := statusTimeout + 3*pause // a walk each for the primary and its tiers
	ctx, cancel := context.WithTimeout(parent, within)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+"/v1/verify?pause="+pause.String(), nil)
	if err != nil {
		return nil, nil, err
	}
	code, raw, err := fetch(ctx, req, within)
	if err != nil {
		return nil, nil, err
	}
	var r struct {
		node.VerifyReport
		Error string `json:"error"`
	}
	if err := json.Unmarshal(raw, &r); err != nil || code != http.StatusOK {
		return nil, nil, fmt.Errorf("%s/v1/verify does not answer as a node does: %s", addr, cmp.Or(r.Error, fmt.Sprintf("%d %s, %v", code, http.StatusText(code), err)))
	}
	return &r.VerifyReport, raw, nil
}

// writeVerify is a node's check for people.
func writeVerify(w io.Writer, r *node.VerifyReport) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(tw, "%s\t%s\n", name, fmt.Sprintf(format, args...))
	}
	seconds := func(s float64) time.Duration { return time.Duration(s * float64(time.Second)).Round(time.Microsecond) }
	p := &r.Primary
	row("primary", "%s: %s free, %s evictable, %s pinned, %s filling, %s quarantined, %s at the ends of extents", human(p.CapacityBytes), human(p.FreeBytes),
		human(p.EvictableBytes), human(p.PinnedBytes), human(p.FillingBytes), human(p.QuarantinedBytes), human(p.RemainderBytes))
	row("", "%d blocks, %d pins; calls waited %s", p.Blocks, r.Pins, seconds(r.PauseSeconds))
	for _, t := range r.Tiers {
		row("tier "+t.Name, "%d blocks, %s; its calls waited %s", t.Blocks, human(t.UsedBytes), seconds(t.PauseSeconds))
	}
	for _, s := range r.Skipped {
		row("not checked", "%s", s)
	}
	for _, s := range r.Problems {
		row("problem", "%s", s)
	}
	verdict := "all is well"
	switch {
	case !r.OK:
		verdict = fmt.Sprintf("%d problems", len(r.Problems))
	case len(r.Skipped) > 0:
		verdict = "all is well that was checked"
	}
	row("verdict", "%s", verdict)
	return tw.Flush()
}
