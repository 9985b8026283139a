package fstier

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/minio/crc64nvme"
	"golang.org/x/sys/unix"

	"github.com/terrace-kv/terrace/block"
	"github.com/terrace-kv/terrace/internal/blockhead"
	"github.com/terrace-kv/terrace/internal/vfs"
	"github.com/terrace-kv/terrace/tier"
)

// A root that several nodes share has a directory LOCK with a file for each
// node's number, sharedNodes with a directory for each, and block files that
// are longer by the number of the node whose they are.
const sharedNodes = "nodes"

const (
	verifyChunk    = 1 << 20 // bytes of a block that are read at a time
	verifyTriesMax = 4       // looks at a file that changes meanwhile
)

// VerifyOptions say what to check, and who hears of it.
type VerifyOptions struct {
	// Root is the directory. Nothing in it is changed, and it may be on a
	// read-only mount or in use by a node. Required.
	Root string

	// Workers is how many blocks are checked side by side; each has a buffer of
	// 1 MiB. Default WorkersDefault.
	Workers int

	// Found is told of each finding as it is made, by one goroutine at a time,
	// so that nobody needs to keep them. It may be nil.
	Found func(Finding)

	// Progress, if not nil, is told every ProgressEvery how far it has come. It
	// is not called at the same time as Found.
	Progress      func(VerifyReport)
	ProgressEvery time.Duration // default 1 s

	// FS is the tree at Root, for tests. Verify closes it. Default
	// vfs.OpenRoot(Root).
	FS vfs.FS

	bootID string // the kernel's, if not empty; for tests
}

// Kinds of findings. All but FindForeign are problems.
const (
	FindBad        = "bad"        // the file is not the block that its name promises
	FindUnreadable = "unreadable" // it cannot be told: the medium, or a right, fails
	FindNamespace  = "namespace"  // the description or the name of a namespace
	FindBooks      = "books"      // the usage file
	FindForeign    = "foreign"    // nothing that this version keeps here; no problem
)

// Finding is what is wrong with one path, and what to do about it.
type Finding struct {
	Kind string `json:"kind"`
	Path string `json:"path"`
	What string `json:"what"`
	Do   string `json:"do"`
}

// VerifyReport counts. Numbers are of files, if they do not say bytes.
type VerifyReport struct {
	Root  string `json:"root"`
	InUse string `json:"in_use,omitempty"` // the node that has the root locked, "" for none

	Namespaces  int   `json:"namespaces"`
	Good        int64 `json:"good"`        // blocks
	Bad         int64 `json:"bad"`         // blocks
	Unreadable  int64 `json:"unreadable"`  // files and directories
	Foreign     int64 `json:"foreign"`     // left alone by nodes, and counted
	Temporary   int64 `json:"temporary"`   // being written, or left by a dead node: the next start removes those
	Quarantined int64 `json:"quarantined"` // set aside earlier
	Vanished    int64 `json:"vanished"`    // removed, or changed again and again, while they were looked at
	Problems    int64 `json:"problems"`    // findings, foreign files apart

	CheckedBytes int64 `json:"checked_bytes"` // of good blocks
	UsedBytes    int64 `json:"used_bytes"`    // of all regular files, as the file system charges them
	BoundBytes   int64 `json:"bound_bytes"`   // what the usage file says at most, or those of a shared root do; 0 where it is not to be believed

	Done float64       `json:"done"` // share of the namespaces' directories, 0 to 1
	Took time.Duration `json:"took_ns"`
}

