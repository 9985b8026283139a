package peer

import (
	"errors"
	"net"
	"os"
	"slices"
	"time"

	"github.com/minio/crc64nvme"
)

// blockID names a block of a session.
type blockID struct {
	nonce        uint64
	round, index uint32
}

func (h *DataHead) id() blockID { return blockID{h.Nonce, h.Round, h.Index} }

// grant lets one block into one slot.
//
//	granted ──head──► receiving ──payload──► arriving ──told──► gone
//	   └─revoked─► gone    └──revoked: the payload goes to scratch──► gone
//
// With an offer in place of the head, a getter receives: from posted to released,
// which a revoke does not shorten; after a get that failed it is granted as before.
//
// Only the receiver or getter that made it receiving touches the slot, and only
// while it is that. So whoever has seen it gone, under the session's lock, knows
// that the slot is quiet.
type grant struct {
	slot    uint64
	length  int
	conn    *dataConn // that receives it, or nil
	get     *get      // it is offered, or nil
	told    bool      // it has arrived, and the sink is being told
	revoked bool      // while it has a conn, or a get was posted: the receiver or getter answers
}

func (s *tcpSession) grant(e Grant) {
	id := blockID{e.Nonce, e.Round, e.Index}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.grants[id] != nil {
		panic("peer: a block was granted two slots") // which of them would be quiet?
	}
	s.mu.grants[id] = &grant{slot: e.Slot, length: e.Length}
}

func (s *tcpSession) revoke(e Revoke) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, i := range e.Indexes {
		id := blockID{e.Nonce, e.Round, i}
		g := s.mu.grants[id]
		switch {
		case g == nil || g.conn == nil && (g.get == nil || !g.get.posted):
			delete(s.mu.grants, id)
			s.answerLocked(answer{block: id})
			if g != nil && g.get != nil {
				s.mu.gets.waiting = slices.DeleteFunc(s.mu.gets.waiting, func(t *get) bool { return t == g.get })
				s.takenLocked(&g.get.head, takenUnwanted)
			}
		case g.revoked: // asked for twice, answered once
		default:
			g.revoked = true
			if !g.told && g.conn != nil {
				_ = g.conn.raw.SetReadDeadline(time.Unix(1, 0)) // out of the system call
			}
		}
	}
}

// dataConn is one data connection. The receiver and the sender are a goroutine
// each.
type dataConn struct {
	s         *tcpSession
	raw, conn net.Conn

	// The receiver's.
	in        [dataHeadBytes]byte
	scratch   []byte
	readBy    time.Time // the deadline that is set
	heads     int       // that have come
	described bool      // the other side's fabric is this one's too

	// The sender's.
	out     [headsMax * dataHeadBytes]byte
	writeBy time.Time
	vec     [2][]byte
	bufs    net.Buffers
}

const (
	// readPiece is how much is read at a time: what was read is summed while it
	// is in the cache.
	readPiece    = 256 << 10
	scratchBytes = 64 << 10
	// headsMax is how many heads are written at a time.
	headsMax = 32
)

// receive reads blocks until the connection or the session ends.
func (d *dataConn) receive() {
	for {
		err := d.readHead()
		var h DataHead
		if err == nil {
			h, err = decodeDataHead(d.in[:])
		}
		if err == nil {
			d.heads++
			switch h.Kind {
			case DataBytes:
				err = d.block(&h)
			case DataOffer:
				err = d.offer(&h)
			case DataTaken:
				err = d.taken(&h)
			case DataDescription:
				err = d.description(&h)
			}
		}
		if err != nil {
			var bad *ProtocolError
			d.s.endAs(endReason("data connection", err, d.s.n.o.ProgressTimeout), !errors.As(err, &bad))
			return
		}
	}
}

// readHead waits for a head, for ever if nothing of it has come.
func (d *dataConn) readHead() error {
	for at := 0; at < len(d.in); {
		d.extendRead()
		n, err := d.conn.Read(d.in[at:])
		at += n
		if err != nil && at < len(d.in) && (at > 0 || !errors.Is(err, os.ErrDeadlineExceeded)) {
			return err
		}
	}
	return nil
}

func (d *dataConn) extendRead() {
	d.readBy = extend(d.readBy, d.s.n.o.ProgressTimeout, d.raw.SetReadDeadline)
}

// block reads one payload, into the slot that was granted for it or to nowhere.
func (d *dataConn) block(h *DataHead) error {
	s, id := d.s, h.id()
	s.mu.Lock()
	g := s.mu.grants[id]
	if g == nil || g.conn != nil || g.get != nil { // nobody waits for it, or it has come before
		s.mu.Unlock()
		return d.discard(int(h.Length))
	}
	if h.Length != uint64(g.length) {
		s.mu.Unlock()
		return violated("data.length", "%d bytes, the block has %d", h.Length, g.length)
	}
	g.conn = d
	d.extendRead()
	s.mu.Unlock()

	buf := s.n.o.Memory(g.slot, (g.length+pageBytes-1)&^(pageBytes-1))
	var sum uint64
	for at := 0; at < g.length; {
		n, err := d.conn.Read(buf[at:min(at+readPiece, g.length)])
		sum = crc64nvme.Update(sum, buf[at:at+n])
		if at += n; at == g.length {
			err = nil // if there is one, the next read has it too
			clear(buf[at:])
		}
		s.mu.Lock()
		if g.revoked {
			delete(s.mu.grants, id)
			// The deadline has cut the read, or will cut the next one.
			d.readBy = time.Time{}
			s.mu.Unlock()
			s.n.n.detaches.Add(1)
			s.n.sink.Detached(s.id, id.nonce, id.round, id.index)
			if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
				return err
			}
			d.extendRead()
			return d.discard(g.length - at)
		}
		if err != nil {
			s.mu.Unlock()
			return err
		}
		if at < g.length {
			d.extendRead() // under the lock: a revoke sets the same deadline
		} else {
			g.told = true
		}
		s.mu.Unlock()
	}

	if sum != h.Sum {
		s.n.n.badSums.Add(1)
	}
	s.arrived(id, g, sum == h.Sum, sum)
	return nil
}

