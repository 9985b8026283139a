// Command testsum reads the output of `go test -json` and prints what a person
// wants of it: one line a package, the whole output of what failed, and each
// skipped test with its reason.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"sort"
	"strings"
)

type event struct {
	Action, Package, Test, ImportPath, Output string
	Elapsed                                   float64
}

func main() {
	output := map[[2]string]*strings.Builder{}
	count := map[string]int{}
	var skipped, failed []string
	in := bufio.NewReaderSize(os.Stdin, 1<<20)
	for {
		line, err := in.ReadString('\n')
		if line == "" && err != nil {
			break
		}
		var e event
		if json.Unmarshal([]byte(line), &e) != nil {
			fmt.Print(line) // go's own words
			continue
		}
		key := [2]string{e.Package + e.ImportPath, e.Test}
		text := output[key]
		if text == nil {
			text = &strings.Builder{}
			output[key] = text
		}
		switch e.Action {
		case "output", "build-output":
			text.WriteString(e.Output)
			if e.Test == "" && (strings.HasPrefix(e.Output, "ok ") || strings.HasPrefix(e.Output, "FAIL\t")) {
				fmt.Print(e.Output)
			}
			continue
		case "build-fail":
			fmt.Print(text)
		case "skip":
			if e.Test != "" {
				skipped = append(skipped, fmt.Sprintf("%s %s: %s", e.Package, e.Test, reason(text.String())))
			}
		case "fail":
			failed = append(failed, strings.TrimSpace(e.Package+" "+e.Test))
			fmt.Print(text)
		}
		if e.Test != "" && (e.Action == "pass" || e.Action == "fail" || e.Action == "skip") {
			count[e.Action]++
			delete(output, key)
		}
	}
	sort.Strings(skipped)
	for _, s := range skipped {
		fmt.Println("skipped:", s)
	}
	for _, f := range failed {
		fmt.Println("failed:", f)
	}
	fmt.Printf("%d passed, %d failed, %d skipped\n", count["pass"], count["fail"], count["skip"])
	if len(failed) > 0 || count["pass"] == 0 {
		os.Exit(1)
	}
}

// reason is what a test said when it was skipped.
func reason(output string) string {
	var said []string
	for _, line := range strings.Split(output, "\n") {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "=== ") && !strings.HasPrefix(line, "--- ") {
			said = append(said, line)
		}
	}
	if len(said) == 0 {
		return "no reason given"
	}
	return strings.Join(said, " ")
}
