package arena

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func newLease(t testing.TB, a *Arena) *Lease {
	t.Helper()
	l, err := a.NewLease()
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// wantHeld asks the kernel. A process that happens to read /proc/PID/fd (ps,
// lsof) holds a reference to each description for some microseconds, so a
// lease may be quiet a moment later than the last real holder is gone. That
// moment is nobody's to signal: it is polled for, as the node does.
func wantHeld(t testing.TB, l *Lease, want bool, when string) {
	t.Helper()
	held, err := l.Held()
	for end := time.Now().Add(5 * time.Second); held && !want && err == nil && time.Now().Before(end); {
		time.Sleep(50 * time.Microsecond)
		held, err = l.Held()
	}
	if err != nil || held != want {
		t.Errorf("%s: held %v, %v, want %v", when, held, err, want)
	}
	if want {
		if err := l.Release(); !errors.Is(err, ErrHeld) {
			t.Errorf("%s: Release: %v, want ErrHeld", when, err)
		}
	}
}

// giveBack ends a lease that was passed to nobody.
func giveBack(t testing.TB, l *Lease) {
	t.Helper()
	if err := l.HandOver(); err != nil {
		t.Fatal(err)
	}
	wantHeld(t, l, false, "handed over to nobody")
	if err := l.Release(); err != nil {
		t.Fatal(err)
	}
}

// pass sends a lease to an engine over the socket and hands it over.
func pass(t *testing.T, e *engineProcess, a *Arena, l *Lease) {
	t.Helper()
	if err := SendFD(e.conn, []byte("region"), l.File()); err != nil {
		t.Fatal(err)
	}
	if err := l.HandOver(); err != nil {
		t.Fatal(err)
	}
	e.do("recv %d", a.Size())
}

func TestLeaseLife(t *testing.T) {
	a := open(t, mib)
	l := newLease(t, a)
	wantHeld(t, l, true, "new")
	if a.Stats().Leases != 1 || l.File() == nil {
		t.Errorf("%+v", a.Stats())
	}
	for range 2 {
		if err := l.HandOver(); err != nil {
			t.Fatal(err)
		}
	}
	if l.File() != nil {
		t.Error("File after HandOver")
	}
	wantHeld(t, l, false, "handed over to nobody")
	for range 2 {
		if err := l.Release(); err != nil {
			t.Fatal(err)
		}
	}
	if a.Stats().Leases != 0 {
		t.Errorf("%+v", a.Stats())
	}
	// The byte is another's now; the old lease does not confuse the two.
	next := newLease(t, a)
	if next.Offset() != l.Offset() {
		t.Errorf("byte %d was not used again, got %d", l.Offset(), next.Offset())
	}
	wantHeld(t, l, false, "released")
	wantHeld(t, next, true, "next")
	if err := l.Release(); err != nil {
		t.Error(err)
	}
	if a.Stats().Leases != 1 || newLease(t, a).Offset() == next.Offset() {
		t.Error("a second Release gave the byte back twice")
	}
}

// A client over the socket: descriptor and mapping each hold the lease, the
// death of the process ends both.
func TestLeaseFollowsEngine(t *testing.T) {
	a := open(t, mib)
	e := startEngine(t, nil)
	l := newLease(t, a)
	pass(t, e, a, l)
	wantHeld(t, l, true, "descriptor and mapping")
	a.Bytes(5, 1)[0] = 42
	if got := e.do("read 5"); got != "42" {
		t.Errorf("engine reads %s", got)
	}
	e.do("write 6 43")
	if got := a.Bytes(6, 1)[0]; got != 43 {
		t.Errorf("node reads %d", got)
	}
	if got := e.do("truncate 0"); got != "truncate arena: operation not permitted" {
		t.Errorf("engine shrinks the region: %s", got)
	}
	e.do("closefd")
	wantHeld(t, l, true, "mapping only")
	e.do("write 7 44")
	if got := a.Bytes(7, 1)[0]; got != 44 {
		t.Errorf("node reads %d", got)
	}
	e.kill()
	wantHeld(t, l, false, "engine is dead")
	if err := l.Release(); err != nil {
		t.Error(err)
	}
}

func TestLeaseDescriptorOnly(t *testing.T) {
	a := open(t, mib)
	e := startEngine(t, nil)
	l := newLease(t, a)
	pass(t, e, a, l)
	e.do("unmap")
	wantHeld(t, l, true, "descriptor only: it can be mapped again")
	e.do("closefd")
	wantHeld(t, l, false, "both given up by a living engine")
}

func TestLeaseInherited(t *testing.T) {
	a := open(t, mib)
	l := newLease(t, a)
	e := startEngine(t, l.File())
	if err := l.HandOver(); err != nil {
		t.Fatal(err)
	}
	wantHeld(t, l, true, "inherited")
	e.do("inherit %d", a.Size())
	e.do("closefd")
	wantHeld(t, l, true, "mapped")
	e.kill()
	wantHeld(t, l, false, "dead")
}

// Workers that hold nothing but a mapping count as writing: one that was
// started and mapped for itself, and one that was forked and never did more
// than keep what it was born with. In every order of deaths.
func TestLeaseHeldByWorkersMapping(t *testing.T) {
	for _, kind := range []string{"spawn", "fork"} {
		start := func(t *testing.T, a *Arena) (*engineProcess, *Lease, int) {
			e := startEngine(t, nil)
			l := newLease(t, a)
			pass(t, e, a, l)
			if kind == "spawn" {
				return e, l, e.doPID("spawn %d", a.Size())
			}
			return e, l, e.doPID("fork")
		}
		t.Run(kind+"/worker dies first", func(t *testing.T) {
			a := open(t, mib)
			e, l, pid := start(t, a)
			e.do("closefd")
			e.do("unmap")
			wantHeld(t, l, true, "the engine has nothing, its worker the mapping")
			e.do("reap %d", pid)
			wantHeld(t, l, false, "worker is dead, engine lives")
		})
		t.Run(kind+"/engine dies first", func(t *testing.T) {
			a := open(t, mib)
			e, l, pid := start(t, a)
			other := newLease(t, a)
			e.kill()
			wantHeld(t, l, true, "engine is dead, its worker has the mapping")
			killOrphan(t, pid)
			wantHeld(t, l, false, "both are dead")
			wantHeld(t, other, true, "another attach")
			if err := l.Release(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestLeasesAreIndependent(t *testing.T) {
	a := open(t, mib)
	e1, e2 := startEngine(t, nil), startEngine(t, nil)
	l1, l2 := newLease(t, a), newLease(t, a)
	pass(t, e1, a, l1)
	pass(t, e2, a, l2)
	if l1.Offset() == l2.Offset() {
		t.Fatalf("both lock byte %d", l1.Offset())
	}
	e1.kill()
	wantHeld(t, l1, false, "first is dead")
	wantHeld(t, l2, true, "second lives")
	if got := e2.do("read 0"); got != "0" {
		t.Errorf("second reads %s", got)
	}
	e2.kill()
	wantHeld(t, l2, false, "second is dead")
}

// A descriptor under way in a socket may yet be received.
func TestLeaseHeldInFlight(t *testing.T) {
	a := open(t, mib)
	ours, theirs := socketPair(t)
	l := newLease(t, a)
	if err := SendFD(ours, []byte("x"), l.File()); err != nil {
		t.Fatal(err)
	}
	if err := l.HandOver(); err != nil {
		t.Fatal(err)
	}
	wantHeld(t, l, true, "sent, not received")
	if err := ours.Close(); err != nil {
		t.Fatal(err)
	}
	wantHeld(t, l, true, "sender has closed")
	if err := theirs.Close(); err != nil {
		t.Fatal(err)
	}
	wantHeld(t, l, false, "receiver has closed without reading")
}

// Bytes are used again in the order they came back, and only then.
func TestLockBytesRecycled(t *testing.T) {
	a := open(t, mib)
	var leases []*Lease
	for i := range 4 {
		l := newLease(t, a)
		if l.Offset() != int64(i) {
			t.Fatalf("lease %d locks byte %d", i, l.Offset())
		}
		leases = append(leases, l)
	}
	giveBack(t, leases[2])
	giveBack(t, leases[0])
	if err := leases[1].Release(); !errors.Is(err, ErrHeld) {
		t.Fatalf("release of a held lease: %v", err)
	}
	var got []int64
	for range 3 {
		got = append(got, newLease(t, a).Offset())
	}
	if fmt.Sprint(got) != "[2 0 4]" {
		t.Errorf("bytes %v, want [2 0 4]", got)
	}
	// However many come and go, no more bytes are used than leases at a time.
	for range 10 * LeasesMax {
		giveBack(t, newLease(t, a))
	}
	if a.mu.bytes.next != 6 || len(a.mu.bytes.free) != 1 {
		t.Errorf("%d bytes used, %d free", a.mu.bytes.next, len(a.mu.bytes.free))
	}
}

// An engine that locks bytes of its own accord neither gets a lease's byte nor
// stops new leases, unless it locks many.
func TestForeignLocks(t *testing.T) {
	a := open(t, mib)
	l := newLease(t, a)
	lock := func(start, n int64) error {
		lk := unix.Flock_t{Type: unix.F_WRLCK, Start: start, Len: n}
		return unix.FcntlFlock(l.File().Fd(), unix.F_OFD_SETLK, &lk)
	}
	victim := newLease(t, a)
	if err := lock(victim.Offset(), 1); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("lock of another lease's byte: %v", err)
	}
	if err := lock(2, 3); err != nil {
		t.Fatal(err)
	}
	if next := newLease(t, a); next.Offset() != 5 {
		t.Errorf("next lease locks byte %d, want 5", next.Offset())
	}
	// Once it lets go, the bytes that were passed over are used again.
	unlock := unix.Flock_t{Type: unix.F_UNLCK, Start: 2, Len: 3}
	if err := unix.FcntlFlock(l.File().Fd(), unix.F_OFD_SETLK, &unlock); err != nil {
		t.Fatal(err)
	}
	if next := newLease(t, a); next.Offset() != 2 {
		t.Errorf("next lease locks byte %d, want 2", next.Offset())
	}
	if err := lock(100, 0); err != nil { // to the end
		t.Fatal(err)
	}
	before := descriptorsOpen(t)
	for range 200 {
		next, err := a.NewLease()
		if err == nil && next.Offset() < 100 {
			before++
			continue
		}
		if err == nil {
			t.Fatalf("byte %d was locked twice", next.Offset())
		}
	}
	if got := len(a.mu.bytes.free); got > 8 || descriptorsOpen(t) != before {
		t.Errorf("%d free bytes kept, %d descriptors of %d", got, descriptorsOpen(t), before)
	}
	// A quiet lease stays quiet, even where somebody locks its byte later.
	off := victim.Offset()
	if err := victim.HandOver(); err != nil {
		t.Fatal(err)
	}
	wantHeld(t, victim, false, "handed over")
	if err := lock(off, 1); err != nil {
		t.Fatal(err)
	}
	wantHeld(t, victim, false, "byte locked by another")
}

func TestLeasesMax(t *testing.T) {
	a := open(t, mib)
	for range LeasesMax { // as if each were held by somebody, without a descriptor each
		l := &Lease{arena: a}
		a.mu.leases[l] = struct{}{}
	}
	if _, err := a.NewLease(); !errors.Is(err, ErrLeases) {
		t.Errorf("%v", err)
	}
}

// Any call in any order from many goroutines, Close among them.
func TestLeaseCallsConcurrently(t *testing.T) {
	a := open(t, mib)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 200 {
				l, err := a.NewLease()
				if errors.Is(err, ErrClosed) {
					return
				}
				if err != nil {
					t.Error(err)
					return
				}
				var inner sync.WaitGroup
				inner.Go(func() { _, _ = l.Held() })
				inner.Go(func() { _ = l.Release() })
				if err := l.HandOver(); err != nil {
					t.Error(err)
				}
				inner.Wait()
				for err = ErrHeld; errors.Is(err, ErrHeld); { // see wantHeld
					err = l.Release()
				}
				if err != nil {
					t.Error(err)
				}
				_ = a.Stats()
			}
			if i == 0 {
				if err := a.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if n := a.Stats().Leases; n != 0 {
		t.Errorf("%d leases left", n)
	}
}

func TestHeldAllocates(t *testing.T) {
	a := open(t, mib)
	l := newLease(t, a)
	m, err := Map(l.File(), mib)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = m.Close() }()
	if err := l.HandOver(); err != nil {
		t.Fatal(err)
	}
	allocs := testing.AllocsPerRun(1000, func() {
		if held, err := l.Held(); !held || err != nil {
			t.Fatal(held, err)
		}
	})
	if allocs > 1 {
		t.Errorf("%v allocations a call", allocs)
	}
}

// BenchmarkHeld asks of one lease beside others, all held by mappings.
func BenchmarkHeld(b *testing.B) {
	for _, others := range []int{0, 100, 1000} {
		b.Run(fmt.Sprintf("others=%d", others), func(b *testing.B) {
			a := open(b, mib)
			var l *Lease
			for range others + 1 {
				l = newLease(b, a)
				m, err := Map(l.File(), mib)
				if err != nil {
					b.Fatal(err)
				}
				defer func() { _ = m.Close() }()
				if err := l.HandOver(); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportAllocs()
			for b.Loop() {
				if held, err := l.Held(); !held || err != nil {
					b.Fatal(held, err)
				}
			}
		})
	}
}

func BenchmarkNewLease(b *testing.B) {
	a := open(b, mib)
	b.ReportAllocs()
	for b.Loop() {
		giveBack(b, newLease(b, a))
	}
}
