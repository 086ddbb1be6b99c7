"""Writes steps, metrics and the process log to files. It never blocks training and never stores text of the data.

Neighbours: `training`, `peer` and `client` record; `dashboard` reads.
"""
