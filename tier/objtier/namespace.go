package objtier

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/s3"
	"github.com/terrace-kv/terrace/tier"
)

const (
	namespaceBytesMax = 1 << 20 // what is read of a description
	namespacesMax     = 1000    // that are looked at when a tier opens
	loadParallel      = 16
)

// namespace is what the tier knows of one in the bucket.
type namespace struct {
	fp   block.Fingerprint
	turn chan struct{} // of capacity 1: whoever asks the store about it holds it

	// The tier's mu guards these.
	spec *block.Namespace // what namespace.json says, once that is known
	bad  error            // why it says nothing that can be used
	name string
}

// namespace returns the one of a fingerprint, which may be new.
func (t *Tier) namespace(fp block.Fingerprint) *namespace {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.mu.namespaces[fp]
	if n == nil {
		n = &namespace{fp: fp, turn: make(chan struct{}, 1)}
		t.mu.namespaces[fp] = n
	}
	return n
}

// loadNamespaces reads what the bucket says of its namespaces, so that names
// stand for the same ones as before.
func (t *Tier) loadNamespaces(ctx context.Context) error {
	var found []*namespace
	for o := (s3.ListOptions{Prefix: t.layout.prefix, Delimiter: "/"}); ; {
		var page s3.Page
		err := again(ctx, func() (err error) {
			page, err = t.client.List(ctx, o)
			return err
		})
		if err != nil {
			return t.openErr("list", err)
		}
		for _, p := range page.Prefixes {
			name := strings.TrimSuffix(strings.TrimPrefix(p, t.layout.prefix), "/")
			var fp block.Fingerprint
			if n, err := hex.Decode(fp[:], []byte(name)); err != nil || n != len(fp) || name != fp.String() {
				continue
			}
			if len(found) == namespacesMax {
				t.log.Warn("the bucket has more namespaces than are looked at when the tier opens; names of others are not known", "where", t.where, "namespaces_max", namespacesMax)
				page.Next = ""
				break
			}
			found = append(found, t.namespace(fp))
		}
		if o.Token = page.Next; o.Token == "" {
			break
		}
	}
	errs := make([]error, len(found))
	next := make(chan int)
	var wg sync.WaitGroup
	for range min(loadParallel, len(found)) {
		wg.Go(func() {
			for i := range next {
				errs[i] = errors.Join(again(ctx, func() error { return t.readSpec(ctx, found[i]) }), again(ctx, func() error { return t.readName(ctx, found[i]) }))
			}
		})
	}
	for i := range found {
		next <- i
	}
	close(next)
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return t.openErr("read the namespaces of", err)
		}
	}
	return nil
}

