package peer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/minio/crc64nvme"
	"github.com/terrace-kv/terrace/internal/rma"
)

// Blocks between two nodes with the same fabric go over it. Each data connection
// begins with a description of each side's region. The producer then offers a
// block where it would have sent it, and keeps it until the consumer has said
// what became of it, or the session is over; the consumer gets it into the slot
// that it has granted. What cannot be got is sent.

const (
	// offersMax is how many offers of one side of a session are open, by the
	// protocol. The rest waits at the producer, where serves take turns.
	offersMax = 64
	// gettersMax is how many gets of a session are under way.
	gettersMax = 16

	releasePause, releasePauseMax = 100 * time.Microsecond, 100 * time.Millisecond
)

// netGets is a session's part of what goes over the fabric, under its lock.
type netGets struct {
	peer    rma.Peer // the other side's region; nil until it is described, or if it cannot be reached
	matched bool     // the other side has a fabric of the same name
	told    bool     // of trouble

	// The consumer's.
	waiting []*get // the oldest first
	getters int
	open    int        // the other side's offers whose answer no sender has
	takens  []DataHead // to be sent

	// The producer's.
	offers   map[blockID]*offered
	progress time.Time // when an offer was answered, or made while none was open
	refused  bool      // the other side cannot get: nothing more is offered
}

// get is a block that was offered, and granted a slot.
type get struct {
	grant  *grant
	head   DataHead
	posted bool // a getter has it
}

// offered is a block that the other side may read at any time.
type offered struct {
	serve  ServeID
	block  DataBlock
	unsent bool // Unsend has come: its bytes are not sent
}

// register lets peers read the region.
func (n *Net) register() error {
	name := n.o.Fabric.Name()
	region, err := n.o.Fabric.Register(n.o.Region)
	if err != nil {
		return fmt.Errorf("register memory with %s: %w", name, err)
	}
	n.region = region
	description := region.Description()
	if name == "" || len(name) > fabricNameMax || len(description) > rma.DescriptionMax {
		return fmt.Errorf("fabric %q describes its memory in %d bytes, at most %d fit", name, len(description), rma.DescriptionMax)
	}
	n.description = appendDescription(nil, name, description)
	return nil
}

// closeFabric ends what register began, when nothing uses it any more.
func (n *Net) closeFabric(ctx context.Context) error {
	n.closing.Lock()
	defer n.closing.Unlock()
	if n.o.Fabric == nil || n.fabricOver {
		return nil
	}
	for pause := releasePause; n.region != nil; pause = min(2*pause, releasePauseMax) {
		err := n.region.Release()
		if err == nil {
			n.region = nil
			break
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("release memory from %s: %w", n.o.Fabric.Name(), err)
		case <-time.After(pause):
		}
	}
	n.fabricOver = true
	if err := n.o.Fabric.Close(); err != nil {
		return fmt.Errorf("close %s: %w", n.o.Fabric.Name(), err)
	}
	return nil
}

// Wire says how a session's blocks go: by the fabric's name, "tls" or "tcp".
func (n *Net) Wire(conn ConnID) (wire string) {
	wire = "tcp"
	if n.o.TLS != nil {
		wire = "tls"
	}
	n.with(conn, func(s *tcpSession) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.mu.gets.peer != nil && !s.mu.gets.refused {
			wire = n.o.Fabric.Name()
		}
	})
	return wire
}

// description takes the other side's.
func (d *dataConn) description(h *DataHead) error {
	if d.heads > 1 {
		return violated("data.kind", "a description that is not the first on its connection")
	}
	b := make([]byte, h.Length)
	for at := 0; at < len(b); {
		d.extendRead()
		n, err := d.conn.Read(b[at:])
		if at += n; err != nil && at < len(b) {
			return err
		}
	}
	name, description, err := decodeDescription(h, b)
	fabric := d.s.n.o.Fabric
	if err != nil || fabric == nil {
		return err
	}
	if name != fabric.Name() {
		d.s.trouble(fmt.Errorf("the peer's fabric is %q, this node's %q: blocks go over TCP", fit(name, fabricNameMax), fabric.Name()))
		return nil
	}
	d.described = true
	return d.s.meet(description)
}

