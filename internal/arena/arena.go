package arena

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/terrace-kv/terrace/tier"
	"golang.org/x/sys/unix"
)

const (
	align = tier.Align

	// PopulateStep is the default of Populate: large enough that the system
	// call does not count, small enough that a cancel takes milliseconds.
	PopulateStep = 16 << 20

	// PoisonByte fills places that nobody may read (0xCC).
	PoisonByte = 0xCC

	nameMax = 249 // of memfd_create
	seals   = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
)

// Options of Open. The zero value of every field but Size is usable.
type Options struct {
	// Size of the region in bytes (primary.size): above 0, a multiple of 4096.
	Size int64

	// Name shows as /memfd:NAME in /proc/PID/maps. Default "terrace".
	Name string

	// Lock keeps populated pages from being swapped out. It needs
	// RLIMIT_MEMLOCK or CAP_IPC_LOCK, so it is off by default.
	Lock bool

	// CgroupRoot is where cgroups are mounted. Default /sys/fs/cgroup.
	CgroupRoot string

	// IgnoreCgroup skips the check against cgroup limits, for hosts where
	// they are not what they seem. The host's own memory is checked always.
	IgnoreCgroup bool

	procRoot string // tests only: where meminfo, self/cgroup, sys/vm are read
}

// EnsureDefaults fills what was left empty.
func (o *Options) EnsureDefaults() {
	if o.Name == "" {
		o.Name = "terrace"
	}
	if o.CgroupRoot == "" {
		o.CgroupRoot = "/sys/fs/cgroup"
	}
	if o.procRoot == "" {
		o.procRoot = "/proc"
	}
}

// Validate reports every fault, by field.
func (o *Options) Validate() error {
	var errs []error
	if o.Size <= 0 || o.Size%align != 0 || int64(int(o.Size)) != o.Size {
		errs = append(errs, fmt.Errorf("primary.size: %d bytes; must be above 0 and a multiple of %d", o.Size, align))
	}
	if len(o.Name) > nameMax {
		errs = append(errs, fmt.Errorf("arena name: %d bytes; at most %d", len(o.Name), nameMax))
	}
	return errors.Join(errs...)
}

// Arena is the region as its owner, the node, sees it. All methods may be
// called from any goroutine; those that give out or write bytes (Bytes, Block,
// Poison, ZeroPad) take no lock and leave it to the core that no two callers
// use one place at a time.
type Arena struct {
	size   int64
	locked bool
	path   string                 // of the descriptor, for descriptions of one's own
	mem    atomic.Pointer[[]byte] // nil once closed

	populated  atomic.Int64                     // only grows
	populateMu sync.Mutex                       // one step at a time; taken before mu
	madvise    func(b []byte, advice int) error // tests only: an old kernel

	// mu guards the descriptor against being closed, and its number reused,
	// beneath a system call.
	mu struct {
		sync.Mutex
		fd     int // -1 once closed
		leases map[*Lease]struct{}
		bytes  lockBytes
	}
}

