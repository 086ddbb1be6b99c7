"""The first rows of a job's data as text, marked where the model is trained, for `fusion data`.

This is text of the data, meant only for its owner's terminal. Neighbours: `source` opens the data, `cli.data` prints.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, islice

import numpy as np
import numpy.typing as npt

from fusionai.corpus.chat_source import ChatSource
from fusionai.corpus.masking import IGNORED
from fusionai.corpus.recipe import Recipe
from fusionai.corpus.source import TokenSource
from fusionai.corpus.tables import TextData
from fusionai.corpus.tokenizer import Tokenizer
from fusionai.primitives.tensors import HostTensor


@dataclass(frozen=True, slots=True)
class RowPreview:
    """`pieces`: (text, whether its tokens are labels), in order, without padding. `tokens`: number of tokens; `labels`:
    number of labels."""

    pieces: tuple[tuple[str, bool], ...]
    tokens: int
    labels: int


def preview(recipe: Recipe, source: TokenSource | ChatSource, rows: int) -> list[RowPreview]:
    """Return the first `rows` rows, from the first steps."""
    masked = isinstance(recipe.data, TextData) and recipe.data.mask_fraction is not None
    shown: list[RowPreview] = []
    for number in range(rows):
        step, microbatch = divmod(number, recipe.train.microbatches)
        batch = source.microbatch(step, microbatch)
        ids, labels = (_array(batch[name]) for name in ("input_ids", "labels"))
        lengths = [ids.shape[1]] * len(ids) if isinstance(source, TokenSource) else source.row_tokens(step, microbatch)
        for row, said, length in islice(zip(ids, labels, lengths, strict=True), rows - len(shown)):
            # In a causal model the label of a position is the token after it.
            tokens, told = (np.where(said == IGNORED, row, said), said) if masked else (row, _after(said))
            shown.append(_row(source.tokenizer, tokens[:length], told[:length] != IGNORED))
        if len(shown) == rows:
            break
    return shown


def _after(labels: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    moved = np.full_like(labels, IGNORED)
    moved[1:] = labels[:-1]
    return moved


def _row(tokenizer: Tokenizer, tokens: npt.NDArray[np.int64], told: npt.NDArray[np.bool_]) -> RowPreview:
    marked = zip(tokens.tolist(), told.tolist(), strict=True)
    pieces = tuple(
        (tokenizer.spell([token for token, _ in run]), said) for said, run in groupby(marked, key=lambda one: one[1])
    )
    return RowPreview(pieces, len(tokens), int(told.sum()))


def _array(tensor: HostTensor) -> npt.NDArray[np.int64]:
    return np.frombuffer(tensor.data, "<i8").reshape(tensor.shape)
