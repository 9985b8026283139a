package core

import (
	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
)

// fact is what the core remembers of a key on a tier beyond what the tier
// itself knows: a probe's answer, or that a read failed.
type fact struct {
	state  factState
	until  Time
	seq    uint64
	wanted []interest // while probing
}

type factState uint8

const (
	factProbing   factState = iota
	factPresent             // a probe found it
	factAbsent              // a probe did not
	factUnknown             // a probe failed: a Miss until it may be asked again
	factDistrust            // a read failed: a Miss until it may be tried again
	factAgeProbe  = 0       // index in Core.factAge
	factAgeFailed = 1
)

type factKey struct {
	tier uint8
	ns   NamespaceID
	src  uint64 // of the bound tier: the request's seq
	key  block.Key
}

// source is what knowledge of a tier belongs to besides its keys: a request, of
// the bound tier.
func (c *Core) source(t int, q *request) uint64 {
	if c.tiers[t].facts.Bound {
		return q.seq
	}
	return 0
}

// factAge is an entry of a FIFO of facts; one whose seq is not the fact's has
// been overtaken.
type factAge struct {
	k     factKey
	until Time
	seq   uint64
}

// factOf combines what the tier knows with what the core remembers. why is a
// Miss that settles the tier; under says that a probe is under way.
func (c *Core) factOf(t int, q *request, key *block.Key, p tier.Presence) (_ tier.Presence, under bool, why Verdict) {
	f := c.facts[factKey{uint8(t), q.s.ns, c.source(t, q), *key}]
	if f == nil {
		return p, false, VerdictNone
	}
	if f.state != factProbing && f.until <= c.now {
		return p, false, VerdictNone
	}
	switch f.state {
	case factDistrust:
		if p == tier.Absent {
			return p, false, VerdictNone
		}
		return p, false, MissFailed
	case factProbing:
		return p, p == tier.Unknown, VerdictNone
	case factPresent:
		if p == tier.Unknown {
			p = tier.Present
		}
	case factAbsent:
		if p == tier.Unknown {
			p = tier.Absent
		}
	case factUnknown:
		if p == tier.Unknown {
			return p, false, MissUnavailable
		}
	}
	return p, false, VerdictNone
}

// remember sets a fact that holds until a time, and forgets the oldest if
// there are too many.
func (c *Core) remember(k factKey, s factState, until Time, age int) {
	f := c.facts[k]
	if f == nil {
		f = &fact{}
		c.facts[k] = f
	}
	f.state, f.until, f.seq, f.wanted = s, until, c.nextID(), nil
	c.factAge[age] = append(c.factAge[age], factAge{k, until, f.seq})
	for i := range c.factAge {
		for len(c.factAge[i]) > c.opt.FactsMax {
			c.popFact(i)
		}
	}
}

func (c *Core) popFact(age int) {
	a := c.factAge[age][0]
	c.factAge[age] = c.factAge[age][1:]
	if f := c.facts[a.k]; f != nil && f.seq == a.seq {
		delete(c.facts, a.k)
	}
	if len(c.factAge[age]) == 0 {
		c.factAge[age] = nil
	}
}

func (c *Core) expireFacts() {
	for i := range c.factAge {
		for len(c.factAge[i]) > 0 && c.factAge[i][0].until <= c.now {
			c.popFact(i)
		}
	}
}

func (c *Core) distrust(j *job, key *block.Key) {
	k := factKey{uint8(j.tier), j.ns, j.src, *key}
	if f := c.facts[k]; f != nil && f.state == factProbing {
		return // the probe's answer will be news
	}
	c.remember(k, factDistrust, c.now+Time(c.opt.DistrustFor), factAgeFailed)
}

// believe clears what a completed write has disproved: a Miss of the key.
func (c *Core) believe(t int, ns NamespaceID, key *block.Key) {
	if len(c.facts) == 0 {
		return
	}
	k := factKey{uint8(t), ns, 0, *key}
	if f := c.facts[k]; f != nil && f.state != factProbing {
		delete(c.facts, k) // its factAge entry is dropped when met
	}
}

// addProbe notes that a key is to be asked for by the lookup under way.
func (c *Core) addProbe(t int, q *request, key *block.Key) {
	k := factKey{uint8(t), q.s.ns, c.source(t, q), *key}
	if f := c.facts[k]; f != nil && f.state == factProbing {
		return
	}
	c.facts[k] = &fact{state: factProbing, seq: c.nextID()}
	c.tiers[t].probes = append(c.tiers[t].probes, *key)
}

// wantFact registers the request with a probe that is under way.
func (c *Core) wantFact(q *request, t int, key *block.Key) {
	f := c.facts[factKey{uint8(t), q.s.ns, c.source(t, q), *key}]
	f.wanted = addInterest(f.wanted, q)
}

func (c *Core) startProbes(q *request) {
	for t := range c.tiers {
		ts := &c.tiers[t]
		for len(ts.probes) > 0 {
			n := len(ts.probes)
			if ts.facts.Bound {
				n = min(n, ProbeKeysMax)
			}
			j := c.newJob(ProbeJob, t, q.s.ns, ts.facts.ProbeTimeout)
			c.ask(j, q)
			j.keys, ts.probes = ts.probes[:n:n], ts.probes[n:]
			c.startJob(j)
		}
		ts.probes = nil
	}
}

// ProbeResult answers a probe; ok false says that it failed, and found is then
// meaningless.
func (c *Core) ProbeResult(now Time, id JobID, found []bool, ok bool) {
	c.now = now
	j := c.jobs[id]
	if j == nil || j.kind != ProbeJob || ok && len(found) != len(j.keys) {
		c.stats.ForeignResults++
		return
	}
	c.endProbe(j, found, ok)
	c.settle()
}

func (c *Core) endProbe(j *job, found []bool, ok bool) {
	if !ok {
		c.tiers[j.tier].stats.ProbeFailures++
	}
	for i := range j.keys {
		k := factKey{uint8(j.tier), j.ns, j.src, j.keys[i]}
		f := c.facts[k]
		if f == nil || f.state != factProbing {
			continue
		}
		wanted, state := f.wanted, factUnknown
		if ok {
			state = factAbsent
			if found[i] {
				state = factPresent
			}
		}
		c.remember(k, state, c.now+Time(c.opt.FactFor), factAgeProbe)
		c.notify(wanted, false, 0, 0)
	}
	c.endJob(j)
}
