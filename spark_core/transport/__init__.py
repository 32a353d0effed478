"""How commands reach a node: values for commands, a protocol for carriers, OpenSSH as the real carrier."""
