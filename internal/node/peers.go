package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/internal/lifecycle"
	"github.com/terrace-kv/terrace/internal/peer"
	"github.com/terrace-kv/terrace/tier"
)

const (
	// PeersTier is the name of the tier that other nodes are.
	PeersTier = "peers"

	peerDrain = 5 * time.Second // for what is under way between nodes, in a drain
	notesMax  = 256             // notes about peers that are not in the log yet
)

// PeerOptions make a node one of several that load from each other.
type PeerOptions struct {
	// Machine decides. Boot is filled in; Advertise and Node are where the
	// transport listens, if they are empty.
	Machine        peer.Options
	LoadTimeout    time.Duration // for blocks that a peer has said it has; default 30 s
	PrefillTimeout time.Duration // for blocks that it may still have to compute; default 60 s
	Mode           string        // told in Status: such as "tls and ucx"

	// Open opens the transport, and says where it listens. o has what of the node
	// it needs: the memory of slots, for as long as a slot is granted or leased,
	// and whom to tell of trouble. Nobody is told anything before Open has returned,
	// though goroutines may try.
	Open func(sink peer.Sink, o peer.NetOptions) (t peer.Transport, listens string, err error)
}

// peers is the node's part in what goes on between nodes: it gives the bridge
// between core and machine what the transport hears, and the transport what the
// machine wants. All of it is under Node.mu.
type peers struct {
	n         *Node
	o         PeerOptions
	tier      int // index of the bound tier in the core
	bridge    *peer.Bridge
	transport peer.Transport
	listens   string
	net       []peer.Effect

	notes      chan peer.Note
	missed     atomic.Int64 // notes that found it full
	violations atomic.Int64 // of connections that were refused
	ending     atomic.Bool  // what breaks now is of this node's own doing
	last       atomic.Pointer[string]
}

// facts is the bound tier as the core knows it.
func (o *PeerOptions) facts() core.TierFacts {
	lookup := cmp.Or(o.Machine.LookupTimeout, 2*time.Second)
	return core.TierFacts{Name: PeersTier, Medium: tier.MediumCPU, Locality: tier.LocalityRemote, Bound: true, ReadBlocksMax: peer.KeysMax,
		// The first probe may have to wait for a connection.
		ProbeTimeout:   lookup + cmp.Or(o.Machine.ConnectTimeout, 2*time.Second),
		PromoteTimeout: cmp.Or(o.LoadTimeout, 30*time.Second), AssumeTimeout: cmp.Or(o.PrefillTimeout, time.Minute)}
}

// openPeers starts the transport. n has a core and an arena, and no namespace.
func (n *Node) openPeers(o PeerOptions, secret [32]byte) error {
	p := &peers{n: n, o: o, tier: len(n.tiers), notes: make(chan peer.Note, notesMax)}
	n.mu.Lock() // nothing that it hears comes before there is a machine
	defer n.mu.Unlock()
	var err error
	no := peer.NetOptions{Refused: p.refused, Trouble: p.trouble, Region: n.arena.Bytes(0, n.arena.Size()),
		Memory: func(slot uint64, size int) []byte { return n.arena.Bytes(core.Slot(slot).Offset(), int64(size)) },
		Offset: func(slot uint64) uint64 { return uint64(core.Slot(slot).Offset()) }}
	if p.transport, p.listens, err = o.Open(p, no); err != nil {
		return err
	}
	m := &p.o.Machine
	if host, port, err := net.SplitHostPort(m.Advertise); err == nil {
		if port == "0" {
			_, port, _ = net.SplitHostPort(p.listens)
		}
		m.Advertise = peerAddr(host, port)
	}
	m.Advertise = cmp.Or(m.Advertise, p.listens)
	m.QuotaBytes = cmp.Or(m.QuotaBytes, max(1, n.arena.Size()/4)) // of what could be pinned, one peer's share
	m.Node, m.Boot = cmp.Or(m.Node, m.Advertise), n.boot
	machine := peer.New(*m, secret)
	p.bridge = peer.NewBridge(machine, n.core, p.tier,
		func(fp block.Fingerprint) (core.NamespaceID, bool) {
			if sp := n.byPrint[fp]; sp != nil {
				return sp.id, true
			}
			return 0, false
		},
		func(id core.NamespaceID) *block.Namespace { return n.spaces[id].ns })
	p.bridge.Loaded = n.set.Tier(p.tier).Read.Observe
	n.peers = p
	return nil
}

