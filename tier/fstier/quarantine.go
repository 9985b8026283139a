package fstier

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/vfs"
	"github.com/terrace-kv/terrace/tier"
)

// quarantine is the directory of copies that were set aside. Its names begin
// with the time, so that they sort by age.
type quarantine struct {
	mu      sync.Mutex // held during I/O
	files   []aside    // oldest first
	bytes   int64
	removed int64 // files removed for room
}

type aside struct {
	name  string
	bytes int64
}

// loadQuarantine finds what earlier runs set aside.
func (t *Tier) loadQuarantine() error {
	q := &t.quarantine
	q.mu.Lock()
	defer q.mu.Unlock()
	err := t.fs.ReadDir(nameQuarantine, func(base string) error {
		if _, rest, _ := strings.Cut(base, "-"); !strings.HasPrefix(rest, t.place.tag) {
			return nil // another node's
		}
		st, err := t.fs.Lstat(nameQuarantine + "/" + base)
		if err == nil && !st.Dir() {
			if !st.Regular() {
				st.Bytes = 0
			}
			q.files = append(q.files, aside{base, st.Bytes})
			q.bytes += st.Bytes
		}
		return nil
	})
	slices.SortFunc(q.files, func(a, b aside) int { return strings.Compare(a.name, b.name) })
	t.found(q.bytes)
	t.pruneLocked()
	return err
}

// pruneLocked keeps the quarantine within its bounds; the newest file stays.
func (t *Tier) pruneLocked() {
	q := &t.quarantine
	most := int64(quarantineBytesMax)
	if t.o.Capacity > 0 {
		most = t.o.Capacity / 100
	}
	for len(q.files) > quarantineFilesMax || (q.bytes > most && len(q.files) > 1) {
		old := q.files[0]
		if err := t.fs.Remove(nameQuarantine + "/" + old.name); err != nil && !gone(err) {
			t.log.Warn("cannot remove the oldest file of the quarantine", "path", t.path(nameQuarantine, old.name), "error", err)
			return
		}
		q.files = slices.Delete(q.files, 0, 1)
		q.bytes -= old.bytes
		q.removed++
		t.mu.Lock()
		t.mu.account.add(-old.bytes)
		t.mu.Unlock()
		t.log.Info("removed the oldest file of the quarantine for room", "path", t.path(nameQuarantine, old.name), "removed_total", q.removed)
	}
}

// Quarantine tells the files that are set aside, their bytes, and how many
// were removed since Open to keep the bounds.
func (t *Tier) Quarantine() (files int, bytes, removed int64) {
	q := &t.quarantine
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.files), q.bytes, q.removed
}

// SetAside is in tier.SetAsider: the copy goes to the quarantine.
func (t *Tier) SetAside(ctx context.Context, ns *block.Namespace, key block.Key, why string) error {
	if err := t.enter("set aside"); err != nil {
		return err
	}
	defer t.leave()
	t.mu.Lock()
	n, h := t.findLocked(ns.Fingerprint(), &key)
	p := t.presenceLocked(n, h, &key)
	t.mu.Unlock()
	if n == nil || h == 0 && p == tier.Absent && !t.o.Shared {
		return nil
	}
	mu := t.stripeOf(n, &key)
	mu.Lock()
	defer mu.Unlock()
	if err := t.setAsideLocked(n, key, why, anyCopy); err != nil {
		return t.fail("set aside", key, err)
	}
	return nil
}

// anyCopy stands for whatever is in a block's place.
const anyCopy = ^uint64(0)

