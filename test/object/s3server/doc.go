// Package s3server runs a real S3 server, versitygw on a folder, as a process
// of its own: for tests, benchmarks and the demo. It is built from the module
// in tools/s3server, so that nobody who uses Terrace inherits what it needs.
//
// A Server has one goroutine while its process runs, which waits for it. Kill,
// Stop and Close wait for both. The process ends with ours, however that ends.
package s3server
