package object

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/terrace-kv/terrace"
	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/content"
	"github.com/terrace-kv/terrace/internal/fault"
	"github.com/terrace-kv/terrace/test/object/s3server"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/objtier"
	"github.com/terrace-kv/terrace/tier/tiertest"
)

// The suite that every tier passes, on each server. One bucket serves all of
// it, under a prefix for each of its stores.
func TestConformance(t *testing.T) {
	for name, open := range map[string]func(t *testing.T) *store{
		"versitygw":       func(t *testing.T) *store { return versity(t, false) },
		"versitygw-https": func(t *testing.T) *store { return versity(t, true) },
		"gofakes3":        func(t *testing.T) *store { return fake(t, nil) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := open(t)
			tiertest.Run(t, tiertest.Factory{Durable: true, Open: func(tb testing.TB, dir string) tier.Tier {
				tr, err := s.open(tb.Context(), func(o *objtier.Options) { o.Prefix = fmt.Sprintf("p/%.6x", sha256.Sum256([]byte(dir))) })
				if err != nil {
					tb.Fatal(err)
				}
				return tr
			}})
		})
	}
}

// Blocks written through a node are where the documents say, come back after
// the primary has forgotten them, and are Misses when somebody removes them.
func TestBlocksAndAnotherClient(t *testing.T) {
	const size, each = 1 << 20, 20
	prompts := sized(6, 50) // of 20 blocks
	s := versity(t, false)
	open := func() (*node, *objtier.Tier) {
		tr := s.tier(func(o *objtier.Options) { o.Prefix = "team/a" })
		return start(t, s, size, 64<<20, terrace.Tier{Tier: tr}), tr
	}
	n, tr := open()
	begin := time.Now()
	want := map[string]int64{}
	for p := range prompts {
		ks := keys(fmt.Sprint(p), each)
		if st, err := n.put(t.Context(), ks, true); err != nil || st.Stored != each {
			t.Fatalf("%+v, %v", st, err)
		}
		for _, k := range ks {
			want[object("team/a/", n.ns, k)] = headBytes + size
		}
	}
	stored := time.Since(begin)
	all := func(n *node, but func(p int) int) {
		t.Helper()
		n.forget()
		for p := range prompts {
			if hits, err := n.get(t.Context(), keys(fmt.Sprint(p), each), waitMax); err != nil || hits != but(p) {
				t.Errorf("prompt %d: %d hits, want %d: %v", p, hits, but(p), err)
			}
		}
	}
	whole := func(int) int { return each }
	begin = time.Now()
	all(n, whole)
	t.Logf("%d blocks of 1 MiB were stored in %v and loaded in %v (%d in flight at most)", len(want), stored, time.Since(begin), objtier.WorkersDefault)
	// A start costs a few requests, a block one each way.
	if c, blocks := tr.Requests(), int64(len(want)); c.Put > blocks+5 || c.Get > blocks+5 || c.Head+c.Delete+c.List+c.Other > 20 {
		t.Errorf("%d blocks stored and loaded took %+v", blocks, c)
	}

	// Another client sees keys and sizes, and nothing else but the description.
	has := s.list()
	description := fmt.Sprintf("team/a/%s/namespace.json", n.ns.Fingerprint())
	if has[description] != int64(len(n.ns.JSON())) {
		t.Errorf("%s has %d bytes, want %d", description, has[description], len(n.ns.JSON()))
	}
	delete(has, description)
	for k := range has {
		if strings.Contains(k, "/b/") {
			continue
		}
		t.Logf("beside blocks there is %s", k)
		delete(has, k)
	}
	if !maps.Equal(has, want) {
		t.Errorf("%d objects, want %d: %v", len(has), len(want), has)
	}
	key := keys("0", each)[0]
	if b := s.read(object("team/a/", n.ns, key)); len(b) != headBytes+size || content.Check(n.ns.Fingerprint(), key, b[headBytes:]) != -1 {
		t.Errorf("an object of %d bytes is not header and block", len(b))
	}

	// What is removed there is a Miss: those blocks and no others.
	gone := func(p int) int {
		if p%3 == 0 {
			return p % each
		}
		return each
	}
	for p := range prompts {
		if i := gone(p); i < each {
			if err := s.minio.RemoveObject(t.Context(), bucket, object("team/a/", n.ns, keys(fmt.Sprint(p), each)[i]), minio.RemoveObjectOptions{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	all(n, gone)
	st := n.idle()
	if f := of(&st, "object"); f.Corrupt != 0 || f.SetAside != 0 || f.ReadHealth != "closed" {
		t.Errorf("removed objects are faults: %+v", f)
	}
	// They are stored again, and a node that starts finds all.
	if st, err := n.put(t.Context(), keys("0", each), true); err != nil || st.Stored == 0 {
		t.Errorf("%+v, %v", st, err)
	}
	n.close()
	n, _ = open()
	all(n, func(p int) int {
		if p == 0 {
			return each
		}
		return gone(p)
	})
}

// What cannot work is one message at the start, which says what is wrong and
// what to do, and has no secret in it.
func TestRefusals(t *testing.T) {
	s, tls := versity(t, false), versity(t, true)
	free, err := s3server.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	behind := fake(t, nil)
	for _, c := range []struct {
		name  string
		store *store
		rules string // of a proxy before it
		mod   func(o *objtier.Options)
		want  []string
	}{
		{"a wrong secret", s, "", func(o *objtier.Options) { o.S3.SecretKey = "secret-wrong-one" }, []string{"credentials", "secret_key"}},
		{"an unknown access key", s, "", func(o *objtier.Options) { o.S3.AccessKey = "nobody" }, []string{"credentials", "access_key"}},
		{"a bucket that is not there", s, "", func(o *objtier.Options) { o.S3.Bucket = "elsewhere" }, []string{"bucket", "elsewhere"}},
		{"a wrong region", s, "", func(o *objtier.Options) { o.S3.Region = "eu-west-9" }, []string{"region", "eu-west-9"}},
		{"a port where nobody listens", s, "", func(o *objtier.Options) { o.S3.Endpoint = free }, []string{"endpoint", free}},
		{"no such host", s, "", func(o *objtier.Options) { o.S3.Endpoint = "nowhere.invalid:9000" }, []string{"endpoint", "nowhere.invalid"}},
		{"a certificate of an unknown authority", tls, "", func(o *objtier.Options) { o.S3.CABundle = "" }, []string{"TLS", "ca_bundle"}},
		{"https to a server of http", s, "", func(o *objtier.Options) { o.S3.Scheme = "https" }, []string{"scheme"}},
		{"http to a server of https", tls, "", func(o *objtier.Options) { o.S3.Scheme = "http" }, []string{"scheme"}},
		{"a clock that is an hour late", behind, "status(403, RequestTimeTooSkewed)", nil, []string{"clock"}},
		{"nobody may list", behind, `status(403) when key("*list-type*")`, nil, []string{"permission", "s3:ListBucket"}},
		{"nobody may write", behind, "status(403) when op(put)", nil, []string{"permission", "write", "s3:PutObject"}},
		{"nobody may read", behind, `status(403) when and(op(get), key("*/probe/*"))`, nil, []string{"permission", "read", "s3:GetObject"}},
		{"nobody may remove", behind, "status(403) when op(delete)", nil, []string{"permission", "remove", "s3:DeleteObject"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			at := *c.store
			at.t = t
			if c.rules != "" {
				at.proxy(c.rules)
			}
			ctx, cancel := context.WithTimeout(t.Context(), waitMax)
			defer cancel()
			begin := time.Now()
			tr, err := at.open(ctx, c.mod)
			if err == nil {
				closeAtEnd(t, tr)
				t.Fatal("it opens")
			}
			text := err.Error()
			t.Logf("after %v: %s", time.Since(begin).Round(time.Millisecond), text)
			if strings.Contains(text, "\n") || len(text) > 700 {
				t.Error("that is no single message")
			}
			for _, want := range c.want {
				if !strings.Contains(text, want) {
					t.Errorf("it does not say %q", want)
				}
			}
			for _, secret := range []string{"secret-wrong-one", c.store.o.SecretKey} {
				if strings.Contains(text, secret) {
					t.Error("it has the secret in it")
				}
			}
		})
	}
}

// Without keys in the settings those of the environment are used; nobody tells
// them.
func TestKeysOfTheEnvironment(t *testing.T) {
	s := versity(t, false)
	t.Setenv("AWS_ACCESS_KEY_ID", s.o.AccessKey)
	t.Setenv("AWS_SECRET_ACCESS_KEY", s.o.SecretKey)
	s.o.AccessKey, s.o.SecretKey = "", ""
	tr := s.tier(nil)
	closeAtEnd(t, tr)
	write(t, tr, namespace(t, 4096), keys("a", 3))
	if log := s.log.String(); !strings.Contains(log, "environment") {
		t.Error("the log does not say where the credentials are from")
	}
	s.silent("the status", fmt.Sprintf("%+v %+v", tr.Stats(), tr.Info()))
}

// items makes items of keys, with content.
func items(t testing.TB, ns *block.Namespace, ks []block.Key) []tier.Item {
	out := make([]tier.Item, len(ks))
	for i, k := range ks {
		out[i] = tier.Item{Key: k, Buf: tiertest.Buffer(t, ns.BlockBytes(0))}
		tiertest.Fill(ns, &out[i])
	}
	return out
}

// write stores blocks and fails the test if one is not stored.
func write(t *testing.T, tr tier.Tier, ns *block.Namespace, ks []block.Key) {
	t.Helper()
	its := items(t, ns, ks)
	tr.Write(t.Context(), ns, its)
	for i := range its {
		if its[i].Err != nil {
			t.Fatalf("write of block %d: %v", i, its[i].Err)
		}
	}
}

// A throttled upload is sent again from its beginning, and what is stored is
// what was to be.
func TestThrottledUploadIsSentWhole(t *testing.T) {
	s := fake(t, nil)
	set := s.proxy(`status(503, SlowDown) when times(2, and(op(put), key("*/b/*")))`)
	n := start(t, s, 100<<10, 16<<20, terrace.Tier{Tier: s.tier(nil)})
	ks := keys("a", 1)
	if _, err := n.put(t.Context(), ks, true); err != nil {
		t.Fatal(err)
	}
	if set.Injected() != 2 {
		t.Errorf("%d faults", set.Injected())
	}
	if b := s.read(object("", n.ns, ks[0])); len(b) != headBytes+100<<10 || content.Check(n.ns.Fingerprint(), ks[0], b[headBytes:]) != -1 {
		t.Errorf("stored are %d bytes that are not header and block", len(b))
	}
	st := n.idle()
	if f := of(&st, "object"); f.WrittenBlocks != 1 {
		t.Errorf("%+v", f)
	}
}

// What may pass is tried again, what will not pass is not, and what is wrong
// with everything opens the breaker at once.
func TestErrorClasses(t *testing.T) {
	for _, c := range []struct {
		name, rules, cause string
		attempts           int64 // of the one upload
		stored             bool
		health             string
	}{
		{"500", `status(500) when once(and(op(put), key("*/b/*")))`, "", 2, true, "closed"},
		{"a reset", `disconnect when once(and(op(put), key("*/b/*")))`, "", 2, true, "closed"},
		{"a lost answer", `late(ECONNRESET) when once(and(op(put), key("*/b/*")))`, "", 2, true, "closed"},
		{"429 for ever", `status(429) when and(op(put), key("*/b/*"))`, "throttled", 3, false, "closed"},
		{"403", `status(403) when and(op(put), key("*/b/*"))`, "permission", 1, false, "open"},
		{"no bucket", `status(404, NoSuchBucket) when and(op(put), key("*/b/*"))`, "config", 1, false, "open"},
		{"a success with an error inside", `status(200, InternalError) when once(and(op(put), key("*/b/*")))`, "", 2, true, "closed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := fake(t, nil)
			set := s.proxy(c.rules)
			n := start(t, s, 4096, 4<<20, terrace.Tier{Tier: s.tier(nil)})
			ks := keys("a", 1)
			_, err := n.put(t.Context(), ks, true)
			if (err == nil) != c.stored {
				t.Errorf("flush: %v", err)
			}
			_, there := s.list()[object("", n.ns, ks[0])]
			if there != c.stored {
				t.Errorf("stored: %v", there)
			}
			attempts := set.Injected()
			if c.stored {
				attempts++
			}
			if attempts != c.attempts {
				t.Errorf("%d attempts, want %d", attempts, c.attempts)
			}
			st := n.idle()
			f := of(&st, "object")
			if f.WriteHealth != c.health || c.cause != "" && f.Failures[c.cause] != 1 {
				t.Errorf("want %s and a failure by %q: %+v", c.health, c.cause, f)
			}
			t.Logf("last error: %s", f.LastError)
		})
	}
}

// guard is memory that takes the process with it when somebody reads or writes
// what is not theirs any more.
func guard(t *testing.T, its []tier.Item, on bool) {
	t.Helper()
	for i := range its {
		if err := protect(its[i].Buf, on); err != nil {
			t.Fatal(err)
		}
	}
}

// A transport that reads a body on after the call was cancelled cannot reach
// the slot: it is taken away first, and the call ends on time.
func TestSlotIsQuietWhenTheTransportReadsOn(t *testing.T) {
	s := fake(t, nil)
	set := fault.MustParse(`linger when and(op(put), key("*/b/*"))`)
	under := &http.Transport{}
	rt := fault.HTTP(under, set)
	t.Cleanup(func() {
		set.Release()
		rt.Wait()
		under.CloseIdleConnections()
	})
	tr := s.tier(func(o *objtier.Options) { o.S3.RoundTripper = rt })
	closeAtEnd(t, tr)
	ns := namespace(t, 1<<20)
	its := items(t, ns, keys("a", 4))
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	begin := time.Now()
	var wg sync.WaitGroup
	for i := range its {
		wg.Go(func() { tr.Write(ctx, ns, its[i:i+1]) })
	}
	wg.Wait()
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("the calls took %v", took)
	}
	guard(t, its, true) // whoever touches the slots now ends the process
	for i := range its {
		if tier.ClassOf(its[i].Err) != tier.ClassCancelled {
			t.Errorf("%v", its[i].Err)
		}
	}
	if set.Injected() != 4 {
		t.Errorf("%d bodies linger", set.Injected())
	}
	time.Sleep(100 * time.Millisecond) // in which they are read on
	guard(t, its, false)
}

// A body that stalls is a failed key when its time is over, and the slot is
// quiet then.
func TestBodyThatStalls(t *testing.T) {
	s := fake(t, nil)
	s.proxy(`stall(300000) when and(op(get), key("*/b/*"))`)
	tr := s.tier(nil)
	closeAtEnd(t, tr)
	ns, ks := namespace(t, 1<<20), keys("a", 2)
	write(t, tr, ns, ks)
	its := items(t, ns, ks)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	begin := time.Now()
	tr.Read(ctx, ns, its)
	took := time.Since(begin)
	guard(t, its, true)
	for i := range its {
		if tier.ClassOf(its[i].Err) != tier.ClassCancelled || took > 5*time.Second {
			t.Errorf("%v after %v", its[i].Err, took)
		}
	}
	guard(t, its, false)
}

// Whatever is wrong with an answer, it is a failed key: never data.
func TestWrongAnswers(t *testing.T) {
	const block = `once(and(op(get), key("*/b/*")))`
	for _, rules := range []string{
		"torn(1000) when " + block,
		"torn(0) when " + block,
		"length(5000) when " + block,
		"length(300) when " + block,
		"length(999999) when " + block,
		"status(200, SlowDown) when " + block,
		"status(206) when " + block,
		"status(500) when " + block,
		"disconnect when " + block,
		"late(ECONNRESET) when " + block,
	} {
		s := fake(t, nil)
		tr := s.tier(nil)
		ns, ks := namespace(t, 8192), keys("a", 1)
		write(t, tr, ns, ks)
		if err := tr.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		set := s.proxy(rules)
		tr = s.tier(nil)
		its := items(t, ns, ks)
		tr.Read(t.Context(), ns, its)
		// HTTP repeats a GET by itself when a connection that was used before
		// breaks without an answer.
		repeats := strings.HasPrefix(rules, "torn(0)") || strings.HasPrefix(rules, "disconnect") || strings.HasPrefix(rules, "late")
		if err := its[0].Err; err == nil && !repeats || errors.Is(err, tier.ErrNotFound) || set.Injected() != 1 {
			t.Errorf("%s: %v with %d faults", rules, err, set.Injected())
		} else if err != nil {
			t.Logf("%s: %s, %s: %v", rules, tier.ClassOf(err), tier.CauseOf(err), err)
		}
		set.Toggle(false)
		if tr.Read(t.Context(), ns, its); its[0].Err != nil || tiertest.Check(ns, &its[0]) != nil {
			t.Errorf("%s: the block is lost by one bad answer: %v", rules, its[0].Err)
		}
		if _, there := s.list()[object("", ns, ks[0])]; !there {
			t.Errorf("%s: the object is gone", rules)
		}
		if err := tr.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
}
