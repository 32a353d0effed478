// Command pulumi-resource-docker serves the upstream Terraform Docker provider
// to a Pulumi engine, under the tokens and property names that the Python
// package pulumi_docker uses.
//
// It stands in for the released plugin on machines that can fetch Go modules
// but not releases. It holds what the upstream provider holds: the resources
// Container, RemoteImage, Volume, Network and Tag. The native docker.Image
// (builds) is not part of it.
package main

import (
	"github.com/pulumi/pulumi-terraform-bridge/v3/pkg/tfbridge"
	shimv2 "github.com/pulumi/pulumi-terraform-bridge/v3/pkg/tfshim/sdk-v2"
	"github.com/pulumi/pulumi/sdk/v3/go/common/tokens"
	"github.com/terraform-providers/terraform-provider-docker/shim"
)

const (
	name    = "docker"
	version = "5.2.0"
)

// resource names a bridged resource the way pulumi_docker does:
// docker:index/container:Container.
func resource(module, member string) tokens.Type {
	return tokens.Type(name + ":index/" + module + ":" + member)
}

// named keeps a list's own name where the released plugin does not pluralise it.
func named(pulumiName string) *tfbridge.SchemaInfo {
	return &tfbridge.SchemaInfo{Name: pulumiName}
}

// provider maps the upstream provider to the property names of pulumi_docker.
func provider() tfbridge.ProviderInfo {
	single := false
	return tfbridge.ProviderInfo{
		P:       shimv2.NewProvider(shim.New(version)),
		Name:    name,
		Version: version,
		Config: map[string]*tfbridge.SchemaInfo{
			"registry_auth": {Name: "registryAuth", MaxItemsOne: &single},
		},
		Resources: map[string]*tfbridge.ResourceInfo{
			"docker_container": {
				Tok: resource("container", "Container"),
				Fields: map[string]*tfbridge.SchemaInfo{
					"command":           named("command"),
					"networks_advanced": named("networksAdvanced"),
				},
				// A container's name and ports are taken until the old one is gone.
				DeleteBeforeReplace: true,
			},
			"docker_image": {
				Tok:    resource("remoteImage", "RemoteImage"),
				Fields: map[string]*tfbridge.SchemaInfo{"name": named("name")},
			},
			"docker_network": {Tok: resource("network", "Network")},
			"docker_volume":  {Tok: resource("volume", "Volume")},
			"docker_tag":     {Tok: resource("tag", "Tag")},
		},
		IgnoreMappings: []string{},
	}
}

func main() {
	tfbridge.Main(name, version, provider(), []byte("{}"))
}
