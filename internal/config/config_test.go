package config

import (
	"errors"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
)

var rewrite = flag.Bool("rewrite", false, "write golden files anew")

// fsSettings stands for a type of tier that config knows nothing of.
type fsSettings struct {
	Root     string `yaml:"root" folder:"own" doc:"folder"`
	Capacity Size   `yaml:"capacity" zero:"unbounded" min:"1MiB" doc:"most bytes"`
	Token    string `yaml:"token" secret:"true" doc:"a secret"`
}

func (*fsSettings) Aliases() map[string]string {
	return map[string]string{"root_dir": "root", "store.max.bytes": "capacity"}
}

func (s *fsSettings) Validate(report Report) {
	if s.Root == "/" {
		report("root", "is the root of the file system; write another folder")
	}
	if s.Token == "short" {
		report("token", "is too short")
	}
}

var types = Types{
	"fs":   {Settings: func() any { return &fsSettings{Root: "/cache", Capacity: 10 << 30} }},
	"disk": {Settings: func() any { return &fsSettings{} }},
}

func input(t *testing.T, yaml string, env []string, flags ...Assignment) Input {
	in := Input{Socket: "/run/t.sock", Types: types, DefaultTiers: []string{"fs"}, Env: env, Flags: flags}
	if yaml != "" {
		in.File = filepath.Join(t.TempDir(), "t.yaml")
		if err := os.WriteFile(in.File, []byte(yaml), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return in
}

func load(t *testing.T, in Input) *Config {
	t.Helper()
	c, err := Load(in)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestDefaultsServe(t *testing.T) {
	c := load(t, input(t, "", []string{"HOME=/root", "TERRACE_TESTDATA=/x"}))
	fs := c.Tiers[0].Settings.(*fsSettings)
	if c.Primary.Size != 1<<30 || c.Admin.Listen != "127.0.0.1:9180" || len(c.Tiers) != 1 || fs.Capacity != 10<<30 || c.Socket != "/run/t.sock" {
		t.Fatalf("%+v %+v", c, fs)
	}
	if len(c.sources) != 0 {
		t.Fatalf("sources of defaults: %v", c.sources)
	}
}

func TestPrecedence(t *testing.T) {
	file := "primary:\n  size: 2GiB\ndrain_timeout: 1m\nlog: {level: warn}\n"
	env := []string{"TERRACE_PRIMARY_SIZE=3GiB", "TERRACE_LOG_LEVEL=error"}
	c := load(t, input(t, file, env, Assignment{"primary.size", "4GiB", "--primary"}))
	for _, x := range []struct{ path, got, want, source string }{
		{"primary.size", c.Primary.Size.String(), "4GiB", "--primary"},
		{"log.level", c.Log.Level, "error", "TERRACE_LOG_LEVEL"},
		{"drain_timeout", c.DrainTimeout.String(), "1m0s", "t.yaml:3"},
		{"log.format", c.Log.Format, "text", ""},
	} {
		if x.got != x.want || c.Source(x.path) != Source(x.source) {
			t.Errorf("%s = %s from %q, want %s from %q", x.path, x.got, c.Source(x.path), x.want, x.source)
		}
	}
}

func TestConfigFileFromEnvironment(t *testing.T) {
	in := input(t, "log: {format: json}", nil)
	in.Env, in.File = []string{"TERRACE_CONFIG=" + in.File}, ""
	if c := load(t, in); c.Log.Format != "json" {
		t.Fatal(c.Log)
	}
}

func TestTiers(t *testing.T) {
	describe := func(c *Config) string {
		var out []string
		for _, tr := range c.Tiers {
			s := tr.Settings.(*fsSettings)
			out = append(out, tr.Type+" "+tr.Name+" "+s.Root+" "+leaves("", reflect.ValueOf(s).Elem())[1].String())
		}
		return strings.Join(out, "; ")
	}
	for _, x := range []struct {
		name, file string
		env        []string
		flags      []Assignment
		want       string
	}{
		{"none in the file", "tiers: []", nil, nil, ""},
		{"none in the environment", "", []string{"TERRACE_TIERS=[]"}, nil, ""},
		{"a list replaces the default", "tiers: [{type: fs, name: a, root: /a, capacity: unbounded}, {type: disk}]", nil, nil, "fs a /a unbounded; disk disk  unbounded"},
		{"environment by index", "", []string{"TERRACE_TIERS_0_ROOT=/e"}, nil, "fs fs /e 10GiB"},
		{"environment by name", "tiers: [{type: fs, name: my-a}]", []string{"TERRACE_TIERS_MY_A_ROOT=/e"}, nil, "fs my-a /e 10GiB"},
		{"environment adds one", "", []string{"TERRACE_TIERS_1_ROOT=/d", "TERRACE_TIERS_1_TYPE=disk"}, nil, "fs fs /cache 10GiB; disk disk /d unbounded"},
		{"environment adds one by its type", "tiers: []", []string{"TERRACE_TIERS_FS_ROOT=/e"}, nil, "fs fs /e 10GiB"},
		{"environment changes the type", "", []string{"TERRACE_TIERS_0_NAME=x", "TERRACE_TIERS_0_TYPE=disk"}, nil, "disk x  unbounded"},
		{"environment has the list", "", []string{"TERRACE_TIERS=[{type: disk}]", "TERRACE_TIERS_DISK_CAPACITY=1GiB"}, nil, "disk disk  1GiB"},
		{"flag over environment", "", []string{"TERRACE_TIERS_0_ROOT=/e"}, []Assignment{{"tiers.fs.root", "/f", "--fs-root"}}, "fs fs /f 10GiB"},
		{"flag finds the only one of its type", "tiers: [{type: fs, name: a}]", nil, []Assignment{{"tiers.fs.root", "/f", "--fs-root"}}, "fs a /f 10GiB"},
		{"another system's names", "tiers: [{type: fs, root_dir: /o, store: {max: {bytes: 2GiB}}}]", nil, nil, "fs fs /o 2GiB"},
		{"flag takes out", "tiers: [{type: disk, name: a}, {type: fs}, {type: disk, name: b, root: /b}]", nil, []Assignment{{"tiers.fs", "none", "--no-fs"}}, "disk a  unbounded; disk b /b unbounded"},
	} {
		t.Run(x.name, func(t *testing.T) {
			c := load(t, input(t, x.file, x.env, x.flags...))
			if got := describe(c); got != x.want {
				t.Errorf("tiers %q, want %q", got, x.want)
			}
		})
	}
	c := load(t, input(t, "tiers:\n- type: fs\n- type: disk\n  root: /d", nil, Assignment{"tiers.fs", "none", "--no-fs"}))
	if c.Source("tiers.0.root") != "t.yaml:4" || c.Source("tiers.1.root") != "" {
		t.Errorf("sources do not follow their tier: %v", c.sources)
	}
}

// TestFaults: each fault names field, value, source and what to do, and all
// come at once.
func TestFaults(t *testing.T) {
	for _, x := range []struct {
		name, file string
		env        []string
		flags      []Assignment
		want       []string
	}{
		{name: "unknown key", file: "primary:\n  sise: 1GiB\n",
			want: []string{`primary.sise (t.yaml:2) is not a setting; did you mean size? Known here: extent, policy, populate, size`}},
		{name: "unknown key that is right elsewhere", file: "size: 1GiB\n",
			want: []string{`size (t.yaml:1) is not a setting; did you mean primary.size? Known here: admin, core,`}},
		{name: "nothing near", file: "frobnicate: 1\n", want: []string{`frobnicate (t.yaml:1) is not a setting. Known here: admin,`}},
		{name: "unknown tier key", file: "tiers:\n- type: fs\n  rot: /x\n",
			want: []string{`tiers.0.rot (t.yaml:3) is not a setting; did you mean root? Known here: capacity, lane, name,`}},
		{name: "a name and its alias", file: "tiers:\n- type: fs\n  root: /x\n  root_dir: /y\n", want: []string{`tiers.0.root (t.yaml:4) is given twice, first in line 3`}},
		{name: "unknown key in another system's mapping", file: "tiers:\n- type: fs\n  store: {mox: 1}\n", want: []string{`tiers.0.mox (t.yaml:3) is not a setting`}},
		{name: "unknown tier type", file: "tiers:\n- type: ffs\n", want: []string{`tiers.0.type = "ffs" (t.yaml:2) is not a type of tier; did you mean fs? Known types: disk, fs`}},
		{name: "no tier type", file: "tiers:\n- root: /x\n", want: []string{`tiers.0.type (t.yaml:2) is missing; known types: disk, fs`}},
		{name: "tiers without value", file: "tiers:\n", want: []string{`tiers (t.yaml:1) is not a list; write one entry a tier as "- type: disk|fs", or [] for none`}},
		{name: "all at once", file: "primary:\n  size: 1GB2\nlog:\n  level: inof\ndrain_timeout: 10\nadmin: {insecure: yes}\ncore: {reserve_percent: 50}\n",
			env: []string{"TERRACE_PRIMARY_POPULATE=of", "TERRACE_PRIMRY_SIZE=1"}, flags: []Assignment{{"admin.listen", "0.0.0.0:1", "--admin"}},
			want: []string{
				`primary.size = "1GB2" (t.yaml:2) is not a size; write bytes, or a number with a unit such as 512MiB, 1GiB or 10GB`,
				`log.level = "inof" (t.yaml:4) is not one of debug, info, warn, error; did you mean info?`,
				`drain_timeout = "10" (t.yaml:5) is not a duration; write a number with a unit, such as 500ms, 10s or 2m`,
				`admin.insecure = "yes" (t.yaml:6) is neither true nor false`,
				`core.reserve_percent = "50" (t.yaml:7) is too large; write 45 or less`,
				`primary.populate = "of" (TERRACE_PRIMARY_POPULATE) is not one of background, off; did you mean off?`,
				`TERRACE_PRIMRY_SIZE (environment) is not a setting; did you mean TERRACE_PRIMARY_SIZE?`,
				`admin.listen = "0.0.0.0:1" (--admin) is not a loopback address`,
			}},
		{name: "zero that has a word", file: "tiers: [{type: fs, capacity: 0}]", want: []string{`tiers.0.capacity = "0" (t.yaml:1) is not allowed; write unbounded if you mean that`}},
		{name: "twice", file: "socket: /a\nsocket: /b\n", want: []string{`socket (t.yaml:2) is given twice, first in line 1; keep one`}},
		{name: "no value", file: "socket:\n", want: []string{`socket (t.yaml:1) has no value; give one, or take the line out`}},
		{name: "list for one", file: "socket: [/a]\n", want: []string{`socket (t.yaml:1) has several values; give one`}},
		{name: "not a mapping", file: "primary: 1GiB\n", want: []string{`primary = "1GiB" (t.yaml:1) is not a mapping`}},
		{name: "not YAML", file: "a: [\n", want: []string{`is not YAML: line 1`}},
		{name: "two documents", file: "socket: /a\n---\nsocket: /b\n", want: []string{`has a second document; keep one`}},
		{name: "unknown variable", env: []string{"TERRACE_X=1"}, want: []string{`TERRACE_X (environment) is not a setting. Variables are TERRACE_ and a setting's path in capitals`}},
		{name: "variable of a tier that is not there", env: []string{"TERRACE_TIERS_5_ROOT=/x"}, want: []string{`TERRACE_TIERS_5_ROOT (environment) is not a setting; did you mean TERRACE_TIERS_0_ROOT?`}},
		{name: "next tier without a type", env: []string{"TERRACE_TIERS_1_ROOT=/x"}, want: []string{`tiers.1 (TERRACE_TIERS_1_ROOT) names no tier; there are: 0 (fs). To add one, set tiers.1.type`}},
		{name: "bad list in a variable", env: []string{"TERRACE_TIERS=["}, want: []string{`tiers = "[" (TERRACE_TIERS) is not a YAML list`}},
		{name: "--set of nothing", flags: []Assignment{{"primary.sizes", "1", "--set"}}, want: []string{`primary.sizes (--set) is not a setting; did you mean primary.size?`}},
		{name: "several of a type", file: "tiers: [{type: fs, name: a, root: /a}, {type: fs, name: b, root: /b}]", flags: []Assignment{{"tiers.fs.root", "/x", "--fs-root"}},
			want: []string{`tiers.fs (--fs-root) could be several tiers; name one by its index or name`}},
		{name: "names", file: "tiers: [{type: fs, root: /a}, {type: fs, root: /b}, {type: fs, root: /c, name: Primary}]",
			want: []string{`tiers.1.name = "fs" is the name of tiers.0 as well`, `tiers.2.name = "Primary" (t.yaml:1) is not a name`}},
		{name: "bounds that contradict", file: "primary: {size: 1MiB, extent: 2MiB}\ntiers: [{type: fs, lane: {retry: {base: 10s}, breaker: {brown_share: 0.6, open_base: 2m}}}]",
			want: []string{`primary.extent = "2MiB" (t.yaml:1) is more than primary.size, which is 1MiB`, `lane.retry.base = "10s" (t.yaml:2) is more than lane.retry.max, which is 2s`,
				`brown_share = "0.6" (t.yaml:2) is more than lane.breaker.open_share, which is 0.5`, `open_base = "2m" (t.yaml:2) is more than lane.breaker.open_max, which is 1m`}},
		{name: "odd sizes", file: "primary: {size: 1048577, extent: 96KiB}", want: []string{`primary.size = "1048577" (t.yaml:1) is not a multiple of 4KiB`, `primary.extent = "96KiB" (t.yaml:1) is not a power of two`}},
		{name: "a type's own check", file: "tiers: [{type: fs, root: /}]", want: []string{`tiers.0.root = "/" (t.yaml:1) is the root of the file system; write another folder`}},
		{name: "a secret is not shown", file: "tiers: [{type: fs, token: short}]", want: []string{`tiers.0.token (t.yaml:1) is too short`}},
		{name: "long socket", flags: []Assignment{{"socket", "/" + strings.Repeat("x", 107), "--socket"}}, want: []string{`has 108 bytes, and the kernel takes 107`}},
		{name: "no socket", flags: []Assignment{{"socket", "", "--socket"}}, want: []string{`socket (--socket) is empty`}},
		{name: "peers on a network", file: "peers: {listen: '10.0.0.7:7301', timeouts: {misses: 1}, quota: 101%, node_id: " + strings.Repeat("x", 257) + "}",
			want: []string{`peers.listen = "10.0.0.7:7301" (t.yaml:1) is not a loopback address, and whoever reaches 10.0.0.7:7301 reads blocks; set peers.tls.cert, key and ca, or peers.insecure to true`,
				`peers.timeouts.misses = "1" (t.yaml:1) is too small; write 2 or more`, `peers.quota = "101%" (t.yaml:1) is not a percentage from 1% to 100%`, `has 257 bytes, at most 256`}},
		{name: "half of tls", file: "peers: {listen: '10.0.0.7:7301', tls: {cert: a}, quota: lots}", want: []string{`peers.tls.key is empty; peers.tls needs cert, key and ca`, `peers.tls.ca is empty`,
			`peers.quota = "lots" (t.yaml:1) is neither a size nor a percentage`}},
		{name: "quotas of peers", file: "primary: {size: 1GiB}\npeers: {quota: 50%, quota_total: 400MiB, addresses: 0}", want: []string{`peers.quota_total = "400MiB" (t.yaml:2) is less than peers.quota, which is 50%`,
			`peers.addresses = "0" (t.yaml:2) is too small; write 1 or more`}},
		{name: "no quota of all", file: "peers: {quota_total: 101%}", want: []string{`peers.quota_total = "101%" (t.yaml:1) is not a percentage from 1% to 100%`}},
		{name: "peers anywhere", file: "peers: {listen: '0.0.0.0:7301', insecure: true}", want: []string{`peers.advertise is empty, and peers.listen is 0.0.0.0:7301, which nobody can dial`}},
		{name: "peers told of a wildcard", file: "peers: {listen: '0.0.0.0:7301', insecure: true, advertise: '[::]:7301'}", want: []string{`peers.advertise = "[::]:7301" (t.yaml:1) is a wildcard`}},
		{name: "peers told of loopback", file: "peers: {listen: '10.0.0.7:7301', insecure: true, advertise: 'localhost:7301'}", want: []string{`peers.advertise = "localhost:7301" (t.yaml:1) is a loopback address, which means another host to every peer`}},
		{name: "peers told of no port", file: "peers: {listen: '127.0.0.1:7301', advertise: 'node-7'}", want: []string{`peers.advertise = "node-7" (t.yaml:1) is not a host with a port`}},
		{name: "peers told of a bad port", file: "peers: {listen: '127.0.0.1:7301', advertise: 'node-7:70000'}", want: []string{`peers.advertise = "node-7:70000" (t.yaml:1) has no port from 0 to 65535`}},
		{name: "peers that nobody can reach", file: "peers: {advertise: '10.0.0.7:7301'}", want: []string{`peers.advertise = "10.0.0.7:7301" (t.yaml:1) is set, and peers.listen is not, so that nobody can reach this node; set peers.listen`}},
		{name: "peers nowhere", file: "peers: {listen: 'node-7'}", want: []string{`peers.listen = "node-7" (t.yaml:1) is not an address with a port; write one such as 127.0.0.1:7301`}},
		{name: "a tier called peers", file: "peers: {listen: ':7301'}\ntiers: [{type: fs, name: peers}]", want: []string{`tiers.0.name = "peers" (t.yaml:2) is the name of the tier that other nodes are`}},
		{name: "too many tiers", file: "tiers: [" + strings.Repeat("{type: fs},", 30) + "]", want: []string{`tiers (t.yaml:1) has more than 16 entries`}},
	} {
		t.Run(x.name, func(t *testing.T) {
			_, err := Load(input(t, x.file, x.env, x.flags...))
			var faults Faults
			if !errors.As(err, &faults) {
				t.Fatalf("error %v, want faults", err)
			}
			if x.name != "too many tiers" && len(faults) != len(x.want) {
				t.Errorf("%d faults, want %d", len(faults), len(x.want))
			}
			for _, w := range x.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%v\nlacks: %s", err, w)
				}
			}
		})
	}
}

func TestPeers(t *testing.T) {
	for _, x := range []struct {
		file, advertise string
		quota, total    int64
	}{
		{"peers: {listen: ':7301'}", "", 256 << 20, 512 << 20},
		{"peers: {listen: '[::1]:0', advertise: '[0:0::1]:0', quota: 1MiB, quota_total: 50%}", "[::1]:0", 1 << 20, 512 << 20},
		{"peers: {listen: '0.0.0.0:1', insecure: true, advertise: 'node-7:2', quota: 100%, quota_total: 100%}", "node-7:2", 1 << 30, 1 << 30},
		{"peers: {listen: '10.0.0.7:1', tls: {cert: a, key: b, ca: c}, quota_total: 300MiB}", "", 256 << 20, 300 << 20},
	} {
		c := load(t, input(t, "primary: {size: 1GiB}\n"+x.file, nil))
		q, all, err := c.Peers.QuotaBytes(c.Primary.Size)
		if got := c.Peers.AdvertiseAddr(); got != x.advertise || err != nil || (q-x.quota)/100 > 1 || (x.quota-q)/100 > 1 || (all-x.total)/100 > 1 || (x.total-all)/100 > 1 {
			t.Errorf("%s: advertised %q, quota %d of %d, %v", x.file, got, q, all, err)
		}
	}
}

func TestMissingFile(t *testing.T) {
	_, err := Load(Input{Socket: "/s", File: "/nonexistent/t.yaml"})
	if err == nil || !strings.Contains(err.Error(), `config = "/nonexistent/t.yaml" cannot be read: no such file or directory`) {
		t.Fatal(err)
	}
}

func TestListen(t *testing.T) {
	for text, want := range map[string]string{
		"127.0.0.1:9180": "127.0.0.1:9180 true", ":0": "127.0.0.1:0 true", "localhost:1": "127.0.0.1:1 true", "[::1]:5710": "[::1]:5710 true",
		"0.0.0.0:1": "0.0.0.0:1 false", "[fe80::1%lo]:9": "[fe80::1%lo]:9 false", "[::]:1": "[::]:1 false", "127.9.9.9:1": "127.9.9.9:1 true",
		"::1": "", "127.0.0.1": "", "example.com:80": "", "127.0.0.1:x": "", "127.0.0.1:70000": "", "": "", "127.0.0.1:-1": "", "127.0.0.1:+1": "",
	} {
		addr, loopback, err := ParseListen(text)
		got := ""
		if err == nil {
			got = addr + map[bool]string{true: " true", false: " false"}[loopback]
		}
		if got != want {
			t.Errorf("%q: %q, %v; want %q", text, got, err, want)
		}
	}
}

func TestSizes(t *testing.T) {
	for text, want := range map[string]Size{
		"0": 0, "4096": 4096, "1KiB": 1024, "1.5GiB": 3 << 29, "10GB": 1e10, "512MiB": 512 << 20, "2 TiB": 2 << 40, "7B": 7, "1kB": 1000, "8388607TiB": 8388607 << 40,
		"": -1, "GiB": -1, "1G": -1, "1gib": -1, "-1": -1, "1.5": -1, "0.3KiB": -1, "1e3": -1, "1/2KiB": -1, "8388608TiB": -1, "0x10": -1, "1_000": -1, "+1": -1, "9e99999999999B": -1,
	} {
		got, err := ParseSize(text)
		if (err != nil) != (want == -1) || err == nil && got != want {
			t.Errorf("%q: %d, %v; want %d", text, got, err, want)
		}
		if err == nil {
			if back, err := ParseSize(got.String()); err != nil || back != got {
				t.Errorf("%q prints as %q, which reads as %d, %v", text, got, back, err)
			}
		}
	}
	for size, want := range map[Size]string{0: "0", 1 << 30: "1GiB", 10 << 30: "10GiB", 1e10: "10GB", 1000: "1KB", 100: "100", 1001: "1001", 4097: "4097"} {
		if size.String() != want {
			t.Errorf("%d prints as %q, want %q", int64(size), size, want)
		}
	}
}

func TestPrint(t *testing.T) {
	file := "primary: {size: 2GiB}\nlog:\n  level: debug\ntiers:\n- type: fs\n  name: \"on\"\n  root: '/a # b'\n  token: hunter2hunter2\n- {type: disk, capacity: 1GB, required: true, lane: {breaker: {open_share: 0.75}}}\n"
	in := input(t, file, []string{"TERRACE_DRAIN_TIMEOUT=90s"}, Assignment{"socket", "/tmp/x.sock", "--socket"})
	c := load(t, in)
	got := string(c.YAML())
	if strings.Contains(got, "hunter2") {
		t.Error("the secret is shown")
	}
	golden(t, "print.yaml", got)

	// What is printed reads back as the same, but for the secret.
	c.Tiers[0].Settings.(*fsSettings).Token = ""
	again := load(t, input(t, got, nil))
	for i, l := range again.leaves() {
		if want := c.leaves()[i]; l.path != want.path || l.String() != want.String() {
			t.Errorf("read back %s = %s, want %s = %s", l.path, l, want.path, want)
		}
	}
	in.Flags = append(in.Flags, Assignment{"tiers.fs", "none", "--no-fs"}, Assignment{"tiers.disk", "none", "--no-disk"})
	if got := string(load(t, in).YAML()); !strings.Contains(got, "tiers: [] # --no-disk\n") {
		t.Errorf("no tiers prints as\n%s", got)
	}
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *rewrite {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil || got != string(want) {
		t.Errorf("%s differs (%v); -rewrite makes it anew if this is right:\n%s", path, err, got)
	}
}

// TestEverySetting: each has a doc, its default passes its own checks, its
// variable finds it, and a list for people has them all.
func TestEverySetting(t *testing.T) {
	in := input(t, "", nil)
	for _, l := range load(t, in).leaves() {
		if l.tag.Get("doc") == "" {
			t.Errorf("%s has no doc", l.path)
		}
		if text := l.String(); text != "" {
			in.Env = []string{envName(l.path) + "=" + text}
			c := load(t, in)
			if c.Source(l.path) != Source(envName(l.path)) && l.path != "tiers.0.type" {
				t.Errorf("%s does not set %s", envName(l.path), l.path)
			}
		}
	}
	ref := Reference(in)
	if !slices.ContainsFunc(ref, func(s Setting) bool {
		return s == Setting{"tiers.fs.capacity", "TERRACE_TIERS_FS_CAPACITY", "10GiB", "most bytes", "from 1MiB, unbounded"}
	}) {
		t.Errorf("reference: %+v", ref)
	}
}

func TestDistance(t *testing.T) {
	for _, x := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"a", "", 1}, {"size", "sise", 1}, {"size", "szie", 1}, {"kitten", "sitting", 3}, {"abc", "abc", 0}} {
		if got := distance(x.a, x.b); got != x.want {
			t.Errorf("%q %q: %d, want %d", x.a, x.b, got, x.want)
		}
	}
}

