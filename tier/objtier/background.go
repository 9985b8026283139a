package objtier

import (
	"context"
	"fmt"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/s3"
)

const releaseLease = 2 * time.Second // at Close

// throttled is the tier's bucket, for the requests of one priority that touch
// no slot.
type throttled struct {
	t        *Tier
	priority int
}

var (
	_ header = throttled{}
	_ bucket = throttled{}
)

func (b throttled) Head(ctx context.Context, key string) (o s3.Object, err error) {
	err = b.t.request(ctx, b.priority, "probe", block.Key{}, func() (err error) {
		o, err = b.t.client.Head(ctx, key)
		return err
	})
	return o, err
}

func (b throttled) List(ctx context.Context, o s3.ListOptions) (page s3.Page, err error) {
	err = b.t.request(ctx, b.priority, "list", block.Key{}, func() (err error) {
		page, err = b.t.client.List(ctx, o)
		return err
	})
	return page, err
}

func (b throttled) Put(ctx context.Context, key string, body *s3.Body, o s3.PutOptions) (out s3.Object, err error) {
	err = b.t.request(ctx, b.priority, "write", block.Key{}, func() (err error) {
		out, err = b.t.client.Put(ctx, key, body, o)
		return err
	})
	return out, err
}

func (b throttled) GetSmall(ctx context.Context, key string, max int) (content []byte, o s3.Object, err error) {
	err = b.t.request(ctx, b.priority, "read", block.Key{}, func() (err error) {
		content, o, err = b.t.client.GetSmall(ctx, key, max)
		return err
	})
	return content, o, err
}

func (b throttled) DeleteMany(ctx context.Context, keys []string) (failed []string, err error) {
	failed = keys // if it is not even sent
	err = b.t.request(ctx, b.priority, "delete", block.Key{}, func() (err error) {
		failed, err = b.t.client.DeleteMany(ctx, keys)
		return err
	})
	return failed, err
}

// startBackground makes what asks, lists and evicts, which stopBackground ends.
// Namespaces are listed when they are opened: of others nobody asks.
func (t *Tier) startBackground(ctx context.Context) error {
	t.asker = newAsker(throttled{t, forProbes}, t.presence, t.layout)
	if t.o.Capacity > 0 {
		b := throttled{t, forStores}
		if !t.o.CapacityAlone {
			switch ok, err := guardable(ctx, b, t.layout.at(dirProbe, t.writerID()+"-lease")); {
			case err != nil:
				return t.openErr("prove conditional writes to", err)
			case !ok:
				return fmt.Errorf("object tier %s: feature: capacity is %d, and %s has no conditional writes (If-None-Match, If-Match) by which its nodes could agree who looks after it "+
					"(set capacity_alone: true on the one node that shall, and capacity: unbounded on all others; or leave the bucket to its life-cycle rules)",
					t.o.Name, t.o.Capacity, t.where)
			}
		}
		perSecond := t.o.ListPerSecond
		if perSecond <= 0 {
			perSecond = ListPerSecDefault
		}
		t.keeper = newKeeper(keeperOptions{bucket: b, presence: t.presence, layout: t.layout, capacity: t.o.Capacity, every: t.o.CapacityEvery,
			alone: t.o.CapacityAlone, perSecond: perSecond, holder: t.writerID(), log: t.log, now: t.o.Now})
		t.keeper.start()
	}
	t.warm = newWarmer(throttled{t, forStores}, t.presence, t.layout, t.o.ListPerSecond, t.log)
	return nil
}

func (t *Tier) stopBackground() {
	t.warm.close()
	if t.keeper != nil {
		ctx, cancel := context.WithTimeout(context.Background(), releaseLease)
		defer cancel()
		t.keeper.close(ctx)
	}
}

func (t *Tier) contains(ctx context.Context, ns *block.Namespace, keys []block.Key, found []bool) error {
	return t.asker.contains(ctx, ns, keys, found)
}
