package s3

import (
	"strings"
	"testing"
	"unicode/utf8"
)

// FuzzDocuments gives each parser what it may get from a store, or from
// something that is none.
func FuzzDocuments(f *testing.F) {
	for _, s := range []string{
		"", "x", "<Error/>", document("SlowDown", "<Region>r</Region>"),
		"<ListBucketResult><EncodingType>url</EncodingType><IsTruncated>true</IsTruncated><NextContinuationToken>T</NextContinuationToken><Contents><Key>a%20b</Key><Size>1</Size><ETag>&quot;1&quot;</ETag><LastModified>2024-01-02T03:04:05.000Z</LastModified></Contents><CommonPrefixes><Prefix>p/</Prefix></CommonPrefixes></ListBucketResult>",
		"<DeleteResult><Error><Key>k</Key><Code>AccessDenied</Code></Error></DeleteResult>",
		"<CreateSessionResult><Credentials><AccessKeyId>a</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken><Expiration>2024-01-02T03:04:05Z</Expiration></Credentials></CreateSessionResult>",
		`<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;&a;">]><Error><Code>&b;</Code></Error>`,
		strings.Repeat("<a>", 20_000),
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if d, ok := parseErrorDoc(data); ok {
			for _, s := range []string{d.Code, d.RequestID, d.Region, d.Endpoint} {
				if len(s) > tokenMax || strings.ContainsAny(s, " \r\n<>\"") {
					t.Errorf("token %q", s)
				}
			}
			if m := line(d.Message); len(m) > messageMax || strings.ContainsAny(m, "\r\n\x00") || !utf8.ValidString(m) {
				t.Errorf("message %q", m)
			}
		}
		if p, err := parseList(data, "T"); err == nil {
			if p.Next == "T" {
				t.Error("the listing would not end")
			}
			for _, o := range p.Objects {
				if o.Key == "" || o.Size < 0 {
					t.Errorf("%+v", o)
				}
			}
		}
		if _, err := parseDelete(data); err == nil {
			_, err := parseList(data, "")
			if err == nil {
				t.Error("two documents in one")
			}
		}
		if v, err := parseSession(data); err == nil && (v.AccessKeyID == "" || v.Expiration.IsZero()) {
			t.Errorf("%+v", v.Expiration)
		}
	})
}
