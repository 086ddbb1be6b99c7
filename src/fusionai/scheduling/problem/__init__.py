"""The planning problem: its types, and what stages, links and levers cost."""
