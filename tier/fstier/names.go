package fstier

import (
	"context"
	"errors"
	"maps"
	"path"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/internal/vfs"
)

// names is the tier's file system. It notes the directories in which a name
// was removed: until they are synced, a power cut can bring it back.
type names struct {
	vfs.FS

	mu      sync.Mutex
	changed map[string]struct{} // at most all directories of ours
}

func (f *names) note(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.changed[path.Dir(name)] = struct{}{}
}

func (f *names) Remove(name string) error {
	f.note(name)
	return f.FS.Remove(name)
}

func (f *names) Rename(from, to string) error {
	f.note(from)
	return f.FS.Rename(from, to)
}

// sync makes the removals so far last. It may be called when none is under
// way.
func (f *names) sync(ctx context.Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, dir := range slices.Sorted(maps.Keys(f.changed)) {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := syncDir(f, dir); err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
	clear(f.changed)
	return nil
}

// syncDir makes the names in a directory survive a power cut.
func syncDir(f vfs.FS, dir string) error {
	d, err := f.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
