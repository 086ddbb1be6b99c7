"""The operator graph: grammar, operators, validation, cutting, cost, blocks, initial values. Pure.

No framework, clock, file or network. Whatever is received becomes a graph here, by `ir.validate`, or is refused.
Neighbours: `capture` makes graphs, `backends` run them, `scheduling` prices are taken from `ir.cost`.
"""
