"""The command line. Decides words, flags, tables and exit codes; does no work of its own.

One file per command, loaded only when that command is called: `fusion --help` imports no framework.
Neighbours: calls `client`, `broker`, `peer`, `dashboard`, `capture`, `corpus` and `scheduling`; nothing imports it.
"""
