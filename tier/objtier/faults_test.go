package objtier

import (
	"bytes"
	"context"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/internal/s3/s3test"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/tiertest"
)

func openTest(t *testing.T, o Options) *Tier {
	t.Helper()
	tr, err := Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tr.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return tr
}

func items(t *testing.T, first, n int) []tier.Item {
	t.Helper()
	ns := tiertest.Namespace(t, "m")
	out := make([]tier.Item, n)
	for i := range out {
		out[i] = tier.Item{Key: tiertest.Key(first+i, 3), Buf: tiertest.Buffer(t, ns.BlockBytes(3))}
		tiertest.Fill(ns, &out[i])
	}
	return out
}

// Each way in which a store can fail a request for a block has its class and
// cause; what comes back is right or nothing; and once the store is well again
// the block is there, or can be stored.
func TestFaultTable(t *testing.T) {
	type outcome struct {
		class tier.Class
		cause tier.Cause
		down  bool
	}
	done := outcome{}
	retry := func(c tier.Cause) outcome { return outcome{tier.ClassRetryable, c, false} }
	down := func(c tier.Cause) outcome { return outcome{tier.ClassPermanent, c, true} }
	never := make(chan struct{})
	for _, tt := range []struct {
		name        string
		fault       s3test.Fault
		write, read outcome
	}{
		{"none", s3test.Fault{}, done, done},
		{"slow down", s3test.Fault{Status: 503, Code: "SlowDown"}, retry(tier.CauseThrottled), retry(tier.CauseThrottled)},
		{"too many", s3test.Fault{Status: 429}, retry(tier.CauseThrottled), retry(tier.CauseThrottled)},
		{"internal error", s3test.Fault{Status: 500, Code: "InternalError"}, retry(tier.CauseUnavailable), retry(tier.CauseUnavailable)},
		{"bad gateway", s3test.Fault{Status: 502}, retry(tier.CauseUnavailable), retry(tier.CauseUnavailable)},
		{"reset", s3test.Fault{Reset: true}, retry(tier.CauseNetwork), retry(tier.CauseNetwork)},
		{"answer lost", s3test.Fault{Done: true, Reset: true}, retry(tier.CauseNetwork), retry(tier.CauseNetwork)},
		{"error in a 200", s3test.Fault{ErrorInside: true, Code: "InternalError"}, retry(tier.CauseUnavailable), retry(tier.CauseUnavailable)},
		{"short body", s3test.Fault{Truncate: true}, done, retry(tier.CauseShort)},
		{"shorter than its length", s3test.Fault{Length: 7}, retry(tier.CauseShort), outcome{tier.ClassCorrupt, tier.CauseShort, false}},
		{"longer than its length", s3test.Fault{Length: -7}, done, outcome{tier.ClassCorrupt, tier.CauseShort, false}},
		{"stalled body", s3test.Fault{Stall: never}, done, outcome{class: tier.ClassCancelled, cause: tier.CauseTimeout}},
		{"no answer", s3test.Fault{Until: never}, outcome{class: tier.ClassCancelled, cause: tier.CauseTimeout}, outcome{class: tier.ClassCancelled, cause: tier.CauseTimeout}},
		{"denied", s3test.Fault{Status: 403, Code: "AccessDenied"}, down(tier.CausePermission), down(tier.CausePermission)},
		{"unknown key", s3test.Fault{Status: 403, Code: "InvalidAccessKeyId"}, down(tier.CauseCredentials), down(tier.CauseCredentials)},
		{"no bucket", s3test.Fault{Status: 404, Code: "NoSuchBucket"}, down(tier.CauseConfig), down(tier.CauseConfig)},
		{"other region", s3test.Fault{Status: 301, Code: "PermanentRedirect", Header: http.Header{"X-Amz-Bucket-Region": {"eu-west-9"}}}, down(tier.CauseConfig), down(tier.CauseConfig)},
		{"clock", s3test.Fault{Status: 403, Code: "RequestTimeTooSkewed"}, down(tier.CauseConfig), down(tier.CauseConfig)},
		{"digest", s3test.Fault{Status: 400, Code: "BadDigest"}, retry(tier.CauseChecksum), retry(tier.CauseChecksum)},
		{"conflict", s3test.Fault{Status: 409, Code: "ConditionalRequestConflict"}, retry(tier.CauseOther), retry(tier.CauseOther)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			server := s3test.New().MakeBucket("b")
			var on atomic.Bool // for one request
			server.Fault = func(r *http.Request) *s3test.Fault {
				if strings.Contains(r.URL.Path, "/"+dirBlocks+"/") && on.CompareAndSwap(true, false) {
					return &tt.fault
				}
				return nil
			}
			o := options(server, "")
			o.ListPerSecond = -1
			tr := openTest(t, o)
			ns := tiertest.Namespace(t, "m")
			check := func(what string, err error, want outcome) {
				t.Helper()
				var got outcome
				if err != nil {
					got = outcome{tier.ClassOf(err), tier.CauseOf(err), isDown(err)}
				}
				if got != want {
					t.Errorf("%s: %v: class %v, cause %v, down %v; want class %v, cause %v, down %v", what, err, got.class, got.cause, got.down, want.class, want.cause, want.down)
				}
			}
			call := func(do func(ctx context.Context)) {
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				if tt.fault.Until != nil || tt.fault.Stall != nil {
					cancel()
					ctx, cancel = context.WithTimeout(t.Context(), 30*time.Millisecond)
				}
				defer cancel()
				do(ctx)
			}
			it := items(t, 1, 1)
			if err := tr.storeNamespace(t.Context(), ns); err != nil {
				t.Fatal(err)
			}
			on.Store(true)
			call(func(ctx context.Context) { tr.Write(ctx, ns, it) })
			check("write", it[0].Err, tt.write)
			tiertest.Fill(ns, &it[0])
			if tr.Write(t.Context(), ns, it); it[0].Err != nil {
				t.Fatalf("write when the store is well: %v", it[0].Err)
			}
			on.Store(true)
			call(func(ctx context.Context) { tr.Read(ctx, ns, it) })
			check("read", it[0].Err, tt.read)
			if tr.Read(t.Context(), ns, it); tiertest.Check(ns, &it[0]) != nil {
				t.Errorf("read when the store is well: %v", tiertest.Check(ns, &it[0]))
			}
			if tr.throttle.mu.running != 0 || tr.setAside.Load() != 0 {
				t.Errorf("%d places taken, %d right copies set aside", tr.throttle.mu.running, tr.setAside.Load())
			}
		})
	}
}

