"""Channels between identified machines, and how a machine comes to be identified.

Decides who the other side is (one Ed25519 key per machine, certified by the pool's own authority) and how frames move:
in order, whole, with backpressure and deadlines. Never looks into a job's messages and never decides who may do what in
a job; it only checks signatures. Neighbours: `wire` below; `execution`, `broker`, `peer` and `client` hold channels.
"""
