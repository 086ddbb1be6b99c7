"""Words every package shares: ids, errors, units, clocks, host tensors, environment. Knows nothing above it."""
