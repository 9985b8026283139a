package replay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/terrace-kv/terrace/internal/node"
)

// status asks the node for its account of itself.
func status(ctx context.Context, e engine) (*node.Status, error) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	b, err := e.Status(ctx)
	if err != nil {
		return nil, fmt.Errorf("node status: %w", err)
	}
	var s node.Status
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, fmt.Errorf("node status: %w", err)
	}
	return &s, nil
}

// statuses are the accounts of the nodes of engines, as one, and what each says
// of its peers.
func statuses(ctx context.Context, engines []engine) (sum *node.Status, peers []*node.PeersStatus, err error) {
	var all []*node.Status
	for _, e := range engines {
		s, err := status(ctx, e)
		if err != nil {
			return nil, nil, err
		}
		all = append(all, s)
		if s.Peers != nil {
			peers = append(peers, s.Peers)
		}
	}
	if len(all) > 1 && len(peers) < len(all) {
		return nil, nil, errors.New("a node speaks to no others")
	}
	return together(all), peers, nil
}

// fillTiers takes over what the node counted between two accounts. Whatever
// other engines did meanwhile is in there too.
func (res *Result) fillTiers(before, after *node.Status) {
	was := map[string]node.TierStatus{}
	for _, t := range before.Tiers {
		was[t.Name] = t
	}
	res.Evictions = after.Primary.Evicted - before.Primary.Evicted
	p := &res.Tiers[0]
	p.Blocks = after.Primary.Blocks
	p.UsedBytes = after.Primary.CapacityBytes - after.Primary.FreeBytes - after.Primary.RemainderBytes
	promoted, read, written := int64(0), int64(0), int64(0)
	for _, t := range after.Tiers {
		b := was[t.Name]
		r := TierResult{
			Name: t.Name, Hits: t.Hits - b.Hits, ReadBytes: t.ReadBytes - b.ReadBytes, WriteBytes: t.WriteBytes - b.WriteBytes,
			Blocks: t.Blocks, UsedBytes: t.UsedBytes,
		}
		for cause, n := range t.Failures {
			r.Failures += n - b.Failures[cause]
		}
		for cause, n := range t.Dropped {
			r.Dropped += n - b.Dropped[cause]
		}
		promoted, read, written = promoted+r.Hits, read+r.ReadBytes, written+r.WriteBytes
		res.Tiers = append(res.Tiers, r)
	}
	// A block that was pending because another engine was storing it is the
	// primary's hit as well; the engine that waited for it cannot tell.
	p = &res.Tiers[0]
	p.Hits = max(p.Hits, res.PrefixHits-promoted)
	p.ReadBytes = p.Hits * res.BlockBytes // what was promoted is the tier's
	if res.DurationSeconds > 0 {
		res.PromoteBytesPerSecond = float64(read) / res.DurationSeconds
		res.CascadeBytesPerSecond = float64(written) / res.DurationSeconds
	}
}
