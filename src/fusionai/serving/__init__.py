"""A serving job's driver: the shell around `coordination.serving`, with sampling and text. Performs, never decides.

Neighbours: `client` starts it, `execution` runs the stages it drives, `gateway` offers it to the world.
"""
