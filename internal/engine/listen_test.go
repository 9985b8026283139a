package engine_test

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/terrace-kv/terrace/internal/engine"
	"github.com/terrace-kv/terrace/internal/wire"
	"golang.org/x/sys/unix"
)

func listen(t *testing.T, path, group string) *engine.Listener {
	t.Helper()
	l, err := engine.Listen(path, group)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

func mode(t *testing.T, path string) os.FileMode {
	t.Helper()
	fi, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	return fi.Mode().Perm()
}

func TestListen(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	path := filepath.Join(dir, "s")
	l := listen(t, path, "")
	if mode(t, dir) != 0o700 || mode(t, filepath.Dir(dir)) != 0o700 || mode(t, path) != 0o600 || l.Path() != path {
		t.Errorf("folder %v, socket %v", mode(t, dir), mode(t, path))
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("%v is left", left)
	}
}

func TestListenGroup(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "g")
	path := filepath.Join(dir, "s")
	listen(t, path, "0")
	if mode(t, dir) != 0o750 || mode(t, path) != 0o660 {
		t.Errorf("folder %v, socket %v", mode(t, dir), mode(t, path))
	}
	if _, err := engine.Listen(filepath.Join(dir, "x"), "no such group"); err == nil || !strings.Contains(err.Error(), "socket_group") {
		t.Errorf("unknown group: %v", err)
	}
}

