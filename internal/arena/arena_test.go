package arena

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

var ctx0 = context.Background()

const mib = 1 << 20

func open(t testing.TB, size int64) *Arena {
	t.Helper()
	a, err := Open(ctx0, Options{Size: size, Name: "terrace-test"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	return a
}

func mustPanic(t *testing.T, want string, f func()) {
	t.Helper()
	defer func() {
		t.Helper()
		if r := recover(); r == nil || !strings.Contains(fmt.Sprint(r), want) {
			t.Errorf("panic %v, want one with %q", r, want)
		}
	}()
	f()
}

func TestSealsHold(t *testing.T) {
	a := open(t, mib)
	l, err := a.NewLease()
	if err != nil {
		t.Fatal(err)
	}
	for name, fd := range map[string]int{"node": a.mu.fd, "engine": int(l.File().Fd())} {
		for _, size := range []int64{0, mib - align, mib + align} {
			if err := unix.Ftruncate(fd, size); !errors.Is(err, unix.EPERM) {
				t.Errorf("%s: resize to %d: %v, want EPERM", name, size, err)
			}
		}
		// Were it possible to seal against writing, an engine could stop the node.
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_FUTURE_WRITE); !errors.Is(err, unix.EPERM) {
			t.Errorf("%s: add a seal: %v, want EPERM", name, err)
		}
	}
	var st unix.Stat_t
	if err := unix.Fstat(a.mu.fd, &st); err != nil || st.Mode&0o777 != 0o600 || st.Size != mib {
		t.Errorf("mode %o, size %d, %v", st.Mode, st.Size, err)
	}
	if flags, err := unix.FcntlInt(l.File().Fd(), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("lease descriptor is not close-on-exec: %x, %v", flags, err)
	}
}

func TestViews(t *testing.T) {
	const size = 4 * align
	a := open(t, size)
	for _, c := range []struct{ off, n int64 }{{0, size}, {0, 0}, {size, 0}, {1, 5}, {size - 1, 1}} {
		b := a.Bytes(c.off, c.n)
		if int64(len(b)) != c.n || int64(cap(b)) != c.n {
			t.Errorf("Bytes(%d, %d): len %d cap %d", c.off, c.n, len(b), cap(b))
		}
	}
	for _, c := range []struct{ off, n int64 }{
		{-1, 1}, {0, -1}, {0, size + 1}, {size, 1}, {size + 1, 0}, {1, size},
		{math.MaxInt64, 1}, {1, math.MaxInt64}, {math.MaxInt64, math.MaxInt64}, {math.MinInt64, math.MinInt64},
	} {
		mustPanic(t, "outside a region", func() { a.Bytes(c.off, c.n) })
		mustPanic(t, "outside a region", func() { a.Poison(c.off, c.n) })
	}

	b := a.Block(align, 5000, 2*align)
	if len(b) != 5000 || cap(b) != 2*align || &b[0] != &a.Bytes(align, 1)[0] {
		t.Errorf("Block: len %d cap %d", len(b), cap(b))
	}
	mustPanic(t, "not aligned", func() { a.Block(1, 1, align) })
	mustPanic(t, "not aligned", func() { a.Block(0, 1, align+1) })
	mustPanic(t, "outside", func() { a.Block(0, align+1, align) })
	mustPanic(t, "outside", func() { a.Block(0, -1, align) })
	mustPanic(t, "outside", func() { a.Block(3*align, 1, 2*align) })
	mustPanic(t, "outside", func() { a.Block(-align, 1, align) })

	// Poison and ZeroPad touch their own bytes and no others.
	all := a.Bytes(0, size)
	for i := range all {
		all[i] = 7
	}
	a.Poison(align+3, 1001)
	a.Poison(9, 0)
	a.ZeroPad(2*align, 4000, align)
	for i, v := range all {
		want := byte(7)
		switch {
		case i >= align+3 && i < align+1004:
			want = PoisonByte
		case i >= 2*align+4000 && i < 3*align:
			want = 0
		}
		if v != want {
			t.Fatalf("byte %d is %#x, want %#x", i, v, want)
		}
	}
}

func TestOptions(t *testing.T) {
	for _, size := range []int64{0, -align, 1, align + 1, math.MaxInt64} {
		o := Options{Size: size, Name: strings.Repeat("n", 250)}
		_, err := Open(ctx0, o)
		if err == nil || !strings.Contains(err.Error(), "primary.size") || !strings.Contains(err.Error(), "arena name") {
			t.Errorf("size %d: %v, want both faults", size, err)
		}
	}
	ctx, cancel := context.WithCancel(ctx0)
	cancel()
	if _, err := Open(ctx, Options{Size: align}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// A start that fails at any step leaves nothing behind.
func TestOpenUndo(t *testing.T) {
	before := descriptorsOpen(t)
	// The largest file is possible, such a mapping is not.
	_, err := Open(ctx0, Options{Size: 1 << 60, Name: "terrace-undo", IgnoreCgroup: true, procRoot: t.TempDir()})
	if !errors.Is(err, unix.ENOMEM) || !strings.Contains(err.Error(), "primary.size") {
		t.Errorf("map: %v, want ENOMEM with the setting", err)
	}
	if _, err := Open(ctx0, Options{Size: align, Name: "nul\x00"}); err == nil {
		t.Error("create: a name with NUL was taken")
	}
	if got := regionsOpen("terrace-undo"); got != "0 descriptors, 0 mappings" || descriptorsOpen(t) != before {
		t.Errorf("left behind: %s, descriptors %d of %d", got, descriptorsOpen(t), before)
	}

	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), helperEnv+"=unlockable")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.HasPrefix(string(out), "0 descriptors, 0 mappings lock 1.00 MiB") || !strings.Contains(string(out), "RLIMIT_MEMLOCK") {
		t.Errorf("lock: %s, %v", out, err)
	}
}

func TestLock(t *testing.T) {
	a, err := Open(ctx0, Options{Size: align, Lock: true})
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOMEM) {
		t.Skip("locking memory is not allowed here")
	}
	if err != nil {
		t.Fatal(err)
	}
	if !a.Stats().Locked {
		t.Error("not locked")
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
}

// Whatever becomes of the node, no file is left that a restart would stumble
// over or pay for.
func TestNothingInDevShm(t *testing.T) {
	list := func() []string {
		entries, err := os.ReadDir("/dev/shm")
		if err != nil {
			t.Skipf("no /dev/shm to look into: %v", err)
		}
		var names []string
		for _, e := range entries {
			if strings.Contains(e.Name(), "terrace") {
				names = append(names, e.Name())
			}
		}
		return names
	}
	before := list()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), helperEnv+"=owner")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = in.Close() }()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line != "ready\n" {
		t.Errorf("owner: %q, %v", line, err)
	}
	running := list()
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if after := list(); !slices.Equal(before, running) || !slices.Equal(before, after) {
		t.Errorf("/dev/shm: before %v, running %v, after %v", before, running, after)
	}
}