// Verify reads a root and checks all that is in it: descriptions against the
// names of their directories, each block's header against its place and each
// block's bytes against their checksum, and the usage file against the sum.
//
// The root may be in use: what goes away or changes while it is looked at is no
// finding. The error says why it could not be checked at all, or is that of
// ctx; the report is as far as it has come.
func Verify(ctx context.Context, o VerifyOptions) (VerifyReport, error) {
	began := time.Now()
	o.Root = filepath.Clean(o.Root)
	if o.Workers <= 0 {
		o.Workers = WorkersDefault
	}
	if o.ProgressEvery <= 0 {
		o.ProgressEvery = time.Second
	}
	v := &verifier{o: o, fs: o.FS, names: map[string]string{}, owned: map[int64]int64{}}
	v.direct.Store(true)
	if v.fs == nil {
		root, err := filepath.EvalSymlinks(o.Root)
		if err == nil {
			v.o.Root = root
			v.fs, err = vfs.OpenRoot(root)
		}
		if err != nil {
			hint := "give the folder of a filesystem tier, tiers.fs.root of its node"
			if errIs(err, unix.EACCES, unix.EPERM) {
				hint = "run it as the user of the node"
			}
			return v.report, fmt.Errorf("verify: %w: %s", err, hint)
		}
	}
	defer func() { _ = v.fs.Close() }()
	v.t = &Tier{fs: v.fs, o: Options{bootID: o.bootID}}
	v.report.Root = v.o.Root

	var wg sync.WaitGroup
	over := make(chan struct{})
	if o.Progress != nil {
		wg.Go(func() { v.tell(over, began) })
	}
	err := v.root(ctx)
	close(over)
	wg.Wait()
	v.report.Took = time.Since(began)
	return v.report, err
}

type verifier struct {
	o      VerifyOptions
	fs     vfs.FS
	t      *Tier       // not open: for what it knows of small files
	direct atomic.Bool // direct I/O works, as far as is known
	names  map[string]string

	shared bool // several nodes use the root

	mu     sync.Mutex // held while Found or Progress run
	report VerifyReport
	owned  map[int64]int64 // bytes of blocks by the number of their node; 0 for that of a root of one
}

// verifySpace is a namespace that is being checked.
type verifySpace struct {
	fp  block.Fingerprint
	dir string
	ns  *block.Namespace // nil: its headers are all that is known
}

// tell shows progress until over is closed.
func (v *verifier) tell(over chan struct{}, began time.Time) {
	t := time.NewTicker(v.o.ProgressEvery)
	defer t.Stop()
	for {
		select {
		case <-over:
			return
		case <-t.C:
			v.mu.Lock()
			v.report.Took = time.Since(began)
			v.o.Progress(v.report)
			v.mu.Unlock()
		}
	}
}

func (v *verifier) path(name string) string { return v.o.Root + "/" + name }

// find reports a finding.
func (v *verifier) find(kind, name, do, format string, args ...any) {
	v.mu.Lock()
	defer v.mu.Unlock()
	switch r := &v.report; kind {
	case FindForeign:
		// counted by file
	case FindBad:
		r.Bad++
		r.Problems++
	case FindUnreadable:
		r.Unreadable++
		r.Problems++
	default:
		r.Problems++
	}
	if v.o.Found != nil {
		v.o.Found(Finding{Kind: kind, Path: v.path(name), What: fmt.Sprintf(format, args...), Do: do})
	}
}

// count changes the report.
func (v *verifier) count(change func(r *VerifyReport)) {
	v.mu.Lock()
	defer v.mu.Unlock()
	change(&v.report)
}

// charge counts a file's bytes.
func (v *verifier) charge(st vfs.Info) {
	if st.Regular() {
		v.count(func(r *VerifyReport) { r.UsedBytes += st.Bytes })
	}
}

// unreadable reports what the file system does not let us see. What has gone
// is no finding.
func (v *verifier) unreadable(name string, err error) {
	if gone(err) {
		v.count(func(r *VerifyReport) { r.Vanished++ })
		return
	}
	v.find(FindUnreadable, name, cmp.Or(hintFor(err), "see what the kernel's log says of that file system"), "cannot be read: %v", err)
}

// list is ReadDir whose errors are findings, but for that of ctx.
func (v *verifier) list(ctx context.Context, dir string, fn func(base string) error) error {
	err := v.fs.ReadDir(dir, func(base string) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		return fn(base)
	})
	if err != nil && ctx.Err() == nil {
		v.unreadable(dir, err)
		err = nil
	}
	return err
}

