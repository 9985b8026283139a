package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// wrapArgs say what to give a node before it starts, or to change about one
// that runs.
type wrapArgs struct {
	Mount  string // put a tmpfs there, which only this process sees
	Bytes  int64  // of the tmpfs
	Files  uint64 // limit of open files; 0: as it is
	Node   []string
	Change int  // process id of a node for which the folder Mount becomes read-only,
	Write  bool // or, with Write, writable again
}

const wrapEnv = "E2E_WRAP"

// wrapDenied is the exit code for a mount that this user may not make.
const wrapDenied = 77

func wrapMain() {
	var a wrapArgs
	if err := json.Unmarshal([]byte(os.Getenv(wrapEnv)), &a); err != nil {
		fatal(err)
	}
	if err := wrap(&a); err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.ENOSYS) {
			os.Exit(wrapDenied)
		}
		os.Exit(1)
	}
	os.Exit(0)
}

func wrap(a *wrapArgs) error {
	runtime.LockOSThread() // namespaces belong to a thread
	if a.Change != 0 {
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/mnt", a.Change))
		if err != nil {
			return err
		}
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("setns: %w", err)
		}
		if a.Write {
			return unix.Unmount(a.Mount, unix.MNT_DETACH)
		}
		// A mount of its own, since one in which files are open for writing
		// cannot become read-only.
		if err := unix.Mount(a.Mount, a.Mount, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind: %w", err)
		}
		return unix.Mount("", a.Mount, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, "")
	}
	if a.Mount != "" {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return fmt.Errorf("make mounts private: %w", err)
		}
		if err := unix.Mount("tmpfs", a.Mount, "tmpfs", 0, fmt.Sprintf("mode=0755,size=%d", a.Bytes)); err != nil {
			return fmt.Errorf("mount: %w", err)
		}
	}
	if a.Files != 0 {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: a.Files, Max: a.Files}); err != nil {
			return fmt.Errorf("setrlimit: %w", err)
		}
	}
	if a.Node == nil {
		return nil
	}
	// What launch has asked for was the first thread's.
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(syscall.SIGKILL), 0, 0, 0); err != nil {
		return err
	}
	var env []string
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "E2E_") {
			env = append(env, v)
		}
	}
	return syscall.Exec(a.Node[0], a.Node, env)
}

func wrapCommand(t *testing.T, env []string, a wrapArgs) *exec.Cmd {
	t.Helper()
	text, err := json.Marshal(a)
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(append([]string(nil), env...), roleEnv+"=wrap", wrapEnv+"="+string(text))
	cmd.Dir = t.TempDir()
	return cmd
}

// wrapped runs what is to be changed about a running node.
func wrapped(t *testing.T, a wrapArgs) {
	t.Helper()
	if out, err := wrapCommand(t, os.Environ(), a).CombinedOutput(); err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) && exit.ExitCode() == wrapDenied {
			t.Skipf("this user may not mount: %s", out)
		}
		t.Fatalf("%v: %s", err, out)
	}
}

// serveOn starts a node whose root is in a file system of its own, of so many
// bytes. Nobody else sees it; the node's root is reached through the node's
// process. The mount's path is what a remount needs.
func serveOn(t *testing.T, bytes int64, args ...string) (n *node, mount string) {
	t.Helper()
	at := place(t)
	mount = filepath.Join(at.home, "disk")
	if err := os.Mkdir(mount, 0o700); err != nil {
		t.Fatal(err)
	}
	at.root = filepath.Join(mount, "fs")
	a := wrapArgs{Mount: mount, Bytes: bytes}
	wrapped(t, a) // skips where it is not allowed
	a.Node = append([]string{terracePath}, serveArgs(at, args)...)
	n = serveAs(t, at, wrapCommand(t, at.env, a))
	n.root = fmt.Sprintf("/proc/%d/root%s", n.pid(), at.root)
	return n, mount
}
