"""Fetching weights from other members of a job, and serving them."""
