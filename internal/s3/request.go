package s3

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/minio/minio-go/v7/pkg/credentials"
)

const (
	docMax       = 4 << 20 // bytes read of a listing or of another answer that is XML
	payloadUnset = "UNSIGNED-PAYLOAD"
	userAgent    = "terrace"
	headerExpSes = "X-Amz-S3session-Token"
)

// request is one call, which may be sent twice: see do.
type request struct {
	op, method, key string
	query           string      // by escapeQuery
	header          http.Header // what this call adds
	body            *Body       // of a Put
	doc             []byte      // of a POST
	once            bool        // sending it twice would not be as sending it once
	raw             bool        // no session of S3 Express: it asks for one

	answered bool      // there was a header of an answer
	hide     [4]string // what no message may repeat
}

func (r *request) error(c *Client, err error) *Error {
	return &Error{Op: r.op, Where: c.at.where, Key: r.key, Err: err}
}

// clean makes a message of what a store says, which may have repeated what it
// was sent.
func (r *request) clean(s string) string {
	for _, h := range r.hide {
		if h != "" {
			s = strings.ReplaceAll(s, h, "[hidden]")
		}
	}
	return line(s)
}

// do sends a request and gives a successful answer to take, whose error is the
// call's. Credentials that were refused are renewed, if they can be, and the
// request is sent once more.
func (c *Client) do(ctx context.Context, r *request, take func(*http.Response) error) error {
	if err := ctx.Err(); err != nil {
		return c.failure(ctx, r, err)
	}
	src := c.creds
	if c.session != nil && !r.raw {
		src = c.session
	}
	v, err := src.get(ctx)
	if err != nil {
		return c.noCredentials(ctx, r, err)
	}
	if err = c.send(ctx, r, v, take); err == nil {
		return nil
	}
	e := c.failure(ctx, r, err)
	if !renewable(r, v, e) {
		return e
	}
	newer, err := src.other(ctx, v)
	if err != nil || same(newer, v) {
		return e
	}
	if err = c.send(ctx, r, newer, take); err == nil {
		return nil
	}
	return c.failure(ctx, r, err)
}

// noCredentials is the failure of a request that was not sent.
func (c *Client) noCredentials(ctx context.Context, r *request, err error) *Error {
	if ctx.Err() != nil {
		return c.failure(ctx, r, err)
	}
	var refused *Error // the store's, when it was asked for a session
	if errors.As(err, &refused) && refused.Kind != KindCancelled {
		return refused
	}
	e := r.error(c, err)
	e.Kind = KindCredentials
	return e
}

// renewable says whether newer credentials might change an answer. One to a
// HEAD has no code, and 400 is what AWS says to an expired token.
func renewable(r *request, v credentials.Value, e *Error) bool {
	return e.Kind == KindExpired || e.Kind == KindCredentials ||
		e.Kind == KindOther && e.Status == http.StatusBadRequest && r.method == http.MethodHead && v.SessionToken != ""
}

// send is one request and its answer.
func (c *Client) send(outer context.Context, r *request, v credentials.Value, take func(*http.Response) error) error {
	ctx, cancel := context.WithCancel(outer)
	defer cancel()
	resp, err := c.rt.RoundTrip(c.build(ctx, r, v))
	c.count(r.op)
	if err != nil {
		return c.counted(c.failure(outer, r, err))
	}
	defer resp.Body.Close() // ends the connection, if there is more to read
	r.answered = true
	if resp.StatusCode == http.StatusOK || r.method == http.MethodDelete && resp.StatusCode == http.StatusNoContent {
		if err := take(resp); err != nil {
			return c.counted(c.failure(outer, r, err))
		}
		return nil
	}
	t := time.AfterFunc(errorDocTimeout, cancel)
	defer t.Stop()
	data, _ := io.ReadAll(io.LimitReader(resp.Body, errorDocMax))
	return c.counted(c.answerError(r, resp, data))
}

// build makes a signed request.
func (c *Client) build(ctx context.Context, r *request, v credentials.Value) *http.Request {
	u := &url.URL{Scheme: c.at.scheme, Host: c.at.host, Path: c.at.base + r.key, RawQuery: r.query}
	if p := escapePath(u.Path); p != u.Path {
		u.RawPath = p
	}
	h := make(http.Header, len(r.header)+6) // with what sign and the transport get
	for k, vs := range r.header {
		h[k] = vs
	}
	h["User-Agent"] = []string{userAgent}
	h[headerSum] = []string{payloadUnset}
	switch {
	case c.at.express && !r.raw:
		h[headerExpSes] = []string{v.SessionToken}
	case v.SessionToken != "":
		h[headerToken] = []string{v.SessionToken}
	}
	req := &http.Request{Method: r.method, URL: u, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Header: h}
	req = req.WithContext(ctx)
	switch {
	case r.body != nil && r.body.Len() > 0:
		req.ContentLength = r.body.Len()
		req.Body = r.body.Reader()
		req.GetBody = func() (io.ReadCloser, error) { return r.body.Reader(), nil }
	case r.body != nil:
		req.Body = http.NoBody
	case r.doc != nil:
		req.ContentLength = int64(len(r.doc))
		req.Body = io.NopCloser(bytes.NewReader(r.doc))
		req.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(r.doc)), nil }
	}
	signature := c.signer.sign(req, v.AccessKeyID, v.SecretAccessKey, time.Now())
	r.hide = [...]string{v.SecretAccessKey, v.SessionToken, v.AccessKeyID, signature}
	// The transport may send a request again that met a connection which the
	// store had closed meanwhile. The header is for the transport alone: it has
	// no value, so it is not sent, and comes after the signature.
	if !r.once {
		h["Idempotency-Key"] = nil
	}
	return req
}

// readDoc reads a document of at most docMax bytes.
func readDoc(resp *http.Response) ([]byte, error) {
	if resp.ContentLength > docMax {
		return nil, errDocTooLong
	}
	data, err := io.ReadAll(io.LimitReader(resp.Body, docMax+1))
	if err == nil && len(data) > docMax {
		err = errDocTooLong
	}
	return data, err
}

var errDocTooLong = fmt.Errorf("the answer has more than %d bytes", docMax)

func (c *Client) counted(e *Error) *Error {
	switch e.Kind {
	case KindNotFound, KindPrecondition: // answers like others
	default:
		c.failed.Add(1)
	}
	return e
}

func (c *Client) count(op string) {
	switch op {
	case "LIST":
		c.lists.Add(1)
	case "PUT":
		c.puts.Add(1)
	case "GET":
		c.gets.Add(1)
	case "HEAD":
		c.heads.Add(1)
	case "DELETE":
		c.deletes.Add(1)
	default:
		c.others.Add(1)
	}
}
