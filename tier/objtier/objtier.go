package objtier

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/lifecycle"
	"github.com/terrace-kv/terrace/internal/s3"
	"github.com/terrace-kv/terrace/tier"
)

// Tier is a bucket of blocks. See the package comment.
type Tier struct {
	o         Options
	info      tier.Info
	log       *slog.Logger
	client    *s3.Client
	transport Transport
	layout    layout
	where     string // for people: bucket, prefix, endpoint
	mode      string
	writer    [16]byte // this run's id, in every header

	checksum  string // what the store verifies, or ""
	exclusive bool   // the store has conditional writes

	gate     *lifecycle.Gate
	throttle *throttle
	presence *presence
	warm     *warmer
	keeper   *keeper // of the capacity, or nil
	asker    *asker

	heads     sync.Pool     // *[headSize]byte
	shifts    sync.Map      // block length to *shift
	asideTurn chan struct{} // of capacity 1
	warn      limiter

	setAside   atomic.Int64
	asideSeen  atomic.Int64 // copies that were wrong when read and right when read again
	unreleased atomic.Int64 // transfers whose release fails at the moment
	releases   atomic.Int64 // releases that failed

	mu struct {
		sync.Mutex
		namespaces map[block.Fingerprint]*namespace
	}
}

var (
	_ tier.Tier            = (*Tier)(nil)
	_ tier.Knower          = (*Tier)(nil)
	_ tier.Toucher         = (*Tier)(nil)
	_ tier.NamespaceOpener = (*Tier)(nil)
	_ tier.NameKeeper      = (*Tier)(nil)
	_ tier.SetAsider       = (*Tier)(nil)
	_ tier.Statser         = (*Tier)(nil)
)

// Open proves that the bucket can be used, by listing, writing, reading and
// removing below the prefix, and starts to list what is there. It makes no
// bucket. On an error, which is one message that says what to do, there is
// nothing to close. ctx bounds the opening only.
func Open(ctx context.Context, o Options) (*Tier, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	o.ensureDefaults()
	client, err := s3.New(o.S3)
	if err != nil {
		return nil, fmt.Errorf("object tier %s: %w", o.Name, err)
	}
	t := &Tier{o: o, client: client, layout: newLayout(o.Prefix), log: o.Logger.With("tier", o.Name), gate: lifecycle.NewGate(), asideTurn: make(chan struct{}, 1)}
	t.info = tier.Info{Name: o.Name, Type: "object", Medium: tier.MediumStorage, Locality: tier.LocalityRemote,
		ReadParallel: o.Workers, WriteParallel: o.Workers, BatchItems: 1}
	t.where = client.Where()
	if o.Prefix != "" {
		t.where += "/" + o.Prefix
	}
	_, _ = rand.Read(t.writer[:]) // never fails
	t.heads.New = func() any { return new([headSize]byte) }
	t.warn.now = o.Now
	t.mu.namespaces = map[block.Fingerprint]*namespace{}
	t.throttle = newThrottle(2*o.Workers+headsMax, o.RequestsPerSecond, o.Now)
	t.presence = newPresence(o.IndexKeys, o.PresentFor, o.AbsentFor, o.Now)
	t.transport = o.Transport
	if t.transport == nil {
		t.transport = httpTransport{client}
	}
	if err := t.probe(ctx); err != nil {
		client.Close()
		return nil, err
	}
	if err := t.loadNamespaces(ctx); err != nil {
		client.Close()
		return nil, err
	}
	if err := t.startBackground(ctx); err != nil {
		client.Close()
		return nil, err
	}
	_ = t.gate.Ready() // nobody has it yet
	t.log.Info("opened", "where", t.where, "mode", t.mode, "credentials", client.Source(), "namespaces", len(t.mu.namespaces))
	return t, nil
}

// Info is in tier.Tier.
func (t *Tier) Info() tier.Info { return t.info }

// Known is in tier.Knower.
func (t *Tier) Known(ns *block.Namespace, keys []block.Key, out []tier.Presence) {
	t.presence.known(ns.Fingerprint(), keys, out)
}

// Touch is in tier.Toucher.
func (t *Tier) Touch(ns *block.Namespace, keys []block.Key) {
	t.presence.touch(ns.Fingerprint(), keys)
}

