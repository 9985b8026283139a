package core

import (
	"slices"
	"testing"
	"time"
)

// reduce shortens a list that fails to one that still does and from which no
// single element can be taken: it tries without halves, then without ever
// smaller pieces (delta debugging). When its time is up it returns what it has.
// fails must answer the same for the same list.
func reduce[T any](list []T, until time.Time, fails func([]T) bool) []T {
	for size := (len(list) + 1) / 2; size > 0; {
		shorter := false
		for at := 0; at < len(list); {
			if time.Now().After(until) {
				return list
			}
			without := slices.Concat(list[:at], list[min(len(list), at+size):])
			if fails(without) {
				list, shorter = without, true
			} else {
				at += size
			}
		}
		switch {
		case size > 1:
			size = (size + 1) / 2
		case !shorter:
			return list
		}
		size = min(size, max(1, (len(list)+1)/2))
	}
	return list
}

func TestReduce(t *testing.T) {
	has := func(list []int, want ...int) bool {
		for _, v := range want {
			if !slices.Contains(list, v) {
				return false
			}
		}
		return true
	}
	var all []int
	for i := range 1000 {
		all = append(all, i)
	}
	soon := func() time.Time { return time.Now().Add(time.Minute) }
	calls := 0
	got := reduce(all, soon(), func(l []int) bool { calls++; return has(l, 7, 500, 999) })
	if !slices.Equal(got, []int{7, 500, 999}) || calls > 300 {
		t.Errorf("reduced to %v in %d calls", got, calls)
	}
	// An element that can go only after a later one has gone needs a second round.
	got = reduce(all, soon(), func(l []int) bool { return has(l, 3) && (has(l, 5) || !has(l, 8)) })
	if !slices.Equal(got, []int{3}) {
		t.Errorf("reduced to %v, want 3 alone", got)
	}
	if got = reduce(all, soon(), func([]int) bool { return true }); len(got) != 0 {
		t.Errorf("a list that always fails is reduced to %d elements", len(got))
	}
	if got = reduce(all, time.Now().Add(-1), func([]int) bool { return true }); len(got) != len(all) {
		t.Errorf("with no time left %d elements are gone", len(all)-len(got))
	}
}
