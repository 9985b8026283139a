// Command bench runs the benchmarks that have a target and prints one table of
// them. Each row names the command that it comes from, to be run alone.
//
//	go run -C bench .            all, in some minutes
//	go run -C bench . cascade    only rows whose name or command matches
//
// Figures are only worth something on a machine that does nothing else. A miss
// is marked and is no failure of the command.
package main

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
)

// row is one figure: the worst of what find matches in the command's output.
type row struct {
	name   string
	find   string  // its group is a number or a duration
	scale  float64 // of a number, if not 0; durations are in ms
	unit   string
	target float64 // 0: none
	least  bool    // target is a lower bound
}

type command struct {
	args string // of go, from the root of the checkout
	rows []row
}

// metric finds what a benchmark reports.
func metric(benchmark, unit string) string {
	return `(?m)^Benchmark` + benchmark + `(?:-\d+)?\s.*?([\d.e+-]+) ` + regexp.QuoteMeta(unit) + `(?:\s|$)`
}

// commands has those first that make many files, before any are removed.
var commands = []command{
	{"test -C bench -run ^$ -bench Cascade/64KiB -benchtime 1x ./node", node("cascade", "Cascade/64KiB", 1.5)},
	{"test -C bench -run ^$ -bench Cascade/1024KiB -benchtime 1x ./node", node("cascade", "Cascade/1024KiB", 0)},
	{"test -C bench -run ^$ -bench Promote/64KiB -benchtime 1x ./node", node("promote", "Promote/64KiB", 0)},
	{"test -C bench -run ^$ -bench Promote/1024KiB -benchtime 1x ./node", node("promote", "Promote/1024KiB", 0)},
	{"test -run ^$ -bench AgainstRaw/./64KiB -benchtime 20000x ./tier/fstier", []row{
		{name: "fs tier/raw, write, 64 KiB", find: metric("AgainstRaw/write/64KiB", "ratio"), target: 0.7, least: true},
		{name: "fs tier/raw, read, 64 KiB", find: metric("AgainstRaw/read/64KiB", "ratio"), target: 0.7, least: true},
		{name: "CPU for a GB written, 64 KiB", find: metric("AgainstRaw/write/64KiB", "tier-cpu-us/op"), scale: 1e3 / (64 << 10), unit: "s", target: 1.5},
	}},
	{"test -run ^$ -bench AgainstRaw/./1024KiB -benchtime 4000x ./tier/fstier", []row{
		{name: "fs tier/raw, write, 1 MiB", find: metric("AgainstRaw/write/1024KiB", "ratio"), target: 0.9, least: true},
		{name: "fs tier/raw, read, 1 MiB", find: metric("AgainstRaw/read/1024KiB", "ratio"), target: 0.9, least: true},
	}},
	{"test -C bench -run ^$ -bench Net -benchtime 1x ./peer", []row{
		{name: "between nodes/raw TCP, 64 KiB", find: metric("Net/64KiB/conns=2", "net/raw"), target: 0.7, least: true},
		{name: "the same, 4 connections", find: metric("Net/64KiB/conns=4", "net/raw"), target: 0.7, least: true},
		{name: "between nodes/raw TCP, 1 MiB", find: metric("Net/1024KiB/conns=2", "net/raw"), target: 0.9, least: true},
		{name: "the same, 4 connections", find: metric("Net/1024KiB/conns=4", "net/raw"), target: 0.9, least: true},
		{name: "with TLS, 64 KiB", find: metric("NetTLS/64KiB/conns=2", "net-MB/s"), unit: "MB/s"},
		{name: "with TLS, 1 MiB", find: metric("NetTLS/1024KiB/conns=2", "net-MB/s"), unit: "MB/s"},
	}},
	{"test -C bench -run ^$ -bench Fetch -benchtime 400x ./peer", []row{
		{name: "128 blocks of 64 KiB from a source, p50", find: metric("Fetch/source", "node-p50-µs"), scale: 1e-3, unit: "ms"},
		{name: "raw transfer of as many bytes", find: metric("Fetch/source", "raw-p50-µs"), scale: 1e-3, unit: "ms"},
		{name: "node/raw", find: metric("Fetch/source", "node/raw"), target: 1.5},
		{name: "a block", find: metric("Fetch/source", "µs/block"), unit: "µs"},
		{name: "node/raw, from a prefiller", find: metric("Fetch/prefiller", "node/raw"), target: 1.5},
		{name: "a block", find: metric("Fetch/prefiller", "µs/block"), unit: "µs"},
	}},
	{"test -C bench -run ^$ -bench Others -benchtime 1x ./peer", []row{
		{name: "32 blocks from a peer, p50, with/without one stopped", find: metric("Others/stopped", "p50-ratio"), target: 1.1},
		{name: "with/without a slow one", find: metric("Others/slow", "p50-ratio"), target: 1.1},
		{name: "with/without one that sends garbage", find: metric("Others/garbage", "p50-ratio"), target: 1.1},
		{name: "with/without one that dials and drops", find: metric("Others/dials", "p50-ratio"), target: 1.1},
	}},
	{"test -run ^$ -bench . ./internal/core", []row{
		{name: "lookup, all hits, a key", find: metric("LookupHit", "ns/key"), unit: "ns", target: 100},
		{name: "allocations for that, a key", find: metric("LookupHit", "allocs/key"), target: 0.05},
		{name: "lookup, all misses, a key", find: metric("LookupMiss", "ns/key"), unit: "ns", target: 150},
		{name: "reserve and commit, a key", find: metric("ReserveCommit", "ns/key"), unit: "ns", target: 400},
		{name: "the same, each evicting", find: metric("ReserveCommitEvict", "ns/key"), unit: "ns", target: 600},
		{name: "pin and unpin, a key", find: metric("PinUnpin", "ns/key"), unit: "ns", target: 150},
		{name: "start 1,000 promotions", find: metric("StartPromotions", "us/step"), scale: 1e-3, unit: "ms", target: 1},
	}},
	{"test -count 1 -run TestMemoryPerBlock -v ./internal/core", []row{
		{name: "memory of a block in the primary", find: `([\d.]+) bytes a block`, unit: "B", target: 128},
	}},
	{"test -run ^$ -bench . ./client", []row{
		{name: "200-key lookup over the socket, p50", find: metric("Lookup", "p50-µs"), unit: "µs", target: 60},
		{name: "a bare echo of such frames, p50", find: metric("Echo", "p50-µs"), unit: "µs"},
		{name: "eight engines, 200-key lookups", find: metric("LookupEngines/8", "Mkeys/s"), unit: "Mkeys/s", target: 5, least: true},
	}},
	{"test -count 1 -run ^TestLookupLatency$ -v ./test/sweep", []row{
		{name: "lookup p99, file calls of 5 s", find: `takes 5 s: .* p99 (\S+),`, unit: "ms", target: 1},
		{name: "lookup p99, 10^4 stores queued too", find: `are queued: .* p99 (\S+),`, unit: "ms", target: 1},
		{name: "lookup p99, while those are written", find: `are written: .* p99 (\S+),`, unit: "ms", target: 1},
	}},
	{"test -count 1 -run ^TestManyFiles$ -v ./test/sweep -files 10000000", []row{
		{name: "memory of a block in the fs index", find: `([\d.]+) bytes a file`, unit: "B", target: 64},
		{name: "longest lookup while 10^7 are indexed", find: `meanwhile .* max (\S+),`, unit: "ms", target: 1},
		{name: "longest pause of the collector then", find: `pause of the collector (\S+)`, unit: "ms", target: 1},
		{name: "open before they are indexed", find: `open after (\S+),`, unit: "ms", target: 1000},
	}},
}

