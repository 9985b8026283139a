package objtier

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/minio/crc64nvme"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/blockhead"
	"github.com/terrace-kv/terrace/internal/s3"
)

// asideTimeout bounds the work on a copy that a read found broken.
const asideTimeout = 5 * time.Second

// broken deals with a copy whose header, or size, is not what it should be, and
// returns the error of the read that found it.
func (t *Tier) broken(ctx context.Context, ns *block.Namespace, key block.Key, why error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), asideTimeout)
	defer cancel()
	if err := t.aside(ctx, ns, key, why.Error()); err != nil && t.warn.pass() {
		t.log.Warn("a broken copy could not be set aside", "block", key, "err", err)
	}
	return why
}

// SetAside is in tier.SetAsider. A network that flips a bit is not a store that
// lost one: the object is read once more, and moved only if it is wrong again.
func (t *Tier) SetAside(ctx context.Context, ns *block.Namespace, key block.Key, why string) error {
	leave, err := t.enter()
	if err != nil {
		return err
	}
	defer leave()
	return t.aside(ctx, ns, key, why)
}

func (t *Tier) aside(ctx context.Context, ns *block.Namespace, key block.Key, why string) error {
	const op = "set aside"
	fp := ns.Fingerprint()
	object, kept := t.layout.block(fp, key), t.layout.at(dirQuarantine, fp.String(), key.String())
	t.presence.drop(fp, key)
	select {
	case t.asideTurn <- struct{}{}: // one buffer of a block at a time
		defer func() { <-t.asideTurn }()
	case <-ctx.Done():
		return t.explain(op, key, ctx.Err())
	}
	whole := false
	err := t.request(ctx, forProbes, op, key, func() error {
		b, _, err := t.client.GetSmall(ctx, object, headSize+ns.BlockBytes(key.Group()))
		switch kind := kindOf(err); {
		case kind == s3.KindNotFound:
			whole = true // whatever it was, it is gone
			return nil
		case kind == s3.KindLength && !errors.Is(err, io.ErrUnexpectedEOF):
			return nil // wrong again
		}
		whole = err == nil && right(ns, key, b)
		return err
	})
	if err != nil {
		return err
	}
	if whole {
		t.asideSeen.Add(1)
		if t.warn.pass() {
			t.log.Warn("a block was damaged on its way from the store, where it is right", "block", key, "object", object, "why", why)
		}
		return nil
	}
	if t.setAside.Add(1) > quarantineMax {
		kept = "" // enough to look at; who keeps the capacity sweeps what earlier runs left
	}
	t.log.Error("a copy in the store is not what was stored, and is set aside", "block", key, "object", object, "kept", kept, "why", why)
	err = t.request(ctx, forProbes, op, key, func() error {
		var cerr error
		if kept != "" {
			cerr = t.client.Copy(ctx, object, kept)
		}
		if err := t.client.Delete(ctx, object); err != nil {
			return err
		}
		t.presence.gone(fp, key)
		if cerr != nil {
			return fmt.Errorf("removed, and not kept: %w", cerr)
		}
		return nil
	})
	return err
}

// right says whether an object is a block as it was stored.
func right(ns *block.Namespace, key block.Key, b []byte) bool {
	var h blockhead.Header
	n := ns.BlockBytes(key.Group())
	return len(b) == headSize+n && h.Decode(b[:headSize]) == nil && h.Check(ns.Fingerprint(), key, n) == nil &&
		crc64nvme.Checksum(b[headSize:]) == h.Sum
}
