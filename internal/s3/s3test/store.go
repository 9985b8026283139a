package s3test

import (
	"crypto/md5"
	"encoding/base64"
	"encoding/binary"
	"encoding/xml"
	"hash/crc32"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/minio/crc64nvme"
)

// carryOut does what a request asks for.
func (s *Server) carryOut(r *http.Request, op, bucket, key string, body []byte) *answer {
	if code := s.refusal(r, op); code != "" {
		status := http.StatusForbidden
		if strings.HasPrefix(code, "Expired") {
			status = http.StatusBadRequest
		}
		return refuse(status, code)
	}
	if a := s.checkBody(r.Header, body); a != nil {
		return a
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	objects, ok := s.buckets[bucket]
	if !ok {
		return refuse(http.StatusNotFound, "NoSuchBucket")
	}
	o, found := objects[key]
	switch op {
	case "PUT":
		if a := s.checkCondition(r.Header, o, found); a != nil {
			return a
		}
		o = s.object(body, r.Header.Get("Content-Type"))
		objects[key] = o
		return respond(http.StatusOK, nil, "Etag", o.ETag)
	case "COPY":
		from, err := url.PathUnescape(r.Header.Get("X-Amz-Copy-Source"))
		source, ok := objects[strings.TrimPrefix(from, "/"+bucket+"/")]
		if err != nil || !ok {
			return refuse(http.StatusNotFound, "NoSuchKey")
		}
		objects[key] = s.object(source.Data, source.ContentType)
		return document(struct {
			XMLName xml.Name `xml:"CopyObjectResult"`
			ETag    string
		}{ETag: source.ETag})
	case "GET", "HEAD":
		if !found {
			return refuse(http.StatusNotFound, "NoSuchKey")
		}
		return respond(http.StatusOK, o.Data, "Etag", o.ETag, "Content-Type", o.ContentType, "Last-Modified", o.Modified.UTC().Format(http.TimeFormat))
	case "DELETE":
		delete(objects, key)
		return respond(http.StatusNoContent, nil)
	case "MULTI":
		var d struct {
			Object []struct{ Key string }
		}
		if err := xml.Unmarshal(body, &d); err != nil {
			return refuse(http.StatusBadRequest, "MalformedXML")
		}
		for _, o := range d.Object {
			delete(objects, o.Key)
		}
		return document(struct {
			XMLName xml.Name `xml:"DeleteResult"`
		}{})
	case "LIST":
		return list(objects, r.URL.Query())
	case "SESSION":
		return s.session()
	}
	return refuse(http.StatusMethodNotAllowed, "MethodNotAllowed")
}

// refusal is why the signer of a request may not.
func (s *Server) refusal(r *http.Request, op string) string {
	_, signer, ok := strings.Cut(r.Header.Get("Authorization"), "AWS4-HMAC-SHA256 Credential=")
	id, _, slash := strings.Cut(signer, "/")
	if !ok || !slash || !strings.Contains(signer, "Signature=") {
		return "AccessDenied"
	}
	if s.Session != nil && op != "SESSION" {
		return s.SessionAuth(id, r.Header.Get("X-Amz-S3session-Token"))
	}
	if s.Auth != nil {
		return s.Auth(id, r.Header.Get("X-Amz-Security-Token"))
	}
	if id != AccessKey {
		return "InvalidAccessKeyId"
	}
	return ""
}

func (s *Server) session() *answer {
	if s.Session == nil {
		return refuse(http.StatusMethodNotAllowed, "MethodNotAllowed")
	}
	id, token, until := s.Session()
	type creds struct{ AccessKeyId, SecretAccessKey, SessionToken, Expiration string }
	return document(struct {
		XMLName     xml.Name `xml:"CreateSessionResult"`
		Credentials creds
	}{Credentials: creds{id, "session-secret", token, until.UTC().Format(time.RFC3339)}})
}

func (s *Server) checkBody(h http.Header, body []byte) *answer {
	for _, c := range []struct {
		header  string
		support Support
		sum     func() []byte
	}{
		{"Content-Md5", Verified, func() []byte { sum := md5.Sum(body); return sum[:] }},
		{"X-Amz-Checksum-Crc64nvme", s.Features.CRC64NVME, func() []byte { return binary.BigEndian.AppendUint64(nil, crc64nvme.Checksum(body)) }},
		{"X-Amz-Checksum-Crc32c", s.Features.CRC32C, func() []byte {
			return binary.BigEndian.AppendUint32(nil, crc32.Checksum(body, crc32.MakeTable(crc32.Castagnoli)))
		}},
	} {
		sent := h.Get(c.header)
		switch {
		case sent == "" || c.support == Ignored:
		case c.support == Refused:
			return refuse(http.StatusNotImplemented, "NotImplemented")
		case sent != base64.StdEncoding.EncodeToString(c.sum()):
			return refuse(http.StatusBadRequest, "BadDigest")
		}
	}
	return nil
}

func (s *Server) checkCondition(h http.Header, o Object, found bool) *answer {
	none, match := h.Get("If-None-Match"), h.Get("If-Match")
	switch {
	case none == "" && match == "" || s.Features.Conditional == Ignored:
		return nil
	case s.Features.Conditional == Refused:
		return refuse(http.StatusNotImplemented, "NotImplemented")
	case match != "" && !found:
		return refuse(http.StatusNotFound, "NoSuchKey")
	case none != "" && found, match != "" && match != o.ETag:
		return refuse(http.StatusPreconditionFailed, "PreconditionFailed")
	}
	return nil
}

type listed struct {
	Key, ETag, LastModified string
	Size                    int
}

func list(objects map[string]Object, q url.Values) *answer {
	type prefix struct{ Prefix string }
	var l struct {
		XMLName               xml.Name `xml:"ListBucketResult"`
		EncodingType          string   `xml:",omitempty"`
		IsTruncated           bool
		NextContinuationToken string `xml:",omitempty"`
		Contents              []listed
		CommonPrefixes        []prefix
	}
	encode := func(s string) string { return s }
	if l.EncodingType = q.Get("encoding-type"); l.EncodingType == "url" {
		encode = url.QueryEscape
	}
	most, after := 1000, q.Get("start-after")
	if n, err := strconv.Atoi(q.Get("max-keys")); err == nil {
		most = min(n, most)
	}
	if token, err := base64.URLEncoding.DecodeString(q.Get("continuation-token")); err == nil && len(token) > 0 {
		after = string(token)
	}
	under, delimiter := q.Get("prefix"), q.Get("delimiter")
	for _, key := range slices.Sorted(maps.Keys(objects)) {
		rest, ok := strings.CutPrefix(key, under)
		if !ok || key <= after || delimiter != "" && strings.HasSuffix(after, delimiter) && strings.HasPrefix(key, after) {
			continue
		}
		if len(l.Contents)+len(l.CommonPrefixes) == most {
			l.IsTruncated = true
			break
		}
		if i := strings.Index(rest, delimiter); delimiter != "" && i >= 0 {
			after = under + rest[:i+len(delimiter)]
			l.CommonPrefixes = append(l.CommonPrefixes, prefix{encode(after)})
			continue
		}
		after = key
		o := objects[key]
		l.Contents = append(l.Contents, listed{encode(key), o.ETag, o.Modified.UTC().Format(time.RFC3339), len(o.Data)})
	}
	if l.IsTruncated {
		l.NextContinuationToken = base64.URLEncoding.EncodeToString([]byte(after))
	}
	return document(l)
}
