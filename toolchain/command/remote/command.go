package remote

import (
	"context"
	"fmt"
	"strings"

	p "github.com/pulumi/pulumi-go-provider"
	"github.com/pulumi/pulumi-go-provider/infer"
	"github.com/pulumi/pulumi/sdk/v3/go/common/resource"

	"spark-vllm/toolchain/command/shell"
)

// Command is command:remote:Command.
type Command struct{}

// CommandInputs are the inputs of [Command].
type CommandInputs struct {
	shell.Lifecycle
	Stdin                  *string           `pulumi:"stdin,optional"`
	Logging                *shell.Logging    `pulumi:"logging,optional"`
	Connection             *Connection       `pulumi:"connection"                      provider:"secret"`
	Environment            map[string]string `pulumi:"environment,optional"`
	AddPreviousOutputInEnv *bool             `pulumi:"addPreviousOutputInEnv,optional"`
}

// CommandOutputs are the state of [Command].
type CommandOutputs struct {
	CommandInputs
	Stdout string `pulumi:"stdout"`
	Stderr string `pulumi:"stderr"`
}

var (
	_ infer.CustomUpdate[CommandInputs, CommandOutputs] = (*Command)(nil)
	_ infer.CustomDelete[CommandOutputs]                = (*Command)(nil)
)

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

// Update runs update or, without one, create again: whichever input changed,
// the connection included.
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

// Delete runs delete, if given, over the connection that the state holds.
func (*Command) Delete(
	ctx context.Context, req infer.DeleteRequest[CommandOutputs],
) (infer.DeleteResponse, error) {
	if req.State.Delete == nil {
		return infer.DeleteResponse{}, nil
	}
	return infer.DeleteResponse{}, req.State.run(ctx, *req.State.Delete)
}

const acceptEnvAdvice = "Unable to set '%s'. This only works if your SSH server is configured to accept these " +
	"variables via AcceptEnv. Alternatively, prefix the command itself: 'VAR=value command'"

func (c *CommandOutputs) run(ctx context.Context, command string) error {
	client, err := c.Connection.dial(ctx)
	if err != nil {
		return err
	}
	// The connection stays open until the plugin exits, as with the released
	// plugin: whatever that costs a server must show here too.
	session, err := client.NewSession()
	if err != nil {
		return err
	}
	defer func() { _ = session.Close() }()

	log := p.GetLogger(ctx)
	for name, value := range c.Environment {
		if err := session.Setenv(name, value); err != nil {
			log.Errorf(acceptEnvAdvice, name)
			return fmt.Errorf("could not set environment variable %q: %w", name, err)
		}
	}
	if c.AddPreviousOutputInEnv == nil || *c.AddPreviousOutputInEnv {
		for name, value := range map[string]string{
			shell.PreviousStdout: c.Stdout, shell.PreviousStderr: c.Stderr,
		} {
			if value == "" {
				continue
			}
			if err := session.Setenv(name, value); err != nil {
				log.Warningf(acceptEnvAdvice, name)
			}
		}
	}
	if c.Stdin != nil && *c.Stdin != "" {
		session.Stdin = strings.NewReader(*c.Stdin)
	}
	recorder := shell.NewRecorder(ctx)
	session.Stdout = recorder.Stdout(c.Logging)
	session.Stderr = recorder.Stderr(c.Logging)
	stdout, stderr, err := recorder.Close(command, session.Run(command))
	if err == nil {
		c.Stdout, c.Stderr = stdout, stderr
	}
	return err
}
