package sweep

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/minio/crc64nvme"
	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/content"
	"github.com/terrace-kv/terrace/internal/fault"
	"github.com/terrace-kv/terrace/internal/vfs"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/fstier"
)

var (
	crashSeed  = flag.Uint64("seed", 0, "of the one crash to replay; 0 runs many")
	crashSeeds = flag.Int("seeds", map[bool]int{true: 800, false: 4000}[raceEnabled], "crashes to run, half of them from seed 1 on and half from a fresh one")
)

const (
	crashKeys  = 24   // that are written
	crashBytes = 6000 // of a block; with header and padding 12 KiB on the medium
)

// crash is one run up to a power cut, and what is known of it then.
type crash struct {
	seed   uint64
	r      *rand.Rand
	ns     *block.Namespace
	o      fstier.Options
	cannot func(vfs.Call) vfs.Fault // what the file system has no support for
	buf    []byte
	trace  []string

	mem   *vfs.Mem
	calls int          // of the file system, until the power is cut
	tier  *fstier.Tier // nil while it is opened or closed
	acked map[int]bool // by number: written, and not asked to go since
	there map[int]bool // acked, and still known when the tier was last closed

	after *vfs.Mem     // what the power cut left
	must  map[int]bool // acked and known when the power was cut

	kept, lost, torn int // of must
}

func (c *crash) errorf(format string, args ...any) error {
	return fmt.Errorf("%s\nreplay with: go test ./test/sweep -run TestCrash -seed %d\n%s", fmt.Sprintf(format, args...), c.seed, strings.Join(c.trace, "\n"))
}

func (c *crash) note(format string, args ...any) {
	c.trace = append(c.trace, fmt.Sprintf(format, args...))
}

func crashKey(i int) block.Key {
	var h [block.HashSize]byte
	h[0] = byte(i % 3) // few directories
	binary.BigEndian.PutUint64(h[8:], uint64(i))
	k, err := block.NewKey(h[:], 0)
	if err != nil {
		panic(err)
	}
	return k
}

// TestCrash cuts the power at random moments of random work and looks at what
// is left:
//
//   - every block reads back with the right bytes or is a Miss;
//   - with sync data, every block that was acknowledged and not evicted or
//     deleted is there;
//   - no key is there that was never written, and no temporary file;
//   - used bytes are what the files are charged, and within the capacity;
//   - the tier stores and reads on, and closes.
func TestCrash(t *testing.T) {
	ns := namespace(t, crashBytes)
	if *crashSeed != 0 {
		c := newCrash(ns, *crashSeed)
		if err := c.run(); err != nil {
			t.Fatal(err)
		}
		t.Log(strings.Join(c.trace, "\n"))
		return
	}
	for name, first := range map[string]uint64{"fixed": 1, "fresh": rand.Uint64()>>1 | 1} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var lost, torn, kept int
			for seed := first; seed < first+uint64(*crashSeeds/2); seed++ {
				c := newCrash(ns, seed)
				if err := c.run(); err != nil {
					t.Fatal(err)
				}
				lost, torn, kept = lost+c.lost, torn+c.torn, kept+c.kept
			}
			t.Logf("from seed %d: of what was acknowledged %d blocks were kept, %d lost, %d torn", first, kept, lost, torn)
			if *crashSeeds >= 800 && (lost < 100 || torn < 100 || kept < 100) {
				t.Error("that is no sample of what power cuts do")
			}
		})
	}
}

