"""Plans of serving jobs: search, bound and prediction, one pipeline or several."""
