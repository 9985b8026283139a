package s3

import (
	"net/http"
	"sync/atomic"
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
	Region     string // default: AWS_REGION, AWS_DEFAULT_REGION, the shared files, else us-east-1
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
	Now          func() time.Time // default time.Now; of the age of credentials

	credsRoundTripper http.RoundTripper // carries the chain's requests, for tests
}

// Client is one bucket. See the package comment.
type Client struct {
	o       Options
	at      address
	rt      http.RoundTripper
	own     *http.Transport // nil with Options.RoundTripper
	signer  *signer
	creds   *source
	session *source // of S3 Express; nil elsewhere

	puts, gets, heads, deletes, lists, others, failed atomic.Int64
}

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
func New(o Options) (*Client, error) {
	if o.ConnectTimeout == 0 {
		o.ConnectTimeout = connectTimeoutDefault
	}
	if o.HeaderTimeout == 0 {
		o.HeaderTimeout = headerTimeoutDefault
	}
	if o.ConnsMax == 0 {
		o.ConnsMax = connsMaxDefault
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	at, err := newAddress(&o)
	if err != nil {
		return nil, err
	}
	roots, err := trusted(o.CABundle)
	if err != nil {
		return nil, err
	}
	c := &Client{o: o, at: at, rt: o.RoundTripper}
	if c.rt == nil {
		c.own = newTransport(&o, roots)
		c.rt = c.own
	}
	if c.creds, err = newCreds(&c.o, at.region, roots); err != nil {
		return nil, err
	}
	service := "s3"
	if at.express {
		service = "s3express"
		c.session = newSource(o.Now, c.createSession)
	}
	c.signer = newSigner(at.region, service)
	return c, nil
}

// Where is scheme, endpoint and bucket, as errors have them.
func (c *Client) Where() string { return c.at.where }

// Region is the one that requests are signed for.
func (c *Client) Region() string { return c.at.region }

// Source says where the credentials come from, never what they are: "options",
// "environment", "shared files", "web identity", "container role" or "instance
// role". It is "" until the chain has found some, with the first request.
func (c *Client) Source() string { return c.creds.name() }

// Requests counts the requests that were sent, by method and outcome.
func (c *Client) Requests() Counts {
	return Counts{
		Put: c.puts.Load(), Get: c.gets.Load(), Head: c.heads.Load(), Delete: c.deletes.Load(),
		List: c.lists.Load(), Other: c.others.Load(), Failed: c.failed.Load(),
	}
}

// Counts of requests since the start. Delete has those of DeleteMany; what is
// not there, or there already, is not Failed.
type Counts struct{ Put, Get, Head, Delete, List, Other, Failed int64 }

// Close drops idle connections. Calls must be over.
func (c *Client) Close() {
	if c.session != nil {
		c.session.close()
	}
	c.creds.close()
	if c.own != nil {
		c.own.CloseIdleConnections()
	}
}
