package client_test

import (
	"errors"
	"testing"

	"github.com/terrace-kv/terrace/client"
	"github.com/terrace-kv/terrace/internal/engine/enginetest"
)

// Every way to touch a block passes the same check: what a lost session, a
// closed client or nobody at all has given is refused by all of them, and no
// byte is read or written (B037).
func TestEveryAccessChecksItsLease(t *testing.T) {
	ctx := t.Context()
	n := startNode(t)
	c := dial(t, n)
	r := request(t, c, "r")
	keys := enginetest.Keys(0, 1)
	if _, err := r.Store(ctx, 0, 0, keys, fill(keys)); err != nil {
		t.Fatal(err)
	}
	leases, err := r.Pin(ctx, keys)
	if err != nil {
		t.Fatal(err)
	}
	grants, err := r.Reserve(ctx, 0, 0, enginetest.Keys(5, 1))
	if err != nil {
		t.Fatal(err)
	}
	dst := make([]byte, blockSize)
	touched := false
	touch := func([]byte) error { touched = true; return nil }
	ways := func(l client.Lease, g client.Grant) map[string]error {
		clear(dst)
		touched = false
		return map[string]error{
			"view": c.View(l, touch), "read into": c.ReadInto(l, dst), "verify": c.Verify(l), "write": c.Write(g, touch),
		}
	}
	for name, err := range ways(leases[0], grants[0]) {
		if err != nil {
			t.Errorf("%s of a good one: %v", name, err)
		}
	}
	refused := func(what string, want error, l client.Lease, g client.Grant) {
		t.Helper()
		for name, err := range ways(l, g) {
			if err == nil || want != nil && !errors.Is(err, want) {
				t.Errorf("%s, %s: %v, want %v", what, name, err, want)
			}
		}
		for _, b := range dst {
			if b != 0 || touched {
				t.Fatalf("%s: bytes were touched", what)
			}
		}
	}
	refused("nobody's", nil, client.Lease{}, client.Grant{})
	n.restart(t)
	until(t, "it has greeted again", func() bool {
		info, err := c.Info()
		return err == nil && info.Epoch != leases[0].Epoch
	})
	refused("of a lost session", client.ErrStale, leases[0], grants[0])
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	refused("after close", client.ErrClosed, leases[0], grants[0])
}
