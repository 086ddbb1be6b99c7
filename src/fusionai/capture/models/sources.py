"""Runs the encoder of an encoder-decoder model in the job owner's process: text or sound becomes rows.

`SourceEncoder` is transformers' own encoder with the model's weights. Its rows are placed like those of an image
(`capture.models.images.EncodedImage`): each has the place 0, and the decoder's tokens count up from 0 behind them.
Sound goes through Whisper's spectrograms, which transformers computes; other encoders of sound are refused.

Neighbours: `capture.models.seq2seq` makes the decoder read the rows, `serving.sources` asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fusionai.backends.torch.host import to_torch
from fusionai.capture.models.build import construct_empty
from fusionai.capture.models.huggingface import last_line
from fusionai.capture.models.images import AXES, EncodedImage
from fusionai.capture.models.seq2seq import NoDecoder
from fusionai.capture.tracing import code_lines
from fusionai.primitives.errors import ModelError

if TYPE_CHECKING:
    from fusionai.capture.capture import Captured

_SPECTROGRAMS: Final = "input_features"
"""Main input of encoders of sound that take spectrograms."""
_EXTRACTOR: Final = "WhisperFeatureExtractor"


class SourceEncoder:
    """`hears`: it encodes sound, else text. `rate_hz` and `window_samples`: of the sound; 0 for text."""

    def __init__(self, captured: Captured, directory: Path) -> None:
        """Load the encoder's weights, and what makes spectrograms for it. Raises `NoDecoder`."""
        built = captured.source.built
        assert built.huggingface is not None
        module: Any = construct_empty(replace(built, adapter=None)).eval()
        self._encoder: Any = module.get_encoder()
        self.hears = getattr(module, "main_input_name", "input_ids") == _SPECTROGRAMS
        self._extractor = _extractor(directory, built.name) if self.hears else None
        self.rate_hz = int(self._extractor.sampling_rate) if self._extractor is not None else 0
        self.window_samples = int(self._extractor.n_samples) if self._extractor is not None else 0
        own = {id(value) for value in self._encoder.parameters()}
        keys = {key: value for key, value in built.parameters(module).items() if id(value) in own}
        for key, tensor in captured.state(keys):
            read = to_torch(tensor, torch.device("cpu"), own=True)
            value = nn.Parameter(read.to(keys[key].dtype).reshape(keys[key].shape), requires_grad=False)
            torch.utils.swap_tensors(keys[key], value)
        self._try(built.name)

    def _try(self, name: str) -> None:
        try:
            if self.hears:
                self.encode_sound(np.zeros(self.rate_hz, np.float32))
            else:
                self.encode_text((0,))
        except Exception as error:  # another encoder than this module expects may fail in any way
            raise NoDecoder(
                f"{name} can't be served, because its encoder fails: {code_lines.reason(error)}."
            ) from error

    def encode_text(self, tokens: Sequence[int]) -> EncodedImage:
        """Return the rows of a text. Takes as long as the encoder needs. Raises `ModelError`."""
        return self._encoded(
            input_ids=torch.tensor([list(tokens)]), attention_mask=torch.ones((1, len(tokens)), dtype=torch.int64)
        )

    def encode_sound(self, samples: NDArray[np.float32]) -> EncodedImage:
        """Return the rows of sound of at most `window_samples`. Takes as long as the encoder needs. Raises
        `ModelError`."""
        assert self._extractor is not None
        made = self._extractor(samples, sampling_rate=self.rate_hz, return_tensors="pt")
        return self._encoded(input_features=made[_SPECTROGRAMS])

    def _encoded(self, **inputs: torch.Tensor) -> EncodedImage:
        try:
            with torch.inference_mode():
                made = self._encoder(**inputs, return_dict=True)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise ModelError(f"the model's encoder can't take this input: {code_lines.reason(error)}.") from error
        rows = np.ascontiguousarray(made.last_hidden_state[0].float().numpy())
        return EncodedImage("", rows, np.zeros((len(rows), AXES), np.int64), advance=0)


def _extractor(directory: Path, name: str) -> Any:
    """Return what makes spectrograms. Raises `NoDecoder`."""
    from transformers import AutoFeatureExtractor

    try:
        found = AutoFeatureExtractor.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the files may hold anything
        raise NoDecoder(
            f"what makes spectrograms for {name} can't be used: {last_line(error)}.",
            hint="Fetch or save the model again, with its preprocessor_config.json.",
        ) from error
    if type(found).__name__ != _EXTRACTOR:
        raise NoDecoder(
            f"{name} can't be served, because it hears through {type(found).__name__}, and only Whisper's spectrograms "
            "are made here.",
            hint="Serve a Whisper model for speech.",
        )
    return found
