package s3

import (
	"context"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/minio/crc64nvme"
	minio "github.com/minio/minio-go/v7/pkg/signer"

	"github.com/terrace-kv/terrace/internal/s3/s3test"
)

const sumOfNothing = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

// unsigned is a request in the form that sign wants.
func unsigned(method, host, path, query string, header ...string) *http.Request {
	u := &url.URL{Scheme: "http", Host: host, Path: path, RawQuery: query}
	if p := escapePath(path); p != path {
		u.RawPath = p
	}
	h := http.Header{headerSum: {sumOfNothing}}
	for i := 0; i < len(header); i += 2 {
		h[header[i]] = append(h[header[i]], header[i+1])
	}
	return &http.Request{Method: method, URL: u, Header: h}
}

// The examples of "Signature Calculations for the Authorization Header:
// Transferring Payload in a Single Chunk" in the API reference of Amazon S3.
func TestSignExamples(t *testing.T) {
	s := newSigner("us-east-1", "s3")
	for _, c := range []struct {
		method, path, query string
		header              []string
		signed, want        string
	}{
		{"GET", "/test.txt", "", []string{"Range", "bytes=0-9"},
			"host;range;x-amz-content-sha256;x-amz-date", "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"},
		{"PUT", "/test$file.text", "", []string{"Date", "Fri, 24 May 2013 00:00:00 GMT", "X-Amz-Storage-Class", "REDUCED_REDUNDANCY"},
			"date;host;x-amz-content-sha256;x-amz-date;x-amz-storage-class", "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd"},
		{"GET", "/", "lifecycle=", nil,
			"host;x-amz-content-sha256;x-amz-date", "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"},
		{"GET", "/", "max-keys=2&prefix=J", nil,
			"host;x-amz-content-sha256;x-amz-date", "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"},
	} {
		r := unsigned(c.method, "examplebucket.s3.amazonaws.com", c.path, c.query, c.header...)
		if c.method == "PUT" { // of "Welcome to Amazon S3."
			r.Header[headerSum] = []string{"44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072"}
		}
		got := s.sign(r, "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", time.Date(2013, 5, 24, 0, 0, 0, 0, time.UTC))
		auth := "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, SignedHeaders=" + c.signed + ", Signature=" + c.want
		if r.Header.Get(headerAuth) != auth || got != c.want || r.Header.Get(headerDate) != "20130524T000000Z" {
			t.Errorf("%s %s?%s: signature %s, header\n%q, want\n%s", c.method, c.path, c.query, got, r.Header, auth)
		}
	}
	// "Create a signed AWS API request" in the IAM user guide.
	k := newSigner("us-east-1", "iam").key("wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "20150830")
	if got, want := hex.EncodeToString(k.key), "c4afb1cc5771d871763a393e44b703571b55cc28424d1a5e86da6ed3c154a4b9"; got != want {
		t.Errorf("key %s, want %s", got, want)
	}
}

// likeMinio signs a copy of a request with minio-go's signer and compares all
// that is sent. Its time is the clock's, in seconds.
func likeMinio(t *testing.T, s *signer, req *http.Request, id, secret, token string) {
	t.Helper()
	theirs := req.Clone(context.Background())
	sign := minio.SignV4
	if s.service == "s3express" {
		sign = minio.SignV4Express
	}
	theirs = sign(*theirs, id, secret, token, s.region)
	at, err := time.Parse(signTime, theirs.Header.Get(headerDate))
	if err != nil {
		t.Fatal(err)
	}
	if token != "" && req.Header.Get(headerExpSes) == "" {
		req.Header[headerToken] = []string{token}
	}
	signature := s.sign(req, id, secret, at.In(time.FixedZone("", 3600)))
	if want := theirs.Header.Get(headerAuth); req.Header.Get(headerAuth) != want || !strings.HasSuffix(want, "="+signature) {
		t.Fatalf("%s %q, header %q:\n got %s\nwant %s", req.Method, req.URL, req.Header, req.Header.Get(headerAuth), want)
	}
	if got, want := fmt.Sprint(req.Header, req.URL.RequestURI()), fmt.Sprint(theirs.Header, theirs.URL.RequestURI()); got != want {
		t.Fatalf("sent:\n got %s\nwant %s", got, want)
	}
}

// text is random, of what a key or a value may have.
func text(r *rand.Rand, most int) string {
	const chars = "abcXYZ019-_.~/ +=&?#%!$'()*,;:@[]{}|\\^`\"<>éß漢𝄞"
	runes, n := []rune(chars), 1+r.IntN(most)
	b := make([]rune, n)
	for i := range b {
		b[i] = runes[r.IntN(len(runes))]
	}
	return string(b)
}

// TestSignLikeMinio signs random requests with both signers, on many days and
// with changing secrets, and compares every byte of the headers.
func TestSignLikeMinio(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // where the clock of minio's signer goes from day to day
		r := rand.New(rand.NewPCG(1, 2))
		var signers []*signer
		for _, region := range []string{"us-east-1", "eu-test-1", "cn-north-1", "x"} {
			signers = append(signers, newSigner(region, "s3"), newSigner(region, "s3express"))
		}
		names := []string{"Content-Type", "Content-Md5", "If-None-Match", "If-Match", "X-Amz-Checksum-Crc64nvme", "X-Amz-Checksum-Crc32c",
			"X-Amz-Copy-Source", "X-Amz-Create-Session-Mode", "Range", "User-Agent", "Accept-Encoding", headerExpSes}
		for range 5000 {
			if r.IntN(10) == 0 {
				time.Sleep(time.Duration(r.Int64N(int64(72 * time.Hour))))
			}
			var query string
			if r.IntN(2) == 0 {
				q := url.Values{}
				for range 1 + r.IntN(4) {
					q.Add(text(r, 8), strings.TrimPrefix(text(r, 20), "a"))
				}
				query = escapeQuery(q)
			}
			method := []string{"GET", "PUT", "HEAD", "POST", "DELETE"}[r.IntN(5)]
			req := unsigned(method, []string{"store.test:9000", "b.s3.eu-test-1.amazonaws.com", "[::1]:9000"}[r.IntN(3)], "/"+text(r, 60), query)
			switch r.IntN(3) {
			case 0:
				req.Header[headerSum] = []string{payloadUnset}
			case 1:
				req.Header[headerSum] = []string{fmt.Sprintf("%016x%016x%016x%016x", r.Uint64(), r.Uint64(), r.Uint64(), r.Uint64())}
			}
			for range r.IntN(6) {
				name, v := names[r.IntN(len(names))], text(r, 40)
				if r.IntN(3) == 0 {
					v = " \t " + v + "  \u00a0 " + v + " "
				}
				req.Header[name] = append(req.Header[name], v)
			}
			token := ""
			if r.IntN(2) == 0 {
				token = strings.ReplaceAll(text(r, 300), " ", "")
			}
			likeMinio(t, signers[r.IntN(len(signers))], req, text(r, 20), "secret"+string(rune('a'+r.IntN(3))), token)
		}
	})
}

