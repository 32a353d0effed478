// Package shim re-exports the constructor of the upstream Docker provider.
//
// Upstream keeps it in an internal package. Go allows such an import to any
// package whose path starts with the upstream module's own path, which is why
// this module bears that path.
package shim

import (
	"github.com/hashicorp/terraform-plugin-sdk/v2/helper/schema"
	"github.com/terraform-providers/terraform-provider-docker/internal/provider"
)

// New returns the upstream provider, saying version in its user agent.
func New(version string) *schema.Provider {
	return provider.New(version)()
}
