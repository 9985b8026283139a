// Package fakerma is a fabric within one process, with the faults that fabrics
// have, for tests.
package fakerma

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"sync"

	"github.com/terrace-kv/terrace/internal/rma"
)

// Network joins fabrics.
type Network struct {
	mu      sync.Mutex
	last    uint64
	regions map[uint64][]byte
}

// Fault is what goes wrong with one get. The zero value is none.
type Fault struct {
	Post   error           // of Post
	Failed error           // the get is over without having got anything
	Lost   error           // of Poll, with done false; the get goes on
	Hold   <-chan struct{} // it is not over before this is closed, not even if its peer is; reads of nil wait for nothing
	Stall  bool            // it is over when its peer is closed
	Wrong  bool            // the bytes are others
	Twice  bool            // it writes again after Poll has said that it is over
	Refuse int             // releases that fail
	Stuck  <-chan struct{} // releases fail until this is closed
}

// Fabric implements rma.Fabric.
type Fabric struct {
	// Plan, if set, says what goes wrong with a get. Set it before Connect.
	Plan func(off uint64, n int) Fault
	// Busy is how many releases of the region fail. Set it before Register.
	Busy int

	net  *Network
	name string
	wg   sync.WaitGroup // writers

	mu     sync.Mutex
	region uint64 // 0 if there is none
	peers  int
	gets   int // posted and not released
	posts  int
	closed bool
}

// New joins nothing yet.
func New() *Network { return &Network{regions: map[uint64][]byte{}} }

// Open adds a fabric.
func (n *Network) Open(name string) *Fabric { return &Fabric{net: n, name: name} }

// Name implements rma.Fabric, as the following do.
func (f *Fabric) Name() string { return f.name }

func (f *Fabric) Register(mem []byte) (rma.Region, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed || f.region != 0 || len(mem) == 0 {
		return nil, fmt.Errorf("fakerma: Register of %d bytes, again or after Close", len(mem))
	}
	f.net.mu.Lock()
	defer f.net.mu.Unlock()
	f.net.last++
	f.region = f.net.last
	f.net.regions[f.region] = mem
	return &region{f: f, id: f.region}, nil
}

func (f *Fabric) Connect(description []byte) (rma.Peer, error) {
	id, ok := bytes.CutPrefix(description, []byte(magic))
	if !ok || len(id) != 8 {
		return nil, fmt.Errorf("fakerma: %q describes nothing", description)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return nil, errors.New("fakerma: Connect after Close")
	}
	f.peers++
	return &peer{f: f, id: binary.BigEndian.Uint64(id), over: make(chan struct{})}, nil
}

// Close fails if anything is left.
func (f *Fabric) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed || f.region != 0 || f.peers > 0 || f.gets > 0 {
		return fmt.Errorf("fakerma: Close (again: %v) with region %d, %d peers and %d gets", f.closed, f.region, f.peers, f.gets)
	}
	f.closed = true
	f.wg.Wait()
	return nil
}

// Left is what Close would complain of, and whether it was called.
func (f *Fabric) Left() (peers, gets int, closed bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.peers, f.gets, f.closed
}

// Posts is how many gets were posted.
func (f *Fabric) Posts() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.posts
}

const magic = "fakerma:" // a description, before the region's number

type region struct {
	f  *Fabric
	id uint64
}

func (r *region) Description() []byte { return binary.BigEndian.AppendUint64([]byte(magic), r.id) }

func (r *region) Release() error {
	r.f.mu.Lock()
	defer r.f.mu.Unlock()
	if r.f.Busy > 0 {
		r.f.Busy--
		return errors.New("fakerma: busy")
	}
	r.f.net.mu.Lock()
	defer r.f.net.mu.Unlock()
	delete(r.f.net.regions, r.id)
	r.f.region = 0
	return nil
}

type peer struct {
	f    *Fabric
	id   uint64
	over chan struct{}
}

func (p *peer) closed() bool {
	select {
	case <-p.over:
		return true
	default:
		return false
	}
}

func (p *peer) Close() error {
	p.f.mu.Lock()
	defer p.f.mu.Unlock()
	if !p.closed() {
		close(p.over)
		p.f.peers--
	}
	return nil
}

func (p *peer) Post(dst []byte, off uint64) (rma.Handle, error) {
	f := p.f
	var fault Fault
	if f.Plan != nil {
		fault = f.Plan(off, len(dst))
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if p.closed() || f.closed {
		return nil, errors.New("fakerma: Post after Close")
	}
	if fault.Post != nil {
		return nil, fault.Post
	}
	f.net.mu.Lock()
	mem := f.net.regions[p.id]
	f.net.mu.Unlock()
	if len(dst) == 0 || off > math.MaxInt64 || int64(off) > int64(len(mem))-int64(len(dst)) {
		return nil, fmt.Errorf("fakerma: %d bytes at %d of a region of %d", len(dst), off, len(mem))
	}
	f.gets++
	f.posts++
	h := &handle{f: f, fault: fault, polled: make(chan struct{}), done: make(chan struct{}), quiet: make(chan struct{})}
	f.wg.Go(func() { h.write(p, dst, mem[off:off+uint64(len(dst))]) })
	return h, nil
}

type handle struct {
	f      *Fabric
	fault  Fault
	err    error         // of the get, when done
	done   chan struct{} // Poll may say so
	polled chan struct{} // Poll has said so
	quiet  chan struct{} // nothing writes any more
	told   bool
	refuse int
	gone   bool
}

func (h *handle) write(p *peer, dst, src []byte) {
	if h.fault.Hold != nil {
		<-h.fault.Hold
	}
	if h.fault.Stall {
		<-p.over
	}
	if h.err = h.fault.Failed; h.err == nil && p.closed() {
		h.err = errors.New("fakerma: the peer is closed")
	}
	var b []byte
	if h.err == nil {
		b = read(src)
		if h.fault.Wrong {
			b[len(b)/2] ^= 1
		}
		copy(dst, b)
	}
	if !h.fault.Twice {
		close(h.quiet)
		close(h.done)
		return
	}
	close(h.done)
	select {
	case <-h.polled:
	case <-p.over:
	}
	copy(dst, b)
	close(h.quiet)
}

// read is what the other node's memory has, whoever writes there: it is not
// known to this node, nor to its race detector, which looks into copy all the same.
//
//go:norace
func read(src []byte) []byte {
	b := make([]byte, len(src))
	for i := len(src) - 1; i >= 0; i-- {
		b[i] = src[i]
	}
	return b
}

func (h *handle) Poll(ctx context.Context) (bool, error) {
	if h.fault.Lost != nil {
		return false, h.fault.Lost
	}
	select {
	case <-h.done:
	default:
		select {
		case <-h.done:
		case <-ctx.Done():
			return false, nil
		}
	}
	if !h.told {
		h.told = true
		close(h.polled)
	}
	return true, h.err
}

func (h *handle) Release() error {
	select {
	case <-h.quiet:
	default:
		return errors.New("fakerma: under way")
	}
	if h.refuse++; h.refuse <= h.fault.Refuse {
		return errors.New("fakerma: refused")
	}
	if h.fault.Stuck != nil {
		select {
		case <-h.fault.Stuck:
		default:
			return errors.New("fakerma: stuck")
		}
	}
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	if h.gone {
		panic("fakerma: a handle was released twice")
	}
	h.gone = true
	h.f.gets--
	return nil
}
