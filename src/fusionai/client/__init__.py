"""The job owner's side: sessions with the pool, training and serving jobs, and pools of local processes.

Neighbours: composes `capture`, `corpus`, `scheduling`, `training` and `serving`, and reaches the broker only through
`transport`; `cli` uses it.
"""
