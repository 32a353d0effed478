"""Moving large files between nodes over the fabric."""
