// Package engine serves engines over a unix socket: it turns frames of
// internal/wire into calls of a Backend, and nothing more. docs/protocol.md
// says what engines may rely on.
//
// # Connections
//
// A connection begins with a hello, which opens a session, or with an attach,
// which gives one more process of that engine its own description of the
// region. A session is a lease: when its connection ends, for whatever reason,
// Session.Close gives back all that the engine held, and the workers'
// connections are ended, too. An attached connection's end ends nothing else.
//
// Malformed input ends its connection, after an error frame and a line in the
// log. A call that is refused gets an error frame and changes nothing.
//
// # Goroutines
//
//   - one accepts, until the listener is closed;
//   - one for each connection reads frames, makes the calls and writes their
//     replies, so that a lookup takes no hop; calls of one connection are carried
//     out in order;
//   - one for each session writes the answers that come later (waiting lookups,
//     flush, reset). It ends with the session; the reader waits for it.
//
// Server.Close waits for all of them.
//
// # Bounds
//
// Options names them: sessions, workers, connections that have not greeted and
// their time, requests, waiting calls and their keys. A frame's length is
// checked before memory is taken for it, and memory is taken only as bytes
// arrive. At rest a connection keeps at most about 0.5 MiB. A client that does not read its replies
// holds up nobody but itself, for WriteTimeout; then its session ends.
//
// # Locks
//
// Server.mu guards the tables and is never held over a Backend call or a
// write. A connection's write lock is taken after the backend has returned,
// never under the node's lock: the node's callbacks only append to a queue
// whose room was taken before the call.
package engine