// TestListenRefuses names the path and the setting, and leaves what it found.
func TestListenRefuses(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	open := filepath.Join(dir, "open")
	if err := os.Mkdir(open, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(open, 0o777); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(open, link); err != nil {
		t.Fatal(err)
	}
	alive, err := net.Listen("unix", filepath.Join(dir, "alive"))
	if err != nil {
		t.Fatal(err)
	}
	defer alive.Close()
	// A node that is too busy to accept is alive.
	busy := filepath.Join(dir, "busy")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		defer unix.Close(fd)
		if err = unix.Bind(fd, &unix.SockaddrUnix{Name: busy}); err == nil {
			err = unix.Listen(fd, 0)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	first, err := net.Dial("unix", busy)
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	taken := listen(t, filepath.Join(dir, "taken"), "")
	for path, want := range map[string]string{
		file:                         "not a socket",
		filepath.Join(open, "s"):     "written by everybody",
		filepath.Join(link, "s"):     "written by everybody",
		filepath.Join(file, "s"):     "not a directory",
		filepath.Join(dir, "alive"):  "another process",
		busy:                         "another process",
		taken.Path():                 "another process",
		strings.Repeat("/x", 60):     "allows 107",
		filepath.Join(dir, "\x00no"): "invalid",
	} {
		_, err := engine.Listen(path, "")
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "socket") {
			t.Errorf("%q: %v, want %q", path, err, want)
		}
		if want == "another process" && (!errors.Is(err, engine.ErrSocketInUse) || !strings.Contains(err.Error(), path)) {
			t.Errorf("%q: %v is no ErrSocketInUse with the path", path, err)
		}
	}
	if b, err := os.ReadFile(file); err != nil || string(b) != "precious" {
		t.Errorf("%q, %v", b, err)
	}
	// A sticky folder is one that others cannot replace files in.
	if err := os.Chmod(open, 0o777|os.ModeSticky); err != nil {
		t.Fatal(err)
	}
	listen(t, filepath.Join(open, "s"), "")
	if os.Geteuid() == 0 {
		if err := os.Lchown(open, 12345, -1); err != nil {
			t.Fatal(err)
		}
		if _, err := engine.Listen(filepath.Join(open, "s2"), ""); err == nil || !strings.Contains(err.Error(), "belongs to user 12345") {
			t.Errorf("somebody else's folder: %v", err)
		}
	}
}

// TestListenRace: of many who want one path exactly one gets it, time and
// again, though each removes its files at the end.
func TestListenRace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	for range 50 {
		var wg sync.WaitGroup
		var won atomic.Pointer[engine.Listener]
		var wins atomic.Int32
		for range 8 {
			wg.Go(func() {
				l, err := engine.Listen(path, "")
				switch {
				case err == nil:
					wins.Add(1)
					won.Store(l)
				case !errors.Is(err, engine.ErrSocketInUse):
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if wins.Load() != 1 {
			t.Fatalf("%d have won", wins.Load())
		}
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatalf("the winner cannot be reached: %v", err)
		}
		c.Close()
		if err := won.Load().Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestListenChurn: those who stop while others start never remove what is not
// theirs: whoever has won can be reached.
func TestListenChurn(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 100 {
				l, err := engine.Listen(path, "")
				if err != nil {
					if !errors.Is(err, engine.ErrSocketInUse) {
						t.Error(err)
					}
					runtime.Gosched()
					continue
				}
				if c, err := net.Dial("unix", path); err != nil {
					t.Errorf("the winner cannot be reached: %v", err)
				} else {
					c.Close()
				}
				if err := l.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

// TestListenAfterKill: what a killed node leaves is in nobody's way, and what
// a stopped one holds is safe.
func TestListenAfterKill(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	cmd := child(t, "listen", path)
	if _, err := engine.Listen(path, ""); !errors.Is(err, engine.ErrSocketInUse) {
		t.Errorf("beside a living node: %v", err)
	}
	if err := cmd.Process.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if _, err := engine.Listen(path, ""); !errors.Is(err, engine.ErrSocketInUse) {
		t.Errorf("beside a stopped node: %v", err)
	}
	kill(t, cmd)
	if _, err := os.Lstat(path); err != nil {
		t.Fatalf("the test needs the dead node's socket: %v", err)
	}
	listen(t, path, "")
}

// TestCloseForeign: a socket that has been put in our socket's place is not
// ours to remove.
func TestCloseForeign(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l := listen(t, path, "")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	other, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("the other's socket: %v", err)
	}
}

// as runs f on a thread of its own with another user's credentials.
func as(t *testing.T, uid, gid int, groups []uint32, f func()) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can become somebody else")
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with the goroutine
		var p *uint32
		if len(groups) > 0 {
			p = &groups[0]
		}
		err := setCreds(p, len(groups), uid, gid)
		if err == nil {
			f()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// TestPeer: the kernel's word on who has connected counts, whatever the file's
// mode has become.
func TestPeer(t *testing.T) {
	const stranger, group = 54321, 54322
	for _, c := range []struct {
		name   string
		group  string
		uid    int
		gid    int
		groups []uint32
		ok     bool
	}{
		{"root", "", 0, 0, nil, true},
		{"a stranger", "", stranger, stranger, nil, false},
		{"a stranger, despite the group", "54322", stranger, stranger, []uint32{1, 2}, false},
		{"the group", "54322", stranger, group, nil, true},
		{"a member", "54322", stranger, stranger, []uint32{7, group, 9}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := start(t, engine.Options{})
			path := f.path
			if c.group != "" { // another server, with a group
				path += "2"
				l, err := engine.Listen(path, c.group)
				if err != nil {
					t.Fatal(err)
				}
				s := engine.Serve(l, f.b, engine.Options{Logger: slog.New(slog.DiscardHandler)})
				defer s.Close()
			}
			for dir := filepath.Dir(path); dir != os.TempDir() && len(dir) > 4; dir = filepath.Dir(dir) {
				if err := os.Chmod(dir, 0o755); err != nil {
					t.Fatal(err)
				}
			}
			if err := os.Chmod(path, 0o666); err != nil {
				t.Fatal(err)
			}
			var conn *net.UnixConn
			var err error
			as(t, c.uid, c.gid, c.groups, func() {
				conn, err = net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
			})
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			r := wire.NewReader(conn)
			conn.Write(wire.AppendFrame(nil, wire.TypeHello, 1, hello()))
			fr, err := r.Read()
			if err != nil {
				t.Fatal(err)
			}
			if c.ok {
				if fr.Type != wire.TypeHello|wire.ReplyBit {
					t.Errorf("%v", fr.Type)
				}
				return
			}
			var e wire.Error
			if err := e.Decode(fr.Body); err != nil || !errors.Is(&e, wire.ErrForbidden) || !strings.Contains(e.Message, "user 54321") {
				t.Errorf("%v: %v, %v", fr.Type, &e, err)
			}
			if _, err := r.Read(); !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
				t.Errorf("%v, want the end", err)
			}
		})
	}
}
