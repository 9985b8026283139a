//go:build race

package object

// raceOr is the first number under the race detector, else the second.
func raceOr(race, _ int) int { return race }
