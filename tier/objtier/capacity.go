package objtier

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/s3"
)

const (
	keepPercent      = 95          // of the capacity is left when blocks had to go
	evictAgeMin      = time.Minute // younger blocks stay, also over the capacity
	probeAgeMax      = time.Hour
	quarantineMax    = 64   // objects
	leaseBytesMax    = 4096 // of lease.json
	leaseVersion     = 1
	leaseTTLMax      = 30 * 86400 // seconds; what another's lease may say
	attemptsMax      = 4
	ageBuckets       = 4096
	ageStep          = 1.005 // each bucket ends at so many times the age of the one before: 4096 reach 1,400 years
	namespacesInPass = 1 << 16
)

// bucket is what the keeper asks of a store. Errors are those of header.
type bucket interface {
	lister
	Put(ctx context.Context, key string, body *s3.Body, o s3.PutOptions) (s3.Object, error)
	GetSmall(ctx context.Context, key string, max int) ([]byte, s3.Object, error)
	DeleteMany(ctx context.Context, keys []string) (failed []string, err error)
}

// errLeaseLost ends a pass: another node looks after the capacity, or may.
var errLeaseLost = errors.New("the lease of the capacity was lost")

// leaseDoc is lease.json. A holder of "" has given it back.
type leaseDoc struct {
	Version    int    `json:"version"`
	Holder     string `json:"holder"`
	Host       string `json:"host"` // for people
	Sequence   int64  `json:"sequence"`
	TTLSeconds int64  `json:"ttl_seconds"`
}

// lease is an object that one node at a time holds. Its methods are called from
// one goroutine.
//
// No clocks are compared. Each write changes the object, and so its ETag. A
// holder that has not written for ttl by its own clock no longer takes itself
// for one (a tenth earlier, in fact, counted from before its last write). Who
// wants the lease takes it when it has seen one and the same ETag for the whole
// ttl by its own clock, and only over that ETag. So two nodes hold it together
// only if their clocks run at rates that differ by a tenth; and then both evict
// blocks that are old, which costs Misses and no more.
type lease struct {
	bucket bucket
	key    string
	holder string // this run
	host   string
	ttl    time.Duration
	alone  bool // write without conditions: there is nobody else
	now    func() time.Time

	sequence int64
	etag     string // of what this node wrote last, if it is known
	until    time.Time
	renewAt  time.Time
	skew     time.Duration // by which the store's clock is ahead of ours

	other      string // ETag of another's lease
	otherSince time.Time
}

// take takes the lease, or renews it. A lease that another node holds is no
// error.
func (l *lease) take(ctx context.Context) (held bool, err error) { return l.claim(ctx, true) }

// keep sees to it that the lease is held for the next request.
func (l *lease) keep(ctx context.Context) error {
	now := l.now()
	if !now.Before(l.until) {
		return errLeaseLost
	}
	if now.Before(l.renewAt) {
		return nil
	}
	held, err := l.claim(ctx, false)
	switch now = l.now(); {
	case err == nil && !held:
		l.until = time.Time{}
		return errLeaseLost
	case !now.Before(l.until):
		return errLeaseLost
	case err != nil: // it is good for a while yet
		l.renewAt = now.Add(l.ttl / 20)
	}
	return nil
}

// check asks the store whether the lease is still this node's.
func (l *lease) check(ctx context.Context) error {
	if l.alone {
		return nil
	}
	b, _, err := l.bucket.GetSmall(ctx, l.key, leaseBytesMax)
	var doc leaseDoc
	if notFound(err) || err == nil && (json.Unmarshal(b, &doc) != nil || doc.Holder != l.holder) {
		l.until = time.Time{}
		return errLeaseLost
	}
	return err
}

