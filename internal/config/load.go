package config

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// EnvPrefix begins the name of every variable that sets something.
const EnvPrefix = "TERRACE_"

// Variables with our prefix that are no settings: the file to read, and the
// folder of traces that tests look for.
const (
	EnvConfig   = "TERRACE_CONFIG"
	envTestdata = "TERRACE_TESTDATA"
)

const (
	fileBytesMax = 1 << 20
	tiersMax     = 16
)

// Assignment is a flag that was given: it sets the setting at Path. The path
// tiers.SEL.KEY has a tier's index, name or type as SEL: the type adds a tier
// of that type when there is none. tiers.SEL alone with the value "none" takes
// that tier, if there is one, out.
type Assignment struct {
	Path   string
	Value  string
	Source Source // the flag, such as "--primary"
}

// Input is what Load merges.
type Input struct {
	Socket       string // default of socket
	SocketErr    error  // why there is none; a fault only when nobody sets socket
	Types        Types
	DefaultTiers []string // types of the tiers when nobody gives any

	File  string   // the YAML file; empty: what TERRACE_CONFIG says, or none
	Env   []string // as os.Environ gives it; names without EnvPrefix are ignored
	Flags []Assignment
}

// Load merges all sources and checks the result. Its error is Faults.
func Load(in Input) (*Config, error) {
	l := loader{in: in, types: in.Types, cfg: defaults(in)}
	file, env := in.File, map[string]string{}
	for _, kv := range in.Env {
		if k, v, ok := strings.Cut(kv, "="); ok && strings.HasPrefix(k, EnvPrefix) && k != envTestdata {
			env[k] = v
		}
	}
	if file == "" {
		file = env[EnvConfig]
	}
	delete(env, EnvConfig)
	if file != "" {
		l.file(file)
	}
	l.env(env)
	for _, a := range in.Flags {
		l.assign(a.Path, a.Value, a.Source)
	}
	l.validate()
	if len(l.faults) > 0 {
		return nil, l.faults
	}
	return l.cfg, nil
}

func defaults(in Input) *Config {
	c := &Config{
		Socket:       in.Socket,
		Primary:      Primary{Size: 1 << 30, Policy: "lru", Populate: "background"},
		Admin:        Admin{Listen: "127.0.0.1:9180"},
		Log:          Log{Level: "info", Format: "text"},
		DrainTimeout: 30 * time.Second,
		Core: Core{
			LookupTimeout: 10 * time.Second, ProbeTimeout: 2 * time.Second, PromoteTimeout: 10 * time.Second,
			CascadeTimeout: time.Minute, ReservationTimeout: time.Minute, DistrustFor: 10 * time.Second,
			UnboundStoreTimeout: time.Minute, ReservePercent: 10, OverduePercent: 10, FactFor: 2 * time.Second,
		},
		Limits: Limits{Sessions: 256, Workers: 64, Requests: 1 << 16, Waits: 1024, Facts: 1 << 16},
		Peers: Peers{Transport: "tcp", DataConnections: 2, Quota: "25%", LookupsPerSec: 1000, Sessions: 256, Addresses: 1024, Parked: 256, Timeouts: PeerTimeouts{
			Connect: 2 * time.Second, Lookup: 2 * time.Second, Load: 30 * time.Second, Prefill: time.Minute, Abort: 5 * time.Second,
			Hit: 10 * time.Second, Park: 30 * time.Second, Idle: 5 * time.Minute, Heartbeat: time.Second, Misses: 5}},
		sources: map[string]Source{},
	}
	for _, name := range in.DefaultTiers {
		c.Tiers = append(c.Tiers, newTier(name, in.Types[name]))
	}
	return c
}

type loader struct {
	in     Input
	cfg    *Config
	types  Types
	faults Faults
}

func (l *loader) fault(field, value string, src Source, format string, args ...any) {
	if value != "" {
		value = strconv.Quote(value)
	}
	l.faults = append(l.faults, Fault{field, value, src, fmt.Sprintf(format, args...)})
}

// set gives one setting its value, or adds a fault.
func (l *loader) set(lf leaf, text string, src Source) {
	if err := lf.set(text); err != nil {
		if lf.secret() {
			text = ""
		}
		l.fault(lf.path, text, src, "%v", err)
		return
	}
	l.cfg.sources[lf.path] = src
}

// leaves of everything, tiers included.
func (c *Config) leaves() []leaf {
	out := leaves("", reflect.ValueOf(c).Elem())
	for i := range c.Tiers {
		out = append(out, c.Tiers[i].leaves(i)...)
	}
	return out
}

