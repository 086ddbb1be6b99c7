"""The OpenAI-compatible HTTP interface over a serving engine, and its one page. Plans and places nothing.

Neighbours: `serving` generates the tokens, `client` starts both.
"""
