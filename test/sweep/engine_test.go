package sweep

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/minio/crc64nvme"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/arena"
	"github.com/terrace-kv/terrace/internal/content"
	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/internal/node"
)

// waitMax bounds the waits of an engine, in the bubble's time.
const waitMax = 10 * time.Minute

// engine is an engine in the process of the test: one session, with a mapping
// of its own.
type engine struct {
	n      *node.Node
	s      *node.Session
	ns     *block.Namespace
	region *arena.Mapping
	next   int // request
}

func greet(ctx context.Context, n *node.Node, ns *block.Namespace) (*engine, error) {
	s, err := n.OpenSession(ctx, node.Greeting{NS: ns})
	if err != nil {
		return nil, err
	}
	lease, err := s.Attach()
	if err != nil {
		return nil, errors.Join(err, closed(s))
	}
	region, err := arena.Map(lease.File(), s.RegionBytes())
	if err = errors.Join(err, lease.HandOver()); err != nil {
		return nil, errors.Join(err, closed(s))
	}
	return &engine{n: n, s: s, ns: ns, region: region}, nil
}

func closed(s *node.Session) error { s.Close(); return nil }

func (e *engine) close() error {
	e.s.Close()
	return e.region.Close()
}

// request runs f as one request.
func (e *engine) request(f func(id string) error) error {
	e.next++
	id := fmt.Sprint(e.next)
	if err := e.s.NewRequest(id, core.NoLimits()); err != nil {
		return err
	}
	return errors.Join(f(id), e.s.Finish(id))
}

// store stores blocks, waits for their cascades, and says how many were
// written to tiers. With sum the engine computes the checksums.
func (e *engine) store(keys []block.Key, sum bool) (cascaded int, err error) {
	err = e.request(func(id string) error {
		if err := e.fill(id, keys, sum); err != nil {
			return err
		}
		done := make(chan core.Flushed, 1)
		if err := e.s.Flush(id, waitMax, func(f core.Flushed) { done <- f }); err != nil {
			return err
		}
		f := <-done
		if !f.Done {
			return errors.New("cascades go on for ever")
		}
		cascaded = f.Cascaded
		return nil
	})
	return cascaded, err
}

// storeOnly stores blocks and waits for nothing.
func (e *engine) storeOnly(keys []block.Key) error {
	return e.request(func(id string) error { return e.fill(id, keys, true) })
}

// fill is the part of a store in which the engine writes.
func (e *engine) fill(id string, keys []block.Key, sum bool) error {
	grants, err := e.s.Reserve(id, 0, 0, keys, nil)
	if err != nil {
		return err
	}
	var fills []core.Fill
	for i, g := range grants {
		if g.Status != core.Granted {
			continue
		}
		b, err := e.region.Bytes(g.Slot.Offset(), int64(e.ns.BlockBytes(0)))
		if err != nil {
			return err
		}
		content.Fill(e.ns.Fingerprint(), keys[i], b)
		f := core.Fill{Slot: g.Slot, Gen: g.Gen}
		if sum {
			f.Sum, f.HasSum = crc64nvme.Checksum(b), true
		}
		fills = append(fills, f)
	}
	status, err := e.s.Commit(id, fills, nil)
	if err != nil {
		return err
	}
	for _, st := range status {
		if st != core.FillOK {
			return fmt.Errorf("commit says %v", status)
		}
	}
	return nil
}

// load looks up a prompt, waits for what is promoted, and checks every byte of
// what it is given. It says how many blocks that is.
func (e *engine) load(keys []block.Key) (blocks int, err error) {
	err = e.request(func(id string) error {
		a, done := &core.Answer{}, make(chan *core.Answer, 1)
		pending, err := e.s.Lookup(id, [][]block.Key{keys}, false, waitMax, a, func(a *core.Answer) { done <- a })
		if err != nil {
			return err
		}
		if pending {
			a = <-done
		}
		if !a.Final {
			return fmt.Errorf("the answer after %v is not final: %+v", waitMax, a)
		}
		g := a.Groups[0]
		for i, l := range g.Leases {
			b, err := e.region.Bytes(l.Slot.Offset(), int64(e.ns.BlockBytes(0)))
			if err != nil {
				return err
			}
			if at := content.Check(e.ns.Fingerprint(), keys[g.First+i], b); at >= 0 {
				return fmt.Errorf("block %d is wrong at byte %d", g.First+i, at)
			}
			if crc64nvme.Checksum(b) != l.Sum {
				return fmt.Errorf("block %d has another checksum than its lease says", g.First+i)
			}
		}
		blocks = len(g.Leases)
		return nil
	})
	return blocks, err
}

// reset forgets what is in the primary.
func (e *engine) reset() error {
	done := make(chan bool, 1)
	if err := e.s.Reset(waitMax, func(ok bool) { done <- ok }); err != nil {
		return err
	}
	if !<-done {
		return errors.New("reset waits for ever")
	}
	return nil
}

// idle says what is left of requests that are finished, or nil.
func (e *engine) idle() error {
	if err := e.n.CheckInvariants(); err != nil {
		return err
	}
	s := e.n.Status()
	if x := s.Tables; x.Requests+x.Pins+x.Reservations+x.Jobs+x.Waits+x.Quarantined != 0 {
		return fmt.Errorf("tables of an idle node: %+v", x)
	}
	if p := s.Primary; p.FreeBytes+p.EvictableBytes+p.RemainderBytes != p.CapacityBytes {
		return fmt.Errorf("bytes of an idle node: %+v", p)
	}
	return nil
}
