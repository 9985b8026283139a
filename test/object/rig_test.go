package object

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
	"go.uber.org/goleak"

	"github.com/terrace-kv/terrace"
	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/client"
	"github.com/terrace-kv/terrace/internal/content"
	"github.com/terrace-kv/terrace/internal/fault"
	nodes "github.com/terrace-kv/terrace/internal/node"
	"github.com/terrace-kv/terrace/internal/s3"
	"github.com/terrace-kv/terrace/test/object/s3server"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/objtier"
)

var soak = os.Getenv("TERRACE_SOAK") != ""

func TestMain(m *testing.M) {
	for _, name := range []string{"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"} {
		_ = os.Unsetenv(name) // they are not the tests'
	}
	var err error
	if programDir, err = os.MkdirTemp("", "terrace-object-"); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		_ = os.RemoveAll(programDir)
		os.Exit(code)
	}))
}

// sized is n, or long in a soak.
func sized(n, long int) int {
	if soak {
		return long
	}
	return n
}

const (
	bucket  = "blocks"
	waitMax = 60 * time.Second // of every wait for something that must come
)

// eventually waits for something that comes by itself.
func eventually(t *testing.T, within time.Duration, what string, try func() error) {
	t.Helper()
	for end := time.Now().Add(within); ; time.Sleep(5 * time.Millisecond) {
		err := try()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: not within %v: %v", what, within, err)
		}
	}
}

// store is a bucket on a server, and what may never be told of it.
type store struct {
	t        *testing.T
	o        s3.Options
	minio    *minio.Client // independent of ours, and of any proxy
	secrets  []string
	versity  *s3server.Server // nil: gofakes3
	log      *logs
	endpoint string   // of the server itself
	idle     []func() // close connections that nobody uses
}

// calm closes what only waits for use.
func (s *store) calm() {
	for _, f := range s.idle {
		f()
	}
}

// logs collects what is logged.
type logs struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logs) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (s *store) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(s.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// silent fails the test if a text has a secret in it.
func (s *store) silent(where, text string) {
	s.t.Helper()
	for _, secret := range s.secrets {
		if strings.Contains(text, secret) {
			s.t.Errorf("%s has a secret in it: %s", where, text)
		}
	}
}

func newStore(t *testing.T, o s3.Options, transport *http.Transport, secrets ...string) *store {
	t.Helper()
	t.Cleanup(transport.CloseIdleConnections)
	s := &store{t: t, o: o, secrets: secrets, log: &logs{}, endpoint: o.Endpoint, idle: []func(){transport.CloseIdleConnections}}
	var err error
	s.minio, err = minio.New(o.Endpoint, &minio.Options{Creds: credentials.NewStaticV4(o.AccessKey, o.SecretKey, ""), Secure: o.Scheme == "https", Region: o.Region, Transport: transport})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.minio.MakeBucket(t.Context(), bucket, minio.MakeBucketOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.silent("the log", s.log.String())
		if t.Failed() {
			t.Logf("log:\n%s", tail(s.log.String(), 8<<10))
		}
	})
	return s
}

func tail(s string, n int) string {
	if len(s) > n {
		return "…" + s[len(s)-n:]
	}
	return s
}

// versity starts a versitygw with a bucket.
func versity(t *testing.T, tls bool) *store {
	t.Helper()
	srv := s3server.Start(t, s3server.Options{TLS: tls})
	transport, err := minio.DefaultTransport(tls)
	if err != nil {
		t.Fatal(err)
	}
	if tls {
		transport.TLSClientConfig.RootCAs = srv.Roots()
	}
	s := newStore(t, s3.Options{Bucket: bucket, Endpoint: srv.Endpoint, Scheme: srv.Scheme, Region: srv.Region,
		AccessKey: srv.AccessKey, SecretKey: srv.SecretKey, CABundle: srv.CAFile}, transport, srv.SecretKey)
	s.versity = srv
	return s
}

// fake starts a gofakes3 in this process, which takes any credentials. wrap may
// put something before it.
func fake(t *testing.T, wrap func(http.Handler) http.Handler) *store {
	t.Helper()
	h := gofakes3.New(s3mem.New(), gofakes3.WithLogger(gofakes3.DiscardLog())).Server()
	if wrap != nil {
		h = wrap(h)
	}
	srv := httptest.NewUnstartedServer(h)
	srv.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0) // it answers twice at times
	srv.Start()
	t.Cleanup(srv.Close)
	const secret = "secret-5f2b8c"
	transport, err := minio.DefaultTransport(false)
	if err != nil {
		t.Fatal(err)
	}
	return newStore(t, s3.Options{Bucket: bucket, Endpoint: strings.TrimPrefix(srv.URL, "http://"), Scheme: "http", Region: "us-east-1",
		AccessKey: "access", SecretKey: secret}, transport, secret)
}

