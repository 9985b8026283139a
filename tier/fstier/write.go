package fstier

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/blockhead"
	"github.com/terrace-kv/terrace/internal/vfs"
	"github.com/terrace-kv/terrace/tier"
)

// Write is in tier.Tier. It works through the items in order, one file each.
func (t *Tier) Write(ctx context.Context, ns *block.Namespace, items []tier.Item) {
	if err := t.enter("write"); err != nil {
		failAll(items, err)
		return
	}
	defer t.leave()
	if len(items) == 0 {
		return
	}
	n, err := t.storedNamespace(ctx, ns)
	if err != nil {
		failAll(items, err)
		return
	}
	hdr := t.headers.get()
	defer t.headers.put(hdr)
	for i := range items {
		items[i].Err = t.write(ctx, ns, n, &items[i], items, hdr)
	}
}

// write stores one item of a call that names all of named.
func (t *Tier) write(ctx context.Context, ns *block.Namespace, n *namespace, it *tier.Item, named []tier.Item, hdr []byte) error {
	const op = "write"
	if err := t.checkItem(op, ns, it); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return t.cancelled(op, it.Key, err)
	}
	if there, err := t.present(n, it.Key, len(it.Buf)); there || err != nil {
		return err
	}
	(&blockhead.Header{NS: n.fp, Key: it.Key, Length: int64(len(it.Buf)), Sum: it.Sum, Writer: t.writer}).Encode(hdr)
	store := func(full error) error { return t.store(ctx, n, it, named, hdr, full) }
	err := t.inSpace(store)
	if errors.Is(err, unix.ENOENT) {
		if err = t.remake(ctx, ns, n); err == nil {
			err = t.inSpace(store)
		}
	}
	if err != nil {
		return t.fail(op, it.Key, err)
	}
	return nil
}

// store makes room for a block, writes and publishes it.
func (t *Tier) store(ctx context.Context, n *namespace, it *tier.Item, named []tier.Item, hdr []byte, full error) error {
	t.retryStray()
	size := fileSize(len(it.Buf))
	r, err := t.reserve(ctx, "write", it.Key, size, n, named, full)
	if err != nil {
		return err
	}
	defer r.settle(0)
	f, err := t.create(n, it.Key, size, r)
	if err != nil {
		return err
	}
	return t.fillAndPublish(f, n, it, hdr, r)
}

// present says whether a block is there already, and makes it the youngest.
func (t *Tier) present(n *namespace, key block.Key, length int) (bool, error) {
	t.mu.Lock()
	h := t.mu.index.find(n.id, &key)
	there, foreign := h != 0 && t.mu.index.at(h).usable(), false
	if there {
		t.mu.index.touch(h)
		foreign = t.mu.index.at(h).flags&flagForeign != 0
	}
	t.mu.Unlock()
	if !there {
		return false, nil
	}
	// A write that ends well means that the block is there, so the index's
	// word is not enough: others may have removed the file.
	st, err := t.fs.Lstat(n.file(key))
	if owner, ok := t.sized(st.Size, length); err == nil && st.Regular() && ok && foreign == (owner != t.place.number) {
		return true, nil
	}
	mu := t.stripeOf(n, &key)
	mu.Lock()
	defer mu.Unlock()
	at, err := t.validLocked(n, key, length)
	if err != nil {
		return false, t.fail("write", key, err)
	}
	if at.ok {
		return true, t.keepLocked(n, key, at.bytes, at.owner)
	}
	if err := t.setAsideLocked(n, key, "not the file that was written", at.ino); err != nil {
		return false, t.fail("write", key, err)
	}
	return false, nil
}

// draft is a block's file before it has its name.
type draft struct {
	vfs.File
	tmp string // its name in tmp, or "" if it has none yet
}

// create opens a file for a block: an evicted one's, if the reservation has
// that, or a new one.
func (t *Tier) create(n *namespace, key block.Key, size int64, r *reservation) (draft, error) {
	if r.file != "" {
		f, err := t.reopen(r.file, size)
		if err == nil {
			return draft{f, r.file}, nil
		}
		t.removeStray(r.file, r, size)
		if r.bytes == 0 {
			return draft{}, err
		}
	}
	if t.tmpfile {
		var f vfs.File
		err := t.inShard(n, key[0], func() (err error) {
			f, err = t.fs.Open(n.shard(key[0]), unix.O_WRONLY|unix.O_TMPFILE|t.directFlag, 0o600)
			return err
		})
		return draft{f, ""}, err
	}
	tmp := t.tmpFile()
	f, err := t.openTmp(tmp, t.directFlag)
	if err != nil {
		t.removeStray(tmp, r, size) // it may have been made all the same
	}
	return draft{f, tmp}, err
}

