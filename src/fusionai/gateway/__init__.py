"""The HTTP interface of a serving engine, by the APIs of OpenAI, Anthropic and Ollama, and its web page.

Neighbours: `serving` generates the tokens, `client` starts both.
"""