func (t *Tier) leaves(index int) []leaf {
	prefix := fmt.Sprintf("tiers.%d.", index)
	return append(leaves(prefix, reflect.ValueOf(t).Elem()), leaves(prefix, reflect.ValueOf(t.Settings).Elem())...)
}

func paths(ls []leaf) (out []string) {
	for _, l := range ls {
		out = append(out, l.path)
	}
	return out
}

// file merges the YAML file at path.
func (l *loader) file(path string) {
	f, err := os.Open(path)
	if err != nil {
		l.fault("config", path, "", "cannot be read: %v", errors.Unwrap(err))
		return
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, fileBytesMax+1))
	switch {
	case err != nil:
		l.fault("config", path, "", "cannot be read: %v", err)
		return
	case len(text) > fileBytesMax:
		l.fault("config", path, "", "is larger than %s", Size(fileBytesMax))
		return
	}
	dec := yaml.NewDecoder(strings.NewReader(string(text)))
	var doc, more yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return // an empty file
	case err != nil:
		l.fault("config", path, "", "is not YAML: %s", strings.TrimPrefix(err.Error(), "yaml: "))
		return
	}
	l.mapping(filepath.Base(path), "", doc.Content[0], reflect.ValueOf(l.cfg).Elem())
	if err := dec.Decode(&more); !errors.Is(err, io.EOF) {
		l.fault("config", path, "", "has a second document; keep one")
	}
}

// mapping merges a YAML mapping into structs, whose keys it may hold.
func (l *loader) mapping(name, prefix string, n *yaml.Node, into ...reflect.Value) {
	src := func(n *yaml.Node) Source { return Source(fmt.Sprintf("%s:%d", name, n.Line)) }
	if n = deref(n); isNull(n) {
		return // "primary:" and nothing below it
	}
	if n.Kind != yaml.MappingNode {
		l.fault(what(prefix), n.Value, src(n), "is not a mapping; write one setting a line as \"key: value\"")
		return
	}
	type field struct {
		v   reflect.Value
		tag reflect.StructTag
	}
	known := map[string]field{}
	var names []string
	for _, v := range into {
		for i := range v.NumField() {
			if key := v.Type().Field(i).Tag.Get("yaml"); key != "" {
				known[key] = field{v.Field(i), v.Type().Field(i).Tag}
				names = append(names, key)
			}
		}
	}
	seen := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, val := n.Content[i], deref(n.Content[i+1])
		path := prefix + key.Value
		f, ok := known[key.Value]
		if !ok {
			l.fault(path, "", src(key), "%s", unknown(key.Value, names, paths(leaves("", reflect.ValueOf(l.cfg).Elem()))))
			continue
		}
		if line := seen[key.Value]; line > 0 {
			l.fault(path, "", src(key), "is given twice, first in line %d; keep one", line)
			continue
		}
		seen[key.Value] = key.Line
		switch {
		case f.v.Type() == reflect.TypeFor[[]Tier]():
			l.tiers(name, val)
		case f.v.Kind() == reflect.Struct:
			l.mapping(name, path+".", val, f.v)
		case isNull(val):
			l.fault(path, "", src(key), "has no value; give one, or take the line out")
		case val.Kind != yaml.ScalarNode:
			l.fault(path, "", src(key), "has several values; give one")
		default:
			l.set(leaf{path, f.v, f.tag}, val.Value, src(val))
		}
	}
}

// tiers replaces the list of tiers by a YAML one.
func (l *loader) tiers(name string, n *yaml.Node) {
	src := Source(fmt.Sprintf("%s:%d", name, n.Line))
	if n.Kind != yaml.SequenceNode {
		l.fault("tiers", n.Value, src, "is not a list; write one entry a tier as \"- type: %s\", or [] for none", strings.Join(l.types.names(), "|"))
		return
	}
	l.cfg.Tiers = nil
	l.cfg.sources["tiers"] = src
	for _, entry := range n.Content {
		entry = deref(entry)
		prefix := fmt.Sprintf("tiers.%d.", len(l.cfg.Tiers))
		src := Source(fmt.Sprintf("%s:%d", name, entry.Line))
		typ := ""
		for i := 0; entry.Kind == yaml.MappingNode && i+1 < len(entry.Content); i += 2 {
			if entry.Content[i].Value == "type" {
				typ = deref(entry.Content[i+1]).Value
			}
		}
		if l.addTier(prefix+"type", typ, src) {
			t := &l.cfg.Tiers[len(l.cfg.Tiers)-1]
			if a, ok := t.Settings.(Aliaser); ok {
				entry = renamed(entry, a.Aliases())
			}
			l.mapping(name, prefix, entry, reflect.ValueOf(t).Elem(), reflect.ValueOf(t.Settings).Elem())
		}
	}
}

