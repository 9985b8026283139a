package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/terrace-kv/terrace/internal/lifecycle"
	"github.com/terrace-kv/terrace/internal/node"
)

const (
	headerBytesMax = 16 << 10
	headerTimeout  = 5 * time.Second
	writeTimeout   = 2 * time.Minute // a CPU profile of 30 s fits
	idleTimeout    = time.Minute
	connectionsMax = 64
	pinsDefault    = 1000
	pinsMax        = 10000
	pauseDefault   = time.Second
	pauseMax       = time.Minute
)

// Node is what the server needs of the node. Its methods may be called at any
// time, in every state of the node.
type Node interface {
	Status() node.Status
	Pins(limit int) []node.Pin // the oldest first, at most limit of them
	// Loops tells the state of the node's loops. It never waits, not even for a
	// node that is stuck.
	Loops() []lifecycle.LoopState
	Verify(pauseMax time.Duration) node.VerifyReport
}

// Options of a server.
type Options struct {
	Listen string               // host:port; port 0 takes a free one
	Set    prometheus.Collector // what the node observes; may be nil
	Logger *slog.Logger
}

// Server is an open admin server.
type Server struct {
	http     *http.Server
	listener net.Listener
	node     atomic.Pointer[Node]
	wg       sync.WaitGroup
	checking sync.Mutex // held by the one check that may run
}

// Open listens and serves. An address that is taken is an error that names the
// setting, and who has it if that can be seen.
func Open(o Options) (*Server, error) {
	l, err := net.Listen("tcp", o.Listen)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("admin.listen: %s is taken%s; stop that, or set admin.listen to another port, 0 for any: %w", o.Listen, Holder(o.Listen), syscall.EADDRINUSE)
	}
	if err != nil {
		return nil, fmt.Errorf("admin.listen: cannot listen on %s: %w", o.Listen, err)
	}
	s := &Server{listener: l}
	s.http = &http.Server{
		Handler:           failStop(s.guard(s.routes(o))),
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       headerTimeout,
		WriteTimeout:      writeTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    headerBytesMax,
		ErrorLog:          slog.NewLogLogger(o.Logger.Handler(), slog.LevelDebug), // peers that hang up are their own affair
	}
	s.wg.Go(func() {
		if err := s.http.Serve(&limited{l, make(chan struct{}, connectionsMax)}); !errors.Is(err, http.ErrServerClosed) {
			o.Logger.Error("admin server has ended", "setting", "admin.listen", "err", err)
		}
	})
	return s, nil
}

// Attach makes the node known. Until then it shows as opening.
func (s *Server) Attach(n Node) { s.node.Store(&n) }

// URL is where the server is, with the port that it got.
func (s *Server) URL() string { return "http://" + s.listener.Addr().String() }

// Close answers what has begun, as long as ctx lasts, and ends the rest.
func (s *Server) Close(ctx context.Context) error {
	err := s.http.Shutdown(ctx)
	if err != nil {
		err = errors.Join(fmt.Errorf("admin server: %w", err), s.http.Close())
	}
	s.wg.Wait()
	return err
}

// routes is the one list of pages.
func (s *Server) routes(o Options) *http.ServeMux {
	reg := prometheus.NewRegistry()
	reg.MustRegister(&collector{s.status}, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	if o.Set != nil {
		reg.MustRegister(o.Set)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "terrace\n\n/healthz\n/readyz\n/v1/status\n/v1/pins\n/v1/verify (POST)\n/metrics\n/debug/pprof/\n")
	})
	mux.HandleFunc("GET /healthz", s.healthz)
	mux.HandleFunc("GET /readyz", s.readyz)
	mux.HandleFunc("GET /v1/status", func(w http.ResponseWriter, _ *http.Request) { reply(w, http.StatusOK, s.status()) })
	mux.HandleFunc("GET /v1/pins", s.pins)
	mux.HandleFunc("POST /v1/verify", s.verify)
	mux.Handle("GET /metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{MaxRequestsInFlight: 4, ErrorLog: slog.NewLogLogger(o.Logger.Handler(), slog.LevelWarn)}))
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return mux
}

func (s *Server) status() node.Status {
	if n := s.node.Load(); n != nil {
		return (*n).Status()
	}
	return node.Status{State: "opening", Missing: []string{"node: opening"}}
}

// down says which loops of the node are, without asking the node itself, which
// may not answer then.
func (s *Server) down() (out []string) {
	n := s.node.Load()
	if n == nil {
		return nil
	}
	for _, l := range (*n).Loops() {
		if l.Down != "" {
			out = append(out, "loop "+l.Name+" "+l.Down)
		}
	}
	return out
}

