// Package vfs is the few file calls that fstier makes, behind an interface
// small enough to fake: the operating system's (OpenRoot) and a wrapper that
// fails calls on request (Faulty). Names are relative to the root, so that
// nothing is reached outside it and paths stay short.
//
// It starts no goroutines. A call blocks as long as the kernel does; nothing
// can cut it short.
package vfs
