"""Commands that open, join, list and leave a pool, look at its jobs, and edit this machine's trust list."""
