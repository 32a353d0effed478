// Package local runs commands on the machine that runs Pulumi.
package local

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"

	p "github.com/pulumi/pulumi-go-provider"
	"github.com/pulumi/pulumi-go-provider/infer"
	"github.com/pulumi/pulumi/sdk/v3/go/common/resource"

	"spark-vllm/toolchain/command/shell"
)

// Command is command:local:Command.
type Command struct{}

// CommandInputs are the inputs of [Command].
type CommandInputs struct {
	shell.Lifecycle
	Stdin                  *string            `pulumi:"stdin,optional"`
	Logging                *shell.Logging     `pulumi:"logging,optional"`
	Interpreter            *[]string          `pulumi:"interpreter,optional"`
	Dir                    *string            `pulumi:"dir,optional"`
	Environment            *map[string]string `pulumi:"environment,optional"`
	AssetPaths             *[]string          `pulumi:"assetPaths,optional"`
	ArchivePaths           *[]string          `pulumi:"archivePaths,optional"`
	AddPreviousOutputInEnv *bool              `pulumi:"addPreviousOutputInEnv,optional"`
}

// CommandOutputs are the state of [Command].
type CommandOutputs struct {
	CommandInputs
	Stdout string `pulumi:"stdout"`
	Stderr string `pulumi:"stderr"`
}

var (
	_ infer.CustomCheck[CommandInputs]                  = (*Command)(nil)
	_ infer.CustomUpdate[CommandInputs, CommandOutputs] = (*Command)(nil)
	_ infer.CustomDelete[CommandOutputs]                = (*Command)(nil)
)

// Check refuses what this stand-in leaves out.
func (*Command) Check(ctx context.Context, req infer.CheckRequest) (infer.CheckResponse[CommandInputs], error) {
	inputs, failures, err := infer.DefaultCheck[CommandInputs](ctx, req.NewInputs)
	for property, set := range map[string]bool{
		"assetPaths": inputs.AssetPaths != nil, "archivePaths": inputs.ArchivePaths != nil,
	} {
		if set {
			failures = append(failures, p.CheckFailure{
				Property: property,
				Reason:   "not part of this stand-in for pulumi-command; use the released plugin",
			})
		}
	}
	return infer.CheckResponse[CommandInputs]{Inputs: inputs, Failures: failures}, err
}

// Create runs create, if given.
func (*Command) Create(
	ctx context.Context, req infer.CreateRequest[CommandInputs],
) (infer.CreateResponse[CommandOutputs], error) {
	state := CommandOutputs{CommandInputs: req.Inputs}
	id, err := resource.NewUniqueHex(req.Name, 8, 0)
	if err == nil && !req.DryRun && req.Inputs.Create != nil {
		err = state.run(ctx, *req.Inputs.Create)
	}
	return infer.CreateResponse[CommandOutputs]{ID: id, Output: state}, err
}

// Update runs update or, without one, create again.
func (*Command) Update(
	ctx context.Context, req infer.UpdateRequest[CommandInputs, CommandOutputs],
) (infer.UpdateResponse[CommandOutputs], error) {
	state := CommandOutputs{CommandInputs: req.Inputs, Stdout: req.State.Stdout, Stderr: req.State.Stderr}
	var err error
	if command := req.Inputs.OnUpdate(); command != nil && !req.DryRun {
		err = state.run(ctx, *command)
	}
	return infer.UpdateResponse[CommandOutputs]{Output: state}, err
}

// Delete runs delete, if given.
func (*Command) Delete(
	ctx context.Context, req infer.DeleteRequest[CommandOutputs],
) (infer.DeleteResponse, error) {
	if req.State.Delete == nil {
		return infer.DeleteResponse{}, nil
	}
	return infer.DeleteResponse{}, req.State.run(ctx, *req.State.Delete)
}

func (c *CommandOutputs) run(ctx context.Context, command string) error {
	argv := []string{"/bin/sh", "-c"}
	if c.Interpreter != nil && len(*c.Interpreter) > 0 {
		argv = append([]string{}, *c.Interpreter...)
	}
	argv = append(argv, command)
	process := exec.CommandContext(ctx, argv[0], argv[1:]...)
	if c.Dir != nil {
		process.Dir = *c.Dir
	}
	process.Env = os.Environ()
	if c.Environment != nil {
		for name, value := range *c.Environment {
			process.Env = append(process.Env, name+"="+value)
		}
	}
	if c.AddPreviousOutputInEnv == nil || *c.AddPreviousOutputInEnv {
		if c.Stdout != "" {
			process.Env = append(process.Env, shell.PreviousStdout+"="+c.Stdout)
		}
		if c.Stderr != "" {
			process.Env = append(process.Env, shell.PreviousStderr+"="+c.Stderr)
		}
	}
	if c.Stdin != nil && *c.Stdin != "" {
		process.Stdin = strings.NewReader(*c.Stdin)
	}
	recorder := shell.NewRecorder(ctx)
	process.Stdout = recorder.Stdout(c.Logging)
	process.Stderr = recorder.Stderr(c.Logging)
	failure := process.Run()
	if ctx.Err() != nil {
		failure = errors.Join(failure, ctx.Err())
	}
	stdout, stderr, err := recorder.Close(command, failure)
	if err == nil {
		c.Stdout, c.Stderr = stdout, stderr
	}
	return err
}
