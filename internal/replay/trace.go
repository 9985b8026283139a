package replay

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/terrace-kv/terrace/block"
)

// Limits on what a trace may say. They are far above what the public traces
// need (2.7 KB a line, 13,757 blocks a request) and bound what a malformed one
// can take.
const (
	lineBytesMax = 4 << 20 // one line, decompressed
	blocksMax    = 1 << 17 // full blocks of one request; also what one lookup may carry
	idMax        = 1 << 62
	timeMSMax    = 9e12     // milliseconds; fits a Duration
	tokensMax    = 1 << 40  // of one prompt
	identityPeek = 64 << 10 // bytes of a trace that identify it
)

// Run is Count block ids that follow each other, beginning with First.
type Run struct {
	First uint64
	Count uint32
}

// Request is one prompt of a trace.
type Request struct {
	Time         time.Duration // when it arrived, from the trace's own zero
	InputTokens  int64
	OutputTokens int64
	Runs         []Run // ids of its full blocks, in prefix order; no id twice
	Blocks       int   // sum of the runs' counts
}

// Info says what a Source is.
type Info struct {
	Name           string // base name of the file, or "synthetic"
	Format         string
	TokensPerBlock int

	// Identity is mixed into every block key. It comes from the content, so
	// that renamed and recompressed copies of a trace give the same keys, and
	// a second run finds what the first one stored.
	Identity [sha256.Size]byte
}

// Source gives the requests of a trace in order. It is not safe for concurrent
// use.
type Source interface {
	Info() Info
	// Next overwrites *req, reusing its Runs. It returns io.EOF at the end,
	// and goes on returning the same error after one.
	Next(req *Request) error
	Close() error
}

// format is one kind of trace file.
type format struct {
	name   string
	tokens int // per block
	parse  func(f *format, line []byte, req *Request) error

	timeUnit time.Duration // of timestamp
	exactIDs bool          // hash_ids has one id for a partial last block and no more
}

var (
	mooncake = &format{name: "mooncake", tokens: 512, parse: parseHashIDs, timeUnit: time.Millisecond, exactIDs: true}
	bailian  = &format{name: "qwen-bailian", tokens: 16, parse: parseHashIDs, timeUnit: time.Second}
	kvt1     = &format{name: "kvt1", tokens: 64, parse: parseKVT1, timeUnit: time.Millisecond}
)

// detect tells the format by the fields of a trace's first line.
func detect(line []byte) (*format, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(line, &fields); err != nil {
		return nil, fmt.Errorf("not a JSON object: %w", err)
	}
	has := func(name string) bool { _, ok := fields[name]; return ok }
	switch {
	case has("b") && has("in"):
		return kvt1, nil
	case has("hash_ids") && has("chat_id"):
		return bailian, nil
	case has("hash_ids"):
		return mooncake, nil
	}
	return nil, errors.New(`not a known trace: want the fields "hash_ids" (Mooncake, Qwen-Bailian) or "b" and "in" (kvt1)`)
}

// fieldError is a fault of one field of a line.
type fieldError struct {
	field string
	err   error
}

func (e *fieldError) Error() string { return e.field + ": " + e.err.Error() }
func (e *fieldError) Unwrap() error { return e.err }

func badField(field, format string, a ...any) error {
	return &fieldError{field, fmt.Errorf(format, a...)}
}

// decode is json.Unmarshal with errors that name the field in the words of the
// trace, not of Go.
func decode(line []byte, into any) error {
	err := json.Unmarshal(line, into)
	var te *json.UnmarshalTypeError
	if errors.As(err, &te) && te.Field != "" {
		return badField(te.Field, "has a %s, want %s", te.Value, te.Type)
	}
	return err
}

// numbers checks and takes over what all formats have.
func (f *format) numbers(req *Request, timeField string, t *float64, inField string, in *int64, outField string, out *int64) error {
	switch {
	case t == nil:
		return badField(timeField, "is missing")
	case *t < 0 || *t > timeMSMax/float64(f.timeUnit/time.Millisecond):
		return badField(timeField, "is %g, out of range", *t)
	case in == nil:
		return badField(inField, "is missing")
	case *in < 0 || *in > tokensMax:
		return badField(inField, "is %d, want 0 to %d", *in, int64(tokensMax))
	case *in/int64(f.tokens) > blocksMax:
		return badField(inField, "is %d, that is more than %d blocks of %d tokens", *in, blocksMax, f.tokens)
	case out != nil && (*out < 0 || *out > tokensMax):
		return badField(outField, "is %d, want 0 to %d", *out, int64(tokensMax))
	}
	req.Time = time.Duration(*t * float64(f.timeUnit))
	req.InputTokens, req.OutputTokens = *in, 0
	if out != nil {
		req.OutputTokens = *out
	}
	return nil
}

