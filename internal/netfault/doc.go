// Package netfault is a bad network: a TCP proxy that stands where a node says
// it can be reached. What it does is either told (Set, Cut), or drawn by a seed
// for each connection in the order in which they come, so that the same seed
// does the same to the third connection and its thousandth byte.
//
// The n-th connection's fate does not depend on time; which of two that are
// dialed at once is the n-th does.
package netfault
