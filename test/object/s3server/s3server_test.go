package s3server

import (
	"errors"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
)

// A server answers, dies, and comes back in its place with what it had.
func TestServer(t *testing.T) {
	for _, tls := range []bool{false, true} {
		s := Start(t, Options{TLS: tls})
		if err := s.MakeBucket("b"); err != nil {
			t.Fatal(err)
		}
		at, pid := s.Endpoint, s.PID()
		s.Kill()
		if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
			t.Errorf("process %d: %v after a kill", pid, err)
		}
		if c, err := net.Dial("tcp", at); err == nil {
			_ = c.Close()
			t.Error("somebody listens after a kill")
		}
		if err := s.Restart(t.Context()); err != nil || s.Endpoint != at || !s.answers(t.Context()) {
			t.Fatalf("restart at %s: at %s, %v", at, s.Endpoint, err)
		}
		if _, err := os.Stat(s.Data + "/b"); err != nil {
			t.Error(err)
		}
		if err := s.Stop(); err != nil || s.answers(t.Context()) {
			t.Errorf("stop: %v", err)
		}
	}
}

// A port that is taken is an error with what the server says of it.
func TestServerWithoutAPort(t *testing.T) {
	s := Start(t, Options{})
	s.Kill()
	l, err := net.Listen("tcp", s.Endpoint)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := s.Restart(t.Context()); err == nil || !strings.Contains(err.Error(), "in use") || s.PID() != 0 {
		t.Errorf("%v", err)
	}
}
