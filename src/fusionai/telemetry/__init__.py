"""Writes steps and metrics to files. It never blocks training and never stores text of the data.

Neighbours: `training`, `peer` and `client` record; `dashboard` reads.
"""
