package fstier

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
)

// reservation is bytes that a write may use. settle ends it.
type reservation struct {
	t     *Tier
	bytes int64

	// An evicted block's file in tmp, of the size that was asked for, or "".
	// It has no readers. Writing over it spares the file system freeing and
	// allocating as much again, which takes ten times as long; see takeOver.
	file string
}

// settle ends a reservation of which used bytes are in a file now.
func (r *reservation) settle(used int64) {
	r.t.mu.Lock()
	defer r.t.mu.Unlock()
	r.settleLocked(used)
}

func (r *reservation) settleLocked(used int64) {
	if r.bytes > 0 {
		r.t.mu.account.settle(r.bytes, used)
		r.bytes = 0
	}
}

// freeSpace is the last answer of statfs, less what was reserved since. The
// tier's mu guards it.
type freeSpace struct {
	at    time.Time
	bytes int64
	block int64
}

// reserve makes room for size bytes in one file, evicting what was used least
// recently, but none of the named keys. After it, capacity, floor and usage
// file all hold with those bytes in use. With full, the error of a file system
// that has no space, as much is evicted in any case, or full is returned.
func (t *Tier) reserve(ctx context.Context, op string, key block.Key, size int64, n *namespace, named []tier.Item, full error) (*reservation, error) {
	skip := func(e *entry) bool {
		if n == nil || e.ns != n.id {
			return false
		}
		for i := range named {
			if k := &named[i].Key; e.group == k[block.KeySize-1] && e.hash == [block.HashSize]byte(k[:block.HashSize]) {
				return true
			}
		}
		return false
	}
	refuse := func(cause tier.Cause, hint, format string, args ...any) error {
		return &tier.Error{Op: op, Tier: t.o.Name, Key: key, Class: tier.ClassPermanent, Cause: cause, Err: fmt.Errorf(format, args...), Hint: hint}
	}
	scanning := func(what string) error {
		return &tier.Error{Op: op, Tier: t.o.Name, Key: key, Class: tier.ClassRetryable, Cause: tier.CauseScanning, Err: errors.New(what),
			Hint: "wait for the scan of root to end; status shows its progress"}
	}
	failures, floorRounds := 0, 0
	evicted := int64(0)
	for {
		if err := ctx.Err(); err != nil {
			return nil, t.cancelled(op, key, err)
		}
		space, err := t.space(size)
		if err != nil {
			return nil, t.fail(op, key, err)
		}
		t.mu.Lock()
		a := &t.mu.account
		if !a.scanned && !a.hasBound {
			t.mu.Unlock()
			return nil, scanning("the tier does not know yet how full it is")
		}
		need := (size+space.block-1)/space.block*space.block + a.extra
		used := a.used()
		var over, below int64
		if t.o.Capacity > 0 {
			over = used + need - t.o.Capacity
		}
		if t.o.MinFree > 0 {
			below = t.o.MinFree - (t.mu.free.bytes - need)
		}
		if below > 0 {
			floorRounds++
		}
		if below > floorEvictMax || (below > 0 && below > t.mu.index.listed) || floorRounds > floorRoundsMax {
			free := t.mu.free.bytes
			t.mu.Unlock()
			return nil, refuse(tier.CauseFloor, "free some space, or lower min_free", "%d bytes are free, and %d must stay so", free, t.o.MinFree)
		}
		lacking := int64(0)
		if full != nil {
			lacking = need - evicted
		}
		if short := max(over, below, lacking); short > 0 {
			var victims []victim
			if short <= t.mu.index.listed {
				victims = t.claimLocked(short, skip)
			}
			scanned := a.scanned
			t.mu.Unlock()
			switch {
			case len(victims) == 1 && n != nil && victims[0].bytes == need && !t.o.Shared:
				r, err := t.takeOver(victims[0])
				if r != nil {
					return r, nil
				}
				if err != nil {
					if failures++; failures >= evictFailuresMax {
						return nil, t.fail(op, key, fmt.Errorf("make room: %w", err))
					}
				} else {
					evicted += victims[0].bytes
				}
				continue
			case len(victims) > 0:
			case lacking > 0:
				return nil, full
			case !scanned:
				return nil, scanning("nothing to evict has been found yet")
			case over > 0:
				return nil, refuse(tier.CauseCapacity, "raise capacity", "%d of %d bytes are used and nothing can be evicted for %d more", used, t.o.Capacity, need)
			default:
				return nil, refuse(tier.CauseFloor, "free some space, or lower min_free", "too little space is free, and nothing can be evicted for %d more bytes", need)
			}
			failed, err := t.evictAll(victims)
			if failures += failed; failures >= evictFailuresMax {
				return nil, t.fail(op, key, fmt.Errorf("make room: %w", err))
			}
			for _, v := range victims[failed:] { // about, if some failed
				evicted += v.bytes
			}
			continue
		}
		if used+need > t.usage.persisted {
			t.mu.Unlock()
			if err := t.raiseUsage(used + need); err != nil {
				return nil, t.fail(op, key, fmt.Errorf("raise the bound in the usage file: %w", err))
			}
			continue
		}
		a.reserve(need)
		t.mu.free.bytes -= need
		t.mu.Unlock()
		return &reservation{t: t, bytes: need}, nil
	}
}

