"""What others could reconstruct of a job's text: attacks on what peers see, and what they recovered when measured.

Decides how attacks work and what counts as recovered; never what a job sends, and it stores nothing. `findings`,
`metrics` and `measured` load no framework; the attacks load PyTorch. Neighbours: `client.audit` gives it a model, texts
and the codecs that peers use; `cli.audit` and `cli.privacy` show what it found.
"""
