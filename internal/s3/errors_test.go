package s3

import (
	"bufio"
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/terrace-kv/terrace/internal/s3/s3test"
)

// handler answers in process. An answer's length is that of what was written,
// unless it says another.
type handler func(w http.ResponseWriter, r *http.Request)

func (h handler) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		defer r.Body.Close()
	}
	w := httptest.NewRecorder()
	h(w, r)
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	resp := w.Result()
	if resp.ContentLength < 0 {
		resp.ContentLength = int64(w.Body.Len())
	}
	return resp, nil
}

func says(status int, body string, header ...string) handler {
	return func(w http.ResponseWriter, r *http.Request) {
		for i := 0; i < len(header); i += 2 {
			w.Header().Set(header[i], header[i+1])
		}
		w.WriteHeader(status)
		if r.Method != http.MethodHead {
			_, _ = io.WriteString(w, body)
		}
	}
}

func document(code string, more string) string {
	return "<?xml version=\"1.0\"?><Error><Code>" + code + "</Code><Message>so it is</Message><RequestId>R7</RequestId>" + more + "</Error>"
}

func TestKinds(t *testing.T) {
	const put, get, head = "put", "get", "head"
	for _, x := range []struct {
		op     string
		answer handler
		want   Kind
		text   string // in the error
	}{
		{put, says(503, document("SlowDown", "")), KindThrottled, "PUT http://store.test:9000/blocks/k: status 503 SlowDown \"so it is\" request R7"},
		{put, says(503, "<html>busy</html>"), KindThrottled, `"<html>busy</html>"`},
		{put, says(429, ""), KindThrottled, "status 429"},
		{put, says(400, document("RequestLimitExceeded", "")), KindThrottled, ""},
		{put, says(500, document("InternalError", "")), KindServer, ""},
		{put, says(502, ""), KindServer, ""},
		{put, says(504, ""), KindServer, ""},
		{put, says(400, document("RequestTimeout", "")), KindNetwork, ""},
		{put, says(400, document("IncompleteBody", "")), KindNetwork, ""},
		{put, says(412, document("PreconditionFailed", "")), KindPrecondition, ""},
		{put, says(409, document("ConditionalRequestConflict", "")), KindConflict, ""},
		{put, says(403, document("AccessDenied", "")), KindPermission, ""},
		{put, says(403, document("InvalidAccessKeyId", "")), KindCredentials, ""},
		{put, says(403, document("SignatureDoesNotMatch", "")), KindCredentials, ""},
		{put, says(401, ""), KindCredentials, ""},
		{put, says(400, document("ExpiredToken", "")), KindExpired, ""},
		{put, says(403, document("RequestTimeTooSkewed", "")), KindClock, ""},
		{put, says(404, document("NoSuchBucket", "")), KindBucket, ""},
		{put, says(400, document("InvalidBucketName", "")), KindBucket, ""},
		{put, says(400, document("BadDigest", "")), KindDigest, ""},
		{put, says(400, document("InvalidArgument", "")), KindOther, "InvalidArgument"},
		{put, says(501, document("NotImplemented", "")), KindUnsupported, ""},
		{put, says(405, ""), KindUnsupported, ""},
		{put, says(200, document("InternalError", "")), KindServer, "status 200 InternalError"},
		{put, says(200, document("SlowDown", "")), KindThrottled, ""},
		{put, says(200, document("WhoKnows", "")), KindServer, ""},
		{put, says(204, ""), KindOther, "status 204"},
		{put, says(400, "Client sent an HTTP request to an HTTPS server.\n"), KindTLS, "HTTPS"},
		{put, says(301, document("PermanentRedirect", "<Endpoint>blocks.s3.eu-far-1.amazonaws.com</Endpoint>"), "X-Amz-Bucket-Region", "eu-far-1"), KindRegion,
			`the bucket is not in region eu-test-1; its region is eu-far-1; its endpoint is blocks.s3.eu-far-1.amazonaws.com`},
		{put, says(307, "", "Location", "http://other.test/blocks/k?X-Amz-Signature=00"), KindRegion, "its endpoint is other.test"},
		{put, says(308, "", "Location", "https://store.test/blocks/k"), KindTLS, "set the scheme"},
		{put, says(400, document("AuthorizationHeaderMalformed", "<Region>eu-far-1</Region>")), KindRegion, "its region is eu-far-1"},
		{put, says(400, document("AuthorizationHeaderMalformed", "<Region>eu-test-1</Region>")), KindCredentials, ""},

		{get, says(404, document("NoSuchKey", "")), KindNotFound, ""},
		{get, says(404, "<html>not here"), KindNotFound, ""},
		{get, says(404, document("NoSuchBucket", "")), KindBucket, ""},
		{get, says(404, document("NoSuchWhatever", "")), KindOther, ""}, // no Miss
		{put, says(404, "<html>not here"), KindBucket, ""},
		{put, says(404, document("NoSuchKey", "")), KindNotFound, ""}, // with IfMatch
		{get, says(206, "12345678"), KindOther, "status 206"},
		{get, says(200, "1234567"), KindLength, "the answer has 7 bytes, want 8"},
		{get, says(200, "123456789"), KindLength, "the answer has 9 bytes, want 8"},
		{get, says(200, "1234567", "Content-Length", "8"), KindLength, "ended after 7 bytes"},
		{get, says(200, "123456789", "Content-Length", "8"), KindLength, "more than its 8 bytes"},
		{get, says(200, document("SlowDown", ""), "Content-Type", "application/xml"), KindThrottled, "status 200 SlowDown"},
		{get, says(200, document("Oops", ""), "Content-Type", "application/xml"), KindServer, ""},
		{get, says(200, "<Some/>", "Content-Type", "application/xml"), KindLength, ""},

		{head, says(404, ""), KindNotFound, ""},
		{head, says(403, ""), KindPermission, ""},
		{head, says(400, ""), KindOther, "status 400"},
		{head, says(400, "", "X-Amz-Bucket-Region", "eu-far-1"), KindRegion, "its region is eu-far-1"},
		{head, says(301, "", "X-Amz-Bucket-Region", "eu-far-1"), KindRegion, "its region is eu-far-1"},
		{head, says(503, ""), KindThrottled, ""},
	} {
		c := open(t, options(x.answer))
		var err error
		switch x.op {
		case put:
			_, err = c.Put(context.Background(), "k", NewBody([]byte("12345678")), PutOptions{})
		case get:
			_, err = c.Get(context.Background(), "k", make([]byte, 5), make([]byte, 3))
		case head:
			_, err = c.Head(context.Background(), "k")
		}
		if err == nil || kind(err) != x.want || !strings.Contains(err.Error(), x.text) {
			t.Errorf("%s: %v is of kind %d, want %d and %q", x.op, err, kind(err), x.want, x.text)
		}
		if n := c.Requests(); n.Put+n.Get+n.Head != 1 {
			t.Errorf("%s: %+v, want one request", x.op, n)
		}
	}
}

