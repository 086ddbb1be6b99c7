"""Commands that train or show training data: `fusion train`, `fusion demo`, `fusion data`."""
