package fstier

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minio/crc64nvme"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/content"
	"github.com/terrace-kv/terrace/internal/vfs"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/tiertest"
)

const killCapacity = 16 << 20

// writerMain is another process: it writes blocks with several workers until
// it is killed, and prints the number of each block that Write has done.
func writerMain(dir string) {
	ns, err := block.ParseNamespace([]byte(os.Getenv("FSTIER_TEST_NAMESPACE")))
	if err != nil {
		fmt.Println("FAILED", err)
		os.Exit(1)
	}
	o := Options{Root: dir, MinFree: -1, Capacity: killCapacity, Logger: slog.New(slog.DiscardHandler)}
	if os.Getenv("FSTIER_TEST_RENAME") != "" {
		under, err := vfs.OpenRoot(dir)
		if err != nil {
			fmt.Println("FAILED", err)
			os.Exit(1)
		}
		o.FS = &vfs.Faulty{FS: under, Hook: modes["rename"]}
	}
	t, err := Open(context.Background(), o)
	if err != nil {
		fmt.Println("FAILED", err)
		os.Exit(1)
	}
	var first int
	_, _ = fmt.Sscan(os.Getenv("FSTIER_TEST_FIRST"), &first)
	var mu sync.Mutex
	next := first
	for range 4 {
		go func() {
			for {
				mu.Lock()
				i := next
				next++
				mu.Unlock()
				group := uint32(i % 3)
				buf, err := unix.Mmap(-1, 0, int(padded(ns.BlockBytes(group))), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
				if err != nil {
					fmt.Println("FAILED", err)
					os.Exit(1)
				}
				it := []tier.Item{{Key: tiertest.Key(i, group), Buf: buf[:ns.BlockBytes(group)]}}
				content.Fill(ns.Fingerprint(), it[0].Key, it[0].Buf)
				it[0].Sum = crc64nvme.Checksum(it[0].Buf)
				t.Write(context.Background(), ns, it)
				_ = unix.Munmap(buf)
				switch {
				case it[0].Err == nil:
					fmt.Println(i)
				case tier.CauseOf(it[0].Err) != tier.CauseScanning:
					fmt.Println("FAILED", it[0].Err)
					os.Exit(1)
				}
			}
		}()
	}
	select {}
}

// A writer is killed at any moment, again and again. Each time everything that
// it was told is done is there and right, unless evicted for room; nothing
// half-done is visible or left behind; the capacity held; the count is exact.
func TestKill(t *testing.T) {
	for _, mode := range []string{"tmpfile", "rename"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			root := t.TempDir()
			ns := tiertest.Namespace(t, "kill")
			first := 1
			done := map[int]bool{}
			for round := range 6 {
				cmd := exec.Command(os.Args[0])
				cmd.Env = append(os.Environ(), "FSTIER_TEST_WRITER="+root, fmt.Sprint("FSTIER_TEST_FIRST=", first),
					"FSTIER_TEST_NAMESPACE="+string(ns.JSON()))
				if mode == "rename" {
					cmd.Env = append(cmd.Env, "FSTIER_TEST_RENAME=1")
				}
				var stderr bytes.Buffer
				cmd.Stderr = &stderr
				out, err := cmd.StdoutPipe()
				if err != nil {
					t.Fatal(err)
				}
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				// Killed after some acknowledgements and a little more, so that
				// the moment differs from round to round.
				kill := func() { _ = cmd.Process.Kill() }
				lines := bufio.NewScanner(out)
				acked := 0
				for lines.Scan() {
					if strings.HasPrefix(lines.Text(), "FAILED") {
						t.Errorf("round %d: the writer: %s", round, lines.Text())
						break
					}
					var i int
					if _, err := fmt.Sscan(lines.Text(), &i); err != nil {
						continue // cut off by the kill
					}
					done[i] = true
					first = max(first, i+100)
					if acked++; acked == 20+37*round {
						time.AfterFunc(time.Duration(round*700)*time.Microsecond, kill)
					}
				}
				kill()
				_ = cmd.Wait()
				if t.Failed() {
					t.Fatalf("stderr: %s", stderr.String())
				}
				checkAfterKill(t, root, ns, done, 4*(round+1))
			}
			if len(done) < 300 {
				t.Errorf("only %d blocks were written", len(done))
			}
		})
	}
}

func checkAfterKill(t *testing.T, root string, ns *block.Namespace, done map[int]bool, extraMax int) {
	t.Helper()
	if n := du(t, root); n > killCapacity {
		t.Errorf("the dead writer left %d bytes, more than the capacity", n)
	}
	o := quiet(opts(t, root, nil))
	o.Capacity = killCapacity
	tr := open(t, o)
	defer closeTier(t, tr)
	// A bound is known before the scan is.
	if s := tr.Stats(); !s.ScanDone && s.UsedBytes < 1<<20 {
		t.Errorf("before the scan, %d bytes are said to be used", s.UsedBytes)
	}
	<-tr.ScanDone()
	wantExact(t, tr)
	if left, _ := filepath.Glob(root + "/tmp/*"); len(left) != 0 {
		t.Errorf("temporary files are left: %v", left)
	}
	if s := tr.Stats(); s.SetAside != 0 {
		t.Errorf("%d broken files were visible", s.SetAside)
	}
	missing, visible := 0, int64(0)
	for i := range done {
		it := []tier.Item{{Key: tiertest.Key(i, uint32(i%3)), Buf: tiertest.Buffer(t, ns.BlockBytes(uint32(i%3)))}}
		tr.Read(t.Context(), ns, it)
		if tier.ClassOf(it[0].Err) == tier.ClassNotFound {
			missing++
			delete(done, i)
			continue
		}
		visible++
		if err := tiertest.Check(ns, &it[0]); err != nil {
			t.Errorf("block %d: %v", i, err)
		}
	}
	// What is there and was not acknowledged was cut off after it was
	// published: at most one a worker and round.
	if extra := tr.Stats().Blocks - visible; extra < 0 || extra > int64(extraMax) {
		t.Errorf("%d blocks are there that nobody wrote", extra)
	}
	// Eviction takes blocks only when there is no room.
	if free := killCapacity - tr.Stats().UsedBytes; missing > 0 && free > 1<<20 {
		t.Errorf("%d acknowledged blocks are gone while %d bytes are free", missing, free)
	}
}
