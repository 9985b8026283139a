package config

import "time"

// Config is all that `terrace serve` can be told. Use Load to get one.
type Config struct {
	Socket       string        `yaml:"socket" doc:"unix socket on which engines are served"`
	SocketGroup  string        `yaml:"socket_group" doc:"group that may connect as well; the socket is then 0660, else 0600"`
	Primary      Primary       `yaml:"primary"`
	Admin        Admin         `yaml:"admin"`
	Log          Log           `yaml:"log"`
	DrainTimeout time.Duration `yaml:"drain_timeout" min:"0s" max:"24h" doc:"how long a stop waits for work that is under way"`
	Core         Core          `yaml:"core"`
	Limits       Limits        `yaml:"limits"`
	Peers        Peers         `yaml:"peers"`
	Tiers        []Tier        `yaml:"tiers"`

	sources map[string]Source // by path; a path that is not here has its default
}

// Primary is the shared-memory tier.
type Primary struct {
	Size     Size   `yaml:"size" min:"1MiB" max:"15TiB" doc:"bytes of shared memory for blocks, a multiple of 4KiB"`
	Extent   Size   `yaml:"extent" zero:"auto" min:"64KiB" max:"8TiB" doc:"bytes handed to one size class at a time, a power of two; no block can be larger"`
	Policy   string `yaml:"policy" enum:"lru" doc:"which block leaves first when room is needed"`
	Populate string `yaml:"populate" enum:"background|off" doc:"whether memory is touched ahead of its first use"`
}

// Admin is the HTTP listener for people and monitors.
type Admin struct {
	Listen   string `yaml:"listen" doc:"address of the admin HTTP server; without a host it is 127.0.0.1, with port 0 a free one is taken and printed"`
	Insecure bool   `yaml:"insecure" doc:"allow admin.listen to be other than loopback: everybody who reaches it can read status and profiles"`
}

// Log is about the log on standard error.
type Log struct {
	Level  string `yaml:"level" enum:"debug|info|warn|error" doc:"least level that is logged"`
	Format string `yaml:"format" enum:"text|json" doc:"one line an entry, as key=value or as JSON"`
}

// Core has the bounds of every wait; docs/architecture.md names their ends.
type Core struct {
	LookupTimeout       time.Duration `yaml:"lookup_timeout" min:"1ms" max:"1h" doc:"from a request's first lookup that is not final, until what is pending becomes a miss; longer for one that loads from a peer, see peers.timeouts"`
	ProbeTimeout        time.Duration `yaml:"probe_timeout" min:"1ms" max:"1h" doc:"for asking a tier whether it has a block"`
	PromoteTimeout      time.Duration `yaml:"promote_timeout" min:"1ms" max:"1h" doc:"for reading blocks from a tier into the primary"`
	CascadeTimeout      time.Duration `yaml:"cascade_timeout" min:"1ms" max:"1h" doc:"for writing blocks from the primary to a tier"`
	ReservationTimeout  time.Duration `yaml:"reservation_timeout" min:"1ms" max:"24h" doc:"from reserve to commit or abort"`
	DistrustFor         time.Duration `yaml:"distrust_for" min:"1ms" max:"1h" doc:"how long a tier is not asked again for a block whose read failed"`
	UnboundStoreTimeout time.Duration `yaml:"unbound_store_timeout" min:"1ms" max:"24h" doc:"how long blocks of a finished remote_decoder request stay pinned for the hand-over"`
	ReservePercent      int           `yaml:"reserve_percent" min:"0" max:"45" doc:"share of the primary that promotions leave to stores, and stores to promotions; nothing is kept back without a tier"`
	OverduePercent      int           `yaml:"overdue_percent" min:"1" max:"100" doc:"share of the primary that a tier's calls past their deadline may hold; above it the tier is down"`
	FactFor             time.Duration `yaml:"fact_for" min:"1ms" max:"1h" doc:"how long a tier's answer whether it has a block is believed"`
}

// Limits bound what engines can make the node keep.
type Limits struct {
	Sessions int `yaml:"sessions" min:"1" max:"65536" doc:"engines connected at a time"`
	Workers  int `yaml:"workers" min:"1" max:"4096" doc:"attached workers of one engine"`
	Requests int `yaml:"requests" min:"1" max:"16777216" doc:"unfinished requests of one engine"`
	Waits    int `yaml:"waits" min:"1" max:"1048576" doc:"calls of one engine that wait for their answer"`
	Facts    int `yaml:"facts" min:"1024" max:"16777216" doc:"tiers' answers that are remembered"`
}

