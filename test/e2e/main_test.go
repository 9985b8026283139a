package e2e

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// roleEnv makes the test binary another program. Not with TERRACE_: those are
// settings, and unknown ones are refused.
const roleEnv = "E2E_ROLE"

var (
	seedFlag    = flag.Uint64("seed", 0, "seed of random choices; 0 takes one from the clock")
	terracePath string // terrace, built by TestMain
	soak        = os.Getenv("TERRACE_SOAK") != ""
)

func TestMain(m *testing.M) {
	switch role := os.Getenv(roleEnv); role {
	case "":
	case "engine":
		engineMain()
	case "worker":
		workerMain()
	case "wrap":
		wrapMain()
	case "faulty":
		faultyMain()
	default:
		fatal(fmt.Errorf("unknown role %q", role))
	}
	flag.Parse()
	os.Exit(build(m))
}

// build makes the binary, in a folder that goes with the tests, and runs them.
func build(m *testing.M) int {
	dir, err := os.MkdirTemp("", "terrace-e2e-")
	if err != nil {
		fatal(err)
	}
	defer os.RemoveAll(dir)
	terracePath = filepath.Join(dir, "terrace")
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	args := []string{"build", "-o", terracePath}
	if raceEnabled {
		args = append(args, "-race")
	}
	cmd := exec.CommandContext(ctx, "go", append(args, "./cmd/terrace")...)
	cmd.Dir = filepath.Join("..", "..")
	if out, err := cmd.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "go build: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}

// fatal ends a role that cannot go on.
func fatal(err error) {
	fmt.Fprintln(os.Stderr, "e2e:", err)
	os.Exit(1)
}

// bound is how long something may take that is over at once on an idle
// machine. It is generous: tests share their cores, and what it catches is what
// never happens.
func bound() time.Duration {
	if raceEnabled {
		return 60 * time.Second
	}
	return 30 * time.Second
}

// often is how often to do something: less under the race detector, which
// makes everything slow, and more in a soak.
func often(plain, soaking int) int {
	switch {
	case soak:
		return soaking
	case raceEnabled:
		return max(1, plain/2)
	}
	return plain
}

// eventually polls until cond answers nil, or the bound passes.
func eventually(t testing.TB, within time.Duration, what string, cond func() error) {
	t.Helper()
	deadline := time.Now().Add(within)
	tick := time.NewTicker(3 * time.Millisecond)
	defer tick.Stop()
	for {
		err := cond()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %v: %v", what, within, err)
		}
		<-tick.C
	}
}

// random gives a source whose seed is printed when the test fails.
func random(t *testing.T) *rand.Rand {
	seed := *seedFlag
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("-seed %d repeats the choices of this run", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// trace is a file of TERRACE_TESTDATA.
func trace(t *testing.T, name string) string {
	t.Helper()
	dir := os.Getenv("TERRACE_TESTDATA")
	if dir == "" {
		t.Skipf("needs %s: TERRACE_TESTDATA is not set", name)
	}
	path := filepath.Join(dir, name)
	if _, err := os.Stat(path); err != nil {
		t.Skipf("needs %s: %v", name, err)
	}
	return path
}

// home is the environment of a user who has nothing yet.
func home(t *testing.T) (dir string, env []string) {
	t.Helper()
	dir = t.TempDir()
	for _, sub := range []string{"run", "tmp"} {
		if err := os.Mkdir(filepath.Join(dir, sub), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return dir, []string{"HOME=" + dir, "XDG_RUNTIME_DIR=" + filepath.Join(dir, "run"), "TMPDIR=" + filepath.Join(dir, "tmp"),
		"PATH=" + os.Getenv("PATH"), "GORACE=atexit_sleep_ms=0"}
}

// du is the room that the regular files under root take.
func du(t testing.TB, root string) (bytes int64) {
	t.Helper()
	err := walk(root, func(_ string, st *syscall.Stat_t) {
		if st.Mode&syscall.S_IFMT == syscall.S_IFREG {
			bytes += st.Blocks * 512
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return bytes
}

// walk shows all that is under root, links themselves and not what they lead
// to. What goes away meanwhile is left out.
func walk(root string, fn func(path string, st *syscall.Stat_t)) error {
	return filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		var st syscall.Stat_t
		if err == nil {
			err = syscall.Lstat(path, &st)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil {
			fn(path, &st)
		}
		return err
	})
}

// blockFiles lists the block files of all namespaces of a root.
func blockFiles(t testing.TB, root string) (paths []string) {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(root, strings.Repeat("[0-9a-f]", 64), "[0-9a-f][0-9a-f]", strings.Repeat("[0-9a-f]", 72)))
	if err != nil {
		t.Fatal(err)
	}
	return paths
}
