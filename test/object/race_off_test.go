//go:build !race

package object

// raceOr is the first number under the race detector, else the second.
func raceOr(_, plain int) int { return plain }
