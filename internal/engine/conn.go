package engine

import (
	"errors"
	"os"
	"time"

	"github.com/terrace-kv/terrace/internal/arena"
	"github.com/terrace-kv/terrace/internal/wire"
)

// write sends whole frames. It waits at most WriteTimeout for a client that
// does not read; then the connection is over, because half a frame may be out.
func (c *conn) write(b []byte) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.c.SetWriteDeadline(time.Now().Add(c.srv.opts.WriteTimeout))
	_, err := c.c.Write(b)
	return c.wrote(err)
}

func (c *conn) wrote(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = &wire.Error{Code: wire.CodeSlowReader, Message: "slow reader: replies were left unread for " + c.srv.opts.WriteTimeout.String()}
	}
	if err != nil {
		c.fail(err)
	}
	return err
}

// writeError sends an error frame and counts it.
func (c *conn) writeError(call uint32, e *wire.Error) error {
	if int(e.Code) < len(c.srv.errors) {
		c.srv.errors[e.Code].Add(1)
	}
	return c.write(wire.AppendFrame(nil, wire.TypeError, call, e))
}

// sendRegion sends a frame with the lease's descriptor, and hands the lease
// over: from here on the kernel knows whether the process still has it.
func (c *conn) sendRegion(frame []byte, lease *arena.Lease) error {
	c.writing.Lock()
	c.c.SetWriteDeadline(time.Now().Add(c.srv.opts.WriteTimeout))
	err := arena.SendFD(c.c, frame, lease.File())
	c.writing.Unlock()
	return c.wrote(errors.Join(err, lease.HandOver()))
}
