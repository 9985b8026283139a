package peer

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	headBytes = 64 // of a block on a data connection
	pageBytes = 4096
	rawStride = pageBytes + blockBytes
)

// region is shared memory as a node's is: that of a process alone may have
// larger pages.
func region(size int) ([]byte, error) {
	fd, err := unix.MemfdCreate("raw", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		return nil, err
	}
	mem, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	for i := 0; i < len(mem); i += pageBytes {
		mem[i] = byte(i >> 12)
	}
	return mem, err
}

// share is how many of a prompt's blocks go over connection c.
func share(c int) int { return (blocks + conns - 1 - c) / conns }

// at is where the i-th block on connection c of a prompt is. Before it is room
// for a page, at whose end is the head.
func at(mem []byte, prompt, c, i int) []byte {
	slots := len(mem) / rawStride
	lo := (prompt*blocks+i*conns+c)%slots*rawStride + pageBytes - headBytes
	return mem[lo : lo+headBytes+blockBytes]
}

// rawSender writes a prompt's blocks on each connection that asks for it, with
// one byte.
func rawSender(a childArgs, in *bufio.Reader) error {
	mem, err := region(a.Raw)
	if err != nil {
		return err
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println(ln.Addr())
	for c := range conns {
		conn, err := ln.Accept()
		if err != nil {
			return err
		}
		go func() { // ends with the process
			var head [headBytes]byte
			var ask [1]byte
			for {
				if _, err := io.ReadFull(conn, ask[:]); err != nil {
					return
				}
				for i := range share(c) {
					bufs := net.Buffers{head[:], at(mem, int(ask[0]), c, i)[headBytes:]}
					if _, err := bufs.WriteTo(conn); err != nil {
						return
					}
				}
			}
		}()
	}
	_, _ = in.ReadString(0)
	return nil
}

// rawReceiver is told of a prompt in each line, and tells how many nanoseconds
// it took: from the question to the last byte.
func rawReceiver(a childArgs, in *bufio.Reader) error {
	mem, err := region(a.Raw)
	if err != nil {
		return err
	}
	var asks [conns]chan int
	done := make(chan error, conns)
	for c := range conns {
		conn, err := net.Dial("tcp", a.Dial)
		if err != nil {
			return err
		}
		asks[c] = make(chan int, 1)
		go func() { // ends with the process
			for prompt := range asks[c] {
				_, err := conn.Write([]byte{byte(prompt)})
				for i := range share(c) {
					if err == nil {
						_, err = io.ReadFull(conn, at(mem, prompt, c, i))
					}
				}
				done <- err
			}
		}()
	}
	fmt.Println("dialed")
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return nil // its end
		}
		prompt, err := strconv.Atoi(strings.TrimSpace(line))
		if err != nil {
			return err
		}
		begin := time.Now()
		for c := range conns {
			asks[c] <- prompt
		}
		for range conns {
			if err := <-done; err != nil {
				return err
			}
		}
		fmt.Println(time.Since(begin).Nanoseconds())
	}
}