// TestLengthOfWhat: one that ended early may be whole the next time, one that
// is of another length is another object. Callers tell them apart.
func TestLengthOfWhat(t *testing.T) {
	overBoth(t, func(t *testing.T, s *s3test.Server, c *Client) {
		s.Set(bucket, "k", content(300_000))
		get := func(n int) error { _, err := c.Get(context.Background(), "k", make([]byte, n)); return err }
		if err := get(299_999); kind(err) != KindLength || errors.Is(err, io.ErrUnexpectedEOF) {
			t.Error(err)
		}
		s.Fault = func(*http.Request) *s3test.Fault { return &s3test.Fault{Truncate: true} }
		if err := get(300_000); kind(err) != KindLength || !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Error(err)
		}
		s.Fault = func(*http.Request) *s3test.Fault { return &s3test.Fault{Length: 5} }
		if err := get(300_005); kind(err) != KindLength || !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Error(err)
		}
		s.Fault = nil
		if err := get(300_000); err != nil {
			t.Error(err)
		}
	})
}

func TestFaults(t *testing.T) {
	overBoth(t, func(t *testing.T, s *s3test.Server, c *Client) {
		var fault atomic.Pointer[s3test.Fault]
		s.Fault = func(*http.Request) *s3test.Fault { return fault.Load() }
		ctx := context.Background()
		put := func(ctx context.Context) error {
			_, err := c.Put(ctx, "k", NewBody([]byte("12345678")), PutOptions{})
			return err
		}
		get := func(ctx context.Context) error { _, err := c.Get(ctx, "k", make([]byte, 8)); return err }
		if err := put(ctx); err != nil {
			t.Fatal(err)
		}
		all := map[string]func() error{
			"put": func() error { return put(ctx) }, "get": func() error { return get(ctx) },
			"copy": func() error { return c.Copy(ctx, "k", "c") },
			"list": func() error { _, err := c.List(ctx, ListOptions{}); return err },
			"multi": func() error {
				failed, err := c.DeleteMany(ctx, []string{"x"})
				if err != nil && !slices.Equal(failed, []string{"x"}) {
					t.Errorf("failed %q", failed)
				}
				return err
			},
			"small": func() error { _, _, err := c.GetSmall(ctx, "k", 1000); return err },
		}
		for name, f := range all {
			fault.Store(&s3test.Fault{Reset: true})
			want(t, f(), KindNetwork)
			fault.Store(&s3test.Fault{ErrorInside: true, Code: "SlowDown"})
			e := want(t, f(), KindThrottled)
			if e.Status != 200 || e.Code != "SlowDown" {
				t.Errorf("%s: %v", name, e)
			}
			fault.Store(&s3test.Fault{Status: 503, Code: "SlowDown"})
			if want(t, f(), KindThrottled).RequestID != "R1" {
				t.Errorf("%s: no request id", name)
			}
			fault.Store(nil)
			if err := f(); err != nil {
				t.Fatalf("%s after its faults: %v", name, err)
			}
		}

		// What never answers, and what stops in its body, ends with the context.
		stall := make(chan struct{})
		for _, f := range []*s3test.Fault{{Until: stall}, {Stall: stall}} {
			fault.Store(f)
			timed, cancel := context.WithTimeout(ctx, 30*time.Millisecond)
			err := get(timed)
			cancel()
			want(t, err, KindCancelled)
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%v does not wrap the context's error", err)
			}
			gone, cancel := context.WithCancel(ctx)
			time.AfterFunc(10*time.Millisecond, cancel)
			err = get(gone)
			want(t, err, KindCancelled)
			if !errors.Is(err, context.Canceled) {
				t.Errorf("%v does not wrap the context's error", err)
			}
		}
		fault.Store(nil)
		close(stall)
		if err := get(ctx); err != nil {
			t.Fatal(err)
		}
	})
}

