"""Durable state: checkpoints, the commit journal, a job's directory, weights. Files are complete or absent, and hashed.

`training` and `client` keep a job's state here. All files are written through `storage.atomic` or with its guarantees.
"""
