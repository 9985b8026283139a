//go:build !ucx || !cgo

package ucx

import (
	"errors"

	"github.com/terrace-kv/terrace/internal/rma"
)

// Open says that this build has no UCX.
func Open(Options) (rma.Fabric, error) {
	return nil, errors.New("built without UCX: build with -tags ucx and cgo, which needs libucx-dev")
}