// TestClientSignsLikeMinio signs again what the client sends.
func TestClientSignsLikeMinio(t *testing.T) {
	for _, express := range []bool{false, true} {
		for _, token := range []string{"", "tok+en/=="} {
			t.Run(fmt.Sprintf("express=%v,token=%v", express, token != ""), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { clientSignsLikeMinio(t, express, token) }) // where no second ends
			})
		}
	}
}

func clientSignsLikeMinio(t *testing.T, express bool, token string) {
	name, service := bucket, "s3"
	if express {
		name, service = "blocks"+expressSuffix, "s3express"
	}
	server := s3test.New().MakeBucket(name)
	server.Auth = func(string, string) string { return "" }
	server.SessionAuth = server.Auth
	server.Session = func() (string, string, time.Time) { return "session-id", "session-token", time.Now().Add(time.Hour) }
	if !express {
		server.Session = nil
	}
	o := options(tripper(func(r *http.Request) (*http.Response, error) {
		id, secret, token := s3test.AccessKey, secret, token
		if express && r.URL.RawQuery != "session=" {
			id, secret, token = "session-id", "session-secret", "session-token"
		}
		again := r.Clone(t.Context())
		for _, name := range []string{headerDate, headerAuth, headerToken, "Idempotency-Key"} { // the last comes after the signature
			again.Header.Del(name)
		}
		likeMinio(t, newSigner("eu-test-1", service), again, id, secret, token)
		again.Header["Idempotency-Key"] = r.Header["Idempotency-Key"]
		if got, want := fmt.Sprint(r.Header, r.URL.RequestURI()), fmt.Sprint(again.Header, again.URL.RequestURI()); got != want {
			t.Errorf("%s is sent with\n%s, want\n%s", r.Method, got, want)
		}
		return server.RoundTripper().RoundTrip(r)
	}))
	o.Bucket, o.SessionToken = name, token
	c := open(t, o)
	key, data := "dir with space/ä+=&?#%/k", []byte("data")
	_, err := c.Put(t.Context(), key, NewBody(data), PutOptions{Checksum: Checksum{ChecksumCRC64NVME, crc64nvme.Checksum(data)}, IfNoneMatch: true})
	if err == nil {
		_, err = c.Get(t.Context(), key, make([]byte, len(data)))
	}
	if err == nil {
		_, err = c.Head(t.Context(), key)
	}
	if err == nil {
		err = c.Copy(t.Context(), key, "b")
	}
	if err == nil {
		_, err = c.List(t.Context(), ListOptions{Prefix: "dir with", Delimiter: "ä", After: "a b", Max: 5})
	}
	if err == nil {
		err = c.Delete(t.Context(), key)
	}
	if err == nil {
		_, err = c.DeleteMany(t.Context(), []string{"b"})
	}
	if err != nil {
		t.Fatal(err)
	}
	c.Close() // in the bubble
}