func node(what, benchmark string, cpuMax float64) []row {
	size := map[bool]string{true: "1 MiB", false: "64 KiB"}[strings.HasSuffix(benchmark, "1024KiB")]
	return []row{
		{name: what + " through a node, " + size, find: metric(benchmark, "node-MB/s"), unit: "MB/s"},
		{name: "the tier alone", find: metric(benchmark, "tier-MB/s"), unit: "MB/s"},
		{name: "the raw calls", find: metric(benchmark, "raw-MB/s"), unit: "MB/s"},
		{name: "node/tier", find: metric(benchmark, "node/tier"), target: 0.8, least: true},
		{name: "CPU of the node, a GB", find: metric(benchmark, "node-cpu-s/GB"), unit: "s", target: cpuMax},
		{name: "of that for the checksum", find: metric(benchmark, "sum-s/GB"), unit: "s"},
	}
}

func main() {
	want := regexp.MustCompile("(?i)" + strings.Join(os.Args[1:], ".*"))
	out := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintf(out, "%s, %s, %d processors, commit %s, load %s\n\n", time.Now().Format("2006-01-02 15:04"), runtime.Version(),
		runtime.NumCPU(), first(run("", "git", "rev-parse", "--short", "HEAD")), first(os.ReadFile("/proc/loadavg")))
	fmt.Fprintln(out, "what\tmeasured\ttarget\t")
	failed := false
	dir, err := os.MkdirTemp("", "terrace-bench")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for _, c := range commands {
		if !want.MatchString(c.args) && !slices.ContainsFunc(c.rows, func(r row) bool { return want.MatchString(r.name) }) {
			continue
		}
		fmt.Fprintln(os.Stderr, "go", c.args)
		text, err := run(dir, "go", strings.Fields(c.args)...)
		if err != nil {
			failed = true
			fmt.Fprintf(os.Stderr, "%s%v\n", text, err)
		}
		fmt.Fprintf(out, "go %s\t\t\t\n", c.args)
		for _, r := range c.rows {
			fmt.Fprintf(out, "  %s\t%s\n", r.name, r.measure(string(text)))
		}
	}
	_ = out.Flush()
	if err := os.RemoveAll(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		failed = true
	}
	if failed {
		os.Exit(1)
	}
}

