package peer

import (
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/internal/peer"
)

const (
	netMemory = 64 << 20  // of each side: they miss the cache alike
	netTurn   = 256 << 20 // bytes
	netRounds = 8         // of each side
	netSets   = 3         // of connections: which processors they are on makes a difference, and stays so
)

// BenchmarkNet moves blocks over loopback from one Net to another one, and by
// turns with that by a loop of writev and ReadFull over as many connections,
// that checks nothing and knows no grant. Run it with -benchtime 1x.
func BenchmarkNet(b *testing.B) { benchNet(b, []int{2, 4}, false) }

// BenchmarkNetTLS is the same with TLS, which the raw loop has not.
func BenchmarkNetTLS(b *testing.B) { benchNet(b, []int{2}, true) }

func benchNet(b *testing.B, conns []int, tls bool) {
	for _, size := range []int{64 << 10, 1 << 20} {
		for _, conns := range conns {
			b.Run(fmt.Sprintf("%dKiB/conns=%d", size>>10, conns), func(b *testing.B) {
				var mem [2][]byte
				for i := range mem {
					var err error
					if mem[i], err = region(netMemory); err != nil {
						b.Fatal(err)
					}
					b.Cleanup(func() { _ = unix.Munmap(mem[i]) })
				}
				var x [2]side
				n := netTurn / size
				for range netSets {
					x[0].move, x[1].move = openPair(b, size, conns, mem, tls), openRaw(b, size, conns, mem)
					for i := range x {
						x[i].move(n)
					}
					for i := range netRounds {
						for k := range x {
							x[(i+k)%2].turn(n)
						}
					}
				}
				total := float64(netSets) * netRounds * netTurn
				for i, name := range []string{"net", "raw"} {
					b.ReportMetric(total/1e6/x[i].took.Seconds(), name+"-MB/s")
					b.ReportMetric(x[i].spent.Seconds()*1e9/total, name+"-cpu-s/GB")
				}
				b.ReportMetric(x[1].took.Seconds()/x[0].took.Seconds(), "net/raw")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

// side moves n blocks.
type side struct {
	move        func(n int)
	took, spent time.Duration
}

func (s *side) turn(n int) {
	cpu, begin := cpuTime(), time.Now()
	s.move(n)
	s.took += time.Since(begin)
	s.spent += cpuTime() - cpu
}

func cpuTime() time.Duration {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func openRaw(b *testing.B, size, conns int, mem [2][]byte) func(n int) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer ln.Close()
	stride := size + pageBytes
	slots := netMemory / stride
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
	b.Cleanup(func() {
		for _, c := range ends {
			_ = c.Close()
		}
	})
	return func(n int) {
		var wg sync.WaitGroup
		for c := range conns {
			wg.Go(func() {
				var head [headBytes]byte
				for i := c; i < n; i += conns {
					at := i % slots * stride
					bufs := net.Buffers{head[:], mem[0][at : at+size]}
					if _, err := bufs.WriteTo(ends[2*c]); err != nil {
						b.Error(err)
					}
				}
			})
			wg.Go(func() {
				for i := c; i < n; i += conns {
					at := i % slots * stride
					if _, err := io.ReadFull(ends[2*c+1], mem[1][at:at+headBytes+size]); err != nil {
						b.Error(err)
					}
				}
			})
		}
		wg.Wait()
	}
}

// end is a sink that has another block sent for each that arrives.
type end struct {
	*peer.Net
	up    chan peer.ConnID
	done  chan struct{}
	size  int
	conns int

	mu   sync.Mutex
	conn peer.ConnID
	peer *end
	next uint32
	left int // blocks to be granted
	wait int // blocks to arrive
}

// pull has n more blocks sent to it. mu is held.
func (e *end) pull(n int) {
	var blocks []peer.DataBlock
	slots := uint32(netMemory / (e.size + pageBytes))
	for range min(n, e.left) {
		e.left--
		i := e.next
		e.next++
		h := peer.DataHead{Round: i / peer.KeysMax, Index: i % peer.KeysMax, Length: uint64(e.size)}
		e.Do(peer.Grant{Conn: e.conn, Round: h.Round, Index: h.Index, Slot: uint64(i % slots), Length: e.size})
		blocks = append(blocks, peer.DataBlock{Head: h, Lease: peer.Lease{Slot: uint64(i % slots)}})
	}
	e.peer.Do(peer.Transmit{Conn: e.peer.conn, ID: 1, Blocks: blocks})
}

func token(conn peer.ConnID) (t [16]byte) {
	copy(t[:], "a benchmark's")
	t[15] = byte(conn)
	return t
}

func (e *end) Connected(conn peer.ConnID, _ string, dialed bool) {
	if dialed {
		e.Do(peer.Send{Conn: conn, Msg: &peer.Hello{Version: peer.Version, Node: "a", Boot: "a", Token: token(conn), Window: uint32(e.conns)}})
	}
}
func (e *end) DialFailed(_ string, err error) { panic(err) }
func (e *end) Lost(peer.ConnID, error)        {}
func (e *end) Received(conn peer.ConnID, m peer.Message) {
	switch m := m.(type) {
	case *peer.Hello:
		e.Do(peer.Expect{Conn: conn, N: int(m.Window)})
		e.Do(peer.Send{Conn: conn, Msg: &peer.Welcome{Version: peer.Version, Node: "b", Boot: "b"}})
	case *peer.Welcome:
		e.Do(peer.DialData{Conn: conn, N: e.conns, Token: token(conn)})
	default:
		return
	}
	e.up <- conn
}
func (e *end) Arrived(_ peer.ConnID, _ uint64, _, _ uint32, _ bool, _ uint64) { // with the wrong sum, 0 being sent
	e.mu.Lock()
	defer e.mu.Unlock()
	e.pull(1)
	if e.wait--; e.wait == 0 {
		e.done <- struct{}{}
	}
}
func (e *end) Detached(peer.ConnID, uint64, uint32, uint32) {}
func (e *end) Sent(peer.ServeID, uint32, bool)              {}

func openPair(b *testing.B, size, conns int, mem [2][]byte, tls bool) func(n int) {
	var ends [2]*end
	for i := range ends {
		e := &end{up: make(chan peer.ConnID, 1), size: size, done: make(chan struct{}, 1), conns: conns}
		o := peer.NetOptions{Listen: "127.0.0.1:0", Memory: func(slot uint64, n int) []byte {
			at := int(slot) * (size + pageBytes)
			return mem[1-i][at : at+n]
		}}
		if tls {
			var err error
			if o.TLS, err = certificate(b).Config(); err != nil {
				b.Fatal(err)
			}
		}
		var err error
		if e.Net, err = peer.OpenNet(o, e); err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = e.Close(b.Context()) })
		ends[i] = e
	}
	x, y := ends[0], ends[1]
	x.Do(peer.Dial{Addr: y.Addr()})
	x.conn, y.conn = <-x.up, <-y.up
	x.peer = y
	return func(n int) {
		x.mu.Lock()
		x.left, x.wait = n, n
		x.pull(min(512, 32<<20/size))
		x.mu.Unlock()
		<-x.done
	}
}
