package vfs

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

var memSeed = flag.Uint64("seed", 1, "of the random calls")

func errno(err error) error {
	var e unix.Errno
	if errors.As(err, &e) {
		var pe *fs.PathError
		if !errors.As(err, &pe) {
			return fmt.Errorf("%w, and no path", e)
		}
		return e
	}
	return err
}

// Random calls have the same outcome in memory as in a directory.
func TestMemIsLikeTheKernel(t *testing.T) {
	real, _ := openRoot(t)
	mem := NewMem(0)
	both := [2]FS{real, mem}
	seed := *memSeed
	r := rand.New(rand.NewPCG(seed, 0))
	pick := func(names ...string) string { return names[r.IntN(len(names))] }
	name := func() string {
		return pick("a", "b", "c", "d", "d/a", "d/b", "e", "e/a", "e/a/b", "none/a", strings.Repeat("x", 256))
	}
	var files [][2]File
	flags := []int{unix.O_RDONLY, unix.O_RDWR, unix.O_WRONLY, unix.O_RDWR | unix.O_CREAT, unix.O_RDWR | unix.O_CREAT | unix.O_EXCL,
		unix.O_RDWR | unix.O_CREAT | unix.O_TRUNC, unix.O_RDWR | unix.O_TMPFILE, unix.O_RDONLY | unix.O_DIRECTORY, unix.O_RDONLY | unix.O_CREAT}
	counts := map[string]int{}
	for step := range 8000 {
		var what string
		var out [2]string
		call := func(format string, args ...any) { what = fmt.Sprintf(format, args...) }
		switch op := r.IntN(12); {
		case op < 3:
			n, fl := name(), flags[r.IntN(len(flags))]
			call("open %s %#x", n, fl)
			var f [2]File
			for i, x := range both {
				var err error
				f[i], err = x.Open(n, fl, 0o600)
				out[i] = fmt.Sprint(errno(err))
			}
			if f[0] != nil && f[1] != nil {
				files = append(files, f)
			}
		case op == 3:
			n, to := name(), name()
			call("rename %s %s", n, to)
			if st, err := real.Lstat(n); err == nil && st.Dir() || len(n)+len(to) > nameMax || strings.HasPrefix(n, to+"/") {
				continue // more than it has to do: directories, and which error comes first
			}
			for i, x := range both {
				out[i] = fmt.Sprint(errno(x.Rename(n, to)))
			}
		case op == 4:
			n := name()
			call("remove %s", n)
			for i, x := range both {
				out[i] = fmt.Sprint(errno(x.Remove(n)))
			}
		case op == 5:
			n := pick("d", "e", "e/a", "none/d", "a/d")
			call("mkdir %s", n)
			for i, x := range both {
				out[i] = fmt.Sprint(errno(x.Mkdir(n, 0o700)))
			}
		case op == 6:
			n := name()
			call("lstat %s", n)
			for i, x := range both {
				st, err := x.Lstat(n)
				if st.Dir() {
					st.Size, st.Links = 0, 0
				}
				out[i] = fmt.Sprint(st.Mode, st.Size, st.Links, errno(err))
			}
		case op == 7:
			n := pick(".", "d", "e", "e/a", "a")
			call("readdir %s", n)
			for i, x := range both {
				var names []string
				err := x.ReadDir(n, func(b string) error { names = append(names, b); return nil })
				slices.Sort(names)
				out[i] = fmt.Sprint(names, errno(err))
			}
		case len(files) == 0:
			continue
		default:
			k := r.IntN(len(files))
			f := files[k]
			off := int64(r.IntN(10000))
			b := bytes.Repeat([]byte{byte(step)}, r.IntN(9000))
			switch r.IntN(7) {
			case 0:
				call("close")
				files = slices.Delete(files, k, k+1)
				for i := range f {
					out[i] = fmt.Sprint(errno(f[i].Close()))
				}
			case 1:
				call("write %d at %d", len(b), off)
				for i := range f {
					n, err := f[i].WriteVec([][]byte{b[:len(b)/3], b[len(b)/3:]}, off)
					out[i] = fmt.Sprint(n, errno(err))
				}
			case 2:
				call("read %d at %d", len(b), off)
				for i := range f {
					n, err := f[i].ReadVec([][]byte{b[:len(b)/3], b[len(b)/3:]}, off)
					out[i] = fmt.Sprint(n, errno(err), string(b[:n]))
				}
			case 3:
				call("stat")
				for i := range f {
					st, err := f[i].Stat()
					if st.Dir() {
						st.Size, st.Links = 0, 0
					}
					out[i] = fmt.Sprint(st.Mode, st.Size, st.Links, errno(err))
				}
			case 4:
				size := int64(r.IntN(20000))
				call("truncate to %d", size)
				for i := range f {
					out[i] = fmt.Sprint(errno(f[i].Truncate(size)))
				}
			case 5:
				call("sync")
				for i := range f {
					out[i] = fmt.Sprint(errno(f[i].Sync()))
				}
			default:
				n := name()
				call("link %s", n)
				if st, err := f[0].Stat(); err != nil || st.Dir() {
					continue // EPERM: nobody asks for it
				}
				for i, x := range both {
					out[i] = fmt.Sprint(errno(x.Link(f[i], n)))
				}
			}
		}
		if out[0] != out[1] {
			t.Fatalf("seed %d, step %d: %s: the kernel says %.200s, memory says %.200s", seed, step, what, out[0], out[1])
		}
		word, _, _ := strings.Cut(what, " ")
		if !strings.Contains(out[0], " ") && strings.Contains(out[0], "nil") {
			counts[word]++
		}
	}
	for _, word := range []string{"open", "rename", "remove", "link", "close", "sync", "truncate"} {
		if counts[word] < 5 {
			t.Errorf("%d of %s worked", counts[word], word)
		}
	}
	if n := mem.OpenFiles(); n != len(files) {
		t.Errorf("%d files are open, %d counted", len(files), n)
	}
	for _, f := range files {
		_ = f[0].Close()
		_ = f[1].Close()
	}
	var sum int64
	if err := Walk(mem, func(_ string, st Info) { sum += st.Bytes }); err != nil || sum != mem.UsedBytes() || mem.OpenFiles() != 0 {
		t.Errorf("files have %d bytes, %d are counted; %d are open, %v", sum, mem.UsedBytes(), mem.OpenFiles(), err)
	}
}

