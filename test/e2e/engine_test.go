package e2e

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/rpc"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/client"
	"github.com/terrace-kv/terrace/internal/content"
)

const blockBytes = 64 << 10

// spec is the namespace of the tests' engines.
func spec(bytes int) block.Spec {
	return block.Spec{Model: "e2e", DType: "bytes", Layout: "content-v1", HashAlgorithm: "sha256", HashLength: block.HashSize,
		Groups: []block.Group{{Kind: block.KindFull, TokensPerBlock: 16, BlockBytes: uint64(bytes)}}}
}

// Span names Count blocks that follow each other. Equal name and number mean
// the same block.
type Span struct {
	Name         string
	First, Count int
}

// Prompt is the blocks of a prompt, root first.
type Prompt []Span

func (p Prompt) keys() (keys []block.Key) {
	for _, s := range p {
		for i := range s.Count {
			hash := sha256.Sum256(fmt.Appendf(nil, "%s %d", s.Name, s.First+i))
			k, _ := block.NewKey(hash[:], 0) // of the right length
			keys = append(keys, k)
		}
	}
	return keys
}

// engineArgs are given to an engine at its start, in the environment.
type engineArgs struct {
	Socket, Name string
	BlockBytes   int
	Spec         *block.Spec // instead of BlockBytes
}

const engineEnv = "E2E_ENGINE"

// Engine is the engine's process: the test calls its methods.
type Engine struct {
	args   engineArgs
	c      *client.Client
	fp     block.Fingerprint
	tokens int64 // of a block
	ids    atomic.Int64

	mu      sync.Mutex
	held    map[string]*held
	report  Report
	stop    context.CancelFunc // of the load
	workers []*exec.Cmd
}

// held is a request that the test left open.
type held struct {
	req    *client.Request
	keys   []block.Key
	answer client.Answer
	grants []client.Grant
}

// Report is what an engine has done so far.
type Report struct {
	Ops, Hits, Loaded, Corrupt, Stored, Refused int
	Lost                                        int // sessions lost
	LongestMS                                   int // the longest request, its flush apart
	Broken                                      []string
	Errors                                      []string      // what should not have happened
	Acked                                       map[int][]int // by conversation: blocks of its own that a flush has acknowledged
}

func engineMain() {
	e := &Engine{held: map[string]*held{}}
	e.report.Acked = map[int][]int{}
	if err := json.Unmarshal([]byte(os.Getenv(engineEnv)), &e.args); err != nil {
		fatal(err)
	}
	s := spec(e.args.BlockBytes)
	if e.args.Spec != nil {
		s = *e.args.Spec
	}
	ns, err := block.NewNamespace(s)
	if err != nil {
		fatal(err)
	}
	e.fp, e.tokens = ns.Fingerprint(), int64(s.Groups[0].TokensPerBlock)
	server := rpc.NewServer()
	if err := server.Register(e); err != nil {
		fatal(err)
	}
	server.ServeConn(struct {
		io.Reader
		io.WriteCloser
	}{os.Stdin, os.Stdout})
	os.Exit(0) // the test has ended, or wants this engine to be gone without a goodbye
}

// None is no argument or reply.
type None struct{ Nothing bool }

// Dial greets the node.
func (e *Engine) Dial(within time.Duration, info *client.Info) (err error) {
	s := spec(e.args.BlockBytes)
	if e.args.Spec != nil {
		s = *e.args.Spec
	}
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	if e.c, err = client.Dial(ctx, client.Options{Socket: e.args.Socket, Spec: s, Engine: e.args.Name, VerifyOnLoad: true, ReconnectMax: 100 * time.Millisecond}); err != nil {
		return named(err)
	}
	*info, err = e.c.Info()
	return named(err)
}