// Open checks that the region fits into the memory this process may use,
// creates, seals and maps it. It takes no pages yet. On an error nothing is
// left behind; *LimitError says that it does not fit and what to change.
func Open(ctx context.Context, opts Options) (_ *Arena, err error) {
	opts.EnsureDefaults()
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := checkMemory(&opts); err != nil {
		return nil, err
	}

	// NOEXEC where the kernel knows it (6.3): some hosts refuse a memfd that
	// could be executed.
	fd, err := unix.MemfdCreate(opts.Name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) {
		fd, err = unix.MemfdCreate(opts.Name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return nil, fmt.Errorf("create shared memory %q: %w", opts.Name, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, unix.Close(fd))
		}
	}()
	if err := unix.Ftruncate(fd, opts.Size); err != nil {
		return nil, fmt.Errorf("primary.size: size shared memory to %d bytes: %w", opts.Size, err)
	}
	// Another user's engine uses the descriptor it is given; it has no reason
	// to open the region anew, which would escape its lease.
	if err := unix.Fchmod(fd, 0o600); err != nil {
		return nil, fmt.Errorf("restrict shared memory: %w", err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		return nil, fmt.Errorf("seal shared memory: %w", err)
	}
	mem, err := mapShared(fd, opts.Size)
	if err != nil {
		return nil, fmt.Errorf("primary.size: %w", err)
	}
	if opts.Lock {
		if err := lockOnFault(mem); err != nil {
			return nil, errors.Join(fmt.Errorf("lock %s of shared memory: %w; raise RLIMIT_MEMLOCK (LimitMEMLOCK, ulimit -l) or switch locking off",
				human(opts.Size), err), unix.Munmap(mem))
		}
	}
	a := &Arena{size: opts.Size, locked: opts.Lock, path: "/proc/self/fd/" + strconv.Itoa(fd), madvise: unix.Madvise}
	a.mem.Store(&mem)
	a.mu.fd, a.mu.leases = fd, map[*Lease]struct{}{}
	return a, nil
}

// mapShared maps all of a region, and keeps it out of core dumps: they would
// hold what tenants said to their models, and be as large as the primary.
func mapShared(fd int, size int64) ([]byte, error) {
	mem, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes of shared memory: %w", size, err)
	}
	_ = unix.Madvise(mem, unix.MADV_DONTDUMP) // a kernel that does not know it still works
	return mem, nil
}

// lockOnFault locks pages as they come, so that locking does not wait for all
// of them at once.
func lockOnFault(mem []byte) error {
	_, _, errno := unix.Syscall(unix.SYS_MLOCK2, uintptr(unsafe.Pointer(&mem[0])), uintptr(len(mem)), unix.MLOCK_ONFAULT)
	if errno != 0 {
		return errno
	}
	return nil
}

// Size in bytes; it never changes.
func (a *Arena) Size() int64 { return a.size }

// view is the one bounds check: mem[off:off+length:off+room].
func view(mem []byte, off, length, room int64) ([]byte, bool) {
	size := int64(len(mem))
	if off < 0 || length < 0 || room < length || off > size || room > size-off {
		return nil, false
	}
	return mem[off : off+length : off+room], true
}

func (a *Arena) view(off, length, room int64) []byte {
	mem := a.mem.Load()
	if mem == nil {
		panic("arena: used after Close")
	}
	b, ok := view(*mem, off, length, room)
	if !ok {
		// Offsets come from the core alone. A wrong one is a bug that would
		// serve or destroy somebody else's bytes.
		panic(fmt.Sprintf("arena: offset %d, length %d, room %d outside a region of %d bytes", off, length, room, a.size))
	}
	return b
}

// Bytes is the n bytes at off, with capacity n. It panics when they are not
// all inside the region, or after Close: offsets come from the core, so only
// a bug can do that. The view is valid until Close.
func (a *Arena) Bytes(off, n int64) []byte { return a.view(off, n, n) }

// Block is the block of length bytes in the slot of stride bytes at off, as
// tier.Item.Buf wants it: capacity stride, aligned to 4096. It panics as Bytes
// does, and when off or stride are not multiples of 4096.
func (a *Arena) Block(off int64, length, stride int) []byte {
	if off%align != 0 || stride%align != 0 {
		panic(fmt.Sprintf("arena: slot at %d with stride %d is not aligned to %d", off, stride, align))
	}
	return a.view(off, int64(length), int64(stride))
}

// ZeroPad clears the padding of the block that Block(off, length, stride)
// gives.
func (a *Arena) ZeroPad(off int64, length, stride int) {
	b := a.Block(off, length, stride)
	clear(b[length:cap(b)])
}