func TestMemCapacity(t *testing.T) {
	m := NewMem(4 * pageSize)
	f := create(t, m, "a", nil)
	b := make([]byte, 6*pageSize)
	if n, err := f.WriteVec([][]byte{b}, 0); n != 4*pageSize || err != nil {
		t.Errorf("a write of more than fits: %d, %v", n, err)
	}
	if n, err := f.WriteVec([][]byte{b}, 4*pageSize); n != 0 || !errors.Is(err, unix.ENOSPC) {
		t.Errorf("a write to a full medium: %d, %v", n, err)
	}
	if err := WriteAll(f, [][]byte{b[:4*pageSize]}, 0); err != nil {
		t.Errorf("writing over what is there: %v", err)
	}
	if s, err := m.Space(); err != nil || s.Free != 0 || s.Block != pageSize {
		t.Errorf("space: %+v, %v", s, err)
	}
	if err := m.Remove("a"); err != nil {
		t.Error(err)
	}
	if s, _ := m.Space(); s.Free != 0 {
		t.Errorf("%d bytes are free while the removed file is open", s.Free)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	if s, _ := m.Space(); s.Free != 4*pageSize {
		t.Errorf("%d bytes are free after its close", s.Free)
	}
	if err := f.Close(); !errors.Is(err, unix.EBADF) {
		t.Errorf("second close: %v", err)
	}
}

func TestMemDirect(t *testing.T) {
	m := NewMem(0)
	f, err := m.Open("f", unix.O_RDWR|unix.O_CREAT|unix.O_DIRECT, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	b := make([]byte, 1024)
	for _, bad := range []struct{ off, n int }{{1, 512}, {512, 100}} {
		if _, err := f.WriteVec([][]byte{b[:bad.n]}, int64(bad.off)); !errors.Is(err, unix.EINVAL) {
			t.Errorf("a direct write of %d bytes at %d: %v", bad.n, bad.off, err)
		}
	}
	if n, err := f.WriteVec([][]byte{b[:512], b[512:]}, 4096); n != 1024 || err != nil {
		t.Errorf("an aligned write: %d, %v", n, err)
	}
}

// create makes a file with a content that is open, and neither synced.
func create(t *testing.T, m FS, name string, content []byte) File {
	t.Helper()
	f, err := m.Open(name, unix.O_RDWR|unix.O_CREAT, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	if len(content) > 0 {
		if err := WriteAll(f, [][]byte{content}, 0); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

func syncDir(t *testing.T, m FS, name string) {
	t.Helper()
	d, err := m.Open(name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err == nil {
		err = errors.Join(d.Sync(), d.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
}

// tree is all that can be seen of a tree, but for times.
func tree(t *testing.T, m FS) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := Walk(m, func(path string, st Info) {
		f, err := m.Open(path, unix.O_RDONLY, 0)
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = f.Close() }()
		b := make([]byte, st.Size)
		if n, err := ReadFull(f, [][]byte{b}, 0); n != len(b) || err != nil {
			t.Errorf("%s: %d bytes, %v", path, n, err)
		}
		out[path] = string(b)
	})
	if err != nil {
		t.Error(err)
	}
	return out
}

func fill(c byte, n int) []byte { return bytes.Repeat([]byte{c}, n) }

// What is synced survives every power cut; of what is not, each fault of the
// model comes to pass, and no other.
func TestCrashClone(t *testing.T) {
	m := NewMem(0)
	if err := m.Mkdir("d", 0o700); err != nil {
		t.Fatal(err)
	}
	synced := create(t, m, "d/synced", fill('s', 5000))
	if err := synced.Sync(); err != nil {
		t.Fatal(err)
	}
	over := create(t, m, "d/over", fill('o', 3*pageSize))
	if err := over.Sync(); err != nil {
		t.Fatal(err)
	}
	for _, n := range []string{"d/removed", "d/moved"} {
		if err := create(t, m, n, fill('r', 10)).Sync(); err != nil {
			t.Fatal(err)
		}
	}
	syncDir(t, m, "d")
	syncDir(t, m, ".")
	if err := WriteAll(over, [][]byte{fill('n', 2*pageSize)}, pageSize); err != nil {
		t.Fatal(err)
	}
	create(t, m, "d/new", fill('n', 10000)) // neither name nor bytes
	create(t, m, "lost+found", nil)
	if err := create(t, m, "d/named", fill('n', 10000)).Sync(); err != nil { // no name
		t.Fatal(err)
	}
	if err := errors.Join(m.Remove("d/removed"), m.Rename("d/moved", "moved"), m.Mkdir("e", 0o700)); err != nil {
		t.Fatal(err)
	}
	create(t, m, "e/f", nil)
	tmp, err := m.Open(".", unix.O_RDWR|unix.O_TMPFILE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tmp.Close() }()
	if err := WriteAll(tmp, [][]byte{fill('t', 100)}, 0); err != nil {
		t.Fatal(err)
	}

	before := tree(t, m)
	seen := map[string]int{}
	see := func(what string, is bool) {
		if is {
			seen[what]++
		}
	}
	const seeds = 3000
	for seed := range uint64(seeds) {
		c := m.CrashClone(seed)
		got := tree(t, c)
		if got["d/synced"] != before["d/synced"] {
			t.Fatalf("seed %d: what was synced is %d bytes", seed, len(got["d/synced"]))
		}
		o := got["d/over"]
		if len(o) != 3*pageSize || strings.Trim(o[:pageSize], "o") != "" || strings.Trim(o[pageSize:], "on") != "" {
			t.Fatalf("seed %d: the synced page, or the size, of a file written over is gone", seed)
		}
		for at := pageSize; at < len(o); at += pageSize {
			p := o[at : at+pageSize]
			see("old page", strings.Trim(p, "o") == "")
			see("new page", strings.Trim(p, "n") == "")
			see("torn page", strings.Contains(p, "on") || strings.Contains(p, "no"))
			for s := 0; s < pageSize; s += sectorSize {
				if strings.Trim(p[s:s+sectorSize], p[s:s+1]) != "" {
					t.Fatalf("seed %d: a sector is torn", seed)
				}
			}
		}
		n, named := got["d/new"]
		see("new name", named)
		see("no new name", !named)
		see("new name, old size", named && n == "")
		see("new name, size between", len(n) > 0 && len(n) < 10000)
		see("new name, hole", strings.Contains(n, "\x00"))
		see("all of the new", n == before["d/new"])
		if strings.Trim(n, "n\x00") != "" {
			t.Fatalf("seed %d: a new file holds bytes of others", seed)
		}
		s, named := got["d/named"]
		see("synced, no name", !named)
		if named && s != before["d/named"] {
			t.Fatalf("seed %d: a file has its name and not the bytes that were synced before", seed)
		}
		_, removed := got["d/removed"]
		see("removed is back", removed)
		see("removed is gone", !removed)
		_, old := got["d/moved"]
		_, moved := got["moved"]
		if old == moved {
			t.Fatalf("seed %d: renamed in part", seed)
		}
		see("moved", moved)
		see("not moved", old)
		_, under := got["e/f"]
		see("under a new directory", under)
		_, derr := c.Lstat("e")
		see("without its new directory", derr == nil && !under)
		see("everything", len(got) == len(before) && under)
		var sum int64
		_ = Walk(c, func(_ string, st Info) { sum += st.Bytes })
		if sum != c.UsedBytes() || c.OpenFiles() != 0 {
			t.Fatalf("seed %d: files have %d bytes, %d are counted", seed, sum, c.UsedBytes())
		}
	}
	for _, what := range []string{"old page", "new page", "torn page", "new name", "no new name", "new name, old size", "new name, size between", "new name, hole",
		"all of the new", "synced, no name", "removed is back", "removed is gone", "moved", "not moved", "under a new directory", "without its new directory", "everything"} {
		if seen[what] < 10 {
			t.Errorf("%q came to pass %d times in %d", what, seen[what], seeds)
		}
	}

	// Same seed, same copy; the two share nothing.
	if a, b := fmt.Sprint(tree(t, m.CrashClone(7))), fmt.Sprint(tree(t, m.CrashClone(7))); a != b {
		t.Error("a seed makes two copies that differ")
	}
	for seed := range uint64(50) {
		c := m.CrashClone(seed)
		copied := fmt.Sprint(tree(t, c))
		if err := errors.Join(WriteAll(over, [][]byte{fill(byte(seed), 3*pageSize)}, 0), WriteAll(synced, [][]byte{fill(byte(seed), 5000)}, 0)); err != nil {
			t.Fatal(err)
		}
		if fmt.Sprint(tree(t, c)) != copied {
			t.Fatalf("seed %d: a write to the tree changes its copy", seed)
		}
	}
	c := m.CrashClone(7)
	original := fmt.Sprint(tree(t, m))
	for path := range tree(t, c) {
		create(t, c, path, fill('y', 6000))
	}
	if fmt.Sprint(tree(t, m)) != original {
		t.Error("a write to the copy changes the tree")
	}
}

// With everything pending or nothing, a change that a later one undid does not
// come back.
func TestCrashOfOvertakenChanges(t *testing.T) {
	for seed := range uint64(500) {
		m := NewMem(0)
		_ = create(t, m, "a", []byte("1")).Close()
		m.Flush(3 * seed)
		if err := errors.Join(m.Remove("a")); err != nil {
			t.Fatal(err)
		}
		m.Flush(3*seed + 1)
		_ = create(t, m, "b", []byte("2")).Close()
		if err := m.Rename("b", "a"); err != nil {
			t.Fatal(err)
		}
		syncDir(t, m, ".")
		got := tree(t, m.CrashClone(3*seed+2))
		if _, ok := got["a"]; !ok || len(got) != 1 || strings.Trim(got["a"], "2\x00") != "" {
			t.Fatalf("seed %d: after the sync of the directory it has %q", seed, got)
		}
	}
}

// What is flushed and not written since survives.
func TestFlush(t *testing.T) {
	intermediate := 0
	for seed := range uint64(1000) {
		m := NewMem(0)
		f := create(t, m, "f", []byte("old"))
		m.Flush(seed)
		if err := WriteAll(f, [][]byte{[]byte("new")}, 0); err != nil {
			t.Fatal(err)
		}
		switch got, ok := tree(t, m.CrashClone(seed+1e6))["f"]; {
		case ok && got == "old":
			intermediate++
		case ok && got != "new" && got != "" && got != "\x00\x00\x00":
			t.Fatalf("seed %d: %q", seed, got)
		}
		_ = f.Close()
	}
	if intermediate < 50 {
		t.Errorf("an older state was found %d times", intermediate)
	}
}

func TestMany(t *testing.T) {
	mem := NewMem(0)
	dir := strings.Repeat("ab", 32)
	if err := errors.Join(mem.Mkdir(dir, 0o700), mem.Mkdir(dir+"/03", 0o700)); err != nil {
		t.Fatal(err)
	}
	create(t, mem, dir+"/namespace.json", []byte("{}"))
	create(t, mem, dir+"/03/real", []byte("x"))
	m := &Many{FS: mem, Dir: dir, Files: 1000, Size: 8192}
	seen := map[string]Info{}
	if err := Walk(m, func(path string, st Info) { seen[path] = st }); err != nil {
		t.Fatal(err)
	}
	if len(seen) != 1002 {
		t.Errorf("%d files are found", len(seen))
	}
	for i := range 1000 {
		if st := seen[m.Name(i)]; !st.Regular() || st.Size != 8192 || st.Bytes != 8192 {
			t.Errorf("file %d is %+v", i, st)
		}
	}
	if _, err := m.Lstat(m.Name(1000)); !errors.Is(err, unix.ENOENT) {
		t.Errorf("one too many: %v", err)
	}
	if err := errors.Join(m.Remove(m.Name(5)), m.Remove(dir+"/03/real")); err != nil {
		t.Error(err)
	}
	if err := m.Remove(m.Name(1000)); !errors.Is(err, unix.ENOENT) {
		t.Errorf("remove of what is not: %v", err)
	}
	stop := errors.New("stop")
	if err := m.ReadDir(dir+"/00", func(string) error { return stop }); err != stop {
		t.Errorf("readdir ended by fn: %v", err)
	}
}

func BenchmarkMany(b *testing.B) {
	m := &Many{FS: NewMem(0), Dir: strings.Repeat("ab", 32), Files: 1 << 30, Size: 8192}
	b.ReportAllocs()
	for i := range b.N {
		if _, err := m.Lstat(m.Name(i)); err != nil {
			b.Fatal(err)
		}
	}
}
