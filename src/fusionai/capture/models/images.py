"""Images as input of a language model: the rows that stand for them, and the encoder that makes the rows.

In the graph, a model that takes images has one more input, `image_rows`. Where `input_ids` is below 0, the row there
takes the place of the embedding's row, as transformers puts an image's features there. If the model turns queries and
keys by three positions (time, height, width), they are an input too, `axis_positions`. So one graph serves texts with
and without images, on any backend, and the encoder stays out of it.

`ImageEncoder` is transformers' own module with the weights that the graph does not use: it turns prepared pixels into
rows in the job owner's process. Models in which images change more than the rows of the embedding are refused:
`compared` runs a model's own forward on a sample until its layers are reached, and compares what they are handed with
what the served graph will be handed. It makes the embedding up, so it needs no weights of the layers.

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
from fusionai.capture.models.image_processor import ImageProcessor, NoImages, PreparedImage, sample
from fusionai.capture.tracing import code_lines
from fusionai.capture.tracing.patching import patched
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


TOLERANCE: Final = 1e-4
"""Largest difference of features, relative to the largest; an encoder's sums may come in another order."""
_KNOWN: Final = frozenset({"inputs_embeds", "attention_mask", "position_ids", "visual_pos_masks", "cache_position"})
"""Tensors that layers are handed and that are compared here, or follow from what is compared."""


class _Reached(Exception):
    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__()
        self.given = given


@dataclass(frozen=True, slots=True)
class ImageComparison:
    """`difference`: how the inputs of the model's layers differ from a graph's, in words; None if they don't.
    `together`: rows of images see each other."""

    difference: str | None
    together: bool = False


def compared(
    model: Any, inputs: Mapping[str, Any], image: EncodedImage, is_row: torch.Tensor, axes: np.ndarray | None
) -> ImageComparison:
    """Compare the inputs of the model's layers with a graph's. `inputs`: of the model's own forward, by its processor.
    `is_row`: [tokens], whether a row of `image` takes a token's place. `axes`: [tokens, 3], their positions; None for a
    model with one position per token."""
    given = _handed_to_layers(model, inputs, image.rows.shape[1])
    together = _sees_together(given.get("attention_mask"), is_row, _window(model))
    if together is None:
        return ImageComparison("its attention treats positions of images in a way of their own")
    return ImageComparison(_difference(given, inputs, image, is_row, axes), together)


def _difference(
    given: Mapping[str, Any],
    inputs: Mapping[str, Any],
    image: EncodedImage,
    is_row: torch.Tensor,
    axes: np.ndarray | None,
) -> str | None:
    wanted = _made_up(inputs["input_ids"], image.rows.shape[1])
    wanted[0, is_row] = torch.from_numpy(image.rows)
    if not _equal(given.get("inputs_embeds"), wanted):
        return "its layers get other features than those of its encoder, or at other places"
    if axes is not None and not _equal(given.get("position_ids"), torch.from_numpy(axes.T[:, None])):
        return "it counts the positions of images in another way"
    parts = given.get("deepstack_visual_embeds") or []
    added = None if image.layer_rows is None else torch.from_numpy(image.layer_rows)
    if not _equal(torch.cat(list(parts), -1) if parts else None, added):
        return "its layers add features of images in another way"
    others = [name for name, value in given.items() if isinstance(value, torch.Tensor) and name not in _KNOWN]
    return f"its layers also get {', '.join(others)}" if others else None


def _handed_to_layers(model: Any, inputs: Mapping[str, Any], width: int) -> Mapping[str, Any]:
    """Return the arguments of the first call of the part that has the layers."""

    def reached(_module: Any, _args: Any, given: dict[str, Any]) -> None:
        raise _Reached(given)

    parameters = inspect.signature(model.forward).parameters
    taken = {name: value for name, value in inputs.items() if name in parameters}
    hook = model.get_decoder().register_forward_pre_hook(reached, with_kwargs=True)
    embedding = model.get_input_embeddings()
    try:
        with patched((embedding, "forward", lambda ids: _made_up(ids, width))), torch.inference_mode():
            model(**taken)
    except _Reached as end:
        return end.given
    finally:
        hook.remove()
    return {}


def _window(model: Any) -> int | None:
    return getattr(model.config.get_text_config(), "sliding_window", None)


def _sees_together(given: Any, is_row: torch.Tensor, window: int | None) -> bool | None:
    """Return whether the masks that layers get let rows of an image see each other; None if they differ from that and
    from attention to earlier positions. Without masks, or with one of padding, layers make such attention
    themselves."""
    if given is None or (isinstance(given, torch.Tensor) and given.ndim == 2):
        return False
    masks = given if isinstance(given, Mapping) else {"": given}
    positions = torch.arange(len(is_row))
    back = positions[:, None] - positions
    begun = is_row & ~torch.cat([torch.zeros(1, dtype=torch.bool), is_row[:-1]])
    group = torch.where(is_row, begun.cumsum(0), 0)
    mutual = (group[:, None] == group) & is_row
    found: set[bool | None] = set()
    for kind, mask in masks.items():
        near = back < window if kind == "sliding_attention" and window else torch.ones_like(mutual)
        plain, mixed = (back >= 0) & near, ((back >= 0) | mutual) & near
        seen = plain if mask is None else _seen(mask)
        alike = [seen is not None and torch.equal(seen, one) for one in (plain, mixed)]
        found.add(False if alike[0] else True if alike[1] else None)
    return found.pop() if len(found) == 1 else None


def _seen(mask: Any) -> torch.Tensor | None:
    """Return a mask [1, 1, tokens, tokens] as bool [tokens, tokens], True where a key is seen; None for any other."""
    if not isinstance(mask, torch.Tensor) or mask.ndim != 4 or mask.shape[:2] != (1, 1):
        return None
    return (mask if mask.dtype == torch.bool else mask >= 0)[0, 0]


def _made_up(ids: torch.Tensor, width: int) -> torch.Tensor:
    """Return an embedding that differs for every token, of shape [..., width]."""
    return torch.sin(ids.unsqueeze(-1) + torch.arange(width, dtype=torch.float32))


def _equal(got: torch.Tensor | None, wanted: torch.Tensor | None) -> bool:
    if got is None or wanted is None:
        return got is wanted
    if got.shape != wanted.shape:
        # Some models put the numbers of tokens before the three axes.
        if got.ndim != wanted.ndim or got.shape[0] != wanted.shape[0] + 1:
            return False
        got = got[1:]
    return torch.allclose(got.float(), wanted.float(), rtol=0.0, atol=TOLERANCE * max(1.0, float(wanted.abs().max())))
