package engine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ErrSocketInUse is matched by the error of Listen when another process serves
// at the path.
var ErrSocketInUse = errors.New("another process serves there")

const (
	socketPathMax = 107 // bytes of sockaddr_un's path, less its end
	probeTimeout  = 2 * time.Second
)

// Listener is a bound socket, and the lock that makes it the only one.
type Listener struct {
	unix *net.UnixListener
	path string
	gid  int      // whose members may connect; -1: the owner and root only
	lock *os.File // held for the listener's life
	id   fileID   // of the socket file

	stopping            atomic.Bool // what ends accepting is asked for
	stopOnce, closeOnce sync.Once
	stopErr, closeErr   error
}

// fileID tells whether a path still names the file that we made.
type fileID struct{ dev, ino uint64 }

func idOf(fi fs.FileInfo) fileID {
	st := fi.Sys().(*syscall.Stat_t) // always, on Linux
	return fileID{st.Dev, st.Ino}
}

// Listen binds the socket at path. Mode is 0600, or with a group (name or number) 0660 for its
// members.
//
// A missing folder is made, for the user alone. A folder that others could
// replace the socket in is refused. Of several processes that want one path
// exactly one gets it: it holds a lock on path.lock until Close. A socket file
// that nobody answers at is a dead node's and is replaced; anything else is
// left alone and refused.
//
// Errors name the path and the setting. They match ErrSocketInUse when another
// process serves there.
func Listen(path, group string) (_ *Listener, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("socket: %w", err)
		}
	}()
	if len(path) > socketPathMax {
		return nil, fmt.Errorf("%s has %d bytes, the system allows %d; set socket to a shorter path", path, len(path), socketPathMax)
	}
	l := &Listener{path: path, gid: -1}
	if group != "" {
		if l.gid, err = lookupGroup(group); err != nil {
			return nil, err
		}
	}
	if err := prepareFolder(filepath.Dir(path), l.gid); err != nil {
		return nil, err
	}
	if l.lock, err = takeLock(path + ".lock"); err != nil {
		if errors.Is(err, ErrSocketInUse) {
			return nil, fmt.Errorf("%s: %w; stop it, or set socket to another path", path, err)
		}
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, dropLock(l.lock))
		}
	}()
	if err := removeStale(path); err != nil {
		return nil, err
	}

	// The file gets its mode from the descriptor, so there is no moment in
	// which others could connect.
	lc := net.ListenConfig{Control: func(_, _ string, rc syscall.RawConn) (err error) {
		if cerr := rc.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), 0o600) }); cerr != nil {
			return cerr
		}
		return err
	}}
	any, err := lc.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, fmt.Errorf("%w; set socket to a path where one can be made", err)
	}
	l.unix = any.(*net.UnixListener)
	l.unix.SetUnlinkOnClose(false) // Close does, after a look at what is there
	fi, err := os.Lstat(path)
	if err == nil && l.gid >= 0 {
		if err = os.Lchown(path, -1, l.gid); err == nil {
			err = os.Chmod(path, 0o660)
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("give %s to socket_group %s: %w", path, group, err), l.unix.Close(), os.Remove(path))
	}
	l.id = idOf(fi)
	return l, nil
}

// Path is what Listen was given.
func (l *Listener) Path() string { return l.path }

// stop stops listening and removes the socket, unless the path has become
// somebody else's. The lock stays: the path is still ours.
func (l *Listener) stop() error {
	l.stopOnce.Do(func() {
		l.stopping.Store(true)
		l.stopErr = l.unix.Close()
		if fi, err := os.Lstat(l.path); err == nil && idOf(fi) == l.id {
			l.stopErr = errors.Join(l.stopErr, os.Remove(l.path))
		}
	})
	return l.stopErr
}

// Close stops listening and gives the path up. It may be called again and by
// anybody.
func (l *Listener) Close() error {
	l.closeOnce.Do(func() { l.closeErr = errors.Join(l.stop(), dropLock(l.lock)) })
	return l.closeErr
}

