package sweep

import (
	"errors"
	"testing"

	"github.com/minio/crc64nvme"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/content"
	"github.com/terrace-kv/terrace/internal/vfs"
	"github.com/terrace-kv/terrace/tier"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// namespace has one group of full attention.
func namespace(tb testing.TB, blockBytes uint64) *block.Namespace {
	tb.Helper()
	ns, err := block.NewNamespace(block.Spec{Model: "sweep", DType: "bytes", Layout: "content", HashAlgorithm: "sha256", HashLength: block.HashSize,
		Groups: []block.Group{{Kind: block.KindFull, TokensPerBlock: 16, BlockBytes: blockBytes}}})
	if err != nil {
		tb.Fatal(err)
	}
	return ns
}

// buffer is a block's buffer as a tier wants it but for its address, which no
// file system in memory minds.
func buffer(n int) []byte { return make([]byte, n, (n+tier.Align-1)/tier.Align*tier.Align) }

// filled is a block to be written.
func filled(ns *block.Namespace, key block.Key) tier.Item {
	it := tier.Item{Key: key, Buf: buffer(ns.BlockBytes(key.Group()))}
	content.Fill(ns.Fingerprint(), key, it.Buf)
	it.Sum = crc64nvme.Checksum(it.Buf)
	return it
}

// usedBytes is what all regular files of a tree are charged.
func usedBytes(fs vfs.FS) (sum int64, err error) {
	err = vfs.Walk(fs, func(_ string, st vfs.Info) { sum += st.Bytes })
	return sum, err
}

// temporary lists what is in a root's tmp.
func temporary(fs vfs.FS) (names []string, err error) {
	err = fs.ReadDir("tmp", func(base string) error { names = append(names, base); return nil })
	if errors.Is(err, unix.ENOENT) {
		err = nil
	}
	return names, err
}
