package s3

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/xml"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"
	"unicode/utf8"
)

const (
	errorDocMax     = 64 << 10        // bytes read of an error document
	errorDocTimeout = 5 * time.Second // to read them: the status alone says enough
	messageMax      = 200             // bytes
	tokenMax        = 80              // bytes of codes, regions and ids
)

// errorDoc is the part of an error document that is of use. Others of its
// fields hold what was signed, and are never looked at.
type errorDoc struct {
	XMLName   xml.Name
	Code      string `xml:"Code"`
	Message   string `xml:"Message"`
	RequestID string `xml:"RequestId"`
	Region    string `xml:"Region"`
	Endpoint  string `xml:"Endpoint"`
}

// parseErrorDoc says whether data is an error document.
func parseErrorDoc(data []byte) (d errorDoc, ok bool) {
	if err := xml.Unmarshal(data, &d); err != nil || d.XMLName.Local != "Error" {
		return errorDoc{}, false
	}
	d.Code, d.RequestID, d.Region, d.Endpoint = token(d.Code), token(d.RequestID), token(d.Region), token(d.Endpoint)
	return d, true
}

// codes has what the codes of stores mean. AWS, MinIO, Ceph and GCS agree on
// most of them.
var codes = map[string]Kind{
	"NoSuchKey": KindNotFound, "NoSuchVersion": KindNotFound, "NotFound": KindNotFound,
	"PreconditionFailed":         KindPrecondition,
	"ConditionalRequestConflict": KindConflict, "OperationAborted": KindConflict,
	"SlowDown": KindThrottled, "ServiceUnavailable": KindThrottled, "RequestLimitExceeded": KindThrottled,
	"TooManyRequests": KindThrottled, "Throttling": KindThrottled, "ThrottlingException": KindThrottled,
	"RequestThrottled": KindThrottled, "BandwidthLimitExceeded": KindThrottled, "SlowDownRead": KindThrottled, "SlowDownWrite": KindThrottled,
	"InternalError":  KindServer,
	"RequestTimeout": KindNetwork, "IncompleteBody": KindNetwork,
	"InvalidAccessKeyId": KindCredentials, "SignatureDoesNotMatch": KindCredentials, "InvalidToken": KindCredentials,
	"InvalidSecurity": KindCredentials, "CredentialsNotSupported": KindCredentials, "NotSignedUp": KindCredentials,
	"AuthorizationHeaderMalformed": KindCredentials, "InvalidTokenId": KindCredentials,
	"XAdminUserNotFound": KindCredentials, // versitygw, with 404
	"ExpiredToken":       KindExpired, "ExpiredTokenException": KindExpired, "TokenRefreshRequired": KindExpired,
	"AccessDenied": KindPermission, "AllAccessDisabled": KindPermission, "AccountProblem": KindPermission, "UnauthorizedAccess": KindPermission,
	"NoSuchBucket": KindBucket, "InvalidBucketName": KindBucket, "NoSuchTenant": KindBucket,
	"PermanentRedirect": KindRegion, "TemporaryRedirect": KindRegion, "Redirect": KindRegion, "IllegalLocationConstraintException": KindRegion,
	"RequestTimeTooSkewed": KindClock, "RequestExpired": KindClock,
	"BadDigest": KindDigest, "InvalidDigest": KindDigest, "XAmzContentSHA256Mismatch": KindDigest, "XAmzContentChecksumMismatch": KindDigest,
	"NotImplemented": KindUnsupported, "XNotImplemented": KindUnsupported, "MethodNotAllowed": KindUnsupported, "UnsupportedOperation": KindUnsupported,
}

// kindOf says what an answer means. 403 and 404 without a document are what a
// HEAD gets.
func kindOf(status int, code string) Kind {
	if k, ok := codes[code]; ok {
		return k
	}
	switch {
	case status >= 300 && status < 400 && status != http.StatusNotModified:
		return KindRegion
	case status == http.StatusUnauthorized:
		return KindCredentials
	case status == http.StatusForbidden:
		return KindPermission
	case status == http.StatusNotFound && code == "":
		return KindNotFound
	case status == http.StatusPreconditionFailed:
		return KindPrecondition
	case status == http.StatusConflict:
		return KindConflict
	case status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable:
		return KindThrottled
	case status == http.StatusNotImplemented || status == http.StatusMethodNotAllowed:
		return KindUnsupported
	case status == http.StatusRequestTimeout:
		return KindNetwork
	case status >= 500:
		return KindServer
	case status == http.StatusOK: // an error document inside a success
		return KindServer
	}
	return KindOther
}

