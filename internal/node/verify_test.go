package node

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/memtier"
)

// booked is a tier that checks its books as a test wants.
type booked struct {
	tier.Tier
	whole bool
	err   error
}

func (b *booked) CheckInvariants(time.Duration) (time.Duration, bool, error) {
	return time.Second, b.whole, b.err
}

func TestVerify(t *testing.T) {
	b := &booked{Tier: memtier.New(memtier.Options{Info: tier.Info{Name: "books"}}), whole: true}
	n := openNode(t, 64, []tier.Tier{b, memtier.New(memtier.Options{Info: tier.Info{Name: "none"}})}, nil)
	e := greet(t, n, space1(t, "m"))
	e.request("r")
	e.store("r", keys(0, 40), true)
	e.flush("r")
	e.load("r", keys(0, 20))

	r := n.Verify(time.Minute)
	if !r.OK || len(r.Problems)+len(r.Skipped) > 0 || r.Pins != 20 || r.Primary.Blocks != 40 || r.PauseSeconds <= 0 || r.PauseSeconds > 10 {
		t.Errorf("%+v", r)
	}
	if len(r.Tiers) != 1 || r.Tiers[0].Name != "books" || r.Tiers[0].PauseSeconds != 1 {
		t.Errorf("tiers: %+v", r.Tiers)
	}

	// Without time for a walk the sums are still looked at, and it is said.
	b.whole = false
	if r := n.Verify(time.Nanosecond); !r.OK || len(r.Skipped) != 2 || !strings.Contains(r.Skipped[0], "40 blocks") || r.Primary.Blocks != 40 {
		t.Errorf("without time: %+v", r)
	}
	b.err = errors.New("fs-one-list: for the test")
	if r := n.Verify(time.Minute); r.OK || len(r.Problems) != 1 || r.Problems[0] != "tier books: fs-one-list: for the test" {
		t.Errorf("a broken tier: %+v", r)
	}
	b.err, b.whole = nil, true

	// A walk that fails is told, and nobody is held up after it.
	c := n.core
	n.core = nil
	r = n.Verify(time.Minute)
	n.core = c
	if r.OK || len(r.Problems) == 0 || !strings.Contains(strings.Join(r.Problems, " "), "walk over the tables failed") {
		t.Errorf("broken tables: %+v", r)
	}
	e.finish("r")
	idle(t, n)
	if err := n.Close(context.Background()); err != nil {
		t.Error(err)
	}
	if r := n.Verify(time.Minute); !r.OK {
		t.Errorf("closed: %+v", r)
	}
}
