package metrics

import (
	"math/bits"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Buckets: durations below 32 ns have one each; above, each power of two is cut
// into 16 equal parts, so a quantile is at most 1/16 too large. Beyond 2^42 ns
// (73 minutes) all is one bucket.
const (
	subBits    = 4
	powers     = 42
	bucketsMax = (powers - subBits + 1) << subBits
)

// Histogram counts durations. Its zero value is empty and ready; it must not be
// copied. Everybody may call everything at any time.
type Histogram struct {
	counts [bucketsMax]atomic.Uint64
	sum    atomic.Int64
}

func bucketOf(d time.Duration) int {
	v := uint64(max(d, 0))
	if v >= 1<<powers {
		return bucketsMax - 1
	}
	shift := max(bits.Len64(v)-subBits-1, 0)
	return shift<<subBits + int(v>>shift)
}

// below is the first duration above bucket i.
func below(i int) time.Duration {
	if i < 2<<subBits {
		return time.Duration(i + 1)
	}
	shift := i>>subBits - 1
	return time.Duration(i-shift<<subBits+1) << shift
}

// Observe counts one duration.
func (h *Histogram) Observe(d time.Duration) {
	h.counts[bucketOf(d)].Add(1)
	h.sum.Add(int64(d))
}

// Count is how many were observed.
func (h *Histogram) Count() (n uint64) {
	for i := range h.counts {
		n += h.counts[i].Load()
	}
	return n
}

// Quantile is a duration that a share q of those observed did not exceed, at
// most 1/16 more than the smallest such. It is 0 while nothing was observed.
func (h *Histogram) Quantile(q float64) time.Duration {
	n := h.Count()
	rank := min(uint64(q*float64(n)), n-min(n, 1))
	for i := range h.counts {
		c := h.counts[i].Load()
		if rank < c {
			return below(i) - 1
		}
		rank -= c
	}
	return 0
}

// collect sends the histogram with one bucket for each power of two from 1 µs
// to 69 s: what dashboards need, at a twentieth of the size.
func (h *Histogram) collect(ch chan<- prometheus.Metric, desc *prometheus.Desc, labels ...string) {
	buckets := map[float64]uint64{}
	var n uint64
	for i := range h.counts {
		n += h.counts[i].Load()
		if end := below(i); end >= 1<<10 && end <= 1<<36 && end&(end-1) == 0 {
			buckets[end.Seconds()] = n
		}
	}
	ch <- prometheus.MustNewConstHistogram(desc, n, time.Duration(h.sum.Load()).Seconds(), buckets, labels...)
}
