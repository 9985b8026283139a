package lint

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const (
	module = "github.com/terrace-kv/terrace"
	root   = "../.."
)

// allowed has what each package may import of ours, outside tests: the table
// of docs/architecture.md, with what that implies. Lower never imports higher.
var allowed = map[string]string{
	"block":                      "",
	"tier":                       "block",
	"internal/keymap":            "block",
	"internal/content":           "block",
	"internal/core/policy":       "",
	"internal/vfs":               "",
	"internal/blockhead":         "block",
	"internal/s3":                "",
	"internal/rma":               "",
	"internal/rma/ucx":           "internal/rma",
	"internal/rma/rmatest":       "internal/rma",
	"internal/rma/fakerma":       "internal/rma",
	"internal/s3/s3test":         "internal/s3",
	"internal/core":              "block tier internal/keymap internal/core/policy",
	"internal/arena":             "block tier",
	"internal/wire":              "block tier internal/core",
	"internal/transfer":          "block tier",
	"tier/tiertest":              "block tier internal/content",
	"tier/memtier":               "block tier internal/content",
	"tier/fstier":                "block tier internal/vfs internal/keymap internal/blockhead",
	"tier/objtier":               "block tier internal/blockhead internal/keymap internal/lifecycle internal/s3",
	"client":                     "block tier internal/arena internal/core internal/wire",
	"internal/node":              "block tier internal/core internal/core/policy internal/arena internal/transfer internal/peer",
	"internal/engine":            "block tier internal/core internal/arena internal/wire",
	"internal/engine/enginetest": "block tier internal/core internal/arena internal/wire internal/engine",
	"internal/admin":             "block tier internal/core internal/node internal/peer",
	"internal/config":            "",
	"internal/peer":              "block tier internal/core internal/rma",
	"internal/replay":            "block tier client internal/config internal/content internal/core internal/core/policy internal/netfault internal/node internal/wire",
	"internal/fault":             "block tier internal/vfs",
	"internal/netfault":          "",
	"internal/lint":              "",
	"":                           "block tier internal/core internal/core/policy internal/arena internal/transfer internal/node internal/engine internal/wire internal/admin internal/peer internal/rma internal/rma/ucx",
	"cmd/terrace":                "*",
	"test/e2e":                   "*",
	"test/peer":                  "*",
	"test/sessions":              "*",
	"test/sweep":                 "*",
}

// anyone may import these; they import nothing of ours.
var anyone = []string{"internal/invariants", "internal/lifecycle", "internal/metrics"}

// concrete tiers, and what only tests may use.
var (
	concrete  = []string{"tier/fstier", "tier/objtier"}
	testsOnly = []string{"internal/fault", "tier/tiertest", "tier/memtier", "internal/engine/enginetest", "internal/s3/s3test", "internal/rma/fakerma", "internal/rma/rmatest",
		"github.com/minio/minio-go/v7/pkg/signer"}
)

// unsafeIn lists who may import unsafe or C, and why.
var unsafeIn = map[string]string{
	"internal/arena":   "maps shared memory",
	"client":           "maps shared memory",
	"internal/engine":  "SO_PEERGROUPS has no wrapper in x/sys",
	"internal/rma/ucx": "calls UCX, a C library",
}

// goIn lists the functions that may use a go statement: helpers that count
// what they start, so that its owner can wait. Everybody else uses such a
// helper, or sync.WaitGroup.Go, or errgroup.
var goIn = map[string]string{
	"internal/transfer.start":  "counts under the lane's own lock, which Close reads",
	"tier/fstier.Open":         "the keeper, which scans and watches the root; Close waits for over",
	"cmd/terrace.start":        "waits for a tier; its Close waits for over, with a bound",
	"cmd/terrace.selfTest":     "a tier's call that hangs must not hold up the start; it ends with that call",
	"cmd/terrace.watchSignals": "must outlive a drain that hangs, and ends with the process",
}

// pure packages do no I/O, read no clock, start nothing and take no lock.
var pure = []string{"block", "internal/blockhead", "internal/core", "internal/core/policy", "internal/keymap"}

type pkg struct {
	ImportPath                         string
	Dir                                string
	Imports, TestImports, XTestImports []string
	GoFiles, CgoFiles                  []string
}

// name is the path within the module.
func (p *pkg) name() string { return ours(p.ImportPath) }

