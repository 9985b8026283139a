// Package keymap holds the two structures under every block index: Table, from
// a 64-bit hash to uint32 handles, and Slab, from handles to entries. The
// owner keeps the key in the entry; the table knows hashes only.
//
// Both are made for 10^7 entries and for a lookup path that may not pause:
// they grow in small steps, never rehash as a whole, and give the garbage
// collector nothing to follow but one pointer per segment or chunk.
//
// There are no goroutines and no locks: the owner serialises calls, except
// that Find may run beside other Finds.
//
// Bounds: a Table takes 14 bytes an entry, 20 at most; a Slab takes
// the size of its entry, and 4 bytes for each handle on the free stack. Memory
// is not given back when entries go.
package keymap
