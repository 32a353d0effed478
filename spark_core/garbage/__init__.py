"""What a stack uses of the weights and images on nodes, and what nobody uses any more."""
