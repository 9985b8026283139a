package e2e

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/client"
)

// files are those of a prompt's blocks.
func (n *node) files(p Prompt) (paths []string) {
	n.t.Helper()
	for _, k := range p.keys() {
		found, err := filepath.Glob(filepath.Join(n.root, "*", k.String()[:2], k.String()))
		if err != nil || len(found) != 1 {
			n.t.Fatalf("files of block %s: %v, %v", k, found, err)
		}
		paths = append(paths, found[0])
	}
	return paths
}

// poke changes one byte of a file.
func poke(path string, at int64) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	var b [1]byte
	if _, err := f.ReadAt(b[:], at); err != nil {
		return err
	}
	b[0] ^= 0x10
	_, err = f.WriteAt(b[:], at)
	return err
}

// TestDamagedFiles: whatever becomes of block files under load, engines get
// right bytes or a miss, the cause is counted, and the node serves on.
func TestDamagedFiles(t *testing.T) {
	t.Parallel()
	n := serve(t, place(t), "--primary", "8MiB")
	engine, other := n.engine("engine"), n.engine("other")
	foreign := own("foreign", 8)
	engine.store("foreign", foreign)
	spare := n.files(foreign)
	faults := []struct {
		name, cause string // cause "": a plain miss
		do          func(i int, path string) error
	}{
		{"flipped", "checksum", func(_ int, path string) error { return poke(path, 4096+12345) }},
		{"header", "header", func(_ int, path string) error { return poke(path, 40) }},
		{"truncated", "short", func(_ int, path string) error { return os.Truncate(path, 40000) }},
		{"empty", "short", func(_ int, path string) error { return os.Truncate(path, 0) }},
		{"deleted", "", func(_ int, path string) error { return os.Remove(path) }},
		{"swapped", "header", func(i int, path string) error { return os.Rename(spare[i], path) }},
		{"directory", "foreign", func(_ int, path string) error {
			return errors.Join(os.Remove(path), os.MkdirAll(filepath.Join(path, "sub"), 0o700))
		}},
		{"symlink", "foreign", func(i int, path string) error { return errors.Join(os.Remove(path), os.Symlink(spare[i], path)) }},
		{"pipe", "foreign", func(_ int, path string) error { return errors.Join(os.Remove(path), unix.Mkfifo(path, 0o600)) }},
	}
	prompts := make([]Prompt, len(faults))
	for i, f := range faults {
		prompts[i] = own(f.name, 8)
		engine.store("store "+f.name, prompts[i])
	}
	other.start(Load{Prefix: "other", Conversations: 40, Turn: 10, Parallel: 2, Flush: true})
	for i, f := range faults {
		t.Run(f.name, func(t *testing.T) {
			paths := n.files(prompts[i])
			engine.reset()
			before := fsOf(n.status())
			for j, path := range paths {
				if err := f.do(j, path); err != nil {
					t.Fatal(err)
				}
			}
			got := engine.do(Ask{ID: "find " + f.name, Prompt: prompts[i], LoadOnly: true})
			if got.Hits != 0 {
				t.Errorf("%d hits", got.Hits)
			}
			// A run's promotions go on when its first block has failed, so the
			// counters come to rest a little later.
			series := fmt.Sprintf(`terrace_tier_failed_blocks_total{cause=%q,tier="fs"}`, f.cause)
			if f.cause != "" {
				eventually(t, bound(), "counters", func() error {
					after := fsOf(n.status())
					failed, corrupt, aside := after.Failures[f.cause]-before.Failures[f.cause], after.Corrupt-before.Corrupt, after.SetAside-before.SetAside
					if failed != 8 || corrupt != 8 || aside != 8 {
						return fmt.Errorf("%d failed for %s, %d corrupt, %d set aside, want 8 each", failed, f.cause, corrupt, aside)
					}
					return nil
				})
				after := fsOf(n.status())
				if v := n.metric(series); v != float64(after.Failures[f.cause]) {
					t.Errorf("%s is %v, in the status it is %d", series, v, after.Failures[f.cause])
				}
				if v := n.metric(`terrace_tier_corrupt_blocks_total{tier="fs"}`); v != float64(after.Corrupt) {
					t.Errorf("the metric has %v corrupt blocks, the status %d", v, after.Corrupt)
				}
			}
			t.Logf("verdicts %v; %s", got.Verdicts[:2], fsOf(n.status()).LastError)
			n.settled()
			// They are stored again, and the tier takes them.
			if again := engine.store("again "+f.name, prompts[i]); again.Stored.Stored != 8 {
				t.Errorf("stored again: %+v, %v", again.Stored, again.Verdicts)
			}
			for _, path := range n.files(prompts[i]) {
				if st, err := os.Lstat(path); err != nil || !st.Mode().IsRegular() || st.Size() != 4096+blockBytes {
					t.Errorf("file after the second store: %v, %v", st, err)
				}
			}
			engine.reset()
			if got := engine.do(Ask{ID: "right " + f.name, Prompt: prompts[i], LoadOnly: true}); got.Hits != 8 {
				t.Errorf("after the second store %d of 8 are hits: %v", got.Hits, got.Verdicts)
			}
		})
	}
	other.after(10)
	other.finish()
	// The files that were put in others' places are missing in their own.
	if got := engine.do(Ask{ID: "foreign again", Prompt: foreign, LoadOnly: true}); got.Hits != 0 {
		t.Errorf("%d hits of files that were moved away", got.Hits)
	}
	engine.goodbye()
	other.goodbye()
	n.idle()
	n.exact()
	checkRoot(t, n)
	if h := fsOf(n.status()); h.ReadHealth != "closed" || h.WriteHealth != "closed" {
		t.Errorf("health is %s/%s: broken copies are no fault of the tier", h.ReadHealth, h.WriteHealth)
	}
}

