"""Images as input of a language model: the rows that stand for them, and the encoder that makes the rows.

In the graph, a model that takes images has one more input, `image_rows`. Where `input_ids` is below 0, the row there
takes the place of the embedding's row, as transformers puts an image's features there. If the model turns queries and
keys by three positions (time, height, width), they are an input too, `axis_positions`. So one graph serves texts with
and without images, on any backend, and the encoder stays out of it.

`ImageEncoder` is transformers' own module with the weights that the graph does not use: it turns prepared pixels into
rows in the job owner's process. Models in which images change more than the rows of the embedding are refused.

Neighbours: `capture.capture` calls `take_images`, `capture.tasks` fills the holder, `serving.images` prepares pixels
and keeps rows."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fusionai.backends.torch.host import to_torch
from fusionai.capture.models.build import construct_empty
from fusionai.capture.models.image_check import ImageComparison, compared
from fusionai.capture.models.image_processor import ImageProcessor, NoImages, PreparedImage, sample
from fusionai.capture.tracing import code_lines
from fusionai.primitives.errors import ModelError

if TYPE_CHECKING:
    from fusionai.capture.capture import Captured

_AROUND: Final = ("one ", " two")
"""Text before and after the sample."""
AXES: Final = 3
"""Positions of a token if images have places in time, height and width."""
_BEYOND_ROWS: Final = {
    "cross_attention_mask": "layers read images by attention of their own",
    "aspect_ratio_ids": "layers read images by attention of their own",
}
"""An argument of a model's forward -> what an image is to the model besides rows in place of the embedding's."""


class Holder:
    """Holds the rows of one module while it is traced; its embedding reads them. [b, s, hidden size]."""

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None
        self.layer_rows: torch.Tensor | None = None
        """[b, s, layers * hidden size], for models that add features of images to the results of their first layers."""


class _Taking(nn.Module):
    """Base class put before an embedding's own class: rows of images take the place of the embedding's."""

    holder: Holder

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  the embedding's own name
        embedded = super().forward(input.clamp(min=0))
        rows = self.holder.rows
        assert rows is not None
        return torch.where((input < 0).unsqueeze(-1), rows, embedded)


class _Adding(nn.Module):
    """Base class put before a layer's own class: adds part `number` of the holder's `layer_rows` to its result."""

    holder: Holder
    number: int

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = super().forward(*args, **kwargs)
        rows = self.holder.layer_rows
        assert rows is not None
        return result + rows.split(result.shape[-1], -1)[self.number]


@cache
def _class_of(base: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"{base.__name__.removeprefix('_')}{kind.__name__}", (base, kind), {})


def obstacle(module: nn.Module) -> str | None:
    """Return why rows in place of the embedding's are not all that an image means to this model; None if they are."""
    model: Any = module
    config = model.config
    arguments = {*inspect.signature(model.forward).parameters, *inspect.signature(_inner(model).forward).parameters}
    for name, reason in _BEYOND_ROWS.items():
        if name in arguments:
            return reason
    if not hasattr(model, "get_image_features") or "pixel_values" not in arguments:
        return "transformers has no features of images for it"
    texts = config.get_text_config()
    if _deepstack(config) and not hasattr(model.get_decoder(), "_deepstack_process"):
        return "features of images are added in several places"
    if getattr(texts, "hidden_size_per_layer_input", None):
        return "every layer has an embedding of its own"
    return None


def _deepstack(config: Any) -> int:
    """Return how many layers add features of images to their results (DeepStack, arXiv 2406.04334): the first ones."""
    return len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())


def take_images(module: nn.Module) -> tuple[int, int]:
    """Make the module's embedding, and layers if it has features for them, take rows of images. Returns the sizes of a
    row, and of what it has for layers. Raises `NoImages`."""
    if (reason := obstacle(module)) is not None:
        raise NoImages(f"{type(module).__name__} reads no images here, because {reason}.")
    model: Any = module
    embedding = model.get_input_embeddings()
    holder = embedding.holder = Holder()
    embedding.__class__ = _class_of(_Taking, type(embedding))
    count = _deepstack(model.config)
    for number, layer in enumerate(model.get_decoder().layers[:count] if count else ()):
        layer.holder, layer.number = holder, number
        layer.__class__ = _class_of(_Adding, type(layer))
    width = int(embedding.embedding_dim)
    return width, count * width


def holder_of(module: nn.Module) -> Holder | None:
    """Return the holder of the rows that the module takes in place of embeddings; None for one that takes none."""
    found = (getattr(child, "holder", None) for child in module.modules())
    return next((holder for holder in found if isinstance(holder, Holder)), None)


def has_axes(module: nn.Module) -> bool:
    """Return whether the model turns queries and keys by positions in time, height and width."""
    return hasattr(_inner(module), "get_rope_index")


def _inner(module: Any) -> Any:
    """Return the model without its head."""
    return getattr(module, "model", module)


@dataclass(frozen=True, slots=True, eq=False)
class EncodedImage:
    """`text`: what stands for the image in a prompt; it has the model's image token once for each row. `rows`: [rows,
    hidden size], float32. `axes`: [rows, 3], each row's place relative to the image's first position; None for a model
    with one position per token. `advance`: how far positions after the image are from its first one."""

    text: str
    rows: NDArray[np.float32]
    axes: NDArray[np.int64] | None
    advance: int
    layer_rows: NDArray[np.float32] | None = None
    """[rows, layers * hidden size]: what the first layers add to their results; None if they add nothing."""


