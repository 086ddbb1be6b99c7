"""The peer's daemon: lends this machine to a pool. Registers, keeps its lease, lets jobs in by ticket, leaves cleanly.

Decides nothing about jobs. Neighbours: `execution` runs the stages, `broker` keeps the pool, `transport` connects.
"""