func TestPopulate(t *testing.T) {
	const size = 8*mib + 3*align
	a := open(t, size)
	if s := a.Stats(); s.AllocatedBytes != 0 || s.PopulatedBytes != 0 || s.SizeBytes != size {
		t.Errorf("fresh: %+v", s)
	}
	mark := func(i int64) byte { return byte(i/align)*3 + 1 }
	for i := int64(0); i < size; i += 5 * align { // content before
		a.Bytes(i, 1)[0] = mark(i)
	}

	// Cancelled between steps, and resumed.
	ctx, cancel := context.WithCancel(ctx0)
	var seen []int64
	err := a.Populate(ctx, mib-1, func(done, total int64) {
		if total != size {
			t.Errorf("total %d", total)
		}
		if seen = append(seen, done); len(seen) == 2 {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) || !slices.Equal(seen, []int64{mib, 2 * mib}) || a.Populated() != 2*mib {
		t.Fatalf("cancelled: %v, progress %v, populated %d", err, seen, a.Populated())
	}
	if got := a.Stats().AllocatedBytes; got < 2*mib {
		t.Errorf("allocated %d after 2 MiB", got)
	}

	// A writer goes on meanwhile, two callers share the rest.
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := int64(align); i < size; i += 5 * align {
			a.Bytes(i, 1)[0] = mark(i)
		}
	})
	wg.Go(func() {
		if err := a.Populate(ctx0, mib, nil); err != nil {
			t.Error(err)
		}
	})
	if err := a.Populate(ctx0, mib, func(done, _ int64) { seen = append(seen, done) }); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	if !slices.IsSorted(seen) {
		t.Errorf("progress goes back: %v", seen)
	}
	if s := a.Stats(); s.PopulatedBytes != size || s.AllocatedBytes != size {
		t.Errorf("populated %d, allocated %d, want %d", s.PopulatedBytes, s.AllocatedBytes, size)
	}
	for i := int64(0); i < size; i += 5 * align {
		if a.Bytes(i, 1)[0] != mark(i) || i+align < size && a.Bytes(i+align, 1)[0] != mark(i+align) {
			t.Fatalf("content at %d is lost", i)
		}
	}
	calls := 0
	if err := a.Populate(ctx0, 0, func(int64, int64) { calls++ }); err != nil || calls != 0 {
		t.Errorf("populated already: %d calls, %v", calls, err)
	}
}

