"""Steps and metrics, to files. Never blocks training, never holds text of the data.

Neighbours: `training`, `peer` and `client` record; `dashboard` reads.
"""
