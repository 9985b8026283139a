package node

import "time"

// Status is the node's account of itself: the body of /v1/status, and of the
// engine protocol's status call. Fields are only ever added. Sizes are bytes.
type Status struct {
	Version       string   `json:"version"`
	BootID        string   `json:"boot_id"`
	PID           int      `json:"pid"`
	UptimeSeconds float64  `json:"uptime_seconds"`
	State         string   `json:"state"` // opening, ready, draining, closed
	Ready         bool     `json:"ready"`
	Missing       []string `json:"missing,omitempty"` // what ready waits for
	Socket        string   `json:"socket,omitempty"`

	Primary    PrimaryStatus     `json:"primary"`
	Tables     TableStatus       `json:"tables"`
	Lookups    LookupStatus      `json:"lookups"`
	Stores     StoreStatus       `json:"stores"`
	Tiers      []TierStatus      `json:"tiers"`           // secondaries, in lookup order
	Peers      *PeersStatus      `json:"peers,omitempty"` // absent when the node has none
	Loops      []LoopStatus      `json:"loops"`
	Sessions   []SessionStatus   `json:"sessions"`
	Namespaces []NamespaceStatus `json:"namespaces"`
}

// PrimaryStatus counts the region. free + evictable + pinned + filling +
// quarantined + remainder = capacity, in bytes; idle, the middle three are 0.
type PrimaryStatus struct {
	CapacityBytes    int64 `json:"capacity_bytes"`
	PopulatedBytes   int64 `json:"populated_bytes"`
	FreeBytes        int64 `json:"free_bytes"`
	EvictableBytes   int64 `json:"evictable_bytes"`
	PinnedBytes      int64 `json:"pinned_bytes"`
	FillingBytes     int64 `json:"filling_bytes"`
	QuarantinedBytes int64 `json:"quarantined_bytes"`
	RemainderBytes   int64 `json:"remainder_bytes"` // ends of extents too small for a slot
	Blocks           int64 `json:"blocks"`          // committed
	Evicted          int64 `json:"evicted_total"`
	ExtentsTaken     int64 `json:"extents_taken_total"`
	Hits             int64 `json:"hits_total"` // keys answered Hit without a promotion
}

// TableStatus has the size of every per-request, per-job and per-session
// table. All are 0 when the node is idle and no engine is connected.
type TableStatus struct {
	Sessions     int `json:"sessions"`
	Requests     int `json:"requests"`
	Pins         int `json:"pins"`
	Reservations int `json:"reservations"`
	Jobs         int `json:"jobs"`
	Waits        int `json:"waits"`
	Quarantined  int `json:"quarantined_slots"`
}

// LookupStatus counts keys by verdict, and what was refused.
type LookupStatus struct {
	Calls    int64            `json:"calls_total"`
	Verdicts map[string]int64 `json:"verdicts_total"`
	P50us    float64          `json:"p50_us"` // frame read to reply written; waiting lookups apart
	P99us    float64          `json:"p99_us"`
}

// StoreStatus counts blocks that engines stored.
type StoreStatus struct {
	Reserved  int64 `json:"reserved_total"`
	Committed int64 `json:"committed_total"`
	Aborted   int64 `json:"aborted_total"`
	Refused   int64 `json:"refused_total"` // reserve calls refused for lack of room
	Expired   int64 `json:"expired_total"`
}

// TierStatus is one secondary tier as seen by the node and by itself.
type TierStatus struct {
	Name          string           `json:"name"`
	Type          string           `json:"type"`
	Where         string           `json:"where,omitempty"`
	Mode          string           `json:"mode,omitempty"`
	ReadHealth    string           `json:"read_health"` // closed, brown_out, open, half_open
	WriteHealth   string           `json:"write_health"`
	Hits          int64            `json:"hits_total"` // blocks promoted from it
	ReadBytes     int64            `json:"read_bytes_total"`
	WriteBytes    int64            `json:"write_bytes_total"`
	WrittenBlocks int64            `json:"written_blocks_total"`
	Failures      map[string]int64 `json:"failures_total"` // by cause, all directions
	Corrupt       int64            `json:"corrupt_total"`
	Dropped       map[string]int64 `json:"dropped_total"` // cascades not started, by cause
	Late          int64            `json:"late_results_total"`
	Panics        int64            `json:"panics_total"` // calls that ended in a panic of the tier's code
	QueuedReads   int              `json:"queued_reads"`
	QueuedWrites  int              `json:"queued_writes"`
	Blocks        int64            `json:"blocks"`
	UsedBytes     int64            `json:"used_bytes"`
	CapacityBytes int64            `json:"capacity_bytes"` // 0: unbounded
	Evicted       int64            `json:"evicted_total"`
	SetAside      int64            `json:"set_aside_total"`
	ScanDone      bool             `json:"scan_done"`
	ScanBlocks    int64            `json:"scan_blocks"`
	ScanError     string           `json:"scan_error,omitempty"`
	LastError     string           `json:"last_error,omitempty"`
}