// claim writes the lease if this node holds it or, with over, if nobody does.
func (l *lease) claim(ctx context.Context, over bool) (held bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	if l.alone {
		return true, l.write(ctx, l.holder, s3.PutOptions{})
	}
	if l.etag != "" {
		err := l.write(ctx, l.holder, s3.PutOptions{IfMatch: l.etag})
		if !overtaken(err) {
			return err == nil, err
		}
		// Or an earlier write was carried out and its answer lost.
	}
	b, o, err := l.bucket.GetSmall(ctx, l.key, leaseBytesMax)
	var doc leaseDoc
	switch {
	case notFound(err) && !over:
		return false, nil
	case notFound(err):
		return l.claimed(l.write(ctx, l.holder, s3.PutOptions{IfNoneMatch: true}))
	case err != nil:
		return false, err
	}
	if err = json.Unmarshal(b, &doc); err == nil && doc.Version != leaseVersion {
		err = fmt.Errorf("its version is %d, this node's is %d", doc.Version, leaseVersion)
	}
	if err != nil {
		return false, fmt.Errorf("%s is no lease that this node can read: %w (remove it, if no other program or version of Terrace needs it)", l.key, err)
	}
	l.sequence = max(l.sequence, doc.Sequence)
	switch {
	case doc.Holder == l.holder:
	case !over:
		return false, nil
	case doc.Holder == "":
	case o.ETag != l.other:
		l.other, l.otherSince = o.ETag, l.now()
		return false, nil
	case l.now().Sub(l.otherSince) < time.Duration(min(max(0, doc.TTLSeconds), leaseTTLMax))*time.Second:
		return false, nil
	}
	return l.claimed(l.write(ctx, l.holder, s3.PutOptions{IfMatch: o.ETag}))
}

func (l *lease) claimed(err error) (bool, error) {
	if overtaken(err) {
		return false, nil
	}
	return err == nil, err
}

// overtaken says that a conditional write failed for its condition.
func overtaken(err error) bool {
	return hasKind(err, s3.KindPrecondition) || hasKind(err, s3.KindConflict) || notFound(err)
}

// write writes the lease and looks at it: for its ETag, and for the store's
// clock.
func (l *lease) write(ctx context.Context, holder string, o s3.PutOptions) error {
	l.sequence++
	b, err := json.Marshal(leaseDoc{leaseVersion, holder, l.host, l.sequence, int64(l.ttl / time.Second)})
	if err != nil {
		return err
	}
	start := l.now()
	l.etag = ""
	o.ContentType = "application/json"
	if _, err := l.bucket.Put(ctx, l.key, s3.NewBody(b), o); err != nil {
		return err
	}
	back, obj, err := l.bucket.GetSmall(ctx, l.key, leaseBytesMax)
	if err != nil {
		return err
	}
	if string(back) != string(b) {
		return fmt.Errorf("%w: it was written and another one was read", errLeaseLost)
	}
	l.etag = obj.ETag
	l.until, l.renewAt = start.Add(l.ttl-l.ttl/10), start.Add(l.ttl/3)
	if !obj.Modified.IsZero() {
		l.skew = obj.Modified.Sub(start)
	}
	return nil
}

// release gives a lease back that is held, so that nobody waits for its end.
func (l *lease) release(ctx context.Context) {
	if l.etag != "" && l.now().Before(l.until) {
		o := s3.PutOptions{}
		if !l.alone {
			o.IfMatch = l.etag
		}
		_ = l.write(ctx, "", o) // or it ends by itself
	}
	l.etag, l.until = "", time.Time{}
}

// guardable proves that the store holds to the conditions that a lease needs,
// by an object of this run, which it removes again. A store that ignores or
// does not know them is no error.
func guardable(ctx context.Context, b bucket, key string) (bool, error) {
	defer func() { _, _ = b.DeleteMany(context.WithoutCancel(ctx), []string{key}) }()
	put := func(o s3.PutOptions) (s3.Object, error) {
		o.ContentType = "text/plain"
		return b.Put(ctx, key, s3.NewBody([]byte("Terrace was here: this object may be removed.\n")), o)
	}
	refused := func(o s3.PutOptions) (bool, error) {
		switch _, err := put(o); {
		case err == nil, hasKind(err, s3.KindUnsupported):
			return false, nil
		case overtaken(err):
			return true, nil
		default:
			return false, err
		}
	}
	if _, err := put(s3.PutOptions{IfNoneMatch: true}); hasKind(err, s3.KindUnsupported) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	for _, o := range []s3.PutOptions{{IfNoneMatch: true}, {IfMatch: `"00000000000000000000000000000000"`}} {
		if ok, err := refused(o); !ok || err != nil {
			return false, err
		}
	}
	_, o, err := b.GetSmall(ctx, key, leaseBytesMax)
	if err != nil {
		return false, err
	}
	_, err = put(s3.PutOptions{IfMatch: o.ETag})
	if overtaken(err) {
		return false, nil // its ETags are not what it compares
	}
	return err == nil, err
}

// keeperOptions are all required, but alone.
type keeperOptions struct {
	bucket    bucket
	presence  *presence
	layout    layout
	capacity  int64         // bytes of a namespace's blocks
	every     time.Duration // between the starts of passes
	alone     bool          // no other node looks after this bucket, so that no lease is needed
	perSecond float64       // listing requests
	holder    string        // this run's id
	log       *slog.Logger
	now       func() time.Time
}

