// Package s3 speaks the part of the S3 protocol that a store of blocks needs:
// one object put, got, asked for, listed and removed, each in one signed HTTP
// request, with errors that say whose fault they are.
//
// It retries nothing and keeps nothing: whoever calls decides. There are two
// exceptions. Credentials that were refused because of their age are renewed,
// and the request is sent again, once. And net/http sends a request again whose
// connection turned out to be gone, if that can do no harm. All calls may be
// made from many goroutines, block until they are over, and are bounded by
// their context. When Put or Get returns, nothing reads or writes the bytes
// that it was given any more: a Get reads them in its caller's goroutine, and
// a Put revokes its Body.
//
// # Goroutines
//
// The transport has two for each connection, of which there are at most
// Options.ConnsMax; they end with it, at the latest 30 s after its last use, or
// with Close. Credentials are fetched in one goroutine at a time, bounded by
// 10 s; Close ends it and waits for it, not longer than that: a credential
// process of the shared files that hangs is left to the end of the process.
//
// # Bounds
//
// A listing and an answer to DeleteMany have at most 4 MiB, an error document
// 64 KiB and 5 s, an answer of a credential service 1 MiB, keys 1,024 bytes. A
// call allocates about 6 KiB, and a Put 34 KiB more, whatever the block's size.
//
// # Secrets
//
// They are in the signer and in requests, nowhere else: not in errors, whose
// text from a store is searched for them, and not in Source.
package s3