// setAsideLocked moves a block's file to the quarantine, under the key's
// stripe. The key is absent afterwards, even if the file cannot be moved.
//
// judged is the inode that was found to be wrong, 0 if nothing was there, or
// anyCopy: in a
// shared root another node may have put a right copy in its place since.
func (t *Tier) setAsideLocked(n *namespace, key block.Key, why string, judged uint64) error {
	from := n.file(key)
	var kept int64 // bytes that live on in the quarantine
	t.mu.Lock()
	h := t.mu.index.find(n.id, &key)
	ours := !t.o.Shared || h != 0 && t.mu.index.at(h).flags&flagForeign == 0
	t.mu.Unlock()
	st, err := t.fs.Lstat(from)
	replaced := err == nil && !st.Regular() // so the block's bytes are gone
	switch {
	case err != nil:
	case t.o.Shared && judged != anyCopy && st.Ino != judged:
		err = unix.ENOENT // what was judged is gone
	case replaced:
		st.Bytes = 0 // links, pipes and their like hold none; what is in a directory stays as it was counted
		if _, err = t.toQuarantine(n, key, from, st, true); err != nil && !gone(err) {
			err = &tier.Error{Op: "set aside", Tier: t.o.Name, Key: key, Class: tier.ClassPermanent, Cause: tier.CauseForeign,
				Err:  fmt.Errorf("something that is no regular file is in the place of block file %s and cannot be moved away: %w", t.path(from), err),
				Hint: "remove it"}
		}
	default:
		room := ours || t.room(st.Bytes)
		kept, err = t.toQuarantine(n, key, from, st, room)
		if !ours && room {
			t.mu.Lock()
			t.mu.account.add(-st.Bytes) // counted anew below
			t.mu.Unlock()
		}
	}
	missing := gone(err)

	t.mu.Lock()
	h = t.mu.index.find(n.id, &key)
	switch {
	case h != 0 && (err == nil || missing || replaced):
		t.dropLocked(n, h)
		t.mu.account.add(kept)
	case h != 0:
		t.mu.index.at(h).flags |= flagBad
	case err == nil && !ours:
		t.mu.account.add(kept)
	case err == nil:
		t.mu.account.found(kept)
		t.mu.account.lost(st.Bytes - kept)
	}
	if !missing {
		t.mu.setAside++
	}
	t.mu.Unlock()

	if missing {
		return nil
	}
	if ok, dropped := t.complain.allow(); ok {
		log := t.log.With("path", t.path(from), "why", why)
		if dropped > 0 {
			log = log.With("not_logged", dropped)
		}
		if err != nil {
			log.Warn("a copy is broken and cannot be set aside; it is not served", "error", err)
		} else {
			log.Warn("a copy is broken and was set aside")
		}
	}
	t.quarantine.mu.Lock()
	defer t.quarantine.mu.Unlock()
	t.pruneLocked()
	return err
}

// room says whether this node may have so many bytes more, and counts them.
func (t *Tier) room(bytes int64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	used := t.mu.account.used() + bytes
	if used > t.usage.persisted || t.o.Capacity > 0 && used > t.o.Capacity {
		return false
	}
	t.mu.account.add(bytes)
	return true
}

// toQuarantine moves a file, or removes it where that fails or there is no
// room. It returns the bytes that the quarantine has more.
//
// A directory is moved and not listed: it is not ours to prune.
func (t *Tier) toQuarantine(n *namespace, key block.Key, from string, st vfs.Info, room bool) (int64, error) {
	q := &t.quarantine
	q.mu.Lock()
	defer q.mu.Unlock()
	t.mu.Lock()
	t.mu.tmpSeq++
	base := fmt.Sprintf("%020d-%s%d-%.16s-%s", t.o.Now().UnixNano(), t.place.tag, t.mu.tmpSeq, n.dir, key)
	t.mu.Unlock()
	if !room {
		return 0, t.fs.Remove(from)
	}
	err := t.fs.Rename(from, nameQuarantine+"/"+base)
	if gone(err) && t.makeDir(nameQuarantine) == nil { // somebody may have removed it
		err = t.fs.Rename(from, nameQuarantine+"/"+base)
	}
	if err == nil && !st.Dir() {
		q.files = append(q.files, aside{base, st.Bytes})
		q.bytes += st.Bytes
		return st.Bytes, nil
	}
	if err == nil || (!st.Dir() && t.fs.Remove(from) == nil) {
		return 0, nil
	}
	return 0, err
}

// inQuarantine says whether a file is counted with the quarantine.
func (t *Tier) inQuarantine(base string) bool {
	q := &t.quarantine
	q.mu.Lock()
	defer q.mu.Unlock()
	return slices.ContainsFunc(q.files, func(a aside) bool { return a.name == base })
}
