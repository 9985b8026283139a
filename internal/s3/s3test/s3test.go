// Package s3test is a store in memory that speaks enough S3 for tests, and
// fails as it is told. It is an http.Handler for httptest, and an
// http.RoundTripper that needs no sockets and starts no goroutine.
//
// It looks at who signed, not at the signature; a real server in a test of its
// own does that.
package s3test

import (
	"bytes"
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/minio/crc64nvme"
)

// AccessKey may sign, with any secret, if Server.Auth is nil.
const AccessKey = "access"

// Support is what a store makes of a header.
type Support uint8

const (
	Verified Support = iota // does what it says
	Ignored                 // as if it were not there
	Refused                 // 501 NotImplemented
)

// Features of a store. The zero value has all.
type Features struct{ CRC64NVME, CRC32C, Conditional Support }

// Fault is what goes wrong with one request. Its fields may be combined.
type Fault struct {
	Until       <-chan struct{} // before all else: wait for it, or for the request's end
	Done        bool            // the request is carried out first, so only its answer is lost
	Reset       bool            // the connection breaks
	Status      int             // an error with Code
	Code        string
	ErrorInside bool            // status 200, and the error with Code in the body
	Truncate    bool            // half of the body, then the connection breaks
	Stall       <-chan struct{} // half of the body, the rest after this
	Flip        bool            // a byte in the middle of the body is another
	Length      int64           // added to the Content-Length
	Header      http.Header     // added
}

// Object is what a bucket holds. Data is not changed by anybody.
type Object struct {
	Data        []byte
	ETag        string
	ContentType string
	Modified    time.Time
}

// Server is a store. Set the fields before it is used.
type Server struct {
	Features Features
	Fault    func(*http.Request) *Fault           // nil, or nil for no fault; called from many goroutines
	Auth     func(accessKey, token string) string // the code of the refusal, or ""; nil: AccessKey may
	Now      func() time.Time

	// Of S3 Express; nil: there is none. Session makes what its requests are
	// signed with, and SessionAuth is Auth for them.
	Session     func() (accessKey, token string, until time.Time)
	SessionAuth func(accessKey, token string) string

	mu      sync.Mutex
	buckets map[string]map[string]Object
	counts  map[string]int
}

// New makes a store without buckets.
func New() *Server {
	return &Server{Now: time.Now, buckets: map[string]map[string]Object{}, counts: map[string]int{}}
}

// MakeBucket makes a bucket.
func (s *Server) MakeBucket(name string) *Server {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.buckets[name] = map[string]Object{}
	return s
}

// Objects of a bucket, by key.
func (s *Server) Objects(bucket string) map[string]Object {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.buckets[bucket])
}

// Set puts an object into a bucket, or removes it with nil, past all faults.
func (s *Server) Set(bucket, key string, data []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if data == nil {
		delete(s.buckets[bucket], key)
		return
	}
	s.buckets[bucket][key] = s.object(data, "")
}

// Counts of requests by PUT, COPY, GET, HEAD, DELETE, MULTI (a delete of
// several), LIST and SESSION, failed ones too.
func (s *Server) Counts() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.counts)
}

func (s *Server) object(data []byte, contentType string) Object {
	return Object{Data: data, ETag: fmt.Sprintf("%q", strconv.FormatUint(crc64nvme.Checksum(data), 16)), ContentType: contentType, Modified: s.Now()}
}

// answer is a status, a header and a body; or a break of the connection.
type answer struct {
	status int
	header http.Header
	body   []byte
	length int64 // of the header; the body's

	reset bool
	stop  int             // where the body waits or ends; -1 is nowhere
	stall <-chan struct{} // what it waits for; nil ends it
	done  <-chan struct{} // the end of the request
}

func respond(status int, body []byte, header ...string) *answer {
	a := &answer{status: status, header: http.Header{}, body: body, length: int64(len(body)), stop: -1}
	for i := 0; i < len(header); i += 2 {
		a.header.Set(header[i], header[i+1])
	}
	return a
}

func refuse(status int, code string) *answer {
	body := fmt.Sprintf("%s<Error><Code>%s</Code><Message>played by a test</Message><RequestId>R1</RequestId></Error>", xml.Header, code)
	return respond(status, []byte(body), "Content-Type", "application/xml")
}

func document(v any) *answer {
	body, err := xml.Marshal(v)
	if err != nil {
		return refuse(http.StatusInternalServerError, "InternalError")
	}
	return respond(http.StatusOK, append([]byte(xml.Header), body...), "Content-Type", "application/xml")
}

