package fstier

import "strings"

// straysMax bounds how many strays are remembered. Others stay until the next
// start.
const straysMax = 4096

// stray is a file of this run in tmp that should be gone and could not be
// removed. Its bytes count as used.
type stray struct {
	name  string
	bytes int64
}

// keepStrayLocked remembers a stray. On a medium where one call in a hundred
// fails, those that nobody removed had a sixth of the capacity after some
// minutes, and would have had all of it.
func (t *Tier) keepStrayLocked(name string, bytes int64) {
	// A name that is not in tmp may be another file's by now.
	if strings.HasPrefix(name, t.tmpName) && len(t.mu.strays) < straysMax {
		t.mu.strays = append(t.mu.strays, stray{name, bytes})
	}
}

// retryStray tries again to remove one stray, if there is any. Each write calls
// it: as long as there are strays, each costs one call more.
func (t *Tier) retryStray() {
	t.mu.Lock()
	n := len(t.mu.strays)
	if n == 0 {
		t.mu.Unlock()
		return
	}
	t.mu.tmpSeq++ // so that one that cannot be removed does not keep others back
	i := int(t.mu.tmpSeq % uint64(n))
	s := t.mu.strays[i]
	t.mu.strays[i] = t.mu.strays[n-1]
	t.mu.strays = t.mu.strays[:n-1]
	t.mu.Unlock()
	err := t.fs.Remove(s.name)
	t.mu.Lock()
	defer t.mu.Unlock()
	if err != nil && !gone(err) {
		t.mu.strays = append(t.mu.strays, s)
		return
	}
	t.mu.account.add(-s.bytes)
	t.mu.free.bytes += s.bytes
}
