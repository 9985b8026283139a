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

// checkItem refuses a buffer that is not a block of the namespace, or that has
// no room for its padding.
func (t *Tier) checkItem(op string, ns *block.Namespace, it *tier.Item) error {
	want := ns.BlockBytes(it.Key.Group())
	switch {
	case want == 0 || len(it.Buf) != want:
		return t.fail(op, it.Key, fmt.Errorf("buffer has %d bytes, a block of group %d has %d", len(it.Buf), it.Key.Group(), want))
	case int64(cap(it.Buf)) < padded(want):
		return t.fail(op, it.Key, fmt.Errorf("buffer has no room for padding: capacity %d, want %d", cap(it.Buf), padded(want)))
	}
	return nil
}

// Read is in tier.Tier. It works through the items in order, one file each.
func (t *Tier) Read(ctx context.Context, ns *block.Namespace, items []tier.Item) {
	if err := t.enter("read"); err != nil {
		if t.lostRoot() != nil {
			err = tier.ErrNotFound
		}
		failAll(items, err)
		return
	}
	defer t.leave()
	hdr := t.headers.get()
	defer t.headers.put(hdr)
	for i := range items {
		items[i].Err = t.read(ctx, ns, &items[i], hdr)
	}
}

func failAll(items []tier.Item, err error) {
	for i := range items {
		items[i].Err = err
	}
}

func (t *Tier) read(ctx context.Context, ns *block.Namespace, it *tier.Item, hdr []byte) error {
	const op = "read"
	if err := t.checkItem(op, ns, it); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return t.cancelled(op, it.Key, err)
	}
	t.mu.Lock()
	n, h := t.findLocked(ns.Fingerprint(), &it.Key)
	p := t.presenceLocked(n, h, &it.Key)
	if p == tier.Present {
		t.mu.index.touch(h)
	}
	t.mu.Unlock()
	if p == tier.Absent {
		return tier.ErrNotFound
	}

	length := len(it.Buf)
	short, err := t.readFile(n, it, hdr)
	if err != nil {
		return t.readFailed(n, it, err)
	}
	var head blockhead.Header
	cause := tier.CauseHeader
	if short {
		cause, err = tier.CauseShort, fmt.Errorf("file has less than the %d bytes of a block of %d", fileSize(length), length)
	} else if err = head.Decode(hdr); err == nil {
		err = head.Check(ns.Fingerprint(), it.Key, length)
	}
	if err != nil {
		return t.broken(op, n, it.Key, length, cause, err)
	}
	clear(it.Buf[length:padded(length)])
	it.Sum = head.Sum
	if p == tier.Unknown {
		_, _ = t.adopt(n, it.Key, length) // the scan will, if this cannot
	}
	return nil
}

// readFile reads header and block in one call. short means that the file is
// proven to be too short.
func (t *Tier) readFile(n *namespace, it *tier.Item, hdr []byte) (short bool, err error) {
	mu := t.stripeOf(n, &it.Key)
	mu.readers.Add(1) // before the open: see takeOver
	defer mu.readers.Add(-1)
	// O_NONBLOCK so that a pipe in a block's place cannot hold us.
	f, err := t.fs.Open(n.file(it.Key), unix.O_RDONLY|unix.O_NONBLOCK|t.directFlag, 0)
	if err != nil {
		return false, err
	}
	defer func() { _ = f.Close() }() // nothing was written, so nothing can be lost
	size := fileSize(len(it.Buf))
	got, err := vfs.ReadFull(f, [][]byte{hdr, it.Buf[:padded(len(it.Buf))]}, 0)
	if err != nil || int64(got) == size {
		return false, err
	}
	// Only the size proves that the file is short; a read may be for other reasons.
	st, err := f.Stat()
	if err == nil && (!st.Regular() || st.Size >= size) {
		err = fmt.Errorf("got %d bytes of %d: %w", got, st.Size, unix.EIO)
	}
	return err == nil, err
}

