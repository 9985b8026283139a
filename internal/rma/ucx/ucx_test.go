//go:build ucx && cgo

package ucx

import (
	"testing"

	"github.com/terrace-kv/terrace/internal/rma"
	"github.com/terrace-kv/terrace/internal/rma/rmatest"
)

func open(t testing.TB, transports string) rma.Fabric {
	t.Helper()
	f, err := Open(Options{Transports: transports})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestFabric(t *testing.T) {
	for _, transports := range []string{"", "tcp", "tcp,sm"} {
		t.Run("with "+transports, func(t *testing.T) {
			rmatest.Run(t, func(t *testing.T) rma.Fabric { return open(t, transports) })
		})
	}
}
