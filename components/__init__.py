"""The components of a deployment: wiring of resources, one component per file."""
