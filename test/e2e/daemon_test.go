package e2e

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/client"
	"github.com/terrace-kv/terrace/internal/wire"
)

// goroutines counts those of the node.
func (n *node) goroutines() (count int) {
	n.t.Helper()
	page := n.page("/debug/pprof/goroutine?debug=1")
	if _, err := fmt.Sscanf(page, "goroutine profile: total %d", &count); err != nil {
		n.t.Fatalf("%v: %.200s", err, page)
	}
	return count
}

// TestNoLeaks: twenty engines come and go, half of them killed in the middle
// of their load; then the node is what it was.
func TestNoLeaks(t *testing.T) {
	t.Parallel()
	n := serve(t, place(t), "--primary", "32MiB")
	burst := func(engines int) {
		var all []*engine
		for i := range engines {
			e := n.engine(fmt.Sprint("engine ", i))
			e.start(Load{Prefix: "all", Seed: uint64(i), Conversations: 60, Turn: 10})
			all = append(all, e)
			var granted int
			e.must("Half", Ask{ID: "half", Prompt: own(fmt.Sprint("half ", i), 3)}, &granted)
		}
		for i, e := range all {
			e.after(1)
			if i%2 == 0 {
				e.kill()
				continue
			}
			e.finish()
			e.must("Close", None{}, &None{})
			e.kill()
		}
	}
	burst(4) // what is made once and kept, is made
	n.idle()
	fds, goroutines := descriptors(t, n.pid()), n.goroutines()
	for range max(4, often(5, 80)) {
		burst(5)
	}
	st := n.idle()
	if st.Stores.Expired != 0 {
		t.Errorf("%d reservations had to expire", st.Stores.Expired)
	}
	eventually(t, bound(), "descriptors and goroutines as before", func() error {
		f, g := descriptors(t, n.pid()), n.goroutines()
		if f > fds || g > goroutines {
			return fmt.Errorf("%d descriptors and %d goroutines, before the load %d and %d", f, g, fds, goroutines)
		}
		return nil
	})
	if s := sharedMemory(t); s != "" {
		t.Errorf("in /dev/shm: %s", s)
	}
	n.exact()
	t.Logf("%d descriptors, %d goroutines", fds, goroutines)
}

// listeners lists what a process listens on.
func listeners(t *testing.T, pid int) (out []string) {
	t.Helper()
	inodes := map[string]bool{}
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		link, err := os.Readlink(fd)
		if inode, ok := strings.CutPrefix(link, "socket:["); err == nil && ok {
			inodes[strings.TrimSuffix(inode, "]")] = true
		}
	}
	if len(inodes) == 0 {
		t.Fatal("no sockets at all")
	}
	// Column of the inode, and how a listening or bound socket is told.
	for _, x := range []struct {
		file         string
		inode, state int
		want         string
	}{{"tcp", 9, 3, "0A"}, {"tcp6", 9, 3, "0A"}, {"udp", 9, 0, ""}, {"udp6", 9, 0, ""}, {"raw", 9, 0, ""}, {"raw6", 9, 0, ""}, {"packet", 8, 0, ""}, {"unix", 6, 3, "00010000"}} {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid, x.file))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			f := strings.Fields(line)
			if len(f) <= x.inode || !inodes[f[x.inode]] || x.want != "" && f[x.state] != x.want {
				continue
			}
			where := f[1]
			if x.file == "unix" {
				where = f[len(f)-1]
			}
			out = append(out, x.file+" "+where)
		}
	}
	slices.Sort(out)
	return out
}

// TestListeners: a node listens for engines and on loopback, and nowhere else.
func TestListeners(t *testing.T) {
	t.Parallel()
	dir, env := home(t)
	at := nodeAt{home: dir, env: env, socket: filepath.Join(dir, "run", "terrace", "engine.sock"), root: filepath.Join(dir, ".cache", "terrace", "fs")}
	args := []string{"serve", "--primary", "16MiB"}
	port, hexPort := "9180", "23DC"
	if l, err := net.Listen("tcp", "127.0.0.1:9180"); err != nil {
		t.Logf("the default port is taken here (%v); another one is used", err)
		args = append(args, "--admin", ":0")
	} else {
		l.Close()
	}
	n := serveAs(t, at, terraceCommand(t, env, args...))
	if len(args) > 3 {
		_, port, _ = net.SplitHostPort(n.addr)
		var number int
		fmt.Sscan(port, &number)
		hexPort = fmt.Sprintf("%04X", number)
	}
	if n.addr != "127.0.0.1:"+port {
		t.Errorf("admin is at %s", n.addr)
	}
	n.engine("engine").do(Ask{ID: "1", Prompt: own("p", 4), Flush: time.Minute})
	want := []string{"tcp 0100007F:" + hexPort, "unix " + n.socket}
	if got := listeners(t, n.pid()); !slices.Equal(got, want) {
		t.Errorf("it listens on %v, want %v", got, want)
	}
	if st, err := os.Stat(n.socket); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("the socket is %v, %v", st.Mode(), err)
	}
	if st, err := os.Stat(at.root); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("the root is %v, %v", st.Mode(), err)
	}

	// Somebody else has the port.
	other := place(t)
	p := launch(t, "second node", terraceCommand(t, other.env, serveArgs(other, []string{"--admin", n.addr})...))
	if code := p.exit(bound()); code != 1 {
		t.Errorf("a taken port: exit code %d", code)
	}
	if log := p.stderr.String(); !strings.Contains(log, "admin.listen") || !strings.Contains(log, n.addr) || !strings.Contains(log, fmt.Sprint(n.pid())) {
		t.Errorf("a taken port: %s", log)
	}
	for _, left := range []string{other.socket, other.socket + ".lock"} {
		if _, err := os.Lstat(left); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", left, err)
		}
	}
}