// renamed is a mapping with the names of another system's file replaced by ours.
// A name with a dot is one in a mapping of its own.
func renamed(n *yaml.Node, names map[string]string) *yaml.Node {
	if n.Kind != yaml.MappingNode {
		return n
	}
	out := *n
	out.Content = nil
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, val := n.Content[i], deref(n.Content[i+1])
		inner := map[string]string{}
		for from, to := range names {
			if rest, ok := strings.CutPrefix(from, key.Value+"."); ok {
				inner[rest] = to
			}
		}
		switch to := names[key.Value]; {
		case len(inner) > 0 && val.Kind == yaml.MappingNode:
			out.Content = append(out.Content, renamed(val, inner).Content...)
			continue
		case to != "":
			renamed := *key
			renamed.Value = to
			key = &renamed
		}
		out.Content = append(out.Content, key, n.Content[i+1])
	}
	return &out
}

// addTier appends a tier of the type with its defaults.
func (l *loader) addTier(path, typ string, src Source) bool {
	t, ok := l.types[typ]
	switch {
	case len(l.cfg.Tiers) == tiersMax:
		if path == fmt.Sprintf("tiers.%d.type", tiersMax) { // once is enough
			l.fault("tiers", "", src, "has more than %d entries", tiersMax)
		}
		return false
	case typ == "":
		l.fault(path, "", src, "is missing; known types: %s", strings.Join(l.types.names(), ", "))
		return false
	case !ok:
		l.fault(path, typ, src, "is not a type of tier%s Known types: %s", orStop(DidYouMean(typ, l.types.names())), strings.Join(l.types.names(), ", "))
		return false
	}
	l.cfg.Tiers = append(l.cfg.Tiers, newTier(typ, t))
	l.cfg.sources[path] = src
	return true
}

// env merges variables. One that changes a tier's type comes before the others
// of that tier, which may belong to the new type.
func (l *loader) env(vars map[string]string) {
	order := make([]string, 0, len(vars))
	for name := range vars {
		order = append(order, name)
	}
	slices.SortFunc(order, func(a, b string) int {
		ta, tb := strings.HasSuffix(a, "_TYPE"), strings.HasSuffix(b, "_TYPE")
		if ta != tb {
			if ta {
				return -1
			}
			return 1
		}
		return strings.Compare(a, b)
	})
	if text, ok := vars[EnvPrefix+"TIERS"]; ok {
		var doc yaml.Node
		if err := yaml.Unmarshal([]byte(text), &doc); err != nil || len(doc.Content) == 0 {
			l.fault("tiers", text, EnvPrefix+"TIERS", "is not a YAML list; write [] for none, or set one tier's settings as %sTIERS_0_ROOT does", EnvPrefix)
		} else {
			l.tiers(EnvPrefix+"TIERS", doc.Content[0])
		}
	}
	for _, name := range order {
		if name == EnvPrefix+"TIERS" {
			continue
		}
		if path, ok := l.envPath(name); ok {
			l.assign(path, vars[name], Source(name))
		}
	}
}

func envName(path string) string {
	return EnvPrefix + strings.ToUpper(strings.NewReplacer(".", "_", "-", "_").Replace(path))
}

// envPath finds the setting that a variable means.
func (l *loader) envPath(name string) (path string, ok bool) {
	var names []string
	for _, lf := range l.cfg.leaves() {
		names = append(names, envName(lf.path))
		if envName(lf.path) == name {
			return lf.path, true
		}
	}
	// A tier by its name or type instead of its index, or a tier to be added.
	if rest, isTier := strings.CutPrefix(name, EnvPrefix+"TIERS_"); isTier {
		selectors := append(l.types.names(), strconv.Itoa(len(l.cfg.Tiers)))
		for _, t := range l.cfg.Tiers {
			selectors = append(selectors, t.Name)
		}
		for _, sel := range selectors {
			key, ok := strings.CutPrefix(rest, strings.TrimPrefix(envName(sel), EnvPrefix)+"_")
			if !ok {
				continue
			}
			for _, typ := range l.types.names() {
				t := newTier(typ, l.types[typ])
				for _, lf := range t.leaves(0) {
					if k := strings.TrimPrefix(lf.path, "tiers.0."); strings.TrimPrefix(envName(k), EnvPrefix) == key {
						return "tiers." + sel + "." + k, true
					}
				}
			}
		}
	}
	l.fault(name, "", "environment", "is not a setting%s Variables are %s and a setting's path in capitals, such as %sPRIMARY_SIZE; unset this one or correct it",
		orStop(DidYouMean(name, names)), EnvPrefix, EnvPrefix)
	return "", false
}

