package fstier

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/vfs"
	"github.com/terrace-kv/terrace/tier"
)

// A root can go under a running node: its file system is unmounted, somebody
// moves or removes it, or empties it and so takes our lock away. The
// descriptors that are open do not notice, and what is written through them is
// lost. So the keeper looks once a second whether the path still leads to the
// directory that is open. If not, no call is admitted any more; when those
// under way are over, the old root is given back, and the keeper waits until
// there is one again.
//
// It makes none. What has the path while a disk is away is a directory of
// another disk, so a root is taken only if a file system is mounted where the
// old one's was.

const modeLost = "root is gone"

// openedRoot is the directory that is open. Open and the keeper write it;
// Close reads it when the keeper has ended.
type openedRoot struct {
	open     bool
	watched  bool // it has a path: it was not given as an FS
	dev, ino uint64
	lockIno  uint64
	mount    string // what it is on, with all symbolic links followed
}

// identify finds out which directory fs is, and that Root leads to it.
func (t *Tier) identify(fs vfs.FS) error {
	real, err := filepath.Abs(t.o.Root)
	if err == nil {
		real, err = filepath.EvalSymlinks(real)
	}
	if err != nil {
		return err
	}
	mount, err := vfs.MountPoint(real)
	if err != nil {
		return err
	}
	open, err := fs.Lstat(".")
	if err != nil {
		return err
	}
	// After the mount point was found: so it is this directory's.
	at, err := vfs.Look(t.o.Root)
	if err == nil && (at.Dev != open.Dev || at.Ino != open.Ino) {
		err = errors.New("another directory took its place just now")
	}
	if err != nil {
		return err
	}
	if was := t.root.mount; was != "" && was != "/" && mount != was && !strings.HasPrefix(mount, was+"/") {
		return fmt.Errorf("nothing is mounted on %s, where it was before: mount it again, or restart the node to use what is there now", was)
	}
	t.root.dev, t.root.ino, t.root.mount = open.Dev, open.Ino, mount
	return nil
}

// takeRoot makes a directory this node's own and learns what can be known
// without a scan. On an error the directory is given back. empty says that
// there is nothing to scan.
func (t *Tier) takeRoot(fs vfs.FS) (empty bool, err error) {
	t.names = &names{FS: fs, changed: map[string]struct{}{}}
	t.fs = t.names
	_, _ = rand.Read(t.writer[:]) // never fails
	t.directFlag, t.tmpfile, t.linkNamed, t.lockFile, t.usage.file = 0, false, false, nil, nil
	t.mu.Lock()
	t.mu.index = newIndex()
	if t.o.Shared {
		t.mu.misses = newMisses(t.o.Now())
	}
	t.mu.account, t.mu.free = account{}, freeSpace{}
	t.mu.namespaces, t.mu.byID = map[block.Fingerprint]*namespace{}, nil
	t.mu.scanBlocks, t.mu.scanError = 0, ""
	t.mu.strays = nil
	t.mu.foreign.files, t.mu.foreign.bytes = 0, 0
	t.mu.Unlock()
	t.quarantine.mu.Lock()
	t.quarantine.files, t.quarantine.bytes = nil, 0
	t.quarantine.mu.Unlock()
	t.root.open = true
	defer func() {
		if err != nil {
			t.dropRoot()
		}
	}()
	if t.root.watched {
		if err := t.identify(fs); err != nil {
			return false, fmt.Errorf("fs tier %s: root %s: %w", t.o.Name, t.o.Root, err)
		}
	}
	t.place = alone()
	if t.o.Shared {
		if t.place, err = t.join(); err != nil {
			return false, err
		}
	}
	t.tmpName = t.place.tmp + "/" + hex.EncodeToString(t.writer[:]) + "-"
	if err := t.takeLock(); err != nil {
		return false, err
	}
	for _, dir := range []string{t.place.tmp, nameQuarantine} {
		if err := t.makeDir(dir); err != nil {
			return false, t.openErr("make directory "+dir, err)
		}
	}
	t.probe()
	if empty, err = t.loadNamespaces(); err != nil {
		return false, t.openErr("list", err)
	}
	if err := t.loadQuarantine(); err != nil {
		return false, t.openErr("list quarantine of", err)
	}
	if err := t.openUsage(); err != nil {
		return false, t.openErr("open usage file of", err)
	}
	return empty, nil
}

// dropRoot gives a root back and leaves all in it as it is.
func (t *Tier) dropRoot() {
	for _, f := range []vfs.File{t.usage.file, t.lockFile} {
		if f != nil {
			_ = f.Close()
		}
	}
	_ = t.fs.Close()
	t.root.open = false
}

