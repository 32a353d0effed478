"""Models of the hub: which commit a name means, what its files are, how they come to a node."""
