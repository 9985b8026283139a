package replay

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// How often progress is shown: on a terminal in place, elsewhere as lines.
const (
	progressEveryTTY  = 200 * time.Millisecond
	progressEveryLine = 5 * time.Second
	progressBar       = 24 // characters
)

// snapshot is how far a run has come.
type snapshot struct {
	requests   int64
	total      int64 // 0: not known
	references int64
	hits       int64
	bytes      int64 // moved through the primary
	elapsed    time.Duration
}

// line is the snapshot in one line of less than 100 characters.
func (s snapshot) line() string {
	var b strings.Builder
	if s.total > 0 {
		done := min(1, float64(s.requests)/float64(s.total))
		full := int(done * progressBar)
		fmt.Fprintf(&b, "%3.0f %% [%s%s] %s/%s requests", 100*done, strings.Repeat("#", full), strings.Repeat(".", progressBar-full), commas(s.requests), commas(s.total))
	} else {
		fmt.Fprintf(&b, "%s requests", commas(s.requests))
	}
	if s.references > 0 {
		fmt.Fprintf(&b, ", hits %s", percent(ratio(s.hits, s.references)))
	}
	if sec := s.elapsed.Seconds(); s.bytes > 0 && sec > 0 {
		fmt.Fprintf(&b, ", %s/s", humanBytes(int64(float64(s.bytes)/sec)))
	}
	if s.total > 0 && s.requests > 0 && s.requests < s.total {
		left := time.Duration(float64(s.elapsed) / float64(s.requests) * float64(s.total-s.requests))
		fmt.Fprintf(&b, ", %s left", left.Round(time.Second))
	}
	return b.String()
}

// showProgress writes what look returns until ctx ends. The caller waits for
// it. On a terminal the line is erased at the end, because a table follows.
func showProgress(ctx context.Context, w io.Writer, terminal bool, look func() snapshot) {
	every := progressEveryLine
	if terminal {
		every = progressEveryTTY
	}
	t := time.NewTicker(every)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			if terminal {
				fmt.Fprint(w, "\r\x1b[K")
			}
			return
		case <-t.C:
			if terminal {
				fmt.Fprintf(w, "\r\x1b[K%s", look().line())
			} else {
				fmt.Fprintln(w, look().line())
			}
		}
	}
}

// isTerminal says whether w is one.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
