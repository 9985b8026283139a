package arena

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// Tests about processes use real ones: the test binary starts itself again as
// an engine or as an engine's worker. The test speaks to an engine in lines.
// Every process ends when the test process does, by reading the end of a pipe
// that only the test process can write (the lifeline).

const helperEnv = "TERRACE_ARENA_HELPER"

// Descriptors of a helper.
const (
	engineConn     = 3 // socket to the test
	engineLifeline = 4
	engineRegion   = 5 // inherited region, if any

	workerRegion   = 3
	workerLifeline = 4
)

func TestMain(m *testing.M) {
	switch os.Getenv(helperEnv) {
	case "engine":
		engineMain()
	case "worker":
		workerMain()
	case "owner":
		ownerMain()
	case "unlockable":
		unlockableMain()
	default:
		// Workers whose engine is dead become children of this process, which
		// can then wait for their end.
		if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
			fmt.Fprintln(os.Stderr, "become subreaper:", err)
			os.Exit(1)
		}
		// The runtime's poller opens descriptors of its own at the first use.
		// Before the tests, so that they can count theirs.
		r, w, err := os.Pipe()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		_, _ = r.Close(), w.Close()
		goleak.VerifyTestMain(m)
	}
}

func fail(args ...any) {
	fmt.Println(append([]any{"error:"}, args...)...)
	os.Exit(1)
}

// engineMain obeys commands of one line each and answers each with a line:
//
//	recv SIZE     receive a region over the socket and map it
//	inherit SIZE  map the region inherited as descriptor 5
//	closefd       close the descriptor
//	unmap         close the mapping
//	write OFF V   write a byte
//	read OFF      answer a byte
//	truncate N    try to change the region's size; answers the error
//	spawn SIZE    start a worker that maps the descriptor and closes it; answers its pid
//	fork          fork a worker that closes the descriptor and keeps the mapping; answers its pid
//	reap PID      kill a worker and wait for it
func engineMain() {
	go func() {
		_, _ = io.Copy(io.Discard, os.NewFile(engineLifeline, "lifeline"))
		os.Exit(0)
	}()
	var region *os.File
	var m *Mapping
	must := func(err error) {
		if err != nil {
			fail(err)
		}
	}
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		f := strings.Fields(in.Text())
		num := func(i int) int64 {
			n, err := strconv.ParseInt(f[i], 10, 64)
			must(err)
			return n
		}
		answer := "ok"
		switch f[0] {
		case "recv":
			c, err := net.FileConn(os.NewFile(engineConn, "conn"))
			must(err)
			_, region, err = RecvFD(c.(*net.UnixConn), make([]byte, 16))
			must(err)
			m, err = Map(region, num(1))
			must(err)
		case "inherit":
			region = os.NewFile(engineRegion, "region")
			var err error
			m, err = Map(region, num(1))
			must(err)
		case "closefd":
			must(region.Close())
		case "unmap":
			must(m.Close())
		case "write":
			b, err := m.Bytes(num(1), 1)
			must(err)
			b[0] = byte(num(2))
		case "read":
			b, err := m.Bytes(num(1), 1)
			must(err)
			answer = strconv.Itoa(int(b[0]))
		case "truncate":
			answer = fmt.Sprint(region.Truncate(num(1)))
		case "spawn":
			cmd := exec.Command("/proc/self/exe")
			cmd.Env = append(os.Environ(), helperEnv+"=worker", "SIZE="+f[1])
			cmd.ExtraFiles = []*os.File{region, os.NewFile(engineLifeline, "lifeline")}
			out, err := cmd.StdoutPipe()
			must(err)
			must(cmd.Start())
			line, err := bufio.NewReader(out).ReadString('\n') // mapped, descriptor closed
			must(err)
			if line != "ready\n" {
				fail("worker:", line)
			}
			answer = strconv.Itoa(cmd.Process.Pid)
		case "fork":
			pid, err := forkHolder(int(region.Fd()))
			must(err)
			answer = strconv.Itoa(pid)
		case "reap":
			must(unix.Kill(int(num(1)), unix.SIGKILL))
			_, err := unix.Wait4(int(num(1)), nil, 0, nil)
			must(err)
		default:
			fail("unknown command", f[0])
		}
		fmt.Println(answer)
	}
}

// workerMain maps the region it inherits, closes the descriptor and stays.
func workerMain() {
	size, err := strconv.ParseInt(os.Getenv("SIZE"), 10, 64)
	if err != nil {
		fail(err)
	}
	f := os.NewFile(workerRegion, "region")
	if _, err := Map(f, size); err != nil {
		fail(err)
	}
	if err := f.Close(); err != nil {
		fail(err)
	}
	fmt.Println("ready")
	_, _ = io.Copy(io.Discard, os.NewFile(workerLifeline, "lifeline"))
}

