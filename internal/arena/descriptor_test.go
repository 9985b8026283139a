package arena

import (
	"bytes"
	"errors"
	"io"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestSendRecv(t *testing.T) {
	a := open(t, mib)
	l := newLease(t, a)
	ours, theirs := socketPair(t)

	// Far more than a socket holds: SendFD writes all of it.
	payload := bytes.Repeat([]byte("terrace "), 1<<18)
	sent := make(chan error, 1)
	go func() {
		sent <- errors.Join(SendFD(ours, payload, l.File()), ours.CloseWrite())
	}()
	var got []byte
	var files int
	buf := make([]byte, 1<<16)
	for {
		n, f, err := RecvFD(theirs, buf)
		got = append(got, buf[:n]...)
		if f != nil {
			files++
			if len(got) != n {
				t.Error("descriptor did not come with the first byte")
			}
			if flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
				t.Errorf("descriptor is not close-on-exec: %x, %v", flags, err)
			}
			m, err := Map(f, mib)
			if err != nil {
				t.Fatal(err)
			}
			_ = m.Close()
			_ = f.Close()
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, payload) || files != 1 {
		t.Errorf("%d bytes of %d, %d descriptors", len(got), len(payload), files)
	}
	if l.File() == nil {
		t.Error("SendFD took the file")
	}
}

func TestSendRecvRefuse(t *testing.T) {
	a := open(t, mib)
	f := newLease(t, a).File()
	ours, theirs := socketPair(t)
	before := descriptorsOpen(t)
	buf := make([]byte, 16)

	if err := SendFD(ours, nil, f); err == nil {
		t.Error("empty payload was sent")
	}
	if _, _, err := RecvFD(theirs, nil); err == nil {
		t.Error("empty buffer was read")
	}
	if _, err := ours.Write([]byte("plain")); err != nil {
		t.Fatal(err)
	}
	if n, got, err := RecvFD(theirs, buf); n != 5 || got != nil || err != nil {
		t.Errorf("no descriptor: %d, %v, %v", n, got, err)
	}
	// A hostile sender does not fill our table: 2 fit the buffer, 200 do not.
	for _, n := range []int{2, 3, 200} {
		fds := make([]int, n)
		for i := range fds {
			fds[i] = int(f.Fd())
		}
		if _, _, err := ours.WriteMsgUnix([]byte("many"), unix.UnixRights(fds...), nil); err != nil {
			t.Fatal(err)
		}
		if _, got, err := RecvFD(theirs, buf); !errors.Is(err, ErrDescriptors) || got != nil {
			t.Errorf("%d descriptors: %v, %v", n, got, err)
		}
	}
	if now := descriptorsOpen(t); now != before {
		t.Errorf("%d descriptors open, %d before", now, before)
	}
	// Deadlines are the connection's.
	if err := theirs.SetReadDeadline(time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := RecvFD(theirs, buf); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("deadline: %v", err)
	}
	if err := theirs.Close(); err != nil {
		t.Fatal(err)
	}
	if err := SendFD(ours, []byte("x"), f); !errors.Is(err, unix.EPIPE) {
		t.Errorf("peer is gone: %v", err)
	}
}