type tripper func(*http.Request) (*http.Response, error)

func (f tripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// TestSignTogether has two secrets and two days in one signer at once.
func TestSignTogether(t *testing.T) {
	s := newSigner("r", "s3")
	sign := func(s *signer, i int) string {
		r := unsigned("GET", "h", fmt.Sprint("/k", i), "")
		return s.sign(r, "id", "secret"+fmt.Sprint(i%2), time.Unix(int64(i/2%2)*86400, 0))
	}
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := range 500 {
				if got, want := sign(s, i+w), sign(newSigner("r", "s3"), i+w); got != want {
					t.Errorf("%d: got %s, want %s", i+w, got, want)
					return
				}
			}
		})
	}
	wg.Wait()
}

// FuzzSign compares with minio's signer what may come from options and callers.
func FuzzSign(f *testing.F) {
	f.Add("k", "p", "text/plain", "", "id", "secret", "", false)
	f.Add("dir with space/ä+=&?#%/..//", "a b+/=", "  a \t\n b ", "*", "i/d", "s e", "tok+en==", true)
	f.Fuzz(func(t *testing.T, key, prefix, value, second, id, secret, token string, express bool) {
		if checkKey(key) != nil || id == "" || secret == "" { // minio's signs nothing without keys
			t.Skip("refused before anything is signed")
		}
		s, name := newSigner("eu-test-1", "s3"), "Content-Type"
		if express {
			s, name = newSigner(id, "s3express"), headerExpSes
		}
		req := unsigned("GET", "store.test", "/b/"+key, escapeQuery(url.Values{"prefix": {prefix}, "list-type": {"2"}}), name, value, "If-Match", second, "If-Match", value)
		likeMinio(t, s, req, id, secret, token)
	})
}