// arrived tells of a grant that is told.
func (s *tcpSession) arrived(id blockID, g *grant, ok bool, sum uint64) {
	s.n.n.blocksIn.Add(1)
	s.n.n.bytesIn.Add(uint64(g.length))
	s.n.sink.Arrived(s.id, id.nonce, id.round, id.index, ok, sum)
	s.mu.Lock()
	delete(s.mu.grants, id)
	revoked := g.revoked
	s.mu.Unlock()
	if revoked {
		s.n.sink.Detached(s.id, id.nonce, id.round, id.index)
	}
}

// discard reads the rest of a payload that nobody waits for.
func (d *dataConn) discard(left int) error {
	if left > 0 {
		d.s.n.n.strayIn.Add(1)
		d.s.n.n.strayBytes.Add(uint64(left))
	}
	if d.scratch == nil {
		d.scratch = make([]byte, scratchBytes)
	}
	for left > 0 {
		d.extendRead()
		n, err := d.conn.Read(d.scratch[:min(left, len(d.scratch))])
		if left -= n; err != nil && left > 0 {
			return err
		}
	}
	return nil
}

// sendQueue is what of a serve is to be sent.
type sendQueue struct {
	serve  ServeID
	blocks []DataBlock
}

func (s *tcpSession) transmit(e Transmit) {
	if len(e.Blocks) == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	q := s.queueOfLocked(e.ID)
	q.blocks = append(q.blocks, e.Blocks...)
	s.toSend.Broadcast()
}

// queueOfLocked is the queue of a serve, in turn to be sent: it gets a block.
func (s *tcpSession) queueOfLocked(id ServeID) *sendQueue {
	q := s.mu.queues[id]
	if q == nil {
		q = &sendQueue{serve: id}
		s.mu.queues[id] = q
		s.mu.turn = append(s.mu.turn, q)
	}
	return q
}

// unsend takes back what waits. What is being written is answered by its sender,
// and what is on offer by the other side.
func (s *tcpSession) unsend(id ServeID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range s.mu.gets.offers {
		o.unsent = o.unsent || o.serve == id
	}
	q := s.mu.queues[id]
	if q == nil {
		return
	}
	delete(s.mu.queues, id)
	for i, o := range s.mu.turn {
		if o == q {
			s.mu.turn = append(s.mu.turn[:i:i], s.mu.turn[i+1:]...)
			break
		}
	}
	for i := range q.blocks {
		s.answerLocked(answer{sent: true, serve: id, block: q.blocks[i].Head.id()})
	}
}

// nextBlockLocked takes a block: one of each serve in turn.
func (s *tcpSession) nextBlockLocked() (id ServeID, b DataBlock) {
	q := s.mu.turn[0]
	s.mu.turn = s.mu.turn[1:]
	b, q.blocks = q.blocks[0], q.blocks[1:]
	if len(q.blocks) > 0 {
		s.mu.turn = append(s.mu.turn, q)
	} else {
		delete(s.mu.queues, q.serve)
	}
	return q.serve, b
}

// send writes blocks, or offers of them, and answers to offers until the
// connection or the session ends.
func (d *dataConn) send() {
	n := d.s.n
	heads, payload, block := n.description, []byte(nil), false
	var serve ServeID
	var b DataBlock
	for {
		if len(heads) > 0 {
			if err := d.write(heads, payload); err != nil {
				d.s.endAs(endReason("data connection: write", err, n.o.ProgressTimeout), true)
				return // Lost answers for the block
			}
		}
		if block {
			n.n.blocksOut.Add(1)
			n.n.bytesOut.Add(b.Head.Length)
			n.sink.Sent(serve, b.Head.Index, true)
		}
		var ok bool
		if heads, serve, b, ok = d.s.nextHeads(d.out[:0]); !ok {
			return
		}
		if payload, block = nil, b.Head.Length > 0; block {
			payload = n.o.Memory(b.Lease.Slot, int(b.Head.Length))[:b.Head.Length]
		}
	}
}

// write writes heads and a payload, straight from where it is.
func (d *dataConn) write(head, payload []byte) error {
	for {
		n := min(len(payload), writePiece)
		d.vec = [2][]byte{head, payload[:n]}
		d.bufs = d.vec[:]
		if len(head) == 0 {
			d.bufs = d.vec[1:]
		}
		d.writeBy = extend(d.writeBy, d.s.n.o.ProgressTimeout, d.raw.SetWriteDeadline)
		if _, err := d.bufs.WriteTo(d.conn); err != nil {
			return err
		}
		if head, payload = nil, payload[n:]; len(payload) == 0 {
			return nil
		}
	}
}