// TestErrorDocumentStalls: the status is enough.
func TestErrorDocumentStalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer()
		s.Fault = func(*http.Request) *s3test.Fault {
			return &s3test.Fault{Status: 503, Code: "SlowDown", Stall: make(chan struct{})}
		}
		c := open(t, options(s.RoundTripper()))
		start := time.Now()
		_, err := c.Put(context.Background(), "k", NewBody([]byte("x")), PutOptions{})
		want(t, err, KindThrottled)
		if took := time.Since(start); took != errorDocTimeout {
			t.Errorf("took %v, want %v", took, errorDocTimeout)
		}
	})
}

func TestHeaderTimeout(t *testing.T) {
	s := newServer()
	hang := make(chan struct{})
	s.Fault = func(*http.Request) *s3test.Fault { return &s3test.Fault{Until: hang} }
	srv := httptest.NewServer(s)
	defer srv.Close()
	defer close(hang)
	o := options(nil)
	o.Endpoint, o.HeaderTimeout = strings.TrimPrefix(srv.URL, "http://"), 20*time.Millisecond
	_, err := open(t, o).Put(context.Background(), "k", NewBody([]byte("x")), PutOptions{})
	want(t, err, KindNetwork)
}

func TestNothingThere(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	o := options(nil)
	o.Endpoint = l.Addr().String()
	want(t, open(t, o).Delete(context.Background(), "k"), KindNetwork)
	o.Endpoint = "no-such-host.invalid"
	want(t, open(t, o).Delete(context.Background(), "k"), KindNetwork)
}

func TestTLS(t *testing.T) {
	s := newServer()
	srv := httptest.NewUnstartedServer(s)
	srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	srv.StartTLS()
	defer srv.Close()
	plain := httptest.NewServer(s)
	defer plain.Close()
	dir := t.TempDir()
	ca := writeFile(t, filepath.Join(dir, "ca.pem"), string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw})))
	host := func(s *httptest.Server) string { _, h, _ := strings.Cut(s.URL, "://"); return h }
	port := func(s *httptest.Server) string { _, p, _ := net.SplitHostPort(host(s)); return p }
	list := func(scheme, endpoint, ca string) error {
		o := options(nil)
		o.Scheme, o.Endpoint, o.CABundle = scheme, endpoint, ca
		_, err := open(t, o).List(context.Background(), ListOptions{})
		return err
	}
	if err := list("https", host(srv), ca); err != nil {
		t.Error(err)
	}
	want(t, list("https", host(srv), ""), KindTLS)
	want(t, list("https", "localhost:"+port(srv), ca), KindTLS) // the certificate is for an address
	want(t, list("https", host(plain), ca), KindTLS)
	want(t, list("http", host(srv), ca), KindTLS)

	for file, text := range map[string]string{
		filepath.Join(dir, "none.pem"):                                  "none.pem",
		writeFile(t, filepath.Join(dir, "empty.pem"), "no certificate"): "empty.pem has no certificate",
	} {
		o := options(nil)
		o.CABundle = file
		if _, err := New(o); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%v, want %q", err, text)
		}
	}
}

