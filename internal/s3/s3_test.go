package s3

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/minio/crc64nvme"

	"github.com/terrace-kv/terrace/internal/s3/s3test"
)

const (
	bucket = "blocks"
	secret = "the-secret-key-of-this-test"
)

func newServer() *s3test.Server { return s3test.New().MakeBucket(bucket) }

func options(rt http.RoundTripper) Options {
	return Options{
		Bucket: bucket, Endpoint: "store.test:9000", Scheme: "http", Region: "eu-test-1",
		AccessKey: s3test.AccessKey, SecretKey: secret, RoundTripper: rt,
	}
}

func open(t testing.TB, o Options) *Client {
	t.Helper()
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// overBoth runs a test in process and over a connection.
func overBoth(t *testing.T, f func(t *testing.T, s *s3test.Server, c *Client)) {
	t.Run("process", func(t *testing.T) {
		s := newServer()
		f(t, s, open(t, options(s.RoundTripper())))
	})
	t.Run("http", func(t *testing.T) {
		s := newServer()
		srv := httptest.NewServer(s)
		defer srv.Close()
		o := options(nil)
		o.Endpoint = strings.TrimPrefix(srv.URL, "http://")
		f(t, s, open(t, o))
	})
}

func content(n int) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(n)})
	_, _ = r.Read(b)
	return b
}

func kind(err error) Kind {
	var e *Error
	if errors.As(err, &e) {
		return e.Kind
	}
	return 255
}

func want(t *testing.T, err error, k Kind) *Error {
	t.Helper()
	if kind(err) != k {
		t.Fatalf("error %v is of kind %d, want %d", err, kind(err), k)
	}
	var e *Error
	errors.As(err, &e)
	return e
}

func TestObjects(t *testing.T) {
	overBoth(t, func(t *testing.T, s *s3test.Server, c *Client) {
		ctx := context.Background()
		head, data := content(256), content(300_001)
		whole := slices.Concat(head, data)
		for _, sum := range []Checksum{{}, {ChecksumCRC64NVME, crc64nvme.Checksum(whole)}, {ChecksumCRC32C, uint64(crc32.Checksum(whole, crc32.MakeTable(crc32.Castagnoli)))}} {
			body := NewBody(head, nil, data)
			key := "dir with space/ä+=&?#%/" + sum.Algorithm
			put, err := c.Put(ctx, key, body, PutOptions{Checksum: sum})
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(s.Objects(bucket)[key].Data, whole) {
				t.Fatal("the store has other bytes")
			}
			h, g := make([]byte, len(head)), make([]byte, len(data))
			got, err := c.Get(ctx, key, h, nil, g)
			if err != nil || !bytes.Equal(h, head) || !bytes.Equal(g, data) {
				t.Fatalf("got other bytes: %v", err)
			}
			asked, err := c.Head(ctx, key)
			if err != nil || asked != got || got.Size != int64(len(whole)) || got.ETag != put.ETag || put.ETag == "" || got.Modified.IsZero() || got.Key != key {
				t.Fatalf("put %+v, got %+v, asked %+v: %v", put, got, asked, err)
			}
		}
		if _, err := c.Put(ctx, "empty", NewBody(), PutOptions{}); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Get(ctx, "empty"); err != nil {
			t.Fatal(err)
		}
		small, _, err := c.GetSmall(ctx, "empty", 0)
		if err != nil || len(small) != 0 {
			t.Fatal(small, err)
		}
		if err := c.Copy(ctx, "dir with space/ä+=&?#%/", "copy"); err != nil {
			t.Fatal(err)
		}
		small, obj, err := c.GetSmall(ctx, "copy", len(whole))
		if err != nil || !bytes.Equal(small, whole) || obj.Size != int64(len(whole)) {
			t.Fatal(len(small), obj, err)
		}
		_, _, err = c.GetSmall(ctx, "copy", len(whole)-1)
		want(t, err, KindLength)
		for range 2 {
			if err := c.Delete(ctx, "copy"); err != nil {
				t.Fatal(err)
			}
		}
		_, err = c.Head(ctx, "copy")
		want(t, err, KindNotFound)
		_, err = c.Get(ctx, "copy")
		want(t, err, KindNotFound)
		want(t, c.Copy(ctx, "copy", "again"), KindNotFound)
		if n := c.Requests(); n != (Counts{Put: 4, Get: 8, Head: 4, Delete: 2, Other: 2, Failed: 1}) {
			t.Errorf("counted %+v", n)
		}
	})
}