// TestOneNodeOfTwo: of two that are started at once for one socket or one root,
// exactly one runs, and the other says which setting to change.
func TestOneNodeOfTwo(t *testing.T) {
	t.Parallel()
	rounds := often(3, 40)
	at := place(t)
	for round := range rounds {
		for _, x := range []struct {
			same string
			want *regexp.Regexp
			args [2][]string
		}{
			{"socket", regexp.MustCompile(`socket: \S+: another process serves there \(pid \d* .*set socket to another path`), [2][]string{{"--fs-root", at.root}, {"--fs-root", at.root + "2"}}},
			{"root", regexp.MustCompile(`tiers\.0.*root \S+ is in use by another node .*another root`), [2][]string{{"--socket", at.socket}, {"--socket", at.socket + "2"}}},
			{"both", regexp.MustCompile(`in use by another node|another process serves there`), [2][]string{}},
		} {
			var two [2]*process
			for i := range two {
				two[i] = launch(t, fmt.Sprintf("round %d, same %s, node %d", round, x.same, i), terraceCommand(t, at.env, serveArgs(at, x.args[i])...))
			}
			ready := func(p *process) bool { return strings.Contains(p.stdout.String(), "\nready ") }
			var loser, winner *process
			eventually(t, bound(), "one of two", func() error {
				for i := range two {
					if !two[i].running() {
						loser, winner = two[i], two[1-i]
					}
				}
				if loser == nil || !ready(winner) {
					return fmt.Errorf("ready: %v, %v; running: %v, %v", ready(two[0]), ready(two[1]), two[0].running(), two[1].running())
				}
				return nil
			})
			check := func(loser *process) {
				if code := loser.exit(bound()); code != 1 || !x.want.MatchString(loser.stderr.String()) || ready(loser) {
					t.Errorf("same %s: the loser ends with %d: %s", x.same, code, loser.stderr.String())
				}
			}
			check(loser)
			// In a race the winner may not yet have written who it is. One that
			// comes later is told.
			args := x.args[0]
			if winner == two[0] {
				args = x.args[1]
			}
			late := launch(t, "late node", terraceCommand(t, at.env, serveArgs(at, args)...))
			check(late)
			if log := late.stderr.String(); !strings.Contains(log, fmt.Sprintf("(pid %d ", winner.pid())) {
				t.Errorf("same %s: the loser does not say that %d has it: %s", x.same, winner.pid(), log)
			}
			n := &node{process: winner, socket: at.socket, root: at.root}
			if x.same == "root" && winner == two[1] {
				n.socket += "2"
			}
			n.ready()
			e := n.engine("engine")
			e.store("1", own("p", 4))
			e.goodbye()
			n.idle()
			n.stops(0)
		}
	}
}

// greeting is a valid hello.
func greeting() []byte {
	return wire.AppendFrame(nil, wire.TypeHello, 1, &wire.Hello{Versions: wire.Versions{Min: wire.VersionMin, Max: wire.VersionMax}, Engine: "garbage", Spec: spec(blockBytes)})
}

func frame(length uint32, rest ...byte) []byte {
	return append(binary.BigEndian.AppendUint32(nil, length), rest...)
}

// resident is the memory that a process has, in bytes.
func resident(t *testing.T, pid int) (bytes int64) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, what := range []string{"VmHWM:"} {
		_, rest, _ := strings.Cut(string(text), what)
		var kb int64
		if _, err := fmt.Sscan(rest, &kb); err != nil {
			t.Fatal(err)
		}
		bytes += kb << 10
	}
	return bytes
}