// TestNothingSecretInErrors: a store that repeats everything that it was sent.
func TestNothingSecretInErrors(t *testing.T) {
	const token = "session/token+of==this-test"
	var signature string
	echo := func(status int, format string) handler {
		return func(w http.ResponseWriter, r *http.Request) {
			auth := r.Header.Get("Authorization")
			_, signature, _ = strings.Cut(auth, "Signature=")
			w.WriteHeader(status)
			fmt.Fprintf(w, format, secret+"\r\n"+r.Header.Get("X-Amz-Security-Token")+" "+auth+strings.Repeat(" long", 100))
		}
	}
	for _, rt := range []http.RoundTripper{
		echo(403, "<Error><Code>SignatureDoesNotMatch</Code><Message>%s</Message><StringToSign>x</StringToSign></Error>"),
		echo(403, "%s"),
		echo(400, "<Error><Code>ExpiredToken</Code><Message>%s</Message></Error>"),
		echo(403, "<Error><Code>%s</Code></Error>"),
		handler2(func(r *http.Request) (*http.Response, error) {
			signature = "Signature="
			return nil, &url.Error{Op: "Get", URL: r.URL.String() + "?X-Amz-Signature=1&token=" + token, Err: errors.New("broken")}
		}),
	} {
		o := options(rt)
		o.SessionToken = token
		_, err := open(t, o).Head(context.Background(), "k")
		text := fmt.Sprintf("%v %+v", err, err)
		var e *Error
		if !errors.As(err, &e) || e.Message != "" && len(e.Message) > messageMax || strings.ContainsAny(e.Message, "\r\n") {
			t.Errorf("%#v", err)
		}
		for _, hidden := range []string{secret, token, signature} {
			if hidden == "" || strings.Contains(text, hidden) {
				t.Errorf("%s has %q", text, hidden)
			}
		}
	}
}

type handler2 func(r *http.Request) (*http.Response, error)

func (h handler2) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		r.Body.Close()
	}
	return h(r)
}

func TestDeleteManySaysWhich(t *testing.T) {
	keys := []string{"a", "b & <c>", "d"}
	answer := func(inner string) (failed []string, err error) {
		return open(t, options(says(200, "<DeleteResult>"+inner+"</DeleteResult>"))).DeleteMany(context.Background(), keys)
	}
	failed, err := answer("<Error><Key>a</Key><Code>NoSuchKey</Code></Error><Error><Key>of others</Key><Code>AccessDenied</Code></Error>")
	if failed != nil || err != nil {
		t.Error(failed, err)
	}
	failed, err = answer("<Deleted><Key>a</Key></Deleted><Error><Key>b &amp; &lt;c&gt;</Key><Code>AccessDenied</Code><Message>no</Message></Error><Error><Key>d</Key><Code>SlowDown</Code></Error>")
	if e := want(t, err, KindPermission); !slices.Equal(failed, keys[1:]) || e.Key != keys[1] {
		t.Errorf("failed %q: %v", failed, err)
	}
	failed, err = open(t, options(says(200, "<Other/>"))).DeleteMany(context.Background(), keys)
	if want(t, err, KindMalformed); !slices.Equal(failed, keys) {
		t.Errorf("failed %q", failed)
	}
	if failed, err := answer(strings.Repeat(" ", docMax)); kind(err) != KindMalformed || len(failed) != 3 {
		t.Errorf("%d failed: %v", len(failed), err)
	}
	if failed, err := open(t, options(says(200, ""))).DeleteMany(context.Background(), make([]string, 1001)); err == nil || len(failed) != 1001 {
		t.Error(err)
	}
}

