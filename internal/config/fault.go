package config

import (
	"fmt"
	"slices"
	"strings"
)

// Fault is one thing wrong with the configuration.
type Fault struct {
	Field   string // path of the setting, or the key or variable that is none
	Value   string // as it was given, quoted; empty if there is none, or it is secret
	Source  Source // empty when a default is at fault
	Problem string // what is wrong, and what to do; reads on from the value
}

func (f Fault) String() string {
	s := f.Field
	if f.Value != "" {
		s += " = " + f.Value
	}
	if f.Source != "" {
		s += fmt.Sprintf(" (%s)", f.Source)
	}
	return s + " " + f.Problem
}

// Faults is the error of Load: all that is wrong, in the order of the sources.
type Faults []Fault

func (fs Faults) Error() string {
	if len(fs) == 1 {
		return "configuration: " + fs[0].String()
	}
	var b strings.Builder
	fmt.Fprintf(&b, "configuration: %d faults", len(fs))
	for _, f := range fs {
		b.WriteString("\n  " + f.String())
	}
	return b.String()
}

// DidYouMean ends a sentence with the nearest of the known words, if one is
// near enough to be a slip of the fingers.
func DidYouMean(word string, known []string) string {
	best, nearest := "", 1+max(2, len(word)/4)
	for _, k := range known {
		if d := distance(strings.ToLower(word), strings.ToLower(k)); d < nearest && d < max(len(word), len(k)) {
			best, nearest = k, d
		}
	}
	if best == "" {
		return ""
	}
	return fmt.Sprintf("; did you mean %s?", best)
}

// distance counts the letters to insert, delete, replace or swap with their
// neighbour to get from a to b.
func distance(a, b string) int {
	// Long words are cut, because they come from outside and the work is
	// their product; nothing we know is as long.
	a, b = a[:min(len(a), 64)], b[:min(len(b), 64)]
	var before []int // the row before the last
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		next := make([]int, len(b)+1)
		next[0] = i + 1
		for j := range len(b) {
			differs := 1
			if a[i] == b[j] {
				differs = 0
			}
			next[j+1] = min(row[j]+differs, row[j+1]+1, next[j]+1)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				next[j+1] = min(next[j+1], before[j-1]+1)
			}
		}
		before, row = row, next
	}
	return row[len(b)]
}

// unknown is the problem of a key that is no setting at this place. elsewhere
// has the paths of all settings, for a key that is right in another place.
func unknown(key string, here, elsewhere []string) string {
	hint := DidYouMean(key, here)
	if hint == "" {
		for _, path := range elsewhere {
			if strings.HasSuffix(path, "."+key) {
				hint = fmt.Sprintf("; did you mean %s?", path)
				break
			}
		}
	}
	if hint == "" {
		hint = "."
	}
	slices.Sort(here)
	return fmt.Sprintf("is not a setting%s Known here: %s", hint, strings.Join(here, ", "))
}
