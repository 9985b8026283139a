package terrace_test

import (
	"context"
	"encoding/binary"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/terrace-kv/terrace"
	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/client"
	"github.com/terrace-kv/terrace/internal/content"
	"github.com/terrace-kv/terrace/tier/fstier"
	"github.com/terrace-kv/terrace/tier/memtier"
)

const blockBytes = 4096

var spec = block.Spec{Model: "m", DType: "bytes", Layout: "content", HashAlgorithm: "sha256", HashLength: 32,
	Groups: []block.Group{{Kind: block.KindFull, TokensPerBlock: 16, BlockBytes: blockBytes}}}

func keys(n int) []block.Key {
	out := make([]block.Key, n)
	for i := range out {
		var h [32]byte
		binary.BigEndian.PutUint64(h[:], uint64(i))
		out[i], _ = block.NewKey(h[:], 0)
	}
	return out
}

// open starts a node of so many blocks with a tier in memory, and an engine.
func open(t *testing.T, blocks int, mod func(*terrace.Options)) (*terrace.Node, *client.Client) {
	t.Helper()
	o := terrace.Options{Socket: filepath.Join(t.TempDir(), "s"), PrimarySize: int64(blocks) * blockBytes,
		Tiers: []terrace.Tier{{Tier: memtier.NewIndexed(memtier.Options{})}}}
	if mod != nil {
		mod(&o)
	}
	n, err := terrace.Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	c, err := client.Dial(t.Context(), client.Options{Socket: o.Socket, Spec: spec})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := errors.Join(c.Close(), n.Close(ctx)); err != nil && !t.Failed() {
			t.Error(err)
		}
	})
	return n, c
}

func fill(t *testing.T, ks []block.Key) func(int, []byte) (uint64, error) {
	ns, err := block.NewNamespace(spec)
	if err != nil {
		t.Fatal(err)
	}
	return func(i int, dst []byte) (uint64, error) {
		content.Fill(ns.Fingerprint(), ks[i], dst)
		return client.Sum(dst), nil
	}
}

// A prompt larger than the primary is stored, and its beginning can be loaded.
func TestPromptLargerThanThePrimary(t *testing.T) {
	n, c := open(t, 64, nil)
	r, err := c.NewRequest(t.Context(), "a", client.NoLimits())
	if err != nil {
		t.Fatal(err)
	}
	ks := keys(1000)
	for at := len(ks); at > 0; at -= 20 { // one by one, so that cascades let go of what they write
		st, err := r.Store(t.Context(), 0, at-20, ks[at-20:at], fill(t, ks[at-20:at]))
		if err != nil || st.Stored != 20 {
			t.Fatalf("%+v, %v", st, err)
		}
		if f, err := r.Flush(t.Context(), 5*time.Second); err != nil || !f.Done || f.Failed != 0 {
			t.Fatalf("%+v, %v", f, err)
		}
	}
	a, err := r.Lookup(t.Context(), [][]block.Key{ks}, client.LookupOptions{Wait: 5 * time.Second})
	if err != nil || a.Tokens < 16*30 {
		t.Fatalf("%d tokens, %v", a.Tokens, err)
	}
	if err := r.Finish(t.Context()); err != nil {
		t.Fatal(err)
	}
	// In one call, a reserve that does not fit is made smaller.
	if r, err = c.NewRequest(t.Context(), "b", client.NoLimits()); err != nil {
		t.Fatal(err)
	}
	more := keys(1200)[1000:]
	st, err := r.Store(t.Context(), 0, 0, more, fill(t, more))
	if st.Stored == 0 || err != nil && !errors.Is(err, client.ErrNoRoom) {
		t.Fatalf("%+v, %v", st, err)
	}
	if err := n.CheckInvariants(); err != nil {
		t.Fatal(err)
	}
}