// Poison fills n bytes at off with PoisonByte, so that whoever still reads
// them finds out.
func (a *Arena) Poison(off, n int64) {
	b := a.Bytes(off, n)
	if n == 0 {
		return
	}
	b[0] = PoisonByte
	for done := 1; done < len(b); done *= 2 { // copies, since the race detector looks at each plain write
		copy(b[done:], b[:done])
	}
}

// Populate takes the region's pages now instead of on first use, in steps of
// step bytes (0: PopulateStep; rounded up to pages), and tells progress, if
// given, after each. It never changes content, so the region may be in use
// meanwhile. It ends with ctx.Err() at most one step after ctx has ended, and
// goes on where the last call stopped.
//
// Errors: ErrPopulateUnsupported on an old kernel, ErrClosed, or what the
// kernel said when memory ran out. The region stays usable after each, but
// memory that could not be populated may be missing later as well.
func (a *Arena) Populate(ctx context.Context, step int64, progress func(done, total int64)) error {
	if step <= 0 {
		step = PopulateStep
	}
	page := int64(os.Getpagesize())
	step = min((step+page-1)/page*page, (a.size+page-1)/page*page)
	for a.Populated() < a.size {
		if err := ctx.Err(); err != nil {
			return err
		}
		done, err := a.populateStep(step)
		if err != nil {
			return err
		}
		if progress != nil {
			progress(done, a.size)
		}
	}
	return nil
}

func (a *Arena) populateStep(step int64) (done int64, err error) {
	a.populateMu.Lock()
	defer a.populateMu.Unlock()
	mem := a.mem.Load()
	if mem == nil {
		return 0, ErrClosed
	}
	off := a.populated.Load()
	end := off + min(step, a.size-off)
	if off == end { // another Populate has been quicker
		return end, nil
	}
	for {
		err = a.madvise((*mem)[off:end], unix.MADV_POPULATE_WRITE)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	switch {
	case errors.Is(err, unix.EINVAL):
		return off, ErrPopulateUnsupported
	case err != nil:
		return off, fmt.Errorf("populate primary at %d of %d bytes: %w; lower primary.size or free memory", off, a.size, err)
	}
	a.populated.Store(end)
	return end, nil
}

// Populated is how many bytes Populate has taken so far.
func (a *Arena) Populated() int64 { return a.populated.Load() }

// Stats of the region, for status and metrics.
type Stats struct {
	SizeBytes      int64
	PopulatedBytes int64 // by Populate
	AllocatedBytes int64 // pages in existence, whoever touched them first
	Locked         bool  // pages are not swapped out
	Leases         int   // attaches whose lock byte is not given back yet
}

// Stats does one cheap system call. After Close AllocatedBytes and Leases are 0.
func (a *Arena) Stats() Stats {
	s := Stats{SizeBytes: a.size, PopulatedBytes: a.Populated(), Locked: a.locked}
	a.mu.Lock()
	defer a.mu.Unlock()
	s.Leases = len(a.mu.leases)
	var st unix.Stat_t
	if a.mu.fd >= 0 && unix.Fstat(a.mu.fd, &st) == nil {
		s.AllocatedBytes = st.Blocks * 512
	}
	return s
}

// Close unmaps the region and closes the node's descriptors of it, those of
// leases not handed over included. It must not be called beneath work in
// flight: who still uses a view gets a fatal fault. If such work cannot be
// ended, leave the region to the end of the process. Other processes
// keep what they have mapped, and leases not known to be quiet tell ErrClosed.
// A second call does nothing.
func (a *Arena) Close() error {
	a.populateMu.Lock()
	defer a.populateMu.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	mem := a.mem.Swap(nil)
	if mem == nil {
		return nil
	}
	var errs []error
	for l := range a.mu.leases {
		errs = append(errs, l.closeFileLocked())
	}
	clear(a.mu.leases)
	errs = append(errs, unix.Munmap(*mem), unix.Close(a.mu.fd))
	a.mu.fd = -1
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close shared memory: %w", err)
	}
	return nil
}
