package fstier

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/terrace-kv/terrace/block"
)

// scanned is a block that the scan has indexed, for sorting.
type scanned struct {
	mtime  int64
	handle uint32
}

const scannedChunk = 4096

// scannedList is what the scan has indexed; sorted, the youngest is first. It
// is in chunks because a slice that grows is copied in one go, which nothing can
// interrupt: at 10^7 blocks that is 20 ms in which the collector cannot begin.
type scannedList struct {
	chunks []*[scannedChunk]scanned
	n      int
}

func (l *scannedList) at(i int) *scanned { return &l.chunks[i/scannedChunk][i%scannedChunk] }

func (l *scannedList) add(s scanned) {
	if l.n == len(l.chunks)*scannedChunk {
		l.chunks = append(l.chunks, new([scannedChunk]scanned))
	}
	*l.at(l.n) = s
	l.n++
}

// Len, Less and Swap are in sort.Interface.
func (l *scannedList) Len() int           { return l.n }
func (l *scannedList) Less(i, j int) bool { return l.at(i).mtime > l.at(j).mtime }
func (l *scannedList) Swap(i, j int)      { a, b := l.at(i), l.at(j); *a, *b = *b, *a }

// scanYield is after how many blocks the scan lets others run, so that it is not
// made to where it happens to be: with the lock.
const scanYield = 256

// scanDepthMax bounds how deep the scan follows directories that are not ours.
const scanDepthMax = 64

// scanLoop scans until it has worked, for a disk may fail for a while.
func (t *Tier) scanLoop(ctx context.Context) {
	for {
		t.scan(ctx)
		if t.Stats().ScanDone || ctx.Err() != nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(t.o.scanRetry):
		}
	}
}

// scan reads the whole tree once. What it finds is indexed as it goes; when it
// is through, index and accounts are exact. It can be repeated.
func (t *Tier) scan(ctx context.Context) {
	start := t.o.Now()
	t.mu.Lock()
	t.mu.account.found(-t.mu.foreign.bytes)
	t.mu.foreign.files, t.mu.foreign.bytes = 0, 0
	spaces := slices.Clone(t.mu.byID)
	t.mu.Unlock()

	s := scan{t: t, ctx: ctx}
	err := s.root()
	for _, n := range spaces {
		if err == nil {
			err = s.namespace(n)
		}
	}
	if err == nil {
		err = t.sortOld(ctx, &s.found)
	}
	t.mu.Lock()
	files, bytes := t.mu.foreign.files, t.mu.foreign.bytes
	if err != nil {
		if ctx.Err() == nil {
			t.mu.scanError = err.Error()
		}
		t.mu.Unlock()
		if ctx.Err() == nil {
			t.log.Error("the scan of root failed and will be repeated", "root", t.o.Root, "error", err, "retry_after", t.o.scanRetry)
		}
		return
	}
	t.mu.account.scanned = true
	t.mu.scanError = ""
	blocks, used := t.mu.index.table.Len(), t.mu.account.used()
	t.mu.Unlock()
	err = errors.Join(t.trim(ctx), t.tightenUsage())
	if err != nil {
		t.log.Warn("after the scan", "root", t.o.Root, "error", err)
	}
	t.log.Info("scan done", "root", t.o.Root, "blocks", blocks, "used_bytes", used,
		"foreign_files", files, "foreign_bytes", bytes, "temporary_files_removed", s.removed, "took", t.o.Now().Sub(start))
}

// scan is one pass of the scan's goroutine.
type scan struct {
	t       *Tier
	ctx     context.Context
	found   scannedList
	removed int // temporary files of dead owners
}

// root sees to everything but the namespaces' blocks.
func (s *scan) root() error {
	if s.t.o.Shared {
		return s.tmp() // what else is no block is not charged to us
	}
	return s.t.fs.ReadDir(".", func(name string) error {
		switch name {
		case nameLock, nameUsage:
			return s.ctx.Err() // counted when they were opened
		case nameTmp:
			return s.tmp()
		case nameQuarantine:
			return s.t.fs.ReadDir(name, func(base string) error {
				if s.t.inQuarantine(base) {
					return s.ctx.Err()
				}
				return s.foreign(name+"/"+base, 0)
			})
		}
		if fp, ok := parseFingerprint(name); ok {
			s.t.mu.Lock()
			n := s.t.mu.namespaces[fp]
			s.t.mu.Unlock()
			if n != nil {
				return s.ctx.Err()
			}
		}
		return s.foreign(name, 0)
	})
}

