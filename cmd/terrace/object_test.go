package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// configFor writes a configuration file.
func configFor(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "terrace.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// The settings of vLLM's object tier are taken as they are, and a secret is
// never shown.
func TestObjectSettings(t *testing.T) {
	home(t)
	path := configFor(t, `
tiers:
- type: object
  prefix: kv/
  io_threads: 4
  store_config: {bucket: blocks, endpoint_override: "http://127.0.0.1:9", access_key: AKIDAKID, secret_key: hush-hush, session_token: token-token, region: eu-west-9}
`)
	code, out, errs := runHere(nil, "config", "print", "--config", path)
	for _, want := range []string{"bucket: blocks", "prefix: kv", "endpoint: 127.0.0.1:9", "scheme: http", "region: eu-west-9", "workers: 4", "set, not shown"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	if code != 0 || strings.Contains(out+errs, "hush") || strings.Contains(out+errs, "token-token") || strings.Contains(out+errs, "AKIDAKID") {
		t.Errorf("exit code %d, or a secret is shown:\n%s%s", code, out, errs)
	}
}

// What cannot work is said before anything is sent, all at once.
func TestObjectSettingsFaults(t *testing.T) {
	home(t)
	path := configFor(t, `
tiers:
- {type: object, name: a, access_key: AKID, session_token: hush}
- {type: object, name: b, bucket: x, ca_bundle: /nowhere/ca.pem}
- {type: object, name: c, bucket: x, addressing: virtual, endpoint: "127.0.0.1:9"}
- {type: object, name: d, bucket: x, checksum: md5, capacity: 1KiB}
`)
	code, out, errs := runHere(nil, "config", "print", "--config", path)
	for _, want := range []string{"tiers.0.bucket", "tiers.0.secret_key", "tiers.1.bucket", "/nowhere/ca.pem", "tiers.2.bucket", "virtual", "tiers.3.checksum", "tiers.3.capacity"} {
		if !strings.Contains(errs, want) {
			t.Errorf("no %q in\n%s", want, errs)
		}
	}
	if code != exitUsage || strings.Contains(out+errs, "hush") {
		t.Errorf("exit code %d, or a secret is shown:\n%s", code, errs)
	}
}

// A store that cannot be reached does not keep the node from serving, unless
// the tier is required; either way one message says which store and why.
func TestServeWithoutItsStore(t *testing.T) {
	path := configFor(t, `
tiers:
- {type: object, name: far, bucket: blocks, endpoint: "127.0.0.1:1", scheme: http, access_key: AKID, secret_key: hush-hush}
`)
	p := launch(t, "serve", "--primary", "16MiB", "--admin", ":0", "--config", path, "--set", "tiers.far.required=true")
	if code := p.ends(t); code != exitFailure || !strings.Contains(p.stderr.String(), "http://127.0.0.1:1/blocks") || !strings.Contains(p.stderr.String(), "check endpoint") {
		t.Errorf("required: exit code %d\n%s", code, p.stderr)
	}
	p, block := start(t, "serve", "--primary", "16MiB", "--admin", ":0", "--config", path)
	if !strings.Contains(block, "NOT OPEN") || !strings.Contains(block, "127.0.0.1:1/blocks") {
		t.Errorf("start block:\n%s", block)
	}
	_ = p.Process.Signal(os.Interrupt)
	if code := p.ends(t); code != exitOK || strings.Contains(p.stderr.String()+block, "hush") {
		t.Errorf("exit code %d, or a secret is shown\n%s", code, p.stderr)
	}
}