// named makes an error that survives the way to the test: sentinels are told
// by a prefix.
func named(err error) error {
	for _, s := range []struct {
		err  error
		name string
	}{
		{client.ErrSessionLost, "session_lost"}, {client.ErrNoRoom, "no_room"}, {client.ErrDraining, "draining"}, {client.ErrTooMany, "too_many"},
		{client.ErrNamespace, "namespace"}, {context.DeadlineExceeded, "deadline"},
	} {
		if errors.Is(err, s.err) {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return err
}

// WaitReady waits for a session.
func (e *Engine) WaitReady(within time.Duration, info *client.Info) error {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	if err := e.c.WaitReady(ctx); err != nil {
		return named(err)
	}
	i, err := e.c.Info()
	*info = i
	return named(err)
}

// Ask is a prompt under an id.
type Ask struct {
	ID       string
	Prompt   Prompt
	Wait     time.Duration // of the lookup
	Flush    time.Duration
	LoadOnly bool
}

// Answer is what became of an Ask.
type Answer struct {
	Hits     int // blocks that were loaded and right
	Corrupt  []string
	Verdicts []client.Verdict
	Stored   client.Stored
	Flushed  client.Flushed
	Fresh    []int // indexes of the blocks that this call has stored
	Took     time.Duration
}

// Do is the whole life of a prompt: lookup, load and check every byte, store
// the rest, flush, finish.
func (e *Engine) Do(a Ask, out *Answer) error {
	ctx := context.Background()
	return named(e.do(ctx, &a, out))
}

func (e *Engine) do(ctx context.Context, a *Ask, out *Answer) (err error) {
	begin := time.Now()
	keys := a.Prompt.keys()
	q, err := e.c.NewRequest(ctx, a.ID, client.NoLimits())
	if err != nil {
		return fmt.Errorf("new request: %w", err)
	}
	defer func() {
		if ferr := q.Finish(ctx); err == nil && ferr != nil {
			err = fmt.Errorf("finish: %w", ferr)
		}
	}()
	got, err := q.Lookup(ctx, [][]block.Key{keys}, client.LookupOptions{Wait: a.Wait})
	if err != nil {
		return fmt.Errorf("lookup: %w", err)
	}
	out.Verdicts = got.Groups[0].Verdicts
	if err := e.load(got, keys, out); err != nil {
		return fmt.Errorf("load: %w", err)
	}
	if !a.LoadOnly && out.Hits < len(keys) {
		out.Stored, err = q.Store(ctx, 0, out.Hits, keys[out.Hits:], func(i int, dst []byte) (uint64, error) {
			out.Fresh = append(out.Fresh, out.Hits+i)
			content.Fill(e.fp, keys[out.Hits+i], dst)
			return client.Sum(dst), nil
		})
		if err != nil {
			return fmt.Errorf("store: %w", err)
		}
	}
	out.Took = time.Since(begin)
	if a.Flush > 0 {
		if out.Flushed, err = q.Flush(ctx, a.Flush); err != nil {
			return fmt.Errorf("flush: %w", err)
		}
	}
	return nil
}

// load reads what has been leased of the usable prefix, and checks each byte.
func (e *Engine) load(got *client.Answer, keys []block.Key, out *Answer) error {
	buf := make([]byte, e.args.BlockBytes)
	for ; int64(out.Hits)*e.tokens < got.Tokens; out.Hits++ {
		lease, ok := got.Lease(0, out.Hits)
		if !ok {
			break
		}
		err := e.c.ReadInto(lease, buf)
		if errors.Is(err, client.ErrCorrupt) {
			out.Corrupt = append(out.Corrupt, err.Error())
		} else if err != nil {
			return err
		}
		if at := content.Check(e.fp, keys[out.Hits], buf); at >= 0 {
			out.Corrupt = append(out.Corrupt, fmt.Sprintf("block %d, key %s, slot %d generation %d: byte %d is wrong", out.Hits, keys[out.Hits], lease.Slot, lease.Gen, at))
		}
	}
	return nil
}

// Hold looks a prompt up and keeps the leases.
func (e *Engine) Hold(a Ask, out *Answer) error {
	h, err := e.open(&a)
	if err != nil {
		return named(err)
	}
	got, err := h.req.Lookup(context.Background(), [][]block.Key{h.keys}, client.LookupOptions{Wait: a.Wait})
	if err != nil {
		return named(err)
	}
	h.answer = *got
	out.Verdicts = got.Groups[0].Verdicts
	return named(e.load(got, h.keys, out))
}

func (e *Engine) open(a *Ask) (*held, error) {
	q, err := e.c.NewRequest(context.Background(), a.ID, client.NoLimits())
	if err != nil {
		return nil, err
	}
	h := &held{req: q, keys: a.Prompt.keys()}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.held[a.ID] = h
	return h, nil
}

func (e *Engine) find(id string) *held {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.held[id]
}

// Half reserves a prompt's blocks, writes the first half of each, and leaves
// it at that. It answers how many were granted.
func (e *Engine) Half(a Ask, granted *int) error {
	h, err := e.open(&a)
	if err != nil {
		return named(err)
	}
	if h.grants, err = h.req.Reserve(context.Background(), 0, 0, h.keys); err != nil {
		return named(err)
	}
	for i, g := range h.grants {
		if g.Status != client.Granted {
			continue
		}
		*granted++
		if err := e.c.Write(g, func(dst []byte) error {
			content.Fill(e.fp, h.keys[i], dst[:len(dst)/2])
			return nil
		}); err != nil {
			return named(err)
		}
	}
	return nil
}

// Complete writes and commits what Half has begun.
func (e *Engine) Complete(id string, statuses *[]client.FillStatus) error {
	h := e.find(id)
	var fills []client.Fill
	for i, g := range h.grants {
		if g.Status != client.Granted {
			continue
		}
		var sum uint64
		if err := e.c.Write(g, func(dst []byte) error {
			content.Fill(e.fp, h.keys[i], dst)
			sum = client.Sum(dst)
			return nil
		}); err != nil {
			return named(err)
		}
		fills = append(fills, g.Fill(sum))
	}
	out, err := h.req.Commit(context.Background(), fills)
	*statuses = out
	return named(err)
}

// Finish ends a held request.
func (e *Engine) Finish(id string, _ *None) error {
	e.mu.Lock()
	h := e.held[id]
	delete(e.held, id)
	e.mu.Unlock()
	return named(h.req.Finish(context.Background()))
}

// Reset clears the primary.
func (e *Engine) Reset(wait time.Duration, done *bool) (err error) {
	*done, err = e.c.Reset(context.Background(), wait)
	return named(err)
}

// Ping asks the node for an answer, and tells how long it took.
func (e *Engine) Ping(_ None, took *time.Duration) error {
	begin := time.Now()
	err := e.c.Ping(context.Background())
	*took = time.Since(begin)
	return named(err)
}

// Close says goodbye.
func (e *Engine) Close(_ None, _ *None) error { return e.c.Close() }

// Load is a stream of prompts: conversations whose beginnings are shared by
// families, in a random order.
type Load struct {
	Prefix        string // engines of one prefix share their prompts
	Seed          uint64
	Conversations int
	Turn          int // blocks of a conversation's own at most
	Parallel      int // requests at a time
	Ops           int // ends after so many; 0: by Stop
	Flush         bool
	Reconnect     bool // go on after a lost session
}

// shared is how many blocks the conversations of a family begin with.
const shared, families = 6, 5

// prompt is a conversation's, with so many blocks of its own.
func (l *Load) prompt(conversation, own int) Prompt {
	return Prompt{{Name: fmt.Sprintf("%s family %d", l.Prefix, conversation%families), Count: shared}, {Name: fmt.Sprintf("%s own %d", l.Prefix, conversation), Count: own}}
}

// Run carries out a load, until Stop or, without Reconnect, the end of the
// session.
func (e *Engine) Run(l Load, out *Report) error {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	e.mu.Lock()
	e.stop = stop
	e.mu.Unlock()
	var wg sync.WaitGroup
	var dealt atomic.Int64
	for i := range max(1, l.Parallel) {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(l.Seed, uint64(i)))
			for ctx.Err() == nil && (l.Ops == 0 || dealt.Add(1) <= int64(l.Ops)) {
				if !e.op(ctx, &l, rng) {
					stop()
				}
			}
		})
	}
	wg.Wait()
	return e.Progress(None{}, out)
}

