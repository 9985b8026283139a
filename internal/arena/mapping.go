package arena

import (
	"fmt"
	"os"
	"runtime"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Mapping is the region as an engine's process sees it.
type Mapping struct {
	size int64
	mem  atomic.Pointer[[]byte] // nil once closed
}

// Map maps the region that the node has passed as f. It first checks that the
// region is size bytes and sealed against shrinking, so that no access to the
// mapping can fault whatever anybody else does; ErrNotRegion if not. f stays
// the caller's and may be closed at once: the mapping alone holds the lease.
func Map(f *os.File, size int64) (*Mapping, error) {
	defer runtime.KeepAlive(f)
	if size <= 0 || int64(int(size)) != size {
		return nil, fmt.Errorf("map shared memory: size %d", size)
	}
	fd := int(f.Fd())
	// Seals first: without them the size may change after it was looked at.
	got, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: read its seals: %w", ErrNotRegion, err)
	}
	if got&unix.F_SEAL_SHRINK == 0 {
		return nil, fmt.Errorf("%w: seals %#x leave out F_SEAL_SHRINK", ErrNotRegion, got)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("%w: read its size: %w", ErrNotRegion, err)
	}
	if st.Size != size {
		return nil, fmt.Errorf("%w: it is %d bytes, the node said %d", ErrNotRegion, st.Size, size)
	}
	mem, err := mapShared(fd, size)
	if err != nil {
		return nil, err
	}
	m := &Mapping{size: size}
	m.mem.Store(&mem)
	return m, nil
}

// Size in bytes.
func (m *Mapping) Size() int64 { return m.size }

// Bytes is the n bytes at off, with capacity n. Offsets come from the node in
// a message, so a wrong one is an error, as is ErrClosed. The view is valid
// until Close.
func (m *Mapping) Bytes(off, n int64) ([]byte, error) {
	mem := m.mem.Load()
	if mem == nil {
		return nil, ErrClosed
	}
	b, ok := view(*mem, off, n, n)
	if !ok {
		return nil, fmt.Errorf("offset %d, length %d outside a region of %d bytes", off, n, m.size)
	}
	return b, nil
}

// Close unmaps. No view may be in use: whoever touches one afterwards gets a
// fatal fault. A second call does nothing.
func (m *Mapping) Close() error {
	mem := m.mem.Swap(nil)
	if mem == nil {
		return nil
	}
	if err := unix.Munmap(*mem); err != nil {
		return fmt.Errorf("unmap shared memory: %w", err)
	}
	return nil
}
