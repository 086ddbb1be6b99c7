"""The peer's daemon: lends this machine to a pool, keeps its lease, accepts jobs by ticket, and leaves cleanly.

`execution` runs the stages, `broker` keeps the pool, `transport` connects.
"""
