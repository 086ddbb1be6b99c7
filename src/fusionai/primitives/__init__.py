"""Types that every package shares: ids, errors, units, clocks, host tensors, environment. Imports no other package."""
