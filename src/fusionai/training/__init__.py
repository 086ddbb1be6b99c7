"""The driver of a training job: performs the commands of the state machine in `coordination.training.driver`.

Neighbours: `client` starts it, `execution` runs the stages it drives, `storage` keeps commits and checkpoints.
"""
