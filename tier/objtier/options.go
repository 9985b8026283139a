package objtier

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/terrace-kv/terrace/internal/s3"
)

// Limits and defaults.
const (
	WorkersDefault    = 16
	IndexKeysDefault  = 1 << 20
	PresentForDefault = 10 * time.Minute
	AbsentForDefault  = 10 * time.Second
	ListPerSecDefault = 10
	headsMax          = 16 // HEAD requests at once of one Contains
)

// Checksums that Options may ask for.
const (
	ChecksumAuto = "auto" // what the store proves to verify: CRC64NVME, else CRC32C, else none
	ChecksumNone = "none"
)

// Values of Options.Conditional.
const (
	ConditionalAuto = "auto" // where the store proves to have them
	ConditionalOff  = "off"
)

// Options of a Tier.
type Options struct {
	// Name is the tier's name in errors, metrics and status. Default "object".
	Name string

	// Bucket, endpoint, addressing, credentials and trust. The bucket is
	// required, and must be there: the tier makes none.
	S3 s3.Options

	// Prefix of all keys, without a slash at either end. Several tiers, and
	// other programs, may use one bucket under prefixes of their own.
	Prefix string

	// Workers is how many reads, and how many writes, a lane should run side
	// by side. Default WorkersDefault.
	Workers int

	// RequestsPerSecond bounds all requests of the tier together; who is over
	// it waits, inside its own deadline. 0 is no bound. A store that says
	// SlowDown is asked more slowly in any case, until it no longer does.
	RequestsPerSecond float64

	// Checksum is ChecksumAuto, the default, s3.ChecksumCRC64NVME,
	// s3.ChecksumCRC32C or ChecksumNone: what the store is told to verify.
	// What is read is always verified here.
	Checksum string

	// Conditional is ConditionalAuto, the default, or ConditionalOff: whether
	// nodes that store a block at once write it once.
	Conditional string

	// IndexKeys bounds the keys that are known to be present or absent, at
	// about 70 bytes each. Default IndexKeysDefault.
	IndexKeys int

	// PresentFor is how long a key that was seen is taken to be there without
	// asking. A block that others removed meanwhile costs one failed load.
	// Default PresentForDefault.
	PresentFor time.Duration

	// AbsentFor is how long a key that was not there is not asked for again:
	// so late is found what other nodes store. Default AbsentForDefault.
	AbsentFor time.Duration

	// ListPerSecond bounds the requests of the listing that fills the index
	// after a start, of 1,000 keys each. Default ListPerSecDefault; negative
	// turns the listing off.
	ListPerSecond float64

	// Capacity bounds each namespace in bytes of its objects, loosely: one node
	// at a time looks after it. 0 leaves the bucket to its life-cycle rules.
	Capacity int64

	// CapacityEvery is how often the namespaces are counted and brought below
	// the capacity. Default 5 minutes.
	CapacityEvery time.Duration

	// CapacityAlone says that no other node looks after the capacity, so that a
	// store without conditional writes will do.
	CapacityAlone bool

	// Logger gets what an operator should know. Default slog.Default.
	Logger *slog.Logger

	// Transport moves blocks instead of the HTTP transport, for tests.
	Transport Transport

	// Now is the clock. Default time.Now.
	Now func() time.Time
}

func (o *Options) ensureDefaults() {
	if o.Name == "" {
		o.Name = "object"
	}
	if o.Workers == 0 {
		o.Workers = WorkersDefault
	}
	if o.Checksum == "" {
		o.Checksum = ChecksumAuto
	}
	if o.Conditional == "" {
		o.Conditional = ConditionalAuto
	}
	if o.IndexKeys == 0 {
		o.IndexKeys = IndexKeysDefault
	}
	if o.PresentFor == 0 {
		o.PresentFor = PresentForDefault
	}
	if o.AbsentFor == 0 {
		o.AbsentFor = AbsentForDefault
	}
	if o.ListPerSecond == 0 {
		o.ListPerSecond = ListPerSecDefault
	}
	if o.CapacityEvery == 0 {
		o.CapacityEvery = 5 * time.Minute
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.S3.ConnsMax == 0 {
		o.S3.ConnsMax = max(64, 2*o.Workers+headsMax)
	}
}

// Validate reports every fault at once, without sending anything.
func (o *Options) Validate() error {
	var errs []error
	bad := func(field string, v any, want string) {
		errs = append(errs, fmt.Errorf("object tier: %s is %v, want %s", field, v, want))
	}
	if o.S3.Bucket == "" {
		errs = append(errs, errors.New("object tier: bucket is empty; give the name of a bucket that is there"))
	}
	if strings.HasPrefix(o.Prefix, "/") || strings.HasSuffix(o.Prefix, "/") || strings.Contains(o.Prefix, "//") {
		bad("prefix", fmt.Sprintf("%q", o.Prefix), "no slash at either end and no two in a row")
	}
	if len(o.Prefix) > prefixBytesMax {
		bad("prefix", fmt.Sprintf("%d bytes long", len(o.Prefix)), fmt.Sprintf("at most %d", prefixBytesMax))
	}
	for _, f := range []struct {
		name string
		v    int64
	}{{"workers", int64(o.Workers)}, {"index_keys", int64(o.IndexKeys)}, {"present_for", int64(o.PresentFor)},
		{"absent_for", int64(o.AbsentFor)}, {"capacity", o.Capacity}, {"capacity_every", int64(o.CapacityEvery)}} {
		if f.v < 0 {
			bad(f.name, f.v, "0 (the default) or more")
		}
	}
	if !(o.RequestsPerSecond >= 0) {
		bad("requests_per_second", o.RequestsPerSecond, "0 for no bound, or more")
	}
	switch o.Checksum {
	case "", ChecksumAuto, ChecksumNone, s3.ChecksumCRC64NVME, s3.ChecksumCRC32C:
	default:
		bad("checksum", fmt.Sprintf("%q", o.Checksum), "auto, crc64nvme, crc32c or none")
	}
	switch o.Conditional {
	case "", ConditionalAuto, ConditionalOff:
	default:
		bad("conditional", fmt.Sprintf("%q", o.Conditional), "auto or off")
	}
	return errors.Join(errs...)
}
