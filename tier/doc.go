// Package tier is the contract of a secondary tier: somewhere blocks live
// below the primary. It holds the interface, optional abilities, facts and
// error classes, and no implementation. A tier passes the suite in
// tier/tiertest; tier/memtier is the reference.
package tier
