// Package vfs is the few file calls that fstier makes, behind an interface
// small enough to fake: the operating system's (OpenRoot), a tree in memory
// that can lose its power (Mem), a wrapper that fails calls on request
// (Faulty) and one that claims millions of files (Many). Names are relative to
// the root, so that nothing is reached outside it and paths stay short.
//
// It starts no goroutines. A call blocks as long as the kernel does; nothing
// can cut it short.
package vfs