// parseHashIDs reads a Mooncake or Qwen-Bailian line. The id of a partial last
// block is dropped, because engines cache full blocks only.
func parseHashIDs(f *format, line []byte, req *Request) error {
	var l struct {
		Timestamp *float64 `json:"timestamp"`
		Input     *int64   `json:"input_length"`
		Output    *int64   `json:"output_length"`
		HashIDs   []uint64 `json:"hash_ids"`
	}
	if err := decode(line, &l); err != nil {
		return err
	}
	if err := f.numbers(req, "timestamp", l.Timestamp, "input_length", l.Input, "output_length", l.Output); err != nil {
		return err
	}
	full := int(*l.Input / int64(f.tokens))
	all := int((*l.Input + int64(f.tokens) - 1) / int64(f.tokens))
	if n := len(l.HashIDs); n < full || f.exactIDs && n != all {
		return badField("hash_ids", "has %d ids, want %d for input_length %d in blocks of %d tokens", n, all, *l.Input, f.tokens)
	}
	for _, id := range l.HashIDs[:full] {
		if err := req.add("hash_ids", id, 1); err != nil {
			return err
		}
	}
	return req.checkDistinct("hash_ids")
}

// parseKVT1 reads a kvt1 line, whose ids are run-length coded.
func parseKVT1(f *format, line []byte, req *Request) error {
	var l struct {
		T   *float64   `json:"t"`
		In  *int64     `json:"in"`
		Out *int64     `json:"out"`
		B   [][]uint64 `json:"b"`
	}
	if err := decode(line, &l); err != nil {
		return err
	}
	if err := f.numbers(req, "t", l.T, "in", l.In, "out", l.Out); err != nil {
		return err
	}
	if l.B == nil {
		return badField("b", "is missing")
	}
	for i, r := range l.B {
		if len(r) != 2 {
			return badField("b", "entry %d has %d numbers, want [first id, count]", i, len(r))
		}
		if r[1] == 0 {
			return badField("b", "entry %d has count 0", i)
		}
		if err := req.add("b", r[0], r[1]); err != nil {
			return err
		}
	}
	if want := int(*l.In / int64(f.tokens)); req.Blocks != want {
		return badField("b", "has %d blocks, want %d for in %d in blocks of %d tokens", req.Blocks, want, *l.In, f.tokens)
	}
	return req.checkDistinct("b")
}

// add appends ids, joining them to the last run where they follow it.
func (r *Request) add(field string, first, count uint64) error {
	if first > idMax {
		return badField(field, "has id %d, want at most %d", first, uint64(idMax))
	}
	if count > uint64(blocksMax-r.Blocks) {
		return badField(field, "has more than %d blocks", blocksMax)
	}
	r.Blocks += int(count)
	if n := len(r.Runs); n > 0 && r.Runs[n-1].First+uint64(r.Runs[n-1].Count) == first {
		r.Runs[n-1].Count += uint32(count)
		return nil
	}
	r.Runs = append(r.Runs, Run{first, uint32(count)})
	return nil
}

// checkDistinct refuses an id that stands twice in one prompt: equal ids mean
// equal prefixes, and a prompt is no prefix of itself.
func (r *Request) checkDistinct(field string) error {
	if len(r.Runs) < 2 {
		return nil
	}
	sorted := slices.Clone(r.Runs)
	sortRuns(sorted)
	for i := 1; i < len(sorted); i++ {
		if p := sorted[i-1]; p.First+uint64(p.Count) > sorted[i].First {
			return badField(field, "has id %d twice; equal ids mean equal prefixes", sorted[i].First)
		}
	}
	return nil
}

func sortRuns(runs []Run) {
	slices.SortFunc(runs, func(a, b Run) int {
		switch {
		case a.First < b.First:
			return -1
		case a.First > b.First:
			return 1
		}
		return 0
	})
}

// fileSource streams a trace file.
type fileSource struct {
	info   Info
	path   string
	format *format
	file   io.Closer
	lines  *bufio.Scanner
	line   int
	err    error
}

// OpenFile opens a trace file, plain or gzipped; both that and the format are
// told by content. The caller closes the Source.
func OpenFile(path string) (Source, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open trace: %w", err)
	}
	s, err := newFileSource(path, f, f)
	if err != nil {
		f.Close()
		return nil, err
	}
	return s, nil
}

