package vfs

import (
	"errors"

	"golang.org/x/sys/unix"
)

// FS is a directory tree. Names are slash-separated and relative to its root,
// which is ".". Errors match the errno with errors.Is. It is safe for
// concurrent use.
type FS interface {
	// Open opens or creates a file. Flags are the kernel's; a symbolic link as
	// the last element is never followed.
	Open(name string, flags int, perm uint32) (File, error)
	// Link gives a file of the same FS, opened with O_TMPFILE, a name. It
	// fails with EEXIST rather than replace.
	Link(f File, name string) error
	// Rename replaces what has the new name.
	Rename(from, to string) error
	// Remove removes a name that is no directory.
	Remove(name string) error
	Mkdir(name string, perm uint32) error
	// Lstat does not follow a symbolic link.
	Lstat(name string) (Info, error)
	// ReadDir calls fn for each name in a directory, in no order, a few
	// hundred at a time in memory. An error of fn ends it and is returned.
	ReadDir(name string, fn func(base string) error) error
	// Space asks about the file system that holds the root.
	Space() (Space, error)
	// Close gives the root back. Files stay open.
	Close() error
}

// File is an open file. Calls may run side by side, Close last.
type File interface {
	// ReadVec and WriteVec are one preadv or pwritev; either may be short.
	ReadVec(bufs [][]byte, off int64) (int, error)
	WriteVec(bufs [][]byte, off int64) (int, error)
	Stat() (Info, error)
	// Truncate sets the length. What it adds is a hole.
	Truncate(size int64) error
	// Sync is fdatasync, of a directory fsync: then its names survive a power cut.
	Sync() error
	// Lock takes an exclusive lock on the file, which lasts until Close or the
	// end of the process. It fails with EAGAIN when another opener has it.
	Lock() error
	Close() error
}

// Info is what Stat and Lstat tell.
type Info struct {
	Mode  uint32 // type and permissions, as the kernel has them
	Size  int64  // bytes
	Bytes int64  // bytes that the medium is charged with: st_blocks * 512
	Mtime int64  // ns since 1970
	Dev   uint64 // file system
	Ino   uint64
	Links uint64 // names that the file has
}

// Regular says that it is a regular file.
func (i Info) Regular() bool { return i.Mode&unix.S_IFMT == unix.S_IFREG }

// Dir says that it is a directory.
func (i Info) Dir() bool { return i.Mode&unix.S_IFMT == unix.S_IFDIR }

// Space is what Space tells, in bytes.
type Space struct {
	Free  int64 // for unprivileged users
	Block int64 // unit of allocation
}

// ReadFull reads until bufs are full or the file ends, and says how many bytes
// that is. bufs is consumed.
func ReadFull(f File, bufs [][]byte, off int64) (int, error) {
	done := 0
	for {
		n, err := f.ReadVec(bufs, off+int64(done))
		done += max(n, 0)
		if err != nil {
			// Direct I/O cannot go on from an unaligned end of the file.
			if done > 0 && errors.Is(err, unix.EINVAL) {
				return done, nil
			}
			return done, err
		}
		if bufs = advance(bufs, n); n == 0 || len(bufs) == 0 {
			return done, nil
		}
	}
}

// WriteAll writes all of bufs. bufs is consumed.
func WriteAll(f File, bufs [][]byte, off int64) error {
	for len(bufs) > 0 {
		n, err := f.WriteVec(bufs, off)
		if err != nil {
			return err
		}
		if n == 0 {
			return unix.ENOSPC // a kernel that takes nothing and names no reason
		}
		off += int64(n)
		bufs = advance(bufs, n)
	}
	return nil
}

// advance drops the first n bytes of bufs.
func advance(bufs [][]byte, n int) [][]byte {
	for len(bufs) > 0 && n >= len(bufs[0]) {
		n -= len(bufs[0])
		bufs = bufs[1:]
	}
	if n > 0 {
		bufs[0] = bufs[0][n:]
	}
	return bufs
}
