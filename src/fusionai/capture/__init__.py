"""From a module to the operator graph: built without weights, traced, spelt in the IR, checked numerically.

Runs in the job owner's process only; nothing leaves it but the graph and the values it is asked for.
Neighbours: `ir` is what comes out, `backends.torch` executes it for the self-check; `client` and `cli` call.
"""