// proxy puts faults on the wire before the store. What fails at the proxy's
// round tripper drops the connection of whoever asked.
func (s *store) proxy(rules string) *fault.Set {
	s.t.Helper()
	set := fault.MustParse(rules)
	under := &http.Transport{MaxIdleConnsPerHost: 64, DisableCompression: true}
	rt := fault.HTTP(under, set)
	to := &url.URL{Scheme: "http", Host: s.endpoint}
	srv := httptest.NewServer(&httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(to)
			r.Out.Host = r.In.Host // which is signed
		},
		Transport:     rt,
		FlushInterval: -1,
		ErrorHandler:  func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
		ErrorLog:      slog.NewLogLogger(slog.DiscardHandler, 0),
		BufferPool:    new(buffers),
	})
	s.t.Cleanup(func() {
		set.Release()
		srv.Close()
		rt.Wait()
		under.CloseIdleConnections()
	})
	s.o.Endpoint = strings.TrimPrefix(srv.URL, "http://")
	s.idle = append(s.idle, under.CloseIdleConnections)
	return set
}

// buffers of a proxy.
type buffers struct{ pool sync.Pool }

func (b *buffers) Get() []byte {
	if p, ok := b.pool.Get().(*[]byte); ok {
		return *p
	}
	return make([]byte, 64<<10)
}

func (b *buffers) Put(p []byte) { b.pool.Put(&p) }

// open opens a tier on the store.
func (s *store) open(ctx context.Context, mod func(*objtier.Options)) (*objtier.Tier, error) {
	o := objtier.Options{S3: s.o, Logger: s.logger()}
	if mod != nil {
		mod(&o)
	}
	t, err := objtier.Open(ctx, o)
	if err != nil {
		s.silent("the error", err.Error())
	}
	return t, err
}

// tier opens a tier that the test, or its node, closes.
func (s *store) tier(mod func(*objtier.Options)) *objtier.Tier {
	s.t.Helper()
	t, err := s.open(s.t.Context(), mod)
	if err != nil {
		s.t.Fatal(err)
	}
	return t
}

// closeAtEnd closes a tier at the end of the test.
func closeAtEnd(t *testing.T, tr tier.Tier) {
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), waitMax)
		defer cancel()
		if err := tr.Close(ctx); err != nil {
			t.Error(err)
		}
	})
}

// list is what is in the bucket, by key, as another client sees it.
func (s *store) list() map[string]int64 {
	s.t.Helper()
	out := map[string]int64{}
	for o := range s.minio.ListObjects(s.t.Context(), bucket, minio.ListObjectsOptions{Recursive: true}) {
		if o.Err != nil {
			s.t.Fatal(o.Err)
		}
		out[o.Key] = o.Size
	}
	return out
}

