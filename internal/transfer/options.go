package transfer

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/terrace-kv/terrace/tier"
)

// Options of a lane. Zero means the default, which for parallelism is first
// what the tier's Info says.
type Options struct {
	ReadParallel  int // Read calls at once; default 8
	WriteParallel int // Write calls at once; default 4, so that stores leave room for loads
	ProbeParallel int // Contains calls at once, in their own workers; default 4

	// Items and bytes that a direction holds at most, from Submit to the
	// report. A direction that holds nothing takes a job of any size, so that
	// a bound smaller than a job does not refuse it for ever.
	QueueItems  int   // default 4096
	QueueBytes  int64 // default 1 GiB
	QueueProbes int   // probes held at most; default 1024

	// One tier call. A single larger block still makes a call.
	BatchItems int   // default 64; Info.BatchItems lowers it
	BatchBytes int64 // default 1 MiB: large enough for the medium, small enough to use a block early

	// Bytes in running calls per direction, those past their deadline not
	// counted. One call always runs. Default 64 MiB.
	InflightBytes int64

	// Bytes of both directions in calls past their deadline; above it the
	// lane is down. 0 means no cap; the node sets a share of the primary.
	OverdueBytesMax int64

	Retry   RetryOptions
	Breaker BreakerOptions

	// OnCall, if given, is told how long each Read and Write call took. It is
	// called with the lane's lock held and must only count.
	OnCall func(d Dir, took time.Duration)

	LogEvery time.Duration // one warning per kind and cause in this time; default 10 s
	Logger   *slog.Logger  // default slog.Default

	noChecksum bool // for benchmarks: what does verification cost?
}

// RetryOptions bound the retries of retryable errors. The n-th retry waits
// between half and all of min(Max, Base·2ⁿ⁻¹), and holds no worker meanwhile.
type RetryOptions struct {
	Attempts int           // calls an item gets at most, the first included; default 3
	Base     time.Duration // default 50 ms
	Max      time.Duration // default 2 s
}

// BreakerOptions say when a direction's health changes. A call is bad if any of
// its items failed in a way that speaks against the tier.
type BreakerOptions struct {
	Window        time.Duration // shares and latency are taken over this time; default 10 s
	MinCalls      int           // below it in the window shares mean nothing; so many bad calls in a row open, however far apart; default 5
	BrownShare    float64       // share of bad calls for brown-out; default 0.1
	OpenShare     float64       // share of bad calls for open; default 0.5
	LatencyMax    time.Duration // mean time of a call for brown-out; default 2 s
	BrownParallel int           // calls at once in brown-out; default 2
	OpenBase      time.Duration // first time open, of which half to all is waited; default 1 s
	OpenMax       time.Duration // it doubles up to this; default 1 min
	Trials        int           // good calls in half-open before closed; default 2
}

// Validate reports every field that makes no sense, by name.
func (o *Options) Validate() error {
	var errs []error
	check := func(name string, v int64) {
		if v < 0 {
			errs = append(errs, fmt.Errorf("transfer: %s is %d, want 0 (the default) or more", name, v))
		}
	}
	for _, f := range []struct {
		name string
		v    int64
	}{
		{"ReadParallel", int64(o.ReadParallel)}, {"WriteParallel", int64(o.WriteParallel)},
		{"ProbeParallel", int64(o.ProbeParallel)}, {"QueueItems", int64(o.QueueItems)},
		{"QueueBytes", o.QueueBytes}, {"QueueProbes", int64(o.QueueProbes)},
		{"BatchItems", int64(o.BatchItems)}, {"BatchBytes", o.BatchBytes},
		{"InflightBytes", o.InflightBytes}, {"OverdueBytesMax", o.OverdueBytesMax},
		{"Retry.Attempts", int64(o.Retry.Attempts)}, {"Retry.Base", int64(o.Retry.Base)}, {"Retry.Max", int64(o.Retry.Max)},
		{"Breaker.Window", int64(o.Breaker.Window)}, {"Breaker.MinCalls", int64(o.Breaker.MinCalls)},
		{"Breaker.LatencyMax", int64(o.Breaker.LatencyMax)}, {"Breaker.BrownParallel", int64(o.Breaker.BrownParallel)},
		{"Breaker.OpenBase", int64(o.Breaker.OpenBase)}, {"Breaker.OpenMax", int64(o.Breaker.OpenMax)},
		{"Breaker.Trials", int64(o.Breaker.Trials)}, {"LogEvery", int64(o.LogEvery)},
	} {
		check(f.name, f.v)
	}
	for _, f := range []struct {
		name string
		v    float64
	}{{"Breaker.BrownShare", o.Breaker.BrownShare}, {"Breaker.OpenShare", o.Breaker.OpenShare}} {
		if !(f.v >= 0 && f.v <= 1) {
			errs = append(errs, fmt.Errorf("transfer: %s is %v, want 0 (the default) to 1", f.name, f.v))
		}
	}
	return errors.Join(errs...)
}

// withDefaults fills in what is not set, from the tier's facts first.
func (o Options) withDefaults(info tier.Info) Options {
	num := func(p *int, candidates ...int) {
		for _, c := range candidates {
			if *p <= 0 {
				*p = c
			}
		}
	}
	size := func(p *int64, d int64) {
		if *p <= 0 {
			*p = d
		}
	}
	span := func(p *time.Duration, d time.Duration) {
		if *p <= 0 {
			*p = d
		}
	}
	share := func(p *float64, d float64) {
		if *p <= 0 {
			*p = d
		}
	}
	num(&o.ReadParallel, info.ReadParallel, 8)
	num(&o.WriteParallel, info.WriteParallel, 4)
	num(&o.ProbeParallel, 4)
	num(&o.QueueItems, 4096)
	size(&o.QueueBytes, 1<<30)
	num(&o.QueueProbes, 1024)
	num(&o.BatchItems, 64)
	if info.BatchItems > 0 {
		o.BatchItems = min(o.BatchItems, info.BatchItems)
	}
	size(&o.BatchBytes, 1<<20)
	size(&o.InflightBytes, 64<<20)
	num(&o.Retry.Attempts, 3)
	span(&o.Retry.Base, 50*time.Millisecond)
	span(&o.Retry.Max, 2*time.Second)
	b := &o.Breaker
	span(&b.Window, 10*time.Second)
	num(&b.MinCalls, 5)
	share(&b.BrownShare, 0.1)
	share(&b.OpenShare, 0.5)
	span(&b.LatencyMax, 2*time.Second)
	num(&b.BrownParallel, 2)
	span(&b.OpenBase, time.Second)
	span(&b.OpenMax, time.Minute)
	num(&b.Trials, 2)
	span(&o.LogEvery, 10*time.Second)
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	return o
}