func newFileSource(path string, r io.Reader, c io.Closer) (*fileSource, error) {
	br := bufio.NewReaderSize(r, identityPeek)
	if magic, _ := br.Peek(2); bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		z, err := gzip.NewReader(br)
		if err != nil {
			return nil, fmt.Errorf("%s: gzip: %w", path, cutOff(err))
		}
		br = bufio.NewReaderSize(z, identityPeek)
	}
	head, err := br.Peek(identityPeek)
	if err != nil && err != io.EOF && len(head) == 0 { // else it comes again, with a line
		return nil, fmt.Errorf("%s: %w", path, cutOff(err))
	}
	s := &fileSource{path: path, file: c, info: Info{Name: filepath.Base(path)}}
	s.info.Identity = identity("file", head)
	s.lines = bufio.NewScanner(br)
	s.lines.Split(s.split)
	s.lines.Buffer(make([]byte, 0, identityPeek), lineBytesMax)
	line, err := s.next()
	if err == io.EOF {
		return nil, fmt.Errorf("%s: the trace has no requests", path)
	}
	if err != nil {
		return nil, err
	}
	if s.format, err = detect(line); err != nil {
		return nil, s.fault(err)
	}
	s.info.Format, s.info.TokensPerBlock = s.format.name, s.format.tokens
	return s, nil
}

// split is ScanLines, but that a line which a fault of the file cut short is
// none: the fault is told, not what it did to the line.
func (s *fileSource) split(data []byte, atEOF bool) (advance int, token []byte, err error) {
	if atEOF && s.lines.Err() != nil && bytes.IndexByte(data, '\n') < 0 {
		return 0, nil, s.lines.Err()
	}
	return bufio.ScanLines(data, atEOF)
}

// cutOff says in words what an unexpected end of a gzip stream is.
func cutOff(err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("the gzip stream is cut off here; the file is not whole, get it anew: %w", err)
	}
	return err
}

// next moves to the next line that is not blank.
func (s *fileSource) next() ([]byte, error) {
	for s.lines.Scan() {
		s.line++
		if line := bytes.TrimSpace(s.lines.Bytes()); len(line) > 0 {
			return line, nil
		}
	}
	err := s.lines.Err()
	if err == nil {
		return nil, io.EOF
	}
	s.line++
	if errors.Is(err, bufio.ErrTooLong) {
		err = fmt.Errorf("the line is longer than %d bytes", lineBytesMax)
	}
	return nil, s.fault(cutOff(err))
}

func (s *fileSource) fault(err error) error { return fmt.Errorf("%s:%d: %w", s.path, s.line, err) }

func (s *fileSource) Info() Info   { return s.info }
func (s *fileSource) Close() error { return s.file.Close() }

func (s *fileSource) Next(req *Request) error {
	if s.err != nil {
		return s.err
	}
	// The first line was scanned to tell the format and is still current.
	line := bytes.TrimSpace(s.lines.Bytes())
	*req = Request{Runs: req.Runs[:0]}
	if err := s.format.parse(s.format, line, req); err != nil {
		s.err = s.fault(err)
		return s.err
	}
	_, s.err = s.next()
	return nil
}

// identity folds what a trace is to the value that its keys are derived from.
func identity(kind string, content []byte) [sha256.Size]byte {
	h := sha256.New()
	fmt.Fprintf(h, "terrace.replay.trace.v1\x00%s\x00", kind)
	h.Write(content)
	return [sha256.Size]byte(h.Sum(nil))
}

// appendKeys appends the block keys of ids: SHA-256 over the trace's identity
// and the id, group 0. That is one compression a key, about 0.1 µs.
func appendKeys(dst []block.Key, identity *[sha256.Size]byte, runs []Run) []block.Key {
	var in [sha256.Size + 8]byte
	copy(in[:], identity[:])
	for _, r := range runs {
		for i := range uint64(r.Count) {
			binary.BigEndian.PutUint64(in[sha256.Size:], r.First+i)
			sum := sha256.Sum256(in[:])
			var k block.Key
			copy(k[:], sum[:])
			dst = append(dst, k)
		}
	}
	return dst
}

// limited ends a Source after n requests.
type limited struct {
	Source
	left int
}

func (l *limited) Next(req *Request) error {
	if l.left <= 0 {
		return io.EOF
	}
	l.left--
	return l.Source.Next(req)
}

// Limit ends s after n requests; 0 means no limit.
func Limit(s Source, n int) Source {
	if n <= 0 {
		return s
	}
	return &limited{s, n}
}

// Size is how much a trace holds.
type Size struct {
	Requests   int
	References int64 // full blocks, each time they occur
	Largest    int   // full blocks of the largest request
}

// Measure reads s to its end, which also finds every malformed line before
// anything is started.
func Measure(s Source) (Size, error) {
	var (
		size Size
		req  Request
	)
	for {
		switch err := s.Next(&req); err {
		case nil:
			size.Requests++
			size.References += int64(req.Blocks)
			size.Largest = max(size.Largest, req.Blocks)
		case io.EOF:
			return size, nil
		default:
			return size, err
		}
	}
}