func TestListRefuses(t *testing.T) {
	for name, doc := range map[string]string{
		"no document":       "nothing",
		"another":           "<Other/>",
		"cut":               "<ListBucketResult><Contents>",
		"no end":            "<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
		"the same page":     "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>T</NextContinuationToken></ListBucketResult>",
		"bad encoding":      "<ListBucketResult><EncodingType>url</EncodingType><Contents><Key>%zz</Key></Contents></ListBucketResult>",
		"no key":            "<ListBucketResult><Contents><Size>1</Size></Contents></ListBucketResult>",
		"negative":          "<ListBucketResult><Contents><Key>k</Key><Size>-1</Size></Contents></ListBucketResult>",
		"too long":          "<ListBucketResult>" + strings.Repeat(" ", docMax) + "</ListBucketResult>",
		"an entity of ours": `<!DOCTYPE x [<!ENTITY a "aaaa">]><ListBucketResult><Contents><Key>&a;</Key></Contents></ListBucketResult>`,
	} {
		_, err := open(t, options(says(200, doc))).List(context.Background(), ListOptions{Token: "T"})
		if kind(err) != KindMalformed {
			t.Errorf("%s: %v", name, err)
		}
	}
	// A store that knows no encoding says so by not saying it.
	_, err := open(t, options(says(404, "nginx"))).List(context.Background(), ListOptions{})
	want(t, err, KindBucket)
	p, err := open(t, options(says(200, "<ListBucketResult><Contents><Key>a%20b+c</Key></Contents></ListBucketResult>"))).List(context.Background(), ListOptions{})
	if err != nil || p.Objects[0].Key != "a%20b+c" {
		t.Error(p, err)
	}
}

// dying is a server that answers the first request of a connection, and ends
// the connection instead of answering the second.
func dying(t *testing.T) (addr string, served *atomic.Int64) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served = new(atomic.Int64)
	var wg sync.WaitGroup
	t.Cleanup(func() { l.Close(); wg.Wait() })
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer conn.Close()
				r := bufio.NewReader(conn)
				req, err := http.ReadRequest(r)
				if err != nil {
					return
				}
				body, _ := io.ReadAll(req.Body)
				if string(body) == "12345678" {
					served.Add(1)
				}
				_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
				if req, err = http.ReadRequest(r); err == nil {
					_, _ = io.Copy(io.Discard, req.Body)
				}
			})
		}
	})
	return l.Addr().String(), served
}

// TestConnectionGone: a store, or what is before it, may end a connection just
// when it is used again; the transport sends the request once more, unless
// that could do harm.
func TestConnectionGone(t *testing.T) {
	addr, served := dying(t)
	o := options(nil)
	o.Endpoint = addr
	c := open(t, o)
	put := func(o PutOptions) error {
		_, err := c.Put(context.Background(), "k", NewBody([]byte("1234"), []byte("5678")), o)
		return err
	}
	for range 4 {
		if err := put(PutOptions{IfNoneMatch: true}); err != nil {
			t.Fatal(err)
		}
	}
	if served.Load() != 4 {
		t.Errorf("%d bodies arrived, want 4", served.Load())
	}
	want(t, put(PutOptions{IfMatch: "\"1\""}), KindNetwork)
	if err := put(PutOptions{IfMatch: "\"1\""}); err != nil { // on a connection of its own
		t.Error(err)
	}
}

// TestConnectionKept: what was read to its end is used again, also after errors.
func TestConnectionKept(t *testing.T) {
	s := newServer()
	s.Set(bucket, "k", content(10_000))
	srv := httptest.NewUnstartedServer(s)
	var conns atomic.Int64
	srv.Config.ConnState = func(_ net.Conn, st http.ConnState) {
		if st == http.StateNew {
			conns.Add(1)
		}
	}
	srv.Start()
	defer srv.Close()
	o := options(nil)
	o.Endpoint = strings.TrimPrefix(srv.URL, "http://")
	c := open(t, o)
	ctx := context.Background()
	for range 5 {
		_, _ = c.Head(ctx, "none")
		_, _ = c.Get(ctx, "none")
		if _, err := c.Get(ctx, "k", make([]byte, 10_000)); err != nil {
			t.Fatal(err)
		}
		_, _ = c.Put(ctx, "k", NewBody([]byte("x")), PutOptions{IfNoneMatch: true})
		_, _ = c.List(ctx, ListOptions{})
		_ = c.Copy(ctx, "k", "c")
	}
	if conns.Load() != 1 {
		t.Errorf("%d connections, want 1", conns.Load())
	}
	_, err := c.Get(ctx, "k", make([]byte, 1)) // its body is left behind
	want(t, err, KindLength)
	if _, err := c.Get(ctx, "k", make([]byte, 10_000)); err != nil {
		t.Error(err)
	}
	if conns.Load() > 2 {
		t.Errorf("%d connections, want at most 2", conns.Load())
	}
}