// settle carries out what the machine wants. n.mu is held.
func (p *peers) settle(now core.Time) {
	p.net = p.bridge.Settle(now, p.net[:0])
	for _, e := range p.net {
		if note, ok := e.(peer.Note); ok {
			p.note(note)
		} else if !p.transport.Do(e) {
			panic(fmt.Sprintf("node: nobody does %T", e))
		}
	}
	clear(p.net)
}

// showSpaces tells peers of the namespaces that there are. n.mu is held.
func (p *peers) showSpaces() {
	var list []*block.Namespace
	for _, sp := range p.n.spaces[1:] {
		list = append(list, sp.ns)
	}
	p.bridge.M.SetNamespaces(peer.Time(p.n.now()), list)
}

// sourceOf reads what a request wants of a peer. The error names the field.
func (n *Node) sourceOf(p *core.Params) (addr string, err error) {
	role := map[core.PeerRole]string{core.PeerProbe: "remote_kv_source", core.PeerAssume: "remote_prefiller"}[p.Peer]
	bad := func(field, format string, a ...any) error {
		return fmt.Errorf("%w: kv_transfer_params.%s %s", core.ErrInvalid, field, fmt.Sprintf(format, a...))
	}
	id := func(field, id string) error {
		if id == "" || len(id) > peer.IDBytesMax {
			return bad(field+".kv_request_id", "has %d bytes, want 1 to %d", len(id), peer.IDBytesMax)
		}
		return nil
	}
	switch {
	case p.RemoteDecoder && p.KVRequestID != "" && n.peers == nil:
		return "", bad("remote_decoder", "asks for a hand-over, but this node has no peers: set peers.listen")
	case p.Peer == core.PeerNone && p.RemoteDecoder && p.KVRequestID != "":
		return "", id("remote_decoder", p.KVRequestID)
	case p.Peer == core.PeerNone:
		return "", nil
	case role == "":
		return "", bad("role", "is %d, which is none", p.Peer)
	case n.peers == nil:
		return "", bad(role, "names a peer, but this node has none: set peers.listen")
	case p.RemoteDecoder && p.Peer == core.PeerAssume:
		return "", bad(role, "and remote_decoder cannot be combined; remote_decoder and remote_kv_source can")
	case p.RemoteDecoder && p.KVRequestID != "":
		err = id("remote_decoder", p.KVRequestID)
	}
	if err == nil {
		err = id(role, p.PeerRequestID)
	}
	if err != nil {
		return "", err
	}
	if p.PeerPort < 1 || p.PeerPort > 65535 {
		return "", bad(role+".remote_port", "is %d, want 1 to 65535", p.PeerPort)
	}
	host := p.PeerHost
	if h, ok := strings.CutPrefix(host, "["); ok {
		host = strings.TrimSuffix(h, "]")
	}
	if host == "" || len(host) > peer.NameBytesMax-8 || strings.ContainsAny(host, "[]/ \t\r\n\x00") {
		return "", bad(role+".remote_host", "is %q, want an address or a name", clipped(p.PeerHost))
	}
	addr = peerAddr(host, strconv.Itoa(p.PeerPort))
	if addr == n.peers.o.Machine.Advertise {
		return "", bad(role+".remote_host", "and remote_port are this node's own (%s)", addr)
	}
	return addr, nil
}

// peerAddr is the one form of an address that links are known by.
func peerAddr(host, port string) string {
	if ip, err := netip.ParseAddr(host); err == nil {
		host = ip.Unmap().String()
	}
	return net.JoinHostPort(host, port)
}

func clipped(s string) string { return s[:min(len(s), 300)] }

// event tells the machine of something. No lock is held.
func (p *peers) event(f func(m *peer.Machine, now peer.Time)) {
	defer lifecycle.FailStop("node: news of a peer")
	n := p.n
	n.mu.Lock()
	defer n.mu.Unlock()
	f(p.bridge.M, peer.Time(n.now()))
	n.perform()
}

// Connected implements peer.Sink, as the following do.
func (p *peers) Connected(conn peer.ConnID, addr string, dialed bool) {
	if !dialed {
		addr = ""
	}
	p.event(func(m *peer.Machine, now peer.Time) { m.Connected(now, conn, addr) })
}

func (p *peers) DialFailed(addr string, err error) {
	p.event(func(m *peer.Machine, now peer.Time) { m.DialFailed(now, addr, err.Error()) })
}

func (p *peers) Received(conn peer.ConnID, msg peer.Message) {
	p.event(func(m *peer.Machine, now peer.Time) { m.Received(now, conn, msg) })
}

