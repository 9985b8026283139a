package main

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/terrace-kv/terrace/internal/config"
)

// flagFaults finds all that is wrong with the flags of a command line, of which
// the parser tells the first: flags that there are not, and values that a flag
// does not take. args are those of the process; first is the parser's error,
// for what is not found here.
func flagFaults(cmd *cobra.Command, args []string, first error) error {
	var errs []error
	var known []string
	for _, m := range flagName.FindAllStringSubmatch(cmd.Flags().FlagUsages(), -1) {
		known = append(known, m[1])
	}
	for i := 0; i < len(args) && args[i] != "--"; i++ {
		text, isFlag := strings.CutPrefix(args[i], "--")
		if !isFlag {
			if len(args[i]) > 1 && args[i][0] == '-' && args[i] != "-h" {
				errs = append(errs, fmt.Errorf("unknown flag: %s; flags have two dashes", args[i]))
			}
			continue
		}
		name, value, has := strings.Cut(text, "=")
		f := cmd.Flags().Lookup(name)
		next := i+1 < len(args)
		switch {
		case f == nil:
			errs = append(errs, fmt.Errorf("unknown flag: --%s%s", name, config.DidYouMean("--"+name, known)))
			if !has && next && args[i+1][0:min(1, len(args[i+1]))] != "-" {
				i++ // its value
			}
			continue
		case has:
		case f.NoOptDefVal != "":
			value = f.NoOptDefVal
		case !next:
			errs = append(errs, fmt.Errorf("--%s needs a value", name))
			continue
		default:
			i++
			value = args[i]
		}
		if err := f.Value.Set(value); err != nil {
			if num := (*strconv.NumError)(nil); errors.As(err, &num) {
				err = fmt.Errorf("%w; want a number (%s)", num.Err, f.Value.Type())
			}
			errs = append(errs, fmt.Errorf("--%s %q: %w", name, value, err))
		}
	}
	if len(errs) == 0 {
		return first
	}
	return errors.Join(errs...)
}

var flagName = regexp.MustCompile(`(?m)^ +(?:-\w, )?(--[\w-]+)`)

// noSuchCommand is the error of a word that is no subcommand of cmd.
func noSuchCommand(cmd *cobra.Command, word string) error {
	var known []string
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() {
			known = append(known, c.Name())
		}
	}
	hint := config.DidYouMean(word, known)
	if hint == "" && len(known) > 0 {
		slices.Sort(known)
		hint = "; there is " + strings.Join(known, ", ")
	}
	return fmt.Errorf("unknown command %q for %q%s", word, cmd.CommandPath(), hint)
}

// onlyCommands is for a command that has subcommands and takes nothing else.
func onlyCommands(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return noSuchCommand(cmd, args[0])
	}
	return nil
}

// helpCommand is cobra's, but that a command which there is not is a fault.
func helpCommand() *cobra.Command {
	return &cobra.Command{
		Use: "help [COMMAND]", Short: "Help about any command",
		RunE: func(c *cobra.Command, args []string) error {
			cmd, rest, err := c.Root().Find(args)
			if err != nil {
				return err
			}
			if len(rest) > 0 {
				return noSuchCommand(cmd, rest[0])
			}
			cmd.InitDefaultHelpFlag()
			return cmd.Help()
		},
	}
}
