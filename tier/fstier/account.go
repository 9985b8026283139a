package fstier

// account counts bytes as the file system charges them. The tier's mu guards
// it.
//
// INVARIANT(fs-used-bound): used is never less than the sum of st_blocks*512
// over the regular files under the root, writes under way included; once the
// scan is done and nothing is under way, it is that sum.
type account struct {
	known    int64 // what is indexed or otherwise found, and reservations
	bound    int64 // what the last run left at most, with all changes since
	hasBound bool  // bound can be relied on
	scanned  bool  // known is everything

	inflight int64 // reservations
	extra    int64 // most that a file was charged beyond what was reserved
}

func (a *account) used() int64 {
	if a.scanned || !a.hasBound {
		return a.known
	}
	return max(a.known, a.bound)
}

// add counts bytes that come into being, or, negative, go.
func (a *account) add(n int64) {
	a.known += n
	a.bound += n
}

// found counts bytes that were there all the time; bound has them.
func (a *account) found(n int64) { a.known += n }

// lost is told of bytes that went before they were found.
func (a *account) lost(n int64) { a.bound -= n }

func (a *account) reserve(n int64) {
	a.add(n)
	a.inflight += n
}

// settle ends a reservation: what was used of it stays counted.
func (a *account) settle(reserved, used int64) {
	a.add(used - reserved)
	a.inflight -= reserved
	if used > 0 {
		a.learn(used - reserved)
	}
}

// learn notes that a file was charged more than was reserved.
func (a *account) learn(over int64) {
	if over > 0 {
		a.extra += over
	}
}

// found is account.found under mu.
func (t *Tier) found(n int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.account.found(n)
}
