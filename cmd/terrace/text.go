package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// human is a size for people: three digits and a unit.
func human(n int64) string {
	v, units := float64(n), []string{"B", "KiB", "MiB", "GiB", "TiB"}
	for len(units) > 1 && v >= 1000 {
		v, units = v/1024, units[1:]
	}
	switch {
	case units[0] == "B" || v >= 99.95:
		return fmt.Sprintf("%.0f %s", v, units[0])
	case v >= 9.995:
		return fmt.Sprintf("%.1f %s", v, units[0])
	}
	return fmt.Sprintf("%.2f %s", v, units[0])
}

func sum(counts map[string]int64) (n int64) {
	for _, c := range counts {
		n += c
	}
	return n
}

// counts lists what is not 0, by name.
func counts(m map[string]int64) string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(m)) {
		if m[name] != 0 {
			out = append(out, fmt.Sprintf("%d %s", m[name], name))
		}
	}
	if len(out) == 0 {
		return "none"
	}
	return strings.Join(out, ", ")
}

// printable is what a terminal may be given of text that another node or an engine
// has chosen: no control characters, and no end of line.
func printable(v any) any {
	s, ok := v.(string)
	if !ok {
		return v
	}
	return strings.Map(func(r rune) rune {
		switch {
		case unicode.IsPrint(r):
			return r
		case unicode.IsSpace(r):
			return ' '
		}
		return utf8.RuneError
	}, s)
}
