"""Serving programs independent of a framework: page table, checks of passes, serving in parts, cacheless recompute."""