// healthz asks the node, so that a node that is stuck does not answer.
func (s *Server) healthz(w http.ResponseWriter, _ *http.Request) {
	if down := s.down(); down != nil {
		reply(w, http.StatusServiceUnavailable, map[string]any{"state": "stuck", "down": down})
		return
	}
	if st := s.status(); st.State == "closed" {
		reply(w, http.StatusServiceUnavailable, map[string]string{"state": st.State})
		return
	}
	fmt.Fprintln(w, "ok")
}

func (s *Server) readyz(w http.ResponseWriter, _ *http.Request) {
	st, code := node.Status{State: "stuck", Missing: s.down()}, http.StatusOK
	if st.Missing == nil {
		st = s.status()
	}
	if !st.Ready {
		code = http.StatusServiceUnavailable
	}
	reply(w, code, struct {
		Ready   bool     `json:"ready"`
		State   string   `json:"state"`
		Missing []string `json:"missing"`
	}{st.Ready, st.State, append([]string{}, st.Missing...)})
}

func (s *Server) pins(w http.ResponseWriter, r *http.Request) {
	limit := pinsDefault
	if text := r.URL.Query().Get("limit"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > pinsMax {
			reply(w, http.StatusBadRequest, map[string]string{"error": fmt.Sprintf("limit is %q; write a number from 1 to %d", text, pinsMax)})
			return
		}
		limit = n
	}
	pins := []node.Pin{}
	if n := s.node.Load(); n != nil {
		pins = append(pins, (*n).Pins(limit+1)...)
	}
	more := len(pins) > limit
	reply(w, http.StatusOK, struct {
		Pins []node.Pin `json:"pins"`
		More bool       `json:"more"` // there are others, beyond the limit
	}{pins[:min(limit, len(pins))], more})
}

// verify has the node check itself, which holds up its calls. So nobody gets it
// by following a link, and a page elsewhere cannot make a browser ask for it:
// browsers say with each POST where it comes from.
func (s *Server) verify(w http.ResponseWriter, r *http.Request) {
	refuse := func(code int, format string, args ...any) {
		reply(w, code, map[string]string{"error": fmt.Sprintf(format, args...)})
	}
	pause := pauseDefault
	if text := r.URL.Query().Get("pause"); text != "" {
		d, err := time.ParseDuration(text)
		if err != nil || d <= 0 || d > pauseMax {
			refuse(http.StatusBadRequest, "pause is %q; write a time up to %s, such as %s", text, pauseMax, pauseDefault)
			return
		}
		pause = d
	}
	n := s.node.Load()
	switch {
	case r.Header.Get("Origin") != "":
		refuse(http.StatusForbidden, "this is not for web pages")
	case n == nil:
		refuse(http.StatusServiceUnavailable, "the node is opening")
	case !s.checking.TryLock():
		refuse(http.StatusConflict, "another check is under way; ask again when it is over")
	default:
		defer s.checking.Unlock()
		reply(w, http.StatusOK, (*n).Verify(pause))
	}
}

func reply(w http.ResponseWriter, code int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(code)
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	_ = enc.Encode(body) // an error is the peer's, who has gone
}

// guard refuses calls that a web page elsewhere makes a browser send here: such
// a page can point a name of its own at a loopback address, but not hide it.
func (s *Server) guard(next http.Handler) http.Handler {
	addr, ok := s.listener.Addr().(*net.TCPAddr)
	if !ok || !addr.IP.IsLoopback() {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host := r.Host
		if h, _, err := net.SplitHostPort(host); err == nil {
			host = h
		}
		if _, err := netip.ParseAddr(trimBrackets(host)); err != nil && host != "localhost" {
			reply(w, http.StatusMisdirectedRequest, map[string]string{"error": "use localhost or an address as host"})
			return
		}
		next.ServeHTTP(w, r)
	})
}

// failStop ends the process when a page panics. net/http would recover, and a
// lock of the node that the page had taken would stay taken.
func failStop(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer lifecycle.FailStop("admin server: " + r.URL.Path)
		next.ServeHTTP(w, r)
	})
}

func trimBrackets(host string) string {
	if n := len(host); n > 2 && host[0] == '[' && host[n-1] == ']' {
		return host[1 : n-1]
	}
	return host
}

// limited keeps cap(slots) connections open at most and closes those beyond, so
// that nobody fills the node's descriptor table.
type limited struct {
	net.Listener
	slots chan struct{}
}

func (l *limited) Accept() (net.Conn, error) {
	// A slot is taken after Accept, so that closing the listener always ends
	// this call; the one connection too many is closed at once.
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		select {
		case l.slots <- struct{}{}:
			return &counted{Conn: c, release: sync.OnceFunc(func() { <-l.slots })}, nil
		default:
			_ = c.Close()
		}
	}
}

type counted struct {
	net.Conn
	release func()
}

func (c *counted) Close() error {
	err := c.Conn.Close()
	c.release()
	return err
}
