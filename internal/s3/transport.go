package s3

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"time"
)

const (
	connectTimeoutDefault = 5 * time.Second
	headerTimeoutDefault  = 30 * time.Second
	connsMaxDefault       = 64
	idleConnTimeout       = 30 * time.Second // stores close them after some time as well
	headerBytesMax        = 64 << 10
)

// newTransport makes the transport of a client: HTTP/1.1 only, because one
// connection a block is what moves bytes fastest, and bodies as they are. Its
// buffers are the small default ones: bodies go past them, from the caller's
// memory in pieces of 32 KiB, and into it in pieces as large as they come.
// Larger pieces for writing were tried, and cost more CPU, not less.
func newTransport(o *Options, roots *x509.CertPool) *http.Transport {
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	return &http.Transport{
		Proxy:                  proxy,
		DialContext:            (&net.Dialer{Timeout: o.ConnectTimeout, KeepAlive: 30 * time.Second}).DialContext,
		TLSClientConfig:        &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots},
		TLSHandshakeTimeout:    o.ConnectTimeout,
		ResponseHeaderTimeout:  o.HeaderTimeout,
		IdleConnTimeout:        idleConnTimeout,
		MaxConnsPerHost:        o.ConnsMax,
		MaxIdleConns:           o.ConnsMax,
		MaxIdleConnsPerHost:    o.ConnsMax,
		DisableCompression:     true,
		MaxResponseHeaderBytes: headerBytesMax,
		Protocols:              &protocols,
	}
}

// proxy is the environment's, but for what is only here: loopback, and the
// link-local addresses where roles are handed out.
func proxy(r *http.Request) (*url.URL, error) {
	if ip, err := netip.ParseAddr(r.URL.Hostname()); err == nil && (ip.IsLoopback() || ip.IsLinkLocalUnicast()) {
		return nil, nil
	}
	return http.ProxyFromEnvironment(r)
}

// trusted is the system's certificates and those of a file.
func trusted(file string) (*x509.CertPool, error) {
	if file == "" {
		return nil, nil
	}
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("s3: read CA bundle: %w", err)
	}
	roots, err := x509.SystemCertPool()
	if err != nil {
		roots = x509.NewCertPool()
	}
	if !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("s3: CA bundle %s has no certificate in PEM form", file)
	}
	return roots, nil
}
