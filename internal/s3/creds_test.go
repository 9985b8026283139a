package s3

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/terrace-kv/terrace/internal/s3/s3test"
)

// roles plays STS, the instance's metadata and a container's endpoint: each
// answer has a key of its own, good for life. A store that asks allow takes
// only keys that are good.
type roles struct {
	life time.Duration
	fail atomic.Bool

	mu    sync.Mutex
	ends  map[string]time.Time
	asked []string
}

func (r *roles) issue() (id, secret, token string, until time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ends == nil {
		r.ends = map[string]time.Time{}
	}
	id, until = fmt.Sprintf("role-%d", len(r.ends)+1), time.Now().Add(r.life)
	r.ends[id] = until
	return id, "secret-of-" + id, "token-of-" + id, until
}

func (r *roles) issued() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.ends)
}

func (r *roles) revoke(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ends[id] = time.Time{}
}

func (r *roles) allow(id, token string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch until, ok := r.ends[id]; {
	case !ok || token != "token-of-"+id:
		return "InvalidAccessKeyId"
	case !time.Now().Before(until):
		return "ExpiredToken"
	}
	return ""
}

func (r *roles) serve(w http.ResponseWriter, req *http.Request) {
	r.mu.Lock()
	r.asked = append(r.asked, req.Method+" "+req.URL.Host+req.URL.Path)
	r.mu.Unlock()
	if r.fail.Load() {
		w.WriteHeader(http.StatusInternalServerError)
		return
	}
	reply := func() {
		id, secret, token, until := r.issue()
		_ = json.NewEncoder(w).Encode(map[string]any{"Code": "Success", "AccessKeyId": id, "SecretAccessKey": secret, "Token": token, "Expiration": until})
	}
	const meta = "/latest/meta-data/iam/security-credentials/"
	switch path := req.URL.Path; {
	case strings.HasPrefix(req.URL.Host, "sts."):
		if req.PostFormValue("WebIdentityToken") != "jwt" || req.PostFormValue("RoleArn") != "arn:role" {
			w.WriteHeader(http.StatusForbidden)
			fmt.Fprintf(w, "<ErrorResponse xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\"><Error><Code>InvalidIdentityToken</Code><Message>no: %s</Message></Error></ErrorResponse>", req.PostFormValue("WebIdentityToken"))
			return
		}
		id, secret, token, until := r.issue()
		fmt.Fprintf(w, `<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleWithWebIdentityResult><Credentials>
			<AccessKeyId>%s</AccessKeyId><SecretAccessKey>%s</SecretAccessKey><SessionToken>%s</SessionToken><Expiration>%s</Expiration>
			</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>`, id, secret, token, until.UTC().Format(time.RFC3339Nano))
	case path == "/latest/api/token" && req.Method == http.MethodPut:
		fmt.Fprint(w, "imds-token")
	case strings.HasPrefix(path, meta) && req.Header.Get("X-Aws-Ec2-Metadata-Token") != "imds-token":
		w.WriteHeader(http.StatusUnauthorized)
	case path == meta:
		fmt.Fprint(w, "the-role")
	case path == meta+"the-role":
		reply()
	case path == "/container" && req.Header.Get("Authorization") == "container-token":
		reply()
	default:
		w.WriteHeader(http.StatusNotFound)
	}
}

// chained is a client without keys, in an environment that was cleaned.
func chained(t *testing.T, s *s3test.Server, r *roles) *Client {
	t.Helper()
	o := options(s.RoundTripper())
	o.AccessKey, o.SecretKey = "", ""
	o.credsRoundTripper = handler(r.serve)
	return open(t, o)
}

func head(c *Client) error {
	_, err := c.Head(context.Background(), "k")
	return err
}