func (v *verifier) root(ctx context.Context) error {
	if st, err := v.fs.Lstat(nameLock); err == nil {
		v.shared = st.Dir()
	}
	v.inUse()
	var spaces, others []string
	known := false
	err := v.fs.ReadDir(".", func(name string) error {
		switch _, ok := parseFingerprint(name); {
		case ok:
			spaces = append(spaces, name)
		case name == nameLock || name == nameUsage || name == nameTmp || name == nameQuarantine:
			known = true
			return v.own(ctx, name)
		case name == sharedNodes && v.shared:
			return v.nodes(ctx)
		default:
			others = append(others, name)
		}
		return ctx.Err()
	})
	if err != nil {
		return fmt.Errorf("verify: list %s: %w", v.o.Root, err)
	}
	if !known && len(spaces) == 0 {
		return fmt.Errorf("verify: %s holds nothing of a filesystem tier: give the folder that is tiers.fs.root of its node", v.o.Root)
	}
	for _, name := range others {
		if err := v.foreign(ctx, name); err != nil {
			return err
		}
	}
	slices.Sort(spaces)

	jobs := make(chan func(*verifyWorker), v.o.Workers)
	var workers sync.WaitGroup
	for range v.o.Workers {
		workers.Go(func() {
			w := newVerifyWorker()
			defer w.close()
			for job := range jobs {
				job(w)
			}
		})
	}
	for i, dir := range spaces {
		if err = v.space(ctx, dir, jobs, func(part float64) {
			v.count(func(r *VerifyReport) { r.Done = (float64(i) + part) / float64(len(spaces)) })
		}); err != nil {
			break
		}
	}
	close(jobs)
	workers.Wait()
	if err == nil {
		err = ctx.Err() // workers leave out what is left
	}
	if err != nil {
		return err
	}
	v.count(func(r *VerifyReport) { r.Done = 1 })
	v.inUse()
	v.books()
	return nil
}

// inUse notes who has the root, if somebody has.
func (v *verifier) inUse() {
	who := lockHolder(v.o.Root)
	v.count(func(r *VerifyReport) { r.InUse = cmp.Or(r.InUse, who) })
}

// own counts the tier's own files beside the namespaces.
func (v *verifier) own(ctx context.Context, name string) error {
	st, err := v.fs.Lstat(name)
	if err != nil {
		v.unreadable(name, err)
		return nil
	}
	if !st.Dir() {
		v.charge(st)
		return nil
	}
	return v.list(ctx, name, func(base string) error {
		st, err := v.fs.Lstat(name + "/" + base)
		switch {
		case err != nil:
			v.unreadable(name+"/"+base, err)
		case strings.HasSuffix(name, nameTmp):
			v.count(func(r *VerifyReport) { r.Temporary++ })
		case name == nameQuarantine:
			v.count(func(r *VerifyReport) { r.Quarantined++ })
		}
		if err == nil && st.Dir() {
			return v.under(ctx, name+"/"+base, 0, new(int64))
		}
		v.charge(st)
		return nil
	})
}

// nodes counts what each node of a shared root has for itself.
func (v *verifier) nodes(ctx context.Context) error {
	return v.list(ctx, sharedNodes, func(number string) error {
		dir := sharedNodes + "/" + number
		if n, err := strconv.ParseUint(number, 16, 16); err != nil || n == 0 || n >= headerSize || len(number) != 4 {
			return v.foreign(ctx, dir)
		}
		return v.list(ctx, dir, func(base string) error {
			if base == nameUsage || base == nameTmp {
				return v.own(ctx, dir+"/"+base)
			}
			return v.foreign(ctx, dir+"/"+base)
		})
	})
}

// foreign counts what is not ours, as the scan does: one finding for a
// directory and all that is in it.
func (v *verifier) foreign(ctx context.Context, name string) error {
	var files int64
	st, err := v.fs.Lstat(name)
	if err != nil {
		v.unreadable(name, err)
		return nil
	}
	err = v.under(ctx, name, 0, &files)
	v.count(func(r *VerifyReport) { r.Foreign += files })
	what := "it is none of the tier's"
	if st.Dir() {
		what = fmt.Sprintf("a folder of %d files, none of them the tier's", files)
	}
	v.find(FindForeign, name, foreignDo, "%s", what)
	return err
}

const foreignDo = "remove it if nobody needs it: nodes leave it alone, and count its bytes against the capacity"

