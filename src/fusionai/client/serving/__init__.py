"""Serving jobs from the owner's side: the model, its files, adapters, what guesses tokens, the run."""