def axis_positions(prompt: Iterable[tuple[EncodedImage, int] | None]) -> tuple[NDArray[np.int64], int]:
    """Return [tokens, 3], the positions of a prompt's tokens in time, height and width, and the position after them.
    `prompt`: for each token the image and the row that take its place, None for text. An image's rows have places
    relative to its first position; text counts on from the image's end (Qwen2-VL, arXiv 2409.12191)."""
    found: list[NDArray[np.int64] | int] = []
    begun = following = 0
    for taken in prompt:
        if taken is None:
            found.append(following)
            following += 1
            continue
        image, row = taken
        begun = following if row == 0 else begun
        found.append(begun + (row if image.axes is None else image.axes[row]))
        if row == len(image.rows) - 1:
            following = begun + image.advance
    return np.array([np.broadcast_to(place, AXES) for place in found], np.int64).reshape(-1, AXES), following


class ImageEncoder:
    """The part of a model that turns pictures into rows, and the model's processor before it. `token`: the model's
    image token. `together`: rows without text between them see each other in the model's layers."""

    def __init__(self, captured: Captured, directory: Path) -> None:
        """Load the processor, and the encoder's weights: those that the graph does not use, and try both with a small
        image. Raises `NoImages`."""
        built = captured.source.built
        assert built.huggingface is not None
        config = built.huggingface.config
        plain = replace(built, adapter=None)  # adapters change layers of the graph only
        self.processor = ImageProcessor.load(directory, config)
        self.token = int(config.image_token_id)
        self._word: str = self.processor.word(self.token)
        module = construct_empty(plain).eval()
        parameters = plain.parameters(module)
        for key, tensor in captured.state(key for key in captured.unused if key in parameters):
            made = parameters[key]
            read = to_torch(tensor, torch.device("cpu"), own=True)
            value = nn.Parameter(read.to(made.dtype).reshape(made.shape), requires_grad=False)
            torch.utils.swap_tensors(made, value)
        self._model: Any = module
        try:
            found = self._tried()
        except Exception as error:  # another processor or encoder than this module expects may fail in any way
            raise NoImages(f"its encoder can't take an image: {code_lines.reason(error)}.") from error
        if found.difference is not None:
            raise NoImages(f"{type(module).__name__} reads no images here: {found.difference}.")
        self.together = found.together

    def _tried(self) -> ImageComparison:
        """Encode a sample between two words, and compare what the model's own forward makes of it."""
        prepared = self.processor.prepare(sample(), *_AROUND)
        image = self._encoded(prepared)
        ids = prepared.pixels["input_ids"][0]
        is_row = ids == self.token
        rows = iter(range(len(image.rows)))
        axes, _ = axis_positions([(image, next(rows)) if taken else None for taken in is_row.tolist()])
        return compared(self._model, prepared.pixels, image, is_row, axes if has_axes(self._model) else None)

    def encode(self, data: bytes) -> EncodedImage:
        """Encode a picture in a common format. Takes as long as the encoder needs. Raises `UsageError` for bytes that
        are no picture, `ModelError` if the processor does not fit the encoder."""
        return self._encoded(self.processor.prepare(data))

    def _encoded(self, prepared: PreparedImage) -> EncodedImage:
        known = inspect.signature(_inner(self._model).get_image_features).parameters
        given = {name: value for name, value in prepared.pixels.items() if name in known}
        try:
            with torch.inference_mode():
                made = self._model.get_image_features(**given, return_dict=True)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise ModelError(f"the model's encoder can't take this image: {code_lines.reason(error)}.") from error
        rows = _joined(made.pooler_output)
        added = [_joined(one) for one in getattr(made, "deepstack_features", None) or ()]
        count = prepared.text.count(self._word)
        if len(rows) != count:
            raise ModelError(
                f"the model's encoder made {len(rows)} rows of an image that takes {count} positions in a prompt.",
                hint="The processor's files do not belong to these weights: fetch or save the model again.",
            )
        axes, advance = self._axes(given, count)
        return EncodedImage(prepared.text, rows, axes, advance, np.concatenate(added, 1) if added else None)

    def _axes(self, given: Mapping[str, Any], count: int) -> tuple[NDArray[np.int64] | None, int]:
        """Return the places of an image's rows, and the position after it, as the model counts them."""
        if not has_axes(self._model):
            return None, count
        ids = torch.full((1, count + 1), self.token)
        kinds = torch.ones_like(ids, dtype=torch.int32)
        kinds[0, -1] = 0  # a token of text after the image
        count_positions = _inner(self._model).get_rope_index
        known = inspect.signature(count_positions).parameters
        options = {"mm_token_type_ids": kinds, **given}
        places, _ = count_positions(ids, **{name: value for name, value in options.items() if name in known})
        found = places[-AXES:, 0].numpy().astype(np.int64).T
        return np.ascontiguousarray(found[:-1]), int(found[-1, 0])


def _joined(features: torch.Tensor | Sequence[torch.Tensor]) -> NDArray[np.float32]:
    """Return features as [rows, size]. They come in parts, each with any number of dimensions before the last one."""
    parts = [features] if isinstance(features, torch.Tensor) else features
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]).float().numpy()