func TestListAndDeleteMany(t *testing.T) {
	overBoth(t, func(t *testing.T, s *s3test.Server, c *Client) {
		ctx := context.Background()
		var all []string
		for i := range 25 {
			all = append(all, fmt.Sprintf("a/%02d +ä<&>", i))
			s.Set(bucket, all[i], []byte("x"))
		}
		s.Set(bucket, "b/1", []byte("xy"))
		var got []string
		o := ListOptions{Prefix: "a/", Max: 10}
		for pages := 1; ; pages++ {
			p, err := c.List(ctx, o)
			if err != nil {
				t.Fatal(err)
			}
			for _, obj := range p.Objects {
				got = append(got, obj.Key)
			}
			if o.Token = p.Next; o.Token == "" {
				if pages != 3 {
					t.Errorf("%d pages, want 3", pages)
				}
				break
			}
		}
		if !slices.Equal(got, all) {
			t.Fatalf("listed %q", got)
		}
		p, err := c.List(ctx, ListOptions{Delimiter: "/"})
		if err != nil || !slices.Equal(p.Prefixes, []string{"a/", "b/"}) || len(p.Objects) != 0 {
			t.Fatal(p, err)
		}
		p, err = c.List(ctx, ListOptions{After: all[23]})
		if err != nil || len(p.Objects) != 2 || p.Objects[1].Size != 2 || p.Objects[1].Modified.IsZero() {
			t.Fatal(p, err)
		}
		if failed, err := c.DeleteMany(ctx, append(all[1:], "not there")); err != nil || failed != nil {
			t.Fatal(failed, err)
		}
		if left := s.Objects(bucket); len(left) != 2 {
			t.Fatalf("%d objects left, want 2", len(left))
		}
		if failed, err := c.DeleteMany(ctx, nil); err != nil || failed != nil {
			t.Fatal(failed, err)
		}
		if got := c.Requests(); got.List != 5 || got.Delete != 1 || got.Failed != 0 {
			t.Errorf("counted %+v", got)
		}
	})
}

func TestConditions(t *testing.T) {
	overBoth(t, func(t *testing.T, s *s3test.Server, c *Client) {
		ctx := context.Background()
		put := func(text string, o PutOptions) (Object, error) { return c.Put(ctx, "k", NewBody([]byte(text)), o) }
		first, err := put("1", PutOptions{IfNoneMatch: true})
		if err != nil {
			t.Fatal(err)
		}
		_, err = put("2", PutOptions{IfNoneMatch: true})
		want(t, err, KindPrecondition)
		if _, err = put("3", PutOptions{IfMatch: first.ETag}); err != nil {
			t.Fatal(err)
		}
		_, err = put("4", PutOptions{IfMatch: first.ETag})
		want(t, err, KindPrecondition)
		if got := string(s.Objects(bucket)["k"].Data); got != "3" {
			t.Errorf("the store has %q, want 3", got)
		}
		_, err = put("5", PutOptions{Checksum: Checksum{ChecksumCRC64NVME, 1}})
		want(t, err, KindDigest)
		s.Features.CRC64NVME = s3test.Refused
		_, err = put("5", PutOptions{Checksum: Checksum{ChecksumCRC64NVME, 1}})
		want(t, err, KindUnsupported)
		s.Features.CRC64NVME = s3test.Ignored
		if _, err = put("5", PutOptions{Checksum: Checksum{ChecksumCRC64NVME, 1}}); err != nil {
			t.Fatal(err)
		}
	})
}
