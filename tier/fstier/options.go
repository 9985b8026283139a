package fstier

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"strconv"
	"time"

	"github.com/terrace-kv/terrace/internal/vfs"
)

// Values of Options.Sync.
const (
	SyncNone = "none" // blocks survive the death of the process, not a power cut
	SyncData = "data" // a power cut too: the bytes are on the medium before the name is, and the name before the write is done
)

// Limits and defaults.
const (
	CapacityMin    = 64 << 10
	MinFreeDefault = 1 << 30
	WorkersDefault = 16

	batchItems         = 4           // items a call should have, so that a job spreads over the workers
	floorRoundsMax     = 4           // evictions for the floor in one write, as some file systems free space late
	floorEvictMax      = 64 << 20    // bytes below the floor that eviction makes good; more was taken by others
	usageStepMax       = 64 << 20    // step of the usage file's bound, bytes
	usageStepMin       = 1 << 20     // its least, for small capacities
	quarantineFilesMax = 64          // files set aside that are kept
	quarantineBytesMax = 1 << 30     // bytes of them, where no capacity is given to take 1 % of
	evictFailuresMax   = 8           // victims that cannot be removed before a write gives up
	spaceAgeMax        = time.Second // age of the last answer of statfs that a write relies on
	scanRetryAfter     = 30 * time.Second
	watchEvery         = time.Second // between looks at whether the root is still there
)

// Options of a Tier.
type Options struct {
	// Root is the directory. It is made, with mode 0700, if it is missing. One
	// node uses it at a time, unless it is Shared. Required.
	Root string

	// Shared lets several nodes use Root, on several hosts too, if all of them
	// say so. Each accounts and evicts what it has written itself.
	Shared bool

	// NodeID names this node among those that share Root, so that it knows its
	// own files after a restart: 1 to 64 letters, digits and any of "._-". No
	// two that run may have the same. Default: the name of the host.
	NodeID string

	// Name is the tier's name in errors, metrics and status. Default "fs".
	Name string

	// Capacity in bytes, as the file system charges regular files, all files
	// under Root included; in a shared one, this node's. 0 is unbounded;
	// otherwise at least CapacityMin.
	Capacity int64

	// MinFree is the free space in bytes that writes leave to others. 0 is
	// MinFreeDefault, a negative value is no floor.
	MinFree int64

	// Sync is SyncNone, the default, or SyncData.
	Sync string

	// Workers is how many reads, and how many writes, a lane should run side
	// by side. Default WorkersDefault.
	Workers int

	// Logger gets what an operator should know. Default slog.Default.
	Logger *slog.Logger

	// FS is the tree at Root, for tests. Open takes it over, also when it
	// fails. It is not watched: one that goes is gone for good. Default
	// vfs.OpenRoot(Root).
	FS vfs.FS

	// Now is the clock. Default time.Now.
	Now func() time.Time

	bootID    string        // the kernel's, if not empty; for tests
	scanRetry time.Duration // scanRetryAfter, if not 0; for tests

	watch time.Duration       // watchEvery, if not 0; for tests
	wrap  func(vfs.FS) vfs.FS // put around each root that is opened, if not nil; for tests
}

func (o *Options) ensureDefaults() {
	if o.Name == "" {
		o.Name = "fs"
	}
	if o.MinFree == 0 {
		o.MinFree = MinFreeDefault
	}
	if o.Sync == "" {
		o.Sync = SyncNone
	}
	if o.Shared && o.NodeID == "" {
		o.NodeID, _ = os.Hostname()
	}
	if o.Workers == 0 {
		o.Workers = WorkersDefault
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.scanRetry == 0 {
		o.scanRetry = scanRetryAfter
	}
	if o.watch == 0 {
		o.watch = watchEvery
	}
	if o.wrap == nil {
		o.wrap = func(f vfs.FS) vfs.FS { return f }
	}
}

var nodeID = regexp.MustCompile(`^[A-Za-z0-9._-]{1,` + strconv.Itoa(nodeIDMax) + `}$`)

// Validate reports every fault at once.
func (o *Options) Validate() error {
	var errs []error
	if o.Root == "" {
		errs = append(errs, errors.New("fs tier: root is empty; give a directory"))
	}
	if o.Capacity < 0 || (o.Capacity > 0 && o.Capacity < CapacityMin) {
		errs = append(errs, fmt.Errorf("fs tier: capacity is %d bytes; want 0 for unbounded, or at least %d", o.Capacity, int64(CapacityMin)))
	}
	if o.Sync != "" && o.Sync != SyncNone && o.Sync != SyncData {
		errs = append(errs, fmt.Errorf("fs tier: sync is %q, want %q or %q", o.Sync, SyncNone, SyncData))
	}
	switch {
	case o.NodeID != "" && !o.Shared:
		errs = append(errs, fmt.Errorf("fs tier: node_id is %q, which is for roots that are shared; set shared: true, or leave it out", o.NodeID))
	case o.NodeID != "" && !nodeID.MatchString(o.NodeID):
		errs = append(errs, fmt.Errorf("fs tier: node_id is %q, want 1 to %d letters, digits and any of ._-", o.NodeID, nodeIDMax))
	}
	if o.Workers < 0 {
		errs = append(errs, fmt.Errorf("fs tier: workers is %d, want at least 1, or 0 for %d", o.Workers, WorkersDefault))
	}
	return errors.Join(errs...)
}
