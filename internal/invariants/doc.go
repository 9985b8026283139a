// Package invariants has the build tag for expensive checks, and the helpers
// that go with it.
//
// Enabled is a constant: true with `-tags invariants` or `-race`, false
// otherwise, so that `if invariants.Enabled { … }` vanishes from shipped
// binaries. A check may only look: a different production path behind Enabled
// would leave the shipped path untested. What only a bug can cause and what
// would serve wrong bytes is checked always, by panic, without this package.
//
// The package starts no goroutine and holds no state of its own.
package invariants
