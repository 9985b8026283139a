package arena

import (
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// SendFD writes payload, which must not be empty, and attaches the descriptor
// to its first byte. It obeys the connection's write deadline. After an error
// the peer may or may not have got the descriptor. f stays the caller's.
func SendFD(conn *net.UnixConn, payload []byte, f *os.File) error {
	if len(payload) == 0 {
		return errors.New("send descriptor: a stream carries it only with at least one byte")
	}
	n, _, err := conn.WriteMsgUnix(payload, unix.UnixRights(int(f.Fd())), nil)
	runtime.KeepAlive(f)
	if err == nil && n < len(payload) {
		_, err = conn.Write(payload[n:])
	}
	if err != nil {
		return fmt.Errorf("send descriptor: %w", err)
	}
	return nil
}

// RecvFD reads up to len(buf) bytes, above 0, and the descriptor that came
// with them, close-on-exec, or nil if none did. It obeys the connection's read
// deadline and answers io.EOF (wrapped) at the end of the stream. The file is
// the caller's to close. One read never spans two descriptors, but a plain Read
// would drop the one it meets, so the reader of a connection that may carry
// descriptors uses RecvFD for every read. A message with more than one is
// ErrDescriptors, and none of them stays open.
func RecvFD(conn *net.UnixConn, buf []byte) (n int, _ *os.File, err error) {
	if len(buf) == 0 {
		return 0, nil, errors.New("receive descriptor: empty buffer")
	}
	// Padding leaves room for a second one; the kernel drops what is beyond.
	oob := make([]byte, unix.CmsgSpace(4))
	n, oobn, flags, _, err := conn.ReadMsgUnix(buf, oob) // sets MSG_CMSG_CLOEXEC
	if err != nil {
		return n, nil, fmt.Errorf("receive descriptor: %w", err)
	}
	fds, err := rights(oob[:oobn])
	if err == nil && (flags&unix.MSG_CTRUNC != 0 || len(fds) > 1) {
		err = ErrDescriptors
	}
	if err != nil {
		for _, fd := range fds {
			err = errors.Join(err, unix.Close(fd))
		}
		return n, nil, fmt.Errorf("receive descriptor: %w", err)
	}
	if len(fds) == 0 {
		return n, nil, nil
	}
	return n, os.NewFile(uintptr(fds[0]), "arena"), nil
}

// rights collects every descriptor in the control data, also beside an error,
// so that none is left open.
func rights(oob []byte) (fds []int, err error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	for i := range messages {
		if messages[i].Header.Level == unix.SOL_SOCKET && messages[i].Header.Type == unix.SCM_RIGHTS {
			more, perr := unix.ParseUnixRights(&messages[i])
			fds, err = append(fds, more...), errors.Join(err, perr)
		}
	}
	return fds, err
}
