package objtier

import (
	"bytes"
	"context"
	"fmt"
	"hash/crc32"
	"strings"
	"time"

	"github.com/minio/crc64nvme"

	"github.com/terrace-kv/terrace/internal/s3"
)

// again makes a request of the opening until it is no longer the store that is
// busy, a few times: that is no reason not to start.
func again(ctx context.Context, do func() error) error {
	for wait := 50 * time.Millisecond; ; wait *= 2 {
		err := do()
		if kind := kindOf(err); kind != s3.KindThrottled && kind != s3.KindServer || wait > time.Second || !pause(ctx, wait) {
			return err
		}
	}
}

// probe proves that the bucket can be listed, written, read back and removed
// from below the prefix, and finds out what the store verifies.
func (t *Tier) probe(ctx context.Context) error {
	try := func(do func() error) error { return again(ctx, do) }
	err := try(func() error {
		_, err := t.client.List(ctx, s3.ListOptions{Prefix: t.layout.prefix, Max: 1})
		return err
	})
	if err != nil {
		return t.openErr("list", err)
	}
	key := t.layout.at(dirProbe, t.writerID())
	content := []byte("Terrace was here: this object may be removed.\n" + t.writerID() + "\n")
	put := func(o s3.PutOptions) error {
		return try(func() error {
			_, err := t.client.Put(ctx, key, s3.NewBody(content), o)
			return err
		})
	}
	defer func() { _ = t.client.Delete(context.WithoutCancel(ctx), key) }()

	checksum := ""
	switch t.o.Checksum {
	case ChecksumAuto:
		for _, sum := range []s3.Checksum{{Algorithm: s3.ChecksumCRC64NVME, Value: crc64nvme.Checksum(content)},
			{Algorithm: s3.ChecksumCRC32C, Value: uint64(crc32.Checksum(content, castagnoli))}} {
			wrong := sum
			wrong.Value ^= 1
			// A store that verifies refuses the wrong one; whether it takes the
			// right one is seen by the write below.
			if kindOf(put(s3.PutOptions{Checksum: wrong})) == s3.KindDigest {
				checksum = sum.Algorithm
				break
			}
		}
	case ChecksumNone:
	default:
		checksum = t.o.Checksum
	}
	t.checksum = checksum

	right := s3.Checksum{}
	switch checksum {
	case s3.ChecksumCRC64NVME:
		right = s3.Checksum{Algorithm: checksum, Value: crc64nvme.Checksum(content)}
	case s3.ChecksumCRC32C:
		right = s3.Checksum{Algorithm: checksum, Value: uint64(crc32.Checksum(content, castagnoli))}
	}
	if err := put(s3.PutOptions{Checksum: right}); err != nil {
		return t.openErr("write to", err)
	}
	var back []byte
	err = try(func() (err error) {
		back, _, err = t.client.GetSmall(ctx, key, len(content)+1)
		return err
	})
	if err != nil {
		return t.openErr("read back from", err)
	}
	if !bytes.Equal(back, content) {
		return t.openErr("use", fmt.Errorf("%d bytes written as %s came back as %d others", len(content), key, len(back)))
	}
	if t.o.Conditional == ConditionalAuto {
		t.exclusive = kindOf(put(s3.PutOptions{Checksum: right, IfNoneMatch: true})) == s3.KindPrecondition
	}
	if err := try(func() error { return t.client.Delete(ctx, key) }); err != nil {
		return t.openErr("remove from", err)
	}
	err = try(func() error {
		_, err := t.client.Head(ctx, key)
		return err
	})
	if kindOf(err) != s3.KindNotFound {
		if err == nil {
			err = fmt.Errorf("%s is still there after it was removed", key)
		}
		return t.openErr("remove from", err)
	}
	mode := []string{"store verifies " + checksum}
	if checksum == "" {
		mode[0] = "store verifies nothing"
	}
	if t.exclusive {
		mode = append(mode, "conditional writes")
	}
	t.mode = strings.Join(mode, ", ")
	return nil
}
