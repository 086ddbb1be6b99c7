"""Execution backends: the interface for running stages, the list of implementations, and one folder for each framework.

Backends compute; jobs, networks and time belong to their callers. A framework is imported only inside its own folder,
and only when its backend is opened.
Neighbours: `ir` describes the graphs, `execution` calls the backends, `peer` and `client` open them. One conformance
suite tests every backend.
"""
