"""Numeric loops of the planner, compiled with numba where it is installed."""
