package policy

// lru evicts what was used longest ago.
//
// Busy blocks stay in the list until Oldest or Newer meets one: it is then
// parked, out of the list, and comes back when it is idle: to the old end if
// nobody used it meanwhile, else to the young end. So the end of a transfer
// does not make a block look recently used, and a list full of busy blocks is
// walked once, not at each eviction.
type lru struct {
	nodes  Nodes
	oldest uint32
	newest uint32
}

// Values of Node.Meta.
const (
	lruOut        = iota // not resident
	lruListed            // in the list
	lruParked            // resident, busy, out of the list
	lruParkedUsed        // as lruParked, and used since
)

func newLRU(nodes Nodes) *lru { return &lru{nodes: nodes} }

func (p *lru) Insert(id uint32, _ uint64) { p.pushNewest(id, p.nodes.Node(id)) }

func (p *lru) Use(id uint32) {
	n := p.nodes.Node(id)
	switch n.Meta {
	case lruListed:
		if p.newest != id {
			p.unlink(id, n)
			p.pushNewest(id, n)
		}
	case lruParked:
		n.Meta = lruParkedUsed
	}
}

func (p *lru) Idle(id uint32) {
	n := p.nodes.Node(id)
	switch n.Meta {
	case lruParked:
		n.Meta, n.Prev, n.Next = lruListed, 0, p.oldest
		if p.oldest != 0 {
			p.nodes.Node(p.oldest).Prev = id
		} else {
			p.newest = id
		}
		p.oldest = id
	case lruParkedUsed:
		p.pushNewest(id, n)
	}
}

func (p *lru) Remove(id uint32, _ uint64, _ bool) {
	n := p.nodes.Node(id)
	if n.Meta == lruListed {
		p.unlink(id, n)
	}
	*n = Node{}
}

func (p *lru) Oldest() uint32 { return p.idleFrom(p.oldest) }

func (p *lru) Newer(id uint32) uint32 { return p.idleFrom(p.nodes.Node(id).Next) }

// idleFrom is the first idle block from id on. It parks the busy ones before it.
func (p *lru) idleFrom(id uint32) uint32 {
	for id != 0 && p.nodes.Busy(id) {
		n := p.nodes.Node(id)
		next := n.Next
		p.unlink(id, n)
		n.Meta = lruParked
		id = next
	}
	return id
}

// The list runs from oldest (Prev 0) to newest (Next 0).
func (p *lru) pushNewest(id uint32, n *Node) {
	n.Meta, n.Prev, n.Next = lruListed, p.newest, 0
	if p.newest != 0 {
		p.nodes.Node(p.newest).Next = id
	} else {
		p.oldest = id
	}
	p.newest = id
}

func (p *lru) unlink(id uint32, n *Node) {
	if n.Prev != 0 {
		p.nodes.Node(n.Prev).Next = n.Next
	} else {
		p.oldest = n.Next
	}
	if n.Next != 0 {
		p.nodes.Node(n.Next).Prev = n.Prev
	} else {
		p.newest = n.Prev
	}
	n.Prev, n.Next = 0, 0
}
