package fstier

import (
	"math/rand/v2"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/keymap"
)

// entry is one block file. It holds no pointers and has 48 bytes, so that with
// its slot in the table a block costs about 60.
type entry struct {
	hash       [block.HashSize]byte
	ns         uint16 // namespace.id
	group      uint8  // block.GroupsMax fits
	flags      uint8
	units      uint32 // bytes that the medium charges, in 512
	prev, next uint32 // in its list; 0 ends it
}

const _ uint = 256 - block.GroupsMax

const (
	flagOld     = 1 << iota // in index.old: found by the scan and not used since
	flagBusy                // an eviction has it; in no list, and absent for callers
	flagBad                 // set aside, but the file could not be moved; absent for callers
	flagForeign             // in index.foreign: another node's, in a shared root
)

func (e *entry) bytes() int64 { return int64(e.units) * 512 }

func (e *entry) usable() bool { return e.flags&(flagBusy|flagBad) == 0 }

func (e *entry) key() block.Key {
	var k block.Key
	copy(k[:], e.hash[:])
	k[block.KeySize-1] = e.group
	return k
}

// list is a doubly linked list of entries by handle.
type list struct{ front, back uint32 }

// index knows which blocks there are and in which order they were used. The
// tier's mu guards it; nothing here does I/O.
//
// INVARIANT(fs-one-list): an entry is in young, or with flagOld in old, or
// with flagForeign in foreign, or with flagBusy in none.
type index struct {
	table *keymap.Table
	slab  keymap.Slab[entry]
	salt  uint64

	young list // used or written in this run
	old   list // known from the scan only; all of it is older than young

	listed int64 // bytes of the entries in both lists

	foreign  list // of other nodes, never a victim
	foreigns int  // entries of it
}

func newIndex() index { return index{table: keymap.NewTable(), salt: rand.Uint64()} }

func (x *index) hash(ns uint16, key *block.Key) uint64 {
	return key.Mix(x.salt + uint64(ns)*0x9e3779b97f4a7c15)
}

// find returns the handle of a block, or 0. It may have any flags.
func (x *index) find(ns uint16, key *block.Key) uint32 {
	if key.Group() >= block.GroupsMax {
		return 0
	}
	h, _ := x.table.Find(x.hash(ns, key), func(h uint32) bool {
		e := x.slab.At(h)
		return e.ns == ns && e.group == key[block.KeySize-1] && e.hash == [block.HashSize]byte(key[:block.HashSize])
	})
	return h
}

func (x *index) at(h uint32) *entry { return x.slab.At(h) }

func (x *index) listOf(e *entry) *list {
	switch {
	case e.flags&flagForeign != 0:
		return &x.foreign
	case e.flags&flagOld != 0:
		return &x.old
	}
	return &x.young
}

// count changes what the lists hold by an entry that enters (1) or leaves (-1).
func (x *index) count(e *entry, by int64) {
	if e.flags&flagForeign != 0 {
		x.foreigns += int(by)
		return
	}
	x.listed += by * e.bytes()
}

// add inserts a block that is not there, at the front of its list. It returns
// 0 if there are too many blocks to count, which takes 2^32 of them.
func (x *index) add(ns uint16, key *block.Key, bytes int64, flags uint8) uint32 {
	h := x.slab.Alloc()
	if h == 0 {
		return 0
	}
	e := x.slab.At(h)
	e.ns, e.group, e.units, e.flags = ns, key[block.KeySize-1], uint32(bytes/512), flags
	copy(e.hash[:], key[:])
	x.table.Insert(x.hash(ns, key), h)
	x.link(h)
	return h
}

// link puts an entry at the front of the list that its flags name.
func (x *index) link(h uint32) {
	e := x.at(h)
	l := x.listOf(e)
	e.prev, e.next = 0, l.front
	if l.front != 0 {
		x.at(l.front).prev = h
	} else {
		l.back = h
	}
	l.front = h
	x.count(e, 1)
}

// linkBack puts an entry at the back of the old list.
func (x *index) linkBack(h uint32) {
	e := x.at(h)
	e.prev, e.next = x.old.back, 0
	if x.old.back != 0 {
		x.at(x.old.back).next = h
	} else {
		x.old.front = h
	}
	x.old.back = h
	x.count(e, 1)
}

func (x *index) unlink(h uint32) {
	e := x.at(h)
	l := x.listOf(e)
	if e.prev != 0 {
		x.at(e.prev).next = e.next
	} else {
		l.front = e.next
	}
	if e.next != 0 {
		x.at(e.next).prev = e.prev
	} else {
		l.back = e.prev
	}
	e.prev, e.next = 0, 0
	x.count(e, -1)
}

// touch makes a usable entry the youngest.
func (x *index) touch(h uint32) {
	if e := x.at(h); e.usable() && x.young.front != h && x.foreign.front != h {
		x.unlink(h)
		e.flags &^= flagOld
		x.link(h)
	}
}

// remove forgets an entry and returns the bytes that were charged for it.
func (x *index) remove(h uint32) int64 {
	e := x.at(h)
	if e.flags&flagBusy == 0 {
		x.unlink(h)
	}
	key, bytes := e.key(), e.bytes()
	x.table.Delete(x.hash(e.ns, &key), h)
	x.slab.Free(h)
	return bytes
}

// claim takes the least recently used entry that skip lets pass out of its
// list and marks it busy. It returns 0 if there is none.
func (x *index) claim(skip func(e *entry) bool) uint32 {
	for _, from := range [...]uint32{x.old.back, x.young.back} {
		for h := from; h != 0; h = x.at(h).prev {
			if e := x.at(h); !skip(e) {
				x.unlink(h)
				e.flags = e.flags&^flagOld | flagBusy
				return h
			}
		}
	}
	return 0
}

// unclaim gives a busy entry back, as the youngest.
func (x *index) unclaim(h uint32) {
	x.at(h).flags &^= flagBusy
	x.link(h)
}
