"""Channels between identified machines, and how a machine gets its identity.

Responsible for who the other side is (one Ed25519 key per machine, certified by the pool's own authority) and for how
frames move: in order, whole, with backpressure and deadlines. It checks signatures, but never reads a job's messages
and never decides which machine may do what in a job. `wire` defines the frames; `execution`, `broker`, `peer` and
`client` hold channels.
"""
