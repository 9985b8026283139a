package vfs

import (
	"bytes"
	"io/fs"
)

// Op is a kind of call, for hooks.
type Op string

// Ops of FS and File.
const (
	OpOpen    Op = "open"
	OpLink    Op = "link"
	OpRename  Op = "rename"
	OpRemove  Op = "remove"
	OpMkdir   Op = "mkdir"
	OpLstat   Op = "lstat"
	OpReadDir Op = "readdir"
	OpSpace   Op = "space"
	OpRead    Op = "read"
	OpWrite   Op = "write"
	OpStat    Op = "stat"
	OpSync    Op = "sync"
	OpTrunc   Op = "truncate"
	OpLock    Op = "lock"
	OpClose   Op = "close" // of a file
)

// Call is what a hook is asked about.
type Call struct {
	Op    Op
	Name  string // the new name, of Link and Rename; "." for Space
	Flags int    // of Open
	Off   int64  // of a read or write; the length, of Truncate
}

// Fault is what becomes of a call. The zero Fault is none.
type Fault struct {
	Wait  <-chan struct{} // the call hangs until it is closed
	Err   error           // the call fails with it, and is not made
	After bool            // with Err: the call is made all the same
	Short int             // > 0: a read or write of more bytes is cut to so many
	Torn  bool            // a write keeps the first Short bytes, and says that it kept all
	Flip  bool            // one bit of what a read gives or a write keeps is turned
}

// Faulty is an FS whose calls a hook may fail. The hook is called from many
// goroutines. Closing the FS is never failed.
type Faulty struct {
	FS
	Hook func(Call) Fault
}

type faultyFile struct {
	File
	name string
	fs   *Faulty
}

// do makes a call under the hook's verdict.
func (f *Faulty) do(c Call, call func(Fault) error) error {
	fault := f.Hook(c)
	if fault.Wait != nil {
		<-fault.Wait
	}
	if fault.Err == nil {
		return call(fault)
	}
	if fault.After {
		_ = call(fault)
	}
	return &fs.PathError{Op: string(c.Op), Path: c.Name, Err: fault.Err}
}

// Open is in FS.
func (f *Faulty) Open(name string, flags int, perm uint32) (file File, err error) {
	err = f.do(Call{Op: OpOpen, Name: name, Flags: flags}, func(Fault) (err error) {
		file, err = f.FS.Open(name, flags, perm)
		return err
	})
	if err != nil {
		if file != nil {
			_ = file.Close()
		}
		return nil, err
	}
	return &faultyFile{file, name, f}, nil
}

// Link is in FS.
func (f *Faulty) Link(file File, name string) error {
	return f.do(Call{Op: OpLink, Name: name}, func(Fault) error { return f.FS.Link(file.(*faultyFile).File, name) })
}

// Rename is in FS.
func (f *Faulty) Rename(from, to string) error {
	return f.do(Call{Op: OpRename, Name: to}, func(Fault) error { return f.FS.Rename(from, to) })
}

// Remove is in FS.
func (f *Faulty) Remove(name string) error {
	return f.do(Call{Op: OpRemove, Name: name}, func(Fault) error { return f.FS.Remove(name) })
}

// Mkdir is in FS.
func (f *Faulty) Mkdir(name string, perm uint32) error {
	return f.do(Call{Op: OpMkdir, Name: name}, func(Fault) error { return f.FS.Mkdir(name, perm) })
}

// Lstat is in FS.
func (f *Faulty) Lstat(name string) (i Info, err error) {
	err = f.do(Call{Op: OpLstat, Name: name}, func(Fault) (err error) {
		i, err = f.FS.Lstat(name)
		return err
	})
	return i, err
}

// ReadDir is in FS.
func (f *Faulty) ReadDir(name string, fn func(string) error) error {
	return f.do(Call{Op: OpReadDir, Name: name}, func(Fault) error { return f.FS.ReadDir(name, fn) })
}

// Space is in FS.
func (f *Faulty) Space() (s Space, err error) {
	err = f.do(Call{Op: OpSpace, Name: "."}, func(Fault) (err error) {
		s, err = f.FS.Space()
		return err
	})
	return s, err
}

func (f *faultyFile) ReadVec(bufs [][]byte, off int64) (n int, err error) {
	err = f.fs.do(Call{Op: OpRead, Name: f.name, Off: off}, func(fault Fault) (err error) {
		n, err = f.File.ReadVec(cut(bufs, fault.Short), off)
		if got := cut(bufs, n); n > 0 && fault.Flip {
			flip(got[len(got)-1])
		}
		return err
	})
	return n, err
}

func (f *faultyFile) WriteVec(bufs [][]byte, off int64) (n int, err error) {
	err = f.fs.do(Call{Op: OpWrite, Name: f.name, Off: off}, func(fault Fault) (err error) {
		if fault.Flip {
			// A copy, whose length keeps it aligned for direct I/O.
			b := bytes.Join(bufs, nil)
			b = append(make([]byte, 0, (len(b)+4095)&^4095), b...)
			flip(b)
			bufs = [][]byte{b}
		}
		if !fault.Torn {
			n, err = f.File.WriteVec(cut(bufs, fault.Short), off)
			return err
		}
		if fault.Short > 0 {
			_, err = f.File.WriteVec(cut(bufs, fault.Short), off)
		}
		if err == nil {
			n = size(bufs)
		}
		return err
	})
	return n, err
}

func flip(b []byte) { b[len(b)/2] ^= 4 }

func size(bufs [][]byte) (n int) {
	for _, b := range bufs {
		n += len(b)
	}
	return n
}

func (f *faultyFile) Stat() (i Info, err error) {
	err = f.fs.do(Call{Op: OpStat, Name: f.name}, func(Fault) (err error) {
		i, err = f.File.Stat()
		return err
	})
	return i, err
}

func (f *faultyFile) Sync() error {
	return f.fs.do(Call{Op: OpSync, Name: f.name}, func(Fault) error { return f.File.Sync() })
}

func (f *faultyFile) Truncate(size int64) error {
	return f.fs.do(Call{Op: OpTrunc, Name: f.name, Off: size}, func(Fault) error { return f.File.Truncate(size) })
}

func (f *faultyFile) Lock() error {
	return f.fs.do(Call{Op: OpLock, Name: f.name}, func(Fault) error { return f.File.Lock() })
}

// Close closes the file whatever it answers, as the kernel does.
func (f *faultyFile) Close() error {
	closed := false
	err := f.fs.do(Call{Op: OpClose, Name: f.name}, func(Fault) error {
		closed = true
		return f.File.Close()
	})
	if !closed {
		_ = f.File.Close()
	}
	return err
}

// cut is the first n bytes of bufs, or all for n <= 0.
func cut(bufs [][]byte, n int) [][]byte {
	if n <= 0 {
		return bufs
	}
	var out [][]byte
	for _, b := range bufs {
		if n == 0 {
			break
		}
		b = b[:min(n, len(b))]
		n -= len(b)
		out = append(out, b)
	}
	return out
}
