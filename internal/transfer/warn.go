package transfer

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/tier"
)

var zeroKey block.Key

// warner logs what a lane's tier does wrong, one line per kind and cause in a
// time; the rest is counted in the next line. No lock of the lane is held, and
// whatever a handler does, no outcome changes.
type warner struct {
	log   *slog.Logger
	every time.Duration
	tier  string

	mu   sync.Mutex
	last map[warning]*warned // bounded: kinds and causes are few
}

type warning struct {
	op    string
	cause string
}

type warned struct {
	at         time.Time
	suppressed uint64
}

// failed logs an item's failure. A Miss and a cancelled item are none.
func (w *warner) failed(op string, key block.Key, err error) {
	switch tier.ClassOf(err) {
	case tier.ClassNone, tier.ClassNotFound, tier.ClassCancelled:
		return
	}
	w.emit(slog.LevelWarn, warning{op, tier.CauseOf(err).String()}, "tier call failed",
		slog.String("class", tier.ClassOf(err).String()), slog.String("key", key.String()), slog.Any("err", err))
}

func (w *warner) panicked(op string, key block.Key, r any, stack []byte) {
	w.emit(slog.LevelError, warning{op, "panic"}, "panic in a call from a transfer lane",
		slog.String("key", key.String()), slog.String("panic", fmt.Sprint(r)), slog.String("stack", string(stack)))
}

// hung is calls of one job that outlived its deadline.
type hung struct {
	op    string
	key   block.Key // of the oldest
	age   time.Duration
	calls int
}

func (w *warner) hung(h hung) {
	w.emit(slog.LevelWarn, warning{h.op, "hung"}, "call has not returned; its slots stay quarantined",
		slog.String("key", h.key.String()), slog.Duration("age", h.age.Round(time.Millisecond)), slog.Int("calls", h.calls))
}

func (w *warner) health(d Dir, was, s State) {
	level := slog.LevelWarn
	if s == StateClosed || s == StateHalfOpen {
		level = slog.LevelInfo
	}
	w.emit(level, warning{d.String(), "to_" + s.String()}, "tier health changed",
		slog.String("from", was.String()), slog.String("to", s.String()))
}

func (w *warner) emit(level slog.Level, k warning, msg string, attrs ...slog.Attr) {
	defer func() { _ = recover() }() // a handler's or a value's panic; there is nobody left to tell
	now := time.Now()
	w.mu.Lock()
	last := w.last[k]
	if last == nil {
		last = &warned{}
		w.last[k] = last
	} else if now.Sub(last.at) < w.every {
		last.suppressed++
		w.mu.Unlock()
		return
	}
	suppressed := last.suppressed
	*last = warned{at: now}
	w.mu.Unlock()
	attrs = append(attrs, slog.String("tier", w.tier), slog.String("op", k.op), slog.String("cause", k.cause))
	if suppressed > 0 {
		attrs = append(attrs, slog.Uint64("suppressed", suppressed))
	}
	w.log.LogAttrs(context.Background(), level, msg, attrs...)
}
