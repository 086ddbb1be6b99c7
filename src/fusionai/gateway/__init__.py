"""The OpenAI-compatible HTTP interface of a serving engine, and its web page.

Neighbours: `serving` generates the tokens, `client` starts both.
"""
