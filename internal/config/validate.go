package config

import (
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// socketPathMax is what sockaddr_un has room for, its final zero apart.
const socketPathMax = 107

var tierName = regexp.MustCompile(`^[a-z][a-z0-9-]{0,31}$`)

// validate checks what one setting's parser cannot see.
func (l *loader) validate() {
	c := l.cfg
	bad := func(path, problem string) {
		value := ""
		for _, lf := range c.leaves() {
			if lf.path == path && !lf.secret() {
				value = lf.String()
			}
		}
		l.fault(path, value, c.Source(path), "%s", problem)
	}
	switch {
	case c.Socket == "" && l.in.SocketErr != nil && c.Source("socket") == "":
		bad("socket", "has no default here: "+l.in.SocketErr.Error())
	case c.Socket == "":
		bad("socket", "is empty; give the path of a unix socket")
	case len(c.Socket) > socketPathMax:
		bad("socket", fmt.Sprintf("has %d bytes, and the kernel takes %d; choose a shorter path", len(c.Socket), socketPathMax))
	}
	const page = 4096
	if c.Primary.Size%page != 0 {
		bad("primary.size", "is not a multiple of 4KiB; round it")
	}
	if e := c.Primary.Extent; e&(e-1) != 0 {
		bad("primary.extent", "is not a power of two; write one such as 64MiB, or auto")
	}
	if c.Primary.Extent > c.Primary.Size {
		bad("primary.extent", fmt.Sprintf("is more than primary.size, which is %s; lower it or write auto", c.Primary.Size))
	}
	if addr, loopback, err := ParseListen(c.Admin.Listen); err != nil {
		bad("admin.listen", err.Error())
	} else if !loopback && !c.Admin.Insecure {
		bad("admin.listen", fmt.Sprintf("is not a loopback address, and whoever reaches %s reads status and profiles; write 127.0.0.1, or set admin.insecure to true", addr))
	}
	l.peers(bad)
	seen := map[string]int{}
	for i := range c.Tiers {
		t, path := &c.Tiers[i], func(key string) string { return fmt.Sprintf("tiers.%d.%s", i, key) }
		if t.Name == "peers" && c.Peers.Listen != "" {
			bad(path("name"), "is the name of the tier that other nodes are; give it another")
		}
		if !tierName.MatchString(t.Name) || t.Name == "primary" {
			bad(path("name"), "is not a name; write up to 32 of a-z, 0-9 and -, a letter first, and not primary")
		}
		if before, dup := seen[t.Name]; dup {
			bad(path("name"), fmt.Sprintf("is the name of tiers.%d as well; give each its own", before))
		}
		seen[t.Name] = i
		lane := t.Lane
		if lane.Retry.Base > lane.Retry.Max {
			bad(path("lane.retry.base"), fmt.Sprintf("is more than lane.retry.max, which is %s", durationText(lane.Retry.Max)))
		}
		if lane.Breaker.BrownShare > lane.Breaker.OpenShare {
			bad(path("lane.breaker.brown_share"), fmt.Sprintf("is more than lane.breaker.open_share, which is %v", lane.Breaker.OpenShare))
		}
		if lane.Breaker.OpenBase > lane.Breaker.OpenMax {
			bad(path("lane.breaker.open_base"), fmt.Sprintf("is more than lane.breaker.open_max, which is %s", durationText(lane.Breaker.OpenMax)))
		}
		if v, ok := t.Settings.(validator); ok {
			v.Validate(func(key, problem string) { bad(path(key), problem) })
		}
	}
	l.folders(bad)
}

// folders refuses tiers that would write into each other's folder.
func (l *loader) folders(bad func(path, problem string)) {
	type folder struct{ setting, text, real string }
	var before []folder
	for i := range l.cfg.Tiers {
		for _, lf := range l.cfg.Tiers[i].leaves(i) {
			text := lf.v.String()
			if lf.tag.Get("folder") != "own" || text == "" {
				continue
			}
			f := folder{lf.path, text, realPath(text)}
			for _, b := range before {
				how := ""
				switch {
				case f.real == b.real:
					how = "is the folder of"
				case within(f.real, b.real):
					how = "lies within"
				case within(b.real, f.real):
					how = "contains"
				default:
					continue
				}
				bad(f.setting, fmt.Sprintf("%s %s = %q; give each tier a folder of its own", how, b.setting, b.text))
				break // once is enough
			}
			before = append(before, f)
		}
	}
}

func within(path, folder string) bool {
	rel, err := filepath.Rel(folder, path)
	return err == nil && filepath.IsLocal(rel)
}

// realPath is the path without links, as far as it exists.
func realPath(path string) string {
	path, err := filepath.Abs(path)
	if err != nil {
		return path
	}
	for here, rest := path, ""; ; {
		if real, err := filepath.EvalSymlinks(here); err == nil {
			return filepath.Join(real, rest)
		}
		if here == filepath.Dir(here) {
			return path
		}
		here, rest = filepath.Dir(here), filepath.Join(filepath.Base(here), rest)
	}
}

// ParseListen reads host:port. Without a host it is 127.0.0.1. A host is an
// address, or localhost; other names are refused, because what they mean can
// change under a check for loopback.
func ParseListen(text string) (addr string, loopback bool, err error) {
	host, port, err := net.SplitHostPort(text)
	if err != nil {
		return "", false, fmt.Errorf("is not an address with a port; write one such as 127.0.0.1:9180, [::1]:9180 or :0")
	}
	if n, err := strconv.Atoi(port); err != nil || n < 0 || n > 65535 || strings.HasPrefix(port, "+") {
		return "", false, fmt.Errorf("has no port from 0 to 65535")
	}
	switch host {
	case "", "localhost":
		return net.JoinHostPort("127.0.0.1", port), true, nil
	}
	ip, err := netip.ParseAddr(host)
	if err != nil {
		return "", false, fmt.Errorf("has a host that is neither an address nor localhost; write an address")
	}
	return net.JoinHostPort(host, port), ip.IsLoopback(), nil
}

// peers checks how other nodes reach this one.
func (l *loader) peers(bad func(path, problem string)) {
	p := &l.cfg.Peers
	each, err := quotaBytes(p.Quota, l.cfg.Primary.Size)
	if err != nil {
		bad("peers.quota", err.Error())
	}
	if p.QuotaTotal != "" {
		if all, err := quotaBytes(p.QuotaTotal, l.cfg.Primary.Size); err != nil {
			bad("peers.quota_total", err.Error())
		} else if all < each {
			bad("peers.quota_total", fmt.Sprintf("is less than peers.quota, which is %s", p.Quota))
		}
	}
	for _, f := range []struct{ path, text string }{{"peers.tls.cert", p.TLS.Cert}, {"peers.tls.key", p.TLS.Key}, {"peers.tls.ca", p.TLS.CA}} {
		if p.TLS != (PeerTLS{}) && f.text == "" {
			bad(f.path, "is empty; peers.tls needs cert, key and ca")
		}
	}
	if len(p.NodeID) > peerTextMax {
		bad("peers.node_id", fmt.Sprintf("has %d bytes, at most %d are allowed", len(p.NodeID), peerTextMax))
	}
	if p.Listen == "" {
		if p.Advertise != "" {
			bad("peers.advertise", "is set, and peers.listen is not, so that nobody can reach this node; set peers.listen")
		}
		return
	}
	addr, loopback, err := ParseListen(p.Listen)
	if err != nil {
		bad("peers.listen", strings.ReplaceAll(err.Error(), ":9180", ":7301"))
		return
	}
	if len(l.cfg.Tiers) == tiersMax {
		bad("peers.listen", fmt.Sprintf("makes other nodes a tier, and there are %d in tiers already, which is the most; take one out", tiersMax))
	}
	if !loopback && p.TLS == (PeerTLS{}) && !p.Insecure {
		bad("peers.listen", fmt.Sprintf("is not a loopback address, and whoever reaches %s reads blocks; set peers.tls.cert, key and ca, or peers.insecure to true", addr))
	}
	if p.Advertise == "" {
		if host, _, _ := net.SplitHostPort(addr); netip.MustParseAddr(host).IsUnspecified() {
			bad("peers.advertise", fmt.Sprintf("is empty, and peers.listen is %s, which nobody can dial; set it to an address of this host and the port", addr))
		}
		return
	}
	host, port, err := net.SplitHostPort(p.Advertise)
	n, perr := strconv.Atoi(port)
	ip, ierr := netip.ParseAddr(host)
	switch {
	case err != nil || host == "" || strings.ContainsAny(host, "/ "):
		bad("peers.advertise", "is not a host with a port; write one such as 10.0.0.7:7301, [fd00::7]:7301 or node-7:7301")
	case perr != nil || n < 0 || n > 65535 || strings.HasPrefix(port, "+"):
		bad("peers.advertise", "has no port from 0 to 65535; 0 is that of peers.listen")
	case len(p.Advertise) > peerTextMax:
		bad("peers.advertise", fmt.Sprintf("has %d bytes, at most %d are allowed", len(p.Advertise), peerTextMax))
	case ierr == nil && ip.IsUnspecified():
		bad("peers.advertise", "is a wildcard, which nobody can dial; write an address of this host")
	case !loopback && (host == "localhost" || ierr == nil && ip.IsLoopback()):
		bad("peers.advertise", fmt.Sprintf("is a loopback address, which means another host to every peer, and peers.listen is %s; write an address of this host that they reach", addr))
	}
}

// peerTextMax bounds what nodes say of themselves to each other, in bytes.
const peerTextMax = 256

// QuotaBytes is what one peer, and all together, may have pinned of a primary of
// that size.
func (p *Peers) QuotaBytes(primary Size) (each, all int64, err error) {
	if each, err = quotaBytes(p.Quota, primary); err != nil || p.QuotaTotal == "" {
		return each, 2 * each, err
	}
	all, err = quotaBytes(p.QuotaTotal, primary)
	return each, all, err
}

func quotaBytes(text string, primary Size) (int64, error) {
	number, percent := strings.CutSuffix(text, "%")
	if !percent {
		s, err := ParseSize(text)
		if err != nil || s < 1 {
			return 0, fmt.Errorf("is neither a size nor a percentage; write one such as 1GiB or 25%%")
		}
		return int64(s), nil
	}
	n, err := strconv.Atoi(number)
	if err != nil || n < 1 || n > 100 {
		return 0, fmt.Errorf("is not a percentage from 1%% to 100%%")
	}
	return max(1, int64(primary)/100*int64(n)), nil
}

// AdvertiseAddr is where other nodes reach this one, empty for where it
// listens. Port 0 is that on which it listens.
func (p *Peers) AdvertiseAddr() string {
	host, port, err := net.SplitHostPort(p.Advertise)
	if err != nil {
		return ""
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		host = ip.Unmap().String()
	}
	return net.JoinHostPort(host, port)
}
