package s3

import "fmt"

// Kind says what an error means to whoever has to decide.
type Kind uint8

const (
	KindOther        Kind = iota // an answer that fits nothing below
	KindNotFound                 // NoSuchKey, or 404 to a HEAD
	KindPrecondition             // 412: the condition of a Put does not hold
	KindConflict                 // 409: another conditional write is under way; may pass
	KindThrottled                // 503, SlowDown, 429: may pass, and means slower
	KindServer                   // other 5xx, or an error document in a 200: may pass
	KindNetwork                  // refused, reset, timed out, no such host: may pass
	KindTLS                      // a certificate that is not trusted, or no TLS at all
	KindCredentials              // none, unknown, a wrong secret
	KindExpired                  // credentials that were good: ExpiredToken and kin
	KindPermission               // AccessDenied
	KindBucket                   // NoSuchBucket
	KindRegion                   // the bucket is in another region; Message names it
	KindClock                    // RequestTimeTooSkewed
	KindDigest                   // the store received other bytes than were sent
	KindUnsupported              // 501, or a header that the store does not know
	KindLength                   // a body shorter or longer than it should be
	KindMalformed                // a document that cannot be read
	KindCancelled                // the context ended
)

// Error is the failure of one request. It never holds a secret.
type Error struct {
	Op        string // "PUT", "LIST", …
	Where     string // scheme, endpoint and bucket
	Key       string
	Kind      Kind
	Status    int    // 0: there was no answer
	Code      string // of the store's error document
	Message   string // of it, cut to a line
	RequestID string
	Err       error // what happened below, if it was not an answer
}

func (e *Error) Error() string {
	s := fmt.Sprintf("%s %s/%s:", e.Op, e.Where, e.Key)
	if e.Status != 0 {
		s += fmt.Sprintf(" status %d", e.Status)
	}
	if e.Code != "" {
		s += " " + e.Code
	}
	if e.Message != "" {
		s += fmt.Sprintf(" %q", e.Message)
	}
	if e.RequestID != "" {
		s += " request " + e.RequestID
	}
	if e.Err != nil {
		s += fmt.Sprintf(" %v", e.Err)
	}
	return s
}

func (e *Error) Unwrap() error { return e.Err }
