package node

import (
	"errors"
	"fmt"
	"time"

	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/tier"
)

// VerifyReport is what a node has found wrong with itself: the body of
// /v1/verify. Sizes are bytes.
type VerifyReport struct {
	OK       bool     `json:"ok"`                // no problem was found, in what was checked
	Problems []string `json:"problems"`          // each names the invariant that is broken
	Skipped  []string `json:"skipped,omitempty"` // what was not checked, and why

	Primary      PrimaryStatus  `json:"primary"`
	Pins         int            `json:"pins"`
	PauseSeconds float64        `json:"pause_seconds"` // how long calls waited for the check of the primary
	Tiers        []VerifiedTier `json:"tiers"`
}

// VerifiedTier is the check of one tier's books; tiers that keep none are left
// out.
type VerifiedTier struct {
	Name         string  `json:"name"`
	Blocks       int64   `json:"blocks"`
	UsedBytes    int64   `json:"used_bytes"`
	PauseSeconds float64 `json:"pause_seconds"` // how long its calls waited for the check
}

// verifiable is a tier that can compare its books with each other. Its calls
// wait as long as pause says; what takes longer than about pauseMax is left
// out, and whole is false.
type verifiable interface {
	CheckInvariants(pauseMax time.Duration) (pause time.Duration, whole bool, err error)
}

// What a walk over the tables costs, about: for a block and for each pin, in
// memory that is not in the processor's cache.
const (
	checkBlockTime = 150 * time.Nanosecond
	checkPinTime   = 500 * time.Nanosecond
)

var errNotChecked = errors.New("not checked")

// Verify checks the node while it runs. All calls wait for the walk over the
// core's tables, so one that would take longer than about pauseMax is left
// out. The sums of bytes are always checked.
func (n *Node) Verify(pauseMax time.Duration) VerifyReport {
	r := VerifyReport{Problems: []string{}, Tiers: []VerifiedTier{}}
	problem := func(where string, err error) {
		if err != nil {
			r.Problems = append(r.Problems, fmt.Sprintf("%s: %v", where, err))
		}
	}
	skip := func(what string, blocks int64) {
		r.Skipped = append(r.Skipped, fmt.Sprintf("%s: a walk over %d blocks would hold up calls for more than %s; allow a longer pause", what, blocks, pauseMax))
	}
	pause, c, err := n.checkCore(pauseMax)
	r.PauseSeconds, r.Primary, r.Pins = pause.Seconds(), n.primaryStatus(&c), c.Pins
	problem("primary", sumsUp(&c))
	if errors.Is(err, errNotChecked) {
		skip("primary", c.Blocks)
	} else {
		problem("primary", err)
	}
	for _, h := range n.tiers {
		v, ok := h.tier.(verifiable)
		if !ok {
			continue
		}
		pause, whole, err := v.CheckInvariants(pauseMax)
		t := VerifiedTier{Name: h.info.Name, PauseSeconds: pause.Seconds()}
		if st, ok := h.tier.(tier.Statser); ok {
			s := st.Stats()
			t.Blocks, t.UsedBytes = s.Blocks, s.UsedBytes
		}
		if err == nil && !whole {
			skip("tier "+t.Name, t.Blocks)
		}
		problem("tier "+t.Name, err)
		r.Tiers = append(r.Tiers, t)
	}
	r.OK = len(r.Problems) == 0
	return r
}

// checkCore walks the core's tables, if that is short enough, and gives its
// counts of the same moment.
func (n *Node) checkCore(pauseMax time.Duration) (pause time.Duration, c core.Stats, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	began := time.Now()
	defer func() {
		pause = time.Since(began)
		// Tables that lead nowhere end a walk so. The node goes on: what it does
		// with them has checks of its own.
		if e := recover(); e != nil {
			err = fmt.Errorf("the walk over the tables failed: %v", e)
		}
	}()
	c = n.core.Stats()
	if time.Duration(c.Blocks+int64(c.Fills))*checkBlockTime+time.Duration(c.Pins)*checkPinTime > pauseMax {
		return 0, c, errNotChecked
	}
	return 0, c, errors.Join(n.core.CheckInvariants(), n.peers.check())
}

// sumsUp says whether every byte of the region is counted once.
func sumsUp(c *core.Stats) error {
	if sum := c.Free + c.Evictable + c.Pinned + c.Filling + c.Quarantined + c.Remainder; sum != c.Capacity {
		return fmt.Errorf("capacity: free, evictable, pinned, filling, quarantined and remainders are %d bytes of %d", sum, c.Capacity)
	}
	return nil
}