func ours(path string) string { return strings.TrimPrefix(strings.TrimPrefix(path, module), "/") }

func packages(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-tags", "ucx", "-json=ImportPath,Dir,Imports,TestImports,XTestImports,GoFiles,CgoFiles", "./...")
	cmd.Dir = root
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, stderr.Bytes())
	}
	var all []pkg
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
}

func TestImportDirection(t *testing.T) {
	for _, p := range packages(t) {
		for _, fault := range importFaults(p) {
			t.Error(fault)
		}
	}
}

func importFaults(p pkg) (faults []string) {
	name := p.name()
	may, known := allowed[name]
	if slices.Contains(anyone, name) {
		may, known = "", true
	}
	if !known {
		return []string{fmt.Sprintf("%s has no row in allowed: say what it may import", name)}
	}
	for _, path := range p.Imports {
		dep := ours(path)
		switch {
		case path == "unsafe" || path == "C":
			if unsafeIn[name] == "" {
				faults = append(faults, fmt.Sprintf("%s imports %s; only %v may", name, path, unsafeIn))
			}
		case slices.Contains(testsOnly, path):
			faults = append(faults, fmt.Sprintf("%s imports %s: only tests may", name, path))
		case path != module && !strings.HasPrefix(path, module+"/"):
		case slices.Contains(concrete, dep) && !strings.HasPrefix(name, "cmd/"):
			faults = append(faults, fmt.Sprintf("%s imports %s: only cmd may import a concrete tier", name, dep))
		case slices.Contains(testsOnly, dep):
			faults = append(faults, fmt.Sprintf("%s imports %s: only tests may", name, dep))
		case may != "*" && !slices.Contains(anyone, dep) && !slices.Contains(strings.Fields(may), dep):
			faults = append(faults, fmt.Sprintf("%s imports %s, which is not in its row %q", name, dep, may))
		}
	}
	return faults
}

// TestImportRulesCanFail shows each rule one import that it must refuse.
func TestImportRulesCanFail(t *testing.T) {
	for _, x := range []struct{ name, imports string }{
		{"block", "tier"}, {"internal/core", "internal/arena"}, {"internal/node", "tier/fstier"}, {"internal/replay", "tier/memtier"},
		{"internal/metrics", "internal/node"}, {"tier/fstier", "internal/core"}, {"nowhere", ""},
	} {
		p := pkg{ImportPath: module + "/" + x.name, Imports: []string{module + "/" + x.imports}}
		if len(importFaults(p)) == 0 {
			t.Errorf("%s may import %s", x.name, x.imports)
		}
	}
	if len(importFaults(pkg{ImportPath: module + "/internal/node", Imports: []string{"unsafe"}})) == 0 {
		t.Error("node may import unsafe")
	}
	if len(importFaults(pkg{ImportPath: module + "/internal/s3", Imports: []string{"github.com/minio/minio-go/v7/pkg/signer"}})) == 0 {
		t.Error("s3 may import minio's signer")
	}
	for src, want := range map[string]int{
		"func f() { go g() }":                   1,
		"func start() { go g() }":               1,
		"func f() { wg.Go(g) }":                 0,
		"func f() { _ = time.Now() }":           1,
		"func f() { _ = time.Duration(1) }":     0,
		"func f() { time.AfterFunc(1, f) }":     1,
		"import \"sync\"\nvar mu sync.Mutex":    1,
		"import \"os\"":                         1,
		"import \"sync/atomic\"":                1,
		"func (c *c) f() { func() { go g() } }": 1,
	} {
		f, err := parser.ParseFile(token.NewFileSet(), "x.go", "package x\n"+src, 0)
		if err != nil {
			t.Fatal(err)
		}
		if got := fileFaults("internal/core", f); len(got) != want {
			t.Errorf("%q: %v, want %d faults", src, got, want)
		}
	}
}

