// Package object holds the object tier against net/http alone. It has no code
// of its own.
//
// By turns and with 16 workers each it has the tier, and a bare client whose
// requests were signed before, put and get the same blocks: on versitygw, a
// real server that needs most of the CPU itself, and on a sink, which is a
// process that only moves bytes and so shows the clients' own limits.
package object
