package fault

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/vfs"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/memtier"
	"github.com/terrace-kv/terrace/tier/tiertest"
)

func TestFS(t *testing.T) {
	under, err := vfs.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = under.Close() }()
	data := []byte("0123456789abcdef")
	// try runs a write and a read of a file under rules.
	try := func(rules string) (wrote int, got string, err error) {
		t.Helper()
		set := MustParse(rules)
		fs := FS(under, set, func(p string) string { return "key of " + p })
		f, err := fs.Open("f", unix.O_RDWR|unix.O_CREAT|unix.O_TRUNC, 0o600)
		if err != nil {
			return 0, "", err
		}
		defer func() { _ = f.Close() }()
		wrote, err = f.WriteVec([][]byte{data[:4], data[4:]}, 0)
		b := make([]byte, 100)
		n, rerr := f.ReadVec([][]byte{b[:2], b[2:]}, 0)
		return wrote, string(b[:n]), errors.Join(err, rerr)
	}
	for rules, want := range map[string]struct {
		wrote int
		got   string
		err   error
	}{
		"":                                               {16, "0123456789abcdef", nil},
		"error(EMFILE) when op(open)":                    {0, "", unix.EMFILE},
		"error(EIO) when op(write)":                      {0, "", unix.EIO},
		"late(EIO) when op(write)":                       {16, "0123456789abcdef", unix.EIO},
		"short(5) when op(write)":                        {5, "01234", nil},
		"short(5) when reads":                            {16, "01234", nil},
		"torn(6) when op(write)":                         {16, "012345", nil},
		"torn(0) when op(write)":                         {16, "", nil},
		"torn(6) error(ENOSPC) when op(write)":           {16, "012345", unix.ENOSPC},
		"torn(6) error(EIO) when op(read)":               {16, "", unix.EIO},
		"flip when op(write)":                            {16, "01234567<9abcdef", nil},
		"flip when op(read)":                             {16, "01234567 9abcdef", nil},
		"disconnect when op(read)":                       {16, "", unix.ENODEV},
		`error(EIO) when and(key("key of f"), op(read))`: {16, "", unix.EIO},
		`error(EIO) when key("f")`:                       {16, "0123456789abcdef", nil},
		"error(EIO) when and(writes, op(read, stat, lstat, space, readdir))": {16, "0123456789abcdef", nil},
		"error(EIO) when and(reads, op(open, write, link, sync, close))":     {16, "0123456789abcdef", nil},
	} {
		wrote, got, err := try(rules)
		if strings.HasPrefix(rules, "flip when op(read") {
			// Which byte is turned is not promised.
			if wrong := diff(got, string(data)); wrong != 1 {
				t.Errorf("%s: %d bytes are wrong", rules, wrong)
			}
			got = want.got
		}
		if wrote != want.wrote || got != want.got || !errors.Is(err, want.err) {
			t.Errorf("%s: %d bytes written, %q read, %v; want %+v", rules, wrote, got, err, want)
		}
	}
}

func diff(a, b string) (n int) {
	for i := range len(a) {
		if a[i] != b[i] {
			n++
		}
	}
	return n + len(b) - len(a)
}

func TestFSHang(t *testing.T) {
	under, err := vfs.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = under.Close() }()
	synctest.Test(t, func(t *testing.T) {
		set := MustParse("hang when op(space); delay(1h) when op(mkdir)")
		fs := FS(under, set, nil)
		done := make(chan error, 1)
		go func() { _, err := fs.Space(); done <- err }()
		begin := time.Now()
		if err := fs.Mkdir("d", 0o700); err != nil || time.Since(begin) != time.Hour {
			t.Errorf("mkdir took %v: %v", time.Since(begin), err)
		}
		select {
		case <-done:
			t.Error("a hung call is over")
		default:
		}
		set.Release()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if _, err := fs.Space(); err != nil { // does not hang any more
			t.Error(err)
		}
	})
}

// Without rules a wrapped tier is as good as the tier.
func TestTierConformance(t *testing.T) {
	tiertest.Run(t, tiertest.Factory{Open: func(testing.TB, string) tier.Tier {
		return Tier(memtier.NewIndexed(memtier.Options{}), MustParse(""))
	}})
	if _, ok := Tier(memtier.New(memtier.Options{}), MustParse("")).(tier.Knower); ok {
		t.Error("a tier that has to be probed is a Knower when it is wrapped")
	}
	if _, ok := Tier(memtier.NewIndexed(memtier.Options{}), MustParse("")).(tier.Knower); !ok {
		t.Error("a Knower is none when it is wrapped")
	}
}