// serve is one request, whose body it reads to its end.
func (s *Server) serve(r *http.Request) *answer {
	ctx := r.Context()
	op, bucket, key := s.route(r)
	s.mu.Lock()
	s.counts[op]++
	s.mu.Unlock()
	f := &Fault{}
	if s.Fault != nil {
		if g := s.Fault(r); g != nil {
			f = g
		}
	}
	if f.Until != nil {
		select {
		case <-f.Until:
		case <-ctx.Done():
			return &answer{reset: true}
		}
	}
	if f.Reset && !f.Done {
		return &answer{reset: true}
	}
	var body []byte
	if r.Body != nil {
		var err error
		if body, err = readAll(r); err != nil {
			return &answer{reset: true}
		}
	}
	var a *answer
	if f.Done || f.Status == 0 && !f.ErrorInside {
		a = s.carryOut(r, op, bucket, key, body)
	}
	switch {
	case f.Reset:
		a.reset = true
	case f.Status != 0:
		a = refuse(f.Status, f.Code)
	case f.ErrorInside:
		a = refuse(http.StatusOK, f.Code)
	}
	maps.Copy(a.header, f.Header)
	a.length += f.Length
	a.done = ctx.Done()
	if f.Truncate || f.Stall != nil {
		a.stop, a.stall = len(a.body)/2, f.Stall
	}
	if f.Flip && len(a.body) > 0 {
		a.body = bytes.Clone(a.body)
		a.body[len(a.body)/2] ^= 0x10
	}
	return a
}

func readAll(r *http.Request) ([]byte, error) {
	if r.ContentLength < 0 {
		return io.ReadAll(r.Body)
	}
	body := make([]byte, r.ContentLength)
	_, err := io.ReadFull(r.Body, body)
	return body, err
}

// route says what a request asks for. A bucket is in the path or in the host.
func (s *Server) route(r *http.Request) (op, bucket, key string) {
	host := r.Host
	if host == "" {
		host = r.URL.Host
	}
	key = strings.TrimPrefix(r.URL.Path, "/")
	s.mu.Lock()
	for name := range s.buckets {
		if strings.HasPrefix(host, name+".") {
			bucket = name
		}
	}
	s.mu.Unlock()
	if bucket == "" {
		bucket, key, _ = strings.Cut(key, "/")
	}
	q := r.URL.Query()
	op = r.Method
	switch {
	case op == http.MethodGet && q.Has("session"):
		op = "SESSION"
	case op == http.MethodGet && q.Get("list-type") == "2":
		op = "LIST"
	case op == http.MethodPost && q.Has("delete"):
		op = "MULTI"
	case op == http.MethodPut && r.Header.Get("X-Amz-Copy-Source") != "":
		op = "COPY"
	}
	return op, bucket, key
}

// ServeHTTP answers over a connection.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a := s.serve(r)
	if a.reset {
		panic(http.ErrAbortHandler)
	}
	maps.Copy(w.Header(), a.header)
	if a.status != http.StatusNoContent {
		w.Header().Set("Content-Length", strconv.FormatInt(a.length, 10))
	}
	w.WriteHeader(a.status)
	if r.Method == http.MethodHead {
		return
	}
	if a.stop >= 0 {
		_, _ = w.Write(a.body[:a.stop])
		_ = http.NewResponseController(w).Flush()
	}
	if _, err := io.Copy(w, &reader{a: a, off: max(a.stop, 0)}); err != nil {
		panic(http.ErrAbortHandler)
	}
}

// RoundTripper answers without a connection, in the caller's goroutine.
func (s *Server) RoundTripper() http.RoundTripper { return roundTripper{s} }

type roundTripper struct{ s *Server }

var errReset = errors.New("s3test: connection reset")

func (t roundTripper) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		defer r.Body.Close()
	}
	a := t.s.serve(r)
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	if a.reset {
		return nil, errReset
	}
	resp := &http.Response{
		Status: http.StatusText(a.status), StatusCode: a.status, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: a.header, ContentLength: a.length, Body: http.NoBody, Request: r,
	}
	if r.Method != http.MethodHead {
		resp.Body = &reader{a: a}
	}
	return resp, nil
}

// reader reads the body of an answer, with its faults.
type reader struct {
	a   *answer
	off int
}

func (r *reader) Read(p []byte) (int, error) {
	a := r.a
	end := len(a.body)
	if a.stop >= 0 && r.off <= a.stop {
		if end = a.stop; r.off == end {
			if a.stall == nil {
				return 0, io.ErrUnexpectedEOF
			}
			select {
			case <-a.stall:
				a.stop, end = -1, len(a.body)
			case <-a.done:
				return 0, context.Canceled
			}
		}
	}
	if r.off == end {
		if int64(end) < a.length {
			return 0, io.ErrUnexpectedEOF
		}
		return 0, io.EOF
	}
	n := copy(p, a.body[r.off:end])
	r.off += n
	return n, nil
}

func (r *reader) Close() error { return nil }
