package s3

import (
	"bytes"
	"context"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// cleanEnv takes away what this machine knows of credentials.
func cleanEnv(t *testing.T) (home string) {
	t.Helper()
	for _, e := range os.Environ() {
		if name, _, _ := strings.Cut(e, "="); strings.HasPrefix(name, "AWS_") {
			t.Setenv(name, "")
		}
	}
	home = t.TempDir()
	t.Setenv("HOME", home)
	t.Setenv("AWS_EC2_METADATA_DISABLED", "true")
	return home
}

func writeFile(t *testing.T, path, text string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestAddress(t *testing.T) {
	cleanEnv(t)
	const v = AddressVirtual
	for _, x := range []struct {
		o    Options
		want string // of scheme, host and base; or a part of the error, after "!"
	}{
		{Options{Bucket: "b"}, "https://b.s3.us-east-1.amazonaws.com/"},
		{Options{Bucket: "b", Region: "eu-west-1"}, "https://b.s3.eu-west-1.amazonaws.com/"},
		{Options{Bucket: "b", Region: "cn-north-1"}, "https://b.s3.cn-north-1.amazonaws.com.cn/"},
		{Options{Bucket: "b.c", Region: "eu-west-1"}, "https://s3.eu-west-1.amazonaws.com/b.c/"},
		{Options{Bucket: "b.c", Scheme: "http"}, "http://b.c.s3.us-east-1.amazonaws.com/"},
		{Options{Bucket: "b", Addressing: AddressPath}, "https://s3.us-east-1.amazonaws.com/b/"},
		{Options{Bucket: "b", Endpoint: "s3.amazonaws.com:443"}, "https://b.s3.amazonaws.com:443/"},
		{Options{Bucket: "b", Endpoint: "minio"}, "https://minio/b/"},
		{Options{Bucket: "b", Endpoint: "minio:9000", Scheme: "http"}, "http://minio:9000/b/"},
		{Options{Bucket: "b", Endpoint: "minio:9000", Addressing: v}, "https://b.minio:9000/"},
		{Options{Bucket: "b", Endpoint: "10.0.0.1:9000"}, "https://10.0.0.1:9000/b/"},
		{Options{Bucket: "b", Endpoint: "fd00::1"}, "https://[fd00::1]/b/"},
		{Options{Bucket: "b", Endpoint: "[fd00::1]"}, "https://[fd00::1]/b/"},
		{Options{Bucket: "b", Endpoint: "[fd00::1]:9000"}, "https://[fd00::1]:9000/b/"},
		{Options{Bucket: "kv--usw2-az1--x-s3", Region: "us-west-2"}, "https://kv--usw2-az1--x-s3.s3express-usw2-az1.us-west-2.amazonaws.com/"},
		{Options{Bucket: "kv--usw2-az1--x-s3", Endpoint: "h:1"}, "https://h:1/kv--usw2-az1--x-s3/"},
		{Options{Bucket: "--x-s3"}, "!want <name>--<zone>--x-s3"},
		{Options{}, "!bucket is \"\""},
		{Options{Bucket: "a/b"}, "!bucket is \"a/b\""},
		{Options{Bucket: "b", Scheme: "s3"}, "!scheme is \"s3\""},
		{Options{Bucket: "b", Addressing: "dns"}, "!addressing is \"dns\""},
		{Options{Bucket: "b", Endpoint: "http://minio"}, "!the scheme is an option of its own"},
		{Options{Bucket: "b", Endpoint: "minio/path"}, "!more than a host"},
		{Options{Bucket: "b", Endpoint: "user@minio"}, "!more than a host"},
		{Options{Bucket: "b", Endpoint: "minio:"}, "!the port"},
		{Options{Bucket: "b", Endpoint: "minio:0"}, "!the port"},
		{Options{Bucket: "b", Endpoint: "minio:70000"}, "!the port"},
		{Options{Bucket: "b", Endpoint: ":9000"}, "!before the port"},
		{Options{Bucket: "b", Endpoint: "[fd00::1]:9000", Addressing: v}, "!an IP address"},
		{Options{Bucket: "b", Endpoint: "10.0.0.1", Addressing: v}, "!an IP address"},
	} {
		x.o.AccessKey, x.o.SecretKey = "a", "s"
		c, err := New(x.o)
		if part, fails := strings.CutPrefix(x.want, "!"); fails {
			if err == nil || !strings.Contains(err.Error(), part) {
				t.Errorf("%+v: %v, want %q", x.o, err, part)
			}
			continue
		}
		if err != nil {
			t.Errorf("%+v: %v", x.o, err)
		} else if got := c.at.scheme + "://" + c.at.host + c.at.base; got != x.want {
			t.Errorf("%+v: %s, want %s", x.o, got, x.want)
		}
	}
}

func TestRegion(t *testing.T) {
	home := cleanEnv(t)
	region := func(o Options) string {
		t.Helper()
		o.Bucket, o.AccessKey, o.SecretKey = "b", "a", "s"
		return open(t, o).Region()
	}
	check := func(got, want string) {
		t.Helper()
		if got != want {
			t.Errorf("region %s, want %s", got, want)
		}
	}
	check(region(Options{}), "us-east-1")
	writeFile(t, filepath.Join(home, ".aws", "config"), "[default]\nregion = of-home\n[profile p]\noutput = json\nregion=of-profile\n[p]\nregion=wrong\n[sso-session p]\nregion=wrong\n")
	check(region(Options{}), "of-home")
	check(region(Options{Profile: "p"}), "of-profile")
	check(region(Options{Profile: "none"}), "us-east-1")
	t.Setenv("AWS_PROFILE", "p")
	check(region(Options{}), "of-profile")
	t.Setenv("AWS_CONFIG_FILE", writeFile(t, filepath.Join(home, "other"), "[profile p]\nregion = of-file\n"))
	check(region(Options{}), "of-file")
	t.Setenv("AWS_DEFAULT_REGION", "of-default")
	check(region(Options{}), "of-default")
	t.Setenv("AWS_REGION", "of-env")
	check(region(Options{}), "of-env")
	check(region(Options{Region: "given"}), "given")
}

// TestPathIsAsSigned: stores compute the signature over the path as it is sent.
func TestPathIsAsSigned(t *testing.T) {
	var uri, host string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { uri, host = r.RequestURI, r.Host }))
	defer srv.Close()
	o := options(nil)
	o.Endpoint = strings.TrimPrefix(srv.URL, "http://")
	c := open(t, o)
	if _, err := c.Put(context.Background(), "a b+c=d&e?f#g%h:i@j,k;l!m*n'o(p)q~r_s-t.u//v/../w/ä", NewBody([]byte("x")), PutOptions{}); err != nil {
		t.Fatal(err)
	}
	const want = "/blocks/a%20b%2Bc%3Dd%26e%3Ff%23g%25h%3Ai%40j%2Ck%3Bl%21m%2An%27o%28p%29q~r_s-t.u//v/../w/%C3%A4"
	if uri != want || host != o.Endpoint {
		t.Errorf("sent %s to %s, want %s", uri, host, want)
	}
	for _, key := range []string{"", "a\x00b", "a\nb", "a\xffb", strings.Repeat("k", 1025)} {
		if err := c.Delete(context.Background(), key); err == nil {
			t.Errorf("key %q is taken", key)
		}
	}
}