func isDown(err error) bool {
	te, ok := err.(*tier.Error)
	return ok && te.Down
}

// A copy that is wrong in the bucket is moved out of the way, whatever is wrong
// with it; the key is a miss; and the block can be stored again.
func TestBrokenObjects(t *testing.T) {
	for name, breaking := range map[string]func(good []byte) []byte{
		"flipped block":  func(b []byte) []byte { b[headSize+1000] ^= 1; return b },
		"flipped header": func(b []byte) []byte { b[40] ^= 1; return b },
		"short":          func(b []byte) []byte { return b[:len(b)-1] },
		"long":           func(b []byte) []byte { return append(b, 0) },
		"empty":          func(b []byte) []byte { return b[:0:0] },
		"only a header":  func(b []byte) []byte { return b[:headSize] },
		"zeros":          func(b []byte) []byte { clear(b); return b },
	} {
		t.Run(name, func(t *testing.T) {
			server := s3test.New().MakeBucket("b")
			o := options(server, "p")
			o.ListPerSecond = -1
			tr := openTest(t, o)
			ns := tiertest.Namespace(t, "m")
			it := items(t, 1, 2)
			tr.Write(t.Context(), ns, it)
			object := tr.layout.block(ns.Fingerprint(), it[0].Key)
			good := server.Objects("b")[object].Data
			bad := breaking(bytes.Clone(good))
			server.Set("b", object, bad)
			tr.Read(t.Context(), ns, it)
			if it[1].Err != nil {
				t.Errorf("its neighbour: %v", it[1].Err)
			}
			err := it[0].Err
			if name == "flipped block" { // which transfer finds
				if err != nil || tiertest.Check(ns, &it[0]) == nil {
					t.Fatal("the tier has looked at the bytes, or not read them")
				}
				err = tr.SetAside(t.Context(), ns, it[0].Key, "test")
			} else if tier.ClassOf(err) != tier.ClassCorrupt {
				t.Errorf("read: %v, want it to be corrupt", err)
			} else {
				err = nil
			}
			if err != nil {
				t.Error(err)
			}
			kept := server.Objects("b")["p/quarantine/"+ns.Fingerprint().String()+"/"+it[0].Key.String()].Data
			if !bytes.Equal(kept, bad) {
				t.Errorf("%d bytes are kept, want the %d that were wrong", len(kept), len(bad))
			}
			if tr.Read(t.Context(), ns, it[:1]); tier.ClassOf(it[0].Err) != tier.ClassNotFound {
				t.Errorf("read again: %v", it[0].Err)
			}
			tiertest.Fill(ns, &it[0])
			tr.Write(t.Context(), ns, it[:1])
			if tr.Read(t.Context(), ns, it[:1]); tiertest.Check(ns, &it[0]) != nil {
				t.Errorf("stored again: %v", tiertest.Check(ns, &it[0]))
			}
			if s := tr.Stats(); s.SetAside != 1 {
				t.Errorf("%d set aside, want 1", s.SetAside)
			}
		})
	}
}