// meet connects to the other side's region, once. An offer comes after a
// description on the same connection, so that there is a peer by then.
func (s *tcpSession) meet(description []byte) error {
	s.meeting.Lock()
	defer s.meeting.Unlock()
	if s.met != nil {
		if !bytes.Equal(s.met, description) {
			return violated("data.description", "another one than on the connection before")
		}
		return nil
	}
	s.met = description
	s.mu.Lock()
	s.mu.gets.matched = true // what is offered the other side needs no peer of ours
	s.mu.Unlock()
	p, err := s.n.o.Fabric.Connect(description)
	s.mu.Lock()
	closed := s.mu.closed
	if err == nil && !closed {
		s.mu.gets.peer = p // finish closes it
	}
	s.mu.Unlock()
	if err != nil {
		s.trouble(fmt.Errorf("connect by %s: %w", s.n.o.Fabric.Name(), err))
	} else if closed {
		_ = p.Close()
	}
	return nil
}

// trouble tells of what keeps blocks from the fabric, once a session.
func (s *tcpSession) trouble(err error) {
	s.mu.Lock()
	told := s.mu.gets.told || s.mu.why != nil
	s.mu.gets.told = true
	s.mu.Unlock()
	if !told && s.n.o.Trouble != nil {
		s.n.o.Trouble(s.addr, err)
	}
}

// offer leaves a block to the getters, if it is wanted.
func (d *dataConn) offer(h *DataHead) error {
	s := d.s
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.gets.open++ // until a sender has the answer
	g := s.mu.grants[h.id()]
	switch {
	case !d.described:
		return violated("data.kind", "an offer, and no description of a fabric that both sides have")
	case s.mu.gets.open > offersMax:
		return violated("data.offers", "%d wait for an answer, no more are allowed", offersMax)
	case g == nil || g.conn != nil: // nobody waits for it, or it has come before
		s.n.n.strayIn.Add(1)
		s.takenLocked(h, takenUnwanted)
	case g.get != nil:
		return violated("data.kind", "a second offer of block %d of round %d", h.Index, h.Round)
	case h.Length != uint64(g.length):
		return violated("data.length", "%d bytes, the block has %d", h.Length, g.length)
	case s.mu.gets.peer == nil:
		s.n.n.getsFailed.Add(1)
		s.takenLocked(h, takenCannot)
	default:
		g.get = &get{grant: g, head: *h}
		s.mu.gets.waiting = append(s.mu.gets.waiting, g.get)
		if s.mu.gets.getters < gettersMax && s.startLocked(s.getter) {
			s.mu.gets.getters++
		}
	}
	return nil
}

// takenLocked answers an offer.
func (s *tcpSession) takenLocked(h *DataHead, outcome uint64) {
	s.mu.gets.takens = append(s.mu.gets.takens,
		DataHead{Kind: DataTaken, Nonce: h.Nonce, Round: h.Round, Index: h.Index, Length: h.Length, At: outcome})
	s.toSend.Signal()
}

// getter gets blocks, the one that has waited longest first, while there are any.
func (s *tcpSession) getter() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.mu.gets.waiting) > 0 && !s.mu.closed {
		t := s.mu.gets.waiting[0]
		s.mu.gets.waiting = s.mu.gets.waiting[1:]
		t.posted = true
		p := s.mu.gets.peer
		s.mu.Unlock()
		s.get(p, t)
		s.mu.Lock()
	}
	s.mu.gets.getters--
}

// get gets one block and tells what became of it.
func (s *tcpSession) get(p rma.Peer, t *get) {
	n, g, id := s.n, t.grant, t.head.id()
	buf := n.o.Memory(g.slot, (g.length+pageBytes-1)&^(pageBytes-1))
	err := s.transfer(p, buf[:g.length], t.head.At)
	if err == nil {
		// Who has ended the session may have put something else there. What is
		// wrong at the peer as well comes as that over TCP.
		if sum := crc64nvme.Checksum(buf[:g.length]); sum != t.head.Sum {
			err = fmt.Errorf("the block that was got has checksum %016x, not %016x", sum, t.head.Sum)
		}
		clear(buf[g.length:])
	}
	s.mu.Lock()
	switch {
	case g.revoked:
		delete(s.mu.grants, id)
		s.takenLocked(&t.head, takenUnwanted)
		s.mu.Unlock()
		n.n.detaches.Add(1)
		n.sink.Detached(s.id, id.nonce, id.round, id.index)
		return
	case err != nil && s.mu.why != nil: // no wonder; Lost answers
		s.mu.Unlock()
		return
	case err != nil:
		g.get = nil // its bytes may come
		n.n.getsFailed.Add(1)
		s.takenLocked(&t.head, takenCannot)
		s.mu.Unlock()
		s.trouble(fmt.Errorf("get by %s: %w", n.o.Fabric.Name(), err))
		return
	}
	g.told = true
	s.takenLocked(&t.head, takenArrived)
	s.mu.Unlock()
	n.n.gets.Add(1)
	s.arrived(id, g, true, t.head.Sum)
}

