"""The command line: flags, messages, tables and exit codes. The work itself is done by the packages below.

Each command has its own module, imported only when the command is called, so `fusion --help` imports no framework.
Neighbours: calls `client`, `broker`, `peer`, `dashboard`, `capture`, `corpus` and `scheduling`; nothing imports it.
"""