// enter admits a call, until leave.
func (t *Tier) enter() (leave func(), err error) {
	leave, err = t.gate.Enter()
	if err != nil {
		return nil, fmt.Errorf("object tier %s: %w", t.o.Name, tier.ErrClosed)
	}
	return leave, nil
}

// request makes one request of the client under the throttle and explains its
// error. It is for what touches no slot.
func (t *Tier) request(ctx context.Context, priority int, op string, key block.Key, do func() error) error {
	if err := t.throttle.enter(ctx, priority); err != nil {
		return t.explain(op, key, err)
	}
	return t.leave(op, key, do())
}

// leave gives the throttle's place back and explains the error of what had it.
// A failure that would pass is permanent when too much has been repeated.
func (t *Tier) leave(op string, key block.Key, err error) error {
	out := t.explain(op, key, err)
	class := tier.ClassOf(out)
	failed := class == tier.ClassRetryable
	retry := t.throttle.leave(kindOf(err) == s3.KindThrottled, failed)
	var te *tier.Error
	if failed && !retry && errors.As(out, &te) {
		te.Class = tier.ClassPermanent
		te.Err = fmt.Errorf("%w; not repeated, for too many requests failed lately", te.Err)
	}
	return out
}

// Contains is in tier.Tier.
func (t *Tier) Contains(ctx context.Context, ns *block.Namespace, keys []block.Key, found []bool) error {
	leave, err := t.enter()
	if err != nil {
		return err
	}
	defer leave()
	return t.contains(ctx, ns, keys, found)
}

// Delete is in tier.Tier.
func (t *Tier) Delete(ctx context.Context, ns *block.Namespace, keys []block.Key) error {
	leave, err := t.enter()
	if err != nil {
		return err
	}
	defer leave()
	fp := ns.Fingerprint()
	for len(keys) > 0 {
		n := min(len(keys), deleteMax)
		names := make([]string, n)
		for i, key := range keys[:n] {
			names[i] = t.layout.block(fp, key)
		}
		since := t.presence.mark()
		err := t.request(ctx, forStores, "delete", block.Key{}, func() error {
			failed, err := t.client.DeleteMany(ctx, names)
			if err == nil && len(failed) > 0 {
				err = fmt.Errorf("the store keeps %d of %d objects, such as %s", len(failed), n, failed[0])
			}
			return err
		})
		if err != nil {
			for _, key := range keys[:n] {
				t.presence.drop(fp, key) // it may be there, or not
			}
			return err
		}
		t.presence.removed(fp, keys[:n], since)
		keys = keys[n:]
	}
	return nil
}

const deleteMax = 1000 // objects in one request, as S3 allows

// Close is in tier.Tier. What hangs is named by the error and goes on: its
// slots stay the transfer's.
func (t *Tier) Close(ctx context.Context) error {
	err := t.gate.Drain(ctx)
	t.stopBackground()
	if err != nil {
		n, stuck := t.gate.Inside(), t.unreleased.Load()
		return fmt.Errorf("object tier %s: %d calls to %s are not over, %d of them cannot release their transfer: %w", t.o.Name, n, t.where, stuck, err)
	}
	t.gate.Close()
	t.client.Close()
	return nil
}

// Stats is in tier.Statser.
func (t *Tier) Stats() tier.Stats {
	blocks, bytes := t.presence.size()
	s := tier.Stats{Mode: t.mode, Where: t.where, Blocks: blocks, UsedBytes: bytes, CapacityBytes: t.o.Capacity, SetAside: t.setAside.Load()}
	if slots, cuts := t.throttle.state(); cuts > 0 {
		s.Mode += fmt.Sprintf("; slowed down %d times, at most %d requests at once", cuts, slots)
	}
	s.ScanDone, s.ScanBlocks, s.ScanError = t.warm.progress()
	if t.keeper != nil {
		s.Evicted = t.keeper.evicted()
	}
	return s
}

// Requests counts the HTTP requests of the tier since its start.
func (t *Tier) Requests() s3.Counts { return t.client.Requests() }

// limiter lets a message pass once in a while.
type limiter struct {
	now  func() time.Time
	mu   sync.Mutex
	next time.Time
}

func (l *limiter) pass() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.now()
	if now.Before(l.next) {
		return false
	}
	l.next = now.Add(10 * time.Second)
	return true
}

func (t *Tier) writerID() string { return hex.EncodeToString(t.writer[:]) }
