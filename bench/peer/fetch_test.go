package peer

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/client"
)

const (
	blocks     = 128 // of a prompt
	blockBytes = 64 << 10
	conns      = 2  // data connections, the default
	prompts    = 12 // that the producer has
	kept       = 4  // of them, for which the consumer has room
	waitMax    = 30 * time.Second
)

var spec = block.Spec{Model: "bench", DType: "bytes", Layout: "bench", HashAlgorithm: "sha256", HashLength: block.HashSize,
	Groups: []block.Group{{Kind: block.KindFull, TokensPerBlock: 16, BlockBytes: blockBytes}}}

// keys are the blocks of a prompt. Each has its own.
func keys(prompt, n int) []block.Key {
	out := make([]block.Key, n)
	for i := range out {
		var hash [block.HashSize]byte
		id := uint64(prompt<<16 + i)
		binary.BigEndian.PutUint64(hash[:], id*0x9e3779b97f4a7c15)
		binary.BigEndian.PutUint64(hash[8:], id)
		out[i], _ = block.NewKey(hash[:], 0)
	}
	return out
}

// store has a node keep a prompt.
func (n *node) store(b *testing.B, prompt, count int) {
	b.Helper()
	r, err := n.engine.NewRequest(b.Context(), fmt.Sprint(n.n.Add(1)), client.NoLimits())
	if err != nil {
		b.Fatal(err)
	}
	rnd := rand.New(rand.NewPCG(1, uint64(prompt)))
	got, err := r.Store(b.Context(), 0, 0, keys(prompt, count), func(_ int, dst []byte) (uint64, error) {
		for i := 0; i < len(dst); i += 8 {
			binary.LittleEndian.PutUint64(dst[i:], rnd.Uint64())
		}
		return client.Sum(dst), nil
	})
	if err != nil || got.Stored != count {
		b.Fatalf("%+v of %d stored: %v", got, count, err)
	}
	if err := r.Finish(b.Context()); err != nil {
		b.Fatal(err)
	}
}

// from are the parameters of a request that loads from a node, which is at addr.
func from(b *testing.B, addr string, role client.PeerRole, id string) client.Params {
	b.Helper()
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		b.Fatal(err)
	}
	p := client.NoLimits()
	p.Peer, p.PeerHost, p.PeerRequestID = role, host, id
	if p.PeerPort, err = strconv.Atoi(port); err != nil {
		b.Fatal(err)
	}
	return p
}

// lookup makes a request for a prompt, and waits until it is final.
func (n *node) lookup(ctx context.Context, p client.Params, keys []block.Key) (*client.Request, *client.Answer, error) {
	r, err := n.engine.NewRequest(ctx, fmt.Sprint(n.n.Add(1)), p)
	if err != nil {
		return nil, nil, err
	}
	a, err := r.Lookup(ctx, [][]block.Key{keys}, client.LookupOptions{Wait: waitMax})
	if err == nil && !a.Final {
		err = errors.New("the lookup is not final")
	}
	return r, a, err
}

// load is how long it takes until a request has leases on all of a prompt. With
// verify it compares what it got with its checksums afterwards.
func (n *node) load(b *testing.B, p client.Params, keys []block.Key, verify bool) time.Duration {
	b.Helper()
	begin := time.Now()
	r, a, err := n.lookup(b.Context(), p, keys)
	took := time.Since(begin)
	if err != nil {
		b.Fatal(err)
	}
	for i := range keys {
		l, ok := a.Lease(0, i)
		if !ok {
			b.Fatalf("no lease on block %d of %d", i, len(keys))
		}
		if verify {
			if err := n.engine.Verify(l); err != nil {
				b.Fatal(err)
			}
		}
	}
	if err := r.Finish(b.Context()); err != nil {
		b.Fatal(err)
	}
	return took
}

func quantile(d []time.Duration, q float64) time.Duration {
	d = slices.Sorted(slices.Values(d))
	return d[min(len(d)-1, int(q*float64(len(d))))]
}

// BenchmarkFetch has a node load 128 blocks of 64 KiB that are in a peer's
// primary, over a session that is up, and by turns with that two processes move
// as many bytes over as many connections. The node's time is its engine's, from
// the first call to leases on all blocks; what is evicted for them is in it.
// The raw one is from the receiver's question to the last byte.
func BenchmarkFetch(b *testing.B) {
	b.Run("source", func(b *testing.B) { benchFetch(b, client.PeerProbe) })
	b.Run("prefiller", func(b *testing.B) { benchFetch(b, client.PeerAssume) })
}

func benchFetch(b *testing.B, role client.PeerRole) {
	const prompt = blocks * blockBytes
	producer, consumer := startNode(b, childArgs{Node: "a", Primary: (prompts + 2) * prompt}), startNode(b, childArgs{Node: "b", Primary: kept * prompt})
	sender := start(b, childArgs{Raw: prompts * blocks * rawStride})
	receiver := start(b, childArgs{Raw: kept * blocks * rawStride, Dial: sender.addr})
	for i := range prompts {
		producer.store(b, i, blocks)
	}
	id := 0
	fetch := func(i int, verify bool) time.Duration {
		id++
		kv, ks := fmt.Sprint("kv-", id), keys(i%prompts, blocks)
		if role == client.PeerAssume { // the producer's part: it has them all
			p := client.NoLimits()
			p.RemoteDecoder, p.KVRequestID = true, kv
			producer.load(b, p, ks, false)
		}
		return consumer.load(b, from(b, producer.addr, role, kv), ks, verify)
	}
	raw := func(i int) time.Duration {
		if _, err := io.WriteString(receiver.in, fmt.Sprintln(i%prompts)); err != nil {
			b.Fatal(err)
		}
		ns, err := strconv.ParseInt(receiver.line(b), 10, 64)
		if err != nil {
			b.Fatal(err)
		}
		return time.Duration(ns)
	}
	for i := range 2 * prompts {
		fetch(i, true)
		raw(i)
	}
	var ours, theirs []time.Duration
	for i := 0; b.Loop(); i++ {
		if i%2 == 0 {
			ours, theirs = append(ours, fetch(i, false)), append(theirs, raw(i))
		} else {
			theirs, ours = append(theirs, raw(i)), append(ours, fetch(i, false))
		}
	}
	us := func(d time.Duration) float64 { return float64(d) / 1e3 }
	n, r := quantile(ours, 0.5), quantile(theirs, 0.5)
	b.ReportMetric(us(n), "node-p50-µs")
	b.ReportMetric(us(r), "raw-p50-µs")
	b.ReportMetric(us(n)/blocks, "µs/block")
	b.ReportMetric(us(n)/us(r), "node/raw")
	b.ReportMetric(0, "ns/op")
}
