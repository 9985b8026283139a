// Package s3 speaks the part of the S3 protocol that a store of blocks needs:
// one object put, got, asked for, listed and removed, each in one signed HTTP
// request, with errors that say whose fault they are.
//
// It retries nothing and keeps nothing: whoever calls decides. All calls may be
// made from many goroutines, block until they are over, and are bounded by
// their context. When Put or Get returns, nothing reads or writes the bytes
// that it was given any more.
package s3

import (
	"context"
	"io"
	"net/http"
	"time"
)

// Addressing styles.
const (
	AddressAuto    = "auto"    // virtual for AWS, path for everything else
	AddressPath    = "path"    // https://endpoint/bucket/key
	AddressVirtual = "virtual" // https://bucket.endpoint/key
)

// Options of a Client.
type Options struct {
	Bucket     string // required
	Endpoint   string // host or host:port, no scheme; empty: AWS, by Region
	Scheme     string // "https", the default, or "http"
	Region     string // default: AWS_REGION, AWS_DEFAULT_REGION, else us-east-1
	Addressing string // default AddressAuto

	// Credentials given here come first. All empty: the environment, the shared
	// files (Profile), web identity, container and instance roles, in that
	// order. Empty is absent: it hides nothing further down.
	AccessKey, SecretKey, SessionToken string
	Profile                            string // of the shared files; default: AWS_PROFILE, else "default"

	CABundle string // file of PEM certificates that are trusted beside the system's

	ConnectTimeout time.Duration // for a connection and its TLS; default 5 s
	HeaderTimeout  time.Duration // from the request sent to the answer's header; default 30 s
	ConnsMax       int           // connections to the endpoint; default 64

	// RoundTripper carries the requests instead of the client's own transport,
	// for tests.
	RoundTripper http.RoundTripper
	Now          func() time.Time // default time.Now
}

// Client is one bucket. See the package comment.
type Client struct{ o Options }

// Body is the content of a Put: parts of memory that are read in order. An HTTP
// transport may go on reading a body after its request has ended; Revoke ends
// that. So memory that only a Body reads is quiet after its Revoke, whatever the
// transport does.
type Body struct{ parts [][]byte }

// NewBody makes a body of parts, which stay the caller's.
func NewBody(parts ...[]byte) *Body { return &Body{parts: parts} }

// Len is the number of bytes in all.
func (b *Body) Len() int64 { return 0 }

// Reader reads the body from its start. Each attempt of a transport gets one of
// its own. Its Close is counted: see Open.
func (b *Body) Reader() io.ReadCloser { return nil }

// Revoke lets every Reader fail from now on, and returns when none is in the
// middle of a read: a copy of at most one buffer.
func (b *Body) Revoke() {}

// Open tells how many Readers are not closed.
func (b *Body) Open() int { return 0 }

// Checksum of an object, in the form that the store can check by itself.
type Checksum struct {
	Algorithm string // ChecksumCRC64NVME, ChecksumCRC32C or "" for none
	Value     uint64
}

// Algorithms of Checksum.
const (
	ChecksumCRC64NVME = "crc64nvme"
	ChecksumCRC32C    = "crc32c"
)

// PutOptions of one Put.
type PutOptions struct {
	Checksum    Checksum
	IfNoneMatch bool   // only if there is no such object: else KindPrecondition
	IfMatch     string // only over the object with this ETag: else KindPrecondition
	ContentType string // default application/octet-stream
}

// Object is what the store says of an object.
type Object struct {
	Key      string
	Size     int64
	ETag     string // with its quotes
	Modified time.Time
}

// Page is a part of a listing.
type Page struct {
	Objects  []Object
	Prefixes []string // common prefixes, with a delimiter
	Next     string   // continuation token; "" at the end
}

// New checks the options and makes a client. It sends nothing.
func New(o Options) (*Client, error) { return &Client{o: o}, nil }

// Put stores an object of body.Len() bytes. The body is revoked when it returns.
func (c *Client) Put(ctx context.Context, key string, body *Body, o PutOptions) (Object, error) {
	return Object{}, nil
}

// Get reads a whole object into parts, in order, and fails with KindLength if
// it does not have exactly as many bytes as they have together. On an error
// their content is undefined.
func (c *Client) Get(ctx context.Context, key string, parts ...[]byte) (Object, error) {
	return Object{}, nil
}

// GetSmall reads a whole object of at most max bytes.
func (c *Client) GetSmall(ctx context.Context, key string, max int) ([]byte, Object, error) {
	return nil, Object{}, nil
}

// Head asks for an object.
func (c *Client) Head(ctx context.Context, key string) (Object, error) { return Object{}, nil }

// Delete removes an object. One that is not there is no error.
func (c *Client) Delete(ctx context.Context, key string) error { return nil }

// DeleteMany removes up to 1,000 objects in one request. failed has those that
// are still there.
func (c *Client) DeleteMany(ctx context.Context, keys []string) (failed []string, err error) {
	return nil, nil
}

// Copy copies an object within the bucket, by the store itself.
func (c *Client) Copy(ctx context.Context, from, to string) error { return nil }

// ListOptions of one List.
type ListOptions struct {
	Prefix    string
	Delimiter string
	After     string // only keys behind this one
	Token     string // of the page before
	Max       int    // objects; default 1,000, which is also the most
}

// List is one page of what there is, by key.
func (c *Client) List(ctx context.Context, o ListOptions) (Page, error) { return Page{}, nil }

// Source says where the credentials come from, such as "environment", never
// what they are.
func (c *Client) Source() string { return "" }

// Requests counts the requests that were sent, by method and outcome.
func (c *Client) Requests() Counts { return Counts{} }

// Counts of requests since the start.
type Counts struct{ Put, Get, Head, Delete, List, Other, Failed int64 }

// Close drops idle connections. Calls must be over.
func (c *Client) Close() {}
