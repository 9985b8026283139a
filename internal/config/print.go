package config

import (
	"bytes"
	"fmt"
	"reflect"
	"strings"

	"go.yaml.in/yaml/v3"
)

// YAML is the effective configuration as a file that Load would read, each
// value that is not a default with its source as a comment. Secrets that are
// set show as a comment only.
func (c *Config) YAML() []byte {
	root := c.node("", reflect.ValueOf(c).Elem())
	if len(c.Tiers) == 0 {
		root.Content = append(root.Content, scalar("tiers"), &yaml.Node{Kind: yaml.SequenceNode, Style: yaml.FlowStyle, LineComment: string(c.Source("tiers"))})
	} else {
		list := &yaml.Node{Kind: yaml.SequenceNode}
		for i := range c.Tiers {
			prefix, t := fmt.Sprintf("tiers.%d.", i), &c.Tiers[i]
			entry := c.node(prefix, reflect.ValueOf(t).Elem())
			entry.Content = append(entry.Content, c.node(prefix, reflect.ValueOf(t.Settings).Elem()).Content...)
			list.Content = append(list.Content, entry)
		}
		root.Content = append(root.Content, scalar("tiers"), list)
	}
	var b bytes.Buffer
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	if err := enc.Encode(root); err != nil {
		panic(err) // the tree is ours, and the buffer takes everything
	}
	return b.Bytes()
}

func scalar(s string) *yaml.Node {
	n := &yaml.Node{}
	n.SetString(s)
	return n
}

func (c *Config) node(prefix string, v reflect.Value) *yaml.Node {
	m := &yaml.Node{Kind: yaml.MappingNode}
	for i := range v.NumField() {
		f := v.Type().Field(i)
		key := f.Tag.Get("yaml")
		switch f.Type.Kind() {
		case reflect.Slice, reflect.Interface, reflect.Map:
			continue
		case reflect.Struct:
			m.Content = append(m.Content, scalar(key), c.node(prefix+key+".", v.Field(i)))
			continue
		}
		l := leaf{prefix + key, v.Field(i), f.Tag}
		val := &yaml.Node{Kind: yaml.ScalarNode, Value: l.String(), LineComment: string(c.Source(l.path))}
		if f.Type.Kind() == reflect.String {
			val = scalar(l.String())
			val.LineComment = string(c.Source(l.path))
		}
		if l.secret() && !l.v.IsZero() {
			val.SetString("")
			val.LineComment = strings.TrimSpace("set, not shown " + string(c.Source(l.path)))
		}
		m.Content = append(m.Content, scalar(key), val)
	}
	return m
}

// Setting is one row of the reference of settings.
type Setting struct {
	Path, Env, Default, Doc, Allowed string
}

// Reference lists every setting, those of the given types as tiers.TYPE.key.
func Reference(in Input) (out []Setting) {
	add := func(ls []leaf, path func(string) string) {
		for _, l := range ls {
			p := path(l.path)
			s := Setting{Path: p, Env: envName(p), Default: l.String(), Doc: l.tag.Get("doc"), Allowed: l.allowed()}
			if l.secret() {
				s.Default = ""
			}
			out = append(out, s)
		}
	}
	c := defaults(in)
	add(leaves("", reflect.ValueOf(c).Elem()), func(p string) string { return p })
	for _, name := range in.Types.names() {
		t := newTier(name, in.Types[name])
		add(t.leaves(0), func(p string) string { return "tiers." + name + "." + strings.TrimPrefix(p, "tiers.0.") })
	}
	return out
}

func (l leaf) allowed() string {
	low, high, zero := l.tag.Get("min"), l.tag.Get("max"), l.tag.Get("zero")
	var s string
	switch {
	case l.tag.Get("enum") != "":
		s = strings.ReplaceAll(l.tag.Get("enum"), "|", ", ")
	case l.v.Kind() == reflect.Bool:
		s = "true, false"
	case low != "" && high != "":
		s = low + " to " + high
	case low != "":
		s = "from " + low
	}
	if zero != "" {
		s = strings.TrimPrefix(s+", "+zero, ", ")
	}
	return s
}
