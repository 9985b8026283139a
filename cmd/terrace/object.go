package main

import (
	"context"
	"log/slog"
	"strings"
	"time"

	"github.com/terrace-kv/terrace/internal/config"
	"github.com/terrace-kv/terrace/internal/s3"
	"github.com/terrace-kv/terrace/tier"
	"github.com/terrace-kv/terrace/tier/objtier"
)

type objectSettings struct {
	Bucket       string `yaml:"bucket" doc:"bucket that keeps the blocks; it must be there"`
	Prefix       string `yaml:"prefix" doc:"of all keys in the bucket, without a slash at either end"`
	Endpoint     string `yaml:"endpoint" doc:"host or host:port of the store; empty: AWS S3 of the region"`
	Scheme       string `yaml:"scheme" enum:"https|http" doc:"how the store is spoken to"`
	Region       string `yaml:"region" doc:"of the bucket; empty: AWS_REGION, else what the shared files say, else us-east-1"`
	Addressing   string `yaml:"addressing" enum:"auto|path|virtual" doc:"where a request names the bucket: in the path, or in the host; auto: in the host for AWS"`
	AccessKey    string `yaml:"access_key" secret:"true" doc:"empty: environment, shared files, web identity, container and instance roles, in that order"`
	SecretKey    string `yaml:"secret_key" secret:"true" doc:"of access_key"`
	SessionToken string `yaml:"session_token" secret:"true" doc:"of access_key, where it is a temporary one"`
	Profile      string `yaml:"profile" doc:"of the shared credential files; empty: AWS_PROFILE, else default"`
	CABundle     string `yaml:"ca_bundle" doc:"file of PEM certificates to trust beside the system's"`

	ConnectTimeout time.Duration `yaml:"connect_timeout" min:"10ms" max:"10m" doc:"for a connection and its TLS"`
	HeaderTimeout  time.Duration `yaml:"header_timeout" min:"10ms" max:"10m" doc:"from a request sent to the beginning of its answer"`

	Workers           int     `yaml:"workers" min:"1" max:"1024" doc:"reads at once, and writes at once, where lane does not say otherwise"`
	RequestsPerSecond float64 `yaml:"requests_per_second" zero:"unbounded" min:"0.1" doc:"requests of any kind; more of them wait"`
	Checksum          string  `yaml:"checksum" enum:"auto|crc64nvme|crc32c|none" doc:"what the store is told to verify; auto: what it proves to verify at the start"`
	Conditional       string  `yaml:"conditional" enum:"auto|off" doc:"whether nodes that store a block at once write it once; auto: where the store can"`

	IndexKeys     int           `yaml:"index_keys" min:"1024" max:"1000000000" doc:"keys that are known to be there or not, about 70 bytes each"`
	PresentFor    time.Duration `yaml:"present_for" min:"1s" max:"720h" doc:"how long a key that was seen is believed to be there"`
	AbsentFor     time.Duration `yaml:"absent_for" min:"100ms" max:"24h" doc:"how long a key that was not there is not asked for again: so late is found what other nodes store"`
	ListPerSecond float64       `yaml:"list_per_second" zero:"off" min:"0.01" doc:"requests of 1,000 keys with which the index is filled after a start"`

	Capacity      config.Size   `yaml:"capacity" zero:"unbounded" min:"1MiB" doc:"of each namespace's objects, looked after by one node at a time; unbounded: by the bucket's own rules, if it has any"`
	CapacityEvery time.Duration `yaml:"capacity_every" min:"1s" max:"720h" doc:"how often it is looked after, at the cost of a listing"`
	CapacityAlone bool          `yaml:"capacity_alone" doc:"no other node looks after this bucket's capacity: for stores without conditional writes"`
}

