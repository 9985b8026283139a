// Package objtier is a tier in a bucket of an S3 or compatible store: one
// object a block, one request a block in either direction, and no request for
// what it knows.
package objtier