func orStop(s string) string {
	if s == "" {
		return "."
	}
	return s
}

// assign sets what path names to the text of a variable or flag.
func (l *loader) assign(path, text string, src Source) {
	if rest, ok := strings.CutPrefix(path, "tiers."); ok {
		sel, key, _ := strings.Cut(rest, ".")
		if key == "" && text == "none" {
			l.cfg.removeTiers(sel)
			l.cfg.sources["tiers"] = src
			return
		}
		i, ok := l.tier(sel, key, text, src)
		if !ok {
			return
		}
		if path = fmt.Sprintf("tiers.%d.%s", i, key); key == "type" {
			return // done by l.tier
		}
	}
	for _, lf := range l.cfg.leaves() {
		if lf.path == path {
			l.set(lf, text, src)
			return
		}
	}
	all := paths(l.cfg.leaves())
	l.fault(path, "", src, "is not a setting%s `terrace config print` shows all", orStop(DidYouMean(path, all)))
}

// tier finds the tier that sel names, adding or changing it if that is what
// the assignment of text to its key asks for.
func (l *loader) tier(sel, key, text string, src Source) (index int, ok bool) {
	tiers := l.cfg.Tiers
	is := func(f func(t Tier) bool) []int {
		var out []int
		for i, t := range tiers {
			if f(t) {
				out = append(out, i)
			}
		}
		return out
	}
	index = -1
	if n, err := strconv.Atoi(sel); err == nil && n >= 0 && n < len(tiers) {
		index = n
	} else if named := is(func(t Tier) bool { return t.Name == sel }); len(named) == 1 {
		index = named[0]
	} else if typed := is(func(t Tier) bool { return t.Type == sel }); len(typed) == 1 {
		index = typed[0]
	} else if len(typed) > 1 {
		l.fault("tiers."+sel, "", src, "could be several tiers; name one by its index or name")
		return 0, false
	}
	path := fmt.Sprintf("tiers.%d.type", len(tiers))
	switch {
	case index >= 0 && key == "type" && text != tiers[index].Type:
		if !l.addTier(fmt.Sprintf("tiers.%d.type", index), text, src) {
			return 0, false
		}
		last := len(l.cfg.Tiers) - 1
		l.cfg.Tiers[index], l.cfg.Tiers = l.cfg.Tiers[last], l.cfg.Tiers[:last]
		l.cfg.forget(index, "type")
		return index, true
	case index >= 0:
		return index, true
	case sel == strconv.Itoa(len(tiers)) && key == "type":
		return len(tiers), l.addTier(path, text, src)
	case l.types[sel].Settings != nil:
		return len(tiers), l.addTier(path, sel, src)
	}
	have := []string{}
	for i, t := range tiers {
		have = append(have, fmt.Sprintf("%d (%s)", i, t.Name))
	}
	if len(have) == 0 {
		have = []string{"none"}
	}
	l.fault("tiers."+sel, "", src, "names no tier; there are: %s. To add one, set tiers.%d.type", strings.Join(have, ", "), len(tiers))
	return 0, false
}

// removeTiers takes out the tiers of that name or type.
func (c *Config) removeTiers(sel string) {
	for i := len(c.Tiers) - 1; i >= 0; i-- {
		if c.Tiers[i].Name != sel && c.Tiers[i].Type != sel {
			continue
		}
		c.forget(i, "")
		for j := i + 1; j < len(c.Tiers); j++ { // those behind move up
			from, to := fmt.Sprintf("tiers.%d.", j), fmt.Sprintf("tiers.%d.", j-1)
			for path, src := range c.sources {
				if key, ok := strings.CutPrefix(path, from); ok {
					delete(c.sources, path)
					c.sources[to+key] = src
				}
			}
		}
		c.Tiers = slices.Delete(c.Tiers, i, i+1)
	}
}

// forget drops the sources of a tier's settings, but for one key's.
func (c *Config) forget(index int, but string) {
	prefix := fmt.Sprintf("tiers.%d.", index)
	for path := range c.sources {
		if key, ok := strings.CutPrefix(path, prefix); ok && key != but {
			delete(c.sources, path)
		}
	}
}

func what(prefix string) string {
	if prefix == "" {
		return "the file"
	}
	return strings.TrimSuffix(prefix, ".")
}

func deref(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }
