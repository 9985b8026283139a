package replay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/config"
	"github.com/terrace-kv/terrace/internal/core"
	"github.com/terrace-kv/terrace/internal/core/policy"
	"github.com/terrace-kv/terrace/internal/netfault"
)

// What a replay ends with when it did run. The table or the JSON object has
// been printed before the command returns one of them.
var (
	ErrCorrupt     = errors.New("blocks were corrupt")
	ErrInterrupted = errors.New("interrupted")
)

// ErrFlags: no node answers, and with these flags none can be started. Nothing
// was begun or printed.
var ErrFlags = errors.New("no node answers, and none can be started with these flags")

// Defaults of the node that replay starts, and bounds around it.
const (
	defaultPrimary    = 1 << 30
	defaultFS         = 10 << 30
	defaultBlockBytes = 64 << 10
	enginesMax        = 256
	primaryMax        = 15 << 40 // as primary.size
	fsMin             = 64 << 10 // as tiers.fs.capacity
	stopTimeout       = 60 * time.Second
	faultyPeerTimeout = time.Second // with --peer-faults, so that a run sees many of them
	statusTimeout     = 10 * time.Second
	sameSignalFor     = 100 * time.Millisecond
)

// NodeOptions say what node to start.
type NodeOptions struct {
	Dir          string // a directory of replay's own, for the socket; it outlives the node
	PrimaryBytes int64
	FSRoot       string // root of the filesystem tier; empty for none
	FSBytes      int64  // its capacity; 0 for unbounded
	Policy       string
	Peers        bool // it speaks to other nodes, on loopback

	// Of a node with peers, if not zero:
	Advertise   string        // where others reach it
	PeerTimeout time.Duration // of a load from a peer; its other bounds are no longer, a dead peer is found within half of it
}

// StartNode starts a node in this process and returns the socket on which it
// serves engines. ctx bounds the start only. stop ends the node and is called
// once; after an error there is nothing to stop.
type StartNode func(ctx context.Context, o NodeOptions) (socket string, stop func(context.Context) error, err error)

// Deps are what the command needs of the binary that it is part of.
type Deps struct {
	StartNode StartNode
	// DefaultSocket is where a node without settings serves engines.
	DefaultSocket func() (string, error)

	dial dialFunc // tests replace the client
}

// options are the flags as given.
type options struct {
	synthetic     bool
	seed          uint64
	conversations int
	requests      int
	blockBytes    sizeFlag
	engines       int
	speed         float64
	waitCascade   bool
	socket        string
	primary       sizeFlag
	fs            string
	policy        []string
	peers         int
	peerFaults    string
	dry           bool
	sweep         []string
	sweepBlocks   []int64
	json          bool
	quiet         bool
}

const longHelp = `Replay a trace of prompts against a node, as an engine would: look each prompt up, load what is there and check
every byte of it, store the rest. Block bytes are a function of namespace and key, so a wrong byte shows wherever it
comes from.

FILE is a trace of Mooncake, Qwen-Bailian or kvt1, plain or gzipped; its format is told by its content.
--synthetic makes a chat with shared system prompts and growing turns instead.

A node that serves on --socket, or on the default socket, is used. If none answers there, or if --primary, --fs or
--policy ask for a certain node, replay starts one of its own and removes what it left behind.

--dry asks what a capacity would give: the same decisions, without bytes and without a node.`

const examples = `  terrace replay --synthetic
  terrace replay --synthetic --engines 4 --primary 256MiB
  terrace replay conversation.jsonl.gz --requests 2000 --fs /data/terrace,unbounded
  terrace replay --synthetic --peers 3 --primary 256MiB --fs none
  terrace replay --synthetic --peers 3 --peer-faults all --seed 7
  terrace replay conversation.jsonl.gz --speed 10 --socket /run/terrace/engine.sock
  terrace replay trace.jsonl --dry --sweep 1GiB,4GiB,16GiB --block-bytes 64KiB
  terrace replay trace.jsonl --dry --sweep-blocks 1708,8544 --policy lru --json`

