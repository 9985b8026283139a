// Package terrace embeds a node: a tiered KV cache for LLM inference engines.
// Most people run the binary cmd/terrace instead.
//
//	n, err := terrace.Open(ctx, terrace.Options{Socket: path, PrimarySize: 1 << 30, Tiers: …})
//	…
//	err = n.Close(ctx) // drains until ctx ends
//
// Engines speak to a node with package client. Tiers implement package tier.
package terrace

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime/debug"
	"time"

	"github.com/terrace-kv/terrace/internal/admin"
	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/internal/core/policy"
	"github.com/terrace-kv/terrace/internal/engine"
	"github.com/terrace-kv/terrace/internal/metrics"
	"github.com/terrace-kv/terrace/internal/node"
	"github.com/terrace-kv/terrace/internal/peer"
	"github.com/terrace-kv/terrace/internal/rma/ucx"
	"github.com/terrace-kv/terrace/internal/transfer"
	"github.com/terrace-kv/terrace/tier"
)

// Settings whose zero values get the defaults that docs/operations.md lists.
type (
	Bounds = core.Options     // timeouts and limits of the core; Size, ExtentBytes, Tiers and NewPolicy are not used
	Limits = engine.Options   // limits of engines' connections; Node, Logger and Watch are not used
	Lane   = transfer.Options // how a tier is driven; Logger is not used
	Status = node.Status      // a node's account of itself
	Pin    = node.Pin         // somebody who keeps a block from eviction
)

// PeerBounds are timeouts and limits between nodes; Node, Boot and Advertise are
// not used.
type PeerBounds = peer.Options

// PeerTLS names the files for TLS between nodes.
type PeerTLS = peer.TLSFiles

// Peers make the node one of several that load blocks from each other.
type Peers struct {
	// Listen is host:port, and port 0 a free one. Everybody who reaches it can
	// read blocks of namespaces whose description they know, unless TLS is set.
	Listen         string
	Advertise      string        // where other nodes dial it; "" is where it listens, port 0 the one there
	NodeID         string        // each node has another; "" is Advertise
	TLS            PeerTLS       // zero: plain TCP
	LoadTimeout    time.Duration // for blocks that a peer has; default 30 s
	PrefillTimeout time.Duration // for blocks that it may still have to compute; default 60 s
	Bounds         PeerBounds

	// Transport is how blocks go to and from peers that have the same: "" or "tcp",
	// or "ucx" in builds with that tag. The latter is for networks whose nodes are
	// all trusted: it has no TLS, and who is on it can read the whole primary, or do
	// worse.
	Transport string
}

// Tier is a secondary tier and how to drive it. An open node owns its tiers and
// closes them.
type Tier struct {
	Tier tier.Tier
	Lane Lane
}

// Options of a node.
type Options struct {
	Socket      string // path of the engines' socket; required
	SocketGroup string // group that may connect as well; "" is nobody
	PrimarySize int64  // bytes of shared memory, a multiple of 4096; required
	ExtentBytes int64  // bytes handed to one size class at a time, a power of two; 0 is automatic
	Policy      string // "" is lru
	Populate    bool   // touch memory ahead of its first use
	Tiers       []Tier // secondaries, in the order in which they are asked
	Peers       *Peers // nil: the node speaks to no other
	Admin       string // address of the admin HTTP server; "" is none
	Bounds      Bounds
	Limits      Limits
	Version     string // told in status; "" is the module's
	Logger      *slog.Logger
}

// Node is a running node. Its methods may be called by anybody at any time.
type Node struct {
	node   *node.Node
	server *engine.Server
	admin  *admin.Server
	log    *slog.Logger
}