func TestChain(t *testing.T) {
	home := cleanEnv(t)
	r := &roles{life: time.Hour}
	s := newServer()
	var signer atomic.Value
	s.Auth = func(id, token string) string { signer.Store(id + " " + token); return "" }
	check := func(source, by string) {
		t.Helper()
		c := chained(t, s, r)
		if c.Source() != "" {
			t.Errorf("source %q before the first request", c.Source())
		}
		want(t, head(c), KindNotFound)
		if c.Source() != source || signer.Load() != by {
			t.Errorf("source %q, signed by %q; want %q, %q", c.Source(), signer.Load(), source, by)
		}
	}
	c := chained(t, s, r)
	if e := want(t, head(c), KindCredentials); !strings.Contains(e.Error(), "no credentials: none in the options") {
		t.Error(e)
	}
	if n := c.Requests(); n.Head != 0 || n.Failed != 0 {
		t.Errorf("%+v without credentials", n)
	}

	// From the last resort to the first: each hides those before.
	t.Setenv("AWS_EC2_METADATA_DISABLED", "")
	check(fromInstance, "role-1 token-of-role-1")
	t.Setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://[fd00:ec2::254]/")
	check(fromInstance, "role-2 token-of-role-2")
	if last := r.asked[len(r.asked)-1]; last != "GET [fd00:ec2::254]/latest/meta-data/iam/security-credentials/the-role" {
		t.Error(last)
	}
	t.Setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://127.0.0.1/container")
	t.Setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "container-token")
	check(fromContainer, "role-3 token-of-role-3")
	t.Setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "")
	t.Setenv("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "/container")
	check(fromContainer, "role-4 token-of-role-4")
	if last := r.asked[len(r.asked)-1]; last != "GET 169.254.170.2/container" {
		t.Error(last)
	}
	t.Setenv("AWS_WEB_IDENTITY_TOKEN_FILE", writeFile(t, filepath.Join(home, "jwt"), "jwt"))
	if e := want(t, head(chained(t, s, r)), KindCredentials); !strings.Contains(e.Error(), "AWS_ROLE_ARN is not") {
		t.Error(e)
	}
	t.Setenv("AWS_ROLE_ARN", "arn:role")
	check(fromWebIdentity, "role-5 token-of-role-5")
	if last := r.asked[len(r.asked)-1]; last != "POST sts.eu-test-1.amazonaws.com" {
		t.Error(last)
	}
	t.Setenv("AWS_ENDPOINT_URL_STS", "https://sts.here")
	check(fromWebIdentity, "role-6 token-of-role-6")
	if last := r.asked[len(r.asked)-1]; last != "POST sts.here" {
		t.Error(last)
	}
	writeFile(t, filepath.Join(home, ".aws", "config"), "[default]\nregion = x\n")
	check(fromWebIdentity, "role-7 token-of-role-7") // a profile without keys
	writeFile(t, filepath.Join(home, ".aws", "credentials"), "[default]\naws_access_key_id = file\naws_secret_access_key = s\n[p]\naws_access_key_id = file-p\naws_secret_access_key = s\naws_session_token = t\n")
	check(fromFiles, "file ")
	t.Setenv("AWS_PROFILE", "p")
	check(fromFiles, "file-p t")
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", writeFile(t, filepath.Join(home, "shared"), "[p]\naws_access_key_id = shared\naws_secret_access_key = s\n"))
	check(fromFiles, "shared ")
	t.Setenv("AWS_ACCESS_KEY_ID", "env")
	check(fromFiles, "shared ") // half a pair hides nothing
	t.Setenv("AWS_SECRET_ACCESS_KEY", "s")
	check(fromEnvironment, "env ")
	t.Setenv("AWS_SESSION_TOKEN", "t")
	check(fromEnvironment, "env t")
}

// TestChainStops: what is set up and fails is not passed over.
func TestChainStops(t *testing.T) {
	home := cleanEnv(t)
	r := &roles{life: time.Hour}
	s := newServer()
	t.Setenv("AWS_EC2_METADATA_DISABLED", "")
	r.fail.Store(true)
	e := want(t, head(chained(t, s, r)), KindCredentials)
	if !strings.Contains(e.Error(), "instance role: 500") {
		t.Error(e)
	}
	r.fail.Store(false)
	t.Setenv("AWS_PROFILE", "absent")
	e = want(t, head(chained(t, s, r)), KindCredentials)
	if !strings.Contains(e.Error(), "shared files, profile absent") {
		t.Error(e)
	}
	t.Setenv("AWS_PROFILE", "")
	t.Setenv("AWS_ROLE_ARN", "arn:role")
	t.Setenv("AWS_WEB_IDENTITY_TOKEN_FILE", writeFile(t, filepath.Join(home, "jwt"), "a-bad-web-identity"))
	e = want(t, head(chained(t, s, r)), KindCredentials)
	if text := e.Error(); !strings.Contains(text, "web identity: no: [hidden]") || strings.Contains(text, "a-bad-web-identity") {
		t.Error(text)
	}
	if r.issued() != 0 {
		t.Error("somebody else's credentials were taken")
	}
}

// webIdentity sets up the one of roles that needs no socket and no file but one.
func webIdentity(t *testing.T) {
	home := cleanEnv(t)
	t.Setenv("AWS_ROLE_ARN", "arn:role")
	t.Setenv("AWS_WEB_IDENTITY_TOKEN_FILE", writeFile(t, filepath.Join(home, "jwt"), "jwt"))
}