// keeper keeps the namespaces of a bucket below a capacity, if it is this
// node's turn. A pass lists each namespace: to count it, by age of last use,
// and once more to remove the oldest if it is too large. So it holds no list of
// objects, however many there are. A block's last use is when it was stored or,
// if that is later, when this node used it: what other nodes use is not known.
//
// A namespace may be over its capacity by what is stored within every and the
// time of two listings.
//
// It has one goroutine, from start to close, which waits for it.
type keeper struct {
	o     keeperOptions
	lease lease
	stop  context.CancelFunc
	loops sync.WaitGroup
	gone  atomic.Int64

	mu struct {
		sync.Mutex
		used int64 // bytes of blocks in all namespaces, as this node last counted
		err  string
	}
}

func newKeeper(o keeperOptions) *keeper {
	k := &keeper{o: o}
	host, _ := os.Hostname() // for people only
	k.lease = lease{bucket: o.bucket, key: o.layout.at(nameLease), holder: o.holder, host: host,
		ttl: 2*o.every + 3*time.Minute, alone: o.alone, now: o.now}
	return k
}

// start begins the passes, the first one within 1.1 of every.
func (k *keeper) start() {
	ctx, stop := context.WithCancel(context.Background())
	k.stop = stop
	k.loops.Go(func() { k.loop(ctx) })
}

// close ends a pass that is under way, waits for it and gives the lease back,
// which ctx bounds.
func (k *keeper) close(ctx context.Context) {
	k.stop()
	k.loops.Wait()
	k.lease.release(ctx)
}

// evicted is how many blocks this node removed for room since the start.
func (k *keeper) evicted() int64 { return k.gone.Load() }

// state tells how many bytes the last pass counted, 0 if this node made none,
// and why the last one failed.
func (k *keeper) state() (used int64, err string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.mu.used, k.mu.err
}

func (k *keeper) loop(ctx context.Context) {
	// Nodes that start together come one after the other.
	for wait := k.o.every/10 + rand.N(k.o.every); pause(ctx, wait); {
		start := k.o.now()
		err := k.turn(ctx)
		if ctx.Err() != nil {
			return
		}
		text := ""
		if err != nil {
			text = err.Error()
			k.o.log.Warn("the bucket's capacity was not seen to; trying again", "err", err, "retry_after", k.o.every)
		}
		k.mu.Lock()
		k.mu.err = text
		k.mu.Unlock()
		wait = max(k.o.every-k.o.now().Sub(start), k.o.every/10)
	}
}

// turn makes a pass if this node has, or gets, the lease.
func (k *keeper) turn(ctx context.Context) error {
	if held, err := k.lease.take(ctx); !held || err != nil {
		return err
	}
	found, err := k.namespaces(ctx)
	if err != nil {
		return fmt.Errorf("list the namespaces: %w", err)
	}
	var used int64
	for _, fp := range found {
		n, err := k.namespace(ctx, fp)
		if err != nil {
			return fmt.Errorf("namespace %s: %w", fp, err)
		}
		used += n
	}
	k.mu.Lock()
	k.mu.used = used
	k.mu.Unlock()
	if err := k.sweep(ctx); err != nil {
		return fmt.Errorf("remove what is left over: %w", err)
	}
	return nil
}

// do makes a request while the lease is held, and repeats it a few times.
func (k *keeper) do(ctx context.Context, request func(ctx context.Context) error) error {
	var again retries
	for attempt := 1; ; attempt++ {
		if err := k.lease.keep(ctx); err != nil {
			return err
		}
		rctx, cancel := context.WithTimeout(ctx, min(listTimeout, k.lease.until.Sub(k.o.now())))
		err := request(rctx)
		cancel()
		if err == nil || attempt == attemptsMax || errors.Is(err, errLeaseLost) || !pause(ctx, again.next()) {
			return err
		}
	}
}

// list reads a listing page by page, and works on each one.
func (k *keeper) list(ctx context.Context, o s3.ListOptions, work func(page s3.Page, then mark) (more bool, err error)) error {
	for all := (pages{list: k.o.bucket, o: o}); !all.over; {
		var page s3.Page
		var then mark
		err := k.do(ctx, func(ctx context.Context) (err error) {
			then = k.o.presence.mark()
			page, err = all.next(ctx)
			return err
		})
		if err != nil {
			return err
		}
		if more, err := work(page, then); !more || err != nil {
			return err
		}
		if !all.over && !pause(ctx, every(k.o.perSecond)) {
			return ctx.Err()
		}
	}
	return nil
}

