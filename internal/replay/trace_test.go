package replay

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"
)

// TestCutGzip: a file that is not whole is told as such, with the line reached.
func TestCutGzip(t *testing.T) {
	var whole bytes.Buffer
	z := gzip.NewWriter(&whole)
	for i := range 20000 {
		fmt.Fprintf(z, `{"timestamp":%d,"input_length":512,"output_length":1,"hash_ids":[%d]}`+"\n", i, i*7919%10007)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "cut.gz")
	for _, n := range []int{5, 12, 40, whole.Len() / 2, whole.Len() - 9, whole.Len() - 3} {
		if err := os.WriteFile(path, whole.Bytes()[:n], 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := OpenFile(path)
		if err == nil {
			_, err = Measure(s)
			s.Close()
		}
		if err == nil || !errors.Is(err, io.ErrUnexpectedEOF) || !strings.Contains(err.Error(), "gzip stream is cut off") {
			t.Errorf("%d bytes of %d: %v", n, whole.Len(), err)
		}
		if line := regexp.MustCompile(`cut\.gz:(\d+): `).FindStringSubmatch(fmt.Sprint(err)); n > 40 && (line == nil || len(line[1]) < 4) {
			t.Errorf("%d bytes of %d: no line: %v", n, whole.Len(), err)
		}
	}
}

func gz(s string) []byte {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	w.Write([]byte(s))
	w.Close()
	return b.Bytes()
}

type nopCloser struct{}

func (nopCloser) Close() error { return nil }

func readAll(b []byte) (Info, []Request, error) {
	s, err := newFileSource("t.jsonl", bytes.NewReader(b), nopCloser{})
	if err != nil {
		return Info{}, nil, err
	}
	var out []Request
	for {
		var r Request
		switch err := s.Next(&r); err {
		case nil:
			out = append(out, r)
		case io.EOF:
			return s.Info(), out, nil
		default:
			if again := s.Next(&r); again != err {
				return s.Info(), out, fmt.Errorf("a second Next returned %v after %w", again, err)
			}
			return s.Info(), out, err
		}
	}
}

func TestReaders(t *testing.T) {
	for _, tc := range []struct {
		name, in string
		format   string
		want     []Request
	}{
		{"mooncake drops the partial last block and keeps ties in file order",
			`{"timestamp": 3000, "input_length": 1500, "output_length": 7, "hash_ids": [0, 1, 2]}
{"timestamp": 3000, "input_length": 1024, "output_length": 8, "hash_ids": [0, 9]}

{"timestamp": 6000, "input_length": 511, "output_length": 9, "hash_ids": [4]}`,
			"mooncake", []Request{
				{3 * time.Second, 1500, 7, []Run{{0, 2}}, 2},
				{3 * time.Second, 1024, 8, []Run{{0, 1}, {9, 1}}, 2},
				{6 * time.Second, 511, 9, nil, 0},
			}},
		{"kvt1", `{"s":"a","t":19000,"in":331,"out":2,"rt":0,"b":[[7,2],[9,1],[20,2]]}` + "\r\n" + `{"s":"b","t":1,"in":3,"out":2,"b":[]}`,
			"kvt1", []Request{
				{19 * time.Second, 331, 2, []Run{{7, 3}, {20, 2}}, 5},
				{time.Millisecond, 3, 2, nil, 0},
			}},
		{"qwen-bailian", `{"chat_id":1,"parent_chat_id":-1,"timestamp":1.5,"input_length":40,"output_length":2,"type":"text","turn":1,"hash_ids":[3,4]}`,
			"qwen-bailian", []Request{{1500 * time.Millisecond, 40, 2, []Run{{3, 2}}, 2}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var ids [][32]byte
			for _, b := range [][]byte{[]byte(tc.in), gz(tc.in)} {
				info, got, err := readAll(b)
				if err != nil {
					t.Fatal(err)
				}
				for i := range got {
					if len(got[i].Runs) == 0 {
						got[i].Runs = nil
					}
				}
				if info.Format != tc.format || !reflect.DeepEqual(got, tc.want) {
					t.Errorf("%s: %+v\nwant %s: %+v", info.Format, got, tc.format, tc.want)
				}
				ids = append(ids, info.Identity)
			}
			if ids[0] != ids[1] {
				t.Error("plain and gzipped copies of one trace must have one identity")
			}
		})
	}
}

func TestReaderFaults(t *testing.T) {
	good := `{"timestamp":0,"input_length":512,"output_length":1,"hash_ids":[1]}` + "\n"
	goodK := `{"t":0,"in":64,"out":1,"b":[[1,1]]}` + "\n"
	for _, tc := range []struct{ name, in, want string }{
		{"empty", "", "no requests"},
		{"blank", "\n \n", "no requests"},
		{"not JSON", "timestamp,input\n", "t.jsonl:1: not a JSON object"},
		{"array", "[1]\n", "t.jsonl:1: not a JSON object"},
		{"null", "null\n", "not a known trace"},
		{"unknown", `{"prompt":"x"}`, "not a known trace"},
		{"broken later line", good + `{"timestamp":`, "t.jsonl:2:"},
		{"trailing bytes", good + good[:len(good)-1] + "x", "t.jsonl:2:"},
		{"too few ids", `{"timestamp":0,"input_length":1024,"hash_ids":[1]}`, "t.jsonl:1: hash_ids: has 1 ids, want 2"},
		{"too many ids", `{"timestamp":0,"input_length":512,"hash_ids":[1,2]}`, "hash_ids: has 2 ids, want 1"},
		{"negative id", `{"timestamp":0,"input_length":512,"hash_ids":[-1]}`, "hash_ids: has a number -1"},
		{"string id", `{"timestamp":0,"input_length":512,"hash_ids":["a"]}`, "hash_ids: has a string"},
		{"huge id", `{"timestamp":0,"input_length":512,"hash_ids":[18446744073709551615]}`, "hash_ids: has id 18446744073709551615"},
		{"id twice", `{"timestamp":0,"input_length":1536,"hash_ids":[1,5,1]}`, "hash_ids: has id 1 twice"},
		{"no timestamp", `{"input_length":512,"hash_ids":[1]}`, "timestamp: is missing"},
		{"negative time", `{"timestamp":-1,"input_length":512,"hash_ids":[1]}`, "timestamp: is -1"},
		{"huge time", `{"timestamp":1e300,"input_length":512,"hash_ids":[1]}`, "timestamp: is 1e+300"},
		{"no length", `{"timestamp":1,"hash_ids":[1]}`, "input_length: is missing"},
		{"negative length", `{"timestamp":1,"input_length":-5,"hash_ids":[1]}`, "input_length: is -5"},
		{"length without blocks", `{"timestamp":1,"input_length":1000000000000,"hash_ids":[1]}`, "input_length: is 1000000000000"},
		{"negative output", `{"timestamp":1,"input_length":512,"output_length":-1,"hash_ids":[1]}`, "output_length: is -1"},
		{"kvt1 short pair", `{"t":0,"in":64,"b":[[1]]}`, "b: entry 0 has 1 numbers"},
		{"kvt1 long pair", goodK + `{"t":0,"in":64,"b":[[1,1,1]]}`, "t.jsonl:2: b: entry 0 has 3 numbers"},
		{"kvt1 count 0", `{"t":0,"in":64,"b":[[1,0]]}`, "b: entry 0 has count 0"},
		{"kvt1 bomb", `{"t":0,"in":64,"b":[[0,4000000000],[4000000000,4000000000]]}`, "b: has more than 131072 blocks"},
		{"kvt1 wrap", `{"t":0,"in":64,"b":[[0,1],[1,18446744073709551615]]}`, "b: has more than 131072 blocks"},
		{"kvt1 overlap", `{"t":0,"in":384,"b":[[10,4],[8,1],[13,1]]}`, "b: has id 13 twice"},
		{"kvt1 other length", `{"t":0,"in":128,"b":[[1,1]]}`, "b: has 1 blocks, want 2"},
		{"kvt1 b missing", `{"t":0,"in":1,"b":null}`, "b: is missing"},
		{"long line", good + strings.Repeat(" ", lineBytesMax+1) + "\n", "t.jsonl:2: the line is longer than"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if _, _, err := readAll([]byte(tc.in)); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want %q", err, tc.want)
			}
			if _, _, err := readAll(gz(tc.in)); err == nil {
				t.Error("no error from the gzipped copy")
			}
		})
	}
	cut := gz(strings.Repeat(good, 1000))
	cut = cut[:len(cut)/2]
	if _, _, err := readAll(cut); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("truncated gzip: error %v, want %v", err, io.ErrUnexpectedEOF)
	}
	if _, err := OpenFile(filepath.Join(t.TempDir(), "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing file: error %v", err)
	}
}

