"""What a job owner needs: the pool's state, a job from a recipe, a pool of one's own machine for the demo.

Composes `capture`, `corpus`, `scheduling`, `training`; talks to a broker through `transport` only.
Neighbours: `cli` is above.
"""
