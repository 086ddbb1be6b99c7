"""Names of the weights' files in a model directory of Hugging Face layout, and the index of several files.

`capture.models.huggingface` reads pretrained models by them; `checkpoint` writes the same layout.
"""

from __future__ import annotations

from typing import Final

import msgspec

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"


class WeightIndex(msgspec.Struct, frozen=True):
    """Content of `model.safetensors.index.json`: tensor name -> file."""

    weight_map: dict[str, str]
    metadata: dict[str, object] = {}
