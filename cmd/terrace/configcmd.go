package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/terrace-kv/terrace/internal/config"
)

func configCommand(e env) *cobra.Command {
	cmd := &cobra.Command{Use: "config", Short: "Check and show settings", Args: onlyCommands,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	check := &cobra.Command{
		Use: "check FILE", Short: "Check a file of settings, and nothing else", Args: cobra.ExactArgs(1),
		Long: "Check a file of settings, without the environment and flags. All faults are reported, with exit code 2.",
		RunE: func(_ *cobra.Command, args []string) error {
			in := baseInput(nil)
			in.File = args[0]
			if _, err := config.Load(in); err != nil {
				return &failure{exitUsage, err}
			}
			fmt.Fprintf(e.out, "%s is in order\n", args[0])
			return nil
		},
	}
	print := &cobra.Command{
		Use: "print", Short: "Show the settings that serve would use, and where each comes from", Args: cobra.NoArgs,
		Long: "Show the settings that serve would use with the same file, environment and flags, as a file of\n" +
			"settings. What is not a default has its source beside it; secrets are not shown.",
	}
	s := addSettings(print)
	print.RunE = func(*cobra.Command, []string) error {
		c, err := s.load(e)
		if err != nil {
			return err
		}
		_, err = e.out.Write(c.YAML())
		return err
	}
	cmd.AddCommand(check, print)
	return cmd
}