// op is one request of a load. It answers false when the load is over.
func (e *Engine) op(ctx context.Context, l *Load, rng *rand.Rand) bool {
	conversation, own := rng.IntN(l.Conversations), 1+rng.IntN(max(1, l.Turn))
	ask := Ask{ID: fmt.Sprintf("load-%d", e.ids.Add(1)), Prompt: l.prompt(conversation, own), Wait: 20 * time.Second}
	if l.Flush {
		ask.Flush = time.Minute
	}
	var got Answer
	err := e.do(context.WithoutCancel(ctx), &ask, &got)
	e.mu.Lock()
	defer e.mu.Unlock()
	r := &e.report
	r.Ops++
	r.Loaded += got.Hits
	r.Hits += got.Hits
	r.Corrupt += len(got.Corrupt)
	if len(r.Broken) < 10 {
		r.Broken = append(r.Broken, got.Corrupt...)
	}
	r.Stored += got.Stored.Stored
	r.LongestMS = max(r.LongestMS, int(got.Took.Milliseconds()))
	switch {
	case err == nil:
		if got.Flushed.Done && got.Flushed.Failed == 0 && got.Flushed.Cascaded == len(got.Fresh) && got.Stored.Dropped == 0 {
			for _, i := range got.Fresh {
				if i >= shared {
					r.Acked[conversation] = append(r.Acked[conversation], i-shared)
				}
			}
		}
	case errors.Is(err, client.ErrNoRoom):
		r.Refused++
	case errors.Is(err, client.ErrSessionLost) || errors.Is(err, client.ErrDraining):
		r.Lost++
		if !l.Reconnect {
			return false
		}
		e.mu.Unlock()
		werr := e.c.WaitReady(ctx)
		e.mu.Lock()
		return werr == nil
	default:
		if len(r.Errors) < 10 {
			r.Errors = append(r.Errors, err.Error())
		}
	}
	return true
}

