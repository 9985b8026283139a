package s3

import (
	"context"
	"crypto/x509"
	"errors"

	"github.com/minio/minio-go/v7/pkg/credentials"
)

// source hands out credentials.
type source struct{ v credentials.Value }

func newSource(o *Options, region string, roots *x509.CertPool) (*source, error) {
	if o.AccessKey == "" || o.SecretKey == "" {
		return nil, errors.New("s3: the access key or the secret key is empty")
	}
	return &source{credentials.Value{AccessKeyID: o.AccessKey, SecretAccessKey: o.SecretKey, SessionToken: o.SessionToken}}, nil
}

func (s *source) name() string { return "options" }
func (s *source) close()       {}

func (c *Client) credentials(ctx context.Context, r *request, refused credentials.Value) (credentials.Value, error) {
	return c.creds.v, nil
}

func (c *Client) renewable(r *request, v credentials.Value, e *Error) bool { return false }
