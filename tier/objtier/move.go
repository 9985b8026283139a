package objtier

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"time"

	"github.com/minio/crc64nvme"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/blockhead"
	"github.com/terrace-kv/terrace/internal/s3"
	"github.com/terrace-kv/terrace/tier"
)

// Waits between attempts to release a transfer. There is no last one: until it
// succeeds the slot is not free.
const (
	releaseBase = 10 * time.Millisecond
	releaseMax  = 5 * time.Second
)

// move makes one transfer, from post to release. When it returns nothing
// touches the op's buffers any more: however long that takes, and whatever
// became of ctx. Who waits for the blocks has been told by the job's deadline.
//
// INVARIANT(release-before-return): a call that posted a transfer returns only
// after that transfer's Release has succeeded.
func (t *Tier) move(ctx context.Context, op *Op) error {
	h, err := t.transport.Post(ctx, op)
	if err != nil {
		return err
	}
	status, err := h.Poll(ctx)
	for err == nil && !status.Done && ctx.Err() == nil {
		status, err = h.Poll(ctx)
	}
	switch {
	case err != nil:
		err = fmt.Errorf("the state of the transfer is not known: %w", err)
	case !status.Done:
		err = ctx.Err()
	default:
		err = status.Err
	}
	t.release(h, op)
	return err
}

func (t *Tier) release(h Handle, op *Op) {
	err := h.Release()
	if err == nil {
		return
	}
	t.unreleased.Add(1)
	defer t.unreleased.Add(-1)
	for wait := releaseBase; err != nil; wait = min(2*wait, releaseMax) {
		t.releases.Add(1)
		if t.warn.pass() {
			t.log.Warn("a transfer cannot be released and keeps its slot; trying again", "block", op.Block, "object", op.Key, "err", err)
		}
		time.Sleep(wait)
		err = h.Release()
	}
}

// fits says what is wrong with an item's buffer.
func (t *Tier) fits(op string, ns *block.Namespace, it *tier.Item) error {
	want := ns.BlockBytes(it.Key.Group())
	if want <= 0 || len(it.Buf) != want {
		return &tier.Error{Op: op, Tier: t.o.Name, Key: it.Key, Class: tier.ClassPermanent,
			Err: fmt.Errorf("buffer has %d bytes, a block of group %d in namespace %s has %d", len(it.Buf), it.Key.Group(), ns.Fingerprint(), want)}
	}
	return nil
}

// Read is in tier.Tier.
func (t *Tier) Read(ctx context.Context, ns *block.Namespace, items []tier.Item) {
	leave, err := t.enter()
	if err == nil {
		defer leave()
	}
	for i := range items {
		if items[i].Err = err; err == nil {
			items[i].Err = t.read(ctx, ns, &items[i])
		}
	}
}

func (t *Tier) read(ctx context.Context, ns *block.Namespace, it *tier.Item) error {
	const op = "read"
	if err := t.fits(op, ns, it); err != nil {
		return err
	}
	fp := ns.Fingerprint()
	head := t.heads.Get().(*[headSize]byte)
	defer t.heads.Put(head)
	if err := t.throttle.enter(ctx, forLoads); err != nil {
		return t.explain(op, it.Key, err)
	}
	since := t.presence.mark()
	err := t.leave(op, it.Key, t.move(ctx, &Op{Key: t.layout.block(fp, it.Key), Head: head[:], Buf: it.Buf, Block: it.Key}))
	switch tier.ClassOf(err) {
	case tier.ClassNone:
	case tier.ClassNotFound:
		t.presence.goneSince(fp, it.Key, since)
		return err
	case tier.ClassCorrupt:
		return t.broken(ctx, ns, it.Key, err)
	default:
		return err
	}
	var h blockhead.Header
	if err = h.Decode(head[:]); err == nil {
		err = h.Check(fp, it.Key, len(it.Buf))
	}
	if err != nil {
		return t.broken(ctx, ns, it.Key, &tier.Error{Op: op, Tier: t.o.Name, Key: it.Key, Class: tier.ClassCorrupt, Cause: tier.CauseHeader, Err: err})
	}
	clear(it.Buf[len(it.Buf):min(cap(it.Buf), padded(len(it.Buf)))])
	it.Sum = h.Sum
	t.presence.seen(fp, it.Key, int64(headSize+len(it.Buf)), since)
	t.presence.touch(fp, []block.Key{it.Key})
	return nil
}

func padded(n int) int { return (n + tier.Align - 1) &^ (tier.Align - 1) }

// Write is in tier.Tier.
func (t *Tier) Write(ctx context.Context, ns *block.Namespace, items []tier.Item) {
	leave, err := t.enter()
	if err == nil {
		defer leave()
		err = t.storeNamespace(ctx, ns)
	}
	for i := range items {
		if items[i].Err = err; err == nil {
			items[i].Err = t.write(ctx, ns, &items[i])
		}
	}
}

func (t *Tier) write(ctx context.Context, ns *block.Namespace, it *tier.Item) error {
	const op = "write"
	if err := t.fits(op, ns, it); err != nil {
		return err
	}
	fp := ns.Fingerprint()
	known := [1]tier.Presence{}
	t.presence.known(fp, []block.Key{it.Key}, known[:])
	if known[0] == tier.Present {
		return ctx.Err()
	}
	head := t.heads.Get().(*[headSize]byte)
	defer t.heads.Put(head)
	(&blockhead.Header{NS: fp, Key: it.Key, Length: int64(len(it.Buf)), Sum: it.Sum, Writer: t.writer}).Encode(head[:])
	if err := t.throttle.enter(ctx, forStores); err != nil {
		return t.explain(op, it.Key, err)
	}
	err := t.move(ctx, &Op{Put: true, Key: t.layout.block(fp, it.Key), Head: head[:], Buf: it.Buf, Block: it.Key,
		Checksum: t.sum(head[:], it), Exclusive: t.exclusive})
	if kindOf(err) == s3.KindPrecondition {
		err = nil // another node wrote it first
	}
	if err = t.leave(op, it.Key, err); err != nil {
		if tier.ClassOf(err) == tier.ClassNotFound { // not of a block: of something around it
			err = &tier.Error{Op: op, Tier: t.o.Name, Key: it.Key, Class: tier.ClassPermanent, Cause: tier.CauseConfig, Err: errors.New("the store says that the object is not there, of one that was to be made")}
		}
		t.presence.drop(fp, it.Key) // it may be there, or not
		return err
	}
	t.presence.put(fp, it.Key, int64(headSize+len(it.Buf)))
	return nil
}

// sum is the checksum of an object in the form that the store verifies. That of
// a CRC64-NVME is made from the header's and the block's; only a CRC32C takes a
// pass over the bytes.
func (t *Tier) sum(head []byte, it *tier.Item) s3.Checksum {
	switch t.checksum {
	case s3.ChecksumCRC64NVME:
		n := int64(len(it.Buf))
		s, ok := t.shifts.Load(n)
		if !ok {
			made := newShift(n)
			s, _ = t.shifts.LoadOrStore(n, &made)
		}
		return s3.Checksum{Algorithm: t.checksum, Value: s.(*shift).combine(crc64nvme.Checksum(head), it.Sum)}
	case s3.ChecksumCRC32C:
		crc := crc32.Update(crc32.Checksum(head, castagnoli), castagnoli, it.Buf)
		return s3.Checksum{Algorithm: t.checksum, Value: uint64(crc)}
	}
	return s3.Checksum{}
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)
