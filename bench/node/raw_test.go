package node

import (
	"fmt"
	"os"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/tier"
)

const headerSize = tier.Align // of a block's file

// raw is the medium: the calls that the tier makes, with the same flags on as
// many directories, and nothing else.
type raw struct {
	dir    int
	direct int // O_DIRECT, where it works here
}

func openRaw(b *testing.B, path string) *raw {
	b.Helper()
	for i := range 256 {
		if err := os.MkdirAll(fmt.Sprintf("%s/%02x", path, i), 0o700); err != nil {
			b.Fatal(err)
		}
	}
	dir, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = unix.Close(dir) })
	r := &raw{dir: dir, direct: unix.O_DIRECT}
	fd, err := unix.Openat(dir, "00", unix.O_WRONLY|unix.O_TMPFILE|unix.O_DIRECT, 0o600)
	if err != nil {
		b.Skipf("no O_DIRECT and O_TMPFILE in %s: %v", path, err)
	}
	_ = unix.Close(fd)
	return r
}

func rawName(i int) string { return fmt.Sprintf("%02x/%d", i%256, i) }

func (r *raw) write(i int, hdr, buf []byte) error {
	fd, err := unix.Openat(r.dir, rawName(i)[:2], unix.O_WRONLY|unix.O_TMPFILE|unix.O_CLOEXEC|r.direct, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	if n, err := unix.Pwritev(fd, [][]byte{hdr, buf}, 0); err != nil || n != len(buf)+headerSize {
		return fmt.Errorf("wrote %d bytes: %w", n, err)
	}
	return unix.Linkat(unix.AT_FDCWD, "/proc/self/fd/"+strconv.Itoa(fd), r.dir, rawName(i), unix.AT_SYMLINK_FOLLOW)
}

func (r *raw) read(i int, hdr, buf []byte) error {
	fd, err := unix.Openat(r.dir, rawName(i), unix.O_RDONLY|unix.O_CLOEXEC|r.direct, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	if n, err := unix.Preadv(fd, [][]byte{hdr, buf}, 0); err != nil || n != len(buf)+headerSize {
		return fmt.Errorf("read %d bytes: %w", n, err)
	}
	return nil
}