func (p *peers) Lost(conn peer.ConnID, why error) {
	p.event(func(m *peer.Machine, now peer.Time) {
		if bad := (*peer.ProtocolError)(nil); errors.As(why, &bad) {
			m.Violated(now, conn, bad.Error())
		}
		m.Lost(now, conn, why.Error())
	})
}

func (p *peers) Arrived(conn peer.ConnID, nonce uint64, round, index uint32, ok bool, sum uint64) {
	p.event(func(m *peer.Machine, now peer.Time) { m.Arrived(now, conn, nonce, round, index, ok, sum) })
}

func (p *peers) Detached(conn peer.ConnID, nonce uint64, round, index uint32) {
	p.event(func(m *peer.Machine, now peer.Time) { m.Detached(now, conn, nonce, round, index) })
}

func (p *peers) Sent(serve peer.ServeID, index uint32, ok bool) {
	p.event(func(m *peer.Machine, now peer.Time) { m.Sent(now, serve, index, ok) })
}

func (p *peers) refused(addr string, err error) {
	if bad := (*peer.ProtocolError)(nil); errors.As(err, &bad) {
		p.violations.Add(1)
	}
	if host, _, e := net.SplitHostPort(addr); e == nil {
		addr = host // a port says nothing, and makes every line look new
	}
	p.note(peer.Note{Peer: addr, Bad: true, Text: "a connection was refused: " + err.Error()})
}

func (p *peers) trouble(addr string, err error) {
	p.note(peer.Note{Peer: addr, Bad: true, Text: "blocks come over TCP: " + err.Error()})
}

// note leaves it to the logger, which may wait for whoever reads the log.
func (p *peers) note(x peer.Note) {
	if x.Bad = x.Bad && !p.ending.Load(); x.Bad {
		s := time.Now().UTC().Format(time.RFC3339) + " " + x.Peer + ": " + x.Text
		p.last.Store(&s)
	}
	select {
	case p.notes <- x:
	default:
		p.missed.Add(1)
	}
}

// noteBudget chooses which notes are worth a line: of each peer 5 and in all 50
// in 10 s, and as many again that are bad, which sessions that come and go do not
// crowd out.
type noteBudget struct {
	until time.Time // of the window
	count map[noteBudgetKey]int
	all   map[bool]int
	held  int // that were not
}

type noteBudgetKey struct {
	peer string
	bad  bool
}

func (b *noteBudget) take(now time.Time, x *peer.Note) bool {
	if now.After(b.until) {
		b.until, b.count, b.all = now.Add(10*time.Second), map[noteBudgetKey]int{}, map[bool]int{}
	}
	k := noteBudgetKey{x.Peer, x.Bad}
	if b.count[k] >= 5 || b.all[x.Bad] >= 50 {
		b.held++
		return false
	}
	b.count[k]++
	b.all[x.Bad]++
	return true
}

// logger writes notes to the log, as many a while as somebody can read, and at the
// end of that how many it left out.
func (p *peers) logger(l *lifecycle.Loop) {
	var b noteBudget
	var more <-chan time.Time
	tell := func(x peer.Note) {
		if !b.take(time.Now(), &x) {
			if more == nil {
				more = time.After(time.Until(b.until))
			}
			return
		}
		level := slog.LevelInfo
		if x.Bad {
			level = slog.LevelWarn
		}
		p.n.log.Log(p.n.ctx, level, "peers: "+x.Text, "peer", x.Peer)
	}
	left := func() {
		if n := b.held + int(p.missed.Swap(0)); n > 0 {
			p.n.log.Warn("more was to be told of peers", "lines", n)
		}
		b.held, more = 0, nil
	}
	for {
		l.Rest(0)
		select {
		case <-p.n.ctx.Done():
			for {
				select {
				case x := <-p.notes:
					tell(x)
				default:
					left()
					return
				}
			}
		case x := <-p.notes:
			l.Work()
			tell(x)
		case <-more:
			l.Work()
			left()
		}
	}
}

// drain lets what is under way between nodes end, for a while, and ends the
// sessions.
func (p *peers) drain(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, peerDrain)
	defer cancel()
	p.n.wait(ctx, func() string {
		if s := p.bridge.M.Stats(); s.Rounds+s.Serves > 0 {
			return fmt.Sprintf("%d rounds of peers, %d of ours", s.Serves, s.Rounds)
		}
		return ""
	})
	p.n.mu.Lock()
	defer p.n.mu.Unlock()
	p.ending.Store(true)
	p.bridge.M.Close(peer.Time(p.n.now()))
	p.n.perform()
}

// close ends the connections. When it has returned without an error, no slot is
// written or read for a peer.
func (p *peers) close(ctx context.Context) error {
	if err := p.transport.Close(ctx); err != nil {
		return fmt.Errorf("peers: %w", err)
	}
	return nil
}

