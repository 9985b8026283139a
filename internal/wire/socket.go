package wire

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
)

// SocketEnv overrides the default socket.
const SocketEnv = "TERRACE_SOCKET"

const socketName = "engine.sock"

// DefaultSocket is where a node listens and engines connect when no setting
// says otherwise: $TERRACE_SOCKET; $XDG_RUNTIME_DIR/terrace/engine.sock;
// /run/terrace/engine.sock for root; else engine.sock in a folder of the
// user's under the temp directory. Since anybody may have made that
// folder, it is an error when it exists and is not the user's alone. Nothing is
// created.
func DefaultSocket() (string, error) {
	return defaultSocket(os.Getenv, os.TempDir(), os.Geteuid())
}

func defaultSocket(env func(string) string, temp string, uid int) (string, error) {
	if path := env(SocketEnv); path != "" {
		return path, nil
	}
	// A relative XDG_RUNTIME_DIR is invalid by its specification.
	if dir := env("XDG_RUNTIME_DIR"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "terrace", socketName), nil
	}
	if uid == 0 {
		return "/run/terrace/" + socketName, nil
	}
	dir := filepath.Join(temp, "terrace-"+strconv.Itoa(uid))
	switch fi, err := os.Lstat(dir); {
	case os.IsNotExist(err):
	case err != nil:
		return "", fmt.Errorf("socket: look at the default folder: %w; set socket or %s", err, SocketEnv)
	default:
		st, ok := fi.Sys().(*syscall.Stat_t)
		if !fi.IsDir() || !ok || int(st.Uid) != uid || fi.Mode().Perm()&0o077 != 0 {
			return "", fmt.Errorf("socket: the default folder %s (%v) is not a folder that only user %d can use; remove it, or set socket or %s",
				dir, fi.Mode(), uid, SocketEnv)
		}
	}
	return filepath.Join(dir, socketName), nil
}
