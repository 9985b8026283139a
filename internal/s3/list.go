package s3

import (
	"bytes"
	"context"
	"crypto/md5"
	"encoding/base64"
	"encoding/binary"
	"encoding/xml"
	"errors"
	"fmt"
	"hash/crc32"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"
)

// keysMax is how many keys one listing or one DeleteMany has.
const keysMax = 1000

type listResult struct {
	XMLName      xml.Name
	EncodingType string
	IsTruncated  bool
	Next         string `xml:"NextContinuationToken"`
	Contents     []struct {
		Key          string
		Size         int64
		ETag         string
		LastModified string
	}
	CommonPrefixes []struct{ Prefix string }
}

// ListOptions of one List.
type ListOptions struct {
	Prefix    string
	Delimiter string
	After     string // only keys behind this one
	Token     string // of the page before
	Max       int    // objects; default 1,000, which is also the most
}

// List is one page of what there is, by key.
func (c *Client) List(ctx context.Context, o ListOptions) (Page, error) {
	q := url.Values{"list-type": {"2"}, "encoding-type": {"url"}}
	for k, v := range map[string]string{"prefix": o.Prefix, "delimiter": o.Delimiter, "start-after": o.After, "continuation-token": o.Token} {
		if v != "" {
			q.Set(k, v)
		}
	}
	if o.Max > 0 && o.Max < keysMax {
		q.Set("max-keys", strconv.Itoa(o.Max))
	}
	r := &request{op: "LIST", method: http.MethodGet, query: escapeQuery(q)}
	var page Page
	err := c.do(ctx, r, func(resp *http.Response) error {
		data, err := readDoc(resp)
		if err != nil && err != errDocTooLong {
			return err
		}
		if _, ok := parseErrorDoc(data); ok {
			return c.answerError(r, resp, data)
		}
		if err == nil {
			page, err = parseList(data, o.Token)
		}
		return r.malformed(c, err)
	})
	return page, err
}

func (r *request) malformed(c *Client, err error) error {
	if err == nil {
		return nil
	}
	e := r.error(c, err)
	e.Kind, e.Status = KindMalformed, http.StatusOK
	return e
}

// parseList reads a listing, which came for a token.
func parseList(data []byte, token string) (Page, error) {
	var l listResult
	if err := xml.Unmarshal(data, &l); err != nil {
		return Page{}, fmt.Errorf("read the listing: %w", err)
	}
	switch {
	case l.XMLName.Local != "ListBucketResult":
		return Page{}, fmt.Errorf("the listing is a document %q, want ListBucketResult", line(l.XMLName.Local))
	case l.IsTruncated && (l.Next == "" || l.Next == token):
		return Page{}, errors.New("the listing is truncated, and does not say how it goes on")
	}
	decode := func(s string) (string, error) { return s, nil }
	if l.EncodingType == "url" {
		decode = url.QueryUnescape
	}
	p := Page{Objects: make([]Object, 0, len(l.Contents))}
	if l.IsTruncated {
		p.Next = l.Next
	}
	for _, o := range l.Contents {
		key, err := decode(o.Key)
		if err != nil || key == "" || o.Size < 0 {
			return Page{}, fmt.Errorf("the listing has key %q of %d bytes", line(o.Key), o.Size)
		}
		modified, _ := time.Parse(time.RFC3339, o.LastModified)
		p.Objects = append(p.Objects, Object{Key: key, Size: o.Size, ETag: o.ETag, Modified: modified})
	}
	for _, o := range l.CommonPrefixes {
		prefix, err := decode(o.Prefix)
		if err != nil || prefix == "" {
			return Page{}, fmt.Errorf("the listing has prefix %q", line(o.Prefix))
		}
		p.Prefixes = append(p.Prefixes, prefix)
	}
	return p, nil
}

type deleteResult struct {
	XMLName xml.Name
	Error   []struct{ Key, Code, Message string }
}

// DeleteMany removes up to 1,000 objects in one request. failed has those that
// may still be there; then err is not nil, and says why of the first of them.
func (c *Client) DeleteMany(ctx context.Context, keys []string) (failed []string, err error) {
	r := &request{op: "DELETE", method: http.MethodPost, query: "delete="}
	if len(keys) == 0 {
		return nil, nil
	}
	if len(keys) > keysMax {
		return keys, r.error(c, fmt.Errorf("s3: %d keys to delete at once, want at most %d", len(keys), keysMax))
	}
	var doc bytes.Buffer
	doc.WriteString("<Delete><Quiet>true</Quiet>")
	for _, key := range keys {
		if err := checkKey(key); err != nil {
			return keys, r.error(c, err)
		}
		doc.WriteString("<Object><Key>")
		_ = xml.EscapeText(&doc, []byte(key)) // a Buffer takes everything
		doc.WriteString("</Key></Object>")
	}
	doc.WriteString("</Delete>")
	r.doc = doc.Bytes()
	r.header = http.Header{"Content-Type": {"application/xml"}}
	// Every store knows one of the two: the older ones MD5, directory buckets
	// only the other.
	if c.at.express {
		sum := crc32.Checksum(r.doc, crc32.MakeTable(crc32.Castagnoli))
		r.header["X-Amz-Checksum-Crc32c"] = []string{base64.StdEncoding.EncodeToString(binary.BigEndian.AppendUint32(nil, sum))}
	} else {
		sum := md5.Sum(r.doc)
		r.header["Content-Md5"] = []string{base64.StdEncoding.EncodeToString(sum[:])}
	}
	var first *Error
	err = c.do(ctx, r, func(resp *http.Response) error {
		data, err := readDoc(resp)
		if err != nil && err != errDocTooLong {
			return err
		}
		if _, ok := parseErrorDoc(data); ok {
			return c.answerError(r, resp, data)
		}
		var d deleteResult
		if err == nil {
			d, err = parseDelete(data)
		}
		if err != nil {
			return r.malformed(c, err)
		}
		for _, e := range d.Error {
			kind := kindOf(http.StatusOK, e.Code)
			if kind == KindNotFound || !slices.Contains(keys, e.Key) {
				continue
			}
			if failed = append(failed, e.Key); first == nil {
				first = r.error(c, nil)
				first.Key, first.Kind, first.Status, first.Code, first.Message = e.Key, kind, http.StatusOK, token(e.Code), r.clean(e.Message)
			}
		}
		return nil
	})
	if err != nil {
		return keys, err
	}
	if first != nil {
		return failed, first
	}
	return nil, nil
}

func parseDelete(data []byte) (d deleteResult, err error) {
	if err = xml.Unmarshal(data, &d); err != nil {
		return d, fmt.Errorf("read what was deleted: %w", err)
	}
	if d.XMLName.Local != "DeleteResult" {
		return d, fmt.Errorf("the answer is a document %q, want DeleteResult", line(d.XMLName.Local))
	}
	return d, nil
}
