"""Sources of models: module construction, pretrained weights, adapters, initial values."""
