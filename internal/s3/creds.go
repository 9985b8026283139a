package s3

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/minio/minio-go/v7/pkg/credentials"
)

const (
	fetchTimeout  = 10 * time.Second // of one retrieval, whoever waits for it
	fetchEvery    = time.Second      // at most, for what failed or was refused
	renewEarlyMax = 5 * time.Minute  // before the end of credentials
)

var errClosed = errors.New("the client is closed")

// source hands out credentials that are good for at least one request, and
// renews them before they end: whoever asks while they are still good is not
// held up, and starts the renewal. One is under way at a time, in a goroutine
// for which close waits.
type source struct {
	now   func() time.Time
	fetch func(context.Context) (v credentials.Value, from string, err error) // nil: v is all there is

	ctx    context.Context // of the client's life
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu      sync.Mutex
	v       credentials.Value // zero: none yet
	from    string
	fetched time.Time // when the last fetch ended, or failed
	renewAt time.Time // zero: v has no end
	err     error     // of the last fetch
	flight  *flight   // nil: none under way
	closed  bool
}

// flight is one fetch under way.
type flight struct {
	done chan struct{}   // closed after v or err of the source are set
	ctx  context.Context // ends at the latest after fetchTimeout
}

func newSource(now func() time.Time, fetch func(context.Context) (credentials.Value, string, error)) *source {
	s := &source{now: now, fetch: fetch}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

// fixedSource has credentials that do not change.
func fixedSource(v credentials.Value, from string) *source {
	s := newSource(time.Now, nil)
	s.v, s.from = v, from
	return s
}

// get waits only if there are no good credentials, and not beyond ctx.
func (s *source) get(ctx context.Context) (credentials.Value, error) {
	return s.other(ctx, credentials.Value{})
}

// other is get for somebody whose credentials were refused. If there are none
// but these, or they are brand-new, they are what it returns.
func (s *source) other(ctx context.Context, refused credentials.Value) (credentials.Value, error) {
	s.mu.Lock()
	now := s.now()
	good := s.v.AccessKeyID != "" && (s.v.Expiration.IsZero() || now.Before(s.v.Expiration))
	recent := now.Sub(s.fetched) < fetchEvery && !s.fetched.IsZero()
	v, err := s.v, s.err
	switch {
	case s.fetch == nil, good && same(v, refused) && recent:
		s.mu.Unlock()
		return v, nil
	case good && !same(v, refused):
		if !s.renewAt.IsZero() && !now.Before(s.renewAt) && !s.closed {
			s.startLocked()
		}
		s.mu.Unlock()
		return v, nil
	case s.closed:
		s.mu.Unlock()
		return credentials.Value{}, errClosed
	case s.flight == nil && err != nil && recent:
		s.mu.Unlock()
		return credentials.Value{}, err
	}
	f := s.startLocked()
	s.mu.Unlock()

	select {
	case <-f.done:
	case <-ctx.Done():
		return credentials.Value{}, ctx.Err()
	case <-f.ctx.Done():
		select {
		case <-f.done: // both: it ended
		default:
			return credentials.Value{}, fmt.Errorf("no credentials within %v", fetchTimeout)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return credentials.Value{}, s.err
	}
	return s.v, nil
}

// startLocked starts a fetch, if none is under way.
func (s *source) startLocked() *flight {
	if s.flight != nil {
		return s.flight
	}
	ctx, cancel := context.WithTimeout(s.ctx, fetchTimeout)
	f := &flight{done: make(chan struct{}), ctx: ctx}
	s.flight = f
	s.wg.Go(func() {
		defer cancel()
		v, from, err := s.fetch(ctx)
		now := s.now()
		if err == nil && !v.Expiration.IsZero() && !now.Before(v.Expiration) {
			err = fmt.Errorf("credentials from %s ended at %s, before they came", from, v.Expiration.Format(time.RFC3339))
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.fetched, s.err, s.flight = now, err, nil
		switch left := s.v.Expiration.Sub(now); {
		case err == nil:
			s.v, s.from, s.renewAt = v, from, time.Time{}
			if !v.Expiration.IsZero() {
				life := v.Expiration.Sub(now)
				s.renewAt = v.Expiration.Add(-min(life/5, renewEarlyMax))
			}
		case left > 0: // those before are still good: try again in time
			s.renewAt = now.Add(max(left/10, fetchEvery))
		}
		close(f.done)
	})
	return f
}

// close ends a fetch and waits for it; one that does not heed its context, such
// as a credential process that hangs, is left to the end of the process.
func (s *source) close() {
	s.mu.Lock()
	s.closed = true
	f := s.flight
	s.mu.Unlock()
	s.cancel()
	if f == nil {
		return
	}
	t := time.NewTimer(fetchTimeout)
	defer t.Stop()
	select {
	case <-f.done:
	case <-t.C:
	}
}

func (s *source) name() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.from
}

func same(a, b credentials.Value) bool {
	return a.AccessKeyID == b.AccessKeyID && a.SecretAccessKey == b.SecretAccessKey && a.SessionToken == b.SessionToken
}
