package remote

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/pkg/sftp"
	p "github.com/pulumi/pulumi-go-provider"
	"github.com/pulumi/pulumi-go-provider/infer"
	"github.com/pulumi/pulumi-go-provider/infer/types"
	"github.com/pulumi/pulumi/sdk/v3/go/common/resource"
)

// CopyToRemote is command:remote:CopyToRemote. It has no delete: what was
// copied stays.
type CopyToRemote struct{}

// CopyToRemoteInputs are the inputs of [CopyToRemote].
type CopyToRemoteInputs struct {
	Connection *Connection          `pulumi:"connection"        provider:"secret"`
	Triggers   *[]any               `pulumi:"triggers,optional" provider:"replaceOnChanges"`
	Source     types.AssetOrArchive `pulumi:"source"`
	RemotePath string               `pulumi:"remotePath"`
}

// CopyToRemoteOutputs are the state of [CopyToRemote].
type CopyToRemoteOutputs struct{ CopyToRemoteInputs }

var (
	_ infer.CustomCheck[CopyToRemoteInputs]                       = (*CopyToRemote)(nil)
	_ infer.CustomUpdate[CopyToRemoteInputs, CopyToRemoteOutputs] = (*CopyToRemote)(nil)
)

// Check wants exactly one of asset and archive, of a kind that is served.
func (*CopyToRemote) Check(
	ctx context.Context, req infer.CheckRequest,
) (infer.CheckResponse[CopyToRemoteInputs], error) {
	inputs, failures, err := infer.DefaultCheck[CopyToRemoteInputs](ctx, req.NewInputs)
	refuse := func(reason string) {
		failures = append(failures, p.CheckFailure{Property: "asset", Reason: reason})
	}
	source, given := req.NewInputs.GetOk("source")
	asset, archive := inputs.Source.Asset, inputs.Source.Archive
	switch {
	case err != nil || (given && source.IsComputed()):
	case asset != nil && archive != nil:
		refuse("only one of asset or archive can be set")
	case asset == nil && archive == nil:
		refuse("either asset or archive must be set")
	case (asset != nil && asset.IsURI()) || (archive != nil && archive.IsURI()):
		refuse("assets from a URL are not part of this stand-in for pulumi-command; use the released plugin")
	}
	return infer.CheckResponse[CopyToRemoteInputs]{Inputs: inputs, Failures: failures}, err
}

// Create copies.
func (*CopyToRemote) Create(
	ctx context.Context, req infer.CreateRequest[CopyToRemoteInputs],
) (infer.CreateResponse[CopyToRemoteOutputs], error) {
	response := infer.CreateResponse[CopyToRemoteOutputs]{Output: CopyToRemoteOutputs{req.Inputs}}
	if req.DryRun {
		return response, nil
	}
	err := req.Inputs.copy(ctx)
	if err == nil {
		response.ID, err = resource.NewUniqueHex("", 8, 0)
	}
	return response, err
}

// Update copies again only if the content or the destination changed.
func (*CopyToRemote) Update(
	ctx context.Context, req infer.UpdateRequest[CopyToRemoteInputs, CopyToRemoteOutputs],
) (infer.UpdateResponse[CopyToRemoteOutputs], error) {
	response := infer.UpdateResponse[CopyToRemoteOutputs]{Output: CopyToRemoteOutputs{req.Inputs}}
	changed := req.Inputs.hash() != req.State.hash() || req.Inputs.RemotePath != req.State.RemotePath
	if req.DryRun || !changed {
		return response, nil
	}
	return response, req.Inputs.copy(ctx)
}

func (c *CopyToRemoteInputs) hash() string {
	if c.Source.Archive != nil {
		return c.Source.Archive.Hash
	}
	return c.Source.Asset.Hash
}

func (c *CopyToRemoteInputs) copy(ctx context.Context) error {
	client, err := c.Connection.dial(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()
	connection, err := sftp.NewClient(client, sftp.UseConcurrentWrites(true))
	if err != nil {
		return err
	}
	defer func() { _ = connection.Close() }()
	to := destination{connection}
	asset, archive := c.Source.Asset, c.Source.Archive
	switch {
	case asset != nil && asset.IsText():
		return to.writeText(asset.Text, c.RemotePath)
	case asset != nil && asset.IsPath():
		return to.copyPath(asset.Path, c.RemotePath)
	case archive != nil && archive.IsPath():
		return to.copyPath(archive.Path, c.RemotePath)
	case archive != nil && archive.IsAssets():
		return to.copyEntries(archive, c.RemotePath)
	}
	return errors.New("source is neither a text, a path nor a set of assets")
}

// destination is the far side of an SFTP connection.
type destination struct{ *sftp.Client }

// find returns nil for what does not exist.
func (d destination) find(at string) (fs.FileInfo, error) {
	info, err := d.Stat(at)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("failed to stat remote path %s: %w", at, err)
	}
	return info, nil
}

