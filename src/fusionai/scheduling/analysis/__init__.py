"""The comparison of a fleet of consumer GPUs with a few data-center GPUs."""
