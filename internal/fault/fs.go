package fault

import (
	"context"

	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/internal/vfs"
)

// FS wraps a file system. An op's key is the path, the new one of a link or
// rename; a file opened with O_TMPFILE goes by its directory's. name, if not
// nil, makes a key of a path, for names that differ from run to run.
func FS(under vfs.FS, set *Set, name func(path string) string) vfs.FS {
	return &vfs.Faulty{FS: under, Hook: func(c vfs.Call) vfs.Fault {
		op := Op{Seam: SeamFile, Kind: string(c.Op), Key: c.Name, Off: c.Off, Write: changes(c)}
		if name != nil {
			op.Key = name(c.Name)
		}
		f := set.Check(op)
		_ = f.wait(context.Background())
		out := vfs.Fault{Err: f.Err, After: f.Late, Short: f.Short, Flip: f.Flip}
		if f.Torn && c.Op == vfs.OpWrite {
			out.Torn, out.Short, out.After = true, f.Keep, true
		}
		return out
	}}
}

func changes(c vfs.Call) bool {
	switch c.Op {
	case vfs.OpOpen:
		return c.Flags&(unix.O_CREAT|unix.O_TRUNC) != 0 || c.Flags&unix.O_TMPFILE == unix.O_TMPFILE
	case vfs.OpLstat, vfs.OpReadDir, vfs.OpSpace, vfs.OpRead, vfs.OpStat:
		return false
	}
	return true
}
