"""Connections between the members of a job, and the queues in front of them."""
