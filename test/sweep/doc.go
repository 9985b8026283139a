// Package sweep has tests of the whole node, and of the tier in a directory
// alone, against a file system in memory that fails calls and loses its power.
// It has no code of its own.
//
// The fault model of the file system is in the comment of vfs.Mem, the language
// of faults in package fault. A test that fails prints the rules or the seed
// that replays it.
package sweep
