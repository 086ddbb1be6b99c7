"""Plans of training jobs: search, bound and prediction."""
