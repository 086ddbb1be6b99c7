"""Serving jobs from the owner's side: the model, its files, adapters and drafts, the run."""
