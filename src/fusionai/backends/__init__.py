"""What runs a stage: the interface, the list of implementations, and one folder for each.

Decides nothing about jobs, networks or time. Frameworks are imported in their own folder, when a backend is opened.
Neighbours: `ir` says what to compute; `execution` calls, `peer` and `client` open; one conformance suite tests all.
"""
