// Demo shows the object tier at work without an account anywhere: it builds an
// S3 server and a node, starts both in a folder that it removes again, and
// sends traffic until it is interrupted.
//
// It has one child process at a time besides the server and the node, waits for
// all three, and ends them in this order: traffic, node, server.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/terrace-kv/terrace/test/object/s3server"
)

const (
	bucket      = "terrace-demo"
	stopTimeout = 60 * time.Second // of the node, which drains for 30 s at most
)

// config is the node's. The keys of the bucket come from its environment.
const config = `# A node with 64 MiB of memory and a bucket below it.
socket: %[1]s/engine.sock
primary:
  size: 64MiB
admin:
  listen: %[2]s
tiers:
  - type: object
    required: true
    bucket: %[3]s
    endpoint: %[4]s
    scheme: http
    region: us-east-1
`

func main() {
	runs := flag.Int("runs", 0, "replays to run, 0 until interrupted")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Stdout, *runs, flag.Args()...); err != nil {
		fmt.Fprintln(os.Stderr, "object-demo:", err)
		os.Exit(1)
	}
}

// run is the demo. Each replay gets the flags more.
func run(ctx context.Context, out io.Writer, runs int, more ...string) (err error) {
	dir, err := os.MkdirTemp("", "terrace-object-demo-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	say := func(format string, a ...any) { fmt.Fprintf(out, format+"\n", a...) }

	say("Building the S3 server, which takes a minute the first time, and the node.")
	if _, err := s3server.Build(); err != nil {
		return err
	}
	_, here, _, _ := runtime.Caller(0)
	node := filepath.Join(dir, "terrace")
	if text, err := exec.CommandContext(ctx, "go", "build", "-C", filepath.Join(filepath.Dir(here), "../../.."), "-o", node, "./cmd/terrace").CombinedOutput(); err != nil {
		return interrupted(ctx, fmt.Errorf("building the node: %w\n%s", err, text))
	}
	server, err := s3server.Open(ctx, s3server.Options{Dir: filepath.Join(dir, "s3")})
	if err != nil {
		return interrupted(ctx, err)
	}
	defer server.Kill()
	if err := server.MakeBucket(bucket); err != nil {
		return err
	}
	admin, err := s3server.FreePort()
	if err != nil {
		return err
	}
	path, log := filepath.Join(dir, "terrace.yaml"), filepath.Join(dir, "node.log")
	text := fmt.Sprintf(config, dir, admin, bucket, server.Endpoint)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		return err
	}
	end, err := serve(ctx, node, path, log, admin, server)
	if err != nil {
		return interrupted(ctx, err)
	}
	defer func() { err = errors.Join(err, end()) }()

	say(`
A node serves with these settings:

  %s

Its status:     curl http://%[2]s/v1/status
  or:           %[3]s status --admin http://%[2]s
Its metrics:    curl -s http://%[2]s/metrics | grep terrace_tier
Its log:        %[4]s
The bucket:     find %[5]s -type f
  or:           AWS_ACCESS_KEY_ID=%[6]s AWS_SECRET_ACCESS_KEY=%[7]s aws --endpoint-url %[8]s s3 ls --recursive s3://%[9]s

Traffic: chats whose blocks need about twice the memory, so that old ones come back from the bucket; every byte is
checked. Ctrl-C ends it all and leaves nothing behind.
`, strings.ReplaceAll(strings.TrimRight(text, "\n"), "\n", "\n  "), admin, node, log, filepath.Join(server.Data, bucket), server.AccessKey, server.SecretKey, server.URL(), bucket)

	for i := 1; runs == 0 || i <= runs; i++ {
		args := append([]string{"replay", "--synthetic", "--seed", fmt.Sprint(i), "--socket", filepath.Join(dir, "engine.sock")}, more...)
		cmd := exec.CommandContext(ctx, node, args...)
		cmd.Stdout, cmd.Stderr = out, out
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
		cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
		cmd.WaitDelay = stopTimeout
		if err := cmd.Run(); err != nil {
			return interrupted(ctx, fmt.Errorf("replay: %w", err))
		}
		say("")
	}
	return nil
}

// interrupted is no error: that is how a demo ends.
func interrupted(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// serve starts the node and returns when it is ready. end stops it in order.
func serve(ctx context.Context, node, config, log, admin string, s *s3server.Server) (end func() error, err error) {
	f, err := os.Create(log)
	if err != nil {
		return nil, err
	}
	defer f.Close() // the child has its own
	cmd := exec.Command(node, "serve", "--config", config)
	cmd.Stdout, cmd.Stderr = f, f
	cmd.Env = append(os.Environ(), "AWS_ACCESS_KEY_ID="+s.AccessKey, "AWS_SECRET_ACCESS_KEY="+s.SecretKey)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	var ended error // once done is closed
	done := make(chan struct{})
	go func() {
		defer close(done)
		ended = cmd.Wait()
	}()
	end = func() error {
		_ = cmd.Process.Signal(syscall.SIGTERM) // it may have ended
		select {
		case <-done:
			if ended != nil {
				return fmt.Errorf("the node: %w\n%s", ended, tail(log))
			}
			return nil
		case <-time.After(stopTimeout):
			_ = cmd.Process.Kill()
			<-done
			return fmt.Errorf("the node did not end within %v and was killed\n%s", stopTimeout, tail(log))
		}
	}
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		if resp, err := http.Get("http://" + admin + "/readyz"); err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return end, nil
			}
		}
		select {
		case <-tick.C:
		case <-done:
			return nil, fmt.Errorf("the node ended: %s\n%s", cmd.ProcessState, tail(log))
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), end())
		}
	}
}

// tail is the end of a log.
func tail(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	return string(b[max(0, len(b)-4<<10):])
}
