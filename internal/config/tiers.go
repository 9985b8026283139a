package config

import (
	"maps"
	"slices"
	"time"
)

// Types maps a tier's type to what config must know of it. It comes from cmd,
// so that nothing below cmd knows a concrete tier.
type Types map[string]Type

// Type describes one type of tier.
type Type struct {
	// Settings returns a pointer to a new struct of the type's own settings,
	// tagged as Config's are and holding their defaults. If it has a method
	// Validate(report Report), that is called once all sources are merged.
	Settings func() any
}

// Report adds a fault of the setting with this key, such as "root". problem
// follows the value in a sentence: "is not a folder; make it, or …".
type Report func(key, problem string)

type validator interface{ Validate(report Report) }

// Aliaser is implemented by settings that take over another system's file: its
// keys and what they are called here. A dot leads into a mapping, such as
// "store_config.bucket".
type Aliaser interface{ Aliases() map[string]string }

func (t Types) names() []string { return slices.Sorted(maps.Keys(t)) }

// Tier is one entry of tiers. Its settings are written beside the common ones.
type Tier struct {
	Type     string `yaml:"type" doc:"kind of tier"`
	Name     string `yaml:"name" doc:"its name in metrics, logs and status; must be unique; default: the type"`
	Required bool   `yaml:"required" doc:"refuse to start when the tier cannot be opened; otherwise the node serves without it, and it joins when it can"`
	Lane     Lane   `yaml:"lane"`

	Settings any // what the type's Settings function returned, filled in
}

// Lane says how a tier is driven: queues, retry, health.
type Lane struct {
	ReadParallel  int     `yaml:"read_parallel" zero:"auto" min:"1" max:"1024" doc:"reads at once; auto: as the tier says"`
	WriteParallel int     `yaml:"write_parallel" zero:"auto" min:"1" max:"1024" doc:"writes at once; auto: as the tier says"`
	QueueItems    int     `yaml:"queue_items" min:"1" max:"1000000" doc:"blocks that wait or run at most, each for reads and writes; more are refused and counted"`
	QueueBytes    Size    `yaml:"queue_bytes" min:"1MiB" doc:"the same in bytes"`
	InflightBytes Size    `yaml:"inflight_bytes" min:"1MiB" doc:"bytes in running calls at most, each for reads and writes"`
	Retry         Retry   `yaml:"retry"`
	Breaker       Breaker `yaml:"breaker"`
}

// Retry bounds how often what may pass is tried again.
type Retry struct {
	Attempts int           `yaml:"attempts" min:"1" max:"100" doc:"tries of a block's read or write, the first included"`
	Base     time.Duration `yaml:"base" min:"1ms" max:"1m" doc:"pause before the second try; it doubles, with jitter"`
	Max      time.Duration `yaml:"max" min:"1ms" max:"10m" doc:"longest pause between tries"`
}

// Breaker says when a tier's health changes.
type Breaker struct {
	Window     time.Duration `yaml:"window" min:"100ms" max:"10m" doc:"shares of bad calls and mean latency are taken over this time"`
	BrownShare float64       `yaml:"brown_share" min:"0.001" max:"1" doc:"share of bad calls from which a tier is in brown-out: few calls at once"`
	OpenShare  float64       `yaml:"open_share" min:"0.001" max:"1" doc:"share of bad calls from which it is open: not used until a trial succeeds"`
	LatencyMax time.Duration `yaml:"latency_max" min:"1ms" max:"10m" doc:"mean time of a call from which a tier is in brown-out"`
	OpenBase   time.Duration `yaml:"open_base" min:"10ms" max:"1h" doc:"first time open before a trial; it doubles with each failed one"`
	OpenMax    time.Duration `yaml:"open_max" min:"10ms" max:"24h" doc:"longest time open before a trial"`
}

// newTier is an entry of the type with its defaults.
func newTier(name string, t Type) Tier {
	return Tier{Type: name, Name: name, Settings: t.Settings(), Lane: Lane{
		QueueItems: 4096, QueueBytes: 1 << 30, InflightBytes: 64 << 20,
		Retry: Retry{Attempts: 3, Base: 50 * time.Millisecond, Max: 2 * time.Second},
		Breaker: Breaker{Window: 10 * time.Second, BrownShare: 0.1, OpenShare: 0.5, LatencyMax: 2 * time.Second,
			OpenBase: time.Second, OpenMax: time.Minute},
	}}
}
