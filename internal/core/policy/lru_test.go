package policy

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// table is a slot table of a test. It counts how often a policy looks.
type table struct {
	nodes []Node
	busy  []bool
	looks int
}

func newTable(n int) *table { return &table{nodes: make([]Node, n+1), busy: make([]bool, n+1)} }

func (t *table) Node(id uint32) *Node { return &t.nodes[id] }

func (t *table) Busy(id uint32) bool {
	t.looks++
	return t.busy[id]
}

// order lists the idle blocks from the one that should go first.
func order(p Policy) (out []uint32) {
	for id := p.Oldest(); id != 0; id = p.Newer(id) {
		out = append(out, id)
	}
	return out
}

func fill(p Policy, n int) {
	for id := range n {
		p.Insert(uint32(id+1), 0)
	}
}

func TestLRUOrder(t *testing.T) {
	tb := newTable(5)
	p := New("lru", tb)
	if p.Oldest() != 0 {
		t.Error("an empty policy has an oldest block")
	}
	fill(p, 5)
	p.Use(2)
	p.Use(2)
	p.Use(5)
	p.Use(1)
	if got := order(p); !slices.Equal(got, []uint32{3, 4, 2, 5, 1}) {
		t.Errorf("order is %v", got)
	}
	p.Remove(4, 0, true)
	p.Remove(1, 0, false)
	if got := order(p); !slices.Equal(got, []uint32{3, 2, 5}) {
		t.Errorf("order is %v", got)
	}
	p.Insert(4, 0)
	if got := order(p); !slices.Equal(got, []uint32{3, 2, 5, 4}) {
		t.Errorf("order is %v", got)
	}
}

// The end of a transfer does not make a block young (B132): one that was busy
// when room was looked for comes back where it was, at the old end, unless
// somebody has used it meanwhile.
func TestLRUEndOfTransferDoesNotMakeYoung(t *testing.T) {
	tb := newTable(4)
	p := New("lru", tb)
	fill(p, 4)
	tb.busy[1], tb.busy[2] = true, true
	if id := p.Oldest(); id != 3 {
		t.Fatalf("oldest idle block is %d", id)
	}
	p.Use(2)
	tb.busy[1] = false
	p.Idle(1)
	if got := order(p); !slices.Equal(got, []uint32{1, 3, 4}) {
		t.Errorf("order is %v", got)
	}
	tb.busy[2] = false
	p.Idle(2)
	if got := order(p); !slices.Equal(got, []uint32{1, 3, 4, 2}) {
		t.Errorf("order is %v", got)
	}
}

// Idle for a block that was never met while busy changes nothing.
func TestLRUIdleUnmet(t *testing.T) {
	tb := newTable(3)
	p := New("lru", tb)
	fill(p, 3)
	tb.busy[2] = true
	tb.busy[2] = false
	p.Idle(2)
	if got := order(p); !slices.Equal(got, []uint32{1, 2, 3}) {
		t.Errorf("order is %v", got)
	}
}

// However many blocks are busy, finding a victim stays cheap: each is met once,
// by Oldest and by Newer alike.
func TestLRUBusyBlocksAreWalkedOnce(t *testing.T) {
	const n = 10_000
	tb := newTable(n)
	p := New("lru", tb)
	fill(p, n)
	for id := 2; id < n; id++ {
		tb.busy[id] = true
	}
	for range 3 {
		tb.looks = 0
		if got := order(p); !slices.Equal(got, []uint32{1, n}) {
			t.Fatalf("idle blocks are %v", got)
		}
	}
	if tb.looks > 4 {
		t.Errorf("the third walk looked at %d blocks", tb.looks)
	}
	tb.busy[1], tb.busy[n] = true, true
	p.Oldest()
	tb.looks = 0
	if p.Oldest() != 0 || tb.looks > 1 {
		t.Errorf("with all busy, a walk looked at %d blocks", tb.looks)
	}
}

func TestPolicyNames(t *testing.T) {
	for _, n := range Names() {
		if New(n, newTable(1)) == nil {
			t.Errorf("policy %q is listed and unknown", n)
		}
	}
	if New("none", newTable(1)) != nil {
		t.Error("an unknown policy was made")
	}
}

// naiveLRU is a slice in order of age, with the parked ones apart.
type naiveLRU struct {
	list   []uint32
	parked map[uint32]bool // used since?
}

func (m *naiveLRU) drop(id uint32) {
	if i := slices.Index(m.list, id); i >= 0 {
		m.list = slices.Delete(m.list, i, i+1)
	}
}

// walk lists the first n idle ones and parks the busy ones before each.
func (m *naiveLRU) walk(busy []bool, n int) (out []uint32) {
	for i := 0; i < len(m.list) && len(out) < n; {
		id := m.list[i]
		if busy[id] {
			m.list = slices.Delete(m.list, i, i+1)
			m.parked[id] = false
			continue
		}
		out = append(out, id)
		i++
	}
	return out
}

func TestLRUAgainstModel(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 1))
			n := 1 + r.IntN(40)
			tb, m := newTable(n), &naiveLRU{parked: map[uint32]bool{}}
			p := New("lru", tb)
			resident := make([]bool, n+1)
			for op := range 20_000 {
				id := uint32(1 + r.IntN(n))
				switch k := r.IntN(10); {
				case !resident[id]:
					resident[id], tb.busy[id] = true, r.IntN(3) == 0
					p.Insert(id, 0)
					m.list = append(m.list, id)
				case k < 3:
					p.Use(id)
					if _, ok := m.parked[id]; ok {
						m.parked[id] = true
					} else {
						m.drop(id)
						m.list = append(m.list, id)
					}
				case k < 5 && !tb.busy[id]:
					tb.busy[id] = true
				case k < 7 && tb.busy[id]:
					tb.busy[id] = false
					p.Idle(id)
					if used, ok := m.parked[id]; ok && used {
						m.list = append(m.list, id)
					} else if ok {
						m.list = slices.Insert(m.list, 0, id)
					}
					delete(m.parked, id)
				case k < 8:
					p.Remove(id, 0, k == 7)
					m.drop(id)
					delete(m.parked, id)
					resident[id], tb.busy[id] = false, false
					if tb.nodes[id] != (Node{}) {
						t.Fatalf("op %d: node %d is left as %+v", op, id, tb.nodes[id])
					}
				default:
					most := 1 + r.IntN(n)
					var got []uint32
					for id := p.Oldest(); id != 0; id = p.Newer(id) {
						if got = append(got, id); len(got) == most {
							break
						}
					}
					want := m.walk(tb.busy, most)
					if !slices.Equal(got, want) {
						t.Fatalf("op %d: idle blocks are %v, want %v", op, got, want)
					}
				}
			}
		})
	}
}
