package main

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/admin"
	"github.com/terrace-kv/terrace/internal/config"
	"github.com/terrace-kv/terrace/tier"
)

// Pauses between attempts to open a tier that could not be opened.
const (
	lateBase = 5 * time.Second
	lateMax  = time.Minute
)

// lateNamespacesMax bounds the namespaces that are opened in a tier that joins.
const lateNamespacesMax = 1024

// lateTier stands for a tier that could not be opened: it has nothing, takes
// nothing and says why, until an attempt to open the tier succeeds. From then on
// it is that tier.
type lateTier struct {
	info  tier.Info
	where string
	log   *slog.Logger

	opened atomic.Pointer[tier.Tier]
	stop   context.CancelFunc
	over   chan struct{} // closed when nobody tries to open it any more

	mu         sync.Mutex
	why        error
	namespaces map[block.Fingerprint]*block.Namespace // of engines that greeted before
}

var (
	_ tier.Tier            = (*lateTier)(nil)
	_ tier.Knower          = (*lateTier)(nil)
	_ tier.Toucher         = (*lateTier)(nil)
	_ tier.NamespaceOpener = (*lateTier)(nil)
	_ tier.NameKeeper      = (*lateTier)(nil)
	_ tier.SetAsider       = (*lateTier)(nil)
	_ tier.Statser         = (*lateTier)(nil)
)

// joinLate makes a stand-in for the tier that c describes, and keeps trying to
// open it, with pauses of base and more.
func joinLate(c *config.Tier, why error, base time.Duration, log *slog.Logger) *lateTier {
	m := &lateTier{why: why, log: log, over: make(chan struct{})}
	m.info, m.where = tierTypes[c.Type].info(c)
	ctx, cancel := context.WithCancel(context.Background())
	m.stop = cancel
	m.start(func() { m.tryOpen(ctx, c, base) })
	return m
}

// start runs what Close waits for.
func (m *lateTier) start(f func()) {
	go func() {
		defer close(m.over)
		f()
	}()
}

func (m *lateTier) tryOpen(ctx context.Context, c *config.Tier, pause time.Duration) {
	for {
		timer := time.NewTimer(pause/2 + rand.N(pause/2+1))
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
		pause = min(2*pause, lateMax)
		bounded, cancel := context.WithTimeout(ctx, tierOpenTimeout)
		t, err := openTier(bounded, c, m.log)
		cancel()
		if err == nil {
			m.join(ctx, t)
			return
		}
		m.mu.Lock()
		m.why = err
		m.mu.Unlock()
	}
}

// join puts the tier in place, with the namespaces of engines that are here. One
// that contradicts what the tier holds is refused by the tier at each call.
func (m *lateTier) join(ctx context.Context, t tier.Tier) {
	m.mu.Lock()
	m.opened.Store(&t)
	var namespaces []*block.Namespace
	for _, ns := range m.namespaces {
		namespaces = append(namespaces, ns)
	}
	m.namespaces = nil
	m.mu.Unlock()
	m.log.Info("a tier could be opened at last and is used from now on", "tier", m.info.Name)
	o, ok := t.(tier.NamespaceOpener)
	for i := 0; ok && i < len(namespaces); i++ {
		bounded, cancel := context.WithTimeout(ctx, tierOpenTimeout)
		if err := o.OpenNamespace(bounded, namespaces[i]); err != nil {
			m.log.Warn("tier cannot open a namespace", "tier", m.info.Name, "namespace", namespaces[i].Fingerprint(), "err", err)
		}
		cancel()
	}
}

// tier is the tier, or nil while it cannot be opened.
func (m *lateTier) tier() tier.Tier {
	if t := m.opened.Load(); t != nil {
		return *t
	}
	return nil
}

func (m *lateTier) reason() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.why
}

func (m *lateTier) Info() tier.Info { return m.info }

func (m *lateTier) Contains(ctx context.Context, ns *block.Namespace, keys []block.Key, found []bool) error {
	if t := m.tier(); t != nil {
		return t.Contains(ctx, ns, keys, found)
	}
	clear(found)
	return nil
}

// Known saves the node from asking while there is nothing to ask.
func (m *lateTier) Known(ns *block.Namespace, keys []block.Key, out []tier.Presence) {
	t := m.tier()
	if k, ok := t.(tier.Knower); ok {
		k.Known(ns, keys, out)
		return
	}
	for i := range out {
		if out[i] = tier.Absent; t != nil {
			out[i] = tier.Unknown
		}
	}
}

func (m *lateTier) Touch(ns *block.Namespace, keys []block.Key) {
	if t, ok := m.tier().(tier.Toucher); ok {
		t.Touch(ns, keys)
	}
}

func (m *lateTier) Read(ctx context.Context, ns *block.Namespace, items []tier.Item) {
	if t := m.tier(); t != nil {
		t.Read(ctx, ns, items)
		return
	}
	for i := range items {
		items[i].Err = tier.ErrNotFound
	}
}

func (m *lateTier) Write(ctx context.Context, ns *block.Namespace, items []tier.Item) {
	if t := m.tier(); t != nil {
		t.Write(ctx, ns, items)
		return
	}
	why := m.reason()
	for i := range items {
		items[i].Err = &tier.Error{Op: "write", Tier: m.info.Name, Key: items[i].Key, Class: tier.ClassPermanent, Cause: tier.CauseUnavailable,
			Err: why, Hint: "correct this; the node goes on trying to open the tier"}
	}
}

func (m *lateTier) Delete(ctx context.Context, ns *block.Namespace, keys []block.Key) error {
	if t := m.tier(); t != nil {
		return t.Delete(ctx, ns, keys)
	}
	return nil
}

func (m *lateTier) OpenNamespace(ctx context.Context, ns *block.Namespace) error {
	m.mu.Lock()
	if m.opened.Load() == nil && len(m.namespaces) < lateNamespacesMax {
		if m.namespaces == nil {
			m.namespaces = map[block.Fingerprint]*block.Namespace{}
		}
		m.namespaces[ns.Fingerprint()] = ns
	}
	m.mu.Unlock()
	if o, ok := m.tier().(tier.NamespaceOpener); ok {
		return o.OpenNamespace(ctx, ns)
	}
	return nil
}

func (m *lateTier) Names(ctx context.Context) (map[string]*block.Namespace, error) {
	if k, ok := m.tier().(tier.NameKeeper); ok {
		return k.Names(ctx)
	}
	return nil, nil
}

func (m *lateTier) KeepName(ctx context.Context, name string, ns *block.Namespace) error {
	if k, ok := m.tier().(tier.NameKeeper); ok {
		return k.KeepName(ctx, name, ns)
	}
	return nil
}

func (m *lateTier) SetAside(ctx context.Context, ns *block.Namespace, key block.Key, why string) error {
	if s, ok := m.tier().(tier.SetAsider); ok {
		return s.SetAside(ctx, ns, key, why)
	}
	return nil
}

func (m *lateTier) Stats() tier.Stats {
	if t := m.tier(); t != nil {
		if s, ok := t.(tier.Statser); ok {
			return s.Stats()
		}
		return tier.Stats{Where: m.where}
	}
	return tier.Stats{Mode: admin.ModeNotOpen, Where: m.where, ScanError: m.reason().Error()}
}

func (m *lateTier) Close(ctx context.Context) error {
	m.stop()
	select {
	case <-m.over:
	case <-ctx.Done():
		return errors.Join(errors.New("tier "+m.info.Name+" is still being opened"), ctx.Err())
	}
	if t := m.tier(); t != nil {
		return t.Close(ctx)
	}
	return nil
}