func newCrash(ns *block.Namespace, seed uint64) *crash {
	c := &crash{seed: seed, r: rand.New(rand.NewPCG(seed, 1)), ns: ns, acked: map[int]bool{}, buf: buffer(crashBytes)}
	c.calls = 20 + c.r.IntN(400)
	c.mem = vfs.NewMem(0)
	var ms atomic.Int64
	c.o = fstier.Options{Root: "/mem", MinFree: -1, Logger: slog.New(slog.DiscardHandler), Now: func() time.Time { return time.UnixMilli(1e12 + ms.Add(1)) }}
	if c.r.IntN(3) > 0 {
		c.o.Capacity = int64(64+c.r.IntN(256)) << 10
	}
	if c.r.IntN(2) == 0 {
		c.o.Sync = fstier.SyncData
	}
	noTmpfile, noDirect := c.r.IntN(3) == 0, c.r.IntN(2) == 0
	c.cannot = func(call vfs.Call) vfs.Fault {
		if call.Op == vfs.OpOpen && (noTmpfile && call.Flags&unix.O_TMPFILE == unix.O_TMPFILE || noDirect && call.Flags&unix.O_DIRECT != 0) {
			return vfs.Fault{Err: unix.EINVAL}
		}
		return vfs.Fault{}
	}
	c.note("capacity %d, sync %q, no O_TMPFILE %v, no O_DIRECT %v, cut before call %d", c.o.Capacity, c.o.Sync, noTmpfile, noDirect, c.calls)
	return c
}

func (c *crash) run() error {
	if err := c.open(); err != nil {
		return err
	}
	for step := 0; c.after == nil && step < 100; step++ {
		if err := c.step(); err != nil {
			_ = c.tier.Close(context.Background())
			return err
		}
	}
	if c.after == nil {
		c.cut()
	}
	if err := c.tier.Close(context.Background()); err != nil {
		return c.errorf("close: %v", err)
	}
	if n := c.mem.OpenFiles(); n != 0 {
		return c.errorf("%d files are open after the close", n)
	}
	return c.verify()
}

// open opens the tier on the file system whose power will be cut.
func (c *crash) open() error {
	c.o.FS = &vfs.Faulty{FS: c.mem, Hook: func(call vfs.Call) vfs.Fault {
		if call.Op == vfs.OpSpace { // Open asks while the scan runs, and nothing changes
			return vfs.Fault{}
		}
		if c.calls--; c.calls == 0 {
			c.note("power is cut before %s %s", call.Op, call.Name)
			c.cut()
		}
		return c.cannot(call)
	}}
	tr, err := fstier.Open(context.Background(), c.o)
	if err != nil {
		return c.errorf("open: %v", err)
	}
	<-tr.ScanDone() // so that one goroutine at a time calls the file system
	c.tier = tr
	return nil
}

// cut cuts the power: what happens later leaves no trace.
func (c *crash) cut() {
	c.after = c.mem.CrashClone(c.seed)
	c.must = c.there
	if c.tier != nil {
		c.must = c.known()
	}
}

// known is which acknowledged blocks the tier has not evicted.
func (c *crash) known() map[int]bool {
	known := map[int]bool{}
	var out [1]tier.Presence
	for i := range c.acked {
		if c.tier.Known(c.ns, []block.Key{crashKey(i)}, out[:]); out[0] == tier.Present {
			known[i] = true
		}
	}
	return known
}

func (c *crash) step() error {
	ctx, key := context.Background(), c.r.IntN(crashKeys)
	switch x := c.r.IntN(20); {
	case x < 10:
		var items []tier.Item
		var numbers []int
		for range 1 + c.r.IntN(3) {
			numbers = append(numbers, c.r.IntN(crashKeys))
			items = append(items, filled(c.ns, crashKey(numbers[len(numbers)-1])))
		}
		c.tier.Write(ctx, c.ns, items)
		for i := range items {
			if items[i].Err == nil {
				c.acked[numbers[i]] = true
			} else if tier.CauseOf(items[i].Err) != tier.CauseCapacity {
				return c.errorf("write: %v", items[i].Err)
			}
		}
		c.note("wrote %v", numbers)
	case x < 13:
		got, err := c.read(c.tier, key)
		if err != nil || got == nothing && c.known()[key] {
			return c.errorf("read of %d: %s, %v", key, got, err)
		}
	case x < 15:
		delete(c.acked, key)
		if err := c.tier.Delete(ctx, c.ns, []block.Key{crashKey(key)}); err != nil {
			return c.errorf("delete: %v", err)
		}
		c.note("deleted %d", key)
	case x < 16:
		delete(c.acked, key)
		if err := c.tier.SetAside(ctx, c.ns, crashKey(key), "test"); err != nil {
			return c.errorf("set aside: %v", err)
		}
		c.note("set %d aside", key)
	case x < 19:
		c.mem.Flush(c.r.Uint64())
		c.note("write-back")
	default:
		tr := c.tier
		c.there, c.tier = c.known(), nil
		c.note("restart")
		if err := tr.Close(ctx); err != nil {
			return c.errorf("close: %v", err)
		}
		return c.open()
	}
	return nil
}

