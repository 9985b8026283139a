package sessions

import (
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"
)

// A test binary with these is a victim in a process of its own. Not with
// TERRACE_: those are settings.
const (
	stateEnv  = "SESSIONS_STATE"
	socketEnv = "SESSIONS_SOCKET"
)

func TestMain(m *testing.M) {
	if name := os.Getenv(stateEnv); name != "" {
		enterMain(os.Getenv(socketEnv), name)
		return
	}
	goleak.VerifyTestMain(m)
}

// row has what an engine in one state is answered, by action: one word a call,
// as victim.do says it, or one a slot or lease with commas between. Where time
// decides, both answers stand there, with a bar between.
type row map[string]string

// TestTableIsComplete fails for each pair of state and action that the table
// says nothing of, and for each that is not one.
func TestTableIsComplete(t *testing.T) {
	for _, s := range states {
		for _, a := range actions {
			if table[s.name][a.name] == "" {
				t.Errorf("%s, %s: no cell", s.name, a.name)
			}
		}
	}
	for s, cells := range table {
		if stateIndex(s) < 0 {
			t.Errorf("%q is no state", s)
		}
		for a := range cells {
			if actionIndex(a) < 0 {
				t.Errorf("%s: %q is no action", s, a)
			}
		}
	}
}

// TestEveryActionInEveryState walks the table. One cell alone:
//
//	go test ./test/sessions -run 'TestEveryActionInEveryState/reserved/dies$'
func TestEveryActionInEveryState(t *testing.T) {
	// What the process opens once and keeps: for polling, and for children.
	for _, action := range []string{"dies", "killed"} {
		a := &actions[actionIndex(action)]
		t.Run("first/"+a.name, func(t *testing.T) { walk(t, &states[0], a, table[states[0].name][a.name]) })
	}
	descriptors := openDescriptors(t)
	// More than cores at once: most of a cell is waiting.
	var wg sync.WaitGroup
	places := make(chan struct{}, 2+2*runtime.GOMAXPROCS(0))
	for i := range states {
		for j := range actions {
			places <- struct{}{}
			wg.Go(func() {
				defer func() { <-places }()
				t.Run(states[i].name+"/"+actions[j].name, func(t *testing.T) {
					walk(t, &states[i], &actions[j], table[states[i].name][actions[j].name])
				})
			})
		}
	}
	wg.Wait()
	if err := until("descriptors are closed", func() bool { return len(openDescriptors(t)) <= len(descriptors) }); err != nil {
		t.Errorf("%v: %v are open, were %v", err, openDescriptors(t), descriptors)
	}
}

// openDescriptors tells where each leads.
func openDescriptors(t *testing.T) (out []string) {
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range d {
		to, _ := os.Readlink("/proc/self/fd/" + e.Name())
		out = append(out, e.Name()+" "+to)
	}
	return out
}

// walk is one cell.
func walk(t *testing.T, s *state, a *action, want string) {
	r := open(t, s, a)
	defer r.close()
	release := sync.OnceFunc(func() { close(r.gate) })
	defer release()

	v := &victim{}
	if a.name == "killed" {
		cmd := r.child()
		if s.after != nil {
			r.check(s.after(r))
		}
		r.check(cmd.Process.Kill())
		_ = cmd.Wait()
		v.say(r.left(want))
	} else {
		var err error
		v, err = dial(r.path, s.blockBytes())
		r.check(err)
		defer v.close()
		r.check(s.enterBy(v))
		if s.after != nil {
			r.check(s.after(r))
		}
		a.do(r, v, want)
		if w := v.worker; w != nil && v.over {
			// It learns of the end of its engine's session from that of its connection.
			v.say("worker " + w.end())
		}
	}
	r.served()
	r.own()
	release()
	if v.waiting != 0 && !v.over {
		// Whatever has happened, the call that waits is answered.
		v.say("then " + v.wait(v.waiting, &anything{}))
	}
	v.said = slices.DeleteFunc(v.said, func(w string) bool { return w == "" }) // calls after the end
	if got := strings.Join(v.said, " "); !slices.Contains(strings.Split(want, " | "), got) {
		t.Errorf("is answered %q, want %q", got, want)
	}
	if !r.drained {
		r.recovered()
	}
	if a.name != "killed" {
		v.close()
	}
	r.end()
}

