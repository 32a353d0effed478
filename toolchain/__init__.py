"""What sets a checkout up and drives it: bootstrap, launcher, stack, up, down. Standard library only."""