// reopen opens an evicted block's file to be written over. A file that has
// another name is not ours alone.
func (t *Tier) reopen(name string, size int64) (vfs.File, error) {
	f, err := t.fs.Open(name, unix.O_WRONLY|unix.O_NONBLOCK|t.directFlag, 0)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && (!st.Regular() || st.Size != size || st.Links != 1) {
		err = fmt.Errorf("%s is not a file of %d bytes with one name", name, size)
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// inShard makes a call that needs a shard, and the shard if that is why the
// call fails: it is the first block there, or somebody removed the directory.
func (t *Tier) inShard(n *namespace, first byte, call func() error) error {
	err := call()
	if !errors.Is(err, unix.ENOENT) {
		return err
	}
	n.lasting[first].Store(false)
	if err := t.makeDir(n.shard(first)); err != nil {
		return err // ENOENT: the namespace's directory is gone, see remake
	}
	return call()
}

// syncNames makes the names in a shard survive a power cut, and once the names
// that lead to it.
func (t *Tier) syncNames(n *namespace, first byte) error {
	dirs := []string{n.shard(first)}
	if !n.lasting[first].Load() {
		dirs = append(dirs, n.dir, ".")
	}
	for _, dir := range dirs {
		if err := syncDir(t.fs, dir); err != nil {
			return err
		}
	}
	n.lasting[first].Store(true)
	return nil
}

// fillAndPublish writes header and block, gives the file its name and indexes
// it. It ends the draft and, when the bytes stay, the reservation.
func (t *Tier) fillAndPublish(f draft, n *namespace, it *tier.Item, hdr []byte, r *reservation) error {
	length := len(it.Buf)
	size := fileSize(length)
	open, named := true, false
	defer func() {
		if open {
			_ = f.Close()
		}
		if f.tmp != "" && !named {
			t.removeStray(f.tmp, r, size)
		}
	}()
	if err := vfs.WriteAll(f, [][]byte{hdr, it.Buf[:padded(length)]}, 0); err != nil {
		return err
	}
	if t.o.Shared { // whose it is, before it has a name
		if err := f.Truncate(size + int64(t.place.number)); err != nil {
			return err
		}
	}
	if t.o.Sync == SyncData {
		if err := f.Sync(); err != nil {
			return err
		}
	}
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if f.tmp != "" {
		// Network file systems tell at close what became of the bytes.
		open = false
		if err := f.Close(); err != nil {
			return err
		}
	}

	mu := t.stripeOf(n, &it.Key)
	mu.Lock()
	defer mu.Unlock()
	for tries := 0; ; tries++ {
		err = t.inShard(n, it.Key[0], func() error { return t.giveName(f, n.file(it.Key), r, size) })
		if err == nil {
			named = true
			break
		}
		if !errors.Is(err, unix.EEXIST) || tries == 2 {
			// A call that fails may have been done all the same. But what has
			// the name may also be the copy of a write that was faster.
			if f.tmp == "" && !errors.Is(err, unix.EEXIST) {
				at, lerr := t.fs.Lstat(n.file(it.Key))
				ours := lerr == nil && at.Ino == st.Ino
				if lerr != nil && !gone(lerr) {
					now, serr := f.Stat()
					ours = serr == nil && now.Links > 0
					if serr != nil {
						r.settle(size) // perhaps it is there: counted until the next start
					}
				}
				if ours && t.removeStray(n.file(it.Key), r, size) {
					t.leftInPlace(n, &it.Key, size)
				}
			}
			return err
		}
		at, verr := t.validLocked(n, it.Key, length)
		if verr != nil {
			return verr
		}
		if at.ok {
			return t.keepLocked(n, it.Key, at.bytes, at.owner)
		}
		if err := t.setAsideLocked(n, it.Key, "another file is in the block's place", at.ino); err != nil {
			return err
		}
	}
	if open {
		open = false
		err = f.Close()
	}
	if err == nil && t.o.Sync == SyncData {
		err = t.syncNames(n, it.Key[0])
	}
	if err != nil {
		if t.removeStray(n.file(it.Key), r, size) {
			t.leftInPlace(n, &it.Key, size)
		}
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.mu.index.find(n.id, &it.Key); h != 0 {
		t.dropLocked(n, h) // its file was removed by others and nobody had noticed
	}
	r.settleLocked(st.Bytes)
	if t.addLocked(n, &it.Key, st.Bytes, 0) == 0 {
		return errors.New("the index is full")
	}
	return nil
}

// removeStray removes a file of a write that has failed. If it cannot, its
// bytes stay counted, and later writes try again if it is in tmp. counted says
// that they were counted just now.
func (t *Tier) removeStray(name string, r *reservation, size int64) (counted bool) {
	if _, err := t.fs.Lstat(name); gone(err) || t.notOurs(name) {
		return false
	}
	err := t.fs.Remove(name)
	if err == nil || gone(err) {
		return false
	}
	if _, lerr := t.fs.Lstat(name); gone(lerr) {
		return false // done all the same
	}
	t.log.Warn("cannot remove the file of a write that has failed", "path", t.path(name), "error", err)
	t.mu.Lock()
	defer t.mu.Unlock()
	if r.bytes == 0 {
		return false
	}
	r.settleLocked(size)
	t.keepStrayLocked(name, size)
	return true
}

// leftInPlace indexes a file of a failed write that could not be removed from
// its block's place, under the key's stripe. Its bytes are counted. It is not
// served; an eviction removes it, or the next write of the block keeps it.
func (t *Tier) leftInPlace(n *namespace, key *block.Key, size int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.index.find(n.id, key) != 0 || t.addLocked(n, key, size, flagBad) == 0 {
		t.mu.account.add(-size) // an entry counts it already
	}
}

// giveName publishes a draft, or fails with EEXIST. The key's stripe makes
// looking and renaming one step.
func (t *Tier) giveName(f draft, name string, r *reservation, size int64) error {
	if f.tmp == "" {
		return t.fs.Link(f.File, name)
	}
	_, err := t.fs.Lstat(name)
	if err == nil {
		return fmt.Errorf("%s: %w", name, unix.EEXIST)
	}
	if !errors.Is(err, unix.ENOENT) {
		return err
	}
	if t.linkNamed {
		return t.linkTmp(f.tmp, name, size)
	}
	if err = t.fs.Rename(f.tmp, name); err != nil {
		_, lerr := t.fs.Lstat(f.tmp)
		if gone(lerr) {
			return nil // done all the same
		}
		if lerr != nil { // done or not; there was no such name, so what has it is ours
			t.removeStray(name, r, size)
		}
	}
	return err
}

// linkTmp gives a file in tmp its name, which a node that shares the root may
// be doing at this moment: only a link fails where there is something, on each
// file system that has links. Where there are none, a rename replaces that
// one's copy, and it learns so when it evicts it.
func (t *Tier) linkTmp(tmp, name string, size int64) error {
	f, err := t.fs.Open(tmp, unix.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	err = t.fs.Link(f, name)
	if err != nil { // it may have been made all the same
		st, serr := f.Stat()
		at, aerr := t.fs.Lstat(name)
		if serr == nil && aerr == nil && at.Dev == st.Dev && at.Ino == st.Ino {
			err = nil
		}
	}
	_ = f.Close() // nothing was written
	if err != nil {
		return err
	}
	if err := t.fs.Remove(tmp); err != nil && !gone(err) {
		// The block's bytes will outlive it.
		t.mu.Lock()
		defer t.mu.Unlock()
		t.mu.account.add(size)
		t.keepStrayLocked(tmp, size)
	}
	return nil
}

// keepLocked keeps a valid copy that is in place of the one just written: the
// scan has not come to it, or another write was faster.
func (t *Tier) keepLocked(n *namespace, key block.Key, bytes int64, owner uint16) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	x := &t.mu.index
	h := x.find(n.id, &key)
	foreign := owner != t.place.number
	if h != 0 && (x.at(h).flags&flagForeign != 0) != foreign {
		t.dropLocked(n, h) // it has another owner by now
		h = 0
	}
	switch {
	case h != 0:
	case foreign:
		t.addLocked(n, &key, bytes, flagForeign)
		return nil
	default:
		t.addLocked(n, &key, bytes, 0)
		t.mu.account.found(bytes)
		return nil
	}
	e := x.at(h)
	e.flags &^= flagBad
	if e.flags&flagBusy != 0 {
		x.unclaim(h) // an eviction was about to remove it
	}
	x.touch(h)
	return nil
}
