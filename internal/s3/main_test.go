package s3

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"go.uber.org/goleak"

	"github.com/terrace-kv/terrace/internal/s3/s3test"
)

// Environment of this binary as a process of its own.
const (
	benchServer = "TERRACE_S3_BENCH_SERVER" // serveRaw, with objects of so many bytes
	putThrough  = "TERRACE_S3_PUT"          // one Put to store.test
)

func TestMain(m *testing.M) {
	switch {
	case os.Getenv(benchServer) != "":
		serveRaw(os.Getenv(benchServer))
	case os.Getenv(putThrough) != "":
		o := options(nil)
		o.Endpoint, o.AccessKey = "store.test", s3test.AccessKey
		c, err := New(o)
		if err == nil {
			_, err = c.Put(context.Background(), "k", NewBody([]byte("x")), PutOptions{})
		}
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	default:
		goleak.VerifyTestMain(m)
	}
}

// self is this binary with that in its environment.
func self(ctx context.Context, env ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(os.Environ(), env...)
	return cmd
}
