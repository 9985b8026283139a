// Command terrace is the one binary: it serves a node, looks at one, and
// replays traces against one. It is the only place that knows every tier.
//
// Goroutines: serve has one more than the node's, which waits for a second
// signal; it ends with the process.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

// Exit codes; docs/operations.md lists them.
const (
	exitOK       = 0
	exitFailure  = 1   // it did not work
	exitUsage    = 2   // a flag, argument or setting is wrong: nothing was begun
	exitLeft     = 3   // the node stopped, but the drain bound passed or something was left behind
	exitSignaled = 130 // a signal cut it short: the second for serve, which drains at the first
)

// failure is an error of a command that had begun. Errors without one are
// cobra's own, about flags and arguments.
type failure struct {
	code int
	err  error
}

func (f *failure) Error() string { return f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

func main() {
	os.Exit(run(os.Args[1:], env{out: os.Stdout, err: os.Stderr, vars: os.Environ(), exit: os.Exit, signals: func() <-chan os.Signal {
		c := make(chan os.Signal, 2)
		signal.Notify(c, syscall.SIGTERM, syscall.SIGINT)
		return c
	}}))
}

// env is what a command gets from its process, so that tests can give it.
type env struct {
	out, err io.Writer
	vars     []string
	signals  func() <-chan os.Signal // from now on they come here instead of ending the process
	exit     func(code int)          // ends the process at once
}

// run executes a command line and returns the exit code.
func run(args []string, e env) int {
	root := rootCommand(e)
	root.SetArgs(args)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return flagFaults(cmd, args, err) })
	root.SetOut(e.out)
	root.SetErr(e.err)
	cmd, err := root.ExecuteContextC(context.Background())
	if err == nil {
		return exitOK
	}
	fmt.Fprintln(e.err, "terrace:", err)
	var f *failure
	if errors.As(err, &f) {
		return f.code
	}
	fmt.Fprintf(e.err, "See '%s --help'.\n", cmd.CommandPath())
	return exitUsage
}

func rootCommand(e env) *cobra.Command {
	root := &cobra.Command{
		Use:   "terrace",
		Short: "A tiered KV cache for LLM inference engines",
		Long: `Terrace keeps the KV-cache blocks of LLM inference engines in shared memory and,
behind it, in slower tiers. One node runs beside the engines of a machine.

Exit codes: 0 all well; 1 it did not work; 2 a flag, argument or setting is wrong;
3 the node stopped, but its drain bound passed or something was left behind;
130 a signal cut it short: the second for serve, which drains at the first.
verify exits with 1 if something is wrong, and with 2 if that cannot be told.`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          onlyCommands,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.CompletionOptions.HiddenDefaultCmd = true
	root.SetHelpCommand(helpCommand())
	root.AddCommand(serveCommand(e), statusCommand(e), verifyCommand(e), replayCommand(), configCommand(e), versionCommand(e))
	return root
}
