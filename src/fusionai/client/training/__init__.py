"""Training jobs from the owner's side: the recipe, the run, replicas, the demo."""
