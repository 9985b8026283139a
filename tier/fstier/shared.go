package fstier

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/vfs"
)

// A shared root has several nodes, perhaps on several hosts. Each has a number
// in it, from 1 to nodesMax, and a file's length says whose it is: a block's
// file is as many bytes longer than in a root of one node's as its writer's
// number, and that tail is a hole. So one lstat tells the owner, the scan reads
// no file for it, and names, by which all find a block, say nothing of owners.
// docs/adr/0006 has what else was thought of.
//
// A node accounts and evicts what is its own, and finds by lstat what others
// have added. What it found it remembers, foreignMax blocks of it; that there
// was nothing it believes for missAge.
//
// No lock is relied on for right bytes: a name is given to one file only, by
// link, and no file is changed once it has its name. That is why a victim's
// file is not taken over here: others may be reading it.
const (
	nameNodes = "nodes" // a directory for each number: usage and tmp

	nodesMax   = headerSize - 1
	nodeIDMax  = 64
	foreignMax = 1 << 18
	missAge    = 2 * time.Second
	missSlots  = 1 << 14
)

// place is where the tier keeps what is its own. A node that shares its root
// has a number, and all of it elsewhere.
type place struct {
	number           uint16 // 0 for one that has the root alone
	lock, usage, tmp string
	tag              string // begins the second part of its names in the quarantine
	made             bool   // just now, so there is nothing of this number
}

func alone() place { return place{lock: nameLock, usage: nameUsage, tmp: nameTmp} }

func placeOf(number uint16) place {
	n := fmt.Sprintf("%04x", number)
	return place{number: number, lock: nameLock + "/" + n, usage: nameNodes + "/" + n + "/usage", tmp: nameNodes + "/" + n + "/tmp", tag: n + "."}
}

// join finds the place of this node among those that share the root, or makes
// one. LOCK is a directory in a shared root and a file in one of one node's, so
// that whoever comes first decides which it is, on any file system.
func (t *Tier) join() (place, error) {
	if err := t.fs.Mkdir(nameLock, 0o700); err != nil && !errors.Is(err, unix.EEXIST) {
		return place{}, t.openErr("make directory "+nameLock+" in", err)
	}
	st, err := t.fs.Lstat(nameLock)
	if err != nil {
		return place{}, t.openErr("look at "+nameLock+" in", err)
	}
	if !st.Dir() {
		who, _, _ := t.readSmall(nameLock, 1<<10)
		return place{}, fmt.Errorf("fs tier %s: root %s belongs to one node alone (%s): give this one an empty root to share, or set shared: false when that one has stopped",
			t.o.Name, t.o.Root, strings.Join(strings.Fields(string(who)), " "))
	}
	number := uint64(0)
	err = t.fs.ReadDir(nameLock, func(base string) error {
		n, err := strconv.ParseUint(base, 16, 16)
		if err != nil || n == 0 || n > nodesMax || len(base) != 4 {
			return nil
		}
		who, _, err := t.readSmall(nameLock+"/"+base, 1<<10)
		if err != nil && !gone(err) {
			return err
		}
		if id, _, _ := strings.Cut(string(who), " "); id == t.o.NodeID && (number == 0 || n < number) {
			number = n
		}
		return nil
	})
	if err != nil {
		return place{}, t.openErr("list nodes of", err)
	}
	p := placeOf(uint16(number))
	for n := uint16(1); number == 0; n++ {
		if n > nodesMax {
			return place{}, fmt.Errorf("fs tier %s: root %s is shared by %d nodes, and no more are possible: remove the files in %s of nodes that are gone", t.o.Name, t.o.Root, nodesMax, t.path(nameLock))
		}
		p = placeOf(n)
		f, err := t.fs.Open(p.lock, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL, 0o600)
		if errors.Is(err, unix.EEXIST) {
			continue
		}
		if err == nil {
			err = errors.Join(vfs.WriteAll(f, [][]byte{[]byte(t.who())}, 0), f.Close())
		}
		if err != nil {
			return place{}, t.openErr("take a number in", err)
		}
		break
	}
	if err := t.makeDir(nameNodes); err != nil {
		return place{}, t.openErr("make directory "+nameNodes+" in", err)
	}
	dir := strings.TrimSuffix(p.tmp, "/tmp")
	if err := t.fs.Mkdir(dir, 0o700); err == nil {
		p.made = number == 0
	} else if !errors.Is(err, unix.EEXIST) {
		return place{}, t.openErr("make directory "+dir+" in", err)
	}
	return p, nil
}

// who is what a lock file says of its holder, with the node's id first in a
// shared root: 256 bytes.
func (t *Tier) who() string {
	host, _ := os.Hostname()
	text := fmt.Sprintf("pid %d on %s since %s", os.Getpid(), host, t.o.Now().UTC().Format("2006-01-02T15:04:05Z"))
	if t.o.Shared {
		text = t.o.NodeID + " " + text
	}
	return fmt.Sprintf("%-255.255s\n", text)
}

// sized says whether a file of this size can be a block's, and whose it is. A
// length of 0 is not known.
func (t *Tier) sized(size int64, length int) (owner uint16, ok bool) {
	owner = uint16(size % headerSize)
	size -= int64(owner)
	ok = (owner != 0) == t.o.Shared && size >= 2*headerSize && (length == 0 || size == fileSize(length))
	return owner, ok
}

// charged is what a namespace's small file is charged to this node: nothing in
// a shared root, where it is everybody's.
func (t *Tier) charged(bytes int64) int64 {
	if t.o.Shared {
		return 0
	}
	return bytes
}

// notOurs says that another node's block has the place of a file that we might
// remove. Wrong lengths are nobody's.
func (t *Tier) notOurs(name string) bool {
	if !t.o.Shared {
		return false
	}
	st, err := t.fs.Lstat(name)
	owner, ok := t.sized(st.Size, 0)
	return err == nil && st.Regular() && ok && owner != t.place.number
}

// misses remembers which keys an lstat has not found, by a hash. What falls on
// a taken slot replaces it, and a key that has another's hash is missed for as
// long: neither does harm. The tier's mu guards it.
type misses struct {
	slots []miss // none in a root that is not shared
	began time.Time
}

type miss struct {
	hash uint64
	at   int64 // ns since began, and 1; 0 is none
}

func newMisses(now time.Time) misses { return misses{make([]miss, missSlots), now} }

// since is the time of an entry that is made now. It goes back only where the
// clock is one that can be set.
func (m *misses) since(now time.Time) int64 { return int64(now.Sub(m.began)) + 1 }

func (m *misses) has(hash uint64, now int64) bool {
	s := &m.slots[hash%missSlots]
	return s.at != 0 && s.hash == hash && now >= s.at && now-s.at < int64(missAge)
}

// missed notes that a key has no file.
func (t *Tier) missed(n *namespace, key *block.Key) {
	if !t.o.Shared {
		return
	}
	now := t.o.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	hash := t.mu.index.hash(n.id, key)
	t.mu.misses.slots[hash%missSlots] = miss{hash, t.mu.misses.since(now)}
}
