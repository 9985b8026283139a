package fault

import (
	"context"
	"net"
	"sync/atomic"
	"time"
)

// Conn wraps one end of a connection, whose name is its ops' key; kinds are
// read and write, offsets count the bytes of a direction. A hang ends with
// Release, with Close and at the deadline of its direction. A delay ends with
// its time only.
//
// Descriptors that travel with the bytes of a unix socket are not passed on;
// where they matter, put a wrapped connection between two sides as a proxy.
func Conn(under net.Conn, set *Set, name string) net.Conn {
	c := &faultyConn{Conn: under, set: set, name: name}
	c.hole, c.holeEnd = net.Pipe()
	return c
}

type faultyConn struct {
	net.Conn
	set           *Set
	name          string
	in, out       atomic.Int64
	hole, holeEnd net.Conn // nobody answers there: where a call hangs
}

// ask asks about a call, and waits. hang is a call on the hole.
func (c *faultyConn) ask(kind string, off int64, hang func() error) Fault {
	f := c.set.Check(Op{Seam: SeamConn, Kind: kind, Key: c.name, Off: off, Write: kind == "write"})
	if f.Hang != nil {
		f.Hang = nil
		stop := context.AfterFunc(c.set.ctx, func() { _ = c.hole.Close() })
		_ = hang() // the real call fails the same way, after a close or a deadline
		stop()
	}
	_ = f.wait(context.Background())
	return f
}

func (c *faultyConn) Read(b []byte) (n int, err error) {
	f := c.ask("read", c.in.Load(), func() error { _, err := c.hole.Read(make([]byte, 1)); return err })
	defer func() { c.in.Add(int64(n)) }()
	switch {
	case f.Torn:
		b = b[:min(len(b), f.Keep)]
	case f.Disconnect:
		_ = c.Close()
		return 0, f.Err
	case f.Err != nil && !f.Late:
		return 0, f.Err
	case f.Short > 0:
		b = b[:min(len(b), f.Short)]
	}
	if n, err = c.Conn.Read(b); n > 0 && f.Flip {
		b[n/2] ^= 4
	}
	return n, c.after(&f, err)
}

func (c *faultyConn) Write(b []byte) (n int, err error) {
	f := c.ask("write", c.out.Load(), func() error { _, err := c.hole.Write(make([]byte, 1)); return err })
	defer func() { c.out.Add(int64(n)) }()
	switch {
	case f.Torn:
		b = b[:min(len(b), f.Keep)]
	case f.Disconnect:
		_ = c.Close()
		return 0, f.Err
	case f.Err != nil && !f.Late:
		return 0, f.Err
	}
	if f.Flip && len(b) > 0 {
		b = append([]byte(nil), b...)
		b[len(b)/2] ^= 4
	}
	if f.Short > 0 && f.Short < len(b) {
		if n, err = c.Conn.Write(b[:f.Short]); err != nil {
			return n, err
		}
		b = b[f.Short:]
	}
	m, err := c.Conn.Write(b)
	return n + m, c.after(&f, err)
}

// after is what a call that was made answers.
func (c *faultyConn) after(f *Fault, err error) error {
	if f.Torn {
		_ = c.Close()
		if f.Err == nil {
			f.Err = disconnected(SeamConn)
		}
	}
	if err == nil {
		err = f.Err
	}
	return err
}

func (c *faultyConn) Close() error {
	err := c.Conn.Close() // first: what hung goes on with the real call
	_ = c.hole.Close()
	_ = c.holeEnd.Close()
	return err
}

func (c *faultyConn) SetDeadline(t time.Time) error {
	_ = c.hole.SetDeadline(t)
	return c.Conn.SetDeadline(t)
}

func (c *faultyConn) SetReadDeadline(t time.Time) error {
	_ = c.hole.SetReadDeadline(t)
	return c.Conn.SetReadDeadline(t)
}

func (c *faultyConn) SetWriteDeadline(t time.Time) error {
	_ = c.hole.SetWriteDeadline(t)
	return c.Conn.SetWriteDeadline(t)
}