// Progress tells what has been done so far.
func (e *Engine) Progress(_ None, out *Report) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	*out = e.report
	out.Acked = map[int][]int{}
	for c, list := range e.report.Acked {
		out.Acked[c] = append([]int(nil), list...)
	}
	return nil
}

// Stop ends a load; requests under way are finished first.
func (e *Engine) Stop(_ None, _ *None) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.stop != nil {
		e.stop()
	}
	return nil
}

// workerArgs are given to a worker at its start.
type workerArgs struct {
	Attach bool // with the token; else by inheritance
	Socket string
	Token  client.Token
	Region client.RegionInfo
	Grant  client.Grant // of a slot that it writes, over and over
}

const workerEnv = "E2E_WORKER"

// WorkerOf says which kind of worker to start for a held request's first
// grant.
type WorkerOf struct {
	ID     string
	Attach bool
}

// Worker starts a worker process that writes the slot of a grant over and
// over, and answers its process id when it has mapped the region. It outlives
// the engine, so it has none of the engine's pipes but for its first word.
func (e *Engine) Worker(w WorkerOf, pid *int) error {
	info, err := e.c.Info()
	if err != nil {
		return err
	}
	a := workerArgs{Attach: w.Attach, Socket: e.args.Socket, Token: info.Token, Region: info.RegionInfo, Grant: e.find(w.ID).grants[0]}
	text, err := json.Marshal(a)
	if err != nil {
		return err
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), roleEnv+"=worker", workerEnv+"="+string(text))
	cmd.ExtraFiles = []*os.File{os.NewFile(lifelineFD, "lifeline")}
	if !w.Attach {
		f, err := e.c.File()
		if err != nil {
			return err
		}
		defer f.Close()
		cmd.ExtraFiles = append(cmd.ExtraFiles, f)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	e.workers = append(e.workers, cmd)
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "mapped\n" {
		return fmt.Errorf("the worker says %q, %v", line, err)
	}
	*pid = cmd.Process.Pid
	return nil
}

// lifelineFD is the reading end of a pipe whose other end the test has, in
// engines and in workers.
const lifelineFD = 3

func workerMain() {
	go func() {
		_, _ = os.NewFile(lifelineFD, "lifeline").Read(make([]byte, 1))
		os.Exit(0)
	}()
	var a workerArgs
	if err := json.Unmarshal([]byte(os.Getenv(workerEnv)), &a); err != nil {
		fatal(err)
	}
	var region *client.Region
	if a.Attach {
		w, err := client.AttachWorker(context.Background(), a.Socket, a.Token, false)
		if err != nil {
			fatal(err)
		}
		region = w.Region
	} else {
		f := os.NewFile(lifelineFD+1, "region")
		var err error
		if region, err = client.MapInherited(f, a.Region, false); err != nil {
			fatal(err)
		}
		f.Close() // now there is only the mapping
	}
	fmt.Println("mapped")
	for i := byte(0); ; i++ {
		err := region.Write(a.Grant, func(dst []byte) error {
			for j := range dst {
				dst[j] = i
			}
			return nil
		})
		if errors.Is(err, client.ErrSessionLost) {
			select {} // it has unmapped; the test looks and ends us
		}
		if err != nil {
			fatal(err)
		}
		time.Sleep(time.Millisecond) // leave the cores to others
	}
}