func TestPopulateDefaultStepAndTail(t *testing.T) {
	const size = PopulateStep + align
	a := open(t, size)
	var seen []int64
	if err := a.Populate(ctx0, 0, func(done, _ int64) { seen = append(seen, done) }); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(seen, []int64{PopulateStep, size}) {
		t.Errorf("progress %v", seen)
	}
	b := open(t, align)
	if err := b.Populate(ctx0, math.MaxInt64-mib, nil); err != nil || b.Populated() != align {
		t.Errorf("huge step: %v, %d", err, b.Populated())
	}
}

func TestPopulateErrors(t *testing.T) {
	a := open(t, 2*mib)
	results := []error{unix.EINTR, unix.EINTR, nil, unix.EINVAL, unix.ENOMEM}
	a.madvise = func([]byte, int) error {
		err := results[0]
		results = results[1:]
		return err
	}
	if err := a.Populate(ctx0, mib, nil); !errors.Is(err, ErrPopulateUnsupported) || a.Populated() != mib {
		t.Errorf("old kernel: %v, populated %d", err, a.Populated())
	}
	err := a.Populate(ctx0, mib, nil)
	if !errors.Is(err, unix.ENOMEM) || !strings.Contains(err.Error(), "primary.size") || a.Populated() != mib {
		t.Errorf("no memory: %v, populated %d", err, a.Populated())
	}
	a.madvise = unix.Madvise
	if err := a.Populate(ctx0, mib, nil); err != nil || a.Populated() != 2*mib {
		t.Errorf("again: %v, populated %d", err, a.Populated())
	}
}

func TestClose(t *testing.T) {
	before := descriptorsOpen(t)
	a, err := Open(ctx0, Options{Size: mib, Name: "terrace-close"})
	if err != nil {
		t.Fatal(err)
	}
	kept, err := a.NewLease()
	if err != nil {
		t.Fatal(err)
	}
	quiet, err := a.NewLease()
	if err != nil {
		t.Fatal(err)
	}
	if err := quiet.HandOver(); err != nil {
		t.Fatal(err)
	}
	wantHeld(t, quiet, false, "handed over to nobody")
	for range 2 {
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if got := regionsOpen("terrace-close"); got != "0 descriptors, 0 mappings" || descriptorsOpen(t) != before {
		t.Errorf("left: %s, descriptors %d of %d", got, descriptorsOpen(t), before)
	}
	if held, err := kept.Held(); !held || !errors.Is(err, ErrClosed) {
		t.Errorf("lease of a closed arena: held %v, %v", held, err)
	}
	if held, err := quiet.Held(); held || err != nil {
		t.Errorf("quiet lease of a closed arena: held %v, %v", held, err)
	}
	if err := errors.Join(kept.HandOver(), kept.Release(), quiet.Release()); err != nil || kept.File() != nil {
		t.Errorf("giving back after Close: %v", err)
	}
	if _, err := a.NewLease(); !errors.Is(err, ErrClosed) {
		t.Errorf("NewLease: %v", err)
	}
	if err := a.Populate(ctx0, 0, nil); !errors.Is(err, ErrClosed) {
		t.Errorf("Populate: %v", err)
	}
	mustPanic(t, "after Close", func() { a.Bytes(0, 1) })
	if s := a.Stats(); s.Leases != 0 || s.AllocatedBytes != 0 || s.SizeBytes != mib || a.Size() != mib {
		t.Errorf("%+v", s)
	}
}

func TestMappingsShareBytes(t *testing.T) {
	const size = mib
	a := open(t, size)
	l, err := a.NewLease()
	if err != nil {
		t.Fatal(err)
	}
	m, err := Map(l.File(), size)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.HandOver(); err != nil {
		t.Fatal(err)
	}
	copy(a.Bytes(100, 5), "there")
	b, err := m.Bytes(100, 5)
	if err != nil || string(b) != "there" || cap(b) != 5 {
		t.Errorf("%q, cap %d, %v", b, cap(b), err)
	}
	copy(b, "back!")
	if got := a.Bytes(100, 5); !bytes.Equal(got, []byte("back!")) {
		t.Errorf("%q", got)
	}
	for _, c := range []struct{ off, n int64 }{{-1, 1}, {0, -1}, {0, size + 1}, {size, 1}, {math.MaxInt64, math.MaxInt64}} {
		if _, err := m.Bytes(c.off, c.n); err == nil {
			t.Errorf("Bytes(%d, %d) was given", c.off, c.n)
		}
	}
	if held, err := l.Held(); !held || err != nil {
		t.Errorf("mapped: held %v, %v", held, err)
	}
	for range 2 {
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := m.Bytes(0, 1); !errors.Is(err, ErrClosed) || m.Size() != size {
		t.Errorf("closed: %v", err)
	}
	wantHeld(t, l, false, "unmapped")
}

// What is not a sealed region could fault the engine later.
func TestMapRefuses(t *testing.T) {
	file := func(name string, seal int, size int64) *os.File {
		fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		if err != nil {
			t.Fatal(err)
		}
		f := os.NewFile(uintptr(fd), name)
		t.Cleanup(func() { _ = f.Close() })
		if err := f.Truncate(size); err != nil {
			t.Fatal(err)
		}
		if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seal); err != nil {
			t.Fatal(err)
		}
		return f
	}
	disk, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = disk.Close() }()
	if err := disk.Truncate(mib); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		f    *os.File
		size int64
		is   error
	}{
		"unsealed":        {file("unsealed", 0, mib), mib, ErrNotRegion},
		"grow only":       {file("grow", unix.F_SEAL_GROW, mib), mib, ErrNotRegion},
		"smaller":         {file("small", seals, mib-align), mib, ErrNotRegion},
		"larger":          {file("large", seals, mib+align), mib, ErrNotRegion},
		"file on disk":    {disk, mib, ErrNotRegion},
		"write-protected": {file("ro", unix.F_SEAL_SHRINK|unix.F_SEAL_WRITE, mib), mib, unix.EPERM},
		"size 0":          {file("zero", seals, 0), 0, nil},
		"negative size":   {file("neg", seals, mib), -1, nil},
	} {
		m, err := Map(c.f, c.size)
		if err == nil || c.is != nil && !errors.Is(err, c.is) {
			t.Errorf("%s: %v", name, err)
		}
		if m != nil {
			t.Errorf("%s: was mapped", name)
		}
	}
}