// PeersStatus is what goes on between this node and others. In and out are seen
// from here: blocks in were loaded from a peer.
type PeersStatus struct {
	NodeID    string       `json:"node_id"`
	Tier      string       `json:"tier"` // which of the tiers they are
	Listen    string       `json:"listen"`
	Advertise string       `json:"advertise"` // where others are told to dial
	Mode      string       `json:"mode"`      // tcp or tls, or one of them "and ucx"
	Peers     []PeerStatus `json:"peers"`     // sessions, and addresses without one
	LastError string       `json:"last_error,omitempty"`

	BlocksIn  int64 `json:"blocks_in_total"`
	BytesIn   int64 `json:"bytes_in_total"`
	BlocksOut int64 `json:"blocks_out_total"`
	BytesOut  int64 `json:"bytes_out_total"`
	Lookups   int64 `json:"lookups_total"` // of peers, admitted
	Fetches   int64 `json:"fetches_total"`

	Gets       int64 `json:"gets_total"`        // blocks that came over the fabric
	GetsFailed int64 `json:"gets_failed_total"` // that were asked for over TCP after that
	Offers     int64 `json:"offers_total"`      // blocks that peers were let get
	GetsPosted int   `json:"gets_posted"`       // whose slots the fabric may write

	Failures         map[string]int64 `json:"failures_total"` // of ours, by code: blocks, or probes
	Refused          map[string]int64 `json:"refused_total"`  // of peers', by code: blocks, or rounds
	Violations       int64            `json:"violations_total"`
	Deaths           int64            `json:"deaths_total"` // sessions whose peer fell silent
	Corrupt          int64            `json:"corrupt_total"`
	Strays           int64            `json:"strays_total"` // news of what is over
	FastFails        int64            `json:"fast_fails_total"`
	HitsExpired      int64            `json:"hits_expired_total"`      // lookups answered that nobody fetched
	HandoversExpired int64            `json:"handovers_expired_total"` // that nobody fetched in time

	Sessions    int   `json:"sessions"`
	Sources     int   `json:"sources"` // requests of ours with a peer
	Rounds      int   `json:"rounds"`  // lookups and fetches of ours under way
	Serves      int   `json:"serves"`  // the same, of peers
	Supplies    int   `json:"supplies"`
	Parked      int   `json:"parked"` // fetches for an id that no engine has named yet
	Aborts      int   `json:"aborts"`
	Handovers   int   `json:"handovers"` // finished requests whose blocks wait to be fetched
	Ended       int   `json:"ended_ids"` // remembered, so that who is late hears it at once
	Quarantined int   `json:"quarantined_blocks"`
	PinnedBytes int64 `json:"pinned_bytes"` // for peers
}

// PeerStatus is one session with a peer, or an address that has none.
type PeerStatus struct {
	NodeID  string  `json:"node_id,omitempty"`
	BootID  string  `json:"boot_id,omitempty"`
	Address string  `json:"address"`
	State   string  `json:"state"`          // idle, dialing, greeting, up, ending, down
	Why     string  `json:"why,omitempty"`  // it is down, or was when it was last asked, or ends
	Dialed  bool    `json:"dialed"`         // by this node
	Seconds float64 `json:"seconds"`        // since the session began
	Wire    string  `json:"wire,omitempty"` // how blocks go: tcp, tls, or the fabric's name

	Namespaces  int   `json:"namespaces"`
	Sources     int   `json:"sources"`
	Rounds      int   `json:"rounds"`
	Serves      int   `json:"serves"`
	Parked      int   `json:"parked"`
	Aborts      int   `json:"aborts"`
	PinnedBytes int64 `json:"pinned_bytes"`
	BlocksIn    int64 `json:"blocks_in"` // in this session
	BytesIn     int64 `json:"bytes_in"`
	BlocksOut   int64 `json:"blocks_out"`
	BytesOut    int64 `json:"bytes_out"`
}

// LoopStatus is one of the goroutines that the node cannot do without.
type LoopStatus struct {
	Name        string  `json:"name"`
	Turns       int64   `json:"turns_total"`
	BusySeconds float64 `json:"busy_seconds"`   // how long its turn lasts by now; 0 at rest
	Down        string  `json:"down,omitempty"` // why it is down; the node is not ready then
}

// SessionStatus is one engine's connection.
type SessionStatus struct {
	ID           uint64    `json:"id"`
	PID          int       `json:"pid"`
	Engine       string    `json:"engine"` // the name that the engine gave itself
	Namespace    string    `json:"namespace"`
	Since        time.Time `json:"since"`
	Requests     int       `json:"requests"`
	Pins         int       `json:"pins"`
	Reservations int       `json:"reservations"`
}

// NamespaceStatus is one namespace that engines have opened.
type NamespaceStatus struct {
	Fingerprint string `json:"fingerprint"`
	Name        string `json:"name,omitempty"`
	Model       string `json:"model"`
	Blocks      int64  `json:"blocks"`
}

// Pin is one entry of /v1/pins: somebody who keeps a block from eviction.
type Pin struct {
	Owner      string  `json:"owner"` // "session 3 request abc", "job 17 cascade fs", …
	Slot       uint32  `json:"slot"`
	Generation uint32  `json:"generation"`
	Key        string  `json:"key"`
	AgeSeconds float64 `json:"age_seconds"`
	Overdue    bool    `json:"overdue"`
}
