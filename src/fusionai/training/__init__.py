"""A training job's driver: the shell around `coordination.driver`. Performs, never decides.

Neighbours: `client` starts it, `execution` runs the stages it drives, `storage` keeps commits and checkpoints.
"""
