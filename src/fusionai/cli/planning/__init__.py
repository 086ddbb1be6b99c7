"""Commands about pools on paper: `fusion plan`, `fusion simulate`, `fusion analyze`. They start nothing."""