// engine is the test's end of an engine.
type engine struct {
	*process
	rpc      *rpc.Client
	lifeline *os.File
	out      *os.File // what it answers
	args     engineArgs
	load     *rpc.Call
}

// engine starts one, which has a session when this returns.
func (n *node) engine(name string) *engine {
	n.t.Helper()
	return n.engineOf(engineArgs{Name: name, BlockBytes: blockBytes})
}

func (n *node) engineOf(a engineArgs) *engine {
	n.t.Helper()
	a.Socket = n.socket
	e := newEngine(n.t, a)
	e.must("Dial", 20*time.Second, &client.Info{})
	return e
}

// newEngine starts an engine that has not yet greeted.
func newEngine(t *testing.T, a engineArgs) *engine {
	t.Helper()
	text, err := json.Marshal(a)
	if err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), roleEnv+"=engine", engineEnv+"="+string(text))
	cmd.ExtraFiles = []*os.File{r}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	outR, outW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout = outW
	e := &engine{lifeline: w, out: outR, args: a}
	e.process = launch(t, "engine "+a.Name, cmd)
	r.Close()
	outW.Close()
	e.rpc = rpc.NewClient(struct {
		io.Reader
		io.WriteCloser
	}{outR, in})
	t.Cleanup(e.release)
	return e
}

// release ends the process if need be, and gives back what the test has of it.
func (e *engine) release() {
	e.kill()
	e.rpc.Close()
	e.out.Close()
	e.lifeline.Close()
}

// call calls a method of the engine.
func (e *engine) call(method string, args, reply any) error {
	e.t.Helper()
	c := e.rpc.Go("Engine."+method, args, reply, make(chan *rpc.Call, 1))
	return e.wait(c, 3*time.Minute)
}

func (e *engine) wait(c *rpc.Call, within time.Duration) error {
	e.t.Helper()
	select {
	case <-c.Done:
		return c.Error
	case <-time.After(within):
		e.t.Fatalf("engine %s does not answer %s in %v", e.args.Name, c.ServiceMethod, within)
		return nil
	}
}

func (e *engine) must(method string, args, reply any) {
	e.t.Helper()
	if err := e.call(method, args, reply); err != nil {
		e.t.Fatalf("engine %s, %s: %v", e.args.Name, method, err)
	}
}

// do is Engine.Do; nothing may be corrupt.
func (e *engine) do(a Ask) (out Answer) {
	e.t.Helper()
	if a.Wait == 0 {
		a.Wait = 20 * time.Second
	}
	e.must("Do", a, &out)
	for _, c := range out.Corrupt {
		e.t.Errorf("engine %s, request %s: corrupt: %s", e.args.Name, a.ID, c)
	}
	return out
}

// store stores a prompt and waits until it is in the tiers.
func (e *engine) store(id string, p Prompt) Answer {
	e.t.Helper()
	out := e.do(Ask{ID: id, Prompt: p, Flush: time.Minute})
	if !out.Flushed.Done || out.Flushed.Failed > 0 {
		e.t.Fatalf("engine %s, request %s: flushed %+v, stored %+v", e.args.Name, id, out.Flushed, out.Stored)
	}
	return out
}

// start begins a load, which the end of finish or of the session ends.
func (e *engine) start(l Load) {
	e.load = e.rpc.Go("Engine.Run", l, new(Report), make(chan *rpc.Call, 1))
}

func (e *engine) progress() (r Report) {
	e.t.Helper()
	e.must("Progress", None{}, &r)
	return r
}

// after waits until the load has done so many more requests.
func (e *engine) after(ops int) {
	e.t.Helper()
	want := e.progress().Ops + ops
	eventually(e.t, bound(), fmt.Sprintf("load of engine %s", e.args.Name), func() error {
		if r := e.progress(); r.Ops < want {
			return fmt.Errorf("%d requests of %d; %v", r.Ops, want, r.Errors)
		}
		return nil
	})
}

