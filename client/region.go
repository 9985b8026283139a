package client

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/minio/crc64nvme"
	"github.com/terrace-kv/terrace/internal/arena"
	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/internal/wire"
)

// RegionInfo describes the shared memory of a session. It is a plain value, to
// be given to workers.
type RegionInfo struct {
	Epoch       string // of the session
	RegionBytes int64
	Groups      []GroupInfo
}

// GroupInfo says how the blocks of a KV group lie in the region.
type GroupInfo struct {
	BlockBytes int64 // length of a block
	Stride     int64 // from one slot to the next, a multiple of 4096
}

// Lease names a block that is pinned for a request: it stays where it is, and
// what it is, until the lease ends. A zero Lease is none.
type Lease struct {
	Epoch string
	Group uint32
	Slot  uint32 // in pages of 4096 bytes
	Gen   uint32
	Sum   uint64 // CRC64-NVME of the block
}

// Valid says that there is a lease at all, though not that it has not ended.
func (l Lease) Valid() bool { return l.Epoch != "" }

// Grant is the answer to a reserve for one key. With Status Granted, the slot
// is the request's to write, until commit or abort.
type Grant struct {
	Status GrantStatus
	Epoch  string
	Group  uint32
	Slot   uint32 // in pages of 4096 bytes
	Gen    uint32
}

// Fill is the commit of a granted slot whose block has the checksum sum.
func (g Grant) Fill(sum uint64) Fill { return Fill{Grant: g, Sum: sum, HasSum: true} }

// FillUnsummed is the commit of a granted slot whose checksum the node computes;
// the block is HitPending until then.
func (g Grant) FillUnsummed() Fill { return Fill{Grant: g} }

// Fill names a granted slot that has been written.
type Fill struct {
	Grant  Grant
	Sum    uint64 // CRC64-NVME of the block, when HasSum
	HasSum bool
}

// Sum is the checksum of a block: CRC64-NVME.
func Sum(b []byte) uint64 { return crc64nvme.Checksum(b) }

// sumStep is how much is copied between two passes over it for the checksum:
// it is still in the nearest cache then.
const sumStep = 16 << 10

// CopySum copies src to dst, which is as long, and returns the checksum of
// src, all in one pass over memory.
func CopySum(dst, src []byte) (sum uint64) {
	for len(src) > 0 {
		n := copy(dst, src[:min(sumStep, len(src))])
		sum = crc64nvme.Update(sum, src[:n])
		dst, src = dst[n:], src[n:]
	}
	return sum
}

// Region is the shared memory of one session, as this process maps it. Its
// methods may be called from any goroutine.
type Region struct {
	info   RegionInfo
	verify bool
	mem    *arena.Mapping

	mu    sync.Mutex
	open  map[uint32]uint32 // granted slots that are not committed or aborted, with their generation; nil in a worker
	views int               // functions of View and Write that run
	ended bool              // no more of them
	idle  chan struct{}     // closed when ended and none runs
}

// newRegion maps what a descriptor holds. The file stays the caller's.
func newRegion(f *os.File, info RegionInfo, verify bool) (*Region, error) {
	mem, err := arena.Map(f, info.RegionBytes)
	if err != nil {
		return nil, err
	}
	return &Region{info: info, verify: verify, mem: mem, idle: make(chan struct{})}, nil
}

// granted and endGrants keep count of the slots that are the engine's to write.
func (r *Region) granted(grants []Grant) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, g := range grants {
		if g.Status == Granted {
			r.open[g.Slot] = g.Gen
		}
	}
}

func (r *Region) endGrants(fills []core.Fill) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, f := range fills {
		if r.open[uint32(f.Slot)] == f.Gen {
			delete(r.open, uint32(f.Slot))
		}
	}
}

func regionInfo(r *wire.Region) (RegionInfo, error) {
	out := RegionInfo{Epoch: r.Epoch, RegionBytes: int64(r.RegionBytes), Groups: make([]GroupInfo, len(r.Groups))}
	for i, g := range r.Groups {
		if g.BlockBytes == 0 || g.Stride < g.BlockBytes || g.Stride > r.RegionBytes || g.Stride%core.PageSize != 0 {
			return out, fmt.Errorf("%w: group %d has blocks of %d bytes every %d", ErrMalformed, i, g.BlockBytes, g.Stride)
		}
		out.Groups[i] = GroupInfo{BlockBytes: int64(g.BlockBytes), Stride: int64(g.Stride)}
	}
	if out.Epoch == "" {
		return out, fmt.Errorf("%w: session without an epoch", ErrMalformed)
	}
	return out, nil
}

