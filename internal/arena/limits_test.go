package arena

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const gib = 1 << 30

// tree writes files below a fresh folder. It stands for both /proc and
// /sys/fs/cgroup.
func tree(t *testing.T, files map[string]string) Options {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		file := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return Options{Size: gib, CgroupRoot: root + "/cg", procRoot: root + "/proc"}
}

func TestMemoryLimits(t *testing.T) {
	const (
		v2 = "0::/a/b\n"
		v1 = "4:memory:/a/b\n2:cpu,cpuacct:/x\n0::/\n"
		// What 1 GiB needs is 1 GiB + 2 MiB + 32 MiB.
		enough  = "1109393408"
		tooFew  = "1109393407"
		twoGiB  = "2147483648"
		oneGiB  = "1073741824"
		v1Unset = "9223372036854771712"
	)
	for name, c := range map[string]struct {
		files map[string]string
		want  []string // of the error; none: it fits
	}{
		"no files at all": {nil, nil},

		"v2 just fits": {map[string]string{"proc/self/cgroup": v2, "cg/a/b/memory.max": enough}, nil},
		"v2 one byte short": {map[string]string{"proc/self/cgroup": v2, "cg/a/b/memory.max": tooFew + "\n", "cg/a/b/memory.current": "0\n"},
			[]string{"primary.size: 1073741824 bytes (1.00 GiB) do not fit", "cg/a/b/memory.max is 1.03 GiB with 0 bytes in use",
				"so 1.03 GiB are free, of which the node itself needs 34.00 MiB", "set primary.size to at most 1073737728 (1024.00 MiB)",
				"or raise memory.max (the memory limit of the container or service)"}},
		"v2 in use": {map[string]string{"proc/self/cgroup": v2, "cg/a/b/memory.max": twoGiB, "cg/a/b/memory.current": oneGiB},
			[]string{"memory.max is 2.00 GiB with 1.00 GiB in use, so 1.00 GiB are free"}},
		"v2 in use by page cache": {map[string]string{"proc/self/cgroup": v2, "cg/a/b/memory.max": twoGiB, "cg/a/b/memory.current": oneGiB,
			"cg/a/b/memory.stat": "anon 5\ninactive_file 536870912\nactive_file 536870912\n"}, nil},
		"v2 over its limit": {map[string]string{"proc/self/cgroup": v2, "cg/a/b/memory.max": oneGiB, "cg/a/b/memory.current": twoGiB},
			[]string{"so 0 bytes are free", "no size fits: raise memory.max"}},
		"v2 no limit":                   {map[string]string{"proc/self/cgroup": v2, "cg/a/b/memory.max": "max\n", "cg/a/b/memory.current": twoGiB}, nil},
		"v2 parent's limit":             {map[string]string{"proc/self/cgroup": v2, "cg/a/b/memory.max": "max\n", "cg/a/memory.max": oneGiB}, []string{"cg/a/memory.max is 1.00 GiB"}},
		"v2 root of a container":        {map[string]string{"proc/self/cgroup": "0::/\n", "cg/memory.max": oneGiB}, []string{"cg/memory.max is 1.00 GiB"}},
		"v2 path outside the namespace": {map[string]string{"proc/self/cgroup": "0::/../../other\n", "cg/memory.max": oneGiB}, []string{"cg/memory.max"}},
		"v2 memory.high": {map[string]string{"proc/self/cgroup": v2, "cg/a/b/memory.max": twoGiB, "cg/a/b/memory.high": oneGiB},
			[]string{"cg/a/b/memory.high is 1.00 GiB", "raise memory.high"}},
		"v2 garbage": {map[string]string{"proc/self/cgroup": "nonsense\n1:2\n" + v2, "cg/a/b/memory.max": "much", "cg/a/b/memory.stat": "x\ny z\n"}, nil},

		"v1 fits": {map[string]string{"proc/self/cgroup": v1, "cg/memory/a/b/memory.limit_in_bytes": enough}, nil},
		"v1 short": {map[string]string{"proc/self/cgroup": v1, "cg/memory/a/b/memory.limit_in_bytes": twoGiB, "cg/memory/a/b/memory.usage_in_bytes": oneGiB},
			[]string{"cg/memory/a/b/memory.limit_in_bytes is 2.00 GiB with 1.00 GiB in use", "raise memory.limit_in_bytes"}},
		"v1 page cache": {map[string]string{"proc/self/cgroup": v1, "cg/memory/a/b/memory.limit_in_bytes": twoGiB, "cg/memory/a/b/memory.usage_in_bytes": oneGiB,
			"cg/memory/a/b/memory.stat": "inactive_file 1\ntotal_inactive_file 1073741824\n"}, nil},
		"v1 no limit": {map[string]string{"proc/self/cgroup": v1, "cg/memory/a/b/memory.limit_in_bytes": v1Unset, "cg/memory/memory.limit_in_bytes": v1Unset}, nil},
		"v1 container without the path": {map[string]string{"proc/self/cgroup": "4:hugetlb,memory:/docker/0123\n", "cg/memory/memory.limit_in_bytes": oneGiB},
			[]string{"cg/memory/memory.limit_in_bytes is 1.00 GiB"}},

		"host fits": {map[string]string{"proc/meminfo": "MemTotal: 4194304 kB\nMemAvailable: 2097152 kB\n"}, nil},
		"host short": {map[string]string{"proc/meminfo": "MemTotal:        4194304 kB\nMemAvailable:    1048576 kB\n"},
			[]string{"the host has 4.00 GiB in all and MemAvailable is 1.00 GiB", "set primary.size to at most 1038155776 (990.06 MiB)",
				"free memory on this host", "region of an earlier node"}},
		"strict commit": {map[string]string{"proc/meminfo": "MemAvailable: 8388608 kB\nCommitLimit: 2097152 kB\nCommitted_AS: 1572864 kB\n", "proc/sys/vm/overcommit_memory": "2\n"},
			[]string{"vm.overcommit_memory is 2", "CommitLimit is 2.00 GiB with 1.50 GiB committed", "vm.overcommit_ratio"}},
		"lax commit": {map[string]string{"proc/meminfo": "CommitLimit: 2 kB\nCommitted_AS: 3 kB\n", "proc/sys/vm/overcommit_memory": "0\n"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			o := tree(t, c.files)
			before := descriptorsOpen(t)
			a, err := Open(ctx0, o)
			if c.want == nil {
				if err != nil {
					t.Fatal(err)
				}
				if err := a.Close(); err != nil {
					t.Fatal(err)
				}
				return
			}
			var le *LimitError
			if !errors.As(err, &le) || le.Size != gib {
				t.Fatalf("error %v, want a LimitError", err)
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("error lacks %q:\n%v", w, err)
				}
			}
			if now := descriptorsOpen(t); now != before {
				t.Errorf("%d descriptors, %d before", now, before)
			}
			// The size that the error names does fit.
			if _, after, ok := strings.Cut(err.Error(), "at most "); ok {
				o.Size = parse(t, after)
				if err := checkMemory(&o); err != nil {
					t.Errorf("the size it names does not fit either: %v", err)
				}
			}
		})
	}
}