// ended waits for the load's own end, and checks what it reports.
func (e *engine) ended() *Report {
	e.t.Helper()
	within := 2 * time.Minute
	if soak {
		within = 15 * time.Minute
	}
	if err := e.wait(e.load, within); err != nil {
		e.t.Fatalf("engine %s: %v", e.args.Name, err)
	}
	r := e.load.Reply.(*Report)
	if r.Corrupt > 0 || len(r.Errors) > 0 {
		e.t.Errorf("engine %s: %d corrupt blocks %v, errors %v", e.args.Name, r.Corrupt, r.Broken, r.Errors)
	}
	e.t.Logf("engine %s: %d requests, %d hits, %d stored, %d refused, %d sessions lost, longest request %d ms", e.args.Name, r.Ops, r.Hits, r.Stored, r.Refused, r.Lost, r.LongestMS)
	return r
}

// finish ends the load.
func (e *engine) finish() *Report {
	e.t.Helper()
	e.must("Stop", None{}, &None{})
	return e.ended()
}

// goodbye ends the session in order, and the process.
func (e *engine) goodbye() {
	e.t.Helper()
	e.must("Close", None{}, &None{})
	e.kill()
}

// reset clears the node's primary, so that what is hit next comes from below.
func (e *engine) reset() {
	e.t.Helper()
	eventually(e.t, bound(), "reset", func() error {
		var done bool
		if err := e.call("Reset", 10*time.Second, &done); err != nil {
			return err
		}
		if !done {
			return errors.New("input or output is still in flight")
		}
		return nil
	})
}

// checkRoot has every block file of the root read and checked through the
// node, by an engine of its namespace. It answers how many there are.
func checkRoot(t *testing.T, n *node) (blocks int) {
	t.Helper()
	dirs, err := filepath.Glob(filepath.Join(n.root, strings.Repeat("[0-9a-f]", 64)))
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range dirs {
		paths, err := filepath.Glob(filepath.Join(dir, "??", strings.Repeat("?", 72)))
		if err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(filepath.Join(dir, "namespace.json"))
		if os.IsNotExist(err) && len(paths) == 0 {
			continue // the node was killed before it had written it
		}
		if err != nil {
			t.Fatal(err)
		}
		ns, err := block.ParseNamespace(text)
		if err != nil {
			t.Fatal(err)
		}
		if ns.Fingerprint().String() != filepath.Base(dir) {
			t.Errorf("%s is not the folder of its namespace", dir)
		}
		blocks += len(paths)
		bytes := int(ns.Spec().Groups[0].BlockBytes)
		ctx := withTimeout(t, 3*time.Minute)
		c, err := client.Dial(ctx, client.Options{Socket: n.socket, Spec: ns.Spec(), Engine: "check", VerifyOnLoad: true})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Reset(ctx, 10*time.Second); err != nil {
			t.Fatal(err)
		}
		e := &Engine{args: engineArgs{BlockBytes: bytes}, c: c, fp: ns.Fingerprint(), tokens: int64(ns.Spec().Groups[0].TokensPerBlock)}
		batch := int(n.status().Primary.CapacityBytes/2) / max(bytes, 4096) // so that there is room for all of one
		for i := 0; i < len(paths); i += batch {
			part := paths[i:min(i+batch, len(paths))]
			var keys []block.Key
			for _, p := range part {
				k, err := block.ParseKey(filepath.Base(p))
				if err != nil {
					t.Fatal(err)
				}
				keys = append(keys, k)
			}
			q, err := c.NewRequest(ctx, fmt.Sprint("check-", i), client.NoLimits())
			if err != nil {
				t.Fatal(err)
			}
			a, err := q.Lookup(ctx, [][]block.Key{keys}, client.LookupOptions{Wait: 20 * time.Second})
			if err != nil {
				t.Fatal(err)
			}
			var out Answer
			if err := e.load(a, keys, &out); err != nil {
				t.Fatal(err)
			}
			if out.Hits != len(keys) || len(out.Corrupt) > 0 {
				t.Errorf("%d of %d files are hits: verdicts %v, corrupt %v; first %s", out.Hits, len(keys), a.Groups[0].Verdicts, out.Corrupt, part[0])
			}
			if err := q.Finish(ctx); err != nil {
				t.Fatal(err)
			}
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return blocks
}