// under counts the files of a tree, which may be one file.
func (v *verifier) under(ctx context.Context, name string, depth int, files *int64) error {
	st, err := v.fs.Lstat(name)
	if err != nil {
		return ctx.Err()
	}
	if st.Dir() && depth < scanDepthMax {
		_ = v.fs.ReadDir(name, func(base string) error { return v.under(ctx, name+"/"+base, depth+1, files) })
		return ctx.Err() // what cannot be looked at is left out
	}
	*files++
	v.charge(st)
	return ctx.Err()
}

// space checks one namespace; its blocks go to the workers.
func (v *verifier) space(ctx context.Context, dir string, jobs chan<- func(*verifyWorker), progress func(float64)) error {
	st, err := v.fs.Lstat(dir)
	if err != nil {
		v.unreadable(dir, err)
		return nil
	}
	if !st.Dir() {
		return v.foreign(ctx, dir)
	}
	v.count(func(r *VerifyReport) { r.Namespaces++ })
	fp, _ := parseFingerprint(dir)
	sp := &verifySpace{fp: fp, dir: dir}
	described := v.describe(sp)
	v.name(sp)
	var shards []string
	err = v.list(ctx, dir, func(base string) error {
		switch {
		case base == nameNamespace || base == nameName:
		case isShard(base):
			shards = append(shards, base)
		default:
			return v.foreign(ctx, dir+"/"+base)
		}
		return nil
	})
	if err != nil {
		return err
	}
	slices.Sort(shards)
	blocks := 0
	for i, shard := range shards {
		progress(float64(i) / float64(len(shards)))
		name := dir + "/" + shard
		st, err := v.fs.Lstat(name)
		if err != nil {
			v.unreadable(name, err)
			continue
		}
		if !st.Dir() {
			if err := v.foreign(ctx, name); err != nil {
				return err
			}
			continue
		}
		err = v.list(ctx, name, func(base string) error {
			key, err := block.ParseKey(base)
			if err != nil {
				return v.foreign(ctx, name+"/"+base)
			}
			blocks++
			job := func(w *verifyWorker) {
				if ctx.Err() == nil {
					v.block(w, sp, name+"/"+base, key)
				}
			}
			select {
			case jobs <- job:
			case <-ctx.Done():
			}
			return ctx.Err()
		})
		if err != nil {
			return err
		}
	}
	if !described && blocks > 0 {
		// On a root in use it may have come after we looked.
		if _, err := v.fs.Lstat(dir + "/" + nameNamespace); gone(err) {
			v.find(FindNamespace, dir+"/"+nameNamespace, "nothing, if engines still use it: the next that greets with this namespace has it written anew; else remove "+v.path(dir),
				"the description is missing; %d blocks were checked by their headers alone", blocks)
		}
	}
	return nil
}

// describe reads a namespace's description, and says whether there is one.
func (v *verifier) describe(sp *verifySpace) bool {
	name := sp.dir + "/" + nameNamespace
	b, charged, err := v.t.readSmall(name, namespaceBytesMax)
	v.count(func(r *VerifyReport) { r.UsedBytes += charged })
	if gone(err) {
		return false
	}
	const do = "move the folder out of the root and restart the node, or put the right description back: until then its blocks are not served"
	if errIs(err, unix.EIO, unix.EACCES, unix.EPERM, unix.EMFILE, unix.ENFILE) {
		v.unreadable(name, err)
		return true
	}
	var ns *block.Namespace
	if err == nil {
		ns, err = block.ParseNamespace(b)
	}
	switch {
	case err != nil:
		v.find(FindNamespace, name, do, "it is not the description of a namespace: %v", err)
	case ns.Fingerprint() != sp.fp:
		v.find(FindNamespace, name, do, "it describes namespace %s, and the folder is another's", ns.Fingerprint())
	default:
		sp.ns = ns
	}
	return true
}

