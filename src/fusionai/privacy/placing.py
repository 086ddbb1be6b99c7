"""Where the attacks run and on what: device, token tensors, a model loaded from its directory.

Weights are read from safetensors only, so nothing is unpickled. `client.audit` uses this.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from fusionai.primitives.errors import ModelError
from fusionai.privacy.subject import AttackedModel


def chosen_device(asked: str) -> str:
    """Return the device to use; `auto` is the GPU if there is one."""
    if asked != "auto":
        return asked
    return "cuda" if torch.cuda.is_available() else "cpu"


def as_tokens(tokens: Sequence[int] | Sequence[Sequence[int]], device: str) -> Tensor:
    return torch.tensor(tokens, dtype=torch.long, device=device)


def as_rows(tokens: Sequence[int], width: int, device: str) -> Tensor:
    """Return the tokens as [rows, width], without an incomplete last row."""
    return as_tokens(tokens[: len(tokens) // width * width], device).reshape(-1, width)


def load_attacked(directory: Path, device: str) -> AttackedModel:
    """Load a model in Hugging Face layout in fp32. Raises `ModelError`."""
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory, local_files_only=True, use_safetensors=True, dtype=torch.float32
        )
    except (OSError, ValueError, KeyError, RuntimeError) as problem:
        reason = (str(problem).splitlines() or [type(problem).__name__])[0]
        raise ModelError(f"{directory}: not a model that can be audited: {reason}") from problem
    return AttackedModel(cast(PreTrainedModel, model.to(device)))
