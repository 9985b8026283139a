package vfs

import (
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// OpenRoot opens a directory as an FS. It must exist and must not be a
// symbolic link.
func OpenRoot(path string) (FS, error) {
	fd, err := retry(func() (int, error) {
		return unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	})
	if err != nil {
		return nil, &fs.PathError{Op: "open directory", Path: path, Err: err}
	}
	return &osFS{fd: fd, path: path}, nil
}

type osFS struct {
	fd   int
	path string
}

type osFile struct {
	fd   int
	name string
	dir  bool // opened as one
}

// retry repeats a call that a signal interrupted. Network and FUSE file
// systems do that to file calls, and the runtime preempts with signals.
func retry(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if err != unix.EINTR {
			return n, err
		}
	}
}

func retryErr(call func() error) error {
	_, err := retry(func() (int, error) { return 0, call() })
	return err
}

func pathErr(op, name string, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: op, Path: name, Err: err}
}

func info(st *unix.Stat_t) Info {
	links := uint64(st.Nlink) //nolint:unconvert // 32 bits on arm64
	return Info{Mode: st.Mode, Size: st.Size, Bytes: st.Blocks * 512, Mtime: st.Mtim.Nano(), Dev: st.Dev, Ino: st.Ino, Links: links}
}

// Look is Lstat of any path.
func Look(path string) (Info, error) {
	var st unix.Stat_t
	err := retryErr(func() error { return unix.Lstat(path, &st) })
	return info(&st), pathErr("lstat", path, err)
}

// MountPoint is the last directory on the way to a path, itself included, on
// which a file system is mounted. The path is absolute and has no symbolic
// links.
func MountPoint(path string) (string, error) {
	for ; path != "/"; path = filepath.Dir(path) {
		var st unix.Statx_t
		err := retryErr(func() error {
			return unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_BASIC_STATS, &st)
		})
		if err != nil {
			return "", pathErr("statx", path, err)
		}
		if st.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT != 0 {
			if st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0 {
				return path, nil
			}
			continue
		}
		// A kernel before 5.8 tells only of mounts of other file systems.
		here, err := Look(path)
		if err != nil {
			return "", err
		}
		if above, err := Look(filepath.Dir(path)); err != nil || above.Dev != here.Dev {
			return path, err
		}
	}
	return "/", nil
}

func (o *osFS) Open(name string, flags int, perm uint32) (File, error) {
	fd, err := retry(func() (int, error) {
		return unix.Openat(o.fd, name, flags|unix.O_CLOEXEC|unix.O_NOFOLLOW, perm)
	})
	if err != nil {
		return nil, pathErr("open", name, err)
	}
	return &osFile{fd, name, flags&unix.O_DIRECTORY != 0 && flags&unix.O_TMPFILE != unix.O_TMPFILE}, nil
}

func (o *osFS) Link(f File, name string) error {
	proc := "/proc/self/fd/" + strconv.Itoa(f.(*osFile).fd)
	return pathErr("link", name, retryErr(func() error {
		return unix.Linkat(unix.AT_FDCWD, proc, o.fd, name, unix.AT_SYMLINK_FOLLOW)
	}))
}

func (o *osFS) Rename(from, to string) error {
	return pathErr("rename", to, retryErr(func() error { return unix.Renameat(o.fd, from, o.fd, to) }))
}

func (o *osFS) Remove(name string) error {
	return pathErr("remove", name, retryErr(func() error { return unix.Unlinkat(o.fd, name, 0) }))
}

func (o *osFS) Mkdir(name string, perm uint32) error {
	return pathErr("mkdir", name, retryErr(func() error { return unix.Mkdirat(o.fd, name, perm) }))
}

func (o *osFS) Lstat(name string) (Info, error) {
	var st unix.Stat_t
	err := retryErr(func() error { return unix.Fstatat(o.fd, name, &st, unix.AT_SYMLINK_NOFOLLOW) })
	return info(&st), pathErr("lstat", name, err)
}

func (o *osFS) ReadDir(name string, fn func(base string) error) error {
	f, err := o.Open(name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	dir := os.NewFile(uintptr(f.(*osFile).fd), filepath.Join(o.path, name))
	defer func() { _ = dir.Close() }()
	for {
		names, err := dir.Readdirnames(512)
		for _, n := range names {
			if err := fn(n); err != nil {
				return err
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (o *osFS) Space() (Space, error) {
	var st unix.Statfs_t
	if err := retryErr(func() error { return unix.Fstatfs(o.fd, &st) }); err != nil {
		return Space{}, pathErr("statfs", ".", err)
	}
	unit := st.Frsize
	if unit == 0 {
		unit = st.Bsize
	}
	return Space{Free: int64(st.Bavail) * unit, Block: unit}, nil
}

func (o *osFS) Close() error { return pathErr("close", ".", unix.Close(o.fd)) }

func (f *osFile) ReadVec(bufs [][]byte, off int64) (int, error) {
	n, err := retry(func() (int, error) { return unix.Preadv(f.fd, bufs, off) })
	return max(n, 0), pathErr("read", f.name, err)
}

func (f *osFile) WriteVec(bufs [][]byte, off int64) (int, error) {
	n, err := retry(func() (int, error) { return unix.Pwritev(f.fd, bufs, off) })
	return max(n, 0), pathErr("write", f.name, err)
}

func (f *osFile) Stat() (Info, error) {
	var st unix.Stat_t
	err := retryErr(func() error { return unix.Fstat(f.fd, &st) })
	return info(&st), pathErr("stat", f.name, err)
}

func (f *osFile) Sync() error {
	if f.dir {
		// A name is no data that ext4 would write for fdatasync.
		return pathErr("sync", f.name, retryErr(func() error { return unix.Fsync(f.fd) }))
	}
	return pathErr("sync", f.name, retryErr(func() error { return unix.Fdatasync(f.fd) }))
}

func (f *osFile) Truncate(size int64) error {
	return pathErr("truncate", f.name, retryErr(func() error { return unix.Ftruncate(f.fd, size) }))
}

// Lock takes an OFD lock: unlike flock it also works over NFS, and unlike a
// POSIX lock another descriptor's Close does not drop it.
func (f *osFile) Lock() error {
	err := retryErr(func() error {
		return unix.FcntlFlock(uintptr(f.fd), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart})
	})
	if err == unix.EACCES { // the other answer that POSIX allows
		err = unix.EAGAIN
	}
	return pathErr("lock", f.name, err)
}

// Close is not repeated after a signal: on Linux the descriptor is gone.
func (f *osFile) Close() error {
	err := unix.Close(f.fd)
	if err == unix.EINTR {
		err = nil
	}
	return pathErr("close", f.name, err)
}
