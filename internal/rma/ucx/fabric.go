//go:build ucx && cgo

package ucx

/*
#cgo pkg-config: ucx
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/terrace-kv/terrace/internal/rma"
)

const (
	heldMax  = C.TU_GETS // gets that are not released
	knockFor = 200 * time.Millisecond
	turnMax  = 256 // gets that one turn starts, and that it ends
)

var (
	errClosed   = errors.New("ucx: closed")
	errInUse    = errors.New("ucx: still in use")
	errUnderWay = errors.New("ucx: the get is still under way")
	errRange    = errors.New("ucx: not within the peer's region")
	errBusy     = fmt.Errorf("ucx: %d gets are not released yet", heldMax)
)

// explain makes an error of a status; it is called on the thread that got it.
func explain(what string, status C.int) error {
	if status == 0 {
		return nil
	}
	return fmt.Errorf("ucx: %s: %s", what, C.GoString(C.tu_explain(status)))
}

// fabric has a worker for its own gets and, once it has a region, one that
// serves peers: the region ends with its worker, so that nothing reads it then
// even where UCX emulates RMA, and the end of a connection to a peer is not that
// of the peer's connection to us.
type fabric struct {
	ctx *C.tu_context
	own *worker

	mu     sync.Mutex
	region *region
	peers  int
	closed bool
}

// Open begins a fabric.
func Open(o Options) (rma.Fabric, error) {
	transports := C.CString(o.Transports)
	defer C.free(unsafe.Pointer(transports))
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	f := &fabric{}
	if err := explain("open", C.tu_open(transports, &f.ctx)); err != nil {
		return nil, err
	}
	var err error
	if f.own, err = f.newWorker(nil); err != nil {
		C.tu_close(f.ctx)
		return nil, err
	}
	return f, nil
}

func (f *fabric) Name() string { return Name }

// Register does not touch mem's pages. Where the transport needs them pinned, it
// pins what is read when it is read first.
func (f *fabric) Register(mem []byte) (rma.Region, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.closed:
		return nil, errClosed
	case f.region != nil:
		return nil, errors.New("ucx: there is a region already")
	case len(mem) == 0:
		return nil, errors.New("ucx: register no memory")
	}
	r := &region{f: f, mem: mem}
	r.pin.Pin(&mem[0])
	var err error
	if r.w, err = f.newWorker(mem); err != nil {
		r.pin.Unpin()
		return nil, err
	}
	err = r.w.do(func() error {
		var address unsafe.Pointer
		var n C.size_t
		if err := explain("address of a worker", C.tu_address(r.w.c, &address, &n)); err != nil {
			return err
		}
		r.description, err = description{uint64(len(mem)), C.GoBytes(address, C.int(n))}.pack()
		return err
	})
	if err != nil {
		r.w.close()
		r.pin.Unpin()
		return nil, err
	}
	f.region = r
	return r, nil
}

func (f *fabric) Connect(b []byte) (rma.Peer, error) {
	d, err := parseDescription(b)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return nil, errClosed
	}
	p := &peer{f: f, w: f.own, size: d.size}
	err = f.own.do(func() error {
		address := C.CBytes(append(d.worker[:len(d.worker):len(d.worker)], make([]byte, 256)...)) // UCX may read beyond what is damaged
		defer C.free(address)
		return explain("connect", C.tu_connect(p.w.c, address, &p.c))
	})
	if err != nil {
		return nil, err
	}
	f.peers++
	return p, nil
}

func (f *fabric) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return nil
	}
	if f.region != nil || f.peers > 0 || !f.own.unused() {
		return errInUse
	}
	f.closed = true
	f.own.close()
	C.tu_close(f.ctx)
	return nil
}

type region struct {
	f           *fabric
	w           *worker
	mem         []byte // kept
	pin         runtime.Pinner
	description []byte
}

func (r *region) Description() []byte { return r.description }

// Release ends the worker that serves the region, after which nothing reads it.
func (r *region) Release() error {
	r.f.mu.Lock()
	defer r.f.mu.Unlock()
	if r.f.region == r {
		if err := r.w.do(func() error { return explain("end the serving of memory", C.tu_unserve(r.w.c)) }); err != nil {
			return err
		}
		r.w.close()
		r.pin.Unpin()
		r.f.region = nil
	}
	return nil
}

type peer struct {
	f    *fabric
	w    *worker
	c    *C.tu_peer
	size uint64

	answered atomic.Bool // it has answered something
	closed   bool        // under w.mu

	// Of the worker's goroutine.
	under int // gets that are with C
	gone  bool
}

// Post takes any dst. Memory of Go's heap is pinned until Release.
func (p *peer) Post(dst []byte, off uint64) (rma.Handle, error) {
	if n := uint64(len(dst)); n == 0 || n > p.size || off > p.size-n {
		return nil, fmt.Errorf("%w: %d bytes from %d of %d", errRange, n, off, p.size)
	}
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	if p.closed {
		return nil, errClosed
	}
	return p.post(dst, off)
}

// post is called with w.mu held.
func (p *peer) post(dst []byte, off uint64) (*get, error) {
	if p.w.held == heldMax {
		return nil, errBusy
	}
	g := &get{p: p, dst: dst, off: off, over: make(chan struct{})}
	if len(dst) > 0 {
		g.pin.Pin(&dst[0])
	}
	p.w.held++
	p.w.posts = append(p.w.posts, g)
	p.w.wake()
	return g, nil
}

// Close ends the gets that are under way with an error, of those that UCX writes
// once it says that it does not any more: UCX calls back for such a request after
// the lanes that it used are flushed, with UCT_FLUSH_FLAG_CANCEL, and destroyed
// (openucx/ucx v1.13.1, src/ucp/core/ucp_ep.c: ucp_ep_discard_lanes, whose end
// calls ucp_ep_reqs_purge). The others are found by a key that is given up.
//
// A peer on UCX before 1.14 aborts if a connection ends before it has answered
// (openucx/ucx pull request 8175): so Close waits for an answer, a little.
func (p *peer) Close() error {
	p.w.mu.Lock()
	closed := p.closed
	p.closed = true
	var knock *get
	if !closed && !p.answered.Load() {
		knock, _ = p.post(nil, 0)
	}
	p.w.mu.Unlock()
	if closed {
		return nil
	}
	if knock != nil {
		ctx, cancel := context.WithTimeout(context.Background(), knockFor)
		defer cancel()
		_, _ = knock.Poll(ctx)
	}
	err := p.w.do(func() error {
		p.gone = true
		C.tu_disconnect(p.c)
		p.forget()
		return nil
	})
	if knock != nil {
		<-knock.over
		err = errors.Join(err, knock.Release())
	}
	p.f.mu.Lock()
	p.f.peers--
	p.f.mu.Unlock()
	return err
}

// forget gives back what UCX needs as long as gets are under way.
func (p *peer) forget() {
	if p.gone && p.under == 0 {
		C.tu_forget(p.c)
	}
}

type get struct {
	p    *peer
	dst  []byte // kept
	pin  runtime.Pinner
	off  uint64
	over chan struct{} // closed after err was set
	err  error

	released bool
}

func (g *get) Poll(ctx context.Context) (bool, error) {
	select {
	case <-g.over:
		return true, g.err
	default:
	}
	select {
	case <-g.over:
		return true, g.err
	case <-ctx.Done():
		return false, nil
	}
}

func (g *get) Release() error {
	select {
	case <-g.over:
	default:
		return errUnderWay
	}
	if !g.released {
		g.released = true
		g.pin.Unpin()
		g.p.w.mu.Lock()
		g.p.w.held--
		g.p.w.mu.Unlock()
	}
	return nil
}

// worker is one of UCX's, and the goroutine that makes all calls for it: UCX
// needs to be called for peers that read our memory, too, where RMA is emulated.
type worker struct {
	c     *C.tu_worker
	ended sync.WaitGroup

	mu     sync.Mutex
	calls  []func() // at most one of each who calls do
	posts  []*get
	held   int // gets that are not released, at most heldMax
	asleep bool
	stop   bool
}

// newWorker begins one that serves mem, or one that gets.
func (f *fabric) newWorker(mem []byte) (*worker, error) {
	w := &worker{}
	base := C.uint64_t(uintptr(unsafe.Pointer(unsafe.SliceData(mem))))
	opened := make(chan error)
	w.ended.Go(func() {
		runtime.LockOSThread() // and the thread ends with this goroutine
		err := explain("open a worker", C.tu_worker_open(f.ctx, base, C.uint64_t(len(mem)), &w.c))
		opened <- err
		if err == nil {
			w.run()
			C.tu_worker_close(w.c)
		}
	})
	return w, <-opened
}

// wake is called with mu held.
func (w *worker) wake() {
	if w.asleep {
		w.asleep = false
		C.tu_wake(w.c)
	}
}

// do has call made by the worker's goroutine, and waits.
func (w *worker) do(call func() error) error {
	over := make(chan error, 1)
	w.mu.Lock()
	w.calls = append(w.calls, func() { over <- call() })
	w.wake()
	w.mu.Unlock()
	return <-over
}

func (w *worker) unused() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.held == 0
}

// close is called when nothing is under way and nobody calls do any more.
func (w *worker) close() {
	w.mu.Lock()
	w.stop = true
	w.wake()
	w.mu.Unlock()
	w.ended.Wait()
}

func (w *worker) run() {
	under := map[uint64]*get{} // what UCX has, by id
	var last uint64
	posts, overs := make([]C.tu_post, 0, turnMax), make([]C.tu_over, turnMax)
	for {
		w.mu.Lock()
		fresh := w.posts[:min(turnMax, len(w.posts))]
		w.posts = w.posts[len(fresh):]
		calls := w.calls
		w.calls = nil
		if w.stop && len(calls) == 0 && len(fresh) == 0 {
			w.mu.Unlock()
			return
		}
		w.asleep = len(fresh) == 0 && len(calls) == 0
		wait := C.int(0)
		if w.asleep {
			wait = 1
		}
		w.mu.Unlock()

		posts = posts[:0]
		for _, g := range fresh {
			if g.p.gone {
				g.err = errClosed
				close(g.over)
				continue
			}
			last++
			under[last] = g
			g.p.under++
			posts = append(posts, C.tu_post{
				id: C.uint64_t(last), peer: g.p.c, off: C.uint64_t(g.off),
				dst: C.uint64_t(uintptr(unsafe.Pointer(unsafe.SliceData(g.dst)))), len: C.uint64_t(len(g.dst)),
			})
		}
		clear(fresh)
		n := C.tu_turn(w.c, unsafe.SliceData(posts), C.int(len(posts)), &overs[0], C.int(len(overs)), wait)
		for _, o := range overs[:n] {
			g := under[uint64(o.id)]
			delete(under, uint64(o.id))
			if o.status != 0 {
				g.err = fmt.Errorf("ucx: get: %s", C.GoString(C.tu_text(o.status)))
			} else {
				g.p.answered.Store(true)
			}
			g.p.under--
			g.p.forget()
			close(g.over)
		}
		for _, call := range calls {
			call()
		}
	}
}