// tmp removes what earlier runs left. The directory is this node's alone, so
// who wrote it is dead.
func (s *scan) tmp() error {
	return s.t.fs.ReadDir(s.t.place.tmp, func(base string) error {
		name := s.t.place.tmp + "/" + base
		if strings.HasPrefix(name, s.t.tmpName) {
			return s.ctx.Err() // this run's, and its write accounts for it
		}
		st, err := s.t.fs.Lstat(name)
		if err == nil && !st.Dir() {
			// Its bytes stay in the bound until the scan is done: a probe's were
			// never counted there.
			if err = s.t.fs.Remove(name); err == nil {
				s.removed++
				return s.ctx.Err()
			}
		}
		return s.foreign(name, 0)
	})
}

// namespace indexes the blocks of one namespace.
func (s *scan) namespace(n *namespace) error {
	err := s.t.fs.ReadDir(n.dir, func(name string) error {
		if name == nameNamespace || name == nameName {
			return s.ctx.Err() // counted when it was read or written
		}
		path := n.dir + "/" + name
		if !isShard(name) {
			return s.foreign(path, 0)
		}
		st, err := s.t.fs.Lstat(path)
		if err != nil && !gone(err) {
			return fmt.Errorf("look at %s: %w", s.t.path(path), err) // or its blocks would be foreign
		}
		if err != nil || !st.Dir() {
			return s.foreign(path, 0)
		}
		return s.t.fs.ReadDir(path, func(base string) error { return s.block(n, name, base) })
	})
	if gone(err) {
		return nil // somebody removed the directory
	}
	return err
}

func isShard(name string) bool {
	const hex = "0123456789abcdef"
	return len(name) == 2 && strings.IndexByte(hex, name[0]) >= 0 && strings.IndexByte(hex, name[1]) >= 0
}

// block looks at one file of a shard.
func (s *scan) block(n *namespace, shard, base string) error {
	if err := s.ctx.Err(); err != nil {
		return err
	}
	t := s.t
	path := n.dir + "/" + shard + "/" + base
	key, err := block.ParseKey(base)
	if err != nil || base[:2] != shard {
		return s.foreign(path, 0)
	}
	t.lockAfterLookups()
	length := 0
	if n.spec != nil && n.spec.Fingerprint() == n.fp {
		if length = n.spec.BlockBytes(key.Group()); length == 0 {
			t.mu.Unlock()
			return s.foreign(path, 0)
		}
	}
	t.mu.Unlock()
	mu := t.stripeOf(n, &key)
	mu.Lock()
	_, f, err := t.adoptLocked(n, key, length)
	mu.Unlock()
	if err != nil {
		return fmt.Errorf("look at %s: %w", t.path(path), err)
	}
	if f.foreign {
		return s.foreign(path, 0)
	}
	if f.handle != 0 {
		s.found.add(scanned{f.mtime, f.handle})
		if s.found.n%scanYield == 0 {
			runtime.Gosched()
		}
		t.lockAfterLookups()
		t.mu.scanBlocks++
		t.mu.Unlock()
	}
	return nil
}

// foreign counts what is not ours: regular files, also in directories. What
// cannot be looked at, such as a lost+found of root's, is left out.
func (s *scan) foreign(path string, depth int) error {
	if err := s.ctx.Err(); err != nil {
		return err
	}
	if s.t.o.Shared && !strings.HasPrefix(path, s.t.place.tmp+"/") {
		return nil // others put files there as well
	}
	st, err := s.t.fs.Lstat(path)
	if err != nil {
		return nil
	}
	if st.Dir() && depth < scanDepthMax {
		err := s.t.fs.ReadDir(path, func(base string) error { return s.foreign(path+"/"+base, depth+1) })
		if s.ctx.Err() != nil {
			return err
		}
		return nil
	}
	if st.Regular() {
		s.t.mu.Lock()
		s.t.mu.foreign.files++
		s.t.mu.foreign.bytes += st.Bytes
		s.t.mu.account.found(st.Bytes)
		s.t.mu.Unlock()
	}
	return nil
}

// sortOld brings what the scan has found, and nobody has used since, into the
// order of modification times. The lock is taken for a few entries at a time.
func (t *Tier) sortOld(ctx context.Context, all *scannedList) error {
	sort.Sort(all)
	const batch = 256
	for lo := 0; lo < all.n; lo += batch {
		if err := ctx.Err(); err != nil {
			return err
		}
		t.lockAfterLookups()
		x := &t.mu.index
		for i := lo; i < min(lo+batch, all.n); i++ {
			// The handle may be another block's by now. If that one is old too,
			// it is moved by its own time later, or has its place by this one.
			h := all.at(i).handle
			if e := x.at(h); e.flags&flagOld != 0 && e.units != 0 {
				x.unlink(h)
				x.linkBack(h)
			}
		}
		t.mu.Unlock()
	}
	return nil
}
