package fstier

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"os"
	"strings"
	"sync"

	"github.com/minio/crc64nvme"
	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/internal/vfs"
)

// The usage file is written in place:
//
//	offset size
//	     0    8  magic "TERRACEU"
//	     8    4  version, 1
//	    12    4  flags; bit 0: closed in order, the bound is exact
//	    16    8  bound: bytes under the root are at most this many
//	    24   16  boot id of the kernel
//	    40   16  writer
//	    56    8  CRC64-NVME of bytes 0 to 55
//
// All numbers are big-endian. The bound is raised, in steps, before the bytes
// are used, by a write that a dead process cannot take back. A power cut can,
// so after another boot only an orderly close is believed; that spares a sync
// for each step.
const (
	usageSize    = 64
	usageMagic   = "TERRACEU"
	usageVersion = 1
	usageClean   = 1 << 0
)

type usageFile struct {
	mu   sync.Mutex // held during I/O
	file vfs.File
	boot [16]byte
	step int64

	// persisted is the bound in the file. The tier's mu guards it too: writing
	// takes both.
	persisted int64
}

func encodeUsage(bound int64, flags uint32, boot, writer [16]byte) []byte {
	b := make([]byte, usageSize)
	copy(b, usageMagic)
	binary.BigEndian.PutUint32(b[8:], usageVersion)
	binary.BigEndian.PutUint32(b[12:], flags)
	binary.BigEndian.PutUint64(b[16:], uint64(bound))
	copy(b[24:], boot[:])
	copy(b[40:], writer[:])
	binary.BigEndian.PutUint64(b[56:], crc64nvme.Checksum(b[:56]))
	return b
}

// decodeUsage returns the bound, and whether it can be relied on in this boot.
func decodeUsage(b []byte, boot [16]byte) (bound int64, ok bool) {
	if len(b) < usageSize || string(b[:8]) != usageMagic ||
		binary.BigEndian.Uint32(b[8:]) != usageVersion ||
		binary.BigEndian.Uint64(b[56:]) != crc64nvme.Checksum(b[:56]) {
		return 0, false
	}
	flags := binary.BigEndian.Uint32(b[12:])
	bound = int64(binary.BigEndian.Uint64(b[16:]))
	if flags&^usageClean != 0 || bound < 0 {
		return 0, false
	}
	return bound, flags&usageClean != 0 || bytes.Equal(b[24:40], boot[:])
}

// kernelBoot is the id of this boot. Where there is none it is random, and so
// never equal to a later one.
func (t *Tier) kernelBoot() (id [16]byte) {
	s := t.o.bootID
	if s == "" {
		b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
		if err != nil {
			_, _ = rand.Read(id[:])
			return id
		}
		s = string(b)
	}
	sum := crc64nvme.Checksum([]byte(s))
	binary.BigEndian.PutUint64(id[:], sum)
	copy(id[8:], strings.ReplaceAll(s, "-", ""))
	return id
}

// openUsage reads what the last run left and opens the file for this one.
func (t *Tier) openUsage() error {
	u := &t.usage
	u.boot = t.kernelBoot()
	u.step = usageStepMax
	if t.o.Capacity > 0 {
		u.step = min(max(t.o.Capacity/16, usageStepMin), usageStepMax)
	}
	f, err := t.fs.Open(t.place.usage, unix.O_RDWR|unix.O_CREAT|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return err
	}
	b := make([]byte, usageSize)
	n, err := vfs.ReadFull(f, [][]byte{b}, 0)
	if err != nil {
		_ = f.Close()
		return err
	}
	t.mu.Lock()
	a := &t.mu.account
	a.bound, a.hasBound = decodeUsage(b[:n], u.boot)
	if t.place.made {
		a.bound, a.hasBound = a.known, true // there are no blocks of this number
	}
	// A bound that cannot be believed is written as 0, since the file must have
	// its bytes now: it is among what is counted.
	u.persisted = 0
	if a.hasBound {
		u.persisted = t.boundFor(a.used())
	} else {
		a.bound = 0
	}
	to := u.persisted
	t.mu.Unlock()
	u.file = f
	err = u.write(t, to, 0)
	if err == nil {
		err = f.Sync()
	}
	var st vfs.Info
	if err == nil {
		st, err = f.Stat()
	}
	if err != nil {
		return err // the file is closed with the root
	}
	t.found(st.Bytes)
	return nil
}

func (u *usageFile) write(t *Tier, bound int64, flags uint32) error {
	boot := u.boot
	if bound == 0 {
		boot = [16]byte{} // no boot's: not to be believed
	}
	return vfs.WriteAll(u.file, [][]byte{encodeUsage(bound, flags, boot, t.writer)}, 0)
}

// boundFor is the bound to write for a number of bytes: a step more, but not
// more than ever can be used.
func (t *Tier) boundFor(used int64) int64 {
	to := used + t.usage.step
	if t.o.Capacity > 0 {
		to = max(used, min(to, t.o.Capacity))
	}
	return to
}

// raiseUsage makes the file's bound at least want.
func (t *Tier) raiseUsage(want int64) error {
	u := &t.usage
	u.mu.Lock()
	defer u.mu.Unlock()
	t.mu.Lock()
	enough := u.persisted >= want
	t.mu.Unlock()
	if enough {
		return nil
	}
	to := t.boundFor(want)
	if err := u.write(t, to, 0); err != nil {
		return err
	}
	t.mu.Lock()
	u.persisted = to
	t.mu.Unlock()
	return nil
}

// tightenUsage sets the bound to what is used now and a step.
func (t *Tier) tightenUsage() error {
	u := &t.usage
	u.mu.Lock()
	defer u.mu.Unlock()
	// Lowered in memory first: a write that needs more waits for u.mu then.
	t.mu.Lock()
	u.persisted = t.boundFor(t.mu.account.used())
	to := u.persisted
	t.mu.Unlock()
	return u.write(t, to, 0)
}

// closeUsage writes the exact number, if it is known, and closes the file. It
// says that it is exact only if no power cut can bring back what was removed.
func (t *Tier) closeUsage(ctx context.Context) error {
	u := &t.usage
	u.mu.Lock()
	defer u.mu.Unlock()
	t.mu.Lock()
	used, known := t.mu.account.used(), t.mu.account.scanned || t.mu.account.hasBound
	t.mu.Unlock()
	var err error
	if known {
		flags := uint32(usageClean)
		if serr := t.names.sync(ctx); serr != nil {
			t.log.Warn("what was removed may come back in a power cut; after one, writes will wait for the scan", "root", t.o.Root, "error", serr)
			flags = 0
		}
		if err = u.write(t, used, flags); err == nil {
			err = u.file.Sync()
		}
	}
	if cerr := u.file.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return t.openErr("write usage file of", err)
	}
	return nil
}
