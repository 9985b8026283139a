package peer

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/internal/peer"
)

// pems are a certificate of 127.0.0.1 that signs itself, and its key.
var pems = sync.OnceValues(func() (cert, key []byte) {
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	x := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	der, err := x509.CreateCertificate(rand.Reader, x, x, &k.PublicKey, k)
	if err != nil {
		panic(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		panic(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8})
})

func certificate(b *testing.B) peer.TLSFiles {
	b.Helper()
	dir := b.TempDir()
	f := peer.TLSFiles{Cert: filepath.Join(dir, "cert"), Key: filepath.Join(dir, "key")}
	f.CA = f.Cert
	cert, key := pems()
	for name, text := range map[string][]byte{f.Cert: cert, f.Key: key} {
		if err := os.WriteFile(name, text, 0o600); err != nil {
			b.Fatal(err)
		}
	}
	return f
}
