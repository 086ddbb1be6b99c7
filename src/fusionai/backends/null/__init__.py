"""A backend that computes nothing: right shapes, no memory, no values. For plans, dry runs and the simulator.

Neighbours: `backends.interface` is what it implements; the conformance suite says which parts of it.
"""
