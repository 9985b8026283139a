// Package config turns defaults, a strict YAML file, TERRACE_* environment
// variables and flags, each over the one before, into one checked Config.
//
// Every setting is a field of Config (or of a tier's own settings) with tags;
// the file, the environment and the flags reach it by the same path, such as
// primary.size, and through the same parser. Faults are never repaired and
// never reported one by one: Load returns all of them, each with its field,
// value, source and what to do.
//
//	file         primary: {size: 4GiB}
//	environment  TERRACE_PRIMARY_SIZE=4GiB
//	flag         --primary 4GiB, or --set primary.size=4GiB
//
// Tags of a setting:
//
//	yaml    its key
//	doc     one line for people; docs/operations.md is written from it
//	min     smallest value, as text of the setting's own kind
//	max     largest value
//	enum    the allowed words, separated by |
//	zero    the word for the zero value, which cannot be written as a number
//	folder  "own": a tier's folder, which no other tier may have, nor a part of it
//	secret  "true": never shown, neither in print nor in faults
//
// The package starts no goroutine, and reads at most 1 MiB of a file.
package config