// namespaces finds all that the bucket has under the prefix, also those that no
// engine of this node uses.
func (k *keeper) namespaces(ctx context.Context) (found []block.Fingerprint, err error) {
	err = k.list(ctx, s3.ListOptions{Prefix: k.o.layout.prefix, Delimiter: "/"}, func(page s3.Page, _ mark) (bool, error) {
		for _, dir := range page.Prefixes {
			name := strings.TrimSuffix(strings.TrimPrefix(dir, k.o.layout.prefix), "/")
			var fp block.Fingerprint
			if n, err := hex.Decode(fp[:], []byte(name)); err != nil || n != len(fp) || name != fp.String() {
				continue
			}
			if len(found) == namespacesInPass {
				k.o.log.Warn("the bucket has more namespaces than are looked after", "namespaces_max", namespacesInPass)
				return false, nil
			}
			found = append(found, fp)
		}
		return true, nil
	})
	slices.SortFunc(found, func(a, b block.Fingerprint) int { return strings.Compare(string(a[:]), string(b[:])) })
	return slices.Compact(found), err
}

// aged is a block in a page, and how long ago it was last used.
type aged struct {
	key    block.Key
	object string
	bytes  int64
	age    time.Duration
}

// aging tells ages as of one moment, so that two listings agree.
type aging struct {
	k     *keeper
	fp    block.Fingerprint
	here  time.Time // that moment, by this node's clock
	store time.Time // and by the store's
	ago   []time.Duration
	keys  []block.Key
	out   []aged
}

// blocks are the blocks of a page, without what is foreign. The slice is good
// until the next call.
func (a *aging) blocks(page s3.Page) []aged {
	a.keys, a.out = a.keys[:0], a.out[:0]
	for _, o := range page.Objects {
		if key, ok := a.k.o.layout.parse(a.fp, o.Key); ok {
			a.keys = append(a.keys, key)
			age := a.store.Sub(o.Modified)
			if o.Modified.IsZero() {
				age = 0 // the store does not say; it stays
			}
			a.out = append(a.out, aged{key, o.Key, o.Size, age})
		}
	}
	a.ago = slices.Grow(a.ago[:0], len(a.keys))[:len(a.keys)]
	a.k.o.presence.lastUse(a.fp, a.keys, a.ago)
	since := a.k.o.now().Sub(a.here)
	for i, ago := range a.ago {
		if ago >= 0 {
			a.out[i].age = min(a.out[i].age, ago-since)
		}
	}
	return a.out
}

// bucketOf is the place of an age in a histogram, or -1 if it is too young to
// be evicted.
func bucketOf(age time.Duration) int {
	if age < evictAgeMin {
		return -1
	}
	return min(int(math.Log(float64(age)/float64(evictAgeMin))/math.Log(ageStep)), ageBuckets-1)
}

// namespace counts one and, if it is too large, removes its oldest blocks. It
// returns what is left, in bytes.
func (k *keeper) namespace(ctx context.Context, fp block.Fingerprint) (used int64, err error) {
	now := k.o.now()
	ages := &aging{k: k, fp: fp, here: now, store: now.Add(k.lease.skew)}
	blocks := s3.ListOptions{Prefix: k.o.layout.dir(fp)}
	var byAge [ageBuckets]int64 // bytes
	err = k.list(ctx, blocks, func(page s3.Page, then mark) (bool, error) {
		for _, b := range ages.blocks(page) {
			used += b.bytes
			if i := bucketOf(b.age); i >= 0 {
				byAge[i] += b.bytes
			}
		}
		k.refresh(fp, page, then)
		return true, nil
	})
	need := used - k.o.capacity/100*keepPercent
	if err != nil || used <= k.o.capacity {
		return used, err
	}
	// All buckets above cut go, and atCut bytes of that one.
	cut, atCut, older := -1, int64(0), int64(0)
	for i := ageBuckets - 1; i >= 0; i-- {
		if older+byAge[i] >= need {
			cut, atCut = i, need-older
			break
		}
		older += byAge[i]
	}
	var freed, count int64
	err = k.list(ctx, blocks, func(page s3.Page, _ mark) (bool, error) {
		victims := ages.blocks(page)[:0]
		for _, b := range ages.out {
			i := bucketOf(b.age)
			if i < 0 || i < cut || i == cut && atCut <= 0 {
				continue
			}
			if i == cut {
				atCut -= b.bytes
			}
			victims = append(victims, b)
		}
		n, bytes, err := k.evict(ctx, fp, victims)
		count, freed = count+n, freed+bytes
		return freed < need, err
	})
	if count > 0 || err != nil {
		k.o.log.Info("evicted the oldest blocks of a namespace", "namespace", fp, "blocks", count, "bytes", freed,
			"used_bytes", used-freed, "capacity_bytes", k.o.capacity)
	}
	return used - freed, err
}

