"""The planning problem: its types, and what stages, links and savings cost."""
