// Package shell holds what a command is, wherever it runs: its life cycle
// inputs, what is logged of it, and what is kept of its output.
package shell

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"strings"
	"sync"

	p "github.com/pulumi/pulumi-go-provider"
	"github.com/pulumi/pulumi-go-provider/infer"
)

// Names under which a command finds what its predecessor wrote.
const (
	PreviousStdout = "PULUMI_COMMAND_STDOUT"
	PreviousStderr = "PULUMI_COMMAND_STDERR"
)

// Lifecycle says what to run when. A changed trigger replaces the resource.
type Lifecycle struct {
	Triggers *[]any  `pulumi:"triggers,optional" provider:"replaceOnChanges"`
	Create   *string `pulumi:"create,optional"`
	Update   *string `pulumi:"update,optional"`
	Delete   *string `pulumi:"delete,optional"`
}

// OnUpdate is the command that a changed input runs: update or, without one,
// create once more. Nil when there is neither.
func (l Lifecycle) OnUpdate() *string {
	if l.Update != nil {
		return l.Update
	}
	return l.Create
}

// Logging says which streams are shown while a command runs. It has no bearing
// on what is kept in the state.
type Logging string

// The values of Logging; unset means both streams.
const (
	LogStdout Logging = "stdout"
	LogStderr Logging = "stderr"
	LogBoth   Logging = "stdoutAndStderr"
	LogNone   Logging = "none"
)

// Values makes Logging an enumeration.
func (Logging) Values() []infer.EnumValue[Logging] {
	return []infer.EnumValue[Logging]{
		{Name: "stdout", Value: LogStdout, Description: "Show stdout only"},
		{Name: "stderr", Value: LogStderr, Description: "Show stderr only"},
		{Name: "stdoutAndStderr", Value: LogBoth, Description: "Show both"},
		{Name: "none", Value: LogNone, Description: "Show neither"},
	}
}

func (l *Logging) shows(stream Logging) bool {
	return l == nil || *l == LogBoth || *l == stream
}

// Recorder takes a command's output: whole for the state, interleaved for an
// error, and line by line for the person who watches.
type Recorder struct {
	mu            sync.Mutex
	out, err, all bytes.Buffer
	toLog         *io.PipeWriter
	logged        chan struct{}
}

// NewRecorder starts one; Close it when the command has ended.
func NewRecorder(ctx context.Context) *Recorder {
	lines, toLog := io.Pipe()
	r := &Recorder{toLog: toLog, logged: make(chan struct{})}
	go func() {
		defer close(r.logged)
		scanner := bufio.NewScanner(lines)
		for scanner.Scan() {
			p.GetLogger(ctx).InfoStatus(scanner.Text())
		}
		// A line longer than the scanner takes must not block the command.
		_, _ = io.Copy(io.Discard, lines)
	}()
	return r
}

type stream struct {
	recorder *Recorder
	whole    *bytes.Buffer
	shown    bool
}

func (s stream) Write(data []byte) (int, error) {
	s.recorder.mu.Lock()
	s.whole.Write(data)
	s.recorder.all.Write(data)
	s.recorder.mu.Unlock()
	if s.shown {
		return s.recorder.toLog.Write(data)
	}
	return len(data), nil
}

// Stdout is where the command's standard output goes.
func (r *Recorder) Stdout(logging *Logging) io.Writer {
	return stream{r, &r.out, logging.shows(LogStdout)}
}

// Stderr is where the command's standard error goes.
func (r *Recorder) Stderr(logging *Logging) io.Writer {
	return stream{r, &r.err, logging.shows(LogStderr)}
}

// Close ends the log and returns what the state keeps, less one final newline
// each; for a failed command, an error with its line and all it wrote.
func (r *Recorder) Close(command string, failure error) (stdout, stderr string, err error) {
	_ = r.toLog.Close()
	<-r.logged
	r.mu.Lock()
	defer r.mu.Unlock()
	if failure != nil {
		return "", "", fmt.Errorf("%w: running %q:\n%s", failure, command, r.all.String())
	}
	return strings.TrimSuffix(r.out.String(), "\n"), strings.TrimSuffix(r.err.String(), "\n"), nil
}
