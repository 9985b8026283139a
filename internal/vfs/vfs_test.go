package vfs

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

func openRoot(t *testing.T) (FS, string) {
	t.Helper()
	dir := t.TempDir()
	f, err := OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f, dir
}

func TestOS(t *testing.T) {
	root, dir := openRoot(t)
	if err := root.Mkdir("d", 0o700); err != nil {
		t.Fatal(err)
	}
	f, err := root.Open("d/f", unix.O_RDWR|unix.O_CREAT|unix.O_EXCL, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if err := WriteAll(f, [][]byte{[]byte("hello "), []byte("world")}, 3); err != nil {
		t.Fatal(err)
	}
	a, b := make([]byte, 5), make([]byte, 100)
	if n, err := ReadFull(f, [][]byte{a, b}, 3); n != 11 || err != nil || string(a)+string(b[:6]) != "hello world" {
		t.Errorf("read back %d bytes, %v: %q %q", n, err, a, b)
	}
	st, err := f.Stat()
	if err != nil || st.Size != 14 || !st.Regular() || st.Dir() || st.Mode&0o777 != 0o600 || st.Mtime == 0 {
		t.Errorf("stat: %+v, %v", st, err)
	}
	if err := f.Sync(); err != nil {
		t.Error(err)
	}
	if l, err := root.Lstat("d/f"); err != nil || l.Ino != st.Ino || l.Size != 14 {
		t.Errorf("lstat: %+v, %v", l, err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	if err := root.Rename("d/f", "g"); err != nil {
		t.Error(err)
	}
	if err := os.Symlink("g", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if _, err := root.Open("link", unix.O_RDONLY, 0); !errors.Is(err, unix.ELOOP) {
		t.Errorf("open of a symbolic link: %v, want ELOOP", err)
	}
	if _, err := OpenRoot(filepath.Join(dir, "link")); err == nil {
		t.Error("a symbolic link opened as a root")
	}
	var names []string
	if err := root.ReadDir(".", func(n string) error { names = append(names, n); return nil }); err != nil {
		t.Error(err)
	}
	slices.Sort(names)
	if !slices.Equal(names, []string{"d", "g", "link"}) {
		t.Errorf("names are %q", names)
	}
	stop := errors.New("stop")
	if err := root.ReadDir(".", func(string) error { return stop }); err != stop {
		t.Errorf("readdir ended by fn: %v", err)
	}
	if err := root.Remove("d"); !errors.Is(err, unix.EISDIR) {
		t.Errorf("remove of a directory: %v, want EISDIR", err)
	}
	if err := root.Remove("g"); err != nil {
		t.Error(err)
	}
	if _, err := root.Lstat("g"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("lstat of nothing: %v", err)
	}
	if s, err := root.Space(); err != nil || s.Free <= 0 || s.Block <= 0 {
		t.Errorf("space: %+v, %v", s, err)
	}
}

func TestTmpfileLink(t *testing.T) {
	root, _ := openRoot(t)
	f, err := root.Open(".", unix.O_RDWR|unix.O_TMPFILE, 0o600)
	if errors.Is(err, unix.EOPNOTSUPP) {
		t.Skip("the file system of the temp directory has no O_TMPFILE")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if err := root.Link(f, "named"); err != nil {
		t.Fatal(err)
	}
	if err := root.Link(f, "named"); !errors.Is(err, unix.EEXIST) {
		t.Errorf("link over a name: %v, want EEXIST", err)
	}
}

func TestLock(t *testing.T) {
	root, _ := openRoot(t)
	open := func() File {
		f, err := root.Open("LOCK", unix.O_RDWR|unix.O_CREAT, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	a, b := open(), open()
	if err := a.Lock(); err != nil {
		t.Fatal(err)
	}
	if err := b.Lock(); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("second lock: %v, want EAGAIN", err)
	}
	_ = open().Close() // drops nothing, unlike with POSIX locks
	if err := b.Lock(); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("second lock after a close: %v, want EAGAIN", err)
	}
	_ = a.Close()
	if err := b.Lock(); err != nil {
		t.Errorf("lock after release: %v", err)
	}
	_ = b.Close()
}

func TestFaulty(t *testing.T) {
	under, _ := openRoot(t)
	var fault Fault
	var want Op
	root := &Faulty{FS: under, Hook: func(c Call) Fault {
		if c.Op == want {
			return fault
		}
		return Fault{}
	}}
	f, err := root.Open("f", unix.O_RDWR|unix.O_CREAT, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	data := bytes.Repeat([]byte("0123456789"), 1000)
	want, fault = OpWrite, Fault{Short: 7}
	if err := WriteAll(f, [][]byte{data[:9000:9000], data[9000:]}, 0); err != nil {
		t.Fatal(err) // seven bytes at a time
	}
	want, fault = OpRead, Fault{Short: 13}
	got := make([]byte, len(data))
	if n, err := ReadFull(f, [][]byte{got[:5:5], got[5:]}, 0); n != len(data) || err != nil || !bytes.Equal(got, data) {
		t.Errorf("short reads add up to %d bytes, %v", n, err)
	}
	fault = Fault{Flip: true}
	if n, err := f.ReadVec([][]byte{got[:5], got[5:]}, 0); n != len(data) || err != nil || bytes.Equal(got, data) {
		t.Errorf("flipped read: %d bytes, %v, and they are equal", n, err)
	}
	for _, op := range []Op{OpOpen, OpLink, OpRename, OpRemove, OpMkdir, OpLstat, OpReadDir, OpSpace, OpRead, OpWrite, OpStat, OpSync, OpLock} {
		want, fault = op, Fault{Err: unix.EIO}
		var err error
		switch op {
		case OpOpen:
			_, err = root.Open("f", unix.O_RDONLY, 0)
		case OpLink:
			err = root.Link(f, "x")
		case OpRename:
			err = root.Rename("f", "x")
		case OpRemove:
			err = root.Remove("f")
		case OpMkdir:
			err = root.Mkdir("x", 0o700)
		case OpLstat:
			_, err = root.Lstat("f")
		case OpReadDir:
			err = root.ReadDir(".", func(string) error { return nil })
		case OpSpace:
			_, err = root.Space()
		case OpRead:
			_, err = f.ReadVec([][]byte{got}, 0)
		case OpWrite:
			_, err = f.WriteVec([][]byte{got}, 0)
		case OpStat:
			_, err = f.Stat()
		case OpSync:
			err = f.Sync()
		case OpLock:
			err = f.Lock()
		}
		if !errors.Is(err, unix.EIO) {
			t.Errorf("%s: %v, want EIO", op, err)
		}
	}
	if _, err := under.Lstat("f"); err != nil {
		t.Errorf("a failed call was made: %v", err)
	}
	want, fault = OpRemove, Fault{Err: unix.EIO, After: true}
	if err := root.Remove("f"); !errors.Is(err, unix.EIO) {
		t.Errorf("remove: %v, want EIO", err)
	}
	if _, err := under.Lstat("f"); !errors.Is(err, unix.ENOENT) {
		t.Errorf("a call that fails afterwards was not made: %v", err)
	}
	gate := make(chan struct{})
	want, fault = OpSpace, Fault{Wait: gate}
	done := make(chan error)
	go func() { _, err := root.Space(); done <- err }()
	select {
	case <-done:
		t.Error("a hung call returned")
	default:
	}
	close(gate)
	if err := <-done; err != nil {
		t.Error(err)
	}
	want, fault = OpClose, Fault{Err: unix.EIO}
	if err := f.Close(); !errors.Is(err, unix.EIO) {
		t.Errorf("close: %v, want EIO", err)
	}
	if _, err := f.(*faultyFile).File.Stat(); !errors.Is(err, unix.EBADF) {
		t.Errorf("the file is open after a failed close: %v", err)
	}
}