func TestGoroutinesAndClocks(t *testing.T) {
	used := map[string]bool{}
	for _, p := range packages(t) {
		for _, file := range slices.Concat(p.GoFiles, p.CgoFiles) {
			if slices.Contains(testsOnly, p.name()) {
				continue
			}
			fset := token.NewFileSet()
			f, err := parser.ParseFile(fset, filepath.Join(p.Dir, file), nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			for _, fault := range fileFaults(p.name(), f) {
				t.Errorf("%s: %s", fset.Position(fault.pos), fault.text)
			}
			for fn := range goFuncs(p.name(), f) {
				used[fn] = true
			}
		}
	}
	for fn := range goIn {
		if !used[fn] {
			t.Errorf("goIn allows %s, which starts nothing; take it out", fn)
		}
	}
}

type fault struct {
	pos  token.Pos
	text string
}

// goFuncs has the functions of a file that use go statements, and where.
func goFuncs(name string, f *ast.File) map[string][]token.Pos {
	out := map[string][]token.Pos{}
	for _, d := range f.Decls {
		fn, ok := d.(*ast.FuncDecl)
		if !ok {
			continue
		}
		ast.Inspect(fn, func(n ast.Node) bool {
			if g, ok := n.(*ast.GoStmt); ok {
				out[name+"."+fn.Name.Name] = append(out[name+"."+fn.Name.Name], g.Pos())
			}
			return true
		})
	}
	return out
}

func fileFaults(name string, f *ast.File) (faults []fault) {
	for fn, at := range goFuncs(name, f) {
		for _, pos := range at {
			if goIn[fn] == "" {
				faults = append(faults, fault{pos, "go statement: use sync.WaitGroup.Go, so that the owner waits for it"})
			}
		}
	}
	if !slices.Contains(pure, name) {
		return faults
	}
	for _, imp := range f.Imports {
		switch path := strings.Trim(imp.Path.Value, `"`); path {
		case "os", "io", "net", "net/http", "sync", "sync/atomic", "context", "log/slog", "math/rand", "math/rand/v2", "golang.org/x/sys/unix", "syscall":
			faults = append(faults, fault{imp.Pos(), name + " imports " + path + ": it does no I/O, takes no lock and rolls no dice"})
		}
	}
	ast.Inspect(f, func(n ast.Node) bool {
		if sel, ok := n.(*ast.SelectorExpr); ok {
			if id, ok := sel.X.(*ast.Ident); ok && id.Name == "time" && slices.Contains([]string{"Now", "Since", "Until", "Sleep", "After", "AfterFunc", "NewTimer", "NewTicker", "Tick"}, sel.Sel.Name) {
				faults = append(faults, fault{n.Pos(), name + " reads the clock: time.Now and its kin belong to the node"})
			}
		}
		return true
	})
	return faults
}

var invariantName = regexp.MustCompile(`INVARIANT\(([a-z-]+)\)`)

// TestInvariantsAreListed: a name in the code is in docs/invariants.md, and one
// in docs/invariants.md is in the code.
func TestInvariantsAreListed(t *testing.T) {
	doc, err := os.ReadFile(filepath.Join(root, "docs", "invariants.md"))
	if err != nil {
		t.Fatal(err)
	}
	inCode := map[string]string{}
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "lint_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, m := range invariantName.FindAllSubmatch(text, -1) {
			inCode[string(m[1])] = path
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, path := range inCode {
		if !bytes.Contains(doc, []byte("`"+name+"`")) {
			t.Errorf("%s says INVARIANT(%s), which docs/invariants.md does not list", path, name)
		}
	}
}

// TestDocs: each package has a comment that says what it is.
func TestDocs(t *testing.T) {
	for _, p := range packages(t) {
		var want string
		found := false
		for _, file := range p.GoFiles {
			f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, file), nil, parser.ParseComments|parser.PackageClauseOnly)
			if err != nil {
				t.Fatal(err)
			}
			want = "Package " + f.Name.Name + " "
			if f.Name.Name == "main" {
				want = "Command " + filepath.Base(p.Dir) + " "
			}
			found = found || f.Doc != nil && strings.HasPrefix(f.Doc.Text(), want)
		}
		if !found {
			t.Errorf("%s has no comment that begins %q", p.Dir, want)
		}
	}
}

// TestLinks: what the documents point at by path exists.
func TestLinks(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)#:]+)(#[^)]*)?\)`)
	var files []string
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/adr/*.md"} {
		m, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, m...)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range link.FindAllSubmatch(text, -1) {
			if _, err := os.Stat(filepath.Join(filepath.Dir(file), string(m[1]))); err != nil {
				t.Errorf("%s points at %s: %v", file, m[1], err)
			}
		}
	}
}
