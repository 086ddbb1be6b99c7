"""Measures what others could reconstruct of a job's text: attacks on what peers see, and the results.

Decides how attacks work and what counts as recovered; never what a job sends. Stores nothing. `findings` loads no
framework; the attacks load PyTorch. `client.audit` provides a model, texts and the codecs that peers use."""
