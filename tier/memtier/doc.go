// Package memtier is a tier in memory: the reference for the contract of
// package tier, and the double that tests of transfer, node and simulation
// drive. A Hook decides the fate of each key of each call: an error, a wait on
// a channel, wrong or missing bytes.
//
// It has no goroutines. Calls wait for nothing but what a Hook asks for. Its
// memory is bounded by Options.Capacity, if that is set.
package memtier
