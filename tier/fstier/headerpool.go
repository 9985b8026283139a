package fstier

import (
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// A block file is a header of headerSize bytes (see blockhead), the block, and
// zeros up to the next multiple of headerSize.
const headerSize = 4096

// fileSize is the length of a block's file.
func fileSize(length int) int64 { return headerSize + padded(length) }

func padded(length int) int64 { return (int64(length) + headerSize - 1) &^ (headerSize - 1) }

// headerPool gives out buffers of headerSize bytes that are aligned for direct
// I/O, which Go's allocator does not promise. It grows by poolPages at a time
// and holds as many as were ever in use at once.
type headerPool struct {
	mu   sync.Mutex
	free [][]byte
	maps [][]byte
}

const poolPages = 32

func (p *headerPool) get() []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.free) == 0 {
		m, err := unix.Mmap(-1, 0, poolPages*headerSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
		if err != nil {
			// Out of memory or of mappings. An ordinary buffer of this size is
			// aligned in practice; where it is not, direct I/O fails this call.
			return make([]byte, headerSize)
		}
		p.maps = append(p.maps, m)
		for i := 0; i < len(m); i += headerSize {
			p.free = append(p.free, m[i:i+headerSize:i+headerSize])
		}
	}
	b := p.free[len(p.free)-1]
	p.free = p.free[:len(p.free)-1]
	return b
}

func (p *headerPool) put(b []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.free = append(p.free, b)
}

// close unmaps everything; no buffer may be out.
func (p *headerPool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range p.maps {
		_ = unix.Munmap(m)
	}
	p.maps, p.free = nil, nil
}

// limiter lets one event a second through, so that a broken disk does not fill
// the log.
type limiter struct {
	now func() time.Time

	mu      sync.Mutex
	last    time.Time
	dropped int
}

// allow says whether to log now, and how many events were left out before.
func (l *limiter) allow() (ok bool, dropped int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now := l.now(); now.Sub(l.last) >= time.Second {
		dropped, l.dropped, l.last = l.dropped, 0, now
		return true, dropped
	}
	l.dropped++
	return false, 0
}