// TestShortTokens: tokens that live for 5 s, a minute of requests, no failure.
func TestShortTokens(t *testing.T) {
	webIdentity(t)
	synctest.Test(t, func(t *testing.T) {
		r := &roles{life: 5 * time.Second}
		s := newServer()
		s.Auth = r.allow
		c := chained(t, s, r)
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for ctx.Err() == nil {
					if _, err := c.Put(context.Background(), "k", NewBody([]byte("x")), PutOptions{}); err != nil {
						t.Error(err)
						return
					}
					time.Sleep(200 * time.Millisecond)
				}
			})
		}
		wg.Wait()
		n := c.Requests()
		if n.Failed != 0 || n.Put < 1000 {
			t.Errorf("%+v", n)
		}
		if got := r.issued(); got < 12 || got > 16 {
			t.Errorf("%d tokens in a minute, want one every 4 s", got)
		}
	})
}

// TestExpiredAnyway: a token that the store refuses before its time is renewed
// once, for all requests together, and each is sent again, whole.
func TestExpiredAnyway(t *testing.T) {
	webIdentity(t)
	synctest.Test(t, func(t *testing.T) {
		r := &roles{life: time.Hour}
		s := newServer()
		s.Auth = r.allow
		c := chained(t, s, r)
		want(t, head(c), KindNotFound)
		time.Sleep(time.Minute)
		r.revoke("role-1")
		data := content(100_000)
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() {
				if _, err := c.Put(context.Background(), fmt.Sprint(i), NewBody(data[:1], data[1:]), PutOptions{}); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		for i := range 20 {
			if string(s.Objects(bucket)[fmt.Sprint(i)].Data) != string(data) {
				t.Fatal("an object has other bytes")
			}
		}
		if r.issued() != 2 {
			t.Errorf("%d tokens, want 2", r.issued())
		}

		// A store that refuses all there is: once more, and then no more, nor a
		// token for each request.
		s.Auth = func(string, string) string { return "ExpiredToken" }
		before := c.Requests().Put
		for range 10 {
			_, err := c.Put(context.Background(), "k", NewBody(data), PutOptions{})
			want(t, err, KindExpired)
		}
		if got, sent := r.issued(), c.Requests().Put-before; got > 3 || sent > 11 {
			t.Errorf("%d tokens and %d requests for 10 that were refused", got, sent)
		}
		// A HEAD has no code.
		time.Sleep(time.Minute)
		s.Auth = r.allow
		r.revoke(fmt.Sprint("role-", r.issued()))
		want(t, head(c), KindNotFound)
	})
}

func TestExpiredForGood(t *testing.T) {
	s := newServer()
	s.Auth = func(string, string) string { return "ExpiredToken" }
	c := open(t, options(s.RoundTripper()))
	_, err := c.Get(context.Background(), "k")
	want(t, err, KindExpired)
	if n := c.Requests(); n.Get != 1 || n.Failed != 1 {
		t.Errorf("%+v", n)
	}
}

// TestRenewalHoldsUpNobody: while the service hangs, those with good credentials
// go on; later they wait, not beyond their context, and not beyond 10 s.
func TestRenewalHoldsUpNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang := make(chan struct{})
		var fetches atomic.Int64
		life := time.Minute
		s := newSource(time.Now, func(ctx context.Context) (credentials.Value, string, error) {
			if fetches.Add(1) == 2 {
				<-hang // and does not heed its context
			}
			return credentials.Value{AccessKeyID: fmt.Sprint(fetches.Load()), SecretAccessKey: "s", Expiration: time.Now().Add(life)}, "test", nil
		})
		get := func(wait time.Duration, id string, took time.Duration) {
			t.Helper()
			ctx, cancel := context.WithTimeout(context.Background(), wait)
			defer cancel()
			start := time.Now()
			v, err := s.get(ctx)
			if v.AccessKeyID != id || (err == nil) != (id != "") || time.Since(start) != took {
				t.Errorf("got %q after %v (%v), want %q after %v", v.AccessKeyID, time.Since(start), err, id, took)
			}
		}
		get(time.Hour, "1", 0)
		time.Sleep(47 * time.Second)
		get(time.Hour, "1", 0)
		time.Sleep(time.Second) // a fifth is left
		for range 10 {
			get(time.Hour, "1", 0) // the first of them starts the fetch that hangs
		}
		synctest.Wait()
		time.Sleep(5 * time.Second)
		get(time.Hour, "1", 0)
		time.Sleep(7 * time.Second) // over
		get(3*time.Second, "", 0)   // the fetch has had its 10 s
		if fetches.Load() != 2 {
			t.Errorf("%d fetches, want one at a time", fetches.Load())
		}
		close(hang)
		synctest.Wait()
		get(time.Hour, "2", 0)
		time.Sleep(2 * time.Minute)
		get(time.Hour, "3", 0)
		s.close()
		time.Sleep(2 * time.Minute)
		get(time.Hour, "", 0)
		s.close()
	})
}

