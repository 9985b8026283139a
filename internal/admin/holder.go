package admin

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Holder says who listens on the port of addr, as far as /proc shows it to us:
// " by pid 7 (terrace)", or nothing.
func Holder(addr string) string {
	_, text, err := net.SplitHostPort(addr)
	port, err2 := strconv.Atoi(text)
	if err != nil || err2 != nil {
		return ""
	}
	for _, table := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		if inode := listening(table, port); inode != "" {
			return owner("socket:[" + inode + "]")
		}
	}
	return ""
}

// listening finds the inode of a listening socket in a table of the kernel's:
// "sl local_address rem_address st … inode", the port in hexadecimal.
func listening(table string, port int) string {
	f, err := os.Open(table)
	if err != nil {
		return ""
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		col := strings.Fields(lines.Text())
		if len(col) > 9 && col[3] == "0A" && strings.HasSuffix(col[1], fmt.Sprintf(":%04X", port)) {
			return col[9]
		}
	}
	return ""
}

// owner finds the process that has the link open. Processes of other users do
// not show theirs.
func owner(link string) string {
	fds, _ := filepath.Glob("/proc/[0-9]*/fd/*")
	for _, fd := range fds {
		if to, err := os.Readlink(fd); err == nil && to == link {
			pid := strings.Split(fd, "/")[2]
			name, _ := os.ReadFile("/proc/" + pid + "/comm")
			return fmt.Sprintf(" by pid %s (%s)", pid, strings.TrimSpace(string(name)))
		}
	}
	return ""
}