func TestTier(t *testing.T) {
	ns := tiertest.Namespace(t, "a")
	key := tiertest.Key(1, 1)
	rule := func(do, kind string) string { return fmt.Sprintf("%s when and(op(%s), key(%q))", do, kind, key) }
	for rules, want := range map[string]struct {
		write, read tier.Class
		wrong       bool // the bytes read are not those written
	}{
		"":                                    {},
		rule("error(EIO)", "write"):           {tier.ClassPermanent, tier.ClassNotFound, false},
		rule("error(retryable, io)", "write"): {tier.ClassRetryable, tier.ClassNotFound, false},
		rule("late(EIO)", "write"):            {tier.ClassPermanent, 0, false},
		rule("late(EIO)", "read"):             {0, tier.ClassPermanent, false},
		rule("disconnect", "read"):            {0, tier.ClassRetryable, false},
		rule("short(100)", "read"):            {0, tier.ClassCorrupt, false},
		rule("flip", "read"):                  {0, 0, true},
		rule("flip", "write"):                 {0, 0, true},
		rule("torn(100)", "read"):             {0, 0, true},
		rule("torn(100)", "write"):            {0, 0, true},
		rule("short(9000)", "read"):           {},
		rule("error(EIO)", "delete"):          {},
		rule("delay(1ms)", "read, write"):     {},
	} {
		mem := memtier.New(memtier.Options{})
		tr := Tier(mem, MustParse(rules))
		items := make([]tier.Item, 3)
		for i := range items {
			items[i] = tier.Item{Key: tiertest.Key(i, 1), Buf: tiertest.Buffer(t, ns.BlockBytes(1))}
			tiertest.Fill(ns, &items[i])
		}
		before := bytes.Clone(items[1].Buf)
		tr.Write(t.Context(), ns, items)
		if !bytes.Equal(items[1].Buf, before) {
			t.Errorf("%s: a write changes the block", rules)
		}
		if got := tier.ClassOf(items[1].Err); got != want.write {
			t.Errorf("%s: write says %v", rules, items[1].Err)
		}
		for i := range items {
			clear(items[i].Buf)
		}
		tr.Read(t.Context(), ns, items)
		if got := tier.ClassOf(items[1].Err); got != want.read {
			t.Errorf("%s: read says %v", rules, items[1].Err)
		} else if got == tier.ClassNone && want.wrong != (tiertest.Check(ns, &items[1]) != nil) {
			t.Errorf("%s: wrong bytes: %v", rules, !want.wrong)
		}
		for _, i := range []int{0, 2} {
			if err := tiertest.Check(ns, &items[i]); err != nil {
				t.Errorf("%s: a block without a fault: %v", rules, err)
			}
		}
		if err := tr.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// Calls about anything but blocks, too: each error is there, each late one
// after the call.
func TestTierCalls(t *testing.T) {
	ns, key := tiertest.Namespace(t, "a"), tiertest.Key(1, 1)
	for kind, call := range map[string]func(tr tier.Tier) error{
		"contains":       func(tr tier.Tier) error { return tr.Contains(t.Context(), ns, []block.Key{key}, make([]bool, 1)) },
		"delete":         func(tr tier.Tier) error { return tr.Delete(t.Context(), ns, []block.Key{key}) },
		"open_namespace": func(tr tier.Tier) error { return tr.(tier.NamespaceOpener).OpenNamespace(t.Context(), ns) },
		"keep_name":      func(tr tier.Tier) error { return tr.(tier.NameKeeper).KeepName(t.Context(), "prod", ns) },
		"set_aside":      func(tr tier.Tier) error { return tr.(tier.SetAsider).SetAside(t.Context(), ns, key, "test") },
		"close":          func(tr tier.Tier) error { return tr.Close(t.Context()) },
	} {
		for _, do := range []string{"error(EIO)", "late(EIO)"} {
			set := MustParse(do + " when op(" + kind + ")")
			if err := call(Tier(memtier.New(memtier.Options{}), set)); !errors.Is(err, unix.EIO) || !set.Surfaced(err) {
				t.Errorf("%s: %s: %v", kind, do, err)
			}
		}
	}
	found := make([]bool, 1)
	if err := Tier(memtier.New(memtier.Options{}), MustParse("flip")).Contains(t.Context(), ns, []block.Key{key}, found); err != nil || !found[0] {
		t.Errorf("a flipped contains: %v, %v", found, err)
	}
}

// A delay ends with the call's context, a hang does not.
func TestTierWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ns := tiertest.Namespace(t, "a")
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		set := MustParse("delay(1h) when op(delete); hang when op(contains)")
		tr := Tier(memtier.New(memtier.Options{}), set)
		begin := time.Now()
		if err := tr.Delete(ctx, ns, []block.Key{{}}); tier.ClassOf(err) != tier.ClassCancelled || time.Since(begin) != time.Second {
			t.Errorf("delay: %v after %v", err, time.Since(begin))
		}
		done := make(chan error, 1)
		go func() { done <- tr.Contains(ctx, ns, []block.Key{{}}, make([]bool, 1)) }()
		time.Sleep(time.Minute)
		select {
		case <-done:
			t.Error("a hang ends with the context")
		default:
		}
		set.Release()
		if err := <-done; tier.ClassOf(err) != tier.ClassCancelled {
			t.Errorf("after the hang: %v", err)
		}
	})
}

