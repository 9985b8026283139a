package peer

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
)

// TLSFiles name PEM files for mutual TLS 1.3 between nodes.
type TLSFiles struct {
	Cert, Key string // of this node
	CA        string // who signs the certificates of peers, and nobody else's
	// ServerName, if set, is the name that certificates of dialed peers must
	// have, in place of the host that was dialed.
	ServerName string
}

// Config reads the files. The config is for both sides.
func (f TLSFiles) Config() (*tls.Config, error) {
	cert, err := tls.LoadX509KeyPair(f.Cert, f.Key)
	if err != nil {
		return nil, fmt.Errorf("tls certificate %s with key %s: %w", f.Cert, f.Key, err)
	}
	pem, err := os.ReadFile(f.CA)
	if err != nil {
		return nil, fmt.Errorf("tls ca: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("tls ca %s: no certificate in it; it must be PEM", f.CA)
	}
	return &tls.Config{
		Certificates: []tls.Certificate{cert},
		RootCAs:      pool, ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert,
		ServerName: f.ServerName, MinVersion: tls.VersionTLS13,
		// Each session proves its certificate anew, and records are of full size at once.
		SessionTicketsDisabled: true, DynamicRecordSizingDisabled: true,
	}, nil
}

// greeted compares a greeting with the certificate of who sent it. Without TLS
// everybody is who he says he is.
func (n *Net) greeted(conn net.Conn, what, node, advertise string) error {
	c, ok := conn.(*tls.Conn)
	if !ok {
		return nil
	}
	cert := c.ConnectionState().PeerCertificates[0]
	subject := clip(cert.Subject.String(), 200)
	if advertise != "" {
		host, _, err := net.SplitHostPort(advertise)
		if err != nil {
			return violated(what+".advertise", "%q is not host:port", advertise)
		}
		if err := cert.VerifyHostname(cmp.Or(n.o.TLS.ServerName, host)); err != nil {
			return violated(what+".advertise", "node %q says it is at %s; the certificate of %q is not for that: %v", node, advertise, subject, err)
		}
	}
	named := false
	for _, u := range cert.URIs {
		if u.Scheme == "terrace" && u.Host == "node" {
			if named = true; strings.TrimPrefix(u.Path, "/") == node {
				return nil
			}
		}
	}
	if named {
		return violated(what+".node", "it says it is %q; the certificate of %q is another node's: %v", node, subject, cert.URIs)
	}
	return nil
}

// tlsClient begins TLS on a connection that was dialed. That the other side
// refuses our certificate shows only when something is read.
func tlsClient(ctx context.Context, raw net.Conn, cfg *tls.Config, addr string) (net.Conn, error) {
	if cfg.ServerName == "" {
		host, _, err := net.SplitHostPort(addr)
		if err != nil {
			return nil, err
		}
		cfg = cfg.Clone()
		cfg.ServerName = host
	}
	c := tls.Client(raw, cfg)
	err := c.HandshakeContext(ctx)
	var plain tls.RecordHeaderError
	if errors.As(err, &plain) {
		err = fmt.Errorf("%w: the other side may not speak TLS", err)
	}
	return c, err
}