// MapInherited maps the region that a parent process passed on: Client.File,
// inherited, and Client.Info().RegionInfo. The process does not hear of the end
// of the session, so the parent has to tell it to Close; until then the node
// keeps the slots that the session was writing out of use. f stays the caller's, and is to be
// closed after this: it keeps the region as the mapping does.
func MapInherited(f *os.File, info RegionInfo, verifyOnLoad bool) (*Region, error) {
	return newRegion(f, info, verifyOnLoad)
}

// Info describes the region.
func (r *Region) Info() RegionInfo { return r.info }

// Close refuses further views, waits for those that run, and unmaps.
func (r *Region) Close() error {
	r.end()
	<-r.idle
	return r.mem.Close()
}

// end refuses further views.
func (r *Region) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.ended {
		r.ended = true
		if r.views == 0 {
			close(r.idle)
		}
	}
}

func (r *Region) enter() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return ErrSessionLost
	}
	r.views++
	return nil
}

func (r *Region) leave() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.views--; r.views == 0 && r.ended {
		close(r.idle)
	}
}

// at runs fn on the bytes of a place, which cannot go away meanwhile.
func (r *Region) at(epoch string, group, slot uint32, fn func(b []byte) error) error {
	switch {
	case epoch == "":
		return errors.New("no block: the key was not a Hit, or nothing was granted for it")
	case epoch != r.info.Epoch:
		return fmt.Errorf("%w: %s, now it is %s", ErrStale, epoch, r.info.Epoch)
	case int64(group) >= int64(len(r.info.Groups)):
		return fmt.Errorf("%w: group %d, the namespace has %d", ErrInvalid, group, len(r.info.Groups))
	}
	if err := r.enter(); err != nil {
		return err
	}
	defer r.leave()
	b, err := r.mem.Bytes(core.Slot(slot).Offset(), r.info.Groups[group].BlockBytes)
	if err != nil {
		return err
	}
	return fn(b)
}

// View gives fn the block's bytes to read. They are valid until fn returns.
// When the session ends meanwhile, they stay mapped but may become another
// block's. Errors: ErrStale, ErrSessionLost, or fn's.
func (r *Region) View(l Lease, fn func(b []byte) error) error {
	return r.at(l.Epoch, l.Group, l.Slot, fn)
}

// Write gives fn the bytes of a granted slot to fill. They are valid until fn
// returns; the slot is written when it is committed.
// Errors: ErrStale, ErrSessionLost, or fn's. In the engine's own process a
// grant that was committed or aborted is ErrStale; a worker must not write it.
func (r *Region) Write(g Grant, fn func(b []byte) error) error {
	if g.Status != Granted {
		return fmt.Errorf("%w: nothing was granted for this key (%v)", ErrInvalid, g.Status)
	}
	r.mu.Lock()
	ended := r.open != nil && g.Epoch == r.info.Epoch && r.open[g.Slot] != g.Gen
	r.mu.Unlock()
	if ended {
		return fmt.Errorf("%w: the grant of slot %d was committed or aborted", ErrStale, g.Slot)
	}
	return r.at(g.Epoch, g.Group, g.Slot, fn)
}

// ReadInto copies the block to dst, which is as long as a block of the group,
// and verifies it if the client does so. Errors: as View, ErrSize, ErrCorrupt.
func (r *Region) ReadInto(l Lease, dst []byte) error {
	return r.View(l, func(b []byte) error {
		if len(dst) != len(b) {
			return fmt.Errorf("%w: %d bytes for a block of %d", ErrSize, len(dst), len(b))
		}
		if !r.verify {
			copy(dst, b)
			return nil
		}
		// The sum is of what was copied, not of what is there: another
		// process may write in between.
		n := 0
		var sum uint64
		for n < len(b) {
			end := min(n+sumStep, len(b))
			copy(dst[n:end], b[n:end])
			sum = crc64nvme.Update(sum, dst[n:end])
			n = end
		}
		return l.compare(sum)
	})
}

// Verify compares the block's bytes with its checksum. Errors: as View,
// ErrCorrupt.
func (r *Region) Verify(l Lease) error {
	return r.View(l, func(b []byte) error { return l.compare(Sum(b)) })
}

func (l Lease) compare(sum uint64) error {
	if sum != l.Sum {
		return fmt.Errorf("%w: slot %d generation %d has %016x, want %016x", ErrCorrupt, l.Slot, l.Gen, sum, l.Sum)
	}
	return nil
}