func (d destination) makeParents(of string) error {
	if err := d.MkdirAll(path.Dir(of)); err != nil {
		return fmt.Errorf("failed to create parent directories for %s: %w", of, err)
	}
	return nil
}

// write puts content at a path whose folder exists. An existing file keeps its
// owner and mode; a new one gets the server's defaults.
func (d destination) write(content io.Reader, at string) error {
	file, err := d.Create(at)
	if err != nil {
		return fmt.Errorf("failed to create remote file %s: %w", at, err)
	}
	defer func() { _ = file.Close() }()
	if _, err := file.ReadFrom(content); err != nil {
		return fmt.Errorf("failed to write to remote path %s: %w", at, err)
	}
	return nil
}

func (d destination) writeText(text, at string) error {
	found, err := d.find(at)
	if err != nil {
		return err
	}
	if found != nil && found.IsDir() {
		return fmt.Errorf(
			"remote path %s is a directory; when using a text asset, remotePath must be a file path", at)
	}
	if err := d.makeParents(at); err != nil {
		return err
	}
	return d.write(bytes.NewReader([]byte(text)), at)
}

// copyPath copies a file or a folder from this machine. Into an existing folder
// it goes under its own name, except for a folder given with a trailing slash,
// whose contents go there.
func (d destination) copyPath(source, at string) error {
	local, err := os.Stat(source)
	if err != nil {
		return err
	}
	found, err := d.find(at)
	if err != nil {
		return err
	}
	if local.IsDir() {
		if found == nil {
			if err := d.MkdirAll(at); err != nil {
				return fmt.Errorf("failed to create remote directory %s: %w", at, err)
			}
		}
		if !strings.HasSuffix(source, "/") {
			at = path.Join(at, filepath.Base(source))
		}
		return d.copyFolder(source, at)
	}
	if found == nil {
		if err := d.makeParents(at); err != nil {
			return err
		}
	} else if found.IsDir() {
		at = path.Join(at, filepath.Base(source))
	}
	return d.copyFile(source, at)
}

func (d destination) copyFile(source, at string) error {
	file, err := os.Open(source)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	return d.write(file, at)
}

func (d destination) makeFolder(at string) error {
	found, err := d.find(at)
	switch {
	case err != nil:
		return err
	case found == nil:
		if err := d.Mkdir(at); err != nil {
			return fmt.Errorf("failed to create remote directory %s: %w", at, err)
		}
	case !found.IsDir():
		return fmt.Errorf("remote path %s exists but is not a directory", at)
	}
	return nil
}

func (d destination) copyFolder(source, at string) error {
	return fs.WalkDir(os.DirFS(source), ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		target := path.Join(at, name)
		if entry.IsDir() {
			return d.makeFolder(target)
		}
		return d.copyFile(filepath.Join(source, filepath.FromSlash(name)), target)
	})
}

// copyEntries writes each asset of an archive under its name.
func (d destination) copyEntries(archive *resource.Archive, at string) error {
	found, err := d.find(at)
	if err != nil {
		return err
	}
	if found == nil {
		if err := d.MkdirAll(at); err != nil {
			return fmt.Errorf("failed to create remote directory %s: %w", at, err)
		}
	} else if !found.IsDir() {
		return fmt.Errorf("remote path %s exists but is not a directory; cannot copy asset archive contents", at)
	}
	entries, err := archive.Open()
	if err != nil {
		return fmt.Errorf("failed to open asset archive: %w", err)
	}
	defer func() { _ = entries.Close() }()
	for {
		name, content, err := entries.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("failed to read asset archive entry: %w", err)
		}
		target := path.Join(at, name)
		if err = d.makeParents(target); err == nil {
			err = d.write(content, target)
		}
		_ = content.Close()
		if err != nil {
			return err
		}
	}
}
