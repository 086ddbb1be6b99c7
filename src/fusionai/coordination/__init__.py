"""Every decision about members, jobs and steps, as tables without clock, network, file or framework.

An event and *now* go in, a new state and commands come out; the shells that perform commands are elsewhere.
Neighbours: `wire` gives message types; `broker`, `training` and `execution` feed events and perform commands.
"""
