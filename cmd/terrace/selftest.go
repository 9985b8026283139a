package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/minio/crc64nvme"
	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/config"
	"github.com/terrace-kv/terrace/tier"
)

// Bounds of a tier's self-test, within that of its opening.
const (
	selfTestTimeout = 10 * time.Second
	selfTestGrace   = time.Second            // for a call to notice that its time is over
	selfTestPause   = 100 * time.Millisecond // before it is tried again, and more each time
)

// selfTestModel is the model of the namespace that self-tests use in every tier.
const selfTestModel = "terrace/self-test"

// selfTestBytes is no multiple of a page, so that padding is in play.
const selfTestBytes = 6000

// openTier opens a tier and has it show that it serves what it stores: a tier
// that only stores fills up, costs time, and is noticed by nobody (see
// docs/operations.md, Health and readiness).
func openTier(ctx context.Context, c *config.Tier, log *slog.Logger) (tier.Tier, error) {
	t, err := tierTypes[c.Type].open(ctx, c, log)
	if err != nil {
		return nil, err
	}
	if err := selfTest(ctx, c.Name, t, log); err != nil {
		return nil, fmt.Errorf("tier %s: self-test: %w", c.Name, err)
	}
	return t, nil
}

// selfTest runs the test, and closes the tier if it fails. A call that hangs is
// given up: the tier is closed when it returns, or by the end of the process.
func selfTest(ctx context.Context, name string, t tier.Tier, log *slog.Logger) error {
	ctx, cancel := context.WithTimeout(ctx, selfTestTimeout)
	defer cancel()
	over := make(chan error, 1)
	go func() {
		err := storeAndLoad(ctx, name, t, log)
		for pause := selfTestPause; tier.ClassOf(err) == tier.ClassRetryable && ctx.Err() == nil; pause *= 2 {
			select {
			case <-ctx.Done():
			case <-time.After(pause):
				err = storeAndLoad(ctx, name, t, log)
			}
		}
		if err != nil {
			closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), selfTestTimeout)
			defer cancel()
			err = errors.Join(err, t.Close(closing))
		}
		over <- err
	}()
	select {
	case err := <-over:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-over:
		return err
	case <-time.After(selfTestGrace):
		return fmt.Errorf("%w; a call of the tier has not returned", context.Cause(ctx))
	}
}

// storeAndLoad stores a block as the node does, finds, reads and compares it,
// and has it forgotten. A tier that does not take it says so at every store;
// that is no reason to do without what it has.
func storeAndLoad(ctx context.Context, name string, t tier.Tier, log *slog.Logger) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("the tier panicked: %v", r)
		}
	}()
	ns, err := block.NewNamespace(block.Spec{Model: selfTestModel, DType: "bytes", Layout: "self-test",
		HashAlgorithm: "random", HashLength: block.HashSize,
		Groups: []block.Group{{Kind: block.KindFull, TokensPerBlock: 16, BlockBytes: selfTestBytes}}})
	if err != nil {
		return err
	}
	// The key is of this start alone: others may share the medium. Its first
	// byte is always the same, so that a folder of keys has one sub-folder.
	var hash [block.HashSize]byte
	_, _ = rand.Read(hash[1:]) // never fails
	key, err := block.NewKey(hash[:], 0)
	if err != nil {
		return err
	}
	size := (selfTestBytes + tier.Align - 1) / tier.Align * tier.Align
	mem, err := unix.Mmap(-1, 0, 2*size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return fmt.Errorf("take memory: %w", os.NewSyscallError("mmap", err))
	}
	defer func() { err = errors.Join(err, unix.Munmap(mem)) }()
	stored, loaded := mem[:selfTestBytes:size], mem[size:size+selfTestBytes:2*size]
	_, _ = rand.Read(stored)
	sum := crc64nvme.Checksum(stored)

	if o, ok := t.(tier.NamespaceOpener); ok {
		if err := o.OpenNamespace(ctx, ns); err != nil {
			return fmt.Errorf("open a namespace: %w", err)
		}
	}
	items := []tier.Item{{Key: key, Buf: stored, Sum: sum}}
	if t.Write(ctx, ns, items); items[0].Err != nil {
		if ctx.Err() != nil {
			return items[0].Err
		}
		log.Warn("a tier did not take the block of its self-test; what it has is served", "tier", name, "err", items[0].Err)
		return nil
	}
	defer func() {
		if derr := t.Delete(ctx, ns, []block.Key{key}); derr != nil {
			log.Warn("the block of a tier's self-test stays in the tier", "tier", name, "block", key, "err", derr)
		}
	}()
	const hint = "the tier stores and would never serve; this is a bug of the tier, or its medium loses what is written"
	if k, ok := t.(tier.Knower); ok {
		known := []tier.Presence{tier.Unknown}
		if k.Known(ns, []block.Key{key}, known); known[0] == tier.Absent {
			return fmt.Errorf("the block that was just stored is not in the index (%s)", hint)
		}
	}
	found := []bool{false}
	if err := t.Contains(ctx, ns, []block.Key{key}, found); err != nil {
		return fmt.Errorf("ask for the block that was just stored: %w", err)
	}
	if !found[0] {
		return fmt.Errorf("the block that was just stored is not found (%s)", hint)
	}
	for i := range loaded[:size] {
		loaded[:size][i] = 0xa5
	}
	items = []tier.Item{{Key: key, Buf: loaded}}
	if t.Read(ctx, ns, items); items[0].Err != nil {
		return fmt.Errorf("read the block that was just stored: %w (%s)", items[0].Err, hint)
	}
	if !bytes.Equal(stored, loaded) || items[0].Sum != sum {
		return fmt.Errorf("the block that was just stored comes back with other bytes or another checksum (%s)", hint)
	}
	return nil
}
