package replay

import (
	"encoding/binary"
	"io"
	"math/rand/v2"
	"time"
)

// Shape of the synthetic chat, in blocks and turns. The ranges are inclusive.
const (
	synthTokensPerBlock = 512
	synthPrompts        = 8 // system prompts, the first the most popular
	synthPromptMin      = 4
	synthPromptMax      = 32
	synthFirstMin       = 16 // what the first turn appends: documents and a question
	synthFirstMax       = 48
	synthTurnsMin       = 2 // later turns
	synthTurnsMax       = 8
	synthTurnMin        = 2 // what a later turn appends: last reply and new question
	synthTurnMax        = 8
	synthGapMSMax       = 400

	// synthRequests is what a conversation has on average.
	synthRequests = 1 + (synthTurnsMin+synthTurnsMax)/2

	// synthOwnBlocks is what a conversation adds to the working set on
	// average, apart from its system prompt.
	synthOwnBlocks = (synthFirstMin+synthFirstMax)/2 + (synthTurnsMin+synthTurnsMax)*(synthTurnMin+synthTurnMax)/4
)

// Bounds of what SyntheticConversations chooses: enough for several to share a
// system prompt, and few enough that a run with bytes ends soon.
const (
	conversationsMin = 24
	conversationsMax = 512

	conversationsLimit = 1 << 20 // what people may ask for
)

// SyntheticConversations chooses how many conversations make a working set of
// one and three quarters primaries, so that most hits come from the primary and
// a good part from below. The bounds above win over that.
func SyntheticConversations(primaryBlocks int64) int {
	n := primaryBlocks * 7 / 4 / synthOwnBlocks
	return int(min(max(n, conversationsMin), conversationsMax))
}

// synthetic makes a shared-prefix chat with growing turns: each conversation
// starts with one of a few system prompts and documents of its own, and each of
// its turns sends the whole conversation so far and something new. Turns of all conversations are
// mixed at random.
type synthetic struct {
	info    Info
	rng     *rand.PCG
	prompts []Run
	weights int
	alive   []conversation
	nextID  uint64
	now     time.Duration
}

type conversation struct {
	runs   []Run
	blocks int
	turns  int // left, the first one apart
}

// Synthetic is a trace made from a seed. The same seed and number of
// conversations give the same trace, also in later versions.
func Synthetic(seed uint64, conversations int) Source {
	s := &synthetic{rng: rand.NewPCG(seed, uint64(conversations))}
	var content [16]byte
	binary.BigEndian.PutUint64(content[:], seed)
	binary.BigEndian.PutUint64(content[8:], uint64(conversations))
	s.info = Info{Name: "synthetic", Format: "synthetic", TokensPerBlock: synthTokensPerBlock, Identity: identity("synthetic", content[:])}
	for i := range synthPrompts {
		s.prompts = append(s.prompts, s.take(synthPromptMin, synthPromptMax))
		s.weights += synthPrompts - i
	}
	for range conversations {
		p := s.prompts[s.prompt()]
		s.alive = append(s.alive, conversation{runs: []Run{p}, blocks: int(p.Count), turns: s.between(synthTurnsMin, synthTurnsMax)})
	}
	return s
}

// between draws from lo to hi. The slight bias of % is the price of numbers
// that do not depend on the library's reduction.
func (s *synthetic) between(lo, hi int) int {
	return lo + int(s.rng.Uint64()%uint64(hi-lo+1))
}

// prompt draws a system prompt; the i-th of n has weight n - i.
func (s *synthetic) prompt() int {
	w := s.between(1, s.weights)
	for i := range s.prompts {
		if w -= synthPrompts - i; w <= 0 {
			return i
		}
	}
	return 0
}

// take allots new ids.
func (s *synthetic) take(lo, hi int) Run {
	r := Run{s.nextID, uint32(s.between(lo, hi))}
	s.nextID += uint64(r.Count)
	return r
}

func (s *synthetic) Info() Info   { return s.info }
func (s *synthetic) Close() error { return nil }

func (s *synthetic) Next(req *Request) error {
	if len(s.alive) == 0 {
		return io.EOF
	}
	i := s.between(0, len(s.alive)-1)
	c := &s.alive[i]
	turn := Run{}
	if len(c.runs) == 1 {
		turn = s.take(synthFirstMin, synthFirstMax)
	} else {
		turn = s.take(synthTurnMin, synthTurnMax)
		c.turns--
	}
	c.runs = append(c.runs, turn)
	c.blocks += int(turn.Count)
	s.now += time.Duration(s.between(0, synthGapMSMax)) * time.Millisecond
	*req = Request{
		Time:         s.now,
		InputTokens:  int64(c.blocks * synthTokensPerBlock),
		OutputTokens: synthTokensPerBlock,
		Runs:         append(req.Runs[:0], c.runs...),
		Blocks:       c.blocks,
	}
	if c.turns == 0 {
		last := len(s.alive) - 1
		s.alive[i] = s.alive[last]
		s.alive[last] = conversation{}
		s.alive = s.alive[:last]
	}
	return nil
}
