package fakerma

import (
	"testing"

	"github.com/terrace-kv/terrace/internal/rma"
	"github.com/terrace-kv/terrace/internal/rma/rmatest"
)

// Without faults it is a fabric like others.
func TestConformance(t *testing.T) {
	n := New()
	rmatest.Run(t, func(*testing.T) rma.Fabric { return n.Open("fake") })
}