// name checks what the operator calls the namespace.
func (v *verifier) name(sp *verifySpace) {
	name := sp.dir + "/" + nameName
	b, charged, err := v.t.readSmall(name, tier.NameBytesMax)
	v.count(func(r *VerifyReport) { r.UsedBytes += charged })
	const do = "remove the file, or write the name into it, and restart the node"
	switch other := v.names[string(b)]; {
	case gone(err):
	case err != nil:
		v.find(FindNamespace, name, do, "the name cannot be used: %v", err)
	case len(b) == 0:
		v.find(FindNamespace, name, do, "the name is empty")
	case other != "":
		v.find(FindNamespace, name, do, "%q is the name of %s already", b, v.path(other))
	default:
		v.names[string(b)] = sp.dir
	}
}

// errAgain says that direct I/O does not work here.
var errAgain = errors.New("without direct I/O")

// verdict is what a look at a block's file has found: nothing, with kind "".
type verdict struct{ kind, what string }

func bad(format string, args ...any) verdict { return verdict{FindBad, fmt.Sprintf(format, args...)} }

// block checks one file of a shard. What is not right is looked at again if it
// has changed meanwhile: under a running node names come and go, and an evicted
// block's file is written over.
func (v *verifier) block(w *verifyWorker, sp *verifySpace, name string, key block.Key) {
	for range verifyTriesMax {
		st, err := v.fs.Lstat(name)
		if err != nil {
			v.unreadable(name, err)
			return
		}
		found, length, seen, err := v.look(w, sp, name, key, st)
		if errors.Is(err, errAgain) {
			v.direct.Store(false)
			found, length, seen, err = v.look(w, sp, name, key, st)
		}
		if err == nil && found.kind == "" {
			v.count(func(r *VerifyReport) {
				r.Good++
				r.CheckedBytes += int64(length)
				r.UsedBytes += seen.Bytes
				v.owned[seen.Size%headerSize] += seen.Bytes
			})
			return
		}
		now, lerr := v.fs.Lstat(name)
		if gone(lerr) {
			break
		}
		if lerr == nil && (now.Ino != seen.Ino || now.Size != seen.Size || now.Mtime != seen.Mtime) {
			continue
		}
		v.charge(now)
		switch {
		case err != nil:
			v.find(FindUnreadable, name, cmp.Or(hintFor(err), "see what the kernel's log says of that file system"), "cannot be read: %v", err)
		case found.kind == FindForeign:
			v.count(func(r *VerifyReport) { r.Foreign++ })
			v.find(FindForeign, name, foreignDo, "%s", found.what)
		default:
			v.find(FindBad, name, "remove it: engines compute and store the block again. A node that reads it serves it to nobody, and sets it aside", "%s", found.what)
		}
		return
	}
	v.count(func(r *VerifyReport) { r.Vanished++ })
}

