package s3

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/minio/minio-go/v7/pkg/credentials"
)

// Names of where credentials come from.
const (
	fromOptions     = "options"
	fromEnvironment = "environment"
	fromFiles       = "shared files"
	fromWebIdentity = "web identity"
	fromContainer   = "container role"
	fromInstance    = "instance role"
)

const (
	roleConnectTimeout = 2 * time.Second // where there is no such service, nothing answers at all
	roleDocMax         = 1 << 20
)

// newCreds is the source of the options: their keys, or else the chain.
func newCreds(o *Options, region string, roots *x509.CertPool) (*source, error) {
	switch {
	case o.AccessKey != "" && o.SecretKey != "":
		return fixedSource(credentials.Value{AccessKeyID: o.AccessKey, SecretAccessKey: o.SecretKey, SessionToken: o.SessionToken}, fromOptions), nil
	case o.AccessKey != "" || o.SecretKey != "" || o.SessionToken != "":
		return nil, errors.New("s3: only a part of access key, secret key and session token is given; give both keys, or none of the three to use the environment, files and roles")
	}
	rt := o.credsRoundTripper
	if rt == nil {
		rt = &http.Transport{
			Proxy:             proxy,
			DialContext:       (&net.Dialer{Timeout: roleConnectTimeout}).DialContext,
			TLSClientConfig:   &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots},
			DisableKeepAlives: true, // once an hour
		}
	}
	c := &chain{profile: o.Profile, region: region, client: &http.Client{
		Transport:     limited{rt},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
	return newSource(o.Now, c.fetch), nil
}

// chain looks for credentials where the tools of AWS do. What is not set up is
// passed over; what is set up and fails is the failure of all, because whatever
// came after it would be somebody else's credentials.
type chain struct {
	profile, region string
	client          *http.Client
}

func (c *chain) fetch(ctx context.Context) (v credentials.Value, from string, err error) {
	cc := &credentials.CredContext{Client: c.client, Context: ctx}
	var missing []string

	v, err = (&credentials.EnvAWS{}).RetrieveWithCredContext(cc)
	switch {
	case err == nil && v.AccessKeyID != "" && v.SecretAccessKey != "":
		return v, fromEnvironment, nil
	case v.AccessKeyID != "" || v.SecretAccessKey != "":
		missing = append(missing, "AWS_ACCESS_KEY_ID or AWS_SECRET_ACCESS_KEY is set without the other")
	}

	v, err = (&credentials.FileAWSCredentials{Profile: c.profile}).RetrieveWithCredContext(cc)
	named := c.profile != "" || os.Getenv("AWS_PROFILE") != ""
	switch {
	case err == nil && v.AccessKeyID != "" && v.SecretAccessKey != "":
		return v, fromFiles, nil
	case err != nil && named:
		return v, "", fmt.Errorf("%s, profile %s: %w", fromFiles, (&Options{Profile: c.profile}).profile(), c.safe(err))
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		missing = append(missing, fromFiles+": "+c.safe(err).Error())
	}

	role := &credentials.IAM{Region: c.region}
	switch {
	case os.Getenv("AWS_WEB_IDENTITY_TOKEN_FILE") != "":
		from, role.Endpoint = fromWebIdentity, os.Getenv("AWS_ENDPOINT_URL_STS")
		if os.Getenv("AWS_ROLE_ARN") == "" {
			return v, "", fmt.Errorf("%s: AWS_WEB_IDENTITY_TOKEN_FILE is set and AWS_ROLE_ARN is not", from)
		}
	case os.Getenv("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI") != "", os.Getenv("AWS_CONTAINER_CREDENTIALS_FULL_URI") != "":
		from = fromContainer
	case strings.EqualFold(os.Getenv("AWS_EC2_METADATA_DISABLED"), "true"):
		missing = append(missing, fromInstance+": AWS_EC2_METADATA_DISABLED is set")
		return v, "", fmt.Errorf("no credentials: none in the options, the environment or the shared files, no web identity, no container role (%s)", strings.Join(missing, "; "))
	default:
		from, role.Endpoint = fromInstance, strings.TrimSuffix(os.Getenv("AWS_EC2_METADATA_SERVICE_ENDPOINT"), "/")
	}
	v, err = role.RetrieveWithCredContext(cc)
	if err == nil && (v.AccessKeyID == "" || v.SecretAccessKey == "") {
		err = errors.New("the answer has no keys")
	}
	switch {
	case err == nil:
		return v, from, nil
	case from == fromInstance:
		missing = append(missing, fromInstance+": "+c.safe(err).Error())
		err = fmt.Errorf("no credentials: none in the options, the environment or the shared files, no web identity, no container role (%s)", strings.Join(missing, "; "))
	default:
		err = fmt.Errorf("%s: %w", from, c.safe(err))
	}
	return credentials.Value{}, "", err
}

// safe makes an error without addresses, which may have a query, and without
// the token that a service may have repeated.
func (c *chain) safe(err error) error {
	var ue *url.Error
	for errors.As(err, &ue) {
		err = ue.Err
	}
	text := err.Error()
	for _, name := range []string{"AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"} {
		if token, err := os.ReadFile(os.Getenv(name)); err == nil && len(token) > 0 {
			text = strings.ReplaceAll(text, strings.TrimSpace(string(token)), "[hidden]")
		}
	}
	return errors.New(line(text))
}

// limited bounds what is read of an answer.
type limited struct{ http.RoundTripper }

func (l limited) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := l.RoundTripper.RoundTrip(r)
	if err == nil {
		resp.Body = struct {
			io.Reader
			io.Closer
		}{io.LimitReader(resp.Body, roleDocMax), resp.Body}
	}
	return resp, err
}