// pipe is a buffered pair of connections, the first under rules.
func pipe(t *testing.T, set *Set) (net.Conn, net.Conn) {
	t.Helper()
	l, err := net.Listen("unix", t.TempDir()+"/s")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	b, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	c := Conn(a, set, "engine")
	t.Cleanup(func() { _ = c.Close(); _ = b.Close() })
	return c, b
}

func TestConn(t *testing.T) {
	const text = "0123456789abcdef"
	for rules, want := range map[string]struct {
		sent string // what the other side gets until the end
		err  error  // of the write
	}{
		"":                          {text, nil},
		"error(EPIPE) when writes":  {"", unix.EPIPE},
		"late(EPIPE) when writes":   {text, unix.EPIPE},
		"short(3) when writes":      {text, nil},
		"torn(3) when writes":       {"012", unix.ECONNRESET},
		"disconnect when writes":    {"", unix.ECONNRESET},
		"flip when writes":          {"01234567<9abcdef", nil},
		"delay(1ns) when writes":    {text, nil},
		"flip when off(1, 100)":     {text, nil},
		`error(EIO) when key("en")`: {text, nil},
	} {
		c, other := pipe(t, MustParse(rules))
		_, err := c.Write([]byte(text))
		_ = c.Close()
		got, rerr := io.ReadAll(other)
		if string(got) != want.sent || !errors.Is(err, want.err) || rerr != nil {
			t.Errorf("%s: the other side gets %q, %v; the write says %v", rules, got, rerr, err)
		}
	}
	for rules, want := range map[string]struct {
		got string
		err error
	}{
		"":                           {text, nil},
		"error(EIO) when reads":      {"", unix.EIO},
		"short(3) when reads":        {text, nil},
		"torn(3) when reads":         {"012", unix.ECONNRESET},
		"disconnect when off(3, 99)": {text, unix.ECONNRESET},
		"flip when once(reads)":      {"01234567<9abcdef", nil},
	} {
		set := MustParse(rules)
		c, other := pipe(t, set)
		_, _ = other.Write([]byte(text))
		_ = other.Close()
		got, err := io.ReadAll(c)
		if string(got) != want.got || !errors.Is(err, want.err) {
			t.Errorf("%s: read %q, %v", rules, got, err)
		}
		if strings.HasPrefix(rules, "short") && set.Injected() < 6 {
			t.Errorf("%d reads for 16 bytes of three at a time", set.Injected())
		}
	}
}

// A hung call of a connection ends at its deadline, with Close and with
// Release.
func TestConnHang(t *testing.T) {
	for _, kind := range []string{"read", "write"} {
		set := MustParse("hang")
		c, other := pipe(t, set)
		call := c.Write
		if kind == "read" {
			call = c.Read
			_, _ = other.Write([]byte("x"))
		}
		buf := []byte("x")
		_ = c.SetDeadline(time.Now().Add(time.Millisecond))
		if _, err := call(buf); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s at the deadline: %v", kind, err)
		}
		_ = c.SetDeadline(time.Time{})
		done := make(chan error, 1)
		go func() { _, err := call(buf); done <- err }()
		set.Release()
		if err := <-done; err != nil {
			t.Errorf("%s after Release: %v", kind, err)
		}
		c2, _ := pipe(t, MustParse("hang"))
		call = c2.Write
		if kind == "read" {
			call = c2.Read
		}
		go func() { _, err := call(buf); done <- err }()
		_ = c2.Close()
		if err := <-done; !errors.Is(err, net.ErrClosed) {
			t.Errorf("%s after Close: %v", kind, err)
		}
	}
}