// look checks a file by its name, its header and its bytes. seen is the file
// that was looked at.
func (v *verifier) look(w *verifyWorker, sp *verifySpace, name string, key block.Key, st vfs.Info) (found verdict, length int, seen vfs.Info, err error) {
	if !st.Regular() {
		return bad("something that is no regular file is in the block's place"), 0, st, nil
	}
	if shard := sp.dir + "/" + key.String()[:2] + "/"; !strings.HasPrefix(name, shard) {
		return bad("it is in the folder of other keys, where nobody looks for it"), 0, st, nil
	}
	if sp.ns != nil {
		length = sp.ns.BlockBytes(key.Group())
	}
	if key.Group() >= block.GroupsMax || sp.ns != nil && length == 0 {
		return verdict{FindForeign, fmt.Sprintf("its key is of group %d, which its namespace does not have", key.Group())}, 0, st, nil
	}
	flags := unix.O_RDONLY | unix.O_NONBLOCK
	if v.direct.Load() {
		flags |= unix.O_DIRECT
	}
	again := func(err error) error {
		if flags&unix.O_DIRECT != 0 && errors.Is(err, unix.EINVAL) {
			return errAgain
		}
		return err
	}
	f, err := v.fs.Open(name, flags, 0)
	if err != nil {
		return found, 0, st, again(err)
	}
	defer func() { _ = f.Close() }()
	if seen, err = f.Stat(); err != nil {
		return found, 0, st, err
	}
	size, owner := seen.Size, int64(0)
	if v.shared {
		owner = size % headerSize
		size -= owner
	}
	if sp.ns != nil && size != fileSize(length) {
		return bad("it has %d bytes; a block of %d has %d with its header and padding", size, length, fileSize(length)), 0, seen, nil
	}
	if size < 2*headerSize || size%headerSize != 0 {
		return bad("it has %d bytes, which no block file has", size), 0, seen, nil
	}
	if v.shared && owner == 0 {
		return bad("its length says of none of the nodes that share the root that it is theirs"), 0, seen, nil
	}
	// The header comes with the first of the bytes.
	data := w.data[:min(size-headerSize, int64(len(w.data)))]
	n, err := vfs.ReadFull(f, [][]byte{w.header, data}, 0)
	if err != nil {
		return found, 0, seen, again(err)
	}
	if n < headerSize+len(data) {
		return bad("it ends after %d bytes", n), 0, seen, nil
	}
	var h blockhead.Header
	if err := h.Decode(w.header); err != nil {
		if errors.Is(err, blockhead.ErrVersion) {
			return verdict{FindForeign, err.Error()}, 0, seen, nil
		}
		return bad("header: %v", err), 0, seen, nil
	}
	if sp.ns == nil {
		length = int(h.Length)
	}
	if err := h.Check(sp.fp, key, length); err != nil {
		return bad("header: %v", err), 0, seen, nil
	}
	if size != fileSize(length) {
		return bad("it has %d bytes; a block of %d has %d with its header and padding", size, length, fileSize(length)), 0, seen, nil
	}
	w.sum.Reset()
	left := length
	for at := int64(headerSize); ; {
		n := min(left, len(data))
		_, _ = w.sum.Write(data[:n]) // never fails
		left -= n
		if i := bytes.IndexFunc(data[n:], func(r rune) bool { return r != 0 }); i >= 0 {
			return bad("the padding behind the block has a byte that is not 0, at %d", at+int64(n+i)), 0, seen, nil
		}
		if at += int64(len(data)); at >= size {
			break
		}
		data = w.data[:min(size-at, int64(len(w.data)))]
		m, err := vfs.ReadFull(f, [][]byte{data}, at)
		if err != nil {
			return found, 0, seen, again(err)
		}
		if m < len(data) {
			return bad("it ends after %d bytes", at+int64(m)), 0, seen, nil
		}
	}
	if sum := w.sum.Sum64(); sum != h.Sum {
		return bad("the block does not match its checksum: it is %016x, the header says %016x", sum, h.Sum), 0, seen, nil
	}
	return found, length, seen, nil
}

// books compares the usage files with what was counted. Under a running node
// both move, so that they say nothing.
func (v *verifier) books() {
	v.mu.Lock()
	used, quiet := v.report.UsedBytes, v.report.InUse == ""
	owned := maps.Clone(v.owned)
	v.mu.Unlock()
	if !v.shared {
		v.book(nameUsage, used, quiet)
		return
	}
	for _, n := range slices.Sorted(maps.Keys(owned)) {
		v.book(fmt.Sprintf("%s/%04x/%s", sharedNodes, n, nameUsage), owned[n], quiet)
	}
}

func (v *verifier) book(name string, used int64, quiet bool) {
	b, _, err := v.t.readSmall(name, 1<<20)
	if gone(err) {
		return
	}
	if err != nil {
		v.unreadable(name, err)
		return
	}
	whole := len(b) >= usageSize && string(b[:len(usageMagic)]) == usageMagic && crc64nvme.Checksum(b[:56]) == binary.BigEndian.Uint64(b[56:])
	bound, believed := decodeUsage(b, v.t.kernelBoot())
	if believed {
		v.count(func(r *VerifyReport) { r.BoundBytes += bound })
	}
	switch {
	case !quiet:
	case !whole:
		v.find(FindBooks, name, "nothing: the next start writes it anew, and refuses writes until its scan is done", "the usage file is damaged")
	case believed && used > bound:
		v.find(FindBooks, name, "remove "+v.path(name)+", so that the next start counts before it writes, if nobody has put files there by hand",
			"the files take %d bytes, and it says that they take at most %d", used, bound)
	}
}

