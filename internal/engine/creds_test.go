package engine_test

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// setCreds changes the credentials of this thread alone.
func setCreds(groups *uint32, n, uid, gid int) error {
	for _, c := range [][4]uintptr{
		{unix.SYS_SETGROUPS, uintptr(n), uintptr(unsafe.Pointer(groups)), 0},
		{unix.SYS_SETRESGID, uintptr(gid), uintptr(gid), uintptr(gid)},
		{unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)},
	} {
		if _, _, errno := unix.RawSyscall(c[0], c[1], c[2], c[3]); errno != 0 {
			return errno
		}
	}
	return nil
}
