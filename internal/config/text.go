package config

import (
	"cmp"
	"fmt"
	"math"
	"math/big"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Size is a number of bytes.
type Size int64

var units = []struct {
	name  string
	bytes int64
}{
	{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10},
	{"TB", 1e12}, {"GB", 1e9}, {"MB", 1e6}, {"kB", 1e3}, {"KB", 1e3}, {"B", 1}, {"", 1},
}

// ParseSize reads a size: plain bytes, or a number with one of the units B, KB,
// MB, GB, TB (powers of 1000) and KiB, MiB, GiB, TiB (powers of 1024).
func ParseSize(text string) (Size, error) {
	number := strings.TrimRight(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
	unit := text[len(number):]
	for _, u := range units {
		if u.name != unit {
			continue
		}
		number = strings.TrimSpace(number)
		r, ok := new(big.Rat).SetString(number)
		if !ok || strings.Trim(number, "0123456789.") != "" || len(number) > 30 {
			break
		}
		r.Mul(r, new(big.Rat).SetInt64(u.bytes))
		if !r.IsInt() {
			return 0, fmt.Errorf("is not a whole number of bytes")
		}
		if !r.Num().IsInt64() {
			return 0, fmt.Errorf("is more than %s", Size(math.MaxInt64))
		}
		return Size(r.Num().Int64()), nil
	}
	return 0, fmt.Errorf("is not a size; write bytes, or a number with a unit such as 512MiB, 1GiB or 10GB")
}

// String is the shortest exact text that ParseSize reads back.
func (s Size) String() string {
	shortest := strconv.FormatInt(int64(s), 10)
	for _, u := range units {
		if s == 0 || int64(s)%u.bytes != 0 {
			continue
		}
		if text := strconv.FormatInt(int64(s)/u.bytes, 10) + u.name; len(text) <= len(shortest) && u.bytes > 1 {
			shortest = text
		}
	}
	return shortest
}

var (
	sizeType     = reflect.TypeFor[Size]()
	durationType = reflect.TypeFor[time.Duration]()
)

// leaf is one setting: a field that holds a value.
type leaf struct {
	path string
	v    reflect.Value
	tag  reflect.StructTag
}

// leaves lists the settings of a struct in the order of its fields, with their
// paths under prefix. Lists are not among them.
func leaves(prefix string, v reflect.Value) (out []leaf) {
	for i := range v.NumField() {
		f := v.Type().Field(i)
		key := f.Tag.Get("yaml")
		switch {
		case key == "" || f.Type.Kind() == reflect.Slice || f.Type.Kind() == reflect.Interface:
		case f.Type.Kind() == reflect.Struct:
			out = append(out, leaves(prefix+key+".", v.Field(i))...)
		default:
			out = append(out, leaf{prefix + key, v.Field(i), f.Tag})
		}
	}
	return out
}

func (l leaf) secret() bool { return l.tag.Get("secret") == "true" }

// String is the value as the file would have it.
func (l leaf) String() string {
	if zero := l.tag.Get("zero"); zero != "" && l.v.IsZero() {
		return zero
	}
	if d, ok := l.v.Interface().(time.Duration); ok {
		return durationText(d)
	}
	return fmt.Sprint(l.v.Interface())
}

// durationText is d without the empty units that String adds: 1m, not 1m0s.
func durationText(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// set parses text into the setting, or says what is wrong with it. On an error
// nothing changes.
func (l leaf) set(text string) error {
	if zero := l.tag.Get("zero"); zero != "" && text == zero {
		l.v.SetZero()
		return nil
	}
	v, err := l.parse(text)
	if err != nil {
		return err
	}
	if zero := l.tag.Get("zero"); zero != "" && v.IsZero() {
		return fmt.Errorf("is not allowed; write %s if you mean that", zero)
	}
	for _, tag := range []string{"min", "max"} {
		bound := l.tag.Get(tag)
		if bound == "" {
			continue
		}
		b, err := l.parse(bound)
		switch {
		case err != nil:
			panic(fmt.Sprintf("config: %s of %s: %v", tag, l.path, err)) // a tag of ours
		case tag == "min" && compare(v, b) < 0:
			return fmt.Errorf("is too small; write %s or more", bound)
		case tag == "max" && compare(v, b) > 0:
			return fmt.Errorf("is too large; write %s or less", bound)
		}
	}
	if enum := l.tag.Get("enum"); enum != "" {
		words := strings.Split(enum, "|")
		if !slices.Contains(words, text) {
			return fmt.Errorf("is not one of %s%s", strings.Join(words, ", "), DidYouMean(text, words))
		}
	}
	l.v.Set(v)
	return nil
}

func (l leaf) parse(text string) (reflect.Value, error) {
	v := reflect.New(l.v.Type()).Elem()
	switch {
	case v.Type() == sizeType:
		s, err := ParseSize(text)
		v.SetInt(int64(s))
		return v, err
	case v.Type() == durationType:
		d, err := time.ParseDuration(text)
		if err != nil {
			return v, fmt.Errorf("is not a duration; write a number with a unit, such as 500ms, 10s or 2m")
		}
		v.SetInt(int64(d))
	case v.Kind() == reflect.String:
		v.SetString(text)
	case v.Kind() == reflect.Bool:
		if text != "true" && text != "false" {
			return v, fmt.Errorf("is neither true nor false")
		}
		v.SetBool(text == "true")
	case v.Kind() == reflect.Int:
		n, err := strconv.Atoi(text)
		if err != nil {
			return v, fmt.Errorf("is not a whole number")
		}
		v.SetInt(int64(n))
	case v.Kind() == reflect.Float64:
		f, err := strconv.ParseFloat(text, 64)
		if err != nil || math.IsNaN(f) {
			return v, fmt.Errorf("is not a number")
		}
		v.SetFloat(f)
	default:
		panic(fmt.Sprintf("config: %s has a kind that no parser is written for: %v", l.path, v.Type()))
	}
	return v, nil
}

func compare(a, b reflect.Value) int {
	if a.CanFloat() {
		return cmp.Compare(a.Float(), b.Float())
	}
	return cmp.Compare(a.Int(), b.Int())
}