// Open starts a node and returns when it is ready. On an error nothing is left
// behind, and the tiers are still the caller's.
func Open(ctx context.Context, o Options) (_ *Node, err error) {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.Policy == "" {
		o.Policy = "lru"
	}
	if o.Version == "" {
		if b, ok := debug.ReadBuildInfo(); ok {
			o.Version = b.Main.Version
		}
	}
	known := false
	for _, name := range policy.Names() {
		known = known || name == o.Policy
	}
	if !known {
		return nil, fmt.Errorf("primary.policy is %q, want one of %v", o.Policy, policy.Names())
	}
	var names []string
	var specs []node.TierSpec
	for _, t := range o.Tiers {
		names = append(names, t.Tier.Info().Name)
		specs = append(specs, node.TierSpec{Tier: t.Tier, Lane: t.Lane})
	}
	if o.Peers != nil {
		names = append(names, node.PeersTier)
	}
	n := &Node{log: o.Logger}
	set := metrics.NewSet(names...)

	listener, err := engine.Listen(o.Socket, o.SocketGroup)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil && n.server == nil {
			err = errors.Join(err, listener.Close())
		}
	}()
	if o.Admin != "" {
		if n.admin, err = admin.Open(admin.Options{Listen: o.Admin, Set: set, Logger: o.Logger}); err != nil {
			return nil, err
		}
		defer func() {
			if err != nil {
				err = errors.Join(err, n.admin.Close(context.WithoutCancel(ctx)))
			}
		}()
	}
	b := o.Bounds
	b.Size, b.ExtentBytes = o.PrimarySize, o.ExtentBytes
	b.NewPolicy = func(nodes policy.Nodes) policy.Policy { return policy.New(o.Policy, nodes) }
	peers, err := peerOptions(o.Peers)
	if err != nil {
		return nil, err
	}
	n.node, err = node.Open(ctx, node.Options{Core: b, Tiers: specs, Peers: peers, Populate: o.Populate, Version: o.Version,
		Socket: listener.Path(), Logger: o.Logger, Metrics: set})
	if err != nil {
		return nil, err
	}
	l := o.Limits
	l.Node, l.Logger, l.Watch = o.Version, o.Logger, n.node.Watch()
	l.OnLookup = set.Lookup.Observe
	n.server = engine.Serve(listener, backend{n.node}, l)
	if n.admin != nil {
		n.admin.Attach(n.node)
	}
	return n, nil
}

// peerOptions have the node open a transport over TCP.
func peerOptions(p *Peers) (*node.PeerOptions, error) {
	if p == nil {
		return nil, nil
	}
	var secure *tls.Config
	mode := "tcp"
	if p.TLS != (PeerTLS{}) {
		var err error
		if secure, err = p.TLS.Config(); err != nil {
			return nil, fmt.Errorf("peers: %w", err)
		}
		mode = "tls"
	}
	switch p.Transport {
	case "", "tcp":
	case ucx.Name:
		mode += " and " + ucx.Name
	default:
		return nil, fmt.Errorf("peers.transport is %q, want tcp or %s", p.Transport, ucx.Name)
	}
	if p.Advertise != "" {
		if _, _, err := net.SplitHostPort(p.Advertise); err != nil {
			return nil, fmt.Errorf("peers.advertise is %q, want a host and a port: %w", p.Advertise, err)
		}
	}
	m := p.Bounds
	m.Node, m.Advertise = p.NodeID, p.Advertise
	return &node.PeerOptions{Machine: m, LoadTimeout: p.LoadTimeout, PrefillTimeout: p.PrefillTimeout, Mode: mode,
		Open: func(sink peer.Sink, no peer.NetOptions) (peer.Transport, string, error) {
			no.Listen, no.TLS, no.DialTimeout = p.Listen, secure, p.Bounds.ConnectTimeout
			if p.Transport == ucx.Name {
				var err error
				if no.Fabric, err = ucx.Open(ucx.Options{}); err != nil {
					return nil, "", fmt.Errorf("peers: %w", err)
				}
			}
			t, err := peer.OpenNet(no, sink)
			if err != nil {
				return nil, "", err
			}
			return t, t.Addr(), nil
		}}, nil
}

// Status is the node's account of itself.
func (n *Node) Status() Status { return n.node.Status() }

// Pins lists at most limit of those who keep blocks from eviction.
func (n *Node) Pins(limit int) []Pin { return n.node.Pins(limit) }

// AdminURL is where the admin server is, "" without one.
func (n *Node) AdminURL() string {
	if n.admin == nil {
		return ""
	}
	return n.admin.URL()
}

// CheckInvariants walks the node's tables and reports a contradiction. It
// holds up the node meanwhile.
func (n *Node) CheckInvariants() error { return n.node.CheckInvariants() }

// Close stops taking engines, lets what is under way end until ctx does, then
// cancels it, closes the tiers and ends. The error says what was left behind.
// The admin server ends last, so that a drain can be watched.
func (n *Node) Close(ctx context.Context) error {
	errs := []error{n.server.StopAccepting()}
	_ = n.node.Drain(ctx) // what is left is said by Close below
	errs = append(errs, n.server.Close(), n.node.Close(ctx))
	if n.admin != nil {
		errs = append(errs, n.admin.Close(ctx))
	}
	return errors.Join(errs...)
}

// backend shows the node to the server of engines.
type backend struct{ *node.Node }

func (b backend) OpenSession(ctx context.Context, h engine.Hello) (engine.Session, error) {
	s, err := b.Node.OpenSession(ctx, node.Greeting{NS: h.NS, Name: h.Name, Engine: h.Engine, PID: h.PID, UID: h.UID})
	if err != nil {
		return nil, err
	}
	return session{s}, nil
}

func (b backend) Status() []byte { return b.StatusJSON() }

type session struct{ *node.Session }

func (s session) Facts() engine.Facts {
	return engine.Facts{ID: s.ID(), Epoch: s.Epoch(), RegionBytes: s.RegionBytes(), Strides: s.Strides()}
}
