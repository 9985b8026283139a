// Package policy holds replacement policies as pure data structures: no locks,
// no clock, no I/O. A policy orders resident blocks; it never decides that one
// must go, and never evicts a busy one.
package policy

// Node is a policy's memory of one block. It lives inside the caller's own
// table, so that a policy allocates nothing per block. A zero Node is in no
// list.
type Node struct {
	Prev, Next uint32
	Meta       uint32
}

// Nodes is the caller's table. IDs are the caller's, and never 0.
type Nodes interface {
	Node(id uint32) *Node
	// Busy says that the block must not be evicted now. When it ceases to be
	// busy, the caller calls Idle.
	Busy(id uint32) bool
}

// Policy orders resident blocks by how soon they should go.
type Policy interface {
	// Insert adds a block that has become resident. The hash names its key
	// beyond its residence, for policies that remember what they evicted.
	Insert(id uint32, hash uint64)
	// Use records a reference to a resident block.
	Use(id uint32)
	// Idle tells that a resident block has ceased to be busy.
	Idle(id uint32)
	// Remove forgets a block, either because it was evicted or for truth.
	Remove(id uint32, hash uint64, evicted bool)
	// Oldest is the idle block that should go first, 0 if there is none.
	Oldest() uint32
	// Newer is the next idle block after id, 0 if there is none. It is valid
	// only directly after Oldest or Newer returned id.
	Newer(id uint32) uint32
}

// New returns the named policy over the table, nil for a name it does not know.
func New(name string, nodes Nodes) Policy {
	if name == "lru" {
		return newLRU(nodes)
	}
	return nil
}

// Names lists the policies.
func Names() []string { return []string{"lru"} }
