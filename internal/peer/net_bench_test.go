package peer

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"
)

// BenchmarkNet moves blocks over loopback from one Net to another one, and in
// the same run by a loop of writev and ReadFull over as many connections, that
// checks nothing and knows no grant. Each prints its share of the latter:
//
//	go test -bench Net -run xxx ./internal/peer
func BenchmarkNet(b *testing.B) {
	for _, size := range []int{64 << 10, 1 << 20} {
		for _, conns := range []int{2, 4} {
			var raw float64
			name := fmt.Sprintf("%dKiB/conns=%d", size>>10, conns)
			b.Run(name+"/raw", func(b *testing.B) { raw = benchRaw(b, size, conns) })
			b.Run(name+"/net", func(b *testing.B) { b.ReportMetric(benchNet(b, size, conns, nil)/raw, "of_raw") })
		}
	}
}

func BenchmarkNetTLS(b *testing.B) {
	for _, size := range []int{64 << 10, 1 << 20} {
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) { benchNet(b, size, 2, newTestCA(b)) })
	}
}

// benchMemory is what each side has, the same for all, so that they miss the
// cache and fault pages alike: an untouched page is always in the cache.
const benchMemory = 64 << 20

var benchSides = sync.OnceValue(func() (out [2][]byte) {
	for i := range out {
		out[i] = bytes.Repeat([]byte{1, 2, 3, byte(i)}, benchMemory/4)
	}
	return out
})

// benchRate also tells the processor's time a block: on a machine that others
// load, that says more than the clock.
func benchRate(b *testing.B, size int, took, cpu time.Duration) float64 {
	b.SetBytes(int64(size))
	b.ReportMetric(float64(cpu)/float64(b.N), "cpu-ns/op")
	return float64(b.N) * float64(size) / took.Seconds()
}

func cpuTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func benchRaw(b *testing.B, size, conns int) float64 {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer ln.Close()
	from, to := benchSides()[0], benchSides()[1]
	var wg sync.WaitGroup
	slots := benchMemory / (size + pageBytes)
	var ends []net.Conn
	for range conns {
		w, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			b.Fatal(err)
		}
		r, err := ln.Accept()
		if err != nil {
			b.Fatal(err)
		}
		ends = append(ends, w, r)
	}
	b.ResetTimer()
	begin, cpu := time.Now(), cpuTime()
	for c := range conns {
		n := b.N / conns
		if c < b.N%conns {
			n++
		}
		wg.Go(func() {
			head := make([]byte, dataHeadBytes)
			for i := range n {
				at := (i*conns + c) % slots * (size + pageBytes)
				bufs := net.Buffers{head, from[at : at+size]}
				if _, err := bufs.WriteTo(ends[2*c]); err != nil {
					b.Error(err)
				}
			}
		})
		wg.Go(func() {
			for i := range n {
				at := (i*conns + c) % slots * (size + pageBytes)
				if _, err := io.ReadFull(ends[2*c+1], to[at:at+size+dataHeadBytes]); err != nil {
					b.Error(err)
				}
			}
		})
	}
	wg.Wait()
	took := time.Since(begin)
	cpu = cpuTime() - cpu
	for _, c := range ends {
		c.Close()
	}
	return benchRate(b, size, took, cpu)
}

// benchEnd is a sink that has another block sent for each that arrives.
type benchEnd struct {
	*Net
	mem  []byte
	up   chan ConnID
	left int // blocks to be granted
	wait int // blocks to arrive
	sent int

	mu    sync.Mutex
	conn  ConnID
	size  int
	next  uint32
	peer  *benchEnd
	done  chan struct{}
	conns int
}

func (e *benchEnd) pull(n int) {
	blocks := make([]DataBlock, 0, n)
	for range min(n, e.left) {
		e.left--
		i := e.next
		e.next++
		slots := uint32(len(e.mem) / (e.size + pageBytes))
		e.Do(Grant{Conn: e.conn, Round: i / KeysMax, Index: i % KeysMax, Slot: uint64(i % slots), Length: e.size})
		blocks = append(blocks, DataBlock{Head: DataHead{Round: i / KeysMax, Index: i % KeysMax, Length: uint64(e.size)}, Lease: Lease{Slot: uint64(i % slots)}})
	}
	e.peer.Do(Transmit{Conn: e.peer.conn, ID: 1, Blocks: blocks})
}

func (e *benchEnd) Connected(conn ConnID, _ string, dialed bool) {
	if dialed {
		e.Do(Send{Conn: conn, Msg: &Hello{Version: Version, Node: "a", Boot: "a", Token: testToken(conn), Window: uint32(e.conns)}})
	}
}
func (e *benchEnd) DialFailed(addr string, err error) { panic(err) }
func (e *benchEnd) Lost(ConnID, error)                {}
func (e *benchEnd) Received(conn ConnID, m Message) {
	switch m := m.(type) {
	case *Hello:
		e.Do(Expect{Conn: conn, N: int(m.Window)})
		e.Do(Send{Conn: conn, Msg: &Welcome{Version: Version, Node: "b", Boot: "b"}})
	case *Welcome:
		e.Do(DialData{Conn: conn, N: e.conns, Token: testToken(conn)})
	default:
		return
	}
	e.up <- conn
}
func (e *benchEnd) Arrived(_ ConnID, _ uint64, _, _ uint32, _ bool, _ uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.pull(1)
	if e.wait--; e.wait == 0 {
		close(e.done)
	}
}
func (e *benchEnd) Detached(ConnID, uint64, uint32, uint32) {}
func (e *benchEnd) Sent(ServeID, uint32, bool) {
	e.mu.Lock()
	e.sent++
	e.mu.Unlock()
}

func benchNet(b *testing.B, size, conns int, ca *testCA) float64 {
	var ends [2]*benchEnd
	for i := range ends {
		e := &benchEnd{mem: benchSides()[1-i], up: make(chan ConnID, 1), size: size, done: make(chan struct{}), conns: conns}
		o := listening()
		if ca != nil {
			o.TLS = ca.config(b, "127.0.0.1")
		}
		o.Memory = func(slot uint64, n int) []byte {
			at := int(slot) * (size + pageBytes)
			return e.mem[at : at+n]
		}
		e.mu.Lock()
		var err error
		if e.Net, err = OpenNet(o, e); err != nil {
			b.Fatal(err)
		}
		e.mu.Unlock()
		defer e.Close(b.Context())
		ends[i] = e
	}
	x, y := ends[0], ends[1]
	x.Do(Dial{y.Addr()})
	x.conn, y.conn = <-x.up, <-y.up
	x.peer, y.peer = y, x
	x.left, x.wait = b.N, b.N
	b.ResetTimer()
	begin, cpu := time.Now(), cpuTime()
	x.mu.Lock()
	x.pull(min(512, 32<<20/size))
	x.mu.Unlock()
	<-x.done
	return benchRate(b, size, time.Since(begin), cpuTime()-cpu)
}
