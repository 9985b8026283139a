package fault

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// How linger reads: so slowly that whoever takes a call that has returned for
// quiet is found out.
const (
	lingerBytes = 4 << 10
	lingerEvery = time.Millisecond
)

// HTTP wraps a round tripper. Each request is one op, whose key is the URL's
// path and query. Behind a reverse proxy whose transport it is, the faults are
// on the wire: what fails here drops the connection there.
func HTTP(under http.RoundTripper, set *Set) *Transport { return &Transport{under: under, set: set} }

// Transport is a round tripper with faults. It is safe for concurrent use.
type Transport struct {
	under http.RoundTripper
	set   *Set
	wg    sync.WaitGroup // bodies that linger
}

// Wait waits for bodies that are read on until Set.Release.
func (t *Transport) Wait() { t.wg.Wait() }

// CloseIdleConnections passes the call on.
func (t *Transport) CloseIdleConnections() {
	if u, ok := t.under.(interface{ CloseIdleConnections() }); ok {
		u.CloseIdleConnections()
	}
}

// RoundTrip is in http.RoundTripper.
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	op := Op{Seam: SeamHTTP, Kind: strings.ToLower(r.Method), Key: r.URL.RequestURI()}
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions:
	default:
		op.Write = true
	}
	f := t.set.Check(op)
	has := r.Body != nil && r.Body != http.NoBody
	if f.Linger != nil && has {
		return nil, t.linger(r, &f)
	}
	give := func(resp *http.Response, err error) (*http.Response, error) {
		if has {
			_ = r.Body.Close() // as a round tripper must
		}
		return resp, err
	}
	if f.Delay > 0 {
		timer := time.NewTimer(f.Delay)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-r.Context().Done():
			return give(nil, r.Context().Err())
		}
	}
	if f.Hang != nil {
		select {
		case <-f.Hang:
		case <-r.Context().Done():
			return give(nil, r.Context().Err())
		}
	}
	switch {
	case f.Err != nil && !f.Late && !f.Torn:
		return give(nil, f.Err)
	case f.Status != 0:
		return give(answer(r, &f), nil)
	}
	if has && (f.Torn || f.Flip) {
		broken := f.Err
		if broken == nil {
			broken = unix.ECONNRESET
		}
		b := &faultyBody{ReadCloser: r.Body, ctx: r.Context(), f: Fault{Torn: f.Torn, Keep: f.Keep, Flip: f.Flip}, flipAt: max(0, r.ContentLength) / 2, broken: broken}
		r = r.Clone(r.Context())
		r.Body, r.GetBody = b, nil
		f.Flip = false
	}
	resp, err := t.under.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	if f.Err != nil && f.Late {
		_ = resp.Body.Close()
		return nil, f.Err
	}
	if f.Torn && has {
		// Who answers before it has read all is not waited for.
		_ = resp.Body.Close()
		return nil, unix.ECONNRESET
	}
	if !f.Lie && !f.Torn && !f.Flip && f.Short == 0 && f.Stall == nil {
		return resp, nil
	}
	b := &faultyBody{ReadCloser: resp.Body, ctx: r.Context(), f: f, flipAt: max(0, resp.ContentLength) / 2, broken: f.Err}
	if b.broken == nil {
		b.broken = io.ErrUnexpectedEOF
	}
	if f.Lie {
		b.short = resp.ContentLength < f.Length
		resp.ContentLength = f.Length
		resp.Header.Set("Content-Length", fmt.Sprint(f.Length))
	}
	resp.Body = b
	return resp, nil
}

// linger fails a request whose body is read on.
func (t *Transport) linger(r *http.Request, f *Fault) error {
	t.wg.Go(func() {
		defer r.Body.Close()
		tick := time.NewTicker(lingerEvery)
		defer tick.Stop()
		b := make([]byte, lingerBytes)
		for {
			select {
			case <-tick.C:
				if _, err := r.Body.Read(b); err != nil {
					<-f.Linger
					return
				}
			case <-f.Linger:
				return
			}
		}
	})
	if f.Err != nil {
		return f.Err
	}
	select {
	case <-r.Context().Done():
		return r.Context().Err()
	case <-f.Linger:
		return unix.ECONNRESET
	}
}

// codes of error documents, where a rule gives none.
var codes = map[int]string{
	http.StatusServiceUnavailable: "SlowDown", http.StatusTooManyRequests: "TooManyRequests", http.StatusForbidden: "AccessDenied",
	http.StatusNotFound: "NoSuchKey", http.StatusPreconditionFailed: "PreconditionFailed", http.StatusNotImplemented: "NotImplemented",
}

// answer is what a server says that does not do as it was asked.
func answer(r *http.Request, f *Fault) *http.Response {
	code := f.Code
	if code == "" {
		code = codes[f.Status]
	}
	if code == "" {
		code = "InternalError"
	}
	doc := fmt.Sprintf("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>%s</Code><Message>injected</Message><RequestId>0</RequestId></Error>", code)
	resp := &http.Response{
		Status: fmt.Sprintf("%d %s", f.Status, http.StatusText(f.Status)), StatusCode: f.Status,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Request: r,
		Header: http.Header{"Content-Type": {"application/xml"}}, ContentLength: int64(len(doc)),
		Body: io.NopCloser(strings.NewReader(doc)),
	}
	if r.Method == http.MethodHead {
		resp.Body = http.NoBody
	}
	return resp
}

// faultyBody is a body with a fault. One goroutine reads it.
type faultyBody struct {
	io.ReadCloser
	ctx    context.Context // of the request
	f      Fault
	at     int64 // bytes that were read
	flipAt int64
	broken error // what a torn body ends with
	short  bool  // there are fewer bytes than the length says
}

func (b *faultyBody) Read(p []byte) (n int, err error) {
	limit := func(at int64) { p = p[:min(int64(len(p)), at-b.at)] }
	f := &b.f
	if f.Short > 0 {
		p = p[:min(len(p), f.Short)]
	}
	if f.Torn {
		if b.at >= int64(f.Keep) {
			return 0, b.broken
		}
		limit(int64(f.Keep))
	}
	if f.Lie {
		if b.at >= f.Length {
			return 0, io.EOF
		}
		limit(f.Length)
	}
	if f.Stall != nil {
		if b.at < int64(f.After) {
			limit(int64(f.After))
		} else {
			select {
			case <-f.Stall:
			case <-b.ctx.Done():
				return 0, b.ctx.Err()
			}
		}
	}
	n, err = b.ReadCloser.Read(p)
	if i := b.flipAt - b.at; f.Flip && i >= 0 && i < int64(n) {
		p[i] ^= 4
	}
	b.at += int64(n)
	if err == io.EOF && b.short {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}
