package transfer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
)

// Refusals of Submit and SubmitProbe: nothing is owned, nothing is reported.
var (
	ErrQueueFull = errors.New("transfer queue is full")
	ErrClosed    = errors.New("transfer lane is closed")
	ErrOpen      = errors.New("transfer lane is open: its tier is failing")
	ErrDuplicate = errors.New("transfer job id is in use")
	ErrInvalid   = errors.New("transfer job needs a namespace, a deadline and at least one item")
)

// ErrCancelled is the result of items that ended by Cancel or Close. Its class
// is tier.ClassCancelled.
var ErrCancelled = fmt.Errorf("transfer cancelled: %w", context.Canceled)

// Dir is the direction of a job.
type Dir uint8

const (
	Read  Dir = iota // promotion: tier to primary
	Write            // cascade: primary to tier
	dirs
)

func (d Dir) String() string {
	if d == Write {
		return "write"
	}
	return "read"
}

// JobID names a job or a probe of the core's job table. Jobs and probes share
// the ids of a lane; an id is free again when the last report is delivered.
type JobID uint64

// Job is a list of blocks to move. From an accepted Submit to its last report
// the lane owns it: the caller changes neither the Job, nor Items, nor the
// buffers. The lane itself changes only the buffers, and those only by Read.
type Job struct {
	ID    JobID
	Dir   Dir
	NS    *block.Namespace
	Items []tier.Item // Buf in the arena; Sum is given for Write, ignored for Read

	// Deadline ends the contexts of the job's tier calls, its wait in the
	// queue and its retries. It does not end a call that ignores its context:
	// such items are reported when the call returns.
	Deadline time.Time
}

// Probe asks a tier which keys it has. Keys belong to the lane until the
// report.
type Probe struct {
	ID       JobID
	NS       *block.Namespace
	Keys     []block.Key
	Deadline time.Time
}

// Result is one item's outcome, given when its buffer is quiet.
type Result struct {
	Index int    // in Job.Items
	Sum   uint64 // CRC64-NVME of the block, when Err is nil
	Err   error  // nil: done. Otherwise Buf of a Read holds garbage
}

// Sink takes the reports of a lane. It is called by the lane's goroutines with
// no lock held, so it may call the lane; it must be quick, for a worker waits.
// Calls for one job are in order and never overlap; calls for different jobs
// do. A panic in a Sink is counted and changes no outcome.
type Sink interface {
	// JobResults reports items of a job. The slice is the lane's again when
	// the call returns. With last, the job is over and its id is free.
	JobResults(lane int, id JobID, results []Result, last bool)
	// ProbeResult reports a probe. found belongs to the sink; it is nil when
	// err is not.
	ProbeResult(lane int, id JobID, found []bool, err error)
	// Health tells the newest state of a direction after it changed. Calls of
	// one lane do not overlap; states that were left before they could be told
	// are skipped.
	Health(lane int, dir Dir, s State)
}

// State is the state of a breaker.
type State uint8

const (
	StateClosed   State = iota // healthy
	StateBrownOut              // failing or slow: few calls at once
	StateOpen                  // down: everything is refused
	StateHalfOpen              // on trial: one call at a time
)

var stateNames = [...]string{"closed", "brown_out", "open", "half_open"}

func (s State) String() string { return stateNames[s] }

// kind is what a queue holds: the two directions, and probes.
type kind uint8

const (
	kindRead  = kind(Read)
	kindWrite = kind(Write)
	kindProbe = kind(dirs)
	kinds     = kindProbe + 1
)

var kindNames = [kinds]string{"read", "write", "probe"}

func (k kind) String() string { return kindNames[k] }