// answerError makes the error of an answer, of whose body data has the start.
func (c *Client) answerError(r *request, resp *http.Response, data []byte) *Error {
	e := r.error(c, nil)
	e.Status = resp.StatusCode
	e.RequestID = token(resp.Header.Get("X-Amz-Request-Id"))
	d, isDoc := parseErrorDoc(data)
	e.Code = d.Code
	if d.RequestID != "" {
		e.RequestID = d.RequestID
	}
	e.Message = r.clean(d.Message)
	if !isDoc && resp.StatusCode != http.StatusOK {
		e.Message = r.clean(string(data))
	}
	e.Kind = kindOf(resp.StatusCode, d.Code)
	if e.Kind == KindNotFound && (r.key == "" || r.op == "PUT" && e.Code == "") {
		e.Kind = KindBucket // no object was asked for
	}

	// A bucket elsewhere says so by its status, or by refusing the signature
	// for another region.
	region := token(resp.Header.Get("X-Amz-Bucket-Region"))
	if region == "" {
		region = d.Region
	}
	elsewhere := region != "" && region != c.at.region
	if e.Kind == KindCredentials && e.Code == "AuthorizationHeaderMalformed" && elsewhere ||
		e.Kind == KindOther && r.method == http.MethodHead && elsewhere {
		e.Kind = KindRegion
	}
	if e.Kind == KindRegion {
		to, err := url.Parse(resp.Header.Get("Location"))
		switch {
		case err != nil:
			to = &url.URL{}
		case region == "" && to.Scheme == "https" && c.at.scheme == "http" && to.Hostname() == hostName(c.at.host):
			e.Kind, e.Message = KindTLS, "the endpoint sends http to https: set the scheme"
			return e
		}
		e.Message = "the bucket is not in region " + c.at.region
		if elsewhere {
			e.Message += "; its region is " + region
		}
		if d.Endpoint == "" {
			d.Endpoint = token(to.Host)
		}
		if d.Endpoint != "" {
			e.Message += "; its endpoint is " + d.Endpoint
		}
		e.Message = line(e.Message)
	}
	if e.Kind == KindOther && !isDoc && c.at.scheme == "http" && strings.Contains(e.Message, "HTTPS") {
		e.Kind = KindTLS // the words of a server that expects TLS
	}
	return e
}

// failure makes the error of a request that has no whole answer.
func (c *Client) failure(ctx context.Context, r *request, err error) *Error {
	var done *Error
	if errors.As(err, &done) {
		return done
	}
	cause := ctx.Err()
	if end, ok := ctx.Deadline(); cause == nil && ok && !time.Now().Before(end) {
		cause = context.DeadlineExceeded // a connection's deadline may come first
	}
	if cause != nil {
		e := r.error(c, cause)
		e.Kind = KindCancelled
		return e
	}
	// The text of a url.Error has the query in it.
	var ue *url.Error
	for errors.As(err, &ue) {
		err = ue.Err
	}
	e := r.error(c, err)
	e.Kind = KindNetwork
	var (
		unknown  x509.UnknownAuthorityError
		host     x509.HostnameError
		invalid  x509.CertificateInvalidError
		verify   *tls.CertificateVerificationError
		alert    tls.AlertError
		noTLS    tls.RecordHeaderError
		truncate = errors.Is(err, io.ErrUnexpectedEOF)
	)
	switch {
	case errors.As(err, &unknown), errors.As(err, &host), errors.As(err, &invalid), errors.As(err, &verify), errors.As(err, &alert), errors.As(err, &noTLS):
		e.Kind = KindTLS
	case truncate && r.answered:
		e.Kind = KindLength
	}
	return e
}

// line makes a message of one line.
func line(s string) string {
	var b strings.Builder
	for _, r := range strings.TrimSpace(s) {
		if r < ' ' || r == 0x7f || r == utf8.RuneError {
			r = ' '
		}
		if b.Len()+utf8.RuneLen(r) > messageMax {
			break
		}
		b.WriteRune(r)
	}
	return b.String()
}

// token keeps a short name of the store's as it is, and nothing else.
func token(s string) string {
	s = strings.TrimSpace(s)
	if len(s) > tokenMax {
		return ""
	}
	for i := range len(s) {
		if c := s[i]; !unreserved(c) && c != ':' && c != '+' && c != '=' {
			return ""
		}
	}
	return s
}
