package engine

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"unsafe"

	"github.com/terrace-kv/terrace/internal/wire"
	"golang.org/x/sys/unix"
)

// peer is who has connected, as the kernel knows it.
type peer struct {
	pid, uid int
}

const peerGroupsMax = 1024

// identify asks the kernel who is at the other end, and checks that they may
// connect: our own user, root, or a member of the socket's group. The file's
// mode says the same; this holds also when the file was passed around.
func identify(c *net.UnixConn, gid int) (peer, error) {
	rc, err := c.SyscallConn()
	if err != nil {
		return peer{}, err
	}
	var cred *unix.Ucred
	var groups []uint32
	cerr := rc.Control(func(fd uintptr) {
		if cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil && gid >= 0 {
			groups, err = peerGroups(int(fd))
		}
	})
	if err := errors.Join(cerr, err); err != nil {
		return peer{}, fmt.Errorf("ask for the peer's credentials: %w", err)
	}
	p := peer{pid: int(cred.Pid), uid: int(cred.Uid)}
	if p.uid == os.Geteuid() || p.uid == 0 || gid >= 0 && (int(cred.Gid) == gid || slices.Contains(groups, uint32(gid))) {
		return p, nil
	}
	return p, &wire.Error{Code: wire.CodeForbidden, Message: fmt.Sprintf(
		"user %d may not use this node, which runs as user %d; run both as one user, or set socket_group to a group of both", p.uid, os.Geteuid())}
}

// peerGroups reads the supplementary groups. x/sys has no call for an option
// of this shape; /proc/PID would be another process's after the pid was
// reused, and does not show processes of another container.
func peerGroups(fd int) ([]uint32, error) {
	groups := make([]uint32, peerGroupsMax)
	size := uint32(len(groups) * 4)
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_PEERGROUPS,
		uintptr(unsafe.Pointer(&groups[0])), uintptr(unsafe.Pointer(&size)), 0)
	switch errno {
	case 0:
		return groups[:size/4], nil
	case unix.ERANGE, unix.ENOPROTOOPT: // more than anybody has; a kernel before 4.13
		return nil, nil
	}
	return nil, errno
}
