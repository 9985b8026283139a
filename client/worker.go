package client

import (
	"context"
	"fmt"
	"net"
	"os"
	"sync"

	"github.com/terrace-kv/terrace/internal/wire"
)

// Worker is the region as a worker process of an engine has it: its methods
// View, Write, ReadInto and Verify work on leases and grants that the engine's
// scheduler got. It ends with the engine's session.
type Worker struct {
	*Region
	conn *net.UnixConn
	wg   sync.WaitGroup
	done chan struct{}
}

// AttachWorker attaches this process to the session of its engine, which has
// given it the token and the socket's path (empty: the default). The caller
// owns the Worker, and closes it.
func AttachWorker(ctx context.Context, socket string, token Token, verifyOnLoad bool) (*Worker, error) {
	if socket == "" {
		var err error
		if socket, err = wire.DefaultSocket(); err != nil {
			return nil, err
		}
	}
	var reply wire.AttachReply
	conn, r, file, err := greet(ctx, socket, wire.TypeAttach, &wire.Attach{Versions: wire.Versions{Min: wire.VersionMin, Max: wire.VersionMax}, Token: token}, &reply)
	if err != nil {
		return nil, err
	}
	w, err := newWorker(&reply.Region, conn, file, verifyOnLoad)
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("attach to node at %s: %w", socket, err)
	}
	w.wg.Go(func() { w.watch(r) })
	return w, nil
}

func newWorker(reply *wire.Region, conn *net.UnixConn, file *os.File, verify bool) (*Worker, error) {
	defer file.Close() // the mapping alone holds the attach
	info, err := regionInfo(reply)
	if err != nil {
		return nil, err
	}
	region, err := newRegion(file, info, verify)
	if err != nil {
		return nil, err
	}
	return &Worker{Region: region, conn: conn, done: make(chan struct{})}, nil
}

// watch waits for the connection's end, which is how the node tells that the
// session is over, and then gives up the region.
func (w *Worker) watch(r *wire.Reader) {
	defer close(w.done)
	for {
		if _, err := r.Read(); err != nil {
			break
		}
	}
	w.conn.Close()
	_ = w.Region.Close() // fails only if it was closed before; waits for views
}

// Done is closed when the session has ended and nothing is mapped any more.
func (w *Worker) Done() <-chan struct{} { return w.done }

// Close detaches: it waits for View and Write functions that run, and unmaps.
// The engine's session goes on.
func (w *Worker) Close() error {
	w.conn.Close() // perhaps closed already
	w.wg.Wait()
	return nil
}