// check walks the machine's tables. n.mu is held.
func (p *peers) check() error {
	if p == nil {
		return nil
	}
	if err := p.bridge.M.CheckInvariants(); err != nil {
		return fmt.Errorf("peers: %w", err)
	}
	return nil
}

// next is when the machine's Tick is due, 0 for never. n.mu is held.
func (p *peers) next() core.Time {
	if p == nil {
		return 0
	}
	return core.Time(p.bridge.M.NextDeadline())
}

var errPeerName = errors.New("a tier has the name " + PeersTier + ", which is that of other nodes: give it another")

// status is under n.mu.
func (p *peers) status(c *core.Stats) *PeersStatus {
	m, now := p.bridge.M, peer.Time(p.n.now())
	x := m.Stats()
	s := &PeersStatus{NodeID: p.o.Machine.Node, Tier: PeersTier, Listen: p.listens, Advertise: p.o.Machine.Advertise, Mode: p.o.Mode, Peers: []PeerStatus{},
		BlocksIn: x.Blocks, BytesIn: x.Bytes, BlocksOut: x.SentBlocks, BytesOut: x.SentBytes, Lookups: x.Lookups, Fetches: x.Fetches,
		Failures: map[string]int64{}, Refused: map[string]int64{}, Violations: x.Violations + p.violations.Load(), Deaths: x.Deaths, Corrupt: x.Corrupt,
		Strays: x.Strays, FastFails: x.FastFails, HitsExpired: x.HitsExpired, HandoversExpired: c.HandoversExpired,
		Sessions: x.Sessions, Sources: x.Sources, Rounds: x.Rounds, Serves: x.Serves, Supplies: x.Supplies, Parked: x.Parked, Aborts: x.Aborts,
		Handovers: c.Handovers, Ended: x.Ended, Quarantined: m.Quarantined(), PinnedBytes: x.Pinned}
	for code := range x.Failures {
		name := peer.Code(code).String()
		if named := slices.Contains(peer.Codes(), peer.Code(code)); named || x.Failures[code]+x.Refused[code] > 0 {
			s.Failures[name], s.Refused[name] = x.Failures[code], x.Refused[code]
		}
	}
	for _, i := range m.Peers(now) {
		ps := PeerStatus{NodeID: i.Node, BootID: i.Boot, Address: i.Addr, State: i.State, Why: i.Why, Dialed: i.Dialed,
			Namespaces: i.Namespaces, Sources: i.Sources, Rounds: i.Rounds, Serves: i.Serves, Parked: i.Parked, Aborts: i.Aborts,
			Wire: p.wire(i.Conn), PinnedBytes: i.Pinned, BlocksIn: i.BlocksIn, BytesIn: i.BytesIn, BlocksOut: i.BlocksOut, BytesOut: i.BytesOut}
		if i.Since > 0 {
			ps.Seconds = time.Duration(now - i.Since).Seconds()
		}
		s.Peers = append(s.Peers, ps)
	}
	if t, ok := p.transport.(interface{ Stats() peer.NetStats }); ok {
		x := t.Stats()
		s.Gets, s.GetsFailed, s.Offers, s.GetsPosted = int64(x.Gets), int64(x.GetsFailed), int64(x.Offers), x.Posted
	}
	if e := p.last.Load(); e != nil {
		s.LastError = *e
	}
	return s
}

// wire is how the blocks of a session go.
func (p *peers) wire(conn peer.ConnID) string {
	if t, ok := p.transport.(interface{ Wire(peer.ConnID) string }); ok && conn != 0 {
		return t.Wire(conn)
	}
	return ""
}

// tierStatus shows other nodes as the tier that they are to the core.
func (p *peers) tierStatus(c *core.Stats, s *PeersStatus) TierStatus {
	t := &c.Tiers[p.tier]
	ts := TierStatus{Name: PeersTier, Type: PeersTier, Where: s.Advertise, Mode: s.Mode, ReadHealth: "closed", WriteHealth: "closed",
		Hits: t.Hits, ReadBytes: t.Bytes[core.Promotion], Corrupt: s.Corrupt, Late: t.Late, ScanDone: true, LastError: s.LastError,
		Failures: map[string]int64{}, Dropped: map[string]int64{}}
	for _, cause := range tier.Causes() {
		ts.Failures[cause.String()] = t.Failures[cause]
	}
	for d, name := range core.DropCauses {
		ts.Dropped[name] = t.Dropped[d]
	}
	return ts
}
