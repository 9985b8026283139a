package object

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/terrace-kv/terrace"
)

// issuer hands out credentials that live for a short time, as a container's
// role does, and stands before a store that takes only those that live.
type issuer struct {
	life time.Duration

	mu      sync.Mutex
	until   []time.Time // when each token ends
	last    time.Time   // when the last one was handed out
	refused int
}

const tokenName = "secret-token-"

// ServeHTTP hands out credentials.
func (i *issuer) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.last = time.Now()
	until := i.last.Add(i.life)
	token := fmt.Sprint(tokenName, len(i.until))
	i.until = append(i.until, until)
	_ = json.NewEncoder(w).Encode(map[string]string{"AccessKeyId": "role", "SecretAccessKey": "secret-of-role", "Token": token, "Expiration": until.UTC().Format(time.RFC3339Nano)})
}

// revoke ends the last token before its time, if it has been in use for a
// while, and says whether it did.
func (i *issuer) revoke() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	n := len(i.until) - 1
	if n < 0 || time.Since(i.last) < 1200*time.Millisecond || !time.Now().Before(i.until[n]) {
		return false
	}
	i.until[n] = time.Time{}
	return true
}

// guard refuses what is signed with a token that is over.
func (i *issuer) guard(under http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// The independent client has keys of its own, and no token.
		if text, ok := strings.CutPrefix(r.Header.Get("X-Amz-Security-Token"), tokenName); ok {
			n, err := strconv.Atoi(text)
			i.mu.Lock()
			bad := err != nil || n >= len(i.until) || !time.Now().Before(i.until[n])
			if bad {
				i.refused++
			}
			i.mu.Unlock()
			if bad {
				w.Header().Set("Content-Type", "application/xml")
				w.WriteHeader(http.StatusBadRequest)
				fmt.Fprint(w, "<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>")
				return
			}
		}
		under.ServeHTTP(w, r)
	})
}

// Credentials that end, on time or before it, cost a request that is sent again,
// and no block.
func TestCredentialsExpireUnderLoad(t *testing.T) {
	i := &issuer{life: time.Duration(sized(3, 5)) * time.Second}
	s := fake(t, i.guard)
	role := httptest.NewServer(i)
	t.Cleanup(role.Close)
	s.secrets = append(s.secrets, "secret-of-role", tokenName)
	t.Setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", role.URL+"/role")
	t.Setenv("AWS_EC2_METADATA_DISABLED", "true")
	s.o.AccessKey, s.o.SecretKey = "", ""
	n := start(t, s, 16<<10, 4<<20, terrace.Tier{Tier: s.tier(nil)})
	end := time.Now().Add(time.Duration(sized(7, 60)) * time.Second)
	revoked, prompts := 0, 0
	for seen := 0; time.Now().Before(end); prompts++ {
		i.mu.Lock()
		issued := len(i.until)
		i.mu.Unlock()
		if issued%2 == 1 && issued != seen && i.revoke() { // of two, one ends before its time
			seen = issued
			revoked++
		}
		ks := keys(fmt.Sprint(prompts), 8)
		if _, err := n.put(t.Context(), ks, true); err != nil {
			t.Fatalf("prompt %d: %v", prompts, err)
		}
		n.forget()
		if hits, err := n.get(t.Context(), ks, waitMax); err != nil || hits != len(ks) {
			t.Errorf("prompt %d: %d hits, %v", prompts, hits, err)
		}
	}
	st := n.idle()
	f := of(&st, "object")
	i.mu.Lock()
	defer i.mu.Unlock()
	t.Logf("%d prompts of 8 blocks; %d tokens handed out, %d ended before their time, %d requests refused; failures %v", prompts, len(i.until), revoked, i.refused, f.Failures)
	if total(f.Failures) != 0 || f.WriteHealth != "closed" || f.ReadHealth != "closed" {
		t.Errorf("%+v", f)
	}
	if i.refused == 0 || revoked == 0 || len(i.until) < 3 {
		t.Errorf("%d requests refused, %d tokens, %d revoked: that is no test", i.refused, len(i.until), revoked)
	}
}