// TestFoldersGo: somebody removes folders of the root, all that is in it, and
// the root itself; or moves it away and back. The node goes on, without a
// restart.
func TestFoldersGo(t *testing.T) {
	t.Parallel()
	at := place(t)
	n := serve(t, at)
	engine := n.engine("engine")
	p := own("p", 40)
	namespace := strings.Repeat("?", 64)
	for i, what := range []string{namespace + "/??", namespace, "tmp", "quarantine"} {
		pattern := filepath.Join(n.root, what)
		engine.store(fmt.Sprint("store ", i), p)
		paths, err := filepath.Glob(pattern)
		if err != nil || len(paths) == 0 {
			t.Fatalf("%s: %v, %v", pattern, paths, err)
		}
		for _, path := range paths {
			if err := os.RemoveAll(path); err != nil {
				t.Fatal(err)
			}
		}
		engine.reset()
		got := engine.do(Ask{ID: fmt.Sprint("find ", i), Prompt: p, LoadOnly: true})
		if gone := what != "tmp" && what != "quarantine"; gone != (got.Hits == 0) {
			t.Errorf("without %s: %d hits, %v", what, got.Hits, got.Verdicts)
		}
		n.settled()
		got = engine.do(Ask{ID: fmt.Sprint("again ", i), Prompt: p, Flush: time.Minute})
		if got.Hits+got.Stored.Stored != 40 || !got.Flushed.Done {
			t.Errorf("after %s went: %d hits, %+v, %+v", what, got.Hits, got.Stored, got.Flushed)
		}
		// Writes make anew what they need.
		if files := len(blockFiles(t, n.root)); got.Flushed.Failed != 0 || files != 40 {
			t.Errorf("after %s went and 40 blocks were stored again, there are %d files; %+v", what, files, got.Flushed)
		}
	}

	away := n.root + ".away"
	for _, x := range []struct {
		name        string
		goes, comes func() error
		hits        int
	}{
		{"emptied", func() error {
			all, err := filepath.Glob(filepath.Join(n.root, "*"))
			for _, path := range all {
				err = errors.Join(err, os.RemoveAll(path))
			}
			return err
		}, nil, 0},
		{"removed", func() error { return removeRoot(n.root) }, func() error { return os.Mkdir(n.root, 0o700) }, 0},
		{"replaced", func() error { return errors.Join(os.Rename(n.root, away+"2"), os.Mkdir(n.root, 0o700)) }, nil, 0},
		{"moved", func() error { return os.Rename(n.root, away) }, func() error { return os.Rename(away, n.root) }, 40},
	} {
		engine.store("before it is "+x.name, p)
		n.rootGoes(engine, x.name, p, x.hits, x.goes, x.comes)
		n.exact()
	}
	engine.goodbye()
	n.idle()
	n.exact()
	checkRoot(t, n)
	if log := n.stderr.String(); strings.Count(log, "the root is gone") != 4 {
		t.Errorf("the log names %d of 4 losses", strings.Count(log, "the root is gone"))
	}
	n.stops(0)

	n = serve(t, at)
	engine = n.engine("engine")
	n.scanned()
	if got := engine.do(Ask{ID: "restart", Prompt: p, LoadOnly: true}); got.Hits != 40 {
		t.Errorf("after a restart %d of 40 are hits: %v", got.Hits, got.Verdicts)
	}
	engine.goodbye()
	n.idle()
	n.exact()
}