// begin ends the taking of a root. It says whether a scan is needed yet.
func (t *Tier) begin(ctx context.Context, empty bool) (scan bool) {
	if empty {
		// Nothing to wait for, so the first write must not be refused.
		t.scan(ctx)
	}
	t.mu.Lock()
	done, mode, spaces := t.mu.account.scanned, t.mu.mode, len(t.mu.byID)
	t.mu.Unlock()
	t.warnFloor()
	t.log.Info("opened", "root", t.o.Root, "mode", mode, "capacity_bytes", t.o.Capacity, "free_floor_bytes", max(t.o.MinFree, 0), "namespaces", spaces)
	return !done
}

// keep is the keeper: it has the root scanned, watches it, and takes it anew
// when it was lost. It ends with ctx.
func (t *Tier) keep(ctx context.Context, scan bool) {
	defer t.scanOnce.Do(func() { close(t.firstScan) })
	for {
		this, lost := context.WithCancel(ctx)
		var scanning sync.WaitGroup
		scanning.Go(func() {
			if scan {
				t.scanLoop(this)
			}
			if this.Err() == nil {
				t.scanOnce.Do(func() { close(t.firstScan) })
			}
		})
		t.watch(this)
		lost()
		scanning.Wait()
		if ctx.Err() != nil {
			return
		}
		select {
		case <-t.quiet():
		case <-ctx.Done():
			return
		}
		t.dropRoot()
		if scan = t.retake(ctx); ctx.Err() != nil {
			return
		}
	}
}

// watch returns when the root is lost, or with ctx.
func (t *Tier) watch(ctx context.Context) {
	if !t.root.watched {
		<-ctx.Done()
		return
	}
	tick := time.NewTicker(t.o.watch)
	defer tick.Stop()
	for t.lostRoot() == nil {
		select {
		case <-ctx.Done():
			return
		case <-t.wake:
		case <-tick.C:
			if err := t.look(); err != nil {
				t.lose(err)
			}
		}
	}
	t.log.Error("the root is gone: lookups miss and stores fail until it is there again", "error", t.lostRoot())
}

// look says why the root is not what the path leads to any more. What cannot
// be told is no reason: calls fail by themselves then.
func (t *Tier) look() error {
	at, err := vfs.Look(t.o.Root)
	switch {
	case gone(err) || errIs(err, unix.ELOOP, unix.ENOTCONN, unix.ESTALE):
		return fmt.Errorf("root %s is gone: %w", t.o.Root, err)
	case err != nil:
		return nil
	case at.Dev != t.root.dev || at.Ino != t.root.ino:
		return fmt.Errorf("root %s is another directory now, or something is mounted on it", t.o.Root)
	}
	lock, err := t.fs.Lstat(t.place.lock)
	if gone(err) || err == nil && lock.Ino != t.root.lockIno {
		return fmt.Errorf("the lock file in root %s was removed, so the node does not own it any more", t.o.Root)
	}
	return nil
}

// retake waits for a root, takes it and admits calls. It says whether a scan is
// needed.
func (t *Tier) retake(ctx context.Context) (scan bool) {
	tick := time.NewTicker(t.o.watch)
	defer tick.Stop()
	last := ""
	for {
		// Not at once: whoever removes the root file by file may be at it yet,
		// and will find that we made new ones.
		select {
		case <-ctx.Done():
			return false
		case <-tick.C:
		}
		fs, err := vfs.OpenRoot(t.o.Root)
		if err == nil {
			var empty bool
			if empty, err = t.takeRoot(t.o.wrap(fs)); err == nil {
				scan = t.begin(ctx, empty)
				select {
				case <-t.wake: // it was about the old one
				default:
				}
				t.mu.Lock()
				t.mu.lost = nil
				t.mu.Unlock()
				return scan
			}
		}
		if err.Error() != last {
			last = err.Error()
			t.log.Warn("there is no root to use yet", "error", err)
			if !gone(err) {
				t.mu.Lock()
				t.mu.lost = err
				t.mu.Unlock()
			}
		}
	}
}

// lose has no more calls admitted, and the keeper see to it.
func (t *Tier) lose(why error) {
	if !t.root.watched {
		return
	}
	t.mu.Lock()
	if t.mu.lost == nil {
		t.mu.lost = why
	}
	t.mu.Unlock()
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// lostRoot is why there is no root, or nil.
func (t *Tier) lostRoot() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.lost
}

// unavailable is the error of a call that needs the root.
func (t *Tier) unavailable(op string, key block.Key, why error) *tier.Error {
	e := &tier.Error{Op: op, Tier: t.o.Name, Key: key, Class: tier.ClassPermanent, Cause: tier.CauseUnavailable, Err: why, Down: true,
		Hint: "make or mount it again: it is used as soon as it is there"}
	if !t.root.watched {
		e.Hint = "make it again and restart the node"
	}
	return e
}
