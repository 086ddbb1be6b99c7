"""What a job is and what it is fed: recipes, data sets, tokenizers, microbatches. Knows no network and no framework."""
