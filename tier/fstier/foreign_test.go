package fstier

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/vfs"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/tiertest"
)

// harmless says whether an outcome leaves the lane's health alone.
func harmless(err error) bool {
	switch tier.ClassOf(err) {
	case tier.ClassNone, tier.ClassNotFound, tier.ClassCorrupt:
		return true
	}
	c := tier.CauseOf(err)
	return c == tier.CauseForeign || c == tier.CauseNamespace
}

// foreigners put something that is no regular file at a path.
var foreigners = map[string]func(path string) error{
	"directory": func(p string) error { return os.Mkdir(p, 0o700) },
	"full directory": func(p string) error {
		return errors.Join(os.MkdirAll(p+"/x", 0o700), os.WriteFile(p+"/x/y", make([]byte, 9000), 0o600))
	},
	"pipe": func(p string) error { return unix.Mkfifo(p, 0o600) },
	"link": func(p string) error { return os.Symlink("/etc/passwd", p) },
	"socket": func(p string) error {
		// Paths of sockets are short: bind beside it, then move.
		dir, err := os.MkdirTemp("", "s")
		if err != nil {
			return err
		}
		l, err := net.Listen("unix", dir+"/s")
		if err != nil {
			return err
		}
		defer func() { _ = l.Close(); _ = os.RemoveAll(dir) }()
		return os.Rename(dir+"/s", p)
	},
}

// Whatever is in a block's place, whatever is asked for, before and after the
// scan, in every mode: only this key fails, and a write puts the block there.
func TestForeignInABlocksPlaceFailsThatBlockOnly(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	for what, put := range foreigners {
		for mode, hook := range modes {
			for _, op := range []string{"read", "write", "contains", "delete", "set aside", "capacity", "restart"} {
				t.Run(fmt.Sprint(what, "/", mode, "/", op), func(t *testing.T) {
					o := quiet(opts(t, t.TempDir(), hook))
					if op == "capacity" {
						o.Capacity = 256 << 10
					}
					tr := open(t, o)
					defer func() { closeTier(t, tr) }()
					<-tr.ScanDone()
					items := blocks(t, ns, 0, 3, 0)
					write(t, tr, ns, items)
					path := tr.blockPath(ns, items[0].Key)
					if err := os.Remove(path); err != nil {
						t.Fatal(err)
					}
					if err := put(path); err != nil {
						t.Skipf("such a thing cannot be made here: %v", err)
					}
					check := func(err error) {
						t.Helper()
						if !harmless(err) {
							t.Errorf("%v is %v, %v", err, tier.ClassOf(err), tier.CauseOf(err))
						}
					}
					one := []block.Key{items[0].Key}
					switch op {
					case "read":
						r := blocks(t, ns, 0, 1, 0)
						tr.Read(t.Context(), ns, r)
						check(r[0].Err)
					case "contains":
						check(tr.Contains(t.Context(), ns, one, make([]bool, 1)))
					case "delete":
						check(tr.Delete(t.Context(), ns, one))
					case "set aside":
						check(tr.SetAside(t.Context(), ns, items[0].Key, "test"))
					case "capacity": // it is evicted, or taken over
						for i := range 40 {
							w := blocks(t, ns, 100+i, 1, 0)
							tr.Write(t.Context(), ns, w)
							check(w[0].Err)
						}
					case "restart":
						closeTier(t, tr)
						tr = open(t, quiet(opts(t, tr.o.Root, hook)))
						<-tr.ScanDone()
					}
					write(t, tr, ns, items[:1])
					readable(t, tr, ns, items[:1])
				})
			}
		}
	}
}

// What cannot be moved away fails its key, cleanly, each time.
func TestForeignThatCannotBeMovedFailsCleanly(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	for what, put := range foreigners {
		t.Run(what, func(t *testing.T) {
			tr := openClosing(t, quiet(opts(t, t.TempDir(), func(c vfs.Call) vfs.Fault {
				if c.Op == vfs.OpRemove || c.Op == vfs.OpRename && filepath.Dir(c.Name) == nameQuarantine {
					return vfs.Fault{Err: unix.EBUSY}
				}
				return vfs.Fault{}
			})))
			items := blocks(t, ns, 0, 2, 0)
			write(t, tr, ns, items)
			path := tr.blockPath(ns, items[0].Key)
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			if err := put(path); err != nil {
				t.Skipf("such a thing cannot be made here: %v", err)
			}
			for range 3 {
				for _, call := range []func([]tier.Item){
					func(i []tier.Item) { tr.Read(t.Context(), ns, i) },
					func(i []tier.Item) { tr.Write(t.Context(), ns, i) },
				} {
					i := blocks(t, ns, 0, 1, 0)
					call(i)
					if !harmless(i[0].Err) || i[0].Err == nil {
						t.Errorf("%v is %v", i[0].Err, tier.CauseOf(i[0].Err))
					}
				}
			}
			readable(t, tr, ns, items[1:])
		})
	}
}

// One namespace whose description or directory is damaged: its writes fail
// with a cause that leaves the tier's health alone, and others go on.
func TestDamagedNamespaceFailsAlone(t *testing.T) {
	a, b := tiertest.Namespace(t, "a"), tiertest.Namespace(t, "b")
	junk := func(p string) error { return os.WriteFile(p, []byte("{"), 0o600) }
	for name, damage := range map[string]func(dir string) error{
		"junk":      func(d string) error { return junk(d + "/" + nameNamespace) },
		"another's": func(d string) error { return os.WriteFile(d+"/"+nameNamespace, b.JSON(), 0o600) },
		"a directory": func(d string) error {
			return errors.Join(os.Remove(d+"/"+nameNamespace), os.Mkdir(d+"/"+nameNamespace, 0o700))
		},
		"a pipe": func(d string) error {
			return errors.Join(os.Remove(d+"/"+nameNamespace), unix.Mkfifo(d+"/"+nameNamespace, 0o600))
		},
		"no directory": func(d string) error { return errors.Join(os.RemoveAll(d), junk(d)) },
		"junk for a shard": func(d string) error {
			shard := fmt.Sprintf("%s/%02x", d, tiertest.Key(7, 0)[0])
			return errors.Join(os.RemoveAll(shard), junk(shard))
		},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			tr := open(t, quiet(opts(t, root, nil)))
			write(t, tr, a, blocks(t, a, 7, 1, 0))
			closeTier(t, tr)
			if err := damage(filepath.Join(root, a.Fingerprint().String())); err != nil {
				t.Fatal(err)
			}
			tr = openClosing(t, quiet(opts(t, root, nil)))
			w := blocks(t, a, 7, 1, 0)
			tr.Write(t.Context(), a, w)
			if w[0].Err == nil || !harmless(w[0].Err) {
				t.Errorf("%v is %v, %v", w[0].Err, tier.ClassOf(w[0].Err), tier.CauseOf(w[0].Err))
			}
			items := blocks(t, b, 0, 2, 0)
			write(t, tr, b, items)
			readable(t, tr, b, items)
			wantExact(t, tr)
		})
	}
}