func TestRetrievalIsBounded(t *testing.T) {
	webIdentity(t)
	synctest.Test(t, func(t *testing.T) {
		o := options(newServer().RoundTripper())
		o.AccessKey, o.SecretKey = "", ""
		o.credsRoundTripper = handler2(func(r *http.Request) (*http.Response, error) {
			<-r.Context().Done()
			return nil, r.Context().Err()
		})
		c := open(t, o)
		for _, wait := range []time.Duration{time.Second, time.Hour} {
			ctx, cancel := context.WithTimeout(context.Background(), wait)
			start := time.Now()
			_, err := c.Head(ctx, "k")
			if wait == time.Second {
				want(t, err, KindCancelled)
			} else {
				want(t, err, KindCredentials)
			}
			if took := time.Since(start); took > fetchTimeout || took > wait {
				t.Errorf("took %v", took)
			}
			cancel()
		}
		go func() { _ = head(c) }()
		synctest.Wait()
		c.Close() // ends it
	})
}

func TestSourceFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("broken")
		var fetches int
		fail, life := true, time.Hour
		s := newSource(time.Now, func(context.Context) (credentials.Value, string, error) {
			fetches++
			if fail {
				return credentials.Value{}, "", broken
			}
			return credentials.Value{AccessKeyID: fmt.Sprint(fetches), Expiration: time.Now().Add(life)}, "test", nil
		})
		defer s.close()
		get := func() (string, error) { v, err := s.get(context.Background()); return v.AccessKeyID, err }
		for range 5 {
			if _, err := get(); err != broken {
				t.Fatal(err)
			}
		}
		if fetches != 1 {
			t.Errorf("%d fetches at once", fetches)
		}
		time.Sleep(fetchEvery)
		fail = false
		if id, err := get(); id != "2" || err != nil {
			t.Fatal(id, err)
		}
		// A renewal that fails is tried again while there is time.
		fail = true
		time.Sleep(life - renewEarlyMax)
		for range 5 {
			if id, err := get(); id != "2" || err != nil {
				t.Fatal(id, err)
			}
			synctest.Wait()
		}
		if fetches != 3 {
			t.Errorf("%d fetches, want 3", fetches)
		}
		fail = false
		time.Sleep(renewEarlyMax / 10)
		_, _ = get()
		synctest.Wait()
		if id, err := get(); id != "4" || err != nil {
			t.Error(id, err)
		}
		life = -time.Second
		time.Sleep(2 * time.Hour)
		if id, err := get(); id != "" || err == nil || !strings.Contains(err.Error(), "before they came") {
			t.Error(id, err)
		}
	})
}

func TestExpress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const dir = "kv--usw2-az1--x-s3"
		r := &roles{life: 5 * time.Minute}
		s := s3test.New().MakeBucket(dir)
		s.Session = r.issue2
		s.SessionAuth = r.allow
		o := options(s.RoundTripper())
		o.Bucket, o.Endpoint, o.Region, o.Scheme = dir, "", "us-west-2", "https"
		c := open(t, o)
		ctx := context.Background()
		for range 600 { // 20 min
			if _, err := c.Put(ctx, "k/1", NewBody([]byte("x")), PutOptions{IfNoneMatch: false}); err != nil {
				t.Fatal(err)
			}
			time.Sleep(2 * time.Second)
		}
		if n := c.Requests(); n.Failed != 0 || n.Put != 600 || int(n.Other) != r.issued() || n.Other < 4 || n.Other > 6 {
			t.Errorf("%+v, %d sessions", n, r.issued())
		}
		r.revoke(fmt.Sprint("role-", r.issued()))
		if _, err := c.Get(ctx, "k/1", make([]byte, 1)); err != nil {
			t.Error(err)
		}
		if failed, err := c.DeleteMany(ctx, []string{"k/1"}); err != nil || len(failed) != 0 {
			t.Error(failed, err)
		}
		if c.Source() != fromOptions {
			t.Errorf("source %q", c.Source())
		}
		time.Sleep(time.Hour)
		s.Fault = func(r *http.Request) *s3test.Fault {
			if r.URL.Query().Has("session") {
				return &s3test.Fault{Status: 503, Code: "SlowDown"}
			}
			return nil
		}
		want(t, c.Delete(ctx, "k/1"), KindThrottled)
		time.Sleep(time.Minute)
		s.Fault = nil
		s.Fault = func(*http.Request) *s3test.Fault { return &s3test.Fault{Status: 404, Code: "NoSuchKey"} }
		_, err := c.Get(ctx, "k/1")
		want(t, err, KindBucket) // a Miss would hide it
		time.Sleep(time.Minute)
		s.Fault = nil
		o.AccessKey = "nobody"
		want(t, open(t, o).Delete(ctx, "k/1"), KindCredentials)
	})
}

// issue2 is issue with the secret that a session of s3test has.
func (r *roles) issue2() (id, token string, until time.Time) {
	id, _, token, until = r.issue()
	return id, token, until
}
