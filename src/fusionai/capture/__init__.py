"""Turn a module into an operator graph: build it without weights, trace it, lower it to the IR and compare the two by
numbers.

Runs in the job owner's process only. Only the graph and the requested tensor values leave it. Neighbours: `ir` defines
the graph, `backends.torch` executes it for the self-check, `client` and `cli` call this package.
"""
