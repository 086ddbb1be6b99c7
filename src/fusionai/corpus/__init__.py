"""What a job is and what it is fed: recipes, data sets, tokenizers, microbatches. Knows no network and no framework.

Neighbours: `client` opens a recipe's data and model with it; `capture` builds the model, `training` asks for
microbatches.
"""