// Outcomes of a read.
const (
	right   = "right bytes"
	nothing = "a Miss"
	broken  = "a broken copy"
)

// read reads a block as a lane does. An error is what must never be.
func (c *crash) read(tr *fstier.Tier, number int) (string, error) {
	it := []tier.Item{{Key: crashKey(number), Buf: c.buf}}
	tr.Read(context.Background(), c.ns, it)
	switch {
	case tier.ClassOf(it[0].Err) == tier.ClassNotFound:
		return nothing, nil
	case tier.ClassOf(it[0].Err) == tier.ClassCorrupt:
		return broken, nil
	case it[0].Err != nil:
		return "", it[0].Err
	case it[0].Sum != crc64nvme.Checksum(c.buf):
		return broken, tr.SetAside(context.Background(), c.ns, it[0].Key, "sum")
	}
	if at := content.Check(c.ns.Fingerprint(), it[0].Key, c.buf); at >= 0 {
		return "", fmt.Errorf("byte %d of block %d is wrong", at, number)
	}
	return right, nil
}

// verify opens what is left, in the kernel's next boot.
func (c *crash) verify() error {
	if err := nextBoot(c.after); err != nil {
		return c.errorf("%v", err)
	}
	if c.o.Sync == fstier.SyncData {
		for i := range c.must {
			if err := c.onMedium(i); err != nil {
				return c.errorf("block %d was acknowledged, with sync data: %v", i, err)
			}
		}
	}
	rules := ""
	if c.r.IntN(4) == 0 {
		rules = fmt.Sprintf(`hang when and(op(readdir), key("%s"))`, c.ns.Fingerprint())
		c.note("served while the scan runs")
	}
	set := fault.MustParse(rules)
	o := c.o
	o.FS = fault.FS(&vfs.Faulty{FS: c.after, Hook: c.cannot}, set, nil)
	tr, err := fstier.Open(context.Background(), o)
	if err != nil {
		return c.errorf("open after the power cut: %v", err)
	}
	err = c.verifyOpen(tr, set)
	set.Release()
	if cerr := tr.Close(context.Background()); err == nil && cerr != nil {
		err = c.errorf("close: %v", cerr)
	}
	if n := c.after.OpenFiles(); err == nil && n != 0 {
		err = c.errorf("%d files are open after the close", n)
	}
	if err != nil {
		return err
	}
	o.FS = &vfs.Faulty{FS: c.after, Hook: c.cannot}
	if tr, err = fstier.Open(context.Background(), o); err != nil {
		return c.errorf("second open after the power cut: %v", err)
	}
	<-tr.ScanDone()
	err = c.exact(tr)
	_ = tr.Close(context.Background())
	return err
}

