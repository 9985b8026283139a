package tiertest

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
)

// Bench measures Known, where there is one, over a prompt of 1000 keys; and
// reads and writes of 64 KiB and 1 MiB from 16 goroutines, one block a call. The write of a block includes the deletion of the one that its
// worker wrote before, so that the store stays small.
func Bench(b *testing.B, f Factory) {
	b.Run("known", func(b *testing.B) {
		t, ns := benchOpen(b, f)
		k, ok := t.(tier.Knower)
		if !ok {
			b.Skip("the tier is not a Knower")
		}
		const blocks, prompt = 4096, 1000
		item := []tier.Item{{Buf: Buffer(b, ns.BlockBytes(1))}}
		keys := make([]block.Key, blocks)
		for i := range keys {
			keys[i] = Key(i, 1)
			item[0].Key = keys[i]
			Fill(ns, &item[0])
			if t.Write(b.Context(), ns, item); item[0].Err != nil {
				b.Fatal(item[0].Err)
			}
		}
		out := make([]tier.Presence, prompt)
		b.ReportAllocs()
		i := 0
		for b.Loop() {
			k.Known(ns, keys[i:i+prompt], out)
			i = (i + 61) % (blocks - prompt)
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/prompt, "ns/key")
	})
	for _, group := range []uint32{3, 4} {
		size := groups[group].BlockBytes
		b.Run(fmt.Sprintf("write/%dKiB", size>>10), func(b *testing.B) {
			t, ns := benchOpen(b, f)
			var next atomic.Int64
			benchWorkers(b, int(size), func(buf []byte) func() error {
				item := []tier.Item{{Buf: buf}}
				Fill(ns, &item[0])
				var last block.Key
				return func() error {
					item[0].Key = Key(int(next.Add(1)), group)
					t.Write(b.Context(), ns, item)
					if item[0].Err == nil && last != (block.Key{}) {
						item[0].Err = t.Delete(b.Context(), ns, []block.Key{last})
					}
					last = item[0].Key
					return item[0].Err
				}
			})
		})
		b.Run(fmt.Sprintf("read/%dKiB", size>>10), func(b *testing.B) {
			t, ns := benchOpen(b, f)
			const blocks = 64
			buf := Buffer(b, int(size))
			for i := range blocks {
				item := []tier.Item{{Key: Key(i, group), Buf: buf}}
				Fill(ns, &item[0])
				if t.Write(b.Context(), ns, item); item[0].Err != nil {
					b.Fatal(item[0].Err)
				}
			}
			var next atomic.Int64
			benchWorkers(b, int(size), func(buf []byte) func() error {
				item := []tier.Item{{Buf: buf}}
				return func() error {
					item[0].Key = Key(int(next.Add(1)%blocks), group)
					t.Read(b.Context(), ns, item)
					return item[0].Err
				}
			})
		})
	}
}

func benchOpen(b *testing.B, f Factory) (tier.Tier, *block.Namespace) {
	t, ns := f.Open(b, b.TempDir()), Namespace(b, "bench")
	b.Cleanup(func() {
		if err := t.Close(context.Background()); err != nil {
			b.Error(err)
		}
	})
	if o, ok := t.(tier.NamespaceOpener); ok {
		if err := o.OpenNamespace(b.Context(), ns); err != nil {
			b.Fatal(err)
		}
	}
	return t, ns
}

// benchWorkers runs b.N calls on 16 goroutines.
func benchWorkers(b *testing.B, size int, worker func(buf []byte) func() error) {
	const workers = 16
	calls := make([]func() error, workers)
	for i := range calls {
		calls[i] = worker(Buffer(b, size))
	}
	b.SetBytes(int64(size))
	b.ReportAllocs()
	b.ResetTimer()
	var left atomic.Int64
	left.Store(int64(b.N))
	done := make(chan error, workers)
	for _, call := range calls {
		go func() {
			for left.Add(-1) >= 0 {
				if err := call(); err != nil {
					done <- err
					return
				}
			}
			done <- nil
		}()
	}
	for range calls {
		if err := <-done; err != nil {
			b.Error(err)
		}
	}
}
