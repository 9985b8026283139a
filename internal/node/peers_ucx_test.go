//go:build ucx && cgo

package node

import (
	"testing"

	"github.com/terrace-kv/terrace/internal/rma"
	"github.com/terrace-kv/terrace/internal/rma/ucx"
)

func init() {
	fabrics[ucx.Name] = func(t *testing.T) func() rma.Fabric {
		return func() rma.Fabric {
			f, err := ucx.Open(ucx.Options{Transports: "tcp,sm"})
			if err != nil {
				t.Fatal(err)
			}
			return f
		}
	}
}
