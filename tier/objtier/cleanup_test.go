package objtier_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/terrace-kv/terrace"
	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/client"
	"github.com/terrace-kv/terrace/internal/content"
	"github.com/terrace-kv/terrace/internal/s3"
	"github.com/terrace-kv/terrace/internal/s3/s3test"
	"github.com/terrace-kv/terrace/tier/objtier"
)

const blockBytes = 8192

var spec = block.Spec{Model: "m", DType: "bytes", Layout: "content", HashAlgorithm: "sha256", HashLength: 32,
	Groups: []block.Group{{Kind: block.KindFull, TokensPerBlock: 16, BlockBytes: blockBytes}}}

func fingerprint(t *testing.T) block.Fingerprint {
	t.Helper()
	ns, err := block.NewNamespace(spec)
	if err != nil {
		t.Fatal(err)
	}
	return ns.Fingerprint()
}

func key(i byte) block.Key { return block.Key{0: i, 31: 7} }

// script is a transport whose transfers are driven by the test. They copy at
// once, so that their outcome may be known, and keep looking at their buffers
// until they are released.
type script struct {
	server *s3test.Server // of the requests that are no transfers

	poll    func(ctx context.Context, op *objtier.Op) (objtier.Status, error)
	release func(op *objtier.Op, attempt int) error

	posted, polled, released atomic.Int64
}

type scripted struct {
	t        *script
	op       *objtier.Op
	attempts int
}

func (s *script) Post(_ context.Context, op *objtier.Op) (objtier.Handle, error) {
	s.posted.Add(1)
	return &scripted{t: s, op: op}, nil
}

func (h *scripted) Poll(ctx context.Context) (objtier.Status, error) {
	h.t.polled.Add(1)
	if h.t.poll != nil {
		if st, err := h.t.poll(ctx, h.op); !st.Done || err != nil {
			return st, err
		}
	}
	if h.op.Put {
		h.t.server.Set("b", h.op.Key, append(bytes.Clone(h.op.Head), h.op.Buf...))
	} else if o, ok := h.t.server.Objects("b")[h.op.Key]; ok {
		copy(h.op.Buf, o.Data[copy(h.op.Head, o.Data):])
	} else {
		return objtier.Status{Done: true, Err: &s3.Error{Op: "GET", Kind: s3.KindNotFound}}, nil
	}
	return objtier.Status{Done: true}, nil
}

func (h *scripted) Release() error {
	h.attempts++
	if h.t.release != nil {
		if err := h.t.release(h.op, h.attempts); err != nil {
			return err
		}
	}
	h.t.released.Add(1)
	return nil
}

// bed is a node over an object tier whose transport is a script, and an engine.
type bed struct {
	*testing.T
	s *script
	n *terrace.Node
	c *client.Client
}

func newBed(t *testing.T, blocks int, mod func(*terrace.Options)) *bed {
	t.Helper()
	s := &script{server: s3test.New().MakeBucket("b")}
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	ot, err := objtier.Open(t.Context(), objtier.Options{Transport: s, Logger: log, ListPerSecond: -1,
		S3: s3.Options{Bucket: "b", Endpoint: "store", Scheme: "http", AccessKey: s3test.AccessKey, SecretKey: "secret", RoundTripper: s.server.RoundTripper()}})
	if err != nil {
		t.Fatal(err)
	}
	o := terrace.Options{Socket: filepath.Join(t.TempDir(), "s"), PrimarySize: int64(blocks) * blockBytes, Tiers: []terrace.Tier{{Tier: ot}}, Logger: log}
	if mod != nil {
		mod(&o)
	}
	n, err := terrace.Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	c, err := client.Dial(t.Context(), client.Options{Socket: o.Socket, Spec: spec})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := errors.Join(c.Close(), n.Close(ctx)); err != nil && !t.Failed() {
			t.Error(err)
		}
	})
	return &bed{T: t, s: s, n: n, c: c}
}

// request begins a request of the test's.
func (b *bed) request(id string) *client.Request {
	b.Helper()
	r, err := b.c.NewRequest(b.Context(), id, client.NoLimits())
	if err != nil {
		b.Fatal(err)
	}
	return r
}

func (b *bed) store(r *client.Request, keys ...block.Key) {
	b.Helper()
	fp := fingerprint(b.T)
	st, err := r.Store(b.Context(), 0, 0, keys, func(i int, dst []byte) (uint64, error) {
		content.Fill(fp, keys[i], dst)
		return client.Sum(dst), nil
	})
	if err != nil || st.Stored != len(keys) {
		b.Fatalf("%+v, %v", st, err)
	}
}

// eventually waits until the node's status is as it should be.
func (b *bed) eventually(what string, ok func(s terrace.Status) bool) {
	b.Helper()
	for end := time.Now().Add(20 * time.Second); ; {
		s := b.n.Status()
		if ok(s) {
			return
		}
		if time.Now().After(end) {
			b.Fatalf("%s: tables %+v, primary %+v, tier %+v", what, s.Tables, s.Primary, s.Tiers[0])
		}
		time.Sleep(time.Millisecond)
	}
}

func failures(s terrace.Status) (n int64) {
	for _, k := range s.Tiers[0].Failures {
		n += k
	}
	return n
}

var errBroken = errors.New("the handle does not answer")

