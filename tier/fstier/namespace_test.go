package fstier

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/tiertest"
)

// Names of any bytes stand for the same namespaces after a restart.
func TestNamesSurviveARestart(t *testing.T) {
	root := t.TempDir()
	a, b, c := tiertest.Namespace(t, "a"), tiertest.Namespace(t, "b"), tiertest.Namespace(t, "c")
	long := strings.Repeat("../\x00\xff\n", 50)[:tier.NameBytesMax]
	tr := open(t, opts(t, root, nil))
	<-tr.ScanDone()
	keep := func(name string, ns *block.Namespace) {
		t.Helper()
		if err := tr.KeepName(t.Context(), name, ns); err != nil {
			t.Errorf("keep %q: %v", name, err)
		}
		wantExact(t, tr)
	}
	keep("first", a)
	keep("second", a) // the last one counts
	keep("second", a)
	keep(long, b)
	if err := tr.KeepName(t.Context(), "second", c); !errors.Is(err, tier.ErrNamespaceMismatch) || tier.CauseOf(err) != tier.CauseNamespace ||
		!strings.Contains(err.Error(), filepath.Join(root, a.Fingerprint().String(), nameName)) {
		t.Errorf("a name of another namespace: %v", err)
	}
	for _, name := range []string{"", long + "x"} {
		if err := tr.KeepName(t.Context(), name, c); err == nil {
			t.Errorf("a name of %d bytes was kept", len(name))
		}
	}
	closeTier(t, tr)

	tr = openClosing(t, opts(t, root, nil))
	wantExact(t, tr)
	got, err := tr.Names(t.Context())
	if err != nil || len(got) != 2 || got["second"].Fingerprint() != a.Fingerprint() || got[long].Fingerprint() != b.Fingerprint() {
		t.Errorf("after the restart: %v, %v", got, err)
	}
	keep("first", c) // it is free
}

// What cannot be read as a name, or is the name of two, harms nothing else.
func TestNamesDamaged(t *testing.T) {
	root := t.TempDir()
	a, b := tiertest.Namespace(t, "a"), tiertest.Namespace(t, "b")
	tr := open(t, opts(t, root, nil))
	if err := errors.Join(tr.KeepName(t.Context(), "a", a), tr.KeepName(t.Context(), "b", b)); err != nil {
		t.Fatal(err)
	}
	closeTier(t, tr)
	path := filepath.Join(root, b.Fingerprint().String(), nameName)
	for _, content := range []string{"a", "", strings.Repeat("x", 300)} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		tr = open(t, opts(t, root, nil))
		<-tr.ScanDone()
		wantExact(t, tr)
		if got, err := tr.Names(t.Context()); err != nil || len(got) != 1 || got["a"] == nil {
			t.Errorf("%q: %v, %v", content, got, err)
		}
		closeTier(t, tr)
	}
	tr = openClosing(t, opts(t, root, nil))
	if err := tr.KeepName(t.Context(), "b", b); err != nil {
		t.Error(err)
	}
	wantExact(t, tr)
	if got, _ := tr.Names(t.Context()); len(got) != 2 {
		t.Errorf("after mending: %v", got)
	}
}

// A greeting leaves nothing on the disk; the first write or name does.
func TestOpenNamespaceMakesNothing(t *testing.T) {
	root := t.TempDir()
	tr := openClosing(t, opts(t, root, nil))
	ns, named := tiertest.Namespace(t, "a"), tiertest.Namespace(t, "b")
	for _, n := range []*block.Namespace{ns, named} {
		if err := tr.OpenNamespace(t.Context(), n); err != nil {
			t.Fatal(err)
		}
	}
	if got := tr.Namespaces(); len(got) != 0 {
		t.Errorf("namespaces %v", got)
	}
	exists := func(ns *block.Namespace) bool {
		_, err := os.Stat(filepath.Join(root, ns.Fingerprint().String(), nameNamespace))
		return err == nil
	}
	if exists(ns) || exists(named) {
		t.Error("a greeting made a namespace's directory")
	}
	write(t, tr, ns, blocks(t, ns, 0, 1, 0))
	if err := tr.KeepName(t.Context(), "b", named); err != nil {
		t.Fatal(err)
	}
	if !exists(ns) || !exists(named) {
		t.Error("a write or a name did not make it")
	}
	wantExact(t, tr)
}

// A write into a namespace whose directory was removed makes it again, with
// description and name.
func TestVanishedNamespaceIsMadeAgain(t *testing.T) {
	for name, hook := range modes {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			tr := open(t, opts(t, root, hook))
			<-tr.ScanDone()
			ns := tiertest.Namespace(t, "a")
			if err := tr.KeepName(t.Context(), "mine", ns); err != nil {
				t.Fatal(err)
			}
			old := blocks(t, ns, 0, 2, 0)
			write(t, tr, ns, old)
			if err := os.RemoveAll(filepath.Join(root, ns.Fingerprint().String())); err != nil {
				t.Fatal(err)
			}
			items := blocks(t, ns, 10, 3, 0)
			write(t, tr, ns, items)
			readable(t, tr, ns, items)
			tr.Read(t.Context(), ns, old) // so that it notices
			wantExact(t, tr)
			closeTier(t, tr)
			tr = openClosing(t, opts(t, root, hook))
			readable(t, tr, ns, items)
			if got, _ := tr.Names(t.Context()); got["mine"] == nil {
				t.Errorf("names %v", got)
			}
		})
	}
}

// A root that is removed under the node is named, on one line, with what to do.
func TestRootRemovedIsUnavailable(t *testing.T) {
	for name, hook := range modes {
		t.Run(name, func(t *testing.T) {
			root := filepath.Join(t.TempDir(), "root")
			if err := os.Mkdir(root, 0o700); err != nil {
				t.Fatal(err)
			}
			tr := open(t, quiet(opts(t, root, hook)))
			defer func() { _ = tr.Close(t.Context()) }()
			<-tr.ScanDone()
			a, b := tiertest.Namespace(t, "a"), tiertest.Namespace(t, "b")
			write(t, tr, a, blocks(t, a, 0, 1, 0))
			if err := os.RemoveAll(root); err != nil {
				t.Fatal(err)
			}
			for _, ns := range []*block.Namespace{a, b, a} {
				w := blocks(t, ns, 1, 1, 0)
				tr.Write(t.Context(), ns, w)
				err := w[0].Err
				if tier.CauseOf(err) != tier.CauseUnavailable || strings.Contains(err.Error(), "\n") || !strings.Contains(err.Error(), root) ||
					!strings.Contains(err.Error(), "restart the node") {
					t.Errorf("%v is %v", err, tier.CauseOf(err))
				}
			}
			r := blocks(t, a, 0, 1, 0)
			if tr.Read(t.Context(), a, r); tier.ClassOf(r[0].Err) != tier.ClassNotFound {
				t.Errorf("read: %v", r[0].Err)
			}
		})
	}
}
