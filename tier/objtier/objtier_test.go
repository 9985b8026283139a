package objtier

import (
	"io"
	"log/slog"
	"sync"
	"testing"

	"github.com/terrace-kv/terrace/internal/s3"
	"github.com/terrace-kv/terrace/internal/s3/s3test"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/tiertest"
)

// options are those of a tier in a store in memory.
func options(server *s3test.Server, prefix string) Options {
	return Options{Prefix: prefix, Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
		S3: s3.Options{Bucket: "b", Endpoint: "store", Scheme: "http", AccessKey: s3test.AccessKey, SecretKey: "secret-of-the-test", RoundTripper: server.RoundTripper()}}
}

func TestConformance(t *testing.T) {
	for name, features := range map[string]s3test.Features{
		"all":  {},
		"none": {CRC64NVME: s3test.Ignored, CRC32C: s3test.Ignored, Conditional: s3test.Ignored},
	} {
		t.Run(name, func(t *testing.T) {
			server := s3test.New().MakeBucket("b")
			server.Features = features
			var mu sync.Mutex
			tiertest.Run(t, tiertest.Factory{Durable: true, Open: func(tb testing.TB, store string) tier.Tier {
				mu.Lock()
				defer mu.Unlock()
				tr, err := Open(tb.Context(), options(server, "t"+store))
				if err != nil {
					tb.Fatal(err)
				}
				return tr
			}})
		})
	}
}
