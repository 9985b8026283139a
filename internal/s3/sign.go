package s3

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"hash"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	signAlgorithm = "AWS4-HMAC-SHA256"
	signTime      = "20060102T150405Z"
	signDateLen   = len("20060102")

	headerAuth  = "Authorization"
	headerDate  = "X-Amz-Date"
	headerSum   = "X-Amz-Content-Sha256"
	headerToken = "X-Amz-Security-Token"
)

// signer signs requests for one region and service by AWS Signature Version 4,
// in their header. It may be used from many goroutines.
type signer struct {
	region, service string
	last            atomic.Pointer[signingKey]
	pool            sync.Pool // of *signScratch
}

// signingKey is what a secret makes for one day.
type signingKey struct {
	secret, date, scope string
	key                 []byte
}

// signScratch is the memory of one signature after the other.
type signScratch struct {
	names    []string
	buf, sum []byte
	mac      hash.Hash
	of       *signingKey // of mac
}

func newSigner(region, service string) *signer {
	return &signer{region: region, service: service, pool: sync.Pool{New: func() any { return new(signScratch) }}}
}

// sign adds X-Amz-Date and Authorization to a request, and returns the
// signature. The URL has path and query in the form that is signed, which is
// also what is sent: RawPath is escapePath's, or empty if that escapes nothing;
// RawQuery is escapeQuery's. The header has X-Amz-Content-Sha256 and the token,
// if there is one, and only names of letters, digits and "-", in canonical
// form. What is in it is signed, but for User-Agent and Accept-Encoding, which
// proxies may change.
func (s *signer) sign(req *http.Request, id, secret string, now time.Time) string {
	w := s.pool.Get().(*signScratch)
	defer s.pool.Put(w)
	stamp := now.UTC().Format(signTime)
	values := [...]string{stamp, ""}
	h := req.Header
	h[headerDate] = values[:1:1]

	w.names = append(w.names[:0], "Host")
	for name := range h {
		if name != "User-Agent" && name != "Accept-Encoding" && name != headerAuth {
			w.names = append(w.names, name)
		}
	}
	slices.Sort(w.names) // the order of such names is also that of their lower case

	path := req.URL.RawPath
	if path == "" {
		path = req.URL.Path
	}
	b := appendAll(w.buf[:0], req.Method, "\n", path, "\n", req.URL.RawQuery, "\n")
	for _, name := range w.names {
		b = append(appendLower(b, name), ':')
		if name == "Host" {
			b = append(b, req.URL.Host...)
		}
		for i, v := range h[name] {
			if i > 0 {
				b = append(b, ',')
			}
			b = appendTrimmed(b, v)
		}
		b = append(b, '\n')
	}
	b = append(b, '\n')
	from := len(b)
	for i, name := range w.names {
		if i > 0 {
			b = append(b, ';')
		}
		b = appendLower(b, name)
	}
	signed := b[from:]
	b = appendAll(b, "\n", h[headerSum][0])
	sum := sha256.Sum256(b)

	k := s.key(secret, stamp[:signDateLen])
	from = len(b)
	b = appendAll(b, signAlgorithm, "\n", stamp, "\n", k.scope, "\n")
	b = hex.AppendEncode(b, sum[:])
	if w.of != k {
		w.mac, w.of = hmac.New(sha256.New, k.key), k
	}
	w.mac.Reset()
	w.mac.Write(b[from:])
	w.sum = w.mac.Sum(w.sum[:0])

	from = len(b)
	b = appendAll(b, signAlgorithm, " Credential=", id, "/", k.scope, ", SignedHeaders=")
	b = appendAll(append(b, signed...), ", Signature=")
	b = hex.AppendEncode(b, w.sum)
	w.buf = b
	values[1] = string(b[from:])
	h[headerAuth] = values[1:]
	return values[1][len(values[1])-2*sha256.Size:]
}

// key is the last one, for as long as secret and date are the same.
func (s *signer) key(secret, date string) *signingKey {
	if k := s.last.Load(); k != nil && k.date == date && k.secret == secret {
		return k
	}
	parts := []string{date, s.region, s.service, "aws4_request"}
	k := &signingKey{secret: secret, date: date, scope: strings.Join(parts, "/"), key: []byte("AWS4" + secret)}
	for _, part := range parts {
		mac := hmac.New(sha256.New, k.key)
		mac.Write([]byte(part))
		k.key = mac.Sum(nil)
	}
	s.last.Store(k)
	return k
}

func appendAll(b []byte, parts ...string) []byte {
	for _, p := range parts {
		b = append(b, p...)
	}
	return b
}

func appendLower(b []byte, s string) []byte {
	for i := range len(s) {
		c := s[i]
		if 'A' <= c && c <= 'Z' {
			c += 'a' - 'A'
		}
		b = append(b, c)
	}
	return b
}

// appendTrimmed appends s with each run of spaces as one, and none around it.
func appendTrimmed(b []byte, s string) []byte {
	from := len(b)
	for f := range strings.FieldsSeq(s) {
		if len(b) > from {
			b = append(b, ' ')
		}
		b = append(b, f...)
	}
	return b
}
