package lifecycle

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// TestWatch: what a loop says, and what Check makes of it as time passes.
func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		w := NewWatch(slog.New(slog.NewTextHandler(&log, nil)))
		l := w.Loop("x", 10*time.Second)
		down := func() string {
			s := w.Check()
			if len(s) != 1 || s[0].Name != "x" {
				t.Fatalf("states %+v", s)
			}
			return s[0].Down
		}
		for _, step := range []struct {
			what string
			do   func()
			pass time.Duration
			want string
		}{
			{"not begun", func() {}, time.Hour, ""},
			{"works", l.Work, 10 * time.Second, ""},
			{"works too long", func() {}, time.Second, "in one turn for longer than 10s"},
			{"rests", func() { l.Rest(0) }, time.Hour, ""},
			{"works again", l.Work, time.Second, ""},
			{"rests for a minute", func() { l.Rest(time.Minute) }, 69 * time.Second, ""},
			{"oversleeps", func() {}, 2 * time.Second, "should have woken up more than 10s ago"},
			{"is awake", l.Work, time.Second, ""},
			{"has ended", func() { l.Rest(0); l.End(false) }, 0, "has ended"},
			{"for good", func() {}, time.Hour, "has ended"},
		} {
			step.do()
			time.Sleep(step.pass)
			if got := down(); got != step.want && (step.want == "" || !strings.Contains(got, step.want)) {
				t.Errorf("%s: down is %q, want %q", step.what, got, step.want)
			}
			_ = down() // tells the log nothing new
		}
		if s := w.Check()[0]; s.Turns != 3 || s.Busy != 0 {
			t.Errorf("%+v", s)
		}
		if got := strings.Count(log.String(), "level=ERROR"); got != 3 {
			t.Errorf("%d errors in the log, want 3\n%s", got, log.String())
		}
		if got := strings.Count(log.String(), "goes on"); got != 2 {
			t.Errorf("%d times back in the log, want 2", got)
		}
		l.End(true)
		if s := w.Check(); len(s) != 0 {
			t.Errorf("after its owner's end: %+v", s)
		}
	})
}

// TestNoWatch: a loop that nobody watches says what it likes.
func TestNoWatch(t *testing.T) {
	l := (*Watch)(nil).Loop("x", time.Second)
	l.Work()
	l.Rest(time.Second)
	l.End(false)
}
