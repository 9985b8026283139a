package fault

import (
	"context"
	"fmt"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
)

// Tier wraps a tier. There is one op for each block of a read, write, contains
// or delete, whose key is the block key's hex, and one for open_namespace,
// keep_name, set_aside and close. What a tier answers from memory (Known,
// Touch, Names, Stats, Info) is passed on as it is. The contract holds: when a call returns, its
// buffers are quiet, for everything happens within it.
//
// Known is there if under has it; the other optional abilities are there
// always, and do nothing where under has none.
func Tier(under tier.Tier, set *Set) tier.Tier {
	t := &faultyTier{Tier: under, set: set}
	if k, ok := under.(tier.Knower); ok {
		return &knowingTier{t, k}
	}
	return t
}

type faultyTier struct {
	tier.Tier
	set *Set
}

type knowingTier struct {
	*faultyTier
	tier.Knower
}

var (
	_ tier.Toucher         = (*faultyTier)(nil)
	_ tier.NamespaceOpener = (*faultyTier)(nil)
	_ tier.NameKeeper      = (*faultyTier)(nil)
	_ tier.SetAsider       = (*faultyTier)(nil)
	_ tier.Statser         = (*faultyTier)(nil)
)

// ask asks about one block, and waits. An error means that the call ends now;
// a late fault's is in the fault.
func (t *faultyTier) ask(ctx context.Context, kind string, key string, write bool) (Fault, error) {
	f := t.set.Check(Op{Seam: SeamTier, Kind: kind, Key: key, Write: write})
	if err := f.wait(ctx); err != nil {
		return f, err
	}
	if f.Late {
		return f, nil
	}
	return f, f.Err
}

// call makes a call that is about nothing but one key.
func (t *faultyTier) call(ctx context.Context, kind, key string, write bool, do func() error) error {
	f, err := t.ask(ctx, kind, key, write)
	if err != nil {
		return err
	}
	if err := do(); err != nil || f.Err == nil {
		return err
	}
	return f.Err
}

// Contains is in tier.Tier. A flip turns an answer over.
func (t *faultyTier) Contains(ctx context.Context, ns *block.Namespace, keys []block.Key, found []bool) error {
	faults := make([]Fault, len(keys))
	for i, key := range keys {
		var err error
		if faults[i], err = t.ask(ctx, "contains", key.String(), false); err != nil {
			return err
		}
	}
	if err := t.Tier.Contains(ctx, ns, keys, found); err != nil {
		return err
	}
	for i, f := range faults {
		if f.Err != nil {
			return f.Err
		}
		found[i] = found[i] != f.Flip
	}
	return nil
}

// items makes a call one block at a time.
func (t *faultyTier) items(ctx context.Context, kind string, items []tier.Item, do func(one []tier.Item, f *Fault)) {
	for i := range items {
		it := &items[i]
		f, err := t.ask(ctx, kind, it.Key.String(), kind == "write")
		if it.Err = err; err != nil {
			continue
		}
		do(items[i:i+1], &f)
		if it.Err == nil {
			it.Err = f.Err
		}
	}
}

// Read is in tier.Tier.
func (t *faultyTier) Read(ctx context.Context, ns *block.Namespace, items []tier.Item) {
	t.items(ctx, "read", items, func(one []tier.Item, f *Fault) {
		t.Tier.Read(ctx, ns, one)
		it := &one[0]
		if it.Err != nil {
			return
		}
		spoil(it.Buf, f)
		if f.Short > 0 && f.Short < len(it.Buf) {
			clear(it.Buf[f.Short:])
			it.Err = &tier.Error{Op: "read", Tier: t.Info().Name, Key: it.Key, Class: tier.ClassCorrupt, Cause: tier.CauseShort,
				Err: fmt.Errorf("%d bytes of %d", f.Short, len(it.Buf))}
		}
	})
}

// Write is in tier.Tier.
func (t *faultyTier) Write(ctx context.Context, ns *block.Namespace, items []tier.Item) {
	t.items(ctx, "write", items, func(one []tier.Item, f *Fault) {
		real := one[0].Buf
		if f.Torn || f.Flip {
			// The engine may be reading the block, so what is wrong is a copy.
			// Its length keeps it aligned.
			one[0].Buf = append(make([]byte, 0, (len(real)+tier.Align-1)/tier.Align*tier.Align), real...)
			spoil(one[0].Buf, f)
		}
		t.Tier.Write(ctx, ns, one)
		one[0].Buf = real
	})
}

// spoil makes bytes wrong as a fault says.
func spoil(b []byte, f *Fault) {
	if f.Torn {
		clear(b[min(f.Keep, len(b)):])
	}
	if f.Flip {
		b[len(b)/2] ^= 4
	}
}

// Delete is in tier.Tier.
func (t *faultyTier) Delete(ctx context.Context, ns *block.Namespace, keys []block.Key) error {
	for i, key := range keys {
		err := t.call(ctx, "delete", key.String(), true, func() error { return t.Tier.Delete(ctx, ns, keys[i:i+1]) })
		if err != nil {
			return err
		}
	}
	return nil
}

// Close is in tier.Tier. It closes, whatever it answers.
func (t *faultyTier) Close(ctx context.Context) error {
	f, err := t.ask(ctx, "close", "", true)
	if cerr := t.Tier.Close(ctx); cerr != nil {
		return cerr
	}
	if err == nil {
		err = f.Err
	}
	return err
}

// OpenNamespace is in tier.NamespaceOpener.
func (t *faultyTier) OpenNamespace(ctx context.Context, ns *block.Namespace) error {
	return t.call(ctx, "open_namespace", "", true, func() error {
		if o, ok := t.Tier.(tier.NamespaceOpener); ok {
			return o.OpenNamespace(ctx, ns)
		}
		return nil
	})
}

// SetAside is in tier.SetAsider. Where under cannot, it deletes the copy.
func (t *faultyTier) SetAside(ctx context.Context, ns *block.Namespace, key block.Key, why string) error {
	return t.call(ctx, "set_aside", key.String(), true, func() error {
		if s, ok := t.Tier.(tier.SetAsider); ok {
			return s.SetAside(ctx, ns, key, why)
		}
		return t.Tier.Delete(ctx, ns, []block.Key{key})
	})
}

// Names is in tier.NameKeeper.
func (t *faultyTier) Names(ctx context.Context) (map[string]*block.Namespace, error) {
	if k, ok := t.Tier.(tier.NameKeeper); ok {
		return k.Names(ctx)
	}
	return map[string]*block.Namespace{}, nil
}

// KeepName is in tier.NameKeeper. Where under cannot, the name is forgotten.
func (t *faultyTier) KeepName(ctx context.Context, name string, ns *block.Namespace) error {
	return t.call(ctx, "keep_name", name, true, func() error {
		if k, ok := t.Tier.(tier.NameKeeper); ok {
			return k.KeepName(ctx, name, ns)
		}
		return nil
	})
}

// Touch is in tier.Toucher.
func (t *faultyTier) Touch(ns *block.Namespace, keys []block.Key) {
	if u, ok := t.Tier.(tier.Toucher); ok {
		u.Touch(ns, keys)
	}
}

// Stats is in tier.Statser.
func (t *faultyTier) Stats() tier.Stats {
	if s, ok := t.Tier.(tier.Statser); ok {
		return s.Stats()
	}
	return tier.Stats{}
}
