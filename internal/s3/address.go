package s3

import (
	"bufio"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"unicode/utf8"
)

const (
	regionDefault = "us-east-1"
	expressSuffix = "--x-s3" // of the name of a directory bucket, S3 Express
	keyBytesMax   = 1024
)

// address is where a bucket is, and how its requests name it.
type address struct {
	scheme, host, region string
	base                 string // of the path: "/" or "/bucket/"
	express              bool
	where                string // for errors
}

// newAddress works out everything that the options say about the endpoint.
func newAddress(o *Options) (address, error) {
	a := address{scheme: o.Scheme, region: o.region(), express: strings.HasSuffix(o.Bucket, expressSuffix)}
	if a.scheme == "" {
		a.scheme = "https"
	}
	if a.scheme != "http" && a.scheme != "https" {
		return a, fmt.Errorf("s3: scheme is %q, want http or https", o.Scheme)
	}
	if o.Bucket == "" || strings.ContainsAny(o.Bucket, "/?#% \t\r\n") || !printable(o.Bucket) {
		return a, fmt.Errorf("s3: bucket is %q, want the name of a bucket, without a path", o.Bucket)
	}
	host, err := endpointHost(o.Endpoint)
	if err != nil {
		return a, err
	}
	if host == "" {
		if host, err = awsEndpoint(o.Bucket, a.region, a.express); err != nil {
			return a, err
		}
	}
	var virtual bool
	switch o.Addressing {
	case AddressVirtual:
		virtual = true
	case AddressPath:
	case AddressAuto, "":
		// A bucket with a dot has no place in a wildcard certificate.
		name := hostName(host)
		aws := strings.HasSuffix(name, ".amazonaws.com") || strings.HasSuffix(name, ".amazonaws.com.cn")
		virtual = aws && (a.scheme == "http" || !strings.Contains(o.Bucket, "."))
	default:
		return a, fmt.Errorf("s3: addressing is %q, want %s, %s or %s", o.Addressing, AddressAuto, AddressPath, AddressVirtual)
	}
	a.where = a.scheme + "://" + host + "/" + o.Bucket
	a.host, a.base = host, "/"+o.Bucket+"/"
	if virtual {
		if _, err := netip.ParseAddr(strings.Trim(hostName(host), "[]")); err == nil {
			return a, fmt.Errorf("s3: addressing is %s and the endpoint an IP address (%s), which has no subdomains; want %s", AddressVirtual, host, AddressPath)
		}
		a.host, a.base = o.Bucket+"."+host, "/"
	}
	return a, nil
}

// endpointHost checks a host or host:port, and puts a bare IPv6 address into
// brackets.
func endpointHost(e string) (string, error) {
	bad := func(why string) (string, error) {
		return "", fmt.Errorf("s3: endpoint is %q: %s; want a host or host:port", e, why)
	}
	switch {
	case e == "":
		return "", nil
	case strings.Contains(e, "://"):
		return bad("the scheme is an option of its own")
	case strings.ContainsAny(e, "/?#@% \t\r\n") || !printable(e):
		return bad("it is more than a host")
	}
	if ip, err := netip.ParseAddr(strings.Trim(e, "[]")); err == nil {
		if ip.Is6() {
			return "[" + ip.String() + "]", nil
		}
		return e, nil
	}
	if !strings.Contains(e, ":") {
		return e, nil
	}
	host, port, err := net.SplitHostPort(e)
	if err != nil || host == "" {
		return bad("the part before the port cannot be read")
	}
	if n, err := net.LookupPort("tcp", port); err != nil || n == 0 {
		return bad("the port is no number from 1 to 65535")
	}
	return e, nil
}

// hostName is a host:port without its port.
func hostName(host string) string {
	if h, _, err := net.SplitHostPort(host); err == nil {
		return h
	}
	return host
}

func awsEndpoint(bucket, region string, express bool) (string, error) {
	domain := "." + region + ".amazonaws.com"
	if strings.HasPrefix(region, "cn-") {
		domain += ".cn"
	}
	if !express {
		return "s3" + domain, nil
	}
	name := strings.TrimSuffix(bucket, expressSuffix)
	i := strings.LastIndex(name, "--")
	if i <= 0 || i+2 == len(name) {
		return "", fmt.Errorf("s3: bucket is %q, want <name>--<zone>%s for an S3 Express bucket, or an endpoint", bucket, expressSuffix)
	}
	return "s3express-" + name[i+2:] + domain, nil
}

// region of the options, the environment, or the shared configuration file.
func (o *Options) region() string {
	for _, r := range []string{o.Region, os.Getenv("AWS_REGION"), os.Getenv("AWS_DEFAULT_REGION"), o.regionOfFile()} {
		if r != "" {
			return r
		}
	}
	return regionDefault
}

// regionOfFile reads the one line of the shared configuration file that concerns
// us. A file that cannot be read says nothing.
func (o *Options) regionOfFile() (region string) {
	path := os.Getenv("AWS_CONFIG_FILE")
	if path == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return ""
		}
		path = filepath.Join(home, ".aws", "config")
	}
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	want := "profile " + o.profile()
	here := false
	for s := bufio.NewScanner(f); s.Scan(); {
		line := strings.TrimSpace(s.Text())
		if strings.HasPrefix(line, "[") {
			name := strings.Join(strings.Fields(strings.Trim(line, "[]")), " ")
			here = name == want || name == "default" && o.profile() == "default"
		}
		if k, v, ok := strings.Cut(line, "="); here && ok && strings.TrimSpace(k) == "region" {
			region = strings.TrimSpace(v)
		}
	}
	return region
}

func (o *Options) profile() string {
	for _, p := range []string{o.Profile, os.Getenv("AWS_PROFILE")} {
		if p != "" {
			return p
		}
	}
	return "default"
}

// checkKey refuses keys that a store, XML or a signature could take for others.
func checkKey(key string) error {
	switch {
	case key == "":
		return fmt.Errorf("s3: the key is empty")
	case len(key) > keyBytesMax:
		return fmt.Errorf("s3: the key has %d bytes, want at most %d", len(key), keyBytesMax)
	case !printable(key):
		return fmt.Errorf("s3: key %q has control characters or is not UTF-8", key)
	}
	return nil
}

func printable(s string) bool {
	for _, r := range s {
		if r < ' ' || r == 0x7f || r == utf8.RuneError || r == 0xfffe || r == 0xffff {
			return false
		}
	}
	return true
}

// escapePath writes a path as a signature has it, which is also what is sent:
// everything escaped but unreserved characters and slashes.
func escapePath(p string) string {
	const hex = "0123456789ABCDEF"
	n := 0
	for i := range len(p) {
		if !unreserved(p[i]) {
			n++
		}
	}
	if n == 0 {
		return p
	}
	b := make([]byte, 0, len(p)+2*n)
	for i := range len(p) {
		if c := p[i]; unreserved(c) {
			b = append(b, c)
		} else {
			b = append(b, '%', hex[c>>4], hex[c&15])
		}
	}
	return string(b)
}

// escapeQuery writes a query as a signature has it, which is also what is sent:
// by name, and everything escaped but unreserved characters.
func escapeQuery(q url.Values) string { return strings.ReplaceAll(q.Encode(), "+", "%20") }

func unreserved(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '-' || c == '_' || c == '.' || c == '~' || c == '/'
}
