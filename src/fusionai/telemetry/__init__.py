"""Steps, metrics and the process log, to files. Never blocks training, never holds text of the data.

Neighbours: `training`, `peer` and `client` record; `dashboard` reads.
"""
