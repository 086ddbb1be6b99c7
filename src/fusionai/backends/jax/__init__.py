"""Stages run by JAX: a process with this backend never loads torch. Neighbours: `backends.interface`."""