// removeRoot is rm -rf, again while the node makes new files under it.
func removeRoot(root string) (err error) {
	for range 100 {
		if err = os.RemoveAll(root); err == nil {
			return nil
		}
	}
	return err
}

// rootGoes takes the root away and wants misses and failed stores until it
// comes again, and then a tier that works and has hits of the prompt.
func (n *node) rootGoes(e *engine, name string, p Prompt, hits int, goes, comes func() error) {
	t := n.t
	t.Helper()
	scans := strings.Count(n.stderr.String(), "scan done")
	if err := goes(); err != nil {
		t.Fatal(err)
	}
	e.reset()
	if comes != nil {
		eventually(t, bound(), "a tier without its root", func() error {
			if f := fsOf(n.status()); !strings.Contains(f.ScanError, n.root) || f.Blocks != 0 {
				return fmt.Errorf("%+v", f)
			}
			return nil
		})
		got := e.do(Ask{ID: name + " find", Prompt: p, LoadOnly: true})
		if got.Hits != 0 || got.Verdicts[0] < client.MissAbsent {
			t.Errorf("%s: %d hits, %v", name, got.Hits, got.Verdicts)
		}
		got = e.do(Ask{ID: name + " store", Prompt: own("not "+name, 5), Flush: time.Minute})
		if got.Stored.Stored != 5 || !got.Flushed.Done || got.Flushed.Cascaded != 0 {
			t.Errorf("%s: stored %+v, flushed %+v", name, got.Stored, got.Flushed)
		}
		n.cause("unavailable")
		if got := e.do(Ask{ID: name + " primary", Prompt: own("not "+name, 5), LoadOnly: true}); got.Hits != 5 {
			t.Errorf("%s: %d of 5 blocks of the primary are hits: %v", name, got.Hits, got.Verdicts)
		}
		if err := comes(); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, bound(), "the root is used again", func() error {
		if f := fsOf(n.status()); !f.ScanDone || strings.Count(n.stderr.String(), "scan done") <= scans {
			return fmt.Errorf("%+v", f)
		}
		return nil
	})
	n.writes(e, name)
	e.reset()
	if got := e.do(Ask{ID: name + " later", Prompt: p, LoadOnly: true}); got.Hits != hits {
		t.Errorf("%s, and there again: %d hits, want %d: %v", name, got.Hits, hits, got.Verdicts)
	}
	e.store(name+" again", p)
}