// space is what statfs said not long ago, asked again if that is too old or
// too near the floor to rely on.
func (t *Tier) space(size int64) (freeSpace, error) {
	now := t.o.Now()
	t.mu.Lock()
	s := t.mu.free
	t.mu.Unlock()
	most := spaceAgeMax
	if t.o.Shared {
		most /= 10 // others write too
	}
	if s.block > 0 && (t.o.MinFree <= 0 || (now.Sub(s.at) < most && now.Sub(s.at) >= 0 && s.bytes-2*size > t.o.MinFree)) {
		return s, nil
	}
	sp, err := t.fs.Space()
	if err != nil {
		return s, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	// Of what is reserved some may be written, and so be counted twice: the
	// error is to the safe side and ends with the write.
	t.mu.free = freeSpace{at: now, bytes: sp.Free - t.mu.account.inflight, block: max(sp.Block, 512)}
	return t.mu.free, nil
}

// victim is a block that an eviction has claimed.
type victim struct {
	n     *namespace
	key   block.Key
	bytes int64
}

// claimLocked claims at least want bytes of the least recently used blocks,
// but not more than a few dozen blocks at a time. What is claimed must be
// passed to evict.
func (t *Tier) claimLocked(want int64, skip func(*entry) bool) []victim {
	var out []victim
	for want > 0 && len(out) < 64 {
		h := t.mu.index.claim(skip)
		if h == 0 {
			break
		}
		e := t.mu.index.at(h)
		want -= e.bytes()
		out = append(out, victim{t.mu.byID[e.ns], e.key(), e.bytes()})
	}
	return out
}

// evictAll evicts all victims that it can, and tells of those that it cannot.
func (t *Tier) evictAll(victims []victim) (failed int, last error) {
	for _, v := range victims {
		if err := t.evict(v); err != nil {
			failed++
			last = err
		}
	}
	return failed, last
}

// evict removes a claimed block's file, unless its key was deleted or written
// anew meanwhile.
func (t *Tier) evict(v victim) error {
	mu := t.stripeOf(v.n, &v.key)
	mu.Lock()
	defer mu.Unlock()
	h := t.claimed(v)
	if h == 0 {
		return nil
	}
	err := error(unix.ENOENT)
	if !t.notOurs(v.n.file(v.key)) {
		err = t.fs.Remove(v.n.file(v.key))
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.evictedLocked(v, h, err)
}

// claimed is the handle of a victim, or 0 if it is none any more. The victim's
// stripe keeps the answer true.
func (t *Tier) claimed(v victim) uint32 {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := t.mu.index.find(v.n.id, &v.key)
	if h != 0 && t.mu.index.at(h).flags&flagBusy == 0 {
		return 0
	}
	return h
}

// evictedLocked drops the entry of a victim whose name is gone, or gives it
// back if err says that it is not.
func (t *Tier) evictedLocked(v victim, h uint32, err error) error {
	if err != nil && !gone(err) {
		t.mu.index.unclaim(h)
		return err
	}
	t.mu.free.bytes += v.bytes
	t.dropLocked(v.n, h)
	if err == nil {
		t.mu.evicted++
	}
	return nil
}

// takeOver evicts a block, and keeps its file as the reservation of a write
// that needs just as much. It returns nil if the file cannot be had; then
// there may be room now, or another victim is needed.
//
// No reader sees the file change. A read counts itself in its stripe before it
// opens the name; here the name goes first and the count is looked at after.
// So either the read is seen, and the file is removed as in any eviction, or
// the read finds no name.
func (t *Tier) takeOver(v victim) (*reservation, error) {
	mu := t.stripeOf(v.n, &v.key)
	mu.Lock()
	defer mu.Unlock()
	h := t.claimed(v)
	if h == 0 {
		return nil, nil
	}
	tmp := t.tmpFile()
	err := t.fs.Rename(v.n.file(v.key), tmp)
	if err != nil {
		if _, lerr := t.fs.Lstat(tmp); lerr == nil {
			err = nil // done all the same
		}
	}
	moved := err == nil
	if gone(err) { // the victim is, or tmp: somebody removed it
		err = t.fs.Remove(v.n.file(v.key))
	}
	ours := moved && mu.readers.Load() == 0
	stuck := false
	if moved && !ours {
		if err := t.fs.Remove(tmp); err != nil && !gone(err) {
			stuck = true
			t.log.Warn("cannot remove an evicted file", "path", t.path(tmp), "error", err)
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.evictedLocked(v, h, err); err != nil {
		return nil, err
	}
	switch {
	case ours:
		t.mu.account.reserve(v.bytes)
		t.mu.free.bytes -= v.bytes
		return &reservation{t: t, bytes: v.bytes, file: tmp}, nil
	case stuck:
		t.mu.account.add(v.bytes)
		t.keepStrayLocked(tmp, v.bytes)
	}
	return nil, nil
}

// trim evicts until the capacity holds, for a root that was filled under a
// larger one. It stops at what cannot be removed.
func (t *Tier) trim(ctx context.Context) error {
	failures := 0
	for t.o.Capacity > 0 && ctx.Err() == nil {
		t.mu.Lock()
		victims := t.claimLocked(t.mu.account.used()-t.o.Capacity, func(*entry) bool { return false })
		t.mu.Unlock()
		if len(victims) == 0 {
			break
		}
		failed, err := t.evictAll(victims)
		if failures += failed; failures >= evictFailuresMax {
			return err
		}
	}
	return nil
}

// inSpace makes a call that stores something, and if the file system has no
// space for it makes it once more, after as much has been evicted. Where no
// capacity or floor keeps the tier below what the medium has, this is what
// makes it a cache and not a heap that is full one day.
func (t *Tier) inSpace(call func(full error) error) error {
	err := call(nil)
	if !errIs(err, unix.ENOSPC, unix.EDQUOT) {
		return err
	}
	t.forgetSpace()
	if err = call(err); errIs(err, unix.ENOSPC, unix.EDQUOT) {
		t.forgetSpace()
		return err
	}
	t.fullOnce.Do(func() {
		t.log.Warn("the file system has no space left: the least recently used blocks are evicted for new ones, which costs each write a failed one; set capacity below what the tier can have",
			"root", t.o.Root, "capacity_bytes", t.o.Capacity, "used_bytes", t.Stats().UsedBytes)
	})
	return err
}

// forgetSpace forgets what statfs said, since a write just learned better.
func (t *Tier) forgetSpace() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.free.at = time.Time{}
}

// warnFloor says at the start that the floor will refuse writes.
func (t *Tier) warnFloor() {
	space, err := t.fs.Space()
	if err != nil || t.o.MinFree <= 0 {
		return
	}
	log := t.log.With("setting", "min_free", "min_free_bytes", t.o.MinFree, "free_bytes", space.Free, "root", t.o.Root)
	var st unix.Statfs_t
	size := int64(0)
	if unix.Statfs(t.o.Root, &st) == nil {
		size = int64(st.Blocks) * st.Bsize
	}
	switch {
	case size > 0 && t.o.MinFree >= size:
		log.Warn("min_free is more than the whole file system has: no block can be stored; set min_free to less, or root to a larger file system", "file_system_bytes", size)
	case t.o.MinFree > space.Free:
		log.Warn("less space is free than min_free keeps for others: writes are refused until enough is freed; free some space, or lower min_free", "missing_bytes", t.o.MinFree-space.Free)
	}
}
