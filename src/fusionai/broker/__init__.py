"""Keeps a pool: its members, leases, jobs, plan versions and invitations, journalled before anything is acknowledged.

Decides nothing itself: `coordination.broker.decisions` does. No tensor and no token passes through it.
Neighbours: `coordination` decides, `transport` connects and certifies; `peer` and `client` are who asks.
"""
