package peer

import "fmt"

var codeNames = [codeEnd]string{
	CodeOK: "ok", CodeAbsent: "absent", CodeEnded: "ended", CodeNamespace: "namespace", CodeNoRoom: "no_room", CodeQuota: "quota",
	CodeBusy: "busy", CodeDraining: "draining", CodeTimeout: "timeout", CodeFailed: "failed",
	CodeProtocol: "protocol", CodeVersion: "version", CodeDuplicate: "duplicate", CodeSelf: "self", CodeIdle: "idle", CodeUnreachable: "unreachable",
}

func (c Code) String() string {
	if c < codeEnd && codeNames[c] != "" {
		return codeNames[c]
	}
	return fmt.Sprintf("code_%d", uint8(c))
}

// Codes lists why a round or a block may be refused or may fail, for counters
// created at zero.
func Codes() []Code {
	return []Code{CodeAbsent, CodeEnded, CodeNamespace, CodeNoRoom, CodeQuota, CodeBusy, CodeDraining, CodeTimeout, CodeFailed, CodeUnreachable}
}

// Info is what there is to tell of one peer: of a session, or of an address
// that has none.
type Info struct {
	Node, Boot string // "" before the greeting
	Addr       string // where it was dialed, or can be
	State      string // idle, dialing, greeting, up, ending, down
	Why        string // it is down, or ends
	Dialed     bool   // by this node
	Since      Time   // of the session
	Conn       ConnID // of the session, or 0

	Namespaces                             int // that it has shown
	Sources, Rounds, Aborts                int // of ours
	Serves, Parked                         int // for it
	Pinned                                 int64
	BlocksIn, BytesIn, BlocksOut, BytesOut int64
}

// Peers tells of all sessions, in the order in which they were begun, and then
// of addresses that have none.
func (m *Machine) Peers(now Time) []Info {
	var out []Info
	has := map[*session]int{}
	for _, s := range m.sorted() {
		x := Info{Conn: s.conn, Node: s.node, Boot: s.boot, Addr: s.addr, Dialed: s.dialed, Since: s.since, Why: s.closing, Namespaces: len(s.spaces),
			Rounds: len(s.rounds), Aborts: len(s.aborts), Serves: len(s.serves), Parked: s.parked, Pinned: s.pinned,
			BlocksIn: s.blocksIn, BytesIn: s.bytesIn, BlocksOut: s.blocksOut, BytesOut: s.bytesOut}
		if x.Addr == "" {
			x.Addr = s.advertise
		}
		switch s.state {
		case sessionUp:
			x.State = "up"
		case sessionClosing:
			x.State = "ending"
		default:
			x.State = "greeting"
		}
		has[s] = len(out)
		out = append(out, x)
	}
	for _, l := range m.sortedLinks() {
		if i, ok := has[l.s]; ok && l.s != nil {
			out[i].Sources += l.sources
			continue
		}
		x := Info{Addr: l.addr, State: "idle", Sources: l.sources, Rounds: len(l.waiting), Why: l.why}
		switch {
		case l.dialing:
			x.State = "dialing"
		case now < l.down:
			x.State = "down"
		}
		out = append(out, x)
	}
	return out
}

// Quarantined counts blocks of ours that have their outcome and whose slots
// could still be written.
func (m *Machine) Quarantined() (n int) {
	for _, r := range m.rounds {
		for i := range r.items {
			if r.items[i].settled && !r.items[i].quiet {
				n++
			}
		}
	}
	return n
}
