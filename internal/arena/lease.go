package arena

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// LeasesMax bounds the leases in use at a time. An attach is one engine
// process; a node has some dozens.
const LeasesMax = 4096

// lockBytes hands out the offsets that leases lock. They have nothing to do
// with the bytes of the region: a lock at offset 7 says nothing about byte 7.
type lockBytes struct {
	next int64   // never used so far
	free []int64 // given back, the longest ago first
}

func (b *lockBytes) take() int64 {
	if len(b.free) > 0 {
		off := b.free[0]
		b.free = b.free[:copy(b.free, b.free[1:])]
		return off
	}
	b.next++
	return b.next - 1
}

func (b *lockBytes) give(offs ...int64) { b.free = append(b.free, offs...) }

// Lease tells whether an attach can still write to the region. Its life:
//
//	NewLease   the node holds the description and its lock
//	           pass File to the engine (SendFD, or inheritance)
//	HandOver   the node has closed its copy, whether passing worked or not
//	Held       until it says false, some process may still write
//	Release    the lock byte may be used again
//
// All methods may be called from any goroutine and in any order.
type Lease struct {
	arena  *Arena
	offset int64

	// Guarded by arena.mu.
	file     *os.File // nil once handed over
	quiet    bool     // the lock has been seen free; whoever locks the byte now is not this attach
	released bool
}

// NewLease opens a file description of the region for one attach and locks a
// byte of its own with it. Errors: ErrClosed, ErrLeases, or the kernel's.
func (a *Arena) NewLease() (*Lease, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.fd < 0 {
		return nil, ErrClosed
	}
	if len(a.mu.leases) >= LeasesMax {
		return nil, fmt.Errorf("%w (%d)", ErrLeases, LeasesMax)
	}
	// Only opening anew makes a description; dup and fork share one.
	fd, err := unix.Open(a.path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open shared memory for an attach at %s: %w", a.path, err)
	}
	l := &Lease{arena: a, file: os.NewFile(uintptr(fd), "arena")}

	// A byte that is locked although it belongs to nobody was locked by an
	// engine of its own accord. It is passed over, a few times.
	var taken []int64
	for range 8 {
		l.offset = a.mu.bytes.take()
		lk := l.flock()
		if err = unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &lk); err == nil {
			a.mu.leases[l] = struct{}{}
			break
		}
		taken = append(taken, l.offset)
		if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES) {
			break
		}
	}
	a.mu.bytes.give(taken...)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock byte %d of shared memory for an attach: %w", l.offset, err), l.closeFileLocked())
	}
	return l, nil
}

func (l *Lease) flock() unix.Flock_t {
	return unix.Flock_t{Type: unix.F_WRLCK, Whence: unix.SEEK_SET, Start: l.offset, Len: 1}
}

// Offset of the lock byte, for the log.
func (l *Lease) Offset() int64 { return l.offset }

// File is the descriptor to pass on, or nil after HandOver. The lease keeps
// owning it: the caller neither closes it nor uses it after HandOver.
func (l *Lease) File() *os.File {
	l.arena.mu.Lock()
	defer l.arena.mu.Unlock()
	return l.file
}

// HandOver closes the node's copy of the descriptor. From then on the lock
// lives as long as any process holds the descriptor or a mapping made from
// it. It is called after passing failed as well: the other side may have got
// it all the same. A second call does nothing.
func (l *Lease) HandOver() error {
	l.arena.mu.Lock()
	defer l.arena.mu.Unlock()
	return l.closeFileLocked()
}

func (l *Lease) closeFileLocked() error {
	if l.file == nil {
		return nil
	}
	f := l.file
	l.file = nil // close once: the number may be somebody else's after an error too
	return f.Close()
}

// Held tells whether any process, the node before HandOver included, can still
// write through this lease. Once false it stays false. With an error the
// answer is true: what is not known to be quiet is not. It is one system call
// of some hundred nanoseconds, with 1000 leases in use of some microseconds.
// Whoever looks into /proc/PID/fd of a holder is one itself for that moment,
// so a caller that needs false asks again later. After Arena.Close a lease not
// yet seen quiet answers true and ErrClosed.
func (l *Lease) Held() (bool, error) {
	l.arena.mu.Lock()
	defer l.arena.mu.Unlock()
	return l.heldLocked()
}

func (l *Lease) heldLocked() (bool, error) {
	switch {
	case l.quiet:
		return false, nil
	case l.arena.mu.fd < 0:
		return true, ErrClosed
	case l.file != nil:
		return true, nil
	}
	// Asked through the arena's description: a description does not see its
	// own locks.
	lk := l.flock()
	if err := unix.FcntlFlock(uintptr(l.arena.mu.fd), unix.F_OFD_GETLK, &lk); err != nil {
		return true, fmt.Errorf("test lock byte %d of shared memory: %w", l.offset, err)
	}
	l.quiet = lk.Type == unix.F_UNLCK
	return !l.quiet, nil
}

// Release gives the lock byte back for another lease, after HandOver and once
// Held is false. Until then it answers ErrHeld and changes nothing. A second
// call does nothing, nor does one after Arena.Close, when there is nothing
// left to give back.
func (l *Lease) Release() error {
	l.arena.mu.Lock()
	defer l.arena.mu.Unlock()
	if l.released || l.arena.mu.fd < 0 {
		return nil
	}
	held, err := l.heldLocked()
	if err != nil {
		return err
	}
	if held {
		return fmt.Errorf("%w (byte %d)", ErrHeld, l.offset)
	}
	l.released = true
	delete(l.arena.mu.leases, l)
	l.arena.mu.bytes.give(l.offset)
	return nil
}
