"""The operator graph: grammar, operators, validation, cutting, cost, blocks, initial values. Pure.

Uses no framework, clock, file or network. Received data becomes a graph only through `ir.validate`, which refuses
anything illegal. `capture` makes graphs, `backends` run them, `scheduling` takes their costs from `ir.cost`.
"""
