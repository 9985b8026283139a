package object

import "golang.org/x/sys/unix"

// protect takes memory of tiertest.Buffer away from everybody, or gives it
// back.
func protect(b []byte, on bool) error {
	prot := unix.PROT_READ | unix.PROT_WRITE
	if on {
		prot = unix.PROT_NONE
	}
	return unix.Mprotect(b[:cap(b)], prot)
}