// forkHolder forks this process as an engine in another language does, without
// exec. The child closes descriptor fd and keeps what mappings it was born
// with. It tells over a pipe that the descriptor is closed.
//
// The child of a fork has one thread and no Go runtime, so it makes raw system
// calls only.
//
//go:norace
func forkHolder(fd int) (int, error) {
	var ready [2]int
	if err := unix.Pipe2(ready[:], unix.O_CLOEXEC); err != nil {
		return 0, err
	}
	var buf [1]byte
	p := uintptr(unsafe.Pointer(&buf[0]))
	runtime.LockOSThread()
	pid, _, errno := syscall.RawSyscall6(syscall.SYS_CLONE, uintptr(syscall.SIGCHLD), 0, 0, 0, 0, 0)
	if pid == 0 && errno == 0 {
		syscall.RawSyscall(syscall.SYS_CLOSE, uintptr(fd), 0, 0)
		syscall.RawSyscall(syscall.SYS_WRITE, uintptr(ready[1]), p, 1)
		for { // until the test process ends: nothing is ever written
			if n, _, e := syscall.RawSyscall(syscall.SYS_READ, engineLifeline, p, 1); n == 0 && e == 0 {
				syscall.RawSyscall(syscall.SYS_EXIT_GROUP, 0, 0, 0)
			}
		}
	}
	runtime.UnlockOSThread()
	_ = unix.Close(ready[1])
	defer func() { _ = unix.Close(ready[0]) }()
	if errno != 0 {
		return 0, errno
	}
	if n, err := unix.Read(ready[0], buf[:]); n != 1 {
		return 0, fmt.Errorf("forked worker: read %d, %v", n, err)
	}
	runtime.KeepAlive(&buf)
	return int(pid), nil
}

// ownerMain opens an arena, says so and stays, to be killed.
func ownerMain() {
	a, err := Open(ctx0, Options{Size: 1 << 20, Name: "terrace-owner"})
	if err != nil {
		fail(err)
	}
	if err := a.Populate(ctx0, 0, nil); err != nil {
		fail(err)
	}
	fmt.Println("ready")
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// unlockableMain opens an arena with Lock where locking is not allowed, and
// prints the error and how many of its descriptors and mappings are left.
func unlockableMain() {
	runtime.LockOSThread()
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	if err := unix.Capset(&hdr, &none[0]); err != nil {
		fail(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: 4096, Max: 4096}); err != nil {
		fail(err)
	}
	_, err := Open(ctx0, Options{Size: 1 << 20, Name: "terrace-unlockable", Lock: true})
	fmt.Println(regionsOpen("terrace-unlockable"), err)
}

// engineProcess is a helper as the test sees it.
type engineProcess struct {
	t    *testing.T
	cmd  *exec.Cmd
	conn *net.UnixConn
	in   io.WriteCloser
	out  *bufio.Reader
	dead bool
}

// startEngine starts an engine; region, if not nil, is inherited.
func startEngine(t *testing.T, region *os.File) *engineProcess {
	t.Helper()
	ours, theirs := socketPair(t)
	lifelineR, lifelineW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	theirFile, err := theirs.File()
	if err != nil {
		t.Fatal(err)
	}
	e := &engineProcess{t: t, conn: ours}
	e.cmd = exec.Command("/proc/self/exe")
	e.cmd.Env = append(os.Environ(), helperEnv+"=engine")
	e.cmd.Stderr = os.Stderr
	e.cmd.ExtraFiles = []*os.File{theirFile, lifelineR}
	if region != nil {
		e.cmd.ExtraFiles = append(e.cmd.ExtraFiles, region)
	}
	if e.in, err = e.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := e.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	e.out = bufio.NewReader(out)
	if err := e.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []io.Closer{theirFile, theirs, lifelineR} {
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		e.kill()
		_ = lifelineW.Close()
	})
	return e
}

// do sends a command and returns the answer.
func (e *engineProcess) do(format string, args ...any) string {
	e.t.Helper()
	if _, err := fmt.Fprintf(e.in, format+"\n", args...); err != nil {
		e.t.Fatalf("engine: send %q: %v", format, err)
	}
	line, err := e.out.ReadString('\n')
	if err != nil || strings.HasPrefix(line, "error:") {
		e.t.Fatalf("engine: %s: %q, %v", fmt.Sprintf(format, args...), line, err)
	}
	return strings.TrimSpace(line)
}

func (e *engineProcess) doPID(format string, args ...any) int {
	e.t.Helper()
	pid, err := strconv.Atoi(e.do(format, args...))
	if err != nil {
		e.t.Fatal(err)
	}
	return pid
}

// kill ends the engine with SIGKILL and returns when the kernel has taken
// everything from it.
func (e *engineProcess) kill() {
	if e.dead {
		return
	}
	e.dead = true
	_ = e.cmd.Process.Kill()
	_ = e.cmd.Wait()
	_ = e.conn.Close()
}

// killOrphan ends a process whose parent, an engine, has died before.
func killOrphan(t *testing.T, pid int) {
	t.Helper()
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Wait4(pid, nil, 0, nil); err != nil {
		t.Fatal(err)
	}
}

func socketPair(t testing.TB) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		c, err := net.FileConn(f)
		if err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
		conns[i] = c.(*net.UnixConn)
		t.Cleanup(func() { _ = c.Close() })
	}
	return conns[0], conns[1]
}

// regionsOpen counts this process's descriptors and mappings of regions with a
// name.
func regionsOpen(name string) string {
	var descriptors, mappings int
	entries, _ := os.ReadDir("/proc/self/fd")
	for _, e := range entries {
		if to, _ := os.Readlink("/proc/self/fd/" + e.Name()); strings.Contains(to, "memfd:"+name+" ") {
			descriptors++
		}
	}
	maps, _ := os.ReadFile("/proc/self/maps")
	for line := range strings.Lines(string(maps)) {
		if strings.Contains(line, "memfd:"+name+" ") {
			mappings++
		}
	}
	return fmt.Sprintf("%d descriptors, %d mappings", descriptors, mappings)
}

func descriptorsOpen(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}
