"""Keeps a pool: its members, leases, jobs, plan versions and invitations, journalled before they are acknowledged.

`coordination.broker.decisions` decides, `transport` connects and certifies, `peer` and `client` send the requests. No
tensor and no token passes through the broker.
"""