func TestLimitAndMeasure(t *testing.T) {
	one := `{"t":0,"in":128,"b":[[1,2]]}` + "\n"
	path := filepath.Join(t.TempDir(), "x")
	if err := os.WriteFile(path, gz(strings.Repeat(one, 9)+`{"t":0,"in":256,"b":[[1,4]]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for n, want := range map[int]Size{0: {10, 22, 4}, 3: {3, 6, 2}, 99: {10, 22, 4}} {
		s, err := OpenFile(path)
		if err != nil {
			t.Fatal(err)
		}
		got, err := Measure(Limit(s, n))
		if err != nil || got != want {
			t.Errorf("limit %d: %+v, %v, want %+v", n, got, err, want)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestSynthetic(t *testing.T) {
	all := func(seed uint64, conversations int) []Request {
		var out []Request
		s := Synthetic(seed, conversations)
		for {
			var r Request
			if err := s.Next(&r); err != nil {
				return out
			}
			out = append(out, r)
		}
	}
	a, b := all(7, 100), all(7, 100)
	if !reflect.DeepEqual(a, b) {
		t.Fatal("one seed gave two traces")
	}
	if reflect.DeepEqual(a, all(8, 100)) {
		t.Fatal("two seeds gave one trace")
	}
	if Synthetic(7, 100).Info().Identity == Synthetic(8, 100).Info().Identity {
		t.Fatal("two seeds gave one identity")
	}
	// The first requests are golden: a seed in a report must stay meaningful.
	if got, want := fmt.Sprintf("%v", a[:2]), synthGolden; got != want {
		t.Errorf("seed 7, 100 conversations begins with\n%s, want\n%s", got, want)
	}
	seen := map[uint64]bool{}
	shared := 0
	for i := range a {
		if err := a[i].checkDistinct("x"); err != nil {
			t.Fatalf("request %d: %v", i, err)
		}
		fresh := 0
		for _, r := range a[i].Runs {
			for id := r.First; id < r.First+uint64(r.Count); id++ {
				if !seen[id] {
					seen[id] = true
					fresh++
				}
			}
		}
		if fresh == 0 || fresh > synthPromptMax+synthFirstMax {
			t.Fatalf("request %d has %d new blocks", i, fresh)
		}
		if fresh < a[i].Blocks {
			shared++
		}
	}
	if shared < len(a)*9/10 {
		t.Errorf("%d of %d requests share a prefix with an earlier one", shared, len(a))
	}
	for _, primary := range []int64{4096, 16384} {
		n := SyntheticConversations(primary)
		distinct := map[uint64]bool{}
		for _, r := range all(1, n) {
			for _, run := range r.Runs {
				for id := range uint64(run.Count) {
					distinct[run.First+id] = true
				}
			}
		}
		if d := int64(len(distinct)); d < primary*15/10 || d > primary*2 {
			t.Errorf("%d conversations for %d blocks make a working set of %d", n, primary, d)
		}
	}
}

const synthGolden = `[{290ms 20480 512 [{53 14} {154 26}] 40} {471ms 32768 512 [{22 31} {180 33}] 64}]`

func TestKeys(t *testing.T) {
	id := Synthetic(1, 1).Info().Identity
	other := Synthetic(2, 1).Info().Identity
	keys := appendKeys(nil, &id, []Run{{5, 3}, {0, 1}})
	if len(keys) != 4 || keys[1] != appendKeys(nil, &id, []Run{{6, 1}})[0] {
		t.Fatal("a key must depend on trace and id alone")
	}
	if keys[0] == keys[1] || keys[0] == appendKeys(nil, &other, []Run{{5, 1}})[0] {
		t.Fatal("keys of two ids or two traces are equal")
	}
	if n := testing.AllocsPerRun(10, func() { keys = appendKeys(keys[:0], &id, []Run{{5, 3}}) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// FuzzTrace: whatever the bytes are, a reader returns an error or requests
// that keep the promises of Request; never does it panic or go beyond bounds.
func FuzzTrace(f *testing.F) {
	for _, s := range []string{
		`{"timestamp": 0, "input_length": 1500, "output_length": 7, "hash_ids": [0, 1, 2]}`,
		`{"s":"a","t":19000,"in":331,"out":2,"rt":0,"b":[[7,2],[9,1],[20,2]]}`,
		`{"chat_id":1,"timestamp":1.5,"input_length":40,"output_length":2,"hash_ids":[3,4]}`,
		`{"t":0,"in":64,"b":[[0,4000000000],[1,18446744073709551615]]}`,
	} {
		f.Add([]byte(s))
		f.Add([]byte(s + "\n" + s))
		f.Add(gz(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		info, reqs, err := readAll(b)
		if err != nil && strings.Contains(err.Error(), "second Next") {
			t.Fatal(err)
		}
		for i, r := range reqs {
			sum := 0
			for _, run := range r.Runs {
				sum += int(run.Count)
			}
			if sum != r.Blocks || sum != int(r.InputTokens/int64(info.TokensPerBlock)) || sum > blocksMax || r.Time < 0 || r.InputTokens < 0 {
				t.Fatalf("request %d: %+v", i, r)
			}
			if err := r.checkDistinct("ids"); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// testdata returns the path of a file of the data folder, or skips the test
// and says which file it wants.
func testdata(t testing.TB, name string) string {
	dir := os.Getenv("TERRACE_TESTDATA")
	if dir == "" {
		t.Skipf("TERRACE_TESTDATA is not set; this test needs %s", name)
	}
	path := filepath.Join(dir, name)
	if _, err := os.Stat(path); err != nil {
		t.Skipf("this test needs %s: %v", path, err)
	}
	return path
}

func TestRealTraces(t *testing.T) {
	golden := goldenTraces(t)
	for file, requests := range map[string]int{
		conversationFile: 12031,
		syntheticFile:    3993,
		wekaFile:         11567,
	} {
		s, err := OpenFile(testdata(t, file))
		if err != nil {
			t.Fatal(err)
		}
		size, err := Measure(s)
		if err != nil {
			t.Fatal(err)
		}
		name, _, _ := strings.Cut(file, ".")
		if want := golden[name].References; size.References != want || size.Requests != requests {
			t.Errorf("%s: %+v, want %d requests and %d references", file, size, requests, want)
		}
		s.Close()
	}
}