// read is an object's bytes, as another client gets them.
func (s *store) read(key string) []byte {
	s.t.Helper()
	o, err := s.minio.GetObject(s.t.Context(), bucket, key, minio.GetObjectOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	defer o.Close()
	b, err := io.ReadAll(o)
	if err != nil {
		s.t.Fatalf("%s: %v", key, err)
	}
	return b
}

// spec of a namespace whose blocks have n bytes.
func spec(n int) block.Spec {
	return block.Spec{Model: "m", DType: "bytes", Layout: "content", HashAlgorithm: "sha256", HashLength: block.HashSize,
		Groups: []block.Group{{Kind: block.KindFull, TokensPerBlock: 16, BlockBytes: uint64(n)}}}
}

func namespace(t testing.TB, n int) *block.Namespace {
	t.Helper()
	ns, err := block.NewNamespace(spec(n))
	if err != nil {
		t.Fatal(err)
	}
	return ns
}

// keys of a prompt, which shares nothing with others.
func keys(name string, n int) []block.Key {
	out := make([]block.Key, n)
	for i := range out {
		h := sha256.Sum256(binary.BigEndian.AppendUint64([]byte(name), uint64(i)))
		out[i], _ = block.NewKey(h[:], 0)
	}
	return out
}

// object is the key of a block's object, made from the description of the
// layout and not by the tier.
func object(prefix string, ns *block.Namespace, key block.Key) string {
	return fmt.Sprintf("%s%s/b/%s", prefix, ns.Fingerprint(), key)
}

const headBytes = 256 // before a block's bytes in its object

// node is a running node with an engine.
type node struct {
	*terrace.Node
	t      *testing.T
	store  *store
	c      *client.Client
	ns     *block.Namespace
	nextID atomic.Int64
	closed bool
}

// start starts a node with tiers, which it owns then.
func start(t *testing.T, s *store, blockBytes int, primary int64, tiers ...terrace.Tier) *node {
	t.Helper()
	o := terrace.Options{Socket: filepath.Join(t.TempDir(), "s"), PrimarySize: primary, Tiers: tiers, Logger: s.logger()}
	tn, err := terrace.Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	n := &node{Node: tn, t: t, store: s, ns: namespace(t, blockBytes)}
	t.Cleanup(n.close)
	if n.c, err = client.Dial(t.Context(), client.Options{Socket: o.Socket, Spec: spec(blockBytes), Engine: "test"}); err != nil {
		t.Fatal(err)
	}
	return n
}

// close ends the node, which must be right and idle by then.
func (n *node) close() {
	if n.closed {
		return
	}
	n.closed = true
	ctx, cancel := context.WithTimeout(context.Background(), waitMax)
	defer cancel()
	if n.c != nil {
		if err := n.CheckInvariants(); err != nil {
			n.t.Error(err)
		}
		n.store.silent("the status", fmt.Sprintf("%+v", n.Status()))
		_ = n.c.Close() // the node may have ended before
	}
	if err := n.Node.Close(ctx); err != nil {
		n.t.Error(err)
	}
}

// idle waits until every table is empty but for the session.
func (n *node) idle() terrace.Status {
	n.t.Helper()
	var st terrace.Status
	eventually(n.t, waitMax, "an idle node", func() error {
		st = n.Status()
		tables := st.Tables
		tables.Sessions = 0
		p := &st.Primary
		if tables.Requests+tables.Pins+tables.Reservations+tables.Jobs+tables.Waits+tables.Quarantined != 0 || p.PinnedBytes+p.FillingBytes+p.QuarantinedBytes != 0 {
			return fmt.Errorf("%+v, %+v", st.Tables, *p)
		}
		return nil
	})
	return st
}

// of is what the status says of a tier.
func of(st *terrace.Status, name string) *nodes.TierStatus {
	for i := range st.Tiers {
		if st.Tiers[i].Name == name {
			return &st.Tiers[i]
		}
	}
	panic("no tier " + name)
}

// request makes a request with an id of its own.
func (n *node) request(ctx context.Context) (*client.Request, error) {
	return n.c.NewRequest(ctx, fmt.Sprint("r", n.nextID.Add(1)), client.NoLimits())
}

// put stores a prompt; with wait its cascades are over when it returns.
func (n *node) put(ctx context.Context, ks []block.Key, wait bool) (client.Stored, error) {
	r, err := n.request(ctx)
	if err != nil {
		return client.Stored{}, err
	}
	st, err := r.Store(ctx, 0, 0, ks, func(i int, dst []byte) (uint64, error) {
		content.Fill(n.ns.Fingerprint(), ks[i], dst)
		return client.Sum(dst), nil
	})
	if err == nil && wait {
		var f client.Flushed
		if f, err = r.Flush(ctx, waitMax); err == nil && (!f.Done || f.Failed > 0) {
			err = fmt.Errorf("flush: %+v", f)
		}
	}
	return st, errors.Join(err, r.Finish(ctx))
}

// get looks a prompt up, checks every byte of what is there, and says how many
// blocks that were. A wrong byte is an error that wraps errWrong.
func (n *node) get(ctx context.Context, ks []block.Key, wait time.Duration) (hits int, err error) {
	r, err := n.request(ctx)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, r.Finish(ctx)) }()
	a, err := r.Lookup(ctx, [][]block.Key{ks}, client.LookupOptions{Wait: wait})
	if err != nil {
		return 0, err
	}
	for i := range int(a.Tokens / 16) {
		l, ok := a.Lease(0, i)
		if !ok {
			break
		}
		err := n.c.View(l, func(b []byte) error {
			if at := content.Check(n.ns.Fingerprint(), ks[i], b); at >= 0 {
				return fmt.Errorf("%w: block %s at byte %d", errWrong, ks[i], at)
			}
			return nil
		})
		if err != nil {
			return hits, err
		}
		hits++
	}
	return hits, nil
}

var errWrong = errors.New("wrong bytes")

// forget empties the primary.
func (n *node) forget() {
	n.t.Helper()
	if done, err := n.c.Reset(n.t.Context(), waitMax); err != nil || !done {
		n.t.Fatalf("reset: %v, %v", done, err)
	}
}

// prefix sets a tier's.
func prefix(p string) func(*objtier.Options) {
	return func(o *objtier.Options) { o.Prefix = p }
}

// counted is a tier that is looked at before it is closed.
type counted struct {
	*objtier.Tier
	look func()
}

func (c counted) Close(ctx context.Context) error {
	c.look()
	return c.Tier.Close(ctx)
}
