package object

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/terrace-kv/terrace"
	"github.com/terrace-kv/terrace/client"
	nodes "github.com/terrace-kv/terrace/internal/node"
	"github.com/terrace-kv/terrace/test/object/s3server"
)

// programDir is where the program is built; TestMain makes and removes it.
var programDir string

// program is the terrace binary, built once.
var program = sync.OnceValues(func() (string, error) {
	path := filepath.Join(programDir, "terrace")
	if text, err := exec.Command("go", "build", "-C", "../..", "-o", path, "./cmd/terrace").CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, text)
	}
	return path, nil
})

// run runs a command line of the program to its end.
func (s *store) run(args ...string) (code int, out string) {
	s.t.Helper()
	path, err := program()
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(s.t.Context(), waitMax)
	defer cancel()
	text, err := exec.CommandContext(ctx, path, args...).CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		s.t.Fatal(err)
	}
	s.silent("terrace "+args[0], string(text))
	if exit != nil {
		return exit.ExitCode(), string(text)
	}
	return 0, string(text)
}

// daemon is a terrace serve.
type daemon struct {
	cmd           *exec.Cmd
	out           *logs
	done          chan error
	admin, socket string
}

// config writes settings with a bucket, keys and all.
func (s *store) config(required bool) (path, admin, socket string) {
	s.t.Helper()
	admin, err := s3server.FreePort()
	if err != nil {
		s.t.Fatal(err)
	}
	dir := s.t.TempDir()
	path, socket = filepath.Join(dir, "terrace.yaml"), filepath.Join(dir, "s")
	text := fmt.Sprintf(`
socket: %s
primary: {size: 16MiB}
admin: {listen: %q}
tiers:
  - {type: object, required: %v, bucket: %s, endpoint: %q, scheme: %s, region: %s, access_key: %s, secret_key: %q, prefix: team/b}
`, socket, admin, required, bucket, s.o.Endpoint, s.o.Scheme, s.o.Region, s.o.AccessKey, s.o.SecretKey)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		s.t.Fatal(err)
	}
	return path, admin, socket
}

// serve starts the program and waits until its admin server answers.
func (s *store) serve(required bool) *daemon {
	s.t.Helper()
	path, admin, socket := s.config(required)
	bin, err := program()
	if err != nil {
		s.t.Fatal(err)
	}
	d := &daemon{cmd: exec.Command(bin, "serve", "--config", path, "--log-level", "debug"), out: &logs{}, done: make(chan error, 1), admin: admin, socket: socket}
	d.cmd.Stdout, d.cmd.Stderr = d.out, d.out
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := d.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	go func() { d.done <- d.cmd.Wait() }()
	s.t.Cleanup(func() {
		_ = d.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case err := <-d.done:
			if err != nil {
				s.t.Errorf("the node: %v", err)
			}
		case <-time.After(waitMax):
			_ = d.cmd.Process.Kill()
			<-d.done
			s.t.Error("the node did not end")
		}
		s.silent("the node's log", d.out.String())
		if s.t.Failed() {
			s.t.Logf("the node said:\n%s", tail(d.out.String(), 8<<10))
		}
	})
	eventually(s.t, waitMax, "a node", func() error { _, err := d.ask("/healthz"); return err })
	return d
}

func (d *daemon) ask(path string) (string, error) {
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 10 * time.Second}
	resp, err := c.Get("http://" + d.admin + path)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", path, resp.Status, b)
	}
	return string(b), err
}

func (d *daemon) status(t *testing.T) (st terrace.Status) {
	t.Helper()
	text, err := d.ask("/v1/status")
	if err == nil {
		err = json.Unmarshal([]byte(text), &st)
	}
	if err != nil {
		t.Fatal(err)
	}
	return st
}

// The program with a bucket in its settings: blocks go there and come back,
// nobody is told the keys, and wrong ones are one message and no node.
func TestProgram(t *testing.T) {
	s := versity(t, false)
	path, _, _ := s.config(true)
	for _, args := range [][]string{{"config", "print", "--config", path}, {"config", "check", path}} {
		if code, out := s.run(args...); code != 0 {
			t.Errorf("%v: exit code %d: %s", args, code, out)
		}
	}
	d := s.serve(true)
	code, out := s.run("replay", "--synthetic", "--requests", "60", "--block-bytes", "64KiB", "--socket", d.socket)
	if code != 0 {
		t.Fatalf("replay: exit code %d: %s", code, out)
	}
	st := d.status(t)
	if f := of(&st, "object"); f.Hits == 0 || f.WrittenBlocks == 0 || total(f.Failures) != 0 {
		t.Errorf("%+v", f)
	}
	for _, path := range []string{"/v1/status", "/metrics", "/v1/pins"} {
		text, err := d.ask(path)
		if err != nil {
			t.Error(err)
		}
		s.silent(path, text)
	}
	if len(s.list()) < 100 {
		t.Errorf("%d objects", len(s.list()))
	}
	s.o.SecretKey = "secret-that-is-wrong"
	s.secrets = append(s.secrets, s.o.SecretKey)
	path, _, _ = s.config(true)
	code, out = s.run("serve", "--config", path)
	t.Logf("with a wrong key: exit code %d: %s", code, out)
	if code == 0 || !strings.Contains(out, "credentials") || strings.Count(strings.TrimSpace(out), "\n") > 1 {
		t.Error("that is no single message")
	}
}

// A node whose bucket is not there yet serves without it, and takes it in when
// it is.
func TestBucketComesLate(t *testing.T) {
	s := versity(t, false)
	s.versity.Kill()
	d := s.serve(false)
	c, err := client.Dial(t.Context(), client.Options{Socket: d.socket, Spec: spec(4096), Engine: "test"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	n := &node{t: t, store: s, c: c, ns: namespace(t, 4096)}
	if st, err := n.put(t.Context(), keys("early", 4), false); err != nil || st.Stored != 4 {
		t.Errorf("without the bucket: %+v, %v", st, err)
	}
	if hits, err := n.get(t.Context(), keys("early", 4), 0); err != nil || hits != 4 {
		t.Errorf("without the bucket: %d hits, %v", hits, err)
	}
	st := d.status(t)
	t.Logf("status without it: %+v", *of(&st, "object"))
	if err := s.versity.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	var f nodes.TierStatus
	eventually(t, waitMax, "the bucket in use", func() error {
		if _, err := n.put(t.Context(), keys(fmt.Sprint("late ", time.Since(began)), 4), false); err != nil {
			return err
		}
		st := d.status(t)
		if f = *of(&st, "object"); f.WrittenBlocks == 0 || !strings.Contains(f.Mode, "conditional") {
			return fmt.Errorf("%+v", f)
		}
		return nil
	})
	t.Logf("in use %v after the server came: %s", time.Since(began).Round(time.Millisecond), f.Mode)
	if len(s.list()) == 0 {
		t.Error("the bucket is empty")
	}
}
