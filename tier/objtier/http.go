package objtier

import (
	"context"

	"github.com/terrace-kv/terrace/internal/s3"
)

// httpTransport is the Transport over HTTP. A transfer is made by the Poll, on
// the goroutine of whoever waits for it anyway.
type httpTransport struct{ client *s3.Client }

func (t httpTransport) Post(_ context.Context, op *Op) (Handle, error) {
	return &httpHandle{client: t.client, op: op}, nil
}

type httpHandle struct {
	client *s3.Client
	op     *Op
	status Status
}

// Poll makes the request. The client reads an answer into the slot on this
// goroutine, and takes the slot away from a body that the HTTP transport still
// reads: when it returns, the slot is quiet.
func (h *httpHandle) Poll(ctx context.Context) (Status, error) {
	if h.status.Done {
		return h.status, nil
	}
	var err error
	if op := h.op; op.Put {
		_, err = h.client.Put(ctx, op.Key, s3.NewBody(op.Head, op.Buf), s3.PutOptions{Checksum: op.Checksum, IfNoneMatch: op.Exclusive})
	} else {
		_, err = h.client.Get(ctx, op.Key, op.Head, op.Buf)
	}
	h.status = Status{Done: true, Err: err}
	return h.status, nil
}

// Release has nothing left to do.
func (h *httpHandle) Release() error { return nil }