// TestGarbage: whatever arrives on the socket ends its connection and nothing
// else.
func TestGarbage(t *testing.T) {
	t.Parallel()
	n := serve(t, place(t), "--primary", "16MiB")
	good := n.engine("good")
	good.start(Load{Prefix: "good", Conversations: 30, Turn: 10, Parallel: 2})
	good.after(10)
	before := resident(t, n.pid())
	rng := random(t)
	random := func(length int) []byte {
		b := make([]byte, length)
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		return b
	}
	lookup := wire.AppendFrame(nil, wire.TypeLookup, 2, &wire.Lookup{Request: "none"})
	cases := map[string]struct {
		send  []byte
		ended bool // the node ends the connection by itself
	}{
		"nothing":                      {nil, true}, // not even a hello
		"a byte":                       {[]byte{0}, true},
		"random":                       {random(64 << 10), true},
		"http":                         {[]byte("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), true},
		"length 0":                     {frame(0), true},
		"length 1 GiB":                 {append(frame(1<<30, byte(wire.TypeHello)), random(1<<20)...), true},
		"length of all ones":           {frame(1<<32 - 1), true},
		"part of a hello":              {greeting()[:40], true},
		"call before hello":            {lookup, true},
		"hello, random":                {append(greeting(), random(64<<10)...), true},
		"hello, length 1 GiB":          {append(greeting(), frame(1<<30)...), true},
		"hello, unknown type":          {append(greeting(), frame(6, 0x6e, 0, 0, 0, 9, 0x90)...), false},
		"hello, hello":                 {append(greeting(), greeting()...), false},
		"hello, part of a lookup":      {append(greeting(), lookup[:9]...), false}, // an engine that hangs hangs alone
		"hello, length 8 MiB, nothing": {append(greeting(), frame(8<<20, byte(wire.TypeLookup))...), false},
	}
	for i := range 20 {
		// A valid frame with one byte changed.
		b := append(greeting(), lookup...)
		b[rng.IntN(len(b))] ^= byte(1 + rng.IntN(255))
		cases[fmt.Sprintf("flipped %d", i)] = struct {
			send  []byte
			ended bool
		}{b, false}
	}
	var wg sync.WaitGroup
	results := make(chan string, len(cases))
	open := make(chan net.Conn, len(cases))
	for _, name := range slices.Sorted(maps.Keys(cases)) {
		c := cases[name]
		wg.Go(func() {
			conn, err := net.Dial("unix", n.socket)
			if err != nil {
				results <- fmt.Sprintf("%s: %v", name, err)
				return
			}
			_ = conn.SetDeadline(time.Now().Add(bound()))
			_, _ = conn.Write(c.send) // the node may hang up before it has read all
			if !c.ended {
				open <- conn
				return
			}
			defer conn.Close()
			if _, err := io.Copy(io.Discard, conn); errors.Is(err, os.ErrDeadlineExceeded) {
				results <- fmt.Sprintf("%s: the node has not ended the connection", name)
			}
		})
	}
	wg.Wait()
	close(results)
	close(open)
	for r := range results {
		t.Error(r)
	}
	// With those that hang still there, all works.
	good.after(10)
	fresh := n.engine("fresh")
	fresh.store("1", own("fresh", 10))
	fresh.goodbye()
	if after := resident(t, n.pid()); after-before > 100<<20 && !raceEnabled {
		t.Errorf("the node's memory went from %d to %d bytes", before, after)
	}
	for conn := range open {
		conn.Close()
	}
	r := good.finish()
	if limit := bound() / 6; r.Lost > 0 || r.LongestMS > int(limit.Milliseconds()) {
		t.Errorf("the good engine: %d sessions lost, longest request %d ms", r.Lost, r.LongestMS)
	}
	good.goodbye()
	n.idle()
}

// TestCrowd: connections that say nothing take no engine's place for long, and
// neither do those to the admin server.
func TestCrowd(t *testing.T) {
	t.Parallel()
	n := serve(t, place(t))
	good := n.engine("good")
	good.start(Load{Prefix: "good", Conversations: 30, Turn: 10, Parallel: 2})
	var conns []net.Conn
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	for range 200 {
		for _, at := range [][2]string{{"unix", n.socket}, {"tcp", n.addr}} {
			c, err := net.Dial(at[0], at[1])
			if err != nil {
				t.Fatal(err)
			}
			conns = append(conns, c)
		}
	}
	good.after(10)
	// Those are turned away, or ended when they do not greet.
	e := newEngine(t, engineArgs{Socket: n.socket, Name: "late", BlockBytes: blockBytes})
	eventually(t, bound(), "another engine", func() error { return e.call("Dial", 3*time.Second, &client.Info{}) })
	e.store("1", own("late", 4))
	eventually(t, bound(), "admin server", func() error { _, err := n.get("/healthz"); return err })
	if r := good.finish(); r.Lost > 0 {
		t.Error("the good engine has lost its session")
	}
	good.goodbye()
	e.goodbye()
	n.idle()
}

// limit sets how many descriptors a node may have.
func (n *node) limit(files uint64) {
	n.t.Helper()
	var old unix.Rlimit
	err := unix.Prlimit(n.pid(), unix.RLIMIT_NOFILE, nil, &old)
	if err == nil {
		err = unix.Prlimit(n.pid(), unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: files, Max: old.Max}, nil)
	}
	if err != nil {
		n.t.Fatal(err)
	}
}

// TestDescriptorsRunOut: a node without free descriptors fails what needs
// one, says so, and recovers.
func TestDescriptorsRunOut(t *testing.T) {
	t.Parallel()
	n := serve(t, place(t), "--primary", "16MiB", "--set", "core.distrust_for=500ms")
	var old unix.Rlimit
	if err := unix.Prlimit(n.pid(), unix.RLIMIT_NOFILE, nil, &old); err != nil {
		t.Fatal(err)
	}
	good := n.engine("good")
	p := own("p", 30)
	good.store("p", p)
	good.reset()
	// Numbers below those in use are all that a new one could have.
	n.limit(3)
	good.start(Load{Prefix: "good", Conversations: 30, Turn: 10, Parallel: 2})
	good.after(10)
	if got := good.do(Ask{ID: "p", Prompt: p, LoadOnly: true}); got.Hits > 0 {
		t.Errorf("%d blocks were read without a descriptor", got.Hits)
	}
	// An engine that comes now is told something, and soon.
	late := newEngine(t, engineArgs{Socket: n.socket, Name: "late", BlockBytes: blockBytes})
	begin := time.Now()
	err := late.call("Dial", 3*time.Second, &client.Info{})
	t.Logf("greeting without descriptors: %v after %v", err, time.Since(begin))
	if err == nil {
		t.Error("an engine was greeted without a descriptor")
	}
	n.limit(old.Cur)
	n.cause("descriptors")
	n.writes(good, "again")
	eventually(t, bound(), "hits", func() error {
		if got := good.do(Ask{ID: "p later", Prompt: p, LoadOnly: true}); got.Hits != 30 {
			return fmt.Errorf("%d of 30: %v", got.Hits, got.Verdicts)
		}
		return nil
	})
	eventually(t, bound(), "another engine", func() error { return late.call("Dial", 3*time.Second, &client.Info{}) })
	if r := good.finish(); r.Lost > 0 {
		t.Error("the good engine has lost its session")
	}
	if log := n.stderr.String(); !strings.Contains(log, "too many open files") {
		t.Error("the log says nothing")
	}
	good.goodbye()
	late.goodbye()
	n.idle()
	n.exact()
	checkRoot(t, n)
}

// TestFewDescriptors: a node that starts with few of them serves what it can.
func TestFewDescriptors(t *testing.T) {
	t.Parallel()
	at := place(t)
	a := wrapArgs{Files: 28, Node: append([]string{terracePath}, serveArgs(at, []string{"--primary", "16MiB"})...)}
	n := serveAs(t, at, wrapCommand(t, at.env, a))
	var engines []*engine
	refused := 0
	for i := range 20 {
		e := newEngine(t, engineArgs{Socket: n.socket, Name: fmt.Sprint("engine ", i), BlockBytes: blockBytes})
		err := e.call("Dial", 3*time.Second, &client.Info{})
		if err != nil {
			refused++
			// It is told why. Where not even the connection can be accepted,
			// the engine's own bound is what ends it.
			if !strings.Contains(err.Error(), "too many open files") && !failedWith(err, "deadline") {
				t.Errorf("engine %d is not told why it is not greeted: %v", i, err)
			}
			e.kill()
			if refused == 3 {
				break
			}
			continue
		}
		e.start(Load{Prefix: "few", Seed: uint64(i), Conversations: 30, Turn: 8})
		engines = append(engines, e)
	}
	t.Logf("%d engines, %d refused", len(engines), refused)
	if refused == 0 || len(engines) < 5 {
		t.Errorf("%d engines were served, %d refused, with 28 descriptors", len(engines), refused)
	}
	for _, e := range engines {
		if r := e.finish(); r.Lost > 0 {
			t.Errorf("engine %s has lost its session", e.args.Name)
		}
		e.goodbye()
	}
	n.idle()
	n.exact()
	n.stops(0) // the tier may be resting from its failures
	n = serve(t, at)
	n.scanned()
	n.exact()
	checkRoot(t, n)
}
