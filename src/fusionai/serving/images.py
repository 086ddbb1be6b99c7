"""Images in prompts: their places, the tokens that stand for their rows, and what the first stage gets of them.

A row of an image is a token of its own, with a number beyond every vocabulary that belongs to this image alone. So
whatever handles tokens handles images: prompts with the same images share prefixes, a text is read again after a fault,
and its length counts. Only here do such tokens become rows: the first stage gets -1 in place of the token, and the row
beside it (`capture.models.images`).

`ImageReader` has pictures encoded, one after the other on a thread of its own, and keeps the latest. `ImageFeed` knows
the images of the running sessions.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from fusionai.ir.schema import Graph
from fusionai.ir.serving import AXIS_POSITIONS, IMAGE_ROWS, LAYER_ROWS
from fusionai.primitives.errors import ExecutionError, UsageError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire.messages import Segment

if TYPE_CHECKING:
    from fusionai.capture.models.images import EncodedImage

FIRST_TOKEN: Final = 2**40
"""Smallest token that stands for a row of an image; larger than any vocabulary."""
KEPT_BYTES: Final = 2**28
"""Size of the rows that are kept for later requests (chosen)."""
WAITING: Final = 64
"""Pictures that may wait for the encoder (chosen)."""
_NO_TOKEN: Final = -1
INPUT_IDS: Final = "input_ids"


@dataclass(frozen=True, slots=True)
class ImageMarks:
    """`placeholder`: what the model's chat template writes where an image belongs. `token`: the model's image token,
    whose place in a prompt a row takes. `together`: rows that follow each other see each other."""

    placeholder: str
    token: int
    together: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PlacedImage:
    """An encoded image with the tokens of its rows, which count up from `first`."""

    first: int
    encoded: EncodedImage
    marks: ImageMarks

    @property
    def tokens(self) -> range:
        """One token for each row."""
        return range(self.first, self.first + len(self.encoded.rows))


def is_image(token: int) -> bool:
    """Return whether a token stands for a row of an image."""
    return token >= FIRST_TOKEN


def seen_together(prompt: Sequence[int], images: Sequence[PlacedImage]) -> tuple[tuple[int, int], ...]:
    """Return the ranges (start, end) of a prompt whose positions see each other: rows without text between them."""
    if not any(image.marks.together for image in images):
        return ()
    places = [position for position, token in enumerate(prompt) if is_image(token)]
    starts = [one for before, one in itertools.pairwise((-2, *places)) if one != before + 1]
    ends = [one + 1 for one, behind in itertools.pairwise((*places, len(prompt) + 1)) if behind != one + 1]
    return tuple(zip(starts, ends, strict=True))


class ImageReader:
    """`encode` turns a picture's bytes into rows; it blocks. `marks`: how prompts of the model name images."""

    def __init__(self, encode: Callable[[bytes], EncodedImage], marks: ImageMarks) -> None:
        self._marks = marks
        self._encode = encode
        self._following = FIRST_TOKEN
        self._kept: OrderedDict[tuple[str, bytes], PlacedImage] = OrderedDict()
        self._kept_bytes = 0
        self._waiting = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="images")

    async def read(self, data: bytes, scope: str) -> PlacedImage:
        """Return a picture's rows. Those of one `scope` share what is kept, so that the time reveals nothing across
        scopes. Raises `UsageError` for bytes that are no picture, and if too many wait; `ModelError`."""
        key = scope, hashlib.sha256(data).digest()
        if (found := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return found
        if self._waiting >= WAITING:
            raise UsageError(f"{WAITING} images wait to be read already.", hint="Try again in a few seconds.")
        self._waiting += 1
        try:
            encoded = await asyncio.get_running_loop().run_in_executor(self._thread, self._encode, data)
        finally:
            self._waiting -= 1
        if (found := self._kept.get(key)) is not None:  # the same picture came twice at a time
            return found
        placed = PlacedImage(self._following, encoded, self._marks)
        self._following += len(encoded.rows)
        self._keep(key, placed)
        return placed

    def _keep(self, key: tuple[str, bytes], placed: PlacedImage) -> None:
        self._kept[key] = placed
        self._kept_bytes += placed.encoded.rows.nbytes
        while self._kept_bytes > KEPT_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= oldest.encoded.rows.nbytes

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _Text:
    """A session's images. `axes`: [prompt, 3], the positions of its tokens; `ahead`: by how much positions after the
    prompt differ from their numbers."""

    images: tuple[PlacedImage, ...]
    axes: NDArray[np.int64]
    ahead: int


class ImageFeed:
    """Turns the tokens of passes into the inputs of the first stage."""

    def __init__(self, graph: Graph) -> None:
        """`graph`: the served graph, whose inputs say whether it takes images."""
        self._widths = {
            name: int(graph.values[name].shape[-1]) for name in (IMAGE_ROWS, LAYER_ROWS) if name in graph.inputs
        }
        self._has_axes = AXIS_POSITIONS in graph.inputs
        self._texts: dict[int, _Text] = {}

    def begin(self, session: int, prompt: Sequence[int], images: Sequence[PlacedImage]) -> None:
        """Remember the images of a session."""
        if images:
            axes, ahead = _axes(prompt, images)
            self._texts[session] = _Text(tuple(sorted(images, key=lambda image: image.first)), axes, ahead)

    def end(self, session: int) -> None:
        """Forget a session."""
        self._texts.pop(session, None)

    def tensors(self, segments: Sequence[Segment], tokens: Sequence[int]) -> dict[str, HostTensor]:
        """Return the inputs for tokens packed in the order of `segments`. Raises `ExecutionError` for a row of an image
        whose session is over."""
        ids = np.array(tokens, np.int64)
        if not self._widths:
            return {INPUT_IDS: host_tensor("int64", (1, len(ids)), ids.data)}
        rows = {name: np.zeros((len(ids), width), np.float32) for name, width in self._widths.items()}
        done = 0
        for segment in segments:
            here = slice(done, done + segment.length)
            self._fill(segment.session, ids[here], {name: part[here] for name, part in rows.items()})
            done += segment.length
        made = {name: host_tensor("float32", (1, *part.shape), part.data) for name, part in rows.items()}
        made[INPUT_IDS] = host_tensor("int64", (1, len(ids)), np.where(ids >= FIRST_TOKEN, _NO_TOKEN, ids).data)
        if self._has_axes:
            axes = np.concatenate([self._positions(segment) for segment in segments])
            made[AXIS_POSITIONS] = host_tensor("int64", (1, *axes.shape), axes.data)
        return made

    def _fill(self, session: int, ids: NDArray[np.int64], rows: Mapping[str, NDArray[np.float32]]) -> None:
        places = np.flatnonzero(ids >= FIRST_TOKEN)
        text = self._texts.get(session)
        if not len(places):
            return
        if text is None:
            raise ExecutionError(f"the images of session {session} are no longer here.")
        starts = np.array([image.first for image in text.images])
        which = np.searchsorted(starts, ids[places], side="right") - 1
        for number in np.unique(which):
            chosen = places[which == number]
            encoded, offsets = text.images[number].encoded, ids[chosen] - starts[number]
            rows[IMAGE_ROWS][chosen] = encoded.rows[offsets]
            if encoded.layer_rows is not None:
                rows[LAYER_ROWS][chosen] = encoded.layer_rows[offsets]

    def _positions(self, segment: Segment) -> NDArray[np.int64]:
        numbers = np.arange(segment.start, segment.start + segment.length)
        text = self._texts.get(segment.session)
        if text is None:
            return np.repeat(numbers[:, None], 3, axis=1)
        later = np.repeat(numbers[:, None] + text.ahead, 3, axis=1)
        inside = numbers < len(text.axes)
        later[inside] = text.axes[numbers[inside]]
        return later


def _axes(prompt: Sequence[int], images: Sequence[PlacedImage]) -> tuple[NDArray[np.int64], int]:
    """Return the positions of a prompt's tokens in time, height and width, and by how much those after it differ from
    their numbers."""
    from fusionai.capture.models.images import axis_positions  # loads a framework, which --help must not

    rows = {token: (image.encoded, row) for image in images for row, token in enumerate(image.tokens)}
    axes, following = axis_positions(rows.get(token) for token in prompt)
    return axes, following - len(prompt)


def with_texts(pieces: Sequence[tuple[str, bool]], images: Sequence[PlacedImage]) -> list[tuple[str, bool]]:
    """Return the pieces (text, trusted) of a prompt in which placeholders, which only trusted pieces have, have become
    the texts of the images, in order. Raises `UsageError` if there are more or fewer."""
    if not images:
        return list(pieces)
    placeholder = images[0].marks.placeholder
    count = sum(text.count(placeholder) for text, trusted in pieces if trusted)
    if count != len(images):
        raise UsageError(
            f"the conversation has {len(images)} images, and the model's chat template makes {count} places for them.",
            hint="Put images into messages of the user; the template may ignore them elsewhere.",
        )
    following = iter(images)
    return [
        (re.sub(re.escape(placeholder), lambda _: next(following).encoded.text, text) if trusted else text, trusted)
        for text, trusted in pieces
    ]


def with_rows(tokens: Sequence[int], images: Sequence[PlacedImage]) -> tuple[int, ...]:
    """Return a prompt in which the model's image token has become the tokens of the images' rows, in order. Raises
    `UsageError` if there are more or fewer."""
    if not images:
        return tuple(tokens)
    token = images[0].marks.token
    rows = itertools.chain.from_iterable(image.tokens for image in images)
    places, count = tokens.count(token), sum(len(image.tokens) for image in images)
    if places != count:
        raise UsageError(
            f"the prompt has {places} places for rows of images, which have {count}.",
            hint="The model's chat template, processor and tokenizer do not fit together.",
        )
    return tuple(next(rows) if one == token else one for one in tokens)
