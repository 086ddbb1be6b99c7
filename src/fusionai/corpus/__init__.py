"""Definition of a job and its input: recipes, data sets, tokenizers, microbatches. Uses no network protocol and no
model framework.

Neighbours: `client` opens a recipe's data and model with it; `capture` builds the model, `training` requests
microbatches.
"""
