// Package replay turns a trace of prompts into the calls of engines.
//
// A trace (Mooncake, Qwen-Bailian, kvt1, or one made from a seed) names the
// blocks of each prompt by ids; equal ids mean equal prefixes. Replay derives
// a block key from trace and id, and the block's bytes from namespace and key
// (internal/content), so that every byte that comes back can be checked
// without keeping a copy.
//
// Two ways to run one: Drive acts as N engines against a node over its socket,
// with real bytes; Dry drives internal/core alone, without bytes, clock or
// goroutines of its own, to answer what a capacity would give.
//
// Goroutines: Drive starts one per engine and one for the progress line, and
// waits for all before it returns. Sweep starts at most GOMAXPROCS workers
// and waits for them. Readers and Dry start none.
//
// Bounds: a trace line has at most lineBytesMax bytes and a request at most
// blocksMax blocks; a file is streamed, one request at a time, by Drive. Dry
// keeps the whole trace in run-length form, at most runsMax runs and keysMax
// distinct keys.
package replay