func TestCommittedGrantCannotBeWritten(t *testing.T) {
	_, c := open(t, 64, nil)
	r, err := c.NewRequest(t.Context(), "a", client.NoLimits())
	if err != nil {
		t.Fatal(err)
	}
	g, err := r.Reserve(t.Context(), 0, 0, keys(2))
	if err != nil {
		t.Fatal(err)
	}
	nop := func([]byte) error { return nil }
	if err := c.Write(g[0], nop); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Commit(t.Context(), []client.Fill{g[0].FillUnsummed()}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Abort(t.Context(), g[1:]); err != nil {
		t.Fatal(err)
	}
	for i := range g {
		if err := c.Write(g[i], nop); !errors.Is(err, client.ErrStale) {
			t.Errorf("grant %d: %v", i, err)
		}
	}
}

// A call that names nonsense is refused; the session and what it holds stay.
func TestBadRequestIDIsRefused(t *testing.T) {
	_, c := open(t, 64, nil)
	r, err := c.NewRequest(t.Context(), "a", client.NoLimits())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.NewRequest(t.Context(), "a\xffb", client.NoLimits()); !errors.Is(err, client.ErrInvalid) {
		t.Fatalf("%v", err)
	}
	if err := r.Finish(t.Context()); err != nil {
		t.Fatalf("the session was lost: %v", err)
	}
}

// A name stands for one namespace also after a restart: an engine that comes
// back with another dtype hears which field differs.
func TestNameSurvivesARestart(t *testing.T) {
	root, socket := t.TempDir(), filepath.Join(t.TempDir(), "s")
	for i, dtype := range []string{"bf16", "fp8", "bf16"} {
		ft, err := fstier.Open(t.Context(), fstier.Options{Root: root, MinFree: -1})
		if err != nil {
			t.Fatal(err)
		}
		n, err := terrace.Open(t.Context(), terrace.Options{Socket: socket, PrimarySize: 64 * blockBytes, Tiers: []terrace.Tier{{Tier: ft}}})
		if err != nil {
			t.Fatal(err)
		}
		s := spec
		s.DType = dtype
		c, err := client.Dial(t.Context(), client.Options{Socket: socket, Spec: s, NamespaceName: "prod"})
		if i != 1 {
			if err != nil {
				t.Fatal(err)
			}
			if err := c.Close(); err != nil {
				t.Fatal(err)
			}
		} else if !errors.Is(err, client.ErrNamespace) || !strings.Contains(err.Error(), "dtype") {
			t.Fatalf("another dtype under the name: %v", err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		if err := n.Close(ctx); err != nil {
			t.Error(err)
		}
		cancel()
	}
}

// What is called after a finish has one answer, whether or not a store of the
// request is still pending.
func TestCallsAfterFinishHaveOneAnswer(t *testing.T) {
	_, c := open(t, 64, nil)
	for _, pending := range []bool{false, true} {
		r, err := c.NewRequest(t.Context(), "a", client.NoLimits())
		if err != nil {
			t.Fatal(err)
		}
		var g []client.Grant
		if pending {
			if g, err = r.Reserve(t.Context(), 0, 0, keys(1)); err != nil {
				t.Fatal(err)
			}
		}
		if err := r.Finish(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := r.Finish(t.Context()); !errors.Is(err, client.ErrNoRequest) || errors.Is(err, client.ErrFinished) != pending {
			t.Errorf("second finish, pending %v: %v", pending, err)
		}
		if _, err := r.Abort(t.Context(), g); err != nil {
			t.Error(err)
		}
	}
}

// TestPeerOptions: what can never work is refused by name, and an address has
// one form, whoever writes it.
func TestPeerOptions(t *testing.T) {
	for _, x := range []struct {
		p    terrace.Peers
		want string
	}{
		{terrace.Peers{Listen: "127.0.0.1:0", Transport: "rdma"}, `peers.transport is "rdma", want tcp or ucx`},
		{terrace.Peers{Listen: "127.0.0.1:0", Advertise: "node-7"}, `peers.advertise is "node-7", want a host and a port`},
	} {
		_, err := terrace.Open(t.Context(), terrace.Options{Socket: filepath.Join(t.TempDir(), "s"), PrimarySize: 1 << 20, Peers: &x.p})
		if err == nil || !strings.Contains(err.Error(), x.want) {
			t.Errorf("%+v: %v", x.p, err)
		}
	}
	n, _ := open(t, 16, func(o *terrace.Options) {
		o.Peers = &terrace.Peers{Listen: "127.0.0.1:0", Advertise: "[0:0::1]:7301"}
	})
	if a := n.Status().Peers.Advertise; a != "[::1]:7301" {
		t.Errorf("advertised as %s", a)
	}
}
