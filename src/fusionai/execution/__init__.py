"""The stage host: runs stages of a job on this machine, in a peer's daemon and in the job owner's process.

It performs the commands of the stage machines in `coordination` with a backend and channels, and leaves every decision
to those machines.

Neighbours: `peer` and `training` own a `JobMember`; `backends`, `transport` and `ir.partition` are the layers below.
"""
