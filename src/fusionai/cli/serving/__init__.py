"""Commands that serve a model or talk to a served one: `fusion serve`, `fusion chat`."""
