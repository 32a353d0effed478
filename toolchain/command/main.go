// Command pulumi-resource-command is a stand-in for the released plugin of that
// name, for machines that can fetch Go modules but not releases.
//
// It serves command:local:Command, command:remote:Command and
// command:remote:CopyToRemote and is held against the same contract tests as the
// released plugin (tests/toolchain/test_command_contract.py). Where the released
// plugin is awkward this one is equally awkward: a program that works with it
// must work with the other. What is not used here is left out (CopyFile,
// local.run, assetPaths, archivePaths, assets from a URL) and refused by name.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/pulumi/pulumi-go-provider/infer"

	"spark-vllm/toolchain/command/local"
	"spark-vllm/toolchain/command/remote"
)

// Version is that of the pulumi-command Python package it answers to.
const Version = "1.2.1"

func main() {
	provider, err := infer.NewProviderBuilder().
		WithResources(
			infer.Resource(&local.Command{}),
			infer.Resource(&remote.Command{}),
			infer.Resource(&remote.CopyToRemote{}),
		).
		WithDescription("Stand-in for pulumi-command: runs commands here and over SSH, copies files over SFTP.").
		Build()
	if err == nil {
		err = provider.Run(context.Background(), "command", Version)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "pulumi-resource-command:", err)
		os.Exit(1)
	}
}
