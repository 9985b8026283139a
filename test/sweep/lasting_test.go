package sweep

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/terrace-kv/terrace/internal/fault"
	"github.com/terrace-kv/terrace/internal/vfs"
)

// lasting are faults that go on and on.
func lasting() (rules []string) {
	for _, op := range []vfs.Op{vfs.OpOpen, vfs.OpLink, vfs.OpRename, vfs.OpRemove, vfs.OpMkdir, vfs.OpLstat,
		vfs.OpRead, vfs.OpWrite, vfs.OpStat, vfs.OpSync, vfs.OpClose} {
		for _, do := range []string{"error(EIO)", "late(EIO)", "error(ENOSPC)", "error(EMFILE)", "error(EACCES)", "delay(5s)", "delay(90s)", "hang"} {
			rules = append(rules, fmt.Sprintf("%s when op(%s)", do, op))
		}
	}
	for seed := range 30 {
		rules = append(rules,
			fmt.Sprintf("error(EIO) when randomly(0.01, %d)", seed),
			fmt.Sprintf("late(EIO) when randomly(0.1, %d)", seed),
			fmt.Sprintf("error(EIO) when randomly(0.1, %d); short(512) when randomly(0.3, %d); delay(3s) when randomly(0.3, %d)", seed, seed, seed),
			fmt.Sprintf("flip when and(op(read), randomly(0.5, %d))", seed),
			fmt.Sprintf("torn(4096) error(EIO) when and(op(write), randomly(0.5, %d))", seed))
	}
	return append(rules,
		"error(EROFS) when writes", "error(EIO) when reads", "error(ESTALE)", "disconnect", "error(EMFILE) when op(open)",
		"flip when op(read)", "short(512)", "delay(5s)", "torn(0) when op(write)", "torn(4096) when op(write)")
}

// TestLastingFaults shows that the tier degrades alone. While its file system
// goes wrong for good, engines store, and load what is in the primary, as
// always and without waiting; what the tier had is right bytes or a Miss within
// the bound of a lookup. When the file system has recovered, so does the tier.
func TestLastingFaults(t *testing.T) {
	if *sweepRules != "" {
		synctest.Test(t, func(t *testing.T) { lastOnce(t, *sweepConfig, *sweepRules) })
		return
	}
	for _, config := range []string{"plain", "synced"} {
		t.Run(config, func(t *testing.T) {
			t.Parallel()
			idle := 0
			for i, rules := range lasting() {
				if raceEnabled && i%5 != 0 {
					continue
				}
				synctest.Test(t, func(t *testing.T) {
					if lastOnce(t, config, rules) == 0 {
						idle++
					}
				})
			}
			if idle > len(lasting())/3 {
				t.Errorf("%d of %d rules had nothing to do", idle, len(lasting()))
			}
		})
	}
}

func lastOnce(t *testing.T, config, rules string) int64 {
	set := fault.MustParse(rules)
	set.Toggle(false)
	s := &scenario{t: t, config: config, set: set, mem: vfs.NewMem(0), ns: namespace(t, sweepBytes), blocks: 80, loose: true}
	err := s.life(s.degraded)
	if err == nil {
		s.loose = false
		tr, oerr := s.open()
		if err = oerr; err == nil {
			err = errors.Join(s.exact(tr.Stats()), tr.Close(context.Background()))
		}
	}
	if err != nil {
		t.Errorf("%v\nreplay with: go test ./test/sweep -run TestLastingFaults -config %s -rules '%s'", err, config, rules)
	}
	return set.Injected()
}

func (s *scenario) degraded(e *engine) error {
	if c, err := e.store(sweepKeys(0, 8), true); err != nil || c != 8 {
		return fmt.Errorf("store before the fault: %d cascaded, %v", c, err)
	}
	if err := e.reset(); err != nil {
		return err
	}
	s.set.Toggle(true)
	release := time.AfterFunc(time.Hour, s.set.Release) // of what hangs
	defer release.Stop()
	for round := range 4 {
		lo := 16 + 8*round
		if err := e.storeOnly(sweepKeys(lo, lo+8)); err != nil {
			return fmt.Errorf("store in round %d: %w", round, err)
		}
		begin := time.Now()
		if got, err := e.load(sweepKeys(lo, lo+8)); err != nil || got != 8 || time.Since(begin) > 0 {
			return fmt.Errorf("load of what was just stored: %d of 8 after %v, %w", got, time.Since(begin), err)
		}
		begin = time.Now()
		if _, err := e.load(sweepKeys(0, 8)); err != nil || time.Since(begin) > time.Minute {
			return fmt.Errorf("load of what only the tier has: %v after %v", err, time.Since(begin))
		}
	}
	time.Sleep(time.Hour)
	s.set.Toggle(false)
	if err := s.settle(e); err != nil {
		return err
	}
	return s.fresh(e)
}
