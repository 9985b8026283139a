package fault

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

// shelf keeps what is put there, by path.
type shelf struct {
	mu   sync.Mutex
	has  map[string]string
	asks int
}

func (s *shelf) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	b, err := io.ReadAll(r.Body)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asks++
	switch {
	case err != nil:
		w.WriteHeader(http.StatusBadRequest)
	case r.Method == http.MethodPut:
		s.has[r.URL.Path] = string(b)
	default:
		_, _ = io.WriteString(w, s.has[r.URL.Path])
	}
}

// RoundTrip serves without a connection.
func (s *shelf) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body == nil {
		r.Body = http.NoBody
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	r.Body = io.NopCloser(bytes.NewReader(b))
	w := httptest.NewRecorder()
	s.ServeHTTP(w, r)
	resp := w.Result()
	resp.ContentLength = int64(w.Body.Len())
	return resp, nil
}

const told = "0123456789abcdef"

// send makes one request and says how it ended: status and body, or why not.
func send(ctx context.Context, rt http.RoundTripper, method, where, body string) (string, error) {
	r, err := http.NewRequestWithContext(ctx, method, where, strings.NewReader(body))
	if err != nil {
		return "", err
	}
	if body == "" {
		r.Body, r.GetBody, r.ContentLength = nil, nil, 0
	}
	resp, err := rt.RoundTrip(r)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return fmt.Sprintf("%d %d %s", resp.StatusCode, resp.ContentLength, b), err
}

func TestHTTP(t *testing.T) {
	const fine, doc = "200 16 " + told, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>%s</Code><Message>injected</Message><RequestId>0</RequestId></Error>"
	answer := func(status int, code string) string {
		d := fmt.Sprintf(doc, code)
		return fmt.Sprintf("%d %d %s", status, len(d), d)
	}
	for rules, want := range map[string]struct {
		stored string // by a put
		got    string // by a get of what was stored before
		err    error  // of either
	}{
		"":                                   {told, fine, nil},
		"error(ECONNRESET) when writes":      {"", fine, unix.ECONNRESET},
		"disconnect when op(put)":            {"", fine, unix.ECONNRESET},
		"late(ECONNRESET) when op(put)":      {told, fine, unix.ECONNRESET},
		"late(EPIPE) when op(get)":           {told, "", unix.EPIPE},
		"error(EIO) when reads":              {told, "", unix.EIO},
		"torn(5) when op(put)":               {"", fine, unix.ECONNRESET},
		"torn(5) error(EIO) when writes":     {"", fine, unix.EIO},
		"torn(5) when op(get)":               {told, "200 16 01234", io.ErrUnexpectedEOF},
		"torn(5) error(EIO) when reads":      {told, "200 16 01234", unix.EIO},
		"torn(99) when op(get)":              {told, fine, nil},
		"flip when op(put)":                  {"01234567<9abcdef", fine, nil},
		"flip when op(get)":                  {told, "200 16 01234567<9abcdef", nil},
		"short(3) when always":               {told, fine, nil},
		"length(5) when op(get)":             {told, "200 5 01234", nil},
		"length(99) when op(get)":            {told, "200 99 " + told, io.ErrUnexpectedEOF},
		"status(503) when op(put)":           {"", fine, nil},
		"status(503) when op(get)":           {told, answer(503, "SlowDown"), nil},
		"status(500) when op(get)":           {told, answer(500, "InternalError"), nil},
		"status(200, SlowDown) when op(get)": {told, answer(200, "SlowDown"), nil},
		`status(404) when key("/put/a")`:     {told, fine, nil},
		`status(404) when key("/put/a?x=1")`: {"", fine, nil},
		"hang when seam(conn)":               {told, fine, nil},
	} {
		s := &shelf{has: map[string]string{"/get": told}}
		rt := HTTP(s, MustParse(rules))
		_, perr := send(t.Context(), rt, http.MethodPut, "http://h/put/a?x=1", told)
		got, gerr := send(t.Context(), rt, http.MethodGet, "http://h/get", "")
		if s.has["/put/a"] != want.stored || got != want.got || !errors.Is(errors.Join(perr, gerr), want.err) {
			t.Errorf("%s: %q is stored, %q was read, %v; want %+v", rules, s.has["/put/a"], got, errors.Join(perr, gerr), want)
		}
	}
	head, err := send(t.Context(), HTTP(&shelf{}, MustParse("status(403)")), http.MethodHead, "http://h/", "")
	if err != nil || !strings.HasPrefix(head, "403 ") || strings.Contains(head, "<") {
		t.Errorf("the answer to a HEAD: %q, %v", head, err)
	}
}