func TestVirtualAddressing(t *testing.T) {
	s := newServer()
	o := options(s.RoundTripper())
	o.Addressing = AddressVirtual
	c := open(t, o)
	if _, err := c.Put(context.Background(), "a/b", NewBody([]byte("x")), PutOptions{}); err != nil {
		t.Fatal(err)
	}
	if string(s.Objects(bucket)["a/b"].Data) != "x" {
		t.Error("the object is elsewhere")
	}
	if err := c.Copy(context.Background(), "a/b", "c"); err != nil {
		t.Error(err)
	}
}

func TestSecretsGiven(t *testing.T) {
	for _, o := range []Options{{AccessKey: "a"}, {SecretKey: "s"}, {SessionToken: "t"}} {
		o.Bucket = "b"
		if _, err := New(o); err == nil {
			t.Errorf("%+v is taken", o)
		}
	}
	s := newServer()
	s.Auth = func(key, token string) string {
		if key != "other" || token != "the-token" {
			return "InvalidToken"
		}
		return ""
	}
	o := options(s.RoundTripper())
	o.AccessKey, o.SessionToken = "other", "the-token"
	c := open(t, o)
	if _, err := c.Head(context.Background(), "k"); kind(err) != KindNotFound {
		t.Error(err)
	}
	if c.Source() != "options" {
		t.Errorf("source %q", c.Source())
	}
}

// TestProxy runs in a process of its own, since the environment is read once.
func TestProxy(t *testing.T) {
	s := newServer()
	var seen []string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		seen = append(seen, r.Method+" "+r.RequestURI)
		s.ServeHTTP(w, r)
	}))
	defer srv.Close()
	out, err := self(t.Context(), putThrough+"=1", "HTTP_PROXY="+srv.URL, "NO_PROXY=", "no_proxy=").CombinedOutput()
	if err != nil || len(seen) != 1 || seen[0] != "PUT http://store.test/blocks/k" {
		t.Fatalf("the proxy saw %q, the client %v\n%s", seen, err, out)
	}
	if !bytes.Equal(s.Objects(bucket)["k"].Data, []byte("x")) {
		t.Error("the object did not arrive")
	}
}
