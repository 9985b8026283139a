package s3

import (
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/minio/minio-go/v7/pkg/credentials"
)

// sessionResult is the answer to CreateSession.
type sessionResult struct {
	XMLName     xml.Name
	Credentials struct {
		AccessKeyID     string `xml:"AccessKeyId"`
		SecretAccessKey string
		SessionToken    string
		Expiration      time.Time
	}
}

// createSession asks a directory bucket for the credentials that its other
// requests are signed with. They live for minutes.
func (c *Client) createSession(ctx context.Context) (v credentials.Value, from string, err error) {
	r := &request{op: "SESSION", method: http.MethodGet, query: "session=", raw: true,
		header: http.Header{"X-Amz-Create-Session-Mode": {"ReadWrite"}}}
	err = c.do(ctx, r, func(resp *http.Response) error {
		data, err := readDoc(resp)
		if err != nil && err != errDocTooLong {
			return err
		}
		if _, ok := parseErrorDoc(data); ok {
			return c.answerError(r, resp, data)
		}
		if err == nil {
			v, err = parseSession(data)
		}
		return r.malformed(c, err)
	})
	return v, c.creds.name(), err
}

func parseSession(data []byte) (credentials.Value, error) {
	var s sessionResult
	if err := xml.Unmarshal(data, &s); err != nil {
		return credentials.Value{}, fmt.Errorf("read the session: %w", err)
	}
	k := &s.Credentials
	if s.XMLName.Local != "CreateSessionResult" || k.AccessKeyID == "" || k.SecretAccessKey == "" || k.SessionToken == "" || k.Expiration.IsZero() {
		return credentials.Value{}, errors.New("the answer to CreateSession has no credentials")
	}
	return credentials.Value{AccessKeyID: k.AccessKeyID, SecretAccessKey: k.SecretAccessKey, SessionToken: k.SessionToken, Expiration: k.Expiration}, nil
}