func lookupGroup(group string) (int, error) {
	if gid, err := strconv.ParseUint(group, 10, 31); err == nil {
		return int(gid), nil
	}
	g, err := user.LookupGroup(group)
	if err != nil {
		return 0, fmt.Errorf("socket_group: %w; give the name or number of a group", err)
	}
	return strconv.Atoi(g.Gid)
}

// prepareFolder makes dir if need be, and checks that nobody else could put
// another socket in our socket's place.
func prepareFolder(dir string, gid int) error {
	if _, err := os.Lstat(dir); errors.Is(err, fs.ErrNotExist) {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("make the folder: %w; set socket to a path where it can be made", err)
		}
		if gid >= 0 {
			if err := errors.Join(os.Lchown(dir, -1, gid), os.Chmod(dir, 0o750)); err != nil {
				return fmt.Errorf("give folder to socket_group: %w", err)
			}
		}
	}
	// A link is judged like what it leads to: its owner can turn it.
	for _, stat := range []func(string) (fs.FileInfo, error){os.Lstat, os.Stat} {
		fi, err := stat(dir)
		if err != nil {
			return fmt.Errorf("look at the folder: %w", err)
		}
		uid := int(fi.Sys().(*syscall.Stat_t).Uid)
		if uid != 0 && uid != os.Geteuid() {
			return fmt.Errorf("folder %s belongs to user %d, who could replace the socket; set socket to a path in a folder of your own", dir, uid)
		}
		if fi.Mode()&fs.ModeSymlink == 0 && fi.Mode().Perm()&0o002 != 0 && fi.Mode()&fs.ModeSticky == 0 {
			return fmt.Errorf("folder %s (%v) can be written by everybody, who could replace the socket; chmod o-w it, or set socket to another path",
				dir, fi.Mode())
		}
	}
	return nil
}

// takeLock makes and locks the file. The kernel drops the lock with the
// process, however it ends, so what a dead node leaves is in nobody's way.
func takeLock(path string) (*os.File, error) {
	for range 16 {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, fmt.Errorf("make the lock: %w; set socket to a path where one can be made", err)
		}
		if err := flock(f); err != nil {
			holder, _ := os.ReadFile(path) // for the message only
			f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, fmt.Errorf("%w (pid %s holds %s)", ErrSocketInUse, strings.TrimSpace(string(holder)), path)
			}
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		// Its last holder may have removed it between our open and our lock.
		mine, err1 := f.Stat()
		there, err2 := os.Lstat(path)
		if err1 == nil && err2 == nil && idOf(mine) == idOf(there) {
			if err := errors.Join(f.Truncate(0), writePID(f)); err != nil {
				return nil, errors.Join(fmt.Errorf("write the lock: %w", err), dropLock(f))
			}
			return f, nil
		}
		f.Close()
	}
	return nil, fmt.Errorf("%w (others take and drop %s all the time)", ErrSocketInUse, path)
}

func flock(f *os.File) error {
	for {
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func writePID(f *os.File) error {
	_, err := f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	return err
}

// dropLock removes and unlocks the file, in this order, so that whoever locks
// it next sees that it is gone. What has been put in its place stays.
func dropLock(f *os.File) error {
	var err error
	mine, err1 := f.Stat()
	there, err2 := os.Lstat(f.Name())
	if err1 == nil && err2 == nil && idOf(mine) == idOf(there) {
		err = os.Remove(f.Name())
	}
	return errors.Join(err, f.Close())
}

// removeStale clears the path of a socket that nobody answers at. The lock is
// held, so only processes that do not know of it can interfere.
func removeStale(path string) error {
	fi, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("look at %w", err)
	case fi.Mode()&fs.ModeSocket == 0:
		return fmt.Errorf("%s exists and is not a socket (%v); remove it, or set socket to another path", path, fi.Mode())
	}
	c, err := net.DialTimeout("unix", path, probeTimeout)
	switch {
	case err == nil:
		c.Close()
		return fmt.Errorf("%s: %w without a lock; stop it, or set socket to another path", path, ErrSocketInUse)
	case !errors.Is(err, unix.ECONNREFUSED):
		return fmt.Errorf("%s: %w, perhaps: %w; stop it, or set socket to another path", path, ErrSocketInUse, err)
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("remove a dead node's socket: %w", err)
	}
	return nil
}