// readFailed turns an error of opening or reading a block's file into the
// item's outcome.
func (t *Tier) readFailed(n *namespace, it *tier.Item, err error) error {
	if !gone(err) && !errIs(err, unix.ELOOP, unix.ENXIO, unix.ESPIPE, unix.ENODEV, unix.EINVAL) {
		return t.fail("read", it.Key, err)
	}
	// Perhaps somebody removed the file or put something in its place.
	mu := t.stripeOf(n, &it.Key)
	mu.Lock()
	defer mu.Unlock()
	st, serr := t.fs.Lstat(n.file(it.Key))
	switch {
	case gone(serr):
		t.missed(n, &it.Key)
		t.mu.Lock()
		defer t.mu.Unlock()
		if h := t.mu.index.find(n.id, &it.Key); h != 0 {
			t.dropLocked(n, h)
		}
		return tier.ErrNotFound
	case serr != nil:
		return t.fail("read", it.Key, serr)
	case st.Regular() && gone(err):
		return tier.ErrNotFound // it was, for a moment
	case st.Regular():
		return t.fail("read", it.Key, err)
	}
	_ = t.setAsideLocked(n, it.Key, "not a regular file", st.Ino)
	return &tier.Error{Op: "read", Tier: t.o.Name, Key: it.Key, Class: tier.ClassCorrupt, Cause: tier.CauseForeign,
		Err: fmt.Errorf("%s is not a regular file", t.path(n.file(it.Key)))}
}

// broken sets a copy aside that was found to be wrong, and returns the item's
// outcome.
func (t *Tier) broken(op string, n *namespace, key block.Key, length int, cause tier.Cause, why error) error {
	mu := t.stripeOf(n, &key)
	mu.Lock()
	defer mu.Unlock()
	// Between the read and now the copy may have been replaced by a good one.
	at, err := t.validLocked(n, key, length)
	if err == nil && at.ok {
		e := t.fail(op, key, fmt.Errorf("the copy was replaced under the read: %w", why))
		e.Class = tier.ClassRetryable
		return e
	}
	e := &tier.Error{Op: op, Tier: t.o.Name, Key: key, Class: tier.ClassCorrupt, Cause: cause, Err: why}
	if errors.Is(why, blockhead.ErrVersion) {
		// Not ours to judge: another version may want it. It is left in place
		// and not offered again in this run.
		e.Class, e.Cause = tier.ClassPermanent, tier.CauseForeign
		e.Hint = "it is left for the version that wrote it"
		t.mu.Lock()
		defer t.mu.Unlock()
		if h := t.mu.index.find(n.id, &key); h != 0 {
			t.mu.index.at(h).flags |= flagBad
		}
		return e
	}
	if err != nil {
		at.ino = anyCopy // it cannot be told; what was read was broken
	}
	if err := t.setAsideLocked(n, key, why.Error(), at.ino); err != nil {
		e.Err = fmt.Errorf("%w (and it cannot be set aside: %w)", why, err)
	}
	return e
}

// copyAt is what is in a block's place.
type copyAt struct {
	ok    bool // it has the size and header of the block
	bytes int64
	owner uint16
	ino   uint64 // 0: nothing is there
}

// validLocked looks at a block's file. It is called under the key's stripe. An
// error means that it cannot be told. In a shared root the file may be another
// one, or gone, a moment later.
func (t *Tier) validLocked(n *namespace, key block.Key, length int) (at copyAt, err error) {
	st, err := t.fs.Lstat(n.file(key))
	if gone(err) {
		return copyAt{}, nil
	}
	if err != nil {
		return copyAt{}, err
	}
	owner, sized := t.sized(st.Size, length)
	at = copyAt{bytes: st.Bytes, owner: owner, ino: st.Ino}
	if !st.Regular() || !sized {
		return at, nil
	}
	f, err := t.fs.Open(n.file(key), unix.O_RDONLY|unix.O_NONBLOCK|t.directFlag, 0)
	if gone(err) {
		return copyAt{}, nil
	}
	if err != nil {
		return copyAt{}, err
	}
	defer func() { _ = f.Close() }()
	hdr := t.headers.get()
	defer t.headers.put(hdr)
	got, err := vfs.ReadFull(f, [][]byte{hdr}, 0)
	if err != nil {
		return copyAt{}, err
	}
	var head blockhead.Header
	at.ok = got == headerSize && head.Decode(hdr) == nil && head.Check(n.fp, key, length) == nil
	return at, nil
}
