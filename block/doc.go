// Package block holds the plain values that every other package speaks of: the
// block key, and the namespace that says what a block's bytes mean.
//
// It does no I/O, reads no clock and imports only the standard library.
package block
