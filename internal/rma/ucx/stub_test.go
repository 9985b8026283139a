//go:build !ucx || !cgo

package ucx

import "testing"

func TestWithout(t *testing.T) {
	if _, err := Open(Options{}); err == nil {
		t.Error("opened without UCX")
	}
}