// 1000 whole lives leave no descriptor and no mapping.
func TestNoLeak(t *testing.T) {
	ours, theirs := socketPair(t)
	cycle := func() {
		a, err := Open(ctx0, Options{Size: 4 * align, Name: "terrace-leak"})
		if err != nil {
			t.Fatal(err)
		}
		l, err := a.NewLease()
		if err != nil {
			t.Fatal(err)
		}
		unused, err := a.NewLease() // never handed over
		if err != nil {
			t.Fatal(err)
		}
		if err := SendFD(ours, []byte("x"), l.File()); err != nil {
			t.Fatal(err)
		}
		if err := l.HandOver(); err != nil {
			t.Fatal(err)
		}
		_, f, err := RecvFD(theirs, make([]byte, 8))
		if err != nil || f == nil {
			t.Fatal(f, err)
		}
		m, err := Map(f, a.Size())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Map(f, a.Size()+align); err == nil {
			t.Fatal("wrong size was mapped")
		}
		if err := errors.Join(f.Close(), m.Close()); err != nil {
			t.Fatal(err)
		}
		giveBack(t, l)
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
		if unused.File() != nil {
			t.Fatal("unused lease keeps its descriptor")
		}
	}
	cycle() // opens what the runtime keeps
	before := descriptorsOpen(t)
	for range 1000 {
		cycle()
	}
	if got := regionsOpen("terrace-leak"); got != "0 descriptors, 0 mappings" || descriptorsOpen(t) != before {
		t.Errorf("left: %s, descriptors %d of %d", got, descriptorsOpen(t), before)
	}
}

func BenchmarkBytes(b *testing.B) {
	a := open(b, mib)
	b.ReportAllocs()
	var n int
	for i := 0; b.Loop(); i++ {
		n += len(a.Bytes(int64(i&0xff)*align, align))
	}
	_ = n
}

func BenchmarkPopulate(b *testing.B) {
	const size = 64 * mib
	b.SetBytes(size)
	for b.Loop() {
		a := open(b, size)
		if err := a.Populate(ctx0, 0, nil); err != nil {
			b.Fatal(err)
		}
		if err := a.Close(); err != nil {
			b.Fatal(err)
		}
	}
}