// readSpec asks for a namespace's description. What cannot be used is kept as
// n.bad; the error is of the asking alone.
func (t *Tier) readSpec(ctx context.Context, n *namespace) error {
	b, _, err := t.client.GetSmall(ctx, t.layout.at(n.fp.String(), nameNamespace), namespaceBytesMax)
	var spec *block.Namespace
	var bad error
	switch kind := kindOf(err); {
	case err == nil:
		if spec, bad = block.ParseNamespace(b); bad == nil && spec.Fingerprint() != n.fp {
			bad = fmt.Errorf("it describes namespace %s", spec.Fingerprint())
		}
	case kind == s3.KindNotFound:
	case kind == s3.KindLength:
		bad = err
	default:
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	n.spec, n.bad = spec, bad
	return nil
}

func (t *Tier) readName(ctx context.Context, n *namespace) error {
	b, _, err := t.client.GetSmall(ctx, t.layout.at(n.fp.String(), nameName), tier.NameBytesMax)
	if kind := kindOf(err); err != nil && kind != s3.KindNotFound && kind != s3.KindLength {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	n.name = string(b)
	return nil
}

// OpenNamespace is in tier.NamespaceOpener. It compares with what is stored and
// begins to list the namespace's blocks.
func (t *Tier) OpenNamespace(ctx context.Context, ns *block.Namespace) error {
	leave, err := t.enter()
	if err != nil {
		return err
	}
	defer leave()
	if err := t.withNamespace(ctx, ns, false); err != nil {
		return err
	}
	t.warm.start(ns)
	return nil
}

// storeNamespace makes sure that the description is there before any block is.
func (t *Tier) storeNamespace(ctx context.Context, ns *block.Namespace) error {
	return t.withNamespace(ctx, ns, true)
}

// withNamespace compares a namespace with the stored one, and with store
// stores it if there is none. What is known needs no request.
func (t *Tier) withNamespace(ctx context.Context, ns *block.Namespace, store bool) error {
	const op = "open namespace"
	n := t.namespace(ns.Fingerprint())
	if done, err := t.compare(n, ns); done || err != nil {
		return err
	}
	select {
	case n.turn <- struct{}{}:
	case <-ctx.Done():
		return t.explain(op, block.Key{}, ctx.Err())
	}
	defer func() { <-n.turn }()
	if done, err := t.compare(n, ns); done || err != nil { // meanwhile
		return err
	}
	if err := t.request(ctx, forLoads, op, block.Key{}, func() error { return t.readSpec(ctx, n) }); err != nil {
		return err
	}
	if done, err := t.compare(n, ns); done || err != nil || !store {
		return err
	}
	err := t.request(ctx, forStores, op, block.Key{}, func() error {
		_, err := t.client.Put(ctx, t.layout.at(n.fp.String(), nameNamespace), s3.NewBody(ns.JSON()),
			s3.PutOptions{IfNoneMatch: t.exclusive, ContentType: "application/json"})
		if kindOf(err) == s3.KindPrecondition {
			err = t.readSpec(ctx, n) // another node's, which is then compared
		} else if err == nil {
			t.mu.Lock()
			n.spec = ns
			t.mu.Unlock()
		}
		return err
	})
	if err != nil {
		return err
	}
	_, err = t.compare(n, ns)
	return err
}

// compare says whether the stored description is known and is this namespace's.
func (t *Tier) compare(n *namespace, ns *block.Namespace) (same bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	where := t.where + "/" + n.fp.String() + "/" + nameNamespace
	e := &tier.Error{Op: "open namespace", Tier: t.o.Name, Class: tier.ClassPermanent, Cause: tier.CauseNamespace}
	switch {
	case n.bad != nil:
		e.Err = fmt.Errorf("%w: %s is not its description: %w", tier.ErrNamespaceMismatch, where, n.bad)
		e.Hint = "remove that object, and the objects beside it if they are not to be used, and restart the node"
		return false, e
	case n.spec == nil:
		return false, nil
	case !bytes.Equal(n.spec.JSON(), ns.JSON()):
		e.Err = fmt.Errorf("%w: %s differs in %s", tier.ErrNamespaceMismatch, where, strings.Join(block.Diff(n.spec.Spec(), ns.Spec()), ", "))
		e.Hint = "someone changed the object; remove it and restart the node"
		return false, e
	}
	return true, nil
}

// Names is in tier.NameKeeper.
func (t *Tier) Names(context.Context) (map[string]*block.Namespace, error) {
	leave, err := t.enter()
	if err != nil {
		return nil, err
	}
	defer leave()
	t.mu.Lock()
	defer t.mu.Unlock()
	out := map[string]*block.Namespace{}
	for _, n := range t.mu.namespaces {
		if n.name != "" && n.spec != nil && n.bad == nil {
			out[n.name] = n.spec
		}
	}
	return out, nil
}

// KeepName is in tier.NameKeeper. The name is the content of an object beside
// the description, which is made if it is not there. Names given by two nodes at
// once may both be kept: the next start finds out.
func (t *Tier) KeepName(ctx context.Context, name string, ns *block.Namespace) error {
	const op = "keep name"
	leave, err := t.enter()
	if err != nil {
		return err
	}
	defer leave()
	if len(name) == 0 || len(name) > tier.NameBytesMax {
		return &tier.Error{Op: op, Tier: t.o.Name, Class: tier.ClassPermanent,
			Err: fmt.Errorf("the name has %d bytes, want 1 to %d", len(name), tier.NameBytesMax)}
	}
	if done, err := t.named(op, name, ns); done || err != nil {
		return err
	}
	if err := t.storeNamespace(ctx, ns); err != nil {
		return err
	}
	n := t.namespace(ns.Fingerprint())
	err = t.request(ctx, forStores, op, block.Key{}, func() error {
		_, err := t.client.Put(ctx, t.layout.at(n.fp.String(), nameName), s3.NewBody([]byte(name)), s3.PutOptions{ContentType: "text/plain"})
		return err
	})
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	n.name = name
	return nil
}

// named says whether a namespace has a name already, and refuses another's.
func (t *Tier) named(op, name string, ns *block.Namespace) (done bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for fp, n := range t.mu.namespaces {
		switch {
		case n.name != name:
		case fp == ns.Fingerprint():
			return true, nil
		default:
			differ := ""
			if n.spec != nil {
				differ = ", which differs in " + strings.Join(block.Diff(n.spec.Spec(), ns.Spec()), ", ")
			}
			return false, &tier.Error{Op: op, Tier: t.o.Name, Class: tier.ClassPermanent, Cause: tier.CauseNamespace,
				Err:  fmt.Errorf("%w: the name %q is kept for namespace %s%s", tier.ErrNamespaceMismatch, name, fp, differ),
				Hint: fmt.Sprintf("mend the engine's settings or give it another name; to give the name free, remove %s/%s/%s and restart the node", t.where, fp, nameName)}
		}
	}
	return false, nil
}
