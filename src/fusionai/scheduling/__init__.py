"""Planning: turns a `Problem` into an immutable `Plan` with a predicted speed and a bound on the best possible one.

All functions are pure: budgets are iterations, seeds are arguments, and the same problem gives the same plan. `ir.cost`
and measured profiles provide the input; `broker` versions plans, and `training` executes them.
"""
