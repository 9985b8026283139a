package objtier

import (
	"encoding/hex"
	"strings"

	"github.com/terrace-kv/terrace/block"
)

// Keys of a bucket, below the prefix, if there is one:
//
//	<64 hex>/namespace.json   a namespace's description, and nothing else of it
//	<64 hex>/name             what the operator calls it
//	<64 hex>/b/<72 hex>       a block: header, then the bytes
//	quarantine/<64 hex>/<72 hex>  a copy that was not what it should be
//	probe/<writer>            of a start, removed again
//	lease.json                who looks after the capacity
const (
	nameNamespace  = "namespace.json"
	nameName       = "name"
	dirBlocks      = "b"
	dirQuarantine  = "quarantine"
	dirProbe       = "probe"
	nameLease      = "lease.json"
	prefixBytesMax = 512 // keys have 1,024 bytes at most
	headSize       = 256 // bytes of a block's header in an object
)

// layout makes keys.
type layout struct{ prefix string } // "" or ends in a slash

func newLayout(prefix string) layout {
	if prefix != "" {
		prefix += "/"
	}
	return layout{prefix}
}

func (l layout) at(parts ...string) string { return l.prefix + strings.Join(parts, "/") }

// dir is the prefix of a namespace's blocks, for listings.
func (l layout) dir(fp block.Fingerprint) string { return l.at(fp.String(), dirBlocks) + "/" }

// block is the key of a block's object.
func (l layout) block(fp block.Fingerprint, key block.Key) string {
	b := make([]byte, 0, len(l.prefix)+2*len(fp)+4+2*block.KeySize)
	b = append(b, l.prefix...)
	b = hex.AppendEncode(b, fp[:])
	b = append(b, "/"+dirBlocks+"/"...)
	return string(hex.AppendEncode(b, key[:]))
}

// parse reads the last part of a block's key.
func (l layout) parse(fp block.Fingerprint, object string) (key block.Key, ok bool) {
	name, ok := strings.CutPrefix(object, l.dir(fp))
	if !ok || strings.ToLower(name) != name {
		return key, false
	}
	key, err := block.ParseKey(name)
	return key, err == nil
}