func parse(t *testing.T, s string) (n int64) {
	t.Helper()
	for _, r := range s {
		if r < '0' || r > '9' {
			break
		}
		n = n*10 + int64(r-'0')
	}
	if n == 0 {
		t.Fatalf("no number in %q", s)
	}
	return n
}

// The size that the error names is the largest that fits, however much more
// was asked for.
func TestAdvisedSizeIsTheLargestThatFits(t *testing.T) {
	for _, asked := range []int64{gib, 100 * gib, 1 << 50} {
		o := tree(t, map[string]string{"proc/meminfo": "MemTotal: 4194304 kB\nMemAvailable: 524288 kB\n"})
		o.Size = asked
		err := checkMemory(&o)
		if err == nil {
			t.Fatalf("%d bytes fit", asked)
		}
		_, after, ok := strings.Cut(err.Error(), "at most ")
		if !ok {
			t.Fatalf("%d asked for: %v", asked, err)
		}
		o.Size = parse(t, after)
		if err := checkMemory(&o); err != nil {
			t.Errorf("%d asked for: the size it names does not fit: %v", asked, err)
		}
		if o.Size += 2 * align; checkMemory(&o) == nil {
			t.Errorf("%d asked for: it names %s, and more fits", asked, after)
		}
	}
}

func TestIgnoreCgroup(t *testing.T) {
	o := tree(t, map[string]string{"proc/self/cgroup": "0::/\n", "cg/memory.max": "4096"})
	if err := checkMemory(&o); err == nil {
		t.Error("limit was overlooked")
	}
	o.IgnoreCgroup = true
	if err := checkMemory(&o); err != nil {
		t.Error(err)
	}
}
