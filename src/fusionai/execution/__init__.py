"""The stage host: runs stages of a job on this machine, for a peer's daemon and for the job owner's process alike.

Performs the commands of `coordination.stage` with a backend and channels; decides nothing itself. Neighbours: `peer`
and `training` own a `JobMember`; `backends`, `transport`, `ir.partition` are below.
"""