// verifyWorker is the memory of one worker.
type verifyWorker struct {
	mapped       []byte
	header, data []byte
	sum          hash.Hash64
}

func newVerifyWorker() *verifyWorker {
	w := &verifyWorker{sum: crc64nvme.New()}
	m, err := unix.Mmap(-1, 0, headerSize+verifyChunk, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		m = make([]byte, headerSize+verifyChunk) // see headerPool.get
	} else {
		w.mapped = m
	}
	w.header, w.data = m[:headerSize:headerSize], m[headerSize:]
	return w
}

func (w *verifyWorker) close() {
	if w.mapped != nil {
		_ = unix.Munmap(w.mapped)
	}
}

// lockHolder says who has the root locked, "" for nobody; in a shared root one
// of those who have. It takes no lock.
func lockHolder(root string) string {
	names := []string{root + "/" + nameLock}
	if list, err := os.ReadDir(names[0]); err == nil { // shared
		names = nil
		for _, e := range list {
			names = append(names, root+"/"+nameLock+"/"+e.Name())
		}
	}
	for _, name := range names {
		if who := lockedBy(name); who != "" {
			return who
		}
	}
	return ""
}

func lockedBy(name string) string {
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return ""
	}
	f := os.NewFile(uintptr(fd), name)
	defer func() { _ = f.Close() }()
	lock := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &lock); err != nil || lock.Type == unix.F_UNLCK {
		return ""
	}
	buf := make([]byte, 256)
	n, _ := f.Read(buf)
	return cmp.Or(strings.Join(strings.Fields(string(buf[:n])), " "), "a node that has not said who it is")
}

// CheckInvariants compares the tier's index with its counts. It is for running
// tiers: lookups wait for it, as long as pause says. A walk over all entries
// that would take longer than pauseMax is left out, and whole is false.
func (t *Tier) CheckInvariants(pauseMax time.Duration) (pause time.Duration, whole bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	began := time.Now()
	defer func() { pause = time.Since(began) }()
	x, a := &t.mu.index, &t.mu.account
	var blocks, bytes, small int64
	for _, n := range t.mu.byID {
		blocks += n.blocks
		bytes += n.bytes
		small += n.specBytes + n.nameBytes
	}
	switch {
	case blocks != int64(x.table.Len()) || x.table.Len() != x.slab.Len():
		return 0, false, fmt.Errorf("namespaces count %d blocks, the index has %d, its memory %d", blocks, x.table.Len(), x.slab.Len())
	case a.inflight < 0 || a.known < bytes+small+a.inflight:
		return 0, false, fmt.Errorf("fs-used-bound: %d bytes are counted as used; blocks have %d, descriptions %d, writes under way %d", a.known, bytes, small, a.inflight)
	case x.listed > bytes:
		return 0, false, fmt.Errorf("%d bytes can be evicted of %d", x.listed, bytes)
	}
	if time.Duration(x.table.Len())*checkEntryTime > pauseMax {
		return 0, false, nil
	}
	var entries int
	var listed int64
	for i, l := range []list{x.young, x.old} {
		prev := uint32(0)
		for h := l.front; h != 0; h = x.at(h).next {
			e := x.at(h)
			key := e.key()
			if e.prev != prev || e.flags&flagBusy != 0 || (e.flags&flagOld != 0) != (i == 1) || int(e.ns) >= len(t.mu.byID) || x.find(e.ns, &key) != h {
				return 0, true, fmt.Errorf("fs-one-list: list %d: the entry of block %s is not where it belongs", i, key)
			}
			if entries++; entries > x.table.Len() {
				return 0, true, fmt.Errorf("fs-one-list: the lists have more than the %d entries of the index", x.table.Len())
			}
			prev = h
			listed += e.bytes()
		}
		if l.back != prev {
			return 0, true, fmt.Errorf("fs-one-list: list %d does not end where it says", i)
		}
	}
	if listed != x.listed {
		return 0, true, fmt.Errorf("the lists have %d bytes, counted are %d", listed, x.listed)
	}
	return 0, true, nil
}

// checkEntryTime is about what an entry costs a walk, in memory that is not in
// the processor's cache.
const checkEntryTime = 150 * time.Nanosecond
