// Package fstier is a tier in a directory: one file a block, published
// atomically, checked before it is served, and never more bytes than allowed.
// docs/storage-format.md describes what is on disk.
//
// Goroutines: the keeper, started by Open, which looks once a second whether
// the root is still there and takes it anew when it was lost (root.go); and
// the scan, started by the keeper, which waits for it: it reads directories,
// fills the index, and ends. Close cancels both and waits for them. Everything
// else runs on the callers' goroutines; Close waits for them too, bounded by
// its ctx.
//
// Locks, in the order in which they are taken: namespaceMu, a stripe, the
// quarantine's, the usage file's, mu. The last one guards index and accounts
// and is never held during I/O. A stripe covers the keys that hash to it and
// is held while a file's name and its index entry change together; reads do
// not take it. Known and Touch take mu only.
//
// Bounds: about 60 bytes of memory a block; 4 KiB for each call under way;
// quarantineFilesMax files set aside; straysMax files that could not be removed
// when they should, to be tried again; while the scan runs, 16 bytes more for
// each block found. In a shared root (shared.go) foreignMax blocks of other
// nodes, and 256 KiB of misses.
package fstier