// Command is "terrace replay".
func Command(deps Deps) *cobra.Command {
	o := options{peers: 1, blockBytes: defaultBlockBytes, primary: defaultPrimary}
	cmd := &cobra.Command{
		Use:     "replay [FILE | --synthetic]",
		Short:   "Replay a trace with real bytes, or ask what a capacity would give",
		Long:    longHelp,
		Example: examples,
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			r, err := newReplay(cmd, deps, o, args)
			if err != nil {
				return err
			}
			cmd.SilenceUsage = true
			// A second signal finds the default handler and ends the process,
			// but not at once: timeout(1) sends one and the same twice.
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			defer context.AfterFunc(ctx, func() { time.AfterFunc(sameSignalFor, stop) })()
			// A reader of the table that has gone must not keep what was
			// started from being stopped and removed.
			signal.Ignore(syscall.SIGPIPE)
			defer signal.Reset(syscall.SIGPIPE)
			return r.run(ctx)
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.BoolVar(&o.synthetic, "synthetic", false, "make a trace: chats with shared prompts and growing turns")
	f.Uint64Var(&o.seed, "seed", 1, "seed of the synthetic trace, and of --peer-faults; the same seed gives the same trace")
	f.IntVar(&o.conversations, "conversations", 0, "conversations of the synthetic trace; 0 chooses them so that the working set is larger than the primary and --requests are there")
	f.IntVar(&o.requests, "requests", 0, "stop after so many requests; 0 replays all")
	f.Var(&o.blockBytes, "block-bytes", "bytes of a block")
	f.IntVar(&o.engines, "engines", 1, "engines that share the trace, each with a session of its own")
	f.Float64Var(&o.speed, "speed", 0, "replay the trace's arrival times so many times faster; 0 is as fast as possible")
	f.BoolVar(&o.waitCascade, "wait-cascade", true, "end a request only when its blocks have reached the tiers below; with --speed above 0, off unless given")
	f.StringVar(&o.socket, "socket", "", "socket of the node to use (default: the one of \"terrace serve\", if a node answers there)")
	f.Var(&o.primary, "primary", "primary of a node that replay starts, or of the dry run")
	f.StringVar(&o.fs, "fs", "", `filesystem tier of a node that replay starts: a size, "unbounded", a directory to keep, "DIR,SIZE" or "none" (default: 10GiB in a temporary directory); in a dry run a size or "unbounded" (default: none)`)
	f.StringSliceVar(&o.policy, "policy", []string{"lru"}, "replacement policy of the primary, one of "+strings.Join(policy.Names(), ", ")+"; a dry run takes several")
	f.IntVar(&o.peers, "peers", 1, "nodes that replay starts; the trace is split over them, and a request is told which other node has most of its prompt")
	f.StringVar(&o.peerFaults, "peer-faults", "", `faults of the network between the nodes of --peers: "all", or some of refuse, mute, swap, cut, stall and corrupt with a probability, and delay with a duration`)
	f.BoolVar(&o.dry, "dry", false, "run the decisions alone, without bytes and without a node")
	f.StringSliceVar(&o.sweep, "sweep", nil, "in a dry run: capacities of the primary, such as 1GiB,2GiB")
	f.Int64SliceVar(&o.sweepBlocks, "sweep-blocks", nil, "in a dry run: capacities of the primary in blocks")
	f.BoolVar(&o.json, "json", false, "print one JSON object on standard output and nothing else there")
	f.BoolVar(&o.quiet, "quiet", false, "no progress and no notes on standard error")
	return cmd
}

// sizeFlag is a number of bytes on the command line.
type sizeFlag int64

func (s *sizeFlag) String() string { return config.Size(*s).String() }
func (s *sizeFlag) Type() string   { return "size" }
func (s *sizeFlag) Set(text string) error {
	n, err := config.ParseSize(text)
	if err == nil {
		*s = sizeFlag(n)
	}
	return err
}

// fsChoice is what --fs asks for.
type fsChoice struct {
	none  bool
	dir   string // to keep; empty: a temporary one
	bytes int64  // 0: unbounded
}

func parseFS(text string) (fsChoice, error) {
	c := fsChoice{bytes: defaultFS}
	if text == "" {
		return c, nil
	}
	sized := false
	for part := range strings.SplitSeq(text, ",") {
		n, err := config.ParseSize(part)
		switch {
		case strings.ContainsRune(part, filepath.Separator) || part == "." || part == "..":
			if c.dir != "" {
				return c, fmt.Errorf("--fs %q names two directories", text)
			}
			c.dir = part
			continue
		case part == "none" && text == part:
			c.none = true
		case part == "unbounded":
			c.bytes = 0
		case err == nil && n > 0:
			c.bytes = int64(n)
		default:
			return c, fmt.Errorf(`--fs %q: %q is neither a size such as 10GiB, nor "unbounded", nor "none" alone, nor a directory; write a directory with a slash, such as ./%s`, text, part, part)
		}
		if sized {
			return c, fmt.Errorf("--fs %q names two sizes", text)
		}
		sized = true
	}
	return c, nil
}

// replay is one run of the command.
type replay struct {
	options
	deps     Deps
	path     string
	fs       fsChoice
	ownNode  bool    // asked for by the flags
	capacity []int64 // of a dry run's points, in blocks
	out, err io.Writer
	tty      bool // err is a terminal
	size     Size // of a trace file, measured

	faults  netfault.Faults // of --peer-faults
	proxies []*netfault.Proxy
}

// newReplay checks the flags and reports every fault at once.
func newReplay(cmd *cobra.Command, deps Deps, o options, args []string) (*replay, error) {
	if deps.dial == nil {
		deps.dial = dial
	}
	r := &replay{options: o, deps: deps, out: cmd.OutOrStdout(), err: cmd.ErrOrStderr()}
	r.tty = isTerminal(r.err)
	if o.quiet {
		r.err = io.Discard
	}
	var errs []error
	bad := func(format string, a ...any) { errs = append(errs, fmt.Errorf(format, a...)) }
	given := cmd.Flags().Changed
	switch {
	case len(args) == 1 && o.synthetic:
		bad("a FILE and --synthetic exclude each other")
	case len(args) == 1:
		r.path = args[0]
	case !o.synthetic:
		bad("name a trace FILE, or give --synthetic")
	}
	if !o.synthetic {
		for _, name := range []string{"seed", "conversations"} {
			if given(name) && (name != "seed" || o.peerFaults == "") {
				bad("--%s needs --synthetic", name)
			}
		}
	}
	if o.conversations < 0 || o.conversations > conversationsLimit {
		bad("--conversations is %d, want 0 to %d", o.conversations, conversationsLimit)
	}
	if o.requests < 0 {
		bad("--requests is %d, want 0 (all) or more", o.requests)
	}
	if o.blockBytes < 1 || o.blockBytes > block.BlockBytesMax {
		bad("--block-bytes is %d, want 1 to %d", o.blockBytes, block.BlockBytesMax)
	}
	if o.engines < 1 || o.engines > enginesMax {
		bad("--engines is %d, want 1 to %d", o.engines, enginesMax)
	}
	if o.peers < 1 || o.peers > peersMax {
		bad("--peers is %d, want 1 to %d", o.peers, peersMax)
	} else if !given("engines") {
		r.engines = o.peers
	} else if o.engines < o.peers {
		bad("--engines is %d, less than --peers, which is %d: each node needs one", o.engines, o.peers)
	}
	if o.peerFaults != "" {
		var err error
		if r.faults, err = netfault.Parse(o.peerFaults); err != nil {
			bad("--peer-faults: %w", err)
		}
		if o.peers == 1 {
			bad("--peer-faults needs --peers, 2 or more")
		}
	}
	if !(o.speed >= 0 && o.speed <= 1e9) { // also refuses NaN
		bad("--speed is %v, want 0 (as fast as possible) to 1e9", o.speed)
	}
	if o.speed > 0 && !given("wait-cascade") {
		r.waitCascade = false
	}
	if o.primary < 1 {
		bad("--primary is %d, want a size such as 1GiB", o.primary)
		r.primary = defaultPrimary // what depends on it is not told as well
	}
	var err error
	if r.fs, err = parseFS(o.fs); err != nil {
		errs = append(errs, err)
	}
	for _, p := range o.policy {
		if !slices.Contains(policy.Names(), p) {
			bad("--policy %q is not known; there is %s", p, strings.Join(policy.Names(), ", "))
		}
	}
	if o.dry {
		errs = append(errs, r.checkDry(given)...)
	} else {
		for _, name := range []string{"sweep", "sweep-blocks"} {
			if given(name) {
				bad("--%s needs --dry", name)
			}
		}
		if len(o.policy) != 1 {
			bad("--policy names %d policies; only a dry run takes several", len(o.policy))
		}
		for _, name := range []string{"primary", "fs", "policy", "peers"} {
			if !given(name) {
				continue
			}
			r.ownNode = true
			if given("socket") {
				bad("--%s sets up a node that replay starts, --socket names one that runs: give one of the two", name)
			}
		}
		if r.ownNode && err == nil {
			errs = append(errs, r.checkOwnNode()...)
		}
	}
	return r, errors.Join(errs...)
}

// checkOwnNode checks the flags against what a node takes, in the words of the
// flags.
func (r *replay) checkOwnNode() (errs []error) {
	bad := func(format string, a ...any) { errs = append(errs, fmt.Errorf(format, a...)) }
	primary := int64(r.primary)
	switch {
	case primary > primaryMax:
		bad("--primary %s is more than the %s that a node can have", r.primary.String(), config.Size(primaryMax))
	case primary%core.PageSize != 0:
		bad("--primary %s is not a multiple of 4KiB; write %s", r.primary.String(), config.Size((primary/core.PageSize+1)*core.PageSize))
	case int64(r.blockBytes) > primary:
		bad("--block-bytes %s is more than --primary, which is %s: not one block fits", r.blockBytes.String(), r.primary.String())
	case int64(r.blockBytes) > core.DefaultExtentBytes(primary):
		bad("--block-bytes %s is more than the %s that a block can have in a node with --primary %s; it is a 64th of the primary within 16MiB to 1GiB",
			r.blockBytes.String(), config.Size(core.DefaultExtentBytes(primary)), r.primary.String())
	}
	if !r.fs.none && r.fs.bytes > 0 && r.fs.bytes < fsMin {
		bad("--fs %s has room for %d bytes; give %s or more, or \"none\"", r.options.fs, r.fs.bytes, config.Size(fsMin))
	}
	return errs
}

func (r *replay) checkDry(given func(string) bool) (errs []error) {
	bad := func(format string, a ...any) { errs = append(errs, fmt.Errorf(format, a...)) }
	for _, name := range []string{"socket", "engines", "speed", "wait-cascade", "peers", "peer-faults"} {
		if given(name) {
			bad("--%s means nothing in a dry run", name)
		}
	}
	if given("sweep") && given("sweep-blocks") {
		bad("--sweep and --sweep-blocks exclude each other")
	}
	if r.options.fs == "" {
		r.fs.none = true
	}
	if r.fs.dir != "" {
		bad("--fs names a directory; a dry run takes a size or \"unbounded\"")
	}
	if r.blockBytes < 1 {
		return errs // told already
	}
	add := func(what string, blocks int64) {
		if maximum := int64(1 << 31); blocks < 1 || blocks > maximum {
			bad("%s is %d blocks, want 1 to %d", what, blocks, maximum)
			return
		}
		r.capacity = append(r.capacity, blocks)
	}
	for _, s := range r.sweep {
		n, err := config.ParseSize(s)
		if err != nil {
			bad("--sweep: %q %w", s, err)
			continue
		}
		add("--sweep "+s, int64(n)/int64(r.blockBytes))
	}
	for _, n := range r.sweepBlocks {
		add("--sweep-blocks "+strconv.FormatInt(n, 10), n)
	}
	if !given("sweep") && !given("sweep-blocks") {
		add("--primary "+r.primary.String(), int64(r.primary/r.blockBytes))
	}
	return errs
}

// note tells people something on standard error.
func (r *replay) note(format string, a ...any) {
	fmt.Fprintf(r.err, "replay: "+format+"\n", a...)
}

func (r *replay) run(ctx context.Context) error {
	if !r.synthetic {
		s, err := r.openFile()
		if err != nil {
			return err
		}
		// Reading it once beforehand finds a malformed line before anything
		// is started, and gives the progress line its end. A pipe cannot be
		// read twice.
		if st, err := os.Stat(r.path); err == nil && st.Mode().IsRegular() && !r.dry {
			r.size, err = Measure(s)
			if cerr := s.Close(); err == nil {
				err = cerr
			}
			if err != nil {
				return err
			}
			if s, err = r.openFile(); err != nil {
				return err
			}
		}
		defer func() { _ = s.Close() }() // it was only read
		if r.dry {
			return r.runDry(ctx, s)
		}
		return r.runBytes(ctx, s)
	}
	if r.dry {
		return r.runDry(ctx, r.makeTrace(slices.Max(r.capacity)))
	}
	return r.runBytes(ctx, nil)
}

func (r *replay) openFile() (Source, error) {
	s, err := OpenFile(r.path)
	if err != nil {
		return nil, err
	}
	return Limit(s, r.requests), nil
}

// makeTrace makes the synthetic trace for a primary of so many blocks, and
// says what it is.
func (r *replay) makeTrace(primaryBlocks int64) Source {
	chosen := r.conversations == 0
	if chosen {
		r.conversations = max(SyntheticConversations(primaryBlocks), min(r.requests/synthRequests, conversationsLimit))
	}
	// It ends by itself and is never malformed.
	measure := func() { r.size, _ = Measure(Limit(Synthetic(r.seed, r.conversations), r.requests)) }
	measure()
	for chosen && r.size.Requests < r.requests && r.conversations < conversationsLimit {
		r.conversations = min(r.conversations*17/16, conversationsLimit)
		measure()
	}
	src := Limit(Synthetic(r.seed, r.conversations), r.requests)
	fresh := int64(r.conversations*synthOwnBlocks + synthPrompts*(synthPromptMin+synthPromptMax)/2)
	r.note("synthetic chat, seed %d: %s, %s, a working set of about %s blocks = %s", r.seed,
		plural(int64(r.conversations), "conversation"), plural(int64(r.size.Requests), "request"), commas(fresh), humanBytes(fresh*int64(r.blockBytes)))
	if r.size.Requests < r.requests {
		r.note("that is all there is of the %s that --requests asks for; --conversations makes more, %d at most", commas(int64(r.requests)), conversationsLimit)
	}
	if fresh < primaryBlocks {
		r.note("that fits into the primary of %s blocks: expect no hits from below (--conversations makes it larger)", commas(primaryBlocks))
	}
	return src
}

// progress shows look until the returned function is called.
func (r *replay) progress(look func() snapshot) (stop func()) {
	if r.quiet {
		return func() {}
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { showProgress(ctx, r.err, r.tty, look) })
	return func() {
		cancel()
		wg.Wait()
	}
}

// result is the part of a result that every run has.
func (r *replay) result(info Info, mode string) *Result {
	out := &Result{Trace: info.Name, Format: info.Format, Mode: mode, BlockBytes: int64(r.blockBytes), TiersKnown: true, Tiers: []TierResult{}}
	if r.synthetic {
		out.Seed, out.Conversations = &r.seed, r.conversations
	}
	return out
}

func (r *replay) runDry(ctx context.Context, s Source) error {
	t, err := load(s)
	if err != nil {
		return err
	}
	var todo []dryOptions
	for _, p := range r.policy {
		for _, n := range r.capacity {
			o := dryOptions{policy: p, capacity: n}
			switch {
			case r.fs.none:
			case r.fs.bytes == 0:
				o.below = -1
			default:
				o.below = max(1, r.fs.bytes/int64(r.blockBytes))
			}
			todo = append(todo, o)
		}
	}
	if largest := int64(t.size.Largest); largest > slices.Min(r.capacity) {
		r.note("the largest request has %s blocks and does not fit into every capacity: stores of it are refused there", commas(largest))
	}
	var done atomic.Int64
	start := time.Now()
	stop := r.progress(func() snapshot {
		return snapshot{requests: done.Load(), total: int64(t.size.Requests * len(todo)), elapsed: time.Since(start)}
	})
	points, counts, err := sweep(ctx, t, todo, &done)
	stop()
	interrupted := err != nil && ctx.Err() != nil
	if err != nil && !interrupted {
		return err
	}
	last := len(points) - 1
	res := r.result(t.info, ModeDry)
	res.Interrupted = interrupted
	res.Policy, res.PrimaryBytes = points[last].Policy, points[last].CapacityBlocks*int64(r.blockBytes)
	res.DurationSeconds = time.Since(start).Seconds()
	res.Curves = points
	for i := range points {
		points[i].Complete = counts[i].requests == int64(t.size.Requests)
	}
	res.dryPoint(&points[last], &counts[last], !r.fs.none)
	if r.json {
		err = res.writeJSON(r.out)
	} else {
		if last == 0 {
			err = res.writeTable(r.out)
		} else {
			err = writeCurves(r.out, points, int64(r.blockBytes))
		}
	}
	if err == nil && interrupted {
		err = ErrInterrupted
	}
	return err
}

// dryPoint fills in what one dry run counted.
func (res *Result) dryPoint(p *Point, c *dryCounts, below bool) {
	res.Engines = 1
	res.Requests, res.References = c.requests, p.References
	res.PrefixHits, res.PrefixHitRatio = p.PrefixHits, p.ratio()
	res.LoadedBlocks, res.StoredBlocks = p.PrefixHits, c.stored
	res.Refusals, res.Evictions = p.Refusals, c.evicted
	res.Tiers = append(res.Tiers, TierResult{
		Name: "primary", Hits: p.PrefixHits - c.promoted,
		ReadBytes: (p.PrefixHits - c.promoted) * res.BlockBytes, WriteBytes: c.stored * res.BlockBytes,
		Blocks: c.blocks, UsedBytes: c.blocks * res.BlockBytes,
	})
	if below {
		n := int64(len(c.secondary.at))
		res.Tiers = append(res.Tiers, TierResult{
			Name: "fs", Hits: c.promoted, ReadBytes: c.promoted * res.BlockBytes, WriteBytes: c.cascaded * res.BlockBytes,
			Blocks: n, UsedBytes: n * res.BlockBytes,
		})
	}
}

// namespace is what replay's blocks belong to.
func namespace(tokensPerBlock int, blockBytes int64) (*block.Namespace, error) {
	return block.NewNamespace(block.Spec{
		Model: "terrace-replay", DType: "bytes", Layout: "content-v1",
		Groups:        []block.Group{{Kind: block.KindFull, TokensPerBlock: uint32(tokensPerBlock), BlockBytes: uint64(blockBytes)}},
		HashAlgorithm: "sha256", HashLength: block.HashSize,
	})
}

// runBytes replays against a node. src is nil for a synthetic trace, which is
// made once the size of the node's primary is known.
func (r *replay) runBytes(ctx context.Context, src Source) (err error) {
	tokens := synthTokensPerBlock
	if src != nil {
		tokens = src.Info().TokensPerBlock
	}
	ns, err := namespace(tokens, int64(r.blockBytes))
	if err != nil {
		return err
	}
	var (
		engines []engine
		sockets []string
		stops   []func() error
	)
	defer func() {
		var errs []error
		for _, e := range engines {
			errs = append(errs, e.Close())
		}
		for _, stop := range stops {
			errs = append(errs, stop())
		}
		for _, p := range r.proxies {
			p.Close()
		}
		// What the run itself says goes first.
		if cerr := errors.Join(errs...); err == nil {
			err = cerr
		}
	}()
	if r.peerFaults != "" {
		r.note("faults between nodes, seed %d: %s", r.seed, r.faults)
		for i := range r.peers {
			p, err := netfault.Listen("127.0.0.1:0", r.faults, r.seed+uint64(i)<<32)
			if err != nil {
				return err
			}
			r.proxies = append(r.proxies, p)
		}
	}
	for i := range r.peers {
		e, socket, stop, err := r.node(ctx, ns, i)
		if err != nil {
			return err
		}
		engines, sockets = append(engines, e), append(sockets, socket)
		if stop != nil {
			stops = append(stops, stop)
		}
	}
	before, peers, err := statuses(ctx, engines[:r.peers])
	if err != nil {
		return err
	}
	for i, p := range r.proxies {
		p.Set(func(s *netfault.State) { s.To = peers[i].Listen })
	}
	if src == nil {
		src = r.makeTrace(before.Primary.CapacityBytes / int64(r.blockBytes))
	}
	for i := r.peers; i < r.engines; i++ {
		e, err := r.deps.dial(ctx, sockets[i%r.peers], ns, engineName(i))
		if err != nil {
			return fmt.Errorf("engine %d: %w", i, err)
		}
		engines = append(engines, e)
	}
	d := &driver{
		src: src, identity: src.Info().Identity, ns: ns, engines: engines, speed: r.speed, waitCascade: r.waitCascade,
		blockBytes: int(r.blockBytes), tokens: int64(tokens), total: int64(r.size.Requests), start: time.Now(),
		fault: func(s string) { r.note("%s", s) },
	}
	if r.peers > 1 {
		d.directory = &directory{had: map[block.Key]uint16{}}
		for _, p := range peers {
			d.directory.addrs = append(d.directory.addrs, p.Advertise)
		}
	}
	stopProgress := r.progress(d.look)
	tally, runErr := d.run(ctx)
	elapsed := time.Since(d.start)
	stopProgress()

	res := r.result(src.Info(), ModeBytes)
	res.Node, res.OwnNode, res.Engines, res.PrimaryBytes = sockets[0], len(stops) > 0, r.engines, before.Primary.CapacityBytes
	res.Nodes = r.peers
	if r.peerFaults != "" {
		res.PeerFaults = &PeerFaults{Faults: r.faults.String(), Seed: r.seed}
		for _, p := range r.proxies {
			res.PeerFaults.Add(p.Counts())
		}
	}
	res.Interrupted = ctx.Err() != nil
	if res.OwnNode {
		res.Policy = r.policy[0]
	}
	d.fill(res, tally, elapsed)
	after, _, err := statuses(context.WithoutCancel(ctx), engines[:r.peers])
	if err == nil && after.BootID != before.BootID {
		err = errors.New("the node was started anew in mid-run, and counts from 0")
	}
	if err == nil {
		res.fillTiers(before, after)
		res.Shared = r.peers == 1 && (after.Lookups.Calls-before.Lookups.Calls > d.totals.lookups.Load() ||
			runErr == nil && after.Stores.Committed-before.Stores.Committed > res.StoredBlocks)
	} else {
		// The node is gone or mute; what engines saw is still worth telling,
		// what only the node counts is not known.
		res.TiersKnown, res.Tiers = false, []TierResult{}
		runErr = errors.Join(runErr, err)
	}
	if res.Corrupt > 0 {
		runErr = errors.Join(fmt.Errorf("%w: %d of %d loaded", ErrCorrupt, res.Corrupt, res.LoadedBlocks), runErr)
	}
	if runErr != nil {
		res.Error = runErr.Error()
	}
	if n := d.totals.unflushed.Load(); n > 0 {
		r.note("%s had cascades under way when the wait for them was over", plural(n, "request"))
	}
	if r.json {
		err = res.writeJSON(r.out)
	} else {
		err = res.writeTable(r.out)
	}
	switch {
	case runErr != nil:
		err = runErr
	case err == nil && res.Interrupted:
		err = ErrInterrupted
	}
	return err
}

func engineName(i int) string { return fmt.Sprintf("replay-%d", i) }

// node finds the node to use, or starts one: that of an index, if there are
// several. stop is nil for one that runs already; else it ends the node and
// removes what it left.
func (r *replay) node(ctx context.Context, ns *block.Namespace, index int) (_ engine, socket string, stop func() error, err error) {
	if !r.ownNode {
		socket = r.socket
		if socket == "" {
			if socket, err = r.deps.DefaultSocket(); err != nil {
				return nil, "", nil, err
			}
		}
		e, err := r.deps.dial(ctx, socket, ns, engineName(0))
		if err == nil {
			r.note("using the node that serves on %s", socket)
			return e, socket, nil, nil
		}
		// Only where nobody serves does replay start a node of its own: any
		// other failure is one of a node that the user means.
		if r.socket != "" || !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ECONNREFUSED) {
			return nil, "", nil, fmt.Errorf("node at %s: %w", socket, err)
		}
		if err := errors.Join(r.checkOwnNode()...); err != nil {
			return nil, "", nil, fmt.Errorf("%w: %w", ErrFlags, err)
		}
	}
	dir, err := os.MkdirTemp("", "terrace-replay-")
	if err != nil {
		return nil, "", nil, fmt.Errorf("make a directory for the node: %w", err)
	}
	undo := func(err error) (engine, string, func() error, error) {
		return nil, "", nil, errors.Join(err, os.RemoveAll(dir))
	}
	o := NodeOptions{Dir: dir, PrimaryBytes: int64(r.primary), FSBytes: r.fs.bytes, Policy: r.policy[0], Peers: r.peers > 1}
	if r.peerFaults != "" {
		o.Advertise, o.PeerTimeout = r.proxies[index].Addr(), faultyPeerTimeout
	}
	where := "no tier below"
	if !r.fs.none {
		o.FSRoot = r.fs.dir
		if o.FSRoot == "" {
			o.FSRoot = filepath.Join(dir, "fs")
		} else if r.peers > 1 {
			o.FSRoot = filepath.Join(o.FSRoot, fmt.Sprintf("node-%d", index))
		}
		size := "unbounded"
		if o.FSBytes > 0 {
			size = "up to " + humanBytes(o.FSBytes)
		}
		where = fmt.Sprintf("fs %s in %s", size, o.FSRoot)
	}
	r.note("starting a node: primary %s, %s, blocks of %s", humanBytes(o.PrimaryBytes), where, humanBytes(int64(r.blockBytes)))
	socket, stopNode, err := r.deps.StartNode(ctx, o)
	if err != nil {
		return undo(fmt.Errorf("start a node: %w", err))
	}
	stop = func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer cancel()
		err := stopNode(ctx)
		if err != nil {
			err = fmt.Errorf("stop the node: %w", err)
		}
		return errors.Join(err, os.RemoveAll(dir))
	}
	e, err := r.deps.dial(ctx, socket, ns, engineName(index))
	if err != nil {
		return nil, "", nil, errors.Join(fmt.Errorf("node at %s: %w", socket, err), stop())
	}
	return e, socket, stop, nil
}

// fill takes over what the engines counted.
func (d *driver) fill(res *Result, t *tally, elapsed time.Duration) {
	n := &d.totals
	res.Requests, res.References = n.requests.Load(), n.references.Load()
	res.PrefixHits = n.hits.Load()
	res.PrefixHitRatio = ratio(res.PrefixHits, res.References)
	res.LoadedBlocks, res.StoredBlocks = n.loaded.Load(), n.stored.Load()
	res.Corrupt, res.Refusals, res.Dropped = n.corrupt.Load(), n.refusals.Load(), n.dropped.Load()
	res.DurationSeconds = elapsed.Seconds()
	res.Latency = Latency{
		LookupP50us: t.lookup.us(0.5), LookupP99us: t.lookup.us(0.99),
		ReadyP50us: t.ready.us(0.5), ReadyP99us: t.ready.us(0.99),
	}
	res.Tiers = []TierResult{{
		Name: "primary", Hits: n.primaryHits.Load(), WriteBytes: res.StoredBlocks * res.BlockBytes,
	}}
	res.Verdicts = map[string]int64{}
	for v, n := range t.verdicts {
		if n > 0 {
			res.Verdicts[core.Verdict(v).String()] = n
		}
	}
}