func (c *crash) verifyOpen(tr *fstier.Tier, set *fault.Set) error {
	ctx := context.Background()
	if set.String() != "" && !tr.Stats().ScanDone {
		for range 3 {
			if _, err := c.read(tr, c.r.IntN(crashKeys)); err != nil {
				return c.errorf("read while the scan runs: %v", err)
			}
		}
		it := []tier.Item{filled(c.ns, crashKey(1000))}
		tr.Write(ctx, c.ns, it)
		switch cause := tier.CauseOf(it[0].Err); {
		case it[0].Err == nil:
			if used, err := usedBytes(c.after); err != nil || c.o.Capacity > 0 && used > c.o.Capacity {
				return c.errorf("a write while the scan runs leaves %d bytes in use (%v), capacity is %d", used, err, c.o.Capacity)
			}
		case cause != tier.CauseScanning:
			return c.errorf("write while the scan runs: %v", it[0].Err)
		}
	}
	set.Release()
	<-tr.ScanDone()
	if s := tr.Stats(); !s.ScanDone || s.ScanError != "" {
		return c.errorf("the scan ended with %+v", s)
	}
	if err := c.exact(tr); err != nil {
		return err
	}
	for i := range crashKeys + 3 { // the last were never written
		got, err := c.read(tr, i)
		if err != nil || i >= crashKeys && got != nothing {
			return c.errorf("read of %d: %s, %v", i, got, err)
		}
		if !c.must[i] {
			continue
		}
		// What was removed may be back, and then something has to go.
		if got != right && c.o.Sync == fstier.SyncData && (got == broken || tr.Stats().Evicted == 0) {
			return c.errorf("block %d was acknowledged, with sync data, and is %s", i, got)
		}
		switch got {
		case right:
			c.kept++
		case nothing:
			c.lost++
		case broken:
			c.torn++
		}
	}
	it := []tier.Item{filled(c.ns, crashKey(2000)), filled(c.ns, crashKey(2001))}
	if tr.Write(ctx, c.ns, it); it[0].Err != nil || it[1].Err != nil {
		return c.errorf("write after the power cut: %v, %v", it[0].Err, it[1].Err)
	}
	for i := range it {
		if got, err := c.read(tr, 2000+i); got != right {
			return c.errorf("read of what was written after the power cut: %s, %v", got, err)
		}
	}
	return c.exact(tr)
}

// exact wants that the tier's count is what its files are charged, that it is
// within the capacity, and that nothing temporary is left.
func (c *crash) exact(tr *fstier.Tier) error {
	used, err := usedBytes(c.after)
	if got := tr.Stats().UsedBytes; err != nil || got != used || c.o.Capacity > 0 && used > c.o.Capacity {
		return c.errorf("used bytes are %d, files have %d of %d (%v)", got, used, c.o.Capacity, err)
	}
	if names, err := temporary(c.after); err != nil || len(names) > 0 {
		return c.errorf("temporary files are left: %v, %v", names, err)
	}
	return nil
}

// onMedium says what is wrong with a block's file; see docs/storage-format.md.
func (c *crash) onMedium(number int) error {
	key := crashKey(number)
	f, err := c.after.Open(fmt.Sprintf("%s/%02x/%s", c.ns.Fingerprint(), key[0], key), unix.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if n, err := vfs.ReadFull(f, [][]byte{c.buf}, 4096); n < len(c.buf) || err != nil {
		return fmt.Errorf("its file has %d bytes of it: %w", n, err)
	}
	if at := content.Check(c.ns.Fingerprint(), key, c.buf); at >= 0 {
		return fmt.Errorf("byte %d of it is wrong in its file", at)
	}
	return nil
}

// nextBoot makes the usage file that of another boot of the kernel; see
// docs/storage-format.md.
func nextBoot(m *vfs.Mem) error {
	f, err := m.Open("usage", unix.O_RDWR, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	b := make([]byte, 64)
	if n, err := vfs.ReadFull(f, [][]byte{b}, 0); n < len(b) || err != nil || binary.BigEndian.Uint64(b[56:]) != crc64nvme.Checksum(b[:56]) {
		return err
	}
	b[24] ^= 0xff
	binary.BigEndian.PutUint64(b[56:], crc64nvme.Checksum(b[:56]))
	return errors.Join(vfs.WriteAll(f, [][]byte{b}, 0), f.Sync())
}