func newObjectSettings() any {
	return &objectSettings{
		Scheme: "https", Addressing: s3.AddressAuto, ConnectTimeout: 5 * time.Second, HeaderTimeout: 30 * time.Second,
		Workers: objtier.WorkersDefault, Checksum: objtier.ChecksumAuto, Conditional: objtier.ConditionalAuto,
		IndexKeys: objtier.IndexKeysDefault, PresentFor: objtier.PresentForDefault, AbsentFor: objtier.AbsentForDefault,
		ListPerSecond: objtier.ListPerSecDefault, CapacityEvery: 5 * time.Minute,
	}
}

// Aliases are the names that vLLM's object tier has for the same.
func (*objectSettings) Aliases() map[string]string {
	return map[string]string{
		"store_config.bucket": "bucket", "store_config.endpoint_override": "endpoint", "store_config.scheme": "scheme",
		"store_config.access_key": "access_key", "store_config.secret_key": "secret_key", "store_config.session_token": "session_token",
		"store_config.region": "region", "store_config.ca_bundle": "ca_bundle", "io_threads": "workers",
	}
}

func (s *objectSettings) Validate(report config.Report) {
	for _, scheme := range []string{"https", "http"} { // people write URLs
		if rest, ok := strings.CutPrefix(s.Endpoint, scheme+"://"); ok {
			s.Scheme, s.Endpoint = scheme, strings.TrimSuffix(rest, "/")
		}
	}
	s.Prefix = strings.Trim(s.Prefix, "/")
	if s.Bucket == "" {
		report("bucket", "is empty; give the name of a bucket that is there")
	}
	if (s.AccessKey == "") != (s.SecretKey == "") {
		report("secret_key", "and access_key go together: give both, or neither for the credential chain")
	}
	if s.SessionToken != "" && s.AccessKey == "" {
		report("session_token", "belongs to an access_key, which is empty; give both keys, or take it out")
	}
	if s.Bucket == "" {
		return
	}
	c, err := s3.New(s.options("object").S3) // which sends nothing
	if err != nil {
		report("bucket", "cannot be used: "+err.Error())
		return
	}
	c.Close()
}

func (s *objectSettings) options(name string) objtier.Options {
	list := s.ListPerSecond
	if list == 0 {
		list = -1 // off; its 0 is the default
	}
	return objtier.Options{
		Name: name, Prefix: s.Prefix, Workers: s.Workers, RequestsPerSecond: s.RequestsPerSecond,
		S3: s3.Options{
			Bucket: s.Bucket, Endpoint: s.Endpoint, Scheme: s.Scheme, Region: s.Region, Addressing: s.Addressing,
			AccessKey: s.AccessKey, SecretKey: s.SecretKey, SessionToken: s.SessionToken, Profile: s.Profile,
			CABundle: s.CABundle, ConnectTimeout: s.ConnectTimeout, HeaderTimeout: s.HeaderTimeout,
		},
		Checksum: s.Checksum, Conditional: s.Conditional, IndexKeys: s.IndexKeys, PresentFor: s.PresentFor, AbsentFor: s.AbsentFor,
		ListPerSecond: list, Capacity: int64(s.Capacity), CapacityEvery: s.CapacityEvery, CapacityAlone: s.CapacityAlone,
	}
}

func openObject(ctx context.Context, c *config.Tier, log *slog.Logger) (tier.Tier, error) {
	o := c.Settings.(*objectSettings).options(c.Name)
	o.Logger = log
	t, err := objtier.Open(ctx, o)
	if err != nil {
		return nil, err // not t: a nil *Tier is no nil tier.Tier
	}
	return t, nil
}

func objectInfo(c *config.Tier) (tier.Info, string) {
	s := c.Settings.(*objectSettings)
	info := tier.Info{Name: c.Name, Type: c.Type, Medium: tier.MediumStorage, Locality: tier.LocalityRemote,
		ReadParallel: s.Workers, WriteParallel: s.Workers, BatchItems: 1}
	endpoint := s.Endpoint
	if endpoint == "" {
		endpoint = "AWS S3"
	}
	return info, strings.TrimSuffix(s.Scheme+"://"+endpoint+"/"+s.Bucket+"/"+s.Prefix, "/")
}
