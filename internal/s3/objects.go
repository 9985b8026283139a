package s3

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// Put stores an object of body.Len() bytes. The body is revoked when it returns.
func (c *Client) Put(ctx context.Context, key string, body *Body, o PutOptions) (Object, error) {
	defer body.Revoke()
	r := &request{op: "PUT", method: http.MethodPut, key: key, body: body, header: http.Header{}}
	if err := checkKey(key); err != nil {
		return Object{}, r.error(c, err)
	}
	contentType := o.ContentType
	if contentType == "" {
		contentType = "application/octet-stream"
	}
	r.header["Content-Type"] = []string{contentType}
	name, value, err := o.Checksum.header()
	if err != nil {
		return Object{}, r.error(c, err)
	}
	if name != "" {
		r.header[name] = []string{value}
	}
	if o.IfNoneMatch {
		r.header["If-None-Match"] = []string{"*"}
	}
	if o.IfMatch != "" {
		// Sent twice, the second would find the ETag of the first.
		r.header["If-Match"], r.once = []string{o.IfMatch}, true
	}
	obj := Object{Key: key, Size: body.Len()}
	err = c.do(ctx, r, func(resp *http.Response) error {
		obj.ETag = resp.Header.Get("Etag")
		return c.noErrorInside(r, resp)
	})
	if err != nil {
		return Object{}, err
	}
	return obj, nil
}

// header is how a checksum is sent: the bytes of the number, highest first.
func (s Checksum) header() (name, value string, err error) {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], s.Value)
	switch s.Algorithm {
	case "":
		return "", "", nil
	case ChecksumCRC64NVME:
		return "X-Amz-Checksum-Crc64nvme", base64.StdEncoding.EncodeToString(b[:]), nil
	case ChecksumCRC32C:
		if s.Value>>32 != 0 {
			return "", "", fmt.Errorf("s3: %#x is no %s, which has 32 bits", s.Value, s.Algorithm)
		}
		return "X-Amz-Checksum-Crc32c", base64.StdEncoding.EncodeToString(b[4:]), nil
	}
	return "", "", fmt.Errorf("s3: checksum algorithm is %q, want %s or %s", s.Algorithm, ChecksumCRC64NVME, ChecksumCRC32C)
}

// noErrorInside reads the answer to something that stored: a status is sent
// before a store knows how it ends, so an error may be in the body.
func (c *Client) noErrorInside(r *request, resp *http.Response) error {
	if resp.ContentLength == 0 {
		return nil
	}
	data, err := readDoc(resp)
	if err != nil {
		return err
	}
	if _, ok := parseErrorDoc(data); ok {
		return c.answerError(r, resp, data)
	}
	return nil
}

// Get reads a whole object into parts, in order, and fails with KindLength if
// it does not have exactly as many bytes as they have together; such an error
// is io.ErrUnexpectedEOF if the object has, and the answer broke off. On an
// error their content is undefined. They are read into by the calling goroutine only.
func (c *Client) Get(ctx context.Context, key string, parts ...[]byte) (Object, error) {
	r := &request{op: "GET", method: http.MethodGet, key: key}
	if err := checkKey(key); err != nil {
		return Object{}, r.error(c, err)
	}
	var want int64
	for _, p := range parts {
		want += int64(len(p))
	}
	var obj Object
	err := c.do(ctx, r, func(resp *http.Response) error {
		if resp.ContentLength != want {
			return c.wrongLength(r, resp, fmt.Sprintf("want %d", want))
		}
		var got int64
		for _, p := range parts {
			n, err := io.ReadFull(resp.Body, p)
			if got += int64(n); err != nil {
				return r.short(c, got, want, err)
			}
		}
		// The transport's own bodies end here; one that does not is no answer
		// to trust.
		var one [1]byte
		if n, err := resp.Body.Read(one[:]); n != 0 || err != io.EOF {
			return r.length(c, fmt.Sprintf("more than its %d bytes, or no end: %v", want, err))
		}
		obj = object(key, resp)
		return nil
	})
	return obj, err
}