// TestRootUnmounted: the file system of the root is unmounted under load, and
// mounted again. Nothing is written where it was.
func TestRootUnmounted(t *testing.T) {
	t.Parallel()
	at := place(t)
	disk, under := filepath.Join(at.home, "disk"), filepath.Join(at.home, "under")
	at.root = filepath.Join(disk, "fs")
	mount := func() error { return unix.Mount(under, disk, "", unix.MS_BIND, "") }
	if err := errors.Join(os.Mkdir(disk, 0o700), os.Mkdir(under, 0o700)); err != nil {
		t.Fatal(err)
	}
	if err := mount(); err != nil {
		t.Skipf("this user may not mount: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(disk, unix.MNT_DETACH) })
	n := serve(t, at, "--set", "core.distrust_for=500ms") // reads that failed meanwhile are soon tried again
	engine, other := n.engine("engine"), n.engine("other")
	p := own("p", 40)
	engine.store("p", p)
	other.start(Load{Prefix: "other", Conversations: 40, Turn: 10, Parallel: 2})
	other.after(5)
	n.rootGoes(engine, "unmounted", p, 40, func() error {
		// And the path is made, as start scripts do.
		return errors.Join(unix.Unmount(disk, unix.MNT_DETACH), os.Mkdir(n.root, 0o700))
	}, func() error {
		if list, err := os.ReadDir(n.root); err != nil || len(list) > 0 {
			t.Errorf("in the folder of another disk are %v, %v", list, err)
		}
		return mount()
	})
	other.after(5)
	if r := other.finish(); r.Lost > 0 {
		t.Error("an engine has lost its session")
	}
	engine.goodbye()
	other.goodbye()
	n.idle()
	n.exact()
	time.Sleep(time.Second) // what failed is trusted again
	checkRoot(t, n)
	n.stops(0)
}

// cause waits until the tier has counted a failure, and checks that status
// and metrics agree.
func (n *node) cause(cause string) {
	n.t.Helper()
	series := fmt.Sprintf(`terrace_tier_failed_blocks_total{cause=%q,tier="fs"}`, cause)
	eventually(n.t, bound(), series, func() error {
		st := n.status()
		if f := fsOf(st).Failures; f[cause] == 0 || n.metric(series) == 0 {
			return fmt.Errorf("failures %v", f)
		}
		return nil
	})
}

// writes waits until the tier takes stores again: the breaker tries from time
// to time.
func (n *node) writes(e *engine, name string) {
	n.t.Helper()
	i := 0
	eventually(n.t, bound(), "working tier", func() error {
		i++
		p := own(fmt.Sprintf("%s %d", name, i), 2)
		got := e.do(Ask{ID: fmt.Sprintf("%s %d", name, i), Prompt: p, Flush: time.Minute})
		if got.Flushed.Cascaded != 2 {
			f := fsOf(n.status())
			return fmt.Errorf("flushed %+v, health %s, %s", got.Flushed, f.WriteHealth, f.LastError)
		}
		return nil
	})
}

// disk is a file system that a test can fill.
type disk struct {
	t     *testing.T
	mount string
}

// fill takes all but so many bytes.
func (d *disk) fill(left int64) {
	d.t.Helper()
	f, err := os.Create(filepath.Join(d.mount, "ballast"))
	if err == nil {
		err = errors.Join(unix.Fallocate(int(f.Fd()), 0, 0, d.free()-left), f.Close())
	}
	if err != nil {
		d.t.Fatal(err)
	}
}

func (d *disk) clear() {
	d.t.Helper()
	if err := os.Remove(filepath.Join(d.mount, "ballast")); err != nil {
		d.t.Fatal(err)
	}
}

func (d *disk) free() int64 {
	d.t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(d.mount, &st); err != nil {
		d.t.Fatal(err)
	}
	return int64(st.Bfree) * st.Bsize
}

// TestFullDisk: a file system that is full, or has only what is to be left to
// others, fails stores and nothing else while the tier has nothing to give up
// for them. With room they succeed again; then the tier's own growth ends in eviction.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	const floor = 8 << 20
	for _, x := range []struct {
		cause, minFree string
		first          int   // blocks that are in the tier when others fill the disk
		left           int64 // by them
	}{{"no_space", "none", 0, 0}, {"free_floor", "8MiB", 30, 2 << 20}} {
		t.Run(x.cause, func(t *testing.T) {
			t.Parallel()
			n, mount := serveOn(t, 48<<20, "--primary", "16MiB", "--set", "tiers.fs.min_free="+x.minFree)
			d := &disk{t, fmt.Sprintf("/proc/%d/root%s", n.pid(), mount)}
			engine, other := n.engine("engine"), n.engine("other")
			first := own("first", x.first)
			if x.first > 0 {
				engine.store("first", first)
			}
			d.fill(x.left)
			full := own("full", 64)
			got := engine.do(Ask{ID: "full", Prompt: full, Flush: time.Minute})
			if got.Stored.Stored != 64 || !got.Flushed.Done || got.Flushed.Failed == 0 {
				t.Errorf("a store above a full tier: %+v, flushed %+v", got.Stored, got.Flushed)
			}
			n.cause(x.cause)
			// It is served on, from the primary and from below.
			if got := engine.do(Ask{ID: "full again", Prompt: full, LoadOnly: true}); got.Hits != 64 {
				t.Errorf("%d of 64 blocks of the primary are hits: %v", got.Hits, got.Verdicts)
			}
			engine.reset()
			if x.first > 0 {
				if got := engine.do(Ask{ID: "first again", Prompt: first, LoadOnly: true}); got.Hits != x.first {
					t.Errorf("%d of %d blocks of the full tier are hits: %v", got.Hits, x.first, got.Verdicts)
				}
			}
			st := fsOf(n.status())
			t.Logf("full: health %s/%s, failures %v, dropped %v, %s", st.ReadHealth, st.WriteHealth, positive(st.Failures), positive(st.Dropped), st.LastError)
			if st.ReadHealth != "closed" || st.LastError == "" {
				t.Errorf("reads of a full tier are %s; last error %q", st.ReadHealth, st.LastError)
			}
			d.clear()
			n.writes(engine, "room")

			other.start(Load{Prefix: "other", Conversations: 1000, Turn: 24, Parallel: 2, Flush: true})
			eventually(t, bound(), "evictions", func() error {
				n.frozen(func() {
					if free := d.free(); x.minFree != "none" && free < floor {
						t.Errorf("%d bytes are free, %d are to be left", free, floor)
					}
				})
				if f := fsOf(n.status()); f.Evicted < 100 {
					return fmt.Errorf("%d blocks were evicted, %d bytes are free, failures %v", f.Evicted, d.free(), positive(f.Failures))
				}
				return nil
			})
			if r := other.finish(); r.Lost > 0 || r.Refused > 0 {
				t.Errorf("%d sessions were lost, %d stores refused", r.Lost, r.Refused)
			}
			engine.goodbye()
			other.goodbye()
			n.idle()
			n.exact()
			checkRoot(t, n)
		})
	}
}

func positive(m map[string]int64) map[string]int64 {
	out := map[string]int64{}
	for k, v := range m {
		if v != 0 {
			out[k] = v
		}
	}
	return out
}

// TestReadOnlyDisk: the file system below a namespace becomes read-only, and
// comes back.
func TestReadOnlyDisk(t *testing.T) {
	t.Parallel()
	n, mount := serveOn(t, 64<<20, "--primary", "8MiB")
	engine := n.engine("engine")
	p := own("p", 30)
	engine.store("p", p)
	namespace := filepath.Base(filepath.Dir(filepath.Dir(n.files(own("p", 1))[0])))
	change := wrapArgs{Change: n.pid(), Mount: filepath.Join(mount, "fs", namespace)}
	wrapped(t, change)
	if err := os.WriteFile(filepath.Join(n.root, namespace, "x"), nil, 0o600); !errors.Is(err, syscall.EROFS) {
		t.Fatalf("the mount had no effect: %v", err)
	}
	got := engine.do(Ask{ID: "q", Prompt: own("q", 10), Flush: time.Minute})
	if got.Stored.Stored != 10 || !got.Flushed.Done || got.Flushed.Failed != 10 {
		t.Errorf("a store above a read-only tier: %+v, flushed %+v", got.Stored, got.Flushed)
	}
	n.cause("read_only")
	if got := engine.do(Ask{ID: "q again", Prompt: own("q", 10), LoadOnly: true}); got.Hits != 10 {
		t.Errorf("%d of 10 blocks that are only in the primary are hits: %v", got.Hits, got.Verdicts)
	}
	engine.reset()
	if got := engine.do(Ask{ID: "p again", Prompt: p, LoadOnly: true}); got.Hits != 30 {
		t.Errorf("%d of 30 blocks of the read-only tier are hits: %v", got.Hits, got.Verdicts)
	}
	if st := fsOf(n.status()); st.LastError == "" || !strings.Contains(st.LastError, "read-only") {
		t.Errorf("last error %q", st.LastError)
	}
	change.Write = true
	wrapped(t, change)
	n.writes(engine, "writable")
	engine.goodbye()
	n.idle()
	n.exact()
	checkRoot(t, n)
}

// TestNoPermission: the root's mode is changed under the node, and back.
func TestNoPermission(t *testing.T) {
	t.Parallel()
	at := place(t)
	cmd := terraceCommand(t, at.env, serveArgs(at, []string{"--primary", "8MiB", "--set", "core.distrust_for=500ms"})...)
	if os.Geteuid() == 0 {
		// Modes mean nothing to root, so the node is somebody else's.
		const nobody = 65534
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
		err := filepath.WalkDir(at.home, func(path string, _ fs.DirEntry, err error) error {
			return errors.Join(err, os.Chown(path, nobody, nobody))
		})
		for _, dir := range []string{filepath.Dir(at.home), filepath.Dir(cmd.Dir), filepath.Dir(terracePath)} {
			err = errors.Join(err, os.Chmod(dir, 0o755))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	n := serveAs(t, at, cmd)
	engine := n.engine("engine")
	p := own("p", 20)
	engine.store("p", p)
	engine.reset()
	if err := os.Chmod(n.root, 0); err != nil {
		t.Fatal(err)
	}
	got := engine.do(Ask{ID: "p", Prompt: p, LoadOnly: true})
	if got.Hits != 0 || got.Verdicts[0] < client.MissAbsent {
		t.Errorf("%d hits in a root that cannot be entered: %v", got.Hits, got.Verdicts)
	}
	n.cause("permission")
	got = engine.do(Ask{ID: "q", Prompt: own("q", 10), Flush: time.Minute})
	if got.Stored.Stored != 10 || !got.Flushed.Done || got.Flushed.Cascaded != 0 {
		t.Errorf("a store above a closed tier: %+v, flushed %+v", got.Stored, got.Flushed)
	}
	n.cause("permission")
	if got := engine.do(Ask{ID: "q again", Prompt: own("q", 10), LoadOnly: true}); got.Hits != 10 {
		t.Errorf("%d of 10 blocks that are only in the primary are hits: %v", got.Hits, got.Verdicts)
	}
	if err := os.Chmod(n.root, 0o700); err != nil {
		t.Fatal(err)
	}
	n.writes(engine, "entered")
	engine.reset()
	eventually(t, bound(), "hits of the opened root", func() error {
		if got := engine.do(Ask{ID: "p later", Prompt: p, LoadOnly: true}); got.Hits != 20 {
			return fmt.Errorf("%d of 20: %v", got.Hits, got.Verdicts)
		}
		return nil
	})
	engine.goodbye()
	n.idle()
	n.exact()
	checkRoot(t, n)
}
