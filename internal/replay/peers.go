package replay

import (
	"math/bits"
	"net"
	"strconv"
	"sync"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/client"
	"github.com/terrace-kv/terrace/internal/node"
)

// peersMax bounds the nodes of one replay.
const peersMax = 16

// directory is the orchestrator of a replay over several nodes: it knows which
// of them have had a block, and tells a request where the longest part of its
// prompt is. It never hears of an eviction, as a real one hears of it late.
type directory struct {
	addrs []string // of each node, for its peers

	mu  sync.Mutex
	had map[block.Key]uint16 // one bit a node
}

// node of an engine: they take turns.
func (d *directory) node(engine int) int { return engine % len(d.addrs) }

// hint are the parameters of a request of an engine. A nil directory gives none.
func (d *directory) hint(engine int, id string, keys []block.Key) client.Params {
	p := client.NoLimits()
	if d == nil {
		return p
	}
	self := uint16(1) << d.node(engine)
	d.mu.Lock()
	ours, others, best := true, ^self, uint16(0)
	for i := 0; i < len(keys) && others != 0; i++ {
		had := d.had[keys[i]]
		ours = ours && had&self != 0
		if others &= had; others != 0 {
			best = others
		}
		if ours {
			best = 0 // nobody has more of it than this node, so far
		}
	}
	d.mu.Unlock()
	if best == 0 {
		return p
	}
	host, port, err := net.SplitHostPort(d.addrs[bits.TrailingZeros16(best)])
	if err != nil {
		return p
	}
	p.Peer, p.PeerHost, p.PeerRequestID = client.PeerProbe, host, id
	p.PeerPort, _ = strconv.Atoi(port)
	return p
}

// has notes that an engine's node has had the blocks of a prompt.
func (d *directory) has(engine int, keys []block.Key) {
	if d == nil {
		return
	}
	self := uint16(1) << d.node(engine)
	d.mu.Lock()
	for i := range keys {
		d.had[keys[i]] |= self
	}
	d.mu.Unlock()
}

// together is the account of several nodes as if they were one.
func together(all []*node.Status) *node.Status {
	if len(all) == 1 {
		return all[0]
	}
	sum := &node.Status{}
	at := map[string]int{}
	for _, s := range all {
		sum.BootID += s.BootID + " "
		p, q := &sum.Primary, &s.Primary
		p.CapacityBytes, p.FreeBytes, p.RemainderBytes = p.CapacityBytes+q.CapacityBytes, p.FreeBytes+q.FreeBytes, p.RemainderBytes+q.RemainderBytes
		p.Blocks, p.Evicted = p.Blocks+q.Blocks, p.Evicted+q.Evicted
		sum.Lookups.Calls += s.Lookups.Calls
		sum.Stores.Committed += s.Stores.Committed
		for _, t := range s.Tiers {
			i, ok := at[t.Name]
			if !ok {
				i = len(sum.Tiers)
				at[t.Name] = i
				sum.Tiers = append(sum.Tiers, node.TierStatus{Name: t.Name, Failures: map[string]int64{}, Dropped: map[string]int64{}})
			}
			to := &sum.Tiers[i]
			to.Hits, to.ReadBytes, to.WriteBytes = to.Hits+t.Hits, to.ReadBytes+t.ReadBytes, to.WriteBytes+t.WriteBytes
			to.Blocks, to.UsedBytes = to.Blocks+t.Blocks, to.UsedBytes+t.UsedBytes
			for cause, n := range t.Failures {
				to.Failures[cause] += n
			}
			for cause, n := range t.Dropped {
				to.Dropped[cause] += n
			}
		}
	}
	return sum
}
