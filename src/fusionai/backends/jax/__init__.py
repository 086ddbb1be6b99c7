"""The JAX backend. A process with this backend never loads torch. Neighbours: `backends.interface`."""
