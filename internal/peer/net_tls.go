package peer

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
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
