package objtier

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/s3"
	"github.com/terrace-kv/terrace/tier"
)

// verdict is what a kind of error means to the node.
type verdict struct {
	class tier.Class
	cause tier.Cause
	down  bool // every other call would fail in the same way
	what  string
	hint  string
}

var verdicts = map[s3.Kind]verdict{
	s3.KindOther:       {tier.ClassPermanent, tier.CauseOther, false, "answer", "the store answered what Terrace does not know; its own log may say more"},
	s3.KindConflict:    {tier.ClassRetryable, tier.CauseOther, false, "conflict", ""},
	s3.KindThrottled:   {tier.ClassRetryable, tier.CauseThrottled, false, "throttling", "the store asks for fewer requests; lower requests_per_second or workers if it goes on"},
	s3.KindServer:      {tier.ClassRetryable, tier.CauseUnavailable, false, "store", "the store failed; its own log may say more"},
	s3.KindNetwork:     {tier.ClassRetryable, tier.CauseNetwork, false, "endpoint", "check endpoint, scheme, proxy and that the store runs"},
	s3.KindDigest:      {tier.ClassRetryable, tier.CauseChecksum, false, "checksum", "the store received other bytes than were sent: a bad network path"},
	s3.KindMalformed:   {tier.ClassRetryable, tier.CauseNetwork, false, "answer", "something between may have answered instead of the store, such as a proxy"},
	s3.KindLength:      {tier.ClassRetryable, tier.CauseShort, false, "length", "something between may cut answers, such as a proxy"},
	s3.KindTLS:         {tier.ClassPermanent, tier.CauseConfig, true, "TLS", "set ca_bundle to the authority of the store's certificate, or correct endpoint or scheme"},
	s3.KindCredentials: {tier.ClassPermanent, tier.CauseCredentials, true, "credentials", "correct access_key and secret_key, or what the credential chain finds"},
	s3.KindExpired:     {tier.ClassPermanent, tier.CauseCredentials, true, "credentials", "they have expired and were refreshed in vain: renew what hands them out"},
	s3.KindPermission:  {tier.ClassPermanent, tier.CausePermission, true, "permission", "allow s3:ListBucket on the bucket and s3:GetObject, s3:PutObject, s3:DeleteObject below the prefix"},
	s3.KindBucket:      {tier.ClassPermanent, tier.CauseConfig, true, "bucket", "make the bucket, or correct bucket, endpoint or addressing"},
	s3.KindRegion:      {tier.ClassPermanent, tier.CauseConfig, true, "region", "set region to the one the store names"},
	s3.KindClock:       {tier.ClassPermanent, tier.CauseConfig, true, "clock", "set this machine's clock: signatures are only good for minutes"},
	s3.KindUnsupported: {tier.ClassPermanent, tier.CauseOther, false, "feature", "the store lacks it; set checksum or conditional off"},
}

// explain turns an error of the client into one of the tier. A block that is
// not there is tier.ErrNotFound.
func (t *Tier) explain(op string, key block.Key, err error) error {
	var te *tier.Error
	if err == nil || errors.As(err, &te) {
		return err
	}
	out := &tier.Error{Op: op, Tier: t.o.Name, Key: key, Class: tier.ClassPermanent, Err: err}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		out.Class = tier.ClassCancelled
		if errors.Is(err, context.DeadlineExceeded) {
			out.Cause = tier.CauseTimeout
		}
		return out
	}
	var se *s3.Error
	if !errors.As(err, &se) {
		return out
	}
	if se.Kind == s3.KindNotFound {
		return tier.ErrNotFound
	}
	v := verdicts[se.Kind]
	if se.Kind == s3.KindLength && !errors.Is(err, io.ErrUnexpectedEOF) {
		// The answer was whole, and of another size than a block of this key has.
		v = verdict{class: tier.ClassCorrupt, cause: tier.CauseShort}
	}
	out.Class, out.Cause, out.Down, out.Hint = v.class, v.cause, v.down, v.hint
	return out
}

// openErr says in one message which part of the settings or of the world keeps
// the tier from opening, and what to do.
func (t *Tier) openErr(doing string, err error) error {
	what, hint := "store", ""
	var se *s3.Error
	if errors.As(err, &se) {
		v := verdicts[se.Kind]
		what, hint = v.what, v.hint
		if se.Kind == s3.KindNotFound {
			what, hint = "store", "what was just written is not there: is this endpoint an S3 store?"
		}
	} else if errors.Is(err, context.DeadlineExceeded) {
		what, hint = "endpoint", "it does not answer: "+verdicts[s3.KindNetwork].hint
	}
	if hint != "" {
		hint = " (" + hint + ")"
	}
	return fmt.Errorf("object tier %s: %s: cannot %s %s: %w%s", t.o.Name, what, doing, t.where, err, hint)
}

func kindOf(err error) s3.Kind {
	var se *s3.Error
	if errors.As(err, &se) {
		return se.Kind
	}
	return s3.KindOther
}