// What fails in a reverse proxy is a broken connection for whom it serves.
func TestHTTPOnTheWire(t *testing.T) {
	s := &shelf{has: map[string]string{"/get": told}}
	origin := httptest.NewServer(s)
	defer origin.Close()
	to, err := url.Parse(origin.URL)
	if err != nil {
		t.Fatal(err)
	}
	set := MustParse(`disconnect when key("/reset"); torn(5) when key("/get"); status(503) when key("/busy")`)
	under := &http.Transport{}
	defer under.CloseIdleConnections()
	proxy := httptest.NewServer(&httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(to) },
		Transport:     HTTP(under, set),
		ErrorHandler:  func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
		FlushInterval: -1,
	})
	defer proxy.Close()
	rt := &http.Transport{}
	defer rt.CloseIdleConnections()
	if got, err := send(t.Context(), rt, http.MethodGet, proxy.URL+"/busy", ""); err != nil || !strings.Contains(got, "SlowDown") {
		t.Errorf("busy: %q, %v", got, err)
	}
	if got, err := send(t.Context(), rt, http.MethodGet, proxy.URL+"/get", ""); got != "200 16 01234" || err != io.ErrUnexpectedEOF {
		t.Errorf("torn: %q, %v", got, err)
	}
	if got, err := send(t.Context(), rt, http.MethodGet, proxy.URL+"/reset", ""); err == nil {
		t.Errorf("reset: %q", got)
	}
}

// Every wait ends with the request's context, or with Release.
func TestHTTPWaits(t *testing.T) {
	for rules, begun := range map[string]string{"delay(1h)": "", "hang": "", "stall(5)": "200 16 01234"} {
		synctest.Test(t, func(t *testing.T) {
			set := MustParse(rules)
			rt := HTTP(&shelf{has: map[string]string{"/get": told}}, set)
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			begin := time.Now()
			got, err := send(ctx, rt, http.MethodGet, "http://h/get", "")
			if got != begun || !errors.Is(err, context.DeadlineExceeded) || time.Since(begin) != time.Second {
				t.Errorf("%s: %q and %v after %v", rules, got, err, time.Since(begin))
			}
			time.AfterFunc(2*time.Hour, set.Release)
			if got, err := send(t.Context(), rt, http.MethodGet, "http://h/get", ""); got != "200 16 "+told || err != nil {
				t.Errorf("%s: %q and %v in the end", rules, got, err)
			}
		})
	}
}

// lazy counts what is read of it, and whether it is closed.
type lazy struct {
	mu     sync.Mutex
	n      int
	closed bool
}

func (l *lazy) Read(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.n += len(b)
	return len(b), nil
}

func (l *lazy) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	return nil
}

func (l *lazy) look() (int, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.n, l.closed
}

// A body that lingers is read after the call, and closed late.
func TestHTTPLinger(t *testing.T) {
	for rules, after := range map[string]time.Duration{"linger": time.Second, "linger error(EIO)": 0} {
		synctest.Test(t, func(t *testing.T) {
			set, l := MustParse(rules), &lazy{}
			rt := HTTP(&shelf{}, set)
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			r, err := http.NewRequestWithContext(ctx, http.MethodPut, "http://h/put", l)
			if err != nil {
				t.Fatal(err)
			}
			begin := time.Now()
			if _, err = rt.RoundTrip(r); err == nil || time.Since(begin) != after {
				t.Errorf("%s: %v after %v", rules, err, time.Since(begin))
			}
			n, _ := l.look()
			time.Sleep(time.Minute)
			m, closed := l.look()
			if m <= n || closed {
				t.Errorf("%s: %d bytes were read, %d later, closed %v", rules, n, m, closed)
			}
			set.Release()
			rt.Wait()
			if _, closed := l.look(); !closed {
				t.Errorf("%s: not closed after the release", rules)
			}
		})
	}
}