// transfer gets len(dst) bytes.
//
// INVARIANT(release-before-told): it returns when dst is quiet, which only a
// Release that succeeded shows, whatever became of the get or the session; and
// nobody hears of the block before.
func (s *tcpSession) transfer(p rma.Peer, dst []byte, off uint64) error {
	h, err := p.Post(dst, off)
	if err != nil {
		return err
	}
	s.n.n.posted.Add(1)
	defer s.n.n.posted.Add(-1)
	done := false
	for !done && err == nil && s.getting.Err() == nil {
		done, err = h.Poll(s.getting)
	}
	if !done && err == nil {
		err = errors.New("the session is over")
	}
	for pause := releasePause; h.Release() != nil; pause = min(2*pause, releasePauseMax) {
		time.Sleep(pause) // mostly a get that is under way, which the end of the session ends
	}
	return err
}

// nextHeads waits for something to send: heads, appended to heads, and the block
// that follows the last of them, if its Head.Length is not 0. One block of each
// serve in turn.
func (s *tcpSession) nextHeads(heads []byte) (_ []byte, serve ServeID, b DataBlock, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	x := &s.mu.gets
	add := func(h *DataHead) {
		heads = heads[:len(heads)+dataHeadBytes]
		h.put(heads[len(heads)-dataHeadBytes:])
	}
	room := func() bool { return cap(heads)-len(heads) >= dataHeadBytes }
	for ; ; s.toSend.Wait() {
		if s.mu.closed {
			return nil, 0, b, false
		}
		for ; len(x.takens) > 0 && room(); x.takens = x.takens[1:] {
			add(&x.takens[0])
			x.open--
		}
		for len(s.mu.turn) > 0 && room() {
			offer := x.matched && !x.refused
			if offer && len(x.offers) >= offersMax {
				break // until one is answered
			}
			serve, b := s.nextBlockLocked()
			head := b.Head
			if offer = offer && x.offers[head.id()] == nil; !offer {
				add(&head)
				return heads, serve, b, true
			}
			if len(x.offers) == 0 {
				x.progress = time.Now()
			}
			x.offers[head.id()] = &offered{serve: serve, block: b}
			head.Kind, head.At = DataOffer, s.n.o.Offset(b.Lease.Slot)
			add(&head)
			s.n.n.offers.Add(1)
		}
		if len(heads) > 0 {
			return heads, 0, b, true
		}
	}
}

// taken hears what became of an offer.
func (d *dataConn) taken(h *DataHead) error {
	s, id := d.s, h.id()
	s.mu.Lock()
	o := s.mu.gets.offers[id]
	if o == nil || o.block.Head.Length != h.Length {
		s.mu.Unlock()
		return violated("data.taken", "block %d of round %d, of %d bytes, is not on offer", h.Index, h.Round, h.Length)
	}
	delete(s.mu.gets.offers, id)
	s.mu.gets.progress = time.Now()
	again := h.At == takenCannot && !o.unsent
	if h.At == takenCannot {
		s.mu.gets.refused = true
	}
	if again {
		q := s.queueOfLocked(o.serve)
		q.blocks = append([]DataBlock{o.block}, q.blocks...)
	}
	s.toSend.Broadcast()
	s.mu.Unlock()
	if again {
		return nil
	}
	if h.At == takenArrived {
		s.n.n.blocksOut.Add(1)
		s.n.n.bytesOut.Add(h.Length)
	}
	s.n.sink.Sent(o.serve, id.index, h.At != takenCannot)
	return nil
}

// checkOffers ends the session if the other side does not answer its offers.
func (s *tcpSession) checkOffers() {
	s.mu.Lock()
	defer s.mu.Unlock()
	x := &s.mu.gets
	if n := len(x.offers); n > 0 && time.Since(x.progress) > s.n.o.ProgressTimeout {
		s.endLocked(fmt.Errorf("%d blocks are on offer, and for %v none was taken", n, s.n.o.ProgressTimeout), false)
	}
}