// Peers are other nodes, which load blocks from this one and it from them.
type Peers struct {
	Listen          string       `yaml:"listen" doc:"address for other nodes; empty: none are spoken to. Without a host it is 127.0.0.1; other than loopback needs peers.tls or peers.insecure"`
	Advertise       string       `yaml:"advertise" doc:"where other nodes reach this one, a name or an address and a port; default: peers.listen"`
	NodeID          string       `yaml:"node_id" doc:"name of this node among others, each needs another; default: the advertised address"`
	Insecure        bool         `yaml:"insecure" doc:"allow peers.listen to be other than loopback without TLS: everybody who reaches it can read blocks, and send some"`
	TLS             PeerTLS      `yaml:"tls"`
	Transport       string       `yaml:"transport" enum:"tcp|ucx" doc:"how blocks go to and from peers that have the same; ucx is for trusted networks only, has no TLS, and needs a build with -tags ucx"`
	DataConnections int          `yaml:"data_connections" min:"1" max:"16" doc:"connections for blocks of a session that this node begins, beside the one for control"`
	Quota           string       `yaml:"quota" doc:"bytes that are pinned at most for one peer: a size, or a percentage of the primary such as 25%"`
	QuotaTotal      string       `yaml:"quota_total" doc:"bytes that are pinned at most for all peers together, not less than peers.quota; default: twice that"`
	LookupsPerSec   int          `yaml:"lookups_per_second" min:"1" max:"1000000" doc:"lookups of one peer; more are refused"`
	Sessions        int          `yaml:"sessions" min:"1" max:"65536" doc:"peers connected at a time"`
	Addresses       int          `yaml:"addresses" min:"1" max:"65536" doc:"peers' addresses that engines name in requests at a time; those that nobody uses make room"`
	Parked          int          `yaml:"parked" min:"1" max:"65536" doc:"fetches of one peer that wait for a request which no engine here has begun yet"`
	Timeouts        PeerTimeouts `yaml:"timeouts"`
}

// PeerTLS are PEM files for mutual TLS: a node shows its certificate and asks
// for one that the CA has signed, whoever dials.
type PeerTLS struct {
	Cert       string `yaml:"cert" doc:"file with this node's certificate, in PEM; tls needs cert, key and ca"`
	Key        string `yaml:"key" doc:"file with its key"`
	CA         string `yaml:"ca" doc:"file with the certificates that sign those of peers; nobody else's are taken"`
	ServerName string `yaml:"server_name" doc:"name that the certificates of dialed peers must have; default: the host that was dialed"`
}

// PeerTimeouts bound every wait for a peer. That of a hand-over nobody fetches
// is core.unbound_store_timeout.
type PeerTimeouts struct {
	Connect   time.Duration `yaml:"connect" min:"10ms" max:"1m" doc:"from the need of a session until it is up"`
	Lookup    time.Duration `yaml:"lookup" min:"10ms" max:"10m" doc:"for asking a peer which blocks it has, beside connect"`
	Load      time.Duration `yaml:"load" min:"10ms" max:"1h" doc:"for loading blocks that a peer has (remote_kv_source); a lookup waits as long, beside connect and lookup"`
	Prefill   time.Duration `yaml:"prefill" min:"10ms" max:"1h" doc:"for loading blocks that a peer may still have to compute (remote_prefiller); a lookup waits as long"`
	Abort     time.Duration `yaml:"abort" min:"10ms" max:"10m" doc:"for a peer's answer to an abort; then its session ends"`
	Hit       time.Duration `yaml:"hit" min:"10ms" max:"10m" doc:"how long what a peer was told it may have stays pinned until it fetches"`
	Park      time.Duration `yaml:"park" min:"10ms" max:"1h" doc:"how long a fetch waits for a request which no engine here has begun yet"`
	Idle      time.Duration `yaml:"idle" min:"1s" max:"24h" doc:"after so long without work a session ends"`
	Heartbeat time.Duration `yaml:"heartbeat" min:"10ms" max:"10m" doc:"between signs of life that are asked for"`
	Misses    int           `yaml:"misses" min:"2" max:"100" doc:"heartbeats without any sign after which a peer is dead"`
}

// Source says where a value came from, for people: "terrace.yaml:3",
// "TERRACE_PRIMARY_SIZE" or "--primary". The zero Source is the default.
type Source string

// Source of the setting at path, such as primary.size or tiers.0.root.
func (c *Config) Source(path string) Source { return c.sources[path] }