// GetSmall reads a whole object of at most max bytes.
func (c *Client) GetSmall(ctx context.Context, key string, max int) ([]byte, Object, error) {
	r := &request{op: "GET", method: http.MethodGet, key: key}
	if err := checkKey(key); err != nil {
		return nil, Object{}, r.error(c, err)
	}
	var data []byte
	var obj Object
	err := c.do(ctx, r, func(resp *http.Response) error {
		if resp.ContentLength > int64(max) {
			return c.wrongLength(r, resp, fmt.Sprintf("want at most %d", max))
		}
		var err error
		if data, err = io.ReadAll(io.LimitReader(resp.Body, int64(max)+1)); err != nil {
			return r.short(c, int64(len(data)), resp.ContentLength, err)
		}
		if len(data) > max {
			return r.length(c, fmt.Sprintf("more than %d bytes", max))
		}
		if strings.Contains(resp.Header.Get("Content-Type"), "xml") {
			if _, ok := parseErrorDoc(data); ok {
				return c.answerError(r, resp, data)
			}
		}
		obj = object(key, resp)
		obj.Size = int64(len(data))
		return nil
	})
	if err != nil {
		return nil, Object{}, err
	}
	return data, obj, nil
}

// wrongLength is the failure of an answer that is not the object that was
// wanted: an error document, or another object.
func (c *Client) wrongLength(r *request, resp *http.Response, want string) error {
	if strings.Contains(resp.Header.Get("Content-Type"), "xml") {
		data, _ := io.ReadAll(io.LimitReader(resp.Body, errorDocMax))
		if _, ok := parseErrorDoc(data); ok {
			return c.answerError(r, resp, data)
		}
	}
	has := fmt.Sprintf("%d bytes", resp.ContentLength)
	if resp.ContentLength < 0 {
		has = "no length"
	}
	return r.length(c, has+", "+want)
}

func (r *request) length(c *Client, text string) *Error {
	e := r.error(c, fmt.Errorf("the answer has %s", text))
	e.Kind, e.Status = KindLength, http.StatusOK
	return e
}

// short is the failure of a body that ended, or broke, before its end.
func (r *request) short(c *Client, got, want int64, err error) error {
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		e := r.error(c, fmt.Errorf("the body ended after %d bytes of %d: %w", got, want, io.ErrUnexpectedEOF))
		e.Kind, e.Status = KindLength, http.StatusOK
		return e
	}
	return err
}

// Head asks for an object.
func (c *Client) Head(ctx context.Context, key string) (Object, error) {
	r := &request{op: "HEAD", method: http.MethodHead, key: key}
	if err := checkKey(key); err != nil {
		return Object{}, r.error(c, err)
	}
	var obj Object
	err := c.do(ctx, r, func(resp *http.Response) error {
		if resp.ContentLength < 0 {
			return r.length(c, "no length")
		}
		obj = object(key, resp)
		return nil
	})
	return obj, err
}

// object is what an answer's header says.
func object(key string, resp *http.Response) Object {
	modified, _ := time.Parse(http.TimeFormat, resp.Header.Get("Last-Modified"))
	return Object{Key: key, Size: resp.ContentLength, ETag: resp.Header.Get("Etag"), Modified: modified}
}

// Delete removes an object. One that is not there is no error.
func (c *Client) Delete(ctx context.Context, key string) error {
	r := &request{op: "DELETE", method: http.MethodDelete, key: key}
	if err := checkKey(key); err != nil {
		return r.error(c, err)
	}
	err := c.do(ctx, r, func(*http.Response) error { return nil })
	if e := (*Error)(nil); errors.As(err, &e) && e.Kind == KindNotFound {
		return nil
	}
	return err
}

// Copy copies an object within the bucket, by the store itself.
func (c *Client) Copy(ctx context.Context, from, to string) error {
	r := &request{op: "COPY", method: http.MethodPut, key: to, body: NewBody()}
	for _, key := range []string{from, to} {
		if err := checkKey(key); err != nil {
			return r.error(c, err)
		}
	}
	r.header = http.Header{"X-Amz-Copy-Source": {escapePath("/" + c.o.Bucket + "/" + from)}}
	return c.do(ctx, r, func(resp *http.Response) error { return c.noErrorInside(r, resp) })
}
