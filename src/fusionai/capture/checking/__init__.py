"""Comparison of a captured graph with its module, by running both."""