// refresh tells the presence what a page shows, of groups whose blocks' length
// this node knows.
func (k *keeper) refresh(fp block.Fingerprint, page s3.Page, then mark) {
	found, _, _ := k.o.layout.blocks(fp, page, func(key block.Key) int64 { return k.o.presence.blockBytes(fp, key.Group()) })
	k.o.presence.listed(fp, found, then)
}

// evict removes blocks of one page. What the store keeps stays, without an
// error unless it keeps all.
func (k *keeper) evict(ctx context.Context, fp block.Fingerprint, victims []aged) (count, bytes int64, err error) {
	if len(victims) == 0 {
		return 0, 0, nil
	}
	objects := make([]string, len(victims))
	for i, b := range victims {
		objects[i] = b.object
	}
	then := k.o.presence.mark()
	failed, err := k.remove(ctx, objects)
	kept := map[string]struct{}{}
	for _, object := range failed {
		kept[object] = struct{}{}
	}
	gone := make([]block.Key, 0, len(victims))
	for _, b := range victims {
		if _, ok := kept[b.object]; ok {
			k.o.presence.drop(fp, b.key) // or so it says
			continue
		}
		gone = append(gone, b.key)
		bytes += b.bytes
	}
	k.o.presence.removed(fp, gone, then)
	k.gone.Add(int64(len(gone)))
	if len(gone) > 0 {
		err = nil
	}
	return int64(len(gone)), bytes, err
}

// remove removes objects, up to as many as fit into one request, if the lease
// is this node's.
func (k *keeper) remove(ctx context.Context, objects []string) (failed []string, err error) {
	failed = objects
	err = k.do(ctx, func(ctx context.Context) error {
		if err := k.lease.check(ctx); err != nil {
			return err
		}
		var err error
		failed, err = k.o.bucket.DeleteMany(ctx, failed)
		return err
	})
	return failed, err
}

// sweep removes what starts that ended badly left behind, and the oldest copies
// that were set aside.
func (k *keeper) sweep(ctx context.Context) error {
	probes := k.o.layout.at(dirProbe) + "/"
	err := k.list(ctx, s3.ListOptions{Prefix: probes}, func(page s3.Page, _ mark) (bool, error) {
		before := k.o.now().Add(k.lease.skew - probeAgeMax)
		var old []string
		for _, o := range page.Objects {
			if isHex(strings.TrimPrefix(o.Key, probes), 32) && !o.Modified.IsZero() && o.Modified.Before(before) {
				old = append(old, o.Key)
			}
		}
		return true, k.removeAll(ctx, old)
	})
	if err != nil {
		return err
	}
	var kept []s3.Object // the newest, the oldest of them first
	aside := k.o.layout.at(dirQuarantine) + "/"
	return k.list(ctx, s3.ListOptions{Prefix: aside}, func(page s3.Page, _ mark) (bool, error) {
		var old []string
		for _, o := range page.Objects {
			fp, key, ok := strings.Cut(strings.TrimPrefix(o.Key, aside), "/")
			if !ok || len(fp) != 2*len(block.Fingerprint{}) || !isHex(fp, len(fp)) || !isHex(key, 2*block.KeySize) {
				continue
			}
			i, _ := slices.BinarySearchFunc(kept, o, func(a, b s3.Object) int { return a.Modified.Compare(b.Modified) })
			kept = slices.Insert(kept, i, o)
			if len(kept) > quarantineMax {
				old = append(old, kept[0].Key)
				kept = kept[1:]
			}
		}
		return true, k.removeAll(ctx, old)
	})
}

func (k *keeper) removeAll(ctx context.Context, objects []string) error {
	if len(objects) == 0 {
		return nil
	}
	failed, err := k.remove(ctx, objects)
	if len(failed) < len(objects) {
		err = nil
	}
	return err
}

// isHex says whether s begins with n lower-case hex digits.
func isHex(s string, n int) bool {
	return len(s) >= n && strings.Trim(s[:n], "0123456789abcdef") == ""
}