func FuzzLoad(f *testing.F) {
	f.Add("primary: {size: 1GiB}", "TERRACE_TIERS", "[]")
	f.Add("tiers: &t [*t, {type: fs, <<: {}}]", "TERRACE_TIERS_0_TYPE", "disk")
	f.Add("a: &a {b: *a}\n? [x]\n: y", "TERRACE_LOG_LEVEL", "\x00")
	f.Fuzz(func(t *testing.T, file, name, value string) {
		c, err := Load(input(t, file, []string{name + "=" + value}))
		if err == nil {
			again := input(t, string(c.YAML()), nil)
			if _, err := Load(again); err != nil {
				t.Fatalf("what it printed is refused: %v\n%s", err, c.YAML())
			}
		}
	})
}

// TestTiersDoNotShareAFolder: two tiers that write into one folder would evict
// and clean up each other's files.
func TestTiersDoNotShareAFolder(t *testing.T) {
	dir := t.TempDir()
	link := filepath.Join(dir, "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	load := func(first, second string) error {
		_, err := Load(Input{Socket: "/s", Types: types, Flags: []Assignment{
			{Path: "tiers.0.type", Value: "fs"}, {Path: "tiers.0.root", Value: first},
			{Path: "tiers.1.type", Value: "disk"}, {Path: "tiers.1.root", Value: second},
		}})
		return err
	}
	for _, x := range []struct{ first, second, how string }{
		{"/a", "/a", "is the folder of"},
		{"/a/../b", "/b/", "is the folder of"},
		{"/a", "/a/b/c", "lies within"},
		{"/a/b", "/a", "contains"},
		{dir + "/x", link + "/x/new", "lies within"},
	} {
		err := load(x.first, x.second)
		if err == nil || !strings.Contains(err.Error(), "tiers.1.root = ") || !strings.Contains(err.Error(), x.how+" tiers.0.root = ") {
			t.Errorf("%s and %s: %v", x.first, x.second, err)
		}
	}
	for _, x := range [][2]string{{"/a", "/ab"}, {"/a/b", "/a/c"}, {"/a/..b", "/a/b"}} {
		if err := load(x[0], x[1]); err != nil {
			t.Errorf("%v: %v", x, err)
		}
	}
}
