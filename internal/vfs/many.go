package vfs

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// Many is an FS that claims to hold Files block files more in the directory
// Dir, which has to exist in FS. It makes up their names and stat results and
// holds nothing, so that 10^7 of them cost no memory: for tests of what an
// index of them costs. They cannot be opened (ENOENT); Remove answers as if it
// had worked, and the next look finds them again.
type Many struct {
	FS           // what is really there
	Dir   string // of a namespace: Dir/hh/<72 hex digits>
	Files int
	Size  int64 // of each, bytes; each is charged the same
}

// Name is the path of the i-th file made up. Files are spread over 256
// directories; one such has every 256th.
func (m *Many) Name(i int) string {
	return fmt.Sprintf("%s/%02x/%s", m.Dir, byte(i), hex.EncodeToString(madeUp(i)))
}

// madeUp is the i-th key: its number, and bits that look like a hash.
func madeUp(i int) []byte {
	var key [36]byte
	for at := range 4 {
		z := (uint64(i)<<2 | uint64(at)) * 0x9e3779b97f4a7c15
		z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
		binary.BigEndian.PutUint64(key[8*at:], z^z>>27)
	}
	key[0] = byte(i)
	binary.BigEndian.PutUint64(key[8:], uint64(i))
	return key[:]
}

// find says which file a path is, or that it is none that was made up.
func (m *Many) find(path string) (int, bool) {
	if len(path) != len(m.Dir)+4+72 || !strings.HasPrefix(path, m.Dir) {
		return 0, false
	}
	var number [8]byte
	at := len(m.Dir) + 4 + 2*8
	if _, err := hex.Decode(number[:], []byte(path[at:at+16])); err != nil {
		return 0, false
	}
	i := int(binary.BigEndian.Uint64(number[:]))
	return i, i >= 0 && i < m.Files && m.Name(i) == path
}

// shard says which directory of made-up files a path is, or -1.
func (m *Many) shard(path string) int {
	for i := range min(m.Files, 256) {
		if len(path) == len(m.Dir)+3 && path == fmt.Sprintf("%s/%02x", m.Dir, i) {
			return i
		}
	}
	return -1
}

// Lstat is in FS.
func (m *Many) Lstat(name string) (Info, error) {
	st, err := m.FS.Lstat(name)
	if err == nil {
		return st, nil
	}
	if i, ok := m.find(name); ok {
		return Info{Mode: unix.S_IFREG | 0o600, Size: m.Size, Bytes: (m.Size + 4095) &^ 4095, Mtime: int64(i) + 1, Ino: 1<<40 + uint64(i), Links: 1}, nil
	}
	if i := m.shard(name); i >= 0 {
		return Info{Mode: unix.S_IFDIR | 0o700, Ino: 1<<39 + uint64(i)}, nil
	}
	return st, err
}

// Remove is in FS.
func (m *Many) Remove(name string) error {
	err := m.FS.Remove(name)
	if _, ok := m.find(name); ok {
		return nil
	}
	return err
}

// ReadDir is in FS.
func (m *Many) ReadDir(name string, fn func(base string) error) error {
	first, step := 0, 256
	if name == m.Dir {
		step = 1
	} else if first = m.shard(name); first < 0 {
		return m.FS.ReadDir(name, fn)
	}
	seen := map[string]bool{} // few: what is really there
	err := m.FS.ReadDir(name, func(base string) error { seen[base] = true; return fn(base) })
	if _, serr := m.FS.Lstat(name); err != nil && serr == nil {
		return err
	}
	for i := first; i < m.Files && (step > 1 || i < 256); i += step {
		base := hex.EncodeToString([]byte{byte(i)})
		if step > 1 {
			base = hex.EncodeToString(madeUp(i))
		}
		if seen[base] {
			continue
		}
		if err := fn(base); err != nil {
			return err
		}
	}
	return nil
}
