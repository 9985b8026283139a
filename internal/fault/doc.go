// Package fault is one language for faults at every seam of the node, for
// tests. Rules are text, so that the log of a failing run holds what replays
// it:
//
//	error(EIO) when and(seam(file), op(write), key("tmp/*"), index(3))
//	delay(5ms) error(retryable, io) when randomly(0.01, 42)
//
// A rule is actions and, after when, a predicate. Rules are asked in order; the
// first whose predicate holds decides, and those behind it are not asked.
// Rules end with a newline or a semicolon; # begins a comment.
//
// # Predicates
//
//	always                every op
//	reads, writes         what leaves things as they are, and the rest
//	seam(NAME)            one of file, tier, conn, http
//	op(KIND, …)           what the seam calls its calls: open, read, link, …
//	key("GLOB")           path, block key, connection or URL's path and query; * stands for anything, / included, ? for one character
//	off(FROM, TO)         offset in a file or stream, FROM included
//	index(N)              the N-th op that this predicate is asked about, from 0
//	once(P), times(N, P)  the first, or first N, ops for which P holds
//	randomly(P, SEED)     with probability P, by seed, seam, kind, key and how often those were seen
//	and(P, …), or(P, …)   asked from left to right, no further than needed
//	not(P)
//
// What randomly says for a key does not depend on ops for other keys, so not on
// what other goroutines do. Names that differ from run to run defeat that; the
// adapters can be given a function that makes them equal.
//
// # Actions
//
//	             file                      tier, one block            conn
//	error(E)     the call is not made and fails with E
//	late(E)      the call is made and fails with E all the same
//	delay(D)     it begins later
//	hang         it begins when Set.Release is called
//	short(N)     a read or write is        a read fails as short      a read gives N bytes at most;
//	             cut to N bytes                                       a write leaves in two pieces
//	torn(N)      a write keeps N bytes     only N bytes are right,    N bytes pass, then disconnect
//	             and says it kept all      and nothing tells
//	flip         one bit is wrong
//	disconnect   ENODEV                    a retryable error          closed, ECONNRESET
//
// At the seam http a call is one request; kinds are methods in lower case.
// Bytes are those of the request's body, or of the answer's if it has none.
//
//	error(E)         the request is not sent and fails with E
//	late(E)          it is sent and answered, and fails with E all the same
//	delay(D)         it begins later
//	hang             it begins when Set.Release is called
//	disconnect       it is not sent and fails with ECONNRESET
//	short(N)         a read of the answer's body gives N bytes at most
//	torn(N)          N bytes pass, then disconnect
//	flip             one bit is wrong
//	status(N, CODE)  it is not sent, and answered with that status and an error
//	                 document; CODE may be left out
//	length(N)        the answer says that it has N bytes, and gives no more
//	stall(N)         N bytes of the answer's body pass, the others when
//	                 Set.Release is called
//	linger           its body is read on, slowly, after it has failed, and closed
//	                 when Set.Release is called; it fails with its context, or at
//	                 once with error(E)
//
// Waits of this seam end with the request's context, as those of a transport
// do. The last four actions mean nothing elsewhere.
//
// E is an errno by name, or a class and a cause of package tier. Actions of one
// rule go together: torn(512) error(EIO) is a write that fails after 512 bytes.
//
// The adapters are FS, Tier, Conn and HTTP. The package starts no goroutines but
// those of linger, which HTTP's Wait waits for; a call that hangs or is delayed
// does so on its caller's. A Set keeps the last
// hitsMax injections, and one number for each key that randomly was asked about.
package fault
