"""FusionAI: pool the GPUs people already own to train and serve neural networks together."""

__version__ = "0.1.0"
