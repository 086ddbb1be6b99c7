"""From a problem to an immutable plan: who runs which blocks, how fast that is, how far from the best it can be. Pure.

Budgets are iterations, seeds are arguments; the same problem gives the same plan.
Neighbours: `ir.cost` and measured profiles go in; `broker` versions plans, `training` obeys them.
"""