var table = map[string]row{
	"connected": {
		"dies":                           "gone, jobs 0, quarantined 0",
		"killed":                         "gone, jobs 0, quarantined 0",
		"leaves":                         "malformed end",
		"hangs":                          "end",
		"floods":                         "malformed end",
		"garbles":                        "malformed end",
		"greets again":                   "ok",
		"reuses a finished id":           "malformed end",
		"reuses its id":                  "malformed end",
		"finishes twice":                 "malformed end",
		"commits what it never reserved": "malformed end",
		"commits twice":                  "malformed end",
		"commits late":                   "malformed end",
		"aborts what is committed":       "malformed end",
		"unpins what it does not hold":   "malformed end",
		"unpins twice":                   "malformed end",
		"resets":                         "malformed end",
	},
	"greeted": {
		"dies":                           "gone, jobs 0, quarantined 0",
		"killed":                         "gone, jobs 0, quarantined 0",
		"leaves":                         "ok end",
		"hangs":                          "ok",
		"floods":                         "slow_reader end",
		"garbles":                        "malformed end",
		"greets again":                   "invalid",
		"reuses a finished id":           "ok",
		"reuses its id":                  "ok",
		"finishes twice":                 "no_request no_request",
		"commits what it never reserved": "no_request",
		"commits twice":                  "no_request no_request no_request",
		"commits late":                   "no_request no_request",
		"aborts what is committed":       "no_request no_request no_request",
		"unpins what it does not hold":   "no_request",
		"unpins twice":                   "no_request no_request no_request",
		"resets":                         "ok no_request no_request no_request no_request",
	},
	"new": {
		"dies":                           "gone, jobs 0, quarantined 0",
		"killed":                         "gone, jobs 0, quarantined 0",
		"leaves":                         "ok end",
		"hangs":                          "ok",
		"floods":                         "slow_reader end",
		"garbles":                        "malformed end",
		"greets again":                   "invalid",
		"reuses a finished id":           "ok",
		"reuses its id":                  "conflict",
		"finishes twice":                 "ok no_request",
		"commits what it never reserved": "stale,stale",
		"commits twice":                  "granted,granted ok,ok stale,stale",
		"commits late":                   "granted,granted dropped,dropped",
		"aborts what is committed":       "granted,granted ok,ok stale,stale",
		"unpins what it does not hold":   "stale,stale",
		"unpins twice":                   "pinned,pinned ok,ok stale,stale",
		"resets":                         "ok hit_pending,hit_pending none none ok",
	},
	"answered": {
		"dies":                           "gone, jobs 0, quarantined 0",
		"killed":                         "gone, jobs 0, quarantined 0",
		"leaves":                         "ok end",
		"hangs":                          "ok",
		"floods":                         "slow_reader end",
		"garbles":                        "malformed end",
		"greets again":                   "invalid",
		"reuses a finished id":           "ok",
		"reuses its id":                  "conflict",
		"finishes twice":                 "ok no_request",
		"commits what it never reserved": "stale,stale",
		"commits twice":                  "granted,granted ok,ok stale,stale",
		"commits late":                   "granted,granted dropped,dropped",
		"aborts what is committed":       "granted,granted ok,ok stale,stale",
		"unpins what it does not hold":   "stale,stale",
		"unpins twice":                   "ok,ok stale,stale",
		"resets":                         "ok hit_pending,hit_pending none ok,ok ok",
	},
	"promoting": {
		"dies":                           "gone, jobs 1, quarantined 0",
		"killed":                         "gone, jobs 1, quarantined 0",
		"leaves":                         "ok end",
		"hangs":                          "ok then ok",
		"floods":                         "slow_reader end",
		"garbles":                        "malformed end",
		"greets again":                   "invalid then ok",
		"reuses a finished id":           "ok then ok",
		"reuses its id":                  "conflict then ok",
		"finishes twice":                 "ok no_request then overtaken",
		"commits what it never reserved": "stale,stale then ok",
		"commits twice":                  "granted,granted ok,ok stale,stale then ok",
		"commits late":                   "granted,granted dropped,dropped then ok",
		"aborts what is committed":       "granted,granted ok,ok stale,stale then ok",
		"unpins what it does not hold":   "stale,stale then ok",
		"unpins twice":                   "pinned,pinned ok,ok stale,stale then ok",
		"resets":                         "not_done hit_pending,hit_pending none none ok then overtaken",
	},
	"probing": {
		"dies":                           "gone, jobs 1, quarantined 0",
		"killed":                         "gone, jobs 1, quarantined 0",
		"leaves":                         "ok end",
		"hangs":                          "ok then ok",
		"floods":                         "slow_reader end",
		"garbles":                        "malformed end",
		"greets again":                   "invalid then ok",
		"reuses a finished id":           "ok then ok",
		"reuses its id":                  "conflict then ok",
		"finishes twice":                 "ok no_request then overtaken",
		"commits what it never reserved": "stale,stale then ok",
		"commits twice":                  "granted,granted ok,ok stale,stale then ok",
		"commits late":                   "granted,granted dropped,dropped then ok",
		"aborts what is committed":       "granted,granted ok,ok stale,stale then ok",
		"unpins what it does not hold":   "stale,stale then ok",
		"unpins twice":                   "pinned,pinned ok,ok stale,stale then ok",
		"resets":                         "ok hit_pending,hit_pending none none ok then overtaken",
	},
	"reserved": {
		"dies":                           "gone, jobs 0, quarantined 2",
		"killed":                         "gone, jobs 0, quarantined 0",
		"leaves":                         "ok end",
		"hangs":                          "ok",
		"floods":                         "slow_reader end",
		"garbles":                        "malformed end",
		"greets again":                   "invalid",
		"reuses a finished id":           "ok",
		"reuses its id":                  "conflict",
		"finishes twice":                 "ok finished",
		"commits what it never reserved": "stale,stale",
		"commits twice":                  "granted,granted ok,ok,ok,ok stale,stale,stale,stale",
		"commits late":                   "granted,granted dropped,dropped,dropped,dropped",
		"aborts what is committed":       "granted,granted ok,ok,ok,ok stale,stale,stale,stale",
		"unpins what it does not hold":   "stale,stale",
		"unpins twice":                   "pinned,pinned ok,ok stale,stale",
		"resets":                         "ok hit_pending,hit_pending dropped,dropped none ok",
	},
	"expired": {
		"dies":                           "gone, jobs 0, quarantined 2",
		"killed":                         "gone, jobs 0, quarantined 0",
		"leaves":                         "ok end",
		"hangs":                          "ok",
		"floods":                         "slow_reader end",
		"garbles":                        "malformed end",
		"greets again":                   "invalid",
		"reuses a finished id":           "ok",
		"reuses its id":                  "conflict",
		"finishes twice":                 "ok finished",
		"commits what it never reserved": "stale,stale",
		"commits twice":                  "granted,granted dropped,dropped,ok,ok stale,stale,stale,stale",
		"commits late":                   "granted,granted dropped,dropped,dropped,dropped",
		"aborts what is committed":       "granted,granted dropped,dropped,ok,ok stale,stale,stale,stale",
		"unpins what it does not hold":   "stale,stale",
		"unpins twice":                   "pinned,pinned ok,ok stale,stale",
		"resets":                         "ok hit_pending,hit_pending dropped,dropped none ok",
	},
	"summing": {
		"dies":                           "gone, jobs 0, quarantined 0",
		"killed":                         "gone, jobs 0, quarantined 0",
		"leaves":                         "ok end",
		"hangs":                          "ok",
		"floods":                         "slow_reader end",
		"garbles":                        "malformed end",
		"greets again":                   "invalid",
		"reuses a finished id":           "ok",
		"reuses its id":                  "conflict",
		"finishes twice":                 "ok finished | ok no_request",
		"commits what it never reserved": "stale,stale",
		"commits twice":                  "granted,granted ok,ok stale,stale",
		"commits late":                   "granted,granted dropped,dropped",
		"aborts what is committed":       "granted,granted ok,ok stale,stale",
		"unpins what it does not hold":   "stale,stale",
		"unpins twice":                   "no,no none none",
		"resets":                         "ok miss_absent,miss_absent none none ok",
	},
	"cascading": {
		"dies":                           "gone, jobs 1, quarantined 0",
		"killed":                         "gone, jobs 1, quarantined 0",
		"leaves":                         "ok end",
		"hangs":                          "ok",
		"floods":                         "slow_reader end",
		"garbles":                        "malformed end",
		"greets again":                   "invalid",
		"reuses a finished id":           "ok",
		"reuses its id":                  "conflict",
		"finishes twice":                 "ok no_request",
		"commits what it never reserved": "stale,stale",
		"commits twice":                  "granted,granted ok,ok stale,stale",
		"commits late":                   "granted,granted dropped,dropped",
		"aborts what is committed":       "granted,granted ok,ok stale,stale",
		"unpins what it does not hold":   "stale,stale",
		"unpins twice":                   "pinned,pinned ok,ok stale,stale",
		"resets":                         "not_done hit_pending,hit_pending none none ok",
	},
	"crediting": {
		"dies":                           "gone, jobs 0, quarantined 0",
		"killed":                         "gone, jobs 0, quarantined 0",
		"leaves":                         "ok end",
		"hangs":                          "ok",
		"floods":                         "slow_reader end",
		"garbles":                        "malformed end",
		"greets again":                   "invalid",
		"reuses a finished id":           "ok",
		"reuses its id":                  "conflict",
		"finishes twice":                 "ok no_request",
		"commits what it never reserved": "stale,stale",
		"commits twice":                  "granted,granted ok,ok stale,stale",
		"commits late":                   "granted,granted dropped,dropped",
		"aborts what is committed":       "granted,granted ok,ok stale,stale",
		"unpins what it does not hold":   "stale,stale",
		"unpins twice":                   "pinned,pinned ok,ok stale,stale",
		"resets":                         "not_done hit_pending,hit_pending none none ok",
	},
	"flushing": {
		"dies":                           "gone, jobs 1, quarantined 0",
		"killed":                         "gone, jobs 1, quarantined 0",
		"leaves":                         "ok end",
		"hangs":                          "ok then ok",
		"floods":                         "slow_reader end",
		"garbles":                        "malformed end",
		"greets again":                   "invalid then ok",
		"reuses a finished id":           "ok then ok",
		"reuses its id":                  "conflict then ok",
		"finishes twice":                 "ok no_request then ok",
		"commits what it never reserved": "stale,stale then ok",
		"commits twice":                  "granted,granted ok,ok stale,stale then ok",
		"commits late":                   "granted,granted dropped,dropped then ok",
		"aborts what is committed":       "granted,granted ok,ok stale,stale then ok",
		"unpins what it does not hold":   "stale,stale then ok",
		"unpins twice":                   "pinned,pinned ok,ok stale,stale then ok",
		"resets":                         "not_done hit_pending,hit_pending none none ok then ok",
	},
	"resetting": {
		"dies":                           "gone, jobs 1, quarantined 7",
		"killed":                         "gone, jobs 1, quarantined 5",
		"leaves":                         "ok end",
		"hangs":                          "ok then ok",
		"floods":                         "slow_reader end",
		"garbles":                        "malformed end",
		"greets again":                   "invalid then ok",
		"reuses a finished id":           "ok then ok",
		"reuses its id":                  "conflict then ok",
		"finishes twice":                 "ok finished then ok",
		"commits what it never reserved": "stale,stale then ok",
		"commits twice":                  "granted,granted dropped,dropped,ok,ok stale,stale,stale,stale then ok",
		"commits late":                   "granted,granted dropped,dropped,dropped,dropped then ok",
		"aborts what is committed":       "granted,granted dropped,dropped,ok,ok stale,stale,stale,stale then ok",
		"unpins what it does not hold":   "stale,stale then ok",
		"unpins twice":                   "no,no none none then ok",
		"resets":                         "still_pending hit_pending,hit_pending dropped,dropped none ok then ok",
	},
	"finishing": {
		"dies":                           "gone, jobs 1, quarantined 2",
		"killed":                         "gone, jobs 1, quarantined 0",
		"leaves":                         "ok end",
		"hangs":                          "ok",
		"floods":                         "slow_reader end",
		"garbles":                        "malformed end",
		"greets again":                   "invalid",
		"reuses a finished id":           "ok",
		"reuses its id":                  "ok",
		"finishes twice":                 "finished finished",
		"commits what it never reserved": "stale,stale",
		"commits twice":                  "finished ok,ok no_request",
		"commits late":                   "finished dropped,dropped",
		"aborts what is committed":       "finished ok,ok no_request",
		"unpins what it does not hold":   "stale,stale",
		"unpins twice":                   "finished none none",
		"resets":                         "not_done finished dropped,dropped no_request no_request",
	},
	"finished": {
		"dies":                           "gone, jobs 0, quarantined 0",
		"killed":                         "gone, jobs 0, quarantined 0",
		"leaves":                         "ok end",
		"hangs":                          "ok",
		"floods":                         "slow_reader end",
		"garbles":                        "malformed end",
		"greets again":                   "invalid",
		"reuses a finished id":           "ok",
		"reuses its id":                  "ok",
		"finishes twice":                 "no_request no_request",
		"commits what it never reserved": "no_request",
		"commits twice":                  "no_request no_request no_request",
		"commits late":                   "no_request no_request",
		"aborts what is committed":       "no_request no_request no_request",
		"unpins what it does not hold":   "no_request",
		"unpins twice":                   "no_request no_request",
		"resets":                         "ok no_request no_request no_request no_request",
	},
	"handover": {
		"dies":                           "gone, jobs 0, quarantined 0",
		"killed":                         "gone, jobs 0, quarantined 0",
		"leaves":                         "ok end",
		"hangs":                          "ok",
		"floods":                         "slow_reader end",
		"garbles":                        "malformed end",
		"greets again":                   "invalid",
		"reuses a finished id":           "ok",
		"reuses its id":                  "ok",
		"finishes twice":                 "no_request no_request",
		"commits what it never reserved": "no_request",
		"commits twice":                  "no_request no_request no_request",
		"commits late":                   "no_request no_request",
		"aborts what is committed":       "no_request no_request no_request",
		"unpins what it does not hold":   "no_request",
		"unpins twice":                   "no_request no_request",
		"resets":                         "ok no_request no_request no_request no_request",
	},
	"attached": {
		"dies":                           "gone, jobs 0, quarantined 2 worker end",
		"killed":                         "gone, jobs 0, quarantined 0",
		"leaves":                         "ok end worker end",
		"hangs":                          "ok",
		"floods":                         "slow_reader end worker end",
		"garbles":                        "malformed end worker end",
		"greets again":                   "invalid",
		"reuses a finished id":           "ok",
		"reuses its id":                  "conflict",
		"finishes twice":                 "ok finished",
		"commits what it never reserved": "stale,stale",
		"commits twice":                  "granted,granted ok,ok,ok,ok stale,stale,stale,stale",
		"commits late":                   "granted,granted dropped,dropped,dropped,dropped",
		"aborts what is committed":       "granted,granted ok,ok,ok,ok stale,stale,stale,stale",
		"unpins what it does not hold":   "stale,stale",
		"unpins twice":                   "pinned,pinned ok,ok stale,stale",
		"resets":                         "ok hit_pending,hit_pending dropped,dropped none ok",
	},
	"draining": {
		"dies":                           "gone, jobs 0, quarantined 2",
		"killed":                         "gone, jobs 0, quarantined 0",
		"leaves":                         "ok end",
		"hangs":                          "ok",
		"floods":                         "slow_reader end",
		"garbles":                        "malformed end",
		"greets again":                   "invalid",
		"reuses a finished id":           "draining",
		"reuses its id":                  "conflict",
		"finishes twice":                 "ok finished",
		"commits what it never reserved": "stale,stale",
		"commits twice":                  "draining ok,ok stale,stale",
		"commits late":                   "draining dropped,dropped",
		"aborts what is committed":       "draining ok,ok stale,stale",
		"unpins what it does not hold":   "stale,stale",
		"unpins twice":                   "ok,ok stale,stale",
		"resets":                         "ok miss_draining,miss_draining dropped,dropped ok,ok ok",
	},
}
