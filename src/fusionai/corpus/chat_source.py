"""Input for fine-tuning on conversations: rows of tokens with labels where an answer stands.

A row has one conversation or, with packing, several whole ones, then padding. A causal model never attends to later
positions, so padding changes nothing; but a packed conversation does attend to those before it in its row. Access is
random, like `source.TokenSource`. `chat_file` has the tokens."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from fusionai.corpus.chat_file import ChatFile, ChatManifest, ChatPart
from fusionai.corpus.order import IGNORED, SampledSource, packed
from fusionai.corpus.recipe import Recipe
from fusionai.corpus.tables import ChatData
from fusionai.corpus.tokens import CorpusTokenizer
from fusionai.primitives.errors import DataError
from fusionai.primitives.tensors import HostTensor, host_tensor

PADDING: Final = 0
"""Any token would do, because no position attends to it and it is no label."""


class ChatSource(SampledSource):
    """Inputs `input_ids`, `position_ids`, `labels`, int64 [rows, length], and `labels_per_microbatch`, float32: the
    mean number of labels in a microbatch of the step, so that every label has the same weight."""

    def __init__(self, recipe: Recipe, data: ChatData, file: ChatFile) -> None:
        """Raises `DataError` if a part has too few rows."""
        self._file = file
        self._length = data.sequence_length
        self._train = _Rows(file.train, self._length, packing=data.packing)
        self._evaluation = _Rows(file.evaluation, self._length, packing=data.packing)
        if not self._train.count:
            why = "; ".join(_left_out(file, self._length))
            raise DataError(
                f"the training part of the data has no conversation with an answer{f': {why}' if why else ''}."
            )
        super().__init__(
            recipe, samples=self._train.count, evaluation_samples=self._evaluation.count, shuffle=data.shuffle
        )
        self._microbatches = recipe.train.microbatches
        self._labels_of_step = lru_cache(maxsize=8)(self._count_labels)
        self._evaluation_labels = sum(
            int(self._evaluation.labels[self._evaluation_of(index)].sum()) for index in range(self.evaluation_batches)
        )

    @property
    def tokenizer(self) -> CorpusTokenizer:
        return self._file.tokenizer

    @property
    def fingerprint(self) -> str:
        return self._file.manifest.written.fingerprint

    def microbatch(self, step: int, microbatch: int) -> dict[str, HostTensor]:
        step = self._deal.step(step)
        rows = self._order.microbatch(step, microbatch)
        return self._batch(self._train, rows, self._labels_of_step(step) / self._microbatches)

    def evaluation(self, index: int) -> dict[str, HostTensor]:
        mean = self._evaluation_labels / self._evaluation_batches
        return self._batch(self._evaluation, self._evaluation_of(index), mean)

    def describe(self) -> str:
        train, evaluation = self._file.manifest.written.train, self._file.manifest.written.evaluation
        return (
            f"{train.conversations} conversations with {train.tokens} tokens in {self._train.count} rows of "
            f"{self._length}, {train.labels} tokens trained on, {evaluation.conversations} conversations for "
            f"evaluation, vocabulary {self.tokenizer.vocabulary}"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the job owner on rows that were left out or cut; they contain no text of the data."""
        manifest = self._file.manifest
        notes: list[str] = []
        if manifest.plain:
            notes.append(
                "the tokenizer has no chat template: training and serving will write conversations as `role: text`; "
                "give a template with [data] template"
            )
        if manifest.bad_rows:
            notes.append(
                f"warning: {manifest.bad_rows} of {manifest.rows} rows are invalid and left out; they are listed in "
                f"{self._file.bad_rows}"
            )
            notes += [f"warning: {row.place}: {row.problem}" for row in manifest.first_bad]
        notes += [f"warning: {sentence}" for sentence in _left_out(self._file, self._length)]
        return tuple(notes)

    @property
    def manifest(self) -> ChatManifest:
        """Counts of what was read, left out and cut."""
        return self._file.manifest

    @property
    def bad_rows_file(self) -> Path:
        """The list of invalid rows, if there are any."""
        return self._file.bad_rows

    def row_tokens(self, step: int, microbatch: int) -> list[int]:
        """Number of tokens before the padding, for each row of the microbatch."""
        rows = self._order.microbatch(self._deal.step(step), microbatch)
        return [int(self._train.tokens[row]) for row in rows]

    def _count_labels(self, step: int) -> int:
        """Number of labels in a step, which is numbered over all replicas."""
        rows = [row for number in range(self._microbatches) for row in self._order.microbatch(step, number)]
        return int(self._train.labels[rows].sum())

    def _batch(self, part: _Rows, rows: list[int], mean_labels: float) -> dict[str, HostTensor]:
        ids = np.full((len(rows), self._length), PADDING, dtype="<i8")
        labels = np.full_like(ids, IGNORED)
        for at, row in enumerate(rows):
            part.fill(row, ids[at], labels[at])
        positions = np.ascontiguousarray(np.broadcast_to(np.arange(self._length, dtype="<i8"), ids.shape))
        count = np.asarray(mean_labels, dtype="<f4")
        return {
            "input_ids": host_tensor("int64", ids.shape, ids.data),
            "position_ids": host_tensor("int64", ids.shape, positions.data),
            "labels": host_tensor("int64", ids.shape, labels.data),
            "labels_per_microbatch": host_tensor("float32", (), count.tobytes()),
        }


def _left_out(file: ChatFile, length: int) -> list[str]:
    """Sentences on long conversations that were cut or left out."""
    written = file.manifest.written
    counts = (
        (written.truncated, f"conversations are longer than {length} tokens and were cut there"),
        (written.dropped, f"conversations are longer than {length} tokens and were left out"),
        (written.unanswered, f"conversations have no answer within {length} tokens and were left out"),
    )
    return [f"{count} {what}" for count, what in counts if count]


class _Rows:
    """The rows of one part. `labels`, `tokens`: number of each per row, without padding."""

    def __init__(self, part: ChatPart, length: int, *, packing: bool) -> None:
        self._part = part
        starts = np.concatenate([np.zeros(1, dtype="<i8"), part.ends])
        self._starts: npt.NDArray[np.int64] = starts
        totals = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(part.labels, dtype=np.int64)])
        counts = totals[part.ends] - totals[starts[:-1]]
        self._packed = packed(np.diff(starts), length) if packing else None
        if self._packed is None:
            self.labels, self.tokens = counts, np.diff(starts)
        else:
            lengths = np.diff(starts)
            self.labels = np.asarray([int(counts[row].sum()) for row in self._packed], dtype=np.int64)
            self.tokens = np.asarray([int(lengths[row].sum()) for row in self._packed], dtype=np.int64)
        self.count = len(self.labels)

    def fill(self, row: int, ids: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]) -> None:
        """Write the row's tokens and labels: `labels[i]` is the token after `ids[i]` if that token is trained."""
        at = 0
        for conversation in (row,) if self._packed is None else self._packed[row]:
            start, end = int(self._starts[conversation]), int(self._starts[conversation + 1])
            tokens = self._part.tokens[start:end].astype(np.int64)
            ids[at : at + len(tokens)] = tokens
            trained = self._part.labels[start + 1 : end] == 1
            labels[at : at + len(tokens) - 1] = np.where(trained, tokens[1:], IGNORED)
            at += len(tokens)
