module github.com/terraform-providers/terraform-provider-docker/shim

go 1.26

require (
	github.com/hashicorp/terraform-plugin-sdk/v2 v2.38.1
	github.com/terraform-providers/terraform-provider-docker v0.0.0
)
