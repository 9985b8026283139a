package metrics

import "github.com/prometheus/client_golang/prometheus"

// Set is what a node observes. It is a prometheus.Collector; no registry is
// global.
type Set struct {
	Lookup Histogram // from a lookup's frame read to its reply written; those that wait are not in it
	Ready  Histogram // of lookups that wait: from the call until the verdicts were final or the wait was over
	tiers  []Tier
}

// Tier is what is observed of one secondary tier.
type Tier struct {
	name  string
	Read  Histogram // one Read call of the tier, or one load from a peer, whatever its outcome
	Write Histogram
}

var (
	lookupDesc = prometheus.NewDesc("terrace_lookup_duration_seconds", "Time from a lookup's frame read to its reply written; lookups that wait are not in it.", nil, nil)
	readyDesc  = prometheus.NewDesc("terrace_lookup_wait_seconds", "Time that waiting lookups took until their verdicts were final or the wait was over.", nil, nil)
	readDesc   = prometheus.NewDesc("terrace_tier_read_duration_seconds", "Time of one read call of a tier, or of one load from a peer, whatever its outcome.", []string{"tier"}, nil)
	writeDesc  = prometheus.NewDesc("terrace_tier_write_duration_seconds", "Time of one write call of a tier, whatever its outcome.", []string{"tier"}, nil)
)

// NewSet returns an empty set for tiers with these names, in the node's order.
func NewSet(tiers ...string) *Set {
	s := &Set{tiers: make([]Tier, len(tiers))}
	for i, name := range tiers {
		s.tiers[i].name = name
	}
	return s
}

// Tier is the i-th tier.
func (s *Set) Tier(i int) *Tier { return &s.tiers[i] }

// Describe implements prometheus.Collector.
func (s *Set) Describe(ch chan<- *prometheus.Desc) {
	ch <- lookupDesc
	ch <- readyDesc
	ch <- readDesc
	ch <- writeDesc
}

// Collect implements prometheus.Collector.
func (s *Set) Collect(ch chan<- prometheus.Metric) {
	s.Lookup.collect(ch, lookupDesc)
	s.Ready.collect(ch, readyDesc)
	for i := range s.tiers {
		t := &s.tiers[i]
		t.Read.collect(ch, readDesc, t.name)
		t.Write.collect(ch, writeDesc, t.name)
	}
}
