package peer

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// stops sends SIGTERM and waits for an orderly end.
func (n *node) stops(within time.Duration) {
	n.t.Helper()
	began := time.Now()
	n.signal(syscall.SIGTERM)
	select {
	case <-n.done:
	case <-time.After(bound()):
		n.t.Fatalf("%s does not stop", n.name)
	}
	if code, took := n.cmd.ProcessState.ExitCode(), time.Since(began); code != 0 || took > within {
		n.t.Errorf("%s stops with %d after %v, want 0 within %v", n.name, code, took, within)
	}
}

// A node that stops waits a little for what is under way between nodes, and not
// for what may never come.
func TestStopWhileWaiting(t *testing.T) {
	t.Parallel()
	a, b, c := start(t, "a", "127.0.0.1", spec(small)), start(t, "b", "127.0.0.2", spec(small)), start(t, "c", "127.0.0.3", spec(small))
	// B waits for A's engine, and C for B's.
	rb, rc := b.request("d", from(a, prefiller, "kv-1")), c.request("d", from(b, prefiller, "kv-2"))
	gb, gc := b.start(rb, keys("1", 10)), c.start(rc, keys("2", 10))
	b.busy()
	c.busy()
	p := b.request("p", decoder(b, "kv-3")) // and nobody fetches this
	b.store(p, 0, keys("3", 10))
	b.finish(p)
	b.stops(12 * time.Second)
	if x := within(t, gc, 5*time.Second); x.got != 0 {
		t.Errorf("%d blocks", x.got)
	}
	c.finish(rc)
	within(t, gb, 5*time.Second)
	empty(t, a, c)
	// A stops at once: nothing is under way there.
	a.stops(3 * time.Second)
	r := c.request("r", from(a, source, "kv"))
	if got, took := c.load(r, keys("1", 10)); got != 0 || took > 5*time.Second {
		t.Errorf("%d blocks of a node that has stopped, after %v", got, took)
	}
	c.finish(r)
	empty(t, c)
}

// authority signs certificates for loopback addresses.
type authority struct {
	t    *testing.T
	dir  string
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
}

func newAuthority(t *testing.T) *authority {
	ca := &authority{t: t, dir: t.TempDir()}
	ca.key, ca.cert = ca.sign("ca", &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign})
	return ca
}

func (ca *authority) sign(name string, c *x509.Certificate) (*ecdsa.PrivateKey, *x509.Certificate) {
	ca.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		ca.t.Fatal(err)
	}
	c.SerialNumber, c.Subject = big.NewInt(time.Now().UnixNano()), pkix.Name{CommonName: name}
	c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	parent, by := ca.cert, ca.key
	if parent == nil {
		parent, by = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, by)
	if err != nil {
		ca.t.Fatal(err)
	}
	out, err := x509.ParseCertificate(der)
	if err != nil {
		ca.t.Fatal(err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		ca.t.Fatal(err)
	}
	ca.write(name+".pem", "CERTIFICATE", der)
	ca.write(name+".key", "PRIVATE KEY", raw)
	return key, out
}

func (ca *authority) write(name, kind string, der []byte) {
	if err := os.WriteFile(filepath.Join(ca.dir, name), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		ca.t.Fatal(err)
	}
}

// args are the settings of a node with a certificate for its address, and for
// that node id.
func (ca *authority) args(name, host, id string) []string {
	ca.sign(name, &x509.Certificate{IPAddresses: []net.IP{net.ParseIP(host)}, URIs: []*url.URL{{Scheme: "terrace", Host: "node", Path: "/" + id}},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}, KeyUsage: x509.KeyUsageDigitalSignature})
	at := func(file string) string { return filepath.Join(ca.dir, file) }
	return []string{"--set", "peers.node_id=" + name, "--set", "peers.tls.cert=" + at(name+".pem"), "--set", "peers.tls.key=" + at(name+".key"), "--set", "peers.tls.ca=" + at("ca.pem")}
}

// With TLS, nodes with the same CA load from each other, and no others do, nor
// those that say to be another.
func TestTLS(t *testing.T) {
	t.Parallel()
	ours, theirs := newAuthority(t), newAuthority(t)
	a, b := start(t, "a", "127.0.0.1", spec(small), ours.args("a", "127.0.0.1", "a")...), start(t, "b", "127.0.0.2", spec(small), ours.args("b", "127.0.0.2", "b")...)
	foreign, open := start(t, "foreign", "127.0.0.3", spec(small), theirs.args("foreign", "127.0.0.3", "foreign")...), start(t, "open", "127.0.0.4", spec(small))
	liar := start(t, "liar", "127.0.0.5", spec(small), ours.args("liar", "127.0.0.5", "b")...)
	ks := keys("tls", 60)
	a.has(ks)
	for n, want := range map[*node]int{b: 60, foreign: 0, open: 0, liar: 0} {
		r := n.request("r", from(a, source, "kv"))
		if got, took := n.load(r, ks); got != want || took > bound()/2 {
			t.Errorf("%s: %d blocks after %v, want %d", n.name, got, took, want)
		}
		n.finish(r)
	}
	empty(t, a, b, foreign, open, liar)
	if s := a.status().Peers; s.Mode != "tls" || s.Sessions != 1 || s.Violations == 0 {
		t.Errorf("%+v", *s)
	}
	if log := a.stderr.String(); !strings.Contains(log, `hello.node: it says it is`) || !strings.Contains(log, `CN=liar`) {
		t.Errorf("a: %s", log)
	}
	if log := foreign.stderr.String(); !strings.Contains(log, "certificate") {
		t.Errorf("foreign: %s", log)
	}
}
