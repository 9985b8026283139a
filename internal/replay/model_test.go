package replay

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/invariants"
)

// modelLRU is the rule of golden_lru.json, as simply as it can be said:
// look up first, then reference each block once from the last to the first.
type modelLRU struct {
	capacity   int
	at         map[block.Key]int32
	nodes      []modelNode // 0 is the ring's head
	references int64
	hits       int64
}

type modelNode struct {
	key        block.Key
	prev, next int32
}

func newModelLRU(capacity int) *modelLRU {
	return &modelLRU{capacity: capacity, at: map[block.Key]int32{}, nodes: make([]modelNode, 1)}
}

func (m *modelLRU) unlink(i int32) {
	n := m.nodes[i]
	m.nodes[n.prev].next, m.nodes[n.next].prev = n.next, n.prev
}

func (m *modelLRU) push(i int32) {
	newest := m.nodes[0].prev
	m.nodes[i].prev, m.nodes[i].next = newest, 0
	m.nodes[newest].next, m.nodes[0].prev = i, i
}

func (m *modelLRU) request(keys []block.Key) {
	m.references += int64(len(keys))
	for _, k := range keys {
		if _, ok := m.at[k]; !ok {
			break
		}
		m.hits++
	}
	for i := len(keys) - 1; i >= 0; i-- {
		n, ok := m.at[keys[i]]
		switch {
		case ok:
			m.unlink(n)
		case len(m.at) < m.capacity:
			n = int32(len(m.nodes))
			m.nodes = append(m.nodes, modelNode{})
		default:
			n = m.nodes[0].next
			delete(m.at, m.nodes[n].key)
			m.unlink(n)
		}
		m.nodes[n].key = keys[i]
		m.at[keys[i]] = n
		m.push(n)
	}
}

func (t *trace) model(capacity int) *modelLRU {
	m := newModelLRU(capacity)
	var keys []block.Key
	for i := range t.ends {
		keys = t.appendRequest(keys[:0], i)
		m.request(keys)
	}
	return m
}

// goldenTrace is one trace of golden_lru.json.
type goldenTrace struct {
	References int64
	Distinct   int
	Infinite   int64 `json:"infinite_prefix_hits"`
	Capacities []struct {
		Blocks int
		LRU    int64
	}
}

func goldenTraces(t testing.TB) map[string]goldenTrace {
	var golden struct{ Traces map[string]goldenTrace }
	b, err := os.ReadFile(testdata(t, "golden_lru.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &golden); err != nil {
		t.Fatal(err)
	}
	return golden.Traces
}

func loadFile(t testing.TB, name string) *trace {
	s, err := OpenFile(testdata(t, name))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	tr, err := load(s)
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

const (
	conversationFile = "mooncake_fast25_conversation.blk512.jsonl.gz"
	syntheticFile    = "mooncake_fast25_synthetic.blk512.jsonl.gz"
	wekaFile         = "weka_claude_code_178.blk64.kvt1.jsonl.gz"
)

// TestModelGolden checks reader, loader and model against the golden counts,
// exactly, so that a difference in a dry run is the core's.
func TestModelGolden(t *testing.T) {
	golden := goldenTraces(t)["mooncake_fast25_conversation"]
	tr := loadFile(t, conversationFile)
	if len(tr.keys) != golden.Distinct || tr.size.References != golden.References {
		t.Fatalf("%d distinct, %d references, want %d and %d", len(tr.keys), tr.size.References, golden.Distinct, golden.References)
	}
	some := golden.Capacities[:2]
	if invariants.Enabled {
		some = some[:1]
	}
	for _, c := range some {
		if m := tr.model(c.Blocks); m.hits != c.LRU {
			t.Errorf("%d blocks: %d hits, want %d", c.Blocks, m.hits, c.LRU)
		}
	}
	if m := tr.model(golden.Distinct); m.hits != golden.Infinite {
		t.Errorf("unbounded: %d hits, want %d", m.hits, golden.Infinite)
	}
}
