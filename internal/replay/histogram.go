package replay

import (
	"math/bits"
	"time"
)

// histogram counts durations in buckets that are at most 1/32 wide of their
// value, so that a trace of any length takes a fixed 15 KiB. The zero value is
// empty. It is not safe for concurrent use.
type histogram struct {
	n      int64
	counts [60 * 32]int64
}

// histBucket maps nanoseconds: below 32 each has its own, above them 32
// buckets share a power of two.
func histBucket(ns uint64) int {
	shift := max(0, bits.Len64(ns)-6)
	return shift*32 + int(ns>>shift)
}

func (h *histogram) add(d time.Duration) {
	h.n++
	h.counts[min(histBucket(uint64(max(0, d))), len(h.counts)-1)]++
}

func (h *histogram) merge(o *histogram) {
	h.n += o.n
	for i, n := range o.counts {
		h.counts[i] += n
	}
}

// us is the q-quantile in microseconds: the upper edge of its bucket, so that
// it never flatters. It is 0 when there is nothing.
func (h *histogram) us(q float64) float64 {
	if h.n == 0 {
		return 0
	}
	rank := int64(q * float64(h.n-1))
	for i, n := range h.counts {
		if rank -= n; rank < 0 {
			shift := max(0, i/32-1)
			return float64((uint64(i-shift*32)+1)<<shift-1) / 1e3
		}
	}
	return 0
}
