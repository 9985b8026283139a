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
	LookupTimeout       time.Duration `yaml:"lookup_timeout" min:"1ms" max:"1h" doc:"from a request's first lookup that is not final, until what is pending becomes a miss"`
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

// Source says where a value came from, for people: "terrace.yaml:3",
// "TERRACE_PRIMARY_SIZE" or "--primary". The zero Source is the default.
type Source string

// Source of the setting at path, such as primary.size or tiers.0.root.
func (c *Config) Source(path string) Source { return c.sources[path] }