// The reference's fault: the state check of a transfer fails, and so does the
// release of its handle, once. Nothing of the job may be forgotten before the
// release has succeeded: else its block stays pinned for ever, or its memory is
// used again under the transfer. Then everything is, and the outcome is told once.
func TestCleanupFailureKeepsCompletion(t *testing.T) {
	for _, dir := range []string{"store", "load"} {
		t.Run(dir, func(t *testing.T) {
			b := newBed(t, 8, nil)
			r := b.request("r")
			put := dir == "store"
			if !put { // have it below only
				b.store(r, key(1))
				if f, err := r.Flush(t.Context(), 10*time.Second); err != nil || !f.Done || f.Failed != 0 {
					t.Fatalf("%+v, %v", f, err)
				}
				if done, err := b.c.Reset(t.Context(), 10*time.Second); err != nil || !done {
					t.Fatal(done, err)
				}
			}
			failedOnce, proceed := make(chan struct{}), make(chan struct{})
			b.s.poll = func(context.Context, *objtier.Op) (objtier.Status, error) { return objtier.Status{}, errBroken }
			b.s.release = func(_ *objtier.Op, attempt int) error {
				if attempt == 1 {
					close(failedOnce)
					return errBroken
				}
				<-proceed // the retry
				return nil
			}
			before := b.s.released.Load()
			answer := make(chan *client.Answer, 1)
			if put {
				b.store(r, key(1))
			} else {
				go func() {
					a, err := r.Lookup(context.Background(), [][]block.Key{{key(1)}}, client.LookupOptions{Wait: 30 * time.Second})
					if err != nil {
						t.Error(err)
					}
					answer <- a
				}()
			}
			<-failedOnce
			kept := func(s terrace.Status) bool {
				memory := s.Primary.PinnedBytes
				if !put {
					memory = s.Primary.FillingBytes
				}
				return s.Tables.Jobs == 1 && memory == blockBytes && failures(s) == 0
			}
			b.eventually("the job, its slot and its transfer are kept", kept)
			if put {
				if f, err := r.Flush(t.Context(), 10*time.Millisecond); err != nil || f.Done {
					t.Errorf("nothing is pending: %+v, %v", f, err)
				}
			}
			if s := b.n.Status(); !kept(s) || b.s.released.Load() != before {
				t.Errorf("gone before the release: %+v %+v", s.Tables, s.Primary)
			}
			close(proceed)
			b.eventually("all is given back", func(s terrace.Status) bool {
				return s.Tables.Jobs == 0 && s.Primary.PinnedBytes == 0 && s.Primary.FillingBytes == 0 && s.Primary.QuarantinedBytes == 0 && failures(s) == 1
			})
			if put {
				if f, err := r.Flush(t.Context(), 10*time.Second); err != nil || !f.Done || f.Failed != 1 {
					t.Errorf("flush %+v, %v", f, err)
				}
			} else if a := <-answer; a == nil || a.Tokens != 0 {
				t.Errorf("answer %+v", a)
			}
			if s := b.n.Status(); b.s.released.Load() != before+1 || s.Tiers[0].Late != 0 || failures(s) != 1 {
				t.Errorf("%d releases, %d late results, %d failures, want 1, 0, 1", b.s.released.Load()-before, s.Tiers[0].Late, failures(s))
			}
			if err := b.n.CheckInvariants(); err != nil {
				t.Error(err)
			}
			if err := r.Finish(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// A transport goes on reading a slot after the call's context has ended. The
// job is reported failed on time, the slot is nobody else's until the transport
// lets go, and the outcome is told once.
func TestLingeringTransport(t *testing.T) {
	const bound = 200 * time.Millisecond
	b := newBed(t, 4, func(o *terrace.Options) {
		o.Bounds.CascadeTimeout = bound
		o.Tiers[0].Lane.Retry.Attempts = 1
	})
	fp := fingerprint(t)
	lingers, letGo := make(chan *objtier.Op, 1), make(chan struct{})
	b.s.poll = func(ctx context.Context, _ *objtier.Op) (objtier.Status, error) {
		<-ctx.Done()
		return objtier.Status{}, nil
	}
	b.s.release = func(op *objtier.Op, attempt int) error {
		if off := content.Check(fp, op.Block, op.Buf); off >= 0 {
			t.Errorf("the slot was used again at byte %d while the transport reads it", off)
		}
		if attempt == 1 {
			lingers <- op
			return errBroken
		}
		select {
		case <-letGo:
			return nil
		default:
			return errBroken
		}
	}
	r := b.request("r")
	began := time.Now()
	b.store(r, key(1))
	f, err := r.Flush(t.Context(), 10*time.Second)
	if took := time.Since(began); err != nil || !f.Done || f.Failed != 1 || took > bound+5*time.Second {
		t.Fatalf("failure told after %v: %+v, %v", took, f, err)
	}
	op := <-lingers
	// Everybody wants room now, and the block itself may go; its slot may not.
	for i := byte(2); i < 20; i++ {
		_, _ = r.Store(t.Context(), 0, int(i), []block.Key{key(i)}, func(_ int, dst []byte) (uint64, error) {
			content.Fill(fp, key(i), dst)
			return client.Sum(dst), nil
		}) // with or without room
		if off := content.Check(fp, op.Block, op.Buf); off >= 0 {
			t.Fatalf("the slot was used again at byte %d", off)
		}
	}
	close(letGo)
	b.eventually("all is given back", func(s terrace.Status) bool {
		return s.Tables.Jobs == 0 && s.Primary.PinnedBytes == 0 && s.Primary.QuarantinedBytes == 0
	})
	if posted, released := b.s.posted.Load(), b.s.released.Load(); posted != released {
		t.Errorf("%d transfers, %d releases", posted, released)
	}
	if err := b.n.CheckInvariants(); err != nil {
		t.Error(err)
	}
	if err := r.Finish(t.Context()); err != nil {
		t.Error(err)
	}
}
