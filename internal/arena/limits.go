package arena

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
)

// keepBytes is what the node needs beside the region: page tables (8 bytes a
// page of 4096) and a small heap. It is no promise, only the line below which
// the kernel is sure to kill the node while it populates.
func keepBytes(size int64) int64 { return size/512 + keepHeap }

const keepHeap = 32 << 20

// sizeMax is the largest size for which region and keepBytes fit into free
// bytes, or 0.
func sizeMax(free int64) int64 { return max(free-keepHeap, 0) / 513 * 512 / align * align }

// checkMemory refuses a region that cannot be populated. Files that are
// absent or unreadable set no limit: the check spares an operator a killed
// process, it is not what keeps anybody safe.
func checkMemory(o *Options) error {
	check := func(free int64, hint, format string, args ...any) error {
		if free = max(free, 0); o.Size <= free-keepBytes(o.Size) {
			return nil
		}
		most := sizeMax(free)
		return &LimitError{Size: o.Size, Limit: fmt.Sprintf(format, args...), Free: free, Keep: keepBytes(most), Most: most, Hint: hint}
	}

	if !o.IgnoreCgroup {
		for _, g := range cgroups(o) {
			for _, name := range g.limits {
				file := filepath.Join(g.dir, name)
				limit, ok := readInt(file)
				if !ok {
					continue
				}
				// Page cache counts as used but gives way.
				used, _ := readInt(filepath.Join(g.dir, g.usage))
				stat := readFields(filepath.Join(g.dir, "memory.stat"))
				cache := stat[g.statPrefix+"inactive_file"] + stat[g.statPrefix+"active_file"]
				used = max(used-cache, 0)
				hint := fmt.Sprintf("raise %s (the memory limit of the container or service)", name)
				if err := check(limit-used, hint, "the cgroup limit %s is %s with %s in use", file, human(limit), human(used)); err != nil {
					return err
				}
			}
		}
	}

	mem := readFields(filepath.Join(o.procRoot, "meminfo"))
	if free, ok := mem["MemAvailable"]; ok {
		err := check(free, "free memory on this host (engines that still map the region of an earlier node keep its memory: end them)",
			"the host has %s in all and MemAvailable is %s", human(mem["MemTotal"]), human(free))
		if err != nil {
			return err
		}
	}
	// Where the kernel does not overcommit, a page that is over the limit is a
	// fatal fault at first use.
	if mode, _ := readInt(filepath.Join(o.procRoot, "sys/vm/overcommit_memory")); mode == 2 {
		limit, used := mem["CommitLimit"], mem["Committed_AS"]
		return check(limit-used, "raise vm.overcommit_ratio or set vm.overcommit_memory to 0",
			"vm.overcommit_memory is 2 and CommitLimit is %s with %s committed", human(limit), human(used))
	}
	return nil
}

// cgroup is one directory whose limits hold for this process.
type cgroup struct {
	dir        string
	limits     []string
	usage      string
	statPrefix string // v1 counts children under names of their own
}

// cgroups lists the process's memory cgroups and all above them, since each
// ancestor's limit holds as well. In a container without a namespace of its
// own the path that the kernel tells does not exist below the root, which then
// is the container's cgroup: the walk ends there in any case.
func cgroups(o *Options) (out []cgroup) {
	data, err := os.ReadFile(filepath.Join(o.procRoot, "self/cgroup"))
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(data)) {
		id, rest, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ":")
		controllers, p, ok := strings.Cut(rest, ":")
		var g cgroup
		root := o.CgroupRoot
		switch {
		case !ok:
			continue
		case id == "0" && controllers == "": // v2
			// Above memory.high a process is not killed but all but stopped.
			g = cgroup{limits: []string{"memory.max", "memory.high"}, usage: "memory.current"}
		case strings.Contains(","+controllers+",", ",memory,"): // v1
			g = cgroup{limits: []string{"memory.limit_in_bytes"}, usage: "memory.usage_in_bytes", statPrefix: "total_"}
			root = filepath.Join(root, "memory")
		default:
			continue
		}
		for p = path.Clean("/" + p); ; p = path.Dir(p) {
			g.dir = filepath.Join(root, p)
			out = append(out, g)
			if p == "/" {
				break
			}
		}
	}
	return out
}

// readInt reads a file that holds one number. "max", which is no limit, is
// none.
func readInt(file string) (int64, bool) {
	data, err := os.ReadFile(file)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseInt(string(bytes.TrimSpace(data)), 10, 64)
	return n, err == nil
}

// readFields reads lines of "name value" or "Name: value kB", in bytes.
func readFields(file string) map[string]int64 {
	out := map[string]int64{}
	data, err := os.ReadFile(file)
	if err != nil {
		return out
	}
	for sc := bufio.NewScanner(bytes.NewReader(data)); sc.Scan(); {
		f := strings.Fields(sc.Text())
		if len(f) < 2 {
			continue
		}
		n, err := strconv.ParseInt(f[1], 10, 64)
		if err != nil {
			continue
		}
		if len(f) > 2 && f[2] == "kB" {
			n *= 1024
		}
		out[strings.TrimSuffix(f[0], ":")] = n
	}
	return out
}

// human writes a size for people: 1.50 GiB.
func human(n int64) string {
	for _, u := range []struct {
		unit string
		size int64
	}{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}} {
		if n >= u.size {
			return fmt.Sprintf("%.2f %s", float64(n)/float64(u.size), u.unit)
		}
	}
	return fmt.Sprintf("%d bytes", n)
}