// A block that the network damaged is not moved in the bucket, where it is
// right.
func TestDamageOnTheWay(t *testing.T) {
	server := s3test.New().MakeBucket("b")
	var flip atomic.Int64
	server.Fault = func(r *http.Request) *s3test.Fault {
		if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/"+dirBlocks+"/") && flip.Add(-1) >= 0 {
			return &s3test.Fault{Flip: true}
		}
		return nil
	}
	o := options(server, "")
	o.ListPerSecond = -1
	tr := openTest(t, o)
	ns := tiertest.Namespace(t, "m")
	it := items(t, 1, 1)
	tr.Write(t.Context(), ns, it)
	flip.Store(1)
	if tr.Read(t.Context(), ns, it); tiertest.Check(ns, &it[0]) == nil {
		t.Fatal("nothing was damaged")
	}
	if err := tr.SetAside(t.Context(), ns, it[0].Key, "test"); err != nil {
		t.Error(err)
	}
	if tr.Read(t.Context(), ns, it); tiertest.Check(ns, &it[0]) != nil || tr.Stats().SetAside != 0 {
		t.Errorf("%v, %d set aside", tiertest.Check(ns, &it[0]), tr.Stats().SetAside)
	}
}

// A start that cannot work says in one message what is wrong and what to do.
func TestOpenErrors(t *testing.T) {
	for _, tt := range []struct {
		name  string
		fault func(r *http.Request) *s3test.Fault
		want  []string
	}{
		{"no permission to list", on("GET", s3test.Fault{Status: 403, Code: "AccessDenied"}), []string{"permission", "cannot list", "s3:ListBucket"}},
		{"no permission to write", on("PUT", s3test.Fault{Status: 403, Code: "AccessDenied"}), []string{"permission", "cannot write to", "s3:PutObject"}},
		{"no permission to remove", on("DELETE", s3test.Fault{Status: 403, Code: "AccessDenied"}), []string{"permission", "cannot remove from", "s3:DeleteObject"}},
		{"a wrong secret", on("GET", s3test.Fault{Status: 403, Code: "SignatureDoesNotMatch"}), []string{"credentials", "secret_key"}},
		{"no such bucket", on("GET", s3test.Fault{Status: 404, Code: "NoSuchBucket"}), []string{"bucket", "make the bucket"}},
		{"another region", on("GET", s3test.Fault{Status: 301, Code: "PermanentRedirect", Header: http.Header{"X-Amz-Bucket-Region": {"eu-west-9"}}}), []string{"region", "eu-west-9"}},
		{"nobody there", on("GET", s3test.Fault{Reset: true}), []string{"endpoint", "check endpoint"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			server := s3test.New().MakeBucket("b")
			server.Fault = tt.fault
			_, err := Open(t.Context(), options(server, "some/prefix"))
			if err == nil {
				t.Fatal("opened")
			}
			text := err.Error()
			for _, want := range append(tt.want, "object tier object", "http://store/b/some/prefix") {
				if !strings.Contains(text, want) {
					t.Errorf("%q does not say %q", text, want)
				}
			}
			if strings.Contains(text, "\n") || strings.Contains(text, "secret-of-the-test") {
				t.Errorf("%q has several lines, or a secret", text)
			}
			if n := len(server.Objects("b")); n > 1 || n == 1 && !strings.Contains(tt.name, "remove") {
				t.Errorf("%d objects are left behind", n)
			}
		})
	}
}

func on(method string, f s3test.Fault) func(*http.Request) *s3test.Fault {
	return func(r *http.Request) *s3test.Fault {
		if r.Method == method {
			return &f
		}
		return nil
	}
}

// A store that is busy for a moment does not keep the tier from opening.
func TestOpenInABusyStore(t *testing.T) {
	server := s3test.New().MakeBucket("b")
	var n atomic.Int64
	server.Fault = func(*http.Request) *s3test.Fault {
		if n.Add(1)%3 != 0 {
			return &s3test.Fault{Status: 503, Code: "SlowDown"}
		}
		return nil
	}
	if tr := openTest(t, options(server, "")); tr.checksum == "" || !tr.exclusive {
		t.Errorf("checksum %q, conditional writes %v", tr.checksum, tr.exclusive)
	}
}
