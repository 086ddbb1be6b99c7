"""What must survive: checkpoints, the commit journal, a job's directory. Whole or not at all, checked by hash.

Neighbours: `training` and `client` keep a job in it; everything that writes files writes through `storage.atomic`.
"""
