"""Example inputs for a capture, made from a batch of the job's data: the batch size varies, every other size is fixed.

If none are given, inputs of a Hugging Face model are random, in the sizes that its configuration states. Sizes follow
from the kind of input (tokens, images, sound, spectrograms), never from a model's name.

Neighbours: `client.training.preparation` provides the batch, `capture.capture` takes the examples.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from fusionai.backends.torch.host import to_torch
from fusionai.capture.tasks import BATCH, DECODER, SEQUENCE, ExampleInput
from fusionai.primitives.errors import ModelError
from fusionai.primitives.tensors import HostTensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def examples_of(batch: Mapping[str, HostTensor]) -> dict[str, ExampleInput]:
    """Return one example per input, in the batch's order."""
    return {name: ExampleInput(to_torch(tensor, torch.device("cpu"), own=True)) for name, tensor in batch.items()}


ROWS: Final = 2
"""Batch size of the examples."""
TOKENS: Final = 11
"""Tokens of each row (chosen)."""
IMAGE: Final = 224
"""Pixels per side if a model accepts any size: the usual training size of such models."""
SAMPLES: Final = 4000
"""Samples of sound (chosen)."""
FRAMES: Final = 64
"""Frames of a spectrogram, if the configuration states none (chosen)."""


def model_inputs(module: nn.Module, config: PreTrainedConfig) -> dict[str, ExampleInput]:
    """Return inputs in the order of the module's own arguments. Raises `ModelError` for an input of another kind."""
    takes = inspect.signature(module.forward).parameters
    main = str(getattr(module, "main_input_name", "input_ids"))
    wanted = {main}
    if getattr(config, "vision_config", None) is not None and "pixel_values" in takes:
        wanted |= {"pixel_values", "input_ids"} & set(takes)
    if getattr(config, "is_encoder_decoder", False) and DECODER in takes:
        wanted.add(DECODER)
    return {name: _drawn(name, config) for name in takes if name in wanted}


def _drawn(name: str, config: PreTrainedConfig) -> ExampleInput:
    generator = torch.Generator().manual_seed(0)

    def numbers(*sizes: int) -> ExampleInput:
        return ExampleInput(torch.randn(ROWS, *sizes, generator=generator))

    match name:
        case "input_ids" | "decoder_input_ids":
            vocabulary = int(_of(config.get_text_config(), "vocab_size", 2))
            tokens = torch.randint(0, vocabulary, (ROWS, TOKENS), generator=generator)
            return ExampleInput(tokens, (BATCH, SEQUENCE))
        case "pixel_values":
            vision = getattr(config, "vision_config", None) or config
            return numbers(int(_of(vision, "num_channels", 3)), *_pair(_of(vision, "image_size", IMAGE)))
        case "input_values" if hasattr(config, "num_mel_bins"):
            return numbers(int(_of(config, "max_length", FRAMES)), int(_of(config, "num_mel_bins", 1)))
        case "input_values":
            return numbers(SAMPLES)
        case "input_features" if hasattr(config, "num_mel_bins"):
            # Two frames of sound make one position.
            return numbers(int(_of(config, "num_mel_bins", 1)), 2 * int(_of(config, "max_source_positions", FRAMES)))
        case "input_features":
            return numbers(
                FRAMES, int(_of(config, "input_feat_per_channel", 1)) * int(_of(config, "input_channels", 1))
            )
        case _:
            raise ModelError(
                f"the model takes {name!r}, for which no example can be drawn.",
                hint="Give example inputs, by a function of your own that returns (module, examples) or as a data set.",
            )


def _of(config: Any, name: str, default: Any) -> Any:
    value = getattr(config, name, None)
    return default if value is None else value


def _pair(size: Any) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    first, second = size
    return int(first), int(second)