// run runs a command at the root of the checkout. What it leaves in dir is
// removed after the last one.
func run(dir, name string, args ...string) ([]byte, error) {
	cmd := exec.Command(name, args...)
	cmd.Dir = ".."
	cmd.Env = append(os.Environ(), "TERRACE_BENCH_DIR="+dir)
	return cmd.CombinedOutput()
}

func first(b []byte, _ error) string {
	f, _, _ := strings.Cut(string(b), " ")
	return strings.TrimSpace(f)
}

// measure is the last columns of the row.
func (r *row) measure(text string) string {
	var worst float64
	found := false
	for _, m := range regexp.MustCompile(r.find).FindAllStringSubmatch(text, -1) {
		v, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			d, err := time.ParseDuration(m[1])
			if err != nil {
				continue
			}
			v = float64(d) / float64(time.Millisecond)
		} else if r.scale != 0 {
			v *= r.scale
		}
		if !found || (v < worst) == r.least {
			worst, found = v, true
		}
	}
	if !found {
		return "no figure\t\t"
	}
	number := func(v float64) string {
		digits := strconv.FormatFloat(v, 'g', 3, 64)
		if v >= 1000 {
			digits = strconv.FormatFloat(v, 'f', 0, 64)
		}
		return strings.TrimSpace(digits + " " + r.unit)
	}
	if r.target == 0 {
		return number(worst) + "\t\t"
	}
	sign, verdict := "≤", ""
	if r.least {
		sign = "≥"
	}
	if worst != r.target && (worst < r.target) == r.least {
		verdict = "missed"
	}
	return fmt.Sprintf("%s\t%s %s\t%s", number(worst), sign, number(r.target), verdict)
}
