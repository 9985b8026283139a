package transfer

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/minio/crc64nvme"
	"github.com/terrace-kv/terrace/tier"
)

// nullSink takes results and gives the job's place back.
type nullSink struct{ ended chan JobID }

func (s nullSink) JobResults(_ int, id JobID, results []Result, last bool) {
	for i := range results {
		if results[i].Err != nil {
			panic(results[i].Err)
		}
	}
	if last {
		s.ended <- id
	}
}
func (nullSink) ProbeResult(int, JobID, []bool, error) {}
func (nullSink) Health(int, Dir, State)                {}

// BenchmarkLane is the cost of the lane itself: 64 KiB blocks through a tier
// that does nothing. One op is one block.
func BenchmarkLane(b *testing.B) {
	const size = 64 << 10
	buf := make([]byte, size)
	sum := crc64nvme.Checksum(buf)
	f := &fakeTier{
		read: func(_ context.Context, items []tier.Item) {
			for i := range items {
				items[i].Sum = sum
			}
		},
		write: func(context.Context, []tier.Item) {},
	}
	for _, dir := range []Dir{Read, Write} {
		for _, per := range []int{1, 16, 256} {
			for _, plain := range []bool{false, true} {
				name := map[bool]string{false: "sum", true: "nosum"}[plain]
				b.Run(fmt.Sprintf("%s/%d-a-job/%s", dir, per, name), func(b *testing.B) {
					const depth = 16
					s := nullSink{make(chan JobID, depth)}
					l := NewLane(0, f, Options{noChecksum: plain, QueueItems: depth * per, Logger: slog.New(slog.DiscardHandler)}, s)
					jobs := make([]Job, depth)
					for i := range jobs {
						jobs[i] = Job{ID: JobID(i), Dir: dir, NS: testNS, Items: make([]tier.Item, per)}
						for k := range jobs[i].Items {
							jobs[i].Items[k] = tier.Item{Key: testKey(JobID(i), k), Buf: buf, Sum: sum}
						}
						s.ended <- JobID(i)
					}
					b.SetBytes(size)
					b.ReportAllocs()
					b.ResetTimer()
					for n := 0; n < b.N; n += per {
						j := &jobs[<-s.ended]
						j.Deadline = time.Now().Add(time.Minute)
						if err := l.Submit(j); err != nil {
							b.Fatal(err)
						}
					}
					for range depth {
						<-s.ended
					}
					b.StopTimer()
					if err := l.Close(context.Background()); err != nil {
						b.Fatal(err)
					}
				})
			}
		}
	}
}
