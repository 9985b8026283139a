package keymap

import "reflect"

const chunkLen = 4096

// Slab holds entries of one type by handle. T must hold no pointers, so that
// the collector skips the chunks. An entry never moves. The zero Slab is
// ready for use.
type Slab[T any] struct {
	chunks []*[chunkLen]T
	fresh  uint32 // handles given out at least once; handle 0 is never given out
	n      int

	// The free stack is chunked like the entries: a slice that doubles would
	// stop the caller for the copy.
	free  []*[chunkLen]uint32
	freeN int
}

// Alloc takes a zeroed entry. It returns 0 when all 2^32-1 handles are taken.
func (s *Slab[T]) Alloc() uint32 {
	if s.freeN > 0 {
		s.freeN--
		s.n++
		return s.free[s.freeN/chunkLen][s.freeN%chunkLen]
	}
	if s.fresh == 1<<32-1 {
		return 0
	}
	s.fresh++
	if int(s.fresh/chunkLen) == len(s.chunks) {
		s.chunks = append(s.chunks, new([chunkLen]T))
	}
	s.n++
	return s.fresh
}

// Free zeroes an entry and gives its handle back. Freeing a handle twice hands
// one entry to two owners; the owner sees to it that it does not happen.
func (s *Slab[T]) Free(h uint32) {
	var zero T
	*s.At(h) = zero
	if s.freeN/chunkLen == len(s.free) {
		s.free = append(s.free, new([chunkLen]uint32))
	}
	s.free[s.freeN/chunkLen][s.freeN%chunkLen] = h
	s.freeN++
	s.n--
}

// At is the entry of a handle that Alloc returned and Free did not take back.
// The pointer stays good until Free.
func (s *Slab[T]) At(h uint32) *T { return &s.chunks[h/chunkLen][h%chunkLen] }

// Len is the number of entries taken.
func (s *Slab[T]) Len() int { return s.n }

// Bytes is the memory taken.
func (s *Slab[T]) Bytes() int {
	return len(s.chunks)*(chunkLen*int(reflect.TypeFor[T]().Size())+8) + len(s.free)*(chunkLen*4+8)
}
